"""Packed batches: rows are not joined for attention with a mask, and documents of a row do not attend to each other."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from rich.console import Console
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import isotype
from isotype.data.methods import METHODS
from isotype.lora.loss.trl_head import may_go_by_lengths
from isotype.lora.unpadded import mixes_documents, tried
from isotype.model.shard import is_sharded, outer_gathered, shard_model
from isotype.precision.devices.profile import device_profile
from isotype.train.preflight.plan import StepPlan
from isotype.train.preflight.step import MIXED, check_plan
from isotype.train.preflight.step_plan import parse_options, plan_of
from isotype.train.rows.collators import Rows, keep_rows
from isotype.train.rows.lengths import Lengths, one_a_row, packed_rows
from isotype.train.training import run as train
from tests.models import tiny_model
from tests.pairwise import few
from tests.parsed import parse_settings
from tests.train.tiny import save_chat_model, save_rows
from tests.train.traced import traced
from tests.zoo.shrink import tiny_config

PACKED = [
    {"input_ids": [11, 12, 13, 21, 22], "seq_lengths": [3, 2]},
    {"input_ids": [31, 32, 33, 34], "labels": [-100, 32, 33, 34], "seq_lengths": [4]},
]
COLLATOR = DataCollatorForLanguageModeling(pad_token_id=0)


def test_the_rows_of_a_packed_batch_stay_rows() -> None:
    batch = {name: value.tolist() for name, value in Rows(COLLATOR, packed=True)(PACKED).items()}
    assert batch == {
        "input_ids": [[11, 12, 13, 21, 22], [31, 32, 33, 34, 0]],
        "labels": [[-100, 12, 13, -100, 22], [-100, 32, 33, 34, -100]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]],
        "attention_mask": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
    }


def test_documents_that_would_see_each_other_get_a_row_each() -> None:
    batch = {name: value.tolist() for name, value in Rows(COLLATOR, packed=False)(PACKED).items()}
    assert batch == {
        "input_ids": [[11, 12, 13, 0], [21, 22, 0, 0], [31, 32, 33, 34]],
        "labels": [[11, 12, 13, -100], [21, 22, -100, -100], [-100, 32, 33, 34]],
        "attention_mask": [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]],
    }


def test_rows_that_were_not_packed_are_padded() -> None:
    """The rows of an evaluation with `--eval_packing False`."""
    batch = Rows(COLLATOR, packed=True)([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert "position_ids" not in batch


MIXING = {"bloom": "BloomForCausalLM", "mamba": "MambaForCausalLM", "gpt-oss": "GptOssForCausalLM"}


def _model(name: str) -> Any:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32}
    configs = {
        "bloom": transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
        "mamba": transformers.MambaConfig(**sizes),
        "gpt-oss": transformers.GptOssConfig(
            **sizes, **heads, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0
        ),
        "llama4": tiny_config("llama4_text", {"attention_chunk_size": 8}),
    }
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(configs[name])


@pytest.mark.parametrize("name", sorted(MIXING))
def test_models_whose_documents_would_see_each_other(name: str) -> None:
    """ALiBi counts from the beginning of a row, a state passes from document to document, gpt-oss ignores positions in its mask."""
    assert (
        mixes_documents(_model(name)) == f"in {MIXING[name]} documents in one row would attend to each other"
    )


def test_chunks_of_attention_count_from_the_beginning_of_a_row() -> None:
    reason = "the attention counts its chunks of 8 tokens from the beginning of a row"
    model = _model("llama4")
    assert mixes_documents(model) == tried(model).reason == reason


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_models_that_keep_documents_apart(name: str) -> None:
    assert mixes_documents(tiny_model(name)) == ""


@pytest.mark.usefixtures("process_group")
def test_documents_are_tried_with_the_norm_that_fsdp_has_sharded() -> None:
    """FSDP2 gathers the last norm for a forward of the whole model, and the trial runs the model without its head."""
    model = tiny_model("llama")
    shard_model(model, isotype.resolve_precision(model, dtype="float32", device="cpu"))
    with outer_gathered(model):
        assert mixes_documents(model) == ""
    assert all(map(is_sharded, model.parameters()))


def test_a_trial_of_a_model_whose_base_model_is_the_whole_model() -> None:
    config = tiny_config("mllama", {"text_config": {"cross_attention_layers": []}})
    model = transformers.MllamaForCausalLM(config.text_config)
    assert model.base_model is model
    assert mixes_documents(model) == ""


def test_what_a_trial_raises_is_a_reason() -> None:
    reason = mixes_documents(torch.nn.Linear(2, 2))
    assert reason.startswith("a trial of documents in one row failed (AttributeError: ")


def test_attention_by_lengths_keeps_one_row() -> None:
    config = SimpleNamespace(
        get_text_config=lambda: SimpleNamespace(_attn_implementation="flash_attention_2")
    )
    joined = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    trainer = SimpleNamespace(data_collator=joined, model=SimpleNamespace(config=config))
    assert keep_rows(trainer) is None
    assert trainer.data_collator is joined


@pytest.mark.parametrize("limit", [24, 100])
def test_rows_are_foreseen_as_trl_packs_them(limit: int) -> None:
    tokens = tuple((7 * i) % 31 + 1 for i in range(60))
    packed = pack_dataset(Dataset.from_dict({"input_ids": [[1] * length for length in tokens]}), limit, "bfd")
    lengths = [len(row) for row in packed["input_ids"]]
    rows = packed_rows(Lengths(tokens, 60), limit)
    assert rows is not None
    assert sorted(map(sum, rows)) == sorted(lengths)
    assert sorted(length for row in rows for length in row) == sorted(min(length, limit) for length in tokens)
    assert packed_rows(Lengths(tokens, 61), limit) is None


@pytest.mark.parametrize(
    ("tokens", "rows", "batch"),
    [
        ((6, 4, 6, 4), 2, (4, 6)),  # two rows of two
        ((10, 2, 2, 2, 2, 2), 1, (5, 2)),  # all five cost as much as the long one alone, and come first
        ((10, 2, 2, 2, 2, 2), 2, (6, 10)),  # the long one with the five
    ],
)
def test_documents_of_packed_rows_have_rows_of_their_own(
    tokens: tuple[int, ...], rows: int, batch: tuple[int, int]
) -> None:
    assert one_a_row(Lengths(tokens, len(tokens)), 10, rows) == batch
    assert one_a_row(None, 10, rows) == (rows, 10)


# By what the check decides: states, and a mask with documents; `mixes_documents` above runs all models.
@few("name", ["bloom", "mamba", "gpt-oss", "llama4", "llama", "gemma2"], "mamba", "llama4", "llama")
def test_a_check_knows_whose_documents_would_see_each_other(name: str, tmp_path: Path) -> None:
    model = tiny_model(name) if name in ("llama", "gemma2") else _model(name)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    notes = check_plan(_plan(tmp_path, 16), ("forward",)).trace.notes
    assert (MIXED in notes) == (name in (*MIXING, "llama4"))


def _plan(folder: Path, length: int, rows: int = 8) -> StepPlan:
    words = f"""sft --model_name_or_path {folder} --packing True --max_length {length} --device cpu --dtype float32
        --per_device_train_batch_size {rows} --gradient_checkpointing False"""
    return plan_of(*parse_options(words.split()))


@few("name", ["gemma2", "llama"], "gemma2")  # two kinds of masks; the other has one of them
def test_packed_rows_are_foreseen_with_a_mask_of_each(name: str, tmp_path: Path) -> None:
    """The estimate has a mask per row instead of one for all pairs of tokens, which only a step of one row has."""
    tiny_model(name).config.save_pretrained(tmp_path)
    phases = (traced(_plan(tmp_path, 64, rows)).memory.phases for rows in (1, 4))
    one, four = (phase["forward"]["activations"] for phase in phases)
    assert four == pytest.approx(4 * one, rel=0.05)


@pytest.mark.parametrize(
    ("profile", "by_lengths"),
    [
        pytest.param("h100", True, marks=pytest.mark.newest),  # torch 2.10 has no variable-length attention
        ("t4", False),
        ("cpu-amx", False),
        ("cpu-avx2", False),
    ],
)
def test_where_packed_rows_may_go_by_lengths(profile: str, by_lengths: bool) -> None:
    model = tiny_model("llama", torch.bfloat16)
    assert may_go_by_lengths(model, device_profile(profile)) == by_lengths
    assert not may_go_by_lengths(tiny_model("gemma2", torch.bfloat16), device_profile(profile))


# Whole trainings beside one document at a time


def _train(root: Path, *flags: str) -> tuple[list[float], str]:
    console = Console(record=True, width=400, file=StringIO())
    arguments = f"""--model_name_or_path {root / "model"} --dataset_name {root / "train.jsonl"} --dtype float32 --device cpu
        --output_dir {root / "out"} --max_length 24 --learning_rate 1e-2 --lora_dropout 0 --logging_steps 1 --max_steps 2
        --per_device_train_batch_size 4 --gradient_checkpointing False --save_strategy no --report_to none
        --lora_target_modules q_proj""".split()
    outcome = train(parse_settings(METHODS["sft"], [*arguments, *flags]), console)
    return [step.loss for step in outcome.record.steps], console.export_text()


def _rows(root: Path) -> None:
    texts = [" ".join(f"w{(3 * i + j) % 56}" for j in range(4 + i % 9)) for i in range(40)]
    save_rows(root / "train.jsonl", [{"text": text} for text in texts])


def _trl(root: Path) -> list[float]:
    """Return the float32 losses of TRL's trainer, which joins rows and separates documents by positions."""
    from datasets import load_dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=str(root / "trl"), packing=True, max_length=24, per_device_train_batch_size=4, learning_rate=1e-2,
        max_steps=2, logging_steps=1, report_to="none", bf16=False, use_cpu=True, gradient_checkpointing=False,
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32),
        args=config,
        train_dataset=load_dataset("json", data_files=str(root / "train.jsonl"), split="train"),
        processing_class=transformers.AutoTokenizer.from_pretrained(root / "model"),
        peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=["q_proj"]),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore")
def test_losses_are_those_of_rows_joined_into_one(tmp_path: Path, unchecked: None) -> None:
    save_chat_model(tmp_path / "model")
    _rows(tmp_path)
    losses, said = _train(tmp_path, "--packing", "True")
    assert "packing: the rows of a batch are not joined into one" in said
    assert losses == pytest.approx(_trl(tmp_path), abs=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_float16_training_hands_its_check_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured again, a float32 forward and backward would take more memory than the float16 step."""

    def again(*_: Any) -> Any:
        raise AssertionError("measured again")

    save_chat_model(tmp_path / "model")
    _rows(tmp_path)
    monkeypatch.setattr("isotype.preflight.run.measured", again)
    losses, said = _train(tmp_path, "--dtype", "float16")
    assert len(losses) == 2
    assert "the step was not checked" not in said
