"""Finds where a script depends on the GPU of `--device`, if this machine lacks it: questions for it, autocast without a dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isotype.compat.replaced import Replacements
from isotype.compat.standard import frame_above
from isotype.compat.torch_device import device_type
from isotype.core.source import is_library
from isotype.precision.devices.profile import DeviceProfile
from isotype.records.finding import in_library

_ASKS = (
    "asks whether a GPU is available, and this machine has none: isotype checks the step that the script runs without a "
    "GPU, for"
)


class Branch:
    """Records where a script asks for a GPU. It then takes its CPU branch, even if the step is checked for a GPU.

    Attributes:
        sentence: names the line of the script's first question; "" if it has not asked.
        kind: device type of the device for which the step is checked.
        stands: the CPU's default autocast dtype -> the device's, if the script opens autocast without a dtype.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        self.sentence, self._title = "", profile.title
        self.stands: dict[torch.dtype, torch.dtype] = {}
        self.kind = device_type(profile.kind)
        self._replaced = Replacements()
        backend = getattr(torch, self.kind, None)
        if profile.kind == "cpu" or backend is None or backend.is_available():
            return
        for holder, name in (
            (backend, "is_available"),
            (backend, "device_count"),
            (torch.accelerator, "is_available"),
        ):
            self._replaced.wrap(holder, name, self._note_caller)
        self._replaced.wrap(torch.autocast, "__init__", self._note_autocast)

    def _note_caller(self, ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        caller = frame_above(2)
        if not self.sentence and caller is not None and not is_library(caller.f_code.co_filename):
            line = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            self.sentence = "" if in_library(line) else f"{line} {_ASKS} {self._title}"
        return ask(*args, **kwargs)

    def _note_autocast(self, init: Callable[..., None], autocast: Any, *args: Any, **kwargs: Any) -> None:
        init(autocast, *args, **kwargs)
        if autocast.device == "cpu":
            dtype, here = kwargs.get("dtype", dict(enumerate(args)).get(1)), autocast.fast_dtype
            self.stands[here] = torch.get_autocast_dtype(self.kind) if dtype is None else here

    def detach(self) -> None:
        self._replaced.put_back()
