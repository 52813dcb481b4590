"""`isotype sft --help`: one screen of what people use, without loading what the whole list needs."""

from __future__ import annotations

from collections.abc import Mapping

from isotype.data.methods import METHODS, Loss

_COMMON = (
    (
        "what",
        (
            (
                "model_name_or_path",
                "MODEL",
                "directory, GGUF, hub id, or an adapter",
            ),
            ("dataset_name", "DATA", "JSONL, CSV, parquet, directory, hub id"),
            ("columns", "alpaca", "or prompt=question,completion=answer"),
            ("eval_split", "0.05", "share of rows to evaluate on"),
            ("output_dir", "DIR", "adapter, checkpoints, report"),
        ),
    ),
    (
        "precision",
        (
            ("quantization", "nf4", "storage of the base: nf4, fp4, int8"),
            ("dtype", "bfloat16", "compute dtype; auto by default"),
            ("device", "cuda", "auto, cpu, cuda, mps, xpu"),
        ),
    ),
    (
        "training",
        (
            ("learning_rate", "2e-4", ""),
            ("num_train_epochs", "3", "or --max_steps N"),
            ("per_device_train_batch_size", "8", "rows at once"),
            ("gradient_accumulation_steps", "1", "batches summed into a step"),
            ("max_length", "1024", "tokens a row is cut to"),
            ("gradient_checkpointing", "auto", "True: less memory, a slower step"),
            ("packing", "True", "several short rows in one"),
        ),
    ),
    (
        "adapter",
        (
            ("lora_r", "16", "rank"),
            ("lora_alpha", "32", ""),
            ("lora_target_modules", "all-linear", "or names: q_proj v_proj"),
            ("use_dora", "True", ""),
            ("init_lora_weights", "pissa", "or olora, gaussian, orthogonal"),
            ("use_peft", "False", "train every weight"),
        ),
    ),
    (
        "along the way",
        (
            ("early_stopping_patience", "3", "evaluations without a better loss"),
            ("save_steps", "500", "a checkpoint every so many steps"),
            ("resume_from_checkpoint", "true", "go on from the last whole checkpoint"),
            ("logging_steps", "10", "a line every so many steps"),
            ("report_to", "wandb", "tensorboard, wandb, trackio, mlflow"),
            ("push_to_hub", "True", "upload what was trained"),
            ("config", "FILE.yaml", "any of these as name: value lines"),
        ),
    ),
)
"""Groups of (argument, an example of its value, what it does)."""

_ONLY: Mapping[str, tuple[Loss, ...]] = {
    "packing": ("labels",),
    "max_length": ("labels", "preference", "reward", "unpaired"),
}
_OWN: Mapping[Loss, tuple[tuple[str, str, str], ...]] = {
    "preference": (("beta", "0.1", "how close to the reference it stays"),),
    "unpaired": (("beta", "0.1", "how close to the reference it stays"),),
    "policy": (
        ("reward_funcs", "FILE.py:name", "what completions are scored by"),
        ("num_generations", "8", "completions of a prompt to compare"),
        ("max_completion_length", "256", "tokens"),
    ),
}


def common_arguments(method: str) -> tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...]:
    """The groups for one training method."""
    loss = METHODS[method].loss
    groups = [(title, [row for row in rows if loss in _ONLY.get(row[0], (loss,))]) for title, rows in _COMMON]
    groups[2][1].extend(_OWN.get(loss, ()))
    return tuple((title, tuple(rows)) for title, rows in groups)


def short_help(method: str) -> str:
    """One screen, 80 columns."""
    lines = [f"usage: isotype {method} --model_name_or_path MODEL --dataset_name DATA […]", ""]
    for group, rows in common_arguments(method):
        lines.append(f"{group}:")
        for name, example, text in rows:
            argument = f"  --{name} {example}"
            lines.append(
                f"{argument:<41} {text}".rstrip() if len(argument) <= 41 else f"{argument}  {text}".rstrip()
            )
    lines += [
        "",
        "-q less output, -v more. --help-all lists every argument: they are those of",
        f"trl {method}. isotype check {method} … foretells a run without starting it.",
    ]
    return "\n".join(lines) + "\n"
