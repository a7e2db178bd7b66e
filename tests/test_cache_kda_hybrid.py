"""cache_kda_hybrid.py: what is remembered, how it grows, and that rows stay rows."""

import copy
import itertools

import pytest
import torch
from helpers import LOGITS, assert_close, tiny_config, tiny_model, token_ids
from torch import Tensor
from transformers.cache_utils import Cache

from modeling_kda import KdaHybridCache, KdaHybridForCausalLM
from modeling_kda.cache_kda_hybrid import LatentMemory, RecurrentMemory


# transformers' experts want rows of 16 bytes.
ALIGNED = {"hidden_size": 64, "moe_intermediate_size": 40}


@pytest.fixture(scope="module")
def model() -> KdaHybridForCausalLM:
    return tiny_model()


@torch.no_grad()
def step(model: KdaHybridForCausalLM, ids: Tensor, cache: KdaHybridCache, **given) -> Tensor:
    return model(ids, cache=cache, **given).logits


def filled(model: KdaHybridForCausalLM, ids: Tensor, **given) -> KdaHybridCache:
    cache = KdaHybridCache(model.config)
    step(model, ids, cache, **given)
    return cache


def tensors(cache: KdaHybridCache) -> list[Tensor]:
    return [getattr(layer, name) for layer in cache.layers for name in layer.TENSORS]


def test_cache_is_one_of_transformers():
    cache = KdaHybridCache(tiny_config())
    assert isinstance(cache, Cache)
    assert len(cache) == 4
    assert [type(layer) for layer in cache.layers] == [
        {"linear_attention": RecurrentMemory, "full_attention": LatentMemory}[kind]
        for kind in tiny_config().layer_types
    ]
    assert not any(cache.is_linear), "transformers would take it for a cache that has no length"


def test_cache_is_empty_at_first(model):
    cache = KdaHybridCache(model.config)
    assert cache.get_seq_length() == 0
    assert not cache.has_previous_state()
    assert not cache.is_croppable
    assert not cache.is_compileable
    assert cache.batch_size == -1
    assert cache.nbytes() == {"recurrent": 0, "latent": 0}


@pytest.mark.parametrize("first", ["linear_attention", "full_attention"])
def test_cache_counts_tokens_rows_and_keys(first):
    model = tiny_model(layer_types=[first, "linear_attention", "full_attention", "linear_attention"])
    cache = filled(model, token_ids(5, rows=3))
    step(model, token_ids(2, rows=3), cache)
    assert [cache.get_seq_length(i) for i in range(4)] == [7] * 4
    assert cache.get_seq_length() == 7
    assert cache.get_mask_sizes(4, 2) == (11, 0)
    assert cache.has_previous_state()
    assert cache.batch_size == 3
    assert cache.get_max_length() == cache.get_max_cache_shape() == -1
    assert "7 tokens" in repr(cache)


@pytest.mark.parametrize("pieces", [(1,) * 12, (9, 1, 2), (2, 40, 1, 1), (40, 40), (1, 1, 33)])
def test_cache_makes_pieces_one_run(model, pieces):
    ids = token_ids(sum(pieces), rows=2)
    cache = KdaHybridCache(model.config)
    got = torch.cat([step(model, piece, cache) for piece in ids.split(pieces, 1)], 1)
    assert_close(got, model(ids).logits)


def test_latent_memory_is_all_that_went_in():
    memory, pieces = LatentMemory(), [torch.randn(2, n, 5) for n in (3, 1, 1, 70, 1, 200, 1)]
    with torch.no_grad():
        for i, piece in enumerate(pieces):
            latents = memory.update(piece)
            assert torch.equal(latents, torch.cat(pieces[: i + 1], 1))
            assert torch.equal(memory.latents, latents)
            assert memory.length == latents.shape[1]


@pytest.mark.parametrize("start", [1, 100, 1000])
def test_latent_memory_rarely_moves(start):
    """1000 tokens, each added where it stays; a copy of the past only when the buffer is full."""
    memory, addresses, tokens = LatentMemory(), [], torch.randn(1, start + 1000, 3)
    with torch.no_grad():
        memory.update(tokens[:, :start])
        for t in range(start, start + 1000):
            addresses.append(memory.update(tokens[:, t : t + 1]).data_ptr())
    moves = sum(a != b for a, b in itertools.pairwise(addresses))
    assert moves <= 11
    assert memory.buffer.shape[1] <= 1.25 * (start + 1000) + 64
    assert torch.equal(memory.latents, tokens)


def test_latent_memory_leaves_what_it_returned_alone():
    memory, first = LatentMemory(), torch.randn(1, 4, 3)
    with torch.no_grad():
        held = memory.update(first)
        memory.update(torch.randn(1, 1, 3))
        second = memory.update(torch.randn(1, 1, 3))
        before = second.clone()
        memory.update(torch.randn(1, 100, 3))
    assert torch.equal(held, first)
    assert torch.equal(second, before)


def test_latent_memory_copies_what_it_is_given():
    memory, given = LatentMemory(), torch.randn(1, 4, 3)
    with torch.no_grad():
        memory.update(given)
        before = given.clone()
        given.zero_()
    assert torch.equal(memory.latents, before)


def test_latent_memory_passes_on_gradients_and_goes_on_without():
    memory, a, b, c = LatentMemory(), *(torch.randn(1, 2, 3) for _ in range(3))
    a.requires_grad_()
    memory.update(a)
    memory.update(b)
    memory.latents.square().sum().backward()
    assert torch.equal(a.grad, 2 * a.detach())
    with torch.no_grad():
        assert torch.equal(memory.update(c), torch.cat([a, b, c], 1))


REORDERS = {
    "reorder_cache": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 2])), [2, 0, 2]),
    "batch_select_indices": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "batch_repeat_interleave": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("how", REORDERS)
def test_cache_rows_move_as_if_they_had_been_there_from_the_start(model, how, tokens):
    change, rows = REORDERS[how]
    ids, after = token_ids(9, rows=3), token_ids(tokens + 1, rows=len(rows), seed=2)
    mask = torch.ones(3, 9).long()
    mask[0, :4] = 0
    cache = filled(model, ids[:, :8], attention_mask=mask[:, :8])
    step(model, ids[:, 8:], cache, attention_mask=mask)  # into the buffer
    change(cache)
    assert cache.batch_size == len(rows)
    whole_mask = torch.cat([mask[rows], torch.ones_like(after)], 1)
    got = [
        step(model, after[:, :tokens], cache, attention_mask=whole_mask[:, :-1]),
        step(model, after[:, tokens:], cache, attention_mask=whole_mask),
    ]
    want = model(torch.cat([ids[rows], after], 1), attention_mask=whole_mask).logits[:, 9:]
    assert_close(torch.cat(got, 1), want)


def test_cache_rows_are_independent_after_they_were_repeated(model):
    """A step of one row must not write into another's state."""
    ids, after = token_ids(6), torch.tensor([[11], [12]])
    cache = filled(model, ids)
    cache.batch_repeat_interleave(2)
    step(model, after, cache)
    got = step(model, torch.tensor([[13], [13]]), cache)
    whole = torch.cat([ids.expand(2, -1), after, torch.tensor([[13], [13]])], 1)
    assert_close(got, model(whole).logits[:, -1:])


def test_cache_reset_forgets_everything(model):
    cache, ids = filled(model, token_ids(9, rows=2)), token_ids(7, seed=3)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.batch_size == -1
    assert sum(cache.nbytes().values()) == 0
    assert_close(step(model, ids, cache), model(ids).logits)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_nbytes_are_those_of_the_tensors(rows, dtype):
    config = tiny_config(**ALIGNED)
    model = KdaHybridForCausalLM._from_config(config, dtype=dtype).eval()
    wide = torch.tensor([], dtype=dtype).element_size()
    heads, key, value, taps = 3, 12, 20, 4
    recurrent = 3 * rows * (4 * heads * value * key + wide * (taps - 1) * heads * (2 * key + value))  # linear layers
    cache, seen = KdaHybridCache(config), 0
    for tokens in (5, 1, 1, 64):
        step(model, token_ids(tokens, rows), cache)
        seen += tokens
        assert cache.nbytes() == {"recurrent": recurrent, "latent": (28 + 8) * wide * seen * rows}
    assert sum(cache.nbytes().values()) == sum(x.numel() * x.element_size() for x in tensors(cache))


def test_cache_keeps_no_memory_of_longer_tensors(model):
    """The window is a few rows of a long input; it must not keep the rest alive."""
    cache = filled(model, token_ids(200))
    for layer in cache.layers:
        if isinstance(layer, RecurrentMemory):
            for name in layer.TENSORS:
                x = getattr(layer, name)
                assert x.untyped_storage().nbytes() <= 2 * x.numel() * x.element_size(), name


def test_cache_of_a_bfloat16_model_keeps_states_in_float32():
    model = KdaHybridForCausalLM._from_config(tiny_config(**ALIGNED), dtype=torch.bfloat16).eval()
    cache = filled(model, token_ids(5))
    for tokens in (1, 40, 2):
        step(model, token_ids(tokens), cache)
        for layer in cache.layers:
            if isinstance(layer, RecurrentMemory):
                assert layer.state.dtype == torch.float32
                assert layer.window.dtype == torch.bfloat16
            else:
                assert layer.latents.dtype == torch.bfloat16


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda cache: copy.deepcopy(copy.deepcopy(cache))])
def test_cache_copies_are_independent(model, copier):
    ids, more, other = token_ids(6, rows=2), token_ids(3, rows=2, seed=2), token_ids(3, rows=2, seed=3)
    cache = filled(model, ids[:, :5])
    step(model, ids[:, 5:], cache)
    kept = copier(cache)
    before = [x.clone() for x in tensors(kept)]
    for t in range(3):
        step(model, more[:, t : t + 1], cache)
    assert all(torch.equal(x, y) for x, y in zip(tensors(kept), before))
    got = torch.cat([step(model, other[:, t : t + 1], kept) for t in range(3)], 1)
    assert_close(got, model(torch.cat([ids, other], 1)).logits[:, 6:])
    got = step(model, other, cache)
    assert_close(got, model(torch.cat([ids, more, other], 1)).logits[:, 9:])


def test_cache_cannot_be_cropped(model):
    cache = filled(model, token_ids(6))
    with pytest.raises(NotImplementedError, match=r"crop\(2\).*deepcopy"):
        cache.crop(2)
    cache.crop(0)
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize("at", [1, 20, 38])
def test_cache_passes_gradients_from_piece_to_piece(model, at):
    """One half after the other, absorbed or not, gives the gradients of one run."""
    ids, weight = token_ids(40, rows=2), torch.randn(2, 40, 97)
    embeds = model.get_input_embeddings()(ids).detach()
    one, two = embeds.clone().requires_grad_(), embeds.clone().requires_grad_()
    (model(inputs_embeds=one, use_cache=False).logits * weight).sum().backward()
    cache = KdaHybridCache(model.config)
    halves = [model(inputs_embeds=half, cache=cache).logits for half in (two[:, :at], two[:, at:])]
    (torch.cat(halves, 1) * weight).sum().backward()
    model.zero_grad()
    assert one.grad[:, :at].abs().max() > 0.1
    assert_close(two.grad, one.grad, absolute=0, relative=LOGITS)


def test_cache_made_with_gradients_goes_on_without(model):
    """Steps without gradients write into memory, but not into what the backward still needs."""
    ids, cache = token_ids(9), KdaHybridCache(model.config)
    embeds = model.get_input_embeddings()(ids).detach()
    one, two = embeds[:, :5].clone().requires_grad_(), embeds[:, :5].clone().requires_grad_()
    first = model(inputs_embeds=one, cache=cache).logits
    got = torch.cat([step(model, ids[:, t : t + 1], cache) for t in range(5, 9)], 1)
    assert_close(got, model(ids).logits[:, 5:])
    first.square().sum().backward()
    model(inputs_embeds=two, use_cache=False).logits.square().sum().backward()
    model.zero_grad()
    assert_close(one.grad, two.grad, absolute=0, relative=LOGITS)
