"""The chunks of ops_triton.py against the recurrence in float64: on a GPU, or on the CPU by Triton's interpreter.

The interpreter takes a tenth of a second for a chunk of a head: few heads, and of the hard inputs the first tokens.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers import DENSE, LOGITS, TOLERANCE, assert_close, mask_of, tiny_model, token_ids
from test_ops_reference import CASES, check_golden
from test_ops_torch import HARD, convert, from_decay, make_call
from torch import Tensor, nn

from modeling_kda import KdaCall, KdaHybridCache, kda, ops_reference, ops_triton, use_backend


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAME = 1e-6  # between two ways to ask for the same; relative to the maximum
BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter multiplies bfloat16 as whole numbers"),
)
DTYPES = [torch.float32, torch.float16, BFLOAT16]
STREAMS = ("q", "k", "v", "gate", "beta")


@pytest.fixture(autouse=True)
def by_triton():
    with use_backend("triton"), torch.no_grad():
        yield


@pytest.fixture
def launched(monkeypatch) -> list[tuple]:
    """The arguments of each call of the operator."""
    calls, operator = [], ops_triton.chunk

    def watched(*args):
        calls.append(args)
        return operator(*args)

    monkeypatch.setattr(ops_triton, "chunk", watched)
    return calls


def there(call: KdaCall) -> KdaCall:
    """`call` on the device."""
    moved = convert(call, lambda x: x.to(DEVICE))
    return replace(moved, cu_seqlens=None if call.cu_seqlens is None else call.cu_seqlens.to(DEVICE))


def cut(call: KdaCall, tokens: slice) -> KdaCall:
    """Some tokens of `call`."""
    return replace(call, **{name: getattr(call, name)[:, tokens] for name in STREAMS})


def one_head(call: KdaCall) -> KdaCall:
    """The first head of `call`."""
    heads = {name: getattr(call, name)[:, :, :1] for name in STREAMS}
    state = None if call.state is None else call.state[:, :1]
    return replace(call, **heads, A_log=call.A_log[:1], dt_bias=call.dt_bias[: call.k.shape[3]], state=state)


def check(call: KdaCall, run: Callable = ops_triton.run, relative: float | None = None) -> tuple[Tensor, Tensor]:
    """What the kernels give on the device is what the recurrence gives in float64 on the CPU."""
    relative = relative or TOLERANCE[call.v.dtype]
    assert ops_triton.refuses(there(call)) is None
    o, state = run(there(call))
    assert o.dtype == call.v.dtype
    assert state.dtype == torch.float32
    for name, got, want in zip(("o", "state"), (o, state), ops_reference.run(convert(call, Tensor.double))):
        assert_close(got.double().cpu(), want, absolute=0, relative=relative, name=name)
    return o, state


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for name, x, y in zip(("o", "state"), got, want):
        assert_close(x, y, absolute=0, relative=SAME, name=name)


LENGTHS = [17, 31, 32, 33, 64, 65, 100]
SHAPES = [(1, 2, 7, 16), (1, 1, 7, 3), (2, 1, 16, 7)]  # B, H, K, V
BOUNDS = [None, -5.0, -8.0]
# Every length with a bound, and the short ones with every bound.
SHORT = [(T, bound) for T in LENGTHS if T < 50 for bound in BOUNDS]
LONG = [(T, bound) for T, bound in zip([T for T in LENGTHS if T > 50], BOUNDS)]


@pytest.mark.parametrize(
    ("T", "bound", "shape", "with_state"),
    [(*case, *rest) for case, *rest in zip(SHORT + LONG, itertools.cycle(SHAPES), itertools.cycle([True, False]))],
)
def test_run_is_the_recurrence(T, bound, shape, with_state):
    B, H, K, V = shape
    check(make_call(B, T, H, K, V, bound, with_state))


@pytest.mark.parametrize(("K", "V"), [*itertools.permutations((7, 16, 48, 128), 2), (1, 2), (2, 1), (128, 128)])
def test_run_takes_any_width(K, V):
    check(make_call(1, 18, 1, K, V, bound=-5.0 if K > V else None))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("bound", BOUNDS)
def test_run_takes_sixteen_bits(bound, dtype):
    check(make_call(1, 35, 1, 48, 16, bound, dtype=dtype))
    check(make_call(1, 40, 1, 7, 33, bound, with_state=False, cu_seqlens=[0, 0, 17, 40], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_run_goes_a_long_way_in_sixteen_bits(dtype):
    """What is rounded in one chunk does not grow in those that follow."""
    check(make_call(1, 200, 1, 16, 7, dtype=dtype))


DOCUMENTS = {
    "one": [0, 40],
    "empty at the start": [0, 0, 0, 20, 37],
    "empty in the middle": [0, 18, 18, 18, 37],
    "empty at the end": [0, 20, 37, 37, 37],
    "empty everywhere": [0, 0, 17, 17, 17, 18, 18, 50, 50],
    "empty on the border of a chunk": [0, 16, 16, 32, 32, 32, 48],
    "of 1, 15, 16 and 17 tokens": [0, 1, 16, 32, 49],
    "of 1 token": list(range(18)),
    "a short one before a long one": [0, 3, 50],
    "a long one before a short one": [0, 49, 50],
    "of one chunk each": [0, 16, 32],
}


@pytest.mark.parametrize(
    ("documents", "with_state", "dtype"),
    list(zip(DOCUMENTS, itertools.cycle([True, False]), itertools.cycle([torch.int64, torch.int64, torch.int32]))),
)
def test_run_is_the_recurrence_in_each_document(documents, with_state, dtype):
    borders = DOCUMENTS[documents]
    call = make_call(1, borders[-1], 1, 7, 5, with_state=with_state, cu_seqlens=borders)
    check(replace(call, cu_seqlens=call.cu_seqlens.to(dtype)))


def test_run_is_the_recurrence_in_many_documents():
    lengths = torch.randint(0, 4, (24,), generator=torch.Generator().manual_seed(3)).tolist()
    borders = list(itertools.accumulate(lengths, initial=0))
    check(make_call(1, borders[-1], 1, 3, 5, cu_seqlens=borders))


@pytest.mark.parametrize("bad", ["q", "v", "gate", "state"])
def test_run_does_not_spread_nan_to_other_documents_and_heads(bad):
    call = make_call(1, 24, cu_seqlens=[0, 2, 21, 24])
    x = getattr(call, bad)
    (x[1, 0] if bad == "state" else x[:, 3, 0]).fill_(torch.nan)
    o, state = ops_triton.run(there(call))
    assert o[:, 3 : 4 if bad == "q" else 21, 0].isnan().all()
    assert state[1, 0].isnan().any() == (bad != "q")
    for part in (o[:, :2], o[:, 21:], o[:, :, 1], state[[0, 2]], state[:, 1]):
        assert torch.isfinite(part).all()


def test_run_reads_and_writes_nothing_but_its_tokens(launched):
    """What lies behind the last token, and around states and outputs, is somebody else's."""
    call = make_call(1, 47, 1)
    for name in STREAMS:
        getattr(call, name)[:, 20:] = torch.nan
    states = torch.full((3, 1, 10, 7), 7.0, device=DEVICE)
    call = replace(there(call), state=states[1:2], overwrite_state=True)
    o, state = ops_triton.run(cut(call, slice(20)))
    assert torch.isfinite(o).all()
    assert (states[[0, 2]] == 7).all()
    assert (states[1] != 7).all()
    # The operator once more, with an output that is a part of something.
    outputs, before = torch.full((1, 60, 1, 10), 7.0, device=DEVICE), torch.full_like(state, 7.0)
    ops_triton.chunk(*(outputs[:, 20:40] if x is o else before if x is state else x for x in launched[0]))
    assert torch.equal(outputs[:, 20:40], o)
    assert (outputs[:, :20] == 7).all()
    assert (outputs[:, 40:] == 7).all()


@pytest.mark.parametrize("cu_seqlens", [None, [0, 0, 20]])
@pytest.mark.parametrize("overwrite", [False, True])
def test_run_writes_the_state_where_it_may_and_nowhere_else(overwrite, cu_seqlens):
    call = make_call(1 if cu_seqlens else 2, 20, 1, cu_seqlens=cu_seqlens)
    ours = there(replace(call, state=call.state.clone(), overwrite_state=overwrite))
    _, state = check(call, lambda _: ops_triton.run(ours))
    assert (state.data_ptr() == ours.state.data_ptr()) == overwrite
    assert torch.equal(ours.state.cpu(), state.cpu() if overwrite else call.state)


@pytest.mark.parametrize("change", [lambda x: x.mT.contiguous().mT, Tensor.half, Tensor.double])
def test_run_leaves_a_state_alone_that_it_cannot_write(change):
    call = make_call(1, 17, 1)
    call = replace(call, state=change(call.state), overwrite_state=True)
    ours = there(replace(call, state=call.state.clone()))
    check(call, lambda _: ops_triton.run(ours))
    assert torch.equal(ours.state.cpu(), call.state)


def test_run_reads_slices_of_one_projection():
    """As a layer makes them: q, k, v and the gate, of every width, and beta, in rows of one tensor."""
    call = make_call(2, 18, 2, 12, 20)
    parts = [getattr(call, name).flatten(2) for name in STREAMS]
    joined = torch.cat([torch.full((2, 18, 1), torch.nan), *parts, torch.full((2, 18, 2), torch.nan)], -1)
    cuts = joined.to(DEVICE).split([1, *(x.shape[-1] for x in parts), 2], -1)[1:-1]
    sliced = {name: x if name == "beta" else x.unflatten(-1, (2, -1)) for name, x in zip(STREAMS, cuts)}
    whole = there(call)
    got = ops_triton.run(replace(whole, **sliced))
    for x, y in zip(got, check(call)):
        assert torch.equal(x, y)


def test_run_reads_tokens_in_any_layout():
    """Heads before tokens, channels before heads, one token for all: what no kernel reads is copied."""
    call = there(make_call(1, 17, 2, 6, 4))
    heads = {name: getattr(call, name).transpose(1, 2).contiguous().transpose(1, 2) for name in STREAMS}
    channels = {name: getattr(call, name).mT.contiguous().mT for name in STREAMS}
    want = ops_triton.run(call)
    for changed in (heads, channels):
        same(ops_triton.run(replace(call, **changed)), want)
    one = {name: getattr(call, name)[:, :1].expand_as(getattr(call, name)) for name in STREAMS}
    copies = {name: x.contiguous() for name, x in one.items()}
    same(ops_triton.run(replace(call, **one)), ops_triton.run(replace(call, **copies)))


def gates(*rows: list[float], tokens: int = 50, K: int = 48) -> KdaCall:
    """A call whose log decays are these: one row of channels for each token, over and over."""
    row = torch.tensor(rows)
    row = row.repeat(1, -(-K // row.shape[1]))[:, :K]
    return from_decay(-row.repeat(-(-tokens // len(row)), 1)[:tokens].view(1, tokens, 1, K))


def slow(call: KdaCall) -> KdaCall:
    """Hardly any decay, because of the bias."""
    return replace(call, dt_bias=torch.full_like(call.dt_bias, -12.0), gate=call.gate / 4)


def short(call: KdaCall) -> KdaCall:
    """Queries and keys so short that the eps of their normalisation counts."""
    return replace(call, q=call.q / 1000, k=call.k / 1000)


def fast(call: KdaCall) -> KdaCall:
    """Log decays near -1000."""
    return replace(call, A_log=torch.full_like(call.A_log, 6.9), dt_bias=torch.ones_like(call.dt_bias))


CHANNELS = [1e-5, 0.01, 0.3, 2.0, 7.0, 30.0, 1000.0]
HARDER = {
    **HARD,
    "short queries and keys": lambda: short(make_call()),
    "slow by the bias": lambda: slow(make_call()),
    "slow by the bias, bounded": lambda: slow(make_call(bound=-5.0)),
    "fast by the rate": lambda: fast(make_call()),
    "fast by the rate, bounded": lambda: fast(make_call(bound=-8.0)),
    "channels of any speed": lambda: gates(CHANNELS),
    "tokens of any speed": lambda: gates(*([x] for x in CHANNELS), K=7),
    "both of any speed": lambda: gates(*(CHANNELS[i:] + CHANNELS[:i] for i in (0, 3, 1, 5, 2))),
    "fast in every second half of a chunk": lambda: gates(*[[0.1]] * 8, *[[11.0]] * 8, K=7),
    "saturated at a low bound, every third channel": lambda: replace(
        make_call(bound=-8.0), gate=torch.where(torch.arange(7) % 3 == 0, 300.0, -1.0).expand(1, 70, 2, 7)
    ),
    "all forgotten at times": lambda: replace(
        make_call(), gate=torch.where(torch.arange(70) % 5 == 0, 1e6, -3.0).view(1, 70, 1, 1).expand(1, 70, 2, 7)
    ),
    "equal keys, all overwritten": lambda: replace(
        make_call(bound=-5.0),
        k=torch.ones(1, 70, 2, 7),
        beta=torch.full((1, 70, 2), 9.0),
        gate=torch.full((1, 70, 2, 7), -300.0),
    ),
    "decays beyond float32": lambda: replace(
        make_call(), A_log=torch.full((2,), 85.0), gate=torch.full((1, 70, 2, 7), 1000.0)
    ),
    "infinite gates": lambda: replace(
        make_call(),
        gate=torch.tensor([-torch.inf, 1.0, -1.0, 2.0, -torch.inf]).repeat(14).view(1, 70, 1, 1).expand(1, 70, 2, 7),
    ),
    "opposite keys": lambda: from_decay(
        torch.full((1, 70, 2, 7), -1e-4),
        k=torch.tensor([1.0, -1.0]).repeat(35).view(1, 70, 1, 1).expand(1, 70, 2, 7),
        beta=torch.full((1, 70, 2), 9.0),
    ),
}


@pytest.mark.parametrize("case", HARDER)
def test_run_stays_exact_on_hard_inputs(case):
    check(one_head(cut(HARDER[case](), slice(36))))


@pytest.mark.parametrize("case", HARDER)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_run_of_sixteen_bits_stays_exact_on_hard_inputs(dtype, case):
    call = one_head(cut(HARDER[case](), slice(20)))
    call = replace(call, **{name: getattr(call, name).to(dtype) for name in STREAMS})
    check(call, relative=2 * TOLERANCE[dtype])  # under equal keys, what each token writes is rounded into one place


@pytest.mark.parametrize("at", [1, 17, 30])
def test_run_in_two_pieces_is_one_run(at):
    """In chunks, and of few tokens in steps, before or after."""
    call = there(make_call(1, 36, 1))
    first, state = ops_triton.run(cut(call, slice(at)))
    second, state = ops_triton.run(replace(cut(call, slice(at, None)), state=state, overwrite_state=True))
    same((torch.cat([first, second], 1), state), ops_triton.run(call))


def test_run_reads_borders_in_any_layout():
    call = make_call(1, 40, 1, cu_seqlens=[0, 7, 40])
    apart = torch.stack([call.cu_seqlens, call.cu_seqlens + 99], 1)[:, 0]
    same(ops_triton.run(replace(there(call), cu_seqlens=apart.to(DEVICE))), ops_triton.run(there(call)))


def test_run_of_no_row_gives_nothing():
    o, state = ops_triton.run(there(make_call(0, 20)))
    assert o.shape == (0, 20, 2, 10)
    assert state.shape == (0, 2, 10, 7)


REFUSED = {
    "of more than 16 tokens, or with gradients, it does not say what is written": lambda call: replace(
        call, writes=torch.zeros_like(call.v, dtype=torch.float32)
    ),
    "gradients in float16, which the state's may exceed": lambda call: replace(
        convert(call, Tensor.half), v=call.v.half().requires_grad_()
    ),
    "heads wider than 128": lambda call: there(make_call(1, 20, 1, 129, 4)),
    "dtype torch.float64": lambda call: convert(call, Tensor.double),
    "dtype torch.float16, torch.float32": lambda call: replace(call, k=call.k.half()),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_backend_says_what_it_refuses_and_another_runs_instead(launched, reason):
    call = REFUSED[reason](there(make_call(1, 20)))
    with torch.enable_grad():
        assert ops_triton.refuses(call) == reason
        with pytest.raises(RuntimeError, match=reason):
            kda(call)
        with use_backend("auto"):
            got = kda(call)
    assert launched == []
    for x, want in zip(got, ops_reference.run(convert(call, lambda x: x.detach().double()))):
        assert_close(x.double(), want, absolute=0, relative=1e-3)  # others may multiply in tf32


def test_backend_takes_wide_values_and_keys_up_to_its_limit():
    assert ops_triton.refuses(there(make_call(1, 20, 1, 4, 129))) == "heads wider than 128"
    assert ops_triton.refuses(there(make_call(1, 20, 1, 128, 128))) is None


def test_operator_is_what_it_says(launched):
    """Of what it changes and gives back, and without data too."""
    ops_triton.run(there(make_call(1, 17, 1, cu_seqlens=[0, 1, 17])))
    with torch.enable_grad():
        torch.library.opcheck(getattr(torch.ops, ops_reference.OPERATORS).chunk.default, launched[0])


@pytest.mark.parametrize(("cu_seqlens", "overwrite"), [(None, True), ([0, 7, 40], False)])
def test_kda_compiles_to_what_it_is(cu_seqlens, overwrite):
    call = replace(there(make_call(1, 40, 1, cu_seqlens=cu_seqlens)), overwrite_state=overwrite)

    def doubled(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Something before, and something after, that the compiler has to keep in order."""
        q, k, v, gate, beta, state = tensors
        o, state = kda(replace(call, q=q + 1, k=k, v=v, gate=gate, beta=beta, state=state))
        return o * 2, state + 1

    given = [[*(getattr(call, name) for name in STREAMS), call.state.clone()] for _ in range(2)]
    got = torch.compile(doubled, fullgraph=True, backend="aot_eager")(*given[0])
    want = doubled(*given[1])
    same(got, want)
    assert_close(given[0][-1], given[1][-1], absolute=0, relative=SAME, name="the state that was given")
    assert torch.equal(given[0][-1], call.state) != overwrite


def test_kda_compiles_for_any_number_of_tokens():
    compiled = torch.compile(kda, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (40, 18):
        call = there(make_call(1, T, 1))
        same(compiled(call), kda(call))


def test_kda_runs_in_inference_mode_and_after_it():
    call = make_call(1, 17, 1)
    want = kda(there(call))
    with torch.inference_mode():
        _, state = got = kda(there(call))
        same(got, want)
        inside = kda(replace(there(call), state=state.clone(), overwrite_state=True))
    before = state.clone()
    outside = kda(replace(there(call), state=state, overwrite_state=True))
    same(outside, inside)
    assert torch.equal(state, before)  # outside, nobody may write it


def test_kda_leaves_autocast_outside():
    call = make_call(1, 17, 1)
    with torch.autocast(DEVICE, torch.bfloat16):
        check(call, kda)


@pytest.mark.skipif(DEVICE == "cpu", reason="minutes by the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cu_seqlens", [None, [0, 5, 5, 700, 733, 1024, 1500]])
def test_run_of_many_tokens_and_heads_gives_the_same_every_time(cu_seqlens, dtype):
    """Programs that run at once do not step on each other."""
    call = make_call(1, 1500, 8, 128, 96, cu_seqlens=cu_seqlens, dtype=dtype)
    want = check(call)
    for _ in range(5):
        for x, y in zip(ops_triton.run(there(call)), want):
            assert torch.equal(x, y)


def takes_long(case: dict) -> bool:
    """By interpreter; what decays fast is worth it."""
    chunks = case["B"] * case["H"] * -(-case["T"] // 16)
    return DEVICE == "cpu" and chunks > (18 if case["decay"] == "strong" else 12)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["T"] > 16 and not takes_long(case)])
def test_kda_gives_the_golden_values(launched, name):
    def run(call: KdaCall) -> tuple[Tensor, Tensor]:
        o, state = kda(there(call))
        return o.cpu(), state.cpu()

    check_golden(run, name, torch.float32, o=2e-6, state=5e-6)
    assert len(launched) == 1


def prefilled(model: nn.Module, ids: Tensor, backend: str, **given) -> tuple[Tensor, KdaHybridCache]:
    """Logits of all but the last token and then of the last, and the cache."""
    cache, logits = KdaHybridCache(model.config), []
    with use_backend(backend):
        for tokens in (ids[:, :-1], ids[:, -1:]):
            mask = {name: x[:, : cache.get_seq_length() + tokens.shape[1]] for name, x in given.items()}
            logits.append(model(tokens, cache=cache, **mask).logits)
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("mask", [None, [[0] * 3 + [1] * 21, [1] * 18 + [0] * 2 + [1] * 4]], ids=["whole", "pads"])
def test_model_reads_a_prompt_with_kernels_as_without(launched, mask):
    kinds = ["linear_attention", "full_attention"]
    model = tiny_model(
        num_hidden_layers=2, layer_types=kinds, linear_num_heads=2, **{name: x[:2] for name, x in DENSE.items()}
    )
    model = model.to(DEVICE)
    given = {} if mask is None else {"attention_mask": mask_of(*mask).to(DEVICE)}
    ids = token_ids(*((41, 1) if mask is None else (24, 2))).to(DEVICE)
    got, cache = prefilled(model, ids, "triton", **given)
    assert len(launched) == 1
    want, other = prefilled(model, ids, "torch", **given)
    assert len(launched) == 1
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else given["attention_mask"].bool()
    assert_close(got[real], want[real], absolute=LOGITS)
    for mine, theirs in zip(cache.layers, other.layers):
        for name, x in mine.contents(ids.shape[1]).items():
            assert_close(
                x, theirs.contents(ids.shape[1])[name], absolute=0, relative=TOLERANCE[torch.float32], name=name
            )
