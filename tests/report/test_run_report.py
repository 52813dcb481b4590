"""The run report: records, JSON, sentences and the HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from isotype.core.errors import IsotypeError, SaveError
from isotype.core.names import format_bytes
from isotype.report.run import html as page
from isotype.report.run.headroom import Headroom, HeadroomSample, by_block, in_words
from isotype.report.run.html import charts_of, to_html
from isotype.report.run.record import (
    SCHEMA_VERSION,
    DataSummary,
    EvalRecord,
    PolicyRow,
    RunRecord,
    Sample,
    StepRecord,
    loss_sentences,
    reward_warnings,
    summarize,
    to_json,
)
from isotype.report.text import format_duration
from isotype.train.output.run_report import model_card, write_run_report
from tests.refusals import refused

STEPS = 150


def step_records(count: int = STEPS, scaled: bool = False, seed: int = 0) -> tuple[StepRecord, ...]:
    """A falling noisy loss with warm-up, a slow first step, and (if scaled) a GradScaler that backs off."""
    rng = random.Random(seed)
    scale, records = 65536.0, []
    for step in range(1, count + 1):
        skipped = scaled and step in (2, 3, 61)
        scale = scale / 2 if skipped else scale * 2 if scaled and step % 60 == 0 else scale
        warm = min(1.0, step / (0.08 * count))
        decay = 0.5 * (1 + math.cos(math.pi * max(0.0, step / count - 0.08) / 0.92))
        tokens = rng.randint(3200, 4096)
        records.append(
            StepRecord(
                step=step,
                loss=1.02 + 1.95 * math.exp(-step / (count / 4.5)) + rng.gauss(0, 0.13),
                learning_rate=2e-4 * warm * decay,
                grad_norm=0.35 + 1.6 * math.exp(-step / 20) + abs(rng.gauss(0, 0.12)),
                tokens=tokens,
                seconds=tokens / (3650 + rng.gauss(0, 120)) * (3.1 if step == 1 else 1.0),
                memory_bytes=int((1.62 + 0.2 * min(1.0, step / 6) + 0.012 * (step // 50)) * 2**30),
                loss_scale=scale if scaled else None,
                skipped=skipped,
            )
        )
    return tuple(records)


def realistic(**changes: Any) -> RunRecord:
    record = RunRecord(
        method="sft",
        command=(
            "isotype sft --model HuggingFaceTB/SmolLM2-135M-Instruct --dataset data/precision_qa/train.jsonl "
            "--quantization nf4 --dtype bfloat16 --lora-rank 16 --max-steps 150 --learning-rate 2e-4 "
            "--output-dir runs/precision-qa"
        ),
        started="2026-11-20T14:03:11+00:00",
        finished="2026-11-20T14:06:07+00:00",
        status="finished",
        error=None,
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        dataset="data/precision_qa/train.jsonl",
        output_dir="runs/precision-qa",
        device="cpu (x86-64, AVX-512, native bfloat16)",
        policy=(
            PolicyRow("base weights", "nf4", "asked for: --quantization nf4"),
            PolicyRow(
                "compute", "bfloat16", "the checkpoint was trained in bfloat16 and this CPU runs it natively"
            ),
            PolicyRow(
                "adapters (master)", "float32", "small learning rates would be lost in bfloat16 updates"
            ),
            PolicyRow("norms", "float32", "computed in float32, returned in bfloat16"),
            PolicyRow("optimizer state", "float32", "follows the adapters"),
            PolicyRow("softmax and loss", "float32", "sums over the vocabulary need its range and precision"),
            PolicyRow("loss scaling", "none", "bfloat16 has the exponent range of float32"),
        ),
        warnings=(
            "nf4 on a CPU dequantizes every weight in each step; expect about half the speed of bfloat16 storage.",
        ),
        versions=(
            ("isotype", "0.1.0"),
            ("torch", "2.13.0"),
            ("transformers", "5.23.0"),
            ("peft", "0.21.2"),
            ("trl", "1.16.0"),
        ),
        parameters_total=139_399_488,
        parameters_trainable=4_884_480,
        weight_bytes=(("nf4", 54_650_880), ("bfloat16", 56_688_768), ("float32", 19_537_920)),
        settings=(
            ("learning rate", "2e-4, cosine, 12 warm-up steps"),
            ("batch", "4 x 4 accumulated"),
            ("sequence length", "1024"),
            ("LoRA", "rank 16, alpha 32, dropout 0.05"),
            ("targets", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
            ("optimizer", "adamw_torch"),
            ("seed", "42"),
        ),
        steps=step_records(),
        evals=tuple(EvalRecord(step, 1.12 + 1.86 * math.exp(-step / 34)) for step in range(0, STEPS + 1, 25)),
        samples=(
            Sample(
                "Why does a T4 need loss scaling when an A100 does not?",
                "A T4 is a type of tea that is made from the leaves of the tea plant. It is scaled because the loss "
                "of the tea is high.",
                "A T4 has no bfloat16 units, so it computes in float16, whose smallest normal number is about 6e-5. "
                "Small gradients underflow to zero unless the loss is scaled up first. An A100 computes in bfloat16, "
                "which has the exponent range of float32, so no scaling is needed.",
                "A T4 computes in float16, whose range is narrow; bfloat16 on an A100 has the range of float32.",
            ),
            Sample(
                "What is nf4?",
                "nf4 is a number.",
                "A 4-bit format with quantiles of a normal distribution.",
                None,
            ),
        ),
        notes=("The tokenizer has no padding token; its end-of-sequence token pads instead.",),
        resumed_from=None,
    )
    return replace(record, **changes)


def sampled(dtype: str = "float16", growth: float = 1.0) -> Headroom:
    """Twelve samples of four blocks; the third comes closest to the end of float16, and one batch holds a spike."""
    samples = []
    for number in range(12):
        scale = growth ** (number / 11) * (1 + 0.02 * (number % 3))
        largest = [120.0, 3000.0, 25600.0, 900.0]
        samples.append(HeadroomSample(1 + 50 * number, tuple(scale * each for each in largest)))
    samples[4] = replace(samples[4], largest=(120.0, math.inf, 65000.0, 900.0))
    return Headroom(tuple(f"model.layers.{number}" for number in range(4)), dtype, tuple(samples))


def losses(*values: float) -> tuple[StepRecord, ...]:
    template = step_records(1)[0]
    return tuple(replace(template, step=i + 1, loss=value) for i, value in enumerate(values))


# --- JSON -------------------------------------------------------------------------------------------------

text = st.text(max_size=12)
pairs = st.lists(st.tuples(text, text), max_size=3).map(tuple)
texts = st.lists(text, max_size=3).map(tuple)
counts = st.integers(0, 2**63)
step_numbers = st.integers(0, 10**10)
records = st.builds(
    RunRecord,
    started=st.datetimes().map(lambda time: time.isoformat()),
    finished=st.none() | st.datetimes().map(lambda time: time.isoformat()),
    status=st.sampled_from(["finished", "interrupted", "failed"]),
    error=st.none() | text,
    method=text,
    command=text,
    model=text,
    dataset=text,
    output_dir=text,
    device=text,
    policy=st.lists(st.builds(PolicyRow, text, text, text), max_size=3).map(tuple),
    warnings=texts,
    versions=pairs,
    parameters_total=counts,
    parameters_trainable=counts,
    weight_bytes=st.lists(st.tuples(st.sampled_from(["nf4", "bfloat16", "unknown"]), counts), max_size=3).map(
        tuple
    ),
    settings=pairs,
    steps=st.lists(
        st.builds(
            StepRecord,
            step=step_numbers,
            loss=st.floats(),
            learning_rate=st.floats(),
            grad_norm=st.none() | st.floats(),
            tokens=counts,
            seconds=st.floats(),
            memory_bytes=counts,
            loss_scale=st.none() | st.floats(),
            skipped=st.booleans(),
        ),
        max_size=6,
    ).map(tuple),
    evals=st.lists(st.builds(EvalRecord, step_numbers, st.floats()), max_size=4).map(tuple),
    samples=st.lists(
        st.builds(Sample, text, st.none() | text, st.none() | text, st.none() | text), max_size=2
    ).map(tuple),
    notes=texts,
    resumed_from=st.none() | counts,
    headroom=st.none()
    | st.builds(
        Headroom,
        st.just(("a", "b")),
        text,
        st.lists(
            st.builds(HeadroomSample, step_numbers, st.tuples(st.floats(0), st.floats(0))),
            min_size=1,
            max_size=9,
        ).map(tuple),
    ),
)


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not strict JSON")


def test_non_finite_numbers_are_strings() -> None:
    written = json.loads(to_json(realistic(steps=losses(math.nan, math.inf, -math.inf))))
    assert [step["loss"] for step in written["steps"]] == ["NaN", "Infinity", "-Infinity"]
    assert written["schema_version"] == SCHEMA_VERSION == 2


def plain(value: Any) -> Any:
    """What JSON makes of a record: tuples are lists, what is no finite number is named."""
    return json.loads(json.dumps(value), parse_constant=str)


@given(records)
def test_json_holds_every_field_and_is_strict(record: RunRecord) -> None:
    written = json.loads(to_json(record), parse_constant=refuse)
    # repr tells -0.0, 1 and 1.0, True and 1 apart, which == does not.
    assert repr(written) == repr({"schema_version": SCHEMA_VERSION, **plain(asdict(record))})


def test_times_are_checked() -> None:
    with pytest.raises(IsotypeError) as caught:
        realistic(started="yesterday", finished="2026-13-01")
    fix = '\n    expected  an ISO-8601 time such as "2026-01-31T09:30:00+00:00"\n    fix       use datetime.now(timezone.utc).isoformat()'
    assert str(caught.value) == (
        f"this run cannot be recorded\n  - started = 'yesterday'{fix}\n  - finished = '2026-13-01'{fix}"
    )
    with pytest.raises(IsotypeError, match="a UTC offset in both times or in neither"):
        realistic(finished="2026-11-20T14:06:07")
    assert summarize(realistic(finished="2026-11-20T15:03:11.5Z")).seconds == 3600.5


# --- numbers and sentences --------------------------------------------------------------------------------


def sentences(**changes: Any) -> list[str]:
    return ["".join(pieces) for pieces in loss_sentences(realistic(**changes))]


def test_summary() -> None:
    steps = tuple(
        replace(step, tokens=100, seconds=seconds, memory_bytes=memory, skipped=memory == 7)
        for step, seconds, memory in zip(losses(4.0, 3.0, 2.0), (0.0, 1.0, 4.0), (5, 7, 6), strict=True)
    )
    summary = summarize(realistic(steps=steps, finished=None))
    assert (summary.steps, summary.skipped, summary.seconds) == (3, 1, 5.0)
    assert (summary.first_loss, summary.final_loss, summary.window) == (4.0, 2.0, 1)
    assert (summary.tokens_per_second, summary.peak_memory_bytes) == (62.5, 7)
    assert summarize(realistic()).seconds == 176
    assert summarize(realistic()).window == 10


def test_summary_of_nothing() -> None:
    summary = summarize(realistic(steps=(), finished=None))
    assert (summary.first_loss, summary.final_loss, summary.seconds) == (None, None, 0)
    assert (summary.tokens_per_second, summary.peak_memory_bytes) == (None, None)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ((), "No training step was recorded."),
        ((2.5,), "Training loss was 2.500 in the only step."),
        ((2.5, 1.25), "Training loss went from 2.500 to 1.250 in 2 steps, too few for a trend."),
        ((3.9, 4.2, 4.0, 4.4), "Training loss went from 3.900 to 4.400 in 4 steps, too few for a trend."),
        ((2.0, 2.00001), "Training loss stayed at 2.000 in 2 steps, too few for a trend."),
        (
            (3.9, 4.2, 4.0, 4.4, 3.8, 4.3, 4.1, 3.9, 4.2, 4.4),
            "Training loss shows no clear change: 3.900 to 4.400.",
        ),
        (tuple(1 + 0.1 * step for step in range(12)), "Training loss rose from 1.000 to 2.100."),
        (tuple(3 - 0.1 * step for step in range(12)), "Training loss fell from 3.000 to 1.900."),
        (
            (2.0, 2.3, 1.9, 2.2, 1.8, 2.1, 2.3, 1.7, 2.0, 2.2, 1.9),
            "Training loss shows no clear change: 2.000 to 1.900.",
        ),
        (
            (3.0, *[2.0] * 18, 1.0),
            "Training loss fell from 2.500 to 1.500 (means of the first and the last 2 steps).",
        ),
        (
            (3.0, math.nan, 2.0),
            "Training loss went from 3.000 to 2.000 in 3 steps, too few for a trend. In 1 of 3 steps the loss was not finite.",
        ),
        ((3.0, 2.0, math.nan, math.nan), "Training loss became NaN at step 3 and was never finite again."),
        (
            (math.inf, 2.0),
            "Training loss went from ∞ to 2.000 in 2 steps, too few for a trend. In 1 of 2 steps the loss was not finite.",
        ),
        ((math.nan,), "The training loss was never a finite number."),
        ((1e-5, *[1.0] * 9, 2e7), "Training loss rose from 1.00e−05 to 2.00e+07."),
    ],
)
def test_training_sentence(values: tuple[float, ...], sentence: str) -> None:
    assert sentences(steps=losses(*values))[0] == sentence


@pytest.mark.parametrize(
    ("evals", "sentence"),
    [
        ((), "Held-back loss was not measured."),
        (((10, 2.0),), "Held-back loss was 2.000 at step 10, the only time it was measured."),
        (((0, 3.0), (10, 2.0)), "Held-back loss fell from 3.000 to 2.000."),
        (((0, 3.0), (10, 2.998)), "Held-back loss shows no clear change: 3.000 to 2.998."),
        (
            ((0, 3.0), (1000, 1.5), (2000, 2.0)),
            "Held-back loss fell from 3.000 to 2.000; its lowest was 1.500 at step 1,000.",
        ),
        (((0, 3.0), (10, math.nan)), "Held-back loss went from 3.000 to NaN."),
        (((0, math.nan), (10, math.nan)), "Held-back loss stayed at NaN."),
    ],
)
def test_held_back_sentence(evals: tuple[tuple[int, float], ...], sentence: str) -> None:
    assert sentences(evals=tuple(EvalRecord(*pair) for pair in evals))[1] == sentence


def rewarded(*logged: tuple[int, float, float, float]) -> tuple[StepRecord, ...]:
    """Steps, some with what TRL logs of rewards: (step, mean, standard deviation, share of groups that are equal)."""
    names = ("reward", "reward_std", "frac_reward_zero_std")
    metrics = {step: tuple(zip(names, values, strict=True)) for step, *values in logged}
    return tuple(
        replace(step, metrics=metrics.get(step.step, ()))
        for step in losses(*[0.0] * max((step for step, *_ in logged), default=1))
    )


@pytest.mark.parametrize(
    ("logged", "sentence"),
    [
        (
            [(2, 0.0, 0.0, 1.0), (4, 0.0, 0.0, 1.0)],
            "Mean reward stayed at 0.000, standard deviation 0.000; all rewards of a group are equal in 100 % of the groups.",
        ),
        (
            [(1, 0.25, 0.5, 0.5), (4, 1.0, 0.125, 0.75)],  # 0.5 of one step and 0.75 of three
            "Mean reward went from 0.250 to 1.000, standard deviation 0.125; all rewards of a group are equal in 69 % of the groups.",
        ),
        (
            [(n, 0.1 * n, 0.5, 0.0) for n in range(1, 13)],
            "Mean reward rose from 0.100 to 1.200, standard deviation 0.500; all rewards of a group are equal in 0 % of the groups.",
        ),
    ],
)
def test_reward_sentence(logged: list[tuple[int, float, float, float]], sentence: str) -> None:
    assert sentences(steps=rewarded(*logged))[2:] == [sentence]
    assert sentence in unescape(re.sub(r"</?b>", "", to_html(realistic(steps=rewarded(*logged)))))


def test_a_run_without_a_reward_function_has_no_reward_sentence() -> None:
    assert len(sentences()) == 2
    assert reward_warnings(losses(1.0, 2.0)) == ()


def test_that_no_group_differs_is_a_warning() -> None:
    (warning,) = reward_warnings(rewarded((2, 0.5, 0.0, 1.0), (3, 0.0, 0.0, 1.0)))
    assert warning.startswith("in every group, all rewards are equal, so the model learns nothing.")
    assert reward_warnings(rewarded((2, 0.5, 0.0, 1.0), (3, 0.1, 0.1, 0.5))) == ()


def test_numbers_of_a_sentence_stand_at_odd_places() -> None:
    for pieces in loss_sentences(realistic(steps=rewarded((1, 0.25, 0.5, 0.5), (4, 1.0, 0.125, 0.75)))):
        assert [piece for i, piece in enumerate(pieces) if i % 2] == [
            piece for piece in pieces if re.fullmatch(r"[\d.]+", piece) and piece != "."
        ]


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1536, "1.50 KiB"),
        (36_175_872, "34.5 MiB"),
        (2**30, "1.00 GiB"),
        (2**52, "4,096 TiB"),
    ],
)
def test_bytes(amount: int, expected: str) -> None:
    assert format_bytes(amount) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (7.834e-7, "0.783 µs"),
        (0.0084, "8.40 ms"),
        (0.84, "0.840 s"),
        (12.34, "12.3 s"),
        (59.96, "60.0 s"),
        (60, "1 min 00 s"),
        (245.4, "4 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7620, "2 h 07 min"),
        (273_600, "3 d 04 h"),
        (math.nan, "NaN s"),
    ],
)
def test_durations(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


# --- HTML -------------------------------------------------------------------------------------------------

VOID = {"meta", "br", "wbr", "link", "img", "input", "hr"}
# Attributes through which a page loads or leads elsewhere.
LOADING = {"src", "href", "srcset", "data", "action", "formaction", "poster", "background", "style"}


class Page(HTMLParser):
    """Checks nesting while it reads, and keeps what the tests ask about."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append((self.open[-1] if self.open else "", data))

    def text(self) -> str:
        # Where a line of the template ends between two elements, nothing is said.
        return "".join(
            data
            for tag, data in self.words
            if tag not in ("script", "style", "title") and not (data.isspace() and "\n" in data)
        )


def empty(**changes: Any) -> RunRecord:
    nothing: dict[str, Any] = dict.fromkeys(
        ("policy", "warnings", "versions", "weight_bytes", "settings", "steps", "evals", "samples", "notes"),
        (),
    )
    return realistic(**{**nothing, **changes})


PAGES = {
    "realistic": realistic(),
    "scaled": realistic(steps=step_records(scaled=True)),
    "long": realistic(steps=step_records(2_000, scaled=True)),
    "one step": realistic(steps=step_records(1)),
    "two steps": realistic(steps=step_records(2)),
    "only NaN": realistic(steps=losses(math.nan, math.nan)),
    "some infinities": realistic(steps=losses(1.0, math.inf, -math.inf, 2.0)),
    "only evals": realistic(steps=()),
    "empty": empty(),
    "empty texts": empty(
        model="", dataset="", method="", command="", parameters_total=0, weight_bytes=(("nf4", 0),)
    ),
}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_well_formed_and_needs_nothing_else(name: str) -> None:
    html = to_html(PAGES[name])
    page = Page(html)
    assert not re.search(r"https?:|//[a-z]|@import|\burl\(", html, re.IGNORECASE)
    assert [(tag, found) for tag, attrs in page.tags if (found := LOADING & set(attrs))] == []
    assert {tag for tag, _ in page.tags} & {
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "a",
    } == set()
    plots = re.findall(r'<svg class="(?:bar|logo)".*?</svg>', html, re.DOTALL)
    assert len(plots) == 1 + html.count('class="bar"')
    for svg in plots:
        ElementTree.fromstring(svg)


def test_policy_of_the_page_allows_its_own_style_and_script_only() -> None:
    html = to_html(realistic())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    for kind in ("style", "script"):
        (content,) = re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy[1]
    assert policy[1].startswith("default-src 'none'; ")
    assert "unsafe" not in policy[1]


def test_pictures_stand_beside_their_questions() -> None:
    url = "data:image/png;base64,AAAA"
    asked = tuple(Sample(f"question {at}", "a", "b", None, (url,)) for at in range(3))
    html = to_html(replace(realistic(), samples=asked))
    assert html.count(f'<img src="{url}"') == 3
    assert "Questions about images, before and after" in html
    assert "img-src data:;" in html  # the page's own policy lets them be shown
    assert "<details><summary>2 more" not in html


def test_everything_is_said() -> None:
    record = realistic(
        steps=step_records(scaled=True), resumed_from=1200, status="failed", error="RuntimeError: no & <more>"
    )
    said = Page(to_html(record)).text()
    for sentence in sentences(steps=record.steps):
        assert sentence in said
    parts = [
        *("✕ failed", "RuntimeError: no & <more>", "resumed from step 1,200", "2026-11-20 14:03 UTC"),
        *(f"{row.role}{row.dtype}{row.reason}" for row in record.policy),
        *(f"{name}{value}" for name, value in (*record.settings, *record.versions)),
        *(record.warnings + record.notes + (record.command, record.device, record.output_dir, record.model)),
        *(sample.question for sample in record.samples),
        *(
            answer
            for s in record.samples
            for answer in (s.before, s.after, s.reference)
            if answer is not None
        ),
        *(
            "4,884,480 of 139,399,488 parameters were trained (3.5 %); the weights take 125 MiB.",
            "nf452.1 MiB54,650,880 B42 %",
        ),
        *(
            "Loss",
            "Learning rate",
            "Gradient norm before clipping",
            "Speed",
            "Peak memory of a step",
            "Loss scale",
            "3 steps skipped",
        ),
        "Peak memory is the largest memory in use during a step. On a GPU, memory in use is the memory that torch has "
        "allocated. On a CPU, memory in use is the resident size of the process, sampled every 20 ms, so short peaks can "
        "be missed. Peak memory does not include loading, evaluation and saving.",
        "written by isotype",
    ]
    assert [part for part in parts if part not in said] == []


def test_what_was_not_measured_has_no_chart_and_says_so() -> None:
    bare = tuple(replace(step, grad_norm=None, seconds=0.0, memory_bytes=0) for step in losses(2.0, 1.0))
    page = Page(to_html(realistic(steps=bare, evals=(), samples=())))
    assert sum(tag == "figure" for tag, _ in page.tags) == 2
    assert page.text().count("not measured") == 3
    assert "Peak memory is" not in page.text()
    assert "A sample question" not in page.text()


def test_an_answer_that_was_not_recorded_is_left_out() -> None:
    said = Page(to_html(realistic(samples=(Sample("Why?", None, "Because.", None),)))).text()
    assert "A sample questionWhy?AfterBecause." in said
    assert "Before" not in said


def embedded(record: RunRecord) -> Any:
    """What the script of the page reads."""
    (content,) = re.findall(r'id="run-data">(.*?)</script>', to_html(record), re.DOTALL)
    return json.loads(content, parse_constant=refuse)


def test_the_page_carries_every_number_of_the_steps() -> None:
    record = realistic(
        steps=losses(3.0, math.nan, math.inf, 1.0), evals=(EvalRecord(0, 3.5), EvalRecord(4, 1.5))
    )
    data = embedded(record)
    assert data["steps"]["loss"] == [3.0, "NaN", "Infinity", 1.0]
    assert data["steps"]["tokens"] == [step.tokens for step in record.steps]
    assert data["evals"] == {"step": [0, 4], "loss": [3.5, 1.5]}
    assert data["label"] == "precision-qa"
    assert "metrics" not in data["steps"]


def test_every_chart_names_columns_that_are_there_or_derived_and_has_a_titled_axis() -> None:
    data = embedded(PAGES["scaled"])
    known = {*data["steps"], "tokens_per_second", "memory_gib", "loss_scale_exponent"}
    assert [chart["id"] for chart in data["charts"]] == [
        "loss", "learning-rate", "gradient-norm", "speed", "memory", "loss-scale",
    ]  # fmt: skip
    for chart in data["charts"]:
        assert known.issuperset(chart["columns"])
        assert chart["unit"]
        assert len(chart["labels"]) == len(chart["columns"])
        assert f'id="chart-{chart["id"]}"' in to_html(PAGES["scaled"])
    assert data["charts"][-1]["marks"] == [2, 3, 61]


def test_preference_methods_show_margins_and_accuracies() -> None:
    logged = tuple(
        replace(
            step, metrics=(("rewards/margins", 0.1 * n), ("rewards/accuracies", 0.5), ("logps/chosen", -3.0))
        )
        if n % 2
        else step
        for n, step in enumerate(losses(*[1.0] * 6))
    )
    data = embedded(realistic(method="dpo", steps=logged))
    assert data["steps"]["rewards/margins"] == [None, 0.1, None, pytest.approx(0.3), None, 0.5]
    assert data["steps"]["logps/chosen"][1] == -3.0  # no chart of its own, but in the CSV
    assert [chart["title"] for chart in data["charts"]][1:3] == [
        "Reward margin",
        "Preferred answer ranked first",
    ]


def test_data_is_said_and_settings_break_between_words_only() -> None:
    data = DataSummary(1840, 96, 16, 1.3, (180, 420, 997), 37, 0.021, 0.31)
    record = realistic(data=data, settings=(("gradient_accumulation_steps", "4"),))
    said = Page(to_html(record)).text()
    for part in (
        "data1,840 rows, 96 held back", "effective batch16 rows a step", "epochs1.30", "1.30 epochs",
        "tokens a row180 in the median, 420 at 90 %, 997 at 99 %", "37 rows, 2.1 % of all tokens", "padding31 %",
    ):  # fmt: skip
        assert part in said
    assert "gradient_<wbr>accumulation_<wbr>steps" in to_html(record)


def test_packed_rows_are_counted_as_rows_and_packs() -> None:
    said = Page(to_html(realistic(data=DataSummary(219, 0, 1, 1.0, packs=31)))).text()
    assert "data219 rows in 31 packs" in said
    assert "effective batch1 pack a step" in said


def test_a_running_run_says_so() -> None:
    record = realistic(status="running", finished=None)
    assert "▶ running" in Page(to_html(record)).text()
    assert embedded(record)["running"] is True


@pytest.mark.lacking("" if shutil.which("chromium") else "needs Debian's chromium to run the page's script")
@pytest.mark.parametrize("name", ["scaled", "only NaN", "one step", "only evals", "empty"])
def test_the_script_draws_every_chart_in_a_browser(name: str, tmp_path: Path) -> None:
    page, _ = write_run_report(PAGES[name], tmp_path)
    flags = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    )
    command = [
        "chromium",
        *flags.split(),
        f"--user-data-dir={tmp_path}/browser",
        "--virtual-time-budget=2000",
    ]
    done = subprocess.run(
        [*command, "--enable-logging=stderr", "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    drawn = [chart for chart in charts_of(PAGES[name]) if name != "only evals" or chart.held]
    assert done.stdout.count("<canvas") == len(drawn)


def test_hostile_text_stays_text() -> None:
    evil = "</style></script><script>alert(1)</script>\"'&<img onerror=x>\x00\u202e"
    changes = dict.fromkeys(("method", "command", "error", "model", "dataset", "output_dir", "device"), evil)
    record = realistic(
        policy=(PolicyRow(evil, evil, evil),),
        warnings=(evil,),
        notes=(evil,),
        versions=((evil, evil),),
        settings=((evil, evil),),
        weight_bytes=((evil, 5),),
        samples=(Sample(evil, evil, evil, evil),),
        **changes,
    )
    harmless, page = Page(to_html(realistic(samples=record.samples[:1]))), Page(to_html(record))
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in harmless.tags} | {"h2"}
    assert page.text().count("<script>alert(1)</script>") >= 15


def test_a_model_named_script() -> None:
    html = to_html(realistic(model="<script>"))
    assert "&lt;script&gt;" in html
    assert html.count("<script>") == 1


@given(records)
@settings(max_examples=60)
def test_every_record_gives_a_page(record: RunRecord) -> None:
    Page(to_html(record))


# --- files ------------------------------------------------------------------------------------------------


def test_write_run_report(tmp_path: Path) -> None:
    record = realistic(notes=("naïve ∞ \ud800",))
    html, data = write_run_report(record, tmp_path / "new" / "run")
    assert (html, data) == (
        tmp_path / "new" / "run" / "run_report.html",
        tmp_path / "new" / "run" / "run_report.json",
    )
    assert data.read_text(encoding="utf-8") == to_json(record)
    assert html.read_text(encoding="utf-8") == to_html(record)
    assert sorted(path.name for path in html.parent.iterdir()) == ["run_report.html", "run_report.json"]
    write_run_report(realistic(notes=()), html.parent)
    assert json.loads(data.read_text(encoding="utf-8"))["notes"] == []


def test_a_failed_write_leaves_the_former_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    html, data = write_run_report(realistic(), tmp_path)
    before = html.read_bytes(), data.read_bytes()

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert refused(SaveError, write_run_report, realistic(notes=()), tmp_path) == (
        f"the report could not be written\n  - {tmp_path / 'run_report.json'}: No space left on device\n"
        "    expected  a writable path, with enough space for the report\n"
        "    fix       use another path"
    )
    assert (html.read_bytes(), data.read_bytes()) == before
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("here first")
    with pytest.raises(SaveError, match=r"^the report could not be written\n"):
        write_run_report(realistic(), tmp_path / "run")
    assert (tmp_path / "run").read_text() == "here first"


def test_the_records_need_no_torch() -> None:
    code = "import sys, isotype.report.run.record, isotype.report.run.html; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_model_card_is_filled_in() -> None:
    card = model_card(realistic())
    head, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert yaml.safe_load(head) == {
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["lora", "sft", "isotype", "trl"],
        "datasets": ["data/precision_qa/train.jsonl"],
    }
    for part in (
        "# precision-qa", "150 steps", "Training loss fell", "4,884,480 of 139,399,488", "| base weights | nf4 |",
        "| learning rate | 2e-4, cosine, 12 warm-up steps |", "$ isotype sft --model", "| torch | 2.13.0 |",
        "| Why does a T4 need loss scaling when an A100 does not? |",
    ):  # fmt: skip
        assert part in body
    assert "[More Information Needed]" not in card


def test_what_is_in_a_cell_stays_in_it() -> None:
    card = model_card(realistic(settings=(("a|b", "c\nd"),), dataset=str(Path(__file__))))
    assert "| a\\|b | c d |" in card
    assert "datasets:" not in card  # a file of this machine is nothing that the hub knows


# --- headroom ---------------------------------------------------------------------------------------------


def test_headroom_is_that_of_nine_samples_in_ten() -> None:
    blocks = by_block(sampled())
    third = blocks[2]
    assert (third.name, third.high) == ("model.layers.2", pytest.approx(25600 * 1.04))
    assert third.headroom == pytest.approx(65504 / (25600 * 1.04))
    assert third.change == pytest.approx(1.0, abs=0.05)
    assert blocks[1].high == pytest.approx(3120)  # one infinite sample of twelve


def test_headroom_in_words() -> None:
    closest = (
        "model.layers.2 has the largest outputs: up to 26,624 in nine of ten micro-batches (12 sampled). "
        "float16's largest number, 65,504, is 2.46 times as large."
    )
    assert in_words(sampled()) == closest
    overflown = replace(
        sampled(), samples=tuple(HeadroomSample(step, (1.0, math.inf, 2.0, 3.0)) for step in (1, 2))
    )
    assert in_words(overflown) == (
        "In more than one of ten micro-batches (2 sampled), outputs of model.layers.1 exceed 65,504, the largest number of float16."
    )
    grown = in_words(sampled(growth=4.0))
    assert grown.endswith(
        "Other batches may exceed float16's range. bfloat16 or a float32 residual stream has more headroom. "
        "The block's outputs grew by a factor of 2.69 over the run."
    )
    assert in_words(sampled("float32")) == (
        f"{closest} The blocks return their outputs in float32, which has a far larger range."
    )


def test_headroom_has_a_section() -> None:
    page = to_html(realistic(headroom=sampled()))
    assert "<h2>Headroom of float16</h2>" in page
    assert page.count('<svg class="range"') == 4
    assert "Headroom" not in to_html(realistic())


_JS = """
const state = { axis: "step", window: 0, all: false };
const finite = (value) => typeof value === "number" && Number.isFinite(value);
%s
const few = [3, 3.7, 3.4, 3.3, 4.2, 2.2, 3.4, 2.9], many = Array.from({ length: 60 }, (_, i) => 3 - i / 60);
many[30] = 500;
const spread = many.map((value, i) => (i %% 5 ? value : value + 50));
const limitsOf = (ys) => limits([{ xs: ys.map((_, i) => i), ys }], 0, ys.length);
console.log(JSON.stringify({ whole: incrementsOf("step").concat(incrementsOf("tokens")), minutes: incrementsOf("minutes") ?? null,
  few: limitsOf(few), many: limitsOf(many), spread: limitsOf(spread) }));
"""


@pytest.mark.skipif(
    shutil.which("node") is None, reason="no node on this machine to run the page's script in"
)
def test_ticks_of_steps_are_whole_and_few_values_are_shown_in_full():
    script = (Path(page.__file__).parent / "run.js").read_text(encoding="utf-8")
    parts = [
        ("// Steps and tokens are counted", "// A least-squares line"),
        ("// Limits that one spike", "// -----"),
    ]
    part = ""
    for first, after in parts:
        begin = script.index(first)
        part += script[begin : script.index(after, begin)]
    done = subprocess.run(["node", "-e", _JS % part], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(number == int(number) >= 1 for number in found["whole"])
    assert found["minutes"] is None  # uPlot's own, with fractions
    assert found["few"] == [2.2, 4.2]
    assert found["many"][1] < 10  # one spike does not stretch the axis
    assert found["spread"][1] == 550  # what is beyond in one of five steps is no spike
