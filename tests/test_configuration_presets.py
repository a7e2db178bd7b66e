"""The presets of configuration/: they load, and every number of its README is recomputed from shapes."""

import math

import pytest
import torch
from helpers import golden_json
from transformers import AutoConfig, AutoModelForCausalLM
from update_readme import PRESETS, marked, preset_model, preset_table

from modeling_kda import KdaHybridCache, KdaHybridConfig, KdaHybridForCausalLM


FOLDERS = {path.parent.name: path.parent for path in sorted(PRESETS.parent.glob("*/config.json"))}
ABOUT = {
    "tiny": (0, 1e6),
    "kda_hybrid_small": (0.9e8, 1.2e8),
    "kda_hybrid_k3_small": (1.2e8, 1.5e8),
    "kda_hybrid_1b": (0.9e9, 1.2e9),
    "kimi_linear_48b_a3b": (48.9e9, 49.2e9),
    "kimi_k3_text": (2.779e12, 2.78e12),
}


def table() -> dict[str, list[int]]:
    """The numbers of the README's table: by preset, layers, KDA, MLA, hidden, parameters, active, bytes, bytes."""
    rows = [line.strip("| \n").split(" | ") for line in marked(PRESETS.read_text(), "presets").splitlines()[2:]]
    words = {row[0].strip("`"): " ".join(row[1:]).translate(str.maketrans("", "", ",()+")).split() for row in rows}
    return {name: [int(word) for word in numbers] for name, numbers in words.items()}


def attention_sizes(c: KdaHybridConfig) -> dict[str, int]:
    """Parameters of one attention layer of each kind, from the shapes that the papers and the release give."""
    keys, values = c.linear_num_heads * c.linear_head_dim, c.linear_num_heads * c.linear_value_head_dim
    streams = 2 * keys + values
    gate = c.linear_head_dim * (c.hidden_size + keys)
    rank = c.linear_output_gate_rank
    output_gate = rank * (c.hidden_size + values) if rank else c.hidden_size * values
    small = c.linear_num_heads + keys + c.linear_value_head_dim  # A_log, dt_bias, norm
    beta = c.hidden_size * c.linear_num_heads
    linear = streams * (c.hidden_size + c.linear_conv_kernel_dim) + gate + output_gate + small + beta
    heads, latent = c.num_attention_heads, c.kv_lora_rank
    queries, width = c.hidden_size, heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
    queries = c.q_lora_rank * (c.hidden_size + 1 + width) if c.q_lora_rank else c.hidden_size * width
    queries += c.hidden_size * heads * c.v_head_dim * c.attention_output_gate
    down, up = c.hidden_size * (latent + c.qk_rope_head_dim), latent * heads * (c.qk_nope_head_dim + c.v_head_dim)
    full = queries + down + latent + up + heads * c.v_head_dim * c.hidden_size
    return {"linear_attention": linear + values * c.hidden_size, "full_attention": full}


def parameters(c: KdaHybridConfig, experts: int | None) -> int:
    """Parameters without input embeddings, with `experts` experts in each sparse layer."""
    attention = sum(attention_sizes(c)[kind] for kind in c.layer_types)
    dense = 3 * c.hidden_size * c.intermediate_size
    mlp = dense * c.mlp_layer_types.count("dense")
    if "sparse" in c.mlp_layer_types:
        latent, width = c.routed_expert_hidden_size, c.moe_intermediate_size
        sparse = experts * 3 * (latent or c.hidden_size) * width + c.n_shared_experts * 3 * c.hidden_size * width
        sparse += c.num_experts * c.hidden_size  # the router
        sparse += 2 * c.hidden_size * latent + latent * c.latent_moe_use_norm if latent else 0
        mlp += sparse * c.mlp_layer_types.count("sparse")
    norms = (2 * c.num_hidden_layers + 1) * c.hidden_size
    if c.attn_res_block_size:
        norms += (4 * c.num_hidden_layers + 2) * c.hidden_size  # a norm and a query each
    return attention + mlp + norms + c.vocab_size * c.hidden_size


def test_readme_lists_every_preset():
    assert list(table()) == sorted(FOLDERS, key=lambda name: ABOUT[name])
    assert FOLDERS.keys() == ABOUT.keys()


def test_readme_is_what_the_command_writes():
    assert marked(PRESETS.read_text(), "presets") == preset_table()


@pytest.mark.parametrize("name", FOLDERS)
def test_preset_loads_with_the_auto_class(name):
    config = AutoConfig.from_pretrained(FOLDERS[name])
    assert type(config) is KdaHybridConfig
    with torch.device("meta"):
        assert type(AutoModelForCausalLM.from_config(config)) is KdaHybridForCausalLM


@pytest.mark.parametrize("name", FOLDERS)
def test_preset_has_the_sizes_of_its_formulas(name):
    config = AutoConfig.from_pretrained(FOLDERS[name])
    layers, kda, mla, hidden, total, active, constant, grown = table()[name]
    assert (kda, mla) == (config.layer_types.count("linear_attention"), config.layer_types.count("full_attention"))
    assert (layers, hidden) == (kda + mla, config.hidden_size)
    embeddings = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    assert total == parameters(config, config.num_experts) + embeddings
    assert total == preset_model(FOLDERS[name]).num_parameters()
    assert active == parameters(config, config.num_experts_per_tok)
    low, high = ABOUT[name]
    assert low < total < high
    width = config.linear_num_heads * config.linear_head_dim
    assert config.linear_value_head_dim == config.linear_head_dim
    assert constant == kda * (width * config.linear_head_dim * 4 + (config.linear_conv_kernel_dim - 1) * 3 * width * 2)
    assert grown == mla * (config.kv_lora_rank + config.qk_rope_head_dim) * 2


def test_k3_small_preset_has_every_part_of_the_release():
    small, release = (AutoConfig.from_pretrained(FOLDERS[name]) for name in ("kda_hybrid_k3_small", "kimi_k3_text"))
    same = ("hidden_act", "situ_beta", "situ_linear_beta", "linear_gate_lower_bound", "linear_output_gate_rank")
    same += ("attention_output_gate", "latent_moe_use_norm", "n_shared_experts", "linear_head_dim", "v_head_dim")
    for name in (*same, "qk_nope_head_dim", "qk_rope_head_dim"):
        assert getattr(small, name) == getattr(release, name), name
    for config in (small, release):
        assert config.q_lora_rank < config.hidden_size > config.routed_expert_hidden_size
        assert config.num_hidden_layers % config.attn_res_block_size  # the last block is a short one
        assert config.layer_types[-2:] == ["full_attention"] * 2
        assert config.mlp_layer_types == ["dense"] + ["sparse"] * (config.num_hidden_layers - 1)


@pytest.mark.parametrize("name", ["kda_hybrid_small", "kda_hybrid_1b"])
def test_preset_shapes_have_three_linear_layers_to_one_and_heads_of_128(name):
    config = AutoConfig.from_pretrained(FOLDERS[name])
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * (config.num_hidden_layers // 4)
    assert config.linear_head_dim == config.linear_value_head_dim == config.qk_nope_head_dim == 128


def test_preset_tiny_runs_and_remembers_as_many_bytes_as_the_readme_says():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDERS["tiny"]), dtype=torch.bfloat16)
    cache = KdaHybridCache(model.config)
    with torch.no_grad():
        logits = model(torch.arange(2, 72)[None], cache=cache).logits
    assert logits.shape == (1, 70, model.config.vocab_size)
    assert logits.isfinite().all()
    *_, constant, grown = table()["tiny"]
    assert cache.nbytes() == {"recurrent": constant, "latent": 70 * grown, "recorded": 0}


@pytest.mark.parametrize("name", ["kimi_linear_48b_a3b", "kimi_k3"])
def test_preset_of_a_release_is_the_release(name):
    released = KdaHybridConfig(**golden_json("released_configs", f"{name}.json")).to_dict()
    preset = AutoConfig.from_pretrained(FOLDERS["kimi_k3_text" if name == "kimi_k3" else name]).to_dict()
    assert preset["architectures"] == ["KdaHybridForCausalLM"]
    # The preset's experts are not packed.
    told_apart = ("architectures", "_name_or_path", "quantization_config")
    assert {k: x for k, x in preset.items() if k not in told_apart} == {
        k: x for k, x in released.items() if k not in told_apart
    }


def kimi_linear_tensors() -> dict[str, list[int]]:
    """Name and shape of every tensor of the released Kimi-Linear-48B-A3B, as its code declares them."""
    shapes = {name: [163840, 2304] for name in ("embed_tokens", "lm_head")} | {"norm": [2304]}
    kda = {
        **{f"{x}_proj": [4096, 2304] for x in "qkv"},
        **{f"{x}_conv1d": [4096, 1, 4] for x in "qkv"},
        **{f"{x}_a_proj": [128, 2304] for x in "fg"},
        **{f"{x}_b_proj": [4096, 128] for x in "fg"},
        "b_proj": [32, 2304],
        "A_log": [1, 1, 32, 1],
        "dt_bias": [4096],
        "o_norm": [128],
        "o_proj": [2304, 4096],
    }
    mla = {
        "q_proj": [6144, 2304],
        "kv_a_proj_with_mqa": [576, 2304],
        "kv_a_layernorm": [512],
        "kv_b_proj": [8192, 512],
        "o_proj": [2304, 4096],
    }

    def mlp(width: int) -> list[list[int]]:
        return [[width, 2304], [width, 2304], [2304, width]]

    for layer in range(27):
        attention = mla if layer + 1 in (4, 8, 12, 16, 20, 24, 27) else kda
        shapes |= {f"{layer}.attention.{name}": shape for name, shape in attention.items()}
        shapes |= {f"{layer}.{name}": [2304] for name in ("input_layernorm", "post_attention_layernorm")}
        if layer == 0:
            shapes |= {f"0.mlp.{i}": shape for i, shape in enumerate(mlp(9216))}
            continue
        shapes |= {f"{layer}.gate": [256, 2304], f"{layer}.gate.e_score_correction_bias": [256]}
        for expert in [*range(256), "shared"]:
            shapes |= {f"{layer}.experts.{expert}.{i}": shape for i, shape in enumerate(mlp(1024))}
    return shapes


def test_kimi_linear_preset_has_as_many_numbers_as_the_released_tensors():
    model = preset_model(FOLDERS["kimi_linear_48b_a3b"])
    released = {name: math.prod(shape) for name, shape in kimi_linear_tensors().items()}
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == sum(released.values())
    biases = sum(size for name, size in released.items() if "correction_bias" in name)
    assert model.num_parameters() == sum(released.values()) - biases
    assert f"{biases:,} numbers" in PRESETS.read_text()
