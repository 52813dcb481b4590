"""No training by isotype uses an attention kernel whose gradients may be NaN."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from isotype.precision.devices import attention
from isotype.precision.devices.attention import (
    AttentionCall,
    attention_kernel,
    enabled_attention,
    has_faulty_cudnn,
)
from isotype.precision.devices.profile import device_profile
from isotype.train.policy import sound_attention

MASKED = AttentionCall(torch.bfloat16, 8, 8, (64, 64, 64), masked=True)


@pytest.fixture(autouse=True)
def _as_with_torch_2_13(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    defaults = has_faulty_cudnn.__defaults__
    has_faulty_cudnn.__defaults__ = ((2, 13),)
    yield
    has_faulty_cudnn.__defaults__ = defaults


def test_torch_still_brings_the_faulty_kernel() -> None:
    """If pyproject.toml allows only releases with cuDNN 9.26 (2.15 is the first), the switch can go."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    bounds = next(each for each in project["project"]["dependencies"] if each.startswith("torch>="))
    oldest = tuple(map(int, re.findall(r"\d+", bounds)[:2]))
    _, last = attention._NAN_RELEASES
    assert oldest <= last


@pytest.mark.lacking("" if torch.version.cuda else "this torch has no cuDNN")
def test_the_releases_are_those_whose_cudnn_is_older() -> None:
    installed, (first, last) = attention.RELEASE, attention._NAN_RELEASES
    assert installed < first or (torch.backends.cudnn.version() < 92600) == (installed <= last)


@pytest.mark.parametrize(
    ("device", "kernel"),
    [("h100", "efficient"), ("h200", "efficient"), ("b200", "cudnn"), ("a100", "efficient")],
)
def test_the_kernel_of_a_training(device: str, kernel: str) -> None:
    profile = device_profile(device)
    with sound_attention(profile):
        assert attention_kernel(profile, MASKED, enabled=enabled_attention()) == kernel
    assert "cudnn" in enabled_attention()


def test_it_is_on_again_after_an_error() -> None:
    with pytest.raises(KeyError), sound_attention(device_profile("h100")):
        raise KeyError
    assert "cudnn" in enabled_attention()
