"""Kimi Delta Attention: a layer whose memory of the past is one matrix a head, whatever the length.

Legend: B batch, T tokens, P real tokens, H heads, K key width, V value width, D = 2HK + HV, W taps, N texts.
Shapes say `[B, T, ...]`; with pads or packed documents they are `[1, P, ...]`.
"""

import torch
from torch import Tensor, nn

from .cache_kda_hybrid import KdaHybridCache
from .cache_memory import Record
from .configuration_kda_hybrid import KdaHybridConfig
from .layers_context import ForwardContext
from .ops_kda import KdaCall, kda
from .ops_reference import gated_rms_norm, log_decay, short_convolution, unit, wide, without_autocast


class ShortConvolution(nn.Conv1d):
    """Causal depthwise convolution and SiLU over inputs that already have W - 1 earlier ones before them.

    A Conv1d for its weight `[D, 1, W]`, as released, and its initialisation. The weight stays in float32.
    """

    def __init__(self, width: int, taps: int):
        super().__init__(width, width, taps, groups=width, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, W - 1 + T, D]` to `[B, T, D]`."""
        return short_convolution(x, self.weight.squeeze(1))


class GatedRMSNorm(nn.Module):
    """`rmsnorm(x) * weight * sigmoid(gate)`; the weight stays in float32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, self.weight, gate, self.eps)


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

    def forward(self, hidden_states: Tensor, context: ForwardContext, cache: KdaHybridCache | None) -> Tensor:
        """`[B, T, hidden]` to the same; pads give zeros. The cache's memory of this layer moves on."""
        if context.parts:
            pieces = hidden_states.split([part.shape[1] for part in context.parts], 1)
            return torch.cat([self.forward(*piece, cache) for piece in zip(pieces, context.parts)], 1)
        memory = None if cache is None else cache.layers[self.layer_idx]
        overwrite = memory is not None and memory.begin(hidden_states.device)
        x = context.pack(hidden_states)
        inputs = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)  # [B, T, D]
        qkv, window = context.with_windows(inputs, None if memory is None else memory.window)
        q, k, v = qkv.split([conv.in_channels for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)], -1)
        q, k, v = (context.without_windows(y) for y in (self.q_conv1d(q), self.k_conv1d(k), self.v_conv1d(v)))
        v = v.unflatten(-1, self.values)  # [B, T, H, V]
        call = KdaCall(
            q=q.unflatten(-1, self.keys),  # [B, T, H, K]
            k=k.unflatten(-1, self.keys),
            v=v,
            gate=context.silence(self.f_b_proj(self.f_a_proj(x))).unflatten(-1, self.keys),
            beta=context.silence(self.b_proj(x)),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=self.lower_bound,
            state=None if memory is None else memory.state,
            cu_seqlens=context.cu_seqlens,
            overwrite_state=overwrite and not torch.is_grad_enabled(),
            writes=torch.empty_like(v, dtype=wide(v).dtype) if context.records else None,
        )
        o, state = kda(call)
        if memory is not None:
            memory.update(state, window, self._record(call, inputs, context) if context.records else None)
        gate = self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        o = self.o_norm(o, gate.unflatten(-1, self.values)).flatten(-2)  # [B, T, H * V]
        return context.unpack(self.o_proj(o))

    @torch.no_grad()
    def _record(self, call: KdaCall, inputs: Tensor, context: ForwardContext) -> Record:
        """What moves the cache's memory on by the tokens of `call`, once more."""
        with without_autocast(call.k):
            k, g = unit(call.k), log_decay(call.gate, call.A_log, call.dt_bias, call.lower_bound)
        k, g, writes, inputs = (context.unpack(x.detach()) for x in (k, g, call.writes, inputs))
        return Record(k, g, writes, inputs, context.real)
