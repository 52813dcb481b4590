"""One scenario from end to end: it really fails or costs, is found, its cause named, its fix proven, and it runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

import isotype
from isotype.preflight.apply import apply_actions
from isotype.preflight.run import setting_value
from isotype.records.finding import Finding
from isotype.report.check.report import Report
from tests.corpus.scenario import Broken, Scenario
from tests.reality import real_step

NOT_PREDICTED: dict[str, str] = {
    "torchtune-1101": "what a merge rounds away is not seen in a step: `isotype merge` reports it",
    "pytorch-188955": "CUDA's autocast of rms_norm to float32 changes no matmul, and no rule costs it",
    "pytorch-71124": "a recomputation in another 16-bit dtype breaks no operator: what it costs is seen, not where it comes from",
    "unsloth-212": "found with its cause; the cure is an edit of the Function's backward, which no trace can try",
    "peft-1172": "found; the cure is advice (PEFT's input cast switched off), for which no set-up is built yet",
    "unsloth-1186": "found as a note: trained float32 embeddings are what a policy asks for",
}
"""Scenarios that fail or cost for real and are not found, or not with a proven fix: case -> why."""


@dataclass(frozen=True)
class Verdict:
    """What became of a scenario; empty strings are what went well.

    Attributes:
        real: how the broken set-up fails or what it costs, on this machine; "" where only another device refuses it.
        code: the code it was found under, "" where it was not.
        cause: the cause that was named.
        fix: the fix that resolved it.
        problems: everything that did not go as it should.
    """

    real: str
    code: str
    cause: str
    fix: str
    problems: tuple[str, ...]


def check_broken(broken: Broken, verify: bool = True) -> Report:
    """`isotype.check` of a set-up."""
    return isotype.check(
        broken.model,
        broken.inputs,
        policy=broken.policy,
        device=broken.device,
        autocast=False if broken.autocast is None else broken.autocast,
        scaler=broken.scaler,
        optimizer=broken.optimizer,
        phases=(*broken.phases, *(("generate",) if broken.generate is not None else ())),
        learning_rate=broken.learning_rate,
        fsdp=broken.fsdp,
        generate=broken.generate,
        wiring=False,
        verify=verify,
    )


def run_broken(broken: Broken) -> Exception | None:
    """The real step of a set-up; returns what it raised."""
    return real_step(
        broken.model,
        broken.inputs,
        autocast=broken.autocast,
        scaler=broken.scaler,
        optimizer=broken.optimizer,
        learning_rate=broken.learning_rate,
        phases=broken.phases,
        generate=broken.generate,
    ).error


def judge_scenario(scenario: Scenario) -> Verdict:
    """Build it, see it fail, check it, repair it, run it."""
    problems: list[str] = []
    real = _reality(scenario, problems)
    broken = scenario.build()
    report = check_broken(broken)
    finding, wrong = prediction(scenario, report)
    problems += wrong
    if finding is None:
        return Verdict(real, "", "", "", tuple(problems))
    fix = _fixed(scenario, broken, report, finding, problems)
    return Verdict(real, finding.code, finding.cause, fix, tuple(problems))


def prediction(scenario: Scenario, report: Report) -> tuple[Finding | None, list[str]]:
    """The finding that a report gives for a scenario, None where there is none, and what is wrong with it."""
    found = [finding for finding in report.findings if finding.code in scenario.codes]
    if not found:
        others = ", ".join(f"{each.code} ({each.cause})" for each in report.findings) or "nothing"
        failure = f"; step not traced: {report.trace.failure.error}" if report.trace.failure else ""
        return None, [f"not found; found {others}{failure}"]
    found.sort(key=lambda finding: not re.search(scenario.cause, finding.cause))
    named = (found[0].cause, *found[0].evidence)
    if any(re.search(scenario.cause, each) for each in named):
        return found[0], []
    return found[0], [f"cause {found[0].cause!r} is not {scenario.cause!r}"]


def _reality(scenario: Scenario, problems: list[str]) -> str:
    broken = scenario.build()
    if scenario.cost is not None:
        cost = scenario.cost(broken)
        if cost is None:
            problems.append("costs nothing in reality")
        return cost or ""
    error = run_broken(broken)
    if scenario.crashes and (error is None or not re.search(scenario.crashes, str(error))):
        problems.append(f"really ended with {error!r}")
    return "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]


def _fixed(scenario: Scenario, broken: Broken, report: Report, finding: Finding, problems: list[str]) -> str:
    if scenario.advice is not None:
        return _advised(scenario, finding, problems)
    verified = [fix for fix in finding.fixes if fix.verified]
    if not verified:
        problems.append("no verified fix")
        return ""
    if not any(re.search(scenario.fix, fix.description) for fix in verified):
        problems.append(f"no fix {[fix.description for fix in verified]} is {scenario.fix!r}")
    repairs = isotype.repair(broken.model, report, unsafe=True)
    if repairs.lines or any(action.kind == "line" for action in verified[0].actions):
        return verified[0].description  # an edit of the user's code: proven by the second trace only
    settings = dict(repairs.settings)
    left = any((each.code, each.cause) == (finding.code, finding.cause) for each, _ in repairs.left)
    if left or finding.severity == "note":
        # A note, or a warning that takes another argument of the caller's: do what the fix says, as they would.
        repairs.undo()
        apply_actions(broken.model, verified[0].actions)
        # The dtype to compute in is no argument: it follows from the weights and autocast.
        arguments = (
            each for each in verified[0].actions if each.kind == "setting" and each.target != "compute"
        )
        settings = {each.target: each.value for each in arguments}
    repaired = _with_settings(broken, settings)
    error = run_broken(repaired) if broken.device == "cpu" or scenario.crashes else None
    if error is not None:
        problems.append(f"after repair: {error!r}")
    if scenario.cost is not None and (cost := scenario.cost(repaired)) is not None:
        problems.append(f"after repair it still costs: {cost}")
    if any(
        action.target == "compute"
        for fix in verified[:1]
        for action in fix.actions
        if action.kind == "setting"
    ):
        return verified[0].description  # the dtype of a whole step is the user's decision; repair leaves it
    present = {(each.code, each.cause) for each in check_broken(repaired, verify=False).findings}
    if (finding.code, finding.cause) in present:
        problems.append(f"after repair still found: {finding.code}")
    return verified[0].description


def _advised(scenario: Scenario, finding: Finding, problems: list[str]) -> str:
    assert scenario.advice is not None
    if not finding.fixes:
        problems.append("no advice")
        return ""
    advised = scenario.advice()
    found = {each.code for each in check_broken(advised, verify=False).findings}
    if finding.code in found:
        problems.append("found again after the advice was followed")
    if scenario.crashes and (error := run_broken(scenario.advice())) is not None:
        problems.append(f"after the advice: {error!r}")
    if scenario.cost is not None and (cost := scenario.cost(advised)) is not None:
        problems.append(f"after the advice it still costs: {cost}")
    return finding.fixes[0].description


def _with_settings(broken: Broken, settings: dict[str, str]) -> Broken:
    """The set-up with the arguments that a repair asks the caller to change."""
    changes = {name: setting_value(value) for name, value in settings.items()}
    if "autocast" in changes and "scaler" not in changes:
        changes["scaler"] = broken.scaler or changes["autocast"] == torch.float16
    return replace(broken, **changes)
