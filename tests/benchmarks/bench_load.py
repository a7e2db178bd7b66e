"""Loading and converting a checkpoint of some 2 GB: seconds, and the peak memory of a process that does only this.

    python -m tests.benchmarks.bench_load [--only NAME] [--quick]

The checkpoint is synthetic, in the layout of Kimi-Linear as released (bfloat16, experts one by one, in shards) or of
Kimi K3 (experts in MXFP4). transformers loads the first with its own `kimi_linear`; the second it cannot. The files
are in the page cache: this measures the work, not the disk. Memory counts mapped pages of the files too.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from .common import arguments, clock, fresh, peak_mib, ratio, report, table


KIMI_LINEAR = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "linear_num_heads": 8,
    "linear_head_dim": 128,
    "linear_output_gate_rank": 128,
    "num_attention_heads": 8,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "num_experts": 48,
    "num_experts_per_tok": 8,
    "dtype": "bfloat16",
}
KIMI_K3 = KIMI_LINEAR | {
    "linear_gate_lower_bound": -5.0,
    "linear_output_gate_rank": None,
    "q_lora_rank": 512,
    "attention_output_gate": True,
    "hidden_act": "situ",
    "situ_beta": 4.0,
    "situ_linear_beta": 25.0,
    "routed_expert_hidden_size": 1024,
    "latent_moe_use_norm": True,
    "attn_res_block_size": 4,
    "num_experts": 176,
    "packed_experts": True,
}
SMALL = {"num_hidden_layers": 4, "num_experts": 8, "vocab_size": 1024}
# name: the checkpoint it reads, and who can
CASES = {
    "load Kimi-Linear": ("kimi_linear", ("ours", "peer")),
    "load Kimi K3, experts decoded": ("kimi_k3", ("ours",)),
    "load Kimi K3, experts packed": ("kimi_k3", ("ours",)),
    "to-kda-hybrid, Kimi-Linear": ("kimi_linear", ("ours",)),
    "to-kda-hybrid, Kimi K3": ("kimi_k3", ("ours",)),
    "to-kda-hybrid --unpack, Kimi K3": ("kimi_k3", ("ours",)),
    "to-kimi-k3": ("kimi_k3 in ours", ("ours",)),
}


def write(folder: str, kind: str, quick: bool) -> dict[str, int]:
    """A random checkpoint, made tensor by tensor. In a process of its own."""
    from conversion import plans, stream
    from conversion.checkpoint import Checkpoint, Spec
    from modeling_kda import KdaHybridConfig

    fields = (KIMI_LINEAR if kind == "kimi_linear" else KIMI_K3) | (SMALL if quick else {})
    config = KdaHybridConfig(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.uint8:
            return torch.randint(112, 128, shape, generator=generator, dtype=dtype)  # a scale, or two small numbers
        return torch.randn(shape, generator=generator).mul_(0.02).to(dtype)

    jobs = []
    for name, tensor in model.state_dict().items():
        spec = Spec(name, tensor.dtype, tuple(tensor.shape))
        one = spec.numel // spec.shape[0] if ".experts." in name and spec.shape else spec.numel
        shape = spec.shape[1:] if one < spec.numel else spec.shape
        made = [
            stream.Piece((), lambda shape=shape, dtype=spec.dtype: (random(shape, dtype),), i)
            for i in range(0, spec.numel, one)
        ]
        jobs.append(stream.Job((spec,), tuple(made)))
    ours = Path(folder) / f"{kind} in ours"
    stream.write(stream.Plan(jobs, {"config.json": config.to_json_string()}), ours, workers=1, max_shard_size="500MB")
    plan = plans.to_released(Checkpoint(ours), kind)
    stream.write(plan, Path(folder) / kind, max_shard_size="500MB")
    return {"bytes": Checkpoint(Path(folder) / kind).nbytes}


def load(side: str, folder: str, packed: bool) -> dict[str, float]:
    """In a process of its own."""
    if side == "ours":
        from modeling_kda import KdaHybridForCausalLM as Model

        more: dict[str, Any] = {"packed_experts": True} if packed else {}
    else:
        from transformers import KimiLinearForCausalLM as Model

        more = {}
    before = peak_mib()
    seconds = clock(lambda: Model.from_pretrained(folder, **more))
    return {"seconds": seconds, "peak_mib": peak_mib(), "before_mib": before}


def convert(folder: str, target: str, tool: str, unpack: bool) -> dict[str, float]:
    """In a process of its own."""
    from conversion import plans, stream
    from conversion.checkpoint import Checkpoint

    before = peak_mib()

    def run() -> None:
        source = Checkpoint(folder)
        to_ours = tool == "to-kda-hybrid"
        plan = plans.to_kda_hybrid(source, unpack) if to_ours else plans.to_released(source, "kimi_k3")
        stream.write(plan, target, force=True, max_shard_size="500MB")

    return {"seconds": clock(run), "peak_mib": peak_mib(), "before_mib": before}


def main() -> None:
    given = arguments(__doc__.splitlines()[0])
    cases = {name: case for name, case in CASES.items() if given.only in name}
    results = []
    with tempfile.TemporaryDirectory() as folder:
        kinds = sorted({kind.removesuffix(" in ours") for kind, _ in cases.values()})
        sizes = {kind: fresh("write", folder=folder, kind=kind, quick=given.quick)["bytes"] for kind in kinds}
        for name, (kind, sides) in cases.items():
            place = str(Path(folder) / kind)
            case: dict[str, Any] = {"name": name, "bytes": sizes[kind.removesuffix(" in ours")]}
            for side in sides:
                if name.startswith("load"):
                    case[side] = fresh("load", side=side, folder=place, packed="packed" in name)
                else:
                    target = str(Path(folder) / "converted")
                    tool = name.split(" ")[0].rstrip(",")
                    case[side] = fresh("convert", folder=place, target=target, tool=tool, unpack="--unpack" in name)
                    shutil.rmtree(target, ignore_errors=True)
            if "peer" in case:
                case["speed"] = ratio(case["peer"]["seconds"], case["ours"]["seconds"])
                case["memory"] = ratio(case["peer"]["peak_mib"], case["ours"]["peak_mib"])
            results.append(case)
    header = ["case", "GB", "ours s", "peer s", "ratio s", "ours MiB", "peer MiB", "ratio MiB"]
    rows = [
        [
            case["name"],
            case["bytes"] / 1e9,
            case["ours"]["seconds"],
            case.get("peer", {}).get("seconds"),
            case.get("speed"),
            case["ours"]["peak_mib"],
            case.get("peer", {}).get("peak_mib"),
            case.get("memory"),
        ]
        for case in results
    ]
    report([table(header, rows)], {"cases": results})


if __name__ == "__main__":
    main()
