"""The whole model's forward: golden numbers, pads, packed documents, calls in pieces, and what comes out."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ALIGNED,
    GOLDEN_LOGITS,
    GRADIENTS,
    assert_close,
    forward_in_pieces,
    golden,
    golden_tensors,
    mask_of,
    padded,
    shared_model,
    tiny_model,
    token_ids,
    truth,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from modeling_kda import KdaHybridCache, KdaHybridForCausalLM, use_backend
from modeling_kda.layers_attnres import mix


GOLDEN_MODELS = ["kimi_linear_original_tiny", "hf_kimi_linear_tiny", "kimi_k3_tiny", "kimi_k3_tiny_mxfp4"]
BACKENDS = ["torch", "reference"]


@pytest.fixture
def model() -> KdaHybridForCausalLM:
    return shared_model()


@pytest.fixture(scope="module", params=GOLDEN_MODELS)
def golden_model(request) -> tuple[KdaHybridForCausalLM, dict[str, torch.Tensor], str]:
    folder = golden(request.param)
    loaded = KdaHybridForCausalLM.from_pretrained(folder).eval()
    return loaded, golden_tensors(request.param, "expected.safetensors"), request.param


@pytest.fixture(scope="module")
def native():
    """transformers' own implementation, on the golden weights."""
    loaded = AutoModelForCausalLM.from_pretrained(golden("hf_kimi_linear_tiny"))
    assert type(loaded).__name__ == "KimiLinearForCausalLM"
    return loaded.eval()


def gradients_in_released_names(model) -> dict[str, torch.Tensor]:
    """Gradients by the names of a released Kimi K3, those of A_log with a zero behind the heads' as its tensor has."""
    found = {}
    for name, parameter in model.named_parameters():
        for part in (".gate.weight", ".routed_expert_"):
            name = name.replace(f".mlp{part}", f".block_sparse_moe{part}")
        found[name] = F.pad(parameter.grad, (0, 1)) if name.endswith("A_log") else parameter.grad
    return found


def gradients_in_native_names(model) -> dict[str, torch.Tensor]:
    """Gradients by the names that transformers' own model has: convolutions joined, gates in a module of their own."""
    found = {}
    for name, parameter in model.named_parameters():
        prefix, last = name.rsplit("self_attn.", 1) if "self_attn." in name else ("", name)
        gradient = parameter.grad
        if last.startswith(("f_a_proj", "f_b_proj", "A_log", "dt_bias")):
            gradient = gradient[None, None, :, None] if last == "A_log" else gradient
            name = f"{prefix}self_attn.forget_gate.{last}"
        elif last.startswith("q_conv1d"):
            attention = model.get_submodule(f"{prefix}self_attn")
            found[f"{prefix}self_attn.conv1d.weight"] = torch.cat(
                [getattr(attention, f"{x}_conv1d").weight.grad for x in "qkv"]
            )
            continue
        elif last.startswith(("k_conv1d", "v_conv1d")):
            continue
        found[name] = gradient
    return found


# Golden data


@pytest.mark.parametrize("prefix", ["", "long_"])
def test_forward_equals_golden_logits(golden_model, prefix):
    model, want, _ = golden_model
    with torch.no_grad():
        logits = model(want[f"{prefix}input_ids"]).logits
    assert_close(logits, want[f"{prefix}logits"], GOLDEN_LOGITS, name="logits")
    assert_close(logits, want[f"{prefix}truth_logits"], GOLDEN_LOGITS, name="float64 logits")


def test_forward_equals_golden_logits_at_real_tokens(golden_model):
    model, want, _ = golden_model
    mask = want["padded_attention_mask"]
    with torch.no_grad():
        logits = model(want["padded_input_ids"], attention_mask=mask).logits
    real = mask.bool()
    assert not real.all()
    assert_close(logits[real], want["padded_logits"][real], GOLDEN_LOGITS)


def expected_gradients(model, want: dict[str, torch.Tensor], name: str):
    """(Name, ours, golden) of every gradient that the golden data has."""
    output = model(
        want["padded_input_ids"], attention_mask=want["padded_attention_mask"], labels=want["labels"], use_cache=False
    )
    assert_close(output.loss[None], want["loss"], 1e-5, name="loss")
    model.zero_grad()
    output.loss.backward()
    got = (gradients_in_released_names if "k3" in name else gradients_in_native_names)(model)
    expected = golden_tensors(name, "expected_grads.safetensors")
    assert len(expected) >= 12
    return [(key, got[key.removeprefix("grad.")], gradient) for key, gradient in expected.items()]


def test_backward_equals_golden_loss_and_gradients(golden_model):
    model, want, name = golden_model
    # In float32, implementations of this K3 are 2e-4 apart in the gradient of one embedding.
    relative = 5e-4 if "k3" in name else GRADIENTS
    for key, got, gradient in expected_gradients(model, want, name):
        assert_close(got, gradient, 0, relative, key)


@pytest.mark.parametrize("name", ["kimi_k3_tiny", "kimi_k3_tiny_mxfp4"])
def test_backward_in_float64_equals_golden_gradients(name):
    model = KdaHybridForCausalLM.from_pretrained(golden(name), dtype=torch.float64).double()
    model.set_experts_implementation("eager")
    with use_backend("reference"):
        gradients = expected_gradients(model, golden_tensors(name, "expected.safetensors"), name)
    for key, got, gradient in gradients:
        assert_close(got, gradient, 0, 1e-6, key)


@pytest.fixture(scope="module")
def released_k3():
    """A Kimi K3 in the dtypes of the release, in float32, and what was computed from it."""
    loaded = KdaHybridForCausalLM.from_pretrained(golden("k3_released_tiny"), dtype=torch.float32).eval()
    return loaded, golden_tensors("k3_released_tiny", "expected.safetensors")


def test_forward_equals_the_logits_of_the_released_code(released_k3):
    model, want = released_k3
    with torch.no_grad():
        logits = model(want["input_ids"]).logits
    assert_close(logits, want["logits_fp32_official"], 1e-3)
    assert_close(logits, want["logits_fp64_spec"], 5e-4, name="float64 logits")


def test_forward_in_float64_equals_golden_logits_and_block_sums(released_k3):
    """After every layer; the last one is followed by the mixture of all blocks and the norm."""
    model, want = released_k3
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    with torch.no_grad(), use_backend("reference"):
        output = exact(want["input_ids"], output_hidden_states=True)
    assert_close(output.logits, want["logits_fp64_spec"], 1e-9)
    sums = [want[f"prefix_after_layer_{i}_fp64"] for i in range(9)]
    for i, (got, one) in enumerate(zip(output.hidden_states[1:9], sums)):
        assert_close(got, one, 1e-9, name=f"layer {i}")
    base, last = exact.model, sums[-1]
    # A block starts at layers 0, 4 and 8, so the bank holds the embeddings and what layers 3 and 7 left.
    blocks = (base.embed_tokens(want["input_ids"]), sums[3], sums[7])
    mixed = mix((*blocks, last), base.output_attn_res_norm, base.output_attn_res_proj, 1e-5)
    assert_close(output.hidden_states[9], base.norm(mixed), 1e-9, name="after the last layer")


def test_backward_equals_transformers_own_gradient_of_every_parameter(native):
    ours = KdaHybridForCausalLM.from_pretrained(golden("hf_kimi_linear_tiny")).eval()
    ids = token_ids(70, rows=2)  # crosses a chunk's border
    for model in (ours, native):
        model(ids, labels=ids, use_cache=False).loss.backward()
    got = gradients_in_native_names(ours)
    want = {name: x.grad for name, x in native.named_parameters()}
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert_close(got[name], gradient, 0, GRADIENTS, name)


def test_forward_equals_reference_recurrence_in_float64(model):
    ids = token_ids(130, rows=2)
    with torch.no_grad():
        assert_close(model(ids).logits, truth(model, ids))


# Pads


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("junk", [0, 7])
def test_forward_of_one_left_padded_row_ignores_pads(model, dtype, junk):
    ids, mask = token_ids(11), [0] * 5 + [1] * 11
    with torch.no_grad():
        logits = model(padded(ids, mask, junk), attention_mask=mask_of(mask).to(dtype)).logits
        assert_close(logits[:, 5:], model(ids).logits)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "mask",
    [
        [0] * 4 + [1] * 9,
        [1] * 9 + [0] * 4,
        [0, 0] + [1] * 9 + [0, 0],
        [1] * 4 + [0] * 4 + [1] * 5,
        [0] + [1, 0] * 5 + [1] * 4 + [0] * 3,
    ],
    ids=["left", "right", "both", "middle", "scattered"],
)
def test_forward_with_pads_equals_rows_alone(model, attention, mask):
    other = copy.deepcopy(model)
    other.set_attn_implementation(attention)
    ids, full = token_ids(9), token_ids(len(mask), seed=2)
    batch = torch.cat([padded(ids, mask), full])
    with torch.no_grad():
        logits = other(batch, attention_mask=mask_of(mask, [1] * len(mask))).logits
        assert_close(logits[:1, torch.tensor(mask).bool()], other(ids).logits, name="padded row")
        assert_close(logits[1:], other(full).logits, name="full row")


def test_forward_with_a_row_of_pads_only_is_finite_and_leaves_other_rows_alone(model):
    ids = token_ids(9, rows=2)
    mask = mask_of([0] * 9, [1] * 9)
    logits, _ = forward_in_pieces(model, ids, [4], mask)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        alone = model(ids[1:]).logits
    assert whole.isfinite().all()
    assert logits.isfinite().all()
    assert_close(whole[1:], alone)
    assert_close(logits[1:], alone)
    leaf = copy.deepcopy(model)
    leaf(ids, attention_mask=mask, use_cache=False).logits[1].sum().backward()
    assert all(x.grad.isfinite().all() for x in leaf.parameters())


def test_forward_takes_a_causal_mask_of_4_dimensions(model):
    mask = [0] * 3 + [1] * 8
    ids = padded(token_ids(8), mask)
    allowed = torch.ones(11, 11, dtype=torch.bool).tril() & mask_of(mask).bool()[:, None, None]
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = model(token_ids(8)).logits
        for four in (allowed, additive):
            assert_close(model(ids, attention_mask=four).logits[:, 3:], want)


@settings(deadline=None, derandomize=True, max_examples=30, database=None)
@given(data=st.data())
def test_forward_in_pieces_with_random_pads_equals_rows_alone(data):
    model = shared_model()
    length = data.draw(st.integers(1, 14), label="length")
    rows = data.draw(st.integers(1, 3), label="rows")
    bits = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    mask = mask_of(*data.draw(st.lists(bits, min_size=rows, max_size=rows), label="mask"))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=3) if length > 1 else st.just(set())))
    ids = token_ids(length, rows, seed=length)
    logits, _ = forward_in_pieces(model, ids, cuts, mask)
    assert logits.isfinite().all()
    for row, real in enumerate(mask.bool()):
        if real.any():
            with torch.no_grad():
                alone = model(ids[row : row + 1, real]).logits
            assert_close(logits[row : row + 1, real], alone, name=f"row {row}, cuts {cuts}")


# Calls in pieces


@pytest.mark.parametrize(
    ("length", "cuts"),
    [
        *((23, [cut]) for cut in (1, 2, 3, 4, 5, 10, 16, 22)),
        (23, list(range(1, 23))),
        (23, [1, 3, 4, 9, 10, 20]),
        *((130, [cut]) for cut in (63, 64, 65, 127, 128, 129)),
        (130, [31, 32, 33, 64, 97]),
    ],
    ids=lambda x: "-".join(map(str, x[:6])) if isinstance(x, list) else x,
)
def test_forward_in_pieces_equals_one_pass(model, length, cuts):
    ids = token_ids(length, rows=2)
    logits, cache = forward_in_pieces(model, ids, cuts)
    with torch.no_grad():
        assert_close(logits, model(ids, use_cache=False).logits)
    assert cache.get_seq_length() == length


@pytest.mark.parametrize("cut", [1, 3, 4, 8, 9, 10, 15])
def test_forward_in_pieces_with_left_pads_equals_rows_alone(model, cut):
    short, long = token_ids(7), token_ids(16, seed=3)
    mask = mask_of([0] * 9 + [1] * 7, [1] * 16)
    ids = torch.cat([padded(short, mask[0].tolist()), long])
    logits, _ = forward_in_pieces(model, ids, [cut], mask)
    with torch.no_grad():
        assert_close(logits[:1, 9:], model(short).logits, name="padded row")
        assert_close(logits[1:], model(long).logits, name="full row")


@pytest.mark.parametrize(
    ("first", "second"),
    [([1] * 8, [0] * 6 + [1] * 4), ([1] * 8 + [0] * 6, [1] * 4), ([0, 0] + [1] * 8 + [0] * 3, [0] + [1] * 4 + [0])],
    ids=["second turn left-padded", "first turn right-padded", "pads everywhere"],
)
def test_forward_of_a_second_turn_ignores_pads_of_either(model, first, second):
    one, two, cache = token_ids(8), token_ids(4, seed=6), KdaHybridCache(model.config)
    with torch.no_grad():
        model(padded(one, first), attention_mask=mask_of(first), cache=cache)
        got = model(padded(two, second), attention_mask=mask_of(first + second), cache=cache).logits
        want = model(torch.cat([one, two], 1)).logits[:, -4:]
    assert_close(got[:, torch.tensor(second).bool()], want)


def test_forward_in_pieces_passes_gradients_through_the_cache(model):
    ids, halves = token_ids(40), []
    weights = torch.randn(17, 97, generator=torch.Generator().manual_seed(0))
    for cuts in ([], [23]):
        leaf = copy.deepcopy(model)
        embeds = leaf.get_input_embeddings()(ids).detach().requires_grad_()
        cache = KdaHybridCache(leaf.config)
        for start, end in itertools.pairwise([0, *cuts, 40]):
            logits = leaf(inputs_embeds=embeds[:, start:end], cache=cache).logits
        (logits[:, -17:] * weights).sum().backward()
        halves.append((embeds.grad, {name: x.grad for name, x in leaf.named_parameters() if x.grad is not None}))
    (want, want_all), (got, got_all) = halves
    assert want[:, :23].abs().max() > 0
    assert_close(got[:, :23], want[:, :23], 0, GRADIENTS, "embeddings of the first half")
    assert got_all.keys() == want_all.keys()
    for name, gradient in want_all.items():
        assert_close(got_all[name], gradient, 0, GRADIENTS, name)


@pytest.mark.parametrize("value_width", [20, 12])
@pytest.mark.parametrize("prefill", BACKENDS)
@pytest.mark.parametrize("decode", BACKENDS)
def test_forward_backends_hand_each_other_the_state(prefill, decode, value_width):
    model, ids = tiny_model(linear_value_head_dim=value_width), token_ids(72, rows=2)
    cache = KdaHybridCache(model.config)
    with torch.no_grad():
        with use_backend("reference"):
            want = model(ids).logits[:, 70:]
        with use_backend(prefill):
            model(ids[:, :70], cache=cache)
        with use_backend(decode):
            got = [model(ids[:, t : t + 1], cache=cache).logits for t in (70, 71)]
    assert_close(torch.cat(got, 1), want)
    assert cache.layers[0].state.shape == (2, 3, value_width, 12)


@pytest.mark.parametrize("pieces", [[512], [1] * 64, [100, 1, 30, 32, 33]], ids=["chunks", "steps", "mixed"])
def test_state_decays_in_float32_in_a_bfloat16_model(pieces, tmp_path):
    """Zero embeddings write nothing, so the first state only decays: by 0.9995 a token, which is 1 in bfloat16."""
    source = tiny_model(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], **ALIGNED)
    layer = source.model.layers[0].self_attn
    with torch.no_grad():
        layer.A_log.copy_(torch.tensor([0.5, 0.1, -0.3]))
        layer.dt_bias.copy_(torch.linspace(-7.7, -7.2, 36))
    source.save_pretrained(tmp_path)
    model = KdaHybridForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    cache = KdaHybridCache(model.config)
    with torch.no_grad():
        model(torch.cat([token_ids(5), torch.zeros(1, 3, dtype=torch.long)], 1), cache=cache)  # empties the window
        start = cache.layers[0].state.double()
        for piece in pieces:
            model(torch.zeros(1, piece, dtype=torch.long), cache=cache)
    rate = layer.A_log.double().exp()[:, None] * F.softplus(layer.dt_bias.double()).view(3, 12)
    state = cache.layers[0].state
    assert state.dtype == torch.float32
    rounding = sum(pieces) * 2**-25  # each token's factor is rounded to float32, all the same way
    assert_close(state, start * torch.exp(-sum(pieces) * rate)[None, :, None], 0, rounding + 1e-6)


# Packed documents

PACKINGS = ["position_ids", "position_ids and mask", "cu_seq_lens", "cu_seq_lens and position_ids", "seq_idx"]


def packing(kind: str, lengths: list[int]) -> dict[str, torch.Tensor | int]:
    """The arguments that say where one row's documents begin."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    borders = F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    cu = {
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    return {
        "position_ids": {"position_ids": positions},
        "position_ids and mask": {"position_ids": positions, "attention_mask": torch.ones_like(positions)},
        "cu_seq_lens": cu,
        "cu_seq_lens and position_ids": dict(position_ids=positions, **cu),
        "seq_idx": {"seq_idx": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]},
    }[kind]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("lengths", [[9, 14], [1, 2, 3, 1, 5], [64, 65, 3]], ids=str)
@pytest.mark.parametrize("kind", PACKINGS)
def test_forward_of_packed_documents_equals_each_alone(model, kind, lengths, attention):
    other = copy.deepcopy(model)
    other.set_attn_implementation(attention)
    documents = [token_ids(n, seed=i) for i, n in enumerate(lengths)]
    with torch.no_grad():
        logits = other(torch.cat(documents, 1), use_cache=False, **packing(kind, lengths)).logits
        for document, got in zip(documents, logits.split(lengths, 1)):
            assert_close(got, other(document).logits)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", PACKINGS)
def test_backward_of_packed_documents_does_not_cross_borders(model, kind, attention):
    leaf = copy.deepcopy(model)
    leaf.set_attn_implementation(attention)
    embeds = leaf.get_input_embeddings()(token_ids(23)).detach().requires_grad_()
    logits = leaf(inputs_embeds=embeds, use_cache=False, **packing(kind, [9, 14])).logits
    logits[:, 9:].square().sum().backward()
    assert embeds.grad[:, :9].abs().max() == 0
    assert embeds.grad[:, 9:].abs().max() > 0


def test_forward_of_packed_documents_in_padded_rows_equals_each_alone(model):
    a, b, c = token_ids(5), token_ids(6, seed=2), token_ids(8, seed=3)
    mask = mask_of([0, 0] + [1] * 11 + [0], [1] * 8 + [0] * 6)
    positions = torch.tensor([[0, 0, *range(5), *range(6), 0], [*range(8), *[0] * 6]])
    ids = torch.cat([padded(torch.cat([a, b], 1), mask[0].tolist()), padded(c, mask[1].tolist())])
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        assert_close(logits[:1, 2:7], model(a).logits)
        assert_close(logits[:1, 7:13], model(b).logits)
        assert_close(logits[1:, :8], model(c).logits)


@settings(deadline=None, derandomize=True, max_examples=15, database=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=5), kind=st.sampled_from(PACKINGS))
def test_forward_of_random_packs_equals_each_document_alone(lengths, kind):
    model = shared_model()
    documents = [token_ids(n, seed=i) for i, n in enumerate(lengths)]
    with torch.no_grad():
        logits = model(torch.cat(documents, 1), use_cache=False, **packing(kind, lengths)).logits
        for document, got in zip(documents, logits.split(lengths, 1)):
            assert_close(got, model(document).logits)


@pytest.mark.parametrize("shift", [0, 5])
def test_forward_positions_that_only_go_up_change_nothing(model, shift):
    ids = token_ids(12, rows=2)
    with torch.no_grad():
        logits = model(ids, position_ids=torch.arange(shift, shift + 12).expand(2, -1)).logits
        assert_close(logits, model(ids).logits, 0)


# Attention implementations


@pytest.mark.parametrize("v_head_dim", [18, 24, 30])
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_forward_attention_implementations_agree(attention, v_head_dim):
    eager, other = (tiny_model(v_head_dim=v_head_dim) for _ in range(2))
    eager.set_attn_implementation("eager")
    other.set_attn_implementation(attention)
    mask = mask_of([0] * 5 + [1] * 7, [1] * 12)
    ids = token_ids(12, rows=2)
    pack = {"position_ids": torch.tensor([[*range(5), *range(7)]] * 2), "use_cache": False}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # compiling flex attention takes minutes
        real = mask.bool()
        assert_close(other(ids, attention_mask=mask).logits[real], eager(ids, attention_mask=mask).logits[real], 2e-5)
        assert_close(other(ids, **pack).logits, eager(ids, **pack).logits, 2e-5, name="packed")
        caches = [forward_in_pieces(m, token_ids(50, rows=2), [3, 44, 45])[0] for m in (other, eager)]
        assert_close(*caches, 2e-5, name="cached")
