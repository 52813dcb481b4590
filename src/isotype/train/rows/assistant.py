"""Finds the tokens with loss for `--assistant_only_loss` and for conversations with excluded turns, if TRL cannot
find them.

TRL finds the tokens of the assistant only by `{% generation %}` markers in the chat template. For some models, TRL has
templates with markers. For other templates, isotype renders the conversation up to each assistant turn twice: without
this turn, and with it. The tokens of the turn are the tokens that only the longer text has. This works only if later
messages do not change how the template renders earlier messages.
"""

import copy
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from isotype.compat.templates import render_chat
from isotype.core.errors import DataError, UsageError
from isotype.core.names import plural
from isotype.core.pretrained import pretrained
from isotype.data.cells import MARKS, left_out
from isotype.train.command.settings import Settings

Message = Mapping[str, Any]
Span = tuple[int, int]
Render = Callable[[Sequence[Message], bool], str]
"""Function that renders messages as text. If the second argument is True, the generation prompt is added."""


def renderer(tokenizer: Any, row: Mapping[str, Any], prepare: Callable[[list[Any]], Any] = list) -> Render:
    """Return a function that renders messages with the chat template and the row's tools and template arguments."""
    tools = row.get("tools")
    arguments = {
        "tools": json.loads(tools) if isinstance(tools, str) else tools,
        **(row.get("chat_template_kwargs") or {}),
    }

    def render(part: Sequence[Message], prompting: bool) -> str:
        turns = prepare([dict(message) for message in part])
        more = {"tokenize": False, "add_generation_prompt": prompting, **arguments}
        return str(render_chat(tokenizer, turns, **more))

    return render


def assistant_spans(render: Render, messages: Sequence[Message], first: int = 0) -> tuple[str, list[Span]]:
    """Return the text of a conversation, and the spans [start, end) of the assistant's turns, in characters.

    A span begins after the generation prompt, and includes the text that the template adds at the end of the turn.
    Messages before number `first`, and messages that are excluded from the loss, have no span.

    Raises:
        ValueError: the template renders the first messages differently if other messages follow.
    """
    text = render(messages, False)
    spoken = [at for at in range(first, len(messages)) if messages[at]["role"] == "assistant"]
    return text, [_span(render, messages, at, text) for at in spoken if not left_out(messages[at])]


def other_spans(render: Render, messages: Sequence[Message], first: int = 0) -> tuple[str, list[Span]]:
    """Return the text of a conversation and the spans with loss: all text from message `first` on, except excluded turns."""
    text = render(messages, False)
    at, spans = 0 if first == 0 else _span(render, messages, first, text)[0], []
    excluded = [n for n in range(first, len(messages)) if left_out(messages[n])]
    for start, end in [_span(render, messages, n, text) for n in excluded]:
        spans.append((at, start))
        at = end
    return text, [*spans, (at, len(text))]


def _span(render: Render, messages: Sequence[Message], at: int, text: str) -> Span:
    """Return the span of message `at`. The span of an assistant message begins after the generation prompt."""
    last = at + 1 == len(messages)
    end = len(text) if last else _prefix_length(text, render(messages[: at + 1], False), at)
    if messages[at]["role"] == "assistant":
        return _start(render, messages, at, text), end
    return (_prefix_length(text, render(messages[:at], False), at - 1) if at else 0), end


def _prefix_length(text: str, beginning: str, at: int) -> int:
    if not text.startswith(beginning):
        raise ValueError(f"the chat template renders message {at + 1} differently if other messages follow")
    return len(beginning)


def _start(render: Render, messages: Sequence[Message], at: int, text: str) -> int:
    if at == 0:
        return _after_first_prompt(render, text)
    prompt = render(messages[:at], True)
    if text.startswith(prompt):
        return len(prompt)
    # DeepSeek-R1's generation prompt ends with "<think>", but its template renders an answer without "<think>".
    before = _prefix_length(text, render(messages[:at], False), at - 1)
    pairs = enumerate(zip(prompt, text, strict=False))
    return max(before, next((at for at, (a, b) in pairs if a != b), len(prompt)))


def _after_first_prompt(render: Render, text: str) -> int:
    """Return the end of the first generation prompt in `text`. The assistant's first message begins there."""
    probe = [{"role": "user", "content": "a"}]
    bare, prompt = render(probe, False), render(probe, True)
    opening = prompt.removeprefix(bare) if prompt.startswith(bare) else ""
    if not opening or opening not in text:
        raise ValueError("message 1 is from the assistant, and the template's text before it cannot be found")
    return text.index(opening) + len(opening)


_MARKED = "a template with {% generation %} and {% endgeneration %} around the assistant's text"
_FIX = "--chat_template_path FILE.jinja with such a template, or omit --assistant_only_loss"


def labelled_rows(
    settings: Settings, tokenizer: Any, data: Any, say: Callable[[str], object], limit: int | None = None
) -> Any:
    """If TRL cannot find the tokens with loss, convert all splits to `input_ids` and `labels`; else return `data`.

    TRL needs a chat template with markers. It ignores keys of a message that exclude the message from the loss.

    Args:
        say: prints a line about excluded turns.
        limit: number of rows to label in each split, or None for all rows.

    Raises:
        UsageError: the assistant's text cannot be found in these columns or with this chat template.
        DataError: the template renders a row's first turns differently if other turns follow.
    """
    columns: dict[str, Any] = next(iter(data[settings.dataset_train_split]), {})
    only = settings.assistant_only_loss
    whole = settings.completion_only_loss is False
    chats = ("messages", "completion", *["prompt"] * whole)
    learned = chats if "assistant_only_loss" in settings.command.specs else ()
    excluded = 0 if "input_ids" in columns else sum(_count_left_out(rows, learned) for rows in data.values())
    if (not only and not excluded) or ("input_ids" in columns and "labels" in columns):
        return data
    if excluded:
        rest = "the assistant's other turns" if only else "everything else"
        say(f"{plural(excluded, 'turn')} without loss, as the rows request; the loss includes {rest}")
    templated = _with_template(tokenizer, settings.chat_template_path)
    if only:
        _check_rows(columns)
    if {"image", "images"} & columns.keys():
        return data  # `isotype.train.rows.collators` makes the labels of each batch
    if not excluded and (templated is None or trl_finds_tokens(templated)):
        return data
    if templated is None:
        what = f"turns excluded from the loss, and --chat_template_path {settings.chat_template_path}, which adds tokens"
        expected = "a template without new tokens"
        raise UsageError.of("the turns cannot be found", what, expected, "omit one of them")
    label = partial(labelled_row, tokenizer=templated, whole=whole, only=only, source=settings.data_name)
    labelled = {}
    for name, rows in data.items():
        if limit is not None and hasattr(rows, "select"):
            rows = rows.select(range(min(limit, len(rows))))
        arguments: dict[str, Any] = {"remove_columns": list(columns), "with_indices": True}
        if hasattr(rows, "__len__"):
            arguments |= {"num_proc": settings.dataset_num_proc, "desc": "Finding the assistant's tokens"}
        labelled[name] = rows.map(label, **arguments)
    return type(data)(labelled)


def _count_left_out(rows: Any, names: Sequence[str]) -> int:
    """Count the turns in the columns `names` that are excluded from the loss. In a stream, count only in the first 1000 rows."""
    features = getattr(rows, "features", None)
    if features is not None:
        names = lists_in(features, names, lambda message: not message.keys().isdisjoint(MARKS))
        rows = rows.select_columns(names) if names else ()
    chats = (row[n] for row in islice(rows, 1000 if features is None else None) for n in names if n in row)
    return sum(left_out(message) for chat in chats if isinstance(chat, list) for message in chat)


def lists_in(features: Mapping[str, Any], names: Collection[str], wanted: Callable[[Any], bool]) -> list[str]:
    """Return the columns in `names` that contain lists whose items satisfy `wanted` or have an unknown type."""
    items = {name: getattr(features[name], "feature", None) for name in features if name in names}
    lists = {name: item for name, item in items.items() if item is not None}
    return [name for name, item in lists.items() if not isinstance(item, Mapping) or wanted(item)]


def _check_rows(columns: Mapping[str, Any]) -> None:
    chat = columns.get("messages", columns.get("completion"))
    if isinstance(chat, list):
        return
    what = f"--assistant_only_loss with the columns {', '.join(map(repr, columns))}, which have no messages"
    fix = "omit --assistant_only_loss"
    if "completion" in columns:
        fix += " (by default, only the completion has loss), or add --apply_chat_template True"
    expected = "conversations: 'messages', or 'prompt' and 'completion' as lists of messages"
    raise UsageError.of("the assistant's tokens cannot be found in this data", what, expected, fix)


def _with_template(tokenizer: Any, path: str | None) -> Any:
    """Return the tokenizer with the template from `path`, or None if TRL then finds the tokens of the assistant itself."""
    if path is None:
        return tokenizer
    templated = copy.deepcopy(tokenizer)
    if path.endswith((".jinja", ".j2")):
        templated.chat_template = Path(path).read_text(encoding="utf-8")
        return templated
    from transformers import AutoTokenizer

    other = pretrained(AutoTokenizer, path)
    templated.chat_template = other.get_chat_template()
    if trl_finds_tokens(templated):
        return None
    inner = getattr(templated, "tokenizer", templated)
    added = [t.content for t in other.added_tokens_decoder.values() if t.content not in inner.get_vocab()]
    if added:
        what = f"--assistant_only_loss and --chat_template_path {path}, which adds the tokens {', '.join(added[:3])}"
        raise UsageError.of("the assistant's tokens cannot be found", what, _MARKED, _FIX)
    inner.eos_token = other.eos_token
    return templated


def trl_finds_tokens(tokenizer: Any) -> bool:
    """Return True if the tokenizer's chat template has markers, or if TRL has a version of the template with markers."""
    from trl import get_training_chat_template
    from trl.chat_template_utils import has_generation_markers

    # A processor has the attribute `chat_template`, but not the method.
    read = getattr(tokenizer, "get_chat_template", lambda: tokenizer.chat_template)
    if has_generation_markers(str(read())):
        return True
    try:
        return get_training_chat_template(tokenizer) is not None
    except ValueError:
        return False


def labelled_row(
    row: Mapping[str, Any], index: int, *, tokenizer: Any, whole: bool, only: bool = True, source: str = ""
) -> dict[str, list[int]]:
    """Return the token ids of one conversation, and labels (-100 for tokens without loss).

    Args:
        row: has `messages`, or `prompt` and `completion` as messages, and may have `tools` and `chat_template_kwargs`.
        whole: True if prompts also have loss.
        only: True if only the assistant's turns have loss.

    Raises:
        DataError: no token has loss, the template refuses the conversation, or it renders the first turns differently if other
            turns follow.
    """
    from trl import prepare_multimodal_messages

    prompt = row.get("prompt") or []
    messages = row["messages"] if row.get("messages") is not None else [*prompt, *row["completion"]]
    prepare = prepare_multimodal_messages if hasattr(tokenizer, "tokenizer") else list
    render = renderer(tokenizer, row, prepare)
    place = f"{source and source + ', '}row {index + 1}"
    try:
        spans_of = assistant_spans if only else other_spans
        text, spans = spans_of(render, messages, 0 if whole else len(prompt))
    except (TemplateError, ValueError) as error:
        what = "--assistant_only_loss: the assistant's tokens" if only else "the turns excluded from the loss"
        problem = f"{place}: {' '.join(str(error).split())}"
        raise DataError.of(f"{what} cannot be found", problem, _SAME_BEGINNING, _ROW_FIX) from error
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    encoded = inner(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    places = encoded["offset_mapping"]
    learned = [any(start < last and end > first for first, last in spans) for start, end in places]
    if not any(learned):
        what = f"{place}: keys of the turns exclude all turns from the loss"
        fix = "include a turn (for example, by 'weight': 1), or remove the example"
        raise DataError.of("a row has no targets", what, "at least one turn", fix)
    labels = [token if mask else -100 for token, mask in zip(ids, learned, strict=True)]
    return {"input_ids": ids, "labels": labels}


_SAME_BEGINNING = "a chat template whose text of the first turns does not depend on later turns"
_ROW_FIX = (
    "--chat_template_path FILE.jinja with {% generation %} and {% endgeneration %} around the assistant's text; or rows of "
    "'prompt' and 'completion', in which only the completion has loss; or omit --assistant_only_loss"
)
