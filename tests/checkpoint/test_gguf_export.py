"""Models written to GGUF are read back by transformers with the same values and tokens, and by llama.cpp if it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GgufConfig, PreTrainedTokenizerFast
from transformers.utils import logging

import isotype
from isotype.checkpoint.checkpoint import embedded_file
from isotype.checkpoint.export import _LLAMA3, ARCHITECTURES, write_tensors
from isotype.checkpoint.formats.headers import read_headers
from isotype.checkpoint.tokenizer import tokenizer_copy
from isotype.core.dtypes import GGUF_BLOCKS
from isotype.core.errors import PrecisionError, UsageError
from tests.pairwise import few

TEXT = [
    "The step is traced on fake tensors, and 12 dtypes meet 345 times; don't round twice.",
    "A tensor's dtype decides how many digits survive.\n\n\tWhen two meet in one product?  Mixed précision, 量化!",
] * 20
SPLITS: dict[str, Any] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def byte_level(split: str = "gpt-2") -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = SPLITS[split]
    backend.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def sentencepiece() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    # Byte tokens are not special tokens: they only stand for bytes that have no other token.
    content = backend.to_str().replace('"special":true', '"special":false')
    backend = Tokenizer.from_str(content)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def tiny(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 3, "bos_token_id": 1,
        "eos_token_id": 2, "head_dim": 16, "tie_word_embeddings": False,
    }  # fmt: skip
    if kind in ("qwen2", "phi3", "starcoder2"):
        sizes.pop("head_dim")
    if kind == "qwen3":
        sizes["head_dim"] = 128  # transformers reads no other value from GGUF
    if kind == "qwen3_moe":
        # transformers assumes the first two values, and llama.cpp the last
        more = {"head_dim": 128, "moe_intermediate_size": 768, "norm_topk_prob": True} | more
        # all experts are used: a rounded score cannot choose other experts
        sizes |= {"num_experts": 4, "num_experts_per_tok": 4}
    if kind.startswith("gemma"):
        # transformers does not read another attention scale from GGUF.
        sizes |= {"tie_word_embeddings": True, "query_pre_attn_scalar": 256, "head_dim": 256}
    config = transformers.AutoConfig.for_model(kind, **(sizes | more))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def write_gguf(model: Any, tokenizer: Any, path: Path, kind: str, name: str) -> list[str]:
    """Call `write_tensors` for a model in memory."""
    parameters = {each: value.data for each, value in model.named_parameters()}  # a shared weight only once
    return write_tensors(model.config, parameters, parameters.items(), tokenizer, path, kind, name)


def read_back(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).eval()


def bound(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the largest error of a value: half a unit in the last place, or half a step of its block and the scale's rounding."""
    if values.ndim < 2:
        return torch.full_like(values, 1e-6)  # adding and subtracting 1
    if kind == "bf16":
        return values.abs() * 2**-8 + 1e-30
    if kind == "f16" or values.shape[-1] % 32:
        return values.abs() * 2**-11 + 2**-25
    if kind == "f32":
        return values.abs() * 2**-23
    rows = values.reshape(-1, 32)
    largest, width = (
        rows.abs().amax(-1, keepdim=True),
        rows.amax(-1, keepdim=True) - rows.amin(-1, keepdim=True),
    )
    # A whole step for formats without a minimum: the end with the smaller magnitude has one code less.
    step = {
        "q8_0": largest / 254, "q5_1": width / 62, "q4_1": width / 30, "q5_0": largest / 16, "q4_0": largest / 8,
    }[kind]  # fmt: skip
    return (step + largest * 2**-10).expand(-1, 32).reshape(values.shape)


@few(
    "architecture, kind",
    [(each, kind) for each in ARCHITECTURES for kind in ("f16", "bf16", "q8_0")]
    + [("llama", kind) for kind in ("f32", "q5_1", "q5_0", "q4_1", "q4_0")],
    *((each, ("f16", "bf16", "q8_0")[at % 3]) for at, each in enumerate(ARCHITECTURES)),
    *(("llama", kind) for kind in ("q5_1", "q4_0")),
)
def test_every_parameter_comes_back_within_the_rounding_of_the_type(
    architecture: str, kind: str, tmp_path: Path
):
    model, tokenizer = tiny(architecture), byte_level()
    path = tmp_path / "model.gguf"
    assert write_gguf(model, tokenizer, path, kind, "tiny") == []
    again = read_back(path)
    found, expected = dict(again.named_parameters()), dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        ends = name.endswith(("embed_tokens.weight", "lm_head.weight")) and kind in GGUF_BLOCKS
        assert ((found[name] - values).abs() <= bound(values.detach(), "q8_0" if ends else kind)).all(), name
    inputs = tokenizer(TEXT[0], return_tensors="pt").input_ids
    with torch.no_grad():
        logits, before = again(inputs).logits, model(inputs).logits
    limit = {"f32": 1e-4, "f16": 0.01, "bf16": 0.06, "q8_0": 0.06}.get(kind, 0.4)
    assert (logits - before).abs().max() <= limit * before.abs().max()


def test_a_shared_head_is_written_once_and_values_in_16_bits_keep_their_digits(tmp_path: Path):
    model = tiny("llama", tie_word_embeddings=True).to(torch.bfloat16)
    path = tmp_path / "model.gguf"
    write_gguf(model, byte_level(), path, "bf16", "tiny")
    assert "output.weight" not in {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    again = read_back(path)
    assert again.config.tie_word_embeddings
    for name, values in model.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], values.float()), name


def test_rows_that_are_no_blocks_are_said(tmp_path: Path):
    model = tiny("llama", intermediate_size=100)
    (note,) = write_gguf(model, byte_level(), tmp_path / "model.gguf", "q8_0", "tiny")
    assert note.startswith(
        "2 weights are in f16: their row length is not a multiple of 32, the block size of q8_0 (blk.0.ffn_down"
    )


@pytest.mark.parametrize("split", SPLITS)
def test_byte_level_tokens_come_back(split: str, tmp_path: Path):
    model, tokenizer = tiny("llama"), byte_level(split)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    path = tmp_path / "model.gguf"
    write_gguf(model, tokenizer, path, "f16", "tiny")
    fields = gguf.GGUFReader(path).fields
    assert fields["tokenizer.ggml.pre"].contents() == split
    assert fields["tokenizer.chat_template"].contents() == tokenizer.chat_template
    assert [fields[f"tokenizer.ggml.{each}_token_id"].contents() for each in ("bos", "eos", "padding")] == [
        1,
        2,
        3,
    ]
    kinds, tokens = (fields[f"tokenizer.ggml.{each}"].contents() for each in ("token_type", "tokens"))
    assert kinds[:4] == [3, 3, 3, 3]
    assert tokens[len(tokenizer) :] == [f"[PAD{n}]" for n in range(len(tokenizer), 384)]
    assert set(kinds[len(tokenizer) :]) == {5}
    again = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    if split != "smollm":  # transformers does not have this pre-tokenizer; isotype's own reader does
        for text in TEXT[:2]:
            assert again(text).input_ids == tokenizer(text).input_ids


def test_sentencepiece_tokens_come_back(tmp_path: Path):
    tokenizer = sentencepiece()
    model = tiny("llama", vocab_size=len(tokenizer))
    path = tmp_path / "model.gguf"
    write_gguf(model, tokenizer, path, "f16", "tiny")
    fields = gguf.GGUFReader(path).fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is True
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert kinds[:3] == [2, 3, 3]
    assert set(kinds[3:259]) == {6}
    scores = fields["tokenizer.ggml.scores"].contents()
    merges = tokenizer.backend_tokenizer.model
    assert merges is not None
    assert scores[259:] == sorted(scores[259:], reverse=True) or min(scores) < 0
    again = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name, add_bos_token=False)
    for text in TEXT[:1]:
        assert again(text, add_special_tokens=False).input_ids == tokenizer(text).input_ids


def test_llama_3_positions_are_written_as_factors(tmp_path: Path):
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    path = tmp_path / "model.gguf"
    write_gguf(tiny("llama", rope_parameters=rope), byte_level(), path, "f16", "tiny")
    (factors,) = (t.data for t in gguf.GGUFReader(path).tensors if t.name == "rope_freqs.weight")
    assert factors.shape == (8,)
    assert factors[0] == 1  # the fastest frequency is not changed
    assert factors[-1] == pytest.approx(8)


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (("gpt_neox", {}), "a model of the type gpt_neox"),
        (("olmoe", {}), "a model of the type olmoe"),
        (("qwen3_moe", {"norm_topk_prob": False}), "norm_topk_prob false"),
        (
            ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
            "rotary positions of the kind dynamic",
        ),
        (("gemma2", {"query_pre_attn_scalar": 32}), "query_pre_attn_scalar 32"),
    ],
)
def test_what_nobody_has_said_how_to_write_is_refused(model: Any, given: str, tmp_path: Path):
    kind, more = model
    with pytest.raises(UsageError, match="cannot be exported to GGUF") as caught:
        write_gguf(tiny(kind, **more), byte_level(), tmp_path / "model.gguf", "f16", "tiny")
    assert caught.value.problems[0].given == given
    if "of the type" in given:
        assert caught.value.problems[0].expected == f"one of {', '.join(ARCHITECTURES)}"
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_without_a_name_is_refused(tmp_path: Path):
    model = tiny("llama")
    model.model.layers[0].extra = torch.nn.Linear(2, 2)
    with pytest.raises(
        UsageError, match=r"parameters that have no name in GGUF: model\.layers\.0\.extra\.weight"
    ):
        write_gguf(model, byte_level(), tmp_path / "model.gguf", "f16", "tiny")


def test_an_unknown_split_is_refused(tmp_path: Path):
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UsageError, match=r"splits text by Whitespace: llama\.cpp has no name for this split"):
        write_gguf(tiny("llama"), tokenizer, tmp_path / "model.gguf", "f16", "tiny")


def test_float16_that_cannot_hold_a_weight_is_refused(tmp_path: Path):
    model = tiny("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1e5
    with pytest.raises(PrecisionError, match=r"blk\.1\.ffn_up\.weight: values up to 1e\+05"):
        write_gguf(model, byte_level(), tmp_path / "model.gguf", "f16", "tiny")
    write_gguf(model, byte_level(), tmp_path / "model.gguf", "bf16", "tiny")


@pytest.mark.exhaustive
@pytest.mark.lacking("" if find_spec("llama_cpp") else "llama-cpp-python is not installed")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_llama_cpp_gives_the_same_logits(architecture: str, tmp_path: Path):
    llama_cpp = import_module("llama_cpp")
    model, tokenizer = tiny(architecture), byte_level()
    path = tmp_path / "model.gguf"
    write_gguf(model, tokenizer, path, "f16", "tiny")
    ids = tokenizer(TEXT[0]).input_ids
    runner = llama_cpp.Llama(str(path), n_ctx=128, logits_all=True, verbose=False)
    assert runner.tokenize(TEXT[0].encode(), add_bos=False, special=False) == ids
    runner.eval(ids)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    found = torch.tensor(runner.scores[: len(ids)])
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_smollm2_comes_out_as_it_went_in(tmp_path: Path):
    """Numbers, vocabulary and merges equal those of the embedded model's GGUF file, which llama.cpp's converter wrote."""
    source = embedded_file("smollm2")
    model = isotype.load(source, isotype.resolve_precision(source, torch.bfloat16, device="cpu"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_copy(read_headers(source)))
    write_gguf(model, tokenizer, tmp_path / "model.gguf", "q8_0", "smollm2")
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "model.gguf")
    numbers = [key for key in before.fields if key.startswith("llama.")]
    words = [f"tokenizer.ggml.{each}" for each in ("model", "pre", "tokens", "merges", "add_bos_token")]
    words += [
        "tokenizer.chat_template",
        *(f"tokenizer.ggml.{each}_token_id" for each in ("bos", "eos", "padding")),
    ]
    for key in (*numbers, *words):
        assert after.fields[key].contents() == before.fields[key].contents(), key
    kinds = [reader.fields["tokenizer.ggml.token_type"].contents() for reader in (before, after)]
    assert [n for n, kind in enumerate(kinds[0]) if kind == 3] == [
        n for n, kind in enumerate(kinds[1]) if kind == 3
    ]
    tensors = [{tensor.name: tensor for tensor in reader.tensors} for reader in (before, after)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, old in tensors[0].items():
        new = tensors[1][name]
        assert new.shape.tolist() == old.shape.tolist()
        values, found = (gguf.dequantize(each.data, each.tensor_type) for each in (old, new))
        # Rounded to bfloat16 in the copy, then to blocks of 8 bits.
        step = 2**-8 if new.tensor_type.name == "F32" else 2**-8 + 1 / 250
        assert abs(found - values).max() <= step * abs(values).max(), name
