"""ops_torch.py against the golden cases and the recurrence in float64: chunks and loop, values and gradients."""

import itertools
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from helpers import TOLERANCE, assert_close
from test_ops_reference import CASES, check_golden, check_writes, gradient, softplus_inverse
from torch import Tensor

from modeling_kda import KdaCall, kda, ops_reference, ops_torch


TENSORS = ("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "state")
CHUNK = ops_torch.CHUNK


def make_call(
    B: int = 1,
    T: int = 70,
    H: int = 2,
    K: int = 7,
    V: int = 10,
    bound: float | None = None,
    with_state: bool = True,
    cu_seqlens: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> KdaCall:
    """A random call. The rates spread the decays of a token from e^-0.01 to about e^-10 (or to the bound)."""
    torch.manual_seed(seed)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    return KdaCall(
        q=torch.randn(B, T, H, K).to(dtype),
        k=torch.randn(B, T, H, K).to(dtype),
        v=torch.randn(B, T, H, V).to(dtype),
        gate=torch.randn(B, T, H, K).mul(2).to(dtype),
        beta=torch.randn(B, T, H).mul(2).to(dtype),
        A_log=torch.randn(H).to(torch.promote_types(dtype, torch.float32)),
        dt_bias=torch.randn(H * K).sub(1).to(torch.promote_types(dtype, torch.float32)),
        lower_bound=bound,
        state=torch.randn(N, H, V, K).to(torch.promote_types(dtype, torch.float32)) if with_state else None,
        cu_seqlens=None if cu_seqlens is None else torch.tensor(cu_seqlens),
    )


def convert(call: KdaCall, change: Callable[[Tensor], Tensor]) -> KdaCall:
    """`call` with every float tensor changed."""
    return replace(call, **{x: change(getattr(call, x)) for x in TENSORS if getattr(call, x) is not None})


def outcome(run: Callable, call: KdaCall) -> dict[str, Tensor]:
    """o, the final state, and the gradients of a random weighting of both."""
    call = convert(call, lambda x: x.detach().requires_grad_())
    o, state = run(call)
    noise = torch.Generator().manual_seed(5)
    do = torch.randn(o.shape, generator=noise).to(o)
    ds = torch.randn(state.shape, generator=noise).to(state)
    loss = (o.double() * do.double()).sum() + (state.double() * ds.double()).sum()
    if loss.requires_grad:  # without tokens and state there is nothing to go back to
        loss.backward()
    found = {"o": o, "final state": state}
    for name in TENSORS:
        if (x := getattr(call, name)) is not None:
            found[f"d {name}"] = gradient(x)
    return {name: x.detach() for name, x in found.items()}


def check(call: KdaCall, tolerance: float, got: dict[str, Tensor] | None = None) -> None:
    """ops_torch on `call` is within `tolerance` of the recurrence in float64, relative to each tensor's maximum."""
    got = outcome(ops_torch.run, call) if got is None else got
    want = outcome(ops_reference.run, convert(call, Tensor.double))
    for name, x in got.items():
        assert torch.isfinite(x).all(), f"{name} holds NaN or infinities"
        assert_close(x, want[name], absolute=0, relative=tolerance, name=name)


def without_gradients(call: KdaCall, run: Callable = ops_torch.run) -> dict[str, Tensor]:
    with torch.no_grad():
        return dict(zip(("o", "final state"), run(call)))


@pytest.mark.parametrize("name", CASES)
def test_run_gives_the_golden_values_and_gradients_in_float32(name):
    check_golden(ops_torch.run, name, torch.float32, o=2e-6, state=5e-6, grad=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_run_gives_the_golden_values_and_gradients_in_float64(name):
    check_golden(ops_torch.run, name, torch.float64, o=1e-10, state=1e-10, grad=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "cu_seqlens" not in case])
def test_loop_gives_the_golden_values(name, dtype):
    o, state = (2e-6, 5e-6) if dtype == torch.float32 else (1e-10, 1e-10)
    with torch.no_grad():
        check_golden(ops_torch._loop, name, dtype, o, state)


LENGTHS = [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 130]
# B, H, K, V: keys narrower and wider than values, odd widths, one value.
SHAPES = itertools.cycle([(1, 2, 7, 10), (2, 1, 16, 5), (3, 3, 9, 4), (1, 3, 3, 6), (2, 2, 12, 1)])
DOCUMENTS = {
    "no token": [0, 0],
    "one token": [0, 1],
    "several of one token": [0, 1, 2, 3, 4],
    "empty ones": [0, 0, 0, 5, 5, 40, 40, 40],
    "aligned": [0, CHUNK, 2 * CHUNK, 4 * CHUNK],
    "unaligned": [0, 1, CHUNK, CHUNK + 1, 3 * CHUNK + 2, 3 * CHUNK + 3],
    "short before long": [0, 3, 90],
    "long before short": [0, 87, 90],
}


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("T", "shape"), list(zip(LENGTHS, SHAPES)))
def test_run_is_the_recurrence(T, shape, with_state, bound):
    B, H, K, V = shape
    call = make_call(B, T, H, K, V, bound, with_state)
    check(call, TOLERANCE[torch.float32])
    check(call, TOLERANCE[torch.float32], without_gradients(call))
    check(convert(call, Tensor.double), TOLERANCE[torch.float64])


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("documents", "shape"), list(zip(DOCUMENTS, SHAPES)))
def test_run_is_the_recurrence_in_each_document(documents, shape, with_state, bound):
    borders, (_, H, K, V) = DOCUMENTS[documents], shape
    call = make_call(1, borders[-1], H, K, V, bound, with_state, borders)
    check(call, TOLERANCE[torch.float32])
    check(call, TOLERANCE[torch.float32], without_gradients(call))
    check(convert(call, Tensor.double), TOLERANCE[torch.float64])


def test_run_accepts_a_batch_of_no_document():
    call = make_call(1, 0, cu_seqlens=[0])
    o, state = ops_torch.run(call)
    assert o.shape == call.v.shape
    assert state.shape == (0, *call.state.shape[1:])


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 17])
def test_run_is_the_recurrence_on_short_chunks(length):
    """A gradient is wanted, so these lengths go through chunks shorter than the usual ones."""
    check(make_call(2, length, dtype=torch.float64), TOLERANCE[torch.float64])


@pytest.mark.parametrize("numbers", [1, 2**10, 2**12])
def test_run_is_the_recurrence_over_several_segments(monkeypatch, numbers):
    """Longer inputs are cut into segments, of which the backward recomputes one after the other."""
    monkeypatch.setattr(ops_torch, "SEGMENT", numbers)
    check(make_call(2, 5 * CHUNK + 3, V=20, dtype=torch.float64), TOLERANCE[torch.float64])
    borders = [0, 2 * CHUNK, 2 * CHUNK, 5 * CHUNK + 1, 5 * CHUNK + 2]
    check(make_call(T=borders[-1], cu_seqlens=borders, dtype=torch.float64), TOLERANCE[torch.float64])


def from_decay(g: Tensor, **changes) -> KdaCall:
    """A random call with the log decay `g` `[B, T, H, K]` below 0, by the softplus gate."""
    call = make_call(*g.shape[:3], K=g.shape[3])
    gate = softplus_inverse(-g.double()).float()
    return replace(
        call, gate=gate, A_log=torch.zeros(g.shape[2]), dt_bias=torch.zeros(g.shape[2] * g.shape[3]), **changes
    )


def nearly_equal_keys(spread: float, *shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(shape[-1]) + spread * torch.randn(*shape)


HARD = {
    "decay of e^-1000 a token": lambda: from_decay(torch.full((1, 70, 2, 7), -1000.0)),
    "decay of e^-1000 at times": lambda: from_decay(
        torch.where(torch.arange(70).view(1, -1, 1, 1) % 9 == 4, -1000.0, -0.01).expand(1, 70, 2, 7)
    ),
    "decay of e^-1000 in one channel": lambda: from_decay(
        torch.where(torch.arange(7) == 3, -1000.0, -0.01).expand(1, 70, 2, 7)
    ),
    "equal keys": lambda: from_decay(
        torch.full((1, 128, 2, 7), -1e-4),
        k=nearly_equal_keys(0.0, 1, 128, 2, 7),
        beta=torch.full((1, 128, 2), 5.0),  # 0.993
    ),
    "nearly parallel keys, mixed decay": lambda: from_decay(
        -torch.logspace(-4, 0.69897, 7).expand(1, 128, 2, 7),
        k=nearly_equal_keys(0.05, 1, 128, 2, 7),
        beta=torch.full((1, 128, 2), 7.0),  # 0.999
    ),
    "no decay, full overwrite": lambda: from_decay(
        torch.full((1, 128, 2, 7), -1e-12), beta=torch.full((1, 128, 2), 40.0)
    ),
    "nothing written": lambda: from_decay(torch.full((1, 70, 2, 7), -0.1), beta=torch.full((1, 70, 2), -60.0)),
    "zero queries and keys": lambda: replace(make_call(), q=torch.zeros(1, 70, 2, 7), k=torch.zeros(1, 70, 2, 7)),
    "saturated at the bound": lambda: replace(make_call(bound=-5.0), gate=torch.full((1, 70, 2, 7), 300.0)),
    "saturated at no decay": lambda: replace(make_call(bound=-5.0), gate=torch.full((1, 70, 2, 7), -300.0)),
    "softplus beyond the range of exp": lambda: replace(make_call(), gate=torch.full((1, 70, 2, 7), 1e4)),
    "softplus of -1e4": lambda: replace(make_call(), gate=torch.full((1, 70, 2, 7), -1e4)),
    "a rate of 0": lambda: replace(make_call(), A_log=torch.full((2,), float("-inf"))),
}


@pytest.mark.parametrize("case", HARD)
def test_run_stays_exact_on_hard_inputs(case):
    call = HARD[case]()
    check(call, 1e-4)
    check(call, 1e-4, without_gradients(call))
    check(call, 1e-4, without_gradients(call, ops_torch._loop))


def test_nearly_parallel_keys_are_nearly_parallel():
    """The hard case above is what it says."""
    k = ops_reference.unit(HARD["nearly parallel keys, mixed decay"]().k.double())[0, :, 0]
    assert (k @ k.T).min() > 0.97
    assert (k @ k.T).median() > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 1, 40, 70]])
@pytest.mark.parametrize("bound", [None, -5.0])
def test_run_in_half_precision_is_near_the_recurrence_on_the_same_inputs(dtype, cu_seqlens, bound):
    call = make_call(bound=bound, cu_seqlens=cu_seqlens, dtype=dtype)
    got = outcome(ops_torch.run, call)
    assert got["o"].dtype == dtype
    assert got["final state"].dtype == torch.float32
    for name in TENSORS:
        assert got[f"d {name}"].dtype == getattr(call, name).dtype
    check(call, TOLERANCE[dtype], got)
    check(call, TOLERANCE[dtype], without_gradients(call))
    check(call, TOLERANCE[torch.float32], {"final state": got["final state"]})  # only inputs and outputs are rounded


@pytest.mark.parametrize("bound", [None, -2.0])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 2, 2, 5]])
def test_run_passes_gradcheck(bound, cu_seqlens):
    call = make_call(1, 5, 2, 3, 2, bound, cu_seqlens=cu_seqlens, dtype=torch.float64)

    def run(*tensors: Tensor):
        return ops_torch.run(replace(call, **dict(zip(TENSORS, tensors))))

    assert torch.autograd.gradcheck(run, [getattr(call, name).requires_grad_() for name in TENSORS])


@pytest.mark.parametrize("wanted", TENSORS)
def test_run_gives_a_gradient_to_whoever_wants_one(wanted):
    call = make_call()
    everything = outcome(ops_torch.run, call)
    leaf = getattr(call, wanted).clone().requires_grad_()
    o, state = ops_torch.run(replace(call, **{wanted: leaf}))
    noise = torch.Generator().manual_seed(5)
    do, ds = torch.randn(o.shape, generator=noise), torch.randn(state.shape, generator=noise)
    ((o.double() * do.double()).sum() + (state.double() * ds.double()).sum()).backward()
    assert torch.equal(leaf.grad, everything[f"d {wanted}"])


@pytest.mark.parametrize("loss_of", ["o", "state"])
def test_run_gives_gradients_of_either_output_alone(loss_of):
    def gradients(run: Callable) -> dict[str, Tensor]:
        call = convert(make_call(dtype=torch.float64), Tensor.requires_grad_)
        run(call)[loss_of == "state"].square().sum().backward()
        return {name: gradient(getattr(call, name)) for name in TENSORS}

    got, want = gradients(ops_torch.run), gradients(ops_reference.run)
    for name in TENSORS:
        assert_close(got[name], want[name], absolute=0, relative=TOLERANCE[torch.float64], name=name)


def test_run_keeps_documents_apart():
    borders = [0, 40, 41, 120]
    call = convert(make_call(T=120, cu_seqlens=borders), Tensor.requires_grad_)
    o, states = ops_torch.run(call)
    (o[:, 40:41].sum() + states[1].sum()).backward()
    for name in ("q", "k", "v", "gate", "beta"):
        grad = getattr(call, name).grad
        assert (grad[:, :40] == 0).all(), name
        assert (grad[:, 41:] == 0).all(), name
        assert name == "q" or (grad[:, 40:41] != 0).any(), name
    assert (call.state.grad[[0, 2]] == 0).all()
    for n, (start, end) in enumerate(itertools.pairwise(borders)):
        part = {name: getattr(call, name)[:, start:end] for name in ("q", "k", "v", "gate", "beta")}
        alone, state = ops_torch.run(replace(call, **part, state=call.state[n : n + 1], cu_seqlens=None))
        assert_close(o[:, start:end], alone, absolute=1e-6, name=f"o of document {n}")
        assert_close(states[n : n + 1], state, absolute=1e-6, name=f"state of document {n}")


def test_run_does_not_spread_nan_to_other_documents():
    call = make_call(T=80, cu_seqlens=[0, 33, 80])
    call.v[:, 5] = float("nan")
    got = outcome(ops_torch.run, call)
    assert got["o"][:, 5:33].isnan().any()
    assert torch.isfinite(got["o"][:, 33:]).all()
    assert torch.isfinite(got["final state"][1]).all()
    for name in ("q", "k", "v", "gate", "beta"):
        assert torch.isfinite(got[f"d {name}"][:, 33:]).all(), name


@pytest.mark.parametrize("at", [0, 1, 31, 32, 33, 50, 69, 70])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_run_in_two_pieces_is_one_run(at, with_gradients):
    call = make_call(2, 70, dtype=torch.float64)

    def pieces(call: KdaCall) -> tuple[Tensor, Tensor]:
        cut = [
            {x: getattr(call, x)[:, part] for x in ("q", "k", "v", "gate", "beta")}
            for part in (slice(at), slice(at, None))
        ]
        first, state = ops_torch.run(replace(call, **cut[0]))
        second, state = ops_torch.run(replace(call, **cut[1], state=state))
        return torch.cat([first, second], 1), state

    with torch.set_grad_enabled(with_gradients):
        got = outcome(pieces, call) if with_gradients else dict(zip(("o", "final state"), pieces(call)))
    check(call, TOLERANCE[torch.float64], got)


@pytest.mark.parametrize("T", [0, 1, 5, 70])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_run_leaves_the_state_alone_unless_allowed(T, with_gradients):
    call = make_call(T=T)
    before = call.state.clone()
    with torch.set_grad_enabled(with_gradients):
        _, state = ops_torch.run(replace(call, q=call.q.requires_grad_(with_gradients)))
    assert torch.equal(call.state, before)
    assert state.data_ptr() != call.state.data_ptr()


@pytest.mark.parametrize("T", [1, 5])
def test_run_writes_into_the_state_if_allowed(T):
    call = make_call(T=T)
    _, want = ops_reference.run(convert(call, Tensor.double))
    with torch.no_grad():
        _, state = ops_torch.run(replace(call, overwrite_state=True))
    assert state.data_ptr() == call.state.data_ptr()
    assert_close(call.state, want, absolute=1e-5)


@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.parametrize("overwrite", [False, True])
def test_run_returns_a_float32_state_whatever_comes_in(T, overwrite):
    call = make_call(T=T)
    call = replace(call, state=call.state.bfloat16(), overwrite_state=overwrite)
    with torch.no_grad():
        o, state = ops_torch.run(call)
    want, final = ops_reference.run(convert(call, Tensor.double))
    assert state.dtype == torch.float32
    assert_close(o, want, absolute=1e-5)
    assert_close(state, final, absolute=1e-5)


def gappy(x: Tensor) -> Tensor:
    gaps = torch.full((*x.shape, 2), float("nan"), dtype=x.dtype)
    gaps[..., 0] = x
    return gaps[..., 0]


def reversed_in_memory(x: Tensor) -> Tensor:
    dims = tuple(reversed(range(x.ndim)))
    return x.permute(dims).contiguous().permute(dims)


def by_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim > 2 else x


@pytest.mark.parametrize("T", [5, 70])
@pytest.mark.parametrize("strides", [gappy, reversed_in_memory, by_heads])
def test_run_accepts_any_strides(T, strides):
    call = make_call(2, T)
    other = convert(call, strides)
    check(call, TOLERANCE[torch.float32], outcome(ops_torch.run, other))
    check(call, TOLERANCE[torch.float32], without_gradients(other))
    check(call, TOLERANCE[torch.float32], without_gradients(replace(other, overwrite_state=True)))


@pytest.mark.parametrize("T", [5, 70])
def test_run_accepts_expanded_tensors(T):
    call = make_call(2, T)
    call = replace(call, v=call.v[:, :1].expand_as(call.v), gate=call.gate[..., :1].expand_as(call.gate))
    check(call, TOLERANCE[torch.float32])
    check(call, TOLERANCE[torch.float32], without_gradients(call))


@pytest.mark.parametrize("cu_seqlens", [None, [0, 9, 40]])
def test_kda_compiles_without_a_graph_break(cu_seqlens):
    call = make_call(T=40, cu_seqlens=cu_seqlens)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        o, state = kda(KdaCall(*tensors[:7], state=tensors[7], cu_seqlens=call.cu_seqlens))
        return o * 2, state + 1

    def run(call: KdaCall) -> tuple[Tensor, Tensor]:
        return compiled(*(getattr(call, name) for name in TENSORS))

    def eager(call: KdaCall) -> tuple[Tensor, Tensor]:
        o, state = ops_reference.run(call)
        return o * 2, state + 1

    want = outcome(eager, convert(call, Tensor.double))
    for name, x in outcome(run, call).items():
        assert_close(x, want[name], absolute=0, relative=TOLERANCE[torch.float32], name=name)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("T", [1, 9, CHUNK, 70, (0, 4, 4, 5, 40)], ids=str)  # or borders of documents
def test_run_says_what_each_token_writes(T, with_state, dtype, gradients):
    borders = list(T) if isinstance(T, tuple) else None
    call = make_call(1 if borders else 2, borders[-1] if borders else T, 2, 5, 7, None, with_state, borders)
    with torch.set_grad_enabled(gradients):
        check_writes(ops_torch.run, convert(call, lambda x: x.to(dtype).requires_grad_(gradients)), TOLERANCE[dtype])


def peak_bytes(call: KdaCall) -> int:
    """Most bytes that one forward and backward hold at a time, beyond the inputs."""
    call = convert(call, Tensor.requires_grad_)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        o, state = ops_torch.run(call)
        (o.sum() + state.sum()).backward()
    events = sorted(
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    return max(itertools.accumulate(size for _, size in events))


def test_run_needs_memory_in_proportion_to_the_tokens():
    """All products of pairs of tokens in chunks of 64 would be `[H, T / 64, 64, 64, K]`: 128 MiB here."""
    H, K, V = 4, 32, 32
    peaks = {T: peak_bytes(make_call(1, T, H, K, V)) for T in (64, 2048, 4096)}
    token = 4 * H * (2 * K + K + V)  # bytes of q, k, gate and v
    assert peaks[4096] - peaks[2048] < 4 * token * 2048
    assert peaks[4096] < 64 * 2**20


def test_call_has_the_fields_that_these_tests_cover():
    """A new field of a call needs tests here."""
    names = [field.name for field in fields(KdaCall)]
    assert names == [*TENSORS[:7], "lower_bound", "state", "cu_seqlens", "overwrite_state", "writes"]
