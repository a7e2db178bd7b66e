"""What a forward of the whole model takes and gives: outputs, dtypes, compilation, the other heads."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import (
    ALIGNED,
    GOLDEN_LOGITS,
    GRADIENTS,
    assert_close,
    forward_in_pieces,
    mask_of,
    padded,
    shared_model,
    tiny_config,
    tiny_model,
    token_ids,
    truth,
)

from modeling_kda import KdaHybridCache, KdaHybridForCausalLM, KdaHybridForSequenceClassification
from modeling_kda.compat_transformers import CACHE_NAME


@pytest.fixture
def model() -> KdaHybridForCausalLM:
    return shared_model()


# What comes out


def test_forward_returns_one_entry_a_layer(model):
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    ids = token_ids(6, rows=2)
    with torch.no_grad():
        out = other(ids, output_hidden_states=True, output_attentions=True, output_router_logits=True)
        embeds = other.get_input_embeddings()(ids)
        last = other.model(ids).last_hidden_state
    assert [x is None for x in out.attentions] == [kind == "linear_attention" for kind in model.config.layer_types]
    weights = out.attentions[2]
    assert weights.shape == (2, 4, 6, 6)
    assert_close(weights.sum(-1), torch.ones(2, 4, 6), 1e-5)
    assert len(out.hidden_states) == 5
    assert_close(out.hidden_states[0], embeds, 0)
    assert_close(out.hidden_states[-1], last, 0)
    assert [tuple(x.shape) for x in out.router_logits] == [(12, 8)] * 3


def test_forward_reads_what_to_return_from_the_config():
    model = tiny_model(output_hidden_states=True)
    assert len(model(token_ids(4)).hidden_states) == 5
    assert model(token_ids(4), output_hidden_states=False).hidden_states is None


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 4]), torch.tensor([5])], ids=str)
def test_forward_logits_to_keep_picks_tokens(model, keep):
    ids = token_ids(6, rows=2)
    with torch.no_grad():
        got, want = model(ids, logits_to_keep=keep).logits, model(ids).logits
    assert_close(got, want[:, -keep:] if isinstance(keep, int) else want[:, keep], 1e-5)


def test_forward_return_dict_false_gives_a_tuple(model):
    ids = token_ids(5)
    with torch.no_grad():
        loss, logits, *rest = model(ids, labels=ids, return_dict=False)
        assert_close(logits, model(ids).logits, 0)
        hidden, *_ = model.model(ids, return_dict=False, use_cache=False)
        assert_close(hidden, model.model(ids).last_hidden_state, 0)
    assert loss.ndim == 0
    assert len(rest) == 1
    assert rest[0].get_seq_length() == 5


@pytest.mark.parametrize("use_cache", [True, False, None])
@pytest.mark.parametrize("training", [True, False])
def test_forward_returns_a_cache_if_wanted(use_cache, training):
    model = tiny_model().train(training)
    cache = getattr(model(token_ids(4), use_cache=use_cache), CACHE_NAME)
    wanted = use_cache if use_cache is not None else not training
    assert (cache is not None) == wanted
    assert cache is None or cache.get_seq_length() == 4


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_forward_takes_the_cache_under_both_names(model, name):
    ids, cache = token_ids(9), KdaHybridCache(model.config)
    with torch.no_grad():
        model(ids[:, :5], **{name: cache})
        out = model(ids[:, 5:], **{name: cache})
        assert_close(out.logits, model(ids).logits[:, 5:])
    assert getattr(out, CACHE_NAME) is cache


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)], ids=str)
def test_forward_of_no_tokens_gives_empty_logits(model, shape):
    ids = torch.zeros(shape, dtype=torch.long)
    with torch.no_grad():
        assert model(ids).logits.shape == (*shape, 97)
        assert model(ids, attention_mask=torch.ones_like(ids)).logits.shape == (*shape, 97)


def test_forward_of_no_tokens_leaves_a_cache_as_it_was(model):
    ids, cache = token_ids(9, rows=2), KdaHybridCache(model.config)
    with torch.no_grad():
        model(ids[:, :5], cache=cache)
        assert model(ids[:, :0], cache=cache).logits.shape == (2, 0, 97)
        assert_close(model(ids[:, 5:], cache=cache).logits, model(ids).logits[:, 5:])


def test_forward_ignores_arguments_of_other_libraries(model):
    ids = token_ids(6)
    with torch.no_grad():
        odd = model(ids, cache_position=torch.arange(6), fused_lm_head=False, token_type_ids=torch.zeros_like(ids))
        assert_close(odd.logits, model(ids).logits, 0)


def test_forward_of_embeddings_equals_token_ids(model):
    ids = token_ids(7, rows=2)
    with torch.no_grad():
        assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits, 0)


def test_forward_keeps_no_tensor_on_a_module(model):
    other = copy.deepcopy(model)
    before = {name: set(vars(module)) for name, module in other.named_modules()}
    other.train()(token_ids(40, rows=2), attention_mask=mask_of([0] * 3 + [1] * 37, [1] * 40)).logits.sum().backward()
    for name, module in other.named_modules():
        assert set(vars(module)) == before[name], name
        assert not any(isinstance(x, torch.Tensor) for x in vars(module).values()), name


def test_forward_never_reads_the_weight_of_a_replaced_linear_layer(model):
    """Quantised layers and adapters take the place of `nn.Linear`: their product counts, not their `weight`."""

    class Sealed(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.hidden = torch.nn.Parameter(linear.weight.detach().clone())
            self.in_features, self.out_features = linear.in_features, linear.out_features

        @property
        def weight(self):
            raise AssertionError("`weight` was read")

        def forward(self, x):
            return F.linear(x, self.hidden)

    other, ids = copy.deepcopy(model), token_ids(44, rows=2)
    for name, module in list(other.named_modules()):
        if type(module) is torch.nn.Linear:
            parent, _, last = name.rpartition(".")
            setattr(other.get_submodule(parent), last, Sealed(module))
    with torch.no_grad():
        want = model(ids).logits
    logits, _ = forward_in_pieces(other, ids, [40, 41])
    assert_close(logits, want)
    other(ids, labels=ids, use_cache=False).loss.backward()
    assert all(x.grad is not None for x in other.parameters())


# Precision


@pytest.mark.parametrize("how", ["load", "autocast"])
def test_router_tells_near_biases_apart_in_bfloat16(how, tmp_path):
    source = tiny_model(norm_topk_prob=False, **ALIGNED)
    with torch.no_grad():
        for layer in source.model.layers[1:]:
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.e_score_correction_bias.copy_(8 + 1e-3 * torch.arange(8))
    source.save_pretrained(tmp_path)
    dtype = torch.bfloat16 if how == "load" else torch.float32
    model = KdaHybridForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    chosen = []
    model.model.layers[3].mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        model(token_ids(6))
    _, weights, experts = chosen[0]
    assert experts.sort(-1).values.tolist() == [[6, 7]] * 6
    assert_close(weights, torch.full((6, 2), 0.5), 0)  # of the scores without the bias


def test_router_multiplies_in_float32_under_autocast(model):
    seen = []
    router = model.model.layers[1].mlp.gate
    handle = router.register_forward_hook(lambda module, args, output: seen.append((args[0], output[0])))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(token_ids(6))
    handle.remove()
    x, logits = seen[0]
    assert logits.dtype == torch.float32
    assert_close(logits, x.double() @ router.weight.double().T, 0, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forward_under_autocast_is_close_to_float32(dtype):
    model = tiny_model(num_experts=None)  # without experts, whose choice jumps
    ids = token_ids(40)
    with torch.no_grad():
        want = model(ids).logits
        with torch.autocast("cpu", dtype):
            got = model(ids).logits
    assert (got.float() - want).norm() / want.norm() < 0.05
    assert math.isfinite(got.float().sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sizes", [ALIGNED, {}], ids=["aligned", "odd"])
def test_forward_and_backward_run_in_every_dtype(dtype, sizes, tmp_path):
    source, ids = tiny_model(**sizes), token_ids(9)
    source.save_pretrained(tmp_path)
    model = KdaHybridForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(x.grad.isfinite().all() for x in model.parameters())
    with torch.no_grad():
        assert_close(loss, source(ids, labels=ids).loss, 0.2)


@pytest.mark.parametrize("length", [5, 130])
def test_forward_survives_the_strongest_decay(length):
    model, ids = tiny_model(), token_ids(length)
    with torch.no_grad():
        for layer in model.model.layers:
            if layer.linear:
                layer.self_attn.A_log.fill_(4.0)
                layer.self_attn.dt_bias.fill_(3.0)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.isfinite()
    assert all(x.grad.isfinite().all() for x in model.parameters())
    with torch.no_grad():
        assert_close(model(ids).logits, truth(model, ids), GOLDEN_LOGITS)


# Compilation


def test_forward_compiles_without_a_break_and_so_does_its_backward():
    # In transformers 5.17, the backward of the grouped product on a CPU branches on sizes.
    experts = "batched_mm" if transformers.__version__.startswith("5.17.") else "grouped_mm"
    ids = token_ids(40, rows=2)
    plain, other = (
        tiny_model(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]) for _ in range(2)
    )
    other.set_experts_implementation(experts)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    losses = [m(ids, labels=ids, use_cache=False).loss for m in (plain, compiled)]
    assert_close(losses[1], losses[0], 1e-5)
    for loss in losses:
        loss.backward()
    assert other.model.layers[0].self_attn.A_log.grad is not None
    for (name, want), got in zip(plain.named_parameters(), other.parameters()):
        assert_close(got.grad, want.grad, 0, GRADIENTS, name)


# The other heads


@pytest.mark.parametrize("side", ["left", "right"])
def test_sequence_classification_reads_the_last_real_token(side):
    torch.manual_seed(0)
    model = KdaHybridForSequenceClassification(tiny_config(num_labels=3)).eval()
    short, long = token_ids(4), token_ids(9, seed=2)
    mask = [0] * 5 + [1] * 4 if side == "left" else [1] * 4 + [0] * 5
    batch = torch.cat([padded(short, mask, junk=0), long])
    with torch.no_grad():
        got = model(batch, attention_mask=mask_of(mask, [1] * 9)).logits
        want = torch.cat([model.score(model.model(x).last_hidden_state[:, -1]) for x in (short, long)])
    assert_close(got, want)
    loss = model(batch, attention_mask=mask_of(mask, [1] * 9), labels=torch.tensor([0, 2])).loss
    assert_close(loss, F.cross_entropy(want, torch.tensor([0, 2])), 1e-4)


def test_model_gives_trainers_its_parts(model):
    assert isinstance(model.get_output_embeddings(), torch.nn.Linear)
    ids = token_ids(5)
    with torch.no_grad():
        hidden = model.base_model(ids).last_hidden_state
        assert_close(model.get_output_embeddings()(hidden), model(ids).logits, 0)
    other = copy.deepcopy(model)
    for part in (other, other.model):
        fresh = torch.nn.Embedding(97, 60)
        part.set_input_embeddings(fresh)
        assert part.get_input_embeddings() is fresh
