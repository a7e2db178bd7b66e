"""layers_attnres.py: the mixture against its formula, and the blocks of the whole model against a plain loop."""

import copy

import pytest
import torch
from helpers import assert_close, k3_model, tiny_model, token_ids
from torch import Tensor

from modeling_kda import layers_attnres, modeling_kda_hybrid, use_backend
from modeling_kda.layers_attnres import MixWeight, mix
from modeling_kda.layers_context import ForwardContext


EPS = 1e-5
WIDTH = 22


def weights_of(dtype: torch.dtype = torch.float32, width: int = WIDTH) -> tuple[MixWeight, MixWeight]:
    """A norm's weight and a query, of a size that prefers some candidates."""
    torch.manual_seed(0)
    norm, query = MixWeight(width), MixWeight(1, width)
    with torch.no_grad():
        norm.weight.normal_(1, 0.3)
        query.weight.normal_(0, 0.5)
    return norm.to(dtype), query.to(dtype)


def candidates_of(count: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 7, WIDTH)):
    """Random candidates of unlike sizes."""
    generator = torch.Generator().manual_seed(count)
    return tuple((1 + 2 * i) * torch.randn(shape, generator=generator, dtype=dtype) for i in range(count))


def plain(candidates, norm: Tensor, query: Tensor, eps: float = EPS) -> Tensor:
    """`sum_i softmax_i(<x_i / rms(x_i), norm * query>) x_i` in float64."""
    x = torch.stack([c.double() for c in candidates])
    unit = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    scores = (unit * (norm.double().flatten() * query.double().flatten())).sum(-1)
    return (scores.softmax(0).unsqueeze(-1) * x).sum(0)


def mixed(candidates, norm: MixWeight, query: MixWeight) -> Tensor:
    return mix(candidates, norm, query, EPS)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_mix_is_its_formula(count, dtype):
    norm, query = weights_of(dtype)
    candidates = candidates_of(count, dtype)
    got = mixed(candidates, norm, query)
    assert got.dtype == dtype
    relative = 1e-13 if dtype == torch.float64 else 2e-6
    assert_close(got, plain(candidates, norm.weight, query.weight), 0, relative)


@pytest.mark.parametrize("shape", [(1, 0, WIDTH), (0, 3, WIDTH), (1, 1, WIDTH)], ids=str)
def test_mix_accepts_any_number_of_tokens(shape):
    norm, query = weights_of()
    candidates = candidates_of(3, shape=shape)
    assert_close(mixed(candidates, norm, query), plain(candidates, norm.weight, query.weight), 1e-5)


def test_mix_adds_eps_to_the_mean_of_squares():
    norm, query = weights_of()
    small = tuple(1e-3 * x for x in candidates_of(3))
    got = mix(small, norm, query, 1e-5)
    assert_close(got, plain(small, norm.weight, query.weight, 1e-5), 0, 1e-5)
    other = plain(small, norm.weight, query.weight, 1e-6)
    assert (got - other).abs().max() > 0.01 * other.abs().max()


def test_mix_of_zeros_is_zero_and_has_finite_gradients():
    norm, query = weights_of()
    candidates = tuple(torch.zeros(1, 3, WIDTH, requires_grad=True) for _ in range(3))
    got = mixed(candidates, norm, query)
    assert not got.any()
    got.sum().backward()
    for x in candidates:
        assert_close(x.grad, torch.full_like(x, 1 / 3), 1e-6)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_mix_has_the_exact_gradient(count):
    norm, query = weights_of(torch.float64, 5)
    candidates = tuple(x.requires_grad_() for x in candidates_of(count, torch.float64, (2, 3, 5)))

    def function(a: Tensor, b: Tensor, *x: Tensor) -> Tensor:
        return mix(x, lambda: a, lambda: b.view(-1), EPS)

    assert torch.autograd.gradcheck(function, (norm.weight, query.weight, *candidates))


@pytest.mark.parametrize("count", [2, 5])
def test_mix_has_the_gradients_of_its_formula_in_float32(count):
    norm, query = weights_of()
    candidates = tuple(x.requires_grad_() for x in candidates_of(count))
    leaves = (*candidates, norm.weight, query.weight)
    weights = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(9))
    got = torch.autograd.grad((mixed(candidates, norm, query) * weights).sum(), leaves)
    want = torch.autograd.grad((plain(candidates, norm.weight, query.weight) * weights).sum(), leaves)
    for one, other in zip(got, want):
        assert_close(one, other, 0, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mix_of_one_candidate_returns_it_bit_for_bit(dtype):
    norm, query = weights_of(dtype)
    x = candidates_of(1)[0].to(dtype).requires_grad_()
    got = mixed((x,), norm, query)
    assert torch.equal(got, x)
    weights = torch.randn_like(got)
    (got * weights).sum().backward()
    assert torch.equal(x.grad, weights)
    for weight in (norm.weight, query.weight):
        assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("size", [1, 3 * WIDTH, 10 * 3 * WIDTH])
def test_mix_in_slices_is_the_same(size, monkeypatch):
    """Of one token at a time, and of numbers that do not divide the tokens."""
    norm, query = weights_of()
    candidates = tuple(x.requires_grad_() for x in candidates_of(3))
    leaves = (*candidates, norm.weight, query.weight)

    def run() -> tuple[Tensor, ...]:
        out = mixed(candidates, norm, query)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    want = run()
    monkeypatch.setattr(layers_attnres, "SLICE_CPU", size)
    got = run()
    for one, other in zip(got[:4], want[:4]):
        assert_close(one, other, 0, 1e-6)
    for one, other in zip(got[4:], want[4:]):  # sums over the tokens, in another order
        assert_close(one, other, 0, 1e-5)


def test_mix_takes_candidates_and_gradients_that_are_not_contiguous():
    norm, query = weights_of()
    wide = [torch.randn(7, 2, WIDTH, requires_grad=True) for _ in range(3)]
    candidates = tuple(x.transpose(0, 1) for x in wide)
    got = mixed(candidates, norm, query)
    want = plain(candidates, norm.weight, query.weight)
    assert_close(got, want, 0, 2e-6)
    weights = torch.randn(7, 2, WIDTH).transpose(0, 1)
    for one, other in zip(*(torch.autograd.grad((x * weights).sum(), wide) for x in (got, want))):
        assert_close(one, other, 0, 1e-5)


def test_mix_in_bfloat16_rounds_once():
    norm, query = weights_of()
    candidates = tuple(x.bfloat16() for x in candidates_of(4, shape=(5, 60, WIDTH)))
    got = mixed(candidates, norm, query)
    want = plain(candidates, norm.weight, query.weight)
    assert got.dtype == torch.bfloat16
    # In float32 inside: only a number that float32 puts on the other side of a border rounds to the other neighbour.
    assert (got != want.bfloat16()).double().mean() < 1e-3
    assert_close(got, want, 0, 2**-8)
    assert all(x.dtype == torch.float32 for x in (norm(), query()))


def test_mix_gradients_in_bfloat16_are_those_of_float32_rounded_once():
    norm, query = weights_of(torch.bfloat16)
    candidates = tuple(x.bfloat16().requires_grad_() for x in candidates_of(3, shape=(5, 60, WIDTH)))
    weights = torch.randn(5, 60, WIDTH).bfloat16()
    leaves = (*candidates, norm.weight, query.weight)
    got = torch.autograd.grad((mixed(candidates, norm, query) * weights).sum(), leaves)
    want = torch.autograd.grad((plain(candidates, norm.weight, query.weight) * weights.double()).sum(), leaves)
    for one, other in zip(got, want):
        assert one.dtype == torch.bfloat16
        assert_close(one, other, 0, 2**-8)


def test_mix_keeps_nothing_for_the_way_back_but_what_it_was_given():
    norm, query = weights_of()
    candidates, saved = tuple(x.requires_grad_() for x in candidates_of(4)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        mixed(candidates, norm, query)
    given = {x.data_ptr() for x in candidates}
    assert given == {x.data_ptr() for x in saved if x.shape == candidates[0].shape}
    assert all(x.numel() <= WIDTH for x in saved if x.data_ptr() not in given)


# The whole model


BLOCKS = dict(
    num_hidden_layers=7,
    layer_types=["linear_attention", "linear_attention", "full_attention"] * 2 + ["full_attention"],
    attn_res_block_size=3,
)


def exact(model):
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")
    return model


def attend(layer, x: Tensor, context: ForwardContext) -> Tensor:
    out = layer.self_attn(x, context, None)
    return out if layer.linear else out[0]


def think(layer, x: Tensor) -> Tensor:
    out = layer.mlp(x)
    return out[0] if layer.sparse else out


def by_hand(model, ids: Tensor) -> tuple[Tensor, list[Tensor], list[list[Tensor]]]:
    """Logits, the sum that each layer leaves, and the finished blocks that it sees, as Attention Residuals define them
    with blocks of whole layers: the bank is filled at a block's first layer, once its attention has read."""
    base, size = model.model, model.config.attn_res_block_size
    total, bank, totals, banks = base.embed_tokens(ids), [], [], []
    context = ForwardContext(model.config, total)

    def read(norm: MixWeight, query: MixWeight) -> Tensor:
        return plain([*bank, total], norm.weight, query.weight, model.config.rms_norm_eps)

    for index, layer in enumerate(base.layers):
        h = read(layer.self_attention_res_norm, layer.self_attention_res_proj) if bank else total
        starts = index % size == 0
        if starts:
            bank.append(total)
        a = attend(layer, layer.input_layernorm(h), context)
        total = a if starts else total + a
        h = read(layer.mlp_res_norm, layer.mlp_res_proj)
        total = total + think(layer, layer.post_attention_layernorm(h))
        totals.append(total)
        banks.append(list(bank))
    x = base.norm(read(base.output_attn_res_norm, base.output_attn_res_proj))
    return model.lm_head(x), [*totals[:-1], x], banks


@pytest.mark.parametrize("size", [1, 2, 3, 7, 12])
def test_forward_is_a_plain_loop_over_blocks(size):
    model, ids = exact(k3_model(**{**BLOCKS, "attn_res_block_size": size})), token_ids(9, rows=2)
    with torch.no_grad(), use_backend("reference"):
        out = model(ids, output_hidden_states=True)
        logits, states, banks = by_hand(model, ids)
    assert_close(out.logits, logits, 0, 1e-10)
    assert torch.equal(out.hidden_states[0], model.model.embed_tokens(ids))
    for i, (got, want) in enumerate(zip(out.hidden_states[1:], states, strict=True)):
        assert_close(got, want, 0, 1e-10, name=f"layer {i}")
    assert len(banks[-1]) == -(-7 // size)


def test_forward_reads_the_blocks_that_are_finished_and_never_pushes_the_last(monkeypatch):
    """The candidates of every mixture: of layer l's attention, of its MLP, and of the output."""
    model, counts = k3_model(**BLOCKS), []

    def watched(candidates, *args):
        counts.append(len(candidates))
        return mix(candidates, *args)

    monkeypatch.setattr(modeling_kda_hybrid, "mix", watched)
    with torch.no_grad():
        model(token_ids(5))
    want = []
    for index in range(7):
        want += [-(-index // 3) + 1, index // 3 + 2]
    assert counts == [*want, 3 + 1]  # the embeddings and two blocks in the bank, and the last, of one layer, beside it


def test_forward_uses_every_weight_of_the_mixtures_but_the_first_layer_s():
    """Layer 0 has one candidate. Its weights are stored and change nothing."""
    model, ids = k3_model(**BLOCKS), token_ids(6, rows=2)
    model(ids, labels=ids, use_cache=False).loss.backward()
    for name, x in model.named_parameters():
        if "res_norm" in name or "res_proj" in name:
            assert bool(x.grad.any()) != name.startswith("model.layers.0.self_attention_res_"), name
    assert sum("res_norm" in name for name, _ in model.named_parameters()) == 2 * 7 + 1


def test_forward_adds_ordinary_residuals_without_blocks():
    model, ids = exact(k3_model(attn_res_block_size=None)), token_ids(9, rows=2)
    assert not [name for name, _ in model.named_parameters() if "res_" in name.rsplit(".", 2)[-2]]
    base = model.model
    with torch.no_grad(), use_backend("reference"):
        x = base.embed_tokens(ids)
        context = ForwardContext(model.config, x)
        for layer in base.layers:
            x = x + attend(layer, layer.input_layernorm(x), context)
            x = x + think(layer, layer.post_attention_layernorm(x))
        assert_close(model(ids).logits, model.lm_head(base.norm(x)), 0, 1e-10)


def test_fresh_mixtures_weigh_all_candidates_alike():
    config = k3_model().config
    model = type(tiny_model())(config)
    for name, x in model.named_parameters():
        if "res_norm" in name or "res_proj" in name:
            assert torch.equal(x, torch.full_like(x, float("norm" in name))), name
    layer, candidates = model.model.layers[2], candidates_of(3, shape=(1, 4, 60))
    got = mix(candidates, layer.mlp_res_norm, layer.mlp_res_proj, EPS)
    assert_close(got, sum(candidates) / 3, 0, 1e-6)
