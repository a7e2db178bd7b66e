"""Triton kernels of RMSNorm and of gated activations, and their gradients, any NVIDIA GPU from Ampere on.

`ops_rows` launches them. All are bound by memory: each reads its inputs once and writes its outputs once, and is
float32 in between.

Legend: W width of a row; BR rows and BW columns of a tile.
"""

try:  # in a `try`, so that a reader of exported model code does not need triton; who imports this file does
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernels_linear import activated, tanh


@triton.jit
def _place(block, rows, first, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr):
    """Rows `[BR, 1]` and columns `[1, BW]` of a tile, and which of its elements exist."""
    row = (tl.cast(block, tl.int64) * BR + tl.arange(0, BR))[:, None]
    column = (first + tl.arange(0, BW))[None, :]
    return row, column, (row < rows) & (column < W)


@triton.jit
def _loaded(x, there):
    return tl.load(x, there, other=0.0).to(tl.float32)


@triton.jit
def _unit(x, eps, W: tl.constexpr):
    """Rows over their roots of `mean(x^2) + eps`, and the reciprocals of these."""
    rate = tl.rsqrt(tl.sum(x * x, 1) / W + eps)[:, None]
    return x * rate, rate


@triton.jit
def rms_norm(x, x_stride, weight, y, eps, rows, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr):
    """As `layers_mlp.RMSNorm`, of `BR` rows."""
    row, column, there = _place(tl.program_id(0), rows, 0, W, BR, BW)
    unit, _ = _unit(_loaded(x + row * x_stride + column, there), eps, W)
    unit = unit.to(x.dtype.element_ty).to(tl.float32) * _loaded(weight + column, column < W)
    tl.store(y + row * W + column, unit.to(y.dtype.element_ty), there)


@triton.jit
def rms_norm_backward(
    x,
    x_stride,
    weight,
    to_y,
    to_stride,
    dx,
    sums,
    eps,
    rows,
    W: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
):
    """Gradients of x, and of the weight summed over this program's rows `[programs, W]`.

    The weight is read again for each tile, from a cache: in registers it would keep another program out.
    """
    total = tl.zeros((BR, BW), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, BR), tl.num_programs(0)):
        row, column, there = _place(block, rows, 0, W, BR, BW)
        to = _loaded(to_y + row * to_stride + column, there)
        unit, rate = _unit(_loaded(x + row * x_stride + column, there), eps, W)
        total += to * unit
        to *= _loaded(weight + column, column < W)  # now the gradient of `unit`
        to -= unit * (tl.sum(to * unit, 1) / W)[:, None]
        tl.store(dx + row * W + column, (to * rate).to(dx.dtype.element_ty), there)
    column = tl.arange(0, BW)
    tl.store(sums + tl.program_id(0).to(tl.int64) * W + column, tl.sum(total, 0), column < W)


@triton.jit
def activate(
    gate,
    gate_stride,
    up,
    up_stride,
    y,
    rows,
    W: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
):
    """`kernels_linear.activated` of a tile, rounded once."""
    row, column, there = _place(tl.program_id(0), rows, tl.program_id(1) * BW, W, BR, BW)
    opened = _loaded(gate + row * gate_stride + column, there)
    out = activated(opened, _loaded(up + row * up_stride + column, there), BETA, LINEAR_BETA)
    tl.store(y + row * W + column, out.to(y.dtype.element_ty), there)


@triton.jit
def _bent(x, BETA: tl.constexpr):
    """`BETA * tanh(x / BETA)` and its slope; with BETA 0, x and 1."""
    if BETA == 0:
        return x, tl.full(x.shape, 1.0, tl.float32)
    else:
        bend = tanh(x / BETA)
        return BETA * bend, 1.0 - bend * bend


@triton.jit
def activate_backward(
    gate,
    gate_stride,
    up,
    up_stride,
    to_y,
    to_stride,
    d_gate,
    d_up,
    rows,
    W: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
):
    """Gradients of gate and up. `activated` is `bent(gate) * sigmoid(gate) * bent(up)`, for SiLU without bends."""
    row, column, there = _place(tl.program_id(0), rows, tl.program_id(1) * BW, W, BR, BW)
    to = _loaded(to_y + row * to_stride + column, there)
    gates = _loaded(gate + row * gate_stride + column, there)
    opening = tl.sigmoid(gates)
    bend, slope = _bent(gates, BETA)
    line, line_slope = _bent(_loaded(up + row * up_stride + column, there), LINEAR_BETA)
    to *= opening
    to_gate = to * line * (slope + bend * (1.0 - opening))
    tl.store(d_gate + row * W + column, to_gate.to(d_gate.dtype.element_ty), there)
    tl.store(d_up + row * W + column, (to * bend * line_slope).to(d_up.dtype.element_ty), there)
