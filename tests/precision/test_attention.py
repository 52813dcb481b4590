"""Which attention kernel an NVIDIA GPU takes, against a table read off torch's sdp_utils.cpp by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isotype.contracts.contract import contracts_of
from isotype.precision.devices.attention import (
    KERNELS,
    RELEASE,
    AttentionCall,
    attention_kernel,
    may_return_nan,
    needs_repeated_heads,
)
from isotype.precision.devices.names import profile_names
from isotype.precision.devices.profile import device_profile

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HEAD = (64, 64, 64)
_ON_FAKES = "aten._scaled_dot_product_flash_attention_for_cpu.default"  # what attention is there


@pytest.mark.parametrize(
    ("device", "call", "kernel", "later"),
    [
        ("a100-40gb", AttentionCall(BF16, 32, 8, HEAD), "flash", "flash"),
        ("a100-40gb", AttentionCall(F16, 32, 32, HEAD), "flash", "flash"),
        ("a100-40gb", AttentionCall(BF16, 8, 8, HEAD, masked=True), "efficient", "efficient"),
        ("a100-40gb", AttentionCall(BF16, 32, 8, HEAD, masked=True), "math", "efficient"),
        ("a100-40gb", AttentionCall(F32, 32, 32, HEAD), "efficient", "efficient"),
        ("a100-40gb", AttentionCall(F32, 32, 8, HEAD), "math", "efficient"),
        ("h100", AttentionCall(BF16, 32, 8, HEAD, masked=True), "cudnn", "cudnn"),
        ("h100", AttentionCall(BF16, 8, 8, HEAD, masked=True), "cudnn", "cudnn"),
        ("h100", AttentionCall(BF16, 32, 8, HEAD), "cudnn", "cudnn"),
        ("h100", AttentionCall(F32, 8, 8, HEAD, masked=True), "efficient", "efficient"),
        ("h100", AttentionCall(BF16, 8, 8, (256, 256, 256), masked=True), "efficient", "cudnn"),
        ("h100", AttentionCall(BF16, 32, 8, (256, 256, 256), masked=True), "math", "cudnn"),
        ("b200", AttentionCall(F16, 8, 8, HEAD, masked=True), "cudnn", "cudnn"),
        ("rtx4090", AttentionCall(BF16, 8, 8, HEAD, masked=True), "efficient", "efficient"),
        ("rtx4090", AttentionCall(BF16, 32, 8, HEAD, masked=True), "math", "efficient"),
        ("h100", AttentionCall(F64, 32, 32, HEAD), "math", "math"),
        ("h100", AttentionCall(BF16, 32, 32, (256, 256, 256)), "flash", "cudnn"),
        ("h100", AttentionCall(BF16, 32, 32, (512, 512, 512)), "efficient", "efficient"),
        ("h100", AttentionCall(BF16, 32, 32, (192, 192, 128)), "cudnn", "cudnn"),
        ("h100", AttentionCall(BF16, 32, 32, (192, 192, 192)), "flash", "flash"),
        ("h100", AttentionCall(BF16, 32, 32, (36, 36, 36), masked=True), "math", "math"),
        ("t4", AttentionCall(F16, 32, 32, HEAD), "efficient", "efficient"),
        ("t4", AttentionCall(F16, 32, 8, HEAD), "math", "efficient"),
        ("t4", AttentionCall(F32, 32, 32, HEAD), "efficient", "efficient"),
        ("t4", AttentionCall(BF16, 32, 32, HEAD), "math", "math"),
        ("v100", AttentionCall(F16, 32, 8, HEAD), "math", "efficient"),
        ("mi300x", AttentionCall(BF16, 32, 8, HEAD), None, None),
        ("mps", AttentionCall(F16, 32, 8, HEAD), None, None),
        ("cpu-avx2", AttentionCall(F32, 32, 8, HEAD), None, None),
    ],
)
def test_kernel_of_a_call(device: str, call: AttentionCall, kernel: str | None, later: str | None) -> None:
    """Up to torch 2.13, and from 2.14 on: there the memory-efficient kernel takes grouped heads, and cuDNN's heads of 256."""
    assert attention_kernel(device_profile(device), call, (2, 13)) == kernel
    assert attention_kernel(device_profile(device), call, (2, 14)) == later


@pytest.mark.parametrize(("masked", "kernel"), [(False, "flash"), (True, "efficient")])
def test_with_cudnns_kernel_switched_off(masked: bool, kernel: str) -> None:
    call = AttentionCall(BF16, 8, 8, HEAD, masked=masked)
    assert attention_kernel(device_profile("h100"), call) == "cudnn"
    assert attention_kernel(device_profile("h100"), call, enabled=KERNELS - {"cudnn"}) == kernel


def test_where_gradients_may_be_nan() -> None:
    masked = AttentionCall(BF16, 8, 8, HEAD, masked=True)
    h100 = device_profile("h100")
    assert [may_return_nan(h100, masked, (2, minor)) for minor in range(10, 16)] == [
        False,
        *[True] * 4,
        False,
    ]
    assert not may_return_nan(h100, replace(masked, masked=False), (2, 13))
    assert not may_return_nan(h100, replace(masked, dtype=F32), (2, 13))
    assert not any(
        may_return_nan(device_profile(name), masked, (2, 13)) for name in ("b200", "a100-40gb", "rtx4090")
    )


def test_heads_are_repeated_where_that_brings_a_fused_kernel_and_nowhere_else() -> None:
    for name in profile_names():
        profile = device_profile(name)
        for dtype in (F16, BF16, F32, F64):
            for release in ((2, 13), (2, 14)):
                grouped, alone = (
                    attention_kernel(profile, AttentionCall(dtype, 32, heads, HEAD), release)
                    for heads in (8, 32)
                )
                repeated = grouped == "math" and alone == "efficient"
                assert needs_repeated_heads(profile, dtype, release) == repeated


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
    """Of a later one sdp_utils.cpp is read again; of a binary alone, what `strings libtorch_cuda.so` shows of its checks."""
    assert RELEASE <= (2, 15)
