"""ops_fla.py on a GPU: values and gradients against float64, by itself and compiled; what it refuses."""

import sys
from dataclasses import replace

import pytest
import torch
from helpers import TOLERANCE, assert_close
from test_ops_torch import convert, make_call, outcome
from torch import Tensor

from modeling_kda import KdaCall, kda, ops_fla, ops_reference, use_backend


needs_fla = pytest.mark.skipif(ops_fla.why_not() is not None, reason=str(ops_fla.why_not()))


@pytest.fixture(scope="module", autouse=True)
def untuned():
    """One shape of each kernel is enough: fla would try dozens at every new width, which takes minutes."""
    if ops_fla.why_not() is not None:
        return
    from triton.runtime.autotuner import Autotuner

    for module in [x for name, x in sys.modules.items() if name.startswith("fla.")]:
        for kernel in list(vars(module).values()):
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = vars(kernel).get("fn") if hasattr(kernel, "__dict__") else None
            if kernel is not None:
                kernel.configs = kernel.configs[:1]


def there(call: KdaCall) -> KdaCall:
    return replace(call, **{name: x.cuda() for name, x in vars(call).items() if isinstance(x, Tensor)})


CALLS = {
    "rows": dict(B=2, T=100, K=32, V=64),
    "values narrower": dict(B=1, T=64, K=64, V=32),
    "a chunk and a token": dict(B=2, T=65, K=128, V=128),
    "few tokens": dict(B=3, T=5, K=32, V=32),
    "no state": dict(B=1, T=130, K=64, V=64, with_state=False),
    "all in 16 bits": dict(B=2, T=70, K=32, V=32),
    "documents": dict(B=1, T=200, K=64, V=64, cu_seqlens=[0, 3, 64, 64, 129, 200]),
    "wide heads": dict(B=1, T=100, H=1, K=256, V=256),
    "float16": dict(B=1, T=100, K=64, V=64, dtype=torch.float16),
}


@needs_fla
@pytest.mark.parametrize("bound", [None, -5.0, -8.0])
@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("name", CALLS)
def test_kda_is_the_recurrence_with_gradients(name, way, bound):
    call = make_call(**{"dtype": torch.bfloat16, **CALLS[name]}, bound=bound)
    if name == "all in 16 bits":
        call = convert(call, Tensor.bfloat16)
    want = outcome(ops_reference.run, convert(call, Tensor.double))
    with use_backend("fla"):
        got = outcome(torch.compile(kda, fullgraph=True, dynamic=True) if way == "compiled" else kda, there(call))
    for name, x in got.items():
        assert torch.isfinite(x).all(), name
        tolerance = TOLERANCE[call.v.dtype] * (4 if name in ("d A_log", "d dt_bias") else 1)
        assert_close(x.double().cpu(), want[name], absolute=0, relative=tolerance, name=name)


@needs_fla
def test_refuses_what_it_would_get_wrong():
    call = there(make_call(1, 20, dtype=torch.bfloat16))
    assert ops_fla.refuses(call) is None
    assert "TF32" in ops_fla.refuses(there(make_call(1, 20)))
    assert ops_fla.refuses(replace(call, writes=torch.empty_like(call.v))) == "it does not say what is written"
    assert ops_fla.refuses(make_call(1, 20, dtype=torch.bfloat16)) == "tensors on 'cpu'"
