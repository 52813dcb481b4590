"""Merges into other formats than dense safetensors: their error by other readers, their files, and the printed commands."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file

from isotype.checkpoint.load import load
from isotype.checkpoint.merge.merge import merge_adapter
from isotype.checkpoint.merge.report import MergeReport, WeightLoss
from isotype.checkpoint.resolve import resolve_precision
from isotype.cli.main import main
from isotype.core.dtypes import GGUF_BLOCKS, GGUF_TYPES, LLAMA_CPP_TYPES
from isotype.core.errors import PrecisionError, SaveError, UsageError
from isotype.model.adapters import add_lora
from isotype.report.inspect import show_merge
from tests.adapters import loaded, save_trained
from tests.checkpoint.test_gguf_export import byte_level
from tests.checkpoint.test_merge import TARGETS, Q, reference, save_base, stored
from tests.pairwise import few

DOWN = "model.layers.0.mlp.down_proj"
IN_GGUF = {Q: "blk.0.attn_q.weight", DOWN: "blk.0.ffn_down.weight"}
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_base(
        tmp_path_factory.mktemp("stored") / "base",
        vocab_size=384,
        attention_bias=False,
        max_position_embeddings=96,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    tokenizer = byte_level("smollm")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    """Save an adapter trained on the bfloat16 base, with updates of about a hundredth of the weights."""
    model, _ = loaded(base, "bfloat16", lora_alpha=8, target_modules=TARGETS)
    return save_trained(model, base.parent / "adapter", seed=1, scale=0.01)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path_factory.mktemp("cache")))


def in_file(path: Path, name: str) -> torch.Tensor:
    """Return a weight of a GGUF file by gguf's reader, with query rows in transformers' order (two halves of a head)."""
    (tensor,) = (each for each in gguf.GGUFReader(path).tensors if each.name == IN_GGUF[name])
    values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
    if name != Q:
        return values
    heads = 4
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(values.shape)


def in_bitsandbytes(directory: Path, name: str) -> torch.Tensor:
    """Return the weight that bitsandbytes computes with, after transformers has loaded the model."""
    from bitsandbytes import functional as bnb

    weight = transformers.AutoModelForCausalLM.from_pretrained(directory).get_submodule(name).weight
    if hasattr(weight, "quant_state"):
        values: torch.Tensor = bnb.dequantize_4bit(weight.data, weight.quant_state)
        return values
    return weight.data.double() * weight.SCB.double()[:, None] / 127


@few("kind", ["nf4", "int8", "q8_0", "q4_1", "bf16"], "nf4", "q8_0")
def test_the_error_is_that_of_what_was_stored(base: Path, adapter: Path, tmp_path: Path, kind: str) -> None:
    output = tmp_path / ("model.gguf" if kind in GGUF_TYPES else "merged")
    report = merge_adapter(adapter, output, stored=kind)
    read = in_file if kind in GGUF_TYPES else in_bitsandbytes
    errors = {weight.name: weight.relative_error for weight in report.weights}
    assert len(errors) == 2
    for name in (Q, DOWN):
        sum_ = reference(base, adapter, name, None, compute=torch.bfloat16)
        update = sum_ - stored(base, name, None, torch.bfloat16).double()
        error = (read(output, name).double() - sum_).norm() / update.norm()
        # The merge adds in float32, the reference in float64; int8 is dequantized to float16 or float32.
        assert errors[f"{name}.weight"] == pytest.approx(float(error), rel=2e-3)
    shown = terminal(report)
    assert report.vanished is not None
    assert 0 < report.vanished < report.entries
    assert f"have the base model's {'values' if kind == 'bf16' else 'quantized codes'}" in shown
    assert (report.median_error > 1) == (kind in ("nf4", "q4_1"))
    if report.median_error > 1:
        assert f"{report.median_error:,.1f} × a weight's update (median)" in shown


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@few("kind", ["q8_0", "f16"], "f16")
def test_embeddings_that_were_trained_alike_stay_tied(base: Path, tmp_path: Path, kind: str) -> None:
    """Rounding to 16 bits is random: the seed of the head is that of the embedding."""
    tied = save_base(tmp_path / "base", tie_word_embeddings=True, vocab_size=384, attention_bias=False)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(tied)
    model, _ = loaded(
        tied, "bfloat16", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
    )
    for head in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = head.modules_to_save.default.weight.data
        weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))
    model.save_pretrained(tmp_path / "adapter")
    report = merge_adapter(tmp_path / "adapter", tmp_path / "model.gguf", stored=kind)
    names = [tensor.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors]
    assert "output.weight" not in names
    assert [weight.name for weight in report.weights] == ["lm_head.weight", "model.embed_tokens.weight"]
    assert all(weight.relative_error < 0.01 for weight in report.weights)
    assert not report.notes


def terminal(report: MergeReport) -> str:
    console = Console(width=400)
    with console.capture() as captured:
        show_merge(console, report)
    return captured.get()


def test_a_coded_weight_has_no_count_of_what_vanished() -> None:
    weights = (WeightLoss("a", 3.0, 10, None), WeightLoss("b", 0.5, 10, 4))
    report = MergeReport(Path(), Path("m"), "b", "nf4", torch.float32, "", weights, None, 1, stored="q4_0")
    assert report.vanished is None
    assert report.vanished_share == 0
    assert report.warnings[0].startswith("stored as q4_0, the median error of a weight is 1.8 × its update")


# ------------------------------------------------------------------------------------------------------ one file


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["-o", "model of mine.gguf"], "model of mine.gguf"),
        pytest.param(["-o", "q.gguf", "--gguf", "q5_0"], "q.gguf", marks=pytest.mark.exhaustive),
        (["-o", "merged", "--gguf", "q8_0"], "merged/model-q8_0.gguf"),
    ],
)
def test_what_is_printed_runs(
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    file: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["merge", str(adapter), *arguments]) == 0
    assert (tmp_path / file).is_file()
    assert {path.name for path in tmp_path.iterdir()} == {file.partition("/")[0]}
    program, *command = shlex.split(capsys.readouterr().out.partition("\ntry it:\n")[2])
    assert program == "isotype"
    assert command == ["chat", file]
    assert main([*command, "--ask", "a careful engineer", "--max_new_tokens", "2"]) == 0


def test_another_reader_finds_the_model_of_the_safetensors(base: Path, adapter: Path, tmp_path: Path) -> None:
    """gguf's reader finds every tensor of the dense merge under llama.cpp's name, and the keys of tokenizer and positions."""
    path = tmp_path / "model.gguf"
    report = merge_adapter(adapter, path)
    merge_adapter(adapter, tmp_path / "dense")
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    assert report.stored == "bf16"  # the dtype of the training
    reader = gguf.GGUFReader(path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert {names.get_name(name, (".weight",)) for name in dense} == tensors.keys()
    for name, values in dense.items():
        tensor = tensors[str(names.get_name(name, (".weight",)))]
        expected = values.float()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = 4 if "q_proj" in name else 2
            expected = expected.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(values.shape)
        assert np.array_equal(gguf.dequantize(tensor.data, tensor.tensor_type), expected.numpy()), name
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    expected_fields = {
        "general.architecture": "llama",
        "general.file_type": gguf.LlamaFileType.MOSTLY_BF16,
        "llama.context_length": 96,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.block_count": 1,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 5000.0,
        "llama.vocab_size": 384,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.chat_template": TEMPLATE,
    }
    assert {name: fields[name] for name in expected_fields} == expected_fields
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    vocabulary = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens = fields["tokenizer.ggml.tokens"]
    assert tokens[: len(vocabulary)] == [vocabulary[number] for number in range(len(vocabulary))]
    assert len(tokens) == 384


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("more", "given"),
    [
        ({"stored": "nf4"}, "model.gguf and --quantization nf4"),
        ({"dtype": "float32"}, "model.gguf and --dtype float32"),
    ],
)
def test_a_gguf_file_of_another_format_is_refused(
    adapter: Path, tmp_path: Path, more: Any, given: str
) -> None:
    with pytest.raises(UsageError, match="a merged model cannot be stored in this format") as caught:
        merge_adapter(adapter, tmp_path / "model.gguf", **more)
    (problem,) = caught.value.problems
    assert problem.given.endswith(given)
    assert problem.expected == "a GGUF type for a GGUF file"


def test_a_file_that_is_there_is_kept(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"mine")
    (tmp_path / "folder.gguf").mkdir()
    for name, kind in (("model.gguf", "a file"), ("folder.gguf", "a directory")):
        with pytest.raises(UsageError, match="the output file already exists") as caught:
            merge_adapter(adapter, tmp_path / name)
        assert caught.value.problems[0].given.endswith(f"{name}: {kind}")
        assert caught.value.problems[0].expected == "a file that does not exist yet"
    assert (tmp_path / "model.gguf").read_bytes() == b"mine"


# ----------------------------------------------------------------------------------------------------- llama-quantize


def test_what_llama_cpp_alone_writes_is_said_with_what_to_type(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"only llama\.cpp writes q4_k_m") as caught:
        merge_adapter(adapter, tmp_path / "my model.gguf", stored="q4_k_m")
    (problem,) = caught.value.problems
    first, second = (
        shlex.split(command) for command in problem.fix.partition("that has llama-quantize: ")[2].split("&&")
    )
    dense, final = str(tmp_path / "my model-f32.gguf"), str(tmp_path / "my model.gguf")
    assert second == ["llama-quantize", dense, final, "Q4_K_M"]
    assert main(first[1:]) == 0  # the printed command runs
    assert Path(dense).is_file()


def program(directory: Path, lines: str) -> None:
    path = directory / "llama-quantize"
    path.write_text(f"#!{sys.executable}\nimport shutil, sys\n{lines}\n")
    path.chmod(0o755)


def test_llama_quantize_writes_the_file_where_it_is_installed(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    program(programs, "shutil.copy(sys.argv[1], sys.argv[2]); assert sys.argv[3:] == ['Q4_K_M']")
    report = merge_adapter(adapter, tmp_path / "model.gguf", stored="q4_k_m")
    assert report.notes[0] == "llama-quantize stores the tensors of a q4_k_m file in several types: 12 in f32"
    assert report.median_error < 1e-4  # the program has copied a float32 file
    program(programs, "print('no such type'); sys.exit(3)")
    with pytest.raises(SaveError, match="llama-quantize has failed") as caught:
        merge_adapter(adapter, tmp_path / "again.gguf", stored="q4_k_m")
    assert caught.value.problems[0].given.endswith("exit status 3; no such type")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "programs"]


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("llama-quantize") is None, reason="llama-quantize is not installed")
@pytest.mark.parametrize("kind", LLAMA_CPP_TYPES)
def test_every_mixture_is_one_that_llama_quantize_knows(adapter: Path, tmp_path: Path, kind: str) -> None:
    report = merge_adapter(adapter, tmp_path / "model.gguf", stored=kind)
    largest = {"q2_k": 200, "q3_k_s": 100}.get(kind, 50)
    assert 0.1 < report.median_error < largest


def test_every_type_of_gguf_has_a_writer() -> None:
    assert {"f32", "f16", "bf16", *GGUF_BLOCKS, *LLAMA_CPP_TYPES} == GGUF_TYPES.keys()
    for kind in GGUF_TYPES:
        assert f"{'ALL' if kind == 'f32' else 'MOSTLY'}_{kind.upper()}" in gguf.LlamaFileType.__members__


def test_float16_that_overflows_in_a_gguf_file(base: Path, tmp_path: Path) -> None:
    policy = resolve_precision(base, "bfloat16", device="cpu")
    model = add_lora(load(base, policy), policy, r=4, lora_alpha=8, target_modules=TARGETS)
    with pytest.raises(PrecisionError, match="float16 cannot represent the merged weights") as caught:
        merge_adapter(save_trained(model, tmp_path / "adapter", scale=1e3), tmp_path / "m.gguf", stored="f16")
    assert caught.value.problems[0].fix == "set --gguf bf16 or f32"
