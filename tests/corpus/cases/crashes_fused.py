"""Fused LoRA kernels that dequantize, cast and multiply by themselves, out of autocast's sight (unsloth's way)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.corpus.cases.crashes_parts import (
    BF16,
    FP16,
    FP32,
    MLP,
    Attention,
    Block,
    Decoder,
    heads,
    ids,
    linear_4bit,
    set_layers,
    upcast_norms,
)
from tests.corpus.scenario import Broken, Scenario

SCALE = 2.0
DEVICE = "cpu"
WEIGHT_BUFFERS: dict[str, torch.Tensor] = {}
"""Scratch for dequantized weights, one for each device, as long as the process lives."""


def dequantize(layer: Any) -> torch.Tensor:
    """The layer's weight, in the dtype that its quantization state names."""
    import bitsandbytes

    return bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def dequantize_into_buffer(layer: Any) -> torch.Tensor:
    """The same through the buffer, which grows when it is too short and never asks which dtype it has."""
    weight = dequantize(layer)
    buffer = WEIGHT_BUFFERS.get(DEVICE)
    if buffer is None:
        buffer = WEIGHT_BUFFERS[DEVICE] = torch.empty(weight.numel(), dtype=weight.dtype)
    if buffer.numel() < weight.numel():
        buffer = WEIGHT_BUFFERS[DEVICE] = buffer.new_empty(weight.numel())
    out = buffer[: weight.numel()].view(weight.shape)
    return out.copy_(weight)


class Adapted(nn.Module):
    """A frozen layer and its adapter; a fused function computes both."""

    def __init__(self, base: nn.Module, dtype: torch.dtype, magnitude: torch.dtype | None = None) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        rows, columns = base.out_features, base.in_features
        self.lora_A = nn.Linear(columns, 4, False, dtype=dtype)  # type: ignore[arg-type]
        self.lora_B = nn.Linear(4, rows, False, dtype=dtype)  # type: ignore[arg-type]
        self.magnitude = None if magnitude is None else nn.Parameter(torch.ones(rows, dtype=magnitude))  # type: ignore[arg-type]


# ------------------------------------------------------------------------ the backward that dequantizes (report #4005)


class FusedMLP(torch.autograd.Function):
    """SwiGLU with three adapters. Its backward multiplies in place, which autocast does not touch."""

    @staticmethod
    @torch.amp.custom_fwd(device_type=DEVICE)
    def forward(ctx: Any, x: torch.Tensor, layers: Any, *adapters: torch.Tensor) -> torch.Tensor:
        gate_a, gate_b, up_a, up_b, down_a, down_b = adapters
        gate = x @ dequantize(layers[0]).T + (x @ gate_a.T) @ gate_b.T * SCALE
        up = x @ dequantize(layers[1]).T + (x @ up_a.T) @ up_b.T * SCALE
        inner = F.silu(gate) * up
        ctx.layers = layers
        ctx.save_for_backward(x, gate, up, inner, *adapters)
        return inner @ dequantize(layers[2]).T + (inner @ down_a.T) @ down_b.T * SCALE

    @staticmethod
    @torch.amp.custom_bwd(device_type=DEVICE)
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, gate, up, inner, *adapters = ctx.saved_tensors
        dtype = x.dtype
        flat, grad, inner = x.flatten(0, 1), grad.flatten(0, 1), inner.flatten(0, 1)
        gate_a, gate_b, up_a, up_b, down_a, down_b = (adapter.to(dtype) for adapter in adapters)
        grad_inner = grad @ dequantize(ctx.layers[2])
        grad_inner.addmm_(grad @ down_b, down_a, alpha=SCALE)
        gate, up = gate.flatten(0, 1), up.flatten(0, 1)
        sigmoid = gate.sigmoid()
        grad_gate = grad_inner * up * sigmoid * (1 + gate * (1 - sigmoid))
        grad_up = grad_inner * gate * sigmoid
        grads = []
        for pieces in (
            (flat, grad_gate, gate_a, gate_b),
            (flat, grad_up, up_a, up_b),
            (inner, grad, down_a, down_b),
        ):
            grads += _adapter_grads(*pieces)
        # The weight comes back in its state's dtype; `out=` takes no other than the activations'.
        grad_x = torch.matmul(grad_up, dequantize(ctx.layers[1]), out=torch.empty_like(flat))
        grad_x.addmm_(grad_gate, dequantize(ctx.layers[0]))
        grad_x.addmm_(grad_up @ up_b, up_a, alpha=SCALE).addmm_(grad_gate @ gate_b, gate_a, alpha=SCALE)
        return (grad_x.view_as(x), None, *grads)


def _adapter_grads(
    x: torch.Tensor, grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return (grad @ b).T @ x * SCALE, grad.T @ (x @ a.T) * SCALE


class FusedProjections(torch.autograd.Function):
    """q, k and v in one; the same backward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type=DEVICE)
    def forward(ctx: Any, x: torch.Tensor, layers: Any, *adapters: torch.Tensor) -> Any:
        ctx.layers = layers
        ctx.save_for_backward(x, *adapters)
        pairs = zip(layers, adapters[::2], adapters[1::2], strict=True)
        return tuple(x @ dequantize(layer).T + (x @ a.T) @ b.T * SCALE for layer, a, b in pairs)

    @staticmethod
    @torch.amp.custom_bwd(device_type=DEVICE)
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, *adapters = ctx.saved_tensors
        flat, dtype = x.flatten(0, 1), x.dtype
        grad_x = torch.zeros_like(flat)
        given = []
        for layer, grad, a, b in zip(ctx.layers, grads, adapters[::2], adapters[1::2], strict=True):
            grad, a, b = grad.flatten(0, 1), a.to(dtype), b.to(dtype)
            given += _adapter_grads(flat, grad, a, b)
            grad_x.addmm_(grad, dequantize(layer))
            grad_x.addmm_(grad @ b, a, alpha=SCALE)
        return (grad_x.view_as(x), None, *given)


def _weights(*layers: Any) -> list[torch.Tensor]:
    return [weight for layer in layers for weight in (layer.lora_A.weight, layer.lora_B.weight)]


class FusedFeedForward(nn.Module):
    """The MLP of a decoder layer through `FusedMLP`."""

    def __init__(self, mlp: MLP, adapt: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = map(adapt, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        return FusedMLP.apply(hidden, [layer.base_layer for layer in layers], *_weights(*layers))


class FusedAttention(nn.Module):
    """The attention of a decoder layer through `FusedProjections`."""

    def __init__(self, attention: Attention, adapt: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = map(
            adapt, (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        self.o_proj = attention.o_proj

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        projected = FusedProjections.apply(hidden, [layer.base_layer for layer in layers], *_weights(*layers))
        mixed = F.scaled_dot_product_attention(*map(heads, projected), is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def unsloth_fp16(
    fused: str = "mlp", adapters: torch.dtype = FP32, device: str = "cpu", layers: int = 2
) -> Broken:
    """A bfloat16 checkpoint's nf4 weights, trained in float16: `quant_state.dtype` is still bfloat16.

    Args:
        fused: `mlp` or `attention`: which half of the layers is fused.
        adapters: dtype of the adapters; TRL casts them to bfloat16.
        device: profile to judge for.
        layers: of the decoder.
    """
    torch.manual_seed(0)
    model = Decoder([Block(Attention(), MLP()) for _ in range(layers)]).to(FP16).requires_grad_(False)

    def adapt(layer: nn.Linear) -> Adapted:
        return Adapted(linear_4bit(layer, FP16, state=BF16), adapters)

    for block in model.layers:
        if fused == "mlp":
            block.mlp = FusedFeedForward(block.mlp, adapt)
        else:
            block.self_attn = FusedAttention(block.self_attn, adapt)
    return Broken(model, {"input_ids": ids()}, FP16, scaler=True, device=device)


# ----------------------------------------------------------------------- the buffer of another dtype (report #4026)


class BufferedProduct(torch.autograd.Function):
    """A product with a dequantized weight, which lies in the buffer only as long as each of the two products takes."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer = layer
        return hidden @ dequantize_into_buffer(layer).T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ dequantize_into_buffer(ctx.layer), None


class BufferedLora(nn.Module):
    """An adapted nf4 layer that dequantizes into the process' buffer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.inner = Adapted(base, FP32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        layer, dtype = self.inner, hidden.dtype
        adapted = hidden @ layer.lora_A.weight.to(dtype).T @ layer.lora_B.weight.to(dtype).T
        return BufferedProduct.apply(hidden, layer.base_layer) + adapted * SCALE


def buffered_model(dtype: torch.dtype) -> nn.Module:
    """A decoder in `dtype` whose attention runs on nf4 weights of that dtype."""
    torch.manual_seed(0)
    model = Decoder([Block(Attention(), MLP())]).to(dtype).requires_grad_(False)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return set_layers(model, targets, lambda layer: BufferedLora(linear_4bit(layer, dtype)))


def second_model() -> Broken:
    """Sequential: a bfloat16 model took a step and was deleted, a float16 one is loaded in the same process."""
    WEIGHT_BUFFERS.clear()
    first = buffered_model(BF16)
    first(ids()).backward()
    return Broken(buffered_model(FP16), {"input_ids": ids()})


class Pair(nn.Module):
    """Two models in one process."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second


def two_models(turns: str) -> Broken:
    """Two models that live at once and take turns: `"121"` alternates, `"21"` lets the second allocate."""
    WEIGHT_BUFFERS.clear()
    tokens = ids()

    def loss(pair: Any) -> torch.Tensor:
        return sum((pair.first if turn == "1" else pair.second)(tokens) for turn in turns)  # type: ignore[return-value]

    return Broken(Pair(buffered_model(BF16), buffered_model(FP16)), loss)


# --------------------------------------------------------------------------------------------- custom_kernel_autocast_bypass


class MatmulLora(torch.autograd.Function):
    """A LoRA layer's forward that adds the adapter's product in place, in the dtype of its input."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, a, b)
        dtype, flat = x.dtype, x.flatten(0, -2)
        out = torch.matmul(flat, weight.T)
        out.addmm_(torch.matmul(flat, a.to(dtype).T), b.to(dtype).T, alpha=SCALE)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, a, b = ctx.saved_tensors
        dtype = grad.dtype
        flat, wide = grad.flatten(0, -2), x.flatten(0, -2).to(dtype)
        grad_a, grad_b = _adapter_grads(wide, flat, a.to(dtype), b.to(dtype))
        grad_x = flat @ weight.to(dtype) + flat @ b.to(dtype) @ a.to(dtype) * SCALE
        return grad_x.view_as(x).to(x.dtype), None, grad_a.to(a.dtype), grad_b.to(b.dtype)


class KernelLora(nn.Module):
    """A dense layer through `MatmulLora`."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.inner = Adapted(base, FP32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        layer = self.inner
        return MatmulLora.apply(hidden, layer.base_layer.weight, layer.lora_A.weight, layer.lora_B.weight)


def kernel_under_autocast() -> Broken:
    """float32 activations under bfloat16 autocast: matmuls return bfloat16, `addmm_` gets float32 factors."""
    torch.manual_seed(0)
    model = Decoder([Block(Attention(), MLP()) for _ in range(2)]).to(BF16).requires_grad_(False)
    upcast_norms(model)
    model.embed_tokens.float()
    return Broken(set_layers(model, ["q_proj", "v_proj"], KernelLora), {"input_ids": ids()}, BF16)


class FusedDown(torch.autograd.Function):
    """A DoRA layer's fused product: saved activations are of the compute dtype, the gradient of the output's."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, m: torch.Tensor
    ) -> torch.Tensor:
        low = x @ a.to(x.dtype).T
        product = x @ weight.T + low @ b.to(x.dtype).T * SCALE
        ctx.save_for_backward(x, weight, a, b, m, product)
        return m * product

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, a, b, m, product = ctx.saved_tensors
        flat, scaled = x.flatten(0, -2), (grad * m).flatten(0, -2)
        grad_a = flat.T @ (scaled @ b.to(scaled.dtype)) * SCALE
        grad_b = scaled.T @ (flat @ a.to(flat.dtype).T) * SCALE
        grad_m = (grad * product).flatten(0, -2).sum(0)
        grad_x = (scaled @ weight).view_as(x)
        return grad_x, None, grad_a.T, grad_b, grad_m


class FusedDora(nn.Module):
    """A dense layer with DoRA through `FusedDown`."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.inner = Adapted(base, FP32, magnitude=FP32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        layer = self.inner
        out = FusedDown.apply(
            hidden, layer.base_layer.weight, layer.lora_A.weight, layer.lora_B.weight, layer.magnitude
        )
        return out.to(hidden.dtype)


def fused_dora() -> Broken:
    """Gemma's MLP in float16 with a fused DoRA: only the backward meets float16 and float32 in one product."""
    torch.manual_seed(0)
    model = Decoder([Block(Attention(), MLP()) for _ in range(2)]).to(FP16).requires_grad_(False)
    return Broken(set_layers(model, ["down_proj"], FusedDora), {"input_ids": ids()})


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "unsloth-5766",
        kernel_under_autocast,
        ("IST101", "IST105", "IST102"),
        # Under autocast both of the kernel's factors are float32, the activations and the adapter's masters.
        r"norm|autocast|crashes_fused\.py|embed_tokens|lora_B",
        crashes=r"self and mat2 must have the same dtype, but got BFloat16 and Float",
    ),
    Scenario(
        "unsloth-212",
        fused_dora,
        ("IST105", "IST102"),
        r"magnitude",
        crashes=r"same dtype, but got: c10::Half != float",
        phase="backward",
        notes="The error of the report's second half, in the backward of the fused MLP; DoRA's vector is what differs.",
    ),
)
LEFT_OUT: dict[str, str] = {}
