"""Two processes on a CPU: the same weights, losses, adapters and checkpoints as one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.sharded_memory import CASES, foreseen, of_first_step, save_model
from filelock import FileLock
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file

from isotype.core.files import write_whole
from isotype.precision.policy import PrecisionPolicy
from isotype.train.output.checkpoints import damage
from isotype.train.output.sharded import SHARDS
from tests.caches import own_cache
from tests.checkpoint.test_gguf import write_gguf
from tests.checkpoint.test_load import mxfp4_checkpoint
from tests.distributed.launch import (
    EVERY_FUSE,
    EVERY_LOAD,
    SHARDED,
    alone,
    argv,
    in_processes,
    losses,
    prepared,
    require_fused_as_peft,
)
from tests.zoo.processors import picture, save_vision_model

LOADS = {name: EVERY_LOAD[name] for name in ("pinned", "nf4", "int8", "mixed", "full", "DoRA", "DoRA nf4")}
MODELS = {"experts": "qwen3-moe", "turned": "gpt2"}
PACKED = {**EVERY_LOAD["plain"], "precision": {"dtype": "bfloat16", "quantization": "mxfp4"}}
WHOLE = ("gguf", "mxfp4")
"""Whose tensors every process reads whole: rows of what is stored in blocks are not cut out."""
TRAININGS = {
    "mixed": (
        "--quantization",
        "mixed",
        "--dtype",
        "float32",
        "--save_steps",
        2,
        "--gradient_checkpointing",
        "auto",
        *SHARDED,
    ),
    "nf4": ("--quantization", "nf4", "--dtype", "float32", "--save_steps", 2, *SHARDED),
    "DoRA": (
        "--use_dora",
        "True",
        "--quantization",
        "nf4",
        "--dtype",
        "float32",
        "--save_steps",
        2,
        *SHARDED,
    ),
    "full": ("--use_peft", "False", "--dtype", "bfloat16", "--save_steps", 2, *SHARDED),
    "ddp": ("--quantization", "int8", "--dtype", "float32"),
}
USUAL = ("mixed",)
HELD = ("bf16 FSDP2, checkpointing",)
HELD_SELDOM = ("nf4 FSDP2", "bf16 DDP", "nf4 DDP", "nf4 DDP, checkpointing")
"""With `HELD`, every pair of storage, sharding and checkpointing."""
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2}
STEPS = ("--max_steps", 4)


pytestmark = pytest.mark.newest  # torch 2.10 shards no integers


@pytest.fixture(scope="module", autouse=True)
def _cache(base: Path) -> Iterator[None]:
    """Where what a mixed base is chosen by is kept: the first process measures. What runs alone is not checked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isotype.train.callback.before_first_step", lambda *_: None)
        patch.setenv("ISOTYPE_CACHE", own_cache(base / "cache"))
        yield


@dataclass(frozen=True)
class Together:
    """What two processes did.

    Attributes:
        root: with what they wrote, each training in a folder of its name, the model and its rows.
        results: of each process, what each job gave.
        printed: by both.
    """

    root: Path
    results: list[list[Any]]
    printed: str

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def data(self) -> Path:
        return self.root / "rows.jsonl"


def _once(root: Path, jobs: Callable[[], list[dict[str, Any]]]) -> Together:
    """One process group for all jobs, and for all workers of pytest: its start costs more than what it does."""
    kept = root / "together.json"
    root.mkdir(exist_ok=True)
    with FileLock(root.parent / "processes.lock"):  # two groups that start at once can take one port
        if not kept.exists():
            prepared(root)
            write_whole(kept, json.dumps(in_processes(2, jobs(), root)))
    return Together(root, *json.loads(kept.read_text()))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


def _trained(root: Path, names: Sequence[str], others: Callable[[], list[dict[str, Any]]] = list) -> Together:
    def job(name: str) -> dict[str, Any]:
        more = TRAININGS[name]
        return {
            "job": "train",
            "argv": ["sft", *argv(root / "model", root / "rows.jsonl", root / name, 2, *STEPS, *more)],
        }

    return _once(root, lambda: [*(job(name) for name in names), *others()])


def _held(root: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """One process group for what is trained and for what is only held, for its start takes longer."""
    model = save_model(root / "held", **SMALL)
    return [{"job": "hold", "path": str(model), "case": name} for name in names]


@pytest.fixture(scope="module")
def together(base: Path, saved: Callable[..., Path]) -> Together:
    load = {"job": "load", **LOADS["mixed"]}  # nf4 and int8 are in it
    root = base / "together"
    path = str(saved("llama", torch.float32))  # a layer that computes in float32 is quantized from float32
    return _trained(root, USUAL, lambda: [*_held(root, HELD), _pictured(root), {**load, "path": path}])


def _pictured(root: Path) -> dict[str, Any]:
    """A training whose processes get an image and none, by turns."""
    turns = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4 w5"}]
    shown = [{"role": "user", "content": "<image> w1"}, {"role": "assistant", "content": "w2"}]
    rows = []
    for number in range(0, 8, 2):
        picture(40, 40, number).save(root / f"{number}.png")
        pair = [{"messages": shown, "images": [f"{number}.png"]}, {"messages": turns, "images": []}]
        rows += pair if number % 4 else pair[::-1]
    (root / "pictures.jsonl").write_text("\n".join(map(json.dumps, rows)))
    save_vision_model("llava", root / "llava")
    return {"job": "train", "argv": ["sft", *_pictured_arguments(root, 2, *SHARDED)], "checked": False}


def _pictured_arguments(root: Path, processes: int, *more: str) -> list[str]:
    # By Adam a gradient of zero, as of a tower that shows an unlearned image, counts as a step; none at all does not.
    fixed = (
        "--optim",
        "sgd",
        "--shuffle_dataset",
        "False",
        "--per_device_train_batch_size",
        2 // processes,
        *STEPS,
        *more,
    )
    return argv(root / "llava", root / "pictures.jsonl", root / f"pictured-{processes}", processes, *fixed)


def test_a_process_without_a_picture_gathers_the_tower_with_the_others(together: Together) -> None:
    pytest.importorskip("PIL", reason="needs the package pillow")
    alone(_pictured_arguments(together.root, 1))
    assert losses(together.root / "pictured-2") == pytest.approx(
        losses(together.root / "pictured-1"), abs=2e-5
    )


@pytest.fixture(scope="module")
def every(base: Path, saved: Callable[..., Path]) -> Together:
    root = base / "every"
    fuse = {"job": "fuse", **EVERY_FUSE["nf4"], "path": str(saved("llama", torch.bfloat16))}
    return _trained(root, list(TRAININGS), lambda: [*_held(root, HELD_SELDOM), fuse])


@pytest.fixture(scope="module")
def loads(base: Path, saved: Callable[..., Path]) -> dict[str, list[dict[str, Any]]]:
    wanted: dict[str, tuple[Callable[[], Path], dict[str, Any]]] = {
        name: (partial(saved, "llama", torch.bfloat16), arguments) for name, arguments in LOADS.items()
    }
    for name, architecture in MODELS.items():
        wanted[name] = partial(saved, architecture, torch.bfloat16), LOADS["nf4"]
    head = {"model_class": "AutoModelForSequenceClassification", **LOADS["nf4"]}
    head["lora"] = {**head["lora"], "modules_to_save": ["score"]}
    wanted["head"] = partial(saved, "llama", torch.bfloat16), head
    wanted["gguf"] = lambda: write_gguf(base / "loads" / "tiny.gguf"), LOADS["nf4"]
    wanted["mxfp4"] = lambda: mxfp4_checkpoint(base / "loads" / "mxfp4")[0], EVERY_LOAD["plain"]
    wanted["packed"] = wanted["mxfp4"][0], PACKED
    found = _once(
        base / "loads",
        lambda: [{"job": "load", "path": str(path()), **arguments} for path, arguments in wanted.values()],
    )
    return {name: [each[place] for each in found.results] for place, name in enumerate(wanted)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*LOADS, *MODELS, "head", "packed", *WHOLE])
def test_every_sharded_load_holds_the_bits_of_a_whole_one_and_reads_its_share(loads, name):
    for load in loads[name]:
        _as_whole(load, 1 if name in WHOLE else 0.55)


def test_a_sharded_load_holds_the_bits_of_a_whole_one_and_reads_its_share(together):
    for *_, load in together.results:
        _as_whole(load, 0.55)


def _as_whole(load: dict[str, Any], most: float) -> None:
    assert load["sharded"]
    assert load["differences"] == []
    assert load["changed"] == []  # TRL's and our own restoring leaves it alone
    whole, sharded = load["steps"]
    assert sharded == pytest.approx(whole, rel=1e-6)
    assert load["read"] <= most


@pytest.fixture(scope="module")
def whole(together: Together, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process leaves of the training that two share."""
    return _alone(together, tmp_path_factory.mktemp("whole"), "mixed")


def _alone(together: Together, out: Path, name: str) -> Path:
    without = [str(each) for each in TRAININGS[name] if each not in SHARDED]
    alone(argv(together.model, together.data, out, 1, *STEPS, *without))
    return out


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in TRAININGS if name not in USUAL])
def test_two_processes_train_every_way_as_one(every, tmp_path, name):
    _same_losses(every.root / name, _alone(every, tmp_path, name), 5e-3 if name == "full" else 2e-5)


def test_two_processes_train_as_one(together, whole):
    _same_losses(together.root / "mixed", whole, 2e-5)


def _same_losses(together: Path, alone: Path, tolerance: float) -> None:
    assert losses(together) == pytest.approx(losses(alone), abs=tolerance)
    assert len(losses(alone)) == 4


@pytest.mark.exhaustive
def test_fused_layers_read_what_is_gathered_when_they_are_called(every):
    """Three steps: a cast or a product that was kept from one to the next would be of weights before the update."""
    for process in every.results:
        require_fused_as_peft("nf4", process[-1])


def test_one_process_speaks_writes_and_succeeds(together):
    assert [each[: len(USUAL)] for each in together.results] == [[0] * len(USUAL)] * 2
    for step in range(1, 5):
        assert together.printed.count(f"step {step}/4") == len(USUAL) + 1  # one more with images


@pytest.mark.parametrize("name", HELD)
def test_what_a_process_holds_is_foreseen(together, name):
    """Within what operators use inside themselves. Training every weight is in the benchmark, where its optimizer is further off."""
    _as_foreseen(together, name, len(USUAL) + HELD.index(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HELD_SELDOM)
def test_what_a_process_holds_is_foreseen_in_every_way(every, name):
    _as_foreseen(every, name, len(TRAININGS) + HELD_SELDOM.index(name))


def _as_foreseen(together: Together, name: str, at: int) -> None:
    report = foreseen(together.root / "held", CASES[name], 2)
    phases = of_first_step(report.memory)
    for process in together.results:
        for phase, held in process[at].items():
            assert phases[phase] == pytest.approx(held, rel=0.05), phase
    assert report.trace.setup.devices == 2


def test_the_adapter_is_one_file_that_peft_loads(together, whole):
    out = together.root / "mixed"
    policy, single = (PrecisionPolicy.read(path) for path in (out, whole))
    assert policy is not None
    assert single is not None
    assert policy.layers == single.layers != ()
    weights, expected = (load_file(path / "adapter_model.safetensors") for path in (out, whole))
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected[name], atol=2e-4, rtol=0)
    loaded = AutoPeftModelForCausalLM.from_pretrained(out)
    named = {name.replace(".default", ""): p for name, p in loaded.named_parameters() if "lora" in name}
    assert all(torch.equal(named[name], value) for name, value in weights.items())


def test_a_sharded_checkpoint_goes_on_in_one_process(together, tmp_path):
    checkpoint = together.root / "mixed" / "checkpoint-2"
    assert damage(checkpoint) is None
    assert len(list((checkpoint / SHARDS).glob("*.safetensors"))) == 2
    resumed = [*TRAININGS["mixed"][:4], "--resume_from_checkpoint", checkpoint]
    alone(argv(together.model, together.data, tmp_path, 1, *STEPS, *resumed))
    assert losses(tmp_path)[-2:] == pytest.approx(losses(together.root / "mixed")[-2:], abs=2e-5)


@pytest.mark.exhaustive
def test_a_checkpoint_of_one_process_goes_on_in_two_with_shards(every, tmp_path):
    options = ("--quantization", "nf4", "--dtype", "float32", "--save_steps", 2)
    alone(argv(every.model, every.data, tmp_path / "one", 1, *STEPS, *options))
    resumed = [*STEPS, *options, *SHARDED, "--resume_from_checkpoint", tmp_path / "one" / "checkpoint-2"]
    words = ["sft", *argv(every.model, every.data, tmp_path / "two", 2, *resumed)]
    in_processes(2, [{"job": "train", "argv": words}], tmp_path)
    assert losses(tmp_path / "two")[-2:] == pytest.approx(losses(tmp_path / "one")[-2:], abs=2e-5)


@pytest.mark.exhaustive
def test_a_sharded_dora_goes_on_in_one_process_and_in_two(every, tmp_path):
    out = every.root / "DoRA"
    options = [*TRAININGS["DoRA"][:-2], "--resume_from_checkpoint", out / "checkpoint-2"]
    alone(argv(every.model, every.data, tmp_path / "one", 1, *STEPS, *options))
    assert losses(tmp_path / "one")[-2:] == pytest.approx(losses(out)[-2:], abs=2e-5)
    # A new training of the saved adapter begins with the saved magnitudes, not with the norms of the weights.
    further = {"model_name_or_path": out, "output_dir": tmp_path / "two"}
    command = argv(every.model, every.data, tmp_path / "two", 2, *STEPS, *TRAININGS["DoRA"][2:])
    for flag, value in further.items():
        command[command.index(f"--{flag}") + 1] = str(value)
    in_processes(2, [{"job": "train", "argv": ["sft", *command]}], tmp_path)
    single = [str(out) if word == str(every.model) else word for word in command if word not in SHARDED]
    single[single.index("--per_device_train_batch_size") + 1] = "4"
    single[single.index("--output_dir") + 1] = str(tmp_path / "three")
    alone(single)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "three"), abs=2e-5)


@pytest.mark.exhaustive
def test_a_whole_model_is_gathered_at_the_end_and_stays_in_parts_in_checkpoints(every, tmp_path):
    out = every.root / "full"
    assert (out / "model.safetensors").is_file()
    checkpoint = out / "checkpoint-4"
    assert not (checkpoint / "model.safetensors").exists()
    assert damage(checkpoint) is None
    assert json.loads((out / "run_report.json").read_text())["status"] == "finished"
    resumed = [*TRAININGS["full"][:4], "--resume_from_checkpoint", out / "checkpoint-2"]
    alone(argv(every.model, every.data, tmp_path, 1, *STEPS, *resumed))
    assert losses(tmp_path)[-2:] == pytest.approx(losses(out)[-2:], abs=5e-3)
