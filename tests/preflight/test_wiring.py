"""A miswired step from the outside: what `check` says, in Python, in a terminal and in a page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import isotype
from isotype.core.errors import IsotypeError
from tests.faults.wiring import packed
from tests.zoo import ARCHITECTURES

STEP = ("forward", "backward")


@pytest.fixture(scope="module")
def report() -> isotype.Report:
    llama = ARCHITECTURES["llama"]
    batch = packed(llama.batch())
    masked = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    return isotype.check(llama.build(torch.float32), masked, device="a100", phases=STEP, verify=False)


def test_the_text_begins_with_what_is_wrong(report: isotype.Report) -> None:
    text = str(report)
    assert "This step runs, but does not train as intended: 1 error" in text
    assert "error[IST901]: the sequences of a packed row attend to each other" in text
    assert "remove attention_mask from the batch" in text
    with pytest.raises(IsotypeError, match="IST901"):
        report.raise_for_errors()


def test_the_page_shows_which_tokens_reach_which_predictions(report: isotype.Report, tmp_path: Path) -> None:
    report.to_html(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "✕ miswired" in page
    assert (
        page.count('class="wrong"') == 8 * 7
    )  # eight predictions of the second sequence see the seven tokens of the first
    assert "token 6 affects the prediction after token 7" in page


def test_it_can_be_left_out_and_goes_with_other_findings() -> None:
    llama = ARCHITECTURES["llama"]
    model, batch = llama.build(torch.float32), packed(llama.batch())
    masked = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    assert isotype.check(model, masked, device="a100", phases=STEP, wiring=False, verify=False).ok
    model.lm_head.to(torch.bfloat16)  # type: ignore[operator, union-attr]
    both = isotype.check(model, masked, device="a100", phases=STEP, verify=False)
    assert {finding.code for finding in both.errors} == {"IST101", "IST901"}
    assert "This step fails on" in str(both)


def test_a_step_without_labels_or_values_is_judged_by_its_dtypes_alone() -> None:
    llama = ARCHITECTURES["llama"]
    model = llama.build(torch.float32)
    batch = {name: value.to("meta") for name, value in llama.batch().items()}
    assert isotype.check(model, batch, device="a100").trace.reach is None
