"""Merge an adapter into its base model, round once, and say what the rounding cost."""

from __future__ import annotations

import gc
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from isotype.checkpoint.adapter import (
    Adapter,
    base_policy,
    inference_policy,
    load_for_inference,
    read_adapter,
    tokenizer_of,
)
from isotype.checkpoint.facts import facts_of
from isotype.checkpoint.load import dense_source, without_bars
from isotype.checkpoint.merge_layers import merged
from isotype.checkpoint.merge_report import (
    LogitsDifference,
    MergeReport,
    compare_logits,
)
from isotype.checkpoint.resolve import resolve_precision
from isotype.checkpoint.same_base import check_same_base
from isotype.core.dtypes import COMPUTE_DTYPES, dtype_name, parse_dtype
from isotype.core.errors import IsotypeError, PrecisionError, Problem, SaveError, UsageError
from isotype.core.staging import fsync_tree, publish_directory
from isotype.precision.facts import ModelFacts
from isotype.precision.policy import PrecisionPolicy

__all__ = ["MergeReport", "merge_adapter"]

_PROMPT = (
    "A tensor's dtype decides how many digits survive. When two dtypes meet in one matrix product, "
    "what should a careful engineer do first, and why?"
)


def merge_adapter(
    adapter: str | Path,
    output: str | Path,
    *,
    base: str | Path | None = None,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
) -> MergeReport:
    """Merge an adapter into its base model and write a model that plain transformers loads.

    The base is the one that the adapter was trained on: quantized as it was in training and dequantized again, so
    that the adapter meets the weights it has learned to correct; or `base`, taken as it is stored. PEFT merges each
    layer in float32, and the sum is rounded once. The model is built aside, loaded back with transformers to compare
    its logits, and only then renamed to `output`.

    Memory on the CPU: the model once in the policy's compute dtype (in float32 for int8, whose product of code and
    constant needs the digits, and for float32 output), and 14 bytes for each entry of the largest adapted weight.
    The models whose logits are compared are loaded before and after it, never together with another one.

    Args:
        adapter: directory of the adapter.
        output: directory to write; it must not exist, or be empty.
        base: another base model to merge into (path, GGUF file, hub id), such as the 16-bit original.
        dtype: dtype of the merged weights; `"auto"`: the compute dtype it was trained in, or the base's. Parameters
            that the model's author pins stay float32.
        revision: branch, tag or commit of a base on the hub, instead of the one that the adapter names.

    Raises:
        CheckpointError: no adapter, no base, or they do not fit.
        PrecisionError: the dtype cannot hold the weights.
        UsageError: `output` is taken, or this kind of adapter cannot be merged.
        SaveError: the disk is full or cannot be written; nothing is left behind.
    """
    directory = Path(output)
    _check_output(directory)
    saved = read_adapter(adapter)
    _check_mergeable(saved)
    revision = revision or (saved.revision if base is None else None)
    source, facts, policy = _base(saved, None if base is None else str(base), dtype, revision)
    target, reason = _target(dtype, saved, facts)
    logits, tokenizer, notes = _trained_logits(saved, own_base=base is None)
    model, weights, changes = merged(saved, source, policy, target, revision)
    if base is not None and logits is not None:  # the base that it was trained on can be read
        check_same_base(saved, source, revision)
    model_class = type(model)
    with _staging(directory) as built:
        with _disk_errors(directory):
            size = _write(
                model, tokenizer or tokenizer_of(dense_source(source, policy.plain), revision), built, target
            )
        del model
        difference = None if logits is None else _read_back(model_class, built, tokenizer, logits)
    return MergeReport(
        adapter=saved.directory,
        output=directory,
        base=source,
        storage=policy.storage,
        dtype=target,
        dtype_reason=reason,
        weights=weights,
        logits=difference,
        bytes=size,
        notes=(*notes, *changes, *_cautions(saved, policy, base is None, logits is not None)),
        passed=_passed(saved.policy, target),
    )


# -------------------------------------------------------------------------------------------- before the merge


def _check_output(output: Path) -> None:
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists():
        kind = "a directory with files in it" if output.is_dir() else "a file"
        raise UsageError(
            "the output directory is taken",
            [
                Problem(
                    f"--output {output}: {kind}",
                    "a directory that does not exist yet, or an empty one",
                    "give another one, or remove it first",
                )
            ],
        )


def _check_mergeable(adapter: Adapter) -> None:
    config = adapter.config
    kind = getattr(config.peft_type, "value", config.peft_type)
    why = None
    if config.is_prompt_learning:
        why = "it adds virtual tokens to the input and changes no weight"
    elif getattr(config, "alora_invocation_tokens", None):
        why = "an activated LoRA acts only after its invocation tokens"
    elif getattr(config, "layer_replication", None):
        why = "it replicates layers of the base, which would have to be merged with different updates"
    if why:
        raise UsageError(
            "this adapter cannot be merged",
            [
                Problem(
                    f"{adapter.directory}: a {kind} adapter; {why}",
                    "an adapter that adds to weights: LoRA, DoRA, LoHa, LoKr, OFT, IA3, …",
                    f"use it beside its base: isotype chat {adapter.directory}",
                )
            ],
        )


def _base(
    adapter: Adapter, base: str | None, dtype: str | torch.dtype, revision: str | None
) -> tuple[str, ModelFacts, PrecisionPolicy]:
    """The base to merge into, facts about it, and the policy that it is loaded under."""
    if base is None:
        policy = base_policy(adapter, "auto", None, "auto", revision)
        return str(adapter.base), facts_of(adapter.base, revision=revision), policy
    facts = facts_of(base, revision=revision)
    policy = resolve_precision(base, "float32", device="cpu", revision=revision)
    if policy.quantized:
        return base, facts, inference_policy(base, None, revision=revision)
    # As it is stored, unless that has to be widened anyway.
    wanted = _target(dtype, adapter, facts)[0]
    stored = facts.trained_dtype
    if stored not in COMPUTE_DTYPES or stored is None or wanted == torch.float32:
        return base, facts, policy
    pinned = (*facts.pinned, *facts.pinned_strict) if stored != torch.float32 else ()
    return base, facts, replace(policy, compute=stored, storage=dtype_name(stored), pinned=pinned)


def _target(dtype: str | torch.dtype, adapter: Adapter, facts: ModelFacts) -> tuple[torch.dtype, str]:
    """The dtype of the merged weights, and why."""
    if dtype != "auto":
        asked = parse_dtype(dtype)
        if asked not in COMPUTE_DTYPES:
            raise PrecisionError(
                "no dtype for a merged model",
                [
                    Problem(
                        f"--dtype {dtype_name(asked)}", "float32, bfloat16 or float16", "give one of these"
                    )
                ],
            )
        return asked, "as asked"
    stored = facts.trained_dtype if facts.trained_dtype in COMPUTE_DTYPES else None
    if adapter.policy is None:
        if stored is None:
            return torch.float32, "neither the adapter nor the base says what it was trained in"
        return stored, "the base checkpoint's; the adapter has no precision_policy.json"
    compute = adapter.policy.compute
    if compute == torch.float16 and stored not in (None, torch.float16):
        return (
            stored,
            f"the base checkpoint's; trained in float16, which cannot hold every {dtype_name(stored)} value",
        )
    return compute, "the compute dtype it was trained in"


# ----------------------------------------------------------------------------------------------- logits and files


def _trained_logits(adapter: Adapter, own_base: bool) -> tuple[torch.Tensor | None, Any, list[str]]:
    """Logits of the adapter on the base it was trained on, the tokenizer, and why there are none."""
    try:
        model, tokenizer, _ = load_for_inference(adapter.directory)
    except IsotypeError as error:
        if own_base:
            raise
        given = error.problems[0].given if error.problems else ""
        return (
            None,
            tokenizer_of(adapter.directory),
            [f"logits were not compared: {error.headline} ({given})"],
        )
    logits = None if tokenizer is None else _logits(model, tokenizer)
    del model
    gc.collect()  # a PEFT model holds references to itself; without this two models would lie in memory
    none = "logits were not compared: neither adapter nor base has a tokenizer"
    return logits, tokenizer, [none] if logits is None else []


def _read_back(model_class: Any, directory: Path, tokenizer: Any, trained: torch.Tensor) -> LogitsDifference:
    """The merged model as plain transformers loads it, against the logits of the trained one."""
    gc.collect()  # what was merged refers to itself, too
    with without_bars():
        model = model_class.from_pretrained(directory, dtype="auto")
    return compare_logits(trained, _logits(model, tokenizer))


@torch.no_grad()
def _logits(model: Any, tokenizer: Any) -> torch.Tensor:
    inputs = dict(tokenizer(text=_PROMPT, return_tensors="pt"))
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    device = next(model.parameters()).device
    output = model.eval()(**{name: value.to(device) for name, value in inputs.items()})
    logits: torch.Tensor = output.logits[0].to("cpu", torch.float64)
    return logits if logits.ndim == 2 else logits[None]  # a classifier has one row for the whole text


def _cautions(adapter: Adapter, policy: PrecisionPolicy, own_base: bool, compared: bool) -> list[str]:
    trained = adapter.policy
    cautions = []
    if compared and not own_base and trained is not None and trained.quantized:
        cautions.append(
            f"trained on {trained.storage} weights and merged into others: the logits differ by what {trained.storage} "
            "had rounded, too"
        )
    if compared and own_base and policy.storage == "int8":
        cautions.append(
            "int8 layers round their inputs, too; the merged model does not, so the logits differ by that"
        )
    if (
        own_base
        and trained is not None
        and trained.quantized
        and trained.device.split(":")[0] != policy.device.split(":")[0]
    ):
        cautions.append(
            f"the base was quantized on {trained.device} in training and on {policy.device} here: a weight halfway "
            "between two codes may have taken the other one"
        )
    if adapter.policy is None and own_base:
        cautions.append(
            f"the adapter has no precision_policy.json: the base was taken as it is stored, in {policy.storage}"
        )
    return cautions


def _passed(trained: PrecisionPolicy | None, target: torch.dtype) -> tuple[str, ...]:
    """What the policy of the training knows of values that the dtype `target` of the merged model cannot hold."""
    if trained is None or target != torch.float16:
        return ()
    known = []
    if trained.wide_residual:
        known.append(f"hidden states in float32 ({trained.reasons.get('residual', 'no reason was saved')})")
    # Adapters that compute in float32 are gone once they are merged.
    others = [exception for exception in trained.exceptions if exception.how != "adapters"]
    known += replace(trained, exceptions=tuple(others)).exception_lines()
    if not known:
        return ()
    return (
        f"the merged model is float16, but was trained with {'; '.join(known)}: computed in float16 throughout, it can "
        "overflow; merge with --dtype bfloat16 or float32, or keep the adapter apart, beside its policy",
    )


@contextmanager
def _staging(output: Path) -> Iterator[Path]:
    """Where to build what is published as `output` in the end."""
    built = output.parent / f".{output.name}.{uuid.uuid4().hex}"
    try:
        yield built
        _check_output(output)  # again: what came there in the meantime is not ours to remove
        with _disk_errors(output):
            fsync_tree(built)
            publish_directory(built, output)
    finally:
        shutil.rmtree(built, ignore_errors=True)


def _write(model: Any, tokenizer: Any, directory: Path, dtype: torch.dtype) -> int:
    """Save the model and its tokenizer; returns the bytes written."""
    directory.mkdir(parents=True)
    seen = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    needed = sum(parameter.nbytes for parameter in seen.values())
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise _no_room(
            directory.parent, f"{free / 1e9:.2f} GB are free", f"{needed / 1e9:.2f} GB for the weights"
        )
    with without_bars():
        model.save_pretrained(directory)
    # save_pretrained names the dtype of the first parameter it finds, which may be a pinned one.
    model.config.dtype = dtype
    model.config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


@contextmanager
def _disk_errors(output: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise _no_room(output, str(error), "a directory with room that can be written") from error


def _no_room(place: Path, given: str, expected: str) -> SaveError:
    fix = "free some space, or give --output on another disk"
    return SaveError("the merged model cannot be written", [Problem(f"{place}: {given}", expected, fix)])
