"""What torch tells about tensors, and about the code that runs on them, by names that are not public."""

from __future__ import annotations

import torch

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors whose memory may be read: a subclass may mean something else by its own."""


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor has been written to: two equal numbers mean the same values.

    None for a tensor made under `torch.inference_mode`, which counts nothing: nobody can tell whether it was written to.
    """
    return None if tensor.is_inference() else tensor._version


def is_transformed() -> bool:
    """Whether a transform of `torch.func` (`grad`, `vmap`, `jvp` …) runs the code that calls.

    Its tensors have no memory of their own, and it refuses functions of autograd's that have no `setup_context`: what has neither
    loops nor functions of that kind has to compute. torch 2.10 to 2.13 have no public name that tells it; `tests/core/test_tensors.py`
    fails where this one is gone, or where the refusal is: https://docs.pytorch.org/docs/stable/notes/extending.func.html
    """
    return bool(torch._C._are_functorch_transforms_active())
