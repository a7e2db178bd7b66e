"""The gradients of ops_chunk.py against those of the recurrence in float64: on a GPU, or by Triton's interpreter."""

import contextlib
import itertools
from dataclasses import replace
from math import ceil

import pytest
import torch
from helpers import DENSE, TOLERANCE, assert_close, tiny_model, token_ids, watch_launches
from test_ops_chunk import BOUNDS, DEVICE, DOCUMENTS, DTYPES, HARDER, SHAPES, STREAMS, cut, one_head, there
from test_ops_torch import convert, make_call, outcome
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from modeling_kda import KdaCall, kda, ops_chunk, ops_kda, ops_reference, ops_triton, use_backend
from modeling_kda import kernels_chunk_backward as kernels


ROUNDING = 1e-6  # What comes back is of order one: where that cancels, as for equal keys, its rounding is left.


@pytest.fixture(autouse=True)
def by_triton():
    with use_backend("triton"):
        yield


def check(call: KdaCall, relative: float | None = None, run=ops_triton.run) -> dict[str, Tensor]:
    """Outputs and gradients on the device are those of the recurrence in float64 on the CPU."""
    relative = relative or TOLERANCE[call.v.dtype]
    want = outcome(ops_reference.run, convert(call, Tensor.double))
    got = outcome(run, there(call))
    for name, x in got.items():
        assert torch.isfinite(x).all(), name
        # A sum over all tokens of roundings that do not fall out as the numbers do.
        slack = 4 if name in ("d A_log", "d dt_bias") else 1
        assert_close(x.double().cpu(), want[name], ROUNDING, slack * relative, name)
    return got


LENGTHS = [1, 5, 16, 17, 33, 50]
CASES = [(T, bound) for T in LENGTHS if T < 20 for bound in BOUNDS] + [(33, None), (50, -5.0)]


@pytest.mark.parametrize(
    ("T", "bound", "shape", "with_state"),
    [(*case, *rest) for case, *rest in zip(CASES, itertools.cycle(SHAPES), itertools.cycle([True, False]))],
)
def test_gradients_are_those_of_the_recurrence(T, bound, shape, with_state):
    B, H, K, V = shape
    check(make_call(B, T, H, K, V, bound, with_state))


@pytest.mark.parametrize(("K", "V"), [(7, 33), (33, 7), (2, 70), (128, 128), (48, 128), (128, 1)])
def test_gradients_take_any_width(K, V):
    check(make_call(1, 18, 1, K, V, bound=-5.0 if K > V else None))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("bound", BOUNDS)
def test_gradients_take_sixteen_bits(bound, dtype):
    check(make_call(1, 35, 1, 48, 16, bound, dtype=dtype))
    check(make_call(1, 40, 1, 7, 33, bound, with_state=False, cu_seqlens=[0, 0, 17, 40], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_gradients_go_a_long_way_in_sixteen_bits(dtype):
    check(make_call(1, 200, 1, 16, 7, dtype=dtype))


@pytest.mark.parametrize(("documents", "with_state"), list(zip(DOCUMENTS, itertools.cycle([True, False]))))
def test_gradients_stay_in_their_document(documents, with_state):
    borders = DOCUMENTS[documents]
    check(make_call(1, borders[-1], 1, 7, 5, with_state=with_state, cu_seqlens=borders))


@pytest.mark.parametrize("case", HARDER)
def test_gradients_stay_exact_on_hard_inputs(case):
    check(one_head(cut(HARDER[case](), slice(20))))


@pytest.mark.parametrize("large", ["q", "k", "gate"])
def test_gradients_of_large_numbers(large):
    call = make_call(1, 20, 1)
    rate = -12.0 if large == "gate" else 0.0  # whatever the gate, not all is forgotten
    check(replace(call, **{large: 1e5 * getattr(call, large)}, A_log=torch.full_like(call.A_log, rate)))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("large", [3e38, -3e38])
def test_gradients_of_large_gates_at_slow_rates(large, bound):
    call = make_call(1, 20, 1, bound=bound)
    call.gate[0, 2, 0, 1] = call.gate[0, 17, 0, 0] = large
    check(replace(call, A_log=torch.full_like(call.A_log, -12.0)))


@pytest.mark.parametrize("watched", [False, True])
def test_second_derivatives_are_an_error(watched):
    """Whether the loss is linear in what the kernels gave, or something looked at the operators."""
    call = convert(there(make_call(1, 20, 1)), lambda x: x.detach().requires_grad_())
    with FlopCounterMode(display=False) if watched else contextlib.nullcontext():
        o, _ = ops_triton.run(call)
    [d_v] = torch.autograd.grad(o.sum(), [call.v], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        d_v.square().sum().backward()


@pytest.mark.parametrize("bad", ["q", "v", "gate", "state"])
def test_gradients_do_not_spread_nan_to_other_documents_and_heads(bad):
    call = make_call(1, 24, cu_seqlens=[0, 2, 21, 24])
    x = getattr(call, bad)
    (x[1, 0] if bad == "state" else x[:, 3, 0]).fill_(torch.nan)
    got = outcome(ops_triton.run, there(call))
    for name in STREAMS:
        grad = got[f"d {name}"]
        for part in (grad[:, :2], grad[:, 21:], grad[:, :, 1]):
            assert torch.isfinite(part).all(), name
    assert torch.isfinite(got["d state"][[0, 2]]).all()
    assert torch.isfinite(got["d A_log"][1])


STRETCHES = {  # and how many slots they have
    "rows": (dict(B=2, T=50), 2 * 4),
    "no state": (dict(B=2, T=50, with_state=False), 2 * 4),
    "documents": (dict(B=1, T=130, cu_seqlens=[0, 3, 3, 60, 100, 130, 130]), 130 // 16 + 6),
}


@pytest.mark.parametrize("chunks", [1, 3, 4])
@pytest.mark.parametrize("name", STRETCHES)
def test_gradients_of_many_chunks_come_stretch_by_stretch(name, chunks, monkeypatch):
    shape, slots = STRETCHES[name]
    call = there(make_call(**shape, H=2, K=6, V=4))
    want = outcome(ops_triton.run, call)
    monkeypatch.setattr(ops_chunk, "ROOM", chunks * (2 * 2 * 16 * 16 * 4))
    launched = watch_launches(monkeypatch, kernels, "recur_backward")
    got = outcome(ops_triton.run, call)
    assert len(launched) == ceil(slots / chunks)
    for name, x in want.items():
        assert torch.equal(got[name], x), name


@pytest.mark.parametrize("wanted", [*STREAMS, "A_log", "dt_bias", "state"])
def test_gradient_of_one_tensor_alone(wanted):
    call = there(make_call(1, 18, 1))
    x = getattr(call, wanted).requires_grad_()
    o, state = ops_triton.run(call)
    (o.sum() + state.sum()).backward()
    exact = convert(call, lambda y: y.detach().double())
    y = getattr(exact, wanted).requires_grad_()
    o, state = ops_reference.run(exact)
    (o.sum() + state.sum()).backward()
    assert_close(x.grad.double(), y.grad, absolute=0, relative=TOLERANCE[torch.float32])


@pytest.mark.parametrize("output", [0, 1])
def test_gradients_through_one_output_alone(output):
    grads = []
    for run, change in ((ops_triton.run, lambda x: x), (ops_reference.run, Tensor.double)):
        call = convert(there(make_call(1, 18, 1)), lambda x, change=change: change(x.detach()).requires_grad_())
        run(call)[output].square().sum().backward()
        grads.append([getattr(call, name).grad for name in (*STREAMS, "state")])
    for got, want in zip(*grads):
        if got is None or want is None:  # of q, which the state does not know
            assert not (got is not None and got.any())
            continue
        assert_close(got.double(), want, absolute=1e-12, relative=TOLERANCE[torch.float32])


def test_gradients_read_slices_of_one_projection():
    call = make_call(2, 18, 2, 12, 20)
    parts = [getattr(call, name).flatten(2) for name in STREAMS]
    joined = torch.cat([torch.full((2, 18, 1), torch.nan), *parts, torch.full((2, 18, 2), torch.nan)], -1)
    joined = joined.to(DEVICE).requires_grad_()
    cuts = joined.split([1, *(x.shape[-1] for x in parts), 2], -1)[1:-1]
    sliced = {name: x if name == "beta" else x.unflatten(-1, (2, -1)) for name, x in zip(STREAMS, cuts)}
    o, _ = ops_triton.run(replace(there(call), **sliced))
    o.square().sum().backward()
    whole = convert(there(call), lambda x: x.detach().requires_grad_())
    ops_triton.run(whole)[0].square().sum().backward()
    want = torch.cat([getattr(whole, name).grad.flatten(2) for name in STREAMS], -1)
    assert torch.equal(joined.grad[..., 1:-2], want)
    assert not joined.grad[..., [0, -2, -1]].any()


@pytest.mark.parametrize("change", [Tensor.half, Tensor.double])
def test_gradients_of_gates_rates_and_states_of_another_dtype(change):
    call = make_call(1, 20, 1)
    names = ("gate", "beta", "A_log", "dt_bias", "state")
    check(replace(call, **{name: change(getattr(call, name)) for name in names}), TOLERANCE[torch.float16])


def test_gradients_of_pads_that_neither_decay_nor_write():
    call = make_call(2, 1, 1)
    nothing = torch.tensor([0.0, -torch.inf]).view(2, 1, 1)
    check(replace(call, gate=call.gate + nothing[..., None], beta=call.beta + nothing))


@pytest.mark.parametrize("inference", [False, True])
def test_state_may_be_written_after_it_was_read(inference):
    """As a cache of fixed room does; and it may come from inference."""
    with torch.inference_mode(inference):
        state = torch.randn(1, 1, 10, 7, device=DEVICE)
    before, call = state.clone().double(), replace(there(make_call(1, 18, 1)), state=state)
    q = call.q.requires_grad_()
    o, _ = ops_triton.run(call)
    with torch.inference_mode(inference):
        call.state.zero_()
    o.square().sum().backward()
    want = replace(convert(call, lambda x: x.detach().double()), state=before.clone())
    want.q.requires_grad_()
    ops_reference.run(want)[0].square().sum().backward()
    assert_close(q.grad.double(), want.q.grad, ROUNDING, TOLERANCE[torch.float32])


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs one program after another")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cu_seqlens", [None, [0, 5, 5, 700, 1500]])
def test_gradients_of_many_tokens_and_heads_are_the_same_every_time(cu_seqlens, dtype):
    call = there(make_call(1, 1500, 8, 128, 96, cu_seqlens=cu_seqlens, dtype=dtype))
    want = outcome(ops_triton.run, call)
    for _ in range(30):
        for name, x in outcome(ops_triton.run, call).items():
            assert torch.equal(x, want[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("widths", "room"), [((7, 70), ops_chunk.ROOM), ((40, 33), 1), ((3, 64), ops_chunk.ROOM)])
def test_gradients_read_nothing_that_nobody_wrote(widths, room, dtype, monkeypatch):
    monkeypatch.setattr(ops_chunk, "ROOM", room)
    call = make_call(1, 40, 1, *widths, cu_seqlens=[0, 0, 21, 40], dtype=dtype)

    def filled(x: Tensor) -> Tensor:
        return x.fill_(torch.nan) if x.is_floating_point() else x

    for owner, name in ((Tensor, "new_empty"), (torch, "empty"), (torch, "empty_like")):
        make = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, make=make, **given: filled(make(*args, **given)))
    check(call)


@pytest.mark.parametrize("shape", [(0, 20, 2), (2, 0, 2)])
def test_gradients_of_nothing(shape):
    B, T, H = shape
    got = outcome(ops_triton.run, there(make_call(B, T, H)))
    assert all(not got[f"d {name}"].any() for name in (*STREAMS, "A_log", "dt_bias"))
    assert got["d q"].shape == (B, T, H, 7)


@pytest.mark.parametrize("cu_seqlens", [None, [0, 1, 17]])
def test_operators_are_what_they_say(cu_seqlens):
    call = there(make_call(1, 17, 1, cu_seqlens=cu_seqlens))
    inputs = [getattr(call, name) for name in (*STREAMS, "A_log", "dt_bias")]
    inputs = (*(x.requires_grad_() for x in inputs), 0.0, call.state.requires_grad_(), call.cu_seqlens)
    torch.library.opcheck(ops_chunk.chunk_with_gradients.op, inputs)
    o, state = ops_triton.run(call)
    fixed = (*(x.detach() if isinstance(x, Tensor) else x for x in inputs), o.detach(), state.detach())
    torch.library.opcheck(ops_chunk._chunk_backward.op, fixed)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_kda_compiles_with_gradients(bound):
    call = make_call(1, 40, 1, bound=bound, cu_seqlens=[0, 7, 40])
    check(call, run=torch.compile(kda, fullgraph=True, backend="aot_eager"))


def test_model_learns_by_chunks_as_in_float64(monkeypatch):
    launched = watch_launches(monkeypatch, kernels, "recur_backward")
    model = tiny_model(**DENSE).to(DEVICE)
    ids = token_ids(18).to(DEVICE)
    grads = []
    for backend, exact in (("triton", model), ("reference", None)):
        with use_backend(backend):
            if exact is None:
                model.zero_grad()
                model = model.double()
            model(ids, labels=ids, use_cache=False).loss.backward()
            grads.append({name: x.grad.double() for name, x in model.named_parameters()})
    assert len(launched) == sum(kind == "linear_attention" for kind in model.config.layer_types)
    for name, want in grads[1].items():
        assert_close(grads[0][name], want, absolute=1e-7, relative=1e-4, name=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_in_float16_are_left_to_others(dtype):
    call = there(make_call(1, 20, dtype=dtype))
    call = replace(call, q=call.q.requires_grad_())
    with use_backend("auto"):
        assert (ops_kda._backend_for(call) is ops_triton) == (dtype != torch.float16)
        with torch.no_grad():
            assert ops_kda._backend_for(call) is ops_triton
