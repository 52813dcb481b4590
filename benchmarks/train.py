"""A LoRA step of SmolLM2-135M-Instruct: isotype against TRL, against transformers' Trainer, against a bare loop.

Every peer trains the same adapters (r 16 on every linear layer) on the same rows with the same seed, flags and number of
threads, each in a process of its own; the three trainers in the same order, the bare loop in its own:

- isotype: the command `isotype sft`;
- trl: TRL's SFTTrainer, with what `trl sft` would give it;
- trainer: transformers' Trainer on a PEFT model, `model(labels=…)`;
- bare: the same model in a loop that does nothing else, under the same autocast.

Processes take turns (isotype, trl, …, isotype, trl, …) `--rounds` times. *step* is the median of all steps after the first
two; *spread* the quartiles; *ratio* the peer's median over isotype's. *memory* is the peak of resident memory over what is
resident after all imports. *loss* is that of the last step. *floor* is the time that the step's own matmuls take at the
rate that this script measures for them here, before and after each peer (the median): forward and input gradient of
every linear layer and of the head. A second table has the time that *all* products of a step would take at that rate: those of the
floor, of the adapters and of causal attention, and with checkpointing the forward of the blocks once more. With `--uneven` rows have an eighth of the tokens to all of them (words, so that
tokens are some more and the longest are cut), and floor and tokens/s are those of full rows; the bare loop and the Trainer, which take rows of one length, are left out.

Run: python benchmarks/train.py [--storage nf4 none int8] [--dtype bf16 fp32] [--tokens 512 2048] [--checkpointing off on]
     [--rows 2] [--uneven] [--peers isotype trl trainer bare] [--steps 7] [--rounds 2] [--threads 2] [--json PATH] [--record]
Prints two tables and one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import results
from dense_folder import dense_folder
from step_clock import watch
from turns import quartiles

MODEL = "embedded:smollm2"
WARM_UP = 2
LEARNING_RATE = 1e-4
RANK = 16
PEERS = ("isotype", "trl", "trainer", "bare")
_MIB = 1 << 20


@dataclass(frozen=True)
class Setup:
    """One configuration, the same for every peer; `cpu`: seconds are those of the CPU, which other work of the machine changes less."""

    storage: str
    dtype: str
    tokens: int
    checkpointing: bool
    steps: int
    rows: int = 2
    uneven: bool = False
    model: str = MODEL
    cpu: bool = False

    def __str__(self) -> str:
        tokens = f"{self.tokens // 8}..{self.tokens}" if self.uneven else self.tokens
        rows = "" if self.rows == 2 else f"{self.rows} x "
        return f"{self.storage} {self.dtype} {rows}{tokens} {'ckpt' if self.checkpointing else '-'}"


# ------------------------------------------------------------------------------------------ in a peer's process


def resident(field: str) -> float:
    """MiB of this process: `VmRSS` now, `VmHWM` at the worst moment since it was reset."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def write_rows(path: Path, setup: Setup) -> None:
    """Rows of text that are cut to the same number of tokens, or to uneven ones; other text in each."""
    from importlib.resources import files

    words = (files("isotype") / "data" / "passages" / "passages.txt").read_text(encoding="utf-8").split()
    count = setup.rows * setup.steps
    rows, draw = [], random.Random(0)
    for row in range(count):
        start = row * len(words) // count
        turned = words[start:] + words[:start]
        length = draw.randint(setup.tokens // 8, setup.tokens) if setup.uneven else setup.tokens
        text = " ".join((turned * (1 + setup.tokens // len(words)))[:length])
        rows.append(json.dumps({"text": text}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def by_isotype(setup: Setup, rows: Path, out: Path) -> None:
    from isotype.cli.main import main

    flags = ["--quantization", setup.storage] if setup.storage != "none" else []
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[setup.dtype]
    sys.argv = [
        "isotype", "sft", "--model_name_or_path", setup.model, "--dataset_name", str(rows), "--dtype", dtype, *flags,
        "--use_peft", "--lora_r", str(RANK), "--lora_alpha", "32", "--lora_dropout", "0", "--lora_target_modules", "all-linear",
        "--max_length", str(setup.tokens), "--per_device_train_batch_size", str(setup.rows), "--max_steps", str(setup.steps),
        "--learning_rate", str(LEARNING_RATE), "--lr_scheduler_type", "constant", "--logging_steps", "1",
        "--gradient_checkpointing", str(setup.checkpointing), "--save_strategy", "no", "--eval_strategy", "no",
        "--seed", "0", "--output_dir", str(out),
    ]  # fmt: skip
    status = main()
    if status:
        raise SystemExit(status)


def peft_config() -> Any:
    import peft

    return peft.LoraConfig(
        r=RANK, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def model_settings(setup: Setup) -> dict[str, Any]:
    import torch
    from transformers import BitsAndBytesConfig

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[setup.dtype]
    configs = {
        "none": None,
        "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype),
        "int8": BitsAndBytesConfig(load_in_8bit=True),
    }
    config = configs[setup.storage]
    return {"dtype": dtype, **({} if config is None else {"quantization_config": config})}


def arguments(setup: Setup, out: Path) -> dict[str, Any]:
    return {
        "output_dir": str(out), "per_device_train_batch_size": setup.rows, "max_steps": setup.steps,
        "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no",
        "gradient_checkpointing": setup.checkpointing, "bf16": setup.dtype == "bf16", "seed": 0, "report_to": "none",
        "use_cpu": True, "dataloader_pin_memory": False,
    }  # fmt: skip


def source(setup: Setup) -> Path:
    if Path(setup.model).is_dir():
        return Path(setup.model)
    return dense_folder(setup.model, model_settings(setup)["dtype"])


def by_trl(setup: Setup, rows: Path, out: Path) -> None:
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model=str(source(setup)),
        args=SFTConfig(
            **arguments(setup, out), max_length=setup.tokens, model_init_kwargs=model_settings(setup)
        ),
        train_dataset=load_dataset("json", data_files=str(rows), split="train"),
        peft_config=peft_config(),
    )
    trainer.train()


def plain_model(setup: Setup) -> Any:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source(setup), **model_settings(setup))
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft_config())
    if setup.checkpointing:
        model.enable_input_require_grads()
    return model.train()


def batches(setup: Setup, rows: Path) -> list[dict[str, Any]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source(setup))
    texts = [json.loads(line)["text"] for line in rows.read_text(encoding="utf-8").splitlines()]
    ids = tokenizer(texts, return_tensors="pt", truncation=True, max_length=setup.tokens)["input_ids"]
    return [{"input_ids": each, "labels": each, "attention_mask": each.new_ones(each.shape)} for each in ids]


def by_trainer(setup: Setup, rows: Path, out: Path) -> None:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**arguments(setup, out))
    Trainer(plain_model(setup), args, train_dataset=batches(setup, rows)).train()


def by_hand(setup: Setup, rows: Path, seconds: list[float], losses: list[float]) -> None:
    import torch
    from torch.utils.data import DataLoader

    model = plain_model(setup)
    if setup.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(0)
    for batch in DataLoader(batches(setup, rows), setup.rows, shuffle=True, generator=generator):  # type: ignore[arg-type]
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=setup.dtype == "bf16"):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())


def linear_shapes(config: Any) -> dict[tuple[int, int], int]:
    """(in, out) of the blocks' linear layers, and how many there are."""
    hidden, inner, blocks = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads = config.num_key_value_heads * hidden // config.num_attention_heads
    return {
        (hidden, hidden): 2 * blocks, (hidden, heads): 2 * blocks, (hidden, inner): 2 * blocks, (inner, hidden): blocks,
    }  # fmt: skip


def all_flops(setup: Setup, config: Any) -> float:
    """FLOPs of all products of a step; of attention the scores that causal attention reads, computed once."""
    rows, shapes = setup.rows * setup.tokens, linear_shapes(config)
    base = sum(count * columns * out for (columns, out), count in shapes.items())
    adapters = sum(count * RANK * (columns + out) for (columns, out), count in shapes.items())
    scores = setup.rows * setup.tokens**2 / 2
    attention = config.num_hidden_layers * 2 * scores * config.hidden_size  # q kᵀ and p v
    forward = 2 * (rows * (base + adapters) + attention)
    # The gradient of each operand of a product is one more; a frozen weight needs none.
    backward = 2 * (rows * (base + 2 * adapters) + 2 * attention)
    head = 4 * rows * config.hidden_size * config.vocab_size
    return float(forward * (2 if setup.checkpointing else 1) + backward + head)


def floor(setup: Setup) -> dict[str, float]:
    """GFLOP/s of the step's own matmuls, and the seconds that they and all products of the step take at that rate."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source(setup))
    dtype = model_settings(setup)["dtype"]
    rows = setup.rows * setup.tokens
    total, flops = 0.0, 0
    for (columns, out), count in {
        **linear_shapes(config),
        (config.hidden_size, config.vocab_size): 1,
    }.items():
        x, weight = torch.randn(rows, columns).to(dtype), torch.randn(out, columns).to(dtype)
        grad = torch.randn(rows, out).to(dtype)
        y, dx = torch.empty_like(grad), torch.empty_like(x)
        times = []
        for _ in range(7):
            began = time.perf_counter()
            torch.mm(x, weight.t(), out=y)
            torch.mm(grad, weight, out=dx)
            times.append(time.perf_counter() - began)
        total += count * statistics.median(times)
        flops += count * 4 * rows * columns * out
    return {"seconds": total, "gflops": flops / total / 1e9, "all": all_flops(setup, config) * total / flops}


def child(peer: str, setup: Setup) -> None:
    """Train as one peer and print a line of JSON."""
    import bitsandbytes  # noqa: F401 - resident before the memory is measured, as all that follows
    import torch
    import trl  # noqa: F401
    from datasets import load_dataset  # noqa: F401
    from transformers import LlamaForCausalLM, Trainer  # noqa: F401

    if peer == "floor":
        print("RESULT " + json.dumps(floor(setup)))
        return
    source(setup)  # made once
    seconds, losses = watch(time.process_time if setup.cpu else time.perf_counter)
    with tempfile.TemporaryDirectory() as folder:
        rows, out = Path(folder) / "rows.jsonl", Path(folder) / "out"
        write_rows(rows, setup)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak of the imports
        began = time.perf_counter()
        if peer == "bare":
            by_hand(setup, rows, seconds, losses)
        else:
            {"isotype": by_isotype, "trl": by_trl, "trainer": by_trainer}[peer](setup, rows, out)
        whole = time.perf_counter() - began
    result = {
        "seconds": seconds,
        "losses": losses,
        "memory": resident("VmHWM") - before,
        "whole": whole,
        "threads": torch.get_num_threads(),
    }
    print("RESULT " + json.dumps(result))


# ------------------------------------------------------------------------------------------ in the parent


def run(peer: str, setup: Setup, threads: int) -> dict[str, Any]:
    """One peer in a process of its own."""
    command = [sys.executable, __file__, "--child", peer, json.dumps(asdict(setup))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    raise SystemExit(f"{peer} failed on {setup}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")


def compare(setup: Setup, peers: list[str], rounds: int, threads: int) -> list[dict[str, Any]]:
    """Rows of the table for one configuration."""
    results: dict[str, list[dict[str, Any]]] = {peer: [] for peer in peers}
    floors = [run("floor", setup, threads)]
    for _ in range(rounds):
        for peer in peers:
            results[peer].append(run(peer, setup, threads))
            floors.append(run("floor", setup, threads))
    base = {key: statistics.median(each[key] for each in floors) for key in floors[0]}
    rows = []
    for peer in peers:
        steps = [second for result in results[peer] for second in result["seconds"][WARM_UP:]]
        low, median, high = quartiles(steps)
        rows.append(
            {
                "setup": str(setup), "peer": peer, "step": median, "low": low, "high": high,
                "first": statistics.median(result["seconds"][0] for result in results[peer]),
                "whole": statistics.median(result["whole"] for result in results[peer]),
                "tokens_per_second": setup.rows * setup.tokens / median,
                "memory": statistics.median(result["memory"] for result in results[peer]),
                "loss": results[peer][0]["losses"][setup.steps - 1],
                "first_loss": results[peer][0]["losses"][0],
                "floor": base["seconds"], "gflops": base["gflops"], "all": base["all"],
            }
        )  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    own = {row["setup"]: row["step"] for row in rows if row["peer"] == "isotype"}
    for row in rows:
        ratio = row["step"] / own[row["setup"]] if row["setup"] in own else float("nan")
        print(
            f"{row['setup']:<20} {row['peer']:<8} {row['step']:>7.2f} ({row['low']:.2f}..{row['high']:.2f})  "
            f"{row['tokens_per_second']:>7.0f} {ratio:>6.2f} {row['first']:>7.1f} {row['memory']:>8.0f}  "
            f"{row['first_loss']:.4f} -> {row['loss']:.4f}  {row['floor']:>6.2f} {row['floor'] / row['step']:>6.0%}",
            flush=True,
        )


def show_products(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'setup':<20} {'peer':<8} {'step s':>7} {'all s':>6} {'of it':>6}")
    for row in rows:
        share = row["all"] / row["step"]
        print(f"{row['setup']:<20} {row['peer']:<8} {row['step']:>7.2f} {row['all']:>6.2f} {share:>6.0%}")


HEAD = (
    f"{'setup':<20} {'peer':<8} {'step s':>7} {'(quartiles)':<13} {'tokens/s':>8} {'ratio':>6} {'first s':>7} "
    f"{'MiB':>8}  {'loss':<17} {'floor s':>7} {'of it':>5}"
)


def keep(rows: list[dict[str, Any]]) -> None:
    """Add the rows of one configuration to the file of results; ratios are over isotype's step and memory, where it ran."""
    own = next((row for row in rows if row["peer"] == "isotype"), None)
    for row in rows:
        measures = {
            "step": results.Measure(row["step"], "s", (row["low"], row["high"])),
            "tokens": results.Measure(row["tokens_per_second"], "tokens/s"),
            "first": results.Measure(row["first"], "s"),
            "memory": results.Measure(row["memory"], "MiB"),
            "first_loss": results.Measure(row["first_loss"]),
            "loss": results.Measure(row["loss"]),
            "floor": results.Measure(row["floor"], "s"),
            "of_step": results.Measure(row["floor"] / row["step"]),
        }
        products = {
            "step": measures["step"],
            "products": results.Measure(row["all"], "s"),
            "of_step": results.Measure(row["all"] / row["step"]),
        }
        results.append(f"products/{row['setup']}", products, row["peer"])
        if own:
            measures["ratio"] = results.Measure(row["step"] / own["step"], "×")
            measures["memory_share"] = results.Measure(own["memory"] / row["memory"])
        results.append(f"step/{row['setup']}", measures, row["peer"], "isotype" if own else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--storage", nargs="+", default=["nf4", "none"])
    parser.add_argument("--dtype", nargs="+", default=["bf16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[512])
    parser.add_argument("--rows", type=int, default=2, help="of a batch")
    parser.add_argument("--checkpointing", nargs="+", choices=["on", "off"], default=["off"])
    parser.add_argument(
        "--uneven", action="store_true", help="rows of an eighth of the tokens to all of them"
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = results.parsed(parser)
    if asked.child:
        child(asked.child[0], Setup(**json.loads(asked.child[1])))
        return
    able = [peer for peer in PEERS if not asked.uneven or peer in ("isotype", "trl")]
    peers = asked.peers or able
    if not set(peers) <= set(able):
        parser.error(f"--uneven: {' and '.join(sorted(set(peers) - set(able)))} take rows of one length")
    print(HEAD, flush=True)
    rows = []
    axes = itertools.product(asked.storage, asked.dtype, asked.tokens, asked.checkpointing)
    for storage, dtype, tokens, checkpointing in axes:
        setup = Setup(storage, dtype, tokens, checkpointing == "on", asked.steps, asked.rows, asked.uneven)
        made = compare(setup, peers, asked.rounds, asked.threads)
        show(made)
        if asked.record:
            keep(made)
        rows += made
    show_products(rows)
    text = json.dumps({"rows": rows, "threads": asked.threads})
    if asked.json:
        asked.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
