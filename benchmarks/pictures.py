"""What `isotype check` foresees of training commands whose rows have pictures beside what they take: tokens of a row and memory.

Each family has a random model of tens of MiB a step and its own processor; a data set of pictures of several sizes and questions is checked
and trained on by `sft`: *real* tokens are those of the longest row as the processor makes it, *real* memory is what
`benchmarks/foreseen.py` measures. The parts of a family are adapted all or the language model alone. Of five families the rows are
trained on with rows of text among them, too; rows with pictures are not packed (`isotype` refuses it, as TRL does).

Run: python benchmarks/pictures.py [--only gemma3 …] [--kinds]. Families whose processors take torchvision need that. Ends with 1 where one
is not within 5 %.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import results
from foreseen import NEAR, foreseen, prepare, real
from results import parsed

FAMILIES = (
    "gemma3",
    "llava",
    "llava_next",
    "idefics3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "internvl",
    "mistral3",
)
SETTINGS = (
    ("float32", "none", "all", 0),
    ("bfloat16", "nf4", "language", 0),
    ("bfloat16", "nf4", "language", 2),
)
"""(dtype, storage, adapted parts, rows of text among those with pictures)."""
MIXED = ("gemma3", "llava", "idefics3", "qwen2_5_vl", "mistral3")
"""Families with rows of text among those with pictures."""
ROWS = 2
SIDE = 128

_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
}
_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": SIDE,
}
_QWEN: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "depth": 4,
    "num_heads": 4,
    "out_hidden_size": 128,
}
_PINPOINTS = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
_HEADS = {"head_dim": 32}
_SQUARE = {"size": {"height": SIDE, "width": SIDE}}
_CROP = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
_ANY: dict[str, Any] = {
    "patch_size": 8,
    "merge_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 512 * 512},
}


def _mrope() -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}


LARGER: Mapping[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({**_TEXT, **_HEADS}, _VISION, {"mm_tokens_per_image": 64}, {"image": _SQUARE, "arguments": {"image_seq_length": 64}}),
    "llava": (_TEXT, _VISION, {}, {"image": _CROP}),
    "llava_next": (_TEXT, _VISION, {"image_grid_pinpoints": _PINPOINTS}, {"image": {**_CROP, "image_grid_pinpoints": _PINPOINTS}}),
    "idefics3": (_TEXT, _VISION, {}, {
        "image": {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}, "arguments": {"image_seq_len": 64}}),
    "qwen2_vl": ({**_TEXT, **_mrope()}, {**_QWEN, "hidden_size": 128, "embed_dim": 64}, {}, {"image": _ANY}),
    "qwen2_5_vl": ({**_TEXT, **_mrope()}, {**_QWEN, "window_size": 64, "fullatt_block_indexes": [3]}, {}, {"image": _ANY}),
    "qwen3_vl": (_TEXT, {**_QWEN, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 256}, {}, {"image": _ANY}),
    "internvl": (_TEXT, {**_VISION, "image_size": [SIDE, SIDE]}, {"image_seq_length": 64}, {
        "image": {**_SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}, "arguments": {"image_seq_length": 64}}),
    "mistral3": (_TEXT, {**_VISION, "head_dim": 16, "image_size": 4 * SIDE}, {}, {
        "image": {"patch_size": 16, "size": {"longest_edge": 4 * SIDE}}}),
}  # fmt: skip
"""Family -> (text config, vision config, config, its processor's parts) over those of tests/zoo/processors.py."""


def save_model(name: str, folder: Path) -> None:
    """A random model and its processor."""
    from dataclasses import replace

    import torch
    import transformers
    from tests.zoo import processors
    from tests.zoo.shrink import tiny_config
    from tests.zoo.vision import MODELS

    text, vision, whole, parts = LARGER[name]
    known = MODELS[name].settings
    nested = {
        "text_config": {**dict(known.get("text_config", {})), **text},
        "vision_config": {**dict(known.get("vision_config", {})), **vision},
    }
    torch.manual_seed(0)
    config = tiny_config(name, {**known, **whole, **nested})
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    processors.FAMILIES[name] = replace(processors.FAMILIES[name], **parts)
    processors.tiny_processor(name).save_pretrained(folder)


def save_rows(folder: Path, texts: int = 0) -> None:
    """Save rows of two pictures: two batches in a row have nothing else, wherever `texts` rows of text stand in an order."""
    from tests.zoo.processors import picture

    folder.mkdir()
    lines = []
    for number in range(2 * ROWS * (texts + 1) - texts):
        names = []
        for place, (width, height) in enumerate([(300, 200), (160, 240)]):
            names.append(f"{number}-{place}.png")
            picture(width, height, seed=number).save(folder / names[-1])
        question = [
            *[{"type": "image"}] * 2,
            {"type": "text", "text": " ".join(f"w{each}" for each in range(20))},
        ]
        answer = " ".join(f"w{each}" for each in range(20, 40))
        turns = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        lines.append(json.dumps({"messages": turns, "images": names}))
    for _ in range(texts):
        turns = [{"role": role, "content": "w1 " * 40} for role in ("user", "assistant")]
        lines.append(json.dumps({"messages": turns}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def tokens_of(folder: Path, data: Path) -> int:
    """Of the longest row, as the processor makes it."""
    import transformers
    from PIL import Image

    from isotype.train.rows.collators import Pictured

    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    rows = [{**row, "images": [Image.open(data / name) for name in row.get("images", ())]} for row in rows]
    return int(Pictured(transformers.AutoProcessor.from_pretrained(folder))(rows)["input_ids"].shape[1])


def measure(name: str, dtype: str, storage: str, parts: str, texts: int) -> dict[str, Any]:
    """Foreseen and real tokens and bytes, in this process."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save_model(name, root / "model")
        save_rows(root / "data", texts)
        os.chdir(root)
        words = [
            "sft", "--model_name_or_path", root / "model", "--dataset_name", root / "data", "--output_dir", root / "out",
            "--dtype", dtype, "--device", "cpu", "--per_device_train_batch_size", ROWS, "--num_train_epochs", 1, "--adapt", parts,
            "--gradient_checkpointing", "False", "--save_strategy", "no", "--report_to", "none", "--learning_rate", 1e-4,
        ]  # fmt: skip
        command = list(map(str, [*words, *(["--quantization", storage] if storage != "none" else [])]))
        ahead = foreseen(command)
        tokens = tokens_of(root / "model", root / "data")
        return {**real(command), **ahead, "tokens": tokens}


def _serve(pipe: Any, case: tuple[str, str, str, str, int]) -> None:
    pipe.send(measure(*case))
    pipe.close()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--kinds", action="store_true", help="print what the foreseen peaks are made of")
    options = parsed(parser, "only")
    sys.path.insert(0, str(results.ROOT))
    from isotype.compat.torchvision import make_importable

    make_importable()
    prepare()
    context, far = multiprocessing.get_context("fork"), 0
    print(
        f"{'family':<12} {'dtype':<9} {'storage':<8} {'adapted':<9} {'rows':<12} {'foreseen':>9} {'real':>7}  error  tokens foreseen, real"
    )
    for name in options.only:
        for setting in SETTINGS if name in MIXED else SETTINGS[:2]:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(there, (name, *setting)))
            process.start()
            there.close()
            try:
                result = here.recv()
            except EOFError:
                result = {"said": "the process ended"}
            process.join()
            far += _printed(name, *setting, result, options)
    return int(far > 0)


def _printed(
    name: str, dtype: str, storage: str, parts: str, texts: int, result: Mapping[str, Any], options: Any
) -> bool:
    if "real" not in result or "foreseen" not in result:
        print(f"{name:<12} {dtype:<9} {storage:<8} FAILED: {result.get('said', '')}", flush=True)
        return True
    error = result["foreseen"] / result["real"] - 1
    ahead, tokens = result["batch"]["input_ids"][1], result["tokens"]
    rows = "with text" if texts else "pictures"
    sizes = [result[each] / 2**20 for each in ("foreseen", "real")]
    print(
        f"{name:<12} {dtype:<9} {storage:<8} {parts:<9} {rows:<12} {sizes[0]:>7.1f}   {sizes[1]:>5.1f}   {error:+.1%}  {ahead}, {tokens}",
        flush=True,
    )
    if options.kinds:
        print(
            "   ",
            {
                phase: {kind: round(size / 2**20, 1) for kind, size in some.items()}
                for phase, some in result["kinds"].items()
            },
        )
    if options.record:
        measured = {
            "foreseen": sizes[0],
            "real": sizes[1],
            "error": error,
            "tokens foreseen": ahead,
            "tokens": tokens,
        }
        units = dict.fromkeys(("tokens foreseen", "tokens"), "tokens")
        results.append(
            f"pictures/{name}, {dtype}, {storage}, {parts}, {rows}",
            results.measured(measured, foreseen="MiB", real="MiB", error="", **units),
        )
    return bool(abs(error) > NEAR or abs(ahead / tokens - 1) > NEAR)


if __name__ == "__main__":
    sys.exit(main())
