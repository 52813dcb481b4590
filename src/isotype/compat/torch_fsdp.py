"""torch: private parts of FSDP2, of its GradScaler, and of a process group without other processes."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import forward_hooks, forward_pre_hooks, tree_map


def unshard(model: nn.Module) -> bool:
    """Remove FSDP2's classes and hooks from a copy of a model. Return whether the model was sharded."""
    sharded = [module for module in model.modules() if hasattr(module, "set_reshard_after_forward")]
    for module in sharded:
        module.__class__ = type(module).__bases__[-1]
        for hooks in (forward_pre_hooks(module), forward_hooks(module)):
            for number, hook in list(hooks.items()):
                if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp"):
                    del hooks[number]
    return bool(sharded)


def sharded_policy(module: nn.Module) -> Any:
    """Return the `MixedPrecisionPolicy` of a module that FSDP2 has sharded; None for another module."""
    states: Iterator[Any] = (getattr(hook, "__self__", None) for hook in forward_pre_hooks(module).values())
    return next((state._mp_policy for state in states if hasattr(state, "_mp_policy")), None)


def apply_like_fsdp(function: Callable[[Any], Any], values: Any) -> Any:
    """Return `values` with `function` applied to the tensors that FSDP2 casts. torch 2.13 also finds them in dataclasses."""
    from torch.distributed.fsdp._fully_shard import _fsdp_state

    return getattr(_fsdp_state, "_apply_to_tensors", tree_map)(function, values)


def reshard(module: Any) -> None:
    """Give a module its sharded parameters back, even after an error, for which `module.reshard()` may do nothing."""
    state = module._get_fsdp_state()
    # torch before 2.13 has one group per module, or None.
    for group in getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)]):
        if group is not None:
            group._to_sharded()


def sharded_scaler(device: str) -> torch.amp.GradScaler:
    """Return torch's GradScaler for sharded models, with overflow flags of shape `[]` in place of shape `[1]`.

    Fused optimizers reject the shape `[1]`: https://github.com/pytorch/pytorch/issues/140514
    """
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    class Scaler(ShardedGradScaler):
        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            super().unscale_(optimizer)
            overflows = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            overflows.update({device: overflow.reshape(()) for device, overflow in overflows.items()})

    return Scaler(device)


@contextmanager
def fake_process_group(size: int) -> Iterator[Any]:
    """Yield a one-dimensional `DeviceMesh` of `size` processes. This process has rank 0.

    Raises:
        ValueError: this process has a process group already.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch replaces the hook by one that prints the rank before every line
    torch.distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        torch.distributed.destroy_process_group()
        sys.excepthook = hook
