"""Peak memory that `isotype.check` foresees on fake tensors, of the model and of its folded form, beside what two others
count in the real step.

*Recorder* is the ledger of `isotype run`, which counts bytes of tensors alive as the preflight does; *allocator* shares
nothing with us: the peak of what torch's allocator handed out (torch.profiler), besides what was there before. What an
operator uses inside itself is in the allocator's figure only. *Folded* is what `isotype check` foresees without weights,
of equal layers once. `storage × checkpointing × path` of three models, and some more. Each case is two steps: forward, backward, AdamW. Small
random models of several architectures and storages, and SmolLM2-135M.

With `--device cuda` the step runs there, and *allocator* is the peak of torch's caching allocator.

Run: python benchmarks/memory.py [--device cuda] [--record] [CASE …]. Prints a table and one line of JSON; ends with 1 where a case is off by
more than five percent.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import peft
import torch
from torch.profiler import ProfilerActivity, profile

import isotype
import results as kept
from isotype.model.recompute import CHECKPOINTING, checkpoint_gradients
from isotype.precision.policy import PrecisionPolicy
from isotype.train.models import weightless_model

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.measured_step import measure_step

TOLERANCE = 0.05
ROWS, LENGTH = 2, 128

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
_MORE: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Gemma2Config": {"sliding_window": 64},
    "GptOssConfig": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    "Qwen3MoeConfig": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}


@dataclass(frozen=True)
class Case:
    """One set-up.

    Attributes:
        source: configuration class of a small random model, or what `isotype.load` takes.
        dtype, quantization: as `isotype.resolve_precision` takes them.
        lora: whether adapters are trained; else every parameter.
        checkpointing: whether activations are computed again in the backward.
        fused: whether LoRA layers are fused (`isotype.fuse`), without dense copies.
    """

    source: str
    dtype: str = "float32"
    quantization: str | None = None
    lora: bool = True
    checkpointing: bool = False
    fused: bool = False


def _products() -> dict[str, Case]:
    """Storage × checkpointing × {PEFT's path, fused} of three models."""
    storages: dict[str, tuple[str, str | None]] = {
        "fp32": ("float32", None),
        "bf16": ("bfloat16", None),
        "fp16": ("float16", None),
        "nf4": ("bfloat16", "nf4"),
        "fp4": ("bfloat16", "fp4"),
        "int8": ("bfloat16", "int8"),
    }
    return {
        f"{name} {storage}{', checkpointing' * checkpointing}{', fused' * fused}": Case(
            source, dtype, quantization, checkpointing=checkpointing, fused=fused
        )
        for name, source in (
            ("llama", "LlamaConfig"),
            ("gemma2", "Gemma2Config"),
            ("smollm2", "embedded:smollm2"),
        )
        for storage, (dtype, quantization) in storages.items()
        for checkpointing in (False, True)
        for fused in (False, True)
    }


CASES = _products() | {
    "llama full": Case("LlamaConfig", lora=False),
    "llama full, checkpointing": Case("LlamaConfig", lora=False, checkpointing=True),
    "llama LoRA": Case("LlamaConfig"),
    "llama LoRA bf16": Case("LlamaConfig", "bfloat16"),
    "llama LoRA, checkpointing": Case("LlamaConfig", checkpointing=True),
    "llama LoRA nf4": Case("LlamaConfig", quantization="nf4"),
    "llama LoRA int8": Case("LlamaConfig", quantization="int8"),
    "gemma2 full": Case("Gemma2Config", lora=False),
    "gemma2 LoRA": Case("Gemma2Config"),
    "gpt-oss LoRA": Case("GptOssConfig"),
    "qwen3-moe LoRA": Case("Qwen3MoeConfig"),
    "SmolLM2 LoRA": Case("embedded:smollm2"),
    "SmolLM2 nf4": Case("embedded:smollm2", quantization="nf4"),
    "SmolLM2 nf4, checkpointing": Case("embedded:smollm2", quantization="nf4", checkpointing=True),
}


def build(case: Case, directory: Path, device: str) -> tuple[Any, PrecisionPolicy]:
    """The model of a case, ready to be trained, and its policy."""
    import transformers

    source = case.source
    if source in _MORE:
        torch.manual_seed(0)
        config = getattr(transformers, source)(**_SIZES, **_MORE[source])
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        source = str(directory)
    policy = isotype.resolve_precision(
        source,
        dtype=case.dtype,
        quantization=case.quantization,
        device=device,
        trainable="lora" if case.lora else "full",
    )
    model = isotype.load(source, policy)
    if case.lora:
        model = isotype.add_lora(model, policy, r=8, target_modules="all-linear")
    if case.checkpointing:
        checkpoint_gradients(model, CHECKPOINTING, adapters=case.lora)
    model.config.use_cache = False
    if case.fused:
        isotype.fuse(model, budget=0)
    return model.train(), policy


def foresee_folded(case: Case, model: Any, policy: PrecisionPolicy, batch: Any, device: str) -> int:
    """Bytes that a check foresees without weights, of equal layers once."""
    # Of a model that is fused already, the config names isotype's attention.
    config = type(model.config).from_dict(model.config.to_dict())
    lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if case.lora else None
    blank: Any = weightless_model(config, policy, lora=lora, fold=True)
    blank.config.use_cache = False
    if case.checkpointing:
        checkpoint_gradients(blank, CHECKPOINTING, adapters=case.lora)
    if case.fused:
        fusion = isotype.fuse(blank, budget=0, device=torch.device(device).type)
        assert not fusion.unseen, fusion.unseen
    report = isotype.check(blank.train(), batch, policy, device, learning_rate=1e-4, verify=False)
    return report.memory.peak


def measure(case: Case, device: str) -> dict[str, Any]:
    """Bytes at the peak, foreseen and measured, with the phases."""
    model, policy, batch = _ready(case, device)
    foreseen = isotype.check(model, batch, device=device, learning_rate=1e-4, verify=False)
    folded = foresee_folded(case, model, policy, batch, device)
    with measure_step(model, batch) as measured:
        _step(model, policy, batch)
    real = measured.memory
    before = sum(real.phases["load"].values())
    allocated = before + _allocated(*_ready(case, device))
    return {
        "foreseen": foreseen.memory.peak,
        "folded": folded,
        "error_folded": folded / allocated - 1,
        "measured": real.peak,
        "allocated": allocated,
        "error": foreseen.memory.peak / real.peak - 1,
        "error_allocated": foreseen.memory.peak / allocated - 1,
        "phase": real.peak_phase,
        "foreseen_phase": foreseen.memory.peak_phase,
        "kinds": {
            phase: {kind: [foreseen.memory.phases[phase].get(kind, 0), size] for kind, size in kinds.items()}
            for phase, kinds in real.phases.items()
            if phase in foreseen.memory.phases
        },
        "not_traced": None if foreseen.complete else str(foreseen.trace.failure),
    }


def _ready(case: Case, device: str) -> tuple[Any, PrecisionPolicy, dict[str, torch.Tensor]]:
    with tempfile.TemporaryDirectory() as directory:
        model, policy = build(case, Path(directory), device)
    ids = torch.randint(1, 512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)).to(device)
    return model, policy, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _step(model: Any, policy: PrecisionPolicy, batch: dict[str, torch.Tensor]) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(2):  # from the second on the optimizer's states are there
        with torch.autocast(
            batch["input_ids"].device.type, dtype=policy.autocast, enabled=policy.autocast is not None
        ):
            loss = model(**batch).loss
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()


def _allocated(model: Any, policy: PrecisionPolicy, batch: dict[str, torch.Tensor]) -> int:
    """Peak of the bytes that torch's allocator hands out in a step."""
    if (device := batch["input_ids"].device).type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        _step(model, policy, batch)
        return int(torch.accelerator.max_memory_allocated(device) - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _step(model, policy, batch)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [int(event.nbytes()) for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(sizes))


def main() -> int:
    """Run the cases, all by default, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], metavar="CASE")
    parser.add_argument("--device", default="cpu")
    asked = kept.parsed(parser)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results: dict[str, Any] = {}
    print(
        f"{'case':<34} {'foreseen':>12} {'folded':>12} {'error':>8} {'recorder':>12} {'error':>8} "
        f"{'allocator':>12} {'error':>8}   peak in"
    )
    for name in asked.cases or CASES:
        row = results[name] = measure(CASES[name], asked.device)
        print(
            f"{name:<34} {_mib(row['foreseen'])} {_mib(row['folded'])} {100 * row['error_folded']:>+7.2f}% "
            f"{_mib(row['measured'])} {100 * row['error']:>+7.2f}% "
            f"{_mib(row['allocated'])} {100 * row['error_allocated']:>+7.2f}%   {row['phase']}",
            flush=True,
        )
        if asked.record:
            keep(name, row)
    worst = max(
        abs(row[error]) for row in results.values() for error in ("error", "error_allocated", "error_folded")
    )
    print(f"largest error {100 * worst:.2f} %, tolerance {100 * TOLERANCE:.0f} %")
    print(json.dumps(results))
    return int(worst > TOLERANCE)


def keep(name: str, row: dict[str, Any]) -> None:
    """Add a case to the file of results: bytes in MiB, errors as shares."""
    sizes = {part: row[part] / 2**20 for part in ("foreseen", "folded", "measured", "allocated")}
    errors = {"error": "", "error_folded": "", "error_allocated": "", "phase": ""}
    units = dict.fromkeys(sizes, "MiB") | errors
    kept.append(f"memory/{name}", kept.measured({**row, **sizes}, **units))


def _mib(size: int) -> str:
    return f"{size / 2**20:>8.2f} MiB"


if __name__ == "__main__":
    sys.exit(main())
