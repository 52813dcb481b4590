"""Chat with a model or an adapter, in the dtypes of its training."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from rich.console import Console
from rich.text import Text

from isotype.checkpoint.adapter import load_for_inference
from isotype.checkpoint.tokenizer import no_tokenizer
from isotype.compat.interrupt import Terminated, interrupts_kept
from isotype.compat.peft import without_peft
from isotype.compat.templates import render_chat, template_source
from isotype.core.dtypes import dtype_name
from isotype.core.errors import Problem, UsageError, first_line, one_line
from isotype.core.terminal import as_typed, shown
from isotype.precision.policy import PrecisionPolicy
from isotype.ranges.measure import positions
from isotype.report.run.record import Sample
from isotype.report.text import say

Message = dict[str, Any]
"""A message of a conversation: `role` and `content` (a text, or a list of parts if the message has images)."""
_UNUSED = "penalty_alpha dola_layers num_beam_groups force_words_ids constraints stop_strings"
PLAIN = {**dict.fromkeys(_UNUSED.split()), "num_beams": 1}
"""Generation settings that replace the settings of a checkpoint, because those may need code from the hub or prevent streaming."""
Prompt = str | Sequence[Message]
"""A text that the model continues, or a conversation."""
LONGEST = 200
"""Maximum number of tokens in an answer without `--max_new_tokens`."""


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    training, cache = model.training, getattr(model.config, "use_cache", None)
    model.eval()
    model.config.use_cache = True
    try:
        yield
    finally:
        model.config.use_cache = cache
        model.train(training)


def encode(tokenizer: Any, messages: Prompt) -> Any:
    """Tokenize a text or a conversation. If the tokenizer has no chat template, use only the last message."""
    if isinstance(messages, str):
        return tokenizer(text=messages, return_tensors="pt")
    if getattr(tokenizer, "chat_template", None):
        arguments = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        turns: list[Any] = list(messages)
        if hasattr(tokenizer, "tokenizer"):  # the chat template of a processor takes contents in parts
            turns, arguments = with_pictures(turns, ()), {**arguments, "tokenize": True}
        try:
            return render_chat(tokenizer, turns, **arguments)
        except TemplateError as error:
            what = f"{template_source(tokenizer)}: {one_line(error)}"
            fix = "ask another question, or correct the template"
            expected = "a conversation that the chat template can render"
            headline = "the model's chat template raises an error for this conversation"
            raise UsageError.of(headline, what, expected, fix) from error
    return tokenizer(messages[-1]["content"], return_tensors="pt")


def with_pictures(messages: Sequence[Any], pictures: Sequence[Any]) -> list[Any]:
    """Return messages in which each content is a list of parts, and the image parts contain the given images."""
    from trl import prepare_multimodal_messages

    turns: list[Any] = prepare_multimodal_messages([dict(turn) for turn in messages], images=list(pictures))
    return turns


@torch.no_grad()
def _generated(model: Any, tokenizer: Any, messages: Prompt, max_new_tokens: int, **arguments: Any) -> Any:
    """Return the generated token ids (int64, `[tokens]`)."""
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in encode(tokenizer, messages).items()}
    limit, length = positions(model), inputs["input_ids"].shape[1]
    if limit is not None and length < limit:
        max_new_tokens = min(max_new_tokens, limit - length)
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    end = inner.pad_token_id if inner.pad_token_id is not None else inner.eos_token_id
    settings = {**PLAIN, "max_new_tokens": max_new_tokens, "pad_token_id": end, **arguments}
    with evaluating(model):
        return model.generate(**inputs, **settings)[0, length:]


def answer(model: Any, tokenizer: Any, messages: Prompt, max_new_tokens: int = 64, **kwargs: Any) -> str:
    """Return the model's answer. Decoding is greedy unless `do_sample=True`. `kwargs` are arguments of `generate`."""
    ids = _generated(model, tokenizer, messages, max_new_tokens, **{"do_sample": False, **kwargs})
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    return str(inner.decode(ids, skip_special_tokens=True)).strip()


def answers_after(trainer: Any, asked: Sequence[tuple[Sample, Prompt]], console: Console) -> list[Sample]:
    if not asked:
        return []
    model, tokenizer = trainer.model, trainer.processing_class
    with console.status("asking the model after training …"):
        return [replace(sample, after=answer(model, tokenizer, prompt)) for sample, prompt in asked]


_RESET, _HELP, _EXIT, _IMAGE = "/reset", "/help", ("/exit", "/quit"), "/image"
_HELP_TEXT = """\
/reset        start the conversation again
/image FILE   show an image with the next question
/help         show these lines
/exit         leave, as Ctrl-D does; Ctrl-C stops an answer"""


def chat(options: argparse.Namespace, console: Console) -> int:
    """Run `isotype chat` and return its exit status.

    Questions come from `--ask`, from the keyboard, or line by line from a pipe. All questions belong to one conversation,
    which begins with the `--system` message. `/reset` starts the conversation again. Images from `--image` and `/image`
    become part of the next question. In a keyboard session, Ctrl-C stops the current answer but not the chat.

    Raises:
        UsageError: the model generates no text or accepts no images, or a question does not fit into the context. A keyboard
            session prints errors about images and questions, and then continues.
        CheckpointError, PrecisionError: raised by `load_for_inference`.
    """
    with interrupts_kept(), console.status(f"loading {options.model} …"):
        model, tokenizer, policy = load_for_inference(
            options.model, options.dtype, options.quantization, options.device, options.model_revision
        )
    _require_generation(options.model, model, tokenizer)
    pictures = [opened_picture(path, tokenizer) for path in options.image or ()]
    interactive = options.ask is None and sys.stdin.isatty()
    header, notes = _header(options, tokenizer, policy, interactive), policy.warnings
    for line in (header, *(f"note: {note}" for note in notes)):
        console.print(line, style="dim", highlight=False, markup=False)
    system = as_typed(options.system or "")
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    for question in _questions(options, interactive, console):
        if question in _EXIT:
            break
        try:
            if question == _RESET:
                messages = list(opening)
                console.print("(the conversation starts again)", style="dim")
            elif question == _HELP:
                say(console, _HELP_TEXT, "dim")
            elif question.split(" ")[0] == _IMAGE:
                path = question.removeprefix(_IMAGE).strip()
                pictures.append(picture := opened_picture(path, tokenizer))
                line = f"({path}: {picture.width} x {picture.height}, with the next question)"
                console.print(line, style="dim", highlight=False, markup=False)
            elif question:
                asked, pictures = [*messages, _asked(question, pictures)], []
                messages = _turn(model, tokenizer, asked, options, interactive, console)
        except UsageError as error:
            if not interactive:
                raise
            say(console, str(error), "yellow")
    return 0


def opened_picture(path: str, processor: Any) -> Any:
    if not hasattr(processor, "image_processor"):
        expected, fix = "a model that accepts images, with its processor", "omit the image"
        raise UsageError.of("the model accepts only text", f"the image {path}", expected, fix)
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(Path(path).expanduser()) as picture:
            return picture.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        what = f"{path}: {getattr(error, 'strerror', None) or first_line(error)}"
        expected = "a readable image file"
        raise UsageError.of("the image cannot be shown", what, expected, "give another one") from error


def _asked(question: str, pictures: Sequence[Any]) -> Message:
    if not pictures:
        return {"role": "user", "content": question}
    shown = [{"type": "image", "image": picture} for picture in pictures]
    return {"role": "user", "content": [*shown, {"type": "text", "text": question}]}


def stream_answer(
    model: Any, tokenizer: Any, messages: list[Message], console: Console, **generation: Any
) -> tuple[str, bool]:
    """Print the model's answer word by word. Return (answer, True), or (answer so far, False) after Ctrl-C."""
    from transformers import TextStreamer

    parts: list[str] = []

    class Writer(TextStreamer):  # type: ignore[misc]  # transformers ships no types
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            parts.append(text)
            # rich's `print` is not used: after Ctrl-C, the text would stay in rich's buffer and be printed later.
            console.file.write(shown(text) + "\n" * stream_end)
            console.file.flush()

    inner = getattr(tokenizer, "tokenizer", tokenizer)
    writer = Writer(inner, skip_prompt=True, skip_special_tokens=True)
    whole = True
    try:
        _generated(model, tokenizer, messages, streamer=writer, **generation)
    except Terminated:
        raise
    except KeyboardInterrupt:
        whole = False
        writer.end()
    return "".join(parts).strip(), whole


def option_problems(options: argparse.Namespace) -> list[Problem]:
    problems = []
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        flag = f"--max_new_tokens {options.max_new_tokens}"
        problems.append(Problem(flag, "at least 1", "give a larger one"))
    if not 0 <= options.temperature < float("inf"):
        flag = f"--temperature {options.temperature:g}"
        problems.append(Problem(flag, "0 (greedy) or more", "0.7 is a common choice"))
    return problems


def _require_generation(name: str, model: Any, tokenizer: Any) -> None:
    if not model.can_generate():
        what, fix = f"{name}: a {type(without_peft(model)).__name__}", "give another model"
        raise UsageError.of("this model does not generate text", what, "a model with a language head", fix)
    if tokenizer is None:
        raise no_tokenizer(f"{name} has no tokenizer")


def _header(options: argparse.Namespace, tokenizer: Any, policy: PrecisionPolicy, interactive: bool) -> str:
    parts = [
        str(options.model),
        f"compute {dtype_name(policy.compute)}",
        f"storage {policy.storage_words()}",
        "greedy" if options.temperature == 0 else f"temperature {options.temperature:g}",
    ]
    if not getattr(tokenizer, "chat_template", None):
        parts.append("no chat template, so the model continues your text")
    if interactive:
        parts.append(f"{_RESET} starts again, {_EXIT[0]} leaves, Ctrl-C stops an answer")
    return " · ".join(parts)


def _questions(options: argparse.Namespace, interactive: bool, console: Console) -> Iterator[str]:
    if options.ask is not None:
        yield from (as_typed(question).strip() for question in options.ask)
    elif not interactive:
        yield from (as_typed(line).strip() for line in sys.stdin)
    else:
        with suppress(ImportError):  # on Windows, where the console edits lines by itself
            import readline  # noqa: F401 - its import gives `input` a history and editing keys
        while True:
            try:
                yield as_typed(console.input(Text.assemble((">", "bold"), " "))).strip()
            except (EOFError, OSError):  # Ctrl-D, or a closed terminal
                console.print()
                return
            except Terminated:
                raise
            except KeyboardInterrupt:
                console.print(f"\n({_EXIT[0]} or Ctrl-D leaves)", style="dim", highlight=False)


def _turn(
    model: Any,
    tokenizer: Any,
    messages: list[Message],
    options: argparse.Namespace,
    interactive: bool,
    console: Console,
) -> list[Message]:
    """Print the answer to the last message. Return the messages that fit into the context, with the answer at the end."""
    turns, longest = _fitting(model, tokenizer, messages, options.max_new_tokens)
    if len(turns) < len(messages):
        console.print("(the oldest messages no longer fit into the context and are omitted)", style="dim")
    if options.max_new_tokens is None and longest < LONGEST:
        line = f"(this model's context of {positions(model)} tokens leaves {longest} for the answer)"
        say(console, line, "dim")
    sampling: dict[str, Any] = {"do_sample": options.temperature != 0}
    if options.temperature:
        sampling["temperature"] = options.temperature
    text, whole = stream_answer(model, tokenizer, turns, console, max_new_tokens=longest, **sampling)
    if not whole and not interactive:
        raise KeyboardInterrupt
    return [*turns, {"role": "assistant", "content": text}]


def _fitting(
    model: Any, tokenizer: Any, messages: list[Message], max_new_tokens: int | None
) -> tuple[list[Message], int]:
    """Drop the oldest messages until the answer fits into the context. Return the kept messages and the answer's token
    limit.

    If `max_new_tokens` is None, messages are dropped until `LONGEST` tokens or half of the context are free, whichever
    is less. If only the last question is left, one free token is enough.

    Raises:
        UsageError: the question alone does not fit.
    """
    limit = positions(model)
    if limit is None:
        return messages, max_new_tokens or LONGEST
    opening = [message for message in messages[:1] if message["role"] == "system"]
    turns = messages[len(opening) :]
    while True:
        length = encode(tokenizer, [*opening, *turns])["input_ids"].shape[1]
        alone = len(turns) == 1
        if limit - length >= (max_new_tokens or (1 if alone else min(LONGEST, limit // 2))):
            return [*opening, *turns], max_new_tokens or min(LONGEST, limit - length)
        if alone:
            break
        turns = turns[2:]
    asked = "" if max_new_tokens is None else f", and --max_new_tokens {max_new_tokens}"
    shorter = "ask a shorter question"
    headline = "the question and its answer do not fit into the model's context"
    what = f"a prompt of {length} tokens{asked}"
    fix = f"--max_new_tokens {limit - length} or less; or {shorter}" if length < limit else shorter
    raise UsageError.of(headline, what, f"at most {limit} tokens with the answer", fix)
