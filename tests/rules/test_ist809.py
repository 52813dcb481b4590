"""Where float16 overflows, foretold from a measurement and compared with real float16 steps on this CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import isotype
from isotype.core.names import base_name
from isotype.model.boundary import original_class
from isotype.preflight.check import check
from isotype.records.finding import Finding
from isotype.report.check.report import Report
from tests.model.test_boundary_choice import llama
from tests.pairwise import pairwise

FP16 = torch.float16
IDS = torch.arange(24).reshape(2, 12)
BATCH = {"input_ids": IDS, "labels": IDS}


class _First(TorchDispatchMode):
    """A reference that looks at every float16 result: where the first that is not finite comes from."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found = ""
        self.inside: list[str] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._enter(name), prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, name: str) -> Any:
        return lambda *_: self.inside.append(name)

    def _leave(self, *_: Any) -> None:
        self.inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            low = isinstance(each, torch.Tensor) and each.dtype == FP16
            if low and not self.found and not torch.isfinite(each).all():
                self.found = self.inside[-1]
        return result


def first_overflow(model: nn.Module, batch: Any, autocast: bool) -> str | None:
    """The module whose operator first returns what is not finite in a real float16 forward; None where the loss is finite."""
    model = copy.deepcopy(model)
    first = _First(model)
    with torch.no_grad(), first, torch.autocast("cpu", FP16, enabled=autocast):
        loss = model(**batch).loss
    assert first.found or torch.isfinite(loss)
    return first.found or None


def foretold(model: nn.Module, batch: Any, autocast: bool, **options: Any) -> tuple[Report, Finding | None]:
    ranges = options.pop("ranges", None) or isotype.measure_ranges(model, batch, progress=False)
    options = {"phases": ("forward", "backward"), "wiring": False, **options}
    report = check(model, batch, device="t4", autocast=FP16 if autocast else False, ranges=ranges, **options)
    found = [finding for finding in report.findings if finding.code == "IST809"]
    return report, found[0] if found else None


def moved(place: str, k: int) -> Any:
    """A tiny Llama of the same function whose values at one place are 2^k as large."""
    factor = 2.0**k
    if place == "stream":
        model = llama(scale=factor)
    elif place == "product":
        model = llama(product=factor)
    else:
        model = llama()
        up, down = {"value": ("v_proj", "o_proj"), "query": ("q_proj", "k_proj")}[place]
        with torch.no_grad():
            for layer in model.model.layers:
                getattr(layer.self_attn, up).weight.mul_(factor)
                getattr(layer.self_attn, down).weight.mul_(1 / factor)
    model.lm_head.requires_grad_(True)
    return model


AUTOCAST = [pytest.param(True, id="autocast"), pytest.param(False, id="half")]


@pairwise("autocast, k, place", AUTOCAST, [0, 9, 16], ["stream", "product", "value", "query"], strength=1)
def test_it_fails_where_foretold(place: str, k: int, autocast: bool) -> None:
    model = moved(place, k)
    if not autocast:
        model = model.half()
    report, finding = foretold(model, BATCH, autocast, verify=False, phases=("forward",))
    if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
        assert "IST802" in {each.code for each in report.errors}  # its weights are infinite already
        return
    assert (None if finding is None else finding.module) == first_overflow(model, BATCH, autocast)


def gemma2(factor: float) -> Any:
    """A tiny Gemma 2 whose norms behind attention and MLP have large weights."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_feedforward_layernorm.weight.fill_(factor)
    return model


def t5(factor: float) -> Any:
    """A tiny T5 whose wo has large weights, the place that its authors keep in float32."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config)
    with torch.no_grad():
        for layer in model.encoder.block:
            layer.layer[1].DenseReluDense.wo.weight.mul_(factor)
    return model


@pairwise(
    "factor, make",
    [
        pytest.param(1.0, id="harmless"),
        pytest.param(2.0**10, id="large"),
        pytest.param(2.0**15, id="hopeless"),
    ],
    [pytest.param(gemma2, marks=pytest.mark.newest, id="gemma2"), pytest.param(t5, id="t5")],
    strength=1,
)
# transformers 5.20 adds the least float16 to Gemma 2's masked scores, and the reference takes that -inf for an overflow.
def test_other_architectures(make: Any, factor: float) -> None:
    model = make(factor).half()
    model.eval()  # T5 drops values in training
    _, finding = foretold(model, BATCH, False, verify=False, phases=("forward",))
    assert (None if finding is None else finding.module) == first_overflow(model, BATCH, False)
    assert finding is None or factor > 1


def test_what_it_says() -> None:
    model = moved("stream", 16)
    report, finding = foretold(model, BATCH, autocast=True)
    assert finding is not None
    when = report.trace.setup.ranges.when[:10]  # type: ignore[union-attr]
    assert finding.message == "mm returns values up to 1,420,000 in float16: headroom 0.046"
    assert (finding.module, finding.op, finding.phase) == (
        "model.layers.0.self_attn.o_proj",
        "aten.mm.default",
        "forward",
    )
    assert finding.notes == (
        "7 more operators in 5 modules, up to 2,360,000 in model.layers.1.mlp.down_proj",
        "the residual stream reaches 82,700 at model.embed_tokens and 3,740,000 at model.layers.1",
        f"measured {when} in float32 on the batch given (24 tokens)",
    )
    error = report.error()
    assert error is not None
    assert "values in float16's range on NVIDIA T4" in str(error)
    first = finding.fixes[0]
    assert first.description == (
        "keep the residual stream in float32, run 5 modules in float32; matmuls stay in float16"
    )
    assert (first.safety, first.verified, first.scope) == ("safe", True, "model")


@pairwise(
    ["autocast", "place, k"],
    AUTOCAST,
    [
        ("stream", 13),
        ("product", 13),
        pytest.param("value", 15, marks=pytest.mark.exhaustive),
        pytest.param("query", 15, marks=pytest.mark.exhaustive),
    ],
    strength=1,
)
def test_repair_keeps_the_loss(place: str, k: int, autocast: bool) -> None:
    model = moved(place, k)
    with torch.no_grad():
        reference = model(**BATCH).loss
    if not autocast:
        model = model.half()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report, finding = foretold(model, BATCH, autocast)
    assert finding is not None
    repairs = isotype.repair(model, report)
    with torch.no_grad(), torch.autocast("cpu", FP16, enabled=autocast):
        loss = model(**BATCH).loss
    torch.testing.assert_close(loss.float(), reference, rtol=5e-3, atol=0)
    after, _ = foretold(model, BATCH, autocast, ranges=report.trace.setup.ranges)
    assert "IST809" not in {each.code for each in after.findings}
    repairs.undo()
    assert {name: value.dtype for name, value in model.state_dict().items()} == {
        name: value.dtype for name, value in before.items()
    }
    assert all(type(module) is original_class(module) for module in model.modules())


def test_a_folded_layer_stands_for_all() -> None:
    """One layer of six overflows: a trace in which the last stands for four others names it all the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        layer = model.model.layers[3].mlp
        layer.up_proj.weight.mul_(2.0**22)
        layer.down_proj.weight.mul_(2.0**-22)
    whole, exact = foretold(model, BATCH, autocast=True, verify=False)
    ranges = whole.trace.setup.ranges
    _, folded = foretold(model, BATCH, autocast=True, fold=True, ranges=ranges)
    assert exact is not None
    assert folded is not None
    assert exact.module == folded.module == "model.layers.3.mlp.up_proj"
    assert exact.message == folded.message
    assert folded.fixes[0].verified
    assert folded.fixes[0].scope == "model"


@pytest.mark.parametrize("scaler", [True, False], ids=["scaler", "no scaler"])
def test_gradients(scaler: bool) -> None:
    """A loss times 2^30: the forward fits, gradients do not."""
    model = llama()
    model.lm_head.requires_grad_(True)
    ranges = isotype.measure_ranges(model, BATCH, progress=False)
    steep = replace(
        ranges,
        operators=tuple(
            replace(
                each, inputs=tuple(2.0**30 * value for value in each.inputs), output=2.0**30 * each.output
            )
            if each.phase == "backward"
            else each
            for each in ranges.operators
        ),
    )
    _, fits = foretold(model, BATCH, autocast=True, ranges=ranges, scaler=scaler, verify=False)
    _, finding = foretold(model, BATCH, autocast=True, ranges=steep, scaler=scaler, verify=False)
    assert fits is None
    assert finding is not None
    assert finding.phase == "backward"
    assert finding.severity == ("warning" if scaler else "error")
    assert any("loss scale has to fall" in note for note in finding.notes) == scaler


def test_float32_bfloat16_and_unmeasured_steps_are_silent() -> None:
    model = moved("stream", 16)
    ranges = isotype.measure_ranges(model, BATCH, progress=False)
    for autocast in (False, torch.bfloat16):
        report = check(
            model, BATCH, device="t4", autocast=autocast, ranges=ranges, wiring=False, verify=False
        )
        assert "IST809" not in {each.code for each in report.findings}


@pytest.mark.parametrize("quantization", ["nf4", pytest.param("int8", marks=pytest.mark.exhaustive)])
def test_quantized_layers(quantization: str, tmp_path: Path) -> None:
    """Their kernels were not measured as operators: the layers' magnitudes stand for them, and scaled ones are known."""
    llama(scale=2.0**14).save_pretrained(tmp_path)
    ranges = isotype.measure_ranges(tmp_path, BATCH, progress=False)
    policy = isotype.resolve_precision(
        tmp_path, "float16", quantization=quantization, device="t4", ranges=ranges
    )
    plain = replace(policy, wide_residual=False, exceptions=())
    found = []
    for chosen in (plain, policy):
        model = isotype.add_lora(isotype.load(tmp_path, chosen, device_map=None), chosen)
        found.append(foretold(model, BATCH, autocast=True, ranges=ranges, scaler=True)[1])
    assert found[0] is not None
    assert base_name(found[0].module) == "model.layers.0.self_attn.o_proj"
    assert found[0].fixes[0].verified
    assert found[1] is None


def test_a_weight_of_a_norm_over_frozen_embeddings_has_its_own_gradient() -> None:
    """Its norm's backward has fewer operators than the measurement's: those of its other line are not its own."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).to(FP16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("input_layernorm.weight"))
    loss = model(**BATCH).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert [finding for finding in check(model, BATCH).findings if finding.code == "IST809"] == []


class Squashed(nn.Module):
    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4, bias=False), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer(x)).mean()


# A row of zeros, and scores of 1000: the loss or its gradients are not finite in any dtype.
UNDEFINED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "a distance": (lambda h: h.pow(2).sum(-1).sqrt(), "gradients"),
    "cosine": (lambda h: h / h.norm(dim=-1, keepdim=True), "loss and gradients"),
    "NVIDIA/apex #379": (lambda h: -torch.log((h * 1000).softmax(-1)), "loss and gradients"),
    "log": (lambda h: torch.where(h > 0, h.log(), torch.zeros_like(h)), "gradients"),
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_a_step_that_is_not_finite_in_float32_either(name: str) -> None:
    act, what = UNDEFINED[name]
    model, x = Squashed(act), torch.cat([torch.ones(1, 4), torch.zeros(1, 4)])
    loss = model(x)
    loss.backward()
    assert not model.layer.weight.grad.isfinite().all()
    report = check(model, {"x": x}, device="t4", autocast="float16", wiring=False)
    (finding,) = report.findings  # and nothing about gradients that become zero
    assert (finding.code, finding.severity) == ("IST809", "error")
    assert finding.message.startswith(f"the {what} of this batch are not finite, even in float32: ")
    assert "test_ist809.py:" in finding.cause


@pytest.mark.parametrize(
    "act", [lambda h: h.pow(2).sum(-1).add(1e-4).sqrt(), lambda h: -(h * 1000).log_softmax(-1)]
)
def test_guarded_steps_are_silent(act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.cat([torch.ones(1, 4), torch.zeros(1, 4)])
    assert check(Squashed(act), {"x": x}, device="t4", autocast="float16", wiring=False).findings == ()


class Masked(nn.Module):
    """Attention whose mask is a product with -1e9, or is filled with -9e15."""

    def __init__(self, mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.query, self.mask = nn.Linear(8, 8), mask

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        query = self.query(x)
        return self.mask(query @ query.transpose(1, 2), kept[:, None]).softmax(-1).mean()


@pytest.mark.parametrize(
    ("mask", "findings"),
    [
        (lambda scores, kept: scores + (1 - kept.to(scores.dtype)) * -1e9, [("IST809", "warning")]),
        (lambda scores, kept: scores.masked_fill(kept == 0, -9e15), [("IST802", "error")]),
        (lambda scores, kept: scores + (1 - kept.to(scores.dtype)) * -1e4, []),
    ],
)
def test_numbers_in_the_code_are_no_values_of_the_model(mask: Any, findings: list[tuple[str, str]]) -> None:
    inputs = {"x": torch.randn(2, 3, 8), "kept": torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])}
    report = check(Masked(mask), inputs, device="t4", autocast="float16", wiring=False)
    assert [(finding.code, finding.severity) for finding in report.findings] == findings
    if findings == [("IST809", "warning")]:
        real = Masked(mask).half()(inputs["x"].half(), inputs["kept"])
        assert real.isfinite()  # as long as no row is masked completely
