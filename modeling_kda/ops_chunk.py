"""Kimi Delta Attention of many tokens by our Triton kernels, all chunks of them at once, with gradients.

Between a step of training and its way back nothing is kept but the inputs: the way back computes the rest again.

Legend: B batch, T tokens, H heads, K key width, V value width, N documents.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .ops_launch import ceil, device_of, power, rows_of
from .ops_operator import operator
from .ops_reference import UNIT_EPS


CHUNK = 16  # tokens
ROOM = 2**30  # bytes for the states before and after each chunk, which gradients need; beyond, heads take turns

Prepared = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # what `kernels_chunk.recur` reads


@operator("chunk", mutates_args=("state", "o"))
def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    bound: float,
    state: Tensor,
    cu_seqlens: Tensor | None,
    o: Tensor,
) -> None:
    """As `KdaCall` has them, with bound 0 for None; `state` is moved on, `o` filled. Two launches."""
    from .kernels_chunk import recur

    if not (o.numel() and state.numel()):
        return
    prepared, _, widths = _prepare((q, k, v, gate, beta, A_log, dt_bias), bound, cu_seqlens, len(state))
    grid, parts = _parts(state)
    with device_of(q):
        recur[grid](*prepared, state, cu_seqlens, o, None, None, *q.shape[1:3], **widths, **parts)


@chunk.register_fake
def _(*args: Any) -> None:
    pass


@operator("chunk_with_gradients")
def chunk_with_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    bound: float,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`chunk` of a state that stays as it is, None: zeros. Returns `o` and the final state."""
    o, final = _outputs(q, v, cu_seqlens)
    final.zero_() if state is None else final.copy_(state)
    chunk.function(q, k, v, gate, beta, A_log, dt_bias, bound, final, cu_seqlens, o)
    return o, final


@chunk_with_gradients.register_fake
def _(q, k, v, gate, beta, A_log, dt_bias, bound, state, cu_seqlens):
    return _outputs(q, v, cu_seqlens)


def _outputs(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    documents = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = v.new_empty(documents, *v.shape[2:], q.shape[3], dtype=torch.float32)
    return torch.empty_like(v, memory_format=torch.contiguous_format), final


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@operator("chunk_backward")
def _chunk_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    bound: float,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    to_o: Tensor,
    to_final: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the seven tensors and of the state, from those that arrive at the outputs."""
    tensors = (q, k, v, gate, beta, A_log, dt_bias)
    if not (v.numel() and to_final.numel()):
        return (*(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tensors), to_final.clone())
    (B, T, H, K), V = q.shape, v.shape[3]
    bytes_ = 2 * _slots(B, T, cu_seqlens, len(to_final)) * _padded(K) * _padded(V) * v.element_size()
    heads = max(1, ROOM // bytes_)
    whole, of_heads = (*tensors, to_o, to_final, state), (2, 2, 2, 2, 2, 0, 0, 2, 1, 1)
    pieces = []
    for first in range(0, H, heads):
        count = min(heads, H - first)
        some = [
            None if x is None else x.narrow(dim, first * (x.shape[dim] // H), count * (x.shape[dim] // H))
            for x, dim in zip(whole, of_heads)
        ]
        pieces.append(_gradients(*some, bound, cu_seqlens))
    return (
        pieces[0] if len(pieces) == 1 else tuple(torch.cat(x, dim) for x, dim in zip(zip(*pieces), (*of_heads[:7], 1)))
    )


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    to_o: Tensor,
    to_final: Tensor,
    state: Tensor | None,
    bound: float,
    cu_seqlens: Tensor | None,
) -> Gradients:
    """`_chunk_backward` of some heads: four launches."""
    from .kernels_chunk import recur
    from .kernels_chunk_backward import prepare_backward, recur_backward

    (T, H, K), tensors = q.shape[1:], (q, k, v, gate, beta, A_log, dt_bias)
    to_state = to_final.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    before = torch.zeros_like(to_state)
    if state is not None:
        before.copy_(state)
    prepared, squares, widths = _prepare(tensors, bound, cu_seqlens, len(before), with_gradients=True)
    to_q, to_k, to_w, to_u, to_scores, to_decay = prepared
    states, to_after = (v.new_empty(*to_u.shape[:3], to_q.shape[3]) for _ in range(2))
    writes, to_writes = torch.empty_like(to_u), torch.empty_like(to_u)
    to_rate, to_bias = to_decay.new_empty(to_decay.shape[:2]), torch.empty_like(to_decay)
    to_tensors = [x.new_empty(x.shape) for x in tensors[:5]]
    to_o, (grid, parts) = to_o.contiguous(), _parts(before)
    with device_of(q):
        recur[grid](*prepared, before, cu_seqlens, None, states, writes, T, H, **widths, **parts)
        back = (to_q, to_k, to_w, to_scores, to_decay, to_o, to_state, cu_seqlens, to_after, to_writes)
        recur_backward[grid](*back, T, H, **widths, **parts)
        prepare_backward[(to_rate.numel(),)](
            *_rows(*tensors[:5]),
            A_log.contiguous(),
            dt_bias.contiguous(),
            cu_seqlens,
            *squares,
            states,
            writes,
            to_after,
            to_writes,
            to_o,
            *to_tensors,
            to_rate,
            to_bias,
            T,
            H,
            len(before),
            **widths,
            PART=parts["PART"],
            **_gates(v, bound),
            num_warps=8,
        )
    to_A_log, to_dt_bias = to_rate.sum(0).to(A_log.dtype), to_bias.sum(0)[:, :K].flatten().to(dt_bias.dtype)
    return (*to_tensors, to_A_log, to_dt_bias, to_state)


@_chunk_backward.register_fake
def _(q, k, v, gate, beta, A_log, dt_bias, bound, state, cu_seqlens, to_o, to_final):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, gate, beta, A_log, dt_bias, to_final))


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.bound, state, cu_seqlens = inputs
    ctx.save_for_backward(*tensors, state, cu_seqlens)


def _backward(ctx: Any, to_o: Tensor, to_final: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, state, cu_seqlens = ctx.saved_tensors
    *grads, to_state = _chunk_backward(*tensors, ctx.bound, state, cu_seqlens, to_o, to_final)
    return *grads, None, None if state is None else to_state.to(state.dtype), None


chunk_with_gradients.register_autograd(_backward, setup_context=_save_for_backward)


def _prepare(
    tensors: Sequence[Tensor],
    bound: float,
    cu_seqlens: Tensor | None,
    documents: int,
    with_gradients: bool = False,
) -> tuple[Prepared, tuple[Tensor | None, Tensor | None], dict[str, Any]]:
    """What `kernels_chunk.prepare` makes of the seven tensors, what of that only gradients need, and widths."""
    from .kernels_chunk import prepare

    q, k, v, gate, beta, A_log, dt_bias = tensors
    (B, T, H, K), V = q.shape, v.shape[3]
    slots, BK, BV = _slots(B, T, cu_seqlens, documents), _padded(K), _padded(V)
    widths = dict(K=K, V=V, C=CHUNK, BK=BK, BV=BV, PACKED=cu_seqlens is not None)
    to_q, to_k, to_w = (v.new_empty(slots, H, CHUNK, BK) for _ in range(3))
    to_u, to_scores = v.new_empty(slots, H, BV, CHUNK), v.new_empty(slots, H, CHUNK, CHUNK)
    prepared = (to_q, to_k, to_w, to_u, to_scores, v.new_empty(slots, H, BK, dtype=torch.float32))
    squares = (None, None)
    if with_gradients:
        squares = (torch.empty_like(to_scores, dtype=torch.float32), torch.empty_like(to_scores, dtype=torch.float32))
    with device_of(q):
        prepare[(slots * H,)](
            *_rows(q, k, v, gate, beta),
            A_log.contiguous(),
            dt_bias.contiguous(),
            cu_seqlens,
            *prepared,
            *squares,
            T,
            H,
            documents,
            **widths,
            BS=8,
            **_gates(v, bound),
            num_warps=1,
        )
    return prepared, squares, widths


def _slots(rows: int, tokens: int, cu_seqlens: Tensor | None, documents: int) -> int:
    """How many chunks there may be."""
    return rows * ceil(tokens, CHUNK) if cu_seqlens is None else tokens // CHUNK + documents


def _padded(width: int) -> int:
    """For tiles of tensor cores."""
    return max(16, power(width))


def _rows(*tensors: Tensor) -> list[Tensor | int]:
    """q, k, v, gate and beta as rows of a token each, and how far these are apart."""
    rows = [rows_of(x if x.ndim == 3 else x.flatten(2)) for x in tensors]
    return [y for x in rows for y in (x, x.stride(0))]


def _gates(v: Tensor, bound: float) -> dict[str, Any]:
    return dict(BOUND=bound, UNIT_EPS=UNIT_EPS, PRECISION="ieee" if v.dtype == torch.float32 else "tf32")


def _parts(state: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """How kernels that carry a state are launched: each program has a part of a head's values."""
    N, H, V, _ = state.shape
    part = min(32, _padded(V))
    return (ceil(V, part) * H * N,), dict(PART=part, STAGES=4, num_warps=part // 16)
