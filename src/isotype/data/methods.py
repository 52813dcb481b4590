"""Facts about each training method: its command, its trainer in TRL, the columns of its rows, its kind of loss."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from isotype.core.tables import table
from isotype.data.cells import OTHER_NAMES
from isotype.data.tokens import TOKEN_COLUMNS

Loss = Literal[
    "labels",  # the model's loss of one forward with labels
    "reward",  # from the scores of chosen and rejected answers
    "preference",  # from log-probabilities of chosen and rejected answers, compared with a reference model
    "unpaired",  # from log-probabilities of labelled completions, compared with a reference model
    "policy",  # from rewards of completions that the model generates
]
"""Kind of loss. `isotype.train.preflight.synthetic.LOSSES` computes each kind of loss without a data set."""

Reference = Literal[
    "none",
    "always",
    "beta",  # if the argument `beta`, the weight of the divergence from the reference model, is not zero
]
"""The condition under which the loss needs a frozen reference model."""


@dataclass(frozen=True)
class Format:
    """A set of columns that a trainer accepts.

    Attributes:
        excludes: columns that a row must not have, because TRL would assume another format and fail.
    """

    required: tuple[str, ...]
    excludes: tuple[str, ...] = ()


CHAT_COLUMNS = ("tools", "chat_template_kwargs", "image", "images")


@dataclass(frozen=True)
class Method:
    """A training method that one of TRL's stable trainers implements.

    Attributes:
        name: name of isotype's command and of TRL's script module.
        title: description in `isotype --help`.
        trainer: name of the trainer class in `trl`.
        formats: accepted sets of columns, in the order in which TRL prefers them. KTOTrainer splits a preference pair into two
            completions.
        optional: columns with a special meaning. Other columns are allowed: GRPO and RLOO pass other columns to the reward
            functions, and the other trainers ignore other columns.
        task_type: PEFT's task type. For some task types, PEFT also trains the model's head.
        auto_class: name of an auto class of transformers; None for the class that the config names.
        reference: condition under which the loss needs a reference model (evaluated by `compares`).
        always_copies: True if TRL adds a second adapter for the reference even if the loss needs no reference.
        dropped: beginning of the reason for dropped rows, before `max_length N`; "" if the trainer drops no rows.
        fused_head: True if the trainer gets log-probabilities from TRL's fused head, and never reads logits.
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
    always_copies: bool = False
    dropped: str = ""
    fused_head: bool = True

    @property
    def answers(self) -> bool:
        """True if the trained model generates answers. A reward model only scores answers."""
        return self.task_type == "CAUSAL_LM"

    @property
    def takes_pictures(self) -> bool:
        return "images" in self.optional

    def compares(self, training: Any) -> bool:
        """Return True if a training with the arguments `training` (a config of TRL) needs a reference model."""
        return self.reference == "always" or (self.reference == "beta" and bool(training.beta))

    def trainer_class(self) -> Any:
        return getattr(import_module("trl"), self.trainer)

    def load_arguments(self) -> dict[str, Any]:
        """Return the arguments with which the model is created. If `model_class` is None, the class in the config is used."""
        transformers = import_module("transformers")
        model_class = getattr(transformers, self.auto_class) if self.auto_class else None
        return {"model_class": model_class, **dict(self.model_kwargs)}

    def dataclass_types(self) -> tuple[Any, ...]:
        """Return TRL's dataclasses of arguments: for the script, the training, the model and the data set."""
        trl = import_module("trl")
        script = import_module(f"trl.scripts.{self.name}")
        arguments = getattr(script, f"{self.name.upper()}ScriptArguments", trl.ScriptArguments)
        config = getattr(trl, self.trainer.removesuffix("Trainer") + "Config")
        return arguments, config, trl.ModelConfig, trl.DatasetMixtureConfig


def _method(name: str, facts: dict[str, Any]) -> Method:
    """Return a method from methods.json. A format is a text such as `prompt completion -label` (no column `label`)."""
    words = [text.split() for text in facts.pop("formats")]
    formats = tuple(
        Format(
            tuple(word for word in columns if word[0] != "-"),
            tuple(word[1:] for word in columns if word[0] == "-"),
        )
        for columns in words
    )
    takes_ids = ["input_ids"] in words
    optional = (*facts.pop("optional", CHAT_COLUMNS), *(TOKEN_COLUMNS if takes_ids else ()))
    model_kwargs = tuple(facts.pop("model_kwargs", {}).items())
    return Method(name, formats=formats, optional=optional, model_kwargs=model_kwargs, **facts)


_FACTS = table(__file__)
METHODS: dict[str, Method] = {name: _method(name, facts) for name, facts in _FACTS.items()}
SAME_METHODS = {other: name for name, others in OTHER_NAMES["methods"].items() for other in others}
"""Maps other names of training commands to the names of isotype's commands."""
