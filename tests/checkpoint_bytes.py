"""Checkpoints as bytes: safetensors files are read and written here without the library and without `conversion`."""

import json
import math
import random
from pathlib import Path
from typing import NamedTuple

from conversion.__main__ import main


SIZES = {"F64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "U8": 1}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Raw(NamedTuple):
    """A tensor of a file."""

    dtype: str
    shape: list[int]
    data: bytes


def count(dtype: str, shape: list[int]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * SIZES[dtype]


def convert(tool: str, *arguments) -> None:
    """Runs a tool of the command line, which must succeed."""
    assert main([tool, *map(str, arguments)]) == 0


def head_of(path: Path) -> tuple[dict, int]:
    """The header of a safetensors file, and where its data begins."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size


def read_file(path: Path) -> dict[str, Raw]:
    """Every tensor of a file, which must fill it without gaps, each aligned to its type."""
    head, start = head_of(path)
    head.pop("__metadata__", None)
    data, end, tensors = path.read_bytes(), 0, {}
    assert start % 8 == 0
    for name, entry in sorted(head.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        assert first == end, f"{name}: a gap or an overlap"
        assert first % SIZES[entry["dtype"]] == 0, f"{name}: not aligned"
        assert last - first == count(entry["dtype"], entry["shape"]), name
        tensors[name] = Raw(entry["dtype"], entry["shape"], data[start + first : start + last])
        end = last
    assert start + end == len(data)
    return tensors


def read_folder(folder: Path) -> dict[str, Raw]:
    """Every tensor of a checkpoint. Its index, where there is one, must say exactly what the files hold."""
    if not (folder / INDEX).exists():
        assert [path.name for path in folder.glob("model*.safetensors")] == [SINGLE]
        return read_file(folder / SINGLE)
    files = {path.name: read_file(path) for path in sorted(folder.glob("model*.safetensors"))}
    index = json.loads((folder / INDEX).read_text())
    tensors = {name: tensor for part in files.values() for name, tensor in part.items()}
    assert index["weight_map"] == {name: file for file, part in files.items() for name in part}
    assert len(tensors) == sum(len(part) for part in files.values()), "a name is in two files"
    assert index["metadata"]["total_size"] == sum(len(tensor.data) for tensor in tensors.values())
    return tensors


def _head(shapes: dict[str, tuple[str, list[int]]]) -> tuple[bytes, list[str], int]:
    """The beginning of a file, the order of its tensors, and how many bytes they take."""
    head, end, order = {}, 0, sorted(shapes, key=lambda name: -SIZES[shapes[name][0]])
    for name in order:
        dtype, shape = shapes[name]
        size = count(dtype, shape)
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order, end


def write_file(path: Path, tensors: dict[str, Raw]) -> None:
    head, order, _ = _head({name: tensor[:2] for name, tensor in tensors.items()})
    path.write_bytes(head + b"".join(tensors[name].data for name in order))


def write_sparse(path: Path, shapes: dict[str, tuple[str, list[int]]]) -> int:
    """A file of zeros that take no room on the disk; returns its size."""
    head, _, size = _head(shapes)
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + size)
    return len(head) + size


def write_folder(folder: Path, config: dict, tensors: dict[str, Raw], shards: int) -> Path:
    """A checkpoint in so many files, with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    step, places = -(-len(names) // shards), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i * step : (i + 1) * step]
        write_file(folder / file, {name: tensors[name] for name in part})
        places |= dict.fromkeys(part, file)
    total = sum(len(tensor.data) for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return folder


def fails(capsys, *arguments) -> str:
    """Runs a tool that must fail; returns the one line that it says, behind progress bars."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"{arguments[0]}: "), said
    return said


def everything(folder: Path) -> dict[str, bytes]:
    """Every file of a folder and of those below it, by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def assert_same_tensors(got: dict[str, Raw], want: dict[str, Raw]) -> None:
    """The same names, types, shapes and bytes."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name][:2] == tensor[:2], f"{name}: {got[name][:2]} in place of {tensor[:2]}"
        assert got[name].data == tensor.data, f"{name}: other bytes"


def k3_release(
    layers: int = 4, hidden: int = 64, experts: int = 6, latent: int = 64, width: int = 96
) -> tuple[dict, dict[str, tuple[str, list[int]]]]:
    """A small Kimi K3 as released: its config, and the type and shape of each tensor by its name."""
    heads, size, query, key, nope, rope, value, vocabulary = 3, 16, 20, 24, 16, 8, 12, 97
    kda = [i + 1 for i in range(layers) if i % 4 in (0, 1, 2)]
    text = dict(
        model_type="kimi_linear",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        attn_res_block_size=2,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        moe_intermediate_size=width,
        num_experts=experts,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_renormalize=True,
        moe_router_activation_func="sigmoid",
        routed_expert_hidden_size=latent,
        latent_moe_use_norm=True,
        q_lora_rank=query,
        kv_lora_rank=key,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        mla_use_nope=True,
        mla_use_output_gate=True,
        dtype="bfloat16",
        tie_word_embeddings=False,
        linear_attn_config=dict(
            kda_layers=kda,
            full_attn_layers=[i + 1 for i in range(layers) if i + 1 not in kda],
            head_dim=size,
            num_heads=heads,
            short_conv_kernel_size=4,
            gate_lower_bound=-5.0,
            use_full_rank_gate=True,
        ),
    )
    rows = heads * size
    shapes: dict[str, list[int]] = {
        "model.embed_tokens.weight": [vocabulary, hidden],
        "lm_head.weight": [vocabulary, hidden],
        "model.norm.weight": [hidden],
        "model.output_attn_res_norm.weight": [hidden],
        "model.output_attn_res_proj.weight": [1, hidden],
    }
    for i in range(layers):
        layer, attention, moe = (f"model.layers.{i}.{part}" for part in ("", "self_attn.", "block_sparse_moe."))
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            shapes[f"{layer}{name}.weight"] = [hidden]
        shapes |= {f"{layer}{name}_res_proj.weight": [1, hidden] for name in ("self_attention", "mlp")}
        if i + 1 in kda:
            shapes |= {f"{attention}{name}_proj.weight": [rows, hidden] for name in "qkvg"}
            shapes |= {f"{attention}{name}_conv1d.weight": [rows, 1, 4] for name in "qkv"}
            shapes |= {f"{attention}o_proj.weight": [hidden, rows], f"{attention}f_a_proj.weight": [size, hidden]}
            shapes |= {f"{attention}f_b_proj.weight": [rows, size], f"{attention}b_proj.weight": [heads, hidden]}
            shapes |= {f"{attention}A_log": [size], f"{attention}dt_bias": [rows], f"{attention}o_norm.weight": [size]}
        else:
            shapes |= {f"{attention}q_a_proj.weight": [query, hidden], f"{attention}q_a_layernorm.weight": [query]}
            shapes |= {f"{attention}q_b_proj.weight": [heads * (nope + rope), query]}
            shapes |= {f"{attention}kv_a_proj_with_mqa.weight": [key + rope, hidden]}
            shapes |= {f"{attention}kv_a_layernorm.weight": [key]}
            shapes |= {f"{attention}kv_b_proj.weight": [heads * (nope + value), key]}
            shapes |= {f"{attention}g_proj.weight": [heads * value, hidden]}
            shapes |= {f"{attention}o_proj.weight": [hidden, heads * value]}
        dense, middle = (f"{layer}mlp.", 2 * hidden) if i == 0 else (f"{moe}shared_experts.", width)
        shapes |= {f"{dense}{name}_proj.weight": [middle, hidden] for name in ("gate", "up")}
        shapes |= {f"{dense}down_proj.weight": [hidden, middle]}
        if i == 0:
            continue
        shapes |= {f"{moe}gate.weight": [experts, hidden], f"{moe}gate.e_score_correction_bias": [experts]}
        shapes |= {f"{moe}routed_expert_down_proj.weight": [latent, hidden]}
        shapes |= {f"{moe}routed_expert_up_proj.weight": [hidden, latent], f"{moe}routed_expert_norm.weight": [latent]}
        for expert in range(experts):
            for name, (high, wide) in dict(w1=(width, latent), w2=(latent, width), w3=(width, latent)).items():
                shapes[f"{moe}experts.{expert}.{name}.weight_packed"] = [high, wide // 2]
                shapes[f"{moe}experts.{expert}.{name}.weight_scale"] = [high, wide // 32]

    def dtype(name: str) -> str:
        wide = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
        return "F32" if name.endswith(wide) else "U8" if name.endswith(("packed", "scale")) else "BF16"

    tensors = {f"language_model.{name}": (dtype(name), shape) for name, shape in shapes.items()}
    return dict(model_type="kimi_k3", dtype="bfloat16", tie_word_embeddings=False, text_config=text), tensors


def random_bytes(shapes: dict[str, tuple[str, list[int]]], seed: int = 0) -> dict[str, Raw]:
    """Tensors of such shapes; heads' decays with zeros behind them, and scales that are numbers."""
    source, tensors = random.Random(seed), {}
    for name, (dtype, shape) in shapes.items():
        data = source.randbytes(count(dtype, shape))
        if name.endswith("A_log"):
            data = data[:12] + bytes(len(data) - 12)
        elif name.endswith("weight_scale"):
            data = data.translate(bytes(min(i, 254) for i in range(256)))
        tensors[name] = Raw(dtype, shape, data)
    return tensors
