"""What is known of operators without a measurement: families of operators with one rule and one message.

Used where a device's table says nothing: for combinations that were not measured, and for whole devices that none
of us could measure on. Whatever rests on a family is marked `assumed`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isotype.contracts.pattern import fill, letters_in

GPUS = frozenset({"cuda", "rocm", "xpu", "mps"})
ALL = GPUS | {"cpu"}


@dataclass(frozen=True)
class Family:
    """A rule that several operators share.

    Attributes:
        ops: operators without overload (`aten.mm`).
        message: what torch says to operands that break the rule; `{0}`, `{1}` are the operands compared: the first
            one, and the first one that differs from it. "" for a rule that only limits the dtypes.
        alike: positions of the operands that must share a dtype, counted in the pattern's letters; None for all.
        exact: whether an integer operand breaks the rule too (those of a matmul do, indices do not).
        only: letters of the dtypes that are accepted at all; "" for any.
        refusal: what torch says to another dtype, `{0}` being the dtype.
        devices: device kinds it holds on.
    """

    ops: frozenset[str]
    message: str = ""
    alike: tuple[int, ...] | None = None
    exact: bool = False
    only: str = ""
    refusal: str = ""
    devices: frozenset[str] = ALL

    def breach(self, pattern: str, integer: torch.dtype = torch.int64) -> str | None:
        """What torch says to operands of this pattern; None where it accepts them."""
        letters = letters_in(pattern)
        chosen = [letters[at] for at in self.alike or range(len(letters)) if at < len(letters)]
        compared = chosen if self.exact else [letter for letter in chosen if letter != "i"]
        refused = next((letter for letter in compared if self.only and letter not in self.only), None)
        if refused is not None:
            return fill(self.refusal, [refused], integer)
        other = next((letter for letter in compared if letter != compared[0]), None)
        return (
            fill(self.message, [compared[0], other], integer) if self.message and other is not None else None
        )


def _ops(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


_CUDA = frozenset({"cuda", "rocm"})
_ADDMM = _ops("addmm addmm_ _addmm_activation")

FAMILIES: tuple[Family, ...] = (
    # mm is checked in each device's kernel, addmm before any of them: its messages are the same everywhere.
    Family(
        _ops("mm linear mv addmv addmv_"),
        message="expected mat1 and mat2 to have the same dtype, but got: {0} != {1}",
        exact=True,
        devices=GPUS,
    ),
    Family(
        _ops("mm linear mv addmv addmv_"),
        message="expected m1 and m2 to have the same dtype, but got: {0} != {1}",
        exact=True,
        devices=frozenset({"cpu"}),
    ),
    Family(
        _ADDMM, "self and mat2 must have the same dtype, but got {0:name} and {1:name}", (0, 2), exact=True
    ),
    Family(
        _ADDMM, "mat1 and mat2 must have the same dtype, but got {0:name} and {1:name}", (1, 2), exact=True
    ),
    Family(
        _ops("bmm baddbmm baddbmm_ addbmm addbmm_ dot vdot"),
        message="expected scalar type {0:name} but found {1:name}",
        exact=True,
    ),
    # `torch.sparse.mm` on fakes, which are dense, gives it the sparse matrix last.
    Family(
        _ops("_sparse_addmm"),
        message="expected scalar type {0:name} but found {1:name}",
        alike=(2, 1),
        exact=True,
    ),
    Family(
        _ops("_grouped_mm"),
        message="Expected inputs of BF16 type but got mat_a.dtype={0:torch} and mat_b.dtype={1:torch}.",
    ),
    Family(
        _ops("convolution _convolution cudnn_convolution"),
        message="Input type ({0}) and bias type ({1}) should be the same",
        alike=(0, 2),
        exact=True,
    ),
    Family(
        _ops("convolution _convolution cudnn_convolution"),
        message="Input type ({0}) and weight type ({1}) should be the same",
        alike=(0, 1),
        exact=True,
    ),
    Family(
        _ops("convolution_backward"),
        message="expected scalar type {0:name} but found {1:name}",
        exact=True,
    ),
    Family(
        _ops("index_put index_put_ _index_put_impl_ _unsafe_index_put"),
        message="Index put requires the source and destination dtypes match, got {0:name} for the destination and "
        "{1:name} for the source.",
    ),
    Family(
        _ops("index_add index_add_"),
        message="index_add_(): self ({0:name}) and source ({1:name}) must have the same scalar type",
    ),
    Family(
        _ops("index_copy index_copy_"),
        message="index_copy_(): self and source expected to have the same dtype, but got (self) {0:name} and "
        "(source) {1:name}",
    ),
    Family(
        _ops("scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_"),
        message="scatter(): Expected self.dtype to be equal to src.dtype",
    ),
    Family(
        _ops("masked_scatter masked_scatter_"),
        message="masked_scatter_: expected self and source to have same dtypes but got {0:name} and {1:name}",
    ),
    # A CPU takes float32 weights beside half-precision activations here; the kernels of GPUs have one dtype. Mean and
    # rstd of the backward (positions 2 and 3) have the accumulation's.
    Family(
        _ops("native_layer_norm native_group_norm"),
        message="expected scalar type {0:name} but found {1:name}",
        devices=GPUS,
    ),
    Family(
        _ops("native_layer_norm_backward native_group_norm_backward"),
        message="expected scalar type {0:name} but found {1:name}",
        alike=(0, 1, 4),
        devices=GPUS,
    ),
    Family(
        _ops("_weight_norm_interface"),
        message="expected scalar type {0:name} but found {1:name}",
    ),
    # The mask of the fused kernels; the CPU's converts a float32 one.
    Family(
        _ops("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"),
        message="invalid dtype for bias - should match query's dtype",
        devices=_CUDA,
    ),
    Family(
        _ops("_scaled_dot_product_flash_attention _flash_attention_forward"),
        message="Query, key and value must have the same dtype, got {0:torch} and {1:torch}",
        alike=(0, 1, 2),
        only="bh",
        refusal="FlashAttention only support fp16 and bf16 data type",
        devices=_CUDA,
    ),
    # One dtype for all lists but the step counts; found_inf and grad_scale are float32.
    Family(
        _ops("_fused_adamw_ _fused_adam_"),
        message="params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout",
        alike=(0, 1, 2, 3),
        devices=_CUDA,
    ),
    # Factorizations come from LAPACK, cuSOLVER and MAGMA, which have no 16 bits; nor have the kernels of the two below.
    Family(
        _ops("_linalg_svd"),
        only="fd",
        refusal="\"svd_cuda_gesvdj\" not implemented for '{0:name}'",
        devices=_CUDA,
    ),
    Family(
        _ops(
            "_linalg_svd _linalg_eigh linalg_eig linalg_qr geqrf linalg_householder_product linalg_cholesky_ex "
            "cholesky_inverse linalg_inv_ex linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_ldl_factor_ex "
            "linalg_solve_triangular triangular_solve linalg_lstsq _linalg_solve_ex _linalg_det"
        ),
        only="fd",
        refusal="linalg: Low precision dtypes not supported. Got {0:name}",
    ),
    Family(
        _ops("_ctc_loss"),
        alike=(0,),
        only="fd",
        refusal="\"ctc_loss\" not implemented for '{0:name}'",
    ),
    Family(
        _ops("_cdist_forward"), only="fd", refusal="\"cdist\" not implemented for '{0:name}'", devices=_CUDA
    ),
    Family(
        _ops("_embedding_bag"),
        message="Expected tensor for argument #1 'weight' to have the same type as tensor for argument #1 "
        "'per_sample_weights'; but type {0:name} does not equal {1:name}",
    ),
    # Half but not bfloat16: pytorch/pytorch#127176, open in torch 2.13.
    Family(
        _ops("_amp_foreach_non_finite_check_and_unscale_"),
        alike=(0,),
        only="fhd",
        refusal="\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for '{0:name}'",
        devices=_CUDA,
    ),
)
"""What is checked first comes first."""


def families_of(op: str, device: str) -> tuple[Family, ...]:
    """The families of an overload (`aten.mm.default`) on a kind of device, in the order torch checks them."""
    name = op.rpartition(".")[0]
    return tuple(family for family in FAMILIES if name in family.ops and device in family.devices)
