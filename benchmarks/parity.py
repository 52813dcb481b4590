"""Loss parity on SmolLM2-135M-Instruct: compute dtypes against each other, isotype against the plain libraries.

For each storage (none, nf4, int8) the same 30 steps on the same data with the same seed are trained in float32 and
bfloat16 (float16 over a short run: no CPU is fast at it), once with a model that isotype loaded and adapted and once with
plain transformers + PEFT + bitsandbytes in the same loop. Compared are the mean training loss of the last steps (the
same examples in every run) and the held-back loss after the last step:

- dtype: (isotype in that dtype - isotype in float32) / isotype in float32, at the same storage;
- peer:  (isotype - plain) / plain, at the same storage and dtype;
- price of the quantization: isotype's loss at that storage against unquantized storage, in float32.

Run: python benchmarks/parity.py [--steps 30] [--short 6] [--threads 2] [--output docs/parity]
Prints a table and one line of JSON, and writes OUTPUT.json and OUTPUT.svg (the curves).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

import isotype
import results
from dense_folder import dense_folder
from isotype.core.dtypes import dtype_name

MODEL = "embedded:smollm2"
SEED = 0
LENGTH = (
    48  # tokens an example is cut to; CPUs without bfloat16 instructions take seconds for a step as it is
)
HELD_BACK = 16  # examples
INIT_SCALE = (
    2.0**10
)  # GradScaler's default of 2**16 overflows at first and skips steps, of which six are too few
LAST = 10  # training losses that count as the end of a run
LORA: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "target_modules": "all-linear",
    "task_type": "CAUSAL_LM",
}


@dataclass(frozen=True)
class Run:
    """One trained model: who loaded it, how, its losses, its held-back loss at the end, the steps that were skipped."""

    library: str
    storage: str
    compute: str
    losses: tuple[float, ...]
    held_back: float
    skipped: int = 0

    @property
    def end(self) -> float:
        """Mean training loss of the last steps."""
        last = self.losses[-LAST:]
        return sum(last) / len(last)


def examples(split: str, tokenizer: Any) -> list[torch.Tensor]:
    """Token ids of the embedded data set, [1, up to LENGTH] each."""
    text = (files("isotype") / "data" / "precision_qa" / f"{split}.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    # Without a system prompt, which would fill the few tokens there are.
    texts = [f"{row['prompt'][0]['content']}\n{row['completion'][0]['content']}" for row in rows]
    return [tokenizer(t, return_tensors="pt")["input_ids"][:, :LENGTH] for t in texts]


def plain_model(source: Path | str, compute: torch.dtype, quantization: str | None) -> Any:
    """What a user of transformers, bitsandbytes and PEFT writes."""
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = {
        None: None,
        "nf4": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
        ),
        "int8": BitsAndBytesConfig(load_in_8bit=True),
    }[quantization]
    extra = {} if config is None else {"quantization_config": config}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=compute, **extra)
    torch.manual_seed(SEED)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA))


def isotype_model(source: Path | str, compute: torch.dtype, quantization: str | None) -> Any:
    """The same through isotype."""
    policy = isotype.resolve_precision(source, dtype=compute, quantization=quantization, device="cpu")
    model = isotype.load(source, policy)
    torch.manual_seed(SEED)
    return isotype.add_lora(model, policy, **LORA)


def train(
    model: Any, compute: torch.dtype, data: list[torch.Tensor], steps: int
) -> tuple[tuple[float, ...], int]:
    """The loop both share: autocast to the compute dtype, a GradScaler for float16, AdamW.

    Returns:
        (losses, skipped): one loss a step, and how many steps the GradScaler skipped.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, enabled=compute == torch.float16)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=5e-4)
    order = random.Random(SEED)
    losses, skipped = [], 0
    model.train()
    for _ in range(steps):
        ids = order.choice(data)
        with autocast(compute):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < scale
        optimizer.zero_grad()
        losses.append(loss.item())
    return tuple(losses), skipped


@torch.no_grad()
def held_back_loss(model: Any, compute: torch.dtype, data: list[torch.Tensor]) -> float:
    """Mean loss over the held-back examples."""
    model.eval()
    with autocast(compute):
        return sum(float(model(input_ids=ids, labels=ids).loss) for ids in data) / len(data)


def autocast(compute: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Autocast to a 16-bit compute dtype; nothing for float32."""
    return contextlib.nullcontext() if compute == torch.float32 else torch.autocast("cpu", dtype=compute)


def main() -> None:
    """Train every combination and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--short", type=int, default=6, help="steps of the float16 runs and of their references"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--storages", nargs="+", default=["none", "nf4", "int8"])
    parser.add_argument(
        "--keep", nargs="*", default=[], help="compute dtypes whose runs OUTPUT.json has already"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/parity"))
    options = results.parsed(parser)
    torch.set_num_threads(options.threads)
    from transformers import AutoTokenizer

    source = dense_folder(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(source)
    data, held_back = examples("train", tokenizer), examples("test", tokenizer)[:HELD_BACK]
    runs: dict[tuple[str, str, str, int], Run] = {}
    earlier = kept_runs(options.output.with_suffix(".json"), options.keep)
    plan = [(torch.float32, options.steps), (torch.bfloat16, options.steps)]
    plan += [(torch.float32, options.short), (torch.float16, options.short)]
    for storage in options.storages:
        quantization = None if storage == "none" else storage
        for compute, steps in plan:
            for library, build in (("isotype", isotype_model), ("plain", plain_model)):
                if (library, compute, steps) == ("plain", torch.float32, options.short):
                    continue  # the short float32 run is only the reference of float16
                kept = earlier.get((library, storage, dtype_name(compute), steps))
                if kept is not None:
                    runs[library, storage, kept.compute, steps] = kept
                    continue
                model = build(source, compute, quantization)
                losses, skipped = train(model, compute, data, steps)
                loss = held_back_loss(model, compute, held_back)
                run = Run(library, storage, dtype_name(compute), losses, loss, skipped)
                runs[library, storage, run.compute, steps] = run
                print(
                    f"# {library} {storage} {run.compute} {steps} steps, {run.skipped} skipped: {run.held_back:.5f}",
                    flush=True,
                )
    rows = table(runs, options.steps, options.short)
    print_table(rows)
    if options.record:
        for row in rows:
            keep(row)
    result = {
        "steps": options.steps,
        "short": options.short,
        "length": LENGTH,
        "rows": rows,
        "runs": [asdict(run) for run in runs.values()],
    }
    options.output.with_suffix(".json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    options.output.with_suffix(".svg").write_text(curves(runs, options.steps), encoding="utf-8")
    print(json.dumps(rows))


def kept_runs(path: Path, dtypes: list[str]) -> dict[tuple[str, str, str, int], Run]:
    """Runs of an earlier result in the compute dtypes named."""
    if not dtypes:
        return {}
    runs = [Run(**{**run, "losses": tuple(run["losses"])}) for run in json.loads(path.read_text())["runs"]]
    return {(r.library, r.storage, r.compute, len(r.losses)): r for r in runs if r.compute in dtypes}


def table(runs: dict[tuple[str, str, str, int], Run], steps: int, short: int) -> list[dict[str, Any]]:
    """One row for each storage and dtype, with the differences in percent."""
    rows = []
    for (library, storage, compute, length), run in runs.items():
        if library != "isotype" or (compute, length) == ("float32", short):
            continue
        row: dict[str, Any] = {"storage": storage, "compute": compute, "steps": length}
        for measure in ("end", "held_back"):
            value = float(getattr(run, measure))
            reference = getattr(runs["isotype", storage, "float32", length], measure)
            unquantized = runs.get(("isotype", "none", "float32", length))
            peer = getattr(runs["plain", storage, compute, length], measure)
            row[measure] = {
                "isotype": value,
                "plain": peer,
                "dtype_percent": percent(value, reference),
                "peer_percent": percent(value, peer),
                "quantization_percent": percent(reference, getattr(unquantized, measure))
                if unquantized
                else None,
            }
        rows.append(row)
    return sorted(
        rows, key=lambda row: (row["storage"] != "none", row["storage"], -row["steps"], row["compute"])
    )


def percent(value: float, reference: float) -> float:
    """Relative difference in percent."""
    return 100 * (value - reference) / reference


def print_table(rows: list[dict[str, Any]]) -> None:
    """The rows for people."""
    titles = {
        "end": f"mean training loss of the last {LAST} steps",
        "held_back": "held-back loss after training",
    }
    for measure, title in titles.items():
        print(f"\n{title}; SmolLM2-135M-Instruct, LoRA r=8 on all linear layers")
        print("storage  compute   steps  isotype   plain     vs float32  vs plain   price of quantization")
        for row in rows:
            values = row[measure]
            price = values["quantization_percent"]
            print(
                f"{row['storage']:<8} {row['compute']:<9} {row['steps']:>5}  {values['isotype']:<8.5f}  "
                f"{values['plain']:<8.5f}  {values['dtype_percent']:+9.3f} %  {values['peer_percent']:+7.3f} %  "
                + ("" if price is None else f"{price:+.2f} %")
            )


def keep(row: dict[str, Any]) -> None:
    """Add a row to the file of results, the differences as shares."""
    for measure in ("end", "held_back"):
        values = row[measure]
        shares = {
            "from_float32": values["dtype_percent"],
            "from_plain": values["peer_percent"],
            "price": values["quantization_percent"],
        }
        measures = results.measured(values, isotype="nats a token", plain="nats a token")
        measures |= {name: results.Measure(each / 100) for name, each in shares.items() if each is not None}
        results.append(f"parity-{measure}/{row['storage']}, {row['compute']}, {row['steps']}", measures)


def curves(runs: dict[tuple[str, str, str, int], Run], steps: int) -> str:
    """Training losses of isotype's runs as one SVG, a panel for each storage."""
    width, height, gap = 340, 220, 30
    colors = {"float32": "#2b6cb0", "bfloat16": "#c05621", "float16": "#2f855a"}
    storages = list(dict.fromkeys(run.storage for run in runs.values()))
    parts = []
    for column, storage in enumerate(storages):
        chosen = [
            r
            for r in runs.values()
            if r.storage == storage and r.library == "isotype" and len(r.losses) == steps
        ]
        top = max(max(r.losses) for r in chosen)
        x0 = column * (width + gap) + 40
        parts.append(f'<text x="{x0}" y="16" font-weight="bold">storage {storage}</text>')
        parts.append(f'<path d="M{x0} 30V{height}H{x0 + width - 40}" fill="none" stroke="#888"/>')
        parts.append(f'<text x="{x0 - 6}" y="36" text-anchor="end">{top:.1f}</text>')
        parts.append(f'<text x="{x0 - 6}" y="{height}" text-anchor="end">0</text>')
        for row, run in enumerate(chosen):
            points = " ".join(
                f"{x0 + i * (width - 40) / max(1, steps - 1):.1f},{height - loss / top * (height - 30):.1f}"
                for i, loss in enumerate(run.losses)
            )
            color = colors[run.compute]
            dash = ' stroke-dasharray="4 3"' if row else ""
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"{dash}/>'
            )
            parts.append(f'<text x="{x0 + 130 + 90 * row}" y="16" fill="{color}">{run.compute}</text>')
    total = len(storages) * (width + gap) + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height + 20}" width="{total}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        + "".join(parts)
        + "</svg>\n"
    )


if __name__ == "__main__":
    main()
