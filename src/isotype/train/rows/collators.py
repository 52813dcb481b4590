"""Collators that replace TRL's collators, for packed rows and for rows with images.

If attention uses the lengths of documents, TRL (1.16) joins the rows of a batch into one row. If attention uses a
mask, isotype does not join rows, because the mask of a joined row needs memory for every pair of tokens in the batch.

TRL's collator for images includes image tokens in the loss. It finds the tokens of the assistant only if the chat
template has markers. `Pictured` gets the positions of images from the processor, and the positions of the assistant's
text from `isotype.train.rows.assistant`. `Pictured` does not cut rows, because the model needs all tokens of an image.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch

from isotype.compat.peft import why_whole_rows, without_peft
from isotype.compat.templates import render_chat
from isotype.compat.transformers import attention_of, replaced_parts
from isotype.core.errors import Problem, UsageError
from isotype.core.names import plural
from isotype.data.build import undecoded
from isotype.data.cells import left_out
from isotype.data.locate import data_error
from isotype.data.pictures import picture_columns, pictures_in, size_of
from isotype.data.placed import in_parts
from isotype.data.tokens import IGNORED
from isotype.lora.loss.trl_head import goes_by_lengths, take_packed_rows
from isotype.lora.unpadded import hooks_see_one_row, mixes_documents
from isotype.model.shard import is_sharded, outer_gathered
from isotype.train.rows.assistant import Span, assistant_spans, other_spans, renderer


@dataclass(frozen=True)
class Rows:
    """Collator for packed examples that does not join the rows of the batch.

    Attributes:
        packed: True if all documents in an example share one row; False if each document has its own row.
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
    """If a trainer joins rows although its attention needs a mask, replace its collator. Return a note about this, or None."""
    collator = trainer.data_collator
    if not getattr(collator, "padding_free", False):
        return None
    model = without_peft(trainer.model)
    if goes_by_lengths(model) and not why_whole_rows(model):
        return None
    with outer_gathered(trainer.model):
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
    """Return a context in which hooks on embeddings get a batch as one row, because NEFTune scales noise by a row's length."""
    if not isinstance(trainer.data_collator, Rows):
        return nullcontext()
    return hooks_see_one_row(trainer.accelerator.unwrap_model(trainer.model), batch["attention_mask"])


def _no_lengths(model: Any) -> str:
    return f"the mask of the attention ({attention_of(model.config.get_text_config())}) would need memory for every pair of tokens"


_OF_PICTURES = re.compile(
    r"image|img|vision|picture|<row_\d+_col_\d+>|patch|tile_|(^<|\W)[be]oi\W", re.IGNORECASE
)

GIVEN, LEARNED, PICTURE = 0, 1, 2


@dataclass(frozen=True)
class Written:
    """A row as text for the processor, with a placeholder for each image.

    Attributes:
        spans: range [start, end) of each part with loss, in characters of `text`.
        pictures: the images in the order of their placeholders.
    """

    text: str
    spans: Sequence[Span]
    pictures: Sequence[Any]


@dataclass(frozen=True)
class Pictured:
    """Collator for rows with images.

    Attributes:
        only: True if only the assistant's turns have loss (`--assistant_only_loss`).
        whole: True if prompts also have loss (`--completion_only_loss False`).
        multiple: rows are padded to a multiple of this length (`--pad_to_multiple_of`).
        always: True if batches without images get an additional row, which has an image but no labels. A sharded model needs
            this row, because all processes must gather the weights of the vision tower in every step.
    """

    processor: Any
    only: bool = False
    whole: bool = False
    multiple: int | None = None
    always: bool = False

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return ids, mask and labels (int64 `[rows, tokens]`, padded on the right) and the images of a batch.

        Raises:
            TemplateError: the chat template raises an error for a row.
            ValueError: the processor refuses a row, or the template renders the first turns of a conversation differently if
                other turns follow.
        """
        written = [self.written(row) for row in rows]
        if self.always and not any(row.pictures for row in written):
            written.append(self._row_without_loss)
        batch, kinds = self.encoded(written)
        batch["labels"] = batch["input_ids"].masked_fill(kinds != LEARNED, IGNORED)
        return batch

    def written(self, row: Mapping[str, Any], answer: str = "completion") -> Written:
        """Return a row as text. Messages are rendered by the chat template, and `answer` is the name of the answer's column."""
        pictures = pictures_in(row)
        prompt: Any = row.get("prompt")
        completion: Any = row.get(answer)
        messages = row.get("messages")
        if messages is None and isinstance(prompt, str):
            text = prompt + (completion or "")
            return Written(text, [(0 if self.whole else len(prompt), len(text))], pictures)
        first = 0 if messages is not None or self.whole or completion is None else len(prompt)
        render = renderer(self.processor, row)
        turns = _turns(messages if messages is not None else [*prompt, *(completion or ())], len(pictures))
        if self.only:
            return Written(*assistant_spans(render, turns, first), pictures)
        if first or any(map(left_out, turns)):
            return Written(*other_spans(render, turns, first), pictures)
        text = render(turns, messages is None and completion is None)
        return Written(text, [(0, len(text))], pictures)

    def encoded(self, rows: Sequence[Written]) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the processor's outputs and each token's kind (int64 `[rows, tokens]`). Tokens of image n have kind `PICTURE` + n."""
        images = [list(row.pictures) for row in rows]
        with replaced_parts(self.processor) as replaced:
            batch = dict(
                self.processor(
                    images=images if any(images) else None,
                    text=[row.text for row in rows],
                    padding=True,
                    padding_side="right",
                    pad_to_multiple_of=self.multiple,
                    return_tensors="pt",
                    add_special_tokens=False,  # they are in the rendered text
                    return_offsets_mapping=True,
                )
            )
        places = batch.pop("offset_mapping", None)
        if places is None or (any(images) and not replaced):
            what = f"{type(self.processor).__name__}, which does not return the positions of image tokens"
            called = "that calls `__call__` of transformers' `ProcessorMixin`"
            headline = "the tokens of images cannot be found"
            expected = f"a processor with a fast tokenizer {called}"
            raise UsageError.of(headline, what, expected, "use a model with such a processor")
        kinds = torch.full_like(batch["input_ids"], GIVEN)
        around = torch.isin(batch["input_ids"], torch.tensor(sorted(self._image_ids), dtype=torch.long))
        for at, (written, replacements) in enumerate(zip(rows, replaced or [[]] * len(rows), strict=True)):
            spans, pictures = _moved_spans(written, replacements)
            for span in spans:
                kinds[at, _overlaps(places[at], span)] = LEARNED
            kinds[at, around[at]] = GIVEN
            for number, span in enumerate(pictures):
                kinds[at, _overlaps(places[at], span)] = PICTURE + number
        return batch, kinds.masked_fill(batch["attention_mask"] == 0, GIVEN)

    @cached_property
    def _row_without_loss(self) -> Written:
        from PIL import Image

        return Written(self._image_turn, [], [Image.new("RGB", (64, 64))])

    @cached_property
    def _image_turn(self) -> str:
        """A rendered user turn that has an image and no text."""
        turns = [{"role": "user", "content": [{"type": "image"}]}]
        return str(render_chat(self.processor, turns, tokenize=False))

    @cached_property
    def _image_ids(self) -> frozenset[int]:
        """Ids of special tokens that represent an image or come before or after an image."""
        added = self.processor.tokenizer.added_tokens_decoder
        special = ((at, token.content) for at, token in added.items() if token.special)
        return frozenset(at for at, content in special if _OF_PICTURES.search(content))

    def stretches(self, row: Mapping[str, Any]) -> list[tuple[bool, str]]:
        """Split a row into consecutive parts (True if the part has loss, text). An image is shown as its size and its number of tokens."""
        written = self.written(row)
        batch, kinds = self.encoded([written])
        ids = batch["input_ids"][0].tolist()
        parts: list[tuple[bool, str]] = []
        for kind, group in groupby(zip(kinds[0].tolist(), ids, strict=True), key=lambda pair: pair[0]):
            tokens = [token for _, token in group]
            text = self.processor.tokenizer.decode(tokens)
            if kind >= PICTURE:
                width, height = written.pictures[kind - PICTURE].size
                text = f"[image {width} × {height}, {plural(len(tokens), 'token')}]"
            learned = kind == LEARNED
            if parts and parts[-1][0] == learned:
                text = parts.pop()[1] + text
            parts.append((learned, text))
        return parts

    def count(self, row: Mapping[str, Any]) -> tuple[int, int]:
        """Return (tokens in a row with its longest answer, tokens in the row's prompt). Images are not decoded."""
        answers = answers_in(row)
        lengths = [len(self._ids(self.written(row, name))) for name in answers]
        prompt = 0
        if row.get("prompt") and row.get(answers[0]) is not None:
            prompt = len(self._ids(self.written({n: v for n, v in row.items() if n not in answers})))
        return max(lengths), prompt

    def _ids(self, row: Written) -> Sequence[int]:
        pictures = (self._replacement(size_of(picture)) for picture in row.pictures)
        text = row.text
        if row.pictures:
            placeholders, tokens = zip(*pictures, strict=True)
            parts = re.split(f"({re.escape(placeholders[0])})", text)
            text = "".join(part if at % 2 == 0 else tokens[at // 2] for at, part in enumerate(parts))
        ids: Sequence[int] = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @cached_property
    def _replacements(self) -> dict[tuple[int, int], tuple[str, str]]:
        return {}

    def _replacement(self, size: tuple[int, int] | Problem) -> tuple[str, str]:
        """Return the template's placeholder for an image, and the text that replaces the placeholder for an image of this size."""
        if isinstance(size, Problem):
            raise ValueError(size.given)
        if size not in self._replacements:
            from PIL import Image

            row = {"images": [[Image.new("RGB", size)]], "text": [self._image_turn]}
            with replaced_parts(self.processor) as parts:
                self.processor(**row, return_tensors="pt")
            ((replaced,),) = parts
            self._replacements[size] = replaced["text"], replaced["replacement"]
        return self._replacements[size]


def exclude_pictures_from_loss(trainer: Any, training: Any) -> None:
    """Replace the image collator of TRL's SFT trainer with a `Pictured` that has the settings in `training`.

    Raises:
        DataError: the model is sharded, and only some of the preference pairs have images.
    """
    from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    collator, sharded = trainer.data_collator, any(map(is_sharded, trainer.model.parameters()))
    if isinstance(collator, DataCollatorForVisionLanguageModeling):
        only, whole = training.assistant_only_loss, not collator.completion_only_loss
        multiple = collator.pad_to_multiple_of
        trainer.data_collator = Pictured(collator.processor, only, whole, multiple, always=sharded)
    if sharded and isinstance(collator, DataCollatorForVisionPreference):
        pictures = undecoded(trainer.train_dataset.select_columns(picture_columns(trainer.train_dataset)))
        empty = next((at for at, row in enumerate(pictures) if not pictures_in(row)), None)
        if empty is not None:
            what = f"row {empty + 1} has no image, but others have one"
            expected = (
                "an image in every pair, because all processes of a sharded model must run its vision tower"
            )
            problem = Problem(what, expected, "remove such rows, or train without --fsdp")
            raise data_error("preference pairs with and without images", [problem])


def answers_in(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the answer columns in a row, or `completion` if there are none."""
    names = ("completion", "chosen", "rejected")
    return [name for name in names if row.get(name) is not None] or ["completion"]


def _turns(messages: Sequence[Mapping[str, Any]], pictures: int) -> list[Any]:
    """Return `messages` with each content as a list of parts, and with an image part for each image."""
    from trl import prepare_multimodal_messages

    turns = [dict(turn) for turn in messages]
    contents = [turn["content"] for turn in turns if isinstance(turn.get("content"), list)]
    if any(part["type"] == "image" for parts in contents for part in parts):  # else TRL adds the image parts
        turns = [in_parts(turn) for turn in turns]
    placed: list[Any] = prepare_multimodal_messages(turns, images=[None] * pictures)
    return placed


def _moved_spans(row: Written, replaced: Sequence[Mapping[str, Any]]) -> tuple[list[Span], list[Span]]:
    """Return (spans with loss, spans of images) in the text whose placeholders were replaced by image tokens."""
    ends = [place["span"][1] for place in replaced]
    gains = [0, *(place["new_span"][1] - place["span"][1] for place in replaced)]
    spans = [
        (first + gains[bisect_right(ends, first)], last + gains[bisect_right(ends, last)])
        for first, last in row.spans
    ]
    return spans, [place["new_span"] for place in replaced]


def _overlaps(places: torch.Tensor, span: Span) -> torch.Tensor:
    """Return bool `[tokens]`: True for each token with a character in `span`. `places` (`[tokens, 2]`) has the tokens' spans."""
    return (places[:, 0] < span[1]) & (places[:, 1] > span[0])
