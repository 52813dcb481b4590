"""Builds the model of a training command with the policy and the adapter. Its weights are loaded or on the meta device."""

import copy
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from isotype.checkpoint.adapter import attach, require_whole_weights
from isotype.checkpoint.checkpoint import Checkpoint, local_path, open_checkpoint
from isotype.checkpoint.formats.hub import local_snapshot
from isotype.checkpoint.load import load
from isotype.checkpoint.loftq import begin_from_error
from isotype.checkpoint.shard import load_sharded
from isotype.checkpoint.tokenizer import tokenizer_of
from isotype.checkpoint.weightless import concrete_class, skeleton, skipped_modules, store
from isotype.compat.peft import kind_of_adapter, without_peft
from isotype.compat.templates import limit_templates
from isotype.compat.transformers import mark_as_sharded
from isotype.core.arguments import did_you_mean
from isotype.core.errors import Problem, UsageError, one_line
from isotype.core.names import listed, names_one_of
from isotype.data.methods import Method
from isotype.model.adapters import add_lora, remember_base
from isotype.model.enforce import enforce_model, policy_of
from isotype.model.experts.stack import seen_dense, stacked_weights
from isotype.model.modes import NoDraws
from isotype.model.parts import LANGUAGE, read_parts
from isotype.model.read_weights import layers_read
from isotype.model.repeated_layers import fold as fold_layers
from isotype.model.targets import TRAINED_WHOLE, Adapt, choose_targets, save_drawn, task_of, train_parts
from isotype.model.walk import is_tuner_layer
from isotype.precision.policy import PrecisionPolicy
from isotype.train.command.settings import Settings
from isotype.train.initial_adapter import BOOLEANS, LOFTQ, brings_tokens, is_its_own_reference
from isotype.train.policy import moments_of_run

_EMBEDDINGS, _HEADS = (
    ("embed_tokens", "wte", "word_embeddings", "embed_in"),
    ("lm_head", "embed_out", "output"),
)
"""Names of the embedding and of the head in common architectures."""

# Keys of `--model_init_kwargs` about precision: `read_precision_request` reads them, and the policy decides.
_DECIDED = (
    "dtype", "torch_dtype", "quantization_config", "load_in_4bit", "load_in_8bit", "trust_remote_code",
)  # fmt: skip


def adapted_model(
    settings: Settings, checkpoint: Checkpoint, policy: PrecisionPolicy, *, adapt: Adapt | None = None
) -> tuple[Any, Any]:
    """Load `checkpoint`, add the adapter to the parts of the model in `adapt`, and return (model, None).

    If the policy trains weights, freeze the weights of the other parts.

    If the chat template adds tokens, return (model without an adapter, PEFT config). The trainer then adds the adapter.
    """
    method = settings.method
    init = {k: v for k, v in (settings.model_init_kwargs or {}).items() if k not in _DECIDED}
    kwargs = {"attn_implementation": settings.attn_implementation, **init, **method.load_arguments()}
    if (attention := kwargs["attn_implementation"]) is not None:  # raises before a weight is read
        config = checkpoint.model_config
        skeleton(config, policy, model_class=kwargs["model_class"], attn_implementation=attention)
    late = settings.start is None and policy.trainable == "lora" and brings_tokens(settings.training)

    def adapted(model: Any) -> Any:
        if settings.start is not None:
            return _with_reference(settings, attach(model, settings.start))
        with _adapter_arguments():
            model = _add_lora_silently(model, policy, _peft_config(settings, model), adapt)
            if settings.init_lora_weights == LOFTQ:
                begin_from_error(model, checkpoint, moments_of_run(checkpoint, settings.device))
            return _with_reference(settings, model)

    adds = adapted if policy.trainable == "lora" else partial(train_parts, adapt=adapt)
    try:
        if settings.sharding is not None:
            model = load_sharded(
                checkpoint, policy, None if late else adds, reshard=settings.sharding.reshard, **kwargs
            )
            base = without_peft(model)
            mark_as_sharded(base)  # `generate` then continues until every process has finished
            # If one of these were True, TRL would cast the master weights to bfloat16; for sharded parameters this cannot be
            # undone.
            base.is_loaded_in_4bit = base.is_loaded_in_8bit = False
        else:
            model = load(checkpoint, policy, **kwargs)
            model = model if late else adds(model)
        require_plain_head(model, method)
    except TypeError as error:
        if not init or "unexpected keyword argument" not in str(error):
            raise
        headline = "the model does not accept these arguments"
        what = f"--model_init_kwargs {', '.join(init)}: {error}"
        expected = "arguments of from_pretrained or fields of the model's config"
        fix = "omit the argument that the message names"
        raise UsageError.of(headline, what, expected, fix) from error
    model.config.use_cache = False
    if not late:
        return model, None
    peft_config = _peft_config(settings, model)
    remember_base(model, peft_config)
    choose_targets(model, peft_config, adapt)
    model.adapter_notes = (*getattr(model, "adapter_notes", ()), *save_drawn(model, peft_config))
    return model, peft_config


def _peft_config(settings: Settings, model: Any) -> Any:
    from trl import get_peft_config

    config = get_peft_config(settings.model)
    config.bias = settings.lora_bias
    start = settings.init_lora_weights
    config.init_lora_weights = True if start in (None, LOFTQ) else BOOLEANS.get(start, start)
    check_module_names(model, config)
    return config


_REFERENCE = "ref"
"""TRL's name for the frozen adapter that acts as the reference model in a preference loss or a KL term."""


def _with_reference(settings: Settings, model: Any) -> Any:
    """If the model is sharded and the loss needs a reference, add the reference adapter, because TRL cannot add it."""
    if settings.sharding is not None and settings.method.compares(settings.training):
        policy = policy_of(model)
        assert policy is not None, "add_lora() stores the policy on the model"
        with seen_dense(model):
            model.add_adapter(_REFERENCE, model.peft_config["default"])
        enforce_model(model, policy)
    return model


@contextmanager
def one_reference(settings: Settings, model: Any) -> Iterator[None]:
    """While a trainer is built, let TRL add the reference adapter `ref`. Afterwards, delete `ref` if it is not needed.

    In a sharded model, `ref` already exists, and TRL only copies values into `ref`. If the trained adapter is new, `ref` is
    not needed, because the model without an adapter is the reference.
    """
    adapters = getattr(model, "peft_config", None) or {}
    there = _REFERENCE in adapters

    def add_adapter(name: str, config: Any) -> None:
        if not there:
            with seen_dense(model):  # else PEFT refuses quantized experts
                type(model).add_adapter(model, name, config)

    if adapters:
        model.add_adapter = add_adapter
    try:
        yield
    finally:
        if adapters:
            del model.add_adapter
    if not there and is_its_own_reference(settings) and _REFERENCE in adapters:
        model.delete_adapter(_REFERENCE)


def require_decoder(config: Any, method: Method) -> None:
    """Raise UsageError for a model with encoder and decoder, such as T5, unless the method is `sft` or `reward`."""
    if getattr(config, "is_encoder_decoder", False) and method.loss not in ("labels", "reward"):
        what = f"a model of the type {config.model_type}, which has an encoder"
        expected = "a model without an encoder, because TRL joins the prompt and the answer into one text"
        raise UsageError.of(f"isotype {method.name} trains decoders", what, expected, "give such a model")


def require_token_ids(config: Any, settings: Settings) -> None:
    """Raise UsageError for a model whose input is not token ids, such as Whisper. TRL has no trainer for such models."""
    require_decoder(config, settings.method)
    require_router(config, settings)
    cls = concrete_class(config)
    takes = getattr(cls, "main_input_name", "input_ids")
    if takes == "input_ids":
        return
    headline = f"isotype {settings.method.name} trains models whose input is token ids"
    expected = "a language model, with or without images"
    fix = "train the model in a script: isotype.load, isotype.add_lora and isotype.fuse accept this model"
    raise UsageError.of(headline, f"{cls.__name__}, which takes {takes}", expected, fix)


def require_router(config: Any, settings: Settings) -> None:
    """Raise UsageError if `--router_aux_loss_coef` is not 0 but the model returns no router logits."""
    coefficient = settings.router_aux_loss_coef
    if coefficient and not hasattr(config.get_text_config(), "output_router_logits"):
        what = f"--router_aux_loss_coef {coefficient} and a model of the type {config.model_type}"
        expected, fix = "a mixture of experts that returns router logits", "omit --router_aux_loss_coef"
        raise UsageError.of("this model has no loss for routers", what, expected, fix)


def require_plain_head(model: Any, method: Method) -> None:
    """Raise UsageError if the head has an adapter, because TRL's losses use only the weight of the head."""
    if method.loss != "reward" and is_tuner_layer(model.get_output_embeddings()):
        headline, expected = "an adapter on the head would not be trained", "layers below the head"
        fix = "train the whole head (--lora_modules_to_save lm_head) or no part of it; a saved adapter on the head must be merged first"
        what = f"an adapter on the head: isotype {method.name} computes the loss from the head's weight alone"
        raise UsageError.of(headline, what, expected, fix)


def check_module_names(model: Any, config: Any) -> None:
    """Raise UsageError if the rank is too large, or if a name in the adapter's config matches no module or parameter."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    of_other_models = {name for names in DEFAULTS.values() for name in names}
    converted = copy.deepcopy(config)
    with _adapter_arguments(), seen_dense(model):
        convert_peft_config_for_transformers(converted, model, None)  # names of stacked experts change
        parameters = [name for name, _ in model.named_parameters()]
    # For "all-linear", PEFT adds `gate.weight` of a router, and LongCat-Flash has no such parameter.
    checked = config if isinstance(getattr(config, "target_modules", None), str) else converted
    modules = dict(model.named_modules())
    # PEFT adapts no containers and no norms.
    layers = [
        name for name, module in modules.items() if getattr(getattr(module, "weight", None), "ndim", 0) > 1
    ]
    saved = [name for name, module in modules.items() if any(True for _ in module.parameters())]
    problems = []
    for setting, existing, known in (
        ("target_modules", layers, {*_last(layers), "all-linear"}),
        ("modules_to_save", modules, _last(saved)),
        ("target_parameters", parameters, _last(parameters, 2)),
    ):
        wanted = getattr(checked, setting, None)
        names = sorted(wanted) if isinstance(wanted, (list, tuple, set)) else []
        missing = [name for name in names if not any(_is_target(path, [name]) for path in existing)]
        shown, added = sorted(known - {*names}), set[str]()
        for name in missing:
            certain = _same_part(model, name) if setting == "modules_to_save" else []
            otherwise = ""
            if setting == "target_modules":
                certain = sorted(_last(path for path in layers if f".{name}." in f".{path}"))
                if not certain and any(_is_target(path, [name]) for path in modules):
                    stacks = (f"{path}.{leaf}" for path, _, leaf in stacked_weights(model))
                    inside = sorted(_last((path for path in stacks if f".{name}." in f".{path}"), 2))
                    otherwise = "give one of these"
                    if inside:  # experts are weights of three dimensions, not layers
                        otherwise = f"--lora_target_parameters {' '.join(inside)}"
                # The names of another architecture's layers are not typing errors.
                elif not certain and missing == names and (len(names) > 1 or name in of_other_models):
                    certain = ["all-linear"]
            near = certain or get_close_matches(name, shown, 2, 0.8)
            fix = otherwise or did_you_mean(name, shown, "give one of these", cutoff=0.4)
            new = [word for word in near if word not in added]
            added.update(near)
            swap = ((name,), new) if near and not otherwise and (certain or len(near) == 1) else None
            fix = f"did you mean {' '.join(near)}?" if swap else fix
            problems.append(Problem(f"--lora_{setting} {name}", f"one of {', '.join(shown)}", fix, swap))
    if problems:
        raise UsageError("no such modules or parameters in the model", problems)
    _check_saved_experts(model, converted)
    _check_rank(model, converted)


def _check_saved_experts(model: Any, config: Any) -> None:
    """Raise UsageError if experts are in `modules_to_save` and also get adapters, for which PEFT raises TypeError."""
    saved = [*(getattr(config, "modules_to_save", None) or ())]
    stacks = [f"{path}.{leaf}" for path, _, leaf in stacked_weights(model)]
    targets = getattr(config, "target_parameters", None) or ()
    for name in saved:
        inside = [path for path in stacks if names_one_of(path, [name])]
        if any(_is_target(path, targets) for path in inside):
            what = f"--lora_modules_to_save {name}, with adapters on {listed(sorted(_last(inside, 2)))}"
            expected = "experts that are trained whole or have adapters"
            fix = (
                "leave it out, or give --lora_target_modules the names of other layers, such as q_proj v_proj"
            )
            raise UsageError.of("experts cannot be trained in both ways", what, expected, fix)


def _last(names: Iterable[str], parts: int = 1) -> set[str]:
    """Return the last `parts` parts of each dotted name, without layer numbers."""
    ends = {".".join(name.rsplit(".", parts)[-parts:]) for name in names}
    return {end for end in ends if end and not end.isdigit()}


def _same_part(model: Any, name: str) -> list[str]:
    """If other architectures call the embedding or the head `name`, return this model's name for the same part; else []."""
    part = model.get_input_embeddings() if name in _EMBEDDINGS else None
    part = model.get_output_embeddings() if name in _HEADS else part
    return [path.rpartition(".")[2] for path, module in model.named_modules() if module is part][:1]


def _check_rank(model: Any, config: Any) -> None:
    """Raise UsageError if all adapted layers are narrower than the rank. If only some are narrower, add a note to the model."""
    rank, targets = getattr(config, "r", None), getattr(config, "target_modules", None)
    whole = TRAINED_WHOLE.get(task_of(config) or "", ())  # these heads are trained without an adapter
    without = layers_read(model) if str(targets).lower() == "all-linear" else {}
    widths = [
        min(int(getattr(module, side)) for side in sides)
        for name, module in model.named_modules()
        for sides in [("nx", "nf") if isinstance(module, Conv1D) else ("in_features", "out_features")]
        if hasattr(module, sides[0])
        and _is_target(name, targets)
        and name not in without
        and name.rpartition(".")[2] not in whole
    ]
    narrow = [width for width in widths if rank is not None and width < rank]
    if rank is None or not narrow:
        return
    if rank <= max(widths):
        note = (
            f"{len(narrow)} of {len(widths)} adapted layers are narrower than rank {rank} (the narrowest has {min(widths)}); "
            "a rank above the width only costs memory; rank_pattern sets the rank of single layers"
        )
        model.adapter_notes = (*getattr(model, "adapter_notes", ()), note)
        return
    raise UsageError.of(
        "a rank above the layers' width",
        f"--lora_r {rank}",
        f"at most {max(widths)}, the width of the widest adapted layer (the narrowest has {min(widths)})",
        f"--lora_r {min(16, max(widths))} is common; --use_peft False trains every weight",
    )


def _is_target(name: str, targets: Any) -> bool:
    if targets == "all-linear":
        return not name.endswith("lm_head")
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets or ())


def tokenizer_here(model: str, revision: str | None) -> tuple[Path | str, Any]:
    """Return (local directory, tokenizer) for a directory, GGUF file, `embedded:NAME` or downloaded hub id.

    Return (model, None) if this machine has no tokenizer. The tokenizer of a GGUF file is written into a directory of
    isotype's cache.
    """
    source = local_path(model) or local_snapshot(model, revision)
    if source is None:
        return model, None
    if source.suffix == ".gguf":
        source = Path(open_checkpoint(source).tokenizer_source())
    directory = source.parent if source.name == "config.json" else source
    if not (directory / "tokenizer_config.json").is_file() and not (directory / "tokenizer.json").is_file():
        return model, None
    return directory, processing_class(directory)


def processing_class(source: Path | str, revision: str | None = None) -> Any:
    """Return the tokenizer of a checkpoint, or the processor of a model with images. Without either, raise CheckpointError."""
    limit_templates()
    local = Path(source).is_dir()
    return tokenizer_of(Path(source) if local else source, revision, required=True)


# ------------------------------------------------------------------------------------------------------ without weights


_SPARSE = ("FROD", "SHIRA")

_NAMES_IN = (
    "rank_pattern", "alpha_pattern", "target_modules", "modules_to_save", "exclude_modules", "target_parameters",
)  # fmt: skip
"""Fields of an adapter's config that contain names of modules or parameters."""
_NUMBER = re.compile(r"(^|\.)\d+(\\?\.|$)|\\d|\[\d|\(\d")


def weightless_model(
    config: Any,
    policy: PrecisionPolicy,
    *,
    lora: Any = None,
    adapt: Adapt | None = None,
    fold: bool = False,
    **settings: Any,
) -> Any:
    """Return the model that `isotype.load` and `isotype.add_lora` would create, but with every tensor on the meta
    device.

    Args:
        lora: a `peft.LoraConfig`, or None for no adapters.
        fold: True to fold equal layers into one (see `isotype.model.repeated_layers`). Adapters are added to the folded model,
            unless the policy, the quantizer or the adapters' config selects layers by number.
        **settings: arguments of `skeleton` (a model class, and values for fields of the config).

    Raises:
        CheckpointError: transformers has no class for the config, or its class is incompatible.
        PrecisionError: `lora` is set, but the policy trains every weight.
        UsageError: PEFT cannot add the adapter to this model.
    """
    model = skeleton(config, policy, **settings)
    if early := fold and not policy.layers and not _chosen_by_number(skipped_modules(config), lora):
        fold_layers(model)
    model = store(model, policy)
    if lora is not None:
        check_module_names(model, lora)
        require_whole_weights(lora, policy)
        if policy.quantized and getattr(lora, "init_lora_weights", None) == "olora":
            lora = copy.copy(lora)
            lora.init_lora_weights = True  # OLoRA would quantize weights, which have no values here
        kind = kind_of_adapter(lora)
        if kind in _SPARSE:
            what, expected = f"a {kind} adapter", "an adapter that computes without sparse tensors"
            raise UsageError.of("no check of this adapter is possible", what, expected, "start the training")
        plain = kind == "LORA"  # other kinds compute with their random initial values
        with _adapter_arguments(), torch.device("meta" if plain else "cpu"), NoDraws():
            model = _add_lora_silently(model, policy, lora, adapt)
    elif policy.trainable == "full":
        train_parts(model, adapt)
    return fold_layers(model) if fold and not early else model


def _chosen_by_number(skipped: Iterable[str], lora: Any) -> bool:
    if getattr(lora, "layers_to_transform", None) is not None:
        return True
    values = [getattr(lora, field, None) or () for field in _NAMES_IN]
    names = [name for value in values for name in ([value] if isinstance(value, str) else value)]
    return any(map(_NUMBER.search, (*skipped, *names)))


def _add_lora_silently(model: Any, policy: PrecisionPolicy, config: Any, adapt: Adapt | None) -> Any:
    """Call `add_lora` without its warnings. The command prints the same texts from `model.adapter_notes`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return add_lora(model, policy, config, adapt=adapt)


@contextmanager
def _adapter_arguments() -> Iterator[None]:
    """Turn PEFT's errors about adapter arguments into UsageError (for example, a regular expression without a match)."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        what, expected = one_line(error), "arguments with which PEFT can adapt this model"
        headline = "the adapter cannot be created with these arguments"
        fused = re.search(r"without also targeting (.*) because they are fused", what)
        fix = f"add {fused[1]} to --lora_target_modules" if fused else "change the arguments --lora_…"
        raise UsageError.of(headline, what, expected, fix) from error


def parts_to_adapt(settings: Settings, columns: Iterable[str]) -> Adapt | None:
    """Return the parts of `--adapt`. The default is None (all parts) if rows have images, else the language model."""
    if settings.adapt is not None:
        return Adapt(
            read_parts(settings.adapt),
            "--adapt does not name the part of the model that contains these layers",
        )
    if {"image", "images"} & set(columns):
        return None
    return Adapt((LANGUAGE,), "no row has an image, so no loss depends on these layers")
