"""Merges an adapter into its base model, rounds once, and reports the rounding error."""

import gc
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isotype.checkpoint.adapter import Adapter, base_policy, inference_policy, read_adapter
from isotype.checkpoint.export import check_exportable, exportable_tokenizer, is_exportable, require_program
from isotype.checkpoint.merge.comparison import Candidate, Learned, cheapest, learned, merged_in_float32
from isotype.checkpoint.merge.layers import Merging, WrittenModel
from isotype.checkpoint.merge.report import ENOUGH, MergeReport, share, wider
from isotype.checkpoint.merge.write import FORMATS, Output, write_merged
from isotype.checkpoint.resolve import resolve_precision
from isotype.checkpoint.stored_weights import blank_model
from isotype.checkpoint.tokenizer import tokenizer_of
from isotype.compat.peft import kind_of_adapter
from isotype.core.dtypes import COMPUTE_DTYPES, GGUF_TYPES, dtype_name, parse_dtype
from isotype.core.errors import CheckpointError, IsotypeError, PrecisionError, Problem, UsageError
from isotype.core.formats import QUANTIZATIONS
from isotype.core.names import base_name
from isotype.model.boundary import original_class
from isotype.model.experts.stack import stacked_weights
from isotype.precision.facts import ModelFacts
from isotype.precision.policy import PrecisionPolicy
from isotype.ranges.measure import Rows

_SAME = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "vocab_size",
)  # fmt: skip

__all__ = ["MergeReport", "merge_adapter"]


def merge_adapter(
    adapter: str | Path,
    output: str | Path,
    *,
    base: str | Path | None = None,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    stored: str | None = None,
    rows: Rows | None = None,
) -> MergeReport:
    """Merge an adapter into its base model, and write a model that plain transformers loads.

    The adapter is added to these weights:

    - without `base`: the weights of the training, dequantized if they were quantized;
    - with `base`: the weights in the files of `base`;
    - if `stored` is the training's quantization format: the weights in the files of the adapter's base. Quantizing
      dequantized weights again would lose small updates.

    PEFT merges each layer in float32. The sum is rounded once. Rounding to 16 bits is stochastic
    (`isotype.checkpoint.merge.layers.unbiased`). The model is built in a temporary folder, opened with transformers, and
    compared in float32 with the trained model and the base (`isotype.checkpoint.merge.comparison`). At the end, the folder is
    renamed to `output`. For quantized and GGUF results, a second merge measures the error of each weight.

    Peak memory is the adapter, the parts outside of blocks, two blocks in the written dtype, and 14 bytes per entry of
    the largest adapted weight. If PEFT reads the base to add the adapter (DoRA), the peak includes the whole base.

    Args:
        adapter: directory of the adapter.
        output: directory to write, which must be empty or not exist, or a GGUF file whose name ends in `.gguf`.
        base: another base model to merge into (path, GGUF file, hub id), such as the 16-bit original.
        dtype: dtype of the merged weights. `"auto"` is the compute dtype of the training if it is known, else the dtype of the
            base. With `"auto"`, tensors in another dtype than the most common dtype in the files of the base keep their dtype.
            Parameters that the author of the model keeps in float32 stay float32.
        revision: branch, tag or commit of a base on the hub, instead of the commit that the adapter names.
        stored: None for dense safetensors; `"nf4"`, `"fp4"` or `"int8"` for the format of bitsandbytes; or a key of
            `isotype.core.dtypes.GGUF_TYPES` for a GGUF file. For a GGUF file, None means `"f16"` if `dtype` is float16, else
            `"bf16"`, as in llama.cpp's converter.
        rows: training rows for the comparison with the trained model; None for isotype's texts.

    Raises:
        CheckpointError: adapter or base does not exist, they do not match, or less than half of the learning would be kept.
        PrecisionError: the dtype cannot represent the weights.
        UsageError: `output` exists, or PEFT cannot merge this kind of adapter.
        SaveError: the disk is full or not writable. No file remains.
    """
    final = Output(Path(output))
    final.check()
    _check_stored(stored, dtype, final)
    require_program(stored, Path(adapter), final.path)
    saved = read_adapter(adapter, revision if base is None else None)
    _check_mergeable(saved)
    onto = saved if base is None else replace(saved, base=str(base), revision=revision)
    facts, policy, trained = _policies(saved, onto, dtype, stored)
    target, reason = _target(dtype, saved, facts)
    config = onto.open_base().model_config
    _check_parts(onto, stored, config)
    if stored is None and final.file:
        stored = "f16" if target == torch.float16 else "bf16"
    if stored in GGUF_TYPES:
        check_exportable(config)
        exportable_tokenizer(onto.tokenizer())
        target, reason = GGUF_TYPES[stored], f"rounded once, to {stored}"
    outputs, tokenizer, notes, trained = _learned(saved, trained, rows)
    instead = wider(stored, torch.bfloat16, torch.float32)
    one_dtype = dtype != "auto"
    begin = partial(Merging, onto, policy, target, one_dtype=one_dtype, instead=instead)
    merging = begin()
    if base is not None and outputs is not None:  # the base of the training was readable
        check_same_base(saved, onto)
    model_class = original_class(merging.model)
    with final.staged() as built:
        tokenizer = tokenizer or onto.tokenizer()
        path = final.model_in(built, stored)
        with final.disk_errors():
            notes += write_merged(merging, tokenizer, path, target, stored)
        weights, changes = merging.weights, merging.notes
        size = sum(file.stat().st_size for file in built.rglob("*") if file.is_file())
        del merging
        gc.collect()  # a PEFT model has reference cycles
        written = WrittenModel(model_class, path, stored)
        # Before the logits: a forward on a CPU may reorder 4-bit weights.
        if stored is not None:
            weights = begin(written=written).measured()
        del written
        difference = cheap = None
        if outputs is not None:
            difference = outputs.compare(merged_in_float32(path, model_class))
            part = difference.kept
            if trained is not None and part is not None and (part < ENOUGH or size < _CHEAP):
                cheap = cheapest(outputs, saved, _formats_to_try(saved, trained, target, tokenizer))
        report = MergeReport(
            adapter=saved.directory,
            output=final.path,
            base=str(onto.base),
            storage=policy.quantization or policy.storage,
            dtype=target,
            dtype_reason=reason,
            weights=weights,
            logits=difference,
            bytes=size,
            stored=stored,
            model=final.path if final.file else final.model_in(final.path, stored),
            notes=(*notes, *changes, *_cautions(saved, policy, base is None, outputs is not None)),
            range_warnings=_range_warnings(saved.policy, target, stored),
            cheapest=cheap,
            answers=bool(getattr(model_class, "can_generate", bool)()),
            exportable=stored is None and is_exportable(config, tokenizer),
        )
        _require_change(report, trained is not None and stored == trained.storage)
    return report


def _check_mergeable(adapter: Adapter) -> None:
    adapter.require_usable()
    config = adapter.config
    why = None
    if config.is_prompt_learning:
        why = "it adds virtual tokens to the input, and changes no weight"
    elif getattr(config, "alora_invocation_tokens", None):
        why = "an activated LoRA acts only after its invocation tokens"
    elif getattr(config, "layer_replication", None):
        why = "it replicates layers of the base, and every copy would need different merged weights"
    if why:
        raise _unmergeable(adapter, f"a {kind_of_adapter(config)} adapter; {why}")


def _unmergeable(adapter: Adapter, why: str) -> UsageError:
    expected = "an adapter that adds to weights: LoRA, DoRA, LoHa, LoKr, OFT, IA3, …"
    fix = f"use it together with its base: isotype chat {shlex.quote(str(adapter.directory))}"
    return UsageError.of("this adapter cannot be merged", f"{adapter.directory}: {why}", expected, fix)


def _check_parts(adapter: Adapter, stored: str | None, config: Any) -> None:
    """Raise UsageError if the base lacks the biases of the adapter, or if it has stacked experts and `stored` is a bitsandbytes format."""
    end = ".lora_B.bias"
    biased = [t.name.removesuffix(end) for t in adapter.headers.tensors if t.name.endswith(end)]
    if biased:
        modules = dict(blank_model(config).named_modules())
        name = next((name for name in map(base_name, biased) if modules[name].bias is None), None)
        if name is not None:
            raise _unmergeable(adapter, f"it adds a bias to {name}, which has none")
    name = _stacked_expert(config) if stored in QUANTIZATIONS else None
    if name is not None:
        what = f"{adapter.base}: {name}"
        expected = "only linear layers, because transformers cannot read quantized stacked experts"
        gguf = ", or --gguf q8_0" if is_exportable(config, None) else ""
        fix = f"--dtype bfloat16{gguf}; or do not merge: load the base in {stored}, and the adapter"
        raise UsageError.of(f"experts cannot be merged into {stored}", what, expected, fix)


def _stacked_expert(config: Any) -> str | None:
    """Return the name of a stacked expert weight, because transformers cannot read it if it is quantized; None without one."""
    return next((f"{name}.{leaf}" for name, _, leaf in stacked_weights(blank_model(config))), None)


def _policies(
    saved: Adapter, onto: Adapter, dtype: str | torch.dtype, stored: str | None
) -> tuple[ModelFacts, PrecisionPolicy, PrecisionPolicy | None]:
    """Return (facts about the base to merge into, its policy, policy of the training or None for another base)."""
    trained = base_policy(saved) if onto is saved else None
    if trained and saved.policy and not (trained.quantized or saved.policy.quantized):
        # Under autocast, frozen weights have more digits than the compute dtype.
        trained = replace(trained, storage=saved.policy.storage)
    source, revision = str(onto.base), onto.revision
    facts = onto.open_base().facts
    if trained is not None:
        back = stored in QUANTIZATIONS and stored == trained.storage
        if not back or facts.saved_format is not None:
            return facts, trained, trained
        # A dequantized weight is the value of a code. An update below half the distance to the next value would be lost.
        # The files have the weights before quantization. A small update moves some of these weights to the next code.
    policy = resolve_precision(source, "float32", device="cpu", revision=revision)
    if policy.quantized:
        return facts, inference_policy(source, None, revision=revision), trained
    # The base keeps the dtype of its files, unless the merged weights are float32.
    stored_dtype, target = facts.trained_dtype, _target(dtype, saved, facts)[0]
    if stored_dtype not in COMPUTE_DTYPES or stored_dtype is None or target == torch.float32:
        return facts, policy, trained
    pinned = (*facts.pinned, *facts.pinned_strict) if stored_dtype != torch.float32 else ()
    policy = replace(policy, compute=stored_dtype, storage=dtype_name(stored_dtype), pinned=pinned)
    return facts, policy, trained


def _target(dtype: str | torch.dtype, adapter: Adapter, facts: ModelFacts) -> tuple[torch.dtype, str]:
    if dtype != "auto":
        requested = parse_dtype(dtype)
        if requested not in COMPUTE_DTYPES:
            what, expected = f"--dtype {dtype_name(requested)}", "float32, bfloat16 or float16"
            raise PrecisionError.of("a merge cannot write this dtype", what, expected, "give one of these")
        return requested, "as requested"
    stored = facts.trained_dtype if facts.trained_dtype in COMPUTE_DTYPES else None
    if adapter.policy is None:
        if stored is None:
            return torch.float32, "neither the adapter nor the base names the dtype of the training"
        return stored, "the dtype of the base checkpoint, because the adapter has no precision_policy.json"
    compute = adapter.policy.compute
    if compute == torch.float16 and stored not in (None, torch.float16):
        why = f"trained in float16, which cannot represent every {dtype_name(stored)} value"
        return stored, f"the dtype of the base checkpoint: the adapter was {why}"
    return compute, "the compute dtype of the training"


def _check_stored(stored: str | None, dtype: str | torch.dtype, output: Output) -> None:
    problem, name = None, str(dtype).removeprefix("torch.")
    if output.file and (stored in QUANTIZATIONS or (stored is None and dtype != "auto")):
        flags = f"--dtype {name}" if stored is None else f"--quantization {stored}"
        fix = "set --gguf f16, bf16, q8_0, …; or set an --output without .gguf, for a directory"
        problem = Problem(f"--output {output.path} and {flags}", "a GGUF type for a GGUF file", fix)
    elif stored is not None and stored not in FORMATS:
        problem = Problem(f"stored as {stored}", f"one of {', '.join(FORMATS)}", "give one of these")
    elif stored in GGUF_TYPES and dtype != "auto":
        flags = f"--dtype {name} and --gguf {stored}"
        problem = Problem(flags, "only one of the two, because a GGUF type sets the dtype", "omit --dtype")
    if problem is not None:
        raise UsageError("a merged model cannot be stored in this format", [problem])


def _learned(
    adapter: Adapter, policy: PrecisionPolicy | None, rows: Rows | None
) -> tuple[Learned | None, Any, list[str], PrecisionPolicy | None]:
    """Run the adapter on the model of its training. Return (outputs or None, tokenizer, notes, policy of that model).

    `policy` is None if the adapter is merged into another model. In this case, the model of the training may be
    missing.
    """
    try:
        trained = policy or base_policy(adapter)
        tokenizer = adapter.tokenizer()
        if tokenizer is None:
            none = "logits were not compared, because neither adapter nor base has a tokenizer"
            return None, None, [none], trained
        return learned(adapter, trained, rows, tokenizer), tokenizer, [], trained
    except IsotypeError as error:
        if policy is not None:
            raise
        reason = error.problems[0].given if error.problems else ""
        without = tokenizer_of(adapter.directory)
        return None, without, [f"logits were not compared: {error.headline} ({reason})"], None


_CHEAP = 4e9
"""Bytes of a model. For a larger model, other formats are tried only if too little of the learning is kept."""

LEAST = 0.5
"""A merge back into the format of the training writes nothing if it keeps less than this fraction of the learning."""


def _formats_to_try(
    adapter: Adapter, policy: PrecisionPolicy, target: torch.dtype, tokenizer: Any
) -> tuple[Candidate, ...]:
    """Return the formats to try, fewest bits first, for the training's `policy` and the merged weights' dtype `target`."""
    checkpoint = adapter.open_base()
    base, original = "", policy
    if policy.quantized and checkpoint.facts.saved_format is None:
        if policy.storage != "nf4":  # a merge into nf4 uses the stored base without this argument
            base = f"--base {shlex.quote(str(adapter.base))} "
        original = resolve_precision(str(adapter.base), "float32", device="cpu", revision=adapter.revision)
    forms = []
    if _stacked_expert(checkpoint.model_config) is None:
        forms.append(Candidate(f"{base}--quantization nf4", "nf4", 4.5, original))
        forms.append(Candidate("--quantization int8", "int8", 8, policy))
    if is_exportable(checkpoint.model_config, tokenizer):
        forms.append(Candidate("--gguf q8_0", "q8_0", 8.5, policy))
    wide = torch.bfloat16 if policy.plain == torch.float32 else policy.plain
    sixteen = dtype_name(target if target in (torch.bfloat16, torch.float16) else wide)
    return (*forms, Candidate(f"--dtype {sixteen}", sixteen, 16, policy))


def _require_change(report: MergeReport, back: bool) -> None:
    """Raise CheckpointError if no weight changes, or if a merge to the format of the training (`back`) loses too much."""
    if not report.weights:
        what = f"the adapter {report.adapter} changes no weight of {report.base}"
        fix = "use an adapter that was trained; nothing was written"
        raise CheckpointError.of("nothing was merged", what, "an adapter that changes weights", fix)
    kept = None if report.logits is None else report.logits.kept
    if back and (report.again if kept is None else kept < LEAST):
        keeps = "" if kept is None else f"{share(kept)} of what was learned is kept"
        lost = original = ""
        if report.again:
            lost = f"{100 * report.vanished_share:.1f} % of the changed entries have the same codes as in the base"
            original = f"; or merge into the unquantized base: --base ORIGINAL --quantization {report.stored}"
        raise CheckpointError.of(
            f"a merge into {report.stored} would lose what was learned",
            "; ".join(filter(None, (keeps, lost))),
            f"a format that keeps {share(ENOUGH)} of what was learned",
            f"merge with {report.cheapest or '--dtype float32'}{original}; or keep the adapter separate from its base: "
            f"isotype chat {shlex.quote(str(report.adapter))}; nothing was written",
        )


def _cautions(adapter: Adapter, policy: PrecisionPolicy, own_base: bool, compared: bool) -> list[str]:
    trained = adapter.policy
    cautions = []
    if own_base and trained is not None and trained.quantized and not policy.quantized:
        cautions.append(
            f"the adapter was merged into the weights in the base's files, not into the training's {trained.storage} weights: "
            "if the training's weights were dequantized and quantized again, the adapter's changes would be lost"
        )
    if compared and not own_base and trained is not None and trained.quantized:
        cautions.append(
            f"the adapter was trained on {trained.storage} weights and merged into others: the logits also differ "
            f"because {trained.storage} rounds the weights"
        )
    if compared and own_base and policy.storage == "int8":
        cautions.append(
            "int8 layers round their inputs in training and with a separate adapter, but not in the merged model; the "
            "comparison does not round inputs"
        )
    quantized_on = trained.device if own_base and trained is not None and trained.quantized else policy.device
    if trained is not None and quantized_on.split(":")[0] != policy.device.split(":")[0]:
        cautions.append(
            f"the base was quantized on {trained.device} in training, but on {policy.device} for the merge: a weight "
            "halfway between two codes may get the other code"
        )
    if adapter.policy is None and own_base:
        as_stored = f"the base was used as it is stored, in {policy.storage}"
        cautions.append(f"the adapter has no precision_policy.json: {as_stored}")
    return cautions


def _range_warnings(
    trained: PrecisionPolicy | None, target: torch.dtype, stored: str | None
) -> tuple[str, ...]:
    """Return a warning if `target` is float16, but the training computed some values in float32 because of their range."""
    if trained is None or target != torch.float16:
        return ()
    wide = []
    if trained.wide_residual:
        wide.append(f"hidden states in float32 ({trained.reasons.get('residual', 'no reason was saved')})")
    # A merged model has no adapters that could compute in float32.
    others = [exception for exception in trained.exceptions if exception.how != "adapters"]
    wide += replace(trained, exceptions=tuple(others)).exception_lines()
    if not wide:
        return ()
    return (
        f"the merged model is float16 and may overflow, because the training used {'; '.join(wide)}. Merge with "
        f"{wider(stored, torch.bfloat16, torch.float32)}, or keep the adapter separate, with its policy",
    )


def check_same_base(trained: Adapter, onto: Adapter) -> None:
    """Raise one CheckpointError with all differences if the base of `onto` is not the model of the training."""
    configs = (adapter.open_base().model_config for adapter in (onto, trained))
    base_config, trained_config = (config.get_text_config() for config in configs)
    problems = [
        Problem(
            f"--base {onto.base}: {name} {getattr(base_config, name, None)}",
            f"{name} {getattr(trained_config, name, None)}, as in {trained.base}, the base of the training",
            "use the same model in another precision, or omit --base",
        )
        for name in _SAME
        if getattr(base_config, name, None) != getattr(trained_config, name, None)
    ]
    if problems:
        raise CheckpointError("the base is not the model that the adapter was trained on", problems)
