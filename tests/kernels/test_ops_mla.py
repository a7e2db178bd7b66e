"""ops_mla.py against `_absorbed` in float64: on a GPU, or on the CPU by Triton's interpreter (TRITON_INTERPRET=1)."""

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import triton.language as tl
from helpers import LOGITS, TOLERANCE, assert_close, check_compiled_steps, k3_model, tiny_model, token_ids
from test_layers_mla import layer_of
from torch import Tensor, nn
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from modeling_kda import KdaHybridCache, layers_mla, ops_mla, use_backend
from modeling_kda.layers_mla import MultiHeadLatentAttention
from modeling_kda.layers_mlp import RMSNorm
from modeling_kda.ops_mla import Plan, append_rows, attend_absorbed, refuses_absorbed


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
JUNK = 1e3  # in rows that nobody may see


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def interpreter_that_knows_bfloat16(monkeypatch):
    """Triton's multiplies the bits of two matrices as if they were whole numbers."""
    dot = InterpreterBuilder.create_dot

    def wide(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest))


@dataclass(frozen=True)
class Case:
    """What `attend_absorbed` gets, and the layer that it takes the place of."""

    layer: MultiHeadLatentAttention
    q: Tensor
    rows: Tensor
    at: Tensor | None = None
    pads: Tensor | None = None
    gate: Tensor | None = None

    def to(self, device: str) -> "Case":
        changed = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, layer=copy.deepcopy(self.layer).to(device), **changed)


def make(
    B: int = 1,
    T: int = 1,
    S: int = 9,
    dtype: torch.dtype = torch.float32,
    room: int | None = None,
    gated: bool = False,
    **sizes: int,
) -> Case:
    """Random tensors; with `room` of a static cache, whose other rows hold junk."""
    names = dict(H="num_attention_heads", N="qk_nope_head_dim", P="qk_rope_head_dim", V="v_head_dim", L="kv_lora_rank")
    sizes = {"H": 2, "N": 12, "P": 8, "V": 20, "L": 24, **sizes}
    layer, _ = layer_of(**{names[name]: size for name, size in sizes.items()})
    H, N, P, V, L = (sizes[name] for name in "HNPVL")
    q, rows = torch.randn(B, T, H, N + P), torch.randn(B, room or S, L + P)
    rows[:, S:] = JUNK
    case = Case(layer.to(dtype), q.to(dtype), rows.to(dtype), None if room is None else torch.arange(S - T, S))
    return replace(case, gate=torch.randn(B, T, H * V).to(dtype)) if gated else case


def attended(case: Case) -> Tensor:
    case = case.to(DEVICE)
    weight = case.layer.kv_b_proj.weight
    assert refuses_absorbed(case.q, case.rows, weight, case.gate) is None
    return attend_absorbed(case.q, case.rows, weight, case.layer.scaling, case.at, case.pads, case.gate)


def truth(case: Case) -> Tensor:
    S, T = case.rows.shape[1], case.q.shape[1]
    at = torch.arange(S - T, S) if case.at is None else case.at
    allowed = (at.unsqueeze(1) >= torch.arange(S)).unsqueeze(0)
    allowed = allowed if case.pads is None else allowed & case.pads.unsqueeze(1)
    o, _ = copy.deepcopy(case.layer).double()._absorbed(case.q.double(), case.rows.double(), allowed)
    o = torch.where(allowed.any(-1)[..., None, None], o, 0).flatten(2)
    return o if case.gate is None else o * torch.sigmoid(case.gate.double())


def check(case: Case) -> None:
    got, want = attended(case), truth(case)
    assert got.dtype == case.q.dtype
    assert_close(got.double().cpu(), want, absolute=0, relative=TOLERANCE[case.q.dtype])


def cut_into(monkeypatch, splits: int) -> None:
    plan = ops_mla._plan

    def changed(*given) -> Plan:
        return plan(*given)._replace(splits=splits)

    monkeypatch.setattr(ops_mla, "_plan", changed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "T"), [(3, 1), (1, 3)])  # the interpreter takes time for each query
@pytest.mark.parametrize("rows", ["new ones only", "tile - 1", "tile", "tile + 1", "three tiles and five"])
def test_attention_is_that_of_the_layer_in_float64(rows, B, T, dtype):
    tile = ops_mla.TILE
    S = {"new ones only": T, "tile - 1": tile - 1, "tile": tile, "tile + 1": tile + 1}.get(rows, 3 * tile + 5)
    check(make(B, T, S, dtype, gated=rows == "tile"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("past", [0, 50])
def test_attention_takes_sixteen_tokens(past, dtype):
    check(make(1, 16, past + 16, dtype, H=1, gated=True))


SIZES = {
    "one head": dict(H=1),
    "as many queries as a tile": dict(H=16, N=3, V=2),
    "two tiles of queries": dict(H=65, N=3, V=2),
    "no shared key": dict(P=0),
    "rows of an odd width": dict(P=7),
    "a wide shared key": dict(P=36),
    "keys narrower": dict(N=5, V=33),
    "values narrower": dict(N=33, V=1),
    "latents off the powers of 2": dict(L=44),
    "powers of 2": dict(H=4, N=16, P=16, V=16, L=32),
    "latents narrower than a tile": dict(L=4, P=4),
}


@pytest.mark.parametrize("size", SIZES)
def test_attention_takes_any_size(size):
    check(make(1, 1, 40, **SIZES[size], gated=True))


def test_attention_takes_wide_latents():
    check(make(1, 1, 70, torch.float16, H=2, N=40, P=64, V=70, L=512))


@pytest.mark.parametrize("splits", [1, 7])
@pytest.mark.parametrize("S", [3, 32, 33, 170])
def test_attention_reads_a_static_cache_up_to_its_length(monkeypatch, S, splits):
    """More splits than tiles too: the last have nothing to do, and nobody reads what they leave."""
    cut_into(monkeypatch, splits)
    check(make(1, 3, S, room=200))
    check(make(2, 1, S, room=200, gated=True))


def test_attention_of_sixteen_bits_reads_a_static_cache_up_to_its_length():
    for dtype in (torch.bfloat16, torch.float16):
        check(make(2, 2, 130, dtype, room=150))


PADS = {
    "left": lambda pads: pads[0, :40].zero_(),
    "a whole tile": lambda pads: pads[:, 32:64].zero_(),
    "holes": lambda pads: pads[:, 1::3].zero_(),
    "a row of nothing but pads": lambda pads: pads[1].zero_(),
}


@pytest.mark.parametrize("where", PADS)
@pytest.mark.parametrize(("T", "room"), [(1, None), (3, None), (1, 128)])
def test_attention_never_looks_at_a_pad(monkeypatch, T, room, where):
    cut_into(monkeypatch, 3)
    case = make(2, T, 100, room=room)
    pads = torch.ones(2, room or 100, dtype=torch.bool)
    PADS[where](pads)
    case.rows[~pads] = JUNK
    check(replace(case, pads=pads))


def test_attention_of_large_scores_stays_exact():
    case = make(2, 2, 70)
    check(replace(case, q=100 * case.q))


def test_attention_reads_slices():
    """Queries and gate of one projection, rows of a cache that has room for more."""
    case = make(2, 3, 20, gated=True)
    H, width = case.q.shape[2:]
    whole = torch.cat([case.q.flatten(2), case.gate], -1)
    q, gate = whole.split([H * width, case.gate.shape[-1]], -1)
    rows = torch.cat([case.rows, torch.full_like(case.rows, JUNK)], 1)[:, :20]
    check(replace(case, q=q.unflatten(-1, (H, width)), gate=gate, rows=rows))


def norm_of(width: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(width, 1e-5)
    norm.weight.copy_(torch.randn(width))
    return norm.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "P"), [(1, 8), (3, 5), (2, 0)])
def test_rows_are_appended_as_the_layer_makes_them(T, P, dtype):
    B, L, at = 2, 21, torch.tensor([4, 7, 5], device=DEVICE)[:T]
    norm, wide = norm_of(L, dtype), torch.randn(B, T, L + P + 11, device=DEVICE).to(dtype)
    new = wide[..., 3 : 3 + L + P]
    rows = torch.randn(B, 9, L + P, device=DEVICE).to(dtype)
    want = rows.index_copy(1, at, torch.cat([norm(new[..., :L]), new[..., L:]], -1))
    assert append_rows(new, norm.weight, norm.eps, rows, at) is rows
    assert_close(rows.double(), want.double(), absolute=0, relative=TOLERANCE[dtype])
    others = [place for place in range(9) if place not in at]
    assert torch.equal(rows[:, others], want[:, others])
    assert torch.equal(rows[..., L:], want[..., L:])


def test_attention_takes_pads_of_any_strides():
    case = make(3, 1, 20)
    pads = torch.rand(20, 3) > 0.3
    pads[0] = True
    check(replace(case, pads=pads.t()))


def test_past_that_needs_gradients_gets_them(called):
    model, ids = model_of(), token_ids(9).to(DEVICE)
    grads = []
    for backend in ("auto", "torch"):
        cache, embeds = KdaHybridCache(model.config), model.get_input_embeddings()(ids).detach()
        with use_backend(backend), torch.enable_grad():
            past = embeds[:, :8].clone().requires_grad_()
            for x in model.parameters():
                x.requires_grad_(False)
            model(inputs_embeds=past, cache=cache)
            model(inputs_embeds=embeds[:, 8:], cache=cache).logits.sum().backward()
        grads.append(past.grad)
    assert called == []
    assert_close(grads[0], grads[1], absolute=0, relative=1e-5)


@pytest.mark.skipif(DEVICE == "cuda", reason="an assertion on a GPU ends the process")
def test_rows_beyond_the_cache_are_not_written():
    norm, whole = norm_of(6, torch.float32), torch.zeros(3, 9, 8)
    append_rows(torch.randn(1, 2, 8), norm.weight, norm.eps, whole[1:2], torch.tensor([8, 9]))
    assert whole[1, 8].all()
    assert not torch.cat([whole[0], whole[1, :8], whole[2]]).any()


REFUSED = {
    "no tokens, or more than 16": lambda: make(1, 17, 20),
    "dtype torch.float64": lambda: make(dtype=torch.float64),
    "latents wider than 64 in torch.float32": lambda: make(L=68),
    "heads wider than 256, or shared keys wider than 128": lambda: make(V=257),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_attention_says_what_it_refuses(reason):
    case = REFUSED[reason]().to(DEVICE)
    assert refuses_absorbed(case.q, case.rows, case.layer.kv_b_proj.weight) == reason


def test_attention_refuses_gradients_and_other_backends():
    case = make().to(DEVICE)
    given = (case.q, case.rows, case.layer.kv_b_proj.weight)
    with torch.enable_grad():
        assert refuses_absorbed(*given) == "gradients"
    for backend in ("torch", "reference"):
        with use_backend(backend):
            assert refuses_absorbed(*given) == "another backend is asked for"


def model_of(make=tiny_model, layers: int = 1, **changes) -> nn.Module:
    """A model on the device with full attention only: the interpreter takes time for nothing else."""
    kinds = dict(layer_types=["full_attention"] * layers, mlp_layer_types=["dense"] * layers)
    return make(num_hidden_layers=layers, **kinds, **changes).to(DEVICE)


@pytest.fixture
def called(monkeypatch) -> list[str]:
    """The names of the operators that the layers call."""
    names = []

    def watched(name: str):
        function = getattr(layers_mla, name)

        def call(*args):
            names.append(name)
            return function(*args)

        return call

    for name in ("append_rows", "attend_absorbed"):
        monkeypatch.setattr(layers_mla, name, watched(name))
    return names


def last_logits(model: nn.Module, ids: Tensor, past: int, room: int | None, backend: str = "auto", **given):
    """Logits after `past` tokens, and the cache. With a mask, of these tokens as well."""
    cache, first = KdaHybridCache(model.config, room), dict(given)
    if "attention_mask" in given:
        first["attention_mask"] = given["attention_mask"][:, :past]
    with use_backend("torch"):
        model(ids[:, :past], cache=cache, **first)
    with use_backend(backend):
        return model(ids[:, past:], cache=cache, **given), cache


@pytest.mark.parametrize("make", [tiny_model, k3_model])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("room", [None, 48])
def test_model_decodes_with_kernels_as_without(called, room, tokens, make):
    model, ids = model_of(make, 2), token_ids(34 + tokens, rows=2 if tokens == 1 else 1).to(DEVICE)
    got, cache = last_logits(model, ids, 34, room)
    names = ["append_rows", "attend_absorbed"] if room else ["attend_absorbed"]
    assert called == 2 * names
    want, other = last_logits(model, ids, 34, room, "torch")
    assert called == 2 * names
    assert_close(got.logits, want.logits, absolute=LOGITS)
    length = cache.get_seq_length()
    for mine, theirs in zip(cache.layers, other.layers):
        for name, x in mine.contents(length).items():
            assert_close(x, theirs.contents(length)[name], absolute=0, relative=1e-5, name=name)


@pytest.mark.parametrize(("tokens", "room"), [(1, None), (3, None), (1, 48), (3, 48)])
def test_model_decodes_padded_rows_with_kernels_as_without(called, tokens, room):
    model, ids = model_of(), token_ids(9 + tokens, rows=2).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, 2] = 0
    got, _ = last_logits(model, ids, 9, room, attention_mask=mask)
    assert "attend_absorbed" in called
    want, _ = last_logits(model, ids, 9, room, "torch", attention_mask=mask)
    assert_close(got.logits, want.logits, absolute=LOGITS)


def test_model_returns_attention_weights_if_they_are_asked_for(called):
    model, ids = model_of(), token_ids(9).to(DEVICE)
    got, _ = last_logits(model, ids, 8, None, output_attentions=True)
    assert got.attentions[0].shape == (1, 4, 1, 9)
    assert called == []


def test_model_drops_attention_weights_in_training(called):
    model, ids = model_of(attention_dropout=0.5), token_ids(9).to(DEVICE)
    last_logits(model.train(), ids, 8, None)
    assert called == []
    last_logits(model.eval(), ids, 8, None)
    assert called == ["attend_absorbed"]


def test_layer_whose_norm_is_watched_makes_its_rows_itself(called):
    model, ids, seen = model_of(), token_ids(9).to(DEVICE), []
    model.model.layers[0].self_attn.kv_a_layernorm.register_forward_hook(lambda *_: seen.append(1))
    last_logits(model, ids, 8, 48)
    assert called == ["attend_absorbed"]
    assert len(seen) == 2


def test_model_decodes_compiled_as_it_is():
    """Rows are written where they lie: the compiler must neither refuse nor copy them for good."""
    check_compiled_steps(model_of())


def test_attention_compiles_for_any_length():
    compiled = torch.compile(attend_absorbed, fullgraph=True, backend="aot_eager", dynamic=True)
    for S in (5, 9):
        case = make(1, 1, S).to(DEVICE)
        weight = case.layer.kv_b_proj.weight
        assert_close(compiled(case.q, case.rows, weight, 0.2), attend_absorbed(case.q, case.rows, weight, 0.2))
