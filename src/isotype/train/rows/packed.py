"""Layout of packed batches: documents one after another if attention goes by lengths, else one row per document.

TRL (1.16) joins the rows of a batch into one, for attention by lengths. Attention by a mask would compute, or mask,
every pair of tokens of the whole batch: memory quadratic in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from isotype.compat.peft import without_peft
from isotype.compat.transformers import attention_of
from isotype.lora.loss.trl_head import goes_by_lengths, take_packed_rows
from isotype.lora.unpadded import hooks_see_one_row, mixes_documents


@dataclass(frozen=True)
class Rows:
    """Collator of packed examples that keeps the rows of the batch.

    Attributes:
        packed: documents of an example share a row, separated by their positions; else each has its own row.
    """

    padded: Any
    packed: bool

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch: ids, labels and mask `[rows, tokens]`, and positions if documents share rows."""
        if not self.packed or "seq_lengths" not in examples[0]:
            batch: dict[str, Any] = self.padded(
                [document for row in examples for document in _documents(row)]
            )
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
    """Make a trainer keep the rows of its batches unless attention goes by lengths; return a note, or None."""
    collator = trainer.data_collator
    if not getattr(collator, "padding_free", False):
        return None
    model = without_peft(trainer.model)
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
    """Show hooks of embeddings the batch as TRL would join it: NEFTune's noise depends on the row's length."""
    if not isinstance(trainer.data_collator, Rows):
        return nullcontext()
    return hooks_see_one_row(trainer.accelerator.unwrap_model(trainer.model), batch["attention_mask"])


def _no_lengths(model: Any) -> str:
    return f"for its attention ({attention_of(model.config.get_text_config())}) would take memory for every pair of their tokens"
