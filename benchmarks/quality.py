"""What mixed storage keeps of a model: divergences on texts that nothing was chosen by, at equal bytes; and what measuring takes.

    python benchmarks/quality.py                      # the table of SmolLM2-135M
    python benchmarks/quality.py --fine-tuned         # losses of held-back questions after `isotype demo` on each storage
    python benchmarks/quality.py --fine-tuned --start error weighted     # with adapters that begin from the quantization error
    python benchmarks/quality.py --time --layers 22   # a random checkpoint of TinyLlama's shapes (1.1B), measured from disk

The reference is the float32 model. A storage is loaded by `isotype.load`, and its weights are dequantized; so what is compared is the
weights alone, on whatever machine it runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import isotype
import results
from isotype.checkpoint.checkpoint import open_checkpoint
from isotype.checkpoint.loftq import begin_from_error
from isotype.cli.main import main as isotype_command
from isotype.cli.training import DEMO
from isotype.core.dtypes import dtype_name
from isotype.core.names import format_bytes
from isotype.model.quantized import dense_weight
from isotype.precision.damages import Damages, LayerDamage, Option, choose, mix
from isotype.precision.decide import PrecisionRequest
from isotype.precision.policy import LayerStorage, PrecisionPolicy, read_moments

MODEL = "embedded:smollm2"
ROWS, LENGTH = 2, 128
Storage = Mapping[str, str]


def texts() -> dict[str, str]:
    """Four texts that isotype measures nothing on."""
    import pydoc_data.topics

    root = Path(__file__).resolve().parent.parent
    chats = sorted((root / "src/isotype/data/precision_qa").glob("*.jsonl"))[0]
    code = importlib.util.find_spec("argparse")
    assert code is not None
    assert code.origin is not None
    return {
        "reference": " ".join(pydoc_data.topics.topics[name] for name in ("assignment", "for", "exceptions")),
        "code": Path(code.origin).read_text(encoding="utf-8")[4000:],
        "readme": (root / "README.md").read_text(encoding="utf-8"),
        "chats": chats.read_text(encoding="utf-8"),
    }


def held_out() -> dict[str, torch.Tensor]:
    tokenizer: Any = open_checkpoint(MODEL).tokenizer()
    return {
        name: torch.tensor(tokenizer(text)["input_ids"][: ROWS * LENGTH]).view(ROWS, LENGTH)
        for name, text in texts().items()
    }


class Comparison:
    """The float32 model, and its distributions on the held-out texts."""

    def __init__(self) -> None:
        self.policy = isotype.resolve_precision(MODEL, "float32", device="cpu")
        self.model = isotype.load(MODEL, self.policy)
        self.texts = held_out()
        self.before = {name: self._distribution(ids) for name, ids in self.texts.items()}

    @torch.no_grad()
    def _distribution(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.model(input_ids=ids, use_cache=False).logits.float(), -1)

    @contextmanager
    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> Iterator[Any]:
        """The model, with these weights in the place of the layers' own."""
        layers = {self.model.get_submodule(name): weight for name, weight in weights.items()}
        kept = {module: module.weight.data for module in layers}
        for module, weight in layers.items():
            module.weight.data = weight
        try:
            yield self.model
        finally:
            for module, weight in kept.items():
                module.weight.data = weight

    def nats(self) -> list[float]:
        """Of each text, from the float32 model as it was."""
        pairs = [(self.before[name], self._distribution(ids)) for name, ids in self.texts.items()]
        return [float((p.exp() * (p - q)).sum(-1).mean()) for p, q in pairs]

    def nats_under(self, policy: PrecisionPolicy) -> list[float]:
        """Of each text, under a storage."""
        stored = dict(isotype.load(MODEL, policy).named_modules())
        with self.with_weights(
            {name: dense_of(module) for name, module in stored.items() if is_stored(module)}
        ):
            del stored
            return self.nats()


def is_stored(module: Any) -> bool:
    return type(module).__name__ in ("Linear4bit", "Linear8bitLt")


def dense_of(layer: Any) -> torch.Tensor:
    """The values that a layer computes with, in float32."""
    weight: torch.Tensor = layer.weight.data
    return dense_weight(layer, torch.float32) if is_stored(layer) else weight.float()


def within(layers: tuple[LayerDamage, ...], room: int, score: Callable[[LayerDamage, str], float]) -> Storage:
    """nf4 and int8 by the least score that fits."""
    forms = ("nf4", "int8")
    options = [[Option(layer.bytes(form), score(layer, form)) for form in forms] for layer in layers]
    picked = choose(options, room)
    assert picked is not None
    return {layer.module: forms[at] for layer, at in zip(layers, picked, strict=True)}


def in_order(layers: list[LayerDamage], room: int) -> Storage:
    """int8 for one layer after the other while it fits."""
    left = room - sum(layer.bytes("nf4") for layer in layers)
    chosen = {}
    for layer in layers:
        more = layer.bytes("int8") - layer.bytes("nf4")
        chosen[layer.module] = "int8" if more <= left else "nf4"
        left -= more if more <= left else 0
    return chosen


def from_both_ends(layers: tuple[LayerDamage, ...]) -> list[LayerDamage]:
    """Layers of the first block, the last one, the second one …"""
    numbers = [int(next(part for part in layer.module.split(".") if part.isdigit())) for layer in layers]
    last = max(numbers)
    return [
        layer for _, _, layer in sorted((min(n, last - n), at, layers[at]) for at, n in enumerate(numbers))
    ]


def measured(comparison: Comparison, kept: Path | None) -> Damages:
    """From the file, or now."""
    if kept is not None and kept.is_file():
        return Damages.read(kept)
    started = time.perf_counter()
    damages = isotype.measure_quality(comparison.model)
    print(f"{damages}\n\nmeasured in {time.perf_counter() - started:.0f} s\n", flush=True)
    if kept is not None:
        damages.save(kept)
    return damages


def table(only: list[str], kept: Path | None, record: bool) -> None:
    comparison = Comparison()
    damages = measured(comparison, kept)
    print(
        f"{'':<44}{'bytes':>10}"
        + "".join(f"{name:>11}" for name in comparison.texts)
        + f"{'mean':>9}{'of nf4':>8}"
    )
    plain = math.nan

    def row(name: str, storage: Storage | PrecisionPolicy) -> None:
        nonlocal plain
        if only and not any(name.startswith(each) for each in only):
            return
        policy = storage if isinstance(storage, PrecisionPolicy) else policy_of(storage)
        nats = comparison.nats_under(policy)
        mean = sum(nats) / len(nats)
        plain = mean if name == "nf4" else plain
        size = sum(
            each.bytes(policy.storage_of(each.module), double_quant=policy.double_quant)
            for each in damages.layers
        )
        values = "".join(f"{value:>11.4f}" for value in nats)
        print(f"{name:<44}{format_bytes(size):>10}{values}{mean:>9.4f}{mean / plain:>8.3f}", flush=True)
        if record:
            row = {**dict(zip(comparison.texts, nats, strict=True)), "mean": mean}
            measures = results.measured(row, **dict.fromkeys(row, "nats a token"))
            measures["bytes"] = results.Measure(size / 2**20, "MiB")
            results.append(f"quality/{name}", measures | {"of_nf4": results.Measure(mean / plain)})

    four = resolved("nf4")
    nested = resolved("nf4", double_quant=True)
    low, high = damages.bytes("nf4"), damages.bytes("int8")
    tenth, half = low + low // 10, (low + high) // 2
    row("nf4", four)
    row("nf4, constants fitted to inputs", fitted(damages, four))
    row("nf4 + 10 %, by damage (--quantization mixed)", mixture(damages, nested, None))
    row("nf4 + 10 %, by damage, nf4 and int8 alone", within(damages.layers, tenth, LayerDamage.damage_in))
    row("nf4 + 10 %, by weight error", within(damages.layers, tenth, lambda layer, form: layer.error[form]))
    for seed in range(2):
        shuffled = list(damages.layers)
        random.Random(seed).shuffle(shuffled)
        row(f"nf4 + 10 %, at random ({seed})", in_order(shuffled, tenth))
    row("nf4 + 10 %, first and last layers", in_order(from_both_ends(damages.layers), tenth))
    row("half-way to int8, by damage (mixed)", mixture(damages, nested, half))
    row("half-way to int8, nf4 and int8 alone", within(damages.layers, half, LayerDamage.damage_in))
    row("int8", resolved("int8"))


def resolved(quantization: str, **options: Any) -> PrecisionPolicy:
    return isotype.resolve_precision(MODEL, "float32", quantization, "cpu", **options)


def policy_of(storage: Storage) -> PrecisionPolicy:
    layers = tuple(LayerStorage(name, form) for name, form in storage.items() if form != "nf4")
    return replace(resolved("nf4"), layers=layers)


def fitted(damages: Damages, four: PrecisionPolicy) -> PrecisionPolicy:
    """nf4 everywhere in the bytes of nf4, with constants of least error for the layers' inputs."""
    layers = (LayerStorage(layer.module, "nf4-fitted", layer.moments) for layer in damages.layers)
    return replace(four, layers=tuple(layers))


def mixture(damages: Damages, nested: PrecisionPolicy, room: int | None) -> PrecisionPolicy:
    """`--quantization mixed`, within the bytes of linear layers."""
    weights = sum(layer.rows * layer.columns for layer in damages.layers)
    mixed, _ = mix(damages, nested, weights, PrecisionRequest(quantization="mixed", base_memory=room))
    storage = mixed.quantization or dtype_name(nested.compute)
    return replace(nested, storage=storage, double_quant=bool(mixed.double_quant), layers=mixed.layers)


# ------------------------------------------------------------------------------------------------ what is left after training

RANK = 16


def fine_tuned(starts: Sequence[str], only: list[str], kept: Path | None, steps: int, record: bool) -> None:
    """Nats from the float32 model before training, and the losses of held-back questions before and after it."""
    comparison = Comparison()
    damages = measured(comparison, kept)
    questions = held_back()
    policies = {
        "nf4": resolved("nf4"),
        "mixed": mixture(damages, resolved("nf4", double_quant=True), None),
        "int8": resolved("int8"),
        "float32": isotype.resolve_precision(MODEL, "float32", device="cpu"),
    }
    rows = [(name, start) for name in policies for start in starts if name != "float32" or start == "zero"]
    print(f"{'base':<10}{'adapters begin':<18}{'nats':>9}{'loss before':>13}{'after':>9}{'seconds':>9}")
    for name, start in rows:
        if only and not any(f"{name} {start}".startswith(each) for each in only):
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, comparison.with_weights({}) as model:
            base = begin(damages, policies[name], start, Path(folder) / "start")
            with comparison.with_weights(adapted(base, Path(folder) / "start")):
                nats, before = comparison.nats(), loss(model, questions)
            train(Path(folder), steps)
            with comparison.with_weights(adapted(base, Path(folder) / "run")):
                after = loss(model, questions)
        seconds = time.perf_counter() - began
        print(
            f"{name:<10}{start:<18}{sum(nats) / len(nats):>9.4f}{before:>13.4f}{after:>9.4f}{seconds:>9.0f}",
            flush=True,
        )
        if record:
            found = {"nats": sum(nats) / len(nats), "before": before, "after": after}
            results.append(
                f"fine-tuned/{name}, {start}", results.measured(found, **dict.fromkeys(found, "nats"))
            )


def held_back() -> list[tuple[torch.Tensor, int]]:
    """The embedded data set's held-back questions with their answers, and how many tokens of each are the question's."""
    tokenizer: Any = open_checkpoint(MODEL).tokenizer()
    path = Path(isotype.__file__).parent / "data/precision_qa/test.jsonl"
    questions = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        options = {"tokenize": True, "return_dict": False}
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, **options)
        whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"], **options)
        questions.append((torch.tensor([whole]), len(prompt)))
    return questions


@torch.no_grad()
def loss(model: Any, questions: list[tuple[torch.Tensor, int]]) -> float:
    """Nats a token of the answers."""
    total, count = 0.0, 0
    for ids, prompt in questions:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=ids.shape[1] - prompt + 1).logits[
            0, :-1
        ]
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, prompt:], reduction="sum"))
        count += ids.shape[1] - prompt
    return total / count


def begin(damages: Damages, policy: PrecisionPolicy, start: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save an adapter that has not been trained; returns the weights `[out, in]` of the base's layers."""
    torch.manual_seed(0)
    model = isotype.add_lora(isotype.load(MODEL, policy), policy, r=RANK, lora_alpha=2 * RANK)
    if start != "zero":
        moments = {layer.module: read_moments(layer.moments) for layer in damages.layers}
        begin_from_error(model, open_checkpoint(MODEL), moments if start == "weighted" else {})
    model.save_pretrained(folder)
    return {
        name: dense_of(layer.get_base_layer())
        for name, layer in model.get_base_model().named_modules()
        if hasattr(layer, "lora_A")
    }


def adapted(weights: Mapping[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """The weights with the adapter's."""
    saved = load_file(folder / "adapter_model.safetensors")
    names = {name: f"base_model.model.{name}.lora_" for name in weights}
    return {
        name: weight + 2 * saved[f"{names[name]}B.weight"] @ saved[f"{names[name]}A.weight"]
        for name, weight in weights.items()
    }


def train(folder: Path, steps: int) -> None:
    """`isotype demo` from the adapter in `start`, without its questions, into `run`."""
    pairs = dict(zip(DEMO[::2], DEMO[1::2], strict=True))
    for name in [name for name in pairs if name.startswith(("--lora", "--quantization", "--eval"))]:
        del pairs[name]
    pairs |= {
        "--model_name_or_path": str(folder / "start"),
        "--output_dir": str(folder / "run"),
        "--max_steps": str(steps),
        "--device": "cpu",
    }
    status = isotype_command(["sft", *(part for pair in pairs.items() for part in pair), "-q"])
    if status != 0:
        raise SystemExit(f"the training ended with {status}")


# ------------------------------------------------------------------------------------------------ what measuring takes


def checkpoint(folder: Path, layers: int) -> int:
    """A random bfloat16 checkpoint of TinyLlama's shapes; returns the bytes of a block in float32."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return int(sum(each.numel() for each in model.model.layers[0].parameters())) * 4


def resident(key: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at the worst moment."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) * 1024


def timed(folder: str, what: str) -> None:
    """In a process of its own: seconds of processor, and bytes that the peak lies above what was there before."""
    from isotype.checkpoint.damage import Session
    from isotype.checkpoint.measure_ranges import TOKENS, to_measure

    small = Path(folder) / "small"
    isotype.measure_quality(small, tokens=64, exact=(), progress=False)  # libraries, and what they hold
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins again
    before, started = resident("VmRSS"), time.process_time()
    if what == "run":
        session = Session(*to_measure(open_checkpoint(folder), None, TOKENS), None, 1, progress=False)
        assert list(session.distributions())
    else:
        isotype.measure_quality(folder, exact=("nf4",) if what == "exact" else (), progress=False)
    print(time.process_time() - started, resident("VmHWM") - before)


def times(layers: int, record: bool) -> None:
    with tempfile.TemporaryDirectory() as name:  # 2.2 GB, in TMPDIR
        folder = Path(name)
        block = checkpoint(folder, layers)
        import transformers

        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
        )
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "small")
        print(f"{layers} layers, a block is {format_bytes(block)} in float32")
        once = 0.0
        for what, words in (
            ("run", "read and run once"),
            ("estimate", "table"),
            ("exact", "table, nf4 measured"),
        ):
            command = [sys.executable, __file__, "--timed", what, "--folder", name]
            seconds, amount = map(
                float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            )
            once = once or seconds
            print(
                f"{words:<24}{seconds:>8.1f} s {seconds / once:>6.2f} x   {amount / block:>5.2f} blocks",
                flush=True,
            )
            if record:
                found = {"seconds": seconds, "ratio": seconds / once, "blocks": amount / block}
                measures = results.measured(found, seconds="s", ratio="×", blocks="blocks")
                results.append(f"quality-time/{what}, {layers} layers", measures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--fine-tuned", action="store_true")
    parser.add_argument("--start", nargs="*", default=["zero"], choices=("zero", "error", "weighted"))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument(
        "--rows", nargs="*", default=[], help="beginnings of the names of rows; all by default"
    )
    parser.add_argument(
        "--damages", type=Path, default=None, help="file that keeps the measurement from one run to the next"
    )
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--timed", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)
    options = results.parsed(parser, "steps")
    if options.timed:
        timed(options.folder, options.timed)
    elif options.time:
        times(options.layers, options.record)
    elif options.fine_tuned:
        fine_tuned(options.start, options.rows, options.damages, options.steps, options.record)
    else:
        table(options.rows, options.damages, options.record)


if __name__ == "__main__":
    main()
