"""Models of other trades: tables, flows, graphs, speech, images, molecules, control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from foreign_code.case import Case, Step, broken, cast, cast_norms, healthy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _nothing(model: nn.Module) -> None:
    """The fault is not in the model."""


def _ft_transformer(dtype: torch.dtype, numbers: torch.dtype | None = None) -> Step:
    from rtdl_revisiting_models import FTTransformer

    model = FTTransformer(
        n_cont_features=3,
        cat_cardinalities=[4, 5],
        d_out=1,
        n_blocks=2,
        d_block=16,
        attention_n_heads=2,
        attention_dropout=0.1,
        ffn_d_hidden_multiplier=2,
        ffn_dropout=0.1,
        residual_dropout=0.0,
    )
    x, kinds = torch.randn(8, 3).to(numbers or dtype), torch.randint(0, 4, (8, 2))
    target = torch.randn(8, 1)
    return Step(model.to(dtype), lambda model: F.mse_loss(model(x, kinds).float(), target))


def _ft_transformer_cases() -> list[Case]:
    return [
        *healthy(_ft_transformer, "float32", "bfloat16", "float16", "autocast", "scaled"),
        broken(
            "a float32 table in bfloat16",
            r"\bx\b|input",
            lambda dtype: _ft_transformer(dtype, FP32),
            BF16,
            _nothing,
        ),
        broken(
            "float32 class token in bfloat16",
            "cls",
            _ft_transformer,
            BF16,
            cast("cls_embedding.weight", FP32),
        ),
        broken("float32 norms in float16", "norm", _ft_transformer, FP16, cast_norms(FP32)),
    ]


def _zuko(dtype: torch.dtype, sample: torch.dtype | None = None) -> Step:
    from zuko.flows import NSF

    model = NSF(features=3, context=2, transforms=2, hidden_features=(16, 16))
    x, context = torch.randn(8, 3).to(sample or dtype), torch.randn(8, 2).to(sample or dtype)
    return Step(model.to(dtype), lambda model: -model(context).log_prob(x).mean())


def _zuko_cases() -> list[Case]:
    return [
        *healthy(_zuko, "float32", "bfloat16", "autocast", "scaled"),
        broken(
            "float32 samples in bfloat16",
            r"\bx\b|context|input",
            lambda dtype: _zuko(dtype, FP32),
            BF16,
            _nothing,
        ),
        broken(
            "one layer in float32", r"hyper\.2", _zuko, BF16, cast("transform.transforms.0.hyper.2", FP32)
        ),
    ]


def _gat(dtype: torch.dtype, features: torch.dtype | None = None) -> Step:
    from torch_geometric.nn import GAT

    model = GAT(in_channels=8, hidden_channels=8, num_layers=2, out_channels=4, heads=2, v2=True)
    x, edges, labels = (
        torch.randn(10, 8).to(features or dtype),
        torch.randint(0, 10, (2, 30)),
        torch.randint(0, 4, (10,)),
    )
    return Step(model.to(dtype), lambda model: F.cross_entropy(model(x, edges), labels))


def _gcn(dtype: torch.dtype, weights: torch.dtype | None = None) -> Step:
    from torch_geometric.nn import GCN

    model = GCN(in_channels=8, hidden_channels=8, num_layers=2, out_channels=4)
    x, edges, labels = torch.randn(10, 8).to(dtype), torch.randint(0, 10, (2, 30)), torch.randint(0, 4, (10,))
    weight = torch.rand(30).to(weights or dtype)
    return Step(model.to(dtype), lambda model: F.cross_entropy(model(x, edges, edge_weight=weight), labels))


def _graph_cases() -> list[Case]:
    return [
        *healthy(_gat, "float32", "bfloat16", "autocast", "scaled"),
        broken(
            "float32 features in bfloat16", r"\bx\b|input", lambda dtype: _gat(dtype, FP32), BF16, _nothing
        ),
        broken(
            "GCN: float32 edge weights in bfloat16",
            "weight|input",
            lambda dtype: _gcn(dtype, FP32),
            BF16,
            _nothing,
        ),
        broken("float32 attention vector", "att", _gat, BF16, cast("convs.0.att", FP32)),
        broken("float32 last layer in float16", r"convs\.1", _gat, FP16, cast("convs.1", FP32)),
    ]


def _conformer(dtype: torch.dtype) -> Step:
    from conformer import Conformer

    model = nn.Sequential(
        Conformer(
            dim=16, depth=2, dim_head=8, heads=2, ff_mult=2, conv_expansion_factor=2, conv_kernel_size=5
        ),
        nn.Linear(16, 12),
    )
    frames, labels = torch.randn(2, 20, 16).to(dtype), torch.randint(1, 12, (2, 6))

    def loss(model: nn.Module) -> torch.Tensor:
        scores = model(frames).log_softmax(-1).transpose(0, 1).float()
        return F.ctc_loss(scores, labels, torch.tensor([20, 20]), torch.tensor([6, 6]))

    return Step(model.to(dtype), loss)


def _conformer_cases() -> list[Case]:
    return [
        *healthy(_conformer),
        broken(
            "float32 convolution in bfloat16",
            r"conv\.net",
            _conformer,
            BF16,
            cast("0.layers.0.conv.net.2", FP32),
        ),
        broken("float32 batch norm in float16", r"norm|net\.5", _conformer, FP16, cast_norms(FP32)),
        broken("float32 head in bfloat16", r"\b1\.weight|\b1 ", _conformer, BF16, cast("1", FP32)),
    ]


def _vector_quantizer(dtype: torch.dtype) -> Step:
    from vector_quantize_pytorch import ResidualVQ

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Conv1d(1, 16, 4, 4), nn.ConvTranspose1d(16, 1, 4, 4)
            self.quantizer = ResidualVQ(dim=16, codebook_size=8, num_quantizers=2, decay=0.9)

        def forward(self, wave: torch.Tensor) -> Any:
            quantized, _, commitment = self.quantizer(self.encoder(wave).transpose(1, 2))
            decoded = self.decoder(quantized.transpose(1, 2))
            return F.l1_loss(decoded, wave) + commitment.sum()

    wave = torch.randn(4, 1, 64).to(dtype)
    return Step(Autoencoder().to(dtype), lambda model: model(wave))


def _vector_quantizer_cases() -> list[Case]:
    return [
        *healthy(_vector_quantizer),
        broken("float32 decoder in bfloat16", "decoder", _vector_quantizer, BF16, cast("decoder", FP32)),
        broken("float32 encoder in float16", "encoder", _vector_quantizer, FP16, cast("encoder", FP32)),
    ]


def _policy(dtype: torch.dtype) -> Step:
    from gymnasium.spaces import Box
    from stable_baselines3.common.policies import ActorCriticPolicy

    seen, done = Box(-1, 1, (6,)), Box(-1, 1, (2,))
    model = ActorCriticPolicy(seen, done, lambda _: 1e-3, net_arch=[16, 16])
    states, actions, gains = torch.randn(8, 6), torch.randn(8, 2), torch.randn(8, 1)

    def loss(model: Any) -> Any:
        values, log_probability, entropy = model.evaluate_actions(states, actions)
        ratio = log_probability.exp().unsqueeze(-1)
        return F.mse_loss(values.float(), gains) - (ratio * gains).mean() - 0.01 * entropy.mean()

    return Step(model.to(dtype), loss)


def _policy_cases() -> list[Case]:
    return [
        *healthy(_policy, "float32", "autocast", "scaled"),
        broken("float32 states in bfloat16", r"states|obs|input", _policy, BF16, _nothing),
        broken("bfloat16 value net in float32", "value_net", _policy, FP32, cast("value_net", BF16)),
    ]


def _unet3d(dtype: torch.dtype) -> Step:
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    model = UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,), num_res_units=1
    )
    scan, label = torch.randn(1, 1, 8, 8, 8).to(dtype), torch.randint(0, 2, (1, 1, 8, 8, 8))
    loss = DiceLoss(to_onehot_y=True, softmax=True)
    return Step(model.to(dtype), lambda model: loss(model(scan), label))


def _unetr(dtype: torch.dtype) -> Step:
    from monai.networks.nets import UNETR

    model = UNETR(
        in_channels=1,
        out_channels=2,
        img_size=16,
        feature_size=4,
        hidden_size=16,
        mlp_dim=16,
        num_heads=2,
        norm_name="instance",
        spatial_dims=2,
    )
    scan = torch.randn(1, 1, 16, 16).to(dtype)
    return Step(model.to(dtype), lambda model: model(scan).float().square().mean())


def _monai_cases() -> list[Case]:
    return [
        *healthy(_unet3d),
        *healthy(_unetr, "bfloat16"),
        broken("float32 first convolution in bfloat16", r"model\.0", _unet3d, BF16, cast("model.0", FP32)),
        broken(
            "float32 positions in bfloat16",
            "position_embeddings",
            _unetr,
            BF16,
            cast("vit.patch_embedding.position_embeddings", FP32),
        ),
        broken("float32 norms in float16", "norm", _unetr, FP16, cast_norms(FP32)),
    ]


def _ode(dtype: torch.dtype, adjoint: bool = True) -> Step:
    from torchdiffeq import odeint, odeint_adjoint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

        def forward(self, time: torch.Tensor, state: torch.Tensor) -> Any:
            return self.net(state**3)

    start, times, target = torch.randn(4, 2).to(dtype), torch.linspace(0, 1, 4), torch.randn(4, 2)

    def loss(model: nn.Module) -> torch.Tensor:
        solve = odeint_adjoint if adjoint else odeint
        return F.l1_loss(solve(model, start, times, method="rk4")[-1].float(), target)

    return Step(Field().to(dtype), loss)


def _ode_cases() -> list[Case]:
    return [
        *healthy(_ode, "float32", "autocast"),
        broken("solved in bfloat16", "", _ode, BF16, _nothing),
        broken("last layer in bfloat16", r"net\.2", _ode, FP32, cast("net.2", BF16)),
    ]


def _perceiver(dtype: torch.dtype, image: torch.dtype | None = None) -> Step:
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        input_channels=3,
        input_axis=2,
        num_freq_bands=2,
        max_freq=4.0,
        depth=1,
        num_latents=4,
        latent_dim=16,
        cross_dim_head=8,
        latent_heads=2,
        latent_dim_head=8,
        num_classes=5,
    )
    images, labels = torch.randn(2, 8, 8, 3).to(image or dtype), torch.randint(0, 5, (2,))
    return Step(model.to(dtype), lambda model: F.cross_entropy(model(images).float(), labels))


def _perceiver_cases() -> list[Case]:
    return [
        *healthy(_perceiver, "float32", "bfloat16", "float16", "autocast", "scaled"),
        broken(
            "float32 images in bfloat16",
            "images|input",
            lambda dtype: _perceiver(dtype, FP32),
            BF16,
            _nothing,
        ),
        broken("float32 latents in bfloat16", "latents", _perceiver, BF16, cast("latents", FP32)),
        broken("float32 head in bfloat16", "to_logits", _perceiver, BF16, cast("to_logits", FP32)),
    ]


def _diffusers(dtype: torch.dtype) -> Step:
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
    scheduler = DDPMScheduler(num_train_timesteps=20)
    images = torch.randn(2, 1, 8, 8).to(dtype)

    def loss(model: Any) -> torch.Tensor:
        noise, times = torch.randn_like(images), torch.randint(0, 20, (2,))
        noisy = scheduler.add_noise(images, noise, times)
        return F.mse_loss(model(noisy, times).sample.float(), noise.float())

    return Step(model.to(dtype), loss)


def _diffusers_cases() -> list[Case]:
    return [
        *healthy(_diffusers, "float32", "bfloat16", "float16", "autocast", "scaled"),
        broken(
            "float32 time embedding in bfloat16",
            "time_embedding",
            _diffusers,
            BF16,
            cast("time_embedding", FP32),
        ),
        broken("float32 norms in bfloat16", "norm", _diffusers, BF16, cast_norms(FP32)),
        broken("float32 conv_out in float16", "conv_out", _diffusers, FP16, cast("conv_out", FP32)),
    ]


CASES: dict[str, Callable[[], list[Case]]] = {
    "rtdl_revisiting_models": _ft_transformer_cases,
    "zuko": _zuko_cases,
    "torch-geometric": _graph_cases,
    "conformer": _conformer_cases,
    "vector-quantize-pytorch": _vector_quantizer_cases,
    "stable-baselines3": _policy_cases,
    "monai": _monai_cases,
    "torchdiffeq": _ode_cases,
    "perceiver-pytorch": _perceiver_cases,
    "diffusers": _diffusers_cases,
}
