"""ops_moe.py against float64: on a GPU, or by Triton's interpreter (TRITON_INTERPRET=1) on the CPU."""

import copy
import math

import pytest
import torch
from helpers import K3, TOLERANCE, assert_close, k3_model, tiny_config, tiny_model, token_ids
from test_layers_mlp import block_of, situ_by_hand
from torch import Tensor
from torch.nn.utils import parametrize

from modeling_kda import ops_moe, ops_triton, use_backend
from modeling_kda.layers_mlp import Experts, PackedExperts, one_by_one
from modeling_kda.ops_moe import Tile
from modeling_kda.weights_mxfp4 import decode


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACTIVATIONS = {
    "silu": {},
    "situ": {"hidden_act": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0},
    "situ, one beta": {"hidden_act": "situ", "situ_beta": 1.5, "situ_linear_beta": None},
}
E = 5
TILES = {name: getattr(ops_moe, name) for name in ("GATE_UP", "DOWN", "PACKED_GATE_UP", "PACKED_DOWN")}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes a hundredth of a second or more for each, whatever its size."""
    if DEVICE == "cpu":
        cut_into(monkeypatch, dict.fromkeys(TILES, Tile(128, 1024, 4, 1)), 1)


def cut_into(monkeypatch, tiles: dict[str, Tile], programs: int) -> None:
    monkeypatch.setattr(ops_moe, "PROGRAMS", programs)
    for name, tile in tiles.items():
        monkeypatch.setattr(ops_moe, name, tile)


@torch.no_grad()
def make(packed: bool = False, dtype: torch.dtype = torch.float32, L: int = 96, I: int = 160, **changes):  # noqa: E741
    """Random experts on the device."""
    torch.manual_seed(0)
    config = tiny_config(hidden_size=L, moe_intermediate_size=I, num_experts=E, **changes)
    config._experts_implementation = "eager"
    experts = (PackedExperts if packed else Experts)(config)
    for name, x in experts.named_parameters():
        if packed:
            x.copy_(torch.randint(122, 127, x.shape) if "scale" in name else torch.randint(0, 256, x.shape))
        else:
            x.normal_(std=0.3)
    return experts.to(DEVICE, dtype)


def tokens(experts, X: int = 2, A: int = 2, dtype: torch.dtype = torch.float32, index: list | None = None):
    """What a router gives them: inputs, experts' numbers, weights."""
    L = experts.down_proj.shape[1]
    chosen = torch.stack([torch.randperm(max(A, E))[:A] % E for _ in range(X)]) if index is None else index
    inputs = torch.randn(X, L).to(dtype), torch.as_tensor(chosen), torch.rand(X, A)
    return tuple(x.to(DEVICE) for x in inputs)


def run(experts, inputs) -> Tensor:
    weights = [getattr(experts, name) for name in experts.WEIGHTS]
    assert ops_moe.refuses(*inputs, *weights) is None
    return ops_moe.run(*inputs, *weights, betas=experts.activation.fused)


def check(experts, inputs) -> Tensor:
    """What the kernels give is what the experts give one by one in float64."""
    exact = copy.deepcopy(experts).double()  # bytes stay bytes
    x, index, weights = inputs
    want = one_by_one(exact, x.double(), index, weights.double())
    got = run(experts, inputs)
    assert got.dtype == x.dtype
    assert_close(got, want, absolute=0, relative=TOLERANCE[x.dtype])
    return got


@pytest.mark.parametrize(
    ("X", "A", "packed"),
    [(1, 1, False), (1, 8, False), (2, 2, False), (16, 2, False), (1, 1, True), (2, 8, True), (16, 1, True)],
)
def test_experts_are_one_by_one_in_float64(X, A, packed):
    experts = make(packed)
    check(experts, tokens(experts, X, A))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_take_any_dtype_and_activation(dtype, activation, packed):
    experts = make(packed, dtype, **ACTIVATIONS[activation])
    check(experts, tokens(experts, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("L", "I"), [(60, 36), (7, 1), (1, 7), (128, 64), (300, 24)])
def test_experts_take_any_size(L, I, dtype):  # noqa: E741
    experts = make(dtype=dtype, L=L, I=I)
    check(experts, tokens(experts, dtype=dtype))


@pytest.mark.parametrize(("L", "I"), [(32, 96), (160, 32), (544, 64)])
def test_packed_experts_take_any_size(L, I):  # noqa: E741
    experts = make(packed=True, L=L, I=I)
    check(experts, tokens(experts))


CUTS = {
    "as on a GPU": (TILES, ops_moe.PROGRAMS),
    "in two steps": (dict.fromkeys(TILES, Tile(64, 64, 4, 1)), 1),
    "in small steps": (dict.fromkeys(TILES, Tile(32, 32, 8, 3)), 1),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_experts_are_the_same_in_any_tiles(packed, cut, monkeypatch):
    experts = make(packed, I=64)
    inputs = tokens(experts, X=1)
    want = run(experts, inputs)
    cut_into(monkeypatch, *CUTS[cut])
    assert_close(check(experts, inputs), want, absolute=0, relative=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_experts_may_be_chosen_twice(packed):
    experts = make(packed)
    check(experts, tokens(experts, index=[[3, 3], [3, 0]]))


@pytest.mark.parametrize("packed", [False, True])
def test_slots_of_another_device_add_nothing(packed):
    """Not even what lies in memory that nobody wrote: here NaN."""
    experts = make(packed)
    inputs = tokens(experts, X=3, index=[[E, 1], [E + 7, E], [4, 2]])
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        assert inputs[0].new_empty(3).isnan().all()
        got = check(experts, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (got[1] == 0).all()
    assert (got[[0, 2]] != 0).any(1).all()


def test_experts_take_other_integers_and_strides():
    experts = make()
    x, index, weights = tokens(experts, X=3)
    sliced = torch.stack([x, x], 1)[:, 0], index.t().contiguous().t().int(), weights.t().contiguous().t()
    assert not any(x.is_contiguous() for x in sliced)
    assert torch.equal(run(experts, sliced), run(experts, (x, index, weights)))


@pytest.mark.filterwarnings("ignore:overflow")  # 6 * 2^127 is infinite
def test_codes_are_decoded_bit_for_bit():
    """Every code under every scale byte, column by column: the products with one-hot vectors."""
    scale = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(1, 256, 1)
    codes = torch.arange(16, dtype=torch.uint8, device=DEVICE)
    packed = (codes | codes.flip(0) << 4).expand(1, 256, 16).contiguous()  # 32 numbers: the codes, and backwards
    want, got = decode(packed, scale, torch.float32)[0], columns(packed, scale)
    assert want.isnan().any()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


def columns(packed: Tensor, scale: Tensor) -> Tensor:
    """`[L, I]`: the products of the kernel with one-hot vectors, TURNED as `kernels_moe` says."""
    I = packed.shape[2] * 2  # noqa: E741
    one_hot = 2.0**80 * torch.eye(I, device=DEVICE).view(I, I // 8, 8).transpose(1, 2).reshape(I, 1, I)
    index = torch.zeros(I, 1, dtype=torch.int64, device=DEVICE)
    return ops_moe._down(one_hot, index, torch.ones(I, 1, device=DEVICE), packed, scale, torch.float32).t()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_has_all_its_digits(activation):
    """Around zero, where tanh is its argument, and where the bounds are reached."""
    fused = make(**ACTIVATIONS[activation]).activation.fused
    points = torch.tensor([1e-20, 1e-6, 1e-3, 0.1, 0.9, 1.1, 3.0, 50.0])
    gate = torch.cat([points, -points])
    for up in (1e-4, -1000.0):
        x = torch.stack([gate, torch.full_like(gate, up)], 1).to(DEVICE)
        one = torch.zeros(16, 1, dtype=torch.int64, device=DEVICE)
        weights = torch.eye(2, device=DEVICE).unsqueeze(0), torch.ones(1, 2, 1, device=DEVICE)
        got = ops_moe.run(x, one, torch.ones_like(one).float(), *weights, betas=fused)[:, 0].cpu().double()
        exact = gate.double(), torch.tensor(up).double()
        beta, linear_beta = fused
        silu = exact[0] * torch.sigmoid(exact[0]) * exact[1]
        want = situ_by_hand(*exact, beta, linear_beta or None) if beta else silu
        assert ((got - want).abs() / want.abs()).max() < 2e-6


def test_sums_are_float32_and_rounded_once():
    """Terms that bfloat16 could not add: 256 and 255 times 1."""
    x, index = torch.ones(1, 256).bfloat16(), torch.arange(2).view(1, 2)
    gate_up = torch.zeros(2, 2, 256)
    gate_up[:, 0, 0], gate_up[:, 1, 0] = 64, 1 / 64  # h is 1
    down = torch.ones(2, 256, 1)
    down[1] = 1 / 256
    inputs = [y.to(DEVICE) for y in (x, index, torch.tensor([[1.0, 1.0]]), gate_up.bfloat16(), down.bfloat16())]
    assert (ops_moe.run(*inputs).float() == torch.tensor(1 + 1 / 256).bfloat16().float()).all()
    inputs[2] = torch.tensor([[-1.0, 1.0 + 2**-12]], device=DEVICE)
    inputs[4] = torch.ones(2, 256, 1, device=DEVICE).bfloat16()
    assert (ops_moe.run(*inputs) == 2**-12).all()


def test_operator_is_registered_as_torch_wants_it():
    experts = make(packed=True, L=32, I=32)
    weights = [getattr(experts, name).detach() for name in experts.WEIGHTS]
    torch.library.opcheck(ops_moe._experts.op, (*tokens(experts, X=1), *weights, 0.0, 0.0))


# In the layers


class Spy:
    """Counts calls of `ops_moe.run`."""

    def __init__(self, monkeypatch):
        self.ran, run = 0, ops_moe.run

        def watched(*args, **kwargs):
            self.ran += 1
            return run(*args, **kwargs)

        monkeypatch.setattr(ops_moe, "run", watched)


@pytest.fixture
def spy(monkeypatch) -> Spy:
    return Spy(monkeypatch)


BLOCKS = {
    "dense": {},
    "latent": K3,
    "packed": {**K3, "packed_experts": True},
    "groups": {"num_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
}


def block_on_device(implementation: str = "batched_mm", **changes):
    block, config = block_of(implementation, **changes)
    for name, x in block.experts.named_parameters():
        if x.dtype == torch.uint8:
            x.copy_(torch.randint(122, 127, x.shape) if "scale" in name else torch.randint(0, 256, x.shape))
    return block.to(DEVICE), config


@pytest.mark.parametrize(
    ("kind", "implementation"), [*((kind, "batched_mm") for kind in BLOCKS), ("dense", "grouped_mm")]
)
def test_block_runs_a_few_tokens_at_once(kind, implementation, spy):
    block, config = block_on_device(implementation, **BLOCKS[kind])
    for rows, length in ((1, 1), (2, 8)):
        x = torch.randn(rows, length, config.hidden_size, device=DEVICE)
        config._experts_implementation, before = implementation, spy.ran
        got, _ = block(x)
        assert spy.ran == before + 1
        config._experts_implementation = "eager"
        want, _ = block(x)
        assert spy.ran == before + 1
        assert_close(got, want, absolute=0, relative=TOLERANCE[torch.float32])


def many(block, x):
    return block(x.expand(1, 17, -1))


def with_gradients(block, x):
    with torch.enable_grad():
        return block(x)


def in_float64(block, x):
    return block.double()(x.double())


def by_torch(block, x):
    with use_backend("torch"):
        return block(x)


def by_reference(block, x):
    with use_backend("reference"):
        return block(x)


def with_an_adapter(block, x):
    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize.register_parametrization(block.experts, "down_proj", Doubled())
    return block(x)


def with_another_activation(block, x):
    block.experts.activation.fused = None
    return block(x)


def with_a_weight_of_another_class(block, x):
    class Quantised(torch.nn.Parameter):
        pass

    block.experts.down_proj = Quantised(block.experts.down_proj)
    return block(x)


@pytest.mark.parametrize(
    "case",
    [
        many,
        with_gradients,
        in_float64,
        by_torch,
        by_reference,
        with_an_adapter,
        with_another_activation,
        with_a_weight_of_another_class,
    ],
)
def test_block_leaves_the_rest_to_others(case, spy):
    block, config = block_on_device()
    x = torch.randn(1, 1, config.hidden_size, device=DEVICE)
    block(x)
    assert spy.ran == 1
    out, _ = case(block, x)
    assert spy.ran == 1
    assert out.isfinite().all()


def test_hooks_of_the_experts_come_first(spy):
    """As accelerate's, which bring weights, and tensor parallelism's, which change the routing."""
    block, config = block_on_device()
    moved = lambda module, args: (args[0], torch.full_like(args[1], config.num_experts), args[2])  # noqa: E731
    block.experts.register_forward_pre_hook(moved)
    block.shared_experts = None
    out, _ = block(torch.randn(1, 2, config.hidden_size, device=DEVICE))
    assert spy.ran == 1
    assert (out == 0).all()


@pytest.mark.parametrize("make_model", [tiny_model, k3_model])
def test_model_decodes_as_with_eager_experts(make_model, spy, monkeypatch):
    monkeypatch.setattr(ops_triton, "refuses", lambda call: "this test is of experts")
    monkeypatch.setattr(ops_triton, "refuses_mixer", ops_triton.refuses)
    model, ids = make_model().to(DEVICE), token_ids(2).to(DEVICE)
    got = model(ids).logits
    assert spy.ran == sum(layer.sparse for layer in model.model.layers)
    model.set_experts_implementation("eager")
    spy.ran = 0
    assert_close(got, model(ids).logits)
    assert spy.ran == 0


def test_block_compiles_in_one_graph(spy):
    block, config = block_on_device()
    x = torch.randn(1, 3, config.hidden_size, device=DEVICE)
    want, _ = block(x)
    got, _ = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    assert spy.ran == 2
    assert_close(got, want, absolute=0, relative=1e-6)


def refused(**changes) -> str | None:
    experts = make()
    names = ("hidden_states", "index", "weights", "gate_up", "down")
    given = dict(zip(names, (*tokens(experts), experts.gate_up_proj, experts.down_proj)))
    return ops_moe.refuses(**{**given, **{name: change(given[name]) for name, change in changes.items()}})


REFUSED = {
    "tensors on 'meta'": {"hidden_states": lambda x: x.to("meta")},
    "tensors on several devices": {"down": lambda x: x.to("meta")},
    "dtype torch.float32, experts of torch.bfloat16": {"gate_up": lambda x: x.bfloat16()},
    "dtype torch.float16, experts of torch.float32": {"hidden_states": lambda x: x.half()},
    "dtype torch.float64, experts of torch.float64": dict.fromkeys(
        ("hidden_states", "gate_up", "down"), Tensor.double
    ),
    "no token, or more than 16": {
        name: lambda x: x[:1].expand(17, -1) for name in ("hidden_states", "index", "weights")
    },
    "experts that do not lie in one piece": {"down": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)},
    "shapes that do not fit together": {"hidden_states": lambda x: x[:, :-1]},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses_says_why(reason):
    assert refused() is None
    assert refused(**REFUSED[reason]) == reason


def test_refuses_gradients_of_any_input():
    with torch.enable_grad():
        assert refused() == "gradients"  # of the parameters
        assert refused(gate_up=Tensor.detach, down=Tensor.detach) is None
        wanted = {"gate_up": Tensor.detach, "down": Tensor.detach, "weights": lambda x: x.clone().requires_grad_()}
        assert refused(**wanted) == "gradients"


def test_refuses_no_token():
    assert refused(**{name: lambda x: x[:0] for name in ("hidden_states", "index", "weights")}) == (
        "no token, or more than 16"
    )


def test_launches_have_programs_enough(monkeypatch):
    """Of one token, for the sizes of Kimi-Linear and Kimi K3; and no tile is wider than the weight needs."""
    cut_into(monkeypatch, *CUTS["as on a GPU"])
    for name, rows, times, width in (
        ("GATE_UP", 1024, 8, 2304),
        ("DOWN", 2304, 1, 1024),
        ("PACKED_GATE_UP", 3072, 16, 3584),
        ("PACKED_DOWN", 3584, 1, 3072),
    ):
        tile = ops_moe._cut(TILES[name], rows, times, width, 8)
        assert times * math.ceil(rows / tile.rows) >= 264
    assert ops_moe._cut(TILES["DOWN"], 60, 1, 36, 8).columns == 64
