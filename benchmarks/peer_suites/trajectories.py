"""`isotype sft …` beside TRL's trainer with the same arguments, in float32, step by step; and beside TRL's trainer in float64.

Both begin with the same weights, adapters, rows and random states, and take the same steps. Compared are the training loss and the gradient
norm of each step and every held-back loss, as they are, without a tolerance relative to them. TRL's trainer in float64 says which of two
that differ is nearer to the exact value: label smoothing sums the vocabulary in float32 in TRL, which a vocabulary of 49,152 words shows.

Its float64 ends where transformers casts to float32 by name (norms, rotary angles, the softmax of attention): 1e-7 of a value.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peer_suites.trainers import NAMES, _quiet

TOLERANCE = 1e-5
_STEPS, _ROWS, _SEED = 10, 24, 3
_COMMON = """--dtype float32 --bf16 False --fp16 False --max_steps {steps} --logging_steps 1 --save_strategy no --report_to none --seed 3
    --learning_rate 1e-3 --lr_scheduler_type constant --per_device_train_batch_size 4 --gradient_checkpointing False --use_peft True
    --lora_r 4 --lora_alpha 8 --lora_dropout 0 --lora_target_modules all-linear --max_grad_norm 1e9 --use_cpu True --disable_tqdm True"""
_ANSWERS = "--max_completion_length 8 --num_generations 4 --beta 0.1"
CASES: dict[str, tuple[str, str]] = {
    "LoRA": ("sft", ""),
    "DoRA": ("sft", "--use_dora True"),
    "rsLoRA": ("sft", "--use_rslora True"),
    "packing": ("sft", "--packing True --max_length 64"),
    "checkpointing": ("sft", "--gradient_checkpointing True"),
    "accumulation 1 x 4": ("sft", "--per_device_train_batch_size 1 --gradient_accumulation_steps 4"),
    "accumulation 4 x 1": ("sft", "--per_device_train_batch_size 4 --gradient_accumulation_steps 1"),
    "partial last accumulation": ("sft", "--gradient_accumulation_steps 4 --num_train_epochs 3 --max_steps -1"),
    "cosine + warmup + decay + clipping": (
        "sft", "--lr_scheduler_type cosine --warmup_steps 3 --weight_decay 0.1 --max_grad_norm 0.05",
    ),
    "weight decay": ("sft", "--weight_decay 0.3 --learning_rate 1e-2"),
    "all tokens": ("sft", "--completion_only_loss False"),
    "dft": ("sft", "--loss_type dft"),
    "full training": ("sft", "--use_peft False --learning_rate 1e-4"),
    "NEFTune": ("sft", "--neftune_noise_alpha 5"),
    "NEFTune + accumulation": (
        "sft", "--neftune_noise_alpha 5 --per_device_train_batch_size 2 --gradient_accumulation_steps 2",
    ),
    "NEFTune + packing": ("sft", "--neftune_noise_alpha 5 --packing True --max_length 64"),
    "NEFTune + padding-free": ("sft", "--neftune_noise_alpha 5 --padding_free True --max_length None"),
    "padding-free": ("sft", "--padding_free True --max_length None"),
    "label smoothing": ("sft", "--label_smoothing_factor 0.1"),
    "evaluation": ("sft", "--eval_strategy steps --eval_steps 4 --per_device_eval_batch_size 3 --eval_on_start True"),
    "dpo sigmoid": ("dpo", "--loss_type sigmoid"),
    "dpo robust": ("dpo", "--loss_type robust --label_smoothing 0.1"),
    "dpo ipo": ("dpo", "--loss_type ipo"),
    "dpo + NEFTune": ("dpo", "--neftune_noise_alpha 5"),
    "dpo + evaluation": ("dpo", "--eval_strategy steps --eval_steps 4 --per_device_eval_batch_size 3"),
    "kto": ("kto", "--eval_strategy steps --eval_steps 4 --per_device_eval_batch_size 3"),
    "grpo": ("grpo", _ANSWERS),
    "grpo + reused generations": ("grpo", f"{_ANSWERS} --num_iterations 2 --gradient_accumulation_steps 2"),
    "grpo + dr_grpo": ("grpo", f"{_ANSWERS} --loss_type dr_grpo"),
    "grpo + sequences": ("grpo", f"{_ANSWERS} --importance_sampling_level sequence --num_iterations 2"),
    "rloo": ("rloo", _ANSWERS),
    "reward": ("reward", "--eval_strategy steps --eval_steps 4 --per_device_eval_batch_size 3"),
}  # fmt: skip
"""What differs from `_COMMON`, by name."""
_VOCABULARY = {"label smoothing": 49_152}
"""Words of a tiny model that is to have more than its tokenizer."""


@dataclass(frozen=True)
class Course:
    """The values of one training by step: losses, gradient norms, held-back losses; or the error that ended it."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    held: tuple[float, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Row:
    """One set-up: by how much isotype's losses, norms and held-back losses differ from TRL's, and both losses from TRL's in float64.

    Attributes:
        loss, norm, held: the largest difference from TRL in float32; NaN where there is nothing to compare.
        ours64, theirs64: the largest difference of a loss, training or held-back, from TRL in float64.
    """

    name: str
    loss: float = math.nan
    norm: float = math.nan
    held: float = math.nan
    ours64: float = math.nan
    theirs64: float = math.nan
    verdict: str = "same"
    detail: str = field(default="", compare=False)


def run(names: Sequence[str], model: str | None = None, steps: int = _STEPS) -> list[Row]:
    """Every case of `names`, on a tiny Llama or on `model` (a folder)."""
    print(
        f"\n{'set-up':<32}{'verdict':>9}{'loss':>10}{'norm':>10}{'held-back':>11}{'to float64':>12}{'TRL':>10}"
    )
    rows = []
    for name in names:
        rows.append(row := compared(name, model, steps))
        figures = (row.loss, row.norm, row.held, row.ours64, row.theirs64)
        shown = ["" if math.isnan(each) else f"{each:.1e}" for each in figures]
        line = "".join(f"{each:>{width}}" for each, width in zip(shown, (10, 10, 11, 12, 10), strict=True))
        print(f"{row.name:<32}{row.verdict:>9}{line}   {row.detail}".rstrip(), flush=True)
    return rows


def compared(name: str, model: str | None = None, steps: int = _STEPS) -> Row:
    """One case, trained three times."""
    method, flags = CASES[name]
    with tempfile.TemporaryDirectory() as folder, _quiet():
        root = Path(folder)
        base, data = _inputs(root, method, model, _VOCABULARY.get(name))
        argv = [*_merged(_COMMON.format(steps=steps), flags)]
        argv += ["--model_name_or_path", str(base), "--dataset_name", str(data)]
        ours = _ended(_ours, method, [*argv, "--output_dir", str(root / "ours")])
        theirs = _ended(_theirs, method, [*argv, "--output_dir", str(root / "theirs")], torch.float32)
        # Noise that is drawn in float64 is another noise.
        drawn = "neftune" in flags
        exact = (
            Course()
            if drawn
            else _ended(_theirs, method, [*argv, "--output_dir", str(root / "exact")], torch.float64)
        )
    error = ours.error or theirs.error or exact.error
    if error:
        return Row(name, verdict="raises", detail=error)
    loss, norm, held = (
        _apart(getattr(ours, each), getattr(theirs, each)) for each in ("losses", "norms", "held")
    )
    far, theirs_far = (_apart(each.losses + each.held, exact.losses + exact.held) for each in (ours, theirs))
    counts = (len(ours.losses), len(ours.held)) == (len(theirs.losses), len(theirs.held))
    verdict, detail = "differs", ""
    if counts and loss <= TOLERANCE and not held > TOLERANCE:
        verdict = "same"
    elif counts and far < min(TOLERANCE, theirs_far):
        verdict, detail = "nearer", "TRL is farther from float64 than isotype"
    return Row(name, loss, norm, held, far, theirs_far, verdict, detail)


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(one, other, strict=False)), default=math.nan)


def _merged(common: str, more: str) -> list[str]:
    """The flags of both, of `more` where both have one."""
    known: dict[str, str] = {}
    for words in (common.split(), more.split()):
        known.update(zip(words[::2], words[1::2], strict=True))
    return [word for pair in known.items() for word in pair]


def _inputs(root: Path, method: str, model: str | None, words: int | None) -> tuple[Path, Path]:
    """A model whose every weight is in its files, and a folder with rows to train on and to hold back."""
    import transformers
    from tests.train.tiny import rows, save_chat_model, save_rows

    base = Path(model) if model else save_chat_model(root / "base", layers=2)
    if words and not model:
        wide = transformers.AutoModelForCausalLM.from_pretrained(base)
        transformers.set_seed(0)
        wide.resize_token_embeddings(words, mean_resizing=False)
        wide.save_pretrained(base)
    if method == "reward":
        torch.manual_seed(0)
        head = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        head.config.pad_token_id = 0
        head.save_pretrained(root / "reward")
        transformers.AutoTokenizer.from_pretrained(base).save_pretrained(root / "reward")
        base = root / "reward"
    data = root / "data"
    data.mkdir()
    made = rows(method, _ROWS + 7)
    save_rows(data / "train.jsonl", made[: _ROWS - 1])  # no multiple of the batch
    save_rows(data / "test.jsonl", made[_ROWS:])
    return base, data


def _ended(train: Callable[..., Course], *arguments: Any) -> Course:
    try:
        return train(*arguments)
    except Exception as error:  # noqa: BLE001 - how a training ends is what is asked
        return Course(error=f"{train.__name__[1:]}: {type(error).__name__}: {error}".replace("\n", " ")[:300])


def _ours(method: str, argv: list[str]) -> Course:
    from rich.console import Console
    from tests.parsed import parse_settings

    from isotype.data.methods import METHODS
    from isotype.train.training import run

    rewards = ["--reward_funcs", "tests.train.tiny.reward_by_words"] if method in ("grpo", "rloo") else []
    record = run(parse_settings(METHODS[method], [*argv, *rewards]), Console(quiet=True)).record
    return Course(
        tuple(step.loss for step in record.steps),
        tuple(step.grad_norm or math.nan for step in record.steps),
        tuple(each.loss for each in record.evals),
    )


def _theirs(method: str, argv: list[str], dtype: torch.dtype) -> Course:
    import transformers
    import trl
    from datasets import load_dataset
    from peft import get_peft_model
    from tests.train.tiny import reward_by_words

    parser = trl.TrlParser((trl.ScriptArguments, getattr(trl, f"{NAMES[method]}Config"), trl.ModelConfig))
    script, arguments, options = parser.parse_args_and_config(argv)
    heads = (
        transformers.AutoModelForSequenceClassification
        if method == "reward"
        else transformers.AutoModelForCausalLM
    )
    model = heads.from_pretrained(options.model_name_or_path, dtype=dtype)
    if method == "reward":
        options.lora_task_type = "SEQ_CLS"
    transformers.set_seed(_SEED)
    if options.use_peft:
        model = get_peft_model(model, trl.get_peft_config(options))
    data = load_dataset(script.dataset_name)
    trainer = getattr(trl, f"{NAMES[method]}Trainer")(
        model=model,
        args=arguments,
        train_dataset=data["train"],
        eval_dataset=data["test"] if arguments.eval_strategy != "no" else None,
        processing_class=transformers.AutoTokenizer.from_pretrained(options.model_name_or_path),
        **({"reward_funcs": reward_by_words} if method in ("grpo", "rloo") else {}),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    logged = trainer.state.log_history
    return Course(
        tuple(each["loss"] for each in logged if "loss" in each),
        tuple(each["grad_norm"] for each in logged if "grad_norm" in each),
        tuple(each["eval_loss"] for each in logged if "eval_loss" in each),
    )
