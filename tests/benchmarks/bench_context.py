"""Bytes remembered and milliseconds per decoded token against the length of the context, on the CPU, in float32.

    python -m tests.benchmarks.bench_context [--quick] [--plot FILE.svg [--from FILE]]

The embedded model against full attention: a random Llama of transformers with as many layers, heads and parameters,
with the default cache, which is copied for every token, and with the static one, which has room for all. Neither time
nor bytes depend on what is remembered, so the caches are filled with random numbers; a check compares that with a
prefill. Lengths for which memory does not suffice are computed: bytes exactly, times on the line through the last two
that were measured.

`--plot` draws both panels, `--from` does so from what an earlier run printed.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from .common import clock, embedded, filled, fresh, peak_mib, ratio, report, table


SIDES = ("ours", "peer", "static")
LABELS = {"ours": "KDA hybrid (ours)", "peer": "full attention", "static": "full attention, static"}
COLOURS = {"ours": "#0969da", "peer": "#cf222e", "static": "#8250df"}
LENGTHS = tuple(1024 * 4**i for i in range(6))
QUICK = (32, 64, 128)
STEPS, FEWEST, WARM_UP = 20, 3, 2
BUDGET = 20.0  # Seconds of steps, after which FEWEST are enough.
# Peak over bytes remembered. Ours grows by a quarter, while the old rows are there; the peers copy one layer.
GROWTH = {"ours": 1.8, "peer": 1.25, "static": 1.25}
RESERVED = 4e9  # Bytes that the rest of the machine keeps.


def peer_config():
    """Llama with our layers, heads and vocabulary, and an MLP that makes as many parameters as ours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from modeling_kda import EMBEDDED_MODEL, KdaHybridConfig, KdaHybridForCausalLM

    ours = KdaHybridConfig.from_pretrained(EMBEDDED_MODEL)
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
    shape = {name: getattr(ours, name) for name in names}
    shape |= {"head_dim": ours.v_head_dim, "max_position_embeddings": 2 * LENGTHS[-1]}
    with torch.device("meta"):
        wanted = KdaHybridForCausalLM(ours).num_parameters()
        narrow, wide = (LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=i)).num_parameters() for i in (1, 2))
    return LlamaConfig(**shape, intermediate_size=1 + round((wanted - narrow) / (wide - narrow)))


def load(side: str):
    if side == "ours":
        return embedded()
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(peer_config()).eval()


def cache_of(side: str, model, tokens: int, prefill: bool):
    """A cache that remembers `tokens`, of a prefill or of random numbers."""
    from transformers import DynamicCache, StaticCache

    if side == "ours" and not prefill:
        return filled(model, tokens)
    cache = None  # ours makes its own
    if side == "peer":
        cache = DynamicCache(config=model.config)
    elif side == "static":
        cache = StaticCache(config=model.config, max_cache_len=tokens + WARM_UP + STEPS)
    if prefill:
        ids = torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1))
        return model(ids, cache=cache, use_cache=True, logits_to_keep=1).cache
    shape = (1, model.config.num_key_value_heads, tokens, model.config.head_dim)
    for layer in range(model.config.num_hidden_layers):
        cache.update(torch.randn(shape), torch.randn(shape), layer)
    return cache


def remembered(side: str, cache) -> dict[str, int]:
    """Bytes by kind: `recurrent` does not grow with the tokens."""
    if side == "ours":
        return {kind: cache.nbytes()[kind] for kind in ("recurrent", "latent")}
    tokens, tensors = int(cache.get_seq_length()), [x for layer in cache.layers for x in (layer.keys, layer.values)]
    return {"keys and values": sum(x[:, :, :tokens].nbytes for x in tensors)}


@torch.no_grad()
def measure(side: str, tokens: int, prefill: bool = False) -> dict[str, Any]:
    """One side at one length, in a process of its own."""
    model = load(side)
    cache = cache_of(side, model, tokens, prefill)
    kinds, token, seconds = remembered(side, cache), torch.ones(1, 1, dtype=torch.long), []

    def step() -> None:
        nonlocal token
        token = model(token, cache=cache, use_cache=True).logits.argmax(-1)

    while len(seconds) < WARM_UP + FEWEST or (len(seconds) < WARM_UP + STEPS and sum(seconds) < BUDGET):
        seconds.append(clock(step))
    ms = statistics.median(seconds[WARM_UP:]) * 1e3
    size = {"bytes": sum(kinds.values()), "kinds": kinds, "parameters": model.num_parameters()}
    return {**size, "ms": ms, "steps": len(seconds) - WARM_UP, "peak_mib": peak_mib(), "computed": False}


def compute(measured: list[dict[str, Any]], lengths: tuple[int, ...], tokens: int) -> dict[str, Any]:
    """What a length for which memory does not suffice would give, from what was measured at the shorter `lengths`."""
    last, length = measured[-1], lengths[len(measured) - 1]
    kinds = {kind: n if kind == "recurrent" else n * tokens // length for kind, n in last["kinds"].items()}
    slope = (last["ms"] - measured[-2]["ms"]) / (length - lengths[len(measured) - 2])
    ms = last["ms"] + slope * (tokens - length)
    size = {"bytes": sum(kinds.values()), "kinds": kinds, "parameters": last["parameters"]}
    return {**size, "ms": ms, "steps": 0, "peak_mib": None, "computed": True}


def free() -> int:
    """Bytes that this machine could still give."""
    line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def curve(side: str, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """One side at every length; once memory does not suffice, after two at least, all longer ones are computed."""
    points = [fresh("measure", side=side, tokens=tokens) for tokens in lengths[:2]]
    for tokens in lengths[2:]:
        measured = [point for point in points if not point["computed"]]
        point = compute(measured, lengths, tokens)
        fits = len(measured) == len(points) and point["bytes"] * GROWTH[side] < free() - RESERVED
        points.append(fresh("measure", side=side, tokens=tokens) if fits else point)
    return points


def check(tokens: int, points: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Whether filled caches are like those of a prefill: the same bytes, and about the same time."""
    found = {}
    for side in SIDES:
        real = fresh("measure", side=side, tokens=tokens, prefill=True)
        assert real["kinds"] == points[side]["kinds"], f"{side} remembers {real['kinds']} of a prefill: fill otherwise"
        found[side] = {"prefilled_ms": real["ms"], "filled_ms": points[side]["ms"]}
    return {"tokens": tokens, **found}


def plot(results: dict[str, Any], file: str) -> None:
    """Both panels as SVG, the same bytes for the same results."""
    try:
        import matplotlib.pyplot as plt
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise SystemExit(f"`--plot` needs matplotlib: pip install matplotlib ({error})") from error

    style = {"svg.hashsalt": "bench_context", "svg.fonttype": "none", "font.size": 11, "axes.spines.top": False}
    with plt.rc_context({**style, "axes.spines.right": False, "figure.facecolor": "white"}):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
        titles = {"bytes": "bytes remembered", "ms": "milliseconds per decoded token"}
        for panel, (key, title) in zip(axes, titles.items()):
            for side in SIDES if key == "ms" else ("ours", "peer"):  # a static cache has the same bytes
                colour = COLOURS[side]
                x = [point["tokens"] for point in results["points"]]
                y = [point[side][key] for point in results["points"]]
                n = sum(not point[side]["computed"] for point in results["points"])
                panel.plot(x[:n], y[:n], "o-", color=colour)
                panel.plot(x[n - 1 :], y[n - 1 :], "--", color=colour)
                panel.plot(x[n:], y[n:], "o", color=colour, markerfacecolor="white")
                at = {"xy": (x[-1], y[-1]), "xytext": (8, 0), "textcoords": "offset points", "va": "center"}
                panel.annotate(LABELS[side], **at, color=colour)
            panel.set_title(title, loc="left", pad=12)
            panel.set(xlabel="tokens of context", xscale="log", yscale="log")
            panel.set_xticks(x, [short(tokens, 1024, ("", "k", "M")) for tokens in x])
            panel.minorticks_off()
            panel.grid(color="#d0d7de", linewidth=0.5)
        axes[0].yaxis.set_major_formatter(FuncFormatter(lambda n, _: short(n, 1000, (" B", " kB", " MB", " GB"))))
        axes[1].yaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,g}"))
        if any(point[side]["computed"] for point in results["points"] for side in SIDES):
            figure.supxlabel("hollow: computed", fontsize=9, x=0.99, ha="right")
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})


def short(number: float, base: int, units: tuple[str, ...]) -> str:
    """As `4k`."""
    power = max(i for i in range(len(units)) if number >= base**i or not i)
    return f"{number / base**power:g}{units[power]}"


def printed(file: str) -> dict[str, Any]:
    """The results in what an earlier run printed."""
    lines = [json.loads(line) for line in Path(file).read_text().splitlines() if line.startswith('{"machine"')]
    found = [results for results in lines if "points" in results]
    if not found:
        raise SystemExit(f"{file} holds no line of JSON of this benchmark")
    return found[-1]


HEADER = ["tokens", "ours MB", "peer MB", "ratio", "ours ms", "peer ms", "ratio", "static ms", "ratio"]
HEADER += ["ours peak MiB", "peer peak MiB", "static peak MiB", "computed"]


def row(point: dict[str, Any]) -> list[Any]:
    """Of the table, as in HEADER."""
    ours, peer, static = (point[side] for side in SIDES)
    size = [ours["bytes"] / 1e6, peer["bytes"] / 1e6, ratio(peer["bytes"], ours["bytes"])]
    time = [ours["ms"], peer["ms"], ratio(peer["ms"], ours["ms"]), static["ms"], ratio(static["ms"], ours["ms"])]
    computed = ", ".join(side for side in SIDES if point[side]["computed"])
    return [f"{point['tokens']:,}", *size, *time, *(point[side]["peak_mib"] for side in SIDES), computed or "-"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny lengths: tries the script, measures nothing")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the results")
    parser.add_argument("--from", dest="source", metavar="FILE", help="with --plot: results that a run printed")
    given = parser.parse_args()
    if given.source and not given.plot:
        parser.error("--from goes with --plot")
    if given.source:
        plot(printed(given.source), given.plot)
        return
    lengths = QUICK if given.quick else LENGTHS
    curves = {side: curve(side, lengths) for side in SIDES}
    points = [{"tokens": n, **{side: curves[side][i] for side in SIDES}} for i, n in enumerate(lengths)]
    like = check(lengths[0], points[0])
    words = "{} of {:,} parameters, at {:,} tokens: {:.3g} ms after a prefill, {:.3g} ms filled, the same bytes."
    checks = [
        words.format(LABELS[x], points[0][x]["parameters"], lengths[0], like[x]["prefilled_ms"], like[x]["filled_ms"])
        for x in SIDES
    ]
    results = {"points": points, "check": like}
    report([table(HEADER, [row(point) for point in points]), "\n".join(checks)], results)
    if given.plot:
        plot(results, given.plot)


if __name__ == "__main__":
    main()
