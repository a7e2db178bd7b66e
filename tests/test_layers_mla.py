"""layers_mla.py against transformers' own layer with the same weights, on every path."""

import pytest
import torch
from helpers import TOLERANCE, assert_close, tiny_config
from torch import Tensor, nn

from modeling_kda import KdaHybridCache, KdaHybridConfig
from modeling_kda.layers_context import ABSORB_UP_TO, ForwardContext
from modeling_kda.layers_mla import MultiHeadLatentAttention


peer = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
LAYER = 0
FLEX_WARNINGS = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:_compile flag")
SHAPES = {  # queries and keys are 24 wide
    "narrow values": {"v_head_dim": 18},
    "wide values": {"v_head_dim": 31},
    "equal widths": {"v_head_dim": 24},
    "low-rank queries": {"q_lora_rank": 14},
    "output gate": {"attention_output_gate": True},
    "no shared key": {"qk_rope_head_dim": 0},
    "one head": {"num_attention_heads": 1},
}


def layer_of(attention: str = "eager", **changes) -> tuple[MultiHeadLatentAttention, KdaHybridConfig]:
    """A layer with random weights of a size that shows, in eval mode."""
    torch.manual_seed(0)
    config = tiny_config(layer_types=["full_attention"] * 4, **changes)
    config._attn_implementation = attention
    layer = MultiHeadLatentAttention(config, LAYER).eval()
    with torch.no_grad():
        for x in layer.parameters():
            x.normal_(std=0.3) if x.ndim == 2 else x.add_(0.3 * torch.randn_like(x))
    return layer, config


def run(layer: MultiHeadLatentAttention, config: KdaHybridConfig, x: Tensor, cache=None, **given) -> Tensor:
    with torch.compiler.set_stance("force_eager"):  # to compile flex attention takes a minute on a CPU
        y = layer(x, ForwardContext(config, x, cache=cache, **given), cache)[0]
    if cache is not None:
        cache.advance(x.shape[1])
    return y


class Peer(nn.Module):
    """transformers' layer with the same weights. It has no output gate: that is applied before its `o_proj`."""

    def __init__(self, layer: MultiHeadLatentAttention, config: KdaHybridConfig):
        super().__init__()
        names = "hidden_size num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
        theirs = peer.KimiLinearConfig(
            **{name: getattr(config, name) for name in names.split()},
            num_key_value_heads=config.num_attention_heads,
            num_hidden_layers=4,
        )
        theirs._attn_implementation = "eager"
        self.attention = peer.KimiLinearAttention(theirs, LAYER).eval()
        weights = {name: x for name, x in layer.state_dict().items() if not name.startswith("g_proj")}
        self.attention.load_state_dict(weights)
        self.gate = layer.g_proj if config.attention_output_gate else None

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`[B, T, hidden]` to the same, and weights; `allowed` `[B, T, T]`, default: causal."""
        T = x.shape[1]
        allowed = torch.ones(1, T, T).tril().bool() if allowed is None else allowed
        mask = torch.zeros(allowed.shape, dtype=x.dtype).masked_fill(~allowed, torch.finfo(x.dtype).min).unsqueeze(1)
        if self.gate is None:
            return self.attention(x, mask)
        hook = self.attention.o_proj.register_forward_pre_hook(lambda _, o: (o[0] * torch.sigmoid(self.gate(x)),))
        try:
            return self.attention(x, mask)
        finally:
            hook.remove()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", [1, 7, 45])
def test_layer_agrees_with_transformers(T, shape, attention):
    layer, config = layer_of(attention, **SHAPES[shape])
    x = torch.randn(2, T, config.hidden_size)
    assert_close(run(layer, config, x), Peer(layer, config)(x)[0], absolute=0, relative=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_agrees_with_transformers_in_gradients(shape, attention):
    layer, config = layer_of(attention, **SHAPES[shape])
    mine = torch.randn(2, 9, config.hidden_size).requires_grad_()
    theirs, weight, other = mine.detach().clone().requires_grad_(), torch.randn_like(mine), Peer(layer, config)
    (run(layer, config, mine) * weight).sum().backward()
    got = {name: x.grad.clone() for name, x in layer.named_parameters()}
    layer.zero_grad()
    (other(theirs)[0] * weight).sum().backward()
    assert_close(mine.grad, theirs.grad, absolute=0, relative=1e-5, name="x")
    want = {name: x.grad for name, x in other.attention.named_parameters()}
    if config.attention_output_gate:
        want["g_proj.weight"] = layer.g_proj.weight.grad
    assert got.keys() == want.keys()
    for name in got:
        assert_close(got[name], want[name], absolute=0, relative=1e-5, name=name)


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_agrees_with_transformers_where_nothing_is_padded(monkeypatch, shape):
    monkeypatch.setattr(MultiHeadLatentAttention, "_takes_unequal", lambda *_: True)
    monkeypatch.setattr(nn.functional, "pad", None)
    test_layer_agrees_with_transformers_in_gradients(shape, "sdpa")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("widths", [(128, 64, 128), (64, 0, 128)])
def test_layer_on_a_gpu_is_near_float64(widths):
    """Of the widths of Kimi, cuDNN takes the values as they are."""
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    layer, config = layer_of("sdpa", **dict(zip(names, widths)), hidden_size=64, kv_lora_rank=64)
    exact, plain = layer_of("eager", **dict(zip(names, widths)), hidden_size=64, kv_lora_rank=64)
    asked, asks = [], layer._takes_unequal
    layer._takes_unequal = lambda *given: asked.append(asks(*given)) or asked[-1]
    gradients = []
    for one, its, device, dtype in ((layer, config, "cuda", torch.bfloat16), (exact, plain, "cpu", torch.float64)):
        one.to(device, dtype)
        one.load_state_dict({name: x.bfloat16() for name, x in exact.state_dict().items()})
        x = torch.randn(2, 300, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(device, dtype)
        x.requires_grad_()
        y = run(one, its, x)
        y.square().sum().backward()
        gradients.append([y.detach(), x.grad, *(p.grad for p in one.parameters())])
    assert len(asked) == 1
    if torch.cuda.get_device_capability()[0] == 9 and widths == (128, 64, 128):
        assert asked == [True]
    for got, want in zip(*gradients):
        assert_close(got.cpu().double(), want, absolute=0, relative=2 * TOLERANCE[torch.bfloat16])


@FLEX_WARNINGS
def test_layer_agrees_with_transformers_on_flex_attention():
    layer, config = layer_of("flex_attention")
    x = torch.randn(2, 40, config.hidden_size)
    mask = torch.ones(2, 40).long()
    mask[0, :5] = 0
    with torch.no_grad():
        got = run(layer, config, x, attention_mask=mask)
    want, _ = Peer(layer, config)(x, torch.ones(40, 40).tril().bool() & mask[:, None].bool())
    assert_close(got[mask.bool()], want[mask.bool()], absolute=0, relative=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_gradients", [False, True])
def test_layer_with_a_cache_is_one_run(shape, attention, with_gradients):
    """Absorbed with 1, 3 and the most tokens it takes, expanded with one more."""
    layer, config = layer_of(attention, **SHAPES[shape])
    pieces = (5, 1, 3, ABSORB_UP_TO, ABSORB_UP_TO + 1, 1)
    x, cache = torch.randn(2, sum(pieces), config.hidden_size), KdaHybridCache(config)
    with torch.set_grad_enabled(with_gradients):
        got = torch.cat([run(layer, config, piece, cache) for piece in x.split(pieces, 1)], 1)
    assert_close(got, Peer(layer, config)(x)[0], absolute=0, relative=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_absorbed_attention_has_the_gradients_of_one_run(shape):
    layer, config = layer_of(**SHAPES[shape])
    x, cache = torch.randn(2, 9, config.hidden_size), KdaHybridCache(config)
    weight = torch.randn_like(x)
    got = torch.cat([run(layer, config, piece, cache) for piece in x.split((4, 5), 1)], 1)
    named = dict(layer.named_parameters())
    mine = torch.autograd.grad((got * weight).sum(), named.values())
    theirs = torch.autograd.grad((run(layer, config, x) * weight).sum(), named.values())
    for name, got, want in zip(named, mine, theirs):
        assert_close(got, want, absolute=0, relative=1e-5, name=name)


def test_layer_with_a_cache_runs_the_hooks_of_its_projection():
    layer, config = layer_of()
    x, cache, seen = torch.randn(1, 4, config.hidden_size), KdaHybridCache(config), []
    layer.kv_b_proj.register_forward_hook(lambda module, inputs, output: seen.append(1) or 2 * output)
    with torch.no_grad():
        got = torch.cat([run(layer, config, piece, cache) for piece in x.split((3, 1), 1)], 1)
        assert len(seen) == 2
        assert_close(got, run(layer, config, x), absolute=0, relative=1e-5)


class Adapted(nn.Module):
    """What an adapter puts in a linear layer's place: `weight` alone is not its matrix."""

    def __init__(self, base: nn.Linear, delta: Tensor):
        super().__init__()
        self.base, self.delta = base, delta

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.delta.T


class AdaptedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", ["module", "subclass"])
def test_layer_with_a_cache_goes_through_an_adapter(kind):
    layer, config = layer_of()
    matrix = layer.kv_b_proj.weight.detach()
    if kind == "module":
        delta = 0.3 * torch.randn_like(matrix)
        changed, whole = Adapted(layer.kv_b_proj, delta), matrix + delta
    else:
        changed, whole = AdaptedLinear(matrix.shape[1], matrix.shape[0], bias=False), 2 * matrix
        changed.load_state_dict(layer.kv_b_proj.state_dict())
    layer.kv_b_proj.weight = nn.Parameter(whole)
    other = Peer(layer, config)
    layer.kv_b_proj.weight = nn.Parameter(matrix)
    layer.kv_b_proj = changed
    x, cache = torch.randn(2, 8, config.hidden_size), KdaHybridCache(config)
    mask = torch.ones(2, 8).long()
    mask[0, :2] = 0
    pieces = [(0, 5), (5, 6), (6, 8)]
    got = torch.cat([run(layer, config, x[:, a:b], cache, attention_mask=mask[:, :b]) for a, b in pieces], 1)
    want, _ = other(x, torch.ones(8, 8).tril().bool() & mask[:, None].bool())
    assert_close(got[mask.bool()], want[mask.bool()], absolute=0, relative=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("pieces", [(8,), (5, 1, 2), (4, 4 + ABSORB_UP_TO)])
def test_layer_never_looks_at_a_pad(pieces, attention):
    layer, config = layer_of(attention)
    T = sum(pieces)
    x, cache = torch.randn(3, T, config.hidden_size), KdaHybridCache(config)
    mask = torch.ones(3, T).long()
    mask[0, :3] = 0
    mask[1, 2] = mask[1, 5] = 0
    x[mask == 0] = 1e4
    got, start = [], 0
    for piece in x.split(pieces, 1):
        start += piece.shape[1]
        got.append(run(layer, config, piece, cache, attention_mask=mask[:, :start]))
    got = torch.cat(got, 1)
    other = Peer(layer, config)
    for row, keep in enumerate(mask.bool()):
        want, _ = other(x[row, keep].unsqueeze(0))
        assert_close(got[row, keep], want[0], absolute=0, relative=1e-5)


@FLEX_WARNINGS
@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("form", ["seq_idx", "position_ids", "cu_seqlens"])
def test_layer_runs_each_document_by_itself(form, attention):
    layer, config = layer_of(attention)
    x = torch.randn(2, 9, config.hidden_size)
    given = {
        "seq_idx": torch.tensor([[1] * 4 + [2] * 5, [3] * 9]),
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], list(range(9))]),
        "cu_seqlens": torch.tensor([0, 4, 9, 18]),
    }
    with torch.no_grad():
        got, other = run(layer, config, x, **{form: given[form]}), Peer(layer, config)
    for row, start, end in ((0, 0, 4), (0, 4, 9), (1, 0, 9)):
        want, _ = other(x[row : row + 1, start:end])
        assert_close(got[row : row + 1, start:end], want, absolute=0, relative=1e-5)


def test_layer_returns_the_attention_weights():
    """Of the written-out attention, and of the absorbed."""
    layer, config = layer_of()
    x, cache = torch.randn(2, 7, config.hidden_size), KdaHybridCache(config)
    _, want = Peer(layer, config)(x)
    for start, end in ((0, 4), (4, 6), (6, 7)):
        piece = x[:, start:end]
        _, got = layer(piece, ForwardContext(config, piece, cache=cache, output_attentions=True), cache)
        cache.advance(end - start)
        assert_close(got, want[:, :, start:end, :end], absolute=1e-6)


@pytest.mark.parametrize("past", [0, 4])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_layer_drops_attention_weights_in_training_only(past, attention):
    layer, config = layer_of(attention, attention_dropout=0.5)
    x = torch.randn(1, past + 3, config.hidden_size)

    def last() -> Tensor:
        torch.manual_seed(3)
        cache = KdaHybridCache(config)
        if past:
            run(layer, config, x[:, :past], cache)
        return run(layer, config, x[:, past:], cache)

    want = Peer(layer, config)(x)[0][:, past:]
    assert_close(last(), want, absolute=0, relative=1e-5)
    layer.train()
    assert (last() - want).abs().max() > 0.01 * want.abs().max()


@pytest.mark.parametrize("T", [1, 3, ABSORB_UP_TO + 1])
def test_layer_in_bfloat16_after_a_past_is_near_transformers_in_float32(T):
    layer, config = layer_of()
    low, _ = layer_of()
    low.bfloat16()
    layer.load_state_dict(low.state_dict())  # the rounded weights
    x = torch.randn(2, 5 + T, config.hidden_size).bfloat16()
    cache = KdaHybridCache(config)
    with torch.no_grad():
        run(low, config, x[:, :5], cache)
        got = run(low, config, x[:, 5:], cache)
    assert got.dtype == torch.bfloat16
    assert_close(got, Peer(layer, config)(x.float())[0][:, 5:], absolute=0, relative=3e-2)
