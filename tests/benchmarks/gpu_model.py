"""A whole model on a GPU: decoding inside `generate`, prefill, training; ours, transformers' with fla, and fla's own.

    python -m tests.benchmarks.gpu_model [--only KIND] [--models NAME ...] [--context N ...] [--quick]

Random models in bfloat16, batch 1: 16 layers, hidden size 2048, 16 heads of 128, dense MLPs of 5632, 954 million
parameters; "experts" has 4 layers, hidden size 2304, 32 heads, and 8 of 64 experts of width 1024. The floor of
decoding is the weights a token needs and the latents, read once at the speed of a copy that is measured here.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from .common import fresh, ratio, report, table


CONTEXTS, PREFILL, TRAINING = (512, 65_536, 262_144), (8192, 65_536), (2, 4096)
TOKENS = {"static": 200, "dynamic": 40}
WARM_UP, RUNS = 8, 5
GIB = 2**30
# name: what is asked of it. The peers compile for minutes where a cache is static, so not at every context.
MODELS = {
    "hybrid": ("decode", "prefill", "training"),
    "full attention": ("decode", "prefill", "training"),
    "experts": ("decode",),
    "transformers hybrid": ("decode", "prefill", "training"),
    "transformers experts": ("decode",),
    "fla KDA": ("prefill", "training"),
}


def shape(name: str, layers: int) -> dict[str, Any]:
    kinds = ["full_attention" if i % 4 == 3 or "full" in name else "linear_attention" for i in range(layers)]
    common = dict(vocab_size=32000, layer_types=kinds, kv_lora_rank=512, qk_nope_head_dim=128, v_head_dim=128)
    common |= dict(num_hidden_layers=layers, qk_rope_head_dim=64, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    if "experts" in name:
        experts = dict(num_experts_per_tok=8, moe_intermediate_size=1024, n_shared_experts=1, intermediate_size=9216)
        widths = dict(hidden_size=2304, linear_num_heads=32, num_attention_heads=32, num_key_value_heads=32)
        mlps = ["sparse"] * layers
    else:
        experts = dict(intermediate_size=5632)
        widths = dict(hidden_size=2048, linear_num_heads=16, num_attention_heads=16, num_key_value_heads=16)
        mlps = ["dense"] * layers
    return {**common, **experts, **widths, "mlp_layer_types": mlps}


def build(name: str, layers: int) -> torch.nn.Module:
    given = shape(name, layers)
    torch.manual_seed(0)
    with torch.device("cuda"):
        if name == "fla KDA":
            from fla.models import KDAConfig, KDAForCausalLM

            config = KDAConfig(hidden_size=2048, num_hidden_layers=layers, intermediate_size=5632, vocab_size=32000)
            return KDAForCausalLM(config).bfloat16().eval()
        if name.startswith("transformers"):
            from transformers import KimiLinearConfig, KimiLinearForCausalLM

            config = KimiLinearConfig(**given, **({"num_local_experts": 64} if "experts" in name else {}))
            return KimiLinearForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
        from modeling_kda import KdaHybridConfig, KdaHybridForCausalLM

        given.pop("num_key_value_heads")
        config = KdaHybridConfig(**given, **({"num_experts": 64} if "experts" in name else {}))
        return KdaHybridForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


class Clock(LogitsProcessor):
    """Changes nothing. Waits for the device at a call, and takes the time."""

    def __init__(self):
        self.calls, self.times = 0, {}

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.calls in (0, WARM_UP):
            torch.cuda.synchronize()
            self.times[self.calls] = time.perf_counter()
        self.calls += 1
        return scores


@torch.no_grad()
def decode(model: torch.nn.Module, kind: str, context: int, tokens: int) -> dict[str, float]:
    """`tok_s` inside `generate`, and seconds to its `first` token and to the first after WARM_UP."""
    ids, clock = torch.randint(3, 32000, (1, context), device="cuda"), Clock()
    config = GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0, cache_implementation=kind
    )
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(ids, generation_config=config, logits_processor=LogitsProcessorList([clock]))
    torch.cuda.synchronize()
    took = time.perf_counter() - clock.times[WARM_UP]
    speed = (tokens - WARM_UP - 1) / took  # nothing is computed for the last token
    return {"tok_s": speed, "first": clock.times[0] - start, "warm": clock.times[WARM_UP] - start}


def median(call: Callable[[], Any], runs: int = RUNS) -> float:
    """Seconds, after a first call."""
    times = []
    for _ in range(runs + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@torch.no_grad()
def prefill(model: torch.nn.Module, tokens: int) -> dict[str, float]:
    ids = torch.randint(3, 32000, (1, tokens), device="cuda")
    given = dict(use_cache=True, logits_to_keep=1)
    return {"tok_s": tokens / median(lambda: model(ids, **given)), "cache_mib": cache_mib(model(ids, **given))}


def cache_mib(output: Any) -> float:
    cache = output.get("cache", output.get("past_key_values"))
    if hasattr(cache, "nbytes"):
        return sum(cache.nbytes().values()) / 2**20
    tensors = {id(x): x for layer in cache.layers for x in tensors_in(vars(layer))}
    return sum(x.numel() * x.element_size() for x in tensors.values()) / 2**20


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    """Of dicts and sequences in one another."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (dict, list, tuple)):
        for y in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(y)


def training(model: torch.nn.Module, rows: int, tokens: int) -> dict[str, float]:
    """Forward and backward, without an optimizer, and seconds of the `first` time."""
    ids = torch.randint(3, 32000, (rows, tokens), device="cuda")
    model.train()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    speed = rows * tokens / median(step)
    return {"tok_s": speed, "peak_gib": torch.cuda.max_memory_allocated() / GIB, "first": first}


def bandwidth() -> float:
    """Bytes read and written a second, by a copy of 2 GiB."""
    a, b = (torch.empty(2 * GIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * a.numel() / median(lambda: b.copy_(a))


def measure(name: str, kinds: list[str], layers: int, contexts: list[int], prompts: list[int], tokens: int) -> dict:
    """Everything of one model, in a process of its own."""
    speed, begun = bandwidth(), time.perf_counter()
    model = build(name, layers)
    peer = name.startswith(("transformers", "fla"))
    weights = sum(x.numel() * x.element_size() for n, x in model.named_parameters() if "embed_tokens" not in n)
    if "experts" in name:
        experts = sum(x.numel() * x.element_size() for n, x in model.named_parameters() if ".experts." in n)
        weights -= experts * (1 - 8 / 64)
    results: dict[str, Any] = {"model": name, "parameters": sum(x.numel() for x in model.parameters())}
    results |= {"bandwidth": speed, "loaded": time.perf_counter() - begun, "decode": [], "prefill": []}
    full = shape(name, layers)["layer_types"].count("full_attention")
    if "decode" in kinds:
        for context in contexts[:1] if "experts" in name else contexts:
            for kind in TOKENS:
                if peer and kind == "static" and context != contexts[0]:
                    continue
                count = min(tokens, TOKENS[kind])
                # Both times as many tokens: of another length, a static cache has the peer compile again.
                first = decode(model, kind, context, count)["first"]
                point = {"context": context, "cache": kind, **decode(model, kind, context, count)}
                floor = (weights + full * context * (512 + 64) * 2) / speed
                results["decode"].append({**point, "first_call": first, "floor": 1 / floor})
                torch.cuda.empty_cache()
    if "prefill" in kinds:
        results["prefill"] = [{"tokens": n, **prefill(model, n)} for n in prompts]
        torch.cuda.empty_cache()
    if "training" in kinds:
        results["training"] = training(model, TRAINING[0], min(TRAINING[1], prompts[0]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("decode", "prefill", "training"), help="only this")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--context", type=int, nargs="+", default=list(CONTEXTS), help="tokens before decoding")
    parser.add_argument("--quick", action="store_true", help="4 layers, short inputs: tries the script")
    given = parser.parse_args()
    sizes = dict(contexts=given.context, prompts=list(PREFILL), tokens=max(TOKENS.values()))
    if given.quick:
        sizes = dict(contexts=[512], prompts=[1024], tokens=20)
    results = []
    for name in given.models:
        kinds = [kind for kind in MODELS[name] if given.only in (None, kind)]
        layers = 4 if given.quick or "experts" in name else 16
        if kinds:
            results.append(fresh("measure", name=name, kinds=kinds, layers=layers, **sizes))
    report(tables(results), {"models": results})


def tables(results: list[dict[str, Any]]) -> list[str]:
    decoding = [
        [
            f"{x['model']}, {y['cache']} cache, {y['context']:,}",
            y["tok_s"],
            y["floor"],
            ratio(y["tok_s"], y["floor"]),
            y["first_call"],
            y["first"],
        ]
        for x in results
        for y in x["decode"]
    ]
    reading = [[f"{x['model']}, {y['tokens']:,}", y["tok_s"], y["cache_mib"]] for x in results for y in x["prefill"]]
    learning = [[x["model"], *x["training"].values()] for x in results if "training" in x]
    header = ["decode", "tok/s", "floor", "ratio", "first token of the first call (s)", "of the next (s)"]
    return [
        table(header, decoding),
        table(["prefill", "tok/s", "cache MiB"], reading),
        table(["training", "tok/s", "peak GiB", "first step (s)"], learning),
    ]


if __name__ == "__main__":
    main()
