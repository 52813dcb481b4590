"""Parts that several scenarios are built from: quantized layers, adapters, casts of other libraries, a plain decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from tests.corpus.scenario import Broken
from tests.models import CONFIGS, HIDDEN, VOCABULARY
from tests.reality import real_step

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Messages of torch's operators for operands of two dtypes; `%s` are the names that torch gives them.
MATMUL = r"expected m1 and m2 to have the same dtype, but got: {} != {}"
NAMES = {BF16: "c10::BFloat16", FP16: "c10::Half", FP32: "float"}


def matmul_error(left: torch.dtype, right: torch.dtype) -> str:
    """What a matmul says of these operands."""
    return MATMUL.format(NAMES[left], NAMES[right])


def ids(rows: int = 2, length: int = 16) -> torch.Tensor:
    """Fixed token ids `[rows, length]`."""
    return torch.randint(3, 120, (rows, length), generator=torch.Generator().manual_seed(1))


def normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 2) -> torch.Tensor:
    """Fixed normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tiny_qwen2(dtype: torch.dtype) -> Any:
    """A Qwen2 of the sizes of `tests.models`: biases in the attention, no norms on its heads."""
    import transformers

    sizes = CONFIGS["llama"]().to_dict()
    sizes.pop("model_type")
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)).to(dtype)


# --------------------------------------------------------------------------------------------- casts and adapters


def cast_matching(model: nn.Module, dtype: torch.dtype, *parts: str) -> nn.Module:
    """Cast the float parameters whose name contains one of `parts` (case-insensitive)."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and any(part in name.lower() for part in parts):
            parameter.data = parameter.data.to(dtype)
    return model


def upcast_norms(model: nn.Module) -> nn.Module:
    """Every norm's weight in float32, as trainers and `prepare_model_for_kbit_training` leave them."""
    return cast_matching(model, FP32, "norm", "ln_")


def peft_module_casting_to_bf16(model: nn.Module) -> nn.Module:
    """TRL's cast before a bfloat16 run of a quantized model: norms float32, everything else that floats bfloat16."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(FP32 if "norm" in name else BF16)
    return model


def lora(model: nn.Module, targets: Sequence[str] | str = "all-linear", **settings: Any) -> Any:
    """A PEFT LoRA model of rank 4; adapters float32 unless `autocast_adapter_dtype=False`."""
    import peft

    autocast_adapter_dtype = settings.pop("autocast_adapter_dtype", True)
    if settings.setdefault("task_type", "CAUSAL_LM") is None:
        del settings["task_type"]
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=targets if isinstance(targets, str) else list(targets),
        **settings,
    )
    return peft.get_peft_model(model, config, autocast_adapter_dtype=autocast_adapter_dtype)


def linear_4bit(
    layer: nn.Linear, compute: torch.dtype | None, state: torch.dtype | None = None, quant_type: str = "nf4"
) -> Any:
    """`layer` as bitsandbytes' 4-bit layer; `state` is the dtype its quantization state was saved with."""
    import bitsandbytes

    packed = bitsandbytes.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        layer.bias is not None,
        compute_dtype=compute,
        quant_type=quant_type,
    )
    packed.load_state_dict(layer.state_dict())
    packed = packed.to(layer.weight.dtype).to("cpu").requires_grad_(False)
    if state is not None:
        packed.weight.quant_state.dtype = state
    return packed


def linear_8bit(layer: nn.Linear) -> Any:
    """`layer` as bitsandbytes' int8 layer."""
    import bitsandbytes

    packed = bitsandbytes.nn.Linear8bitLt(
        layer.in_features, layer.out_features, layer.bias is not None, has_fp16_weights=False
    )
    packed.load_state_dict(layer.state_dict())
    if layer.bias is not None:
        packed.bias.data = layer.bias.data.clone()
    return packed.to("cpu").requires_grad_(False)


def replace_linears(
    model: nn.Module, make: Callable[[nn.Linear], nn.Module], skip: Sequence[str] = ("lm_head",)
) -> nn.Module:
    """Put `make(layer)` in the place of every plain linear layer whose name has no part of `skip`."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and not any(part in name for part in skip):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, make(layer))
    return model.requires_grad_(False)


def nf4(
    model: nn.Module,
    compute: torch.dtype | None,
    state: torch.dtype | None = None,
    skip: Sequence[str] = ("lm_head",),
) -> nn.Module:
    """Every linear layer but the head as nf4."""
    return replace_linears(model, lambda layer: linear_4bit(layer, compute, state), skip)


def int8(model: nn.Module, skip: Sequence[str] = ("lm_head",)) -> nn.Module:
    """Every linear layer but the head as int8."""
    return replace_linears(model, linear_8bit, skip)


# --------------------------------------------------------------------------------------------- a plain decoder


class PromotingRMSNorm(nn.Module):
    """The norm of Llama's modelling code: `weight * normed.to(input dtype)` is of the promoted dtype."""

    def __init__(self, size: int = HIDDEN) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(hidden.dtype)


class Attention(nn.Module):
    """Causal self-attention of four heads."""

    def __init__(self, size: int = HIDDEN, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size, bias) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads(layer(hidden)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def heads(hidden: torch.Tensor, count: int = 4) -> torch.Tensor:
    """`[batch, length, size]` -> `[batch, heads, length, size / heads]`."""
    return hidden.unflatten(-1, (count, -1)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, size: int = HIDDEN, inner: int = 96) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(size, inner, False), nn.Linear(size, inner, False)
        self.down_proj = nn.Linear(inner, size, False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Block(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = PromotingRMSNorm(), PromotingRMSNorm()
        self.self_attn, self.mlp = attention, mlp

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    """A plain decoder without any library: embedding, blocks, norm, head; returns the mean cross-entropy."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(blocks)
        self.norm = PromotingRMSNorm()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.lm_head(self.norm(hidden))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten())


class RawLora(nn.Module):
    """A LoRA layer that casts nothing.

    Attributes:
        base_layer: the frozen layer.
        lora_A, lora_B: the adapter, in a dtype of its own.
        before: what the layer does to the adapter's input, nothing by default.
    """

    def __init__(
        self,
        base: nn.Module,
        dtype: torch.dtype,
        before: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden,
    ) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 4, False, dtype=dtype)  # type: ignore[arg-type]
        self.lora_B = nn.Linear(4, base.out_features, False, dtype=dtype)  # type: ignore[arg-type]
        self.before = before

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(hidden)
        return result + self.lora_B(self.lora_A(self.before(hidden))).to(result.dtype)


def set_layers(model: nn.Module, names: Sequence[str], make: Callable[[Any], nn.Module]) -> nn.Module:
    """Put `make(module)` in the place of every module whose own name is one of `names`."""
    for name, module in list(model.named_modules()):
        parent, _, child = name.rpartition(".")
        if child in names:
            setattr(model.get_submodule(parent), child, make(module))
    return model


# --------------------------------------------------------------------------------------------- what a step really does


@dataclass(frozen=True)
class Seen:
    """One operator of a real step: its name, the dtypes of its tensors, the dtype and bytes of its first result."""

    op: str
    operands: tuple[torch.dtype, ...]
    result: torch.dtype | None
    bytes: int


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        tensor = first if isinstance(first, torch.Tensor) else None
        self.seen.append(
            Seen(
                str(func),
                tuple(value.dtype for value in args if isinstance(value, torch.Tensor)),
                None if tensor is None else tensor.dtype,
                0 if tensor is None else tensor.numel() * tensor.itemsize,
            )
        )
        return out


def watch_step(broken: Broken) -> list[Seen]:
    """Every operator of the real forward and backward of a set-up that runs."""
    with _Watch() as watch:
        outcome = real_step(broken.model, broken.inputs, broken.autocast, phases=("forward", "backward"))
    assert outcome.error is None, outcome.error
    return watch.seen


@contextmanager
def module_dtypes(model: nn.Module, suffix: str) -> Iterator[list[tuple[str, torch.dtype, torch.dtype]]]:
    """(name, input dtype, output dtype) of each call of the modules whose name ends with `suffix`."""
    calls: list[tuple[str, torch.dtype, torch.dtype]] = []
    handles = [
        module.register_forward_hook(
            lambda _, args, out, name=name: calls.append((name, args[0].dtype, out.dtype))
        )
        for name, module in model.named_modules()
        if name.endswith(suffix)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
