"""Many tokens on a GPU: the KDA operation by each backend, with its errors, and whole KDA layers with gradients.

    python -m tests.benchmarks.gpu_layer [--quick]

Milliseconds, medians, in bfloat16: 16 heads of 128, hidden size 2048. The floor is what goes in and out once, at the
speed of a copy that is measured here. Errors are those of outputs and states against the recurrence in float64 on the
same inputs: the largest relative to the largest number, and the norm of all relative to the norm. "random" inputs
forget at once; of "slow" ones half of the channels forget a thousandth a token, as those of trained models do;
"repeated" are one key again and again, all of it written and nearly nothing forgotten.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modeling_kda import KdaCall, ops_kda, ops_reference
from modeling_kda.layers_context import ForwardContext

from .common import report, table
from .gpu_model import bandwidth, build, median


DEVICE = "cuda"
HEADS, WIDTH, HIDDEN = 16, 128, 2048
TOKENS, TRAINING, CHECKED = (8192, 65_536), (2, 4096), 1024
INPUTS, BOUNDS = ("random", "slow", "repeated"), (None, -5.0)
LAYERS = ("hybrid", "transformers hybrid", "fla KDA")  # as `gpu_model` builds them


def inputs(kind: str, tokens: int, bound: float | None) -> KdaCall:
    noise = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, device=DEVICE)

    q, k, v, gate = (random(1, tokens, HEADS, WIDTH).bfloat16() for _ in range(4))
    beta, bias = random(1, tokens, HEADS), random(HEADS * WIDTH)
    if kind == "slow":
        bias = torch.where(bias > 0, -7.0, bias)
    elif kind == "repeated":
        k, beta, bias = k[:, :1].expand_as(k).contiguous(), beta + 4.0, torch.full_like(bias, -12.0)
    return KdaCall(q, k, v, gate, beta.bfloat16(), random(HEADS), bias, bound)


def backends(call: KdaCall) -> dict[str, Callable[[], Any]]:
    """What can run `call` here, by name."""
    able = [x for x in ops_kda.BACKENDS if x is not ops_reference and not (x.why_not() or x.refuses(call))]
    return {x.NAME: lambda x=x: x.run(call) for x in able}


def errors(kind: str, bound: float | None, tokens: int) -> dict[str, tuple[float, float]]:
    """Of each backend: the largest error and that of the norms."""
    call, found = inputs(kind, tokens, bound), {}
    exact = {name: x.double() for name, x in vars(call).items() if isinstance(x, Tensor)}
    want = ops_reference.run(KdaCall(**{**vars(call), **exact}))
    for name, run in backends(call).items():
        pairs = [(got.double() - x, x) for got, x in zip(run(), want)]
        largest = max((off.abs().max() / x.abs().max()).item() for off, x in pairs)
        found[name] = (largest, max((off.norm() / x.norm()).item() for off, x in pairs))
    return found


def operation(tokens: int, bound: float | None, speed: float) -> dict[str, Any]:
    call = inputs("slow", tokens, bound)
    bytes_ = sum(x.numel() * x.element_size() for x in (call.q, call.k, call.v, call.gate, call.beta, call.v))
    times = {name: 1e3 * median(run) for name, run in backends(call).items()}
    return {"tokens": tokens, "bound": bound, "floor": 1e3 * bytes_ / speed, "ms": times}


def layer(name: str, tokens: list[int], rows: int, length: int) -> dict[str, Any]:
    """The first layer of a model: times without gradients and with them, and how many kernels these are."""
    model = build(name, 4)
    module = model.model.layers[0].attn if name == "fla KDA" else model.model.layers[0].self_attn
    module.train()

    def run(x: Tensor) -> Tensor:
        if name == "hybrid":
            return module(x, ForwardContext(model.config, x), None)
        y = module(x)
        return y[0] if isinstance(y, tuple) else y

    def step(x: Tensor) -> None:
        module.zero_grad(set_to_none=True)
        run(x).backward(x)

    result: dict[str, Any] = {"layer": name, "forward": []}
    with torch.no_grad():
        for n in tokens:
            x = torch.randn(1, n, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
            result["forward"].append({"tokens": n, "ms": 1e3 * median(lambda x=x: run(x))})
        result["launches"] = launches(lambda: run(x))
    x = torch.randn(rows, length, HIDDEN, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    return {**result, "training": 1e3 * median(lambda: step(x)), "training_launches": launches(lambda: step(x))}


def launches(call: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


@torch.no_grad()
def operations(tokens: list[int], checked: int) -> dict[str, Any]:
    speed = bandwidth()
    times = [operation(n, bound, speed) for n in tokens for bound in BOUNDS]
    found = [
        {"inputs": kind, "bound": bound, "errors": errors(kind, bound, checked)} for kind in INPUTS for bound in BOUNDS
    ]
    return {"operations": times, "errors": found, "bandwidth": speed}


def tables(results: dict[str, Any]) -> list[str]:
    names = list(dict.fromkeys(name for x in results["operations"] for name in x["ms"]))
    gates = {None: "softplus gate", -5.0: "bounded gate"}
    times = [
        [f"{x['tokens']:,}, {gates[x['bound']]}", x["floor"], *(x["ms"].get(name) for name in names)]
        for x in results["operations"]
    ]
    off = [
        [f"{x['inputs']}, {gates[x['bound']]}", *(_pair(x["errors"].get(name)) for name in names)]
        for x in results["errors"]
    ]
    layers = [
        [x["layer"], *(y["ms"] for y in x["forward"]), x["launches"], x["training"], x["training_launches"]]
        for x in results["layers"]
    ]
    forward = [f"{y['tokens']:,} tokens, ms" for y in results["layers"][0]["forward"]]
    return [
        table(["operation, ms", "floor", *names], times),
        table(["error: largest, of the norm", *names], off),
        table(["a KDA layer", *forward, "kernels", "with gradients, ms", "kernels"], layers),
    ]


def _pair(numbers: tuple[float, float] | None) -> str | None:
    return None if numbers is None else ", ".join(f"{x:.0e}" for x in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short inputs: tries the script")
    quick = parser.parse_args().quick
    tokens = [1024] if quick else list(TOKENS)
    results = operations(tokens, 128 if quick else CHECKED)
    rows, length = (1, 1024) if quick else TRAINING
    results["layers"] = [layer(name, tokens, rows, length) for name in LAYERS]
    report(tables(results), results)


if __name__ == "__main__":
    main()
