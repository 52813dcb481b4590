"""Time and memory of the language-model loss, beside TRL's function and whole logits, and how close each is to float64.

Per-token log-probabilities with entropy and top-1, as SFT asks for them: forward and backward to the hidden states, the
head frozen. *Memory* is the peak of what torch's allocator hands out on top of hidden states and weight. *Error* is the distance from
float64 over its norm, on the first `--exact` tokens: of the log-probabilities and of the gradient. Weights and hidden states are
random, scaled so that logits spread by `--spread` as those of trained models do; half of the targets are the likeliest token.
TRL's function scores every position on a device without Triton; here every position has a label.

Run: python benchmarks/loss.py [--tokens 1024] [--width 576] [--vocabulary 49152] [--dtype bfloat16] [--spread 3] [--repeats 5]
Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import results
from isotype.lora.loss.log_probs import log_probs
from isotype.lora.loss.logits import Head
from isotype.precision.devices.simulated import working_dtype

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def isotype_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    working = working_dtype(weight.dtype, hidden)
    return log_probs(Head(weight), hidden, targets, ("entropy", "is_top1"), working=working).log_probs


def trl_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    found = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, 32768, None, 1.0, ("entropy", "is_top1")
    )
    logp: torch.Tensor = found[0]
    return logp


def whole_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What a transformers model does with `labels`: logits in its dtype, cross-entropy of a float32 copy."""
    logits = torch.nn.functional.linear(hidden, weight)
    if logits.dtype != torch.float64:
        logits = logits.float()
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")


LOSSES: dict[str, Loss] = {"isotype": isotype_loss, "TRL": trl_loss, "whole logits": whole_logits}


def inputs(
    arguments: argparse.Namespace, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight, targets."""
    draw = torch.Generator().manual_seed(0)
    scale = arguments.spread / arguments.width**0.5
    weight = (torch.randn(arguments.vocabulary, arguments.width, generator=draw) * scale).to(dtype)
    hidden = torch.randn(arguments.tokens, arguments.width, generator=draw).to(dtype)
    targets = torch.randint(arguments.vocabulary, (arguments.tokens,), generator=draw)
    for start in range(0, arguments.tokens, 64):
        rows = slice(start, min(start + 64, arguments.tokens), 2)
        targets[rows] = torch.nn.functional.linear(hidden[rows].float(), weight.float()).argmax(-1)
    return hidden, weight, targets


def timed(loss: Loss, given: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """Seconds of forward and backward."""
    hidden, weight, targets = given
    x = hidden.clone().requires_grad_()
    began = time.perf_counter()
    found = loss(x, weight, targets)
    middle = time.perf_counter()
    found.mean().backward()  # type: ignore[no-untyped-call]
    return middle - began, time.perf_counter() - middle


def peak(loss: Loss, given: tuple[torch.Tensor, ...]) -> int:
    """Bytes that torch's allocator hands out at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        timed(loss, given)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(int(event.nbytes()) for event in sorted(events, key=lambda e: e.start_ns())))


def errors(loss: Loss, given: tuple[torch.Tensor, ...], exact: int) -> tuple[float, float]:
    """Distance of the log-probabilities and of the gradient from float64, over their norms."""
    hidden, weight, targets = given
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for name, to, out in ((loss, weight.dtype, found), (whole_logits, torch.float64, expected)):
        x = hidden[:exact].to(to).clone().requires_grad_()
        logp = name(x, weight.to(to), targets[:exact])
        logp.mean().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        out += [logp.detach().double(), x.grad.double()]
    logp, grad = ((a - b).norm().item() / b.norm().item() for a, b in zip(found, expected, strict=True))
    return logp, grad


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--spread", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--exact", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = results.parsed(parser, "spread", "exact")
    torch.set_num_threads(arguments.threads)
    given = inputs(arguments, getattr(torch, arguments.dtype))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in LOSSES}
    for loss in LOSSES.values():
        timed(loss, given)
    for _ in range(arguments.repeats):
        for name, loss in LOSSES.items():  # interleaved: a slow minute is slow for all
            seconds[name].append(timed(loss, given))
    rows: dict[str, Any] = {}
    print(
        f"{'':14}{'forward':>10}{'backward':>10}{'both':>10}{'memory':>11}{'error log p':>13}{'gradient':>10}"
    )
    for name, loss in LOSSES.items():
        forward, backward = (statistics.median(part) for part in zip(*seconds[name], strict=True))
        both = statistics.median(sum(pair) for pair in seconds[name])
        memory, (logp, grad) = peak(loss, given), errors(loss, given, arguments.exact)
        rows[name] = {
            "forward": forward,
            "backward": backward,
            "both": both,
            "memory": memory,
            "log_prob_error": logp,
            "gradient_error": grad,
        }
        if arguments.record:
            units = {"forward": "s", "backward": "s", "both": "s", "memory": "MiB"}
            units |= {"log_prob_error": "", "gradient_error": ""}
            size = f"{arguments.dtype}, {arguments.tokens} x {arguments.width} x {arguments.vocabulary}"
            row = {**rows[name], "memory": memory / 2**20}
            results.append(f"loss/{size}", results.measured(row, **units), name)
        print(
            f"{name:14}{forward:8.3f} s{backward:8.3f} s{both:8.3f} s{memory / 2**20:7.0f} MiB{logp:13.1e}{grad:10.1e}"
        )
    print(json.dumps({"arguments": vars(arguments), "torch": torch.__version__, "losses": rows}))


if __name__ == "__main__":
    main()
