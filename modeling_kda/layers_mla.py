"""Multi-head latent attention without positions: the cache holds one latent a token, not keys and values a head.

Legend: B batch, T new tokens, S past and new tokens, H heads, L latent width, N per-head and P shared key width,
V value width. A cached row is `[latent L | shared key P]`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache_kda_hybrid import KdaHybridCache
from .configuration_kda_hybrid import KdaHybridConfig
from .layers_context import ForwardContext
from .layers_mlp import RMSNorm
from .ops_linear import Before, add, linears
from .ops_mla import append_rows, attend_absorbed, refuses_absorbed
from .ops_reference import wide


class MultiHeadLatentAttention(nn.Module):
    """One MLA layer (DeepSeek-V2, arXiv 2405.04434, section 2.1), nothing rotated (Kimi Linear, section 3.3)."""

    def __init__(self, config: KdaHybridConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.heads, self.latent = config.num_attention_heads, config.kv_lora_rank
        self.nope, self.shared, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.scaling = config.qk_head_dim**-0.5
        self.is_causal, self.num_key_value_groups = True, 1  # read by transformers' attention functions
        hidden, queries = config.hidden_size, self.heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.lora_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.latent + self.shared, bias=False)
        self.kv_a_layernorm = RMSNorm(self.latent, config.lora_norm_eps)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.nope + self.value), bias=False)
        if config.attention_output_gate:
            self.g_proj = nn.Linear(hidden, self.heads * self.value, bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        context: ForwardContext,
        cache: KdaHybridCache | None,
        norm: Before | None = None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`[B, T, hidden]` to the same, and the attention weights `[B, H, T, S]` where they are at hand or wanted.

        Args:
            norm: of `hidden_states`, before anything else.
            residual: `[B, T, hidden]`, added at last.
        """
        first = [self.q_proj if self.config.q_lora_rank is None else self.q_a_proj, self.kv_a_proj_with_mqa]
        first += [self.g_proj] if self.config.attention_output_gate else []
        q, new, *gate = linears([hidden_states] * len(first), first, norm)
        if self.config.q_lora_rank is not None:
            [q] = linears([q], [self.q_b_proj], Before(self.q_a_layernorm, RMSNorm))
        q = q.unflatten(-1, (self.heads, self.nope + self.shared))  # [B, T, H, N + P]
        gate = gate[0] if gate else None
        fused = self._fuses(q, new, gate, context, cache)
        rows = self._rows(new, context, cache, fused)  # [B, S, L + P]
        if fused:
            at = context.at if isinstance(context.at, Tensor) else None
            o = attend_absorbed(q, rows, self.kv_b_proj.weight, self.scaling, at, context.pads, gate)
            return add(residual, o, self.o_proj), None
        if context.absorbed and self._absorbable():
            o, weights = self._absorbed(q, rows, context.allowed)
        else:
            o, weights = self._expanded(q, rows, context)
        o = o.flatten(-2)  # [B, T, H * V]
        if gate is not None:
            o = o * torch.sigmoid(gate)
        return add(residual, o, self.o_proj), weights

    def _rows(self, new: Tensor, context: ForwardContext, cache: KdaHybridCache | None, fused: bool) -> Tensor:
        """What `new` `[B, T, L + P]`, as projected, leaves to be read, after what was there before."""
        norm, memory = self.kv_a_layernorm, None if cache is None else cache.layers[self.layer_idx]
        if fused and isinstance(context.at, Tensor) and Before(norm, RMSNorm).is_plain(new):
            return append_rows(new, norm.weight, norm.eps, memory.places(new), context.at)
        latent, shared = new.split([self.latent, self.shared], -1)
        rows = torch.cat([norm(latent), shared], -1)
        return rows if memory is None else memory.update(rows, context.at)

    def _fuses(
        self, q: Tensor, new: Tensor, gate: Tensor | None, context: ForwardContext, cache: KdaHybridCache | None
    ) -> bool:
        """Whether kernels may take the place of `_absorbed`, which have no weights to return or to drop."""
        if not context.absorbed or context.output_attentions or not self._absorbable():
            return False
        if self.training and self.config.attention_dropout > 0:
            return False
        past = None if cache is None else cache.layers[self.layer_idx].rows
        if past is not None and past.data.requires_grad and torch.is_grad_enabled():
            return False
        return refuses_absorbed(q, new, self.kv_b_proj.weight, gate) is None

    def _expanded(self, q: Tensor, rows: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor | None]:
        """Keys and values of every head, and the attention function in use."""
        latent, shared = rows.split([self.latent, self.shared], -1)
        k, v = (
            self.kv_b_proj(latent)
            .unflatten(-1, (self.heads, self.nope + self.value))
            .split([self.nope, self.value], -1)
        )
        k = torch.cat([k, shared.unsqueeze(2).expand(-1, -1, self.heads, -1)], -1)  # [B, S, H, N + P]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask, dropout = context.attention_mask, self.config.attention_dropout if self.training else 0.0
        if context.absorbed and context.allowed is not None:
            mask = torch.zeros_like(context.allowed, dtype=q.dtype)
            mask = mask.masked_fill(~context.allowed, torch.finfo(q.dtype).min).unsqueeze(1)
        attend = eager_attention  # as good as any for a few tokens or none, and it takes the mask that is at hand
        if not context.absorbed and q.numel():
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        if attend is not eager_attention and not self._takes_unequal(q, k, v, mask, dropout):
            width = max(q.shape[-1], self.value)
            q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        o, weights = attend(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **context.attention_kwargs)
        return o[..., : self.value], weights

    def _takes_unequal(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> bool:
        """Whether keys and values may differ in width. Most attention kernels then take a slow path or none, so the
        narrower are padded with zeros; cuDNN's, which torch prefers from Hopper on, do not, and have less to do."""
        if self.config._attn_implementation != "sdpa" or not q.is_cuda or torch.compiler.is_compiling():
            return False
        choice = torch._fused_sdp_choice(q, k, v, mask, dropout, mask is None, scale=self.scaling)
        return choice == SDPBackend.CUDNN_ATTENTION.value

    def _absorbable(self) -> bool:
        """Whether `kv_b_proj` is its plain weight: not an adapter's, hooked, quantised, sharded or elsewhere."""
        plain = type(self.kv_b_proj) is nn.Linear and type(self.kv_b_proj.weight) is nn.Parameter
        plain = plain and not (self.kv_b_proj._forward_hooks or self.kv_b_proj._forward_pre_hooks)
        return plain and self.kv_b_proj.weight.device.type != "meta"

    def _absorbed(self, q: Tensor, rows: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same numbers from the latents: the keys' matrix moves to the queries, the values' to the output.

        All heads share the rows, so heads and tokens are one axis, and the past is read once for all of them.
        """
        T = q.shape[1]
        to_key, to_value = self.kv_b_proj.weight.unflatten(0, (self.heads, -1)).split([self.nope, self.value], 1)
        q_nope, q_shared = q.transpose(1, 2).split([self.nope, self.shared], -1)  # [B, H, T, ...]
        q = torch.cat([q_nope @ to_key, q_shared], -1).flatten(1, 2)  # [B, H * T, L + P]
        scores = (q @ rows.transpose(1, 2)).mul_(self.scaling).unflatten(1, (self.heads, T))
        if allowed is not None:
            scores = scores.masked_fill(~allowed.unsqueeze(1), torch.finfo(scores.dtype).min)
        weights = wide(scores).softmax(-1).to(q.dtype)  # [B, H, T, S]
        weights = F.dropout(weights, self.config.attention_dropout, self.training)
        read = weights.flatten(1, 2) @ rows[..., : self.latent]
        o = read.unflatten(1, (self.heads, T)) @ to_value.transpose(1, 2)  # [B, H, T, V]
        return o.transpose(1, 2), weights


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Attention written out, with its weights: `[B, H, T, width]` to `[B, T, H, width]` and `[B, H, T, S]`."""
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.dropout(wide(scores).softmax(-1).to(query.dtype), dropout, module.training)
    return (weights @ value).transpose(1, 2), weights
