"""Everything that wants a GPU, in one call, on a machine that may have no network: JSON out, one file a part.

- contracts: what each operator accepts on this device (`python -m isotype.contracts.measure`), a table for
  `src/isotype/contracts/tables/`;
- agreement: a sample of `benchmarks/agreement.py`, real steps on the device;
- memory: `benchmarks/memory.py`, foreseen bytes beside those that torch's allocator hands out;
- fused: outputs and gradients of fused layers and of PEFT's own against float64, every base × variant × dtype;
- small: `benchmarks/small_adapter.py`, how much of an adapter's output arrives in bfloat16 and float16;
- switching: bf16, fp16 and bf16 again in one process, alternating, and on two streams at once: the bits of each model alone;
- train: `benchmarks/gpu_train.py`, a model of Llama-3-8B's shape by isotype, TRL, TRL with Liger's kernels, unsloth.

A part that fails or runs out of time says so in its file, and the others go on. On a CPU (`--device cpu --small`) the whole
script runs in some minutes, to see that it works; its figures mean nothing there.

Run: python benchmarks/gpu.py [--device cuda] [--out build/gpu] [--parts contracts agreement …] [--small] [--minutes 9]
     [--train "--layers 32 --rows 4 --tokens 2048 --steps 8"]
Prints a line for each part and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "trl",
    "bitsandbytes",
    "liger-kernel",
    "unsloth",
    "accelerate",
)


@dataclass(frozen=True)
class Asked:
    """What the call asks for; the same in the processes of the parts."""

    device: str
    out: str
    small: bool
    train: tuple[str, ...]


# ------------------------------------------------------------------------------------------ parts


def machine(asked: Asked) -> dict[str, Any]:
    """The device and the versions."""
    found: dict[str, Any] = {
        "host": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    if asked.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"name": properties.name, "bytes": properties.total_memory}
        found |= {"capability": list(torch.cuda.get_device_capability(0)), "cuda": torch.version.cuda}
    found["versions"] = {name: _version(name) for name in PACKAGES}
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def contracts(asked: Asked) -> dict[str, Any]:
    """The table of the device, as its file."""
    path = Path(asked.out) / f"{asked.device}.json"
    base = ["--base", "cpu-avx2"] if asked.device == "cpu" else []
    _call(
        [sys.executable, "-m", "isotype.contracts.measure", "--device", asked.device, *base, "-o", str(path)]
    )
    return {"table": path.name, "operators": len(json.loads(path.read_text(encoding="utf-8"))["operators"])}


def agreement(asked: Asked) -> dict[str, Any]:
    """The last line of the benchmark."""
    limit = "12" if asked.small else "400"
    cache = Path(asked.out) / "agreement-real.json"
    more = [
        "--device",
        asked.device,
        "--limit",
        limit,
        "--real-cache",
        str(cache),
        "--jobs",
        "1" if asked.small else "8",
    ]
    return _last_json(_call([sys.executable, "benchmarks/agreement.py", *more], fails=True))


def memory(asked: Asked) -> dict[str, Any]:
    """The last line of the benchmark."""
    cases = ["llama LoRA"] if asked.small else []
    return _last_json(
        _call([sys.executable, "benchmarks/memory.py", "--device", asked.device, *cases], fails=True)
    )


def fused(asked: Asked) -> dict[str, Any]:
    """Relative errors of a fused layer and of PEFT's own against float64, the largest of output and gradients."""
    rows, worse = [], []
    for storage in ("none", "nf4", "fp4", "int8"):
        for variant in ({}, {"use_rslora": True}, {"use_dora": True}):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                own, peft = (
                    _error(storage, variant, dtype, asked.device, fuse=fuse) for fuse in (True, False)
                )
                row = {"storage": storage, **variant, "dtype": str(dtype), "fused": own, "peft": peft}
                rows.append(row)
                if own > 1.5 * peft + 1e-6:
                    worse.append(row)
    return {"rows": rows, "less_exact_than_peft": worse}


def _error(storage: str, variant: dict[str, Any], dtype: torch.dtype, device: str, *, fuse: bool) -> float:
    import isotype

    model = _layers(storage, variant, dtype, device)
    x = torch.randn(3, 37, 256, generator=torch.Generator().manual_seed(1)).to(device, dtype).requires_grad_()
    exact = _exact(model, x.detach())
    if fuse:
        isotype.fuse(model, {"x": x.detach()})
    made = _step(model, x)
    return max(
        float((own.double() - one).norm() / one.norm().clamp_min(1e-30))
        for own, one in zip(made, exact, strict=True)
    )


class _Net(torch.nn.Module):
    def __init__(self, make: Callable[[int, int], torch.nn.Module]) -> None:
        super().__init__()
        self.up, self.down = make(256, 512), make(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(torch.nn.functional.silu(self.up(x)))
        return made


def _layers(storage: str, variant: dict[str, Any], dtype: torch.dtype, device: str) -> Any:
    """Two adapted layers with weights of the same seed."""
    import bitsandbytes as bnb
    import peft

    torch.manual_seed(0)

    def make(columns: int, rows: int) -> torch.nn.Module:
        dense = torch.nn.Linear(columns, rows, dtype=dtype)
        if storage == "none":
            return dense
        if storage == "int8":
            layer: Any = bnb.nn.Linear8bitLt(columns, rows, has_fp16_weights=False)
            layer.weight = bnb.nn.Int8Params(dense.weight.data, requires_grad=False, has_fp16_weights=False)
        else:
            layer = bnb.nn.Linear4bit(columns, rows, compute_dtype=dtype, quant_type=storage)
            layer.weight = bnb.nn.Params4bit(dense.weight.data, requires_grad=False, quant_type=storage)
        layer.bias = dense.bias
        made: torch.nn.Module = layer
        return made

    net = _Net(make).to(device)
    config = peft.LoraConfig(
        r=16, lora_alpha=32, target_modules=["up", "down"], init_lora_weights=False, **variant
    )
    return peft.get_peft_model(net, config)


def _step(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """[output, gradient of x, gradients of the adapters]"""
    out = model(x)
    weight = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), [x, *trained])]


def _exact(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The same in float64, from the weights that the layers hold, with PEFT's own code on dense layers."""
    import copy

    from isotype.lora.weights import dense

    twin = copy.deepcopy(model)
    for layer in (twin.base_model.model.up, twin.base_model.model.down):
        base = layer.get_base_layer()
        linear = torch.nn.Linear(base.in_features, base.out_features, device=x.device, dtype=torch.float64)
        linear.weight.data = dense(base, torch.float32).double()
        linear.bias.data = base.bias.data.double()
        layer.base_layer = linear.requires_grad_(False)
        kind = next(
            cls for cls in type(layer).__mro__ if cls.__name__ in ("Linear", "Linear4bit", "Linear8bitLt")
        )
        if kind.__name__ != "Linear":
            from peft.tuners.lora.layer import Linear

            layer.__class__ = Linear
    return _step(twin.double(), x.double().requires_grad_())


def small(asked: Asked) -> dict[str, Any]:
    """The last lines of the benchmark."""
    base = [sys.executable, "benchmarks/small_adapter.py", "--device", asked.device, "--dtype"]
    return {dtype: _last_json(_call([*base, dtype]))["rows"] for dtype in ("bfloat16", "float16")}


def switching(asked: Asked) -> dict[str, Any]:
    """Whether models of other dtypes leave a model's bits alone, in turn, alternating and at once."""
    import isotype

    device, found = asked.device, {}
    for storage in ("none", "nf4", "int8"):
        models = {dtype: _layers(storage, {}, dtype, device) for dtype in (torch.bfloat16, torch.float16)}
        inputs = {
            dtype: torch.randn(8, 64, 256, generator=torch.Generator().manual_seed(2)).to(device, dtype)
            for dtype in models
        }
        for dtype, model in models.items():
            isotype.fuse(model, {"x": inputs[dtype]})

        def run(dtype: torch.dtype, models: Any = models, inputs: Any = inputs) -> list[torch.Tensor]:
            return _step(models[dtype], inputs[dtype].clone().requires_grad_())

        alone = {dtype: run(dtype) for dtype in models}
        same = all(
            torch.equal(a, b)
            for dtype in [*models, *models] * 2
            for a, b in zip(run(dtype), alone[dtype], strict=True)
        )
        found[storage] = {"alternating": same, "at once": _at_once(run, alone, device)}
    return found


def _at_once(
    run: Callable[[torch.dtype], list[torch.Tensor]],
    alone: dict[torch.dtype, list[torch.Tensor]],
    device: str,
) -> bool:
    """Threads, each on a stream of its own where the device has streams."""
    results: dict[torch.dtype, list[list[torch.Tensor]]] = {dtype: [] for dtype in alone}

    def work(dtype: torch.dtype) -> None:
        if device == "cpu":
            results[dtype] = [run(dtype) for _ in range(20)]
            return
        stream: Any = torch.Stream(device=device)
        with stream:
            results[dtype] = [run(dtype) for _ in range(20)]
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return all(
        len(results[dtype]) == 20
        and all(torch.equal(a, b) for each in results[dtype] for a, b in zip(each, alone[dtype], strict=True))
        for dtype in alone
    )


def train(asked: Asked) -> dict[str, Any]:
    """The last line of the benchmark."""
    more = ["--device", asked.device, "--out", asked.out, *(["--small"] if asked.small else asked.train)]
    return _last_json(_call([sys.executable, "benchmarks/gpu_train.py", *more]))


PARTS: dict[str, Callable[[Asked], dict[str, Any]]] = {
    part.__name__: part for part in (machine, fused, small, switching, train, memory, agreement, contracts)
}


# ------------------------------------------------------------------------------------------ processes


def _call(command: Sequence[str], *, fails: bool = False) -> str:
    """What a command prints; `fails`: its exit status is a judgement and not a failure."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    if done.returncode and not (fails and done.stdout.strip()):
        raise RuntimeError(f"{' '.join(command[:4])} ended with {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout


def _last_json(text: str) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"no result: {text[-1000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def run_parts(asked: Asked, parts: Sequence[str], minutes: float) -> Iterator[dict[str, Any]]:
    """Each part in a process of its own, which is stopped when the time for all is over."""
    ends = time.monotonic() + 60 * minutes
    for part in parts:
        began = time.monotonic()
        command = [sys.executable, __file__, "--part", part, json.dumps(asdict(asked))]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=ROOT, timeout=max(1.0, ends - began), check=False
            )
            result = _last_json(done.stdout) if not done.returncode else {"failed": done.stderr[-3000:]}
        except subprocess.TimeoutExpired:
            result = {
                "failed": f"stopped after {time.monotonic() - began:.0f} s: the time for all parts was over"
            }
        row = {"part": part, "seconds": round(time.monotonic() - began, 1), **result}
        (Path(asked.out) / f"{part}.json").write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
        yield row


def _asked(text: str) -> Asked:
    found = json.loads(text)
    return Asked(**{**found, "train": tuple(found["train"])})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--small", action="store_true", help="a toy model and short samples: to see that the script works"
    )
    parser.add_argument("--train", default="", metavar="OPTIONS", help="options of gpu_train.py, as one text")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        print(json.dumps(PARTS[given.part[0]](_asked(given.part[1]))))
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu --small shows that the script works")
    given.out.mkdir(parents=True, exist_ok=True)
    out = str(given.out.resolve())
    asked = Asked(given.device, out, given.small, tuple(shlex.split(given.train)))
    rows_made = []
    for row in run_parts(asked, given.parts, given.minutes):
        rows_made.append(row)
        print(f"{row['part']:<10} {row['seconds']:>7.1f} s  {row.get('failed', 'done')[-300:]}", flush=True)
    print(json.dumps({"device": given.device, "parts": rows_made}))
    return int(any("failed" in row for row in rows_made))


if __name__ == "__main__":
    sys.exit(main())
