"""Writes an unquantized model as a GGUF file, with the names and values that llama.cpp's converter would write."""

import json
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isotype.checkpoint.formats.headers import read_headers
from isotype.core.dtypes import GGUF_BLOCKS, LLAMA_CPP_TYPES
from isotype.core.errors import PrecisionError, SaveError, UsageError
from isotype.core.names import listed

Change = Callable[[str, torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    """Rules for writing models of one `model_type` as GGUF.

    Attributes:
        name: the architecture's name in llama.cpp.
        change: function that returns llama.cpp's values for (name in the file, transformers' values, config).
        epsilon: GGUF key and config field of the norms' epsilon.
        more: other GGUF keys, each with its config field.
    """

    name: str
    change: Change = lambda name, values, config: values
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    more: tuple[tuple[str, str], ...] = ()


def _rotary_pairs_together(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    """Permute the rows of queries and keys, because llama.cpp pairs neighboring rows, and transformers pairs the halves of a head."""
    if ".attn_q." not in name and ".attn_k." not in name:
        return values
    heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _norms_from_zero(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    """Add 1 to the norm weights of Gemma: llama.cpp multiplies by the stored weight, and transformers by 1 + weight."""
    return values.float() + 1 if name.endswith("norm.weight") else values


_GEMMA = (("attention.key_length", "head_dim"), ("attention.value_length", "head_dim"))
_WINDOW = (("attention.sliding_window", "sliding_window"),)
_CAPS = tuple((name, name) for name in ("attn_logit_softcapping", "final_logit_softcapping"))
_EXPERTS = (
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _rotary_pairs_together),
    "mistral": Architecture("llama", _rotary_pairs_together),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", more=_GEMMA),
    "qwen3_moe": Architecture("qwen3moe", more=(*_GEMMA, *_EXPERTS)),
    "gemma2": Architecture("gemma2", _norms_from_zero, more=(*_GEMMA, *_WINDOW, *_CAPS)),
    "gemma3_text": Architecture("gemma3", _norms_from_zero, more=(*_GEMMA, *_WINDOW)),
    "phi3": Architecture("phi3", more=_WINDOW),
    "starcoder2": Architecture("starcoder2", epsilon=("attention.layer_norm_epsilon", "norm_epsilon")),
}
"""Rules by `model_type`. Tests write a model of each type, read it back and compare the models."""

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_GATE_UP = "experts.gate_up_proj"
_ENDS = ("token_embd.weight", "output.weight")
_FIX = "merge into a folder (-o NAME, without --gguf), and convert it with llama.cpp's convert_hf_to_gguf.py"
_NO_TOKENIZER = "this tokenizer cannot be written to GGUF"


def check_exportable(config: Any) -> Architecture:
    """Return the rules for writing a model with this config. Raise UsageError if GGUF cannot represent the model."""
    text = config.get_text_config()
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None and getattr(config, "vision_config", None) is not None:
        expected = "a text-only model, because llama.cpp reads towers and projectors from a second file (mmproj), which isotype does not write"
        raise _refused(f"a model of the type {config.model_type}, which accepts images", expected)
    if architecture is None:
        raise _refused(f"a model of the type {config.model_type}", f"one of {', '.join(ARCHITECTURES)}")
    kind = _rotary_parameters(text).get("rope_type", "default")
    if kind not in ("default", "linear", "llama3"):
        raise _refused(f"rotary positions of the kind {kind}", "default, linear or llama3")
    scalar, head = getattr(text, "query_pre_attn_scalar", None), _head_size(text)
    # llama.cpp infers Gemma's attention scale from the number of layers: 46 and 62 are the 27B models.
    large = text.num_hidden_layers in (46, 62)
    if scalar not in (None, head, text.hidden_size // text.num_attention_heads if large else head):
        raise _refused(f"query_pre_attn_scalar {scalar:g}", f"{head}, the size of a head")
    if not getattr(text, "norm_topk_prob", True):
        expected = "norm_topk_prob true, because llama.cpp always scales the scores of a token's experts to a sum of 1"
        raise _refused("norm_topk_prob false", expected)
    return architecture


def exportable_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer, or the tokenizer of a processor. Raise UsageError if there is none, or if GGUF cannot represent it."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    if not getattr(inner, "is_fast", False):
        what = "no tokenizer that can be read as tokenizer.json"
        fix = "copy tokenizer.json into the adapter's directory"
        raise UsageError.of("a GGUF file contains the tokenizer of the model", what, "a fast tokenizer", fix)
    _name_of_split(json.loads(inner.backend_tokenizer.to_str()))
    return inner


def is_exportable(config: Any, tokenizer: Any) -> bool:
    try:
        check_exportable(config)
        if tokenizer is not None:
            exportable_tokenizer(tokenizer)
    except UsageError:
        return False
    return True


def _refused(what: str, expected: str, headline: str = "this model cannot be exported to GGUF") -> UsageError:
    return UsageError.of(headline, what, expected, _FIX)


def write_tensors(
    config: Any,
    shapes: Mapping[str, torch.Tensor],
    values: Iterable[tuple[str, torch.Tensor]],
    tokenizer: Any,
    path: Path,
    kind: str,
    name: str,
) -> list[str]:
    """Write a dense model and its tokenizer to a GGUF file, with one tensor in memory at a time. Return notes.

    As in llama.cpp's converter, most matrices are stored in `kind`. Vectors (norms, biases) and routers are float32.
    Embeddings and head are stored as q8_0 if `kind` has fewer bits. If `kind` is one of `GGUF_BLOCKS`, a matrix is
    stored as float16 if the length of its rows is not a multiple of 32. A head that shares the weight of the
    embedding is not written.

    Args:
        shapes: name -> parameter, in the order of `values`. The parameters may be on the meta device.
        kind: f32, f16, bf16 or one of `isotype.core.dtypes.GGUF_BLOCKS`.
        name: the model's name in the file's metadata.

    Raises:
        UsageError: `check_exportable` refuses the model, a parameter has no name in GGUF, or the tokenizer is unsupported.
        PrecisionError: float16 cannot represent a weight.
    """
    import gguf

    architecture, config = check_exportable(config), config.get_text_config()
    names = _gguf_names(shapes, architecture, config)
    in_file = dict(chain.from_iterable(_parts(value, names[key]) for key, value in shapes.items()))
    rows, factors = in_file["token_embd.weight"].shape[0], _llama3_factors(config)
    more = {} if factors is None else {"rope_freqs.weight": factors}
    in_file |= more
    writer = gguf.GGUFWriter(path, architecture.name)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if kind == 'f32' else 'MOSTLY'}_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_numbers(writer, config, architecture)
    add_tokenizer(writer, tokenizer, rows)
    kinds = {key: _kind(key, value, kind) for key, value in in_file.items()}
    for key, value in in_file.items():
        stored = getattr(gguf.GGMLQuantizationType, kinds[key])
        block, size = gguf.GGML_QUANT_SIZES[stored]
        # With dtype uint8, the writer would compute another shape from the bytes.
        nbytes = value.numel() // block * size
        writer.add_tensor_info(key, value.shape, np.dtype(np.float32), nbytes, raw_dtype=stored)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for parameter, value in values:
            for key, part in _parts(value, names[parameter]):
                writer.write_tensor_data(_rounded(key, architecture.change(key, part, config), kinds[key]))
        for key, value in more.items():
            writer.write_tensor_data(_rounded(key, value, kinds[key]))
    finally:
        writer.close()
    wide = [key for key, stored in kinds.items() if kind in GGUF_BLOCKS and stored == "F16"]
    why = f"their row length is not a multiple of 32, the block size of {kind}"
    return [f"{len(wide)} weights are in f16: {why} ({wide[0]}, …)"] if wide else []


def _parts(values: torch.Tensor, names: tuple[str, ...]) -> Iterable[tuple[str, torch.Tensor]]:
    return zip(names, values.chunk(len(names), dim=1) if len(names) > 1 else (values,), strict=True)


def _gguf_names(names: Iterable[str], architecture: Architecture, config: Any) -> dict[str, tuple[str, ...]]:
    import gguf

    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture.name)
    name_map = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    names_in_file = {}
    for name in names:
        halves = ("gate", "up") if _GATE_UP in name else ("",)
        parts = [name.replace(_GATE_UP, f"experts.{half}_proj") for half in halves]
        keys = [name_map.get_name(part, try_suffixes=(".weight", ".bias")) for part in parts]
        names_in_file[name] = tuple(
            key if key is None or key.endswith((".weight", ".bias")) else f"{key}.weight" for key in keys
        )
    unnamed = [name for name, keys in names_in_file.items() if None in keys]
    if unnamed:
        what = f"parameters that have no name in GGUF: {listed(unnamed)}"
        raise _refused(what, f"only parameters that llama.cpp has for {architecture.name}")
    return names_in_file


def _add_numbers(writer: Any, config: Any, architecture: Architecture) -> None:
    rope, prefix, head = _rotary_parameters(config), architecture.name, _head_size(config)
    for key, field in _SIZES.items():
        writer.add_uint32(f"{prefix}.{key}", getattr(config, field))
    key, field = architecture.epsilon
    writer.add_float32(f"{prefix}.{key}", getattr(config, field))
    writer.add_uint32(f"{prefix}.rope.dimension_count", int(head * rope.get("partial_rotary_factor", 1.0)))
    writer.add_float32(f"{prefix}.rope.freq_base", rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_string(f"{prefix}.rope.scaling.type", "linear")
        writer.add_float32(f"{prefix}.rope.scaling.factor", rope["factor"])
    more = dict(architecture.more)
    if head * config.num_attention_heads != config.hidden_size:
        more |= dict(_GEMMA)
    for key, field in more.items():
        value = head if field == "head_dim" else getattr(config, field, None)
        if value is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{prefix}.{key}", value)


def _head_size(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _rotary_parameters(config: Any) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    rope: Mapping[str, Any] = parameters.get("full_attention", parameters)
    return rope


def _llama3_factors(config: Any) -> torch.Tensor | None:
    """Return the factors by which Llama 3.1 divides its rotary frequencies; None for other rope types."""
    rope = _rotary_parameters(config)
    if rope.get("rope_type") != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    head = _head_size(config)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head, 2, dtype=torch.float32) / head)
    factors: torch.Tensor = plain / scaled
    return factors


def _kind(name: str, values: torch.Tensor, kind: str) -> str:
    if values.ndim < 2 or name.endswith(".ffn_gate_inp.weight"):
        return "F32"
    if kind in GGUF_BLOCKS and values.shape[-1] % 32:
        return "F16"
    # Embeddings and head have 8 bits, as in llama.cpp: their rounding changes the logits of every token.
    return "Q8_0" if kind in GGUF_BLOCKS and name in _ENDS else kind.upper()


def _rounded(name: str, values: torch.Tensor, kind: str) -> Any:
    import gguf

    if kind == "BF16":
        return values.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    wide = values.float().contiguous()
    if kind == "F16":
        largest = float(wide.abs().max())
        if largest > torch.finfo(torch.float16).max:
            overflow = f"{name}: values up to {largest:.4g}"
            headline, fix = "f16 cannot represent the merged weights", "set --gguf bf16 or f32"
            raise PrecisionError.of(headline, overflow, "at most 65504", fix)
        return wide.half().numpy()
    if kind == "F32":
        return wide.numpy()
    return gguf.quantize(wide.numpy(), gguf.GGMLQuantizationType[kind])


PROGRAM = "llama-quantize"  # writes the types in LLAMA_CPP_TYPES


def require_program(kind: str | None, adapter: Path, output: Path) -> None:
    """Raise UsageError if only llama.cpp's `llama-quantize` can write `kind`, but it is not on the PATH."""
    if kind is None or kind not in LLAMA_CPP_TYPES or shutil.which(PROGRAM):
        return
    final = output if output.suffix == ".gguf" else output / f"model-{kind}.gguf"
    dense = final.with_name(f"{final.stem}-f32.gguf")
    commands = (
        ("isotype", "merge", str(adapter), "-o", str(dense), "--gguf", "f32"),
        (PROGRAM, str(dense), str(final), kind.upper()),
    )
    what = f"--gguf {kind}, and no {PROGRAM} on the PATH"
    expected = f"{PROGRAM} of https://github.com/ggml-org/llama.cpp, or a type that isotype writes without {PROGRAM} (--gguf q8_0, q4_0)"
    fix = f"put {PROGRAM} on the PATH, or run these commands on a machine that has {PROGRAM}: {' && '.join(map(shlex.join, commands))}"
    raise UsageError.of(f"only llama.cpp writes {kind}", what, expected, fix)


def quantize_by_llama_cpp(dense: Path, output: Path, kind: str) -> list[str]:
    """Quantize a dense GGUF file with `llama-quantize`. Return a note with the tensors' types, or raise SaveError."""
    command = [shutil.which(PROGRAM) or PROGRAM, str(dense), str(output), kind.upper()]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode or not output.is_file():
        lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
        failure = f"{shlex.join(command)}: exit status {result.returncode}; {' / '.join(lines[-3:])}"
        fix = "correct the cause that the program printed, or write float32 with --gguf f32"
        raise SaveError.of(f"{PROGRAM} has failed", failure, "exit status 0", fix)
    counts = Counter(tensor.dtype_name.lower() for tensor in read_headers(output).tensors)
    types = ", ".join(f"{count} in {name}" for name, count in counts.most_common())
    return [f"{PROGRAM} stores the tensors of a {kind} file in several types: {types}"]


# llama.cpp's names of pre-tokenizers by their regular expression (llama-vocab.cpp).
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
_SPECIAL = ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id")


def add_tokenizer(writer: Any, tokenizer: Any, rows: int) -> None:
    """Write a tokenizer's vocabulary, merges, token types and special tokens with `gguf.GGUFWriter`.

    Embedding rows without a token get the name `[PADn]`, and are marked as unused. Raises UsageError if the tokenizer is
    not BPE, or if llama.cpp has no name for its pre-tokenizer.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, split = content["model"], _name_of_split(content)
    tokens, kinds = _tokens_and_types(content, tokenizer, rows)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre(split)
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_add_space_prefix(_prefixes_space(content))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_merges(merges)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name in _SPECIAL:
        value = getattr(tokenizer, name, None)
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(ids) and ids[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _tokens_and_types(content: Mapping[str, Any], tokenizer: Any, rows: int) -> tuple[list[str], list[int]]:
    from gguf import TokenType

    special = {token["id"]: token["special"] for token in content["added_tokens"]}
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    unknown, byte_tokens = content["model"].get("unk_token"), content["model"].get("byte_fallback")
    tokens, kinds = [], []
    for number in range(rows):
        token, kind = names.get(number), TokenType.NORMAL
        if token is None:
            token, kind = f"[PAD{number}]", TokenType.UNUSED
        elif byte_tokens and len(token) == 6 and token.startswith("<0x"):
            kind = TokenType.BYTE
        elif byte_tokens and token == unknown:
            kind = TokenType.UNKNOWN
        elif number in special:
            kind = TokenType.CONTROL if special[number] else TokenType.USER_DEFINED
        tokens.append(token)
        kinds.append(kind)
    return tokens, kinds


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> list[float]:
    """Return a SentencePiece score for each token. Tokens that are merged earlier have a higher score."""
    rank: dict[str, int] = {}
    for at, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), at)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _token_parts(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [part for step in pre_tokenizer["pretokenizers"] for part in _token_parts(step)]
    return [pre_tokenizer]


def _prefixes_space(content: Mapping[str, Any]) -> bool:
    normalizer = content.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    schemes = [part.get("prepend_scheme") for part in _token_parts(content["pre_tokenizer"])]
    prepends = any(step.get("type") == "Prepend" for step in steps)
    return prepends or any(scheme in ("always", "first") for scheme in schemes)


def _name_of_split(content: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the pre-tokenizer. Raise UsageError if llama.cpp has no such name."""
    model = content["model"]
    if model["type"] != "BPE":
        what = f"a tokenizer of the kind {model['type']}"
        raise _refused(what, "byte-level BPE, or BPE with byte tokens", _NO_TOKENIZER)
    if model.get("byte_fallback"):
        return "default"
    parts = _token_parts(content["pre_tokenizer"])
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        name = _SPLITS.get(parts[0]["pattern"].get("Regex", ""))
        if name is not None:
            return name
    what = f"a tokenizer that splits text by {' and '.join(kinds) or 'nothing'}: llama.cpp has no name for this split"
    raise _refused(what, "the split of GPT-2, Llama 3, Qwen 2, SmolLM or SentencePiece", _NO_TOKENIZER)
