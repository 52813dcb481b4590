"""Lines of code: which one asked for an operator, and which one raised."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from isotype.compat.standard import frame_above
from isotype.core.package import PACKAGE

# A folder ends in a separator: torchvision, torchtune and torch_geometric lie beside torch and are not it.
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
# What asks for operators on behalf of the model's and the script's code.
_OURS = tuple(
    f"{PACKAGE / room}{os.sep}" for room in ("trace", "ranges", "preflight", "cli", "model", "compat")
)

# Python's own frozen modules, and what torch.fx writes: nobody can edit a line there; who calls it asked.
_NO_FILE = ("<frozen", "<eval_with_key>")

_STEP = str(PACKAGE / "trace" / "fake" / "step.py")


@cache
def is_library(filename: str) -> bool:
    """Whether a file is torch's or this package's own, or none at all: never what asked for an operator."""
    return filename.startswith((_TORCH, *_OURS, *_NO_FILE))


def asking_line() -> Any:
    """(file, line) of the innermost frame outside of torch and this package: what asked for the operator.

    None where torch's own modules asked alone: who called the preflight asked for the whole step.
    """
    frame = frame_above(2)
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code.co_filename == _STEP:
            return None
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def raising_frame(error: BaseException) -> Any:
    """The innermost frame of an error's traceback outside of torch and this package."""
    frame, step = None, error.__traceback__
    while step is not None:
        if not is_library(step.tb_frame.f_code.co_filename):
            frame = step.tb_frame
        step = step.tb_next
    return frame


def tensors_at_hand(error: BaseException) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that whatever raised had before it, by name: its variables, and its own weights where it is a module.

    A check of torch's own modules (`RNNBase.check_input`) raises in torch: what called it is looked at, too.
    """
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    innermost = step.tb_frame if step is not None else None
    variables: dict[str, Any] = {}
    for frame in (innermost, raising_frame(error)):
        local = frame.f_locals if frame is not None else {}
        variables |= {name: value for name, value in local.items() if name not in variables}
        if isinstance(local.get("self"), torch.nn.Module) and frame is innermost:
            variables |= dict(local["self"].named_parameters(recurse=False))
    seen: set[int] = set()
    for name, value in variables.items():
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            yield name, value


def condition_at(source: str) -> str:
    """The code at `file:line` that decides whether to raise: an `assert`, an `if`, or the line above a `raise`; else ""."""
    path, _, number = source.rpartition(":")
    line = int(number) if number.isdigit() else 0
    above, raising = linecache.getline(path, line - 1).strip(), linecache.getline(path, line).strip()
    return raising if raising.startswith(("assert", "if")) else above if raising.startswith("raise") else ""


def line_of(error: BaseException) -> str:
    """`file:line` of the user's or a library's code that raised; of this package's where nothing else ran."""
    frame, step = raising_frame(error), error.__traceback__
    while frame is None and step is not None and step.tb_next is not None:
        step = step.tb_next
    if frame is not None:
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "" if step is None else f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}"


@cache
def shown(source: Any) -> str:
    """`file:line`, "" where there is none."""
    if source is None:
        return ""
    return f"{source[0]}:{source[1]}"
