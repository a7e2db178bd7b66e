"""ops_flash_kda.py: on a GPU with FlashKDA against float64; anywhere, what a stand-in with its contract is given."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import TOLERANCE, assert_close
from test_ops_torch import convert, make_call
from torch import Tensor

from modeling_kda import KdaCall, kda, ops_flash_kda, ops_reference, use_backend


needs_flash_kda = pytest.mark.skipif(ops_flash_kda.why_not() is not None, reason=str(ops_flash_kda.why_not()))
CALLS = {
    "rows": dict(B=2, T=100),
    "a chunk and a token": dict(B=2, T=65),
    "few tokens": dict(B=3, T=5),
    "no state": dict(B=1, T=130, with_state=False),
    "documents": dict(B=1, T=200, cu_seqlens=[0, 3, 64, 129, 200]),
}


def call_of(**sizes) -> KdaCall:
    return make_call(H=2, K=128, V=128, bound=-5.0, dtype=torch.bfloat16, **sizes)


def there(call: KdaCall) -> KdaCall:
    return replace(call, **{name: x.cuda() for name, x in vars(call).items() if isinstance(x, Tensor)})


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@needs_flash_kda
@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("name", CALLS)
def test_kda_is_the_recurrence(name, way):
    call = call_of(**CALLS[name])
    want = ops_reference.run(convert(call, Tensor.double))
    function = kda if way == "eager" else torch.compile(kda, fullgraph=True)
    with use_backend("flash_kda"):
        got = function(there(call))
    for x, exact, what in zip(got, want, ("o", "state")):
        assert_close(x.double().cpu(), exact, 0, 2 * TOLERANCE[torch.bfloat16], name=what)


def test_library_gets_what_its_documentation_asks_for(monkeypatch):
    """The stand-in checks shapes, dtypes and layouts, and computes in float64."""

    def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens):
        H, W = q.shape[2:]
        assert W == 128
        assert scale == W**-0.5
        for x in (q, k, v, g, beta, out):
            assert x.dtype == torch.bfloat16
        assert (A_log.shape, dt_bias.shape) == ((H,), (H, W))
        for x in (A_log, dt_bias, initial_state, final_state):
            assert x.dtype == torch.float32
        for x in (q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state):
            assert x.is_contiguous()
        assert cu_seqlens.dtype == torch.int64
        assert final_state.shape == initial_state.shape == (len(cu_seqlens) - 1, H, W, W)
        exact = KdaCall(q, k, v, g, beta, A_log, dt_bias.flatten(), lower_bound, initial_state, cu_seqlens)
        for x, to in zip(ops_reference.run(convert(exact, Tensor.double)), (out, final_state)):
            to.copy_(x)

    monkeypatch.setitem(sys.modules, "flash_kda", SimpleNamespace(fwd=fwd))
    call = call_of(T=20, cu_seqlens=[0, 5, 20])
    wide = torch.cat([call.q, call.k], -1)
    call = replace(
        call, q=wide[..., :128], k=wide[..., 128:], cu_seqlens=call.cu_seqlens.int(), A_log=call.A_log.bfloat16()
    )
    want = ops_reference.run(convert(call, Tensor.double))
    for x, exact in zip(ops_flash_kda.run(call), want):
        assert_close(x.double(), exact, 0, TOLERANCE[torch.bfloat16])


def test_says_what_it_refuses(monkeypatch):
    class OnGpu:
        """A tensor that says it is on a GPU."""

        device = torch.device("cuda")

        def __init__(self, x: Tensor):
            self.x = x

        def __getattr__(self, name):
            return getattr(self.x, name)

    def refusal(call: KdaCall) -> str | None:
        return ops_flash_kda.refuses(replace(call, q=OnGpu(call.q)))

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    call = call_of(T=20)
    assert ops_flash_kda.refuses(call) == "tensors on 'cpu'"
    assert refusal(call) is None
    assert refusal(convert(call, Tensor.half)) == "dtype torch.float16"
    assert refusal(replace(call, lower_bound=None)) == "a gate without a bound, or with one below -5.0"
    assert refusal(replace(call, lower_bound=-6.0)) == "a gate without a bound, or with one below -5.0"
    assert refusal(replace(call, v=call.v[..., :64])) == "heads that are not 128 wide"
    assert refusal(replace(call, writes=torch.empty(call.v.shape))) == "it does not say what is written"
    assert refusal(call_of(T=0)) == "no tokens"
    with torch.enable_grad():
        assert refusal(replace(call, v=call.v.requires_grad_())) == "gradients"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert refusal(call_of(T=20)) == "a GPU from before Hopper"
