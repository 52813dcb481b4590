"""A policy with a float32 residual stream and exceptions, on models whose values were moved on purpose."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

import isotype
from isotype.checkpoint.facts import facts_of
from isotype.model.boundary import Boundary, boundary_of, original_class
from isotype.model.enforce import enforce_model
from isotype.precision.decide import PrecisionRequest, decide
from isotype.precision.devices.profile import device_profile
from isotype.precision.policy import ModuleException, PrecisionPolicy, is_pinned
from tests.pairwise import few, pairwise
from tests.zoo import ARCHITECTURES

FP16 = torch.float16
WIDE = PrecisionPolicy(FP16, "float16", loss_scaling=True, wide_residual=True)


def llama(scale: float = 1.0, product: float = 1.0) -> Any:
    """A tiny Llama whose residual stream is multiplied by `scale` and whose gated products by `product`; its function
    does not change in exact arithmetic (up to the norms' epsilon)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20)
        model.model.embed_tokens.weight.mul_(scale)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.up_proj.weight.mul_(product)
            layer.mlp.down_proj.weight.mul_(scale / product)
    return model.requires_grad_(False)


def loss_of(model: Any, autocast: bool = True) -> torch.Tensor:
    ids = torch.arange(24).reshape(2, 12)
    with torch.autocast("cpu", FP16, enabled=autocast):
        return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def enforced(model: Any, device: str) -> Any:
    """A copy of the model under the float16 policy that its measured ranges ask for."""
    ids = torch.arange(24).reshape(2, 12)
    ranges = isotype.measure_ranges(model, {"input_ids": ids, "labels": ids}, progress=False)
    policy = isotype.resolve_precision(model, "float16", device=device, ranges=ranges)
    low = copy.deepcopy(model)
    enforce_model(low, policy)
    return low


@pairwise(
    "device, autocast, values",
    ["t4", "cpu-avx2"],
    [pytest.param(True, id="autocast"), pytest.param(False, id="plain")],
    [
        pytest.param({"scale": 2.0**14}, id="stream"),
        pytest.param({"product": 2.0**14}, id="product"),
        pytest.param({"scale": 2.0**13, "product": 2.0**-10}, id="both"),
    ],
)
def test_measured_ranges_keep_the_loss(values: dict[str, float], autocast: bool, device: str) -> None:
    model = llama(**values)
    reference = loss_of(model, autocast=False)
    assert not torch.isfinite(loss_of(copy.deepcopy(model).half(), autocast=False))
    low = enforced(model, device)
    # float16 rounds to 11 bits: 5e-4 an operation.
    torch.testing.assert_close(loss_of(low, autocast).float(), reference, rtol=5e-3, atol=0)


def test_headroom_needs_nothing() -> None:
    low = enforced(llama(), "t4")
    assert not any(isinstance(module, Boundary) for module in low.modules())
    assert {parameter.dtype for parameter in low.parameters()} == {FP16}


def test_a_scaled_layer_is_exact_but_for_rounding() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(7, 5)
    x = torch.randn(3, 7) * 2.0**20
    x.requires_grad_()
    reference = layer(x)
    low = copy.deepcopy(layer)
    enforce_model(low, replace(WIDE, exceptions=(ModuleException("", "scale", 20),)))
    scaled = low(x)
    assert scaled.dtype == torch.float32
    torch.testing.assert_close(scaled, reference, rtol=4e-3, atol=2.0**20 * 4e-3)
    (expected,) = torch.autograd.grad(reference.sum(), x)
    (got,) = torch.autograd.grad(scaled.sum() / 2.0**10, x)
    torch.testing.assert_close(got * 2.0**10, expected, rtol=4e-3, atol=1e-3)


@pairwise(
    "quantization, dora",
    [None, "nf4", "fp4", "int8"],
    [pytest.param(False, id="lora"), pytest.param(True, id="dora")],
    strength=1,
)
def test_adapters_of_every_storage(tmp_path: Any, quantization: str | None, dora: bool) -> None:
    model = llama(scale=2.0**12, product=2.0**6)
    model.save_pretrained(tmp_path / "base")
    exceptions = tuple(
        ModuleException(f"model.layers.{i}.{part}", how, exponent)
        for i in (0, 1)
        for part, how, exponent in (
            ("mlp", "float32", 0),
            ("mlp.down_proj", "scale", 8),
            ("self_attn.o_proj", "scale", 6),
        )
    )
    decided = isotype.resolve_precision(
        tmp_path / "base", dtype="float16", quantization=quantization, device="cpu"
    )
    assert decided.wide_residual
    policy = replace(decided, exceptions=exceptions)
    losses = []
    for each in (policy, isotype.resolve_precision(tmp_path / "base", "float32", quantization, "cpu")):
        torch.manual_seed(0)
        loaded = isotype.add_lora(
            isotype.load(tmp_path / "base", each), each, r=4, use_dora=dora, target_modules="all-linear"
        )
        loss = loss_of(loaded, each.autocast is not None)
        loss.backward()
        assert all(p.grad is None or torch.isfinite(p.grad).all() for p in loaded.parameters())
        losses.append(loss.detach().float())
        loaded.eval()
        generated = loaded.generate(input_ids=torch.arange(4)[None], max_new_tokens=2, do_sample=False)
        assert generated.shape == (1, 6)
    torch.testing.assert_close(losses[0], losses[1], rtol=5e-3, atol=0)


def test_another_policy_takes_the_boundaries_away() -> None:
    wide = enforced(llama(scale=2.0**14), "t4")
    assert isinstance(wide, Boundary)
    assert original_class(wide) is LlamaForCausalLM
    assert type(type(wide)(wide.config)) is LlamaForCausalLM
    assert "input_ids" in inspect.signature(wide.forward).parameters
    assert enforce_model(wide, wide.precision_policy) == ()
    enforce_model(wide, PrecisionPolicy(torch.bfloat16, "bfloat16"))
    assert not any(isinstance(module, Boundary) for module in wide.modules())


_WITH_IMAGES = [name for name, model in ARCHITECTURES.items() if model.family == "vision-language"]


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("smolvlm-vl", "lora"),
        ("smolvlm-vl", "full"),
        *(pytest.param(n, "lora", marks=pytest.mark.exhaustive) for n in _WITH_IMAGES if n != "smolvlm-vl"),
    ],
)
def test_image_features_have_the_dtype_of_the_embeddings(name: str, trained: str, wide: bool) -> None:
    """SmolVLM casts them to `self.dtype`, not to the embeddings' dtype."""
    trains_and_evaluates(name, trained, replace(WIDE, wide_residual=wide))


def trains_and_evaluates(name: str, trained: str, policy: PrecisionPolicy, **settings: Any) -> None:
    model: Any = ARCHITECTURES[name].build(torch.float32)
    batch = ARCHITECTURES[name].batch()
    reference = model.eval()(**batch).loss.detach()
    model = isotype.add_lora(model, policy, r=2, **settings) if trained == "lora" else model
    enforce_model(model, policy)
    for autocast in (True, False):
        with torch.autocast("cpu", FP16, enabled=autocast):
            loss = model.train()(**batch).loss
        loss.backward()
        with torch.no_grad(), torch.autocast("cpu", FP16, enabled=autocast):
            torch.testing.assert_close(model.eval()(**batch).loss.float(), reference, rtol=5e-3, atol=0)


_MAMBA = ["bamba", "falcon_h1", "falcon_mamba", "jamba", "mamba2", "nemotron_h", "zamba", "zamba2"]


@pytest.mark.parametrize(
    "name", ["mamba", "jetmoe", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in _MAMBA)]
)
@pytest.mark.filterwarnings("ignore:adapters are on")
def test_trained_biases_that_models_read_themselves(name: str) -> None:
    """Mamba reads the bias and the frozen weight of its convolution; JetMoE's attention experts have no forward."""
    trains_and_evaluates(name, "lora", replace(WIDE, wide_residual=False), bias="all")


_MIXER = re.compile("(mixer|mamba|mlp|experts)$")


@pytest.mark.parametrize(
    "name", ["mamba", "jetmoe", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in _MAMBA)]
)
@pytest.mark.filterwarnings("ignore:adapters are on")
def test_weights_that_a_float32_module_reads_are_float32(name: str) -> None:
    """Mamba reads the weight of its layer `dt_proj`. JetMoE's expert layers are modules with a weight."""
    modules = (n for n, _ in ARCHITECTURES[name].build(torch.float32).named_modules() if _MIXER.search(n))
    exceptions = tuple(ModuleException(module, "float32") for module in modules)
    trains_and_evaluates(name, "lora", replace(WIDE, exceptions=exceptions))


def test_shared_experts_take_float32_scores() -> None:
    trains_and_evaluates("inkling_text", "lora", replace(WIDE, wide_residual=False, routers=True))


@pytest.mark.parametrize("name", ["axk2", "roberta-prelayernorm"])
def test_modules_with_layers_inside_are_no_norms(name: str) -> None:
    """The names of their classes contain "norm"."""
    trains_and_evaluates(name, "lora", WIDE)


@pytest.mark.parametrize("exceptions", [(), (ModuleException("0", "scale", 3),)], ids=["plain", "scaled"])
def test_int8_layers_without_rows(exceptions: tuple[ModuleException, ...]) -> None:
    """An expert may get no tokens."""
    layer = bitsandbytes.nn.Linear8bitLt(8, 4, has_fp16_weights=False)
    layer.load_state_dict(nn.Linear(8, 4).state_dict())
    model = nn.Sequential(layer.to("cpu"))
    enforce_model(model, replace(WIDE, storage="int8", exceptions=exceptions))
    for rows in ((0,), (2, 0), (3,)):
        x = torch.ones(*rows, 8, requires_grad=True)
        model(x).sum().backward()
        assert model(x).shape == (*rows, 4)
        assert x.grad is not None


# -------------------------------------------------------------------- modules of users' own code, without transformers


class Rms(nn.Module):
    """A norm whose class is not named so. It rounds to the input's dtype before it multiplies by the weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.gain * (x.float() * scale).to(x.dtype)


class Shift(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(size)), nn.Parameter(torch.rand(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


class Choice(nn.Module):
    """A router that multiplies by its weight in the input's dtype."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table, self.bias = nn.Parameter(torch.rand(size, size)), nn.Parameter(torch.rand(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.table, self.bias)


class Exact(Choice):
    """A router whose author casts the input: its scores stay float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


class Temperature(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP16])
@pytest.mark.parametrize("cls", [Rms, Shift, Choice, Exact, Temperature])
def test_pinned_modules_of_any_class_return_the_compute_dtype(cls: Any, dtype: torch.dtype) -> None:
    """NVIDIA-NeMo/Automodel #1632: the pin of a custom model's norms passed float32 to bfloat16 projections."""
    torch.manual_seed(0)
    for size in (3, 40):
        inner, x = cls(size), torch.randn(5, size).to(dtype)
        model = nn.Sequential(inner, nn.Linear(size, 2)).to(dtype).requires_grad_(False)
        expected = copy.deepcopy(inner).float()(x.float())
        policy = PrecisionPolicy(
            dtype, str(dtype).removeprefix("torch."), pinned=("0",), loss_scaling=dtype == FP16
        )
        enforce_model(model, policy)
        assert {p.dtype for p in inner.parameters()} == {torch.float32}
        out = inner(x)
        assert out.dtype == (torch.float32 if cls is Exact else dtype)
        torch.testing.assert_close(out.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-2)
        assert enforce_model(model, policy) == ()


class Centered(nn.Module):
    """A module whose forward changes its buffers and a list, and draws random numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))
        self.register_buffer("mean", torch.ones(size))
        self.shapes: list[torch.Size] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shapes.append(x.shape)
        self.mean.mul_(0.9).add_(x.float().mean(0), alpha=0.1)
        return nn.functional.dropout(x * self.gain, 0.5)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("make", [Centered, partial(nn.BatchNorm1d, momentum=None)])
def test_the_choice_of_boundaries_changes_no_state(make: Callable[[int], nn.Module], device: str) -> None:
    model = nn.Sequential(make(4), nn.Linear(4, 2)).to(torch.bfloat16).to(device)
    inner: Any = model[0]
    before, state = copy.deepcopy(dict(inner.named_buffers())), torch.get_rng_state()
    pinned = ("0",) if isinstance(inner, Centered) else ()
    enforce_model(model.requires_grad_(False), PrecisionPolicy(torch.bfloat16, "bfloat16", pinned=pinned))
    assert (boundary_of(inner) is not None) == isinstance(inner, Centered)
    assert torch.equal(torch.get_rng_state(), state)
    assert getattr(inner, "shapes", []) == []
    for name, buffer in inner.named_buffers():
        assert buffer.is_meta or torch.equal(buffer, before[name])


# ---------------------------------------------------------------- what the policy says of the outputs of pinned modules


class Scan(nn.Module):
    """A block with a pinned parameter beside layers, as Mamba's. Its author casts nothing."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.A_log, self.inner = nn.Parameter(torch.rand(size)), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -torch.exp(self.A_log) * self.inner(x)


class Beside(nn.Module):
    """A module with a pinned parameter beside a matrix."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.A_log, self.table = nn.Parameter(torch.rand(size)), nn.Parameter(torch.rand(size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.table) * self.A_log


class Counted(Shift):
    """A pinned module with a buffer, which is on the meta device in a model without weights."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("offset", torch.ones(size), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.offset)


class CustomConfig(PretrainedConfig):
    model_type = "custom-pins"


class Custom(PreTrainedModel):
    """A stack of modules of one class, under a head; `Shift.scale`, for example, is pinned by `pins`."""

    config_class = CustomConfig

    def __init__(self, cls: Any, size: int, *pins: str) -> None:
        super().__init__(CustomConfig(dtype=torch.bfloat16))
        self._keep_in_fp32_modules = list(pins)
        self.layers = nn.ModuleList(cls(size) for _ in range(2))
        self.head = nn.Linear(size, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


UNCAST = "no cast for the outputs of modules with {}, because their own code decides"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("cls", "pins", "uncast"),
    [
        *((cls, ("layers",), ()) for cls in (Rms, Shift, Choice, Temperature, Counted)),
        (Exact, ("layers",), ("layers",)),
        (Scan, ("A_log", "head"), ("A_log",)),
        *((cls, ("A_log",), ("A_log",)) for cls in (Scan, Beside)),
        (Shift, ("scale",), ("scale",)),
    ],
)
def test_policy_names_the_pins_whose_modules_get_no_cast(
    cls: Any, pins: tuple[str, ...], uncast: tuple[str, ...], device: str
) -> None:
    for size in (4, 11) if device == "cpu" else (5, 12):  # answers are cached by size
        torch.manual_seed(size)
        model = Custom(cls, size, *pins).to(torch.bfloat16).requires_grad_(False)
        policy = isotype.resolve_precision(copy.deepcopy(model).to(device), dtype="bf16", device="a100")
        ends = "their outputs are cast to bfloat16"
        if uncast:
            own = UNCAST.format(", ".join(uncast))
            ends = own if uncast == pins else f"{ends}, except for {own.partition(' outputs of ')[2]}"
        assert policy.reasons["pinned"].endswith(f"float32 for {', '.join(pins)}; {ends}")
        enforce_model(model, policy)
        out = model.layers[0](torch.randn(5, size).to(torch.bfloat16))
        assert out.dtype == (torch.float32 if uncast else torch.bfloat16)


@pytest.mark.parametrize("cls", [Scan, Beside])
def test_check_names_the_pin_that_no_cast_follows(cls: Any) -> None:
    for size in (4, 11):
        model = Custom(cls, size, "A_log").to(torch.bfloat16).requires_grad_(False)
        policy = isotype.resolve_precision(model, dtype="bf16", device="a100")
        enforce_model(model, policy)
        model.head.weight.requires_grad_(True)
        x = torch.randn(5, size).to(torch.bfloat16)
        with pytest.raises(RuntimeError, match="same dtype"):
            model(x)
        report = isotype.check(model, {"x": x}, policy, autocast=False, phases=["forward"], wiring=False)
        (error,) = report.errors
        assert error.code == "IST101"
        assert error.cause == "layers.0.A_log is float32, which the model's author keeps in float32"


def _with_pins() -> list[str]:
    """The architectures with pins that match a parameter or buffer. Only the classes are read, not the models."""
    names = []
    for name, architecture in ARCHITECTURES.items():
        cls: Any = getattr(transformers, architecture.build.args[0])  # type: ignore[attr-defined]
        if cls._keep_in_fp32_modules or cls._keep_in_fp32_modules_strict:
            names.append(name)
    return names


@few("name", _with_pins(), "deepseek_v3", "nemotron_h", "rwkv", "hy_v4", "blip-2-vl", "t5-s2s")
def test_what_policies_say_of_outputs_is_true_for_transformers_models(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build(torch.bfloat16).requires_grad_(False)
    facts = facts_of(model)
    policy = decide(facts, device_profile("a100"), PrecisionRequest(dtype="bfloat16"))
    enforce_model(model, policy)
    cast = [pattern for pattern in policy.pinned if pattern not in facts.uncast]
    wrong = []

    def note(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and first.dtype == torch.float32:
            wrong.append(name)

    for path, module in model.named_modules():
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if any(is_pinned(f"{path}.{key}", cast) for key, _ in tensors):
            module.register_forward_hook(lambda _, __, output, path=path: note(path, output))
    with torch.no_grad():
        model(**architecture.batch(dtype=torch.bfloat16))
    assert not wrong
