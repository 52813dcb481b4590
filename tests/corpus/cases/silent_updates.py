"""Updates that the trainable parameters' dtype cannot hold: weights stand still and no library says a word."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.corpus.cases.crashes_parts import BF16, lora, normal
from tests.corpus.cases.training_parts import after_training, full, loaded, trained, unmoved
from tests.corpus.scenario import Broken, Scenario
from tests.models import HIDDEN, tiny_batch, tiny_config


def lora_in_model_dtype() -> Broken:
    """verl-omni's LoRA: adapters in `model_dtype`, and with them both moments of Adam."""
    model = after_training(lora(loaded("qwen3", BF16), autocast_adapter_dtype=False))
    return Broken(model, tiny_batch("qwen3"), learning_rate=3e-6)


def optimizer_state(broken: Broken) -> str | None:
    """The dtype of Adam's moments, beside the values that do not move."""
    low = [name for name, parameter in trained(broken.model).items() if parameter.dtype == BF16]
    still = unmoved("lora_")(broken)
    return f"Adam keeps bfloat16 moments for {len(low)} adapters; {still}" if low and still else None


class SingLora(nn.Module):
    """SingLoRA on one layer: `W + u(t) * alpha / r * A A^T`, where `u` rises from 0 to 1 over the ramp-up steps."""

    def __init__(self, base: nn.Linear, step: int, ramp_up: int, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.A = nn.Parameter(torch.empty(base.out_features, rank, dtype=base.weight.dtype))
        nn.init.kaiming_uniform_(self.A, a=5**0.5)
        self.scaling = min(step / ramp_up, 1.0) * 2.0

    def weight(self) -> torch.Tensor:
        """The adapted weight."""
        return self.base_layer.weight + self.scaling * (self.A @ self.A.T)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight().to(hidden.dtype))


class SingLoraModel(nn.Module):
    """Two adapted layers and a squared error."""

    def __init__(self, dtype: torch.dtype, step: int, ramp_up: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Linear(HIDDEN, HIDDEN, False, dtype=dtype) for _ in range(2))
        self.layers = nn.ModuleList(SingLora(layer, step, ramp_up) for layer in layers)

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return F.mse_loss(hidden.float(), target.float())


def singlora_at_the_start() -> Broken:
    """The first step of a ramp-up over 1000 steps in bfloat16."""
    inputs = {"hidden": normal(2, 8, HIDDEN, dtype=BF16), "target": normal(2, 8, HIDDEN, dtype=BF16, seed=5)}
    return Broken(SingLoraModel(BF16, 1, 1000), inputs, learning_rate=1e-5)


def vanished_deltas(broken: Broken) -> str | None:
    """Entries of the adapted weights that bfloat16 leaves as the base has them, and values that do not move."""
    layers = [module for module in broken.model.modules() if isinstance(module, SingLora)]
    same = sum(int((layer.weight() == layer.base_layer.weight).sum()) for layer in layers)
    still = unmoved("A")(broken)
    total = sum(layer.base_layer.weight.numel() for layer in layers)
    return f"the adapter leaves {same / total:.0%} of the weights unchanged; {still}" if still else None


def onetrainer_adam() -> Broken:
    """OneTrainer in bfloat16: Adam's decay multiplies each weight by `1 - lr * decay`, which rounds to one."""
    return full("llama", BF16, 1e-5)


def decay_is_lost(broken: Broken, decay: float = 0.01) -> str | None:
    """Values that AdamW's weight decay alone (zero gradients) does not change."""
    parameters = [nn.Parameter(p.detach().clone()) for p in trained(copy.deepcopy(broken.model)).values()]
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    # At the learning rate of the report, float32 decays each weight by one part in a million.
    torch.optim.AdamW(parameters, lr=1e-4, weight_decay=decay).step()
    same = sum(int((a == b).sum()) for a, b in zip(parameters, before, strict=True))
    count = sum(parameter.numel() for parameter in parameters)
    return f"weight decay leaves {same / count:.0%} of the values unchanged" if same > 0.5 * count else None


def distilled_video_model() -> Broken:
    """CausVid: the generator's weights are cast to bfloat16 before FSDP wraps them, and trained at 2e-6."""
    return full("gpt2", BF16, 2e-6)


def full_bf16() -> Broken:
    """Full fine-tuning in bfloat16 at 1e-5, as torchao's stochastic rounding was written for."""
    return full("qwen3", BF16, 1e-5)


def norms_in_bf16() -> Broken:
    """Full fine-tuning of Qwen3 in bfloat16 at 1e-4: the norms' weights lie near one, where bfloat16 is coarsest."""
    return full("qwen3", BF16, 1e-4)


def rl_logprobs() -> Broken:
    """Log-probabilities of a bfloat16 Pythia for RL: `log_softmax` over the vocabulary in bfloat16."""
    import transformers

    config = tiny_config("GPTNeoXConfig", vocab_size=512)
    torch.manual_seed(0)
    model = lora(transformers.GPTNeoXForCausalLM(config).to(BF16), ["query_key_value"])
    return Broken(model, logprob_loss(lambda logits: logits), BF16)


def rl_logprobs_in_float32() -> Broken:
    """The same, the logits cast to float32 before the log-softmax."""
    broken = rl_logprobs()
    broken.inputs = logprob_loss(lambda logits: logits.float())
    return broken


def logprob_loss(
    cast: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[nn.Module], torch.Tensor]:
    """A policy-gradient loss: the mean log-probability of the tokens, autocast off where it is computed."""
    ids = tiny_batch("llama")["input_ids"]

    def loss(model: nn.Module) -> torch.Tensor:
        logits = model(input_ids=ids).logits
        with torch.autocast("cpu", enabled=False):
            logprobs = cast(logits).log_softmax(-1)
        return -logprobs[:, :-1].gather(-1, ids[:, 1:, None]).mean()

    return loss


def logprob_error(broken: Broken) -> str | None:
    """How far the log-probabilities of the loss are from those of the same logits in float64."""
    seen: list[torch.Tensor] = []
    handle = broken.model.register_forward_hook(lambda _, args, out: seen.append(out.logits.detach()))
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        loss = broken.inputs(broken.model)  # type: ignore[operator]
    handle.remove()
    ids = tiny_batch("llama")["input_ids"]
    exact = -seen[0].double().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).mean()
    error = abs(float(loss) - float(exact))
    return f"the mean log-probability is off by {error:.1e}" if error > 1e-4 else None


def _still(
    case: str, build: Callable[[], Broken], cause: str, cost: Callable[[Broken], str | None]
) -> Scenario:
    return Scenario(case, build, ("IST801",), cause, cost=cost)


SCENARIOS: tuple[Scenario, ...] = (
    _still("verl-omni-73", lora_in_model_dtype, "lora_A", optimizer_state),
    _still("singlora-6", singlora_at_the_start, r"layers\.\*?\d*\.?A|A", vanished_deltas),
    _still("onetrainer-996", onetrainer_adam, "embed_tokens|norm|proj", decay_is_lost),
    _still("causvid-19", distilled_video_model, "wte|ln_|c_attn", unmoved()),
    _still("ao-1124", full_bf16, "embed_tokens|proj|norm", unmoved()),
    _still("unsloth-zoo-680", norms_in_bf16, "norm", unmoved("norm")),
    Scenario(
        "transformers-31267",
        rl_logprobs,
        ("IST805",),
        "log_softmax|bfloat16",
        cost=logprob_error,
        advice=rl_logprobs_in_float32,
        notes="The report has no accepted cause; what is shown is the part of the gap that the reduction's dtype makes.",
    ),
)

LEFT_OUT: dict[str, str] = {}
