"""RMSNorm and gated activations on a GPU, as Triton kernels with gradients: one kernel where plain torch has several.

Only the inputs are kept for the way back. Runs under Triton's interpreter too (`TRITON_INTERPRET=1`), on the CPU and
slowly, for the tests.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .ops_kda import leaves_out_kernels
from .ops_launch import DTYPES, ceil, device_of, power, rows_of, unfit, why_not
from .ops_operator import operator


MOST_WIDTH = 16384  # of a norm: whole rows lie in registers.

ELEMENTS = 2048  # of a tile at least, 16 a thread
COLUMNS = 1024  # of a tile of the activations
# Of the norm's gradients: tiles a program has at least, and warps of all of them, 32 for each of an H200's
# multiprocessors. Each program leaves a row of sums, which have to be summed again.
TILES, WARPS = 4, 4224


def normalises(x: Tensor, weight: Tensor) -> bool:
    """Whether `rms_norm` can run these."""
    return _plain(x, weight) and x.shape[-1:] == weight.shape and weight.shape[0] <= MOST_WIDTH


def activates(gate: Tensor, up: Tensor) -> bool:
    """Whether `activate` can run these."""
    return _plain(gate, up) and gate.shape == up.shape and gate.dtype == up.dtype


def _plain(x: Tensor, other: Tensor) -> bool:
    """Whether these are nothing but tensors, where kernels run, and those are wanted."""
    if unfit(x):
        return False
    if any(type(y) not in (Tensor, nn.Parameter) or y.dtype not in DTYPES for y in (x, other)):
        return False
    if x.device != other.device or not x.numel():
        return False
    return not (leaves_out_kernels() or why_not())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `layers_mlp.RMSNorm`: normalised in float32, rounded to the dtype of x, then weighted.

    Args:
        x: `[..., W]`. weight: `[W]`. eps: added to the mean of squares.

    Returns: `[..., W]` in the wider dtype of both.
    """
    return _rms_norm(x, weight, eps)


def activate(gate: Tensor, up: Tensor, beta: float = 0.0, linear_beta: float = 0.0) -> Tensor:
    """`silu(gate) * up`, or with a `beta` as `layers_mlp.situ`; `linear_beta` 0: there is none.

    Rounded once, at the end: torch rounds `silu(gate)` as well, and is further from what float64 gives.
    """
    return _activate(gate, up, beta, linear_beta)


@operator("rms_norm")
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels_rows.rms_norm`."""
    from .kernels_rows import rms_norm

    y, rows, sizes = _weighted(x, weight), rows_of(x), _sizes(x)
    with device_of(x):
        rms_norm[(ceil(len(rows), sizes["BR"]),)](
            rows, rows.stride(0), weight.contiguous(), y, eps, len(rows), **sizes
        )
    return y


@_rms_norm.register_fake
def _(x, weight, eps):
    return _weighted(x, weight)


def _weighted(x: Tensor, weight: Tensor) -> Tensor:
    """Room for the product of both."""
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


@operator("rms_norm_backward")
def _rms_norm_backward(x: Tensor, weight: Tensor, eps: float, to_y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight, from the one that arrives at the output."""
    from .kernels_rows import rms_norm_backward

    dx, sizes, rows, to = x.new_empty(x.shape), _sizes(x), rows_of(x), rows_of(to_y)
    programs = min(ceil(len(rows), sizes["BR"] * TILES), WARPS // sizes["num_warps"])
    sums = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    with device_of(x):
        rms_norm_backward[(programs,)](
            rows, rows.stride(0), weight.contiguous(), to, to.stride(0), dx, sums, eps, len(rows), **sizes
        )
    return dx, sums.sum(0).to(weight.dtype)


@_rms_norm_backward.register_fake
def _(x, weight, eps, to_y):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save_for_rms_norm_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _of_rms_norm(ctx: Any, to_y: Tensor) -> tuple[Tensor | None, ...]:
    return *_rms_norm_backward(*ctx.saved_tensors, ctx.eps, to_y), None


_rms_norm.register_autograd(_of_rms_norm, setup_context=_save_for_rms_norm_backward)


@operator("activate")
def _activate(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """See `kernels_rows.activate`."""
    from .kernels_rows import activate

    y = gate.new_empty(gate.shape)
    _launch(activate, (gate, up), (y,), beta, linear_beta)
    return y


@_activate.register_fake
def _(gate, up, beta, linear_beta):
    return gate.new_empty(gate.shape)


@operator("activate_backward")
def _activate_backward(
    gate: Tensor, up: Tensor, beta: float, linear_beta: float, to_y: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, from the one that arrives at the output."""
    from .kernels_rows import activate_backward

    outputs = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _launch(activate_backward, (gate, up, to_y), outputs, beta, linear_beta)
    return outputs


@_activate_backward.register_fake
def _(gate, up, beta, linear_beta, to_y):
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _launch(
    kernel: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], beta: float, linear_beta: float
) -> None:
    """Launches `kernel`, one of the two of the activations."""
    inputs = [rows_of(x) for x in inputs]
    rows, W = inputs[0].shape
    BW = min(COLUMNS, power(W))
    BR = ceil(ELEMENTS, BW)
    with device_of(outputs[0]):
        kernel[(ceil(rows, BR), ceil(W, BW))](
            *(y for x in inputs for y in (x, x.stride(0))),
            *outputs,
            rows,
            W=W,
            BETA=beta,
            LINEAR_BETA=linear_beta,
            BR=BR,
            BW=BW,
            num_warps=4,
        )


def _save_for_activate_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    gate, up, *ctx.betas = inputs
    ctx.save_for_backward(gate, up)


def _of_activate(ctx: Any, to_y: Tensor) -> tuple[Tensor | None, ...]:
    return *_activate_backward(*ctx.saved_tensors, *ctx.betas, to_y), None, None


_activate.register_autograd(_of_activate, setup_context=_save_for_activate_backward)


def _sizes(x: Tensor) -> dict[str, int]:
    """What the kernels of the norm are compiled for."""
    BW = power(x.shape[-1])
    return dict(W=x.shape[-1], BR=max(1, ELEMENTS // BW), BW=BW, num_warps=max(4, BW // 512))
