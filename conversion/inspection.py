"""Says what a checkpoint is: family, layers, parameters, bytes and types, what is missing or has no place. Reads the
heads of the files only."""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from modeling_kda.weights_kda import KIMI_K3, KIMI_LINEAR, family_of

from . import plans
from .checkpoint import Checkpoint


def describe(folder: str | Path) -> dict[str, Any]:
    """The findings by name; `problem` is None or says why the checkpoint cannot be loaded."""
    source = Checkpoint(folder, complete=False)
    found: dict[str, Any] = {"folder": str(source.folder), "model_type": source.config.get("model_type")}
    config = plans.read_config(source)
    layers, mlps = Counter(config.layer_types), Counter(config.mlp_layer_types)
    found["family"] = {KIMI_LINEAR: "Kimi-Linear", KIMI_K3: "Kimi K3"}[family_of(config)]
    found["layers"] = {
        "KDA": layers["linear_attention"],
        "MLA": layers["full_attention"],
        "dense": mlps["dense"],
        "sparse": mlps["sparse"],
    }
    found["experts"] = f"{config.num_experts}, {config.num_experts_per_tok} a token" if mlps["sparse"] else "none"
    found["files"] = len(set(source.files.values()))
    found["tensors"] = len(source.specs)
    # Two 4-bit numbers lie in a byte of codes; scales are no parameters.
    packed = {name for name in source.specs if name.endswith(("weight_packed", ".gate_up_proj", ".down_proj"))}
    packed = {name for name in packed if source.specs[name].dtype.itemsize == 1}
    scales = {name for name in source.specs if name.endswith("_scale")}
    found["parameters"] = sum(
        spec.numel * (2 if name in packed else 1) for name, spec in source.specs.items() if name not in scales
    )
    found["bytes"] = source.nbytes
    found["dtypes"] = dict(Counter(str(spec.dtype).removeprefix("torch.") for spec in source.specs.values()))
    found["experts in MXFP4"] = bool(packed)
    found["missing"] = source.missing
    found["problem"] = _problem(source, config)
    return found


def _problem(source: Checkpoint, config: Any) -> str | None:
    if source.missing:
        return f"{len(source.missing)} tensors of the index are in no file, such as `{source.missing[0]}`."
    try:
        if plans.is_ours(source):
            plans.check_complete(source, config, source.specs.values())
        else:
            plans.to_kda_hybrid(source)
    except ValueError as error:
        return str(error)
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="folder of the checkpoint")


def run(given: argparse.Namespace) -> None:
    found = describe(given.source)
    problem, missing = found.pop("problem"), found.pop("missing")
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{count} {kind}" for kind, count in value.items() if count)
        print(f"{name:>16}: {f'{value:,}' if type(value) is int else value}")
    if missing:
        print(f"{'missing':>16}: {len(missing):,} tensors")
    if problem:
        raise ValueError(problem)
    print(f"{'complete':>16}: every parameter has its tensor, every tensor its place")
