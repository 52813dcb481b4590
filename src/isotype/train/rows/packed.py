"""Layout of packed batches.

TRL (1.16) joins the rows of a batch into one row for attention that uses the lengths of documents. For attention with a
mask, isotype does not join rows, because the mask of a joined row needs memory for every pair of tokens in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from isotype.compat.peft import why_whole_rows, without_peft
from isotype.compat.transformers import attention_of
from isotype.lora.loss.trl_head import goes_by_lengths, take_packed_rows
from isotype.lora.unpadded import hooks_see_one_row, mixes_documents


@dataclass(frozen=True)
class Rows:
    """Collator for packed examples that does not join the rows of the batch.

    Attributes:
        packed: True if all documents in an example share one row, False if each document has its own row.
    """

    padded: Any
    packed: bool

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return ids, labels and mask (int64 `[rows, tokens]`), with position ids if documents share rows."""
        if not self.packed or "seq_lengths" not in examples[0]:
            batch: dict[str, Any] = self.padded([part for row in examples for part in _documents(row)])
            return batch
        batch = replace(self.padded, return_position_ids=True)(examples)
        # True for padding, and for the first token of each document, which no earlier token predicts.
        first: torch.Tensor = batch["position_ids"] == 0
        return {**batch, "labels": batch["labels"].masked_fill(first, -100)}


def _documents(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    start = 0
    for length in row.get("seq_lengths") or [len(row["input_ids"])]:
        parts = ("input_ids", "labels")
        yield {name: row[name][start : start + length] for name in parts if name in row}
        start += length


def keep_rows(trainer: Any) -> str | None:
    """If a trainer joins rows but its attention needs a mask, replace the collator and return a note. Else return None."""
    collator = trainer.data_collator
    if not getattr(collator, "padding_free", False):
        return None
    model = without_peft(trainer.model)
    if goes_by_lengths(model) and not why_whole_rows(model):
        return None
    mixed = mixes_documents(model)
    if not trainer.args.packing:
        trainer.data_collator = Rows(replace(collator, padding_free=False), packed=False)
        return f"padding_free: rows are not joined into one: {mixed or _no_lengths(model)}"
    packed = not mixed and take_packed_rows(trainer)
    trainer.data_collator = Rows(replace(collator, padding_free=False), packed)
    if packed:
        return f"packing: the rows of a batch are not joined into one: {_no_lengths(model)}; a mask separates the documents in a row"
    why = mixed or "the loss of the router would count padding"
    return f"packing: each document is padded in a separate row: {why}"


def seen_as_joined(trainer: Any, batch: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return a context in which hooks on embeddings get a batch as one row. NEFTune scales noise by a row's length."""
    if not isinstance(trainer.data_collator, Rows):
        return nullcontext()
    return hooks_see_one_row(trainer.accelerator.unwrap_model(trainer.model), batch["attention_mask"])


def _no_lengths(model: Any) -> str:
    return f"the mask of the attention ({attention_of(model.config.get_text_config())}) would need memory for every pair of tokens"
