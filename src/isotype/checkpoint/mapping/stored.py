"""Weights as files hold them: a quantized weight together with the constants that its quantizer stores beside it."""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.core.formats import FOUR_BITS
from isotype.core.stored_dtypes import STORED, is_float

# What quantizers store beside a weight: how it is called (`w`, `form`: parts of the name), the weight that it belongs
# to, and the format that it shows. The first line whose weight is in the checkpoint holds.
_CONSTANTS: tuple[tuple[re.Pattern[str], str, str], ...] = tuple(
    (re.compile(constant), weight, form)
    for constant, weight, form in (
        (r"(?P<w>.+)\.quant_state\.bitsandbytes__(?P<form>\w+)", "{w}", "{form}"),
        (r"(?P<w>.+)\.(absmax|quant_map|nested_absmax|nested_quant_map)", "{w}", ""),
        # bitsandbytes writes the row scales of an int8 layer beside its weight, not below it.
        (r"(?P<w>.+)\.(SCB|weight_format)", "{w}.weight", "int8"),
        (r"(?P<w>.+)_scales", "{w}_blocks", "mxfp4"),  # gpt-oss
        (
            r"(?P<w>.+)_(scale|shape|zero_point|g_idx|global_scale)",
            "{w}_packed",
            "packed",
        ),  # compressed-tensors
        (r"(?P<w>.+)\.(scales|qzeros|g_idx)", "{w}.qweight", "packed"),  # GPTQ and AWQ
        (r"(?P<w>.+)_(scale|scale_inv|zero_point|g_idx|global_scale)", "{w}", ""),  # FP8 and 8-bit integers
        (
            r"(?P<w>.+)\.input_(scale|global_scale|zero_point)",
            "{w}.weight",
            "",
        ),  # static scales of activations
        (r"(?P<w>.+)\.input_(scale|global_scale|zero_point)", "{w}.weight_packed", "packed"),
    )
)
# How their names end: most tensors are none of them, and a large checkpoint has 10^5.
_ENDINGS = (
    *("absmax", "quant_map", "SCB", "weight_format", "scales", "scale", "scale_inv", "shape", "zero_point"),
    *("zeros", "g_idx"),
    *FOUR_BITS,
)
# How the file calls a weight of these formats, and how its model does.
_NAMES = {"mxfp4": (r"_blocks$", ""), "packed": (r"_packed$|(?<=\.)q(?=weight$)", "")}
_BITS = {"mxfp4": 4, **dict.fromkeys(FOUR_BITS, 4)}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint with the constants of its quantization.

    Attributes:
        name: what it would be called if it were dense (`experts.gate_up_proj` of `experts.gate_up_proj_blocks`).
        form: how its values are stored: a dtype's name, or a quantization format (`nf4`, `mxfp4`, `Q4_K`; `packed`
            where only config.json says which).
        weight: its header in the file.
        constants: the headers of its scales, code books and shapes.
    """

    name: str
    form: str
    weight: TensorHeader
    constants: tuple[TensorHeader, ...] = ()

    @property
    def parts(self) -> tuple[TensorHeader, ...]:
        """Every tensor of the file that it is made of."""
        return (self.weight, *self.constants)

    @property
    def plain(self) -> bool:
        """Whether it is stored in a float dtype, without constants."""
        return not self.constants and is_float(self.weight.dtype_name)

    @property
    def quantized(self) -> bool:
        """Whether its values have to be computed from what is stored."""
        return bool(self.constants) or self.weight.dtype_name not in STORED

    @property
    def values(self) -> int:
        """Number of weights in it; of formats that pack several into a byte the numbers packed."""
        bits = _BITS.get(self.form)
        return self.weight.bytes * 8 // bits if bits else self.weight.elements

    @property
    def bytes(self) -> int:
        """In the file, constants included."""
        return sum(part.bytes for part in self.parts)


def stored_tensors(headers: Iterable[TensorHeader]) -> tuple[StoredTensor, ...]:
    """The weights of a checkpoint, each with its quantization constants, in the order of the headers."""
    names = {header.name: header for header in headers}
    constants: dict[str, list[TensorHeader]] = defaultdict(list)
    forms: dict[str, str] = {}
    for name, header in names.items():
        weight, form = _weight_of(name, names)
        if weight:
            constants[weight].append(header)
            if form:
                forms[weight] = form
    owned = {header.name for some in constants.values() for header in some}
    return tuple(
        _stored(header, forms.get(name), tuple(constants.get(name, ())))
        for name, header in names.items()
        if name not in owned
    )


def _weight_of(name: str, names: Mapping[str, TensorHeader]) -> tuple[str, str]:
    """(the weight that the tensor is a constant of, the format it shows); ("", "") for a weight."""
    if not name.endswith(_ENDINGS):
        return "", ""
    for pattern, weight, form in _CONSTANTS:
        match = pattern.fullmatch(name)
        if match and weight.format(**match.groupdict()) in names:
            return weight.format(**match.groupdict()), form.format(**match.groupdict())
    return "", ""


def _stored(header: TensorHeader, form: str | None, constants: tuple[TensorHeader, ...]) -> StoredTensor:
    plain = STORED.get(header.dtype_name, header.dtype_name)
    name = re.sub(*_NAMES[form], header.name) if form in _NAMES else header.name
    return StoredTensor(name, form or plain, header, constants)


def dense_shape(tensor: StoredTensor) -> tuple[int, ...] | None:
    """The shape that a stored tensor has once it is dense; None where no header says it.

    compressed-tensors writes the shape into a tensor of its own; these few bytes are read, where the file is at hand.
    """
    shape = tensor.weight.shape
    if (
        tensor.form == "mxfp4" and len(shape) > 2
    ):  # [..., rows, groups, bytes of two values]; its model multiplies from the left
        *outer, rows, groups, pairs = shape
        return (*outer, groups * pairs * 2, rows)
    if tensor.form in FOUR_BITS:
        return None
    if tensor.form == "packed":
        written = next((part for part in tensor.constants if part.name.endswith("_shape")), None)
        return _integers(written) if written is not None and written.dtype_name == "I64" else None
    return shape


def _integers(header: TensorHeader) -> tuple[int, ...] | None:
    if not header.begin:
        return None  # on the hub: only its header is here
    with header.file.open("rb") as file:
        file.seek(header.begin)
        return struct.unpack(f"<{header.elements}q", file.read(header.bytes))
