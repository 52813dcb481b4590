"""Faults in who sees whom: steps that run, and train something else than was meant."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from isotype.records.finding import Finding
from isotype.rules import judge
from isotype.trace.reach.measure import measure_reach
from tests.rules.samples import trace, weight

Batch = dict[str, torch.Tensor]
Made = tuple[nn.Module, Batch]


@dataclass(frozen=True)
class WiringFault:
    """A fault.

    Attributes:
        name: of the fault.
        code: the rule that must find it.
        inject: (model, batch) -> the faulty model and batch; None where the architecture has no such part.
        real: whether the fault is there at all, by changing what must not matter in the model itself; None: always.
    """

    name: str
    code: str
    inject: Callable[[nn.Module, Batch], Made | None]
    real: Callable[[nn.Module, Batch], bool] | None = None


class Wrapped(nn.Module):
    """A model behind another forward, as users write it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = getattr(model, "config", None)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()  # type: ignore[operator, no-any-return]


class WithoutMask(Wrapped):
    def forward(self, input_ids: Any, attention_mask: Any = None, **others: Any) -> Any:
        return self.model(input_ids=input_ids, **others)


class Unshifted(Wrapped):
    def forward(self, input_ids: Any, labels: Any, **others: Any) -> Any:
        logits = self.model(input_ids=input_ids, **others).logits
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class BlackPictures(Wrapped):
    def forward(self, pixel_values: Any, **others: Any) -> Any:
        return self.model(pixel_values=torch.zeros_like(pixel_values), **others)


def takes(model: nn.Module, *names: str) -> bool:
    """Whether the forward names these arguments."""
    inner = model.model if isinstance(model, Wrapped) else model
    return set(names) <= inspect.signature(inner.forward).parameters.keys()


def causal(model: nn.Module) -> bool:
    config: Any = model.config
    name = type(model).__name__
    return ("CausalLM" in name or "LMHead" in name) and not config.is_encoder_decoder


def half(batch: Batch) -> int:
    return batch["input_ids"].shape[1] // 2 - 1


def packed(batch: Batch) -> Batch:
    """Two sequences a row, told apart by their positions."""
    ids, cut = batch["input_ids"], half(batch)
    width = ids.shape[1]
    positions = torch.cat([torch.arange(cut), torch.arange(width - cut)]).expand(len(ids), -1)
    labels = batch["labels"].clone()
    labels[:, [0, cut]] = -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def padded(batch: Batch, side: str) -> Batch:
    """The first row has five tokens less than the second."""
    ids, mask = batch["input_ids"].clone(), torch.ones_like(batch["input_ids"])
    where = slice(0, 5) if side == "left" else slice(-5, None)
    ids[0, where], mask[0, where] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def without_labels(batch: Batch) -> Batch:
    """A batch of preference pairs or completions, whose loss is computed beside the model."""
    return {name: value for name, value in batch.items() if name != "labels"}


def text_rows(batch: Batch) -> bool:
    """Whether a batch is token ids with a label each."""
    return (
        set(batch) <= {"input_ids", "attention_mask", "labels"}
        and batch["labels"].shape == batch["input_ids"].shape
    )


def _packed_and_masked(model: nn.Module, batch: Batch) -> Made | None:
    if not (text_rows(batch) and causal(model) and takes(model, "position_ids", "attention_mask")):
        return None
    made = packed(batch)
    return model, {**made, "attention_mask": torch.ones_like(made["input_ids"])}


def _packed_without_labels(model: nn.Module, batch: Batch) -> Made | None:
    made = _packed_and_masked(model, batch)
    return None if made is None else (model, without_labels(made[1]))


def _numbered_mask(model: nn.Module, batch: Batch) -> Made | None:
    if not (text_rows(batch) and causal(model) and takes(model, "attention_mask")):
        return None
    made = packed(batch)
    mask = torch.ones_like(made["input_ids"])
    mask[:, half(batch) :] = 2
    return model, {"input_ids": made["input_ids"], "attention_mask": mask, "labels": made["labels"]}


def _padding_unmasked(model: nn.Module, batch: Batch) -> Made | None:
    if not text_rows(batch):
        return None
    made = padded(batch, "left")
    made.pop("attention_mask")
    return model, made


def _mask_dropped(model: nn.Module, batch: Batch) -> Made | None:
    if not (text_rows(batch) and takes(model, "attention_mask")):
        return None
    return WithoutMask(model), padded(batch, "left")


def _padding_learned(model: nn.Module, batch: Batch) -> Made | None:
    if not text_rows(batch) or not takes(model, "attention_mask"):
        return None
    made = padded(batch, "right")
    return model, {**made, "labels": made["input_ids"].clone()}


def _shifted_twice(model: nn.Module, batch: Batch) -> Made | None:
    if not (text_rows(batch) and causal(model)):
        return None
    return model, {**batch, "labels": batch["labels"].roll(-1, 1)}


def _not_shifted(model: nn.Module, batch: Batch) -> Made | None:
    return (Unshifted(model), batch) if text_rows(batch) and causal(model) else None


def _everything_visible(model: nn.Module, batch: Batch) -> Made | None:
    if not (text_rows(batch) and causal(model) and takes(model, "attention_mask")):
        return None
    rows, width = batch["input_ids"].shape
    return model, {**batch, "attention_mask": torch.zeros(rows, 1, width, width)}


def _embeddings(model: nn.Module) -> nn.Module | None:
    table: Any = getattr(model, "get_input_embeddings", lambda: None)()
    return table if isinstance(table, nn.Embedding) else None


def _statistics_of_the_batch(model: nn.Module, batch: Batch) -> Made | None:
    table = _embeddings(model)
    if table is None or not text_rows(batch):
        return None
    table.register_forward_hook(_standardized)
    return model, batch


def _standardized(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    return (output - output.mean((0, 1))) / (output.std((0, 1)) + 1e-6)


def _adapted(model: nn.Module, **arguments: Any) -> Any:
    import peft

    try:
        return peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=2, **arguments))
    except (ValueError, NotImplementedError, TypeError):
        return None  # a model without a linear layer that PEFT knows


def _scaled_by_zero(model: nn.Module, batch: Batch) -> Made | None:
    made = _adapted(model, lora_alpha=0)
    return None if made is None else (made, batch)


def _closed_gate(model: nn.Module, batch: Batch) -> Made | None:
    made = _adapted(model, lora_alpha=4)
    if made is None:
        return None
    for name, module in made.named_modules():
        if ".lora_B." in name:
            module.register_forward_hook(_nothing)
    return made, batch


def _nothing(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0


def _black_pictures(model: nn.Module, batch: Batch) -> Made | None:
    return (BlackPictures(model), batch) if "pixel_values" in batch else None


# Whether the fault is there, by the model itself in float32


@torch.no_grad()
def _moves(model: nn.Module, batch: Batch, changed: torch.Tensor, watched: torch.Tensor) -> bool:
    """Whether other tokens where `changed` says move the logits where `watched` says by more than rounding does."""
    model, ids = _loud(model), batch["input_ids"]
    other = torch.where(changed, (ids + 7) % 100 + 4, ids)
    before, after = (_logits(model, {**batch, "input_ids": each}) for each in (ids, other))
    if before.shape[:2] != ids.shape:
        return bool((before - after).abs().max() > 1e-4 * before.abs().max())
    return bool((before - after)[watched].abs().max() > 1e-4 * before.abs().max())


def _loud(model: nn.Module) -> nn.Module:
    """A copy of larger weights: fresh ones are so small that rounding hides what they let through."""
    model = copy.deepcopy(model).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4)
    return model


def _logits(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    output: Any = model(**batch)
    logits: torch.Tensor = output["logits"] if isinstance(output, Mapping) else output.logits
    return logits


def _columns(batch: Batch, cut: int) -> torch.Tensor:
    return (torch.arange(batch["input_ids"].shape[1]) >= cut).expand(batch["input_ids"].shape)


def sees_neighbour(model: nn.Module, batch: Batch) -> bool:
    behind = _columns(batch, half(batch))
    return _moves(model, batch, ~behind, behind)


def _sees_padding(model: nn.Module, batch: Batch) -> bool:
    padding = batch["input_ids"] == 0
    return _moves(model, batch, padding, ~padding)


def sees_later(model: nn.Module, batch: Batch) -> bool:
    """Whether a token sees those behind it."""
    cuts = (_columns(batch, cut) for cut in (1, half(batch)))
    return any(_moves(model, batch, behind, ~behind) for behind in cuts)


@torch.no_grad()
def _counts_padding(model: nn.Module, batch: Batch) -> bool:
    """Whether a row's logits are others without the padding in front of it."""
    model, alone = _loud(model), {name: value[:1, 5:] for name, value in batch.items()}
    after = _logits(model, alone)
    return bool((_logits(model, batch)[:1, 5:] - after).abs().max() > 1e-3 * after.abs().max())


def _sees_later_alone(model: nn.Module, batch: Batch) -> bool:
    return sees_later(model, batch) and not learns_itself(
        model, {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    )


def _sees_other_row(model: nn.Module, batch: Batch) -> bool:
    second = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    second[1:] = True
    return _moves(model, batch, ~second, second)


def _learns_ahead(model: nn.Module, batch: Batch) -> bool:
    return not learns_itself(model, batch)


FAULTS: tuple[WiringFault, ...] = (
    WiringFault("packed rows beside a mask of ones", "IST901", _packed_and_masked, sees_neighbour),
    WiringFault(
        "packed rows beside a mask of ones, no labels", "IST901", _packed_without_labels, sees_neighbour
    ),
    WiringFault("packed rows in a numbered mask", "IST901", _numbered_mask, sees_neighbour),
    WiringFault("padding in front, no mask", "IST902", _padding_unmasked, _sees_padding),
    WiringFault("every token visible", "IST903", _everything_visible, _sees_later_alone),
    WiringFault("labels not shifted", "IST903", _not_shifted),
    WiringFault("labels shifted twice", "IST904", _shifted_twice, _learns_ahead),
    WiringFault("padding is learned", "IST904", _padding_learned),
    WiringFault("the mask ends in a wrapper", "IST905", _mask_dropped),
    WiringFault("images are black", "IST905", _black_pictures),
    WiringFault("an adapter of scale 0", "IST906", _scaled_by_zero),
    WiringFault("an adapter behind a closed gate", "IST906", _closed_gate),
    WiringFault("statistics of the whole batch", "IST907", _statistics_of_the_batch, _sees_other_row),
)


def learns_itself(model: nn.Module, batch: Batch) -> bool:
    """Whether the model's own loss compares the logits of a token with its own label, as the decoders of Bart's kin do."""
    model.eval()
    with torch.no_grad():
        output: Any = model(**batch)
    model.train()
    logits = output["logits"]
    if logits.dim() != 3 or logits.shape[:2] != batch["labels"].shape:
        return False
    own = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    return bool((own - output["loss"]).abs() < 1e-4)


def findings_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[list[Finding], tuple[str, ...]]:
    """(what the rules of the family find, what is undecided)."""
    reach = measure_reach(model, batch, seconds=60)
    if reach is None:
        return [], ("the batch has no token ids, or no labels",)
    trained = [weight(name, trainable=True) for name, each in model.named_parameters() if each.requires_grad]
    shapes = {name: tuple(value.shape) for name, value in batch.items()}
    step = replace(trace(trained, batch=shapes), reach=reach)
    return [each for each in judge(step) if each.code.startswith("IST9")], reach.undecided


def healthy(model: nn.Module, batch: Batch) -> Iterator[tuple[str, Batch]]:
    """Batches with nothing wrong in them, by name; of a model that keeps packed sequences apart also a packed one."""
    yield "plain", batch
    if not text_rows(batch) or not takes(model, "attention_mask"):
        return
    behind = padded(batch, "right")
    if not _sees_padding(model, behind):
        yield "padded behind", behind
        if not getattr(model.config, "is_encoder_decoder", False):
            yield "padded behind, no labels", without_labels(behind)
    if causal(model) and takes(model, "position_ids"):
        made = packed(batch)
        if not sees_neighbour(model, made):
            yield "packed", made
        front = padded(batch, "left")
        positions = (front["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        front["position_ids"] = positions
        if not _sees_padding(model, front) and not _counts_padding(model, front):
            yield "padded in front, with positions", front
