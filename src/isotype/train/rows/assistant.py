"""`--assistant_only_loss` for any chat template that writes the beginning of a conversation as it writes the whole of it.

TRL takes the assistant's tokens from a template with `{% generation %}` markers, and has such a template for some models. For
every other one a conversation is rendered up to each turn of the assistant, with and without that turn: what the second
text has more is what the model is to write. TRL gets token ids with their labels, which it trains on as they are.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from isotype.compat.templates import render_chat
from isotype.core.errors import DataError, Problem, UsageError
from isotype.core.pretrained import pretrained
from isotype.train.options.settings import Settings

Message = Mapping[str, Any]
Span = tuple[int, int]

_MARKED = "a template with {% generation %} and {% endgeneration %} around what the assistant says"
_FIX = "--chat_template_path FILE.jinja with such a template, or leave --assistant_only_loss out"


def labelled_rows(settings: Settings, tokenizer: Any, data: Any, limit: int | None = None) -> Any:
    """The splits with `input_ids` and `labels`, where TRL cannot find the assistant's tokens; else as they are.

    Args:
        settings: of the command.
        tokenizer: of the model, or its processor.
        data: the data set's splits.
        limit: rows of each split that are looked at; None for all, as a training needs them.

    Raises:
        UsageError: rows or a chat template in which nobody can tell what the assistant says.
        DataError: a row whose beginning the template writes otherwise when more follows.
    """
    training = settings.training
    if not getattr(training, "assistant_only_loss", False):
        return data
    columns: dict[str, Any] = next(iter(data[settings.script.dataset_train_split]), {})
    if "input_ids" in columns and {"labels", "assistant_masks"} & columns.keys():
        return data
    speaking = _with_template(tokenizer, getattr(training, "chat_template_path", None))
    _check_rows(columns)
    if speaking is None or trl_finds_tokens(speaking):
        return data
    if {"image", "images"} & columns.keys():
        what = "--assistant_only_loss with pictures, and a chat template without {% generation %} markers"
        raise UsageError.of("the assistant's tokens cannot be found in this data", what, _MARKED, _FIX)
    whole = training.completion_only_loss is False
    labelled = {}
    for name, rows in data.items():
        taken = (
            rows
            if limit is None or not hasattr(rows, "select")
            else rows.select(range(min(limit, len(rows))))
        )
        arguments: dict[str, Any] = {"remove_columns": list(columns), "with_indices": True}
        if hasattr(taken, "__len__"):
            arguments |= {"num_proc": training.dataset_num_proc, "desc": "Finding the assistant's tokens"}
        labelled[name] = taken.map(
            partial(
                labelled_row,
                tokenizer=speaking,
                whole=whole,
                source=settings.script.dataset_name or "datasets",
            ),
            **arguments,
        )
    return type(data)(labelled)


@contextmanager
def labels_kept(settings: Settings, data: Any) -> Iterator[None]:
    """Let a trainer be built on rows that `labelled_rows` has labelled: TRL refuses the flag beside them."""
    training = settings.training
    columns: dict[str, Any] = next(iter(data[settings.script.dataset_train_split]), {})
    if not getattr(training, "assistant_only_loss", False) or "input_ids" not in columns:
        yield
        return
    training.assistant_only_loss = False
    try:
        yield
    finally:
        training.assistant_only_loss = True


def _check_rows(columns: Mapping[str, Any]) -> None:
    chat = columns.get("messages", columns.get("completion"))
    if isinstance(chat, list):
        return
    what = f"--assistant_only_loss with the columns {', '.join(map(repr, columns))}, which hold no messages"
    fix = "leave --assistant_only_loss out"
    if "completion" in columns:
        fix += (
            ": of a prompt and its completion the completion alone is learned; or --apply_chat_template True"
        )
    expected = "conversations: 'messages', or 'prompt' and 'completion' as lists of messages"
    raise UsageError.of("the assistant's tokens cannot be found in this data", what, expected, fix)


def _with_template(tokenizer: Any, path: str | None) -> Any:
    """The tokenizer with the template of `--chat_template_path`; None where that brings another vocabulary, too."""
    if path is None:
        return tokenizer
    speaking = copy.deepcopy(tokenizer)
    if path.endswith((".jinja", ".j2")):
        speaking.chat_template = Path(path).read_text(encoding="utf-8")
        return speaking
    from transformers import AutoTokenizer

    other = pretrained(AutoTokenizer, path)
    speaking.chat_template = other.get_chat_template()
    if trl_finds_tokens(speaking):
        return None
    words = getattr(speaking, "tokenizer", speaking)
    added = [t.content for t in other.added_tokens_decoder.values() if t.content not in words.get_vocab()]
    if added:
        what = f"--assistant_only_loss and --chat_template_path {path}, which adds the tokens {', '.join(added[:3])}"
        raise UsageError.of("the assistant's tokens cannot be found", what, _MARKED, _FIX)
    words.eos_token = other.eos_token
    return speaking


def trl_finds_tokens(tokenizer: Any) -> bool:
    """Whether the template has markers, or is one of those that TRL has a marked version of."""
    from trl import get_training_chat_template
    from trl.chat_template_utils import has_generation_markers

    if has_generation_markers(tokenizer.get_chat_template()):
        return True
    try:
        return get_training_chat_template(tokenizer) is not None
    except ValueError:
        return False


def labelled_row(
    row: Mapping[str, Any], index: int, *, tokenizer: Any, whole: bool, source: str = ""
) -> dict[str, list[int]]:
    """Token ids of one conversation, and labels that are -100 where the assistant does not speak.

    Args:
        row: `messages`, or `prompt` and `completion` as messages; `tools` and `chat_template_kwargs` as TRL takes them.
        index: of the row.
        tokenizer: with the chat template.
        whole: the assistant's turns of a prompt are learned, too.
        source: the name of the data set, for errors.

    Raises:
        DataError: the template does not keep the beginning of this conversation, or refuses it.
    """
    prompt = row.get("prompt") or []
    messages = row["messages"] if row.get("messages") is not None else [*prompt, *row["completion"]]
    tools = row.get("tools")
    arguments = {
        "tools": json.loads(tools) if isinstance(tools, str) else tools,
        **(row.get("chat_template_kwargs") or {}),
    }

    def render(part: Sequence[Message], prompting: bool) -> str:
        turns = _for_processor(tokenizer, part)
        return str(
            render_chat(tokenizer, turns, tokenize=False, add_generation_prompt=prompting, **arguments)
        )

    try:
        text, spans = assistant_spans(render, messages, 0 if whole else len(prompt))
    except (TemplateError, ValueError) as error:
        problem = Problem(
            f"{source and source + ', '}row {index + 1}: {' '.join(str(error).split())}", _KEPT, _ROW_FIX
        )
        raise DataError("--assistant_only_loss: the assistant's tokens cannot be found", [problem]) from error
    words = getattr(tokenizer, "tokenizer", tokenizer)
    encoded = words(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    learned = [
        any(start < last and end > first for first, last in spans) for start, end in encoded["offset_mapping"]
    ]
    return {
        "input_ids": ids,
        "labels": [token if mask else -100 for token, mask in zip(ids, learned, strict=True)],
    }


_KEPT = "a chat template that writes the beginning of a conversation the same, whatever follows"
_ROW_FIX = (
    "--chat_template_path FILE.jinja with {% generation %} and {% endgeneration %} around what the assistant says; or rows of "
    "'prompt' and 'completion', whose completion alone is learned; or leave --assistant_only_loss out"
)


def _for_processor(tokenizer: Any, messages: Sequence[Message]) -> Any:
    if not hasattr(tokenizer, "tokenizer"):
        return list(messages)
    from trl import prepare_multimodal_messages

    return prepare_multimodal_messages([dict(message) for message in messages])


def assistant_spans(
    render: Callable[[Sequence[Message], bool], str], messages: Sequence[Message], first: int = 0
) -> tuple[str, list[Span]]:
    """The text of a conversation, and where in it the assistant speaks: [start, end) in characters.

    A turn begins where the template's prompt for an answer ends, and ends with the turn as the template closes it.

    Args:
        render: (messages, whether the prompt for an answer is added) -> text.
        messages: the conversation.
        first: the first message that counts.

    Raises:
        ValueError: a beginning of the conversation is written otherwise than in the whole.
    """
    text = render(messages, False)
    spans = []
    for at in range(first, len(messages)):
        if messages[at]["role"] != "assistant":
            continue
        end = len(text) if at + 1 == len(messages) else _kept(text, render(messages[: at + 1], False), at)
        spans.append((_start(render, messages, at, text), end))
    return text, spans


def _kept(text: str, beginning: str, at: int) -> int:
    if not text.startswith(beginning):
        raise ValueError(
            f"message {at + 1} is written otherwise by the chat template when other messages follow"
        )
    return len(beginning)


def _start(
    render: Callable[[Sequence[Message], bool], str], messages: Sequence[Message], at: int, text: str
) -> int:
    if at == 0:
        return _after_first_prompt(render, text)
    prompt = render(messages[:at], True)
    if text.startswith(prompt):
        return len(prompt)
    # DeepSeek-R1's prompt for an answer ends with "<think>", which the template leaves out of answers that it has.
    before = _kept(text, render(messages[:at], False), at - 1)
    same = next(
        (n for n, pair in enumerate(zip(prompt, text, strict=False)) if pair[0] != pair[1]), len(prompt)
    )
    return max(before, same)


def _after_first_prompt(render: Callable[[Sequence[Message], bool], str], text: str) -> int:
    """Where the first message begins, if it is the assistant's: no template renders the nothing before it."""
    probe = [{"role": "user", "content": "a"}]
    bare, prompt = render(probe, False), render(probe, True)
    opening = prompt.removeprefix(bare) if prompt.startswith(bare) else ""
    if not opening or opening not in text:
        raise ValueError("message 1 is the assistant's, and nothing shows where it begins")
    return text.index(opening) + len(opening)
