"""Merging an adapter: `isotype merge` beside PEFT's merge_and_unload and save_pretrained.

Each merge runs in a process of its own, after its imports and with the base's files in the page cache. *Seconds* are those
of the whole merge: isotype's compares logits and reads everything back as well. *Peak* is the largest resident memory beyond
what was resident before, pages of mapped files included, which the system takes back when it needs them; *held* is the
part of it that it cannot take back (sampled every 5 ms).

The base is a synthetic Llama of 1.1 billion parameters in bfloat16 (2.2 GB, that of benchmarks/load.py); the adapters are
of rank 16 on all linear layers, trained on the base as it is and on the base in nf4. `--small` takes 0.1 billion.

Run: python benchmarks/merge.py [CASE …] [--small] [--keep DIR]. Prints a table and one line of JSON.

`--kept ADAPTER [FORM …]` prints instead what each form keeps of what an adapter has learned, on about 900 tokens of the rows that its training held back:
`nearest:bfloat16` is rounded to the nearest, `original:nf4` is merged into the base before it was quantized. The figures in docs/training.md are of

    isotype sft --model_name_or_path embedded:smollm2 --dataset_name embedded:precision_qa --quantization nf4 --dtype bfloat16 --max_steps 16
        --learning_rate 2e-4 --per_device_train_batch_size 8 --output_dir ADAPTER
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
from load import prepared, resident, warm

FORMS = ("nearest:bfloat16", "bfloat16", "q8_0", "int8", "original:nf4", "nf4")


@dataclass(frozen=True)
class Case:
    """One merge: the storage of the base in training, what is written, and who merges."""

    trained: str | None
    stored: str | None = None
    side: str = "isotype"


CASES = {
    "bf16, PEFT": Case(None, side="PEFT"),
    "bf16": Case(None),
    "nf4 -> bf16": Case("nf4"),
    "nf4 -> nf4": Case("nf4", "nf4"),
    "nf4 -> int8": Case("nf4", "int8"),
    "nf4 -> q8_0": Case("nf4", "q8_0"),
}


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer beside the base, which has none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)


def write_adapter(base: str, directory: str, storage: str) -> None:
    """An adapter as a training on `base` leaves it, its values random."""
    import torch

    import isotype

    policy = isotype.resolve_precision(base, "bfloat16", None if storage == "none" else storage, "cpu")
    model = isotype.add_lora(isotype.load(base, policy), policy, r=16, lora_alpha=32)
    random = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.002 * torch.randn(parameter.shape, generator=random)
    model.save_pretrained(directory)


def merger(case: Case, base: str, adapter: str, output: str) -> Callable[[], Any]:
    """The call to measure; everything that it imports is imported already."""
    import bitsandbytes
    import gguf
    import peft
    import torch
    import transformers
    from transformers.models.llama import modeling_llama

    assert all((bitsandbytes, gguf, modeling_llama))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if case.side == "isotype":
        from isotype.checkpoint.merge.merge import merge_adapter

        return lambda: merge_adapter(adapter, output, stored=case.stored)

    def plain() -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        merged = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
        merged.save_pretrained(output)

    return plain


def kept(adapter: Path, forms: Sequence[str], record: bool) -> None:
    """Print what forms keep."""
    import torch

    import isotype
    from isotype.checkpoint.adapter import base_policy, read_adapter
    from isotype.checkpoint.merge import layers as rounding
    from isotype.checkpoint.merge.comparison import learned, merged_as, trained
    from isotype.checkpoint.tokenizer import tokenizer_of
    from isotype.train.rows.measurement_rows import rows_of_training

    saved, right_on_average = read_adapter(adapter), rounding.unbiased
    policy = base_policy(saved, device="cpu")
    rows, why_not = rows_of_training(adapter)
    assert rows is not None, why_not
    known = learned(saved, policy, rows, tokenizer_of(adapter), 900)
    print(f"{rows.source}: KL(trained || base) {known.base:.4f}, losses {known.losses}")
    for each in forms:
        how, _, form = each.rpartition(":")
        original = isotype.resolve_precision(str(saved.base), "float32", device="cpu")
        model = trained(saved, original if how == "original" else policy)
        nearest = lambda name, values, dtype: values.to(dtype)  # noqa: E731
        rounding.unbiased = nearest if how == "nearest" else right_on_average
        with merged_as(model, form), torch.no_grad():
            result = known.compare(model)
        fall = "" if result.fall is None else f", {result.fall:.1%} of the fall in the loss"
        print(f"{each:<18} {result.kept:.1%}{fall}", flush=True)
        if record:
            measures = {"kept": results.Measure(result.kept)}
            measures |= {} if result.fall is None else {"fall": results.Measure(result.fall)}
            results.append(f"merge-kept/{each}", measures)


class Held:
    """The largest anonymous memory of this process while it is entered, in bytes beyond that at its start."""

    def __enter__(self) -> Held:
        self._start = self._most = resident("RssAnon")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        """What it was."""
        return self._most - self._start

    def _look(self) -> None:
        while not self._done.wait(0.005):
            self._most = max(self._most, resident("RssAnon"))


def measure(case: Case, base: str, adapter: str, output: str) -> dict[str, float]:
    """Seconds and bytes of one merge in this process."""
    merge = merger(case, base, adapter, output)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    with Held() as held:
        wall = time.perf_counter()
        merge()
        wall = time.perf_counter() - wall
    size = sum(file.stat().st_size for file in Path(output).rglob("*") if file.is_file())
    return {"seconds": wall, "peak": resident("VmHWM") - before, "held": held.bytes, "written": size}


def child(*arguments: str) -> dict[str, float]:
    """This script in a process of its own."""
    command = [sys.executable, __file__, "--child", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run the cases asked for and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--keep", type=Path, help="where the base is, or is written to")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--kept", nargs="+", metavar=("ADAPTER", "FORM"), help="what forms keep")
    options = results.parsed(parser)
    if options.kept:
        adapter, *forms = options.kept
        kept(Path(adapter), forms or FORMS, options.record)
        return
    if options.child:
        name, *paths = options.child
        if name == "adapter":
            write_adapter(*paths)
            print("{}")
            return
        print(json.dumps(measure(CASES[name], *paths)))
        return
    every: dict[str, Any] = {}
    print(f"{'case':<14} {'seconds':>8} {'peak':>9} {'held':>9} {'written':>9}")
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base"
        base.mkdir()
        for file in Path(prepared("llama", options.keep or Path(scratch), options.small)).iterdir():
            (base / file.name).symlink_to(file)
        write_tokenizer(base)
        for name in options.cases or CASES:
            adapter = Path(scratch) / f"adapter-{CASES[name].trained}"
            if not adapter.exists():
                child("adapter", str(base), str(adapter), CASES[name].trained or "none")
            warm(str(base))
            output = Path(scratch) / "merged"
            found = every[name] = child(name, str(base), str(adapter), str(output))
            shutil.rmtree(output)
            sizes = " ".join(f"{found[key] / 1e9:>6.2f} GB" for key in ("peak", "held", "written"))
            print(f"{name:<14} {found['seconds']:>8.1f} {sizes}", flush=True)
            if options.record:
                measures = {
                    key: results.Measure(found[key] / 1e9, "GB") for key in ("peak", "held", "written")
                }
                measures["seconds"] = results.Measure(found["seconds"], "s")
                results.append(f"merge{'-small' if options.small else ''}/{name}", measures)
    print(json.dumps(every))


if __name__ == "__main__":
    main()
