"""LoRA steps of a random model of Llama-3-8B's shape on a GPU, by one peer on one storage: a line of JSON for each set-up.

The same adapters (r 16 on every linear layer), data and seed for every peer: `isotype` and `trl` are their trainers, `trl+liger` TRL's with
Liger's kernels, `loop` PEFT's layers in a loop of torch's own, `isotype-loop` isotype's fused layers in the same loop. Each set-up is
rows × tokens, with gradient checkpointing and without. *step* is the median of all steps after the first two; FLOPs are those of frozen
weights (forward, and gradient of the input) and of causal attention, not those that checkpointing computes again. The last step is
profiled: how many kernels, their times, and the share of the step in which one ran. The public mark for bf16 LoRA of Llama-3-8B is
12,473 tokens/s and 402 TFLOP/s on one H100 (NeMo Automodel, 4096 tokens a row, without checkpointing).

Run: python benchmarks/gpu_train.py PEER --storage none|nf4 [--device cuda] [--work build/gpu-work] [--layers 32] [--steps 8] [--small]
`python benchmarks/gpu_train.py model` makes the model, of as many of the layers as the GPU has room for. `benchmarks/gpu.py` runs all peers.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_parts.profiled import Steps

ROOT = Path(__file__).resolve().parents[1]
PEERS = ("isotype", "trl", "trl+liger", "isotype-loop", "loop")
STORAGES = ("none", "nf4")
WARM_UP = 2
LORA: dict[str, Any] = {
    "r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "task_type": "CAUSAL_LM",
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
_NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
_LLAMA, _TOY = (4096, 14336, 32, 8, 128256), (64, 176, 4, 2, 512)
_WORK = 10 * 2**30
"""Bytes for a step's activations, logits and adapters beside the weights."""


@dataclass(frozen=True)
class Setting:
    """rows × tokens of a step, and whether activations are computed again in the backward."""

    rows: int
    tokens: int
    checkpointing: bool


@dataclass(frozen=True)
class Request:
    """What is trained; the same for every peer."""

    device: str
    work: Path
    small: bool
    layers: int
    steps: int

    @property
    def sizes(self) -> dict[str, int]:
        """Of the random model: Llama 3 8B's, or a toy's."""
        return {
            **dict(zip(_NAMES, _TOY if self.small else _LLAMA, strict=True)),
            "num_hidden_layers": self.layers,
        }

    @property
    def model(self) -> Path:
        """Where the model lies."""
        return self.work / "speed-model"

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Without checkpointing first: some peers leave hooks behind that it needs."""
        shapes = ((2, 64),) if self.small else ((4, 2048), (2, 512))
        return tuple(Setting(*shape, checkpointing) for checkpointing in (False, True) for shape in shapes)


# ------------------------------------------------------------------------------------------ the model


def weights(sizes: Mapping[str, int]) -> tuple[int, int]:
    """(weights of a layer, weights of the head; those of the embeddings are as many)"""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    narrow = hidden * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    return hidden * (2 * hidden + 2 * narrow + 3 * inner), hidden * sizes["vocab_size"]


def fitting_layers(sizes: Mapping[str, int], room: int) -> int:
    """How many of the layers have room in so many bytes, in 16 bits; at least one."""
    layer, head = weights(sizes)
    return max(1, min(sizes["num_hidden_layers"], (room - 2 * 2 * head) // (2 * layer)))


def make_model(request: Request) -> dict[str, Any]:
    """Make a random model on the device and save it with a tokenizer; fewer layers where there is no room."""
    import transformers
    from tokenizers import Tokenizer, models

    began = time.perf_counter()
    shutil.rmtree(request.model, ignore_errors=True)
    request.model.mkdir(parents=True)
    rooms = {"its disk": shutil.disk_usage(request.work).free - 2**30}
    if request.device == "cuda":
        rooms["the GPU"] = torch.cuda.mem_get_info()[0] - _WORK
    where = min(rooms, key=lambda name: rooms[name])
    layers = fitting_layers(request.sizes, rooms[where])
    config = transformers.LlamaConfig(
        **{**request.sizes, "num_hidden_layers": layers}, max_position_embeddings=8192, rope_theta=5e5, pad_token_id=0
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(request.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(request.model)
    vocabulary = {f"t{index}": index for index in range(request.sizes["vocab_size"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="t1"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", eos_token="t2"
    ).save_pretrained(request.model)
    seconds = time.perf_counter() - began
    text = f"{layers} of {request.layers} layers in {seconds:.0f} s"
    if layers < request.layers:
        text += f": there is room for no more, {rooms[where] / 2**30:.0f} GiB on {where}"
    return {"layers": layers, "seconds": seconds, "text": text}


def layers_of(request: Request) -> int:
    """The layers that the saved model has."""
    config = json.loads((request.model / "config.json").read_text(encoding="utf-8"))
    return int(config["num_hidden_layers"])


# ------------------------------------------------------------------------------------------ peers


class Peer:
    """One way to train; the model is loaded once, for all set-ups."""

    def __init__(self, name: str, storage: str, request: Request) -> None:
        self.name, self.storage, self.request = name, storage, request
        self.own = name.startswith("isotype")
        self.policy: Any = None
        self.masters: Any = None
        began = time.perf_counter()
        self.model = self._isotype_model() if self.own else self._plain_model()
        _settle(request.device)
        self.seconds_to_load = time.perf_counter() - began

    def _isotype_model(self) -> Any:
        import transformers

        import isotype
        from isotype.train.policy import masters_of

        quantization = None if self.storage == "none" else self.storage
        source = str(self.request.model)
        self.policy = isotype.resolve_precision(source, "bfloat16", quantization, device=self.request.device)
        model = isotype.load(source, self.policy)
        transformers.set_seed(0)
        model = isotype.add_lora(model, self.policy, **LORA)
        self.masters = masters_of(model)
        return model

    def _plain_model(self) -> Any:
        import peft
        import transformers

        more: dict[str, Any] = {}
        if self.storage == "nf4":
            more["quantization_config"] = transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            )
        if self.request.device == "cuda":
            more["device_map"] = {"": 0}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.request.model, dtype=torch.bfloat16, **more
        )
        transformers.set_seed(0)
        if self.name != "loop":
            return model  # the trainer adds the adapter, and what it thinks belongs to it
        model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return model

    def steps(self, setting: Setting) -> Steps:
        """Train with a set-up."""
        steps = Steps(self.request.device, self.request.steps)
        if self.name.endswith("loop"):
            self._loop(setting, steps)
        else:
            self._train(setting, steps)
        return steps

    def _batches(self, setting: Setting) -> torch.Tensor:
        shape = (self.request.steps, setting.rows, setting.tokens)
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, self.request.sizes["vocab_size"], shape, generator=generator)

    def _loop(self, setting: Setting, steps: Steps) -> None:
        import isotype
        from isotype.model.recompute import checkpoint_gradients

        model, device = self.model, self.request.device
        model.train()
        model.config.use_cache = False
        if setting.checkpointing:
            checkpoint_gradients(
                model, {"gradient_checkpointing_kwargs": {"use_reentrant": False}}, adapters=True
            )
        if self.own:
            print(isotype.fuse(model).summary, file=sys.stderr)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        for ids in self._batches(setting).to(device):
            with steps:
                with torch.autocast(device, torch.bfloat16):
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            steps.losses.append(float(loss.detach()))

    def _train(self, setting: Setting, steps: Steps) -> None:
        import peft
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        import isotype
        from isotype.train.policy import enforce_trainer
        from isotype.train.trainer import policy_trainer

        data = Dataset.from_dict({"input_ids": self._batches(setting).flatten(0, 1).tolist()})
        arguments = SFTConfig(
            output_dir=str(self.request.work / f"run-{self.name}-{self.storage}"), per_device_train_batch_size=setting.rows,
            max_steps=self.request.steps, max_length=setting.tokens, learning_rate=1e-4, lr_scheduler_type="constant",
            logging_steps=1, save_strategy="no", gradient_checkpointing=setting.checkpointing, bf16=True, seed=0, report_to="none",
            disable_tqdm=True, use_cpu=self.request.device == "cpu", use_liger_kernel=self.name == "trl+liger",
            dataset_kwargs={"skip_prepare_dataset": True}, dataloader_pin_memory=self.request.device == "cuda",
        )  # fmt: skip
        trainer_class = policy_trainer(SFTTrainer) if self.own else SFTTrainer
        adapted = hasattr(self.model, "peft_config")
        config = None if adapted else peft.LoraConfig(**LORA)
        if self.own:
            isotype.unfuse(self.model)
        trainer = trainer_class(
            self.model,
            arguments,
            train_dataset=data,
            processing_class=_words(self.request.model),
            peft_config=config,
        )
        if self.own:
            enforce_trainer(trainer, self.policy, self.masters)
            print(isotype.fuse(trainer.model).summary, file=sys.stderr)
        self.model = trainer.model
        trainer.add_callback(steps.callback())
        trainer.train()


def _words(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


def _settle(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def rows_of(name: str, storage: str, request: Request) -> Iterator[dict[str, Any]]:
    """A row for each set-up; one that has no room in the GPU's memory says so, and the others go on."""
    if not (request.model / "config.json").is_file():
        raise FileNotFoundError(f"no model in {request.model}: python benchmarks/gpu_train.py model makes it")
    peer = Peer(name, storage, request)
    for setting in request.settings:
        row: dict[str, Any] = {"peer": name, "storage": storage, **vars(setting)}
        row |= {"layers": layers_of(request), "seconds_to_load": round(peer.seconds_to_load, 2)}
        title = f"{setting.rows} x {setting.tokens}, checkpointing {'on' if setting.checkpointing else 'off'}"
        _settle(request.device)
        try:
            steps = peer.steps(setting)
        except torch.OutOfMemoryError as error:
            yield {**row, "failed": str(error)[:300], "text": f"{title}: out of memory"}
            continue
        row |= measures(steps, setting, request, layers_of(request))
        peak = (
            ""
            if row["peak"] is None
            else f", {row['peak'] / 2**30:.1f} GiB, reserved {row['reserved'] / 2**30:.1f}"
        )
        text = f"{title}: {row['step']:.3f} s, {row['tokens_per_second']:.0f} tokens/s, {row['tflops']:.1f} TFLOP/s{peak}"
        yield {**row, "text": f"{text}; {row['launches']} kernels, busy {100 * row['busy']:.0f} %"}


def measures(steps: Steps, setting: Setting, request: Request, layers: int) -> dict[str, Any]:
    """What the steps of a set-up come to."""
    step = statistics.median(steps.seconds[WARM_UP:])
    tokens = setting.rows * setting.tokens
    layer, head = weights(request.sizes)
    # Forward and gradient of the input, no gradient of frozen weights; scores and values of causal attention, backward too.
    flops = 4 * (layers * layer + head) * tokens
    flops += layers * setting.rows * 6 * setting.tokens**2 * request.sizes["hidden_size"]
    on_gpu = request.device == "cuda"
    return {
        "step": step,
        "seconds": steps.seconds,
        "tokens_per_second": tokens / step,
        "tflops": flops / step / 1e12,
        "peak": torch.cuda.max_memory_allocated() if on_gpu else None,
        "reserved": torch.cuda.max_memory_reserved() if on_gpu else None,
        "losses": steps.losses,
        **steps.profile(),
    }


def parser() -> argparse.ArgumentParser:
    """Of the arguments."""
    found = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    found.add_argument("peer", choices=["model", *PEERS])
    found.add_argument("--storage", choices=STORAGES, default="none")
    found.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    found.add_argument("--work", type=Path, default=ROOT / "build" / "gpu-work")
    found.add_argument("--layers", type=int, default=32)
    found.add_argument(
        "--steps",
        type=int,
        default=8,
        help=f"of each set-up; the first {WARM_UP} and the last are not counted",
    )
    found.add_argument("--small", action="store_true", help="a toy model")
    return found


def main() -> int:
    options = parser().parse_args()
    if options.steps < WARM_UP + 2:
        parser().error(f"--steps {options.steps}: the first {WARM_UP} and the last are not counted")
    layers = 2 if options.small else options.layers
    request = Request(options.device, options.work.resolve(), options.small, layers, options.steps)
    if options.peer == "model":
        print(json.dumps(make_model(request)))
        return 0
    for row in rows_of(options.peer, options.storage, request):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
