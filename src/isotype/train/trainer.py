"""Makes trainers of transformers or TRL that follow a precision policy, save complete checkpoints and measure steps."""

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from isotype.lora.loss.trl_head import use_own_head
from isotype.model.recompute import needs_input_gradients
from isotype.model.shard import has_shards
from isotype.train.compilation import take_compilation
from isotype.train.monitor.meter import StepMeter, memory_meter
from isotype.train.output.checkpoints import begin_epoch
from isotype.train.output.saving import WholeCheckpoints
from isotype.train.rows.collators import seen_as_joined


class PolicyTrainer(WholeCheckpoints):
    """Mixin for `transformers.Trainer` (see `policy_trainer`).

    Attributes:
        compilation: arguments of `torch.compile` for the model's blocks, or None without compilation.
    """

    compilation: Mapping[str, Any] | None = None
    steps: StepMeter
    _flops_of_value: int | None = None

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            # TRL deprecates label smoothing because it needs whole logits; isotype's loss does not.
            warnings.filterwarnings("ignore", "`label_smoothing_factor` is deprecated", FutureWarning)
            super().__init__(*args, **kwargs)
        # If this were set earlier, the Trainer's `__init__` would refuse the sharded model. `Sharded` saves the model.
        self.is_distributed_loading_by_transformers = has_shards(self.model)
        use_own_head(self)
        self._free_inputs()

    def create_accelerator_and_postprocess(self: Any) -> None:
        super().create_accelerator_and_postprocess()
        self.compilation = take_compilation(self.accelerator)

    def _free_inputs(self: Any) -> None:
        """Clear `requires_grad` of embedding outputs if gradient checkpointing does not need it.

        TRL sets `requires_grad` when the trainer is built, and transformers (5.23) sets it when the training begins.
        If `requires_grad` were set, autograd would also run the backward of frozen layers below the first adapter.
        """
        args, needed = self.args, needs_input_gradients
        if args.gradient_checkpointing and not needed(args.gradient_checkpointing_kwargs, self.model):
            self.model.disable_input_require_grads()

    def train(
        self: Any, resume_from_checkpoint: Any = None, *args: Any, signals: Sequence[int] = (), **kwargs: Any
    ) -> Any:
        """Call the trainer's `train` and measure every step. `signals` has the stop signals that this process receives."""
        self._flops_of_value = None
        with memory_meter(self.args.device) as memory:
            self.steps = StepMeter(self, together=True, memory=memory, signals=signals)
            self.steps.attach()
            try:
                return super().train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self.steps.detach()
                self.steps.begin(0)  # releases the last batch

    def run_epoch(self: Any, **kwargs: Any) -> None:
        self._free_inputs()
        # transformers 5.23 would train one more step if a run is resumed at its last step.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        resumed = kwargs["epoch"] == kwargs["epochs_trained"] and kwargs["resume_from_checkpoint"]
        checkpoint, skipped = Path(resumed) if resumed else None, kwargs["steps_trained_in_current_epoch"]
        self._order = begin_epoch(self, kwargs["train_dataloader"], checkpoint, skipped)
        super().run_epoch(**kwargs)

    def floating_point_ops(self: Any, inputs: Any) -> int:
        """Return the trainer's estimate of FLOPs. The model's parameters are counted only at the first call."""
        name = getattr(self.model, "main_input_name", "input_ids")
        values: int = inputs[name].numel() if name in inputs else 0
        if not values:
            return 0
        if self._flops_of_value is None:
            self._flops_of_value = super().floating_point_ops(inputs) // values
        return values * int(self._flops_of_value)

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the trainer's `compute_loss`. Hooks on embeddings get the batch as one row (`seen_as_joined`)."""
        with seen_as_joined(self, inputs):
            return super().compute_loss(model, inputs, *args, **kwargs)


@cache
def policy_trainer(trainer_class: type) -> type:
    """Return a class with the same name as `trainer_class` that inherits from it and from `PolicyTrainer`."""
    bases = (PolicyTrainer, trainer_class)
    return type(trainer_class.__name__, bases, {"__module__": trainer_class.__module__})
