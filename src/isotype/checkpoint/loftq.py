"""Initialises adapters from the quantization error of their layers (LoftQ, https://arxiv.org/abs/2310.08659).

LoftQ repeats two steps: quantize W - BA to Q, and compute B and A from W - Q. isotype does the second step once, and
does not change the quantized base. The quantization error is D = W - Q(W). The adapter's product s B A (with s =
alpha / r) becomes the matrix of rank r that is nearest to D. PEFT's `replace_lora_weights_loftq` (0.21) ignores s,
and sets B A to the nearest matrix.

If the input channels have the second moments m, the squared output error is Σ m d². Here, d are the entries of D
(`isotype.model.fitted`). The matrix of rank r with the smallest error is U Uᵀ D, where the columns of U are the first r
left singular vectors of D diag(√m).
"""

from collections.abc import Mapping
from typing import Any

import torch

from isotype.checkpoint.checkpoint import Checkpoint
from isotype.checkpoint.stored_weights import StoredWeights, blank_model
from isotype.checkpoint.values import held_weight
from isotype.core.console import with_bar
from isotype.core.errors import PrecisionError
from isotype.core.names import base_name
from isotype.core.random_states import random_states_kept
from isotype.model.quantized import replaces_conv1d
from isotype.model.walk import is_tuner_layer, kind_of, places

_ADAPTER = "default"
_TURNS = 4
"""Number of power iterations for the singular vectors. With fewer iterations, the last vectors have errors of some percent."""


@torch.no_grad()
def begin_from_error(model: Any, checkpoint: Checkpoint, moments: Mapping[str, torch.Tensor]) -> int:
    """Initialise the adapters of 4-bit layers from the quantization error, and return the number of these layers.

    Adapters of int8 layers are not changed, because int8 errors are a hundredth of 4-bit errors. `moments`: layer name
    in the base model -> relative second moments `[in]` of the layer's input channels. Raises PrecisionError if the
    checkpoint is already quantized.
    """
    if saved := checkpoint.facts.saved_format:
        what = f"{checkpoint.name}, saved in {saved}"
        expected = "a checkpoint in a float dtype, which isotype quantizes on loading"
        fix = "omit --init_lora_weights, or use the model before it was quantized"
        raise PrecisionError.of("adapters cannot begin from the quantization error", what, expected, fix)
    checkpoint = checkpoint.downloaded()
    stored = StoredWeights(blank_model(checkpoint.model_config), checkpoint.require_headers())
    layers: list[tuple[str, Any]] = []
    for place in places(model):
        layer: Any = place.module
        adapts = is_tuner_layer(layer) and _ADAPTER in getattr(layer, "lora_A", ())
        if adapts and kind_of(layer.get_base_layer()) == "linear4bit":
            layers.append((base_name(place.name), layer))
    for name, layer in with_bar(layers, "decomposing quantization errors", len(layers)):
        base = layer.get_base_layer()
        weight = stored.read(f"{name}.weight").float()
        error = weight - held_weight(base, torch.float32)
        _set_product(layer, error.T if replaces_conv1d(base) else error, moments.get(name))
    return len(layers)


def _set_product(layer: Any, error: torch.Tensor, moments: torch.Tensor | None) -> None:
    """Set the adapter's product s B A to the matrix of rank at most r that is nearest to the error `[out, in]`."""
    down, up = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
    error = error.to(down.device)
    weighed = error if moments is None else error * moments.to(down.device, torch.float32).sqrt()
    rank = min(down.shape[0], *error.shape)
    with random_states_kept(down.device):
        torch.manual_seed(0)  # every run starts from the same adapters
        vectors, values, _ = torch.svd_lowrank(weighed, q=min(2 * rank, *error.shape), niter=_TURNS)
    rank = min(rank, int((values > 0).sum()))
    roots = (values[:rank] / layer.scaling[_ADAPTER]).sqrt()
    up.zero_()
    up[:, :rank] = vectors[:, :rank] * roots
    down[:rank] = (vectors[:, :rank].T @ error) / (layer.scaling[_ADAPTER] * roots).unsqueeze(1)
