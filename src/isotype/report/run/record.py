"""The data of a training run, its JSON format, and sentences about losses and rewards."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Literal

from isotype.core.errors import IsotypeError, Problem
from isotype.core.json_records import record_of, text_of
from isotype.core.names import plural
from isotype.report.html import format_number
from isotype.report.run.headroom import Headroom
from isotype.report.text import format_share

SCHEMA_VERSION = 2
"""Version of the JSON format. The version increases when programs for the old format would misread the new format."""

HTML_NAME = "run_report.html"
JSON_NAME = "run_report.json"


@dataclass(frozen=True)
class StepRecord:
    """An optimizer step.

    Attributes:
        step: global step, counted from 1.
        loss: training loss of the step; can be NaN or infinite.
        learning_rate: learning rate of the step.
        grad_norm: norm of the gradients before clipping, without the loss scale; None if not measured.
        tokens: number of tokens, without padding, in the sequences of the step's loss, summed over all processes. A completion
            that GRPO or RLOO uses in several steps is counted in each of these steps.
        seconds: duration of the step in seconds, including the generation of completions.
        memory_bytes: peak memory of this process, in bytes; 0 if not measured. On a GPU, torch's allocated memory counts. On a
            CPU, the resident size of the process is read every 20 ms, so that short peaks may be missed.
        loss_scale: scale that the GradScaler used in the step; None without loss scaling.
        skipped: true if the GradScaler skipped the optimizer step.
        metrics: names and values of the other metrics that the trainer logged after the step, such as `rewards/margins`.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    tokens: int
    seconds: float
    memory_bytes: int
    loss_scale: float | None
    skipped: bool
    metrics: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class EvalRecord:
    """An evaluation on held-back data.

    Attributes:
        step: number of optimizer steps before the evaluation.
        loss: mean loss.
    """

    step: int
    loss: float


@dataclass(frozen=True)
class Sample:
    """A question from the data set, the data set's answer, and the model's answers before and after training.

    Attributes:
        question: text of the question.
        before, after: the model's answers before and after training; None if not recorded.
        reference: the data set's answer.
        pictures: the images in the question, reduced in size and written as data URLs.
    """

    question: str
    before: str | None
    after: str | None
    reference: str | None
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSummary:
    """A summary of the training data of a run.

    Attributes:
        rows: number of training rows.
        held_back: number of rows that are used only to compute the held-back loss.
        effective_batch: number of rows (or packs of rows) in one optimizer step, over all micro-batches and processes.
        epochs: number of times that the run passes over the rows.
        lengths: 50, 90 and 99 % quantiles of the tokens per row, before rows are cut; None if unknown.
        cut_rows: number of rows that are longer than the length limit.
        cut_share: share of all tokens that are beyond the length limit, 0 to 1.
        padding_share: share of padding among the tokens of a batch, 0 to 1; None if unknown.
        packs: number of packs with `--max_length` tokens that `--packing` creates; None if rows are not packed.
    """

    rows: int
    held_back: int
    effective_batch: int
    epochs: float
    lengths: tuple[int, int, int] | None = None
    cut_rows: int = 0
    cut_share: float = 0.0
    padding_share: float | None = None
    packs: int | None = None

    @property
    def rows_words(self) -> str:
        """Describe the number of rows, packs and held-out rows, as in `90 rows in 12 packs, 10 held back`."""
        packs = "" if self.packs is None else f" in {plural(self.packs, 'pack')}"
        held_back = f", {self.held_back:,} held back" if self.held_back else ""
        return f"{plural(self.rows, 'row')}{packs}{held_back}"

    @property
    def step_words(self) -> str:
        """Describe the number of rows or packs in an optimizer step, as in `8 rows` or `1 pack`."""
        return plural(self.effective_batch, "row" if self.packs is None else "pack")


@dataclass(frozen=True)
class PolicyRow:
    """A line of the precision policy: a role such as compute, its dtype, and the reason for this dtype."""

    role: str
    dtype: str
    reason: str


@dataclass(frozen=True)
class RunRecord:
    """A training run. The file `run_report.json` in the run's output directory contains these fields.

    Attributes:
        method: the training method: "sft", "dpo", "grpo", …
        command: the shell command that started the run.
        started: time at which the command started, ISO 8601.
        finished: time at which the run ended, ISO 8601, with a UTC offset if `started` has one; None if unknown.
        status: how the run ended, or `"running"`.
        error: the error that ended a failed run.
        policy: the precision policy.
        versions: libraries and their versions.
        parameters_total: number of parameters of the model, including adapters.
        parameters_trainable: number of trained parameters.
        weight_bytes: pairs (storage dtype, total bytes of the weights in this dtype), such as `("nf4", n)`.
        settings: names and values of the hyperparameters.
        resumed_from: step of the checkpoint at which the run was resumed; None for a new run.
        data: the training data; None if unknown.
        headroom: the largest output values of the blocks in a float16 run; None in another dtype.
        earlier_seconds: total duration, in seconds, of the earlier commands of a resumed run.

    Raises:
        IsotypeError: a time is not in ISO-8601 form, or only one of `started` and `finished` has a UTC offset.
    """

    method: str
    command: str
    started: str
    finished: str | None
    status: Literal["running", "finished", "interrupted", "failed"]
    error: str | None
    model: str
    dataset: str
    output_dir: str
    device: str
    policy: tuple[PolicyRow, ...]
    warnings: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    parameters_total: int
    parameters_trainable: int
    weight_bytes: tuple[tuple[str, int], ...]
    settings: tuple[tuple[str, str], ...]
    steps: tuple[StepRecord, ...]
    evals: tuple[EvalRecord, ...]
    samples: tuple[Sample, ...]
    notes: tuple[str, ...]
    resumed_from: int | None
    data: DataSummary | None = None
    headroom: Headroom | None = None
    earlier_seconds: float = 0.0

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        parsed: list[datetime] = []
        for name, text in (("started", self.started), ("finished", self.finished)):
            try:
                parsed += [] if text is None else [datetime.fromisoformat(text)]
            except ValueError:
                expected = 'an ISO-8601 time such as "2026-01-31T09:30:00+00:00"'
                fix = "use datetime.now(timezone.utc).isoformat()"
                problems.append(Problem(f"{name} = {text!r}", expected, fix))
        if len({time.utcoffset() is None for time in parsed}) > 1:
            what = f"started = {self.started!r}, finished = {self.finished!r}"
            fix = "take both from datetime.now(timezone.utc).isoformat()"
            problems.append(Problem(what, "a UTC offset in both times or in neither", fix))
        if problems:
            raise IsotypeError("this run cannot be recorded", problems)


@dataclass(frozen=True)
class RunSummary:
    """A summary of a run's steps. Values that were not measured are None.

    Attributes:
        steps: number of recorded optimizer steps.
        skipped: number of steps that the GradScaler skipped.
        tokens: tokens of all steps, without padding.
        seconds: wall-clock time of the run, including earlier commands that this run resumes. If the end of the run is unknown,
            total time of all steps.
        first_loss: mean training loss of the first `window` steps.
        final_loss: mean training loss of the last `window` steps; NaN if one of these losses is NaN.
        window: number of steps in `first_loss` and `final_loss`: a tenth of the steps, but at least 1 and at most 10.
        tokens_per_second: median throughput of the steps.
        peak_memory_bytes: largest `memory_bytes` of a step, without loading, evaluation and saving.
    """

    steps: int
    skipped: int
    tokens: int
    seconds: float
    first_loss: float | None
    final_loss: float | None
    window: int
    tokens_per_second: float | None
    peak_memory_bytes: int | None


def summarize(record: RunRecord) -> RunSummary:
    steps = record.steps
    window = min(10, max(1, len(steps) // 10))
    rates = [rate for step in steps if (rate := tokens_per_second(step)) is not None]
    if record.finished is None:
        first = record.resumed_from or 0
        seconds = record.earlier_seconds + sum(step.seconds for step in steps if step.step > first)
    else:
        took = datetime.fromisoformat(record.finished) - datetime.fromisoformat(record.started)
        seconds = record.earlier_seconds + took.total_seconds()
    return RunSummary(
        steps=len(steps),
        skipped=sum(step.skipped for step in steps),
        tokens=sum(step.tokens for step in steps),
        seconds=seconds,
        first_loss=_mean([step.loss for step in steps[:window]]),
        final_loss=_mean([step.loss for step in steps[-window:]]),
        window=window,
        tokens_per_second=statistics.median(rates) if rates else None,
        peak_memory_bytes=max((step.memory_bytes for step in steps), default=0) or None,
    )


def tokens_per_second(step: StepRecord) -> float | None:
    """Return the throughput of one step, or None if the step's duration is not a positive number."""
    return step.tokens / step.seconds if 0 < step.seconds < math.inf else None


def loss_sentences(record: RunRecord) -> tuple[tuple[str, ...], ...]:
    """Return sentences about the losses and, with GRPO or RLOO, the rewards, as tuples of alternating text and numbers."""
    rewards = _reward_sentence(record.steps)
    return (_training_sentence(record), _held_back_sentence(record.evals), *([rewards] if rewards else []))


def _training_sentence(record: RunRecord) -> tuple[str, ...]:
    steps, summary = record.steps, summarize(record)
    if summary.first_loss is None or summary.final_loss is None:
        return ("No training step was recorded.",)
    last_good = next((i for i in reversed(range(len(steps))) if math.isfinite(steps[i].loss)), None)
    if last_good is None:
        return ("The training loss was never a finite number.",)
    if last_good + 1 < len(steps):
        lost = steps[last_good + 1]
        where = f" at step {lost.step:,} and was never finite again."
        return ("Training loss became ", format_loss(lost.loss), where)
    if len(steps) == 1:
        return ("Training loss was ", format_loss(summary.final_loss), " in the only step.")
    means = "" if summary.window == 1 else f" (means of the first and the last {summary.window} steps)"
    losses = [step.loss for step in steps]
    nonfinite = sum(not math.isfinite(loss) for loss in losses)
    if len(steps) - nonfinite < _FEWEST:
        means = f" in {len(steps)} steps, too few for a trend"
        change = _ends(summary.first_loss, summary.final_loss)
    else:
        change = _change(summary.first_loss, summary.final_loss, _noise(losses, summary.window))
    tail = f". In {nonfinite:,} of {len(steps):,} steps the loss was not finite." if nonfinite else "."
    return (f"Training loss {change[0]}", *change[1:], f"{means}{tail}")


def _held_back_sentence(evals: Sequence[EvalRecord]) -> tuple[str, ...]:
    if not evals:
        return ("Held-back loss was not measured.",)
    first, last = evals[0], evals[-1]
    if len(evals) == 1:
        where = f" at step {first.step:,}, the only time it was measured."
        return ("Held-back loss was ", format_loss(first.loss), where)
    # All evaluations measure the same rows, so there is no sampling noise.
    change = _change(first.loss, last.loss, _SAME * abs(first.loss))
    finite = [record for record in evals if math.isfinite(record.loss)]
    best = min(finite, key=lambda record: record.loss, default=last)
    if format_loss(best.loss) in (format_loss(first.loss), format_loss(last.loss)):
        return (f"Held-back loss {change[0]}", *change[1:], ".")
    lowest = ("; its lowest was ", format_loss(best.loss), f" at step {best.step:,}.")
    return (f"Held-back loss {change[0]}", *change[1:], *lowest)


@dataclass(frozen=True)
class Rewards:
    """Statistics of the rewards of all completions since the last log, from GRPO's or RLOO's trainer.

    Attributes:
        step: step after which the trainer logged the rewards.
        mean, spread: mean and standard deviation of the rewards.
        equal: fraction of groups with equal rewards, which cause no gradient. A group consists of the completions of one
            prompt.
    """

    step: int
    mean: float
    spread: float
    equal: float


def rewards_of(step: StepRecord) -> Rewards | None:
    logged, names = dict(step.metrics), ("reward", "reward_std", "frac_reward_zero_std")
    return Rewards(step.step, *(logged[name] for name in names)) if logged.keys() >= {*names} else None


def reward_words(rewards: Rewards) -> str:
    """Format rewards, as in `reward 0.250 ± 0.433, all equal in 40 % of groups`."""
    mean, spread = format_loss(rewards.mean), format_loss(rewards.spread)
    return f"reward {mean} ± {spread}, all equal in {format_share(rewards.equal)} of groups"


def equal_rewards(steps: Sequence[StepRecord]) -> float | None:
    """Return the fraction (0 to 1) of groups in which all rewards are equal, or None if no rewards were logged."""
    logged = [rewards for step in steps if (rewards := rewards_of(step)) is not None]
    numbers = [0, *(rewards.step for rewards in logged)]
    weights = [after - before for before, after in pairwise(numbers)]
    weighted = (rewards.equal * weight for rewards, weight in zip(logged, weights, strict=True))
    return sum(weighted) / numbers[-1] if logged else None


def reward_warnings(steps: Sequence[StepRecord]) -> tuple[str, ...]:
    """Return a warning if the rewards were equal in every group, else an empty tuple."""
    if equal_rewards(steps) != 1:
        return ()
    return (
        "in every group, all rewards are equal, so the model learns nothing. Use a reward function that "
        "distinguishes answers, a higher --temperature or more --num_generations",
    )


def _reward_sentence(steps: Sequence[StepRecord]) -> tuple[str, ...]:
    logged, equal = [rewards for step in steps if (rewards := rewards_of(step))], equal_rewards(steps)
    if equal is None:
        return ()
    change = _ends(logged[0].mean, logged[-1].mean)
    if len(logged) >= _FEWEST:
        change = _change(logged[0].mean, logged[-1].mean, _noise([rewards.mean for rewards in logged], 1))
    return (
        f"Mean reward {change[0]}", *change[1:], ", standard deviation ", format_loss(logged[-1].spread),
        "; all rewards of a group are equal in ", f"{100 * equal:.0f}", " % of the groups.",
    )  # fmt: skip


_FEWEST = 10
"""Minimum number of training losses for a trend. Losses are noisy, because each step uses other rows."""
_SAME = 1e-3
"""Losses count as equal if their relative difference is below this value."""


def _noise(losses: Sequence[float], window: int) -> float:
    """Return twice the standard error of the difference between the means of the first and last `window` losses.

    The noise is estimated from the differences of successive losses, because a trend hardly changes these
    differences. For normal noise, the median magnitude of the differences is 0.954 times the standard deviation of
    the noise.
    """
    steps = [abs(b - a) for a, b in pairwise(losses) if math.isfinite(a) and math.isfinite(b)]
    spread = 2 * math.sqrt(2 / window) * statistics.median(steps) / 0.954 if steps else 0.0
    return max(spread, _SAME * abs(losses[0]))


def _ends(first: float, last: float) -> tuple[str, ...]:
    before, after = format_loss(first), format_loss(last)
    return ("stayed at ", after) if before == after else ("went from ", before, " to ", after)


def _change(first: float, last: float, noise: float) -> tuple[str, ...]:
    before, after = format_loss(first), format_loss(last)
    if before == after or not (math.isfinite(first) and math.isfinite(last)):
        return _ends(first, last)
    if abs(last - first) <= noise:
        return ("shows no clear change: ", before, " to ", after)
    return (f"{'fell' if last < first else 'rose'} from ", before, " to ", after)


def format_loss(loss: float) -> str:
    """Format a loss with three decimals. A loss of at least 1e6, or below 0.001 and not 0, is written with an exponent."""
    if not math.isfinite(loss):
        return format_number(loss)
    plain = loss == 0 or 0.001 <= abs(loss) < 1e6
    return (f"{loss:,.3f}" if plain else f"{loss:.2e}").replace("-", "−")


def _mean(values: Sequence[float]) -> float | None:
    # Dividing first prevents an overflow in the mean of huge losses.
    return sum(value / len(values) for value in values) if values else None


def to_json(record: RunRecord) -> str:
    """Write a run as strict JSON with `schema_version` and the fields of `RunRecord`.

    NaN and infinities become the strings `"NaN"`, `"Infinity"` and `"-Infinity"`.
    """
    return text_of(record, SCHEMA_VERSION)


def from_json(text: str) -> RunRecord:
    """Read a run from the JSON of `to_json`. Raise ValueError for other text or another version."""
    return record_of(text, RunRecord, SCHEMA_VERSION)
