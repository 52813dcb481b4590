"""`--torch_compile`: compile each block of a model by itself, and nothing of isotype.

accelerate passes the whole model to `torch.compile`, with the head, its loss and isotype's hooks, whose Python state
breaks graphs or recompiles at every call. Most time is spent in the blocks; all blocks of a kind share one graph
(https://docs.pytorch.org/tutorials/recipes/regional_compilation.html). Hooks stay outside, since `forward` is
compiled and not the module's call.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.deferred import outermost_blocks
from isotype.compat.swapped import Swapped, swap, swapped_class
from isotype.core.errors import Problem
from isotype.core.names import plural

Options = tuple[tuple[str, Any], ...]


class CompiledBlock(Swapped):
    """Block whose forward is compiled when differentiated; evaluation and generation run eagerly.

    Generation would compile each block separately, by its number in the key cache.
    """

    compiled_original: type[nn.Module]
    compiled_options: Options


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    plain = self.compiled_original.forward
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return plain(self, *args, **kwargs)
    return _compiled(plain, self.compiled_options)(self, *args, **kwargs)


@cache
def _compiled(forward: Any, options: Options) -> Any:
    return torch.compile(forward, **dict(options))


@cache
def _compiled_class(base: Any) -> Any:
    return swapped_class(
        CompiledBlock, (_compiled_class, (base,)), base, {"forward": _forward}, compiled_original=base
    )


def take_compilation(accelerator: Any) -> Mapping[str, Any] | None:
    """Take accelerate's options for compiling a model (not DeepSpeed's), so that it does not compile; None without."""
    from accelerate.utils import DynamoBackend

    plugin = accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO or getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        return None
    options = {**plugin.to_kwargs(), "backend": plugin.backend.value.lower()}
    plugin.backend = DynamoBackend.NO
    return options


def compile_blocks(model: nn.Module, options: Mapping[str, Any]) -> str:
    """Compile the forward of every block of a model when first differentiated, or given another shape; say so."""
    blocks = list(outermost_blocks(model))
    for _, block in blocks:
        block.__dict__["compiled_options"] = tuple(sorted(options.items()))
        base: Any = type(block)
        swap(block, _compiled_class(base))
    if not blocks:
        return "compiled: nothing, for the model has no list of blocks; all of it runs as written"
    return (
        f"compiled: {plural(len(blocks), 'block')} by {options.get('backend', 'inductor')} at the first steps, with LoRA "
        "layers as PEFT has them: what isotype fuses does not go into a graph"
    )


def compiler_problems(training: Any, device: str) -> Iterator[Problem]:
    """Yield a problem if inductor is requested and its compiler is not installed."""
    if not training.torch_compile or training.torch_compile_backend != "inductor":
        return
    flag, fix = "--torch_compile True", "install it, or leave --torch_compile out"
    if device.startswith("cpu") or (device == "auto" and not torch.accelerator.is_available()):
        # As `torch._inductor.config.cpp.cxx` has it.
        name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(shlex.split(name)[0]) is None:
            expected = f"a C++ compiler, by which inductor compiles for a CPU: {name} is not on the path"
            yield Problem(flag, expected, f"{fix}; $CXX names another one")
    elif (device == "auto" or device.startswith("cuda")) and importlib.util.find_spec("triton") is None:
        yield Problem(flag, "the package triton, by which inductor compiles for a GPU", fix)
