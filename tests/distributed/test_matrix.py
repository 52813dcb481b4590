"""Two and four processes in every storage and dtype: the losses of one."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from isotype.train.output.sharded import SHARDS
from tests.distributed.launch import (
    EVERY_FUSE,
    EVERY_LOAD,
    ROOT,
    SHARDED,
    alone,
    argv,
    environment,
    in_processes,
    losses,
    prepared,
    require_fused_as_peft,
)

pytestmark = pytest.mark.newest  # torch 2.10 shards no integers

STEPS = 3
TOLERANCES = {"float32": 2e-5, "bfloat16": 5e-3, "float16": 1e-3}
WAYS = {"fsdp2": SHARDED, "ddp": ()}


def flags(storage: str, dtype: str) -> list[str]:
    quantized = [] if storage == "none" else ["--quantization", storage]
    return ["--dtype", dtype, "--max_steps", str(STEPS), *quantized]


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [2, 4])
def test_losses_are_those_of_one_process(processes: int, tmp_path: Path) -> None:
    model, data = prepared(tmp_path)
    cases = list(itertools.product(("none", "nf4", "int8"), TOLERANCES))
    for storage, dtype in cases:
        alone(argv(model, data, tmp_path / f"one-{storage}-{dtype}", 1, *flags(storage, dtype)))
    runs = {
        f"{way}-{storage}-{dtype}": [*flags(storage, dtype), *more]
        for (storage, dtype), (way, more) in itertools.product(cases, WAYS.items())
    }
    jobs = [
        {"job": "train", "argv": ["sft", *argv(model, data, tmp_path / name, processes, *more)]}
        for name, more in runs.items()
    ]
    in_processes(processes, jobs, tmp_path)
    for (storage, dtype), way in itertools.product(cases, WAYS):
        found, expected = (losses(tmp_path / f"{each}-{storage}-{dtype}") for each in (way, "one"))
        assert found == pytest.approx(expected, abs=TOLERANCES[dtype]), f"{way} {storage} {dtype}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [3, 4])
def test_sharded_loads_of_many_models_hold_the_bits_of_whole_ones(
    processes: int, tmp_path: Path, saved: Callable[..., Path]
) -> None:
    wanted = [("llama", arguments) for arguments in EVERY_LOAD.values()]
    names = ("llama-tied-bias", "gpt2", "qwen3-moe", "gpt-oss", "deepseek-v3", "gemma3", "phi3")
    wanted += [(name, EVERY_LOAD[storage]) for name in names for storage in ("plain", "nf4", "int8")]
    jobs = [
        {"job": "load", "path": str(saved(name, torch.bfloat16)), **arguments} for name, arguments in wanted
    ]
    results, _ = in_processes(processes, jobs, tmp_path)
    for each in results:
        for (name, arguments), found in zip(wanted, each, strict=True):
            assert found["differences"] == [], (name, arguments)
            whole, sharded = found["steps"]
            assert sharded == pytest.approx(whole, rel=1e-6), (name, arguments)
            # Four experts are no three equal parts.
            assert found["read"] <= 1 / processes + 0.05 or processes == 3, (name, arguments)


@pytest.mark.exhaustive
def test_fused_layers_of_sharded_models_compute_as_those_of_one_process(
    tmp_path: Path, saved: Callable[..., Path]
) -> None:
    path = str(saved("llama", torch.bfloat16))
    jobs = [{"job": "fuse", "path": path, **arguments} for arguments in EVERY_FUSE.values()]
    results, _ = in_processes(2, jobs, tmp_path)
    for each in results:
        for case, result in zip(EVERY_FUSE, each, strict=True):
            require_fused_as_peft(case, result)


@pytest.mark.exhaustive
def test_a_checkpoint_goes_on_at_one_two_and_four_processes(tmp_path: Path) -> None:
    model, data = prepared(tmp_path)
    common = [*flags("nf4", "float32"), "--save_steps", 1]
    begin = {"job": "train", "argv": ["sft", *argv(model, data, tmp_path / "first", 2, *common, *SHARDED)]}
    in_processes(2, [begin], tmp_path)
    expected = losses(tmp_path / "first")
    resume = ["--resume_from_checkpoint", tmp_path / "first" / "checkpoint-1"]
    for processes in (2, 4):
        ways = {
            name: [
                "sft",
                *argv(model, data, tmp_path / f"{name}-{processes}", processes, *common, *more, *resume),
            ]
            for name, more in WAYS.items()
        }
        in_processes(processes, [{"job": "train", "argv": each} for each in ways.values()], tmp_path)
        for name in ways:
            assert losses(tmp_path / f"{name}-{processes}")[-2:] == pytest.approx(expected[-2:], abs=2e-5)
    alone(argv(model, data, tmp_path / "alone", 1, *common, *resume))
    assert losses(tmp_path / "alone")[-2:] == pytest.approx(expected[-2:], abs=2e-5)


CONFIG = """\
distributed_type: FSDP
use_cpu: true
num_processes: 2
num_machines: 1
machine_rank: 0
main_process_port: 0
mixed_precision: 'no'
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
"""


@pytest.mark.exhaustive
def test_the_config_of_accelerate_shards_on_a_cpu_too(tmp_path: Path) -> None:
    model, data = prepared(tmp_path)
    config, out = tmp_path / "fsdp.yaml", tmp_path / "out"
    config.write_text(CONFIG)
    common = flags("nf4", "float32")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command = [*launcher, "-m", "isotype", "sft", *argv(model, data, out, 2, *common)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / f"checkpoint-{STEPS}" / SHARDS).is_dir()
    alone(argv(model, data, tmp_path / "alone", 1, *common))
    assert losses(out) == pytest.approx(losses(tmp_path / "alone"), abs=2e-5)
