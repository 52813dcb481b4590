"""Prints a plan, or writes it as an HTML page: the command of the chosen row, the table of rows, and details on request."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console

from isotype.core import VERSION
from isotype.core.console import TerminalConsole
from isotype.core.names import epochs_text, format_bytes, plural
from isotype.core.terminal import printed_command
from isotype.planning.record import GOALS, Device, Record, Row, Workload, front
from isotype.precision.devices.profile import device_profile
from isotype.report import html
from isotype.report.html import package_file
from isotype.report.text import (
    fitting,
    format_count,
    format_duration,
    format_kinds,
    format_share,
    say,
    show_commands,
    table_of,
    width_of,
)

WIDTH = 100
"""Width in columns of text that is not printed in a terminal."""

_WORDS = ("", "device", "model", "storage", "checkpointing", "sharding", "fits", "bound by")
"""Table columns that contain text. All other columns contain numbers."""
_DETAILS = ("spare", "s/step", "bound by")
_DROPPED = ("spare", "bound by", "s/step", "training", "longest", "damage", "sharding", "tokens/s")
"""Table columns that a narrow terminal omits, in this order."""


def to_text(plan: Record) -> str:
    console = TerminalConsole(file=io.StringIO(), width=WIDTH, force_terminal=False)
    render(plan, console, whole=True)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def render(plan: Record, console: Console, whole: bool = False) -> None:
    """Print a plan. If `whole` is True, also print the details that `isotype plan -v` adds."""
    say(console, f"isotype plan   {plan.method} of {plan.model}", "bold")
    say(console, f"   {plan.settings}")
    for device in plan.devices:
        _print_answer(console, _title(device), device)
        if device.chosen is not None and (shorter := _shorter_rows(plan, device.chosen)):
            say(console, shorter, "yellow")
    say(console, "")
    if len(plan.devices) > 1:
        _print_table(
            console, [({"device": device.name}, device.chosen) for device in plan.devices], None, whole
        )
    else:
        _print_table(console, [({}, row) for row in plan.rows], plan.devices[0].chosen, whole)
    if plan.chosen is not None:
        arrow = "→ " if len(plan.devices) == 1 else "by --goal"
        say(console, f"{arrow} {plan.goal}: {GOALS[plan.goal]}")
    say(console, "")
    for device in plan.devices:
        if len(plan.devices) > 1 and (whole or device.notes):
            say(console, _title(device), "bold")
        _print_facts(console, facts_of(plan, device) if whole else _notes(device))
    _print_facts(console, (("refused", text) for text in plan.refused))
    _print_facts(console, (("note", text) for text in plan.notes))
    if not whole:
        say(console, "-v         prints memory and time in detail", "dim")
    if plan.chosen is not None and len(plan.devices) == 1:
        show_commands(console, {"check it before the training": _check(plan.chosen)})


def render_models(plans: Sequence[Record], console: Console, whole: bool) -> None:
    """Print, for each device, the command for the largest model that fits, and then one table for all models."""
    method, settings = plans[0].method, plans[0].settings
    say(console, f"isotype plan   {method}, {settings}; these are the largest models that fit", "bold")
    rows: list[tuple[dict[str, str], Row | None]] = []
    for at, device in enumerate(plans[0].devices):
        several = {"device": device.name} if len(plans[0].devices) > 1 else {}
        fitting_plans = [plan for plan in plans if plan.devices[at].chosen is not None]
        largest = fitting_plans[0] if fitting_plans else plans[-1]
        name = f"{largest.model} on " if fitting_plans else ""
        _print_answer(console, f"{name}{_title(device)}", largest.devices[at])
        for plan in plans:
            rows.append(({**several, "model": plan.model.rpartition("/")[2]}, plan.devices[at].chosen))
    say(console, "")
    _print_table(console, rows, None, whole)
    notes = (note for plan in plans for device in plan.devices for note in _notes(device))
    _print_facts(console, dict.fromkeys(notes))


def _print_answer(console: Console, title: str, device: Device) -> None:
    say(console, "")
    row = device.chosen
    if row is None:
        least = min(device.rows, key=lambda row: row.peak, default=None)
        if least is None:
            say(console, f"{title}: no step could be traced", "bold red")
            return
        need = f"at least {format_bytes(least.peak)} ({least.storage})"
        say(console, f"{title}: nothing fits", "bold red")
        say(console, f"   a step needs {need}, but may use only {format_bytes(least.room)}")
        larger = " or a larger device"
        if device.enough is not None:
            larger = f", a larger device, or {device.enough} of this one (--devices {device.enough})"
        say(console, f"   try a smaller model{larger}")
        return
    memory = f"{format_bytes(row.peak)} of {format_bytes(row.room)}"
    per_device = " on each" if row.devices > 1 else ""
    speed = speed_of(row)
    how = f"{row.storage}{f' with {row.sharding}' if row.sharding else ''}"
    speed = f", {speed} tokens/s" if speed else ""
    say(console, f"{title}: {how} fits, {memory}{per_device}{speed}", "bold green")
    if row.work is not None:
        say(console, f"   {_work(row, row.work)}")
    text = printed_command(row.command.tokens(), width_of(console), 0 if width_of(console) is None else 4)
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _check(row: Row) -> tuple[str, ...]:
    command = row.command
    # The check's default is this machine.
    named = "device" in command or device_profile(row.device).present
    device = () if named else ("--device", row.device)
    devices = ("--devices", str(row.devices)) if row.devices > 1 else ()
    head = (*command.environment(), "isotype", "check", command.method)
    return (*head, *command.arguments(), *device, *devices)


def _print_table(
    console: Console, rows: Sequence[tuple[Mapping[str, str], Row | None]], chosen: Row | None, whole: bool
) -> None:
    """Print a table. Each of `rows` is (first cells by column, a row of the plan or None if nothing fits)."""
    lines = [
        {**cells, **({"fits": "no"} if row is None else cells_of(row, row == chosen))} for cells, row in rows
    ]
    heads = [head for head in _filled(lines) if whole or head not in _DETAILS]
    table = table_of(*heads, numbers={*heads}.difference(_WORDS))
    for line, (_, row) in zip(lines, rows, strict=True):
        style = "bold green" if row is not None and row == chosen else "" if row and row.fits else "dim"
        table.add_row(*(line.get(head, "") for head in heads), style=style)
    console.print(fitting(table, console, dropped=_DROPPED), highlight=False)


def _print_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    for label, text in facts:
        say(console, f"{label:<9}  {text}")


def _notes(device: Device) -> Iterator[tuple[str, str]]:
    for note in device.notes:
        yield "precision", note


def _title(device: Device) -> str:
    count = next((row.devices for row in device.rows), 1)
    return device.title if count == 1 else f"{count} × {device.title}"


def _filled(lines: Sequence[Mapping[str, str]]) -> list[str]:
    heads = dict.fromkeys(head for line in sorted(lines, key=len, reverse=True) for head in line)
    return [head for head in heads if any(line.get(head, "") not in ("", "unknown") for line in lines)]


def cells_of(row: Row, chosen: bool) -> dict[str, str]:
    time, work = row.time if row.fits else None, row.work
    times = f" × {row.accumulation}" if row.accumulation > 1 and row.fits else ""
    beyond = "≥ " if row.longest_is_all else ""
    return {
        "": "→" if chosen else "",
        "storage": row.storage,
        "checkpointing": row.checkpointing,
        "sharding": row.sharding,
        "rows": f"{row.rows:,} of {row.length:,}{times}",
        "peak": format_bytes(row.peak),
        "fits": "yes" if row.fits else "no",
        "spare": "-" * (row.spare < 0) + format_bytes(abs(row.spare)),
        "s/step": "" if time is None else _seconds(time.seconds),
        "tokens/s": speed_of(row) if row.fits else "",
        "bound by": "" if time is None else time.bound.removeprefix("memory "),
        "longest": "" if row.longest is None else f"{beyond}{row.longest:,}" if row.longest else "none",
        "training": "" if work is None else _hours(row, work.seconds),
        "damage": "unknown" if row.damage is None else f"{row.damage:.3g}",
    }


def speed_of(row: Row) -> str:
    """Return the tokens per second, as a range (`2,300 to 3,100`) if the rates were not measured; "" if unknown."""
    low, high = row.lowest_speed, row.highest_speed
    if row.time is None or low is None or high is None:
        return ""
    return f"{low:,.0f}" if row.time.spread == 1 else f"{_two_digits(low)} to {_two_digits(high)}"


def _two_digits(number: float) -> str:
    unit = 10 ** max(0, len(str(int(number))) - 2)
    rounded = round(number / unit) * unit
    return f"{rounded:,}" if rounded < 1_000_000 else format_count(rounded)


def _hours(row: Row, seconds: float | None) -> str:
    """Return estimated seconds as a duration, or as a range if the rates were not measured."""
    if seconds is None:
        return ""
    spread = 1.0 if row.time is None else row.time.spread
    low, high = format_duration(seconds / spread), format_duration(seconds * spread)
    return low if spread == 1 else f"{low} to {high}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.{3 if seconds < 1 else 2 if seconds < 10 else 1}f}"


def facts_of(plan: Record, device: Device) -> Iterator[tuple[str, str]]:
    yield from _notes(device)
    yield "room", f"a step may use {device.room}"
    yield "rates", device.rates or "unknown, and so is the time"
    row = device.chosen
    if row is None:
        return
    yield "chosen", f"{plan.goal}: {GOALS[plan.goal]}"
    if shorter := _shorter_rows(plan, row):
        yield "length", shorter
    yield "memory", f"peak in {row.phase}: {format_kinds(row.kinds, row.peak / 200)}"
    if row.time is not None:
        time = row.time
        ends, least = f"{_seconds(time.low)} to {_seconds(time.high)}", _seconds(time.least)
        between = "" if time.spread == 1 else f" ({ends} s, with the errors of published runs)"
        yield (
            "time",
            f"{_seconds(time.seconds)} s a step{between}; matmuls alone {least} s; bound by {time.bound}",
        )
    if row.work is not None:
        yield "data", _work(row, row.work)


def _shorter_rows(plan: Record, row: Row) -> str:
    same_device = (other for other in plan.rows if other.device == row.device)
    others = {other.length for other in same_device if other.command != row.command}
    if row.rows == 1 and others and row.length not in others and plan.goal != "longest":
        return f"rows of {max(others):,} tokens do not fit; the plan uses the longest rows that fit"
    return ""


def _work(row: Row, work: Workload) -> str:
    epochs = epochs_text(work.epochs)
    packs = "" if work.packs is None else f" in about {plural(work.packs, 'pack')}"
    text = f"{plural(work.rows, 'row')}{packs}, {epochs}: {plural(work.steps, 'step')}"
    if work.tokens is None:
        most = "" if work.seconds is None else f", {_hours(row, work.seconds)} at most"
        return f"{text}{most}; row lengths are unknown, so each row counts as {row.length:,} tokens"
    text += "" if work.seconds is None else f", {_hours(row, work.seconds)} of steps"
    assert work.padding is not None
    text += f"; {work.tokens:,} tokens an epoch, {format_share(work.padding)} of the tokens in a batch are padding"
    if work.packed_seconds is not None:
        text += f"; with --packing: {_hours(row, work.packed_seconds)}"
    if work.cut:
        done = "left out" if row.command.method == "reward" else "cut"
        text += f"; {format_share(work.cut)} of the rows are longer than {row.length:,} tokens and are {done}"
    return text


_GIB = 2**30
_MARGIN = 1.08


def to_html(plan: Record) -> str:
    return html.render(
        "plan.html.j2",
        title=f"isotype plan: {plan.model}",
        style=package_file("style.css") + package_file("plan.css"),
        script=package_file("copy.js"),
        model=plan.model,
        method=plan.method,
        settings=plan.settings,
        devices=[_device(plan, device) for device in plan.devices],
        notes=[*plan.refused, *plan.notes],
        version=VERSION,
    )


def _device(plan: Record, device: Device) -> dict[str, object]:
    rows, chosen = device.rows, device.chosen
    lines = [cells_of(row, row == chosen) for row in rows]
    heads = _filled(lines)
    styles = ["chosen" if row == chosen else "" if row.fits else "short" for row in rows]
    return {
        "title": _title(device),
        "room": f"a step may use {device.room}",
        "picture": picture(rows, chosen),
        "heads": heads,
        "rows": [(css, [line[head] for head in heads]) for css, line in zip(styles, lines, strict=True)],
        "facts": list(facts_of(plan, device)),
        "command": "" if chosen is None else printed_command(chosen.command.tokens(), WIDTH, 0),
    }


def picture(rows: Sequence[Row], chosen: Row | None) -> dict[str, object] | None:
    """Return data for a chart of memory against tokens per second; None if no row fits and has a time.

    Positions are fractions of the chart's width and height.
    """
    shown = [row for row in rows if row.fits and row.tokens_per_second]
    if not shown:
        return None
    peak = max(row.peak for row in shown)
    room = max(row.room for row in shown)
    room = room if room <= 2.5 * peak else 0  # a line far above the peaks would squeeze the points
    wide, high, best = _MARGIN * max(room, peak), _MARGIN * max(row.speed for row in shown), front(shown)
    line = "L".join(f"{1000 * row.peak / wide:.1f} {1000 * (1 - row.speed / high):.1f}" for row in best)
    return {
        "up": html.axis(high, unit="/s"),
        "across": html.axis(wide / _GIB, 6, " GiB"),
        "limit": room / wide,
        "front": f"M{line}",
        "points": [
            (
                row.peak / wide,
                row.speed / high,
                "point" + " best" * (row in best) + " chosen" * (row == chosen),
                f"{row.storage}{'' if row.checkpointing == 'off' else ' ✓'}",
                f"{row.storage}, checkpointing {row.checkpointing}, {row.rows} of {row.length:,}: "
                f"{format_bytes(row.peak)}, {speed_of(row)} tokens/s",
            )
            for row in shown
        ],
    }
