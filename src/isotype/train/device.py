"""The device that a training command runs on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from rich.console import Console

from isotype.compat.torch import without_cudnn_attention
from isotype.compat.transformers import train_on_first_gpu
from isotype.core.errors import UsageError
from isotype.precision.devices.attention import has_faulty_cudnn
from isotype.precision.devices.profile import DeviceProfile, device_profile
from isotype.report.narrow import wrapped
from isotype.train.command.settings import Settings


def training_device(settings: Settings) -> DeviceProfile:
    """The profile of the device that the arguments ask for.

    Raises:
        UsageError: it is not in this machine, or not the first of its kind.
    """
    device = settings.extra.device
    profile = device_profile(device)
    if not profile.present:
        raise UsageError.of(
            f"{profile.title} is not in this machine",
            f"--device {device}",
            "a device that is here",
            _other_device(settings),
        )
    index = torch.device(profile.name).index
    if index:
        raise UsageError.of(
            "the trainer takes the first GPU it sees",
            f"--device {settings.extra.device}",
            "a device without an index",
            f"CUDA_VISIBLE_DEVICES={index} isotype {settings.method.name} …",
        )
    return profile


def take_one_gpu(settings: Settings, console: Console) -> None:
    """Without a launcher the run takes the first GPU of several, and says how to take all."""
    left = train_on_first_gpu(settings.training)
    if left:
        command = f"torchrun --standalone --nproc_per_node {left + 1} -m isotype {settings.method.name} …"
        note = f"note: training on the first of {left + 1} GPUs; {command} trains on all of them"
        console.print(wrapped(note, console), highlight=False, markup=False, soft_wrap=True)


def wait_less(settings: Settings, profile: DeviceProfile) -> None:
    """Let the trainer wait for the device no more often than it has to, where the user has not said otherwise.

    Every micro-batch the Trainer would ask whether its loss is finite, to leave it out of what it logs; isotype ends a run before
    the update that such a loss would make. Batches go to an NVIDIA or AMD GPU out of pinned memory, without waiting for them.
    """
    training, explicit = settings.training, settings.command
    if "logging_nan_inf_filter" not in explicit:
        training.logging_nan_inf_filter = False
    pinned = profile.kind in ("cuda", "rocm") and training.dataloader_pin_memory
    if pinned and "accelerator_config" not in explicit:
        training.accelerator_config.non_blocking = True


def sound_attention(profile: DeviceProfile) -> AbstractContextManager[None]:
    """Within it no kernel of attention is taken whose gradients may be NaN (IST812); the others compute the same."""
    return without_cudnn_attention() if has_faulty_cudnn(profile) else nullcontext()


def _other_device(settings: Settings) -> str:
    here = device_profile("auto").title
    planned = f"isotype check {settings.method.name} … --device {settings.extra.device}"
    return f"leave --device out to train on {here}; {planned} says how it would run there"
