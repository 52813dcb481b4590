from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import isotype
from isotype.records.trace import Operand, Origin
from isotype.rules import ist109_kernels
from tests.reality import real_step
from tests.rules.samples import FP16, refused, trace, weight
from tests.rules.traces import BF16, FP32, found, traced, verified

RULE = "ist109_kernels"


class Spectral(nn.Module):
    """Singular values of a layer's output."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4).to(BF16)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(self.proj(x).to(self.dtype))


X = torch.ones(2, 4, dtype=BF16)


@pytest.mark.real_cpu
def test_svd_in_bfloat16() -> None:
    (finding,) = verified(Spectral(BF16), {"x": X}, "IST109")
    assert finding.message == "aten._linalg_svd.default has no kernel for bfloat16 on this device"
    assert (finding.module, finding.phase) == ("", "forward")
    assert finding.notes == (f"the device raises: {real_step(Spectral(BF16), {'x': X}).error}",)


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4).to(BF16)

    def forward(self, x: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        return torch.cdist(self.proj(x), boxes)


@pytest.mark.real_cpu
def test_a_missing_kernel_explains_more_than_operands_of_two_dtypes() -> None:
    """open-mmlab/mmdetection #4746: a cast of the boxes to the model's dtype would not help."""
    inputs = {"x": X, "boxes": torch.ones(2, 4)}
    (finding,) = verified(Distances(), inputs, "IST109")
    assert finding.message == "aten._cdist_forward.default has no kernel for bfloat16 on this device"
    assert finding.notes == (f"the device raises: {real_step(Distances(), inputs).error}",)
    assert "not implemented for 'BFloat16'" in str(real_step(Distances(), {"x": X, "boxes": X}).error)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, dtype=BF16).requires_grad_(False).to(torch.float8_e4m3fn)
        self.proj = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table(x)
        return self.proj((rows + rows).float())


@pytest.mark.real_cpu
def test_a_sum_of_float8() -> None:
    ids = {"x": torch.zeros(2, dtype=torch.long)}
    assert "not implemented for 'Float8_e4m3fn'" in str(real_step(Table(), ids).error)
    (finding,) = verified(Table(), ids, "IST109")
    assert finding.cause == "table.weight is float8_e4m3fn"


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * (x.float() & torch.ones(2, 4))


def test_masks_of_floats_are_helped_by_no_other_float_dtype() -> None:
    (finding,) = verified(Counts(), {"x": torch.ones(2, 4)}, "IST109")
    assert finding.message == "aten.bitwise_and.Tensor has no kernel for float32 on this device"
    assert [fix.description.partition(" at ")[0] for fix in finding.fixes] == ["use bool or integer tensors"]


class Packed(nn.Module):
    """A layer that unpacks codes of four bits, as GPTQ's layers do, after a cast of all buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("codes", torch.ones(4, dtype=torch.int32).to(BF16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = torch.bitwise_right_shift(self.codes, torch.full((4,), 4, dtype=torch.int32))
        return self.proj(x) * (codes & 15)


@pytest.mark.real_cpu
def test_packed_codes_that_a_cast_made_floats() -> None:
    inputs = {"x": torch.ones(2, 4)}
    assert "not implemented for 'BFloat16'" in str(real_step(Packed(), inputs).error)
    (finding,) = verified(Packed(), inputs, "IST109")
    assert finding.message == "aten.bitwise_right_shift.Tensor has no kernel for bfloat16 on this device"
    assert [fix.description for fix in finding.fixes] == [
        "keep codes as integers, because a cast to bfloat16 rounds them"
    ]


class Unpacked(Packed):
    """A layer that casts its codes to its input's dtype before it unpacks them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = self.codes.int().to(self.proj.weight.dtype)
        return self.proj(x) * (torch.bitwise_right_shift(codes, torch.full((4,), 4, dtype=torch.int32)) & 15)


@pytest.mark.real_cpu
def test_codes_that_the_forward_casts_to_the_dtype_of_a_weight() -> None:
    """hiyouga/LLaMA-Factory #8281: the fix named the weight whose dtype the cast took, not the codes."""
    model = Unpacked()
    model.codes = model.codes.int()
    inputs = {"x": torch.ones(2, 4)}
    assert "not implemented for 'Float'" in str(real_step(model, inputs).error)
    (finding,) = verified(model, inputs, "IST109")
    assert re.fullmatch(r"codes is cast to float32 at test_ist109.py:\d+", finding.cause)
    assert [re.sub(r"\d+$", "N", fix.description) for fix in finding.fixes] == [
        "keep codes in int32 at test_ist109.py:N"
    ]
    assert finding.fixes[0].verified


def test_svd_in_float32() -> None:
    assert found(RULE, traced(Spectral(FP32), {"x": X})) == []


def test_an_operator_that_a_real_step_refused_in_float16_is_to_run_in_float32() -> None:
    """speechbrain/speechbrain #1803: the loss of a script, which no trace converted."""
    log_probs = Operand("log_probs", FP16, (4, 2, 3), Origin("parameter", FP16, weight(dtype=FP16).name))
    call = refused(
        "aten._ctc_loss.Tensor", "forward", log_probs, message="\"ctc_loss_cpu\" not implemented for 'Half'"
    )
    (finding,) = ist109_kernels.find(trace([weight(dtype=FP16)], [call], compute=FP16))
    assert {action.value for fix in finding.fixes for action in fix.actions} <= {"float32", "compute:float32"}


def test_a_loss_of_predictions_and_targets_that_have_no_kernel() -> None:
    """The matcher of DETR: a cast of the predictions alone leaves `cdist` with operands of two dtypes."""
    boxes, model = torch.rand(2, 4, dtype=BF16), nn.Sequential(nn.Linear(4, 4, dtype=BF16))
    (finding,) = found(RULE, traced(model, lambda model: torch.cdist(model(X), boxes, p=1).sum()))
    (line,) = finding.fixes
    assert line.description.startswith("cast the operands to float32 at test_ist109.py:")
    (finding,) = found(RULE, traced(model, lambda model: torch.cdist(model(X), model(X), p=1).sum()))
    assert "cast the outputs of 0 to float32" in {fix.description for fix in finding.fixes}


def test_the_cause_names_the_dtype_that_has_no_kernel() -> None:
    """A float32 graph beside bfloat16 features: on a GPU, `torch.sparse.mm` has no 16-bit kernel."""
    graph, model = torch.eye(2).to_sparse(), nn.Linear(4, 4, dtype=BF16)
    report = isotype.check(
        model, lambda model: torch.sparse.mm(graph, model(X)).sum(), device="a100", wiring=False
    )
    (finding,) = (other for other in report.findings if other.code == "IST109")
    assert finding.message.endswith("has no kernel for bfloat16 on this device")
    assert " is called in bfloat16 at test_ist109.py:" in finding.cause
