"""What a traced step does not see of the process it runs in, and the process not of the step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from isotype.compat.bitsandbytes import nothing_repacked
from isotype.compat.compiler import uncompiled
from isotype.compat.torch import fake_errors_unlogged
from isotype.compat.transformers import fakes_taken_for_real
from isotype.core.random_states import random_states_kept


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """Within it random states as they were, nothing compiled, no gradient mode or autocast left over from outside."""
    with (
        fake_errors_unlogged(),
        random_states_kept(),
        torch.enable_grad(),
        _no_autocast(),
        uncompiled(),
        fakes_taken_for_real(),
        nothing_repacked(),
        torch.device("cpu") if torch.get_default_device().type != "cpu" else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Autocast off and outermost: within another one, what is left does not forget the casts it has kept.

    The real step's autocast ends with the forward, and casts of weights that it kept end with it: in the backward a
    recomputation makes them again, in the dtype that it then runs in, and they take no memory there.
    """
    before, depth = torch.is_autocast_enabled("cpu"), torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    torch.set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", before)
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()
