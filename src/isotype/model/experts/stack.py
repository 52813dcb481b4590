"""Stores stacked expert weights `[experts, d1, d2]` in a quantized format. Each expert is quantized separately.

A quantized stack uses `torch.nn.utils.parametrize`, like bitsandbytes 0.50.
`module.parametrizations.gate_up_proj.original` is a frozen parameter with the codes. `module.gate_up_proj` returns
the whole dense weight to any library. isotype calls `QuantizedStack.part`, which dequantizes a few experts.

The codes of an expert are a slice along the first dimension. FSDP2 shards the codes along this dimension. The formats
are:

- 4 bits: uint8 `[experts, d1 * d2 / 2]`, equal to bitsandbytes' codes of the flat weight. No block may contain values
  of two experts. If `d1 * d2` is not a multiple of the block size, the weight stays dense
  (`isotype.core.formats.why_dense`).
- int8: int8 `[experts, d1, d2]`, and a float32 scale for each output. The scales have the shape `[experts, d1, 1]`, or
  `[experts, 1, d2]` if `is_transposed(module)` is True. A value is `code * scale / 127`.
- mxfp4: the same bytes as in the checkpoint (see `isotype.model.experts.mxfp4`).

In a state dict, 4-bit codes are `gate_up_proj` `[n, 1]`, with `.absmax`, `.quant_map` and
`.quant_state.bitsandbytes__nf4`, as in bitsandbytes. int8 codes are `gate_up_proj`, and the scales are
`gate_up_proj.SCB`. mxfp4 has `gate_up_proj_blocks` and `gate_up_proj_scales`, as in gpt-oss. A module with a quantized
stack can be copied, but not pickled.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from isotype.compat.bitsandbytes import dequantize_4bit
from isotype.compat.swapped import Swapped, swap
from isotype.compat.torch import FakeTensor, UncastBuffers, own_modules, own_parameters, state_dict_hooks
from isotype.core.formats import FORMATS, MXFP4
from isotype.model.experts import mxfp4
from isotype.model.walk import is_tuner_layer, listening, places

NESTED = 256
"""Number of 4-bit constants in a block of double quantization (bitsandbytes' `compress_statistics`)."""


class QuantizedStack(UncastBuffers):
    """The parametrization of a stacked weight. It stores the quantization constants, and dequantizes the codes.

    The constants are buffers with bitsandbytes' names in a state dict. The constants move with the model, and are
    never cast.

    Attributes:
        shape: `[experts, d1, d2]` of the dense weight.
        dtype: dtype of dequantized values. Other code may set it.
        nested: True if the constants of a 4-bit weight are quantized to 8 bits.
        transposed: True if d1 is the input dimension, False if d2 is.
    """

    def __init__(
        self,
        storage: str,
        shape: torch.Size,
        dtype: torch.dtype,
        constants: Mapping[str, torch.Tensor],
        *,
        blocksize: int = 64,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.storage, self.shape, self.dtype = storage, torch.Size(shape), dtype
        self.blocksize, self.transposed = blocksize, transposed
        self.nested = "nested_absmax" in constants
        for name, value in constants.items():
            # After a load, transformers would initialize buffers that are not persistent.
            self.register_buffer(name, value)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.part(codes, 0, self.shape[0])

    @torch.no_grad()
    def part(self, codes: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the dense weight of experts `start` to `stop - 1`, `[stop - start, d1, d2]` in new memory."""
        scales: Any = getattr(self, "scales", None)
        if self.storage == MXFP4:
            values = mxfp4.unpack(codes[start:stop], scales[start:stop], self.dtype)
            return values.mT if self.transposed else values
        if self.storage == "int8":
            out = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype, device=codes.device)
            # A CPU casts codes and result in temporary memory. One expert at a time needs less of this memory.
            alone = codes.device.type == "cpu" and not isinstance(codes, FakeTensor)
            for first in range(start, stop, 1 if alone else stop - start):
                last = first + 1 if alone else stop
                torch.mul(codes[first:last], scales[first:last] / 127, out=out[first - start : last - start])
            return out
        return dequantize_4bit(codes[start:stop].reshape(-1, 1), self._state(start, stop))

    def factors(self) -> tuple[torch.Tensor, ...]:
        """Return the float constants of the stack. If the weight contains NaN or infinity, one of these constants is not finite."""
        constants: Any = self
        if self.nested:
            return constants.nested_absmax, constants.offset
        if self.storage == MXFP4:
            return (mxfp4.powers(constants.scales),)
        return (constants.scales if self.storage == "int8" else constants.absmax,)

    def state(self) -> Any:
        """Return bitsandbytes' `QuantState` of the flat 4-bit weight, which shares memory with the constants."""
        constants: Any = self
        state = self._state_of(self.shape, constants.absmax.reshape(-1))
        if self.nested:
            # bitsandbytes saves the value of the offset. A meta tensor has none.
            state.offset = (
                torch.zeros((), dtype=torch.float32) if constants.offset.is_meta else constants.offset
            )
            state.state2, state.nested = self._nested_state(0, None), True
        return state

    def _nested_state(self, first: int, last: int | None) -> Any:
        """Return bitsandbytes' `QuantState` of the constants (quantized to 8 bits) of blocks `first` to `last - 1`."""
        from bitsandbytes.functional import QuantState

        constants: Any = self
        absmax, code = constants.nested_absmax[first:last], constants.nested_code
        return QuantState(absmax, code=code, blocksize=NESTED, dtype=torch.float32)

    def _state(self, start: int, stop: int) -> Any:
        constants: Any = self
        shape = torch.Size((stop - start, *self.shape[1:]))
        absmax = constants.absmax[start:stop].reshape(-1)
        if not self.nested:
            return self._state_of(shape, absmax)
        from bitsandbytes import functional

        blocks = constants.absmax.shape[1]
        first, last = start * blocks // NESTED, -(-stop * blocks // NESTED)
        whole = constants.absmax.reshape(-1)[first * NESTED : last * NESTED]
        nested = self._nested_state(first, last)
        at = start * blocks - first * NESTED
        values = functional.dequantize_blockwise(whole, nested)[at : at + absmax.numel()]
        return self._state_of(shape, values + constants.offset)

    def _state_of(self, shape: torch.Size, absmax: torch.Tensor) -> Any:
        from bitsandbytes.functional import QuantState

        code: Any = self.code
        form, size = FORMATS[self.storage].code, self.blocksize
        return QuantState(absmax, shape, code, size, form, self.dtype)

    def extra_repr(self) -> str:
        return f"{self.storage}, {list(self.shape)}"


def constants_4bit(state: Any, experts: int) -> dict[str, torch.Tensor]:
    """Return a `QuantizedStack`'s constants, which share memory with `state`, the whole stack's `QuantState`."""
    constants = {"absmax": state.absmax.view(experts, -1), "code": state.code}
    if state.nested:
        constants |= {"offset": state.offset, "nested_absmax": state.state2.absmax}
        constants["nested_code"] = state.state2.code
    return constants


def _stack_of(state: Any, shape: torch.Size, dtype: torch.dtype, module: nn.Module) -> QuantizedStack:
    constants, size, transposed = constants_4bit(state, shape[0]), state.blocksize, is_transposed(module)
    return QuantizedStack(state.quant_type, shape, dtype, constants, blocksize=size, transposed=transposed)


# ------------------------------------------------------------------------------------------- stacks in a module


def quantized_stack(module: nn.Module, name: str) -> QuantizedStack | None:
    """Return the parametrization of a module's stacked weight `name`; None for a dense weight."""
    parametrizations: Any = getattr(module, "parametrizations", {})
    return held_stack(parametrizations[name]) if name in parametrizations else None


def codes_of(module: nn.Module, name: str) -> nn.Parameter:
    """Return the frozen parameter that contains the codes of a module's quantized weight `name`."""
    parametrizations: Any = module.parametrizations
    codes: nn.Parameter = parametrizations[name].original
    return codes


def stacked_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (module name, module, parameter name) of each stacked expert weight outside of adapters."""
    for place in places(model):
        module = place.module
        if place.adapter or is_tuner_layer(module) or not _holds_experts(place.name, module):
            continue
        for name in getattr(module, "parametrizations", ()):
            if quantized_stack(module, name) is not None:
                yield place.name, module, name
        for name, value in own_parameters(module).items():
            if value is not None and value.ndim == 3 and value.is_floating_point() and "bias" not in name:
                yield place.name, module, name


def _holds_experts(name: str, module: nn.Module) -> bool:
    layer = isinstance(module, (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d))
    return not layer and "expert" in f"{type(module).__name__} {name.rpartition('.')[2]}".lower()


def is_transposed(module: nn.Module) -> bool:
    """Return True if d1 is the input dimension of the stacked weights `[experts, d1, d2]` of a module."""
    return bool(getattr(module, "is_transposed", False))


def shape_of(module: nn.Module, name: str) -> torch.Size:
    """Return the shape `[experts, d1, d2]` of a stacked weight, which may be quantized."""
    stack = quantized_stack(module, name)
    return module.get_parameter(name).shape if stack is None else stack.shape


def held_stack(holder: object) -> QuantizedStack | None:
    """Return the quantized stack of a `ParametrizationList`; None for any other `holder`."""
    first = holder[0] if isinstance(holder, parametrize.ParametrizationList) else None
    return first if isinstance(first, QuantizedStack) else None


def place_stack(module: nn.Module, name: str, codes: torch.Tensor, stack: QuantizedStack) -> None:
    """Replace the weight `name` of a module by codes and their parametrization."""
    if quantized_stack(module, name) is not None:
        parts: Any = module.parametrizations[name]  # type: ignore[index]
        parts.original = nn.Parameter(codes, requires_grad=False)
        parts[0] = stack
        return
    own_parameters(module)[name] = nn.Parameter(codes, requires_grad=False)
    parametrize.register_parametrization(module, name, stack, unsafe=True)
    _save_and_load(module, name)
    # With this cache, a forward that reads one expert at a time dequantizes the stack only once. Gradient checkpointing
    # may end a forward by an exception, so the second hook is always called.
    module.register_forward_pre_hook(_keep_dense)
    module.register_forward_hook(_drop_dense, always_call=True)


def adopt_stacks(model: nn.Module) -> list[str]:
    """Replace parametrizations of `bitsandbytes.nn.parametrize` by quantized stacks. Return the names of the weights.

    Codes and constants stay in the same memory. A weight does not change if its experts do not fill whole blocks.
    """
    adopted = []
    for path, module in list(model.named_modules()):
        for name, parts in list(getattr(module, "parametrizations", {}).items()):
            state = getattr(parts[0], "quant_state", None)
            if state is None or len(state.shape) != 3 or state.shape[1:].numel() % state.blocksize:
                continue
            experts, codes = state.shape[0], parts.original.data.view(torch.uint8)
            parts.original = nn.Parameter(codes.view(experts, -1), requires_grad=False)
            parts[0] = _stack_of(state, state.shape, state.dtype, module)
            hooks = state_dict_hooks(module)
            for number, hook in list(hooks.items()):  # bitsandbytes' hook expects its own parametrization
                if getattr(hook, "keywords", {}).get("param_name") == name:
                    del hooks[number]
            _save_and_load(module, name)
            adopted.append(f"{path}.{name}")
    return adopted


def _save_and_load(module: nn.Module, name: str) -> None:
    # The hooks get the module as an argument. So they also work on a copy of the module.
    module.register_state_dict_post_hook(partial(_write_state, name=name))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(partial(_read_state, name=name))  # type: ignore[no-untyped-call]


def take_stack(module: nn.Module, name: str) -> tuple[torch.Tensor, QuantizedStack]:
    """Replace a stack by a dense weight on the meta device. Return (codes, parametrization)."""
    stack, codes = quantized_stack(module, name), codes_of(module, name)
    assert stack is not None
    if isinstance(module, Swapped):
        # torch deletes the weight's property from the module's class, but not from a base class.
        swap(module, module.original)
    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    blank = torch.empty(stack.shape, dtype=stack.dtype, device="meta")
    own_parameters(module)[name] = nn.Parameter(blank, requires_grad=False)
    return codes.detach(), stack


_CACHES: list[Any] = []


@listening
def _keep_dense(module: nn.Module, inputs: object) -> None:
    cache = parametrize.cached()
    cache.__enter__()
    _CACHES.append(cache)


@listening
def _drop_dense(module: nn.Module, inputs: object, output: object) -> None:
    if _CACHES:
        _CACHES.pop().__exit__(None, None, None)


def saved_stack(
    codes: torch.Tensor,
    constants: Mapping[str, torch.Tensor],
    module: nn.Module,
    name: str,
    dtype: torch.dtype,
    device: Any,
) -> tuple[torch.Tensor, QuantizedStack]:
    """Return a weight's (codes, parametrization) from the tensors of isotype's or bitsandbytes' state dict.

    Args:
        codes: the entry of the state dict that has the weight's name.
        constants: all other entries whose names begin with the weight's name.
        module, name: the module that has the weight, and the weight's name in `module`.
    """
    shape, codes = shape_of(module, name), codes.to(device)
    scales = next((value for key, value in constants.items() if key.endswith((".SCB", "_scales"))), None)
    if scales is not None:
        form = "int8" if codes.dtype == torch.int8 else MXFP4
        constants = {"scales": scales.to(device)}
        return codes, QuantizedStack(form, shape, dtype, constants, transposed=is_transposed(module))
    from bitsandbytes.functional import QuantState

    stack = _stack_of(QuantState.from_dict(dict(constants), device), shape, dtype, module)
    return codes.view(torch.uint8).view(shape[0], -1), stack


_ENDINGS = {MXFP4: ("_blocks", "_scales"), "int8": ("", ".SCB")}
"""Maps the storage to the endings of the names of codes and scales in a state dict."""


def _write_state(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: object, *, name: str
) -> None:
    """In a new state dict, rename the codes and constants of a stack to their names in checkpoint files."""
    path = f"{prefix}parametrizations.{name}."
    codes = state.pop(f"{path}original", None)
    for constant in [key for key in state if key.startswith(f"{path}0.")]:
        del state[constant]
    stack = quantized_stack(module, name)
    if codes is None or stack is None:
        return
    if stack.storage in _ENDINGS:
        of_codes, of_scales = _ENDINGS[stack.storage]
        state[f"{prefix}{name}{of_codes}"], state[f"{prefix}{name}{of_scales}"] = codes, stack.scales
        return
    state[f"{prefix}{name}"] = codes.view(-1, 1)
    for key, value in stack.state().as_dict(packed=True).items():
        state[f"{prefix}{name}.{key}"] = value


def _read_state(module: nn.Module, state: dict[str, Any], prefix: str, *rest: object, name: str) -> None:
    """In a state dict to load, undo the renaming by `_write_state`."""
    full = f"{prefix}{name}"
    stack = quantized_stack(module, name)
    if stack is None:
        return
    weight, beside = (f"{full}_blocks", f"{full}_scales") if stack.storage == MXFP4 else (full, f"{full}.")
    if weight not in state:
        return
    codes = state.pop(weight)
    constants = {key: state.pop(key) for key in list(state) if key.startswith(beside)}
    codes, saved = saved_stack(codes, constants, module, name, stack.dtype, codes.device)
    path = f"{prefix}parametrizations.{name}"
    state[f"{path}.original"] = codes
    state |= {f"{path}.0.{key}": value for key, value in saved.named_buffers()}


@contextmanager
def seen_dense(model: nn.Module) -> Iterator[None]:
    """In the `with` block, dense parameters without memory replace a model's quantized stacks.

    PEFT (0.21) nests wrappers of parametrized weights in another order than wrappers of parameters
    (`_inject_parameters`). With the order of parametrized weights, the names in an adapter's file would change.
    """
    replaced: list[tuple[nn.Module, Any, Any]] = []
    for module in list(model.modules()):
        names = [name for name in getattr(module, "parametrizations", ()) if quantized_stack(module, name)]
        if not names:
            continue
        lists: Any = own_modules(module)["parametrizations"]
        cls: Any = type(module)
        replaced.append((module, lists, cls))
        plain: Any = cls.original if issubclass(cls, Swapped) else cls
        del own_modules(module)["parametrizations"]
        module.__class__ = plain.__bases__[0]  # as in `parametrize.type_before_parametrizations`
        for name in names:
            stack: Any = lists[name][0]
            blank = torch.empty((), dtype=stack.dtype, device=lists[name].original.device)
            own_parameters(module)[name] = nn.Parameter(blank.expand(stack.shape), requires_grad=False)
    try:
        yield
    finally:
        for module, lists, cls in replaced:
            for name in lists:
                del own_parameters(module)[name]
            own_modules(module)["parametrizations"] = lists
            module.__class__ = cls
