"""The training methods: command, trainer of TRL, columns of its rows and kind of loss, one record per method."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from isotype.data.tokens import TOKEN_COLUMNS

Loss = Literal[
    "labels",  # the model's own, of one forward with labels
    "reward",  # of the scores of chosen and rejected answers
    "preference",  # of their log-probabilities against a reference model's
    "unpaired",  # of labelled completions against a reference model's
    "policy",  # of completions that the model generates
]
"""Computation of a step; `isotype.train.preflight.synthetic.LOSSES` computes it without a data set."""

Reference = Literal[
    "none",
    "always",
    "beta",  # where the argument of that name, the weight of the divergence from it, is not zero
]
"""Use of a frozen reference model by the loss."""


@dataclass(frozen=True)
class Format:
    """A set of columns that a trainer accepts.

    Attributes:
        excludes: columns by which TRL reads the row as another format, and then fails.
    """

    required: tuple[str, ...]
    excludes: tuple[str, ...] = ()


CHAT_COLUMNS = ("tools", "chat_template_kwargs", "image", "images")

_PAIRS = (Format(("prompt", "chosen", "rejected")), Format(("chosen", "rejected")))
_PROMPTS = (Format(("prompt",)),)
_LONG_PROMPT = "the prompt alone fills"


@dataclass(frozen=True)
class Method:
    """A stable trainer of TRL.

    Attributes:
        name: the command, and TRL's script module.
        trainer: name of the trainer class in `trl`.
        formats: accepted sets of columns, in TRL's order of preference.
        optional: columns with a special meaning. Others are allowed: GRPO and RLOO pass them to the reward functions,
            the other trainers ignore them.
        task_type: PEFT's task type; it decides which parts beside the adapters are trained.
        auto_class: name of transformers' auto class, or None for the class that the config names.
        reference: see `Reference`; `compares` decides it for a training.
        dropped: rows that the trainer drops by `max_length`, as the beginning of a clause; "" if it drops none.
        fused_head: the trainer takes log-probabilities from TRL's fused head and never reads logits.
    """

    name: str
    title: str
    trainer: str
    loss: Loss
    formats: tuple[Format, ...]
    optional: tuple[str, ...] = CHAT_COLUMNS
    task_type: str = "CAUSAL_LM"
    auto_class: str | None = None
    model_kwargs: tuple[tuple[str, Any], ...] = ()
    reference: Reference = "none"
    dropped: str = ""
    fused_head: bool = True

    @property
    def answers(self) -> bool:
        """True if the trained model generates answers; a reward model only scores them."""
        return self.task_type == "CAUSAL_LM"

    def compares(self, training: Any) -> bool:
        """Return True if a training with these arguments (TRL's config) has a reference model."""
        return self.reference == "always" or (self.reference == "beta" and bool(training.beta))

    def trainer_class(self) -> Any:
        return getattr(import_module("trl"), self.trainer)

    def dataclass_types(self) -> tuple[Any, ...]:
        """Dataclasses of TRL's script: script, training, model and data set arguments."""
        trl = import_module("trl")
        script = import_module(f"trl.scripts.{self.name}")
        arguments = getattr(script, f"{self.name.upper()}ScriptArguments", trl.ScriptArguments)
        config = getattr(trl, self.trainer.removesuffix("Trainer") + "Config")
        return arguments, config, trl.ModelConfig, trl.DatasetMixtureConfig


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "sft",
            "supervised fine-tuning on text, prompt/completion or chat data",
            "SFTTrainer",
            "labels",
            formats=(
                Format(("input_ids",)),
                Format(("prompt", "completion")),
                Format(("messages",), excludes=("prompt",)),
                Format(("conversations",), excludes=("prompt",)),
                Format(("text",), excludes=("prompt",)),
            ),
            optional=(*CHAT_COLUMNS, *TOKEN_COLUMNS),
            dropped=_LONG_PROMPT,
        ),
        Method(
            "dpo",
            "direct preference optimization on chosen/rejected pairs",
            "DPOTrainer",
            "preference",
            _PAIRS,
            optional=(*CHAT_COLUMNS, "ref_chosen_logps", "ref_rejected_logps"),
            reference="always",
            dropped=_LONG_PROMPT,
        ),
        Method(
            "reward",
            "a reward model on chosen/rejected pairs",
            "RewardTrainer",
            "reward",
            formats=(Format(("chosen_ids", "rejected_ids")), *_PAIRS),
            optional=("tools", "chat_template_kwargs", "margin"),
            task_type="SEQ_CLS",
            auto_class="AutoModelForSequenceClassification",
            model_kwargs=(("num_labels", 1),),
            dropped="an answer with its prompt is longer than",
            fused_head=False,
        ),
        Method(
            "kto",
            "Kahneman-Tversky optimization on labelled completions",
            "KTOTrainer",
            "unpaired",
            # KTOTrainer splits preference pairs into labelled completions itself.
            formats=(Format(("prompt", "completion", "label")), *_PAIRS),
            reference="always",
            dropped=_LONG_PROMPT,
        ),
        Method(
            "grpo",
            "group relative policy optimization against reward functions",
            "GRPOTrainer",
            "policy",
            _PROMPTS,
            reference="beta",
        ),
        Method(
            "rloo",
            "REINFORCE leave-one-out against reward functions",
            "RLOOTrainer",
            "policy",
            _PROMPTS,
            reference="beta",
        ),
    )
}
