"""Settings of torch's CUDA allocator. isotype sets them before it imports torch, because torch reads them only once."""

import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of torch 2.10 to 2.15. The first variable is for all accelerators."""

EXPANDABLE = "expandable_segments:True"


def let_segments_expand(arguments: Sequence[str] = ()) -> str | None:
    """Turn on the allocator's expandable segments. Expandable segments reduce fragmentation if batches have different
    lengths.

    Call this function before torch is imported. Return the value of the environment variable that was set. Return
    None and change nothing if the user has set one of `VARIABLES`, or if expandable segments are unsupported.
    Expandable segments are unsupported in torch for ROCm or Windows (`expandable_segments()` in
    c10/cuda/CUDAAllocatorConfig.h), and with vLLM (`--use_vllm`).
    """
    if allocator_setting() or sys.platform == "win32" or _uses_vllm(arguments) or built_for("cuda") is None:
        return None
    os.environ[VARIABLES[0]] = EXPANDABLE
    return EXPANDABLE


def allocator_setting() -> str | None:
    """Return the allocator setting of this process as `NAME=value`; None if there is none."""
    return next((f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ), None)


def built_for(toolkit: str) -> str | None:
    """Return the CUDA or HIP version for which torch was built, or None. torch is not imported."""
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
        name, equals, inline_value = token.replace("-", "_").partition("=")
        if name == "__use_vllm":
            return (inline_value if equals else value).lower() not in ("false", "0", "no")
    return False
