"""RMSNorm, the gated MLP and its activations, and the mixture of experts.

Legend: X tokens of all rows, D hidden size, L width in which the routed experts work (D if there is no latent), I
width of an expert, E experts, A experts a token uses.
"""

from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation

from .configuration_kda_hybrid import KdaHybridConfig
from .ops_kda import allowed
from .ops_linear import Before, add, gated
from .ops_moe import BACKEND as ops_moe
from .ops_reference import OPERATORS, wide, without_autocast
from .ops_rows import activate, activates, normalises, rms_norm
from .weights_mxfp4 import BLOCK, decode


class RMSNorm(nn.Module):
    """`x * rsqrt(mean(x^2) + eps) * weight`: normalised in float32, rounded to the dtype of x, then weighted."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if normalises(x, self.weight):
            return rms_norm(x, self.weight, self.eps)
        return F.rms_norm(wide(x), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


# Operators of their own: they keep their inputs only, and compute the rest again on the way back. (A
# torch.autograd.Function with such a backward loses gradients when torch 2.11 compiles it.)
@torch.library.custom_op(f"{OPERATORS}::situ", mutates_args=())
def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """`beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)`, the activation of Kimi K3.

    Both factors are bounded; without `linear_beta` the second is `up`. In float32 inside.
    """
    g, u = wide(gate), wide(up)
    u = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * u).to(gate.dtype)


@situ.register_fake
def _(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@torch.library.custom_op(f"{OPERATORS}::situ_backward", mutates_args=())
def _situ_backward(
    gate: Tensor, up: Tensor, beta: float, linear_beta: float | None, grad: Tensor
) -> tuple[Tensor, Tensor]:
    g, u, d = wide(gate), wide(up), wide(grad)
    bend, open_ = torch.tanh(g / beta), torch.sigmoid(g)
    slope = open_ * ((1 - bend.square()) + beta * bend * (1 - open_))
    line = None if linear_beta is None else torch.tanh(u / linear_beta)
    to_gate = d * slope * (u if line is None else linear_beta * line)
    to_up = d * (beta * bend * open_) * (1 if line is None else 1 - line.square())
    return to_gate.to(gate.dtype), to_up.to(up.dtype)


@_situ_backward.register_fake
def _(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


def _save_situ(ctx: Any, inputs: tuple, output: Tensor) -> None:
    gate, up, *ctx.betas = inputs
    ctx.save_for_backward(gate, up)


def _back_through_situ(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_situ_backward(*ctx.saved_tensors, *ctx.betas, grad), None, None


situ.register_autograd(_back_through_situ, setup_context=_save_situ)


class GatedActivation(nn.Module):
    """`act(gate) * up`, or SiTU of both."""

    def __init__(self, config: KdaHybridConfig):
        super().__init__()
        self.situ = config.hidden_act == "situ"
        self.betas = (config.situ_beta or 1.0, config.situ_linear_beta or None)  # 0 is none, as released
        self.act_fn = None if self.situ else ACT2FN[config.hidden_act]
        # The betas of `kernels_linear.activated`, where 0 is none; None: it does not know this activation.
        self.fused = (0.0, 0.0) if config.hidden_act in ("silu", "swish") else None
        if self.situ:
            self.fused = (self.betas[0], self.betas[1] or 0.0)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.fused is not None and activates(gate, up):
            return activate(gate, up, *self.fused)
        return situ(gate, up, *self.betas) if self.situ else self.act_fn(gate) * up


class GatedMLP(nn.Module):
    """`down(activation(gate(x), up(x)))`."""

    def __init__(self, config: KdaHybridConfig, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.activation = GatedActivation(config)

    def forward(self, x: Tensor, norm: Before | None = None, residual: Tensor | None = None) -> Tensor:
        """`[..., D]` to the same. norm: of x. residual: added at last."""
        return add(residual, gated(x, self.gate_proj, self.up_proj, self.activation, norm), self.down_proj)


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
        experts = self.choose(biased)
        weights = (biased if config.router_weights_use_bias else scores).gather(-1, experts)
        if config.norm_topk_prob and config.num_experts_per_tok > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # 1e-20: as released, against all zeros
        return logits, weights * config.routed_scaling_factor, experts

    def choose(self, biased: Tensor) -> Tensor:
        """Biased scores `[X, E]` to the best experts' numbers `[X, A]`, of the best groups if there are groups."""
        config, choice = self.config, biased
        if config.topk_group < config.n_group:
            groups = choice.unflatten(-1, (config.n_group, -1))  # [X, groups, E / groups]
            best = groups.topk(2, -1).values.sum(-1).topk(config.topk_group, -1, sorted=False).indices
            open_ = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
            choice = groups.masked_fill(~open_.unsqueeze(-1), float("-inf")).flatten(-2)
        return choice.topk(config.num_experts_per_tok, -1).indices


def one_by_one(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Expert by expert, each over its tokens, added in float32. `[X, L]`, `[X, A]`, `[X, A]` to `[X, L]`."""
    total = torch.zeros_like(wide(hidden_states))
    for number in top_k_index.unique().tolist():
        if number >= experts.num_experts:  # a slot that another device serves
            continue
        token, slot = (top_k_index == number).nonzero(as_tuple=True)
        out = experts.expert(number, hidden_states[token])
        total.index_add_(0, token, wide(out) * top_k_weights[token, slot, None])
    return total.to(hidden_states.dtype)


def few_at_once(experts_class: type[nn.Module]) -> type[nn.Module]:
    """Decorates a class of experts: `ops_moe` runs a few tokens if it can, unless "eager" is chosen.

    Within `forward`, so that hooks come first: they may bring the weights, or change the routing.
    """
    forward = experts_class.forward

    @wraps(forward)
    def first(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        inputs = (hidden_states, top_k_index, top_k_weights)
        # Not by attribute, which would compute what is not there: an adapter's sum, say.
        weights = [self._parameters.get(name) for name in self.WEIGHTS]
        wanted = self._model_config._experts_implementation != "eager" and allowed(ops_moe.NAME)
        known = self.activation.fused is not None and all(type(x) is nn.Parameter for x in weights)
        if wanted and known and not (ops_moe.why_not() or ops_moe.refuses(*inputs, *weights)):
            return ops_moe.run(*inputs, *weights, betas=self.activation.fused)
        return forward(self, *inputs)

    experts_class.forward = first
    return experts_class


@few_at_once
@use_experts_implementation
class Experts(nn.Module):
    """The routed experts' gated MLPs in two tensors; transformers' `experts_implementation` says how they are run."""

    WEIGHTS = ("gate_up_proj", "down_proj")

    def __init__(self, config: KdaHybridConfig):
        super().__init__()
        experts, latent, width = config.num_experts, config.routed_width, config.moe_intermediate_size
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, latent))
        self.down_proj = nn.Parameter(torch.empty(experts, latent, width))
        self.activation = GatedActivation(config)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`experts_implementation="eager"`."""
        return one_by_one(self, hidden_states, top_k_index, top_k_weights)

    def expert(self, number: int, x: Tensor) -> Tensor:
        """One expert, unweighted: `[X, L]` to the same."""
        return F.linear(self._apply_gate(F.linear(x, self.gate_up_proj[number])), self.down_proj[number])

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """transformers' implementations call it."""
        return self.activation(*gate_up.chunk(2, -1))

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


@torch.library.custom_op(f"{OPERATORS}::packed_linear", mutates_args=())
def packed_linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """`x @ decode(packed, scale).T`; the decoded weight lives no longer than the product, on the way back too."""
    return F.linear(x, decode(packed, scale, x.dtype))


@packed_linear.register_fake
def _(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


@torch.library.custom_op(f"{OPERATORS}::packed_linear_backward", mutates_args=())
def _packed_linear_backward(packed: Tensor, scale: Tensor, grad: Tensor) -> Tensor:
    return grad @ decode(packed, scale, grad.dtype)


@_packed_linear_backward.register_fake
def _(packed: Tensor, scale: Tensor, grad: Tensor) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], packed.shape[1] * 2)


packed_linear.register_autograd(
    lambda ctx, grad: (_packed_linear_backward(*ctx.saved_tensors, grad), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
)


@few_at_once
class PackedExperts(nn.Module):
    """`Experts` in MXFP4, as a Kimi K3 checkpoint holds them. An expert is decoded when tokens come to it.

    The weights do not train; gradients pass through to what is before them. They are parameters, so that a device map
    places and offloads them: bytes, which `requires_grad_(True)` refuses and `num_parameters()` counts as they are.
    """

    WEIGHTS = ("gate_up_proj", "down_proj", "gate_up_proj_scale", "down_proj_scale")

    def __init__(self, config: KdaHybridConfig):
        super().__init__()
        experts, latent, width = config.num_experts, config.routed_width, config.moe_intermediate_size
        self.num_experts, self._model_config = experts, config

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(experts, *shape, dtype=torch.uint8), requires_grad=False)

        self.gate_up_proj, self.gate_up_proj_scale = empty(2 * width, latent // 2), empty(2 * width, latent // BLOCK)
        self.down_proj, self.down_proj_scale = empty(latent, width // 2), empty(latent, width // BLOCK)
        self.activation = GatedActivation(config)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `Experts`, `experts_implementation="eager"`."""
        return one_by_one(self, hidden_states, top_k_index, top_k_weights)

    def expert(self, number: int, x: Tensor) -> Tensor:
        """One expert, unweighted: `[X, L]` to the same."""
        with without_autocast(x):
            x = packed_linear(x, self.gate_up_proj[number], self.gate_up_proj_scale[number])
            return packed_linear(
                self.activation(*x.chunk(2, -1)), self.down_proj[number], self.down_proj_scale[number]
            )


class SparseMLP(nn.Module):
    """A mixture of experts: the routed ones of each token, and shared ones that see every token.

    In Kimi K3 the routed ones work in a latent: their input is projected down, their weighted sum normalised and
    projected up. The router and the shared ones see the full width.
    """

    def __init__(self, config: KdaHybridConfig):
        super().__init__()
        self.gate = Router(config)
        self.experts = (PackedExperts if config.packed_experts else Experts)(config)
        self.latent = config.routed_expert_hidden_size is not None
        if self.latent:
            self.routed_expert_down_proj = nn.Linear(config.hidden_size, config.routed_width, bias=False)
            self.routed_expert_up_proj = nn.Linear(config.routed_width, config.hidden_size, bias=False)
        self.routed_expert_norm = (
            RMSNorm(config.routed_width, config.rms_norm_eps) if config.latent_moe_use_norm else None
        )
        self.shared_experts = (
            GatedMLP(config, config.n_shared_experts * config.moe_intermediate_size)
            if config.n_shared_experts
            else None
        )

    def forward(self, x: Tensor, norm: Before | None = None, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`[B, T, D]` to the same, and the router logits `[B * T, E]`. norm: of x. residual: added at last."""
        x = x if norm is None else norm.module(x)
        flat = x.flatten(0, 1)
        logits, weights, experts = self.gate(flat)
        y = self.experts(self.routed_expert_down_proj(flat) if self.latent else flat, experts, weights)
        if self.routed_expert_norm is not None:
            y = self.routed_expert_norm(y)
        if self.latent:
            y = self.routed_expert_up_proj(y)
        y = y.view_as(x)
        y = y if self.shared_experts is None else self.shared_experts(x, residual=y)
        return (y if residual is None else residual + y), logits
