"""Kimi Delta Attention, readable first: the recurrence, its gates, the short convolution and the gated norm.

Every head keeps a state `S`, a small table from keys to values. For each token, in this order:

    S <- S * exp(g)                       forget: each key channel at its own rate
    S <- S + beta * (v - S k) k^T         overwrite: move what `S` holds under `k` towards `v`
    o  = S q                              read

(Kimi Linear, arXiv 2510.26692, equation 1; `S` is written `[V, K]` here, keys last.) Nothing else knows the order of
the tokens: there are no position embeddings. Plain PyTorch in any float dtype; in float64 this file is the truth that
every other path is tested against.

Legend: B batch, T tokens, H heads, K key width, V value width, D channels, W taps of the convolution, N documents.
A document is a stretch of tokens with a state of its own. Without `cu_seqlens` each batch row is one. With
`cu_seqlens = [0, t1, ..., T]` the batch has one row, and document n is the tokens from `cu_seqlens[n]` on.
"""

import re
import sys
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


# Where operators are registered. A copy of this code, from a checkpoint, must not take the place of another's.
OPERATORS = re.sub(r"\W", "_", __name__.rpartition(".")[0]) or "modeling_kda"
UNIT_EPS = 1e-6  # Added to the SUM of squares, not the mean (fla.modules.l2norm).


@dataclass(frozen=True)
class KdaCall:
    """One call of the operation: raw tensors, each with one meaning, for every backend alike.

    Args:
        q, k: `[B, T, H, K]`, before normalisation.
        v: `[B, T, H, V]`.
        gate: `[B, T, H, K]`, the forget gate before `dt_bias` and activation.
        beta: `[B, T, H]`, logits (before the sigmoid) of the write strength.
        A_log: `[H]` float32, log of the head's decay rate.
        dt_bias: `[H * K]` float32, head-major.
        lower_bound: None for the softplus gate; the bound (natural log, below 0) for the bounded gate.
        state: `[N, H, V, K]` float32 at the start of each document; None means zeros.
        cu_seqlens: `[N + 1]` integers, document boundaries; B must be 1. None: each row is a document. On a GPU nobody
            looks whether they go up from 0 to T.
        overwrite_state: The backend may write the final state into the memory of `state`.
        writes: `[B, T, H, V]` float32, to be filled with what each token writes under its key (without gradients).
            None: nobody wants it.

    A backend returns `o` `[B, T, H, V]` in the dtype of `v`, and the final state `[N, H, V, K]` float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None = None
    state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    overwrite_state: bool = False
    writes: Tensor | None = None

    @property
    def num_documents(self) -> int:
        return count_documents(self.q, self.cu_seqlens)

    def initial_state(self, dtype: torch.dtype) -> Tensor:
        """The state to start from, in `dtype`; never the memory of `state`."""
        if self.state is not None:
            return self.state.to(dtype, copy=True, memory_format=torch.contiguous_format)
        heads, value, key = self.v.shape[2], self.v.shape[3], self.k.shape[3]
        return self.v.new_zeros((self.num_documents, heads, value, key), dtype=dtype)


def count_documents(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """N: the rows of `x`, or what `cu_seqlens` has."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def empty_outputs(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Room for `o` and the final state, each in one piece."""
    final = v.new_empty(count_documents(q, cu_seqlens), *v.shape[2:], q.shape[3], dtype=torch.float32)
    return v.new_empty(v.shape), final


def wide(x: Tensor) -> Tensor:
    """`x` in float32, or as it is if it is float64: the dtype that gates, norms, decays and states are computed in."""
    return x if x.dtype == torch.float64 else x.float()


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which operations on `x` and its like keep their dtypes. (The meta device has no autocast.)"""
    return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)


def writable(x: Tensor) -> bool:
    """Whether `x` may be written in place here: what `torch.inference_mode` made may not be written outside of it.

    (A compiled function does not ask; its inputs are what they are.)"""
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not x.is_inference()


def unit(x: Tensor, length: float = 1.0) -> Tensor:
    """`length * x / sqrt(sum(x^2) + 1e-6)` over the last dimension, in float32 (or float64)."""
    x = wide(x)
    return x * (torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS) * length)


def log_decay(gate: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None) -> Tensor:
    """Log decay of every channel: natural log, at most 0, float32 (or float64).

    Args:
        gate: `[B, T, H, K]` pre-activation. A_log: `[H]`. dt_bias: `[H * K]`, channel (h, d) at `h * K + d`.
        lower_bound: None: `-exp(A_log) * softplus(gate + dt_bias)` (Kimi-Linear). Else the bounded gate
            `lower_bound * sigmoid(exp(A_log) * (gate + dt_bias))` (Kimi K3): another function, not a clamp.
    """
    x = wide(gate) + wide(dt_bias).view(gate.shape[-2:])
    rate = wide(A_log).exp().unsqueeze(-1)  # [H, 1]
    return -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)


def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution, then SiLU: `y[t] = silu(sum_i weight[:, i] * x[t + i])`.

    Args:
        x: `[B, W - 1 + T, D]`: the T tokens, after the W - 1 inputs before them (zeros at the start of a document).
        weight: `[D, W]`; the last tap multiplies the current token.

    Returns: `[B, T, D]` in the dtype of `x`; sums in float32.
    """
    length = x.shape[1] - weight.shape[1] + 1
    if length == 1:  # a decoded token: fewer calls
        return F.silu((wide(x) * wide(weight).t()).sum(1, keepdim=True)).to(x.dtype)
    taps = wide(weight).unbind(1)
    y = wide(x[:, :length]) * taps[0]
    for i, tap in enumerate(taps[1:], start=1):
        y.addcmul_(wide(x[:, i : i + length]), tap)
    return F.silu(y).to(x.dtype)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """`rmsnorm(x) * weight * sigmoid(gate)` over the last dimension, in float32, rounded once at the end.

    Args:
        x: `[..., V]`. weight: `[V]`. gate: `[..., V]`, before the sigmoid. eps: added to the mean of squares.
    """
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * wide(weight)
    return (y * torch.sigmoid(wide(gate))).to(x.dtype)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, writes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token.

    Args:
        q, k: `[B, T, H, K]`, as they enter the recurrence (`q` scaled). v: `[B, T, H, V]`.
        g: `[B, T, H, K]` natural-log decay. beta: `[B, T, H]` in [0, 1]. state: `[B, H, V, K]`.
        writes: `[B, T, H, V]`, to be filled with what each token writes under its key.

    Returns: `o` `[B, T, H, V]` and the final state.
    """
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-2)
        error = v[:, t] - (state @ k[:, t].unsqueeze(-1)).squeeze(-1)
        u = beta[:, t].unsqueeze(-1) * error
        state = state + u.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        outputs.append((state @ q[:, t].unsqueeze(-1)).squeeze(-1))
        if writes is not None:
            writes[:, t] = u.detach()
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v), state


def replay(k: Tensor, g: Tensor, writes: Tensor, state: Tensor | None) -> Tensor:
    """The state after tokens whose writes are known: one product, where the recurrence takes a step a token.

    Args:
        k: `[B, T, H, K]`, as it entered the recurrence. g: `[B, T, H, K]` natural-log decay. writes: `[B, T, H, V]`.
        state: `[B, H, V, K]` before them; None: zeros.
    """
    with without_autocast(k):
        until_end = F.pad(g.flip(1).cumsum(1).flip(1), (0, 0, 0, 0, 0, 1))  # [B, T + 1, H, K] decay from token i on
        written = torch.einsum("bthv,bthk->bhvk", writes, k * until_end[:, 1:].exp())
        return written if state is None else written.addcmul(state, until_end[:, 0].exp().unsqueeze(-2))


def operands(call: KdaCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What enters the recurrence beside v: q of length K^-0.5, k of length 1, the log decay, the write strength."""
    g = log_decay(call.gate, call.A_log, call.dt_bias, call.lower_bound)
    return unit(call.q, call.q.shape[-1] ** -0.5), unit(call.k), g, wide(call.beta).sigmoid()


NAME = "reference"


def why_not() -> str | None:
    """Why this backend cannot run here, or None."""
    return None


def refuses(call: KdaCall) -> str | None:
    """Why this backend cannot run `call`, or None."""
    return None


def run(call: KdaCall) -> tuple[Tensor, Tensor]:
    """The recurrence on each document of `call`. Slow: one step of Python a token."""
    if call.cu_seqlens is not None:
        bounds = call.cu_seqlens.tolist()
        state = call.initial_state(wide(call.v).dtype)
        parts = []
        for n, (start, end) in enumerate(pairwise(bounds)):
            cut = {name: getattr(call, name)[:, start:end] for name in ("q", "k", "v", "gate", "beta")}
            writes = None if call.writes is None else call.writes[:, start:end]
            parts.append(run(replace(call, **cut, state=state[n : n + 1], cu_seqlens=None, writes=writes)))
        if not parts:
            return torch.zeros_like(call.v), state
        return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts])
    q, k, g, beta = operands(call)
    o, state = delta_rule(q, k, wide(call.v), g, beta, call.initial_state(k.dtype), call.writes)
    return o.to(call.v.dtype), state


BACKEND = sys.modules[__name__]
