"""The trainer under a policy: measured steps, whole checkpoints, rotation, full disks, and digits that TRL rounds off."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
import trl

import isotype
from isotype.cli.main import main
from isotype.core.files import STAGING
from isotype.data.methods import METHODS
from isotype.train.monitor.meter import Step, count_tokens
from isotype.train.output.checkpoints import whole_checkpoints
from isotype.train.policy import enforce_trainer, masters_of, precision_arguments
from isotype.train.trainer import policy_trainer
from tests.adapters import loaded
from tests.pairwise import few, pairwise
from tests.refusals import refused
from tests.train.tiny import reward_by_words, rows, save_chat_model, save_rows

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def adapted(path: Path, dtype: str) -> tuple[Any, isotype.PrecisionPolicy]:
    return loaded(path, dtype, "nf4", lora_dropout=0.2)


def trainer_of(model: Any, path: Path, out: Path, cls: Any = trl.SFTTrainer, **more: Any) -> Any:
    """Return a PolicyTrainer of SFT as TRL builds it."""
    given = {
        "max_steps": 6,
        "save_steps": 1,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    trainer = policy_trainer(cls)(
        model=model,
        args=trl.SFTConfig(output_dir=str(out), **{**given, **more}),
        train_dataset=datasets.Dataset.from_list(rows("sft")),
        eval_dataset=datasets.Dataset.from_list(rows("sft", 4)),
        processing_class=transformers.AutoTokenizer.from_pretrained(path),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def build(path: Path, out: Path, cls: Any = trl.SFTTrainer, **more: Any) -> Any:
    """Return a PolicyTrainer of SFT under a float32 policy."""
    model, policy = adapted(path, "float32")
    masters = masters_of(model)
    trainer = trainer_of(model, path, out, cls, **more)
    enforce_trainer(trainer, policy, masters)
    return trainer


class Measures(transformers.TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.taken: list[Step] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.steps.begin(state.global_step + 1)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.taken.append(self.trainer.steps.read())
        assert self.trainer.steps.end().memory_bytes > 2**20


def measured(trainer: Any) -> tuple[list[Step], list[dict[str, Any]]]:
    """Return what a run has measured and what the trainer has logged, by step."""
    measures = Measures(trainer)
    trainer.add_callback(measures)
    trainer.train()
    return measures.taken, [entry for entry in trainer.state.log_history if "loss" in entry]


def gained(logged: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of each step, from the trainer's running total."""
    seen = [0]
    for entry in logged:  # GRPO and RLOO log it only when they have generated
        seen.append(entry.get("num_tokens", seen[-1]))
    return [int(b - a) for a, b in itertools.pairwise(seen)]


@few(
    "more",
    {
        "padded": {},
        "accumulated": {"gradient_accumulation_steps": 2},
        "evaluated": {"eval_strategy": "steps", "eval_steps": 1},
        "accumulated and evaluated": {
            "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1
        },
        "padding-free": {"padding_free": True, "max_length": None},
        "packed": {"packing": True, "packing_strategy": "wrapped", "max_length": 16},
    },
    "accumulated and evaluated",
    "packed",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*(padding_free|flash|packing)")
def test_the_measures_of_a_step_are_the_trainers_own(path: Path, tmp_path: Path, more: dict[str, Any]):
    taken, logged = measured(build(path, tmp_path, save_strategy="no", **more))
    assert len(taken) == 6
    assert [step.loss for step in taken] == [entry["loss"] for entry in logged]
    assert [step.grad_norm for step in taken] == [entry["grad_norm"] for entry in logged]
    assert [step.tokens for step in taken] == gained(logged)


def test_the_flops_of_a_batch_are_the_trainers_own(path: Path, tmp_path: Path):
    trainer = build(path, tmp_path, save_strategy="no")
    for count in (3, 5):
        batch = {"input_ids": torch.zeros(count, 7, dtype=torch.int64)}
        wanted = transformers.Trainer.floating_point_ops(trainer, batch)
        assert trainer.floating_point_ops(batch) == wanted > 0
    assert trainer.floating_point_ops([{"prompt": "of GRPO"}]) == 0


@pairwise("max_grad_norm, dtype", [1e-4, 0.0], ["float32", "float16"], strength=1)
def test_the_gradient_norm_is_the_one_before_clipping(
    path: Path, tmp_path: Path, dtype: str, max_grad_norm: float
):
    def norms(limit: float) -> list[float]:
        model, policy = adapted(path, dtype)
        masters = masters_of(model)
        given = {"max_steps": 1, "save_strategy": "no", "fp16": dtype == "float16"}
        trainer = trainer_of(model, path, tmp_path, max_grad_norm=limit, **given)
        enforce_trainer(trainer, policy, masters)
        if policy.loss_scaling:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        taken, logged = measured(trainer)
        assert [step.grad_norm for step in taken] == [entry["grad_norm"] for entry in logged]
        return [step.grad_norm for step in taken if step.grad_norm is not None]

    unclipped = norms(1e6)
    assert norms(max_grad_norm) == unclipped
    assert 1e-3 < unclipped[0] < 1e3


def trainer_for(path: Path, out: Path, method: str, **more: Any) -> Any:
    """Return a PolicyTrainer of `method` without a policy."""
    config, trainer = METHODS[method].dataclass_types()[1], METHODS[method].trainer_class()
    if method == "reward":
        model = transformers.LlamaForSequenceClassification.from_pretrained(path, num_labels=1)
    else:
        model, _ = adapted(path, "float32")
    given = {
        "max_steps": 4,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    rewarded = {"reward_funcs": [reward_by_words]} if method in ("grpo", "rloo") else {}
    built = policy_trainer(trainer)(
        model=model,
        args=config(output_dir=str(out), **{**given, **more}),
        train_dataset=datasets.Dataset.from_list(rows(method)),
        processing_class=transformers.AutoTokenizer.from_pretrained(path),
        **rewarded,
    )
    built.remove_callback(transformers.PrinterCallback)
    return built


@few("method", ["dpo", "kto", "reward"], "dpo", "kto")
def test_the_tokens_of_preferences_are_the_trainers_own(path: Path, tmp_path: Path, method: str):
    taken, logged = measured(trainer_for(path, tmp_path, method))
    assert [step.tokens for step in taken] == gained(logged)


@pairwise("method, reuse", ["grpo", "rloo"], [{"steps_per_generation": 2}, {"num_iterations": 2}], strength=1)
def test_completions_count_in_every_step_that_learns_from_them(
    path: Path, tmp_path: Path, method: str, reuse: dict[str, int]
):
    trainer = trainer_for(
        path, tmp_path, method, num_generations=2, max_completion_length=6, beta=0.0, **reuse
    )
    taken, logged = measured(trainer)
    tokens = [step.tokens for step in taken]
    assert all(count > 0 for count in tokens)
    generated = [count for count in gained(logged) if count]
    assert len(generated) == 2
    if "num_iterations" in reuse:
        assert tokens == [generated[0], generated[0], generated[1], generated[1]]
    else:
        assert [tokens[0] + tokens[1], tokens[2] + tokens[3]] == generated


def test_tokens_are_the_attended_ones_where_a_mask_says_which():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    ids = torch.zeros(2, 3, dtype=torch.long)
    assert count_tokens({"input_ids": ids, "attention_mask": mask, "labels": ids}) == 3
    assert count_tokens({"input_ids": ids, "position_ids": ids, "token_type_ids": ids}) == 6
    both = {"prompt_ids": ids, "prompt_mask": mask, "completion_ids": ids, "completion_mask": 1 - mask}
    assert count_tokens(both) == 6
    kto = {"input_ids": ids, "attention_mask": mask, "completion_mask": mask, "KL_input_ids": ids}
    assert count_tokens(kto) == 3


def test_the_digits_that_trl_cuts_off_come_back(path: Path, tmp_path: Path):
    model, policy = adapted(path, "bfloat16")
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trainable.values():
            parameter.mul_(1.1).add_(0.01)
    before = {name: p.detach().clone() for name, p in trainable.items()}
    masters = masters_of(model)
    trainer = trainer_of(model, path, tmp_path, bf16=True)
    assert {p.dtype for p in trainable.values()} == {torch.bfloat16}
    assert any(not torch.equal(trainable[name].float(), value) for name, value in before.items())
    assert enforce_trainer(trainer, policy, masters) == ()
    assert all(torch.equal(trainable[name], value) for name, value in before.items())


def test_a_trainer_in_another_mixed_precision_is_refused(path: Path, tmp_path: Path):
    trainer = build(path, tmp_path)
    policy = isotype.resolve_precision(path, dtype="float16", quantization="nf4", device="cpu")
    assert refused(isotype.PrecisionError, enforce_trainer, trainer, policy) == (
        "the trainer and the policy disagree\n"
        "  - a trainer with mixed precision 'no'\n"
        "    expected  'fp16', for compute float16\n"
        "    fix       build the trainer with fp16=True, bf16=False in its arguments"
    )


class WritesMore(trl.SFTTrainer):
    """A trainer that writes into the checkpoint after its base class, as GRPOTrainer does."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        name = f"checkpoint-{self.state.global_step}"
        (Path(self._get_output_dir(trial)) / name / "more.json").write_text("{}")
        assert not (Path(self.args.output_dir) / name).exists()


def test_what_a_subclass_adds_is_in_before_the_checkpoint_has_its_name(path: Path, tmp_path: Path):
    trainer = build(path, tmp_path, WritesMore, max_steps=2)
    trainer.train()
    assert type(trainer).__name__ == "WritesMore"
    for step in (1, 2):
        assert (tmp_path / f"checkpoint-{step}" / "more.json").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "checkpoint-1", "checkpoint-2"]


def test_the_oldest_go_but_never_the_newest_or_the_best(path: Path, tmp_path: Path):
    trainer = build(
        path,
        tmp_path,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    losses = iter([3.0, 1.0, 2.0, 2.5, 4.0, 5.0])  # the second is the best
    trainer.evaluation_loop = lambda *args, **kwargs: transformers.trainer_utils.EvalLoopOutput(
        None, None, {"eval_loss": next(losses)}, 4
    )
    trainer.train()
    best = tmp_path / "checkpoint-2"
    assert trainer.state.best_model_checkpoint == str(best)
    assert whole_checkpoints(tmp_path) == [best, tmp_path / "checkpoint-6"]
    for checkpoint in (best, tmp_path / "checkpoint-6"):
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(best)


def test_going_on_from_the_last_step_takes_no_further_one(path: Path, tmp_path: Path):
    build(path, tmp_path, max_steps=3, save_steps=3).train()
    trainer = build(path, tmp_path, max_steps=3, save_steps=3)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trainer.state.global_step == 3
    trainer.save_final(tmp_path)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "checkpoint-3" / name).read_bytes()


@pytest.mark.parametrize("best", [False, True], ids=["resumed", "best"])
def test_experts_of_a_whole_model_are_read_from_its_checkpoint(best: bool, tmp_path: Path):
    """transformers saves each expert as three matrices, and reads none of them into the stacked weights of the model."""
    source = save_chat_model(tmp_path / "model", experts=4)
    policy = isotype.resolve_precision(source, dtype="float32", trainable="full", device="cpu")
    more = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True} if best else {}
    trainer = trainer_of(isotype.load(source, policy), source, tmp_path / "out", max_steps=2, **more)
    losses = iter([1.0, 2.0])
    trainer.evaluation_loop = lambda *args, **kwargs: transformers.trainer_utils.EvalLoopOutput(
        None, None, {"eval_loss": next(losses)}, 4
    )
    trainer.train()
    saved = tmp_path / "out" / "checkpoint-1"
    if best:  # the weights of the first step, read at the end
        expected = isotype.load(saved, policy).state_dict()
        result = trainer.model.state_dict()
    else:
        expected = trainer.model.state_dict()
        again = trainer_of(isotype.load(source, policy), source, tmp_path / "again", max_steps=2)
        again.train(resume_from_checkpoint=str(saved))
        result = again.model.state_dict()
    assert any("experts.gate_up_proj" in name for name in expected)
    assert [name for name, value in expected.items() if not torch.equal(value, result[name])] == []


def test_an_upload_sees_the_checkpoint_where_it_stays(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pushed: list[tuple[str, bool, bool]] = []

    def keep(self: Any, checkpoint_folder: str) -> None:
        pushed.append((checkpoint_folder, Path(checkpoint_folder).is_dir(), (tmp_path / STAGING).exists()))

    def keep_final(self: Any, *args: Any, **kwargs: Any) -> None:
        pushed.append(
            ("final", (tmp_path / "adapter_model.safetensors").is_file(), (tmp_path / STAGING).exists())
        )

    monkeypatch.setattr(transformers.Trainer, "_push_from_checkpoint", keep)
    monkeypatch.setattr(trl.SFTTrainer, "push_to_hub", keep_final, raising=False)
    trainer = build(path, tmp_path, max_steps=1)
    trainer.args.push_to_hub = True  # set late: the trainer would ask the hub for a repository
    trainer._finish_current_push = lambda: None
    trainer.train()
    trainer.save_final(tmp_path)
    assert pushed == [(str(tmp_path / "checkpoint-1"), True, False), ("final", True, False)]


# Full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 1.2 MB: enough for two checkpoints of half a megabyte, too small for three."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("no mount command: a small file system cannot be made")
    command = ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting a small file system is not permitted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """Set the largest size in bytes of a file that this process may write."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set_limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield set_limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def sft(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the command line quiets the libraries through it
    data = save_rows(tmp_path / "train.jsonl", rows("sft"))
    datasets.disable_progress_bars()

    def run(out: Path, *more: str) -> tuple[int, str, str]:
        arguments = f"""sft --model_name_or_path {path} --dataset_name {data} --output_dir {out} --max_steps 4
            --save_steps 1 --per_device_train_batch_size 2 --quantization nf4 --lora_r 32 --gradient_checkpointing False
            --report_to none --logging_steps 1"""
        status = main([*arguments.split(), *more])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.out + printed.err
        return status, printed.out, printed.err

    yield run
    datasets.enable_progress_bars()


def steps_in(printed: str) -> list[int]:
    return [int(line.split()[1].split("/")[0]) for line in printed.splitlines() if line.startswith("step ")]


def assert_stopped_whole(out: Path, message: str, problem: str) -> None:
    """Assert that the message names the problem and the command that resumes the second checkpoint; both are complete."""
    last = out / "checkpoint-2"
    told, way = message.split("  = ")
    assert told == problem
    assert way.startswith(
        f"nothing else is lost; {last} is complete: resume with:\n    isotype sft --model_name_or_path "
    )
    assert way.endswith(f" --resume_from_checkpoint {last}\n")
    assert whole_checkpoints(out) == [out / "checkpoint-1", last]


def test_a_full_disk_is_one_message_and_everything_saved_before_is_whole(
    small_disk: Path, sft: Callable[..., tuple[int, str, str]]
):
    out = small_disk / "out"
    status, printed, message = sft(out)
    assert status == 1
    assert_stopped_whole(
        out,
        message,
        "error: the disk is full: the checkpoint could not be saved\n"
        f"  - {out}: No space left on device\n"
        "    expected  space for the adapter, and twice as much for the optimizer state\n"
        "    fix       free some space, or set --output_dir on another disk, or --save_total_limit 1\n",
    )
    assert [p.name for p in out.iterdir() if p.name.startswith(".") or p.name == "checkpoint-3"] == []
    assert json.loads((out / "run_report.json").read_text())["status"] == "failed"

    shutil.rmtree(out / "checkpoint-1")
    status, printed, message = sft(
        out, "--resume_from_checkpoint", str(out / "checkpoint-2"), "--save_total_limit", "1"
    )
    assert (status, message) == (0, "")
    assert steps_in(printed) == [3, 4]
    assert (out / "adapter_model.safetensors").is_file()


@few(
    "limit, reason",
    {
        "safetensors": (100_000, os.strerror(errno.EFBIG)),  # it stops in the adapter and names errno
        "torch": (
            200_000,
            os.strerror(errno.EFBIG),
        ),  # torch.save stops in the optimizer state and names none
    },
    "torch",
)
def test_a_limit_on_file_sizes_is_one_message_too(
    limit: int,
    reason: str,
    tmp_path: Path,
    sft: Callable[..., tuple[int, str, str]],
    file_size_limit: Callable[[int], None],
):
    out = tmp_path / "out"
    assert sft(out, "--max_steps", "2")[0] == 0
    file_size_limit(limit)
    status, _, message = sft(out, "--resume_from_checkpoint", "true")
    assert status == 1
    assert_stopped_whole(
        out,
        message,
        "error: the checkpoint could not be saved\n"
        f"  - {out}: {reason}\n"
        "    expected  a directory that accepts files of this size\n"
        "    fix       make it writable and lift limits on file sizes, or set another --output_dir\n",
    )
    file_size_limit(-1)
    status, printed, _ = sft(out, "--resume_from_checkpoint", "true")
    assert status == 0
    assert steps_in(printed) == [3, 4]


def test_a_failure_that_has_nothing_to_do_with_writing_stays_what_it_is(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(self: Any, output_dir: str) -> None:
        raise RuntimeError("No space left on device, says a library that was not writing")

    trainer = build(path, tmp_path, max_steps=1)
    monkeypatch.setattr(transformers.Trainer, "_save_rng_state", broken)
    with pytest.raises(RuntimeError, match="says a library"):
        trainer.train()
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"]


def test_a_checkpoint_that_cannot_be_gone_on_from_says_what_is_missing(
    tmp_path: Path, sft: Callable[..., tuple[int, str, str]]
):
    out = tmp_path / "out"
    assert sft(out, "--max_steps", "2")[0] == 0
    (out / "checkpoint-2" / "optimizer.pt").write_bytes(b"cut off")
    size = (out / "checkpoint-1" / "optimizer.pt").stat().st_size
    status, _, message = sft(out, "--resume_from_checkpoint", str(out / "checkpoint-2"))
    assert status == 2
    assert message == (
        "error: no checkpoint to resume from\n"
        f"  - --resume_from_checkpoint {out / 'checkpoint-2'}: optimizer.pt has 7 of {size} bytes\n"
        "    expected  a complete folder checkpoint-N\n"
        f"    fix       complete checkpoints in {out}: checkpoint-1\n"
    )
    status, printed, _ = sft(out, "--max_steps", "2", "--resume_from_checkpoint", "true")
    assert status == 0
    assert (
        f"note: {out / 'checkpoint-2'} is not complete: optimizer.pt has 7 of {size} bytes\n"
        f"resuming from {out / 'checkpoint-1'}\n"
    ) in printed
    assert steps_in(printed) == [2]


@few("reentrant", [False, True], True)
def test_nothing_below_the_first_adapter_has_a_graph(tmp_path: Path, reentrant: bool) -> None:
    path = save_chat_model(tmp_path / "model", layers=2)
    policy = isotype.resolve_precision(path, dtype="float32", device="cpu")
    transformers.set_seed(0)
    model = isotype.add_lora(
        isotype.load(path, policy),
        policy,
        r=4,
        target_modules=["q_proj", "down_proj"],
        layers_to_transform=[1],
    )
    trainer = trainer_of(
        model,
        path,
        tmp_path,
        max_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    blocks = trainer.model.get_base_model().model.layers
    seen: list[bool] = []
    blocks[1].register_forward_pre_hook(lambda block, args: seen.append(args[0].requires_grad))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert set(seen) == {reentrant}
    after = dict(trainer.model.named_parameters())
    assert all(not torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_reference_model_computes_as_the_model_that_is_trained(
    path: Path, tmp_path: Path, dtype: str
) -> None:
    """Before the first update both models are equal, so DPO's loss begins at log 2."""
    policy = isotype.resolve_precision(path, dtype=dtype, device="cpu", trainable="full")
    model = isotype.load(path, policy)
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path), max_steps=1, bf16=False, gradient_checkpointing=False, report_to="none", disable_tqdm=True,
        use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    for name, value in precision_arguments(policy).items():
        setattr(arguments, name, value)
    trainer = policy_trainer(trl.DPOTrainer)(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows("dpo", 8)),
        processing_class=transformers.AutoTokenizer.from_pretrained(path),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    enforce_trainer(trainer, policy, masters_of(model))
    made: dict[str, list[torch.Tensor]] = {"model": [], "reference": []}
    for name, each in (("model", trainer.model), ("reference", trainer.ref_model)):
        for module in each.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.RMSNorm) or "RMSNorm" in type(module).__name__:
                module.register_forward_hook(lambda _, args, out, to=made[name]: to.append(out.detach()))
    trainer.train()
    assert made["reference"]
    for one, other in zip(made["model"], made["reference"], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
