"""The HTML form of a check: one safe file in which every finding can be reached."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from isotype.records.finding import Finding
from isotype.records.memory import MEMORY_KINDS, Memory
from isotype.records.trace import Trace
from isotype.report.check.html import to_html
from tests.report.check_samples import F16, SAMPLES, clean, costly, crash, plain, setup, too_large

VOID = {"meta", "link", "br", "wbr", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced and collects what tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, css_class: str) -> list[dict[str, str]]:
        return [attrs for _, attrs in self.elements if css_class in attrs.get("class", "").split()]


@pytest.mark.parametrize("name", SAMPLES)
def test_page_stands_alone_and_every_link_arrives(name: str) -> None:
    page = Page(to_html(SAMPLES[name]()))
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(set(ids)) == len(ids)
    for _, attrs in page.elements:
        assert "src" not in attrs
        assert "style" not in attrs  # the content security policy would ignore it
        if "href" in attrs:
            assert attrs["href"].removeprefix("#") in ids
    assert not re.search(r"url\(|@import", to_html(SAMPLES[name]()))


@pytest.mark.parametrize("name", SAMPLES)
def test_page_holds_every_finding_and_the_verdict(name: str) -> None:
    from isotype.report.check.text import verdict

    report = SAMPLES[name]()
    page = Page(to_html(report))
    assert verdict(report) in page.text
    for number, finding in enumerate(report.findings, 1):
        assert f"finding-{number}" in [attrs.get("id") for attrs in page.all("finding")]
        for word in (
            finding.code,
            finding.message,
            finding.cause,
            *(fix.description for fix in finding.fixes),
        ):
            assert " ".join(word.split()) in page.text


def test_policy_allows_the_pages_own_style_and_script_only() -> None:
    text = to_html(crash())
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in text


HOSTILE = '<script>alert("1")</script>\x00'


def test_nothing_in_a_report_becomes_markup() -> None:
    name = f"model.{HOSTILE}.fc"
    finding = Finding(
        "error", HOSTILE, name, HOSTILE, HOSTILE, HOSTILE, HOSTILE, (HOSTILE,), (HOSTILE,),
        places=(name, f"{name}.1.x"), code="IST101",
    )  # fmt: skip
    trace = Trace(
        setup(batch={HOSTILE: (1, 2)}, optimizer=HOSTILE), (), (plain(name, "linear", F16, (4, 4)),), {}, Memory({}),
        notes=(HOSTILE,), model=HOSTILE,
    )  # fmt: skip
    text = to_html(replace(crash(), trace=trace, findings=(finding,)))
    page = Page(text)
    assert text.count("<script") == 1
    assert "\x00" not in text
    assert len(page.all("part-row")) == 1
    assert 'model.<script>alert("1")</script>' in page.text


def map_rows(text: str) -> dict[str, tuple[str, set[str]]]:
    """Name of a part -> the text of its row, and the numbers of its findings."""
    rows = re.findall(r'<tr class="part-row" data-findings="([\d ]*)">(.*?)</tr>', text, re.DOTALL)
    found = {}
    for numbers, row in rows:
        (name,) = re.findall(r"<code>(.*?)</code>", row)
        assert re.findall(r'href="#finding-(\d+)"', row) == numbers.split()
        found[name] = (Page(row).text, set(numbers.split()))
    return found


def test_map_marks_the_places_of_a_finding_only() -> None:
    rows = map_rows(to_html(SAMPLES["mixed_layers"]()))
    flagged = {name for name, (_, numbers) in rows.items() if "1" in numbers}
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    assert flagged == {f"model.layers.{layer}.{part}" for layer in (3, 17) for part in parts}
    assert rows["model.norm"][1] == {"2"}


def test_rows_of_the_map_say_what_a_part_holds_and_runs_in() -> None:
    rows = map_rows(to_html(costly()))
    name = "model.layers.0–29.mlp.up_proj"
    assert re.fullmatch(
        rf"{name} Linear4bit · [\d.]+ \wiB · 30 layers nf4 float32 float32( \d)*", rows[name][0]
    )
    assert "buffers float32" in rows["model.rotary_emb"][0]


def test_every_kind_of_memory_has_a_colour() -> None:
    (style,) = re.findall("<style>(.*?)</style>", to_html(clean()), re.DOTALL)
    for kind in MEMORY_KINDS:
        assert style.count(f".kind-{kind} {{") == 2  # light and dark


def test_capacity_is_a_line_where_it_is_near_and_words_where_it_is_far() -> None:
    near, far = Page(to_html(too_large())), Page(to_html(clean()))
    assert len(near.all("capacity")) == len(too_large().memory.phases)
    assert far.all("capacity") == []
    assert "38 % of the 12.5 GiB that a step may use" in far.text


def test_report_without_weights_still_is_a_page() -> None:
    empty = Trace(setup(), (), (), {}, Memory({}))
    assert "The trace has no weights and no matmuls" in Page(to_html(replace(clean(), trace=empty))).text
