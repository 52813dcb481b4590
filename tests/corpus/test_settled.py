"""What the forward of a step has shown stays true: a fix that fails there is traced no further, and reported the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from isotype.preflight import run as preflight
from isotype.records.trace import Trace
from isotype.rules import judge
from isotype.rules.kit.contract_rule import settled
from isotype.trace.fake.step import trace_step
from tests.corpus.discover import all_scenarios
from tests.corpus.judge import check_broken
from tests.pairwise import few

CASES = ("axolotl-336", "llamafactory-3807", "peft-1052", "loraNext-161")


@functools.cache
def checked(case: str, whole: bool = False) -> tuple[Any, list[Trace]]:
    """The report of a case and its traces; `whole`: nothing is known of a step that has not ended."""
    traces: list[Trace] = []

    def tracing(*args: Any, enough: Callable[[Trace], bool] | None, **options: Any) -> Trace:
        parts: list[Trace] = []

        def asked(part: Trace) -> bool:
            parts.append(part)
            return enough is not None and enough(part)

        trace = trace_step(*args, enough=asked, **options)
        traces.append(trace)
        errors = {(each.code, each.cause) for each in judge(trace) if each.severity == "error"}
        assert all(settled(part) <= errors for part in parts)
        return trace

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "trace_step", tracing)
        patch.setattr(preflight, "settled", (lambda trace: frozenset()) if whole else settled)
        return check_broken(all_scenarios()[case].build()), traces


@pytest.mark.real_cpu
@few("case", CASES, "axolotl-336")
def test_the_report_is_that_of_whole_traces(case: str) -> None:
    def said(report: Any) -> list[Any]:
        return [(each.key, each.message, each.notes, each.fixes) for each in report.findings]

    assert said(checked(case)[0]) == said(checked(case, whole=True)[0])


@pytest.mark.real_cpu
def test_a_fix_that_fails_in_the_forward_is_traced_no_further() -> None:
    def ended(traces: list[Trace]) -> int:
        forwards = [trace for trace in traces if {call.phase for call in trace.calls} == {"forward"}]
        return sum(trace.failure is None for trace in forwards)

    _, traces = checked("axolotl-336")
    _, whole = checked("axolotl-336", whole=True)
    assert len(traces) == len(whole)
    assert ended(traces) > ended(whole)
