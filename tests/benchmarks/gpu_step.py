"""One decoded token of a KDA layer between its projections, on a GPU: our kernel, and fla's of the recurrence alone.

    python -m tests.benchmarks.gpu_step [--heads N] [--quick]

Microseconds inside a CUDA graph, where the host does not count: medians. "cold": states and weights come from memory,
because as many layers take turns as do not fit into the GPU's cache; that is how a model decodes. "warm": one layer
again and again. The floor is the state read once and written once, at the speed of a copy that is measured here.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from modeling_kda import ops_reference
from modeling_kda.ops_kda import mixer
from modeling_kda.ops_mixer import MixerCall, compose

from .common import report, table
from .gpu_model import bandwidth


BATCHES, WIDTH, TAPS = (1, 8, 64), 128, 4
LAYERS_MIB = 160  # of states: more than twice the cache of an H200


def microseconds(step: Callable[[int], Any], calls: int, replays: int = 30) -> float:
    """A call of `step(i)`, i from 0 to `calls` - 1, inside a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(calls):
            step(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            step(i)
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / calls)
    return statistics.median(times[3:])


def layer(batch: int, heads: int, seed: int) -> MixerCall:
    """A random call for one token. Half of the channels forget slowly, as those of trained models do."""
    noise = torch.Generator("cuda").manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise, device="cuda")

    H, D = heads, heads * WIDTH
    bias = torch.where(torch.rand(D, generator=noise, device="cuda") < 0.5, -6.0, 0.0)
    q, k, v = random(batch, 1, 3 * D).bfloat16().split([D, D, D], -1)
    return MixerCall(
        q=q,
        k=k,
        v=v,
        taps=tuple(random(D, TAPS) for _ in range(3)),
        window=random(batch, TAPS - 1, 3 * D).bfloat16(),
        gate=random(batch, 1, H, WIDTH).bfloat16(),
        beta=random(batch, 1, H).bfloat16(),
        A_log=random(H),
        dt_bias=bias,
        lower_bound=None,
        state=random(batch, H, WIDTH, WIDTH),
        out_gate=random(batch, 1, H, WIDTH).bfloat16(),
        norm=random(WIDTH),
        eps=1e-5,
        overwrite=True,
    )


def error(call: MixerCall) -> float:
    """The largest error of the kernel's output and state against float64, relative to their maxima."""
    wide = {
        name: x.double() for name, x in vars(call).items() if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    exact = MixerCall(**{**vars(call), **wide, "taps": tuple(x.double() for x in call.taps), "overwrite": False})
    want = compose(exact, ops_reference.run)
    got = mixer(MixerCall(**{**vars(call), "overwrite": False}))
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got[:2], want[:2]))


def recurrence(call: MixerCall) -> Callable[[], Any] | None:
    """fla's kernel of the recurrence, which writes the state where it lies. None where fla is not installed."""
    try:
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
    except ImportError:
        return None
    q, k, v = (x.contiguous().view_as(call.gate) for x in (call.q, call.k, call.v))
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first")
    given = {**dict.fromkeys(flags, True), "output_final_state": True, "inplace_final_state": True}
    tensors = (q, k, v, call.gate, call.beta, call.A_log, call.dt_bias, call.state)
    return lambda: fused_recurrent_kda_fwd(*tensors, WIDTH**-0.5, **given)


def timed(steps: list[Callable[[], Any]], calls: int) -> dict[str, float]:
    """Microseconds of `calls` steps, in turn, and of the first again and again."""
    return {
        "cold": microseconds(lambda i: steps[i % len(steps)](), calls),
        "warm": microseconds(lambda i: steps[0](), calls),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="one batch size")
    given = parser.parse_args()
    speed, results = bandwidth(), []
    for batch in BATCHES[:1] if given.quick else BATCHES:
        bytes_ = batch * given.heads * WIDTH * WIDTH * 4
        layers = [layer(batch, given.heads, seed) for seed in range(max(2, LAYERS_MIB * 2**20 // bytes_))]
        calls = min(len(layers), 40)
        result = {"batch": batch, "error": error(layers[0]), "floor": 2e6 * bytes_ / speed}
        steps = {"ours": [lambda call=call: mixer(call) for call in layers]}
        if (peer := recurrence(layers[0])) is not None:
            steps["fla"] = [peer, *(recurrence(call) for call in layers[1:])]
        result.update({name: timed(each, calls) for name, each in steps.items()})
        results.append(result)
        del layers, steps
        torch.cuda.empty_cache()
    header = ["batch", "floor (us)", "ours, all of it, cold", "warm", "fla, recurrence alone, cold", "warm", "error"]
    rows = [
        [
            str(x["batch"]),
            x["floor"],
            *(x.get(n, {}).get(t) for n in ("ours", "fla") for t in ("cold", "warm")),
            f"{x['error']:.1e}",
        ]
        for x in results
    ]
    report([table(header, rows)], {"heads": given.heads, "bytes_a_second": speed, "steps": results})


if __name__ == "__main__":
    main()
