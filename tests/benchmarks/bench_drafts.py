"""Drafts, branches and files of the embedded model's cache: what they save and what they cost, on the CPU, in float32.

    python -m tests.benchmarks.bench_drafts [--quick] [--draft FOLDER]

Greedy generation with guesses that the model verifies, from the prompt or by a small model, against one token at a
time: the tokens must be the same. A draft model must have the same tokenizer; `conversion.make_embedded` makes such.
Then the price of taking tokens back, and of branching and saving a long context instead of computing it again.
"""

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .common import MIB, clock, embedded, filled, fresh, report, table


# What each part is given. 600 steps are more than a record holds, so that the mean has its share of shortening it.
FULL = {
    "generation": {"new_tokens": 200, "runs": 3},
    "recording": {"steps": 600},
    "branches": {"tokens": 16384, "prefill": 2048, "runs": 10},
}
QUICK = {
    "generation": {"new_tokens": 20, "runs": 1},
    "recording": {"steps": 20},
    "branches": {"tokens": 512, "prefill": 64, "runs": 2},
}
WARM_UP = 3  # steps of decoding
BRANCHES = 8
LOOKUPS = (4, 8, 16)
PROSE = "It is a truth universally acknowledged, that a single man in possession of a good fortune"
# Text and repetition penalty. Greedy, so small a model soon repeats itself, which suits lookup; a penalty prevents it.
PROMPTS = {
    "accounts": ("Fellow-Citizens of the Senate and House of Representatives:\n\nThe receipts", 1.0),
    "refrain": ("The ship sailed on, and the sea was calm. " * 6, 1.0),
    "dialogue": ('"Do you like dancing?" said Emma.\n\n"Very much," said Harriet.\n\n"Do you like it?"', 1.0),
    "prose": (PROSE, 1.0),
    "prose, penalty": (PROSE, 1.2),
}


def generation(draft: str | None, new_tokens: int, runs: int) -> list[dict[str, Any]]:
    """Every prompt with every kind of draft, in one process: speed, agreement and what was accepted."""
    from transformers import AutoTokenizer, GenerationConfig

    from modeling_kda import EMBEDDED_MODEL, KdaHybridForCausalLM

    model, tokenizer = embedded(), AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)
    kinds: dict[str, dict[str, Any]] = {"plain": {}}
    kinds |= {f"prompt lookup, {n}": {"prompt_lookup_num_tokens": n} for n in LOOKUPS}
    if draft:
        kinds["draft model"] = {
            "assistant_model": KdaHybridForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()
        }
    cases = []
    for prompt, (text, penalty) in PROMPTS.items():
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        calls = {
            kind: lambda how=how, ids=ids, penalty=penalty: model.generate(ids, repetition_penalty=penalty, **how)
            for kind, how in kinds.items()
        }
        tokens, found = {}, {}
        for kind, call in calls.items():
            with forwards(model) as lengths:
                tokens[kind] = call()[0, ids.shape[1] :].tolist()
            assert tokens[kind] == tokens["plain"], f"{kind} generates other tokens after {prompt!r}"
            found[kind] = verified(lengths, ids.shape[1], len(tokens[kind]))
        seconds = {kind: [] for kind in calls}
        for _ in range(runs):
            for kind, call in calls.items():
                seconds[kind].append(clock(call))
        for kind, times in seconds.items():
            found[kind]["tok_s"] = len(tokens[kind]) / statistics.median(times)
            found[kind]["speed"] = found[kind]["tok_s"] / found["plain"]["tok_s"]
        cases.append({"name": prompt, "prompt_tokens": ids.shape[1], "kinds": found})
    return cases


@contextlib.contextmanager
def forwards(model) -> Iterator[list[int]]:
    """The number of tokens that each forward of `model` is given meanwhile."""
    lengths: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield lengths
    finally:
        hook.remove()


def verified(lengths: list[int], prompt: int, tokens: int) -> dict[str, Any]:
    """Of forwards that generated `tokens`: each gives one token of its own, and those drafted that it accepts."""
    drafted, accepted = sum(lengths) - prompt - (len(lengths) - 1), tokens - len(lengths)
    return {
        "forwards": len(lengths),
        "accepted_each": accepted / len(lengths),
        "accepted_share": accepted / drafted if drafted else None,
    }


@torch.no_grad()
def recording(steps: int) -> dict[str, float]:
    """A decoding step with and without `activate_past_recording`, in turns, and the bytes of a recorded token."""
    model, token = embedded(), torch.ones(1, 1, dtype=torch.long)
    plain, recorded = filled(model, 512).fork(2)
    recorded.activate_past_recording()
    seconds: dict[str, list[float]] = {"plain": [], "recording": []}
    sizes = []
    for _ in range(WARM_UP + steps):
        seconds["plain"].append(clock(lambda: model(token, cache=plain)))
        seconds["recording"].append(clock(lambda: model(token, cache=recorded)))
        sizes.append(recorded.nbytes()["recorded"])
    found = {"bytes_a_token": sizes[WARM_UP] - sizes[WARM_UP - 1], "most_bytes": max(sizes)}
    for kind, times in seconds.items():
        found[f"{kind}_ms"] = statistics.median(times[WARM_UP:]) * 1e3
        found[f"{kind}_mean_ms"] = statistics.mean(times[WARM_UP:]) * 1e3
    return found


@torch.no_grad()
def branches(tokens: int, prefill: int, runs: int) -> dict[str, Any]:
    """What takes the place of computing a context of `tokens` again, in milliseconds."""
    from modeling_kda import KdaHybridCache

    model = embedded()
    ids = torch.randint(model.config.vocab_size, (1, prefill), generator=torch.Generator().manual_seed(1))
    cache = filled(model, tokens)
    snapshot = cache.snapshot()

    def ms(call: Callable[[], Any]) -> float:
        return statistics.median([clock(call) for _ in range(1 + runs)][1:]) * 1e3

    def step(cache: KdaHybridCache) -> None:
        model(ids[:, :1], cache=cache)

    def branch() -> None:
        for fork in cache.fork(BRANCHES):
            step(fork)

    def restore() -> None:
        cache.restore(snapshot)
        step(cache)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "session.safetensors"
        again = ms(lambda: model(ids, use_cache=True, logits_to_keep=1)) * tokens / prefill
        times = {
            f"prefill again, at least (that of {prefill:,} x {tokens / prefill:g})": again,
            "one step": ms(lambda: step(cache)),
            "snapshot": ms(cache.snapshot),
            "restore": ms(lambda: cache.restore(snapshot)),
            "restore and a step": ms(restore),
            f"fork({BRANCHES})": ms(lambda: cache.fork(BRANCHES)),
            f"fork({BRANCHES}), a step of each": ms(branch),
            "save": ms(lambda: cache.save(file)),
            "load": ms(lambda: KdaHybridCache.load(file, model.config)),
            "load and a step": ms(lambda: step(KdaHybridCache.load(file, model.config))),
        }
        return {"tokens": tokens, "ms": times, "file_bytes": file.stat().st_size, "cache_bytes": cache.nbytes()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few tokens: tries the script, measures nothing")
    parser.add_argument("--draft", metavar="FOLDER", help="a small model with the same tokenizer")
    given = parser.parse_args()
    draft = str(Path(given.draft).resolve()) if given.draft and Path(given.draft).is_dir() else None
    skipped = "" if draft else f" Without a draft model: `--draft` names no folder, it is {given.draft!r}."
    size = QUICK if given.quick else FULL
    cases = fresh("generation", draft=draft, **size["generation"])
    record = fresh("recording", **size["recording"])
    branching = fresh("branches", **size["branches"])

    generated = [
        [case["name"], case["prompt_tokens"], kind, x["tok_s"], x["speed"], x["accepted_each"], x["accepted_share"]]
        for case in cases
        for kind, x in case["kinds"].items()
    ]
    header = ["prompt", "tokens", "draft", "tok/s", "ratio", "accepted a forward", "accepted of drafted"]
    costs = [[kind, record[f"{kind}_ms"], record[f"{kind}_mean_ms"]] for kind in ("plain", "recording")]
    [again, *_] = branching["ms"].values()
    times = [[name, ms, again / ms] for name, ms in branching["ms"].items()]
    parts = [
        table(header, generated),
        f"The tokens are the same with every draft.{skipped}",
        table(["step of decoding", "median ms", "mean ms"], costs),
        f"{record['bytes_a_token']:,} bytes a recorded token, {record['most_bytes']:,} at most.",
        table([f"with {branching['tokens']:,} tokens in the cache", "ms", "ratio to prefill"], times),
        f"The file takes {branching['file_bytes'] / MIB:.3g} MiB.",
    ]
    report(parts, {"drafts": cases, "recording": record, "branches": branching})


if __name__ == "__main__":
    main()
