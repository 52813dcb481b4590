"""Models in memory of every kind: what is measured, and that nothing of them changes."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import isotype
from isotype.checkpoint.values import dequantize
from isotype.core import console
from isotype.core.errors import UsageError
from isotype.model.boundary import Boundary, BoundarySettings, set_boundary
from isotype.ranges import measure as ranges_measure
from isotype.ranges.weights import Magnitude
from tests.models import quiet, save_tiny, tiny_batch, tiny_model
from tests.pairwise import few, pairwise
from tests.ranges.test_measure import agrees, reference

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def adapted(name: str, dtype: torch.dtype, **options: Any) -> Any:
    """A tiny model with adapters whose second matrix is not zero."""
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(tiny_model(name, dtype), config, autocast_adapter_dtype=False)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.02)
    return model


def state(model: nn.Module) -> dict[str, Any]:
    """Whatever a measurement may not change."""
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": {name: each.grad for name, each in model.named_parameters()},
        "trained": [each.requires_grad for each in model.parameters()],
        "modes": [each.training for each in model.modules()],
        "classes": [type(each) for each in model.modules()],
        "hooks": [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()],
        "held": [sorted(vars(each)) for each in model.modules()],
        "random": torch.get_rng_state(),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pairwise("dtype, dora", [F32, BF16, F16], [False, True], strength=1)
def test_adapters_agree_with_a_plain_run(dtype: torch.dtype, dora: bool) -> None:
    model, batch = adapted("llama", dtype, use_dora=dora), tiny_batch("llama")
    model.train()
    before = state(model)
    ranges = isotype.measure_ranges(model, batch)
    assert same(state(model), before)
    agrees(ranges, reference(model, batch))
    trained = {name for name, each in ranges.by_module.items() if each.weight_gradient}
    assert trained >= {f"model.layers.0.mlp.up_proj.lora_{part}" for part in "AB"}
    assert "model.layers.0.mlp.up_proj" not in trained


def test_gradients_of_weights_agree_with_a_plain_run() -> None:
    model, batch = tiny_model("llama-tied-bias", BF16), tiny_batch("llama")
    ranges = isotype.measure_ranges(model, batch)
    plain = copy.deepcopy(model).double()
    plain(**batch, use_cache=False).loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, module in plain.named_modules():
        own = dict(module.named_parameters(recurse=False)).values()
        if name == "lm_head" or not own:
            continue  # its weight is the embedding's
        found = ranges.by_module[name]
        assert found.weight == pytest.approx(max(float(each.detach().abs().max()) for each in own))
        assert found.weight_gradient == pytest.approx(
            max(float(each.grad.abs().max()) for each in own), rel=1e-4
        )


@few("quantization", ["nf4", "fp4", "int8"], "nf4", "int8")
def test_quantized_layers_are_measured_dequantized(quantization: str, tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path / "model", BF16)
    policy = replace(
        isotype.resolve_precision(path, "float16", quantization, device="t4"), wide_residual=False
    )
    with quiet():
        model = isotype.add_lora(isotype.load(path, policy, device_map={"": "cpu"}), policy, r=4)
    norm = model.get_submodule("base_model.model.model.norm").float()
    set_boundary(norm, BoundarySettings("float32", F16))
    batch = tiny_batch("llama")
    before = state(model)
    ranges = isotype.measure_ranges(model, batch)
    assert same(state(model), before)
    assert isinstance(norm, Boundary)
    plain = copy.deepcopy(model.unload())
    set_boundary(plain.model.norm, None)
    dequantize(plain, F32)
    seen = reference(plain, batch)
    assert ranges.by_module["model.layers.0.mlp.up_proj"].kind == "linear"
    # The second matrices of the adapters are zero: the base model computes what it computes alone.
    alone = [each for each in ranges.modules if ".lora_" not in each.name]
    agrees(replace(ranges, modules=tuple(alone)), seen, rel=1e-3)


class Custom(nn.Module):
    """No model of transformers: a loop over blocks, a weight that its parent uses, a state that a forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixing() for _ in range(2))
        self.head = nn.Linear(8, 8, bias=False)
        self.register_buffer("calls", torch.zeros(()))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        self.last = x
        return nn.functional.linear(x, self.head.weight.t())


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x.to(self.mlp[0].weight.dtype))


def test_a_module_of_ones_own() -> None:
    torch.manual_seed(0)
    model, x = Custom().half(), torch.randn(4, 8)
    before = state(model)
    ranges = isotype.measure_ranges(model, [{"x": x}, {"x": 3 * x}])
    assert same(state(model), before)
    assert model.last is None
    assert float(model.calls) == 0
    plain = copy.deepcopy(model).double()
    outputs = [plain(x.double()), plain(3 * x.double())]
    assert ranges.by_module[""].output == pytest.approx(
        max(float(each.detach().abs().max()) for each in outputs)
    )
    assert (ranges.batches, ranges.tokens, ranges.text) == (2, 8, "the 2 batches given")
    assert ranges.loss == pytest.approx([float(each.detach().mean()) for each in outputs])
    assert ranges.stream == ("layers.0", "layers.1")
    assert ranges.spread > 1.5
    assert ranges.notes == (
        "the model returns no loss, so the gradients belong to the mean of its first output",
    )
    plain.zero_grad()
    plain(x.double()).mean().backward()
    small = float(plain.layers[0].mlp[2].weight.grad.abs().max())
    assert ranges.by_module["layers.0.mlp.2"].weight_gradient >= small * 0.999


@pytest.mark.parametrize(
    "wrap", [partial(torch.compile, backend="eager"), nn.DataParallel], ids=["compile", "parallel"]
)
def test_wrappers_are_looked_through(wrap: Any) -> None:
    model, batch = tiny_model("llama"), tiny_batch("llama")
    wrapped = isotype.measure_ranges(wrap(model), batch)
    assert replace(wrapped, when="") == replace(isotype.measure_ranges(model, batch), when="")


def test_gradient_checkpointing_modes_and_hooks_of_the_user() -> None:
    model, batch = tiny_model("llama"), tiny_batch("llama")
    plain = isotype.measure_ranges(model, batch)
    model.gradient_checkpointing_enable()
    model.train()
    model.config.use_cache = True
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
    before = state(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        doubled = isotype.measure_ranges(model, batch)
    assert same(state(model), before)
    assert model.config.use_cache
    first, second = (each.by_module["model.layers.0"].output for each in (plain, doubled))
    assert second == 2 * first
    assert (
        doubled.by_module["model.layers.0.mlp.down_proj"] != plain.by_module["model.layers.0.mlp.down_proj"]
    )


def test_bfloat16_where_it_is_asked_for() -> None:
    model, batch = tiny_model("llama"), tiny_batch("llama")
    ranges = isotype.measure_ranges(model, batch, dtype=BF16)
    assert ranges.dtype == "bfloat16"
    fine = isotype.measure_ranges(model, batch)
    for each in ranges.modules:
        assert each.output == pytest.approx(fine.by_module[each.name].output, rel=0.05)


def test_little_memory_takes_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    block = sum(each.numel() for each in model.model.layers[0].parameters())
    monkeypatch.setattr(ranges_measure, "free_memory", lambda device: 5 * block)
    assert isotype.measure_ranges(model, tiny_batch("llama")).dtype == "bfloat16"
    monkeypatch.setattr(ranges_measure, "free_memory", lambda device: 7 * block)
    assert isotype.measure_ranges(model, tiny_batch("llama")).dtype == "float32"


def test_no_batch_can_be_made_up_for_a_module_of_ones_own() -> None:
    with pytest.raises(UsageError, match="pass batch=, the arguments of the model's forward"):
        isotype.measure_ranges(Custom())
    with pytest.raises(UsageError, match="a dict of the tensors"):
        isotype.measure_ranges(Custom(), torch.ones(2))


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(UsageError, match=r"embed_tokens\.weight on the meta device"):
        isotype.measure_ranges(tiny_model("llama").to("meta"))


def test_a_bar_comes_when_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    shown = console.Bar("measuring")
    shown.total = 3
    shown.advance()
    assert capfd.readouterr().err == ""
    now[0] = 4.0
    shown.advance()
    shown.close()
    text = capfd.readouterr().err
    assert "measuring" in text
    assert "2/3" in text


def test_what_was_written_to_under_inference_mode_is_measured_again() -> None:
    with torch.inference_mode():
        x = torch.ones(3)
        assert Magnitude.of(x).value == 1
        assert Magnitude.of(x.mul_(5)).value == 5
