"""Many tokens on a GPU: the KDA operation by each backend, with its errors, and whole KDA layers with gradients.

    python -m tests.benchmarks.gpu_layer [--quick]

Milliseconds, medians, in bfloat16: 16 heads of 128, hidden size 2048. The floor is what goes in and out once, at the
speed of a copy that is measured here. Errors are those of outputs and states against the recurrence in float64 on the
same inputs, of tensors and gradients: the largest relative to the largest number, and the norm of all relative to the
norm, each of the tensor where it is worst. "random" inputs forget at once; of "slow" ones half of the channels forget
a thousandth a token, as those of trained models do; "repeated" are one key again and again, all of it written and
nearly nothing forgotten.
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


def inputs(kind: str, tokens: int, bound: float | None, rows: int = 1) -> KdaCall:
    noise = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, device=DEVICE)

    q, k, v, gate = (random(rows, tokens, HEADS, WIDTH).bfloat16() for _ in range(4))
    beta, bias = random(rows, tokens, HEADS), random(HEADS * WIDTH)
    if kind == "slow":
        bias = torch.where(bias > 0, -7.0, bias)
    elif kind == "repeated":
        k, beta, bias = k[:, :1].expand_as(k).contiguous(), beta + 4.0, torch.full_like(bias, -12.0)
    return KdaCall(q, k, v, gate, beta.bfloat16(), random(HEADS), bias, bound)


def backends(call: KdaCall) -> dict[str, Callable[[], Any]]:
    """What can run `call` here, by name."""
    able = [x for x in ops_kda.BACKENDS if x is not ops_reference and not (x.why_not() or x.refuses(call))]
    return {x.NAME: lambda x=x: x.run(call) for x in able}


def worst(got: list[Tensor], want: list[Tensor]) -> tuple[float, float]:
    """The largest error, and that of the norms."""
    pairs = [(x.double() - y, y) for x, y in zip(got, want, strict=True)]
    largest = max((off.abs().max() / y.abs().max()).item() for off, y in pairs)
    return largest, max((off.norm() / y.norm()).item() for off, y in pairs)


def errors(kind: str, bound: float | None, tokens: int) -> dict[str, tuple[float, float]]:
    """Of each backend."""
    call = inputs(kind, tokens, bound)
    want = ops_reference.run(changed(call, Tensor.double))
    return {name: worst(run(), want) for name, run in backends(call).items()}


def changed(call: KdaCall, change: Callable[[Tensor], Tensor]) -> KdaCall:
    return KdaCall(**{name: change(x) if isinstance(x, Tensor) else x for name, x in vars(call).items()})


def learn(call: KdaCall, run: Callable[[], Any]) -> list[Tensor]:
    """Output, state and gradients."""
    tensors = [x for x in vars(call).values() if isinstance(x, Tensor)]
    o, state = run()
    d_o = torch.arange(o.numel(), device=o.device).sin().bfloat16().view(o.shape)  # the same in every dtype of o
    return [o, state, *torch.autograd.grad(o, tensors, d_o.to(o.dtype))]


@torch.enable_grad()
def learning(kind: str, bound: float | None, rows: int, tokens: int, checked: int) -> dict[str, Any]:
    """Forward and backward, and errors of a shorter call."""
    short, long = (inputs(kind, n, bound, r) for n, r in ((checked, 1), (tokens, rows)))
    short, long = (changed(call, Tensor.requires_grad_) for call in (short, long))
    exact = changed(short, lambda x: x.detach().double().requires_grad_())
    want = learn(exact, lambda: ops_reference.run(exact))
    off = {name: worst(learn(short, run), want) for name, run in backends(short).items()}
    times = {name: 1e3 * median(lambda run=run: learn(long, run)) for name, run in backends(long).items()}
    return {"inputs": kind, "bound": bound, "rows": rows, "tokens": tokens, "ms": times, "errors": off}


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
def operations(tokens: list[int], rows: int, length: int, checked: int) -> dict[str, Any]:
    speed = bandwidth()
    times = [operation(n, bound, speed) for n in tokens for bound in BOUNDS]
    found = [
        {"inputs": kind, "bound": bound, "errors": errors(kind, bound, checked)} for kind in INPUTS for bound in BOUNDS
    ]
    learnt = [learning(kind, bound, rows, length, checked) for kind in INPUTS for bound in BOUNDS]
    return {"operations": times, "errors": found, "learning": learnt, "bandwidth": speed}


def tables(results: dict[str, Any]) -> list[str]:
    everything = [*results["operations"], *results["learning"]]
    names = list(dict.fromkeys(name for x in everything for name in x["ms"]))
    gates = {None: "softplus gate", -5.0: "bounded gate"}
    times = [
        [f"{x['tokens']:,}, {gates[x['bound']]}", x["floor"], *(x["ms"].get(name) for name in names)]
        for x in results["operations"]
    ]
    off = [
        [f"{x['inputs']}, {gates[x['bound']]}", *(_pair(x["errors"].get(name)) for name in names)]
        for x in results["errors"]
    ]
    learnt = [
        [f"{x['inputs']}, {gates[x['bound']]}", *(_timed(x, name) for name in names)] for x in results["learning"]
    ]
    layers = [
        [x["layer"], *(y["ms"] for y in x["forward"]), x["launches"], x["training"], x["training_launches"]]
        for x in results["layers"]
    ]
    forward = [f"{y['tokens']:,} tokens, ms" for y in results["layers"][0]["forward"]]
    return [
        table(["operation, ms", "floor", *names], times),
        table(["error: largest, of the norm", *names], off),
        table(["with gradients: ms (error: largest, of the norm)", *names], learnt),
        table(["a KDA layer", *forward, "kernels", "with gradients, ms", "kernels"], layers),
    ]


def _timed(result: dict[str, Any], name: str) -> str | None:
    return f"{result['ms'][name]:.3g} ({_pair(result['errors'][name])})" if name in result["ms"] else None


def _pair(numbers: tuple[float, float] | None) -> str | None:
    return None if numbers is None else ", ".join(f"{x:.0e}" for x in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short inputs: tries the script")
    quick = parser.parse_args().quick
    tokens = [1024] if quick else list(TOKENS)
    rows, length = (1, 1024) if quick else TRAINING
    results = operations(tokens, rows, length, 128 if quick else CHECKED)
    results["layers"] = [layer(name, tokens, rows, length) for name in LAYERS]
    report(tables(results), results)


if __name__ == "__main__":
    main()
