"""What others have reported of models with recurrent states, about caches, padding, beams and devices: not here."""

import copy
import itertools

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from helpers import (
    ALIGNED,
    GRADIENTS,
    assert_close,
    forward_in_pieces,
    k3_model,
    mask_of,
    padded,
    shared_model,
    tiny_config,
    tiny_model,
    token_ids,
)
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from modeling_kda import KdaCall, KdaHybridCache, KdaHybridForCausalLM, kda
from modeling_kda.compat_transformers import CACHE_NAME


GREEDY = {"do_sample": False, "pad_token_id": 0}


@pytest.fixture
def model() -> KdaHybridForCausalLM:
    return shared_model()


@torch.no_grad()
def logits_of(model: KdaHybridForCausalLM, ids: Tensor, **given) -> Tensor:
    return model(ids, **given).logits


def plain(model: KdaHybridForCausalLM, ids: Tensor, **given) -> Tensor:
    """Logits without a cache."""
    return logits_of(model, ids, use_cache=False, **given)


def new_tokens(model: torch.nn.Module, ids: Tensor, tokens: int = 8, **given) -> list[list[int]]:
    return model.generate(ids, max_new_tokens=tokens, **{**GREEDY, **given})[:, ids.shape[1] :].tolist()


def left_padded(*lengths: int, junk: int = 7) -> tuple[list[Tensor], Tensor, Tensor]:
    """Rows of these lengths alone, and as a batch with its mask."""
    rows, width = [token_ids(n, seed=n) for n in lengths], max(lengths)
    masks = [[0] * (width - n) + [1] * n for n in lengths]
    return rows, torch.cat([padded(row, mask, junk) for row, mask in zip(rows, masks)]), mask_of(*masks)


def states(cache: KdaHybridCache) -> list[Tensor]:
    return [layer.state for layer in cache.layers if layer.kind == "recurrent"]


def memory(cache: KdaHybridCache) -> list[Tensor]:
    """All that a cache holds."""
    return [x for layer in cache.layers for x in layer.contents(cache.get_seq_length()).values()]


def assert_same_memory(got: KdaHybridCache, want: KdaHybridCache) -> None:
    assert got.get_seq_length() == want.get_seq_length()
    for x, y in zip(memory(got), memory(want), strict=True):
        assert_close(x, y)


# Padding


@pytest.mark.parametrize("junk", [0, 7, 96])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32])
def test_r01_a_single_row_honours_its_left_pads(model, junk, dtype):
    """A padded prompt by itself gave other logits than without pads; in a batch it was right."""
    row, mask = token_ids(11), [0] * 5 + [1] * 11
    ids, mask = padded(row, mask, junk), mask_of(mask)
    assert_close(logits_of(model, ids, attention_mask=mask.to(dtype))[:, 5:], plain(model, row))
    assert new_tokens(model, ids, attention_mask=mask) == new_tokens(model, row, use_cache=False)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("lengths", [(7, 12), (1, 12)], ids=str)
def test_r02_a_padded_batch_equals_its_rows(model, lengths, beams, use_cache):
    """Prompts of unequal length became nonsense together, each alone was fine."""
    rows, ids, mask = left_padded(*lengths)
    how = {"tokens": 12, "num_beams": beams, "num_return_sequences": 2 if beams > 1 else 1}
    got = new_tokens(model, ids, attention_mask=mask, use_cache=use_cache, **how)
    assert got == [tokens for row in rows for tokens in new_tokens(model, row, use_cache=False, **how)]


@pytest.mark.parametrize("cut", [1, 3, 4, 8, 9, 10, 15])
def test_r03_a_continued_forward_honours_pads(model, cut):
    """The padding mask was ignored as soon as the cache held something."""
    rows, ids, mask = left_padded(7, 16)
    got, _ = forward_in_pieces(model, ids, [cut], mask)
    for i, row in enumerate(rows):
        assert_close(got[i : i + 1, 16 - row.shape[1] :], plain(model, row), name=f"row {i}")


@pytest.mark.parametrize("how", [{}, {"max_cache_len": 20}, {"offloading": True}], ids=["dynamic", "static", "off"])
@pytest.mark.parametrize("turns", ["second padded at its left", "first padded at its right"])
def test_r04_pads_inside_a_row_are_no_ops(model, turns, how):
    """Pads between two turns let the state decay and pushed real inputs out of the convolutions' windows."""
    row, mask = token_ids(12), [1] * 8 + [0] * 6 + [1] * 4
    ids, mask, cache = padded(row, mask), mask_of(mask), KdaHybridCache(model.config, **how)
    cut = 8 if turns == "second padded at its left" else 14
    logits_of(model, ids[:, :cut], attention_mask=mask[:, :cut], cache=cache)
    got = logits_of(model, ids[:, cut:], attention_mask=mask, cache=cache)
    assert_close(got[:, -4:], plain(model, row)[:, -4:])


@pytest.mark.parametrize("length", [1, 9])
def test_position_ids_that_go_on_from_a_padded_prompt_change_nothing(model, length):
    """Steps whose positions do not count the pads were taken for a new document."""
    rows, ids, mask = left_padded(4, 9)
    cache, positions = KdaHybridCache(model.config), (mask.cumsum(1) - 1).clamp(min=0)
    logits_of(model, ids, attention_mask=mask, position_ids=positions, cache=cache)
    more = token_ids(length, 2, seed=8)
    positions = mask.sum(1, keepdim=True) + torch.arange(length)
    mask = torch.cat([mask, torch.ones_like(more)], 1)
    got = logits_of(model, more, attention_mask=mask, position_ids=positions, cache=cache)
    for i, row in enumerate(rows):
        assert_close(got[i], plain(model, torch.cat([row, more[i : i + 1]], 1))[0, row.shape[1] :])


# Pieces


@pytest.mark.parametrize(
    ("length", "cuts"),
    [(23, [cut]) for cut in (1, 2, 3, 4, 5, 10, 16, 22)]
    + [(23, range(1, 23))]
    + [(130, [cut]) for cut in (63, 64, 65, 127, 128, 129)],
    ids=str,
)
def test_r05_several_tokens_after_a_past_remember_it(model, length, cuts):
    """A second piece of more than one token began with an empty state."""
    ids = token_ids(length)
    got, _ = forward_in_pieces(model, ids, cuts)
    assert_close(got, plain(model, ids))


def test_r05_generate_goes_on_from_a_returned_cache(model):
    """Feeding the result and its cache again forgot the prompt."""
    ids = token_ids(9)
    first = model.generate(ids, max_new_tokens=5, return_dict_in_generate=True, **GREEDY)
    second = new_tokens(model, first.sequences, 5, cache=getattr(first, CACHE_NAME))
    assert first.sequences[:, 9:].tolist()[0] + second[0] == new_tokens(model, ids, 10, use_cache=False)[0]


@pytest.mark.parametrize("cuts", [[4], [11], [3, 4, 9], [64], [63, 65], range(1, 23)], ids=str)
def test_r41_chunks_of_a_prompt_equal_one_shot_with_attention_residuals(cuts):
    """With Kimi K3's parts, a prompt in pieces gave other logits; a buffer of one call was still read by another."""
    model, ids = k3_model(), token_ids(70 if max(cuts) > 22 else 23)
    got, cache = forward_in_pieces(model, ids, cuts)
    assert_close(got, plain(model, ids))
    held = logits_of(model, token_ids(5, seed=4), cache=KdaHybridCache(model.config))
    before, more = held.clone(), token_ids(3, seed=8)
    assert_close(logits_of(model, more, cache=cache), plain(model, torch.cat([ids, more], 1))[:, -3:])
    assert torch.equal(held, before)


# Rows and drafts


def test_r09_beams_take_their_states_along(model):
    """Beams swapped rows and left recurrent states and windows behind."""
    _, ids, mask = left_padded(7, 12)
    how = {"num_beams": 4, "max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True, **GREEDY}
    runs = [model.generate(ids, attention_mask=mask, use_cache=use_cache, **how) for use_cache in (True, False)]
    assert runs[0].sequences.tolist() == runs[1].sequences.tolist()
    assert_close(runs[0].sequences_scores, runs[1].sequences_scores)


@pytest.mark.parametrize("how", [{}, {"max_cache_len": 12}, {"offloading": True}], ids=["dynamic", "static", "off"])
@pytest.mark.parametrize(
    ("name", "argument", "rows"),
    [
        ("reorder_cache", torch.tensor([2, 2, 0, 1]), [2, 2, 0, 1]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2, 3, 3]),
        ("batch_select_indices", torch.tensor([3, 0]), [3, 0]),
    ],
)
def test_r09_rows_of_a_cache_move_whole(model, name, argument, rows, how):
    """Linear layers had no such method, or moved a part of what they remember."""
    ids, cache = token_ids(9, 4), KdaHybridCache(model.config, **how)
    logits_of(model, ids[:, :7], cache=cache)
    getattr(cache, name)(argument)
    for t in (7, 8):
        got = logits_of(model, ids[rows, t : t + 1], cache=cache)
        assert_close(got, plain(model, ids[rows, : t + 1])[:, -1:])


@pytest.mark.parametrize("drafts", ["prompt lookup", "assistant"])
def test_r10_drafts_change_no_token(model, drafts):
    """Tokens that were not accepted stayed in the recurrent states."""
    ids = token_ids(4).repeat(1, 3)
    how = {"prompt_lookup_num_tokens": 3} if drafts == "prompt lookup" else {"assistant_model": tiny_model(1)}
    assert new_tokens(model, ids, 12, **how) == new_tokens(model, ids, 12, use_cache=False)


def test_r10_this_model_drafts_for_a_plain_transformer(model):
    """The guard against states that cannot be rolled back looked at the wrong one of two models."""
    config = GPT2Config(
        vocab_size=97, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=None, initializer_range=0.3
    )
    plain_transformer, ids = GPT2LMHeadModel(config).eval(), token_ids(5)
    want = new_tokens(plain_transformer, ids, 12, use_cache=False)
    assert new_tokens(plain_transformer, ids, 12, assistant_model=model) == want


@pytest.mark.parametrize("how", [{}, {"max_cache_len": 12}, {"offloading": True}], ids=["dynamic", "static", "off"])
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_r10_a_cropped_cache_is_that_of_the_shorter_text(model, tokens, how):
    """`crop` shortened keys and values, and left the recurrent states at the later token."""
    ids, cache, short = token_ids(10), KdaHybridCache(model.config, **how), KdaHybridCache(model.config)
    logits_of(model, ids[:, :6], cache=cache)
    cache.activate_past_recording()
    logits_of(model, ids[:, 6:9], cache=cache)
    logits_of(model, ids[:, 9:], cache=cache)
    cache.crop(-tokens)
    logits_of(model, ids[:, : 10 - tokens], cache=short)
    assert_same_memory(cache, short)
    assert_close(logits_of(model, ids[:, -tokens:], cache=cache), plain(model, ids)[:, -tokens:])


# Devices


@pytest.mark.parametrize("make", [tiny_model, k3_model])
@pytest.mark.parametrize("kind", ["dynamic", "static", "offloaded"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_r20_offloaded_weights_change_nothing(make, where, kind, tmp_path):
    """Weights that are used without calling their module were not brought back from where they lay."""
    model, ids = make(), token_ids(9, 2)
    away = copy.deepcopy(model)
    if where == "cpu":
        cpu_offload(away, execution_device=torch.device("cpu"), offload_buffers=True)
    else:
        disk_offload(away, tmp_path, execution_device=torch.device("cpu"), offload_buffers=True)
    assert {x.device.type for x in away.parameters()} == {"meta"}
    assert_close(plain(away, ids), plain(model, ids), 1e-5)
    for beams in (1, 3):
        want = new_tokens(model, ids, num_beams=beams, use_cache=False)
        assert new_tokens(away, ids, num_beams=beams, cache_implementation=kind) == want


def test_r20_one_layer_on_disk_changes_nothing(model, tmp_path):
    """A device map with a part on disk broke steps on a cache."""
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i in (1, 2) else "cpu" for i in range(4)}
    loaded = KdaHybridForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "off"
    )
    devices = {i: {x.device.type for x in layer.parameters()} for i, layer in enumerate(loaded.model.layers)}
    assert devices == {0: {"cpu"}, 1: {"meta"}, 2: {"meta"}, 3: {"cpu"}}
    ids = token_ids(9, 2)
    assert new_tokens(loaded, ids) == new_tokens(model, ids, use_cache=False)


@pytest.mark.parametrize("beams", [1, 3])
def test_r20_an_offloaded_cache_changes_nothing_when_it_is_used_again(model, beams):
    """Logits on a cache that lies elsewhere were wrong from its first reuse on."""
    ids = token_ids(9, 2)
    want = new_tokens(model, ids, num_beams=beams, use_cache=False)
    for _ in range(2):
        assert new_tokens(model, ids, num_beams=beams, cache_implementation="offloaded") == want


def test_r20_each_layer_remembers_on_its_own_device():
    """States were made on the first layer's device, wherever their layer was."""
    model = tiny_model(mlp_layer_types=["dense"] * 4)
    for module in (*model.model.layers[2:], model.model.norm, model.lm_head):
        module.to("meta")
    model.model.layers[2].register_forward_pre_hook(lambda _, args: (args[0].to("meta"), *args[1:]))
    cache = KdaHybridCache(model.config)
    for tokens in (9, 1, 3):
        logits_of(model, token_ids(tokens), cache=cache)
        found = [{x.device.type for x in layer.contents(cache.get_seq_length()).values()} for layer in cache.layers]
        assert found == [{"cpu"}, {"cpu"}, {"meta"}, {"meta"}]
    model.model.layers[:2].to("meta")
    model.model.embed_tokens.to("meta")
    logits_of(model, token_ids(1).to("meta"), cache=cache)
    assert {x.device.type for x in memory(cache)} == {"meta"}


# Static, reset, compiled


@pytest.mark.parametrize("how", [{}, {"max_cache_len": 24}, {"offloading": True}], ids=["dynamic", "static", "off"])
def test_r21_a_reset_cache_knows_nothing_of_before(model, how):
    """The second conversation on a cache depended on the first."""
    cache, second = KdaHybridCache(model.config, **how), token_ids(6, seed=2)
    new_tokens(model, token_ids(12), cache=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not memory(cache)
    assert new_tokens(model, second, cache=cache) == new_tokens(model, second, use_cache=False)
    fresh = KdaHybridCache(model.config, **how)
    new_tokens(model, second, cache=fresh)
    assert_same_memory(cache, fresh)


def test_r21_a_static_cache_equals_one_that_grows(model):
    """Linear layers of a static cache were never made."""
    _, ids, mask = left_padded(5, 9)
    runs = [new_tokens(model, ids, attention_mask=mask, cache_implementation=kind) for kind in ("static", "dynamic")]
    assert runs[0] == runs[1]


def addresses(cache: KdaHybridCache) -> list[int]:
    tensors = [
        (layer.state, layer.window) if layer.kind == "recurrent" else (layer.rows.data,) for layer in cache.layers
    ]
    return [x.data_ptr() for x in itertools.chain(*tensors)]


@pytest.mark.parametrize("make", [tiny_model, k3_model])
def test_r21_decoding_compiles_once_and_stays_where_it_is(make):
    """Every token was compiled anew, and tensors moved, which no CUDA graph can follow."""
    model, ids, compiled = make(), token_ids(15, 2), []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    step = torch.compile(model, fullgraph=True, backend=backend)
    cache = KdaHybridCache(model.config, max_cache_len=16)
    got, places = [logits_of(model, ids[:, :5], cache=cache)], addresses(cache)
    for t in range(5, 15):
        got.append(logits_of(step, ids[:, t : t + 1], cache=cache))
        assert addresses(cache) == places
    assert 1 <= len(compiled) <= 2
    assert_close(torch.cat(got, 1), plain(model, ids))


# Modules and graphs


def test_r22_no_module_keeps_a_state(model):
    """A state kept by its module was a second backward's, or the next text's."""
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    first = plain(model, token_ids(9))
    new_tokens(model, token_ids(5, 2, seed=3))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    kept = {name for name, module in model.named_modules() for x in vars(module).values() if isinstance(x, Tensor)}
    assert not kept
    assert torch.equal(plain(model, token_ids(9)), first)


def test_r22_checkpointing_changes_no_gradient_in_two_steps():
    """Recomputing a layer moved its state on twice, and the second backward found a graph that was gone."""
    runs = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        for seed in (1, 2):
            model.zero_grad()
            ids = token_ids(9, 2, seed)
            model(ids, labels=ids).loss.backward()
            with torch.no_grad():
                for x in model.parameters():
                    x -= 0.01 * x.grad
        runs.append({name: x.grad for name, x in model.named_parameters()})
    for name, want in runs[0].items():
        assert_close(runs[1][name], want, 1e-7, GRADIENTS, name)


def test_r22_checkpointing_leaves_a_cache_alone_or_refuses_it():
    """A cache that is passed along was moved on twice."""
    model, ids = tiny_model().train(), token_ids(6)
    model.gradient_checkpointing_enable()
    cache = KdaHybridCache(model.config)
    model(ids, cache=cache).logits.sum().backward()
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        model(ids, cache=cache)
    with pytest.raises(ValueError, match="checkpointing"):
        model(ids, cache=cache)


# What comes in


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_r31_short_prompts_and_embeddings_equal_ids(model, length):
    """Prompts shorter than the convolutions, or given as embeddings, gave other tokens."""
    ids = token_ids(length, 2)
    want = new_tokens(model, ids, use_cache=False)
    assert new_tokens(model, ids) == want
    embeds = model.get_input_embeddings()(ids)
    assert model.generate(inputs_embeds=embeds, max_new_tokens=8, **GREEDY).tolist() == want


def test_r31_input_is_given_once(model):
    """Both kinds of input, or none, ended in an error about something else."""
    ids = token_ids(4)
    for given in ({}, {"input_ids": ids, "inputs_embeds": model.get_input_embeddings()(ids)}):
        with pytest.raises(ValueError, match="exactly one"):
            model(**given)


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)], ids=str)
@pytest.mark.parametrize("how", [None, {}, {"max_cache_len": 8}], ids=["no cache", "dynamic", "static"])
def test_r31_empty_input_gives_empty_logits(model, shape, how):
    """No rows or no tokens crashed in a reshape."""
    given = {"use_cache": False} if how is None else {"cache": KdaHybridCache(model.config, **how)}
    assert logits_of(model, torch.zeros(shape, dtype=torch.long), **given).shape == (*shape, 97)


def test_r31_generate_has_a_first_token_and_no_cache_where_none_is_wanted(model):
    """`use_cache` was not passed on, and a missing prompt was no prompt."""
    out = model.generate(max_new_tokens=5, use_cache=False, return_dict_in_generate=True, **GREEDY)
    assert out.sequences.tolist() == [[1, *new_tokens(model, torch.tensor([[1]]), 5)[0]]]
    assert getattr(out, CACHE_NAME, None) is None
    assert getattr(model(token_ids(3), use_cache=False), CACHE_NAME, None) is None


def test_r31_generate_of_what_the_cache_has_seen_says_so(model):
    """A prompt that was all in the cache ended in an error about shapes."""
    cache = KdaHybridCache(model.config)
    logits_of(model, token_ids(6), cache=cache)
    with pytest.raises(ValueError, match="`cache` holds 6"):
        new_tokens(model, token_ids(6), cache=cache)


# Precision


@pytest.mark.parametrize("how", [{}, {"max_cache_len": 16}, {"offloading": True}], ids=["dynamic", "static", "off"])
def test_r39_states_of_a_bfloat16_model_are_in_float32(how, tmp_path):
    """States in 16 bits made nonsense of long texts."""
    model = KdaHybridForCausalLM._from_config(tiny_config(**ALIGNED), dtype=torch.bfloat16).eval()
    cache = KdaHybridCache(model.config, **how)
    cache.activate_past_recording()
    for tokens in (5, 1, 3):
        logits_of(model, token_ids(tokens), cache=cache)
        assert {x.dtype for x in states(cache)} == {torch.float32}
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([0, 0]))
    cache.save(tmp_path / "session")
    loaded = KdaHybridCache.load(tmp_path / "session", model.config)
    for kept in (cache, cache.fork(1)[0], loaded):
        assert {x.dtype for x in states(kept)} == {torch.float32}
        assert all(torch.equal(x, y) for x, y in zip(memory(kept), memory(cache), strict=True))


@pytest.mark.parametrize("piece", [1, 4096])
def test_r39_a_slow_decay_is_kept_over_4096_tokens(piece):
    """A decay near 1 was rounded to 1."""
    T, decay = 4096, 0.99992
    # Without writes, the state is what it was, times decay ** T: softplus(gate) = -ln(decay), exp(A_log) = 1.
    gate = (-torch.tensor(decay, dtype=torch.float64).log()).expm1().log().float()
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(1, T, 1, 12, generator=generator).bfloat16()
    first = torch.randn(1, 1, 20, 12, generator=generator)
    state = first
    with torch.no_grad():
        for keys in k.split(piece, 1):
            n = keys.shape[1]
            call = KdaCall(
                q=keys,
                k=keys,
                v=torch.zeros(1, n, 1, 20).bfloat16(),
                gate=torch.zeros(1, n, 1, 12).bfloat16(),
                beta=torch.full((1, n, 1), float("-inf")).bfloat16(),
                A_log=torch.zeros(1),
                dt_bias=gate.expand(12).contiguous(),
                state=state,
            )
            state = kda(call)[1]
    assert state.dtype == torch.float32
    assert_close(state, first * decay**T, 0, 1e-3)


def test_r39_decoding_and_one_shot_agree_in_bfloat16():
    """Beta and decays were rounded in one path and not in the other.

    Of the layers before the first attention, which rounds otherwise token by token, and may then send a token to other
    experts.
    """
    model, ids = KdaHybridForCausalLM._from_config(tiny_config(**ALIGNED), dtype=torch.bfloat16).eval(), token_ids(40)
    stepped, whole = (forward_in_pieces(model, ids, cuts)[1] for cuts in (range(1, 40), []))
    layers = model.config.layer_types.index("full_attention")
    assert layers == 2
    for x, y in zip(states(stepped)[:layers], states(whole)[:layers], strict=True):
        assert_close(x, y, 0, 5e-3)


def test_r35_scores_of_generate_are_those_of_a_padded_forward_without_position_ids(model):
    """Trainers leave position ids out; then log-probabilities of a left-padded batch differ from generation."""
    _, ids, mask = left_padded(4, 9)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, return_dict_in_generate=True, output_logits=True, **GREEDY
    )
    whole = torch.cat([mask, torch.ones(2, 6, dtype=mask.dtype)], 1)
    want = plain(model, out.sequences, attention_mask=whole)[:, 8:-1].log_softmax(-1)
    assert_close(torch.stack(out.logits, 1).log_softmax(-1), want)


@pytest.mark.parametrize("tokens", [1, 40], ids=["loop", "chunks"])
@pytest.mark.parametrize("before", [3, 70], ids=["after a loop", "after chunks"])
def test_r40_states_have_values_before_keys_whatever_computed_them(model, before, tokens):
    """A prefill and a decoding step that disagree about the order of a state; square heads hide it."""
    ids, cache = token_ids(before + tokens), KdaHybridCache(model.config)
    logits_of(model, ids[:, :before], cache=cache)
    assert {state.shape[-2:] for state in states(cache)} == {(20, 12)}
    got = logits_of(model, ids[:, before:], cache=cache)
    assert_close(got, plain(model, ids)[:, before:])
    assert {state.shape[-2:] for state in states(cache)} == {(20, 12)}
