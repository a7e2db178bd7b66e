"""MoonshotAI's FlashKDA as a backend, by name only: chunks of tokens from Hopper on, bounded gates, no gradients.

It is not for every model: on the chip its states have 16 bits, and it inverts blocks of 16 tokens by a series in
float16 (its `csrc/smxx`), whose error grows where a text repeats itself and little is forgotten.
"""

import sys

import torch
from torch import Tensor

from .ops_launch import device_of
from .ops_operator import operator
from .ops_reference import KdaCall, empty_outputs


NAME = "flash_kda"

WIDTH = 128  # of keys and values: the only one
LOWEST = -5.0  # bound of the gate


@torch.compiler.assume_constant_result
def why_not() -> str | None:
    """Why this backend cannot run here, or None."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        import flash_kda  # noqa: F401
    except ImportError as error:
        return f"FlashKDA is not installed, or not whole: {error} (github.com/MoonshotAI/FlashKDA)"
    except Exception as error:  # whatever a broken installation raises, the model runs without it
        return f"flash_kda cannot be imported ({type(error).__name__}: {error})"
    return None


def refuses(call: KdaCall) -> str | None:
    """Why this backend cannot run `call`, or None."""
    tensors = [call.q, call.k, call.v, call.gate, call.beta]
    if call.q.device.type != "cuda":
        return f"tensors on {call.q.device.type!r}"
    if torch.cuda.get_device_capability(call.q.device)[0] < 9:
        return "a GPU from before Hopper"
    if dtypes := {str(x.dtype) for x in tensors} - {"torch.bfloat16"}:
        return f"dtype {', '.join(sorted(dtypes))}"
    if (call.q.shape[-1], call.v.shape[-1]) != (WIDTH, WIDTH):
        return f"heads that are not {WIDTH} wide"
    if call.lower_bound is None or call.lower_bound < LOWEST:
        return f"a gate without a bound, or with one below {LOWEST}"
    if not call.q.numel():
        return "no tokens"
    if call.writes is not None:
        return "it does not say what is written"
    tensors += [call.A_log, call.dt_bias, *([] if call.state is None else [call.state])]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "gradients"
    return None


def run(call: KdaCall) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention on `call`; see `KdaCall` for shapes."""
    tensors = (call.q, call.k, call.v, call.gate, call.beta, call.A_log, call.dt_bias)
    return _forward(*tensors, call.lower_bound, call.state, call.cu_seqlens)


@operator("flash_kda")
def _forward(
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
    import flash_kda

    o, final = empty_outputs(q, v, cu_seqlens)
    with device_of(q):
        flash_kda.fwd(
            *(x.contiguous() for x in (q, k, v, gate, beta)),
            WIDTH**-0.5,
            o,
            A_log.float().contiguous(),
            dt_bias.float().contiguous().view(-1, WIDTH),
            bound,
            initial_state=None if state is None else state.float().contiguous(),
            final_state=final,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
        )
    return o, final


@_forward.register_fake
def _(q, k, v, gate, beta, A_log, dt_bias, bound, state, cu_seqlens):
    return empty_outputs(q, v, cu_seqlens)


BACKEND = sys.modules[__name__]
