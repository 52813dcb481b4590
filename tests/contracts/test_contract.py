"""Verdicts: what is looked up, what is assumed, what is left to the fake kernel."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional

from isotype.contracts.contract import (
    CPU_TABLES,
    KINDS,
    Contracts,
    Table,
    Verdict,
    contracts_for,
    contracts_of,
    doubts,
    is_exempt,
)
from isotype.contracts.families import by_shapes
from isotype.contracts.pattern import CORRUPTS
from isotype.precision.devices.cpu import CpuFeatures, OneDnn
from isotype.precision.devices.profile import cpu_profile, device_profile

F, B, H, D, I = torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64  # noqa: E741
MEASURED = "2.13.0+cu130"  # the torch of the tables, in a build for another device
CPU = contracts_for("cpu")
OPERATORS = sorted(CPU.reference.operators)
DTYPES = st.sampled_from(
    [F, B, H, D, I, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)


def test_a_measured_rejection_carries_the_message_of_the_real_device() -> None:
    with pytest.raises(RuntimeError) as real:
        torch.mm(torch.ones(2, 2, dtype=F), torch.ones(2, 2, dtype=B))
    assert CPU.judge("aten.mm.default", (F, B)) == Verdict(False, (), str(real.value))
    assert str(real.value) == "expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16"


def test_a_norm_without_a_bias_keeps_its_statistics_in_float32() -> None:
    assert CPU.judge("aten.native_group_norm.default", (B, F)) == Verdict(True, (B, F, F))


@pytest.mark.parametrize(
    ("kind", "op", "dtypes", "message"),
    [
        ("cpu", "aten.addmm.default", (B, F, B), "mat1 and mat2 must have the same dtype, but got Float and BFloat16"),
        ("cpu", "aten.addmm.default", (H, F, F), "self and mat2 must have the same dtype, but got Half and Float"),
        ("cpu", "aten.mm.default", (H, torch.int8), "expected m1 and m2 to have the same dtype, but got: c10::Half != signed char"),
        ("cpu", "aten.native_layer_norm.default", (F, B, B), "mixed dtype (CPU): expect parameter to have scalar type of Float"),
        ("cpu", "aten.index_put_.default", (F, I, B), "Index put requires the source and destination dtypes match, got Float for the destination and BFloat16 for the source."),
        ("cuda", "aten.mm.default", (F, B), "expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16"),
        ("cuda", "aten.mm.default", (H, torch.int8), "expected mat1 and mat2 to have the same dtype, but got: c10::Half != signed char"),
        ("cuda", "aten.addmm.default", (H, F, H), "mat1 and mat2 must have the same dtype, but got Float and Half"),
        ("cuda", "aten.native_layer_norm.default", (B, F, F), "expected scalar type BFloat16 but found Float"),
        ("cuda", "aten.index_put_.default", (B, I, I, F), "Index put requires the source and destination dtypes match, got BFloat16 for the destination and Float for the source."),
        ("cuda", "aten._scaled_dot_product_flash_attention.default", (F, F, F), "FlashAttention only support fp16 and bf16 data type"),
        ("cuda", "aten._amp_foreach_non_finite_check_and_unscale_.default", (B, B, F, F), "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"),
        ("cuda", "aten.mv.default", (F, B), "addmv input tensors must have the same dtype, but got BFloat16, Float, and BFloat16"),
        ("cuda", "aten.addmv.default", (H, F, H), "addmv input tensors must have the same dtype, but got Half, Float, and Half"),
        ("cuda", "aten.mm.default", (I, I), "\"addmm_cuda\" not implemented for 'Long'"),
        ("rocm", "aten.bmm.default", (torch.int8, torch.int8), "\"baddbmm_cuda\" not implemented for 'Char'"),
        ("cuda", "aten.dot.default", (F, B), "dot : expected both vectors to have same dtype, but found Float and BFloat16"),
        ("mps", "aten.mm.default", (F, B), "expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16"),
        ("xpu", "aten.mm.default", (F, B), "expected self and mat2 to have the same dtype, but got: float != c10::BFloat16"),
        ("cuda", "aten.mm.dtype", (B, F), "input dtypes must be the same"),
        ("cuda", "aten.bmm.dtype", (B, F), "batch1 and batch2 must have the same dtype"),
        ("cuda", "aten.mm.dtype_out", (B, F, F), "input dtypes must be the same"),
        ("cuda", "aten.addmm.dtype", (F, B, H), "mat1 and mat2 must have the same dtype, but got BFloat16 and Half"),
        ("cuda", "aten.baddbmm.dtype", (F, B, H), "batch1 and batch2 must have the same dtype"),
        ("cuda", "aten._grouped_mm.default", (H, F, torch.int32), "expected mat1 and mat2 to have the same dtype, but got: c10::Half != float"),
        ("cuda", "aten._grouped_mm.default", (H, D, torch.int32), "Expected mat_b to be Float32, BFloat16 or Float16 matrix, got Double"),
        ("cuda", "aten._grouped_mm.default", (B, torch.uint8), "Expected mat_b to be Float32, BFloat16 or Float16 matrix, got Byte"),
        ("cuda", "aten.native_group_norm.default", (F, B, B), "mixed dtype (CPU): expect parameter to have scalar type of Float"),
        ("cuda", "aten.native_group_norm.default", (B, H, H), "mixed dtype (CPU): expect parameter to have scalar type of Float"),
        ("cuda", "aten.native_group_norm.default", (D, F, F), "mixed dtype (CPU): all inputs must share same datatype."),
        ("cuda", "aten.native_group_norm.default", (B, F, F), "expected scalar type BFloat16 but found Float"),
        ("cuda", "aten.native_group_norm_backward.default", (F, B, F, F, F), "Expected scalar types of X and dY are same."),
        ("cuda", "aten.native_batch_norm.default", (F, B, B, B, B), "expected scalar type Float but found BFloat16"),
        ("rocm", "aten.native_batch_norm.default", (D, F, F, F, F), "expected scalar type Double but found Float"),
        ("cuda", "aten.native_batch_norm.default", (D, F, F, F, F), "Expected tensor for argument #1 'input' to have the same type as tensor for argument #2 'weight'"),
        ("cuda", "aten.native_batch_norm.default", (H, F, F, H, H), "Expected tensor for argument #2 'weight' to have the same type as tensor for argument #4 'running_mean'"),
        ("cuda", "aten.native_batch_norm.default", (B, H, H, H, H), "expected scalar type Float but found Half"),
        ("cpu", "aten.native_batch_norm.default", (D, F, F, F, F), "mixed dtype (CPU): all inputs must share same datatype."),
        ("cpu", "aten.native_layer_norm.default", (B, D, D), "mixed dtype (CPU): expect parameter to have scalar type of Float"),
        ("cpu", "aten.native_group_norm.default", (F, F, D), "expected scalar type Float but found Double"),
        ("cuda", "aten._fused_rms_norm.default", (B, F), "expected scalar type BFloat16 but found Float"),
        ("cuda", "aten._fused_rms_norm_backward.default", (B, B, F, F), "expected scalar type BFloat16 but found Float"),
        ("cuda", "aten.linalg_inv_ex.default", (B,), "linalg.inv: Low precision dtypes not supported. Got BFloat16"),
        ("cuda", "aten._linalg_slogdet.default", (B,), "linalg.slogdet: Low precision dtypes not supported. Got BFloat16"),
        ("cuda", "aten.linalg_qr.default", (B,), "\"geqrf_cuda\" not implemented for 'BFloat16'"),
        ("cuda", "aten._linalg_det.default", (H,), "\"lu_factor_cusolver\" not implemented for 'Half'"),
        ("cuda", "aten._linalg_svd.default", (B,), "\"svd_cuda_gesvdj\" not implemented for 'BFloat16'"),
        ("cuda", "aten._ctc_loss.default", (B, I), "\"ctc_loss_cuda\" not implemented for 'BFloat16'"),
        ("cuda", "aten._cdist_forward.default", (B, B), "\"cdist_cuda\" not implemented for 'BFloat16'"),
        ("cuda", "aten._scaled_dot_product_flash_attention.default", (B, B, F), "query and value must have the same dtype"),
        ("cuda", "torch_attn._varlen_attn.default", (F, F, F), "FlashAttention only support fp16 and bf16 data type"),
        ("cuda", "torch_attn._varlen_attn.default", (B, F, B), "query and key must have the same dtype"),
        ("cuda", "aten._scaled_dot_product_efficient_attention.default", (D, D, D), "Only fp32, half & bf16 supported at the moment"),
        ("cuda", "aten._scaled_dot_product_efficient_attention.default", (B, B, B, F), "invalid dtype for bias - should match query's dtype"),
        ("cuda", "aten._scaled_dot_product_cudnn_attention.default", (F, F, F), "No available kernel. Aborting execution."),
        ("cpu", "aten.nll_loss_forward.default", (F, torch.int32), "expected target dtype to be Long or Byte, but got Int"),
        ("cpu", "aten.nll_loss_forward.default", (F, I, D), "expected scalar type Float but found Double"),
        ("cpu", "aten.lerp_.Scalar", (D, F), "expected dtype double for `end` but got dtype float"),
        ("cuda", "aten.mul_.Tensor", (I, F), "result type Float can't be cast to the desired output type Long"),
        ("cpu", "aten.add.Tensor", (torch.float8_e4m3fn, torch.float8_e4m3fn), "\"add_cpu\" not implemented for 'Float8_e4m3fn'"),
        ("cuda", "aten.mm.default", (torch.float8_e4m3fn, torch.float8_e4m3fn), "\"mm_cuda\" not implemented for 'Float8_e4m3fn'"),
        ("cuda", "aten._fused_adamw_.default", (B, F, F, F, F), "params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout"),
    ],
)  # fmt: skip
def test_messages(kind: str, op: str, dtypes: tuple[torch.dtype, ...], message: str) -> None:
    verdict = contracts_for(kind).judge(op, dtypes)
    assert verdict is not None
    assert (verdict.accepted, verdict.message) == (False, message)


@pytest.mark.parametrize("name", ["mm", "addmm", "addbmm", "mv", "addmv", "bmm", "baddbmm", "dot", "vdot"])
def test_products_of_bools_on_a_cpu(name: str) -> None:
    square, vector = torch.ones(2, 2, dtype=torch.bool), torch.ones(2, dtype=torch.bool)
    stack = square[None]
    operands = {
        "mm": (square, square), "addmm": (square, square, square), "addbmm": (square, stack, stack),
        "mv": (square, vector), "addmv": (vector, square, vector), "bmm": (stack, stack),
        "baddbmm": (stack, stack, stack), "dot": (vector, vector), "vdot": (vector, vector),
    }[name]  # fmt: skip
    with pytest.raises(RuntimeError) as raised:
        getattr(torch, name)(*operands)
    verdict = CPU.judge(f"aten.{name}.default", tuple(operand.dtype for operand in operands))
    assert verdict is not None
    assert (verdict.accepted, verdict.message, verdict.assumed) == (False, str(raised.value), False)
    assert CPU.judge(f"aten.{name}.default", (torch.uint8,) * len(operands)) is None


@pytest.mark.parametrize(
    ("op", "dtypes"),
    [
        ("aten._grouped_mm.default", (H, H, torch.int32)),  # a float16 mixture of experts
        ("aten._grouped_mm.default", (F, F, torch.int32)),
        ("aten.mm.dtype", (B, B)),
        ("aten.addmm.dtype", (F, B, B)),
        ("aten.addmm.dtype_out", (F, B, B, F)),
        ("aten.mm.dtype_out", (B, B, F)),
        ("aten.baddbmm.dtype", (F, B, B)),
        ("aten._fused_rms_norm.default", (B, B)),
        ("aten._fused_rms_norm_backward.default", (B, B, F, B)),
        ("aten.native_group_norm.default", (B, B, B)),
        ("aten.native_batch_norm.default", (B, F, F, F, F)),
        ("aten.native_batch_norm.default", (H, F, F, F, F)),
        ("aten.native_batch_norm.default", (H, F, F)),
        ("aten.native_batch_norm.default", (B, F, F, B, B)),
        ("aten._scaled_dot_product_efficient_attention.default", (F, F, F)),
        ("aten._scaled_dot_product_cudnn_attention.default", (B, B, B, F)),
    ],
)
def test_what_gpus_take(op: str, dtypes: tuple[torch.dtype, ...]) -> None:
    verdict = contracts_for("cuda").judge(op, dtypes)
    assert verdict is not None
    assert verdict.accepted


MASKED = "aten._scaled_dot_product_flash_attention_for_cpu.default"  # what attention is on fakes


@pytest.mark.parametrize(
    ("device", "op", "dtypes", "accepted"),
    [
        ("a100", MASKED, (B, B, B, F), False),
        ("a100", "aten._scaled_mm.default", (torch.float8_e4m3fn, torch.float8_e4m3fn, F, F), False),
        ("rtx4090", MASKED, (B, B, B, F), False),
        ("h100", MASKED, (B, B, B, F), True),  # cuDNN's kernel comes first and takes it
        ("b200", MASKED, (B, B, B, F), True),
        ("t4", MASKED, (H, H, H, F), False),
        ("t4", MASKED, (B, B, B, F), True),  # no fused kernel takes bfloat16 there: the plain one runs
        ("mi300x", MASKED, (B, B, B, F), True),
        ("a100", MASKED, (B, B, B, torch.bool), True),
        ("t4", "aten._scaled_dot_product_efficient_attention.default", (B, B, B), False),
        ("t4", "aten._scaled_dot_product_efficient_attention.default", (H, H, H), True),
        ("a100", "aten._scaled_dot_product_efficient_attention.default", (B, B, B), True),
    ],
)
def test_what_depends_on_the_capability(
    device: str, op: str, dtypes: tuple[torch.dtype, ...], accepted: bool
) -> None:
    verdict = contracts_of(device_profile(device)).judge(op, dtypes)
    assert (verdict is None or verdict.accepted) is accepted


@pytest.mark.newest  # torch 2.10 has another text for addmv
def test_texts_that_all_devices_share_are_those_of_the_cpu() -> None:
    """ATen checks these before any kernel: what a GPU is said to say is what this machine says."""
    x, bf16 = torch.ones(2, 3), torch.ones(3, dtype=B)
    calls: list[tuple[str, tuple[torch.Tensor, ...]]] = [
        ("mv", (x, bf16)),
        ("addmv", (torch.ones(2, dtype=B), x, bf16)),
        ("dot", (x[0], bf16)),
        ("vdot", (x[0], bf16)),
        ("linalg_inv_ex", (torch.eye(2, dtype=B),)),
    ]
    for name, args in calls:
        op = getattr(torch.ops.aten, name).default
        with pytest.raises(RuntimeError) as real:
            op(*args)
        said = contracts_for("cuda").judge(f"aten.{name}.default", tuple(arg.dtype for arg in args))
        assert said is not None
        assert said.message == str(real.value)


@pytest.mark.parametrize("dtype", [H, B])
@pytest.mark.parametrize(
    ("name", "operands"),
    [
        ("_linalg_solve_ex", 2),
        ("linalg_eig", 1),
        ("linalg_ldl_factor_ex", 1),
        ("linalg_qr", 1),
        ("geqrf", 1),
        ("cholesky_inverse", 1),
        ("triangular_solve", 2),
        ("linalg_solve_triangular", 2),
        ("_linalg_slogdet", 1),
    ],
)
def test_factorizations_on_a_cpu_raise_the_error_that_the_rule_names(
    name: str, operands: int, dtype: torch.dtype
) -> None:
    op = getattr(torch.ops.aten, name).default
    with pytest.raises((RuntimeError, NotImplementedError)) as real:
        op(*[torch.eye(3, dtype=dtype)] * operands, **{"upper": True} if "solve_tri" in name else {})
    predicted = contracts_for("cpu").judge(f"aten.{name}.default", (dtype,) * operands)
    assert predicted is not None
    assert predicted.message == str(real.value)


@pytest.mark.parametrize(("side", "kernel"), [(32, "svd_cuda_gesvdjBatched"), (33, "svd_cuda_gesvdj")])
def test_small_matrices_are_factored_by_another_kernel(side: int, kernel: str) -> None:
    op = "aten._linalg_svd.default"
    said = contracts_for("cuda").judge(op, (B,))
    assert said is not None
    assert by_shapes(op, (torch.ones(2, side, side, dtype=B),), said.message) == (
        f"\"{kernel}\" not implemented for 'BFloat16'"
    )
    assert by_shapes("aten.mm.default", (), "as it was") == "as it was"


def test_a_layer_norm_in_half_precision_takes_float32_weights_on_a_cpu_only() -> None:
    mixed = (B, F, F)
    assert CPU.judge("aten.native_layer_norm.default", mixed) == Verdict(True, (B, F, F))
    gpu = contracts_for("cuda").judge("aten.native_layer_norm.default", mixed)
    assert gpu is not None
    assert not gpu.accepted


def _bias(name: str) -> Verdict | None:
    return contracts_for(name).judge("aten.convolution.default", (B, B, F))


def test_a_cpu_is_judged_by_its_own_instruction_set() -> None:
    """A float32 bias on a bfloat16 convolution: torch's own kernel takes it, oneDNN's does not."""
    amx = _bias("cpu-amx")
    assert _bias("cpu-avx2") == Verdict(True, (B,))
    assert (
        amx
        == _bias("cpu-avx512")
        == Verdict(
            False,
            (),
            "Input type (CPUBFloat16Type) and bias type (torch.FloatTensor) should be the same or input should be a MKLDNN "
            "tensor and bias is a dense tensor",
        )
    )
    rnn = ("aten.mkldnn_rnn_layer.default", (B,) * 7)
    assert [contracts_for(name).judge(*rnn).accepted for name in CPU_TABLES] == [False, True, True]


@pytest.mark.parametrize(("takes", "accepted"), [((), True), ((B,), False), ((B, H), False)])
def test_a_cpu_that_nobody_has_measured_is_judged_by_the_nearest_and_says_so(
    takes: Any, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", MEASURED)
    arm = CpuFeatures("Graviton", frozenset({"bf16", "asimdhp"}), "a test", "aarch64")
    profile = cpu_profile(arm, None, OneDnn(frozenset(takes)))
    contracts = contracts_of(profile)
    bias = contracts.judge("aten.convolution.default", (B, B, F))
    assert bias is not None
    assert (bias.accepted, bias.assumed) == (accepted, True)
    # What all x86 CPUs do alike is no matter of their instructions.
    assert contracts.judge("aten.mm.default", (F, B)) == CPU.judge("aten.mm.default", (F, B))
    assert doubts(profile) == [
        "this is a CPU of type aarch64, but the tables were measured on x86 CPUs: the check uses the table "
        f"{profile.contracts}"
    ]


def test_another_torch_than_the_tables_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cpu-amx", "t4"):
        monkeypatch.setattr(torch, "__version__", MEASURED)
        assert doubts(device_profile(name)) == []
        monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
        assert doubts(device_profile(name)) == [
            "operators were measured with torch 2.13.0, and the installed torch is 2.10.0"
        ]


def test_a_table_names_wrong_values_by_the_message_that_the_recorder_compares() -> None:
    assert CORRUPTS in contracts_for("cpu-avx2").reference.messages


def test_a_gpu_that_builds_for_cuda_13_do_not_run_on_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", MEASURED)
    v100 = device_profile("v100")
    sentence = (
        "torch is a build for CUDA 12.6, because builds for CUDA 13 do not run on NVIDIA V100 SXM2 16 GB"
    )
    assert doubts(v100) == [sentence]
    assert doubts(replace(v100, present=True)) == []


def test_what_was_not_measured_on_the_device_is_assumed_and_leaves_the_results_to_the_fake_kernel() -> None:
    measured, assumed = (contracts_for(kind).judge("aten.mm.default", (B, B)) for kind in ("cpu", "xpu"))
    assert measured == Verdict(True, (B,))
    assert assumed == Verdict(True, (), assumed=True)
    doubles = CPU.judge("aten.mm.default", (D, F))
    assert doubles == Verdict(
        False, (), "expected m1 and m2 to have the same dtype, but got: double != float", True
    )


def test_a_kernel_missing_on_the_cpu_says_nothing_about_a_gpu() -> None:
    table = Table("", ('"svd_cpu" not implemented for \'{0:name}\'', "{0} is wrong"), {
        "aten.svd.default": {"b": 0, "h": 1},
    })  # fmt: skip
    cpu, gpu = Contracts("cpu", table, table), Contracts("cuda", None, table)
    assert cpu.judge("aten.svd.default", (B,)) == Verdict(
        False, (), "\"svd_cpu\" not implemented for 'BFloat16'"
    )
    assert gpu.judge("aten.svd.default", (B,)) is None
    assert gpu.judge("aten.svd.default", (H,)) == Verdict(False, (), "c10::Half is wrong", assumed=True)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_list_is_judged_alike_whatever_its_length(length: int) -> None:
    assert CPU.judge("aten.cat.default", (B,) * length + (F,)) == Verdict(True, (F,))
    fused = "aten._fused_adamw_.default"
    uniform = CPU.judge(fused, (B,) * 4 * length + (F,) * length)
    assert uniform is not None
    assert uniform.accepted


@pytest.mark.parametrize(
    ("dtypes", "accepted"), [((F, F, B, B), True), ((F, F, H, H), False), ((F, F, F, B), False)]
)
def test_the_fused_adam_of_a_gpu_has_bfloat16_states(dtypes: tuple[torch.dtype, ...], accepted: bool) -> None:
    lists = tuple(dtype for dtype in (*dtypes, F) for _ in range(2))
    verdict = contracts_for("cuda").judge("aten._fused_adamw_.default", lists)
    assert (verdict is None or verdict.accepted) is accepted
    on_cpu = CPU.judge("aten._fused_adamw_.default", lists)
    assert on_cpu is not None
    assert not on_cpu.accepted


def test_one_bad_element_of_a_list_breaks_the_contract() -> None:
    params, grads, moments, steps = (F, F), (F, B), (F, F, F, F), (F, F)
    verdict = CPU.judge("aten._fused_adamw_.default", params + grads + moments + steps)
    assert verdict == Verdict(False, (), "expected scalar type Float but found BFloat16")


REAL: dict[str, Any] = {
    "nll_loss_forward": lambda dtype: torch.nn.functional.nll_loss(
        torch.ones(2, 2), torch.tensor([0, 1]), torch.ones(2, dtype=dtype)
    ),
    "nll_loss2d_forward": lambda dtype: torch.nn.functional.nll_loss(
        torch.ones(1, 2, 1, 2), torch.tensor([[[0, 1]]]), torch.ones(2, dtype=dtype)
    ),
    "_prelu_kernel": lambda dtype: torch.prelu(torch.ones(2, 2), torch.ones(2, dtype=dtype)),
    "mse_loss": lambda dtype: torch.nn.functional.mse_loss(torch.ones(2), torch.ones(2, dtype=dtype)),
    "native_batch_norm": lambda dtype: torch.batch_norm(
        torch.ones(2, 3), torch.ones(3, dtype=dtype), None, None, None, True, 0.1, 1e-5, False
    ),
    "native_group_norm": lambda dtype: torch.nn.functional.group_norm(
        torch.ones(2, 4), 2, torch.ones(4, dtype=dtype)
    ),
    "_cdist_forward": lambda dtype: torch.cdist(torch.ones(2, 2), torch.ones(2, 2, dtype=dtype)),
}


@pytest.mark.real_cpu
@pytest.mark.parametrize("name", REAL)
def test_a_mixture_with_float64_is_judged_by_those_with_bfloat16(name: str) -> None:
    verdict = CPU.judge(f"aten.{name}.default", (F, I, D) if "nll" in name else (F, D))
    if verdict is None or verdict.accepted:
        assert REAL[name](D).isfinite()
    else:
        with pytest.raises(RuntimeError):
            REAL[name](D)
    assert name == "mse_loss" or verdict is not None


UNMEASURED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], Sequence[int]]] = {
    "aten.lerp.Scalar": (lambda a, b: torch.lerp(a, b, 0.5), (0, 1)),
    "aten.put.default": (lambda a, b: a.flatten().put(torch.tensor([0]), b[0, :1]), (0, -1, 1)),
    "aten.index_reduce.default": (
        lambda a, b: a.index_reduce(0, torch.tensor([0, 1]), b, "mean"),
        (0, -1, 1),
    ),
    "aten._linalg_solve_ex.default": (
        lambda a, b: torch.linalg.solve(a + torch.eye(2, dtype=a.dtype), b),
        (0, 1),
    ),
    "aten.multi_margin_loss.default": (
        lambda a, b: functional.multi_margin_loss(b, torch.tensor([0, 1])),
        (1, -1),
    ),
    "aten.multilabel_margin_loss_forward.default": (
        lambda a, b: functional.multilabel_margin_loss(b, torch.zeros(2, 2, dtype=I)),
        (1, -1),
    ),
}


@pytest.mark.real_cpu
@pytest.mark.newest  # the families have the words of torch 2.13
@pytest.mark.parametrize("op", UNMEASURED)
@pytest.mark.parametrize("dtypes", [(F, B), (D, H)])
def test_operators_without_a_measurement_are_refused_in_the_words_of_torch(
    op: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    call, operands = UNMEASURED[op]
    verdict = CPU.judge(op, tuple(I if at < 0 else dtypes[at] for at in operands))
    assert verdict is not None
    with pytest.raises(RuntimeError, match=re.escape(verdict.message)):
        call(*(torch.ones(2, 2, dtype=dtype) for dtype in dtypes))


@pytest.mark.real_cpu
@pytest.mark.newest  # the families have the words of torch 2.13
@pytest.mark.parametrize("dtypes", [(F, F, B, F, H), (H, B, B, F, F), (B, B, B, H, F), (H, H, F, F, B)])
def test_a_batch_norm_of_three_dtypes_is_refused(dtypes: tuple[torch.dtype, ...]) -> None:
    x, weight, bias, mean, variance = (torch.ones(2, 2, dtype=dtype) for dtype in dtypes)
    verdict = CPU.judge("aten.native_batch_norm.default", dtypes)
    assert verdict is not None
    with pytest.raises(RuntimeError, match=re.escape(verdict.message)):
        functional.batch_norm(x, mean[0], variance[0], weight[0], bias[0], training=True)


def test_nothing_is_said_of_integers_or_of_operators_and_dtypes_nobody_knows() -> None:
    assert CPU.judge("aten.add.Tensor", (I, I)) is None
    assert CPU.judge("aten.mm.default", (I, I)) is None
    assert CPU.judge("aten.mm.default", ()) is None
    assert CPU.judge("aten.mm.default", (torch.complex64, torch.float8_e8m0fnu)) is None
    assert CPU.judge("mylib.op.default", (F, B)) is None
    assert CPU.judge("GradScaler.unscale_", (F, B)) is None


@pytest.mark.newest  # the tables have the words of torch 2.13
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.int32])
def test_targets_of_any_dtype_are_refused_in_the_words_of_torch(dtype: torch.dtype) -> None:
    verdict = CPU.judge("aten.nll_loss_forward.default", (F, dtype))
    assert verdict is not None
    with pytest.raises(RuntimeError, match=re.escape(verdict.message)):
        torch.nn.functional.nll_loss(torch.zeros(2, 3), torch.zeros(2).to(dtype))


@given(st.sampled_from(OPERATORS), st.lists(DTYPES, max_size=9), st.sampled_from(KINDS))
def test_a_verdict_is_consistent_for_any_operands(op: str, dtypes: list[torch.dtype], kind: str) -> None:
    assume(len(dtypes) > 2 or ".addmv" not in op)  # its error names three operands
    verdict = contracts_for(kind).judge(op, tuple(dtypes))
    if verdict is None:
        return
    assert bool(verdict.message) is not verdict.accepted
    assert "{" not in verdict.message
    assert verdict.accepted or not verdict.results
    assert kind == "cpu" or verdict.assumed
    assert contracts_for(kind).judge(op, tuple(dtypes)) is verdict


@given(
    st.sampled_from(
        ["mm", "bmm", "addmm", "baddbmm", "convolution", "index_put_", "index_add_", "scatter_add_"]
    ),
    st.sampled_from([F, B, H]),
    st.sampled_from(KINDS),
)
def test_operands_of_one_dtype_are_accepted(name: str, dtype: torch.dtype, kind: str) -> None:
    shape = {"addmm": 3, "baddbmm": 3, "convolution": 3}.get(name, 2)
    dtypes = (dtype, I, dtype) if name.endswith("_") else (dtype,) * shape
    verdict = contracts_for(kind).judge(f"aten.{name}.default", dtypes)
    assert verdict is not None
    assert verdict.accepted


def test_an_unknown_kind_of_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device kind 'tpu': expected one of cpu, cuda, rocm, xpu, mps"):
        contracts_for("tpu")


def test_a_known_call_is_one_look_up() -> None:
    dtypes = (F, B)
    CPU.judge("aten.mm.default", dtypes)
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    CPU.judge("aten.mm.default", dtypes)
    sys.setprofile(None)
    assert calls == ["judge"]


def test_index_put_through_a_mask_with_one_value_is_a_fill() -> None:
    x, mask = torch.zeros(3, dtype=B), torch.tensor([True, False, True])
    one, two, rows = torch.tensor(1.0), torch.ones(2), torch.tensor([0, 2])
    op = "aten.index_put_.default"
    x.index_put_((mask,), one)  # float32 into bfloat16
    assert x.tolist() == [1, 0, 1]
    with pytest.raises(RuntimeError, match="Index put requires"):
        x.index_put_((rows,), one)
    assert is_exempt(op, (x, [mask], one))
    assert not is_exempt(op, (x, [rows], one))
    assert not is_exempt(op, (x, [mask], two))
    assert not is_exempt("aten.mm.default", (x, x))
    norm, wide = "aten.native_batch_norm.default", x.double()
    assert is_exempt(norm, (x, None, None, wide, wide), "cuda")
    assert not is_exempt(norm, (x, None, None, wide, wide), "cpu")
    assert not is_exempt(norm, (x, wide, wide, wide, wide), "cuda")
    rows, weight = torch.ones(2, 3, dtype=B), torch.ones(3)
    assert is_exempt(norm, (rows, weight, weight, wide, wide), "cuda")  # cuDNN takes no matrices
    assert not is_exempt(norm, (rows[..., None], weight, weight, wide, wide), "cuda")
    assert not is_exempt(norm, (rows, wide, wide, wide, wide), "cuda")


def test_a_lerp_whose_weight_has_no_dimensions_and_a_rrelu_outside_of_training() -> None:
    x, weight = torch.ones(3, dtype=torch.bfloat16), torch.tensor(0.5)
    assert is_exempt("aten.rrelu_with_noise.default", (x, x, 0.1, 0.3))
    assert not is_exempt("aten.rrelu_with_noise.default", (x, x, 0.1, 0.3, True))
    assert is_exempt("aten.lerp_.Tensor", (x, x, weight))
    assert x.lerp_(x, weight).dtype == torch.bfloat16
    assert not is_exempt("aten.lerp_.Tensor", (x, x, weight.expand(3)))
    assert not is_exempt("aten.lerp_.Tensor", (x, x.float(), weight))
