"""Rows of a data set as a batch that quality is measured on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from jinja2 import TemplateError

from isotype.checkpoint.opened import config_of, open_model
from isotype.checkpoint.stored_weights import blank_model
from isotype.core.errors import CheckpointError, Problem
from isotype.data.load import load_training_data
from isotype.ranges.batches import positions
from isotype.train.models import tokenizer_here
from isotype.train.rows.lengths import ids_of_row, refused_row

_LENGTH = 128
"""Tokens of a row that are taken at most: more rows say more."""


def batch_of_data(model: str, name: str, tokens: int, revision: str | None = None) -> dict[str, torch.Tensor]:
    """About `tokens` tokens of a data set's rows, from all over it, each cut to 128 or the model's positions, as one batch that is padded on the right.

    Args:
        model: whose tokenizer and chat template are taken.
        name: of the data set, as `--dataset_name`.
        tokens: how many in all.
        revision: branch, tag or commit of a hub id.

    Raises:
        CheckpointError: the model has no tokenizer here.
        DataError: the data set cannot be read.
    """
    _, tokenizer = tokenizer_here(model, revision)
    if tokenizer is None:
        fix = "download the model first, or leave --data out"
        problem = Problem(
            f"{model} without a tokenizer on this machine", "the tokenizer that its rows are read by", fix
        )
        raise CheckpointError("no tokenizer for the data", [problem])
    words = getattr(tokenizer, "tokenizer", tokenizer)
    length = min(_LENGTH, positions(blank_model(config_of(open_model(model, revision)))) or _LENGTH)
    script = SimpleNamespace(
        dataset_name=name,
        dataset_config=None,
        dataset_train_split="train",
        dataset_test_split="test",
        dataset_streaming=False,
    )
    rows = load_training_data(script, None, "sft", need_test=False, lines=True, say=lambda line: None)[
        "train"
    ]
    texts: list[list[int]] = []
    for at in spread(len(rows)):
        if sum(map(len, texts)) >= tokens:
            break
        try:
            texts.append(ids_of_row(words, rows[at])[:length])
        except TemplateError as error:
            raise refused_row(name, at, error) from error
    longest = max(map(len, texts))
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def spread(count: int) -> Iterator[int]:
    """The numbers below `count` in an order whose every beginning is spread over all of them."""
    stride = next(
        each for each in range(max(1, round(count * 0.618)), count + 2) if math.gcd(each, count) == 1
    )
    return (turn * stride % count for turn in range(count))
