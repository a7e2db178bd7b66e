"""Kimi K3 as a whole: layers against their formulas, slips that move logits little, generation, training, adapters."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    GRADIENTS,
    assert_close,
    forward_in_pieces,
    k3_config,
    k3_model,
    mask_of,
    padded,
    token_ids,
    truth,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor

from modeling_kda import KdaCall, KdaHybridCache, KdaHybridForCausalLM, kda, optimizer_groups, use_backend
from modeling_kda.layers_context import ForwardContext
from modeling_kda.layers_kda import KimiDeltaAttention
from modeling_kda.layers_mla import MultiHeadLatentAttention
from modeling_kda.layers_mlp import Router
from modeling_kda.weights_kda import MXFP4_CONFIG


GREEDY = {"do_sample": False, "pad_token_id": 0}


@functools.cache
def shared_model() -> KdaHybridForCausalLM:
    """Never changed."""
    return k3_model()


@pytest.fixture
def model() -> KdaHybridForCausalLM:
    return shared_model()


def packed_model(**changes) -> KdaHybridForCausalLM:
    """Random codes, and scales around 2^-4."""
    model = k3_model(packed_experts=True, **changes)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.dtype == torch.uint8:
                x.copy_(torch.randint(*((122, 125) if "scale" in name else (0, 256)), x.shape))
    return model


def gradients(model) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.requires_grad}


# One layer of each kind against its formulas


def random_layer(kind, config, size: float = 0.3):
    torch.manual_seed(0)
    layer = kind(config, 0).double()
    with torch.no_grad():
        for name, x in layer.named_parameters():
            x.normal_(1 if "norm" in name else 0, size)
    return layer


def kda_by_hand(layer: KimiDeltaAttention, n: Tensor) -> Tensor:
    """One row `[T, D]`, token by token: Kimi K3's bounded gate, full-rank output gate and gated norm."""
    (heads, keys), (_, values), length = layer.keys, layer.values, len(n)

    def stream(name: str, width: int) -> Tensor:
        x = F.pad((n @ getattr(layer, f"{name}_proj").weight.T).T, (3, 0))  # [C, 3 + T]
        taps = getattr(layer, f"{name}_conv1d").weight[:, 0]
        y = sum(taps[:, i, None] * x[:, i : i + length] for i in range(4))  # tap 3 is the current token's
        return (y * torch.sigmoid(y)).T.reshape(length, heads, width)

    q, k, v = stream("q", keys), stream("k", keys), stream("v", values)
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    u = (n @ layer.f_a_proj.weight.T @ layer.f_b_proj.weight.T + layer.dt_bias).view(length, heads, keys)
    g = -5 * torch.sigmoid(layer.A_log.exp()[:, None] * u)
    beta = torch.sigmoid(n @ layer.b_proj.weight.T)
    state, outs = n.new_zeros(heads, keys, values), []
    for t in range(length):
        state = g[t].exp().unsqueeze(-1) * state
        rest = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * rest)
        outs.append(torch.einsum("hkv,hk->hv", state, q[t] * keys**-0.5))
    o = torch.stack(outs)
    o = o / (o.square().mean(-1, keepdim=True) + layer.o_norm.eps).sqrt() * layer.o_norm.weight
    o = o * torch.sigmoid(n @ layer.g_proj.weight.T).view(length, heads, values)
    return o.flatten(1) @ layer.o_proj.weight.T


@pytest.mark.parametrize("size", [1.0, 1e-2], ids=["", "small inputs"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("length", [1, 7, 66])
def test_linear_layer_is_its_formulas(length, backend, size):
    """Of small inputs, what is added to the squares of queries and keys, and where, shows."""
    config = k3_config()
    layer, n = random_layer(KimiDeltaAttention, config), size * torch.randn(1, length, 60, dtype=torch.float64)
    with torch.no_grad(), use_backend(backend):
        got = layer(n, ForwardContext(config, n), None)
        assert_close(got[0], kda_by_hand(layer, n[0]), 0, 1e-10 if backend == "reference" else 1e-5)


def mla_by_hand(layer: MultiHeadLatentAttention, n: Tensor, eps: float = 1e-6) -> Tensor:
    """One row `[T, D]`: nothing rotated, and a gate for every number of the output."""

    def unit(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    length, outs = len(n), []
    q = unit(n @ layer.q_a_proj.weight.T, layer.q_a_layernorm.weight) @ layer.q_b_proj.weight.T
    latent, shared = (n @ layer.kv_a_proj_with_mqa.weight.T).split([layer.latent, layer.shared], -1)
    kv = unit(latent, layer.kv_a_layernorm.weight) @ layer.kv_b_proj.weight.T
    q, kv = q.view(length, layer.heads, -1), kv.view(length, layer.heads, -1)
    for head in range(layer.heads):
        key = torch.cat([kv[:, head, : layer.nope], shared], -1)
        scores = q[:, head] @ key.T * (layer.nope + layer.shared) ** -0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        outs.append(scores.softmax(-1) @ kv[:, head, layer.nope :])
    o = torch.cat(outs, -1) * torch.sigmoid(n @ layer.g_proj.weight.T)
    return o @ layer.o_proj.weight.T


@pytest.mark.parametrize("size", [1.0, 1e-3], ids=["", "small inputs"])
def test_full_layer_is_its_formulas(size):
    """Of small inputs, the 1e-6 in the norms of the low-rank paths shows; every other norm has 1e-5."""
    config = k3_config()
    config._attn_implementation = "eager"
    layer, n = random_layer(MultiHeadLatentAttention, config), size * torch.randn(1, 9, 60, dtype=torch.float64)
    with torch.no_grad():
        got = layer(n, ForwardContext(config, n), None)[0][0]
        assert_close(got, mla_by_hand(layer, n[0]), 0, 1e-10)
        if size < 1:
            other = mla_by_hand(layer, n[0], 1e-5)
            assert (got - other).abs().max() > 0.1 * other.abs().max()


def test_norms_add_1e_5_but_for_those_of_the_low_rank_paths(model):
    for name, module in model.named_modules():
        if hasattr(module, "eps") and "norm" in name:
            assert module.eps == (1e-6 if "a_layernorm" in name else 1e-5), name
    assert {layer.eps for layer in model.model.layers} == {1e-5}


# Slips that move logits little


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("length", [1, 65])
def test_operation_adds_eps_to_the_sum_of_squares_and_squashes_beta_once(backend, length):
    """The first token writes beta k v and reads it: o = sigmoid(beta) <k, q> / sqrt(K) v, k and q nearly unit."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, gate = (torch.randn(1, length, 3, width, generator=generator) for width in (12, 12, 20, 12))
    q, k, beta = 3e-4 * q, 3e-4 * k, torch.randn(1, length, 3, generator=generator)
    zeros = torch.zeros(3), torch.zeros(36)
    with use_backend(backend):
        o, _ = kda(KdaCall(q=q, k=k, v=v, gate=gate, beta=beta, A_log=zeros[0], dt_bias=zeros[1], lower_bound=-5.0))
    unit = [x[0, 0].double() / (x[0, 0].double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
    assert all((x.norm(dim=-1) < 0.9).all() for x in unit)  # so that eps shows
    product = (unit[0] * unit[1]).sum(-1) * 12**-0.5
    assert_close(o[0, 0], (beta[0, 0].double().sigmoid() * product)[:, None] * v[0, 0].double(), 0, 1e-5)


def test_router_never_chooses_from_a_group_left_out():
    """All choices are below zero: a group masked with zeros would win."""
    config = k3_config(n_group=4, topk_group=1, num_experts_per_tok=2, hidden_size=8)
    router = Router(config)
    with torch.no_grad():
        router.weight.copy_(torch.eye(8))
        router.e_score_correction_bias.fill_(-10)
    logits = torch.tensor([[-5.0, -5.0, 2.0, 2.0, 0.0, 0.0, 1.0, -9.0]])
    _, weights, experts = router(logits)
    assert sorted(experts.flatten().tolist()) == [2, 3]
    assert_close(weights, torch.full((1, 2), 0.5), 1e-6)


def test_first_layer_s_unused_mixture_survives_a_round_trip(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = KdaHybridForCausalLM.from_pretrained(tmp_path).state_dict()
    for name in ("norm", "proj"):
        key = f"model.layers.0.self_attention_res_{name}.weight"
        assert torch.equal(loaded[key], model.state_dict()[key])
    assert loaded.keys() == model.state_dict().keys()


# Forward


def test_forward_equals_reference_recurrence_in_float64(model):
    ids = token_ids(70, rows=2)
    with torch.no_grad():
        assert_close(model(ids).logits, truth(model, ids))


def test_forward_of_packed_experts_equals_reference_recurrence_in_float64():
    model, ids = packed_model(), token_ids(70, rows=2)
    with torch.no_grad():
        assert_close(model(ids).logits, truth(model, ids), 2e-4)


@pytest.mark.parametrize("mask", [[0] * 4 + [1] * 9, [1] * 4 + [0] * 4 + [1] * 5], ids=["left", "middle"])
def test_forward_with_pads_equals_rows_alone(model, mask):
    ids, full = token_ids(9), token_ids(13, seed=2)
    batch = torch.cat([padded(ids, mask), full])
    with torch.no_grad():
        logits = model(batch, attention_mask=mask_of(mask, [1] * 13)).logits
        assert_close(logits[:1, torch.tensor(mask).bool()], model(ids).logits, name="padded row")
        assert_close(logits[1:], model(full).logits, name="full row")


@pytest.mark.parametrize("lengths", [[9, 14], [1, 3, 64, 65]], ids=str)
def test_forward_of_packed_documents_equals_each_alone(model, lengths):
    documents = [token_ids(n, seed=i) for i, n in enumerate(lengths)]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        logits = model(torch.cat(documents, 1), position_ids=positions, use_cache=False).logits
        for document, got in zip(documents, logits.split(lengths, 1)):
            assert_close(got, model(document).logits)


@pytest.mark.parametrize(
    ("length", "cuts"), [(23, [1]), (23, [4, 5, 20]), (23, list(range(1, 23))), (75, [64]), (75, [30, 73])], ids=str
)
def test_forward_in_pieces_equals_one_pass(model, length, cuts):
    ids = token_ids(length, rows=2)
    logits, cache = forward_in_pieces(model, ids, cuts)
    with torch.no_grad():
        assert_close(logits, model(ids, use_cache=False).logits)
    assert cache.get_seq_length() == length


def test_forward_in_pieces_with_left_pads_equals_rows_alone(model):
    short, long = token_ids(7), token_ids(16, seed=3)
    mask = mask_of([0] * 9 + [1] * 7, [1] * 16)
    logits, _ = forward_in_pieces(model, torch.cat([padded(short, mask[0].tolist()), long]), [8, 12], mask)
    with torch.no_grad():
        assert_close(logits[:1, 9:], model(short).logits, name="padded row")
        assert_close(logits[1:], model(long).logits, name="full row")


def test_forward_takes_embeddings_that_are_not_contiguous(model):
    embeds = model.get_input_embeddings()(token_ids(9, rows=2).T.contiguous()).transpose(0, 1)
    with torch.no_grad():
        assert_close(model(inputs_embeds=embeds).logits, model(token_ids(9, rows=2)).logits)


@pytest.mark.parametrize("rows", [0, 1])
def test_forward_of_no_token_at_all(model, rows):
    with torch.no_grad():
        assert model(torch.zeros(rows, 0 if rows else 5, dtype=torch.long)).logits.numel() == 0


def test_forward_hidden_states_are_the_sums_of_blocks(model):
    """The output of the layer before a block is that block's whole sum; the last one is mixed and normalised."""
    with torch.no_grad():
        out = model(token_ids(5), output_hidden_states=True)
        assert_close(model.lm_head(out.hidden_states[-1]), out.logits, 1e-6)
    assert len(out.hidden_states) == 6


def test_packed_model_made_from_a_config_survives_a_round_trip(tmp_path):
    model = packed_model()
    model.save_pretrained(tmp_path)
    loaded = KdaHybridForCausalLM.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], x) for name, x in model.state_dict().items())


@pytest.mark.parametrize("kind", ["decoded", "packed"])
def test_forward_in_bfloat16_is_near_and_finite(kind, tmp_path):
    (packed_model(quantization_config=MXFP4_CONFIG) if kind == "packed" else k3_model()).save_pretrained(tmp_path)
    half, whole = (KdaHybridForCausalLM.from_pretrained(tmp_path, dtype=d) for d in (torch.bfloat16, torch.float32))
    ids = token_ids(20)
    logits = half(ids, labels=ids)
    logits.loss.backward()
    assert logits.logits.isfinite().all()
    assert all(x.grad.isfinite().all() for x in half.parameters() if x.requires_grad)
    assert logits.loss.item() == pytest.approx(whole(ids, labels=ids).loss.item(), rel=0.2)


def test_forward_and_backward_compile_without_a_break():
    model, ids = k3_model(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]), token_ids(40)
    model.set_experts_implementation("batched_mm")  # no loop over what the router chose
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, 1e-5)
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        run(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: x.grad.clone() for name, x in model.named_parameters()})
    for name, want in gradients[0].items():
        assert_close(gradients[1][name], want, 1e-6, 1e-5, name)


# Generation


@pytest.mark.parametrize("kind", ["decoded", "packed"])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generate_with_a_cache_equals_without(kind, how):
    model = shared_model() if kind == "decoded" else packed_model()
    mask = [0] * 5 + [1] * 7
    batch = torch.cat([padded(token_ids(7), mask, 0), token_ids(12, seed=2)])
    runs = [
        model.generate(
            batch, attention_mask=mask_of(mask, [1] * 12), max_new_tokens=8, use_cache=use_cache, **how, **GREEDY
        )
        for use_cache in (True, False)
    ]
    assert runs[0].tolist() == runs[1].tolist()
    alone = model.generate(token_ids(7), max_new_tokens=8, **how, **GREEDY)
    assert runs[0][0, 12:].tolist() == alone[0, 7:].tolist()


def test_generate_continues_from_a_returned_cache(model):
    prompt, cache = token_ids(6), KdaHybridCache(model.config)
    first = model.generate(prompt, max_new_tokens=5, cache=cache, **GREEDY)
    grown = torch.cat([first, token_ids(3, seed=8)], 1)
    second = model.generate(grown, max_new_tokens=5, cache=cache, **GREEDY)
    assert second.tolist() == model.generate(grown, max_new_tokens=5, use_cache=False, **GREEDY).tolist()


# Training


def losses_of(model, ids: Tensor, groups, steps: int = 30) -> list[float]:
    optimizer, losses = torch.optim.AdamW(groups, lr=1e-2), []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_learns_one_batch_by_heart():
    torch.manual_seed(0)
    model, ids = KdaHybridForCausalLM(k3_config(initializer_range=0.05)).train(), token_ids(24, rows=2)
    start = {name: x.detach().clone() for name, x in model.named_parameters()}
    losses = losses_of(model, ids, optimizer_groups(model, 0.01))
    assert losses[-1] < 0.2 * losses[0]
    still = [name for name, x in model.named_parameters() if torch.equal(x, start[name])]
    # Layer 0's attention has one candidate to read: its mixture has gradients of zero, and its norm is not decayed.
    assert [name for name in still if "layers.0.self_attention_res_" not in name] == []


def test_backward_has_the_gradients_of_float64(model):
    """Of every parameter, through mixtures, latents, SiTU and both kinds of attention."""
    ids, got, want = token_ids(40, rows=2), copy.deepcopy(model), copy.deepcopy(model).double()
    want.set_experts_implementation("eager")
    got(ids, labels=ids, use_cache=False).loss.backward()
    with use_backend("reference"):
        want(ids, labels=ids, use_cache=False).loss.backward()
    for name, gradient in gradients(want).items():
        assert gradient is not None, name
        assert_close(gradients(got)[name], gradient, 1e-9, 5e-4, name)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", ["decoded", "packed"])
def test_gradient_checkpointing_changes_no_gradient(kind, reentrant):
    ids = token_ids(20, rows=2)
    plain, other = ((packed_model if kind == "packed" else k3_model)().train() for _ in range(2))
    other.load_state_dict(plain.state_dict())
    other.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for model in (plain, other):
        model(ids, labels=ids).loss.backward()
    want, got = gradients(plain), gradients(other)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert_close(got[name], gradient, 0, GRADIENTS, name)


# PEFT


@pytest.mark.parametrize("targets", [None, "all-linear"], ids=str)
@pytest.mark.parametrize("kind", ["decoded", "packed"])
def test_lora_trains_and_leaves_the_base_alone(kind, targets):
    torch.manual_seed(0)
    base = packed_model() if kind == "packed" else k3_model()
    with torch.no_grad():  # a head of a size at which a fresh model's loss is near that of guessing
        base.lm_head.weight.mul_(0.1)
    before = {name: x.clone() for name, x in base.state_dict().items()}
    model, ids = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=targets)), token_ids(16)
    model.train()
    losses = losses_of(model, ids, [x for x in model.parameters() if x.requires_grad], steps=12)
    assert losses[-1] < 0.9 * losses[0]
    assert all("lora_" in name for name, x in model.named_parameters() if x.requires_grad)
    after = {name.replace(".base_layer.", "."): x for name, x in base.state_dict().items() if "lora_" not in name}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], x) for name, x in before.items())


def test_lora_reaches_what_attention_reads_and_writes():
    model = get_peft_model(k3_model(), LoraConfig(task_type="CAUSAL_LM"))
    found = {name.split("layers.")[1] for name, module in model.named_modules() if hasattr(module, "lora_B")}
    linear = {f"{i}.self_attn.{x}_proj" for i in (0, 1, 2) for x in "qkvo"}
    full = {f"{i}.self_attn.{x}" for i in (3, 4) for x in ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
    assert found == linear | full


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_lora_on_packed_experts_under_gradient_checkpointing_equals_without(reentrant):
    ids, runs = token_ids(20, rows=2), []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        base = packed_model()
        options = {"init_lora_weights": False, "task_type": "CAUSAL_LM", "target_modules": "all-linear"}
        torch.manual_seed(1)
        model = get_peft_model(base, LoraConfig(**options)).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(ids, labels=ids).loss.backward()
        runs.append(gradients(model))
    for name, gradient in runs[0].items():
        assert_close(runs[1][name], gradient, 0, GRADIENTS, name)
