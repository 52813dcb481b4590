"""Finds the spans of turns in a rendered conversation.

The chat template must render the first messages of a conversation in the same way, even if other messages follow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isotype.compat.templates import render_chat
from isotype.data.cells import left_out

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

    A span begins after the generation prompt, and includes the template's text at the end of the turn. Messages before
    number `first`, and messages that are excluded from the loss, have no span.

    Raises:
        ValueError: the template renders the first messages differently if other messages follow.
    """
    text = render(messages, False)
    spoken = [at for at in range(first, len(messages)) if messages[at]["role"] == "assistant"]
    return text, [_span(render, messages, at, text) for at in spoken if not left_out(messages[at])]


def other_spans(render: Render, messages: Sequence[Message], first: int = 0) -> tuple[str, list[Span]]:
    """Return a conversation's text and the spans with loss: all text from message `first` on, except excluded turns."""
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
    """Return the end of the first generation prompt in `text`, where an assistant's first message begins."""
    probe = [{"role": "user", "content": "a"}]
    bare, prompt = render(probe, False), render(probe, True)
    opening = prompt.removeprefix(bare) if prompt.startswith(bare) else ""
    if not opening or opening not in text:
        raise ValueError("message 1 is from the assistant, and the template's text before it cannot be found")
    return text.index(opening) + len(opening)
