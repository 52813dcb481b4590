"""Renders HTML reports from Jinja2 templates, and computes ticks, bars and areas of the charts.

All texts on a page are escaped, except the style sheets and scripts of this package, which templates mark as `safe`.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotype.core.errors import SaveError
from isotype.core.files import write_whole
from isotype.core.tables import table

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Swatch:
    """The two colours of a dtype, written `#rrggbb`: one for light pages and one for dark pages."""

    light: str
    dark: str


def package_file(name: str) -> str:
    """Return the text of a file in `isotype/report`, such as `"style.css"`."""
    return resources.files("isotype.report").joinpath(name).read_text(encoding="utf-8")


PALETTE = {name: Swatch(*colours) for name, colours in table(__file__, "palette.json").items()}
"""The colours of each storage and compute dtype. All float8 formats have the same colours."""

OTHER = PALETTE.pop("other")
"""The colours of names that are not in `PALETTE`, such as integer dtypes."""


def dtype_class(name: str) -> str:
    """Return the CSS class with a dtype's colour, such as `"dtype-bfloat16"`, or `"dtype-other"` for an unknown name."""
    key = "float8" if name.startswith("float8") else name
    return f"dtype-{key}" if key in PALETTE else "dtype-other"


def palette_css() -> str:
    """Return the CSS rules that set the variable `--dtype` to the colour of each dtype, on light and dark pages."""
    swatches = {**PALETTE, "other": OTHER}
    light = "".join(f".dtype-{name}{{--dtype:{swatch.light}}}" for name, swatch in swatches.items())
    dark = "".join(f".dtype-{name}{{--dtype:{swatch.dark}}}" for name, swatch in swatches.items())
    return f"{light}\n@media (prefers-color-scheme:dark){{{dark}}}\n"


def render(template: str, **content: object) -> str:
    """Fill a template of `report/templates` with `content`. Raise UndefinedError if a variable is missing."""
    return environment().get_template(template).render(content)


@cache
def environment() -> Environment:
    # Reports in a terminal start faster without this import.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("isotype.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_replace_forbidden,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    # A browser may break a line after each of the characters `_ / = , . : -`.
    joints = partial(re.split, r"(?<=[_/=,.:-])(?=[^\s\d])")
    filters = {"digest": _digest, "joints": joints, "dtype_class": dtype_class, "percent": percent}
    environment.filters |= filters
    return environment


def _replace_forbidden(value: Any) -> Any:
    """Replace each character of a text that XML forbids with U+FFFD. A `Markup` contains no such characters."""
    return _NOT_XML.sub("\ufffd", value) if type(value) is str else value


def _digest(text: str) -> str:
    """Return the hash that allows this style sheet or script in a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def write_report(path: Path, text: str) -> Path:
    """Write a report to `path` atomically, and return `path`. Raise SaveError if the report cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(path, text)
    except OSError as error:
        what, fix = f"{path}: {error.strerror or error}", "use another path"
        expected = "a writable path, with enough space for the report"
        raise SaveError.of("the report could not be written", what, expected, fix) from error


_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def format_number(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits: `2.843`, `12,345`, `2e-4`, `NaN`, `∞`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    magnitude = int(exponent)
    text = f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{magnitude}"
    if -3 <= magnitude < 6:
        text = f"{value:,.{max(0, digits - 1 - magnitude)}f}"
    return f"−{text[1:]}" if text.startswith("-") else text


def axis(high: float, target: int = 5, unit: str = "") -> list[tuple[float, str]]:
    """Return (place, label) for each tick of an axis from 0 to `high`. The place is a fraction of the length of the
    axis.

    The interval between ticks is 1, 2 or 5 times a power of ten. The axis has at most `target` intervals.
    """
    exponent = math.floor(math.log10(high / target))
    distances = [Decimal(f"{digit}e{exponent}") for digit in (1, 2, 5)]
    distance = next((step for step in distances if step * target >= high), Decimal(f"1e{exponent + 1}"))
    ticks = [number * distance for number in range(int(Decimal(high) // distance) + 1)]
    return [(float(tick) / high, f"{tick:,f}{unit}") for tick in ticks]


def stacked(
    amounts: Iterable[tuple[str, float]], words: Callable[[Any], str], whole: float
) -> list[tuple[str, str, float, float]]:
    """Return (name, amount as text, left end, width) for each part of a bar. Left end and width are fractions of `whole`."""
    parts, left = [], 0.0
    for name, amount in amounts:
        if amount > 0:
            parts.append((name, words(amount), left, amount / whole))
            left += amount / whole
    return parts


def percent(share: float) -> str:
    """Format a fraction from 0 to 1 as a CSS percentage, such as `12.50%`."""
    return f"{100 * share:.2f}%"


def stacked_areas(areas: Sequence[tuple[str, Sequence[float]]], high: float) -> list[tuple[str, str]]:
    """Return (name, SVG path) for stacked areas in a square of 1000 units.

    Each area has an amount (at least 0) at each point. The value `high` is at the top of the square.
    """
    count = len(areas[0][1])
    floor, paths = [0.0] * count, []
    for name, amounts in areas:
        top = [low + amount for low, amount in zip(floor, amounts, strict=True)]
        around = [*_stairs(top), *reversed(_stairs(floor))]
        line = "L".join(f"{1000 * i / count:.1f} {1000 * (1 - value / high):.1f}" for i, value in around)
        paths.append((name, f"M{line}Z"))
        floor = top
    return paths


def _stairs(values: Sequence[float]) -> list[tuple[int, float]]:
    """Return the corners of a curve that stays at each value until the next point."""
    return [corner for i, value in enumerate(values) for corner in ((i, value), (i + 1, value))]
