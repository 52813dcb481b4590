"""What a traced step does not see of the process it runs in, and the process not of the step."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch

from isotype.compat.bitsandbytes import REPACK
from isotype.compat.compiler import uncompiled
from isotype.compat.torch import FAKE_LOGGER
from isotype.core.random_states import random_states_kept


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """Within it random states as they were, nothing compiled, no gradient mode or autocast left over from outside."""
    # It prints a traceback of every error that is caught here.
    logger = logging.getLogger(FAKE_LOGGER)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with (
        random_states_kept(),
        torch.enable_grad(),
        _no_autocast(),
        uncompiled(),
        _no_tracing_branch(),
        _no_repacking(),
        torch.device("cpu") if torch.get_default_device().type != "cpu" else contextlib.nullcontext(),
    ):
        try:
            yield
        finally:
            logger.setLevel(level)


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


@contextlib.contextmanager
def _no_tracing_branch() -> Iterator[None]:
    """transformers takes fake tensors for a model being exported, and then other paths than the real step.

    `is_tracing` in transformers/utils/import_utils.py (5.23): masks are never left out, keys and values are repeated,
    attention takes another kernel. tests/trace/test_step.py says when this can go.
    """
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    if utils is None or not hasattr(utils, "is_fake_tensor"):
        yield
        return
    before, utils.is_fake_tensor = utils.is_fake_tensor, lambda _: False
    try:
        yield
    finally:
        utils.is_fake_tensor = before


@contextlib.contextmanager
def _no_repacking() -> Iterator[None]:
    """bitsandbytes repacks no 4-bit weight, whatever this CPU has: IST407 says what happens on the device."""
    modules: Any = sys.modules.get("bitsandbytes.nn.modules")
    if modules is None or not hasattr(modules, REPACK):
        yield
        return
    before = getattr(modules, REPACK)
    setattr(modules, REPACK, lambda weight, state: (weight, state))
    try:
        yield
    finally:
        setattr(modules, REPACK, before)
