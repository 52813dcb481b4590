"""One colour per dtype, the same in every report.

The colours were chosen by search in OKLCH: they maximize the smallest OKLab distance between any two, in normal
vision and under simulated protanopia, deuteranopia and tritanopia (Machado et al. 2009, severity 1.0), with a
contrast of at least 3:1 (WCAG 2.2, 1.4.11) to their panel. The dtype's name is always written beside the colour.
"""

from __future__ import annotations

from dataclasses import dataclass


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
