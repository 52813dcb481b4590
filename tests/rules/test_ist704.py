from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from isotype.preflight import from_trainer
from isotype.rules.ist704_zero_gathers import find
from tests.rules.samples import BF16, FP32, adapter, norm, trace, weight


def test_float32_adapters_beside_a_bfloat16_base() -> None:
    (finding,) = find(trace([weight(dtype=BF16), adapter(FP32)], zero3="0.19.2"))
    assert finding.message == "ZeRO-3 of DeepSpeed 0.19.2 cannot gather bfloat16 and float32 together"
    assert "output tensor must have the same type as input tensor" in finding.notes[0]
    assert finding.places == (adapter(FP32).module,)
    assert [fix.safety for fix in finding.fixes if fix.actions[0].kind == "parameter"] == ["unsafe"]


@pytest.mark.parametrize("version", ["", "0.19.1", "0.19.3"])
def test_other_releases_gather_what_they_were_given(version: str) -> None:
    assert not list(find(trace([weight(dtype=BF16), adapter(FP32)], zero3=version)))


def test_one_dtype_is_silent() -> None:
    assert not list(find(trace([weight(dtype=BF16), norm(BF16)], zero3="0.19.2")))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainer_under_zero(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_trainer, "version", lambda name: f"{name} 7")
    arguments: Any = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage), world_size=1)
    fields = from_trainer._processes_of(nn.Linear(2, 2), arguments)
    assert (fields["deepspeed"], fields["zero3"]) == (True, "deepspeed 7" if stage == 3 else "")
    without = from_trainer._processes_of(nn.Linear(2, 2), SimpleNamespace(world_size=1))
    assert (without["deepspeed"], without["zero3"]) == (False, "")
