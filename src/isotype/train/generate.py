"""Ask a model a question."""

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

Message = dict[str, str]
PLAIN = dict.fromkeys(
    ("penalty_alpha", "dola_layers", "num_beam_groups", "force_words_ids", "constraints", "stop_strings")
)
PLAIN |= {"num_beams": 1}
"""Of a checkpoint's generation settings, those that are code of the hub, or that a stream of words has no use for, are off."""
Prompt = str | Sequence[Message]
"""A plain text to go on with, or a conversation."""


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode with the KV cache on, and back to what it was."""
    training, cache = model.training, getattr(model.config, "use_cache", None)
    model.eval()
    model.config.use_cache = True
    try:
        yield
    finally:
        model.config.use_cache = cache
        model.train(training)


def encode(tokenizer: Any, messages: Prompt) -> Any:
    """The prompt's ids and mask: plain text as it is; a conversation by the chat template, or its last message
    as plain text where there is none."""
    if isinstance(messages, str):
        return tokenizer(text=messages, return_tensors="pt")
    if getattr(tokenizer, "chat_template", None):
        asked = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        try:
            return render_chat(tokenizer, list(messages), **asked)
        except TemplateError as error:
            what = f"{template_source(tokenizer)}: {one_line(error)}"
            fix = "ask otherwise, or correct the template"
            expected = "a conversation that the template can write"
            raise UsageError.of(
                "the model's chat template refuses this conversation", what, expected, fix
            ) from error
    return tokenizer(messages[-1]["content"], return_tensors="pt")


@torch.no_grad()
def answer(model: Any, tokenizer: Any, messages: Prompt, max_new_tokens: int = 64, **kwargs: Any) -> str:
    """The model's greedy answer (sampling with `do_sample=True, …`) to a text or a conversation, as text.

    Runs without autocast: under a policy no operator meets two float dtypes.
    """
    device = next(model.parameters()).device
    inputs = {k: v.to(device) for k, v in encode(tokenizer, messages).items()}
    end = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with evaluating(model):
        out = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            pad_token_id=end,
            **{**PLAIN, "do_sample": False, **kwargs},
        )
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def as_asked_before(asked: tuple[Sample, Prompt] | None, earlier: RunRecord | None) -> Sample | None:
    """The sample question, with the answer that it got before the run began."""
    if asked is None:
        return None
    samples = () if earlier is None else earlier.samples
    earlier_answers = {sample.question: sample.before for sample in samples}
    return replace(asked[0], before=asked[0].before or earlier_answers.get(asked[0].question))


def answer_after(
    trainer: Any, sample: Sample | None, asked: tuple[Sample, Prompt] | None, console: Console
) -> Sample | None:
    """The sample question, with the answer of the trained model; None where nothing was asked."""
    if sample is None or asked is None:
        return None
    _, prompt = asked
    with console.status("asking the model after training …"):
        text = answer(trainer.model, trainer.processing_class, prompt)
    return replace(sample, after=text)
