"""`isotype.plan` finds the settings that fit on a device, estimates their speed, and prints the command for the best settings."""

import copy
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isotype.checkpoint.checkpoint import Checkpoint, open_model
from isotype.checkpoint.resolve import read_measurement
from isotype.checkpoint.weightless import skeleton
from isotype.compat.compiler import defer_compiler, import_uncompiled
from isotype.core.dtypes import dtype_name
from isotype.core.errors import Problem, UsageError
from isotype.core.formats import MEASURED, REQUESTABLE
from isotype.core.json_records import Names, text_of
from isotype.core.names import format_bytes, grouped, plural
from isotype.core.random_states import random_states_kept
from isotype.model.recompute import CHECKPOINTING
from isotype.model.targets import ADAPTED, choose_targets
from isotype.planning.rates import with_rates
from isotype.planning.record import GOALS, Device, Record, Row, Time, front, picked
from isotype.planning.request import EXAMPLE_DATA, OWN, PlanRequest, parse_request, request_of
from isotype.planning.search import Search, runs_alike
from isotype.planning.text import speed_of, to_html, to_text
from isotype.precision.damages import Damages
from isotype.precision.devices.profile import DeviceProfile, device_profile
from isotype.precision.devices.room import Room, room_of
from isotype.report.html import write_report
from isotype.train.command.command import AUTO, PLANNED, Command, with_storage
from isotype.train.launched import processes
from isotype.train.preflight.step import least_row, positions_of, row_length

SCHEMA_VERSION = 1

COUNTS = (2, 4, 8, 16, 32, 64)
"""Numbers of devices to try if a step does not fit on one device."""


@dataclass(frozen=True)
class Plan(Record):
    """The settings that fit on a device. `isotype plan --json` and `Plan.to_json()` write all numbers without rounding."""

    def to_json(self) -> str:
        """Return strict JSON that follows `planning/schema.json`. Bytes, seconds and tokens are not rounded."""
        return text_of(self, SCHEMA_VERSION, NAMES)

    def to_html(self, path: str | Path) -> Path:
        """Write an HTML page with the tables and a chart of memory against tokens per second.

        Raises:
            SaveError: the file cannot be written.
        """
        return write_report(Path(path), to_html(self))

    def __str__(self) -> str:
        return to_text(self)


NAMES: Names = {
    Plan: "model method settings goal devices refused notes command",
    Device: "name title memory_bytes=memory room rates notes chosen=chosen_index rows",
    Row: "storage compute checkpointing sharding devices rows length accumulation tokens fits peak_bytes=peak room_bytes=room "
    "spare_bytes=spare peak_phase=phase peak_kinds=kinds time tokens_per_second tokens_per_second_low=lowest_speed "
    "tokens_per_second_high=highest_speed longest longest_is_all work damage command=command_line on_front",
    Time: "seconds low high spread least bound launches",
}


def plan(
    model: str | Path,
    device: str | Sequence[str] = "auto",
    data: str | None = None,
    goal: str = "balanced",
    damages: Mapping[str, float] | None = None,
    **arguments: Any,
) -> Plan:
    """Return the settings that can train a model on a device, and the command for the best settings.

    Each row of the result gives the memory and the speed of one combination of settings. The training step is traced on
    fake tensors, without weights.

    Args:
        model: a directory, config.json, GGUF file, `embedded:NAME` or hub id.
        device: name of a device or of a device profile, or several names.
        data: a data set that determines the lengths of rows and the hours of training: a file, a folder, `embedded:NAME` or a
            hub id.
        goal: a key of `isotype.planning.record.GOALS`.
        damages: dictionary from storage format to damage. The damage is the KL divergence between the next-token distributions
            of the unquantized and the quantized model, in nats. The default is the cached result of `isotype quality`.
        **arguments: arguments of `isotype plan` and of the training command as keywords (`length=2048`, `lora_r=64`).

    Raises:
        UsageError, PrecisionError, CheckpointError, DataError: invalid arguments, an unknown device, or a model or
            data set that cannot be read.
    """
    if goal not in GOALS:
        expected = f"one of {', '.join(GOALS)}"
        raise UsageError.of("unknown goal", f"goal {goal!r}", expected, "give one of these")
    names = [device] if isinstance(device, str) else list(device)
    tokens = [str(model), "--device", ",".join(names), "--goal", goal]
    tokens += ["--data", data] if data is not None else []
    for name in OWN:
        if (value := arguments.pop(name, None)) is not None:
            tokens += [f"--{name}", str(value)]
    with random_states_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # libraries warn about each other's deprecated names
        request, _ = parse_request(tokens, arguments)
        return plan_of_request(replace(request, damages=damages or {}))


def plan_of_request(request: PlanRequest) -> Plan:
    """Return the plan for a request. Raises the same errors as `plan`."""
    searches, rates = searches_of(request)
    config, profiles = searches[0].config, [device_profile(name) for name in dict.fromkeys(request.devices)]
    rows: dict[str, list[Row]] = {profile.name: [] for profile in profiles}
    chosen: dict[str, Row | None] = {}
    for search in searches:
        for row in search.rows():
            rows[row.device].append(row)
        for profile in search.profiles:
            chosen[profile.name] = chosen_row(search, rows[profile.name], request.goal)
    every = [row for device_rows in rows.values() for row in device_rows]
    if request.longest and not any(chosen.values()) and not is_out_of_reach(every):
        less = fitting_lighter(replace(request, longest=False), config)
        if less is not None and any(row.fits for row in less[2]):
            answer = plan_of_request(less[1])
            note = f"turned off, because nothing fits otherwise: {less[0]}"
            return replace(answer, notes=(note, *answer.notes))
    devices = []
    for profile in profiles:
        device_rows = rows[profile.name]
        best = front(device_rows)
        marked = tuple(replace(row, on_front=row in best) for row in device_rows)
        pick = chosen[profile.name]
        devices.append(
            Device(
                name=profile.name,
                title=profile.title,
                memory=profile.memory_bytes,
                room=searches[0].rooms[profile.name].words,
                rates=rates[profile.name],
                notes=_dtype_notes(device_rows, profile),
                chosen=None if pick is None else marked[device_rows.index(pick)],
                rows=marked,
                enough=None if pick is not None else _devices_needed(request, profile, device_rows),
            )
        )
    refused = dict.fromkeys(reason for search in searches for reason in search.refused)
    notes = dict.fromkeys(note for search in searches for note in search.notes)
    length = searches[0].length
    fewer = f"rows of {length} tokens instead of {request.length}, because the model has no more positions"
    shortened = [fewer] if request.length and request.length > length else []
    return Plan(
        model=request.step.source,
        method=request.step.method,
        settings=_settings(request, notes),
        goal=request.goal,
        devices=tuple(devices),
        refused=tuple(refused),
        notes=(*notes, *shortened, *_notes(request)),
    )


def searches_of(request: PlanRequest, *, bounded: bool = False) -> tuple[list[Search], dict[str, str]]:
    """Group devices whose traces are equal. Return a search for each group, and {device name: source of its rates}."""
    defer_compiler()
    import_uncompiled("bitsandbytes")
    checkpoint = open_model(request.step.source, request.step.revision)
    layers = measured_layers(checkpoint)
    request = replace(request, damages=request.damages or totals(layers), layers=layers)
    profiles = [device_profile(name) for name in dict.fromkeys(request.devices)]
    rooms = _rooms(request, profiles)
    config = checkpoint.model_config
    checkpoint.require_complete_gguf()
    rated = [with_rates(profile) for profile in profiles]
    length = _length(request, config)
    step_rows = _rows_per_device(request, length)
    searches = []
    for alike in grouped((profile for profile, _ in rated), runs_alike).values():
        of_device = replace(request, step=replace(request.step, device=alike[0].name))
        searches.append(
            Search(of_device, config, checkpoint, tuple(alike), rooms, length, step_rows, bounded)
        )
    return searches, {profile.name: source for profile, source in rated}


def is_out_of_reach(rows: Sequence[Row]) -> bool:
    """Return True if no other settings can fit, because the weights alone exceed the memory limit in every row."""
    # Storing the constants of quantized weights in 8 bits makes the weights at most a tenth smaller.
    return bool(rows) and all(0.9 * row.kinds.get("weights", 0) > row.room for row in rows)


def _devices_needed(request: PlanRequest, profile: DeviceProfile, rows: Sequence[Row]) -> int | None:
    """Return the smallest number of devices (in `COUNTS`) that can train the sharded model; None if no number is enough."""
    least = min(rows, key=lambda row: row.peak, default=None)
    if not request.longest or least is None or profile.kind in ("cpu", "mps"):
        return None
    storage = least.storage if least.storage in REQUESTABLE else request.step.precision.quantization
    step = replace(
        request.step,
        fsdp=2,
        auto=False,
        checkpointing=CHECKPOINTING if least.checkpointing_value else None,
        precision=replace(request.step.precision, quantization=storage),
    )

    def fits(count: int) -> bool:
        rows_of_step = None if request.step_rows is None else max(request.step_rows, count)
        again = replace(request, step=step, devices=(profile.name,), count=count, step_rows=rows_of_step)
        return any(row.fits for row in _bounded_rows(replace(again, longest=False)))

    # Bisection: the memory of a device falls with the number of devices that share the model.
    counts = [count for count in COUNTS if count > request.count]
    at = bisect_left(counts, True, key=fits)
    return counts[at] if at < len(counts) else None


def measured_layers(checkpoint: Checkpoint) -> Damages | None:
    """Return the result of `isotype quality` for a checkpoint, or None if its quality was not measured."""
    key = checkpoint.fingerprint
    return None if key is None else read_measurement(Damages, key)


def totals(damages: Damages | None) -> dict[str, float]:
    """Return the damage of the model for each format, in nats, if all layers of the base model are stored in this format."""
    return {} if damages is None else {"float32": 0.0, **{form: damages.total(form) for form in MEASURED}}


def _rooms(request: PlanRequest, profiles: Sequence[DeviceProfile]) -> dict[str, Room]:
    """Return the memory limit of a step for each device name. Raise UsageError if a device's memory is unknown."""
    if request.memory is not None:
        room = Room(request.memory, f"{format_bytes(request.memory)}, as requested")
        return {profile.name: room for profile in profiles}
    rooms = {profile.name: room_of(profile) for profile in profiles}
    fix = "isotype plan … --max-memory 24GiB"
    unsized = ((name, room.words) for name, room in rooms.items() if room.size is None)
    problems = [Problem(f"--device {name}: {words}", "an amount of memory", fix) for name, words in unsized]
    if problems:
        raise UsageError("the memory that a step may use is unknown", problems)
    return rooms


def _length(request: PlanRequest, config: Any) -> int:
    """Return the length of a row in tokens: the requested length, the length of the data's longest row, or a default.

    The model's number of positions limits this length, except for rows with images, which are never cut.
    """
    step = request.step
    wanted = request.length or step.length
    if request.length is None and step.lengths is not None and step.longest is not None:
        wanted = step.lengths.longest + step.completion + 1  # a trainer may add a token at the end
    length = row_length(replace(step, length=wanted), config)
    return min(length, max(positions_of(config) or length, least_row(step, config)))


def _rows_per_device(request: PlanRequest, length: int) -> int:
    rows = request.step_rows
    if request.step_tokens is not None:
        rows = max(1, round(request.step_tokens / length))
    assert rows is not None
    if request.step.data_rows:
        rows = min(rows, request.step.data_rows)
    return -(-rows // request.count)


def chosen_row(search: Search, rows: list[Row], goal: str) -> Row | None:
    """Return the row that the goal selects; None if no row fits at any length.

    If no row in `rows` fits, a row with the longest length that fits is added to `rows` and returned. The same applies to
    the goal `longest` without `--max_length`.
    """
    fitting = picked(rows, goal)
    if fitting is not None and (goal != "longest" or "max_length" in search.request.command):
        return fitting
    long = picked([replace(row, room=row.peak) for row in rows if row.longest], "longest")
    if long is None or long.longest is None:
        return fitting
    row = search.with_length(long, long.longest)
    if row not in rows:
        rows.append(row)
    return row


def _settings(request: PlanRequest, notes: Iterable[str]) -> str:
    step = request.step
    if step.lora is None:
        return f"all weights are trained, {step.optimizer}"
    targets = getattr(step.lora, "target_modules", None) or "all-linear"
    names = targets if isinstance(targets, str) else ", ".join(sorted(targets))
    if names == "all-linear":
        adapted = (note.removeprefix(ADAPTED) for note in notes if note.startswith(ADAPTED))
        names = next(adapted, "all-linear layers").partition("; not on ")[0]
    return f"LoRA r {step.lora.r} on {names}, {step.optimizer}"


def _dtype_notes(rows: Sequence[Row], profile: DeviceProfile) -> tuple[str, ...]:
    warned = [warning for row in rows for warning in row.policy.warnings]
    computes = (row.policy.compute for row in rows)
    emulated = [f"{dtype_name(d)}: {profile.reason(d)}" for d in computes if profile.supports(d) != "native"]
    return tuple(dict.fromkeys([*warned, *emulated]))


def _notes(request: PlanRequest) -> tuple[str, ...]:
    step = request.step
    notes = [*step.notes, *([step.data] if step.data else [])]
    if request.count > 1:
        notes.append(f"the time for communication between {request.count} devices is not included")
    if step.data_rows is None:
        data = f"trains on {EXAMPLE_DATA}" if step.method == "sft" else "names no data: add --dataset_name"
        named = {"dataset_name", "datasets"} & request.command.values.keys()
        counted = "all rows are assumed to have the same length"
        notes.append(
            f"the data was not read: {counted}" if named else f"no --data: {counted}, and the command {data}"
        )
    return tuple(notes)


_EIGHT_BITS = "adamw_bnb_8bit"
_SHORTER = (512, 256)
"""Row lengths in tokens. These lengths are tried if no row of the usual length fits."""


def _bounded_rows(request: PlanRequest) -> list[Row]:
    searches, _ = searches_of(request, bounded=True)
    return [row for search in searches for row in search.rows()]


def fitting_lighter(request: PlanRequest, config: Any) -> tuple[str, PlanRequest, list[Row]] | None:
    """Return (dropped settings, request, rows) of the first request in `lighter` that fits, else of the last; None if it is empty."""
    candidates = list(lighter(request, config))
    rows: dict[str, list[Row]] = {}

    def fits(candidate: tuple[str, PlanRequest]) -> bool:
        dropped, less = candidate
        rows[dropped] = _bounded_rows(less)
        return any(row.fits for row in rows[dropped])

    if not candidates:
        return None
    # Each request needs less memory than the request before. The first request often fits, so it is tried first.
    at = 0 if fits(candidates[0]) else bisect_left(candidates, True, lo=1, key=fits)
    dropped, less = candidates[min(at, len(candidates) - 1)]
    return dropped, less, rows[dropped]


def lighter(request: PlanRequest, config: Any) -> Iterator[tuple[str, PlanRequest]]:
    """If experts have adapters, yield requests that need less and less memory, as pairs (dropped settings, request)."""
    names = _layers_beside_experts(request, config)
    if not names:
        return
    dropped, less = (
        f"adapters on experts (only {', '.join(names)} have adapters)",
        _with_targets(names, request),
    )
    on_gpu = all(device_profile(name).kind == "cuda" for name in request.devices)
    if on_gpu and "optim" not in request.command.values:
        yield "optimizer states in 32 bits (--optim adamw_bnb_8bit)", _with_8_bit_states(request)
        yield dropped, less
        dropped, less = f"{dropped}, optimizer states in 32 bits", _with_8_bit_states(less)
    yield dropped, less
    yield from _with_least_memory(dropped, less)


def _with_least_memory(dropped: str, request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Unless the user chose a storage, yield a request with nf4 and recomputed layers, and then requests with shorter rows."""
    step, command = request.step, request.command
    if not request.quantize or step.precision.quantization is not None or step.precision.storage is not None:
        return
    command = command.but(quantization="nf4", use_bnb_nested_quant=True)
    step = replace(step, precision=replace(step.precision, quantization="nf4", double_quant=True))
    if step.auto:
        step = replace(step, auto=False, checkpointing=CHECKPOINTING)
    dropped = f"{dropped}, 32-bit constants of 4-bit weights (--use_bnb_nested_quant)"
    yield dropped, replace(request, step=step, command=command)
    if request.length is not None:
        return
    for tokens in _SHORTER:
        less = replace(request, step=step, command=command.but(max_length=tokens), length=tokens)
        yield f"{dropped}, rows of more than {tokens} tokens", less


def _with_8_bit_states(request: PlanRequest) -> PlanRequest:
    step = replace(request.step, optimizer=_EIGHT_BITS)
    return replace(request, step=step, command=request.command.but(optim=_EIGHT_BITS))


def _with_targets(names: list[str], request: PlanRequest) -> PlanRequest:
    lora: Any = copy.deepcopy(request.step.lora)
    lora.target_modules = names
    step = replace(request.step, lora=lora)
    return replace(request, step=step, command=request.command.but(lora_target_modules=names))


def _layers_beside_experts(request: PlanRequest, config: Any) -> list[str]:
    """Return the last parts of the names of adapted linear layers; [] if the model's experts have no adapters."""
    import peft

    targets = getattr(request.step.lora, "target_modules", None)
    if targets != "all-linear" or "lora_target_modules" in request.command.values:
        return []
    chosen = peft.LoraConfig(target_modules="all-linear")
    model = skeleton(config, torch.bfloat16)
    choose_targets(model, chosen)
    if not chosen.target_parameters:
        return []
    names = chosen.target_modules or ()
    if isinstance(names, str):
        linear = {m: name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        linear.pop(model.get_output_embeddings(), None)
        names = linear.values()
    return sorted({name.rpartition(".")[2] for name in names})


BATCH, LENGTH, STORAGE = PLANNED


def resolve_auto(command: Command) -> tuple[Command, Row]:
    """Return the command with planned values in place of `auto`, and the chosen row. Raise UsageError if nothing fits."""
    if processes() > 1:
        fix = f"isotype plan … --devices {processes()} prints the command for all processes"
        what, expected = f"auto in {processes()} processes", "the same numbers in every process"
        raise UsageError.of(
            "a plan is not possible inside a training with several processes", what, expected, fix
        )
    auto = command.planned
    rows = None if BATCH in auto else command.given(BATCH)
    request = replace(request_of(command, (command["device"],), rows=rows), quantize=STORAGE in auto)
    if LENGTH not in auto:  # the training cuts rows to this length
        request = replace(request, length=request.length or request.step.length)
    plan = plan_of_request(request)
    row = plan.chosen
    if row is None:
        least = min((row.peak for row in plan.rows), default=0)
        need = f"a step needs at least {format_bytes(least)} and may use {plan.devices[0].room}"
        fix = "use a smaller model or a larger device: isotype plan MODEL --device NAME shows what fits"
        raise UsageError.of("nothing fits", need, "a step that fits", fix)
    return _with_values(command, row), row


def _with_values(command: Command, row: Row) -> Command:
    auto = command.planned
    values: dict[str, int | bool] = {}
    if BATCH in auto:
        values[BATCH] = row.rows
        values["gradient_accumulation_steps"] = row.accumulation
    if LENGTH in auto:
        values[LENGTH] = row.length
    recompute = row.checkpointing_value
    if recompute is not None and command.given("gradient_checkpointing") in (None, AUTO):
        values["gradient_checkpointing"] = recompute
    command = command.but(tokens_per_step=None, **values)
    return with_storage(command, row.policy.quantization, row.base_memory) if STORAGE in auto else command


def words_of(row: Row) -> str:
    speed = speed_of(row)
    expected = f", {speed} tokens/s expected" if speed else ""
    times = f" × {row.accumulation}" if row.accumulation > 1 else ""
    return (
        f"planned: {row.storage}, {plural(row.rows, 'row')} of {row.length:,} tokens{times}, checkpointing {row.checkpointing}: "
        f"{format_bytes(row.peak)} of the {format_bytes(row.room)} that a step may use{expected}"
    )
