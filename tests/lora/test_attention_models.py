"""Models of transformers with isotype's attention against the same models with torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention

import isotype
from isotype.lora.attention import registered, strips
from isotype.lora.attention.registered import use_fast_attention
from isotype.lora.loops.loading import Loops
from tests import cpus
from tests.adapters import step
from tests.cpus import no_compiler
from tests.lora.test_attention import POSITIONS, tensors
from tests.models import CONFIGS, one_layer, quiet, tiny_batch, tiny_model
from tests.pairwise import pairwise
from tests.zoo import ARCHITECTURES

# Both sum in float32, in another order.
TOLERANCE = 1e-5
pytestmark = pytest.mark.lacking(no_compiler())
_OTHERS = (
    "bart-s2s",
    "bert-cls",
    "cohere",
    "falcon",
    "granite",
    "llava-vl",
    "olmo2",
    "qwen2",
    "smollm3",
    "starcoder2",
)


def assert_same_step(model: Any, batch: dict[str, torch.Tensor], present: torch.Tensor | None = None) -> Any:
    """The same logits (where `present`) and gradients with isotype's attention as with torch's kernel."""
    grads = step(model, batch)
    logits = grads.pop("logits")
    report = use_fast_attention(model)
    own_grads = step(model, batch)
    own_logits = own_grads["logits"]
    if present is not None:
        logits, own_logits = logits[present], own_logits[present]
    assert (own_logits - logits).norm() <= TOLERANCE * logits.norm()
    whole = torch.stack([grad.norm() for grad in grads.values()]).norm()
    for name, grad in grads.items():  # those of key biases are zero but for rounding
        assert (own_grads[name] - grad).norm() <= TOLERANCE * (grad.norm() + 0.01 * whole), name
    report.undo()
    again = step(model, batch)["logits"]
    assert torch.equal(again[present] if present is not None else again, logits)
    return report


@pairwise(
    "side, name",
    ["none", "left", "right"],
    [name for name in CONFIGS if name not in ("gemma2", "gpt-oss", "t5")],
    strength=1,
)
def test_models(name: str, side: str) -> None:
    with quiet():
        model, batch = tiny_model(name).eval(), tiny_batch(name)
    present = torch.ones_like(batch["attention_mask"])
    if side != "none":
        present[1, -5:] = 0
        present = present if side == "right" else present.flip(-1)
        batch = {
            **batch,
            "attention_mask": present,
            "labels": batch["labels"].masked_fill(present == 0, -100),
        }
    report = assert_same_step(model, batch, present.bool())
    assert report.in_use
    assert not report.left


@pytest.mark.parametrize("name", _OTHERS)
def test_other_architectures(name: str) -> None:
    architecture = ARCHITECTURES[name]
    with quiet():
        model, batch = architecture.build(torch.float32).eval(), architecture.batch()
    report = assert_same_step(model, batch)
    assert report.in_use == (name != "falcon")
    assert not report.left


def test_packed_batches() -> None:
    model = tiny_model("llama").eval()
    position_ids = POSITIONS[1:2, :48] % 40
    ids = torch.randint(4, 100, (1, 48), generator=torch.Generator().manual_seed(0))
    assert_same_step(
        model, {"input_ids": ids, "position_ids": position_ids, "labels": ids, "use_cache": False}
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float32(dtype: torch.dtype) -> None:
    exact = step(tiny_model("llama").eval(), tiny_batch("llama"))["logits"]
    model, batch = tiny_model("llama", dtype).eval(), tiny_batch("llama")
    theirs = step(model, batch)["logits"]
    assert use_fast_attention(model).in_use
    own = step(model, batch)["logits"]
    assert own.dtype == theirs.dtype
    assert (own.float() - exact).norm() <= 1.5 * (theirs.float() - exact).norm()


def test_autocast_and_gradient_checkpointing() -> None:
    model, batch = tiny_model("llama").train(), tiny_batch("llama")
    use_fast_attention(model)
    wanted = step(model, batch, torch.bfloat16)
    model.gradient_checkpointing_enable()
    recomputed = step(model, batch, torch.bfloat16)
    assert all(torch.equal(value, recomputed[name]) for name, value in wanted.items())


def test_generation_takes_the_same_tokens() -> None:
    model, ids = tiny_model("llama").eval(), tiny_batch("llama")["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    given = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    before = model.generate(ids, **given)
    use_fast_attention(model)
    assert torch.equal(model.generate(ids, **given), before)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 0), (2, 5, 0)])
def test_calls_without_rows_queries_or_keys(batch: int, queries: int, keys: int, masked: bool) -> None:
    model = tiny_model("llama")
    report = use_fast_attention(model)
    layer = model.model.layers[0].self_attn
    q, k, v, _ = tensors((batch, 4, 2, queries, keys, 16), torch.float32)
    mask = torch.ones(batch, 1, queries, keys, dtype=torch.bool) if masked else None
    out, _ = registered.attention_forward(layer, q, k, v, mask, is_causal=False)
    assert out.shape == (batch, queries, 4, 16)
    assert not out.any()
    assert not report.left


def test_a_mask_of_numbers_that_torch_does_not_take_is_refused_as_torch_refuses_it() -> None:
    model = tiny_model("llama")
    report = use_fast_attention(model)
    q, k, v, _ = tensors((1, 4, 2, 5, 5, 16), torch.float32)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="attn_mask"):
        registered.attention_forward(model.model.layers[0].self_attn, q, k, v, mask)
    assert set(report.left) == {"the mask is int64"}


def test_calls_that_are_left_are_told() -> None:
    with quiet():
        model, batch = tiny_model("gpt2").train(), tiny_batch("gpt2")
    report = use_fast_attention(model)
    step(model, batch)
    assert "2 calls left to torch's kernel: the call has dropout" in str(report)
    with quiet():
        model, batch = tiny_model("t5").eval(), tiny_batch("t5")
    report = assert_same_step(model, batch)
    assert set(report.left) == {"the call has a position bias"}


@pytest.mark.parametrize(
    ("dtype", "keys", "amx", "by_torch"),
    [
        (torch.bfloat16, 1024, True, True),
        (torch.bfloat16, 1023, True, False),
        (torch.float32, 1024, True, False),
        (torch.bfloat16, 1024, False, False),
    ],
)
def test_torch_computes_long_rows_on_a_cpu_with_amx(
    dtype: torch.dtype, keys: int, amx: bool, by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registered, "multiplies_by_amx", lambda: amx)
    q, k, v = (torch.randn(1, 1, keys, 64, dtype=dtype) for _ in range(3))
    calls: list[Any] = []
    compiled = strips.attention
    monkeypatch.setattr(strips, "attention", lambda *args: calls.append(args) or compiled(*args))
    out, _ = registered.attention_forward(torch.nn.Module(), q, k, v, None)
    assert bool(calls) != by_torch
    reference = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    assert (out.transpose(1, 2) - reference).norm() <= 8e-3 * reference.norm()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        # Gemma 2 of older transformers takes sdpa.
        pytest.param("gemma2", "the attention implementation is eager", marks=pytest.mark.newest),
        ("gpt-oss", "the attention implementation is eager"),
        ("falcon", "FalconForCausalLM has its own attention, outside of transformers' registry"),
        (
            "glm_moe_dsa",
            "the code of GlmMoeDsaForCausalLM compares the implementation's name with sdpa",
        ),
    ],
)
def test_models_that_are_left_are_told(name: str, reason: str) -> None:
    with quiet():
        model = tiny_model(name) if name in CONFIGS else ARCHITECTURES[name].build(torch.float32)
    before = model.config._attn_implementation
    report = use_fast_attention(model)
    assert not report.in_use
    assert str(report) == f"attention: unchanged: {reason}"
    assert model.config._attn_implementation == before
    assert use_fast_attention(torch.nn.Linear(2, 2)).reason == "the model is no transformers model"


def test_a_choice_of_the_user_stays() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    assert use_fast_attention(model).reason == "the attention implementation is eager"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_preflight_follows_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus.pretend("cpu-avx2", monkeypatch)
    model, batch = one_layer(tiny_model("llama", dtype)), tiny_batch("llama")
    plain = isotype.check(model, batch, wiring=False, verify=False)
    use_fast_attention(model)
    report = isotype.check(model, batch, wiring=False, verify=False)
    assert report.ok == plain.ok
    assert [(found.code, found.module) for found in report.findings] == [
        (found.code, found.module) for found in plain.findings
    ]
    # This CPU emulates bfloat16: it computes on float32 copies of one layer's operands at a time.
    assert (report.memory.peak == plain.memory.peak) == (dtype == torch.float32)


def test_what_is_foreseen_is_the_attention_that_it_stands_for() -> None:
    q, k, v = (torch.randn(2, 4, 5, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        out = strips.traced(scaled_dot_product_attention, q, k, v)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in (q, k, v)}
    expected = scaled_dot_product_attention(q, k, v)
    assert torch.equal(out, expected)
    d_out = torch.randn_like(out)
    for one, other in zip(
        torch.autograd.grad(out, (q, k), d_out), torch.autograd.grad(expected, (q, k), d_out), strict=True
    ):
        assert torch.equal(one, other)


def test_without_a_compiler_the_model_keeps_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    none = Loops("there is no C++ compiler (c++) on the path")
    model = tiny_model("llama").eval()
    fused = copy.deepcopy(model)
    fused_report = use_fast_attention(fused)
    monkeypatch.setattr(strips, "compiled_strips", lambda: none)
    report = use_fast_attention(model)
    assert str(report) == "attention: unchanged: there is no C++ compiler (c++) on the path"
    assert not report.sides
    expected = step(model, tiny_batch("llama"))["logits"]
    assert torch.equal(
        step(fused, tiny_batch("llama"))["logits"], expected
    )  # as if unpickled on another machine
    assert fused_report.left == {none.reason: len(model.model.layers)}


class _Empty(transformers.PreTrainedModel):  # type: ignore[misc]
    config_class = transformers.PretrainedConfig
    _supports_sdpa = True


def test_a_model_without_parameters() -> None:
    assert use_fast_attention(_Empty(transformers.PretrainedConfig())).in_use
