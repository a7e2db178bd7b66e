"""What must not happen on the way: inputs replaced, foreign code run, another checkpoint read than was meant."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import golden, tiny_model
from safetensors.torch import load_file, save_file
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from conversion import plans
from conversion.__main__ import main
from conversion.checkpoint import Checkpoint
from modeling_kda import KdaHybridConfig, KdaHybridForCausalLM
from modeling_kda.ops_reference import OPERATORS


PACKED = "kimi_k3_tiny_mxfp4"


def run(*arguments) -> int:
    return main([*map(str, arguments)])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def release(tmp_path) -> Path:
    """A copy of K3's golden checkpoint with packed experts."""
    return Path(shutil.copytree(golden(PACKED), tmp_path / "release"))


def test_conversion_never_replaces_what_it_reads(release, tmp_path, capsys):
    before = names(release)
    assert run("to-kda-hybrid", release, tmp_path, "--force") == 1
    assert run("to-kda-hybrid", release, tmp_path / "mine") == 0
    assert run("to-kimi-k3", tmp_path / "mine", release, "--original", release, "--force") == 1
    assert run("export-hub", tmp_path / "mine", tmp_path / "mine", "--force") == 1
    assert capsys.readouterr().err.count("which is read; choose another target") == 3
    assert names(release) == before
    assert (tmp_path / "mine" / "released").is_dir()


@pytest.mark.parametrize("other", ["mine", "kimi_linear_original_tiny"])
def test_original_of_another_layout_is_refused(release, tmp_path, capsys, other):
    assert run("to-kda-hybrid", release, tmp_path / "mine") == 0
    original = tmp_path / "mine" if other == "mine" else golden(other)
    assert run("to-kimi-k3", tmp_path / "mine", tmp_path / "out", "--original", original) == 1
    assert "`--original`" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_quantization_config_is_found_where_transformers_puts_it(release, tmp_path):
    fields = json.loads((release / "config.json").read_text())
    fields["quantization_config"] = quantization = fields["text_config"].pop("quantization_config")
    (release / "config.json").write_text(json.dumps(fields))
    model = KdaHybridForCausalLM.from_pretrained(release, packed_experts=True)
    assert model.config.quantization_config == quantization
    assert run("to-kda-hybrid", release, tmp_path / "mine", "--unpack") == 0
    assert run("to-kimi-k3", tmp_path / "mine", tmp_path / "plain") == 0
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()
    assert run("to-kimi-k3", tmp_path / "mine", tmp_path / "back", "--original", release) == 0
    back, want = load_file(tmp_path / "back" / "model.safetensors"), load_file(release / "model.safetensors")
    assert back.keys() == want.keys()
    assert all(torch.equal(back[name], x) for name, x in want.items() if "experts." in name)


def test_types_of_a_release_come_back_from_a_model_that_was_saved(tmp_path):
    """The model keeps some tensors in float32; the release has them in bfloat16."""
    source = tmp_path / "release"
    shutil.copytree(golden("kimi_linear_original_tiny"), source)
    kept = ("A_log", "dt_bias", "e_score_correction_bias")
    tensors = load_file(source / "model.safetensors")
    tensors = {name: x if name.endswith(kept) else x.bfloat16() for name, x in tensors.items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    KdaHybridForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "mine")
    assert load_file(tmp_path / "mine" / "model.safetensors")["model.layers.0.self_attn.o_norm.weight"].itemsize == 4
    assert run("to-kimi-linear", tmp_path / "mine", tmp_path / "back", "--original", source) == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, want in tensors.items():
        assert back[name].dtype == want.dtype, name
        assert torch.equal(back[name], want), name


def test_tools_read_the_file_that_transformers_reads(tmp_path):
    tiny_model().save_pretrained(tmp_path / "mine")
    index = {"weight_map": {"model.norm.weight": "other.safetensors"}}
    (tmp_path / "mine" / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"model.norm.weight": torch.zeros(60)}, tmp_path / "mine" / "other.safetensors", {"format": "pt"})
    loaded = KdaHybridForCausalLM.from_pretrained(tmp_path / "mine")
    assert torch.equal(Checkpoint(tmp_path / "mine").read("model.norm.weight"), loaded.model.norm.weight)


def test_export_runs_and_takes_along_no_code_of_the_source(tmp_path):
    tiny_model().save_pretrained(tmp_path / "mine")
    (tmp_path / "mine" / "torch.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    assert run("export-hub", tmp_path / "mine", tmp_path / "hub") == 0
    assert not (tmp_path / "ran").exists()
    code = {name for name in names(tmp_path / "hub") if name.endswith(".py")}
    assert code <= plans.OUR_MODULES
    # Our code does not end up in a release made from an exported folder.
    tiny_model(linear_value_head_dim=12, linear_output_gate_rank=12).save_pretrained(tmp_path / "linear")
    for name in code:
        shutil.copy(tmp_path / "hub" / name, tmp_path / "linear" / name)
    assert run("to-kimi-linear", tmp_path / "linear", tmp_path / "out") == 0
    assert not [name for name in names(tmp_path / "out") if name.endswith(".py")]
    # A copy of the code has operators of its own.
    remote = get_class_from_dynamic_module("modeling_kda_hybrid.KdaHybridForCausalLM", str(tmp_path / "hub"))
    there = sys.modules[remote.__module__.rpartition(".")[0] + ".ops_reference"].OPERATORS
    assert OPERATORS == "modeling_kda" != there
    assert hasattr(getattr(torch.ops, there), "chunked")


def test_load_with_a_config_that_is_not_there_is_an_error(tmp_path):
    tiny_model().save_pretrained(tmp_path / "mine")
    with pytest.raises(OSError, match="nowhere"):
        KdaHybridForCausalLM.from_pretrained(tmp_path / "mine", config=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("byte", [103, 141])
def test_load_in_float16_refuses_experts_that_it_cannot_hold(release, byte):
    tensors = load_file(release / "model.safetensors")
    name = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight_scale"
    model = KdaHybridForCausalLM.from_pretrained(release, dtype=torch.float16)
    wide = KdaHybridForCausalLM.from_pretrained(release, dtype=torch.float32)
    stacks = [m.model.layers[1].mlp.experts.down_proj for m in (model, wide)]
    assert torch.equal(stacks[0].float(), stacks[1])
    tensors[name][0, 0] = byte
    save_file(tensors, release / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj.*float16"):
        KdaHybridForCausalLM.from_pretrained(release, dtype=torch.float16)


def test_config_without_shared_experts_is_read():
    assert KdaHybridConfig(n_shared_experts=None).n_shared_experts == 0
