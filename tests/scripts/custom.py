"""A module without any library, with a custom autograd function and float16 with a GradScaler.

`python custom.py MODE`: healthy; broken (its parameters are float16, which a GradScaler refuses); backward (the
custom function's backward multiplies float32 by float16).
"""

import sys

import torch
from torch import nn


class Scaled(torch.autograd.Function):
    """`hidden @ weight`, with a backward of its own."""

    @staticmethod
    def forward(ctx, hidden, weight, upcast):
        ctx.save_for_backward(hidden, weight)
        ctx.upcast = upcast
        return hidden @ weight

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        if ctx.upcast:
            gradient = gradient.float()
        return gradient @ weight.t(), hidden.flatten(0, 1).t() @ gradient.flatten(0, 1), None


class Mixer(nn.Module):
    def __init__(self, dtype, upcast):
        super().__init__()
        self.inward = nn.Parameter(torch.randn(16, 32, dtype=dtype) / 4)
        self.outward = nn.Parameter(torch.randn(32, 16, dtype=dtype) / 4)
        self.upcast = upcast

    def forward(self, signal):
        hidden = torch.relu(Scaled.apply(signal.half(), self.inward.half(), self.upcast))
        return hidden @ self.outward.half()


def main(mode):
    torch.manual_seed(0)
    model = Mixer(torch.float16 if mode == "broken" else torch.float32, mode == "backward")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        signal = torch.randn(2, 4, 16)
        loss = (model(signal).float() - signal).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main(sys.argv[1])
