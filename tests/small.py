"""Small plain modules with one mistake each, for tests of the preflight."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTH = 8


class Seen:
    """What a step's code tells a test: in a queue, which a check does not put back as it puts back a list."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()

    def append(self, *told: Any) -> None:
        for each in told:
            self._queue.put(each)

    def all(self) -> list[Any]:
        return [self._queue.get() for _ in range(self._queue.qsize())]


class Scaled(nn.Module):
    """A norm that returns what its weight promotes to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


class ScaledNorm(Scaled):
    """The same under a name that ends in norm, as models have it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = ScaledNorm()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(self.norm(x))


class Net(nn.Module):
    """Embedding, blocks with a norm each, head; `ids` `[rows, length]` -> logits."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(layers: int = 2, seed: int = 0) -> Net:
    """A healthy bfloat16 net."""
    torch.manual_seed(seed)
    return Net(layers).to(BF16)


def wide_norms(layers: int = 2, seed: int = 0) -> Net:
    """The classic crash: norm weights in float32 in a bfloat16 net."""
    made = net(layers, seed)
    for layer in made.layers:
        layer.norm.float()  # type: ignore[union-attr, operator]
        with torch.no_grad():
            layer.norm.weight.mul_(1 + 2**-12)  # type: ignore[union-attr, operator]  # bfloat16 does not hold it
    return made


def ids(rows: int = 2, length: int = 3) -> dict[str, torch.Tensor]:
    """Token ids `[rows, length]`."""
    return {"ids": torch.arange(rows * length).reshape(rows, length) % 16}


def line(name: str) -> str:
    """The last part of a `file:line`."""
    return name.rpartition("/")[2]


class Custom(torch.autograd.Function):
    """`x @ weight.T` whose backward keeps another dtype than its gradient's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grads[0] @ weight.float(), None


class CustomLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Custom.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]
