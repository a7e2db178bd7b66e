"""ops_rows.py against float64: on a GPU, or by Triton's interpreter (TRITON_INTERPRET=1) on the CPU."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import GRADIENTS, LOGITS, TOLERANCE, assert_close, k3_model, tiny_config, tiny_model, token_ids
from torch import Tensor

from modeling_kda import layers_mlp, ops_kda, ops_rows, use_backend
from modeling_kda.layers_mlp import GatedActivation, RMSNorm
from modeling_kda.ops_rows import activate, activates, normalises, rms_norm


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Those in which last bits can be compared: Triton's interpreter cuts a bfloat16's off, a GPU rounds.
ROUNDED = DTYPES if DEVICE == "cuda" else [torch.float32, torch.float16]
WIDTHS = [1, 7, 64, 512, 2304, 7168]
EPS = 1e-5
SITU = {"hidden_act": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0}
BETAS = {"silu": (0.0, 0.0), "situ": (4.0, 25.0), "situ, one beta": (1.5, 0.0)}
# The sizes of tiles in most tests: small, so that there are several of everything.
SMALL = dict(ELEMENTS=32, COLUMNS=16, TILES=2, WARPS=12)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    for name, size in SMALL.items():
        monkeypatch.setattr(ops_rows, name, size)


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The functions of `ops_rows` that modules call instead of plain torch."""
    names = []

    def noted(function: Callable) -> Callable:
        return lambda *inputs: names.append(function.__name__) or function(*inputs)

    for function in (rms_norm, activate):
        monkeypatch.setattr(layers_mlp, function.__name__, noted(function))
    return names


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def norm_of(width: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(width, EPS).to(DEVICE, dtype)
    norm.weight.data.add_(noise(width, dtype=dtype, seed=5))
    return norm


def exact_norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def exact_activation(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    bent = beta * torch.tanh(gate / beta) if beta else gate
    return bent * torch.sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta) if linear_beta else up)


def outcome(function: Callable, inputs: list[Tensor], to: Tensor | None = None) -> dict[str, Tensor]:
    """What `function` makes of its inputs, and their gradients from what arrives at the output, by default noise."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    to = noise(*y.shape, seed=9).bfloat16() if to is None else to
    d_first, d_second = torch.autograd.grad(y, leaves, to.to(y.dtype))
    return {"y": y.detach(), "d first": d_first, "d second": d_second}


def check_norm(x: Tensor, weight: Tensor, to: Tensor | None = None) -> None:
    """`rms_norm` gives what float64 gives; the weight's gradient to the accuracy of its own dtype."""
    eps = EPS if x.shape[-1] > 1 else 0.5  # which alone keeps the gradient of one number from zero
    got = outcome(lambda *leaves: rms_norm(*leaves, eps), [x, weight], to)
    want = outcome(lambda *leaves: exact_norm(*leaves, eps), [x.double(), weight.double()], to)
    assert [y.dtype for y in got.values()] == [torch.promote_types(x.dtype, weight.dtype), x.dtype, weight.dtype]
    coarser = max(x.dtype, weight.dtype, key=TOLERANCE.get)
    for (name, y), dtype in zip(got.items(), (coarser, x.dtype, weight.dtype)):
        assert_close(y, want[name], absolute=1e-30, relative=TOLERANCE[dtype], name=name)


def check_activation(
    gate: Tensor, up: Tensor, betas: tuple[float, float], to: Tensor | None = None, absolute: float = 1e-30
) -> None:
    """`activate` gives what float64 gives."""
    got = outcome(lambda *leaves: activate(*leaves, *betas), [gate, up], to)
    want = outcome(lambda *leaves: exact_activation(*leaves, *betas), [gate.double(), up.double()], to)
    for name, y in got.items():
        assert y.dtype == gate.dtype
        assert_close(y, want[name], absolute, TOLERANCE[gate.dtype], name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 23])
@pytest.mark.parametrize("width", [1, 7, 33])
def test_rms_norm_is_float64s_with_gradients(width, rows, dtype):
    check_norm(noise(rows, width, dtype=dtype), norm_of(width, dtype).weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_takes_any_width_in_tiles_of_the_size_that_they_have(width, dtype, monkeypatch):
    monkeypatch.undo()
    check_norm(noise(2, 3, width, dtype=dtype), norm_of(width, dtype).weight)


@pytest.mark.parametrize("dtypes", [(a, b) for a in DTYPES for b in DTYPES if a != b], ids=str)
def test_rms_norm_gives_the_wider_dtype(dtypes):
    x, weight = noise(5, 33, dtype=dtypes[0]), norm_of(33, dtypes[1]).weight
    check_norm(x, weight)
    with use_backend("torch"):
        assert rms_norm(x, weight, EPS).dtype == norm_of(33, dtypes[1])(x).dtype


@pytest.mark.parametrize("dtype", ROUNDED[1:])
def test_rms_norm_rounds_before_it_weighs(dtype):
    x, norm = noise(50, 20, dtype=dtype), norm_of(20, dtype)
    unit = exact_norm(x.double(), torch.ones_like(norm.weight).double())
    got = rms_norm(x, norm.weight, EPS)
    assert (got == unit.to(dtype) * norm.weight).double().mean() > 0.99  # all but ties that a last bit decides
    assert (got == (unit * norm.weight.double()).to(dtype)).double().mean() < 0.95


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (23, 7), (2, 3, 33)], ids=str)
def test_activation_is_float64s_with_gradients(shape, beta, dtype):
    check_activation(noise(*shape, dtype=dtype) * 3, noise(*shape, dtype=dtype, seed=1) * 20, BETAS[beta])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_activation_takes_any_width_in_tiles_of_the_size_that_they_have(width, dtype, monkeypatch):
    monkeypatch.undo()
    check_activation(noise(2, 3, width, dtype=dtype), noise(2, 3, width, dtype=dtype, seed=1), BETAS["situ"])


@pytest.mark.parametrize("beta", ["silu", "situ"])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_kernels_are_no_further_from_float64_than_torch(beta, dtype):
    """The mean error, of the output and of both gradients."""
    gate, up = noise(20, 64, dtype=dtype), noise(20, 64, dtype=dtype, seed=1)
    norm, activation = norm_of(64, dtype), GatedActivation(tiny_config(**(SITU if beta == "situ" else {})))
    cases = [
        (lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,)), exact_norm, [gate, norm.weight]),
        (activation, lambda *leaves: exact_activation(*leaves, *BETAS[beta]), [gate, up]),
    ]
    for function, exact, inputs in cases:
        ours, want = outcome(function, inputs), outcome(exact, [x.double() for x in inputs])
        with use_backend("torch"):
            plain = outcome(function, inputs)
        for name, truth in want.items():
            error, allowed = ((x[name].double() - truth).abs().mean() for x in (ours, plain))
            assert error <= 1.05 * allowed + 1e-7 * truth.abs().mean(), name


SCALES = [1e4, 1e-3, 1e-20, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
def test_rms_norm_takes_numbers_of_any_size(scale, dtype):
    x = noise(4, 33, dtype=dtype).clamp(-3, 3)
    x[1] *= scale
    to = noise(4, 33, seed=9)
    to[[0, 2, 3]] = 0  # such a row alone decides what is compared
    check_norm(x, norm_of(33, dtype).weight, to)
    assert rms_norm(x, norm_of(33, dtype).weight, EPS).isfinite().all()


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, by the interpreter: the sigmoid is 0 there
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_activation_takes_numbers_of_any_size(dtype, beta):
    points = torch.tensor([0.0, 1e-20, 1e-6, 0.3, 1.0, 4.0, 9.0, 30.0, 1e4])
    points = torch.cat([-points[1:], points]).to(DEVICE, dtype)
    to = 1 / points.abs().clamp(min=1).float()
    for gate in points:  # each alone: the largest hides the others
        # A slope near a bound is a difference of numbers near 1.
        check_activation(gate.expand(17).clone(), points.clone(), BETAS[beta], to, absolute=1e-6)


LAYOUTS = {
    "columns of a projection": lambda x: torch.cat([x, x[..., :5]], -1)[..., :-5],
    "every second token": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "turned": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "one row again and again": lambda x: x[:1, :1].expand(x.shape),
    "one vector": lambda x: x[0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_read_tensors_and_gradients_of_any_layout(layout):
    x, up, to = (LAYOUTS[layout](noise(2, 9, 33, seed=seed)) for seed in (0, 1, 2))
    weight = norm_of(66, torch.float32).weight[::2].detach()
    check_norm(x, weight, to)
    check_activation(x, up, BETAS["situ"], to)
    check_activation(x, up.contiguous(), BETAS["silu"], to.contiguous()[..., :1].expand(to.shape))


def test_activation_takes_halves_of_one_projection():
    joined = noise(3, 5, 66).requires_grad_()
    found = []
    for function, x in ((activate, joined), (lambda gate, up: F.silu(gate) * up, joined.double())):
        y = function(*x.chunk(2, -1))
        found.append((y, *torch.autograd.grad(y, joined, noise(3, 5, 33, seed=9).to(y.dtype))))
    for got, want in zip(*found):
        assert_close(got, want, 0, TOLERANCE[torch.float32])


def test_gradients_are_the_same_bits_again():
    x, weight = noise(40, 33), norm_of(33, torch.float32).weight
    first, second = (outcome(lambda *leaves: rms_norm(*leaves, EPS), [x, weight]) for _ in range(2))
    for name, y in first.items():
        assert torch.equal(y, second[name]), name


def modules() -> dict[str, tuple[Callable, list[Tensor]]]:
    """What calls the kernels, with inputs: the norm of Kimi Linear, SwiGLU, SiTU."""
    gate, up = noise(2, 5, 33), noise(2, 5, 33, seed=1)
    return {
        "norm": (norm_of(33, torch.float32), [gate.requires_grad_()]),
        "silu": (GatedActivation(tiny_config()), [gate, up.requires_grad_()]),
        "situ": (GatedActivation(tiny_config(**SITU)), [gate, up]),
    }


@pytest.mark.parametrize("name", modules())
def test_modules_keep_their_inputs_only(name, launched):
    (module, inputs), saved = modules()[name], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        module(*inputs)
    assert len(launched) == 1
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in [*inputs, *module.parameters()]]


@pytest.mark.parametrize("name", modules())
def test_modules_run_plain_torch_if_the_user_says_so(name, launched):
    module, inputs = modules()[name]
    for backend in ("torch", "reference"):
        with use_backend(backend):
            plain = module(*inputs)
    assert launched == []
    assert_close(module(*inputs), plain, 0, TOLERANCE[torch.float32])
    assert len(launched) == 1


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", modules())
def test_autocast_does_not_change_the_dtype(name, dtype, launched):
    module, inputs = modules()[name]
    inputs, found = [x.to(dtype) for x in inputs], []
    with torch.autocast(DEVICE, torch.bfloat16):
        for backend in ("torch", "auto"):
            with use_backend(backend):
                found.append(module(*inputs))
    assert len(launched) == 1
    assert found[0].dtype == found[1].dtype
    assert_close(found[1], found[0], 0, TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["norm", "silu"])
def test_functions_of_torch_func_run_plain_torch(name, launched):
    module, inputs = modules()[name]
    inputs = [x.detach() for x in inputs]
    want = module(*inputs)
    launched.clear()
    assert_close(torch.vmap(module)(*inputs), want, 0, TOLERANCE[torch.float32])
    _, slope = torch.func.jvp(module, tuple(inputs), tuple(torch.ones_like(x) for x in inputs))
    torch.func.grad(lambda *x: torch.func.grad(lambda *x: module(*x).square().sum())(*x).sum())(*inputs)
    assert slope.isfinite().all()
    assert launched == []


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["norm", "silu"])
def test_tangents_go_through_plain_torch(name, frozen, launched):
    module, inputs = modules()[name]
    module.requires_grad_(not frozen)
    inputs, ones = [x.detach() for x in inputs], [torch.ones_like(x) for x in inputs]
    with torch.autograd.forward_ad.dual_level():
        got = module(*(torch.autograd.forward_ad.make_dual(*pair) for pair in zip(inputs, ones)))
        got = torch.autograd.forward_ad.unpack_dual(got).tangent
    assert_close(got, torch.func.jvp(module, tuple(inputs), tuple(ones))[1], 0, TOLERANCE[torch.float32])
    assert launched == []


class Marked(Tensor):
    pass


@pytest.mark.parametrize(
    "change",
    {
        "float64": lambda x: x.double(),
        "a subclass": lambda x: x.as_subclass(Marked),
        "no rows": lambda x: x[:, :0],
        "meta": lambda x: x.to("meta"),
        "integers": lambda x: x.int(),
    }.values(),
)
def test_kernels_are_for_plain_tensors_with_numbers(change):
    x, weight = noise(2, 5, 33), norm_of(33, torch.float32).weight
    assert normalises(x, weight)
    assert activates(x, x)
    assert not normalises(change(x), weight)
    assert not activates(change(x), x)
    assert not activates(change(x), change(x))


def test_kernels_are_for_shapes_and_dtypes_that_fit():
    x = noise(2, 5, 33)
    assert not normalises(x, noise(1))
    assert not normalises(x, noise(34))
    assert not normalises(x, noise(33).double())
    assert not normalises(x, noise(33).to("meta"))
    assert not activates(x, x[:1])
    assert not activates(x, x.half())
    wide = torch.empty(1, ops_rows.MOST_WIDTH + 1, device=DEVICE)
    assert not normalises(wide, wide[0])


@pytest.mark.parametrize("name", modules())
def test_no_rows_give_gradients_of_zero(name):
    module, inputs = modules()[name]
    leaves = [*[x.detach()[:, :0].requires_grad_() for x in inputs], *module.parameters()]
    y = module(*leaves[: len(inputs)])
    assert y.shape == (2, 0, 33)
    assert all(not x.any() for x in torch.autograd.grad(y.sum(), leaves))


@pytest.mark.parametrize("name", modules())
def test_compiled_whole_is_the_module(name):
    module, inputs = modules()[name]
    leaves = [*inputs, *module.parameters()]

    def whole(*inputs: Tensor) -> Tensor:
        return module(*(x * 2 for x in inputs)) * 3

    found = []
    for function in (whole, torch.compile(whole, fullgraph=True, backend="aot_eager")):
        y = function(*inputs)
        found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for got, want in zip(*found):
        assert_close(got, want, 0, TOLERANCE[torch.float32])


def test_operators_say_what_they_do():
    """Their fake versions, schemas and gradients agree with what they do, also when sizes are symbols."""
    x, weight = noise(2, 2, 7), norm_of(7, torch.float32).weight
    torch.library.opcheck(ops_rows._rms_norm.op, (x.requires_grad_(), weight, EPS))
    torch.library.opcheck(ops_rows._rms_norm.op, (x.detach().half(), norm_of(7, torch.bfloat16).weight, EPS))
    torch.library.opcheck(ops_rows._rms_norm_backward.op, (x.detach(), weight.detach().half(), EPS, x.detach()))
    torch.library.opcheck(ops_rows._activate.op, (*noise(2, 6).requires_grad_().chunk(2, -1), 4.0, 25.0))


@pytest.mark.parametrize("make", [tiny_model, k3_model])
def test_model_trains_as_without_kernels(make, launched, monkeypatch):
    monkeypatch.setattr(ops_kda, "refuses_glue", lambda call: "slow under the interpreter")
    plain, ids = make().to(DEVICE).train(), token_ids(3, rows=2).to(DEVICE)
    model = copy.deepcopy(plain)
    losses = {"kernels": model(ids, labels=ids).loss}
    losses["kernels"].backward()
    assert {"rms_norm", "activate"} == set(launched)
    launched.clear()
    for name in ("normalises", "activates"):
        monkeypatch.setattr(layers_mlp, name, lambda *inputs: False)
    losses["plain"] = plain(ids, labels=ids).loss
    losses["plain"].backward()
    assert launched == []
    assert_close(losses["kernels"], losses["plain"], LOGITS)
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), name
        if got.grad is not None:
            assert_close(got.grad, want.grad, 1e-7, GRADIENTS, name=name)
