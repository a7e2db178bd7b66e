"""What the benchmarks share: fresh processes, clocks, memory, the table and the JSON line at its end."""

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


ROOT = Path(__file__).parents[2]
DTYPES = ("float32", "bfloat16")
SLOW = 20.0  # Seconds. A first run that takes longer is the only one.
MIB = 2**20
FEW = 8  # Tokens that give a cache its tensors.


def arguments(description: str) -> argparse.Namespace:
    """The command line that both benchmarks understand."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", default="", metavar="NAME", help="only the cases with NAME in their name")
    parser.add_argument("--dtype", choices=DTYPES, help="only this dtype")
    parser.add_argument("--quick", action="store_true", help="small sizes: tries the script, measures nothing")
    return parser.parse_args()


def fresh(function: str, **arguments: Any) -> dict[str, Any]:
    """A function of the running benchmark in a Python of its own, which inherits no memory, cache or compiled kernel.

    Its arguments and what it returns must be JSON.
    """
    print(f"{time.strftime('%H:%M:%S')} {function} {arguments}", file=sys.stderr, flush=True)
    program = f"import json; from {_module()} import {function} as run; print(json.dumps(run(**{arguments!r})))"
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, **quiet}, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _module() -> str:
    return sys.modules["__main__"].__spec__.name


def embedded():
    """The model that ships with the package, in float32."""
    from modeling_kda import EMBEDDED_MODEL, KdaHybridForCausalLM

    return KdaHybridForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()


@torch.no_grad()
def filled(model, tokens: int):
    """The cache of one of our models as after `tokens` tokens, of random numbers: no time or size depends on them."""
    cache = model(torch.ones(1, FEW, dtype=torch.long), use_cache=True).cache
    for layer in cache.layers:
        if layer.kind == "latent":
            width = layer.contents(FEW)["latents"].shape[-1]
            layer.fill({"latents": torch.randn(1, tokens, width)})
    cache._set_length(tokens)
    return cache


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """`step` as a CUDA graph, after three runs that belong on a stream of their own. A call replays it and returns
    what the captured one did, whose tensors then hold the new numbers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return lambda: graph.replay() or result


def clock(call: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measured(call: Callable[[], Any], runs: int) -> dict[str, float]:
    """Time and memory of a call.

    Returns: `seconds`, the median of `runs` runs after a first one, or that one alone if it is slow; `runs`, how many
    those were; `mib`, the most memory in use during the first run above that before it, looked at every 2 ms.
    """
    before = peak = _resident_mib()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, _resident_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        seconds = [clock(call)]
    finally:
        done.set()
        watcher.join()
    if seconds[0] < SLOW:
        seconds = [clock(call) for _ in range(runs)]
    return {"seconds": statistics.median(seconds), "runs": len(seconds), "mib": peak - before}


def peak_mib() -> float:
    """The highest resident memory of this process so far, as the kernel counts it."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / MIB


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def ratio(more: float, less: float) -> float | None:
    """None where there is nothing to divide by."""
    return more / less if less > 0 else None


def machine() -> dict[str, Any]:
    """Where this ran, on what, and how it was called."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    packages = ("modeling_kda", "torch", "transformers")
    return {
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
        "cpu": next((x.split(":")[1].strip() for x in info if x.startswith("model name")), platform.processor()),
        "cores": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
    }


def _version(package: str) -> str:
    if package == "modeling_kda":
        from modeling_kda import __version__

        return __version__
    return importlib.metadata.version(package)


def table(header: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; numbers with three digits, or whole, and "x" columns as ratios."""

    def cell(name: str, value: Any) -> str:
        if isinstance(value, str):
            return value
        if value is None:
            return "-"
        text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        return text + "x" if name.startswith("ratio") else text

    lines = [header, ["---"] * len(header)] + [[cell(*pair) for pair in zip(header, row)] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(parts: list[str], results: dict[str, Any]) -> None:
    """Prints the tables, where and how they came about, and all of it as one line of JSON."""
    here = machine()
    print(*parts, sep="\n\n", end="\n\n")
    print(*(f"{name}: {value}" for name, value in here.items()), sep="\n", end="\n\n")
    print(json.dumps({"machine": here, **results}))
