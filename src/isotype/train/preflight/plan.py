"""A step that is to be checked, as arguments describe it, and what belongs to the check alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotype.precision.decide import PrecisionRequest

if TYPE_CHECKING:
    from isotype.model.targets import Adapt
    from isotype.ranges.pictures import Pictures
    from isotype.records.memory import MemoryKind
    from isotype.train.rows.lengths import Lengths


@dataclass(frozen=True)
class Options:
    """The arguments that a check has of its own.

    Attributes:
        bare: whether a model was named without a training method.
        batch, length: rows and tokens of the step, None if the training's arguments decide.
        generate: whether generation is traced too.
        fsdp: 0, 1 or 2; None where the training's arguments decide.
        devices: how many devices train together; None where the launcher decides.
        json, sarif, html: outputs; of sarif `-` is standard output.
        fix: whether the repaired command is shown.
        fail_on: the severity from which the exit status is 1.
        verbose: whether the text says how memory and time come about.
        image: size of the pictures in each row; None where the data says it, or nothing.
        images: how many of them there are.
    """

    bare: bool = False
    batch: int | None = None
    length: int | None = None
    generate: bool = False
    fsdp: int | None = None
    devices: int | None = None
    json: bool = False
    sarif: str | None = None
    html: Path | None = None
    fix: bool = False
    fail_on: str = "error"
    verbose: bool = False
    image: tuple[int, int] | None = None
    images: int = 1


@dataclass(frozen=True)
class StepPlan:
    """One step to be checked.

    Attributes:
        source: what names the model.
        method: the training method.
        precision: what was asked of the precision.
        device: name of a device or of a profile.
        rows, length: of the batch, for dpo and reward in pairs; length None for the default.
        step_rows: rows of an optimizer step on one device; where they are more than `rows`, gradients are accumulated.
        evaluation: rows of a batch that is evaluated during the training; 0: as many as `rows`; None: nothing is evaluated.
        evaluation_length: tokens of its longest row; None: as of the rows that train.
        evaluation_lengths: of the rows that are evaluated; None where nobody counted them.
        prompt: tokens at the beginning of every row that the loss leaves out.
        completion: tokens of a completion (grpo, rloo).
        reference: whether every step runs the reference model.
        copied: of what a frozen copy is that reference: `weights` or `adapters`; None where there is none.
        lora: arguments of `peft.LoraConfig`, or one; None where every weight is trained.
        pictures: of each row; None for what the model's config says by itself.
        adapt: the parts of the model that get adapters; None for all.
        learning_rate, optimizer: of the optimizer.
        checkpointing: arguments of `gradient_checkpointing_enable`, None where it is off.
        auto: whether that is to be chosen by the memory of the step instead.
        longest: tokens of the longest row that can occur in the training; None: as `length`.
        unforeseen: why nobody can say what the step takes, as a clause; "" where a trace can.
        fsdp: 0, 1 or 2.
        devices: how many devices train together, a process each.
        reshard: whether FSDP frees a block's gathered weights after its forward.
        revision: of a hub id.
        attention: attention implementation, None for transformers' choice.
        packed: whether rows hold several documents, which attention tells apart by their positions.
        notes: what is not traced as asked.
        ranges: whether value ranges are measured, `measure` or `known`, as `isotype.train.policy.policy_by_ranges` takes it.
        data: what the rows' lengths say, and as what they are read; "" where no data set was opened.
        fuse: whether the training fuses its layers, adapted or not.
        dropout: whether it drops anything; TRL switches it off where answers are compared.
        data_rows: rows of the training's data set; None where none was opened, or it is a stream.
        lengths: of these rows; None where nobody counted them.
    """

    source: str
    method: str
    precision: PrecisionRequest
    device: str
    rows: int
    length: int | None
    lora: Any
    learning_rate: float
    optimizer: str
    checkpointing: Mapping[str, Any] | None
    auto: bool = False
    longest: int | None = None
    unforeseen: str = ""
    fsdp: int = 0
    devices: int = 1
    reshard: bool = True
    step_rows: int = 0
    evaluation: int | None = None
    evaluation_length: int | None = None
    evaluation_lengths: Lengths | None = None
    prompt: int = 0
    completion: int = 0
    reference: bool = False
    copied: MemoryKind | None = None
    revision: str | None = None
    attention: str | None = None
    packed: bool = False
    notes: tuple[str, ...] = ()
    ranges: str = "measure"
    data: str = ""
    fuse: bool = True
    dropout: bool = True
    data_rows: int | None = None
    lengths: Lengths | None = None
    adapt: Adapt | None = None
    pictures: Pictures | None = None
