"""Values of small tensors that depend on no weight: token ids, masks, positions, image grids.

A model's code branches on some values, such as the number of images or the rows of an expert. Values that follow from
the inputs alone are computed and stored on the fake tensors. Values that depend on weights are assumed, because the
dtypes of a step do not depend on them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, cast

import torch

from isotype.compat.torch import (
    FakeTensor,
    operator_packet,
    storage_key,
    storage_of,
    unset_fake_temporarily,
    without_functions,
    without_modes,
)
from isotype.core.dtypes import HALVES
from isotype.core.operators import leaves
from isotype.core.source import shown
from isotype.precision.devices.simulated import VALUE
from isotype.records.trace import ONLY_WIDE
from isotype.trace.fake.arguments import map_leaves
from isotype.trace.fake.twin import fake_like
from isotype.trace.fake.unknown import Numbers
from isotype.trace.operator_call import OperatorCall

aten = torch.ops.aten

LIMIT = 1 << 14
"""Maximum number of elements of a tensor whose value is stored."""
_MOST_ANGLES = 1 << 18
"""Maximum number of elements of a tensor whose rounding is tracked: the angles of 4,096 positions in heads of 128."""

_GUESSED = "_isotype_guessed"
_LARGE = "_isotype_large"
_EXPANDED = "_isotype_expanded"
_EXACT = "_isotype_exact"
_TABLE = "_isotype_table"
"""Attribute of a tensor whose elements are unknown entries of a known tensor: `alphas_cumprod[timesteps]`."""
_SELECTING = frozenset({
    aten.index, aten.index_select, aten.gather, aten.view, aten.expand, aten.unsqueeze, aten.clone, aten.rsub,
})  # fmt: skip
# Operators for which the rounding of the operand matters: absolute, for angles, and relative to the operand.
_CIRCULAR = frozenset({aten.sin.default, aten.cos.default})
_MAGNIFYING = frozenset({
    aten.sqrt.default, aten.rsqrt.default, aten.log.default, aten.reciprocal.default, aten.pow.Tensor_Scalar,
})  # fmt: skip
_COUNTING = frozenset({aten.arange.default, aten.arange.start, aten.arange.start_step, aten._to_copy.default})
ROUNDED = _CIRCULAR | _MAGNIFYING | _COUNTING
_STAND_IN_ROWS = 4
_MOST_EXPERTS = 1024
# Operators whose result depends only on the shape of the operand.
_SHAPE_ONLY = frozenset(
    {aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full}
)
# Conditions that are false in every working step: if one is true, the code raises an error.
_NEVER = frozenset({aten.isinf, aten.isnan})
# Factorizations return `info`, which is nonzero after a failure. The code then raises an error.
_FACTORISATIONS = frozenset({
    aten.linalg_cholesky_ex, aten.linalg_inv_ex, aten.linalg_lu_factor_ex, aten.linalg_ldl_factor_ex, aten._linalg_solve_ex,
})  # fmt: skip
# Comparisons of floats are guessed. Comparisons of integers find the rows of experts, see `rows`.
_COMPARISONS = frozenset({aten.gt, aten.ge, aten.lt, aten.le})
# Conditions on all elements, as in checks of arguments. `Numbers` chooses a value with which the code continues.
_REDUCTIONS = frozenset({aten.any, aten.all, aten._is_all_true})
# Operators that are also computed for large values: models use them to find images of zeros, padding, packed documents.
_COUNTED = frozenset({
    aten.view, aten.select, aten.slice, aten._to_copy, aten.eq, aten.ne, aten.sum, aten.any, aten.all,
    aten.cat, aten.sub, aten.cumsum, aten.alias,
})  # fmt: skip
_UNSET = frozenset({aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided})
_DRAWS = frozenset({aten.rand, aten.randint, aten.randperm, aten.uniform_})
_UNREAD = _SHAPE_ONLY | _NEVER | _UNSET | _DRAWS
"""Operators whose result does not depend on the values of their operands."""


class Values:
    """Stores known values as attributes of fake tensors, and assumes unknown values."""

    def __init__(self) -> None:
        # Number of experts of the last router. All experts are assumed to get equal shares of the tokens.
        self._experts = 0
        # Storages whose values are unknown after a write. They are kept alive, because a new storage could get the same
        # address.
        self._unknown: dict[int, torch.UntypedStorage] = {}
        self.numbers = Numbers()

    def give(self, tensor: torch.Tensor, value: torch.Tensor, counted: bool = False) -> None:
        """Store the value of a fake tensor if the value is small, `counted`, or an expanded mask."""
        if value.layout != torch.strided or value.device.type != "cpu":
            return
        if value.numel() <= (_MOST_ANGLES if hasattr(value, _EXACT) else LIMIT):
            setattr(tensor, VALUE, value)
        elif value.dtype == torch.bool and 0 in value.stride() and not hasattr(value, _LARGE):
            setattr(tensor, _EXPANDED, value)  # expanded over hidden values; only its elements are counted
        elif counted or hasattr(value, _LARGE):
            setattr(tensor, _LARGE, value)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a fake tensor; None if it is unknown."""
        if isinstance(tensor, FakeTensor):
            value: torch.Tensor | None = getattr(tensor, VALUE, None)
            unknown = value is None or (self._unknown and storage_of(value) in self._unknown)
            return None if unknown else value
        small = tensor.device.type == "cpu" and tensor.numel() <= LIMIT and tensor.layout == torch.strided
        return tensor if small else None

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the known value of a tensor into which an operator has written unknown values."""
        value = getattr(tensor, VALUE, getattr(tensor, _LARGE, None))
        if value is not None:
            storage = value.untyped_storage()
            self._unknown[storage_key(storage)] = storage

    def succeed(self, func: Any, result: Any) -> None:
        """If an operator factorizes a matrix with unknown values, set its result `info` to 0: success."""
        if operator_packet(func) in _FACTORISATIONS:
            info = result[-1]
            with unset_fake_temporarily():
                self.give(info, torch.zeros(info.shape, dtype=info.dtype))

    def compute(self, call: OperatorCall) -> Any:
        """Return the real result of an operator with known operands; None if an operand is unknown."""
        func, args, kwargs, tensors = call.func, call.args, call.kwargs, call.tensors
        packet = operator_packet(func)
        counted, shape_only = _LARGE if packet in _COUNTED else "", packet in _SHAPE_ONLY
        values = [self._read(tensor, counted) for _, tensor in tensors]
        if packet not in _UNREAD and any(value is None for value in values):
            return _guess(tensors) if packet in _COMPARISONS else None
        random = packet not in _DRAWS and torch.Tag.nondeterministic_seeded in func.tags
        if packet in _UNSET or random or not (tensors or packet in _DRAWS or _small_factory(args)):
            return None
        guessed = not shape_only and any(hasattr(value, _GUESSED) for value in values)

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
            value = self._read(leaf, counted)
            return torch.empty(leaf.shape, dtype=leaf.dtype) if value is None else value

        with unset_fake_temporarily():
            if packet in _DRAWS:
                return _drawn(packet, args, kwargs)
            if packet in _NEVER:
                never = torch.zeros((), dtype=torch.bool).expand(tensors[0][1].shape)
                setattr(never, _LARGE, None)
                return never
            if shape_only and tensors[0][1].numel() > LIMIT:
                return None
            try:
                result = func(*map_leaves(real, args), **map_leaves(real, kwargs))
            except RuntimeError:
                return None  # mixed dtypes, or no kernel: the contract decides what happens
            if guessed and packet in _REDUCTIONS and result.numel() == 1:
                return None
            if guessed and packet is aten.all:
                result = torch.ones_like(result)
            if counted and any(hasattr(tensor, _LARGE) for _, tensor in tensors):
                setattr(result, _LARGE, None)
            return map_leaves(_as_guessed, result) if guessed else result

    def _read(self, tensor: torch.Tensor, counted: str) -> torch.Tensor | None:
        large: torch.Tensor | None = getattr(tensor, counted, None) if counted else None
        return self.of(tensor) if large is None or storage_of(large) in self._unknown else large

    # ------------------------------------------------------------------------------------------------- rounding

    def came_rounded(self, tensor: torch.Tensor, name: str, written: bool = False) -> None:
        """Assume that a known 16-bit input was rounded: that its exact value is half a unit in the last place larger.

        `written` is True for a buffer whose numbers are written in the code. Integers in such a buffer are exact.
        """
        value = getattr(tensor, VALUE, None)
        if value is not None and value.dtype in HALVES:
            with without_functions(), without_modes():
                exact = value.double()
                half_unit = torch.full_like(exact, torch.finfo(value.dtype).eps / 4)
                rounded = exact + torch.ldexp(half_unit, torch.frexp(exact)[1])
                exact = torch.where(exact == exact.round(), exact, rounded) if written else rounded
            setattr(value, _EXACT, (exact, name))

    def track_rounding(self, call: OperatorCall, value: Any) -> None:
        """Compute an operator's result without rounding to 16 bits, and store it as an attribute of `value`."""
        func, args, kwargs, tensors = call.func, call.args, call.kwargs, call.tensors
        operands = [self.of(tensor) for _, tensor in tensors]
        rounded = [getattr(operand, _EXACT)[1] for operand in operands if hasattr(operand, _EXACT)]
        small = isinstance(value, torch.Tensor) and value.numel() <= _MOST_ANGLES
        if not small or not value.is_floating_point() or any(operand is None for operand in operands):
            return
        # A cast, and an operator that returns integers in 16 bits (`arange`, or their product with a number).
        begins = value.dtype in HALVES and not any(tensor.dtype in HALVES for _, tensor in tensors)
        if not rounded and not begins and func is not aten._to_copy.default:
            return
        if begins and not tensors:
            kwargs = {**kwargs, "dtype": torch.float64}

        def exact_of(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return torch.float64 if leaf in HALVES or leaf is torch.float32 else leaf
            operand = self.of(leaf)
            assert operand is not None
            exact = operand.double() if operand.is_floating_point() or begins else operand
            return getattr(operand, _EXACT, (exact,))[0]

        with without_modes():
            try:
                exact = func(*map_leaves(exact_of, args), **map_leaves(exact_of, kwargs))
            except RuntimeError:
                return  # a view that depends on the dtype's size, or a rounded index
        setattr(value, _EXACT, (exact, rounded[0] if rounded else shown(call.place.source)))

    def rounding(self, call: OperatorCall, result: torch.Tensor | None) -> tuple[float, str]:
        """Return `Call.off` and `Call.rounded_at`. `result` is the operator's result if it is known."""
        first = call.args[0]
        value: Any = result if call.func in _COUNTING else getattr(first, _TABLE, self.of(first))
        exact, source = getattr(value, _EXACT, (None, ""))
        if value is None or exact is None or not value.numel():
            return 0.0, ""
        with without_modes():
            exact = exact.double()  # a cast may return float8
            moved = (exact - value.double()).abs() / (exact.abs() if call.func in _MAGNIFYING else 1.0)
            fractional = call.func in _COUNTING and bool((exact != exact.round()).any())
            return 0.0 if fractional else float(moved.nan_to_num(0.0, 0.0, 0.0).max()), source

    def select(self, call: OperatorCall, result: Any) -> None:
        """Store on `result` the table with rounded entries from which an operator selects, moves or subtracts entries."""
        packet = operator_packet(call.func)
        table = getattr(call.args[0], _TABLE, self.of(call.args[0])) if packet in _SELECTING else None
        if not hasattr(table, _EXACT):
            return
        if packet is aten.rsub:
            changed = call.but((table, *call.args[1:]), call.kwargs)
            with without_modes():
                table = call.func(*changed.args, **changed.kwargs)
            self.track_rounding(changed, table)
        setattr(result, _TABLE, table)

    def emptied(self, source: torch.Tensor, result: torch.Tensor) -> int:
        """Return the number of rows that are finite in `source`, but minus infinity in the float16 cast `result`."""
        value = self.of(source)
        if value is None or result.dtype != torch.float16 or value.dtype in (result.dtype, torch.bool):
            return 0
        if not value.is_floating_point() or not result.dim() or not result.numel():
            return 0
        with without_modes():
            rows = torch.isneginf(result).all(-1) & torch.isfinite(value).all(-1)
            return int(rows.sum())

    # ------------------------------------------------------------------------------------------------ stand-ins

    def stand_in(self, call: OperatorCall) -> Callable[..., Any] | None:
        """Return the function to call instead of the operator; None to call the operator itself."""
        func, args = call.func, call.args
        if func is aten.nonzero.default:
            return self._nonzero
        if func is aten.masked_select.default:
            return lambda tensor, mask: tensor.new_empty((self._nonzero(mask).shape[0],))
        if func is aten.index.Tensor and any(map(_is_mask, args[1])):
            return self._index
        dim = args[2] if len(args) > 2 else call.kwargs.get("dim", 0)
        if func is aten.split_with_sizes.default and sum(args[1]) != args[0].shape[dim]:
            return _split
        if func is aten._local_scalar_dense.default:
            return self.numbers.read
        return STAND_INS.get(func) or _OF_INT8.get(call.name)

    def rows(self, mask: torch.Tensor) -> int:
        """Return the number of True elements that an unknown mask is assumed to have.

        A short vector selects the experts that get tokens: all its elements are True. If a longer mask follows, it
        selects the tokens of one expert, and all experts get equally many tokens. In any other mask, `_STAND_IN_ROWS`
        elements are True.
        """
        if mask.dim() == 1 and mask.numel() <= _MOST_EXPERTS:
            self._experts = mask.numel()
            return mask.numel()
        if self._experts and mask.numel() > self._experts:
            return max(1, mask.numel() // self._experts)
        return min(mask.numel(), _STAND_IN_ROWS)

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        known = self._read(mask, _EXPANDED)
        if known is not None:
            with unset_fake_temporarily():
                once = known[tuple(slice(None if stride else 1) for stride in known.stride())]
                count = int(once.count_nonzero()) * (known.numel() // max(1, once.numel()))
            return torch.zeros((count, known.dim()), dtype=torch.long)
        rows = self.rows(mask)
        if mask.dim() == 1 and rows == mask.numel():
            places = torch.arange(rows).unsqueeze(1)
            with unset_fake_temporarily():
                self.give(places, torch.arange(rows).unsqueeze(1))
            return places
        return torch.zeros((rows, mask.dim()), dtype=torch.long)

    def _index(self, tensor: torch.Tensor, indices: Any) -> torch.Tensor:
        numbers: list[Any] = []
        for index in indices:
            numbers += list(self._nonzero(index).unbind(1)) if _is_mask(index) else [index]
        entries: torch.Tensor = aten.index.Tensor(tensor, numbers)
        return entries


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def known_values(inputs: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the inputs whose values the traced code may read: small inputs, all integers, and tiled images."""
    return {
        name: value.detach().cpu().clone() if value.numel() <= LIMIT else value.detach().cpu()
        for name, value in inputs
        if not value.is_meta
        and not isinstance(value, FakeTensor)
        and value.layout is torch.strided
        # Missing tiles of images `[rows, tiles, channels, height, width]` are zeros.
        and (value.numel() <= LIMIT or value.dim() > 4 or not value.is_floating_point())
    }


@cache
def is_data_dependent(func: Any) -> bool:
    """Return whether an operator returns a Python number, or a tensor whose shape depends on the values of the operands."""
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


def fakes_of(result: Any, values: Values, mode: Any) -> Any:
    """Return fake tensors for a real result, and store its values on them."""

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        fake_leaf = fake_like(leaf, mode)
        values.give(fake_leaf, leaf)
        return fake_leaf

    return map_leaves(fake, result)


def _guess(tensors: Sequence[tuple[str, torch.Tensor]]) -> torch.Tensor | None:
    """Return an assumed result of a comparison. Every second element is True, so both a mask and its inverse select some.

    Return None for operands that are not floats, and for vectors, because code may select experts by such a result.
    """
    if not all(tensor.is_floating_point() for _, tensor in tensors):
        return None
    shapes = (tensor.shape for _, tensor in tensors)
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    if shape.numel() > LIMIT or len(shape) < 2:
        return None
    with unset_fake_temporarily():
        guess = (torch.arange(shape.numel()) % 2 == 0).reshape(shape)
    return cast("torch.Tensor", _as_guessed(guess))


def _drawn(packet: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return a possible result of a random operator.

    Models skip layers and choose indices with random numbers. The result is the middle of an interval, the allowed
    integer nearest to 1, or an unchanged order. Return None for several numbers or a long permutation.
    """
    dtype = kwargs.get("dtype")
    if packet is aten.randperm:
        return torch.arange(args[0], dtype=dtype) if args[0] <= LIMIT else None
    if packet is aten.uniform_:
        low, high = (args[at] if at < len(args) else float(at - 1) for at in (1, 2))
        one = args[0].numel() == 1
        return torch.full(args[0].shape, (low + high) / 2, dtype=args[0].dtype) if one else None
    *bounds, shape = args
    if math.prod(shape) != 1:
        return None
    if packet is aten.rand:
        return torch.full(shape, 0.5, dtype=dtype)
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    return torch.full(shape, min(max(low, 1), high - 1), dtype=dtype or torch.int64)


def _as_guessed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        setattr(value, _GUESSED, True)
    return value


def _small_factory(args: Any) -> bool:
    numbers = (abs(number) for number in leaves(args) if type(number) in (int, float))
    return math.prod(max(1, int(number)) for number in numbers if number < 1e12) <= LIMIT * 64


def _unique(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    count = tensor.new_empty((min(tensor.numel(), _STAND_IN_ROWS),))
    return count, torch.zeros(tensor.shape, dtype=torch.long), torch.ones(count.shape, dtype=torch.long)


def _ctc_loss(scores: torch.Tensor, targets: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Return fakes of the CTC results: a loss per sequence, log-probabilities per step and state (2 · labels + 1 states)."""
    steps, batch = (scores.shape[0], scores.shape[1]) if scores.dim() == 3 else (scores.shape[0], 1)
    return scores.new_empty((batch,)), scores.new_empty((batch, steps, 2 * targets.shape[-1] + 1))


def _lstsq(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Return a solution, no residuals, ranks of 0, and no singular values; raise torch's errors about dtypes."""
    if a.dtype != b.dtype:
        raise RuntimeError("torch.linalg.lstsq: Expected input and other to have the same dtype")
    if a.dtype in HALVES:
        raise RuntimeError(f"This function doesn't handle {ONLY_WIDE}")
    batch, columns, none = a.shape[:-2], a.shape[-1], a.new_empty(0).abs()
    vector = b.dim() == 1 or b.shape == a.shape[:-1]
    solution = b.new_empty((*batch, columns) if vector else (*batch, columns, b.shape[-1]))
    return solution, none, torch.zeros(batch, dtype=torch.long), none.clone()


STAND_INS: dict[Any, Callable[..., Any]] = {
    aten.linalg_lstsq.default: _lstsq,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: lambda _, scores, *__: torch.empty_like(scores),
    aten._ctc_loss_backward.Tensor: lambda _, scores, *__: torch.empty_like(scores),
    aten.equal.default: lambda *_: True,
    aten.allclose.default: lambda *_, **__: True,
    aten.is_nonzero.default: lambda *_: True,
    aten._unique2.default: _unique,
    aten.bincount.default: lambda _, weights=None, minlength=0: torch.zeros(
        max(minlength, 1), dtype=torch.long
    ),
    aten.repeat_interleave.Tensor: lambda repeats, *, output_size=None: torch.zeros(
        output_size or repeats.numel(), dtype=torch.long
    ),
    aten.repeat_interleave.self_Tensor: lambda tensor, *_, **__: tensor.clone(),
}
"""Operators -> functions that compute a possible result if the values of the operands are unknown."""


def _int8_codes(rows: torch.Tensor, threshold: float = 0.0) -> Any:
    """Return int8 codes, row scales and an empty list of outlier columns: no value is assumed to be an outlier."""
    scales = rows.new_empty((rows.numel() // rows.shape[-1],), dtype=torch.float32)
    columns = rows.new_empty((0,), dtype=torch.long) if threshold else None
    return rows.new_empty(rows.shape, dtype=torch.int8), scales, columns


def _int8_product(rows: torch.Tensor, codes: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> Any:
    return rows.new_empty((*codes.shape[:-1], weight.shape[0])), rows.new_empty((0,))


# Operators by name, because bitsandbytes is not imported here.
_OF_INT8: dict[str, Callable[..., Any]] = {
    "bitsandbytes.int8_vectorwise_quant.default": _int8_codes,
    "bitsandbytes.int8_mixed_scaled_mm.default": _int8_product,
}


def _split(tensor: torch.Tensor, sizes: Any, dim: int = 0) -> Any:
    """Split a tensor by assumed sizes. Sizes that exceed the tensor are reduced, and the last part gets the rest."""
    rest, fitting = tensor.shape[dim], []
    for size in sizes[:-1]:
        fitting.append(min(size, rest))
        rest -= fitting[-1]
    return aten.split_with_sizes.default(tensor, [*fitting, rest], dim)
