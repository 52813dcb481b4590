from __future__ import annotations

import pytest

from isotype.trace.sides import is_adapter
from tests.rules import samples
from tests.small import BF16


@pytest.mark.parametrize(
    "name",
    [
        "overall.weight",
        "exploration.proj.weight",
        "prompt_encoder.point_embed.weight",
        "prompt_encoder.mask_downscaling.0.weight",
        "several.prompted.weight",
        "magnitude_head.weight",
        "floral.weight",
        "adapterless.weight",
        "pandora.weight",
    ],
)
def test_names_of_ordinary_modules(name: str) -> None:
    assert not is_adapter(name, None)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.q_proj.lora_a.weight",
        "layers.0.q_proj.magnitude",
        "attn.to_q.lora_layer.down.weight",
        "blocks.0.attn_lora.weight",
        "unet_LoRA.down.weight",
        "blocks.3.adapter.down.weight",
        "text_adapters.0.weight",
        "model.modules_to_save.head.weight",
        "prompt_encoder.default.embedding.weight",
        "base_model.model.layers.1.self_attn.adaption_prompt",
    ],
)
def test_names_of_adapters(name: str) -> None:
    assert is_adapter(name, None)


def test_a_tuner_layer_is_known_without_its_name() -> None:
    name = "layers.0.q_proj.hada_w1_a.default"
    assert is_adapter(name, samples.adapter(BF16, name))
