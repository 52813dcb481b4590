"""A hub that does not answer: said in seconds, with what the local cache has."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import get_session
from safetensors.torch import load_file

from isotype.checkpoint.formats.hub import hub_config, remote_headers
from isotype.checkpoint.load import load
from isotype.checkpoint.resolve import resolve_precision
from isotype.cli.main import main
from isotype.compat import hub
from isotype.core.errors import CheckpointError
from isotype.model.adapters import add_lora
from tests.pairwise import few
from tests.train.revisions import NAME, put_into_cache
from tests.train.tiny import rows, save_rows

_asked = hub._why_unreachable
WHY = "https://hub.invalid does not answer: [Errno -2] Name or service not known"


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that nobody reaches; returns the requests that were tried."""
    tried: list[str] = []

    def send(*args: object, **kwargs: object) -> None:
        tried.append(str(args))
        raise OSError("[Errno -2] Name or service not known")

    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(type(get_session()), "send", send)
    monkeypatch.setattr(hub, "_why_unreachable", _asked)
    monkeypatch.setattr(hub, "_silences", {})
    return tried


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """A hub that takes every connection and never answers; returns the connections."""
    server = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                taken.append(server.accept()[0])

    threading.Thread(target=accept, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setattr(hub, "_SECONDS", 0.2)
    monkeypatch.setattr(hub, "_why_unreachable", _asked)
    monkeypatch.setattr(hub, "_silences", {})
    yield taken
    server.close()
    for each in taken:
        each.close()


@pytest.fixture(scope="module")
def adapter_of_the_hub(tmp_path_factory: pytest.TempPathFactory, saved: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    policy = resolve_precision(saved("llama"), device="cpu")
    add_lora(load(saved("llama"), policy), policy, r=2).save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "org/base"}))
    return path.parent


def test_one_request_is_tried(unreachable: list[str]) -> None:
    with pytest.raises(CheckpointError, match=WHY.replace("[", r"\[")):
        hub_config("nobody/nothing")
    assert len(unreachable) == 1
    assert remote_headers("nobody/nothing") == f"the headers on the hub could not be read ({WHY})"


def test_the_process_is_as_it_was(unreachable: list[str]) -> None:
    with hub.offline_if_unreachable() as why:
        assert why == WHY
        assert constants.is_offline_mode()
        assert datasets.config.HF_HUB_OFFLINE
    assert not constants.is_offline_mode()
    assert not datasets.config.HF_HUB_OFFLINE


def test_who_is_offline_by_choice_is_not_asked(
    unreachable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with hub.offline_if_unreachable() as why:
        assert why == ""
    assert unreachable == []
    assert constants.is_offline_mode()


def test_a_name_server_that_is_silent_is_waited_for_no_longer_than_the_hub(
    unreachable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's timeout does not count the time in which its name is looked up."""
    answered = threading.Event()
    monkeypatch.setattr(type(get_session()), "send", lambda *_, **__: answered.wait(60))
    monkeypatch.setattr(hub, "_SECONDS", 0.1)
    with hub.offline_if_unreachable() as why:
        assert why == "https://hub.invalid does not answer: nothing received in 0.2 seconds"
    answered.set()


def test_a_hub_that_did_not_answer_is_asked_again_a_minute_later(
    unreachable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    for seconds, requests in ((0, 1), (59, 1), (61, 2)):
        monkeypatch.setattr(time, "monotonic", lambda at=now + seconds: at)
        with hub.offline_if_unreachable() as why, hub.offline_if_unreachable() as again:
            assert why == again == WHY
        assert len(unreachable) == requests


SFT = ["sft", "--dataset_name", "embedded:precision_qa", "--max_steps", "1", "--output_dir", "out"]
COMMANDS = {
    "model": ([*SFT, "--model_name_or_path", "org/name"], "hub id org/name"),
    "data": (["sft", "--model_name_or_path", "MODEL", "--dataset_name", "org/data", "--output_dir", "out"], "'org/data'"),
    "template": ([*SFT, "--model_name_or_path", "MODEL", "--chat_template_path", "org/name"], "--chat_template_path org/name"),
    "reward model": (
        ["grpo", *SFT[1:], "--model_name_or_path", "MODEL", "--reward_model_name_or_path", "org/name"],
        "--reward_model_name_or_path org/name",
    ),
    "mixture": (
        ["sft", "--config", "mixture.yaml", "--model_name_or_path", "MODEL", "--output_dir", "out"],
        "'org/data' is no file or directory on this machine, and the hub could not be reached",
    ),
    "adapter's base": ([*SFT, "--model_name_or_path", "ADAPTER"], "org/base"),
    "check": (["check", "org/name"], "hub id org/name"),
    "check a command": (["check", *SFT, "--model_name_or_path", "org/name"], "hub id org/name"),
    "inspect": (["inspect", "org/name"], "org/name"),
    "plan of a load": (["inspect", "org/name", "--plan"], "hub id org/name"),
    "merge": (["merge", "ADAPTER", "-o", "merged"], "org/base"),
    "merge into another base": (["merge", "ADAPTER", "-o", "merged", "--base", "org/name"], "hub id org/name"),
    "chat": (["chat", "org/name", "--ask", "x"], "hub id org/name"),
    "chat with an adapter": (["chat", "ADAPTER", "--ask", "x"], "org/base"),
}  # fmt: skip


# Each is another form of a command, of which one form asks.
_FORMS = ("check a command", "plan of a load", "merge into another base", "chat with an adapter")


@few("case", list(COMMANDS), *(case for case in COMMANDS if case not in _FORMS))
def test_every_command_asks_a_silent_hub_once_and_says_what_it_wanted(
    case: str,
    silent: list[socket.socket],
    adapter_of_the_hub: Path,
    saved: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, wanted = COMMANDS[case]
    monkeypatch.chdir(tmp_path)
    Path("mixture.yaml").write_text("datasets:\n  - path: org/data\n")
    places = {"MODEL": str(saved("llama")), "ADAPTER": str(adapter_of_the_hub)}
    assert main([places.get(each, each) for each in command]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert wanted in said
    assert f"{constants.ENDPOINT} does not answer: timed out" in said, said
    assert len(silent) == 1


CACHED = """
import json, sys
from isotype.compat import hub
hub._SECONDS = 0.2
from isotype.cli.main import main
sys.exit(max(main(each) for each in json.loads(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_the_cache_has_is_used_where_the_hub_is_silent(
    silent: list[socket.socket], tmp_path: Path
) -> None:
    put_into_cache(tmp_path)
    save_rows(tmp_path / "train.jsonl", rows("sft"))
    train = [
        "--dataset_name",
        "train.jsonl",
        "--max_steps",
        "1",
        "--output_dir",
        "run",
        "--report_to",
        "none",
    ]
    commands = [
        ["sft", "--model_name_or_path", NAME, "--chat_template_path", NAME, *train],
        ["chat", "run", "--ask", "x", "--max_new_tokens", "1"],
        ["merge", "run", "-o", "merged"],
    ]
    where = {
        "HF_HOME": str(tmp_path / "hub"),
        "HF_ENDPOINT": constants.ENDPOINT,
        "ISOTYPE_CACHE": str(tmp_path / "cache"),
    }
    result = subprocess.run(
        [sys.executable, "-c", CACHED, json.dumps(commands)],
        cwd=tmp_path, env=os.environ | where, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert len(silent) == 1


def test_a_vocabulary_that_has_grown_is_saved_though_the_hub_is_silent(
    silent: list[socket.socket], tmp_path: Path, saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT asks the hub for the base's config when it saves, and takes the vocabulary for unchanged where it gets none."""
    policy = resolve_precision(saved("llama"), device="cpu")
    model = add_lora(load(saved("llama"), policy), policy, r=2, target_modules=["q_proj"])
    model.peft_config["default"].base_model_name_or_path = "org/base"
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(saved("llama") / "config.json")
    )
    model.save_pretrained(tmp_path / "as it was")
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    model.save_pretrained(tmp_path / "grown")
    names = [
        load_file(tmp_path / each / "adapter_model.safetensors").keys() for each in ("as it was", "grown")
    ]
    assert [any("embed_tokens" in name for name in each) for each in names] == [False, True]
    assert len(silent) == 1
