"""Absorbed multi-head latent attention of a few tokens on a GPU, and the row that each of them leaves to be read.

Runs under Triton's interpreter too (`TRITON_INTERPRET=1`), on the CPU and slowly, for the tests.

Legend: B batch, T new tokens, X = B T, S past and new tokens, H heads, L latent width, N per-head and P shared key
width, V value width. A row is `[latent L | shared key P]`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .ops_kda import allowed
from .ops_launch import NAME, ceil, device_of, early, power, rows_of, unfit, why_not
from .ops_operator import operator


MOST_TOKENS = 16
MOST_WIDTH = 256  # of keys and values a head
MOST_SHARED = 128
# The sums lie in registers; for exact float32 there are no tensor cores, and the factors lie there too.
MOST_LATENT = {torch.bfloat16: 512, torch.float16: 512, torch.float32: 64}
TILE = 32  # rows. Those under way and the queries fit twice into a processor's shared memory.
SPLITS = 512  # at most, which `combine` weighs at once


def refuses_absorbed(q: Tensor, rows: Tensor, matrix: Tensor, gate: Tensor | None = None) -> str | None:
    """Why `attend_absorbed` cannot run these, or None. Of `rows` any will do: how many there are does not matter."""
    (T, width), (L, R) = (q.shape[1], q.shape[3]), (matrix.shape[1], rows.shape[-1])
    value, device = matrix.shape[0] // q.shape[2] - (width - (R - L)), q.device
    if not allowed(NAME):
        return "another backend is asked for"
    if (reason := unfit(q) or why_not()) is not None:
        return reason
    tensors = [x for x in (q, rows, matrix, gate) if x is not None]
    if q.dtype not in MOST_LATENT or any(x.dtype != q.dtype for x in tensors):
        return f"dtype {', '.join(sorted({str(x.dtype) for x in tensors}))}"
    if any(x.device != device for x in tensors):
        return "several devices"
    if not matrix.is_contiguous():
        return "a matrix that does not lie in one piece"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "gradients"
    if not 0 < T <= MOST_TOKENS or not q.numel():
        return f"no tokens, or more than {MOST_TOKENS}"
    if (most := MOST_LATENT[q.dtype]) < L:
        return f"latents wider than {most} in {q.dtype}"
    if max(width - (R - L), value) > MOST_WIDTH or R - L > MOST_SHARED:
        return f"heads wider than {MOST_WIDTH}, or shared keys wider than {MOST_SHARED}"
    return None


def attend_absorbed(
    q: Tensor,
    rows: Tensor,
    matrix: Tensor,
    scaling: float,
    at: Tensor | None = None,
    pads: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """What `layers_mla.MultiHeadLatentAttention._absorbed` gives, flat in its heads, times the open gate.

    Args:
        q: `[B, T, H, N + P]`, before scaling.
        rows: `[B, S, L + P]`, those of the new tokens among them.
        matrix: `[H * (N + V), L]`, the weight of `kv_b_proj`.
        scaling: of the scores, before the softmax.
        at: `[T]` int64, where in `rows` the new tokens are, one after the other; each sees what is before it, and
            itself. None: they are the last.
        pads: `[B, S]` bool, False where no token may look; a token that may look nowhere reads zeros. None: no pads.
        gate: `[B, T, H * V]`, the gate's logits; None: there is none.

    Returns: `[B, T, H * V]`.
    """
    return _attend(q, rows, matrix, scaling, at, pads, gate)


def append_rows(new: Tensor, norm: Tensor, eps: float, rows: Tensor, at: Tensor) -> Tensor:
    """Writes the new tokens' rows, and returns `rows`.

    Args:
        new: `[B, T, L + P]`, latents before their norm and shared keys.
        norm: `[L]`, the norm's weight.
        rows: `[B, S, L + P]`, in one piece for each of the B.
        at: `[T]` int64, where to write.
    """
    _append(new, norm, eps, rows, at)
    return rows


class Plan(NamedTuple):
    """How `attend` is launched: BQ queries and BS rows of a tile, splits of the past."""

    BQ: int
    BS: int
    splits: int
    warps: int
    stages: int


def _plan(q: Tensor, S: int) -> Plan:
    """Two programs share a processor: one computes while the other's tiles are under way."""
    B, T, H = q.shape[:3]
    short = q.element_size() == 2
    BQ = min(32 if short else 16, _tile(T * H))  # 32 x 512 sums are 128 of each thread's 255 registers
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 2
    splits = max(1, min(2 * processors // (B * ceil(T * H, BQ)), ceil(S, TILE), SPLITS))
    return Plan(BQ, TILE, splits, warps=4, stages=3 if short else 1)


@operator("attend_absorbed")
def _attend(
    q: Tensor,
    rows: Tensor,
    matrix: Tensor,
    scaling: float,
    at: Tensor | None,
    pads: Tensor | None,
    gate: Tensor | None,
) -> Tensor:
    """See `kernels_mla`: three launches."""
    from .kernels_mla import absorb, attend, combine

    (B, T, H, width), (S, R), L = q.shape, rows.shape[1:], matrix.shape[1]
    P, X = R - L, B * T
    N, V = width - P, matrix.shape[0] // H - (width - P)
    BQ, BS, splits, warps, stages = _plan(q, S)
    blocks, BL, BP = ceil(T * H, BQ), _tile(L), _tile(P)
    rows, flat, pads = _in_line(rows), rows_of(q.flatten(2)), None if pads is None else pads.contiguous()
    absorbed = q.new_empty(X, H, R)
    parts = q.new_empty(B, blocks, splits, BQ, L)
    sums = q.new_empty(B, blocks, splits, BQ, dtype=torch.float32)
    o = _attend_empty(q, rows, matrix)
    gate = None if gate is None else rows_of(gate)
    with device_of(q):
        BC = min(64, BL)
        absorb[(H * ceil(L, BC), ceil(X, 16))](
            flat,
            flat.stride(0),
            matrix,
            scaling * math.log2(math.e),
            absorbed,
            X,
            H,
            N=N,
            P=P,
            V=V,
            L=L,
            BX=16,
            BN=_tile(N),
            BC=BC,
            BP=BP,
            num_warps=4 if q.element_size() == 2 else 8,
            **early(q),
        )
        attend[(blocks, splits, B)](
            absorbed,
            rows,
            rows.stride(0),
            S - T,
            at,
            pads,
            0 if pads is None else pads.stride(0),
            parts,
            sums,
            T,
            H,
            splits,
            L=L,
            P=P,
            BQ=BQ,
            BS=BS,
            BL=BL,
            BP=BP,
            num_warps=warps,
            num_stages=stages,
            **early(q),
        )
        BV = min(64, _tile(V))
        combine[(X * H, ceil(V, BV))](
            parts,
            sums,
            matrix,
            gate,
            0 if gate is None else gate.stride(0),
            o,
            S - T,
            at,
            T,
            H,
            splits,
            N=N,
            V=V,
            L=L,
            BQ=BQ,
            BS=BS,
            BL=BL,
            BV=BV,
            MOST=power(splits),
            MANY=16,
            num_warps=8,
            **early(q),
        )
    return o


@_attend.register_fake
def _(q, rows, matrix, scaling, at, pads, gate):
    return _attend_empty(q, rows, matrix)


def _attend_empty(q: Tensor, rows: Tensor, matrix: Tensor) -> Tensor:
    B, T, H, width = q.shape
    return q.new_empty(B, T, matrix.shape[0] - H * (width - (rows.shape[2] - matrix.shape[1])))


@operator("append_rows", mutates_args=("rows",))
def _append(new: Tensor, norm: Tensor, eps: float, rows: Tensor, at: Tensor) -> None:
    """See `kernels_mla.append`."""
    from .kernels_mla import append

    (B, T, R), L = new.shape, norm.shape[0]
    flat = rows_of(new)
    with device_of(new):
        append[(B * T,)](
            flat,
            flat.stride(0),
            norm.contiguous(),
            eps,
            rows,
            rows.stride(0),
            at,
            T,
            rows.shape[1],
            L=L,
            P=R - L,
            BL=_tile(L),
            BP=_tile(R - L),
            num_warps=4,
            **early(new),
        )


@_append.register_fake
def _(new, norm, eps, rows, at):
    return None


def _in_line(rows: Tensor) -> Tensor:
    """`rows`, one after the other."""
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()


def _tile(width: int) -> int:
    """The next width that a tile can have."""
    return max(16, power(width))
