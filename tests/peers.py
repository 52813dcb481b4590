"""Fused models beside plain PEFT: the same step and the same generation of every architecture of the zoo.

A model is built once, its adapters get random numbers (B would be zero, and no adapter would matter), and each case runs as
PEFT has it, after `isotype.fuse`, and in float64 as PEFT has it. Compared are loss, logits, gradients and tokens.

Both compute in float32 and sum in another order, which moves results of these small models by about 1e-6, and by a hundred times
that where numbers cancel: a difference counts from `TOLERANCE` on. Some models are worse conditioned than that. So what is above it
is measured against float64, too: PEFT's own error there, and how far the float64 result moves when every weight does by one unit in
float32's last place. What is within `_NOISE` times the larger of both is listed as rounding; it says nothing about the code.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import peft
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import set_seed

from isotype.lora.fuse import fuse, unfuse
from tests.reality import loss_of
from tests.zoo import ARCHITECTURES

TOLERANCE = 1e-4
MODES = ("train", "eval", "checkpointing", "dora", "inference_mode")
PADDINGS = ("none", "left", "right", "packed")
LABELS = ("masked", "whole")
WAYS: dict[str, dict[str, Any]] = {
    "cache": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "inference_mode": {},
}
_NOISE = 10
"""A weight is rounded once and read in hundreds of sums, each rounded in float32 itself."""
_ROWS, _SHORT = 3, (0, 5, 11)
"""Rows of a batch, and how many of the 16 tokens of each are padding, or left out of a packed row."""
_FLOOR = 0.01
"""Gradients below this share of the whole gradient's norm are rounding: those of key biases are zero in exact numbers."""
_REFUSED = ("out_proj", "conv1d", "lm_head", "embed_out", "classifier", "score")
_OUTPUTS = ("loss", "logits", "logits at padding")
_NEW_TOKENS = 5
_LENGTH_OF_PROMPT = 8

Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One comparison: names only, so that it can be sent to another process and written down.

    Attributes:
        labels: `masked` (-100 where nothing is to be learned) or `whole`; "" for a generation.
        way: of `WAYS`; "" for a training step.
    """

    architecture: str
    mode: str
    padding: str
    labels: str = ""
    way: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.architecture, self.mode, self.padding, self.labels, self.way)))


@dataclass(frozen=True)
class Result:
    """How a case ended.

    Attributes:
        verdict: `same`, `rounding`, `differs`, `raises` (fused alone) or `skipped`.
        sizes: what differs, and its relative difference from plain PEFT: `loss`, `logits`, `logits at padding`, `gradients`,
            `scores`, `tokens`.
        detail: the error, why it was skipped, or distances from float64.
    """

    case: Case
    verdict: str
    sizes: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size:.1e}" for name, size in self.sizes.items())
        return "   ".join(filter(None, (self.verdict, str(self.case), sizes, self.detail)))


class _InFloat64(TorchFunctionMode):
    """float64 where a model's code asks for float32: for norms, softmax and positions, whatever its own dtype is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = partial(_replaced, torch.float32, torch.float64)
        called = torch.Tensor.double if func is torch.Tensor.float else func
        return called(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def _replaced(former: Any, latter: Any, value: Any) -> Any:
    return latter if value is former else value


def step_cases(name: str) -> list[Case]:
    """Every training step of an architecture; those that make no sense for it are left out."""
    batch = ARCHITECTURES[name].batch()
    padded = ARCHITECTURES[name].family != "vision-language" and "attention_mask" in batch
    paddings = PADDINGS if ARCHITECTURES[name].family == "causal" else PADDINGS[:3] if padded else ("none",)
    return [Case(name, mode, padding, labels) for mode in MODES for padding in paddings for labels in LABELS]


def generate_cases(name: str) -> list[Case]:
    """Every generation of an architecture: prompts are padded on the left, sources of encoder-decoders on the right."""
    family = ARCHITECTURES[name].family
    if family == "classification" or "input_ids" not in ARCHITECTURES[name].batch():
        return []
    paddings = {"causal": ("none", "left"), "encoder-decoder": ("none", "right")}.get(family, ("none",))
    return [Case(name, "eval", padding, way=way) for padding in paddings for way in WAYS]


def batch_of(case: Case) -> dict[str, Any]:
    """The batch of a case: three rows of up to 16 tokens, or all of them in one row with positions that begin again."""
    architecture = ARCHITECTURES[case.architecture]
    batch: dict[str, Any] = architecture.batch(rows=_ROWS)
    labels = batch["labels"]
    if architecture.family == "classification":
        batch["labels"] = labels.clone()
        if case.labels == "masked":
            batch["labels"][-1] = -100
    ids = batch.get("input_ids")
    if ids is None or architecture.family == "vision-language":
        if case.labels == "masked":
            batch["labels"] = labels.clone()
            batch["labels"][-1, -5:] = -100
        return batch
    if case.padding == "packed":
        return _packed(ids, case.labels == "masked")
    present = torch.ones_like(ids)
    if case.padding != "none":
        for row, count in enumerate(_SHORT):
            present[row, ids.shape[1] - count :] = 0
        present = present.flip(-1) if case.padding == "left" else present
    batch |= {"attention_mask": present, "input_ids": ids.masked_fill(present == 0, 0)}
    if architecture.family != "classification":
        hidden = present == 0 if case.padding != "none" else torch.arange(ids.shape[1]).expand_as(ids) < 3
        batch["labels"] = labels.masked_fill(hidden, -100 if case.labels == "masked" else 0)
    return batch


def _packed(ids: torch.Tensor, masked: bool) -> dict[str, Any]:
    rows = [row[: len(row) - count] for row, count in zip(ids, _SHORT, strict=True)]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed = torch.cat(rows)[None]
    labels = packed.masked_fill(positions == 0, -100) if masked else packed.clone()
    return {"input_ids": packed, "position_ids": positions, "labels": labels, "use_cache": False}


def adapted(name: str, mode: str) -> Any:
    """A PEFT model whose adapters are not zero, in the mode of a case; in training its adapters drop something."""
    model = _with_lora(name, mode == "dora", 0.1 if mode == "train" else 0.0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name and "magnitude" not in parameter_name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.train(mode in ("train", "checkpointing"))
    if mode == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _with_lora(name: str, dora: bool, dropout: float) -> Any:
    config = {"r": 4, "use_dora": dora, "lora_dropout": dropout}
    try:
        return peft.get_peft_model(_built(name), peft.LoraConfig(target_modules="all-linear", **config))
    except ValueError:
        # PEFT's "all-linear" reaches experts, for which it has neither dropout nor DoRA, and parts of state spaces that it refuses.
        linear = [path for path, module in _built(name).named_modules() if isinstance(module, nn.Linear)]
        taken = [path for path in linear if not path.endswith(_REFUSED)]
        return peft.get_peft_model(_built(name), peft.LoraConfig(target_modules=taken, **config))


def _built(name: str) -> Any:
    return ARCHITECTURES[name].build(torch.float32)


def _step(model: Any, case: Case) -> Values:
    batch = batch_of(case)
    model.zero_grad()
    set_seed(5)  # BigBird draws from numpy
    with torch.inference_mode() if case.mode == "inference_mode" else nullcontext():
        outputs = model(**_like(model, batch))
        loss = loss_of(outputs)
        values = {"loss": loss.detach()}
        logits = getattr(outputs, "logits", None)
        if isinstance(logits, torch.Tensor):
            values |= _split(logits.detach(), batch)
    if case.mode != "inference_mode":
        loss.backward()  # type: ignore[no-untyped-call]
        grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        values |= {name: grad.clone() for name, grad in grads.items()}
    return values


def _like(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
    floats = {
        n: t.to(dtype) for n, t in batch.items() if isinstance(t, torch.Tensor) and t.is_floating_point()
    }
    return {**batch, **floats}


def _split(logits: torch.Tensor, batch: Mapping[str, Any]) -> Values:
    """Logits of tokens and of padding by themselves: different people read them."""
    mask = batch.get("attention_mask")
    if mask is None or logits.dim() != 3 or logits.shape[:2] != mask.shape or bool(mask.all()):
        return {"logits": logits}
    present = mask.bool()
    return {"logits": logits[present], "logits at padding": logits[~present]}


def _generate(model: Any, case: Case) -> Values:
    batch = batch_of(case)
    whole = batch["input_ids"].shape[1]
    taken = slice(whole - _LENGTH_OF_PROMPT, None) if case.padding == "left" else slice(_LENGTH_OF_PROMPT)
    kept = slice(None) if ARCHITECTURES[case.architecture].family == "vision-language" else taken
    inputs = {
        name: value[:, kept]
        if isinstance(value, torch.Tensor) and value.shape[:2] == (_ROWS, whole)
        else value
        for name, value in batch.items()
        if name != "labels"
    }
    settings = {"max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS, "do_sample": False}
    told = {"return_dict_in_generate": True, "output_scores": True, **settings, **WAYS[case.way]}
    set_seed(5)
    with torch.inference_mode() if case.way == "inference_mode" else torch.no_grad():
        outputs = model.generate(**_like(model, inputs), **told)
    scores = torch.stack(outputs.scores)
    return {"tokens": outputs.sequences, "scores": scores.masked_fill(scores.isinf(), 0)}


@dataclass
class Peers:
    """One architecture in one mode, plain and fused by turns."""

    name: str
    mode: str
    model: Any = field(init=False)
    reference: Any = field(init=False)

    def __post_init__(self) -> None:
        self.model = adapted(self.name, self.mode)
        self.reference = copy.deepcopy(self.model).double()
        if (
            self.mode == "checkpointing"
        ):  # what is computed again is the same, but not under a mode of torch's functions
            self.reference.gradient_checkpointing_disable()
        self.reference.get_base_model().set_experts_implementation(
            "eager"
        )  # torch's grouped products have no float64

    def results(self, cases: list[Case]) -> list[Result]:
        """All of `cases`, which are of this architecture and mode: first plain, then fused, then in float64 where asked for."""
        plain = {case: _tried(self.model, case) for case in cases}
        fuse(self.model)
        fused = {case: _tried(self.model, case) for case in cases if isinstance(plain[case], dict)}
        unfuse(self.model)
        return [self._judged(case, plain[case], fused.get(case)) for case in cases]

    def _judged(self, case: Case, plain: Values | Exception, fused: Values | Exception | None) -> Result:
        if isinstance(plain, Exception):
            return Result(case, "skipped", detail=f"plain PEFT raises {_line(plain)}")
        if isinstance(fused, Exception) or fused is None:
            return Result(case, "raises", detail=_line(fused))
        if not all(bool(value.isfinite().all()) for value in plain.values()):
            more = fused.keys() != plain.keys() or any(
                bool((fused[name].isnan() & value.isfinite()).any()) for name, value in plain.items()
            )
            return Result(case, "differs" if more else "skipped", detail="plain PEFT gives NaN")
        if case.way:
            return _judged_tokens(case, plain, fused)
        sizes = distances(plain, fused)
        apart = {name: size for name, size in sizes.items() if size > TOLERANCE}
        return self._beside_float64(case, plain, fused, apart) if apart else Result(case, "same")

    def _beside_float64(self, case: Case, plain: Values, fused: Values, apart: dict[str, float]) -> Result:
        with _InFloat64(), _default_float64():
            exact = _tried(self.reference, case)
            with _moved(self.reference):
                near = _tried(self.reference, case)
        if isinstance(exact, Exception) or isinstance(near, Exception):
            return Result(case, "differs", _grouped(apart), f"no float64: {_line(exact)}")
        theirs, ours, noise = (distances(exact, values) for values in (plain, fused, near))
        wrong = {n: size for n, size in apart.items() if ours[n] > _NOISE * max(theirs[n], noise[n])}
        worst = max(wrong or apart, key=lambda name: apart[name])
        detail = f"{worst} from float64: fused {ours[worst]:.1e}, plain {theirs[worst]:.1e}, one last place {noise[worst]:.1e}"
        return Result(case, "differs" if wrong else "rounding", _grouped(wrong or apart), detail)


@contextmanager
def _moved(model: nn.Module) -> Iterator[None]:
    """Every weight one unit in float32's last place off, up or down at random."""
    generator = torch.Generator().manual_seed(3)
    parameters = list(model.parameters())
    former = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        signs = torch.randint(0, 2, parameter.shape, generator=generator).double() * 2 - 1
        parameter.data.mul_(1 + torch.finfo(torch.float32).eps * signs)
    try:
        yield
    finally:
        for parameter, value in zip(parameters, former, strict=True):
            parameter.data.copy_(value)


def _grouped(sizes: Mapping[str, float]) -> dict[str, float]:
    """The largest of all gradients under one name."""
    grouped: dict[str, float] = {}
    for name, size in sizes.items():
        known = name if name in _OUTPUTS else "gradients"
        grouped[known] = max(size, grouped.get(known, 0.0))
    return grouped


def _tried(model: Any, case: Case) -> Values | Exception:
    try:
        return _generate(model, case) if case.way else _step(model, case)
    except Exception as error:  # noqa: BLE001 - whatever a model raises in one of these modes is a result
        return error


def _line(error: object) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


@contextmanager
def _default_float64() -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        yield


def distances(one: Values, other: Values) -> dict[str, float]:
    """Relative distance of each of the values; of a gradient beside `_FLOOR` of the whole gradient at least."""
    if one.keys() != other.keys():
        return dict.fromkeys(one.keys() ^ other.keys(), float("inf"))
    norms = [value.double().norm() for name, value in one.items() if name not in _OUTPUTS]
    floor = _FLOOR * float(torch.stack(norms or [torch.zeros(())]).norm())
    return {
        name: _relative(value, other[name], 0.0 if name in _OUTPUTS else floor) for name, value in one.items()
    }


def _relative(one: torch.Tensor, other: torch.Tensor, floor: float) -> float:
    if one.shape != other.shape or not bool(other.isfinite().all()):
        return float("inf")
    difference = float((one.double() - other.double()).norm())
    size = float(one.double().norm()) + floor
    return difference / size if size else difference


def _judged_tokens(case: Case, plain: Values, fused: Values) -> Result:
    """The same tokens, and the same scores up to the first that is another one; a tie may be broken otherwise."""
    scores, own = plain["scores"], fused["scores"]
    if scores.shape != own.shape:
        return Result(
            case, "differs", {"tokens": 1.0}, f"{tuple(own.shape)} scores, not {tuple(scores.shape)}"
        )
    sizes = [_relative(one, other, 0.0) for one, other in zip(scores, own, strict=True)]
    if torch.equal(plain["tokens"], fused["tokens"]):
        size = max(sizes)
        return Result(case, "same") if size <= TOLERANCE else Result(case, "differs", {"scores": size})
    apart = next((at for at, size in enumerate(sizes) if size > TOLERANCE), len(sizes))
    best = scores[: max(1, apart)].topk(2, dim=-1).values
    gap = float((best[..., 0] - best[..., 1]).min() / best.abs().max())
    share = float((plain["tokens"] != fused["tokens"]).double().mean())
    tie = apart > 0 and gap <= TOLERANCE
    found = {"tokens": share, "scores": sizes[min(apart, len(sizes) - 1)]}
    return Result(case, "rounding" if tie else "differs", found, f"the best two lie {gap:.0e} apart")
