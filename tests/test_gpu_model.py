"""A whole model with every kernel on a GPU: no further from float64 than plain torch in the same dtype.

Of the widths of Kimi, and of so many tokens that every fast path is taken.
"""

import copy

import pytest
import torch
from helpers import k3_model, tiny_model
from torch import Tensor

from modeling_kda import KdaHybridForCausalLM, ops_linear, ops_triton, use_backend
from modeling_kda.layers_mla import MultiHeadLatentAttention


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"
WIDTHS = dict(
    hidden_size=256,
    linear_num_heads=8,
    linear_head_dim=128,
    linear_value_head_dim=128,
    linear_output_gate_rank=128,
    num_attention_heads=2,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=512,
    mlp_layer_types=["dense"] * 4,  # experts are chosen, and a rounding chooses others
    initializer_range=0.06,
)
K3 = dict(linear_output_gate_rank=None, q_lora_rank=64, mlp_layer_types=["dense"] * 5)
MODELS = {
    "kimi linear": lambda: tiny_model(**WIDTHS),
    "kimi k3": lambda: k3_model(**{**WIDTHS, **K3}),
}
ROWS, TOKENS = 2, 1100  # together more than `ops_linear.MANY`
SLACK = 2  # times the error of plain torch, which is another throw of the same dice


@pytest.fixture(params=MODELS)
def model(request) -> KdaHybridForCausalLM:
    return MODELS[request.param]().to(DEVICE)


def ids_of(rows: int = ROWS, tokens: int = TOKENS) -> Tensor:
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def learnt(model: KdaHybridForCausalLM, ids: Tensor, forward=None, **given) -> dict[str, Tensor]:
    """The logits of a step of training, and the gradients."""
    model.zero_grad()
    output = (model if forward is None else forward)(input_ids=ids, labels=ids, use_cache=False, **given)
    output.loss.backward()
    return {"logits": output.logits.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def check(got: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """`got` is as near to `exact` as `plain` is. Where a choice of one weighs nothing, the gradient is a rounding."""
    whole = sum(want.square().sum().item() for want in exact.values()) ** 0.5
    for name, want in exact.items():
        size, off, limit = (x.norm().item() for x in (want, got[name].double() - want, plain[name].double() - want))
        most = SLACK * limit + 1e-3 * size + 1e-9 * whole
        assert off <= most, f"{name}: error {off} of {size}; that of plain torch is {limit}"


def in_float64(model: KdaHybridForCausalLM) -> KdaHybridForCausalLM:
    return copy.deepcopy(model).double()


@pytest.fixture
def taken(monkeypatch) -> set[str]:
    """Which fast paths are."""
    names = set()

    def watch(name, owner, attribute, happens=lambda result: True):
        function = getattr(owner, attribute)

        def watched(*args, **kwargs):
            result = function(*args, **kwargs)
            if happens(result):
                names.add(name)
            return result

        monkeypatch.setattr(owner, attribute, watched)

    watch("joined", ops_linear._Joined, "apply")
    watch("chunks", ops_triton, "chunk")
    watch("chunks with gradients", ops_triton, "chunk_with_gradients")
    watch("unpadded", MultiHeadLatentAttention, "_takes_unequal", bool)
    return names


def expected(*names: str) -> set[str]:
    hopper = torch.cuda.get_device_capability()[0] == 9
    return {*names, *(["unpadded"] if hopper else [])}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_model_reads_as_in_float64(model, dtype, taken):
    exact, ids = in_float64(model), ids_of()
    model.to(dtype)
    with torch.no_grad():
        got = {"logits": model(ids).logits}
        assert taken == expected("joined", "chunks")
        with use_backend("torch"):
            plain, want = {"logits": model(ids).logits}, {"logits": exact(ids).logits}
    check(got, plain, want)


@pytest.mark.parametrize("how", ["bfloat16", "autocast", "checkpointed", "documents"])
def test_model_learns_as_in_float64(model, how, taken):
    exact, ids, given = in_float64(model), ids_of(), {}
    if how == "documents":
        ids = ids.view(1, -1)
        given["position_ids"] = torch.cat([torch.arange(n) for n in (3, 1500, 1, 696)]).view(1, -1).to(DEVICE)
    if how != "autocast":
        model.to(torch.bfloat16)
    if how == "checkpointed":
        model.gradient_checkpointing_enable()
    model.train()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=how == "autocast"):
        got = learnt(model, ids, **given)
        if how == "bfloat16":
            assert taken == expected("joined", "chunks with gradients")
        with use_backend("torch"):
            plain = learnt(model, ids, **given)
    with use_backend("torch"):
        check(got, plain, learnt(exact, ids, **given))


def test_model_learns_compiled_as_in_float64(model):
    exact, ids = in_float64(model), ids_of()
    model.to(torch.bfloat16).train()
    got = learnt(model, ids, torch.compile(model, fullgraph=True))
    with use_backend("torch"):
        check(got, learnt(model, ids), learnt(exact, ids))


def test_model_warns_of_reentrant_checkpointing(model, messages):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()(ids_of(1, 20))
    assert [m for m in messages() if "use_reentrant" in m]
