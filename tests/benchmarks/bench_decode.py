"""A decoding step of a growing cache, a static one, and a static one in a CUDA graph, on a GPU (or the CPU).

    python -m tests.benchmarks.bench_decode [--device DEVICE] [--context N] [--preset NAME] [--quick]

Milliseconds a token (median of steps), and on a GPU the kernels that one token launches.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig

from modeling_kda import KdaHybridCache, KdaHybridForCausalLM

from .common import ROOT, captured, fresh, report, table


STEPS, WARM_UP = 50, 5


def milliseconds(step: Callable[[], Any], device: str) -> float:
    def once() -> float:
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    return statistics.median([once() for _ in range(WARM_UP + STEPS)][WARM_UP:])


def launches(step: Callable[[], Any]) -> int:
    """Kernels and copies that a step puts on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


@torch.no_grad()
def measure(kind: str, preset: str, device: str, context: int, batch: int) -> dict[str, float]:
    """`ms` a token of one kind of step, and the `launches` on a GPU."""
    config = AutoConfig.from_pretrained(str(ROOT / "configuration" / preset))
    torch.manual_seed(0)
    with torch.device(device):
        model = KdaHybridForCausalLM._from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.eval()
    ids = torch.randint(3, config.vocab_size, (batch, context), device=device)
    cache = KdaHybridCache(config, None if kind == "growing cache" else context + 4 * (WARM_UP + STEPS))
    model(ids, cache=cache, logits_to_keep=1)
    token, forward = ids[:, :1].clone(), model
    if kind == "static cache, torch.compile":
        forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)

    def step() -> None:
        token.copy_(forward(token, cache=cache, use_cache=True).logits[:, -1:].argmax(-1))

    step = captured(step) if kind == "static cache, CUDA graph" else step
    result = {"ms": milliseconds(step, device)}
    return {**result, "launches": launches(step)} if device == "cuda" else result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--context", type=int, default=4096, help="tokens")
    parser.add_argument("--preset", default="kda_hybrid_small", help="a folder of configuration/")
    parser.add_argument("--quick", action="store_true", help="a small model: tries the script, measures nothing")
    given = parser.parse_args()
    preset, context = ("tiny", 64) if given.quick else (given.preset, given.context)
    kinds = ["growing cache", "static cache"]
    kinds += ["static cache, CUDA graph", "static cache, torch.compile"] if given.device == "cuda" else []
    where = {"preset": preset, "device": given.device, "context": context}
    results = [
        {"kind": kind, "batch": batch, **fresh("measure", kind=kind, batch=batch, **where)}
        for batch in (1, 8)
        for kind in kinds
    ]
    rows = [[f"{x['kind']}, batch {x['batch']}", x["ms"], x.get("launches")] for x in results]
    header = [f"{preset} after {context:,} tokens", "ms a token", "launches"]
    report([table(header, rows)], {**where, "decode": results})


if __name__ == "__main__":
    main()
