"""Operand dtypes as short strings: the keys of the contract tables, and dtypes as torch spells them.

A pattern has one letter an operand, in argument order: `f` float32, `b` bfloat16, `h` float16, `d` float64,
and `i` for any integer or bool. Adjacent `i` are merged, so that the number of index tensors does not matter.

Patterns of operators with lists of tensors do not depend on the lists' lengths:

- `cat`, `stack` (one result): the *set* of letters in the list, in braces: `{bf}`.
- `_foreach_*`, `_fused_*`, `_amp_foreach_*` (one result, or one update, for each element): a pattern for
  each element, one letter a list, then `|` and the letters of the single tensors: `ffff|f`. A call is
  accepted if all its elements are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from isotype.compat.torch import FunctionSchema, operator_schema

LETTERS: dict[torch.dtype, str] = {
    torch.float32: "f",
    torch.bfloat16: "b",
    torch.float16: "h",
    torch.float64: "d",
    **dict.fromkeys(
        (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.uint16,
            torch.uint32,
            torch.uint64,
        ),
        "i",
    ),
}
"""Letters of operand dtypes; other dtypes (complex, float8) are in no table."""

RESULT_LETTERS: dict[torch.dtype, str] = {
    torch.float32: "f",
    torch.bfloat16: "b",
    torch.float16: "h",
    torch.float64: "d",
    torch.bool: "o",
    torch.uint8: "u",
    torch.int8: "c",
    torch.int16: "s",
    torch.int32: "n",
    torch.int64: "l",
    torch.complex64: "z",
    torch.complex128: "y",
}
"""Letters of result dtypes, which distinguish integers."""

RESULT_DTYPES: dict[str, torch.dtype] = {letter: dtype for dtype, letter in RESULT_LETTERS.items()}
FLOAT_DTYPES: dict[str, torch.dtype] = {letter: RESULT_DTYPES[letter] for letter in "fbhd"}

CORRUPTS = "nothing: it returns wrong values without an error"
"""Message of an operator that accepts a dtype and misreads it."""

# C++ spellings of a dtype in messages: the type, and the name of the scalar type.
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
}


@dataclass(frozen=True)
class Spelled:
    """A dtype for `str.format`: `{0}` the C++ type, `{0:name}` the scalar type, `{0:torch}` torch's name."""

    dtype: torch.dtype

    def __format__(self, style: str) -> str:
        if style == "torch":
            return str(self.dtype)
        return _CPP[self.dtype][style == "name"]


def letters_in(pattern: str) -> str:
    """Return the operand letters of a pattern, without braces and bars."""
    return "".join(filter(str.isalpha, pattern))


def fill(template: str, letters: Sequence[str], integer: torch.dtype = torch.int64) -> str:
    """Return a message template filled with the operands' dtypes; `integer` is the dtype of `i`."""
    return template.format(*(Spelled(FLOAT_DTYPES.get(letter, integer)) for letter in letters))


@dataclass(frozen=True)
class Layout:
    """Numbers of tensors and tensor lists of an operator; `each`: it works on the lists element by element."""

    lists: int = 0
    optional_lists: int = 0
    singles: int = 0
    optional_singles: int = 0
    each: bool = False


PLAIN = Layout()
# Empty unless the optimizer uses amsgrad or momentum.
_MAY_BE_EMPTY = {"max_exp_avg_sqs", "momentum_buffer_list"}


@cache
def layout_of(op: str) -> Layout:
    """Return the layout of an overload (`aten.cat.default`) from its schema; `PLAIN` if torch lacks it."""
    schema = _schema(op)
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
        each=[str(result.type) for result in schema.returns] in ([], ["List[Tensor]"]),
    )


def _schema(op: str) -> FunctionSchema | None:
    parts = op.split(".")
    if len(parts) != 3:
        return None
    try:
        overload = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except AttributeError:
        return None
    schema: FunctionSchema = operator_schema(overload)
    return schema


def patterns_of(layout: Layout, letters: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct patterns of a call by its operands' letters; several only for element-wise lists."""
    if not layout.lists:
        return (_without_runs(letters),)
    if not layout.each:
        return ("{" + "".join(sorted(set(letters))) + "}",)
    return min(_splits(layout, letters), key=len, default=("{" + "".join(sorted(set(letters))) + "}",))


def _without_runs(letters: Sequence[str]) -> str:
    kept = [letter for at, letter in enumerate(letters) if letter != "i" or at == 0 or letters[at - 1] != "i"]
    return "".join(kept)


def _splits(layout: Layout, letters: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the ways to split a flat operand list into equally long lists followed by single tensors.

    Optional arguments allow several ways. The one with the fewest distinct elements is right, since
    optimizers group their tensors by dtype; of equal ones the first, with fewer lists.
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
