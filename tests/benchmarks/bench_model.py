"""A whole model against transformers' `kimi_linear` with the same weights: prefill, training, decoding, on the CPU.

    python -m tests.benchmarks.bench_model [--only NAME] [--dtype DTYPE] [--quick]

Speeds are tokens a second over all rows, from median times; memory is the peak of a process that does only this case.
Ratios are ours / peer for speed and peer / ours for memory: above 1, ours is faster or smaller.
"""

import copy
import statistics
import tempfile
from typing import Any

import torch
from torch import Tensor

from .common import DTYPES, arguments, clock, fresh, measured, peak_mib, ratio, report, table


RUNS = {"ours": 5, "peer": 3}
STEPS, WARM_UP = 40, 3  # of decoding
LOGITS = 1e-3  # Largest difference of float32 logits between the two.
BATCHES = (1, 8)
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_heads": 8,
    "linear_head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "intermediate_size": 1536,
    "mlp_layer_types": ["dense"] * 8,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# name: kind, tokens
CASES = {
    "prefill T=512": ("prefill", 512),
    "prefill T=2048": ("prefill", 2048),
    "prefill T=8192": ("prefill", 8192),
    "training step T=2048": ("training", 2048),
    "decode after 512": ("decode", 512),
    "decode after 8192": ("decode", 8192),
}
QUICK = {
    "prefill T=100": ("prefill", 100),
    "training step T=100": ("training", 100),
    "decode after 100": ("decode", 100),
}


def load(side: str, folder: str, dtype: str):
    """Both read the files that transformers' own class wrote."""
    if side == "ours":
        from modeling_kda import KdaHybridForCausalLM as Model
    else:
        from transformers import KimiLinearForCausalLM as Model
    return Model.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def tokens_of(batch: int, tokens: int) -> Tensor:
    return torch.randint(SHAPE["vocab_size"], (batch, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def write(folder: str, tokens: int) -> dict[str, float]:
    """Writes a random model, and makes sure that both sides compute the same with it."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    torch.manual_seed(0)
    KimiLinearForCausalLM(KimiLinearConfig(**SHAPE)).save_pretrained(folder)
    ids = tokens_of(2, tokens)
    a, b = (load(side, folder, "float32")(ids).logits for side in RUNS)
    difference = (a - b).abs().max().item()
    assert difference < LOGITS, f"logits differ by {difference}: the two are not the same model"
    return {"logits_difference": difference, "largest_logit": b.abs().max().item()}


def measure(side: str, folder: str, kind: str, tokens: int, dtype: str) -> dict[str, Any]:
    """One side of one case: tokens a second by batch size, and the peak memory of the process."""
    model, ids = load(side, folder, dtype), tokens_of(1, tokens)
    with torch.set_grad_enabled(kind == "training"):
        if kind == "prefill":
            seconds = measured(lambda: model(ids, use_cache=True, logits_to_keep=1), RUNS[side])["seconds"]
            speeds = {1: tokens / seconds}
        elif kind == "training":
            seconds = measured(lambda: training_step(model.train(), ids), RUNS[side])["seconds"]
            speeds = {1: tokens / seconds}
        else:
            first = model(ids, use_cache=True, logits_to_keep=1)
            speeds = {batch: batch / decode_step(model, first, batch) for batch in BATCHES}
    return {"tok_s": speeds, "peak_mib": peak_mib()}


def training_step(model, ids: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(ids, labels=ids, use_cache=False).loss.backward()


def decode_step(model, first, batch: int) -> float:
    """Median seconds of a greedy step after `first`, for `batch` equal rows."""
    cache = copy.deepcopy(first.cache)
    cache.reorder_cache(torch.zeros(batch, dtype=torch.long))
    token = first.logits[:, -1:].argmax(-1).expand(batch, 1)

    def step() -> None:
        nonlocal token
        token = model(token, cache=cache, use_cache=True).logits.argmax(-1)

    return statistics.median([clock(step) for _ in range(WARM_UP + STEPS)][WARM_UP:])


def main() -> None:
    given = arguments(__doc__)
    dtypes = [given.dtype] if given.dtype else DTYPES
    results, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        check = fresh("write", folder=folder, tokens=100)
        for name, (kind, tokens) in (QUICK if given.quick else CASES).items():
            for dtype in dtypes:
                if given.only not in name:
                    continue
                case = {"kind": kind, "tokens": tokens, "dtype": dtype}
                a, b = (fresh("measure", side=side, folder=folder, **case) for side in RUNS)
                speed = {batch: ratio(a["tok_s"][batch], b["tok_s"][batch]) for batch in a["tok_s"]}
                memory = ratio(b["peak_mib"], a["peak_mib"])
                results.append({"name": name, **case, "ours": a, "peer": b, "speed": speed, "memory": memory})
                for batch, x in speed.items():
                    label = f"{name}, batch {batch}" if kind == "decode" else name
                    peaks = [a["peak_mib"], b["peak_mib"], memory]
                    rows.append([label, dtype, a["tok_s"][batch], b["tok_s"][batch], x, *peaks])
    header = ["model", "dtype", "ours tok/s", "peer tok/s", "ratio", "ours peak MiB", "peer peak MiB", "ratio of MiB"]
    agree = "Same weights: logits differ by {logits_difference:.1e} at most, the largest is {largest_logit:.3g}."
    report([table(header, rows), agree.format(**check)], {"shape": SHAPE, "check": check, "cases": results})


if __name__ == "__main__":
    main()
