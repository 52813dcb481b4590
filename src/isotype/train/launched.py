"""Support for runs in several processes: launchers (torchrun, accelerate), `--fsdp`, DeepSpeed, and failed processes."""

import atexit
import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from isotype.core.dtypes import dtype_name
from isotype.core.errors import PrecisionError, Problem, TrainingError, UsageError

T = TypeVar("T")

# Error messages of gloo and NCCL if the process at the other end of a connection has ended.
_GONE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|remote process has terminated|timed out",
    re.I,
)


@dataclass(frozen=True)
class Sharding:
    """The settings with which FSDP shards a model over processes.

    Attributes:
        reshard: True if a block's gathered weights are freed after its forward and gathered again for its backward.
        offload: True if the user requests weights in CPU memory. Offloading is not supported.
        source: name of the argument that sets the FSDP `version`.
    """

    reshard: bool = True
    checkpointing: bool = False
    version: int = 2
    offload: bool = False
    source: str = field(default="--fsdp_config version", compare=False)


def take_sharding(settings: Any) -> Sharding | None:
    """Return the sharding that `--fsdp` or `accelerate launch` requests, or None. Raise UsageError if isotype does not
    support the requested sharding.

    accelerate would load the whole model in every process, and does not shard on a CPU. Therefore isotype shards the model
    during loading (`isotype.checkpoint.shard`). This function unsets ACCELERATE_USE_FSDP, to prevent accelerate from
    sharding.
    """
    sharding = requested_sharding(settings.training)
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    if sharding is not None and (problems := list(_problems(sharding, settings))):
        raise UsageError("the model cannot be sharded with these arguments", problems)
    return sharding


def processes() -> int:
    """Return the number of processes that a launcher has started for this run, or 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def from_rank_0(compute: Callable[[], T]) -> T:
    """Call `compute` in rank 0 only. Return the result, or raise the exception, in every process."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return compute()
    box: list[Any] = [None]
    if distributed.get_rank() == 0:
        try:
            box = [(compute(), None)]
        except Exception as error:  # noqa: BLE001 - it is raised in every process below
            box = [(None, error)]
    distributed.broadcast_object_list(box, src=0)
    result, failure = box[0]
    if failure is not None:
        raise failure
    answer: T = result
    return answer


def requested_sharding(training: Any) -> Sharding | None:
    """Return the requested sharding (supported or not), or None if no sharding is requested."""
    config: Mapping[str, Any] = training.fsdp_config if isinstance(training.fsdp_config, Mapping) else {}
    version, source = 2, "--fsdp_config version"
    if not training.fsdp:
        if os.environ.get("ACCELERATE_USE_FSDP", "").lower() not in ("true", "1"):
            return None
        # accelerate's `prepare_multi_gpu_env` writes its config into these variables (utils/launch.py).
        config = {k.removeprefix("FSDP_").lower(): v for k, v in os.environ.items() if k.startswith("FSDP_")}
        version, source = 1, "fsdp_version"
    return Sharding(
        reshard=_true(config.get("reshard_after_forward", True)),
        checkpointing=_true(config.get("activation_checkpointing", False)),
        version=int(config.get("version", version)),
        offload=_true(config.get("cpu_offload", config.get("offload_params", False))),
        source=source,
    )


def _true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "full_shard")


def _problems(sharding: Sharding, settings: Any) -> Iterator[Problem]:
    if sharding.version != 2:
        fix = f"set {sharding.source} to 2, because FSDP1 flattens parameters of several dtypes into one"
        yield Problem(f"{sharding.source} {sharding.version}", "FSDP2", fix)
    if sharding.offload:
        expected = "weights on the device, because offloading them to CPU memory is not supported"
        fix = "omit it; --quantization nf4 and more processes reduce the memory per device"
        yield Problem("FSDP with cpu_offload (fsdp_offload_params)", expected, fix)
    yield from whole_weight_problems(settings)


def whole_weight_problems(settings: Any) -> Iterator[Problem]:
    """Yield a problem for each argument that needs whole weights, because no process of a sharded run has whole weights."""
    training = settings.training
    if settings.use_dora and settings.method.compares(training):
        why = "DoRA of the reference adapter needs norms of whole weights, and no process has them"
        fix = "omit it, or train without --fsdp (DDP: every process has the whole model)"
        yield Problem(f"--use_dora in {settings.method.name}", f"plain LoRA: {why}", fix)
    if settings.use_dora and settings.precision.quantization == "int8":
        expected = "weights in 4 or 16 bits, because PEFT does not dequantize sharded int8 weights for DoRA"
        fix = "--quantization nf4, or omit --use_dora"
        yield Problem("--use_dora --quantization int8", expected, fix)
    template = getattr(training, "chat_template_path", None)
    if template is not None:
        expected = "the model's own chat template, because tokens cannot be added to a sharded embedding"
        yield Problem(f"--chat_template_path {template}", expected, "omit --fsdp")


@contextmanager
def lost_process_named(trainer: Any, resume_command: Callable[[Path], str]) -> Iterator[None]:
    """If a collective operation fails because another process has ended, raise TrainingError with a command that resumes the run."""
    try:
        yield
    except RuntimeError as error:
        if trainer.accelerator.num_processes == 1 or not _GONE.search(str(error)):
            raise
        # The launcher now sends SIGTERM to this process, but the process must still print the reason.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        process = f"process {trainer.args.process_index} of {trainer.args.world_size}"
        what = f"step {trainer.state.global_step + 1}: {process} waited for another process, which has ended"
        fix = "read the message of that process above; if the system killed the process (signal 9, out of memory), there is no message"
        hint = "no checkpoint has been saved yet; --save_steps N saves one every N steps"
        if checkpoint := trainer.last_checkpoint():
            hint = f"{checkpoint} is complete: resume with\n    {resume_command(checkpoint)}"
        headline, expected = "another process of the run has ended", "all processes of the run"
        raise TrainingError.of(headline, what, expected, fix, hint=hint) from error


@cache
def leave_group_at_exit() -> None:
    """Destroy the process group when this process exits, because transformers and accelerate leave the group open.

    Threads of an open group sometimes make Python's shutdown fail with SIGABRT ("terminate called without an active
    exception", https://github.com/pytorch/pytorch/issues/190489). Call `leave_group_at_exit` only after a complete
    training, because destroying a group may wait for a process that has died.
    """
    atexit.register(_leave_group)


def _leave_group() -> None:
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


_SAME = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
}
"""Maps a key of a DeepSpeed config to the argument that must have the same value."""
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def config_problems(settings: Any) -> Iterator[Problem]:
    """Yield a problem for each value of the DeepSpeed config that contradicts an argument or another value of the config.

    transformers (`HfTrainerDeepSpeedConfig`) compares these values only after it has loaded the model.
    """
    config, name = deepspeed_config(settings.deepspeed)
    for key, argument in _SAME.items():
        mine, other = value_in(config, key), getattr(settings, argument)
        if isinstance(mine, (int, float)) and isinstance(other, (int, float)) and mine != other:
            what = f"{key} {mine:g} in {name}, and --{argument} {other:g}"
            yield Problem(what, "the same value", f'"{key}": "auto" in {name}, or --{argument} {mine:g}')
    for key in (*_SAME, *(f"{part}.enabled" for part in _DTYPES)):
        if isinstance(text := value_in(config, key), str) and text != "auto":
            yield Problem(
                f'{key} "{text}" in {name}', 'a value without quotes, or "auto"', "remove the quotes"
            )
    betas, arguments = value_in(config, "optimizer.params.betas"), [settings.adam_beta1, settings.adam_beta2]
    if isinstance(betas, list) and betas != arguments:
        what = f"optimizer.params.betas {betas} in {name}, and --adam_beta1 and --adam_beta2 {arguments}"
        yield Problem(what, "the same values", f'"betas": "auto" in {name}')
    rows, total = settings.per_device_train_batch_size, value_in(config, "train_batch_size")
    if isinstance(rows, int) and isinstance(total, int):
        step, count = rows * settings.gradient_accumulation_steps, processes()
        if step > 0 and (total % step or (count > 1 and total != step * count)):
            what = f"train_batch_size {total} in {name}, and {step} rows in an optimizer step of each process"
            yield Problem(what, "the rows of all processes", f'"train_batch_size": "auto" in {name}')
    if all(value_in(config, f"{part}.enabled") is True for part in _DTYPES):
        fix = f'"enabled": "auto" in both sections of {name}'
        yield Problem(f"fp16.enabled true and bf16.enabled true in {name}", "at most one of them", fix)


def check_dtype(settings: Any, compute: torch.dtype) -> None:
    """Raise PrecisionError if the DeepSpeed config enables another dtype than `compute`, or disables `compute`."""
    config, name = deepspeed_config(settings.deepspeed)
    for part, dtype in _DTYPES.items():
        enabled = value_in(config, f"{part}.enabled")
        if isinstance(enabled, bool) and enabled != (dtype == compute):
            state = str(enabled).lower()
            what = f"{part}.enabled {state} in {name}, and {dtype_name(compute)} as the compute dtype"
            expected = "a config that enables the compute dtype, and no other dtype"
            other = f", or --dtype {dtype_name(dtype)}" if enabled else ""
            fix = f'"{part}": {{"enabled": "auto"}} in {name}{other}'
            raise PrecisionError.of("the DeepSpeed config and the policy disagree", what, expected, fix)


def deepspeed_config(config: Any) -> tuple[Any, str]:
    """Return (config, name for messages) of `--deepspeed`, which is a dict, JSON, or a path.

    The config is empty without DeepSpeed, and if its file cannot be read.
    """
    if isinstance(config, dict):
        return config, "the DeepSpeed config"
    text = str(config or "{}")
    try:
        written = text.lstrip().startswith("{")
        return json.loads(text if written else Path(text).read_text(encoding="utf-8")), text
    except (OSError, ValueError):
        return {}, text  # DeepSpeed's error names the file


def value_in(config: Any, key: str) -> Any:
    """Return the value of `config` at a dotted key (`zero_optimization.stage`); None without this key."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config
