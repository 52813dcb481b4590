"""The dtype palette: readable on both pages, and distinct for every kind of colour vision."""

from __future__ import annotations

import math
import re
from importlib import resources
from itertools import combinations

import pytest

from isotype.report.html import OTHER, PALETTE, dtype_class, palette_css

# Machado, Oliveira, Fernandes 2009, severity 1.0, for linear RGB.
VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
TO_LMS = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
TO_OKLAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)
Vector = tuple[float, ...]


def times(matrix: tuple[Vector, ...], vector: Vector) -> Vector:
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)


def linear(colour: str) -> Vector:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)


def contrast(one: str, other: str) -> float:
    dark, light = sorted(times(((0.2126, 0.7152, 0.0722),), linear(colour))[0] for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def seen(colour: str, vision: str) -> Vector:
    """OKLab coordinates of a colour as an eye of this kind sees it."""
    clipped = tuple(min(1.0, max(0.0, c)) for c in times(VISION[vision], linear(colour)))
    return times(TO_OKLAB, tuple(c ** (1 / 3) for c in times(TO_LMS, clipped)))


def page_colours(scheme: str) -> dict[str, str]:
    css = resources.files("isotype.report").joinpath("style.css").read_text(encoding="utf-8")
    light, dark = css.split("prefers-color-scheme: dark", 1)
    return dict(
        re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", light if scheme == "light" else dark.split("}")[0])
    )


def test_contrast_is_that_of_the_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", [*PALETTE, "other"])
def test_every_dtype_stands_out_from_page_and_panel(name: str, scheme: str) -> None:
    colour = getattr({**PALETTE, "other": OTHER}[name], scheme)
    page = page_colours(scheme)
    assert contrast(colour, page["paper"]) >= 3
    assert contrast(colour, page["panel"]) >= 3


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_two_dtypes_look_alike(scheme: str, vision: str) -> None:
    distances = {
        (a, b): math.dist(
            seen(getattr(PALETTE[a], scheme), vision), seen(getattr(PALETTE[b], scheme), vision)
        )
        for a, b in combinations(PALETTE, 2)
    }
    closest = min(distances, key=lambda pair: distances[pair])
    assert distances[closest] > 0.075, closest


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(scheme: str) -> None:
    page = page_colours(scheme)
    for text in ("ink", "muted", "main", "accent"):
        assert contrast(page[text], page["paper"]) >= 4.5, text
        assert contrast(page[text], page["panel"]) >= 4.5, text
    for tone in ("good", "warn", "bad"):
        assert contrast(page[tone], page[f"{tone}-wash"]) >= 4.5, tone
        assert contrast(page["ink"], page[f"{tone}-wash"]) >= 4.5, tone
    for curve in ("main", "accent", "broken"):
        assert contrast(page[curve], page["panel"]) >= 3, curve


def test_classes() -> None:
    assert dtype_class("bfloat16") == "dtype-bfloat16"
    assert dtype_class("float8_e4m3fn") == dtype_class("float8_e5m2") == "dtype-float8"
    assert dtype_class("none") == dtype_class('"><script>') == "dtype-other"


def test_css_gives_every_class_a_colour_in_both_schemes() -> None:
    light, dark = palette_css().split("@media (prefers-color-scheme:dark)")
    for name, swatch in {**PALETTE, "other": OTHER}.items():
        assert f".{dtype_class(name)}{{--dtype:{swatch.light}}}" in light
        assert f".{dtype_class(name)}{{--dtype:{swatch.dark}}}" in dark
