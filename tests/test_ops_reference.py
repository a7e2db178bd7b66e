"""ops_reference.py against the golden cases, hand-computed values and PyTorch's own functions.

`check_golden` also serves the tests of the other backends.
"""

import dataclasses
import json
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import GOLDEN, assert_close, golden_tensors
from torch import Tensor

from modeling_kda import KdaCall, kda, ops_reference, ops_torch
from modeling_kda.ops_reference import delta_rule, gated_rms_norm, log_decay, replay, short_convolution, unit


LIST = GOLDEN / "kda_op_cases" / "cases.json"
CASES = {case["name"]: case for case in json.loads(LIST.read_text())["cases"]} if LIST.exists() else {}


def softplus_inverse(y: Tensor) -> Tensor:
    return y + torch.log(-torch.expm1(-y))


def gradient(x: Tensor) -> Tensor:
    """Nothing arrives without tokens."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def golden_call(name: str, dtype: torch.dtype) -> tuple[KdaCall, dict[str, Tensor], Tensor | float]:
    """A golden case as the raw fields of a call.

    Returns: the call in `dtype`; the recorded inputs that it is computed from, float64 leaves, so that what arrives
    there can be compared with the recorded gradients; and the factor of o.
    """
    case, t = CASES[name], golden_tensors("kda_op_cases", CASES[name]["file"])
    leaves = {field: t[field].double() for field in ("q", "k", "v", "g", "beta", "initial_state") if field in t}
    if case["gate"] == "zeros":
        leaves["g"] = leaves["g"] - 1e-20  # exp() of it is 1, and a gradient comes back through the gate
    for leaf in leaves.values():
        leaf.requires_grad_()
    q, k, v, g, beta = (leaves[field] for field in ("q", "k", "v", "g", "beta"))
    rate, dt_bias = t["A_log"].double().exp().unsqueeze(-1), t["dt_bias"].double().view(g.shape[-2:])
    bound, factor = case["lower_bound"], 1.0
    if bound is None:
        x = softplus_inverse(-g / rate)
    else:
        bound *= 1.25  # what saturates the recorded gate is well inside this one
        x = torch.logit(g / bound) / rate
    if not case["qk_l2norm"]:
        # Recorded q and k enter as they are, ours with length 1. Their lengths, 1 but for rounding, go elsewhere.
        factor, length = q.norm(dim=-1, keepdim=True), k.norm(dim=-1, keepdim=True)
        v, beta = v / length, beta * length.squeeze(-1).square()
        q, k = 1e4 * q, 1e4 * k  # so that the eps of the normalisation is nothing
    raw = {"q": q, "k": k, "v": v, "gate": x - dt_bias, "beta": torch.logit(beta)}
    if "initial_state" in leaves:
        raw["state"] = leaves["initial_state"].transpose(-1, -2)
    raw = {field: x.to(dtype) for field, x in raw.items()}
    shared = {field: t[field].to(dtype).requires_grad_() for field in ("A_log", "dt_bias")}
    return KdaCall(**raw, **shared, lower_bound=bound, cu_seqlens=t.get("cu_seqlens")), leaves, factor


def check_golden(
    run: Callable, name: str, dtype: torch.dtype, o: float, state: float, grad: float | None = None
) -> None:
    """`run` on a golden case. o, state: largest errors. grad: of gradients, relative to the tensor's maximum."""
    t = golden_tensors("kda_op_cases", CASES[name]["file"])
    call, leaves, factor = golden_call(name, dtype)
    out, final = run(call)
    out, final = out * factor, final.transpose(-1, -2)
    assert_close(out, t["o"], absolute=o, name="o")
    assert_close(final, t["final_state"], absolute=state, name="final_state")
    if grad is None:
        return
    ((out * t["do"].double()).sum() + (final * t["dht"].double()).sum()).backward()
    for field, leaf in leaves.items():
        assert_close(gradient(leaf), t["d" + field], absolute=0, relative=grad, name="d" + field)
    gate, A_log, dt_bias = (x.detach().double().requires_grad_() for x in (call.gate, call.A_log, call.dt_bias))
    x = gate + dt_bias.view(gate.shape[-2:])
    if call.lower_bound is None:
        g = -A_log.exp().unsqueeze(-1) * F.softplus(x)
    else:
        g = call.lower_bound * torch.sigmoid(A_log.exp().unsqueeze(-1) * x)
    for field, want in zip(("A_log", "dt_bias"), torch.autograd.grad(g, (A_log, dt_bias), t["dg"])):
        assert_close(gradient(getattr(call, field)), want, absolute=0, relative=grad, name="d" + field)


@pytest.mark.parametrize("name", CASES)
def test_run_gives_the_golden_values_and_gradients(name):
    check_golden(ops_reference.run, name, torch.float64, o=1e-10, state=1e-10, grad=1e-10)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "cu_seqlens" not in case])
def test_delta_rule_gives_the_golden_values(name):
    case, t = CASES[name], golden_tensors("kda_op_cases", CASES[name]["file"])
    q, k, v, g, beta = (t[field].double() for field in ("q", "k", "v", "g", "beta"))
    if case["qk_l2norm"]:
        q, k = unit(q), unit(k)
    state = t["initial_state"].double().mT if case["initial_state"] else q.new_zeros(t["final_state"].mT.shape)
    o, state = delta_rule(q * case["scale"], k, v, g, beta, state)
    assert_close(o, t["o"], absolute=1e-12)
    assert_close(state.mT, t["final_state"], absolute=1e-12)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["gate"] != "zeros"])
def test_log_decay_gives_the_golden_decay(name):
    t = golden_tensors("kda_op_cases", CASES[name]["file"])
    gate, A_log, dt_bias = (t[field].double() for field in ("gate_input", "A_log", "dt_bias"))
    got = log_decay(gate, A_log, dt_bias, CASES[name]["lower_bound"])
    assert torch.allclose(got, t["g"].double(), rtol=1e-6, atol=0)  # recorded in float32


@pytest.mark.parametrize(
    ("x", "A_log", "bound", "want"),
    [
        (0.0, 0.0, None, -math.log(2)),  # -0.693147
        (0.0, math.log(3), None, -3 * math.log(2)),
        (-40.0, 0.0, None, -math.exp(-40)),
        (1000.0, 0.0, None, -1000.0),
        (0.0, 0.0, -5.0, -2.5),
        (0.0, math.log(3), -5.0, -2.5),
        (math.log(3), 0.0, -5.0, -3.75),
        (math.log(3), math.log(2), -5.0, -4.5),
        (100.0, 0.0, -5.0, -5.0),
    ],
)
def test_log_decay_gives_hand_computed_values(x, A_log, bound, want):
    gate, bias = torch.tensor([[[[x - 0.75]]]], dtype=torch.float64), torch.tensor([0.75], dtype=torch.float64)
    got = log_decay(gate, torch.tensor([A_log], dtype=torch.float64), bias, bound)
    assert got.item() == pytest.approx(want, rel=1e-12)


def test_log_decay_with_a_bound_is_no_clamp():
    """A clamp would leave a decay of -0.69 alone."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    bounded = log_decay(zero, torch.zeros(1), torch.zeros(1), -5.0)
    assert bounded.item() == -2.5
    assert log_decay(zero, torch.zeros(1), torch.zeros(1)).clamp(min=-5.0).item() == pytest.approx(-0.693147, abs=1e-6)


def test_log_decay_reads_rate_and_bias_of_each_head():
    H, K = 3, 5
    gate, bias = torch.zeros(2, 4, H, K, dtype=torch.float64), torch.arange(H * K, dtype=torch.float64)
    A_log = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    got = log_decay(gate, A_log, bias)
    for h in range(H):
        for d in range(K):
            want = -math.exp(A_log[h]) * math.log1p(math.exp(h * K + d))
            assert got[:, :, h, d].sub(want).abs().max() < 1e-12 * abs(want)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_log_decay_is_float32_whatever_comes_in(bound):
    gate = torch.full((1, 1, 1, 2), 3.0, dtype=torch.bfloat16)
    got = log_decay(gate, torch.full((1,), 0.123), torch.tensor([0.456, 0.001]), bound)
    want = log_decay(gate.double(), torch.full((1,), 0.123).double(), torch.tensor([0.456, 0.001]).double(), bound)
    assert got.dtype == torch.float32
    assert_close(got, want, absolute=0, relative=1e-6)


@pytest.mark.parametrize("x", [100.0, 88.8, 20.0, 0.0, -17.0, -80.0])
def test_log_decay_keeps_gradients_and_small_decays(x):
    """float32: exp(88.8) is infinite, and 1 + exp(-17) is 1."""
    gate = torch.full((1, 1, 1, 1), x, requires_grad=True)
    g = log_decay(gate, torch.zeros(1), torch.zeros(1))
    g.sum().backward()
    assert g.item() == pytest.approx(-math.log1p(math.exp(-abs(x))) - max(x, 0.0), rel=1e-5)
    assert gate.grad.item() == pytest.approx(-1 / (1 + math.exp(-x)), rel=1e-5)


def one_step(g: float, k: list[float], v: float, beta_logit: float, **fields) -> tuple[Tensor, Tensor]:
    """One token, one head, K = 2, V = 1, with the softplus gate's pre-activation that gives the decay `g`."""
    x = softplus_inverse(torch.full((1, 1, 1, 2), -g, dtype=torch.float64))
    return ops_reference.run(
        KdaCall(
            q=torch.tensor([[[[0.0, 2.0]]]], dtype=torch.float64),
            k=torch.tensor(k, dtype=torch.float64).view(1, 1, 1, 2),
            v=torch.full((1, 1, 1, 1), v, dtype=torch.float64),
            gate=x,
            beta=torch.full((1, 1, 1), beta_logit, dtype=torch.float64),
            A_log=torch.zeros(1, dtype=torch.float64),
            dt_bias=torch.zeros(2, dtype=torch.float64),
            **fields,
        )
    )


def test_run_decays_by_the_natural_exponential():
    state = torch.tensor([[[[1.0, 1.0]]]], dtype=torch.float64)
    o, final = one_step(-1.0, [0.0, 0.0], 7.0, 0.0, state=state)
    assert final.flatten().tolist() == pytest.approx([0.3678794411714423] * 2, rel=1e-12)
    assert o.item() == pytest.approx(0.3678794411714423 / math.sqrt(2), rel=1e-6)  # q of length K^-0.5


def test_run_forgets_then_overwrites_then_reads():
    """state (1, 4), decayed to (0.5, 2); k = (0, 1) holds 2, v = 8, beta = 0.75: 2 + 0.75 * (8 - 2) = 6.5."""
    state = torch.tensor([[[[1.0, 4.0]]]], dtype=torch.float64)
    o, final = one_step(-math.log(2), [0.0, 1000.0], 8.0, math.log(3), state=state)
    assert final.flatten().tolist() == pytest.approx([0.5, 6.5], rel=1e-12)
    assert o.item() == pytest.approx(6.5 / math.sqrt(2), rel=1e-6)
    assert state.flatten().tolist() == [1.0, 4.0]


@pytest.mark.parametrize("cu_seqlens", [[0], [0, 0]])
def test_run_accepts_no_tokens_at_all(cu_seqlens):
    N = len(cu_seqlens) - 1
    x, state = torch.zeros(1, 0, 2, 3), torch.randn(N, 2, 5, 3)
    call = KdaCall(x, x, torch.zeros(1, 0, 2, 5), x, torch.zeros(1, 0, 2), torch.zeros(2), torch.zeros(6), state=state)
    o, final = ops_reference.run(KdaCall(**{**vars(call), "cu_seqlens": torch.tensor(cu_seqlens)}))
    assert o.shape == (1, 0, 2, 5)
    assert torch.equal(final, state)


def test_unit_adds_eps_to_the_sum_of_squares():
    """Four numbers of 5e-4 have a sum of squares of 1e-6 and a mean of 2.5e-7."""
    x = torch.full((4,), 5e-4, dtype=torch.float64)
    assert unit(x).tolist() == pytest.approx([5e-4 / math.sqrt(2e-6)] * 4, rel=1e-12)
    assert unit(x, 3.0).tolist() == pytest.approx([15e-4 / math.sqrt(2e-6)] * 4, rel=1e-12)
    assert unit(torch.zeros(4)).tolist() == [0.0] * 4
    assert unit(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("length", [0, 1, 3, 9])
def test_short_convolution_is_a_grouped_conv1d_and_silu(taps, length):
    x, weight = torch.randn(2, taps - 1 + length, 5).double(), torch.randn(5, taps).double()
    got = short_convolution(x, weight)
    if not length:
        assert got.shape == (2, 0, 5)
        return
    want = F.silu(F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), groups=5)).transpose(1, 2)
    assert_close(got, want, absolute=1e-14)


def test_short_convolution_sums_in_float32():
    """In bfloat16, 512 + 0.5 is 512."""
    x = torch.tensor([512.0, 0.5, -512.0, 0.5]).bfloat16().view(1, 4, 1)
    y = short_convolution(x, torch.ones(1, 4))
    assert y.dtype == torch.bfloat16
    assert y.item() == F.silu(torch.tensor(1.0)).bfloat16().item()


# What each token writes


@torch.no_grad()
def by_definition(call: KdaCall) -> tuple[Tensor, Tensor]:
    """Head by head and token by token: u = beta (v - S k) `[B, T, H, V]`, and the final states `[N, H, V, K]`."""
    k, v, gate, beta = (x.double() for x in (call.k, call.v, call.gate, call.beta))
    (B, T, H, K), V = k.shape, v.shape[3]
    borders = [0, T] if call.cu_seqlens is None else call.cu_seqlens.tolist()
    u, states = torch.zeros(B, T, H, V).double(), torch.zeros(call.num_documents, H, V, K).double()
    for n, h in [(n, h) for n in range(call.num_documents) for h in range(H)]:
        row, document = (n, 0) if call.cu_seqlens is None else (0, n)
        S = torch.zeros(V, K).double() if call.state is None else call.state[n, h].double()
        for t in range(borders[document], borders[document + 1]):
            x = gate[row, t, h] + call.dt_bias[h * K : h * K + K].double()
            rate = call.A_log[h].double().exp()
            g = -rate * F.softplus(x) if call.lower_bound is None else call.lower_bound * torch.sigmoid(rate * x)
            key = k[row, t, h] / (k[row, t, h].square().sum() + 1e-6).sqrt()
            S = S * g.exp()
            u[row, t, h] = (v[row, t, h] - S @ key) / (1 + math.exp(-beta[row, t, h]))
            S = S + torch.outer(u[row, t, h], key)
        states[n, h] = S
    return u, states


def check_writes(run: Callable, call: KdaCall, tolerance: float) -> None:
    """`run` fills `writes` with what the definition says, to `tolerance` of its maximum."""
    writes = torch.full(call.v.shape, float("nan"), dtype=torch.promote_types(call.v.dtype, torch.float32))
    _, state = run(dataclasses.replace(call, writes=writes))
    want, final = by_definition(call)
    assert_close(writes, want, absolute=0, relative=tolerance, name="writes")
    assert_close(state, final, absolute=0, relative=tolerance, name="final state")


def random_call(tokens: int, bound: float | None, cu_seqlens: list[int] | None, with_state: bool) -> KdaCall:
    torch.manual_seed(tokens)
    B, T, H, K, V = 1 if cu_seqlens else 2, tokens, 2, 5, 7
    documents = len(cu_seqlens) - 1 if cu_seqlens else B
    return KdaCall(
        q=torch.randn(B, T, H, K).double(),
        k=torch.randn(B, T, H, K).double(),
        v=torch.randn(B, T, H, V).double(),
        gate=2 * torch.randn(B, T, H, K).double(),
        beta=2 * torch.randn(B, T, H).double(),
        A_log=torch.randn(H).double(),
        dt_bias=torch.randn(H * K).double(),
        lower_bound=bound,
        state=torch.randn(documents, H, V, K).double() if with_state else None,
        cu_seqlens=torch.tensor(cu_seqlens) if cu_seqlens else None,
    )


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("tokens", "cu_seqlens"), [(1, None), (19, None), (19, [0, 4, 4, 5, 19])])
def test_run_says_what_each_token_writes(tokens, cu_seqlens, with_state, bound):
    check_writes(ops_reference.run, random_call(tokens, bound, cu_seqlens, with_state), 1e-12)


@pytest.mark.parametrize("backend", [ops_reference, ops_torch])
@pytest.mark.parametrize("tokens", [9, 40])
def test_run_keeps_no_gradient_of_what_tokens_write(tokens, backend):
    call = random_call(tokens, None, None, True)
    call = dataclasses.replace(call, v=call.v.requires_grad_(), writes=torch.empty(call.v.shape).double())
    o, _ = backend.run(call)
    assert o.requires_grad
    assert not call.writes.requires_grad


@pytest.mark.parametrize("cu_seqlens", [None, [0, 3, 6]])
@pytest.mark.parametrize("shape", [(1, 6, 2, 5), (1, 5, 2, 7), (1, 6, 2), (6, 2, 7)], ids=str)
def test_kda_refuses_writes_of_another_shape(shape, cu_seqlens):
    call = random_call(6, None, cu_seqlens or [0, 6], False)
    with pytest.raises(ValueError, match=r"`writes` has shape .* must be \(1, 6, 2, 7\)"):
        kda(dataclasses.replace(call, writes=torch.empty(shape)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("strongest", [0.1, 3.0, 1000.0])
@pytest.mark.parametrize("with_state", [False, True])
def test_replay_from_any_token_ends_where_the_recurrence_does(with_state, strongest, dtype):
    torch.manual_seed(0)
    B, T, H, K, V = 2, 23, 3, 5, 7
    k, v, beta = unit(torch.randn(B, T, H, K).double()), torch.randn(B, T, H, V).double(), torch.rand(B, T, H).double()
    g = -strongest * torch.rand(B, T, H, K).double() ** 4
    state = torch.randn(B, H, V, K).double() if with_state else torch.zeros(B, H, V, K).double()
    writes, states = torch.empty_like(v), [state]
    for t in range(T):
        now = slice(t, t + 1)
        args = k[:, now], k[:, now], v[:, now], g[:, now], beta[:, now], states[-1], writes[:, now]
        states.append(delta_rule(*args)[1])
    for split, end in [(split, T) for split in range(T + 1)] + [(0, 9), (4, 5)]:
        start = None if not split and not with_state else states[split].to(dtype)
        got = replay(*(x[:, split:end].to(dtype) for x in (k, g, writes)), start)
        assert got.dtype == dtype
        assert_close(got, states[end], absolute=1e-12 if dtype == torch.float64 else 2e-6)


def formula(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    x, weight, gate = x.double(), weight.double(), gate.double()
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight / (1 + torch.exp(-gate))


def test_gated_rms_norm_is_its_formula():
    x, weight, gate = torch.randn(3, 4, 7).double(), torch.randn(7).double(), torch.randn(3, 4, 7).double()
    assert_close(gated_rms_norm(x, weight, gate, 1e-5), formula(x, weight, gate, 1e-5), absolute=1e-14)
    tiny = x * 1e-3  # eps beside the mean of squares
    assert_close(gated_rms_norm(tiny, weight, gate, 1e-5), formula(tiny, weight, gate, 1e-5), absolute=1e-14)


def test_gated_rms_norm_rounds_once():
    torch.manual_seed(0)
    x, gate, weight = torch.randn(64, 20).bfloat16(), torch.randn(64, 20).bfloat16(), torch.randn(20)
    got = gated_rms_norm(x, weight, gate, 1e-5)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, formula(x, weight, gate, 1e-5).to(torch.bfloat16))


@pytest.mark.parametrize("with_state", [False, True])
def test_delta_rule_agrees_with_fla(with_state):
    naive = pytest.importorskip(
        "fla.ops.kda.naive", reason="fla-core, triton or einops is not installed", exc_type=ImportError
    )
    torch.manual_seed(0)
    B, T, H, K, V = 2, 19, 3, 6, 10
    q, k, v = torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.randn(B, T, H, V)
    q, k, g, beta = unit(q), unit(k), -torch.rand(B, T, H, K) * 3, torch.rand(B, T, H)
    state = torch.randn(B, H, K, V) if with_state else None
    want, want_state = naive.naive_recurrent_kda(
        q, k, v, g, beta, scale=0.7, initial_state=state, output_final_state=True
    )
    start = torch.zeros(B, H, V, K) if state is None else state.mT
    got, got_state = delta_rule(0.7 * q, k, v, g, beta, start)
    assert_close(got, want, absolute=2e-6)
    assert_close(got_state.mT, want_state, absolute=5e-6)
