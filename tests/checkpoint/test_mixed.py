"""A base whose layers are stored in different formats: loaded, trained, saved, merged and chatted with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isotype
from isotype.checkpoint.adapter import load_for_inference
from isotype.checkpoint.checkpoint import open_model
from isotype.checkpoint.merge.merge import merge_adapter
from isotype.checkpoint.weightless import skeleton, store
from isotype.cli.main import main
from isotype.core.errors import PrecisionError
from isotype.core.formats import FORMATS as RECORDS
from isotype.model.adapters import add_lora
from isotype.model.quantized import dense_weight, quantization_state
from isotype.model.walk import kind_of
from isotype.precision.damages import with_constants_of
from isotype.precision.policy import LayerStorage, PrecisionPolicy, write_moments
from tests.adapters import save_trained
from tests.caches import own_cache
from tests.checkpoint.test_damage import linear, matrix
from tests.checkpoint.test_gguf_export import byte_level
from tests.checkpoint.test_merge import save_base
from tests.models import tiny_batch, tiny_model
from tests.pairwise import few

FORMATS = {
    "llama": {
        "model.layers.0.self_attn.v_proj": "int8",
        "model.layers.1.mlp.gate_proj": "int8",
        "model.layers.0.mlp.down_proj": "nf4-32",
        "model.layers.1.self_attn.q_proj": "float32",
        "model.layers.1.mlp.down_proj": "nf4-fitted",
    },
    "gpt2": {
        "transformer.h.0.mlp.c_fc": "int8",
        "transformer.h.1.mlp.c_proj": "float32",
        "transformer.h.1.attn.c_attn": "nf4-32",
        "transformer.h.0.attn.c_attn": "nf4-32-fitted",
    },
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOTYPE_CACHE", own_cache(tmp_path / "cache"))


def mixed(path: Path, name: str = "llama", quantization: str = "nf4") -> PrecisionPolicy:
    policy = isotype.resolve_precision(path, "float32", quantization, "cpu")
    columns = {
        module_name: matrix(module).shape[1] for module_name, module in linear(tiny_model(name)).items()
    }
    return replace(
        policy,
        layers=tuple(
            LayerStorage(module, form, moments(columns[module]) if "fitted" in form else "")
            for module, form in FORMATS[name].items()
        ),
    )


def moments(columns: int) -> str:
    """Return moments of input channels, a few of them large."""
    squares = torch.rand(columns, generator=torch.Generator().manual_seed(0))
    squares[::9] *= 1000
    return write_moments(squares, 64)


def plain(path: Path) -> PrecisionPolicy:
    return isotype.resolve_precision(path, "float32", device="cpu")


def form(layer: Any) -> str:
    kind = type(layer).__name__
    if not kind.startswith("Linear4bit"):
        return "int8" if kind.startswith("Linear8bit") else str(layer.weight.dtype).removeprefix("torch.")
    state = quantization_state(layer)
    return str(state.quant_type) + ("-32" if state.blocksize == 32 else "")


def weight(layer: Any) -> torch.Tensor:
    quantized = kind_of(layer) in ("linear4bit", "linear8bit")
    return dense_weight(layer, torch.float32) if quantized else layer.weight.detach()


def _codes(name: str) -> set[str]:
    """The code books of the layers' formats."""
    return {RECORDS[form].code for form in ("nf4", *FORMATS[name].values()) if form in RECORDS}


@pytest.mark.parametrize("name", FORMATS)
def test_each_layer_holds_what_a_model_all_in_its_format_does(saved: Callable[..., Path], name: str) -> None:
    path = saved(name)
    policy = mixed(path, name)
    model = isotype.load(path, policy)
    others = {
        storage: dict(
            isotype.load(
                path, isotype.resolve_precision(path, "float32", quantization, "cpu")
            ).named_modules()
        )
        for storage, quantization in (("float32", None), *((code, code) for code in _codes(name)))
    }
    blank = dict(store(skeleton(open_model(path).model_config, policy), policy).named_modules())
    seen = []
    for module_name, module in model.named_modules():
        if module_name in FORMATS[name] or type(module).__name__.startswith("Linear4bit"):
            wanted = policy.storage_of(module_name)
            assert form(module) == wanted.removesuffix("-fitted")
            assert type(blank[module_name]) is type(module)
            assert blank[module_name].weight.shape == module.weight.shape
            seen.append(wanted)
            if wanted in others:
                assert torch.equal(weight(module), weight(others[wanted][module_name]))
            else:
                dense = others["float32"][module_name].weight
                dense = dense.T if name == "gpt2" else dense
                known = policy.moments_of(module_name)
                importance = torch.ones(dense.shape[1]) if known is None else known
                code = RECORDS[wanted].code
                before, error = (
                    float(((values - dense).square() * importance).sum())
                    for values in (weight(others[code][module_name]), weight(module))
                )
                assert error < before, (
                    f"{module_name} in {wanted} should lose less than a whole model in {code}"
                )
    assert set(seen) == {"nf4", *FORMATS[name].values()}
    assert isotype.enforce(model, policy) in (None, ())


def test_a_policy_for_other_layers_is_refused(saved: Callable[..., Path]) -> None:
    path = saved("llama")
    policy = replace(mixed(path), layers=(LayerStorage("model.layers.9.mlp.up_proj", "int8"),))
    with pytest.raises(PrecisionError, match="other layers"):
        isotype.load(path, policy)
    model = isotype.load(path, mixed(path))
    with pytest.raises(PrecisionError, match="another format than the policy's storage"):
        isotype.enforce(model, replace(policy, layers=()))


def test_int8_and_unquantized_layers_without_any_of_4_bits(saved: Callable[..., Path]) -> None:
    path = saved("llama")
    layer = "model.layers.1.self_attn.q_proj"
    policy = replace(
        isotype.resolve_precision(path, "float32", "int8", "cpu"), layers=(LayerStorage(layer, "float32"),)
    )
    model = isotype.load(path, policy)
    assert {form(module) for name, module in model.named_modules() if name.endswith("proj")} == {
        "int8",
        "float32",
    }
    assert type(model.get_submodule(layer)) is nn.Linear


def test_the_choice_is_measured_and_fits(saved: Callable[..., Path]) -> None:
    path = saved("llama")
    with pytest.raises(PrecisionError, match="were not measured"):
        isotype.resolve_precision(path, "float32", "mixed", "cpu")
    damages = isotype.measure_quality(path, progress=False)
    policy = isotype.resolve_precision(path, "float32", "mixed", "cpu")  # from the cached damages
    assert policy == isotype.resolve_precision(path, "float32", "mixed", "cpu", damages=damages)
    assert policy.storage == "nf4"
    assert policy.double_quant
    assert PrecisionPolicy.from_dict(policy.to_dict()) == policy
    size = sum(layer.bytes(policy.storage_of(layer.module), double_quant=True) for layer in damages.layers)
    assert size <= 1.1 * damages.bytes("nf4")
    what, why = next(row[1:] for row in policy.rows() if row[0] == "frozen base weights")
    assert what == "nf4 (double quantization), mixed"
    assert why.startswith("mixed: 14 linear layers (")
    assert "stored otherwise: model.layers.*.self_attn.o_proj in int8: 0, 1" in str(policy)
    loaded = sum(each.numel() for each in isotype.load(path, plain(path)).parameters()) * 4
    more = isotype.resolve_precision(path, "float32", "mixed", "cpu", base_memory=loaded)
    assert (more.storage, more.layers) == ("float32", ())
    with pytest.raises(PrecisionError, match="no mixed storage fits"):
        isotype.resolve_precision(path, "float32", "mixed", "cpu", base_memory=1000)


def test_the_plan_of_a_load_shows_it(saved: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = str(saved("llama"))
    isotype.measure_quality(path, progress=False)
    command = ["inspect", path, "--plan", "--dtype", "float32", "--quantization", "mixed", "--device", "cpu"]
    assert main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "storage mixed: 14 linear layers (" in shown
    assert "stored otherwise: model.layers.*.self_attn.o_proj in int8: 0, 1" in shown
    assert main([*command, "--base_memory", "much"]) == 2
    assert "--base_memory much" in capsys.readouterr().err


def gradients(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.fixture
def adapted(saved: Callable[..., Path]) -> tuple[Any, PrecisionPolicy]:
    path = saved("llama")
    policy = mixed(path)
    model = add_lora(isotype.load(path, policy), policy, r=4, lora_alpha=8, target_modules="all-linear")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model, policy


def test_fused_it_computes_what_dense_layers_of_the_same_weights_do(
    adapted: tuple[Any, PrecisionPolicy],
) -> None:
    model, policy = adapted
    batch = tiny_batch("llama")
    dense = copy.deepcopy(model)
    for name, module in list(dense.named_modules()):
        if kind_of(module) in ("linear4bit", "linear8bit"):
            linear = nn.Linear(module.in_features, module.out_features, bias=False)
            linear.weight = nn.Parameter(weight(module), requires_grad=False)
            dense.set_submodule(name, linear)
    wanted = gradients(dense, batch)
    isotype.fuse(model)
    computed = gradients(model, batch)
    assert computed.keys() == wanted.keys()
    for name, value in wanted.items():
        # Sums of float32 in another order, and float16 scales of int8 rows in some products.
        torch.testing.assert_close(
            computed[name], value, rtol=2e-3, atol=1e-5 * float(value.abs().max()) + 1e-9
        )
    assert isotype.enforce(model, policy) in (None, ())


def test_an_adapter_brings_its_base_back(adapted: tuple[Any, PrecisionPolicy], tmp_path: Path) -> None:
    model, policy = adapted
    folder = save_trained(model, tmp_path / "adapter", seed=1, scale=0.01)
    policy.save(folder)
    again, _, read = load_for_inference(folder, device="cpu")
    assert read.layers == policy.layers
    batch = {"input_ids": tiny_batch("llama")["input_ids"]}
    model.eval()
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)
    _, _, other = load_for_inference(folder, device="cpu", quantization="nf4")
    assert other.layers == ()


@few("stored, double", list(product([None, "f32"], [False, True])), ("f32", True))
def test_a_merge_adds_to_the_weights_that_were_trained_on(
    tmp_path: Path, stored: str | None, double: bool
) -> None:
    base = save_base(tmp_path / "base", vocab_size=384, num_hidden_layers=2, attention_bias=False)
    byte_level("smollm").save_pretrained(base)
    policy = replace(mixed(base), double_quant=double)  # the policy of `--quantization mixed`
    model = add_lora(isotype.load(base, policy), policy, r=4, target_modules="all-linear")
    folder = save_trained(model, tmp_path / "adapter", seed=1, scale=0.01)
    policy.save(folder)
    output = tmp_path / ("merged.gguf" if stored else "merged")
    merge_adapter(folder, output, dtype="auto" if stored else "float32", stored=stored)
    merged = isotype.load(output, plain(output))
    wanted = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            delta = layer.get_delta_weight("default")
            wanted[name.removeprefix("base_model.model.")] = weight(layer.get_base_layer()) + delta
    assert len(wanted) == 14
    for name, value in wanted.items():
        torch.testing.assert_close(merged.get_submodule(name).weight, value, rtol=0, atol=1e-6)


def test_a_check_traces_a_mixed_base(saved: Callable[..., Path]) -> None:
    path = saved("llama")
    policy = mixed(path)
    blank = store(skeleton(open_model(path).model_config, policy), policy)
    model = add_lora(blank, policy, r=4, target_modules="all-linear")
    report = isotype.check(model, tiny_batch("llama"), policy, device="cpu", wiring=False)
    report.raise_for_errors()
    real = add_lora(isotype.load(path, policy), policy, r=4, target_modules="all-linear")
    wanted = isotype.check(real, tiny_batch("llama"), policy, device="cpu", wiring=False, verify=False)
    assert report.memory.phases == wanted.memory.phases


def test_a_module_of_ones_own(saved: Callable[..., Path]) -> None:
    path = saved("llama")
    policy = mixed(path)
    wanted = isotype.load(path, policy)
    with torch.device("meta"):
        import transformers

        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    model = model.to_empty(device="cpu")
    isotype.load_module(model, path, policy)
    for name, module in wanted.named_modules():
        if name.endswith("proj"):
            assert form(model.get_submodule(name)) == form(module)
            assert torch.equal(weight(model.get_submodule(name)), weight(module))


def test_a_resumed_run_keeps_the_constants_it_was_begun_with(saved: Callable[..., Path]) -> None:
    begun = mixed(saved("llama"))
    measured_anew = replace(
        begun,
        layers=tuple(replace(layer, moments=layer.moments and layer.moments[::-1]) for layer in begun.layers),
    )
    assert measured_anew != begun
    assert with_constants_of(measured_anew, begun) == begun
    assert with_constants_of(measured_anew, None) == measured_anew
    # A policy with other layers is returned unchanged: the comparison of runs refuses it.
    other = replace(measured_anew, layers=measured_anew.layers[1:])
    assert with_constants_of(other, begun) == other
