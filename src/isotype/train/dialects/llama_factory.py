"""Translates LLaMA-Factory's stage and the data sets in dataset_info.json, because tables.yaml cannot translate them."""

import json
from pathlib import Path
from typing import Any

from isotype.data.methods import METHODS
from isotype.train.dialects.reader import NOT_HERE, Reader, Rows, same_roles, tables, use_rows

_JOINED = "not done; a line break between instruction and input becomes an empty line"
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_TAGS = {"user": "user_tag", "assistant": "assistant_tag", "tool": "observation_tag", "system": "system_tag"}
_OF_ROWS = "dataset dataset_dir max_samples"
_FIX = "write the rows with isotype's columns (docs/training.md, Data), and set --dataset_name"


def method_of(reader: Reader) -> str | None:
    """Return the training method of the file, or None if isotype lacks the stage."""
    stage, methods = str(reader.get("stage", "sft")), tables()["llama_factory"]["methods"]
    if stage not in methods:
        fix = "to train with rewards, write a file with the argument names of isotype grpo or isotype rloo"
        reader.refuse("stage", f"one of {', '.join(methods)}", fix)
        return None
    return str(methods[stage])


def topics(reader: Reader) -> None:
    for name, ours in (("lora_target", "lora_target_modules"), ("additional_target", "lora_modules_to_save")):
        if "," in str(listed := reader.get(name, "")) and not isinstance(listed, list):
            reader.use(name, **{ours: [module.strip() for module in listed.split(",")]})
    decided = reader.get("adapter_name_or_path") or reader.get("lora_alpha")
    if reader.values.get("use_peft") and not decided:
        reader.values["lora_alpha"] = 2 * reader.typed("lora_rank", "a number above 0", 8)
    if "," in str(reader.get("adapter_name_or_path", "")):
        expected, fix = "one adapter to train further", "first merge the other adapters: isotype merge"
        reader.refuse("adapter_name_or_path", expected, fix)
    from isotype.train.launched import deepspeed_config, value_in  # imports torch

    config, _ = deepspeed_config(reader.get("deepspeed"))
    if reader.get("pure_bf16") and value_in(config, "zero_optimization.stage") == 3:
        what = "pure_bf16: true, with ZeRO-3 in the DeepSpeed config"
        reader.refuse(
            what, "one of the two, because LLaMA-Factory does not accept both together", "bf16: true"
        )
    _rows(reader)
    reader.use("stage")


def _rows(reader: Reader) -> None:
    names = reader.get("dataset", [])
    names = names.split(",") if isinstance(names, str) else reader.typed("dataset", "a list", [])
    names = [str(name).strip() for name in names]
    info, root = _info(reader, names) if names else (None, Path())
    rows = [row for name in names if info for row in _data_set(reader, name, info.get(name), root)]
    use_rows(reader, _OF_ROWS, rows, "train_on_prompt")
    if reader.get("streaming"):
        reader.use("streaming", **{"streaming" if "datasets" in reader.values else "dataset_streaming": True})
    parts = {"language_model": "language", "multi_modal_projector": "projector", "vision_tower": "vision"}
    frozen = [part for part in parts if reader.given.get(f"freeze_{part}", part != "language_model")]
    pictures = reader.get("image_max_pixels") or any("images" in row.columns for row in rows)
    if frozen and (pictures or any(f"freeze_{part}" in reader.given for part in parts)):
        reader.values["adapt"] = ",".join(ours for part, ours in parts.items() if part not in frozen)
        if len(frozen) == len(parts):
            fix = "set one of them to false"
            reader.refuse(", ".join(f"freeze_{part}: true" for part in frozen), "a part to train", fix)
    reader.use(" ".join(f"freeze_{part}" for part in parts))


def _info(reader: Reader, names: list[str]) -> tuple[dict[str, Any] | None, Path]:
    """Return the content and folder of dataset_info.json, or (None, folder) if the file cannot be read.

    A relative `dataset_dir` is looked up in the working directory, and then in the folder of the translated file.
    """
    where = reader.get("dataset_dir", "data")
    if isinstance(where, dict):
        return where, Path()
    where = reader.typed("dataset_dir", "text", "data")
    if where == "ONLINE":
        return {name: {"hf_hub_url": name} for name in names}, Path()
    for root in (Path(where), reader.folder / where):
        file = root / "dataset_info.json"
        try:
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except OSError:
            continue
        except ValueError as error:
            reader.refuse(f"dataset_dir: {file}: {error}", "JSON", "correct that line")
            return None, root
        return content, root
    fix = "set dataset_dir in the file, or remove dataset from the file and give --dataset_name and --columns"
    file = Path(where) / "dataset_info.json"
    if reader.trains:
        reader.refuse("dataset", f"{file}, which describes the data sets", fix)
    reader.note(NOT_HERE.format(file), _OF_ROWS)
    return None, Path()


def _data_set(reader: Reader, name: str, about: Any, root: Path) -> list[Rows]:
    where, info = f"dataset: {name}", root / "dataset_info.json"
    if not isinstance(about, dict):
        reader.refuse(where, f"a data set of {info}", "correct the name, or add it to that file")
        return []
    path = about.get("hf_hub_url") or (str(root / about["file_name"]) if "file_name" in about else None)
    columns, tags = about.get("columns", _COLUMNS), about.get("tags", {})
    shared = about.get("formatting", "alpaca") != "alpaca"
    mapped = _columns(reader, columns, shared, bool(about.get("ranking")))
    unsupported = ("videos", "audios", *(() if shared else ("system", "history")))
    unread = [column for column in unsupported if columns.get(column)]
    keys = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    if path is None or about.get("folder"):
        expected = f"hf_hub_url or file_name, and no folder, for this data set in {info}"
        reader.refuse(where, expected, "download the data set, and set file_name to its file")
    elif mapped is None or unread:
        content = "conversations" if shared else "prompts and answers"
        content = f"columns {', '.join(unread)}" if unread else content
        reader.refuse(f"{where}: {content}", f"rows that isotype {reader.method} reads", _FIX)
    elif shared and not (
        keys in (("from", "value"), ("role", "content"))
        and same_roles({role: tags[tag] for role, tag in _TAGS.items() if tag in tags})
    ):
        expected = "tags with names that isotype reads (docs/training.md, Data)"
        reader.refuse(f"{where}: tags {tags}", expected, _FIX)
    else:
        counts = about.get("num_samples"), reader.typed("max_samples", "a number above 0", None)
        most = [count for count in counts if count]
        split = about.get("split", "train") + (f"[:{min(most)}]" if most else "")
        kind = "text" if "text" in mapped else "chat" if shared else "turns"
        if len(mapped.get("prompt", ())) > 1:
            reader.notes[_JOINED] = ["dataset"]
        return [Rows(path, kind, mapped, about.get("subset"), split)]
    return []


def _columns(
    reader: Reader, columns: dict[str, str], shared: bool, ranking: bool
) -> dict[str, list[str]] | None:
    """Return {isotype's column: columns of the data set}, or None if the method cannot train on these columns."""

    def of(*names: str) -> list[str]:
        return [columns[name] for name in names if columns.get(name)]

    loss, asked = METHODS[reader.method].loss, of("messages") if shared else of("prompt", "query")
    paired = loss in ("preference", "reward")
    if reader.get("stage") == "pt":
        return {"text": of("prompt")} if of("prompt") else None
    if paired:
        result = {"prompt": asked, "chosen": of("chosen"), "rejected": of("rejected")}
    else:
        result = {"messages": asked} if shared else {"prompt": asked, "completion": of("response")}
    if loss == "unpaired":
        result["label"] = of("kto_tag")
    result |= {name: of(name) for name in ("tools", "images", "system") if of(name)}
    return result if all(result.values()) and ranking == paired else None
