"""Replaces TRL's fused language-model head by isotype's head.

`add_fused_lm_head` of TRL 1.16 replaces a model's forward. With `fused_lm_head=True` the new forward returns
log-probabilities instead of logits. SFT, DPO, KTO, GRPO and RLOO call this forward for every batch. On a CPU, isotype's
loss is five times as fast as TRL's (`benchmarks/loss.py`). On a GPU, TRL's Triton kernel computes three products with
the weight of the head, and isotype computes two. TRL's kernel also rounds logits to 16 bits. TRL's head reads no
quantized weight, and its results are wrong if a model's own head does more than a projection. isotype's forward also
returns a `FusedCausalLMOutput`. It passes calls without `fused_lm_head=True` on to the model's forward.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, make_dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from isotype.compat.peft import without_peft
from isotype.compat.torch import FakeTensor
from isotype.compat.transformers import attention_of, backbone_of
from isotype.compat.trl import head_arguments, headless_forward, is_fused_forward, put_forward
from isotype.core.dtypes import autocast_dtype
from isotype.lora.attention.lengths import why_not_lengths
from isotype.lora.attention.registered import NAME, REPEATED, packed_by_lengths, without_padding
from isotype.lora.loss.log_probs import PerToken, log_probs, log_probs_of_logits
from isotype.lora.loss.logits import head_of
from isotype.lora.unpadded import Unpadded, in_one_row, with_sequences
from isotype.model.enforce import policy_of
from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.devices.simulated import has_value, working_dtype

_PACKED = "_isotype_packed_rows"
_HEAD = "_isotype_head"
"""Name of the attribute of isotype's forward that contains the `_HeadRequest`."""

_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_NAMES = ("loss", *_PER_TOKEN, "label_mask", "aux_loss")
_Output = make_dataclass("_Output", [(name, Any, None) for name in _NAMES], bases=(ModelOutput,))


@dataclass(frozen=True)
class _HeadRequest:
    """The arguments of `add_fused_lm_head`, and how the trainer uses the results.

    Attributes:
        temperature, cast_lm_head_to_fp32, outputs: TRL's arguments.
        gradients: names of results that the trainer may differentiate.
        autocast: function that returns the context in which the head runs. If accelerate has wrapped the model's forward in
            autocast, the context is this autocast.
        result: class of the result of the forward. Trainers need TRL's class. Checks without a trainer use `_Output`, because
            importing TRL takes seconds.
    """

    temperature: float
    cast_lm_head_to_fp32: bool
    outputs: tuple[str, ...]
    gradients: tuple[str, ...] = ("log_probs",)
    smoothing: float = 0.0
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    result: Callable[..., Any] = _Output


def use_own_head(trainer: Any) -> None:
    """Replace TRL's head by isotype's in a new TRL trainer's models. Under ZeRO-3, TRL's head stays, because it gathers shards."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from trl.trainer.utils import FusedCausalLMOutput

    if is_deepspeed_zero3_enabled():
        return
    smoothing = _smoothing(trainer)
    # GRPO's entropy bonus is fixed or adaptive.
    bonus = any(getattr(trainer.args, name, False) for name in ("entropy_coef", "use_adaptive_entropy"))
    gradients = ("log_probs", "entropy") if bonus else ("log_probs",)
    trained = next(_models(trainer))
    for model in _models(trainer):
        head = _trl_head(model.forward)
        if head is None:
            continue
        outermost, keywords = head
        # accelerate wraps the trained model in autocast when the training begins, and a reference model earlier.
        autocast = nullcontext if outermost and model is trained else trainer.accelerator.autocast
        request = _HeadRequest(
            **keywords,
            gradients=gradients,
            smoothing=smoothing,
            autocast=autocast,
            result=FusedCausalLMOutput,
        )
        put_forward(model, _forward_of(type(model), request))
        if smoothing:
            trainer.label_smoother = None


def goes_by_lengths(model: Any) -> bool:
    """Return True if a model's attention needs no full mask, so that concatenated rows are as fast as separate rows."""
    return attention_of(model.config.get_text_config()) not in (None, "eager", "sdpa", NAME, REPEATED)


def may_go_by_lengths(model: Any, profile: DeviceProfile) -> bool:
    """Predict, for a model without weights, whether `isotype.fuse` would use a variable-length kernel on a device."""
    config, policy = model.config, policy_of(model)
    dtype = model.dtype if policy is None else policy.compute
    by_sdpa = attention_of(config.get_text_config()) == "sdpa"
    return by_sdpa and why_not_lengths(profile, dtype, config) is None


def take_packed_rows(trainer: Any) -> bool:
    """Let a trainer's models accept packed rows (several documents) that come with positions and a padding mask.

    transformers uses positions to separate documents only if there is no mask. isotype's forward uses the mask only for a
    router's loss, and to count tokens. Returns False and changes nothing if isotype's forward does not compute the loss.
    """
    models = list(_models(trainer))
    packed = all(hasattr(getattr(model.forward, "__func__", None), _HEAD) for model in models)
    for model in models if packed else ():
        model.__dict__[_PACKED] = True
    return packed


def passed_on(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a batch that isotype's forward uses. Packed rows get no mask."""
    base = without_peft(model)
    packed = base.__dict__.get(_PACKED, False) and inputs.get("position_ids") is not None
    return {name: value for name, value in inputs.items() if name != "attention_mask" or not packed}


def put_head(model: Any) -> None:
    """Replace a causal language model's forward as an SFT trainer would, for a check without a trainer."""
    base = without_peft(model)
    request = _HeadRequest(1.0, cast_lm_head_to_fp32=False, outputs=("log_probs", "entropy", "is_top1"))
    put_forward(base, _forward_of(type(base), request))


# Model types whose forward changes the logits in a way that the config does not show: it masks some logits, divides by a
# constant, omits the text config's scale, or predicts several tokens ahead.
_MORE = ("aya_vision", "chameleon", "cohere2_vision", "inkling_mm_model", "inkling_text", "prophetnet")


def _projects(model: Any) -> bool:
    """Return True if the head only projects the output of the backbone. Heads of BERT-like models have more layers."""
    if model.config.model_type in _MORE:
        return False
    backbone, head = backbone_of(model), model.get_output_embeddings()
    parts = [part for part in model.children() if next(part.parameters(), None) is not None]
    return backbone is not model and all(part is backbone or part is head for part in parts)


def _models(trainer: Any) -> Iterator[Any]:
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            yield without_peft(model)


def _trl_head(forward: Any) -> tuple[bool, dict[str, Any]] | None:
    """Return (True if `forward` is TRL's head, False if it wraps the head; the head's arguments); else None."""
    function = inspect.unwrap(forward, stop=is_fused_forward)
    function = getattr(function, "__func__", function)
    outermost = getattr(forward, "__func__", forward) is function
    return (outermost, head_arguments(function)) if is_fused_forward(function) else None


def _smoothing(trainer: Any) -> float:
    """Return the label smoothing of an SFT trainer that computes the default loss; 0 for other trainers."""
    smoother = getattr(trainer, "label_smoother", None)
    usual = getattr(trainer.args, "loss_type", None) == "nll" and trainer.compute_loss_func is None
    return float(smoother.epsilon) if smoother and usual else 0.0


def _forward_of(cls: type, request: _HeadRequest) -> Callable[..., Any]:
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
        documents = self.__dict__.get(_PACKED, False) and kwargs.get("position_ids") is not None
        present = kwargs.pop("attention_mask", None) if documents else None
        if not fused_lm_head:
            passed = {name: value for name, value in named.items() if value is not None}
            return headless_forward(self)(*args, **passed, **kwargs)
        with request.autocast():
            return _fused(self, request, named, args, kwargs, present)

    forward.__dict__[_HEAD] = request
    return forward


def without_its_padding(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Unpadded | None:
    """Remove the padding from the batch with which a fused head is called. Return None if the padding must stay."""
    named = {name: kwargs.get(name) for name in _NAMED}
    if args or not kwargs.get("fused_lm_head") or (named["labels"] is None and named["shift_labels"] is None):
        return None
    inputs = {name: value for name, value in kwargs.items() if name not in (*_NAMED, "fused_lm_head")}
    return without_padding(model, inputs, _labels(named) != -100)


_NAMED = ("labels", "shift_labels", "num_items_in_batch")


def _labels(named: dict[str, Any]) -> torch.Tensor:
    shifted: torch.Tensor | None = named["shift_labels"]
    return nn.functional.pad(named["labels"][:, 1:], (0, 1), value=-100) if shifted is None else shifted


def _fused(
    model: Any,
    request: _HeadRequest,
    named: dict[str, Any],
    args: Any,
    kwargs: dict[str, Any],
    present: torch.Tensor | None,
) -> Any:
    """Return the output of isotype's head with TRL's fields. `present` is the padding mask of packed rows."""
    kwargs["use_cache"] = False
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    projects = _projects(model)
    labels = _labels(named)
    output, states, bare = _run(model, projects, labels != -100, args, kwargs)
    place = None if bare is None else bare.place.to(states.device)
    if named["shift_labels"] is None:  # the last token has no label
        labels, place = labels[:, :-1], None if place is None else place[:, :-1]
        states = states[:, :-1] if place is None else states
    labels = labels.to(states.device)
    mask = labels != -100
    # In a large fake tensor the labelled positions are unknown, so every position counts.
    has_positions = not isinstance(states, FakeTensor) or has_value(mask)
    chosen = mask if has_positions else torch.ones_like(mask)
    if bare is not None and place is not None:  # the number of labels is known without synchronization
        index = torch.nonzero_static(chosen.flatten(), size=bare.reads).squeeze(1)
    elif has_positions:
        index = mask.flatten().nonzero().squeeze(1)
    else:
        index = torch.arange(mask.numel(), device=mask.device)
    flat = states.flatten(0, 1)
    rows = flat.index_select(0, index if place is None else place.flatten().index_select(0, index))
    targets = labels.flatten().index_select(0, index).clamp(min=0)
    if projects:
        per_token = _projected(model, rows, targets, request)
    else:
        per_token = log_probs_of_logits(rows, targets, request.temperature)
    # Without labels the gradient must be zero, not missing: `masked_scatter` keeps the graph.
    flat_fields = _trl_fields(per_token, request).items()
    fields = {name: x.new_zeros(mask.shape).masked_scatter(chosen, x) for name, x in flat_fields}
    items = named["num_items_in_batch"]
    loss = -fields["log_probs"].sum() / (mask.sum().clamp(min=1) if items is None else items)
    aux = None
    if kwargs.get("output_router_logits"):
        if place is None and present is None:
            present = kwargs.get("attention_mask")
        aux = _load_balancing(config, output.router_logits, present)
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux
    return request.result(loss=loss, label_mask=mask, aux_loss=aux, **fields)


def _run(
    model: Any, projects: bool, labelled: torch.Tensor, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, torch.Tensor, Unpadded | None]:
    """Return (output of the model, its hidden states or logits, the batch without padding or None if the padding stays).

    If `projects` is True, only the backbone runs, and the second result is its hidden states.
    """
    if not projects:
        output = headless_forward(model)(*args, **kwargs)
        return output, output.logits, None
    bare = None if args else without_padding(model, kwargs, labelled)
    with with_sequences(packed_by_lengths(model, kwargs)) if bare is None else in_one_row(model, bare):
        output = backbone_of(model)(*args, **(kwargs if bare is None else bare.inputs))
    # The last layer of the backbone may be on another device than the head.
    states = output.last_hidden_state.to(model.get_output_embeddings().weight.device)
    return output, states, bare


def _projected(model: Any, rows: torch.Tensor, targets: torch.Tensor, request: _HeadRequest) -> PerToken:
    head, device = head_of(model, request.temperature), rows.device.type
    low = autocast_dtype(device)
    compute = torch.float32 if request.cast_lm_head_to_fp32 else low or head.weight.dtype
    more = ("logsumexp", "mean_logits") if request.smoothing else ()
    outputs, gradients = (*request.outputs, *more), (*request.gradients, *more)
    working = working_dtype(compute, rows)
    return log_probs(head, rows, targets, outputs, gradients=gradients, working=working)


def _trl_fields(per_token: PerToken, request: _HeadRequest) -> dict[str, torch.Tensor]:
    fields = {name: getattr(per_token, name) for name in ("log_probs", *request.outputs)}
    if request.smoothing:
        assert per_token.mean_logits is not None
        assert per_token.logsumexp is not None
        mean = per_token.mean_logits - per_token.logsumexp  # the mean of log p over the vocabulary
        fields["log_probs"] = (1 - request.smoothing) * per_token.log_probs + request.smoothing * mean
    return fields


def _load_balancing(config: Any, router_logits: Any, attention_mask: torch.Tensor | None) -> torch.Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts = getattr(config, "num_experts", None) or config.num_local_experts  # the name in Llama 4's config
    top_k = config.num_experts_per_tok
    loss: torch.Tensor = load_balancing_loss_func(router_logits, experts, top_k, attention_mask)
    return loss
