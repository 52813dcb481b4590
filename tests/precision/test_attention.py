"""Which attention kernel an NVIDIA GPU takes, against a table read off torch's sdp_utils.cpp by hand."""

from __future__ import annotations

import pytest
import torch

from isotype.contracts.contract import contracts_of
from isotype.precision.devices.attention import AttentionCall, attention_kernel, needs_repeated_heads
from isotype.precision.devices.profile import device_profile, profile_names

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HEAD = (64, 64, 64)
_ON_FAKES = "aten._scaled_dot_product_flash_attention_for_cpu.default"  # what attention is there


@pytest.mark.parametrize(
    ("device", "call", "kernel"),
    [
        ("a100-40gb", AttentionCall(BF16, 32, 8, HEAD), "flash"),
        ("a100-40gb", AttentionCall(F16, 32, 32, HEAD), "flash"),
        ("a100-40gb", AttentionCall(BF16, 8, 8, HEAD, masked=True), "efficient"),
        ("a100-40gb", AttentionCall(BF16, 32, 8, HEAD, masked=True), "math"),
        ("a100-40gb", AttentionCall(F32, 32, 32, HEAD), "efficient"),
        ("a100-40gb", AttentionCall(F32, 32, 8, HEAD), "math"),
        ("h100", AttentionCall(BF16, 32, 8, HEAD, masked=True), "cudnn"),
        ("h100", AttentionCall(BF16, 8, 8, HEAD, masked=True), "cudnn"),
        ("h100", AttentionCall(BF16, 32, 8, HEAD), "cudnn"),
        ("h100", AttentionCall(F32, 8, 8, HEAD, masked=True), "efficient"),
        ("h100", AttentionCall(BF16, 8, 8, (256, 256, 256), masked=True), "efficient"),
        ("h100", AttentionCall(BF16, 32, 8, (256, 256, 256), masked=True), "math"),
        ("b200", AttentionCall(F16, 8, 8, HEAD, masked=True), "cudnn"),
        ("rtx4090", AttentionCall(BF16, 8, 8, HEAD, masked=True), "efficient"),
        ("rtx4090", AttentionCall(BF16, 32, 8, HEAD, masked=True), "math"),
        ("h100", AttentionCall(F64, 32, 32, HEAD), "math"),
        ("h100", AttentionCall(BF16, 32, 32, (256, 256, 256)), "flash"),
        ("h100", AttentionCall(BF16, 32, 32, (512, 512, 512)), "efficient"),
        ("h100", AttentionCall(BF16, 32, 32, (192, 192, 128)), "cudnn"),
        ("h100", AttentionCall(BF16, 32, 32, (192, 192, 192)), "flash"),
        ("h100", AttentionCall(BF16, 32, 32, (36, 36, 36), masked=True), "math"),
        ("t4", AttentionCall(F16, 32, 32, HEAD), "efficient"),
        ("t4", AttentionCall(F16, 32, 8, HEAD), "math"),
        ("t4", AttentionCall(F32, 32, 32, HEAD), "efficient"),
        ("t4", AttentionCall(BF16, 32, 32, HEAD), "math"),
        ("v100", AttentionCall(F16, 32, 8, HEAD), "math"),
        ("mi300x", AttentionCall(BF16, 32, 8, HEAD), None),
        ("mps", AttentionCall(F16, 32, 8, HEAD), None),
        ("cpu-avx2", AttentionCall(F32, 32, 8, HEAD), None),
    ],
)
def test_kernel_of_a_call(device: str, call: AttentionCall, kernel: str | None) -> None:
    assert attention_kernel(device_profile(device), call) == kernel


def test_heads_are_repeated_where_that_brings_a_fused_kernel_and_nowhere_else() -> None:
    for name in profile_names():
        profile = device_profile(name)
        for dtype in (F16, BF16, F32, F64):
            grouped, alone = (
                attention_kernel(profile, AttentionCall(dtype, 32, heads, HEAD)) for heads in (8, 32)
            )
            assert needs_repeated_heads(profile, dtype) == (grouped == "math" and alone == "efficient")


def test_a_float32_mask_is_refused_where_the_memory_efficient_kernel_takes_the_call() -> None:
    """And nowhere else: cuDNN's takes it, plain operators do; the contract and the choice of the kernel say the same."""
    for name in profile_names():
        profile = device_profile(name)
        for dtype in (F16, BF16):
            kernel = attention_kernel(profile, AttentionCall(dtype, 8, 8, HEAD, masked=True))
            if kernel is None:
                continue
            verdict = contracts_of(profile).judge(_ON_FAKES, (dtype, dtype, dtype, F32))
            assert (verdict is not None and not verdict.accepted) == (kernel == "efficient"), (name, dtype)


def test_torch_is_one_whose_conditions_were_read() -> None:
    """torch's main (001f694) gives the memory-efficient kernel grouped heads: read sdp_utils.cpp again, and repeat no more where it takes them."""
    assert tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 13)
