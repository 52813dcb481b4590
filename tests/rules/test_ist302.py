from __future__ import annotations

from isotype.records.finding import Action
from isotype.rules.ist302_scaler_bfloat16 import find
from tests.rules.samples import BF16, FP16, FP32, adapter, trace


def test_bfloat16_adapters_are_refused_by_cuda() -> None:
    (finding,) = find(trace([adapter(BF16)], scaler=True, autocast=FP16))
    assert finding.severity == "error"
    assert "not implemented for 'BFloat16'" in finding.notes[0]
    assert [fix.actions[0].kind for fix in finding.fixes] == ["parameter", "setting"]


def test_a_bfloat16_run_drops_the_scaler_first() -> None:
    (finding,) = find(trace([adapter(BF16)], scaler=True, autocast=BF16))
    assert finding.fixes[0].actions == (Action("setting", "scaler", "False"),)


def test_a_cpu_takes_bfloat16_gradients() -> None:
    (finding,) = find(trace([adapter(BF16)], scaler=True, autocast=BF16, device="cpu-generic"))
    assert finding.severity == "warning"


def test_a_scaler_for_nothing() -> None:
    (finding,) = find(trace([adapter(FP32)], scaler=True, autocast=BF16))
    assert finding.message == "a GradScaler runs, but nothing is computed in float16"


def test_float16_with_masters_is_silent() -> None:
    assert not list(find(trace([adapter(FP32)], scaler=True, autocast=FP16)))
    assert not list(find(trace([adapter(BF16)], autocast=BF16)))
