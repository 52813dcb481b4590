"""What one of several processes does: jobs from a JSON file, one after another in one process group."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from benchmarks.sharded_memory import CASES, real
from torch import distributed
from torch.distributed.tensor import DTensor

import isotype
from isotype.checkpoint.shard import load_sharded
from isotype.cli.main import main as command
from isotype.lora.modules import FusedLora
from isotype.model.shard import free_gathered, shard_model
from isotype.precision.policy import LayerStorage, ModuleException


def train(argv: list[str], *, checked: bool = True) -> int:
    """Run a training command as the command line does, without the check before the first step unless `checked`; returns its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        if not checked:
            patch.setattr("isotype.train.callback.before_first_step", lambda *_: None)
        return command(argv)


def load(
    path: str,
    precision: dict[str, Any],
    changes: dict[str, Any],
    lora: dict[str, Any],
    model_class: str | None = None,
) -> dict[str, Any]:
    """Load a model whole and sharded, take a step with each; returns how they differ and what was read.

    Args:
        path: checkpoint directory or GGUF file.
        precision: arguments of `isotype.resolve_precision`.
        changes: fields of the policy to change.
        lora: arguments of `isotype.add_lora`; none for training every weight.
        model_class: of transformers, where it is not the config's own.
    """
    policy = replace(isotype.resolve_precision(path, device="cpu", **precision), **_dtypes(changes))
    adapt = (lambda model: isotype.add_lora(model, policy, **lora)) if lora else None
    settings = {"model_class": getattr(transformers, model_class), "num_labels": 1} if model_class else {}
    torch.manual_seed(0)
    whole = isotype.load(path, policy, **settings)
    whole = whole if adapt is None else adapt(whole)
    torch.manual_seed(0)
    sharded = load_sharded(path, policy, adapt, **settings)
    changed = isotype.enforce(sharded, policy)
    files = [Path(path)] if Path(path).is_file() else Path(path).glob("*.safetensors")
    return {
        "differences": _differences(whole, sharded),
        "changed": [str(change) for change in changed or ()],
        "sharded": all(isinstance(parameter, DTensor) for parameter in sharded.parameters()),
        "steps": [_step(model) for model in (whole, sharded)],
        "read": sharded.bytes_read / sum(file.stat().st_size for file in files),
    }


def _dtypes(changes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: getattr(torch, value) if isinstance(value, str) and hasattr(torch, value) else value
        for name, value in changes.items()
    } | {name: made(changes[name]) for name, made in _MADE.items() if name in changes}


_MADE: dict[str, Callable[[Any], Any]] = {
    "pinned": tuple,
    "layers": lambda layers: tuple(LayerStorage(name, *each) for name, each in layers.items()),
    "exceptions": lambda modules: tuple(ModuleException(name, *options) for name, options in modules.items()),
}


def _differences(whole: Any, sharded: Any) -> list[str]:
    """Names of parameters and buffers that are not the same, bit by bit and in dtype."""
    expected = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    found = {**dict(sharded.named_parameters()), **dict(sharded.named_buffers())}
    names = sorted(set(expected) ^ set(found))
    for name in sorted(set(expected) & set(found)):
        tensor = found[name]
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        same = full.dtype == expected[name].dtype and full.shape == expected[name].shape
        if not (same and torch.equal(_bits(full), _bits(expected[name].data))):
            names.append(name)
    return names


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # As bytes: codes that are packed in a float dtype may look like NaN, which equals nothing.
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _step(model: Any) -> list[float]:
    """(loss, gradient norm) of a step; every process takes the same rows, so that gradients are those of one."""
    ids = torch.arange(24).reshape(2, 12) % 60
    model.train()
    torch.manual_seed(1)  # dropout
    autocast = model.precision_policy.autocast
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        output = model(input_ids=ids)
    logits = output.logits.float()
    if logits.ndim == 2:  # a score for each row
        loss = logits.square().mean()
    else:
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    return [float(loss.detach()), float(torch.cat([grad.double().flatten() for grad in whole]).norm())]


def fuse(
    path: str,
    precision: dict[str, Any],
    lora: dict[str, Any],
    *,
    reshard: bool = True,
    checkpointing: bool = False,
    apart: bool = False,
) -> dict[str, Any]:
    """Three steps of a model whole and sharded, each by PEFT's path and fused: losses, gradients, and what is held between.

    Args:
        path: checkpoint directory.
        precision: arguments of `isotype.resolve_precision`.
        lora: arguments of `isotype.add_lora`.
        reshard: whether blocks are freed after their forward.
        checkpointing: whether layers are computed again in the backward.
        apart: whether adapters of `q_proj` are bfloat16, which puts them into groups of their own.
    """
    policy = isotype.resolve_precision(path, device="cpu", **precision)

    def adapt(model: Any) -> Any:
        adapted = isotype.add_lora(model, policy, **lora)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.02, generator=generator)
        return adapted

    def model_of(sharded: bool) -> Any:
        torch.manual_seed(0)
        model = adapt(isotype.load(path, policy))
        if apart:
            for name, parameter in model.named_parameters():
                if "q_proj.lora" in name:
                    parameter.data = parameter.data.bfloat16()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return shard_model(model, policy, reshard=reshard) if sharded else model

    results: dict[str, Any] = {"steps": {}}
    for sharded in (False, True):
        for fused in (False, True):
            model = model_of(sharded)
            report = isotype.fuse(model) if fused else None
            if sharded and report is not None:
                results |= _between(model, report)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
            steps = []
            for _ in range(3):
                steps.append(_step(model))
                optimizer.step()
                optimizer.zero_grad()
            results["steps"][f"{'sharded' if sharded else 'whole'} {'fused' if fused else 'peft'}"] = steps
            if sharded and fused:
                results["held"] = _held(model)
    return results


def _between(model: Any, report: Any) -> dict[str, Any]:
    return {
        "sharded": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "fused": len(report.fused),
        "together": len(report.together),
        "left": sorted(set(report.left.values())),
        "copies": report.copies,
        "unseen": report.unseen,
        "norms": len(report.norms),
        "sides": sorted(report.attention.sides),
    }


def _held(model: Any) -> int:
    """Bytes that the fused layers' readings keep of gathered parameters, when a forward is over that nothing follows."""
    with torch.no_grad():
        model(input_ids=torch.arange(12)[None])
    free_gathered(model)
    readings = [
        r for m in model.modules() if isinstance(m, FusedLora) for r in m.lora_siblings._readings.values()
    ]
    assert readings
    read = [
        t
        for r in readings
        for t in (*r.tensors, *r._parameters)
        if t is not None and not isinstance(t, DTensor)
    ]
    return sum(tensor.untyped_storage().nbytes() for tensor in read)


def hold(path: str, case: str) -> dict[str, int]:
    """Bytes that this process holds at most in each phase of a step, see `benchmarks/sharded_memory.py`."""
    return real(Path(path), CASES[case])


JOBS: dict[str, Callable[..., Any]] = {"train": train, "load": load, "fuse": fuse, "hold": hold}


def main(described: Path, answers: Path) -> None:
    """Do the jobs that one file describes; another gets what each process gave for each job."""
    jobs = json.loads(described.read_text())
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
    results = [JOBS[job.pop("job")](**job) for job in jobs]
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, results)
    if distributed.get_rank() == 0:
        answers.write_text(json.dumps(every))
    distributed.destroy_process_group()
