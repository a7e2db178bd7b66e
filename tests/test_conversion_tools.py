"""The tools of `python -m conversion` that say what a checkpoint is, compare two, and make a folder for the Hub."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_bytes import (
    INDEX,
    Raw,
    config_of,
    convert,
    everything,
    fails,
    k3_release,
    random_bytes,
    read_file,
    read_folder,
    write_file,
    write_folder,
)
from helpers import assert_close, golden, k3_model, tiny_model, token_ids
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conversion import export_hub
from conversion.__main__ import TOOLS, main
from conversion.compare import compare, difference
from conversion.inspection import describe
from modeling_kda import KdaHybridForCausalLM


ROOT = Path(__file__).parents[1]


# The command line


@pytest.mark.parametrize("tool", TOOLS)
def test_help_of_every_tool(tool, capsys):
    with pytest.raises(SystemExit) as stop:
        main([tool, "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: python -m conversion {tool} ")
    assert len(said.split("\n\n")[1]) > 80, "it says what the tool does"


def test_help_lists_every_tool(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line.startswith("    ") and line[4] != " "] == [*TOOLS]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["to-kda-hybird", "a", "b"],
        ["to-kda-hybrid"],
        ["to-kda-hybrid", "a"],
        ["to-kda-hybrid", "a", "b", "--unpacked"],
        ["to-kda-hybrid", "a", "b", "--workers", "0"],
        ["to-kda-hybrid", "a", "b", "--max-shard-size", "5 GB"],
        ["to-kda-hybrid", "a", "b", "--dtype", "float16"],
        ["compare", "a", "b", "--ids", "c", "--text", "d"],
    ],
    ids=" ".join,
)
def test_wrong_command_line_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m conversion" in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["inspect", "to-kda-hybrid", "to-kimi-linear", "to-kimi-k3", "export-hub"])
def test_folder_that_is_not_there_exits_with_1(tool, tmp_path, capsys):
    said = fails(capsys, tool, tmp_path / "absent", *([tmp_path / "out"] if tool != "inspect" else []))
    assert "absent" in said
    assert list(tmp_path.iterdir()) == []


def test_module_exits_with_what_the_tool_says(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["conversion", "inspect", str(tmp_path)])
    monkeypatch.delitem(sys.modules, "conversion.__main__")
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("conversion", run_name="__main__")
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("inspect: ")


# inspect


@pytest.mark.parametrize(
    ("name", "family", "layers", "packed"),
    [
        ("kimi_linear_original_tiny", "Kimi-Linear", (4, 2, 1, 5), False),
        ("hf_kimi_linear_tiny", "Kimi-Linear", (4, 2, 1, 5), False),
        ("kimi_k3_tiny", "Kimi K3", (6, 3, 1, 8), False),
        ("kimi_k3_tiny_mxfp4", "Kimi K3", (6, 3, 1, 8), True),
        ("k3_released_tiny", "Kimi K3", (6, 3, 1, 8), True),
    ],
)
def test_inspect_says_what_a_folder_is(name, family, layers, packed, tmp_path, capsys):
    folder = golden(name)
    convert("to-kda-hybrid", folder, tmp_path / "ours")
    raw = read_file(folder / "model.safetensors")
    for place in (folder, tmp_path / "ours"):
        tensors = raw if place is folder else read_folder(place)
        found = describe(place)
        assert found["model_type"] == config_of(place)["model_type"]
        assert found["family"] == family
        assert tuple(found["layers"][kind] for kind in ("KDA", "MLA", "dense", "sparse")) == layers
        assert found["files"] == 1
        assert found["tensors"] == len(tensors)
        assert found["bytes"] == sum(len(tensor.data) for tensor in tensors.values())
        # Of codes, two numbers are in a byte; scales are no parameters.
        size = {"F32": 4, "BF16": 2, "U8": 0.5}
        numbers = {k: len(x.data) / size[x.dtype] for k, x in tensors.items() if not k.endswith("_scale")}
        assert found["parameters"] == sum(numbers.values())
        assert found["experts in MXFP4"] is packed
        assert found["missing"] == []
        assert found["problem"] is None
        capsys.readouterr()
        convert("inspect", place)
        said = capsys.readouterr().out
        assert f"{found['parameters']:,}" in said
        assert f"{found['bytes']:,}" in said
        assert family in said


@pytest.fixture
def release(tmp_path):
    config, shapes = k3_release()
    return write_folder(tmp_path / "release", config, random_bytes(shapes), 4)


def test_inspect_reports_missing_shards(release, capsys):
    [*_, second, _, _] = sorted(release.glob("*.safetensors"))
    gone = read_file(second)
    second.unlink()
    found = describe(release)
    assert set(found["missing"]) == gone.keys()
    assert found["files"] == 3
    assert str(len(gone)) in found["problem"]
    assert str(len(gone)) in fails(capsys, "inspect", release)


def test_inspect_reports_a_tensor_that_a_shard_lacks(release, capsys):
    path = sorted(release.glob("*.safetensors"))[0]
    tensors = read_file(path)
    del tensors["language_model.model.norm.weight"]
    write_file(path, tensors)
    assert describe(release)["missing"] == ["language_model.model.norm.weight"]
    assert "model.norm.weight" in fails(capsys, "inspect", release)


def test_inspect_finds_what_keeps_a_checkpoint_from_loading(release, tmp_path, capsys):
    tensors = read_folder(release)
    convert("to-kda-hybrid", release, tmp_path / "ours")
    for folder, names in (
        (release, ("language_model.model.norm.weight", "language_model.odd")),
        (tmp_path / "ours", ("model.norm.weight", "odd")),
    ):
        tensors = read_folder(folder)
        tensors[names[1]] = tensors.pop(names[0])
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        write_file(folder / "model.safetensors", tensors)
        problem = describe(folder)["problem"]
        assert "model.norm.weight" in problem
        assert "odd" in problem
        assert "model.norm.weight" in fails(capsys, "inspect", folder)


def test_inspect_reads_heads_only(release, monkeypatch):
    """Files whose numbers are cut to zeros are as good: nothing but their heads is looked at."""
    before = describe(release)
    for path in release.glob("*.safetensors"):
        tensors = read_file(path)
        write_file(path, {name: Raw(x.dtype, x.shape, bytes(len(x.data))) for name, x in tensors.items()})
    assert describe(release) == before


# compare


def independent(folders, ids: torch.Tensor, replay: bool = False):
    """Logits of both in float64 numpy, and the experts that each chose, by the router's definition; with `replay` the
    second one is given the first one's."""
    results, choices = [], []
    for folder in folders:
        model = KdaHybridForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        seen = []
        for number, router in enumerate(routers):

            def note(module, inputs, seen=seen):
                score = torch.sigmoid(inputs[0].reshape(-1, inputs[0].shape[-1]).float() @ module.weight.T)
                seen.append((score + module.e_score_correction_bias).topk(2).indices)

            router.register_forward_pre_hook(note)
            if replay and results:
                router.choose = lambda biased, number=number: choices[0][number]
        with torch.no_grad():
            results.append(model(ids).logits.double().numpy())
        choices.append(seen)
    return results, choices


def measured(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    def softmax(x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    p, q = softmax(first), softmax(second)
    return {
        "max": np.abs(second - first).max(),
        "mean": np.abs(second - first).mean(),
        "kl": (p * np.log(p / q)).sum(-1).mean(),
        "top1": (first.argmax(-1) == second.argmax(-1)).mean(),
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model, and the same with other routers: tokens go to other experts."""
    folder = tmp_path_factory.mktemp("pair")
    model = tiny_model()
    model.save_pretrained(folder / "first")
    with torch.no_grad():
        for layer in (layer for layer in model.model.layers if layer.sparse):
            random = torch.Generator().manual_seed(11)
            layer.mlp.gate.weight.add_(0.01 * torch.randn(layer.mlp.gate.weight.shape, generator=random))
    model.save_pretrained(folder / "second")
    return folder / "first", folder / "second"


def test_compare_of_equal_folders_finds_nothing(pair, capsys):
    ids = token_ids(40, 2)
    found = compare(pair[0], pair[0], ids)
    equal = {"max": 0.0, "mean": 0.0, "kl": 0.0, "top1": 1.0}
    assert found == {"difference": equal, "replayed": equal, "equal_experts": 1.0}
    convert("compare", pair[0], pair[0], "--tokens", 30)
    said = capsys.readouterr().out
    assert "30 tokens in float32" in said
    assert said.count("max 0, mean 0, KL 0 nats, same best token 100.00%") == 2
    assert "same experts: 100.00%" in said


def test_compare_measures_what_differs(pair):
    ids = token_ids(90, 2)
    found = compare(*pair, ids)
    results, (first, second) = independent(pair, ids)
    for name, value in measured(*results).items():
        assert found["difference"][name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    same = [len(set(a.tolist()) & set(b.tolist())) / 2 for x, y in zip(first, second) for a, b in zip(x, y)]
    assert found["equal_experts"] == pytest.approx(sum(same) / len(same))
    assert 0.8 < found["equal_experts"] < 1


def test_compare_replays_the_first_ones_experts(pair):
    ids = token_ids(90, 2)
    found = compare(*pair, ids)
    for name, value in measured(*independent(pair, ids, replay=True)[0]).items():
        assert found["replayed"][name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert found["replayed"]["max"] < found["difference"]["max"] / 4
    assert found["replayed"]["mean"] < found["difference"]["mean"] / 4
    assert found["replayed"]["kl"] < found["difference"]["kl"] / 4


def test_compare_of_models_without_experts_has_nothing_to_replay(tmp_path):
    for i in range(2):
        tiny_model(i, num_experts=None).save_pretrained(tmp_path / str(i))
    found = compare(tmp_path / "0", tmp_path / "1", token_ids(20))
    assert found.keys() == {"difference"}
    assert found["difference"]["max"] > 1


@pytest.mark.parametrize(("name", "options"), [("kimi_linear_original_tiny", []), ("k3_released_tiny", ["--unpack"])])
def test_compare_of_a_release_and_what_it_became(name, options, tmp_path):
    convert("to-kda-hybrid", golden(name), tmp_path / "ours", *options)
    found = compare(golden(name), tmp_path / "ours", token_ids(30))
    assert found["difference"]["max"] < 1e-3
    assert found["difference"]["top1"] == found["equal_experts"] == 1


def test_difference_is_a_divergence_of_the_first_from_the_second():
    first, second = torch.tensor([[0.0, 1.0, 3.0]]), torch.tensor([[2.0, 1.0, 0.0]])
    want = measured(first.double().numpy(), second.double().numpy())
    assert difference(first, second) == pytest.approx(want, rel=1e-5)
    assert difference(second, first)["kl"] != pytest.approx(want["kl"], rel=1e-2)


@pytest.mark.parametrize("form", ["one list", "lists"])
def test_compare_reads_ids_from_json(pair, tmp_path, capsys, form):
    ids = token_ids(50, 1 if form == "one list" else 2)
    (tmp_path / "ids.json").write_text(json.dumps(ids[0].tolist() if form == "one list" else ids.tolist()))
    convert("compare", *pair, "--ids", tmp_path / "ids.json", "--tokens", 33)
    said = capsys.readouterr().out
    found = compare(*pair, ids[:, :33])
    assert f"{33 * len(ids)} tokens" in said
    for x in (found["difference"], found["replayed"]):
        assert f"max {x['max']:.3g}, mean {x['mean']:.3g}, KL {x['kl']:.3g} nats" in said


@pytest.fixture
def with_tokenizer(pair, tmp_path) -> Path:
    """The first folder of the pair, with a tokenizer: "w5" is 5."""
    plain = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = shutil.copytree(pair[0], tmp_path / "first")
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(folder)
    return folder


def test_compare_reads_text_with_the_first_folders_tokenizer(pair, with_tokenizer, tmp_path, capsys):
    ids = token_ids(25)
    (tmp_path / "text").write_text(" ".join(f"w{i}" for i in ids[0].tolist()))
    convert("compare", with_tokenizer, pair[1], "--text", tmp_path / "text")
    said, found = capsys.readouterr().out, compare(*pair, ids)
    assert "25 tokens" in said
    assert f"max {found['difference']['max']:.3g}, mean {found['difference']['mean']:.3g}" in said


def test_compare_names_the_folder_with_another_vocabulary(pair, tmp_path, capsys):
    tiny_model(vocab_size=61).save_pretrained(tmp_path / "small")
    (tmp_path / "ids.json").write_text("[3, 96, 5]")
    said = fails(capsys, "compare", pair[0], tmp_path / "small", "--ids", tmp_path / "ids.json")
    assert "96" in said
    assert "small" in said
    assert "61" in said
    (tmp_path / "ids.json").write_text("[3, 4, 5]")
    said = fails(capsys, "compare", pair[0], tmp_path / "small", "--ids", tmp_path / "ids.json")
    assert "small" in said
    assert "97" in said


def test_compare_of_other_numbers_of_experts_is_refused(pair, tmp_path, capsys):
    tiny_model(num_experts_per_tok=3).save_pretrained(tmp_path / "more")
    assert "more" in fails(capsys, "compare", pair[0], tmp_path / "more", "--tokens", 9)


@pytest.mark.parametrize(
    "text", ["[1, 2", '{"a": 1}', "[[1, 2], [3]]", '["a"]', "[]", "[[]]", "[3, -1]", "[1.5, 2]", "7", "[[[1]]]"]
)
def test_compare_refuses_what_are_no_ids(pair, tmp_path, capsys, text):
    (tmp_path / "ids.json").write_text(text)
    assert "ids" in fails(capsys, "compare", *pair, "--ids", tmp_path / "ids.json")


@pytest.mark.parametrize("option", ["--ids", "--text"])
def test_compare_names_the_file_that_is_not_there(pair, with_tokenizer, tmp_path, capsys, option):
    assert "absent" in fails(capsys, "compare", with_tokenizer, pair[1], option, tmp_path / "absent")


def test_compare_of_text_names_the_folder_without_a_tokenizer(pair, tmp_path, capsys):
    (tmp_path / "text").write_text("w3 w4")
    said = fails(capsys, "compare", *pair, "--text", tmp_path / "text")
    assert str(pair[0]) in said
    assert "tokenizer" in said


@pytest.mark.parametrize("place", [0, 1])
def test_compare_names_the_folder_that_is_not_there(pair, tmp_path, capsys, place):
    folders = [*pair]
    folders[place] = tmp_path / "absent"
    assert "absent" in fails(capsys, "compare", *folders, "--tokens", 5)


# export-hub

# After the tool's own probe, in its process: what else must hold there, and logits for us.
MORE = """
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

torch.set_num_threads(1)
try:
    import modeling_kda
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("the package is not hidden")
base = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True, dtype="auto").eval()
assert type(model).__module__.startswith("transformers_modules."), type(model)
assert type(AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)).__name__ == "KdaHybridConfig"
with torch.no_grad():
    ids = load_file("IDS")["ids"]
    save_file({"logits": model(ids).logits, "states": base(ids).last_hidden_state}, "OUT")
"""


def test_export_loads_where_the_package_is_hidden(tmp_path, monkeypatch):
    model = k3_model()
    model.save_pretrained(tmp_path / "ours", max_shard_size="200KB")
    (tmp_path / "ours" / "notes.txt").write_text("notes")
    ids = token_ids(20, 2)
    save_file({"ids": ids}, tmp_path / "ids")
    more = MORE.replace("IDS", str(tmp_path / "ids")).replace("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(export_hub, "_PROBE", export_hub._PROBE + more)
    loaded = export_hub.export(tmp_path / "ours", tmp_path / "hub")
    assert loaded == f"KdaHybridForCausalLM {sum(x.numel() for x in model.parameters())}"
    out = load_file(tmp_path / "out")
    with torch.no_grad():
        assert_close(out["logits"], model(ids).logits, 1e-5)
        assert_close(out["states"], model.model(ids).last_hidden_state, 1e-5)
    got, want = everything(tmp_path / "hub"), everything(tmp_path / "ours")
    assert all(got[name] == want[name] for name in want.keys() - {"config.json"})
    code = {path.name: path.read_bytes() for path in (ROOT / "modeling_kda").glob("*.py")}
    assert all(got[name] == code[name] for name in got.keys() - want.keys())
    places = config_of(tmp_path / "hub")["auto_map"]
    assert places["AutoModelForCausalLM"] == "modeling_kda_hybrid.KdaHybridForCausalLM"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub", "ids", "ours", "out"]


def test_export_that_does_not_run_elsewhere_leaves_the_target_alone(tmp_path, capsys, monkeypatch):
    tiny_model().save_pretrained(tmp_path / "ours")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "old").write_text("old")
    monkeypatch.setattr(export_hub, "_PROBE", "import sys; sys.exit('it does not run')")
    assert main(["export-hub", str(tmp_path / "ours"), str(tmp_path / "hub"), "--force"]) == 1
    said = capsys.readouterr().err
    assert "it does not run" in said
    assert everything(tmp_path / "hub") == {"old": b"old"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub", "ours"]
    monkeypatch.setattr(export_hub, "_PROBE", "print('fine')")
    assert export_hub.export(tmp_path / "ours", tmp_path / "hub", force=True) == "fine"
    assert "old" not in everything(tmp_path / "hub")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub", "ours"]


def test_export_refuses_a_target_that_exists(tmp_path, capsys):
    tiny_model().save_pretrained(tmp_path / "ours")
    (tmp_path / "hub").mkdir()
    assert "--force" in fails(capsys, "export-hub", tmp_path / "ours", tmp_path / "hub")
    assert list((tmp_path / "hub").iterdir()) == []


@pytest.mark.parametrize("damage", ["tensor missing", "tensor unknown", "cut off", "another layout"])
def test_export_refuses_a_source_that_is_not_whole(tmp_path, capsys, release, damage):
    tiny_model().save_pretrained(tmp_path / "ours")
    path, source = tmp_path / "ours" / "model.safetensors", tmp_path / "ours"
    tensors = load_file(path)
    if damage == "tensor missing":
        del tensors["model.norm.weight"]
        save_file(tensors, path)
    elif damage == "tensor unknown":
        save_file({**tensors, "odd": torch.ones(2)}, path)
    elif damage == "cut off":
        path.write_bytes(path.read_bytes()[:-7])
    else:
        source = release
    said = fails(capsys, "export-hub", source, tmp_path / "hub")
    name = {"tensor missing": "model.norm.weight", "tensor unknown": "odd", "cut off": "model.safetensors"}
    assert name.get(damage, "to-kda-hybrid") in said
    assert not (tmp_path / "hub").exists()
    assert not (tmp_path / "hub.partial").exists()
    assert INDEX not in said
