"""Operators without a kernel for a dtype, and recomputation that does not run as the forward did."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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
    lora,
    matmul_error,
    normal,
    set_layers,
    upcast_norms,
)
from tests.corpus.scenario import Broken, Scenario
from tests.models import HIDDEN, small_model, tiny_batch
from tests.reality import real_step

WITH_GENERATE = ("forward", "backward", "optimizer", "generate")
NO_SVD = r'"linalg_svd_\w+" not implemented for \'BFloat16\''
NO_NUMPY = r"Got unsupported ScalarType BFloat16"

# --------------------------------------------------------------------------------------------- op_not_implemented_for_dtype


def weighted_svd(dtype: torch.dtype = BF16) -> Broken:
    """Two bfloat16 adapters are combined by a singular value decomposition, in `dtype`, of their summed products."""
    model = lora(small_model("llama", BF16), ["q_proj"], autocast_adapter_dtype=False)
    model.add_adapter("second", model.peft_config["default"], autocast_adapter_dtype=False)

    def combine(trained: Any) -> Any:
        layer = trained.base_model.model.model.layers[0].self_attn.q_proj
        products = [layer.lora_B[name].weight @ layer.lora_A[name].weight for name in ("default", "second")]
        summed = 0.5 * products[0] + 0.5 * products[1]
        return torch.linalg.svd(summed.to(dtype), full_matrices=False)

    return Broken(model, tiny_batch("llama"), phases=WITH_GENERATE, generate=combine)


def extract_lora(dtype: torch.dtype = BF16) -> Broken:
    """mergekit's extraction: the difference of a fine-tuned weight and its base is decomposed in the file's dtype."""
    model = small_model("llama", BF16)
    base = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def extract(tuned: Any) -> Any:
        name = "model.layers.0.self_attn.q_proj.weight"
        u, s, v = torch.linalg.svd((tuned.get_parameter(name) - base[name]).to(dtype), full_matrices=False)
        return u[:, :4] * s[:4].sqrt(), v[:4]

    return Broken(model, tiny_batch("llama"), phases=WITH_GENERATE, generate=extract)


class Float8Linear(nn.Module):
    """A layer of an fp8 checkpoint: weights lie in float8, are cast for each product."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = nn.Parameter(layer.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
        self.bias = layer.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight.to(hidden.dtype), self.bias)


class WanBlock(nn.Module):
    """A video transformer's cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, latents: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        q, k, v = heads(self.q(latents)), heads(self.k(text)), heads(self.v(text))
        return latents + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def wan_fp8(merged: torch.dtype = torch.float8_e4m3fn) -> Broken:
    """Training runs; the hook that merges a LoRA for sampling adds its bfloat16 product to the weight in the current dtypes.

    Args:
        merged: dtype that the hook takes the weight in.
    """
    torch.manual_seed(0)
    model = WanBlock().to(BF16).requires_grad_(False)
    set_layers(model, ["q", "k", "v", "o"], lambda layer: RawLora(Float8Linear(layer), BF16))
    inputs = {"latents": normal(2, 16, HIDDEN, dtype=BF16), "text": normal(2, 8, HIDDEN, dtype=BF16)}

    def merge(trained: Any) -> Any:
        for layer in (trained.q, trained.k, trained.v, trained.o):
            weight = layer.base_layer.weight.to(merged)
            layer.base_layer.weight.data = weight + layer.lora_B.weight @ layer.lora_A.weight
        return trained(**inputs)

    return Broken(model, inputs, phases=WITH_GENERATE, generate=merge)


def perplexity_metric(dtype: torch.dtype = BF16) -> Broken:
    """A metric that takes a bfloat16 model's perplexities to numpy, in `dtype`."""

    def metric(model: Any) -> Any:
        batch = tiny_batch("llama")
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")
        return loss.mean(1).exp().to(dtype).cpu().numpy()

    model = lora(small_model("llama", BF16), ["q_proj"])
    return Broken(model, tiny_batch("llama"), phases=WITH_GENERATE, generate=metric)


def unlearning_metric(dtype: torch.dtype = BF16) -> Broken:
    """Evaluation of an unlearned Llama: probabilities of the answers, in `dtype`, to numpy."""

    def metric(model: Any) -> Any:
        batch = tiny_batch("llama")
        logprobs = model(input_ids=batch["input_ids"]).logits.log_softmax(-1)[:, :-1]
        answers = logprobs.gather(2, batch["labels"][:, 1:, None]).squeeze(2)
        return answers.mean(1).exp().to(dtype).numpy()

    model = small_model("llama", BF16)
    return Broken(model, tiny_batch("llama"), optimizer="sgd", phases=WITH_GENERATE, generate=metric)


# --------------------------------------------------------------------------------------------- grad_ckpt_recompute_dtype


class SharedHead(nn.Module):
    """Two regions under selective checkpointing that share one layer, as tied modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(HIDDEN, HIDDEN)
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        save = functools.partial(create_selective_checkpoint_contexts, _save_casts)
        for own in (self.first, self.second):
            region = functools.partial(_region, own, self.shared)
            hidden = checkpoint(region, hidden, use_reentrant=False, context_fn=save)
        return hidden.float().square().mean()


def _region(own: nn.Module, shared: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return shared(own(hidden).relu())


def _save_casts(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = (torch.ops.aten._to_copy.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective_checkpoint() -> Broken:
    """autocast's cache of cast weights: the second region hits it in the forward, and casts again when recomputed."""
    torch.manual_seed(0)
    return Broken(SharedHead(), {"hidden": normal(2, 16, HIDDEN)}, BF16)


def selective_checkpoint_uncached() -> Broken:
    """The same under an autocast that keeps no cast weights."""
    broken = selective_checkpoint()
    hidden = broken.inputs["hidden"]  # type: ignore[index]

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
            return model(hidden)

    return Broken(broken.model, loss)


class Recompute(torch.autograd.Function):
    """A checkpoint written by hand: `around` is what the recomputation runs under."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Any], around: Callable[[], Any], hidden: torch.Tensor
    ) -> torch.Tensor:
        ctx.run, ctx.around = run, around
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            return run(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), ctx.around():
            out = ctx.run(hidden)
        torch.autograd.backward(out, grad.to(out.dtype))
        return None, None, hidden.grad


class CheckpointedLayer(nn.Module):
    """A decoder layer under that checkpoint."""

    def __init__(self, layer: nn.Module, around: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.around = layer, around

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return Recompute.apply(self.layer, self.around, hidden)


def no_autocast() -> Any:
    """Autocast off, as it is in a backward."""
    return torch.autocast("cpu", enabled=False)


def float16_autocast() -> Any:
    """float16, the default of the old checkpoint, whatever the forward ran under."""
    return torch.autocast("cpu", dtype=FP16)


def checkpointed(around: Callable[[], Any]) -> Broken:
    """A bfloat16 decoder with float32 norms, trained under bfloat16 autocast with a checkpoint around each layer."""
    torch.manual_seed(0)
    model = Decoder([Block(Attention(), MLP()) for _ in range(2)]).to(BF16).requires_grad_(False)
    upcast_norms(model)
    model.embed_tokens.float().requires_grad_(True)
    set_layers(model, ["q_proj", "v_proj"], lambda layer: RawLora(layer, FP32))
    model.layers = nn.ModuleList(CheckpointedLayer(layer, around) for layer in model.layers)
    return Broken(model, {"input_ids": ids()}, BF16)


def bfloat16_autocast() -> Any:
    """What the forward ran under."""
    return torch.autocast("cpu", dtype=BF16)


def lost_autocast() -> Broken:
    """Transformer Engine's checkpoint: the recomputation knows nothing of the autocast around the forward."""
    return checkpointed(no_autocast)


def float16_recompute() -> Broken:
    """torch 1.10's checkpoint: autocast is switched on again, in its default dtype."""
    return checkpointed(float16_autocast)


def recomputed_dtypes(broken: Broken) -> str | None:
    """Which dtypes the same layer's products have in forward and recomputation."""
    seen: list[torch.dtype] = []
    layer = broken.model.layers[0].layer.self_attn.o_proj
    handle = layer.register_forward_hook(lambda _m, _a, out: seen.append(out.dtype))
    outcome = real_step(broken.model, broken.inputs, broken.autocast, phases=("forward", "backward"))
    handle.remove()
    assert outcome.error is None, outcome.error
    return f"computed in {seen[0]}, recomputed in {seen[1]}" if len(set(seen)) > 1 else None


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "peft-1052",
        weighted_svd,
        ("IST109",),
        r"lora_|crashes_operators\.py",
        crashes=NO_SVD,
        phase="generate",
        advice=functools.partial(weighted_svd, FP32),
        notes="Today's PEFT casts before it decomposes; the two lines that it did not are written here.",
    ),
    Scenario(
        "mergekit-304",
        extract_lora,
        ("IST109",),
        r"q_proj|crashes_operators\.py",
        crashes=NO_SVD,
        phase="generate",
        advice=functools.partial(extract_lora, FP32),
        notes="No training is needed: the decomposition runs on what a step has changed.",
    ),
    Scenario(
        "musubi-580",
        wan_fp8,
        ("IST109", "IST101"),
        r"base_layer|weight|crashes_operators\.py",
        crashes=r"Promotion for Float8 Types is not supported, attempted to promote Float8_e4m3fn and BFloat16",
        phase="generate",
        advice=functools.partial(wan_fp8, BF16),
    ),
    Scenario(
        "h2o-llmstudio-233",
        perplexity_metric,
        ("IST109",),
        r"lm_head|crashes_operators\.py|numpy",
        crashes=NO_NUMPY,
        phase="generate",
        advice=functools.partial(perplexity_metric, FP32),
    ),
    Scenario(
        "open-unlearning-156",
        unlearning_metric,
        ("IST109",),
        r"lm_head|crashes_operators\.py|numpy",
        crashes=NO_NUMPY,
        phase="generate",
        advice=functools.partial(unlearning_metric, FP32),
    ),
    Scenario(
        "pytorch-193338",
        selective_checkpoint,
        ("IST107",),
        r"recomputation raises",
        crashes=r"_to_copy\.default invocation index \d+ encountered during backward but not found in storage",
        phase="backward",
        advice=selective_checkpoint_uncached,
    ),
    Scenario(
        "te-791",
        lost_autocast,
        ("IST107",),
        r"norm|embed_tokens|autocast|crashes_operators\.py",
        crashes=matmul_error(FP32, BF16),
        phase="backward",
        notes="Transformer Engine needs a GPU; its checkpoint's fault is written by hand.",
    ),
    Scenario(
        "pytorch-71124",
        float16_recompute,
        ("IST107",),
        r"autocast|crashes_operators\.py",
        cost=recomputed_dtypes,
        notes="Today's torch keeps the dtype; the old checkpoint's fault is written by hand.",
    ),
)
LEFT_OUT: dict[str, str] = {}
