"""Attention residuals on a GPU: the mixture of candidates in one kernel, forward and backward.

Legend: n candidates, X tokens of all rows, D hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .ops_kda import leaves_out_kernels
from .ops_launch import DTYPES, ceil, device_of, early, power, unfit, why_not


MOST_CANDIDATES = 16  # which the kernels name one by one
MOST_WIDTH = 16384
ROWS = 8  # tokens of a program on the way back, which share a sum


def mixes(weight: Tensor, candidates: Sequence[Tensor]) -> bool:
    """Whether the kernels can take these; see `mix`."""
    x = candidates[0]
    if unfit(x):
        return False
    fits = len(candidates) <= MOST_CANDIDATES and 0 < x.shape[-1] <= MOST_WIDTH and x.numel() > 0
    same = weight.dtype == torch.float32 and all(y.dtype in DTYPES and y.shape == x.shape for y in candidates)
    return fits and same and not (leaves_out_kernels() or why_not())


def mix(weight: Tensor, eps: float, candidates: Sequence[Tensor], out: Tensor) -> None:
    """Fills `out` as `layers_attnres.mix` says.

    Args:
        weight: `[D]` float32, the product of norm and query.
        candidates: `[..., D]` each, of one shape.
        out: the same, in one piece.
    """
    from .kernels_attnres import mix

    D = weight.shape[0]
    with device_of(out):
        mix[(out.numel() // D,)](
            tuple(x.contiguous() for x in candidates),
            weight.contiguous(),
            eps,
            out,
            D,
            n=len(candidates),
            BD=power(D),
            num_warps=_warps(D),
            **early(out),
        )


def mix_backward(
    weight: Tensor, eps: float, candidates: Sequence[Tensor], grad: Tensor, grads: Sequence[Tensor]
) -> Tensor:
    """Fills `grads`, those of the candidates, each in one piece, and returns that of the weight.

    Args:
        grad: `[..., D]`, what arrives at the mixture.
    """
    from .kernels_attnres import mix_backward

    D = weight.shape[0]
    X = grad.numel() // D
    sums = weight.new_empty(ceil(X, ROWS), D)
    with device_of(grad):
        mix_backward[(len(sums),)](
            tuple(x.contiguous() for x in candidates),
            tuple(grads),
            weight.contiguous(),
            eps,
            grad.contiguous(),
            sums,
            X,
            D,
            n=len(candidates),
            ROWS=ROWS,
            BD=power(D),
            num_warps=_warps(D),
        )
    return sums.sum(0)


def _warps(D: int) -> int:
    return max(1, min(16, power(D) // 512))
