"""A tokenizer as metadata of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from isotype.core.errors import UsageError

# llama.cpp's names for how text is split before the merges, by the pattern of the tokenizer (its llama-vocab.cpp).
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPECIAL = {
    "bos_token_id": "add_bos_token_id",
    "eos_token_id": "add_eos_token_id",
    "unk_token_id": "add_unk_token_id",
    "pad_token_id": "add_pad_token_id",
}


def add_tokenizer(writer: Any, tokenizer: Any, rows: int) -> None:
    """Write a tokenizer's vocabulary, merges, kinds and special tokens.

    Args:
        writer: `gguf.GGUFWriter`.
        tokenizer: a fast tokenizer of transformers.
        rows: of the embedding; those without a token are named and marked as unused.

    Raises:
        UsageError: it is no BPE, or splits text in a way that GGUF has no name for.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise _unknown(f"a tokenizer of the kind {model['type']}", "byte-level BPE, or BPE with byte tokens")
    tokens, kinds = _vocabulary(content, tokenizer, rows)
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_add_space_prefix(_prefixes_space(content))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split_name(content["pre_tokenizer"]))
        writer.add_token_merges(merges)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, method in _SPECIAL.items():
        value = getattr(tokenizer, name, None)
        if value is not None:
            getattr(writer, method)(value)
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(ids) and ids[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _vocabulary(content: Mapping[str, Any], tokenizer: Any, rows: int) -> tuple[list[str], list[int]]:
    """Return every row's token and kind."""
    added = {each["id"]: each for each in content["added_tokens"]}
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    unknown, byte_tokens = content["model"].get("unk_token"), content["model"].get("byte_fallback")
    tokens, kinds = [], []
    for number in range(rows):
        token = names.get(number)
        if token is None:
            tokens.append(f"[PAD{number}]")
            kinds.append(_UNUSED)
            continue
        kind = _NORMAL
        if byte_tokens and len(token) == 6 and token.startswith("<0x"):
            kind = _BYTE
        elif byte_tokens and token == unknown:
            kind = _UNKNOWN
        elif number in added:
            kind = _CONTROL if added[number]["special"] else _USER_DEFINED
        tokens.append(token)
        kinds.append(kind)
    return tokens, kinds


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> list[float]:
    """Return SentencePiece's order as scores: the earlier a pair is merged, the higher its token."""
    rank: dict[str, int] = {}
    for at, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), at)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _parts(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [part for each in pre_tokenizer["pretokenizers"] for part in _parts(each)]
    return [pre_tokenizer]


def _prefixes_space(content: Mapping[str, Any]) -> bool:
    normalizer = content.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    schemes = [each.get("prepend_scheme") for each in _parts(content["pre_tokenizer"])]
    return any(each.get("type") == "Prepend" for each in steps) or any(
        s in ("always", "first") for s in schemes
    )


def _split_name(pre_tokenizer: Mapping[str, Any] | None) -> str:
    parts = _parts(pre_tokenizer)
    kinds = [each["type"] for each in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        name = _SPLITS.get(parts[0]["pattern"].get("Regex", ""))
        if name is not None:
            return name
    raise _unknown(
        f"a tokenizer that splits text by {' and '.join(kinds) or 'nothing'} as no known model does",
        "the split of GPT-2, Llama 3, Qwen 2 or SmolLM, or SentencePiece's",
    )


def _unknown(what: str, expected: str) -> UsageError:
    fix = "leave --gguf out, and convert the merged model with llama.cpp's convert_hf_to_gguf.py"
    return UsageError.of("this tokenizer cannot be written to GGUF", what, expected, fix)
