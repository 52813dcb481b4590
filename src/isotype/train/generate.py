"""Generate answers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jinja2 import TemplateError
from rich.console import Console

from isotype.compat.templates import render_chat, template_source
from isotype.core.errors import UsageError, one_line
from isotype.report.run.record import RunRecord, Sample

Message = dict[str, Any]
"""`role`, and `content`: a text, or parts if a turn has pictures."""
PLAIN = dict.fromkeys(
    ("penalty_alpha", "dola_layers", "num_beam_groups", "force_words_ids", "constraints", "stop_strings")
)
PLAIN |= {"num_beams": 1}
"""Of a checkpoint's generation settings, those that are code of the hub, or that a stream of words has no use for, are off."""
Prompt = str | Sequence[Message]
"""A plain text to continue, or a conversation."""


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch to evaluation mode with the KV cache, and back."""
    training, cache = model.training, getattr(model.config, "use_cache", None)
    model.eval()
    model.config.use_cache = True
    try:
        yield
    finally:
        model.config.use_cache = cache
        model.train(training)


def encode(tokenizer: Any, messages: Prompt) -> Any:
    """Return ids and mask of a text or a conversation; without a chat template, of its last message."""
    if isinstance(messages, str):
        return tokenizer(text=messages, return_tensors="pt")
    if getattr(tokenizer, "chat_template", None):
        asked = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        turns: list[Any] = list(messages)
        if hasattr(tokenizer, "tokenizer"):  # a processor's, whose template takes contents in parts
            turns, asked = with_pictures(turns, ()), {**asked, "tokenize": True}
        try:
            return render_chat(tokenizer, turns, **asked)
        except TemplateError as error:
            what = f"{template_source(tokenizer)}: {one_line(error)}"
            fix = "ask otherwise, or correct the template"
            expected = "a conversation that the template can write"
            raise UsageError.of(
                "the model's chat template refuses this conversation", what, expected, fix
            ) from error
    return tokenizer(messages[-1]["content"], return_tensors="pt")


def with_pictures(messages: Sequence[Any], pictures: Sequence[Any]) -> list[Any]:
    """Return messages with their contents in parts, and pictures in their places."""
    from trl import prepare_multimodal_messages

    turns: list[Any] = prepare_multimodal_messages([dict(turn) for turn in messages], images=list(pictures))
    return turns


@torch.no_grad()
def answer(model: Any, tokenizer: Any, messages: Prompt, max_new_tokens: int = 64, **kwargs: Any) -> str:
    """Return the model's greedy answer (sampling with `do_sample=True, …`), without autocast, as under a policy."""
    device = next(model.parameters()).device
    inputs = {k: v.to(device) for k, v in encode(tokenizer, messages).items()}
    words = getattr(tokenizer, "tokenizer", tokenizer)
    end = words.pad_token_id if words.pad_token_id is not None else words.eos_token_id
    with evaluating(model):
        out = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            pad_token_id=end,
            **{**PLAIN, "do_sample": False, **kwargs},
        )
    return str(words.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def as_asked_before(asked: Sequence[tuple[Sample, Prompt]], earlier: RunRecord | None) -> list[Sample]:
    """Return the sample questions with their answers from before the run."""
    samples = () if earlier is None else earlier.samples
    answers = {(sample.question, sample.pictures): sample.before for sample in samples}
    return [
        replace(each, before=each.before or answers.get((each.question, each.pictures))) for each, _ in asked
    ]


def answers_after(
    trainer: Any, samples: Sequence[Sample], asked: Sequence[tuple[Sample, Prompt]], console: Console
) -> list[Sample]:
    """Return the sample questions with the answers of the trained model."""
    if not samples:
        return []
    with console.status("asking the model after training …"):
        prompts = [prompt for _, prompt in asked]
        texts = [answer(trainer.model, trainer.processing_class, prompt) for prompt in prompts]
    return [replace(sample, after=text) for sample, text in zip(samples, texts, strict=True)]
