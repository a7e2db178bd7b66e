"""What several tests need: golden data, a small model, comparisons that say where they failed."""

import copy
import functools
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling_kda import KdaHybridCache, KdaHybridConfig, KdaHybridForCausalLM, use_backend


GOLDEN = Path(__file__).parents[2] / "shared" / "golden"

# Largest relative error by dtype: of an operation against float64, |got - want| / max |want|.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# Largest absolute difference of float32 logits between two ways to run one model.
LOGITS = 1e-4
GOLDEN_LOGITS = 5e-4  # to golden data: its makers, in float32, are up to 1.4e-4 from float64
# Largest difference of a parameter's gradient, relative to its maximum.
GRADIENTS = 1e-4
ALIGNED = {"hidden_size": 64, "moe_intermediate_size": 40}  # what grouped products of 16-bit experts need


def golden(*parts: str) -> Path:
    """A path in the golden data; skips the test where it is absent."""
    path = GOLDEN.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"golden data is absent: {path.relative_to(GOLDEN.parent)} is not beside the checkout")
    return path


def golden_json(*parts: str):
    return json.loads(golden(*parts).read_text())


def golden_tensors(*parts: str) -> dict[str, torch.Tensor]:
    return load_file(golden(*parts))


# Kimi K3's parts, as changes of `tiny_config`: the last block is a layer short, and the last two layers are both MLA.
K3 = dict(
    num_hidden_layers=5,
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention", "full_attention"],
    linear_gate_lower_bound=-5.0,
    linear_output_gate_rank=None,
    q_lora_rank=22,
    attention_output_gate=True,
    attn_res_block_size=2,
    routed_expert_hidden_size=32,
    moe_intermediate_size=64,
    latent_moe_use_norm=True,
    n_shared_experts=2,
    hidden_act="situ",
    situ_beta=4.0,
    situ_linear_beta=25.0,
)


def tiny_config(**changes) -> KdaHybridConfig:
    """Four layers with everything in them. Sizes are off the powers of two, and keys and values differ in width."""
    fields = dict(
        vocab_size=97,
        hidden_size=60,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        initializer_range=0.3,  # at 0.02 most leaks hide under the noise
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        linear_num_heads=3,
        linear_head_dim=12,
        linear_value_head_dim=20,
        linear_output_gate_rank=10,
        num_attention_heads=4,
        kv_lora_rank=28,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=18,
        intermediate_size=72,
        moe_intermediate_size=36,
        num_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
    )
    return KdaHybridConfig(**{**fields, **changes})


def k3_config(**changes) -> KdaHybridConfig:
    """`tiny_config` with all of Kimi K3's parts."""
    return tiny_config(**{**K3, **changes})


def tiny_model(seed: int = 0, **changes) -> KdaHybridForCausalLM:
    """A small random model in eval mode; norm weights, the router's bias and the mixtures' queries are random too."""
    torch.manual_seed(seed)
    model = KdaHybridForCausalLM(tiny_config(**changes)).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.add_(0.3 * torch.randn_like(tensor))
            if "correction_bias" in name:
                tensor.add_(0.2 * torch.randn_like(tensor))
            if "res_proj" in name:
                tensor.add_(0.1 * torch.randn_like(tensor))
    return model


def k3_model(seed: int = 0, **changes) -> KdaHybridForCausalLM:
    """`tiny_model` with all of Kimi K3's parts."""
    return tiny_model(seed, **{**K3, **changes})


@functools.cache
def shared_model() -> KdaHybridForCausalLM:
    """A `tiny_model` that no test changes."""
    return tiny_model()


# For tests of caches, which know nothing of MLPs: dense ones are quick.
DENSE = {"mlp_layer_types": ["dense"] * 4}
DENSE_MODELS = {
    "tiny": functools.partial(tiny_model, **DENSE),
    "k3": functools.partial(k3_model, mlp_layer_types=["dense"] * 5),
    "linear": functools.partial(tiny_model, layer_types=["linear_attention"] * 4, **DENSE),
    "full": functools.partial(tiny_model, layer_types=["full_attention"] * 4, **DENSE),
}
CACHE_KINDS = {"growing": {}, "static": {"max_cache_len": 96}, "offloading": {"offloading": True}}
# Every kind with one model, and every other model with one kind.
CACHE_CASES = [("tiny", kind) for kind in CACHE_KINDS] + [(name, "growing") for name in DENSE_MODELS if name != "tiny"]


@functools.cache
def dense_model(name: str) -> KdaHybridForCausalLM:
    """One of `DENSE_MODELS` that no test changes."""
    return DENSE_MODELS[name]()


def token_ids(length: int, rows: int = 1, seed: int = 1) -> torch.Tensor:
    """`[rows, length]` random ids from 3 to 96."""
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def truth(model: KdaHybridForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Logits in float64, token by token, expert by expert."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    with torch.no_grad(), use_backend("reference"):
        return exact(ids).logits


def padded(tokens: torch.Tensor, mask: list[int], junk: int = 7) -> torch.Tensor:
    """`[1, len(mask)]`: `tokens` where the mask is 1, another token where it is 0."""
    row = torch.full((1, len(mask)), junk)
    row[0, torch.tensor(mask, dtype=torch.bool)] = tokens[0]
    return row


def mask_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def forward_in_pieces(model, ids, cuts, attention_mask=None) -> tuple[torch.Tensor, KdaHybridCache]:
    """Logits of calls that end at `cuts`, on one cache."""
    cache, logits = KdaHybridCache(model.config), []
    with torch.no_grad():
        for start, end in itertools.pairwise([0, *cuts, ids.shape[1]]):
            mask = None if attention_mask is None else attention_mask[:, :end]
            logits.append(model(ids[:, start:end], attention_mask=mask, cache=cache).logits)
    return torch.cat(logits, 1), cache


@torch.no_grad()
def step(model: KdaHybridForCausalLM, ids: torch.Tensor, cache: KdaHybridCache, **given) -> torch.Tensor:
    """Logits of a forward that goes on from `cache`, without gradients."""
    return model(ids, cache=cache, **given).logits


def filled(model: KdaHybridForCausalLM, ids: torch.Tensor, kind: str = "growing", **given) -> KdaHybridCache:
    """A cache of one of `CACHE_KINDS` that has seen `ids`."""
    cache = KdaHybridCache(model.config, **CACHE_KINDS[kind])
    step(model, ids, cache, **given)
    return cache


def tensors(cache: KdaHybridCache) -> list[torch.Tensor]:
    """All that `cache` remembers."""
    return [x for layer in cache.layers for x in layer.contents(cache.get_seq_length()).values()]


def assert_close(
    got: torch.Tensor, want: torch.Tensor, absolute: float = LOGITS, relative: float = 0.0, name: str = ""
) -> None:
    """|got - want| <= absolute + relative * max |want|, everywhere, and nothing is NaN."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if not want.numel():
        return
    error = (got.double() - want.double()).abs()
    largest, limit = error.max().item(), absolute + relative * want.abs().max().item()
    if largest <= limit:  # False for NaN
        return
    place = tuple(int(i) for i in torch.unravel_index(error.nan_to_num(nan=float("inf")).argmax(), error.shape))
    raise AssertionError(
        f"{name}: largest error {largest:.3e} at {place} exceeds {limit:.3e}; mean {error.mean().item():.3e}, "
        f"relative {largest / max(want.abs().max().item(), 1e-30):.3e}; got {got[place]}, want {want[place]}"
    )


def assert_identical(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """The same names, shapes, dtypes and bits."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@torch.no_grad()
def assert_goes_on(
    model: KdaHybridForCausalLM,
    cache: KdaHybridCache,
    seen: torch.Tensor,
    mask: torch.Tensor | None = None,
    seed: int = 2,
) -> None:
    """`cache` holds `seen` and nothing else: what comes next gives the logits of a run of all of it."""
    assert cache.get_seq_length() == seen.shape[1]
    more = token_ids(5, rows=len(seen), seed=seed)
    whole, got = torch.cat([seen, more], 1), []
    mask = None if mask is None else torch.cat([mask, torch.ones_like(more)], 1)
    for start, end in ((0, 1), (1, 5)):
        given = {} if mask is None else {"attention_mask": mask[:, : seen.shape[1] + end]}
        got.append(step(model, more[:, start:end], cache, **given))
    want = model(whole, attention_mask=mask, use_cache=False).logits[:, seen.shape[1] :]
    assert_close(torch.cat(got, 1), want, 3 * LOGITS)


@torch.no_grad()
def check_compiled_steps(model: KdaHybridForCausalLM) -> None:
    """Decoding on a static cache gives the same logits, and leaves the same behind, in one compiled graph."""
    ids = token_ids(9).to(model.device)
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    caches = [KdaHybridCache(model.config, 16) for _ in range(2)]
    for cache in caches:
        model(ids[:, :6], cache=cache)
    for t in range(6, 9):
        got, want = (f(ids[:, t : t + 1], cache=c).logits for f, c in zip((compiled, model), caches))
        assert_close(got, want, absolute=LOGITS)
    for got, want in zip(*(cache.layers for cache in caches)):
        for name, x in got.contents(9).items():
            assert_close(x, want.contents(9)[name], absolute=0, relative=1e-5, name=name)


def watch_launches(monkeypatch, module, *kernels: str) -> list[str]:
    """The names of these Triton kernels of `module`, each as often as it is launched from now on."""
    names = []

    class Watched:
        def __init__(self, name: str):
            self.name, self.kernel = name, getattr(module, name)

        def __getitem__(self, grid):
            names.append(self.name)
            return self.kernel[grid]

    for name in kernels:
        monkeypatch.setattr(module, name, Watched(name))
    return names
