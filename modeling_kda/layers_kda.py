"""Kimi Delta Attention: a layer whose memory of the past is one matrix a head, whatever the length.

Legend: B batch, T tokens, P real tokens, H heads, K key width, V value width, D channels, W taps.
Shapes say `[B, T, ...]`; with pads or packed documents they are `[1, P, ...]`.
"""

import torch
from torch import Tensor, nn

from .cache_kda_hybrid import KdaHybridCache
from .cache_memory import Record
from .configuration_kda_hybrid import KdaHybridConfig
from .layers_context import ForwardContext
from .ops_kda import MixerCall, mixer
from .ops_linear import Before, add, linears


class ShortConvolution(nn.Conv1d):
    """The weight of a causal depthwise convolution, `[D, 1, W]` as released; a Conv1d for its initialisation."""

    def __init__(self, width: int, taps: int):
        super().__init__(width, width, taps, groups=width, bias=False, dtype=torch.float32)

    def forward(self) -> Tensor:
        """`[D, W]`."""
        return self.weight.squeeze(1)


class GatedRMSNorm(nn.Module):
    """The weight of `rmsnorm(x) * weight * sigmoid(gate)`; float32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float32))
        self.eps = eps

    def forward(self) -> Tensor:
        """`[V]`."""
        return self.weight


class KimiDeltaAttention(nn.Module):
    """One KDA layer (Kimi Linear, arXiv 2510.26692, section 3)."""

    def __init__(self, config: KdaHybridConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.keys = (config.linear_num_heads, config.linear_head_dim)
        self.values = (config.linear_num_heads, config.linear_value_head_dim)
        self.lower_bound = config.linear_gate_lower_bound
        hidden, heads = config.hidden_size, config.linear_num_heads
        keys, values = heads * config.linear_head_dim, heads * config.linear_value_head_dim
        self.q_proj = nn.Linear(hidden, keys, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, values, bias=False)
        self.q_conv1d = ShortConvolution(keys, config.linear_conv_kernel_dim)
        self.k_conv1d = ShortConvolution(keys, config.linear_conv_kernel_dim)
        self.v_conv1d = ShortConvolution(values, config.linear_conv_kernel_dim)
        self.f_a_proj = nn.Linear(hidden, config.linear_head_dim, bias=False)
        self.f_b_proj = nn.Linear(config.linear_head_dim, keys, bias=False)
        self.A_log = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.zeros(keys, dtype=torch.float32))
        self.b_proj = nn.Linear(hidden, heads, bias=False)
        if config.linear_output_gate_rank is None:
            self.g_proj = nn.Linear(hidden, values, bias=False)
        else:
            self.g_a_proj = nn.Linear(hidden, config.linear_output_gate_rank, bias=False)
            self.g_b_proj = nn.Linear(config.linear_output_gate_rank, values, bias=config.linear_output_gate_bias)
        self.full_rank_gate = config.linear_output_gate_rank is None
        self.o_norm = GatedRMSNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        context: ForwardContext,
        cache: KdaHybridCache | None,
        norm: Before | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`[B, T, hidden]` to the same; pads give zeros. The cache's memory of this layer moves on.

        Args:
            norm: of `hidden_states`, before anything else.
            residual: `[B, T, hidden]`, added at last.
        """
        if context.parts:
            pieces = hidden_states.split([part.shape[1] for part in context.parts], 1)
            y = torch.cat([self.forward(*piece, cache, norm) for piece in zip(pieces, context.parts)], 1)
            return y if residual is None else residual + y
        memory = None if cache is None else cache.layers[self.layer_idx]
        overwrite = memory is not None and memory.begin(hidden_states.device)
        x = context.pack(hidden_states)
        last = self.g_proj if self.full_rank_gate else self.g_a_proj
        first = [self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.b_proj, last]
        q, k, v, gate, beta, out_gate = linears([x] * 6, first, norm)
        if self.full_rank_gate:
            [gate] = linears([gate], [self.f_b_proj])
        else:
            gate, out_gate = linears([gate, out_gate], [self.f_b_proj, self.g_b_proj])
        call = MixerCall(
            q=q,
            k=k,
            v=v,
            taps=(self.q_conv1d(), self.k_conv1d(), self.v_conv1d()),
            window=None if memory is None else memory.window,
            gate=gate.unflatten(-1, self.keys),  # [B, T, H, K]
            beta=beta,  # [B, T, H]
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=self.lower_bound,
            state=None if memory is None else memory.state,
            out_gate=out_gate.unflatten(-1, self.values),  # [B, T, H, V]
            norm=self.o_norm(),
            eps=self.o_norm.eps,
            packing=context.packing,
            real=context.real if context.packing is None else None,
            overwrite=overwrite and not torch.is_grad_enabled(),
            records=context.records,
        )
        o, state, window, moved = mixer(call)
        if memory is not None:
            record = None
            if moved is not None:
                moved = (*moved, torch.cat([q, k, v], -1))
                record = Record(*(context.unpack(y.detach()) for y in moved), context.real)
            memory.update(state, window, record)
        o = o.flatten(-2)  # [B, T, H * V]
        if context.plain:
            return add(residual, o, self.o_proj)
        y = context.unpack(self.o_proj(o))
        return y if residual is None else residual + y
