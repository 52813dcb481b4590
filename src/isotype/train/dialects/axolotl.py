"""Translates axolotl's names for the method, the rows and the intervals, because tables.yaml cannot translate them."""

from isotype.data.methods import METHODS
from isotype.train.dialects.reader import FRAME, Reader, Rows, same_roles, tables, use_rows

_CUT = "not done; rows that are too long are cut, not dropped"
_PLUGINS = ("CutCrossEntropyPlugin", "LigerPlugin", "KernelsPlugin", "SwanLabPlugin", "LMEvalPlugin")


def method_of(reader: Reader) -> str | None:
    """Return the training method of the file; None if isotype lacks the method."""
    rl, methods = reader.get("rl"), tables()["axolotl"]["methods"]
    if reader.get("process_reward_model"):
        reader.refuse("process_reward_model", "a reward model that scores whole answers", "isotype reward")
        return None
    if rl is not None and str(rl) not in methods:
        reader.refuse(
            "rl", f"one of {', '.join(methods)}", "choose one of these values, because isotype has no other"
        )
        return None
    supervised = "reward" if reader.get("reward_model") else "sft"
    return supervised if rl is None else str(methods[str(rl)])


def topics(reader: Reader) -> None:
    whole = reader.typed("batch_size", "a number above 0", None)
    micro = reader.typed("micro_batch_size", "a number above 0", 1)
    if whole and not reader.get("gradient_accumulation_steps"):
        reader.use("batch_size", gradient_accumulation_steps=max(1, int(whole // micro)))
    reader.note("no effect with gradient_accumulation_steps", "batch_size")
    if isinstance(more := reader.get("optim_args"), dict):
        reader.use("optim_args", optim_args=",".join(f"{name}={value}" for name, value in more.items()))
    for plugin in reader.typed("plugins", "a list", []):
        if str(plugin).rpartition(".")[2] not in _PLUGINS:
            fix = "remove it from the list to train without it"
            reader.refuse(f"plugins: {plugin}", "no other plugin: isotype runs only its own code", fix)
    _intervals(reader)
    _rows(reader)
    reader.use("rl reward_model process_reward_model")


def _intervals(reader: Reader) -> None:
    every = reader.get("save_steps") or _share_of_steps(reader, "saves_per_epoch")
    steps = {"save_strategy": "steps", "save_steps": every}
    reader.use(
        "save_steps saves_per_epoch save_strategy",
        **steps if every else {"save_strategy": reader.get("save_strategy", "epoch")},
    )
    names = "eval_steps evals_per_epoch eval_strategy evaluation_strategy"
    if share := reader.typed("val_set_size", "a number above 0", None):
        every = reader.get("eval_steps") or _share_of_steps(reader, "evals_per_epoch")
        strategy = reader.get("eval_strategy", reader.get("evaluation_strategy"))
        steps = {"eval_steps": every}  # `steps` is the default strategy with --eval_split
        reader.use(names, **steps if every and strategy != "no" else {"eval_strategy": strategy or "epoch"})
        reader.use("val_set_size", eval_split=share)
    reader.note("no effect: no rows are held back", names)
    reader.use("val_set_size")


def _share_of_steps(reader: Reader, name: str) -> float | None:
    """Return the interval in `name` (times per epoch) as a share of all steps; None if it is all steps or more."""
    often = reader.typed(name, "a number above 0", None)
    epochs = reader.typed("num_epochs", "a number above 0", 1)
    share = 1 / (often * epochs) if often else 1
    return share if share < 1 else None


def _rows(reader: Reader) -> None:
    rows: list[Rows] = []
    for key in ("datasets", "pretraining_dataset"):
        entries = reader.get(key, [])
        for at, entry in enumerate(entries if isinstance(entries, list) else [entries]):
            content = entry if isinstance(entry, dict) else {"path": entry}
            inner = Reader.of("axolotl_rows", content, reader.method, reader.folder)
            rows += _data_set(inner)
            reader.absorb(inner, f"{key}[{at}].")
    use_rows(reader, "datasets pretraining_dataset", rows, "train_on_inputs")
    drops = reader.get("excess_length_strategy", "drop") != "truncate"
    if drops and "sequence_len" in reader.given and any(row.kind != "text" for row in rows):
        reader.notes[_CUT] = ["sequence_len"]
    packs, endless = reader.get("sample_packing"), reader.get("pretraining_dataset")
    if {row.kind for row in rows} == {"text"} and (packs or endless):
        reader.use("sample_packing", packing=True, packing_strategy="bfd_split" if packs else "wrapped")
    if endless or reader.get("streaming"):
        reader.use("streaming", **{"streaming" if "datasets" in reader.values else "dataset_streaming": True})
    reader.use("streaming")


def _data_set(inner: Reader) -> list[Rows]:
    kind, path, method = inner.get("type"), inner.typed("path", "text", None), inner.method
    texts, chats = (tables()[kinds].get(method, "").split() for kinds in ("texts", "chats"))
    if kind in texts:
        shape, columns = "text", {"text": [inner.get("field", inner.get("text_column", "text"))]}
    elif kind in chats:
        shape, columns = "chat", _chat(inner, str(kind))
    else:
        shape, columns = "turns", _turns(inner, str(kind))
    if not columns or path is None:
        known = (
            ", ".join((*texts, *chats, *tables()["types"][method]))
            or "none (axolotl's types for this method are names of functions, which isotype does not run)"
        )
        fix = "write the rows with isotype's columns (docs/training.md, Data), and set --dataset_name"
        what = "type" if "type" in inner.given else f"type: {kind}"
        inner.refuse(what, f"a path, and one of these types of rows: {known}", fix)
    inner.apply_rules()
    inner.finish()
    more = inner.get("name"), inner.typed("split", "text", "train"), inner.get("data_files")
    return [Rows(path, shape, columns, *more)] if columns and path else []


def _turns(inner: Reader, kind: str) -> dict[str, list[str]]:
    """Return the prompt and answer columns of the row type `kind`, or an empty dictionary if the type is unknown."""
    fields = tables()["fields"][inner.method].split()
    if any(name.startswith("type.field_") for name in inner.given):
        named = {name: [inner.get(f"type.field_{name}", name)] for name in fields}
        inner.use(" ".join(f"type.field_{name}" for name in fields))
        if inner.method != "sft":
            return named
        return {"prompt": named["instruction"] + named["input"], "completion": named["output"]}
    types = tables()["types"][inner.method]
    columns: dict[str, list[str]] | None
    columns = types.get(kind) or types.get(kind.rpartition(".")[2]) or types.get(kind.partition(":")[0])
    if columns and inner.method == "sft":
        inner.notes[FRAME] = ["type"]
    return columns or {}


def _chat(inner: Reader, kind: str) -> dict[str, list[str]]:
    keys = inner.typed("message_property_mappings", "names with values", {})
    role, content = (keys.get(name, inner.get(f"message_field_{name}", name)) for name in ("role", "content"))
    if (role, content) not in (("role", "content"), ("from", "value")):
        expected = "messages of {role, content} or {from, value}"
        inner.refuse(f"message_property_mappings: {role}, {content}", expected, "rename them in the rows")
    if not same_roles(inner.typed("roles", "names with values", {})):
        expected = "names that isotype reads as these roles (docs/training.md, Data)"
        inner.refuse("roles", expected, "rename them in the rows")
    inner.use("message_property_mappings message_field_role message_field_content roles")
    messages = [inner.get("field_messages", "conversations" if kind == "sharegpt" else "messages")]
    if METHODS[inner.method].loss == "preference":
        return {
            "prompt": messages,
            **{name: [inner.get(f"field_{name}", name)] for name in ("chosen", "rejected")},
        }
    return {"messages": messages, "tools": [inner.get("field_tools", "tools")]}
