"""Adapters other than plain LoRA: LoKr, DoRA, IA3, prefix and prompt tuning, LoRA on expert parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrize

from tests.corpus.cases.crashes_parts import BF16, FP32, heads, ids, matmul_error, normal, set_layers
from tests.corpus.scenario import Broken, Scenario
from tests.models import HIDDEN, small_model, tiny_batch, tiny_model
from tests.reality import real_step

# --------------------------------------------------------------------------------------------- LyCORIS' LoKr


class LoKr(nn.Module):
    """A linear layer with a Kronecker-product adapter, as LyCORIS computes it.

    Attributes:
        bypass: adds the adapter's own product to the layer's, instead of one product with the summed weight.
        magnitude: DoRA's row norms (`dora_wd`), None without.
    """

    def __init__(self, base: nn.Linear, dtype: torch.dtype, bypass: bool = False, dora: bool = False) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lokr_w1 = nn.Parameter(normal(4, 4, dtype=dtype) * 0.1)
        self.lokr_w2 = nn.Parameter(
            normal(base.out_features // 4, base.in_features // 4, dtype=dtype, seed=3) * 0.1
        )
        self.bypass = bypass
        self.magnitude = nn.Parameter(base.weight.data.norm(dim=1, keepdim=True).to(dtype)) if dora else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        delta = torch.kron(self.lokr_w1, self.lokr_w2)
        if self.bypass:
            return self.base_layer(hidden) + F.linear(hidden, delta)
        weight = self.base_layer.weight + delta
        if self.magnitude is not None:
            weight = self.magnitude * weight / weight.norm(dim=1, keepdim=True)
        return F.linear(hidden, weight, self.base_layer.bias)


class DiTBlock(nn.Module):
    """A diffusion transformer's layer with adaptive norms."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, elementwise_affine=False)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 128), nn.Linear(128, HIDDEN)

    def forward(self, hidden: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        scale, shift = self.modulation(F.silu(time)).unsqueeze(1).chunk(2, -1)
        normed = self.norm(hidden) * (1 + scale) + shift
        mixed = F.scaled_dot_product_attention(
            *(heads(layer(normed)) for layer in (self.to_q, self.to_k, self.to_v))
        )
        hidden = hidden + self.to_out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.fc2(F.gelu(self.fc1(hidden)))


class DiT(nn.Module):
    """Two such layers on latents `[batch, patches, HIDDEN]`."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, HIDDEN)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(2))

    def forward(self, latents: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        time = self.time(step)
        for block in self.blocks:
            latents = block(latents, time)
        return latents


def dit(
    adapter: torch.dtype, targets: list[str], **settings: bool
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A bfloat16 DiT with LoKr on `targets`, and its inputs."""
    torch.manual_seed(0)
    model = DiT().to(BF16).requires_grad_(False)
    set_layers(model, targets, lambda layer: LoKr(layer, adapter, **settings))
    return model, {"latents": normal(2, 16, HIDDEN, dtype=BF16), "step": normal(2, 1, dtype=BF16)}


def anima_lokr() -> Broken:
    """LoKr in float32 (`mixed_precision=bf16` without `full_bf16`) on bfloat16 activations."""
    return Broken(*dit(FP32, ["to_q", "to_k", "to_v", "to_out"], bypass=True))


def lokr_dora() -> Broken:
    """LoKr with `dora_wd`: the weight that is put together takes the adapter's float32."""
    return Broken(*dit(FP32, ["fc1", "fc2", "to_q"], dora=True))


def lokr_preview() -> Broken:
    """Training runs under autocast; the preview that is sampled afterwards runs the bypass path without."""
    model, inputs = dit(FP32, ["to_q", "to_v"], bypass=True)
    return Broken(
        model,
        inputs,
        BF16,
        phases=("forward", "backward", "optimizer", "generate"),
        generate=lambda trained: trained(**inputs),
    )


# --------------------------------------------------------------------------------------------- PEFT's variants


class ExpertDelta(nn.Module):
    """LoRA on an expert parameter `[experts, in, out]`, as a parametrization.

    Attributes:
        autocast: whether the fold runs under the caller's autocast.
    """

    def __init__(self, shape: torch.Size, autocast: bool, rank: int = 4) -> None:
        super().__init__()
        self.autocast = autocast
        experts, rows, columns = shape
        self.lora_A = nn.Parameter(normal(experts, rank, columns) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(experts, rows, rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=BF16, enabled=self.autocast):
            return torch.baddbmm(weight, self.lora_B, self.lora_A)


class Experts(nn.Module):
    """Experts as one parameter, adapted for the time of a forward."""

    def __init__(self, autocast: bool) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(normal(4, HIDDEN, HIDDEN) * 0.1, requires_grad=False)
        self.router = nn.Linear(HIDDEN, 4, bias=False).requires_grad_(False)
        self.delta = ExpertDelta(self.gate_up_proj.shape, autocast)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self, "gate_up_proj", self.delta)
        try:
            routed = self.router(hidden).softmax(-1).T.unsqueeze(-1)
            return (torch.bmm(hidden.expand(4, -1, -1), self.gate_up_proj) * routed).sum(0)
        finally:
            parametrize.remove_parametrizations(self, "gate_up_proj", leave_parametrized=False)


def target_parameters(autocast: bool = True) -> Broken:
    """`target_parameters` of a float32 mixture of experts under bfloat16 autocast, their fold under it or not."""
    torch.manual_seed(0)
    return Broken(Experts(autocast), {"hidden": normal(8, HIDDEN)}, BF16)


class PrefixTuned(nn.Module):
    """Prefix tuning that remembers its base's dtype from the time it was made."""

    def __init__(self, base: Any, length: int = 4) -> None:
        super().__init__()
        self.base_model = base.requires_grad_(False)
        self.layers, self.length = base.config.n_layer, length
        self.prefix = nn.Embedding(length, self.layers * 2 * HIDDEN)
        self.base_model_torch_dtype = base.dtype

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        from transformers import DynamicCache

        rows = input_ids.shape[0]
        prefix = self.prefix.weight.expand(rows, -1, -1).to(self.base_model_torch_dtype)
        cache = DynamicCache()
        for index, pair in enumerate(prefix.unflatten(-1, (self.layers, 2, HIDDEN)).unbind(2)):
            cache.update(heads(pair[:, :, 0]), heads(pair[:, :, 1]), index)
        return self.base_model(input_ids=input_ids, labels=labels, past_key_values=cache)


def prefix_after_half() -> Broken:
    """`get_peft_model`, then `model.half()`: the keys and values of the prefix are still cast to float32."""
    batch = {"input_ids": ids(), "labels": ids()}
    return Broken(PrefixTuned(tiny_model("gpt2")).half(), batch)


class IA3(nn.Module):
    """A layer whose output (or input, of a feed-forward layer) is scaled by a learned vector."""

    def __init__(self, base: nn.Linear, feedforward: bool) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.ia3_l = nn.Parameter(torch.ones(base.in_features if feedforward else base.out_features))
        self.feedforward = feedforward

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.feedforward:
            return self.base_layer(hidden * self.ia3_l)
        return self.base_layer(hidden) * self.ia3_l


def ia3_on_half_base() -> Broken:
    """IA3 on a T5 that was cast to bfloat16 by hand; the vectors are float32, inputs and outputs are not cast."""
    model = tiny_model("t5", BF16).requires_grad_(False)
    set_layers(model, ["wo"], lambda layer: IA3(layer, feedforward=True))
    return Broken(model, tiny_batch("t5"))


class PromptTuned(nn.Module):
    """Prompt tuning whose vectors start as words of the model, in the model's dtype."""

    def __init__(self, base: Any, length: int = 8) -> None:
        super().__init__()
        self.base_model = base.requires_grad_(False)
        words = base.get_input_embeddings().weight.data[3 : 3 + length]
        self.prompt = nn.Parameter(words.clone())

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        rows, length = input_ids.shape[0], self.prompt.shape[0]
        words = self.base_model.get_input_embeddings()(input_ids)
        embeds = torch.cat([self.prompt.expand(rows, -1, -1), words], 1)
        return self.base_model(inputs_embeds=embeds, labels=F.pad(labels, (length, 0), value=-100))


def prompt_in_half() -> Broken:
    """A half-precision model's own words as trainable prompt vectors; bfloat16, so that nothing overflows."""
    torch.manual_seed(0)
    base = small_model("llama", BF16)
    base.get_input_embeddings().weight.data.normal_(std=0.5)
    batch = {"input_ids": ids(), "labels": ids()}
    return Broken(PromptTuned(base), batch, learning_rate=1e-5)


def unmoved(broken: Broken) -> str | None:
    """The share of prompt values that an optimizer step leaves where they are."""
    before = broken.model.prompt.detach().clone()
    outcome = real_step(broken.model, broken.inputs, broken.autocast, learning_rate=broken.learning_rate)
    assert outcome.error is None, outcome.error
    still = (broken.model.prompt == before).double().mean().item()
    return f"{still:.0%} of the prompt's values did not move" if still > 0.5 else None


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "loraNext-161",
        lokr_dora,
        ("IST102", "IST101"),
        r"lokr_w1|lokr_w2|magnitude",
        crashes=r"(self|mat1) and mat2 must have the same dtype, but got BFloat16 and Float",
    ),
    Scenario(
        "peft-3601",
        target_parameters,
        ("IST102", "IST101", "IST203", "IST199"),
        r"autocast|baddbmm|delta|lora_|parametrization",
        crashes=r"Registering a parametrization may not change the dtype of the tensor",
        advice=lambda: target_parameters(autocast=False),
        notes="Today's PEFT folds with autocast off; here is the fold as it was. What raises is Python code of torch.",
    ),
    Scenario(
        "peft-688",
        prefix_after_half,
        ("IST104", "IST102"),
        r"prefix|crashes_variants\.py",
        crashes=r"same dtype, but got query\.dtype: c10::Half key\.dtype: float",
        notes="Today's PEFT reads the base's dtype again; the dtype that is remembered here is the report's.",
    ),
    Scenario(
        "peft-2433",
        ia3_on_half_base,
        ("IST102", "IST101"),
        r"ia3_l",
        crashes=matmul_error(FP32, BF16),
        notes="Today's PEFT casts in every method; the IA3 layer here is the one before that. transformers' T5 keeps "
        "`wo` in float32 only when it loads.",
    ),
    Scenario(
        "loraNext-323",
        lokr_preview,
        ("IST102", "IST108"),
        r"lokr_w1|lokr_w2",
        crashes=matmul_error(BF16, FP32),
        phase="generate",
        notes="The optimizer of the report only chose the dtypes; the preview fails under any.",
    ),
    Scenario(
        "loraNext-75",
        anima_lokr,
        ("IST102",),
        r"lokr_w1|lokr_w2",
        crashes=matmul_error(BF16, FP32),
    ),
    Scenario(
        "peft-62",
        prompt_in_half,
        ("IST801", "IST304"),
        r"prompt",
        cost=unmoved,
        notes="Today's PEFT keeps the vectors in float32; here they are copied with the model's dtype, as in the report.",
    ),
)

LEFT_OUT: dict[str, str] = {}
