"""How torch's allocator on NVIDIA GPUs reserves memory; decided before torch reads it, which it does once in a process."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch (2.10 to 2.14) looks; the first is its name for all accelerators."""

EXPANDABLE = "expandable_segments:True"


def let_segments_expand(arguments: Sequence[str] = ()) -> str | None:
    """Let reserved memory grow in place, where batches of changing length would leave gaps in blocks of fixed size.

    Call it before torch is imported. Nothing is changed where the user has set one of `VARIABLES`, where this torch has no such
    segments (builds for ROCm and Windows warn and ignore them, `expandable_segments()` in c10/cuda/CUDAAllocatorConfig.h) and
    no GPU of NVIDIA's to reserve memory on, and where vLLM is to run in the process (`--use_vllm`): its own pool of memory refuses them.

    Args:
        arguments: of the command.

    Returns:
        What is in force, as the value of the variable; None where isotype has set nothing.
    """
    if any(name in os.environ for name in VARIABLES) or sys.platform == "win32" or _uses_vllm(arguments):
        return None
    if built_for("cuda") is None:
        return None
    os.environ[VARIABLES[0]] = EXPANDABLE
    return EXPANDABLE


def allocator_setting() -> str | None:
    """`NAME=value` of what torch's allocator is set to in this process; None where nothing is set."""
    return next((f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ), None)


def built_for(toolkit: str) -> str | None:
    """The version of a toolkit (`cuda`, `hip`) that the installed torch was built for, read without importing torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        source = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    line = re.search(rf"""^{toolkit}\b[^=\n]*=\s*["']([^"']+)["']""", source, re.MULTILINE)
    return line and line[1]


def _uses_vllm(arguments: Sequence[str]) -> bool:
    for token, value in pairwise([*arguments, "True"]):
        name, equals, own = token.replace("-", "_").partition("=")
        if name == "__use_vllm":
            return (own if equals else value).lower() not in ("false", "0", "no")
    return False
