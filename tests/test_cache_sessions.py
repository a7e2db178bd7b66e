"""Branches and files of a cache: snapshot, restore, fork, save and load."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from helpers import (
    ALIGNED,
    CACHE_CASES,
    CACHE_KINDS,
    assert_goes_on,
    dense_model,
    filled,
    padded,
    step,
    tensors,
    tiny_config,
    token_ids,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from modeling_kda import EMBEDDED_MODEL, KdaHybridCache, KdaHybridForCausalLM, cache_kda_hybrid
from modeling_kda.cache_kda_hybrid import FINGERPRINT, FORMAT, fingerprint_of


LINEAR, FULL = "linear_attention", "full_attention"
OTHERS = ([LINEAR, FULL, LINEAR, LINEAR], 64, 101, 2, 14, 22, 3, -5.0, 2, 30, 6, 2)
OTHERS = dict(zip(FINGERPRINT, OTHERS, strict=True))  # a value that "tiny" does not have, of each field


@pytest.fixture(scope="module")
def model() -> KdaHybridForCausalLM:
    return dense_model("tiny")


def pointers(cache: KdaHybridCache) -> list[int]:
    return [x.data_ptr() for x in tensors(cache)]


def copies(cache: KdaHybridCache) -> list[Tensor]:
    return [x.clone() for x in tensors(cache)]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(x, y) for x, y in zip(one, two))


# Branches


@pytest.mark.parametrize("kind", ["growing", "offloading"])
@pytest.mark.parametrize("branch", [lambda cache: cache.snapshot()._cache, lambda cache: cache.fork(1)[0]])
def test_branch_shares_memory_until_one_writes(model, branch, kind):
    ids = token_ids(9, rows=2)
    cache = filled(model, ids[:, :8], kind)
    step(model, ids[:, 8:], cache)
    other = branch(cache)
    before, start = copies(cache), pointers(cache)
    assert pointers(other) == start
    assert_goes_on(model, cache, ids)
    assert same([x[:, :9] if x.ndim == 3 and x.shape[1] > 3 else y for x, y in zip(tensors(cache), before)], before)
    assert pointers(other) == start
    assert same(tensors(other), before)
    assert_goes_on(model, other, ids, seed=3)
    assert not set(pointers(other)) & set(pointers(cache))


@pytest.mark.parametrize(("name", "kind"), CACHE_CASES)
def test_forks_go_their_own_ways(name, kind):
    model, ids = dense_model(name), token_ids(9, rows=2)
    cache = filled(model, ids, kind)
    forks = cache.fork(8)
    for seed, fork in enumerate(forks):
        assert_goes_on(model, fork, ids, seed=seed)
    for seed, fork in enumerate(forks[:3]):
        assert_goes_on(model, fork, torch.cat([ids, token_ids(5, rows=2, seed=seed)], 1), seed=seed)
    assert_goes_on(model, cache, ids, seed=9)


def test_forks_of_forks_and_of_nothing(model):
    ids = token_ids(7)
    [one], nothing = filled(model, ids).fork(1), KdaHybridCache(model.config).fork(2)
    for seed, fork in enumerate([*one.fork(2), one]):
        assert_goes_on(model, fork, ids, seed=seed)
    for fork in nothing:
        assert_goes_on(model, fork, ids[:, :0])


def test_fork_is_of_the_same_kind(model):
    Mine = type("Mine", (KdaHybridCache,), {})
    cache = Mine(model.config, 20)
    cache.activate_past_recording(5)
    [fork], [other] = cache.fork(1), KdaHybridCache(model.config, offloading=True).fork(1)
    assert (type(fork), fork.max_cache_len, fork.recording) == (Mine, 20, 5)
    assert other.layers[2].offloading


@pytest.mark.parametrize(("name", "kind"), CACHE_CASES)
def test_restore_any_number_of_times(name, kind):
    model, ids = dense_model(name), token_ids(9, rows=2)
    cache = filled(model, ids, kind)
    snapshot = cache.snapshot()
    assert snapshot.tokens == 9
    for seed in range(5):
        assert_goes_on(model, cache, ids, seed=seed)
        cache.restore(snapshot)
    assert_goes_on(model, cache, ids)


@pytest.mark.parametrize("there", CACHE_KINDS)
@pytest.mark.parametrize("here", CACHE_KINDS)
def test_snapshot_of_one_kind_of_cache_into_another_and_back(model, here, there):
    ids = token_ids(9, rows=2)
    one, two = filled(model, ids, here), KdaHybridCache(model.config, **CACHE_KINDS[there])
    two.restore(one.snapshot())
    assert_goes_on(model, two, ids)
    longer = torch.cat([ids, token_ids(5, 2, 2)], 1)
    one.restore(two.snapshot())
    assert_goes_on(model, one, longer, seed=3)
    assert_goes_on(model, two, longer, seed=4)


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tokens", [0, 9])
def test_restore_into_a_cache_of_other_rows(model, kind, rows, tokens):
    ids = token_ids(tokens, rows=2)
    snapshot, cache = filled(model, ids).snapshot(), filled(model, token_ids(20, rows), kind)
    cache.restore(snapshot)
    assert_goes_on(model, cache, ids)


CHANGES = {
    "crop below it": lambda model, cache: cache.crop(-6),
    "crop to nothing": lambda model, cache: cache.crop(-9),
    "reset": lambda model, cache: cache.reset(),
    "reorder": lambda model, cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat once": lambda model, cache: cache.batch_repeat_interleave(1),
    "repeat": lambda model, cache: cache.batch_repeat_interleave(2),
    "move": lambda model, cache: cache.move_to("cpu"),
    "go on": lambda model, cache: step(model, token_ids(30, rows=2, seed=5), cache),
}


@pytest.mark.parametrize(("change", "kind"), [x for x in product(CHANGES, CACHE_KINDS) if x != ("move", "static")])
def test_snapshot_outlives(model, change, kind):
    ids, cache = token_ids(9, rows=2), KdaHybridCache(model.config, **CACHE_KINDS[kind])
    cache.activate_past_recording()
    for piece in ids.split((5, 3, 1), 1):
        step(model, piece, cache)
    snapshot = cache.snapshot()
    before = copies(snapshot._cache)
    CHANGES[change](model, cache)
    rows = 4 if change == "repeat" else 2
    step(model, token_ids(3, rows, seed=6), cache)
    assert same(tensors(snapshot._cache), before)
    cache.restore(snapshot)
    assert_goes_on(model, cache, ids)


def test_snapshot_counts_its_bytes(model):
    cache = filled(model, token_ids(9, rows=2))
    snapshot = cache.snapshot()
    assert snapshot.nbytes() == cache.nbytes()
    assert sum(snapshot.storages().values()) == sum(cache.nbytes().values())
    assert repr(snapshot) == repr(cache).replace("KdaHybridCache", "CacheSnapshot")


def refused(model: KdaHybridForCausalLM, cache: KdaHybridCache, ids: Tensor, snapshot: object, message: str) -> None:
    before, places = copies(cache), pointers(cache)
    with pytest.raises(ValueError, match=message):
        cache.restore(snapshot)
    assert pointers(cache) == places
    assert same(tensors(cache), before)
    assert_goes_on(model, cache, ids)


@pytest.mark.parametrize("field", OTHERS)
def test_restore_refuses_a_snapshot_of_another_model(model, field):
    ids, other = token_ids(9), KdaHybridCache(tiny_config(**{field: OTHERS[field]}))
    refused(model, filled(model, ids), ids, other.snapshot(), rf"another model: its `{field}` is")


@pytest.mark.parametrize("what", [None, {}, 3, KdaHybridCache(tiny_config())], ids=lambda x: type(x).__name__)
def test_restore_refuses_what_is_no_snapshot(model, what):
    ids = token_ids(9)
    refused(model, filled(model, ids), ids, what, rf"not a {type(what).__name__}")


def test_restore_refuses_what_there_is_no_room_for(model):
    ids, cache, snapshot = token_ids(9), KdaHybridCache(model.config, 20), filled(model, token_ids(21)).snapshot()
    step(model, ids, cache)
    refused(model, cache, ids, snapshot, "21 tokens behind 0 do not fit into `max_cache_len` 20")


# Files


def again(path: Path, change: Callable[[dict, dict], None]) -> None:
    """Writes a session anew, its header and its tensors changed."""
    with safe_open(path, "pt") as file:
        about, found = json.loads(file.metadata()[FORMAT]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(about, found)
    save_file({name: x.contiguous() for name, x in found.items()}, path, {FORMAT: json.dumps(about)})


@pytest.fixture
def session(model, tmp_path) -> Path:
    """A file of 9 tokens in two rows."""
    filled(model, token_ids(9, rows=2)).save(tmp_path / "session")
    return tmp_path / "session"


@pytest.mark.parametrize("to", ["growing", "static"])
@pytest.mark.parametrize(("name", "kind"), CACHE_CASES)
def test_load_goes_on_from_what_was_saved(name, kind, to, tmp_path):
    model, ids, room = dense_model(name), token_ids(9, rows=2), CACHE_KINDS[to].get("max_cache_len")
    cache = filled(model, ids[:, :8], kind)
    step(model, ids[:, 8:], cache)
    cache.save(str(tmp_path / "session"))
    loaded = KdaHybridCache.load(str(tmp_path / "session"), model.config, max_cache_len=room)
    assert same(tensors(loaded), tensors(cache))
    assert loaded.max_cache_len == room
    assert_goes_on(model, loaded, ids)
    assert_goes_on(model, cache, ids, seed=3)


def test_load_goes_on_in_padded_rows(model, tmp_path):
    mask = [[0] * 6 + [1] * 3, [1, 1, 1, 0, 0, 0, 1, 0, 1]]
    ids = torch.cat([padded(token_ids(sum(row)), row) for row in mask])
    filled(model, ids, attention_mask=torch.tensor(mask)).save(tmp_path / "session")
    loaded = KdaHybridCache.load(tmp_path / "session", model.config)
    assert_goes_on(model, loaded, ids, torch.tensor(mask))


def test_load_keeps_the_dtypes_of_a_bfloat16_model(tmp_path):
    model = KdaHybridForCausalLM._from_config(tiny_config(**ALIGNED), dtype=torch.bfloat16).eval()
    cache, ids = filled(model, token_ids(9)), token_ids(6, seed=3)
    cache.save(tmp_path / "session")
    loaded = KdaHybridCache.load(tmp_path / "session", model.config)
    assert [x.dtype for x in tensors(loaded)] == [x.dtype for x in tensors(cache)]
    assert {x.dtype for x in tensors(loaded)} == {torch.float32, torch.bfloat16}
    for token in ids.split(1, 1):
        assert torch.equal(step(model, token, loaded), step(model, token, cache))


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_load_of_an_empty_session_is_empty(model, kind, tmp_path):
    KdaHybridCache(model.config, **CACHE_KINDS[kind]).save(tmp_path / "session")
    room = CACHE_KINDS[kind].get("max_cache_len")
    loaded = KdaHybridCache.load(tmp_path / "session", model.config, max_cache_len=room)
    assert_goes_on(model, loaded, token_ids(0))


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_load_puts_tensors_where_it_is_told(model, session, device):
    assert {x.device for x in tensors(KdaHybridCache.load(session, model.config, device))} == {torch.device("cpu")}


def test_load_does_not_take_a_wrong_device_for_a_damaged_file(model, session):
    with pytest.raises(Exception, match="nowhere") as refusal:
        KdaHybridCache.load(session, model.config, "nowhere")
    assert "whole file" not in str(refusal.value)


def test_loaded_cache_records_branches_and_saves(model, session):
    cache, ids = KdaHybridCache.load(session, model.config), token_ids(9, rows=2)
    cache.save(session)  # over what it came from
    assert same(tensors(KdaHybridCache.load(session, model.config)), tensors(cache))
    cache.activate_past_recording()
    snapshot = cache.snapshot()
    assert_goes_on(model, cache, ids)
    cache.crop(-5)
    assert_goes_on(model, cache, ids, seed=3)
    cache.restore(snapshot)
    assert_goes_on(model, cache, ids, seed=4)


def test_saved_file_is_safetensors_and_holds_what_is_documented(model, session):
    with safe_open(session, "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert list(file.metadata()) == [FORMAT]
        about = json.loads(file.metadata()[FORMAT])
    linear = {"state": (2, 3, 20, 12), "window": (2, 3, 3 * (2 * 12 + 20))}
    want = {f"layers.{i}.{name}": shape for i in (0, 1, 3) for name, shape in linear.items()}
    assert shapes == {**want, "layers.2.latents": (2, 9, 28 + 8)}
    assert about == {"version": 1, "tokens": 9, "fingerprint": fingerprint_of(model.config)}
    data, numbers = session.read_bytes(), sum(torch.Size(shape).numel() for shape in shapes.values())
    header = int.from_bytes(data[:8], "little")
    assert len(data) == 8 + header + 4 * numbers, "more than a header and numbers"
    assert isinstance(json.loads(data[8 : 8 + header]), dict)


def test_load_says_that_there_is_no_file(model, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        KdaHybridCache.load(tmp_path / "nowhere", model.config)


@pytest.mark.parametrize("field", OTHERS)
def test_load_refuses_the_session_of_another_model(session, field):
    with pytest.raises(ValueError, match=rf"session belongs to another model: its `{field}` is"):
        KdaHybridCache.load(session, tiny_config(**{field: OTHERS[field]}))


def test_load_refuses_what_there_is_no_room_for(model, session):
    with pytest.raises(ValueError, match="9 tokens behind 0 do not fit into `max_cache_len` 8"):
        KdaHybridCache.load(session, model.config, max_cache_len=8)
    assert KdaHybridCache.load(session, model.config, max_cache_len=9).get_seq_length() == 9


CONTENTS = {
    "empty": lambda data: b"",
    "garbage": lambda data: bytes(range(256)) * 20,
    "half the header": lambda data: data[:300],
    "half the numbers": lambda data: data[: len(data) // 2],
    "a byte short": lambda data: data[:-1],
    "a byte too long": lambda data: data + b"\0",
}


@pytest.mark.parametrize("how", CONTENTS)
def test_load_refuses_a_file_that_is_not_whole(model, session, how):
    session.write_bytes(CONTENTS[how](session.read_bytes()))
    with pytest.raises(ValueError, match=r"session: not a whole file of `KdaHybridCache\.save`"):
        KdaHybridCache.load(session, model.config)


OTHER_HEADERS = [None, {"format": "pt"}, *({FORMAT: text} for text in ("null", "[]", "3", "", '{"version": 1,', "{}"))]


@pytest.mark.parametrize("metadata", OTHER_HEADERS, ids=str)
def test_load_refuses_another_file_of_safetensors(model, session, metadata):
    save_file({"layers.0.state": torch.zeros(2, 3)}, session, metadata)
    with pytest.raises(ValueError, match=r"session: (no header of a cache; |not a whole file|version None)"):
        KdaHybridCache.load(session, model.config)


DAMAGES = {
    "another version": lambda about, x: about.update(version=2),
    "no version": lambda about, x: about.pop("version"),
    "no tokens": lambda about, x: about.pop("tokens"),
    "more tokens": lambda about, x: about.update(tokens=10),
    "fewer tokens": lambda about, x: about.update(tokens=8),
    "0 tokens": lambda about, x: about.update(tokens=0),
    "tokens below 0": lambda about, x: about.update(tokens=-9),
    "tokens in words": lambda about, x: about.update(tokens="9"),
    "tokens as a fraction": lambda about, x: about.update(tokens=9.0),
    "null tokens": lambda about, x: (about.update(tokens=None), x.clear()),
    "no fingerprint": lambda about, x: about.pop("fingerprint"),
    "a fingerprint in a list": lambda about, x: about.update(fingerprint=[1]),
    "a fingerprint without a field": lambda about, x: about["fingerprint"].pop("vocab_size"),
    "no state": lambda about, x: x.pop("layers.0.state"),
    "no latents": lambda about, x: x.pop("layers.2.latents"),
    "no tensor": lambda about, x: x.clear(),
    "a tensor too many": lambda about, x: x.update({"layers.4.state": torch.zeros(2, 3, 20, 12)}),
    "a number too many": lambda about, x: x.update({"other": torch.tensor(1.0)}),
    "a state on its side": lambda about, x: x.update({"layers.0.state": x["layers.0.state"].mT}),
    "a row less": lambda about, x: x.update({"layers.1.window": x["layers.1.window"][:1]}),
    "a row more": lambda about, x: x.update({"layers.2.latents": x["layers.2.latents"].repeat(2, 1, 1)}),
    "a token less": lambda about, x: x.update({"layers.2.latents": x["layers.2.latents"][:, 1:]}),
    "no rows": lambda about, x: x.update({name: y[:0] for name, y in x.items()}),
    "a state of whole numbers": lambda about, x: x.update({"layers.0.state": x["layers.0.state"].int()}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_load_refuses_a_session_that_does_not_fit_itself(model, session, damage):
    again(session, DAMAGES[damage])
    with pytest.raises(ValueError, match=r"session"):
        KdaHybridCache.load(session, model.config)


def test_load_refuses_fewer_than_no_tokens_of_a_model_without_latents(tmp_path):
    model, path = dense_model("linear"), tmp_path / "session"
    filled(model, token_ids(9)).save(path)
    again(path, lambda about, x: about.update(tokens=-9))
    with pytest.raises(ValueError, match="session"):
        KdaHybridCache.load(path, model.config)


def test_load_with_any_byte_of_the_header_changed_is_refused_or_right(model, session):
    data, want = session.read_bytes(), tensors(KdaHybridCache.load(session, model.config))
    wrong = []
    for place in range(0, 8 + int.from_bytes(data[:8], "little"), 2):
        session.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            right = same(tensors(KdaHybridCache.load(session, model.config)), want)
        except ValueError:
            continue
        except Exception as error:
            right, place = False, (place, repr(error))
        wrong += [] if right else [place]
    assert not wrong


def test_save_that_fails_leaves_the_old_file_and_no_other(model, session, monkeypatch):
    old, after = session.read_bytes(), filled(model, token_ids(20))

    def half(tensors: dict, path: Path, metadata: dict) -> None:
        Path(path).write_bytes(old[:100])
        raise OSError("no space left")

    monkeypatch.setattr(cache_kda_hybrid, "save_file", half)
    with pytest.raises(OSError, match="no space left"):
        after.save(session)
    assert session.read_bytes() == old
    assert list(session.parent.iterdir()) == [session]


def test_save_replaces_an_older_file_when_it_is_whole(model, session):
    ids = token_ids(20)
    filled(model, ids).save(session)
    assert list(session.parent.iterdir()) == [session]
    assert_goes_on(model, KdaHybridCache.load(session, model.config), ids)


def test_save_to_a_folder_that_is_not_there_fails(model, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        filled(model, token_ids(3)).save(tmp_path / "nowhere" / "session")
    assert not list(tmp_path.iterdir())


PROGRAM = """
import json, sys, torch
from modeling_kda import EMBEDDED_MODEL, KdaHybridCache, KdaHybridForCausalLM
torch.set_num_threads(1)
path, token, new = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = KdaHybridForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()
cache = KdaHybridCache.load(path, model.config)
ids, mask = torch.tensor([[token]]), torch.ones(1, cache.get_seq_length() + 1).long()
out = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=new, do_sample=False, eos_token_id=None)
print(json.dumps(out[0].tolist()))
"""


def test_session_goes_on_in_another_process(tmp_path):
    length, new, path = int(os.environ.get("KDA_SESSION_TOKENS", "3000")), 32, tmp_path / "session"
    model = KdaHybridForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    text = tokenizer((Path(EMBEDDED_MODEL) / "README.md").read_text(), return_tensors="pt").input_ids
    ids, cache = text.repeat(1, -(-(length + 1) // text.shape[1]))[:, : length + 1], KdaHybridCache(model.config)
    for piece in ids[:, :length].split(1024, 1):
        with torch.no_grad():
            model(piece, cache=cache, logits_to_keep=1)
    cache.save(path)
    command = [sys.executable, "-c", PROGRAM, str(path), str(int(ids[0, -1])), str(new)]
    folder = Path(__file__).parents[1]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    here = model.generate(ids, cache=cache, max_new_tokens=new, do_sample=False, eos_token_id=None)
    assert json.loads(run.stdout) == here[0, length:].tolist()
    assert len(set(here[0, length + 1 :].tolist())) > 3
