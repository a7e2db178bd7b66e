"""Triton kernels of the gradients of `kernels_chunk`. `ops_chunk` launches them.

After `prepare` and `recur` have computed again what they did, with the state before every chunk, `recur_backward`
carries the state's gradient back, chunk after chunk, and then `prepare_backward` turns all chunks at once.

Legend: T tokens a row, H heads, K key width, V value width, C tokens a chunk, N documents, BK, BV padded widths. `d_x`
is the gradient of x, `to_x` where x goes.
"""

try:  # in a `try`, so that a reader of exported model code does not need triton; who imports this file does
    import triton
    import triton.language as tl

    from .kernels_chunk import document, document_of, log2_decay, of_tokens, within
    from .kernels_kda import log_decay
except ImportError:
    raise


@triton.jit(do_not_specialize=["T", "begin", "end"])
def recur_backward(
    q,
    k,
    w,
    scores,
    decay,
    d_o,
    d_state,
    cu_seqlens,
    to_d_after,
    to_d_writes,
    begin,
    end,
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
    """One document of one head: the gradients of PART of its values, from its last chunk before slot `end` back to its
    first from slot `begin` on.

    `d_state` is that of the state afterwards, and then that of the state before. Of every chunk, that of the state
    after it goes to `to_d_after` `[end - begin, H, BV, BK]`, that of what it writes to `to_d_writes`
    `[end - begin, H, BV, C]`.
    """
    parts: tl.constexpr = (V + PART - 1) // PART
    part, h, n = tl.program_id(0) % parts, tl.program_id(0) // parts % H, tl.program_id(0) // parts // H
    first, tokens, slot = document(cu_seqlens, n, T, C, PACKED)
    before, until = within(slot, tokens, begin, end, C)
    if before >= until:
        return
    row, key, value = tl.arange(0, C), tl.arange(0, BK), part * PART + tl.arange(0, PART)
    d_state += ((n.to(tl.int64) * H + h) * V + value[:, None]) * K + key[None, :]
    inside = (value < V)[:, None] & (key < K)[None, :]
    d_S = tl.load(d_state, inside, other=0.0)
    last = until - 1
    place = (slot + last) * H + h
    kept = place - begin * H
    tile = place * C * BK + row[:, None] * BK + key[None, :]
    q += tile
    k += tile
    w += tile
    scores += place * C * C + row[:, None] * C + row[None, :]
    decay += place * BK + key
    to_d_after += kept * BV * BK + value[:, None] * BK + key[None, :]
    to_d_writes += kept * BV * C + value[:, None] * C + row[None, :]
    d_o += ((first + last * C + row[:, None]) * H + h) * V + value[None, :]
    for done in tl.range(0, until - before, num_stages=STAGES):
        there = ((last - done) * C + row < tokens)[:, None] & (value < V)[None, :]
        d_out = tl.trans(tl.load(d_o, there, other=0.0))  # [PART, C]
        d_after = d_S.to(q.dtype.element_ty)
        d_writes = tl.dot(d_after, tl.trans(tl.load(k)), input_precision="ieee")
        d_writes = tl.dot(d_out, tl.load(scores), d_writes, input_precision="ieee").to(q.dtype.element_ty)
        tl.store(to_d_after, d_after)
        tl.store(to_d_writes, d_writes)
        d_S = tl.dot(d_out, tl.load(q), d_S * tl.load(decay)[None, :], input_precision="ieee")
        d_S = tl.dot(d_writes, tl.load(w), d_S, input_precision="ieee")
        q -= H * C * BK
        k -= H * C * BK
        w -= H * C * BK
        scores -= H * C * C
        decay -= H * BK
        to_d_after -= H * BV * BK
        to_d_writes -= H * BV * C
        d_o -= C * H * V
    tl.store(d_state, d_S, inside)


@triton.jit
def _where_products_are(x, key, inside, one, PRECISION: tl.constexpr):
    """Channels of tokens `[BK, C]` in float32, as a product with `one` leaves them: the tokens of a channel lie in few
    threads of one warp, which then add them up among themselves. Infinities become the largest numbers."""
    x = tl.load(x[None, :] + key[:, None], inside, other=0.0)
    short: tl.constexpr = x.dtype == tl.bfloat16 or x.dtype == tl.float16
    dtype: tl.constexpr = x.dtype if short else tl.float32
    most: tl.constexpr = 65504.0 if dtype == tl.float16 else 3e38
    x = tl.minimum(tl.maximum(x.to(tl.float32), -most), most).to(dtype)
    return tl.dot(x, one.to(dtype), input_precision="ieee" if PRECISION == "ieee" else "tf32x3")


@triton.jit(do_not_specialize=["T", "N", "begin"])  # which are others for every batch
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
    d_after,
    d_writes,
    d_o,
    to_d_q,
    to_d_k,
    to_d_v,
    to_d_gate,
    to_d_beta,
    to_d_rate,
    to_d_bias,
    begin,
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
    """The gradients of one chunk of one head, `[tokens, H, width]` each, from slot `begin` on; those of `A_log` and
    `dt_bias` a chunk, `[slots, H]` and `[slots, H, BK]`."""
    h, slot = tl.program_id(0) % H, begin + tl.program_id(0) // H
    n = document_of(cu_seqlens, slot, T, N, C, PACKED)
    first, tokens, initial = document(cu_seqlens, n, T, C, PACKED)
    done = ((slot - initial) * C).to(tl.int32)
    place = slot.to(tl.int64) * H + h
    kept = tl.program_id(0).to(tl.int64)
    row, key = tl.arange(0, C), tl.arange(0, BK)
    if done >= tokens:
        tl.store(to_d_rate + place, 0.0)
        tl.store(to_d_bias + place * BK + key, tl.zeros((BK,), tl.float32))
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
    d_o = of_tokens(d_o, h, first, row, H * V, V)
    of_square = place * C * C + row[:, None] * C + row[None, :]
    inverse, tie = tl.load(solved + of_square), tl.load(ties + of_square)

    # What came in from other chunks and from the values.
    d_q, d_k, d_w = tl.zeros((BK, C), tl.float32), tl.zeros((BK, C), tl.float32), tl.zeros((BK, C), tl.float32)
    d_scores, d_solved = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    d_decay = tl.zeros((BK,), tl.float32)
    for start in range(0, V, PART):
        value = start + tl.arange(0, PART)
        of_state = kept * BV * BK + value[None, :] * BK + key[:, None]
        of_write = kept * BV * C + value[:, None] * C + row[None, :]
        real = (value < V)[:, None] & there[None, :]
        S, after = tl.load(states + of_state), tl.load(d_after + of_state)  # [BK, PART]
        W, d_W = tl.load(writes + of_write), tl.load(d_writes + of_write)  # [PART, C]
        out = tl.load(d_o[None, :] + value[:, None], real, other=0.0)
        vs = tl.load(v[None, :] + value[:, None], real, other=0.0)
        d_q = tl.dot(S, out, d_q, input_precision="ieee")
        d_k = tl.dot(after, W, d_k, input_precision="ieee")
        d_w = tl.dot(S, d_W, d_w, input_precision="ieee")
        d_decay += tl.sum(S.to(tl.float32) * after.to(tl.float32), 1)
        d_scores = tl.dot(tl.trans(out), W, d_scores, input_precision="ieee")
        d_solved = tl.dot(tl.trans(d_W), vs, d_solved, input_precision="ieee")
        d_v = tl.dot(d_W.to(tl.float32), inverse, input_precision=PRECISION) * strength[None, :]
        to = ((first + row[None, :]) * H + h) * V + value[:, None]
        tl.store(to_d_v + to, d_v.to(to_d_v.dtype.element_ty), real)

    # The decays, as in `prepare`.
    one = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    up_to = tl.where(row[:, None] <= row[None, :], 1.0, 0.0)
    rate = tl.load(A_log + h).to(tl.float32)
    bias = tl.load(dt_bias + h * K + key, key < K, other=0.0).to(tl.float32)[:, None]
    x = _where_products_are(gate, key, inside, one, PRECISION)
    g = log2_decay(x, bias, rate, inside, BOUND)
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
    d_solved -= tl.dot(tl.trans(d_w), ks * since_begin, input_precision=PRECISION)
    d_read = -tl.dot(d_w, inverse * strength[None, :], input_precision=PRECISION) * since_begin
    d_beta = tl.sum(d_solved * inverse, 0)
    d_ties = tl.dot(d_solved * strength[None, :], tl.trans(inverse), input_precision=PRECISION)
    d_ties = -tl.dot(tl.trans(inverse), d_ties, input_precision=PRECISION)
    d_ties = tl.where(row[:, None] > row[None, :], d_ties, 0.0)
    d_beta += tl.sum(d_ties * tie, 1)
    d_beta *= strength * (1.0 - strength)
    tl.store(to_d_beta + (first + row) * H + h, d_beta.to(to_d_beta.dtype.element_ty), there)
    # Token by token these are needed, of all later tokens: by way of memory, where what was there is read already.
    tl.debug_barrier()
    of_pair = place * C * C + row[None, :] * C + row[:, None]
    tl.store(ties + of_pair, d_ties * strength[:, None])
    tl.store(solved + of_pair, d_scores)
    tl.debug_barrier()

    # Pairs of a later token, which reads, with token j, which has written. A token's decay counts for those that read
    # there or later and wrote before: `reads` has all that were written so far, `written` what lasts beyond the chunk.
    d_q *= since_begin
    d_written = d_k * to_end
    reads, written, lasting = qs * d_q + ks * d_read, tl.exp2(whole) * d_decay, ks * d_written
    d_g = tl.where((row == 0)[None, :], (tl.sum(reads, 1) + written)[:, None], 0.0)
    for j in range(C - 1):  # nobody reads the last one
        at, later = (row == j)[None, :], (row > j)[None, :]
        between = total - tl.sum(tl.where(at, total, 0.0), 1)[:, None]
        if PRECISION == "ieee":
            between += rest - tl.sum(tl.where(at, rest, 0.0), 1)[:, None]
        between = tl.where(later, tl.exp2(tl.minimum(between, 0.0)), 0.0)
        pair = place * C * C + j * C + row
        score, tied = tl.load(solved + pair)[None, :], tl.load(ties + pair)[None, :]
        k_j = tl.sum(tl.where(at, ks, 0.0), 1)[:, None]
        reading = (score * qs + tied * ks) * between
        d_q += score * (between * k_j)
        d_read += tied * (between * k_j)
        d_written += tl.where(at, tl.sum(reading, 1)[:, None], 0.0)
        reads += reading * k_j
        written += tl.sum(tl.where(at, lasting, 0.0), 1)
        both = tl.sum(tl.where(later, reads, 0.0), 1) + written
        d_g += tl.where((row == j + 1)[None, :], both[:, None], 0.0)
    own = tl.load(solved + place * C * C + row * (C + 1))[None, :]  # what a token reads of itself, whatever decays
    d_q += own * ks
    d_written += own * qs
    d_g = tl.where(inside, d_g, 0.0)

    if BOUND == 0:
        d_x = d_g * -tl.exp(rate) * tl.sigmoid(x + bias)
        d_rate = tl.where(d_g == 0, 0.0, d_g * log_decay(x, bias, rate, BOUND))
    else:
        opening = tl.sigmoid(tl.exp(rate) * (x + bias))
        d_x = d_g * BOUND * opening * (1.0 - opening) * tl.exp(rate)
        d_rate = d_x * (x + bias)
    to = ((first + row[None, :]) * H + h) * K + key[:, None]
    tl.store(to_d_gate + to, d_x.to(to_d_gate.dtype.element_ty), inside)
    tl.store(to_d_bias + place * BK + key, tl.sum(d_x, 1))
    tl.store(to_d_rate + place, tl.sum(d_rate))
    d_k = d_read + d_written
    d_k = (d_k - ks * tl.sum(ks * d_k, 0)[None, :]) * k_unit[None, :]
    tl.store(to_d_k + to, d_k.to(to_d_k.dtype.element_ty), inside)
    d_q = (d_q - qs * (tl.sum(qs * d_q, 0) * K)[None, :]) * (q_unit * tl.rsqrt(K * 1.0))[None, :]
    tl.store(to_d_q + to, d_q.to(to_d_q.dtype.element_ty), inside)
