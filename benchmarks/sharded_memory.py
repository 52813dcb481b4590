"""Peak memory of one of several processes that `isotype.check(…, devices=N)` foresees, beside what it really holds.

Each case is one step (forward, backward, AdamW) in processes that train together over gloo on this machine's CPU: sharded by FSDP2
as `isotype sft --fsdp full_shard` does it (`isotype.checkpoint.shard.load_sharded`), or each with the whole model (DDP). *Foreseen* is
from the config alone, on fake tensors, in one process. *Real* is the peak of what torch's allocator handed out in a process
(torch.profiler) besides what its tensors held before, of the process with the most.

Run: python benchmarks/sharded_memory.py [--processes N] [CASE …]. Prints a table and one line of JSON; ends with 1 where a case is off
by more than ten percent. Where every weight is trained, a real process may hold copies of one block in the compute dtype beyond the
backward, which is not foreseen.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import isotype
from isotype.checkpoint.checkpoint import open_model
from isotype.checkpoint.shard import load_sharded
from isotype.train.models import weightless_model

TOLERANCE = 0.10
ROWS, LENGTH = 1, 128
LORA: dict[str, Any] = {"r": 8, "target_modules": "all-linear"}

# Weights of a block of the order of its activations, as in a large model; the vocabulary small beside them, as there.
_SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


_GLOO_LETS_GO = 1e-3  # seconds


@dataclass(frozen=True)
class Case:
    """One set-up.

    Attributes:
        dtype, quantization: as `isotype.resolve_precision` takes them.
        fsdp: 2 for FSDP2, 0 for DDP.
        reshard: whether a block's gathered weights are freed after its forward.
        lora: whether adapters are trained; else every parameter.
        checkpointing: whether activations are computed again in the backward.
    """

    dtype: str = "bfloat16"
    quantization: str | None = None
    fsdp: int = 2
    reshard: bool = True
    lora: bool = True
    checkpointing: bool = False


CASES = {
    "bf16 FSDP2": Case(),
    "bf16 FSDP2, checkpointing": Case(checkpointing=True),
    "bf16 FSDP2, not resharded": Case(reshard=False),
    "bf16 FSDP2, full": Case(lora=False),
    "bf16 FSDP2, full, checkpointing": Case(lora=False, checkpointing=True),
    "float32 FSDP2": Case("float32"),
    "nf4 FSDP2": Case(quantization="nf4"),
    "nf4 FSDP2, checkpointing": Case(quantization="nf4", checkpointing=True),
    "int8 FSDP2": Case(quantization="int8"),
    "bf16 DDP": Case(fsdp=0),
    "bf16 DDP, full": Case(fsdp=0, lora=False),
    "nf4 DDP": Case(quantization="nf4", fsdp=0),
    "nf4 DDP, checkpointing": Case(quantization="nf4", fsdp=0, checkpointing=True),
}


def save_model(directory: Path, **sizes: int) -> Path:
    """A random model's checkpoint; `sizes` are fields of its config."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**_SIZES | sizes, dtype=torch.bfloat16)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


def batch() -> dict[str, torch.Tensor]:
    """The rows of one process."""
    ids = torch.randint(1, 512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def policy_of(path: Path, case: Case) -> Any:
    """The precision policy of a case."""
    trainable = "lora" if case.lora else "full"
    return isotype.resolve_precision(
        str(path), dtype=case.dtype, quantization=case.quantization, device="cpu", trainable=trainable
    )


def foreseen(path: Path, case: Case, processes: int, fold: bool = False) -> Any:
    """The report on a step of a case, from the config alone."""
    policy = policy_of(path, case)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", **LORA) if case.lora else None
    model = weightless_model(open_model(path).model_config, policy, lora=lora, fold=fold)
    _prepare(model, case)
    return isotype.check(
        model,
        batch(),
        policy,
        device="cpu",
        learning_rate=1e-4,
        fsdp=case.fsdp,
        devices=processes,
        reshard=case.reshard,
        verify=False,
    )


def _prepare(model: Any, case: Case) -> None:
    model.config.use_cache = False
    if case.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()


def real(path: Path, case: Case) -> dict[str, int]:
    """Bytes at the peak of the step in this process, and before it."""
    earlier = storages_alive()
    policy = policy_of(path, case)

    def adapt(model: Any) -> Any:
        return isotype.add_lora(model, policy, **LORA) if case.lora else model

    model = (
        load_sharded(path, policy, adapt, reshard=case.reshard)
        if case.fsdp
        else adapt(isotype.load(path, policy))
    )
    _prepare(model, case)
    meter = Meter(earlier)
    with meter:
        if not case.fsdp:
            model = torch.nn.parallel.DistributedDataParallel(model)
            # What it sends to make all processes' weights alike is gone again when a step begins.
            meter.peaks.clear()
            meter.begin("load")
        _step(model, policy, batch(), meter)
    return meter.peaks


Storage = weakref.ref[torch.UntypedStorage]


def storages_alive() -> dict[int, Storage]:
    """The storages of all tensors of this process that Python knows."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and not each.is_meta]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return {each.untyped_storage()._cdata: weakref.ref(each.untyped_storage()) for each in local}


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that the operators of this process make, each by the bytes that it has at the moment.

    Gathered weights are freed by shrinking their storages to nothing. The allocator's own events would not do: gloo frees
    on threads of its own, of which torch.profiler hears nothing. What such a thread still holds of a collective that is over,
    because it has not been scheduled since, is not the step's: a new peak counts if it is still there a millisecond later.

    Args:
        earlier: storages that are not counted: of what ran before.

    Attributes:
        peaks: phase -> the most bytes that were alive during it.
    """

    def __init__(self, earlier: Mapping[int, Storage]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peaks: dict[str, int] = {}
        self._phase = "load"
        self._earlier = earlier
        self._storages: dict[int, Storage] = {}
        for key, reference in storages_alive().items():
            if not self._is_earlier(key, reference()):
                self._storages[key] = reference
        self._count()

    def _is_earlier(self, key: int, storage: torch.UntypedStorage | None) -> bool:
        return key in self._earlier and self._earlier[key]() is storage

    def begin(self, phase: str) -> None:
        """What is alive from now on counts for `phase`."""
        self._phase = phase
        self._count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # seen again as what it does on this process's part
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._add(each)
        self._count()
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if not self._is_earlier(storage._cdata, storage):
            self._storages[storage._cdata] = weakref.ref(storage)

    def _count(self) -> None:
        peak = self.peaks.get(self._phase, 0)
        if self._total() > peak:
            time.sleep(_GLOO_LETS_GO)
            self.peaks[self._phase] = max(peak, self._total())

    def _total(self) -> int:
        alive = {
            key: storage for key, reference in self._storages.items() if (storage := reference()) is not None
        }
        self._storages = {key: self._storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())


def _step(model: Any, policy: Any, inputs: dict[str, torch.Tensor], meter: Meter) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    meter.begin("forward")
    with torch.autocast("cpu", dtype=policy.autocast, enabled=policy.autocast is not None):
        loss = model(**inputs).loss
    meter.begin("backward")
    loss.backward()
    del loss
    meter.begin("optimizer")
    optimizer.step()


def in_processes(path: Path, names: list[str], processes: int) -> list[dict[str, dict[str, int]]]:
    """What each of several processes measures of each case."""
    results = path / "results.json"
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(processes),
    ]
    command = [*launch, __file__, "--rank", str(path), *names]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    measured: list[dict[str, dict[str, int]]] = json.loads(results.read_text(encoding="utf-8"))
    return measured


def _rank(path: Path, names: list[str]) -> None:
    distributed.init_process_group("gloo")
    own = {name: real(path, CASES[name]) for name in names}
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, own)
    if distributed.get_rank() == 0:
        (path / "results.json").write_text(json.dumps(every), encoding="utf-8")
    distributed.destroy_process_group()


def of_first_step(memory: Any) -> dict[str, int]:
    """Phase -> bytes of the first step, which begins without optimizer states. A report has the most bytes of any step."""
    return {
        phase: sum(size for kind, size in kinds.items() if phase == "optimizer" or kind != "optimizer")
        for phase, kinds in memory.phases.items()
    }


def compare(names: list[str], processes: int) -> dict[str, dict[str, Any]]:
    """Foreseen and real peaks of cases, and by how much they differ."""
    with tempfile.TemporaryDirectory() as directory:
        path = save_model(Path(directory))
        measured = in_processes(path, names, processes)
        rows = {}
        for name in names:
            memory = foreseen(path, CASES[name], processes).memory
            phases = {phase: max(each[name][phase] for each in measured) for phase in measured[0][name]}
            held = phases.pop("load")
            first = of_first_step(memory)
            phase = max(phases, key=first.__getitem__)
            rows[name] = {
                "foreseen": first[phase],
                "real": max(phases.values()),
                "error": first[phase] / max(phases.values()) - 1,
                "phase": phase,
                "real_phase": max(phases, key=phases.__getitem__),
                "held": [first["load"], held],
                "phases": {phase: [first[phase], phases[phase]] for phase in phases},
                "kinds": memory.phases[phase],
            }
    return rows


def main() -> int:
    """Run the cases, all by default, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    request = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    names = request.cases or list(CASES)
    if request.rank is not None:
        _rank(request.rank, names)
        return 0
    rows = compare(names, request.processes)
    print(
        f"{'case':<32} {'foreseen':>12} {'real':>12} {'error':>8}   {'peak in':<10} forward   backward  optimizer"
    )
    for name, row in rows.items():
        errors = "".join(f"{100 * (told / real - 1):>+8.2f}% " for told, real in row["phases"].values())
        print(
            f"{name:<32} {_mib(row['foreseen'])} {_mib(row['real'])} {100 * row['error']:>+7.2f}%   "
            f"{row['real_phase']:<9} {errors}"
        )
    worst = max(abs(row["error"]) for row in rows.values())
    print(f"largest error {100 * worst:.2f} %, tolerance {100 * TOLERANCE:.0f} %")
    print(json.dumps(rows))
    return int(worst > TOLERANCE)


def _mib(size: int) -> str:
    return f"{size / 2**20:>8.2f} MiB"


if __name__ == "__main__":
    sys.exit(main())
