"""A hub that does not answer: said in seconds, with what the local cache has."""

from __future__ import annotations

import datasets
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import get_session

from isotype.checkpoint.formats.hub import hub_config, remote_headers
from isotype.core import hub
from isotype.core.errors import CheckpointError

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
    return tried


def test_one_request_is_tried(unreachable: list[str]) -> None:
    with pytest.raises(CheckpointError, match=WHY.replace("[", r"\[")):
        hub_config("nobody/nothing")
    assert len(unreachable) == 1
    _, (note,) = remote_headers("nobody/nothing")
    assert note == f"the headers on the hub could not be read ({WHY}): the dtypes are those of the config"


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
