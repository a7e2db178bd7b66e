"""ops_glue.py against float64: on a GPU, or by Triton's interpreter (TRITON_INTERPRET=1) on the CPU."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers import TOLERANCE, assert_close
from test_ops_mixer import in_double, make_mixer_call
from torch import Tensor

from modeling_kda import ops_glue, ops_mixer, ops_torch
from modeling_kda.ops_glue import convolve, normalise, refuses_glue
from modeling_kda.ops_mixer import MixerCall, compose
from modeling_kda.ops_reference import gated_rms_norm


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Every length in float32, one of them in half precision.
LENGTHS = [(T, torch.float32) for T in (1, 7, 8, 9)] + [(9, torch.bfloat16), (9, torch.float16)]
SIZE = dict(H=1, K=5, V=7)  # the interpreter takes milliseconds a token
# The sizes of blocks in these tests: small, so that there are several of everything.
SMALL = dict(TOKENS=8, CHANNELS=8, ELEMENTS=64, TILES=3)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for name, size in SMALL.items():
        monkeypatch.setattr(ops_glue, name, size)


def there(call: MixerCall, device: str = DEVICE) -> MixerCall:
    """`call` on the device."""
    changed = {name: x.to(device) for name, x in vars(call).items() if hasattr(x, "to")}
    return replace(call, **changed, taps=tuple(x.to(device) for x in call.taps))


def with_gradients(
    outputs: dict[str, Tensor], leaves: dict[str, Tensor], dtype: torch.dtype, arriving: tuple[str, ...] | None = None
) -> dict[str, Tensor]:
    """`outputs`, and the gradients of the leaves from noise in `dtype` that arrives at those that `arriving` names."""
    chosen, noise = [], []
    for seed, (name, x) in enumerate(outputs.items()):
        if arriving is None or name in arriving:
            chosen.append(x)
            noise.append(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(x))
    grads = torch.autograd.grad(chosen, list(leaves.values()), noise, materialize_grads=True)
    found = {**outputs, **{f"d {name}": grad for name, grad in zip(leaves, grads)}}
    return {name: x.detach().cpu() for name, x in found.items()}


def convolved(
    function: Callable, call: MixerCall, dtype: torch.dtype, arriving: tuple[str, ...] | None = None
) -> dict[str, Tensor]:
    """What `function` makes of `call`, with gradients of all that it reads."""
    leaves = {name: x for name in ("q", "k", "v", "window") if (x := getattr(call, name)) is not None}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    taps = tuple(x.detach().requires_grad_() for x in call.taps)
    outputs = dict(zip(("q'", "k'", "v'", "window'"), function(replace(call, **leaves, taps=taps))))
    leaves.update({"q taps": taps[0], "k taps": taps[1], "v taps": taps[2]})
    return with_gradients(outputs, leaves, dtype, arriving)


def check(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    """The same, to the accuracy of `dtype`; gradients of weights, which are float32, to that of float32."""
    assert got.keys() == want.keys()
    for name, x in got.items():
        if name.endswith(("taps", "norm")):
            assert x.dtype == torch.float32, name
            assert_close(x, want[name], absolute=1e-30, relative=TOLERANCE[torch.float32], name=name)
        else:
            assert x.dtype == dtype, name
            assert_close(x, want[name], absolute=1e-30, relative=TOLERANCE[dtype], name=name)


def check_convolve(call: MixerCall, arriving: tuple[str, ...] | None = None) -> None:
    """What the kernels give is what plain torch gives in float64."""
    dtype = call.q.dtype
    want = convolved(ops_mixer.convolve, in_double(call), dtype, arriving)
    check(convolved(convolve, there(call), dtype, arriving), want, dtype)


@pytest.mark.parametrize(("T", "dtype"), LENGTHS)
def test_convolve_is_plain_torch_in_float64_with_gradients(T, dtype):
    check_convolve(make_mixer_call(2, T, **SIZE, dtype=dtype))


# Where blocks of 8 tokens begin lie no border, one, several, the last; documents are empty, and shorter than windows.
BORDERS = [[0, 0, 3, 3, 4, 8, 8, 8, 17, 18, 18], [0, 1, 2, 7, 17], [0, 0, 0, 8, 8]]
DOCUMENTS = [(borders, 4, with_past) for borders in BORDERS for with_past in (False, True)]
DOCUMENTS += [(BORDERS[0], 1, True), (BORDERS[1], 2, True)]


@pytest.mark.parametrize(("borders", "W", "with_past"), DOCUMENTS, ids=str)
def test_convolve_keeps_documents_apart(borders, W, with_past):
    check_convolve(make_mixer_call(1, borders[-1], H=1, K=3, V=4, W=W, with_past=with_past, cu_seqlens=borders))


@pytest.mark.parametrize(("T", "W"), [(2, 4), (5, 1), (5, 2), (5, 4)])
def test_convolve_starts_rows_from_zeros(T, W):
    check_convolve(make_mixer_call(2, T, H=1, K=3, V=4, W=W, with_past=False))


SIZES = {
    "values narrower": dict(K=17, V=3, B=1),
    "powers of 2": dict(K=8, V=8),
    "one channel": dict(K=1, V=1),
    "one channel of one token": dict(K=1, V=1, B=1, T=1),
    "many taps": dict(W=8, T=9, B=1),
    "many taps, few tokens": dict(W=8, T=3, K=3, V=4),
}


@pytest.mark.parametrize("size", SIZES)
def test_convolve_takes_any_size(size):
    check_convolve(make_mixer_call(**{"B": 2, "T": 5, **SIZE, **SIZES[size]}))


def test_convolve_takes_blocks_of_the_size_that_they_have(monkeypatch):
    monkeypatch.undo()
    borders = [0, ops_glue.TOKENS + 1, ops_glue.TOKENS + 3]
    check_convolve(make_mixer_call(1, borders[-1], **SIZE, cu_seqlens=borders))


@pytest.mark.parametrize("arriving", [("q'", "k'", "v'"), ("window'",), ("k'", "window'")], ids=str)
def test_convolve_takes_gradients_of_any_output(arriving):
    check_convolve(make_mixer_call(1, 11, H=1, K=3, V=4, cu_seqlens=[0, 2, 9, 11]), arriving)


def test_convolve_reads_slices_of_one_projection():
    call = there(make_mixer_call(2, 5, **SIZE))
    whole = torch.cat([call.q, call.beta, call.k, call.v], -1).requires_grad_()
    q, _, k, v = whole.split([5, 1, 5, 7], -1)
    assert not any(x.is_contiguous() for x in (q, k, v))
    found = []
    for function in (convolve, ops_mixer.convolve):
        outputs = dict(zip("qkvw", function(replace(call, q=q, k=k, v=v))))
        found.append(with_gradients(outputs, {"whole": whole}, torch.float32))
    check(*found, torch.float32)


def test_convolve_takes_weights_and_gradients_of_any_layout():
    call = there(make_mixer_call(2, 5, **SIZE))
    taps = tuple(x.t().contiguous().t().requires_grad_() for x in call.taps)
    assert not taps[0].is_contiguous()
    found = []
    for function in (convolve, ops_mixer.convolve):
        outputs = function(replace(call, taps=taps))
        total = sum(x.sum() for x in outputs)  # the gradients that arrive are one expanded number each
        found.append(dict(zip(("q taps", "k taps", "v taps"), torch.autograd.grad(total, taps))))
    check(*found, torch.float32)


def test_convolve_gives_the_same_bits_again():
    call = there(make_mixer_call(1, 9, H=1, K=3, V=4, cu_seqlens=[0, 2, 9]))
    first, second = (convolved(convolve, call, torch.float32) for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


def normalised(function: Callable, call: MixerCall, o: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    leaves = {"o": o, "norm": call.norm, "gate": call.out_gate}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    return with_gradients({"y": function(*leaves.values(), call.eps)}, leaves, dtype)


def check_normalise(call: MixerCall) -> None:
    dtype, o = call.q.dtype, torch.randn(call.out_gate.shape, generator=torch.Generator().manual_seed(9))
    o = o.to(dtype)
    want = normalised(gated_rms_norm, in_double(call), o.double(), dtype)
    check(normalised(normalise, there(call), o.to(DEVICE), dtype), want, dtype)


@pytest.mark.parametrize(("T", "dtype"), LENGTHS)
def test_normalise_is_plain_torch_in_float64_with_gradients(T, dtype):
    check_normalise(make_mixer_call(2, T, dtype=dtype))


@pytest.mark.parametrize("V", [3, 33, 64, 128, 200, 256])
def test_normalise_takes_any_width(V, monkeypatch):
    check_normalise(make_mixer_call(2, 3, H=2, V=V))
    monkeypatch.undo()
    check_normalise(make_mixer_call(2, 3, H=2, V=V))


def test_normalise_reads_a_slice_of_one_projection():
    call = there(make_mixer_call(2, 9))
    wide = torch.cat([call.beta, call.out_gate.flatten(2)], -1).requires_grad_()
    o = torch.randn(call.out_gate.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    found = []
    for function in (normalise, gated_rms_norm):
        gate = wide[..., 3:].unflatten(-1, call.out_gate.shape[2:])
        assert not gate.is_contiguous()
        found.append(with_gradients({"y": function(o, call.norm, gate, call.eps)}, {"all": wide}, torch.float32))
    check(*found, torch.float32)


GATES = {"shut": -200.0, "almost shut": -30.0, "open": 200.0}


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, by the interpreter: the sigmoid is 0 there
@pytest.mark.parametrize("gate", GATES)
def test_normalise_takes_any_gate(gate):
    call = make_mixer_call(2, 3)
    check_normalise(replace(call, out_gate=call.out_gate + GATES[gate]))


@pytest.mark.parametrize("cu_seqlens", [None, [0, 2, 2, 6]], ids=str)
def test_compiled_whole_is_the_parts(cu_seqlens):
    """Between compiled projections the operators stand in one graph, forward and backward."""
    call = make_mixer_call(1 if cu_seqlens else 2, 6, H=2, K=3, V=4, cu_seqlens=cu_seqlens)

    def whole(call: MixerCall, *parts: Callable) -> tuple[Tensor, Tensor, Tensor]:
        call = replace(call, q=call.q * 2, out_gate=call.out_gate * 2)
        assert refuses_glue(call) is None
        return compose(call, ops_torch.run, *parts)[:3]

    def outcome(function: Callable, call: MixerCall, *parts: Callable) -> dict[str, Tensor]:
        names = ("q", "k", "v", "window", "out_gate", "norm", "state")
        leaves = {name: getattr(call, name).detach().requires_grad_() for name in names}
        taps = tuple(x.detach().requires_grad_() for x in call.taps)
        outputs = dict(zip(("o", "state'", "window'"), function(replace(call, **leaves, taps=taps), *parts)))
        return with_gradients(outputs, {**leaves, "q taps": taps[0], "v taps": taps[2]}, torch.float32)

    want = outcome(whole, there(call), ops_mixer.convolve, gated_rms_norm)
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    check(outcome(compiled, there(call), convolve, normalise), want, torch.float32)


def test_operators_say_what_they_do():
    """Their fake versions, schemas and gradients agree with what they do, also when sizes are symbols."""
    call = there(make_mixer_call(1, 2, H=1, K=3, V=2, W=2, cu_seqlens=[0, 1, 1, 2]))
    tensors = [x.requires_grad_() for x in (call.q, call.k, call.v, *call.taps, call.window)]
    torch.library.opcheck(ops_glue._convolve.op, (*tensors, call.packing.cu_seqlens))
    o = torch.randn(call.out_gate.shape, device=DEVICE, requires_grad=True)
    torch.library.opcheck(ops_glue._normalise.op, (o, call.norm.requires_grad_(), call.out_gate, call.eps))


REFUSED = {
    "no tokens": lambda: make_mixer_call(T=0),
    "dtype torch.float64": lambda: in_double(make_mixer_call()),
    "dtype torch.bfloat16, torch.float32": lambda: replace(make_mixer_call(), k=make_mixer_call().k.bfloat16()),
    "rows without a token": lambda: make_mixer_call(real=torch.tensor([[True], [False]])),
    "more than 8 taps": lambda: make_mixer_call(W=9),
    "values wider than 256": lambda: make_mixer_call(H=1, V=257),
    "tensors on 'meta'": lambda: there(make_mixer_call(), "meta"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_glue_says_what_it_refuses(reason):
    call = REFUSED[reason]()
    assert refuses_glue(call if "meta" in reason else there(call)) == reason
    assert refuses_glue(there(make_mixer_call(T=9))) is None
