"""Reads and checks config.json and adapter_config.json, and builds a config's model on the meta device."""

import copy
import dataclasses
import difflib
import itertools
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from isotype.checkpoint.formats.gguf import without_vocabulary
from isotype.checkpoint.formats.headers import CheckpointHeaders, quantization_beside
from isotype.checkpoint.formats.json_file import AGAIN, Entry, entry_problems, numbers_in, read_json
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.compat.transformers import mapping_of
from isotype.core.errors import CheckpointError, Problem, one_line
from isotype.core.names import base_name, pattern_problems
from isotype.core.pretrained import pretrained
from isotype.model.modes import NoDraws

BUILD_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""Exceptions that a model class may raise for a config that does not fit the class."""


def read_config(directory: Path) -> Any:
    """Return the transformers config of a directory. Raise CheckpointError if it is invalid. No code of the directory is run."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers import __version__ as version

    path = directory / "config.json"
    content = read_json(path)
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), CONFIG_MAPPING, n=3)
        if not model_type:
            fix = "add the model_type, or pass the directory that save_pretrained() wrote"
        elif "auto_map" in content:
            fix = "isotype runs no code of a checkpoint, so load the model yourself and pass the nn.Module"
        elif near:
            fix = f"did you mean {' or '.join(near)}? Or update transformers"
        else:
            fix = "update transformers"
        what = f"{path}: model_type {model_type!r}" if model_type else f"{path} has no model_type"
        expected = f"a model_type that transformers {version} has"
        raise CheckpointError.of("unknown model", what, expected, fix)
    for key in ("dtype", "torch_dtype"):
        torch_dtype(content.get(key), f"{key} in {path}")
    quantization = quantization_beside(directory)
    if problems := [*_problems(content, path, CONFIG_MAPPING[model_type]), *_generation_problems(directory)]:
        raise CheckpointError(f"invalid settings of {directory}", problems)
    try:
        config = pretrained(AutoConfig, directory)
    except (*BUILD_ERRORS, OSError, StrictDataclassError) as error:
        what, expected = f"{path}: {error}", f"a config of a {model_type} model"
        raise CheckpointError.of("config.json cannot be read", what, expected, AGAIN) from error
    if quantization.get("quant_method") == "modelopt":  # perhaps from hf_quant_config.json
        config.quantization_config = dict(quantization)
    return config


_MAX_LAYERS, _MAX_MODULES = 2_000, 100_000
_FLAGS = r"load_in_[48]bit|bnb_4bit_use_double_quant|llm_int8_enable_fp32_cpu_offload"
_OUTPUTS = Entry(r"output_hidden_states|output_attentions", bool | None)
_ENTRIES = (
    Entry(r".*layers.*", high=_MAX_LAYERS),
    Entry(r".*(dropout|dropout_prob|pdrop)", low=0, high=1),
    Entry(r"max_position_embeddings|n_positions", low=1, high=2**31),
    Entry(r"rope_theta", low=1e-6),
    Entry(r"architectures", list[str] | None, "a list of class names"),
    Entry(_FLAGS, bool),
    _OUTPUTS,
    Entry(r"return_dict", Literal[True], "true"),
)
_GENERATION = (
    _OUTPUTS,
    Entry(r".*_token_id", int | list[int] | None, "token ids", low=-(2**31), high=2**31),
    Entry(r".*suppress_tokens", list[int] | None, "token ids"),
    Entry(r"bad_words_ids", list[list[int]] | None, "lists of token ids"),
    Entry(r"(min_|max_|top_|temp).*", float | bool | None, "a number"),
)


def _problems(content: Mapping[str, Any], path: Path, kind: type | None = None) -> Iterator[Problem]:
    """Yield a problem for each entry that is invalid, makes transformers run code, or has the name of a method of `kind`."""
    yield from entry_problems(content, _ENTRIES, path)
    for value in content.values():
        if isinstance(value, dict):
            yield from _problems(value, path)
    for key in content:
        if key.endswith(("attn_implementation", "experts_implementation")) and "/" in str(content[key]):
            what = f"{path}: {key} is {content[key]!r:.80}"
            expected = "an implementation in transformers, because code from the hub is not run"
            yield Problem(what, expected, "omit it")
        if kind is not None and not key.startswith("__") and callable(getattr(kind, key, None)):
            yield Problem(f"{path}: {key} hides a method of {kind.__name__}", "entries of a config", AGAIN)


def _generation_problems(directory: Path) -> Iterator[Problem]:
    from transformers import GenerationConfig

    path = directory / "generation_config.json"
    if path.is_file():
        try:
            content = read_json(path)
            GenerationConfig.from_dict(content).validate()
        except BUILD_ERRORS as error:
            yield Problem(f"{path}: {one_line(error)}", "settings that GenerationConfig accepts", AGAIN)
            return
        yield from entry_problems(content, _GENERATION, path)


def build_on_meta(config: Any, source: str) -> nn.Module:
    """Build the config's model on the meta device (0.1 s for 70B parameters), or raise CheckpointError.

    The model is built because only a built model knows the names of parameters that stay in float32. transformers
    collects these names in `post_init`.
    """
    cls = concrete_class(config, source=source)
    with building(cls, source), torch.device("meta"):
        # In a copy: the model sets the attention implementation and the dtype in its config.
        model: nn.Module = cls(copy.deepcopy(config))
    return model


def names_in_other_classes(model: Any) -> frozenset[str]:
    """Return the tensor names, without prefix, of all transformers classes that accept the config of the model."""
    from transformers import PreTrainedModel

    bases = {cls.__module__ for cls in type(model).__mro__}
    modules = [sys.modules[name] for name in bases if name.startswith("transformers.models.")]
    names: set[str] = set()
    cls: Any
    for cls in {value for module in modules for value in vars(module).values() if isinstance(value, type)}:
        if not issubclass(cls, PreTrainedModel) or cls.config_class is not type(model.config):
            continue
        try:
            with building(cls), torch.device("meta"):
                other = cls(copy.deepcopy(model.config))
        except CheckpointError:
            continue  # the class needs fields that the config does not have
        names |= {without_prefix(other, name) for name in other.state_dict()}
    return frozenset(names)


def without_prefix(model: Any, name: str) -> str:
    """Return the name of a tensor without the prefix of the base model, such as `model.`."""
    return name.removeprefix(f"{model.base_model_prefix}.")


@contextmanager
def building(cls: type, source: str = "") -> Iterator[None]:
    """In this context, a model of class `cls` is built without initial values. Failures become CheckpointErrors."""
    modules = itertools.count(1)

    def count_module(*_: Any) -> None:
        if next(modules) > _MAX_MODULES:
            headline = "the config describes a model that is too large to be built"
            what = f"{source or cls.__name__}: more than {_MAX_MODULES:,} modules"
            fix = "correct the numbers in config.json"
            raise CheckpointError.of(headline, what, "the config of a model", fix)

    counting = register_module_module_registration_hook(count_module)
    try:
        with NoDraws():
            yield
    except BUILD_ERRORS as error:
        what = f"{cls.__name__} fails with {type(error).__name__}: {error}"
        what = f"{source}: {what}" if source else what
        if "attention implementation" in what or "FlashAttention" in what:
            headline = "the attention implementation cannot be used"
            expected = "an implementation that the class supports"
            raise CheckpointError.of(headline, what, expected, "--attn_implementation eager") from error
        headline = "the config does not fit its model class"
        expected = "a config from which the class can be built"
        fix = "use the config.json and the transformers version with which the checkpoint was published"
        raise CheckpointError.of(headline, what, expected, fix) from error
    finally:
        counting.remove()


def concrete_class(config: Any, wanted: type | None = None, source: str = "") -> Any:
    """Return `wanted`. For None and for auto classes, return the class of the config. Raise CheckpointError if the config has no class."""
    if wanted is not None and mapping_of(wanted) is None:
        return wanted
    cls = model_class(config, wanted)
    if cls is not None:
        return cls
    what = f"{source or type(config).__name__}: model_type {config.model_type!r} with architectures {config.architectures}"
    expected = f"a class of {getattr(wanted, '__name__', 'transformers')}"
    fix = "use a checkpoint for which transformers has a model class, or pass model_class= in Python"
    raise CheckpointError.of("no model class for this checkpoint", what, expected, fix)


def model_class(config: Any, auto_class: Any = None) -> Any:
    """Return the model class of a config, from `auto_class` or from the config's `architectures` and type; None if unknown."""
    import transformers

    heads = ("FOR_CAUSAL_LM", "FOR_IMAGE_TEXT_TO_TEXT", "FOR_SEQ_TO_SEQ_CAUSAL_LM", "FOR_MASKED_LM")
    mappings = [getattr(transformers, f"MODEL_{head}_MAPPING") for head in heads]
    mappings.append(transformers.MODEL_MAPPING)
    if auto_class is not None:
        mappings = [mapping_of(auto_class)]
    else:
        for name in config.architectures or ():
            cls = getattr(transformers, name, None)
            if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
                return cls
    for mapping in mappings:
        if type(config) in mapping:
            classes = mapping[type(config)]
            return classes[0] if isinstance(classes, (tuple, list)) else classes
    return None


def config_dtype(config: Any) -> torch.dtype | None:
    """Return the dtype in a config or in its text config. Raise CheckpointError if torch lacks this dtype."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    for holder in (config, text):
        value = getattr(holder, "dtype", None)
        if value not in (None, "auto"):
            return torch_dtype(value, "the config's dtype")
    return None


def torch_dtype(value: Any, what: str) -> torch.dtype | None:
    """Return the torch dtype with this name; None for None. In the error, `what` names the entry of the config."""
    if value is None or isinstance(value, torch.dtype):
        return value
    dtype = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        expected, fix = "a torch dtype such as 'bfloat16'", "correct it in config.json"
        raise CheckpointError.of("unknown dtype in the config", f"{what} is {value!r}", expected, fix)
    return dtype


def gguf_config(headers: CheckpointHeaders) -> Any:
    """Return the config of a GGUF file. Raise CheckpointError if transformers cannot read its architecture."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, integrations

    path = headers.path
    try:
        # Reading the vocabulary takes seconds. transformers 5.23 skips it for the architectures in GGUF_CONFIG_ARCHS.
        # For others, isotype writes a copy of the file without the vocabulary, if a key gives the vocabulary's size.
        skipping = getattr(getattr(integrations, "gguf", None), "GGUF_CONFIG_ARCHS", ())
        keys = integrations.GGUF_CONFIG_MAPPING.get(headers.architecture, ("vocab_size",))
        if headers.architecture in skipping or "vocab_size" not in keys:
            return pretrained(AutoConfig, path.parent, gguf_file=path.name)
        with tempfile.TemporaryDirectory(prefix="isotype-") as scratch:
            copy = Path(scratch) / path.name
            copy.write_bytes(without_vocabulary(path, headers.tensors))
            config = pretrained(AutoConfig, scratch, gguf_file=copy.name)
    except (*BUILD_ERRORS, StrictDataclassError) as error:
        what, expected = f"{path}: {error}", "an architecture that transformers reads from GGUF"
        fix = "use the config.json of the model that the file was converted from"
        raise CheckpointError.of("transformers cannot read this GGUF file", what, expected, fix) from error
    config.name_or_path = str(path.parent)
    width = headers.metadata.get(f"{headers.architecture}.expert_feed_forward_length")
    if width and hasattr(config, "moe_intermediate_size"):  # transformers 5.23 does not read this key
        config.moe_intermediate_size = width
    return config


# ---------------------------------------------------------------------------------------------- adapter_config.json

ADAPTER_CONFIG = "adapter_config.json"
_MAX_RANK = 2**16

_Bias = Literal["none", "all", "lora_only", "delora_only", "oft_only", "boft_only", "hra_only", "vera_only"]
_ADAPTER_ENTRIES = (
    Entry(r"(.*_)?r|subspace_rank|effective_rank", None, low=1, high=_MAX_RANK),
    Entry(r"rank_pattern", dict[str, int] | None, low=1, high=_MAX_RANK),
    Entry(r"alpha_pattern", dict[str, float] | None),
    Entry(r"(.*_)?alpha", float | None, low=-1e9, high=1e9),
    Entry(r".*dropout.*(?<!_scale)", None, low=0, high=1),
    Entry(r"init_(lora_)?weights", bool | str | None),
    Entry(r"bias", _Bias),
    Entry(r"layer_replication", None, low=0, high=2_000),
    Entry(r"layers_to_transform", None, low=0, high=100_000),
    Entry(r"trainable_token_indices|token_indices", None, low=0, high=2**20),
    Entry(r"auto_mapping", dict[str, str | None] | None),
    Entry(r".*(seed|key|step|warmup|tinit|tfinal).*", None, low=-(2**63), high=2**63),
    Entry(r".*", None, low=-1e9, high=1e7),
)
"""The valid values of the fields of a config. The first pattern that matches the name of a field applies."""
_EXPRESSIONS = (
    "target_modules", "exclude_modules", "feedforward_modules", "layers_pattern", "modules_to_save",
)  # fmt: skip
_COUNTED = re.compile(r"num_batches_tracked|indices|index|mask|seed|size|position_ids")


def read_adapter_config(directory: Path, tensors: Sequence[TensorHeader]) -> Any:
    """Return the `PeftConfig` of a directory. Raise one CheckpointError with all problems of the config and the tensors."""
    from peft import PeftConfig, PeftType
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    path = directory / ADAPTER_CONFIG
    content = read_json(path)
    kind = content.get("peft_type")
    types = [member.value for member in PeftType]
    if kind not in types:
        what = f"{path}: peft_type {kind!r:.80}"
        expected, fix = "a type that PEFT has: " + ", ".join(types), "update PEFT, or correct the file"
        raise CheckpointError.of("unknown kind of adapter", what, expected, fix)
    problems = [*_field_problems(content, path, PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)])]
    if content.get("megatron_config"):  # PEFT would import the module that megatron_core names
        what = f"{path}: megatron_config, with the module {content.get('megatron_core')!r:.80}"
        expected = (
            "an adapter for transformers' layers, because isotype does not import modules that a file names"
        )
        problems.append(Problem(what, expected, "omit it"))
    if not problems:
        names = {base_name(tensor.name).rpartition(".")[0] for tensor in tensors}
        expressions = {
            f"{path}: {name}": [value] if isinstance(value, str) else value
            for name in _EXPRESSIONS
            if isinstance(value := content.get(name), str) or (name == "layers_pattern" and value)
        }
        dicts = {name: value for name, value in content.items() if isinstance(value, dict)}
        expressions |= {f"{path}: {name}": dicts[name] for name in dicts if name.endswith("_pattern")}
        problems = [*pattern_problems(expressions, names), *_tensor_problems(content, tensors, path)]
    if problems:
        raise CheckpointError(f"the adapter {directory} cannot be read", problems)
    try:
        config = pretrained(PeftConfig, str(directory))
    except BUILD_ERRORS as error:
        what, expected = f"{path}: {error}", f"the config of a {kind} adapter"
        fix = "install the package that the message names" if isinstance(error, ImportError) else AGAIN
        raise CheckpointError.of(f"{ADAPTER_CONFIG} cannot be read", what, expected, fix) from error
    # PEFT saves True; adapters are float32 masters under the policy only if they are trainable.
    config.inference_mode = False
    return config


def _field_problems(content: dict[str, Any], path: Path, kind: Any) -> Iterator[Problem]:
    hints = get_type_hints(kind)
    fields = dataclasses.fields(kind)
    values = {field.name: content[field.name] for field in fields if field.name in content}
    checked = {f.name: values[f.name] for f in fields if values.get(f.name, f.default) != f.default}
    yield from entry_problems(checked, _ADAPTER_ENTRIES, path, hints)
    for name in ("base_model_name_or_path", "revision"):
        value = values.get(name) or ""
        if isinstance(value, str) and not (
            value.isprintable() and all(len(part.encode()) < 256 for part in value.split("/"))
        ):
            expected = "the name of a model or a revision, in printable characters"
            yield Problem(f"{path}: {name} is {value!r:.80}", expected, AGAIN)


def _tensor_problems(
    content: dict[str, Any], tensors: Sequence[TensorHeader], path: Path
) -> Iterator[Problem]:
    """Yield a problem for each integer tensor, each A and B of different ranks, and each rank that is too large."""
    if not tensors:
        what = f"{path.parent / 'adapter_model.safetensors'} contains no tensor"
        yield Problem(what, "the weights of an adapter", "copy the file again")
        return
    file = tensors[0].file.name
    for tensor in tensors:
        whole = tensor.dtype is not None and not tensor.dtype.is_floating_point
        if whole and not _COUNTED.search(tensor.name):
            what = f"{file}: {base_name(tensor.name)} in {tensor.dtype_name}"
            yield Problem(what, "float32, bfloat16 or float16", "save the adapter again")
    if content.get("peft_type") not in ("LORA", "ADALORA"):
        return
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    for name, shape in shapes.items():
        other = shapes.get(re.sub("lora(_embedding)?_A", r"lora\1_B", name), ())
        if "_A" in name and len(shape) == len(other) == 2 and shape[0] != other[1]:
            what = f"{file}: {base_name(name)} has the shape {list(shape)}, and its B has {list(other)}"
            yield Problem(
                what, f"a B with one column for each row of A: {shape[0]}", "save the adapter again"
            )
    widest = max((side for shape in shapes.values() for side in shape), default=0)
    for name in ("r", "init_r", "rank_pattern"):
        if any(number > widest for number in numbers_in(content.get(name))):
            what = f"{path}: {name} is {content[name]!r:.80}"
            yield Problem(what, f"at most {widest}, the longest side of a tensor in {file}", AGAIN)
