"""How the rows of a packed batch lie: behind one another where attention goes by lengths, else each in a row of the batch.

TRL (1.16) joins the rows of a batch into one, made for attention by lengths. Attention by a mask would compute, or mask, every pair of
tokens of the whole batch there: memory that grows with the square of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from isotype.compat.transformers import attention_of
from isotype.lora.loss.trl_head import goes_by_lengths, take_packed_rows
from isotype.lora.unpadded import hooks_see_one_row, mixes_documents


@dataclass(frozen=True)
class Rows:
    """A collator of packed examples whose rows stay rows of the batch.

    Attributes:
        padded: TRL's collator, with padding.
        packed: whether the documents of an example share a row, told apart by their positions; else each has one to itself.
    """

    padded: Any
    packed: bool

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch: ids, labels and mask `[rows, tokens]`, and positions where documents share rows."""
        if not self.packed or "seq_lengths" not in examples[0]:
            batch: dict[str, Any] = self.padded([each for row in examples for each in _documents(row)])
            return batch
        batch = replace(self.padded, return_position_ids=True)(examples)
        # Of a document, which nothing before it predicts; and padding.
        first: torch.Tensor = batch["position_ids"] == 0
        return {**batch, "labels": batch["labels"].masked_fill(first, -100)}


def _documents(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    start = 0
    for length in row.get("seq_lengths") or [len(row["input_ids"])]:
        parts = ("input_ids", "labels")
        yield {name: row[name][start : start + length] for name in parts if name in row}
        start += length


def keep_rows(trainer: Any) -> str | None:
    """Let a trainer that would join the rows of its batches keep them, unless its model's attention goes by lengths.

    Args:
        trainer: of TRL, with its model as it will be trained.

    Returns:
        What is done, for the user; None where the batches stay TRL's.
    """
    collator = trainer.data_collator
    if not getattr(collator, "padding_free", False):
        return None
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    if goes_by_lengths(model):
        return None
    if not trainer.args.packing:
        trainer.data_collator = Rows(replace(collator, padding_free=False), packed=False)
        return f"padding_free: rows are not joined into one, {_no_lengths(model)}"
    mixed = mixes_documents(model)
    packed = not mixed and take_packed_rows(trainer)
    trainer.data_collator = Rows(replace(collator, padding_free=False), packed)
    if packed:
        return f"packing: the rows of a batch are not joined into one, {_no_lengths(model)}; documents in a row are kept apart by a mask"
    why = mixed or "the loss of its router would count padding"
    return f"packing: documents are padded, each in a row of its own: {why}"


def seen_as_joined(trainer: Any, batch: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Within it hooks of a trainer's embeddings see a batch whose rows were kept as TRL would have joined them.

    NEFTune's noise hangs by the length of the row that it is added to.
    """
    if not isinstance(trainer.data_collator, Rows):
        return nullcontext()
    return hooks_see_one_row(trainer.accelerator.unwrap_model(trainer.model), batch["attention_mask"])


def _no_lengths(model: Any) -> str:
    return f"for its attention ({attention_of(model.config.get_text_config())}) would take memory for every pair of their tokens"
