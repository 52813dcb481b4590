"""Charts: axes, columns, smoothing and the SVG they become."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from isotype.report.charts import (
    COLUMN_LIMIT,
    Chart,
    Part,
    Series,
    columns,
    escape,
    format_number,
    line_chart,
    nice_ticks,
    smooth,
    stacked_bar,
    tick_labels,
    value_range,
)

ends = st.floats(-1e150, 1e150)
anything = st.one_of(st.none(), st.floats())


def drawn(series: Series, **changes: object) -> ElementTree.Element:
    """The chart of one series, parsed: what is not well-formed XML fails here."""
    chart = replace(Chart("Loss", (series,)), **changes)  # type: ignore[arg-type]
    return ElementTree.fromstring(line_chart(chart, columns(series.steps)))


def series(*values: float | None, draw: str = "line") -> Series:
    return Series("loss", tuple(float(i + 1) for i in range(len(values))), values, draw)  # type: ignore[arg-type]


def path(svg: ElementTree.Element, css_class: str) -> str:
    return "".join(
        found.get("d", "") for found in svg.iter("path") if (found.get("class") or "").startswith(css_class)
    )


def tooltips(svg: ElementTree.Element) -> list[str | None]:
    return [hit.findtext("title") for hit in svg.iter("rect") if hit.get("class") == "hit"]


def labels(svg: ElementTree.Element, anchor: str) -> list[str | None]:
    return [text.text for text in svg.iter("text") if text.get("text-anchor") == anchor]


# --- axes -------------------------------------------------------------------------------------------------


@given(ends, ends, st.integers(2, 12), st.booleans())
def test_ticks_are_even_round_and_inside(low: float, high: float, target: int, whole: bool) -> None:
    assume(high - low > 1e-6 * max(abs(low), abs(high)))
    assume(high - low > (2 if whole else 1e-300))
    ticks = nice_ticks(low, high, target, whole)
    air = 1e-6 * (high - low)
    assert all(low - air <= tick <= high + air for tick in ticks)
    assert (1 if whole else target // 5) <= len(ticks) <= target + 1
    gaps = [b - a for a, b in pairwise(ticks)]
    assert all(math.isclose(gap, gaps[0], rel_tol=1e-6) for gap in gaps)
    if gaps:
        assert f"{gaps[0]:.6e}"[:8] in {"1.000000", "2.000000", "5.000000"}
    if whole:
        assert all(tick == round(tick) for tick in ticks)
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


@given(st.lists(ends), st.booleans(), st.booleans())
def test_value_range_holds_every_value_and_has_ticks(values: list[float], zero: bool, whole: bool) -> None:
    assume(not whole or all(abs(value) < 1e6 for value in values))
    low, high = value_range(values, zero, whole)
    assert all(low <= value <= high for value in values)
    assert not zero or low <= 0 <= high
    assert nice_ticks(low, high, whole=whole)


def test_value_range_of_nothing_and_of_constants() -> None:
    assert value_range([]) == (0.0, 1.0)
    assert value_range([0.0, 0.0]) == (-0.5, 0.5)
    assert value_range([0.0], zero=True) == (0.0, 0.5)
    assert value_range([2.0, 2.0]) == (1.8, 2.2)
    assert value_range([16.0], whole=True) == (14, 18)


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


# --- data -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**7), max_size=60), st.integers(1, 20))
def test_columns_touch_and_hold_every_step_once(steps: list[int], limit: int) -> None:
    over = columns(steps, limit)
    assert len(over) == min(limit, len(set(steps)))
    for step in steps:
        assert sum(column.first <= step <= column.last for column in over) == 1
    assert all(
        column.left < column.right and column.left <= column.first <= column.last <= column.right
        for column in over
    )
    assert all(a.right == b.left for a, b in pairwise(over))


@given(st.lists(anything, max_size=40), st.sampled_from([3, 5, 13]))
def test_smoothing_leaves_gaps_and_invents_no_infinities(values: list[float | None], window: int) -> None:
    result = smooth(values, window)
    assert len(result) == len(values)
    for value, smoothed in zip(values, result, strict=True):
        if value is None or not abs(value) <= 1e150:
            assert smoothed is None
        else:
            assert smoothed is not None
            assert math.isfinite(smoothed)


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.integers(1, 30))
def test_smoothing_keeps_a_line_up_to_its_ends(start: float, slope: float, count: int) -> None:
    line = [start + slope * i for i in range(count)]
    assert smooth(line, 7) == pytest.approx(line, abs=1e-6)


def test_smoothing_is_the_mean_inside() -> None:
    assert smooth([0.0, 3.0, 0.0, 6.0, 0.0], 3)[1:4] == pytest.approx((1.0, 3.0, 2.0))


# --- drawing ----------------------------------------------------------------------------------------------


@given(
    st.lists(anything, max_size=30),
    st.sampled_from(["line", "area", "stairs", "dots", "diamonds"]),
    st.booleans(),
)
def test_any_values_give_well_formed_svg_inside_the_plot(
    values: list[float | None], draw: str, zero: bool
) -> None:
    svg = drawn(series(*values, draw=draw), zero=zero)
    text = ElementTree.tostring(svg, encoding="unicode")
    assert not re.search(r'="[^"]*(nan|inf)', text)
    numbers = re.findall(r"-?\d+\.?\d*", path(svg, "line") + path(svg, "area") + path(svg, "bars"))
    assert all(0 <= float(number) <= 1000 for number in numbers)
    shares = [c.get(a, "")[:-1] for c in svg.iter("circle") for a in ("cx", "cy")]
    assert all(0 <= float(share) <= 100 for share in shares)


def test_nothing_recorded() -> None:
    assert drawn(series()).attrib["aria-label"] == "Loss: nothing recorded"


def test_one_point_is_a_dot() -> None:
    svg = drawn(series(2.5))
    assert [(c.get("cx"), c.get("cy")) for c in svg.iter("circle")] == [("50.00%", "50.00%")]
    assert path(svg, "line") == ""
    assert labels(svg, "middle") == ["1"]
    assert svg.get("aria-label") == "Loss. loss: 2.500 at step 1."


def test_two_points_are_a_line() -> None:
    assert path(drawn(series(1.0, 2.0)), "line") == "M250 946.4L750 53.6"


def test_stairs_turn_at_right_angles() -> None:
    assert path(drawn(series(1.0, 2.0, draw="stairs")), "line") == "M250 946.4H750V53.6"


def test_area_stands_on_zero() -> None:
    assert path(drawn(series(0.0, 1.06, draw="area"), zero=True), "area") == "M250 1000V1000L750 56.6V1000Z"


def test_missing_values_are_gaps_without_a_band() -> None:
    svg = drawn(series(1.0, 2.0, None, 2.0, 1.0))
    assert path(svg, "line").count("M") == 2
    assert [rect for rect in svg.iter("rect") if rect.get("class") == "broken"] == []
    assert tooltips(svg)[2] == "step 3"


def test_values_that_are_not_finite_are_gaps_in_a_band() -> None:
    svg = drawn(series(1.0, 2.0, math.nan, math.inf, 2.0, 1.0, -math.inf, 1.0))
    bands = [(r.get("x"), r.get("width")) for r in svg.iter("rect") if r.get("class") == "broken"]
    assert bands == [("25.00%", "25.00%"), ("75.00%", "12.50%")]
    assert path(svg, "line").count("M") == 2
    assert tooltips(svg)[2:4] == ["step 3 · loss NaN", "step 4 · loss ∞"]
    assert svg.get("aria-label") == (
        "Loss. loss: from 1.000 at step 1 to 1.000 at step 8, between 1.000 and 2.000."
    )


def test_only_nan() -> None:
    svg = drawn(series(math.nan, math.nan))
    assert "no finite value" in labels(svg, "middle")
    assert svg.get("aria-label") == "Loss. loss: from NaN at step 1 to NaN at step 2."


@pytest.mark.parametrize("draw", ["line", "dots"])
def test_spikes_survive_ten_thousand_steps(draw: str) -> None:
    values = [1.0 + 0.001 * (i % 7) for i in range(10_000)]
    values[6_543], values[8_000] = 9.0, -7.0
    svg = drawn(series(*values, draw=draw))
    curve = path(svg, "line") + path(svg, "bars")
    heights = [float(y) for y in re.findall(r"(?: |V)([\d.]+)", curve)]
    assert min(heights) == pytest.approx(1000 * 0.06 / 1.12, abs=0.1)
    assert max(heights) == pytest.approx(1000 * 1.06 / 1.12, abs=0.1)
    assert len(heights) <= 2 * COLUMN_LIMIT
    assert len(tooltips(svg)) == COLUMN_LIMIT
    assert sum("9.000" in (text or "") for text in tooltips(svg)) == 1


def test_nan_among_ten_thousand_steps_survives() -> None:
    values = [1.0] * 10_000
    values[5_000] = math.nan
    svg = drawn(series(*values))
    assert sum(rect.get("class") == "broken" for rect in svg.iter("rect")) == 1
    assert tooltips(svg)[200] == "steps 5,001–5,025 · loss 1.000, NaN"


def test_diamonds_keep_their_shape() -> None:
    svg = drawn(series(1.0, math.nan, 2.0, draw="diamonds"))
    assert [
        inner.get("x") for inner in svg.iter("svg") if (inner.get("class") or "").startswith("diamond")
    ] == [
        "16.67%",
        "83.33%",
    ]


def test_powers_of_two_and_marks() -> None:
    chart = {"powers_of_two": True, "marked_steps": (2.0,), "marked_label": "step skipped"}
    svg = drawn(series(16.0, 15.0, 15.0, draw="stairs"), **chart)
    assert labels(svg, "end") == ["16,384", "32,768", "65,536", "131,072"]
    assert tooltips(svg)[1] == "step 2 · loss 15.00 · step skipped"
    assert path(svg, "mark") == "M500 1000V900"
    assert str(svg.get("aria-label")).endswith(". step skipped: 1.")
    assert labels(drawn(series(30.0, 31.0), powers_of_two=True), "end") == ["2²⁹", "2³⁰", "2³¹", "2³²"]


def test_reference_line() -> None:
    assert path(drawn(series(0.0, 1.0), zero=True, reference=0.53), "reference") == "M0 500H1000"


@given(st.text())
def test_any_text_is_escaped_and_fit_for_xml(text: str) -> None:
    named = replace(series(1.0, 2.0), label=text)
    svg = drawn(named, title=text)
    assert tooltips(svg)[0] is not None
    assert not set('<>"') & set(escape(text))
    ElementTree.fromstring(stacked_bar(text, [Part(text, 1.0, text)]))


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
