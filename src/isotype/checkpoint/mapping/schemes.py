"""Decides from headers and config.json how a weight is dequantized, or why its values cannot be computed.

isotype reads a weight only if it knows how to use each of its constants (scales, zero points).
"""

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from isotype.checkpoint.formats.gguf import unpackable
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.core.formats import FOUR_BITS, METHODS, STORED

FP8 = "fp8"
AWQ = "awq"
MODELOPT = "modelopt"
COMPRESSED = "compressed-tensors"
CAST = "cast"
"""Method of weights that were cast to float8 without scales. Their config has a float8 dtype, but no quantization."""
READABLE = frozenset({*METHODS, CAST, ""})
"""Methods whose weights can be read; "" is for a model that is not quantized."""

ACTIVATIONS = (
    *(".input_scale", ".input_global_scale", ".input_zero_point", ".activation_scale", ".qscale_act"),
    *(".input_scale_ub", ".output_scale", ".output_zero_point"),
)
"""Name endings of constants for quantized activations. These constants are not used to dequantize weights."""

CODES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "I32"})
"""Stored dtypes of quantized weights."""

EXPECTED = (
    "a weight whose scales and config.json define how its values are computed",
    "dequantize and save it with the library that quantized it, or use the checkpoint before it was quantized",
)

_FLOATS = frozenset({"F32", "F16", "BF16"})
_EXPONENTS = frozenset({"U8", "F8_E8M0"})
_STORED = {"words": ("I32",), "E2M1": ("U8", "I8"), "floats": ("F8_E4M3", "F8_E5M2"), "integers": ("I8",)}
_PLAIN_CODES = frozenset({"floats", "integers"})
# The kinds of codes that each format of compressed-tensors stores.
_FORMATS = {
    "pack-quantized": frozenset({"words"}),
    **dict.fromkeys(("int-quantized", "float-quantized", "naive-quantized"), _PLAIN_CODES),
    "mxfp8-quantized": frozenset({"floats"}),
    **dict.fromkeys(("nvfp4-pack-quantized", "mxfp4-pack-quantized"), frozenset({"E2M1"})),
    "mixed-precision": _PLAIN_CODES | {"words", "E2M1"},
}
_MODELOPT = frozenset(
    {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"}
)


class UnreadableError(Exception):
    """The reason why the values of a weight cannot be computed."""


def _require(condition: object, otherwise: str) -> None:
    if not condition:
        raise UnreadableError(otherwise)


Kind = Literal["floats", "integers", "words", "E2M1", "blocks"]


@dataclass(frozen=True)
class Scheme:
    """The dequantization of one weight: (code - zero point) x scale.

    Attributes:
        kind: how codes are stored: float8, int8, integers in int32 words, two E2M1 codes per byte, or the blocks of gpt-oss.
        shape: shape of the dense weight; empty if the file that contains the shape is not downloaded.
        block: numbers of rows and columns that share a scale.
        second: a number that applies to all scales, or None.
        divides: True if the scales are divided by `second`, False if the scales are multiplied by `second`.
        transposed: True if the file stores the weight as [columns, rows] (AWQ). An int32 word then contains codes of several
            rows.
    """

    kind: Kind
    shape: tuple[int, ...]
    scale: TensorHeader
    block: tuple[int, int] = (1, 1)
    bits: int = 8
    zero: TensorHeader | None = None
    second: TensorHeader | None = None
    divides: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class _Options:
    """The formats of codes (`kinds`) and shapes of scales (`layouts`) that config.json allows for a quantized weight.

    A layout is (name, (rows, columns that share a scale)). Here, 0 means all rows or columns. `exponents` allows E8M0
    scales.
    """

    layouts: tuple[tuple[str, tuple[int, int]], ...]
    kinds: frozenset[str]
    bits: int = 8
    symmetric: bool = True
    exponents: bool = False


_WHOLE = (("tensor", (0, 0)), ("row", (1, 0)))


def method_of(quantization: Mapping[str, Any] | None) -> str:
    """Return the name of a config's quantization method; "" if the config has no quantization."""
    name = (quantization or {}).get("quant_method")
    return str(getattr(name, "value", name or "bitsandbytes")) if quantization else ""


def config_problem(quantization: Mapping[str, Any]) -> str:
    """Return the reason in config.json why isotype cannot read the quantized weights; "" if isotype can read them.

    Methods that are not in `core/formats.py:METHODS` are not checked here.
    """
    method = method_of(quantization)
    try:
        if method == AWQ:
            _check_awq(quantization)
        elif method == FP8 or (method == MODELOPT and quantization.get("quant_algo")):
            _options(quantization, method, (), ())
        elif method == COMPRESSED:
            _check_groups(quantization)
    except UnreadableError as error:
        return str(error)
    return ""


def _check_groups(quantization: Mapping[str, Any]) -> None:
    """If no group is readable, raise the error of the first. One readable group is enough: the others may apply to no layer."""
    errors = []
    for name, group in _object(quantization.get("config_groups") or {}, "config_groups").items():
        try:
            _options_of_group(quantization, _object(group, f"config_groups.{name}"))
        except UnreadableError as error:
            errors.append(error)
        else:
            return
    if errors:
        raise errors[0]


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
    modules: Sequence[str],
    classes: Sequence[str],
) -> Scheme | None:
    """Return how a stored weight is dequantized; None for plain weights, formats of bitsandbytes and GGUF blocks.

    Args:
        constants: headers of the weight's constants.
        modules: names of the weight's module in the file and in the model.
        classes: names of the module's class and of its base classes.
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
    stem = weight.name.removesuffix("_packed")
    roles = {}
    for part in constants:
        if not part.name.endswith(ACTIVATIONS):
            of_weight = part.name.startswith(f"{stem}_")
            roles[part.name.removeprefix(f"{stem}_") if of_weight else part.name.rpartition(".")[2]] = part
    options = _options(quantization, method, modules, classes)
    kind = _kind(weight, form, options, quantization.get("expert_dtype") if method == FP8 else None)
    shape = _shape(weight, kind, options, roles.pop("shape", None))
    scales = [roles.pop(name) for name in ("scale", "scale_inv", "qscale_weight") if name in roles]
    _require(len(scales) == 1, f"{weight.dtype_name} with {_names(constants)}: one scale is expected")
    zero = roles.pop("zero_point", None)
    seconds = [roles.pop(name) for name in ("global_scale", "scale_2") if name in roles]
    roles |= {str(at): part for at, part in enumerate(seconds[1:] if kind == "E2M1" else seconds)}
    _require(not roles, f"{_names(list(roles.values()))}, which is not used to read {kind}")
    second = seconds[0] if seconds else None
    if not shape:
        return Scheme(kind, (), scales[0])
    _check_dtypes(scales[0], second, kind, options)
    _check_zero(zero, scales[0], shape, kind, options)
    block = _block(scales[0], shape, options)
    divides = second is not None and second.name.endswith("_global_scale")
    return Scheme(kind, shape, scales[0], block, options.bits, zero, second, divides)


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
    """Raise UnreadableError if config.json does not name this bitsandbytes format, or if a constant is missing."""
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
    """Return the scheme that dequantizes mxfp4 blocks. Blocks: uint8 [..., rows, groups, 16]; result: [..., groups * 32, rows]."""
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
    return Scheme("words", (outputs, inputs), scale, (1, size), 4, zero, transposed=True)


def _kind(weight: TensorHeader, form: str, options: _Options, experts: object) -> Kind:
    if weight.name.endswith("_packed") or form == "nvfp4":
        kind: Kind = "words" if weight.dtype_name == "I32" else "E2M1"
    elif weight.dtype_name in ("I8", "U8") and experts == "fp4":
        kind = "E2M1"
    else:
        kind = "floats" if weight.dtype_name.startswith("F8_E") else "integers"
    fits = weight.dtype_name in _STORED[kind] and kind in options.kinds and weight.shape
    kinds = f"{_either(options.kinds)} of {options.bits} bits"
    _require(fits, f"stored in {weight.dtype_name}, where config.json has {kinds}")
    return kind


def _shape(
    weight: TensorHeader, kind: Kind, options: _Options, written: TensorHeader | None
) -> tuple[int, ...]:
    shape = weight.shape
    _require(kind == "words" or written is None, f"a weight_shape, which is not used to read {kind}")
    if kind != "words":
        return (*shape[:-1], shape[-1] * 2) if kind == "E2M1" else shape
    fits = written is not None and written.dtype_name == "I64" and written.elements > 1
    _require(fits, "packed without a weight_shape of int64")
    dense = written_shape([written] if written else [])
    if dense is not None:
        fits = dense[:-1] == shape[:-1] and -(-dense[-1] * options.bits // 32) == shape[-1]
        what = f"{list(shape)} int32 words, but weight_shape declares {list(dense)} integers of {options.bits} bits"
        _require(fits, what)
    return dense or ()


def written_shape(constants: Sequence[TensorHeader]) -> tuple[int, ...] | None:
    """Return the shape in the `weight_shape` tensor of the constants; None if that tensor is missing or only on the hub."""
    header = next((part for part in constants if part.name.endswith("_shape")), None)
    if header is None or header.dtype_name != "I64" or not header.begin:
        return None
    with header.file.open("rb") as file:
        file.seek(header.begin)
        return struct.unpack(f"<{header.elements}q", file.read(header.bytes))


def _check_dtypes(scale: TensorHeader, second: TensorHeader | None, kind: Kind, options: _Options) -> None:
    allowed = _FLOATS | (_EXPONENTS if options.exponents else frozenset())
    if kind == "E2M1":
        allowed = frozenset({"F8_E4M3"}) if second is not None else _EXPONENTS
    what = f"{scale.name} of {scale.dtype_name}, which is not a dtype of scales for {kind}"
    _require(scale.dtype_name in allowed, what)
    if second is not None:
        what = f"{second.name} of shape {list(second.shape)} {second.dtype_name}: one number is expected"
        _require(second.elements == 1 and second.dtype_name in _FLOATS, what)


def _block(scale: TensorHeader, shape: tuple[int, ...], options: _Options) -> tuple[int, int]:
    """Return (rows, columns) that share a scale, from the first layout that matches the shape of the scales."""
    *lead, rows, columns = shape if len(shape) > 1 else (1, *shape)
    for layout, size in options.layouts:
        height, width = size[0] or rows or 1, size[1] or columns or 1
        grid = (*lead, -(-rows // height), -(-columns // width))
        fits = scale.shape == (grid[:-1] if layout == "vector" else grid)
        if layout == "tensor":
            fits |= scale.elements == 1 or (bool(lead) and scale.shape in ((*lead,), (*lead, 1)))
        if fits and (len(shape) > 1 or layout == "tensor"):
            return height, width
    layouts = {name + (f" {size[0]}x{size[1]}" if all(size) else "") for name, size in options.layouts}
    what = f"{scale.name} of shape {list(scale.shape)} for a weight of shape {list(shape)}"
    raise UnreadableError(f"{what}; by config.json, the weight has one scale per {_either(layouts)}")


def _check_zero(
    zero: TensorHeader | None, scale: TensorHeader, shape: tuple[int, ...], kind: Kind, options: _Options
) -> None:
    _require(zero is not None or options.symmetric, "no zero points, although config.json declares them")
    if zero is not None:
        packed = len(scale.shape) > 1 and zero.dtype_name == "I32" and kind == "words"
        rows = -(-shape[-2] * options.bits // 32) if packed else 0
        expected = (*scale.shape[:-2], rows, scale.shape[-1]) if packed else scale.shape
        fits = kind in ("words", "integers") and zero.dtype_name in ("I32", "I8") and zero.shape == expected
        what = f"{zero.name} of shape {list(zero.shape)} {zero.dtype_name} for scales {list(scale.shape)}"
        _require(fits, what)


def _options(
    quantization: Mapping[str, Any], method: str, modules: Sequence[str], classes: Sequence[str]
) -> _Options:
    floats = frozenset({"floats"})
    if method == COMPRESSED:
        return _options_of_group(quantization, group_of(quantization, modules, classes))
    if method == FP8:
        size, experts = quantization.get("weight_block_size", (128, 128)), quantization.get("expert_dtype")
        blocks = () if size is None else (("block", _pair(size)),)  # the default of transformers
        four_bits = (("group", (1, 32)),) if experts == "fp4" else ()
        kinds = floats | {"E2M1"} if experts == "fp4" else floats
        return _Options((*blocks, *four_bits, *_WHOLE), kinds, exponents=True)
    if method == MODELOPT:
        algorithm = str(quantization.get("quant_algo"))
        _require(algorithm in _MODELOPT, f"quantized by modelopt as {algorithm}")
        size = _size(quantization.get("group_size") or (32 if algorithm == "MXFP8" else 16), "group_size")
        layouts = (*_WHOLE, ("vector", (1, 0)), ("group", (1, size)))
        return _Options(layouts, floats | {"E2M1"}, exponents=algorithm == "MXFP8")
    _require(not method, f"constants that {method} does not store")
    return _Options(_WHOLE, floats)  # `weight_scale` is a factor in every library


def _options_of_group(quantization: Mapping[str, Any], group: Mapping[str, Any]) -> _Options:
    for name, key in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        value = _object(quantization.get(name) or {}, name).get(key)
        _require(not value or value == "dense", f"{name} with {key} {value}")
    form = str(group.get("format") or quantization.get("format") or "mixed-precision")
    _require(form in _FORMATS, f"stored in compressed-tensors' format {form}")
    weights = _object(group.get("weights"), "weights")
    bits, numeric = _size(weights.get("num_bits", 8), "num_bits"), _word(weights.get("type", "int"))
    ordered = str(weights.get("actorder")).lower() in ("group", "dynamic", "true")
    _require(not ordered, "columns in the order of activations (actorder: group)")
    size = 0 if weights.get("group_size") is None else _size(weights["group_size"], "group_size")
    usual = "tensor" if weights.get("group_size") is None else "group" if size else "channel"
    strategy = _word(weights.get("strategy") or usual)
    layouts = {
        "tensor": _WHOLE,  # the library accepts scales of any of these layouts
        "channel": _WHOLE[1:],
        "group": (("group", (1, size)),),
        "tensor_group": (("group", (1, size)),),
        "block": (("block", _pair(weights.get("block_structure") or (0, 0))),),
    }
    sized = strategy in ("tensor", "channel") or all(layouts.get(strategy, _WHOLE)[0][1])
    _require(strategy in layouts and 1 <= bits <= 8 and sized, f"{bits} bits by {strategy} of size {size}")
    kinds = {"words", "integers"} if numeric == "int" else {8: {"floats"}, 4: {"E2M1"}}.get(bits, set())
    symmetric, exponents = weights.get("symmetric", True) is True, numeric == "float" and strategy == "group"
    return _Options(layouts[strategy], _FORMATS[form] & kinds, bits, symmetric, exponents)


def group_of(
    quantization: Mapping[str, Any], modules: Sequence[str], classes: Sequence[str]
) -> Mapping[str, Any]:
    """Return a module's entry in `config_groups`. As in compressed-tensors, names precede patterns, and patterns precede classes."""
    groups: dict[str, Mapping[str, Any]] = {}
    for name, group in _object(quantization.get("config_groups"), "config_groups").items():
        targets = group.get("targets") if isinstance(group, Mapping) else None
        _require(isinstance(targets, list), f"config_groups.{name} without targets")
        groups |= {str(target): group for target in targets or ()}
    order = sorted(groups, key=lambda target: ("re:" in target, target))
    ignored = quantization.get("ignore") or []
    _require(isinstance(ignored, list), f"ignore {ignored!r} in config.json")
    covering = []
    for module in modules:
        if not any(_matches(str(target), module) or target in classes for target in ignored):
            named = [target for target in order if _matches(target, module)]
            matching = [*named, *(target for target in order if target in classes)]
            covering += [groups[target] for target in matching[:1]]
    what = "several groups cover" if covering else "no group covers"
    same = covering and all(group == covering[0] for group in covering)
    _require(same, f"{what} this weight in the config_groups {', '.join(order)}")
    return covering[0]


def _matches(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return target == module
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error as error:
        raise UnreadableError(f"target {target} is not a regular expression ({error})") from error


def _object(value: Any, name: str) -> Mapping[str, Any]:
    _require(isinstance(value, Mapping), f"{name} {value!r} in config.json")
    return value  # type: ignore[no-any-return]


def _size(value: Any, name: str) -> int:
    _require(isinstance(value, int) and not isinstance(value, bool), f"{name} {value!r} in config.json")
    return max(int(value), 0)


def _word(value: Any) -> str:
    """Return a word in config.json (or an enum of a config object) in lower case."""
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
