"""What `isotype plan` foresees beside what is measured, and what a plan itself takes.

`time`: seconds, CPU seconds, traces and memory of the plan of an 8B config for one card and of a 70B config for eight, each in a
process of its own. The targets are 20 s, 45 s and 1 GiB on two cores; on a machine with other work, CPU seconds say more.
`rows`: for twelve rows of three models, the peak of a training step on this machine's CPU (what torch's allocator handed out over two
steps, besides the weights that were there before) beside `Row.peak`, and tokens a second of the faster of two more steps beside
`Row.tokens_per_second`, with rates measured on this machine; Kendall's tau of the two orders. With OMP_NUM_THREADS=1 a step's seconds are
those of the CPU, so that what else runs on the machine counts for less.
`largest`: the rows of a micro-batch that a plan finds for a memory, beside the most that real steps get through in a process whose memory is
limited (RLIMIT_DATA) to what it has besides the model and so much more, the model in it; 3 % of that is left for what is no tensor. Every block of 64 KiB is the
system's own there, so that the limit counts what is alive and not what glibc's heap has between it, which is a third on top.
`commands`: ten printed commands of plans for `--device cpu` are run for a step each; `checks`: the command of a small model for every
device profile is judged by `isotype check`.

Run: python benchmarks/plan.py [--parts time rows largest commands checks]. Prints tables and one line of JSON; ends with 1 where a row's memory is off by
more than five percent, tau is below 0.8, a speed is off by more than 1.5 times, the rows that were found do not fit or two more do, or a command fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import isotype
from isotype.compat.glibc import freed_memory_kept
from isotype.planning.record import Row
from records import keep_plan
from results import parsed

TOLERANCE, LEAST_TAU, FACTOR = 0.05, 0.8, 1.5
SHARE = 0.97
"""Of a limited memory that a plan may take."""
OWN_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
MORE_ROWS = 2
"""That are tried past the plan's: where so many fit, it was more than one step too small."""
LORA: Mapping[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
LARGE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "8B, one RTX 4090": (
        {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        ["--device", "rtx4090"],
    ),
    "70B, eight H100": (
        {**_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        ["--device", "h100", "--devices", "8"],
    ),
}  # fmt: skip

_SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """One row: a model, and what is pinned of its settings."""

    source: str
    quantization: str | None
    checkpointing: bool
    rows: int
    length: int

    @property
    def name(self) -> str:
        """As it is printed."""
        on = ", checkpointing" if self.checkpointing else ""
        return f"{self.source} {self.quantization or 'float32'}{on}, {self.rows} of {self.length}"


CASES = (
    *(
        Case(source, *settings)
        for source in ("LlamaConfig", "Gemma2Config")
        for settings in (
            (None, False, 2, 256),
            (None, True, 2, 1024),
            ("nf4", False, 1, 2048),
            ("nf4", True, 4, 512),
        )
    ),
    Case("embedded:smollm2", None, False, 1, 256),
    Case("embedded:smollm2", None, True, 1, 1024),
    Case("embedded:smollm2", "nf4", False, 2, 256),
    Case("embedded:smollm2", "nf4", True, 2, 512),
)

LIMITS = tuple(
    (Case(source, storage, checkpointing, 0, length), limit * 2**20)
    for source, storage, checkpointing, length, limit in (
        ("LlamaConfig", None, False, 256, 320),
        ("LlamaConfig", "nf4", True, 512, 300),
        ("Gemma2Config", None, True, 512, 500),
        ("Gemma2Config", "nf4", False, 256, 600),
        ("embedded:smollm2", None, False, 128, 2048),
        ("embedded:smollm2", "nf4", True, 256, 1024),
    )
)
"""Settings, and bytes that a process may take besides what it has without a model."""


# What a plan takes


def plan_times() -> list[dict[str, Any]]:
    """One entry a plan of `LARGE`."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (config, arguments) in LARGE.items():
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config), encoding="utf-8")
            results.append({"plan": name, **_in_a_process("--child", "plan", str(path), *arguments)})
            shown = results[-1]
            print(
                f"{name:<20} {shown['seconds']:6.1f} s {shown['cpu_seconds']:6.1f} s of CPU {shown['gib']:6.2f} GiB "
                f"{shown['rows']:3} rows",
                flush=True,
            )
    return results


def plan_here(arguments: list[str]) -> dict[str, Any]:
    """A plan in this process, as the command makes it: what is imported counts."""
    began = time.perf_counter()
    gc.disable()  # as the command does
    from isotype.planning.from_request import plan_of_request
    from isotype.planning.request import parse_request

    plan = plan_of_request(parse_request(arguments)[0])
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time(),
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "rows": len(plan.rows),
        "command": plan.command,
    }


def _in_a_process(*arguments: str, **variables: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(arguments)}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


# Rows beside real steps


def row_figures() -> list[dict[str, Any]]:
    """One entry a case, each in a process of its own."""
    results = []
    head = f"{'row':<52} {'foreseen':>12} {'measured':>12} {'error':>7} {'tokens/s':>9} {'measured':>9} {'ratio':>6}"
    print(head)
    for at, case in enumerate(CASES):
        figures = _in_a_process("--child", "row", str(at))
        results.append({"row": case.name, **figures})
        print(
            f"{case.name:<52} {figures['foreseen'] / 2**20:>8.1f} MiB {figures['peak'] / 2**20:>8.1f} MiB "
            f"{100 * _error(figures):>+6.2f}% {figures['foreseen_speed']:>9.0f} {figures['speed']:>9.0f} "
            f"{figures['foreseen_speed'] / figures['speed']:>6.2f}",
            flush=True,
        )
    tau = kendall([each["foreseen_speed"] for each in results], [each["speed"] for each in results])
    worst = max(abs(_error(each)) for each in results)
    ratios = [each["foreseen_speed"] / each["speed"] for each in results]
    print(f"memory: largest error {100 * worst:.2f} %")
    print(f"speed: Kendall's tau {tau:.2f}; foreseen over measured {min(ratios):.2f} to {max(ratios):.2f}")
    return results


def _error(figures: Mapping[str, Any]) -> float:
    return float(figures["foreseen"] / figures["peak"] - 1)


def kendall(first: list[float], second: list[float]) -> float:
    """Kendall's tau of two orders of the same things, of values without ties."""
    signs = [
        1 if (a - c) * (b - d) > 0 else -1
        for (a, b), (c, d) in combinations(zip(first, second, strict=True), 2)
    ]
    return sum(signs) / len(signs)


def row_here(case: Case) -> dict[str, Any]:
    """A case in this process: the plan's row, and steps with the same settings."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        source = _source(case, Path(folder))
        row = _planned(case, source, 2**36, case.rows * case.length, rows=case.rows)
        peak, seconds = _steps(case, source, row)
    return {
        "foreseen": row.peak,
        "peak": peak,
        "foreseen_speed": row.tokens_per_second,
        "speed": case.rows * case.length / seconds,
        "phase": row.phase,
    }


def _source(case: Case, folder: Path) -> str:
    import transformers

    if case.source.startswith("embedded:"):
        return case.source
    torch.manual_seed(0)
    config = getattr(transformers, case.source)(**_SMALL)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def _planned(case: Case, source: str, memory: int, tokens: int, **pins: Any) -> Row:
    """The row of a case in a plan for this CPU, of steps with so many tokens."""
    if case.quantization is not None:
        pins["quantization"] = case.quantization
    plan = isotype.plan(
        source, "cpu", length=case.length, tokens_per_step=tokens, dtype="float32", max_memory=f"{memory}B", **pins
    )  # fmt: skip
    wanted = "every layer" if case.checkpointing else "off"
    storage = case.quantization or "float32"
    return next(row for row in plan.rows if (row.checkpointing, row.storage) == (wanted, storage))


def _prepared(
    case: Case, source: str, policy: isotype.PrecisionPolicy
) -> tuple[Any, dict[str, torch.Tensor], torch.optim.Optimizer]:
    """(the model with adapters, a batch, the optimizer), as a training has them before it fuses."""
    from isotype.lora.loss.trl_head import put_head
    from isotype.model.recompute import CHECKPOINTING, checkpoint_gradients

    model: Any = isotype.load(source, policy)
    model = isotype.add_lora(model, policy, **LORA)
    model.config.use_cache = False
    if case.checkpointing:
        checkpoint_gradients(model, CHECKPOINTING, adapters=True)
    put_head(model)
    model.train()
    ids = torch.randint(1, 4096, (case.rows, case.length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    return model, batch, optimizer


def _steps(case: Case, source: str, row: Row) -> tuple[int, float]:
    """(bytes at the peak of two steps, seconds of the faster of two more)."""
    model, batch, optimizer = _prepared(case, source, row.policy)
    before = _held(model)
    with freed_memory_kept():  # as a training does
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            isotype.fuse(model)  # it may keep dense copies of quantized weights
            for _ in range(2):
                _step(model, batch, optimizer)
        seconds = min(_timed(model, batch, optimizer) for _ in range(2))
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [int(event.nbytes()) for event in sorted(events, key=lambda event: event.start_ns())]
    return before + max(accumulate(sizes)), seconds


def _held(model: Any) -> int:
    """Bytes of a model's tensors, with those of its quantization states."""
    from isotype.trace.weights import state_tensors

    storages: dict[int, int] = {}
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            for each in (tensor, *state_tensors(tensor, module)):
                storage = each.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _timed(model: Any, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> float:
    # Of one thread the CPU's seconds are those of a machine that does nothing else.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    _step(model, batch, optimizer)
    return clock() - began


def _step(model: Any, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    model(**batch, fused_lm_head=True).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# The most rows under a limit


def largest_figures() -> list[dict[str, Any]]:
    """One entry a limit: the rows of a micro-batch that the plan found, and the most that real steps got through."""
    results = []
    print(f"{'settings':<52} {'limit':>8} {'plan may take':>14} {'planned':>8} {'ran':>4}")
    for at, (case, limit) in enumerate(LIMITS):
        planned = _in_a_process("--child", "largest", str(at))
        rows = planned["rows"]
        ran = rows if _runs(at, rows) else 0
        while ran and ran < rows + MORE_ROWS and _runs(at, ran + 1):
            ran += 1
        results.append({"case": case.name, "limit": limit, **planned, "ran": ran})
        label = case.name.replace("0 of", "rows of")
        print(
            f"{label:<52} {limit / 2**20:>4.0f} MiB {planned['room'] / 2**20:>10.0f} MiB {rows:>8} {ran:>4}",
            flush=True,
        )
    return results


def _runs(at: int, rows: int) -> bool:
    return bool(_in_a_process("--child", "limit", str(at), str(rows), **OWN_BLOCKS)["runs"])


def largest_here(case: Case, limit: int) -> dict[str, Any]:
    """What the plan has as the largest micro-batch."""
    # Of 840 rows in as few micro-batches as fit every number up to 8 is a possible answer, and every second one up to 16.
    tokens, checkpointing = 840 * case.length, str(case.checkpointing)
    with tempfile.TemporaryDirectory() as folder:
        source = _source(case, Path(folder))
        row = _planned(case, source, int(SHARE * limit), tokens, gradient_checkpointing=checkpointing)
    return {"rows": row.rows, "room": row.room, "peak": row.peak}


def limited_here(case: Case, limit: int, rows: int) -> dict[str, Any]:
    """Whether three steps run in this process with a limit on its memory."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        source = _source(case, Path(folder))
        policy = isotype.resolve_precision(
            source, dtype="float32", quantization=case.quantization, device="cpu"
        )
        _fused_steps(*_prepared(replace(case, rows=1), source, policy))  # libraries and kernels are loaded
        model, batch, optimizer = _prepared(replace(case, rows=rows), source, policy)
        gc.collect()
        # A loaded file stays mapped: the limit would count it beside the weights.
        limit_data(limit - _held(model))
        try:
            _fused_steps(model, batch, optimizer)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
                raise
            return {"runs": False}
    return {"runs": True}


def _fused_steps(model: Any, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    isotype.fuse(model)
    for _ in range(3):
        _step(model, batch, optimizer)


def limit_data(size: int) -> None:
    """Let this process take so many bytes more than it has: its private writable memory, as the kernel counts it."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # of data and stack
    most = pages * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


# Commands


def command_results() -> list[dict[str, Any]]:
    """Each printed command of this machine, run, with its exit status."""
    results = []
    for goal, arguments in (
        ("balanced", []),
        ("fastest", ["--length", "64"]),
        ("best", ["--quantization", "nf4"]),
        ("longest", ["--max-memory", "1GiB", "--length", "64"]),
        ("balanced", ["--lora_r", "4", "--tokens_per_step", "256"]),
    ):
        plan = isotype.plan("embedded:smollm2", "cpu", "embedded:precision_qa", goal, **_named(arguments))
        for row in [row for row in plan.rows if row.fits][:2]:
            with tempfile.TemporaryDirectory() as folder:
                ends = ["--max_steps", "1", "--save_strategy", "no", "--output_dir", folder, "-q"]
                results.append(_run([*row.command.tokens(), *ends], f"cpu, {goal} {shlex.join(arguments)}"))
    return results


def check_results() -> list[dict[str, Any]]:
    """The printed command of every profile, judged by `isotype check`, with its exit status."""
    from isotype.precision.devices.names import profile_names
    from isotype.precision.devices.profile import device_profile

    results = []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({**_LLAMA, **_SMALL, "vocab_size": 4096}), encoding="utf-8")
        for name in profile_names():
            memory: dict[str, Any] = {} if device_profile(name).memory_bytes else {"max_memory": "4GiB"}
            plan = isotype.plan(str(config), name, quantization="nf4", length=512, **memory)
            assert plan.chosen is not None
            command = list(plan.chosen.command.tokens())
            results.append(_run([command[0], "check", *command[1:], "--device", name], f"check {name}"))
    return results


def _named(arguments: list[str]) -> dict[str, Any]:
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    return {name.lstrip("-").replace("-", "_"): value for name, value in pairs}


def _run(command: list[str], what: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    print(f"{'ok' if done.returncode == 0 else 'FAILED':<7} {what:<44} {shlex.join(command)}", flush=True)
    if done.returncode != 0:
        print((done.stdout + done.stderr)[-1500:])
    return {"what": what, "command": command, "status": done.returncode}


PARTS: Mapping[str, Callable[[], list[dict[str, Any]]]] = {
    "time": plan_times,
    "rows": row_figures,
    "largest": largest_figures,
    "commands": command_results,
    "checks": check_results,
}

CHILDREN: Mapping[str, Callable[..., dict[str, Any]]] = {
    "plan": lambda *arguments: plan_here(list(arguments)),
    "row": lambda at: row_here(CASES[int(at)]),
    "largest": lambda at: largest_here(*LIMITS[int(at)]),
    "limit": lambda at, rows: limited_here(*LIMITS[int(at)], int(rows)),
}
"""What `_in_a_process` asks for, by name: functions of the words that follow it."""


def main() -> int:
    """Run the parts that are asked for and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=["time", "rows"])
    parser.add_argument("--child", nargs=argparse.REMAINDER, help="one measurement, in this process")
    options = parsed(parser)
    if options.child:
        name, *values = options.child
        print(json.dumps(CHILDREN[name](*values)))
        return 0
    results = {part: PARTS[part]() for part in options.parts}
    print(json.dumps(results))
    if options.record:
        keep_plan(results)
    rows = results.get("rows", [])
    ratios = [each["foreseen_speed"] / each["speed"] for each in rows]
    bad = any(abs(_error(each)) > TOLERANCE for each in rows)
    bad |= any(not 1 / FACTOR <= ratio <= FACTOR for ratio in ratios)
    if rows:
        bad |= (
            kendall([each["foreseen_speed"] for each in rows], [each["speed"] for each in rows]) < LEAST_TAU
        )
    bad |= any(
        not each["rows"] <= each["ran"] < each["rows"] + MORE_ROWS for each in results.get("largest", [])
    )
    bad |= any(each["status"] for part in ("commands", "checks") for each in results.get(part, []))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
