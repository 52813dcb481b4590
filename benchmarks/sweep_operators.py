"""Record examples of every operator that real training steps call, for `isotype.contracts.measure` to replay.

    python benchmarks/sweep_operators.py [--only llama,gpt2] [-o src/isotype/contracts/tables/examples.json]

Each architecture takes one real step on the CPU (forward, backward, clipping, optimizer), dense and with LoRA, in
float32 and bfloat16, with nf4 and int8 weights and under autocast. A dispatch mode keeps up to three calls of each
operator that differ in structure. Existing examples are kept unless `--fresh` is given. Prints how many operators
were met and how many of them the CPU table covers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from isotype.contracts.contract import TABLES, is_exempt
from isotype.contracts.example import Json, NotAnExampleError, encode, is_float, tensors_in
from isotype.contracts.measure import EXAMPLES, write_json
from isotype.contracts.pattern import Layout, layout_of

sys.path.insert(0, str(Path(__file__).parent.parent))

MOST = 3
"""Examples kept of one operator."""

# Make no arithmetic of operand dtypes: views, allocation, questions about a tensor.
SKIPPED_NAMESPACES = ("prim", "profiler", "streams", "inductor")


class Sampler(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps calls of different structure; `examples` is what it has, `refused` what no example can hold."""

    def __init__(self, examples: dict[str, list[Json]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.examples = examples
        self.refused: dict[str, str] = {}
        self.met: set[str] = set()
        self._seen = {(op, structure(call)) for op, calls in examples.items() for call in calls}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = str(func)
        if func.namespace not in SKIPPED_NAMESPACES:
            self.met.add(op)
            if len(self.examples.get(op, ())) < MOST and not is_exempt(op, args):
                self._keep(op, args, kwargs)
        return func(*args, **kwargs)

    def _keep(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            call = [encode(args), {name: encode(value) for name, value in kwargs.items()}]
        except NotAnExampleError as error:
            self.refused[op] = str(error)
            return
        call = trimmed(call, layout_of(op))
        if not any(is_float(tensor) for tensor in tensors_in(call)):
            return
        key = (op, structure(call))
        if key not in self._seen:
            self._seen.add(key)
            self.examples.setdefault(op, []).append(call)


def trimmed(example: Json, layout: Layout) -> Json:
    """The example with shorter lists: one element where each is on its own, three where tensors are joined.

    The scalar lists of element-wise operators are as long as their lists of tensors.
    """
    if not layout.lists:
        return example
    keep = 1 if layout.by_element else 3

    def cut(value: Json) -> Json:
        tensors = isinstance(value, list) and all(isinstance(item, dict) and "t" in item for item in value)
        return value[:keep] if isinstance(value, list) and (tensors or layout.by_element) else value

    args, kwargs = example
    return [[cut(value) for value in args], {name: cut(value) for name, value in kwargs.items()}]


def structure(call: Json) -> str:
    """What makes one example different from another: which operands there are, and which have no dimensions."""
    args, kwargs = call
    return json.dumps(
        [[_shape_of(item) for item in args], {name: _shape_of(kwargs[name]) for name in sorted(kwargs)}]
    )


def _shape_of(item: Json) -> Json:
    if isinstance(item, dict) and "t" in item:
        return ["f" if is_float(item) else item["t"], bool(item["s"])]
    if isinstance(item, list) and any(isinstance(entry, (dict, list)) or entry is None for entry in item):
        return [_shape_of(entry) for entry in item]
    if isinstance(item, dict):
        return sorted(item)
    return item is None


Step = Callable[[], None]
Build = Callable[[torch.dtype], nn.Module]
Batches = Callable[[torch.dtype], Mapping[str, Any]]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def steps_of(build: Build, batch_in: Batches, optimizers: bool) -> Iterator[tuple[str, Step]]:
    """The ways one architecture is trained, each a step to run."""
    f32, bf16 = torch.float32, torch.bfloat16
    batch = batch_in(f32)
    yield "dense float32", lambda: step(build(f32), batch)
    yield "dense bfloat16", lambda: step(build(bf16), batch_in(bf16))
    yield "LoRA bfloat16", lambda: step(lora(build(bf16)), batch_in(bf16))
    yield "autocast bfloat16", lambda: step(build(f32), batch, autocast=bf16)
    if not optimizers:
        return
    yield "nf4", lambda: step(lora(quantized(build(bf16), "nf4")), batch)
    yield "int8", lambda: step(lora(quantized(build(bf16), "int8")), batch)
    yield "GradScaler", lambda: step(build(f32), batch, scaler=True)
    for name, options in OPTIMIZERS:
        made = partial(optimizer_of, name, options)
        for dtype in (f32, bf16):
            yield f"{name} {options}", partial(step_of, build, dtype, batch, made)


def optimizer_of(name: str, options: dict[str, Any], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of torch by its name."""
    made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, **options)
    return made


def step_of(build: Build, dtype: torch.dtype, batch: Mapping[str, Any], optimizer: MakeOptimizer) -> None:
    """A dense step with a given optimizer."""
    step(build(dtype), batch, optimizer=optimizer)


OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {"lr": 1e-3, "foreach": True}),
    ("AdamW", {"lr": 1e-3, "foreach": True, "amsgrad": True, "maximize": True}),
    ("AdamW", {"lr": 1e-3, "fused": True}),
    ("AdamW", {"lr": 1e-3, "fused": True, "amsgrad": True}),
    ("AdamW", {"lr": 1e-3, "foreach": False}),
    ("Adam", {"lr": 1e-3, "weight_decay": 0.1, "foreach": True}),
    ("Adam", {"lr": 1e-3, "weight_decay": 0.1, "foreach": False}),
    ("SGD", {"lr": 1e-3, "foreach": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"lr": 1e-3, "fused": True, "momentum": 0.9}),
    ("SGD", {"lr": 1e-3, "foreach": False, "momentum": 0.9, "nesterov": True}),
    ("RMSprop", {"lr": 1e-3, "foreach": True, "momentum": 0.9}),
    ("Adagrad", {"lr": 1e-3, "foreach": True}),
    ("Adagrad", {"lr": 1e-3, "fused": True}),
    ("Adafactor", {"lr": 1e-3, "foreach": False}),
    ("NAdam", {"lr": 1e-3, "foreach": True}),
    ("RAdam", {"lr": 1e-3, "foreach": True}),
    ("Adamax", {"lr": 1e-3, "foreach": True}),
    ("Adadelta", {"lr": 1e-3, "foreach": True}),
)


def step(
    model: nn.Module,
    batch: Mapping[str, Any],
    autocast: torch.dtype | None = None,
    scaler: bool = False,
    optimizer: MakeOptimizer | None = None,
) -> None:
    """One real step, clipping included."""
    from tests.reality import loss_of

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = (optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)))(trained)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=scaler)
    # Twice: the second step runs on states that exist.
    for _ in range(2 if optimizer is not None else 1):
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = loss_of(model(**batch))
        grad_scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        grad_scaler.unscale_(made)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        grad_scaler.step(made)
        grad_scaler.update()
        made.zero_grad()


def lora(model: nn.Module) -> nn.Module:
    """`model` with adapters on every linear layer."""
    import peft

    made: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    return made


def quantized(model: nn.Module, form: str) -> nn.Module:
    """`model` with bitsandbytes weights in its linear layers, the output head excepted."""
    import bitsandbytes as bnb

    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is not nn.Linear or "head" in name:
                continue
            bias = layer.bias is not None
            if form == "int8":
                made = bnb.nn.Linear8bitLt(
                    layer.in_features, layer.out_features, bias, has_fp16_weights=False
                )
                made.weight = bnb.nn.Int8Params(
                    layer.weight.data, requires_grad=False, has_fp16_weights=False
                )
            else:
                made = bnb.nn.Linear4bit(
                    layer.in_features,
                    layer.out_features,
                    bias,
                    compute_dtype=layer.weight.dtype,
                    quant_type=form,
                )
                made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type=form)
            if bias:
                made.bias = layer.bias
            setattr(parent, name, made.to("cpu"))
    return model


def _tiny_batch(name: str, _: torch.dtype) -> Mapping[str, Any]:
    from tests.models import tiny_batch

    return tiny_batch(name)


def architectures(only: Iterable[str]) -> Iterator[tuple[str, Build, Batches]]:
    """Name, builder and batch of each architecture of the tests; those of the zoo where it is there."""
    from tests.models import CONFIGS, tiny_model

    wanted = set(only)
    for name in CONFIGS:
        if not wanted or name in wanted:
            yield name, partial(tiny_model, name), partial(_tiny_batch, name)
    try:
        from tests.zoo import ARCHITECTURES
    except ImportError as error:
        print(f"the zoo is left out: {error}")
        return
    for name, architecture in ARCHITECTURES.items():
        if not wanted or name in wanted:
            yield name, architecture.build, partial(architecture.batch, 2)


def snippets() -> Iterator[tuple[str, Step]]:
    """Calls that training code makes and the architectures happen not to, forward and backward."""
    x, w, v = (torch.rand(4, 6) * 0.8 + 0.1 for _ in range(3))
    images, kernel = torch.rand(2, 4, 6, 6), torch.rand(4, 4, 3, 3)
    heads = [torch.rand(2, 2, 5, 8) for _ in range(3)]
    rows, at = torch.tensor([0, 2]), torch.tensor([[0, 1, 2, 3, 1, 0]] * 2)
    mask, mask2 = x > 0.5, torch.rand(2, 2, 5, 5) > 0.3
    target = torch.tensor([0, 3, 2, 5])
    f = nn.functional

    def backward(run: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> None:
        leaves = [tensor.clone().requires_grad_(True) for tensor in tensors]
        run(*leaves).float().sum().backward()  # type: ignore[no-untyped-call]

    def plain(run: Callable[..., Any], *tensors: torch.Tensor) -> None:
        run(*[tensor.clone() for tensor in tensors])

    trained: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
        "linear": (f.linear, (x, w, v[:, 0])),
        "mv": (torch.mv, (x, w[0])),
        "dot": (torch.dot, (x[0], w[0])),
        "addmm": (torch.addmm, (x[:, :4].contiguous(), x, w.T)),
        "bmm": (torch.bmm, (torch.rand(2, 3, 4), torch.rand(2, 4, 5))),
        "baddbmm": (torch.baddbmm, (torch.rand(2, 3, 5), torch.rand(2, 3, 4), torch.rand(2, 4, 5))),
        "addbmm": (torch.addbmm, (torch.rand(3, 5), torch.rand(2, 3, 4), torch.rand(2, 4, 5))),
        "addmv": (torch.addmv, (x[:, 0], w, v[0])),
        "outer": (torch.outer, (x[0], w[0])),
        "einsum": (lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b), (heads[0], heads[1])),
        "layer_norm": (lambda a, b, c: f.layer_norm(a, (6,), b, c), (x, w[0], v[0])),
        "layer_norm without weights": (lambda a: f.layer_norm(a, (6,)), (x,)),
        "group_norm": (lambda a, b, c: f.group_norm(a, 2, b, c), (images, x[:, 0], w[:, 0])),
        "batch_norm": (lambda a, b, c: f.batch_norm(a, None, None, b, c, True), (images, x[:, 0], w[:, 0])),
        "rms_norm": (lambda a, b: f.rms_norm(a, (6,), b), (x, w[0])),
        "conv1d": (f.conv1d, (torch.rand(2, 4, 6), torch.rand(4, 4, 3), x[:, 0])),
        "conv2d": (f.conv2d, (images, kernel)),
        "conv3d": (f.conv3d, (torch.rand(1, 2, 4, 4, 4), torch.rand(2, 2, 2, 2, 2))),
        "conv_transpose2d": (f.conv_transpose2d, (images, kernel)),
        "embedding": (lambda a: f.embedding(at, a), (x,)),
        "embedding_bag": (lambda a: f.embedding_bag(at, a, mode="sum"), (x,)),
        "sdpa": (f.scaled_dot_product_attention, tuple(heads)),
        "sdpa causal": (
            lambda q, k, v: f.scaled_dot_product_attention(q, k, v, is_causal=True),
            tuple(heads),
        ),
        "sdpa bool mask": (
            lambda q, k, v: f.scaled_dot_product_attention(q, k, v, attn_mask=mask2),
            tuple(heads),
        ),
        "sdpa float mask": (
            lambda q, k, v: f.scaled_dot_product_attention(q, k, v, attn_mask=mask2.float()),
            tuple(heads),
        ),
        "sdpa math": (
            lambda q, k, v: torch._scaled_dot_product_attention_math(q, k, v, attn_mask=mask2.float())[0],
            tuple(heads),
        ),
        "index_put": (lambda a, b: a.index_put((rows,), b), (x, w[:2])),
        "index_put accumulate": (lambda a, b: a.index_put((rows,), b, accumulate=True), (x, w[:2])),
        "index_put mask": (lambda a: a.index_put((mask,), torch.rand(int(mask.sum()))), (x,)),
        "index_add": (lambda a, b: a.index_add(0, rows, b), (x, w[:2])),
        "index_copy": (lambda a, b: a.index_copy(0, rows, b), (x, w[:2])),
        "index_fill": (lambda a: a.index_fill(0, rows, 0.5), (x,)),
        "index_select": (lambda a: a.index_select(0, rows), (x,)),
        "gather": (lambda a: a.gather(0, at), (x,)),
        "take_along_dim": (lambda a: torch.take_along_dim(a, at, 0), (x,)),
        "scatter": (lambda a, b: a.scatter(0, at, b), (x, w[:2])),
        "scatter_add": (lambda a, b: a.scatter_add(0, at, b), (x, w[:2])),
        "scatter_reduce": (lambda a, b: a.scatter_reduce(0, at, b, "amax"), (x, w[:2])),
        "masked_scatter": (lambda a, b: a.masked_scatter(mask, b), (x, w)),
        "masked_fill": (lambda a: a.masked_fill(mask, torch.tensor(0.5)), (x,)),
        "masked_select": (lambda a: a.masked_select(mask), (x,)),
        "where": (lambda a, b: torch.where(mask, a, b), (x, w)),
        "lerp": (torch.lerp, (x, w, v)),
        "addcmul": (torch.addcmul, (x, w, v)),
        "addcdiv": (torch.addcdiv, (x, w, v)),
        "stack": (lambda a, b: torch.stack([a, b]), (x, w)),
        "cat": (lambda a, b: torch.cat([a, b]), (x, w)),
        "cdist": (torch.cdist, (x, w)),
        "cosine_similarity": (f.cosine_similarity, (x, w)),
        "prelu": (f.prelu, (x, w[0, :1])),
        "glu": (f.glu, (x,)),
        "cross_entropy": (lambda a: f.cross_entropy(a, target), (x,)),
        "cross_entropy weights": (lambda a: f.cross_entropy(a, target, w[0], label_smoothing=0.1), (x,)),
        "mse_loss": (f.mse_loss, (x, w)),
        "l1_loss": (f.l1_loss, (x, w)),
        "smooth_l1_loss": (f.smooth_l1_loss, (x, w)),
        "huber_loss": (f.huber_loss, (x, w)),
        "kl_div": (f.kl_div, (x, w)),
        "binary_cross_entropy": (lambda a: f.binary_cross_entropy(a, w), (x,)),
        "binary_cross_entropy weights": (lambda a: f.binary_cross_entropy(a, w, v), (x,)),
        "binary_cross_entropy_with_logits": (
            lambda a: f.binary_cross_entropy_with_logits(a, w, v, pos_weight=v[0]),
            (x,),
        ),
        "cumsum": (lambda a: a.cumsum(-1), (x,)),
        "cumprod": (lambda a: a.cumprod(-1), (x,)),
        "logsumexp": (lambda a: a.logsumexp(-1), (x,)),
        "norm": (lambda a: torch.linalg.vector_norm(a, dim=-1), (x,)),
        "svd": (lambda a: torch.linalg.svdvals(a), (x,)),
        "qr": (lambda a: torch.linalg.qr(a)[1], (x,)),
        "inverse": (torch.linalg.inv, (x[:, :4] + torch.eye(4),)),
        "cholesky": (lambda a: torch.linalg.cholesky(a @ a.T + torch.eye(4)), (x,)),
        "interpolate": (lambda a: f.interpolate(a, size=(4, 4), mode="bilinear"), (images,)),
        "interpolate bicubic": (lambda a: f.interpolate(a, size=(4, 4), mode="bicubic"), (images,)),
        "grid_sample": (
            lambda a, b: f.grid_sample(a, b, align_corners=False),
            (images, torch.rand(2, 3, 3, 2)),
        ),
        "grouped_mm": (
            lambda a, b: torch._grouped_mm(a, b, offs=torch.tensor([16, 32], dtype=torch.int32)),
            (torch.rand(32, 16).bfloat16(), torch.rand(2, 16, 16).bfloat16()),
        ),
        "lstm": (lambda a: nn.LSTM(6, 6)(a)[0], (x,)),
        "gru": (lambda a: nn.GRU(6, 6)(a)[0], (x,)),
        "fft": (lambda a: torch.fft.rfft(a).abs(), (x,)),
    }
    untrained: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
        "addmm_": (lambda a, b, c: a.addmm_(b, c), (torch.rand(4, 4), x, w.T.contiguous())),
        "baddbmm_": (lambda a, b, c: a.baddbmm_(b, c), tuple(torch.rand(2, 3, 3) for _ in range(3))),
        "index_put_": (lambda a, b: a.index_put_((rows,), b), (x, w[:2])),
        "index_add_": (lambda a, b: a.index_add_(0, rows, b), (x, w[:2])),
        "index_copy_": (lambda a, b: a.index_copy_(0, rows, b), (x, w[:2])),
        "scatter_": (lambda a, b: a.scatter_(0, at, b), (x, w[:2])),
        "scatter_add_": (lambda a, b: a.scatter_add_(0, at, b), (x, w[:2])),
        "masked_scatter_": (lambda a, b: a.masked_scatter_(mask, b), (x, w)),
        "masked_fill_": (lambda a: a.masked_fill_(mask, torch.tensor(0.5)), (x,)),
        "copy_": (lambda a, b: a.copy_(b), (x, w)),
        "lerp_": (lambda a, b: a.lerp_(b, 0.5), (x, w)),
        "addcmul_": (lambda a, b, c: a.addcmul_(b, c), (x, w, v)),
        "addcdiv_": (lambda a, b, c: a.addcdiv_(b, c), (x, w, v)),
        "arithmetic_": (lambda a, b: a.add_(b).sub_(b).mul_(b).div_(b).pow_(b), (x, w)),
        "arithmetic": (lambda a, b: (a + b, a - b, a * b, a / b, a**b, torch.maximum(a, b)), (x, w)),
        "comparison": (lambda a, b: (a < b, a <= b, a == b, torch.isclose(a, b), torch.equal(a, b)), (x, w)),
        "mm out": (lambda a, b, c: torch.mm(a, b, out=c), (x, w.T.contiguous(), torch.rand(4, 4))),
        "bmm out": (lambda a, b, c: torch.bmm(a, b, out=c), tuple(torch.rand(2, 3, 3) for _ in range(3))),
        "add out": (lambda a, b, c: torch.add(a, b, out=c), (x, w, v)),
        "cat out": (lambda a, b, c: torch.cat([a, b], out=c), (x, w, torch.rand(8, 6))),
        "topk": (
            lambda a: (a.topk(2), a.sort(), a.argmax(-1), a.multinomial(1), a.max(-1), a.median()),
            (x,),
        ),
        "quantile": (lambda a: a.quantile(0.5), (x,)),
        "searchsorted": (lambda a, b: torch.searchsorted(a.sort().values, b), (x, w)),
        "bucketize": (lambda a, b: torch.bucketize(a, b.sort().values), (x, w[0])),
        "histc": (lambda a: torch.histc(a, 4), (x,)),
        "batch_norm eval": (lambda a, b: f.batch_norm(a, b, b, b, b, False), (images, x[:, 0])),
    }
    for name, (run, tensors) in trained.items():
        yield name, partial(backward, run, *tensors)
    for name, (run, tensors) in untrained.items():
        yield name, partial(plain, run, *tensors)


def sample(sampler: Sampler, name: str, run: Step) -> None:
    """Run one step under the sampler; say so where it does not run, and go on."""
    try:
        with sampler:
            run()
    except Exception as error:  # noqa: BLE001 - one step that cannot run must not end the sweep
        print(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}")


def main() -> None:
    import results  # beside this script; what tests import of it needs no file of results

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names of architectures, separated by commas")
    parser.add_argument("--fresh", action="store_true", help="forget the examples there are")
    parser.add_argument("-o", "--output", type=Path, default=EXAMPLES)
    options = results.parsed(parser, "only", "fresh")
    known = options.output.exists() and not options.fresh
    sampler = Sampler(json.loads(options.output.read_text(encoding="utf-8")) if known else {})
    started = time.perf_counter()
    for name, run in snippets():
        sample(sampler, name, run)
    first = True
    for name, build, batch in architectures(filter(None, options.only.split(","))):
        for way, run in steps_of(build, batch, optimizers=first):
            sample(sampler, f"{name}, {way}", run)
        first = False
    write_json(options.output, {op: sampler.examples[op] for op in sorted(sampler.examples)})
    table = TABLES / "cpu.json"
    covered = json.loads(table.read_text(encoding="utf-8"))["operators"] if table.exists() else {}
    with_floats = sampler.met & set(sampler.examples)
    print(
        f"{time.perf_counter() - started:.0f} s; {len(sampler.met)} operators met, {len(with_floats)} with float "
        f"operands, {len(with_floats & set(covered))} of them in the CPU table; {len(sampler.examples)} have examples"
    )
    if options.record:
        counts = {
            "met": len(sampler.met),
            "float": len(with_floats),
            "covered": len(with_floats & set(covered)),
        }
        results.append("operators/all", results.measured(counts, **dict.fromkeys(counts, "operators")))
    for op, why in sorted(sampler.refused.items()):
        if op not in sampler.examples:
            print(f"no example of {op}: {why}")


if __name__ == "__main__":
    main()
