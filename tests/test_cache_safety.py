"""What must not leak, linger or poison: shared memory, gradients, half forwards, NaN, modes of torch."""

import itertools

import pytest
import torch
from helpers import CACHE_KINDS, LOGITS, assert_close, filled, shared_model, step, tiny_config, tiny_model, token_ids

from modeling_kda import KdaHybridCache, KdaHybridForCausalLM, PrefixCache


ROOM = 64


@pytest.fixture(scope="module")
def model() -> KdaHybridForCausalLM:
    return shared_model()


def addresses(cache: KdaHybridCache) -> list[int]:
    return [x.data_ptr() for layer in cache.layers for x in layer.contents(1).values()]


# Shared memory


@pytest.mark.parametrize("then", ["step", "crop and step", "reset and step"])
def test_snapshot_outlives_a_move_to_the_same_device(model, then):
    ids, other = token_ids(20), token_ids(5, seed=2)
    cache = KdaHybridCache(model.config)
    cache.activate_past_recording()
    step(model, ids, cache)
    snapshot = cache.snapshot()
    cache.move_to("cpu")
    if then == "crop and step":
        cache.crop(-10)
    elif then == "reset and step":
        cache.reset()
    step(model, other, cache)
    again = KdaHybridCache(model.config)
    again.restore(snapshot)
    assert_close(step(model, other, again), model(torch.cat([ids, other], 1)).logits[:, 20:])


def test_static_cache_does_not_move():
    with pytest.raises(ValueError, match="keeps its addresses"):
        KdaHybridCache(tiny_config(), ROOM).move_to("cpu")


def test_snapshot_of_a_static_cache_holds_what_was_seen_not_the_room(model):
    cache = KdaHybridCache(model.config, 10_000)
    step(model, token_ids(10), cache)
    held = sum(cache.snapshot().storages().values())
    assert held == sum(cache.nbytes().values())


def test_reserve_makes_room_once(model):
    cache = KdaHybridCache(model.config)
    cache.reserve(5000)
    step(model, token_ids(5), cache)
    assert cache.layers[2].rows.data.shape[1] == 5000
    cache.reorder_cache(torch.tensor([0]))
    step(model, token_ids(1), cache)
    assert cache.layers[2].rows.data.shape[1] < 100


# Half a forward


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_cache_of_a_forward_that_broke_off_goes_on_only_after_restore_or_reset(kind, layer):
    model, ids, more = tiny_model(), token_ids(8), token_ids(3, seed=2)
    cache = KdaHybridCache(model.config, **CACHE_KINDS[kind])
    cache.activate_past_recording()
    step(model, ids, cache)
    snapshot = cache.snapshot()
    hook = model.model.layers[layer].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, more, cache)
    hook.remove()
    prefix = PrefixCache(model, 10**9)
    uses = {
        "step": lambda: step(model, more, cache),
        "crop": lambda: cache.crop(-1),
        "crop(0)": lambda: cache.crop(0),
        "fork": lambda: cache.fork(1),
        "snapshot": cache.snapshot,
        "save": lambda: cache.save("never"),
        "add": lambda: prefix.add(ids, cache),
    }
    for use in uses.values():
        with pytest.raises(ValueError, match="ended before its last layer"):
            use()
    cache.restore(snapshot)
    assert_close(step(model, more, cache), model(torch.cat([ids, more], 1)).logits[:, 8:])
    hook = model.model.layers[layer].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, more, cache)
    hook.remove()
    cache.reset()
    assert_close(step(model, ids, cache), model(ids).logits)


# NaN


@pytest.mark.parametrize("back", ["restore", "crop", "reset"])
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_cache_forgets_nan_with_the_tokens_that_brought_it(model, kind, back):
    ids, more = token_ids(10), token_ids(4, seed=2)
    cache = KdaHybridCache(model.config, **CACHE_KINDS[kind])
    cache.activate_past_recording()
    step(model, ids, cache)
    snapshot = cache.snapshot()
    with torch.no_grad():
        bad = model(inputs_embeds=torch.full((1, 3, 60), torch.nan), cache=cache).logits
    assert bad.isnan().any()
    if back == "restore":
        cache.restore(snapshot)
    elif back == "crop":
        cache.crop(-3)
    else:
        cache.reset()
        step(model, ids, cache)
    got = torch.cat([step(model, more[:, t : t + 1], cache) for t in range(4)], 1)
    assert_close(got, model(torch.cat([ids, more], 1)).logits[:, 10:])


# Modes of torch


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("first", ["inference", "no_grad"])
def test_cache_goes_on_in_and_out_of_inference_mode(model, first, kind):
    ids, modes = token_ids(12), itertools.cycle((torch.inference_mode, torch.no_grad))
    if first == "no_grad":
        next(modes)
    cache, got = KdaHybridCache(model.config, **CACHE_KINDS[kind]), []
    cache.activate_past_recording()
    for piece in ids.split([6, 1, 2, 3], 1):
        with next(modes)():
            got.append(model(piece, cache=cache).logits)
    assert_close(torch.cat([x.clone() for x in got], 1), model(ids).logits)
    with torch.inference_mode():
        fork, snapshot = cache.fork(1)[0], cache.snapshot()
    more, whole = token_ids(2, seed=3), torch.cat([ids, token_ids(2, seed=3)], 1)
    assert_close(step(model, more, fork), model(whole).logits[:, 12:])
    cache.crop(-3)
    assert_close(step(model, more, cache), model(torch.cat([ids[:, :9], more], 1)).logits[:, 9:])
    cache.restore(snapshot)
    assert_close(step(model, more, cache), model(whole).logits[:, 12:])
    cache.reset()
    assert_close(step(model, ids, cache), model(ids).logits)


@pytest.mark.parametrize("removed", [5, 11])
def test_crop_under_autocast_is_as_without(model, removed):
    """Including back to the first token."""
    ids, more = token_ids(11), token_ids(2, seed=2)
    cache = KdaHybridCache(model.config)
    cache.activate_past_recording()
    step(model, ids, cache)
    with torch.autocast("cpu", torch.bfloat16):
        cache.crop(-removed)
    kept = ids[:, : 11 - removed]
    assert all(
        layer.state is None or layer.state.dtype == torch.float32 for layer in cache.layers if layer.kind != "latent"
    )
    assert_close(step(model, more, cache), model(torch.cat([kept, more], 1)).logits[:, kept.shape[1] :])


# Gradients


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_static_cache_carries_no_gradients_and_keeps_its_addresses_with_them(model, tokens):
    ids, more = token_ids(tokens), token_ids(4, seed=2)
    cache = KdaHybridCache(model.config, ROOM)
    model(ids, cache=cache)  # outside of no_grad
    kept = addresses(cache)
    embeds = model.get_input_embeddings()(more).detach().requires_grad_()
    logits = [model(inputs_embeds=embeds[:, t : t + 1], cache=cache).logits for t in range(4)]
    assert addresses(cache) == kept
    assert_close(torch.cat(logits, 1).detach(), model(torch.cat([ids, more], 1)).logits[:, tokens:].detach())
    logits[-1].sum().backward()
    model.zero_grad()
    assert embeds.grad[:, 3].abs().max() > 0
    assert embeds.grad[:, :3].abs().max() == 0


def test_step_without_gradients_cuts_them():
    """The state of before must not pass for that of after."""
    ids = token_ids(3)
    linear = tiny_model(layer_types=["linear_attention"] * 4)
    given = linear.get_input_embeddings()(ids).detach().requires_grad_()
    cache = KdaHybridCache(linear.config)
    linear(inputs_embeds=given[:, :1], cache=cache)
    step(linear, ids[:, 1:2], cache)
    linear(inputs_embeds=given[:, 2:], cache=cache).logits.sum().backward()
    assert given.grad[:, 2].abs().max() > 0
    assert given.grad[:, :2].abs().max() == 0


@pytest.mark.parametrize("last", ["grad", "no_grad"])
def test_backward_after_steps_whose_latents_need_no_gradient(last):
    """As with an adapter on queries only: attention saved the rows, and nothing may write into them."""
    model = tiny_model(layer_types=["full_attention", "linear_attention", "linear_attention", "linear_attention"])
    model.requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    ids, cache = token_ids(7), KdaHybridCache(model.config)
    first = model(ids[:, :5], cache=cache).logits
    second = model(ids[:, 5:6], cache=cache).logits
    with torch.set_grad_enabled(last == "grad"):
        model(ids[:, 6:], cache=cache)
    (first.sum() + second.sum()).backward()
    got = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    model(ids[:, :6]).logits.sum().backward()
    assert_close(got, model.model.layers[0].self_attn.q_proj.weight.grad, absolute=0, relative=LOGITS)


# Masks and documents


def test_static_cache_refuses_what_a_growing_one_refuses(model):
    ids = token_ids(5)
    for kind in CACHE_KINDS:
        cache = filled(model, ids, kind)
        with pytest.raises(ValueError, match="several documents"):
            step(model, ids, cache, position_ids=torch.tensor([[5, 6, 7, 0, 1]]))
        with pytest.raises(ValueError, match="1 for real tokens"):
            step(model, ids[:, :1], cache, attention_mask=torch.tensor([[0.0, 0, 0, 0, 0, -1e4]]))
        with pytest.raises(ValueError, match="has shape"):
            step(model, ids[:, :1], cache, attention_mask=torch.ones(1, 5).long())
        assert_close(step(model, ids, cache), model(ids.repeat(1, 2)).logits[:, 5:])


# Recording


@pytest.mark.parametrize("drafts", [3, 300])
def test_generate_with_drafts_of_any_number_leaves_a_cache_that_records_no_more(model, drafts):
    ids = token_ids(4).repeat(1, 200)
    cache = KdaHybridCache(model.config)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    got = model.generate(ids, cache=cache, prompt_lookup_num_tokens=drafts, **how)
    assert torch.equal(got, model.generate(ids, **how))
    assert cache.recording == 0
    assert cache.nbytes()["recorded"] == 0


def test_generate_with_drafts_leaves_a_cache_recording_that_was(model):
    cache = KdaHybridCache(model.config)
    cache.activate_past_recording(7)
    ids = token_ids(4).repeat(1, 3)
    model.generate(ids, cache=cache, prompt_lookup_num_tokens=2, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert cache.recording >= 7


@pytest.mark.parametrize("tokens", [0, -3])
def test_recording_of_no_tokens_is_refused(tokens):
    with pytest.raises(ValueError, match="at least 1"):
        KdaHybridCache(tiny_config()).activate_past_recording(tokens)


def test_prefix_cache_refuses_a_model_in_training(model):
    other = tiny_model().train()
    with pytest.raises(ValueError, match="training mode"):
        PrefixCache(other, 10**6).prefill(token_ids(5))
