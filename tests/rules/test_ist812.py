from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from isotype.precision.devices import attention
from isotype.records.trace import Trace
from tests.models import tiny_batch
from tests.rules.traces import BF16, FP32, found, llama, on, traced

RULE = "ist812_cudnn_nan"


def padded(tokens: int) -> dict[str, torch.Tensor]:
    """`[2, tokens]` ids with labels, the first row of which is padded: so there is a mask."""
    batch = tiny_batch("llama")
    ids = batch["input_ids"][:, :1].repeat(1, tokens)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return traced(llama(), padded(192))


@pytest.fixture(autouse=True)
def _torch_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    _release(monkeypatch, (2, 13))


def _release(monkeypatch: pytest.MonkeyPatch, release: tuple[int, int]) -> None:
    for name in ("may_return_nan", "misreads_masks"):
        judge = functools.partial(getattr(attention, name), release=release)
        monkeypatch.setattr(f"isotype.rules.{RULE}.{name}", judge)


class Biased(nn.Module):
    """Attention in bfloat16 with a bias of another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.project = nn.Linear(64, 64, dtype=BF16)
        self.register_buffer("bias", torch.zeros(32, 32, dtype=dtype))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        heads = self.project(states).view(2, 32, 4, 16).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, self.bias)


@pytest.fixture(scope="module")
def biased() -> Trace:
    return traced(Biased(FP32), {"states": torch.zeros(2, 32, 64, dtype=BF16)})


@pytest.mark.parametrize("device", ["h100", "b200"])
def test_a_float32_mask(biased: Trace, device: str) -> None:
    (finding,) = [one for one in found(RULE, on(biased, device)) if one.severity == "error"]
    assert finding.message == "cuDNN's attention reads a float32 mask as bfloat16: its outputs are wrong"
    assert finding.phase == "forward"
    assert finding.cause == "the buffer bias is float32"
    assert [fix.description for fix in finding.fixes] == ["cast the mask to bfloat16, or use torch 2.14"]


def test_masks_that_are_read_correctly(biased: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"states": torch.zeros(2, 32, 64, dtype=BF16)}
    narrow = on(traced(Biased(BF16), inputs), "h100")
    assert [one.severity for one in found(RULE, narrow)] == ["note"]
    assert found(RULE, on(biased, "a100")) == []
    _release(monkeypatch, (2, 14))
    assert [one.severity for one in found(RULE, on(biased, "h100"))] == ["note"]


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_a_length_at_which_it_may_fail(trace: Trace, device: str) -> None:
    (finding,) = found(RULE, on(trace, device))
    assert finding.severity == "warning"
    assert (
        finding.message
        == "cuDNN's attention with a mask may return NaN for the queries' gradients at 192 tokens"
    )
    (fix,) = finding.fixes
    assert fix.description == "torch.backends.cuda.enable_cudnn_sdp(False) before the training, or torch 2.15"


def test_other_lengths_are_a_note() -> None:
    (finding,) = found(RULE, on(traced(llama(), padded(128)), "h100"))
    assert finding.severity == "note"
    assert finding.message.endswith("at lengths that are 64 more than a multiple of 128")


@pytest.mark.parametrize("device", ["b200", "a100", "t4", "cpu-generic"])
def test_other_devices(trace: Trace, device: str) -> None:
    assert found(RULE, on(trace, device)) == []


def test_without_a_mask_or_a_backward() -> None:
    whole = padded(192)
    del whole["attention_mask"]
    assert found(RULE, on(traced(llama(), whole), "h100")) == []
    assert found(RULE, on(traced(llama(), padded(192), phases=("forward",)), "h100")) == []


def test_with_the_kernel_switched_off(trace: Trace) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert found(RULE, on(trace, "h100")) == []
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def _image(width: int = 4) -> dict[str, torch.Tensor]:
    return {"input": torch.zeros(1, 3, width, width)}


@pytest.mark.parametrize(
    "model", [nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 1), nn.Conv2d(3, 3, 3, groups=3)]
)
def test_float16_convolutions_on_a_gtx_1660(model: nn.Module) -> None:
    (finding,) = found(RULE, on(traced(model, _image(), autocast=torch.float16), "gtx1660ti"))
    assert (finding.severity, finding.phase) == ("warning", "forward")
    assert finding.message == "float16 convolutions may return NaN on NVIDIA GeForce GTX 1660 Ti"
    assert "pytorch/issues/77955" in finding.cause


def test_convolutions_that_are_right() -> None:
    half = traced(nn.Conv2d(3, 4, 3), _image(), autocast=torch.float16)
    assert found(RULE, on(half, "rtx2060")) == []
    assert found(RULE, on(traced(nn.Conv2d(3, 4, 3), _image()), "gtx1660ti")) == []
    linear = traced(nn.Linear(4, 4), _image(), autocast=torch.float16)
    assert found(RULE, on(linear, "gtx1660ti")) == []
