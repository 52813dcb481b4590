"""Pages by Jinja2 templates, and their shared functions.

Templates contain the markup, Python prepares texts and lists. Every text is escaped except those marked `safe`: files
of the package and charts of `report.charts`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotype.core.errors import SaveError
from isotype.core.files import write_whole
from isotype.report.charts import xml_text

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Swatch:
    """Colour of one dtype as `#rrggbb`, on a light and on a dark page."""

    light: str
    dark: str


PALETTE: dict[str, Swatch] = {
    "float64": Swatch("#5554dd", "#a5b3fd"),
    "float32": Swatch("#173873", "#487cfc"),
    "bfloat16": Swatch("#2e9c80", "#75eeda"),
    "float16": Swatch("#c77114", "#e6ae71"),
    "float8": Swatch("#585f02", "#d1e419"),
    "nf4": Swatch("#997bdd", "#885bb2"),
    "fp4": Swatch("#a0498b", "#c178b4"),
    "mxfp4": Swatch("#c81241", "#e86265"),
    "int8": Swatch("#631e16", "#b94136"),
}
"""Storage and compute dtypes of reports; the float8 formats share one colour."""

OTHER = Swatch("#7d838c", "#7f8791")
"""Colour of everything else: integer and boolean buffers, `none`, unknown names."""


def dtype_class(name: str) -> str:
    """Return the CSS class of a dtype's colour: `"bfloat16"` -> `"dtype-bfloat16"`, unknown -> `"dtype-other"`."""
    key = "float8" if name.startswith("float8") else name
    return f"dtype-{key}" if key in PALETTE else "dtype-other"


def palette_css() -> str:
    """Return CSS rules that set the property `--dtype` in each dtype's class, for both colour schemes."""
    swatches = {**PALETTE, "other": OTHER}
    light = "".join(f".dtype-{name}{{--dtype:{swatch.light}}}" for name, swatch in swatches.items())
    dark = "".join(f".dtype-{name}{{--dtype:{swatch.dark}}}" for name, swatch in swatches.items())
    return f"{light}\n@media (prefers-color-scheme:dark){{{dark}}}\n"


def render(template: str, **content: object) -> str:
    """Render a page of `report/templates`.

    Raises:
        jinja2.UndefinedError: the template uses a name that `content` lacks.
    """
    return _environment().get_template(template).render(content)


def package_file(name: str) -> str:
    """Return the text of a style sheet or script of this package, `"style.css"`."""
    return resources.files("isotype.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    # Only pages need it: a report in a terminal starts without.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("isotype.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_fit,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    environment.filters |= {"digest": _digest, "joints": _joints, "dtype_class": dtype_class}
    return environment


def _fit(value: Any) -> Any:
    # Markup is a subclass of `str`; its text is already escaped.
    return xml_text(value) if type(value) is str else value


def _digest(text: str) -> str:
    """Return the hash by which a content security policy allows a style sheet or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _joints(text: str) -> list[str]:
    """Split text after the characters `_ / = , . : -`, where a line may break."""
    return re.split(r"(?<=[_/=,.:-])(?=[^\s\d])", text)


def write_report(path: Path, text: str) -> Path:
    """Write a report atomically; its folder is created if needed.

    Raises:
        SaveError: the file cannot be written; an existing one is unchanged.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(path, text)
    except OSError as error:
        what = f"{path}: {error.strerror or error}"
        expected = "a path that can be written to, with room for the report"
        raise SaveError.of(
            "the report could not be written",
            what,
            expected,
            "free the path or give another one",
        ) from error
