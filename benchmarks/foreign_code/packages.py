"""What is judged, as data: this file needs neither torch nor any of the packages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CodeBase:
    """A package nobody here wrote.

    Attributes:
        name: on the package index.
        domain: what it is for.
        requirements: it and what it needs besides `SHARED`, pinned.
    """

    name: str
    domain: str
    requirements: tuple[str, ...]


# What several of them import. torchvision is left out, with the packages that cannot be imported without it
# (timm, open_clip, vit-pytorch, segmentation-models-pytorch): its wheel on the index wants an older torch.
SHARED = (
    "einops==0.8.2",
    "einx==0.4.3",
    "frozendict==2.5.1",
    "loguru==0.7.3",
    "torch-einops-utils==0.2.0",
    "cloudpickle==3.1.2",
    "scipy==1.17.1",
)

CODE_BASES: dict[str, CodeBase] = {
    each.name: each
    for each in (
        CodeBase("x-transformers", "language model", ("x-transformers==2.31.10",)),
        CodeBase(
            "litgpt",
            "language model, LoRA of its own",
            ("litgpt==0.5.13", "lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0"),
        ),
        CodeBase("mambapy", "state-space model", ("mambapy==1.2.0",)),
        CodeBase("xlstm", "recurrent language model", ("xlstm==2.0.6",)),
        CodeBase(
            "native-sparse-attention-pytorch",
            "sparse attention",
            (
                "native-sparse-attention-pytorch==0.2.3",
                "rotary-embedding-torch==0.9.1",
                "local-attention==1.11.2",
                "hyper-connections==0.4.11",
            ),
        ),
        CodeBase(
            "reformer-pytorch",
            "reversible layers",
            (
                "reformer-pytorch==1.4.4",
                "axial-positional-embedding==0.3.12",
                "colt5-attention==0.11.2",
                "local-attention==1.11.2",
                "product-key-memory==0.3.0",
                "hyper-connections==0.4.11",
            ),
        ),
        CodeBase("rtdl_revisiting_models", "tables", ("rtdl_revisiting_models==0.0.2",)),
        CodeBase("zuko", "normalizing flows", ("zuko==1.6.0",)),
        CodeBase("torch-geometric", "graphs", ("torch-geometric==2.8.1",)),
        CodeBase("conformer", "speech recognition", ("conformer==0.3.2",)),
        CodeBase("vector-quantize-pytorch", "audio codec", ("vector-quantize-pytorch==1.32.0",)),
        CodeBase("stable-baselines3", "control", ("stable-baselines3==2.9.2", "gymnasium==1.4.0")),
        CodeBase("monai", "medical images", ("monai==1.6.1",)),
        CodeBase("torchdiffeq", "differential equations", ("torchdiffeq==0.2.5",)),
        CodeBase("perceiver-pytorch", "images", ("perceiver-pytorch==0.11.0",)),
        CodeBase(
            "diffusers",
            "diffusion",
            ("diffusers==0.42.1", "pillow==13.0.0", "importlib_metadata==10.2.0", "zipp==4.1.2"),
        ),
        CodeBase(
            "titans-pytorch",
            "memory trained as it runs",
            (
                "titans-pytorch==0.5.5",
                "tensordict==0.15.3",
                "pyvers==0.2.3",
                "orjson==3.13.0",
                "assoc-scan==0.0.6",
                "axial-positional-embedding==0.3.12",
                "hyper-connections==0.4.11",
                "rotary-embedding-torch==0.9.1",
                "x-transformers==2.31.10",
            ),
        ),
        CodeBase("ema-pytorch", "an average of weights as teacher", ("ema-pytorch==0.8.3",)),
        CodeBase(
            "pytorch-metric-learning",
            "losses with weights",
            (
                "pytorch-metric-learning==2.9.0",
                "scikit-learn==1.9.1",
                "joblib==1.6.0",
                "threadpoolctl==3.8.0",
            ),
        ),
        CodeBase(
            "lightning", "trainer", ("lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0")
        ),
        CodeBase(
            "sentence-transformers",
            "embeddings of sentences",
            (
                "sentence-transformers==6.2.0",
                "scikit-learn==1.9.1",
                "joblib==1.6.0",
                "threadpoolctl==3.8.0",
                "narwhals==2.29.0",
            ),
        ),
        CodeBase("efficientnet-pytorch", "images, backward of its own", ("efficientnet-pytorch==0.7.1",)),
        CodeBase(
            "performer-pytorch",
            "random features",
            (
                "performer-pytorch==1.1.4",
                "local-attention==1.11.2",
                "axial-positional-embedding==0.3.12",
                "hyper-connections==0.4.11",
            ),
        ),
        CodeBase(
            "gpytorch",
            "Gaussian processes",
            (
                "gpytorch==1.15.2",
                "linear-operator==0.6.1",
                "jaxtyping==0.3.11",
                "scikit-learn==1.9.1",
                "joblib==1.6.0",
                "threadpoolctl==3.8.0",
            ),
        ),
        CodeBase(
            "e3nn", "molecules, compiled code", ("e3nn==0.6.0", "opt_einsum_fx==0.1.4", "opt-einsum==3.4.0")
        ),
    )
}
