"""Makes batches and losses with the shapes and dtypes of a training, so that a step can be traced without a data set."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from isotype.compat.peft import activating, without_peft
from isotype.core.errors import UsageError
from isotype.data.methods import METHODS, Loss
from isotype.data.tokens import IGNORED
from isotype.lora.loss.trl_head import without_its_padding
from isotype.lora.unpadded import traced_as
from isotype.model.loss import loss_of
from isotype.ranges.pictures import FILL, Pictures, by_config
from isotype.records.request import LossOf

PROMPT_TOKENS = 512
Batch = Mapping[str, torch.Tensor]


def synthetic_batch(
    model: Any, rows: int, length: int, pictures: Pictures | None = None
) -> dict[str, torch.Tensor]:
    """Return a batch for a transformers model, like the batches of TRL's collators.

    Token ids, attention mask and labels are int64 `[rows, length]` (labels of a classifier `[rows]`). Each row has the
    images `pictures`. By default, a row has one image if the config has an image's number of tokens, else none. Image
    tokens have no loss. If the adapter has an effect only with certain tokens, these tokens follow the images in each row.

    Raises:
        UsageError: the model's input is not token ids, or `length` is too small for the tokens of the images.
    """
    base = without_peft(model)
    if getattr(base, "main_input_name", "input_ids") != "input_ids":
        headline, expected = "no batch can be made for this model", "a model whose input is token ids"
        fix = "pass package.module:function, where the function returns (model, inputs)"
        raise UsageError.of(headline, f"{type(base).__name__} takes {base.main_input_name}", expected, fix)
    ids = torch.full((rows, length), FILL)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    pictures = pictures or by_config(base.config)
    if pictures is not None:
        least = least_length(base.config, pictures)
        if least > length:
            expected = f"more than the {pictures.tokens} tokens of its images"
            headline, fix = "the images do not fit into the sequence", f"rows of {least} tokens, or more"
            raise UsageError.of(headline, f"rows of {length} tokens", expected, fix)
        ids[:, 1 : 1 + pictures.tokens] = pictures.ids
        batch |= {**pictures.batch(rows), **pictures.marks(ids, 1, base)}
    begin = 1 + (0 if pictures is None else pictures.tokens)
    for config in (getattr(model, "peft_config", None) or {}).values():
        tokens = [token for ids_of in activating(config).values() for token in ids_of][: length - begin]
        ids[:, begin : begin + len(tokens)] = torch.tensor(tokens, dtype=ids.dtype)
    classifier = type(base).__name__.endswith("ForSequenceClassification")
    if classifier and getattr(base.config, "is_encoder_decoder", False):
        # transformers takes a row's scores from its end token, and raises an error for a row without one.
        ids[:, -1] = base.config.eos_token_id
    batch["labels"] = torch.zeros(rows, dtype=torch.long) if classifier else ids.clone()
    if pictures is not None and not classifier:
        batch["labels"][:, 1 : 1 + pictures.tokens] = IGNORED
    return batch


def least_length(config: Any, pictures: Pictures | None = None) -> int:
    """Return the length of the shortest row that `synthetic_batch` can make for a model with this config."""
    pictures = pictures or by_config(config)
    return 2 if pictures is None else pictures.tokens + 2


def batch_notes(config: Any, pictures: Pictures | None = None) -> tuple[str, ...]:
    """Return a note on the images in a synthetic batch; () for a model that accepts no images."""
    if getattr(config, "vision_config", None) is None:
        return ()
    if pictures := pictures or by_config(config):
        return (pictures.words(),)
    more = "--image 1024x768 adds an image of that size to each row, and --images 2 adds two"
    return (f"no row has an image: {more}",)


def step_inputs(
    method: str,
    model: Any,
    rows: int,
    length: int,
    *,
    prompt: int = 0,
    completion: int = 0,
    reference: bool = True,
    packed: bool = False,
    pictures: Pictures | None = None,
    lengths: Sequence[Sequence[int]] = (),
) -> LossOf:
    """Return the inputs of one step of a method, and the function that computes the step's loss.

    Args:
        model: the model, with or without adapters. Before this call, `isotype.lora.loss.trl_head.put_head` must have replaced
            the forward of the model, except for a reward model.
        rows: number of examples in the step (of completions for grpo and rloo).
        prompt: number of tokens without loss at the beginning of an example.
        completion: number of tokens in a completion (grpo, rloo).
        reference: True if every step also runs the reference model.
        packed: True if each row has two documents that are separated by position ids (sft).
        lengths: for each row, the number of tokens with each answer (sft, dpo, kto); () for rows of `length` tokens.
    """
    batch = synthetic_batch(model, rows, length, pictures)
    loss = METHODS[method].loss
    if batch["labels"].dim() > 1:
        batch["labels"][:, :prompt] = IGNORED
    if packed:
        del batch["attention_mask"]
        places, half = torch.arange(length), length // 2
        batch["position_ids"] = torch.where(places < half, places, places - half).repeat(rows, 1)
    copies = 2 if loss in ("reward", "preference") else 1
    kept = {name: v for name, v in batch.items() if name != "labels" or loss != "reward"}
    tokens = {name: v.repeat(copies, *[1] * (v.dim() - 1)) for name, v in kept.items()}
    inputs = LossOf(lambda model, inputs: LOSSES[loss](model, inputs, completion, reference), tokens)
    return _unpadded(inputs, model, lengths)


def _unpadded(inputs: LossOf, model: Any, lengths: Sequence[Sequence[int]]) -> LossOf:
    """Return the inputs with rows of these lengths. The loss function removes the same padding as the training."""
    if not lengths:
        return inputs
    batch = inputs.inputs
    ends = torch.tensor([n for answers in zip(*lengths, strict=True) for n in answers])
    present = torch.arange(batch["input_ids"].shape[1]) < ends[:, None]
    labels = batch["labels"].where(present, IGNORED)
    batch = {**batch, "attention_mask": present.long(), "labels": labels}
    bare = without_its_padding(model, (), {**batch, "fused_lm_head": True})

    def loss(model: Any, batch: Any) -> Any:
        with traced_as(bare):
            return inputs.function(model, batch)

    return replace(inputs, function=loss, inputs=batch)


def _reward_loss(model: Any, batch: Batch, _completion: int, _reference: bool) -> torch.Tensor:
    chosen, rejected = model(**batch, use_cache=False).logits.squeeze(-1).chunk(2)
    loss: torch.Tensor = -nn.functional.logsigmoid(chosen - rejected).mean()
    return loss


def _label_loss(model: Any, batch: Batch, _completion: int, _reference: bool) -> torch.Tensor:
    if "labels" not in batch:  # in the phase `generate`
        return loss_of(model(**batch, use_cache=False))
    loss: torch.Tensor = model(**batch, fused_lm_head=True).loss
    return loss


def _log_probs(model: Any, batch: Batch) -> torch.Tensor:
    """Return the log-probability of each token (float32 `[rows, length - 1]`). Tokens without loss have 0."""
    labels = batch.get("labels", batch["input_ids"])  # the phase `generate` has no labels
    log_probs: torch.Tensor = model(**{**batch, "labels": labels}, fused_lm_head=True).log_probs
    return log_probs


def _log_ratios(model: Any, batch: Batch, reference: bool) -> torch.Tensor:
    """Return the log-probability of each row (float32 `[rows]`). If `reference` is True, subtract the reference model's."""
    sums = _log_probs(model, batch).sum(-1)
    return sums - _reference_log_probs(model, batch).sum(-1) if reference else sums


def _reference_log_probs(model: Any, batch: Batch) -> torch.Tensor:
    """Return the log-probabilities (float32 `[rows, length - 1]`) of the model with disabled adapters, as TRL does."""
    with torch.no_grad(), model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext():
        return _log_probs(model, batch)


def _preference_loss(model: Any, batch: Batch, _completion: int, reference: bool) -> torch.Tensor:
    """Return DPO's sigmoid loss with beta 0.1 (https://arxiv.org/abs/2305.18290, equation 7)."""
    chosen, rejected = _log_ratios(model, batch, reference).chunk(2)
    return -nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def _unpaired_loss(model: Any, batch: Batch, _completion: int, reference: bool) -> torch.Tensor:
    """Return KTO's loss (https://arxiv.org/abs/2402.01306, equation 8), with an extra forward for the KL term."""
    with torch.no_grad():
        kl = _log_ratios(model, batch, reference)
    ratios = _log_ratios(model, batch, reference)
    return (1 - torch.sigmoid(0.1 * (ratios - kl.mean().clamp(min=0)))).mean()


def _policy_loss(model: Any, batch: Batch, completion: int, reference: bool) -> torch.Tensor:
    """Return GRPO's clipped loss with advantages of 1 (https://arxiv.org/abs/2402.03300, equation 3)."""
    # As in TRL, the reference model runs before the forward with gradients.
    kept = _reference_log_probs(model, batch)[:, -completion:] if reference else None
    logps = _log_probs(model, batch)[:, -completion:]
    ratio = (logps - logps.detach()).exp()
    advantages = torch.ones(logps.shape[0], 1)
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if kept is not None:
        difference = kept - logps
        loss = loss + 0.04 * (difference.exp() - difference - 1)
    return loss.mean()


LOSSES: Mapping[Loss, Callable[[Any, Batch, int, bool], torch.Tensor]] = {
    "labels": _label_loss,
    "reward": _reward_loss,
    "preference": _preference_loss,
    "unpaired": _unpaired_loss,
    "policy": _policy_loss,
}
"""Maps `Method.loss` to a function (model, batch, tokens in a completion, reference) that returns the loss."""
