"""Triton kernels of Kimi Delta Attention for many tokens. `ops_chunk` launches them.

`prepare` turns chunks of C tokens, all at once, into what `recur` then carries a state through, chunk after chunk.
With every token's decay from its chunk's begin, `D`, and to its end, `E`, both at most 1 (section 3 of Kimi Linear,
arXiv 2510.26692, where a chunk's writes are the solution of a triangular system):

    writes = T beta v - (T beta k D) S    S: the state before the chunk; T: (1 + tril(beta k k^T decays))^-1
    o      = (q D) S + tril(q k^T decays) writes
    S     <- S decay + writes^T (k E)

Chunks are numbered through all documents: document n, from token b on, begins with slot b // C + n, which leaves every
document the slots it needs. Without `cu_seqlens` each row has its own ceil(T / C).

Legend: T tokens a row, H heads, K key width, V value width, C tokens a chunk, N documents, BK, BV padded widths.
"""

try:  # in a `try`, so that a reader of exported model code does not need triton; who imports this file does
    import triton
    import triton.language as tl

    from .kernels_kda import log_decay
except ImportError:
    raise


@triton.jit
def document(cu_seqlens, n, T, C: tl.constexpr, PACKED: tl.constexpr):
    """The first token of document n, how many it has, and its first slot."""
    if PACKED:
        first = tl.load(cu_seqlens + n).to(tl.int64)
        return first, (tl.load(cu_seqlens + n + 1) - first).to(tl.int32), first // C + n
    else:
        return n.to(tl.int64) * T, T, n.to(tl.int64) * tl.cdiv(T, C)


@triton.jit
def within(slot, tokens, begin, end, C: tl.constexpr):
    """Of a document that begins with `slot`: its chunks before slot `begin`, and before slot `end`."""
    before, until = tl.maximum(begin - slot, 0), tl.minimum(tl.cdiv(tokens, C), end - slot)
    return before.to(tl.int32), until.to(tl.int32)


@triton.jit
def document_of(cu_seqlens, slot, T, N, C: tl.constexpr, PACKED: tl.constexpr):
    """The document that a slot belongs to."""
    if PACKED:
        low = slot * 0
        high = low + N - 1
        while low < high:
            middle = (low + high + 1) // 2
            begun = (tl.load(cu_seqlens + middle) // C + middle).to(tl.int32) <= slot
            low = tl.where(begun, middle, low)
            high = tl.where(begun, high, middle - 1)
        return low
    else:
        return slot // tl.cdiv(T, C)


@triton.jit
def of_tokens(x, h, first, row, stride, W):
    """Where W channels of head h of these tokens begin."""
    return x + (first + row) * stride + h * W


@triton.jit
def log2_decay(gate, bias, rate, there, BOUND: tl.constexpr):
    """`log_decay` to base 2, from -150 on: that power is 0 already, and more would cost the sums their digits."""
    g = tl.where(there, log_decay(gate, bias, rate, BOUND) * 1.4426950408889634, 0.0)
    return tl.where(g < -150.0, -150.0, g)


@triton.jit
def _unit(x, there, K: tl.constexpr, BK: tl.constexpr, UNIT_EPS: tl.constexpr):
    """What a token's vector is to be multiplied with to have length 1."""
    key = tl.arange(0, BK)
    x = tl.load(x[:, None] + key[None, :], there[:, None] & (key < K)[None, :], other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + UNIT_EPS)


@triton.jit(do_not_specialize=["T", "N"])  # which are others for every prompt
def prepare(
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
    to_q,
    to_k,
    to_w,
    to_u,
    to_scores,
    to_decay,
    to_ties,
    to_solved,
    T,
    H,
    N,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    BOUND: tl.constexpr,
    UNIT_EPS: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One chunk of one head, to `[slots, H, C, BK]`: `q D`, `k E`, `-T beta k D`; `[slots, H, BV, C]`: `T beta v`.

    And `[slots, H, C, C]`, the scores; `[slots, H, BK]`, the decay of the whole chunk. Behind its last token, zeros.
    For gradients, `[slots, H, C, C]` each: the triangular matrix without beta, and the inverse T.
    A product of decays between two tokens is the power of a sum of logarithms at most 0: nothing can overflow. Such
    products, BS channels at a time, have their channels first: one thread then adds up all channels of its pairs.
    """
    h, slot = tl.program_id(0) % H, tl.program_id(0) // H
    n = document_of(cu_seqlens, slot, T, N, C, PACKED)
    first, tokens, begin = document(cu_seqlens, n, T, C, PACKED)
    done = ((slot - begin) * C).to(tl.int32)
    if done >= tokens:
        return
    first += done
    row = tl.arange(0, C)
    there = row < tokens - done
    q, k = of_tokens(q, h, first, row, q_stride, K), of_tokens(k, h, first, row, k_stride, K)
    v, gate = of_tokens(v, h, first, row, v_stride, V), of_tokens(gate, h, first, row, gate_stride, K)
    beta = of_tokens(beta, h, first, row, beta_stride, 1)
    rate = tl.load(A_log + h).to(tl.float32)
    strength = tl.sigmoid(tl.load(beta, there, other=0.0).to(tl.float32))
    place = slot.to(tl.int64) * H + h
    of_chunk = place * C * BK + row * BK

    q_unit = _unit(q, there, K, BK, UNIT_EPS) * tl.rsqrt(K * 1.0)
    k_unit = _unit(k, there, K, BK, UNIT_EPS)

    scores, ties = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for start in range(0, BK, BS):
        key = start + tl.arange(0, BS)
        mask = (key < K)[:, None] & there[None, :]
        bias = tl.load(dt_bias + h * K + key, key < K, other=0.0).to(tl.float32)[:, None]
        g = tl.load(gate[None, :] + key[:, None], mask, other=0.0).to(tl.float32)
        g = log2_decay(g, bias, rate, mask, BOUND)
        qs = tl.load(q[None, :] + key[:, None], mask, other=0.0).to(tl.float32) * q_unit[None, :]
        ks = tl.load(k[None, :] + key[:, None], mask, other=0.0).to(tl.float32) * k_unit[None, :]
        if PRECISION == "ieee":
            # The difference of two sums has an error as large as the sums': exact here, in eighths, and small there.
            eighths = tl.floor(g * 8.0 + 0.5) * 0.125
            total, rest = tl.cumsum(eighths, 1), tl.cumsum(g - eighths, 1)
            end = tl.sum(tl.where((row == C - 1)[None, :], rest, 0.0), 1)
            between = (total[:, :, None] - total[:, None, :]) + (rest[:, :, None] - rest[:, None, :])
            whole = tl.min(total, 1)
            to_end = (whole[:, None] - total) + (end[:, None] - rest)
            whole += end
            total += rest
        else:
            total = tl.cumsum(g, 1)
            between = total[:, :, None] - total[:, None, :]
            whole = tl.min(total, 1)  # the last, to the bit
            to_end = whole[:, None] - total
        between = tl.exp2(tl.minimum(between, 0.0)) * ks[:, None, :]  # [BS, C, C]; to later tokens, anything finite
        scores += tl.sum(between * qs[:, :, None], 0)
        ties += tl.sum(between * ks[:, :, None], 0)
        since_begin, to = tl.exp2(total), of_chunk[None, :] + key[:, None]
        tl.store(to_q + to, (qs * since_begin).to(to_q.dtype.element_ty))
        tl.store(to_w + to, (ks * since_begin).to(to_w.dtype.element_ty))
        tl.store(to_k + to, (ks * tl.exp2(to_end)).to(to_k.dtype.element_ty))
        tl.store(to_decay + place * BK + key, tl.exp2(whole))
    square = place * C * C + row[:, None] * C + row[None, :]
    scores = tl.where(row[:, None] >= row[None, :], scores, 0.0)
    tl.store(to_scores + square, scores.to(to_scores.dtype.element_ty))

    ties = tl.where(row[:, None] > row[None, :], ties, 0.0)
    if to_ties is not None:
        tl.store(to_ties + square, ties)
    ties *= strength[:, None]
    solved = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    for j in range(C - 1):  # row j is done: take it from those below
        below = tl.sum(tl.where(row[None, :] == j, ties, 0.0), 1)
        solved -= below[:, None] * tl.sum(tl.where(row[:, None] == j, solved, 0.0), 0)[None, :]
    if to_solved is not None:
        tl.store(to_solved + square, solved)
    solved *= strength[None, :]

    value = tl.arange(0, BV)
    vs = tl.load(v[:, None] + value[None, :], there[:, None] & (value < V)[None, :], other=0.0).to(tl.float32)
    u = tl.dot(solved, vs, input_precision=PRECISION)
    tl.store(to_u + place * BV * C + value[None, :] * C + row[:, None], u.to(to_u.dtype.element_ty))
    tl.debug_barrier()  # until all of k D is written
    to = of_chunk[:, None] + tl.arange(0, BK)[None, :]
    w = tl.dot(solved, tl.load(to_w + to).to(tl.float32), input_precision=PRECISION)
    tl.debug_barrier()  # until all of it is read
    tl.store(to_w + to, (-w).to(to_w.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "begin", "end"])
def recur(
    q,
    k,
    w,
    u,
    scores,
    decay,
    state,
    came,
    cu_seqlens,
    o,
    to_state,
    to_left,
    to_states,
    to_writes,
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
    """One document of one head: PART of its values through its chunks from slot `begin` to slot `end`.

    `state` is what every document begins with, None: nothing; `came` `[H, V, K]` that of the one which begins before
    `begin`; the one which goes on behind `end` leaves its own in `to_left` too, and all of them in `to_state`.
    Tiles have values first, so that what one product gives is the next one's factor where it lies. For gradients, in
    place of `o`, the state before every chunk `[end - begin, H, BV, BK]` and what it writes `[end - begin, H, BV, C]`.
    """
    parts: tl.constexpr = (V + PART - 1) // PART
    part, h, n = tl.program_id(0) % parts, tl.program_id(0) // parts % H, tl.program_id(0) // parts // H
    first, tokens, slot = document(cu_seqlens, n, T, C, PACKED)
    before, until = within(slot, tokens, begin, end, C)
    if before >= until:
        return
    row, key, value = tl.arange(0, C), tl.arange(0, BK), part * PART + tl.arange(0, PART)
    of_head = (h * V + value[:, None]) * K + key[None, :]
    of_document = n.to(tl.int64) * H * V * K + of_head
    inside = (value < V)[:, None] & (key < K)[None, :]
    S = tl.zeros((PART, BK), tl.float32)
    if state is not None:
        S = tl.load(state + of_document, inside, other=0.0)
    if before > 0:
        S = tl.load(came + of_head, inside, other=0.0)
    place = (slot + before) * H + h
    tile = place * C * BK + row[:, None] * BK + key[None, :]
    q += tile
    k += tile
    w += tile
    u += place * BV * C + value[:, None] * C + row[None, :]
    scores += place * C * C + row[:, None] * C + row[None, :]
    decay += place * BK + key
    if o is not None:
        o += ((first + before * C + row[:, None]) * H + h) * V + value[None, :]
    if to_states is not None:
        kept = place - begin * H
        to_states += kept * BV * BK + value[:, None] * BK + key[None, :]
        to_writes += kept * BV * C + value[:, None] * C + row[None, :]
    for chunk in tl.range(before, until, num_stages=STAGES):
        old = S.to(q.dtype.element_ty)
        writes = tl.dot(old, tl.trans(tl.load(w)), tl.load(u).to(tl.float32), input_precision="ieee")  # [PART, C]
        writes = writes.to(q.dtype.element_ty)
        S = tl.dot(writes, tl.load(k), S * tl.load(decay)[None, :], input_precision="ieee")
        if o is not None:
            out = tl.dot(old, tl.trans(tl.load(q)), input_precision="ieee")
            out = tl.dot(writes, tl.trans(tl.load(scores)), out, input_precision="ieee")
            there = (chunk * C + row < tokens)[:, None] & (value < V)[None, :]
            tl.store(o, tl.trans(out).to(o.dtype.element_ty), there)
            o += C * H * V
        if to_states is not None:
            tl.store(to_states, old)
            tl.store(to_writes, writes)
            to_states += H * BV * BK
            to_writes += H * BV * C
        q += H * C * BK
        k += H * C * BK
        w += H * C * BK
        u += H * BV * C
        scores += H * C * C
        decay += H * BK
    if slot + tl.cdiv(tokens, C) > end:
        tl.store(to_left + of_head, S, inside)
    if to_state is not None:
        tl.store(to_state + of_document, S, inside)
