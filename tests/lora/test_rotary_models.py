"""Attention layers of transformers' models rotate by compiled loops, until they are asked not to."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from isotype.lora.fuse import fuse, unfuse
from isotype.lora.loops import elementwise
from isotype.lora.loops.loading import Loops
from isotype.lora.modules import FusedRotary
from isotype.lora.rotary import NAME
from isotype.model.boundary import BoundarySettings, set_boundary
from tests import processes
from tests.adapters import adapted, step
from tests.cpus import no_compiler
from tests.lora.watched import copies_of
from tests.models import tiny_batch
from tests.pairwise import few

STANDARD = modeling_llama.apply_rotary_pos_emb


def attention_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FusedRotary)]


@few(
    "name",
    ["llama", "mistral", "qwen3", "gemma2", "gemma3", "phi", "phi3", "qwen3-moe", "gemma3-vision"],
    "llama",
    "gemma3-vision",
    "qwen3-moe",
    "phi",
    "gemma2",
)
def test_models(name: str, rotations: list[bool]) -> None:
    model, batch = adapted(name).train(), tiny_batch(name)
    wanted = step(model, batch)
    classes = [type(module) for module in model.modules()]
    report = fuse(model)
    assert len(report.rotary) == 2
    assert all("self_attn" in each for each in report.rotary)
    assert "rotary: one function rotates queries and keys in each of 2 attention layers" in str(report)
    rotations.clear()
    found = step(model, batch)
    assert rotations == [False] * 4 + [True] * 4
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)
    unfuse(model)
    assert [type(module) for module in model.modules()] == classes
    assert not attention_of(model)


@pytest.mark.parametrize("name", ["gpt-oss", "ernie4_5-moe", "deepseek-v3", "gpt2", "t5"])
def test_models_that_rotate_another_way_are_left_alone(name: str) -> None:
    report = fuse(adapted(name).train())
    assert report.rotary == ()


@pytest.mark.parametrize(("part", "count"), [(1.0, 2), (0.5, 0)])
def test_heads_are_rotated_as_a_whole(part: float, count: int, rotations: list[bool]) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part}
    config: Any = modeling_gpt_neox.GPTNeoXConfig(vocab_size=64, rope_parameters=rope, **sizes)
    plain = modeling_gpt_neox.GPTNeoXForCausalLM(config)
    model = peft.get_peft_model(plain, peft.LoraConfig(target_modules="all-linear"))
    ids = torch.arange(12).view(2, 6)
    wanted = model(ids).logits
    fuse(model, {"input_ids": ids})
    rotations.clear()
    torch.testing.assert_close(model(ids).logits, wanted)
    assert len(rotations) == count


def test_without_a_compiler_the_original_is_called(
    monkeypatch: pytest.MonkeyPatch, rotations: list[bool]
) -> None:
    model, batch = adapted("llama").train(), tiny_batch("llama")
    assert len(fuse(model).rotary) == 2
    wanted = step(model, batch)
    assert rotations
    rotations.clear()
    monkeypatch.setattr(elementwise, "_loops", lambda: Loops("there is no C++ compiler"))
    for name, value in step(model, batch).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)
    report = fuse(model)
    assert report.rotary == ()
    assert "rotary" not in str(report)
    assert not rotations


def test_what_is_put_into_the_module_later_is_used(
    monkeypatch: pytest.MonkeyPatch, rotations: list[bool]
) -> None:
    model, batch = adapted("llama").train(), tiny_batch("llama")
    model.set_attn_implementation("eager")
    fuse(model)
    assert modeling_llama.apply_rotary_pos_emb is STANDARD
    seen: list[str] = []

    def other(*args: Any, **kwargs: Any) -> Any:
        seen.append("rotation")
        return STANDARD(*args, **kwargs)

    eager = modeling_llama.eager_attention_forward

    def attention(*args: Any, **kwargs: Any) -> Any:
        seen.append("attention")
        return eager(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "eager_attention_forward", attention)
        model(**batch)
        assert (seen, len(rotations)) == (["attention"] * 2, 4)
        seen.clear()
        rotations.clear()
        patch.setattr(modeling_llama, NAME, other)
        model(**batch)
        assert (seen, rotations) == (["rotation", "attention"] * 2, [])
    seen.clear()
    model(**batch)
    assert (seen, rotations) == ([], [False] * 4)
    rotations.clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            modeling_llama.LlamaAttention, "forward", lambda self, hidden_states, **_: (hidden_states, None)
        )
        model(**batch)
        assert not rotations


def test_fused_again_it_looks_again(monkeypatch: pytest.MonkeyPatch, rotations: list[bool]) -> None:
    model, batch = adapted("llama").train(), tiny_batch("llama")
    for other, count in ((lambda q, k, cos, sin: (q, k), 0), (lambda *x: STANDARD(*x), 4)):
        with monkeypatch.context() as patch:
            patch.setattr(modeling_llama, NAME, other)
            assert len(fuse(model).rotary) == count // 2
            rotations.clear()
            model(**batch)
            assert len(rotations) == count
    rotations.clear()
    model(**batch)
    assert not rotations  # another one than was looked at
    assert len(fuse(model).rotary) == 2
    rotations.clear()
    model(**batch)
    assert len(rotations) == 4


def test_copies_and_pickles_rotate_by_the_loops(rotations: list[bool]) -> None:
    model, batch = adapted("llama").train(), tiny_batch("llama")
    fuse(model)
    wanted = model(**batch).logits
    for other in copies_of(model):
        assert len(attention_of(other)) == 2
        assert not any(NAME in module.__dict__ for module in other.modules())
        rotations.clear()
        torch.testing.assert_close(other(**batch).logits, wanted)
        assert rotations == [False] * 4
        unfuse(other)
        assert not attention_of(other)
    assert len(attention_of(model)) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, rotations: list[bool]) -> None:
    model, batch = adapted("llama", torch.bfloat16).train(), tiny_batch("llama")
    model.enable_input_require_grads()
    fuse(model)
    wanted = step(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    rotations.clear()
    found = step(model, batch)
    assert (rotations.count(False), rotations.count(True)) == (8, 4)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_cache_of_keys(rotations: list[bool]) -> None:
    model = adapted("llama").eval()
    ids = torch.randint(3, 100, (2, 5))
    wanted = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    fuse(model)
    rotations.clear()
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False), wanted)
    assert rotations == [False] * 16


def _compiled() -> None:
    calls: list[Any] = []
    rotate = elementwise.rotate
    elementwise.rotate = lambda *args, **more: (calls.append(args), rotate(*args, **more))[1]  # type: ignore[func-returns-value]
    model, batch = adapted("llama").train(), tiny_batch("llama")
    fuse(model)
    wanted = model(**batch).logits
    calls.clear()
    first, *others = attention_of(model)
    first.compile(backend="eager")
    torch.testing.assert_close(model(**batch).logits, wanted)
    assert len(calls) == 2 * len(others)  # queries and keys of what is not compiled


@pytest.mark.lacking(no_compiler())
def test_compiled_it_runs_as_transformers_has_it() -> None:
    """In a process of its own: late in a long session torch's compiler takes a minute for this."""
    done = processes.run(_compiled)
    assert done.returncode == 0, done.stderr


def test_a_boundary_below_is_left_and_one_on_top_is_kept(rotations: list[bool]) -> None:
    model, batch = adapted("llama").train(), tiny_batch("llama")
    wanted = model(**batch).logits
    first, second = (each.self_attn for each in model.base_model.model.model.layers)
    settings = BoundarySettings("float32", torch.float32)
    set_boundary(first, settings)
    report = fuse(model)
    assert [name.split(".")[-2] for name in report.rotary] == ["1"]
    set_boundary(second, settings)
    rotations.clear()
    for attention, count in ((first, 0), (second, 2)):
        out = attention(torch.randn(1, 3, 64), tuple(torch.randn(2, 1, 3, 16)), None)[0]
        assert (out.shape, len(rotations)) == ((1, 3, 64), count)
    unfuse(model)
    assert not attention_of(model)
    for attention in (first, second):
        set_boundary(attention, None)
        assert type(attention) is modeling_llama.LlamaAttention
    torch.testing.assert_close(model(**batch).logits, wanted)


def test_float16_is_rotated_as_transformers_does_it(rotations: list[bool]) -> None:
    model, batch = adapted("llama", torch.float16).eval(), tiny_batch("llama")
    fuse(model)
    rotations.clear()
    assert model(**batch).logits.isfinite().all()
    assert not rotations
