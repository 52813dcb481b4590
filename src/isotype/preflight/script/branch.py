"""Finds the line where a script asks whether a GPU is available, if this machine lacks the GPU of `--device`."""

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


class Branch:
    """Records where a script asks for a GPU. It then takes its CPU branch, even if the step is checked for a GPU.

    Attributes:
        line: `file:line` of the script's first question; "" if it has not asked.
        title: name of the device for which the step is checked.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        self.line, self.title = "", profile.title
        self._replaced = Replacements()
        backend = getattr(torch, device_type(profile.kind), None)
        if profile.kind == "cpu" or backend is None or backend.is_available():
            return
        for holder, name in (
            (backend, "is_available"),
            (backend, "device_count"),
            (torch.accelerator, "is_available"),
        ):
            self._replaced.wrap(holder, name, self._note_caller)

    def _note_caller(self, ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        caller = frame_above(2)
        if not self.line and caller is not None and not is_library(caller.f_code.co_filename):
            line = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            self.line = "" if in_library(line) else line
        return ask(*args, **kwargs)

    def detach(self) -> None:
        self._replaced.put_back()
