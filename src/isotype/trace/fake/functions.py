"""Simulates what torch does above its dispatcher: another device's autocast, and the errors of composite functions.

A step runs under the CPU's autocast, because `torch.autocast("cuda")` disables itself without a GPU. The mode
`Functions` adds the casts of the simulated device, and undoes the casts that only a CPU makes.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from isotype.compat.replaced import Replacements
from isotype.compat.torch import FakeTensor
from isotype.compat.torch_device import CALLED_INSIDE, cpu_stands_for, fused_attention, names_of, on_cpu
from isotype.compat.triton import without_kernels
from isotype.compat.trl import gpu_head
from isotype.contracts.contract import are_powers_of_two, autocast_lists
from isotype.contracts.families import ONLY_POWERS_OF_TWO
from isotype.core.dtypes import FLOATS, HALVES, dtype_name
from isotype.core.errors import first_line
from isotype.core.names import format_bytes
from isotype.core.operators import given_tensors
from isotype.precision.devices.attention import (
    KERNELS,
    AttentionCall,
    Kernel,
    attention_kernel,
    enabled_attention,
    needs_repeated_heads,
)
from isotype.precision.devices.profile import DeviceProfile
from isotype.records.trace import ATTENTION, NO_ATTENTION_KERNEL, Breach
from isotype.trace.dtype_reads import DTYPE
from isotype.trace.fake.arguments import in_operands_dtype, map_leaves, with_tensors_in, without_floats
from isotype.trace.fake.recorder import FakeRecorder
from isotype.trace.fake.twin import SPARSE

_READS = frozenset({torch.Tensor.shape, torch.Tensor.is_sparse, torch.Tensor.requires_grad})
"""Attributes that are read often. A read runs no operator, and its result is the same on all devices."""
_LOWERED = FLOATS - {torch.float64}  # autocast keeps float64
_SPARSE_PRODUCT = torch.sparse.mm.__name__  # calls `addmm`, which autocast casts
_CALLERS = frozenset({"multi_head_attention_forward", "interpolate"})
"""Functions that call a function in `CALLED_INSIDE`."""
_FROM_LISTS = (torch.tensor, torch.as_tensor)
_PRODUCTS = frozenset({"mm", "spmm", "matmul", "__matmul__"})
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_PACKED = _RECURRENT | {"_pack_padded_sequence", "_pad_packed_sequence"}
_GPUS = frozenset({"cuda", "rocm", "xpu"})
_HALF_TRANSFORMS = frozenset({"cuda", "xpu"})
"""Kinds of devices with float16 Fourier transforms (torch's `promote_type_fft`). "cuda" needs sizes of 2^n."""
_HALVES = {torch.float32: torch.float16, torch.complex64: torch.complex32}


class DeviceAutocast:
    """The autocast of a kind of device, simulated while the CPU's autocast is enabled."""

    def __init__(self, kind: str) -> None:
        self._there, self._here = autocast_lists(kind), autocast_lists("cpu")

    def banned(self, name: str, args: Any, kwargs: Any) -> bool:
        """Return whether the device's autocast refuses the function `name`."""
        return self._there.treatment(name, args, kwargs) == "banned"

    def treatment(self, name: str, args: Any, kwargs: Any) -> str:
        """Return the autocast list that has the function `name`; "" if no list has it, or if the call has an argument `out`."""
        return "" if kwargs.get("out") is not None else self._there.treatment(name, args, kwargs)

    def run(self, call: Callable[[Any, Any], Any], name: str, args: Any, kwargs: Any) -> Any:
        """Return the result of `call(args, kwargs)`, where `call` runs the function `name`."""
        writes, both = kwargs.get("out") is not None, (self._there, self._here)
        there, here = ("" if writes else lists.treatment(name, args, kwargs) for lists in both)
        if there in ("banned", "float32", "promote"):
            floats = {tensor.dtype for _, tensor in given_tensors(args, kwargs) if tensor.is_floating_point()}
            widest = floats.pop() if there == "promote" and len(floats) == 1 else torch.float32
            with torch.autocast("cpu", enabled=False):
                return call(*with_tensors_in(widest, (args, kwargs), HALVES))
        if name == _SPARSE_PRODUCT or (there == "lower" and here != "lower"):
            return call(*with_tensors_in(torch.get_autocast_dtype("cpu"), (args, kwargs), _LOWERED))
        if here in ("float32", "promote"):
            with torch.autocast("cpu", enabled=False):
                return call(args, kwargs)
        return call(args, kwargs)


class Functions(TorchFunctionMode):
    """A function mode that records the running function's name, and applies the autocast lists of the device `profile`."""

    def __init__(self, recorder: FakeRecorder, profile: DeviceProfile) -> None:
        super().__init__()
        self._recorder = recorder
        self._kind, self._foreign, self._profile = profile.kind, profile.kind != "cpu", profile
        self._names = names_of(profile.kind)
        self._stand_in = contextlib.ExitStack()
        self.attention = Attention(profile)
        self._refused: torch.dtype | None = None  # dtype of a recurrent layer that refused its input
        self._lists = DeviceAutocast(profile.kind)

    def __enter__(self) -> Self:
        self._stand_in.enter_context(cpu_stands_for(self._profile))
        self._stand_in.enter_context(without_kernels(self._recorder.launched, FakeTensor))
        if self._kind in _GPUS:
            self._stand_in.enter_context(gpu_head(self._recorder.launched, cuda=self._kind != "xpu"))
        self._stand_in.enter_context(replaced := Replacements())
        replaced.wrap(torch.nn.RNNBase, "check_input", self._check_input)
        for name in CALLED_INSIDE:
            replaced.wrap(torch.nn.functional, name, self._inside)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stand_in.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._recorder.swapped(args), self._recorder.swapped(kwargs) if kwargs else {}
        read = getattr(func, "__self__", None)
        self._recorder.set_trainable(func, *args, *(kwargs or {}).values())
        if read in _READS:
            return func(*args)
        if read is DTYPE:
            self._recorder.reads.note(self._recorder.origin(args[0]))
            return func(*args)
        if read is torch.Tensor.data and len(args) > 1:
            self._recorder.mark(args[0], self._recorder.origin(args[1]))
            return func(*args)
        if func is torch.Tensor.numpy:
            return self._recorder.array(args[0])
        if func is torch.Tensor.__array__:  # numpy.asarray(tensor)
            array = self._recorder.array(args[0])
            return array.astype(kwargs.get("dtype") or array.dtype, copy=False)
        if func is torch.Tensor.tolist:
            return self._recorder.listed(args[0])
        if func is torch.Tensor.__format__ and args[0].dim() == 0:
            return format(args[0].item(), *args[1:])  # torch formats only a plain tensor as its number
        if func is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor):
            args = (args[0], self._within(args[0], args[1]))
        if self._foreign:
            func, args, kwargs = on_cpu(func, args, kwargs, self._names)
        if func is torch.sparse_coo_tensor and len(args) > 2:
            return _sparse(torch.zeros(tuple(args[2]), dtype=args[1].dtype) + 0 * args[1].sum())
        if func is torch.Tensor.to_sparse:
            return _sparse(args[0].clone())
        if name_of(func) in _PRODUCTS and getattr(args[0], SPARSE, False):
            func = torch.sparse.mm
        if func in _FROM_LISTS and args:
            args = (self._numbers(args[0]), *args[1:])
        name, recorder = name_of(func), self._recorder
        before = recorder.function, recorder.autocast, recorder.like
        cast = torch.is_autocast_enabled("cpu")
        recorder.like = recorder.cast_origin(name, args, kwargs)
        recorder.function, recorder.autocast = name, torch.get_autocast_dtype("cpu") if cast else None
        try:
            sparse = name == _SPARSE_PRODUCT
            if cast and (recorder.edited() is None if sparse else self._foreign):
                result = self._autocast(func, name, args, kwargs)
                if sparse and not self._foreign and result.requires_grad and args[0].dtype != result.dtype:
                    result.register_hook(partial(self._of_sparse, args[0]))
            else:
                result = self._call(func, args, kwargs)
            recorder.note_unchanged(name, next(iter(args), None), result)
            if cast:
                recorder.note_widened(self._lists.treatment(name, args, kwargs), result)
            return result
        finally:
            recorder.function, recorder.autocast, recorder.like = before

    def _inside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function as this mode does, also while torch disables the mode, because a function in `_CALLERS` runs."""
        if self._recorder.function not in _CALLERS:
            return function(*args, **kwargs)
        return self.__torch_function__(function, (), args, kwargs)

    def _check_input(self, check: Callable[..., None], layer: Any, value: torch.Tensor, *sizes: Any) -> None:
        """Record that a recurrent layer refuses an input of another dtype than its weights."""
        try:
            check(layer, value, *sizes)
        except ValueError as error:
            weight = layer.weight_ih_l0
            if value.dtype == weight.dtype:
                raise
            if self._recorder.edited() is None:
                breach = Breach(first_line(error), False, weight.dtype)
                operands = [("input", value), ("weight", weight)]
                self._recorder.note(f"torch.{layer.mode.lower()}", operands, breach)
            self._refused = weight.dtype

    def _of_sparse(self, matrix: torch.Tensor, gradient: torch.Tensor) -> None:
        """Record that the backward of a sparse product raises: autograd has stored the matrix before autocast's cast."""
        dtypes = matrix.dtype, gradient.dtype, matrix.dtype
        refused = self._recorder.contracts.refusal("aten._sparse_addmm.default", dtypes)
        breach = Breach("" if refused is None else refused.message, False, gradient.dtype)
        self._recorder.note("aten._sparse_addmm_backward", [("self", matrix), ("grad", gradient)], breach)

    def _within(self, tensor: torch.Tensor, index: torch.Tensor) -> Any:
        """Return `index` modulo the number of rows, because an expert index that the trace assumes may be too large."""
        value = self._recorder.values.of(index)
        if value is None or value.dim() or value.dtype in (torch.bool, torch.uint8) or not tensor.dim():
            return index
        number, rows = int(value), tensor.shape[0]
        return index if -rows <= number < rows else number % rows

    def _numbers(self, value: Any) -> Any:
        """Replace the tensors in nested lists by numbers, because `torch.tensor` would read the tensors' memory."""
        if not isinstance(value, (list, tuple)):
            return value
        listed = self._recorder.listed
        return [listed(item) if isinstance(item, torch.Tensor) else self._numbers(item) for item in value]

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function with the casts of the simulated device. If dtypes cause an error, convert operands and call again."""
        recorder, run = self._recorder, func
        kernel: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if func is scaled_dot_product_attention:
            run, kernel = self.attention.as_on_device(args, kwargs, recorder)
        if recorder.function in _RECURRENT and self._refused is not None:
            (args, kwargs), self._refused = with_tensors_in(self._refused, (args, kwargs)), None
        if recorder.function in _PACKED and getattr(args[1], "dtype", None) == torch.int64:
            run = partial(self._of_packed, func)
        if recorder.function == "dropout" and self._kind in _GPUS:
            run = partial(_dropout, func)
        with kernel:
            try:
                return run(*args, **kwargs)
            except (RuntimeError, ValueError, TypeError) as raised:
                error = raised
                if name_of(func) in ("backward", "grad"):
                    raise  # a graph cannot be traversed twice
                transforms = self._kind in _HALF_TRANSFORMS and name_of(func).startswith("fft_")
                if transforms and args and args[0].dtype == torch.float16:
                    sizes = _transformed_sizes(name_of(func), args, kwargs)
                    if self._kind != "cuda" or are_powers_of_two(sizes):
                        wide = with_tensors_in(torch.float32, (args, kwargs), HALVES)
                        return map_leaves(_as_half, self._call(func, *wide))
                    error = RuntimeError(f"{ONLY_POWERS_OF_TWO} of{sizes}")
                # The recorder has already converted the operands of operators. So a composite function raised this error.
                target = recorder.composite(func, args, kwargs, error)
                if target is None:
                    raise
                if target == torch.int64:
                    tensors = given_tensors(args, kwargs)
                    return self._call(
                        func, *without_floats((args, kwargs), tensors, f"torch.{name_of(func)}")
                    )
                if target == torch.bool:
                    of_masks, of_masks_named = with_tensors_in(target, (args, kwargs), _INTEGERS)
                    return self._call(func, of_masks, of_masks_named)
                converted, named = with_tensors_in(target, (args, kwargs))
                result = run(*converted, **named)
                return in_operands_dtype(result, given_tensors(args, kwargs), target)

    def _of_packed(self, func: Any, *args: Any) -> Any:
        """Return the result of a function of packed sequences. Its kernel cannot read lengths of fake tensors."""
        numbers = self._recorder.values.of(args[1])
        if numbers is None:
            return func(*args)
        if name_of(func) == "_pack_padded_sequence":
            return _pack(args[0], numbers.tolist(), *args[2:])
        if name_of(func) == "_pad_packed_sequence":
            return _pad(args[0], numbers.tolist(), *args[2:])
        return func(args[0], numbers, *args[2:])

    def _autocast(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if self._lists.banned(name, args, kwargs):
            self._recorder.banned(name, args, kwargs)
        return self._lists.run(partial(self._call, func), name, args, kwargs)


def _sparse(dense: torch.Tensor) -> torch.Tensor:
    """Mark a dense fake that replaces a sparse tensor: it has the dtype and the graph of the sparse values."""
    setattr(dense, SPARSE, True)
    return dense


def name_of(func: Any) -> str:
    """Return the Python name of a function; "" if it has none."""
    return str(getattr(func, "__name__", ""))


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_OF_CPU = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
_LEAST_SHARE, _LEAST = 0.01, 1 << 20
"""A note reports attention scores that take at least this share of the step's peak memory, and this many bytes."""


class Attention:
    """Runs attention in plain operators if the device has no fused kernel for a call, and counts the bytes of the scores."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._scores: dict[tuple[torch.dtype, bool], int] = {}

    def as_on_device(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], recorder: FakeRecorder
    ) -> tuple[Callable[..., Any], contextlib.AbstractContextManager[Any]]:
        """Return a function and a context that compute attention for these arguments with the kernel of the device."""
        cast, enabled = recorder.edited() or recorder.autocast, enabled_attention()
        call = _call_of(args, kwargs, cast)
        kernel = None if call is None else attention_kernel(self._profile, call[0], enabled=enabled)
        if kernel == "none":
            recorder.note(ATTENTION, given_tensors(args, kwargs), Breach(NO_ATTENTION_KERNEL, True, None))
        if call is None or kernel not in ("math", "none"):
            # A CPU has only two kernels. If the device has another kernel, the CPU's fused kernel replaces it.
            as_cpu = self._profile.kind == "cpu" or enabled in (KERNELS, {"math"})
            context = contextlib.nullcontext() if as_cpu else attention.sdpa_kernel(_OF_CPU)
            if call is None or (kernel is None and self._profile.kind != "rocm"):
                return scaled_dot_product_attention, context
            return _stand_in(kernel or "flash", call[0], cast), context
        described, scores = call
        key = described.dtype, described.heads != described.key_heads
        self._scores[key] = max(self._scores.get(key, 0), scores)
        return scaled_dot_product_attention, attention.sdpa_kernel(SDPBackend.MATH)

    def notes(self, peak: int) -> Iterator[str]:
        """Yield a note for each kind of attention call that has no fused kernel. `peak` is the step's memory peak in bytes."""
        for (dtype, grouped), scores in self._scores.items():
            if scores < max(_LEAST, _LEAST_SHARE * peak):
                continue
            title, name = self._profile.title, dtype_name(dtype)
            how = f"{format_bytes(scores)} of scores are stored for a layer's attention, because on {title} no fused kernel takes"
            if grouped and needs_repeated_heads(self._profile, dtype):
                yield f"{how} grouped heads in {name}; with fused layers (--fuse, isotype.fuse), keys and values are repeated instead"
            else:
                yield f"{how} this call's heads in {name}"


def _stand_in(kernel: Kernel, call: AttentionCall, cast: torch.dtype | None) -> Callable[..., Any]:
    """Return the function that runs attention as a GPU's fused kernel does.

    A CPU's fused kernel supports neither dropout, nor different head sizes, nor a gradient of the mask.
    """
    takes = kernel in ("efficient", "cudnn") and call.heads == call.key_heads

    def run(*args: Any, **kwargs: Any) -> Any:
        named = _named(args, kwargs)
        mask = named.get("attn_mask")
        beyond = len(set(call.sizes)) > 1 or (mask is not None and mask.requires_grad)
        if not (takes and beyond):
            return scaled_dot_product_attention(**{**named, "dropout_p": 0.0})
        return fused_attention(kernel, **named if cast is None else with_tensors_in(cast, named, _LOWERED))

    return run


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _call_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], autocast: torch.dtype | None
) -> tuple[AttentionCall, int] | None:
    """Return (the call, bytes of the scores that plain operators would store), or None if torch refuses the shapes."""
    named = _named(args, kwargs)
    query, key, value = map(named.get, ("query", "key", "value"))
    if query is None or key is None or value is None or {query.dim(), key.dim(), value.dim()} != {4}:
        return None
    dtype: torch.dtype = query.dtype if autocast is None or query.dtype == torch.float64 else autocast
    sizes = query.shape[-1], key.shape[-1], value.shape[-1]
    call = AttentionCall(dtype, query.shape[1], key.shape[1], sizes, named.get("attn_mask") is not None)
    width = max(dtype.itemsize, torch.float32.itemsize)
    return call, query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * width


def _transformed_sizes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Return the sizes of the signal that a function of `torch.fft` transforms."""
    named = {**dict(zip(("input", "n", "dim"), args, strict=False)), **kwargs}
    sizes, dims = named.get("n", named.get("s")), named.get("dim")
    if sizes is not None:
        return [sizes] if isinstance(sizes, int) else list(sizes)
    if dims is None:
        dims = (-2, -1) if name.endswith("2") else range(args[0].dim()) if name.endswith("n") else -1
    return [args[0].shape[dim] for dim in ([dims] if isinstance(dims, int) else dims)]


def _as_half(leaf: Any) -> Any:
    return leaf.to(_HALVES[leaf.dtype]) if isinstance(leaf, torch.Tensor) else leaf


def _dropout(dropout: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call `dropout` as on a GPU (torch's Dropout.cpp), which stores a mask of bytes. A CPU's mask has the input's dtype."""
    named = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
    x, p, trains = named["input"], named.get("p", 0.5), named.get("training", named.get("train", True))
    fused = trains and not named.get("inplace") and 0 < p < 1 and x.numel()
    return torch.native_dropout(x, p, True)[0] if fused else dropout(*args, **kwargs)


def _pack(rows: torch.Tensor, lengths: Sequence[int], batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    steps = rows.transpose(0, 1) if batch_first else rows
    sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
    return torch.cat([step[:size] for step, size in zip(steps, sizes, strict=False)]), torch.tensor(sizes)


def _pad(
    rows: torch.Tensor, sizes: list[int], batch_first: bool, padding: float, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    padded = rows.new_full((max(longest, len(sizes)), sizes[0], *rows.shape[1:]), padding)
    for step, part in enumerate(torch.split(rows, sizes)):
        padded[step, : len(part)] = part
    lengths = torch.tensor([sum(size > row for size in sizes) for row in range(sizes[0])])
    return padded.transpose(0, 1) if batch_first else padded, lengths
