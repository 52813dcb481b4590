"""4-bit and 8-bit layers whose state is stale or lost, or whose packed bytes something takes for weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.corpus.cases.crashes_parts import (
    BF16,
    FP16,
    HIDDEN,
    MLP,
    Attention,
    Block,
    Decoder,
    heads,
    ids,
    linear_4bit,
    linear_8bit,
    lora,
    matmul_error,
    nf4,
    normal,
    replace_linears,
    set_layers,
)
from tests.corpus.cases.training_parts import loaded
from tests.corpus.scenario import Broken, Scenario
from tests.models import VOCABULARY, tiny_batch

# ------------------------------------------------------------------------------------------------- stale and lost states


class FastLoraFunction(torch.autograd.Function):
    """A fused LoRA whose backward dequantizes the base weight into the dtype that its state names."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, packed: Any, state: Any, a: Any, b: Any) -> torch.Tensor:
        import bitsandbytes

        ctx.save_for_backward(hidden, packed, a, b)
        ctx.state = state
        base = bitsandbytes.functional.dequantize_4bit(packed, state).to(hidden.dtype)
        return hidden @ base.t() + hidden @ a.t() @ b.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        import bitsandbytes

        hidden, packed, a, b = ctx.saved_tensors
        flat, rows = grad.flatten(0, -2), hidden.flatten(0, -2)
        grad_a = (flat @ b).t() @ rows
        grad_b = flat.t() @ (rows @ a.t())
        base = bitsandbytes.functional.dequantize_4bit(packed, ctx.state)
        return grad @ base + grad @ b @ a, None, None, grad_a, grad_b


class FastLora(nn.Module):
    """A layer that computes through `FastLoraFunction`."""

    def __init__(self, base: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Parameter(normal(4, base.in_features, dtype=dtype) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, 4, dtype=dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        packed = self.base_layer.weight
        result: torch.Tensor = FastLoraFunction.apply(
            hidden, packed, packed.quant_state, self.lora_A, self.lora_B
        )
        return result


class MatmulLora(FastLora):
    """A fast inference path: it multiplies with whatever dtype the dequantized weight comes out in."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        import bitsandbytes

        packed = self.base_layer.weight
        base = bitsandbytes.functional.dequantize_4bit(packed, packed.quant_state)
        return hidden @ base.t() + hidden @ self.lora_A.t() @ self.lora_B.t()


def _fused(dtype: torch.dtype, state: torch.dtype, layer: type[FastLora]) -> Broken:
    torch.manual_seed(0)
    model: Any = nf4(Decoder([Block(Attention(), MLP()) for _ in range(2)]).to(dtype), dtype, state)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    set_layers(model, names, lambda base: layer(base, dtype))
    return Broken(model, lambda module: module(ids()))


def bf16_model_loaded_in_fp16() -> Broken:
    """A bfloat16 checkpoint in 4 bit, loaded with dtype float16: states keep bfloat16, activations are float16."""
    return _fused(FP16, BF16, FastLora)


def fp16_checkpoint_in_bf16() -> Broken:
    """A 4-bit checkpoint saved from float16, trained in bfloat16: states keep float16."""
    return _fused(BF16, FP16, MatmulLora)


def unsharded_by_fsdp2() -> Broken:
    """FSDP2's unshard leaves plain parameters: neither weight nor layer knows its quantization state any more."""
    model: Any = lora(nf4(loaded("llama", BF16), BF16))
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.weight = nn.Parameter(module.weight.data.view(torch.uint8), requires_grad=False)
            module.quant_state = None
    return Broken(model, tiny_batch("llama"), BF16)


def unsharded_with_states() -> Broken:
    """The same where the layer keeps its state beside the weight, as bitsandbytes has it since."""
    return Broken(lora(nf4(loaded("llama", BF16), BF16)), tiny_batch("llama"), BF16)


class Llava(nn.Module):
    """A projector of image features in front of a decoder's embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.mm_projector = nn.Linear(32, HIDDEN)
        self.decoder = Decoder([Block(Attention(), MLP())])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.mm_projector(features)
        for layer in self.decoder.layers:
            hidden = layer(hidden)
        return self.decoder.lm_head(self.decoder.norm(hidden)).float().square().mean()


def llava_additional_weights(overwrite: bool = True) -> Broken:
    """LLaVA in 4 bit: the projector's weight is replaced by the "additional weights", which are not packed."""
    torch.manual_seed(0)
    model: Any = replace_linears(Llava().to(FP16), lambda layer: linear_4bit(layer, FP16))
    if overwrite:
        model.mm_projector.weight = nn.Parameter(normal(HIDDEN, 32, dtype=FP16), requires_grad=False)
        model.mm_projector.quant_state = None
    model.decoder.lm_head.requires_grad_(True)
    return Broken(model, {"features": normal(2, 8, 32, dtype=FP16)}, phases=("forward",))


# --------------------------------------------------------------------------------------- packed bytes taken for weights


class RawInt8Lora(nn.Module):
    """Training goes through the layer; fast inference multiplies with the weight itself, which is int8."""

    def __init__(self, base: Any, raw: bool) -> None:
        super().__init__()
        self.base_layer, self.raw = base, raw
        self.lora_A, self.lora_B = (
            nn.Linear(HIDDEN, 4, False, dtype=FP16),
            nn.Linear(4, HIDDEN, False, dtype=FP16),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or not self.raw:
            base = self.base_layer(hidden)
        else:
            base = torch.matmul(hidden, self.base_layer.weight.t())
        return base + self.lora_B(self.lora_A(hidden))


def int8_fast_inference(raw: bool = True) -> Broken:
    """Llama 3.2 in 8 bit: training runs, inference meets the raw int8 weight."""
    torch.manual_seed(0)
    model = Decoder([Block(Attention(), MLP())]).to(FP16)
    for attention in (layer.self_attn for layer in model.layers):
        attention.q_proj = RawInt8Lora(linear_8bit(attention.q_proj), raw)  # type: ignore[union-attr]
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return Broken(model, lambda module: module(ids()), generate=lambda module: module(ids()))


def trainer_moves_4bit(keep: bool = False) -> Broken:
    """A 4-bit model that was moved like a dense one: its layers run on the packed weight as plain linear layers."""
    torch.manual_seed(0)
    model: Any = nf4(Decoder([Block(Attention(), MLP())]).to(BF16), BF16)
    if not keep:
        for layer in model.layers:
            packed = layer.mlp.down_proj
            plain = nn.Linear(packed.in_features, packed.out_features, False, dtype=BF16)
            plain.weight = packed.weight
            layer.mlp.down_proj = plain
    model.lm_head.requires_grad_(True)
    return Broken(model, lambda module: module(ids()))


def olora_on_4bit(keep: bool = False) -> Broken:
    """OLoRA's initialisation as it was: the dense residual is assigned to the packed weight of a 4-bit layer."""
    import bitsandbytes

    model: Any = nf4(loaded("llama", BF16), BF16)
    if not keep:
        for layer in model.model.layers:
            weight = layer.self_attn.q_proj.weight
            dense = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
            weight.data = torch.zeros_like(dense)
    return Broken(lora(model, ["q_proj", "v_proj"]), tiny_batch("llama"))


def residual_is_zero(broken: Broken) -> str | None:
    """4-bit layers whose packed weight is not packed, and what they multiply with."""
    layers = [module for module in broken.model.modules() if type(module).__name__ == "Linear4bit"]
    unpacked = [layer for layer in layers if layer.weight.dtype != layer.weight.quant_storage]
    return f"{len(unpacked)} layers hold a dense tensor where packed codes belong" if unpacked else None


class GptqLinear(nn.Module):
    """A GPTQ layer: codes packed eight to an int32, scales in float16."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.randint(0, 2**31 - 1, (size // 8, size), dtype=torch.int32))
        self.register_buffer("scales", torch.full((size,), 0.002, dtype=FP16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        codes = (self.qweight[:, None, :] >> shifts[None, :, None]) & 15
        weight = (codes.reshape(-1, self.qweight.shape[1]) - 8).to(hidden.dtype) * self.scales
        return hidden @ weight


class QwenInt4(nn.Module):
    """Qwen-VL-Chat-Int4 with a trained embedding, which is cast to the dtype of the first layer's weight."""

    def __init__(self, cast_to_packed: bool) -> None:
        super().__init__()
        self.wte, self.layer = nn.Embedding(VOCABULARY, HIDDEN, dtype=FP16), GptqLinear(HIDDEN)
        self.cast_to_packed = cast_to_packed

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        weight = self.layer.qweight if self.cast_to_packed else self.layer.scales
        hidden = self.wte.to(weight.dtype)(input_ids)
        return self.layer(hidden).float().square().mean()


def gptq_modules_to_save(cast_to_packed: bool = True) -> Broken:
    """LoRA on GPTQ with `modules_to_save`: a module is cast to the dtype of an int32-packed weight."""
    torch.manual_seed(0)
    return Broken(QwenInt4(cast_to_packed), lambda module: module(ids()), phases=("forward",))


class SlicedAttention(nn.Module):
    """Attention for `pretraining_tp > 1`: slices of the weights themselves go to `F.linear`."""

    def __init__(self, slices: int = 2) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(HIDDEN, HIDDEN, False) for _ in range(4)
        )
        self.slices = slices

    def project(self, hidden: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        """The layer's product, slice by slice."""
        if self.slices == 1:
            return layer(hidden)
        parts = layer.weight.split(layer.weight.shape[0] // self.slices, 0)
        return torch.cat([F.linear(hidden, part) for part in parts], -1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads(self.project(hidden, layer)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def llama2_tensor_parallel(slices: int = 2) -> Broken:
    """Llama 2 13B in 4 bit with `pretraining_tp=2`."""
    torch.manual_seed(0)
    model: Any = nf4(Decoder([Block(SlicedAttention(slices), MLP())]).to(FP16), FP16)
    model.lm_head.requires_grad_(True)
    return Broken(model, lambda module: module(ids()))


SHAPES = r"mat1 and mat2 shapes cannot be multiplied"

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "axolotl-2992",
        unsharded_by_fsdp2,
        ("IST402",),
        r"q_proj|base_layer",
        crashes=r"quant_state is required",
        advice=unsharded_with_states,
        notes="What the unshard leaves behind is set by hand: FSDP2 over 4-bit weights needs two ranks.",
    ),
    Scenario(
        "llava-1028",
        llava_additional_weights,
        ("IST402", "IST403"),
        r"mm_projector",
        crashes=r"^$",
        advice=lambda: llava_additional_weights(False),
        notes="bitsandbytes 0.50 says nothing but `assert`; the report's AttributeError is of an older version.",
    ),
    Scenario(
        "unsloth-4005-bug1",
        bf16_model_loaded_in_fp16,
        ("IST401",),
        r"[qkvo]_proj",
        crashes=matmul_error(FP16, BF16),
        phase="backward",
    ),
    Scenario(
        "unsloth-4918",
        fp16_checkpoint_in_bf16,
        ("IST401",),
        r"[qkvo]_proj",
        crashes=matmul_error(BF16, FP16),
    ),
    Scenario(
        "unsloth-2212",
        int8_fast_inference,
        ("IST403",),
        r"q_proj",
        crashes=r"got: c10::Half != signed char",
        phase="generate",
        advice=lambda: int8_fast_inference(False),
        notes="The report names no cause beyond a version: `signed char` shows the raw weight.",
    ),
    Scenario(
        "bnb-433",
        trainer_moves_4bit,
        ("IST403",),
        r"down_proj",
        crashes=SHAPES,
        advice=lambda: trainer_moves_4bit(True),
        notes="What the move left behind is set by hand: a plain layer around a packed weight.",
    ),
    Scenario(
        "peft-1999",
        olora_on_4bit,
        ("IST403",),
        r"q_proj",
        cost=residual_is_zero,
        advice=lambda: olora_on_4bit(True),
        notes="Today's PEFT assigns through the layer and refuses PiSSA; the old assignment is written out.",
    ),
    Scenario(
        "peft-929",
        gptq_modules_to_save,
        ("IST403",),
        r"int32|wte|layer",
        crashes=r"nn\.Module\.to only accepts floating point or complex dtypes, but got desired dtype=torch\.int32",
        advice=lambda: gptq_modules_to_save(False),
        notes="The GPTQ layer is written out in eight lines; its packing is GPTQ's.",
    ),
    Scenario(
        "bnb-610",
        llama2_tensor_parallel,
        ("IST403",),
        r"q_proj",
        crashes=SHAPES,
        advice=lambda: llama2_tensor_parallel(1),
    ),
)

LEFT_OUT: dict[str, str] = {}
