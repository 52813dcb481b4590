"""Published runs on GPUs, which docs/plan.md compares with foreseen speed and memory."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from isotype.planning.rates import REACHED
from tests.pairwise import few

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import rates


def test_the_page_has_the_table_that_the_benchmark_writes() -> None:
    page = rates.PAGE.read_text(encoding="utf-8")
    shown = page.partition(rates.BEGIN)[2].partition(rates.END)[0]
    assert shown == rates.table(), "run `python benchmarks/rates.py table`"


def test_every_run_has_a_source_a_model_and_a_traced_step() -> None:
    published = rates.published()
    assert len(rates.runs()) == len(published["runs"]) >= 40
    assert {run["source"] for run in published["runs"]} == published["sources"].keys()
    assert all(source["url"].startswith("https://") for source in published["sources"].values())


def test_what_is_off_has_a_reason() -> None:
    assert rates.unexplained() == []


def test_the_spread_covers_four_of_five_runs_that_were_held_back() -> None:
    ratios = [run.ratio(REACHED) for run in rates.held()]
    within = [1 / REACHED.spread <= ratio <= REACHED.spread for ratio in ratios]
    assert len(ratios) >= 15
    assert sum(within) >= 0.8 * len(ratios)
    assert rates.spread_of(REACHED) == REACHED.spread


def test_no_number_of_the_model_fits_better_when_it_is_changed() -> None:
    """Each fitted number, changed by a tenth up or down."""
    some = rates.loss_of(REACHED)
    for name in rates.FITTED:
        for factor in (0.9, 1.1):
            other = replace(REACHED, **{name: getattr(REACHED, name) * factor})
            assert rates.loss_of(other) > 0.99 * some, (name, factor)


@few("device", ["rtx4090", "h100"], "h100")
def test_the_step_of_a_run_is_traced_again(device: str) -> None:
    """A run of a card has the peak and the terms of the time that the file has."""
    run = next(run for run in rates.runs() if run.published["device"] == device)
    model = rates.published()["models"][run.published["model"]]
    assert {"run": rates.name_of(run.published), **rates.step_of(run.published, model)} == run.step
