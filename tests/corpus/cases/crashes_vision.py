"""Vision towers: images and norms of another dtype than the layers they meet."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.corpus.cases.crashes_moe import clip
from tests.corpus.cases.crashes_parts import (
    BF16,
    FP32,
    RawLora,
    cast_matching,
    heads,
    ids,
    lora,
    nf4,
    normal,
    set_layers,
)
from tests.corpus.scenario import Broken, Scenario
from tests.models import HIDDEN, IMAGE_TOKEN, IMAGE_TOKENS, small_model, tiny_batch, tiny_model

CONV = r"Input type \(float\) and bias type \(c10::BFloat16\) should be the same"


class VisionBlock(nn.Module):
    """A layer of a vision tower: LayerNorms with bias, attention over all patches."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.fc1, self.fc2 = nn.Linear(size, 48), nn.Linear(48, size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads(part, 2) for part in self.qkv(self.norm1(hidden)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        hidden = hidden + self.proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.fc2(F.gelu(self.fc1(self.norm2(hidden))))


class VisionTower(nn.Module):
    """Patches by a convolution, then layers; `cast` follows the dtype of the patch embedding, as Qwen's does."""

    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 32, 8, 8)
        self.blocks = nn.ModuleList(VisionBlock() for _ in range(2))
        self.merger = nn.Linear(32, HIDDEN)
        self.cast = cast

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.patch_embed(pixels.to(self.patch_embed.weight.dtype) if self.cast else pixels)
        hidden = hidden.flatten(2).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        return self.merger(hidden)


class VisionLanguage(nn.Module):
    """Image features in front of the words of a language model."""

    def __init__(self, visual: nn.Module, language_model: Any) -> None:
        super().__init__()
        self.visual, self.language_model = visual, language_model

    def forward(self, pixel_values: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        words = self.language_model.get_input_embeddings()(input_ids)
        features = self.visual(pixel_values)[:, :IMAGE_TOKENS].to(words.dtype)
        embeds = torch.cat([features, words], 1)
        hidden = F.pad(labels, (IMAGE_TOKENS, 0), value=-100)
        return self.language_model(inputs_embeds=embeds, labels=hidden)


def image_batch() -> dict[str, torch.Tensor]:
    """float32 images, as processors return them, and their texts."""
    tokens = ids()
    return {"pixel_values": normal(2, 3, 32, 32), "input_ids": tokens, "labels": tokens.clone()}


def qwen_vision() -> Broken:
    """A Qwen tower in bfloat16 whose norms `dtype=float32` left in float32, with LoRA on tower and text."""
    torch.manual_seed(0)
    visual = VisionTower(cast=True).to(BF16).requires_grad_(False)
    cast_matching(visual, FP32, "norm1", "norm2")
    set_layers(visual, ["qkv", "proj"], lambda layer: RawLora(layer, BF16))
    return Broken(
        VisionLanguage(visual, lora(small_model("qwen3", BF16), ["q_proj"])), image_batch(), device="l4"
    )


class Autoencoder(nn.Module):
    """Flux' image encoder: convolutions and group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 8, 3, 2, 1)
        )

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return self.encoder(images)


class FluxTrainer(nn.Module):
    """The autoencoder, frozen, and the transformer that is trained on its latents."""

    def __init__(self) -> None:
        super().__init__()
        self.ae = Autoencoder().requires_grad_(False)
        self.transformer = nn.Linear(8, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            latents = self.ae.encode(images)
        return F.mse_loss(self.transformer(latents.flatten(2).mT), latents.flatten(2).mT)


def flux_encode() -> Broken:
    """float32 images into an autoencoder that the full fine-tune has cast to bfloat16."""
    torch.manual_seed(0)
    return Broken(FluxTrainer().to(BF16), {"images": normal(2, 3, 16, 16)})


def internvl_chat() -> Broken:
    """A fine-tuned InternVL2 chats: `pixel_values` come in float32, InternViT casts nothing."""
    torch.manual_seed(0)
    visual = VisionTower(cast=False).to(BF16)
    model = VisionLanguage(visual, small_model("llama", BF16)).requires_grad_(False)
    return Broken(model, image_batch(), phases=("forward",))


class LlavaNext(nn.Module):
    """LLaVA 1.6: a CLIP tower, a projector, a language model; the merge casts."""

    def __init__(self, vision_tower: Any, language_model: Any) -> None:
        super().__init__()
        self.vision_tower, self.mm_projector = vision_tower, nn.Linear(32, HIDDEN)
        self.language_model = language_model

    def forward(self, pixel_values: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        patches = self.vision_tower(pixel_values).last_hidden_state[:, 1 : 1 + IMAGE_TOKENS]
        words = self.language_model.get_input_embeddings()(input_ids.clamp(max=IMAGE_TOKEN - 1))
        features = self.mm_projector(patches.to(self.mm_projector.weight.dtype)).to(words.dtype)
        place = (input_ids == IMAGE_TOKEN).unsqueeze(-1).expand_as(words)
        return self.language_model(inputs_embeds=words.masked_scatter(place, features), labels=labels)


def llava_tower() -> Broken:
    """4-bit LLaVA: the tower stayed in float32, except its norms, which `bf16` casting by name made bfloat16."""
    model = LlavaNext(clip(), nf4(small_model("llama", BF16), BF16)).requires_grad_(False)
    model.mm_projector.to(BF16)
    cast_matching(model.vision_tower, BF16, "norm")
    model.language_model = lora(model.language_model, ["q_proj", "v_proj"])
    batch = image_batch()
    batch["input_ids"][:, 2 : 2 + IMAGE_TOKENS] = IMAGE_TOKEN
    return Broken(model, batch)


def gemma3_siglip() -> Broken:
    """Casting by name reaches SigLIP's projections and norms, not its `mlp`, `out_proj` and patch embedding."""
    model = tiny_model("gemma3-vision", BF16)
    cast_matching(model.model.vision_tower, FP32, "q_proj", "k_proj", "v_proj", "layer_norm", "layernorm")
    batch = tiny_batch("gemma3-vision")
    return Broken(model, {**batch, "pixel_values": batch["pixel_values"].to(BF16)})


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "unsloth-5313",
        qwen_vision,
        ("IST110",),
        r"norm1",
        notes="CUDA's layer_norm refuses bfloat16 activations beside a float32 weight; a CPU's takes them.",
    ),
    Scenario(
        "sdscripts-1562",
        flux_encode,
        ("IST106",),
        r"images",
        crashes=CONV,
    ),
    Scenario(
        "internvl-602",
        internvl_chat,
        ("IST106",),
        r"pixel_values",
        crashes=CONV,
    ),
    Scenario(
        "llava-1712",
        llava_tower,
        ("IST110",),
        r"vision_tower|pixel_values|norm|layrnorm",
        crashes=r"mixed dtype \(CPU\): expect parameter to have scalar type of Float",
        notes="CUDA's words for the same are `expected scalar type BFloat16 but found Float`, or the other way round.",
    ),
    Scenario(
        "unsloth-zoo-103",
        gemma3_siglip,
        ("IST110", "IST101"),
        r"vision_tower",
        crashes=r"(mat1|m1|self) and (mat2|m2) .*same dtype, but got",
        notes="CUDA's layer_norm already refuses the norm in front of the projection that fails here.",
    ),
)
LEFT_OUT: dict[str, str] = {}
