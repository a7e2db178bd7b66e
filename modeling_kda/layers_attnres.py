"""Attention residuals: a layer reads a learned mixture of the blocks of layers before it, not the sum of all.

Attention Residuals (arXiv 2603.15031), the variant with blocks, as in Kimi K3: the candidates are the embeddings, the
sums of what the finished blocks wrote, and the sum of what the present block has written so far.

Legend: n candidates, X tokens of all rows, D hidden size.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .ops_attnres import mix as mix_in_kernel
from .ops_attnres import mix_backward as mix_backward_in_kernel
from .ops_attnres import mixes
from .ops_reference import OPERATORS, wide


# Numbers of all candidates that are held in float32 at once.
SLICE_CPU, SLICE_GPU = 2**21, 2**26


class MixWeight(nn.Module):
    """A vector that a mixture reads, of the shape in which it is released."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> Tensor:
        """`[D]`, float32 or wider."""
        return wide(self.weight).view(-1)


def mix(candidates: tuple[Tensor, ...], norm: MixWeight, query: MixWeight, eps: float) -> Tensor:
    """`sum_i p_i x_i` with `p = softmax_i(<rmsnorm(x_i) * norm, query>)`, each token for itself, all in float32.

    Args:
        candidates: `[B, T, D]` each; the last is the present block's sum. One alone is returned unchanged, and its
            weights get gradients of zero.
        norm, query: `[D]`.
        eps: added to the mean of squares.
    """
    device = candidates[-1].device
    weight = (norm().to(device) * query().to(device)).to(wide(candidates[-1]).dtype)
    return _mix(weight, eps, [x.to(device) for x in candidates])


def _slices(candidates: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Views `[X, D]` of the candidates, stacked and widened a few tokens at a time: (the tokens, `[n, X, D]`)."""
    flat = [x.flatten(0, -2) for x in candidates]
    size = SLICE_CPU if flat[0].device.type == "cpu" else SLICE_GPU
    step = max(1, size // (len(flat) * flat[0].shape[-1]))
    for start in range(0, flat[0].shape[0], step):
        tokens = slice(start, start + step)
        yield tokens, wide(torch.stack([x[tokens] for x in flat]))


def _weights(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Reciprocal norms, products with the weight, and probabilities: `[n, X, 1]` each."""
    rate = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    product = (x * weight).sum(-1, keepdim=True)
    return rate, product, (rate * product).softmax(0)


# An operator of its own: it keeps the candidates only, which the layers hold anyway, and computes the rest again on
# the way back. (A torch.autograd.Function with such a backward loses gradients when torch 2.11 compiles it.)
@torch.library.custom_op(
    f"{OPERATORS}::mix", mutates_args=(), schema="(Tensor weight, float eps, Tensor[] candidates) -> Tensor"
)
def _mix(weight: Tensor, eps: float, candidates: Sequence[Tensor]) -> Tensor:
    out = torch.empty_like(candidates[-1], memory_format=torch.contiguous_format)
    if mixes(weight, candidates):
        mix_in_kernel(weight, eps, candidates, out)
        return out
    rows = out.view(-1, out.shape[-1])
    for tokens, x in _slices(candidates):
        rows[tokens] = (_weights(x, weight, eps)[2] * x).sum(0)
    return out


@_mix.register_fake
def _(weight: Tensor, eps: float, candidates: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(candidates[-1], memory_format=torch.contiguous_format)


@torch.library.custom_op(
    f"{OPERATORS}::mix_backward",
    mutates_args=(),
    schema="(Tensor weight, float eps, Tensor[] candidates, Tensor grad) -> Tensor[]",
)
def _mix_backward(weight: Tensor, eps: float, candidates: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Gradients of the weight and of every candidate."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in candidates]
    if mixes(weight, candidates):
        return [mix_backward_in_kernel(weight, eps, candidates, grad, grads), *grads]
    rows = grad.flatten(0, -2)
    to_weight = torch.zeros_like(weight)
    for tokens, x in _slices(candidates):
        d = wide(rows[tokens])
        rate, product, p = _weights(x, weight, eps)
        dp = (x * d).sum(-1, keepdim=True)
        ds = p * (dp - (p * dp).sum(0))  # of the scores
        to_weight += (ds * rate * x).sum((0, 1))
        dx = p * d + ds * rate * (weight - rate.square() * (product / x.shape[-1]) * x)
        for to, one in zip(grads, dx):
            to.view(-1, to.shape[-1])[tokens] = one
    return [to_weight, *grads]


@_mix_backward.register_fake
def _(weight: Tensor, eps: float, candidates: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (weight, *candidates)]


def _save_for_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    weight, ctx.eps, candidates = inputs
    ctx.save_for_backward(weight, *candidates)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, list[Tensor]]:
    weight, *candidates = ctx.saved_tensors
    to_weight, *grads = _mix_backward(weight, ctx.eps, candidates, grad)
    return to_weight, None, grads


_mix.register_autograd(_backward, setup_context=_save_for_backward)
