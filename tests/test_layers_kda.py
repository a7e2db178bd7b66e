"""layers_kda.py against transformers' own layer and against the layer written out on one document."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, tiny_config
from torch import Tensor

from modeling_kda import KdaHybridCache, KdaHybridConfig
from modeling_kda.layers_context import ForwardContext
from modeling_kda.layers_kda import KimiDeltaAttention, ShortConvolution
from modeling_kda.ops_reference import delta_rule


LAYER = 0  # a linear one
SHAPES = {
    "low-rank gate": {},
    "full-rank gate": {"linear_output_gate_rank": None},
    "bounded": {"linear_gate_lower_bound": -5.0},
    "keys as wide as values": {"linear_value_head_dim": 12},
    "one head": {"linear_num_heads": 1},
    "one tap": {"linear_conv_kernel_dim": 1},
}


def layer_of(seed: int = 0, **changes) -> tuple[KimiDeltaAttention, KdaHybridConfig]:
    """A layer with random weights of a size that shows, in eval mode."""
    torch.manual_seed(seed)
    config = tiny_config(**changes)
    config._attn_implementation = "eager"
    layer = KimiDeltaAttention(config, LAYER).eval()
    with torch.no_grad():
        for name, x in layer.named_parameters():
            if x.ndim == 2:
                x.normal_(std=0.3)
            elif name != "o_norm.weight":
                x.normal_()
            else:
                x.add_(0.3 * torch.randn_like(x))
    return layer, config


def run(layer: KimiDeltaAttention, config: KdaHybridConfig, x: Tensor, cache=None, **given) -> Tensor:
    y = layer(x, ForwardContext(config, x, cache=cache, **given), cache)
    if cache is not None:
        cache.advance(x.shape[1])
    return y


def written_out(layer: KimiDeltaAttention, x: Tensor, bound: float | None = None) -> Tensor:
    """The layer on one document `[T, hidden]`, in float64, from its description."""
    w = {name: parameter.double() for name, parameter in layer.named_parameters()}
    x = x.double()
    heads, taps = w["A_log"].numel(), w["q_conv1d.weight"].shape[-1]

    def stream(name: str) -> Tensor:
        y = F.pad((x @ w[f"{name}_proj.weight"].T).T, (taps - 1, 0))
        return F.silu(F.conv1d(y, w[f"{name}_conv1d.weight"], groups=len(y))).T.unflatten(-1, (heads, -1))

    q, k, v = stream("q"), stream("k"), stream("v")
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    gate = (x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T + w["dt_bias"]).unflatten(-1, (heads, -1))
    rate = w["A_log"].exp().unsqueeze(-1)
    g = -rate * F.softplus(gate) if bound is None else bound / (1 + torch.exp(-rate * gate))
    beta = torch.sigmoid(x @ w["b_proj.weight"].T)
    state = x.new_zeros(1, heads, v.shape[-1], k.shape[-1])
    batch = (y.unsqueeze(0) for y in (q * q.shape[-1] ** -0.5, k, v, g, beta))
    o = delta_rule(*batch, state)[0][0]
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w["o_norm.weight"]
    out = w["g_proj.weight"].T if "g_proj.weight" in w else w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T
    return (o.flatten(-2) * torch.sigmoid(x @ out)) @ w["o_proj.weight"].T


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", [1, 2, 37])
def test_layer_is_its_description(shape, T):
    layer, config = layer_of(**SHAPES[shape])
    x = torch.randn(2, T, config.hidden_size)
    got = run(layer, config, x)
    for row in range(2):
        want = written_out(layer, x[row], config.linear_gate_lower_bound)
        assert_close(got[row], want, absolute=0, relative=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", [3, 37])
def test_layer_has_the_gradients_of_its_description(shape, T):
    layer, config = layer_of(**SHAPES[shape])
    layer.double()
    x, weight = torch.randn(2, T, config.hidden_size).double(), torch.randn(2, T, config.hidden_size)

    def gradients(y: Tensor) -> dict[str, Tensor]:
        named = dict(layer.named_parameters())
        return dict(zip(named, torch.autograd.grad((y * weight).sum(), named.values())))

    got = gradients(run(layer, config, x))
    want = gradients(torch.stack([written_out(layer, row, config.linear_gate_lower_bound) for row in x]))
    for name in want:
        assert_close(got[name], want[name], absolute=0, relative=1e-10, name=name)


@pytest.fixture
def peer(monkeypatch):
    """transformers' file, without the kernels that it takes where fla or causal-conv1d are installed."""
    peer = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", "causal_conv1d_fn"):
        monkeypatch.setattr(peer, name, inspect.unwrap(getattr(peer, name)))
    return peer


def peer_of(peer, layer: KimiDeltaAttention, config: KdaHybridConfig):
    """transformers' layer with the same weights. It knows one width, and a gate of that rank."""
    made = peer.KimiLinearDeltaAttention(
        peer.KimiLinearConfig(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            layer_types=config.layer_types,
            linear_num_heads=config.linear_num_heads,
            linear_head_dim=config.linear_head_dim,
            linear_conv_kernel_dim=config.linear_conv_kernel_dim,
            rms_norm_eps=config.rms_norm_eps,
        ),
        LAYER,
    ).eval()
    weights = layer.state_dict()
    convolutions = [weights.pop(f"{name}_conv1d.weight") for name in "qkv"]
    for name in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log"):
        weights[f"forget_gate.{name}"] = weights.pop(name)
    weights["forget_gate.A_log"] = weights["forget_gate.A_log"].view(1, 1, -1, 1)
    made.load_state_dict({**weights, "conv1d.weight": torch.cat(convolutions)})
    return made


SQUARE = {"linear_value_head_dim": 12, "linear_output_gate_rank": 12}  # what transformers' layer can be


@pytest.mark.parametrize("T", [1, 5, 70])
def test_layer_agrees_with_transformers(peer, T):
    layer, config = layer_of(**SQUARE)
    x = torch.randn(2, T, config.hidden_size)
    assert_close(run(layer, config, x), peer_of(peer, layer, config)(x), absolute=0, relative=1e-5)


def test_layer_agrees_with_transformers_in_gradients(peer):
    """Within 1e-5 for each of the two; sums over all tokens, which cancel, are left to the comparison in float64."""
    layer, config = layer_of(**SQUARE)
    other, x = peer_of(peer, layer, config), torch.randn(2, 37, config.hidden_size)
    mine, theirs, weight = x.clone().requires_grad_(), x.clone().requires_grad_(), torch.randn_like(x)
    (run(layer, config, mine) * weight).sum().backward()
    (other(theirs) * weight).sum().backward()
    assert_close(mine.grad, theirs.grad, absolute=0, relative=2e-5, name="x")
    gradients = {name.removeprefix("forget_gate."): parameter.grad for name, parameter in other.named_parameters()}
    for name, parameter in layer.named_parameters():
        if name in gradients and name not in ("A_log", "dt_bias"):
            assert_close(parameter.grad, gradients[name], absolute=0, relative=2e-5, name=name)
    convolutions = torch.cat([getattr(layer, f"{name}_conv1d").weight.grad for name in "qkv"])
    assert_close(convolutions, gradients["conv1d.weight"], absolute=0, relative=2e-5, name="convolutions")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pieces", [(1,) * 9, (5, 1, 1, 2), (40, 1, 40), (2, 33)])
def test_layer_with_a_cache_is_one_run(shape, pieces):
    """Pieces shorter than the convolution's window, and on both sides of the loop's limit."""
    layer, config = layer_of(**SHAPES[shape])
    x, cache = torch.randn(2, sum(pieces), config.hidden_size), KdaHybridCache(config)
    with torch.no_grad():
        got = torch.cat([run(layer, config, piece, cache) for piece in x.split(pieces, 1)], 1)
    want = torch.stack([written_out(layer, row, config.linear_gate_lower_bound) for row in x])
    assert_close(got, want, absolute=0, relative=1e-5)


@pytest.mark.parametrize("form", ["pads", "seq_idx", "cu_seqlens", "pads and seq_idx"])
def test_layer_runs_each_document_by_itself(form):
    layer, config = layer_of()
    numbers = {
        "pads": torch.tensor([[0] * 30 + [1] * 10, [2] * 40, [3] * 1 + [0] * 39]),
        "seq_idx": torch.tensor([[1] * 35 + [2] * 5, [3] * 1 + [4] * 2 + [5] * 37]),
        "cu_seqlens": torch.tensor([[1] * 35 + [2] * 5, [3] * 1 + [4] * 2 + [5] * 37]),
        "pads and seq_idx": torch.tensor([[0] * 2 + [1] * 20 + [2] * 18, [3] * 1 + [4] * 33 + [0] * 6]),
    }[form]
    x = torch.randn(*numbers.shape, config.hidden_size)
    given = {}
    if "pads" in form:
        given["attention_mask"] = (numbers > 0).long()
    if "seq_idx" in form:
        given["seq_idx"] = numbers
    if form == "cu_seqlens":
        given["cu_seqlens"] = torch.tensor([0, 35, 40, 41, 43, 80])
    got = run(layer, config, x, **given)
    for number in range(1, int(numbers.max()) + 1):
        assert_close(got[numbers == number], written_out(layer, x[numbers == number]), absolute=0, relative=1e-5)
    assert (got[numbers == 0] == 0).all()


@pytest.mark.parametrize("value", [0.0, 1e4, float("inf"), float("nan")])
def test_layer_never_reads_a_pad(value):
    layer, config = layer_of()
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    x = torch.randn(2, 5, config.hidden_size)
    dirty = x.clone()
    dirty[mask == 0] = value
    dirty.requires_grad_()
    got = run(layer, config, dirty, attention_mask=mask)
    assert torch.equal(got, run(layer, config, x, attention_mask=mask))
    got.sum().backward()
    assert (dirty.grad[mask == 0] == 0).all()
    assert torch.isfinite(dirty.grad).all()


def test_layer_with_pads_and_a_cache_goes_on_where_the_text_ended():
    """Left pads in the first call, a pad among the new tokens of one row in the second."""
    layer, config = layer_of()
    cache, x = KdaHybridCache(config), torch.randn(2, 9, config.hidden_size)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
    pieces = [(0, 5), (5, 8), (8, 9)]
    got = [run(layer, config, x[:, a:b], cache, attention_mask=mask[:, :b]) for a, b in pieces]
    for row, keep in enumerate(mask.bool()):
        assert_close(torch.cat(got, 1)[row, keep], written_out(layer, x[row, keep]), absolute=0, relative=1e-5)


def test_layer_in_training_leaves_the_state_of_its_cache_alone():
    """A backward pass may still need it."""
    layer, config = layer_of()
    cache, x = KdaHybridCache(config), torch.randn(1, 6, config.hidden_size)
    run(layer, config, x, cache)
    state, window = cache.layers[LAYER].state, cache.layers[LAYER].window
    before = state.clone(), window.clone()
    run(layer, config, x, cache).sum().backward()
    assert torch.equal(state, before[0])
    assert torch.equal(window, before[1])


def test_layer_in_bfloat16_keeps_decay_and_norm_weights_in_float32():
    layer, config = layer_of()
    low = KimiDeltaAttention(config, LAYER).eval()
    low.load_state_dict(layer.state_dict())
    for name, module in low.named_modules():
        if isinstance(module, torch.nn.Linear | ShortConvolution):
            module.bfloat16()
            getattr(layer, name).weight.data = module.weight.data.float()
    x = torch.randn(1, 50, config.hidden_size).bfloat16()
    cache = KdaHybridCache(config)
    got = run(low, config, x, cache)
    assert got.dtype == torch.bfloat16
    assert cache.layers[LAYER].state.dtype == torch.float32
    assert cache.layers[LAYER].window.dtype == torch.bfloat16
    assert_close(got, written_out(layer, x[0]).unsqueeze(0), absolute=0, relative=3e-2)


@pytest.mark.parametrize("T", [5, 70])
def test_layer_runs_under_autocast(T):
    layer, config = layer_of()
    x = torch.randn(1, T, config.hidden_size)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(layer, config, x)
    got.float().sum().backward()
    assert_close(got, written_out(layer, x[0]).unsqueeze(0), absolute=0, relative=5e-2)
    for name, parameter in layer.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
