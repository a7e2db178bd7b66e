"""Conversions between layouts: released and back is byte for byte, what is written loads, and what does not fit."""

import json

import pytest
import torch
from checkpoint_bytes import assert_same_tensors, config_of, convert, fails, read_file, read_folder
from helpers import assert_close, golden, golden_tensors, k3_model, tiny_model, token_ids
from transformers import AutoModelForCausalLM

from conversion.__main__ import main
from modeling_kda import KdaHybridForCausalLM


LINEAR, K3, PACKED, RELEASED = "kimi_linear_original_tiny", "kimi_k3_tiny", "kimi_k3_tiny_mxfp4", "k3_released_tiny"
ALL = [LINEAR, K3, PACKED, RELEASED]
WAY_BACK = {LINEAR: "to-kimi-linear", K3: "to-kimi-k3", PACKED: "to-kimi-k3", RELEASED: "to-kimi-k3"}
# `k3_released_tiny` leaves out a default, `use_cache`, and names its images' part without having one.
ADDED, DROPPED = {RELEASED: {"text_config": {"use_cache": True}}}, {RELEASED: {"vision_config": None}}
EXPERT = "language_model.model.layers.{}.block_sparse_moe.experts.{}.{}.{}"


def dropped_and_added(config: dict, name: str) -> dict:
    """A release's config as it comes back."""
    config = {key: value for key, value in config.items() if key not in DROPPED.get(name, {})}
    for key, value in ADDED.get(name, {}).items():
        config[key] = {**config[key], **value}
    return config


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """`converted(name, *options)`: a release in our layout; each is made once."""
    made = {}

    def get(name: str, *options: str):
        key = (name, *options)
        if key not in made:
            folder = tmp_path_factory.mktemp("converted") / name
            convert("to-kda-hybrid", golden(name), folder, *options)
            made[key] = folder  # not sooner: there may be no release, or the tool may fail
        return made[key]

    return get


# There and back


@pytest.mark.parametrize(
    ("original", "shards"),
    [(False, []), (True, ["--max-shard-size", "70KB"])],
    ids=["in one file", "in shards, with the original"],
)
@pytest.mark.parametrize("name", ALL)
def test_there_and_back_is_byte_identical(converted, tmp_path, name, original, shards):
    ours = converted(name, *shards)
    options = ["--original", golden(name)] if original else []
    convert(WAY_BACK[name], ours, tmp_path / "back", *options, *shards)
    assert_same_tensors(read_folder(tmp_path / "back"), read_file(golden(name, "model.safetensors")))
    assert config_of(tmp_path / "back") == dropped_and_added(config_of(golden(name)), name)
    for folder in (ours, tmp_path / "back"):
        count = len(list(folder.glob("*.safetensors")))
        assert count > 8 if shards else count == 1
    # Other files come along, and nothing of ours stays.
    others = {path.name for path in golden(name).iterdir()} - {"expected.safetensors", "expected_grads.safetensors"}
    if shards:
        others = others - {"model.safetensors"} | {"model.safetensors.index.json"}
    found = {path.name for path in (tmp_path / "back").iterdir()}
    assert {name for name in found if not name.startswith("model-")} == others


@pytest.mark.parametrize(
    ("name", "dtype", "shards"),
    [
        (PACKED, "float32", []),
        (RELEASED, "bfloat16", []),
        (RELEASED, "float32", ["--max-shard-size", "70KB"]),
    ],
    ids=lambda x: "" if isinstance(x, list) else x,
)
def test_decoded_experts_return_byte_for_byte_with_the_original(converted, tmp_path, name, shards, dtype):
    ours = converted(name, "--unpack", "--dtype", dtype)
    stack = read_folder(ours)["model.layers.1.mlp.experts.gate_up_proj"]
    assert stack.dtype == {"bfloat16": "BF16", "float32": "F32"}[dtype]
    assert config_of(ours)["packed_experts"] is False
    assert "quantization_config" not in config_of(ours)
    convert(WAY_BACK[name], ours, tmp_path / "back", "--original", golden(name), *shards)
    assert_same_tensors(read_folder(tmp_path / "back"), read_file(golden(name, "model.safetensors")))
    assert config_of(tmp_path / "back") == dropped_and_added(config_of(golden(name)), name)


@pytest.mark.parametrize("name", [PACKED, RELEASED])
def test_decoded_experts_without_the_original_stay_decoded(converted, tmp_path, name):
    convert("to-kimi-k3", converted(name, "--unpack"), tmp_path / "back")
    got, want = read_folder(tmp_path / "back"), read_file(golden(name, "model.safetensors"))
    experts = {key for key in want if ".experts." in key}
    others = want.keys() - experts
    assert got.keys() == others | {key.removesuffix("_packed") for key in experts if key.endswith("_packed")}
    assert_same_tensors({key: got[key] for key in others}, {key: want[key] for key in others})
    assert "quantization_config" not in config_of(tmp_path / "back")["text_config"]
    # Decoded here once more: the low nibble comes first, and 2^(scale - 127) is for 32 numbers.
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for part in ("w1", "w2", "w3"):
        packed, scale = (want[EXPERT.format(1, 5, part, kind)] for kind in ("weight_packed", "weight_scale"))
        codes = torch.frombuffer(bytearray(packed.data), dtype=torch.uint8).view(packed.shape).long()
        power = torch.exp2(torch.frombuffer(bytearray(scale.data), dtype=torch.uint8).view(scale.shape).double() - 127)
        numbers = values[torch.stack([codes & 15, codes >> 4], -1)].flatten(-2).double()
        numbers *= power.repeat_interleave(32, -1)
        raw = got[EXPERT.format(1, 5, part, "weight")]
        assert (raw.dtype, raw.shape) == ("BF16", list(numbers.shape))
        assert raw.data == bytes(numbers.bfloat16().view(torch.uint8).flatten().tolist())


def test_native_kimi_linear_becomes_the_release(converted, tmp_path):
    convert("to-kimi-linear", converted("hf_kimi_linear_tiny"), tmp_path / "back")
    release = read_file(golden(LINEAR, "model.safetensors"))
    assert_same_tensors(read_folder(tmp_path / "back"), release)
    # The native config's fields come back, and with them `rope_scaling`, which every reader of the release expects.
    native = config_of(golden("hf_kimi_linear_tiny"))
    assert config_of(tmp_path / "back") == {**native, "rope_scaling": None}
    ours = config_of(golden(LINEAR))
    differ = {name for name in ours if config_of(tmp_path / "back").get(name, "absent") != ours[name]}
    assert differ == {"transformers_version"}


def test_released_parts_that_are_not_ours_are_kept_beside(converted):
    folder = converted(K3)
    vision = {key: raw for key, raw in read_file(golden(K3, "model.safetensors")).items() if "language" not in key}
    assert len(vision) == 12
    assert_same_tensors(read_file(folder / "released" / "model.safetensors"), vision)
    assert config_of(folder / "released") == config_of(golden(K3))
    assert not [name for name in read_folder(folder) if "vision" in name or "projector" in name]


# What is written loads


LOGITS = {
    LINEAR: "logits",
    "hf_kimi_linear_tiny": "logits",
    K3: "logits",
    PACKED: "logits",
    RELEASED: "logits_fp32_official",
}


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, ()) for name in LOGITS] + [(name, ("--unpack", "--dtype", "float32")) for name in (PACKED, RELEASED)],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else x,
)
def test_converted_folder_gives_the_golden_logits(converted, name, options):
    folder = converted(name, *options)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert type(model) is KdaHybridForCausalLM
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.packed_experts is (name in (PACKED, RELEASED) and not options)
    data = golden_tensors(name, "expected.safetensors")
    with torch.no_grad():
        assert_close(model.eval()(data["input_ids"]).logits, data[LOGITS[name]], 5e-4)


@pytest.mark.parametrize("name", ALL)
def test_converted_folder_holds_what_a_loaded_release_holds(converted, name):
    """Two ways from a release to our names: tensor by tensor on disk, and through `from_pretrained`."""
    packed = {"packed_experts": True} if name in (PACKED, RELEASED) else {}
    loaded = KdaHybridForCausalLM.from_pretrained(golden(name), dtype=torch.float32, **packed).state_dict()
    ours = KdaHybridForCausalLM.from_pretrained(converted(name), dtype=torch.float32).state_dict()
    assert ours.keys() == loaded.keys()
    for key, tensor in loaded.items():
        assert ours[key].dtype == tensor.dtype, key
        assert torch.equal(ours[key], tensor), key


@pytest.mark.parametrize(
    ("changes", "shards"),
    [({}, []), ({}, ["--max-shard-size", "30KB"]), (dict(num_experts=None), []), (dict(tie_word_embeddings=True), [])],
    ids=["one file", "shards", "dense", "tied"],
)
def test_native_kimi_linear_loads_what_is_exported(tmp_path, changes, shards):
    model = tiny_model(linear_value_head_dim=12, linear_output_gate_rank=12, **changes)
    model.save_pretrained(tmp_path / "ours")
    convert("to-kimi-linear", tmp_path / "ours", tmp_path / "released", *shards)
    native, info = AutoModelForCausalLM.from_pretrained(tmp_path / "released", output_loading_info=True)
    assert type(native).__module__.startswith("transformers.")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert_close(native.eval()(token_ids(19, 2)).logits, model(token_ids(19, 2)).logits, 1e-4)


@pytest.mark.parametrize("make", [tiny_model, k3_model], ids=["kimi_linear", "kimi_k3"])
def test_export_of_a_model_that_was_never_released_reads_back(make, tmp_path):
    model = make(linear_value_head_dim=12, **({"linear_output_gate_rank": 12} if make is tiny_model else {}))
    model.save_pretrained(tmp_path / "ours")
    convert("to-kimi-linear" if make is tiny_model else "to-kimi-k3", tmp_path / "ours", tmp_path / "released")
    convert("to-kda-hybrid", tmp_path / "released", tmp_path / "again")
    assert_same_tensors(read_folder(tmp_path / "again"), read_folder(tmp_path / "ours"))
    before, after = config_of(tmp_path / "ours"), config_of(tmp_path / "again")
    assert {name for name in before if before[name] != after.get(name)} == set()


# A model that was trained further


CHANGED = ("model.layers.2.mlp.experts.gate_up_proj", 5)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """`k3_released_tiny` loaded in bfloat16 and saved with a matrix of one expert and a few other weights changed."""
    folder = tmp_path_factory.mktemp("tuned") / "tuned"
    model = KdaHybridForCausalLM.from_pretrained(golden(RELEASED), dtype=torch.bfloat16)
    state, random = model.state_dict(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        expert = state[CHANGED[0]][CHANGED[1]]
        half = expert[: len(expert) // 2]  # w1; w3 below it stays as it is
        half.copy_(0.1 * torch.randn(half.shape, generator=random))
        half[:6, 3] = torch.tensor([0.875, 0.8671875, 0.87890625, 0.890625, -0.875, 1.0])  # where a scale goes up
        half[6], half[7, ::2] = 0, -0.0
        for name in ("model.layers.1.self_attn.A_log", "model.layers.3.self_attn.q_b_proj.weight", "lm_head.weight"):
            state[name].add_(0.01)
        state["model.layers.1.mlp.gate.weight"].add_(2**-12)  # more than bfloat16 holds
    model.save_pretrained(folder)
    return folder, {name: tensor.clone() for name, tensor in state.items()}


@pytest.fixture(scope="module")
def exported(tuned, tmp_path_factory):
    """That model as a release, with the original beside it."""
    folder = tmp_path_factory.mktemp("exported") / "exported"
    convert("to-kimi-k3", tuned[0], folder, "--original", golden(RELEASED))
    return folder


def test_export_of_a_tuned_model_changes_nothing_but_what_was_trained(tuned, exported):
    _, state = tuned
    got, want = read_folder(exported), read_file(golden(RELEASED, "model.safetensors"))
    assert got.keys() == want.keys()
    for name, raw in want.items():
        assert got[name][:2] == raw[:2], f"{name}: {got[name][:2]} in place of {raw[:2]}"
    changed = {name for name in want if got[name].data != want[name].data}
    expert = {EXPERT.format(2, 5, "w1", kind) for kind in ("weight_packed", "weight_scale")}
    prefix = "language_model."
    others = {
        f"{prefix}model.layers.1.self_attn.A_log",
        f"{prefix}model.layers.3.self_attn.q_b_proj.weight",
        f"{prefix}lm_head.weight",
        f"{prefix}model.layers.1.block_sparse_moe.gate.weight",
    }
    assert expert - changed <= {EXPERT.format(2, 5, "w1", "weight_scale")}
    # Convolutions are float32 in the release and bfloat16 in a model that was loaded so; the rest is exact.
    assert {name for name in changed - expert - others if "conv1d" not in name} == set()
    assert others <= changed
    rates = torch.frombuffer(bytearray(got[f"{prefix}model.layers.1.self_attn.A_log"].data), dtype=torch.float32)
    assert torch.equal(rates[:3], state["model.layers.1.self_attn.A_log"])
    assert not rates[3:].any()
    assert config_of(exported) == dropped_and_added(config_of(golden(RELEASED)), RELEASED)


def test_export_encodes_a_changed_expert_as_compressed_tensors_does(tuned, exported):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    _, state = tuned
    group = config_of(golden(RELEASED))["text_config"]["quantization_config"]["config_groups"]["group_0"]
    scheme = QuantizationScheme(**group)
    weight = state[CHANGED[0]][CHANGED[1]].chunk(2)[0].contiguous()
    blocks = weight.unflatten(-1, (-1, 32))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    want = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    got = read_folder(exported)
    for kind in ("weight_packed", "weight_scale"):
        raw = got[EXPERT.format(2, 5, "w1", kind)]
        assert (raw.dtype, raw.shape) == ("U8", list(want[kind].shape))
        assert raw.data == bytes(want[kind].flatten().tolist()), kind


def test_export_of_a_tuned_model_without_the_original(tuned, tmp_path):
    folder, state = tuned
    convert("to-kimi-k3", folder, tmp_path / "plain")
    convert("to-kimi-k3", folder, tmp_path / "packed", "--mxfp4")
    release = read_file(golden(RELEASED, "model.safetensors"))
    plain, packed = read_folder(tmp_path / "plain"), read_folder(tmp_path / "packed")
    assert packed.keys() == release.keys()
    assert plain[EXPERT.format(2, 5, "w1", "weight")].dtype == "BF16"
    for name, raw in release.items():
        assert packed[name].dtype == raw.dtype, name
        if ".experts." not in name:
            assert plain[name] == packed[name], name
            # Without the original nobody knows how many zeros lie behind `A_log`: as many as heads are wide at least.
            assert packed[name].shape == ([16] if name.endswith("A_log") else raw.shape), name
    quantization = config_of(tmp_path / "packed")["text_config"]["quantization_config"]
    assert quantization["format"] == "mxfp4-pack-quantized"
    assert "quantization_config" not in config_of(tmp_path / "plain")["text_config"]
    # Both read back: the plain one exactly, the packed one as its codes say, which is exact where nothing was changed.
    again = KdaHybridForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items() if "mlp.gate.weight" not in name)
    again = KdaHybridForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.bfloat16).state_dict()
    for stack in (name for name in state if ".mlp.experts." in name):
        for expert in range(8):
            same = torch.equal(again[stack][expert], state[stack][expert])
            assert same != ((stack, expert) == CHANGED), (stack, expert)


def test_export_takes_images_from_the_original(tmp_path):
    model = KdaHybridForCausalLM.from_pretrained(golden(K3))
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "ours")
    convert("to-kimi-k3", tmp_path / "ours", tmp_path / "with", "--original", golden(K3))
    convert("to-kimi-k3", tmp_path / "ours", tmp_path / "without")
    want = read_file(golden(K3, "model.safetensors"))
    found = {name: read_folder(tmp_path / name) for name in ("with", "without")}
    vision = {name for name in want if not name.startswith("language_model.")}
    for got, names in ((found["with"], want.keys()), (found["without"], want.keys() - vision)):
        assert got.keys() == names
        assert {name for name in names if got[name] != want[name]} == {"language_model.lm_head.weight"} | (
            set() if got is found["with"] else {name for name in names if name.endswith("A_log")}
        )
    assert config_of(tmp_path / "with") == config_of(golden(K3))
    alone = config_of(tmp_path / "without")
    assert "vision_config" not in alone
    assert alone["model_type"] == "kimi_k3"
    again = KdaHybridForCausalLM.from_pretrained(tmp_path / "without").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


# What does not fit


def test_to_kimi_linear_lists_what_kimi_linear_does_not_have(converted, tmp_path, capsys):
    said = fails(capsys, "to-kimi-linear", converted(K3), tmp_path / "out")
    for field in (
        "linear_gate_lower_bound",
        "linear_output_gate_rank",
        "q_lora_rank",
        "attention_output_gate",
        "routed_expert_hidden_size",
        "attn_res_block_size",
        "situ",
    ):
        assert field in said
    assert list(tmp_path.iterdir()) == []


def test_to_kimi_linear_does_not_take_packed_experts(converted, tmp_path, capsys):
    assert "--unpack" in fails(capsys, "to-kimi-linear", converted(PACKED), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tool", ["to-kimi-linear", "to-kimi-k3"])
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (dict(linear_value_head_dim=20, linear_output_gate_rank=12), "linear_value_head_dim"),
        (dict(linear_value_head_dim=12, linear_output_gate_rank=10), "linear_output_gate_rank"),
        (dict(linear_value_head_dim=12, linear_output_gate_rank=12, lora_norm_eps=1e-5), "lora_norm_eps"),
        (
            dict(linear_value_head_dim=12, linear_output_gate_rank=12, linear_output_gate_bias=True),
            "linear_output_gate_bias",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_to_a_release_names_the_field_that_it_cannot_say(tmp_path, capsys, tool, changes, field):
    tiny_model(**changes).save_pretrained(tmp_path / "ours")
    assert field in fails(capsys, tool, tmp_path / "ours", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_routers_that_weigh_by_biased_scores_are_kept_or_refused(tmp_path, capsys):
    """Kimi-Linear's released code does so; Kimi K3's does not."""
    fields = dict(linear_value_head_dim=12, linear_output_gate_rank=12, router_weights_use_bias=True)
    model = tiny_model(**fields)
    model.save_pretrained(tmp_path / "ours")
    assert "router_weights_use_bias" in fails(capsys, "to-kimi-k3", tmp_path / "ours", tmp_path / "out")
    assert main(["to-kimi-linear", str(tmp_path / "ours"), str(tmp_path / "out")]) == 0
    assert "biased scores" in capsys.readouterr().out
    again = KdaHybridForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert_close(again(token_ids(9)).logits, model(token_ids(9)).logits)


@pytest.mark.parametrize("pattern", ["ddss", "ssss", "dddd", "sdsd", "sdds", "dsds", "ssds"])
def test_layers_are_sparse_as_two_numbers_say(tmp_path, capsys, pattern):
    kinds = [{"d": "dense", "s": "sparse"}[letter] for letter in pattern]
    tiny_model(linear_value_head_dim=12, linear_output_gate_rank=12, mlp_layer_types=kinds).save_pretrained(
        tmp_path / "ours"
    )
    if pattern in ("dsds", "ssds"):  # multiples of a number start at layer 0
        assert "moe_layer_freq" in fails(capsys, "to-kimi-linear", tmp_path / "ours", tmp_path / "out")
        return
    convert("to-kimi-linear", tmp_path / "ours", tmp_path / "out")
    config = config_of(tmp_path / "out")
    dense, every = config["first_k_dense_replace"], config["moe_layer_freq"]
    assert ["sparse" if i >= dense and i % every == 0 else "dense" for i in range(4)] == kinds


@pytest.mark.parametrize("tool", ["to-kimi-linear", "to-kimi-k3"])
def test_to_a_release_needs_our_layout(tmp_path, capsys, tool):
    said = fails(capsys, tool, golden(LINEAR), tmp_path / "out")
    assert "kimi_linear" in said
    assert "to-kda-hybrid" in said
    assert list(tmp_path.iterdir()) == []


def test_to_kda_hybrid_of_our_layout_is_refused(converted, tmp_path, capsys):
    assert "already" in fails(capsys, "to-kda-hybrid", converted(LINEAR), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_to_kimi_k3_refuses_an_original_of_another_model(tuned, tmp_path, capsys):
    """It has the same experts, but another vocabulary and other widths."""
    said = fails(capsys, "to-kimi-k3", tuned[0], tmp_path / "out", "--original", golden(PACKED))
    assert PACKED in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_to_kimi_k3_names_the_expert_that_is_not_finite(tuned, tmp_path, capsys, number):
    model = KdaHybridForCausalLM.from_pretrained(tuned[0], dtype=torch.bfloat16)
    with torch.no_grad():
        model.state_dict()["model.layers.4.mlp.experts.down_proj"][3, 1, 2] = number
    model.save_pretrained(tmp_path / "ours")
    assert main(["to-kimi-k3", str(tmp_path / "ours"), str(tmp_path / "out"), "--mxfp4"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "finite" in said
    assert EXPERT.format(4, 3, "w2", "weight") in said or "model.layers.4.mlp.experts.down_proj" in said
    assert not (tmp_path / "out").exists()


def test_to_kimi_k3_in_mxfp4_needs_widths_of_whole_blocks(tmp_path, capsys):
    k3_model(linear_value_head_dim=12, moe_intermediate_size=36).save_pretrained(tmp_path / "ours")
    said = fails(capsys, "to-kimi-k3", tmp_path / "ours", tmp_path / "out", "--mxfp4")
    assert "36" in said
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_config_of_a_release_is_json_that_others_read(converted, tmp_path):
    """No NaN, no torch type, no field of ours."""
    convert("to-kimi-k3", converted(K3), tmp_path / "back")
    text = (tmp_path / "back" / "config.json").read_text()
    config = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert config["text_config"]["dtype"] == config["dtype"] == "float32"
    for name in ("layer_types", "mlp_layer_types", "situ_beta", "packed_experts", "linear_num_heads"):
        assert name not in config["text_config"]
