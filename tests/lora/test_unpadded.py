"""Batches without their padding: the same numbers, in every model that is let do without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.integrations.neftune import activate_neftune

from isotype.contracts.contract import contracts_for
from isotype.lora.attention.registered import sides_of, use_fast_attention
from isotype.lora.loss.trl_head import put_head
from isotype.lora.unpadded import hooks_see_one_row, traced_as, tried, unpadded
from isotype.precision.devices.profile import device_profile
from isotype.trace.fake.functions import Functions
from isotype.trace.fake.recorder import FakeRecorder
from isotype.trace.fake.twin import fake_inputs, fake_mode
from tests.cpus import no_compiler
from tests.models import CONFIGS, tiny_model
from tests.pairwise import pairwise
from tests.zoo import ARCHITECTURES
from tests.zoo.causal import SETTINGS
from tests.zoo.shrink import tiny_config as zoo_config

BOTH = frozenset({"left", "right"})
COMPILED = pytest.mark.lacking(no_compiler())
"""Without a compiler, the attention of a fused model on a CPU needs the padding."""


def batch(*rows: str) -> dict[str, Any]:
    """A token for each letter, `.` for padding."""
    mask = torch.tensor([[int(letter != ".") for letter in row] for row in rows])
    ids = torch.arange(1, 1 + mask.numel()).view(mask.shape)
    return {"input_ids": ids, "attention_mask": mask}


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=5))
def test_every_token_is_there_once_at_its_place(rows: list[tuple[int, int, int]]) -> None:
    length = max(sum(row) for row in rows)
    asked = batch(*("." * left + "x" * tokens + "." * (length - left - tokens) for left, tokens, _ in rows))
    present = asked["attention_mask"].bool()
    made = unpadded(asked, BOTH, present)
    if made is None:
        assert present.sum() > 0.95 * present.numel() or not present.any()
        return
    assert made.inputs["attention_mask"] is None
    ids, positions = (made.inputs[name][0] for name in ("input_ids", "position_ids"))
    assert ids.tolist() == asked["input_ids"][present].tolist()
    assert torch.equal(ids[made.place][present], asked["input_ids"][present])
    begins = [index for index, position in enumerate(positions.tolist()) if position == 0]
    lengths = [tokens for _, tokens, _ in rows if tokens]
    assert [end - begin for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True)] == lengths


def test_a_trace_knows_the_positions_in_a_large_batch() -> None:
    """Its attention mask has too many elements for a trace to know each of them."""
    asked = batch("x" * 500, *["x" * 20 + "." * 480] * 40)
    bare = unpadded(asked, BOTH, asked["attention_mask"].bool())
    mode = fake_mode()
    recorder = FakeRecorder(contracts_for("cpu"), torch.float32, mode)
    fakes = fake_inputs(asked, mode)
    with traced_as(bare), mode, recorder, Functions(recorder, device_profile("cpu")):
        traced = unpadded(fakes, BOTH, fakes["attention_mask"].bool())
        assert traced is not None
        assert bare is not None
        assert traced.inputs["position_ids"].tolist() == bare.inputs["position_ids"].tolist()


@pytest.mark.parametrize(
    ("rows", "sides", "more"),
    [
        pytest.param(("xxxx", "xxxx"), BOTH, {}, id="no padding"),
        pytest.param(("xxxx", "xx.."), frozenset(), {}, id="a model that cannot"),
        pytest.param(("xxxx", "..xx"), frozenset({"right"}), {}, id="another side"),
        pytest.param(("xxxx", "x.xx"), BOTH, {}, id="between tokens"),
        pytest.param(("xxxx", "xx.."), BOTH, {"pixel_values": torch.zeros(1)}, id="pictures"),
        pytest.param(("xxxx", "xx.."), BOTH, {"position_ids": torch.zeros(2, 4)}, id="positions of its own"),
        pytest.param(("....", "...."), BOTH, {}, id="nothing"),
        pytest.param(("x" * 6000, "x" * 5000 + "." * 1000), BOTH, {}, id="too large a mask"),
    ],
)
def test_what_stays_padded(rows: tuple[str, ...], sides: frozenset[str], more: dict[str, Any]) -> None:
    asked = batch(*rows)
    assert unpadded({**asked, **more}, sides, asked["attention_mask"].bool()) is None


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("llama", BOTH),
        ("gemma3", BOTH),
        ("qwen3-moe", BOTH),
        pytest.param("gpt2", frozenset({"right"}), id="positions in a table"),
        pytest.param("mamba2", frozenset(), id="a state that passes from token to token"),
        pytest.param("t5", frozenset(), id="an encoder and a decoder"),
    ],
)
def test_models_are_known_by_what_they_compute(name: str, sides: frozenset[str]) -> None:
    model = (tiny_model(name) if name in CONFIGS else ARCHITECTURES[name].build(torch.float32)).train()
    state = torch.get_rng_state()
    assert tried(model).sides == sides
    assert tried(copy.deepcopy(model).to("meta")).sides == sides  # tries a small copy
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


@pairwise(
    ["kind, settings, sides", "spread"],
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, frozenset()),
        ("falcon_h1", {}, frozenset()),
        ("jamba", {"expert_layer_period": 2, "expert_layer_offset": 1}, frozenset()),
        ("recurrent_gemma", {"block_types": ["recurrent", "attention"]}, frozenset()),
        ("deepseek_v3", {}, BOTH),
    ],
    [0.02, 0.2],
    strength=1,
)
def test_weak_states_keep_the_padding(
    kind: str, settings: dict[str, Any], sides: frozenset[str], spread: float
) -> None:
    """With small weights, a row changes the row behind it much less than attention to other rows would."""
    torch.manual_seed(0)
    config = zoo_config(kind, {**SETTINGS.get(kind, {}), **settings, "initializer_range": spread})
    model = AutoModelForCausalLM.from_config(config)
    assert tried(model).sides == sides
    assert tried(copy.deepcopy(model).to("meta")).sides == sides


@COMPILED
@pytest.mark.parametrize("rows", [("xxxxxxx", "xxx....", "xxxxx.."), ("xxxxxxx", "....xxx", ".xxxxx.")])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_a_step_is_the_same(name: str, rows: tuple[str, ...]) -> None:
    model = tiny_model(name)
    if name == "qwen3-moe":
        model.config.output_router_logits = True
    asked = batch(*rows)
    asked["labels"] = asked["input_ids"].masked_fill(asked["attention_mask"] == 0, -100)
    asked["labels"][:, :-2] = -100  # what follows padding has nothing that predicts it
    report = use_fast_attention(model)
    put_head(model)
    seen: list[int] = []
    model.base_model.norm.register_forward_hook(
        lambda module, args, result: seen.append(args[0].shape[:2].numel())
    )
    found = []
    for _ in range(2):
        model.zero_grad()
        out = model(**asked, fused_lm_head=True)
        (out.loss + out.log_probs.square().sum()).backward()
        grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        found.append((out, grads))
        report.undo()
    assert not sides_of(model)
    assert seen == [int(asked["attention_mask"].sum()), asked["input_ids"].numel()]
    (ours, own_grads), (theirs, their_grads) = found
    for field in ("loss", "log_probs", "entropy", "aux_loss"):
        if getattr(theirs, field) is not None:
            torch.testing.assert_close(getattr(ours, field), theirs[field], rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.label_mask, theirs.label_mask)
    assert own_grads.keys() == their_grads.keys()
    largest = max(grad.abs().max() for grad in their_grads.values())
    for key, grad in their_grads.items():
        assert (own_grads[key] - grad).abs().max() < 1e-5 * largest, key


@COMPILED
@pytest.mark.parametrize("rows", [("xxxxxxx", "xxx....", "xxxxx.."), ("xxxxxxx", "....xxx"), ("xxxx...",)])
def test_noise_on_embeddings_is_that_of_the_padded_batch(rows: tuple[str, ...]) -> None:
    """NEFTune's hook divides by the length of rows: the same noise, drawn by the same numbers, of which padding's is left out."""
    model = tiny_model("llama").train()
    embeddings = model.get_input_embeddings()
    activate_neftune(model, 5.0)
    asked = batch(*rows)
    asked["labels"] = asked["input_ids"].masked_fill(asked["attention_mask"] == 0, -100)
    if len(rows) > 1:
        asked["labels"][:, :-2] = -100
    report = use_fast_attention(model)
    put_head(model)
    shapes: list[torch.Size] = []
    embeddings.register_forward_hook(lambda module, args, result: shapes.append(result.shape))
    ran: list[int] = []
    model.base_model.norm.register_forward_hook(lambda module, args, result: ran.append(args[0].shape[1]))
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(model(**asked, fused_lm_head=True))
        report.undo()
    assert ran == [int(asked["attention_mask"].sum()), len(rows[0])]
    assert shapes == [torch.Size([*asked["input_ids"].shape, model.config.hidden_size])] * 2
    ours, theirs = results
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=1e-5, atol=1e-5)
    assert len(embeddings._forward_hooks) == 2
    assert not embeddings._forward_pre_hooks


@COMPILED
@pytest.mark.parametrize("fast", [False, True])
def test_noise_on_rows_that_were_kept_is_that_of_one_row(fast: bool) -> None:
    """As TRL would have joined them, also where the padding is left out before the embeddings."""
    model = tiny_model("llama").train()
    activate_neftune(model, 5.0)
    seen: list[torch.Tensor] = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, result: seen.append(result[0]))
    if fast:
        use_fast_attention(model)
    put_head(model)
    asked = batch("xxxxxxx", "xxx....", "xxxxx..")
    there = asked["attention_mask"].bool()
    labels = asked["input_ids"].masked_fill(~there, -100)
    model.base_model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with hooks_see_one_row(model, asked["attention_mask"]):
        torch.manual_seed(3)
        model(**asked, labels=labels, fused_lm_head=True)
    joined, taken = seen[-2:]  # after those of the trial of what may be left out
    torch.manual_seed(3)
    torch.testing.assert_close(joined, model.get_input_embeddings()(asked["input_ids"][there][None])[0])
    assert torch.equal(taken[0] if fast else taken[there], joined)
    assert not model.get_input_embeddings()._forward_pre_hooks


def test_a_step_of_nothing_but_padding_in_a_row() -> None:
    model = tiny_model("llama")
    use_fast_attention(model)
    put_head(model)
    asked = batch("xxxx", "....")
    labels = asked["input_ids"].masked_fill(asked["attention_mask"] == 0, -100)
    out = model(**asked, labels=labels, fused_lm_head=True)
    alone = model(input_ids=asked["input_ids"][:1], labels=labels[:1], fused_lm_head=True)
    torch.testing.assert_close(out.loss, alone.loss)


def test_what_is_predicted_from_padding_stays_padded() -> None:
    asked = batch("xxxx", "..xx")
    read = torch.tensor([[True] * 4, [False, True, True, True]])
    assert unpadded(asked, BOTH, read) is None
    assert unpadded(asked, BOTH, asked["attention_mask"].bool()) is not None
