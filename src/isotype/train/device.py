"""The device of a training command."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from rich.console import Console

from isotype.compat.torch import without_cudnn_attention
from isotype.compat.transformers import gpus_left
from isotype.core.errors import UsageError
from isotype.precision.devices.attention import has_faulty_cudnn
from isotype.precision.devices.profile import DeviceProfile, device_profile
from isotype.report.text import say
from isotype.train.command.settings import Settings


def training_device(settings: Settings) -> DeviceProfile:
    """Return the profile of `--device`. Raise UsageError if this machine lacks the device or the device's index is not 0."""
    device = settings.device
    profile = device_profile(device)
    if not profile.present:
        raise UsageError.of(
            f"{profile.title} is not in this machine",
            f"--device {device}",
            "a device of this machine",
            f"leave --device out to train on {device_profile('auto').title}; isotype check {settings.method.name} … "
            f"--device {device} shows how the run would go there",
        )
    if index := torch.device(profile.name).index:
        headline = "the trainer uses the first visible GPU"
        fix = f"CUDA_VISIBLE_DEVICES={index} isotype {settings.method.name} …"
        raise UsageError.of(headline, f"--device {device}", "a device without an index", fix)
    return profile


def say_one_gpu(settings: Settings, console: Console) -> None:
    if unused := gpus_left(settings.training):
        command = f"torchrun --standalone --nproc_per_node {unused + 1} -m isotype {settings.method.name} …"
        say(console, f"note: training on the first of {unused + 1} GPUs; {command} trains on all of them")


def loading_arguments(settings: Settings, profile: DeviceProfile) -> dict[str, Any]:
    """Return the trainer's arguments for copying batches to the device. NVIDIA and AMD GPUs get asynchronous copies."""
    if not torch.cuda.is_available():
        return {"dataloader_pin_memory": False}  # torch warns about pinned memory without a GPU
    pinned = profile.kind in ("cuda", "rocm") and settings.dataloader_pin_memory
    chosen = pinned and "accelerator_config" not in settings.command
    return {"accelerator_config": {"non_blocking": True}} if chosen else {}


def sound_attention(profile: DeviceProfile) -> AbstractContextManager[None]:
    """Return a context that disables cuDNN attention on devices where its gradients can be NaN (IST812)."""
    return without_cudnn_attention() if has_faulty_cudnn(profile) else nullcontext()
