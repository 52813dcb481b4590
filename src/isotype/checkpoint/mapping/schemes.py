"""Decides from headers and config.json how a weight is dequantized, or why its values cannot be computed.

isotype reads a weight only if each of its constants (scales, zero points) is known to dequantize it or to scale inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from isotype.checkpoint.formats.gguf import unpackable
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.core.formats import FOUR_BITS, METHODS, STORED

FP8 = "fp8"
AWQ = "awq"
CAST = "cast"
"""Method of weights that were cast to float8 without scales: the config has a float8 dtype but no quantization."""
READABLE = frozenset({*METHODS, CAST, ""})
"""Methods whose weights can be read; "" for a model that is not quantized."""

ACTIVATIONS = (
    *(".input_scale", ".input_global_scale", ".input_zero_point", ".activation_scale", ".qscale_act"),
    *(".input_scale_ub", ".output_scale", ".output_zero_point"),
)
"""Name endings of constants for quantized activations. Weights are dequantized without these constants."""

CODES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "I32"})
"""Stored dtypes of quantized weights."""

EXPECTED = (
    "a weight whose scales and config.json define how its values are computed",
    "dequantize and save it with the library that quantized it, or take the checkpoint before it was quantized",
)

_FLOATS = frozenset({"F32", "F16", "BF16"})
_EXPONENTS = frozenset({"U8", "F8_E8M0"})


class UnreadableError(Exception):
    """The reason why the values of a weight cannot be computed."""


def _require(condition: object, otherwise: str) -> None:
    if not condition:
        raise UnreadableError(otherwise)


Kind = Literal["floats", "words", "E2M1", "blocks"]


@dataclass(frozen=True)
class Scheme:
    """The dequantization of one weight: (code - zero point) x scale.

    Attributes:
        kind: how codes are stored: float8, AWQ's int32 words, two E2M1 codes per byte, or gpt-oss's blocks.
        shape: shape of the dense weight. AWQ stores it as [columns, rows]; a word contains codes of eight rows.
        block: numbers of rows and columns that share a scale.
        zero: AWQ's zero points; None for other kinds.
    """

    kind: Kind
    shape: tuple[int, ...]
    scale: TensorHeader
    block: tuple[int, int] = (1, 1)
    zero: TensorHeader | None = None


def method_of(quantization: Mapping[str, Any] | None) -> str:
    """Return the name of a config's quantization method; "" if the config has no quantization."""
    name = (quantization or {}).get("quant_method")
    return str(getattr(name, "value", name or "bitsandbytes")) if quantization else ""


def config_problem(quantization: Mapping[str, Any]) -> str:
    """Return the reason in config.json why isotype cannot read the quantized weights; "" if it can read them.

    Methods that are not in `core/formats.py:METHODS` are not checked here.
    """
    method = method_of(quantization)
    try:
        if method == AWQ:
            _check_awq(quantization)
        elif method == FP8:
            _layouts(quantization)
    except UnreadableError as error:
        return str(error)
    return ""


def _check_awq(quantization: Mapping[str, Any]) -> None:
    legacy = quantization.get("backend") == "llm-awq"  # transformers reads llm-awq from `backend`
    version = "llm-awq" if legacy else quantization.get("version") or quantization.get("format") or "gemm"
    version = _word(version)
    bits = quantization.get("bits", quantization.get("w_bit", 4))
    problem = f"quantized by awq of {bits!r} bits in version {version}: isotype reads 4 bits in version gemm"
    _require(bits == 4 and version == "gemm", problem)


def scheme_of(
    weight: TensorHeader,
    constants: Sequence[TensorHeader],
    form: str,
    quantization: Mapping[str, Any],
) -> Scheme | None:
    """Return how a stored weight is dequantized, or None for plain weights, bitsandbytes' formats and GGUF blocks.

    `constants` are the headers of the weight's constants.
    """
    method = method_of(quantization)
    if not constants:
        _require_plain(weight, method)
        return None
    _require(method in READABLE, f"quantized by {method}, with {_names(constants)}")
    if form in FOUR_BITS or any(part.name.endswith((".SCB", ".weight_format")) for part in constants):
        _require_complete(weight, constants, form, quantization)
        return None
    if form == "mxfp4":
        return _blocks(weight, constants)
    if method == AWQ:
        return _awq_scheme(weight, constants, quantization)
    return _float8_scheme(weight, constants, quantization)


def _require_plain(weight: TensorHeader, method: str) -> None:
    if weight.dtype_name in STORED:
        plain = not weight.dtype_name.startswith("F8_") or method == CAST
        _require(plain, f"{STORED[weight.dtype_name]} codes without a scale")
    else:
        gguf = weight.file.suffix == ".gguf"
        _require(gguf, f"stored as {weight.dtype_name}, which is not a dtype of weights")
        blocks = f"{weight.dtype_name} blocks, which the library gguf does not dequantize"
        _require(unpackable(weight.dtype_name), blocks)


def _require_complete(
    weight: TensorHeader, constants: Sequence[TensorHeader], form: str, quantization: Mapping[str, Any]
) -> None:
    """Raise UnreadableError if config.json does not name this bitsandbytes format, or a constant is missing."""
    bare = f"{form} with {_names(constants)}, while config.json does not name bitsandbytes"
    _require(method_of(quantization) == "bitsandbytes", bare)
    configured = (
        "int8" if quantization.get("load_in_8bit") else quantization.get("bnb_4bit_quant_type", "fp4")
    )
    _require(form == configured, f"{form} with {_names(constants)}, where config.json has {configured}")
    names = (part.name.removeprefix(f"{weight.name}.").partition("__")[0] for part in constants)
    ends = {name.rpartition("weight.")[2] for name in names}
    ends = {end.rpartition(".")[2] if end.endswith(("SCB", "weight_format")) else end for end in ends}
    nested = {"nested_absmax", "nested_quant_map"}
    needed = {"SCB"} if form == "int8" else {"absmax", "quant_map", "quant_state.bitsandbytes"}
    needed |= nested if ends & nested else set()
    _require(needed <= ends, f"{form} without {', '.join(sorted(needed - ends))}")
    unused = ends - needed - {"weight_format"}
    _require(not unused, f"{', '.join(sorted(unused))}, which is not used to read {form}")


def _blocks(weight: TensorHeader, constants: Sequence[TensorHeader]) -> Scheme:
    """Return the scheme of mxfp4 blocks: from uint8 [..., rows, groups, 16] to dense [..., groups * 32, rows]."""
    scale, shape = constants[0], weight.shape
    fits = len(shape) > 2 and shape[-1] == 16 and scale.shape == shape[:-1] and len(constants) == 1
    what = f"{list(shape)} {weight.dtype_name} with scales {list(scale.shape)} {scale.dtype_name}"
    _require(fits and weight.dtype_name == scale.dtype_name == "U8", f"{what}: mxfp4 has 16 bytes per scale")
    return Scheme("blocks", (*shape[:-3], shape[-2] * 32, shape[-3]), scale)


def _awq_scheme(
    weight: TensorHeader, constants: Sequence[TensorHeader], quantization: Mapping[str, Any]
) -> Scheme:
    """Return the scheme of AutoAWQ's weights, int32 [inputs, outputs / 8], with constants for each group of inputs."""
    _check_awq(quantization)
    size = _size(quantization.get("group_size", quantization.get("q_group_size", 128)), "group_size")
    parts = {part.name.rpartition(".")[2]: part for part in constants}
    words = weight.dtype_name == "I32" and len(weight.shape) == 2 and parts.keys() == {"scales", "qzeros"}
    what = f"{list(weight.shape)} {weight.dtype_name} with {_names(constants)}"
    _require(words, f"{what}: a matrix of I32 with scales and qzeros is expected")
    (inputs, columns), scale, zero = weight.shape, parts["scales"], parts["qzeros"]
    size = size or inputs or 1
    groups, outputs = -(-inputs // size), columns * 8
    for part, shape, dtypes in (
        (scale, (groups, outputs), _FLOATS),
        (zero, (groups, columns), frozenset({"I32"})),
    ):
        what = f"{part.name} of shape {list(part.shape)} {part.dtype_name} for int32 words of shape {list(weight.shape)}"
        fits = part.shape == shape and part.dtype_name in dtypes
        _require(fits, f"{what}; {list(shape)} {_either(dtypes)} is expected for groups of {size} inputs")
    return Scheme("words", (outputs, inputs), scale, (1, size), zero)


def _float8_scheme(
    weight: TensorHeader, constants: Sequence[TensorHeader], quantization: Mapping[str, Any]
) -> Scheme:
    """Return the scheme of float8 codes with one scale per tensor, row or block; in DeepSeek's experts also of E2M1 codes."""
    method, experts = method_of(quantization), quantization.get("expert_dtype")
    _require(method in (FP8, ""), f"constants that {method} does not store")
    pairs = method == FP8 and experts == "fp4" and weight.dtype_name in ("I8", "U8")
    fits = weight.shape and (pairs or weight.dtype_name in ("F8_E4M3", "F8_E5M2"))
    _require(fits, f"stored in {weight.dtype_name}, where float8 codes are expected")
    roles = {}
    for part in constants:
        if not part.name.endswith(ACTIVATIONS):
            stem = (
                f"{weight.name}_"
                if part.name.startswith(f"{weight.name}_")
                else part.name.rpartition(".")[0] + "."
            )
            roles[part.name.removeprefix(stem)] = part
    scales = [roles.pop(name) for name in ("scale", "scale_inv", "qscale_weight") if name in roles]
    _require(len(scales) == 1, f"{weight.dtype_name} with {_names(constants)}: one scale is expected")
    unused = _names(list(roles.values()))
    _require(not roles, f"{unused}, which is not used to read {weight.dtype_name} codes")
    (scale,) = scales
    allowed = _EXPONENTS if pairs else _FLOATS | _EXPONENTS if method == FP8 else _FLOATS
    what = f"{scale.name} of {scale.dtype_name}, which is not a dtype of scales for {weight.dtype_name} codes"
    _require(scale.dtype_name in allowed, what)
    shape = (*weight.shape[:-1], weight.shape[-1] * 2) if pairs else weight.shape
    return Scheme("E2M1" if pairs else "floats", shape, scale, _block(scale, shape, _layouts(quantization)))


Layouts = Sequence[tuple[str, tuple[int, int]]]
"""(name, (rows, columns that share a scale)) of each arrangement of scales; 0: all rows or columns."""


def _layouts(quantization: Mapping[str, Any]) -> Layouts:
    """Return the layouts of scales that config.json allows for float8 codes."""
    whole = (
        ("tensor", (0, 0)),
        ("row", (1, 0)),
    )  # without a method, too: `weight_scale` is a factor in every library
    if method_of(quantization) != FP8:
        return whole
    size = quantization.get("weight_block_size", (128, 128))  # the default of transformers
    blocks = () if size is None else (("block", _pair(size)),)
    experts = (("group", (1, 32)),) if quantization.get("expert_dtype") == "fp4" else ()
    return (*blocks, *experts, *whole)


def _block(scale: TensorHeader, shape: tuple[int, ...], layouts: Layouts) -> tuple[int, int]:
    """Return (rows, columns) that share a scale, from the first layout that fits the shape of the scales."""
    *lead, rows, columns = shape if len(shape) > 1 else (1, *shape)
    for layout, size in layouts:
        height, width = size[0] or rows or 1, size[1] or columns or 1
        fits = scale.shape == (*lead, -(-rows // height), -(-columns // width))
        if layout == "tensor":
            fits |= scale.elements == 1 or (bool(lead) and scale.shape in ((*lead,), (*lead, 1)))
        if fits and (len(shape) > 1 or layout == "tensor"):
            return height, width
    names = {name + (f" {size[0]}x{size[1]}" if all(size) else "") for name, size in layouts}
    what = f"{scale.name} of shape {list(scale.shape)} for a weight of shape {list(shape)}"
    raise UnreadableError(f"{what}; by config.json, the weight has one scale per {_either(names)}")


def _size(value: Any, name: str) -> int:
    _require(isinstance(value, int) and not isinstance(value, bool), f"{name} {value!r} in config.json")
    return max(int(value), 0)


def _word(value: Any) -> str:
    """Return a word of config.json (or an enum of a config object) in lower case."""
    return str(getattr(value, "value", value)).lower()


def _pair(value: Any) -> tuple[int, int]:
    pair = value.split("x") if isinstance(value, str) else value
    fits = isinstance(pair, (list, tuple)) and len(pair) == 2 and all(str(size).isdecimal() for size in pair)
    _require(fits, f"blocks of {value!r} in config.json")
    return int(pair[0]), int(pair[1])


def _names(headers: Sequence[TensorHeader]) -> str:
    return ", ".join(part.name.rpartition(".")[2] for part in headers)


def _either(words: Iterable[str]) -> str:
    return " or ".join(sorted(words)) or "nothing"
