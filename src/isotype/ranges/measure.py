"""Measures the largest values of a module's operators in a forward and a backward in float32."""

import contextlib
import datetime
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Self

import torch
from torch import nn

from isotype.compat.peft import without_peft
from isotype.compat.torch import tree_map
from isotype.core.console import Bar
from isotype.core.dtypes import dtype_name
from isotype.core.errors import UsageError
from isotype.core.names import free_memory, plural
from isotype.core.random_states import random_states_kept
from isotype.model.loss import find_loss, loss_of
from isotype.model.walk import blocks_in, kind_of
from isotype.precision.devices.probe import real_device
from isotype.precision.ranges import Ranges
from isotype.ranges.pictures import by_config, pictures_of
from isotype.ranges.recorder import RangeRecorder
from isotype.ranges.twin import Read, Twin, twin_of, unwrapped
from isotype.ranges.weights import Weights

LENGTH = 64
"""Tokens per text."""

_SEED = 0
_FIRST = 5  # the first token id after the special tokens of most vocabularies


@dataclass(frozen=True)
class Rows:
    """Texts for comparing models, each as (token ids, labels). `source` is None for isotype's own texts."""

    texts: tuple[tuple[Sequence[int], Sequence[int]], ...]
    source: str | None = None


@dataclass(frozen=True)
class Batches:
    """The batches on which a model is measured.

    Attributes:
        rows: number of texts in a batch if each text is recorded separately; 0 if the whole batch is recorded as one text.
        text: a description of the inputs.
        notes: sentences on parts of the model's inputs that the batches lack.
    """

    batches: tuple[Mapping[str, Any], ...]
    rows: int
    text: str
    tokens: int
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, batch: Any) -> Self:
        """Return the user's batch or batches. Raise UsageError if they are not mappings of tensors."""
        several = [batch] if isinstance(batch, Mapping) else batch
        batches = list(several) if isinstance(several, Sequence) else []
        if not batches or not all(isinstance(item, Mapping) for item in batches):
            kind = f"a {type(batch).__name__}"
            expected = "a dict of the tensors with which the model is called, or a list of such dicts"
            fix = "pass one batch of the training data loader"
            raise UsageError.of("no batch to measure", kind, expected, fix)
        text = "the batch given" if len(batches) == 1 else f"the {len(batches)} batches given"
        return cls(tuple(map(dict, batches)), 0, text, sum(map(_tokens_in, batches)))

    @classmethod
    def for_model(cls, model: Any, tokenizer: Any | None, tokens: int) -> Self:
        """Return a batch of isotype's texts, or of random token ids, with the other inputs of the model.

        Args:
            model: a transformers model, with or without PEFT adapters, on any device, including the meta device.
            tokenizer: the checkpoint's tokenizer or processor; None for random token ids.
            tokens: total number of tokens, rounded up to whole texts; a text has 64 tokens, or `tokens` if that is less.

        Raises:
            UsageError: the model accepts no token ids.
        """
        base = without_peft(model)
        config: Any = getattr(base, "config", None)
        if not hasattr(config, "to_dict") or getattr(base, "main_input_name", "input_ids") != "input_ids":
            named = getattr(base, "main_input_name", "arguments of its own")
            what = f"{type(base).__name__}, which takes {named}"
            fix = "pass batch=, the arguments of the model's forward"
            raise UsageError.of("isotype cannot create a batch for this model", what, "a batch", fix)
        length = min(LENGTH, max(2, tokens), positions(base) or LENGTH)
        rows = -(-tokens // length)
        words = None if tokenizer is None else getattr(tokenizer, "tokenizer", tokenizer)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        size = int(getattr(text, "vocab_size", 0) or getattr(config, "vocab_size", 0))
        ids, source = token_rows(words, size, rows, length)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        pictures, notes = _add_pictures(batch, base, tokenizer, size)
        batch["labels"] = _labels(base, batch["input_ids"], pictures)
        return cls((batch,), rows, source, ids.numel(), notes)

    def require_positions(self, model: nn.Module) -> Self:
        """Return the batches. Raise UsageError if a row is longer than the model's position table."""
        limit = min(_learned(model), default=None)
        ids = (batch.get("input_ids") for batch in self.batches)
        longest = max((rows.shape[-1] for rows in ids if isinstance(rows, torch.Tensor)), default=0)
        if limit is not None and longest > limit:
            headline, row = "a row is longer than the model's position table", f"a row of {longest} tokens"
            expected = f"at most {limit} tokens, the number of positions of {type(model).__name__}"
            raise UsageError.of(headline, row, expected, "cut the rows")
        return self


_LEARNED = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?|pos_embed\w*)$")
_PICTURES = re.compile(r"vision|visual|image|patch")


def positions(model: nn.Module) -> int | None:
    """Return the largest number of positions of a model; None if its config has no limit."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    bounds = [limit] if isinstance(limit, int) and limit > 0 else []
    return min([*bounds, *_learned(model)], default=None)


def _learned(model: nn.Module) -> list[int]:
    """Return the usable rows of each position table. The first position is row 2 in OPT, and row padding index + 1 in RoBERTa."""
    limits = []
    for name, table in model.named_modules():
        if _LEARNED.search(name) and not _PICTURES.search(name) and isinstance(table, nn.Embedding):
            after_padding = 0 if table.padding_idx is None else table.padding_idx + 1
            limits.append(table.num_embeddings - (getattr(table, "offset", 0) or after_padding))
    return limits


def _tokens_in(batch: Mapping[str, Any]) -> int:
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    named = [batch[name] for name in ("input_ids", "decoder_input_ids") if name in batch]
    counted = named or [tensor for tensor in tensors if not tensor.is_floating_point()]
    if counted:
        return int(counted[0].numel())
    # In a batch of embeddings (`inputs_embeds`), each vector is a token.
    return int(tensors[0].numel() // max(1, tensors[0].shape[-1])) if tensors and tensors[0].ndim else 0


def passages() -> tuple[str, ...]:
    """Return the texts that come with this package."""
    path = resources.files("isotype.data") / "passages" / "passages.txt"
    return tuple(path.read_text(encoding="utf-8").strip().split("\n\f\n"))


def token_rows(tokenizer: Any | None, vocabulary: int, rows: int, length: int) -> tuple[torch.Tensor, str]:
    """Return token ids, int64 `[rows, length]`, and a clause on their source.

    Row r begins with isotype's passage r, and continues with the next passages. If there is no tokenizer, or if it
    has no tokens for the passages, ids are random with a fixed seed.
    """
    # Special tokens at the start come once per row.
    pieces = [] if tokenizer is None else [tokenizer(text)["input_ids"] for text in passages()]
    if not any(pieces):
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(min(_FIRST, vocabulary - 1), vocabulary, (rows, length), generator=generator)
        missing = "tokenizer" if tokenizer is None else "tokenizer with tokens for isotype's texts"
        drawn = f"{plural(rows, 'row')} of {length} token ids drawn with a fixed seed"
        return ids, f"{drawn}, because there is no {missing}"
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
"""Size of an image in pixels for models that take any size."""


def _labels(base: nn.Module, ids: torch.Tensor, pictures: int) -> torch.Tensor:
    name = type(base).__name__
    if name.endswith("ForSequenceClassification"):
        return torch.zeros(ids.shape[0], dtype=torch.long)
    if name.endswith("ForTokenClassification"):
        return torch.zeros_like(ids)
    # Image tokens have no labels.
    labels = ids.clone()
    labels[:, 1 : 1 + pictures] = -100  # torch's `ignore_index`
    return labels


def _add_pictures(
    batch: dict[str, torch.Tensor], base: Any, processor: Any | None, size: int
) -> tuple[int, tuple[str, ...]]:
    if getattr(base.config, "vision_config", None) is None:
        return 0, ()
    pictures = pictures_of(base.config, processor, [_PICTURE]) or by_config(base.config)
    if pictures is None:
        return 0, ("the batch has no images: there is no processor, and the config defines no image inputs",)
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
    return pictures.tokens, ("the images of the batch are random: normally distributed, with a fixed seed",)


_ROOM = 1.5
"""Memory that a measurement needs, divided by the memory of the weights of the largest block."""


@dataclass(frozen=True)
class Measured:
    """The module to measure.

    Attributes:
        read: a function that reads a parameter's values from files; None for parameters in memory.
    """

    model: nn.Module
    source: str
    device: torch.device
    read: Read | None = None
    notes: tuple[str, ...] = ()

    def fitting_dtype(self, device: torch.device) -> torch.dtype:
        """Return float32, or bfloat16 if the largest block does not fit into the device's memory in float32."""
        free = free_memory(device)
        needed = _ROOM * 4 * max(parts(self.model), default=0)
        return torch.bfloat16 if free is not None and needed > free else torch.float32

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Return a `Measured` for a model in memory. Raise UsageError if this process does not have the weights' values."""
        model = unwrapped(model)
        for name, parameter in model.named_parameters():
            if parameter.is_meta or hasattr(parameter, "full_tensor"):
                what = f"{name} {'on the meta device' if parameter.is_meta else 'sharded over processes'}"
                fix = "pass the checkpoint, by its path or hub id"
                headline, expected = "this model cannot be measured in memory", "weights with values"
                raise UsageError.of(headline, what, expected, fix)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return cls(model, type(without_peft(model)).__name__, device)


def parts(model: nn.Module) -> list[int]:
    """Return the number of weights of each block and each other module. Only one of these parts is in memory at a time."""
    blocks = blocks_in(model)
    inside = {id(module) for block in blocks for module in block.modules()}
    parts = [sum(weight.numel() for weight in block.parameters()) for block in blocks]
    # An embedding is not a part, because only the looked-up rows are read.
    outside = [m for m in model.modules() if id(m) not in inside and kind_of(m) != "embedding"]
    return parts + [sum(w.numel() for w in module.parameters(recurse=False)) for module in outside]


def measure(
    measured: Measured,
    run: Batches,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> Ranges:
    """Measure the value ranges of a model as `isotype.measure_ranges` does. The caller sets the `key` of the result."""
    where = real_device(device) if device is not None else measured.device
    chosen = dtype or measured.fitting_dtype(where)
    recorder, weights = RangeRecorder(), Weights(chosen, where)
    bar = Bar("measuring value ranges", progress)
    twin = twin_of(measured.model, weights, recorder, bar.advance, measured.read)
    bar.total = 2 * len(run.batches) * sum(map(len, twin.blocks))
    try:
        losses, notes = _run(twin, recorder, run, where, chosen)
    finally:
        bar.close()
    return Ranges(
        source=measured.source,
        key="",
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        dtype=dtype_name(chosen),
        text=run.text,
        tokens=run.tokens,
        batches=run.rows or len(run.batches),
        spread=recorder.spread(),
        modules=recorder.module_ranges(twin.weight_ranges()),
        operators=recorder.operators(),
        stream=_stream(recorder, twin),
        loss=losses,
        notes=(*measured.notes, *run.notes, *notes),
    )


def _run(
    twin: Twin, recorder: RangeRecorder, run: Batches, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    losses, notes = [], list[str]()
    chosen: dict[str, set[int]] = {}
    with undisturbed(device), _experts_noted(twin.model, chosen):
        for batch in run.batches:
            inputs = on_device(batch, device, dtype)
            with recorder.step(run.rows):
                output = twin.model(**inputs)
                if find_loss(output) is None:
                    notes.append(
                        "the model returns no loss, so the gradients belong to the mean of its first output"
                    )
                loss = loss_of(output)
                loss = loss if not loss.ndim else loss.float().mean()
                del output  # logits can be larger than a block of a small model
                recorder.phase = "backward"
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
                else:
                    notes.append(
                        "the loss depends on no tensor that requires a gradient, so there are no gradients"
                    )
            twin.weights.end_step()
            losses.append(float(loss.detach()))
    reached = sum(map(len, chosen.values()))
    experts = sum(map(_experts_of, map(twin.model.get_submodule, chosen)))
    if reached < experts:
        total = plural(experts, "expert")
        notes.append(f"tokens reached {reached:,} of {total}: the values of the other experts are unknown")
    if recorder.first:
        notes.append(f"not finite in {dtype_name(dtype)}: {recorder.first}")
    return tuple(losses), tuple(dict.fromkeys(notes))


def _experts_of(module: Any) -> int:
    count = getattr(module, "num_experts", 0)
    stacked = any(weight.ndim == 3 for weight in module.parameters(recurse=False))
    return count if isinstance(count, int) and stacked else 0


@contextlib.contextmanager
def _experts_noted(model: nn.Module, chosen: dict[str, set[int]]) -> Iterator[None]:
    """In the `with` block, record in `chosen`: name of an experts module -> indices of the experts that routers choose."""

    def note(name: str, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.dtype == torch.int64:
                chosen.setdefault(name, set()).update(value.flatten().tolist())

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if _experts_of(module):
                hook = module.register_forward_pre_hook(functools.partial(note, name), with_kwargs=True)
                stack.callback(hook.remove)
        yield


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Turn off the caller's autocast and inference mode in the `with` block. At the end of the block, restore the random states."""
    no_autocast = torch.autocast(device.type, enabled=False)
    with random_states_kept(device), torch.inference_mode(False), torch.enable_grad(), no_autocast:
        yield


def on_device(batch: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return a batch with its tensors on `device`. Float tensors are copies in `dtype` that require gradients."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            return value.to(device)
        # Inputs that require gradients let gradients reach modules with only images or embeddings as inputs.
        return value.detach().to(device, dtype, copy=True).requires_grad_()

    return {name: tree_map(moved, value) for name, value in batch.items()}


def _stream(recorder: RangeRecorder, twin: Twin) -> tuple[str, ...]:
    """Return the names of the modules that return the residual stream: the blocks, and the embeddings before them."""
    order = recorder.order()
    stream: list[str] = []
    start = 0
    lists = [blocks for blocks in twin.blocks if blocks[0] in order]
    for blocks in sorted(lists, key=lambda blocks: order[blocks[0]]):
        between = (name for name, at in order.items() if start <= at < order[blocks[0]])
        embedding = next((name for name in between if recorder.kind(name) == "embedding"), None)
        stream += [] if embedding is None else [embedding]
        stream += [block for block in blocks if block in order]
        start = order[stream[-1]]
    return tuple(dict.fromkeys(stream))
