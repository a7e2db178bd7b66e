"""Linear layers and what stands beside them, for one token in one kernel where there is one.

Each function says in its first lines what it is in plain torch. The kernel takes its place for one row on a GPU
without gradients, if the layers are just that: no adapter's, not quantised, without hooks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .ops_kda import allowed
from .ops_triton import DEVICES, NAME, ceil, device_of, early, why_not


class Before:
    """A norm, on its way to the layers behind it. Not the module: accelerate moves whatever has a `to`."""

    def __init__(self, module: nn.Module):
        self.module = module


def linears(xs: Sequence[Tensor], layers: Sequence[nn.Linear], norm: Before | None = None) -> list[Tensor]:
    """`layer(norm(x))` of each pair of an input `[..., C]` and a layer.

    Args:
        norm: an RMSNorm for all of them, which share one input; None: none.
    """
    if len(layers) > 6 or not _fuses(xs, layers, norm):
        if norm is not None:
            xs = [norm.module(xs[0])] * len(layers)
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
    if activation.fused is None or not _fuses([x], [gate, up], norm):
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
    if x.device.type not in DEVICES:  # the first question, because it is asked most
        return False
    if x.numel() != x.shape[-1] or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not allowed(NAME) or why_not() is not None:
        return False
    plain = all(type(layer) is nn.Linear and layer.bias is None and is_plain(layer, x) for layer in layers)
    return (
        plain
        and (norm is None or is_plain(norm.module, x))
        and all(y.dtype == x.dtype and y.is_contiguous() for y in xs)
    )


def is_plain(module: nn.Module, x: Tensor) -> bool:
    """Whether nothing is to happen but the module's own arithmetic on its own weight."""
    weight = module.weight
    # accelerate puts a `forward` of its own there.
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return False
    here = type(weight) is nn.Parameter and weight.dtype == x.dtype and weight.device == x.device
    return here and weight.is_contiguous()


def _filled(values: Sequence, missing: int) -> list:
    return [*values, *[values[0]] * missing]
