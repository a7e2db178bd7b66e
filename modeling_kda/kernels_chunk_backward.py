"""Triton kernels of the gradients of `kernels_chunk`. `ops_chunk` launches them.

After `prepare` and `recur` have computed again what they did, with the state before every chunk, `recur_backward`
carries the state's gradient back, chunk after chunk, and then `prepare_backward` turns all chunks at once.

Legend: T tokens a row, H heads, K key width, V value width, C tokens a chunk, N documents, BK, BV padded widths.
"""

try:  # in a `try`, so that a reader of exported model code does not need triton; who imports this file does
    import triton
    import triton.language as tl

    from .kernels_chunk import document, document_of, of_tokens
    from .kernels_kda import log_decay
except ImportError:
    raise


@triton.jit(do_not_specialize=["T"])
def recur_backward(
    q,
    k,
    w,
    scores,
    decay,
    to_o,
    to_state,
    cu_seqlens,
    to_after,
    to_writes,
    T,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PART: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One document of one head: the gradients of PART of its values, from its last chunk to its first.

    `to_state` is that of the state afterwards, and then that of the state before. Of every chunk, that of the state
    after it goes to `to_after` `[slots, H, BV, BK]`, that of what it writes to `to_writes` `[slots, H, BV, C]`.
    """
    parts: tl.constexpr = (V + PART - 1) // PART
    part, h, n = tl.program_id(0) % parts, tl.program_id(0) // parts % H, tl.program_id(0) // parts // H
    first, tokens, slot = document(cu_seqlens, n, T, C, PACKED)
    row, key, value = tl.arange(0, C), tl.arange(0, BK), part * PART + tl.arange(0, PART)
    to_state += ((n.to(tl.int64) * H + h) * V + value[:, None]) * K + key[None, :]
    inside = (value < V)[:, None] & (key < K)[None, :]
    S = tl.load(to_state, inside, other=0.0)
    last = tl.maximum(tl.cdiv(tokens, C) - 1, 0)
    place = (slot + last) * H + h
    tile = place * C * BK + row[:, None] * BK + key[None, :]
    q += tile
    k += tile
    w += tile
    scores += place * C * C + row[:, None] * C + row[None, :]
    decay += place * BK + key
    to_after += place * BV * BK + value[:, None] * BK + key[None, :]
    to_writes += place * BV * C + value[:, None] * C + row[None, :]
    to_o += ((first + last * C + row[:, None]) * H + h) * V + value[None, :]
    for done in tl.range(0, tokens, C, num_stages=STAGES):
        there = (last * C - done + row < tokens)[:, None] & (value < V)[None, :]
        out = tl.trans(tl.load(to_o, there, other=0.0))  # [PART, C]
        after = S.to(q.dtype.element_ty)
        writes = tl.dot(after, tl.trans(tl.load(k)), input_precision="ieee")
        writes = tl.dot(out, tl.load(scores), writes, input_precision="ieee").to(q.dtype.element_ty)
        tl.store(to_after, after)
        tl.store(to_writes, writes)
        S = tl.dot(out, tl.load(q), S * tl.load(decay)[None, :], input_precision="ieee")
        S = tl.dot(writes, tl.load(w), S, input_precision="ieee")
        q -= H * C * BK
        k -= H * C * BK
        w -= H * C * BK
        scores -= H * C * C
        decay -= H * BK
        to_after -= H * BV * BK
        to_writes -= H * BV * C
        to_o -= C * H * V
    tl.store(to_state, S, inside)


@triton.jit
def _where_products_are(x, key, inside, one, PRECISION: tl.constexpr):
    """Channels of tokens `[BK, C]` in float32, as a product with `one` leaves them: the tokens of a channel lie in few
    threads of one warp, which then add them up among themselves."""
    x = tl.load(x[None, :] + key[:, None], inside, other=0.0)
    return tl.dot(x, one.to(x.dtype), input_precision="ieee" if PRECISION == "ieee" else "tf32x3")


@triton.jit(do_not_specialize=["T", "N"])  # which are others for every batch
def prepare_backward(
    q,
    q_stride,
    k,
    k_stride,
    v,
    v_stride,
    gate,
    gate_stride,
    beta,
    beta_stride,
    A_log,
    dt_bias,
    cu_seqlens,
    ties,
    solved,
    states,
    writes,
    to_after,
    to_writes,
    to_o,
    dq,
    dk,
    dv,
    d_gate,
    d_beta,
    d_rate,
    d_bias,
    T,
    H,
    N,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PART: tl.constexpr,
    BOUND: tl.constexpr,
    UNIT_EPS: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The gradients of one chunk of one head, `[tokens, H, width]` each; those of `A_log` and `dt_bias` a chunk,
    `[slots, H]` and `[slots, H, BK]`."""
    h, slot = tl.program_id(0) % H, tl.program_id(0) // H
    n = document_of(cu_seqlens, slot, T, N, C, PACKED)
    first, tokens, begin = document(cu_seqlens, n, T, C, PACKED)
    done = ((slot - begin) * C).to(tl.int32)
    place = slot.to(tl.int64) * H + h
    row, key = tl.arange(0, C), tl.arange(0, BK)
    if done >= tokens:
        tl.store(d_rate + place, 0.0)
        tl.store(d_bias + place * BK + key, tl.zeros((BK,), tl.float32))
        return
    first += done
    there = row < tokens - done
    inside = (key < K)[:, None] & there[None, :]
    q = of_tokens(q, h, first, row, q_stride, K)
    k = of_tokens(k, h, first, row, k_stride, K)
    v = of_tokens(v, h, first, row, v_stride, V)
    gate = of_tokens(gate, h, first, row, gate_stride, K)
    strength = tl.load(of_tokens(beta, h, first, row, beta_stride, 1), there, other=0.0).to(tl.float32)
    strength = tl.sigmoid(strength)
    to_o = of_tokens(to_o, h, first, row, H * V, V)
    of_square = place * C * C + row[:, None] * C + row[None, :]
    inverse, tie = tl.load(solved + of_square), tl.load(ties + of_square)

    # What came in from other chunks and from the values.
    q_to, k_to, w_to = tl.zeros((BK, C), tl.float32), tl.zeros((BK, C), tl.float32), tl.zeros((BK, C), tl.float32)
    score_to, solved_to = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    decay_to = tl.zeros((BK,), tl.float32)
    for start in range(0, V, PART):
        value = start + tl.arange(0, PART)
        of_state = place * BV * BK + value[None, :] * BK + key[:, None]
        of_write = place * BV * C + value[:, None] * C + row[None, :]
        real = (value < V)[:, None] & there[None, :]
        S, after = tl.load(states + of_state), tl.load(to_after + of_state)  # [BK, PART]
        W, W_to = tl.load(writes + of_write), tl.load(to_writes + of_write)  # [PART, C]
        out = tl.load(to_o[None, :] + value[:, None], real, other=0.0)
        vs = tl.load(v[None, :] + value[:, None], real, other=0.0)
        q_to = tl.dot(S, out, q_to, input_precision="ieee")
        k_to = tl.dot(after, W, k_to, input_precision="ieee")
        w_to = tl.dot(S, W_to, w_to, input_precision="ieee")
        decay_to += tl.sum(S.to(tl.float32) * after.to(tl.float32), 1)
        score_to = tl.dot(tl.trans(out), W, score_to, input_precision="ieee")
        solved_to = tl.dot(tl.trans(W_to), vs, solved_to, input_precision="ieee")
        v_to = tl.dot(W_to.to(tl.float32), inverse, input_precision=PRECISION) * strength[None, :]
        to = ((first + row[None, :]) * H + h) * V + value[:, None]
        tl.store(dv + to, v_to.to(dv.dtype.element_ty), real)

    # The decays, as in `prepare`.
    one = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    up_to = tl.where(row[:, None] <= row[None, :], 1.0, 0.0)
    rate = tl.load(A_log + h).to(tl.float32)
    bias = tl.load(dt_bias + h * K + key, key < K, other=0.0).to(tl.float32)[:, None]
    x = _where_products_are(gate, key, inside, one, PRECISION)
    g = tl.where(inside, log_decay(x, bias, rate, BOUND) * 1.4426950408889634, 0.0)
    g = tl.where(g < -150.0, -150.0, g)
    if PRECISION == "ieee":
        eighths = tl.floor(g * 8.0 + 0.5) * 0.125
        total = tl.dot(eighths, up_to, input_precision="ieee")
        rest = tl.dot(g - eighths, up_to, input_precision="ieee")
        end = tl.sum(tl.where((row == C - 1)[None, :], rest, 0.0), 1)
        whole = tl.min(total, 1)
        to_end = tl.exp2((whole[:, None] - total) + (end[:, None] - rest))
        since_begin = tl.exp2(total + rest)
        whole += end
    else:
        total = tl.dot(g, up_to, input_precision="tf32x3")
        whole = tl.min(total, 1)
        to_end = tl.exp2(whole[:, None] - total)
        since_begin = tl.exp2(total)

    qs, ks = _where_products_are(q, key, inside, one, PRECISION), _where_products_are(k, key, inside, one, PRECISION)
    q_unit = tl.rsqrt(tl.sum(qs * qs, 0) + UNIT_EPS)
    k_unit = tl.rsqrt(tl.sum(ks * ks, 0) + UNIT_EPS)
    qs, ks = qs * (q_unit * tl.rsqrt(K * 1.0))[None, :], ks * k_unit[None, :]

    # The triangular system: `w` is -(inverse strength) (k decays), `u` is (inverse strength) v.
    solved_to -= tl.dot(tl.trans(w_to), ks * since_begin, input_precision=PRECISION)
    read_to = -tl.dot(w_to, inverse * strength[None, :], input_precision=PRECISION) * since_begin
    beta_to = tl.sum(solved_to * inverse, 0)
    tie_to = tl.dot(solved_to * strength[None, :], tl.trans(inverse), input_precision=PRECISION)
    tie_to = -tl.dot(tl.trans(inverse), tie_to, input_precision=PRECISION)
    tie_to = tl.where(row[:, None] > row[None, :], tie_to, 0.0)
    beta_to += tl.sum(tie_to * tie, 1)
    beta_to *= strength * (1.0 - strength)
    tl.store(d_beta + (first + row) * H + h, beta_to.to(d_beta.dtype.element_ty), there)
    # Token by token these are needed, of all later tokens: by way of memory, where what was there is read already.
    tl.debug_barrier()
    of_pair = place * C * C + row[None, :] * C + row[:, None]
    tl.store(ties + of_pair, tie_to * strength[:, None])
    tl.store(solved + of_pair, score_to)
    tl.debug_barrier()

    # Pairs of a later token, which reads, with token j, which has written. A token's decay counts for those that read
    # there or later and wrote before: `reads` has all that were written so far, `written` what lasts beyond the chunk.
    q_to *= since_begin
    write_to = k_to * to_end
    reads, written, lasting = qs * q_to + ks * read_to, tl.exp2(whole) * decay_to, ks * write_to
    g_to = tl.where((row == 0)[None, :], (tl.sum(reads, 1) + written)[:, None], 0.0)
    for j in range(C):
        at, later = (row == j)[None, :], (row > j)[None, :]
        between = total - tl.sum(tl.where(at, total, 0.0), 1)[:, None]
        if PRECISION == "ieee":
            between += rest - tl.sum(tl.where(at, rest, 0.0), 1)[:, None]
        between = tl.where(later, tl.exp2(tl.minimum(between, 0.0)), 0.0)
        pair = place * C * C + j * C + row
        score, tied = tl.load(solved + pair)[None, :], tl.load(ties + pair)[None, :]
        k_j = tl.sum(tl.where(at, ks, 0.0), 1)[:, None]
        reading = (score * qs + tied * ks) * between
        q_to += score * (between * k_j)
        read_to += tied * (between * k_j)
        write_to += tl.where(at, tl.sum(reading, 1)[:, None], 0.0)
        reads += reading * k_j
        written += tl.sum(tl.where(at, lasting, 0.0), 1)
        both = tl.sum(tl.where(later, reads, 0.0), 1) + written
        g_to += tl.where((row == j + 1)[None, :], both[:, None], 0.0)
    own = tl.load(solved + place * C * C + row * (C + 1))[None, :]  # what a token reads of itself, whatever decays
    q_to += own * ks
    write_to += own * qs
    g_to = tl.where(inside, g_to, 0.0)

    if BOUND == 0:
        x_to = g_to * -tl.exp(rate) * tl.sigmoid(x + bias)
        rate_to = g_to * log_decay(x, bias, rate, BOUND)
    else:
        opening = tl.sigmoid(tl.exp(rate) * (x + bias))
        x_to = g_to * BOUND * opening * (1.0 - opening) * tl.exp(rate)
        rate_to = x_to * (x + bias)
    to = ((first + row[None, :]) * H + h) * K + key[:, None]
    tl.store(d_gate + to, x_to.to(d_gate.dtype.element_ty), inside)
    tl.store(d_bias + place * BK + key, tl.sum(x_to, 1))
    tl.store(d_rate + place, tl.sum(rate_to))
    k_to = read_to + write_to
    k_to = (k_to - ks * tl.sum(ks * k_to, 0)[None, :]) * k_unit[None, :]
    tl.store(dk + to, k_to.to(dk.dtype.element_ty), inside)
    q_to = (q_to - qs * (tl.sum(qs * q_to, 0) * K)[None, :]) * (q_unit * tl.rsqrt(K * 1.0))[None, :]
    tl.store(dq + to, q_to.to(dq.dtype.element_ty), inside)
