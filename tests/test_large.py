"""Kernels on more than 2^31 numbers: the last row of many is, to the bit, what it is alone. On a GPU with 80 GB."""

import pytest
import torch
from torch import Tensor

from modeling_kda import KdaCall, kda, ops_attnres, ops_glue, ops_mla, ops_moe, ops_rows, use_backend


ROOM = 80e9
enough = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > ROOM
pytestmark = pytest.mark.skipif(not enough, reason="needs a GPU with 80 GB")
LIMIT = 2**31


@pytest.fixture(autouse=True)
def by_triton():
    torch.manual_seed(0)
    with use_backend("triton"), torch.no_grad():
        yield
    torch.cuda.empty_cache()


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def call_of(rows: int, tokens: int, heads: int) -> KdaCall:
    H, K = heads, 128
    q, k, v, gate = (random(rows, tokens, H, K) for _ in range(4))
    A_log, dt_bias = random(H, dtype=torch.float32), random(H * K, dtype=torch.float32)
    return KdaCall(q, k, v, gate, random(rows, tokens, H), A_log, dt_bias)


def last(call: KdaCall, state: Tensor | None = None) -> KdaCall:
    tensors = (call.q, call.k, call.v, call.gate, call.beta)
    return KdaCall(*(x[-1:].clone() for x in tensors), call.A_log, call.dt_bias, state=state)


def test_chunks():
    call = call_of(17, 65536, 16)
    assert call.q.numel() > LIMIT
    got, want = kda(call), kda(last(call))
    assert all(torch.equal(a[-1:], b) for a, b in zip(got, want))


def test_gradients_of_chunks():
    """Alone, a row is one stretch of chunks; of many, it comes in another."""
    call = call_of(17, 65536, 16)
    assert call.q.numel() > LIMIT

    def gradients(call: KdaCall) -> tuple[Tensor, ...]:
        tensors = [x.requires_grad_() for x in (call.q, call.k, call.v, call.gate, call.beta)]
        with torch.enable_grad():
            o, _ = kda(call)
        return torch.autograd.grad(o, tensors, call.v.detach())

    want = gradients(last(call))
    assert all(torch.equal(a[-1:], b) for a, b in zip(gradients(call), want))


def test_a_step():
    call, state = call_of(4200, 1, 32), random(4200, 32, 128, 128, dtype=torch.float32)
    assert state.numel() > LIMIT
    alone = last(call, state[-1:].clone())
    got = kda(KdaCall(**{**vars(call), "state": state, "overwrite_state": True}))
    want = kda(alone)
    assert all(torch.equal(a[-1:], b) for a, b in zip(got, want))


def test_convolutions():
    whole, taps = random(6, 65536, 6144), [random(2048, 4, dtype=torch.float32) for _ in range(3)]
    assert whole.numel() > LIMIT
    got = ops_glue._convolve(*whole.split(2048, -1), *taps, None, None)
    want = ops_glue._convolve(*whole[-1:].clone().split(2048, -1), *taps, None, None)
    assert all(torch.equal(a[-1:], b) for a, b in zip(got, want))


def test_gated_norm():
    x, gate, norm = random(18, 65536, 16, 128), random(18, 65536, 16, 128), random(128)
    assert x.numel() > LIMIT
    got = ops_glue._normalise(x, norm, gate, 1e-5)
    assert torch.equal(got[-1:], ops_glue._normalise(x[-1:].clone(), norm, gate[-1:].clone(), 1e-5))


def test_norm():
    x, weight = random(17, 65536, 2048), random(2048)
    assert x.numel() > LIMIT
    assert torch.equal(ops_rows.rms_norm(x, weight, 1e-5)[-1:], ops_rows.rms_norm(x[-1:].clone(), weight, 1e-5))


def test_activation():
    gate, up = random(17, 65536, 4096).split(2048, -1)
    assert 2 * gate.numel() > LIMIT
    assert torch.equal(ops_rows.activate(gate, up)[-1:], ops_rows.activate(gate[-1:].clone(), up[-1:].clone()))


def test_attention_residuals():
    x, y, weight = random(17, 65536, 2048), random(17, 65536, 2048), random(2048, dtype=torch.float32)
    assert x.numel() > LIMIT
    got = torch.empty_like(x)
    ops_attnres.mix(weight, 1e-5, (x, y), got)
    want = torch.empty_like(x[-1:])
    ops_attnres.mix(weight, 1e-5, (x[-1:].clone(), y[-1:].clone()), want)
    assert torch.equal(got[-1:], want)


def test_latent_attention():
    """Alone, a row is cut into other splits, whose sums round otherwise."""
    rows, q, matrix = random(64, 65536, 576), random(64, 1, 16, 192), random(16 * 256, 512) / 16
    assert rows.numel() > LIMIT
    got = ops_mla.attend_absorbed(q, rows, matrix, 0.07)[-1:]
    want = ops_mla.attend_absorbed(q[-1:].clone(), rows[-1:].clone(), matrix, 0.07)
    assert (got - want).abs().max() < 0.01 * want.abs().max()


def test_experts():
    E, L, width = 300, 4096, 1024
    gate_up, down = random(E, 2 * width, L) / 64, random(E, L, width) / 32
    assert gate_up.numel() > LIMIT
    index, weights, x = torch.tensor([[E - 1]], device="cuda"), random(1, 1, dtype=torch.float32), random(1, L)
    got = ops_moe.run(x, index, weights, gate_up, down, None, None, (0.0, 0.0))
    alone = (gate_up[-1:].clone(), down[-1:].clone())
    assert torch.equal(got, ops_moe.run(x, 0 * index, weights, *alone, None, None, (0.0, 0.0)))
