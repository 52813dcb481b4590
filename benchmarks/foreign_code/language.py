"""Language models that nobody here wrote: transformers of another make, state-space models, recurrent networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from foreign_code.case import Case, Step, broken, cast, cast_norms, healthy, with_lora

VOCABULARY = 64
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def tokens(rows: int = 2, length: int = 16) -> torch.Tensor:
    """`[rows, length]` random ids."""
    return torch.randint(0, VOCABULARY, (rows, length))


def next_token_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Cross entropy of a model that returns logits `[rows, length, vocabulary]`."""
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def _x_transformers(dtype: torch.dtype) -> Step:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, rotary_pos_emb=True, use_rmsnorm=True)
    model = AutoregressiveWrapper(
        TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=32, attn_layers=layers)
    )
    ids = tokens()
    return Step(model.to(dtype), lambda model: model(ids))


def _x_transformers_cases() -> list[Case]:
    head, lora = "to_logits", with_lora(_x_transformers, ["to_q", "to_v"])
    return [
        *healthy(_x_transformers, "float32", "bfloat16", "float16", "autocast", "scaled"),
        broken("float32 head in bfloat16", head, _x_transformers, BF16, cast(f"net.{head}", FP32)),
        broken(
            "float32 embedding in float16", "token_emb", _x_transformers, FP16, cast("net.token_emb", FP32)
        ),
        broken(
            "float32 norms in bfloat16", r"layers\.\d+\.0\.0\.g|norm", _x_transformers, BF16, cast_norms(FP32)
        ),
        broken(
            "one adapter in float16",
            "lora_A",
            lora,
            BF16,
            cast("base_model.model.net.attn_layers.layers.0.1.to_q.lora_A", FP16),
        ),
        broken(
            "float16 weights with a scaler", "is float16", _x_transformers, FP16, lambda _: None, scaler=True
        ),
    ]


def _litgpt(dtype: torch.dtype) -> Step:
    from litgpt import GPT, Config

    config = Config(
        block_size=32,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        n_layer=2,
        n_head=2,
        n_embd=32,
        n_query_groups=1,
        rotary_percentage=1.0,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=48,
        bias=False,
        parallel_residual=False,
    )
    ids = tokens()
    return Step(GPT(config).to(dtype), lambda model: next_token_loss(model, ids))


def _litgpt_lora(dtype: torch.dtype) -> Step:
    from litgpt.lora import GPT, Config, mark_only_lora_as_trainable

    config = Config(
        block_size=32,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        n_layer=2,
        n_head=2,
        n_embd=32,
        n_query_groups=1,
        rotary_percentage=1.0,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=48,
        bias=False,
        parallel_residual=False,
        lora_r=4,
        lora_alpha=8,
        lora_query=True,
        lora_value=True,
        lora_projection=True,
    )
    model = GPT(config).to(dtype)
    mark_only_lora_as_trainable(model)
    ids = tokens()
    return Step(model, lambda model: next_token_loss(model, ids))


def _float32_adapters(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()


def _litgpt_cases() -> list[Case]:
    return [
        *healthy(_litgpt),
        *healthy(_litgpt_lora, "bfloat16", "scaled"),
        broken("float32 head in bfloat16", "lm_head", _litgpt, BF16, cast("lm_head", FP32)),
        broken("its own adapters in float32", "lora_", _litgpt_lora, BF16, _float32_adapters),
        broken(
            "rotary tables in float32",
            "cos|sin",
            _litgpt,
            BF16,
            lambda m: (cast("cos", FP32)(m), cast("sin", FP32)(m)),
        ),
    ]


def _mambapy(dtype: torch.dtype) -> Step:
    from mambapy.mamba import Mamba, MambaConfig

    class LanguageModel(nn.Module):  # its own (mambapy.lm) needs CUDA kernels to be imported
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, config.d_model)
            self.mamba = Mamba(config)
            self.head = nn.Linear(config.d_model, VOCABULARY, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.mamba(self.embedding(ids)))
            return logits

    ids = tokens()
    model = LanguageModel(MambaConfig(d_model=16, n_layers=2, d_state=4, pscan=True))
    return Step(model.to(dtype), lambda model: next_token_loss(model, ids))


# `self.A_log.float()` and `self.D.float()`: without autocast it runs in no 16 bits, whatever else is wrong.
_MAMBAPY_ITSELF = r"float32 at mamba\.py:24\d"


def _mambapy_cases() -> list[Case]:
    def with_itself(name: str, cause: str, dtype: torch.dtype, fault: Any) -> Case:
        return broken(name, f"{cause}|{_MAMBAPY_ITSELF}", _mambapy, dtype, fault)

    mixer = "mamba.layers.0.mixer"
    return [
        *healthy(_mambapy, "float32", "autocast", "scaled"),
        broken("all bfloat16", _MAMBAPY_ITSELF, _mambapy, BF16, lambda _: None),
        with_itself("float32 dt_proj in bfloat16", "dt_proj", BF16, cast(f"{mixer}.dt_proj", FP32)),
        with_itself("float32 norms in bfloat16", "norm", BF16, cast_norms(FP32)),
        broken("bfloat16 in_proj in float32", "in_proj", _mambapy, FP32, cast(f"{mixer}.in_proj", BF16)),
    ]


def _xlstm(dtype: torch.dtype) -> Step:
    from xlstm import mLSTMBlockConfig, mLSTMLayerConfig, xLSTMLMModel, xLSTMLMModelConfig

    block = mLSTMBlockConfig(mlstm=mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=2))
    config = xLSTMLMModelConfig(
        mlstm_block=block, context_length=16, num_blocks=2, embedding_dim=16, vocab_size=VOCABULARY
    )
    ids = tokens()
    return Step(xLSTMLMModel(config).to(dtype), lambda model: next_token_loss(model, ids))


def _xlstm_cases() -> list[Case]:
    block = "xlstm_block_stack.blocks.0.xlstm"
    return [
        *healthy(_xlstm, "float32", "bfloat16", "autocast", "scaled"),
        broken("float32 gate in bfloat16", "igate", _xlstm, BF16, cast(f"{block}.mlstm_cell.igate", FP32)),
        broken(
            "float32 embedding in bfloat16", "token_embedding", _xlstm, BF16, cast("token_embedding", FP32)
        ),
        broken("float32 norms in float16", "norm", _xlstm, FP16, cast_norms(FP32)),
    ]


def _titans(dtype: torch.dtype) -> Step:
    from titans_pytorch import MemoryAsContextTransformer

    ids = tokens()
    model = MemoryAsContextTransformer(
        num_tokens=VOCABULARY,
        dim=16,
        depth=2,
        segment_len=8,
        num_persist_mem_tokens=2,
        num_longterm_mem_tokens=2,
        dim_head=8,
        heads=2,
        neural_memory_layers=(2,),
    )
    return Step(model.to(dtype), lambda model: model(ids, return_loss=True))


def _titans_cases() -> list[Case]:
    return [
        *healthy(_titans, "float32", "autocast"),
        broken("float32 head in bfloat16", "to_logits", _titans, BF16, cast("to_logits", FP32)),
    ]


def _sparse_attention(dtype: torch.dtype) -> Step:
    from native_sparse_attention_pytorch import SparseAttention

    model = SparseAttention(
        dim=32,
        dim_head=16,
        heads=2,
        sliding_window_size=4,
        compress_block_size=4,
        compress_block_sliding_stride=4,
        selection_block_size=4,
        num_selected_blocks=2,
        causal=True,
    )
    hidden = torch.randn(2, 16, 32).to(dtype)
    return Step(model.to(dtype), lambda model: model(hidden).float().square().mean())


def _sparse_attention_cases() -> list[Case]:
    def float32_input(dtype: torch.dtype) -> Step:
        step = _sparse_attention(dtype)
        hidden = torch.randn(2, 16, 32)
        step.inputs = lambda model: model(hidden).float().square().mean()
        return step

    return [
        *healthy(_sparse_attention),
        broken("a float32 input", "input|hidden", float32_input, BF16, lambda _: None),
        broken("float32 norm in bfloat16", "norm", _sparse_attention, BF16, cast("norm", FP32)),
        broken(
            "float32 gate in float16",
            "to_strategy_combine",
            _sparse_attention,
            FP16,
            cast("to_strategy_combine", FP32),
        ),
    ]


def _reformer(dtype: torch.dtype) -> Step:
    from reformer_pytorch import ReformerLM

    model = ReformerLM(
        num_tokens=VOCABULARY,
        dim=32,
        depth=2,
        max_seq_len=32,
        heads=2,
        bucket_size=4,
        n_hashes=2,
        causal=True,
    )
    ids = tokens()
    return Step(model.to(dtype), lambda model: next_token_loss(model, ids))


def _reformer_cases() -> list[Case]:
    return [
        *healthy(_reformer, "float32", "autocast"),
        broken("float32 head in bfloat16", "out", _reformer, BF16, cast("out", FP32)),
    ]


CASES: dict[str, Callable[[], list[Case]]] = {
    "x-transformers": _x_transformers_cases,
    "litgpt": _litgpt_cases,
    "mambapy": _mambapy_cases,
    "xlstm": _xlstm_cases,
    "titans-pytorch": _titans_cases,
    "native-sparse-attention-pytorch": _sparse_attention_cases,
    "reformer-pytorch": _reformer_cases,
}
