"""Triton kernels of a KDA layer, any NVIDIA GPU from Ampere on. `ops_triton` launches them.

Legend: B batch, T tokens, H heads, K key width, V value width, W taps, N documents, D = 2HK + HV.
"""

try:  # in a `try`, so that a reader of exported model code does not need triton; who imports this file does
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    raise


@triton.jit
def log1p(x):
    """log(1 + x) for x in [0, 1], to the last bit or two also where x is small: 2 artanh(x / (2 + x)) as a series."""
    s = x / (2.0 + x)
    z = s * s
    y = 1 / 13
    for i in tl.static_range(5, -1, -1):
        y = y * z + 1 / (2 * i + 1)
    return 2.0 * s * y


@triton.jit
def log_decay(gate, bias, A_log, BOUND: tl.constexpr):
    """As `ops_reference.log_decay`; BOUND 0: the softplus gate."""
    x = gate + bias
    rate = tl.exp(A_log)
    if BOUND == 0:
        return -rate * (tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x))))
    else:
        return BOUND * tl.sigmoid(rate * x)


@triton.jit
def _quarters(x, Q: tl.constexpr):
    """`[4 * Q]` in four parts."""
    low, high = tl.split(tl.permute(tl.reshape(x, (2, 2, Q)), (2, 1, 0)))  # [Q, 2] each
    a, b = tl.split(low)
    c, d = tl.split(high)
    return a, b, c, d


@triton.jit
def _input(x, window, mask, at, stride, D, W: tl.constexpr):
    """What the convolutions get at token `at`; what is before token 0 lies in the window."""
    return tl.load(tl.where(at < 0, window + (at + W - 1) * D, x + at * stride), mask, other=0.0)


@triton.jit
def _convolved(x, window, taps, mask, t, stride, D, W: tl.constexpr):
    """SiLU of the convolution at token t, float32."""
    y = tl.zeros(mask.shape, tl.float32)
    for i in tl.static_range(W):
        tap = tl.load(taps + i, mask, other=0.0).to(tl.float32)
        y += tap * _input(x, window, mask, t + i - (W - 1), stride, D, W).to(tl.float32)
    return y * tl.sigmoid(y)


@triton.jit
def step(
    q,
    k,
    v,
    qk_stride,
    v_stride,
    q_taps,
    k_taps,
    v_taps,
    window,
    gate,
    gate_stride,
    beta,
    beta_stride,
    A_log,
    dt_bias,
    state,
    out_gate,
    out_gate_stride,
    norm,
    eps,
    real,
    cu_seqlens,
    o,
    to_k,
    to_g,
    to_writes,
    T,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    Q: tl.constexpr,
    BV: tl.constexpr,
    BOUND: tl.constexpr,
    UNIT_EPS: tl.constexpr,
    CONVOLVES: tl.constexpr,
    NORMALISES: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
    RECORDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A few tokens of one head of one document: from the convolutions' inputs to the normalised output.

    The state is read once and written once. It lies in four tiles `[BV, Q]`, whose products are added before they are
    summed: few threads then share a row, and a sum is short. q and k are one vector, so that no thread repeats what
    another does. One program owns all channels of its head: it may write the window where it lies, and normalise.
    EARLY is explained in `kernels_linear`; the state was written by another launch of the graph, or long before.
    """
    if EARLY:
        gdc_launch_dependents()
    n, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    BK: tl.constexpr = 4 * Q
    value, quarter, key = tl.arange(0, BV), tl.arange(0, Q), tl.arange(0, BK)
    in_value, in_key = value < V, key < K
    place = state + ((n * H + h) * V + value[:, None]) * K + quarter[None, :]
    S0 = tl.load(place, in_value[:, None] & (quarter < K)[None, :], other=0.0).to(tl.float32)
    S1 = tl.load(place + Q, in_value[:, None] & (quarter + Q < K)[None, :], other=0.0).to(tl.float32)
    S2 = tl.load(place + 2 * Q, in_value[:, None] & (quarter + 2 * Q < K)[None, :], other=0.0).to(tl.float32)
    S3 = tl.load(place + 3 * Q, in_value[:, None] & (quarter + 3 * Q < K)[None, :], other=0.0).to(tl.float32)

    if EARLY:
        gdc_wait()
    first, tokens = n * T, T
    if PACKED:
        first = tl.load(cu_seqlens + n).to(tl.int64)
        tokens = (tl.load(cu_seqlens + n + 1) - first).to(tl.int32)
    both = tl.arange(0, 2 * BK)  # q, then k
    of_k, channel = both >= BK, h * K + both % BK
    in_both = both % BK < K
    D = H * (2 * K + V)
    qk = tl.where(of_k, k + channel, q + channel) + first * qk_stride
    v += h * V + value + first * v_stride
    gate += h * K + key + first * gate_stride
    if NORMALISES:
        out_gate += h * V + value + first * out_gate_stride
    beta += h + first * beta_stride
    o += (first * H + h) * V + value
    if CONVOLVES:
        qk_taps = tl.where(of_k, k_taps, q_taps) + channel * W
        v_taps += (h * V + value) * W
        qk_window = window + n * (W - 1) * D + tl.where(of_k, H * K, 0) + channel
        v_window = window + n * (W - 1) * D + 2 * H * K + h * V + value
    bias = tl.load(dt_bias + h * K + key, in_key, other=0.0).to(tl.float32)
    rate = tl.load(A_log + h).to(tl.float32)
    end = tl.zeros((), tl.int32) + tokens  # of the tokens that there are
    for t in range(tokens):
        if CONVOLVES:
            pair = _convolved(qk, qk_window, qk_taps, in_both, t, qk_stride, D, W)
            vt = _convolved(v, v_window, v_taps, in_value, t, v_stride, D, W)
        else:
            pair = tl.load(qk + t * qk_stride, in_both, other=0.0).to(tl.float32)
            vt = tl.load(v + t * v_stride, in_value, other=0.0).to(tl.float32)
        raw = tl.load(gate + t * gate_stride, in_key, other=0.0).to(tl.float32)
        strength = tl.sigmoid(tl.load(beta + t * beta_stride).to(tl.float32))
        if NORMALISES:
            opening = tl.load(out_gate + t * out_gate_stride, in_value, other=0.0).to(tl.float32)
            weight = tl.load(norm + value, in_value, other=0.0).to(tl.float32)
        g = log_decay(raw, bias, rate, BOUND)
        if MASKED:
            there = tl.load(real + first + t) != 0
            end = there.to(tl.int32)  # of one token
            g = tl.where(there, g, 0.0)
            strength = tl.where(there, strength, 0.0)
        pair = tl.reshape(pair, (2, BK))
        pair = tl.reshape(pair * tl.rsqrt(tl.sum(pair * pair, 1) + UNIT_EPS)[:, None], (2 * BK,))
        if RECORDS and CONVOLVES:
            tl.store(to_k + (first + t) * H * K + channel, pair, in_both & of_k)
            tl.store(to_g + (first + t) * H * K + h * K + key, g, in_key)
        qs, ks = tl.split(tl.permute(tl.reshape(pair, (2, BK)), (1, 0)))
        q0, q1, q2, q3 = _quarters(qs, Q)
        k0, k1, k2, k3 = _quarters(ks, Q)
        d0, d1, d2, d3 = _quarters(tl.exp(g), Q)
        S0 *= d0[None, :]
        S1 *= d1[None, :]
        S2 *= d2[None, :]
        S3 *= d3[None, :]
        products = S0 * k0[None, :] + S1 * k1[None, :] + S2 * k2[None, :] + S3 * k3[None, :]
        u = strength * (vt - tl.sum(products, 1))
        # S q after the write, from S q before it: both products with S in one pass.
        products = S0 * q0[None, :] + S1 * q1[None, :] + S2 * q2[None, :] + S3 * q3[None, :]
        overlap = tl.sum(q0 * k0 + q1 * k1 + q2 * k2 + q3 * k3, 0)
        out = (tl.sum(products, 1) + u * overlap) * tl.rsqrt(K * 1.0)
        S0 += u[:, None] * k0[None, :]
        S1 += u[:, None] * k1[None, :]
        S2 += u[:, None] * k2[None, :]
        S3 += u[:, None] * k3[None, :]
        if RECORDS:
            tl.store(to_writes + ((first + t) * H + h) * V + value, u, in_value)
        if NORMALISES:
            out *= tl.rsqrt(tl.sum(out * out, 0) / V + eps) * weight * tl.sigmoid(opening)
        tl.store(o + t * H * V, out.to(o.dtype.element_ty), in_value)
    tl.store(place, S0.to(state.dtype.element_ty), in_value[:, None] & (quarter < K)[None, :])
    tl.store(place + Q, S1.to(state.dtype.element_ty), in_value[:, None] & (quarter + Q < K)[None, :])
    tl.store(place + 2 * Q, S2.to(state.dtype.element_ty), in_value[:, None] & (quarter + 2 * Q < K)[None, :])
    tl.store(place + 3 * Q, S3.to(state.dtype.element_ty), in_value[:, None] & (quarter + 3 * Q < K)[None, :])
    if CONVOLVES:
        tl.debug_barrier()  # until every thread has read the window
        for i in tl.static_range(W - 1):
            at = end - (W - 1) + i
            tl.store(qk_window + i * D, _input(qk, qk_window, in_both, at, qk_stride, D, W), in_both)
            tl.store(v_window + i * D, _input(v, v_window, in_value, at, v_stride, D, W), in_value)
