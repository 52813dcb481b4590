"""Batches for measuring ranges: the user's, text of this package, or random inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import nn

from isotype.core.errors import UsageError
from isotype.core.names import plural
from isotype.ranges.pictures import by_config, pictures_of

LENGTH = 64
"""Tokens per text."""

_SEED = 0
_FIRST = 5  # after the special tokens that begin most vocabularies


@dataclass(frozen=True)
class Rows:
    """Texts for comparing models: (token ids, labels) of each, and their source; None for isotype's own texts."""

    texts: tuple[tuple[Sequence[int], Sequence[int]], ...]
    source: str | None = None


@dataclass(frozen=True)
class Batches:
    """The batches to run.

    Attributes:
        batches: keyword arguments of each forward.
        rows: number of texts per batch that are recorded separately; 0 to record a batch as one.
        said: description of the batches.
        tokens: total number of tokens.
        notes: what is left out.
    """

    batches: tuple[Mapping[str, Any], ...]
    rows: int
    said: str
    tokens: int
    notes: tuple[str, ...] = ()


def given_batches(batch: Any) -> Batches:
    """Return the user's batch or batches; raises UsageError unless they are mappings of tensors."""
    batches = [batch] if isinstance(batch, Mapping) else list(batch) if isinstance(batch, Sequence) else []
    if not batches or not all(isinstance(each, Mapping) for each in batches):
        kind = f"a {type(batch).__name__}"
        expected = "a dict of the tensors that the model is called with, or a list of such"
        fix = "give one batch of the training data loader"
        raise UsageError.of("no batch to measure", kind, expected, fix)
    said = "the batch given" if len(batches) == 1 else f"the {len(batches)} batches given"
    return Batches(tuple(map(dict, batches)), 0, said, sum(map(_tokens_in, batches)))


_LEARNED = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?|pos_embed\w*)$")
_PICTURES = re.compile(r"vision|visual|image|patch")


def positions(model: nn.Module) -> int | None:
    """Return the number of positions of a model; None if its config sets no limit."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    bounds = [limit] if isinstance(limit, int) and limit > 0 else []
    return min([*bounds, *_learned(model)], default=None)


def _learned(model: nn.Module) -> list[int]:
    """Return the rows of learned position tables: OPT counts from 2, RoBERTa from the padding index + 1."""
    tables = [
        module
        for name, module in model.named_modules()
        if _LEARNED.search(name) and not _PICTURES.search(name) and isinstance(module, nn.Embedding)
    ]
    return [
        each.num_embeddings
        - (getattr(each, "offset", 0) or (-1 if each.padding_idx is None else each.padding_idx) + 1)
        for each in tables
    ]


def require_positions(model: nn.Module, batches: Batches) -> Batches:
    """Return the batches; raises UsageError if a row is longer than the model's position table."""
    room = min(_learned(model), default=None)
    ids = [
        batch["input_ids"] for batch in batches.batches if isinstance(batch.get("input_ids"), torch.Tensor)
    ]
    longest = max((each.shape[-1] for each in ids), default=0)
    if room is not None and longest > room:
        what, expected = (
            f"a row of {longest} tokens",
            f"at most {room}, the positions that {type(model).__name__} has",
        )
        raise UsageError.of("the batch is longer than the model's positions", what, expected, "cut the rows")
    return batches


def _tokens_in(batch: Mapping[str, Any]) -> int:
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    named = [batch[name] for name in ("input_ids", "decoder_input_ids") if name in batch]
    counted = named or [each for each in tensors if not each.is_floating_point()]
    if counted:
        return int(counted[0].numel())
    # Of vectors: their number.
    return int(tensors[0].numel() // max(1, tensors[0].shape[-1])) if tensors and tensors[0].ndim else 0


def passages() -> tuple[str, ...]:
    """Return the texts of this package."""
    path = resources.files("isotype.data") / "passages" / "passages.txt"
    return tuple(path.read_text(encoding="utf-8").strip().split("\n\f\n"))


def made_batches(model: Any, tokenizer: Any | None, tokens: int) -> Batches:
    """Return one batch of texts of this package (or random token ids), and other inputs that the model needs.

    Args:
        model: a transformers model, PEFT or not, on any device including meta.
        tokenizer: the checkpoint's tokenizer or processor; None draws token ids.
        tokens: total number, rounded up to whole texts of 64 tokens (fewer if `tokens` is less).

    Raises:
        UsageError: the model takes no token ids.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    config: Any = getattr(base, "config", None)
    if not hasattr(config, "to_dict") or getattr(base, "main_input_name", "input_ids") != "input_ids":
        named = getattr(base, "main_input_name", "arguments of its own")
        raise UsageError.of(
            "no batch can be made up for this model",
            f"{type(base).__name__}, which takes {named}",
            "a batch",
            "give batch=, what the model is called with",
        )
    length = min(LENGTH, max(2, tokens), positions(base) or LENGTH)
    rows = -(-tokens // length)
    words = None if tokenizer is None else getattr(tokenizer, "tokenizer", tokenizer)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = int(getattr(text, "vocab_size", 0) or getattr(config, "vocab_size", 0))
    ids, said = token_rows(words, size, rows, length)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    pictures, notes = _add_pictures(batch, base, tokenizer, size)
    batch["labels"] = _labels(base, batch["input_ids"], pictures)
    return Batches((batch,), rows, said, ids.numel(), notes)


def token_rows(tokenizer: Any | None, vocabulary: int, rows: int, length: int) -> tuple[torch.Tensor, str]:
    """Return token ids, int64 `[rows, length]`, and a clause about their source.

    Row r begins with isotype's passage r and continues with the next ones. Without a tokenizer, or with one
    that knows none of the passages, ids are drawn with a fixed seed.
    """
    # Special tokens at the start come once per row.
    pieces = [] if tokenizer is None else [tokenizer(text)["input_ids"] for text in passages()]
    if not any(pieces):
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(min(_FIRST, vocabulary - 1), vocabulary, (rows, length), generator=generator)
        want = "a tokenizer" if tokenizer is None else "a tokenizer that knows a word of isotype's texts"
        return ids, f"{plural(rows, 'row')} of {length} token ids drawn with a fixed seed, for want of {want}"
    batch = []
    for row in range(rows):
        tokens: list[int] = []
        turn, start = row % len(pieces), row // len(pieces)
        while len(tokens) < length * (start + 1):
            tokens += pieces[turn % len(pieces)]
            turn += 1
        batch.append(tokens[length * start : length * (start + 1)])
    return torch.tensor(batch), f"{plural(rows, 'text')} of {length} tokens that come with isotype"


_PICTURE = (336, 252)
"""Size of a picture in pixels if a model takes any size."""


def _labels(base: nn.Module, ids: torch.Tensor, pictures: int) -> torch.Tensor:
    name = type(base).__name__
    if name.endswith("ForSequenceClassification"):
        return torch.zeros(ids.shape[0], dtype=torch.long)
    if name.endswith("ForTokenClassification"):
        return torch.zeros_like(ids)
    # Picture tokens are not learned.
    labels = ids.clone()
    labels[:, 1 : 1 + pictures] = -100  # torch's `ignore_index`
    return labels


def _add_pictures(
    batch: dict[str, torch.Tensor], base: Any, processor: Any | None, size: int
) -> tuple[int, tuple[str, ...]]:
    """Add one random picture per row if the model takes pictures; return its tokens and notes."""
    if getattr(base.config, "vision_config", None) is None:
        return 0, ()
    pictures = pictures_of(base.config, processor, [_PICTURE]) or by_config(base.config)
    if pictures is None:
        return 0, (
            "the batch is text only: neither a processor nor the config says what a picture is to the model",
        )
    ids = batch["input_ids"]
    for placeholder in set(pictures.ids[pictures.kinds].tolist()):
        ids[ids == placeholder] = min(_FIRST, size - 1)
    row = pictures.ids.expand(ids.shape[0], -1)
    ids = torch.cat([ids[:, :1], row, ids[:, 1:]], dim=1)
    batch["input_ids"], batch["attention_mask"] = ids, torch.ones_like(ids)
    generator = torch.Generator().manual_seed(_SEED)
    for name, value in pictures.batch(ids.shape[0]).items():
        # Processors return values of about mean 0 and variance 1.
        drawn = value.is_floating_point()
        batch[name] = torch.randn(value.shape, generator=generator) if drawn else value
    batch |= pictures.marks(ids, 1, base)
    return pictures.tokens, ("its images are drawn: normally distributed values with a fixed seed",)
