"""Synthetic batches and the losses of the methods, with real tiny models."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
import transformers

from isotype.core.errors import UsageError
from isotype.data.methods import METHODS, Loss
from isotype.lora.attention.registered import use_fast_attention
from isotype.lora.loss.trl_head import put_head
from isotype.preflight.run import trace_of
from isotype.ranges.pictures import NONE
from isotype.records.request import StepRequest
from isotype.train.models import require_decoder
from isotype.train.preflight.synthetic import LOSSES, batch_notes, step_inputs, synthetic_batch
from tests.cpus import no_compiler
from tests.models import CONFIGS, IMAGE_TOKEN, IMAGE_TOKENS, tiny_model


def test_a_batch_of_text():
    batch = synthetic_batch(tiny_model("llama"), 2, 7)
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "input_ids": ((2, 7), torch.int64),
        "attention_mask": ((2, 7), torch.int64),
        "labels": ((2, 7), torch.int64),
    }


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma3-vision", "t5"])
def test_the_model_takes_it(name):
    model = tiny_model(name)
    assert model(**synthetic_batch(model, 2, 12)).loss.isfinite()


def test_rows_of_a_classifier_with_an_encoder_have_one_end_token():
    """T5 and BART score the state of this token; transformers raises without one."""
    config = tiny_model("t5").config
    model = transformers.T5ForSequenceClassification(config)
    ids = synthetic_batch(model, 2, 7)["input_ids"]
    assert (ids == config.eos_token_id).sum(-1).tolist() == [1, 1]


@pytest.mark.parametrize("method", ["dpo", "kto", "grpo", "rloo"])
def test_an_encoder_gets_no_prompt_with_its_answer(method):
    """TRL gives both as one text, so the encoder would read the answer; a generated answer has no prompt in it."""
    config = tiny_model("t5").config
    with pytest.raises(UsageError, match="a model of the type t5, which has an encoder"):
        require_decoder(config, METHODS[method])
    require_decoder(config, METHODS["sft"])
    require_decoder(tiny_model("llama").config, METHODS[method])


def test_an_image_takes_its_tokens():
    model = tiny_model("gemma3-vision")
    batch = synthetic_batch(model, 2, 12)
    assert (batch["input_ids"] == IMAGE_TOKEN).sum(-1).tolist() == [IMAGE_TOKENS] * 2
    assert (tuple(batch["pixel_values"].shape), batch["pixel_values"].dtype) == (
        (2, 3, 32, 32),
        torch.float32,
    )
    assert (batch["labels"][:, 1 : 1 + IMAGE_TOKENS] == -100).all()
    assert (batch["labels"] != -100).sum() == 2 * (12 - IMAGE_TOKENS)
    assert batch_notes(model.config) == ("1 image of 32x32 in each row: 4 tokens, by the config",)
    with pytest.raises(UsageError, match="the images do not fit into the sequence"):
        synthetic_batch(model, 2, 5)


def test_images_of_unknown_size_are_left_out_and_that_is_said():
    config = CONFIGS["gemma3-vision"]()
    config.mm_tokens_per_image = None
    assert batch_notes(config) == (
        "no row has an image: --image 1024x768 adds an image of that size to each row, and --images 2 adds two",
    )
    assert batch_notes(config, NONE) == ("no row has an image",)


def test_a_model_without_token_ids_is_refused():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with pytest.raises(UsageError, match="ViTModel takes pixel_values"):
        synthetic_batch(transformers.ViTModel(config), 1, 4)


def calls_of(model: torch.nn.Module) -> list[tuple[tuple[int, ...], bool]]:
    seen: list[tuple[tuple[int, ...], bool]] = []

    def note(module, args, kwargs):
        seen.append((tuple(kwargs["input_ids"].shape), torch.is_grad_enabled()))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_nothing_is_learned_of_a_prompt(method):
    model = tiny_model("llama")
    put_head(model)
    inputs = step_inputs(method, model, 2, 12, prompt=5, reference=False)
    assert (inputs.inputs["labels"] == -100).sum(-1).tolist() == [5] * len(inputs.inputs["labels"])
    assert inputs.function(model, inputs.inputs).isfinite()


def test_every_method_has_a_loss():
    assert {*LOSSES} == set(get_args(Loss))


@pytest.mark.parametrize(
    ("method", "forwards"),
    [
        ("dpo", [((4, 12), True), ((4, 12), False)]),
        ("kto", [((2, 12), False), ((2, 12), False), ((2, 12), True), ((2, 12), False)]),
        ("grpo", [((2, 12), False), ((2, 12), True)]),  # TRL compares when it has generated
    ],
)
def test_the_forwards_of_a_method(method, forwards):
    import peft

    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules="all-linear"))
    put_head(model)
    seen = calls_of(model.get_base_model())
    loss = loss_of_step(model, step_inputs(method, model, 2, 12, completion=4))
    loss.backward()
    assert seen == forwards
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(("method", "rows"), [("dpo", 4), ("kto", 2), ("grpo", 2), ("rloo", 2), ("sft", 2)])
def test_the_batch_of_a_step_is_told(method, rows):
    """A report of a preference step once had an empty batch and no tokens per second."""
    inputs = step_inputs(method, tiny_model("llama"), 2, 12, completion=4).inputs
    assert {tuple(inputs[name].shape) for name in ("input_ids", "attention_mask")} == {(rows, 12)}


def loss_of_step(model, step):
    return step.function(model, step.inputs)


def test_no_reference_no_forward_of_it():
    model = tiny_model("llama")
    put_head(model)
    seen = calls_of(model)
    loss_of_step(model, step_inputs("grpo", model, 2, 12, completion=4, reference=False))
    assert len(seen) == 1


def test_a_reward_model_sees_pairs():
    config = CONFIGS["llama"]()
    config.num_labels = 1
    model = transformers.LlamaForSequenceClassification(config)
    seen = calls_of(model)
    loss_of_step(model, step_inputs("reward", model, 3, 8)).backward()
    assert seen == [((6, 8), True)]


@pytest.mark.lacking(no_compiler())
@pytest.mark.parametrize(
    ("method", "lengths"), [("sft", [[20], [3]]), ("dpo", [[20, 3]]), ("kto", [[20], [3]])]
)
def test_rows_of_several_lengths_have_no_padding(method, lengths):
    config = CONFIGS["llama"]()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    use_fast_attention(model, "cpu")
    put_head(model)
    for known, tokens in ((lengths, 23), ([[20] * len(row) for row in lengths], 40)):
        inputs = step_inputs(method, model, len(lengths), 20, reference=False, lengths=known)
        trace = trace_of(StepRequest(model, inputs, device="cpu", phases=("forward",)))
        shapes = [
            shape for call in trace.calls if call.module.endswith("up_proj") for _, shape in call.results
        ]
        width = model.config.intermediate_size
        assert {math.prod(shape) // width for shape in shapes if shape[-1] == width} & {23, 40} == {tokens}
