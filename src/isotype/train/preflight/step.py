"""Checks a planned step: decides the policy, builds a meta-device model and a batch, traces the step and reports."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from isotype.checkpoint.checkpoint import open_model
from isotype.checkpoint.facts import quantization_of
from isotype.compat.peft import why_whole_rows, without_peft
from isotype.compat.transformers import has_states, lines_separating_documents
from isotype.core.dtypes import dtype_name
from isotype.core.errors import IsotypeError
from isotype.core.formats import MXFP4
from isotype.core.names import format_bytes
from isotype.data.methods import METHODS
from isotype.lora.fuse import fuse
from isotype.lora.loss.trl_head import goes_by_lengths, may_go_by_lengths, put_head
from isotype.model.experts.layer import outermost
from isotype.model.recompute import CHECKPOINTING, checkpoint_gradients
from isotype.model.repeated_layers import fold
from isotype.model.rollout import rollout
from isotype.precision.devices.profile import device_profile
from isotype.precision.devices.room import Room, room_of
from isotype.precision.policy import PrecisionPolicy
from isotype.precision.ranges import Ranges
from isotype.preflight.run import run, trace_of
from isotype.ranges.pictures import NONE
from isotype.records.request import DEFAULT_PHASES, LossOf, StepRequest
from isotype.records.trace import Trace
from isotype.report.check.report import Report
from isotype.report.text import format_duration
from isotype.rules.kit.costs import dense_stacks, step_time
from isotype.train.models import require_decoder, require_plain_head, weightless_model
from isotype.train.policy import policy_by_ranges, sound_attention
from isotype.train.preflight.plan import DEFAULT_LENGTH, StepPlan
from isotype.train.preflight.synthetic import (
    PROMPT_TOKENS,
    batch_notes,
    least_length,
    step_inputs,
    synthetic_batch,
)
from isotype.train.rows.lengths import Lengths, fullest_batch, one_a_row
from isotype.train.run import Choice, NotForeseenError, choose

MIXED = "each document is traced in a separate padded row, because documents in one packed row would attend to each other"

BALANCED = "all experts are assumed to get equally many tokens, but a step with an uneven router can need more memory"

_TRIAL = 32
"""Tokens in a trial row with two documents. The trace of this row shows whether the documents attend to each other."""

_MXFP4_BYTES = (4 + 8 / 32) / 8
"""Bytes per MXFP4 value: 4 bits per value, and an 8-bit scale for 32 values (OCP MX specification 1.0, section 5.2)."""

_PART_OF_ROOM = 0.25
"""If a step without recomputation needs less than this share of the allowed memory, `alternative` returns ""."""


@dataclass(frozen=True)
class PlannedStep:
    """The step of a plan, which can be traced with different choices of layers to recompute.

    Attributes:
        ranges: the value ranges that decided the policy, or None if ranges were not measured.
        by_tokens: True if rows have the lengths of the training's fullest batch. The memory is then not linear in the number of
            rows. False if all rows have the maximum length.
    """

    plan: StepPlan
    config: Any
    policy: PrecisionPolicy
    ranges: Ranges | None = None
    phases: Sequence[str] = DEFAULT_PHASES
    by_tokens: bool = False
    _models: dict[str, tuple[Any, tuple[str, ...]]] = field(default_factory=dict)
    _traces: dict[tuple[str, int, int], Trace] = field(default_factory=dict)

    @cached_property
    def room(self) -> Room:
        return room_of(device_profile(self.plan.device))

    def choice(self) -> Choice:
        """Choose the layers to recompute in the backward. The check and the training make the same choice."""
        if self.plan.unforeseen:
            return Choice(CHECKPOINTING, self.plan.unforeseen)
        try:
            model, _ = self.model(None)
            if not getattr(model, "supports_gradient_checkpointing", True):
                return Choice(None, f"{type(model).__name__} has no gradient checkpointing")
            if not self.room.holds(self._least_bytes):  # a trace without recomputation is not needed
                least = format_bytes(self._least_bytes)
                return Choice(CHECKPOINTING, f"weights and adapters alone take {least}: {self.room.words}")
            return choose(lambda arguments: self._foreseen(arguments).memory.peak, self.room)
        except IsotypeError as error:
            return Choice(CHECKPOINTING, f"memory without recomputation is unknown: {error.headline}")

    @cached_property
    def _least_bytes(self) -> int:
        """Bytes of the weights, adapters and buffers, which every step needs."""
        return sum(self.constant_bytes(None).values())

    def model(self, arguments: Mapping[str, Any] | None) -> tuple[Any, tuple[str, ...]]:
        """Return the model on the meta device, and notes on its fused layers."""
        key = repr(arguments)
        if key not in self._models:
            # PEFT writes the names of the matched modules, here of a folded model, into its config.
            plan = replace(self.plan, checkpointing=arguments, lora=copy.deepcopy(self.plan.lora))
            model = _model(plan, self.config, self.policy)
            self._models[key] = model, _fuse(plan, model)
        return self._models[key]

    @cached_property
    def mixed(self) -> bool:
        """True if the documents of a packed row would attend to each other. In this case, a training unpacks the
        documents.

        The documents do not attend to each other if the trace has an operator that a line of
        `lines_separating_documents()` calls.
        """
        plan = self.plan
        if not plan.packed:
            return False
        model, _ = self.model(None)
        if _attends_by_lengths(plan, model):
            return bool(why_whole_rows(model))
        inputs = _inputs(replace(plan, rows=1), _TRIAL, model)
        step = StepRequest(model, inputs, self.policy, plan.device, phases=("forward",))
        separated = {call.source for call in trace_of(step).calls} & lines_separating_documents()
        return not separated or has_states(model) or bool(why_whole_rows(model))

    def _inputs(self, rows: int, tokens: int, lengths: Lengths | None, model: Any) -> LossOf:
        """Return the inputs of a step. If `mixed` is True, each document has a separate row."""
        plan = replace(self.plan, rows=rows)
        if self.mixed:
            rows, tokens = one_a_row(lengths or plan.lengths, tokens, rows)
            return _inputs(replace(plan, rows=rows, packed=False), tokens, model)
        # A variable-length kernel needs no mask, and its trace needs the device.
        known = self.by_tokens and plan.unpads and not _attends_by_lengths(plan, model)
        return _inputs(plan, tokens, model, fullest_batch(lengths, tokens, rows) if known else ())

    def request(self, arguments: Mapping[str, Any] | None, rows: int, tokens: int) -> StepRequest:
        plan, (model, _) = self.plan, self.model(arguments)
        return StepRequest(
            model,
            self._inputs(rows, tokens, plan.lengths, model),
            self.policy,
            plan.device,
            autocast=self.policy.autocast or False,
            scaler=self.policy.loss_scaling,
            optimizer=plan.optimizer,
            learning_rate=plan.learning_rate,
            phases=self.phases,
            fsdp=plan.fsdp,
            devices=plan.devices,
            reshard=plan.reshard,
            deepspeed=plan.deepspeed,
            reference=plan.copied,
            accumulates=-(-plan.step_rows // rows),
            fetches_all=True,
            room=self.room,
            evaluation=self._between_steps(model, rows, tokens),
            ranges=self.ranges,
        )

    def padding(self, length: int) -> Iterator[str]:
        """If the traced batch has padding, yield a line on its tokens and its padding."""
        model, _ = self.model(self.plan.checkpointing)
        mask = self._inputs(self.plan.rows, length, self.plan.lengths, model).inputs.get("attention_mask")
        # The row of the greatest length may be in another batch.
        mask = mask if mask is None else mask[:, : mask.sum(1).max()]
        if mask is not None and not mask.all():
            yield f"the fullest batch has {mask.sum():,} tokens and {(mask == 0).sum():,} of padding"

    def _between_steps(self, model: Any, rows: int, tokens: int) -> Any:
        """Return the `rollout` that generates completions, or `_evaluation(…)` if this device generates no completions."""
        plan = self.plan
        if plan.generations is None or tokens <= plan.completion:
            return self._evaluation(model, rows, tokens)
        generated = rows * plan.generations or max(rows, plan.step_rows)
        most = max(generated, plan.evaluation or 0)
        prompts = synthetic_batch(model, most, tokens - plan.completion, plan.pictures)
        del prompts["labels"]
        return rollout(prompts, plan.completion)

    def _evaluation(self, model: Any, rows: int, tokens: int) -> Any:
        """Return an evaluation batch of the training with its loss, or None if the training has no evaluation."""
        plan = self.plan
        if plan.evaluation is None:
            return None
        length = plan.evaluation_length or tokens
        if tokens < row_length(plan, self.config):  # evaluation rows are cut, too
            length = min(length, tokens)
        length = row_length(replace(plan, length=length), self.config)
        lengths, rows = plan.evaluation_lengths, plan.evaluation or rows
        if lengths is not None and not plan.packed and not plan.completion:
            rows = min(rows, lengths.rows)
        return self._inputs(rows, length, lengths, model)

    def report(self, arguments: Mapping[str, Any] | None, rows: int, tokens: int) -> Report:
        """Return the report on the step. If `choice` has already traced the step, the report uses this trace."""
        trace = self._traces.get((repr(arguments), rows, tokens))
        return run(self.request(arguments, rows, tokens), traced=trace)

    def alternative(self, choice: Choice) -> str:
        """Describe the cost of the opposite choice (all layers are recomputed, or none); "" if most memory is free."""
        room = self.room.size
        if room is None or self.plan.unforeseen or self._least_bytes > room:
            return ""
        every = choice.arguments is None
        try:
            if self._foreseen(None).memory.peak < _PART_OF_ROOM * room:
                return ""
            trace = self._foreseen(CHECKPOINTING if every else None)
        except NotForeseenError:
            return ""
        time = step_time(trace)
        least = "" if time is None else f"{format_duration(time.seconds)} at least"
        if every:
            costs = ", ".join(filter(None, (format_bytes(trace.memory.peak), least)))
            return f"; with every layer recomputed: {costs}"
        return least and f"; without recomputation: {least}"  # `choice.reason` has the bytes

    def _foreseen(self, arguments: Mapping[str, Any] | None) -> Trace:
        rows, tokens = self.plan.rows, self.plan.longest or row_length(self.plan, self.config)
        key = (repr(arguments), rows, tokens)
        if key not in self._traces:
            self._traces[key] = self.traced(arguments, rows, tokens)
        return self._traces[key]

    def constant_bytes(self, arguments: Mapping[str, Any] | None) -> Mapping[str, int]:
        """Return kind -> bytes of the weights, adapters and buffers, which every step needs. No operator is traced."""
        request = self.request(arguments, 1, row_length(self.plan, self.config))
        memory = trace_of(replace(request, phases=(), evaluation=None)).memory
        kinds = memory.phases[memory.peak_phase or "load"]
        return {kind: kinds.get(kind, 0) for kind in ("weights", "adapters", "buffers")}

    def traced(self, arguments: Mapping[str, Any] | None, rows: int, tokens: int) -> Trace:
        """Trace the step, without a cache. Raise NotForeseenError if the step cannot be traced."""
        trace = trace_of(self.request(arguments, rows, tokens))
        if trace.failure is not None:
            raise NotForeseenError(f"the step could not be traced ({trace.failure.error})")
        return trace


def check_plan(plan: StepPlan, phases: Sequence[str]) -> Report:
    checkpoint = open_model(plan.source, plan.revision)  # raises CheckpointError if it is no model
    policy, ranges = policy_by_ranges(checkpoint, plan.precision, plan.device, when=plan.ranges)
    plan.check_policy(policy)
    config = checkpoint.model_config
    checkpoint.require_complete_gguf()
    step = PlannedStep(plan, config, policy, ranges, phases, by_tokens=True)
    with sound_attention(device_profile(plan.device)):
        chosen = step.choice() if plan.auto else None
        if chosen is not None:
            plan = replace(plan, checkpointing=chosen.arguments)
        model, fusion = step.model(plan.checkpointing)
        length = row_length(plan, config)
        report = step.report(plan.checkpointing, plan.rows, length)
    words = []
    if chosen is not None:
        other = step.alternative(chosen)
        words = [f"gradient checkpointing {chosen.words} (auto): {chosen.reason}{other}"]
    trace, setup, positions = report.trace, report.trace.setup, positions_of(config) or length
    # Rows beyond the positions are not cut.
    beyond = [f"rows longer than the model's {positions:,} positions"] * (length > positions)
    details = (*setup.details, *beyond, *_dequantized(config, trace))
    towers = () if plan.pictures is not None and not plan.pictures.sizes else setup.towers
    data = "; ".join(filter(None, (plan.data, *step.padding(length))))
    setup = replace(setup, data=data, details=details, towers=towers)
    mixed = (MIXED,) if step.mixed else ()
    notes = (*trace.notes, *plan.notes, *_notes(plan, model), *mixed, *fusion, *words)
    return replace(report, trace=replace(trace, setup=setup, model=plan.source, notes=notes))


def _model(plan: StepPlan, config: Any, policy: PrecisionPolicy) -> Any:
    method = METHODS[plan.method]
    require_decoder(config, method)
    # If only some layers are checkpointed, their numbers select them. Folding before would change the numbers.
    some = (plan.checkpointing or {}).get("every_n_layers", 1) != 1
    model = weightless_model(
        config,
        policy,
        lora=plan.lora,
        adapt=plan.adapt,
        fold=not some,
        attn_implementation=plan.attention,
        **method.load_arguments(),
    )
    require_plain_head(model, method)
    model.config.use_cache = False
    text = model.config.get_text_config()
    if method.loss == "reward" and text.pad_token_id is None:
        text.pad_token_id = 0  # any id: the trainer's id comes from the tokenizer, which is unknown here
    if plan.checkpointing is not None:
        checkpoint_gradients(model, plan.checkpointing, adapters=plan.lora is not None)
    if some:
        fold(model)
    model.train()
    for module in () if plan.dropout else model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0
    if method.fused_head:
        put_head(model)
    return model


def _fuse(plan: StepPlan, model: Any) -> tuple[str, ...]:
    if not plan.fuse:
        return ()
    profile = device_profile(plan.device)
    # Only on this machine's CPU, and without FSDP, a training may keep dense copies of quantized weights in memory.
    budget = None if profile.present and profile.kind == "cpu" and not plan.fsdp else 0
    report = fuse(model, budget=budget, device=profile)
    return (f"layers with one input are fused separately: {report.unseen}",) if report.unseen else ()


def row_length(plan: StepPlan, config: Any) -> int:
    """Return the number of tokens in a row: the requested number, or a default that is at most the model's positions."""
    default = PROMPT_TOKENS + plan.completion if plan.completion else DEFAULT_LENGTH
    wanted = plan.length or min(default, positions_of(config) or default)
    # Every traced row gets images, even if the rows of the data are short.
    traced = plan.lengths is not None or plan.pictures is not None
    return max(wanted, least_length(config, plan.pictures)) if traced else wanted


def positions_of(config: Any) -> int | None:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def least_row(plan: StepPlan, config: Any) -> int:
    """Return the smallest length to which the rows of the plan can be cut. Rows with images are not cut."""
    of_data = 0 if plan.lengths is None or plan.pictures in (None, NONE) else plan.lengths.longest
    return max(of_data, least_length(config, plan.pictures))


def _inputs(plan: StepPlan, length: int, model: Any, lengths: Sequence[Sequence[int]] = ()) -> LossOf:
    prompt = length - plan.completion if plan.completion else plan.prompt
    return step_inputs(
        plan.method,
        model,
        plan.rows,
        length,
        prompt=min(prompt, length - 1),
        completion=min(plan.completion, length - 1),
        reference=plan.reference,
        packed=plan.packed and not _attends_by_lengths(plan, model),
        pictures=plan.pictures,
        lengths=lengths,
    )


def _attends_by_lengths(plan: StepPlan, model: Any) -> bool:
    """Return True if the attention of the training uses the lengths of packed documents. Rows are then traced unpacked."""
    profile = device_profile(plan.device)
    base = without_peft(model)
    return goes_by_lengths(base) or (plan.fuse and may_go_by_lengths(base, profile))


def _dequantized(config: Any, trace: Trace) -> Iterator[str]:
    """Yield a line about experts that are in MXFP4 in the checkpoint, but in a float dtype in the model."""
    saved = quantization_of(config)
    if saved is None or not saved.experts:
        return
    experts, loaded = dense_stacks(trace)
    if loaded:
        dtype = experts[0].dtype
        stored = int(loaded / dtype.itemsize * _MXFP4_BYTES)
        sizes = f"{format_bytes(loaded)} instead of {format_bytes(stored)} in the files"
        kept = f"--quantization {MXFP4} keeps them packed"
        yield f"mxfp4 experts dequantized to {dtype_name(dtype)}: {sizes} ({kept})"


def _notes(plan: StepPlan, model: Any) -> tuple[str, ...]:
    notes = [*batch_notes(model.config, plan.pictures), *getattr(model, "adapter_notes", ())]
    if next(outermost(model), None) is not None:
        notes.append(BALANCED)
    if plan.checkpointing is not None and not getattr(model, "supports_gradient_checkpointing", True):
        notes.append(f"{type(model).__name__} has no gradient checkpointing, so all activations are saved")
    if METHODS[plan.method].fused_head and device_profile(plan.device).kind in ("cuda", "rocm", "xpu"):
        uncounted = "the memory of its tiles (up to 256 MiB) is not counted"
        notes.append(f"TRL's kernel computes the loss on this device; {uncounted}")
    return tuple(notes)
