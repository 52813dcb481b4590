"""Patterns are the keys of the contract tables: short strings for the dtypes of a call's operands.

A pattern has a letter for each operand, in argument order: `f` float32, `b` bfloat16, `h` float16, `d` float64, and `i`
for any integer or bool. Several `i` in a row become one `i`, so the number of index tensors does not matter.

For operators with lists of tensors, the lengths of the lists do not matter:

- `cat` and `stack` have one result. Their pattern is the *set* of letters in the list, in braces: `{bf}`.
- `_foreach_*`, `_fused_*` and `_amp_foreach_*` have a result or an update for each element of the lists. Each element
  has a pattern: one letter for each list, then `|`, and then the letters of the single tensors (`ffff|f`). A call is
  accepted if all its patterns are accepted.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter

import torch

from isotype.compat.torch import operator_schema

CORRUPTS = "nothing: it returns wrong values without an error"
"""Message for operators that raise no error, but read the bytes of an operand as if they had another dtype."""

# The names of a dtype in C++ messages: the type, and the scalar type.
_CPP: dict[torch.dtype, tuple[str, str]] = {
    torch.float32: ("float", "Float"),
    torch.bfloat16: ("c10::BFloat16", "BFloat16"),
    torch.float16: ("c10::Half", "Half"),
    torch.float64: ("double", "Double"),
    torch.bool: ("bool", "Bool"),
    torch.uint8: ("unsigned char", "Byte"),
    torch.int8: ("signed char", "Char"),
    torch.int16: ("short", "Short"),
    torch.int32: ("int", "Int"),
    torch.int64: ("long", "Long"),
    torch.uint16: ("unsigned short", "UInt16"),
    torch.uint32: ("unsigned int", "UInt32"),
    torch.uint64: ("unsigned long", "UInt64"),
    torch.complex32: ("c10::complex<c10::Half>", "ComplexHalf"),
    torch.complex64: ("c10::complex<float>", "ComplexFloat"),
    torch.complex128: ("c10::complex<double>", "ComplexDouble"),
}

FLOAT_DTYPES: dict[str, torch.dtype] = {
    "f": torch.float32, "b": torch.bfloat16, "h": torch.float16, "d": torch.float64,
}  # fmt: skip
RESULT_DTYPES: dict[str, torch.dtype] = FLOAT_DTYPES | {
    "o": torch.bool, "u": torch.uint8, "c": torch.int8, "s": torch.int16, "n": torch.int32, "l": torch.int64,
    "x": torch.complex32, "z": torch.complex64, "y": torch.complex128,
}  # fmt: skip
RESULT_LETTERS: dict[torch.dtype, str] = {dtype: letter for letter, dtype in RESULT_DTYPES.items()}
"""Letters of result dtypes, one for each integer dtype."""
LETTERS: dict[torch.dtype, str] = {
    dtype: RESULT_LETTERS[dtype] if dtype.is_floating_point or dtype.is_complex else "i" for dtype in _CPP
}
"""Letters of operand dtypes. Tables do not contain other dtypes (float8)."""


@dataclass(frozen=True)
class Spelled:
    """A dtype for format strings. `{0}` is the C++ type, `{0:name}` the scalar type, and `{0:torch}` torch's name."""

    dtype: torch.dtype

    def __format__(self, style: str) -> str:
        if style == "torch":
            return str(self.dtype)
        if self.dtype not in _CPP:
            return str(self.dtype).removeprefix("torch.").capitalize()
        return _CPP[self.dtype][style == "name"]


def letters_in(pattern: str) -> str:
    """Return the letters of a pattern, without braces and bars."""
    return "".join(filter(str.isalpha, pattern))


def fill(template: str, letters: Sequence[str], integer: torch.dtype = torch.int64) -> str:
    """Fill a message template with the operands' dtypes. `i` stands for the dtype `integer`."""
    return template.format(*(Spelled(RESULT_DTYPES.get(letter, integer)) for letter in letters))


@dataclass(frozen=True)
class Layout:
    """Numbers of an operator's tensor lists and single tensors. `by_element`: True if the operator works on lists element by element."""

    lists: int = 0
    optional_lists: int = 0
    singles: int = 0
    optional_singles: int = 0
    by_element: bool = False


PLAIN = Layout()
# Lists that are empty unless the optimizer uses amsgrad or momentum.
_MAY_BE_EMPTY = {"max_exp_avg_sqs", "momentum_buffer_list"}


@cache
def layout_of(op: str) -> Layout:
    """Return the layout of an overload (`aten.cat.default`) from its schema; `PLAIN` if torch has no such overload."""
    try:
        schema = operator_schema(attrgetter(op)(torch.ops)) if op.count(".") == 2 else None
    except AttributeError:
        return PLAIN
    if schema is None:
        return PLAIN
    kinds = [(argument.name, str(argument.type)) for argument in schema.arguments]
    lists = [name for name, kind in kinds if kind == "List[Tensor]"]
    if not lists:
        return PLAIN
    return Layout(
        lists=len(lists),
        optional_lists=sum(name in _MAY_BE_EMPTY for name in lists),
        singles=sum(kind == "Tensor" for _, kind in kinds),
        optional_singles=sum(kind == "Optional[Tensor]" for _, kind in kinds),
        by_element=[str(result.type) for result in schema.returns] in ([], ["List[Tensor]"]),
    )


def patterns_of(layout: Layout, letters: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct patterns of a call with these operands. Without `layout.by_element`, there is only one pattern."""
    if not layout.lists:
        return (re.sub("i+", "i", "".join(letters)),)
    as_set = ("{" + "".join(sorted(set(letters))) + "}",)
    return min(_splits(layout, letters), key=len, default=as_set) if layout.by_element else as_set


def _splits(layout: Layout, letters: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all ways to split the operands into lists of equal length, followed by single tensors.

    A way is a tuple of patterns. Optional arguments allow several ways. Ways with fewer lists come first. The caller
    uses the first way with the fewest patterns, because optimizers group tensors by dtype.
    """
    splits = []
    for lists in range(layout.lists - layout.optional_lists, layout.lists + 1):
        for singles in range(layout.singles, layout.singles + layout.optional_singles + 1):
            length, rest = divmod(len(letters) - singles, lists)
            if length < 1 or rest:
                continue
            tail = "|" + "".join(letters[length * lists :]) if singles else ""
            elements = dict.fromkeys("".join(letters[at : length * lists : length]) for at in range(length))
            splits.append(tuple(element + tail for element in elements))
    return splits
