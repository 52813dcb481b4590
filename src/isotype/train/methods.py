"""The training methods: which of TRL's scripts, trainers and model heads each one is made of."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Method:
    """One of TRL's stable trainers.

    Attributes:
        name: the command, and the name of TRL's script module.
        title: what it does, in a line.
        trainer: name of the trainer class in `trl`.
        task_type: PEFT's task type, which decides what beside the adapters is trained.
        auto_class: name of transformers' auto class, or None for the class that the config names.
        model_kwargs: what the model head needs.
    """

    name: str
    title: str
    trainer: str
    task_type: str = "CAUSAL_LM"
    auto_class: str | None = None
    model_kwargs: tuple[tuple[str, Any], ...] = ()

    def trainer_class(self) -> Any:
        """The trainer class of `trl`."""
        return getattr(import_module("trl"), self.trainer)

    def dataclass_types(self) -> tuple[Any, ...]:
        """(script arguments, training arguments, model arguments, data set arguments) of TRL's own script."""
        trl = import_module("trl")
        script = import_module(f"trl.scripts.{self.name}")
        arguments = getattr(script, f"{self.name.upper()}ScriptArguments", trl.ScriptArguments)
        config = getattr(trl, self.trainer.removesuffix("Trainer") + "Config")
        return arguments, config, trl.ModelConfig, trl.DatasetMixtureConfig


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("sft", "supervised fine-tuning on text, prompt/completion or chat data", "SFTTrainer"),
        Method("dpo", "direct preference optimization on chosen/rejected pairs", "DPOTrainer"),
        Method(
            "reward",
            "a reward model on chosen/rejected pairs",
            "RewardTrainer",
            task_type="SEQ_CLS",
            auto_class="AutoModelForSequenceClassification",
            model_kwargs=(("num_labels", 1),),
        ),
        Method("kto", "Kahneman-Tversky optimization on labelled completions", "KTOTrainer"),
        Method("grpo", "group relative policy optimization against reward functions", "GRPOTrainer"),
        Method("rloo", "REINFORCE leave-one-out against reward functions", "RLOOTrainer"),
    )
}
