"""cache_memory.py: what one layer's memory keeps, moves, shares and counts."""

import itertools

import pytest
import torch
from helpers import ALIGNED, CACHE_KINDS, assert_close, dense_model, filled, step, tiny_config, tiny_model, token_ids
from torch import Tensor

from modeling_kda import KdaHybridCache, KdaHybridForCausalLM
from modeling_kda.cache_memory import LatentMemory, Record, RecurrentMemory
from modeling_kda.ops_reference import delta_rule


CPU = torch.device("cpu")
B, H, K, V, D, WINDOW = 2, 3, 5, 7, 11, 3


# Latents


def test_latent_memory_is_all_that_went_in():
    memory, pieces, seen = LatentMemory(), [torch.randn(2, n, 5) for n in (3, 1, 1, 70, 1, 200, 1)], 0
    with torch.no_grad():
        for i, piece in enumerate(pieces):
            latents, seen = memory.update(piece, seen), seen + piece.shape[1]
            assert torch.equal(latents, torch.cat(pieces[: i + 1], 1))
            assert torch.equal(memory.contents(seen)["latents"], latents)
    assert memory.contents(0) == {}


@pytest.mark.parametrize("start", [1, 100, 1000])
def test_latent_memory_rarely_moves(start):
    """1000 tokens, each added where it stays; a copy of the past only when the buffer is full."""
    memory, addresses, tokens = LatentMemory(), [], torch.randn(1, start + 1000, 3)
    with torch.no_grad():
        memory.update(tokens[:, :start], 0)
        for t in range(start, start + 1000):
            addresses.append(memory.update(tokens[:, t : t + 1], t).data_ptr())
    moves = sum(a != b for a, b in itertools.pairwise(addresses))
    assert moves <= 11
    assert memory.rows.data.shape[1] <= 1.25 * (start + 1000) + 64
    assert torch.equal(memory.contents(start + 1000)["latents"], tokens)


@pytest.mark.parametrize("seen", [0, 4])
def test_latent_memory_makes_room_for_what_is_reserved(seen):
    memory, tokens = LatentMemory(), torch.randn(1, 300, 3)
    with torch.no_grad():
        if seen:
            memory.update(tokens[:, :seen], 0)
        memory.reserved = 300
        places = {memory.update(tokens[:, t : t + 1], t).data_ptr() for t in range(seen, 300)}
    assert len(places) == 1
    assert memory.rows.data.shape[1] == 300


def test_latent_memory_leaves_what_it_returned_alone():
    memory, first = LatentMemory(), torch.randn(1, 4, 3)
    with torch.no_grad():
        held = memory.update(first, 0)
        memory.update(torch.randn(1, 1, 3), 4)
        second = memory.update(torch.randn(1, 1, 3), 5)
        before = second.clone()
        memory.update(torch.randn(1, 100, 3), 6)
    assert torch.equal(held, first)
    assert torch.equal(second, before)


def test_latent_memory_copies_what_it_is_given():
    memory, given = LatentMemory(), torch.randn(1, 4, 3)
    with torch.no_grad():
        memory.update(given, 0)
        before = given.clone()
        given.zero_()
    assert torch.equal(memory.contents(4)["latents"], before)


def test_latent_memory_passes_on_gradients_and_goes_on_without():
    memory, a, b, c = LatentMemory(), *(torch.randn(1, 2, 3) for _ in range(3))
    a.requires_grad_()
    memory.update(a, 0)
    memory.update(b, 2)
    memory.contents(4)["latents"].square().sum().backward()
    assert torch.equal(a.grad, 2 * a.detach())
    with torch.no_grad():
        assert torch.equal(memory.update(c, 4), torch.cat([a, b, c], 1))


@pytest.mark.parametrize("how", [{}, {"max_length": 20}, {"offloading": True}], ids=str)
@pytest.mark.parametrize("after", [0, 3, 8, 9])
def test_latent_memory_writes_over_what_was_taken_back(how, after):
    memory, tokens, other = LatentMemory(**how), torch.randn(2, 9, 3), torch.randn(2, 4, 3)
    with torch.no_grad():
        memory.update(tokens, 0)
        memory.crop(9 - after, 9)
        got = memory.update(other, after)
    assert torch.equal(got, torch.cat([tokens[:, :after], other], 1))


def test_latent_memory_is_copied_by_whoever_writes_second():
    one, two, past = LatentMemory(), LatentMemory(), torch.randn(1, 9, 3)
    a, b = torch.randn(1, 2, 3), torch.randn(1, 3, 3)
    with torch.no_grad():
        one.update(past, 0)
        one.update(past[:, :1], 9)  # moves to where there is more room
        one.crop(1, 10)
        two.adopt(one, 9, 0)
        assert two.rows.data.data_ptr() == one.rows.data.data_ptr()
        got_a, got_b = one.update(a, 9), two.update(b, 9)
    assert got_a.data_ptr() != got_b.data_ptr()
    assert torch.equal(got_a, torch.cat([past, a], 1))
    assert torch.equal(got_b, torch.cat([past, b], 1))


@pytest.mark.parametrize("after", [0, 4])
def test_latent_memory_taken_back_does_not_write_into_what_is_shared(after):
    one, two, past, new = LatentMemory(), LatentMemory(), torch.randn(1, 9, 3), torch.randn(1, 2, 3)
    with torch.no_grad():
        one.update(past, 0)
        two.adopt(one, 9, 0)
        one.crop(9 - after, 9)
        one.update(new, after)
    assert torch.equal(two.contents(9)["latents"], past)


@pytest.mark.parametrize("shared", [False, True])
def test_latent_memory_uses_its_rows_again_unless_they_are_shared(shared):
    memory, other, tokens = LatentMemory(), LatentMemory(), torch.randn(1, 9, 3)
    with torch.no_grad():
        place = memory.update(tokens, 0).data_ptr()
        if shared:
            other.adopt(memory, 9, 0)
        memory.reset()
        assert (memory.update(torch.randn(1, 5, 3), 0).data_ptr() == place) != shared
    assert not shared or torch.equal(other.contents(9)["latents"], tokens)


def test_latent_memory_of_fixed_length_takes_places_and_returns_all():
    memory, tokens = LatentMemory(8), torch.randn(2, 3, 5)
    with torch.no_grad():
        first = memory.update(tokens, torch.tensor([0, 1, 2]))
        place = first.data_ptr()
        second = memory.update(tokens[:, :1], torch.tensor([5]))
    assert second.data_ptr() == place
    assert second.shape == (2, 8, 5)
    assert torch.equal(second[:, :3], tokens)
    assert torch.equal(second[:, 5], tokens[:, 0])
    assert not second[:, [3, 4, 6, 7]].any()


@pytest.mark.parametrize("max_length", [None, 9])
@pytest.mark.parametrize("dtypes", list(itertools.permutations([torch.float32, torch.bfloat16])), ids=str)
def test_latent_memory_takes_on_the_dtype_of_what_comes(dtypes, max_length):
    memory, past, new = LatentMemory(max_length), torch.randn(1, 4, 3), torch.randn(1, 2, 3)
    past, new = past.to(dtypes[0]), new.to(dtypes[1])
    with torch.no_grad():
        memory.update(past, 0)
        got = memory.update(new, 4)
    assert got.dtype == dtypes[1]
    assert torch.equal(got, torch.cat([past.to(dtypes[1]), new], 1))


def test_latent_memory_counts_what_is_in_use():
    memory = LatentMemory()
    with torch.no_grad():
        memory.update(torch.randn(2, 4, 3), 0)
        memory.update(torch.randn(2, 1, 3), 4)
    assert memory.nbytes(5) == {"latent": 4 * 2 * 5 * 3}
    assert memory.nbytes(0) == {"latent": 0}


# Recurrent states


class Run:
    """A random recurrence: the states and windows before and after each token, and what replays it."""

    def __init__(self, tokens: int, pads: bool = False, seed: int = 0):
        torch.manual_seed(seed)
        k, v, self.inputs = torch.randn(B, tokens, H, K), torch.randn(B, tokens, H, V), torch.randn(B, tokens, D)
        k, g, beta = k / k.norm(dim=-1, keepdim=True), -torch.rand(B, tokens, H, K), torch.rand(B, tokens, H)
        self.real = torch.rand(B, tokens) < 0.6 if pads else torch.ones(B, tokens, dtype=torch.bool)
        k, g, beta, self.inputs = (
            x * self.real.view(B, tokens, *[1] * (x.ndim - 2)) for x in (k, g, beta, self.inputs)
        )
        writes = torch.empty(B, tokens, H, V)
        self.states, self.windows = [torch.randn(B, H, V, K)], [torch.randn(B, WINDOW, D)]
        for t in range(tokens):
            now = slice(t, t + 1)
            _, state = delta_rule(
                k[:, now], k[:, now], v[:, now], g[:, now], beta[:, now], self.states[-1], writes[:, now]
            )
            self.states.append(state)
            moved = torch.cat([self.windows[-1], self.inputs[:, now]], 1)[:, 1:]
            self.windows.append(torch.where(self.real[:, now].unsqueeze(2), moved, self.windows[-1]))
        self.record = Record(k, g, writes, self.inputs, self.real if pads else None)

    def cut(self, start: int, end: int) -> Record:
        return self.record.map(lambda x: x[:, start:end])

    def feed(self, memory: RecurrentMemory, pieces: tuple[int, ...]) -> int:
        """What a layer does; the first piece is what the memory begins with."""
        memory.update(self.states[pieces[0]].clone(), self.windows[pieces[0]].clone())
        ends = list(itertools.accumulate(pieces))
        for start, end in itertools.pairwise(ends):
            memory.begin(CPU)
            memory.update(self.states[end].clone(), self.windows[end].clone(), self.cut(start, end))
        return ends[-1]


def memory_of(static: bool = False, limit: int = 100) -> RecurrentMemory:
    memory = RecurrentMemory(static)
    memory.record_past, memory.limit = True, limit
    return memory


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize(("start", "end"), [(0, 12), (0, 1), (5, 6), (5, 7), (11, 12), (4, 4)])
def test_record_moves_state_and_window_on(start, end, pads):
    run = Run(12, pads)
    state, window = run.cut(start, end).after(run.states[start], run.windows[start], WINDOW)
    assert_close(state, run.states[end], 1e-5)
    assert torch.equal(window, run.windows[end])


@pytest.mark.parametrize("pads", [False, True])
def test_record_starts_from_zeros(pads):
    run = Run(9, pads)
    got = run.record.after(None, None, WINDOW)
    want = run.record.after(torch.zeros(B, H, V, K), torch.zeros(B, WINDOW, D), WINDOW)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("padded", list(itertools.product([False, True], repeat=2)))
def test_records_join_to_one_with_or_without_pads(padded):
    parts = [Run(4, pads, seed).record for seed, pads in enumerate(padded)]
    whole = Record.join(parts)
    assert len(whole) == 8
    for name in ("k", "g", "writes", "inputs"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts], 1))
    assert (whole.real is None) == (not any(padded))
    for i, pads in enumerate(padded):
        if any(padded):
            half = whole.real[:, 4 * i : 4 * i + 4]
            assert torch.equal(half, parts[i].real if pads else torch.ones(B, 4, dtype=torch.bool))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 9])
def test_recurrent_memory_goes_back(tokens, pads, static):
    run, memory = Run(14, pads), memory_of(static)
    end = run.feed(memory, (5, 4, 1, 3, 1))
    assert memory.recorded == 9
    memory.crop(tokens, end)
    assert_close(memory.state, run.states[end - tokens], 1e-5)
    assert torch.equal(memory.window, run.windows[end - tokens])
    assert memory.recorded == 0


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_recurrent_memory_records_at_least_the_limit_and_at_most_twice_as_much(limit):
    run, memory = Run(40), memory_of(limit=limit)
    memory.update(run.states[0], run.windows[0])
    for t in range(40):
        memory.begin(CPU)
        memory.update(run.states[t + 1], run.windows[t + 1], run.cut(t, t + 1))
        assert min(t + 1, limit) <= memory.recorded <= 2 * limit
    memory.crop(limit, 40)
    assert_close(memory.state, run.states[40 - limit], 1e-5)


def test_recurrent_memory_forgets_the_past_that_is_not_recorded():
    run, memory = Run(9), memory_of()
    run.feed(memory, (2, 3))
    memory.begin(CPU)
    memory.update(run.states[9], run.windows[9])
    assert memory.recorded == 0
    assert memory.nbytes(9)["recorded"] == 0


def test_recurrent_memory_lets_nobody_overwrite_what_is_shared():
    run, one, two = Run(3), RecurrentMemory(), RecurrentMemory()
    one.update(run.states[0].clone(), run.windows[0].clone())
    assert one.begin(CPU)
    two.adopt(one, 1, 0)
    assert two.state.data_ptr() == one.state.data_ptr()
    assert not one.begin(CPU)
    assert not two.begin(CPU)
    one.update(run.states[1].clone(), run.windows[1].clone())
    assert one.begin(CPU)
    assert torch.equal(two.state, run.states[0])


def test_recurrent_memory_lets_nobody_overwrite_its_checkpoint():
    run, memory = Run(3), memory_of()
    memory.update(run.states[0].clone(), run.windows[0].clone())
    assert not memory.begin(CPU)
    memory.update(run.states[1].clone(), run.windows[1].clone(), run.cut(0, 1))
    assert memory.begin(CPU)


def pointers(memory: RecurrentMemory) -> list[int]:
    return [memory.state.data_ptr(), memory.window.data_ptr()]


def test_recurrent_memory_of_fixed_addresses_keeps_them():
    run, memory = Run(14), memory_of(static=True)
    run.feed(memory, (5, 4))
    places, other = pointers(memory), RecurrentMemory()
    changes = {
        "update": lambda: memory.update(run.states[1], run.windows[1]),
        "crop": lambda: (run.feed(memory, (5, 4, 2)), memory.crop(3, 11)),
        "rows": lambda: memory.replace(lambda x: x.flip(0), 5),
        "adopt": lambda: (other.update(run.states[3], run.windows[3]), memory.adopt(other, 3, 5)),
        "reset": memory.reset,
    }
    for name, change in changes.items():
        change()
        assert pointers(memory) == places, name
    assert not memory.state.any()
    assert not memory.window.any()


def test_recurrent_memory_counts_state_window_and_past():
    run, memory = Run(9), memory_of()
    assert memory.nbytes(0) == {"recurrent": 0, "recorded": 0}
    run.feed(memory, (2, 3, 4))
    whole = 4 * B * (H * V * K + WINDOW * D)
    assert memory.nbytes(9) == {"recurrent": whole, "recorded": whole + 7 * 4 * B * (H * (2 * K + V) + D)}


@pytest.mark.parametrize("max_length", [None, 9])
def test_memories_are_fresh_with_the_same_settings(max_length):
    recurrent, latent = memory_of(limit=7).fresh(max_length), LatentMemory(20, True).fresh(max_length)
    assert (recurrent.record_past, recurrent.limit, recurrent.state) == (True, 7, None)
    assert (latent.offloading, latent.rows) == (True, None)
    assert (latent.max_length, recurrent.static) == (max_length, max_length is not None)


def tensors_of(x: object) -> list[Tensor]:
    return [y for y in vars(x).values() if isinstance(y, Tensor)]


def test_record_is_a_piece_of_its_own_once_the_checkpoint_moves():
    """A view would keep the whole past alive."""
    run, memory = Run(40), memory_of(limit=4)
    run.feed(memory, (2, 30))
    assert memory.recorded == 4
    for x in tensors_of(memory.records[0]):
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


# In a model


def test_cache_keeps_no_memory_of_longer_tensors():
    """The window is a few rows of a long input; it must not keep the rest alive."""
    cache = filled(dense_model("tiny"), token_ids(200))
    for layer in cache.layers:
        if isinstance(layer, RecurrentMemory):
            for name, x in layer.contents(200).items():
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
                assert layer.rows.data.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [20, 44])
def test_recorded_bytes_are_two_keys_a_value_and_the_inputs(value, dtype):
    config = tiny_config(linear_value_head_dim=value, **ALIGNED)
    model, (heads, key), rows = KdaHybridForCausalLM._from_config(config, dtype=dtype).eval(), (3, 12), 2
    wide = torch.tensor([], dtype=dtype).element_size()
    token = 3 * rows * heads * (2 * key + value) * (4 + wide)  # of three linear layers
    cache = filled(model, token_ids(5, rows))
    cache.activate_past_recording()
    sizes = [cache.nbytes()["recorded"]]
    for tokens in (1, 1, 1, 40):
        step(model, token_ids(tokens, rows), cache)
        sizes.append(cache.nbytes()["recorded"])
    assert sizes[0] == 0
    assert sizes[1] == token + cache.nbytes()["recurrent"], "the first token, and the checkpoint before it"
    assert [b - a for a, b in itertools.pairwise(sizes[1:])] == [token, token, 40 * token]


def test_recorded_bytes_stay_bounded_over_many_steps():
    model = tiny_model(num_hidden_layers=1, layer_types=["linear_attention"], mlp_layer_types=["dense"])
    cache = filled(model, token_ids(3))
    cache.activate_past_recording(4)
    most = cache.nbytes()["recurrent"] + 8 * 4 * 2 * 3 * (2 * 12 + 20)
    for token in token_ids(1000).split(1, 1):
        step(model, token, cache)
        assert 0 < cache.nbytes()["recorded"] <= most
    held = {x.data_ptr(): x for record in cache.layers[0].records for x in tensors_of(record)}
    assert sum(x.untyped_storage().nbytes() for x in held.values()) <= most


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_cache_goes_on_in_another_dtype(first, kind, gradients):
    config = tiny_config(mlp_layer_types=["dense"] * 4, **ALIGNED)
    wide = KdaHybridForCausalLM(config).eval()
    narrow = KdaHybridForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    narrow.load_state_dict(wide.state_dict())
    models = [wide, narrow] if first == torch.float32 else [narrow, wide]
    ids, cache = token_ids(30, rows=2), KdaHybridCache(config, **CACHE_KINDS[kind])
    cache.activate_past_recording()
    with torch.set_grad_enabled(gradients and kind != "static"):
        models[0](ids[:, :9], cache=cache)
        got = [models[1](ids[:, start:end], cache=cache).logits for start, end in ((9, 10), (10, 14), (14, 30))]
        assert {x.dtype for x in got} == {models[1].dtype}
        cache.crop(-21)
        got.append(models[1](ids[:, 9:12], cache=cache).logits)
    want = wide(ids).logits
    assert_close(torch.cat(got[:3], 1), want[:, 9:], absolute=0, relative=0.15)
    assert_close(got[3], want[:, 9:12], absolute=0, relative=0.15)


@pytest.mark.parametrize("room", [None, 40])
def test_cache_keeps_states_in_the_dtype_that_is_asked_for(room, tmp_path):
    """Rounded after each forward, and otherwise as in float32; also in branches, files and what is taken back."""
    model, ids = tiny_model(), token_ids(24, rows=2)
    exact, cache = KdaHybridCache(model.config, room), KdaHybridCache(model.config, room, state_dtype=torch.bfloat16)
    states = [layer for layer in cache.layers if layer.kind == "recurrent"]
    cache.activate_past_recording()
    with torch.no_grad():
        for start, end in ((0, 20), (20, 21), (21, 24)):
            got, want = (model(ids[:, start:end], cache=x).logits for x in (cache, exact))
            assert_close(got, want, absolute=0, relative=2e-2)
            assert {layer.state.dtype for layer in states} == {torch.bfloat16}
            for mine, theirs in zip(cache.layers, exact.layers):
                if mine.kind == "recurrent":
                    assert_close(mine.state.float(), theirs.state, absolute=0, relative=2e-2)
        saved = sum(2 * layer.state.numel() for layer in states)
        assert cache.nbytes()["recurrent"] == exact.nbytes()["recurrent"] - saved
        cache.crop(-3)
        assert {layer.state.dtype for layer in states} == {torch.bfloat16}
        assert cache.fork(1)[0].layers[0].state.dtype == torch.bfloat16
        cache.save(tmp_path / "session")
        for dtype in (None, torch.bfloat16):
            loaded = KdaHybridCache.load(tmp_path / "session", model.config, max_cache_len=room, state_dtype=dtype)
            assert loaded.layers[0].state.dtype == (dtype or torch.float32)
            assert torch.equal(loaded.layers[0].state.bfloat16(), cache.layers[0].state)


def test_cache_refuses_other_dtypes_of_states():
    with pytest.raises(ValueError, match=r"torch.bfloat16, torch.float32 or None, not torch.float16"):
        KdaHybridCache(tiny_config(), state_dtype=torch.float16)
