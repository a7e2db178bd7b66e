"""cache_kda_hybrid.py: what is remembered, how it grows, and that rows stay rows."""

import copy
from unittest.mock import Mock

import pytest
import torch
from helpers import (
    ALIGNED,
    CACHE_CASES,
    CACHE_KINDS,
    DENSE_MODELS,
    LOGITS,
    assert_close,
    assert_goes_on,
    dense_model,
    filled,
    step,
    tensors,
    tiny_config,
    tiny_model,
    token_ids,
)
from transformers.cache_utils import Cache

from modeling_kda import KdaHybridCache, KdaHybridForCausalLM
from modeling_kda.cache_memory import LatentMemory, RecurrentMemory


@pytest.fixture(scope="module")
def model() -> KdaHybridForCausalLM:
    return dense_model("tiny")


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
    assert cache.is_croppable
    assert not cache.is_compileable
    assert cache.batch_size == -1
    assert cache.nbytes() == {"recurrent": 0, "latent": 0, "recorded": 0}


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


@pytest.mark.parametrize("pieces", [(1,) * 12, (9, 1, 2), (2, 40, 1, 1), (40, 40), (1, 1, 33)])
def test_cache_makes_pieces_one_run(model, pieces):
    ids = token_ids(sum(pieces), rows=2)
    cache = KdaHybridCache(model.config)
    got = torch.cat([step(model, piece, cache) for piece in ids.split(pieces, 1)], 1)
    assert_close(got, model(ids).logits)


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
        assert cache.nbytes() == {"recurrent": recurrent, "latent": (28 + 8) * wide * seen * rows, "recorded": 0}
    assert sum(cache.nbytes().values()) == sum(x.numel() * x.element_size() for x in tensors(cache))


def test_cache_copies_are_independent(model):
    ids, more, other = token_ids(6, rows=2), token_ids(3, rows=2, seed=2), token_ids(3, rows=2, seed=3)
    cache = filled(model, ids[:, :5])
    step(model, ids[:, 5:], cache)
    kept = copy.deepcopy(cache)
    before = [x.clone() for x in tensors(kept)]
    for t in range(3):
        step(model, more[:, t : t + 1], cache)
    assert all(torch.equal(x, y) for x, y in zip(tensors(kept), before))
    got = torch.cat([step(model, other[:, t : t + 1], kept) for t in range(3)], 1)
    assert_close(got, model(torch.cat([ids, other], 1)).logits[:, 6:])
    got = step(model, other, cache)
    assert_close(got, model(torch.cat([ids, more, other], 1)).logits[:, 9:])


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


# Taken back

CROPS = {  # pieces read, how many of them before recording begins, the limit, tokens taken back
    "decoded": ((20, *[1] * 9), 1, 64, 6),
    "of one forward": ((20, 11), 1, 64, 5),
    "of several forwards": ((20, 3, 1, 35, 2), 1, 64, 40),
    "all that is recorded": ((20, 3, 1, 4), 1, 64, 8),
    "behind a prefill longer than the limit": ((50, 2), 0, 8, 10),
    "behind many more than the limit": ((5, *[1] * 30), 0, 8, 8),
    "down to an empty cache": ((7, 1, 1), 0, 64, 9),
    "nothing": ((20, 3), 1, 64, 0),
}


@pytest.mark.parametrize("case", CROPS)
@pytest.mark.parametrize(("name", "kind"), [*CACHE_CASES, ("k3", "static"), ("full", "static")])
def test_crop_leaves_what_a_fresh_run_remembers(name, kind, case):
    pieces, before, limit, removed = CROPS[case]
    model, ids = dense_model(name), token_ids(sum(pieces), rows=2)
    cache = KdaHybridCache(model.config, **CACHE_KINDS[kind])
    for i, piece in enumerate(ids.split(pieces, 1)):
        if i == before:
            cache.activate_past_recording(limit)
        step(model, piece, cache)
    cache.crop(torch.tensor(-removed) if "forward" in case else -removed)
    assert_goes_on(model, cache, ids[:, : ids.shape[1] - removed])
    cache.crop(-4)  # it records on
    assert_goes_on(model, cache, torch.cat([ids[:, : ids.shape[1] - removed], token_ids(5, 2, 2)[:, :1]], 1))


@pytest.mark.parametrize("removed", [1, 4, 6, 9, 15])
@pytest.mark.parametrize(("name", "kind"), [("tiny", "static"), ("k3", "growing"), ("tiny", "offloading")])
def test_crop_of_padded_rows_leaves_what_a_fresh_run_remembers(name, kind, removed):
    model, ids, mask, end = dense_model(name), token_ids(15, rows=3), torch.ones(3, 15).long(), 0
    mask[0, :5] = mask[1, 7:11] = mask[1, 13] = mask[2, 9:] = 0
    cache = KdaHybridCache(model.config, **CACHE_KINDS[kind])
    cache.activate_past_recording()
    for piece in ids.split((6, 1, 1, 5, 1, 1), 1):
        end += piece.shape[1]
        step(model, piece, cache, attention_mask=mask[:, :end])
    cache.crop(-removed)
    assert_goes_on(model, cache, ids[:, : 15 - removed], mask[:, : 15 - removed])


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_crop_after_a_change_of_rows(model, kind):
    ids, rows = token_ids(12, rows=3), torch.tensor([2, 0, 2])
    cache = KdaHybridCache(model.config, **CACHE_KINDS[kind])
    cache.activate_past_recording()
    for piece in ids.split((6, 4, 2), 1):
        step(model, piece, cache)
    cache.reorder_cache(rows)
    cache.crop(-5)
    assert_goes_on(model, cache, ids[rows, :7])


@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize(
    ("number", "recorded", "message"),
    [
        (-4, 3, r"4 tokens.*: 3 of 9 are recorded.*activate_past_recording\(tokens="),
        (-10, 3, r"10 tokens.*: 3 of 9 are recorded"),
        (torch.tensor(-4), 3, "3 of 9 are recorded"),
        (-1, 0, r"1 tokens.*: 0 of 9 are recorded.*activate_past_recording\(\).*snapshot"),
        (2, 3, "0 or below, as in transformers: -2, not 2"),
        (2, 0, "0 or below"),
    ],
)
def test_crop_refuses_what_it_cannot_and_changes_nothing(model, kind, number, recorded, message):
    ids = token_ids(9, rows=2)
    cache = filled(model, ids[:, :6], kind)
    if recorded:
        cache.activate_past_recording()
    step(model, ids[:, 6:], cache)
    with pytest.raises(ValueError, match=message):
        cache.crop(number)
    assert_goes_on(model, cache, ids)


def test_recording_ends_and_takes_a_number_above_0(model):
    cache = KdaHybridCache(model.config)
    for tokens in (0, -3):
        with pytest.raises(ValueError, match=f"at least 1, got {tokens}"):
            cache.activate_past_recording(tokens)
    cache.activate_past_recording(5)
    step(model, token_ids(9), cache)
    cache.deactivate_past_recording()
    assert (cache.recording, cache.nbytes()["recorded"]) == (0, 0)
    assert_goes_on(model, cache, token_ids(9))


def test_crop_without_recording_needs_none_if_no_layer_is_recurrent():
    model, ids = dense_model("full"), token_ids(9)
    cache = filled(model, ids)
    with pytest.raises(ValueError, match="10 tokens"):
        cache.crop(-10)
    cache.crop(-7)
    assert_goes_on(model, cache, ids[:, :2])


# Broken off


@pytest.fixture(params=CACHE_KINDS)
def unfinished(request, model, monkeypatch):
    """A cache, what it held before a forward broke off in the third of four layers, and a snapshot of that."""
    ids = token_ids(9, rows=2)
    cache = filled(model, ids[:, :6], request.param)
    cache.activate_past_recording()
    step(model, ids[:, 6:], cache)
    snapshot = cache.snapshot()
    monkeypatch.setattr(model.model.layers[2], "forward", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        step(model, token_ids(2, rows=2), cache)
    monkeypatch.undo()
    return cache, ids, snapshot


@pytest.mark.parametrize("use", ["forward", "snapshot", "fork", "save", "crop", "crop of nothing"])
def test_cache_of_a_forward_that_broke_off_cannot_be_used(model, unfinished, use, tmp_path):
    cache, *_ = unfinished
    uses = {
        "forward": lambda: step(model, token_ids(1, rows=2), cache),
        "snapshot": cache.snapshot,
        "fork": lambda: cache.fork(1),
        "save": lambda: cache.save(tmp_path / "session"),
        "crop": lambda: cache.crop(-1),
        "crop of nothing": lambda: cache.crop(0),
    }
    with pytest.raises(ValueError, match=r"ended before its last layer.*`restore`.*`reset`"):
        uses[use]()


@pytest.mark.parametrize("how", ["restore", "reset"])
def test_cache_of_a_forward_that_broke_off_is_healed(model, unfinished, how):
    cache, ids, snapshot = unfinished
    cache.restore(snapshot) if how == "restore" else cache.reset()
    assert_goes_on(model, cache, ids if how == "restore" else ids[:, :0])


# Places


def places(cache: KdaHybridCache) -> list[int]:
    found = [
        (layer.state, layer.window) if layer.kind == "recurrent" else (layer.rows.data,) for layer in cache.layers
    ]
    return [x.data_ptr() for tensors in found for x in tensors]


@pytest.mark.parametrize("name", ["tiny", "k3", "linear", "full"])
def test_static_cache_keeps_its_addresses(name):
    model, ids = dense_model(name), token_ids(9, rows=2)
    cache = KdaHybridCache(model.config, 40)
    counter = cache._length.data_ptr()
    step(model, ids, cache)
    start, snapshot = places(cache), cache.snapshot()
    cache.activate_past_recording()
    changes = {
        "decode": lambda: [step(model, token_ids(1, rows=2), cache) for _ in range(3)],
        "read": lambda: step(model, token_ids(7, rows=2), cache),
        "crop": lambda: cache.crop(-5),
        "reorder": lambda: cache.reorder_cache(torch.tensor([1, 0])),
        "restore": lambda: cache.restore(snapshot),
        "restore from a growing cache": lambda: cache.restore(filled(model, token_ids(3, rows=2)).snapshot()),
        "reset": cache.reset,
        "read again": lambda: step(model, ids, cache),
        "crop all": lambda: cache.crop(-9),
    }
    for what, change in changes.items():
        change()
        assert places(cache) == start, what
        assert cache._length.data_ptr() == counter, what
    assert_goes_on(model, cache, token_ids(0, rows=2))


@pytest.mark.parametrize("tokens", [6, 7, 40])
@pytest.mark.parametrize("name", DENSE_MODELS)
def test_static_cache_refuses_more_than_there_is_room_for_and_goes_on(name, tokens):
    model, ids = dense_model(name), token_ids(40, rows=2)
    cache = KdaHybridCache(model.config, 45)
    step(model, ids, cache)
    with pytest.raises(ValueError, match=rf"{tokens} tokens behind 40 do not fit into `max_cache_len` 45"):
        step(model, token_ids(tokens, rows=2), cache)
    assert_goes_on(model, cache, ids)  # 5 more
    with pytest.raises(ValueError, match="1 tokens behind 45 do not fit"):
        step(model, token_ids(1, rows=2), cache)


@pytest.mark.parametrize("held", [False, True])
def test_reset_uses_the_memory_again_unless_a_snapshot_reads_it(model, held):
    ids = token_ids(9)
    cache = filled(model, ids)
    snapshot = cache.snapshot() if held else None
    before = cache.layers[2].rows.data.data_ptr()
    cache.reset()
    assert_goes_on(model, cache, token_ids(0))
    assert (cache.layers[2].rows.data.data_ptr() == before) != held
    if held:
        cache.restore(snapshot)
        assert_goes_on(model, cache, ids)


# Numbers


def test_nbytes_of_a_layer_and_repr_name_what_there_is(model):
    cache = KdaHybridCache(model.config)
    assert repr(cache) == "KdaHybridCache(0 tokens)"
    cache.activate_past_recording()
    step(model, token_ids(50, rows=2), cache)
    total, layers = cache.nbytes(), [cache.nbytes(i) for i in range(4)]
    assert [bool(x["latent"]) for x in layers] == [False, False, True, False]
    assert [bool(x["recurrent"]) for x in layers] == [bool(x["recorded"]) for x in layers] == [True, True, False, True]
    assert total == {kind: sum(x[kind] for x in layers) for kind in total}
    assert repr(cache) == (
        f"KdaHybridCache(50 tokens, recurrent {total['recurrent']:,} bytes, latent {total['latent']:,} bytes, "
        f"recorded {total['recorded']:,} bytes)"
    )
