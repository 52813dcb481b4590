"""What people put around a model: averages of weights, losses with weights of their own, trainers, compiled code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from foreign_code.case import Case, Step, broken, cast, cast_norms, healthy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))


def _ema(dtype: torch.dtype, teacher: torch.dtype | None = None) -> Step:
    """Self-distillation: the average is the teacher, and the loss moves it on."""
    from ema_pytorch import EMA

    student = _mlp().to(dtype)
    average = EMA(copy.deepcopy(student).to(teacher or dtype), beta=0.9, update_every=1, update_after_step=0)
    x = torch.randn(4, 8).to(dtype)

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            target = average(x)
        average.update()
        return F.mse_loss(model(x).float(), target.float())

    return Step(student, loss)


def _ema_cases() -> list[Case]:
    return [
        *healthy(_ema),
        broken(
            "a float32 average in bfloat16",
            "ema_model|average",
            lambda dtype: _ema(dtype, FP32),
            BF16,
            _nothing,
        ),
        broken("float32 head in bfloat16", r"\b3\.", _ema, BF16, cast("3", FP32)),
    ]


def _nothing(model: nn.Module) -> None:
    """The fault is not in the model."""


def _metric_learning(dtype: torch.dtype, proxies: torch.dtype | None = None) -> Step:
    from pytorch_metric_learning.losses import ArcFaceLoss

    class Embedder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.loss = _mlp(), ArcFaceLoss(num_classes=3, embedding_size=8)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return self.loss(self.trunk(x), labels)

    model = Embedder().to(dtype)
    model.loss.to(proxies or dtype)
    x, labels = torch.randn(6, 8).to(dtype), torch.randint(0, 3, (6,))
    return Step(model, lambda model: model(x, labels=labels))


def _metric_learning_cases() -> list[Case]:
    return [
        *healthy(_metric_learning, "float32", "bfloat16", "autocast"),
        # ArcFaceLoss casts its own weights to the embeddings' dtype for good.
        broken(
            "autocast float16 with a scaler",
            r"loss\.W",
            _metric_learning,
            FP32,
            _nothing,
            autocast=FP16,
            scaler=True,
        ),
        broken(
            "float32 class weights in bfloat16",
            r"loss\.W",
            lambda d: _metric_learning(d, FP32),
            BF16,
            _nothing,
        ),
        broken("float32 trunk layer in float16", r"trunk\.3", _metric_learning, FP16, cast("trunk.3", FP32)),
    ]


def _lightning(dtype: torch.dtype) -> Step:
    from lightning import LightningModule

    class Classifier(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = _mlp()
            self.seen = 0

        def training_step(self, batch: Any, index: int) -> Any:
            x, labels = batch
            self.seen += len(x)
            return F.cross_entropy(self.net(x), labels)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    batch = (torch.randn(4, 8).to(dtype), torch.randint(0, 8, (4,)))

    def loss(model: Any) -> Any:
        return model.training_step(batch, 0)

    return Step(Classifier().to(dtype), loss)


def _lightning_cases() -> list[Case]:
    def float32_batch(dtype: torch.dtype) -> Step:
        return replace(_lightning(FP32), model=_lightning(FP32).model.to(dtype))

    return [
        *healthy(_lightning),
        broken("a float32 batch in bfloat16", r"batch|input", float32_batch, BF16, _nothing),
        broken("float32 norm in bfloat16", r"net\.1", _lightning, BF16, cast_norms(FP32)),
        broken("float16 weights with a scaler", "is float16", _lightning, FP16, _nothing, scaler=True),
    ]


def _sentences(dtype: torch.dtype) -> Step:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.models import Dense, Pooling

    class Words(nn.Module):  # its own reads a tokenizer from the hub
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 16)
            self.config_keys: list[str] = []

        def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
            return {**features, "token_embeddings": self.embedding(features["input_ids"])}

    model = SentenceTransformer(
        modules=[Words(), Pooling(16), Dense(16, 64), Dense(64, 16)], device="cpu"
    ).to(dtype)
    mask = torch.ones(4, 6, dtype=torch.long)
    left, right = ({"input_ids": torch.randint(0, 32, (4, 6)), "attention_mask": mask} for _ in range(2))

    def loss(model: Any) -> Any:
        return MultipleNegativesRankingLoss(model)([dict(left), dict(right)], None)

    return Step(model, loss)


def _sentences_cases() -> list[Case]:
    return [
        *healthy(_sentences),
        broken("float32 dense layer in bfloat16", r"2\.linear", _sentences, BF16, cast("2", FP32)),
        broken("float32 embedding in float16", r"0\.embedding", _sentences, FP16, cast("0", FP32)),
    ]


def _efficientnet(dtype: torch.dtype) -> Step:
    from efficientnet_pytorch import EfficientNet
    from efficientnet_pytorch.utils import BlockArgs, GlobalParams

    block = BlockArgs(
        num_repeat=2,
        kernel_size=3,
        stride=[1],
        expand_ratio=2,
        input_filters=32,
        output_filters=8,
        se_ratio=0.25,
        id_skip=True,
    )
    settings = GlobalParams(
        width_coefficient=1.0,
        depth_coefficient=1.0,
        image_size=16,
        dropout_rate=0.2,
        num_classes=5,
        batch_norm_momentum=0.99,
        batch_norm_epsilon=1e-3,
        drop_connect_rate=0.2,
        depth_divisor=8,
        min_depth=None,
        include_top=True,
    )
    images, labels = torch.randn(2, 3, 16, 16).to(dtype), torch.randint(0, 5, (2,))
    model = EfficientNet([block], settings)
    return Step(model.to(dtype), lambda model: F.cross_entropy(model(images).float(), labels))


def _efficientnet_cases() -> list[Case]:
    return [
        *healthy(_efficientnet),
        broken("float32 stem in bfloat16", "_conv_stem", _efficientnet, BF16, cast("_conv_stem", FP32)),
        broken("float32 classifier in float16", "_fc", _efficientnet, FP16, cast("_fc", FP32)),
        broken("float32 batch norms in bfloat16", "_bn", _efficientnet, BF16, cast_norms(FP32)),
    ]


def _performer(dtype: torch.dtype) -> Step:
    from performer_pytorch import PerformerLM

    model = PerformerLM(num_tokens=32, max_seq_len=16, dim=16, depth=2, heads=2, dim_head=8, causal=False)
    ids = torch.randint(0, 32, (2, 16))
    return Step(model.to(dtype), lambda model: F.cross_entropy(model(ids).float().transpose(1, 2), ids))


def _performer_cases() -> list[Case]:
    return [
        *healthy(_performer),
        broken(
            "float32 projections in bfloat16", "projection_matrix", _performer, BF16, _float32_projections
        ),
        broken("float32 head in bfloat16", "to_out", _performer, BF16, cast("to_out", FP32)),
    ]


def _float32_projections(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("projection_matrix"):
            buffer.data = buffer.data.float()


def _gaussian_process(dtype: torch.dtype) -> Step:
    import gpytorch

    x, y = torch.rand(6, 1).to(dtype), torch.rand(6).to(dtype)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()

    class Model(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    def loss(model: Any) -> Any:
        score = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        return -score(model(x), y)

    return Step(Model().to(dtype), loss)


def _gaussian_process_cases() -> list[Case]:
    return [
        *healthy(_gaussian_process, "float32"),
        broken("all bfloat16", "cholesky", _gaussian_process, BF16, _nothing),
    ]


def _equivariant(dtype: torch.dtype) -> Step:
    from e3nn.o3 import FullyConnectedTensorProduct, Linear

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = FullyConnectedTensorProduct("2x0e+1x1o", "1x0e+1x1o", "2x0e+1x1o")
            self.linear = Linear("2x0e+1x1o", "1x0e")

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> Any:
            return self.linear(self.product(x, edges))

    x, edges = torch.randn(4, 5).to(dtype), torch.randn(4, 4).to(dtype)
    return Step(Layer().to(dtype), lambda model: model(x, edges).float().square().mean())


def _equivariant_cases() -> list[Case]:
    return [
        *healthy(_equivariant, "float32", "bfloat16"),
        # Its compiled code knows no autocast.
        broken("autocast bfloat16", r"product\.weight", _equivariant, FP32, _nothing, autocast=BF16),
        broken("float32 linear in bfloat16", "linear", _equivariant, BF16, cast("linear", FP32)),
    ]


CASES: dict[str, Callable[[], list[Case]]] = {
    "ema-pytorch": _ema_cases,
    "pytorch-metric-learning": _metric_learning_cases,
    "lightning": _lightning_cases,
    "sentence-transformers": _sentences_cases,
    "efficientnet-pytorch": _efficientnet_cases,
    "performer-pytorch": _performer_cases,
    "gpytorch": _gaussian_process_cases,
    "e3nn": _equivariant_cases,
}
