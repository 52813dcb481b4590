"""The report of a check: its verdict, its JSON, and the text in a terminal, word for word."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from isotype import __version__
from isotype.core.errors import PrecisionError, SaveError
from isotype.records.finding import Action, Cost, Finding, Fix
from isotype.records.memory import Memory
from isotype.records.request import DEEPSPEED
from isotype.report.check.html import to_html
from isotype.report.check.json import SCHEMA_VERSION
from isotype.report.check.report import Report
from isotype.report.check.text import cost_clauses, elide, fold_places, ranges, render, to_text, verdict
from isotype.report.text import format_flops, format_share
from tests.report.check_samples import F16, SAMPLES, clean, costly, crash, not_traced, too_large

SNAPSHOTS = Path(__file__).with_name("snapshots")
UPDATE = "ISOTYPE_UPDATE_SNAPSHOTS"


def same_as_snapshot(name: str, text: str) -> None:
    """Compare with the stored file, whole. With the variable set, store it, and fail all the same."""
    path = SNAPSHOTS / name
    if os.environ.get(UPDATE):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{name} was written again: read it, then run without {UPDATE}")
    assert text == path.read_text(encoding="utf-8")


# --- verdict ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "ok", "complete", "fits"),
    [
        ("crash", "fails", False, True, True),
        ("costly", "costs", True, True, True),
        ("clean", "clean", True, True, True),
        ("unmeasured", "unmeasured", True, True, True),
        ("too_large", "does not fit", True, True, False),
        ("not_traced", "unknown", True, False, True),
        ("mixed_layers", "fails", False, True, True),
    ],
)
def test_status_is_the_worst_that_is_known(
    name: str, status: str, ok: bool, complete: bool, fits: bool
) -> None:
    report = SAMPLES[name]()
    assert (report.status, report.ok, report.complete, report.fits) == (status, ok, complete, fits)


def test_findings_are_told_apart_by_severity() -> None:
    report = costly()
    assert [finding.code for finding in report.warnings] == ["IST401", "IST801"]
    assert [finding.code for finding in report.notes] == ["IST204"]
    assert report.errors == ()


def test_verdict_of_a_step_that_fails_in_every_way() -> None:
    seen = replace(crash().trace, failure=not_traced().trace.failure, memory=too_large().trace.memory)
    report = replace(crash(), trace=seen)
    assert verdict(report) == (
        "This step fails on NVIDIA T4: 1 error; traced only up to the forward of model.layers.3.mlp.experts; "
        "also needs 21.1 GiB, more than 12.5 GiB (85 % of NVIDIA T4's 14.7 GiB)"
    )


def test_whether_it_fits_is_not_known_without_a_capacity() -> None:
    report = clean()
    profile = replace(report.trace.setup.profile, memory_bytes=None)
    unknown = replace(report, trace=replace(report.trace, setup=replace(report.trace.setup, profile=profile)))
    assert unknown.fits is None
    assert unknown.status == "clean"
    assert "peak 4.75 GiB of any step, in backward" in str(unknown)


def test_whether_it_fits_is_not_known_without_a_measurement() -> None:
    report = replace(clean(), trace=replace(clean().trace, memory=Memory({})))
    assert report.fits is None
    assert re.search(r"memory +not measured", str(report))


def test_flops_and_memory_are_the_traces() -> None:
    report = costly()
    assert report.memory is report.trace.memory
    assert report.flops == report.trace.flops


def test_assumed_contracts_are_named_once() -> None:
    assert crash().assumed == ("aten.mm.default",)
    assert clean().assumed == ()


def test_a_table_of_another_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    doubt = "operators were measured with torch 2.13.0, and the installed torch is 2.10.0"
    assert re.search(rf"^assumed +{re.escape(doubt)}$", str(clean()), re.MULTILINE)
    assert json.loads(clean().to_json())["doubts"] == [doubt]


def test_raise_for_errors_names_everything_at_once() -> None:
    with pytest.raises(PrecisionError) as caught:
        crash().raise_for_errors()
    same_as_snapshot("check_error.txt", f"{caught.value}\n")


def test_raise_for_errors_lets_warnings_pass() -> None:
    costly().raise_for_errors()


def test_a_verdict_is_only_about_the_traced_parts() -> None:
    untraced = {"the step of optimizer paged_lion": "the optimizer has its own kernels", DEEPSPEED: ""}
    part = replace(clean(), trace=replace(clean().trace, untraced=untraced))
    left = f"not traced: the step of optimizer paged_lion, {DEEPSPEED}"
    assert part.status == "partial"
    assert verdict(part).startswith("The traced part of this step runs on NVIDIA T4: ")
    assert verdict(part).endswith(f"; {left}")
    assert verdict(replace(costly(), trace=replace(costly().trace, untraced=untraced))).endswith(left)
    text, read = str(part), json.loads(part.to_json())
    row = "the step of optimizer paged_lion: the optimizer has its own kernels"
    assert re.search(rf"^not seen +{row}$\n +{DEEPSPEED}$", text, re.MULTILINE)
    assert read["not_traced"] == [row, DEEPSPEED]


def test_a_note_is_about_the_effect_of_a_setting_whatever_its_words() -> None:
    report = replace(clean(), trace=replace(clean().trace, notes=("dropout is not traced",)))
    assert report.status == "clean"
    assert re.search(r"^note +dropout is not traced$", str(report), re.MULTILINE)
    read = json.loads(report.to_json())
    assert (read["not_traced"], read["notes"]) == ([], ["dropout is not traced"])


# --- terminal ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_text(name: str) -> None:
    same_as_snapshot(f"check_{name}.txt", str(SAMPLES[name]()))


def test_narrow_text() -> None:
    same_as_snapshot("check_crash_60.txt", to_text(crash(), 60))


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("width", [80, 100, 140])
def test_text_keeps_to_its_width(name: str, width: int) -> None:
    assert max(map(len, to_text(SAMPLES[name](), width).splitlines())) <= width


def in_terminal(report: Report, width: int) -> str:
    shown = io.StringIO()
    render(report, Console(file=shown, width=width, color_system=None, force_terminal=True))
    return shown.getvalue()


@pytest.mark.parametrize("name", ["clean", "crash", "memory"])
def test_the_screen_of_a_command(name: str) -> None:
    """The verdict, what is wrong, what to type, and few numbers: how they come about is said with -v."""
    report = lacking_memory() if name == "memory" else SAMPLES[name]()
    same_as_snapshot(f"screen_{name}.txt", in_terminal(report, 100))


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_command_of_a_fix_can_be_pasted(width: int) -> None:
    text = in_terminal(lacking_memory(), width)
    start = text.index("    isotype sft")
    command = text[start : text.index("\n   = help", start)]
    assert max(map(len, command.splitlines())) <= width
    assert tuple(shlex.split(command.replace("\\\n", ""))) == COMMAND
    assert text.count("isotype sft") == 1
    assert "to do      IST605: this command fits (the command above)\n" in text
    assert f"this command fits: {shlex.join(COMMAND)}" in unescape(to_html(lacking_memory()))


COMMAND = ("isotype", "sft", "--model_name_or_path", "my models/llama", "--per_device_train_batch_size", "4",
           "--gradient_accumulation_steps", "8", "--max_length", "1024", "--quantization", "nf4")  # fmt: skip


def lacking_memory() -> Report:
    """A step that does not fit, with a command that does, more notes than are shown, and more fixes."""
    fits = Fix("this command fits", "safe", True, (), "at most 12.5 GiB are used", COMMAND)
    others = tuple(
        Fix(words, "safe", False, (Action("advice", "memory", words),))
        for words in (
            "shard it over 8 devices",
            "use an optimizer with 8-bit states",
            "store the weights in nf4",
        )
    )
    finding = Finding(
        "error",
        "the step does not fit: 21.1 GiB at the peak of the backward, more than 12.5 GiB",
        phase="backward",
        cause="activations take 20.9 GiB",
        notes=tuple(f"the step allocates 1 tensor of {size} MiB" for size in (512, 256, 128, 64)),
        fixes=(fits, *others),
        kind="memory",
        code="IST605",
    )
    return replace(too_large(), findings=(finding,))


def test_console_without_colour_shows_the_plain_text() -> None:
    shown = io.StringIO()
    render(crash(), Console(file=shown, width=90, color_system=None), whole=True)
    assert [line.rstrip() for line in shown.getvalue().splitlines()] == to_text(crash(), 90).splitlines()


def test_console_colours_by_severity() -> None:
    shown = io.StringIO()
    report = costly()
    render(report, Console(file=shown, color_system="standard", force_terminal=True, width=110))
    assert "\x1b[1;33mwarning[IST401]\x1b[0m" in shown.getvalue()
    assert "\x1b[1;36mnote[IST204]\x1b[0m" in shown.getvalue()


def test_console_reads_no_markup_out_of_names() -> None:
    finding = replace(crash().findings[0], module="layers[bold].0", message="a [red]b[/red]", places=())
    shown = io.StringIO()
    render(replace(crash(), findings=(finding,)), Console(file=shown, width=110))
    assert "error[IST101]: a [red]b[/red]" in shown.getvalue()
    assert "--> layers[bold].0" in shown.getvalue()


def test_long_module_goes_to_a_line_of_its_own_and_loses_its_middle() -> None:
    finding = replace(crash().findings[0], module=f"model.{'very_' * 30}deep.layers.0.self_attn.q_proj")
    text = to_text(replace(crash(), findings=(finding,)), 80)
    arrow = next(line for line in text.splitlines() if line.startswith("  -->"))
    assert len(arrow) == 80
    assert arrow.startswith("  --> model.very_")
    assert arrow.endswith("layers.0.self_attn.q_proj")


def test_advice_is_not_offered_as_a_repair() -> None:
    fix = crash().findings[0].fixes[0]
    advice = replace(fix, actions=(replace(fix.actions[0], kind="advice"),))
    report = replace(crash(), findings=(replace(crash().findings[0], fixes=(advice,)),))
    assert "repair" not in str(report)


def test_what_only_the_caller_can_do_is_not_counted_as_repaired() -> None:
    """`repair` changes nothing for a setting or a line: it is the caller's, and a library's line says so."""
    setting = Fix(
        "run the step under autocast", "safe", True, (Action("setting", "autocast", "float16"),), "it runs"
    )
    library = Fix(
        "cast the operands", "safe", True, (Action("line", "/v/site-packages/some/model.py:3", "float16"),)
    )
    first = crash().findings[0]
    findings = tuple(replace(first, fixes=fixes) for fixes in ((setting,), (library,), ()))
    report = replace(crash(), findings=findings)
    text = to_text(report, 200)
    assert "isotype.repair" not in text
    orders = ["IST101: run the step under autocast", "IST101: cast the operands (in a library's code)"]
    assert f"to do      {orders[0]}\n           {orders[1]}\n" in text
    assert "left       no known fix works for 1 of 3 findings\n" in text
    assert "cast the operands   (in a library's code; safe; verified)" in text
    counts = json.loads(report.to_json())["resolved_by"]
    assert counts == {"repair": 0, "unsafe": 0, "untried": 0, "caller": 2, "left": 1}
    page = unescape(to_html(report))
    assert all(order in page for order in orders)
    assert "in a library's code" in page
    assert "in a library's code" in report.to_sarif()


def test_unverified_fixes_are_offered_as_such() -> None:
    fixes = tuple(replace(fix, verified=False, outcome="") for fix in crash().findings[0].fixes)
    report = replace(crash(), findings=(replace(crash().findings[0], fixes=fixes),))
    assert "isotype.repair(model, report) tries the fixes of 1 of 1 finding" in str(report)
    assert "--fix" not in str(report)
    assert "return each norm's output in float16   (safe; not verified)" in str(report)


# --- words ------------------------------------------------------------------------------------------------


def test_price_says_only_what_was_counted() -> None:
    assert cost_clauses(Cost(), "NVIDIA T4") == []
    assert cost_clauses(Cost(0.004, 0, 0, 12.4), "a CPU") == [
        "about 12x slower on a CPU",
        "0.4 % of the FLOPs in a slower dtype",
    ]


@pytest.mark.parametrize(
    ("places", "layers", "folded"),
    [
        ([], {}, []),
        (["lm_head"], {}, [("", "lm_head", 1)]),
        (["m.layers.0.a", "m.layers.1.a", "m.layers.5.a"], {}, [("m.layers.0-1,5", "a", 3)]),
        (["m.layers.0.a", "m.layers.79.a"], {("m.layers", 79): 79}, [("m.layers.0-79", "a", 80)]),
        (["0.fc", "1.fc", "1.fc"], {}, [("0-1", "fc", 2)]),
        (["m.layers.0.a", "m.layers.0.b"], {}, [("m.layers.0", "a", 1), ("m.layers.0", "b", 1)]),
        (["base_model.model.layers.0.a.base_layer"], {}, [("layers.0", "a", 1)]),
    ],
)
def test_places_of_equal_layers_are_one(
    places: list[str], layers: dict[tuple[str, int], int], folded: list[tuple[str, str, int]]
) -> None:
    assert fold_places(places, layers) == folded


@given(st.sets(st.integers(0, 200), min_size=1))
def test_ranges_lose_no_number(numbers: set[int]) -> None:
    found: list[int] = []
    for run in ranges(sorted(numbers)).split(","):
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    assert found == sorted(numbers)


@given(st.text("abc._", max_size=80), st.integers(2, 60))
def test_elided_names_fit_and_keep_their_ends(name: str, width: int) -> None:
    short = elide(name, width)
    assert len(short) == min(len(name), width)
    head, found, tail = short.partition("…")
    assert short == name if not found else name.startswith(head) and name.endswith(tail)


def test_numbers_as_words() -> None:
    assert [format_flops(n) for n in (0, 950, 1.24e12, 3e15, 7.1e9, 2.5e6)] == [
        "0 FLOP", "950 FLOP", "1.24 TFLOP", "3.00 PFLOP", "7.10 GFLOP", "2.50 MFLOP",
    ]  # fmt: skip
    assert [format_share(share) for share in (1, 0.624, 0.0351, 0.01, 1e-4, 0)] == [
        "100 %", "62 %", "3.5 %", "1.0 %", "under 0.1 %", "0 %",
    ]  # fmt: skip


# --- JSON -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["costly", "not_traced", "mixed_layers", "clean", "unmeasured", "too_large"])
def test_json(name: str) -> None:
    text = SAMPLES[name]().to_json()
    same_as_snapshot(f"check_{name}.json", text.replace(f'"{__version__}"', '"VERSION"', 1))


def test_json_numbers_stay_numbers() -> None:
    content: dict[str, Any] = json.loads(costly().to_json())
    assert content["schema_version"] == SCHEMA_VERSION
    cost = content["findings"][0]["cost"]
    assert cost == {
        "flops_share": 0.62, "cast_bytes": 1_258_291_200, "memory_bytes": 340 * 2**20, "slowdown": 2.1,
    }  # fmt: skip
    assert content["memory"]["peak_bytes"] == costly().memory.peak
    assert content["flops"]["float16"] == costly().flops[F16]


# --- files ------------------------------------------------------------------------------------------------


def test_html_is_written_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "report.html"
    assert crash().to_html(target) == target
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]
    assert target.read_text(encoding="utf-8").endswith("</html>\n")


def test_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(SaveError, match=r"report\.html: .*directory"):
        crash().to_html(tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_report_is_a_value() -> None:
    report: Report = clean()
    assert replace(report, seconds=1.0).trace is report.trace


def test_the_outermost_module_has_a_name_among_the_places():
    """Parameters of the model itself lie in a module without a name."""
    assert fold_places(["", "proj"], {}) == [("", "the model", 1), ("", "proj", 1)]
