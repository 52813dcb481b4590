"""measure_quality against autograd on the whole model, and against forwards with rounded weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import peft
import pytest
import torch
from torch import nn

import isotype
from isotype.checkpoint.checkpoint import open_checkpoint
from isotype.checkpoint.damage import _divergence, _of_signs, pieces, rounded
from isotype.checkpoint.resolve import read_measurement
from isotype.core.errors import UsageError
from isotype.core.formats import FITTED, MEASURED
from isotype.precision.damages import Damages, LayerDamage
from isotype.precision.policy import read_moments
from tests.models import save_tiny, tiny_batch, tiny_model
from tests.without_float64 import WithoutFloat64

LAYERS = {"llama": 14, "gpt2": 8}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "cache"))


def reference(weight: torch.Tensor, form: str) -> torch.Tensor:
    """Return a weight after a round trip through bitsandbytes."""
    if form == "int8":
        codes, scales, _ = bnb.int8_vectorwise_quant(weight.half())
        return codes.float() * scales[:, None] / 127
    if form in ("bfloat16", "float16"):
        return weight.to(getattr(torch, form)).float()
    name, _, block = form.partition("-")
    return bnb.dequantize_4bit(
        *bnb.quantize_4bit(weight, blocksize=int(block or 64), quant_type=name)
    ).float()


@pytest.mark.parametrize("form", [form for form in MEASURED if form not in FITTED])
def test_rounded_weights(form: str) -> None:
    weight = torch.randn(200, 72, generator=torch.Generator().manual_seed(0))
    # bitsandbytes divides by 127 in another step.
    torch.testing.assert_close(rounded(weight, form), reference(weight, form), rtol=2e-7, atol=0)


def test_pieces_are_whole_blocks() -> None:
    for rows, columns in ((200, 30_000), (4, 7), (129, 72)):
        cut = list(pieces(rows, columns))
        assert [row for part in cut for row in range(part.start, part.stop)] == list(range(rows))
        assert all(part.start * columns % 64 == 0 for part in cut)


def logits(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    logits: torch.Tensor = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return logits


def matrix(layer: Any) -> torch.Tensor:
    """Return a layer's weight as `[out, in]`."""
    weight: torch.Tensor = layer.weight.detach()
    return weight.T.contiguous() if type(layer).__name__ == "Conv1D" else weight


def linear(model: nn.Module) -> dict[str, Any]:
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and name != "lm_head"
    }


@pytest.mark.parametrize("name", LAYERS)
def test_the_estimate_is_the_diagonal_of_the_fisher_information(name: str) -> None:
    model = tiny_model(name).float().eval()
    batch = tiny_batch(name)
    damages = isotype.measure_quality(model, batch, exact=(), progress=False)
    assert len(damages.layers) == LAYERS[name]
    # The same random signs, but the gradient of one layer at a time, and in float64.
    double = copy.deepcopy(model).double()
    seen: dict[str, list[torch.Tensor]] = {}
    for module_name, module in linear(double).items():

        def follow(_: Any, args: Any, out: torch.Tensor, key: str = module_name) -> None:
            out.retain_grad()
            seen[key] = [args[0].detach(), out]

        module.register_forward_hook(follow)
    outputs = logits(double, batch)
    tokens = outputs.shape[:-1].numel()
    signs = torch.empty(tokens, outputs.shape[-1], dtype=torch.int8).random_(
        2, generator=torch.Generator().manual_seed(0)
    )
    # The derivative of Σ 2 ε √p is √p ε - p Σ √p ε: a second way to the same gradient.
    (2 * (2 * signs - 1) * outputs.softmax(-1).sqrt().view(signs.shape)).sum().backward()
    assert damages.tokens == tokens
    for layer in damages.layers:
        x, out = seen[layer.module]
        assert out.grad is not None
        x, gradient = x.reshape(-1, x.shape[-1]), out.grad.reshape(-1, out.shape[-1])
        weight = matrix(linear(model)[layer.module])
        assert (layer.rows, layer.columns) == weight.shape
        squares = (gradient.square().sum(1) @ x.square()) / gradient.square().sum(1).sum()
        squares += 8 / tokens * squares.mean()  # the prior
        # Half octaves: a value is at most a quarter octave off.
        torch.testing.assert_close(
            (read_moments(layer.moments) / (squares / squares.max())).log2(),
            torch.zeros(len(squares)),
            rtol=0,
            atol=0.26,
            check_dtype=False,
        )
        for form in MEASURED:
            stored = (
                rounded(weight, form, read_moments(layer.moments))
                if form in FITTED
                else reference(weight, form)
            )
            off = (stored - weight).double()
            wanted = 0.5 * float((gradient.square().T @ x.square() * off.square()).sum()) / tokens
            # Sums of some hundred float32 terms of one sign.
            assert layer.damage[form] == pytest.approx(wanted, rel=2e-3)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.v_proj"])
def test_signs_meet_the_exact_fisher_information_closer_than_draws_of_a_token(name: str) -> None:
    model = tiny_model("llama").double().eval()
    model.get_output_embeddings().weight.data *= 40  # The model is sure of its tokens, as trained models are.
    outputs: list[torch.Tensor] = []
    model.get_submodule(name).register_forward_hook(lambda _, __, output: outputs.append(output))
    after = logits(model, {"input_ids": tiny_batch("llama", 1)["input_ids"][:, :6]})
    p = after.softmax(-1).detach()[0]
    tokens, vocabulary = p.shape
    count = 400

    def squares(gradients: torch.Tensor) -> torch.Tensor:
        """Return gradients of the layer's output `[…, tokens, out]` for gradients of the logits `[…, 1, tokens, vocabulary]`."""
        (below,) = torch.autograd.grad(after, outputs, gradients, retain_graph=True, is_grads_batched=True)
        return below[:, 0].square()

    # The columns of diag √p - p √pᵀ for each token: their outer products sum to diag p - p pᵀ.
    columns = torch.zeros(tokens, vocabulary, 1, tokens, vocabulary, dtype=torch.float64)
    for at, row in enumerate(p):
        columns[at, :, 0, at] = torch.diag(row.sqrt()) - row.sqrt().unsqueeze(1) * row
    exact = squares(columns.flatten(0, 1)).sum(0)

    generator = torch.Generator().manual_seed(0)
    everywhere = torch.ones(1, tokens, dtype=torch.bool)
    signs = [_of_signs(p.log().float(), everywhere, after, generator) for _ in range(count)]
    one_hot = nn.functional.one_hot(torch.multinomial(p, count, True, generator=generator).T, vocabulary)
    by_signs = squares(torch.stack(signs)).sum(2)  # per token: a damage also sums over the channels
    by_draws = squares((one_hot - p).unsqueeze(1)).sum(2)
    for estimates in (by_signs, by_draws):
        # Five standard errors of each token's mean.
        assert ((estimates.mean(0) - exact.sum(1)).abs() < 5 * estimates.std(0) / count**0.5).all()
    assert by_signs.var(0).sum() < by_draws.var(0).sum()


def test_what_is_measured_exactly_is_the_divergence() -> None:
    model = tiny_model("llama").float().eval()
    batch = tiny_batch("llama")
    forms = ("int8", "fp4", "nf4-32")
    measured = isotype.measure_quality(model, batch, exact=forms, progress=False).measured
    before = torch.log_softmax(logits(model, batch).detach().double(), -1)
    assert set(measured) == set(forms)
    for form in forms:
        changed = copy.deepcopy(model)
        for layer in linear(changed).values():
            layer.weight.data = reference(layer.weight.data, form)
        after = torch.log_softmax(logits(changed, batch).detach().double(), -1)
        wanted = float((before.exp() * (before - after)).sum(-1).mean())
        # The divergence is of second order in the change of the logits, √(2 KL). Rounding of the logits (sums of 128 products,
        # thirty in a row) changes it by u √128 √30 for logits near 1.
        blur = 2.0**-24 * (128 * 30) ** 0.5
        assert measured[form] == pytest.approx(wanted, rel=1e-5 + 2 * blur / (2 * wanted) ** 0.5)


@pytest.mark.parametrize(("name", "stacks"), [("qwen3-moe", 4), ("llama", 0)])
def test_experts_are_said_not_to_be_measured(name: str, stacks: int) -> None:
    damages = isotype.measure_quality(tiny_model(name).float().eval(), tiny_batch(name), progress=False)
    expected = f"{stacks} stacked expert weights not measured: --quantization mixed stores experts in nf4"
    assert damages.notes == ((expected,) if stacks else ())


@pytest.mark.parametrize(
    "add", [peft.get_peft_model, lambda m, config: peft.inject_adapter_in_model(config, m)]
)
def test_adapters_are_not_measured(add: Callable[..., Any]) -> None:
    model = add(tiny_model("llama").float().eval(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    damages = isotype.measure_quality(model, tiny_batch("llama"), exact=(), progress=False)
    assert len(damages.layers) == LAYERS["llama"]
    assert damages.notes == ()


def test_a_divergence_is_summed_up_on_a_device_without_float64() -> None:
    p, q = (torch.randn(70, 9).log_softmax(-1) for _ in range(2))
    assert _divergence(p.as_subclass(WithoutFloat64), q.as_subclass(WithoutFloat64)) == _divergence(p, q) > 0


def test_a_checkpoint_is_measured_from_disk_once(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path / "model")
    damages = isotype.measure_quality(path, progress=False)
    assert damages.key == open_checkpoint(path).fingerprint
    assert read_measurement(Damages, damages.key) == damages
    assert Damages.from_json(damages.to_json()) == damages
    with pytest.raises(ValueError, match="a layer lacks a format"):
        Damages.from_json(damages.to_json().replace('"int8": ', '"int7": '))
    assert damages.measured["nf4"] > 0
    loaded = isotype.load(path, isotype.resolve_precision(path, "float32", device="cpu"))
    again = isotype.measure_quality(loaded, progress=False)
    assert not again.key
    for one, other in zip(damages.layers, again.layers, strict=True):
        assert one.module == other.module
        assert one.damage == pytest.approx(dict(other.damage), rel=1e-4)
    assert "14 linear layers" in str(damages)


def test_a_model_without_logits_is_refused() -> None:
    model = tiny_model("llama").float().model
    with pytest.raises(UsageError, match="without logits"):
        isotype.measure_quality(model, {"input_ids": torch.ones(1, 4, dtype=torch.long)}, progress=False)


@pytest.mark.parametrize("form", ["nf4", "nf4-32", "fp4", "int8"])
@pytest.mark.parametrize("double_quant", [False, True])
def test_bytes_are_those_of_the_stored_tensors(form: str, double_quant: bool) -> None:
    weight = torch.randn(300, 200)
    if form == "int8":
        codes, scales, _ = bnb.int8_vectorwise_quant(weight.half())
        wanted = codes.nbytes + scales.float().nbytes
    else:
        name, _, block = form.partition("-")
        codes, state = bnb.quantize_4bit(
            weight, blocksize=int(block or 64), quant_type=name, compress_statistics=double_quant
        )
        nested = state.state2.absmax.nbytes + state.offset.nbytes if double_quant else 0
        wanted = codes.nbytes + state.absmax.nbytes + nested
    assert LayerDamage("", 300, 200, {}).bytes(form, double_quant=double_quant) == wanted
