"""Detection of operators that accept operands but compute wrong values.

A kernel that gets a pointer without a check reads another dtype's bytes: nothing is raised, and the values
are noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from isotype.compat.torch import operator_schema
from isotype.contracts.example import Json, decode
from isotype.contracts.pattern import FLOAT_DTYPES

REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
"""torch's exceptions for operands that it rejects."""

FAR = 0.25
"""Relative to the results' norm: 16 bits represent values from 0.1 to 0.9 to 0.004, misread bytes do not."""

_FLOATS = frozenset(FLOAT_DTYPES.values())


def results_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return an operator's results as a list; its written operands if it returns None."""
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
    """Return whether the results for operand dtypes `letters` are far from every trusted run.

    Trusted runs: the same values in float64 on the CPU, and in the recorded dtypes on the device and on the
    CPU. Operators that draw random numbers, or without a trusted run, are not judged.
    """
    if not _comparable(function):
        return False
    numbers = _numbers(results)
    references = list(_references(function, example, letters, recorded, device))
    return bool(numbers and references) and all(_far(numbers, reference) for reference in references)


def _comparable(function: Any) -> bool:
    """Return whether results can be compared: no random numbers, uninitialized memory or reinterpreted bytes."""
    name = operator_schema(function).name.rpartition("::")[2]
    return torch.Tag.nondeterministic_seeded not in function.tags and "empty" not in name and name != "set_"


def _references(
    function: Any, example: Json, letters: str, recorded: str, device: torch.device
) -> Iterator[list[torch.Tensor]]:
    """Yield the results of the rounded operands for each trusted dtype that runs.

    float64 is trusted only for torch's operators, which raise if they have no kernel for it.
    """
    cpu = torch.device("cpu")
    double = [("d" * len(letters), cpu)] if function.namespace == "aten" else []
    for trusted, place in (*double, (recorded, device), (recorded, cpu)):
        rest = iter(letters)

        def rounded(tensor: torch.Tensor, rest: Iterator[str] = rest) -> torch.Tensor:
            """Return the operand's values, rounded to its dtype, in the trusted dtype."""
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
    """Return the float results in float64 on the CPU; absolute values of complex ones."""
    numbers = []
    for result in results:
        if isinstance(result, torch.Tensor) and result.dtype in _FLOATS:
            numbers.append(result.detach().to("cpu", torch.float64))
        elif isinstance(result, torch.Tensor) and result.is_complex():
            numbers.append(result.detach().to("cpu", torch.complex128).abs())
    return numbers


def _far(results: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> bool:
    if [each.shape for each in results] != [each.shape for each in reference]:
        return False  # a different number of results is not judged by values
    return any(_apart(ours, trusted) for ours, trusted in zip(results, reference, strict=True))


def _apart(ours: torch.Tensor, trusted: torch.Tensor) -> bool:
    known = trusted.isfinite()
    if not known.any():
        return False
    off = (ours - trusted)[known].norm()
    scale = trusted[known].norm() + trusted[known].numel() ** 0.5 * torch.finfo(torch.float16).eps
    return not bool(off <= FAR * scale)  # NaN is far from everything
