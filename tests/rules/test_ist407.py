from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import isotype
from isotype.records.trace import Failure
from isotype.rules import ist107_recomputation, ist407_repacked
from tests.cpus import pretend
from tests.rules.traces import traced

bitsandbytes = pytest.importorskip("bitsandbytes")
BF16 = torch.bfloat16


def model(rows: int, columns: int = 64) -> nn.Module:
    layer = bitsandbytes.nn.Linear4bit(columns, rows, bias=False, quant_type="nf4", compute_dtype=BF16)
    return nn.Sequential(nn.Linear(columns, columns, dtype=BF16), layer.to("cpu"))


def found(module: nn.Module, device: str, *phases: Any) -> list[tuple[str, str]]:
    x = torch.randn(2, module[1].in_features, dtype=BF16)
    report = isotype.check(
        module,
        lambda each: each(x).float().sum(),
        device=device,
        phases=phases,
        generate=lambda each: each(x),
    )
    return [(each.severity, each.message) for each in report.findings if each.code == "IST407"]


RAISES = "an evaluation on x86 CPU with AMX raises: bitsandbytes cannot repack 1 4-bit weight"


def test_a_shape_that_cannot_be_repacked() -> None:
    assert found(model(48), "cpu-amx", "forward", "generate") == [("error", RAISES)]
    assert found(model(48), "cpu-amx", "forward", "backward") == [("note", RAISES)]
    assert found(model(48), "cpu-avx2", "forward", "generate") == []
    assert found(model(48), "t4", "forward", "generate") == []


def test_training_after_an_evaluation() -> None:
    ((severity, message),) = found(model(64), "cpu-avx512", "forward", "backward", "generate")
    assert severity == "warning"
    assert message.endswith("repacks 1 4-bit weight, and the new layout has no backward")
    assert found(model(64), "cpu-avx512", "forward", "generate") == []


def test_a_recomputation_that_fails_for_repacked_weights_has_no_other_cause() -> None:
    failure = Failure(
        "backward", "1", "", "AttributeError: 'NoneType' object has no attribute 'shape'", recomputed=True
    )
    trace = replace(traced(model(64), {"input": torch.ones(2, 64, dtype=BF16)}), failure=failure)
    assert len([*ist107_recomputation.find(trace)]) == 1
    weights = [
        w
        if w.quantization is None
        else replace(w, quantization=replace(w.quantization, repacked=True, repacking=None))
        for w in trace.weights
    ]
    trace = replace(trace, weights=tuple(weights))
    assert list(ist107_recomputation.find(trace)) == []
    assert [finding.severity for finding in ist407_repacked.find(trace)] == ["error"]


def test_the_cpu_at_hand_is_traced_without_repacking_and_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("cpu-avx512", monkeypatch)
    module = model(64, 96).eval()
    x = torch.randn(2, 96, dtype=BF16)

    def check() -> Any:
        return isotype.check(
            module,
            lambda each: each(x),
            device="cpu",
            phases=("forward", "generate"),
            generate=lambda each: each(x),
        )

    report = check()
    (finding,) = (each for each in report.findings if each.code == "IST407")
    assert finding.severity == "error"
    assert finding.cause == "1: 96 columns are not a multiple of the block size 64"
    with pytest.raises(RuntimeError, match=r"invalid for input of size 96"), torch.no_grad():
        model(64, 96).eval()(x)
    isotype.repair(module, report)
    assert not any(each.code == "IST407" for each in check().findings)
    with torch.no_grad():
        assert module(x).shape == (2, 64)


def test_weights_that_an_evaluation_has_repacked_are_an_error() -> None:
    module = model(64)
    module[1].weight.quant_state.packing_format_for_cpu = True
    message = "bitsandbytes has repacked 1 4-bit weight for this CPU: the new layout has no backward"
    assert found(module, "cpu-avx512", "forward", "backward") == [("error", message)]
    assert found(module, "cpu-avx512", "forward") == []
    module[0].requires_grad_(False)  # as the first projections of a model whose embeddings are frozen
    module.append(nn.Linear(64, 2, dtype=BF16))
    assert found(module, "cpu-avx512", "forward", "backward") == []


def test_repacked_weights_without_gradients_are_not_the_cause_of_a_detached_loss() -> None:
    module = model(64).requires_grad_(False).append(nn.Linear(64, 2, dtype=BF16))
    module[1].weight.quant_state.packing_format_for_cpu = True
    x = torch.randn(2, 64, dtype=BF16)
    report = isotype.check(module, lambda module: module(x).detach().sum(), device="cpu-avx512")
    assert [finding.code for finding in report.errors] == ["IST307"]
