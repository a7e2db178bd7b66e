"""Linear layers and what stands beside them, for one token in one kernel where there is one.

Each function says in its first lines what it is in plain torch. The kernel takes its place for one row on a GPU
without gradients, if the layers are just that: no adapter's, not quantised, without hooks. For many rows, with
gradients too, layers of one input are one product of the matrices side by side.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .ops_kda import allowed, leaves_out_kernels
from .ops_launch import NAME, ceil, device_of, early, unfit, why_not


MANY = 2048  # rows. Copying the matrices takes a fifth of the time of multiplying them, computed for an H200.


class Before:
    """A norm, on its way to the layers behind it. Not the module: accelerate moves whatever has a `to`.

    Args:
        module: the norm.
        known: the class of RMSNorm that the kernels stand in for; another one runs itself.
    """

    def __init__(self, module: nn.Module, known: type[nn.Module]):
        self.module, self.known = module, known

    def is_plain(self, x: Tensor) -> bool:
        """Whether a kernel may take its place."""
        return type(self.module) is self.known and is_plain(self.module, x)


def linears(xs: Sequence[Tensor], layers: Sequence[nn.Linear], norm: Before | None = None) -> list[Tensor]:
    """`layer(norm(x))` of each pair of an input `[..., C]` and a layer.

    Args:
        norm: an RMSNorm for all of them, which share one input; None: none.
    """
    if len(layers) > 6 or not _fuses(xs, layers, norm):
        if norm is not None:
            xs = [norm.module(xs[0])] * len(layers)
        if _joins(xs, layers):
            return list(_Joined.apply(xs[0], *(layer.weight for layer in layers)))
        return [layer(x) for x, layer in zip(xs, layers)]
    from .kernels_linear import linears

    weights = [layer.weight for layer in layers]
    widths, inputs = [w.shape[0] for w in weights], [w.shape[1] for w in weights]
    y = xs[0].new_empty(*xs[0].shape[:-1], sum(widths))
    BN, BC = (16, 128) if max(inputs) <= 256 else (16, 256)
    missing = 6 - len(layers)
    with device_of(y):
        linears[(sum(ceil(n, BN) for n in widths),)](
            *_filled(xs, missing),
            *_filled(weights, missing),
            *widths,
            *[0] * missing,
            *_filled(inputs, missing),
            None if norm is None else norm.module.weight,
            0.0 if norm is None else norm.module.eps,
            y,
            BN=BN,
            BC=BC,
            num_warps=4,
            **early(y),
        )
    return list(y.split(widths, -1))


class _Joined(torch.autograd.Function):
    """Products of x `[..., C]` with matrices `[N, C]` each, as pieces `[..., N]` of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return nn.functional.linear(x, torch.cat(weights)).split([w.shape[0] for w in weights], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        to_x, *to_weights = ctx.needs_input_grad
        grad = torch.cat(grads, -1)
        dx = grad @ torch.cat(weights) if to_x else None
        if not any(to_weights):
            return dx, *[None] * len(weights)
        dw = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        pieces = dw.split([w.shape[0] for w in weights])
        return dx, *(piece if wanted else None for piece, wanted in zip(pieces, to_weights))


def _joins(xs: Sequence[Tensor], layers: Sequence[nn.Linear]) -> bool:
    """Whether one product may take the place of these modules, and pays."""
    x = xs[0]
    if unfit(x):
        return False
    if len(layers) < 3 or x.numel() < MANY * x.shape[-1] or any(y is not x for y in xs):
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type) or leaves_out_kernels():
        return False
    if any(m._backward_hooks or m._backward_pre_hooks for m in layers):
        return False
    # Rows of 16 bytes, which is what the fast products read.
    plain = (type(m) is nn.Linear and m.bias is None and m.out_features % 8 == 0 and is_plain(m, x) for m in layers)
    return all(plain)


def add(residual: Tensor | None, x: Tensor, layer: nn.Linear) -> Tensor:
    """`residual + layer(x)`, or without a residual `layer(x)`."""
    if residual is None:
        return layer(x)
    if not _fuses([x, residual], [layer]):
        return residual + layer(x)
    from .kernels_linear import added

    N, C = layer.weight.shape
    y = torch.empty_like(residual)
    with device_of(y):
        added[(ceil(N, 8),)](x, layer.weight, N, C, residual, y, BN=8, BC=1024, num_warps=8, **early(y))
    return y


def gated(x: Tensor, gate: nn.Linear, up: nn.Linear, activation: nn.Module, norm: Before | None = None) -> Tensor:
    """`activation(gate(norm(x)), up(norm(x)))`.

    Args:
        activation: a `GatedActivation`; its `fused` are the kernel's betas, None where no kernel knows it.
    """
    if activation.fused is None or hooked(activation) or not _fuses([x], [gate, up], norm):
        x = x if norm is None else norm.module(x)
        return activation(gate(x), up(x))
    from .kernels_linear import gated

    N, C = gate.weight.shape
    y = x.new_empty(*x.shape[:-1], N)
    beta, linear_beta = activation.fused
    scale, eps = (None, 0.0) if norm is None else (norm.module.weight, norm.module.eps)
    with device_of(y):
        gated[(ceil(N, 4),)](
            x,
            gate.weight,
            up.weight,
            N,
            C,
            scale,
            eps,
            y,
            BETA=beta,
            LINEAR_BETA=linear_beta,
            BN=4,
            BC=512,
            num_warps=4,
            **early(y),
        )
    return y


def _fuses(xs: Sequence[Tensor], layers: Sequence[nn.Linear], norm: Before | None = None) -> bool:
    """Whether a kernel may take the place of these modules."""
    x = xs[0]
    if unfit(x):
        return False
    if x.numel() != x.shape[-1] or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not allowed(NAME) or why_not() is not None:
        return False
    plain = all(type(layer) is nn.Linear and layer.bias is None and is_plain(layer, x) for layer in layers)
    return plain and (norm is None or norm.is_plain(x)) and all(y.dtype == x.dtype and y.is_contiguous() for y in xs)


def is_plain(module: nn.Module, x: Tensor) -> bool:
    """Whether nothing is to happen but the module's own arithmetic on its own weight."""
    if hooked(module):
        return False
    weight = module.weight
    here = type(weight) is nn.Parameter and weight.dtype == x.dtype and weight.device == x.device
    return here and weight.is_contiguous()


def hooked(module: nn.Module) -> bool:
    """Whether something else happens when the module runs. accelerate puts a `forward` of its own there."""
    own = module._forward_hooks or module._forward_pre_hooks
    return bool("forward" in vars(module) or own or _has_any_global_hook())


def _filled(values: Sequence, missing: int) -> list:
    return [*values, *[values[0]] * missing]
