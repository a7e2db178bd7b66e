"""How far a float32 state is from float64 after many decoded tokens, and from a state computed in chunks.

    python -m tests.benchmarks.bench_drift [--tokens N] [--device DEVICE] [--quick]

The embedded model writes N tokens, one by one, sampled, in float32. The same tokens are then read in pieces, in
float32 and in float64. Per layer: the largest difference of the states, relative to the largest number of the float64
state; and of the last logits. On a GPU the decoding step is one CUDA graph.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from modeling_kda import KdaHybridCache, KdaHybridForCausalLM

from .common import captured, embedded, report, table


PIECE = 1024  # tokens


def load(dtype: torch.dtype, device: str) -> KdaHybridForCausalLM:
    model = embedded()
    if dtype == torch.float64:
        model = model.double()  # and what stays in float32 otherwise
    model.set_experts_implementation("batched_mm")  # in float32, the grouped product reads from the GPU
    return model.to(device).eval()


def stepper(model: KdaHybridForCausalLM, token: Tensor, cache: KdaHybridCache) -> Callable[[], Tensor]:
    """A function that feeds `token` `[1, 1]`, puts the next one there and returns the logits."""

    def step() -> Tensor:
        logits = model(token, cache=cache).logits[:, -1]
        token.copy_(torch.multinomial(logits.float().softmax(-1), 1))
        return logits

    return captured(step) if token.device.type == "cuda" else step


def decode(model: KdaHybridForCausalLM, tokens: int) -> tuple[Tensor, KdaHybridCache, Tensor]:
    """The tokens fed `[1, tokens]`, the cache after them, the last logits."""
    cache = KdaHybridCache(model.config, max_cache_len=tokens)
    token = torch.full((1, 1), model.config.bos_token_id, device=model.device)
    step = stepper(model, token, cache)
    cache.reset()
    token.fill_(model.config.bos_token_id)
    fed = torch.empty(1, tokens, dtype=torch.long, device=model.device)
    for i in tqdm(range(tokens), mininterval=5):
        fed[:, i : i + 1] = token
        logits = step()
    return fed, cache, logits


def read(model: KdaHybridForCausalLM, ids: Tensor) -> tuple[KdaHybridCache, Tensor]:
    cache = KdaHybridCache(model.config)
    for piece in tqdm(ids.split(PIECE, 1), mininterval=5):
        logits = model(piece, cache=cache, logits_to_keep=1).logits[:, -1]
    return cache, logits


def difference(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).abs().max() / b.abs().max()).item()


@torch.no_grad()
def measure(tokens: int, device: str) -> dict[str, Any]:
    single = load(torch.float32, device)
    ids, decoded, last = decode(single, tokens)
    chunked, last_chunked = read(single, ids)
    exact, last_exact = read(load(torch.float64, device), ids)
    layers = [
        {
            "layer": i,
            "decoded": difference(decoded.layers[i].state, exact.layers[i].state),
            "chunked": difference(chunked.layers[i].state, exact.layers[i].state),
            "decoded to chunked": difference(decoded.layers[i].state, chunked.layers[i].state.double()),
        }
        for i, kind in enumerate(single.config.layer_types)
        if kind == "linear_attention"
    ]
    logits = [
        difference(last, last_exact),
        difference(last_chunked, last_exact),
        difference(last, last_chunked.double()),
    ]
    return {"tokens": tokens, "device": device, "layers": layers, "logits": logits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a few tokens: tries the script, measures nothing")
    given = parser.parse_args()
    result = measure(300 if given.quick else given.tokens, given.device)
    rows = [[f"state of layer {x['layer']}", *(f"{x[name]:.1e}" for name in list(x)[1:])] for x in result["layers"]]
    rows.append(["logits", *(f"{x:.1e}" for x in result["logits"])])
    header = [f"after {result['tokens']:,} tokens", "decoded to float64", "chunked to float64", "decoded to chunked"]
    report([table(header, rows)], {"drift": result})


if __name__ == "__main__":
    main()
