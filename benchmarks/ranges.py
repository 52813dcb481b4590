"""float16 on a real model whose values were moved: what plain float16 does, what `check` says, what the policy chooses.

Each row rescales SmolLM2-135M so that its function stays the same in exact arithmetic and its values do not:

- residual stream: embedding, `o_proj` and `down_proj` times 2^k (the final norm cancels it; its epsilon does not count);
- gated product: `up_proj` times 2^k, `down_proj` times 2^-k;
- value: `v_proj` times 2^k, `o_proj` times 2^-k;
- query: `q_proj` times 2^k, `k_proj` times 2^-k;
- gradients: the loss times 2^-k, with the optimizer's epsilon scaled alike.

*plain* is the model in float16 throughout with LoRA adapters in float32 under autocast: the step runs, or the first
module whose result is not finite. *foretold* is what `isotype.check` says of that set-up, with the module. *choice* is
the policy that `isotype.resolve_precision` decides from `isotype.measure_ranges`; *loss* the largest deviation of its loss
from float32's over the steps, *memory* the peak that `check` foresees for it over that of plain float16.

Matmuls in float16 are computed as a GPU's tensor cores do, sums in float32 that are rounded once (`--native`: by this
CPU's own float16 kernels, which are slow where it has no such instructions).

Run: python benchmarks/ranges.py [--places residual,gated,…] [--exponents 0,2,…] [--steps 10] [--tokens 64] [--native]
Exits with 1 where foretold and plain differ, or a loss is off by more than 0.5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import isotype
import results
from isotype.core.names import base_name
from isotype.model.enforce import enforce_model
from isotype.precision.policy import PrecisionPolicy
from isotype.report.check.report import Report

LIMIT = 0.005
EXPONENTS = {
    "residual": (1, 2, 6),
    "gated": (4, 8),
    "value": (4, 14),
    "query": (4, 14),
    "gradients": (8, 24),
}
_BLOCKS: dict[str, tuple[tuple[str, int], ...]] = {
    "residual": (("self_attn.o_proj", 1), ("mlp.down_proj", 1)),
    "gated": (("mlp.up_proj", 1), ("mlp.down_proj", -1)),
    "value": (("self_attn.v_proj", 1), ("self_attn.o_proj", -1)),
    "query": (("self_attn.q_proj", 1), ("self_attn.k_proj", -1)),
    "gradients": (),
}


class TensorCores(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """float16 matmuls whose sums are float32, rounded to float16 once."""

    _OPS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._OPS and args[-1].dtype == torch.float16:
            return func(
                *(a.float() if isinstance(a, torch.Tensor) else a for a in args), **(kwargs or {})
            ).half()
        return func(*args, **(kwargs or {}))


def rescaled(model: Any, place: str, k: int) -> Any:
    """A copy of the model with the same function and other values."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        if place == "residual":
            other.lm_head.weight = nn.Parameter(other.lm_head.weight.clone(), requires_grad=False)
            other.config.tie_word_embeddings = False
            other.model.embed_tokens.weight.mul_(2.0**k)
        for layer in other.model.layers:
            for name, sign in _BLOCKS[place]:
                layer.get_submodule(name).weight.mul_(2.0 ** (sign * k))
    if place == "gradients":
        whole = other.loss_function
        other.loss_function = lambda *args, **kwargs: whole(*args, **kwargs) * 2.0**-k
    return other


def with_adapters(model: Any, dtype: torch.dtype, policy: PrecisionPolicy | None) -> Any:
    """LoRA on a copy of the model: under a policy, or with frozen weights in `dtype` and float32 adapters."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = copy.deepcopy(model)
    if policy is not None:
        enforce_model(base, policy)
        return isotype.add_lora(base, policy, r=8, target_modules="all-linear")
    return get_peft_model(base.to(dtype), LoraConfig(r=8, target_modules="all-linear"))


@dataclass
class Run:
    losses: list[float]
    skipped: int
    seconds: float


def train(
    model: Any, batches: list[dict[str, Any]], low: bool, scale: float, epsilon: float, cores: Any
) -> Run:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, eps=epsilon)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=low)
    losses, skipped, start = [], 0, time.perf_counter()
    for batch in batches:
        with cores():
            with torch.autocast("cpu", torch.float16, enabled=low):
                loss = model(**batch).loss
            scaler.scale(loss).backward()
        losses.append(loss.item())
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += low and scaler.get_scale() < before
        optimizer.zero_grad()
    return Run(losses, skipped, time.perf_counter() - start)


class FirstNotFinite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the innermost module of the first operator whose result is not finite, whatever its operands are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.module: str | None = None
        self._inside = [""]
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name))
            module.register_forward_hook(self._leave)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) else result
        known = (
            self.module is not None or not isinstance(first, torch.Tensor) or not first.is_floating_point()
        )
        if not known and not torch.isfinite(first).all():
            self.module = base_name(self._inside[-1])
        return result


def first_not_finite(model: Any, batch: dict[str, Any], cores: Any) -> str | None:
    """The module of the first operator whose result is not finite; None where the loss is finite."""
    watched = copy.deepcopy(model)
    with torch.no_grad(), cores(), FirstNotFinite(watched) as first, torch.autocast("cpu", torch.float16):
        loss = watched(**batch).loss
    return None if torch.isfinite(loss) else first.module


def foretold(report: Report) -> str | None:
    found = [finding for finding in report.errors if finding.code == "IST809"]
    return base_name(found[0].module) if found else None


def batches_of(tokens: int, count: int) -> list[dict[str, Any]]:
    """Rows of the embedded text through SmolLM2's own tokenizer."""
    from isotype.checkpoint.checkpoint import open_checkpoint
    from isotype.ranges.measure import passages

    tokenizer: Any = open_checkpoint("embedded:smollm2").tokenizer()
    ids = tokenizer("\n".join(passages()), return_tensors="pt")["input_ids"][0]
    rows = ids[: ids.numel() // tokens * tokens].view(-1, tokens)
    return [
        {"input_ids": rows[at % len(rows)][None], "labels": rows[at % len(rows)][None]} for at in range(count)
    ]


def cases(places: list[str], exponents: list[int] | None) -> Iterator[tuple[str, int]]:
    for place in places:
        for k in exponents or EXPONENTS[place]:
            yield place, k


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--places", type=lambda text: text.split(","), default=list(EXPONENTS))
    parser.add_argument("--exponents", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--native", action="store_true")
    options = results.parsed(parser, "steps", "tokens", "native")
    warnings.simplefilter("ignore")
    cores = contextlib.nullcontext if options.native else TensorCores
    policy32 = isotype.resolve_precision("embedded:smollm2", "float32", device="cpu")
    model = isotype.load("embedded:smollm2", policy32)
    data = batches_of(options.tokens, options.steps)
    print(
        f"{'place':<10} {'k':>3}  {'plain float16':<36} {'foretold':<36} {'choice':<30} {'loss':>8} {'skips':>5} "
        f"{'memory':>6} {'time':>5}"
    )
    wrong = 0
    for place, k in cases(options.places, options.exponents):
        changed = rescaled(model, place, k)
        ranges = isotype.measure_ranges(changed, data[0], progress=False)
        policy = isotype.resolve_precision(changed, "float16", device="t4", ranges=ranges)
        plain = with_adapters(changed, torch.float16, None)
        report = isotype.check(
            plain, data[0], device="t4", autocast="float16", scaler=True, ranges=ranges, verify=False
        )
        real, said = first_not_finite(plain, data[0], cores), foretold(report)
        epsilon = 1e-8 * (2.0**-k if place == "gradients" else 1.0)
        reference = train(
            with_adapters(changed, torch.float32, None), data, False, 1.0, epsilon, contextlib.nullcontext
        )
        ours_model = with_adapters(changed, torch.float16, policy)
        chosen = isotype.check(ours_model, data[0], policy, device="t4", ranges=ranges, verify=False)
        ours = train(ours_model, data, True, policy.loss_scale, epsilon, cores)
        off = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, reference.losses, strict=True))
        off = math.inf if math.isnan(off) else off
        choice = ("float32 stream" if policy.wide_residual else "float16") + (
            f", {len(policy.exceptions)} exceptions" if policy.exceptions else ""
        )
        wrong += real != said or off > LIMIT or bool(foretold(chosen))
        print(
            f"{place:<10} {k:>3}  {real or 'runs':<36} {said or 'runs':<36} {choice:<30} {off:>8.3%} {ours.skipped:>5} "
            f"{chosen.memory.peak / report.memory.peak:>6.2f} {ours.seconds / reference.seconds:>5.2f}",
            flush=True,
        )
        if options.record:
            row = {"real": real or "runs", "foretold": said or "runs", "choice": choice, "loss": off}
            row |= {"skips": ours.skipped, "memory": chosen.memory.peak / report.memory.peak}
            row["time"] = ours.seconds / reference.seconds
            results.append(f"ranges/{place}, {k}", results.measured(row, **dict.fromkeys(row, "")))
    print(
        f"{wrong} rows are wrong" if wrong else "every row as foretold, every loss within 0.5 % of float32's"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
