"""Groups the tensors of a checkpoint: each quantized weight together with the constants of its quantization."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.mapping.schemes import (
    ACTIVATIONS,
    CODES,
    EXPECTED,
    FP8,
    Scheme,
    UnreadableError,
    method_of,
    scheme_of,
    written_shape,
)
from isotype.core.errors import Problem
from isotype.core.formats import FOUR_BITS, STORED, is_float
from isotype.core.names import grouped

if TYPE_CHECKING:
    import torch

# Constants that quantizers store beside a weight: (name endings of the constants, name ending of the weight, format or ""
# if several formats have these constants). The first line whose weight the checkpoint has is used.
_CONSTANTS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    *(((f".quant_state.bitsandbytes__{form}",), "", form) for form in FOUR_BITS),
    ((".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"), "", ""),
    # bitsandbytes writes the row scales of an int8 layer beside its weight, not below it.
    ((".SCB", ".weight_format"), ".weight", "int8"),
    ((".SCB",), "", "int8"),  # of stacked experts
    (("_scales",), "_blocks", "mxfp4"),  # gpt-oss
    # compressed-tensors
    (("_scale", "_shape", "_zero_point", "_g_idx", "_global_scale"), "_packed", "packed"),
    ((".scales", ".qzeros", ".g_idx"), ".qweight", "packed"),  # GPTQ and AWQ
    (("_scale_2",), "", "nvfp4"),  # modelopt
    (("_scale", "_scale_inv", "_zero_point", "_g_idx", "_global_scale"), "", ""),  # FP8 and 8-bit integers
    ((".scale", ".qscale_weight"), ".weight", FP8),
    (ACTIVATIONS, ".weight", ""),
    (ACTIVATIONS, ".weight_packed", "packed"),
)
# Tried first: a large checkpoint has 10^5 tensors, and most of them are not constants.
_ENDINGS = tuple(ending for endings, _, _ in _CONSTANTS for ending in endings)
# (regular expression, replacement) that change a weight's name in the file to its name in the model.
_NAMES = {"mxfp4": (r"_blocks$", ""), "packed": (r"_packed$|(?<=\.)q(?=weight$)", "")}
_BITS = {"mxfp4": 4, **dict.fromkeys(FOUR_BITS, 4)}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint with the constants of its quantization.

    Attributes:
        name: name of the dense weight (`experts.gate_up_proj` for `experts.gate_up_proj_blocks`).
        form: name of a dtype or of a quantization format (`nf4`, `mxfp4`, `Q4_K`), or `packed` if only config.json names the
            format.
        constants: headers of the tensors with the weight's scales, code books and shape.
        scheme: how the values are computed; None for plain weights, formats of bitsandbytes and GGUF blocks.
        problem: the reason why the values cannot be computed, or None.
    """

    name: str
    form: str
    weight: TensorHeader
    constants: tuple[TensorHeader, ...] = ()
    scheme: Scheme | None = None
    problem: Problem | None = None

    @property
    def parts(self) -> tuple[TensorHeader, ...]:
        return (self.weight, *self.constants)

    @property
    def plain(self) -> bool:
        """True if the tensor is stored in a float dtype, without constants."""
        return not self.constants and is_float(self.weight.dtype_name)

    @property
    def quantized(self) -> bool:
        """True if the weight's values are computed from codes and constants."""
        return bool(self.constants) or self.weight.dtype_name not in STORED

    @property
    def dense_shape(self) -> tuple[int, ...] | None:
        """The shape after dequantization; None if the headers do not contain it."""
        if self.scheme is not None:
            return self.scheme.shape
        if self.form in FOUR_BITS:
            return None
        return written_shape(self.constants) if self.form == "packed" else self.weight.shape

    @property
    def values(self) -> int:
        """Number of weights. For a packed format, this is the number after unpacking."""
        if self.scheme is not None:
            return math.prod(self.scheme.shape)
        bits = _BITS.get(self.form)
        return self.weight.bytes * 8 // bits if bits else self.weight.elements

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def stored_tensors(
    headers: Iterable[TensorHeader], quantization: Mapping[str, Any] | None = None
) -> tuple[StoredTensor, ...]:
    """Return the weights of a checkpoint with their quantization constants, in the order of the headers."""
    names = {header.name: header for header in headers}
    owners = {name: _weight_of(name, names, quantization) for name in names}
    constants = grouped(names.values(), lambda header: owners[header.name][0])
    forms = {weight: form for weight, form in owners.values() if form}
    tensors = []
    for header in constants.get("", ()):
        form = forms.get(header.name) or STORED.get(header.dtype_name, header.dtype_name)
        name = re.sub(*_NAMES[form], header.name) if form in _NAMES else header.name
        stored = StoredTensor(name, form, header, tuple(constants.get(header.name, ())))
        tensors.append(with_scheme(stored, quantization))
    return tuple(tensors)


def _weight_of(
    name: str, names: Mapping[str, TensorHeader], quantization: Mapping[str, Any] | None
) -> tuple[str, str]:
    """Return (name of the weight with this constant, format that the constant implies); ("", "") if it is not a constant."""
    if not name.endswith(_ENDINGS):
        return "", ""
    for endings, weight_ending, form in _CONSTANTS:
        for ending in endings:
            weight = name.removesuffix(ending) + weight_ending
            if not name.endswith(ending) or weight not in names or weight == name:
                continue
            if form != FP8:
                return weight, form
            # `.scale` is a common name: it belongs to a quantized weight only if config.json names the method fp8.
            if method_of(quantization) == FP8 and names[weight].dtype_name in CODES:
                return weight, ""
    return "", ""


def with_scheme(
    tensor: StoredTensor,
    quantization: Mapping[str, Any] | None,
    target: str = "",
    classes: Sequence[str] = ("Linear",),
) -> StoredTensor:
    """Return a copy of the tensor with `scheme` or `problem` set. `target` is the name of the tensor in the model, or ""."""
    if tensor.plain and tensor.weight.dtype_name not in CODES:
        return tensor
    modules = [name.rpartition(".")[0] for name in (tensor.name, target) if name]
    try:
        scheme = scheme_of(tensor.weight, tensor.constants, tensor.form, quantization or {}, modules, classes)
    except UnreadableError as error:
        return replace(tensor, scheme=None, problem=Problem(f"{tensor.weight.name}: {error}", *EXPECTED))
    return replace(tensor, scheme=scheme, problem=None)


def main_form(tensors: Iterable[StoredTensor]) -> str | None:
    """Return the dtype or format in which most values are stored; None if there are no tensors."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.form] += tensor.values
    return counts.most_common(1)[0][0] if counts else None


def blank_tensors(tensors: Iterable[StoredTensor]) -> dict[str, torch.Tensor]:
    """Return meta tensors by name, in their dense shapes. Quantized tensors get bfloat16, and other tensors keep their dtype."""
    import torch

    blank = {}
    for tensor in tensors:
        dtype = (None if tensor.quantized else tensor.weight.dtype) or torch.bfloat16
        blank[tensor.name] = torch.empty(tensor.dense_shape or (), dtype=dtype, device="meta")
    return blank
