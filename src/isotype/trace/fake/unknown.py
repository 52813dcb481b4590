"""Chooses the numbers that the model's code reads from tensors with unknown values.

Code that reads a number usually branches on it (`if x.max() > 1e4: raise …`, `while error.item() > 1e-3`). From the
syntax tree of the code, this module chooses a number with which the step works: checks pass, and loops end after a few
rounds.
"""

import ast
import dis
import linecache
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import takewhile
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn import functional

from isotype.compat.standard import frame_above
from isotype.core.names import short
from isotype.core.source import asking_frame, is_library
from isotype.trace.dtype_reads import is_inside, position, span_of

_ROUNDS = 3
_MOST_READS = 50
_BY_TURNS = (1.0, 1.0, 0.0, 1e9)
"""Numbers that a loop reads in turn if their use is unknown: 0 ends `while x > limit`, and 1e9 ends `while x < limit`."""
_NOT_FINITE = re.compile(r"(?:\b|_|is)(?:nan|inf)(?:\b|_)")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_CONVERTS = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT", "COPY", "CACHE", "NOP")


@dataclass(frozen=True)
class Use:
    """The use of a number that code reads from a tensor.

    Attributes:
        negated: True if an odd number of `not` is between the number and the condition that it decides.
        rises: True if the comparison is true for large numbers, False if it is true for small numbers; None without a
            comparison.
        limit: the constant that the number is compared with; None if there is none.
        passes: the code continues if the comparison, or the number alone, has this truth value; None if no condition
            was found.
        loop: line of the `while` loop that ends with the other truth value; None if there is none.
    """

    negated: bool = False
    rises: bool | None = None
    limit: float | None = None
    passes: bool | None = None
    loop: int | None = None

    def number(self, truth: bool, is_integer: bool) -> float:
        """Return a number for which the comparison has the value `truth`. The number is 1 if possible."""
        rises, limit = self.rises, self.limit
        if rises is None:
            return float(truth)
        wants_large = truth == rises
        if limit is not None and (limit < 1.0) == wants_large:
            return 1.0
        if limit is not None:
            return 2 * limit + 1 if wants_large else limit / 2 if limit > 0 else 2 * limit - 1
        if self.loop is None:
            return (1024.0 if is_integer else 1e9) if wants_large else 1.0
        return 1e9 if wants_large else 0.0


class Numbers:
    """Chooses the numbers that code reads from tensors without values, and records the loops that these numbers end."""

    def __init__(self) -> None:
        self._reads: Counter[tuple[CodeType, int]] = Counter()
        # (file, line) of the loops that these numbers have ended, in the order of their first round.
        self._loops: dict[tuple[str, int], None] = {}

    def read(self, tensor: torch.Tensor) -> bool | int | float:
        """Return a number of the tensor's type that lets the code continue: 1 or True by default."""
        frame = asking_frame()
        # torch.nn.functional checks some arguments, such as the variances of gaussian_nll_loss.
        frames = (inner for inner, _ in walk_stack(frame_above(1)))
        between = takewhile(lambda inner: inner is not frame, frames)
        checks = (inner for inner in between if inner.f_code.co_filename == functional.__file__)
        frame = next((check for check in checks if use_in(check)[0] is not None), frame)
        number = 1.0 if frame is None else self._number(frame, tensor)
        if tensor.dtype == torch.bool:
            return bool(number)
        return number if tensor.is_floating_point() else int(number)

    def untraced(self) -> dict[str, str]:
        """Return untraced part of the step -> reason. The parts are the later rounds of loops."""
        places = (short(f"{file}:{line}") for file, line in self._loops)
        return {f"later rounds of the loop at {place}": "its end depends on values" for place in places}

    def _number(self, frame: FrameType, tensor: torch.Tensor) -> float:
        use, frame = use_in(frame)
        place, file = (frame.f_code, frame.f_lineno), frame.f_code.co_filename
        count = self._reads[place]
        self._reads[place] += 1
        if use is None:
            if count < _MOST_READS or (loop := _while_around(frame)) is None:
                return 1.0
            self._loops[file, loop] = None
            return _BY_TURNS[count % len(_BY_TURNS)]
        truth = bool(use.passes)
        if use.loop is not None:
            self._loops[file, use.loop] = None
            truth ^= count % _ROUNDS == _ROUNDS - 1
        if tensor.dtype == torch.bool:
            return float(truth)
        return use.number(truth, not tensor.is_floating_point())


def use_in(frame: FrameType) -> tuple[Use | None, FrameType]:
    """Return the use of the number that `frame` is reading, and the frame (`frame` or a caller) that uses the number."""
    use = _use(frame.f_code, frame.f_lasti, Use())
    while use is not None and use.passes is None:
        if (caller := frame.f_back) is None or is_library(caller.f_code.co_filename):
            return None, frame
        frame = caller
        use = _use(frame.f_code, frame.f_lasti, use)
    return use, frame


@lru_cache(maxsize=4096)
def _use(code: CodeType, at: int, so_far: Use) -> Use | None:
    """Return how code uses the number read by the instruction at byte `at`; `passes` is None if it returns the number.

    `so_far` is the use of the number in the functions that the code calls.
    """
    parents = _parents(code.co_filename)
    node = _expression(code, at)
    if node is None:
        return None
    path, place = _upwards(node, so_far, parents)
    match place:
        case ast.Return():
            return path
        case ast.Assign(targets=[(ast.Name() | ast.Attribute()) as target]) | ast.AnnAssign(target=target):
            readers = _readers(place, ast.unparse(target), parents)
            tests = (_upwards(reader, path, parents) for reader in readers)
            return next((use for inner, test in tests if (use := _of_test(test, inner, parents))), None)
    use = _of_test(place, path, parents)
    equals = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq)
    if use is None and (equals or _NOT_FINITE.search(ast.unparse(node))):
        return replace(path, passes=False)  # an unknown number equals no other, and it is finite
    return use


def _of_test(place: ast.AST, path: Use, parents: dict[ast.AST, ast.AST]) -> Use | None:
    """Return the use of a number in the condition of the statement `place`; None if both truth values work.

    `path` is the use in the expressions of the condition.
    """
    match place:
        case ast.While():
            return replace(path, passes=not path.negated, loop=place.lineno)
        case ast.Assert():
            return replace(path, passes=not path.negated)
        case ast.If(body=body, orelse=orelse):
            loop = _around(place, parents, (ast.While, ast.For))
            is_while = isinstance(loop, ast.While)
            ends = (ast.Break, ast.Return) if is_while else ast.Break
            for branch, passes in ((body, False), (orelse, True)):
                if any(isinstance(statement, ast.Raise) for statement in branch):
                    return replace(path, passes=passes != path.negated)
                if loop is not None and any(isinstance(statement, ends) for statement in branch):
                    ends_at = loop.lineno if is_while else None
                    return replace(path, passes=passes != path.negated, loop=ends_at)
    return None


def _upwards(node: ast.expr, path: Use, parents: dict[ast.AST, ast.AST]) -> tuple[Use, ast.AST]:
    """Return the use of an expression, and the statement or `… if … else …` that contains the expression."""
    part: ast.AST = node
    while not isinstance(place := parents[part], ast.stmt):
        match place:
            case ast.IfExp(test=test) if part is test:
                break
            case ast.UnaryOp(op=ast.Not()):
                path = replace(path, negated=not path.negated)
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                sign = isinstance(operator, (ast.Gt, ast.GtE)) - isinstance(operator, (ast.Lt, ast.LtE))
                other = right if part is left else left
                value = other.value if isinstance(other, ast.Constant) else None
                limit = float(value) if isinstance(value, (int, float)) else None
                if sign:
                    path = replace(path, rises=(sign > 0) == (part is left), limit=limit)
        part = place
    return path, place


def _readers(place: ast.stmt, variable: str, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.expr]:
    """Yield each use of `variable` in a condition, within the function that contains the statement `place`."""
    scope = _around(place, parents, _SCOPES)
    for statement in ast.walk(scope) if scope is not None else ():
        if isinstance(statement, (ast.While, ast.If, ast.Assert)):
            for part in ast.walk(statement.test):
                if isinstance(part, (ast.Name, ast.Attribute)) and ast.unparse(part) == variable:
                    yield part


def _around(node: ast.AST, parents: dict[ast.AST, ast.AST], kinds: tuple[type[ast.AST], ...]) -> Any:
    """Return the innermost node around `node` whose type is in `kinds`; None if there is none in the same function."""
    while (parent := parents.get(node)) is not None and not isinstance(parent, kinds):
        if isinstance(parent, _SCOPES):
            return None
        node = parent
    return parent


def _while_around(frame: FrameType) -> int | None:
    """Return the line of the innermost `while` loop that runs in `frame` or its callers in the model's code."""
    for caller, line in takewhile(lambda step: not is_library(step[0].f_code.co_filename), walk_stack(frame)):
        loops = (node for node in _parents(caller.f_code.co_filename) if isinstance(node, ast.While))
        lines = (loop.lineno for loop in loops if loop.lineno <= line <= (loop.end_lineno or 0))
        if (loop := max(lines, default=None)) is not None:
            return loop
    return None


def _expression(code: CodeType, at: int) -> ast.expr | None:
    """Return the expression whose value the instruction at byte `at` reads; None if the source is not available.

    The instruction that tests a condition has the position of the whole statement, so the instruction before is used.
    """
    while at and dis.opname[code.co_code[at]].startswith(_CONVERTS):
        at -= 2
    span, around = position(code, at), None
    for node in _parents(code.co_filename):
        if isinstance(node, ast.expr) and is_inside(span, span_of(node)):
            around = node
    return around


@cache
def _parents(file: str) -> dict[ast.AST, ast.AST]:
    """Return the parent of each syntax node of a source file; empty if the file is missing or is not Python."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
