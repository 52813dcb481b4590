"""The autocast of a GPU on CPU tensors: its result dtypes, in a trace and in a script."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn import functional

import isotype
from isotype.precision.devices.profile import device_profile
from isotype.preflight.script.missing_gpu import MissingGpu
from isotype.trace.live.recorder import LiveFunctions, LiveRecorder
from tests.small import BF16, FP16, FP32, Seen

Function = Callable[[torch.Tensor], torch.Tensor]

# Function of a float16 tensor -> dtype of its result under float16 autocast on CUDA (torch's "Autocast Op Reference").
RESULTS: dict[str, tuple[Function, torch.dtype]] = {
    "1 / x": (lambda x: 1 / x, FP32),
    "2 ** x": (lambda x: 2**x, FP32),
    "x ** 2": (lambda x: x**2, FP32),
    "interpolate": (lambda x: functional.interpolate(x[None], scale_factor=2, mode="bilinear"), FP32),
    "area": (lambda x: functional.interpolate(x[None], scale_factor=2, mode="area"), FP16),
    "area of a volume": (lambda x: functional.interpolate(x[None, None], (1, 2, 2), mode="area"), FP16),
    "attention weights": (
        lambda x: functional.multi_head_attention_forward(
            x, x, x, 8, 2, torch.ones(24, 8), None, None, None, False, 0.0, torch.ones(8, 8), None
        )[1],
        FP32,
    ),
    "area in order": (lambda x: functional.interpolate(x[None], None, 2, "area"), FP16),
    "softmin": (lambda x: functional.softmin(x, -1), FP32),
    "gumbel_softmax": (functional.gumbel_softmax, FP32),
    "special.log_softmax": (lambda x: torch.special.log_softmax(x, -1), FP32),
    "pairwise_distance": (lambda x: functional.pairwise_distance(x, x * 2), FP32),
    "linalg.norm": (lambda x: torch.linalg.norm(x, dim=-1), FP32),
    "normalize": (functional.normalize, FP32),
    "local_response_norm": (lambda x: functional.local_response_norm(x, 2), FP32),
    "lp_pool1d": (lambda x: functional.lp_pool1d(x, 2.0, 2), FP32),
    "gaussian_nll_loss": (lambda x: functional.gaussian_nll_loss(x, x * 2, x.abs() + 1), FP32),
    "layer_norm": (lambda x: functional.layer_norm(x, (8,)), FP32),
    "softmax": (lambda x: x.softmax(-1), FP32),
    "softmax of a dtype": (lambda x: functional.softmax(x, -1, dtype=FP16), FP16),
    "sum": (torch.sum, FP32),
    "mean": (torch.mean, FP16),
    "sigmoid": (torch.sigmoid, FP16),
    "grid_sample": (
        lambda x: functional.grid_sample(x[None], torch.zeros(1, 2, 2, 2, dtype=FP16), align_corners=False),
        FP16,
    ),
    "grid_sample of two dtypes": (
        lambda x: functional.grid_sample(x[None], torch.zeros(1, 2, 2, 2), align_corners=False),
        FP32,
    ),
    "vstack": (lambda x: torch.vstack([x, x]), FP16),
    "hstack of another 16-bit dtype": (lambda x: torch.hstack([x.bfloat16(), x.bfloat16()]), BF16),
    "einsum": (lambda x: torch.einsum("bij,bkj->bik", x.float(), x), FP16),
    "scatter_add": (
        lambda x: torch.zeros_like(x, dtype=FP32).scatter_add(1, torch.zeros(2, 6, 8, dtype=torch.long), x),
        FP32,
    ),
    "addcmul": (lambda x: torch.addcmul(x, x, x.float()), FP32),
}


@pytest.fixture
def on_t4() -> Iterator[None]:
    simulated = MissingGpu(device_profile("t4"))
    simulated.attach()
    try:
        yield
    finally:
        simulated.detach()


@pytest.mark.parametrize("name", RESULTS)
def test_a_script_gets_the_result_dtypes_of_the_gpus_autocast(name: str, on_t4: None) -> None:
    function, expected = RESULTS[name]
    with torch.autocast("cuda", FP16):
        assert function(torch.rand(2, 6, 8, device="cuda").half()).dtype == expected


def test_a_trace_has_the_result_dtypes_of_the_gpus_autocast() -> None:
    seen = Seen()

    def loss(model: nn.Module) -> torch.Tensor:
        x = model(torch.rand(2, 6, 8))
        for function, _ in RESULTS.values():
            seen.append(function(x).dtype)
        return x.float().mean()

    isotype.check(nn.Linear(8, 8), loss, device="t4", autocast="float16", phases=("forward",), verify=False)
    found = seen.all()
    assert dict(zip(RESULTS, found, strict=True)) == {name: dtype for name, (_, dtype) in RESULTS.items()}


def test_tensors_of_another_16_bit_dtype_are_joined_as_on_a_gpu(on_t4: None) -> None:
    halves = [torch.ones(8).bfloat16(), torch.ones(8).bfloat16()]
    with torch.autocast("cuda", FP16):
        joined = [torch.cat(halves), torch.stack(halves), torch.vstack(halves)]
        assert torch.is_autocast_enabled("cuda")
    assert {tensor.dtype for tensor in joined} == {BF16}


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8)])
def test_a_norm_of_other_dtypes_runs_in_float32_as_on_a_gpu(norm: nn.Module, on_t4: None) -> None:
    x, narrow = torch.randn(2, 8), copy.deepcopy(norm).bfloat16()
    with torch.autocast("cuda", FP16):
        results = narrow(x), narrow(x.bfloat16())
    assert {result.dtype for result in results} == {torch.float32}
    assert torch.equal(results[0], norm(x))


class Experts(nn.Module):
    """Writes rows in autocast's dtype into a copy of its input."""

    def __init__(self, widen: Function) -> None:
        super().__init__()
        self.embedding, self.expert, self.widen = nn.Embedding(8, 8), nn.Linear(8, 8), widen

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.widen(self.embedding(ids))
        output = torch.zeros_like(hidden)
        output[ids > 4] = self.expert(hidden[ids > 4])
        return output.sum()


@pytest.mark.parametrize(
    ("widen", "name"),
    [
        (lambda x: functional.layer_norm(x, (8,)), "layer_norm"),
        (lambda x: x.softmax(-1), "softmax"),
        (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)), "rsqrt"),
        (lambda x: x + x.float(), ""),
    ],
)
def test_float32_that_autocast_returns_for_float32_has_autocast_as_its_cause(
    widen: Function, name: str
) -> None:
    """unslothai/unsloth #7020, hiyouga/LLaMA-Factory #2639: a cast of the embedding would change nothing."""
    model, ids = Experts(widen), torch.arange(8)[None]
    report = isotype.check(model, lambda m: m(ids), device="a100", autocast="bfloat16")
    (finding,) = report.errors
    expected = f"autocast returns float32 from {name} at " if name else "embedding.weight is float32"
    assert finding.cause.startswith(expected)
    recorder = LiveRecorder("cpu", kind="cuda")
    with ExitStack() as modes, torch.autocast("cpu"):
        modes.enter_context(recorder.weigh(model))
        modes.enter_context(recorder.watch(model))
        modes.enter_context(recorder)
        modes.enter_context(LiveFunctions(recorder))
        recorder.turn_to("forward")
        with pytest.raises(RuntimeError, match="dtypes match"):
            model(ids)
    cause = recorder.calls[-1].operands[0].origin.cause
    assert (cause.kind, cause.name) == (("autocast", name) if name else ("parameter", "embedding.weight"))
