"""Charts as inline SVG, drawn by pure functions: data in, text out.

A chart stretches to the width it is given without distorting its text: labels and marks are placed in per cent of
the plot, curves in a nested viewport of 1000 x 1000 units with strokes that do not scale. The margins for the axis
labels, and every colour, come from `style.css`.

Long series are cut into at most 400 columns of neighbouring steps. Of each column the smallest and the largest value
are drawn, so that a spike of a single step survives; the columns also carry the tooltips.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape as _escape
from itertools import pairwise
from typing import Literal

COLUMN_LIMIT = 400
# Differences of larger numbers could overflow; they are drawn like infinities.
PLOTTABLE = 1e150
SMALLEST = 1e-290

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape(text: str) -> str:
    """Text for HTML and XML, inside and outside of attributes; characters that XML forbids become U+FFFD."""
    return _escape(_NOT_XML.sub("\ufffd", text), quote=True)


# --- axes -------------------------------------------------------------------------------------------------


def nice_ticks(low: float, high: float, target: int = 5, whole: bool = False) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten that lie in `[low, high]`.

    Args:
        low: lower end of the axis.
        high: upper end of the axis, above `low` by more than 1e-12 of the larger magnitude and than 1e-300.
        target: wanted number of intervals; there are at most so many, and at least a fifth of it.
        whole: whole numbers only.

    Raises:
        ValueError: the ends are not ordered, too close or beyond ten times `PLOTTABLE`.
    """
    magnitude = max(abs(low), abs(high))
    if not (magnitude <= 10 * PLOTTABLE and high - low > max(1e-12 * magnitude, 1e-300)):
        raise ValueError(f"no axis from {low} to {high}")
    raw = (high - low) / target
    exponent = math.floor(math.log10(raw))
    mantissa = next((m for m in (1, 2, 5) if m * 10.0**exponent >= raw), 10)
    if whole and exponent < 0:
        mantissa, exponent = 1, 0
    step = mantissa * 10.0**exponent
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Dividing by an exact power of ten gives 0.3 where multiplying by 0.1 gives 0.30000000000000004.
    scale = 10.0 ** abs(exponent)
    return tuple(
        i * mantissa * scale if exponent >= 0 else i * mantissa / scale for i in range(first, last + 1)
    )


def tick_labels(ticks: Sequence[float]) -> tuple[str, ...]:
    """Labels with as many decimals as the distance of the ticks asks for; exponents below 0.001 and from 1e6."""
    if len(ticks) < 2:
        return tuple(_minus(f"{tick:,.10g}") for tick in ticks)
    largest = max(abs(tick) for tick in ticks)
    # The step is recovered from rounded ticks, so its exponent is read from a rounded mantissa.
    step = int(f"{(ticks[-1] - ticks[0]) / (len(ticks) - 1):.3e}".split("e")[1])
    if not 1e-3 <= largest < 1e6:
        digits = int(f"{largest:.3e}".split("e")[1]) - step
        return tuple(_exponent(tick, digits) for tick in ticks)
    return tuple(_minus(f"{tick + 0.0:,.{max(0, -step)}f}") for tick in ticks)


def format_number(value: float, digits: int = 4) -> str:
    """A number with that many significant digits: `2.843`, `12,345`, `2e-4`, `NaN`, `∞`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    magnitude = int(f"{value:.{digits - 1}e}".split("e")[1])
    if not -3 <= magnitude < 6:
        return _exponent(value, digits - 1)
    return _minus(f"{value:,.{max(0, digits - 1 - magnitude)}f}")


def _exponent(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{max(0, digits)}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return _minus(f"{mantissa}e{int(exponent)}")


def _minus(text: str) -> str:
    return f"−{text[1:]}" if text.startswith("-") else text


def value_range(values: Sequence[float], zero: bool = False, whole: bool = False) -> tuple[float, float]:
    """The ends of a value axis that holds all values with some air; from 0 on if `zero`.

    No value gives 0 to 1, a constant an axis around it.
    """
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    magnitude = max(abs(low), abs(high))
    # Below SMALLEST a span is nothing to draw and would underflow where it is divided.
    constant = high - low <= max(1e-6 * magnitude, SMALLEST)
    wide = magnitude * 0.1 if magnitude > SMALLEST else 0.5
    air = wide if constant else (high - low) * 0.06
    low, high = low - (0.0 if zero and low == 0 else air), high + air
    return (math.floor(low), math.ceil(high)) if whole else (low, high)


# --- data -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """Neighbouring steps that share one tooltip: steps `first` to `last`, drawn from `left` to `right`."""

    first: float
    last: float
    left: float
    right: float


def columns(steps: Sequence[float], limit: int = COLUMN_LIMIT) -> tuple[Column, ...]:
    """Cut the steps (in any order, with repeats) into at most `limit` columns that touch each other."""
    ordered = sorted(set(steps))
    if not ordered:
        return ()
    count = min(limit, len(ordered))
    starts = [i * len(ordered) // count for i in range(count)] + [len(ordered)]
    groups = [(ordered[a], ordered[b - 1]) for a, b in pairwise(starts)]
    inner = [(a[1] + b[0]) / 2 for a, b in pairwise(groups)]
    air = (ordered[-1] - ordered[0]) / (2 * (len(ordered) - 1)) if len(ordered) > 1 else 0.5
    edges = [ordered[0] - air, *inner, ordered[-1] + air]
    return tuple(Column(*group, edges[i], edges[i + 1]) for i, group in enumerate(groups))


def smooth(values: Sequence[float | None], window: int) -> tuple[float | None, ...]:
    """The least-squares line through up to `window` (an odd number of) values around each, taken at its middle.

    This is the Savitzky-Golay filter of degree 1: a moving mean inside, and at the ends a line that neither lags
    behind the values nor follows their noise. None where the value itself is not finite.
    """
    result: list[float | None] = []
    for i, value in enumerate(values):
        start = max(0, i - window // 2)
        near = [
            (k - i, v)
            for k, v in enumerate(values[start : i + window // 2 + 1], start)
            if v is not None and _drawable(v)
        ]
        result.append(_line_at_zero(near) if value is not None and _drawable(value) else None)
    return tuple(result)


def _line_at_zero(points: Sequence[tuple[int, float]]) -> float:
    count = len(points)
    middle = sum(k for k, _ in points) / count
    mean = sum(v / count for _, v in points)
    spread = sum((k - middle) ** 2 for k, _ in points)
    slope = sum((k - middle) * (v - mean) for k, v in points) / spread if spread else 0.0
    return mean - slope * middle


def _drawable(value: float) -> bool:
    return abs(value) <= PLOTTABLE


@dataclass(frozen=True)
class Series:
    """Values over steps.

    Attributes:
        label: what the values are, for legend and tooltip.
        steps: ascending.
        values: None where nothing was measured (a gap), NaN or infinite where the value is not finite (a gap, marked).
        draw: how: a line, a line over a filled area, a line with right-angled steps, dots, or diamonds.
        tone: the colour, one of the classes in `style.css`.
    """

    label: str
    steps: tuple[float, ...]
    values: tuple[float | None, ...]
    draw: Literal["line", "area", "stairs", "dots", "diamonds"] = "line"
    tone: Literal["main", "soft", "accent"] = "main"


@dataclass(frozen=True)
class Chart:
    """What to draw over the steps of a run.

    Attributes:
        title: the chart's name, said to screen readers.
        series: drawn in this order.
        zero: the value axis starts at 0.
        powers_of_two: the values are exponents of 2 and their axis is labelled so.
        reference: a value to mark with a dashed line.
        marked_steps: steps to mark at the foot of the chart.
        marked_label: what such a mark means.
        number: how tooltips write a value.
        intervals: wanted numbers of intervals on the step axis and on the value axis.
    """

    title: str
    series: tuple[Series, ...]
    zero: bool = False
    powers_of_two: bool = False
    reference: float | None = None
    marked_steps: tuple[float, ...] = ()
    marked_label: str = ""
    number: Callable[[float], str] = format_number
    intervals: tuple[int, int] = (6, 4)


# --- drawing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scale:
    """Maps an interval of data to `[0, 1]`; `flip` for the vertical axis, which grows downwards on a screen."""

    low: float
    high: float
    flip: bool = False

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return 1 - share if self.flip else share


def line_chart(chart: Chart, over: Sequence[Column]) -> str:
    """One chart as an `<svg>`.

    Args:
        chart: what to draw.
        over: columns made from at least all steps of the chart; charts over the same columns line up.
    """
    values = [v for s in chart.series for v in s.values if v is not None and _drawable(v)]
    if not over:
        return f'<svg class="plot" role="img" aria-label="{escape(chart.title)}: nothing recorded"></svg>'
    x = _Scale(over[0].left, over[-1].right)
    reference = [] if chart.reference is None or not _drawable(chart.reference) else [chart.reference]
    low, high = value_range(values + reference, chart.zero, chart.powers_of_two)
    y = _Scale(low, high, flip=True)
    binned = [_bin(s, over) for s in chart.series]
    body = [
        _axes(x, y, chart, labelled=bool(values)),
        _broken(binned, over, x),
        '<svg class="curves" viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">',
        *(_path("reference", f"M0 {_unit(y(value))}H1000") for value in reference),
        *(_curve(s, bins, x, y) for s, bins in zip(chart.series, binned, strict=True)),
        _marks(chart, over, x),
        "</svg>",
        *(_dots(s, bins, x, y) for s, bins in zip(chart.series, binned, strict=True)),
        *(_diamonds(s, x, y) for s in chart.series if s.draw == "diamonds"),
        _tooltips(chart, binned, over, x),
    ]
    return f'<svg class="plot" role="img" aria-label="{escape(_in_words(chart))}">{"".join(body)}</svg>'


_Point = tuple[float, "float | None"]


def _bin(series: Series, over: Sequence[Column]) -> tuple[tuple[_Point, ...], ...]:
    bins: list[list[_Point]] = [[] for _ in over]
    lasts = [column.last for column in over]
    for point in zip(series.steps, series.values, strict=True):
        bins[bisect_left(lasts, point[0])].append(point)
    return tuple(tuple(points) for points in bins)


def _extremes(points: Sequence[_Point]) -> list[_Point]:
    """The smallest and the largest drawable point in the order of their steps, and a gap if one is not drawable."""
    solid = [(step, value) for step, value in points if value is not None and _drawable(value)]
    kept: list[_Point] = list(solid)
    if len(solid) > 2:
        lowest, highest = min(solid, key=lambda p: p[1]), max(solid, key=lambda p: p[1])
        kept = [*sorted({lowest, highest})]
    return [*kept, (points[-1][0], None)] if len(solid) < len(points) else kept


def _axes(x: _Scale, y: _Scale, chart: Chart, labelled: bool) -> str:
    parts = []
    if labelled:
        ticks = nice_ticks(y.low, y.high, chart.intervals[1], whole=chart.powers_of_two)
        labels = _powers(ticks) if chart.powers_of_two else tick_labels(ticks)
        for tick, label in zip(ticks, labels, strict=True):
            at = _percent(y(tick))
            parts.append(f'<line class="grid" x1="0" x2="100%" y1="{at}" y2="{at}"/>')
            parts.append(f'<text class="tick" x="-8" y="{at}" dy="0.32em" text-anchor="end">{label}</text>')
    else:
        parts.append('<text class="tick" x="50%" y="50%" text-anchor="middle">no finite value</text>')
    parts.append('<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>')
    ticks = nice_ticks(x.low, x.high, chart.intervals[0], whole=True)
    for tick in ticks:
        parts.append(
            f'<text class="tick" x="{_percent(x(tick))}" y="100%" dy="1.5em" text-anchor="middle">{tick:,.0f}</text>'
        )
    return "".join(parts)


def _powers(exponents: Sequence[float]) -> tuple[str, ...]:
    if all(0 <= exponent < 20 for exponent in exponents):
        return tuple(f"{2**exponent:,.0f}" for exponent in exponents)
    return tuple(f"2{f'{exponent:.0f}'.translate(_SUPERSCRIPT)}" for exponent in exponents)


def _runs(bins: Sequence[Sequence[_Point]]) -> list[list[tuple[float, float]]]:
    """The points to draw, cut wherever there is a gap."""
    runs: list[list[tuple[float, float]]] = [[]]
    for points in bins:
        for step, value in _extremes(points) if points else []:
            if value is None:
                runs.append([])
            else:
                runs[-1].append((step, value))
    return [run for run in runs if run]


def _curve(series: Series, bins: Sequence[Sequence[_Point]], x: _Scale, y: _Scale) -> str:
    if series.draw == "diamonds":
        return ""
    if series.draw == "dots":
        return _bars(series, bins, x, y)
    join = "H{0}V{1}" if series.draw == "stairs" else "L{0} {1}"
    runs = [[(_unit(x(step)), _unit(y(value))) for step, value in run] for run in _runs(bins) if len(run) > 1]
    lines = ["".join(join.format(a, b) for a, b in run[1:]) for run in runs]
    line = _path(
        f"line {series.tone}",
        "".join(f"M{r[0][0]} {r[0][1]}{rest}" for r, rest in zip(runs, lines, strict=True)),
    )
    if series.draw != "area":
        return line
    floor = _unit(min(1.0, max(0.0, y(0.0))))
    areas = [
        f"M{run[0][0]} {floor}V{run[0][1]}{rest}V{floor}Z" for run, rest in zip(runs, lines, strict=True)
    ]
    return _path(f"area {series.tone}", "".join(areas)) + line


def _bars(series: Series, bins: Sequence[Sequence[_Point]], x: _Scale, y: _Scale) -> str:
    """Columns of more than two points as bars from the smallest to the largest: dots there would leave a hollow."""
    bars = []
    for points in bins:
        values = [value for _, value in points if value is not None and _drawable(value)]
        if len(points) > 2 and values:
            middle = (points[0][0] + points[-1][0]) / 2
            bars.append(f"M{_unit(x(middle))} {_unit(y(min(values)))}V{_unit(y(max(values)))}")
    return _path(f"bars {series.tone}", "".join(bars))


def _dots(series: Series, bins: Sequence[Sequence[_Point]], x: _Scale, y: _Scale) -> str:
    """Dots for a series drawn so, and for the points of a line that stand alone between two gaps."""
    if series.draw == "diamonds":
        return ""
    if series.draw == "dots":
        dots = [point for points in bins if len(points) <= 2 for run in _runs([points]) for point in run]
    else:
        dots = [run[0] for run in _runs(bins) if len(run) == 1]
    circles = "".join(
        f'<circle cx="{_percent(x(step))}" cy="{_percent(y(value))}" r="2"/>' for step, value in dots
    )
    return f'<g class="dots {series.tone}">{circles}</g>' if circles else ""


def _broken(binned: Sequence[Sequence[Sequence[_Point]]], over: Sequence[Column], x: _Scale) -> str:
    """Bands behind the columns that hold a value which is not finite; neighbours become one band."""
    bad = [
        any(value is not None and not _drawable(value) for bins in binned for _, value in bins[i])
        for i in range(len(over))
    ]
    bands: list[tuple[float, float]] = []
    for column in (column for column, is_bad in zip(over, bad, strict=True) if is_bad):
        joined = bool(bands) and bands[-1][1] == column.left
        bands[-1:] = [(bands[-1][0], column.right)] if joined else [*bands[-1:], (column.left, column.right)]
    return "".join(f'<rect class="broken" {_span(x, left, right)}/>' for left, right in bands)


def _diamonds(series: Series, x: _Scale, y: _Scale) -> str:
    # Every point is its own nested viewport, so that a per-cent position can carry a shape of fixed size.
    shape = '<path d="M0 -5.5L5.5 0L0 5.5L-5.5 0Z"/></svg>'
    return "".join(
        f'<svg class="diamond {series.tone}" overflow="visible" x="{_percent(x(step))}" y="{_percent(y(value))}">{shape}'
        for step, value in zip(series.steps, series.values, strict=True)
        if value is not None and _drawable(value)
    )


def _marks(chart: Chart, over: Sequence[Column], x: _Scale) -> str:
    lasts = [column.last for column in over]
    held = sorted({bisect_left(lasts, step) for step in chart.marked_steps})
    middles = [(over[i].first + over[i].last) / 2 for i in held]
    return _path("mark", "".join(f"M{_unit(x(middle))} 1000V900" for middle in middles)) if held else ""


def _tooltips(
    chart: Chart, binned: Sequence[Sequence[Sequence[_Point]]], over: Sequence[Column], x: _Scale
) -> str:
    lasts = [column.last for column in over]
    marked = {bisect_left(lasts, step) for step in chart.marked_steps}
    parts = []
    for i, column in enumerate(over):
        one = column.first == column.last
        words = [f"step {column.first:,.0f}" if one else f"steps {column.first:,.0f}–{column.last:,.0f}"]
        for series, bins in zip(chart.series, binned, strict=True):
            found = [value for _, value in bins[i] if value is not None]
            if found:
                words.append(f"{series.label} {_spread(found, chart.number)}")
        if i in marked:
            words.append(chart.marked_label)
        title = escape(" · ".join(words))
        parts.append(f'<rect class="hit" {_span(x, column.left, column.right)}><title>{title}</title></rect>')
    return "".join(parts)


def _spread(values: Sequence[float], number: Callable[[float], str]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    texts = list(dict.fromkeys(number(value) for value in (min(finite), max(finite)))) if finite else []
    odd = sorted({number(value) for value in values if not math.isfinite(value)})
    return ", ".join([" to ".join(texts), *odd] if texts else odd)


def _in_words(chart: Chart) -> str:
    sentences = [chart.title]
    for series in chart.series:
        points = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if v is not None]
        if not points:
            sentences.append(f"{series.label}: not measured")
            continue
        (first, start), (last, end) = points[0], points[-1]
        ends = f"{chart.number(start)} at step {first:,.0f}"
        if len(points) > 1:
            finite = [v for _, v in points if math.isfinite(v)]
            span = f", between {chart.number(min(finite))} and {chart.number(max(finite))}" if finite else ""
            ends = f"from {ends} to {chart.number(end)} at step {last:,.0f}{span}"
        sentences.append(f"{series.label}: {ends}")
    if chart.marked_steps:
        sentences.append(f"{chart.marked_label}: {len(chart.marked_steps):,}")
    return ". ".join(sentences) + "."


@dataclass(frozen=True)
class Part:
    """One part of a whole: its name, its amount (not negative), and the CSS class that colours it."""

    label: str
    amount: float
    css_class: str


def stacked_bar(title: str, parts: Sequence[Part], number: Callable[[float], str] = format_number) -> str:
    """One horizontal bar, as wide as it is let, divided in proportion to the parts; empty where they add up to 0."""
    total = sum(part.amount for part in parts)
    words = "; ".join(f"{part.label} {number(part.amount)}" for part in parts)
    rects, left = [], 0.0
    for part in parts if total > 0 else ():
        share = part.amount / total
        text = escape(f"{part.label} · {number(part.amount)} · {100 * share:.1f} %")
        rects.append(
            f'<rect class="part {escape(part.css_class)}" x="{_percent(left)}" width="{_percent(share)}" height="100%">'
            f"<title>{text}</title></rect>"
        )
        left += share
    return f'<svg class="bar" role="img" aria-label="{escape(f"{title}: {words}")}">{"".join(rects)}</svg>'


def _path(css_class: str, data: str) -> str:
    return f'<path class="{css_class}" d="{data}"/>' if data else ""


def _span(x: _Scale, left: float, right: float) -> str:
    return f'x="{_percent(x(left))}" width="{_percent(x(right) - x(left))}" height="100%"'


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _unit(share: float) -> str:
    return f"{1000 * share:.1f}".removesuffix(".0")
