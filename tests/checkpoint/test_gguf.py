"""GGUF headers, weights, and the tokenizer as transformers reads it."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import isotype
from isotype.checkpoint import tokenizer as module
from isotype.checkpoint.checkpoint import local_path, open_model
from isotype.checkpoint.formats.gguf import read_gguf_header
from isotype.checkpoint.formats.headers import read_headers
from isotype.checkpoint.stored_weights import StoredWeights, blank_model
from isotype.checkpoint.tokenizer import tokenizer_copy
from isotype.core.errors import CheckpointError, SaveError
from tests.refusals import refused

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 4, 2, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "Ċ Ġ", "ĊĠ Ġ", "h i"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
KIND = gguf.GGMLQuantizationType
in_tmp_path = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def vocabulary() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]


def weights() -> dict[str, np.ndarray[Any, Any]]:
    """Return a tiny Llama's weights by transformers' names, `[out, in]` as in nn.Linear."""
    rng = np.random.default_rng(0)
    head = HIDDEN // HEADS
    shapes = {"model.embed_tokens": (len(vocabulary()), HIDDEN), "model.norm": (HIDDEN,)}
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        shapes |= {
            f"{at}.self_attn.q_proj": (HIDDEN, HIDDEN),
            f"{at}.self_attn.k_proj": (KV_HEADS * head, HIDDEN),
            f"{at}.self_attn.v_proj": (KV_HEADS * head, HIDDEN),
            f"{at}.self_attn.o_proj": (HIDDEN, HIDDEN),
            f"{at}.mlp.gate_proj": (FFN, HIDDEN),
            f"{at}.mlp.up_proj": (FFN, HIDDEN),
            f"{at}.mlp.down_proj": (HIDDEN, FFN),
            f"{at}.input_layernorm": (HIDDEN,),
            f"{at}.post_attention_layernorm": (HIDDEN,),
        }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name.replace("model.layers.", "blk.") + ".weight"


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp keeps the two halves of each rotary pair next to each other."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, *, pre: str = "smollm", kind: KIND = KIND.Q8_0, arch: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary())
    writer.add_token_types([3 if token in SPECIAL else 1 for token in vocabulary()])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights().items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.rpartition(".")[2])
        stored = interleaved(weight, heads) if heads else weight
        if stored.ndim == 1 or kind == KIND.F32:
            writer.add_tensor(gguf_name(name), stored)
        else:
            writer.add_tensor(gguf_name(name), quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def copied(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_copy(read_headers(tiny), cache_dir=tmp_path_factory.mktemp("cache"))


# Headers


@pytest.mark.parametrize("kind", [KIND.F32, KIND.F16, KIND.BF16, KIND.Q8_0, KIND.Q4_0, KIND.Q4_1])
def test_headers_say_what_the_library_reads(tmp_path: Path, kind: KIND) -> None:
    path = write_gguf(tmp_path / "m.gguf", kind=kind)
    headers = read_headers(path)
    reader = gguf.GGUFReader(path)
    assert [(t.name, t.dtype_name, t.shape, t.bytes) for t in headers.tensors] == sorted(
        (t.name, t.tensor_type.name, tuple(t.shape.tolist()[::-1]), int(t.n_bytes)) for t in reader.tensors
    )
    scalars = {
        key: field.contents()
        for key, field in reader.fields.items()
        if field.types[0] != gguf.GGUFValueType.ARRAY and not key.startswith("GGUF.")
    }
    assert headers.metadata == scalars
    float_dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    assert {t.dtype for t in headers.tensors} == {torch.float32, float_dtypes.get(kind.name)}
    assert headers.format == "gguf"


def test_an_absent_library_is_an_error_of_isotype(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    with pytest.raises(isotype.CheckpointError, match=r"the package gguf\n.*pip install 'isotype\[train\]'"):
        isotype.resolve_precision(tiny, "bfloat16", device="cpu")


def test_a_directory_with_one_gguf_file_is_that_file(tiny: Path) -> None:
    assert read_headers(tiny.parent).tensors == read_headers(tiny).tensors


def test_a_directory_with_two(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    assert refused(CheckpointError, read_headers, tmp_path) == (
        "more than one GGUF file\n"
        f"  - the directory {tmp_path} holds a.gguf, b.gguf\n"
        "    expected  one GGUF file\n"
        f"    fix       give one: {tmp_path}/a.gguf"
    )


@in_tmp_path
@given(st.data())
def test_every_truncation_is_noticed(tmp_path: Path, tiny: Path, data: st.DataObject) -> None:
    content = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: data.draw(st.integers(0, 9000) | st.integers(0, len(content) - 1))])
    with pytest.raises(CheckpointError, match=r"^cannot read "):
        read_gguf_header(cut)


@in_tmp_path
@given(st.data())
def test_damage_is_read_or_refused_at_once(tmp_path: Path, tiny: Path, data: st.DataObject) -> None:
    """Absurd lengths, counts, types and names raise only CheckpointError, and never lead to an endless loop."""
    content = bytearray(tiny.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 9000))
        value = data.draw(st.binary(min_size=1, max_size=8) | st.just(b"\xff" * 8))
        content[at : at + len(value)] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        read_gguf_header(path)


@in_tmp_path
@given(tail=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + tail)
    with contextlib.suppress(CheckpointError):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "an empty file\n    expected  a GGUF file\n"),
        (b"PK\x03\x04" + bytes(40), "the first bytes b'PK\\x03\\x04'\n    expected  b'GGUF'\n"),
        (b"GGUF\x01\0\0\0" + bytes(40), "GGUF version 1\n    expected  version 2 or 3\n"),
        (
            b"GGUF\x03\0\0\0" + b"\xff" * 16,
            "the header is longer than the file (24 bytes)\n    expected  a complete",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_gguf_header(path)
    assert str(caught.value).startswith(f"cannot read {path}\n  - {problem}")


def test_a_truncated_file_names_the_tensors(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny.read_bytes()[:-1])
    assert refused(CheckpointError, read_gguf_header, path) == (
        f"cannot read {path}\n"
        "  - the file is too short for 1 of its tensors, such as 'blk.1.ffn_norm.weight'\n"
        "    expected  a complete file\n"
        "    fix       the file is damaged: download, copy or save it again"
    )


def test_a_part_of_a_split_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m-00001-of-00002.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError) as caught:
        read_headers(tmp_path)
    assert caught.value.problems[0].fix == "join them with llama.cpp: llama-gguf-split --merge"


# Weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_weight_is_the_files(tiny: Path, dtype: torch.dtype) -> None:
    model = isotype.load(tiny, isotype.resolve_precision(tiny, dtype, device="cpu"))
    held = dict(model.named_parameters())
    expected = weights()
    assert len(held) == len(expected)
    for name, weight in expected.items():
        stored = weight if weight.ndim == 1 else dequantize(quantize(weight, KIND.Q8_0), KIND.Q8_0)
        torch.testing.assert_close(
            held[f"{name}.weight"].data, torch.from_numpy(stored).to(dtype), rtol=0, atol=0
        )


@pytest.mark.parametrize("kind", [KIND.F32, KIND.BF16, KIND.Q8_0])
def test_stored_weights_and_their_rows_are_the_models(tmp_path: Path, kind: KIND) -> None:
    path = write_gguf(tmp_path / "m.gguf", kind=kind)
    model = isotype.load(path, isotype.resolve_precision(path, torch.float32, device="cpu"))
    stored = StoredWeights(blank_model(open_model(path).model_config), read_headers(path))
    expected = dict(model.named_parameters())
    assert stored.shapes.keys() >= expected.keys()
    for name, value in expected.items():
        assert torch.equal(stored.read(name).float(), value), name
        rows = len(value) // 2
        assert torch.equal(stored.read_rows(name, rows, len(value)).float(), value[rows:])
        assert stored.read_rows(name, rows, rows).shape == (0, *value.shape[1:])
    name = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(stored.read_rows(name, 3, 9, dim=1).float(), expected[name][:, 3:9])


def test_a_measurement_leaves_the_weights_in_the_file(tiny: Path, tmp_path: Path) -> None:
    batch = {"input_ids": torch.tensor([[1, 5, 9, 7]]), "labels": torch.tensor([[1, 5, 9, 7]])}
    ranges = isotype.measure_ranges(tiny, batch)
    path = tmp_path / "dense"
    isotype.load(tiny, isotype.resolve_precision(tiny, torch.float32, device="cpu")).save_pretrained(path)
    expected = isotype.measure_ranges(path, batch)
    assert ranges.modules == expected.modules
    assert ranges.notes == expected.notes == ()


# The tokenizer and the config


def test_the_config_is_the_files(copied: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(copied)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.tie_word_embeddings is True
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert getattr(config, "quantization_config", None) is None


def test_the_tokenizer_is_the_files(copied: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(copied)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi 1"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi 1<|im_end|>\n"
    ids = tokenizer(chat)["input_ids"]
    assert ids[0] == 1
    assert ids.count(2) == 1
    assert tokenizer.decode(ids) == chat
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi 1\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("h  12", ["h", "ĠĠ", "1", "2"]),  # what transformers returns: h, Ġ, Ġ, 1, 2
        ("h\n 1", ["h", "ĊĠ", "1"]),  # what transformers returns: h, Ċ, Ġ, 1
        ("h\n  hi", ["h", "ĊĠ", "Ġ", "hi"]),
    ],
)
def test_digits_are_split_from_the_spaces_before_them(copied: Path, text: str, tokens: list[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(copied)
    assert tokenizer.tokenize(text) == tokens
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_pre_tokenizers_that_transformers_knows_stay(tmp_path: Path, pre: str) -> None:
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "m.gguf", pre=pre)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = AutoTokenizer.from_pretrained(tokenizer_copy(read_headers(path), cache_dir=tmp_path / "cache"))
    for text in ("h  12", "h\n 1", "don't  HI", "12345"):
        assert ours.tokenize(text) == theirs.tokenize(text)


def test_a_pre_tokenizer_that_nobody_knows_is_warned_of(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", pre="falcon")
    with pytest.warns(UserWarning, match="pre-tokenizer") as caught:
        tokenizer_copy(read_headers(path), cache_dir=tmp_path / "cache")
    assert [str(warning.message) for warning in caught] == [
        "transformers has no rule for the pre-tokenizer 'falcon' of this GGUF file, and splits text as GPT-2 does: "
        "some texts become other tokens than in training; use the tokenizer of the original model"
    ]


def test_the_copy_is_made_once(copied: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_convert", None)
    before = (copied / "tokenizer.json").stat().st_mtime_ns
    assert tokenizer_copy(read_headers(tiny), cache_dir=copied.parent) == copied
    assert (copied / "tokenizer.json").stat().st_mtime_ns == before


def fake_convert(path: Path, metadata: object, target: Path) -> None:
    (target / "config.json").write_text("{}")


def test_another_file_is_another_copy(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_convert", fake_convert)
    changed = tmp_path / tiny.name
    content = bytearray(tiny.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    cache = tmp_path / "cache"
    copies = {
        tokenizer_copy(read_headers(tiny), cache_dir=cache),
        tokenizer_copy(read_headers(changed), cache_dir=cache),
    }
    assert len(copies | {tokenizer_copy(read_headers(tiny), cache_dir=cache)}) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_conversion_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupted(path: Path, metadata: object, target: Path) -> None:
        (target / "tokenizer.json").touch()
        raise error

    monkeypatch.setattr(module, "_convert", interrupted)
    with pytest.raises(error):
        tokenizer_copy(read_headers(tiny), cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_losing_the_race_is_no_error(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slower(path: Path, metadata: object, target: Path) -> None:
        (target / "mine").touch()
        monkeypatch.setattr(module, "_convert", fake_convert)
        (tokenizer_copy(read_headers(path), target.parent) / "theirs").touch()

    monkeypatch.setattr(module, "_convert", slower)
    target = tokenizer_copy(read_headers(tiny), cache_dir=tmp_path)
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "theirs"]
    assert list(tmp_path.iterdir()) == [target]


def test_an_architecture_that_transformers_does_not_know(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch="plamo")
    with pytest.raises(CheckpointError) as caught:
        tokenizer_copy(read_headers(path), cache_dir=tmp_path / "cache")
    problem = caught.value.problems[0]
    assert caught.value.headline == "transformers cannot read this GGUF file"
    assert problem.expected == "an architecture that transformers reads from GGUF (this one: plamo)"
    assert problem.fix == "use the model's safetensors checkpoint instead"
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_room(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, metadata: object, target: Path) -> None:
        (target / "tokenizer.json").touch()
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(module, "_convert", full)
    target = tmp_path / f"{tiny.stem}-{module._fingerprint(tiny)}-tokenizer"
    assert refused(SaveError, tokenizer_copy, read_headers(tiny), cache_dir=tmp_path) == (
        f"the tokenizer of a GGUF file cannot be written\n  - {target}: {os.strerror(errno.ENOSPC)}\n"
        "    expected  a writable directory on a disk with free space\n"
        "    fix       free some space, or set ISOTYPE_CACHE to another directory"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="the tokenizer of a GGUF file cannot be written") as caught:
        tokenizer_copy(read_headers(tiny), cache_dir=tmp_path / "file")
    assert caught.value.problems[0].given.endswith(f": {os.strerror(errno.ENOTDIR)}")


@pytest.mark.parametrize("shown", [True, False])
def test_no_progress_bar_is_shown_and_the_setting_is_kept(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], shown: bool
) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    try:
        tokenizer_copy(read_headers(tiny), cache_dir=tmp_path)
        assert logging.is_progress_bar_enabled() == shown
        assert are_progress_bars_disabled() != shown
    finally:
        logging.enable_progress_bar()
    assert "%" not in capfd.readouterr().err


# The embedded model


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        found = local_path("embedded:smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))
    assert isinstance(found, Path)
    return found


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        tokenizer_copy(read_headers(smollm2), tmp_path_factory.mktemp("smollm2"))
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_smollm2_answers(smollm2: Path, smollm2_tokenizer: Any) -> None:
    tokenizer = smollm2_tokenizer
    model = isotype.load(smollm2, isotype.resolve_precision(smollm2, torch.float32, device="cpu")).eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(out) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_smollm2_splits_as_published(smollm2_tokenizer: Any) -> None:
    """Isolates digits like the published tokenizer of SmolLM2-135M-Instruct."""
    tokenizer = smollm2_tokenizer
    assert tokenizer.tokenize("a\n 1. foo\n   2. bar") == [
        *("a", "ĊĠ", "1", ".", "Ġfoo", "ĊĠĠĠ", "2", ".", "Ġbar"),
    ]
    assert tokenizer.model_max_length == 8192
    for text in (
        "  x = 1\n    return 23  ",
        "naïve 你好 🎉",
        "don't\r\n\t3.14159",
        "<|im_start|>user\nhi<|im_end|>\n",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
