"""GradScaler with 16-bit trainable parameters: LoRA trainers, a U-Net, AMP in the wrong dtype, resumed adapters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.corpus.cases.crashes_parts import (
    BF16,
    FP16,
    MLP,
    Attention,
    Block,
    Decoder,
    RawLora,
    ids,
    lora,
    normal,
    set_layers,
)
from tests.corpus.cases.training_parts import UNSCALE_HALF, loaded, scaled_bfloat16
from tests.corpus.scenario import Broken, Scenario
from tests.models import HIDDEN, tiny_batch


def half_adapters(name: str, targets: list[str] | str = "all-linear") -> Broken:
    """LoRA on a float16 base as PEFT was before its adapters became float32, under float16 AMP."""
    model = lora(loaded(name, FP16), targets, autocast_adapter_dtype=False)
    return Broken(model, tiny_batch(name), FP16, scaler=True)


def webui_on_v100() -> Broken:
    """text-generation-webui on a V100, which forces float16: q and v adapted."""
    model = lora(loaded("mistral", FP16), ["q_proj", "v_proj"], autocast_adapter_dtype=False)
    return Broken(model.train(), tiny_batch("mistral"), FP16, scaler=True)


class DiffusionTransformer(nn.Module):
    """A transformer that predicts noise: latents `[batch, length, HIDDEN]`, a time embedding, one block."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.entrance = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.self_attn, self.mlp = Attention(), MLP()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, latents: torch.Tensor, time: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        hidden = self.entrance(latents) + self.time(time)
        hidden = hidden + self.self_attn(self.norm(hidden))
        return F.mse_loss((hidden + self.mlp(hidden)).float(), noise.float())


def latents(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Latents, time embedding and noise."""
    return {
        "latents": normal(2, 8, HIDDEN, dtype=dtype),
        "time": normal(2, 1, HIDDEN, dtype=dtype, seed=4),
        "noise": normal(2, 8, HIDDEN, dtype=dtype, seed=5),
    }


def audio_trainer_on_t4() -> Broken:
    """The fallback for cards without bfloat16: `model.to(float16)` once the adapters are in, theirs included."""
    torch.manual_seed(0)
    model = lora(DiffusionTransformer(), ["q_proj", "k_proj", "v_proj", "o_proj"], task_type=None)
    return Broken(model.to(FP16), latents(FP16), FP16, scaler=True)


class UNet(nn.Module):
    """Down, middle and up convolutions with a skip; returns the mean squared error of the predicted noise."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv_in, self.conv_out = (
            nn.Conv2d(4, channels, 3, padding=1),
            nn.Conv2d(2 * channels, 4, 3, padding=1),
        )
        self.down, self.up = nn.Conv2d(channels, channels, 2, 2), nn.ConvTranspose2d(channels, channels, 2, 2)
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, latents: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        skip = self.conv_in(latents)
        hidden = self.up(F.silu(self.norm(self.down(skip))))
        return F.mse_loss(self.conv_out(torch.cat([skip, hidden], 1)).float(), noise.float())


def unet_without_lora() -> Broken:
    """Stable Diffusion's U-Net in float16, trained whole because LoRA was switched off, under float16 AMP."""
    torch.manual_seed(0)
    inputs = {"latents": normal(1, 4, 8, 8, dtype=FP16), "noise": normal(1, 4, 8, 8, dtype=FP16, seed=5)}
    return Broken(UNet().to(FP16), inputs, FP16, scaler=True)


def trl_slow_test() -> Broken:
    """TRL's slow test: a model that loads in bfloat16, all of it trained, with `fp16=True`."""
    return Broken(loaded("llama", BF16), tiny_batch("llama"), FP16, scaler=True, device="a10g")


def node_without_dtype() -> Broken:
    """ComfyUI's node with training dtype "none": LoRA in the model's bfloat16, no autocast, the scaler still on."""
    torch.manual_seed(0)
    model = DiffusionTransformer().to(BF16).requires_grad_(False)
    set_layers(model, ["q_proj", "v_proj"], lambda layer: RawLora(layer, BF16))
    return Broken(model, latents(BF16), scaler=True, device="rtx4090")


def instructblip_on_a10g() -> Broken:
    """InstructBLIP with Flan-T5: LoRA in bfloat16 under bfloat16 AMP, and LAVIS' GradScaler."""
    model = lora(loaded("t5", BF16), ["q", "v"], task_type="SEQ_2_SEQ_LM", autocast_adapter_dtype=False)
    batch = tiny_batch("t5")
    return Broken(model, batch, BF16, scaler=True, device="a10g")


def scaled_bfloat16_module() -> Broken:
    """A plain bfloat16 model and a GradScaler."""
    torch.manual_seed(0)
    model = Decoder([Block(Attention(), MLP())]).to(BF16)
    return Broken(model, lambda module: module(ids()), scaler=True, device="rtx3090")


def resumed_sdxl() -> Broken:
    """SDXL LoRA: training starts with float32 adapters; resuming casts what it loads to the U-Net's float16."""
    torch.manual_seed(0)
    model = DiffusionTransformer().to(FP16).requires_grad_(False)
    set_layers(model, ["q_proj", "k_proj", "v_proj"], lambda layer: RawLora(layer, torch.float32))
    saved = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    model.load_state_dict({name: value.to(FP16) for name, value in saved.items()}, strict=False, assign=True)
    return Broken(model, latents(FP16), FP16, scaler=True)


def resumed_text_encoder() -> Broken:
    """The same script's text encoder: a PEFT adapter loaded into a float16 model without a cast to float32."""
    import peft

    first = lora(loaded("llama", FP16), ["q_proj", "v_proj"])
    saved = {name: value.to(FP16) for name, value in peft.get_peft_model_state_dict(first).items()}
    resumed = lora(loaded("llama", FP16), ["q_proj", "v_proj"], autocast_adapter_dtype=False)
    peft.set_peft_model_state_dict(resumed, saved)
    return Broken(resumed, tiny_batch("llama"), FP16, scaler=True)


def _raises(
    case: str, build: object, cause: str = "lora_A", codes: tuple[str, ...] = ("IST301",), notes: str = ""
) -> Scenario:
    return Scenario(case, build, codes, cause, UNSCALE_HALF, "unscale", notes=notes)  # type: ignore[arg-type]


def _refused_by_cuda(case: str, build: object, cause: str, notes: str = "") -> Scenario:
    return Scenario(case, build, ("IST302",), cause, cost=scaled_bfloat16, notes=notes or CUDA_ONLY)  # type: ignore[arg-type]


CUDA_ONLY = "The CPU's unscale kernel takes bfloat16; CUDA's refuses it in the torch versions of the report."

SCENARIOS: tuple[Scenario, ...] = (
    _raises("peft-pr1706", lambda: half_adapters("qwen3")),
    _raises("peft-1249", lambda: half_adapters("llama", ["q_proj", "v_proj"])),
    _raises("sidestep-39", audio_trainer_on_t4),
    _raises("textgen-5268", webui_on_v100),
    _raises("d3po-6", unet_without_lora, "conv_in"),
    _raises("diffusers-6514", resumed_sdxl, codes=("IST301", "IST501")),
    _raises("diffusers-5004", resumed_text_encoder, codes=("IST301", "IST501")),
    _refused_by_cuda("trl-4901", trl_slow_test, "embed_tokens|self_attn"),
    _refused_by_cuda("comfyui-13124", node_without_dtype, "lora_A"),
    _refused_by_cuda("instructblip-peft-3", instructblip_on_a10g, "lora_A"),
    _refused_by_cuda("pytorch-127176", scaled_bfloat16_module, "embed_tokens"),
)

LEFT_OUT: dict[str, str] = {}
