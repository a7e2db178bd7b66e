"""A KDA layer between its projections, in plain torch: short convolutions, the operation, the gated norm.

Legend: B batch, T tokens, H heads, K key width, V value width, D = 2HK + HV, W taps of the convolution, N documents.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .ops_reference import KdaCall, gated_rms_norm, log_decay, short_convolution, unit, wide, without_autocast


class Packing:
    """Where documents lie among packed tokens `[1, T, ...]`, the same for all layers.

    Args:
        cu_seqlens: `[N + 1]`, from 0 to `tokens`.
        tokens: T.
        taps: W.
    """

    def __init__(self, cu_seqlens: Tensor, tokens: int, taps: int):
        self.cu_seqlens, self.tokens, self.taps = cu_seqlens, tokens, taps

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    def to(self, device: torch.device) -> "Packing":
        """The same on another device."""
        return Packing(self.cu_seqlens.to(device), self.tokens, self.taps)

    @cached_property
    def windowed(self) -> tuple[Tensor, Tensor, Tensor]:
        """For one convolution over [window of document 0, its tokens, window of document 1, ...]: which rows of [all
        windows, all tokens] these are; where the outputs of tokens lie `[T]`; the windows afterwards `[N, W - 1]`."""
        window, documents = self.taps - 1, len(self)
        device, lengths = self.cu_seqlens.device, self.cu_seqlens.diff()
        number, slot = torch.arange(documents, device=device), torch.arange(window, device=device)
        token = torch.arange(self.tokens, device=device)
        outputs = token + window * number.repeat_interleave(lengths)
        first = self.cu_seqlens[:-1] + window * number
        source = token.new_empty(documents * window + self.tokens)
        source[(first.unsqueeze(1) + slot).flatten()] = torch.arange(documents * window, device=device)
        source[outputs + window] = documents * window + token
        return source, outputs, (first + lengths).unsqueeze(1) + slot


@dataclass(frozen=True)
class MixerCall:
    """One call: raw tensors, each with one meaning, for every backend alike.

    Args:
        q, k, v: `[B, T, HK]`, `[B, T, HK]`, `[B, T, HV]`, inputs of the convolutions.
        taps: weights of the convolutions of q, k and v, `[HK, W]`, `[HK, W]`, `[HV, W]` float32.
        window: `[N, W - 1, D]`, the inputs before each document, of q, k and v side by side; None: zeros.
        gate, beta, A_log, dt_bias, lower_bound, state: as in `KdaCall`; a state in bfloat16 may come back in it.
        out_gate: `[B, T, H, V]`, before its sigmoid.
        norm: `[V]`, the weight of the norm. eps: added to its mean of squares.
        packing: documents, with B 1; None: each row is one.
        real: `[B, 1]`, False where there is no token but a pad, which changes nothing; only with T 1. None: no pads.
        overwrite: `state` and `window` may be written where they lie.
        records: what moves the state on is wanted, too.

    Returns, of whoever runs it: `o` `[B, T, H, V]` in the dtype of `v`; the state and the window afterwards; and if
    `records`, `k`, log decay and writes, as `cache_memory.Record` has them, else None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    taps: tuple[Tensor, Tensor, Tensor]
    window: Tensor | None
    gate: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None
    state: Tensor | None
    out_gate: Tensor
    norm: Tensor
    eps: float
    packing: Packing | None = None
    real: Tensor | None = None
    overwrite: bool = False
    records: bool = False

    @property
    def num_documents(self) -> int:
        return self.q.shape[0] if self.packing is None else len(self.packing)

    def initial_window(self) -> Tensor:
        """The window to start from."""
        width, taps = sum(x.shape[-1] for x in (self.q, self.k, self.v)), self.taps[0].shape[-1]
        if self.window is None:
            return self.q.new_zeros(self.num_documents, taps - 1, width)
        return self.window.to(self.q.dtype)


Moved = tuple[Tensor, Tensor, Tensor]  # k, log decay, writes


def convolve(call: MixerCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v after their convolutions, shaped as before, and the window afterwards."""
    inputs, window = torch.cat([call.q, call.k, call.v], -1), call.initial_window()
    if call.packing is None:
        x = torch.cat([window, inputs], 1)
        after = x[:, x.shape[1] - window.shape[1] :].clone()  # a view would keep all of x alive
        if call.real is not None:
            after = torch.where(call.real.unsqueeze(-1), after, window)
    else:
        source, outputs, last = call.packing.windowed
        x = torch.cat([window.flatten(0, 1), inputs.squeeze(0)]).index_select(0, source)
        after, x = x[last], x.unsqueeze(0)
    parts = x.split([taps.shape[0] for taps in call.taps], -1)
    q, k, v = (short_convolution(part, taps) for part, taps in zip(parts, call.taps))
    if call.packing is not None:
        q, k, v = (y.index_select(1, outputs) for y in (q, k, v))
    return q, k, v, after


def compose(
    call: MixerCall,
    kda: Callable[[KdaCall], tuple[Tensor, Tensor]],
    convolve: Callable[[MixerCall], tuple[Tensor, Tensor, Tensor, Tensor]] = convolve,
    normalise: Callable[[Tensor, Tensor, Tensor, float], Tensor] = gated_rms_norm,
) -> tuple[Tensor, Tensor, Tensor, Moved | None]:
    """The parts one after another."""
    q, k, v, window = convolve(call)
    gate, beta = call.gate, call.beta
    if call.real is not None:  # a pad neither decays nor writes
        gate = gate.masked_fill(~call.real[..., None, None], float("-inf"))
        beta = beta.masked_fill(~call.real[..., None], float("-inf"))
    q, k, v = q.view_as(gate), k.view_as(gate), v.view_as(call.out_gate)
    inner = KdaCall(
        q=q,
        k=k,
        v=v,
        gate=gate,
        beta=beta,
        A_log=call.A_log,
        dt_bias=call.dt_bias,
        lower_bound=call.lower_bound,
        state=None if call.state is None else wide(call.state),
        cu_seqlens=None if call.packing is None else call.packing.cu_seqlens,
        overwrite_state=call.overwrite,
        writes=torch.empty_like(v, dtype=wide(v).dtype) if call.records else None,
    )
    o, state = kda(inner)
    moved = None
    if call.records:
        with torch.no_grad(), without_autocast(k):
            moved = unit(k), log_decay(gate, call.A_log, call.dt_bias, call.lower_bound), inner.writes
    return normalise(o, call.norm, call.out_gate, call.eps), state, window, moved
