"""Files of axolotl and LLaMA-Factory: which names isotype translates, notes as unused, and refuses."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from isotype.train.command.command import specs
from isotype.train.dialects import axolotl, llama_factory
from isotype.train.dialects.reader import OFF, Reader, tables
from isotype.train.dialects.translate import dialect_of, translated

HERE = Path(__file__).parent
EXAMPLES: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
    (HERE / "examples.yaml").read_text(encoding="utf-8")
)
DATASET_INFO = {  # of LLaMA-Factory's data/dataset_info.json
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
    "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
    "dpo_en_demo": {
        "file_name": "dpo_en_demo.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "kto_en_demo": {
        "file_name": "kto_en_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    },
    "mllm_demo": {
        "file_name": "mllm_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    },
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with LLaMA-Factory's description of its data."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(DATASET_INFO))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@cache
def names_of(method: str) -> frozenset[str]:
    """Return the names of a training command's arguments."""
    return frozenset(specs(method))


def method_of(values: Mapping[str, Any]) -> str:
    """Return the training method of a file; `sft` if isotype lacks the method."""
    dialect = dialect_of(values)
    assert dialect is not None
    room = axolotl if dialect == "axolotl" else llama_factory
    return room.method_of(Reader.of(dialect, values, "sft", Path())) or "sft"


def read(values: Mapping[str, Any], method: str | None = None) -> Reader:
    """Translate a file's content for the training method of the file."""
    dialect = dialect_of(values)
    assert dialect is not None
    return translated(dialect, values, method or method_of(values), Path())


def told(translation: Reader) -> set[str]:
    """Return the names in the notes and the problems."""
    refused = {
        name.strip() for each in translation.problems for name in each.given.partition(":")[0].split(",")
    }
    return refused | {name for names in translation.notes.values() for name in names}


def given_names(values: Mapping[str, Any]) -> set[str]:
    """Return every name of a file, also those in groups and in axolotl's data sets."""
    dialect = dialect_of(values)
    assert dialect is not None
    names = set(Reader.of(dialect, values, "sft", Path()).given)
    if dialect == "axolotl":
        for key in ("datasets", "pretraining_dataset"):
            entries = values.get(key) or []
            for at, entry in enumerate(entries if isinstance(entries, list) else [entries]):
                content = entry if isinstance(entry, dict) else {"path": entry}
                inner = Reader.of("axolotl_rows", content, "sft", Path()).given
                names |= {f"{key}[{at}].{name}" for name in inner}
    return names


def outcome(source: str, values: Mapping[str, Any]) -> str:
    """Return the result of a translation in a few lines."""
    method, translation = method_of(values), read(values)
    lines = [source, f"  isotype {method}: " + ("refused" if translation.problems else "read")]
    lines += [f"  used: {' '.join(sorted(translation.used))}"] if translation.used else []
    lines += [f"  {effect}: {' '.join(names)}" for effect, names in sorted(translation.notes.items())]
    lines += [f"  refused: {each.given} | {each.expected} | {each.fix}" for each in translation.problems]
    return "\n".join(lines)


def test_the_public_examples_are_read_or_refused_as_written_down() -> None:
    """`python -m tests.train.dialects.test_translate` writes the expected table, outcome.txt."""
    written = (HERE / "outcome.txt").read_text(encoding="utf-8")
    assert written == "\n\n".join(outcome(*each) for each in EXAMPLES.items()) + "\n"


@pytest.mark.parametrize(
    ("frozen", "adapted"),
    [
        ({}, "language"),
        ({"freeze_vision_tower": False}, "language,vision"),
        ({"freeze_language_model": True, "freeze_multi_modal_projector": False}, "projector"),
    ],
)
def test_frozen_parts_of_a_model_with_images_are_not_trained(frozen: Mapping[str, Any], adapted: str) -> None:
    """hiyouga/LLaMA-Factory #9331; #6791 names the parts to freeze, but no size of images."""
    images = {"image_max_pixels": 262144, "model_name_or_path": "m", "stage": "sft", **frozen}
    assert read({**images, "finetuning_type": "lora", "lora_target": "all"}).values["adapt"] == adapted
    assert read({**images, "finetuning_type": "full"}).values["adapt"] == adapted
    named = {"model_name_or_path": "m", "finetuning_type": "full", "freeze_vision_tower": True}
    assert read({**named, "stage": "sft"}).values["adapt"] == "language"
    (problem,) = read({**named, "stage": "sft", "freeze_language_model": True}).problems
    assert problem.expected == "a part to train"


AXOLOTL: Mapping[str, Any] = {"base_model": "m"}
LORA: Mapping[str, Any] = {**AXOLOTL, "adapter": "lora", "lora_target_linear": True}
FACTORY: Mapping[str, Any] = {"model_name_or_path": "m", "stage": "sft"}
FULL: Mapping[str, Any] = {**FACTORY, "finetuning_type": "full"}
UNSCALED = "Attempting to unscale FP16 gradients"


@pytest.mark.parametrize(
    ("settings", "dtypes", "text"),
    [
        *(({**AXOLOTL, **bf16}, "bfloat16 bfloat16", "") for bf16 in ({}, {"bf16": "auto"}, {"bf16": True})),
        *(({**AXOLOTL, "bf16": bf16}, "bfloat16 bfloat16", "") for bf16 in ("true", "True", "full")),
        ({**AXOLOTL, "bfloat16": True}, "bfloat16 bfloat16", ""),
        ({**AXOLOTL, "bf16": True, "deepspeed": "zero2.json"}, "bfloat16", ""),
        ({**AXOLOTL, "bf16": True, "fsdp": ["full_shard"]}, "bfloat16", ""),
        ({**AXOLOTL, "bf16": True, "fsdp_config": {"fsdp_version": 2}}, "bfloat16", ""),
        ({**AXOLOTL, "bf16": "full", "fsdp_version": 2, "fsdp": True}, "bfloat16 bfloat16", ""),
        ({**AXOLOTL, "bf16": False}, "float32", ""),
        *(({**AXOLOTL, "fp16": True, **bf16}, "float16", UNSCALED) for bf16 in ({}, {"bf16": "auto"})),
        ({**AXOLOTL, "fp16": True, "deepspeed": "zero2.json"}, "float16", ""),
        ({**AXOLOTL, "float16": True, "bf16": False}, "float16", "without loss scaling"),
        ({**LORA, "bf16": "full"}, "bfloat16", ""),
        *(({**LORA, "fp16": True, **bf16}, "float16", "") for bf16 in ({}, {"bf16": "auto"})),
        ({**LORA, "fp16": "true", "bf16": "false"}, "float16", ""),
        ({**LORA, "fp16": True, "lora_modules_to_save": ["lm_head"]}, "float16", UNSCALED),
        *(
            ({**LORA, **bf16, "lora_modules_to_save": ["lm_head"]}, "bfloat16", "(axolotl: in bfloat16")
            for bf16 in ({"bf16": True}, {"bf16": "full"}, {"bfloat16": True})
        ),
        (
            {**LORA, "bf16": True, "deepspeed": "zero2.json", "lora_modules_to_save": ["lm_head"]},
            "bfloat16",
            "",
        ),
        ({**LORA, "bf16": "auto"}, "auto", "axolotl: bfloat16 if the GPU has it"),
        ({**FACTORY, "pure_bf16": True}, "bfloat16", ""),
        ({**FACTORY, "bf16": "true"}, "bfloat16", ""),
        ({**FACTORY}, "auto", ""),
        ({**FULL, "pure_bf16": True}, "bfloat16 bfloat16", ""),
        ({**FULL, "bf16": True}, "bfloat16", ""),
        ({**FULL}, "float32", ""),
    ],
)
def test_dtypes_of_compute_and_masters(settings: Mapping[str, Any], dtypes: str, text: str) -> None:
    """axolotl-ai-cloud/axolotl #1031 and #3189: axolotl trains float16 weights. LLaMA-Factory's adapters are float32."""
    reader = read(settings)
    names = {"bf16", "fp16", "float16", "pure_bf16", "lora_modules_to_save"}
    notes = [note for note, others in reader.notes.items() if names & {*others} and note != OFF]
    assert [text in note for note in notes] == [True] * bool(text)
    ours = (reader.values.get(name) for name in ("dtype", "master_dtype"))
    assert " ".join(dtype for dtype in ours if dtype) == dtypes


@pytest.mark.parametrize("method", [FACTORY, FULL])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", ["pure_bf16", "bf16"])
@pytest.mark.parametrize("form", ["dict", "text", "file"])
def test_llama_factory_refuses_pure_bf16_with_zero_3(
    method: Mapping[str, Any], stage: int, dtype: str, form: str, tmp_path: Path
) -> None:
    config = {
        "zero_optimization": {"stage": stage, "stage3_max_live_parameters": 3},
        "bf16": {"enabled": "auto"},
        "comment": 300 * "-",  # longer than the name of a file may be
    }
    (tmp_path / "zero.json").write_text(json.dumps(config, indent=stage), encoding="utf-8")
    forms = {"dict": config, "text": json.dumps(config), "file": str(tmp_path / "zero.json")}
    settings = {**method, dtype: True, "deepspeed": forms[form]}
    problems = [problem.given for problem in read(settings).problems]
    refused = ["pure_bf16: true, with ZeRO-3 in the DeepSpeed config"]
    assert problems == (refused if (dtype, stage) == ("pure_bf16", 3) else [])


@pytest.mark.parametrize(
    ("settings", "quantization", "refused"),
    [
        ({"adapter": "qlora", "load_in_4bit": True}, "nf4", []),
        ({"adapter": "qlora", "load_in_4bit": "true", "load_in_8bit": "false"}, "nf4", []),
        ({"adapter": "qlora", "load_in_4bit": False}, None, ["adapter: qlora"]),
        ({"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": True}, "nf4", ["load_in_8bit: true"]),
        ({"adapter": "qlora", "load_in_8bit": True}, None, ["load_in_8bit: true", "adapter: qlora"]),
        ({"adapter": "lora", "load_in_8bit": True, "load_in_4bit": True}, "int8", []),
        ({"adapter": "lora", "load_in_4bit": True}, "nf4", []),
    ],
)
def test_axolotl_quantizes_to_the_bits_of_the_adapter(
    settings: Mapping[str, Any], quantization: str | None, refused: list[str]
) -> None:
    reader = read({**LORA, **settings})
    assert reader.values.get("quantization") == quantization or refused
    assert [problem.given for problem in reader.problems] == refused
    unquantized = any("the base model is not quantized" in note for note in reader.notes)
    assert unquantized == (settings == {"adapter": "lora", "load_in_4bit": True})


def test_a_setting_of_llama_factory_that_is_off_is_not_passed_on() -> None:
    assert (
        "disable_gradient_checkpointing"
        not in read({**FACTORY, "disable_gradient_checkpointing": False}).values
    )


@pytest.mark.parametrize(
    ("settings", "name", "meant"),
    [
        (AXOLOTL, "bf_16", "bf16"),
        (AXOLOTL, "learing_rate", "learning_rate"),
        (AXOLOTL, "load_in_4_bit", "load_in_4bit"),
        (FACTORY, "finetunning_type", "finetuning_type"),
        (FACTORY, "pure_bf_16", "pure_bf16"),
        (FACTORY, "quantisation_bit", "quantization_bit"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_similar_name(
    settings: Mapping[str, Any], name: str, meant: str
) -> None:
    (problem,) = read({**settings, name: 4}).problems
    assert problem.given == f"{name}: 4"
    assert problem.fix == f"did you mean {meant}? Else remove it"


def test_llama_factory_has_one_dtype_of_autocast() -> None:
    (problem,) = read({**FACTORY, "bf16": True, "fp16": True}).problems
    assert (problem.given, problem.expected) == ("fp16: true", "one of fp16 and bf16")


def test_there_are_enough_examples_of_every_kind() -> None:
    for trainer in ("axolotl", "LLaMA-Factory"):
        own = {source: values for source, values in EXAMPLES.items() if source.startswith(trainer)}
        assert len(own) >= 20
        assert any(read(values).problems for values in own.values())
        assert sum(not read(values).problems for values in own.values()) >= 8
    assert {method_of(values) for values in EXAMPLES.values()} == {"sft", "dpo", "kto", "reward", "grpo"}


@pytest.mark.parametrize("source", EXAMPLES)
def test_no_name_of_an_example_is_lost(source: str) -> None:
    _nothing_is_lost(EXAMPLES[source])


@pytest.mark.parametrize("source", EXAMPLES)
def test_what_an_example_means_has_arguments_that_the_command_takes(source: str) -> None:
    _arguments_are_known(EXAMPLES[source])


@pytest.mark.parametrize("dialect", ["axolotl", "llama_factory"])
def test_no_name_of_a_random_file_is_lost(dialect: str) -> None:
    draw = random.Random(0)
    for _ in range(100):
        values = _random_file(draw, dialect)
        _nothing_is_lost(values)
        _arguments_are_known(values)


def _random_file(draw: random.Random, dialect: str) -> dict[str, Any]:
    """Return some names of a trainer's files with values of every type."""
    table = tables()[dialect]
    names = [word.partition("=")[0] for word in table["used"].split()]
    names += [name for rule in table["rules"] for name in rule.get("if", {})]
    for kind in ("idle", "differs", "refused"):
        names += [name.replace("*", "x") for each in table[kind].values() for name in each.split()]
    names = sorted({name for name in names if not name.startswith("=") and "*" not in name})
    kinds: Sequence[Any] = (True, False, None, 0, 1, 4, 0.5, "2e-5", "text", ["a"], {}, "", {"a": 1})
    values: dict[str, Any] = {}
    for name in draw.sample(names, draw.randrange(1, 30)):
        group, _, inner = name.partition(".")
        value = draw.choice(kinds)
        if inner:
            values.setdefault(group, {})
            if isinstance(values[group], dict):
                values[group][inner] = value
        else:
            values[name] = value
    if dialect == "axolotl":
        row = {
            "path": draw.choice(["a.json", 4, None]),
            "type": draw.choice(["alpaca", "chat_template", {}, 4, None, "x.y"]),
        }
        row[draw.choice(["split", "roles", "message_property_mappings", "field", "shards"])] = draw.choice(
            kinds
        )
        rows = draw.choice([None, [row], [row, row], row, "a.json", [4]])
        return {
            **values,
            "base_model": "m",
            "rl": draw.choice([None, "dpo", "kto", "grpo", "orpo"]),
            "datasets": rows,
        }
    names = draw.choice([None, "identity", "identity, mllm_demo", ["dpo_en_demo"], "missing", 4, "c4_demo"])
    return {**values, "stage": draw.choice(["sft", "dpo", "kto", "rm", "pt", "ppo"]), "dataset": names}


def _nothing_is_lost(values: Mapping[str, Any]) -> None:
    translation = read(values)
    names = {name for name in given_names(values) if name.split("[")[0] not in told(translation)}
    assert names - set(translation.used) - told(translation) == set()
    idle = {
        name
        for effect, names in translation.notes.items()
        if not effect.startswith("not done")
        for name in names
    }
    assert idle & set(translation.used) == set()
    for name, ours in translation.used.items():
        assert set(ours) <= set(translation.values) | {"env"}, name


def _arguments_are_known(values: Mapping[str, Any]) -> None:
    method, translation = method_of(values), read(values)
    passed = {} if dialect_of(values) == "axolotl" else values
    assert set(translation.values) - names_of(method) - {"env"} <= set(passed)


if __name__ == "__main__":
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "data").mkdir()
        (Path(place) / "data" / "dataset_info.json").write_text(json.dumps(DATASET_INFO))
        os.chdir(place)
        (HERE / "outcome.txt").write_text("\n\n".join(outcome(*each) for each in EXAMPLES.items()) + "\n")
