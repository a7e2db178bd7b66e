"""Writes what is measured into README.md and configuration/README.md.

    python -m tests.update_readme [FILE ...]

What the README's programs print, and the table of presets, are made anew. A FILE holds what `make bench` or `make
demo` printed; without it their numbers stay as they are. `test_readme.py`, `test_notebooks.py` and
`test_configuration_presets.py` fail if the rest is not what comes out here.

A block of Markdown that is made lies between `<!-- begin: NAME -->` and `<!-- end: NAME -->`. A ```text block right
after a ```python block is what that program prints.
"""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, KimiLinearConfig, KimiLinearForCausalLM
from transformers.utils import logging

import modeling_kda
from conversion import plans, stream
from conversion.checkpoint import Checkpoint
from tests.benchmarks import gpu_layer


ROOT = Path(__file__).parents[1]
README, PRESETS = ROOT / "README.md", ROOT / "configuration" / "README.md"
PROGRAM = re.compile(r"^```python\n(.*?)^```\n(?:\n?^```text\n(.*?)^```\n)?", re.M | re.S)

# The README loads released checkpoints of 98 GB and 1.56 TB. In their places lie these: one written by transformers'
# class, and a small K3.
RELEASED, RELEASED_K3 = "Kimi-Linear-48B-A3B-Instruct", "Kimi-K3"
RELEASED_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    "linear_num_heads": 3,
    "linear_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def marked(text: str, name: str) -> str:
    """What lies between the two marks of `name`."""
    return _between(name).search(text).group(2)


def with_marked(text: str, name: str, body: str) -> str:
    """`text` with `body` between the two marks of `name`, which must be there."""
    if not _between(name).search(text):
        raise KeyError(f"the page has no block {name!r} to write to")
    return _between(name).sub(lambda found: f"{found.group(1)}{body}{found.group(3)}", text)


def _between(name: str) -> re.Pattern:
    return re.compile(rf"(<!-- begin: {name} -->\n)(.*?)(<!-- end: {name} -->)", re.S)


# The README's programs


def run_programs(text: str) -> Iterator[tuple[str, str | None, str]]:
    """Runs the python blocks of `text` one after another in one namespace and in an empty folder.

    Yields: program, what the text shows as its output (None: nothing), what it printed.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, _working_in(folder):
        write_released(RELEASED)
        write_released_k3(RELEASED_K3)
        (Path(folder) / "configuration").symlink_to(ROOT / "configuration")
        for program, shown in (found.groups() for found in PROGRAM.finditer(text)):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(program, "README.md", "exec"), namespace)
            yield program, shown, printed.getvalue()


@contextlib.contextmanager
def _working_in(folder: str) -> Iterator[None]:
    """`contextlib.chdir`, which Python 3.10 lacks."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def write_released(folder: str | Path) -> None:
    """A small random checkpoint of transformers' own `kimi_linear`."""
    torch.manual_seed(0)
    KimiLinearForCausalLM(KimiLinearConfig(**RELEASED_SHAPE)).save_pretrained(folder)


def write_released_k3(folder: str | Path) -> None:
    """A small random checkpoint as Kimi K3 is released, with experts in MXFP4."""
    torch.manual_seed(0)
    shape = RELEASED_SHAPE | {"hidden_size": 64, "mlp_layer_types": None, "linear_gate_lower_bound": -5.0}
    shape |= {"q_lora_rank": 16, "attention_output_gate": True, "hidden_act": "situ", "situ_beta": 4.0}
    shape |= {"routed_expert_hidden_size": 32, "latent_moe_use_norm": True, "attn_res_block_size": 2}
    del shape["num_key_value_heads"]
    with tempfile.TemporaryDirectory() as ours, contextlib.redirect_stderr(io.StringIO()):
        modeling_kda.KdaHybridForCausalLM(modeling_kda.KdaHybridConfig(**shape)).save_pretrained(ours)
        stream.write(plans.to_released(Checkpoint(ours), "kimi_k3", mxfp4=True), folder)


def with_outputs(text: str) -> str:
    """`text` with the output of every program that shows one."""
    for program, shown, printed in run_programs(text):
        if shown is not None:
            before = f"```python\n{program}```\n\n```text\n"
            text = text.replace(f"{before}{shown}```\n", f"{before}{printed}```\n")
    return text


# The presets


def preset_table() -> str:
    """One row for every folder of configuration/."""
    header = [
        "preset", "layers (KDA + MLA)", "hidden", "parameters", "active per token",
        "state and window, bytes a sequence", "latents, bytes a token",
    ]  # fmt: skip
    rows = [header, ["---"] + ["---:"] * (len(header) - 1)]
    folders = [path.parent for path in PRESETS.parent.glob("*/config.json")]
    models = {folder.name: preset_model(folder) for folder in folders}
    for name, model in sorted(models.items(), key=lambda item: item[1].num_parameters()):
        config = model.config
        kda, mla = (config.layer_types.count(kind) for kind in ("linear_attention", "full_attention"))
        numbers = [config.hidden_size, model.num_parameters(), active_parameters(model), *memory_bytes(config)]
        rows.append([f"`{name}`", f"{kda + mla} ({kda} + {mla})", *(f"{number:,}" for number in numbers)])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def preset_model(folder: Path) -> modeling_kda.KdaHybridForCausalLM:
    """The model of a preset, without memory for its weights."""
    with torch.device("meta"):
        return modeling_kda.KdaHybridForCausalLM(AutoConfig.from_pretrained(folder))


def active_parameters(model: modeling_kda.KdaHybridForCausalLM) -> int:
    """Parameters that multiply something for a token: without unused experts, without a table that is looked up."""
    config, count = model.config, model.num_parameters()
    if not config.tie_word_embeddings:
        count -= model.get_input_embeddings().weight.numel()
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            count -= parameter.numel() // config.num_experts * (config.num_experts - config.num_experts_per_tok)
    return count


def memory_bytes(config: modeling_kda.KdaHybridConfig) -> tuple[int, int]:
    """Of a bfloat16 model: bytes a sequence that do not grow (states in float32), and bytes a token that do."""
    kda, mla = (config.layer_types.count(kind) for kind in ("linear_attention", "full_attention"))
    keys, values = (config.linear_num_heads * x for x in (config.linear_head_dim, config.linear_value_head_dim))
    state = keys * config.linear_value_head_dim * 4
    window = (config.linear_conv_kernel_dim - 1) * (2 * keys + values) * 2
    return kda * (state + window), mla * (config.kv_lora_rank + config.qk_rope_head_dim) * 2


# The demo and the benchmarks


def demo_lines(printed: str) -> str:
    """What `make demo` printed, from its first title on, without progress bars and blank ends."""
    lines = printed[printed.index("1. A model") :].splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines if "it/s" not in line and "s/it" not in line)


def benchmark_tables(printed: str) -> dict[str, str]:
    """Tables from the lines of JSON in what the benchmarks printed, by the name of the block where they stand."""
    makers = {
        "points": ("context", _context_table),
        "drafts": ("drafts", _drafts_tables),
        "steps": ("step", _step_table),
        "operations": ("layer", _layer_tables),
        "models": ("gpu", _gpu_table),
        "drift": ("drift", _drift_table),
    }
    blocks: dict[str, list[str]] = {}
    for report in _one_of_models([json.loads(x) for x in printed.splitlines() if x.startswith('{"machine"')]):
        key = next((key for key in makers if key in report), None)
        if key is not None:
            name, maker = makers[key]
        elif "seconds" in report["cases"][0]["ours"]:
            name, maker = "loading", _loading_table
        else:
            name, maker = "benchmarks", _benchmark_table
        blocks.setdefault(name, []).append(maker(report))
    return {name: "\n".join(tables) for name, tables in blocks.items()}


def _one_of_models(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`reports`, where those of the GPU's models, which may come one by one, are one."""
    first, *others = [report for report in reports if "models" in report] or [None]
    for other in others:
        if _where({**other["machine"], "command": ""}) != _where({**first["machine"], "command": ""}):
            raise ValueError(f"models of two machines make no table: {first['machine']} and {other['machine']}")
        first["models"] += other["models"]
        first["machine"]["command"] = "python -m tests.benchmarks.gpu_model"
    return [report for report in reports if "models" not in report or report is first]


def _context_table(report: dict[str, Any]) -> str:
    lines = [
        "| tokens of context | here, MB | full attention, MB | here, ms a token | full attention, static cache, ms "
        "| full attention, default cache, ms |\n",
        "| ---: | ---: | ---: | ---: | ---: | ---: |\n",
    ]
    for point in report["points"]:
        ours, peer, static = (point[side] for side in ("ours", "peer", "static"))
        sizes = [_digits(x["bytes"] / 1e6) for x in (ours, peer)]
        times = [_digits(x["ms"]) + " (computed)" * x["computed"] for x in (ours, static, peer)]
        lines.append(f"| {point['tokens']:,} | {' | '.join(sizes + times)} |\n")
    return "".join([*lines, _where(report["machine"])])


def _drafts_tables(report: dict[str, Any]) -> str:
    kinds = [kind for kind in report["drafts"][0]["kinds"] if kind != "plain"]
    lines = [
        f"| prompt | plain, tokens/s | {' | '.join(kinds)} |\n",
        f"| --- | ---: | {' | '.join(['---:'] * len(kinds))} |\n",
    ]
    for case in report["drafts"]:
        cells = [f"{x['speed']:.2f}x ({x['accepted_each']:.1f})" for x in (case["kinds"][kind] for kind in kinds)]
        lines.append(f"| {case['name']} | {_digits(case['kinds']['plain']['tok_s'])} | {' | '.join(cells)} |\n")
    branches = report["branches"]
    lines += [f"\n| after {branches['tokens']:,} tokens | ms |\n", "| --- | ---: |\n"]
    lines += [f"| {name} | {_digits(ms)} |\n" for name, ms in branches["ms"].items()]
    return "".join([*lines, _where(report["machine"])])


def _step_table(report: dict[str, Any]) -> str:
    lines = [
        "| batch | floor, us | here, all of a layer | fla, the recurrence alone | largest error here |\n",
        "| ---: | ---: | ---: | ---: | ---: |\n",
    ]
    for x in report["steps"]:
        times = [_digits(x["floor"]), *(_digits(x[side]["cold"]) if side in x else "-" for side in ("ours", "fla"))]
        lines.append(f"| {x['batch']} | {' | '.join(times)} | {x['error']:.0e} |\n")
    return "".join([*lines, _where(report["machine"])])


def _layer_tables(report: dict[str, Any]) -> str:
    return "\n\n".join(gpu_layer.tables(report)) + "\n" + _where(report["machine"])


def _gpu_table(report: dict[str, Any]) -> str:
    rows: dict[str, dict[str, str]] = {}
    units = {"tok_s": "tokens/s", "peak_gib": "peak GiB", "first": "first step, s"}
    for x in report["models"]:
        name = x["model"].replace("experts", "hybrid")
        for y in x["decode"]:
            kind = f"decode after {y['context']:,}, {y['cache']} cache, tokens/s"
            kind += ", experts" * ("experts" in x["model"])
            floor = f" (floor {_digits(y['floor'])})" if name == "hybrid" and y["cache"] == "static" else ""
            rows.setdefault(kind, {})[name] = _digits(y["tok_s"]) + floor
        if x["decode"] and "experts" not in x["model"]:
            rows.setdefault("first token of the first call, s", {})[name] = _digits(x["decode"][0]["first_call"])
        for y in x["prefill"]:
            rows.setdefault(f"prefill of {y['tokens']:,}, tokens/s", {})[name] = _digits(y["tok_s"])
            rows.setdefault(f"cache after {y['tokens']:,}, MiB", {})[name] = _digits(y["cache_mib"])
        for key, value in x.get("training", {}).items():
            if key == "first" and name != "hybrid":
                continue  # others find kernels compiled, or tune theirs for minutes
            rows.setdefault(f"training on 2 x 4,096, {units[key]}", {})[name] = _digits(value)
    names = list(dict.fromkeys(name for cells in rows.values() for name in cells))
    lines = [f"| | {' | '.join(names)} |\n", f"| --- | {' | '.join(['---:'] * len(names))} |\n"]
    lines += [f"| {kind} | {' | '.join(cells.get(name, '') for name in names)} |\n" for kind, cells in rows.items()]
    return "".join([*lines, _where(report["machine"])])


def _drift_table(report: dict[str, Any]) -> str:
    drift = report["drift"]
    lines = [
        f"| after {drift['tokens']:,} tokens | decoded to float64 | in chunks to float64 | decoded to in chunks |\n",
        "| --- | ---: | ---: | ---: |\n",
    ]
    names = ("decoded", "chunked", "decoded to chunked")
    rows = [(f"state of layer {x['layer']}", *(x[name] for name in names)) for x in drift["layers"]]
    for name, *numbers in [*rows, ("logits", *drift["logits"])]:
        lines.append(f"| {name} | {' | '.join(f'{x:.1e}' for x in numbers)} |\n")
    return "".join([*lines, _where(report["machine"])])


def _loading_table(report: dict[str, Any]) -> str:
    lines = [
        "| checkpoint on disk | GB | ours, s | transformers, s | ours, peak MiB | transformers, peak MiB |\n",
        "| --- | ---: | ---: | ---: | ---: | ---: |\n",
    ]
    for case in report["cases"]:
        sides = (case["ours"], case.get("peer"))
        seconds, memory = ([_digits(side[x]) if side else "-" for side in sides] for x in ("seconds", "peak_mib"))
        lines.append(f"| {case['name']} | {case['bytes'] / 1e9:.2f} | {' | '.join([*seconds, *memory])} |\n")
    return "".join([*lines, _where(report["machine"])])


def _benchmark_table(report: dict[str, Any]) -> str:
    times = "ms" in report["cases"][0]["ours"]
    unit, size = ("ms", "mib") if times else ("tokens/s", "peak_mib")
    lines = [
        f"| {'operation' if times else 'model'} | dtype | ours, {unit} | transformers, {unit} | times as fast "
        "| ours, MiB | transformers, MiB |\n",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |\n",
    ]
    for case in report["cases"]:
        ours, peer = case["ours"], case["peer"]
        if times:
            rows = [(case["name"], ours["ms"], peer["ms"], case["speed"])]
        else:
            batches = len(ours["tok_s"]) > 1
            rows = [
                (
                    f"{case['name']}, batch {n}" if batches else case["name"],
                    *(x["tok_s"][n] for x in (ours, peer)),
                    speed,
                )
                for n, speed in case["speed"].items()
            ]
        for name, a, b, speed in rows:
            numbers = [_digits(a), _digits(b), f"{speed:.1f}x", _digits(ours[size]), _digits(peer[size])]
            lines.append(f"| {name} | {case['dtype']} | {' | '.join(numbers)} |\n")
    return "".join([*lines, _where(report["machine"])])


def _where(here: dict[str, Any]) -> str:
    return (
        f"\n`{here['command']}`: {here.get('gpu', here['cpu'])}, threads: {here['cores']}, Python {here['python']}, "
        f"torch {here['torch']}, transformers {here['transformers']}, modeling_kda {here['modeling_kda']}.\n"
    )


def _digits(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def main() -> None:
    logging.disable_progress_bar()
    text = README.read_text()
    for file in sys.argv[1:]:  # first of all: a pipe ends when the benchmarks do, and nothing may disturb them
        printed = Path(file).read_text()
        if '{"machine"' in printed:
            for name, tables in benchmark_tables(printed).items():
                text = with_marked(text, name, tables)
        else:
            text = with_marked(text, "demo", f"```text\n{demo_lines(printed)}```\n")
    text = with_outputs(text)
    README.write_text(text)
    PRESETS.write_text(with_marked(PRESETS.read_text(), "presets", preset_table()))


if __name__ == "__main__":
    main()
