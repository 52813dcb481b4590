"""Rules for families of operators. These rules decide calls that were not measured. Their verdicts are marked as `assumed`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from isotype.compat.torch import VARLEN_ATTENTION
from isotype.contracts.pattern import CORRUPTS, Spelled, fill, letters_in
from isotype.core.operators import float_indices
from isotype.core.tables import table
from isotype.records.trace import NO_ATTENTION_KERNEL

GPUS = frozenset({"cuda", "rocm", "xpu", "mps"})
UNKNOWN_CAPABILITY = (8, 0)
"""The compute capability that is assumed for an unknown NVIDIA GPU. Older GPUs lack bfloat16, and newer GPUs prefer other kernels."""
ALL = GPUS | {"cpu"}


_PARTS = str.maketrans("zy", "fd")
"""Maps the letter of a complex dtype to the letter of the dtype of its real part. Few operators accept complex numbers whose parts are float16."""


@dataclass(frozen=True)
class Family:
    """A rule about the operand dtypes of several operators.

    Attributes:
        ops: names of the operators, without overload (`aten.mm`).
        message: torch's error for operands that break the rule. In it, `{0}` stands for the first compared operand, and `{1}`
            for the first operand with another dtype. "" if the rule only limits the dtypes.
        alike: indices (in the pattern) of the operands that must have the same dtype; None for all operands.
        exact: True if the rule includes integer operands, as in a matmul. False if it ignores integers, such as indices.
        only: letters of the accepted dtypes; "" if all dtypes are accepted.
        refusal: torch's error for a dtype that is not accepted. In the error, `{0}` stands for this dtype.
        devices: device kinds for which the rule holds.
        majors: major compute capabilities for which the rule holds; None for all of them.
        matches: a regular expression. The pattern of the compared operands must begin with a match.
        accepts: a regular expression. The devices accept a pattern that begins with a match.
        in_order: True if `{0}`, `{1}`, … in the message stand for the first, second, … of all operands.
    """

    ops: frozenset[str]
    message: str = ""
    alike: tuple[int, ...] | None = None
    exact: bool = False
    only: str = ""
    refusal: str = ""
    devices: frozenset[str] = ALL
    majors: frozenset[int] | None = None
    matches: str = ""
    accepts: str | None = None
    in_order: bool = False

    def holds(self, device: str, capability: tuple[int, int] | None) -> bool:
        """Return True if the rule holds for a device kind and, for an NVIDIA GPU, for its compute capability."""
        major, _ = capability or UNKNOWN_CAPABILITY
        return device in self.devices and (device != "cuda" or self.majors is None or major in self.majors)

    def breach(self, pattern: str, integer: torch.dtype = torch.int64) -> str | None:
        """Return torch's error for operands with this pattern; None if the rule accepts it."""
        letters = letters_in(pattern)
        chosen = [letters[at] for at in self.alike or range(len(letters)) if at < len(letters)]
        compared = chosen if self.exact else [letter for letter in chosen if letter != "i"]
        if not re.match(self.matches, "".join(compared)):
            return None
        refused = next((c for c in compared if self.only and c.translate(_PARTS) not in self.only), None)
        if refused is not None:
            return fill(self.refusal, [refused], integer)
        other = next((letter for letter in compared if letter != compared[0]), None)
        if not self.message or other is None:
            return None
        # A pattern has one letter for several integers in a row.
        return fill(
            self.message, letters + 2 * letters[-1] if self.in_order else [compared[0], other], integer
        )


def _ops(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


_FLASH = _ops("_scaled_dot_product_flash_attention _flash_attention_forward") | {VARLEN_ATTENTION}
"""The forward operators of FlashAttention."""

_CPU, _NVIDIA, _XPU = frozenset({"cpu"}), frozenset({"cuda"}), frozenset({"xpu"})
_CUDA = frozenset({"cuda", "rocm"})
_BELOW_8 = frozenset({5, 6, 7})
_ADDMM = _ops("addmm addmm_ _addmm_activation")
_NORMS = _ops("native_batch_norm native_layer_norm native_group_norm")
_BATCH_NORM = _ops("native_batch_norm")
_UNMEASURED = "(?=.*d|(?=.*b)(?=.*f).*h)"
_GROUPED = _ops("_grouped_mm")
_CONVOLUTIONS = _ops("convolution _convolution cudnn_convolution")
_FLASH_FOR_CPU = _ops("_scaled_dot_product_flash_attention_for_cpu")
_EFFICIENT = _ops("_scaled_dot_product_efficient_attention _efficient_attention_forward")
_CUDNN = _ops("_scaled_dot_product_cudnn_attention")
_BITWISE = _ops(
    "bitwise_and bitwise_and_ bitwise_or bitwise_or_ bitwise_xor bitwise_xor_ bitwise_not bincount "
    "bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ __ilshift__ __irshift__ gcd lcm"
)
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale"
_CONSTANTS = {"dequantize_4bit": (1,), "dequantize_blockwise": (1, 2), "gemm_4bit": (2,), "gemv_4bit": (2, 3)}
"""Maps bitsandbytes' kernels (and their `.out` forms) to the positions of absmax and code, which the kernels read as float32."""

_ADDMV = "addmv input tensors must have the same dtype, but got {{{}:name}}, {{{}:name}}, and {{{}:name}}"
MASK_DTYPE = "invalid dtype for bias - should match query's dtype"
_SCALAR_TYPE = "expected scalar type {0:name} but found {1:name}"
_SAME_DTYPE = "expected {} to have the same dtype, but got: {{0}} != {{1}}"
_MATRICES = "mat1 and mat2 must have the same dtype, but got {0:name} and {1:name}"
_BATCHES = "batch1 and batch2 must have the same dtype"
_DOT = "dot : expected both vectors to have same dtype, but found {0:name} and {1:name}"
_INDEX_PUT = (
    "Index put requires the source and destination dtypes match, got {0:name} for the destination and {1:name} for the "
    "source."
)
_INDEX_ADD = "index_add_(): self ({0:name}) and source ({1:name}) must have the same scalar type"
_INDEX_COPY = "index_copy_(): self and source expected to have the same dtype, but got (self) {0:name} and (source) {1:name}"
_PUT = "put_(): self and source expected to have the same dtype, but got self.dtype = {0:name} and source.dtype = {1:name}"
_SOLVE = "linalg.solve: Expected A and B to have the same dtype, but found A of type {0:name} and B of type {1:name} instead"
_SCATTER = "scatter(): Expected self.dtype to be equal to src.dtype"
_MASKED_SCATTER = (
    "masked_scatter_: expected self and source to have same dtypes but got {0:name} and {1:name}"
)
_FLOAT = "expected scalar type Float but found {1:name}"
_CUDNN_WEIGHT = (
    "Expected tensor for argument #1 'input' to have the same type as tensor for argument #2 'weight'"
)
_CUDNN_STATISTICS = _CUDNN_WEIGHT.replace("#2 'weight'", "#4 'running_mean'").replace(
    "#1 'input'", "#2 'weight'"
)
_FLOAT_WEIGHTS = "mixed dtype (CPU): expect parameter to have scalar type of Float"
_SHARED = "mixed dtype (CPU): all inputs must share same datatype."
_FLASH_16_BITS = "FlashAttention only support fp16 and bf16 data type"
_FUSED_ADAM = "params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout"
_EMBEDDING_BAG = (
    "Expected tensor for argument #1 'weight' to have the same type as tensor for argument #1 'per_sample_weights'; but "
    "type {0:name} does not equal {1:name}"
)
_RNN = "Input and {0} tensors are not the same dtype, found input tensor with {{0:name}} and {0} tensor with {{1:name}}"
_LSTM_ON_CPU = "could not create a primitive descriptor for the LSTM forward propagation primitive"
_NO_KERNEL = "\"{}\" not implemented for '{{0:name}}'"
_GROUPED_DTYPES = "Expected {} to be Float32, BFloat16 or Float16 matrix, got {{0:name}}"
_INPUT_TYPE = "Input type ({{0}}) and {} type ({{1}}) should be the same"
_EFFICIENT_DTYPES = "Only fp32, half & bf16 supported at the moment"
_CUTLASS = "cutlassF: no kernel found to launch!"
_LOW_PRECISION = "{}: Low precision dtypes not supported. Got {{0:name}}"
_FFT_DTYPES = "cuFFT doesn't support tensor of type: {0:name}"

ONLY_POWERS_OF_TWO = "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a signal size"

_TABLES = table(__file__, "kernels.json")
_CUDA_FACTORIZATIONS: Mapping[str, str] = _TABLES["cuda_factorizations"]
"""Maps names of operators, separated by spaces, to the kernel that torch calls first on a GPU (see `by_shapes`)."""
_CUDA_PRODUCTS: Mapping[str, str] = _TABLES["cuda_products"]
"""Maps names of matrix products that a GPU computes only for floating-point dtypes to the kernel."""
_CPU_KERNELS: Mapping[str, str] = _TABLES["cpu_kernels"]
"""Maps names of operators that a CPU runs only in float32 and float64 to the kernel. Measured with torch 2.13."""
_NOT_FLOAT: Mapping[str, str] = _TABLES["not_float"]
"""Maps errors about a float index, label or mask to operators."""


def _without_kernel(
    names: str,
    kernel: str,
    devices: frozenset[str] = ALL,
    only: str = "fd",
    alike: tuple[int, ...] | None = None,
) -> Family:
    """Return the rule for operators that have a kernel only for the dtypes `only`."""
    return Family(_ops(names), alike=alike, only=only, refusal=_NO_KERNEL.format(kernel), devices=devices)


FAMILIES: tuple[Family, ...] = (
    # For mm, each device's kernel has its own check and message. addmm is checked before any kernel, with one message.
    Family(_ops("mm linear"), _SAME_DTYPE.format("mat1 and mat2"), exact=True, devices=GPUS - _XPU),
    Family(_ops("mm linear"), _SAME_DTYPE.format("self and mat2"), exact=True, devices=_XPU),
    Family(_ops("mm linear"), _SAME_DTYPE.format("m1 and m2"), exact=True, devices=_CPU),
    # `mv` passes a result in the vector's dtype to `addmv`.
    Family(_ops("mv"), _ADDMV.format(1, 0, 1), exact=True, in_order=True),
    Family(_ops("addmv addmv_"), _ADDMV.format(0, 1, 2), exact=True, in_order=True),
    Family(_ADDMM, _MATRICES.replace("mat1 and", "self and"), (0, 2), exact=True),
    Family(_ADDMM, _MATRICES, (1, 2), exact=True),
    Family(_ops("bmm baddbmm baddbmm_ addbmm addbmm_"), _SCALAR_TYPE, exact=True),
    Family(_ops("dot vdot"), _DOT, exact=True),
    # Overloads with a result dtype exist only on GPUs. The added tensor may have either dtype.
    Family(_ops("mm.dtype mm.dtype_out"), "input dtypes must be the same", (0, 1), exact=True, devices=GPUS),
    Family(_ops("bmm.dtype bmm.dtype_out"), _BATCHES, (0, 1), exact=True, devices=GPUS),
    Family(_ops("baddbmm.dtype baddbmm.dtype_out"), _BATCHES, (1, 2), exact=True, devices=GPUS),
    Family(_ops("addmm.dtype addmm.dtype_out"), _MATRICES, (1, 2), exact=True, devices=GPUS),
    *(
        Family(_ops(names), exact=True, only="fdbh", refusal=_NO_KERNEL.format(kernel), devices=_CUDA)
        for names, kernel in _CUDA_PRODUCTS.items()
    ),
    _without_kernel("_sparse_addmm", "addmm_sparse_cuda", _CUDA),
    # On fake tensors, which are dense, `torch.sparse.mm` passes the sparse matrix as the last operand.
    Family(_ops("_sparse_addmm"), _SCALAR_TYPE, alike=(2, 1), exact=True),
    # Since torch 2.10, the kernels take three dtypes. Only the fake kernel raises "Expected inputs of BF16 type".
    Family(_GROUPED, alike=(0,), exact=True, only="fbh", refusal=_GROUPED_DTYPES.format("mat_a")),
    Family(_GROUPED, alike=(1,), exact=True, only="fbh", refusal=_GROUPED_DTYPES.format("mat_b")),
    Family(_GROUPED, _SAME_DTYPE.format("mat1 and mat2"), (0, 1), exact=True, devices=GPUS),
    Family(_GROUPED, _SAME_DTYPE.format("m1 and m2"), (0, 1), exact=True, devices=_CPU),
    Family(_CONVOLUTIONS, _INPUT_TYPE.format("bias"), (0, 2), exact=True),
    Family(_CONVOLUTIONS, _INPUT_TYPE.format("weight"), (0, 1), exact=True),
    Family(_ops("convolution_backward"), _SCALAR_TYPE, exact=True),
    Family(_ops("index_put index_put_ _index_put_impl_ _unsafe_index_put"), _INDEX_PUT),
    Family(_ops("index_add index_add_"), _INDEX_ADD),
    Family(_ops("index_reduce index_reduce_"), _INDEX_ADD.replace("add", "reduce")),
    Family(_ops("index_copy index_copy_"), _INDEX_COPY),
    Family(_ops("put put_"), _PUT),
    Family(_ops("lerp lerp_"), "expected dtype {0} for `end` but got dtype {1}", (0, 1)),
    Family(_ops("scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_"), _SCATTER),
    Family(_ops("masked_scatter masked_scatter_"), _MASKED_SCATTER),
    # Group norms are checked before any kernel, so the messages name the CPU on every device. A CPU takes float32
    # weights with 16-bit activations; a GPU takes one dtype. In the backward, mean and rstd (positions 2 and 3) have
    # the dtype of the accumulation.
    Family(_ops("native_group_norm"), _FLOAT_WEIGHTS, (0, 1), devices=GPUS, matches="f|bh|hb"),
    Family(_ops("native_group_norm"), _SHARED, (0, 1), devices=GPUS, matches="df"),
    Family(_ops("native_group_norm_backward"), "Expected scalar types of X and dY are same.", alike=(0, 1)),
    Family(_ops("native_layer_norm native_group_norm _fused_rms_norm"), _SCALAR_TYPE, devices=GPUS),
    # A GPU's batch norm takes 16-bit activations with float32 weights. Without bfloat16, cuDNN computes it, which needs
    # statistics in the weight's dtype (`_select_batch_norm_backend` in Normalization.cpp, cudnn/BatchNorm.cpp).
    Family(_BATCH_NORM, _CUDNN_WEIGHT, (0, 1), devices=_NVIDIA, matches="d[fh]|f[dh]"),
    Family(_BATCH_NORM, _CUDNN_STATISTICS, (0, 1, 3, 4), devices=_NVIDIA, matches="[fh]f(?!ff).|dd(?!dd)."),
    Family(_BATCH_NORM, _SCALAR_TYPE, (0, 1, 2), devices=_CUDA, matches="[df]"),
    Family(_BATCH_NORM, _FLOAT, (0, 1, 2), devices=_CUDA, matches="bh|hb|[bh]d"),
    # A CPU's norms were not measured with float64, and its batch norm was not measured with three dtypes. The
    # batch norm checks the statistics (positions 3 and 4) before the bias.
    Family(_NORMS, _SHARED, devices=_CPU, matches="(?=.*d)df(f|$)"),
    Family(_NORMS, _SCALAR_TYPE, (0, 1, 3, 4, 2), devices=_CPU, matches=rf"{_UNMEASURED}(.)\1"),
    Family(_NORMS, _FLOAT_WEIGHTS, devices=_CPU, matches=_UNMEASURED),
    Family(
        _ops("native_layer_norm_backward native_group_norm_backward"), _SCALAR_TYPE, (0, 1, 4), devices=GPUS
    ),
    Family(_ops("_fused_rms_norm_backward"), _SCALAR_TYPE, alike=(0, 1, 3), devices=_CUDA),
    Family(_ops("_weight_norm_interface"), _SCALAR_TYPE),
    # A mask of another dtype. On fake tensors, `scaled_dot_product_attention` calls the CPU's kernel, which converts
    # the mask. A GPU's memory-efficient kernel raises an error. On capabilities 9 and 10, cuDNN's kernel comes first
    # and accepts the mask (rule IST812 reports what it computes). Below 8.0, bfloat16 has no fused kernel. ROCm uses the math kernel.
    Family(_FLASH_FOR_CPU, MASK_DTYPE, devices=_NVIDIA, majors=frozenset({8, 11, 12})),
    Family(_FLASH_FOR_CPU, MASK_DTYPE, devices=_NVIDIA, majors=_BELOW_8, matches="[fh]"),
    Family(_EFFICIENT, alike=(0, 1, 2), only="fbh", refusal=_EFFICIENT_DTYPES, devices=_CUDA),
    Family(_EFFICIENT, alike=(0,), only="fh", refusal=_CUTLASS, devices=_NVIDIA, majors=_BELOW_8),
    Family(_ops("_scaled_dot_product_efficient_attention"), MASK_DTYPE, devices=_CUDA),
    # cuDNN's kernel takes only 16-bit dtypes. This error is raised if no other kernel is allowed. The mask may have
    # another dtype.
    Family(_CUDNN, alike=(0, 1, 2), only="bh", refusal=NO_ATTENTION_KERNEL, devices=_NVIDIA),
    Family(_FLASH, alike=(0,), only="bh", refusal=_FLASH_16_BITS, devices=_CUDA),
    Family(_FLASH, "query and key must have the same dtype", (0, 1), devices=_CUDA),
    Family(_FLASH, "query and value must have the same dtype", (0, 2), devices=_CUDA),
    # All lists but the step counts need one dtype. Only float32 parameters may have bfloat16 states (torch 2.13).
    Family(_ops("_fused_adamw_ _fused_adam_"), _FUSED_ADAM, (0, 1, 2, 3), devices=_CUDA, accepts="ffbb"),
    # Masks and packed codes: `&`, `|`, `~`, `<<` and `>>` take only integers and bools.
    Family(_BITWISE, alike=(0, 1), exact=True, only="i", refusal="not implemented for '{0:name}'"),
    # Factorizations use LAPACK, cuSOLVER and MAGMA, which have no 16-bit routines. Two operators raise an error before
    # they are dispatched; the errors of the others name the kernel.
    Family(_ops("_linalg_solve_ex"), _SOLVE, exact=True),
    Family(_ops("linalg_inv_ex"), only="fd", refusal=_LOW_PRECISION.format("linalg.inv")),
    Family(_ops("_linalg_slogdet"), only="fd", refusal=_LOW_PRECISION.format("linalg.slogdet")),
    *(_without_kernel(names, kernel, _CUDA) for names, kernel in _CUDA_FACTORIZATIONS.items()),
    *(_without_kernel(name, kernel, _CPU) for name, kernel in _CPU_KERNELS.items()),
    *(
        _without_kernel(name, name.removeprefix("_"))
        for name in " ".join([*_CUDA_FACTORIZATIONS, "linalg_eig cholesky_inverse"]).split()
    ),
    Family(_ops("_fft_r2c"), only="fhd", refusal=_FFT_DTYPES, devices=_NVIDIA),
    # `is_exempt` for powers of two.
    Family(_ops("_fft_r2c _fft_c2c _fft_c2r"), only="fd", refusal=ONLY_POWERS_OF_TWO, devices=_NVIDIA),
    _without_kernel("_ctc_loss", "ctc_loss_cuda", _CUDA, alike=(0,)),
    _without_kernel("_ctc_loss", "ctc_loss_cpu", _CPU, alike=(0,)),
    replace(_without_kernel("_cdist_forward", "cdist_cuda", _CUDA), message=_SCALAR_TYPE),
    Family(_ops("_cdist_forward"), _SCALAR_TYPE, devices=_CPU),
    _without_kernel("rrelu_with_noise", "rrelu_with_noise_out_cpu", _CPU, only="fdb"),
    # On fake tensors, an LSTM is the CPU's operator: input, four weights and biases, hidden and cell state.
    Family(_ops("mkldnn_rnn_layer"), _LSTM_ON_CPU, devices=_CPU),
    *(
        Family(_ops("mkldnn_rnn_layer"), _RNN.format(name), (0, at), devices=GPUS)
        for at, name in ((5, "hidden"), (6, "hidden"), (1, "parameter"), (2, "parameter"))
    ),
    Family(_ops("_embedding_bag"), _EMBEDDING_BAG),
    *(
        Family(frozenset({f"bitsandbytes.{name}"}), alike=at, only="f", refusal=CORRUPTS, devices=_CUDA)
        for name, at in _CONSTANTS.items()
    ),
    # The kernel takes float16 and no bfloat16: pytorch/pytorch#127176, open in torch 2.13.
    _without_kernel(f"{_UNSCALE}_", f"{_UNSCALE}_cuda", _CUDA, only="fhd", alike=(0,)),
)
"""The rules, in the order in which torch checks them."""


_TARGETS = (torch.int64, torch.uint8)
_BCE = "binary_cross_entropy_with_logits"
_BOOL_MINUS = (
    "Subtraction, the `-` operator, with a bool tensor is not supported. If you are trying to invert a mask, use the `~` "
    "or `logical_not()` operator instead."
)


_CPU_PRODUCTS = {
    "addmm_impl_cpu_": "mm addmm addbmm",
    "addmv_impl_cpu": "mv addmv",
    "bmm": "bmm",
    "baddbmm": "baddbmm",
    "dot": "dot vdot",
}
"""Maps a kernel on a CPU to its operators. These operators accept integers, but not bools."""


def integer_refusal(op: str, dtypes: Sequence[torch.dtype], device: str) -> str:
    """Return torch's error for an integer or bool operand, or "". Tables cannot decide this: they have one letter for both."""
    name = op.partition(".")[2].partition(".")[0]
    if device == "cpu" and {*dtypes} == {torch.bool}:
        kernels = (kernel for kernel, names in _CPU_PRODUCTS.items() if name in names.split())
        if kernel := next(kernels, ""):
            return _NO_KERNEL.format(kernel).format(Spelled(torch.bool))
    if len(dtypes) < 2 and name != "rsub":
        return ""
    if name in ("nll_loss_forward", "nll_loss2d_forward"):
        got = f"expected target dtype to be Long or Byte, but got {Spelled(dtypes[1]):name}"
        return "" if dtypes[1] in _TARGETS else got
    if refused := float_indices(op, dtypes):
        plain, dtype = name.removesuffix("_"), Spelled(dtypes[refused[0]])
        return next((text for text, ops in _NOT_FLOAT.items() if plain in ops.split()), "").format(
            op=plain, got=dtype
        )
    if name in ("sub", "sub_", "rsub") and torch.bool in dtypes:
        return _BOOL_MINUS
    wider = next((dtype for dtype in dtypes if dtype.is_floating_point), None)
    integer = next((dtype for dtype in dtypes if not dtype.is_floating_point), None)
    written = dtypes[0] if name in ("add_", "sub_", "mul_", "div_") else None
    if wider is not None and integer is not None and (written == integer or name.startswith(_BCE)):
        text = "result type {:name} can't be cast to the desired output type {:name}"
        return "" if integer.is_complex else text.format(Spelled(wider), Spelled(integer))
    return ""


def families_of(op: str, device: str, capability: tuple[int, int] | None = None) -> tuple[Family, ...]:
    """Return the families of an overload (`aten.mm.default`) on a device kind, in the order of torch's checks.

    `capability` is the compute capability of an NVIDIA GPU (default: `UNKNOWN_CAPABILITY`).
    """
    named = {op} if op.endswith((".dtype", ".dtype_out")) else {op.rpartition(".")[0]}
    alike = (family for family in FAMILIES if not named.isdisjoint(family.ops))
    return tuple(family for family in alike if family.holds(device, capability))


def by_shapes(op: str, args: Sequence[Any], message: str) -> str:
    """Return torch's error for a call: `message`, or a text that depends on shapes (the error of the SVD names cuSOLVER's routine)."""
    if op == "aten._linalg_svd.default" and max(args[0].shape[-2:]) <= 32:
        return message.replace('"svd_cuda_gesvdj"', '"svd_cuda_gesvdjBatched"')
    return f"{message} of{transformed_sizes(op, args)}" if message == ONLY_POWERS_OF_TWO else message


def transformed_sizes(op: str, args: Sequence[Any]) -> list[int]:
    """Return the sizes of the signal that `_fft_r2c`, `_fft_c2c` or `_fft_c2r` transforms."""
    sizes = [args[0].shape[dim] for dim in args[1]]
    return [*sizes[:-1], args[3]] if "c2r" in op else sizes
