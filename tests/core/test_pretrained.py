"""No code of a checkpoint runs: at one door, in every command, and no other call of `from_pretrained` exists."""

from __future__ import annotations

import ast
import io
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from isotype.cli.main import main
from isotype.compat.imports import code_refused
from isotype.core.errors import CheckpointError, UsageError
from isotype.core.pretrained import pretrained, saved_dtype
from tests.train.tiny import rows, save_chat_model, save_rows

SOURCE = Path(__file__).parents[2] / "src" / "isotype"
CODE = "import pathlib\n(pathlib.Path(__file__).parent / 'ran').touch()\nclass Evil: pass\n"
TOKENIZER = {
    "tokenizer_class": "EvilTok",
    "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
}
PROCESSOR = {"processor_class": "EvilP", "auto_map": {"AutoProcessor": "evil.Evil"}}
COMMANDS = {
    "sft": "sft --model_name_or_path {} --dataset_name sft.jsonl --output_dir out --device cpu --dtype float32",
    "plan": "plan {} --dataset_name sft.jsonl --device h100",
    "chat": "chat {} --ask w1 --max_new_tokens 1 --device cpu --dtype float32",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    save_chat_model(root / "chat")
    save_rows(root / "sft.jsonl", rows("sft"))
    return root


def edited(folder: Path, tmp_path: Path, file: str, **entries: object) -> Path:
    model = shutil.copytree(folder / "chat", tmp_path / "model")
    path = model / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **entries}))
    (model / "evil.py").write_text(CODE)
    return model


def ends(command: str, model: Path, folder: Path, monkeypatch, capsys) -> tuple[int, str]:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    status = main(shlex.split(command.format(shlex.quote(str(model)))))
    out, err = capsys.readouterr()
    assert not (model / "ran").exists()
    assert "Traceback" not in out + err
    assert "not expected" not in err
    return status, " ".join((out + err).split())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("file", "entries", "words"),
    [
        ("tokenizer_config.json", TOKENIZER, "auto_map.AutoTokenizer names ['evil.Evil', 'evil.Evil']"),
        ("processor_config.json", PROCESSOR, "auto_map.AutoProcessor names evil.Evil"),
        ("preprocessor_config.json", PROCESSOR, "auto_map.AutoProcessor names evil.Evil"),
    ],
    ids=["tokenizer", "processor", "preprocessor"],
)
def test_code_is_refused_by_file_and_key(
    command, file, entries, words, folder, tmp_path, monkeypatch, capsys
):
    model = edited(folder, tmp_path, file, **entries)
    status, said = ends(COMMANDS[command], model, folder, monkeypatch, capsys)
    assert status == 2
    assert f"{model / file}: {words}" in said
    assert "loading" not in said


@pytest.mark.parametrize(
    ("file", "entries"),
    [
        ("config.json", {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}),
        ("config.json", {"architectures": ["pipeline"]}),
        ("tokenizer_config.json", {**TOKENIZER, "tokenizer_class": "LlamaTokenizer"}),
    ],
    ids=["auto_map of a known model", "no class of models", "auto_map of a known tokenizer"],
)
def test_what_transformers_has_a_class_for_is_loaded_by_it(
    file, entries, folder, tmp_path, monkeypatch, capsys
):
    model = edited(folder, tmp_path, file, **entries)
    status, said = ends(COMMANDS["chat"], model, folder, monkeypatch, capsys)
    assert status == 0, said
    assert "evil" not in said


@pytest.mark.parametrize(
    ("file", "entries", "words"),
    [
        (
            "config.json",
            {"_attn_implementation": "kernels-community/flash-attn2"},
            "_attn_implementation is 'kernels-community/flash-attn2' expected an implementation in transformers",
        ),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "../../x", "template": "{{ 1 }}"}]},
            "chat_template has the name '../../x'",
        ),
    ],
    ids=["kernel of the hub", "path as the name of a template"],
)
def test_other_ways_out_of_a_checkpoint(file, entries, words, folder, tmp_path, monkeypatch, capsys):
    model = edited(folder, tmp_path, file, **entries)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    status, said = ends(COMMANDS["chat"], model, folder, monkeypatch, capsys)
    assert status == 2
    assert words in said


def test_a_module_that_an_adapter_names_is_not_imported(tmp_path):
    import torch
    from safetensors.torch import save_file

    from isotype.checkpoint.adapter import read_adapter

    config = {"peft_type": "LORA", "megatron_core": "evil", "megatron_config": {"a": 1}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({"base_model.model.a.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="megatron_config, with the module 'evil'"):
        read_adapter(tmp_path)


def test_asking_for_code_is_refused(folder):
    from transformers import AutoConfig

    with pytest.raises(UsageError, match="code of a checkpoint is not run"):
        pretrained(AutoConfig, folder / "chat", trust_remote_code=True)


def test_transformers_asks_nothing_where_it_does_not_wait(folder, tmp_path, monkeypatch):
    from transformers import AutoTokenizer, dynamic_module_utils

    model = edited(folder, tmp_path, "tokenizer_config.json", **TOKENIZER)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "n")
    with pytest.raises(ValueError, match="custom code"):
        AutoTokenizer.from_pretrained(model)
    assert asked, "transformers asks no longer: the patch can go"
    asked.clear()
    with code_refused(), pytest.raises(ValueError, match="custom code"):
        AutoTokenizer.from_pretrained(model)
    assert not asked
    assert dynamic_module_utils.TIME_OUT_REMOTE_CODE > 0


def test_a_config_of_an_unknown_model_is_refused(folder, tmp_path):
    from transformers import AutoConfig

    model = edited(folder, tmp_path, "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"})
    with pytest.raises(CheckpointError, match=r"auto_map\.AutoConfig names evil\.Evil"):
        pretrained(AutoConfig, model)


def test_there_is_no_other_call() -> None:
    calls = {
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        if "from_pretrained" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "from_pretrained"
    }
    assert {call.partition(":")[0] for call in calls} == {"core/pretrained.py"}


def test_torch_unpickles_tensors_alone() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if not re.search(r"torch\.load|pickle\.load|eval\(|exec\(", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load"):
                only = [word.value for word in node.keywords if word.arg == "weights_only"]
                assert [ast.unparse(value) for value in only] == ["True"], f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec", "pickle.loads"):
                pytest.fail(f"{path}:{node.lineno}")


@pytest.mark.parametrize("name", ["embedded:smollm2", "/a/removed/directory", "", "no-such/model"])
def test_the_dtype_of_a_config_without_a_file_is_its_own(name: str) -> None:
    config = LlamaConfig(name_or_path=name, dtype="bfloat16")
    assert saved_dtype(config) == torch.bfloat16


def test_the_dtype_of_a_composite_config_may_be_its_texts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"dtype": "torch.bfloat16"}}))
    assert saved_dtype(LlamaConfig(name_or_path=str(tmp_path), dtype="float32")) == torch.bfloat16
