"""A plan for the terminal: a table for each device, what the chosen row is made of, and its command last."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from isotype.core.commands import printed_command
from isotype.core.console import TerminalConsole
from isotype.core.names import plural
from isotype.core.units import format_bytes
from isotype.planning.record import GOALS, Device, Record, Row, Workload
from isotype.report.narrow import fitting, width_of, wrapped
from isotype.report.text import format_count, format_duration, format_share

WIDTH = 110
"""Columns of a text that is no terminal's."""

_WORDS = ("", "model", "storage", "checkpointing", "sharding", "bound by")
"""Columns of words; the others are numbers."""


def to_text(plan: Record) -> str:
    """The plan as a terminal shows it, without colours."""
    console = TerminalConsole(file=io.StringIO(), width=WIDTH, force_terminal=False)
    render(plan, console)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def render(plan: Record, console: Console) -> None:
    """Print a plan."""

    def say(text: str = "", style: str = "") -> None:
        console.print(wrapped(text, console), style=style, highlight=False, markup=False, soft_wrap=True)

    say(f"isotype plan   {plan.method} of {plan.model}", "bold")
    say(f"   {plan.settings}")
    several = len(plan.devices) > 1
    if several:
        say()
        console.print(fitting(_comparison(plan), console, 2), highlight=False)
    for device in plan.devices:
        say()
        rates = f"; {device.rates}" if device.rates else "; its rates are unknown, and so is the time"
        say(f"{title_of(plan, device)}: a step may take {device.room}{rates}", "bold")
        if not several:
            console.print(fitting(_table(plan, device), console, 2), highlight=False)
        for line in lines_of(plan, device):
            say(line)
    if plan.refused or plan.notes:
        say()
    for text in plan.refused:
        say(f"refused    {text}")
    for text in plan.notes:
        say(f"note       {text}")
    say()
    if plan.chosen is None:
        say("nothing fits: a smaller model, a larger device, or more of them (--devices)", "bold")
    for device in plan.devices:
        if several:
            say(f"{title_of(plan, device)}: {'nothing fits' if device.chosen is None else ''}")
        if device.chosen is not None:
            _print_command(device.chosen.command, console)


def _print_command(command: Sequence[str], console: Console) -> None:
    text = printed_command(command, width_of(console))
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _comparison(plan: Record) -> Table:
    """A column for each device, with the row that the goal picks there."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", style="dim", no_wrap=True)
    for device in plan.devices:
        table.add_column(device.name, justify="right")
    cells = [
        {} if row is None else cells_of(row, chosen=False) for row in (each.chosen for each in plan.devices)
    ]
    heads = heads_of([device.chosen for device in plan.devices if device.chosen is not None])
    for head in heads[1:] or ["storage"]:
        table.add_row(head, *(each.get(head, "nothing fits" if head == "storage" else "") for each in cells))
    return table


def render_models(plans: Sequence[Record], console: Console) -> None:
    """Print plans of several models as one table for each device, and the command of the largest that fits last."""

    def say(text: str = "", style: str = "") -> None:
        console.print(wrapped(text, console), style=style, highlight=False, markup=False, soft_wrap=True)

    say(
        f"isotype plan   {plans[0].method}, {plans[0].settings}; no model is named: these are the largest that fit",
        "bold",
    )
    for at, device in enumerate(plans[0].devices):
        say()
        say(
            f"{title_of(plans[0], device)}: a step may take {device.room}; {device.rates or 'its rates are unknown'}",
            "bold",
        )
        console.print(fitting(_models(plans, at), console, 2), highlight=False)
        for note in dict.fromkeys(note for plan in plans for note in plan.devices[at].notes):
            say(f"precision  {note}")
    largest = next((plan for plan in plans if plan.chosen is not None), None)
    chosen = None if largest is None else largest.chosen
    if chosen is not None and chosen.work is not None:
        say(f"data       {_work(chosen, chosen.work)}")
    say()
    if chosen is None:
        say("nothing fits: a larger device, or more of them (--devices)")
    else:
        _print_command(chosen.command, console)


def _models(plans: Sequence[Record], at: int) -> Table:
    """A row for each model, with the settings that the goal picks on the device with this number."""
    rows = [plan.devices[at].chosen for plan in plans]
    heads = ["model", *heads_of([row for row in rows if row is not None])[1:]]
    if all(row is None or row.damage is None for row in rows):
        heads.remove("damage")  # nobody measures a model that is not here
    table = _columns(heads)
    for plan, row in zip(plans, rows, strict=True):
        cells = {"rows": "does not fit"} if row is None else cells_of(row, chosen=False)
        name = plan.model.rpartition("/")[2]
        table.add_row(*(name if head == "model" else cells.get(head, "") for head in heads))
    return table


def title_of(plan: Record, device: Device) -> str:
    """The device's name, and how many of it train together."""
    count = next((row.devices for row in plan.of(device.name)), 1)
    return device.title if count == 1 else f"{count} × {device.title}"


def _table(plan: Record, device: Device) -> Table:
    rows = plan.of(device.name)
    heads = heads_of(rows)
    table = _columns(heads)
    for row in rows:
        style = "bold green" if row == device.chosen else "" if row.fits else "dim"
        cells = cells_of(row, row == device.chosen)
        table.add_row(*(cells[head] for head in heads), style=style)
    return table


def _columns(heads: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(head, justify="left" if head in _WORDS else "right", no_wrap=True)
    return table


def heads_of(rows: Sequence[Row]) -> list[str]:
    """Columns: those that say something of these rows."""
    optional = {
        "sharding": any(row.sharding for row in rows),
        "training": any(row.work is not None and row.work.seconds is not None for row in rows),
        "longest": any(row.longest is not None for row in rows),
    }
    heads = (
        "", "storage", "checkpointing", "sharding", "rows", "peak", "spare", "s/step", "tokens/s", "bound by",
        "longest", "training", "damage",
    )  # fmt: skip
    return [head for head in heads if optional.get(head, True)]


def cells_of(row: Row, chosen: bool) -> dict[str, str]:
    """A row in words, by the heads of the table."""
    time, work = row.time if row.fits else None, row.work
    return {
        "": "→" if chosen else "",
        "storage": row.storage,
        "checkpointing": row.checkpointing,
        "sharding": row.sharding,
        "rows": _batch(row),
        "peak": format_bytes(row.peak),
        "spare": "" if row.spare is None else _signed(row.spare),
        "s/step": "" if time is None else _seconds(time.seconds),
        "tokens/s": speed_of(row) if row.fits else "",
        "bound by": "" if time is None else time.bound.removeprefix("memory "),
        "longest": _longest(row),
        "training": "" if work is None else _hours(row, work.seconds),
        "damage": "unknown" if row.damage is None else f"{row.damage:.3g}",
    }


def speed_of(row: Row) -> str:
    """Tokens a second, as a range where the rates were not measured on the device: `2,300 to 3,100`; "" where they are unknown."""
    low, high = row.lowest_speed, row.highest_speed
    if row.time is None or low is None or high is None:
        return ""
    return f"{low:,.0f}" if row.time.spread == 1 else f"{_two_digits(low)} to {_two_digits(high)}"


def _two_digits(number: float) -> str:
    unit = 10 ** max(0, len(str(int(number))) - 2)
    rounded = round(number / unit) * unit
    return f"{rounded:,}" if rounded < 1_000_000 else format_count(rounded)


def _hours(row: Row, seconds: float | None) -> str:
    """How long so many foreseen seconds take, as a range likewise."""
    if seconds is None:
        return ""
    spread = 1.0 if row.time is None else row.time.spread
    low, high = format_duration(seconds / spread), format_duration(seconds * spread)
    return low if spread == 1 else f"{low} to {high}"


def _signed(size: int) -> str:
    return format_bytes(size) if size >= 0 else f"-{format_bytes(-size)}"


def _batch(row: Row) -> str:
    """`2 × 1,024`, and `× 4` where a step has four of it."""
    times = f" × {row.accumulation}" if row.accumulation > 1 and row.fits else ""
    return f"{row.rows:,} of {row.length:,}{times}"


def _longest(row: Row) -> str:
    if row.longest is None:
        return ""
    return "none" if not row.longest else f"{'≥ ' if row.longest_is_all else ''}{row.longest:,}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.{3 if seconds < 1 else 2 if seconds < 10 else 1}f}"


def lines_of(plan: Record, device: Device) -> Iterator[str]:
    """What there is to say of a device and its chosen row, a label before each."""
    for note in device.notes:
        yield f"precision  {note}"
    row = device.chosen
    if row is None:
        return
    yield f"chosen     {plan.goal}: {GOALS[plan.goal]}{_unlike_asked(plan, row)}"
    kinds = sorted(row.kinds.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds if size >= row.peak / 200)
    yield f"memory     peak in {row.phase}: {parts}"
    if row.time is not None:
        time = row.time
        between = (
            "" if time.spread == 1 else f", {_seconds(time.low)} to {_seconds(time.high)} by published runs"
        )
        least = _seconds(time.least)
        yield f"time       {_seconds(time.seconds)} s a step{between}; its products alone {least} s; most of it for {time.bound}"
    if row.work is not None:
        yield f"data       {_work(row, row.work)}"


def _unlike_asked(plan: Record, row: Row) -> str:
    others = {each.length for each in plan.of(row.device) if each.command != row.command}
    if row.rows == 1 and others and row.length not in others and plan.goal != "longest":
        return f"; rows of {max(others):,} tokens do not fit, these are the longest that do"
    return ""


def _work(row: Row, work: Workload) -> str:
    epochs = f"{work.epochs:g} {'epoch' if work.epochs == 1 else 'epochs'}"
    text = f"{plural(work.rows, 'row')}, {epochs}: {plural(work.steps, 'step')}"
    if work.tokens is None:
        most = "" if work.seconds is None else f", {_hours(row, work.seconds)} at most"
        return f"{text}{most}: how long the rows are is not known, and each counts as {row.length:,} tokens"
    text += "" if work.seconds is None else f", {_hours(row, work.seconds)} of steps"
    assert work.padding is not None
    text += f"; {work.tokens:,} tokens an epoch, {format_share(work.padding)} of a batch is padding"
    if work.packed_seconds is not None:
        text += f"; packed (--packing) {_hours(row, work.packed_seconds)}"
    if work.cut:
        text += f"; {format_share(work.cut)} of the rows are longer than {row.length:,} tokens and are cut"
    return text
