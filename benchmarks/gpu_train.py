"""A LoRA step of a random model of Llama-3-8B's shape on a GPU: isotype beside every trainer that is installed.

The same adapters (r 16 on every linear layer), data, seed and flags (gradient checkpointing, bf16) for isotype, TRL, TRL with
Liger's kernels and unsloth, on weights in bf16 and in nf4; each in a process of its own, in turns. *step* is the median of all
steps after the first two; FLOPs are those of frozen weights (forward, and gradient of the input) and of causal attention, not
those that checkpointing computes again. The public mark for bf16 LoRA of Llama-3-8B is 12,473 tokens/s and 402 TFLOP/s on one
H100 (NeMo Automodel, 4096 tokens a row).

Run: python benchmarks/gpu_train.py [--device cuda] [--storage none nf4] [--peers …] [--layers 32] [--rows 4] [--tokens 2048]
     [--steps 8] [--out build/gpu] [--small]
Prints a table and one line of JSON. `--device cpu --small` trains a toy, to see that it works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from step_clock import watch

ROOT = Path(__file__).resolve().parents[1]
NEEDS = {"isotype": "isotype", "trl": "trl", "trl+liger": "liger_kernel", "unsloth": "unsloth"}
"""Each peer and the package that it needs."""
WARM_UP = 2


@dataclass(frozen=True)
class Asked:
    """What is trained; the same in the process of every peer."""

    device: str
    out: str
    small: bool
    layers: int
    rows: int
    tokens: int
    steps: int

    @property
    def sizes(self) -> dict[str, int]:
        """Of the random model: Llama 3 8B's, or a toy's."""
        sizes = (64, 176, 4, 2, 512) if self.small else (4096, 14336, 32, 8, 128256)
        names = (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
        )
        return {**dict(zip(names, sizes, strict=True)), "num_hidden_layers": self.layers}


def _save_random(asked: Asked, folder: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, models

    config = transformers.LlamaConfig(
        **asked.sizes, max_position_embeddings=8192, rope_theta=5e5, pad_token_id=0
    )
    torch.manual_seed(0)
    with torch.device(asked.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    vocabulary = {f"t{index}": index for index in range(asked.sizes["vocab_size"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="t1"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", eos_token="t2"
    ).save_pretrained(folder)


def peer_run(peer: str, storage: str, asked: Asked) -> dict[str, Any]:
    """Train as one peer: seconds of each step, memory, loss."""
    seconds, losses = watch()
    trainer = _trainer(peer, storage, asked)
    if asked.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    step = statistics.median(seconds[WARM_UP:])
    tokens = asked.rows * asked.tokens
    sizes = asked.sizes
    hidden, inner, heads = (
        sizes[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    narrow = hidden * sizes["num_key_value_heads"] // heads
    weights = asked.layers * hidden * (2 * hidden + 2 * narrow + 3 * inner) + hidden * sizes["vocab_size"]
    # Forward and gradient of the input, no gradient of frozen weights; scores and values of causal attention, backward too.
    flops = 4 * weights * tokens + asked.layers * asked.rows * 6 * asked.tokens**2 * hidden
    return {
        "step": step,
        "seconds": seconds,
        "tokens_per_second": tokens / step,
        "tflops": flops / step / 1e12,
        "peak": torch.cuda.max_memory_allocated() if asked.device == "cuda" else None,
        "losses": losses,
    }


def _trainer(peer: str, storage: str, asked: Asked) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    folder = Path(asked.out) / "model"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        3, asked.sizes["vocab_size"], (asked.rows * asked.steps, asked.tokens), generator=generator
    )
    data = Dataset.from_dict({"input_ids": ids.tolist()})
    lora: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
    lora["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    arguments = SFTConfig(
        output_dir=str(Path(asked.out) / f"run-{peer}-{storage}"), per_device_train_batch_size=asked.rows,
        max_steps=asked.steps, max_length=asked.tokens, learning_rate=1e-4, lr_scheduler_type="constant", logging_steps=1,
        save_strategy="no", gradient_checkpointing=True, bf16=True, seed=0, report_to="none", disable_tqdm=True,
        use_cpu=asked.device == "cpu", use_liger_kernel=peer == "trl+liger", dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    if peer == "isotype":
        return _isotype_trainer(folder, storage, asked, arguments, data, lora)
    if peer == "unsloth":
        from unsloth import FastLanguageModel

        model, words = FastLanguageModel.from_pretrained(
            str(folder), max_seq_length=asked.tokens, dtype=torch.bfloat16, load_in_4bit=storage == "nf4"
        )
        lora.pop("task_type")
        model = FastLanguageModel.get_peft_model(model, use_gradient_checkpointing="unsloth", **lora)
        return SFTTrainer(model, arguments, train_dataset=data, processing_class=words)
    import peft
    import transformers

    quantized = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    more = {"quantization_config": quantized} if storage == "nf4" else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": 0} if asked.device == "cuda" else None, **more
    )
    return SFTTrainer(model, arguments, train_dataset=data, peft_config=peft.LoraConfig(**lora))


def _isotype_trainer(
    folder: Path, storage: str, asked: Asked, arguments: Any, data: Any, lora: dict[str, Any]
) -> Any:
    import transformers
    from trl import SFTTrainer

    import isotype
    from isotype.train.governed import enforce_trainer, governed, masters_of

    policy = isotype.resolve_precision(
        str(folder), "bfloat16", None if storage == "none" else storage, device=asked.device
    )
    model = isotype.load(str(folder), policy)
    transformers.set_seed(0)
    model = isotype.add_lora(model, policy, **lora)
    masters = masters_of(model)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    trainer = governed(SFTTrainer)(model, arguments, train_dataset=data, processing_class=words)
    enforce_trainer(trainer, policy, masters)
    print(isotype.fuse(trainer.model).summary, file=sys.stderr)
    return trainer


def compare(asked: Asked, peers: list[str], storages: list[str]) -> list[dict[str, Any]]:
    """Rows of the table."""
    rows = []
    for storage in storages:
        for peer in peers:
            command = [sys.executable, __file__, "--peer", peer, storage, json.dumps(asdict(asked))]
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            result = json.loads(lines[-1]) if lines else {"failed": done.stderr[-2000:]}
            rows.append({"peer": peer, "storage": storage, **result})
            print(_line(rows[-1]), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    name = f"{row['storage']:<6} {row['peer']:<10}"
    if "failed" in row:
        return f"{name} failed: {row['failed'].strip().splitlines()[-1][:200]}"
    peak = "" if row["peak"] is None else f"{row['peak'] / 2**30:>7.1f} GiB"
    return f"{name} {row['step']:>8.3f} s {row['tokens_per_second']:>9.0f} tokens/s {row['tflops']:>7.1f} TFLOP/s {peak}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--storage", nargs="+", choices=["none", "nf4"], default=["none", "nf4"])
    parser.add_argument("--peers", nargs="+", choices=NEEDS)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--small", action="store_true", help="a toy model")
    parser.add_argument("--peer", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        print(json.dumps(peer_run(given.peer[0], given.peer[1], Asked(**json.loads(given.peer[2])))))
        return 0
    if given.steps <= WARM_UP:
        parser.error(f"--steps {given.steps}: the first {WARM_UP} are not counted")
    layers, rows, tokens = (2, 2, 64) if given.small else (given.layers, given.rows, given.tokens)
    asked = Asked(given.device, str(given.out.resolve()), given.small, layers, rows, tokens, given.steps)
    if not (given.out / "model" / "config.json").is_file():
        _save_random(asked, given.out / "model")
    missing = [peer for peer, package in NEEDS.items() if importlib.util.find_spec(package) is None]
    peers = given.peers or [peer for peer in NEEDS if peer not in missing]
    made = compare(asked, peers, given.storage)
    print(json.dumps({"rows": made, "not_installed": missing}))
    return int(any("failed" in row for row in made))


if __name__ == "__main__":
    sys.exit(main())
