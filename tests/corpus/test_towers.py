"""A vision tower in another dtype than the text model: the tower or the connector is the cause, and fixed there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from isotype.preflight.check import check
from isotype.preflight.repair import repair
from tests.models import one_layer, tiny_batch, tiny_model
from tests.pairwise import few
from tests.reality import real_step

BF16, FP32 = torch.bfloat16, torch.float32
PHASES = ("forward", "backward")
IMAGE = 9


class Pooled(nn.Module):
    """A tower as remote code writes it: what it returns is float32, whatever its weights are in."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 16, 4, 4), nn.LayerNorm(16)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.patches(pixels.to(self.patches.weight.dtype)).flatten(2).transpose(1, 2))
        return found.float() / found.float().norm(dim=-1, keepdim=True)


class Llava(nn.Module):
    """Image features are merged among the token embeddings as LLaVA's first code did: nothing casts there."""

    def __init__(self, connector: bool) -> None:
        super().__init__()
        self.vision_tower = Pooled()
        self.projector = nn.Linear(16, 16) if connector else nn.Identity()
        self.embed, self.head = nn.Embedding(10, 16), nn.Linear(16, 10)

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        features = self.projector(self.vision_tower(pixel_values))
        tokens = self.embed(input_ids)
        places = (input_ids == IMAGE)[..., None].expand_as(tokens)
        return self.head(tokens.masked_scatter(places, features))


def images() -> dict[str, torch.Tensor]:
    ids = torch.arange(8).repeat(2, 1)
    ids[:, 2:6] = IMAGE
    return {"input_ids": ids, "pixel_values": torch.ones(2, 3, 8, 8)}


def llava(connector: torch.dtype | None) -> nn.Module:
    model = Llava(connector is not None).to(BF16).requires_grad_(False)
    model.head.requires_grad_()
    model.projector.to(connector or BF16)
    return model


def gemma(tower: torch.dtype, text: torch.dtype) -> Any:
    model = one_layer(tiny_model("gemma3-vision", text)).requires_grad_(False)
    model.lm_head.requires_grad_()
    model.model.vision_tower.to(tower)
    return model


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "merge": (lambda: llava(None), images, "vision_tower"),
    "merge behind a float32 connector": (lambda: llava(FP32), images, "projector"),
    "connector": (lambda: llava(BF16), images, "vision_tower"),
    "gemma3 float32": (lambda: gemma(FP32, BF16), lambda: tiny_batch("gemma3-vision"), "vision_tower"),
    "gemma3 bfloat16": (lambda: gemma(BF16, FP32), lambda: tiny_batch("gemma3-vision"), "vision_tower"),
}


@pytest.mark.real_cpu
@few("name", list(CASES), "merge", "merge behind a float32 connector")
def test_the_tower_or_connector_is_the_cause_and_repaired(name):
    make, batch, part = CASES[name]
    model, given = make(), batch()
    assert real_step(copy.deepcopy(model), given, phases=PHASES).phase == "forward"
    report = check(model, given, device="cpu", phases=PHASES, wiring=False)
    (error,) = report.errors
    assert part in error.cause, error.cause
    text = {
        name: p.detach().clone()
        for name, p in model.named_parameters()
        if name.endswith(("embed.weight", "embed_tokens.weight"))
    }
    assert text
    repair(model, report)
    assert real_step(model, given, phases=PHASES).error is None
    assert all(model.get_parameter(name).dtype == value.dtype for name, value in text.items())
