"""Searches the rows of a plan: for each storage, checkpointing and sharding, the largest micro-batch that fits."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from isotype.checkpoint.checkpoint import Checkpoint
from isotype.core.dtypes import dtype_name
from isotype.core.errors import CheckpointError, IsotypeError, PrecisionError, UsageError
from isotype.core.formats import MIXED, MXFP4
from isotype.model.recompute import CHECKPOINTING
from isotype.planning.record import Row, Time, Workload
from isotype.planning.request import PlanRequest, command_of
from isotype.planning.steps import Steps, Traced, largest
from isotype.precision.damages import base_bytes
from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.devices.room import Room
from isotype.precision.policy import PrecisionPolicy
from isotype.ranges.pictures import NONE
from isotype.train.policy import policy_by_ranges
from isotype.train.preflight.plan import StepPlan
from isotype.train.preflight.step import PlannedStep, least_row, positions_of
from isotype.train.rows.lengths import longest_of_batches, padding_share
from isotype.train.run import NotForeseenError, choose


def work_of(request: PlanRequest, row: Row, seconds: Callable[[int, int], float | None]) -> Workload | None:
    """Return the work of a training on the data set with the settings of a row of the plan; None without a data set.

    `seconds`: function that returns the seconds of a micro-batch for (rows, tokens), or None if the time is unknown.
    """
    step = request.step
    if step.data_rows is None:
        return None
    rows_of_step = row.rows * row.accumulation * row.devices
    epochs, limit = request.command["num_train_epochs"], max(0, request.command["max_steps"])

    def work_for(rows: int) -> Workload:
        of_epoch = -(-rows // rows_of_step)
        steps = limit or math.ceil(of_epoch * epochs)
        seconds = None if row.time is None else steps * row.time.seconds
        return Workload(rows, steps / of_epoch if limit else epochs, steps, seconds)

    work = work_for(step.data_rows)
    if step.lengths is None:
        return work
    lengths = step.lengths.tokens
    some = [min(tokens, row.length) for tokens in lengths]
    tokens = round(sum(some) * step.data_rows / len(some))
    cut = sum(length > row.length for length in lengths) / len(lengths)
    counted: dict[str, Any] = {"rows": work.rows, "tokens": tokens, "longest": max(lengths), "cut": cut}
    if step.packed:
        packs = -(-tokens // row.length)
        return replace(work_for(packs), **counted, padding=1 - tokens / (packs * row.length), packs=packs)
    mean = longest_of_batches(some, row.rows)
    micro_batch = seconds(row.rows, max(1, round(mean)))
    per_token = None if row.time is None else row.time.seconds / row.tokens
    # If the number of steps is fixed, packed rows take as long as other rows.
    may_pack = "packing" in request.command.specs and step.pictures in (None, NONE)
    full = per_token if may_pack and not limit else None
    return replace(
        work,
        **counted,
        seconds=None if micro_batch is None else work.steps * row.accumulation * micro_batch,
        padding=padding_share(some, row.rows),
        packed_seconds=None if full is None else tokens * work.epochs * full,
    )


STORAGES: tuple[str | None, ...] = (None, "int8", "nf4")
"""Storages to try, the most precise first. None means no quantization."""
PACKED_STORAGES: tuple[str | None, ...] = (None, MXFP4, "nf4")
"""Storages to try if a checkpoint has experts in mxfp4. With `MXFP4`, the experts stay in mxfp4."""

LENGTHS = 64
"""The search tries only row lengths that are multiples of this number of tokens."""

FARTHEST = 32768
"""Maximum tokens of a traced row, because tracing a longer row takes seconds. The goal `longest` has no such maximum."""

_FITTINGS = 8
"""A plan tries at most this number of mixed storages (layers in several formats) for one batch size."""

_NEAR = 32
"""The search for the longest row ends when its upper bound is at most 1 / 32 above its lower bound."""


@dataclass
class Search:
    """The search for one request, on devices whose steps run the same operators.

    Attributes:
        rooms: memory limit of a step for each device name.
        step_rows: rows of an optimizer step on one device.
        bounded: True to skip the trace of a step whose weights and adapters alone exceed the limit.
        refused: storages that cannot be trained, each with the reason.
    """

    request: PlanRequest
    config: Any
    checkpoint: Checkpoint
    profiles: tuple[DeviceProfile, ...]
    rooms: Mapping[str, Room]
    length: int
    step_rows: int
    bounded: bool = False
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _planned_by_key: dict[tuple[str | None, int], PlannedStep] = field(default_factory=dict)
    _steps_by_key: dict[tuple[str, str, str], Steps] = field(default_factory=dict)

    def rows(self) -> Iterator[Row]:
        """Yield a row for each combination of settings and device, in the order of `STORAGES`. Mixed storage comes last."""
        uniform: dict[str, list[Row]] = {profile.name: [] for profile in self.profiles}
        pinned = self._mixed_is_pinned()
        for row in self._uniform_rows():
            uniform[row.device].append(row)
            if not pinned or not row.fits:
                yield row
        if self._may_mix and (pinned or len(self._storages()) > 1):
            for profile in self.profiles:
                yield from self._mixed_rows(profile, uniform[profile.name])

    def _uniform_rows(self) -> Iterator[Row]:
        for steps in self._options():
            try:
                for profile in self.profiles:
                    row = self._row(steps, profile)
                    yield row
                    # If there are several storages, a search of rows that recompute only some layers would take too long.
                    every = steps.arguments is not None and self.request.step.auto
                    if row.fits and every and not steps.sharding and len(self._storages()) == 1:
                        yield from self._sparser_row(steps, profile)
            except NotForeseenError as why:
                self.refused.append(f"{steps.step.policy.form}, checkpointing {steps.checkpointing}: {why}")

    def steps_of(self, row: Row) -> Steps:
        return self._steps_by_key[row.storage, row.checkpointing, row.sharding]

    def _steps(self, step: PlannedStep, arguments: Mapping[str, Any] | None) -> Steps:
        steps = Steps(step, arguments, self.profiles)
        return self._steps_by_key.setdefault(steps.key, steps)

    def _sparser_row(self, steps: Steps, profile: DeviceProfile) -> Iterator[Row]:
        """If a micro-batch fits only with recomputation, yield a row that recomputes every n-th layer."""
        rows = self.request.rows or self.request.command.least_rows

        def foresee(arguments: Mapping[str, Any] | None) -> int:
            return self._steps(steps.step, arguments).peak(rows, self.length)

        choice = choose(foresee, self.rooms[profile.name])
        if choice.arguments is not None and choice.arguments != CHECKPOINTING:
            short = replace(self, request=replace(self.request, longest=False))
            yield short._row(self._steps(steps.step, choice.arguments), profile)

    def _options(self) -> Iterator[Steps]:
        for step in self._planned_steps():
            base = self.request.step
            choices = (None, CHECKPOINTING) if base.auto else (base.checkpointing,)
            able = getattr(self._model(step), "supports_gradient_checkpointing", True)
            for arguments in choices if able else (None,):
                yield self._steps(step, arguments)

    def _model(self, step: PlannedStep) -> Any:
        """Return the model of a step, without weights. If the request asks for recomputation, every layer is recomputed."""
        pinned = None if self.request.step.auto else self.request.step.checkpointing
        return step.model(pinned if pinned == CHECKPOINTING else None)[0]

    def _planned_steps(self) -> Iterator[PlannedStep]:
        base, count = self.request.step, self.request.count
        shardings = (base.fsdp,) if base.fsdp or count == 1 else (0, 2)
        for storage in self._storages():
            precision = replace(base.precision, quantization=storage or base.precision.quantization)
            try:
                policy, ranges = policy_by_ranges(self.checkpoint, precision, base.device, when=base.ranges)
            except PrecisionError as refusal:
                self._refuse(precision.quantization or "no quantization", refusal)
                continue
            for fsdp in shardings:
                plan = replace(
                    base, precision=precision, auto=False, fsdp=fsdp, devices=count, step_rows=self.step_rows
                )
                step = PlannedStep(replace(plan, lora=copy.deepcopy(base.lora)), self.config, policy, ranges)
                step = self._planned_by_key.setdefault((storage, fsdp), step)
                try:
                    self._model(step)
                except (UsageError, CheckpointError) as refusal:
                    if not policy.quantization:
                        raise
                    self._refuse(policy.form, refusal)
                    break
                yield step

    def _refuse(self, storage: str, refusal: IsotypeError) -> None:
        """Record the reason why a storage cannot be trained. If the plan has only this storage and only one device, raise the error."""
        if len(self._storages()) == 1 and len(self.request.devices) == 1:
            raise refusal
        titles = ", ".join(profile.title for profile in self.profiles)
        problems = "; ".join(f"{problem.given} (expected {problem.expected})" for problem in refusal.problems)
        self.refused.append(f"{storage} on {titles}: {problems or refusal.headline}")

    @property
    def _may_mix(self) -> bool:
        return self.request.layers is not None and self.request.count == 1

    def _mixed_is_pinned(self) -> bool:
        """Return True if the user requests mixed storage without a memory limit for it."""
        precision = self.request.step.precision
        return precision.quantization == MIXED and precision.base_memory is None and self._may_mix

    def _storages(self) -> Sequence[str | None]:
        base = self.request.step
        if self._mixed_is_pinned():
            return ("nf4",)  # mixed storage may use the memory that nf4 leaves free
        fixed = base.precision.quantization is not None or base.precision.storage is not None
        saved_so = self.checkpoint.facts.saved_format is not None
        if fixed or saved_so or not self.request.quantize or base.lora is None:
            return (None,)
        saved = self.checkpoint.facts.quantization
        return PACKED_STORAGES if saved is not None and saved.experts else STORAGES

    # Mixed storage

    def _mixed_rows(self, profile: DeviceProfile, rows: Sequence[Row]) -> Iterator[Row]:
        """For each nf4 row that fits, yield a row whose mixed storage also uses the memory that nf4 leaves free."""
        for row in rows:
            if row.storage != "nf4" or not row.fits or row.checkpointing_value is None:
                continue
            steps = self.steps_of(row)
            if (mixed := self._fitted_mixed_row(steps, row, profile)) is not None:
                yield mixed

    def _fitted_mixed_row(self, steps: Steps, row: Row, profile: DeviceProfile) -> Row | None:
        """Return a row with the most precise mixed storage that fits with the micro-batches of `row` (nf4); None if
        none fits.

        Only a trace shows the temporary memory of 8-bit layers. After each try that does not fit, the next try gets
        less memory for the weights.
        """
        damages = self.request.layers
        assert damages is not None
        parameters = self.checkpoint.facts.parameters or 0
        bytes_of_base = partial(base_bytes, damages, parameters=parameters)
        memory = bytes_of_base(row.policy) + row.room - row.peak
        fixed = replace(self, request=replace(self.request, rows=row.rows, longest=False))
        for _ in range(_FITTINGS):
            step = self._mixed_step(steps.step.plan, memory)
            if step is None or not (step.policy.layers or self._mixed_is_pinned()):
                return None
            mixed = Steps(step, steps.arguments, (profile,))
            peak = mixed.peak(row.rows, self.length)
            if peak <= row.room:
                return fixed._row(mixed, profile)
            memory = bytes_of_base(step.policy) - (peak - row.room)
        return None

    def _mixed_step(self, plan: StepPlan, memory: int) -> PlannedStep | None:
        """Return the step of an nf4 plan with mixed storage of at most `memory` bytes; None if no mixed storage is that small."""
        base = self.request.step
        precision = replace(plan.precision, quantization=MIXED, base_memory=memory)
        try:
            policy, ranges = policy_by_ranges(self.checkpoint, precision, base.device, when=base.ranges)
        except PrecisionError:
            return None
        plan = replace(plan, precision=precision, lora=copy.deepcopy(base.lora))
        return PlannedStep(plan, self.config, policy, ranges)

    # One row

    def with_length(self, row: Row, length: int) -> Row:
        steps = self.steps_of(row)
        profile = next(profile for profile in self.profiles if profile.name == row.device)
        other = replace(self, length=length, request=replace(self.request, longest=False))
        return replace(other._row(steps, profile), longest=row.longest, longest_is_all=row.longest_is_all)

    def _row(self, steps: Steps, profile: DeviceProfile) -> Row:
        """Return the row with the largest micro-batch that fits on a device, or else with the smallest micro-batch."""
        size = self.rooms[profile.name].size
        assert size is not None
        rows, longest, is_all = 1, None, False
        if self.bounded and steps.constant.peak > size:
            traced = steps.constant
        else:
            rows = self._micro_batch(steps, size)
            traced = steps.at(rows, self.length)
            if self.request.longest and self._searches_longest(steps):
                longest, is_all = self._longest(steps, size)
        accumulation = -(-self.step_rows // rows)
        policy = steps.step.policy
        row = Row(
            device=profile.name,
            devices=self.request.count,
            storage=policy.form,
            compute=dtype_name(policy.compute),
            checkpointing=steps.checkpointing,
            sharding=steps.sharding,
            rows=rows,
            length=self.length,
            accumulation=accumulation,
            peak=traced.peak,
            room=size,
            phase=traced.phase,
            kinds=traced.kinds,
            time=_time(traced, profile, accumulation),
            policy=policy,
            command=self.request.command,
            longest=longest,
            longest_is_all=is_all,
            damage=self._damage(policy),
            base_memory=steps.step.plan.precision.base_memory,
        )
        self.notes += [note for note in traced.notes if note not in self.notes]
        work = work_of(self.request, row, partial(steps.seconds, profile.name)) if row.fits else None
        return replace(row, command=command_of(self.request, row, profile, steps.arguments), work=work)

    def _damage(self, policy: PrecisionPolicy) -> float | None:
        layers = self.request.layers
        if not policy.layers or layers is None:
            return None if policy.layers else self.request.damages.get(policy.storage)
        storages = {layer.module: policy.storage_of(layer.module) for layer in layers.layers}
        return layers.estimate(storages, "nf4")

    def _micro_batch(self, steps: Steps, size: int) -> int:
        """Return the rows of a micro-batch: the requested rows, or the most that fit and divide a step evenly, or the fewest."""
        if self.request.rows is not None:
            return self.request.rows
        most = largest(
            lambda rows: steps.peak(rows, self.length),
            min(self.step_rows, self.request.at_most or self.step_rows),
            size,
            self.request.command.least_rows,
            enough=lambda low, high: self._even_rows(low) == self._even_rows(high - 1),
            high_first=steps.arguments is not None,
        )
        return self.request.command.least_rows if most is None else self._even_rows(most)

    def _even_rows(self, most: int) -> int:
        """Return at most `most` rows for a micro-batch. If the user sets the rows of a step, all its micro-batches are equal."""
        if self.request.step_rows is None:
            return -(-self.step_rows // -(-self.step_rows // most))
        return max(rows for rows in range(1, most + 1) if self.step_rows % rows == 0)

    def _searches_longest(self, steps: Steps) -> bool:
        """Return True if no other checkpointing needs less memory. The longest row is searched only in this case."""
        every = self.request.step.auto and steps.arguments is None
        return not every or not getattr(steps.step.model(None)[0], "supports_gradient_checkpointing", True)

    def _longest(self, steps: Steps, size: int) -> tuple[int, bool]:
        """Return (tokens of the longest row that fits, True if this is the longest row that was tried)."""
        rows = self.request.rows or self.request.command.least_rows
        least = least_row(self.request.step, self.config)
        far = max(positions_of(self.config) or 2**20, least)
        if self.request.goal != "longest":
            far = min(far, max(FARTHEST, self.length))
        low, high = -(-least // LENGTHS), far // LENGTHS
        if high < low:
            return (far, True) if steps.peak(rows, far) <= size else (0, False)

        def measure(units: int) -> int:
            return steps.peak(rows, units * LENGTHS)

        near = self.length // LENGTHS
        if near >= low and steps.peak(rows, self.length) <= size:
            low = min(near, high)
        elif near >= low:
            high = min(near, high)
            if steps.at(rows, self.length).fixed > size or measure(low) > size:
                return 0, False
        while low * 4 < high:  # begin with short rows, because traces of longer rows take longer
            if measure(low * 4) > size:
                high = low * 4
                break
            low *= 4
        units = largest(measure, high, size, low, enough=lambda low, high: (high - low - 1) * _NEAR <= low)
        return (0, False) if units is None else (units * LENGTHS, units == far // LENGTHS)


def _time(traced: Traced, profile: DeviceProfile, accumulation: int) -> Time | None:
    time = traced.times[profile.name]
    if time is None:
        return None
    spread = 1.0 if profile.steps is None else profile.steps.spread
    seconds, least = time.traced_seconds * accumulation, time.seconds * accumulation
    return Time(seconds, least, time.bound, time.launches * accumulation, spread)


def runs_alike(profile: DeviceProfile) -> tuple[object, ...]:
    """Return the device properties that a step's trace depends on. Devices with equal properties share traces."""
    capability = profile.capability or (0, 0)
    return (
        profile.kind,
        profile.contracts,
        capability[0],
        capability < (7, 5),  # mixed dtypes that only older GPUs refuse
        profile.runs_fp8,
        frozenset(profile.native) - {torch.float64},  # no step computes in float64
        frozenset(profile.emulated) - {torch.float64},
        frozenset(profile.refused) - {torch.float64},
        profile.flash_attention,
        profile.present,
    )
