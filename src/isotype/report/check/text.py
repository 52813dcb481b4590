"""The report of a check as text: verdict, findings in the style of compilers, next steps, and cost.

A line consists of pairs (text, style). Lines of plain text have no styles. If a text is wrapped, its next lines begin
below the first word of the text.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from isotype.contracts.contract import doubts, judged_by
from isotype.core.console import LOG_WIDTH
from isotype.core.dtypes import dtype_name
from isotype.core.names import format_bytes, grouped, listed, named, plain_name, plural
from isotype.core.terminal import printed_command
from isotype.precision import by_ranges
from isotype.records.finding import Cost, Finding, Fix, Scope, marked
from isotype.records.request import Setup
from isotype.records.trace import Operand
from isotype.report.check.cost import (
    device_words,
    flops_words,
    memory_words,
    parts_words,
    setup_words,
    step_words,
    time_rows,
)
from isotype.report.check.map import layer_counts, split_layer
from isotype.report.check.record import Outlook, Record, Status, repair_outlook
from isotype.report.text import format_share, short_source, width_of

Line = tuple[tuple[str, str], ...]


_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan", "help": "bold green"}
STATUS: Mapping[Status, tuple[str, str]] = {
    "fails": ("failed", "✕ fails"),
    "does not fit": ("failed", "✕ does not fit"),
    "unknown": ("interrupted", "? not known"),
    "costs": ("interrupted", "◐ runs with warnings"),
    "unmeasured": ("interrupted", "? values not measured"),
    "partial": ("interrupted", "? runs in part"),
    "clean": ("finished", "✓ runs clean"),
}
"""Maps the status of a check to its style on an HTML page and its label."""
_COLOURS = {"failed": "bold red", "interrupted": "bold yellow", "finished": "bold green"}
_PATTERNS_SHOWN = 8
# The space between a number and its unit, where a line must not break.
_UNIT = re.compile(r"(?<=\d) (?=[KMGT]?i?B\b|%|[PTGM]?FLOP|s\b)")


def counts(report: Record) -> str:
    """Return the number of findings of each severity, as in `"1 error, 2 warnings"`, or "" without findings."""
    numbers = ((report.errors, "error"), (report.warnings, "warning"), (report.notes, "note"))
    return ", ".join(plural(len(findings), noun) for findings, noun in numbers if findings)


def verdict(report: Record) -> str:
    """Return a sentence that says whether the step runs on the device, with the number of findings."""
    title, peak = device_words(report.trace.setup), format_bytes(report.memory.peak)
    failure, counted = report.trace.failure, counts(report)
    per_device = " each" if report.trace.setup.devices > 1 else ""
    lacking = f"needs {peak}{per_device}, more than {report.trace.setup.limit}"
    unseen = "" if failure is None else f"traced only up to {_where(failure.phase, failure.module)}"
    untraced = f"not traced: {listed(report.trace.untraced)}" if report.trace.untraced else ""
    rest = [clause for clause in (counted, unseen, untraced) if clause]
    match report.status:
        case "fails":
            short = [f"also {lacking}"] if report.fits is False else []
            fact = "runs, but does not train as intended" if report.miswired else f"fails on {title}"
            return f"This step {fact}: {'; '.join([*rest, *short])}"
        case "does not fit":
            return "; ".join([f"This step does not fit on {title}: it {lacking}", *rest])
        case "unknown":
            return f"It is unknown whether this step runs on {title}: {'; '.join(filter(None, (unseen, counted, untraced)))}"
        case "costs":
            unmeasured = [] if report.ranges in (None, "measured") else [_UNMEASURED]
            towers = [_unseen(report)] if report.unseen else []
            return f"This step runs on {title}, with {'; '.join([*rest, *unmeasured, *towers])}"
        case "unmeasured":
            return f"{title} accepts every dtype of this step; {'; '.join([_UNMEASURED, *rest])}"
        case "partial" if report.unseen:
            return f"The text part of this step runs on {title}; {'; '.join([_unseen(report), *rest])}"
        case "partial" | "clean":
            room = "" if report.largest is None else f", headroom of float16 {report.largest.headroom:.2g}"
            checked = f"{plural(report.operators, 'operator')} checked{room}"
            fact = "The traced part of this step runs" if untraced else "This step runs clean"
            return f"{fact} on {title}: {'; '.join([checked, *rest])}"


def _unseen(report: Record) -> str:
    return f"the step does not use {listed(report.unseen)}, so only the text part was checked (--image 1024x768 adds an image)"


_UNMEASURED = "its float16 values were not measured"


def _where(phase: str, module: str) -> str:
    return f"the {phase} of {module}" if module else phase


def cost_clauses(cost: Cost, title: str) -> list[str]:
    """Return a phrase for each cost of a finding: slowdown, FLOPs in a slow dtype, casts, memory."""
    clauses = []
    times = "" if cost.slowdown is None else f"{cost.slowdown:.{0 if cost.slowdown >= 10 else 1}f}"
    if times not in ("", "1.0"):
        clauses.append(f"about {times}x slower on {title}")
    if cost.flops_share:
        clauses.append(f"{format_share(cost.flops_share)} of the FLOPs in a slower dtype")
    if cost.cast_bytes:
        clauses.append(f"{format_bytes(cost.cast_bytes)} of casts a step")
    if cost.memory_bytes:
        clauses.append(f"{format_bytes(cost.memory_bytes)} more memory at the peak")
    return clauses


_SCOPES: Mapping[Scope, str] = {
    "model": "",
    "setting": "a setting",
    "line": "a line of your code",
    "library": "in a library's code",
    "advice": "by hand",
}


def fix_scope(fix: Fix) -> str:
    """Return what the user has to change, such as `"a setting"`, or "" if `isotype.repair` applies the fix."""
    return _SCOPES[fix.scope]


def fix_standing(fix: Fix) -> str:
    """Describe the scope, the safety and the outcome of a fix, as in `"a setting; safe; verified: the step then runs clean"`."""
    tried = "verified" if fix.verified else "not verified"
    words = [word for word in (fix_scope(fix), fix.safety, tried) if word]
    return "; ".join(words) + (f": {fix.outcome}" if fix.outcome else "")


def fold_places(places: Iterable[str], layers: Mapping[tuple[str, int], int]) -> list[tuple[str, str, int]]:
    """Group modules whose names differ only in the layer number. Return (layers or "", part, number of modules) for each
    group.

    For example, `model.layers.0.mlp` … `model.layers.29.mlp` become `("model.layers.0-29", "mlp", 30)`. The modules of
    the whole model are counted, even if the trace has folded layers.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for place in dict.fromkeys(map(plain_name, places)):
        stack, number, part = split_layer(place) or ("", -1, place)
        groups.setdefault((stack, part), []).extend([number] if number >= 0 else [])
    folded = []
    for (stack, part), numbers in groups.items():
        counts = [layers.get((stack, number), 1) for number in numbers]
        # In a folded model, the last traced layer stands for all layers after the first ones.
        shown = ranges(sorted(numbers)) if sum(counts) == len(counts) else f"{min(numbers)}-{max(numbers)}"
        folded.append((f"{stack}.{shown}".strip("."), named(part), sum(counts) or 1))
    return folded


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as ranges: `[0, 1, 2, 5]` becomes `"0-2,5"`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def elide(name: str, width: int) -> str:
    """Return a name. If the name is longer than `width` columns, replace the middle of the name with `…`."""
    if len(name) <= width:
        return name
    head = max(0, (width - 1) // 3)
    return f"{name[:head]}…{name[len(name) - max(0, width - 1 - head) :]}"


def ranges_words(report: Record) -> str:
    """Describe the largest measured float16 value, with the date and the data of the measurement. Return "" without a value."""
    largest, ranges = report.largest, report.trace.setup.ranges
    if ranges is None or largest is None:
        return ""
    reached = f"{by_ranges.number(largest.value)} ({named(plain_name(largest.module))})"
    return f"values in float16 reach {reached}, headroom {largest.headroom:.2g}; {ranges.measured}"


def trust(report: Record) -> list[tuple[str, str]]:
    """Return (label, sentence) for each reason why the verdict may be wrong or incomplete."""
    rows = []
    title, failure = report.trace.setup.profile.title, report.trace.failure
    if report.assumed:
        unmeasured = f"dtypes were not measured on {title}; rules for similar operators were used"
        rows.append(("assumed", f"{', '.join(report.assumed)}: {unmeasured}"))
    rows += [("assumed", doubt) for doubt in doubts(report.trace.setup.profile)]
    if failure is not None:
        mixed = "; operands of different dtypes were involved" if failure.dtype_related else ""
        at = f" ({short_source(failure.source)})" if failure.source else ""
        place = f"{_where(failure.phase, failure.module)}{at}"
        rows.append(("not seen", f"all operators after {place}: {failure.error}{mixed}"))
    rows += [("not seen", note) for note in sharding_notes(report.trace.setup)]
    rows += [("not seen", part) for part in report.trace.untraced_parts()]
    rows += [("note", note) for note in report.trace.notes]
    if report.ranges in ("known", "unknown"):
        known = report.trace.setup.family_ranges
        family = f"; known of the model's family: {known}" if known else ""
        rows.append(
            (
                "not seen",
                f"values may exceed float16's largest number, 65,504, because they were not measured{family}",
            )
        )
    return rows


def sharding_notes(setup: Setup) -> Iterator[str]:
    """Yield the assumptions of the memory figures of an FSDP step."""
    if setup.fsdp and setup.devices == 1:
        yield "the number of devices, so the memory figures are for one device with all weights; --devices N (devices=N) sets the number"
    elif setup.fsdp == 1:
        yield "buffers that only FSDP1 needs, because the memory figures are for FSDP2"


def next_steps(report: Record, commands: bool = True) -> list[tuple[str, str]]:
    """Return (label, sentence) for each next step of the user. If `commands` is True, the fixes contain their commands."""
    outlook = repair_outlook(report)
    every = plural(sum(map(len, outlook.values())), "finding")
    share = {group: f"{len(findings):,} of {every}" for group, findings in outlook.items()}
    repair = f"isotype.repair(model, isotype.check(model, …)) resolves {share['repair']}"
    unsafe = f"isotype.repair(model, report, unsafe=True) resolves {share['unsafe']}"
    rows: list[tuple[Outlook, str]] = [
        ("repair", f"{repair}; isotype check --fix prints the changes"),
        ("unsafe", f"{unsafe} by an unsafe change"),
        ("untried", f"isotype.repair(model, report) tries the fixes of {share['untried']}"),
        *[("caller", order) for order in _orders(outlook["caller"], commands)],
        ("left", f"no known fix works for {share['left']}"),
    ]
    labels = {"caller": "to do"}
    steps = [(labels.get(group, group), text) for group, text in rows if outlook[group]]
    if report.ranges in ("known", "unknown"):
        steps.append(("measure", _MEASURE))
    if report.findings:
        steps.append(("explain", f"isotype explain {report.findings[0].code}"))
    return steps


_MEASURE = (
    "isotype check MODEL --dtype float16 with the weights on disk, or "
    "isotype.check(…, ranges=isotype.measure_ranges(model, batch))"
)


_ORDERS_SHOWN = 3


def _orders(findings: Sequence[Finding], commands: bool) -> list[str]:
    """Return a line for each fix that the user has to apply. The line begins with the rule code of the first finding."""
    orders: dict[str, str] = {}
    for finding in findings:
        fix = finding.fixes[0]
        above = fix.command and not commands
        orders.setdefault(f"{fix.description} (the command above)" if above else marked(fix), finding.code)
    lines = [f"{code}: {order}" for order, code in orders.items()]
    more = len(lines) - _ORDERS_SHOWN
    return [*lines[:_ORDERS_SHOWN], *([f"and {more:,} more"] if more > 0 else [])]


def script_steps(report: Record) -> list[tuple[str, str]]:
    rows, setup = [], report.trace.setup
    fixes = [fix for finding in report.findings for fix in finding.fixes]
    safeties = {fix.safety for fix in fixes if fix.works and fix.scope == "model"}
    autocast = f', autocast="{dtype_name(setup.autocast)}"' if setup.autocast else ""
    check = f"isotype.check(model, inputs{autocast}{', scaler=True' if setup.scaler else ''})"
    if "safe" in safeties:
        rows.append(("repair", f"in the script, before the first step: isotype.repair(model, {check})"))
    elif safeties:
        rows.append(("unsafe", f"in the script: isotype.repair(model, {check}, unsafe=True)"))
    if report.findings:
        rows.append(("explain", f"isotype explain {report.findings[0].code}"))
    return rows


_NOTES_SHOWN, _FIXES_SHOWN = 2, 3
"""Without `-v`, a report shows at most two notes and three fixes of a finding."""


@dataclass(frozen=True)
class _Writer:
    """Writes a report as styled lines: verdict, findings, next steps, and the cost of the step.

    Attributes:
        width: maximum columns of a line. Only words that are longer than `width` exceed this width.
        in_script: True if the step ran in a script under `isotype run`.
        command_width: maximum columns of a command, or None to write each command on one line.
        whole: True to write all details of findings, memory and time.
    """

    report: Record
    width: int = LOG_WIDTH
    in_script: bool = False
    command_width: int | None = None
    whole: bool = True

    def lines(self) -> list[Line]:
        report, setup = self.report, self.report.trace.setup
        command = (("isotype run" if self.in_script else "isotype check", "bold"), ("   ", ""))
        summary = f"{verdict(report)}   ({report.seconds:.1f} s)"
        text: list[Line] = [
            *self._hang(command, f"{report.trace.model or 'model'} on {device_words(setup)}"),
            *self._hang(((" " * 3, ""),), setup_words(report.trace, self.whole), "dim"),
            (),
            *self._hang((), summary, _COLOURS[STATUS[report.status][0]]),
        ]
        if words := step_words(report):
            text += self._hang((), words)
        text.append(())
        layers = layer_counts(report.trace)
        for finding in report.findings:
            text += [*self._finding(finding, layers), ()]
        if steps := script_steps(report) if self.in_script else next_steps(report, commands=False):
            text += [*self._rows(steps), ()]
        return text + self._rows(self._numbers())

    def _numbers(self) -> list[tuple[str, str]]:
        report, setup = self.report, self.report.trace.setup
        if not self.whole:
            return [
                ("memory", parts_words(report)),
                ("FLOPs", flops_words(report)),
                *(row for row in trust(report) if row[0] != "note"),
                ("-v", f"prints memory and time in detail{_left_out(report)}"),
            ]
        rows = [
            ("data", setup.data),
            ("ranges", ranges_words(report)),
            ("memory", memory_words(report)),
            ("FLOPs", flops_words(report)),
            *time_rows(report),
            ("contracts", judged_by(setup.profile)),
            *trust(report),
        ]
        return [(label, words) for label, words in rows if words]

    def _finding(self, finding: Finding, layers: Mapping[tuple[str, int], int]) -> list[Line]:
        title = self.report.trace.setup.profile.title
        head = ((f"{finding.severity}[{finding.code}]", _STYLES[finding.severity]), (": ", "bold"))
        text = self._hang(head, finding.message, "bold")
        text += self._place(finding)
        text += _operands(finding.operands)
        text += self._field("cause", finding.cause)
        for number, step in enumerate(finding.evidence if self.whole else ()):
            text += self._field("path" if number == 0 else "", step)
        text += self._field("where", _places(finding.places, layers))
        for note in finding.notes if self.whole else finding.notes[:_NOTES_SHOWN]:
            text += self._field("note", note)
        if finding.cost is not None:
            text += self._field("cost", "; ".join(cost_clauses(finding.cost, title)))
        for fix in finding.fixes if self.whole else finding.fixes[:_FIXES_SHOWN]:
            text += self._field("help", f"{fix.description}   ({fix_standing(fix)})")
            printed = printed_command(fix.command, self.command_width, 4).split("\n") if fix.command else []
            text += [((line, ""),) for line in printed]
        return text

    def _place(self, finding: Finding) -> list[Line]:
        parts = [part for part in (finding.op, finding.phase, short_source(finding.source)) if part]
        arrow, module, rest = ("  --> ", "blue"), named(finding.module), "   ".join(parts)
        if len(arrow[0]) + len(module) + 3 + len(rest) <= self.width:
            return [(arrow, (module, ""), (f"   {rest}", "dim"))]
        head = (arrow, (elide(module, self.width - len(arrow[0])), ""))
        return [head, *self._hang((("      ", ""),), rest, "dim")]

    def _field(self, label: str, text: str) -> list[Line]:
        if not text:
            return []
        gutter = ("   = " if label else "     ", "blue")
        return self._hang((gutter, (f"{label:<5}  ", _STYLES.get(label, "bold"))), text)

    def _rows(self, rows: Sequence[tuple[str, str]]) -> list[Line]:
        text: list[Line] = []
        for before, (label, words) in zip(("", *(label for label, _ in rows)), rows, strict=False):
            shown = "" if label == before else label
            text += self._hang(((f"{shown:<9}  ", "bold"),), words)
        return text

    def _hang(self, head: Line, text: str, style: str = "") -> list[Line]:
        """Return lines that start with `head`. All lines of `text` after the first are indented by the width of `head`."""
        indent = sum(len(part) for part, _ in head)
        unbroken, room = _UNIT.sub("\N{NO-BREAK SPACE}", text), max(24, self.width - indent)
        wrapped = textwrap.wrap(unbroken, room, break_long_words=False, break_on_hyphens=False)
        first, *rest = [part.replace("\N{NO-BREAK SPACE}", " ") for part in wrapped] or [""]
        return [(*head, (first, style)), *(((" " * indent, ""), (part, style)) for part in rest)]


def _left_out(report: Record) -> str:
    notes = sum(len(finding.notes[_NOTES_SHOWN:]) for finding in report.findings)
    fixes = sum(len(finding.fixes[_FIXES_SHOWN:]) for finding in report.findings)
    counted = [f"{what} ({count:,})" for what, count in (("notes", notes), ("fixes", fixes)) if count]
    return f", and more {' and '.join(counted)}" if counted else ""


def _operands(operands: Sequence[Operand]) -> list[Line]:
    if not operands:
        return []
    texts = [(operand.role, dtype_name(operand.dtype), f"{list(operand.shape)}") for operand in operands]
    roles, dtypes = (max(len(text[column]) for text in texts) for column in (0, 1))
    gutter = ("   |   ", "blue")
    return [
        (gutter, (f"{role:<{roles}}  ", ""), (f"{dtype:<{dtypes}}   ", "bold"), (shape, "dim"))
        for role, dtype, shape in texts
    ]


def _places(places: Sequence[str], layers: Mapping[tuple[str, int], int]) -> str:
    folded = fold_places(places, layers)
    total = sum(count for _, _, count in folded)
    if total < 2:
        return ""
    groups = grouped(folded[:_PATTERNS_SHOWN], lambda row: row[0])
    lists = ((within, ", ".join(part for _, part, _ in rows)) for within, rows in groups.items())
    shown = "; ".join(f"{within}: {parts}" if within else parts for within, parts in lists)
    more = sum(count for _, _, count in folded[_PATTERNS_SHOWN:])
    head = f"{plural(total, 'place')}{' in ' if folded[0][0] else ': '}"
    return f"{head}{shown}{f' and {more:,} more' if more else ''}"


def to_text(report: Record, width: int = LOG_WIDTH) -> str:
    """Return the whole report as text without styles. The last line ends with a line break."""
    return "".join(
        "".join(text for text, _ in line).rstrip() + "\n" for line in _Writer(report, width).lines()
    )


def render(report: Record, console: Console, *, in_script: bool = False, whole: bool = False) -> None:
    """Print the report. The docstring of `_Writer` describes the arguments."""
    writer = _Writer(report, console.width, in_script, width_of(console), whole)
    for line in writer.lines():
        # The lines are wrapped already, and a module's name may look like markup of rich.
        console.print(Text.assemble(*line), soft_wrap=True, highlight=False)
