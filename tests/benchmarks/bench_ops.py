"""The KDA operation against that of transformers' `kimi_linear`, from the same raw inputs, on the CPU.

    python -m tests.benchmarks.bench_ops [--only NAME] [--dtype DTYPE] [--quick]

Times are medians; memory is the peak above the level before the call; each number comes from a process of its own.
Ratios are peer / ours: above 1, ours is faster or smaller.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from modeling_kda import KdaCall, kda
from modeling_kda.ops_reference import run as reference

from .common import DTYPES, arguments, fresh, measured, ratio, report, table


HEADS = 8
WIDTH = 128  # of keys and of values
RUNS = {"ours": 5, "peer": 3}
STEPS = 50  # one timed run of decoding
STREAMS = ("q", "k", "v", "gate", "beta")
# name: kind, batch, tokens
CASES = {
    "forward T=512": ("forward", 1, 512),
    "forward T=4096": ("forward", 1, 4096),
    "forward+backward T=512": ("backward", 1, 512),
    "forward+backward T=4096": ("backward", 1, 4096),
    "decode step B=1": ("decode", 1, 1),
    "decode step B=8": ("decode", 8, 1),
}
QUICK = {
    "forward T=100": ("forward", 1, 100),
    "forward+backward T=100": ("backward", 1, 100),
    "decode step B=2": ("decode", 2, 1),
}


def inputs(batch: int, tokens: int, dtype: str) -> KdaCall:
    """Random raw inputs; decay rates and biases as a fresh model draws them, a state as after some tokens."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    q, k, v, gate = (torch.randn(batch, tokens, HEADS, WIDTH).to(kind) for _ in range(4))
    beta = torch.randn(batch, tokens, HEADS).to(kind)
    step = torch.empty(HEADS * WIDTH).uniform_(-6.9, -2.3).exp()  # log-uniform in [0.001, 0.1]
    A_log, dt_bias = torch.empty(HEADS).uniform_(1, 16).log(), step.expm1().log()
    state = 0.1 * torch.randn(batch, HEADS, WIDTH, WIDTH)
    return KdaCall(q, k, v, gate, beta, A_log, dt_bias, state=state, overwrite_state=True)


def ours(call: KdaCall) -> tuple[Tensor, Tensor]:
    return kda(call)


def peer(call: KdaCall) -> tuple[Tensor, Tensor]:
    """As transformers' layer: its gate in float32, beta's sigmoid in the dtype at hand, its choice of function.

    The state, if any, is in its layout `[B, H, K, V]`.
    """
    from transformers.models.kimi_linear import modeling_kimi_linear as theirs

    x = call.gate.float() + call.dt_bias.view(call.gate.shape[-2:])
    g = -call.A_log.exp().unsqueeze(-1) * torch.where(x > 20.0, x, torch.log(1.0 + torch.exp(x)))
    one = call.state is not None and call.q.shape[1] == 1
    run = theirs.recurrent_kimi_delta_attention if one else theirs.chunk_kimi_delta_attention
    return run(
        call.q,
        call.k,
        call.v,
        g=g,
        beta=torch.sigmoid(call.beta),
        initial_state=call.state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


SIDES = {"ours": ours, "peer": peer}


def work(side: str, kind: str, batch: int, tokens: int, dtype: str) -> Callable[[], None]:
    """What is measured, as a function without arguments."""
    run, call = SIDES[side], inputs(batch, tokens, dtype)
    if kind == "decode":
        state = call.state

        @torch.no_grad()
        def decode() -> None:
            nonlocal state
            for _ in range(STEPS):
                state = run(replace(call, state=state))[1]

        return decode
    call = replace(call, state=None)
    if kind == "forward":
        return torch.no_grad()(lambda: run(call))
    wanted = [getattr(call, name).requires_grad_() for name in STREAMS]
    d_out = torch.randn_like(call.v)
    return lambda: torch.autograd.grad(run(call)[0], wanted, d_out)


def measure(side: str, kind: str, batch: int, tokens: int, dtype: str) -> dict[str, Any]:
    """One side of one case."""
    work(side, kind, 1, min(tokens, 64), dtype)()  # libraries load, threads start
    result = measured(work(side, kind, batch, tokens, dtype), RUNS[side])
    return {"ms": result.pop("seconds") * 1e3 / (STEPS if kind == "decode" else 1), **result}


@torch.no_grad()
def differences(tokens: int, dtype: str) -> dict[str, float]:
    """Largest differences of outputs, and of each from the recurrence in float64."""
    call = replace(inputs(1, tokens, dtype), state=None)
    streams = {name: getattr(call, name).double() for name in (*STREAMS, "A_log", "dt_bias")}
    truth = reference(replace(call, **streams))[0]
    a, b = ours(call)[0], peer(call)[0]

    def largest(x: Tensor, y: Tensor) -> float:
        return (x.double() - y.double()).abs().max().item()

    return {
        "ours_peer": largest(a, b),
        "ours_truth": largest(a, truth),
        "peer_truth": largest(b, truth),
        "largest_output": truth.abs().max().item(),
    }


def main() -> None:
    given = arguments(__doc__)
    dtypes = [given.dtype] if given.dtype else DTYPES
    results, rows = [], []
    for name, (kind, batch, tokens) in (QUICK if given.quick else CASES).items():
        for dtype in dtypes:
            if given.only not in name:
                continue
            case = {"kind": kind, "batch": batch, "tokens": tokens, "dtype": dtype}
            a, b = (fresh("measure", side=side, **case) for side in SIDES)
            speed, memory = ratio(b["ms"], a["ms"]), ratio(b["mib"], a["mib"])
            results.append({"name": name, **case, "ours": a, "peer": b, "speed": speed, "memory": memory})
            rows.append([name, dtype, a["ms"], b["ms"], speed, a["mib"], b["mib"], memory])
    header = ["operation", "dtype", "ours ms", "peer ms", "ratio", "ours MiB", "peer MiB", "ratio of MiB"]
    accuracy, tokens = {}, 100 if given.quick else 512
    if given.only in "accuracy":
        accuracy = {dtype: fresh("differences", tokens=tokens, dtype=dtype) for dtype in dtypes}
    columns = ["ours - peer", "ours - float64", "peer - float64", "largest output"]
    errors = table([f"largest difference, T={tokens}", *columns], [[k, *x.values()] for k, x in accuracy.items()])
    report([table(header, rows), errors], {"cases": results, "accuracy": accuracy})


if __name__ == "__main__":
    main()
