"""Triton kernels of attention residuals: a mixture of candidates for each token, each of them read once. `ops_attnres`
launches them. For EARLY see `kernels_linear`.

Legend: n candidates, X tokens of all rows, D hidden size.
"""

try:  # in a `try`, so that a reader of exported model code does not need triton; who imports this file does
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    raise


@triton.jit
def mix(xs, weight, eps, out, D, n: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr):
    """One token: `sum_i p_i x_i` with `p = softmax_i(<rmsnorm(x_i), weight>)`."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row, column = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BD)
    w = tl.load(weight + column, column < D, other=0.0)
    largest, total, mixed = float("-inf"), 0.0, tl.zeros((BD,), tl.float32)
    for i in tl.static_range(n):
        x = tl.load(xs[i] + row + column, column < D, other=0.0).to(tl.float32)
        score = tl.rsqrt(tl.sum(x * x, 0) / D + eps) * tl.sum(x * w, 0)
        before, largest = largest, tl.maximum(largest, score)
        fade, p = tl.exp(before - largest), tl.exp(score - largest)
        total, mixed = total * fade + p, mixed * fade + p * x
    tl.store(out + row + column, (mixed / total).to(out.dtype.element_ty), column < D)


@triton.jit
def mix_backward(
    xs,
    dxs,
    weight,
    eps,
    grad,
    d_weight,
    X,
    D,
    n: tl.constexpr,
    ROWS: tl.constexpr,
    BD: tl.constexpr,
):
    """Gradients of the candidates, and of the weight, summed over ROWS tokens `[programs, D]`."""
    column = tl.arange(0, BD)
    inside = column < D
    w = tl.load(weight + column, inside, other=0.0)
    sums = tl.zeros((BD,), tl.float32)
    first = tl.program_id(0) * ROWS
    for token in range(first, tl.minimum(first + ROWS, X)):
        place = tl.cast(token, tl.int64) * D + column
        d = tl.load(grad + place, inside, other=0.0).to(tl.float32)
        rates, products, to_p, largest = (), (), (), float("-inf")
        for i in tl.static_range(n):
            x = tl.load(xs[i] + place, inside, other=0.0).to(tl.float32)
            rates += (tl.rsqrt(tl.sum(x * x, 0) / D + eps),)
            products += (tl.sum(x * w, 0),)
            to_p += (tl.sum(x * d, 0),)
            largest = tl.maximum(largest, rates[i] * products[i])
        ps, total, overlap = (), 0.0, 0.0
        for i in tl.static_range(n):
            ps += (tl.exp(rates[i] * products[i] - largest),)
            total += ps[i]
            overlap += ps[i] * to_p[i]
        for i in tl.static_range(n):
            x = tl.load(xs[i] + place, inside, other=0.0).to(tl.float32)
            p = ps[i] / total
            slope = p * (to_p[i] - overlap / total) * rates[i]
            sums += slope * x
            dx = p * d + slope * (w - rates[i] * rates[i] * (products[i] / D) * x)
            tl.store(dxs[i] + place, dx.to(dxs[i].dtype.element_ty), inside)
    tl.store(d_weight + tl.program_id(0).to(tl.int64) * D + column, sums, inside)
