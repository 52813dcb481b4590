"""`isotype check` from outside: what it prints, writes and returns."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
import torch

from isotype.cli import check as check_command
from isotype.cli.check import exit_status
from isotype.cli.main import main
from isotype.core.errors import UsageError
from isotype.data.methods import METHODS
from isotype.precision.devices.profile import device_profile
from isotype.preflight.check import function_arguments
from isotype.records.finding import Action, Finding, Fix
from isotype.records.memory import Memory
from isotype.records.request import Setup
from isotype.records.trace import Failure, Trace
from isotype.report.check.report import Report
from isotype.train.command.parse import parse_command
from isotype.train.preflight.plan import repaired_command, with_commands
from isotype.train.preflight.step_plan import parse_options, plan_of
from tests.models import CONFIGS
from tests.pairwise import few
from tests.planning.conftest import by_formula
from tests.zoo.shrink import tiny_config
from tests.zoo.vision import MODELS

SCRIPT = """
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.weight * x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.proj = Norm(), nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.proj(self.norm(x))


def broken():
    return Model(), {"x": torch.ones(2, 8, dtype=torch.bfloat16)}


def healthy():
    return {"model": Model().bfloat16(), "inputs": {"x": torch.ones(2, 8, dtype=torch.bfloat16)}, "device": "t4"}


def made_for_the_device():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    return nn.Linear(8, 8).to(device, dtype), {"input": torch.ones(2, 8, device=device)}


def nothing():
    return 3
"""


@pytest.fixture(autouse=True, scope="module")
def _no_bars() -> Iterator[None]:
    """The first test that reads a data file, with an empty cache, would print a bar among the errors."""
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def config(tmp_path) -> Path:
    """A directory with nothing but a config.json."""
    llama = CONFIGS["llama"]()
    llama.num_hidden_layers = 1
    llama.architectures = ["LlamaForCausalLM"]
    llama.dtype = "bfloat16"
    llama.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def script(tmp_path, monkeypatch) -> str:
    (tmp_path / "their_script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "their_script", raising=False)
    return "their_script"


def run(capsys, *argv: object) -> tuple[int, str, str]:
    status = main(["check", *(str(each) for each in argv)])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return status, out, err


def report_json(capsys, *argv: object) -> dict:
    status, out, err = run(capsys, *argv, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


@pytest.mark.parametrize(("device", "planned"), [("mps", False), ("t4", True)])
def test_a_plan_is_named_only_where_the_memory_of_the_device_is_known(capsys, config, device, planned):
    status, out, _ = run(capsys, config, "--device", device, "--length", 16)
    assert (status, "isotype plan" in out) == (0, planned)


@few("quantization", [(), ("--quantization", "nf4"), ("--quantization", "int8")], ("--quantization", "nf4"))
def test_a_config_alone_is_enough_and_sarif_and_html_are_written(
    capsys, config, quantization, tmp_path, monkeypatch
):
    reports = []
    shown = check_command._show

    def show(report, *rest):
        reports.append(report)
        shown(report, *rest)

    monkeypatch.setattr(check_command, "_show", show)
    argv = (config / "config.json", "--device", "h100", "--length", 16, *quantization)
    status, out, err = run(capsys, *argv, "--sarif", tmp_path / "a.sarif", "--html", tmp_path / "a.html")
    assert (status, err) == (0, "")
    assert "1 row of 16 tokens, " in out
    assert "runs clean on NVIDIA H100" in out
    assert json.loads((tmp_path / "a.sarif").read_text(encoding="utf-8"))["version"] == "2.1.0"
    assert (tmp_path / "a.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    (report,) = reports
    monkeypatch.setattr(check_command, "_check_plan", lambda *_: (report, None))
    status, out, _ = run(capsys, *argv, "--sarif", "-")
    assert json.loads(out)["version"] == "2.1.0"


def test_a_device_that_is_not_here_its_dtype_and_generation_as_a_phase_more(capsys, config):
    report = report_json(capsys, config, "--device", "t4", "--batch", 3, "--generate")
    assert report["setup"]["device"]["name"] == "t4"
    assert (report["setup"]["autocast"], report["setup"]["scaler"]) == ("float16", True)
    assert report["setup"]["batch"]["input_ids"] == [3, 64]  # no row is longer than the model
    assert report["model"] == str(config)
    assert report["setup"]["phases"][-1] == "generate"
    assert "generate" in report["memory"]["phases"]


@pytest.mark.exhaustive
def test_the_model_stands_for_all_its_layers(capsys, config):
    made = json.loads((config / "config.json").read_text())
    reports = []
    for layers in (6, 12, 18):
        (config / "config.json").write_text(json.dumps({**made, "num_hidden_layers": layers}))
        reports.append(report_json(capsys, config, "--device", "h100", "--length", 16))
    for count in (lambda report: report["flops"]["bfloat16"], lambda report: report["operators"]):
        two, four, six = map(count, reports)
        assert four - two == six - four > 0


@few("method", [name for name in METHODS if name != "sft"], "grpo")
def test_every_method_runs(capsys, config, method, tmp_path):
    found = report_json(
        capsys, method, "--model_name_or_path", config, "--dataset_name", "somebody/data", "--output_dir",
        tmp_path / "out", "--device", "h100", "--batch", 2,
    )  # fmt: skip
    assert found["complete"]
    assert found["flops"].keys() == {"bfloat16"}
    assert not (tmp_path / "out").exists()


def test_a_policy_that_cannot_be_is_an_error_of_its_own(capsys, config):
    status, out, err = run(capsys, config, "--dtype", "int3", "--device", "h100")
    assert (status, out) == (2, "")
    assert err.startswith("error: unknown dtype\n")
    _, _, err = run(capsys, config, "--dtype", "int4", "--device", "h100")
    assert "    fix       --quantization nf4\n" in err
    status, _, err = run(capsys, config, "--device", "h1000")
    assert status == 2
    assert err.startswith("error: unknown device\n")


def test_a_function_of_the_users(capsys, script):
    status, out, _ = run(capsys, f"{script}:broken", "--device", "cpu")
    assert status == 1
    assert "error[IST101]" in out
    status, out, _ = run(capsys, f"{script}:broken", "--device", "cpu", "--fix")
    assert status == 1
    assert "done      return" in out
    repair = json.loads(run(capsys, f"{script}:broken", "--device", "cpu", "--fix", "--json")[1])["repair"]
    assert [fix["scope"] for fix in repair["fixes"]] == ["model"]
    assert repair["fixes"][0]["description"] in out
    assert [f"left      {each['code']}" in out for each in repair["left"]] == [True] * len(repair["left"])
    assert repair["command"] is None
    assert run(capsys, f"{script}:healthy", "--device", "h100")[0] == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "no module no_such_module"),
        ("{}:brokn", "did you mean broken?"),
        ("{}:nothing", "returns int"),
    ],
)
def test_a_function_that_is_not_one(script, name, message):
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        function_arguments(name.format(script))


def test_a_function_that_makes_its_model_for_the_device_finds_it(capsys, script):
    status, out, _ = run(capsys, f"{script}:made_for_the_device", "--device", "t4")
    assert status == 1
    assert "the argument input is float32" in out
    assert not torch.cuda.is_available()
    assert run(capsys, f"{script}:made_for_the_device", "--device", "cpu")[0] == 0


def test_arguments_that_a_function_decides(capsys, script):
    status, _, err = run(capsys, f"{script}:broken", "--batch", 3, "--images", 2, "--quantization", "nf4")
    assert status == 2
    assert "--quantization nf4 --batch --images" in err


def report_with(*findings: Finding, failure: Failure | None = None, peak: int = 0) -> Report:
    setup = Setup(device_profile("t4"), None, False, "adamw", torch.float16)
    memory = Memory({"forward": {"weights": peak}})
    return Report(Trace(setup, (), (), {}, memory, failure), findings)


@pytest.mark.parametrize(
    ("report", "on_error", "on_warning"),
    [
        (report_with(), 0, 0),
        (report_with(Finding("note", "m", code="IST201")), 0, 0),
        (report_with(Finding("warning", "m", code="IST201")), 0, 1),
        (report_with(Finding("error", "m", code="IST101")), 1, 1),
        (report_with(peak=2**40), 1, 1),
        (report_with(failure=Failure("forward", "", "", "ValueError: no")), 1, 1),
    ],
)
def test_the_exit_status(report, on_error, on_warning):
    assert (exit_status(report, "error"), exit_status(report, "warning")) == (on_error, on_warning)


def test_the_repaired_command():
    argv = ["--model_name_or_path", "m", "--dtype", "float16", "--optim=sgd"]
    command = parse_command("sft", argv)[0]
    fixes = (
        Fix("compute in bfloat16", "safe", actions=(Action("setting", "autocast", "bfloat16"),)),
        Fix("use AdamW", "safe", actions=(Action("setting", "optimizer", "adamw_torch"),)),
        Fix("a smaller step", "safe", actions=(Action("setting", "learning_rate", "1e-05"),)),
        Fix("fix the model", "safe", actions=(Action("output", "norm", "bfloat16"),)),
    )
    assert repaired_command(command, fixes).text == (
        "repaired:\n    isotype sft --model_name_or_path m --dtype bfloat16 --optim adamw_torch --learning_rate 1e-05\n"
        "by hand:   fix the model"
    )
    assert repaired_command(command, ()).text == "nothing to repair"
    lost = Finding("warning", "updates are lost", code="IST801")
    assert repaired_command(command, (), [(lost, "no known fix works")]).text == (
        "left:      IST801: no known fix works"
    )


def test_a_fix_of_a_training_has_the_command_of_the_training_on_a_device_that_is_here():
    command = parse_command("sft", ["--model_name_or_path", "m", "--dtype", "bfloat16", "--device", "v100"])[
        0
    ]
    fix = Fix("compute in float16", "unsafe", actions=(Action("setting", "autocast", "float16"),))
    (finding,) = with_commands([Finding("warning", "", fixes=(fix,))], command, bare=False, present=False)
    assert finding.fixes[0].command == ("isotype", "sft", "--model_name_or_path", "m", "--dtype", "float16")


def test_what_is_left_is_found_in_a_check_of_the_repaired_command():
    """What a trace with changed settings still had was printed; the training decides its policy anew."""
    command = parse_command("sft", ["--model_name_or_path", "m", "--device", "t4"])[0]
    fix = Fix("compute in float32", "safe", actions=(Action("setting", "autocast", "float32"),))
    in_the_trace, in_the_check = (Finding("warning", "", code=code) for code in ("IST203", "IST404"))
    checked = []

    def remaining(changed):
        checked.append(changed)
        return [(in_the_check, "no known fix works")]

    left = [(in_the_trace, "")]
    repaired = repaired_command(command, [fix], left, present=False, remaining=remaining)
    assert repaired.text.endswith("--dtype float32\nleft:      IST404: no known fix works")
    assert (checked[0]["device"], checked[0]["dtype"]) == ("t4", "float32")
    assert repaired_command(command, [], left, remaining=remaining).unresolved == left


def test_the_repaired_command_is_the_one_that_was_proven(capsys, config):
    """What --fix prints is one plan, traced as a whole: checked in turn, the repaired command has nothing left."""
    argv = (config, "--device", "t4", "--length", 16, "--dtype", "bfloat16")
    findings, _, fixed = run(capsys, *argv, "--fix")[1].partition("repaired:")
    assert "warning[IST601]" in findings
    assert "; float16 overflows above 65,504 (a setting; unsafe; " in " ".join(findings.split())
    (line,) = [line.strip() for line in findings.splitlines() if "--dtype float16" in line]
    program, check, *words = shlex.split(line)
    assert (program, check) == ("isotype", "check")
    alone = plan_of(*parse_options(words))
    assert (alone.device, alone.precision.dtype, alone.rows) == ("t4", "float16", 1)
    assert len(fixed.splitlines()) == 2  # nothing by hand, nothing left
    status, again, _ = run(capsys, *fixed.split()[2:], "--device", "t4", "--length", 16, "--fix")
    assert status == 0
    assert "warning" not in again
    assert again.endswith("nothing to repair\n")


def test_what_is_auto_is_planned_for_the_device_that_is_named(capsys, config, tmp_path, monkeypatch):
    """TRL refused it: "expected a whole number"."""
    by_formula(monkeypatch)
    training = ["sft", "--model_name_or_path", config, "--dataset_name", "embedded:precision_qa"]
    training += ["--gradient_checkpointing", "False"]
    (tmp_path / "c.yaml").write_text("per_device_train_batch_size: auto\n")
    auto = ["--config", tmp_path / "c.yaml", "--max_length", "auto"]
    status, out, err = run(capsys, *training, *auto, "--device", "t4")
    assert (status, err) == (0, "")
    assert out.startswith("planned: float16, 8 rows of ")
    train = shlex.split(out.partition("train it:")[2])
    assert "auto" not in train
    assert train[train.index("--per_device_train_batch_size") + 1] == "8"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a model that accepts images of any size, without a processor."""
    return _config_of(tmp_path_factory.mktemp("qwen2_vl"), "qwen2_vl")


def _config_of(folder: Path, name: str) -> Path:
    config = tiny_config(name, {**MODELS[name].settings, "architectures": [CLASSES[name]]})
    text = config.get_text_config()
    text.num_hidden_layers, text.layer_types = 1, (text.layer_types or [])[:1] or None
    config.save_pretrained(folder)
    return folder


def _check(capsys, *argv: object) -> tuple[int, str]:
    return run(capsys, *argv, "--device", "h100", "-v", "--lora_target_modules", "q_proj")[:2]


CLASSES = {"qwen2_vl": "Qwen2VLForConditionalGeneration", "gemma3": "Gemma3ForConditionalGeneration"}


def test_text_alone_is_not_called_clean_of_a_model_that_takes_pictures(capsys, seeing):
    status, out = _check(capsys, seeing)
    assert status == 0
    assert "runs clean" not in out
    assert "The text part of this step runs on NVIDIA H100" in out
    assert "the step does not use model.visual, so only the text part was checked" in " ".join(out.split())
    assert "--image 1024x768 adds an image of that size to each row" in " ".join(out.split())


def test_pictures_are_traced_by_the_config(capsys, seeing):
    status, out = _check(capsys, seeing, "--image", "64x64", "--images", "2", "--length", "64")
    assert status == 0
    assert "runs clean" in out
    assert "2 images of 64x64 in each row: 36 tokens, by the config" in " ".join(out.split())
    assert "pixel_values [128, 384]" in " ".join(out.split())


def test_a_tower_of_one_size_is_traced_without_being_asked(capsys, tmp_path):
    status, out = _check(capsys, _config_of(tmp_path, "gemma3"))
    assert status == 0
    assert "runs clean" in out
    assert "1 image of 32x32 in each row: 4 tokens, by the config" in " ".join(out.split())


@pytest.mark.parametrize("size", ["64", "0x4", "64x48x2", "axb"])
def test_a_size_that_is_none(capsys, seeing, size):
    with pytest.raises(UsageError, match="a size in pixels"):
        parse_options([str(seeing), "--image", size])


def test_a_model_of_text_takes_no_picture(capsys, config):
    status, _, error = run(capsys, config, "--image", "64x48")
    assert status == 2
    assert "which takes only text" in error
