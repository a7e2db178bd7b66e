"""`generate()` with drafts, of an assistant or of the text itself, gives what it gives without."""

import copy
import functools
from typing import Any

import pytest
import torch
from helpers import assert_close, token_ids
from test_generation_modes import (
    BOTH,
    CACHES,
    DETAILS,
    GREEDY,
    MODELS,
    PADS,
    Prompt,
    assert_equals_rows_alone,
    made,
    prefilled,
    prompt_of,
)
from transformers import GPT2Config, GPT2LMHeadModel

from modeling_kda import KdaHybridCache, KdaHybridForCausalLM
from modeling_kda.compat_transformers import CACHE_NAME


TOKENS = 12
OPTIONS = {**GREEDY, "max_new_tokens": TOKENS}
KINDS = ["another", "noisy", "itself", "early exit", "prompt lookup"]


class Watched(KdaHybridCache):
    """Counts the forwards that it goes through, and the tokens that are taken back."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.forwards, self.taken_back = 0, 0

    def advance(self, tokens: int) -> None:
        self.forwards += 1
        super().advance(tokens)

    def crop(self, tokens_to_remove: int) -> None:
        self.taken_back -= int(tokens_to_remove)
        super().crop(tokens_to_remove)


@functools.cache
def assistant_of(name: str, kind: str) -> KdaHybridForCausalLM:
    """One that drafts four tokens, however sure it is."""
    assistant = made(name, 1) if kind == "another" else made(name)
    assistant = copy.deepcopy(assistant)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.assistant_confidence_threshold = 0.0
    if kind == "noisy":
        torch.manual_seed(2)
        with torch.no_grad():
            for x in assistant.parameters():
                if x.numel() > 1:
                    x.add_(0.05 * x.std() * torch.randn_like(x))
    return assistant


def drafts_of(name: str, kind: str) -> dict[str, Any]:
    if kind == "early exit":
        return {"assistant_early_exit": 2}
    if kind == "prompt lookup":
        return {"prompt_lookup_num_tokens": 3}
    return {"assistant_model": assistant_of(name, kind)}


def prompt_for(pads: str, kind: str) -> Prompt:
    """One row, all of it for `generate`; for prompt lookup two tokens by turns. "Right pads" have a turn behind."""
    prompt = prompt_of(pads, rows=1)
    ids = prompt.ids.clone()
    if kind == "prompt lookup":
        ids[prompt.mask.bool()] = torch.tensor([11, 12]).repeat(6)[: int(prompt.mask.sum())]
    return Prompt(ids, prompt.mask, 0)


def masked(prompt: Prompt) -> dict[str, torch.Tensor]:
    return {} if prompt.mask.all() else {"attention_mask": prompt.mask}


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_generate_with_drafts_equals_the_row_alone(name, pads, kind):
    model, prompt = made(name), prompt_for(pads, kind)
    cache = Watched(model.config)
    out = model.generate(prompt.ids, cache=cache, **masked(prompt), **drafts_of(name, kind), **OPTIONS, **DETAILS)
    assert_equals_rows_alone(model, out, prompt.rows, prompt.ids.shape[1], TOKENS)
    if kind in ("noisy", "itself"):
        assert cache.forwards < TOKENS, "no draft was accepted"
    if kind != "itself":
        assert cache.taken_back > 0, "every draft was accepted"
    assert cache.get_seq_length() == out.sequences.shape[1] - 1


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("kind", ["noisy", "prompt lookup"])
def test_generate_goes_on_from_a_cache_whose_drafts_were_taken_back(name, pads, kind):
    model, prompt = made(name), prompt_for(pads, kind)
    cache = Watched(model.config)
    first = model.generate(prompt.ids, cache=cache, **masked(prompt), **drafts_of(name, kind), **OPTIONS)
    assert cache.taken_back > 0
    ids = torch.cat([first, token_ids(3, seed=8)], 1)
    whole = Prompt(ids, torch.cat([prompt.mask, torch.ones(1, TOKENS + 3).long()], 1), 0)
    out = model.generate(whole.ids, attention_mask=whole.mask, cache=cache, **OPTIONS, **DETAILS)
    assert_equals_rows_alone(model, out, whole.rows, ids.shape[1], TOKENS)


@pytest.mark.parametrize("implementation", ["static", "offloaded"])
@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("kind", ["noisy", "prompt lookup"])
def test_generate_with_drafts_on_other_caches_equals_the_row_alone(name, pads, kind, implementation):
    if implementation == "static" and CACHE_NAME == "past_key_values":
        pytest.skip("this transformers refuses drafts with static caches")
    model, prompt = made(name), prompt_for(pads, kind)
    how = {"cache_implementation": implementation, **masked(prompt), **drafts_of(name, kind)}
    out = model.generate(prompt.ids, **how, **OPTIONS, **DETAILS)
    assert_equals_rows_alone(model, out, prompt.rows, prompt.ids.shape[1], TOKENS)
    assert (getattr(out, CACHE_NAME).max_cache_len is None) == (implementation == "offloaded")


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("kind", CACHES)
def test_generate_with_drafts_stops_where_greedy_stops(kind, pads):
    """The end comes amid accepted drafts: what is behind it is taken back."""
    model, prompt = made("tiny"), prompt_for(pads, "itself")
    free = model.generate(prompt.ids, **masked(prompt), **OPTIONS)[:, prompt.ids.shape[1] :]
    end = int(free[0, 6])
    cache = Watched(model.config, **CACHES[kind])
    how = {"cache": cache, **masked(prompt), **drafts_of("tiny", "itself"), **OPTIONS, "eos_token_id": end}
    got = model.generate(prompt.ids, **how)[0, prompt.ids.shape[1] :].tolist()
    assert got == free[0, : free[0].tolist().index(end) + 1].tolist()
    assert cache.get_seq_length() == prompt.ids.shape[1] + len(got) - 1


@pytest.mark.parametrize("pads", ["no pads", "left pads"])
@pytest.mark.parametrize("name", MODELS)
def test_generate_of_a_plain_transformer_with_this_model_as_assistant(name, pads):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=97,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=1,
        eos_token_id=None,
        initializer_range=0.3,
    )
    model, prompt = GPT2LMHeadModel(config).eval(), prompt_for(pads, "another")
    how = {**masked(prompt), "assistant_model": assistant_of(name, "itself"), **OPTIONS}
    out = model.generate(prompt.ids, **how, **DETAILS)
    assert_equals_rows_alone(model, out, prompt.rows, prompt.ids.shape[1], TOKENS)


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("kind", KINDS)
def test_generate_samples_with_drafts(pads, kind):
    model, prompt = made("tiny"), prompt_for(pads, kind)
    cache = Watched(model.config)
    how = {**OPTIONS, "do_sample": True, "temperature": 1.3, **masked(prompt), **drafts_of("tiny", kind)}
    torch.manual_seed(3)
    tokens = model.generate(prompt.ids, cache=cache, **how)
    assert tokens.shape == (1, prompt.ids.shape[1] + TOKENS)
    assert cache.get_seq_length() == tokens.shape[1] - 1
    ids, mask = tokens[:, -1:], torch.cat([prompt.mask, torch.ones(1, TOKENS).long()], 1)
    with torch.no_grad():
        got = model(ids, attention_mask=mask, cache=cache).logits
        want = model(tokens[mask.bool()].unsqueeze(0), use_cache=False).logits[:, -1:]
    assert_close(got, want)


def test_generate_with_drafts_behind_a_filled_cache_is_right_or_refused():
    """transformers feeds all tokens once more."""
    model, prompt = made("tiny"), prompt_of("no pads", rows=1)._replace(seen=5)
    cache = prefilled(model, prompt)
    try:
        out = model.generate(prompt.ids, cache=cache, prompt_lookup_num_tokens=3, **OPTIONS, **DETAILS)
    except ValueError:
        return
    assert cache.get_seq_length() == out.sequences.shape[1] - 1
    assert_equals_rows_alone(model, out, prompt.rows, prompt.ids.shape[1], TOKENS)
