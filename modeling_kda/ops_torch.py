"""The fast pure-PyTorch path: chunks of tokens as matrix products, a tuned loop for a few tokens, on any device.

Inside a chunk the recurrence of `ops_reference` unrolls into products (the chunk form of DeltaNet, arXiv 2406.06484
section 3.2, with a decay for every channel inside). With `P_i` the decay from the chunk's start to token i, `R_j` the
decay from token j to the chunk's end, and `S` the state at its start:

    A_ij = k_i . (k_j * decay from j to i), j < i        Q_ij = q_i . (k_j * decay from j to i), j <= i
    u = (I + diag(beta) A)^-1 beta (v - (k * P) S^T)     what each token writes
    o = (q * P) S^T + Q u                                what each token reads
    S <- S * P_last + u^T (k * R)                        what the chunk hands on

The decay from j to i is cut where the two halves of the smallest block that holds both tokens meet: a product of
factors of at most 1 on either side. So no exponent is ever positive, nothing is a difference of large sums, and any
gate is safe, down to a decay of e^-1000 a token. The unit triangular matrix is inverted by blocked doubling, as stable
as substitution. The backward is written by hand, recomputes one segment of chunks at a time, and keeps only the state
at the start of each.

Legend: B batch, T tokens, H heads, K key width, V value width, C chunk, N documents, M chunks of a segment, X = M * H.
An axis "2" holds q and k, or what belongs to each.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops_operator import transformed
from .ops_reference import (
    OPERATORS,
    UNIT_EPS,
    KdaCall,
    count_documents,
    operands,
    wide,
    without_autocast,
    writable,
)


NAME = "torch"

CHUNK = 32  # Tokens. The fastest of 16, 32 and 64 on a CPU: shorter means more steps, longer means more products.
LOOP_BELOW = 32  # Tokens below which the loop beats a chunk, when no gradient is wanted.
# Numbers in one [X, C, K] tensor of a segment. CPU: 1 MiB in float32, so that a segment stays in cache. Elsewhere: few
# launches, and no more than some hundred MiB at a time.
SEGMENT, SEGMENT_ELSEWHERE = 2**18, 2**24
STREAMS = ("q", "k", "v", "gate", "beta")  # The fields of a call that have a row for every token.


def why_not() -> str | None:
    """Why this backend cannot run here, or None."""
    return None


def refuses(call: KdaCall) -> str | None:
    """Why this backend cannot run `call`, or None."""
    return transformed()


def run(call: KdaCall) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention on `call`; see `KdaCall` for shapes."""
    tensors = (call.q, call.k, call.v, call.gate, call.beta, call.A_log, call.dt_bias, call.state)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if call.cu_seqlens is None and call.q.shape[1] < LOOP_BELOW and not keep:
        return _loop(call)
    o, state, _, writes = _chunked(*tensors, call.lower_bound, call.cu_seqlens, keep, call.writes is not None)
    if call.writes is not None:
        call.writes.copy_(writes.detach())
    return o, state


def _loop(call: KdaCall) -> tuple[Tensor, Tensor]:
    """Token by token. A token's products with k and q share one read of the state; what it adds is one write."""
    q, k, g, beta = operands(call)
    state = call.state if call.overwrite_state else None
    if state is None or state.dtype != k.dtype or not state.is_contiguous() or not writable(state):
        state = call.initial_state(k.dtype)
    B, H = state.shape[:2]
    S = state.flatten(0, 1)  # [B * H, V, K], the memory of `state`
    q, k, v, g, beta = (_by_head(x) for x in (q, k, wide(call.v), g, beta.unsqueeze(-1)))  # [B * H, T, width]
    decay, overlap = g.exp(), (k * q).sum(-1, keepdim=True)
    kq = torch.stack((k, q), -1)  # [B * H, T, K, 2]
    o = torch.empty_like(v)
    for t in range(v.shape[1]):
        S.mul_(decay[:, t : t + 1])
        held, read = (S @ kq[:, t]).unbind(-1)  # [B * H, V] each
        u = (v[:, t] - held) * beta[:, t]
        S.baddbmm_(u.unsqueeze(2), k[:, t : t + 1])
        if call.writes is not None:
            call.writes[:, t] = u.unflatten(0, (B, H))
        torch.addcmul(read, u, overlap[:, t], out=o[:, t])
    return o.unflatten(0, (B, H)).transpose(1, 2).to(call.v.dtype), state


@dataclass(frozen=True)
class _Layout:
    """How the tokens of all documents lie in chunks: step by step, the longest document first.

    Step i holds chunk i of every document that has one, `active[i]` of them, so that a step is one batch of products
    and no document waits for another. `index` `[chunks, C]` is the token of each row, and `tokens` past a document's
    end.
    """

    order: Tensor  # [N] document numbers, longest first
    index: Tensor
    active: tuple[int, ...]
    tokens: int

    def segments(self, call: KdaCall) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """Cuts the steps into segments: the `index` of each, and the active documents of its steps."""
        H, K, V = call.k.shape[2], call.k.shape[3], call.v.shape[3]
        numbers = SEGMENT if self.index.device.type == "cpu" else SEGMENT_ELSEWHERE
        most = numbers // max(1, H * K * self.index.shape[1])  # chunks
        least = -(-V // self.index.shape[1])  # steps, so that the states kept are no more numbers than v
        step = chunk = 0
        while step < len(self.active):
            end, chunks = step, 0
            while end < len(self.active) and (end < step + least or chunks + self.active[end] <= most):
                chunks += self.active[end]
                end += 1
            yield self.index[chunk : chunk + chunks], self.active[step:end]
            step, chunk = end, chunk + chunks


def _layout_of(call: KdaCall) -> _Layout:
    B, T = call.q.shape[:2]
    bounds = call.cu_seqlens.tolist() if call.cu_seqlens is not None else [row * T for row in range(B + 1)]
    return _layout(tuple(bounds), call.q.device)


@lru_cache(maxsize=8)
def _layout(bounds: tuple[int, ...], device: torch.device) -> _Layout:
    starts, ends = torch.tensor(bounds[:-1], dtype=torch.long), torch.tensor(bounds[1:], dtype=torch.long)
    lengths, tokens = ends - starts, bounds[-1] if bounds else 0
    longest = int(lengths.max()) if lengths.numel() else 0
    chunk = min(CHUNK, 1 << max(longest - 1, 0).bit_length())
    order = torch.argsort(lengths, descending=True, stable=True)
    chunks = (lengths[order] + chunk - 1) // chunk
    active = tuple(int((chunks > step).sum()) for step in range(-(-longest // chunk)))
    first = [starts[order[:n]] + step * chunk for step, n in enumerate(active)]
    index = torch.cat([starts[:0], *first]).unsqueeze(1) + torch.arange(chunk)
    index[index >= torch.cat([ends[:0], *(ends[order[:n]] for n in active)]).unsqueeze(1)] = tokens
    return _Layout(order.to(device), index.to(device), active, tokens)


class _Segment:
    """Some chunks, ready for the pass over their steps.

    Args:
        call: the segment's raw tensors, `[M, C, H, ...]` each.
        outside: `[M, C]`, the rows past a document's end. They neither decay nor write.
    """

    def __init__(self, call: KdaCall, outside: Tensor):
        q, k, g, beta = operands(call)
        self.outside = outside.unsqueeze(-1)  # [M, C, 1]
        M, C, H, K = q.shape
        qk = q.new_empty(M, H, C, 2, K)
        qk[:, :, :, 0], qk[:, :, :, 1] = q.transpose(1, 2), k.transpose(1, 2)
        self.qk = qk.flatten(0, 1)  # [X, C, 2, K]
        self.v = _by_head(wide(call.v))  # [X, C, V]
        self.beta = _by_head(beta.masked_fill(self.outside, 0).unsqueeze(-1))  # [X, C, 1]
        self.decay = _by_head(g.masked_fill(self.outside.unsqueeze(-1), 0).exp())  # [X, C, K]
        self.scores, self.P, self.R = _scores(self.qk, self.decay)
        self.inverse = _unit_inverse(self.scores[:, :, 1] * self.beta)  # [X, C, C]
        self.start = (self.qk * self.P.unsqueeze(-2)).flatten(1, 2)  # [X, 2C, K]
        self.end = self.qk[:, :, 1] * self.R  # [X, C, K]

    def forward(self, state: Tensor, active: tuple[int, ...], keep: bool = False) -> tuple[Tensor, Tensor]:
        """Runs the steps from `state` `[N, H, V, K]`, which becomes the final state; returns o and u `[X, C, V]`.

        With `keep`, leaves behind for the backward what each step wrote, its error and the state before it.
        """
        o, writes, Q, last = torch.empty_like(self.v), torch.empty_like(self.v), self.scores[:, :, 0], 0
        self.kept: list[tuple[Tensor, Tensor, Tensor]] = []
        for n in active:
            S = state[:n].flatten(0, 1)
            at, last = slice(last, last + len(S)), last + len(S)
            read, held = (self.start[at] @ S.transpose(1, 2)).unflatten(1, (-1, 2)).unbind(2)  # [., C, V] each
            error = self.v[at] - held
            u = torch.bmm(self.inverse[at], error * self.beta[at], out=writes[at])
            torch.baddbmm(read, Q[at], u, out=o[at])
            if keep:
                self.kept.append((u, error, S.clone()))
            S.mul_(self.P[at, -1:]).baddbmm_(u.transpose(1, 2), self.end[at])
        return o, writes

    def backward(self, do: Tensor, d_state: Tensor, active: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Gradients of the operands `[M, C, H, ...]`, given those of o, `[X, C, V]`, and of the final state.

        `d_state` `[N, H, V, K]` becomes the gradient of the state at the segment's start.
        """
        u, error, before = (torch.cat(x) for x in zip(*self.kept))
        X, C, _, K = self.qk.shape
        Q, A = self.scores.unbind(2)
        k = self.qk[:, :, 1]
        pair = do.new_empty(X, C, 2, do.shape[-1])  # gradients of what is read and of what is held
        pair[:, :, 0] = do
        du, dz, d_end = Q.transpose(1, 2) @ do, torch.empty_like(do), torch.empty_like(k)
        d_decay, first = k.new_empty(X, 1, K), X
        for n in reversed(active):
            dS = d_state[:n].flatten(0, 1)
            at, first = slice(first - len(dS), first), first - len(dS)
            torch.bmm(u[at], dS, out=d_end[at])
            torch.sum(before[at] * dS, 1, keepdim=True, out=d_decay[at])
            du[at] += self.end[at] @ dS.transpose(1, 2)
            torch.bmm(self.inverse[at].transpose(1, 2), du[at], out=dz[at])
            torch.mul(dz[at], -self.beta[at], out=pair[at, :, 1])
            dS.mul_(self.P[at, -1:]).baddbmm_(pair[at].flatten(1, 2).transpose(1, 2), self.start[at])
        dL = (dz @ u.transpose(1, 2)).tril_(-1).neg_()
        d_scores = torch.stack(((do @ u.transpose(1, 2)).tril_(), dL * self.beta), 2)
        d_beta = (dz * error).sum(-1) + (dL * A).sum(-1)

        # Every sum below is over exactly those products that a token's decay is a factor of: where it is zero, so is
        # its gradient, and nothing is left over from terms that should cancel.
        ones = k.new_ones(C, C)
        d_start = (pair.flatten(1, 2) @ before).unflatten(1, (C, 2))
        d_qk = d_start * self.P.unsqueeze(-2)
        d_k = d_end * self.R
        dg = torch.triu(ones) @ (self.qk * d_qk).sum(2) + torch.tril(ones, -1) @ (k * d_k)
        dg += d_decay * self.P[:, -1:]
        _scores_backward(d_scores, self.qk, self.decay, d_qk, d_k, dg)
        diagonal = d_scores[:, :, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1)  # q_i . k_i: no decay in it
        dq = d_qk[:, :, 0] + diagonal * k
        dk = d_qk[:, :, 1] + d_k + diagonal * self.qk[:, :, 0]
        heads = X // self.outside.shape[0]
        dq, dk, dv, dg, d_beta = (_by_token(x, heads) for x in (dq, dk, -pair[:, :, 1], dg, d_beta))
        return dq, dk, dv, dg.masked_fill(self.outside.unsqueeze(-1), 0), d_beta.masked_fill(self.outside, 0)


def _halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """The first and the second halves of the blocks of 2 * h rows: `[X, C / 2h, h, ...]` each, as views."""
    first, second = x.unflatten(1, (-1, 2, h)).unbind(2)
    return first, second


def _blocks(x: Tensor, h: int) -> Tensor:
    """The lower left quarters of the diagonal blocks of 2 * h tokens of `[X, C, ..., C]`: `[X, C / 2h, h, ..., h]`."""
    x = x.unflatten(-1, (-1, 2 * h)).unflatten(1, (-1, 2 * h))  # [X, n, 2h, ..., n, 2h]
    return x.diagonal(dim1=1, dim2=-2).movedim(-1, 1)[:, :, h:, ..., :h]


def _scores(qk: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Products of every token's q and k with every earlier k, decayed.

    Args:
        qk: `[X, C, 2, K]`. decay: `[X, C, K]`, the factor of each token, in [0, 1].

    Returns: scores `[X, C, 2, C]` (q: up to and with the diagonal, k: below it), `P` and `R` `[X, C, K]`.
    """
    X, C = qk.shape[:2]
    k = qk[:, :, 1]
    scores = qk.new_zeros(X, C, 2, C)
    scores[:, :, 0].diagonal(dim1=1, dim2=2).copy_((qk[:, :, 0] * k).sum(-1))
    P, R, h = decay.clone(), torch.ones_like(decay), 1
    while h < C:
        left, right = _sides(qk, P, R, h)
        if h == 1:  # A product of a [2, K] and a [K, 1] matrix: a sum is faster than the call.
            block = (left * right).sum(-1, keepdim=True)
        else:
            block = left @ right.transpose(-1, -2)  # [X, n, 2h, h]
        _blocks(scores, h).copy_(block.unflatten(2, (h, 2)))
        _double(P, R, h)
        h *= 2
    return scores, P, R


def _sides(qk: Tensor, P: Tensor, R: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """q and k of later rows, decayed since the middle of their block, `[X, n, 2h, K]`; k of earlier rows, decayed up
    to it, `[X, n, h, K]`."""
    (first, second), P_second, R_first = _halves(qk, h), _halves(P, h)[1], _halves(R, h)[0]
    return (second * P_second.unsqueeze(-2)).flatten(2, 3), first[..., 1, :] * R_first


def _double(P: Tensor, R: Tensor, h: int) -> None:
    """From decays inside blocks of h tokens to those inside blocks of 2 * h, in place."""
    (P_first, P_second), (R_first, _) = _halves(P, h), _halves(R, h)
    R_first *= P_second[:, :, -1:]
    P_second *= P_first[:, :, -1:]


def _scores_backward(d_scores: Tensor, qk: Tensor, decay: Tensor, d_qk: Tensor, d_k: Tensor, dg: Tensor) -> None:
    """Adds the gradients through `_scores` but for its diagonal: of later q and k, of earlier k, of g."""
    P, R, h = decay.clone(), torch.ones_like(decay), 1
    while h < decay.shape[1]:
        left, right = _sides(qk, P, R, h)
        block = _blocks(d_scores, h).flatten(2, 3)  # [X, n, 2h, h]
        d_left, d_right = block @ right, block.transpose(-1, -2) @ left
        _halves(d_qk, h)[1].addcmul_(d_left.unflatten(2, (h, 2)), _halves(P, h)[1].unsqueeze(-2))
        _halves(d_k, h)[0].addcmul_(d_right, _halves(R, h)[0])
        dg_first, dg_second = _halves(dg, h)
        ones = dg.new_ones(h, h)
        dg_second += torch.triu(ones) @ (left * d_left).unflatten(2, (h, 2)).sum(3)
        if h > 1:  # a single earlier row has no decay after it in its half
            dg_first += torch.tril(ones, -1) @ (right * d_right)
        _double(P, R, h)
        h *= 2


def _unit_inverse(L: Tensor) -> Tensor:
    """`(I + L)^-1` for strictly lower triangular `L` `[X, C, C]`, by doubling the inverted diagonal blocks."""
    C, h = L.shape[-1], 1
    T = torch.eye(C, dtype=L.dtype, device=L.device).expand_as(L).contiguous()
    while h < C:
        diagonal = T.unflatten(-1, (-1, h)).unflatten(1, (-1, h)).diagonal(dim1=1, dim2=-2).movedim(-1, 1)
        first, second = diagonal.unflatten(1, (-1, 2)).contiguous().unbind(2)  # [X, n, h, h] each
        _blocks(T, h).copy_(second @ _blocks(L, h) @ first).neg_()
        h *= 2
    return T


def _by_head(x: Tensor) -> Tensor:
    """`[M, C, H, ...]` to `[X, C, ...]`."""
    return x.transpose(1, 2).flatten(0, 1)


def _by_token(x: Tensor, heads: int) -> Tensor:
    """`[X, C, ...]` to `[M, C, H, ...]`."""
    return x.unflatten(0, (-1, heads)).transpose(1, 2)


def _operands_backward(call: KdaCall, dq: Tensor, dk: Tensor, dg: Tensor, d_beta: Tensor) -> tuple[Tensor, ...]:
    """Through `operands`: gradients of q, k, gate, beta, and of A_log and dt_bias."""

    def through_unit(x: Tensor, d: Tensor, length: float) -> Tensor:
        x = wide(x)
        r = torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)
        y = x * r
        return (d - y * (y * d).sum(-1, keepdim=True)) * (r * length)

    rate = wide(call.A_log).exp().unsqueeze(-1)  # [H, 1]
    x = wide(call.gate) + wide(call.dt_bias).view(call.gate.shape[-2:])
    if call.lower_bound is None:  # g = -rate * softplus(x)
        d_gate = -rate * torch.sigmoid(x) * dg
        d_rate = -F.softplus(x) * dg
    else:  # g = lower_bound * sigmoid(rate * x)
        y = torch.sigmoid(rate * x)
        d_inner = call.lower_bound * y * (1 - y) * dg
        d_gate, d_rate = rate * d_inner, x * d_inner
    beta = wide(call.beta).sigmoid()
    dA_log = (d_rate.sum((0, 1, 3)) * rate.squeeze(-1)).to(call.A_log.dtype)
    return (
        through_unit(call.q, dq, call.q.shape[-1] ** -0.5),
        through_unit(call.k, dk, 1.0),
        d_gate,
        d_beta * beta * (1 - beta),
        dA_log,
        d_gate.sum((0, 1)).view_as(call.dt_bias).to(call.dt_bias.dtype),
    )


def _gathered(call: KdaCall, index: Tensor) -> KdaCall:
    """The rows `index` `[M, C]` of a call: `[M, C, H, ...]`. Rows past the last token repeat it."""
    return replace(call, **{name: _gather(getattr(call, name), index) for name in STREAMS})


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` `[M, C]` of `x` `[B, T, ...]`: `[M, C, ...]`. Rows past the last token repeat it."""
    rows = index.flatten().clamp(max=x.shape[0] * x.shape[1] - 1)
    return x.flatten(0, 1).index_select(0, rows).unflatten(0, index.shape)


class _Scatter:
    """Fills a tensor shaped like `like` `[B, T, ...]` by rows. Rows past the last token go to one that is cut off."""

    def __init__(self, like: Tensor):
        self.shape = like.shape
        self.rows = like.new_empty(like.shape[0] * like.shape[1] + 1, *like.shape[2:])

    def put(self, index: Tensor, x: Tensor) -> None:
        self.rows.index_copy_(0, index.flatten(), x.flatten(0, 1).to(self.rows.dtype))

    def whole(self) -> Tensor:
        return self.rows[:-1].view(self.shape)


# Operators of their own, so that `torch.compile(fullgraph=True)` does not unroll their loops.
@torch.library.custom_op(f"{OPERATORS}::chunked", mutates_args=())
def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor | None,
    lower_bound: float | None,
    cu_seqlens: Tensor | None,
    keep: bool,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o; the final state; with `keep` the state at the start of each segment `[segments, N, H, V, K]`; with `record`
    what each token wrote `[B, T, H, V]`."""
    call = KdaCall(q, k, v, gate, beta, A_log, dt_bias, lower_bound, state, cu_seqlens)
    layout = _layout_of(call)
    S = call.initial_state(wide(v).dtype)[layout.order]
    out, writes, borders = _Scatter(v), _Scatter(wide(v)) if record else None, []
    for index, active in layout.segments(call):
        if keep:
            borders.append(S.clone())
        segment = _Segment(_gathered(call, index), index == layout.tokens)
        o, u = (_by_token(x, v.shape[2]) for x in segment.forward(S, active))
        out.put(index, o)
        if record:
            writes.put(index, u)
    final = torch.empty_like(S)
    final[layout.order] = S
    borders = torch.stack(borders) if borders else S.new_empty(0, *S.shape)
    return out.whole(), final, borders, writes.whole() if record else S.new_empty(0)


@_chunked.register_fake
def _(q, k, v, gate, beta, A_log, dt_bias, state, lower_bound, cu_seqlens, keep, record):
    documents = count_documents(q, cu_seqlens)
    S = wide(v.new_empty(documents, v.shape[2], v.shape[3], k.shape[3]))
    segments = torch.library.get_ctx().new_dynamic_size() if keep else 0
    return torch.empty_like(v), S, S.new_empty(segments, *S.shape), S.new_empty(v.shape if record else 0)


@torch.library.custom_op(f"{OPERATORS}::chunked_backward", mutates_args=())
def _chunked_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    cu_seqlens: Tensor | None,
    borders: Tensor,
    do: Tensor,
    d_final: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, gate, beta, A_log, dt_bias and the initial state. `borders`: as `_chunked` gives them."""
    call = KdaCall(q, k, v, gate, beta, A_log, dt_bias, lower_bound, None, cu_seqlens)
    layout = _layout_of(call)
    dS = d_final[layout.order]
    grads = [_Scatter(x) for x in (q, k, v, gate, beta)]
    dA_log, d_dt_bias = torch.zeros_like(A_log), torch.zeros_like(dt_bias)
    for i, (index, active) in reversed(list(enumerate(layout.segments(call)))):
        part, outside = _gathered(call, index), index == layout.tokens
        segment = _Segment(part, outside)
        segment.forward(borders[i].clone(), active, keep=True)
        d_out = wide(_gather(do, index)).masked_fill_(outside[..., None, None], 0)
        dq, dk, dv, dg, d_beta = segment.backward(_by_head(d_out), dS, active)
        dq, dk, d_gate, d_beta, *shared = _operands_backward(part, dq, dk, dg, d_beta)
        for grad, x in zip(grads, (dq, dk, dv, d_gate, d_beta)):
            grad.put(index, x)
        dA_log += shared[0]
        d_dt_bias += shared[1]
    d_state = torch.empty_like(dS)
    d_state[layout.order] = dS
    return *(grad.whole() for grad in grads), dA_log, d_dt_bias, d_state


@_chunked_backward.register_fake
def _(q, k, v, gate, beta, A_log, dt_bias, lower_bound, cu_seqlens, borders, do, d_final):
    return *(torch.empty_like(x) for x in (q, k, v, gate, beta, A_log, dt_bias)), torch.empty_like(d_final)


def _save_for_backward(ctx, inputs, output):
    *tensors, state, ctx.lower_bound, cu_seqlens, _, _ = inputs
    ctx.save_for_backward(*tensors, cu_seqlens, output[2])
    ctx.state_dtype = None if state is None else state.dtype


def _backward(ctx, do, d_final, *_):
    *tensors, cu_seqlens, borders = ctx.saved_tensors
    with without_autocast(do):
        *grads, d_state = _chunked_backward(*tensors, ctx.lower_bound, cu_seqlens, borders, do, d_final)
    return *grads, None if ctx.state_dtype is None else d_state.to(ctx.state_dtype), None, None, None, None


_chunked.register_autograd(_backward, setup_context=_save_for_backward)


BACKEND = sys.modules[__name__]
