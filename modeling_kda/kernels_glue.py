"""Triton kernels of what surrounds the operation in a KDA layer: short convolutions, gated norm, and their gradients.

`ops_glue` launches them. All are bound by memory: each reads its inputs once and writes its outputs once.

Legend: B batch, T tokens, H heads, K key width, V value width, W taps, N documents, D = 2HK + HV.
"""

try:  # in a `try`, so that a reader of exported model code does not need triton; who imports this file does
    import triton
    import triton.language as tl
except ImportError:
    raise


# A program of the convolutions walks over `BT` tokens of `BD` channels and keeps the last W inputs in registers. The
# loads of the next `AHEAD` tokens are under way meanwhile: a store would hold back any load that comes after it.


@triton.jit
def _sigmoid(x):
    """To about 2^-21. These kernels have few instructions to spare: a root and a square are less than a division."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))  # -1 / log(2)
    return root * root


@triton.jit
def _one_of(part, a, b, c):
    """What belongs to q, k or v."""
    return tl.where(part == 0, a, tl.where(part == 1, b, c))


@triton.jit
def _place(HK, HV, total, BT: tl.constexpr, BD: tl.constexpr):
    """This program's block of tokens, where that begins and ends; channels of q, k or v (0, 1, 2), which there are."""
    key_blocks = tl.cdiv(HK, BD)
    blocks = 2 * key_blocks + tl.cdiv(HV, BD)
    block, number = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    part = tl.minimum(block // key_blocks, 2)
    channel = (block - part * key_blocks) * BD + tl.arange(0, BD)
    first = number * BT
    return number, first, tl.minimum(first + BT, total), part, channel, channel < tl.where(part == 2, HV, HK)


@triton.jit
def _borders_before(cu_seqlens, N, token):
    """How many of the borders lie before a token."""
    low = tl.zeros((), tl.int32)
    high = low + N
    while low < high:
        middle = (low + high) // 2
        before = tl.load(cu_seqlens + middle) < token
        low, high = tl.where(before, middle + 1, low), tl.where(before, high, middle)
    return low


@triton.jit
def _documents(cu_seqlens, first, last, total, N, T, PACKED: tl.constexpr):
    """The documents that begin or go on among tokens `first` to `last`: from this one up to, without, that one.

    Each document, an empty one too, begins in one block: those at the very end in the last."""
    if PACKED:
        low = _borders_before(cu_seqlens, N, first)
        low -= (tl.load(cu_seqlens + low) > first).to(tl.int32)
        high = tl.where(last == total, N, _borders_before(cu_seqlens, N, last))
        return low.to(tl.int64), high.to(tl.int64)
    else:
        return first // T, (last - 1) // T + 1


@triton.jit
def _borders(cu_seqlens, n, T, PACKED: tl.constexpr):
    """Where document n begins and ends."""
    if PACKED:
        return tl.load(cu_seqlens + n).to(tl.int64), tl.load(cu_seqlens + n + 1).to(tl.int64)
    else:
        return n * T, n * T + T


@triton.jit
def _loaded(taps, mask, W: tl.constexpr):
    """The weights of channels, tap by tap."""
    found = ()
    for i in tl.static_range(W):
        found += (tl.load(taps + i, mask, other=0.0),)
    return found


@triton.jit
def _past(x, stride, window, D, begin, start, mask, W: tl.constexpr):
    """The W - 1 inputs before token `begin`. Those before the document's `start` lie in the window, which is addressed
    as if it had a row for every token; without a window they are zeros."""
    found = ()
    for i in tl.static_range(1, W):
        t = begin - W + i
        if window is None:
            found += (tl.load(x + t * stride, mask & (t >= start), other=0.0).to(tl.float32),)
        else:
            at = tl.where(t >= start, x + t * stride, window + t * D)
            found += (tl.load(at, mask, other=0.0).to(tl.float32),)
    return found


@triton.jit
def _ahead(x, stride, begin, end, mask, AHEAD: tl.constexpr):
    """The tokens from `begin` on; zeros from `end` on."""
    found = ()
    for i in tl.static_range(AHEAD):
        found += (tl.load(x + (begin + i) * stride, mask & (begin + i < end), other=0.0),)
    return found


@triton.jit
def _step(x, stride, t, end, mask, taps, past, ahead, W: tl.constexpr, AHEAD: tl.constexpr):
    """To token t: the W inputs up to it, those under way, the convolution, and its sigmoid."""
    past += (ahead[0].to(tl.float32),)
    ahead = ahead[1:]
    ahead += (tl.load(x + (t + AHEAD) * stride, mask & (t + AHEAD < end), other=0.0),)
    y = past[0] * taps[0]
    for i in tl.static_range(1, W):
        y += past[i] * taps[i]
    return past, ahead, y, _sigmoid(y)


@triton.jit
def convolve(
    q,
    k,
    v,
    q_stride,
    k_stride,
    v_stride,
    q_taps,
    k_taps,
    v_taps,
    window,
    cu_seqlens,
    to_q,
    to_k,
    to_v,
    after,
    N,
    T,
    total,
    HK,
    HV,
    W: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    AHEAD: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The convolutions of q, k and v, each followed by SiLU, and the windows afterwards."""
    _, first, last, part, channel, mask = _place(HK, HV, total, BT, BD)
    D = tl.cast(2 * HK + HV, tl.int64)
    width, column = tl.where(part == 2, HV, HK).to(tl.int64), part * HK + channel
    x, y = _one_of(part, q, k, v) + channel, _one_of(part, to_q, to_k, to_v) + channel
    stride = _one_of(part, q_stride, k_stride, v_stride).to(tl.int64)
    taps = _loaded(_one_of(part, q_taps, k_taps, v_taps) + channel * W, mask, W)
    low, high = _documents(cu_seqlens, first, last, total, N, T, PACKED)
    for n in range(low, high):
        start, end = _borders(cu_seqlens, n, T, PACKED)
        begin, stop = tl.maximum(start, first), tl.minimum(end, last)
        before = None if window is None else window + ((n + 1) * (W - 1) - start) * D + column
        past = _past(x, stride, before, D, begin, start, mask, W)
        ahead = _ahead(x, stride, begin, stop, mask, AHEAD)
        for t in tl.range(begin, stop, loop_unroll_factor=AHEAD):
            past, ahead, out, opening = _step(x, stride, t, stop, mask, taps, past, ahead, W, AHEAD)
            past = past[1:]
            tl.store(y + t * width, (out * opening).to(y.dtype.element_ty), mask)
        for i in tl.static_range(W - 1):
            to = after + (n * (W - 1) + i) * D + column
            tl.store(to, past[i].to(after.dtype.element_ty), mask & (stop == end))


@triton.jit
def convolve_backward(
    q,
    k,
    v,
    q_stride,
    k_stride,
    v_stride,
    q_taps,
    k_taps,
    v_taps,
    window,
    cu_seqlens,
    to_q,
    to_k,
    to_v,
    to_after,
    dq,
    dk,
    dv,
    d_taps,
    d_window,
    N,
    T,
    total,
    HK,
    HV,
    W: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    AHEAD: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Gradients of q, k, v, of the windows, and of the taps summed over this block of tokens `[blocks, W, D]`, from
    those that arrive at the outputs (`to_`).

    At token t the pre-activation is computed again, and its gradient is the last that token t - W + 1 waits for. The
    walk thus goes W - 1 tokens beyond its block, and, where a document begins, starts with the rows of its window.
    """
    number, first, last, part, channel, mask = _place(HK, HV, total, BT, BD)
    D = tl.cast(2 * HK + HV, tl.int64)
    width, column = tl.where(part == 2, HV, HK).to(tl.int64), part * HK + channel
    x, dx = _one_of(part, q, k, v) + channel, _one_of(part, dq, dk, dv) + channel
    to_y = _one_of(part, to_q, to_k, to_v) + channel
    stride = _one_of(part, q_stride, k_stride, v_stride).to(tl.int64)
    taps = _loaded(_one_of(part, q_taps, k_taps, v_taps) + channel * W, mask, W)
    sums = ()
    for _ in tl.static_range(W):
        sums += (tl.zeros((BD,), tl.float32),)
    low, high = _documents(cu_seqlens, first, last, total, N, T, PACKED)
    for n in range(low, high):
        start, end = _borders(cu_seqlens, n, T, PACKED)
        begin, stop = tl.maximum(start, first), tl.minimum(end, last)
        row = (n + 1) * (W - 1)
        before = None if window is None else window + (row - start) * D + column
        past = _past(x, stride, before, D, begin, start, mask, W)
        ahead = _ahead(x, stride, begin, end, mask, AHEAD)
        to_ahead = _ahead(to_y, width, begin, end, mask, AHEAD)
        slopes = ()  # gradients of the pre-activations
        for _ in tl.static_range(1, W):
            slopes += (tl.zeros((BD,), tl.float32),)
        for t in tl.range(begin, stop + W - 1, loop_unroll_factor=AHEAD):
            past, ahead, out, opening = _step(x, stride, t, end, mask, taps, past, ahead, W, AHEAD)
            slopes += (to_ahead[0].to(tl.float32) * opening * (1.0 + out * (1.0 - opening)),)
            to_ahead = to_ahead[1:]
            to_ahead += (tl.load(to_y + (t + AHEAD) * width, mask & (t + AHEAD < end), other=0.0),)

            s = t - (W - 1)
            ours = (s >= begin) | (begin == start)
            at_s = tl.where(ours, past[0], 0.0)
            grad, added = slopes[W - 1] * taps[0], (sums[0] + slopes[W - 1] * at_s,)
            for i in tl.static_range(1, W):
                grad += slopes[W - 1 - i] * taps[i]
                added += (sums[i] + slopes[W - 1 - i] * at_s,)
            sums, past, slopes = added, past[1:], slopes[1:]
            if to_after is not None:  # the last W - 1 inputs of the document are the window afterwards
                kept = to_after + (row - end + s) * D + column
                grad += tl.load(kept, mask & (s >= end - (W - 1)), other=0.0).to(tl.float32)
            grad = grad.to(dx.dtype.element_ty)
            tl.store(dx + s * width, grad, mask & (s >= begin))
            if window is not None:
                tl.store(d_window + (row - start + s) * D + column, grad, mask & (s < start) & ours)
    for i in tl.static_range(W):
        tl.store(d_taps + (number * W + i) * D + column, sums[i], mask)


@triton.jit
def _opened(x, norm, gate, eps, there, V: tl.constexpr):
    """x, `1 / sqrt(mean(x^2) + eps)` of each row, and the sigmoid of the gate; float32."""
    x = tl.load(x, there, other=0.0).to(tl.float32)
    gate = tl.load(gate, there, other=0.0).to(tl.float32)
    return x, tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None], _sigmoid(gate)


@triton.jit
def _rows(block, rows, gate_stride, H: tl.constexpr, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr):
    """Where a block of rows lies: in x, in the gate (a token's heads side by side), and which elements exist."""
    row, value = block.to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BV)
    place = row[:, None] * V + value[None, :]
    of_gate = ((row // H) * gate_stride + (row % H) * V)[:, None] + value[None, :]
    return place, of_gate, (row < rows)[:, None] & (value < V)[None, :]


@triton.jit
def normalise(
    x,
    norm,
    gate,
    gate_stride,
    y,
    eps,
    rows,
    H: tl.constexpr,
    V: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
):
    """`rmsnorm(x) * norm * sigmoid(gate)` of `BR` rows."""
    place, of_gate, there = _rows(tl.program_id(0), rows, gate_stride, H, V, BR, BV)
    weight = tl.load(norm + tl.arange(0, BV), tl.arange(0, BV) < V, other=0.0).to(tl.float32)
    xs, scale, opening = _opened(x + place, norm, gate + of_gate, eps, there, V)
    tl.store(y + place, (xs * scale * weight[None, :] * opening).to(y.dtype.element_ty), there)


@triton.jit
def normalise_backward(
    x,
    norm,
    gate,
    gate_stride,
    to_y,
    dx,
    d_norm,
    d_gate,
    eps,
    rows,
    H: tl.constexpr,
    V: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
    TILES: tl.constexpr,
):
    """Gradients of x, of the gate, and of the norm's weight summed over `TILES * BR` rows `[programs, V]`."""
    value = tl.arange(0, BV)
    weight = tl.load(norm + value, value < V, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros((BR, BV), tl.float32)
    for i in range(TILES):
        place, of_gate, there = _rows(tl.program_id(0) * TILES + i, rows, gate_stride, H, V, BR, BV)
        to = tl.load(to_y + place, there, other=0.0).to(tl.float32)
        xs, scale, opening = _opened(x + place, norm, gate + of_gate, eps, there, V)
        unit = xs * scale
        sums += to * unit * opening
        to *= weight * opening  # now the gradient of `unit`
        tl.store(d_gate + place, (to * unit * (1.0 - opening)).to(d_gate.dtype.element_ty), there)
        to -= unit * (tl.sum(to * unit, 1) / V)[:, None]
        tl.store(dx + place, (to * scale).to(dx.dtype.element_ty), there)
    tl.store(d_norm + tl.program_id(0).to(tl.int64) * V + value, tl.sum(sums, 0), value < V)
