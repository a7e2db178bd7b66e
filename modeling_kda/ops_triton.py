"""Our own Triton kernels as a backend, on a GPU: a few tokens with the whole of a layer between its projections at
once, and many tokens in chunks, with gradients.

Legend: B batch, T tokens, H heads, K key width, V value width, W taps, N documents, D = 2HK + HV.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .ops_chunk import chunk, chunk_with_gradients
from .ops_launch import DTYPES, NAME, device_of, early, power, rows_of, unfit, why_not
from .ops_mixer import MixerCall, Moved
from .ops_operator import operator
from .ops_reference import UNIT_EPS, KdaCall, writable


MOST_TOKENS = 16  # of a step, which keeps the state of one head in one program's registers. Beyond, chunks are faster.
MOST_WIDTH = 128


def refuses(call: KdaCall) -> str | None:
    """Why this backend cannot run `call`, or None."""
    if call.writes is not None and (call.q.shape[1] > MOST_TOKENS or _learns(call)):
        return f"of more than {MOST_TOKENS} tokens, or with gradients, it does not say what is written"
    if call.v.dtype == torch.float16 and _learns(call):
        return "gradients in float16, which the state's may exceed"
    return _refuses((call.q, call.k, call.v), call.q.shape[-1], call.v.shape[-1])


def refuses_mixer(call: MixerCall) -> str | None:
    """Why this backend cannot run `call` in one kernel, or None."""
    if call.q.shape[1] > MOST_TOKENS:
        return f"more than {MOST_TOKENS} tokens"
    tensors = (call.q, call.k, call.v, *call.taps, call.window, call.gate, call.beta, call.A_log, call.dt_bias)
    if _wanted(*tensors, call.state, call.out_gate, call.norm):
        return "gradients"
    return _refuses(tensors[:3], call.gate.shape[-1], call.out_gate.shape[-1])


def _learns(call: KdaCall) -> bool:
    """Whether there will be gradients."""
    return _wanted(call.q, call.k, call.v, call.gate, call.beta, call.A_log, call.dt_bias, call.state)


def _wanted(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _refuses(streams: tuple[Tensor, Tensor, Tensor], key: int, value: int) -> str | None:
    if (reason := unfit(streams[0])) is not None:
        return reason
    dtypes = sorted({str(x.dtype) for x in streams})  # which the kernel reads as one
    if streams[0].dtype not in DTYPES or len(dtypes) > 1:
        return f"dtype {', '.join(dtypes)}"
    if max(key, value) > MOST_WIDTH:
        return f"heads wider than {MOST_WIDTH}"
    return None


def run(call: KdaCall) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention on `call`; see `KdaCall` for shapes."""
    tensors = (call.q, call.k, call.v, call.gate, call.beta, call.A_log, call.dt_bias)
    cu_seqlens = None if call.cu_seqlens is None else call.cu_seqlens.contiguous()
    if _learns(call):
        return chunk_with_gradients(*tensors, call.lower_bound or 0.0, call.state, cu_seqlens)
    state = _own(call.state, call.overwrite_state, torch.float32)
    if state is None:
        state = call.initial_state(torch.float32)
    o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    if call.q.shape[1] > MOST_TOKENS:
        chunk(*tensors, call.lower_bound or 0.0, state, cu_seqlens, o)
        return o, state
    writes = None if call.writes is None else torch.empty_like(o, dtype=torch.float32)
    _step(
        call.q.flatten(2),
        call.k.flatten(2),
        call.v.flatten(2),
        [],
        None,
        call.gate.flatten(2),
        call.beta,
        call.A_log,
        call.dt_bias,
        call.lower_bound or 0.0,
        state,
        None,
        None,
        0.0,
        None,
        cu_seqlens,
        o,
        None,
        None,
        writes,
    )
    if writes is not None:
        call.writes.copy_(writes)
    return o, state


def run_mixer(call: MixerCall) -> tuple[Tensor, Tensor, Tensor, Moved | None]:
    """`MixerCall` in one kernel."""
    (H, K), V = call.gate.shape[2:], call.out_gate.shape[-1]
    short = call.state is not None and call.state.dtype == torch.bfloat16  # and stays so
    state = _own(call.state, call.overwrite, torch.bfloat16 if short else torch.float32)
    if state is None:
        state = torch.zeros(call.num_documents, H, V, K, dtype=torch.float32, device=call.q.device)
    window = _own(call.window, call.overwrite, call.q.dtype)
    if window is None:
        window = call.initial_window()
    o, k, g, writes = call.v.new_empty(call.out_gate.shape), None, None, None
    if call.records:
        k, g = (torch.empty(call.gate.shape, dtype=torch.float32, device=o.device) for _ in range(2))
        writes = torch.empty_like(o, dtype=torch.float32)
    _step(
        call.q,
        call.k,
        call.v,
        list(call.taps),
        window,
        call.gate.flatten(2),
        call.beta,
        call.A_log,
        call.dt_bias,
        call.lower_bound or 0.0,
        state,
        call.out_gate.flatten(2),
        call.norm,
        call.eps,
        call.real,
        None if call.packing is None else call.packing.cu_seqlens,
        o,
        k,
        g,
        writes,
    )
    return o, state, window, (k, g, writes) if call.records else None


def _own(x: Tensor | None, overwrite: bool, dtype: torch.dtype) -> Tensor | None:
    """`x` itself if it may be written, else a copy."""
    if x is None or (overwrite and x.dtype == dtype and x.is_contiguous() and writable(x)):
        return x
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


# It writes into what it gets: an operator that changes its inputs must not return a list as well.
@operator(
    "step",
    mutates_args=("window", "state", "o", "to_k", "to_g", "writes"),
    schema="(Tensor q, Tensor k, Tensor v, Tensor[] taps, Tensor(a!)? window, Tensor gate, Tensor beta, Tensor A_log, "
    "Tensor dt_bias, float bound, Tensor(b!) state, Tensor? out_gate, Tensor? norm, float eps, Tensor? real, "
    "Tensor? cu_seqlens, Tensor(c!) o, Tensor(d!)? to_k, Tensor(e!)? to_g, Tensor(f!)? writes) -> ()",
)
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    taps: Sequence[Tensor],
    window: Tensor | None,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    bound: float,
    state: Tensor,
    out_gate: Tensor | None,
    norm: Tensor | None,
    eps: float,
    real: Tensor | None,
    cu_seqlens: Tensor | None,
    o: Tensor,
    to_k: Tensor | None,
    to_g: Tensor | None,
    writes: Tensor | None,
) -> None:
    """See `kernels_kda.step`. Without `taps` there is no convolution, without `norm` no normalisation."""
    from .kernels_kda import step

    (B, T), (N, H, V, K) = q.shape[:2], state.shape
    if not (B and T and N):
        return
    Q, BV = max(4, power(K)) // 4, power(V)
    q, k, v, gate, beta = (rows_of(x) for x in (q, k, v, gate, beta))
    if q.stride(0) != k.stride(0):
        q, k = q.contiguous(), k.contiguous()
    out_gate = None if out_gate is None else rows_of(out_gate)
    q_taps, k_taps, v_taps = (x.contiguous() for x in taps) if taps else (None, None, None)
    with device_of(q):
        step[(N * H,)](
            q,
            k,
            v,
            q.stride(0),
            v.stride(0),
            q_taps,
            k_taps,
            v_taps,
            window,
            gate,
            gate.stride(0),
            beta,
            beta.stride(0),
            A_log.contiguous(),
            dt_bias.contiguous(),
            state,
            out_gate,
            0 if out_gate is None else out_gate.stride(0),
            norm,
            eps,
            real,
            cu_seqlens,
            o,
            to_k,
            to_g,
            writes,
            T,
            H,
            K=K,
            V=V,
            W=taps[0].shape[1] if taps else 1,
            Q=Q,
            BV=BV,
            BOUND=bound,
            UNIT_EPS=UNIT_EPS,
            CONVOLVES=bool(taps),
            NORMALISES=norm is not None,
            MASKED=real is not None,
            PACKED=cu_seqlens is not None,
            RECORDS=writes is not None,
            num_warps=max(1, Q * BV // 1024),
            **early(q),
        )


@_step.register_fake
def _(*args: Any) -> None:
    pass


BACKEND = sys.modules[__name__]

__all__ = ["BACKEND", "NAME", "refuses", "refuses_mixer", "run", "run_mixer", "why_not"]
