"""flash-linear-attention's kernels (`fla-core`) as a backend: chunks of tokens on a GPU, with gradients.

They get raw tensors, and normalise, gate and squash inside.
"""

import sys
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from .ops_operator import transformed
from .ops_reference import OPERATORS, KdaCall, empty_outputs


NAME = "fla"

# Before 0.6.0 a bounded gate let later tokens change earlier ones, by rounding; 0.5.0 took the logits of beta for its
# values. 0.7 is not out.
OLDEST, TOO_NEW = Version("0.6.0"), Version("0.7.0")
MOST_WIDTH = 256
FAST_BOUND = -5.0  # Down to this bound, a product of decays within a block of 16 tokens fits into float32.


@torch.compiler.assume_constant_result
def why_not() -> str | None:
    """Why this backend cannot run here, or None."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        import fla.ops.kda

        found = Version(getattr(fla, "__version__", "0"))
    except ImportError as error:
        return f"fla-core is not installed, or not whole: {error} (`pip install 'modeling_kda[fla]'`)"
    except Exception as error:  # whatever a broken installation raises, the model runs without it
        return f"fla cannot be imported ({type(error).__name__}: {error})"
    return None if OLDEST <= found < TOO_NEW else f"fla-core is {found}; at least {OLDEST}, below {TOO_NEW} is needed"


def refuses(call: KdaCall) -> str | None:
    """Why this backend cannot run `call`, or None."""
    if call.q.device.type != "cuda":
        return f"tensors on {call.q.device.type!r}"
    if where := transformed():
        return where
    if call.v.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {call.v.dtype}: its products round to TF32"
    if not call.q.numel() or not call.v.numel():
        return "no tokens"
    if max(call.q.shape[-1], call.v.shape[-1]) > MOST_WIDTH:
        return f"heads wider than {MOST_WIDTH}"
    if call.writes is not None:
        return "it does not say what is written"
    return None


def run(call: KdaCall) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention on `call`; see `KdaCall` for shapes."""
    q, k = call.q.to(call.v.dtype), call.k.to(call.v.dtype)
    tensors = (q, k, call.v, call.gate, call.beta, call.A_log.float(), call.dt_bias.float())
    state = None if call.state is None else call.state.float()
    cu_seqlens = None if call.cu_seqlens is None else call.cu_seqlens.long()
    # As an operator it can be compiled; by itself it keeps more for the way back, and need not compute that again.
    chunk = _operator if torch.compiler.is_compiling() else _chunk
    return chunk(*tensors, call.lower_bound, state, cu_seqlens)


def _chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    bound: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    from fla.ops.kda import chunk_kda

    return chunk_kda(
        q,
        k,
        v,
        gate,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=bound is not None and bound >= FAST_BOUND,
        lower_bound=bound,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
    )


@torch.library.custom_op(
    f"{OPERATORS}::fla_chunk",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, Tensor A_log, Tensor dt_bias, float? bound, "
    "Tensor? state, Tensor? cu_seqlens) -> (Tensor, Tensor)",
)
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    bound: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return _chunk(q, k, v, gate, beta, A_log, dt_bias, bound, state, cu_seqlens)


@_operator.register_fake
def _(q, k, v, gate, beta, A_log, dt_bias, bound, state, cu_seqlens):
    return empty_outputs(q, v, cu_seqlens)


@torch.library.custom_op(
    f"{OPERATORS}::fla_chunk_backward",
    mutates_args=(),
    schema="(Tensor[] tensors, float? bound, Tensor? state, Tensor? cu_seqlens, Tensor to_o, Tensor to_final) "
    "-> Tensor[]",
)
def _operator_backward(
    tensors: list[Tensor],
    bound: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    to_o: Tensor,
    to_final: Tensor,
) -> list[Tensor]:
    """Gradients of the seven tensors, and of the state if there is one; the forward is computed again.

    Inside of an operator torch records fla's function alone: a conversion there would cut its input off.
    """
    leaves = [x.detach().requires_grad_() for x in (*tensors, *([] if state is None else [state]))]
    with torch.enable_grad():
        outputs = _chunk(*leaves[:7], bound, *(leaves[7:] or [None]), cu_seqlens)
    return [x.contiguous() for x in torch.autograd.grad(outputs, leaves, (to_o, to_final))]


@_operator_backward.register_fake
def _(tensors, bound, state, cu_seqlens, to_o, to_final):
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*tensors, state) if x is not None]


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.bound, state, cu_seqlens = inputs
    ctx.save_for_backward(*tensors, state, cu_seqlens)


def _backward(ctx: Any, to_o: Tensor, to_final: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, state, cu_seqlens = ctx.saved_tensors
    grads = _operator_backward(tensors, ctx.bound, state, cu_seqlens, to_o, to_final)
    return *grads[:7], None, grads[7] if state is not None else None, None


_operator.register_autograd(_backward, setup_context=_save_for_backward)

BACKEND = sys.modules[__name__]
