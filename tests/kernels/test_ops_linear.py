"""ops_linear.py against the layers in float64: on a GPU, or by Triton's interpreter (TRITON_INTERPRET=1)."""

import copy

import pytest
import torch
from helpers import TOLERANCE, assert_close, k3_model, tiny_config, tiny_model, token_ids, watch_launches
from torch import nn

from modeling_kda import KdaHybridCache, kernels_linear, ops_linear, use_backend
from modeling_kda.layers_mlp import GatedActivation, RMSNorm
from modeling_kda.ops_linear import Before, add, gated, linears


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The names of the kernels that are launched."""
    return watch_launches(monkeypatch, kernels_linear, "linears", "added", "gated")


def layer_of(inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias).to(DEVICE, dtype)


def norm_of(width: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(width, 1e-5)
    norm.weight.copy_(torch.randn(width))
    return norm.to(DEVICE, dtype)


def row(width: int, dtype: torch.dtype, *before: int) -> torch.Tensor:
    return torch.randn(*(before or (1, 1)), width, dtype=dtype, device=DEVICE)


def exact(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).double()


def check(got, want, dtype):
    assert got.dtype == dtype
    assert got.shape == want.shape
    assert_close(got.double(), want, absolute=0, relative=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("widths", [[7], [33, 1, 16], [40, 40, 50, 12, 3, 12]])
@pytest.mark.parametrize("C", [12, 300])
def test_linears_are_layers_side_by_side(launched, C, widths, with_norm, dtype):
    torch.manual_seed(0)
    layers, norm, x = [layer_of(C, n, dtype) for n in widths], norm_of(C, dtype) if with_norm else None, row(C, dtype)
    got = linears([x] * len(layers), layers, norm and Before(norm, RMSNorm))
    assert launched == ["linears"]
    y = x.double() if norm is None else exact(norm)(x.double())
    for one, layer in zip(got, layers):
        check(one, exact(layer)(y), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linears_have_inputs_of_their_own(launched, dtype):
    torch.manual_seed(0)
    wide = row(50, dtype)
    xs, layers = list(wide.split([30, 20], -1)), [layer_of(30, 9, dtype), layer_of(20, 40, dtype)]
    got = linears(xs, layers)
    assert launched == ["linears"]
    for one, x, layer in zip(got, xs, layers):
        check(one, exact(layer)(x.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C", [12, 1024, 1300])
def test_add_is_a_layer_and_a_sum(launched, C, dtype):
    torch.manual_seed(0)
    x, layer, residual = row(C, dtype), layer_of(C, 21, dtype), row(21, dtype)
    check(add(residual, x, layer), residual.double() + exact(layer)(x.double()), dtype)
    assert launched == ["added"]
    check(add(None, x, layer), exact(layer)(x.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    "act", [{}, {"hidden_act": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0}, {"hidden_act": "situ"}], ids=str
)
def test_gated_is_two_layers_and_an_activation(launched, act, with_norm, dtype):
    torch.manual_seed(0)
    activation, norm = GatedActivation(tiny_config(**act)), norm_of(600, dtype) if with_norm else None
    x, gate, up = row(600, dtype), layer_of(600, 21, dtype), layer_of(600, 21, dtype)
    gate.weight.mul_(20)  # into the bends
    got = gated(x, gate, up, activation, norm and Before(norm, RMSNorm))
    assert launched == ["gated"]
    y = x.double() if norm is None else exact(norm)(x.double())
    check(got, activation(exact(gate)(y), exact(up)(y)), dtype)


def hooked(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_hook(lambda module, inputs, output: output + 1)
    return layer


def replaced(layer: nn.Linear) -> nn.Linear:
    """As accelerate does it."""
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) + 1
    return layer


class Adapted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


NOT_FUSED = {
    "two rows": lambda: (row(12, torch.bfloat16, 2, 1), layer_of(12, 9, torch.bfloat16)),
    "two tokens": lambda: (row(12, torch.bfloat16, 1, 2), layer_of(12, 9, torch.bfloat16)),
    "float32": lambda: (row(12, torch.float32), layer_of(12, 9, torch.float32)),
    "a bias": lambda: (row(12, torch.bfloat16), layer_of(12, 9, torch.bfloat16, bias=True)),
    "a hook": lambda: (row(12, torch.bfloat16), hooked(layer_of(12, 9, torch.bfloat16))),
    "another forward": lambda: (row(12, torch.bfloat16), replaced(layer_of(12, 9, torch.bfloat16))),
    "another class": lambda: (row(12, torch.bfloat16), Adapted(12, 9, bias=False).to(DEVICE, torch.bfloat16)),
}


@pytest.mark.parametrize("case", NOT_FUSED)
def test_layers_run_themselves_where_more_is_to_happen(launched, case):
    x, layer = NOT_FUSED[case]()
    assert torch.equal(linears([x], [layer])[0], layer(x))
    residual = torch.randn_like(layer(x))
    assert torch.equal(add(residual, x, layer), residual + layer(x))
    activation = GatedActivation(tiny_config())
    assert torch.equal(gated(x, layer, layer, activation), activation(layer(x), layer(x)))
    assert launched == []


def test_a_norm_of_another_class_runs_itself(launched):
    """It may have a weight and an eps, too."""
    norm, x = nn.LayerNorm(12, device=DEVICE, dtype=torch.bfloat16), row(12, torch.bfloat16)
    norm.bias.fill_(3.0)
    layers = [layer_of(12, 9, torch.bfloat16) for _ in range(2)]
    y, activation = norm(x), GatedActivation(tiny_config())
    for got, layer in zip(linears([x] * 2, layers, Before(norm, RMSNorm)), layers):
        assert torch.equal(got, layer(y))
    got = gated(x, *layers, activation, Before(norm, RMSNorm))
    assert torch.equal(got, activation(layers[0](y), layers[1](y)))
    assert launched == []


def test_an_activation_with_a_hook_runs_itself(launched):
    activation, x, layer = GatedActivation(tiny_config()), row(12, torch.bfloat16), layer_of(12, 9, torch.bfloat16)
    activation.register_forward_hook(lambda module, inputs, output: 0 * output)
    assert not gated(x, layer, layer, activation).any()
    assert launched == []


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_layers_run_themselves_if_the_user_says_so(launched, backend):
    x, layer = row(12, torch.bfloat16), layer_of(12, 9, torch.bfloat16)
    with use_backend(backend):
        linears([x], [layer])
    assert launched == []


def test_gradients_go_through_the_layers(launched):
    x, layer = row(12, torch.bfloat16), layer_of(12, 9, torch.bfloat16)
    with torch.enable_grad():
        linears([x], [layer])[0].sum().backward()
    assert layer.weight.grad is not None
    assert launched == []


@pytest.fixture
def joined(monkeypatch) -> list[int]:
    """How many layers became one product, each time; four rows are many."""
    calls, apply = [], ops_linear._Joined.apply
    monkeypatch.setattr(ops_linear, "MANY", 4)

    def watched(x, *weights):
        calls.append(len(weights))
        return apply(x, *weights)

    monkeypatch.setattr(ops_linear._Joined, "apply", watched)
    return calls


def gradients(loss: torch.Tensor, *of: torch.Tensor) -> list[torch.Tensor]:
    return [x.double() for x in torch.autograd.grad(loss, of)]


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
@pytest.mark.parametrize("with_norm", [False, True])
def test_layers_of_many_rows_are_one_product(joined, with_norm, dtype):
    layers, x = [layer_of(24, n, dtype) for n in (16, 8, 40)], row(24, dtype, 2, 3).requires_grad_()
    norm = norm_of(24, dtype) if with_norm else None
    parameters = [x, *(layer.weight for layer in layers), *([norm.weight] if with_norm else [])]
    with torch.enable_grad():
        got = linears([x] * 3, layers, norm and Before(norm, RMSNorm))
        leaves = [y.detach().double().requires_grad_() for y in parameters]
        y = leaves[0]
        if with_norm:
            y = nn.functional.rms_norm(y, (24,), leaves[4], norm.eps)
        want = [y @ w.t() for w in leaves[1:4]]
        assert joined == [3]
        for one, other in zip(got, want):
            check(one, other, dtype)
        # Not all outputs are used, and not all alike.
        grads = gradients(got[0].square().sum() + got[2].sum(), *parameters)
        wants = gradients(want[0].square().sum() + want[2].sum(), *leaves[:2], leaves[3], *leaves[4:])
    assert not grads.pop(2).any()
    for one, other in zip(grads, wants):
        assert_close(one, other, absolute=0, relative=2 * TOLERANCE[dtype])


def test_one_product_gives_gradients_only_where_wanted(joined):
    layers, x = [layer_of(8, 8, torch.float32) for _ in range(3)], row(8, torch.float32, 5)
    layers[1].weight.requires_grad_(False)
    with torch.enable_grad():
        sum(y.sum() for y in linears([x] * 3, layers)).backward()
        assert x.grad is None
        assert layers[1].weight.grad is None
        assert_close(layers[2].weight.grad, x.sum(0).expand(8, 8), absolute=1e-5)
        for layer in layers:
            layer.weight.requires_grad_(False)
        x.requires_grad_()
        sum(y.sum() for y in linears([x] * 3, layers)).backward()
    assert_close(x.grad, sum(layer.weight.sum(0) for layer in layers).expand(5, 8), absolute=1e-5)
    assert layers[0].weight.grad.shape == (8, 8)
    assert joined == [3, 3]


def test_one_product_may_be_differentiated_twice(joined):
    layers, x = [layer_of(8, 8, torch.float32) for _ in range(3)], row(8, torch.float32, 5).requires_grad_()
    found = []
    with torch.enable_grad():
        for y in (linears([x] * 3, layers), [layer(x) for layer in layers]):
            [dx] = torch.autograd.grad(y[0].square().sum() + y[1].sum(), [x], create_graph=True)
            found.append(torch.autograd.grad(dx.square().sum(), [x, layers[0].weight, layers[1].weight]))
    assert joined == [3]
    for got, want in zip(*found):
        assert_close(got, want, absolute=0, relative=1e-5)


def hooked_backward(layer: nn.Linear, register: str) -> nn.Linear:
    getattr(layer, register)(lambda *_: None)
    return layer


FLOAT = torch.float32
APART = {
    "few rows": lambda: ([row(8, FLOAT, 3)] * 3, [layer_of(8, 8, FLOAT)] * 3),
    "two layers": lambda: ([row(8, FLOAT, 5)] * 2, [layer_of(8, 8, FLOAT)] * 2),
    "several inputs": lambda: ([row(8, FLOAT, 5) for _ in range(3)], [layer_of(8, 8, FLOAT)] * 3),
    "rows that do not fit": lambda: ([row(8, FLOAT, 5)] * 3, [layer_of(8, n, FLOAT) for n in (8, 12, 8)]),
    "a bias": lambda: ([row(8, FLOAT, 5)] * 3, [layer_of(8, 8, FLOAT, bias=True)] * 3),
    "a hook": lambda: ([row(8, FLOAT, 5)] * 3, [layer_of(8, 8, FLOAT)] * 2 + [hooked(layer_of(8, 8, FLOAT))]),
    "another class": lambda: ([row(8, FLOAT, 5)] * 3, [Adapted(8, 8, bias=False).to(DEVICE)] * 3),
    "a backward hook": lambda: (
        [row(8, FLOAT, 5)] * 3,
        [hooked_backward(layer_of(8, 8, FLOAT), "register_full_backward_hook")] * 3,
    ),
    "an earlier backward hook": lambda: (
        [row(8, FLOAT, 5)] * 3,
        [hooked_backward(layer_of(8, 8, FLOAT), "register_full_backward_pre_hook")] * 3,
    ),
}


@pytest.mark.parametrize("case", APART)
def test_layers_of_many_rows_run_themselves_where_more_is_to_happen(joined, case):
    xs, layers = APART[case]()
    for got, x, layer in zip(linears(xs, layers), xs, layers):
        assert torch.equal(got, layer(x))
    assert joined == []


def test_layers_of_many_rows_run_themselves_where_torch_is_wanted(joined):
    xs, layers = [row(8, FLOAT, 5)] * 3, [layer_of(8, 8, FLOAT)] * 3
    with use_backend("torch"):
        linears(xs, layers)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert linears(xs, layers)[0].dtype == torch.bfloat16
    assert joined == []


def test_model_learns_with_joined_layers_as_in_float64(joined):
    widths = dict(linear_num_heads=8, linear_head_dim=16, linear_output_gate_rank=16)
    model, ids = tiny_model(mlp_layer_types=["dense"] * 4, **widths), token_ids(12, 2).to(DEVICE)
    got, want = copy.deepcopy(model).to(DEVICE).train(), copy.deepcopy(model).to(DEVICE, torch.float64).train()
    with torch.enable_grad():
        got(ids, labels=ids).loss.backward()
        assert joined == [6] * 3
        with use_backend("torch"):
            want(ids, labels=ids).loss.backward()
    assert joined == [6] * 3
    grads = dict(want.named_parameters())
    for name, parameter in got.named_parameters():
        assert_close(parameter.grad.double(), grads[name].grad, absolute=1e-6, relative=1e-4, name=name)


@pytest.mark.parametrize("make", [tiny_model, k3_model])
def test_model_decodes_with_kernels_as_in_float64(launched, make):
    """In float16: Triton's interpreter takes the bits of a bfloat16 for an integer in a product of matrices."""
    model, ids = make(mlp_layer_types=["dense"] * 4) if make is tiny_model else make(), token_ids(9).to(DEVICE)
    logits = {}
    for dtype in (torch.float64, torch.float16):
        model = copy.deepcopy(model).to(DEVICE, dtype)
        cache = KdaHybridCache(model.config)
        with use_backend("torch"):
            model(ids[:, :8], cache=cache)
        logits[dtype] = model(ids[:, 8:], cache=cache).logits
    assert {"linears", "added", "gated"} <= set(launched)
    assert_close(logits[torch.float16].double(), logits[torch.float64], absolute=0, relative=0.01)
