"""ops_attnres.py and its kernels: the mixture and its gradients against float64, and when a layer uses them.

Runs on a GPU, or by Triton's interpreter (see conftest.py).
"""

import pytest
import torch
from helpers import TOLERANCE, assert_close
from torch import Tensor

from modeling_kda import layers_attnres, use_backend
from modeling_kda.layers_attnres import mix


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter cuts bfloat16 off, and rounds this


def leaves_of(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """A norm's weight, a query, and candidates of unlike sizes."""
    noise = torch.Generator().manual_seed(count)
    norm, query = (torch.randn(shape[-1], generator=noise) for _ in range(2))
    candidates = [(1 + i) * torch.randn(shape, generator=noise) for i in range(count)]
    query *= 0.3 * min(1, 32 / shape[-1]) ** 0.5  # or one candidate takes all, and gradients are rounding errors
    given = [norm, query, *(x.to(dtype) for x in candidates)]
    return [x.to(DEVICE).requires_grad_() for x in given]


def plain(norm: Tensor, query: Tensor, *candidates: Tensor) -> Tensor:
    x = torch.stack(candidates)
    unit = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return ((unit * norm * query).sum(-1).softmax(0).unsqueeze(-1) * x).sum(0)


def outcome(function, leaves: list[Tensor]) -> list[Tensor]:
    """The mixture, and the gradients of a weighting of it."""
    y = function(*leaves)
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y)
    return [y, *torch.autograd.grad((y * noise).sum(), leaves)]


def mixture(norm: Tensor, query: Tensor, *candidates: Tensor) -> Tensor:
    return mix(candidates, lambda: norm, lambda: query, EPS)


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    names = []
    for name in ("mix_in_kernel", "mix_backward_in_kernel"):
        kernel = getattr(layers_attnres, name)
        monkeypatch.setattr(
            layers_attnres, name, lambda *args, name=name, kernel=kernel: (names.append(name), kernel(*args))[1]
        )
    return names


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 5, 22), (1, 2, 1030)], ids=str)
@pytest.mark.parametrize("count", [1, 5, 16])
def test_mixture_and_gradients_are_those_of_float64(launched, count, shape, dtype):
    leaves = leaves_of(count, shape, dtype)
    got, want = outcome(mixture, leaves), outcome(plain, [x.detach().double().requires_grad_() for x in leaves])
    assert launched == ["mix_in_kernel", "mix_backward_in_kernel"]
    for i, (a, b) in enumerate(zip(got, want)):
        assert a.dtype == (torch.float32 if i in (1, 2) else dtype)
        assert_close(a.double(), b, absolute=1e-6, relative=TOLERANCE[dtype], name=str(i))


def test_mixture_of_candidates_with_gaps_between_rows(launched):
    leaves = leaves_of(3, (2, 5, 24), torch.float32)
    gaps = [*leaves[:2], *(torch.cat([x, x + 9], -1)[..., :24].detach().requires_grad_() for x in leaves[2:])]
    for a, b in zip(outcome(mixture, gaps), outcome(mixture, leaves)):
        assert torch.equal(a, b)
    assert len(launched) == 4


def test_mixture_of_large_scores_is_the_largest():
    leaves = leaves_of(3, (1, 4, 32), torch.float32)
    leaves[1] = (1e4 * leaves[1]).detach().requires_grad_()
    got, want = outcome(mixture, leaves), outcome(plain, [x.detach().double().requires_grad_() for x in leaves])
    assert_close(got[0].double(), want[0], absolute=0, relative=1e-5)


@pytest.mark.parametrize("why", ["float64", "17 candidates", "no tokens", "torch", "reference"])
def test_kernels_leave_to_torch(launched, why):
    leaves = leaves_of(17 if "17" in why else 3, (1, 0 if "no" in why else 4, 8), torch.float32)
    leaves = [x.detach().double().requires_grad_() for x in leaves] if why == "float64" else leaves
    with use_backend(why if why in ("torch", "reference") else "auto"):
        got = outcome(mixture, leaves)
    assert launched == []
    for a, b in zip(got, outcome(plain, [x.detach().double().requires_grad_() for x in leaves])):
        assert_close(a.double(), b, absolute=1e-4, relative=1e-5)
