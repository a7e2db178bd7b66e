"""`from_pretrained` and `save_pretrained`: every tensor, bit for bit, under its name, in its dtype; Auto classes."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_identical, golden, tiny_config, tiny_model, token_ids
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    KimiLinearConfig,
)

from modeling_kda import (
    KdaHybridConfig,
    KdaHybridForCausalLM,
    KdaHybridForSequenceClassification,
    KdaHybridModel,
)


GOLDEN_MODELS = ["kimi_linear_original_tiny", "hf_kimi_linear_tiny"]
FLOAT32 = (
    "A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight",
    "mlp.gate.weight", "mlp.gate.e_score_correction_bias",
)  # fmt: skip
WEIGHTS = "model.safetensors"


@pytest.fixture
def saved(tmp_path):
    """A model whose every number needs all the bits of a float32, and its folder."""
    model = tiny_model(linear_head_dim=16, hidden_size=64, moe_intermediate_size=40)
    model.save_pretrained(tmp_path / "saved")
    return model, tmp_path / "saved"


def files(folder) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files; no name may be in two."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not part.keys() & tensors.keys()
        tensors |= part
    return tensors


def change_file(folder, change) -> None:
    """Rewrites the checkpoint's tensors by `change(tensors)`, in place."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


# Round trips


@pytest.mark.parametrize("shards", [None, "60KB"])
def test_save_and_load_are_exact(saved, tmp_path, shards):
    model, _ = saved
    model.save_pretrained(tmp_path / "again", **({"max_shard_size": shards} if shards else {}))
    loaded, info = KdaHybridForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_identical(loaded.state_dict(), model.state_dict())
    assert_identical(files(tmp_path / "again"), dict(model.state_dict()))
    assert not loaded.training
    with torch.no_grad():
        assert_close(loaded(token_ids(9)).logits, model(token_ids(9)).logits)


def test_save_in_shards_indexes_what_is_in_the_files(saved, tmp_path):
    model, _ = saved
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    index = json.loads((tmp_path / "shards" / f"{WEIGHTS}.index.json").read_text())["weight_map"]
    paths = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(paths) > 5
    assert {name: path.name for path in paths for name in load_file(path)} == index
    assert index.keys() == model.state_dict().keys()


def test_save_of_a_given_state_dict_writes_those_tensors_under_the_same_names(saved, tmp_path):
    model, _ = saved
    changed = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "given", state_dict=dict(changed))
    assert_identical(files(tmp_path / "given"), changed)


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_load_of_another_layout_then_save_writes_our_names(name, tmp_path):
    model = KdaHybridForCausalLM.from_pretrained(golden(name))
    model.save_pretrained(tmp_path)
    tensors = files(tmp_path)
    assert tensors.keys() == model.state_dict().keys()
    assert not any("block_sparse_moe" in key for key in tensors)
    assert_identical(KdaHybridForCausalLM.from_pretrained(tmp_path).state_dict(), model.state_dict())


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_load_of_another_layout_takes_every_number(name):
    released = load_file(golden(name, WEIGHTS))
    ours = KdaHybridForCausalLM.from_pretrained(golden(name)).state_dict()
    assert sum(x.numel() for x in released.values()) == sum(x.numel() for x in ours.values())
    moe = "model.layers.1.block_sparse_moe.experts"
    for expert in range(8):
        gate_up = [released[f"{moe}.{expert}.{w}.weight"] for w in ("w1", "w3")]
        assert torch.equal(ours["model.layers.1.mlp.experts.gate_up_proj"][expert], torch.cat(gate_up))
        assert torch.equal(ours["model.layers.1.mlp.experts.down_proj"][expert], released[f"{moe}.{expert}.w2.weight"])


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_save_in_the_original_format_gives_the_same_tensors_back(name, tmp_path):
    model = KdaHybridForCausalLM.from_pretrained(golden(name))
    model.save_pretrained(tmp_path, save_original_format=True)
    assert_identical(files(tmp_path), load_file(golden(name, WEIGHTS)))


def test_load_onto_a_named_device_is_exact(saved):
    model, folder = saved
    loaded = KdaHybridForCausalLM.from_pretrained(folder, device_map="cpu")
    assert_identical(loaded.state_dict(), model.state_dict())


def test_load_of_tied_embeddings_keeps_them_one(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in files(tmp_path)
    loaded = KdaHybridForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_identical(loaded.state_dict(), model.state_dict())
    assert isinstance(KdaHybridForCausalLM._tied_weights_keys, dict)


@pytest.mark.parametrize("tied", [True, False])
def test_resize_of_the_vocabulary_keeps_the_old_rows(tied, tmp_path):
    model, ids = tiny_model(tie_word_embeddings=tied), token_ids(9)
    with torch.no_grad():
        want = model(ids).logits
        model.resize_token_embeddings(103)
        assert_close(model(ids).logits[..., :97], want, 1e-5)
    model.save_pretrained(tmp_path)
    loaded = KdaHybridForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == 103
    assert_identical(loaded.state_dict(), model.state_dict())


# Dtypes


def expect_float32(tensors: dict[str, torch.Tensor], original: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """The named tensors are float32 with every bit; all others are in `dtype`."""
    kept = {name for name in original if name.endswith(FLOAT32)}
    assert len(kept) == 3 * 6 + 3 * 2
    for name, tensor in original.items():
        assert tensors[name].dtype == (torch.float32 if name in kept else dtype), name
        assert torch.equal(tensors[name], tensor if name in kept else tensor.to(dtype)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("argument", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("more", [{}, {"device_map": "cpu"}], ids=["", "device_map"])
def test_load_in_16_bits_keeps_decays_and_routing_in_float32(saved, tmp_path, dtype, argument, more):
    model, folder = saved
    original = model.state_dict()
    assert not torch.equal(
        original["model.layers.0.self_attn.A_log"].to(dtype).float(), original["model.layers.0.self_attn.A_log"]
    )
    loaded = AutoModelForCausalLM.from_pretrained(folder, **{argument: dtype}, **more)
    expect_float32(loaded.state_dict(), original, dtype)
    loaded.save_pretrained(tmp_path / "again")
    expect_float32(files(tmp_path / "again"), original, dtype)
    automatic = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    expect_float32(automatic.state_dict(), original, dtype)
    assert loaded(token_ids(5)).logits.dtype == dtype


def test_load_without_a_dtype_takes_the_files(saved, tmp_path):
    model, folder = saved
    half = KdaHybridForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    expect_float32(
        KdaHybridForCausalLM.from_pretrained(tmp_path / "half").state_dict(), model.state_dict(), torch.bfloat16
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_from_config_with_a_dtype_keeps_decays_and_routing_in_float32(dtype):
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=dtype)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == (torch.float32 if name.endswith(FLOAT32) else dtype), name


@pytest.mark.parametrize("cast", ["bfloat16", "half"])
def test_cast_of_decays_warns_once(cast, messages):
    model = tiny_model()
    getattr(model, cast)()
    assert len(messages()) == 1
    assert "float32" in messages()[0]
    assert "A_log" in messages()[0]
    getattr(model, cast)()
    assert len(messages()) == 1


@pytest.mark.parametrize("cast", ["double", "float", "cpu"])
def test_cast_that_loses_nothing_does_not_warn(cast, messages):
    getattr(tiny_model(), cast)()
    assert messages() == []


# Files that do not fit


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.self_attn.A_log",
        "model.layers.0.self_attn.q_conv1d.weight",
        "model.layers.1.mlp.experts.down_proj",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_load_names_a_missing_tensor(saved, key):
    _, folder = saved
    change_file(folder, lambda tensors: tensors.pop(key))
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        KdaHybridForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("key", ["model.layers.0.self_attn.qq_proj.weight", "model.layers.7.mlp.gate.weight", "odd"])
def test_load_names_an_extra_tensor(saved, key):
    _, folder = saved
    change_file(folder, lambda tensors: tensors.update({key: torch.ones(3)}))
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        KdaHybridForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("key", ["model.layers.0.self_attn.dt_bias", "model.layers.1.mlp.experts.down_proj"])
def test_load_names_a_tensor_of_the_wrong_shape(saved, key):
    _, folder = saved
    change_file(folder, lambda tensors: tensors.update({key: tensors[key][..., 1:].contiguous()}))
    with pytest.raises((ValueError, RuntimeError), match=key.replace(".", r"\.")):
        KdaHybridForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("size", [0, 5, 1000, -100])
def test_load_names_a_truncated_file(saved, size):
    _, folder = saved
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises((ValueError, OSError), match=r"model\.safetensors"):
        KdaHybridForCausalLM.from_pretrained(folder)


def test_load_names_a_missing_shard(saved, tmp_path):
    model, _ = saved
    folder = tmp_path / "shards"
    model.save_pretrained(folder, max_shard_size="60KB")
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.unlink()
    with pytest.raises((ValueError, OSError), match=shard.name):
        KdaHybridForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("kind", [KdaHybridModel, KdaHybridForSequenceClassification])
def test_load_into_another_head_is_exact_below_it(saved, kind):
    model, folder = saved
    loaded = kind.from_pretrained(folder)
    base = loaded if kind is KdaHybridModel else loaded.model
    assert_identical(base.state_dict(), model.model.state_dict())


def test_load_of_a_base_model_needs_a_head(saved, tmp_path):
    model, _ = saved
    model.model.save_pretrained(tmp_path / "base")
    assert_identical(KdaHybridModel.from_pretrained(tmp_path / "base").state_dict(), model.model.state_dict())
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        KdaHybridForCausalLM.from_pretrained(tmp_path / "base")


# Initialisation


def test_same_seed_gives_the_same_model():
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        models.append(KdaHybridForCausalLM(tiny_config()))
    assert_identical(models[0].state_dict(), models[1].state_dict())
    torch.manual_seed(8)
    assert not torch.equal(KdaHybridForCausalLM(tiny_config()).lm_head.weight, models[0].lm_head.weight)


def test_fresh_decays_are_drawn_as_published():
    torch.manual_seed(0)
    model = KdaHybridForCausalLM(tiny_config(linear_num_heads=64, initializer_range=0.02))
    for layer in (x.self_attn for x in model.model.layers if x.linear):
        rate, step = layer.A_log.exp(), F.softplus(layer.dt_bias)
        assert 1 <= rate.min() < 3
        assert 14 < rate.max() <= 16
        assert 1e-4 * 0.999 <= step.min() < 2e-3
        assert 0.05 < step.max() <= 0.1 * 1.001
        assert abs(step.log().mean() - math.log(0.01)) < 0.2  # log-uniform from 0.001 to 0.1
    names = dict(model.named_parameters())
    for name, tensor in names.items():
        if "norm" in name:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        elif tensor.ndim > 1 and "conv1d" not in name and "A_log" not in name:
            rows = tensor[torch.arange(len(tensor)) != (0 if "embed" in name else -1)]  # the pad's embedding is zero
            assert abs(rows.std() - 0.02) < 0.002, name
    assert torch.equal(model.model.layers[1].mlp.gate.e_score_correction_bias, torch.zeros(8))


def test_fresh_decays_of_the_bounded_gate_start_at_its_middle():
    layer = KdaHybridForCausalLM(tiny_config(linear_gate_lower_bound=-5.0)).model.layers[0].self_attn
    assert torch.equal(layer.A_log, torch.zeros(3))
    assert layer.dt_bias.isfinite().all()


@pytest.mark.parametrize("call", ["init_weights", "post_init"])
def test_initialising_again_changes_nothing_loaded(saved, call):
    model, folder = saved
    loaded = KdaHybridForCausalLM.from_pretrained(folder)
    for _ in range(2):
        getattr(loaded, call)()
        getattr(loaded.model, call)()
    assert_identical(loaded.state_dict(), model.state_dict())


def test_deep_copy_is_exact_and_apart(saved):
    model, _ = saved
    copied = copy.deepcopy(model)
    assert_identical(copied.state_dict(), model.state_dict())
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    assert model.lm_head.weight.abs().max() > 0


# Auto classes


@pytest.mark.parametrize(
    ("auto", "kind"),
    [
        (AutoModel, KdaHybridModel),
        (AutoModelForCausalLM, KdaHybridForCausalLM),
        (AutoModelForSequenceClassification, KdaHybridForSequenceClassification),
    ],
    ids=lambda x: x.__name__,
)
def test_auto_classes_find_ours(auto, kind, saved):
    _, folder = saved
    assert type(auto.from_config(tiny_config())) is kind
    assert type(auto.from_pretrained(folder)) is kind


def test_auto_config_finds_ours_and_leaves_the_native_one(saved):
    _, folder = saved
    config = AutoConfig.from_pretrained(folder)
    assert type(config) is KdaHybridConfig
    assert type(AutoConfig.for_model("kda_hybrid")) is KdaHybridConfig
    assert type(AutoConfig.for_model("kimi_linear")) is KimiLinearConfig
    assert type(AutoConfig.from_pretrained(golden("kimi_linear_original_tiny"))) is KimiLinearConfig
    native = AutoModelForCausalLM.from_pretrained(golden("hf_kimi_linear_tiny"))
    assert type(native).__module__.startswith("transformers.")


def test_save_says_whose_checkpoint_it_is(saved, tmp_path):
    _, folder = saved
    for source in (folder, golden("kimi_linear_original_tiny")):
        KdaHybridForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "again")
        written = json.loads((tmp_path / "again" / "config.json").read_text())
        assert written["model_type"] == "kda_hybrid"
        assert written["architectures"] == ["KdaHybridForCausalLM"]
        assert "auto_map" not in written
        assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "again")) is KdaHybridForCausalLM


def test_config_survives_a_round_trip(tmp_path):
    config = tiny_config(linear_gate_lower_bound=-5.0, attention_output_gate=True, q_lora_rank=20)
    config.save_pretrained(tmp_path)
    again = KdaHybridConfig.from_pretrained(tmp_path)
    again.transformers_version = config.transformers_version
    assert again.to_dict() == config.to_dict()
