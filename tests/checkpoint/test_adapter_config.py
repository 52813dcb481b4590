"""Invalid adapter_config.json files and tensors are refused, with the problem's name, within seconds and before weights are read."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from isotype.checkpoint.adapter import load_for_inference, read_adapter
from isotype.cli.main import main
from isotype.core import names
from isotype.core.errors import IsotypeError, Problem
from tests.adapters import save_adapter
from tests.models import save_tiny
from tests.refusals import refused


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapter")
    return save_adapter(save_tiny("llama", root / "base"), root / "adapter", "float32", None)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_SECONDS", 0.3)


def changed(adapter: Path, directory: Path, **fields: Any) -> Path:
    shutil.copytree(adapter, directory, dirs_exist_ok=True)
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return directory


def problem(directory: Path) -> str:
    text = refused(IsotypeError, read_adapter, directory)
    assert text.startswith(f"the adapter {directory} cannot be read\n  - ")
    return text.replace(f"{directory}/", "").partition("  - ")[2]


WRONG = {
    "lora_alpha": ("x", "lora_alpha is 'x'\n    expected  a number or null"),
    "r": (10**9, "r is 1000000000\n    expected  a number from 1 to 65536"),
    "r ": (60_000, "r is 60000\n    expected  at most 96, the longest side of a tensor in adapter_model.safetensors"),
    "r  ": (True, "r is True\n    expected  a whole number"),
    "lora_dropout": (1.5, "lora_dropout is 1.5\n    expected  a number from 0 to 1"),
    "lora_dropout ": (None, "lora_dropout is None\n    expected  a number"),
    "rank_pattern": ({"q_proj": "8"}, "rank_pattern is {'q_proj': '8'}\n    expected  an object of a whole number or null"),
    "rank_pattern ": ({"(": 8}, "rank_pattern '(': missing ), unterminated subpattern at position 0"),
    "alpha_pattern": ({"(.*)*x": 8}, "alpha_pattern '(.*)*x'\n    expected  an expression that matches names"),
    "target_modules": ("(", "target_modules '(': missing ), unterminated subpattern at position 0"),
    "target_modules ": ("(.*)*x", "target_modules '(.*)*x'\n    expected  an expression that matches names"),
    "target_modules  ": ([1, "q_proj"], "target_modules is [1, 'q_proj']\n    expected  a list of text or text or null"),
    "alpha_pattern ": ({"(?i)x": 8}, "alpha_pattern '(?i)x': global flags not at the start of the expression"),
    "exclude_modules": ("[", "exclude_modules '[': unterminated character set"),
    "layers_pattern": (["(.*)*x"], "layers_pattern '(.*)*x'"),
    "modules_to_save": ({"a": 1}, "modules_to_save is {'a': 1}\n    expected  a list of text or null"),
    "bias": ("some", "bias is 'some'\n    expected  one of none, all, lora_only"),
    "task_type": ("FOO", "task_type is 'FOO'\n    expected  one of SEQ_CLS, "),
    "layer_replication": ([[0, 10**9]], "layer_replication is [[0, 1000000000]]\n    expected  numbers from 0 to 2000"),
    "use_dora": ("yes", "use_dora is 'yes'\n    expected  true or false"),
    "base_model_name_or_path": (["a"], "base_model_name_or_path is ['a']\n    expected  text or null"),
    "base_model_name_or_path ": ("a\x1b[2Jb", "base_model_name_or_path is 'a\\x1b[2Jb'\n    expected  the name of a model"),
    "base_model_name_or_path  ": ("x" * 300, "base_model_name_or_path is 'xxx"),
    "revision": ({"a": [[[]]]}, "revision is {'a': [[[]]]}\n    expected  text or null"),
    "init_lora_weights": ([], "init_lora_weights is []\n    expected  text or true or false or null"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_value_is_named(adapter: Path, tmp_path: Path, name: str) -> None:
    value, expected = WRONG[name]
    begun = time.monotonic()
    text = problem(changed(adapter, tmp_path / "a", **{name.strip(): value}))
    assert text.startswith(f"adapter_config.json: {expected}")
    assert time.monotonic() - begun < 60


def test_all_wrong_values_are_named_at_once(adapter: Path, tmp_path: Path) -> None:
    text = problem(changed(adapter, tmp_path / "a", lora_alpha="x", r=0, use_rslora=1))
    assert text.count("adapter_config.json: ") == 3


@pytest.mark.parametrize("kind", [None, "FOO", 5, ["LORA"], {"a": 1}])
def test_an_unknown_kind(adapter: Path, tmp_path: Path, kind: Any) -> None:
    text = refused(IsotypeError, read_adapter, changed(adapter, tmp_path / "a", peft_type=kind))
    assert text.startswith("unknown kind of adapter\n")
    assert f"peft_type {kind!r}" in text


@pytest.mark.parametrize("text", ["[]", "null", "5", "{", '"a"', "[" * 100_000])
def test_what_is_no_object(adapter: Path, tmp_path: Path, text: str) -> None:
    shutil.copytree(adapter, tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text(text)
    assert "adapter_config.json is not" in refused(IsotypeError, read_adapter, tmp_path / "a")


def rewritten(adapter: Path, directory: Path, change: Any) -> Path:
    shutil.copytree(adapter, directory)
    file = directory / "adapter_model.safetensors"
    tensors = {name: change(name, value) for name, value in load_file(file).items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, file)
    return directory


def test_integers_are_no_adapter(adapter: Path, tmp_path: Path) -> None:
    integers = rewritten(adapter, tmp_path / "a", lambda _, value: (value * 100).int())
    text = problem(integers)
    assert text.startswith("adapter_model.safetensors: model.layers.0.mlp.down_proj.lora_A.weight in I32\n")
    assert main(["merge", str(integers), "-o", str(tmp_path / "merged")]) == 2
    assert not (tmp_path / "merged").exists()


def test_an_adapter_that_changes_nothing_is_an_error(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = rewritten(adapter, tmp_path / "a", lambda name, value: value * 0 if "lora_B" in name else value)
    assert main(["merge", str(zero), "-o", str(tmp_path / "merged")]) == 2
    assert "nothing was merged" in capsys.readouterr().err


def test_matrices_of_two_ranks(adapter: Path, tmp_path: Path) -> None:
    directory = rewritten(
        adapter, tmp_path / "a", lambda name, value: value[:3].clone() if "q_proj.lora_A" in name else value
    )
    assert problem(directory).startswith(
        "adapter_model.safetensors: model.layers.0.self_attn.q_proj.lora_A.weight has the shape [3, 64], "
        "and its B has [64, 4]\n"
        "    expected  a B with one column for each row of A: 3\n"
    )


def test_no_tensor_and_a_base_that_is_not_there(adapter: Path, tmp_path: Path) -> None:
    assert "contains no tensor" in problem(rewritten(adapter, tmp_path / "a", lambda *_: None))
    gone = changed(adapter, tmp_path / "b", base_model_name_or_path=str(tmp_path / "nosuch"))
    text = refused(IsotypeError, load_for_inference, gone, device="cpu")
    assert text.startswith("the adapter's base model cannot be opened\n")


def test_a_class_that_is_no_model_is_not_called(adapter: Path, tmp_path: Path) -> None:
    directory = changed(
        adapter, tmp_path / "a", task_type=None, auto_mapping={"base_model_class": "pipeline"}
    )
    model, _, _ = load_for_inference(directory, device="cpu")
    assert type(model.get_base_model()).__name__ == "LlamaForCausalLM"


KINDS = (
    peft.LoraConfig,
    peft.LoHaConfig,
    peft.LoKrConfig,
    peft.IA3Config,
    peft.VeraConfig,
    peft.AdaLoraConfig,
)


@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_writes_is_read(adapter: Path, tmp_path: Path, kind: Any) -> None:
    fields = {"total_step": 10} if kind is peft.AdaLoraConfig else {}
    shutil.copytree(adapter, tmp_path / "a")
    kind(target_modules=["q_proj"], base_model_name_or_path="x", **fields).save_pretrained(tmp_path / "a")
    assert isinstance(read_adapter(tmp_path / "a").config, kind)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
field_names = st.sampled_from(
    [each for each in peft.LoraConfig.__dataclass_fields__ if each != "runtime_config"]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(field_names | st.text(max_size=10), values, min_size=1, max_size=4))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_fields_are_read_or_refused(adapter: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    directory = changed(adapter, tmp_path / "a", **fields)
    problems: tuple[Problem, ...] = ()
    try:
        read_adapter(directory)
    except IsotypeError as error:
        problems = error.problems or (Problem("", "", ""),)
    assert all(each.given and each.expected and each.fix for each in problems)
    shutil.copy(adapter / "adapter_config.json", directory)


def test_a_model_of_a_command_is_refused_by_every_door(adapter: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    directory = changed(adapter, tmp_path / "a", lora_alpha="x")
    for command in (
        ["merge", str(directory), "-o", str(tmp_path / "m")],
        ["chat", str(directory)],
        ["sft", "--model_name_or_path", str(directory), "--dataset_name", "embedded:precision_qa"],
    ):
        assert main(command) == 2
