"""isotype's own arguments, beside those of TRL and transformers."""

from __future__ import annotations

from dataclasses import dataclass, field

from isotype.core.formats import QUANTIZATIONS
from isotype.precision.by_damage import MIXED


@dataclass
class IsotypeArguments:
    """What isotype adds to TRL's arguments."""

    quantization: str | None = field(
        default=None,
        metadata={
            "help": "Storage of the frozen base weights; short for --load_in_4bit, --load_in_8bit and "
            "--bnb_4bit_quant_type. mixed: each linear layer in nf4, int8 or unquantized, by what that does to the model's output "
            "(measured once, see isotype quality).",
            "choices": [*QUANTIZATIONS, MIXED],
        },
    )
    base_memory: str | None = field(
        default=None,
        metadata={
            "help": "With --quantization mixed: what the base's weights take at most, such as 6GiB; by default a tenth more for "
            "the linear layers than nf4 takes."
        },
    )
    device: str = field(default="auto", metadata={"help": "Device to train on: auto, cpu, cuda, mps, xpu."})
    ranges: str = field(
        default="measure",
        metadata={
            "help": "For float16: measure the checkpoint's value ranges where nobody has (measure), or decide by what is "
            "known already (known).",
            "choices": ["measure", "known"],
        },
    )
    fuse: bool = field(
        default=True,
        metadata={
            "help": "Compute LoRA layers in one function each, those that read the same input together (isotype.fuse); "
            "--no_fuse leaves them as PEFT has them."
        },
    )
    ask: str | None = field(
        default=None,
        metadata={
            "help": "A question the model answers before and after training. By default the first prompt of "
            "the test split, where evaluation is on (--eval_strategy)."
        },
    )
    columns: str | None = field(
        default=None,
        metadata={
            "help": "The trainer's names for the data set's columns: prompt=question,completion=answer; or alpaca, "
            "for instruction, input and output."
        },
    )
    apply_chat_template: bool = field(
        default=False,
        metadata={
            "help": "Write prompts and answers that are plain text as messages of user and assistant, by the model's chat "
            "template."
        },
    )
    eval_split: float | None = field(
        default=None,
        metadata={
            "help": "Hold back this share of the training rows (or this many of them) and measure the loss on them, "
            "by default five times in the run (--eval_strategy, --eval_steps)."
        },
    )
    quiet: bool = field(
        default=False,
        metadata={"help": "Say less: the policy in three lines, no example.", "aliases": ["-q"]},
    )
    verbose: bool = field(
        default=False,
        metadata={
            "help": "Say more: every reason in full, what was restored, libraries' warnings.",
            "aliases": ["-v"],
        },
    )
    lora_bias: str = field(
        default="none",
        metadata={
            "help": "Which biases are trained beside the adapters: none, all, or those of the adapted layers.",
            "choices": ["none", "all", "lora_only"],
        },
    )
    init_lora_weights: str | None = field(
        default=None,
        metadata={
            "help": "How adapters begin, as in peft.LoraConfig: gaussian, orthogonal, olora, pissa; by default A is drawn "
            "(Kaiming) and B is zero. olora and pissa take a part out of the base's weights, which may not be quantized then."
        },
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "Stop after so many evaluations in a row without a better held-back loss (or --metric_for_best_model)."
        },
    )
    early_stopping_threshold: float = field(
        default=0.0,
        metadata={"help": "By how much a held-back loss has to be better to count as better."},
    )
