"""Part 1: every kind of training on a tiny model, beside the same on the CPU; then resume, merge, chat, doctor.

Losses and the gradient's norm of the first step are compared: 16-bit matmuls in another order differ by a few units of 2^-8 (bfloat16) there,
and later steps add to it.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .commands import Options, call, isotype, sharded
from .runner import Row

STEPS = 4
TRAININGS: dict[str, tuple[str, str]] = {
    "sft nf4": ("sft", "--dtype bfloat16 --quantization nf4"),
    "sft bf16": ("sft", "--dtype bfloat16"),
    "sft int8": ("sft", "--dtype bfloat16 --quantization int8"),
    "sft fp16": ("sft", "--dtype float16"),
    "sft fp32": ("sft", "--dtype float32"),
    "sft nf4 fsdp": ("sft", "--dtype bfloat16 --quantization nf4 --fsdp full_shard"),
    "dpo nf4": ("dpo", "--dtype bfloat16 --quantization nf4"),
    "grpo nf4": (
        "grpo",
        "--dtype bfloat16 --quantization nf4 --num_generations 2 --max_completion_length 6 --beta 0.1 "
        "--reward_funcs tests.train.tiny.reward_by_words",
    ),
}
"""Job -> (method, its flags)."""
_SAMPLED = ("grpo",)
"""Methods whose data are the model's own samples: other ones on another device."""
FIRST, LATER, NORM = 0.01, 0.03, 0.06
"""Relative differences that are allowed of the first step's loss, of later ones, and of the first gradient's norm."""


class WrongError(Exception):
    """What ran gave other results than it should."""


def limits(options: Options) -> dict[str, float]:
    """Job -> seconds."""
    return dict.fromkeys([*TRAININGS, "resume, merge, chat", "doctor", "kernels"], 120.0)


def run(options: Options, name: str) -> Iterator[Row]:
    """The results of a job."""
    if name in TRAININGS:
        yield from _beside_cpu(options, name)
    else:
        yield from _OTHERS[name](options)


def training(options: Options, name: str, device: str, out: Path) -> list[str]:
    """The command of a training, as arguments of `isotype`."""
    method, flags = TRAININGS[name]
    steps = 2 if options.small else STEPS
    model, data = _inputs(options)
    command = f"""{method} --model_name_or_path {model} --dataset_name {data / f"{method}.jsonl"} --output_dir {out} --device {device}
        {flags} --lora_dropout 0 --max_steps {steps} --logging_steps 1 --save_steps {steps // 2} --learning_rate 1e-2
        --per_device_train_batch_size 2 --report_to none"""
    return shlex.split(command)


def _inputs(options: Options) -> tuple[Path, Path]:
    """Where the tiny model and the rows lie."""
    return options.scratch / "smoke" / "model", options.scratch / "smoke" / "data"


def prepare(options: Options) -> None:
    """Make the model and the rows, once; several jobs may begin at a time, and the folders appear whole."""
    from tests.train.tiny import rows, save_chat_model, save_rows

    model, data = _inputs(options)
    import os

    for target, make in (
        (model, lambda folder: save_chat_model(folder, layers=2)),
        (
            data,
            lambda folder: [
                save_rows(folder / f"{name}.jsonl", rows(name)) for name in ("sft", "dpo", "grpo")
            ],
        ),
    ):
        if target.exists():
            continue
        scratch = target.with_name(f"{target.name}.{os.getpid()}")
        scratch.mkdir(parents=True, exist_ok=True)
        make(scratch)
        try:
            scratch.rename(target)
        except OSError:  # another job was first
            shutil.rmtree(scratch)


def steps_of(out: Path) -> list[dict[str, Any]]:
    """The steps that a run's report holds."""
    report = json.loads((out / "run_report.json").read_text(encoding="utf-8"))
    steps: list[dict[str, Any]] = report["steps"]
    return steps


def differences(method: str, steps: Sequence[Row], reference: Sequence[Row]) -> list[str]:
    """What is wrong with the steps of a run beside those of the same run on the CPU."""
    if len(steps) != len(reference):
        return [f"{len(steps)} steps, on the CPU {len(reference)}"]
    wrong = []
    for place, (step, other) in enumerate(zip(steps, reference, strict=True)):
        infinite = [
            name for name in ("loss", "grad_norm") if step[name] is None or not math.isfinite(step[name])
        ]
        wrong += [f"step {place + 1}: {name} is {step[name]}" for name in infinite]
        if infinite or method in _SAMPLED:
            continue
        allowed = LATER if place else FIRST
        if abs(step["loss"] - other["loss"]) > allowed * abs(other["loss"]):
            wrong.append(f"step {place + 1}: loss {step['loss']:.5g}, on the CPU {other['loss']:.5g}")
        if not place and abs(step["grad_norm"] - other["grad_norm"]) > NORM * other["grad_norm"]:
            wrong.append(
                f"first gradient's norm {step['grad_norm']:.5g}, on the CPU {other['grad_norm']:.5g}"
            )
    return wrong


def _beside_cpu(options: Options, name: str) -> Iterator[Row]:
    prepare(options)
    found, printed = {}, {}
    for device in (options.device, "cpu"):
        out = options.scratch / "smoke" / f"{name} {device}".replace(" ", "-")
        # A rehearsal on a CPU compares the run with itself: once is enough.
        if device not in found:
            shutil.rmtree(out, ignore_errors=True)
            start = sharded if "--fsdp" in TRAININGS[name][1] else isotype
            printed[device] = call(start(*training(options, name, device, out)))
            found[device] = steps_of(out)
    steps, reference = found[options.device], found["cpu"]
    losses = [[step["loss"] for step in each] for each in (steps, reference)]
    norms = [[step["grad_norm"] for step in each] for each in (steps, reference)]
    fused = [line for line in printed[options.device].splitlines() if line.startswith("fused")]
    row: dict[str, Any] = {"losses": losses[0], "losses on the CPU": losses[1]}
    row |= {"norms": norms[0], "norms on the CPU": norms[1], "fused": fused}
    wrong = differences(TRAININGS[name][0], steps, reference)
    text = f"losses {_numbers(losses[0])}, on the CPU {_numbers(losses[1])}"
    if wrong:
        yield {**row, "failed": wrong, "text": f"{text}: {'; '.join(wrong)}"}
        raise WrongError("; ".join(wrong))
    yield {**row, "text": text}


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4f}" for value in values)


def _resume(options: Options) -> Iterator[Row]:
    """A run that goes on from its middle ends as the whole one; its adapter is merged, and answers."""
    prepare(options)
    name, folder = "sft nf4", options.scratch / "smoke" / "resume"
    shutil.rmtree(folder, ignore_errors=True)
    whole, second, merged = folder / "whole", folder / "second", folder / "merged"
    call(isotype(*training(options, name, options.device, whole)))
    middle = len(steps_of(whole)) // 2
    checkpoint = whole / f"checkpoint-{middle}"
    arguments = training(options, name, options.device, second)
    call(isotype(*arguments, "--resume_from_checkpoint", str(checkpoint)))
    ends = [[step["loss"] for step in steps_of(each)[middle:]] for each in (whole, second)]
    # The same operations in the same order on the same device; what a GPU sums in no fixed order may differ in a last digit.
    same = len(ends[0]) == len(ends[1]) and all(
        abs(a - b) <= 1e-3 * abs(a) for a, b in zip(*ends, strict=True)
    )
    text = f"resumed: losses {_numbers(ends[1])}, of the whole run {_numbers(ends[0])}"
    if not same:
        yield {"losses": ends, "failed": ["the resumed run ends elsewhere"], "text": text}
        raise WrongError("the resumed run ends elsewhere")
    yield {"losses": ends, "bitwise": ends[0] == ends[1], "text": text}
    printed = call(isotype("merge", str(whole), "-o", str(merged)))
    yield {"merge": printed[-1500:], "text": f"merged: {_last(printed)}"}
    for model in (whole, merged):
        chat = ("--ask", "w1 w2", "--temperature", "0", "--max_new_tokens", "8", "--device", options.device)
        printed = call(isotype("chat", str(model), *chat))
        yield {"chat": printed[-500:], "text": f"{model.name} answers: {_last(printed)}"}


def _last(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return lines[-1][:120] if lines else "nothing"


def _doctor(options: Options) -> Iterator[Row]:
    printed = call(isotype("doctor", "--json"), judges=True)
    yield {"doctor": json.loads(printed), "text": "doctor's answer is in gpu.jsonl"}
    printed = call(isotype("doctor"), judges=True)
    for line in printed.strip().splitlines()[-6:]:
        if line.strip():
            yield {"text": line.strip()}


def _kernels(options: Options) -> Iterator[Row]:
    """Which kernel computes each operation here, and why those before it were not taken."""
    import torch

    from isotype.lora.kernels import DEVICES, TABLE, chosen

    if options.device not in DEVICES:
        yield {"text": f"no candidates on {options.device}: the compiled loops are asked call by call"}
        return
    for operation in TABLE:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            detail = "silu" if operation == "gated" else ""
            kernel = chosen(operation, torch.device(options.device, 0), dtype, detail)
            row = {
                "operation": operation,
                "dtype": str(dtype),
                "kernel": kernel.name,
                "reasons": kernel.reasons,
            }
            yield {**row, "text": f"{operation} {dtype}: {kernel.name} {'; '.join(kernel.reasons)}".rstrip()}


_OTHERS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "resume, merge, chat": _resume,
    "doctor": _doctor,
    "kernels": _kernels,
}
