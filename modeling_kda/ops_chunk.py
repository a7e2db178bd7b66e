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
from .ops_reference import UNIT_EPS, empty_outputs


CHUNK = 16  # tokens
# Bytes for the states before and after each chunk, which gradients need beside some nine tensors of the size of `q`;
# beyond, stretches of chunks take turns.
ROOM = 2**32

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
    rows, rates = _rows(q, k, v, gate, beta), (A_log.contiguous(), dt_bias.contiguous())
    prepared, _, widths, _ = _prepare(rows, rates, q, v, bound, cu_seqlens, len(state))
    grid, parts = _parts(state, v)
    with device_of(q):
        recur[grid](
            *prepared,
            state,
            state,  # nothing comes in from slots before, and nothing goes on
            cu_seqlens,
            o,
            to_state=state,
            to_left=state,
            to_states=None,
            to_writes=None,
            begin=0,
            end=len(prepared[-1]),
            T=q.shape[1],
            H=q.shape[2],
            **widths,
            **parts,
        )


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
    o, final = empty_outputs(q, v, cu_seqlens)
    final.zero_() if state is None else final.copy_(state)
    chunk.function(q, k, v, gate, beta, A_log, dt_bias, bound, final, cu_seqlens, o)
    return o, final


@chunk_with_gradients.register_fake
def _(q, k, v, gate, beta, A_log, dt_bias, bound, state, cu_seqlens):
    return empty_outputs(q, v, cu_seqlens)


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
    d_o: Tensor,
    d_final: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the seven tensors and of the state, from those that arrive at the outputs.

    Four launches. More than ROOM takes three for each stretch of chunks, from the last to the first, and before that
    one for each but the last, to find the state that comes into the next.
    """
    from .kernels_chunk import recur
    from .kernels_chunk_backward import prepare_backward, recur_backward

    (T, H, K), V, wide = q.shape[1:], v.shape[3], v.dtype == torch.float32
    grads = tuple(x.new_empty(x.shape) for x in (q, k, v, gate, beta))
    d_state = d_final.clone(memory_format=torch.contiguous_format)
    if not (v.numel() and d_final.numel()):
        return *(x.zero_() for x in grads), torch.zeros_like(A_log), torch.zeros_like(dt_bias), d_state
    state, d_o = None if state is None else state.float().contiguous(), d_o.contiguous()
    rows, rates = _rows(q, k, v, gate, beta), (A_log.contiguous(), dt_bias.contiguous())
    prepared, squares, widths, gates = _prepare(
        rows, rates, q, v, bound, cu_seqlens, len(d_final), with_gradients=True
    )
    read, written, removed, _, scores, decay = prepared
    d_rate, d_bias = decay.new_empty(decay.shape[:2]), torch.empty_like(decay)
    grid, parts = _parts(d_final, v)
    part = parts["PART"] if wide or V % 64 else 64  # of values that `recur` has filled

    slots, BK, BV = len(decay), widths["BK"], widths["BV"]
    some = min(slots, max(1, ROOM // (2 * H * BV * BK * v.element_size())))
    turns = [(first, min(first + some, slots)) for first in range(0, slots, some)]
    states, d_after = (v.new_empty(some, H, BV, BK) for _ in range(2))
    writes, d_writes = (v.new_empty(some, H, BV, CHUNK) for _ in range(2))
    came = d_state.new_empty(len(turns) + 1, H, V, K)

    def move_on(i: int, **to: Tensor | None) -> None:
        given = dict(o=None, to_state=None, to_left=came[i + 1], begin=turns[i][0], end=turns[i][1], T=T, H=H)
        recur[grid](*prepared, state, came[i], cu_seqlens, **given, **to, **widths, **parts)

    with device_of(q):
        for i in range(len(turns) - 1):
            move_on(i, to_states=None, to_writes=None)
        for i, turn in reversed(list(enumerate(turns))):
            move_on(i, to_states=states, to_writes=writes)
            carried = (read, written, removed, scores, decay, d_o, d_state, cu_seqlens, d_after, d_writes, *turn)
            recur_backward[grid](*carried, T, H, **widths, **parts)
            first, last = turn
            prepare_backward[((last - first) * H,)](
                *rows,
                *rates,
                cu_seqlens,
                *squares,
                states,
                writes,
                d_after,
                d_writes,
                d_o,
                *grads,
                d_rate,
                d_bias,
                first,
                T,
                H,
                len(d_final),
                **widths,
                **gates,
                PART=part,
                num_warps=8 if wide else 4,
                num_stages=2,
            )
    d_bias = d_bias.sum(0)[:, :K].flatten()
    return *grads, d_rate.sum(0).to(A_log.dtype), d_bias.to(dt_bias.dtype), d_state


@_chunk_backward.register_fake
def _(q, k, v, gate, beta, A_log, dt_bias, bound, state, cu_seqlens, d_o, d_final):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, gate, beta, A_log, dt_bias, d_final))


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.bound, state, cu_seqlens = inputs
    # A cache may write into its state, and one made in inference mode cannot be saved.
    ctx.save_for_backward(*tensors, None if state is None else state.clone(), cu_seqlens)


def _backward(ctx: Any, d_o: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, state, cu_seqlens = ctx.saved_tensors
    *grads, d_state = _chunk_backward(*tensors, ctx.bound, state, cu_seqlens, d_o, d_final)
    return *grads, None, None if state is None else d_state.to(state.dtype), None


chunk_with_gradients.register_autograd(_backward, setup_context=_save_for_backward)


def _prepare(
    rows: Sequence[Tensor | int],
    rates: tuple[Tensor, Tensor],
    q: Tensor,
    v: Tensor,
    bound: float,
    cu_seqlens: Tensor | None,
    documents: int,
    with_gradients: bool = False,
) -> tuple[Prepared, tuple[Tensor | None, Tensor | None], dict[str, Any], dict[str, Any]]:
    """What `kernels_chunk.prepare` makes of `_rows`, `A_log` and `dt_bias`, and what of that only gradients need; then
    the widths that every kernel gets, and what those that see gates get."""
    from .kernels_chunk import prepare

    (B, T, H, K), V = q.shape, v.shape[3]
    slots, BK, BV = _slots(B, T, cu_seqlens, documents), _padded(K), _padded(V)
    widths = dict(K=K, V=V, C=CHUNK, BK=BK, BV=BV, PACKED=cu_seqlens is not None)
    gates = dict(BOUND=bound, UNIT_EPS=UNIT_EPS, PRECISION="ieee" if v.dtype == torch.float32 else "tf32")
    read, written, removed = (v.new_empty(slots, H, CHUNK, BK) for _ in range(3))
    values, scores = v.new_empty(slots, H, BV, CHUNK), v.new_empty(slots, H, CHUNK, CHUNK)
    prepared = (read, written, removed, values, scores, v.new_empty(slots, H, BK, dtype=torch.float32))
    squares = (None, None)
    if with_gradients:
        squares = (torch.empty_like(scores, dtype=torch.float32), torch.empty_like(scores, dtype=torch.float32))
    with device_of(q):
        prepare[(slots * H,)](
            *rows, *rates, cu_seqlens, *prepared, *squares, T, H, documents, **widths, **gates, BS=8, num_warps=1
        )
    return prepared, squares, widths, gates


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


def _parts(state: Tensor, v: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """How kernels that carry a state are launched: each program has a part of a head's values."""
    N, H, V, _ = state.shape
    part, each = min(32, _padded(V)), 8 if v.dtype == torch.float32 else 16  # values of a warp, for its registers
    return (ceil(V, part) * H * N,), dict(PART=part, STAGES=4, num_warps=part // each)
