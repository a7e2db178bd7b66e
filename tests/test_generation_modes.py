"""`generate()`: every mode, on every kind of model and padding, gives what each row alone gives without a cache."""

import functools
from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_close, k3_model, tiny_model, token_ids
from torch import Tensor
from transformers import TextIteratorStreamer

from modeling_kda import KdaHybridCache, KdaHybridForCausalLM
from modeling_kda.compat_transformers import CACHE_NAME


MODELS = {
    "tiny": tiny_model,
    "k3": k3_model,
    "linear": functools.partial(tiny_model, layer_types=["linear_attention"] * 4),
    "full": functools.partial(tiny_model, layer_types=["full_attention"] * 4),
}
BOTH = ["tiny", "k3"]
PADS = ["no pads", "left pads", "right pads"]
CACHES = {"dynamic": {}, "static": {"max_cache_len": 40}, "offloaded": {"offloading": True}}
NEW = 8
GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW}
BEAMS = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, **GREEDY}
SAMPLES = {"do_sample": True, "temperature": 1.3, "num_return_sequences": 3, "pad_token_id": 0, "max_new_tokens": NEW}
DETAILS = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}


class Prompt(NamedTuple):
    """`ids` and `mask` `[B, T]`; `seen`: how many tokens a forward puts into a cache, for `generate` to go on."""

    ids: Tensor
    mask: Tensor
    seen: int

    @property
    def rows(self) -> list[Tensor]:
        """Each row's real tokens, `[1, n]`."""
        return [ids[mask.bool()].unsqueeze(0) for ids, mask in zip(self.ids, self.mask)]


@functools.cache
def made(name: str, seed: int = 0) -> KdaHybridForCausalLM:
    """Shared, so never changed."""
    return MODELS[name](seed)


def prompt_of(pads: str, rows: int = 2) -> Prompt:
    """Pads are wider than the convolutions, and hold tokens that could be seen. The last row has them."""
    masks = {
        "no pads": [[1] * 9, [1] * 9],
        "left pads": [[1] * 9, [0] * 5 + [1] * 4],
        "right pads": [[1] * 8 + [1] * 3, [1] * 3 + [0] * 5 + [1] * 3],
    }[pads]
    mask = torch.tensor(masks[-rows:])
    return Prompt(token_ids(mask.shape[1], rows), mask, 8 if pads == "right pads" else 0)


def prefilled(model: KdaHybridForCausalLM, prompt: Prompt, repeats: int = 1, **how: Any) -> KdaHybridCache:
    """A cache of the tokens that are not for `generate` to see first, each row `repeats` times."""
    cache = KdaHybridCache(model.config, **how)
    if prompt.seen:
        with torch.no_grad():
            model(prompt.ids[:, : prompt.seen], attention_mask=prompt.mask[:, : prompt.seen], cache=cache)
        cache.batch_repeat_interleave(repeats)
    return cache


def inputs_of(model: KdaHybridForCausalLM, prompt: Prompt, kind: str = "dynamic", repeats: int = 1) -> dict[str, Any]:
    """What `generate` takes, with a kind of cache."""
    inputs = {"input_ids": prompt.ids}
    if not prompt.mask.all():
        inputs["attention_mask"] = prompt.mask
    if prompt.seen:
        return {**inputs, "cache": prefilled(model, prompt, repeats, **CACHES[kind])}
    return inputs if kind == "dynamic" else {**inputs, "cache_implementation": kind}


@torch.no_grad()
def assert_greedy_alone(model: torch.nn.Module, row: Tensor, tokens: Tensor, logits: Tensor | None = None) -> None:
    """`tokens` `[n]`, and the logits that they come from, are what whole forwards without a cache give after `row`.

    One such forward shows it: each token is the best one after all before it.
    """
    whole = torch.cat([row, tokens.unsqueeze(0)], 1)
    want = model(whole, use_cache=False).logits[0, row.shape[1] - 1 : -1]
    assert tokens.tolist() == want.argmax(-1).tolist()
    if logits is not None:
        assert_close(logits, want)


def assert_equals_rows_alone(
    model: torch.nn.Module, out: Any, rows: list[Tensor], length: int, tokens: int = NEW
) -> None:
    """The new tokens, behind `length`, and their logits are those of each row alone."""
    assert out.sequences.shape == (len(rows), length + tokens)
    for row, new, logits in zip(rows, out.sequences[:, length:], torch.stack(out.logits, 1)):
        assert_greedy_alone(model, row, new, logits)


# Greedy

GREEDY_WAYS = {
    "dynamic": {},
    "static": {},
    "offloaded": {},
    "chunks of 1": {"prefill_chunk_size": 1},
    "chunks of 4": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", GREEDY_WAYS)
def test_generate_equals_rows_alone(name, pads, way):
    if way.startswith("chunks") and pads == "right pads" and CACHE_NAME == "past_key_values":
        pytest.skip("this transformers cuts the mask of a chunk without counting what the cache has seen")
    model, prompt = made(name), prompt_of(pads)
    inputs = inputs_of(model, prompt, way if way in CACHES else "dynamic")
    out = model.generate(**inputs, **GREEDY_WAYS[way], **GREEDY, **DETAILS)
    assert_equals_rows_alone(model, out, prompt.rows, prompt.ids.shape[1])
    cache = getattr(out, CACHE_NAME)
    assert cache.get_seq_length() == out.sequences.shape[1] - 1
    assert cache.is_compileable == (way == "static")
    assert all(layer.offloading == (way == "offloaded") for layer in cache.layers if layer.kind == "latent")


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("name", BOTH)
def test_generate_from_embeddings_equals_rows_alone(name, pads):
    model, prompt = made(name), prompt_of(pads)
    inputs = inputs_of(model, prompt)
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    out = model.generate(**inputs, **GREEDY, **DETAILS)
    assert_equals_rows_alone(model, out, prompt.rows, out.sequences.shape[1] - NEW)


class Numbers:
    """A tokenizer as far as a streamer needs one."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f"{int(i)} " for i in ids)


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("name", BOTH)
def test_generate_streams_the_tokens_of_the_row_alone(name, pads):
    model, prompt = made(name), prompt_of(pads, rows=1)
    streamer = TextIteratorStreamer(Numbers(), skip_prompt=True, timeout=60)
    thread = Thread(target=model.generate, kwargs={**inputs_of(model, prompt), **GREEDY, "streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert_greedy_alone(model, *prompt.rows, torch.tensor([int(x) for x in "".join(pieces).split()]))
    assert sum(map(bool, pieces)) == NEW


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("name", BOTH)
def test_generate_with_explicit_positions_changes_nothing(name, pads):
    """Positions that do not count pads stand still at them, and go on behind the prompt."""
    model, prompt = made(name), prompt_of(pads)
    positions = (prompt.mask.cumsum(1) - 1).clamp(min=0)
    out = model.generate(**inputs_of(model, prompt), position_ids=positions, **GREEDY, **DETAILS)
    assert_equals_rows_alone(model, out, prompt.rows, prompt.ids.shape[1])


# Sampling and beams


@functools.cache
def several_alone(name: str, row: tuple[int, ...], beams: bool) -> Any:
    """Beams or samples of one row, without a cache."""
    torch.manual_seed(5)
    return made(name).generate(torch.tensor([row]), use_cache=False, **(BEAMS if beams else SAMPLES), **DETAILS)


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("kind", CACHES)
def test_generate_of_samples_equals_the_row_alone(name, pads, kind):
    model, prompt = made(name), prompt_of(pads, rows=1)
    inputs = inputs_of(model, prompt, kind, SAMPLES["num_return_sequences"])
    torch.manual_seed(5)
    out = model.generate(**inputs, **SAMPLES, **DETAILS)
    [row] = prompt.rows
    want = several_alone(name, tuple(row[0].tolist()), False)
    got = out.sequences[:, prompt.ids.shape[1] :].tolist()
    assert got == want.sequences[:, row.shape[1] :].tolist()
    assert_close(torch.stack(out.logits), torch.stack(want.logits))
    assert len(set(map(tuple, got))) == 3, "samples that do not differ show nothing"


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", CACHES)
def test_generate_with_beams_equals_rows_alone(name, pads, kind):
    model, prompt = made(name), prompt_of(pads)
    out = model.generate(**inputs_of(model, prompt, kind, BEAMS["num_beams"]), **BEAMS, **DETAILS)
    sequences, scores = out.sequences[:, prompt.ids.shape[1] :].split(2), out.sequences_scores.split(2)
    for i, row in enumerate(prompt.rows):
        want = several_alone(name, tuple(row[0].tolist()), True)
        assert sequences[i].tolist() == want.sequences[:, row.shape[1] :].tolist()
        assert_close(scores[i], want.sequences_scores, name=f"scores of row {i}")


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("how", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_generate_of_a_batch_equals_batches_of_one(pads, how):
    model, prompt = made("tiny"), prompt_of(pads)
    repeats, each = how.get("num_beams", 1), how.get("num_return_sequences", 1)
    whole = model.generate(**inputs_of(model, prompt, repeats=repeats), **how)
    for i, rows in enumerate(whole.split(each)):
        one = Prompt(prompt.ids[i : i + 1], prompt.mask[i : i + 1], prompt.seen)
        assert rows.tolist() == model.generate(**inputs_of(model, one, repeats=repeats), **how).tolist()


# Second turns


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("turn", ["1 token", "6 and 2 tokens", "6 tokens, without the past"])
def test_generate_continues_as_if_it_had_seen_all(name, pads, kind, turn):
    model, prompt = made(name), prompt_of(pads)
    cache = prefilled(model, prompt, **CACHES[kind])
    first = model.generate(prompt.ids, attention_mask=prompt.mask, cache=cache, **{**GREEDY, "max_new_tokens": 3})
    more = torch.ones(2, 1 if turn == "1 token" else 6).long()
    if turn == "6 and 2 tokens":
        more[1, :4] = 0
    ids = torch.cat([first, token_ids(more.shape[1], 2, seed=8)], 1)
    whole = Prompt(ids, torch.cat([prompt.mask, torch.ones(2, 3).long(), more], 1), cache.get_seq_length())
    given = whole.ids[:, whole.seen :] if turn == "6 tokens, without the past" else whole.ids
    out = model.generate(given, attention_mask=whole.mask, cache=cache, **GREEDY, **DETAILS)
    assert_equals_rows_alone(model, out, whole.rows, given.shape[1])


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pieces", [(5, 1, 1, 3), (2, 9), (1, 1, 1, 5)], ids=str)
def test_forward_in_pieces_of_a_padded_batch_equals_rows_alone(name, kind, pieces):
    """Pads at the left, at the right and in between; the first piece may be pads only."""
    model, width = made(name), sum(pieces)
    mask = torch.ones(3, width).long()
    mask[0, :2], mask[1, width // 2 : width - 1], mask[2, 1] = 0, 0, 0
    ids, cache, logits, end = token_ids(width, 3), KdaHybridCache(model.config, **CACHES[kind]), [], 0
    with torch.no_grad():
        for piece in pieces:
            start, end = end, end + piece
            logits.append(model(ids[:, start:end], attention_mask=mask[:, :end], cache=cache).logits)
        for row, real, got in zip(ids, mask.bool(), torch.cat(logits, 1)):
            assert_close(got[real], model(row[real].unsqueeze(0), use_cache=False).logits[0])


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("way", ["snapshot", "fork", "save"])
def test_generate_goes_on_from_a_padded_past_that_was_kept(way, kind, tmp_path):
    model, prompt = made("tiny"), prompt_of("right pads")
    cache, caches = prefilled(model, prompt, **CACHES[kind]), []
    if way == "snapshot":
        snapshot = cache.snapshot()
    elif way == "fork":
        caches = cache.fork(2)
    else:
        cache.save(tmp_path / "session")
    for _ in range(2):
        if way == "snapshot":
            cache.restore(snapshot)
        elif way == "fork":
            cache = caches.pop()
        else:
            cache = KdaHybridCache.load(tmp_path / "session", model.config)
        out = model.generate(prompt.ids, attention_mask=prompt.mask, cache=cache, **GREEDY, **DETAILS)
        assert_equals_rows_alone(model, out, prompt.rows, prompt.ids.shape[1])


# What there is not


def test_generate_batch_says_that_there_is_none():
    with pytest.raises(NotImplementedError, match="recurrent states"):
        made("tiny").generate_batch([[5, 6, 7]])


def test_generate_refuses_a_cache_for_fewer_rows_than_there_are_beams():
    model, prompt = made("tiny"), prompt_of("right pads")
    with pytest.raises(ValueError, match="batch_repeat_interleave"):
        model.generate(**inputs_of(model, prompt), **BEAMS)
