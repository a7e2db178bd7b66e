"""cache_prefix.py: what prompts share is read once, and what comes out is what a run of all of it gives."""

import copy

import pytest
import torch
from helpers import LOGITS, assert_close, dense_model, step, tensors, token_ids
from torch import Tensor

from modeling_kda import CacheSnapshot, KdaHybridCache, KdaHybridForCausalLM, PrefixCache


PLENTY = 2**24
GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 4}
RECURRENT = 3 * 4 * (3 * 20 * 12 + 3 * 3 * (2 * 12 + 20))  # bytes of a row's states and windows in "tiny"
LATENT = 4 * (28 + 8)  # bytes of a token


@pytest.fixture(scope="module")
def model() -> KdaHybridForCausalLM:
    return dense_model("tiny")


@pytest.fixture
def read(model) -> list[int]:
    """The numbers of tokens that the model reads, one a forward."""
    counts = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, args, out: counts.append(args[0].shape[1]))
    yield counts
    hook.remove()


@torch.no_grad()
def assert_prefills(prefix: PrefixCache, ids: Tensor, **given) -> KdaHybridCache:
    """What `prefill` returns, with one more token, gives the logits of a run of all; so does `generate`."""
    cache = prefix.prefill(ids, **given)
    assert cache.get_seq_length() == ids.shape[1] - 1
    [fork] = cache.fork(1)
    want = prefix.model(ids, use_cache=False).logits[:, -1:]
    assert_close(step(prefix.model, ids[:, -1:], fork), want, LOGITS)
    return cache


def prompt(shared: int, own: int, seed: int = 2) -> Tensor:
    """The same beginning for all, and an end for each `seed`."""
    return torch.cat([token_ids(shared), token_ids(own, seed=seed)], 1)


@pytest.mark.parametrize("length", [1, 2, 15, 40])
@pytest.mark.parametrize(
    ("name", "every"), [("tiny", 1), ("tiny", 7), ("tiny", None), ("k3", 7), ("linear", 7), ("full", 7)]
)
def test_prefill_equals_a_plain_forward(name, length, every):
    prefix, ids = PrefixCache(dense_model(name), PLENTY, every), token_ids(length)
    for _ in range(2):
        cache = assert_prefills(prefix, ids)
        tokens = prefix.model.generate(ids, cache=cache, **GREEDY)
        assert tokens.tolist() == prefix.model.generate(ids, use_cache=False, **GREEDY).tolist()


@pytest.mark.parametrize(
    ("every", "borders", "found"),
    [(8, [], 24), (10, [], 30), (10, [13], 30), (None, [], 0), (None, [30], 30), (None, [5, 29, 34], 29), (1, [], 30)],
)
def test_prefill_reads_only_what_is_new(model, read, every, borders, found):
    prefix = PrefixCache(model, PLENTY, every)
    prefix.prefill(prompt(30, 9, seed=2), borders)
    assert sum(read) == 38
    read.clear()
    ids = prompt(30, 11, seed=3)
    cache = prefix.prefill(ids)
    assert sum(read) == 40 - found
    read.clear()
    want = model(ids, use_cache=False).logits[:, -1:]
    assert_close(step(model, ids[:, -1:], cache.fork(1)[0]), want)
    tokens = model.generate(ids, cache=cache, **GREEDY)
    assert tokens.tolist() == model.generate(ids, use_cache=False, **GREEDY).tolist()


def test_prefill_of_the_same_prompt_reads_nothing(model, read):
    prefix, ids = PrefixCache(model, PLENTY), token_ids(20)
    prefix.prefill(ids)
    read.clear()
    assert_prefills(prefix, ids)
    assert sum(read) == 20 + 1, "only the run to compare with, and the last token"


def test_prefill_of_one_token_reads_and_keeps_nothing(model, read):
    prefix = PrefixCache(model, PLENTY)
    cache = prefix.prefill(token_ids(1))
    assert (read, len(prefix), cache.get_seq_length(), prefix.hit_rate) == ([], 0, 0, 0.0)


def test_prefill_finds_the_longest_of_several_prefixes(model, read):
    prefix, ids = PrefixCache(model, PLENTY, None), token_ids(50)
    for length in (10, 40, 20, 30):
        prefix.prefill(ids[:, :length])
    for length, found in ((50, 39), (40, 39), (39, 29), (25, 19), (10, 9), (9, 0)):
        tokens, snapshot = prefix.find(ids[:, : length - 1])
        assert (tokens, snapshot and snapshot.tokens) == (found, found or None)
    read.clear()
    prefix.prefill(ids)
    assert read == [10]


@pytest.mark.parametrize("place", [0, 1, 15, 30])
def test_prefill_does_not_take_another_prompt_for_the_same(model, read, place):
    ids = token_ids(32)
    other = ids.clone()
    other[0, place] = 3 + (other[0, place] - 2) % 94
    prefix = PrefixCache(model, PLENTY, None)
    prefix.prefill(ids)
    read.clear()
    cache = prefix.prefill(other)
    assert read == [31]
    assert_close(step(model, other[:, -1:], cache), model(other).logits[:, -1:])


def test_prefill_takes_ids_of_any_integer_type(model):
    prefix, ids = PrefixCache(model, PLENTY), token_ids(9)
    prefix.prefill(ids.int())
    assert prefix.find(ids[:, :8])[0] == prefix.find(ids[0, :8].short())[0] == 8


def test_find_of_nothing_is_nothing(model):
    prefix = PrefixCache(model, PLENTY)
    assert prefix.find(token_ids(9)) == (0, None)
    prefix.prefill(token_ids(9))
    assert prefix.find(token_ids(0)) == (0, None)
    assert prefix.find(token_ids(9, seed=4)) == (0, None)


# Bytes


def held(prefix: PrefixCache) -> int:
    """Bytes of all tensors that are held, each storage once."""
    kept = [x for snapshot in prefix._snapshots.values() for x in tensors(snapshot._cache)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}.values())


class Watched(PrefixCache):
    """Looks at its bytes whenever something is added."""

    def add(self, input_ids: Tensor, cache: KdaHybridCache) -> None:
        super().add(input_ids, cache)
        assert held(self) == self.nbytes() <= self.max_bytes


def test_nbytes_counts_what_snapshots_share_once(model):
    prefix = Watched(model, PLENTY, 10)
    prefix.prefill(token_ids(41))
    assert len(prefix) == 4
    assert prefix.nbytes() == 4 * RECURRENT + 41 * LATENT
    prefix.clear()
    assert (len(prefix), prefix.nbytes(), prefix.lookups) == (0, 0, 1)


def test_prefill_drops_what_was_not_used_for_longest(model):
    prompts = [token_ids(20, seed=seed) for seed in range(4)]
    prefix = Watched(model, 3 * (RECURRENT + 20 * LATENT), None)
    for ids in prompts[:3]:
        prefix.prefill(ids)
    prefix.prefill(prompts[0])  # used again
    prefix.prefill(prompts[3])
    assert [prefix.find(ids[:, :19])[0] for ids in prompts] == [19, 0, 19, 19]
    prefix.find(prompts[2])
    prefix.prefill(prompts[1])
    assert [prefix.find(ids[:, :19])[0] for ids in prompts] == [0, 19, 19, 19]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_prefix_cache_never_holds_more_than_it_may(model, order, share):
    prompts = [prompt(30, 10), prompt(17, 33, seed=3), token_ids(64, seed=4)]
    whole = PrefixCache(model, PLENTY, 16)
    for ids in prompts:
        whole.prefill(ids)
    prefix = Watched(model, int(share * whole.nbytes()), 16)
    for i in (*order, *order[::-1], order[1]):
        assert_prefills(prefix, prompts[i])
        cache = prefix.prefill(prompts[i])
        step(model, token_ids(70), cache)
        prefix.add(torch.cat([prompts[i][:, :-1], token_ids(70)], 1), cache)
        assert held(prefix) == prefix.nbytes() <= prefix.max_bytes
    assert 0 < len(prefix) < len(whole) + 6


def test_prefix_cache_of_no_bytes_holds_nothing_and_works(model, read):
    prefix, ids = PrefixCache(model, 0, 4), token_ids(20)
    for _ in range(2):
        read.clear()
        prefix.prefill(ids)
        assert sum(read) == 19
        assert (len(prefix), prefix.nbytes(), prefix.hits) == (0, 0, 0)
    assert_prefills(prefix, ids)


def test_add_of_a_snapshot_that_is_too_large_pushes_nothing_out(model):
    ids = token_ids(20)
    prefix = Watched(model, 2 * RECURRENT, None)
    prefix.prefill(ids)
    assert len(prefix) == 1
    assert_prefills(prefix, token_ids(1 + 2 * RECURRENT // LATENT, seed=3)[:, :400])
    assert prefix.find(ids[:, :19])[0] == 19
    assert len(prefix) == 1


# Counts


def test_prefix_cache_counts_prompts_and_tokens(model):
    prefix = PrefixCache(model, PLENTY, None)
    assert prefix.hit_rate == 0.0
    prefix.prefill(prompt(30, 9), [30])
    prefix.prefill(prompt(30, 21, seed=3))
    prefix.prefill(token_ids(12, seed=4))
    assert (prefix.lookups, prefix.hits) == (3, 1)
    assert (prefix.tokens_asked, prefix.tokens_found) == (38 + 50 + 11, 30)
    assert prefix.hit_rate == 30 / 99
    assert repr(prefix) == (
        f"PrefixCache(4 snapshots, {prefix.nbytes():,} of {PLENTY:,} bytes, 1 of 3 prompts found, 30% of their tokens)"
    )


# Conversations


def test_add_of_a_conversation_is_found_by_its_next_turn(model, read):
    prefix, ids = PrefixCache(model, PLENTY), token_ids(20)
    for turn in range(3):
        cache = prefix.prefill(ids)
        tokens = model.generate(ids, cache=cache, **GREEDY)
        assert tokens.tolist() == model.generate(ids, use_cache=False, **GREEDY).tolist()
        prefix.add(tokens[:, :-1], cache)
        ids = torch.cat([tokens, token_ids(3, seed=5 + turn)], 1)
        read.clear()
        assert_prefills(prefix, ids)
        assert read[0] == 3, "the last token of the answer, and of the three new ones all but the last"


ABUSES = {
    "reading": lambda model, cache: step(model, token_ids(30, seed=9), cache),
    "decoding": lambda model, cache: [step(model, token_ids(1, seed=9), cache) for _ in range(3)],
    "reset": lambda model, cache: (cache.reset(), step(model, token_ids(25, seed=9), cache)),
    "crop": lambda model, cache: (
        cache.activate_past_recording(),
        step(model, token_ids(3, seed=9), cache),
        cache.crop(-2),
        step(model, token_ids(9, seed=8), cache),
    ),
    "repeat": lambda model, cache: (cache.batch_repeat_interleave(2), step(model, token_ids(3, 2, 9), cache)),
    "repeat once": lambda model, cache: (cache.batch_repeat_interleave(1), step(model, token_ids(1), cache)),
    "reorder": lambda model, cache: (cache.reorder_cache(torch.tensor([0])), step(model, token_ids(1), cache)),
    "move": lambda model, cache: (cache.move_to("cpu"), step(model, token_ids(1), cache)),
    "restore": lambda model, cache: (
        cache.restore(KdaHybridCache(model.config).snapshot()),
        step(model, token_ids(25, seed=9), cache),
    ),
}


@pytest.mark.parametrize("abuse", ABUSES)
def test_what_is_kept_does_not_change_with_the_cache_that_was_returned(model, abuse):
    prefix, ids = PrefixCache(model, PLENTY, 6), token_ids(20)
    for _ in range(2):
        cache = prefix.prefill(ids)
        before = [x.clone() for snapshot in prefix._snapshots.values() for x in tensors(snapshot._cache)]
        ABUSES[abuse](model, cache)
        after = [x for snapshot in prefix._snapshots.values() for x in tensors(snapshot._cache)]
        assert all(torch.equal(x, y) for x, y in zip(before, after))
    assert_prefills(prefix, ids)


# Bad input


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (token_ids(5, rows=2), "one row of token ids"),
        (token_ids(5).float(), r"one row of token ids.*float32"),
        (token_ids(5).unsqueeze(0), "one row of token ids"),
        (torch.tensor(5), "one row of token ids"),
        (token_ids(0), "no tokens"),
        (token_ids(0)[0], "no tokens"),
    ],
)
def test_prefill_refuses(model, ids, message):
    prefix = PrefixCache(model, PLENTY)
    with pytest.raises(ValueError, match=message):
        prefix.prefill(ids)
    assert (prefix.lookups, len(prefix)) == (0, 0)


@pytest.mark.parametrize("borders", [[0], [-1], [9], [3, 10]])
def test_prefill_refuses_borders_outside_of_the_prompt(model, borders):
    prefix = PrefixCache(model, PLENTY)
    with pytest.raises(ValueError, match="`borders` must lie between the first and the last of 9 tokens"):
        prefix.prefill(token_ids(9), borders)
    assert prefix.lookups == 0
    assert_prefills(prefix, token_ids(9), borders=[1, 8, 8])


@pytest.mark.parametrize(("rows", "tokens"), [(1, 8), (1, 10), (2, 9), (1, 0)])
def test_add_refuses_a_cache_of_other_tokens(model, rows, tokens):
    prefix, cache = PrefixCache(model, PLENTY), KdaHybridCache(model.config)
    step(model, token_ids(tokens, rows), cache)
    with pytest.raises(ValueError, match=rf"{tokens} tokens in -?{rows} rows; `input_ids` are 9 tokens in one"):
        prefix.add(token_ids(9), cache)
    assert len(prefix) == 0


def test_prefill_refuses_a_model_in_training(model):
    training = copy.deepcopy(model).train()
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        PrefixCache(training, PLENTY).prefill(token_ids(9))


@pytest.mark.parametrize("given", [(-1, 256), (10, 0), (10, -3)])
def test_prefix_cache_refuses_bad_numbers(model, given):
    with pytest.raises(ValueError, match=r"`max_bytes` must not be below 0, and `every` at least 1 or None"):
        PrefixCache(model, *given)


def test_find_returns_a_snapshot_for_any_cache(model):
    prefix, ids = PrefixCache(model, PLENTY, None), token_ids(9)
    prefix.prefill(ids)
    tokens, snapshot = prefix.find(ids)
    assert isinstance(snapshot, CacheSnapshot)
    cache = KdaHybridCache(model.config, 20)
    cache.restore(snapshot)
    assert_close(step(model, ids[:, tokens:], cache), model(ids).logits[:, tokens:])
