"""Our own Triton kernels as a backend, on a GPU and without gradients: a few tokens with the whole of a layer between
its projections at once, and many tokens in chunks.

Runs under Triton's interpreter too (`TRITON_INTERPRET=1`, set before anything imports triton), on the CPU and slowly:
that is how it is tested where there is no GPU.

Legend: B batch, T tokens, H heads, K key width, V value width, W taps, N documents, D = 2HK + HV.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .ops_mixer import MixerCall, Moved
from .ops_operator import operator, transformed
from .ops_reference import UNIT_EPS, KdaCall, writable


NAME = "triton"

# Where kernels run. Triton asks for its interpreter once, too: when it is imported.
DEVICES = ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)
MOST_TOKENS = 16  # of a step, which keeps the state of one head in one program's registers. Beyond, chunks are faster.
MOST_WIDTH = 128
CHUNK = 16  # tokens
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.compiler.assume_constant_result
def why_not() -> str | None:
    """Why this backend cannot run here, or None."""
    if "cpu" not in DEVICES and not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        from .kernels_kda import step  # noqa: F401
    except ImportError:
        return "triton is not installed (`pip install triton`)"
    except Exception as error:  # whatever a broken installation raises, the model runs without it
        return f"triton cannot be imported ({type(error).__name__}: {error})"
    return None


def unfit(x: Tensor) -> str | None:
    """Why no kernel can run on `x`, whatever the kernel, or None."""
    if x.device.type not in DEVICES:  # what is asked most, first
        return f"tensors on {x.device.type!r}"
    if transformed():
        return "torch.func, or forward-mode differentiation"
    return _unfit_device(x.device) if x.is_cuda else None


@torch.compiler.assume_constant_result
def _unfit_device(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "a GPU that is not NVIDIA's"
    return "a GPU from before Ampere" if _capability(device) < (8, 0) else None


_capability = functools.cache(torch.cuda.get_device_capability)


def early(x: Tensor) -> dict[str, bool]:
    """Arguments of a launch on the device of `x`: in a CUDA graph, from Hopper on, it may begin early."""
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    begins = captured and _capability(x.device)[0] >= 9
    return {"EARLY": True, "launch_pdl": True} if begins else {"EARLY": False}


def refuses(call: KdaCall) -> str | None:
    """Why this backend cannot run `call`, or None."""
    T = call.q.shape[1]
    tensors = (call.q, call.k, call.v, call.gate, call.beta, call.A_log, call.dt_bias, call.state)
    if T > MOST_TOKENS and call.writes is not None:
        return f"of more than {MOST_TOKENS} tokens it does not say what is written"
    return _refuses(tensors, min(T, MOST_TOKENS), call.q.shape[-1], call.v.shape[-1])


def refuses_mixer(call: MixerCall) -> str | None:
    """Why this backend cannot run `call` in one kernel, or None."""
    tensors = (call.q, call.k, call.v, *call.taps, call.window, call.gate, call.beta, call.A_log, call.dt_bias)
    tensors += (call.state, call.out_gate, call.norm)
    return _refuses(tensors, call.q.shape[1], call.gate.shape[-1], call.out_gate.shape[-1])


def _refuses(tensors: Sequence[Tensor | None], tokens: int, key: int, value: int) -> str | None:
    if (reason := unfit(tensors[0])) is not None:
        return reason
    dtypes = sorted({str(x.dtype) for x in tensors[:3]})  # of q, k and v, which the kernel reads as one
    if tensors[0].dtype not in DTYPES or len(dtypes) > 1:
        return f"dtype {', '.join(dtypes)}"
    if tokens > MOST_TOKENS:
        return f"more than {MOST_TOKENS} tokens"
    if max(key, value) > MOST_WIDTH:
        return f"heads wider than {MOST_WIDTH}"
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return "gradients"
    return None


def run(call: KdaCall) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention on `call`; see `KdaCall` for shapes."""
    state = _own(call.state, call.overwrite_state, torch.float32)
    if state is None:
        state = call.initial_state(torch.float32)
    o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    if call.q.shape[1] > MOST_TOKENS:
        tensors = (call.q, call.k, call.v, call.gate, call.beta, call.A_log, call.dt_bias)
        _chunk(*tensors, call.lower_bound or 0.0, state, call.cu_seqlens, o)
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
        call.cu_seqlens,
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


@operator("chunk", mutates_args=("state", "o"))
def _chunk(
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
    """See `kernels_chunk`: two launches."""
    from .kernels_chunk import prepare, recur

    (B, T), (N, H, V, K) = q.shape[:2], state.shape
    if not (B and T and N and H and K and V):
        return
    slots = B * ceil(T, CHUNK) if cu_seqlens is None else T // CHUNK + N
    BK, BV, part = max(16, power(K)), max(16, power(V)), min(32, max(16, power(V)))
    widths = dict(K=K, V=V, C=CHUNK, BK=BK, BV=BV, PACKED=cu_seqlens is not None)
    to_q, to_k, to_w = (v.new_empty(slots, H, CHUNK, BK) for _ in range(3))
    to_u, to_scores = v.new_empty(slots, H, BV, CHUNK), v.new_empty(slots, H, CHUNK, CHUNK)
    to_decay = v.new_empty(slots, H, BK, dtype=torch.float32)
    prepared = (to_q, to_k, to_w, to_u, to_scores, to_decay)
    rows = [*(rows_of(x.flatten(2)) for x in (q, k, v, gate)), rows_of(beta)]
    with device_of(q):
        prepare[(slots * H,)](
            *(y for x in rows for y in (x, x.stride(0))),
            A_log.contiguous(),
            dt_bias.contiguous(),
            cu_seqlens,
            *prepared,
            T,
            H,
            N,
            **widths,
            BS=8,
            BOUND=bound,
            UNIT_EPS=UNIT_EPS,
            PRECISION="ieee" if v.dtype == torch.float32 else "tf32",
            num_warps=1,
        )
        recur[(ceil(V, part) * H * N,)](
            *prepared, state, cu_seqlens, o, T, H, **widths, PART=part, STAGES=4, num_warps=part // 16
        )


@_chunk.register_fake
def _(*args: Any) -> None:
    pass


def device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """A context in which kernels run on the device of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def rows_of(x: Tensor) -> Tensor:
    """`[..., width]` to `[rows, width]`, each row in one piece."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def power(x: int) -> int:
    """The next power of 2."""
    return 1 << (x - 1).bit_length()


def ceil(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


BACKEND = sys.modules[__name__]
