"""`isotype.load`: loads a model. For a saved adapter, loads its base model and adds the adapter."""

import copy
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from isotype.checkpoint.block_streaming import DeferredBlocks
from isotype.checkpoint.checkpoint import Checkpoint, open_checkpoint
from isotype.checkpoint.formats.config import ADAPTER_CONFIG as ADAPTER_CONFIG
from isotype.checkpoint.formats.config import BUILD_ERRORS, read_adapter_config
from isotype.checkpoint.formats.config import model_class as class_of
from isotype.checkpoint.formats.headers import CheckpointHeaders, contents, find_weights, read_headers
from isotype.checkpoint.load import load as load_model
from isotype.checkpoint.resolve import resolve_precision, with_storage_reason
from isotype.checkpoint.tokenizer import tokenizer_of
from isotype.checkpoint.weightless import skeleton
from isotype.compat.bitsandbytes import hide_missing_kernel
from isotype.compat.peft import kind_of_adapter
from isotype.core.errors import CheckpointError, Problem, UsageError, one_line
from isotype.core.formats import FOUR_BITS, MIXED
from isotype.core.names import base_name, listed, plural, unwrapping
from isotype.core.threads import undisturbed
from isotype.model.adapters import add_lora
from isotype.model.enforce import policy_of
from isotype.model.finite import require_finite
from isotype.model.modes import KeepsValues
from isotype.model.targets import task_of
from isotype.precision.by_ranges import with_ranges_of
from isotype.precision.devices.probe import require_present
from isotype.precision.policy import PrecisionPolicy

# PEFT's task type -> the auto class of models with that head.
_HEADS: Mapping[str, str] = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "FEATURE_EXTRACTION": "AutoModel",
}
_SIZE_MISMATCH = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch\.Size\(\[(.*?)\]\) from checkpoint, "
    r"the shape in current model is torch\.Size\(\[(.*?)\]\)"
)


@dataclass(frozen=True)
class Adapter:
    """An adapter in a directory written by PEFT's `save_pretrained`.

    Attributes:
        config: PEFT's `PeftConfig`.
        base: path or hub id of the base model: the base of the training, or another model to merge into. None if the adapter's
            config names no base.
        policy: the policy that the adapter was trained with; None if isotype did not train the adapter.
        revision: branch, tag or commit of a base on the hub, or None.
    """

    directory: Path
    config: Any
    base: str | None
    policy: PrecisionPolicy | None
    headers: CheckpointHeaders
    revision: str | None = None

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Maps the name of each tensor in the adapter's file (the name in the base model) to its shape."""
        return {base_name(tensor.name): tensor.shape for tensor in self.headers.tensors}

    def open_base(self) -> Checkpoint:
        return open_checkpoint(str(self.base), self.revision)

    def tokenizer(self) -> Any | None:
        """Return the tokenizer in the adapter's directory, or else the tokenizer of the base; None if there is none."""
        tokenizer = tokenizer_of(self.directory)
        return self.open_base().tokenizer() if tokenizer is None else tokenizer

    def require_usable(self) -> None:
        """Raise UsageError if isotype cannot use adapters of this kind or initialisation (`UNUSABLE`)."""
        kind, start = kind_of_adapter(self.config), str(getattr(self.config, "init_lora_weights", None))
        for name in (kind, start):
            if name in UNUSABLE:
                what = f"{self.directory}: a {name} adapter, {UNUSABLE[name]}"
                fix = "use it in a script with PEFT"
                if name == start:
                    fix = "save it again in the training script: save_pretrained(…, path_initial_model_for_weight_conversion=…)"
                raise UsageError.of("isotype cannot use this adapter", what, "an adapter such as LoRA", fix)


def is_adapter(path: str | Path) -> bool:
    """Return True if `path` is a directory that holds an adapter but no whole model."""
    directory = Path(path)
    return (directory / ADAPTER_CONFIG).is_file() and not (directory / "config.json").is_file()


def read_adapter(directory: str | Path, revision: str | None = None) -> Adapter:
    """Read an adapter's config and headers. Raise CheckpointError if the adapter does not exist or is damaged.

    `revision` replaces the commit of the base in the adapter's config.
    """
    path = Path(directory)
    if not path.is_dir():
        what, expected = f"adapter {path}", "a directory that exists"
        raise CheckpointError.of("no such adapter", what, expected, "check the path")
    what = f"the directory {path} holds {contents(path)}"
    fix = "pass the --output_dir of a training run that has ended, or one of its checkpoint folders"
    if not (path / ADAPTER_CONFIG).is_file():
        if inside := sorted(str(file.parent) for file in path.glob(f"*/{ADAPTER_CONFIG}")):
            fix = f"pass a folder in it that contains an adapter: {listed(inside)}"
        elif (path / "config.json").is_file():
            fix = "pass the directory of an adapter; this directory contains a whole model, which needs no merge"
        expected = f"{ADAPTER_CONFIG} and adapter_model.safetensors"
        raise CheckpointError.of("not an adapter", what, expected, fix)
    weights = find_weights(path)
    if weights is None or weights[1] != "adapter":
        raise CheckpointError.of("an adapter without weights", what, "adapter_model.safetensors", fix)
    headers = read_headers(weights[0])
    config = read_adapter_config(path, headers.tensors)
    base, policy = config.base_model_name_or_path, PrecisionPolicy.read(path)
    return Adapter(path, config, base, policy, headers, revision or config.revision)


def inference_policy(
    source: str | Path,
    saved: PrecisionPolicy | None,
    dtype: str | torch.dtype = "auto",
    quantization: str | None = None,
    device: str = "auto",
    revision: str | None = None,
) -> PrecisionPolicy:
    """Return the policy for inference. By default, dtype and quantization come from `saved`, the policy of the training.

    Without `saved`, the policy is the best for this machine. The argument `quantization` is a format, `"none"`, or
    None for the format of `saved`. `isotype.resolve_precision` describes the other arguments.
    """
    if saved is None:
        wanted = None if quantization == "none" else quantization
        return resolve_precision(source, dtype, wanted, device, revision=revision)
    mixed = bool(saved.layers) and quantization in (None, MIXED)
    wanted = saved.storage if mixed else quantization or saved.quantization or "none"
    as_trained = mixed or (wanted == saved.quantization and not saved.layers)
    policy = resolve_precision(
        source,
        saved.compute if dtype == "auto" else dtype,
        None if wanted == "none" else wanted,
        device,
        revision=revision,
        double_quant=saved.double_quant if as_trained else None,
        quant_storage=saved.quant_storage if as_trained and saved.storage in FOUR_BITS else None,
        quantized_parts="all" if as_trained and not saved.dense else "language",
    )
    if mixed:
        policy = with_storage_reason(replace(policy, layers=saved.layers), "mixed, as in training")
    experts = saved.experts if as_trained else policy.experts
    policy = replace(policy, experts=experts, routers=policy.routers and saved.routers)
    return replace(with_ranges_of(policy, saved), master=saved.master)


UNUSABLE: Mapping[str, str] = {
    "POLY": "which needs the number of each row's task (task_ids)",
    "XLORA": "which needs a base without `use_cache`, and runs the base twice for each input",
    "corda": "whose initialisation changed the weights of the base with covariances that no file contains",
    "lora_ga": "whose initialisation changed the weights of the base with gradients that no file contains",
}
"""Kinds and initialisations of adapters that isotype cannot use, with the reasons."""


def base_policy(
    adapter: Adapter, dtype: str = "auto", quantization: str | None = None, device: str = "auto"
) -> PrecisionPolicy:
    """Return the policy for inference with an adapter's base (see `inference_policy`)."""
    adapter.require_usable()
    path = adapter.directory / ADAPTER_CONFIG
    fix = "correct base_model_name_or_path in that file (isotype merge also accepts --base)"
    expected = "the model that the adapter was trained on"
    if adapter.base is None:
        raise CheckpointError.of("the adapter names no base model", str(path), expected, fix)
    try:
        return inference_policy(adapter.base, adapter.policy, dtype, quantization, device, adapter.revision)
    except CheckpointError as error:
        reason = f"{error.headline}: {error.problems[0].given}" if error.problems else error.headline
        what = f"{path} names {adapter.base} ({reason})"
        raise CheckpointError.of("the adapter's base model cannot be opened", what, expected, fix) from error


def load_base(
    adapter: Adapter,
    policy: PrecisionPolicy,
    deferred: DeferredBlocks | None = None,
    *,
    model_class: Any = None,
    **arguments: Any,
) -> Any:
    """Load the base model with the training's vocabulary size and, if `model_class` is None, the training's class."""
    checkpoint = adapter.open_base()
    head = model_class or _head(adapter, checkpoint.model_config)
    labels = _label_count(adapter, checkpoint.model_config, policy, head)
    arguments |= {} if labels is None else {"num_labels": labels}
    model = load_model(checkpoint, policy, model_class=head, deferred=deferred, **arguments)
    rows = _embedding_rows(adapter, model)
    if rows and rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return model


def _head(adapter: Adapter, config: Any) -> Any:
    """Return the model class that the adapter was trained with; None if the config of the base names the same class."""
    import transformers

    task = task_of(adapter.config)
    named = (adapter.config.auto_mapping or {}).get("base_model_class") if task is None else _HEADS.get(task)
    saved = class_of(config)
    if task in ("CAUSAL_LM", "SEQ_2_SEQ_LM") and hasattr(saved, "prepare_inputs_for_generation"):
        return None  # not every such class has an auto class (InstructBLIP)
    if named is None or named == getattr(saved, "__name__", None):
        return None
    head = getattr(transformers, named, None)  # the name is from a file: only model classes are used
    is_model = inspect.isclass(head) and issubclass(head, transformers.PreTrainedModel)
    return head if is_model or task is not None else None


_LABELS = 991  # an unusual size, which shows the dimension of the labels in a shape


def _label_count(adapter: Adapter, config: Any, policy: PrecisionPolicy, head: Any) -> int | None:
    """Return the number of labels of the classification head in the adapter's file; None without such a head."""
    task = task_of(adapter.config)
    if head is None or task in ("CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION"):
        return None
    shapes = adapter.shapes
    model = skeleton(config, policy, model_class=head, num_labels=_LABELS)
    named = ((shapes.get(name), tuple(p.shape)) for name, p in model.named_parameters() if _LABELS in p.shape)
    return next((shape[wanted.index(_LABELS)] for shape, wanted in named if shape), None)


# LoRA initialisations that draw values or set zeros; every other initialisation computes values from the base's weights.
_DRAWN = (True, False, None, "gaussian", "orthogonal")


def deferred_base(adapter: Adapter) -> DeferredBlocks:
    """Return `DeferredBlocks` that read most weights of the adapter's base later, block by block.

    Weights that the adapter's file replaces are not deferred. No weights are deferred if the adapter is not LoRA, or if PEFT
    reads the weights to add the adapter (DoRA, PiSSA, OLoRA).
    """
    config = adapter.config
    drawn = kind_of_adapter(config) == "LORA" and not config.use_dora and config.init_lora_weights in _DRAWN
    return DeferredBlocks(drawn, adapter.shapes)


def _embedding_rows(adapter: Adapter, model: Any) -> int:
    """Return the number of embedding rows that the adapter needs; 0 if the adapter trains no embeddings."""
    heads = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {name for name, module in model.named_modules() if any(module is head for head in heads)}
    rows = [shape[0] for name, shape in adapter.shapes.items() if name.removesuffix(".weight") in names]
    indices = getattr(adapter.config, "trainable_token_indices", None) or []
    trained = [index for part in indices.values() for index in part] if isinstance(indices, dict) else indices
    return max([*rows, *(int(index) + 1 for index in trained)], default=0)


def attach(model: Any, adapter: Adapter) -> Any:
    """Add a saved adapter without rounding it, and return the PEFT model. Raise CheckpointError if the adapter does not fit."""
    policy = policy_of(model)
    assert policy is not None, "load() sets the model's policy"
    peft_model = inject(model, adapter, policy)
    fill(peft_model, adapter)
    return peft_model


def inject(model: Any, adapter: Adapter, policy: PrecisionPolicy) -> Any:
    """Add the adapter's modules with initial values. PEFT's `from_pretrained` is not used, because it would round a float32 adapter."""
    lost = [name for name in getattr(model, "drawn_parameters", ()) if name not in adapter.shapes]
    if lost:
        what = "is neither in the base nor in the adapter"
        expected = "all weights of the model, because a missing weight gets new random values in every load"
        raise _incompatible(adapter, model, [Problem(f"{name} {what}", expected, _LOST) for name in lost])
    config = copy.deepcopy(adapter.config)
    require_whole_weights(config, policy)
    config.base_model_name_or_path = None  # else PEFT warns if the base was moved
    try:
        with quiet_peft(), KeepsValues():  # deferred weights are on the meta device
            return add_lora(model, policy, config)
    except BUILD_ERRORS as error:
        problem = Problem(one_line(error), "modules that the adapter was trained on", _FIX)
        raise _incompatible(adapter, model, [problem]) from error


def require_whole_weights(config: Any, policy: PrecisionPolicy) -> None:
    """Raise CheckpointError for a quantized base if the adapter's initialisation decomposes unquantized weights."""
    method = getattr(config, "init_lora_weights", None)
    if policy.quantized and isinstance(method, str) and method.startswith(_OF_WHOLE_WEIGHTS):
        conflict = f"a base in {policy.storage}, and an adapter that {method} initialised"
        expected = "a base in float32, bfloat16 or float16, because PEFT subtracts the adapter's initial values from the base's weights"
        fix = "--quantization none, or merge the adapter first"
        raise CheckpointError.of("the adapter needs an unquantized base", conflict, expected, fix)


# Initialisations for which PEFT decomposes the base's weights (`pissa_init`, `mica_init`): these must not be quantized.
_OF_WHOLE_WEIGHTS = ("pissa", "mica")
_LOST = "train again (isotype saves these weights with the adapter), or use a base that contains them"
_FIX = "use the base model that the adapter was trained on"


def fill(peft_model: Any, adapter: Adapter) -> None:
    """Copy the trained values of an adapter into the result of `inject`. Raise CheckpointError if the values do not fit."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    weights = load_file(str(adapter.headers.tensors[0].file))
    require_finite(adapter.directory, ((base_name(name), value) for name, value in weights.items()))
    base = peft_model.get_base_model()
    if wrapped := [name for name in weights if unwrapping(name)]:
        expected = "names as in the base model, with the prefix base_model.model."
        problem = Problem(listed(wrapped, 2), expected, unwrapping(wrapped[0]))
        raise _incompatible(adapter, base, [problem])
    try:
        result = set_peft_model_state_dict(peft_model, weights)
    except KeyError as error:
        problem = Problem(f"no tensor {base_name(error.args[0])}", "every trained module", _FIX)
        raise _incompatible(adapter, base, [problem]) from error
    except RuntimeError as error:
        mismatches = _SIZE_MISMATCH.findall(str(error))
        if not mismatches:
            raise
        problems = [
            Problem(f"{base_name(name)} of shape ({saved})", f"shape ({wanted}), for this base model", _FIX)
            for name, saved, wanted in mismatches
        ]
        raise _incompatible(adapter, base, problems) from error
    prefix = getattr(peft_model.base_model, "prefix", None)
    unread = [
        base_name(name)
        for name in (() if adapter.config.is_prompt_learning else result.unexpected_keys)
        # PEFT saves the embeddings of a resized vocabulary twice, the second time under a name that it does not read.
        if not (".modules_to_save." in name and name.replace(".modules_to_save", "") in weights)
    ]
    named = dict(peft_model.named_parameters(remove_duplicate=False))
    read = {id(value) for name, value in named.items() if name not in result.missing_keys}
    missing = [
        base_name(name)
        for name in result.missing_keys
        if prefix and prefix in name and id(named.get(name)) not in read  # PEFT saves shared values once
    ]
    if unread and (beginning := _other_beginning(unread, missing)):
        raise _incompatible(adapter, base, [beginning])
    problems = [Problem(f"tensor {n}", "a module with this name in the base model", _FIX) for n in unread]
    problems += [Problem(f"no tensor {name}", "the trained values of this tensor", _FIX) for name in missing]
    if problems:
        raise _incompatible(adapter, base, problems)


def _other_beginning(saved: Sequence[str], wanted: Sequence[str]) -> Problem | None:
    """Return a problem if a different prefix is the only difference between all `saved` and `wanted` names; else None."""

    def beginnings(name: str) -> tuple[str, str]:
        """Return (beginning of `saved[0]`, beginning of `name`): the parts before the common end of both names."""
        ours, theirs = saved[0].split("."), name.split(".")
        while ours and theirs and ours[-1] == theirs[-1]:
            ours, theirs = ours[:-1], theirs[:-1]
        return "".join(f"{part}." for part in ours), "".join(f"{part}." for part in theirs)

    nearest = min(wanted, key=lambda name: len(beginnings(name)[0]), default="")
    old, new = beginnings(nearest)
    if {new + name.removeprefix(old) for name in saved} != {*wanted}:
        return None
    what = f"the prefix {old!r} instead of {new!r} in the names of {plural(len(saved), 'tensor')}"
    fix = f"{_FIX}, or rename the tensors in the file: base_model.model.{saved[0]} to base_model.model.{nearest}"
    return Problem(what, f"names as in the base model: {nearest}", fix)


def _incompatible(adapter: Adapter, model: Any, problems: list[Problem]) -> CheckpointError:
    headline = f"the adapter {adapter.directory} does not fit the base model, a {type(model).__name__}"
    return CheckpointError.first_of(headline, problems)


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Hide PEFT's warnings about cases that isotype handles: tied embeddings, merged layers, Conv1D layers and norms."""
    with warnings.catch_warnings():
        handled = "Unsupported layer type|.*tied|.*tie_word_embeddings|fan_in_fan_out is set to|All adapters are already merged"
        warnings.filterwarnings("ignore", message=handled, module="peft")
        yield


# ---------------------------------------------------------------------------------------------------- isotype.load


@undisturbed
def load(
    path: str | Path,
    policy: PrecisionPolicy | None = None,
    *,
    model_class: type | None = None,
    device_map: Any = None,
    **kwargs: Any,
) -> Any:
    """Load the model at `path` under `policy`, in evaluation mode. If `path` is an adapter, load it on its base model.

    The policy determines the dtype or format of each weight. A checkpoint that is already quantized keeps its
    quantization states, constants and compute dtype. The attribute `precision_policy` of the model is the policy.

    The adapter may have been saved by isotype or by PEFT. The adapter's adapter_config.json names the base model and its
    commit. The adapter's values are not rounded and can be trained further.

    Args:
        path: checkpoint directory, GGUF file, hub id, `embedded:smollm2`, or an adapter's directory.
        policy: policy from `isotype.resolve_precision`; for an adapter, the policy of the base. The default is the
            precision_policy.json in the directory, adapted to this machine, or else the choice of `resolve_precision`.
        model_class: a transformers model class or auto class. The default is the class that the config names, or the class with
            the head that the adapter was trained with.
        device_map: as in `from_pretrained`. The default is the policy's device, if this machine has it.
        **kwargs: arguments of `from_pretrained` for the (base) model, such as `revision` and `attn_implementation`, but not
            `trust_remote_code`.

    Raises:
        CheckpointError: the checkpoint does not exist, its format is unsupported, its shapes contradict its config, or values
            are not finite. The same error is raised if the base of an adapter does not exist or does not match the adapter.
        PrecisionError: the checkpoint is already quantized in another format than the policy's storage.
    """
    hide_missing_kernel()
    revision = kwargs.pop("revision", None)
    kwargs |= {"model_class": model_class, "device_map": device_map}
    if not is_adapter(path):
        policy = policy or inference_policy(path, PrecisionPolicy.read(path), revision=revision)
        return load_model(path, policy, revision=revision, **kwargs)
    adapter = read_adapter(path, revision)
    # `base_policy` also raises the error for an adapter whose config names no base.
    policy = policy if policy and adapter.base else base_policy(adapter)
    return attach(load_base(adapter, policy, **kwargs), adapter).eval()


def load_for_inference(
    path: str | Path,
    dtype: str = "auto",
    quantization: str | None = None,
    device: str = "auto",
    revision: str | None = None,
) -> tuple[Any, Any, PrecisionPolicy]:
    """Load a model, or an adapter on its base, for calls without autocast. Return (model, tokenizer or None, policy).

    `dtype` and `quantization` are arguments of `inference_policy`. `load` describes the other arguments and the errors.
    Raises UsageError if the device is not in this machine.
    """
    profile = require_present(device)
    adapter = read_adapter(path, revision) if is_adapter(path) else None
    if adapter is None:
        saved = PrecisionPolicy.read(path)
        policy = inference_policy(path, saved, dtype, quantization, profile.name, revision)
        policy = replace(policy, master=torch.float32)
        tokenizer = open_checkpoint(path, revision).tokenizer()
    else:
        policy = base_policy(adapter, dtype, quantization, profile.name)
        tokenizer = adapter.tokenizer()
    device_map = None if profile.kind == "cpu" else {"": profile.name}
    return load(path, policy, device_map=device_map, revision=revision).eval(), tokenizer, policy
