"""What one of several processes holds: shards by rows, gathered blocks, buckets; against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import isotype
from isotype.model.repeated_layers import fold
from isotype.model.shard import groups_of
from isotype.preflight.setup import setup_of
from isotype.records.request import StepRequest
from isotype.trace.fake import sharded
from isotype.trace.fake.sharded import shard_bytes
from tests.small import WIDTH, Net, ids

FLOAT = 4
LAYERS = 6


class Attention(nn.Module):
    """What makes a layer a block: a part of this name."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(x)


class Model(nn.Module):
    """Embedding, blocks, head; every weight trained unless `frozen`."""

    def __init__(self, layers: int = LAYERS, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        if frozen:
            self.requires_grad_(False)
            self.head.requires_grad_(True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


GROUP = FLOAT * (WIDTH * WIDTH + WIDTH)
ROOT = FLOAT * 2 * 16 * WIDTH
WEIGHTS = ROOT + LAYERS * GROUP


def memory(model: nn.Module, **more: Any) -> Any:
    return isotype.check(model, ids(), device="cpu", optimizer="sgd", verify=False, **more).memory


def test_a_process_holds_its_rows_padded_to_the_most() -> None:
    for rows, devices, held in ((8, 2, 4), (7, 2, 4), (1, 8, 1), (9, 8, 2)):
        assert shard_bytes(torch.empty(rows, 3, dtype=torch.bfloat16), devices) == held * 3 * 2
    assert shard_bytes(torch.empty(10, 1, dtype=torch.uint8), 4) == 3


def test_one_device_is_as_without() -> None:
    alone = memory(Model())
    for more in ({"devices": 1}, {"fsdp": 2}, {"fsdp": 2, "devices": 1}):
        assert memory(Model(), **more) == alone
    assert "optimizer" in alone.phases
    assert not any("gathered" in kinds or "buckets" in kinds for kinds in alone.phases.values())


def test_ddp_holds_all_weights_and_a_bucket_for_every_gradient() -> None:
    alone, process = memory(Model()), memory(Model(), devices=4)
    for phase, kinds in process.phases.items():
        assert kinds["buckets"] == WEIGHTS
        assert sum(kinds.values()) == sum(alone.phases[phase].values()) + WEIGHTS
    assert memory(Model(frozen=True), devices=4).phases["load"]["buckets"] == FLOAT * 16 * WIDTH


@pytest.mark.parametrize("devices", [2, 4])
def test_fsdp_holds_a_share_of_weights_gradients_and_states(devices: int) -> None:
    phases = memory(Model(), devices=devices, fsdp=2).phases
    assert phases["load"]["weights"] == WEIGHTS // devices
    after = phases["optimizer"]
    assert after["weights"] == after["gradients"] == WEIGHTS // devices
    assert not after.get("gathered")
    assert not after.get("buckets")


@pytest.mark.parametrize(("release", "copied"), [((2, 14), 1), ((2, 15), 0)])
def test_three_groups_are_gathered_at_once_at_most(
    release: tuple[int, int], copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward: the root's weights; the buffer of the last block, and buffer and, before torch 2.15, copies of the next."""
    monkeypatch.setattr(sharded, "RELEASE", release)
    forward = memory(Model(), devices=2, fsdp=2).timeline
    most = max(point.kinds.get("gathered", 0) for point in forward if point.phase == "forward")
    assert most == max(2 * ROOT + (1 + copied) * GROUP, ROOT + (2 + copied) * GROUP)


def test_without_resharding_all_stay_gathered_to_the_backward() -> None:
    timeline = memory(Model(), devices=2, fsdp=2, reshard=False).timeline
    most = max(point.kinds.get("gathered", 0) for point in timeline)
    assert most >= ROOT + LAYERS * GROUP
    assert timeline[-1].kinds.get("gathered", 0) == 0


def test_gradients_are_reduced_in_the_reduce_dtype() -> None:
    """A block's gradients go in one buffer, of float32 elements where the policy sums in float32."""
    model = Model().to(torch.bfloat16)
    policy = isotype.resolve_precision(model, dtype="bfloat16", device="cpu", trainable="full")
    assert policy.reduce == torch.float32
    timeline = memory(model, policy=policy, devices=2, fsdp=2).timeline
    buckets = {point.kinds.get("buckets", 0) for point in timeline}
    assert buckets <= {0, GROUP, ROOT}
    assert GROUP in buckets


@pytest.mark.parametrize("reshard", [True, False])
def test_folded_layers_hold_what_all_of_them_hold(reshard: bool) -> None:
    more = {"devices": 2, "fsdp": 2, "reshard": reshard}
    whole, folded = memory(Model(), **more), memory(Model(), **more, fold=True)
    for phase, kinds in folded.phases.items():
        # Gradients of all layers that one stands for come at once, before the activations of any go.
        slack = 1.2 if phase == "backward" else 1.01
        expected = sum(whole.phases[phase].values())
        assert 0.97 * expected <= sum(kinds.values()) <= slack * expected, phase


class Stacked(Attention):
    """The gradients of the two weights are views of one storage, as those of fused layers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (x @ torch.cat((self.query, self.key)).T).sum(-1, keepdim=True)


@pytest.mark.parametrize("devices", [1, 2])
def test_gradients_in_one_storage_are_counted_once(devices: int) -> None:
    model = Model()
    model.layers = nn.ModuleList(Stacked() for _ in range(LAYERS))
    trained = WEIGHTS + LAYERS * FLOAT * 2 * WIDTH * WIDTH
    for layers in ({"fold": True}, {}):
        after = memory(model, devices=devices, fsdp=2, **layers).phases["optimizer"]
        assert after["weights"] == after["gradients"] == trained // devices


def test_the_groups_are_blocks_a_lone_frozen_embedding_and_the_rest() -> None:
    model = Model()
    groups = groups_of(model)
    assert [group.module for group in groups] == [*model.layers, model]
    assert [group.reshard for group in groups] == [True] * LAYERS + [False]
    owned = [id(parameter) for group in groups for parameter in group.parameters]
    assert sorted(owned) == sorted(map(id, model.parameters()))
    folded = fold(Model())
    assert len(groups_of(folded, more_blocks=[m for m in folded.modules() if hasattr(m, "_stands_for")])) == 3


def test_integers_may_stay_whole() -> None:
    class Codes(Model):
        def __init__(self) -> None:
            super().__init__(frozen=True)
            for layer in self.layers:
                layer.codes = nn.Parameter(torch.zeros(64, 8, dtype=torch.uint8), requires_grad=False)

    sharded, whole = (
        memory(Codes(), devices=2, fsdp=2, shard_integers=shard).phases["load"]["weights"]
        for shard in (True, False)
    )
    assert whole - sharded == LAYERS * 64 * 8 // 2


def test_the_number_of_devices_has_to_be_one() -> None:
    for devices in (0, -2, 1.5):
        with pytest.raises(isotype.UsageError, match="a number of devices, at least 1"):
            setup_of(StepRequest(Net(), ids(), devices=devices))  # type: ignore[arg-type]
