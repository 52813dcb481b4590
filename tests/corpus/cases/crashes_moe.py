"""Mixtures of experts, image merges and key-value caches: writes into a tensor of another dtype, rounded routers."""

from __future__ import annotations

from collections.abc import Callable
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
    RawLora,
    heads,
    ids,
    int8,
    lora,
    nf4,
    normal,
    set_layers,
    upcast_norms,
)
from tests.corpus.scenario import Broken, Scenario
from tests.models import HIDDEN, IMAGE_TOKEN, IMAGE_TOKENS, small_model

INDEX_PUT = r"Index put requires the source and destination dtypes match, got {} for the destination and {} for the source"

# --------------------------------------------------------------------------------------------- routers


class Router(nn.Module):
    """A top-2 router that scores in the dtype of its weight."""

    def __init__(self, experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, experts, bias=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.gate(tokens).softmax(-1)
        return scores.topk(2, -1)


class SigmoidRouter(nn.Module):
    """DeepSeek-V3's router: sigmoid scores, a correction bias for the choice only."""

    def __init__(self, experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, experts, bias=False)
        self.register_buffer("e_score_correction_bias", torch.linspace(-0.01, 0.01, experts))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.gate(tokens).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(2, -1).indices
        return scores.gather(1, chosen), chosen


class MoE(nn.Module):
    """Experts one after the other, their outputs added into the tokens' rows."""

    def __init__(self, router: nn.Module, experts: int = 8) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(MLP(inner=32) for _ in range(experts))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.router(tokens)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == index)
            out = out.index_add(0, rows, (expert(tokens[rows]) * weights[rows, slot, None]).to(out.dtype))
        return out.view_as(hidden)


def rounded_router(make: Callable[[], nn.Module]) -> Callable[[], Broken]:
    """A bfloat16 mixture of experts with LoRA on its attention, its router rounded with everything else."""

    def build() -> Broken:
        torch.manual_seed(0)
        model = Decoder([Block(Attention(), MoE(make())) for _ in range(2)]).to(BF16).requires_grad_(False)
        set_layers(model, ["q_proj", "v_proj"], lambda layer: RawLora(layer, BF16))
        return Broken(model, {"input_ids": ids(4, 32)})

    return build


def rounded_scores(broken: Broken) -> str | None:
    """By how much the scores of the first router miss those of a float32 router on the same tokens and weights."""
    router = next(m for m in broken.model.modules() if isinstance(m, (Router, SigmoidRouter)))
    seen: list[torch.Tensor] = []
    handle = router.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    returned: list[torch.Tensor] = []
    other = router.gate.register_forward_hook(lambda _m, _a, out: returned.append(out.detach()))
    with torch.no_grad():
        broken.model(**broken.inputs)
    handle.remove()
    other.remove()
    exact = seen[0].float() @ router.gate.weight.float().T
    error = (returned[0].float() - exact).abs().max().item()
    return f"router scores are off by up to {error:.1e}" if returned[0].dtype != FP32 else None


# --------------------------------------------------------------------------------------------- writes of another dtype


class DeepseekMoE(nn.Module):
    """DeepSeek's training path: `y[chosen == i] = expert(tokens[chosen == i])` into an empty tensor of the input's."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(4)
        self.experts = nn.ModuleList(MLP(inner=32) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.router(tokens)
        flat, repeated = chosen.flatten(), tokens.repeat_interleave(2, dim=0)
        out = torch.empty_like(repeated)
        for index, expert in enumerate(self.experts):
            out[flat == index] = expert(repeated[flat == index])
        return (out.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1).view_as(hidden)


def deepseek_under_autocast() -> Broken:
    """Float32 norms and bfloat16 autocast: the tensor written to is float32, what the experts return is bfloat16."""
    torch.manual_seed(0)
    model = Decoder([Block(Attention(), DeepseekMoE()) for _ in range(2)]).to(BF16).requires_grad_(False)
    upcast_norms(model)
    set_layers(model, ["q_proj", "v_proj"], lambda layer: RawLora(layer, FP32))
    return Broken(model, {"input_ids": ids()}, BF16)


class PriorDenoiser(nn.Module):
    """Two quantized layers with LoRA that predict noise, in float32 as the trainer's model wrapper returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_in, self.proj_out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.proj_out(F.silu(self.proj_in(latents))).float()


def prior_prediction(target_dtype: torch.dtype = BF16) -> Broken:
    """The base's own float32 prediction becomes the target of some samples: written into a batch of targets."""
    torch.manual_seed(0)
    model = nf4(PriorDenoiser().to(BF16), BF16)
    set_layers(model, ["proj_in", "proj_out"], lambda layer: RawLora(layer, BF16))
    latents, prior = normal(4, HIDDEN, dtype=BF16), torch.tensor([True, False, True, False])

    def loss(denoiser: Any) -> torch.Tensor:
        target = normal(4, HIDDEN, dtype=target_dtype, seed=5)
        with torch.no_grad():
            predicted = denoiser(latents[prior])
        target[prior] = predicted
        return F.mse_loss(denoiser(latents), target.float())

    return Broken(model, loss)


class LlavaMerge(nn.Module):
    """LLaVA with the merge it had: image features are written over the embeddings of the image tokens."""

    def __init__(self, language_model: Any, vision_tower: Any) -> None:
        super().__init__()
        self.language_model, self.vision_tower = language_model, vision_tower
        self.multi_modal_projector = nn.Sequential(
            nn.Linear(32, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN)
        )

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        patches = self.vision_tower(pixel_values).last_hidden_state[:, 1:]
        features = self.multi_modal_projector(patches[:, :IMAGE_TOKENS])
        words = self.language_model.get_input_embeddings()(input_ids.clamp(max=IMAGE_TOKEN - 1))
        merged = words.clone()
        merged[input_ids == IMAGE_TOKEN] = features.flatten(0, 1)
        return self.language_model(inputs_embeds=merged, labels=labels)


def clip(**settings: Any) -> Any:
    """A tiny CLIP vision tower with 32 × 32 images in patches of 8."""
    import transformers

    config = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        **settings,
    )
    torch.manual_seed(0)
    return transformers.CLIPVisionModel(config)


def llava_batch(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Two images and their texts."""
    tokens = ids()
    tokens[:, 2 : 2 + IMAGE_TOKENS] = IMAGE_TOKEN
    labels = tokens.masked_fill(tokens == IMAGE_TOKEN, -100)
    return {"input_ids": tokens, "pixel_values": normal(2, 3, 32, 32, dtype=dtype), "labels": labels}


def llava_index_put() -> Broken:
    """int8 language model, norms upcast, images and their tower in float32."""
    torch.manual_seed(0)
    language = int8(small_model("llama", FP16))
    model = LlavaMerge(language, clip()).requires_grad_(False)
    upcast_norms(model)
    model.language_model = lora(model.language_model, ["q_proj", "v_proj"])
    return Broken(model, llava_batch(FP32))


# --------------------------------------------------------------------------------------------- caches


class KVCache(nn.Module):
    """torchtune's cache: buffers that `setup_caches` allocates in a dtype of its own."""

    def __init__(self, dtype: torch.dtype, rows: int = 2, length: int = 32) -> None:
        super().__init__()
        shape = (rows, 4, length, HIDDEN // 4)
        self.register_buffer("k_cache", torch.zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape, dtype=dtype), persistent=False)

    def update(
        self, position: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.k_cache[:, :, position] = k
        self.v_cache[:, :, position] = v
        return self.k_cache, self.v_cache


class CachedAttention(Attention):
    """Attention that reads and writes its cache when it is not training."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_cache: KVCache | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training or self.kv_cache is None:
            return super().forward(hidden)
        q, k, v = (heads(layer(hidden)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        position = torch.arange(hidden.shape[1])
        k, v = self.kv_cache.update(position, k, v)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def torchtune_generate() -> Broken:
    """A float32 decoder with bfloat16 caches: training never touches them, generation writes into them."""
    torch.manual_seed(0)
    model = Decoder([Block(CachedAttention(), MLP()) for _ in range(2)]).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, CachedAttention):
            module.kv_cache = KVCache(BF16)
            module.q_proj = RawLora(module.q_proj, FP32)  # type: ignore[assignment]
    tokens = ids()

    def generate(trained: nn.Module) -> Any:
        trained.eval()
        try:
            return trained(tokens)
        finally:
            trained.train()

    phases = ("forward", "backward", "optimizer", "generate")
    return Broken(model, {"input_ids": tokens}, phases=phases, generate=generate)


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "torchtitan-2389",
        rounded_router(Router),
        ("IST806",),
        r"router\.gate",
        cost=rounded_scores,
    ),
    Scenario(
        "automodel-3650",
        rounded_router(SigmoidRouter),
        ("IST806",),
        r"router\.gate",
        cost=rounded_scores,
    ),
    Scenario(
        "llamafactory-5943",
        deepseek_under_autocast,
        ("IST103",),
        r"norm|autocast",
        crashes=INDEX_PUT.format("Float", "BFloat16"),
        notes="DeepSeek's own modelling code, which the report ran, wrote into an empty tensor of its input's dtype.",
    ),
    Scenario(
        "onetrainer-824",
        prior_prediction,
        ("IST103",),
        r"crashes_moe\.py|cast",
        crashes=INDEX_PUT.format("BFloat16", "Float"),
        advice=lambda: prior_prediction(FP32),
        notes="The write is in the training loop's own code.",
    ),
    Scenario(
        "llamafactory-3807",
        llava_index_put,
        ("IST103",),
        r"vision_tower|multi_modal_projector|embed_tokens|autocast",
        crashes=INDEX_PUT.format("Half", "Float"),
        notes="transformers merges with a cast today; the merge here is the one of the report's version.",
    ),
    Scenario(
        "torchtune-1349",
        torchtune_generate,
        ("IST103",),
        r"k_cache|embed_tokens|kv_cache",
        crashes=INDEX_PUT.format("BFloat16", "Float"),
        phase="generate",
    ),
)
LEFT_OUT: dict[str, str] = {}
