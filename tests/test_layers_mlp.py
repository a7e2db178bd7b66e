"""layers_mlp.py: norm, router and experts against transformers' own and against loops over all experts."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, tiny_config, tiny_model, token_ids
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from modeling_kda import KdaHybridConfig, KdaHybridForCausalLM
from modeling_kda.layers_mlp import Experts, GatedMLP, RMSNorm, Router, SparseMLP


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
