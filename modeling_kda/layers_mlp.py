"""RMSNorm, the gated MLP, and the mixture of experts.

Legend: X tokens of all rows, D hidden size, I width of an expert, E experts, A experts a token uses.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation

from .configuration_kda_hybrid import KdaHybridConfig
from .ops_reference import wide, without_autocast


class RMSNorm(nn.Module):
    """`x * rsqrt(mean(x^2) + eps) * weight`: normalised in float32, rounded to the dtype of x, then weighted."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(wide(x), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, config: KdaHybridConfig, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Chooses each token's experts by sigmoid scores plus a correction bias (DeepSeek-V3, arXiv 2412.19437, 2.1.2).

    All in float32: a rounded score sends tokens to other experts. The bias is moved by whoever balances the experts'
    load in training, not by gradients.
    """

    def __init__(self, config: KdaHybridConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=torch.float32))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[X, D]` to router logits `[X, E]`, and the chosen experts' weights and numbers, `[X, A]` each; float32."""
        config = self.config
        with without_autocast(x):
            logits = F.linear(wide(x), self.weight.to(wide(x).dtype))
        scores = logits.sigmoid()
        biased = scores + self.e_score_correction_bias.float()
        choice = biased
        if config.topk_group < config.n_group:
            groups = choice.unflatten(-1, (config.n_group, -1))  # [X, groups, E / groups]
            best = groups.topk(2, -1).values.sum(-1).topk(config.topk_group, -1, sorted=False).indices
            open_ = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
            choice = groups.masked_fill(~open_.unsqueeze(-1), float("-inf")).flatten(-2)
        experts = choice.topk(config.num_experts_per_tok, -1).indices
        weights = (biased if config.router_weights_use_bias else scores).gather(-1, experts)
        if config.norm_topk_prob and config.num_experts_per_tok > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # 1e-20: as released, against all zeros
        return logits, weights * config.routed_scaling_factor, experts


@use_experts_implementation
class Experts(nn.Module):
    """The routed experts' gated MLPs in two tensors; transformers' `experts_implementation` says how they are run."""

    def __init__(self, config: KdaHybridConfig):
        super().__init__()
        experts, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`experts_implementation="eager"`: expert by expert. `[X, D]`, `[X, A]`, `[X, A]` to `[X, D]`."""
        total = torch.zeros_like(wide(hidden_states))
        for number in top_k_index.unique().tolist():
            if number >= self.num_experts:  # a slot that another device serves
                continue
            token, slot = (top_k_index == number).nonzero(as_tuple=True)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[number]).chunk(2, -1)
            out = F.linear(self.act_fn(gate) * up, self.down_proj[number])
            total.index_add_(0, token, wide(out) * top_k_weights[token, slot, None])
        return total.to(hidden_states.dtype)

    # transformers reads `self.config._experts_implementation` at every call; this is its way to the next property.
    @property
    def config(self) -> "Experts":
        return self

    @config.setter
    def config(self, config: KdaHybridConfig) -> None:
        self._model_config = config

    @property
    def _experts_implementation(self) -> str:
        """The config's, but for weights that torch's grouped products refuse: float64, or rows of odd bytes."""
        name, weights = self._model_config._experts_implementation, (self.gate_up_proj, self.down_proj)
        fits = all(x.dtype != torch.float64 and x.shape[-1] * x.element_size() % 16 == 0 for x in weights)
        return name if fits or name != "grouped_mm" else "eager"


class SparseMLP(nn.Module):
    """A mixture of experts: the routed ones of each token, and shared ones that see every token."""

    def __init__(self, config: KdaHybridConfig):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = (
            GatedMLP(config, config.n_shared_experts * config.moe_intermediate_size)
            if config.n_shared_experts
            else None
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, T, D]` to the same, and the router logits `[B * T, E]`."""
        flat = x.flatten(0, 1)
        logits, weights, experts = self.gate(flat)
        y = self.experts(flat, experts, weights).view_as(x)
        return (y if self.shared_experts is None else y + self.shared_experts(x)), logits
