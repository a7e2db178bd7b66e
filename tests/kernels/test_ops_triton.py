"""ops_triton.py against float64: on a GPU, or by Triton's interpreter (TRITON_INTERPRET=1) on the CPU."""

from dataclasses import replace

import pytest
import torch
from helpers import TOLERANCE, assert_close, check_compiled_steps, tiny_model
from test_ops_mixer import CUTS, in_double, make_mixer_call, named, truth
from test_ops_reference import CASES, check_golden
from test_ops_torch import convert, make_call
from torch import Tensor

from modeling_kda import kda, ops_reference, ops_triton, use_backend
from modeling_kda.ops_kda import mixer
from modeling_kda.ops_mixer import MixerCall


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def by_triton():
    with use_backend("triton"), torch.no_grad():
        yield


def there(call):
    """`call` on the device."""
    return moved(call, DEVICE)


def moved(call, device: str):
    changed = {name: x.to(device) for name, x in vars(call).items() if hasattr(x, "to")}
    if isinstance(call, MixerCall):
        changed["taps"] = tuple(x.to(device) for x in call.taps)
    return replace(call, **changed)


def check(call: MixerCall, got: dict[str, Tensor] | None = None) -> None:
    """What the kernel gives on the device is what the parts give in float64 on the CPU."""
    want = truth(call)
    got = named(mixer(there(call))) if got is None else got
    assert got.keys() == want.keys()
    for name, x in got.items():
        tolerance = TOLERANCE[call.q.dtype] if name == "o" else TOLERANCE[torch.float32]
        assert_close(x.double().cpu(), want[name], absolute=0, relative=tolerance, name=name)


SIZES = {
    "keys narrower": dict(K=12, V=20),
    "values narrower": dict(K=33, V=7),
    "powers of 2": dict(K=16, V=16),
    "one channel": dict(K=1, V=1),
    "one tap": dict(W=1),
    "two taps": dict(W=2),
    "many taps": dict(W=6),
    "one head": dict(H=1),
    "wide": dict(K=128, V=128, H=1),
    "wide keys": dict(K=100, V=3),
}


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [0, 1, 2, 16])
def test_mixer_is_its_parts_in_float64(T, dtype, bound):
    if T == 16 and dtype != torch.float32 and DEVICE == "cpu":
        pytest.skip("the interpreter takes seconds")
    check(make_mixer_call(2, T, bound=bound, dtype=dtype))


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_mixer_takes_any_size(size, T):
    check(make_mixer_call(2, T, **SIZES[size], records=True))


@pytest.mark.parametrize("with_past", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_mixer_keeps_documents_apart(cut, with_past):
    borders = CUTS[cut]
    T = 11 if borders is None else borders[-1]
    check(make_mixer_call(2 if borders is None else 1, T, with_past=with_past, cu_seqlens=borders, records=True))


def test_mixer_changes_nothing_where_there_is_no_token():
    call = make_mixer_call(3, 1, real=torch.tensor([[True], [False], [True]]), records=True)
    got = named(mixer(there(call)))
    check(call, got)
    assert torch.equal(got["state"][1].cpu(), call.state[1])
    assert torch.equal(got["window"][1].cpu(), call.window[1])


@pytest.mark.parametrize("overwrite", [False, True])
def test_mixer_writes_where_it_may_and_nowhere_else(overwrite):
    call = there(make_mixer_call(2, 1, overwrite=overwrite))
    state, window = call.state.clone(), call.window.clone()
    got = named(mixer(call))
    for name, before in (("state", state), ("window", window)):
        assert (got[name].data_ptr() == getattr(call, name).data_ptr()) == overwrite, name
        assert torch.equal(getattr(call, name), before) != overwrite, name
    check(moved(replace(call, state=state, window=window), "cpu"), got)


def test_mixer_reads_slices_of_one_projection():
    call = make_mixer_call(2, 3)
    parts = [call.q, call.k, call.v, call.gate.flatten(2), call.beta, call.out_gate.flatten(2)]
    q, k, v, gate, beta, out_gate = torch.cat(parts, -1).split([x.shape[-1] for x in parts], -1)
    sliced = replace(call, q=q, k=k, v=v, gate=gate.unflatten(-1, (3, 12)), beta=beta)
    check(call, named(mixer(there(replace(sliced, out_gate=out_gate.unflatten(-1, (3, 20)))))))


def test_mixer_goes_on_token_by_token_as_all_at_once():
    call = make_mixer_call(2, 12)
    whole = named(mixer(there(call)))
    state, window, outputs = call.state, call.window, []
    for t in range(12):
        cut = {name: getattr(call, name)[:, t : t + 1] for name in ("q", "k", "v", "gate", "beta", "out_gate")}
        o, state, window, _ = mixer(there(replace(call, **cut, state=state, window=window, overwrite=t > 0)))
        outputs.append(o)
    for name, x in {"o": torch.cat(outputs, 1), "state": state, "window": window}.items():
        assert_close(x, whole[name], absolute=0, relative=1e-6, name=name)


DECAYS = {"nothing is forgotten": -30.0, "slow": -9.0, "fast": 6.0, "all is forgotten": 300.0}


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("decay", DECAYS)
def test_mixer_takes_any_gate(decay, bound):
    call = make_mixer_call(1, 16, bound=bound, records=True)
    check(replace(call, gate=call.gate + DECAYS[decay]))


def test_log_decay_of_slow_channels_has_all_its_digits():
    """log(1 + e) without log1p would give 0 where e is below 6e-8."""
    call = make_mixer_call(1, 1, K=64, records=True)
    gate = torch.linspace(-20, 80, 3 * 64).view(1, 1, 3, 64)
    got = named(mixer(there(replace(call, gate=gate, dt_bias=torch.zeros(3 * 64)))))["g"]
    want = ops_reference.log_decay(gate.double(), call.A_log.double(), torch.zeros(3 * 64).double())
    assert ((got.cpu().double() - want).abs() / want.abs()).max() < 2e-6


def test_mixer_of_repeated_tokens_stays_exact():
    call = make_mixer_call(1, 16)
    same = {name: getattr(call, name)[:, :1].expand_as(getattr(call, name)) for name in ("q", "k", "v", "beta")}
    check(replace(call, **same, gate=torch.full_like(call.gate, -30.0)))


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 2, 2, 9]])
def test_kda_is_the_recurrence(cu_seqlens, writes):
    call = make_call(1 if cu_seqlens else 2, 9, cu_seqlens=cu_seqlens)
    call = replace(call, writes=torch.empty_like(call.v) if writes else None)
    exact = convert(call, Tensor.double)
    if writes:
        exact = replace(exact, writes=torch.empty_like(exact.v))
    want = dict(zip(("o", "state"), ops_reference.run(exact)))
    call = there(call)
    got = dict(zip(("o", "state"), kda(call)))
    if writes:
        got["writes"], want["writes"] = call.writes, exact.writes
    for name, x in got.items():
        assert_close(x.double().cpu(), want[name], absolute=0, relative=TOLERANCE[torch.float32], name=name)


def mixed(call: MixerCall) -> MixerCall:
    return replace(call, v=call.v.bfloat16())


REFUSED = {
    "more than 16 tokens": lambda: make_mixer_call(1, 17),
    "dtype torch.float64": lambda: in_double(make_mixer_call()),
    "dtype torch.bfloat16, torch.float32": lambda: mixed(make_mixer_call()),
    "heads wider than 128": lambda: make_mixer_call(H=1, V=129),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_mixer_says_what_it_refuses_and_the_parts_run_instead(reason):
    call = there(REFUSED[reason]())
    assert ops_triton.refuses_mixer(call) == reason
    with use_backend("auto"):
        got = named(mixer(call))
    want = truth(call)
    for name, x in got.items():
        assert_close(x, want[name].to(x.device), absolute=0, relative=TOLERANCE[torch.float32], name=name)


def test_backend_refuses_gradients():
    call = there(make_mixer_call())
    call = replace(call, q=call.q.requires_grad_())
    with torch.enable_grad():
        assert ops_triton.refuses_mixer(call) == "gradients"
    assert ops_triton.refuses_mixer(call) is None


def test_model_decodes_compiled_as_it_is():
    """The kernel is an operator that changes its inputs: the compiler must neither refuse nor copy them for good."""
    check_compiled_steps(tiny_model(mlp_layer_types=["dense"] * 4).to(DEVICE))


@pytest.mark.parametrize("overwrite", [False, True])
def test_mixer_keeps_a_state_in_bfloat16(overwrite):
    """Rounded once, after the last token. (The interpreter cuts off what a GPU rounds.)"""
    call = make_mixer_call(2, 3, dtype=torch.float32)
    given = call.state.bfloat16()
    want, call = truth(replace(call, state=given)), there(replace(call, state=given.clone(), overwrite=overwrite))
    got = named(mixer(call))
    assert got["state"].dtype == torch.bfloat16
    assert (got["state"].data_ptr() == call.state.data_ptr()) == overwrite
    assert_close(got["state"].double().cpu(), want["state"], absolute=0, relative=2**-7)
    assert_close(got["o"].double().cpu(), want["o"], absolute=0, relative=TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["T"] <= 16])
def test_run_gives_the_golden_values(name):
    def run(call):
        return tuple(x.cpu() for x in ops_triton.run(there(call)))

    check_golden(run, name, torch.float32, o=2e-6, state=5e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="programs race on a GPU only")
@pytest.mark.parametrize("T", [1, 4])
def test_many_rows_give_the_same_a_hundred_times(T):
    call = there(make_mixer_call(192, T, H=32, K=128, V=128, dtype=torch.bfloat16, records=True))
    want = named(mixer(call))
    for _ in range(100):
        got = named(mixer(call))
        assert all(torch.equal(got[name], x) for name, x in want.items())
