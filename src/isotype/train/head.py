"""TRL's fused language-model head, computed by isotype's own loss where that is better.

TRL 1.16 (`add_fused_lm_head`) gives a model a forward that, called with `fused_lm_head=True`, returns log-probabilities in the
place of logits: SFT, DPO, KTO, GRPO and RLOO call it for every batch. Its function projects every position, in the
forward and again in the backward, and multiplies gradients in float32. That is the price of one Triton kernel for all; without Triton
`isotype.lora.loss` takes a fifth of the time (`benchmarks/loss.py`). So a model's forward is put before TRL's, returns the same
`FusedCausalLMOutput`, and hands every other call on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from isotype.lora.fused import working_dtype
from isotype.lora.head import head_of
from isotype.lora.loss import PerToken, Precision, log_probs

_THEIRS = "_isotype_trl_forward"
_SMOOTHER = "_isotype_label_smoother"


@dataclass(frozen=True)
class _Asked:
    """What TRL was asked for (the arguments of `add_fused_lm_head`), and what the trainer does with it.

    Attributes:
        temperature, cast_lm_head_to_fp32, outputs: TRL's own.
        gradients: results that the trainer may differentiate.
        smoothing: label smoothing: the log-probabilities are of the smoothed labels.
        autocast: to be entered, for a model whose forward accelerate has already put under autocast.
    """

    temperature: float
    cast_lm_head_to_fp32: bool
    outputs: tuple[str, ...]
    gradients: tuple[str, ...] = ("log_probs",)
    smoothing: float = 0.0
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext


def use_own_head(trainer: Any) -> None:
    """Let the models of a TRL trainer that has just been built compute their log-probabilities by isotype's loss.

    A trainer without TRL's head is left as it is.
    """
    smoothing = _smoothing(trainer)
    gradients = ("log_probs", "entropy") if _entropy_is_differentiated(trainer.args) else ("log_probs",)
    for model in _models(trainer):
        own = _asked(model.forward)
        if own is None:
            continue
        outermost, given = own
        autocast = nullcontext if outermost else trainer.accelerator.autocast
        asked = _Asked(**given, gradients=gradients, smoothing=smoothing, autocast=autocast)
        _put(model, asked)
        if smoothing:
            trainer.__dict__[_SMOOTHER], trainer.label_smoother = trainer.label_smoother, None


def put_head(model: Any) -> None:
    """Give a causal language model that no trainer has the forward that SFT would call: for a check of the step to come."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    _put(base, _Asked(1.0, cast_lm_head_to_fp32=False, outputs=("log_probs", "entropy", "is_top1")))


def _put(model: Any, asked: _Asked) -> None:
    model.__dict__[_THEIRS] = model.forward
    model.forward = MethodType(_forward_of(type(model), asked), model)


def use_trl_head(trainer: Any) -> None:
    """Undo `use_own_head`, before `train()` or after it."""
    for model in _models(trainer):
        theirs = model.__dict__.pop(_THEIRS, None)
        if theirs is not None:
            model.forward = theirs
    if _SMOOTHER in trainer.__dict__:
        trainer.label_smoother = trainer.__dict__.pop(_SMOOTHER)


def own_is_better(head: Any) -> bool:
    """Whether isotype's function computes the log-probabilities, and not TRL's: the one place that decides.

    On CUDA and XPU with Triton, TRL's kernel never writes probabilities in float32 and folds tiles as they are made. That the two have
    not been compared on a GPU is why TRL's is left there. It cannot read a quantized head.
    """
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.utils import is_triton_available

    if is_deepspeed_zero3_enabled():
        return False  # TRL gathers the head's shards
    weight = head.weight
    return not weight.is_floating_point() or not (
        weight.device.type in ("cuda", "xpu") and is_triton_available()
    )


def _models(trainer: Any) -> Iterator[Any]:
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            yield model.get_base_model() if hasattr(model, "get_base_model") else model


def _asked(forward: Any) -> tuple[bool, dict[str, Any]] | None:
    """(whether TRL's forward is the outermost, the arguments of its head); None where there is none.

    TRL keeps them in the closure of its forward and nowhere else.
    """
    function = inspect.unwrap(forward, stop=_is_trl)
    function = getattr(function, "__func__", function)
    outermost = getattr(forward, "__func__", forward) is function
    if not _is_trl(function):
        return None
    held = inspect.getclosurevars(function).nonlocals
    return outermost, {name: held[name] for name in ("temperature", "cast_lm_head_to_fp32", "outputs")}


def _is_trl(function: Any) -> bool:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and code.co_qualname.startswith("add_fused_lm_head.")


def _smoothing(trainer: Any) -> float:
    """The label smoothing of a trainer that would compute whole logits for it: SFT's, with its usual loss."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    smoother = getattr(trainer, "label_smoother", None)
    usual = getattr(trainer.args, "loss_type", None) == "nll" and trainer.compute_loss_func is None
    return float(smoother.epsilon) if smoother and usual and not is_deepspeed_zero3_enabled() else 0.0


def _entropy_is_differentiated(arguments: Any) -> bool:
    """GRPO's entropy bonus, fixed or adaptive."""
    return bool(getattr(arguments, "entropy_coef", 0.0) or getattr(arguments, "use_adaptive_entropy", False))


def _forward_of(cls: type, asked: _Asked) -> Callable[..., Any]:
    @wraps(cls.forward)  # type: ignore[attr-defined]
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        named = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        if not fused_lm_head or not (asked.smoothing or own_is_better(self.get_output_embeddings())):
            given = {name: value for name, value in named.items() if value is not None}
            fused = {"fused_lm_head": True} if fused_lm_head else {}
            return self.__dict__[_THEIRS](*args, **fused, **given, **kwargs)
        with asked.autocast():
            return _fused(self, asked, named, args, kwargs)

    return forward


def _fused(model: Any, asked: _Asked, named: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """What TRL's forward returns, of a model whose backbone is called with `args` and `kwargs`."""
    from trl.trainer.utils import FusedCausalLMOutput

    kwargs["use_cache"] = False
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    backbone = model.base_model(*args, **kwargs)
    hidden, labels = backbone.last_hidden_state, named["shift_labels"]
    if labels is None:
        hidden, labels = hidden[:, :-1], named["labels"][:, 1:]
    head = head_of(model, asked.temperature)
    hidden, labels = hidden.to(head.weight.device), labels.to(head.weight.device)
    mask = labels != -100
    compute = torch.float32 if asked.cast_lm_head_to_fp32 else None
    fields = _fields(hidden, labels, mask, asked, head, compute)
    items = named["num_items_in_batch"]
    loss = -fields["log_probs"].sum() / (mask.sum().clamp(min=1) if items is None else items)
    aux = None
    if kwargs.get("output_router_logits"):
        aux = _load_balancing(config, backbone.router_logits, kwargs.get("attention_mask"))
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux
    return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux, **fields)


def _fields(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor,
    asked: _Asked,
    head: Any,
    compute: torch.dtype | None,
) -> dict[str, torch.Tensor]:
    """TRL's fields for every position, zero where there is no label; only those with one are projected."""
    device = hidden.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    compute = compute or low or head.weight.dtype
    precision = Precision(compute, working_dtype(compute, hidden))
    outputs, gradients = set(asked.outputs), asked.gradients
    if asked.smoothing:
        more = ("logsumexp", "mean_logits")
        outputs, gradients = outputs.union(more), (*gradients, *more)
    if isinstance(hidden, FakeTensor):
        # Which positions have labels is not known then: all of them, which is the most.
        rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.clamp(min=0).reshape(-1)
        found = log_probs(head, rows, targets, tuple(outputs), gradients=gradients, precision=precision)
        return {name: value.view(mask.shape) for name, value in _trl_fields(found, asked).items()}
    found = log_probs(
        head, hidden[mask], labels[mask], tuple(outputs), gradients=gradients, precision=precision
    )
    # `masked_scatter` keeps the graph where no position has a label: the gradient is zero then, not missing.
    return {
        name: value.new_zeros(mask.shape).masked_scatter(mask, value)
        for name, value in _trl_fields(found, asked).items()
    }


def _trl_fields(found: PerToken, asked: _Asked) -> dict[str, torch.Tensor]:
    fields = {name: getattr(found, name) for name in ("log_probs", *asked.outputs)}
    if asked.smoothing:
        assert found.mean_logits is not None
        assert found.logsumexp is not None
        mean = found.mean_logits - found.logsumexp  # the mean of log p over the vocabulary
        fields["log_probs"] = (1 - asked.smoothing) * found.log_probs + asked.smoothing * mean
    return fields


def _load_balancing(config: Any, router_logits: Any, attention_mask: torch.Tensor | None) -> torch.Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    found: torch.Tensor = load_balancing_loss_func(
        router_logits, config.num_experts, config.num_experts_per_tok, attention_mask
    )
    return found
