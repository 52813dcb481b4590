"""Chooses the faster language-model head on a GPU, isotype's or TRL's, by measured times."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import ceil, log2
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from isotype.compat.torch import PLAIN
from isotype.core.cache import default_cache_dir
from isotype.core.dtypes import dtype_name
from isotype.core.errors import error_line
from isotype.core.files import write_whole
from isotype.lora.loss.log_probs import log_probs
from isotype.lora.loss.logits import Head
from isotype.lora.weights import dense
from isotype.model.quantized import quantization_state
from isotype.model.walk import kind_of
from isotype.precision.devices.simulated import working_dtype

REVISION = 1
"""Version of both heads; measurements of other versions are ignored."""

_FEWEST, _MOST = 256, 2048


@dataclass(frozen=True)
class HeadShape:
    """Properties of a call of the head. All calls with the same properties share one measurement.

    Attributes:
        vocabulary, hidden: shape of the weight, `[vocabulary, hidden]`.
        tokens: number of tokens with labels, rounded up to a power of two, but at least 256 and at most 2048.
        stored, compute: the dtype of the weight, and the dtype in which it is multiplied.
        gradients: names of the results that are differentiated.
    """

    vocabulary: int
    hidden: int
    tokens: int
    stored: torch.dtype
    compute: torch.dtype
    outputs: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ("log_probs",)
    trained: bool = False
    capped: bool = False

    def __str__(self) -> str:
        more = [*self.outputs, *(f"gradient of {name}" for name in self.gradients[1:])]
        more += ["trained"] * self.trained + ["soft cap"] * self.capped
        stored = "" if self.stored == self.compute else f" of {dtype_name(self.stored)} weights"
        size = f"{self.tokens} tokens, {self.vocabulary} words, width {self.hidden}, {dtype_name(self.compute)}{stored}"
        return ", ".join([size, *more])


def token_class(tokens: int) -> int:
    return int(min(_MOST, max(_FEWEST, 2 ** ceil(log2(max(tokens, 1))))))


def card_name(device: torch.device) -> str:
    return str(torch.get_device_module(device).get_device_name(device))


@dataclass(frozen=True)
class Times:
    """Times of one call of the head, first TRL's, then isotype's.

    Attributes:
        milliseconds: each head's median.
        faster: speed-up of isotype's head over TRL's.
    """

    milliseconds: dict[str, float]
    faster: float

    @classmethod
    def of(cls, turns: Mapping[str, Sequence[float]]) -> Times:
        """Return the medians over turns. `turns`: each head's milliseconds; a turn runs each head once."""
        medians = {name: round(statistics.median(times), 4) for name, times in turns.items()}
        return cls(medians, round(statistics.median(map(truediv, *turns.values())), 3))


_KNOWN: dict[tuple[Path, str], Times] = {}
"""(file, `str(HeadShape)`) -> the times that this process has measured or read."""


def times_file(card: str) -> Path:
    """Return the file of the measured times of the loss on a GPU of this name with this torch version."""
    key = json.dumps([REVISION, card, torch.__version__])
    return default_cache_dir() / "heads" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def stored_times(file: Path) -> dict[str, Times]:
    """Return the times in a file: `str(HeadShape)` -> times. The file may be missing; damaged entries are skipped."""
    results = {}
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        for name, entry in json.loads(file.read_text(encoding="utf-8")).items():
            with suppress(TypeError, AttributeError):
                result = Times(**entry)
                numbers = (result.faster, *result.milliseconds.values())
                if all(isinstance(number, (int, float)) for number in numbers):
                    results[name] = result
    return results


def _store(file: Path, name: str, times: Times) -> str:
    """Store times. Return a clause for the user: "measured now", with the error if the times could not be stored."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        entries = {**stored_times(file), name: times}
        write_whole(file, json.dumps({key: asdict(entry) for key, entry in entries.items()}, indent=1) + "\n")
    except OSError as error:
        return f"measured now, not stored: {error}"
    return "measured now"


def times_text(times: Times) -> str:
    return ", ".join(f"{head} {took:.3g} ms" for head, took in reversed(times.milliseconds.items()))


Timer = Callable[[Callable[[], object]], float]
"""A function that runs a call and returns the call's milliseconds on the device."""

_TURNS = 5


@dataclass(frozen=True)
class HeadChoice:
    """The chosen head: `isotype` is True for isotype's head, False for TRL's head. `text` is a line with the reason."""

    isotype: bool
    text: str


def event_timer(device: torch.device) -> Timer:
    """Return a timer of a GPU's stream. Time on the CPU counts only while the GPU waits for the CPU."""
    backend = torch.get_device_module(device)

    def timed(call: Callable[[], object]) -> float:
        began, ended = (backend.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended))

    return timed


def choose(weight: torch.Tensor, bias: torch.Tensor | None, shape: HeadShape) -> HeadChoice:
    """Return the faster head for a class of calls. A new class is measured by a dozen calls, once per type of GPU.

    TRL's head is chosen if the weight is sharded or the memory is too small to measure both heads.
    """
    if type(weight) not in PLAIN:
        return HeadChoice(False, f"TRL's: a weight of type {type(weight).__name__} is not measured")
    card = card_name(weight.device)
    file, key, how = times_file(card), str(shape), "as measured before"
    times = _KNOWN.get((file, key)) or stored_times(file).get(key)
    if times is None:
        try:
            times = measure(weight, bias, shape, event_timer(weight.device))
        except torch.OutOfMemoryError:
            return HeadChoice(False, "TRL's: not enough memory to measure both heads")
        except TheirsFailedError as failure:
            return HeadChoice(True, f"isotype's, because TRL's failed: {failure}")
        how = _store(file, key, times)
    _KNOWN[file, key] = times
    faster = times.faster > 1
    name = "isotype's" if faster else "TRL's"
    return HeadChoice(faster, f"{name}: {times_text(times)} ({shape}; {how} on {card})")


class TheirsFailedError(Exception):
    """TRL's head raised an error; the message is the first line of that error."""


def measure(weight: torch.Tensor, bias: torch.Tensor | None, shape: HeadShape, timer: Timer) -> Times:
    """Return the times of a forward and backward with each head. The two heads run in turns.

    Raises:
        torch.OutOfMemoryError: there is not enough memory.
        TheirsFailedError: TRL's head does not run on this device.
    """
    device = weight.device
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.randn(shape.tokens, shape.hidden, generator=generator, device=device, dtype=torch.float32)
    hidden = drawn.to(shape.compute).requires_grad_()
    targets = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator, device=device)
    weight = weight.detach().requires_grad_(shape.trained)
    bias = None if bias is None else bias.detach().requires_grad_(shape.trained)
    trained = [tensor for tensor in (hidden, weight, bias) if tensor is not None and tensor.requires_grad]
    grad = torch.ones(shape.tokens, device=device)
    head = Head(weight, bias, softcap=1.0 if shape.capped else None)

    def differentiate(results: dict[str, Any]) -> None:
        with torch.enable_grad():
            outputs = [results[name] for name in shape.gradients]
            torch.autograd.grad(outputs, trained, [grad] * len(outputs), allow_unused=True)

    def ours() -> None:
        working = working_dtype(shape.compute, hidden)
        results = log_probs(head, hidden, targets, shape.outputs, gradients=shape.gradients, working=working)
        differentiate(vars(results))

    def theirs() -> None:
        differentiate(_theirs(head, hidden, targets, shape.outputs))

    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        timer(ours)  # the first calls build kernels and allocate memory
        try:
            timer(theirs)
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:  # compilers, drivers and launches may raise anything
            raise TheirsFailedError(error_line(failure)) from failure
        turns = [(timer(ours), timer(theirs)) for _ in range(_TURNS)]
    by_isotype, by_trl = zip(*turns, strict=True)
    return Times.of({"TRL's": by_trl, "isotype's": by_isotype})


def _theirs(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, outputs: tuple[str, ...]
) -> dict[str, Any]:
    from trl.kernels import ChunkedLogProbFunction
    from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS

    words = 32768  # vocabulary entries of a tile, as in trl.trainer.utils
    results = ChunkedLogProbFunction.apply(
        hidden, head.weight, head.bias, targets, 1.0, words, head.softcap, 1.0, ("log_probs", *outputs)
    )
    return dict(zip(("log_probs", *OPTIONAL_OUTPUTS), results, strict=True))


def head_of(model: Any, temperature: float = 1.0) -> Head:
    """Return the head of a causal language model, with a dense weight even if the model's weight is quantized or sharded.

    Args:
        model: a transformers model with output embeddings, without PEFT's wrapper.

    Raises:
        ValueError: the head has a LoRA adapter.
    """
    config, module = model.config.get_text_config(), model.get_output_embeddings()
    if hasattr(module, "lora_A"):
        fix = "train it with modules_to_save"
        raise ValueError(f"a LoRA adapter on the language-model head is not supported; {fix}")
    weight, bias = _dense(module), getattr(module, "bias", None)
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


def _dense(module: Any) -> torch.Tensor:
    kind = kind_of(module)
    if kind == "linear4bit":
        return dense(module, quantization_state(module).dtype)
    if kind == "linear8bit":
        return dense(module, torch.float32)
    weight: torch.Tensor = module.weight
    return weight
