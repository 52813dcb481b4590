"""`measure_quality` measures how the next-token distribution changes if a linear layer is stored in fewer bits."""

import datetime
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.checkpoint import Checkpoint, open_checkpoint
from isotype.checkpoint.measure_ranges import TOKENS, measured_and_kept
from isotype.checkpoint.weightless import quantized_weights
from isotype.compat.bitsandbytes import dequantize_4bit
from isotype.compat.peft import without_peft
from isotype.compat.torch import UncompiledMode, without_dispatch
from isotype.core.console import Bar
from isotype.core.dtypes import dtype_name, parse_dtype
from isotype.core.errors import UsageError
from isotype.core.formats import FITTED, FORMATS, MEASURED
from isotype.core.names import base_name, listed, plural
from isotype.core.operators import operator_name
from isotype.model.experts.stack import stacked_weights
from isotype.model.fitted import nearest_values
from isotype.model.quantize import quantize_4bit, quantize_int8
from isotype.model.walk import is_tuner_layer, kind_of, places
from isotype.precision.damages import Damages, LayerDamage
from isotype.precision.devices.probe import real_device
from isotype.precision.policy import read_moments, write_moments
from isotype.ranges.measure import Batches, Measured, on_device, undisturbed
from isotype.ranges.twin import twin_of
from isotype.ranges.weights import Weights, give_gradient, with_values

_PIECE = 1 << 20
_BLOCKS = 64  # 64 rows of any width fill whole 4-bit blocks


class EmbeddedRows(UncompiledMode):  # type: ignore[no-untyped-call]
    """`TorchDispatchMode` that reads a weight when an operator uses it. For an embedding, it reads only the rows that are used."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = with_values(operator_name(func).rpartition(".")[0], args, kwargs or {})
        return func(*args, **kwargs)


@dataclass
class Sums:
    """The sums that are measured for one linear layer.

    `damage` is in nats, and `error` is the squared error of the weight. Both are dicts by format. `squares` `[columns]` is
    Σ |g|² x² over `tokens` tokens, with the input x and the output gradient g of a token. For the weight Wᵢⱼ, the diagonal
    of the Fisher information has the entry Σ gᵢ² xⱼ². `squares` is the sum over i.
    """

    rows: int = 0
    columns: int = 0
    damage: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MEASURED, 0.0))
    error: dict[str, float] = field(default_factory=dict)
    squares: torch.Tensor | None = None
    tokens: int = 0

    @property
    def moments(self) -> str:
        """The moments of the input channels, as text for a policy; "" before the first call of `Layers.add`."""
        return "" if self.squares is None else write_moments(self.squares, self.tokens)


@dataclass
class Layers:
    """A recorder for `isotype.ranges.twin.twin_of` that measures the damage of quantization in linear layers.

    Let f be ln p(y | x), with y sampled from the model. The weights W change by D. To second order, the
    KL divergence between the outputs before and after the change is ½ E[<D, df/dW>²], a product with the Fisher information. The backward starts from the result of
    `_of_signs`. This gradient has the same second moments as the gradient of f. A token with the input x and the output
    gradient g adds ½ Σ (g² xᵀ²) D² to the estimate, summed over all weights of the layer. The estimate omits products of the
    errors of two weights, because these errors are nearly independent. The estimate also omits products of the gradients of
    two tokens, because they would need hundreds of samples of y.

    Attributes:
        wanted: names of the layers to measure.
        form: format to which the forward rounds the weights; None for no rounding.
        sums: layer name -> sums, for each layer that the backward has reached.
    """

    wanted: Collection[str]
    form: str | None = None
    sums: dict[str, Sums] = field(default_factory=dict)

    def again(self) -> Any:
        """Return an empty context, because this recorder needs no context for the forward or recomputation of a block."""
        return nullcontext()

    def watch(self, model: nn.Module, names: Mapping[int, str], inside: Collection[int]) -> None:
        """Replace the forward of the wanted layers, and make the outputs of embeddings require gradients."""
        for module in model.modules():
            if names[id(module)] in self.wanted:
                vars(module)["forward"] = self._forward(module, names[id(module)])
            elif kind_of(module) == "embedding" and id(module) not in inside:
                module.register_forward_hook(give_gradient, prepend=True)

    def _forward(self, module: Any, name: str) -> Any:
        transposed = type(module).__name__ == "Conv1D"

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight = module.weight.T.contiguous() if transposed else module.weight
            form = self.form
            if form is not None:
                stored = torch.empty_like(weight, memory_format=torch.contiguous_format)
                moments = read_moments(self.sums[name].moments) if form in FITTED else None
                with without_dispatch():
                    for rows in pieces(*weight.shape):
                        stored[rows] = rounded(weight[rows], form, moments)
                weight = stored
            output: torch.Tensor = _Product.apply(x, weight, self, name)  # type: ignore[no-untyped-call]
            bias = module.bias
            return output if bias is None else output + bias

        return forward

    def add(self, name: str, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add one call of a layer: input `x` `[…, in]`, float32 `weight` `[out, in]`, output's `gradient` `[…, out]`."""
        sums = self.sums.setdefault(name, Sums(*weight.shape))
        squares = x.reshape(-1, x.shape[-1]).square()
        above = gradient.reshape(-1, gradient.shape[-1]).square()
        gradients = above.sum(1)
        sums.squares = gradients @ squares + (0 if sums.squares is None else sums.squares)
        sums.tokens += int((gradients > 0).sum())  # padding has no gradient
        moments = read_moments(sums.moments)
        sums.error = dict.fromkeys(MEASURED, 0.0)
        for rows in pieces(*weight.shape):
            part = weight[rows]
            fisher = above[:, rows].T @ squares
            for form in MEASURED:
                off = rounded(part, form, moments, exact=False).sub_(part).square_()
                sums.error[form] += float(off.sum())
                sums.damage[form] += 0.5 * float(torch.dot(off.view(-1), fisher.view(-1)))


class _Product(torch.autograd.Function):
    """The product X Wᵀ. Its backward calls `Layers.add` and returns only the gradient of X."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layers: Layers, name: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layers, ctx.name = layers, name
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        with torch.no_grad(), without_dispatch():  # the mode would slow down every operator of the rounding
            ctx.layers.add(ctx.name, x, weight, gradient)
            return gradient @ weight, None, None, None


def rounded(
    weight: torch.Tensor, form: str, moments: torch.Tensor | None = None, *, exact: bool = True
) -> torch.Tensor:
    """Round a float32 weight to a format, and return float32 `[rows, columns]`. A slice of a weight must contain whole
    4-bit blocks.

    Args:
        form: one of `isotype.core.formats.MEASURED`.
        moments: second moments of the input channels, `[columns]`; required if `FORMATS[form].fitted`.
        exact: True to round as bitsandbytes does; False to use `fitted.nearest_values`, which is twice as fast.
    """
    if form == "int8":
        codes, scales = quantize_int8(weight)
        return codes.float() * (scales.float() / 127).to(weight.device).unsqueeze(1)
    if form in ("bfloat16", "float16"):
        return weight.to(parse_dtype(form)).float()
    name, size = FORMATS[form].code, FORMATS[form].block
    fitted = FORMATS[form].fitted
    if fitted and moments is None:
        raise ValueError(f"{form} is fitted to the moments of a layer's inputs, but no moments were passed")
    if fitted or not exact:
        return nearest_values(weight, name, moments if fitted else None, blocksize=size)
    codes, state = quantize_4bit(weight.contiguous(), name, blocksize=size)
    return dequantize_4bit(codes, state).float()


def pieces(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices of the rows of a weight. Each slice has some megabytes, and contains whole 4-bit blocks."""
    step = max(_BLOCKS, _PIECE // max(1, columns) // _BLOCKS * _BLOCKS)
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


_SEED = 0
_CHUNK = 64
"""Number of rows of logits for which the divergence is computed at a time."""


def measure_quality(
    model: nn.Module | str | Path | Checkpoint,
    data: Any = None,
    *,
    tokens: int = TOKENS,
    exact: Sequence[str] = ("nf4",),
    device: str | torch.device | None = None,
    progress: bool = True,
    revision: str | None = None,
) -> Damages:
    """For each layer and format, measure how the next-token distribution changes if a linear layer is rounded to the
    format.

    One forward and one backward in float32 estimate the damage in all layers (`isotype.checkpoint.damage.Layers`). For
    each format in `exact`, another forward with all layers in this format measures the divergence from the float32
    model. Each pass reads a checkpoint block by block. A model in memory is not changed. The measurement of a
    checkpoint on the default texts is cached.

    Args:
        model: a module that returns logits, or a checkpoint: a directory, a GGUF file, `embedded:NAME`, a hub id, or an open
            `Checkpoint`.
        data: inputs of the model as a dict of tensors or a list of such dicts. The default is a few short texts that isotype
            contains. Tokens whose `attention_mask` is 0, or whose label is -100, do not count.
        tokens: number of tokens of the default texts.
        exact: formats for which the whole model is also measured. Each format takes one more forward.
        device: the device to run on. The default is the model's device, or the CPU for a checkpoint.
        progress: True to show a bar on a terminal if the measurement takes longer than three seconds.
        revision: branch, tag or commit of a hub id.

    Raises:
        CheckpointError: the checkpoint does not exist, or cannot be loaded.
        UsageError: isotype cannot make a batch for the model, `data` is not a batch, or the model returns no logits.
    """
    source = model if isinstance(model, nn.Module) else open_checkpoint(model, revision)
    return measured_and_kept(_measured, source, data, tokens, exact=exact, device=device, progress=progress)


def _measured(
    model: Measured, run: Batches, exact: Sequence[str], device: str | torch.device | None, progress: bool
) -> Damages:
    session = Session(model, run, device, 3 + len(exact), progress)
    with closing(session.bar):
        count = session.backward()
        measured = {form: session.divergence(form) for form in exact}
    sums = session.layers.sums
    missing = [name for name in session.layers.wanted if name not in sums]
    notes = [*session.measured.notes, *session.run.notes]
    if missing:
        layers = plural(len(missing), "layer")
        notes.append(f"{layers} not measured, because no token reached them: {listed(missing)}")
    if stacks := len(list(stacked_weights(model.model))):
        what = plural(stacks, "stacked expert weight")
        notes.append(f"{what} not measured: --quantization mixed stores experts in nf4")
    return Damages(
        source=session.measured.source,
        key="",
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        dtype=dtype_name(torch.float32),
        text=session.run.text,
        tokens=count,
        layers=tuple(
            LayerDamage(
                name, s.rows, s.columns, {f: x / count for f, x in s.damage.items()}, s.error, s.moments
            )
            for name in session.layers.wanted
            if (s := sums.get(name)) is not None
        ),
        measured=measured,
        notes=tuple(notes),
    )


class Session:
    """Runs the forwards and backwards of one measurement. The progress bar shows the `passes` over the model.

    Attributes:
        reference: the float32 log probabilities of each batch, `[tokens, vocabulary]`; set by `backward`.
    """

    def __init__(
        self, measured: Measured, run: Batches, device: str | torch.device | None, passes: int, progress: bool
    ) -> None:
        self.measured, self.run = measured, run
        self.device = real_device(device) if device is not None else measured.device
        self.reference: list[torch.Tensor] = []
        self.rows = EmbeddedRows()  # type: ignore[no-untyped-call]
        base = without_peft(measured.model)
        chosen = quantized_weights(base)
        adapted = tuple(f"{place.name}." for place in places(base) if is_tuner_layer(place.module))
        named = [n for n, _ in base.named_parameters(remove_duplicate=False) if n in chosen]
        wanted = (n for n in named if ".base_layer." in n or not n.startswith(adapted))
        self.layers = Layers([base_name(n.removesuffix(".weight")) for n in wanted])
        weights = Weights(torch.float32, self.device, records=False)
        self.bar = Bar("measuring quantization damage", progress)
        self.twin = twin_of(measured.model, weights, self.layers, self.bar.advance, measured.read)
        self.bar.total = passes * len(run.batches) * sum(map(len, self.twin.blocks))

    def backward(self) -> int:
        """Run a forward and a backward of each batch, which fill the sums of the layers. Return the number of counted tokens."""
        generator = torch.Generator(device="cpu").manual_seed(_SEED)
        with undisturbed(self.device), self.rows:
            for batch in self.run.batches:
                logits, counted, rows = self._forward(batch)
                self.reference.append(rows)
                if logits.requires_grad:
                    logits.backward(_of_signs(rows, counted, logits, generator))  # type: ignore[no-untyped-call]
        return sum(len(rows) for rows in self.reference)

    def divergence(self, form: str) -> float:
        """Return the divergence from `reference` in nats per token if all layers are rounded to a format."""
        self.layers.form = form
        try:
            pairs = list(zip(self.reference, self.distributions(), strict=True))
        finally:
            self.layers.form = None
        return sum(_divergence(p, q) for p, q in pairs) / max(1, sum(p.shape[0] for p, _ in pairs))

    def distributions(self) -> Iterator[torch.Tensor]:
        """Run a forward of each batch, and yield its log probabilities `[counted tokens, vocabulary]`."""
        for batch in self.run.batches:
            with undisturbed(self.device), torch.no_grad(), self.rows:
                yield self._forward(batch)[2]

    def _forward(self, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the logits of a batch, the mask of tokens that count, and the log probabilities of these tokens."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        output = self.twin.model(**on_device(inputs, self.device, torch.float32))
        logits = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor):
            what = f"{self.measured.source}, which returns {type(output).__name__} without logits"
            expected = "a model that returns logits of the next token (or of classes)"
            fix = "pass the model with its head"
            raise UsageError.of("the damage of quantization cannot be measured", what, expected, fix)
        counted = _counted(batch, logits.shape[:-1])
        return logits, counted, torch.log_softmax(logits.detach()[counted.to(logits.device)].float(), -1)


def _counted(batch: Mapping[str, Any], shape: torch.Size) -> torch.Tensor:
    """Return a mask `[batch, tokens]` of the logits to compare: False at padding, and before a label of -100."""
    counted = torch.ones(shape, dtype=torch.bool)
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if isinstance(mask, torch.Tensor) and mask.shape == shape:
        counted &= mask.cpu().bool()
    if isinstance(labels, torch.Tensor) and labels.shape == shape:
        following = torch.full_like(labels, -100)
        following[..., :-1] = labels[..., 1:]  # the logits at a token predict the next token
        counted &= (following != -100).cpu() if bool((labels == -100).any()) else True
    return counted


def _of_signs(
    rows: torch.Tensor, counted: torch.Tensor, logits: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Return a gradient u of the logits such that E[u uᵀ] is the Fisher information of each next-token distribution p.

    The function returns u = r ε - p (r · ε), with r = √p and independent random signs ε of ±1. E[ε εᵀ] is the identity
    matrix, so E[u uᵀ] = (diag r - p rᵀ)(diag r - r pᵀ) = diag p - p pᵀ. The gradient of ln p(y), with y sampled from p,
    has the same second moments. However, that gradient has a larger variance: it is near 0 for most samples, and large
    for a few samples. The random signs are from Martens, Sutskever and Swersky, https://arxiv.org/abs/1206.6464.

    Args:
        rows: log probabilities `[counted tokens, vocabulary]`, float32.
        counted: mask of the counted tokens, `[batch, tokens]`.
        logits: `[batch, tokens, vocabulary]`. The gradient has the same shape, dtype and device, and is 0 for tokens that do
            not count.
    """
    signs = torch.empty(rows.shape, dtype=torch.int8).random_(2, generator=generator).mul_(2).sub_(1)
    gradient = (rows / 2).exp_().mul_(signs.to(rows.device))
    gradient -= rows.exp().mul_(gradient.sum(1, keepdim=True))
    whole = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    whole[counted.to(logits.device)] = gradient.to(logits.dtype)
    return whole


def _divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Return Σ p (ln p - ln q) over all rows. The arguments `p` and `q` are the logarithms ln p and ln q.

    With d = ln p - ln q, the function computes Σ p (d + exp(-d) - 1). This sum is equal, because p and q each sum to one.
    The terms of this sum are of second order in d. In Σ p d, first-order terms would cancel only up to rounding errors.
    """
    parts = zip(torch.split(p, _CHUNK), torch.split(q, _CHUNK), strict=True)
    differences = ((a, a - b) for a, b in parts)
    # Some devices have no float64.
    return sum(float((a.exp() * (d + torch.expm1(-d))).cpu().double().sum()) for a, d in differences)
