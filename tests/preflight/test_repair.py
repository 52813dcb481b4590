"""repair: verified fixes, in place, jointly planned, and taken back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from isotype.core.errors import UsageError
from isotype.preflight.check import check
from isotype.preflight.repair import Repairs, plan, repair
from isotype.records.finding import Action, Finding, Fix, by_preference, in_library
from isotype.report.check.report import Report
from tests.reality import real_step
from tests.refusals import refused
from tests.small import BF16, ids, net, wide_norms


def frozen() -> nn.Module:
    """Wide norms under one trainable part."""
    made = wide_norms().requires_grad_(False)
    made.embed.requires_grad_()
    return made


@pytest.mark.real_cpu
def test_the_broken_net_trains_after_it() -> None:
    model = frozen()
    assert real_step(frozen(), ids()).phase == "forward"
    (done, *_) = repair(model, check(model, ids(), device="cpu"))
    assert (done.description, done.safety, done.verified) == (
        "return each ScaledNorm's output in bfloat16",
        "safe",
        True,
    )
    assert check(model, ids(), device="cpu").ok
    assert real_step(model, ids()).error is None


@pytest.mark.real_cpu
def test_a_warning_is_not_repaired_by_what_only_the_caller_can_do() -> None:
    """All parameters train: masters in float32 would need autocast, which only the caller can switch on."""
    model = wide_norms()
    done = repair(model, check(model, ids(), device="cpu"))
    assert done.settings == {}
    assert check(model, ids(), device="cpu").ok
    assert real_step(model, ids()).error is None


def test_undo_brings_the_crash_back() -> None:
    model = wide_norms()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    done = repair(model, check(model, ids(), device="cpu"))
    done.undo()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == weights[name].dtype
        assert torch.equal(parameter, weights[name])
    with pytest.raises(RuntimeError, match="same dtype"):
        model(**ids())


def test_a_report_without_its_step() -> None:
    report = check(wide_norms(), ids(), device="cpu", verify=False)
    assert refused(UsageError, repair, wide_norms(), replace(report, again=None)) == (
        "this report cannot be used for a repair\n"
        "  - a report of Net without the checked step\n"
        "    expected  the report that isotype.check(model, …) returned in this process\n"
        "    fix       call isotype.check again"
    )


def test_the_report_of_another_model() -> None:
    other = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="the fix does not apply to this model"):
        repair(other, check(wide_norms(), ids(), device="cpu"))
    assert not other[0]._forward_hooks


def test_nothing_to_repair() -> None:
    report = replace(check(net(), ids(), device="cpu", verify=False), findings=())
    done = repair(net(), report)
    assert (len(done), done.settings, done.left, str(done)) == (0, {}, (), "nothing to repair")


# A step whose findings depend on the actions alone, to look at the planning.

A = Fix("fix a", "safe", verified=True, actions=(Action("output", "a", "bfloat16"),))
B = Fix("fix b", "safe", verified=True, actions=(Action("output", "b", "bfloat16"),))
BOTH = Fix("fix both", "safe", verified=True, actions=(Action("setting", "autocast", "bfloat16"),))
ROOT = Fix("fix the root", "safe", verified=True, actions=(Action("input", "", "bfloat16"),))
ROUGH = Fix(
    "round the weight", "unsafe", verified=True, actions=(Action("parameter", "a.weight", "bfloat16"),)
)
TALK = Fix("ask the author", "safe", actions=(Action("advice", "author", "write a mail"),))


def broken(cause: str, *fixes: Fix, severity: str = "error") -> Finding:
    return Finding(severity, f"{cause} is wrong", cause=cause, fixes=fixes, code="IST101")  # type: ignore[arg-type]


def report_of(*findings: Finding, clears: dict[Fix, set[str]], together: bool = True) -> Report:
    """A report in which each fix clears the findings of these causes; `together`: also where several are applied."""
    by_actions = {fix.actions: causes for fix, causes in clears.items()}
    asked: list[tuple[Action, ...]] = []

    def again(actions: object) -> tuple[Finding, ...]:
        given = tuple(actions)  # type: ignore[call-overload]
        asked.append(given)
        chosen = [causes for each, causes in by_actions.items() if set(each) <= set(given)]
        cleared = set().union(*chosen) if chosen else set()
        left = [finding for finding in findings if finding.cause not in cleared]
        worse = (broken("the two"), broken("at once"))
        return tuple(left) if together or len(chosen) < 2 else (*left, *worse)

    made = check(net(), ids(), device="cpu", verify=False)
    return replace(made, findings=findings, again=again)


def test_what_one_fix_clears_on_the_way_is_not_fixed_twice() -> None:
    report = report_of(broken("a", BOTH), broken("b", B), clears={BOTH: {"a", "b"}, B: {"b"}})
    assert plan(report) == ([BOTH], [])


def test_fixes_that_do_not_work_together_are_not_applied_together() -> None:
    report = report_of(broken("a", A), broken("b", B), clears={A: {"a"}, B: {"b"}}, together=False)
    chosen, left = plan(report)
    assert chosen == [A]
    assert [finding.cause for finding, _ in left] == ["b"]


def test_the_next_fix_is_taken_where_the_first_does_not_fit_the_others() -> None:
    report = report_of(broken("a", A), broken("b", B, BOTH), clears={A: {"a"}, BOTH: {"a", "b"}})
    assert plan(report) == ([A, BOTH], [])


def test_a_fix_that_a_later_one_makes_superfluous_is_left_out() -> None:
    """What is found first may follow from what is found next: its cause is fixed, and nothing else."""
    report = report_of(broken("a", A), broken("b", ROOT), clears={A: {"a"}, ROOT: {"a", "b"}})
    assert plan(report) == ([ROOT], [])


def test_a_fix_that_is_needed_beside_a_later_one_stays() -> None:
    report = report_of(broken("a", A), broken("b", B), clears={A: {"a"}, B: {"b"}})
    assert plan(report) == ([A, B], [])


def test_safe_before_unsafe() -> None:
    report = report_of(broken("a", ROUGH, A), clears={A: {"a"}, ROUGH: {"a"}})
    assert plan(report) == ([A], [])
    assert plan(report, unsafe=True) == ([A], [])


def test_unsafe_ones_where_they_are_asked_for() -> None:
    finding = broken("a", ROUGH)
    report = report_of(finding, clears={ROUGH: {"a"}})
    assert plan(report) == (
        [],
        [
            (
                finding,
                "only an unsafe fix resolves it: round the weight; repair(…, unsafe=True) applies this fix",
            )
        ],
    )
    assert plan(report, unsafe=True) == ([ROUGH], [])


def test_what_is_left_says_why() -> None:
    unknown, yours = broken("a"), broken("b", TALK)
    chosen, left = plan(report_of(unknown, yours, clears={}))
    assert chosen == []
    assert left == [(unknown, "no known fix works"), (yours, "yours to do: ask the author")]


def test_what_is_left_beside_another_fix_still_names_what_the_caller_can_do() -> None:
    """Traced again with the first fix, a finding comes back with its fixes untried: what was proven before counts."""
    wide = broken("b", BOTH, severity="warning")
    report = report_of(broken("a", A), wide, clears={A: {"a"}, BOTH: {"b"}})
    unverified = replace(wide, fixes=(replace(BOTH, verified=False),))

    def again(actions: Sequence[Action]) -> tuple[Finding, ...]:
        return (unverified,) if tuple(actions) == A.actions else report.findings

    assert plan(replace(report, again=again)) == ([A], [(unverified, "yours to do: fix both")])


def test_a_guess_is_proven_by_the_trace_that_it_is_planned_with() -> None:
    guess = replace(A, verified=False)
    good, bad = report_of(broken("a", guess), clears={guess: {"a"}}), report_of(broken("a", guess), clears={})
    assert plan(good) == ([A], [])
    chosen, left = plan(bad)
    assert chosen == []
    assert [reason for _, reason in left] == ["no tried fix resolves this finding"]


def test_every_finding_is_resolved_or_left_however_many_there_are() -> None:
    """Causes in one step: a repair that stops after a number of them forgets the others without a word."""
    causes = [f"part {number}" for number in range(24)]
    fixes = {
        cause: Fix(f"fix {cause}", "safe", verified=True, actions=(Action("output", cause, "bfloat16"),))
        for cause in causes[::2]
    }
    report = report_of(
        *(broken(cause, *([fixes[cause]] if cause in fixes else [])) for cause in causes),
        clears={fix: {cause} for cause, fix in fixes.items()},
    )
    chosen, left = plan(report)
    assert [fix.description for fix in chosen] == [f"fix {cause}" for cause in causes[::2]]
    assert [finding.cause for finding, _ in left] == causes[1::2]


def test_what_a_later_fix_resolves_is_not_left() -> None:
    """Nothing of its own helped the first; the second's fix took it along."""
    report = report_of(broken("a"), broken("b", ROOT), clears={ROOT: {"a", "b"}})
    assert plan(report) == ([ROOT], [])


def test_a_finding_that_another_fix_brings_back_is_left() -> None:
    first, second = broken("a", A), broken("b", B)

    def again(actions: object) -> tuple[Finding, ...]:
        applied = set(actions)  # type: ignore[call-overload]
        return (first,) if set(B.actions) <= applied else (second,) if applied else (first, second)

    made = check(net(), ids(), device="cpu", verify=False)
    chosen, left = plan(replace(made, findings=(first, second), again=again))
    assert B in chosen
    assert left == [(first, "the fix of another finding causes this finding again")]


def test_a_command_is_repaired_by_its_arguments() -> None:
    """A setting is the caller's to change in a script, and what a command is made of."""
    setting = Fix("train in float32", "safe", actions=(Action("setting", "compute", "float32"),))
    report = report_of(broken("a", A, setting, severity="warning"), clears={A: {"a"}, setting: {"a"}})
    assert [fix.description for fix in plan(report)[0]] == [A.description]
    assert [fix.description for fix in plan(report, command=True)[0]] == [setting.description]


def test_notes_are_left_alone() -> None:
    assert plan(report_of(broken("a", A, severity="note"), clears={A: {"a"}})) == ([], [])


def test_settings_and_lines_are_handed_to_the_caller() -> None:
    line = Fix("write bfloat16", "safe", verified=True, actions=(Action("line", "model.py:3", "bfloat16"),))
    report = report_of(broken("a", BOTH), broken("b", line), broken("c"), clears={BOTH: {"a"}, line: {"b"}})
    model = net()
    done = repair(model, report)
    assert isinstance(done, Repairs)
    assert done.settings == {"autocast": "bfloat16"}
    assert done.lines == {"model.py:3": "bfloat16"}
    assert (done.done, [fix.description for fix in done.to_do]) == ((), ["fix both", "write bfloat16"])
    assert str(done).splitlines() == [
        "to do     fix both",
        "to do     write bfloat16",
        "set       autocast=bfloat16",
        "edit      model.py:3: bfloat16",
        "left      IST101: c is wrong: no known fix works",
        "total     3 findings: 2 resolved after the changes above, 1 left",
    ]


def test_what_the_model_has_no_more_is_counted_apart_from_what_the_caller_has_to_do() -> None:
    cast = Fix(
        "cast the head", "safe", verified=True, actions=(Action("parameter", "head.weight", "bfloat16"),)
    )
    report = report_of(broken("a", cast), broken("b", BOTH), clears={cast: {"a"}, BOTH: {"b"}})
    done = repair(net(), report)
    assert [finding.cause for finding in done.resolved] == ["a"]
    assert [finding.cause for finding in done.pending] == ["b"]
    assert (done.done, done.to_do) == ((cast,), (BOTH,))
    assert str(done).splitlines()[-1] == (
        "total     2 findings: 1 resolved, 1 resolved after the changes above"
    )


LIBRARY = Fix(
    "cast the operands",
    "safe",
    verified=True,
    actions=(Action("line", "/v/lib/python3.11/site-packages/some/model.py:3", "bfloat16"),),
)
LINE = Fix(
    "write bfloat16", "safe", verified=True, actions=(Action("line", "/home/me/train.py:3", "bfloat16"),)
)
PARTLY = Fix("masters and autocast", "safe", verified=True, actions=(*ROUGH.actions, *BOTH.actions))


def test_the_order_of_fixes() -> None:
    """A change of the model first, then a setting, the user's line, a library's line, advice; unsafe where asked."""
    fixes = (TALK, LIBRARY, LINE, ROUGH, BOTH, A, PARTLY)
    assert [fix.scope for fix in fixes] == [
        "advice", "library", "line", "model", "setting", "model", "setting",
    ]  # fmt: skip
    assert by_preference(fixes) == (A, BOTH, PARTLY, LINE, ROUGH, LIBRARY, TALK)
    assert by_preference(fixes, unsafe=True) == (A, ROUGH, BOTH, PARTLY, LINE, LIBRARY, TALK)
    assert by_preference(fixes, command=True)[:3] == (BOTH, PARTLY, A)


@pytest.mark.parametrize("unsafe", [False, True])
@pytest.mark.parametrize("fixes", [(LINE, BOTH, ROUGH, A), (LINE, ROUGH, BOTH), (LIBRARY, LINE), (LIBRARY,)])
def test_repair_takes_what_the_report_shows_first(fixes: tuple[Fix, ...], unsafe: bool) -> None:
    finding = broken("a", *by_preference(fixes, unsafe=unsafe))
    report = report_of(finding, clears={fix: {"a"} for fix in fixes})
    assert plan(report, unsafe=unsafe) == ([finding.fixes[0]], [])


def test_a_line_of_a_library_is_no_choice_beside_an_unsafe_change_of_the_model() -> None:
    finding = broken("a", LIBRARY, ROUGH)
    report = report_of(finding, clears={LIBRARY: {"a"}, ROUGH: {"a"}})
    assert plan(report) == (
        [],
        [
            (
                finding,
                "only an unsafe fix resolves it: round the weight; repair(…, unsafe=True) applies this fix",
            )
        ],
    )
    assert plan(report, unsafe=True) == ([ROUGH], [])


def test_a_line_of_a_library_is_marked() -> None:
    done = repair(net(), report_of(broken("a", LIBRARY), clears={LIBRARY: {"a"}}))
    assert str(done).startswith("to do     cast the operands (in a library's code)\n")
    assert in_library(f"{json.__file__}:7")
    assert not in_library("/home/me/train.py:3")


@pytest.mark.real_cpu
def test_a_real_step_with_two_causes_is_repaired_jointly() -> None:
    def two() -> nn.Module:
        model = frozen()
        model.head.float()
        return model

    assert real_step(two(), ids()).module == "layers.0.proj"
    model = two()
    report = check(model, ids(), device="cpu")
    assert [finding.cause for finding in report.errors] == [
        "layers.0.norm.weight is float32",
        "head.weight is float32",
    ]
    stored = model.head.weight.detach().clone()
    assert len(repair(model, report)) >= 2
    assert torch.equal(model.head.weight.float(), stored)  # a safe fix loses no digit
    assert real_step(model, ids()).error is None
    assert model(**ids()).dtype == BF16
