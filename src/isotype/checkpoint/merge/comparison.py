"""Measures how much of the learned change a merged model keeps. The models run in float32, block by block.

Let p be the next-token distributions of the trained model (the base model of the training with the adapter):

    kept = 1 - KL(p || merged) / KL(p || base)

`kept` is 1 if the merged model has the outputs of the trained model, and 0 if it has the outputs of the base. If the
texts are training rows, losses are also compared: (base - merged) / (base - trained).
"""

import gc
import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from isotype.checkpoint.adapter import Adapter, deferred_base, fill, inject, load_base
from isotype.checkpoint.block_streaming import DeferredBlocks
from isotype.checkpoint.load import load
from isotype.checkpoint.merge.layers import (
    as_stored,
    dense_policy,
    merge_in_float32,
    tuner_layers,
    without_part,
)
from isotype.checkpoint.merge.report import ENOUGH, Form, LogitsDifference, compare_logits
from isotype.checkpoint.resolve import resolve_precision
from isotype.model.enforce import enforce_model
from isotype.model.walk import outermost_blocks
from isotype.precision.policy import PrecisionPolicy
from isotype.ranges.measure import LENGTH, Batches, Rows, positions, token_rows

TOKENS, _LENGTH = 512, 256  # approximate number of compared tokens, and maximum number in a row
_STORED = 1 << 28  # maximum bytes of stored logits; more logits are stored for every n-th token only
_AT_ONCE = 1 << 29  # bytes of logits of one forward
_CHUNK = 64  # tokens whose divergence is computed at a time
_IGNORED = -100  # `ignore_index` of `cross_entropy`


def fitting(rows: Rows | None, tokenizer: Any, model: Any, tokens: int) -> Rows:
    """Return about `tokens` tokens of `rows`, cut to the model's context length. If `rows` is None, use isotype's texts."""
    longest = min(_LENGTH, positions(model) or _LENGTH)
    if rows is None:
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has a tokenizer
        vocabulary = int(model.config.get_text_config().vocab_size)
        texts, _ = token_rows(tokenizer, vocabulary, 4, min(64, longest))
        return Rows(tuple((ids, ids) for ids in texts.tolist()))
    chosen: list[tuple[Sequence[int], Sequence[int]]] = []
    for ids, labels in rows.texts:
        if sum(len(row) for row, _ in chosen) < tokens:
            chosen.append((ids[:longest], labels[:longest]))
    return replace(rows, texts=tuple(chosen))


@dataclass
class Learned:
    """The outputs of a trained model on some texts, and their distance from the outputs of the base.

    Attributes:
        step: the logits of every `step`-th token are stored.
        pictured: model inputs of another sample, an image with a text after it; None if the model accepts no images.
        logits: the trained model's logits of each text, `[tokens, vocabulary]`.
        base: KL(trained || base) per token, in nats.
        losses: losses of the base and of the trained model; None if the texts are not training rows.
    """

    rows: Rows
    step: int
    pictured: dict[str, Any] | None = None
    logits: list[torch.Tensor] = field(default_factory=list)
    base: float = 0.0
    losses: tuple[float, float] | None = None

    @torch.no_grad()
    def run(self, model: Any) -> tuple[list[torch.Tensor], float | None]:
        """Return (logits of every `step`-th token of each text, mean loss or None without labels)."""
        stored, losses = [], []
        for (ids, labels), logits in self._forwards(model.eval()):
            # A classifier has one row of logits for the whole text.
            logits = logits[: len(ids)] if logits.ndim == 2 else logits[None]
            stored.append(logits[:: self.step].clone())
            if self.rows.source is not None and len(logits) == len(labels) > 1:
                targets = torch.tensor(labels[1:])
                loss = nn.functional.cross_entropy(logits[:-1], targets, reduction="none")
                losses.append(loss[targets != _IGNORED])
        if self.pictured is not None:
            stored.append(model(**self.pictured).logits[0].float()[:: self.step].clone())
        every = torch.cat(losses) if losses else torch.zeros(0)
        return stored, float(every.double().mean()) if len(every) else None

    def _forwards(self, model: Any) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield each text with its logits. The texts are in a few large batches, because each forward reads all blocks from disk."""
        texts, pad = self.rows.texts, getattr(model.config.get_text_config(), "pad_token_id", None)
        longest = max(len(ids) for ids, _ in texts)
        at_once = max(1, _AT_ONCE // (longest * _vocabulary(model) * 4 + 1))
        # A classifier needs the padding token to find the end of each text in a batch.
        at_once = at_once if pad is not None else 1
        for at in range(0, len(texts), at_once):
            group = texts[at : at + at_once]
            rows = [torch.tensor(text) for text, _ in group]
            ids = pad_sequence(rows, batch_first=True, padding_value=pad or 0)
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
            logits = model(input_ids=ids, attention_mask=mask, **more).logits.float()
            yield from zip(group, logits, strict=True)

    def compare(self, model: Any) -> LogitsDifference:
        logits, loss = self.run(model)
        losses = None if self.losses is None or loss is None else (*self.losses, loss)
        pictured = len(self.logits[-1]) if self.pictured is not None else 0
        source, difference = self.rows.source, self.difference(logits)
        return replace(difference, base_kl=self.base, losses=losses, source=source, pictured=pictured)

    def difference(self, logits: Sequence[torch.Tensor]) -> LogitsDifference:
        """Return the difference from the logits of the trained model."""
        largest, nats, tokens = 0.0, 0.0, 0
        for p, q in zip(self.logits, logits, strict=True):
            for a, b in zip(torch.split(p, _CHUNK), torch.split(q, _CHUNK), strict=True):
                chunk = compare_logits(a.double(), b.double())
                largest = max(largest, chunk.max_abs)
                nats, tokens = nats + chunk.mean_kl * chunk.tokens, tokens + chunk.tokens
        return LogitsDifference(tokens, largest, nats / max(1, tokens))


def learned(
    adapter: Adapter, policy: PrecisionPolicy, rows: Rows | None, tokenizer: Any, tokens: int = TOKENS
) -> Learned:
    """Run the base, and then the base with the adapter, on about `tokens` tokens of `rows`, under the policy of the training."""
    deferred = deferred_base(adapter)
    model = load_base(adapter, policy, deferred)
    _in_float32(model, policy, deferred)
    rows = fitting(rows, tokenizer, model, tokens)
    size = sum(len(ids) for ids, _ in rows.texts) * _vocabulary(model) * 4
    result = Learned(rows, max(1, -(-size // _STORED)), _image_sample(model, tokenizer))
    base, before = result.run(model)
    result.logits, after = result.run(trained(adapter, policy))
    result.base = result.difference(base).mean_kl
    if before is not None and after is not None:
        result.losses = (before, after)
    gc.collect()  # a PEFT model has reference cycles
    return result


def _image_sample(model: Any, tokenizer: Any) -> dict[str, Any] | None:
    """Return the inputs for `Learned.pictured`. `logits_to_keep` makes the model return only the logits of the text."""
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return None
    (batch,) = Batches.for_model(model, tokenizer, LENGTH).batches
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return {**inputs, "logits_to_keep": LENGTH - 1} if "pixel_values" in batch else None


def trained(adapter: Adapter, policy: PrecisionPolicy) -> Any:
    """Load the base under `policy`, and add the adapter without merging it. The forward computes in float32, one block at a time."""
    deferred = deferred_base(adapter)
    model = load_base(adapter, policy, deferred)
    adapter = without_part(model, adapter, policy)
    peft_model = inject(model, adapter, _in_float32(model, policy, deferred))
    fill(peft_model, adapter)
    return peft_model


def merged_in_float32(path: Path, model_class: Any) -> Any:
    """Load a merged model from its files. The model's forward converts one block at a time to float32."""
    deferred = DeferredBlocks()
    policy = resolve_precision(path, "float32", device="cpu")
    model = load(path, policy, model_class=model_class, deferred=deferred)
    _in_float32(model, policy, deferred)
    return model


def _in_float32(model: Any, policy: PrecisionPolicy, deferred: DeferredBlocks) -> PrecisionPolicy:
    """Make a model compute in float32 from the weights that `policy` stores; return the new policy."""
    dense = dense_policy(policy)
    deferred.dequantize(model, dense.plain)
    wide = replace(
        dense, storage="float32", compute=torch.float32, pinned=(), exceptions=(), wide_residual=False
    )
    enforce_model(model, wide)
    deferred.on_forward()
    return wide


def _vocabulary(model: Any) -> int:
    return getattr(model.config.get_text_config(), "vocab_size", 0)


@dataclass(frozen=True)
class Candidate:
    """A storage format to try: arguments for `isotype merge`, format, bits per weight, and policy of the base."""

    arguments: str
    form: str
    bits: float
    policy: PrecisionPolicy


def cheapest(outputs: Learned, adapter: Adapter, choices: Sequence[Candidate]) -> Form:
    """Try formats without writing files. Return the first format that keeps `ENOUGH` of the learning, or float32 if none does."""
    model = policy = None
    for candidate in choices:
        if candidate.policy != policy:
            model = None
            gc.collect()
            model, policy = trained(adapter, candidate.policy), candidate.policy
        with merged_as(model, candidate.form):
            part = outputs.compare(model).kept
        if part is not None and part >= ENOUGH:
            return Form(candidate.arguments, candidate.bits, part)
    return Form("--dtype float32", 32, 1.0)


@contextmanager
def merged_as(model: Any, form: str) -> Iterator[None]:
    """In this context, each block of a `trained` model is merged and rounded before its forward, and restored afterwards."""
    saved: dict[nn.Parameter, torch.Tensor] = {}

    def before(block: nn.Module, *_: Any) -> None:
        saved.update((parameter, parameter.data) for parameter in block.parameters())
        for name, layer in tuner_layers(block):
            merge_in_float32(name, layer)
            base = layer.get_base_layer()
            for leaf, parameter in base.named_parameters():
                parameter.data = as_stored(f"{name}.{leaf}", base, parameter.data, form).float()

    def after(block: nn.Module, *_: Any) -> None:
        for _name, layer in tuner_layers(block):
            if hasattr(layer, "ln_tuning_layers"):
                layer.unmerge()  # merging exchanged two modules
            layer.merged_adapters = []
        for parameter, data in saved.items():
            parameter.data = data
        saved.clear()

    with ExitStack() as hooks:
        for _, block in outermost_blocks(model.get_base_model()):
            hooks.callback(block.register_forward_pre_hook(before).remove)
            hooks.callback(block.register_forward_hook(after, prepend=True).remove)
        yield
