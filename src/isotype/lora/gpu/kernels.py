"""Triton kernels of RMSNorm, gated products and rotary positions. They compute in float32 and round the result once.

Offsets are int64, because batches can have more than 2³¹ elements. `isotype.lora.gpu.elementwise` numbers the activations.
"""

# Arguments have no annotations, because Triton compiles annotations, and does not support those of Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def rms_norm(x_at, weight_at, y_at, inverse_at, n, eps, offset, block: tl.constexpr):
    """Compute y = x · inverse · (offset + weight), inverse = 1 / sqrt(mean(x²) + eps), one row per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < n
    x = tl.load(x_at + row * n + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_at + column, mask=inside, other=0.0).to(tl.float32) + offset
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / n + eps)
    tl.store(inverse_at + row, inverse)
    tl.store(y_at + row * n + column, (x * inverse * weight).to(y_at.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward(grad_at, x_at, weight_at, inverse_at, d_x_at, n, offset, block: tl.constexpr):
    """Compute d_x = inverse · (g - x̂ · mean(g x̂)), g = grad · (offset + weight), x̂ = x · inverse, one row per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < n
    x = tl.load(x_at + row * n + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_at + column, mask=inside, other=0.0).to(tl.float32) + offset
    inner = tl.load(grad_at + row * n + column, mask=inside, other=0.0).to(tl.float32) * weight
    inverse = tl.load(inverse_at + row)
    normed = x * inverse
    d_x = inverse * (inner - normed * (tl.sum(inner * normed, 0) / n))
    tl.store(d_x_at + row * n + column, d_x.to(d_x_at.dtype.element_ty), mask=inside)


@triton.jit
def _activated(x, activation: tl.constexpr):
    """Return (act(x), derivative of act at x) in float32."""
    if activation == 0:  # silu
        share = tl.sigmoid(x)
        active, slope = x * share, share * (1.0 + x * (1.0 - share))
    elif activation == 1:  # gelu: x Φ(x)
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        active, slope = x * below, below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif activation == 2:  # gelu by tanh(u), u = sqrt(2 / π) (x + 0.044715 x³); tanh(u) = 2 sigmoid(2 u) - 1
        bent = 2.0 * tl.sigmoid(2.0 * 0.7978845608028654 * (x + 0.044715 * x * x * x)) - 1.0
        along = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
        active, slope = 0.5 * x * (1.0 + bent), 0.5 * (1.0 + bent) + 0.5 * x * (1.0 - bent * bent) * along
    elif activation == 3:  # relu
        active, slope = tl.where(x > 0, x, 0.0), tl.where(x > 0, 1.0, 0.0)
    elif activation == 4:  # relu²
        above = tl.where(x > 0, x, 0.0)
        active, slope = above * above, 2.0 * above
    else:  # sigmoid
        share = tl.sigmoid(x)
        active, slope = share, share * (1.0 - share)
    return active, slope


@triton.jit
def gated(gate_at, up_at, y_at, count, activation: tl.constexpr, block: tl.constexpr):
    """Compute y = act(gate) · up."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    gate = tl.load(gate_at + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_at + place, mask=inside, other=0.0).to(tl.float32)
    active, _ = _activated(gate, activation)
    tl.store(y_at + place, (active * up).to(y_at.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward(
    grad_at, gate_at, up_at, d_gate_at, d_up_at, count, activation: tl.constexpr, block: tl.constexpr
):
    """Compute the gradients of gate and up. Overwrite the incoming gradient by act(gate) * up."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    gate = tl.load(gate_at + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_at + place, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_at + place, mask=inside, other=0.0).to(tl.float32)
    active, slope = _activated(gate, activation)
    tl.store(grad_at + place, (active * up).to(grad_at.dtype.element_ty), mask=inside)
    tl.store(d_gate_at + place, (grad * up * slope).to(d_gate_at.dtype.element_ty), mask=inside)
    tl.store(d_up_at + place, (grad * active).to(d_up_at.dtype.element_ty), mask=inside)


@triton.jit
def rotary(
    x_at,
    cos_at,
    sin_at,
    y_at,
    tokens,
    heads,
    half,
    x_batch,
    x_head,
    x_token,
    y_batch,
    y_head,
    y_token,
    table_batch,
    heads_block: tl.constexpr,
    pairs_block: tl.constexpr,
    back: tl.constexpr,
):
    """Compute (a cos - b sin, b cos + a sin) for one token per program. If `back` is True, compute the gradient of (a, b)."""
    token = tl.program_id(0).to(tl.int64)
    row, place = token // tokens, token % tokens
    pair = tl.arange(0, pairs_block)
    head = tl.arange(0, heads_block).to(tl.int64)
    within = pair < half
    inside = (head < heads)[:, None] & within[None, :]
    table = row * table_batch + place * 2 * half + pair
    cos_first = tl.load(cos_at + table, mask=within, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos_at + table + half, mask=within, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin_at + table, mask=within, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin_at + table + half, mask=within, other=0.0).to(tl.float32)[None, :]
    at = x_at + row * x_batch + place * x_token + head[:, None] * x_head + pair[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    if back:
        turned = first * cos_first + second * sin_second
        other = second * cos_second - first * sin_first
    else:
        turned = first * cos_first - second * sin_first
        other = second * cos_second + first * sin_second
    to = y_at + row * y_batch + place * y_token + head[:, None] * y_head + pair[None, :]
    tl.store(to, turned.to(y_at.dtype.element_ty), mask=inside)
    tl.store(to + half, other.to(y_at.dtype.element_ty), mask=inside)
