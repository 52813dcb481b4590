"""`isotype inspect --plan`: the plan of a load as a table and as JSON."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from isotype.checkpoint.facts import facts_of
from isotype.checkpoint.inspect import inspect_plan
from isotype.checkpoint.load import load
from isotype.checkpoint.resolve import resolve_precision
from isotype.cli.main import main
from isotype.report.inspect import plan_lines
from tests.checkpoint.test_load import mxfp4_checkpoint
from tests.checkpoint.test_load_plan import changed, rename
from tests.models import quiet


def parameter_bytes(model: torch.nn.Module) -> int:
    nbytes = facts_of(model).parameter_bytes
    assert nbytes is not None
    return nbytes


@pytest.mark.parametrize("quantization", [None, "nf4", "int8"])
def test_bytes_are_those_of_the_files_and_of_the_loaded_model(saved, quantization):
    path = saved("qwen3-moe", torch.bfloat16)
    inspection = inspect_plan(path, dtype="bfloat16", quantization=quantization, device="cpu")
    with quiet():
        model = load(path, resolve_precision(path, "bfloat16", quantization, "cpu"))
    assert inspection.loaded_bytes == parameter_bytes(model)
    header = int.from_bytes((path / "model.safetensors").read_bytes()[:8], "little")
    assert inspection.file_bytes == (path / "model.safetensors").stat().st_size - 8 - header
    assert sum(group.bytes for group in inspection.groups) == inspection.file_bytes


def test_the_command_prints_groups_and_reasons(tmp_path, capsys):
    path, _ = mxfp4_checkpoint(tmp_path)
    assert main(["inspect", str(path), "--plan", "--dtype", "bf16", "--device", "h100"]) == 0
    title, *table = capsys.readouterr().out.splitlines()
    assert title.removeprefix(str(path)).split() == ["(GptOssForCausalLM)"]
    lines = [line.split() for line in table]
    assert lines[0] == [
        "tensors",
        "count",
        "stored",
        "loaded",
        "conversion",
        "bytes",
    ]  # the names leave no room for shapes
    rows = {" ".join(line[1:6]): line[0] for line in lines if "bfloat16" in line and len(line) > 6}
    assert rows["2 bfloat16 float32 (pinned) cast"].startswith("model.layers.*.")
    assert any(line[1:6] == ["2", "mxfp4", "bfloat16", "dequantized", "(of"] for line in lines)
    said = {line[0]: " ".join(line[1:]) for line in lines if line}
    assert said["compute"] == "as requested"
    assert said["storage"] == (
        "mxfp4 weights are dequantized once at load, because the format has no backward; --quantization mxfp4 keeps experts as they are stored"
    )
    assert said["pinned"].startswith("the model's author keeps float32 for input_layernorm, norm")


def test_names_of_a_gguf_file_are_said_to_be_others_once(capsys):
    assert main(["inspect", "embedded:smollm2", "--plan", "--dtype", "float32", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.count("renamed") == 1
    assert "renamed: the files use other names for all tensors" in out


def test_json_has_every_tensor_with_its_place(saved, capsys):
    path = saved("qwen3-moe", torch.bfloat16)
    assert main(["inspect", str(path), "--plan", "--quantization", "nf4", "--device", "cpu", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    tensors = {tensor["name"]: tensor for tensor in plan["tensors"]}
    query = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert (query["stored"], query["storage"], query["conversion"]) == ("bfloat16", "nf4", ["quantized"])
    assert len(tensors["model.layers.1.mlp.experts.gate_up_proj"]["sources"]) == 8
    (source,) = query["sources"]
    assert source["file"] == str(path / "model.safetensors")
    data = (path / "model.safetensors").read_bytes()[source["begin"] : source["begin"] + source["bytes"]]
    stored = load_file(path / "model.safetensors")[source["name"]]
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(64, 64), stored)
    assert plan["policy"]["storage"] == "nf4"


def test_what_is_not_read_from_a_file_is_said(saved):
    inspection = inspect_plan(saved("llama-tied-bias"), device="cpu")
    assert plan_lines(inspection)[0] == "tied: lm_head.weight is model.embed_tokens.weight"
    assert plan_lines(inspection)[1].startswith("computed: model.rotary_emb.inv_freq")


def test_surplus_tensors_are_an_error(tmp_path, capsys):
    path = changed(
        "llama",
        tmp_path,
        lambda weights: weights.update({"extra.0.w": torch.ones(3), "extra.1.w": torch.ones(3)}),
    )
    for flags in (["--plan"], []):
        assert main(["inspect", str(path), *flags]) == 2
        text = capsys.readouterr().err
        assert f"{path} holds tensors that LlamaForCausalLM does not have" in text
        assert (
            "- extra.*.w (2 tensors) of shape [3] in model.safetensors, which LlamaForCausalLM does not use"
            in text
        )


def test_an_incomplete_checkpoint_has_no_plan(tmp_path, capsys):
    path = changed("llama", tmp_path, rename("model.norm.weight", "model.nrom.weight"))
    for flags in (["--plan"], []):
        assert main(["inspect", str(path), *flags]) == 2
        assert "model.safetensors has model.nrom.weight of this shape" in capsys.readouterr().err


def test_arguments_of_a_plan_need_a_plan(saved, capsys):
    assert main(["inspect", str(saved("llama")), "--dtype", "bf16"]) == 2
    assert (
        "--dtype\n    expected  --plan, because only --plan uses these arguments" in capsys.readouterr().err
    )
