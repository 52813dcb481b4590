"""Bars, areas and the numbers on them."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from isotype.report.html import (
    Area,
    Part,
    escape,
    format_number,
    nice_ticks,
    stacked_areas,
    stacked_bar,
    tick_labels,
)

ends = st.floats(-1e150, 1e150)


@given(ends, ends, st.integers(2, 12))
def test_ticks_are_even_round_and_inside(low: float, high: float, target: int) -> None:
    assume(high - low > 1e-6 * max(abs(low), abs(high)))
    assume(high - low > 1e-300)
    ticks = nice_ticks(low, high, target)
    air = 1e-6 * (high - low)
    assert all(low - air <= tick <= high + air for tick in ticks)
    assert target // 5 <= len(ticks) <= target + 1
    gaps = [b - a for a, b in pairwise(ticks)]
    assert all(math.isclose(gap, gaps[0], rel_tol=1e-6) for gap in gaps)
    if gaps:
        assert f"{gaps[0]:.6e}"[:8] in {"1.000000", "2.000000", "5.000000"}
    assert len(set(tick_labels(ticks))) == len(ticks)


@pytest.mark.parametrize(
    ("low", "high", "target", "expected"),
    [
        (0, 1, 5, ("0.0", "0.2", "0.4", "0.6", "0.8", "1.0")),
        (0.98, 3.05, 4, ("1", "2", "3")),
        (0, 2.1e-4, 4, ("0", "1e-4", "2e-4")),
        (0, 1.6e-4, 4, ("0", "5e-5", "1e-4", "1.5e-4")),
        (-1, 1, 4, ("−1.0", "−0.5", "0.0", "0.5", "1.0")),
        (0, 4100, 4, ("0", "2,000", "4,000")),
        (0, 3e7, 3, ("0", "1e7", "2e7", "3e7")),
        (2.0001, 2.0004, 3, ("2.0001", "2.0002", "2.0003", "2.0004")),
    ],
)
def test_tick_labels(low: float, high: float, target: int, expected: tuple[str, ...]) -> None:
    assert tick_labels(nice_ticks(low, high, target)) == expected


def test_ticks_are_free_of_rounding() -> None:
    assert nice_ticks(0, 0.5, 5) == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


@pytest.mark.parametrize(
    ("low", "high"), [(1, 1), (2, 1), (0, math.inf), (math.nan, 1), (-1e152, 1), (0, 1e-305), (1, 1 + 1e-15)]
)
def test_ticks_refuse_what_is_no_axis(low: float, high: float) -> None:
    with pytest.raises(ValueError, match=r"^no axis from .* to "):
        nice_ticks(low, high)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (2.84312, "2.843"),
        (12345.6, "12,346"),
        (999999.7, "1e6"),
        (2e-4, "2e-4"),
        (-1.5, "−1.500"),
        (-1.5e-7, "−1.5e-7"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
    ],
)
def test_format_number(value: float, text: str) -> None:
    assert format_number(value) == text


@given(st.text())
def test_any_text_is_escaped_and_fit_for_xml(text: str) -> None:
    assert not set('<>"') & set(escape(text))
    ElementTree.fromstring(stacked_bar(text, [Part(text, 1.0, text)]))
    ElementTree.fromstring(stacked_areas(text, [Area(text, (1.0, 2.0), text)], [(text, 0)], text))


def test_escape() -> None:
    assert escape("<a b='\"'> & \x00\ud800") == "&lt;a b=&#x27;&quot;&#x27;&gt; &amp; \ufffd\ufffd"


def test_stacked_bar() -> None:
    svg = ElementTree.fromstring(
        stacked_bar("Weights", [Part("nf4", 3, "dtype-nf4"), Part("float32", 1, "dtype-float32")])
    )
    assert svg.get("aria-label") == "Weights: nf4 3.000; float32 1.000"
    assert [(r.get("class"), r.get("x"), r.get("width"), r.findtext("title")) for r in svg] == [
        ("part dtype-nf4", "0.00%", "75.00%", "nf4 · 3.000 · 75.0 %"),
        ("part dtype-float32", "75.00%", "25.00%", "float32 · 1.000 · 25.0 %"),
    ]
    assert list(ElementTree.fromstring(stacked_bar("Weights", [Part("nf4", 0, "dtype-nf4")]))) == []


def test_stacked_areas_stand_on_each_other() -> None:
    areas = [Area("weights", (1.0, 1.0), "kind-weights"), Area("activations", (0.0, 3.0), "kind-activations")]
    svg = ElementTree.fromstring(
        stacked_areas("memory", areas, [("forward", 0), ("backward", 1)], "GiB", limit=8.0)
    )
    lower, upper = (found.get("d", "") for found in svg.iter("path"))
    corners = [tuple(map(float, corner.split())) for corner in upper.strip("MZ").split("L")]
    high = 8.0 * 1.06  # the limit is on the axis
    tops = {x: round(high * (1 - y / 1000), 2) for x, y in corners[:4]}
    assert tops == {0.0: 1.0, 500.0: 4.0, 1000.0: 4.0}
    assert lower.count("L") == upper.count("L") == 7
    texts = [text.text for text in svg.iter("text")]
    assert {"forward", "backward", "GiB"} < set(texts)
    limit = next(line for line in svg.iter("line") if line.get("class") == "capacity")
    assert limit.get("y1") == f"{100 * (1 - 8.0 / high):.2f}%"


def test_a_short_stretch_has_no_name() -> None:
    spans = [("forward", 0), ("unscale", 50), ("optimizer", 51)]
    svg = ElementTree.fromstring(stacked_areas("memory", [Area("weights", (1.0,) * 100, "")], spans, "B"))
    texts = {text.text for text in svg.iter("text")}
    assert {"forward", "optimizer"} < texts
    assert "unscale" not in texts
