"""The largest batch or length that fits, as a command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isotype.precision.devices.room import SHARE_OF_GPU
from isotype.records.finding import Finding
from isotype.records.memory import Memory
from isotype.report.check.report import Report
from isotype.train.preflight.fit import fitting
from isotype.train.preflight.step_plan import parse_options, plan_of
from tests.cli.test_check import report_with

COMMAND = (
    "isotype",
    "sft",
    "--model_name_or_path",
    "m",
    "--device",
    "t4",
    "--per_device_train_batch_size",
    "64",
)


def report_of(peak: int, room: int) -> Report:
    report = report_with(Finding("IST605", "error", "the step does not fit", kind="memory"))
    profile = replace(report.trace.setup.profile, memory_bytes=int(room / SHARE_OF_GPU) + 1)
    setup = replace(report.trace.setup, profile=profile)
    return replace(
        report, trace=replace(report.trace, setup=setup, memory=Memory({"backward": {"weights": peak}}))
    )


def fixed(rows: int, length: int, weights: int, room: int) -> tuple[str, int]:
    """The command that is named for a step of `weights` and a byte a token, and how often it was traced."""
    seen: list[int] = []

    def peak(rows: int, length: int) -> int:
        seen.append(weights + rows * length)
        return seen[-1]

    options, rest = parse_options(["m", "--batch", str(rows), "--length", str(length)])
    plan, _ = plan_of(options, rest)
    report = fitting(report_of(weights + rows * length, room), plan, length, COMMAND, peak)
    fixes = [fix.text for finding in report.findings for fix in finding.fixes]
    return (fixes[0] if fixes else ""), len(seen)


@pytest.mark.parametrize(
    ("rows", "length", "weights", "room", "flags"),
    [
        (
            64,
            1024,
            1000,
            1000 + 11 * 1024,
            "--per_device_train_batch_size 11 --max_length 1024 --gradient_accumulation_steps 6",
        ),
        (
            64,
            1024,
            0,
            1024,
            "--per_device_train_batch_size 1 --max_length 1024 --gradient_accumulation_steps 64",
        ),
        (
            4,
            1024,
            100,
            100 + 700,
            "--per_device_train_batch_size 1 --max_length 640 --gradient_accumulation_steps 4",
        ),
        (1, 1024, 100, 100 + 700, "--per_device_train_batch_size 1 --max_length 640"),
    ],
)
def test_the_largest_that_fits_is_found_in_a_few_traces(rows, length, weights, room, flags):
    command, traces = fixed(rows, length, weights, room)
    assert command == f"this fits: isotype sft --model_name_or_path m {flags}"
    assert traces <= 7


def test_nothing_is_named_where_nothing_fits():
    assert fixed(8, 1024, weights=10_000, room=9_000)[0] == ""


def test_a_step_that_fits_is_left_alone():
    report = report_with()
    plan, _ = plan_of(*parse_options(["m"]))
    assert fitting(report, plan, 16, COMMAND, lambda rows, length: 0) is report
