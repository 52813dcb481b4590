"""Whether an operator that took its operands computed with them: its results against those of a trusted dtype.

A kernel that is handed a pointer without a check reads another dtype's bytes: nothing is raised, and the values are noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from isotype.compat.torch import operator_schema
from isotype.contracts.example import Json, decode
from isotype.contracts.pattern import FLOAT_DTYPES

REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
"""What torch raises at operands it does not take."""

FAR = 0.25
"""Of the results' norm: 16 bits keep the examples' operands, between 0.1 and 0.9, to 0.004, other bytes give values of any size."""

_FLOATS = frozenset(FLOAT_DTYPES.values())


def results_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What an operator returns, as a list; of one that only writes into its operands, these.

    Raises:
        Exception: what the operator raises.
    """
    returned = function(*args, **kwargs)
    items = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if returned is not None:
        return items
    written = [
        value
        for argument, value in zip(operator_schema(function).arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [item for value in written for item in (value if isinstance(value, list) else [value])]


def corrupted(
    function: Any, example: Json, letters: str, recorded: str, results: Sequence[Any], device: torch.device
) -> bool:
    """Whether results of operands of the dtypes `letters` are far from what those operands' values give.

    They are far where they are far from every trusted run: the same values in float64 on the CPU, and in the recorded dtypes
    on the device and on the CPU. Operators that draw random numbers or that no trusted run is known of are not judged.

    Args:
        function: the operator.
        example: the call.
        letters: a dtype for each float operand.
        recorded: those of the recorded call.
        results: what it returned.
        device: where it ran.
    """
    if not _comparable(function):
        return False
    numbers = _numbers(results)
    references = list(_references(function, example, letters, recorded, device))
    return bool(numbers and references) and all(_far(numbers, reference) for reference in references)


def _comparable(function: Any) -> bool:
    """No random numbers, no memory that nobody has written, and no bytes that are another dtype's on purpose."""
    name = operator_schema(function).name.rpartition("::")[2]
    return torch.Tag.nondeterministic_seeded not in function.tags and "empty" not in name and name != "set_"


def _references(
    function: Any, example: Json, letters: str, recorded: str, device: torch.device
) -> Iterator[list[torch.Tensor]]:
    """Results of the rounded operands in dtypes that are to be trusted, of each run that is possible.

    float64 is trusted of torch's own operators alone: they refuse what they have no kernel for.
    """
    cpu = torch.device("cpu")
    double = [("d" * len(letters), cpu)] if function.namespace == "aten" else []
    for trusted, place in (*double, (recorded, device), (recorded, cpu)):
        rest = iter(letters)

        def rounded(tensor: torch.Tensor, rest: Iterator[str] = rest) -> torch.Tensor:
            """The values that the operand of the call has, in its trusted dtype."""
            return tensor.to(FLOAT_DTYPES[next(rest)]).to(tensor.dtype)

        try:
            args, kwargs = decode(example, [FLOAT_DTYPES[letter] for letter in trusted], cpu)
            args, kwargs = (
                _mapped(args, rounded, place),
                {name: _mapped(value, rounded, place) for name, value in kwargs.items()},
            )
            yield _numbers(results_of(function, args, kwargs))
        except REFUSALS:
            continue


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Any:
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change, device) for item in value]
    if isinstance(value, torch.device):
        return device
    if not isinstance(value, torch.Tensor):
        return value
    return (change(value) if value.dtype in _FLOATS else value).to(device)


def _numbers(results: Sequence[Any]) -> list[torch.Tensor]:
    """Float results in float64 on the CPU, complex ones by their absolute values."""
    numbers = []
    for result in results:
        if isinstance(result, torch.Tensor) and result.dtype in _FLOATS:
            numbers.append(result.detach().to("cpu", torch.float64))
        elif isinstance(result, torch.Tensor) and result.is_complex():
            numbers.append(result.detach().to("cpu", torch.complex128).abs())
    return numbers


def _far(results: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> bool:
    if [each.shape for each in results] != [each.shape for each in reference]:
        return False  # another number of results is no matter of values
    return any(_apart(ours, trusted) for ours, trusted in zip(results, reference, strict=True))


def _apart(ours: torch.Tensor, trusted: torch.Tensor) -> bool:
    known = trusted.isfinite()
    if not known.any():
        return False
    off = (ours - trusted)[known].norm()
    scale = trusted[known].norm() + trusted[known].numel() ** 0.5 * torch.finfo(torch.float16).eps
    return not bool(off <= FAR * scale)  # NaN is far from everything
