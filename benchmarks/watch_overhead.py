"""What it costs to watch a training for values that are no numbers, and whether it stops where it should.

**Cost.** One training with TRL-like LoRA of a model; every `--turn` steps the watch of PrecisionCallback is attached or taken off
again, so that both halves share model, machine and minute. A pair of turns gives one ratio. The watch's own time (what its
replaced methods and its look at the values take, the wait for values that are there included) is clocked beside it: on a
shared machine it tells more than the ratio. `--tiny` takes steps of some ten milliseconds, where it weighs most.

**Stops.** Small models in which a batch is poisoned, the learning rate is too high, or float16 overflows at step 7; a naive mode
that looks at every operand and every result of every operator of the same training says which operator is first.

Run: python benchmarks/watch_overhead.py [--model embedded:smollm2] [--pairs 20] [--turn 2] [--tiny] [--stops]
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from tests.models import quiet
from tests.train.test_watch import Reference, model_of, trainer_of

import isotype
import results
from isotype.core.errors import TrainingError
from isotype.train.monitor.meter import StepMeter

STOPS = ("batch", "learning rate", "overflow")


class Turns(transformers.TrainerCallback):  # type: ignore[misc]
    """Attaches the watch for every second turn of `turn` steps; clocks the steps and the watch's own code."""

    def __init__(self, turn: int, warm: int) -> None:
        self.turn, self.warm = turn, warm
        self.trainer: Any = None
        self.steps: list[tuple[bool, float]] = []
        self.own: list[float] = []
        self._watch: StepMeter | None = None
        self._began = self._spent = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        done = state.global_step - self.warm
        if done >= 0 and done % self.turn == 0:
            if self._watch is not None:
                self._watch.detach()
            self._watch = StepMeter(self.trainer) if done // self.turn % 2 else None
            if self._watch is not None:
                self._watch.attach()
                self._clock("compute_loss")
        self._began, self._spent = time.perf_counter(), 0.0
        if self._watch is not None:
            self._timed(self._watch.begin)(state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        watch = self._watch
        if watch is not None:
            assert self._timed(watch.ends)(self._timed(watch.read)()) is None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > self.warm:
            self.steps.append((self._watch is not None, time.perf_counter() - self._began))
            self.own += [self._spent] if self._watch is not None else []

    def _timed(self, act: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(act)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return act(*args, **kwargs)
            finally:
                self._spent += time.perf_counter() - began

        return timed

    def _clock(self, name: str) -> None:
        """Of the method that the watch has replaced, its time without what the trainer's own takes."""
        around, own = vars(self.trainer)[name], getattr(type(self.trainer), name)

        def unspent(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return own(*args, **kwargs)
            finally:
                self._spent -= time.perf_counter() - began

        closure = around.__closure__
        next(
            cell for cell in closure if getattr(cell.cell_contents, "__func__", None) is own
        ).cell_contents = lambda *args, **kwargs: unspent(self.trainer, *args, **kwargs)
        setattr(self.trainer, name, self._timed(around))


def cost(name: str, pairs: int, turn: int, tiny: bool, record: bool) -> None:
    turns = Turns(turn, warm=3)
    steps = turns.warm + 2 * pairs * turn
    if tiny:
        model: Any = model_of()
        vocabulary, rows, length, half = model.config.vocab_size, 4, 64, False
    else:
        policy = isotype.resolve_precision(name)
        model = isotype.add_lora(isotype.load(name, policy), policy, r=16)
        vocabulary, rows, length = model.config.vocab_size, 2, 128
        half = policy.compute == torch.bfloat16
    ids = torch.randint(0, vocabulary, (rows * steps, length), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as out, quiet():
        arguments = transformers.TrainingArguments(
            output_dir=out, max_steps=steps, per_device_train_batch_size=rows, bf16=half, report_to="none",
            disable_tqdm=True, save_strategy="no", logging_strategy="no", dataloader_pin_memory=False, use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in ids]
        turns.trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=data, callbacks=[turns]
        )
        turns.trainer.train()
    seconds = {on: [s for watched, s in turns.steps if watched is on] for on in (False, True)}
    halves = {
        on: [statistics.median(each[i : i + turn]) for i in range(0, len(each), turn)]
        for on, each in seconds.items()
    }
    ratios = sorted(b / a for a, b in zip(halves[False], halves[True], strict=True))
    first, middle, last = statistics.quantiles(ratios, n=4)
    own, step = statistics.median(turns.own), statistics.median(seconds[False])
    print(
        f"{'a tiny model' if tiny else name}, {rows} x {length} tokens; {pairs} pairs of turns of {turn} steps; medians"
    )
    print(f"step without  {1e3 * step:9.2f} ms")
    print(
        f"step with     {1e3 * statistics.median(seconds[True]):9.2f} ms   ratio {middle:.4f} (quartiles {first:.4f} to {last:.4f})"
    )
    print(f"own time      {1e6 * own:9.0f} us a step, {100 * own / step:.3f} % of it")
    if record:
        measures = {
            "without": results.Measure(1e3 * step, "ms"),
            "watched": results.Measure(1e3 * statistics.median(seconds[True]), "ms"),
            "ratio": results.Measure(middle, "×", (first, last)),
            "own": results.Measure(1e6 * own, "µs"),
            "share": results.Measure(own / step),
        }
        results.append(f"watch/{'a tiny model' if tiny else name}, {rows} x {length}", measures)


def stops(record: bool) -> None:
    print(f"{'what':<14} {'stopped at':>10} {'reference':>9}   {'named':<34} first of the reference")
    for kind in STOPS:
        with tempfile.TemporaryDirectory() as out, quiet():
            reference = trainer_of(kind, Path(out) / "reference", Reference)
            reference.train()
            trainer = trainer_of(kind, Path(out) / "watched")
            trainer.add_callback(isotype.PrecisionCallback(check=None))
            try:
                trainer.train()
                said = "never: "
            except TrainingError as error:
                said = str(error)
        step, operator, shape = reference.first
        at = re.search(r"step (\d+)", said)
        named = re.search(r"--> .*?   (aten\.\S+)", said)
        result = re.search(r"\|   result +\S+ (\[[^]]*\])", said)
        told = f"{named[1] if named else 'none'} {result[1] if result else ''}"
        print(f"{kind:<14} {at[1] if at else 'never':>10} {step:>9}   {told:<34} {operator} {list(shape)}")
        if record:
            words = {"stopped": at[1] if at else "never", "reference": step, "named": told}
            row = {**words, "first": f"{operator} {list(shape)}"}
            results.append(f"watch-stops/{kind}", results.measured(row, **dict.fromkeys(row, "")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="embedded:smollm2")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--turn", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--stops", action="store_true")
    given = results.parsed(parser)
    if given.stops:
        stops(given.record)
    else:
        cost(given.model, given.pairs, given.turn, given.tiny, given.record)


if __name__ == "__main__":
    main()
