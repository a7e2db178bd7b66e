"""configuration_kda_hybrid.py: what it reads, what it derives, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
from helpers import K3, golden, golden_json, k3_config, tiny_config
from transformers import AutoConfig

from modeling_kda import KdaHybridConfig, KdaHybridModel


LINEAR, FULL = "linear_attention", "full_attention"


def released(**changes) -> KdaHybridConfig:
    """A config in the release's terms: six layers, two of them full attention."""
    fields = {
        "model_type": "kimi_linear",
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3, 5],
            "full_attn_layers": [4, 6],
            "head_dim": 24,
            "num_heads": 3,
            "short_conv_kernel_size": 5,
        },
    }
    linear = {**fields["linear_attn_config"], **changes.pop("linear", {})}
    linear = {name: value for name, value in linear.items() if value is not None}
    return KdaHybridConfig(**{**fields, "linear_attn_config": linear, **changes})


def fields_of(config: KdaHybridConfig) -> dict:
    return {name: getattr(config, name) for name in KdaHybridConfig.__annotations__}


def test_config_by_default_has_three_linear_layers_then_a_full_one():
    config = KdaHybridConfig()
    assert config.layer_types == [LINEAR, LINEAR, LINEAR, FULL] * 2
    assert config.mlp_layer_types == ["dense"] * 8
    assert config.linear_value_head_dim == config.linear_head_dim == 64
    assert config.qk_head_dim == 96
    assert config.linear_gate_lower_bound is None
    assert not config.router_weights_use_bias
    assert config.model_type == "kda_hybrid"


@pytest.mark.parametrize(
    ("layers", "types"), [(1, [LINEAR]), (4, [LINEAR] * 3 + [FULL]), (5, [LINEAR] * 3 + [FULL, LINEAR])]
)
def test_config_of_any_depth_follows_the_pattern(layers, types):
    assert KdaHybridConfig(num_hidden_layers=layers).layer_types == types


def test_config_with_experts_has_one_dense_layer_first():
    config = KdaHybridConfig(num_hidden_layers=4, num_experts=8, moe_intermediate_size=16)
    assert config.mlp_layer_types == ["dense", "sparse", "sparse", "sparse"]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"linear_gate_lower_bound": -5.0},
        {"q_lora_rank": 14, "attention_output_gate": True},
        {"linear_output_gate_bias": True},
        K3,
        {**K3, "packed_experts": True},
        {"hidden_act": "situ"},
    ],
    ids=["plain", "bound", "gate", "gate bias", "K3", "K3 packed", "SiTU"],
)
def test_config_is_equal_after_a_round_trip(tmp_path: Path, change):
    config = tiny_config(**change)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "kda_hybrid"
    for loaded in (KdaHybridConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is KdaHybridConfig
        assert fields_of(loaded) == fields_of(config)


@pytest.mark.parametrize(
    "kind",
    ["hf_kimi_linear_tiny", "kimi_linear_original_tiny", "kimi_k3_tiny", "kimi_k3_tiny_mxfp4", "k3_released_tiny"],
)
def test_config_read_from_a_release_is_saved_as_ours(tmp_path: Path, kind):
    config = KdaHybridConfig.from_pretrained(golden(kind))
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "kda_hybrid"
    assert fields_of(KdaHybridConfig.from_pretrained(tmp_path)) == fields_of(config)


def test_config_reads_the_released_48b_as_it_is():
    given = golden_json("released_configs", "kimi_linear_48b_a3b.json")
    config = KdaHybridConfig.from_dict(given)
    lists = given["linear_attn_config"]
    assert [i + 1 for i, kind in enumerate(config.layer_types) if kind == LINEAR] == lists["kda_layers"]
    assert [i + 1 for i, kind in enumerate(config.layer_types) if kind == FULL] == lists["full_attn_layers"]
    assert (config.layer_types.count(LINEAR), config.layer_types.count(FULL)) == (20, 7)
    assert config.layer_types[24:] == [LINEAR, LINEAR, FULL]
    assert config.mlp_layer_types == ["dense"] + ["sparse"] * 26
    want = {
        "vocab_size": 163840,
        "hidden_size": 2304,
        "num_hidden_layers": 27,
        "max_position_embeddings": 1048576,
        "pad_token_id": 163839,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "linear_num_heads": 32,
        "linear_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "linear_gate_lower_bound": None,
        "linear_output_gate_rank": 128,
        "num_attention_heads": 32,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "attention_output_gate": False,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-5,
        "lora_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    assert {name: getattr(config, name) for name in want} == want


def test_config_reads_the_released_kimi_k3_as_it_is():
    given = golden_json("released_configs", "kimi_k3.json")
    config = KdaHybridConfig.from_dict(given)
    lists = given["text_config"]["linear_attn_config"]
    assert [i + 1 for i, kind in enumerate(config.layer_types) if kind == LINEAR] == lists["kda_layers"]
    assert [i + 1 for i, kind in enumerate(config.layer_types) if kind == FULL] == lists["full_attn_layers"]
    assert (config.layer_types.count(LINEAR), config.layer_types.count(FULL)) == (69, 24)
    assert config.layer_types[88:] == [LINEAR, LINEAR, LINEAR, FULL, FULL]
    assert config.mlp_layer_types == ["dense"] + ["sparse"] * 92
    want = {
        "vocab_size": 163840,
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "hidden_act": "situ",
        "situ_beta": 4.0,
        "situ_linear_beta": 25.0,
        "max_position_embeddings": 1048576,
        "pad_token_id": 163839,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "linear_num_heads": 96,
        "linear_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "linear_gate_lower_bound": -5.0,
        "linear_output_gate_rank": None,
        "linear_output_gate_bias": False,
        "num_attention_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "attention_output_gate": True,
        "intermediate_size": 33792,
        "moe_intermediate_size": 3072,
        "num_experts": 896,
        "num_experts_per_tok": 16,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "router_weights_use_bias": False,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "packed_experts": False,
        "attn_res_block_size": 12,
        "rms_norm_eps": 1e-5,
        "lora_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    }
    assert {name: getattr(config, name) for name in want} == want
    assert config.routed_width == 3584
    assert config.qk_head_dim == 192
    assert str(config.dtype) == "torch.bfloat16"
    assert not any(hasattr(config, name) for name in ("text_config", "vision_config", "linear_attn_config"))


@pytest.mark.parametrize("kind", ["kimi_k3_tiny_mxfp4", "k3_released_tiny"])
def test_config_keeps_the_quantization_of_a_release_verbatim(kind, tmp_path: Path):
    given = golden_json(kind, "config.json")["text_config"]["quantization_config"]
    config = KdaHybridConfig.from_pretrained(golden(kind))
    assert config.quantization_config == given
    config.save_pretrained(tmp_path)
    assert KdaHybridConfig.from_pretrained(tmp_path).quantization_config == given


def test_config_of_a_release_without_quantization_has_none():
    assert not hasattr(KdaHybridConfig.from_pretrained(golden("kimi_k3_tiny")), "quantization_config")


@pytest.mark.parametrize("change", [{"packed_experts": True}, {"initializer_range": 0.5}, {"num_experts_per_tok": 3}])
def test_config_of_a_release_takes_changes(change):
    config = KdaHybridConfig.from_pretrained(golden("kimi_k3_tiny_mxfp4"), **change)
    assert {name: getattr(config, name) for name in change} == change


@pytest.mark.parametrize("given", [{}, {"text_config": None}, {"vision_config": {"hidden_size": 3}}])
def test_config_of_a_kimi_k3_needs_a_text_config(given):
    with pytest.raises(ValueError, match="'kimi_k3' needs a `text_config`"):
        KdaHybridConfig.from_dict({"model_type": "kimi_k3", **given})


@pytest.mark.parametrize("value", [{"num_key_value_heads": 2}, {"mla_use_nope": False}, {"topk_method": "greedy"}])
def test_config_of_a_kimi_k3_refuses_what_it_cannot_honour(value):
    given = golden_json("kimi_k3_tiny", "config.json")
    given["text_config"] |= value
    with pytest.raises(ValueError, match=f"`{next(iter(value))}`"):
        KdaHybridConfig.from_dict(given)


def test_config_widens_the_experts_to_the_hidden_size_without_a_latent():
    assert (k3_config().routed_width, tiny_config().routed_width) == (32, 60)


def test_config_reads_the_same_from_both_layouts():
    hf, original = (golden_json(name, "config.json") for name in ("hf_kimi_linear_tiny", "kimi_linear_original_tiny"))
    assert fields_of(KdaHybridConfig.from_dict(hf)) == fields_of(KdaHybridConfig.from_dict(original))
    config = KdaHybridConfig.from_dict(original)
    assert config.layer_types == [LINEAR, LINEAR, LINEAR, FULL, LINEAR, FULL]
    assert (config.linear_num_heads, config.linear_head_dim, config.num_experts_per_tok) == (3, 24, 2)


def test_config_reads_the_release_s_own_names():
    config = released(
        num_expert_group=2,
        moe_renormalize=False,
        model_max_length=77,
        first_k_dense_replace=2,
        mla_use_output_gate=True,
    )
    assert config.linear_conv_kernel_dim == 5
    assert (config.n_group, config.norm_topk_prob, config.max_position_embeddings) == (2, False, 77)
    assert config.mlp_layer_types == ["dense"] * 2 + ["sparse"] * 4
    assert config.attention_output_gate


def test_config_counts_experts_by_layer_frequency():
    assert released(moe_layer_freq=2).mlp_layer_types == ["dense", "dense", "sparse", "dense", "sparse", "dense"]


@pytest.mark.parametrize(
    ("linear", "types"),
    [
        ({"full_attn_layers": None}, [LINEAR, LINEAR, LINEAR, FULL, LINEAR, FULL]),
        ({"full_attn_layers": [4]}, [LINEAR, LINEAR, LINEAR, FULL, LINEAR, FULL]),
        ({"kda_layers": [2], "full_attn_layers": [6]}, [FULL, LINEAR, FULL, FULL, FULL, FULL]),
        ({"kda_layers": [], "full_attn_layers": None}, [FULL] * 6),
        ({"kda_layers": [6, 1], "full_attn_layers": []}, [LINEAR, FULL, FULL, FULL, FULL, LINEAR]),
    ],
)
def test_config_makes_layers_in_no_list_full_attention(linear, types):
    assert released(linear=linear).layer_types == types


@pytest.mark.parametrize(
    ("linear", "message"),
    [
        ({"kda_layers": [0, 1, 2]}, r"`kda_layers` holds \[0\].*from 1 to `num_hidden_layers` \(6\)"),
        ({"kda_layers": [1, 7, 8]}, r"`kda_layers` holds \[7, 8\]"),
        ({"full_attn_layers": [0, 4]}, r"`full_attn_layers` holds \[0\]"),
        ({"full_attn_layers": [-1]}, r"`full_attn_layers` holds \[-1\]"),
        ({"full_attn_layers": [3, 4, 5]}, r"layers \[3, 5\].*`kda_layers` and `full_attn_layers`"),
        ({"kernel_size": 4}, r"`linear_attn_config`.*'kernel_size'"),
    ],
)
def test_config_names_what_is_wrong_in_the_lists(linear, message):
    with pytest.raises(ValueError, match=message):
        released(linear=linear)


@pytest.mark.parametrize(
    "change",
    [
        {"mla_use_nope": False},
        {"moe_router_activation_func": "softmax"},
        {"attention_bias": True},
        {"num_nextn_predict_layers": 1},
        {"num_key_value_heads": 2},
    ],
)
def test_config_refuses_released_fields_it_cannot_honour(change):
    with pytest.raises(ValueError, match=f"`{next(iter(change))}`"):
        released(**change)


@pytest.mark.parametrize("change", [{"rope_theta": 1.0}, {"rope_scaling": {"type": "yarn"}}, {"head_dim": 3}])
def test_config_overlooks_what_changes_nothing(change):
    assert fields_of(released(**change)) == fields_of(released())


EXPERTS = {"num_experts": 8, "moe_intermediate_size": 16}
PACKED = {"num_experts": 8, "moe_intermediate_size": 32, "packed_experts": True}
INCONSISTENT = [
    ({"num_hidden_layers": 3, "layer_types": [LINEAR] * 2}, ["layer_types", "num_hidden_layers"]),
    ({"num_hidden_layers": 3, "mlp_layer_types": ["dense"] * 4}, ["mlp_layer_types", "num_hidden_layers"]),
    ({"num_hidden_layers": 1, "layer_types": ["linear_atention"]}, ["layer_types[0]", "'linear_attention'?"]),
    ({"num_hidden_layers": 1, "mlp_layer_types": ["spares"]}, ["mlp_layer_types[0]", "'sparse'?"]),
    *(
        ({name: value}, [name, repr(value)])
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "linear_num_heads",
            "linear_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "num_attention_heads",
            "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "q_lora_rank", "linear_output_gate_rank",
            "routed_expert_hidden_size", "attn_res_block_size",
        )
        for value in (0, -3)
    ),
    ({**EXPERTS, "moe_intermediate_size": 0}, ["moe_intermediate_size"]),
    ({**EXPERTS, "num_experts_per_tok": 0}, ["num_experts_per_tok"]),
    ({**EXPERTS, "n_group": 0}, ["n_group"]),
    ({**EXPERTS, "topk_group": 0}, ["topk_group"]),
    ({"num_experts": 8}, ["moe_intermediate_size"]),
    ({"mlp_layer_types": ["sparse"] * 8, "moe_intermediate_size": 16}, ["num_experts"]),
    ({"qk_rope_head_dim": -1}, ["qk_rope_head_dim"]),
    ({**EXPERTS, "n_shared_experts": -1}, ["n_shared_experts"]),
    ({"rms_norm_eps": 0.0}, ["rms_norm_eps"]),
    ({"lora_norm_eps": -1e-6}, ["lora_norm_eps"]),
    ({"attention_dropout": 1.0}, ["attention_dropout"]),
    ({"attention_dropout": -0.1}, ["attention_dropout"]),
    ({"linear_gate_lower_bound": 5.0}, ["linear_gate_lower_bound", "below 0", "-5.0"]),
    ({"linear_gate_lower_bound": 0.0}, ["linear_gate_lower_bound"]),
    ({**EXPERTS, "n_group": 3}, ["n_group", "num_experts"]),
    ({**EXPERTS, "n_group": 2, "topk_group": 3}, ["topk_group", "n_group"]),
    ({**EXPERTS, "num_experts_per_tok": 9}, ["num_experts_per_tok", "num_experts"]),
    ({**EXPERTS, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, ["num_experts_per_tok", "topk_group"]),
    ({**EXPERTS, "n_group": 8, "topk_group": 4}, ["n_group", "num_experts"]),
    ({"vocab_size": 10, "pad_token_id": 10}, ["pad_token_id", "vocab_size"]),
    ({"vocab_size": 10, "bos_token_id": -1}, ["bos_token_id", "vocab_size"]),
    ({"situ_beta": 4.0}, ["situ_beta", "hidden_act", "'silu'"]),
    ({"situ_linear_beta": 25.0}, ["situ_linear_beta", "hidden_act"]),
    ({"hidden_act": "situ", "situ_beta": -1.0}, ["situ_beta", "positive"]),
    ({"hidden_act": "situ", "situ_linear_beta": -1.0}, ["situ_linear_beta", "positive"]),
    ({"latent_moe_use_norm": True}, ["latent_moe_use_norm", "routed_expert_hidden_size"]),
    ({"linear_output_gate_bias": True}, ["linear_output_gate_bias", "linear_output_gate_rank"]),
    ({**PACKED, "moe_intermediate_size": 48}, ["packed_experts", "multiples of 32", "48"]),
    ({**PACKED, "routed_expert_hidden_size": 40}, ["packed_experts", "multiples of 32", "40"]),
    ({**PACKED, "hidden_size": 72}, ["packed_experts", "multiples of 32", "72"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), INCONSISTENT, ids=lambda x: ", ".join(x) if isinstance(x, dict) else "")
def test_config_names_the_fields_that_contradict_each_other(change, named):
    with pytest.raises(ValueError, match=f"`{re.escape(named[0])}`") as error:
        KdaHybridConfig(**change)
    for words in named:
        assert words in str(error.value)


def test_config_is_checked_again_when_a_model_is_built():
    config = tiny_config()
    config.num_experts_per_tok = 9
    with pytest.raises(ValueError, match="`num_experts_per_tok`"):
        KdaHybridModel(config)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("num_expert", "num_experts"),
        ("hidden_sise", "hidden_size"),
        ("linear_head_dims", "linear_head_dim"),
        ("num_expert_per_tok", "num_experts_per_tok"),
        ("layer_type", "layer_types"),
        ("kv_lora_ranks", "kv_lora_rank"),
    ],
)
def test_config_suggests_the_field_that_was_meant(name, near):
    with pytest.raises(ValueError, match=f"`{name}`; did you mean `{near}`"):
        KdaHybridConfig(**{name: 4})


def test_config_keeps_fields_of_others():
    config = KdaHybridConfig(quantization_config={"quant_method": "x"}, my_own_note="kept")
    assert config.my_own_note == "kept"
    assert config.quantization_config == {"quant_method": "x"}


@pytest.mark.parametrize("kind", ["llama", "kimi_k2", "deepseek_v3"])
def test_config_refuses_another_model_s(kind):
    ours = "'kda_hybrid', 'kimi_linear', 'kimi_k3' and 'kda'"
    with pytest.raises(ValueError, match=f"`model_type` is {kind!r}.*{ours}.*AutoConfig"):
        KdaHybridConfig.from_dict({"model_type": kind, "hidden_size": 64})


def test_config_says_nothing_of_machines():
    """A checkpoint must not remember the machine it was trained on."""
    words = ("backend", "kernel_impl", "device", "triton", "fla", "cuda")
    assert not [name for name in tiny_config().to_dict() for word in words if word in name.lower()]
