"""Training set-ups by seed, and the files and the command of each: random models of tens of MiB a step, rows of random words.

`benchmarks/foreseen.py` measures them.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

WORDS = 900
VOCABULARY = 1024

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
_WIDE = {"head_dim": 32}
_GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_positions": 512, "n_embd": 128, "n_layer": 4, "n_head": 4, "bos_token_id": 2, "eos_token_id": 3
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_SIZES, **_GROUPED}),
    "llama-tied": ("LlamaConfig", {**_SIZES, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**_SIZES, **_GROUPED, "sliding_window": 64}),
    "glm4": ("Glm4Config", {**_SIZES, **_GROUPED, **_WIDE}),
    "qwen3": ("Qwen3Config", {**_SIZES, **_GROUPED, **_WIDE}),
    "gemma": ("GemmaConfig", {**_SIZES, **_GROUPED, **_WIDE}),
    "gemma2": ("Gemma2Config", {**_SIZES, **_GROUPED, **_WIDE, "sliding_window": 64}),
    "gemma3": ("Gemma3TextConfig", {**_SIZES, **_GROUPED, **_WIDE, "sliding_window": 64}),
    "phi": ("PhiConfig", _SIZES),
    "phi3": ("Phi3Config", {**_SIZES, **_GROUPED}),
    "olmo2": ("Olmo2Config", {**_SIZES, **_GROUPED}),
    "granite": ("GraniteConfig", {**_SIZES, **_GROUPED}),
    "stablelm": ("StableLmConfig", {**_SIZES, **_GROUPED}),
    "starcoder2": ("Starcoder2Config", {**_SIZES, **_GROUPED}),
    "cohere": ("CohereConfig", {**_SIZES, **_GROUPED}),
    "smollm3": ("SmolLM3Config", {**_SIZES, **_GROUPED}),
    "gpt-neox": ("GPTNeoXConfig", _SIZES),
    "gpt2": ("GPT2Config", _GPT),
    "opt": ("OPTConfig", {**_SIZES, "ffn_dim": 512, "word_embed_proj_dim": 128}),
    "bloom": ("BloomConfig", {**_SIZES, "n_layer": 4, "n_head": 4}),
    "falcon": ("FalconConfig", _SIZES),
    "mixtral": ("MixtralConfig", {**_SIZES, **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**_SIZES, **_GROUPED, **_WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {**_SIZES, **_GROUPED, **_WIDE, "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    ),
}  # fmt: skip
"""Name -> (configuration class of transformers, its arguments). Not Qwen2: its tokenizers are read by a class that knows no word of these."""


_EXPERTS: dict[str, Any] = {"hidden_size": 256, "num_experts_per_tok": 2, "intermediate_size": 256}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe of 16": ("Qwen3MoeConfig", {**ARCHITECTURES["qwen3-moe"][1], **_EXPERTS, "num_experts": 16, "moe_intermediate_size": 256}),
    "gpt-oss of 16": ("GptOssConfig", {**ARCHITECTURES["gpt-oss"][1], **_EXPERTS, "num_local_experts": 16}),
}  # fmt: skip
"""Of 16 experts in 4 layers, whose weights are nine tenths of the model's."""

_LAYERS = ["linear_attention", "full_attention"] * 2
TYPES: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in (
            "mamba", "deepseek_v3", "olmoe", "falcon_h1", "phimoe", "minimax", "ernie4_5_moe", "hunyuan_v1_moe", "glm4_moe",
            "persimmon", "olmo3", "exaone4", "seed_oss", "ministral", "bitnet", "llama4_text", "nemotron_h",
        )
    },
    "jamba": {"expert_layer_period": 2, "expert_layer_offset": 1},
    "qwen3_next": {"layer_types": _LAYERS},
    "granitemoehybrid": {"layer_types": _LAYERS, "mamba_n_heads": 8, "mamba_d_head": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 128, "context_length": 512},
    "xlstm": {"embedding_dim": 128, "num_heads": 4, "num_blocks": 4},
}  # fmt: skip
"""Other model types of transformers, with sizes that `tests/zoo` does not know."""
PICTURED = ("gemma3", "llava", "gemma3", "llava")
"""Families of `benchmarks/pictures.py`, whose rows have an image."""
MEDIUM: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in (
            "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe", "phimoe", "granitemoe", "gpt_oss", "llama4_text",
            "ernie4_5_moe", "glm4_moe", "hunyuan_v1_moe", "minimax", "dots1", "flex_olmo", "glm4_moe_lite", "longcat_flash", "nemotron_h",
        )
    },
    "dbrx": {
        "d_model": 256,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 256, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 256},
    },
    "granitemoehybrid": {"layer_types": _LAYERS, "mamba_n_heads": 16, "mamba_d_head": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen3_next": {"layer_types": _LAYERS},
}  # fmt: skip
"""Mixtures of eight experts, with steps of 50 to 500 MiB."""
_MEDIUM_SIZES: dict[str, Any] = {
    **_SIZES,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
    "sliding_window": 64,
    "num_attention_heads": 4,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 256),
}


@dataclass(frozen=True)
class Setup:
    """One training set-up.

    Attributes:
        architecture: a key of `ARCHITECTURES`, `MIXTURES`, `TYPES` or `MEDIUM`, or a family of `pictures.py`.
        method: a training command.
        storage: of the frozen weights: `none`, `nf4`, `int8` or `mxfp4`.
        adapters: `lora`, `dora` or `full` (every weight is trained).
        evaluation: `off`, `default` rows, or rows a step.
        completion: tokens of a completion (grpo, rloo).
        beta: 0 without a reference model (grpo, rloo).
        padded: whether rows have several lengths, so that batches have padding; the longest are in one batch.
        medium: whether the model has the larger sizes of `MEDIUM`.
    """

    architecture: str
    method: str
    storage: str
    dtype: str
    adapters: str
    rank: int
    dropout: float
    packing: bool
    checkpointing: str
    accumulation: int
    optimizer: str
    evaluation: str
    rows: int
    length: int
    completion: int = 0
    beta: float = 0.0
    fused: bool = True
    compiled: bool = False
    padded: str = ""
    medium: bool = False

    @property
    def name(self) -> str:
        """As it is printed."""
        words = [self.architecture, self.method, self.storage, self.dtype]
        words += [self.adapters if self.adapters == "full" else f"{self.adapters} r{self.rank}"]
        words += [f"dropout {self.dropout:g}"] if self.dropout else []
        words += ["packed"] if self.packing else []
        words += [self.padded] if self.padded else []
        words += [f"checkpointing {self.checkpointing}"] if self.checkpointing != "False" else []
        words += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        words += [f"completion {self.completion}, beta {self.beta:g}"] if self.completion else []
        words += ([] if self.fused else ["unfused"]) + (["compiled"] if self.compiled else [])
        words += [self.optimizer, f"evaluation {self.evaluation}", f"{self.rows} x {self.length}"]
        return ", ".join(words)


def draw(seed: int, number: int) -> Setup:
    """The set-up with this number of a seed."""
    dice = random.Random(f"{seed}/{number}")
    full = dice.random() < 0.25
    share = dice.random()
    method = "sft" if share < 0.75 else "dpo" if share < 0.85 else "kto"
    return Setup(
        architecture=dice.choice(tuple(ARCHITECTURES)),
        method=method,
        storage="none" if full else dice.choice(("none", "nf4", "int8")),
        dtype=dice.choice(("float32", "bfloat16", "float16")),
        adapters="full" if full else dice.choice(("lora", "lora", "dora")),
        rank=dice.choice((4, 8, 16, 64)),
        dropout=dice.choice((0.0, 0.05)),
        packing=method == "sft" and dice.random() < 0.3,
        checkpointing=dice.choice(("False", "False", "True", "auto")),
        accumulation=dice.choice((1, 1, 2, 3)),
        optimizer=dice.choice(("adamw_torch_fused", "adamw_torch_fused", "adamw_torch", "sgd", "adafactor", "rmsprop")),
        evaluation=dice.choice(("off", "off", "default", "1", "8", "16")),
        rows=dice.choice((2, 2, 4, 8) if method == "kto" else (1, 2, 4, 8)),  # TRL refuses KTO of one row
        length=dice.choice((64, 96, 128, 192)),
    )  # fmt: skip


METHODS = ("sft", "sft", "dpo", "kto", "reward", "grpo", "rloo")
STORAGES = ("none", "nf4", "int8", "fp4", "mixed")
OPTIMIZERS = (
    "adamw_torch_fused",
    "adamw_torch",
    "sgd",
    "adafactor",
    "rmsprop",
    "adamw_bnb_8bit",
    "lion_32bit",
    "paged_adamw_8bit",
)


def draw_wide(seed: int, number: int) -> Setup:
    """As `draw`, of every method, more architectures, images, compiled models and layers that are not fused."""
    dice = random.Random(f"wide/{seed}/{number}")
    method = dice.choice(METHODS)
    pictured = dice.random() < 0.12
    known = PICTURED if pictured else dice.choice((tuple(ARCHITECTURES), tuple(TYPES), tuple(TYPES)))
    adapters = dice.choice(("lora", "lora", "dora", "full"))
    policy = method in ("grpo", "rloo")
    return Setup(
        architecture=dice.choice(known),
        method=method,
        storage="none" if adapters == "full" else dice.choice(STORAGES),
        dtype=dice.choice(("float32", "bfloat16", "float16")),
        adapters=adapters,
        rank=dice.choice((1, 8, 16, 64)),
        dropout=dice.choice((0.0, 0.05)),
        packing=method == "sft" and not pictured and dice.random() < 0.3,
        checkpointing=dice.choice(("False", "False", "True", "auto")),
        accumulation=dice.choice((1, 1, 2)),
        optimizer=dice.choice(OPTIMIZERS),
        evaluation=dice.choice(("off", "off", "default", "4")),
        rows=dice.choice((2, 4)) if policy or method == "kto" else dice.choice((1, 2, 4)),
        length=dice.choice((64, 96, 128)),
        completion=dice.choice((16, 32)) if policy else 0,
        beta=dice.choice((0.0, 0.1)) if policy else 0.0,
        fused=dice.random() < 0.75,
        compiled=dice.random() < 0.15,
    )  # fmt: skip


def draw_padded(seed: int, number: int) -> Setup:
    """As `draw_wide`, with rows of several lengths, by length or with all rows in one batch."""
    dice = random.Random(f"padded/{seed}/{number}")
    method = dice.choice(("sft", "sft", "dpo", "kto"))
    by_length = method in ("sft", "kto") and dice.random() < 0.4
    rows = dice.choice((2, 4, 8))
    return replace(
        draw_wide(seed, number),
        architecture=dice.choice((*ARCHITECTURES, *TYPES)),
        method=method,
        packing=False,
        rows=rows,
        evaluation=dice.choice(("off", "off", "default", "4", "16")),
        length=dice.choice((96, 128, 192)),
        completion=0,
        beta=0.0,
        padded="by length" if by_length else "padded",
    )


def draw_medium(seed: int, number: int) -> Setup:
    """As `draw_wide`, of mixtures of experts and of models that take images, with steps of 50 to 500 MiB."""
    import pictures

    dice = random.Random(f"medium/{seed}/{number}")
    method = dice.choice(("sft", "sft", "sft", "dpo", "kto", "reward", "grpo"))
    pictured = dice.random() < 0.4
    setup = draw_wide(seed, number)
    policy = method == "grpo"
    return replace(
        setup,
        architecture=dice.choice(pictures.FAMILIES if pictured else tuple(MEDIUM)),
        method=method,
        packing=method == "sft" and not pictured and dice.random() < 0.35,
        rows=dice.choice((2, 4)) if pictured or policy or method == "kto" else dice.choice((1, 2, 4)),
        length=dice.choice((192, 256, 320)),
        completion=dice.choice((8, 16)) if policy else 0,
        beta=dice.choice((0.0, 0.1)) if policy else 0.0,
        compiled=dice.random() < 0.08,
        medium=True,
    )


def mixtures() -> list[tuple[str, Setup]]:
    """Every storage of `MIXTURES`, with and without checkpointing."""
    every = itertools.product(MIXTURES, ("none", "nf4", "int8", "mxfp4"), ("False", "True"))
    setups = [
        Setup(
            name,
            "sft",
            storage,
            "bfloat16",
            "lora",
            16,
            0.05,
            False,
            recompute,
            1,
            "adamw_torch",
            "off",
            4,
            128,
        )
        for name, storage, recompute in every
        if storage != "mxfp4" or name.startswith("gpt-oss")
    ]
    return [(f"m/{number}", setup) for number, setup in enumerate(setups)]


# The files of a set-up


def pictured(setup: Setup) -> bool:
    """Whether the rows have images."""
    import pictures

    known = pictures.FAMILIES if setup.medium else PICTURED
    return setup.architecture in known


def save_model(setup: Setup, folder: Path) -> None:
    """A random model with a tokenizer of whole words, or with a processor."""
    if pictured(setup):
        import pictures

        pictures.save_model(setup.architecture, folder)
        return
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<unk>", "<s>", "</s>", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    if setup.medium:
        config = _config_of_type(setup.architecture, _MEDIUM_SIZES, MEDIUM)
    elif setup.architecture in TYPES:
        config = _config_of_type(setup.architecture, {**_SIZES, "sliding_window": 64}, TYPES)
    else:
        name, settings = (ARCHITECTURES | MIXTURES)[setup.architecture]
        config = getattr(transformers, name)(**settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    if setup.storage == "mxfp4":
        write_blocks(folder)


def _config_of_type(name: str, sizes: dict[str, Any], types: dict[str, dict[str, Any]]) -> Any:
    from tests.zoo.causal import SETTINGS
    from tests.zoo.shrink import tiny_config

    known = {key: size for key, size in sizes.items() if hasattr(tiny_config(name, {}), key)}
    return tiny_config(name, {**SETTINGS.get(name, {}), **known, **types[name]})


def write_blocks(folder: Path) -> None:
    """Put random blocks of mxfp4 in the place of the experts of a saved gpt-oss."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        codes = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        weights[f"{name}_blocks"] = codes
        weights[f"{name}_scales"] = torch.full(codes.shape[:-1], 121, dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def save_rows(setup: Setup, folder: Path) -> None:
    """Rows as long as a step may take them: packed ones are shorter, others are cut."""
    dice, shares = random.Random(0), cycle((5, 3))

    def words(count: int) -> str:
        return " ".join(f"w{dice.randrange(WORDS)}" for _ in range(count))

    with_images = pictured(setup)
    parts = cycle((8, 3, 5, 2, 7, 1, 4)) if setup.padded else cycle((8,))

    def row() -> dict[str, Any]:
        part = next(parts)
        # A reward model's row is left out where it is longer than `max_length`, with its first and its last token.
        half = setup.length * part // 16 - (2 if setup.method == "reward" else 0)
        if with_images:
            return _pictured_row(setup, words, folder, dice)
        if setup.completion:
            return {"prompt": words(setup.length - setup.completion)}
        if setup.method == "kto":
            answer = " " + words(half)
            return {"prompt": words(half), "completion": answer, "label": dice.random() < 0.5}
        if setup.method in ("dpo", "reward"):
            return {"prompt": words(half), "chosen": " " + words(half), "rejected": " " + words(half)}
        # Two documents fill a packed row, so that every batch is the largest that can occur.
        share = next(shares) if setup.packing else 8
        return {
            "text": words(setup.length * share // 8 - 2 if setup.packing else setup.length * part // 8 + 8)
        }

    # Of several lengths, all rows are in one batch, which is the fullest.
    steps = setup.rows if setup.padded else 3 * setup.rows * setup.accumulation * (2 if setup.packing else 1)
    folder.mkdir()
    held = setup.rows if setup.evaluation in ("off", "default") else int(setup.evaluation)
    for split, count in (("train", steps), ("test", held * (2 if setup.packing else 1))):
        lines = "".join(json.dumps(row()) + "\n" for _ in range(count))
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def _pictured_row(setup: Setup, words: Any, folder: Path, dice: random.Random) -> dict[str, Any]:
    """A row with an image, or with two of different sizes, whose turns are as long as every other's."""
    from tests.zoo.processors import picture

    method, names = setup.method, list[str]()
    for width, height in ((160, 240), (300, 200))[: 1 + setup.medium]:
        names.append(f"{dice.random()}.png")
        picture(width, height, seed=dice.randrange(100)).save(folder / names[-1])

    def turn(role: str) -> list[dict[str, Any]]:
        content = [{"type": "image"}] * len(names) if role == "user" else []
        return [{"role": role, "content": [*content, {"type": "text", "text": words(24)}]}]

    columns: dict[str, list[str]] = {
        "dpo": ["chosen", "rejected"],
        "reward": ["chosen", "rejected"],
        "kto": ["completion"],
        "sft": ["completion"],
    }
    row = {
        "prompt": turn("user"),
        **{column: turn("assistant") for column in columns.get(method, [])},
        "images": names,
    }
    return {**row, "label": dice.random() < 0.5} if method == "kto" else row


def reward(completions: list[Any], **_columns: Any) -> list[float]:
    """A reward that is rarely the same for two completions."""
    return [float(hash(str(completion)) % 1000) for completion in completions]


def command_of(setup: Setup, root: Path) -> list[str]:
    """The arguments of `isotype`, without `check`."""
    words = [
        setup.method, "--model_name_or_path", root / "model", "--dataset_name", root / "data", "--output_dir", root / "out",
        "--dtype", setup.dtype, "--device", "cpu", "--per_device_train_batch_size", setup.rows,
        "--gradient_checkpointing", setup.checkpointing, "--gradient_accumulation_steps", setup.accumulation,
        "--optim", setup.optimizer, "--max_steps", 2, "--save_strategy", "no", "--report_to", "none", "--learning_rate", 1e-4,
    ]  # fmt: skip
    if setup.adapters == "full":
        words += ["--use_peft", "False"]
    else:
        words += ["--lora_r", setup.rank, "--lora_dropout", setup.dropout]
        words += ["--use_dora", "True"] if setup.adapters == "dora" else []
    words += ["--quantization", setup.storage] if setup.storage != "none" else []
    words += ["--packing", "True"] if setup.packing else []
    if setup.completion:
        words += ["--max_completion_length", setup.completion, "--num_generations", 2, "--beta", setup.beta]
        words += ["--reward_funcs", "random_setups.reward"]
    elif not pictured(setup):
        words += ["--max_length", setup.length]
    words += ["--train_sampling_strategy", "group_by_length"] if setup.padded == "by length" else []
    words += [] if setup.fused else ["--no_fuse"]
    words += ["--torch_compile", "True", "--torch_compile_backend", "eager"] if setup.compiled else []
    if setup.evaluation != "off":
        words += ["--eval_strategy", "steps", "--eval_steps", 2]
        words += [] if setup.evaluation == "default" else ["--per_device_eval_batch_size", setup.evaluation]
    return list(map(str, words))
