"""What a command says to bad input: one message with all problems and what was meant; never a traceback."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isotype.cli.main import main
from tests.train.tiny import rows, save_chat_model, save_rows

BUILD = """
import torch


def raises():
    settings = {}
    return settings["model"]


def needs(size):
    return size


def extra():
    return {"model": torch.nn.Linear(2, 2), "inputs": {"input": torch.ones(2, 2)}, "devise": "t4"}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("user")
    save_chat_model(root / "chat", layers=2)
    save_rows(root / "sft.jsonl", rows("sft"))
    (root / "bad_build.py").write_text(BUILD)
    (root / "bad_syntax.py").write_text("def f(:\n")
    (root / "bad_import.py").write_text("import no_such_package_of_anybody\n")
    (root / "bad.yaml").write_text("learning_rate: 1e-4\nmax_steps: [1\n")
    (root / "type.yaml").write_text("max_steps: three\n")
    (root / "axolotl.yml").write_text("base_model: chat\nadapter: lora\nlora_target_linear: true\n")
    (root / "factory.yaml").write_text("model_name_or_path: chat\nstage: sft\nfinetuning_type: lora\n")
    (root / "pickled").mkdir()
    (root / "pickled" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    torch.save({"a": torch.ones(2)}, root / "pickled" / "adapter_model.bin")
    return root


def said(capsys, folder: Path, monkeypatch, command: str) -> str:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "1000")
    status = main(shlex.split(command))
    out, err = capsys.readouterr()
    assert status == 2
    assert "Traceback" not in out + err
    assert "not expected" not in err
    return " ".join(err.split())


SFT = "--model_name_or_path chat --dataset_name sft.jsonl --output_dir out --device cpu"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--max_steps -5",
            ["--max_steps -5 expected at least 1 step", "--max_steps 5, or omit --max_steps"],
        ),
        ("--lora_dropout 1", ["--lora_dropout 1.0 expected at least 0, less than 1"]),
        ("--lora_dropout -0.1 --lora_r 0 --lora_alpha 0", ["lora_dropout -0.1", "lora_r 0", "lora_alpha 0"]),
        ("--seed -1 --adam_beta1 1.5", ["--seed -1", "at most 4294967295", "--adam_beta1 1.5"]),
        ("--warmup_steps -1 --logging_steps 0", ["--warmup_steps -1.0 expected", "--logging_steps 0.0"]),
        ("--neftune_noise_alpha -1 --dataloader_num_workers -1", ["noise_alpha -1", "num_workers -1"]),
        ("--num_train_epochs nan", ["--num_train_epochs nan"]),
        ("--learning_rate 1e30", ["--learning_rate 1e+30 expected at least 0, at most 1000"]),
        (
            "--load_in_4bit --load_in_8bit --dtype float16 --bf16",
            ["--dtype float16 and --bf16", "--load_in_8bit and --load_in_4bit"],
        ),
        (
            "--optim adamw_troch --lr_scheduler_type cosin --eval_strategy stesp --max_steps x --lerning_rate 1",
            [
                "did you mean adamw_torch",
                "did you mean cosine?",
                "did you mean steps?",
                "--max_steps x expected a whole number",
                "did you mean --learning_rate?",
            ],
        ),
        ("--report_to wnadb", ["--report_to wnadb", "did you mean wandb"]),
        ("--attn_implementation flsh", ["--attn_implementation flsh expected one of eager"]),
        ("--lora_task_type CAUSAL", ["did you mean CAUSAL_LM"]),
        ("--torch_compile True --torch_compile_backend indctor", ["did you mean inductor?"]),
        ("--lr_scheduler_kwargs '{\"a\": 1}'", ["unexpected keyword argument 'a'"]),
        ("--lr_scheduler_kwargs '{bad'", ["--lr_scheduler_kwargs {bad", '{"num_cycles": 2}']),
        ("--lr 1", ["--lr expected a known name: --learning_rate"]),
        ("--learning_rat 3", ["--learning_rat expected a known name", "did you mean --learning_rate?"]),
        (
            "--batch_size 1 --rank 3 --epochs 2",
            ["--per_device_train_batch_size?", "--lora_r?", "--num_train_"],
        ),
        (
            "--gradient_checkpointing off --max_steps 1.5 --bf16 \"'true'\" --tf32 maybe",
            [
                "--gradient_checkpointing off expected True or False fix --gradient_checkpointing False",
                "--max_steps 1.5 expected a whole number fix --max_steps 2",
                "--bf16 'true' expected True or False fix --bf16 True",
                "--tf32 maybe expected True or False fix --tf32 True",
            ],
        ),
        (
            "--sample_packing true --random_state 3407",
            ["did you mean --packing?", "did you mean --seed?", "--packing true --seed 3407"],
        ),
        ("--adapt vision_tower,language", ["--adapt vision_tower expected", "did you mean vision?"]),
        ("--report_to none none", ["none expected the name of an argument before each value"]),
        ("--config", ["--config: expected one argument"]),
        ("--config bad.yaml", ["--config bad.yaml, line 3, column 1: expected ',' or ']'"]),
        ("--config type.yaml", ["--max_steps three (type.yaml:", "expected a whole number"]),
        ("--load_best_model_at_end True", ["requires the save and eval strategy to match"]),
        ("--device cuda:77", ["cuda:77"]),
        ("--push_to_hub --hub_model_id 'a b'", ["--hub_model_id 'a b' expected NAME or OWNER/NAME"]),
        ("--dataset_name chat", ["holds a model"]),
    ],
)
def test_training_arguments(capsys, folder, monkeypatch, flags, words):
    message = said(capsys, folder, monkeypatch, f"sft {SFT} {flags}")
    assert [word for word in words if word not in message] == []
    assert "loading" not in message


def test_a_hub_that_does_not_answer_is_met_before_the_training(capsys, folder, monkeypatch):
    class Api:
        def __init__(self, token: str | None) -> None: ...

        def whoami(self) -> None:
            raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    message = said(capsys, folder, monkeypatch, f"sft {SFT} --push_to_hub")
    assert "--push_to_hub to out: the hub cannot be used (Name or service not known)" in message
    assert "hf upload out out" in message


# From Python 3.14 on, `Path.is_dir` and its like return False for such a name.
TOO_LONG = "it does not exist" if sys.version_info >= (3, 14) else "File name too long"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sft", ["no --model_name_or_path", "--model_name_or_path MODEL"]),
        ("sft chat", ["No training data is named"]),
        ("sft --model_name_or_path", ["--model_name_or_path: expected one argument"]),
        ("check", ["no model expected", "isotype check MODEL"]),
        ("check chat --fail-on eror", ["did you mean error?"]),
        (
            "check sft --model_name_or_path chat --lr_scheduler_type cosine_with_min_lr",
            ["--lr_scheduler_type cosine_with_min_lr: One of min_lr", "kwargs of num_cycles, min_lr"],
        ),
        ("check chat --learning_rat 3", ["did you mean --learning_rate?"]),
        ("check chat --fail error", ["--fail expected a known name"]),
        (
            "plan chat --rows 10000000000000000000",
            ["--rows 10000000000000000000 expected at least 1, at most"],
        ),
        ("check chat --batch 1000000000", ["--batch 1000000000 expected at least 1, at most 10000000"]),
        (f"sft {SFT} --resume_from_checkpoint {'a' * 300}", [TOO_LONG]),
        (f"quality chat --data {'a' * 300}", ["File name too long"]),
        ("chat chat --max_new 3", ["did you mean --max_new_tokens?"]),
        ("merge chat --out merged", ["did you mean --output?"]),
        ("inspect chat --js", ["did you mean --json?"]),
        ("doctor --js", ["did you mean --json?"]),
        ("run --step 2 bad_build.py", ["did you mean --steps?"]),
        ("run --device t44 bad_build.py", ["unknown device", "did you mean t4?"]),
        ("run --device '5060 ti' bad_build.py", ["use one of rtx5060ti-16g, rtx5060ti-8g"]),
        ("plan chat --max_memory 10", ["--max-memory 10 expected", "fix --max-memory 10GiB"]),
        ("check chat --lora_r -1 --learning_rate -1", ["--lora_r -1", "--learning_rate -1"]),
        ("check chat --optim adamw_troch", ["did you mean adamw_torch"]),
        (
            "check sft --model_name_or_path chat --optim adam",
            ["did you mean adamw_torch or adamw_torch_fused?"],
        ),
        (
            "check kto --model_name_or_path chat --per_device_train_batch_size 1",
            ["1 with kto expected at least 2"],
        ),
        ("check SFT --model_name_or_path chat", ["did you mean isotype check sft?"]),
        ("check sft --model_name_or_path chat --max_steps -5 --lora_r 0", ["--max_steps -5", "--lora_r 0"]),
        ("check bad_build.py", ["isotype check bad_build:FUNCTION", "isotype run bad_build.py"]),
        (
            "check axolotl train no.yml",
            ["fix write no.yml instead", "--config no.yml: No such file or directory"],
        ),
        ("check bad_build.py:raises", ["fix isotype check bad_build:raises"]),
        ("check bad_build:raises", ["KeyError: 'model'", 'bad_build.py:7 return settings["model"]']),
        ("check bad_build:needs", ["missing a required argument: 'size'"]),
        ("check bad_build:extra", ["did you mean 'device'?"]),
        ("check bad_syntax:f", ["SyntaxError", "bad_syntax.py, line 1"]),
        ("check bad_import:f", ["no_such_package_of_anybody", "bad_import.py:1"]),
        ("inspect", ["the following arguments are required: path"]),
        ("quality chat --tokens x", ["--tokens x expected a whole number"]),
        ("quality chat --exact nf5", ["did you mean nf4?"]),
        ("inspect pickled", ["cd pickled && python -c", "weights_only=True"]),
        ("merge pickled -o merged", ["cd pickled && python -c"]),
        ("merge", ["fix isotype merge ADAPTER -o OUTPUT"]),
        ("quality --tokens 5", ["fix isotype quality MODEL --tokens 5"]),
        ("merge pickled", ["the following arguments are required: -o/--output"]),
        ("chat chat --temperature abc --quantization nf5", ["--temperature abc", "did you mean nf4?"]),
        ("explain foo", ["isotype explain lists them"]),
        ("doctor --jsn", ["did you mean --json?"]),
        ("run --steps x bad_build.py", ["--steps x expected a whole number"]),
        ("demo --max_steps x", ["--max_steps x expected a whole number"]),
    ],
)
def test_commands(capsys, folder, monkeypatch, command, words):
    message = said(capsys, folder, monkeypatch, command)
    assert [word for word in words if word not in message] == []


def test_a_pickled_adapter_is_converted_by_the_command_that_is_named(capsys, folder, monkeypatch, tmp_path):
    copy = shutil.copytree(folder / "pickled", tmp_path / "pickled")
    message = said(capsys, tmp_path, monkeypatch, "inspect pickled")
    code = message.partition('python -c "')[2].partition('"')[0]
    monkeypatch.chdir(copy)
    exec(code, {})
    assert (copy / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    "command", ["check {}", "sft --model_name_or_path {} --dataset_name sft.jsonl", "chat {} --ask a"]
)
def test_a_config_that_contradicts_the_weights(capsys, folder, monkeypatch, tmp_path, command):
    other = shutil.copytree(folder / "chat", tmp_path / "other")
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"intermediate_size": 96', '"intermediate_size": 128'))
    message = said(capsys, folder, monkeypatch, command.format(shlex.quote(str(other))))
    assert "config.json contradicts the weights" in message
    part = "model.layers.*.mlp.down_proj.weight (2 tensors) are of shape [64, 96]"
    assert f"{part}, in model.safetensors expected shape [64, 128], according to config.json" in message


@pytest.mark.parametrize(
    "command", ["check {}", "sft --model_name_or_path {} --dataset_name sft.jsonl", "chat {} --ask a"]
)
def test_a_weight_under_another_name(capsys, folder, monkeypatch, tmp_path, command):
    other = shutil.copytree(folder / "chat", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.nrom.weight"] = weights.pop("model.norm.weight")
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    message = said(capsys, folder, monkeypatch, command.format(shlex.quote(str(other))))
    assert "model.norm.weight is in no file" in message
    assert "fix model.safetensors has model.nrom.weight of this shape: rename this tensor" in message
    assert not (folder / "other").exists()


@pytest.mark.parametrize("command", ["check chat", f"sft {SFT}"])
def test_a_rank_above_the_width(capsys, folder, monkeypatch, command):
    message = said(capsys, folder, monkeypatch, f"{command} --lora_r 65")
    assert (
        "--lora_r 65 expected at most 64, the width of the widest adapted layer (the narrowest has 32)"
        in message
    )


@pytest.mark.parametrize(
    ("command", "corrected"),
    [
        ("check sft chat --device 8xh100", "check sft chat --device h100 --devices 8"),
        ("check chat h100 -r 8 --seq-len=64", "check chat --device h100 --lora_r 8 --max_length 64"),
        ("check chat -d t4 --quantization 4bit", "check chat --device t4 --quantization nf4"),
        ("check -m chat --dtype int8", "check --model_name_or_path chat --quantization int8"),
        ("check chat --device h100,t4", "plan chat --device h100,t4"),
        ("check train chat", "check sft chat"),
        ("check trl sft chat --device t4", "check sft --use_peft False chat --device t4"),
        ("trl sft chat --use-peft --device t4", "check sft chat --use-peft --device t4"),
        ("plan trl dpo --model chat", "plan dpo --use_peft False --model_name_or_path chat"),
        ("check torchrun --nproc_per_node=2 -m isotype sft chat", "check sft --devices 2 chat"),
        (
            "check accelerate launch --config_file f.yaml --num_processes 8 /usr/bin/trl kto chat --device t4",
            "check kto --devices 8 --use_peft False chat --device t4",
        ),
        ("check python bad_build.py --epochs 2", "run bad_build.py --epochs 2"),
        ("check bad_build.py --device t4 --gpu t4", "run --device t4 bad_build.py --gpu t4"),
        (
            "check env NPROC_PER_NODE=8 swift sft --model chat",
            "check sft --devices 8 --model_name_or_path chat",
        ),
        ("check swift --model chat", "check sft --model_name_or_path chat"),
        ("check WANDB_MODE=offline python -u bad_build.py --epochs 2", "run bad_build.py --epochs 2"),
        ("check python -m json.tool a.json", "run -m json.tool a.json"),
        ("check axolotl train axolotl.yml --device t4", "check axolotl.yml --device t4"),
        ("axolotl train axolotl.yml", "check axolotl.yml"),
        (
            "check accelerate launch --num_processes 4 -m axolotl.cli.train axolotl.yml",
            "check axolotl.yml --devices 4",
        ),
        ("check NCCL_P2P_DISABLE=1 llamafactory-cli train factory.yaml", "check factory.yaml"),
        (
            "check llamafactory-cli train --stage sft --model_name_or_path chat --finetuning_type full",
            "check --max_length 2048 --learning_rate 5e-05 --use_peft False --dtype float32 --model_name_or_path chat",
        ),
        (
            "check swift sft --model chat --train_type lora --dataset sft.jsonl --torch_dtype bfloat16 --lora_rank 8 "
            "--target_modules all-linear --template llama3 --split_dataset_ratio 0.01",
            "check sft --model_name_or_path chat --use_peft True --dataset_name sft.jsonl --dtype bfloat16 --lora_r 8 "
            "--lora_target_modules all-linear --eval_split 0.01",
        ),
        (
            "check swift rlhf --rlhf_type rm --model chat --tuner_type full --quant_bits 4",
            "check reward --model_name_or_path chat --use_peft False --quantization nf4",
        ),
        (
            "check swift sft --model chat --quant_method bnb --quant_bits 8 --torch_dtype bfloat16",
            "check sft --model_name_or_path chat --quantization int8 --dtype bfloat16",
        ),
        (
            "check swift sft --model chat --tuner_type full --torch_dtype=bfloat16",
            "check sft --master_dtype bfloat16 --model_name_or_path chat --use_peft False --dtype bfloat16",
        ),
        (
            "check swift sft --dtype bf16 --model chat --sft_type full",
            "check sft --master_dtype bfloat16 --dtype bf16 --model_name_or_path chat --use_peft False",
        ),
        (
            "check swift sft --model chat --train_type full --torch_dtype float32",
            "check sft --model_name_or_path chat --use_peft False --dtype float32",
        ),
        (
            "check swift sft --model chat --train_type full --torch_dtype bfloat16 --fsdp full_shard",
            "check sft --model_name_or_path chat --use_peft False --dtype bfloat16 --fsdp full_shard",
        ),
        (
            "check sft chat --use_peft False --full_bf16",
            "check sft chat --use_peft False --master_dtype bfloat16",
        ),
        ("check chat/model.safetensors --device t4", "check chat --device t4"),
        ("chekc chat --lora_rank 4", "check chat --lora_r 4"),
        ("check sft chat -d a.jsonl --lr 1e-4", "check sft chat --dataset_name a.jsonl --learning_rate 1e-4"),
        ("check sft --lr=1e-4 chat --wd 0", "check sft --learning_rate 1e-4 chat --weight_decay 0"),
        ("check sft --bs 2 chat", "check sft --per_device_train_batch_size 2 chat"),
        (
            "sft chat a.jsonl --cutoff_len 64 --finetuning_type full",
            "sft chat --dataset_name a.jsonl --max_length 64 --learning_rate 5e-05 --use_peft False --dtype float32",
        ),
        ("chat --adapter_name_or_path chat", "chat chat"),
        ("./chat", "check ./chat"),
        ("bad_build.py --steps 2", "run bad_build.py --steps 2"),
        ("python bad_build.py --epochs 2", "run bad_build.py --epochs 2"),
        ("run --device 2x4090 bad_build.py", "run --device 4090 bad_build.py"),
        ("plan chat --batch 4 --vram 24GB", "plan chat --rows 4 --max-memory 24GB"),
        ("finetune chat a.jsonl --bf16 --qlora", "sft chat --dataset_name a.jsonl --bf16 --quantization nf4"),
        ("sft --bf16 chat -d a.csv", "sft chat --bf16 --dataset_name a.csv"),
        ("sft chat --data a.json --max_steps 2.0", "sft chat --dataset_name a.json --max_steps 2"),
        (f"sft {SFT} --no_cuda False --warmup_ratio 0.1", f"sft {SFT} --warmup_steps 0.1"),
        (
            f"sft {SFT} --attn_implementation flash_attention_2",
            f"sft {SFT} --attn_implementation sdpa",
        ),
        (
            "check sft --stage sft --model_name_or_path chat --finetuning_type full --device t4",
            "check sft --max_length 2048 --learning_rate 5e-05 --use_peft False --dtype float32 --model_name_or_path chat --device t4",
        ),
        ("merge --adapter chat --out merged", "merge chat --output merged"),
        ("merge chat merged", "merge chat -o merged"),
        ("merge chat --out merged --dtype nf4", "merge chat --output merged --quantization nf4"),
        ("merge chat merged --dtype bf16", "merge chat -o merged --dtype bf16"),
        (
            "check chat -a 16 --seqlen 64 --bsz 2",
            "check chat --lora_alpha 16 --max_length 64 --per_device_train_batch_size 2",
        ),
        ("inspect chat --device t4", "inspect --plan chat --device t4"),
        ("plan chat h100", "plan chat --device h100"),
        ("demo --devce cpu", "demo --device cpu"),
        (f"sft {SFT} --lerning_rate 1 --device t4", f"check sft {SFT} --learning_rate 1 --device t4"),
        ("chat chat hello --max_tokens 3", "chat chat --ask hello --max_new_tokens 3"),
    ],
)
def test_the_corrected_command(capsys, folder, monkeypatch, command, corrected):
    message = said(capsys, folder, monkeypatch, command)
    assert message.endswith(f" the corrected command: isotype {corrected}")


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("tune run full_finetune_single_device --config file.yaml", "torchtune"),
        ("tune run --nproc_per_node 2 lora_finetune_distributed --config llama3_1/8B_lora", "torchtune"),
        ("CUDA_VISIBLE_DEVICES=0 litgpt finetune_lora chat --quantize bnb.nf4", "LitGPT"),
        ("xtuner train file.py --deepspeed deepspeed_zero2", "XTuner"),
        ("ludwig train --config chat.yaml", "Ludwig"),
    ],
)
@pytest.mark.parametrize("first", ["check", "plan"])
def test_a_command_of_a_program_that_is_not_translated(capsys, folder, monkeypatch, first, command, program):
    message = said(capsys, folder, monkeypatch, f"{first} {command}")
    assert "error: the command begins with another program" in message
    assert f"the command of {program} " in message
    assert "fix isotype check MODEL checks only a model" in message
    assert message.count("expected ") == 1


def test_a_problem_of_a_word_that_the_correction_added_is_not_printed(capsys, folder, monkeypatch):
    message = said(capsys, folder, monkeypatch, "doctor --gpu")
    assert "did you mean --device?" in message
    assert "expected one argument" not in message


def test_the_number_of_processes_of_a_launcher_in_the_environment(capsys, folder, monkeypatch):
    monkeypatch.setenv("NPROC_PER_NODE", "4")
    assert said(capsys, folder, monkeypatch, "check swift sft chat").endswith(
        "isotype check sft --devices 4 chat"
    )


@pytest.mark.parametrize(
    "command",
    [
        "stf",
        "no_such_file.py",
        "check chat --r-fuse 3",
        "check chat --torch_dtype bfloat16 --bnb_4bit_compute_dtype float16",
        "check chat --adapter qlora",
        "check chat --lora_target q_proj v_proj",
        "check chat --max_memory 10GiB",
        "check ppo chat",
        "check trl env chat",
        "check swift rlhf --rlhf_type ppo chat",
        "check accelerate config",
        "sft chat --max_steps two",
        "sft chat --data a.jsonl --lr -1",
        # A later check refuses these with any spelling of the name.
        f"sft {SFT} --lerning_rate 1 --adapt auto",
        f"sft {SFT} --lerning_rate 1 --load_best_model_at_end",
        f"sft {SFT} --lerning_rate 1 --tokens_per_step 99",
        f"sft {SFT} --lerning_rate 1 --device a101",
        f"check sft {SFT} --lerning_rate 1 --optim lomo --lr_scheduler_kwargs '{{\"a\": 1}}'",
        "check chat --jsn --device a101",
        "check bad_build:make --devce a101",
        "demo --devce t4",
        "plan chat --jsn --device t4,a101",
        "inspect chat --jsn --for nobody",
        "inspect chat --jsn --plan --base_memory much",
        "inspect chat --jsn --device a101",
        "quality chat --jsn --device t4",
        "quality chat --jsn --tokens 0",
        "doctor --jsn --device a101",
        "chat chat --max_tokens 0",
        "chat chat --max_tokens 3 --device t4",
    ],
)
def test_a_command_whose_correction_is_not_certain(capsys, folder, monkeypatch, command):
    assert "the corrected command" not in said(capsys, folder, monkeypatch, command)
