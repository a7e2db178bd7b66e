"""Triton kernels of absorbed multi-head latent attention for a few tokens. `ops_mla` launches them.

They are bound by reading the past, once: `append` writes the new rows to it, `absorb` moves the keys' matrix to the
queries, `attend` reads the rows, which all heads share, a split of them each program, and `combine` merges the splits
and applies the values' matrix. For EARLY see `kernels_linear`.

Legend: B batch, T new tokens, X = B T, S past and new tokens, H heads, L latent width, N per-head and P shared key
width, V value width. A row is `[latent L | shared key P]`; queries are the T H pairs of a token and a head.
"""

try:  # in a `try`, so that a reader of exported model code does not need triton; who imports this file does
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    raise


@triton.jit(debug=True)
def append(
    new,
    new_stride,
    norm,
    eps,
    rows,
    stride,
    at,
    T,
    S,
    L: tl.constexpr,
    P: tl.constexpr,
    BL: tl.constexpr,
    BP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token's row: its latent normalised as by `layers_mlp.RMSNorm`, its shared key as it is.

    The host does not know where the row goes: beyond the cache nothing is written, and a GPU says so and stops.
    """
    if EARLY:
        gdc_launch_dependents()
    x = tl.program_id(0)
    latent, shared = tl.arange(0, BL), tl.arange(0, BP)
    weight = tl.load(norm + latent, latent < L, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    new += x.to(tl.int64) * new_stride
    place = tl.load(at + x % T).to(tl.int64)
    tl.device_assert(place < S, "no room for another token in the static cache")
    rows += (x // T).to(tl.int64) * stride + place * (L + P)
    value = tl.load(new + latent, latent < L, other=0.0).to(tl.float32)
    value = (value * tl.rsqrt(tl.sum(value * value, 0) / L + eps)).to(rows.dtype.element_ty)
    tl.store(rows + latent, (value.to(tl.float32) * weight).to(rows.dtype.element_ty), (latent < L) & (place < S))
    if P > 0:
        value = tl.load(new + L + shared, shared < P, other=0.0)
        tl.store(rows + L + shared, value, (shared < P) & (place < S))


@triton.jit
def absorb(
    q,
    q_stride,
    matrix,
    scale,
    to,
    X,
    H,
    N: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    BX: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`scale * [q_nope to_key | q_shared]`, `[X, H, L + P]`, of one head: BC columns for BX tokens."""
    if EARLY:
        gdc_launch_dependents()
    blocks: tl.constexpr = (L + BC - 1) // BC
    h, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BC
    x, key, latent = tl.program_id(1) * BX + tl.arange(0, BX), tl.arange(0, BN), first + tl.arange(0, BC)
    place = matrix + (h * (N + V) + key[:, None]) * L + latent[None, :]
    weight = tl.load(place, (key < N)[:, None] & (latent < L)[None, :], other=0.0)  # [BN, BC]
    if EARLY:
        gdc_wait()
    q += x.to(tl.int64)[:, None] * q_stride + h * (N + P)
    to += (x.to(tl.int64)[:, None] * H + h) * (L + P)
    value = tl.load(q + key[None, :], (x < X)[:, None] & (key < N)[None, :], other=0.0)
    value = tl.dot(value, weight, input_precision="ieee") * scale
    tl.store(to + latent[None, :], value.to(to.dtype.element_ty), (x < X)[:, None] & (latent < L)[None, :])
    if P > 0:
        shared = tl.arange(0, BP)
        there = (x < X)[:, None] & (shared < P)[None, :] & (first == 0)
        keys = tl.load(q + N + shared[None, :], there, other=0.0).to(tl.float32) * scale
        tl.store(to + L + shared[None, :], keys.to(to.dtype.element_ty), there)


@triton.jit
def _extent(past, at, T, splits, BS: tl.constexpr):
    """The length, up to the last new token, and how much of it a split has; the last splits may have nothing."""
    if at is None:
        length = (past + T).to(tl.int32)
    else:
        length = tl.load(at + T - 1).to(tl.int32) + 1
    return length, tl.cdiv(tl.cdiv(length, splits), BS) * BS


@triton.jit
def _wide(place, rows, W: tl.constexpr, BW: tl.constexpr):
    """Rows of W values, in tiles of BW; of those that are not there, zeros."""
    if W == BW:
        return tl.load(place, rows[:, None], other=0.0)
    else:
        return tl.load(place, rows[:, None] & (tl.arange(0, BW) < W)[None, :], other=0.0)


@triton.jit(do_not_specialize=["past"])
def attend(
    q,
    rows,
    stride,
    past,
    at,
    pads,
    pads_stride,
    parts,
    sums,
    T,
    H,
    splits,
    L: tl.constexpr,
    P: tl.constexpr,
    BQ: tl.constexpr,
    BS: tl.constexpr,
    BL: tl.constexpr,
    BP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BQ queries of one row of the batch over one split: what they read, and the base-2 logarithm of their sum.

    The queries are scaled for base 2. A token sees the rows up to its own, but not those where `pads` is False. There
    are many rows and few queries, so products have the rows first. Tiles wait in shared memory, and each is read there
    twice, for the scores and for the sum.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    split, b = tl.program_id(1), tl.program_id(2)
    length, share = _extent(past, at, T, splits, BS)
    begin = split * share
    if begin >= length:
        return
    query, key, latent, shared = tl.arange(0, BQ), tl.arange(0, BS), tl.arange(0, BL), tl.arange(0, BP)
    token, there = (tl.program_id(0) * BQ + query) // H, tl.program_id(0) * BQ + query < T * H
    if at is None:
        last = tl.where(there, past + token, -1).to(tl.int32)
    else:
        last = tl.load(at + token, there, other=-1).to(tl.int32)
    first = b.to(tl.int64) * T * H + tl.program_id(0) * BQ  # of the queries
    place = q + first * (L + P) + query[:, None] * (L + P)
    q_latent = tl.trans(_wide(place + latent[None, :], there, L, BL))  # [BL, BQ]
    if P > 0:
        q_shared = tl.trans(_wide(place + L + shared[None, :], there, P, BP))  # [BP, BQ]
    rows += b.to(tl.int64) * stride + begin.to(tl.int64) * (L + P)

    largest, total = tl.full((BQ,), float("-inf"), tl.float32), tl.zeros((BQ,), tl.float32)
    read = tl.zeros((BL, BQ), tl.float32)
    for start in range(begin, tl.minimum(begin + share, length), BS):
        inside = start + key < length
        if P > 0:
            keys = _wide(rows + L + key[:, None] * (L + P) + shared[None, :], inside, P, BP)  # [BS, BP]
        values = _wide(rows + key[:, None] * (L + P) + latent[None, :], inside, L, BL)  # [BS, BL]
        rows += BS * (L + P)
        scores = tl.dot(values, q_latent, input_precision="ieee")  # [BS, BQ]
        if P > 0:
            scores = tl.dot(keys, q_shared, scores, input_precision="ieee")
        seen = (start + key)[:, None] <= last[None, :]
        if pads is not None:
            seen &= (tl.load(pads + b.to(tl.int64) * pads_stride + start + key, inside, other=0) != 0)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        before, largest = largest, tl.maximum(largest, tl.max(scores, 0))
        base = tl.where(largest == float("-inf"), 0.0, largest)  # who has seen nothing has no largest
        weights, fade = tl.exp2(scores - base[None, :]), tl.exp2(before - base)
        total = total * fade + tl.sum(weights, 0)
        read = tl.dot(tl.trans(values), weights.to(values.dtype), read * fade[None, :], input_precision="ieee")

    nothing = total == 0.0
    read = tl.trans(read / tl.where(nothing, 1.0, total)[None, :])  # [BQ, BL]
    first = ((b * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * splits + split) * BQ  # [B, blocks, splits, BQ]
    place = parts + first * L + query[:, None] * L + latent[None, :]
    if L == BL:
        tl.store(place, read.to(parts.dtype.element_ty))
    else:
        tl.store(place, read.to(parts.dtype.element_ty), (latent < L)[None, :])
    log_sum = tl.where(nothing, float("-inf"), largest + tl.log2(tl.where(nothing, 1.0, total)))
    tl.store(sums + first + query, log_sum)


@triton.jit(do_not_specialize=["past"])
def combine(
    parts,
    sums,
    matrix,
    gate,
    gate_stride,
    o,
    past,
    at,
    T,
    H,
    splits,
    N: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    BQ: tl.constexpr,
    BS: tl.constexpr,
    BL: tl.constexpr,
    BV: tl.constexpr,
    MOST: tl.constexpr,
    MANY: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BV values of one query: its splits (up to MOST) weighed by their sums, times `to_value`, times the open gate."""
    if EARLY:
        gdc_launch_dependents()
    number, h = tl.program_id(0).to(tl.int64), tl.program_id(0) % H
    value, latent = tl.program_id(1) * BV + tl.arange(0, BV), tl.arange(0, BL)
    weight = _wide(matrix + (h * (N + V) + N + value[:, None]) * L + latent[None, :], value < V, L, BL)  # [BV, BL]
    if EARLY:
        gdc_wait()
    length, share = _extent(past, at, T, splits, BS)
    used = tl.cdiv(length, share)
    b, query = number // (T * H), number % (T * H)
    first = (b * tl.cdiv(T * H, BQ) + query // BQ) * splits * BQ + query % BQ  # [B, blocks, splits, BQ]
    log_sums = tl.load(sums + first + tl.arange(0, MOST) * BQ, tl.arange(0, MOST) < used, other=float("-inf"))
    largest = tl.max(log_sums, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(log_sums - largest), 0)
    read = tl.zeros((MANY, BL), tl.float32)
    for start in tl.range(0, used, MANY, num_stages=4):  # few programs: each needs several tiles under way
        split = start + tl.arange(0, MANY)
        weights = tl.exp2(tl.load(sums + first + split * BQ, split < used, other=float("-inf")) - largest)
        part = _wide(parts + (first + split * BQ)[:, None] * L + latent[None, :], split < used, L, BL)
        read += weights[:, None] * part.to(tl.float32)
    read = tl.sum(read, 0) / tl.where(total == 0.0, 1.0, total)  # [BL]
    out = tl.sum(weight.to(tl.float32) * read[None, :], 1)
    if gate is not None:
        place = gate + number // H * gate_stride + h * V + value
        out *= tl.sigmoid(tl.load(place, value < V, other=0.0).to(tl.float32))
    tl.store(o + number * V + value, out.to(o.dtype.element_ty), value < V)
