"""Bars, areas and the numbers on them."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isotype.records.memory import Memory, MemoryPoint
from isotype.report.check.html import timeline
from isotype.report.html import axis, environment, format_number, stacked, stacked_areas


@given(st.floats(1e-6, 1e15), st.integers(2, 12))
def test_ticks_are_even_round_and_inside(high: float, target: int) -> None:
    ticks = [place * high for place, _ in axis(high, target)]
    assert ticks[0] == 0
    assert ticks[-1] <= high * (1 + 1e-6)
    assert target // 5 <= len(ticks) <= target + 1
    gaps = [b - a for a, b in pairwise(ticks)]
    assert all(math.isclose(gap, gaps[0], rel_tol=1e-6) for gap in gaps)
    if gaps:
        assert f"{gaps[0]:.6e}"[:8] in {"1.000000", "2.000000", "5.000000"}


@pytest.mark.parametrize(
    ("high", "target", "expected"),
    [
        (1, 5, ("0.0", "0.2", "0.4", "0.6", "0.8", "1.0")),
        (0.5, 5, ("0.0", "0.1", "0.2", "0.3", "0.4", "0.5")),
        (3.05, 4, ("0", "1", "2", "3")),
        (1.6e-4, 4, ("0.00000", "0.00005", "0.00010", "0.00015")),
        (4100, 4, ("0", "2,000", "4,000")),
    ],
)
def test_tick_labels(high: float, target: int, expected: tuple[str, ...]) -> None:
    assert tuple(label for _, label in axis(high, target)) == expected
    assert axis(high, target, " GiB")[-1] == (
        float(expected[-1].replace(",", "")) / high,
        f"{expected[-1]} GiB",
    )


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


def drawn(macro: str, *arguments: object) -> ElementTree.Element:
    """Return what a macro for all pages draws."""
    macros: Any = environment().get_template("macros.html.j2").module
    return ElementTree.fromstring(getattr(macros, macro)(*arguments).strip())


def bar_of(title: str, amounts: dict[str, float]) -> ElementTree.Element:
    parts = stacked(amounts.items(), format_number, sum(amounts.values()))
    return drawn("dtype_bar", title, parts)


@given(st.text())
def test_any_text_is_escaped_and_fit_for_xml(text: str) -> None:
    assert bar_of(text, {text: 1.0}).findtext(".//title") is not None


def test_what_xml_forbids_is_replaced() -> None:
    label = bar_of("<a b='\"'> & \x00\ud800", {}).get("aria-label")
    assert label == "<a b='\"'> & \ufffd\ufffd: "


def test_a_bar_is_divided_in_proportion() -> None:
    svg = bar_of("Weights", {"nf4": 3, "float32": 1})
    assert svg.get("aria-label") == "Weights: nf4 3.000; float32 1.000"
    assert [(r.get("class"), r.get("x"), r.get("width"), r.findtext("title")) for r in svg] == [
        ("part dtype-nf4", "0.00%", "75.00%", "nf4 · 3.000 · 75.0 %"),
        ("part dtype-float32", "75.00%", "25.00%", "float32 · 1.000 · 25.0 %"),
    ]
    assert list(bar_of("Weights", {"nf4": 0})) == []


def test_stacked_areas_stand_on_each_other() -> None:
    (_, lower), (_, upper) = stacked_areas([("weights", (1.0, 1.0)), ("activations", (0.0, 3.0))], high=8.0)
    corners = [tuple(map(float, corner.split())) for corner in upper.strip("MZ").split("L")]
    tops = {x: round(8 * (1 - y / 1000), 2) for x, y in corners[:4]}
    assert tops == {0.0: 1.0, 500.0: 4.0, 1000.0: 4.0}
    assert lower.count("L") == upper.count("L") == 7


def drawn_timeline(phases: list[str], limit: int | None = None) -> ElementTree.Element:
    points = tuple(MemoryPoint(phase, {"weights": 2**30}) for phase in phases)
    memory = Memory({phase: {"weights": 2**30} for phase in phases}, timeline=points)
    return drawn("timeline_figure", timeline(memory, limit))


def test_the_timeline_has_its_phases_unit_and_limit() -> None:
    svg = drawn_timeline(["forward", "backward"], 8 * 2**30)
    assert {"forward", "backward", "GiB"} < {text.text for text in svg.iter("text")}
    limit = next(line for line in svg.iter("line") if line.get("class") == "capacity")
    assert limit.get("y1") == f"{100 * (1 - 1 / 1.06):.2f}%"  # the limit is on the axis


def test_a_short_stretch_has_no_name() -> None:
    texts = {
        text.text for text in drawn_timeline(["forward"] * 50 + ["unscale"] + ["optimizer"] * 49).iter("text")
    }
    assert {"forward", "optimizer"} < texts
    assert "unscale" not in texts
