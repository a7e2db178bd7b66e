"""layers_mlp.py: norm, router and experts against transformers' own and against loops over all experts."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import K3, assert_close, k3_config, tiny_config, tiny_model, token_ids
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from modeling_kda import KdaHybridConfig, KdaHybridForCausalLM
from modeling_kda.layers_mlp import Experts, GatedActivation, GatedMLP, PackedExperts, RMSNorm, Router, SparseMLP, situ
from modeling_kda.weights_mxfp4 import decode


IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]
ROUTING = {
    "one group": {},
    "one expert": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 8},
    "not normalised": {"norm_topk_prob": False},
    "scaled": {"routed_scaling_factor": 2.446},
    "groups": {"num_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "one of two groups": {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3},
    "all groups": {"n_group": 4, "topk_group": 4, "num_experts_per_tok": 3},
    "biased weights": {"router_weights_use_bias": True},
    "biased weights, not normalised": {"router_weights_use_bias": True, "norm_topk_prob": False},
}


def block_of(implementation: str = "eager", **changes) -> tuple[SparseMLP, KdaHybridConfig]:
    """A mixture of experts with random weights of a size that shows."""
    torch.manual_seed(0)
    config = tiny_config(**changes)
    config._experts_implementation = implementation
    block = SparseMLP(config).eval()
    with torch.no_grad():
        for x in block.parameters():
            if x.is_floating_point():
                x.normal_(std=0.3)
        block.gate.e_score_correction_bias.normal_(std=0.2)
    return block, config


def route_by_hand(scores: Tensor, bias: Tensor, config: KdaHybridConfig) -> dict[int, float]:
    """One token's experts and their weights, from its scores in float64."""
    biased, size = scores + bias, config.num_experts // config.n_group
    groups = [list(range(start, start + size)) for start in range(0, config.num_experts, size)]
    groups.sort(key=lambda group: -sum(sorted(biased[group].tolist())[-2:]))
    allowed = [expert for group in groups[: config.topk_group] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -biased[expert].item())[: config.num_experts_per_tok]
    weights = (biased if config.router_weights_use_bias else scores)[chosen]
    if config.norm_topk_prob and len(chosen) > 1:
        weights = weights / weights.sum()
    return dict(zip(chosen, (weights * config.routed_scaling_factor).tolist()))


def dense(block: SparseMLP, config: KdaHybridConfig, x: Tensor) -> Tensor:
    """Every expert on every token, weighted by `route_by_hand`; in the dtype of the weights."""
    flat = x.flatten(0, 1)
    scores = torch.sigmoid(flat.double() @ block.gate.weight.double().T)
    weights = flat.new_zeros(scores.shape, dtype=torch.float64)
    for token, row in enumerate(scores.detach()):
        for expert in route_by_hand(row, block.gate.e_score_correction_bias.double(), config):
            weights[token, expert] = 1
    chosen = scores + block.gate.e_score_correction_bias.double() if config.router_weights_use_bias else scores
    weights = weights * chosen
    if config.norm_topk_prob and config.num_experts_per_tok > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * config.routed_scaling_factor
    total = torch.zeros_like(flat, dtype=torch.float64)
    for expert in range(config.num_experts):
        gate, up = (flat.double() @ block.experts.gate_up_proj[expert].double().T).chunk(2, -1)
        total = total + weights[:, expert, None] * ((F.silu(gate) * up) @ block.experts.down_proj[expert].double().T)
    if block.shared_experts is not None:
        shared = block.shared_experts
        up = F.silu(flat.double() @ shared.gate_proj.weight.double().T) * (
            flat.double() @ shared.up_proj.weight.double().T
        )
        total = total + up @ shared.down_proj.weight.double().T
    return total.view_as(x)


@pytest.mark.parametrize("routing", ROUTING)
def test_router_chooses_as_written_by_hand(routing):
    block, config = block_of(**ROUTING[routing])
    x = torch.randn(50, config.hidden_size)
    logits, weights, experts = block.gate(x)
    want = x.double() @ block.gate.weight.double().T
    assert_close(logits, want, absolute=0, relative=1e-5)
    assert weights.dtype == torch.float32
    for token in range(50):
        by_hand = route_by_hand(want[token].sigmoid(), block.gate.e_score_correction_bias.double(), config)
        got = dict(zip(experts[token].tolist(), weights[token].tolist()))
        assert got.keys() == by_hand.keys(), f"token {token}"
        for expert, weight in by_hand.items():
            assert got[expert] == pytest.approx(weight, rel=1e-5), f"token {token}, expert {expert}"


def test_router_leaves_whole_groups_out():
    """The best expert of all is in a group whose two best are worse than another's."""
    config = tiny_config(n_group=4, topk_group=1, num_experts_per_tok=2, hidden_size=8)
    router = Router(config)
    logits = torch.tensor([[5.0, -5.0, 2.0, 2.0, 0.0, 0.0, 1.0, 0.0]])
    with torch.no_grad():
        router.weight.copy_(torch.eye(8))
    assert sorted(router(logits)[2].flatten().tolist()) == [2, 3]


@pytest.mark.parametrize("bias_sign", [1, -1])
def test_router_bias_chooses_but_does_not_weigh(bias_sign):
    config = tiny_config()
    router, x = Router(config), torch.randn(20, config.hidden_size)
    with torch.no_grad():
        router.weight.normal_(std=0.1)
        router.e_score_correction_bias.copy_(bias_sign * torch.arange(8.0))
    _, weights, experts = router(x)
    first = {6, 7} if bias_sign == 1 else {0, 1}
    assert all(set(row) == first for row in experts.tolist())
    scores = (x @ router.weight.T).sigmoid().gather(1, experts)
    assert_close(weights, scores / scores.sum(-1, keepdim=True), absolute=1e-6)


def test_router_bias_weighs_where_the_config_says_so():
    config = tiny_config(router_weights_use_bias=True)
    router = Router(config)
    with torch.no_grad():
        router.weight.zero_()
        router.e_score_correction_bias.copy_(torch.arange(8.0))
    _, weights, experts = router(torch.randn(1, config.hidden_size))
    assert dict(zip(experts[0].tolist(), weights[0].tolist())) == pytest.approx({6: 6.5 / 14, 7: 7.5 / 14})


def last_by_a_hair(model: KdaHybridForCausalLM) -> KdaHybridForCausalLM:
    """Biases from 8 up in steps of 1e-3: in bfloat16 they are all 8."""
    for layer in model.model.layers:
        if layer.sparse:
            layer.mlp.gate.e_score_correction_bias.copy_(8 + 1e-3 * torch.arange(8))
    return model


def test_router_bias_survives_a_load_in_bfloat16(tmp_path: Path):
    last_by_a_hair(tiny_model()).save_pretrained(tmp_path)
    model = KdaHybridForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    for layer in model.model.layers[1:]:
        router = layer.mlp.gate
        _, _, experts = router(torch.zeros(3, model.config.hidden_size, dtype=torch.bfloat16))
        assert [sorted(row) for row in experts.tolist()] == [[6, 7]] * 3
        assert router.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_computes_in_float32_under_autocast(dtype):
    block, config = block_of()
    x = torch.randn(30, config.hidden_size).to(dtype)
    want = block.gate(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        got = block.gate(x)
    for one, other in zip(got, want):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("routing", [*ROUTING, "no shared expert", "two shared experts"])
def test_block_is_a_dense_loop_over_all_experts(routing, implementation):
    shared = {"no shared expert": {"n_shared_experts": 0}, "two shared experts": {"n_shared_experts": 2}}
    block, config = block_of(implementation, **{**ROUTING, **shared}[routing])
    x = torch.randn(2, 9, config.hidden_size)
    got, logits = block(x)
    assert_close(got, dense(block, config, x), absolute=0, relative=1e-5)
    assert logits.shape == (18, config.num_experts)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("routing", ["one group", "groups", "all experts", "biased weights"])
def test_block_has_the_gradients_of_a_dense_loop(routing, implementation):
    block, config = block_of(implementation, **ROUTING[routing])
    x = torch.randn(2, 9, config.hidden_size).requires_grad_()
    weight, named = torch.randn_like(x), dict(block.named_parameters())
    got = torch.autograd.grad((block(x)[0] * weight).sum(), (x, *named.values()))
    want = torch.autograd.grad((dense(block, config, x) * weight).sum(), (x, *named.values()))
    for name, one, other in zip(("x", *named), got, want):
        assert_close(one, other, absolute=0, relative=1e-5, name=name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_block_gives_zero_gradients_to_experts_without_a_token(implementation, tokens):
    block, config = block_of(implementation)
    block.gate.e_score_correction_bias.copy_(-10 * torch.arange(8.0))  # experts 0 and 1 get all
    block(torch.randn(1, tokens, config.hidden_size))[0].square().sum().backward()
    for parameter in (block.experts.gate_up_proj, block.experts.down_proj):
        assert (parameter.grad[2:] == 0).all()
        assert (parameter.grad[:2].flatten(1).abs().amax(1) > 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_block_accepts_no_token_at_all(implementation):
    block, config = block_of(implementation)
    got, _ = block(torch.zeros(1, 0, config.hidden_size))
    assert got.shape == (1, 0, config.hidden_size)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("routing", ["one group", "not normalised", "scaled", "groups", "all experts"])
def test_block_agrees_with_transformers(routing, implementation):
    peer = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    block, config = block_of(implementation, **ROUTING[routing])
    names = "hidden_size num_experts_per_tok n_group topk_group norm_topk_prob routed_scaling_factor"
    theirs = peer.KimiLinearConfig(
        **{name: getattr(config, name) for name in names.split()},
        num_local_experts=config.num_experts,
        n_shared_experts=config.n_shared_experts,
        moe_intermediate_size=config.moe_intermediate_size,
    )
    theirs._experts_implementation = "eager"
    other = peer.KimiLinearMoE(theirs).eval()
    other.load_state_dict(block.state_dict())
    x = torch.randn(2, 9, config.hidden_size)
    assert_close(block(x)[0], other(x), absolute=0, relative=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_model_runs_its_experts_as_it_is_told(implementation, monkeypatch):
    model, ids, ran = tiny_model(), token_ids(9, rows=2), []
    for name in ("batched_mm", "grouped_mm"):
        function = ALL_EXPERTS_FUNCTIONS[name]
        watched = lambda *args, name=name, function=function: ran.append(name) or function(*args)  # noqa: E731
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, name, watched)
    with torch.no_grad():
        model.set_experts_implementation("eager")
        want = model(ids).logits
        model.set_experts_implementation(implementation)
        assert_close(model(ids).logits, want)
    assert ran == ([] if implementation == "eager" else [implementation] * 3)  # sparse layers


def test_block_in_bfloat16_sums_experts_in_float32():
    """Without shared experts, only each expert's own output is rounded before the sum."""
    block, config = block_of(num_experts_per_tok=8, n_shared_experts=0)
    block.experts.bfloat16()
    x = torch.randn(2, 9, config.hidden_size).bfloat16()
    got, _ = block(x)
    assert got.dtype == torch.bfloat16
    assert_close(got, dense(block, config, x), absolute=0, relative=1e-2)


def test_gated_mlp_is_its_formula():
    config = tiny_config(hidden_act="gelu")
    mlp, x = GatedMLP(config, 13).double(), torch.randn(2, 3, config.hidden_size).double()
    gate, up, down = (getattr(mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
    assert_close(mlp(x), (F.gelu(x @ gate.T) * (x @ up.T)) @ down.T, absolute=1e-12)
    assert gate.shape == up.shape == (13, 60)


def test_experts_hold_gate_and_up_in_one_tensor():
    config = tiny_config()
    experts = Experts(config)
    assert experts.gate_up_proj.shape == (8, 72, 60)
    assert experts.down_proj.shape == (8, 60, 36)


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_rms_norm_adds_eps_to_the_mean_of_squares(eps):
    norm, x = RMSNorm(7, eps), 0.1 * torch.randn(5, 7)
    with torch.no_grad():
        norm.weight.normal_()
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight.double()
    assert_close(norm(x), want, absolute=0, relative=1e-6)


def test_rms_norm_rounds_before_it_weighs():
    """As released. The other order gives other numbers."""
    torch.manual_seed(0)
    norm, x = RMSNorm(20, 1e-5).bfloat16(), torch.randn(64, 20).bfloat16()
    with torch.no_grad():
        norm.weight.normal_()
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert torch.equal(norm(x), y.bfloat16() * norm.weight)
    assert not torch.equal(norm(x), (y * norm.weight.double()).bfloat16())


def test_rms_norm_agrees_with_transformers():
    peer = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    torch.manual_seed(0)
    norm, other = RMSNorm(20, 1e-5).bfloat16(), peer.KimiLinearRMSNorm(20, 1e-5).bfloat16()
    with torch.no_grad():
        norm.weight.normal_()
    other.load_state_dict(norm.state_dict())
    x = torch.randn(64, 20).bfloat16()
    assert torch.equal(norm(x), other(x))


# SiTU


BETAS = [(4.0, 25.0), (1.0, None), (0.5, 2.0), (4.0, None)]


def situ_by_hand(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    gate, up = gate.double(), up.double()
    bounded = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) / (1 + torch.exp(-gate)) * bounded


def inputs_of_all_sizes(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Every pair of numbers around zero and where the bounds are reached."""
    points = torch.tensor([0.0, 1e-6, 0.3, 1.0, 4.0, 9.0, 30.0, 100.0])
    points = torch.cat([-points[1:], points]).to(dtype)
    gate, up = torch.meshgrid(points, points, indexing="ij")
    return gate.clone().requires_grad_(), up.clone().requires_grad_()


@pytest.mark.parametrize("betas", BETAS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_situ_is_its_formula(betas, dtype):
    gate, up = inputs_of_all_sizes(dtype)
    got, want = situ(gate, up, *betas), situ_by_hand(gate, up, *betas)
    assert got.dtype == dtype
    if dtype == torch.bfloat16:  # in float32 inside, and rounded once
        assert torch.equal(got, situ(gate.float(), up.float(), *betas).bfloat16())
    relative = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    assert ((got - want).abs() <= relative * want.abs() + 1e-12).all()


@pytest.mark.parametrize("betas", BETAS, ids=str)
def test_situ_has_the_exact_gradient(betas):
    """At +-100 as well, where one of the two bounds, or both, are reached."""
    gate, up = inputs_of_all_sizes()
    assert torch.autograd.gradcheck(lambda *x: situ(*x, *betas), (gate, up), atol=1e-6)


@pytest.mark.parametrize("betas", BETAS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_situ_has_the_gradient_of_its_formula(betas, dtype):
    gate, up = inputs_of_all_sizes(dtype)
    weights = torch.randn(gate.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = torch.autograd.grad((situ(gate, up, *betas) * weights).sum(), (gate, up))
    want = torch.autograd.grad((situ_by_hand(gate, up, *betas) * weights.double()).sum(), (gate, up))
    for one, other in zip(got, want):
        assert one.dtype == dtype
        assert one.isfinite().all()
        # A slope near a bound is a difference of numbers near 1.
        assert_close(one, other, 1e-5, 1e-5 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_situ_keeps_its_two_inputs_only(dtype):
    (gate, up), saved = inputs_of_all_sizes(dtype), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        situ(gate, up, 4.0, 25.0)
    assert [x.data_ptr() for x in saved] == [gate.data_ptr(), up.data_ptr()]


@pytest.mark.parametrize("beta", [None, 0, 0.0, 1.0])
@pytest.mark.parametrize("linear_beta", [None, 0])
def test_activation_takes_1_and_no_bound_where_the_betas_are_null(beta, linear_beta):
    activation = GatedActivation(tiny_config(hidden_act="situ", situ_beta=beta, situ_linear_beta=linear_beta))
    gate, up = inputs_of_all_sizes()
    assert_close(activation(gate, up), situ_by_hand(gate, up, 1.0, None), 0, 1e-13)


def test_activation_takes_the_betas_of_the_config():
    activation = GatedActivation(tiny_config(hidden_act="situ", situ_beta=3.0, situ_linear_beta=7.0))
    gate, up = inputs_of_all_sizes()
    assert_close(activation(gate, up), situ_by_hand(gate, up, 3.0, 7.0), 0, 1e-13)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_mlp_is_activated_by_situ(implementation):
    changes = {"hidden_act": "situ", "situ_beta": 2.0, "situ_linear_beta": 3.0}
    block, config = block_of(implementation, moe_intermediate_size=40, hidden_size=64, **changes)
    x = torch.randn(2, 9, 64)
    assert_close(block(x)[0], latent_by_hand(block, config, x), 0, 1e-5)
    mlp = GatedMLP(config, 13).double()
    gate, up, down = (getattr(mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
    assert_close(mlp(x.double()), situ_by_hand(x.double() @ gate.T, x.double() @ up.T, 2.0, 3.0) @ down.T, 1e-12)


# Kimi K3's experts


def latent_by_hand(block: SparseMLP, config: KdaHybridConfig, x: Tensor) -> Tensor:
    """Token by token and expert by expert in float64: down, the experts' weighted sum, norm, up; the shared ones."""
    betas = config.situ_beta, config.situ_linear_beta
    act = lambda gate, up: situ_by_hand(gate, up, *betas)  # noqa: E731
    flat, rows = x.double().flatten(0, 1), []
    weight = {name: p.double() for name, p in block.named_parameters()}
    for token in flat:
        scores = torch.sigmoid(weight["gate.weight"] @ token)
        latent = weight["routed_expert_down_proj.weight"] @ token if block.latent else token
        total = torch.zeros_like(latent)
        chosen = route_by_hand(scores.detach(), block.gate.e_score_correction_bias.double(), config)
        share = scores[list(chosen)] / (scores[list(chosen)].sum() if config.norm_topk_prob else 1)
        for number, part in zip(chosen, share):
            gate, up = (weight["experts.gate_up_proj"][number] @ latent).chunk(2)
            out = weight["experts.down_proj"][number] @ act(gate, up)
            total = total + config.routed_scaling_factor * part * out
        if config.latent_moe_use_norm:
            total = total / (total.square().mean() + config.rms_norm_eps).sqrt() * weight["routed_expert_norm.weight"]
        if block.latent:
            total = weight["routed_expert_up_proj.weight"] @ total
        gate, up = (weight[f"shared_experts.{name}_proj.weight"] @ token for name in ("gate", "up"))
        rows.append(total + weight["shared_experts.down_proj.weight"] @ act(gate, up))
    return torch.stack(rows).view_as(x)


LATENTS = {
    "K3": K3,
    "no norm": {**K3, "latent_moe_use_norm": False},
    "scaled": {**K3, "routed_scaling_factor": 2.4, "num_experts_per_tok": 3},
    "groups left out": {**K3, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", LATENTS)
def test_block_with_a_latent_is_a_plain_loop(kind, implementation):
    block, config = block_of(implementation, **LATENTS[kind])
    x = torch.randn(2, 9, config.hidden_size)
    got, logits = block(x)
    assert_close(got, latent_by_hand(block, config, x), 0, 1e-5)
    assert_close(logits, x.flatten(0, 1).double() @ block.gate.weight.double().T, 0, 1e-5)


def test_block_with_a_latent_has_the_gradients_of_a_plain_loop():
    block, config = block_of(**K3)
    x = torch.randn(1, 7, config.hidden_size).requires_grad_()
    weight, named = torch.randn_like(x), dict(block.named_parameters())
    got = torch.autograd.grad((block(x)[0] * weight).sum(), (x, *named.values()))
    want = torch.autograd.grad((latent_by_hand(block, config, x) * weight).sum(), (x, *named.values()))
    for name, one, other in zip(("x", *named), got, want):
        assert_close(one, other, 0, 2e-5, name=name)


def test_block_with_a_latent_has_these_shapes():
    block = SparseMLP(k3_config(num_experts=6))
    assert {name: tuple(x.shape) for name, x in block.named_parameters()} == {
        "gate.weight": (6, 60),
        "experts.gate_up_proj": (6, 128, 32),
        "experts.down_proj": (6, 32, 64),
        "routed_expert_down_proj.weight": (32, 60),
        "routed_expert_up_proj.weight": (60, 32),
        "routed_expert_norm.weight": (32,),
        "shared_experts.gate_proj.weight": (128, 60),
        "shared_experts.up_proj.weight": (128, 60),
        "shared_experts.down_proj.weight": (60, 128),
    }


def in_bfloat16(block: SparseMLP) -> SparseMLP:
    """All but the router."""
    for name, module in block.named_children():
        if name != "gate":
            module.bfloat16()
    return block


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_experts_in_bfloat16_are_weighted_and_summed_in_float32(kind):
    """Bit for bit: each expert's own output is rounded, then everything is float32 up to one last rounding."""
    config = k3_config(num_experts_per_tok=8)
    experts = packed_and_plain(config)[kind == "plain"].to(torch.bfloat16)
    x, weights = torch.randn(30, 32).bfloat16(), torch.rand(30, 8)
    order = torch.stack([torch.randperm(8) for _ in range(30)])
    got = experts.forward(x, order, weights)
    total = torch.zeros(30, 32)
    for number in range(8):
        out = experts.expert(number, x)
        assert out.dtype == torch.bfloat16
        total += out.float() * weights.gather(1, order.argsort(1))[:, number, None]
    assert torch.equal(got, total.bfloat16())
    rounded = sum(experts.expert(i, x) * weights.gather(1, order.argsort(1))[:, i, None].bfloat16() for i in range(8))
    assert not torch.equal(got, rounded)


def test_router_of_a_latent_block_in_bfloat16_multiplies_in_float32():
    """Two experts apart by less than a bfloat16 can say."""
    block, _ = block_of(**K3, num_experts_per_tok=1)
    block.gate.e_score_correction_bias.zero_()
    x = torch.randn(40, 60).bfloat16()
    with torch.no_grad():
        block.gate.weight[1:] = block.gate.weight[:1] * (1 + 2e-3 * torch.arange(1, 8)[:, None])
    logits, _, experts = in_bfloat16(block).gate(x)
    want = x.double() @ block.gate.weight.double().T
    assert_close(logits, want, 0, 1e-6)
    assert torch.equal(experts.flatten(), want.argmax(-1))
    assert not torch.equal((x @ block.gate.weight.bfloat16().T).argmax(-1), want.argmax(-1))


# Packed experts


def packed_and_plain(config: KdaHybridConfig, dtype: torch.dtype = torch.float32) -> tuple[PackedExperts, Experts]:
    """Experts of random codes and of scales around 2^-3, and the same decoded."""
    torch.manual_seed(0)
    config._experts_implementation = "eager"
    packed, plain = PackedExperts(config), Experts(config)
    with torch.no_grad():
        for name, x in packed.named_parameters():
            x.copy_(torch.randint(122, 126, x.shape) if "scale" in name else torch.randint(0, 256, x.shape))
        for name in ("gate_up_proj", "down_proj"):
            codes, scales = getattr(packed, name), getattr(packed, f"{name}_scale")
            getattr(plain, name).copy_(decode(codes, scales, torch.float32))
    return packed, plain.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_packed_experts_equal_decoded_ones_bit_for_bit(dtype):
    packed, plain = packed_and_plain(k3_config(num_experts_per_tok=3), dtype)
    weights, order = torch.rand(30, 3), torch.stack([torch.randperm(8)[:3] for _ in range(30)])
    grads = []
    for experts in (packed, plain):
        x = torch.randn(30, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        w = weights.clone().requires_grad_()
        out = experts(x, order, w)
        grads.append((out, *torch.autograd.grad(out.square().sum(), (x, w))))
    for one, other in zip(*grads):
        assert one.abs().max() > 0
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_packed_experts_have_the_gradient_of_finite_differences():
    packed, _ = packed_and_plain(k3_config())
    order = torch.tensor([[0, 3], [7, 0], [3, 1]])
    x = (0.1 * torch.randn(3, 32, dtype=torch.float64)).requires_grad_()
    weights = torch.rand(3, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda *y: packed(y[0], order, y[1]), (x, weights), fast_mode=True)


def test_packed_experts_keep_no_decoded_weight_for_the_way_back():
    packed, plain = packed_and_plain(k3_config())
    order, sizes = torch.randint(0, 8, (5, 2)), []
    for experts in (packed, plain):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=saved: to.append(x) or x, lambda x: x):
            experts(torch.randn(5, 32, requires_grad=True), order, torch.rand(5, 2))
        sizes.append({(tuple(x.shape), x.dtype) for x in saved if x.shape[-2:].numel() > 5 * 128})
    assert sizes[0] == {((128, 16), torch.uint8), ((32, 32), torch.uint8)}
    assert ((32, 128), torch.float32) in sizes[1] or ((128, 32), torch.float32) in sizes[1]


def test_packed_experts_do_not_train_and_take_a_byte_for_two_numbers():
    config = k3_config(packed_experts=True)
    block = SparseMLP(config)
    packed = dict(block.experts.named_parameters())
    assert {name: tuple(x.shape) for name, x in packed.items()} == {
        "gate_up_proj": (8, 128, 16),
        "gate_up_proj_scale": (8, 128, 1),
        "down_proj": (8, 32, 32),
        "down_proj_scale": (8, 32, 2),
    }
    assert all(x.dtype == torch.uint8 and not x.requires_grad for x in packed.values())
    assert not [name for name, x in block.named_parameters() if not x.requires_grad and "experts." not in name]
    bits = 8 * sum(x.numel() for x in packed.values()) / sum(x.numel() for x in Experts(config).parameters())
    assert bits == 4.25


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float64, torch.float16])
def test_packed_experts_stay_bytes_through_a_cast(cast):
    packed, _ = packed_and_plain(k3_config())
    before = {name: x.clone() for name, x in packed.named_parameters()}
    packed.to(cast)
    assert all(torch.equal(x, before[name]) and x.dtype == torch.uint8 for name, x in packed.named_parameters())


def test_packed_experts_accept_no_token_at_all():
    packed, _ = packed_and_plain(k3_config())
    empty = torch.zeros(0, 2)
    assert packed(torch.zeros(0, 32), empty.long(), empty).shape == (0, 32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_block_with_packed_experts_runs_under_every_implementation(implementation):
    """The setting is for experts that are not packed; these are run one by one."""
    block, config = block_of(**K3)
    other, _ = block_of(implementation, **K3, packed_experts=True)
    packed, plain = packed_and_plain(config)
    block.experts, other.experts = plain, packed
    for name, module in block.named_children():
        if name != "experts":
            getattr(other, name).load_state_dict(module.state_dict())
    x = torch.randn(2, 9, 60)
    assert torch.equal(other(x)[0], block(x)[0])
