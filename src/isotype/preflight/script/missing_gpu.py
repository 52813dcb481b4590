"""Runs a script's GPU code on the CPU if `--device` names a GPU that this machine lacks."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from isotype.compat.bitsandbytes import QUANTIZED_LAYERS, nothing_repacked
from isotype.compat.imports import when_imported
from isotype.compat.replaced import Replacements
from isotype.compat.standard import frame_above
from isotype.compat.torch import COMPILER
from isotype.compat.torch_device import device_type, written_for
from isotype.core.source import condition_at, is_library, line_of
from isotype.precision.devices.profile import DeviceProfile
from isotype.preflight.script.setup_errors import line_of_script
from isotype.records.finding import in_library
from isotype.report.text import short_source
from isotype.trace.fake.functions import DeviceAutocast
from isotype.trace.live.recorder import warnings_at_callers

_ABOUT_GPUS = re.compile(
    r"\b(cuda|gpus?|nvidia|nccl|hip|xpu|mps|accelerator|active drivers)\b|_cuda_", re.IGNORECASE
)
_ABOUT_NAMES = (FileNotFoundError, KeyError, ModuleNotFoundError)  # of a file `data/gpu/rows.jsonl`
# "… on CUDA requires fbgemm-gpu: pip install …"
_ABOUT_PACKAGES = re.compile(r"(pip|please) install\b", re.IGNORECASE)
_ASKING = re.compile(r"\b(is_available|device_count|current_accelerator)\b")
_NO_CUDA = "not compiled with CUDA"
_INSTEAD = "with --device NAME (t4, h100, …), isotype runs the script's code for this GPU on the CPU"
_NO_FLOAT64 = (
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
    "Please use float32 instead."
)


class MissingGpu:
    """Lets the CPU replace the GPU of `profile` if this machine has no such GPU.

    Without a profile, the script runs unchanged. In this case, only the lines that ask for a GPU are recorded.

    Attributes:
        kind: device type of the device for which the step is checked.
        device_autocast: dtype of autocast on the CPU -> dtype of autocast on the device. The two dtypes may differ if the
            script sets no dtype.
        questions: each `file:line` at which the script asks for a GPU, in order.
    """

    def __init__(self, profile: DeviceProfile | None) -> None:
        self._profile = profile
        self.kind = device_type("cpu" if profile is None else profile.kind)
        self.device_autocast: dict[torch.dtype, torch.dtype] = {}
        self.questions: list[str] = []
        self._named, self._casts, self._autocast = False, False, DeviceAutocast(self.kind)
        self._default = torch.get_autocast_dtype(self.kind)
        self._hooks = ExitStack()
        self.detach = self._hooks.close
        backend: Any = torch.cuda if profile is None else getattr(torch, self.kind, None)
        on_gpu = profile is None or profile.kind != "cpu"
        self._absent = on_gpu and backend is not None and not backend.is_available()

    def attach(self) -> None:
        replaced = Replacements()
        if self._absent and self._profile is None:
            replaced.wrap(torch.cuda, "is_available", self._note_caller)
            replaced.wrap(torch.cuda, "device_count", self._note_caller)
            replaced.wrap(torch.accelerator, "is_available", self._note_caller)
            replaced.wrap(torch.accelerator, "current_accelerator", self._note_caller)
        elif self._absent and self._profile is not None:
            self._hooks.enter_context(warnings_at_callers())
            self._hooks.enter_context(written_for(self._profile, self._note_name, self._as_on_gpu))
            enter, eager = self._hooks.enter_context, torch.compiler.set_stance
            self._hooks.callback(when_imported(COMPILER, lambda: enter(eager("force_eager"))))
            self._hooks.callback(when_imported(QUANTIZED_LAYERS, lambda: enter(nothing_repacked())))
            replaced.wrap(torch.autocast, "__init__", self._note_autocast)
        self._hooks.callback(replaced.close)

    @property
    def sentence(self) -> str:
        """A sentence which says that the CPU replaces the GPU; "" if the script has not named the GPU, or runs on a GPU."""
        if self._profile is None or not self._named:
            return ""
        return f"this machine has no {self._profile.title}, so the script's GPU code runs on the CPU"

    def why_nothing(self) -> str:
        """Return the reason why a script without a training step may need a GPU; "" if the script has not asked for a GPU."""
        asks = "asks whether a GPU is available, and this machine has none"
        return f"{short_source(self.questions[0])} {asks}; {_INSTEAD}" if self.questions else ""

    def explained(self, error: BaseException) -> str:
        """Return a sentence about an error that the missing GPU causes; "" for other errors."""
        lacks = isinstance(error, _ABOUT_NAMES) or _ABOUT_PACKAGES.search(str(error))
        about = not lacks and _ABOUT_GPUS.search(str(error))
        if not self._absent or not (about or self._answered(error)):
            return ""
        place = short_source(line_of(error))
        if self.kind not in ("cpu", "cuda") and self._profile is not None and _NO_CUDA in str(error):
            asks = f"{short_source(line_of_script(error))} asks for the device cuda, which {self._profile.title} does not have"
            return f"{asks}: write {self.kind!r} instead"
        if self._profile is None:
            return f"{place} needs a GPU, but this machine has none; {_INSTEAD}"
        return f"{place} needs a real {self._profile.title}, because the CPU cannot replace the GPU here"

    def _answered(self, error: BaseException) -> bool:
        """Return True if the script raised the error because it looked for a GPU, for example by reading `None.type`."""
        place = line_of(error)
        noticed = isinstance(error, AttributeError) and place in self.questions
        return self._profile is None and (noticed or _ASKING.search(condition_at(place)) is not None)

    def _note_caller(self, ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        caller = frame_above(2)
        if caller is not None and not is_library(caller.f_code.co_filename):
            line = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            self.questions += [] if in_library(line) or line in self.questions else [line]
        return ask(*args, **kwargs)

    def _note_name(self, result: Any = None) -> None:
        """Record that code names the GPU. If `result` is a float64 tensor on an Apple GPU, raise the error of this GPU."""
        self._named = True
        if self.kind == "mps" and isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError(_NO_FLOAT64)

    def _as_on_gpu(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a function with the casts of the GPU's autocast, if the script uses this autocast."""
        if not self._casts or not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        return self._autocast.run(lambda args, kwargs: function(*args, **kwargs), name, args, kwargs)

    def _note_autocast(
        self, init: Any, autocast: Any, device_type: str, dtype: Any = None, *rest: Any, **more: Any
    ) -> None:
        self._casts |= device_type == self.kind
        there = self._default if dtype is None and device_type == self.kind else dtype
        init(autocast, device_type, there, *rest, **more)
        if autocast.device == "cpu" and more.get("enabled", next(iter(rest), True)):
            here = autocast.fast_dtype
            self.device_autocast[here] = self._default if dtype is None else here
