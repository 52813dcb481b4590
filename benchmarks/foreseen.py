"""The memory that `isotype check` foresees beside what the same command really takes, of random training set-ups.

Of each set-up (drawn by seed: architecture, method, storage, dtype, adapters, packing, checkpointing, accumulation, optimizer, evaluation)
`isotype check` is asked for the peak, and the command is run: two steps and, if it evaluates, one evaluation. *Real* is the peak of what
torch's allocator holds on this CPU from the beginning of `Trainer.train` to its end: the bytes of all tensors that are alive when it begins,
and what the allocator (torch.profiler) hands out and takes back from there. The largest batches of pictures, which lie in NumPy's memory, are
added. Models are random, of tens of MiB a step, so that a MiB does not matter; each set-up runs in a process forked from one that has imported the libraries.

Run: python benchmarks/foreseen.py --seed 1 --count 70 [--only sft none …] [--jobs 2] [--json FILE]. Prints a line per set-up, the shares
within 5 and 10 %, and of what is off the settings that it has in common. Ends with 1 where fewer than 95 % are within 5 %, or one is not within 10 %.
`--experts` runs a fixed list of mixtures instead, of every storage (mxfp4 of gpt-oss, whose experts it writes as blocks).
`--wide` draws from every method, more architectures, images, compiled models and unfused layers, `--padded` also
of rows with several lengths, `--medium` draws larger mixtures of experts and models with images (their ratios are not recorded). The experts
of `--medium` all get equally many tokens, as a check assumes.
`--at SEED/NUMBER …` runs some of the set-ups again, `--kinds` prints what the foreseen peak is made of.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partialmethod
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from random_setups import (
    Setup,
    command_of,
    draw,
    draw_medium,
    draw_padded,
    draw_wide,
    mixtures,
    save_model,
    save_rows,
)
from records import keep_foreseen
from results import ROOT, Measure, append, parsed

NEAR, FAR, LEAST_SHARE = 0.05, 0.10, 0.95
SECONDS = 600
"""That a set-up may take."""

# What it takes, foreseen and real


def foreseen(command: Sequence[str]) -> dict[str, Any]:
    """What `isotype check` says of the command's memory."""
    from isotype.cli.main import main

    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = main(["check", *command, "--json"])
    if not output.getvalue().startswith("{"):
        return {"status": status, "said": _last_words(output.getvalue() + errors.getvalue())}
    report = json.loads(output.getvalue())
    memory = report["memory"]
    return {
        "status": status,
        "foreseen": memory["peak_bytes"],
        "phase": memory["peak_phase"],
        "batch": report["setup"]["batch"],
        "kinds": memory["phases"],
        "not_traced": report["not_traced"],
        "complete": report["complete"],
        "errors": [finding["code"] for finding in report["findings"] if finding["severity"] == "error"],
    }


def real(command: Sequence[str], even: bool = False) -> dict[str, Any]:
    """The peak of what the allocator holds while the command trains.

    `even` gives all experts equally many tokens, as a check assumes.

    Left out is the copy of the model on which the wiring is measured before the first step: at most 64 MiB of the host's memory, gone
    before the step begins, and more than these small steps take.
    """
    import torch
    import transformers

    from isotype.cli.main import main
    from isotype.model.experts import layer
    from isotype.preflight import run

    preflight: Any = run
    experts: Any = layer
    output_of_experts = experts.experts_output

    def evenly(spec: Any, x: Any, index: Any, *others: Any) -> Any:
        turns = torch.arange(index.numel()).view(index.shape) % spec.count
        return output_of_experts(spec, x, turns.where(index < spec.count, index), *others)

    peaks, train = list[int](), transformers.Trainer.train
    weights, arrays = list[int](), [0]
    step = transformers.Trainer.training_step
    # Gradients that overflow at the scale that a training begins with would leave both updates out, and the optimizer without states.
    scaler: Any = torch.amp.GradScaler
    begun = scaler.__init__

    def measured(self: Any, *arguments: Any, **named: Any) -> Any:
        weights[:] = [alive(), held(self.model.state_dict(keep_vars=True).values()), alive(arrays=True)]
        with allocated(peaks):
            return train(self, *arguments, **named)

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        arrays.append(alive(arrays=True) - weights[2])
        return step(self, *arguments, **named)

    output = io.StringIO()
    transformers.Trainer.train = measured
    transformers.Trainer.training_step = counted
    experts.experts_output = evenly if even else output_of_experts
    measuring, preflight.measure_reach = preflight.measure_reach, lambda *_, **__: None
    scaler.__init__ = partialmethod(begun, init_scale=1.0)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = main([*command, "-q"])
    finally:
        transformers.Trainer.train = train
        transformers.Trainer.training_step = step
        experts.experts_output = output_of_experts
        preflight.measure_reach = measuring
        scaler.__init__ = begun
    if status or not peaks:
        return {"status": status, "said": _last_words(output.getvalue())}
    return {
        "status": status,
        "real": peaks[0] + max(arrays),
        "images": max(arrays),
        "before": weights[0],
        "weights": weights[1],
    }


@contextlib.contextmanager
def allocated(peaks: list[int]) -> Iterator[None]:
    """Add to `peaks` the most bytes that the CPU's allocator holds while the block runs, with what it holds before."""
    from torch.profiler import ProfilerActivity, profile

    before = alive()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [int(event.nbytes()) for event in sorted(events, key=lambda event: event.start_ns())]
    peaks.append(before + max(accumulate(sizes), default=0))


def alive(arrays: bool = False) -> int:
    """Bytes of all real tensors of this process, each storage once; of `arrays`, of those alone that torch did not allocate."""
    import torch

    gc.collect()
    # Some objects raise where they are asked for their class: proxies of what is not there.
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return held(tensors, arrays)


def held(tensors: Iterable[Any], arrays: bool = False) -> int:
    """Bytes of the storages of tensors on the CPU, each storage once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        if hasattr(tensor, "untyped_storage") and tensor.device.type == "cpu":
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a tensor without memory of its own
                storage = tensor.untyped_storage()
                if not (arrays and storage.resizable()):
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _last_words(text: str) -> str:
    return " | ".join(line.strip() for line in text.strip().splitlines()[-6:])[-500:]


def measure(setup: Setup) -> dict[str, Any]:
    """Foreseen and real bytes of a set-up, in this process."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save_model(setup, root / "model")
        save_rows(setup, root / "data")
        os.chdir(root)
        command = command_of(setup, root)
        built = time.process_time()
        ahead = foreseen(command)
        checked = time.process_time()
        trained = real(command, even=setup.medium)
        os.chdir("/")
    result = {
        **ahead,
        **trained,
        "check_status": ahead["status"],
        "said": ahead.get("said", trained.get("said", "")),
    }
    return {**result, "seconds": [built - began, checked - built, time.process_time() - checked]}


# Many of them


def prepare() -> None:
    """Import what every set-up needs, and do nothing else: processes are forked from here."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    from importlib import import_module

    import trl

    from isotype.compat.torchvision import make_importable

    make_importable()

    for name in (
        "bitsandbytes",
        "peft",
        "isotype.cli.main",
        "isotype.planning.nearest",
        "isotype.train.preflight.step",
        "isotype.train.training",
    ):
        import_module(name)
    for name in ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer"):
        getattr(trl, name)
    gc.collect()
    gc.freeze()  # what is imported is not looked through again in every process


def _serve(pipe: Connection, setup: Setup) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    try:
        pipe.send(measure(setup))
    except Exception as error:  # noqa: BLE001 - what a set-up ends with is its result
        pipe.send({"said": _last_words("".join(traceback.format_exception(error)))})
    pipe.close()
    os._exit(0)


def results_of(setups: Sequence[tuple[str, Setup]], jobs: int) -> Iterator[tuple[str, Setup, dict[str, Any]]]:
    """(place, set-up, its result) as they come, each from a process of its own."""
    from multiprocessing.connection import wait

    context = multiprocessing.get_context("fork")
    waiting: list[tuple[str, Setup]] = list(setups)[::-1]
    running: dict[Any, tuple[str, Setup, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            place, setup = waiting.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(there, setup), daemon=True)
            process.start()
            there.close()
            running[here] = (place, setup, process, time.monotonic() + SECONDS)
        ready = set(wait(list(running), timeout=1.0))
        late = {pipe for pipe in running if pipe not in ready and running[pipe][3] < time.monotonic()}
        for pipe in (*ready, *late):
            place, setup, process, _ = running.pop(pipe)
            if pipe in late:
                process.kill()
            try:
                result = {"said": f"killed after {SECONDS} s"} if pipe in late else pipe.recv()
            except EOFError:
                process.join()
                result = {"said": f"the process ended with {process.exitcode}"}
            process.join()
            pipe.close()
            yield place, setup, result


# What is printed


def line_of(place: str, setup: Setup, result: Mapping[str, Any], kinds: bool) -> str:
    """One set-up."""
    if "real" not in result or "foreseen" not in result:
        both = result.get("check_status"), result.get("status")
        foretold = f" (foretold: {', '.join(result['errors'])})" if result.get("errors") else ""
        return f"{place:>6} {'refused' if both == (2, 2) else 'FAILED':>24} {both} {setup.name}{foretold}: {result.get('said', '')}"
    ratio = result["foreseen"] / result["real"]
    mark = "" if abs(ratio - 1) <= NEAR else " *" if abs(ratio - 1) <= FAR else " **"
    ends = f" (foretold: {', '.join(result['errors'])})" if result.get("errors") else ""
    line = (
        f"{place:>6} {result['foreseen'] / 2**20:>7.1f} {result['real'] / 2**20:>7.1f} MiB {ratio:>6.3f}{mark:<3} "
        f"{result['phase']:<9} {setup.name}{ends}"
    )
    if kinds:
        for phase, sizes in result["kinds"].items():
            parts = ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in sizes.items() if size >= 2**18)
            line += f"\n         {phase:<9} {sum(sizes.values()) / 2**20:6.1f}: {parts}"
    return line


def summary(ratios: Sequence[tuple[Setup, float]], others: int) -> list[str]:
    """Shares within bounds, and of each setting how many of its set-ups are off."""
    near = sum(abs(ratio - 1) <= NEAR for _, ratio in ratios)
    far = sum(abs(ratio - 1) <= FAR for _, ratio in ratios)
    total = len(ratios)
    lines = [
        f"{total} set-ups measured, {others} refused or failed: within 5 % {near} ({near / max(1, total):.1%}), "
        f"within 10 % {far} ({far / max(1, total):.1%}); "
        f"ratios {min((r for _, r in ratios), default=0):.3f} to {max((r for _, r in ratios), default=0):.3f}"
    ]
    for field in asdict(ratios[0][0]) if ratios else ():
        values: dict[str, list[float]] = {}
        for setup, ratio in ratios:
            values.setdefault(str(getattr(setup, field)), []).append(ratio)
        off = {value: [r for r in some if abs(r - 1) > NEAR] for value, some in values.items()}
        words = [
            f"{value} {len(some)} of {len(values[value])} ({min(some):.2f} to {max(some):.2f})"
            for value, some in sorted(off.items(), key=lambda entry: -len(entry[1]))
            if some
        ]
        if words:
            lines.append(f"  off by {field}: {'; '.join(words)}")
    return lines


def main() -> int:
    """Run set-ups and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=70)
    parser.add_argument("--at", nargs="+", default=[], metavar="SEED/NUMBER", help="these set-ups alone")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="set-ups with all of these")
    parser.add_argument("--without", nargs="+", default=[], metavar="WORD", help="set-ups with none of these")
    parser.add_argument("--experts", action="store_true", help="mixtures of every storage")
    parser.add_argument(
        "--wide", action="store_true", help="every method, more architectures, images, compiled models"
    )
    parser.add_argument("--padded", action="store_true", help="as --wide, with rows of several lengths")
    parser.add_argument("--medium", action="store_true", help="as --wide, mixtures and images, 50 to 500 MiB")
    parser.add_argument("--first", type=int, default=0, help="number of the first set-up")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--kinds", action="store_true", help="print what the foreseen peaks are made of")
    parser.add_argument("--json", type=Path, help="write the results")
    options = parsed(parser, "at", "only", "without")
    places = options.at or [
        f"{options.seed}/{number}" for number in range(options.first, options.first + options.count)
    ]
    drawn = (
        draw_medium
        if options.medium
        else draw_padded
        if options.padded
        else draw_wide
        if options.wide
        else draw
    )
    setups = (
        mixtures() if options.experts else [(place, drawn(*map(int, place.split("/")))) for place in places]
    )
    sys.path.insert(0, str(ROOT))  # tests/zoo makes models and processors
    if not options.at:
        words = {place: _words_of(setup) for place, setup in setups}
        setups = [
            (place, setup)
            for place, setup in setups
            if words[place].issuperset(options.only) and words[place].isdisjoint(options.without)
        ]
    prepare()
    print(f"{'':>6} {'foreseen':>8} {'real':>6} {'':>3} {'ratio':>6}    peak in   set-up")
    ratios, results = [], []
    for place, setup, result in results_of(setups, options.jobs):
        print(line_of(place, setup, result, options.kinds), flush=True)
        results.append({"place": place, "setup": asdict(setup), **result})
        if "real" in result and "foreseen" in result:
            ratios.append((setup, result["foreseen"] / result["real"]))
    print("\n".join(summary(ratios, len(results) - len(ratios))))
    if options.json is not None:
        options.json.write_text(json.dumps(results), encoding="utf-8")
    if options.record and options.experts:
        for storage in dict.fromkeys(setup.storage for setup, _ in ratios):
            of = sorted(ratio for setup, ratio in ratios if setup.storage == storage)
            append(
                f"foreseen-experts/{storage}", {"ratio": Measure(statistics.median(of), "", (of[0], of[-1]))}
            )
    elif options.record and not (options.wide or options.padded or options.medium):
        keep_foreseen(options.seed, [ratio for _, ratio in ratios], NEAR, FAR)
    errors = [abs(ratio - 1) for _, ratio in ratios]
    near = sum(error <= NEAR for error in errors)
    return int(not errors or near < LEAST_SHARE * len(errors) or max(errors) > FAR)


def _words_of(setup: Setup) -> set[str]:
    words = {str(value) for value in asdict(setup).values()}
    return words | ({"packed"} if setup.packing else set())


if __name__ == "__main__":
    sys.exit(main())
