"""Triton kernels of linear layers for one row, which are bound by reading the weights.

Several layers share a launch, and a norm before them, or an addition or an activation after them, is done on the way:
for one token, the time between two kernels is worth as much as reading some megabytes.

With EARLY a kernel may begin while the one before it ends (programmatic dependent launch): it asks for its first
weights, and waits before it reads or writes anything that another kernel writes or reads. Only for CUDA graphs.

Legend: C columns of the input, N columns of the output (rows of a weight `[N, C]`).
"""

try:  # in a `try`, so that a reader of exported model code does not need triton; who imports this file does
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    raise


@triton.jit
def _weights(w, row, N, C, start, BN: tl.constexpr, BC: tl.constexpr):
    """BN rows of a weight from `row` on, BC columns from `start` on."""
    rows, columns = row + tl.arange(0, BN), start + tl.arange(0, BC)
    place = w + row.to(tl.int64) * C + start + tl.arange(0, BN)[:, None] * C + tl.arange(0, BC)[None, :]
    return tl.load(place, (rows < N)[:, None] & (columns < C)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _product(x, w, w_up, row, N, C, norm, eps, BN: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr):
    """`x w^T` for BN rows of w, `[BN]` float32, and of `w_up`, if there is one; of the normalised x, if there is a
    `norm`: what it divides by commutes with the product, and is found on the way."""
    weight = _weights(w, row, N, C, 0, BN, BC)
    if w_up is not None:
        weight_up = _weights(w_up, row, N, C, 0, BN, BC)
    if EARLY:
        gdc_wait()
    products, squares = tl.zeros((BN, BC), tl.float32), tl.zeros((BC,), tl.float32)
    products_up = products
    for start in range(0, C, BC):
        column = start + tl.arange(0, BC)
        following = _weights(w, row, N, C, start + BC, BN, BC)
        value = tl.load(x + column, column < C, other=0.0).to(tl.float32)
        if norm is not None:
            squares += value * value
            value *= tl.load(norm + column, column < C, other=0.0).to(tl.float32)
        products += weight.to(tl.float32) * value[None, :]
        if w_up is not None:
            following_up = _weights(w_up, row, N, C, start + BC, BN, BC)
            products_up += weight_up.to(tl.float32) * value[None, :]
            weight_up = following_up
        weight = following
    scale = 1.0
    if norm is not None:
        scale = tl.rsqrt(tl.sum(squares, 0) / C + eps)
    return tl.sum(products, 1) * scale, tl.sum(products_up, 1) * scale


@triton.jit
def linears(
    x0, x1, x2, x3, x4, x5,
    w0, w1, w2, w3, w4, w5,
    n0, n1, n2, n3, n4, n5,
    c0, c1, c2, c3, c4, c5,
    norm,
    eps,
    y,
    BN: tl.constexpr,
    BC: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Up to six layers, whose outputs lie side by side. One that there is not has no columns."""
    if EARLY:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    x, w, N, C = x0, w0, n0, c0
    t0, t1, t2, t3, t4 = tl.cdiv(n0, BN), tl.cdiv(n1, BN), tl.cdiv(n2, BN), tl.cdiv(n3, BN), tl.cdiv(n4, BN)
    if tile >= t0:
        x, w, N, C, tile, y = x1, w1, n1, c1, tile - t0, y + n0
        if tile >= t1:
            x, w, N, C, tile, y = x2, w2, n2, c2, tile - t1, y + n1
            if tile >= t2:
                x, w, N, C, tile, y = x3, w3, n3, c3, tile - t2, y + n2
                if tile >= t3:
                    x, w, N, C, tile, y = x4, w4, n4, c4, tile - t3, y + n3
                    if tile >= t4:
                        x, w, N, C, tile, y = x5, w5, n5, c5, tile - t4, y + n4
    value, _ = _product(x, w, None, tile * BN, N, C, norm, eps, BN, BC, EARLY)
    column = tile * BN + tl.arange(0, BN)
    tl.store(y + column, value.to(y.dtype.element_ty), column < N)


@triton.jit
def added(x, w, N, C, old, y, BN: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr):
    """`old + x w^T`."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0) * BN
    value, _ = _product(x, w, None, row, N, C, None, 0.0, BN, BC, EARLY)
    column = row + tl.arange(0, BN)
    value = value.to(y.dtype.element_ty).to(tl.float32)  # rounded before the addition, as the layer's output is
    value += tl.load(old + column, column < N, other=0.0).to(tl.float32)
    tl.store(y + column, value.to(y.dtype.element_ty), column < N)


@triton.jit
def tanh(x):
    """To the last bits: where 1 - exp would cancel, by a fraction (Pade's of degrees 5 and 4). One division, of what
    is chosen."""
    z, e = x * x, tl.exp(-2.0 * tl.abs(x))
    over = tl.where(z < 1.0, x * (945.0 + z * (105.0 + z)), tl.where(x < 0.0, e - 1.0, 1.0 - e))
    return over / tl.where(z < 1.0, 945.0 + z * (420.0 + z * 15.0), 1.0 + e)


@triton.jit
def activated(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """As `layers_mlp.situ`; LINEAR_BETA 0: there is none. BETA 0: `silu(gate) * up`."""
    if BETA == 0:
        return gate * tl.sigmoid(gate) * up
    else:
        if LINEAR_BETA != 0:
            up = LINEAR_BETA * tanh(up / LINEAR_BETA)
        return BETA * tanh(gate / BETA) * tl.sigmoid(gate) * up


@triton.jit
def gated(
    x,
    w_gate,
    w_up,
    N,
    C,
    norm,
    eps,
    y,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`activation(x w_gate^T, x w_up^T)`."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0) * BN
    gate, up = _product(x, w_gate, w_up, row, N, C, norm, eps, BN, BC, EARLY)
    gate = gate.to(y.dtype.element_ty).to(tl.float32)  # rounded as the layers' outputs are
    up = up.to(y.dtype.element_ty).to(tl.float32)
    column = row + tl.arange(0, BN)
    tl.store(y + column, activated(gate, up, BETA, LINEAR_BETA).to(y.dtype.element_ty), column < N)
