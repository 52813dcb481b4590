"""`PrecisionCallback` applies a precision policy to the model of any transformers or TRL script and checks the training."""

import gc
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import is_compiled_module
from torch import nn
from transformers import TrainerCallback

from isotype.checkpoint.facts import facts_of
from isotype.checkpoint.resolve import resolve_precision
from isotype.compat.accelerate import mark_as_skipped
from isotype.compat.torch import loss_scale
from isotype.compat.transformers import calling_trainer
from isotype.core.dtypes import dtype_name
from isotype.core.errors import PrecisionError, UsageError, error_line
from isotype.core.source import line_of
from isotype.lora.kernels import float32_reductions
from isotype.lora.loss.trl_head import passed_on, without_its_padding
from isotype.lora.unpadded import traced_as
from isotype.model.adapters import save_policy_too
from isotype.model.enforce import enforce_model, policy_of, summarize
from isotype.model.shard import free_gathered, has_shards
from isotype.model.walk import own_float_parameters, places
from isotype.precision.policy import POLICY_FILE, PrecisionPolicy
from isotype.precision.ranges import Ranges
from isotype.preflight.from_trainer import request_of_first_step
from isotype.preflight.run import run
from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.report.check.report import Report
from isotype.train.monitor.meter import StepMeter
from isotype.train.policy import begin_loss_scale
from isotype.train.trainer import PolicyTrainer

logger = logging.getLogger("isotype")


class PrecisionCallback(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Trainer callback that applies a precision policy before the first optimizer step, and checks that the training
    follows the policy.

    - When the training begins, the callback casts the model's parameters to the policy's dtypes, because trainers change
      dtypes. For example, TRL casts every trainable parameter of a quantized model to bfloat16. The trainer must have a
      GradScaler if the policy scales the loss, and must not have one otherwise. The loss scale of the policy replaces
      PyTorch's default loss scale. The callback stops a resumed training if loading has rounded the saved values to 16
      bits.
    - Before the first forward, the preflight (`isotype.check`) runs the step on the first batch with fake tensors. After
      the first step, the callback checks the dtypes of the optimizer state.
    - Before every update, it checks the loss and the gradient norm. If the loss or the gradient norm is not finite, and
      no GradScaler skips the step, the batch runs again with a check of every operator. The training then ends with an
      error about the first operator with a non-finite result: its module, operands, source line and cause.
    - A step that the GradScaler skips does not advance the learning rate schedule. Products of 16-bit matrices on a GPU
      accumulate in float32 (`isotype.lora.kernels`). The callback saves the policy in each checkpoint.

    Args:
        policy: by default, the model's policy. If the model has no policy, each run derives a policy from the dtypes of the
            model and the trainer's arguments (`fp16`, `bf16`). A derived policy casts no frozen weight.
        check: `"error"` raises PrecisionError if the preflight has an error. It also raises PrecisionError for a GradScaler, an
            optimizer state or resumed values that contradict the policy. `"warning"` logs the error. None skips these checks.
            Errors about operand dtypes that were not measured on the device are only logged.
        watch: if True, the training ends when the loss or the gradient norm is not finite.
        ranges: measured value ranges for the preflight, or None if they are unknown. By default, the ranges of a float16 step
            are measured on the first batch. This measurement takes additional memory.
    """

    def __init__(
        self,
        policy: PrecisionPolicy | None = None,
        check: str | None = "error",
        watch: bool = True,
        ranges: Ranges | Literal["measure"] | None = "measure",
    ) -> None:
        if check not in ("error", "warning", None):
            expected = "'error', 'warning' or None"
            raise UsageError.of("unknown check", f"check={check!r}", expected, "give one of these")
        self.policy = policy
        self.check = check
        self._policy = policy  # of the current run
        self._checked = False
        self._scale: float | None = None
        self.watch = watch
        self.ranges = ranges
        self._meter: StepMeter | None = None  # for a PolicyTrainer, the trainer's own meter
        self._reductions = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        saved = policy_of(model)
        bound = None if saved is None or saved.keep_frozen else saved  # not a policy derived by another run
        policy = self._policy = self.policy or bound or policy_of_current_dtypes(model, args)
        _restore(model, policy)
        if hasattr(model, "save_pretrained"):
            save_policy_too(model)
        if state.global_step > 0 and not has_shards(model):
            self._raise_or_log(rounded_error(model, policy.master))
        raise_optimizer_state(optimizer, policy.master)
        self._raise_or_log(scaler_error(optimizer, policy))
        scaler = getattr(optimizer, "scaler", None)
        if state.global_step == 0 and policy.loss_scaling and scaler is not None and scaler.is_enabled():
            begin_loss_scale(scaler, policy)
        self._checked = False
        trainer = calling_trainer()
        if self.check is not None:
            report = partial(self._report, logs=state.is_world_process_zero, whole=not has_shards(model))
            outermost = getattr(trainer, "model_wrapped", None)
            before_first_step(model, args, optimizer, report, outermost, self.ranges)
        self._leave()
        self._reductions.enter_context(float32_reductions())
        if isinstance(trainer, PolicyTrainer):
            self._meter = trainer.steps
        elif trainer is not None and self.watch:
            self._meter = StepMeter(trainer)
            self._meter.attach()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._meter is not None and not self._meter.together:
            self._meter.begin(state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the loss scale for `on_optimizer_step`. Raise TrainingError if the loss or gradient norm is not finite."""
        meter, scale = self._meter, loss_scale(getattr(kwargs["optimizer"], "scaler", None))
        if meter is None or (scale is None and meter.together):
            self._scale = None if scale is None else float(scale)
            return
        step = meter.read()
        self._scale = step.scale
        what = None if meter.together else meter.ends(step)  # the recorder of a PolicyTrainer checks the step
        if what is not None:
            step.learning_rate = float(kwargs["lr_scheduler"].get_last_lr()[0])
            raise meter.stopped(what, step)

    def _leave(self) -> None:
        self._reductions.close()
        if self._meter is not None and not self._meter.together:
            self._meter.detach()
        self._meter = None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell accelerate that a step was skipped, so that the learning rate schedule does not advance.

        accelerate (1.15) counts a step as skipped if the GradScaler has not called the optimizer. However, a
        GradScaler always calls a fused optimizer, which skips the update by itself (`_step_supports_amp_scaling` in
        torch/amp/grad_scaler.py).
        """
        if self._scale is None:
            return
        norm = self._meter.now.grad_norm if self._meter is not None and self._meter.together else None
        after = loss_scale(getattr(kwargs["optimizer"], "scaler", None))
        if not math.isfinite(norm) if norm is not None else after is not None and after < self._scale:
            mark_as_skipped(kwargs["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._checked or self._policy is None:
            return
        self._checked = True
        self._raise_or_log(optimizer_error(kwargs["optimizer"], self._policy.master))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        missing = directory.is_dir() and not (directory / POLICY_FILE).exists()
        if self._policy is not None and state.is_world_process_zero and missing:
            self._policy.save(directory)

    def _report(self, report: Report, logs: bool, whole: bool) -> None:
        """Raise or log the errors of the preflight. Log its warnings, except for kinds of warnings that `policy.warnings` contains."""
        # An error in stored values is only logged: the loss of every step is checked in any case.
        assumed = [f for f in report.errors if f.phase == "load" or is_assumed(f, report.trace)]
        covered = ("device", "memory", "versions")  # the policy's own warnings are of these kinds
        costs = [finding for finding in report.warnings if finding.kind not in covered]
        for finding in (*assumed, *costs) if logs else ():
            logger.warning("%s: %s (%s)", finding.code, finding.message, finding.cause)
        # The step is about to run, so only a peak above the whole memory of the device is an error. The peak of a sharded
        # model is unknown, because the traced copy of the model is not sharded.
        full = whole and report.memory.peak > (report.trace.setup.profile.memory_bytes or math.inf)
        if certain := tuple(f for f in report.errors if f not in assumed and (full or f.kind != "memory")):
            self._raise_or_log(replace(report, findings=certain).error())

    def _raise_or_log(self, error: PrecisionError | None) -> None:
        if error is None or self.check is None:
            return
        if self.check == "error":
            raise error
        logger.warning("%s", error)


def _restore(model: Any, policy: PrecisionPolicy) -> None:
    """Apply the policy to the model and log each change. A changed frozen weight is logged as a warning."""
    frozen = {
        place.full_name(name)
        for place in places(model)
        for name, parameter in place.module.named_parameters(recurse=False)
        if not parameter.requires_grad and not place.adapter
    }
    changes = enforce_model(model, policy)
    for line in summarize(tuple(change for change in changes if change.name in frozen)):
        logger.warning("frozen weights were cast to the policy's dtype again: %s", line)
    for line in summarize(tuple(change for change in changes if change.name not in frozen)):
        logger.info("cast to the policy's dtype again: %s", line)


def before_first_step(
    model: nn.Module,
    arguments: Any,
    optimizer: Any,
    handle_report: Callable[[Report], None],
    outermost: nn.Module | None = None,
    ranges: Ranges | Literal["measure"] | None = "measure",
) -> None:
    """Run the preflight of a trainer's step before the first forward of the training.

    Args:
        handle_report: function that takes the report of the preflight. An exception of this function ends the training.
        outermost: the module that the trainer calls. If `torch.compile` compiled this module, the preflight's hook is
            registered on it. A hook on the model inside would become a part of the compiled graph.
    """

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        handle.remove()
        free_gathered(model)  # else parameters that an evaluation gathered are not the optimizer's
        try:
            with traced_as(without_its_padding(model, args, kwargs)):
                request = request_of_first_step(model, (args, kwargs), arguments, optimizer)
                measured = None if ranges == "measure" else ranges
                wiring = passed_on(model, request.inputs.inputs)
                request = replace(request, ranges=measured, wiring=wiring)
                report = run(request, verify=False, measure=ranges == "measure")
        except Exception as error:  # noqa: BLE001 - a check never ends a training: its error is logged
            logger.warning("the step was not checked, because %s (%s)", error_line(error), line_of(error))
            return
        gc.collect()  # a trace has reference cycles, and holds tensors
        handle_report(report)

    called = outermost if outermost is not None and is_compiled_module(outermost) else model
    # FSDP2's hook gathers the parameters of the whole model.
    handle = called.register_forward_pre_hook(hook, with_kwargs=True, prepend=has_shards(model))


def is_assumed(finding: Finding, trace: Trace) -> bool:
    """Return True if the operand dtypes of a finding were not measured on the device."""
    broken = [call for call in trace.breaches() if call.module in finding.places and call.op == finding.op]
    return any(call.breach is not None and call.breach.assumed for call in broken)


def policy_of_current_dtypes(model: Any, args: Any) -> PrecisionPolicy:
    """Derive a policy from the model's dtypes and the trainer's arguments. The policy casts no frozen weight.

    | role | the first of these that exists |
    |---|---|
    | storage | the quantization format; the dtype of most float weights (trainable weights count as float32) |
    | compute dtype | `fp16` or `bf16` of the arguments; the compute dtype of bitsandbytes; the storage |

    Raises:
        PrecisionError: the policy is invalid, or the model mixes 16-bit and float32 weights without autocast.
    """
    elements = _elements_by_dtype(model)
    most = max(elements, key=lambda dtype: elements[dtype], default=torch.float32)
    saved = facts_of(model).quantization
    autocast = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else None
    compute = autocast or (saved.compute_dtype if saved else None) or most
    trainable = "lora" if getattr(model, "peft_config", None) else "full"
    others = [dtype for dtype in elements if dtype != torch.float32]
    if trainable == "full" and compute == torch.float32 and others:
        headline = "weights of different dtypes and no autocast"
        what = f"frozen weights in {dtype_name(others[0])}, and master weights in float32"
        fix = "train with bf16=True or fp16=True, or load the model in float32"
        raise PrecisionError.of(headline, what, "all weights in one dtype, or autocast", fix)
    policy = resolve_precision(
        model,
        dtype=compute,
        device=args.device,
        trainable=trainable,
        storage=most if trainable == "lora" and saved is None else None,
    )
    return replace(
        policy,
        storage=policy.storage if policy.quantized else dtype_name(most),
        keep_frozen=True,
        routers=False,
        reasons={**policy.reasons, "storage": "the dtype of the model; no frozen weight is cast"},
        warnings=(),
    )


def _elements_by_dtype(model: Any) -> Counter[torch.dtype]:
    elements: Counter[torch.dtype] = Counter()
    for place in places(model):
        if not place.adapter:
            for parameter in own_float_parameters(place.module).values():
                elements[torch.float32 if parameter.requires_grad else parameter.dtype] += parameter.numel()
    return elements


def optimizer_error(optimizer: Any, master: torch.dtype) -> PrecisionError | None:
    bits = master.itemsize  # Adafactor has float32 moments for 16-bit weights
    others = [
        o for o in _in_other_dtypes(optimizer, master) if o[1] == "parameter" or o[2].dtype.itemsize < bits
    ]
    if not others:
        return None
    parameter, name, tensor = others[0]
    headline = f"{len(others)} optimizer tensors are not in {dtype_name(master)}"
    what = f"{name} of a parameter of shape {tuple(parameter.shape)} is {dtype_name(tensor.dtype)}"
    fix = "create the optimizer after isotype.enforce(model, policy)"
    return PrecisionError.of(headline, what, f"{dtype_name(master)}, the policy's master dtype", fix)


def raise_optimizer_state(optimizer: Any, master: torch.dtype) -> None:
    """Cast the optimizer state of parameters in `master` to `master`, because `optimizer.step` requires equal dtypes."""
    for parameter, name, tensor in _in_other_dtypes(optimizer, master):
        if parameter.dtype == master:
            optimizer.state[parameter][name] = tensor.to(master)


def _in_other_dtypes(optimizer: Any, master: torch.dtype) -> Iterator[tuple[Any, str, Any]]:
    """Yield (parameter, name, tensor) for parameters and moments in other dtypes than `master`."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        for name, tensor in {"parameter": parameter, **optimizer.state.get(parameter, {})}.items():
            # The counter `step` is float32. A quantized optimizer has uint8 state with its own constants.
            moment = torch.is_tensor(tensor) and tensor.is_floating_point() and name != "step"
            if moment and tensor.dtype != master:
                yield parameter, name, tensor


def scaler_error(optimizer: Any, policy: PrecisionPolicy) -> PrecisionError | None:
    scaler = getattr(optimizer, "scaler", None)
    active = scaler is not None and scaler.is_enabled()
    if active == policy.loss_scaling:
        return None
    what, fix = "a GradScaler", "create the trainer with fp16=False"
    if policy.loss_scaling:
        what, why = "no GradScaler", "on a CPU, accelerate creates no GradScaler by itself"
        resolved = 'isotype.enforce(trainer, isotype.resolve_precision(trainer.model, dtype="float16"))'
        fix = f"create the trainer with fp16=True, and before trainer.train() call {resolved} ({why})"
    headline = "the trainer and the policy disagree about loss scaling"
    expected = "a GradScaler if the compute dtype is float16, and none otherwise"
    what = f"{what} with compute dtype {dtype_name(policy.compute)}"
    return PrecisionError.of(headline, what, expected, fix)


def rounded_error(model: Any, master: torch.dtype) -> PrecisionError | None:
    """Return an error if loading has rounded the saved values of a resumed run, else None.

    `model.load_adapter` first copies saved values into 16-bit parameters, and then casts these parameters to float32.
    The values count as rounded if a 16-bit dtype represents all of them exactly.
    """
    values = [p.detach() for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    exact = (
        dtype
        for dtype in (torch.bfloat16, torch.float16)
        if all(torch.equal(value, value.to(dtype).to(value.dtype)) for value in values)
    )
    rounded = next(exact, None) if values and master == torch.float32 else None
    if rounded is None:
        return None
    return PrecisionError.of(
        "the values of the resumed checkpoint were rounded while they were loaded",
        f"all trainable parameters have values that {dtype_name(rounded)} represents exactly",
        f"the saved {dtype_name(master)} values",
        "call isotype.enforce(trainer, isotype.PrecisionPolicy.read(checkpoint)) before "
        "trainer.train(resume_from_checkpoint=checkpoint), so that the values are loaded into float32 parameters",
    )
