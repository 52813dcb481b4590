from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from isotype.preflight.check import check
from tests.rules.traces import FP32, found, of_llama, on, traced

RULE = "ist606_float64"


class Turned(nn.Module):
    """A layer whose outputs are weighted by cosines of angles that are computed in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.dtype = dtype

    def forward(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        angles = torch.arange(8, dtype=self.dtype) / 8
        out: torch.Tensor = self.layer(x) * angles.cos().to(x.dtype)
        return (out if weights is None else out * weights).sum()


X = {"x": torch.ones(2, 8)}


def test_angles_in_float64_on_an_apple_gpu() -> None:
    (finding,) = found(RULE, on(traced(Turned(torch.float64), X), "mps"))
    assert finding.severity == "error"
    assert finding.message == "Apple GPU has no float64"
    assert finding.cause.startswith("arange returns float64 at test_ist606.py:")
    assert finding.fixes[0].description.startswith("write float32 instead of float64 at test_ist606.py:")
    assert finding.fixes[0].actions[0].kind == "line"


def test_an_input_of_numpys_dtype_is_one_finding() -> None:
    given = {**X, "weights": torch.ones(2, 8, dtype=torch.float64)}
    (finding,) = found(RULE, on(traced(Turned(FP32), given), "mps"))
    assert finding.cause == "the input weights is float64"
    assert finding.fixes[0].description == "cast weights to float32 before it goes to the device"


def test_a_number_in_a_float64_buffer_is_moved_with_its_model() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("scaling", torch.tensor(0.5, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) * self.scaling).sum()

    trace = traced(Scaled(), X)
    (finding,) = found(RULE, on(trace, "mps"))
    assert finding.cause == "the buffer scaling is float64"
    assert found(RULE, on(trace, "a100")) == []


def test_boxes_of_all_images_are_one_finding() -> None:
    """A collator of a detector returns a list of targets, whose boxes NumPy has computed."""

    class Boxes(nn.Linear):
        def forward(self, targets: list[torch.Tensor]) -> torch.Tensor:
            return super().forward(torch.stack(targets).float())

    boxes = [torch.ones(2, 4, dtype=torch.float64) for _ in range(3)]
    (finding,) = found(RULE, on(traced(Boxes(4, 4), {"targets": boxes}), "mps"))
    assert finding.cause == "the input targets[0] is float64"


def test_an_array_of_numpy_is_named_where_it_is_first_used() -> None:
    class Weighted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = torch.from_numpy(np.linspace(0, 1, 8))
            return (super().forward(x) * scale).sum()

    (finding,) = found(RULE, on(traced(Weighted(8, 8), X), "mps"))
    assert finding.cause.startswith("a tensor from NumPy is float64, first used at test_ist606.py:")


def test_float64_weights_are_one_finding() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    weights, given = found(RULE, on(traced(model, {"input": torch.ones(2, 8).double()}), "mps"))
    assert given.cause == "the argument input is float64"
    assert weights.cause == "0.weight is float64"
    assert weights.notes[0] == "3 more parameters in float64"
    assert {action.target for action in weights.fixes[0].actions} == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    }


@pytest.mark.parametrize("device", ["t4", "a100", "cpu-generic"])
def test_devices_with_float64(device: str) -> None:
    assert found(RULE, on(traced(Turned(torch.float64), X), device)) == []


def test_float32_is_silent() -> None:
    assert found(RULE, on(traced(Turned(FP32), X), "mps")) == []
    assert found(RULE, on(of_llama(FP32), "mps")) == []


def test_a_grad_scaler_on_an_arc_gpu() -> None:
    """pytorch/pytorch #147731: the GradScaler inverts its scale in float64."""
    inputs = {"input": torch.ones(2, 8)}
    (finding,) = check(nn.Linear(8, 8), inputs, device="a770", autocast="float16").errors
    assert (finding.code, finding.phase) == ("IST606", "unscale")
    assert "Required aspect fp64" in finding.notes[0]
    (fix,) = finding.fixes
    assert (fix.text, fix.verified) == ("run the step in bfloat16", True)
    for device, autocast in (("a770", "bfloat16"), ("xpu", "float16")):
        assert check(nn.Linear(8, 8), inputs, device=device, autocast=autocast).ok
    (finding,) = check(nn.Linear(8, 8).double(), {"input": torch.ones(2, 8).double()}, device="a770").errors[
        :1
    ]
    assert finding.message == "Intel Arc A770 16 GB has no float64"


class Covariance(nn.Linear):
    """A layer that multiplies its outputs by their covariance, which is computed in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(8, 8)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        wide = hidden.to(self.dtype)
        return (hidden @ (wide.T @ wide).to(hidden.dtype)).sum()


@pytest.mark.parametrize(("card", "slower"), [("rtx3060", 64), ("t4", 32), ("rx7900xtx", 32)])
def test_a_float64_model_is_slow_on_cards_with_few_float64_units(card: str, slower: int) -> None:
    model = Turned(FP32).double()
    trace = traced(model, {"x": torch.ones(2, 8, dtype=torch.float64)})
    (finding,) = found(RULE, on(trace, card))
    assert finding.severity == "warning"
    assert finding.message.startswith(f"float64 matmuls run {slower} times slower than float32 on ")
    assert finding.cause.startswith("layer.weight is float64")
    assert (finding.fixes[0].safety, finding.fixes[0].description[:49]) == (
        "unsafe", "run the step in float32 and cast the weights; flo",
    )  # fmt: skip
    assert finding.cost is not None
    assert finding.cost.flops_share == 1.0


@pytest.mark.parametrize("device", ["a100", "h100", "mi300x", "cpu-avx2"])
def test_a_float64_model_is_not_reported_where_float64_is_fast(device: str) -> None:
    trace = traced(Turned(FP32).double(), {"x": torch.ones(2, 8, dtype=torch.float64)})
    assert found(RULE, on(trace, device)) == []


def test_a_product_in_float64_names_the_cast_in_the_code() -> None:
    report = check(Covariance(torch.float64), X, device="rtx4090")
    (finding,) = [finding for finding in report.findings if finding.code == "IST606"]
    assert finding.cause.startswith("a cast to float64 at test_ist606.py:")
    assert finding.fixes[0].description.startswith("write float32 instead of float64 at test_ist606.py:")
    assert finding.fixes[0].verified
    assert "IST606" not in {f.code for f in check(Covariance(FP32), X, device="rtx4090").findings}
