"""What isotype reads of a GGUF file without its vocabulary or weights: config, names, and completeness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isotype.checkpoint.formats.config import gguf_config
from isotype.checkpoint.formats.headers import read_headers
from isotype.checkpoint.inspect import load_plan
from isotype.checkpoint.load import load
from isotype.checkpoint.mapping.weight_map import gguf_names
from isotype.checkpoint.resolve import resolve_precision
from isotype.checkpoint.weightless import skeleton
from isotype.cli.main import main
from isotype.core.errors import CheckpointError
from isotype.precision.policy import PrecisionPolicy
from tests.checkpoint.test_gguf import write_gguf
from tests.models import quiet
from tests.zoo import ARCHITECTURES

ARCHITECTURE_NAMES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "gpt2": "gpt2",
    "gemma3_text": "gemma3",
    "mamba": "mamba",
    "bloom": "bloom",
    "falcon": "falcon",
    "minimax_m2": "minimax-m2",
    "t5-s2s": "t5",
}


@pytest.mark.parametrize(
    ("name", "architecture"),
    [  # gguf 0.17 does not have MiniMax-M2
        pytest.param(*pair, marks=[pytest.mark.newest] if pair[0] == "minimax_m2" else [])
        for pair in ARCHITECTURE_NAMES.items()
    ],
)
def test_names_are_those_of_transformers(name, architecture):
    from transformers import modeling_gguf_pytorch_utils as gguf

    with quiet():
        model = ARCHITECTURES[name].build(torch.bfloat16)
    processor = gguf.TENSOR_PROCESSORS.get(architecture, gguf.TensorProcessor)(config=model.config.to_dict())
    assert gguf_names(model, architecture) == gguf.get_gguf_hf_weights_map(model, processor)


@pytest.mark.parametrize("sized", [True, False])
def test_the_config_does_not_need_the_vocabulary(tmp_path, monkeypatch, sized):
    import gguf
    from transformers import AutoConfig

    if not sized:  # transformers counts the vocabulary if the key is missing
        monkeypatch.setattr(gguf.GGUFWriter, "add_vocab_size", lambda *_: None)
    path = write_gguf(tmp_path / "tiny.gguf")
    full = AutoConfig.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    arrays = []
    read = gguf.GGUFReader._get_field_parts
    monkeypatch.setattr(
        gguf.GGUFReader,
        "_get_field_parts",
        lambda self, at, kind: arrays.append(kind) or read(self, at, kind),
    )
    assert gguf_config(read_headers(path)).to_dict() == full.to_dict()
    assert arrays
    assert gguf.GGUFValueType.ARRAY not in arrays


def test_a_plan_of_a_gguf_file(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    policy = PrecisionPolicy(torch.bfloat16, "bfloat16")
    plan = load_plan(skeleton(gguf_config(read_headers(path)), policy), read_headers(path), policy)
    plan.match.require_complete()
    how = {tensor.name: (tensor.stored, tensor.storage, tensor.how) for tensor in plan.tensors}
    assert how["model.layers.0.self_attn.q_proj.weight"] == ("Q8_0", "bfloat16", "renamed, dequantized")
    assert how["model.norm.weight"] == ("float32", "bfloat16", "renamed, cast")
    assert plan.match.surplus == ()


@pytest.fixture
def incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import gguf

    add = gguf.GGUFWriter.add_tensor

    def all_but_one(self: Any, name: str, *rest: Any, **kwargs: Any) -> None:
        add(self, name.replace("blk.1.ffn_gate.", "blk.1.ffn_gaet."), *rest, **kwargs)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", all_but_one)
    return write_gguf(tmp_path / "tiny.gguf")


def test_a_renamed_tensor_of_a_gguf_file_is_refused(incomplete, capsys):
    problem = "model.layers.1.mlp.gate_proj.weight is in no file"
    policy = resolve_precision(incomplete, device="cpu")
    with pytest.raises(CheckpointError, match=problem):
        load(incomplete, policy)
    assert main(["check", str(incomplete)]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert "tiny.gguf has blk.1.ffn_gaet.weight of this shape" in said
