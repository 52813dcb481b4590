"""Remembers which line of a script created, cast or emptied each weight, replaced 4-bit codes, or cast optimizer states."""

import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cache
from traceback import walk_stack
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from isotype.compat.replaced import Replacements
from isotype.compat.standard import frame_above
from isotype.compat.torch import has_values
from isotype.compat.torch_casts import around_weights, weights_in
from isotype.core.dtypes import FLOATS
from isotype.core.names import short
from isotype.core.optimizers import parameters_of
from isotype.core.source import asking_line, is_library, shown
from isotype.model.quantized import quantization_state
from isotype.model.shard import is_sharded, local
from isotype.records.finding import in_library
from isotype.records.trace import CAST_FUNCTIONS

_UNNAMED = re.compile(r"<|.*wrap|inner$|_fn$|(cuda|cpu|xpu|apply|_apply)$")
"""Function names that do not help a reader: decorator wrappers, and methods that the script itself calls."""
_installed = cache(in_library)


_Line = tuple[int, torch.dtype, str]
"""(id of a weight, its dtype, text about the line that set the dtype). Id and dtype show whether the text still applies."""
# No weak reference to a tensor is kept, because torch.utils.swap_tensors refuses tensors with one.
# A module is a key by its id, because a class's `__hash__` may read attributes that its constructor has not set yet.
_history: MutableMapping[nn.Module, dict[str, _Line]] = WeakIdKeyDictionary()
_holders: dict[int, list[tuple[weakref.ref[nn.Module], str]]] = {}
"""Id of a parameter or buffer -> (module, name) of each place that holds it. Places that hold another tensor are stale."""

_codes: MutableMapping[nn.Module, tuple[Any, str]] = WeakIdKeyDictionary()
"""4-bit layer -> (its quantization state, text about the line) when `load_state_dict` replaced the codes, but not the state."""
_emptied: MutableMapping[nn.Module, str] = WeakIdKeyDictionary()
"""Module -> line that has called `to_empty` for it."""
_MOST_FILLED = 1 << 24
"""Larger tensors stay uninitialized memory, which occupies nothing until code sets its values."""


default_dtypes: dict[torch.dtype, str] = {}
"""Dtype -> last line of the script that has set it as torch's default dtype, while lines were recorded."""


StateCast = tuple[str, torch.dtype, torch.dtype, int, str]
state_casts = weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[StateCast, ...]]()
"""Optimizer -> the casts by its last `load_state_dict`, as `Trace.state_casts`, while casts were recorded."""


@contextmanager
def remembered() -> Iterator[None]:
    """In the `with` block, record the lines that create, cast or empty weights, cast optimizer states, or set the default dtype."""
    with around_weights(_registered, _assigned, _copied), Replacements() as replaced:
        replaced.wrap(torch, "set_default_dtype", _default_set)
        replaced.wrap(nn.Module, "_load_from_state_dict", _loading)
        replaced.wrap(torch.optim.Optimizer, "load_state_dict", _states_loaded)
        replaced.wrap(nn.Module, "to_empty", _to_empty)
        yield


def _states_loaded(
    load: Callable[..., None], optimizer: torch.optim.Optimizer, saved: Any, *args: Any, **kwargs: Any
) -> None:
    load(optimizer, saved, *args, **kwargs)
    keys = (key for group in saved["param_groups"] for key in group["params"])
    pairs = zip((saved["state"].get(key, {}) for key in keys), parameters_of(optimizer), strict=False)
    dtypes = Counter(
        (name, value.dtype, loaded.dtype)
        for states, parameter in pairs
        for name, value in states.items()
        if isinstance(value, torch.Tensor) and value.dim() and value.dtype in FLOATS
        if isinstance(loaded := optimizer.state[parameter].get(name), torch.Tensor)
        and loaded.dtype != value.dtype
    )
    line = shown(asking_line())
    state_casts[optimizer] = tuple((*cast, count, line) for cast, count in dtypes.items())


def _default_set(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs)
    if (line := shown(asking_line())) and not in_library(line):  # transformers sets and restores it
        default_dtypes[torch.get_default_dtype()] = short(line)


def _to_empty(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call `to_empty`, and fill the uninitialized memory with NaN, by which `emptied_at` recognizes it."""
    result, line = original(module, *args, **kwargs), short(shown(asking_line()))
    for part in module.modules():
        _emptied[part] = line
        for tensor in map(local, weights_in(part).values()):
            if tensor.is_floating_point() and tensor.numel() <= _MOST_FILLED:
                tensor.detach().fill_(math.nan)
    return result


def emptied_at(module: nn.Module, name: str) -> str:
    """Return the line after which nothing has set the values of a module's weight; "" if there is none."""
    if not (line := _emptied.get(module, "")):
        return ""
    tensor = local(weights_in(module)[name])
    return line if has_values(tensor) and tensor.numel() and tensor.isnan().all() else ""


def set_at(module: nn.Module, name: str) -> str:
    """Return how a module's weight got its dtype: `cast by prepare_model at train.py:12`; "" if this is unknown."""
    tensor, (at, dtype, text) = weights_in(module)[name], _history.get(module, {}).get(name, (0, None, ""))
    return text if (at, dtype) == (id(tensor), tensor.dtype) else ""


def codes_set_at(module: nn.Module) -> str:
    """Return how a 4-bit layer got codes that its quantization state does not belong to; "" if this is unknown."""
    state, text = _codes.get(module, (None, ""))
    return text if quantization_state(module) is state else ""


def _loading(
    load: Callable[..., None], module: Any, states: Mapping[str, Any], prefix: str, *rest: Any
) -> None:
    state: Any = quantization_state(module)
    new: Any = states.get(f"{prefix}weight")
    codes: Any = None if state is None or is_sharded(module.weight) else module.weight
    fits = codes is not None and new is not None and (new.shape, new.dtype) == (codes.shape, codes.dtype)
    changes = fits and not torch.equal(new.to(codes.device), codes)
    load(module, states, prefix, *rest)
    if changes:
        _codes[module] = state, _running_line("loaded")


def _registered(module: nn.Module, name: str, before: torch.dtype | None) -> None:
    tensor, known = weights_in(module)[name], _history.setdefault(module, {})
    holders = _holders_of(tensor)
    if before is None and holders:  # a tied weight
        known[name] = _history[holders[0][0]][holders[0][1]]
    elif tensor.dtype != before:
        quantized = before in FLOATS and not (tensor.dtype in FLOATS or tensor.dtype.is_complex)
        verb = "created" if before is None else "quantized" if quantized else "cast"
        known[name] = id(tensor), tensor.dtype, _running_line(verb)
    elif name in known:
        known[name] = id(tensor), *known[name][1:]
    if name in known and not any(holder is module and key == name for holder, key in holders):
        _holders[id(tensor)] = [(weakref.ref(holder), key) for holder, key in (*holders, (module, name))]


def _assigned(tensor: torch.Tensor, before: torch.dtype) -> None:
    for module, name in _holders_of(tensor):
        _registered(module, name, before)


def _copied(module: nn.Module, copy: nn.Module) -> None:
    weights = weights_in(module)
    for name, tensor in weights_in(copy).items():
        if name in weights and weights[name].dtype == tensor.dtype and (text := set_at(module, name)):
            _history.setdefault(copy, {})[name] = id(tensor), tensor.dtype, text
            _registered(copy, name, tensor.dtype)
    if text := codes_set_at(module):
        _codes[copy] = quantization_state(copy), text


def _holders_of(tensor: torch.Tensor) -> list[tuple[nn.Module, str]]:
    holders = ((ref(), name) for ref, name in _holders.get(id(tensor), ()))
    return [(m, name) for m, name in holders if m is not None and weights_in(m).get(name) is tensor]


def _running_line(verb: str) -> str:
    """Return a text about the script's innermost running line and the library function that the line calls."""
    function = ""
    for frame, _ in walk_stack(frame_above(2)):
        code = frame.f_code
        if is_library(code.co_filename):
            continue
        if not _installed(f"{code.co_filename}:0"):
            by = f" by {function}" if function else ""
            return f"{'loaded' if function == 'from_pretrained' else verb}{by} at {short(f'{code.co_filename}:{frame.f_lineno}')}"
        name = code.co_qualname.split(".")[-2:][0] if code.co_name == "__init__" else code.co_name
        if name not in CAST_FUNCTIONS and not _UNNAMED.match(name):
            function = name
    return ""
