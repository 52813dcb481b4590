"""Counts the tokens in the rows of a data set, and in rows that are cut to `max_length` or packed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import takewhile
from math import prod
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from isotype.compat.peft import activating, kind_of_adapter
from isotype.compat.templates import render_chat
from isotype.core.errors import DataError, one_line
from isotype.data.build import undecoded
from isotype.data.methods import METHODS
from isotype.data.pictures import picture_columns
from isotype.data.placed import alike_at_start
from isotype.lora.unpadded import LEAST_PADDING
from isotype.train.rows.collators import Pictured

if TYPE_CHECKING:
    from isotype.train.command.settings import Settings

UNBOUNDED = "the length of rows is not limited (--max_length limits it)"

COUNTED_ROWS = 2000
"""Maximum number of rows that are tokenized. In a larger data set, only every n-th row is tokenized."""


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens in the rows of a data set.

    Attributes:
        tokens: number of tokens in each tokenized row. For a preference pair, this is the number with its longer answer.
        rows: number of rows in the data set.
        doubled: number of tokenized rows that begin with two beginning-of-text tokens.
        prompt: number of tokens in the shortest prompt. Prompts have no loss.
        answers: for each tokenized row, the number of tokens with each of its answers; () for rows with images.
    """

    tokens: tuple[int, ...]
    rows: int
    doubled: int = 0
    prompt: int = 0
    answers: tuple[tuple[int, ...], ...] = ()

    @property
    def longest(self) -> int:
        return max(self.tokens)

    def begun_twice(self) -> str | None:
        """Return a note on rows that begin with two beginning-of-text tokens; None without such rows."""
        if not self.doubled:
            return None
        rows = f"{self.doubled:,} of {len(self.tokens):,} rows"
        return f"{rows} begin with the beginning-of-text token, but the tokenizer adds this token again; remove it from the rows"

    def cut(self, limit: int | None, whole: bool = False) -> str | None:
        """Describe the rows of more than `limit` tokens. They are cut, or omitted if `whole` is True. Return None without such rows."""
        over = [length - limit for length in self.tokens if limit is not None and length > limit]
        if not over:
            return None
        rows = f"{len(over):,} of {len(self.tokens):,} rows"
        sample = f" (of {self.rows:,}, a sample)" if len(self.tokens) < self.rows else ""
        are = "is" if self.rows == 1 else "are"
        done = "left out" if whole else f"{sum(over):,} of {sum(self.tokens):,} tokens are cut"
        longer = f"{rows}{sample} {are} longer than max_length {limit}"
        return f"{longer}: {done}; the longest has {self.longest:,}"


def sampled(rows: Any) -> range:
    """Return the indices of the rows to tokenize or decode: all rows, or a sample of a large data set."""
    return range(0, len(rows), max(1, -(-len(rows) // COUNTED_ROWS)))


def lengths_in(settings: Settings, tokenizer: Any, rows: Any, *, every: bool = False) -> Lengths | None:
    """Return the lengths of a sample of the training rows, or of all rows if `every` is True."""
    only_assistant = bool(settings.assistant_only_loss)
    return _reader(settings, tokenizer).lengths(rows, every=every, only_assistant=only_assistant)


def _reader(settings: Settings, tokenizer: Any) -> RowTokens:
    field = settings.dataset_text_field or "text"
    return RowTokens(settings.method.name, tokenizer, field, settings.data_name)


def adapter_notes(settings: Settings, tokenizer: Any, rows: Any) -> list[str]:
    """Return a note if AdaLoRA is trained further (its ranks then stay the same), or if rows lack tokens of the
    adapter.

    Raises:
        DataError: no row has the tokens without which the adapter has no effect.
    """
    config = None if settings.start is None else settings.start.config
    if config is not None and kind_of_adapter(config) == "ADALORA":
        return ["AdaLoRA keeps its ranks: TRL's trainers do not call update_and_allocate, which reduces them"]
    wanted = {} if config is None else activating(config)
    unknown = not hasattr(rows, "__len__") or picture_columns(rows) or settings.chat_template_path
    if not wanted or unknown:
        return []
    reader, sequence = _reader(settings, tokenizer), wanted.get("alora_invocation_tokens")
    shown = reader.tokenizer.decode(sequence or wanted["token_indices"])
    tried, lacking = sampled(rows), 0
    for at in tried:
        ids = [token for part in reader.ids(rows[at]) for token in part]
        if sequence is None:
            lacking += {*wanted["token_indices"]}.isdisjoint(ids)
        else:
            lacking += sequence not in (ids[start : start + len(sequence)] for start in range(len(ids)))
    if lacking == len(tried):
        what, expected = f"{settings.data_name}: no row has the tokens {shown!r}", "rows with these tokens"
        fix = "add the tokens to the rows, or to a chat template: --chat_template_path FILE.jinja"
        headline = "the adapter has an effect only with tokens that the rows lack"
        raise DataError.of(headline, what, expected, fix)
    rows_lack = f"{lacking:,} of {len(tried):,} rows lack the tokens {shown!r}"
    return [f"{rows_lack}, without which the adapter learns nothing"] if lacking else []


def refused_row(source: str, at: int, error: TemplateError) -> DataError:
    place = f"{source}, row {at + 1}" if source else f"row {at + 1}"
    row, expected = f"{place}: {one_line(error)}", "turns that the chat template can render"
    fix = "change the row, or use another template with --chat_template_path"
    return DataError.of("the model's chat template raises an error for a row", row, expected, fix)


def longest_possible(
    lengths: Lengths | None, limit: int | None, *, packed: bool, completion: int, pictured: bool = False
) -> tuple[int | None, str]:
    """Return (tokens in the longest possible training row, ""), or (None, reason) if the length has no limit.

    Args:
        limit: maximum number of tokens in a row (longer rows are cut); None if rows are not cut.
        packed: True if short rows are joined up to `limit`.
        completion: number of tokens in the completion that follows each row.
        pictured: True if the rows have images. Without `limit`, the result is the length of the longest sampled row.
    """
    whole = lengths is not None and (len(lengths.tokens) == lengths.rows or (pictured and limit is None))
    if lengths is None or packed or not whole:
        return (None, UNBOUNDED) if limit is None else (limit, "")
    # A trainer may add a token at the end of a row of text, but none between a prompt and its completion.
    longest = lengths.longest + (completion or not pictured)
    return (longest if limit is None else min(longest, limit)), ""


def packed_rows(lengths: Lengths | None, limit: int | None) -> list[list[int]] | None:
    """Return the document lengths in each row that TRL packs (best-fit decreasing); None if a length is unknown."""
    if lengths is None or limit is None or len(lengths.tokens) < lengths.rows:
        return None
    room: list[tuple[int, int]] = []  # (free tokens of a row, its number), ascending
    rows: list[list[int]] = []
    for length in sorted((min(token, limit) for token in lengths.tokens), reverse=True):
        at = bisect_left(room, (length, 0))
        if at == len(room):
            room.append((limit, len(rows)))
            rows.append([])
        free, number = room.pop(at)
        rows[number].append(length)
        insort(room, (free - length, number))
    return rows


def longest_of_batches(tokens: Sequence[int], rows: int) -> float:
    """Return the expected number of tokens in the longest row of a batch of `rows` rows, drawn without replacement.

    There are C(n, r) draws of r rows out of n. In C(k - 1, r - 1) of these draws, the longest row is row k (by
    length).
    """
    ordered, count = sorted(tokens), len(tokens)
    rows = min(rows, count)
    mean, share = 0.0, rows / count  # the share of draws whose longest row is number k
    for k in range(count, rows - 1, -1):
        mean += share * ordered[k - 1]
        if k > rows:
            share *= (k - rows) / (k - 1)
    return mean


def padding_share(tokens: Sequence[int], rows: int) -> float:
    """Return the expected share of padding in batches of `rows` rows. Rows are padded to the longest row of their batch."""
    share = 1 - sum(tokens) / len(tokens) / longest_of_batches(tokens, rows)
    return max(0.0, share)  # rounding may give a negative number


def fullest_batch(lengths: Lengths | None, limit: int, rows: int) -> list[tuple[int, ...]]:
    """Return the fullest batch of a run that removes padding. The result has the lengths of the answers of each row.

    If a batch has little padding (`LEAST_PADDING`), its padding is not removed. If such a batch with its padding is
    larger than the batch with the most tokens, the rows of the latter are lengthened to the same size. The result is []
    if a length is unknown.

    Args:
        limit: largest number of tokens in a row. Longer rows are cut.
    """
    if lengths is None or len(lengths.answers) < lengths.rows:
        return []
    # A trainer may add a token at the end of a row of text.
    cut = sorted((tuple(min(n + 1, limit) for n in row) for row in lengths.answers), key=max)
    cut += cut[-1:] * (rows - len(cut))
    largest, fullest = 0, list[tuple[int, int]]()  # (tokens, index) of the rows with the most tokens
    for at, row in enumerate(cut):
        heappush(fullest, (sum(row), at))
        if len(fullest) > rows:
            heappop(fullest)
        padded = max(row) * len(row) * len(fullest)
        if sum(tokens for tokens, _ in fullest) > (1 - LEAST_PADDING) * padded:
            largest = padded
    batch = [cut[at] for _, at in fullest]
    missing = largest - sum(map(sum, batch))
    for place, row in enumerate(batch):
        batch[place] = tuple(n + max(0, min(max(cut[-1]) - n, -(-missing // len(row)))) for n in row)
        missing -= sum(batch[place]) - sum(row)
    return batch


def one_a_row(lengths: Lengths | None, limit: int, rows: int) -> tuple[int, int]:
    """Return (rows, length) of the largest padded batch if each document of `rows` packed rows becomes a separate row."""
    largest: tuple[int, int] = (0, 0)
    # Rows are visited in the order of their longest document. The largest batch with a row as its longest consists of this
    # row and the earlier rows with the most documents.
    fullest: list[int] = []
    for row in sorted(packed_rows(lengths, limit) or [[limit]] * rows, key=max):
        largest = max(largest, (sum(fullest) + len(row), max(row)), key=prod)
        heappush(fullest, len(row))
        if len(fullest) >= rows:
            heappop(fullest)
    return largest


@dataclass(frozen=True)
class RowTokens:
    """Tokenizes rows as the trainer of `method` does. SFT reads texts from `text_field`. Messages to the user call the data `source`."""

    method: str
    processor: Any
    text_field: str = "text"
    source: str = ""

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    def lengths(self, rows: Any, every: bool = False, only_assistant: bool = False) -> Lengths | None:
        """Return the lengths of a sample of the rows (of all rows if `every` is True), or None if they are unknown.

        Lengths are unknown for a stream, and for images without a processor. With `only_assistant`, the prompt of a
        conversation ends before the assistant's first turn with loss.
        """
        if not hasattr(rows, "__len__") or not len(rows):
            return None
        tried = range(len(rows)) if every else sampled(rows)
        if {"image", "images"} & {*(getattr(rows, "column_names", None) or rows[0])}:
            if not hasattr(self.processor, "tokenizer"):
                return None
            pictured = Pictured(self.processor)  # it caches the tokens of an image by its size
            rows = undecoded(rows)
            counts = [pictured.count(rows[at]) for at in tried]
            return Lengths(tuple(n for n, _ in counts), len(rows), prompt=min(prompt for _, prompt in counts))
        tokens, prompts, doubled = [], [], 0
        for at in tried:
            try:
                tokens.append(tuple(map(len, self.ids(rows[at], ends=True))))
                prompts.append(self.prompt(rows[at], only_assistant))
            except TemplateError as error:
                raise refused_row(self.source, at, error) from error
            doubled += self._begins_twice(rows[at])
        return Lengths(tuple(map(max, tokens)), len(rows), doubled, min(prompts), tuple(tokens))

    def ids(self, row: Mapping[str, Any], ends: bool = False) -> list[Sequence[int]]:
        """Return the token ids of each answer of a row, with the prompt before. If `ends` is True, the trainer's end token follows."""
        stored = [row[n] for n in ("input_ids", "chosen_ids", "rejected_ids") if row.get(n) is not None]
        return stored or [self._ids(*parts, row.get("tools"), ends) for parts in self._parts(row)]

    def prompt(self, row: Mapping[str, Any], only_assistant: bool) -> int:
        """Return the number of tokens in the prompt of a row. It is 0 without a prompt, and if the model generates the answers."""
        if "input_ids" in row or METHODS[self.method].loss == "policy":
            return 0
        prompt = row.get("prompt") or _common_beginning(row)
        answer = row.get("messages") or row.get("completion")
        if only_assistant and isinstance(answer, list) and isinstance(prompt, list):
            prompt = [*prompt, *takewhile(lambda turn: turn["role"] != "assistant", answer)]
        ids = self._ids(prompt, None, row.get("tools")) if prompt else ()
        if isinstance(prompt, str) and not row.get("prompt"):  # the common beginning may end inside a token
            return alike_at_start(ids, self._ids(row["chosen"], None, None))
        return len(ids)

    def _begins_twice(self, row: Mapping[str, Any]) -> bool:
        """Return True if the text of the row begins with the beginning-of-text token, which the tokenizer adds again."""
        text, bos = row.get("prompt", row.get(self.text_field)), getattr(self.tokenizer, "bos_token", None)
        begins = bos and isinstance(text, str) and text.startswith(bos) and row.get("input_ids") is None
        return bool(begins and self.tokenizer(bos)["input_ids"][:2] == [self.tokenizer.bos_token_id] * 2)

    def _parts(self, row: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        """Return (prompt, answer) for each answer of a row. The prompt of a conversation or a text is None."""
        prompt = row.get("prompt")
        if METHODS[self.method].loss == "policy":
            return [(prompt, None)]
        answers = [row[name] for name in ("completion", "chosen", "rejected") if row.get(name) is not None]
        text = row.get(self.text_field) if row.get("messages") is None else row["messages"]
        return [(prompt, answer) for answer in answers] or [(prompt if text is None else None, text)]

    def _ids(self, prompt: Any, answer: Any, tools: Any, ends: bool = False) -> Sequence[int]:
        parts = [part for part in (prompt, answer) if part]
        if any(isinstance(part, list) for part in parts):
            turns = [turn for part in parts for turn in part]
            more = {"tools": tools if isinstance(tools, list) else None, "return_dict": False}
            of_turns: Sequence[int] = render_chat(
                self.tokenizer, turns, add_generation_prompt=answer is None, **more
            )
            return of_turns
        ids: list[int] = self.tokenizer("".join(parts))["input_ids"]
        end = [self.tokenizer.eos_token_id]
        return [*ids, *end] if ends and answer is not None and ids[-1:] != end else ids


def _common_beginning(row: Mapping[str, Any]) -> Any:
    """Return the common beginning of a pair's answers, which TRL uses as the prompt. No answer becomes empty."""
    chosen, rejected = row.get("chosen") or [], row.get("rejected") or []
    alike = max(0, min(alike_at_start(chosen, rejected), len(chosen) - 1, len(rejected) - 1))
    return chosen[: alike - (chosen[alike - 1 : alike] == " ")]
