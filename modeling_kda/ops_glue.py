"""What surrounds the operation in a KDA layer, on a GPU: short convolutions and gated norm as Triton kernels, with
gradients.

`convolve` and `normalise` take the places of `ops_mixer.convolve` and `ops_reference.gated_rms_norm`. They run under
Triton's interpreter too (`TRITON_INTERPRET=1`), on the CPU and slowly, for the tests.

Legend: B batch, T tokens, H heads, K key width, V value width, W taps, N documents, D = 2HK + HV.
"""

from typing import Any

import torch
from torch import Tensor

from .ops_launch import ceil, device_of, power, rows_of, unfit
from .ops_mixer import MixerCall
from .ops_operator import operator
from .ops_reference import count_documents


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_TAPS = 8  # Each keeps registers of every thread.
MOST_WIDTH = 256  # of a head's values: whole rows lie in registers.

TOKENS, CHANNELS = 64, 256  # of one program of the convolutions
AHEAD = 4  # tokens whose loads are under way
ELEMENTS, TILES = 2048, 8  # of one tile of the norm; tiles whose gradients of the weight one program sums


def refuses_glue(call: MixerCall) -> str | None:
    """Why `convolve` and `normalise` cannot run `call`, or None."""
    dtypes = {x.dtype for x in (call.q, call.k, call.v)}
    if (reason := unfit(call.q)) is not None:
        return reason
    if len(dtypes) > 1 or call.q.dtype not in DTYPES:
        return f"dtype {', '.join(sorted(map(str, dtypes)))}"
    if call.real is not None:
        return "rows without a token"
    if call.taps[0].shape[1] > MOST_TAPS:
        return f"more than {MOST_TAPS} taps"
    if call.out_gate.shape[-1] > MOST_WIDTH:
        return f"values wider than {MOST_WIDTH}"
    if not (call.q.numel() and call.v.numel()):
        return "no tokens"
    return None


def convolve(call: MixerCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `ops_mixer.convolve`: q, k, v after their convolutions, and the window afterwards."""
    window = None if call.window is None else call.window.to(call.q.dtype)
    cu_seqlens = None if call.packing is None else call.packing.cu_seqlens
    return _convolve(call.q, call.k, call.v, *call.taps, window, cu_seqlens)


def normalise(o: Tensor, norm: Tensor, out_gate: Tensor, eps: float) -> Tensor:
    """As `ops_reference.gated_rms_norm`, of `o` `[B, T, H, V]`."""
    return _normalise(o, norm, out_gate, eps)


@operator("convolve")
def _convolve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_taps: Tensor,
    k_taps: Tensor,
    v_taps: Tensor,
    window: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels_glue.convolve`."""
    from .kernels_glue import convolve

    outputs = _convolve_empty(q, k, v, q_taps, cu_seqlens)
    _walk(convolve, (q, k, v), (q_taps, k_taps, v_taps), window, cu_seqlens, *outputs)
    return outputs


@_convolve.register_fake
def _(q, k, v, q_taps, k_taps, v_taps, window, cu_seqlens):
    return _convolve_empty(q, k, v, q_taps, cu_seqlens)


def _convolve_empty(
    q: Tensor, k: Tensor, v: Tensor, taps: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    after = q.new_empty(count_documents(q, cu_seqlens), taps.shape[1] - 1, 2 * q.shape[2] + v.shape[2])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), after


@operator("convolve_backward")
def _convolve_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_taps: Tensor,
    k_taps: Tensor,
    v_taps: Tensor,
    window: Tensor | None,
    cu_seqlens: Tensor | None,
    to_q: Tensor,
    to_k: Tensor,
    to_v: Tensor,
    to_after: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, their taps, and the window (empty without one), from those that arrive at the outputs."""
    from .kernels_glue import convolve_backward

    inputs, taps = (q, k, v), (q_taps, k_taps, v_taps)
    *dx, dq_taps, dk_taps, dv_taps, d_window = outputs = _convolve_backward_empty(*inputs, *taps, window)
    widths = [x.shape[2] for x in inputs]
    sums = q.new_empty(ceil(q.shape[0] * q.shape[1], TOKENS), q_taps.shape[1], sum(widths), dtype=torch.float32)
    to = [None if x is None else x.contiguous() for x in (to_q, to_k, to_v, to_after)]
    _walk(convolve_backward, inputs, taps, window, cu_seqlens, *to, *dx, sums, d_window)
    for grad, total in zip((dq_taps, dk_taps, dv_taps), sums.sum(0).split(widths, 1)):
        grad.copy_(total.t())
    return outputs


@_convolve_backward.register_fake
def _(q, k, v, q_taps, k_taps, v_taps, window, cu_seqlens, to_q, to_k, to_v, to_after):
    return _convolve_backward_empty(q, k, v, q_taps, k_taps, v_taps, window)


def _convolve_backward_empty(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Room for the gradients of all, each in one piece."""
    return tuple(tensors[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)


def _walk(
    kernel: Any,
    inputs: tuple[Tensor, Tensor, Tensor],
    taps: tuple[Tensor, Tensor, Tensor],
    window: Tensor | None,
    cu_seqlens: Tensor | None,
    *others: Tensor | None,
) -> None:
    """Launches `kernel`, one of the two of the convolutions; `others` are what only one of them gets."""
    (B, T, HK), HV, W = inputs[0].shape, inputs[2].shape[2], taps[0].shape[1]
    rows = [rows_of(x) for x in inputs]
    BD = min(CHANNELS, power(max(HK, HV)))
    programs = ceil(B * T, TOKENS) * (2 * ceil(HK, BD) + ceil(HV, BD))
    with device_of(inputs[0]):
        kernel[(programs,)](
            *rows,
            *(x.stride(0) for x in rows),
            *(x.float().contiguous() for x in taps),
            None if window is None else window.contiguous(),
            cu_seqlens,
            *others,
            count_documents(inputs[0], cu_seqlens),
            T,
            B * T,
            HK,
            HV,
            W=W,
            BT=TOKENS,
            BD=BD,
            AHEAD=AHEAD,
            PACKED=cu_seqlens is not None,
            num_warps=max(1, BD // (128 if W <= 4 else 64)),  # a thread's channels, times W, lie in its registers
        )


def _save_for_convolve_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _of_convolve(ctx: Any, *to: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    to_outputs = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(saved[:3], to)]
    *grads, d_window = _convolve_backward(*saved, *to_outputs, to[3])
    return *grads, None if saved[6] is None else d_window, None


_convolve.register_autograd(_of_convolve, setup_context=_save_for_convolve_backward)


@operator("normalise")
def _normalise(o: Tensor, norm: Tensor, gate: Tensor, eps: float) -> Tensor:
    """See `kernels_glue.normalise`."""
    from .kernels_glue import normalise

    y, gate, sizes = o.new_empty(o.shape), rows_of(gate.flatten(2)), _sizes(o)
    rows = o[..., 0].numel()
    with device_of(o):
        normalise[(ceil(rows, sizes["BR"]),)](
            o.contiguous(), norm.contiguous(), gate, gate.stride(0), y, eps, rows, **sizes
        )
    return y


@_normalise.register_fake
def _(o, norm, gate, eps):
    return o.new_empty(o.shape)


@operator("normalise_backward")
def _normalise_backward(
    o: Tensor, norm: Tensor, gate: Tensor, eps: float, to_y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of o, of the norm's weight and of the gate, from the one that arrives at the output."""
    from .kernels_glue import normalise_backward

    do, d_norm, d_gate = outputs = _normalise_backward_empty(o, norm, gate)
    gate, sizes = rows_of(gate.flatten(2)), _sizes(o)
    rows = o[..., 0].numel()
    sums = o.new_empty(ceil(rows, sizes["BR"] * TILES), o.shape[-1], dtype=torch.float32)
    with device_of(o):
        normalise_backward[(len(sums),)](
            o.contiguous(),
            norm.contiguous(),
            gate,
            gate.stride(0),
            to_y.contiguous(),
            do,
            sums,
            d_gate,
            eps,
            rows,
            TILES=TILES,
            **sizes,
        )
    d_norm.copy_(sums.sum(0))
    return outputs


@_normalise_backward.register_fake
def _(o, norm, gate, eps, to_y):
    return _normalise_backward_empty(o, norm, gate)


def _normalise_backward_empty(o: Tensor, norm: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return o.new_empty(o.shape), norm.new_empty(norm.shape), gate.new_empty(gate.shape)


def _save_for_normalise_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _of_normalise(ctx: Any, to_y: Tensor) -> tuple[Tensor | None, ...]:
    return *_normalise_backward(*ctx.saved_tensors, ctx.eps, to_y), None


_normalise.register_autograd(_of_normalise, setup_context=_save_for_normalise_backward)


def _sizes(o: Tensor) -> dict[str, int]:
    """What the kernels of the norm are compiled for."""
    H, V = o.shape[2:]
    return dict(H=H, V=V, BR=max(1, ELEMENTS // power(V)), BV=power(V))
