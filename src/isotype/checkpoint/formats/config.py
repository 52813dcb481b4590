"""config.json: read and checked, its dtype, its model class, and that class built on the meta device."""

from __future__ import annotations

import copy
import difflib
import itertools
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from isotype.checkpoint.blank import NoDraws
from isotype.checkpoint.formats.gguf import without_vocabulary
from isotype.checkpoint.formats.headers import CheckpointHeaders, quantization_beside
from isotype.checkpoint.formats.json_file import read_json
from isotype.compat.transformers import mapping_of
from isotype.core.errors import CheckpointError, Problem, one_line
from isotype.core.pretrained import pretrained

BUILD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""How building a model class from a config that does not fit it fails."""


def read_config(directory: Path) -> Any:
    """The transformers config in a directory; code that comes with a checkpoint is not run.

    Raises:
        CheckpointError: config.json is damaged, or names a model or dtype that is not known.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers import __version__ as version

    path = directory / "config.json"
    content = read_json(path)
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), CONFIG_MAPPING, n=3)
        if not model_type:
            fix = "add the model_type, or give the directory that save_pretrained() wrote"
        elif "auto_map" in content:
            fix = "its code comes with the checkpoint and is not run here: load it yourself and give the nn.Module"
        elif near:
            fix = f"did you mean {' or '.join(near)}? Or update transformers"
        else:
            fix = "update transformers"
        what = f"{path}: model_type {model_type!r}" if model_type else f"{path} has no model_type"
        expected = f"a model_type that transformers {version} knows"
        raise CheckpointError.of("unknown model", what, expected, fix)
    for key in ("dtype", "torch_dtype"):
        torch_dtype(content.get(key), f"{key} in {path}")
    quantization = quantization_beside(directory)
    if problems := [*_problems(content, path, CONFIG_MAPPING[model_type]), *_generation_problems(directory)]:
        raise CheckpointError(f"settings of {directory} that cannot work", problems)
    try:
        config = pretrained(AutoConfig, directory)
    except (*BUILD_ERRORS, OSError, StrictDataclassError) as error:
        raise CheckpointError.of(
            "config.json cannot be read",
            f"{path}: {error}",
            f"a config of a {model_type} model",
            "copy or download it again",
        ) from error
    if quantization.get("quant_method") == "modelopt":  # which may write it into a file of its own
        config.quantization_config = dict(quantization)
    return config


_AGAIN = "correct it, or copy or download the file again"
_MAX_LAYERS, _MAX_MODULES = 2_000, 100_000
_LIMITS: tuple[tuple[re.Pattern[str], float, float], ...] = (
    (re.compile("layers"), -math.inf, _MAX_LAYERS),
    (re.compile("(dropout|dropout_prob|pdrop)$"), 0, 1),
    (re.compile("^(max_position_embeddings|n_positions)$"), 1, 2**31),
    (re.compile("^rope_theta$"), 1e-6, math.inf),
)
"""Names of entries, and the least and the largest number that they can be."""
_FLAGS = ("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload")


def _problems(content: Mapping[str, Any], path: Path, kind: type) -> Iterator[Problem]:
    """Entries of config.json, and of the objects in it, that no class says anything about before it fails by them, or runs code."""
    architectures = content.get("architectures")
    if not (
        architectures is None
        or (isinstance(architectures, list) and all(isinstance(a, str) for a in architectures))
    ):
        yield Problem(f"{path}: architectures is {architectures!r:.80}", "a list of names of classes", _AGAIN)
    for key, value in _entries(content):
        what = f"{path}: {key} is {value!r:.80}"
        if key.endswith(("attn_implementation", "experts_implementation")) and "/" in str(value):
            expected = "an implementation of transformers: code of the hub is not run"
            yield Problem(what, expected, "leave it out")
        if (key in _FLAGS and not isinstance(value, bool)) or (key == "return_dict" and value is not True):
            yield Problem(what, "true" if key == "return_dict" else "true or false", _AGAIN)
        limits = next((limits for words, *limits in _LIMITS if words.search(key)), None)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if limits and number and not limits[0] <= value <= limits[1]:
            yield Problem(
                what,
                f"a number from {limits[0]:g} to {limits[1]:g}".replace("from -inf to", "of at most"),
                _AGAIN,
            )
    for key in content:
        if not key.startswith("__") and callable(getattr(kind, key, None)):
            yield Problem(f"{path}: {key}, a method of {kind.__name__}", "entries of a config", _AGAIN)


def _entries(content: Any) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        yield key, value
        if isinstance(value, dict):
            yield from _entries(value)


def _generation_problems(directory: Path) -> Iterator[Problem]:
    """What is wrong with generation_config.json, which is read with the weights."""
    from transformers import GenerationConfig

    path = directory / "generation_config.json"
    if path.is_file():
        try:
            content = read_json(path)
            GenerationConfig.from_dict(content).validate()
        except BUILD_ERRORS as error:
            yield Problem(f"{path}: {one_line(error)}", "settings that generation can work by", _AGAIN)
            return
        for key, value in content.items():
            ids = [value] if key.endswith("_token_id") and type(value) is not list else value
            if key.endswith(("_token_id", "suppress_tokens")) and not _are(ids, int):
                yield Problem(f"{path}: {key} is {value!r:.80}", "ids of tokens", _AGAIN)
            if key.startswith(("min_", "max_", "top_", "temp")) and isinstance(value, (str, list, dict)):
                yield Problem(f"{path}: {key} is {value!r:.80}", "a number", _AGAIN)
            if key == "bad_words_ids" and not (
                _are(value, list) and all(_are(ids, int) for ids in value or ())
            ):
                yield Problem(f"{path}: {key} is {value!r:.80}", "lists of ids of tokens", _AGAIN)


def _are(values: Any, kind: type) -> bool:
    return values in (None, [None]) or (
        isinstance(values, list) and all(type(each) is kind for each in values)
    )


def build_on_meta(config: Any, source: str) -> nn.Module:
    """The config's model on the meta device, which costs a tenth of a second even for 70B parameters.

    Only an instance knows the pins of its submodels: transformers gathers them in `post_init`.

    Raises:
        CheckpointError: transformers has no class for it, or the class does not accept it.
    """
    cls = model_class(config)
    if cls is None:
        raise CheckpointError.of(
            "no model class for this config",
            f"{source}: model_type {config.model_type!r}, architectures {config.architectures}",
            "a model class that transformers has",
            "update transformers, or give the model itself (an nn.Module)",
        )
    with building(cls, source), torch.device("meta"):
        # A copy: building a model writes its choices (attention implementation, dtype) into the config.
        model: nn.Module = cls(copy.deepcopy(config))
    return model


def names_in_other_classes(model: Any) -> frozenset[str]:
    """The tensors of the other classes that transformers has for the model's config, `without_prefix`."""
    from transformers import PreTrainedModel

    homes = {
        sys.modules[each.__module__]
        for each in type(model).__mro__
        if each.__module__.startswith("transformers.models.")
    }
    names: set[str] = set()
    cls: Any
    for cls in {each for home in homes for each in vars(home).values() if isinstance(each, type)}:
        if not issubclass(cls, PreTrainedModel) or cls.config_class is not type(model.config):
            continue
        try:
            with building(cls), torch.device("meta"):
                other = cls(copy.deepcopy(model.config))
        except CheckpointError:
            continue  # it needs what the config does not have
        names |= {without_prefix(other, name) for name in other.state_dict()}
    return frozenset(names)


def without_prefix(model: Any, name: str) -> str:
    """The name of a tensor in the base model, where it is one of it."""
    return name.removeprefix(f"{model.base_model_prefix}.")


@contextmanager
def building(cls: type, source: str = "") -> Iterator[None]:
    """Within it a model of class `cls` is built, without drawing values on the meta device.

    Raises:
        CheckpointError: the config is none of the class; it names `source`, where there is one.
    """
    modules = itertools.count(1)

    def one_more(*_: Any) -> None:
        if next(modules) > _MAX_MODULES:
            raise CheckpointError.of(
                "the config describes a model that is too large to be built",
                f"{source or cls.__name__}: more than {_MAX_MODULES:,} modules",
                "the config of a model",
                "correct the numbers in config.json",
            )

    counting = register_module_module_registration_hook(one_more)
    try:
        with NoDraws():
            yield
    except BUILD_ERRORS as error:
        what = f"{cls.__name__} fails with {type(error).__name__}: {error}"
        raise CheckpointError.of(
            "the config does not fit its model class",
            f"{source}: {what}" if source else what,
            "a config that the class can be built from",
            "take config.json and transformers as the checkpoint was published with",
        ) from error
    finally:
        counting.remove()


def model_class(config: Any, auto_class: Any = None) -> Any:
    """The class that the config names, else the one transformers lists for it; None if it has none.

    With an auto class (`AutoModelForCausalLM`, …), the one that this class lists.
    """
    import transformers

    mappings: tuple[Any, ...] = (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_MASKED_LM_MAPPING,
        transformers.MODEL_MAPPING,
    )
    if auto_class is not None:
        mappings = (mapping_of(auto_class),)
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
    """The config's dtype, or its text model's.

    Raises:
        CheckpointError: it is not a torch dtype.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    for each in (config, text):
        value = getattr(each, "dtype", None)
        if value not in (None, "auto"):
            return torch_dtype(value, "the config's dtype")
    return None


def torch_dtype(value: Any, what: str) -> torch.dtype | None:
    """Any torch dtype, integers and float8 included, from its name in a config; `what` names it in the error.

    Raises:
        CheckpointError: torch has no such dtype.
    """
    if value is None or isinstance(value, torch.dtype):
        return value
    dtype = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError.of(
            "unknown dtype in the config",
            f"{what} is {value!r}",
            "a torch dtype such as 'bfloat16'",
            "correct it in config.json",
        )
    return dtype


def gguf_config(headers: CheckpointHeaders) -> Any:
    """The config of a GGUF file, of its headers.

    Raises:
        CheckpointError: it is of an architecture that transformers does not read from GGUF.
    """
    from huggingface_hub.errors import StrictDataclassError

    path = headers.path
    try:
        if not _size_is_read(headers.architecture):
            return _config(path)
        with tempfile.TemporaryDirectory(prefix="isotype-") as scratch:
            copy = Path(scratch) / path.name
            copy.write_bytes(without_vocabulary(path, headers.tensors))
            config = _config(copy)
    except (*BUILD_ERRORS, StrictDataclassError) as error:
        fix = "use the config.json of the model it was made from"
        raise CheckpointError.of(
            "transformers cannot read this GGUF file",
            f"{path}: {error}",
            "an architecture that transformers reads from GGUF",
            fix,
        ) from error
    config.name_or_path = str(path.parent)
    return config


def _config(path: Path) -> Any:
    from transformers import AutoConfig

    return pretrained(AutoConfig, path.parent, gguf_file=path.name)


def _size_is_read(architecture: str) -> bool:
    """Whether transformers takes the size of the vocabulary from its own key, not from the vocabulary."""
    from transformers import integrations

    # Those that transformers 5.23 has a reader of its own for, which skips the vocabulary, too.
    own = getattr(getattr(integrations, "gguf", None), "GGUF_CONFIG_ARCHS", ())
    keys = integrations.GGUF_CONFIG_MAPPING.get(architecture, ("vocab_size",))
    return architecture not in own and "vocab_size" in keys
