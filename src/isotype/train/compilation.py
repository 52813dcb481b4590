"""`--torch_compile`: compiles each block of a model separately.

By default, accelerate compiles the whole model, including isotype's hooks. Their Python state causes graph breaks, or
a recompilation at every call. isotype compiles only the `forward` of each block, and hooks run outside of `forward`.
All blocks of a class share one graph (https://docs.pytorch.org/tutorials/recipes/regional_compilation.html).
"""

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

from isotype.compat.swapped import Swapped, swap, swapped_class
from isotype.core.errors import Problem
from isotype.core.names import plural
from isotype.model.experts.layer import FusedExperts
from isotype.model.walk import outermost_blocks

Options = tuple[tuple[str, Any], ...]


class CompiledBlock(Swapped):
    """A block whose forward is compiled when gradients are enabled. The block runs eagerly in evaluation and
    generation.

    In generation, blocks cannot share a compiled graph, because each block has its own index in the key-value cache.
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
    """Return accelerate's options for `torch.compile`, and prevent accelerate from compiling.

    Return None if there are no options, and with DeepSpeed, for which accelerate still compiles the model.
    """
    from accelerate.utils import DynamoBackend

    plugin = accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO or getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        return None
    options = {**plugin.to_kwargs(), "backend": plugin.backend.value.lower()}
    plugin.backend = DynamoBackend.NO
    return options


def compile_blocks(model: nn.Module, options: Mapping[str, Any]) -> str:
    """Mark each block for compilation at its first forward with gradients. Return a message for the user."""
    blocks = list(outermost_blocks(model))
    for _, block in blocks:
        block.__dict__["compiled_options"] = tuple(sorted(options.items()))
        base: Any = type(block)
        swap(block, _compiled_class(base))
    if not blocks:
        return "compiled: nothing, because the model has no list of blocks; the whole model runs eagerly"
    eager = any(isinstance(module, FusedExperts) for module in model.modules())
    return (
        f"compiled: {plural(len(blocks), 'block')} by {options.get('backend', 'inductor')} at the first steps; LoRA "
        "layers are not fused, because torch.compile cannot trace fused layers"
        f"{'; experts that are quantized or have dropout run uncompiled' if eager else ''}"
    )


def compiler_problems(training: Any, device: str) -> Iterator[Problem]:
    if not training.torch_compile or training.torch_compile_backend != "inductor":
        return
    flag, fix = "--torch_compile True", "install it, or omit --torch_compile"
    if device.startswith("cpu") or (device == "auto" and not torch.accelerator.is_available()):
        # The C++ compiler that inductor calls by default.
        name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(shlex.split(name)[0]) is None:
            expected = f"a C++ compiler, which inductor needs for a CPU ({name} is not on the path)"
            yield Problem(flag, expected, f"{fix}; the environment variable CXX can name another compiler")
    elif (device == "auto" or device.startswith("cuda")) and importlib.util.find_spec("triton") is None:
        yield Problem(flag, "the package triton, which inductor needs for a GPU", fix)
