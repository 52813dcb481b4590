"""Finds NaN and infinity in weights, which would make every result of the model NaN."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from isotype.core.errors import CheckpointError
from isotype.core.names import listed, plural

_MOST = 12


def require_finite(source: object, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise CheckpointError if a weight, or a constant of a quantized weight, is not finite. The message names `source`."""
    refuse(source, not_finite(named))


def not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return name -> a description of the counts of NaN and infinity, for each tensor that contains NaN or infinity."""
    return {name: _words(part) for name, weight in named for part in _values(weight) if not only_finite(part)}


def refuse(source: object, broken: Mapping[str, str]) -> None:
    """Raise CheckpointError if `broken` (from `not_finite`) is not empty."""
    if not broken:
        return
    which = listed((f"{name} ({words})" for name, words in broken.items()), _MOST)
    fix = "copy, download or train the weights again, because nothing can repair them"
    if any(words.endswith("float16") for words in broken.values()):
        fix += "; if the file has only finite values, they exceed float16: set --dtype bfloat16 or float32"
    what = f"{source}: {plural(len(broken), 'tensor')} with NaN or infinity: {which}"
    raise CheckpointError.of("weights that are not finite", what, "finite numbers", fix)


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(only_finite(values) for tensor in tensors for values in _values(tensor))


def _values(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the weight if it has a float dtype, else the float constants of the quantized weight."""
    state: Any = getattr(weight, "quant_state", None)
    scales: Any = getattr(weight, "SCB", None)
    if state is not None:
        constants = (state.state2.absmax, state.offset) if state.nested else (state.absmax,)
        yield from filter(torch.is_tensor, constants)
    elif torch.is_tensor(scales):
        yield scales
    elif weight.is_floating_point() and weight.device.type != "meta":
        yield weight.to_local() if hasattr(weight, "to_local") else weight.detach()


def only_finite(values: torch.Tensor) -> bool:
    if values.numel() == 0:
        return True
    if values.dtype.itemsize == 1:  # torch has no aminmax for float8
        values = values.to(torch.float32)
    least, most = torch.aminmax(values)  # one pass without a temporary tensor; both are NaN if a value is
    return bool(torch.isfinite(least) & torch.isfinite(most))


def _words(values: torch.Tensor) -> str:
    wide = values.to(torch.float32)
    nan, infinite = int(wide.isnan().sum()), int(wide.isinf().sum())
    counts = " and ".join(f"{n:,} {what}" for n, what in ((nan, "NaN"), (infinite, "infinite")) if n)
    return f"{counts} of {values.numel():,}, {str(values.dtype).removeprefix('torch.')}"
