"""torch: simulates a device that this machine does not have, for code that names it.

A trace always computes on CPU tensors. The CPU replaces the device that code names: `x.to("cuda")`, `torch.zeros(3,
device="cuda")`, `with torch.autocast("cuda")`. Streams, events and counters return the values of an idle device.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from threading import Thread
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch.amp import autocast_mode
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode

from isotype.compat.replaced import Replacements, replace
from isotype.compat.standard import frame_above
from isotype.compat.torch import FUNCTION_MODES, put_under, take_out

_DEVICE_TYPES = {"rocm": "cuda"}
_BY_DEVICE: tuple[tuple[Any, str], ...] = (
    (torch, "is_autocast_enabled"),
    (torch, "get_autocast_dtype"),
    (torch, "set_autocast_enabled"),
    (torch, "set_autocast_dtype"),
    (torch.autocast, "__init__"),
    (autocast_mode, "_cast"),  # `custom_fwd(cast_inputs=…)` casts tensors on the named device
)
# Functions that wait for the device or return its state -> their results on an idle device. Random numbers are from the
# CPU's generator.
_QUIET: Mapping[str, Any] = {
    **dict.fromkeys(("synchronize", "empty_cache", "ipc_collect", "set_device")),
    **dict.fromkeys(("manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all")),
    **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated")),
    **dict.fromkeys(("current_device", "current_device_index", "initial_seed"), 0),
    "is_current_stream_capturing": False,
    "memory_stats": {},
    "memory_summary": "",
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "current_allocated_memory"), 0),
    **dict.fromkeys(("memory_reserved", "max_memory_reserved", "driver_allocated_memory"), 0),
}
_RANGES = ("range_push", "range_pop", "range_start", "range_end", "mark")
_EVERY_TYPE = type("EveryType", (), {"__contains__": lambda *_: True})()
_STREAMS = ("Stream", "Event", "stream", "current_stream", "default_stream", "device", "device_of")
_LEGACY_TENSORS = tuple(
    f"{name}Tensor"
    for name in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
)
_KINDS = ("cpu", "cuda", "mps", "xpu")
Run = Callable[[Callable[..., Any], Any, Any], Any]
"""Runs a torch function on its arguments: `run(function, args, kwargs)`."""
Named = Callable[..., None]


def device_type(kind: str) -> str:
    """Return torch's device type for a kind of device: `"cuda"` for `"cuda"` and `"rocm"`."""
    return _DEVICE_TYPES.get(kind, kind)


@contextlib.contextmanager
def cpu_stands_for(profile: Any) -> Iterator[None]:
    """Let the autocast of `profile`'s device cast CPU tensors, and let torch's functions return the device's properties."""
    simulated = device_type(profile.kind)
    if simulated == "cpu":
        yield
        return
    default, before = torch.get_autocast_dtype(simulated), torch.get_autocast_dtype("cpu")
    with contextlib.ExitStack() as stack:
        for owner, name, new in (*_changes(simulated), *_facts(simulated, profile)):
            stack.callback(replace(owner, name, new))
        torch.set_autocast_dtype("cpu", default)
        stack.callback(torch.set_autocast_dtype, "cpu", before)
        yield


@contextlib.contextmanager
def written_for(
    profile: Any,
    named: Named = lambda *_: None,
    run: Run = lambda f, args, kwargs: f(*args, **kwargs),
) -> Iterator[None]:
    """In the `with` block, code that names the simulated device makes models and tensors on the CPU.

    In the block, torch reports that the device is available. Libraries may cache this, so use the function only in a
    process that does nothing else. `named` is called whenever code asks for the device, or creates or moves a tensor
    there, with the tensor in the last case. `run` runs a torch function: by default with the CPU's autocast.
    """
    simulated = device_type(profile.kind)
    with contextlib.ExitStack() as stack:
        if simulated != "cpu":
            default = torch.get_autocast_dtype("cpu")
            stack.enter_context(cpu_stands_for(profile))
            torch.set_autocast_dtype("cpu", default)  # for code that names the CPU
            replaced = stack.enter_context(Replacements())
            _answer(replaced, simulated, named)
            _redirect(replaced, names_of(profile.kind), named, run)
            mode = _OnCPU(names_of(profile.kind), named, run)
            stack.callback(take_out, mode)
            put_under(mode)
        yield


CALLED_INSIDE = "softmax", "adaptive_avg_pool3d", "scaled_dot_product_attention"
"""Functions that other functions of torch.nn.functional call. While those run, torch disables the function mode."""
_OF_GPUS = ("device_ids", "output_device")
_NEEDS_GPU = ("bitsandbytes", "isotype", "triton", "torch._", "torch.utils.data")
"""Modules that load kernels for an available GPU, start threads for it, or need parameters on it."""


def _answer(replaced: Replacements, simulated: str, named: Named) -> None:
    """Let torch report that the simulated device is available, except to modules in `_NEEDS_GPU`."""
    backend = getattr(torch, simulated)

    def answer(here: Any, there: Any, _ask: Callable[..., Any], *_: Any, **__: Any) -> Any:
        asking = str(frame_above(2).f_globals.get("__name__"))
        if asking.startswith(_NEEDS_GPU):
            return here
        if not asking.startswith("torch."):
            named()
        return there

    for owner in (backend, torch.accelerator, *([torch.backends.mps] if simulated == "mps" else [])):
        replaced.wrap(owner, "is_available", partial(answer, False, True))
    for owner in (backend, torch.accelerator):
        replaced.wrap(owner, "device_count", partial(answer, 0, 1))
    replaced.wrap(torch.accelerator, "current_accelerator", partial(answer, None, torch.device(simulated)))


def _redirect(replaced: Replacements, names: re.Pattern[str], named: Named, run: Run) -> None:
    """Use the CPU for the simulated device where no function mode is active: in some functions, new threads and backwards."""

    def load(load: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        by_name = map_location is None or isinstance(map_location, Mapping)
        return load(f, "cpu" if by_name else _cpu_for(map_location, names), *args, **kwargs)

    def redirected(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _OnCPU(names, named, run):
            return original(*args, **kwargs)

    def inside(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if FUNCTION_MODES.length() else run(original, args, kwargs)

    def moved(move: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        move(module, *args, **kwargs)
        if any(_is_named(place, names) for place in (*args, kwargs.get("device"))):
            for tensor in (*module.parameters(), *module.buffers()):
                named(tensor)
        return module

    replaced.wrap(torch, "load", load)
    replaced.wrap(torch, "set_default_device", lambda default, device: default(_cpu_for(device, names)))
    replaced.wrap(torch.nn.Module, "to", moved)
    for name in CALLED_INSIDE:
        replaced.wrap(torch.nn.functional, name, inside)
    replaced.wrap(Thread, "run", redirected)
    replaced.wrap(torch.autograd, "_engine_run_backward", redirected)
    if torch.distributed.is_available():

        def start(start: Callable[..., None], backend: Any = None, *args: Any, **kwargs: Any) -> None:
            start("gloo" if backend is None or "nccl" in backend else backend, *args, **kwargs)

        def wrap(init: Callable[..., None], wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            more = {name: value for name, value in kwargs.items() if name not in _OF_GPUS}
            init(wrapper, module, *(None for _ in args[:2]), *args[2:], **more)

        replaced.wrap(torch.distributed, "init_process_group", start)
        replaced.wrap(torch.nn.parallel.DistributedDataParallel, "__init__", wrap)


class _OnCPU(TorchFunctionMode):
    is_lowest = True  # a recorder, above it, records a call before its casts

    def __init__(self, names: re.Pattern[str], named: Named, run: Run) -> None:
        super().__init__()
        self._names, self._named, self._run = names, named, run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        places = (*args, kwargs.get("device"))
        is_named = func in _CALLS_TO_MOVE or any(_is_named(place, self._names) for place in places)
        result = self._run(*on_cpu(func, args, kwargs, self._names))
        if is_named:
            self._named(result)
        return result


def _changes(simulated: str) -> list[tuple[Any, str, Any]]:
    """Return (owner, attribute name, new value) for everything that a simulation replaces in torch."""
    backend = getattr(torch, simulated)
    answers = {name: _quiet(result) for name, result in _QUIET.items()}
    answers |= dict.fromkeys(_STREAMS, _Idle)
    answers |= {name: getattr(torch, name) for name in _LEGACY_TENSORS}
    answers["get_rng_state"] = lambda *_, **__: torch.get_rng_state()
    answers["get_rng_state_all"] = lambda: [torch.get_rng_state()]
    changes: list[tuple[Any, str, Any]] = [
        (owner, name, _renamed(getattr(owner, name), simulated)) for owner, name in _BY_DEVICE
    ]
    owners = backend, torch.accelerator, getattr(backend, "random", None)
    changes += [(owner, name, answers[name]) for owner in owners for name in answers if hasattr(owner, name)]
    # torch checks the arguments of `record_stream` before it calls a function mode.
    changes += [(torch.Tensor, "record_stream", _quiet(None))]
    changes += [(torch, "Generator", _Generators("Generator", (), {}))]
    if simulated in ("cuda", "xpu"):  # as on a GPU, optimizers update all parameters at once by default
        changes += [(torch_optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])]
        changes += [(torch_optimizer, "_foreach_supported_types", _EVERY_TYPE)]
    int8: Any = sys.modules.get("bitsandbytes.autograd._functions")
    if simulated != "xpu" and int8 is not None:  # bitsandbytes dequantizes int8 weights only on a CPU and XPU
        changes += [(int8, "MatMul8bitFp", int8.MatMul8bitLt), (int8.logger, "warning", _quiet(None))]
    flex: Any = sys.modules.get("torch.nn.attention.flex_attention")
    if simulated == "cuda":
        if flex is not None:  # without the switch, torch would compile the kernel
            changes += [
                (flex, "_validate_device", _quiet(None)),
                (flex, "flex_attention_hop", _flex_attention),
                (flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
            ]
        changes += [(torch.cuda.nvtx, name, _quiet(None)) for name in _RANGES]
        changes += [(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cpu"))]
        changes += [(torch, "set_autocast_gpu_dtype", partial(torch.set_autocast_dtype, "cpu"))]
    return changes


def _facts(simulated: str, profile: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, attribute name, new function) for each torch function about a property in `profile`."""
    backend, memory = getattr(torch, simulated), profile.memory_bytes
    if hasattr(backend, "is_bf16_supported"):
        rate = profile.supports(torch.bfloat16)

        def is_bf16_supported(including_emulation: bool = True) -> bool:
            return rate == "native" or (including_emulation and rate == "emulated")

        yield backend, "is_bf16_supported", is_bf16_supported
    if hasattr(backend, "get_device_name"):
        yield backend, "get_device_name", _quiet(profile.title)
    if profile.capability is not None:
        major, minor = profile.capability
        properties = SimpleNamespace(name=profile.title, major=major, minor=minor, total_memory=memory)
        yield backend, "get_device_capability", _quiet(profile.capability)
        yield backend, "get_device_properties", _quiet(properties)
    if hasattr(backend, "mem_get_info") and memory is not None:
        yield backend, "mem_get_info", _quiet((memory, memory))


def _renamed(function: Callable[..., Any], simulated: str) -> Callable[..., Any]:
    """Wrap `function` so that it gets `"cpu"` in place of the simulated device's name."""
    has_default = function is torch.is_autocast_enabled  # without arguments, it returns CUDA's setting

    def renamed(value: Any) -> Any:
        return "cpu" if isinstance(value, str) and value == simulated else value

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if has_default and not args and not kwargs:
            args = ("cuda",)
        named = {name: renamed(value) for name, value in kwargs.items()}
        return function(*map(renamed, args), **named)

    return call


def _quiet(result: Any) -> Callable[..., Any]:
    return lambda *_, **__: result


class _Idle:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, *_: Any) -> float:
        return 0.0

    def record_event(self, *_: Any) -> Self:
        return self

    def synchronize(self, *_: Any) -> None: ...

    record = wait = wait_event = wait_stream = synchronize


class _Generators(type):
    """Metaclass of a class that replaces `torch.Generator` and creates CPU generators for any device."""

    _real = torch.Generator

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return cls._real()

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, cls._real)


def _flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: Any, _: Any, scale: float, *__: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replaces FlexAttention's kernel, which has no backward on CPUs. Has the kernel's operands and memory use.

    The kernel casts its operands to autocast's dtype. One call of `score` shows a trace which tensors `score` uses.
    """
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    repeats = query.shape[1] // key.shape[1]
    same = (head.to(cast) for head in (key, value))
    heads = (head.repeat_interleave(repeats, 1) if repeats > 1 else head for head in same)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with torch.autocast("cpu", enabled=False):
        out, statistics = attend(query.to(cast), *heads, scale=scale)
        index = torch.zeros((), dtype=torch.int64)
        modified = score(torch.zeros(()), index, index, index, index)
    if modified.requires_grad:
        out = out + 0 * modified.to(out.dtype)
    return out, statistics, statistics


def fused_attention(
    kernel: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """Compute `scaled_dot_product_attention` on fake tensors by the operator of a GPU's `kernel` (`efficient`, `cudnn`)."""
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    run = {
        "efficient": torch.ops.aten._scaled_dot_product_efficient_attention,
        "cudnn": torch.ops.aten._scaled_dot_product_cudnn_attention,
    }[kernel]
    saves = torch.is_grad_enabled()
    out: torch.Tensor = run(query, key, value, attn_mask, saves, dropout_p, is_causal, scale=scale)[0]
    return out


def on_cpu(func: Any, args: Any, kwargs: Any, named: re.Pattern[str]) -> tuple[Any, Any, Any]:
    """Return (function, args, kwargs) of a torch call. The CPU replaces each device whose name matches `named`."""
    if func is torch.device:  # only a name: tensors that are created or moved there go to the CPU
        kinds = filter(named.fullmatch, _KINDS) if args and type(args[0]) is int else ()
        return func, (*kinds, *args), kwargs
    if func in _CALLS_TO_MOVE:
        return torch.Tensor.cpu, args[:1], {}
    if func is torch.Tensor.get_device:
        return _quiet(0), args, kwargs
    if func in _IS_ON:
        return _quiet(named.fullmatch(_IS_ON[func]) is not None), args, kwargs
    if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
        args = (args[0], "cpu", *args[2:])
    elif func is _PARSE_TO and args and type(args[0]) is int:
        args = ("cpu", *args[1:])
    if any(type(arg) in (str, torch.device) for arg in args):
        args = tuple(_cpu_for(arg, named) for arg in args)
    if "device" in kwargs:
        number = type(kwargs["device"]) is int
        kwargs = {**kwargs, "device": "cpu" if number else _cpu_for(kwargs["device"], named)}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    return func, args, kwargs


_PARSE_TO = torch._C._nn._parse_to
_CALLS_TO_MOVE = frozenset((torch.Tensor.cuda, torch.Tensor.xpu, torch.Tensor.pin_memory))
_IS_ON = {inspect.getattr_static(torch.Tensor, f"is_{kind}").__get__: kind for kind in _KINDS}
_LEGACY_NAME = re.compile(r"torch\.(cuda|xpu|mps)\.(\w+Tensor)")


def _is_named(value: Any, named: re.Pattern[str]) -> bool:
    return type(value) in (str, torch.device) and named.fullmatch(str(value)) is not None


def _cpu_for(value: Any, named: re.Pattern[str]) -> Any:
    if _is_named(value, named):
        return torch.device("cpu")
    if type(value) is str and (legacy := _LEGACY_NAME.fullmatch(value)):
        return f"torch.{legacy[2]}"
    return value


def names_of(kind: str) -> re.Pattern[str]:
    """Return a pattern for the simulated device's name in code, with or without an index."""
    return re.compile(rf"{re.escape(device_type(kind))}(:\d+)?")
