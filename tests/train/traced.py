"""The trace of a planned step, without the findings and the wiring of a check."""

from __future__ import annotations

from isotype.checkpoint.checkpoint import open_model
from isotype.precision.devices.profile import device_profile
from isotype.records.trace import Trace
from isotype.train.policy import policy_by_ranges, sound_attention
from isotype.train.preflight.plan import StepPlan
from isotype.train.preflight.step import PlannedStep, row_length


def traced(plan: StepPlan) -> Trace:
    """Return the trace that `check_plan` judges; raise NotForeseenError if the step cannot be traced."""
    checkpoint = open_model(plan.source, plan.revision)
    policy, ranges = policy_by_ranges(checkpoint, plan.precision, plan.device, when=plan.ranges)
    step = PlannedStep(plan, checkpoint.model_config, policy, ranges)
    with sound_attention(device_profile(plan.device)):
        return step.traced(plan.checkpointing, plan.rows, row_length(plan, step.config))
