"""TRL's trainers on a tiny model: fused and with the PrecisionCallback, beside the same trainers without either.

Both runs begin with the same weights, rows and random states, and take a few steps of plain SGD (Adam divides by the size of a
gradient, and would make a difference of rounding as large as an update). Compared are the losses of each step and the trained
adapters. GRPO and RLOO sample their answers: the same numbers are drawn, so that a difference of logits shows as other tokens.
"""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NAMES = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "grpo": "GRPO", "rloo": "RLOO", "reward": "Reward"}
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 2},
}
_LORA = ("use_dora",)
_STEPS = 3
_LOSS, _ADAPTERS = 1e-4, 1e-3
"""The losses as of one step (`tests.peers.TOLERANCE`); adapters have their changes of three steps behind them, each of a gradient
that cancels to a tenth of its terms."""


@dataclass(frozen=True)
class Ended:
    """How one training ended: its losses and by how much the adapters changed, or the error."""

    losses: tuple[float, ...] = ()
    changes: Any = None
    error: str = ""


@dataclass(frozen=True)
class Row:
    """One trainer in one variant: the largest relative difference of a loss, that of the adapters' changes, or the error."""

    method: str
    variant: str
    loss: float = 0.0
    adapters: float = 0.0
    verdict: str = "same"
    detail: str = ""


def run(methods: Sequence[str], jobs: int) -> list[Row]:
    """Every trainer in every variant."""
    print(f"\n{'trainer':<10}{'variant':<16}{'verdict':>9}{'loss':>10}{'adapters':>10}")
    rows = []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for row in pool.imap(_compared, [(method, variant) for method in methods for variant in VARIANTS]):
            rows.append(row)
            figures = f"{row.loss:>10.1e}{row.adapters:>10.1e}   {row.detail}"
            print(f"{row.method:<10}{row.variant:<16}{row.verdict:>9}{figures}".rstrip(), flush=True)
    return rows


def _compared(case: tuple[str, str]) -> Row:
    method, variant = case
    with tempfile.TemporaryDirectory() as folder:
        plain, fused = (
            _trained(method, VARIANTS[variant], Path(folder), fuse=fuse) for fuse in (False, True)
        )
    if plain.error or fused.error:
        verdict = "skipped" if plain.error else "raises"
        return Row(method, variant, verdict=verdict, detail=plain.error or fused.error)
    pairs = zip(plain.losses, fused.losses, strict=True)
    loss = max(abs(one - other) / max(abs(one), 1e-2) for one, other in pairs)
    adapters = float((plain.changes - fused.changes).norm() / plain.changes.norm())
    verdict = "same" if loss <= _LOSS and adapters <= _ADAPTERS and len(plain.losses) == _STEPS else "differs"
    return Row(method, variant, loss, adapters, verdict)


def _trained(method: str, settings: dict[str, Any], folder: Path, *, fuse: bool) -> Ended:
    try:
        with _quiet():
            return _run(method, settings, folder, fuse=fuse)
    except Exception as error:  # noqa: BLE001 - how a trainer ends is what is asked
        return Ended(error=f"{type(error).__name__}: {error}".partition("\n")[0][:200])


def _run(method: str, settings: dict[str, Any], folder: Path, *, fuse: bool) -> Ended:
    import transformers
    import trl
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from tests.train.tiny import reward_by_words, rows, save_chat_model

    import isotype

    transformers.set_seed(0)
    base = save_chat_model(folder / "base", layers=2)
    head = (
        transformers.AutoModelForSequenceClassification
        if method == "reward"
        else transformers.AutoModelForCausalLM
    )
    kind = "SEQ_CLS" if method == "reward" else "CAUSAL_LM"
    model = head.from_pretrained(base, **({"num_labels": 1} if method == "reward" else {}))
    lora = {name: value for name, value in settings.items() if name in _LORA}
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type=kind, **lora))
    _move(adapted)
    arguments = {name: value for name, value in settings.items() if name not in _LORA}
    config = getattr(trl, f"{NAMES[method]}Config")(
        output_dir=str(folder / "out"), max_steps=_STEPS, per_device_train_batch_size=4, logging_steps=1, optim="sgd",
        learning_rate=0.1, report_to=[], save_strategy="no", use_cpu=True, bf16=False, seed=3, disable_tqdm=True,
        **{"gradient_checkpointing": False, **arguments, **_own(method)},
    )  # fmt: skip
    rewards = {"reward_funcs": reward_by_words} if method in ("grpo", "rloo") else {}
    trainer = getattr(trl, f"{NAMES[method]}Trainer")(
        model=adapted,
        args=config,
        train_dataset=Dataset.from_list(rows(method, 24)),
        processing_class=transformers.AutoTokenizer.from_pretrained(base),
        callbacks=[isotype.PrecisionCallback()] if fuse else [],
        **rewards,
    )
    if fuse:
        assert isotype.fuse(trainer.model).fused
    former = _adapters(trainer.model)
    transformers.set_seed(4)
    trainer.train()
    losses = tuple(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return Ended(losses, _adapters(trainer.model) - former)


def _adapters(model: Any) -> torch.Tensor:
    return torch.cat([each.detach().double().flatten() for each in model.parameters() if each.requires_grad])


def _own(method: str) -> dict[str, Any]:
    return {"max_completion_length": 8, "num_generations": 4} if method in ("grpo", "rloo") else {}


@torch.no_grad()
def _move(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    threads, disabled = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        torch.set_num_threads(threads)
