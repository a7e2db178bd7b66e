"""Loading and saving Kimi K3: its prefix, its images, its padded decays, its experts in MXFP4."""

import json
import shutil

import pytest
import torch
from helpers import assert_close, assert_identical, golden, golden_json, golden_tensors, tiny_model, token_ids
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from modeling_kda import (
    KdaHybridConfig,
    KdaHybridForCausalLM,
    KdaHybridForSequenceClassification,
    KdaHybridModel,
)
from modeling_kda.weights_mxfp4 import decode


PLAIN, PACKED, RELEASED = "kimi_k3_tiny", "kimi_k3_tiny_mxfp4", "k3_released_tiny"
WEIGHTS = "model.safetensors"
MOE = "language_model.model.layers.1.block_sparse_moe"
EXPERT = f"{MOE}.experts.5"
A_LOG = "language_model.model.layers.0.self_attn.A_log"
KEPT_IN_FLOAT32 = (
    "A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight",
    "mlp.gate.weight", "e_score_correction_bias",
)  # fmt: skip


def load(source, **options) -> KdaHybridForCausalLM:
    return KdaHybridForCausalLM.from_pretrained(source, **options).eval()


def quantization(name: str = PACKED) -> dict:
    return golden_json(name, "config.json")["text_config"]["quantization_config"]


def changed(folder, tensors=lambda x: None, config=lambda x: None, source: str = PACKED):
    """A copy of a golden checkpoint in `folder`, its tensors and the text model's config changed in place."""
    contents, written = golden_tensors(source, WEIGHTS), golden_json(source, "config.json")
    tensors(contents)
    config(written["text_config"])
    folder.mkdir(exist_ok=True)
    save_file(contents, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def saved_tensors(folder) -> dict[str, torch.Tensor]:
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


# Loading


@pytest.mark.parametrize("name", [PLAIN, PACKED, RELEASED])
def test_load_takes_every_tensor_of_the_text_model(name):
    """Each number of the file is in the model, under its name, but for the zeros behind A_log."""
    released, ours = golden_tensors(name, WEIGHTS), load(golden(name)).state_dict()
    layers = sum(".input_layernorm." in key for key in released)
    for key, tensor in released.items():
        if key.startswith(("vision_tower.", "mm_projector.")) or ".experts." in key:
            continue
        key = key.removeprefix("language_model.").replace(".block_sparse_moe.", ".mlp.")
        want = tensor[:3] if key.endswith("A_log") else tensor
        assert torch.equal(ours.pop(key), want), key
    for layer in range(1, layers):
        prefix, stacks = f"language_model.model.layers.{layer}.block_sparse_moe.experts", []
        for expert in range(8):
            matrices = []
            for part in ("w1", "w3", "w2"):
                key = f"{prefix}.{expert}.{part}.weight"
                matrices.append(released[key] if name == PLAIN else decode(
                    released[f"{key}_packed"], released[f"{key}_scale"], torch.float32
                ))  # fmt: skip
            stacks.append((torch.cat(matrices[:2]), matrices[2]))
        for i, stack in enumerate(("gate_up_proj", "down_proj")):
            got = ours.pop(f"model.layers.{layer}.mlp.experts.{stack}")
            assert torch.equal(got.float(), torch.stack([pair[i] for pair in stacks])), stack
    assert not ours


def test_load_leaves_images_out_by_name_and_says_how_many(messages):
    load(golden(PLAIN))
    images = [key for key in golden_tensors(PLAIN, WEIGHTS) if key.startswith(("vision_tower.", "mm_projector."))]
    assert len(images) == 12
    [text] = [text for text in messages() if "model of text" in text]
    assert "12 tensors" in text
    assert "mm_projector.post_norm.weight" in text


def test_load_without_images_says_nothing_of_them(messages):
    load(golden(RELEASED))
    assert not [text for text in messages() if "images" in text]


@pytest.mark.parametrize("key", ["vision_towel.weight", "language_model.model.layers.0.self_attn.extra.weight"])
def test_load_names_a_tensor_that_is_neither_text_nor_image(key, tmp_path):
    changed(tmp_path, lambda x: x.update({key: torch.ones(3)}))
    with pytest.raises(ValueError, match=key.removeprefix("language_model.").replace(".", r"\.")):
        load(tmp_path)


def test_load_cuts_the_zeros_behind_the_decay_rates():
    released, ours = golden_tensors(RELEASED, WEIGHTS), load(golden(RELEASED))
    assert released[A_LOG].shape == (16,)
    assert torch.equal(ours.model.layers[0].self_attn.A_log, released[A_LOG][:3])
    assert ours.model.layers[0].self_attn.A_log.shape == (3,)


@pytest.mark.parametrize(
    ("a_log", "words"),
    [
        (torch.tensor([1.0, 2.0, 3.0, 0.5]), "behind are not zero"),
        (torch.tensor([1.0, 2.0]), "3 heads"),
        (torch.ones(3, 2), "3 heads"),
    ],
    ids=["something behind", "too few", "a matrix"],
)
def test_load_names_decay_rates_that_do_not_fit_the_heads(a_log, words, tmp_path):
    changed(tmp_path, lambda x: x.update({A_LOG: a_log}))
    with pytest.raises((ValueError, RuntimeError), match=rf"(?s)A_log.*{words}"):
        load(tmp_path)


def without(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def unpacked(tensors) -> None:
    """One matrix of one expert as plain numbers."""
    codes, scales = (tensors.pop(f"{EXPERT}.w1.weight_{kind}") for kind in ("packed", "scale"))
    tensors[f"{EXPERT}.w1.weight"] = decode(codes, scales, torch.float32)


def without_a_number(tensors) -> None:
    tensors[f"{EXPERT}.w2.weight_scale"][3, 0] = 255


STACK, DOWN = r"model\.layers\.1\.mlp\.experts\.gate_up_proj", r"model\.layers\.1\.mlp\.experts\.down_proj"


@pytest.mark.parametrize("packed_experts", [False, True], ids=["decoded", "packed"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(f"{EXPERT}.w1.weight_packed", f"{EXPERT}.w1.weight_scale"), rf"{STACK}.*lack"),
        (without(f"{EXPERT}.w3.weight_scale"), rf"{STACK}.*lack"),
        (without(f"{EXPERT}.w2.weight_packed"), rf"{DOWN}.*lack"),
        (unpacked, rf"{STACK}.*MXFP4"),
        (without_a_number, rf"{DOWN}.*1 scale bytes of 255"),
    ],
    ids=["no matrix", "no scales", "no codes", "one that is not packed", "a scale byte without a number"],
)
def test_load_names_experts_that_are_not_whole(change, words, packed_experts, tmp_path):
    changed(tmp_path, change)
    with pytest.raises((ValueError, RuntimeError), match=f"(?s){words}"):
        load(tmp_path, packed_experts=packed_experts)


def test_load_names_a_stack_of_which_nothing_is_there(tmp_path):
    changed(tmp_path, lambda x: [x.pop(name) for name in list(x) if f"{MOE}.experts." in name and ".w2." in name])
    with pytest.raises(ValueError, match=DOWN):
        load(tmp_path)


def test_load_of_plain_experts_as_packed_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`packed_experts`"):
        load(golden(PLAIN), packed_experts=True)
    changed(tmp_path, config=lambda x: x.update(quantization_config=quantization()), source=PLAIN)
    with pytest.raises((ValueError, RuntimeError), match="`packed_experts`"):
        load(tmp_path, packed_experts=True)


def test_load_decides_by_the_tensors_what_is_packed(tmp_path):
    """Not by the config, whose patterns match tensors that are not quantised."""
    want = load(golden(PACKED)).state_dict()
    changed(tmp_path, config=lambda x: x.pop("quantization_config"))
    assert_identical(load(tmp_path).state_dict(), want)
    changed(tmp_path, config=lambda x: x.update(quantization_config=quantization()), source=PLAIN)
    assert_identical(load(tmp_path).state_dict(), load(golden(PLAIN)).state_dict())


# Classes and dtypes


def test_auto_class_loads_it_with_our_config():
    config = KdaHybridConfig.from_pretrained(golden(PACKED))
    model = AutoModelForCausalLM.from_pretrained(golden(PACKED), config=config)
    assert type(model) is KdaHybridForCausalLM
    assert_identical(model.state_dict(), load(golden(PACKED)).state_dict())
    assert config.quantization_config == quantization()  # the caller's is left alone


@pytest.mark.parametrize("packed_experts", [False, True])
def test_other_heads_load_it(packed_experts):
    want = load(golden(PACKED), packed_experts=packed_experts).model.state_dict()
    base = KdaHybridModel.from_pretrained(golden(PACKED), packed_experts=packed_experts)
    assert_identical(base.state_dict(), want)
    classifier = KdaHybridForSequenceClassification.from_pretrained(golden(PACKED), packed_experts=packed_experts)
    assert_identical(classifier.model.state_dict(), want)


@pytest.mark.parametrize("source", [PACKED, "kimi_linear_original_tiny"])
@pytest.mark.parametrize(
    "change", [{"num_labels": 3}, {"id2label": {0: "a", 1: "b", 2: "c"}}, {"output_hidden_states": True}], ids=str
)
def test_load_takes_changes_of_fields_that_every_config_has(change, source):
    model = KdaHybridForSequenceClassification.from_pretrained(golden(source), **change)
    assert {name: getattr(model.config, name) for name in change} == change
    assert model.score.weight.shape[0] == model.config.num_labels


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"dtype": "auto"}, {}], ids=str)
@pytest.mark.parametrize("packed_experts", [False, True], ids=["decoded", "packed"])
def test_load_in_bfloat16_keeps_decays_convolutions_and_routing_in_float32(options, packed_experts, tmp_path):
    model = load(golden(RELEASED), packed_experts=packed_experts, **options)
    released = golden_tensors(RELEASED, WEIGHTS)
    kept = [name for name in model.state_dict() if name.endswith(KEPT_IN_FLOAT32)]
    assert len(kept) == 6 * 6 + 8 * 2
    for name, tensor in model.state_dict().items():
        packed = packed_experts and ".experts." in name and "shared" not in name
        want = torch.uint8 if packed else torch.float32 if name in kept else torch.bfloat16
        assert tensor.dtype == want, name
    for name in ("q_conv1d.weight", "dt_bias", "o_norm.weight"):  # every bit of them
        key = f"model.layers.0.self_attn.{name}"
        assert torch.equal(model.state_dict()[key], released[f"language_model.{key}"])
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        assert model(token_ids(5)).logits.dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    assert_identical(load(tmp_path).state_dict(), model.state_dict())


def test_load_in_bfloat16_gives_every_expert_exactly():
    """MXFP4 needs no more than bfloat16."""
    half, whole = (load(golden(PACKED), dtype=dtype).state_dict() for dtype in (torch.bfloat16, torch.float32))
    for name in [name for name in whole if ".mlp.experts." in name]:
        assert torch.equal(half[name].float(), whole[name]), name


# Packed experts


def test_packed_experts_keep_the_bytes_of_the_file():
    released, model = golden_tensors(PACKED, WEIGHTS), load(golden(PACKED), packed_experts=True)
    for layer in range(1, 9):
        prefix = f"language_model.model.layers.{layer}.block_sparse_moe.experts"
        experts = model.model.layers[layer].mlp.experts
        for end, kind in (("", "packed"), ("_scale", "scale")):
            for expert in range(8):
                w1, w2, w3 = (released[f"{prefix}.{expert}.{w}.weight_{kind}"] for w in ("w1", "w2", "w3"))
                assert torch.equal(getattr(experts, f"gate_up_proj{end}")[expert], torch.cat([w1, w3]))
                assert torch.equal(getattr(experts, f"down_proj{end}")[expert], w2)


def test_packed_experts_give_the_logits_of_decoded_ones():
    packed, decoded = load(golden(PACKED), packed_experts=True), load(golden(PACKED))
    want = golden_tensors(PACKED, "expected.safetensors")
    with torch.no_grad():
        got = packed(want["input_ids"]).logits
        assert_close(got, decoded(want["input_ids"]).logits)
    assert_close(got, want["logits"], 5e-4)


def test_packed_model_remembers_how_its_experts_are_quantised_and_a_decoded_one_does_not():
    packed, decoded = load(golden(PACKED), packed_experts=True), load(golden(PACKED))
    assert packed.config.packed_experts
    assert packed.config.quantization_config == quantization()
    assert not decoded.config.packed_experts
    assert not hasattr(decoded.config, "quantization_config")
    assert "quantization_config" not in decoded.config.to_dict()


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "60KB"}], ids=["one file", "shards"])
def test_save_of_packed_experts_and_load_are_exact(shards, tmp_path):
    model = load(golden(PACKED), packed_experts=True)
    model.save_pretrained(tmp_path, **shards)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["packed_experts"]
    assert written["quantization_config"] == quantization()
    assert_identical(saved_tensors(tmp_path), dict(model.state_dict()))
    for loaded in (load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert type(loaded) is KdaHybridForCausalLM
        assert_identical(loaded.state_dict(), model.state_dict())
        assert loaded.config.quantization_config == quantization()
    with torch.no_grad():
        assert_close(load(tmp_path)(token_ids(9)).logits, model(token_ids(9)).logits, 1e-5)


def test_save_of_a_decoded_model_and_load_are_exact(tmp_path):
    model = load(golden(PACKED))
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert_identical(saved_tensors(tmp_path), dict(model.state_dict()))
    assert_identical(load(tmp_path).state_dict(), model.state_dict())


@pytest.mark.parametrize("source", [PLAIN, PACKED])
def test_save_in_the_original_format_gives_the_released_names(source, tmp_path):
    model, released = load(golden(source)), golden_tensors(PLAIN, WEIGHTS)
    model.save_pretrained(tmp_path, save_original_format=True)
    written = saved_tensors(tmp_path)
    text = {name: x for name, x in released.items() if name.startswith("language_model.")}
    assert written.keys() == text.keys()
    if source == PLAIN:
        for name, tensor in text.items():
            got = written[name]
            if name.endswith("A_log"):  # zeros behind the heads, as many as in a release of this head's width
                assert got.shape == (16,)
                assert not got[3:].any()
                tensor, got = tensor[:3], got[:3]
            assert torch.equal(got, tensor), name
    assert_identical(load(tmp_path).state_dict(), model.state_dict())


def test_save_of_packed_experts_in_the_original_format_says_what_to_do(tmp_path):
    with pytest.raises(NotImplementedError, match=r"packed experts.*conversion"):
        load(golden(PACKED), packed_experts=True).save_pretrained(tmp_path, save_original_format=True)


# The bias of fla's output gate


def test_output_gate_bias_is_saved_loaded_and_added(tmp_path):
    model, ids = tiny_model(linear_output_gate_bias=True), token_ids(7)
    biases = [name for name, _ in model.named_parameters() if name.endswith("self_attn.g_b_proj.bias")]
    assert len(biases) == 3
    with torch.no_grad():
        for name in biases:
            model.get_parameter(name).normal_()
        want = model(ids).logits
        model.save_pretrained(tmp_path)
        loaded, plain = load(tmp_path), tiny_model()
        assert_identical(loaded.state_dict(), model.state_dict())
        for name in biases:
            model.get_parameter(name).zero_()
        assert (model(ids).logits - want).abs().max() > 1e-2
        model.load_state_dict(plain.state_dict(), strict=False)
        assert_close(model(ids).logits, plain(ids).logits, 1e-5)


@pytest.mark.parametrize("source", [PLAIN, PACKED])
def test_load_names_experts_of_different_shapes(source, tmp_path):
    shutil.copytree(golden(source), tmp_path / "copy")
    tensors = golden_tensors(source, WEIGHTS)
    end = "weight" if source == PLAIN else "weight_packed"
    name = f"language_model.model.layers.2.block_sparse_moe.experts.5.w2.{end}"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, tmp_path / "copy" / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.experts\.down_proj.*differ in shape"):
        load(tmp_path / "copy")


@pytest.mark.parametrize("kind", [KdaHybridModel, KdaHybridForCausalLM])
@pytest.mark.parametrize("source", [PACKED, "kimi_linear_original_tiny"])
def test_load_through_a_config_with_a_model_type_of_its_own(kind, source):
    class OwnConfig(KdaHybridConfig):
        model_type = "own"

    fields = KdaHybridConfig.from_pretrained(golden(source)).to_dict()
    config = OwnConfig(**{name: fields[name] for name in KdaHybridConfig.__annotations__})
    assert config.model_type == "own"
    got = kind.from_pretrained(golden(source), config=config, dtype=torch.float32)
    assert_identical(got.state_dict(), kind.from_pretrained(golden(source), dtype=torch.float32).state_dict())
