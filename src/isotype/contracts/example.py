"""Examples of operator calls as JSON. They were recorded in real steps. A replay calls the operator again with
operands of any dtype.

An example is `[arguments, keyword arguments]`. A tensor is `{"t": dtype, "s": shape}`. If the tensor is not contiguous,
`"p"` is the order of its dimensions in memory. For integer and bool tensors, `"v"` contains the values. In a replay,
float tensors get random values between 0.1 and 0.9, which every operator accepts (as probabilities, variances or
scales). Other torch objects are `{"dtype": …}`, `{"device": …}`, `{"layout": …}` or `{"memory_format": …}`. Non-finite
floats are `{"float": "inf"}`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from isotype.compat.torch import operator_schema, tree_map
from isotype.contracts.pattern import FLOAT_DTYPES, LETTERS
from isotype.core.dtypes import dtype_name

Json = Any
"""A value for `json.dumps`."""

LARGEST = 4096
"""Maximum number of elements of an integer tensor in an example."""


class NotAnExampleError(Exception):
    """A call has an argument that an example cannot store."""


def encode(value: Any) -> Json:
    """Return an argument of a call as JSON.

    Raises:
        NotAnExampleError: an example cannot contain this type, or an integer tensor is too large.
    """
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value)
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, (torch.layout, torch.memory_format)):
        kind = "layout" if isinstance(value, torch.layout) else "memory_format"
        return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    raise NotAnExampleError(f"{type(value).__name__} in a call")


def _encode_tensor(tensor: torch.Tensor) -> Json:
    encoded: dict[str, Json] = {"t": dtype_name(tensor.dtype), "s": list(tensor.shape)}
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    if order != list(range(tensor.dim())) and not tensor.is_contiguous():
        encoded["p"] = order
    if not (tensor.is_floating_point() or tensor.is_complex()):
        if tensor.numel() > LARGEST:
            raise NotAnExampleError(f"an integer tensor of {tensor.numel()} elements in a call")
        values = [int(value) for value in tensor.detach().reshape(-1).tolist()]
        encoded["v"] = values[0] if values and len(set(values)) == 1 else values
    return encoded


def tensors_in(example: Json) -> Iterator[dict[str, Json]]:
    """Yield the encoded tensors of an example in argument order. Keyword arguments come last, in the order of the schema."""
    return (encoded for encoded in _objects(example) if "t" in encoded)


def is_float(tensor: Json) -> bool:
    """Return True if an encoded tensor is a float tensor. Replays use several dtypes for float tensors."""
    return LETTERS.get(getattr(torch, tensor["t"]), "i") != "i"


def has_dtype_argument(example: Json) -> bool:
    """Return True if a call has a dtype argument, because it decides the dtype of the result."""
    return any("dtype" in encoded for encoded in _objects(example))


def _objects(example: Json) -> Iterator[dict[str, Json]]:
    """Yield the JSON objects of an example in argument order (its tensors, dtypes, …), and then its keyword arguments."""
    if isinstance(example, list):
        for item in example:
            yield from _objects(item)
    elif isinstance(example, dict):
        yield example
        yield from _objects([*example.values()])


def decode(
    example: Json, dtypes: Sequence[torch.dtype], device: torch.device
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call with new tensors on `device`. `dtypes` contains the dtypes of its float tensors, in order."""
    rest = iter(dtypes)
    generator = torch.Generator().manual_seed(0)

    def make(value: Json) -> Any:
        match value:
            case list(items):
                return [make(item) for item in items]
            case {"t": _}:
                return _make_tensor(value, rest, generator, device)
            case {"float": number}:
                return float(number)
            case {"device": _}:
                return device
            case {"dtype": name} | {"layout": name} | {"memory_format": name}:
                return getattr(torch, name)
            case dict():
                kinds = "t, dtype, device, layout, memory_format or float"
                raise ValueError(f"{next(iter(value))!r} in an example: expected {kinds}")
        return value

    args, kwargs = example
    return [make(item) for item in args], {name: make(item) for name, item in kwargs.items()}


def _make_tensor(
    value: dict[str, Json], dtypes: Iterator[torch.dtype], generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    shape = value["s"]
    if is_float(value):
        tensor = (0.1 + 0.8 * torch.rand(shape, generator=generator)).to(next(dtypes))
    elif "v" in value:
        values = value["v"] if isinstance(value["v"], list) else [value["v"]] * math.prod(shape)
        tensor = torch.tensor(values, dtype=torch.int64).reshape(shape).to(getattr(torch, value["t"]))
    else:
        tensor = torch.rand(shape, generator=generator).to(getattr(torch, value["t"]))
    if "p" in value:
        order = value["p"]
        inverse = [order.index(dim) for dim in range(len(order))]
        tensor = tensor.permute(order).contiguous().permute(inverse)
    return tensor.to(device)


REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
"""The exceptions of torch for operands of unsupported dtypes."""

FAR = 0.25
"""Results with a larger relative error count as wrong. Rounding to 16 bits causes an error of 0.004. Misread bytes cause a far larger error."""

_FLOATS = frozenset(FLOAT_DTYPES.values())


def results_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return a list of an operator's results. If the operator returns None, the list contains the operands that the operator writes."""
    returned = function(*args, **kwargs)
    items = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if returned is not None:
        return items
    pairs = zip(operator_schema(function).arguments, args, strict=False)
    aliases = ((argument.alias_info, value) for argument, value in pairs)
    written = [value for alias, value in aliases if alias is not None and alias.is_write]
    return [item for value in written for item in (value if isinstance(value, list) else [value])]


def corrupted(
    function: Any, example: Json, letters: str, recorded: str, results: Sequence[Any], device: torch.device
) -> bool:
    """Return True if the results of a call are wrong, which means far from the results of every trusted run.

    The argument `letters` contains a letter for the dtype of each operand. A trusted run has the same input values,
    either in float64 on the CPU, or in the recorded dtypes on the device or the CPU. Return False if there is no
    trusted run, and for results that cannot be
    compared: random numbers, uninitialized memory, reinterpreted bytes.
    """
    name = operator_schema(function).name.rpartition("::")[2]
    if torch.Tag.nondeterministic_seeded in function.tags or "empty" in name or name == "set_":
        return False
    numbers = _numbers(results)
    references = list(_references(function, example, letters, recorded, device))
    return bool(numbers and references) and all(_far(numbers, reference) for reference in references)


def _references(
    function: Any, example: Json, letters: str, recorded: str, device: torch.device
) -> Iterator[list[torch.Tensor]]:
    """Yield the results of each trusted run that does not raise an error. In float64, only torch's own operators are trusted."""
    cpu = torch.device("cpu")
    double = [("d" * len(letters), cpu)] if function.namespace == "aten" else []
    for trusted, place in (*double, (recorded, device), (recorded, cpu)):
        rest = iter(letters)

        def rounded(value: Any, rest: Iterator[str] = rest, place: torch.device = place) -> Any:
            """Return an argument on the device `place`, with values that are rounded to the operand's dtype."""
            if not isinstance(value, torch.Tensor):
                return place if isinstance(value, torch.device) else value
            if value.dtype in _FLOATS:
                value = value.to(FLOAT_DTYPES[next(rest)]).to(value.dtype)
            return value.to(place)

        try:
            call = decode(example, [FLOAT_DTYPES[letter] for letter in trusted], cpu)
            args, kwargs = tree_map(rounded, call)
            yield _numbers(results_of(function, args, kwargs))
        except REFUSALS:
            continue


def _numbers(results: Sequence[Any]) -> list[torch.Tensor]:
    """Return float results, and the absolute values of complex results, as float64 tensors on the CPU."""
    numbers = []
    for result in results:
        if isinstance(result, torch.Tensor) and result.dtype in _FLOATS:
            numbers.append(result.detach().to("cpu", torch.float64))
        elif isinstance(result, torch.Tensor) and result.is_complex():
            numbers.append(result.detach().to("cpu", torch.complex128).abs())
    return numbers


def _far(results: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> bool:
    if [result.shape for result in results] != [result.shape for result in reference]:
        return False  # results of other shapes cannot be compared
    for ours, trusted in zip(results, reference, strict=True):
        known = trusted.isfinite()
        off = (ours - trusted)[known].norm()
        scale = trusted[known].norm() + trusted[known].numel() ** 0.5 * torch.finfo(torch.float16).eps
        if known.any() and not off <= FAR * scale:  # NaN is far from everything
            return True
    return False
