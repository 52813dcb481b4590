"""Computes the logits of a chunk of tokens with a language-model head, in reused scratch memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from isotype.compat.torch import FakeTensor
from isotype.lora.loops.products import Sum, is_used, write_sums
from isotype.model.quantized import dense_weight
from isotype.precision.devices.simulated import device_type_of, gpu_memory

SCRATCH = 64 << 20
"""Maximum bytes of a chunk's logits on a CPU, or on a GPU whose memory is not known."""

_ROWS = 384  # tokens of a chunk on a CPU: more are no faster
# On a GPU chunks are larger: every chunk reads the whole head and launches all kernels again.
_ROWS_OF_A_GPU, _SCRATCH_OF_A_GPU, _SHARE_OF_A_GPU = 2048, 1 << 30, 64
_PART = 16 << 20  # bytes of the weight cast at a time
_BLOCK = 3 << 19  # bytes of float32 in a block of the softmax, for each core: they stay in the core's cache
# Factor of gradient rows before a product in float16, so that small probabilities are not subnormal.
_LIFT = 64.0


@dataclass(frozen=True)
class Head:
    """A language-model head.

    Attributes:
        weight: `[V, H]` in any float dtype.
        scale: factor of the projection (`logit_scale`).
        softcap: the soft cap in `softcap * tanh(logits / softcap)` (Gemma 2's `final_logit_softcapping`); None
            without a soft cap.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0


def head_of(model: Any, temperature: float = 1.0) -> Head:
    """Return the head of a causal language model. Its weight is dense even if the model's weight is quantized or sharded.

    Args:
        model: a transformers model with output embeddings, without PEFT's wrapper.

    Raises:
        ValueError: the head has a LoRA adapter.
    """
    config, module = model.config.get_text_config(), model.get_output_embeddings()
    if hasattr(module, "lora_A"):
        fix = "train it with modules_to_save"
        raise ValueError(f"a LoRA adapter on the language-model head is not supported; {fix}")
    weight, bias = dense_weight(module), getattr(module, "bias", None)
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
        bias = bias.full_tensor() if isinstance(bias, DTensor) else bias
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(weight, bias, _scale(config), softcap, temperature)


def _scale(config: Any) -> float:
    # Names of Cohere and MPT (may be None), of Muse Glimmer, and of Falcon-H1.
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        scale = getattr(config, name, None)
        if scale is not None:
            return float(scale)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    # Granite and MiniCPM3 divide by it; HyperCLOVA X multiplies.
    return float(scaling) if config.model_type == "hyperclovax" else 1 / float(scaling)


@dataclass(frozen=True)
class Call:
    """Settings of a call of `isotype.lora.loss.log_probs.log_probs`.

    Attributes:
        scale, softcap, temperature: as in `Head`.
        outputs: names of the requested results besides the log-probabilities.
        gradients: names of the results that may be differentiated.
    """

    scale: float
    softcap: float | None
    temperature: float
    working: torch.dtype
    outputs: tuple[str, ...]
    gradients: frozenset[str]
    differentiated: bool

    @property
    def gradient_factor(self) -> float:
        return _LIFT if self.working == torch.float16 else 1.0

    @property
    def slope(self) -> float:
        """Derivative of the final logits with respect to the projection, without the factor of the soft cap."""
        return self.scale / self.temperature


class Scratch:
    """Computes the logits of a chunk of tokens in scratch memory, which every chunk of a call reuses.

    Attributes:
        weight, bias: as in `Head`.
        logits: `[chunk, V]` in the working dtype. Rows of gradients overwrite the logits.
        values: the logits of a block as float32 `[block, V]`, which later values overwrite.
        other, slope: exponentials and the derivatives of the soft cap, float32 `[block, V]`; None if they are not needed.
    """

    def __init__(
        self,
        call: Call,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: int,
        *,
        other: bool,
        slope: bool,
    ) -> None:
        self.call, self.weight, self.bias = call, weight, bias
        vocabulary = weight.shape[0]
        slope = slope and call.softcap is not None
        on_cpu = device_type_of(weight) == "cpu"
        # On other devices a block is a whole chunk, because more kernels would cost more than larger blocks.
        wide = 0 if on_cpu else 4 * (1 + other + slope)
        memory = gpu_memory(weight)
        scratch = SCRATCH if memory is None else min(_SCRATCH_OF_A_GPU, memory // _SHARE_OF_A_GPU)
        most = _ROWS if on_cpu else _ROWS_OF_A_GPU
        # Chunks of equal size would be larger for some batches with fewer tokens, and a check has a bound of the tokens.
        rows = min(most, max(1, scratch // (vocabulary * (call.working.itemsize + wide))), max(1, tokens))
        block = min(rows, max(1, torch.get_num_threads() * _BLOCK // (4 * vocabulary))) if on_cpu else rows
        self.logits = weight.new_empty(rows, vocabulary, dtype=call.working)
        self.values = weight.new_empty(block, vocabulary, dtype=torch.float32)
        self.other = torch.empty_like(self.values) if other else None
        self.slope = torch.empty_like(self.values) if slope else None

    def chunks(self, tokens: int) -> Iterator[slice]:
        return _slices(tokens, self.logits.shape[0])

    def blocks(self, chunk: slice) -> Iterator[tuple[slice, slice]]:
        """For each block, yield (its rows in the chunk, its rows among all tokens)."""
        for rows in _slices(chunk.stop - chunk.start, self.values.shape[0]):
            yield rows, slice(chunk.start + rows.start, chunk.start + rows.stop)
            if isinstance(self.values, FakeTensor):
                return  # a trace needs one block: all blocks share memory, and their operators have no counted FLOPs

    def _parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (rows, weight of these rows in the working dtype). If the weight needs no cast, yield all rows at once."""
        dtype = self.call.working
        if self.weight.dtype == dtype:
            yield slice(0, self.weight.shape[0]), self.weight
            return
        for part in _row_parts(self.weight, dtype):
            yield part, self.weight[part].to(dtype)

    def project(self, x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (W x + b in the working dtype, the logits of the targets, which are computed in float32)."""
        bias, dtype, logits = self.bias, self.call.working, self.logits[: len(x)]
        compiled = is_used(dtype, x)
        for part, matrix in self._parts():
            bias_part = None if bias is None else bias[part].to(dtype)
            write_sums([Sum(logits[:, part], ((x, matrix.t()),), bias_part)], compiled=compiled)
        chosen = self.weight.index_select(0, targets).to(dtype).float()
        exact: torch.Tensor = torch.linalg.vecdot(x.float(), chosen)
        return logits, exact if bias is None else exact + bias.index_select(0, targets).to(dtype).float()

    def multiply_into(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Write `rows @ weight` into `out`. The sum is rounded once."""
        compiled = is_used(self.call.working, rows)
        if self.weight.dtype == self.call.working:
            write_sums([Sum(out, ((rows, self.weight),))], compiled=compiled)
            return
        total, product = (torch.empty_like(out, dtype=torch.float32) for _ in range(2))
        total.zero_()
        for part, matrix in self._parts():
            write_sums([Sum(product, ((rows[:, part], matrix),))], compiled=compiled)
            total += product
        out.copy_(total)

    def scaled(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (the final logits of a block, the derivatives of the soft cap or None). Both are in buffers."""
        n = logits.shape[0]
        slope = None if self.slope is None else self.slope[:n]
        return scale_and_cap(self.call, self.values[:n].copy_(logits), slope), slope


def _slices(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _row_parts(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[slice]:
    return _slices(weight.shape[0], max(1, _PART // max(1, weight.shape[1] * dtype.itemsize)))


def scale_and_cap(call: Call, values: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
    """Apply scale, soft cap and temperature to `values` in place. Write the soft cap's derivative into `slope`."""
    if call.scale != 1:
        values.mul_(call.scale)
    if call.softcap is not None:
        values.div_(call.softcap).tanh_()
        if slope is not None:
            torch.mul(values, values, out=slope).neg_().add_(1)
        values.mul_(call.softcap)
    if call.temperature != 1:
        values.mul_(1 / call.temperature)
    return values


def add_outer(rows: torch.Tensor, x: torch.Tensor, factor: torch.Tensor, total: torch.Tensor) -> None:
    """Add `rows^T (factor x)` to the float32 `total`. Because `factor x` is scaled, it cannot overflow in the dtype of x."""
    scaled = x.float() * factor[:, None]
    largest = scaled.abs().amax().clamp_min(1e-30)
    scaled = (scaled / largest).to(x.dtype)
    for part in _row_parts(total, torch.float32):
        product = torch.empty_like(total[part])
        write_sums([Sum(product, ((rows[:, part].t(), scaled),))], compiled=False)
        total[part].add_(product.mul_(largest))
