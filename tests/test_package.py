"""The package at run time: what importing it loads, registers and says."""

import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from helpers import tiny_model, token_ids

import modeling_kda
from modeling_kda import KdaHybridConfig, KdaHybridForCausalLM, backend_report, compat_transformers


ROOT = Path(__file__).parents[1]

# Runs in a Python of its own. An import alone, again after a reload, and with all optional libraries blocked.
IMPORTS = """
import importlib, json, sys
import torch, transformers, transformers.generation, transformers.modeling_utils

found = {}
optional = ["fla", "triton", "flash_kda", "causal_conv1d", "einops", "bitsandbytes"]
before = set(sys.modules)
import modeling_kda
found["loaded"] = [name for name in optional if name in sys.modules and name not in before]

def forget(*names):
    for module in [x for x in sys.modules if x.split(".")[0] in names]:
        del sys.modules[module]

def logits():
    config = modeling_kda.KdaHybridConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=4, linear_num_heads=1, linear_head_dim=4, kv_lora_rank=4,
        num_attention_heads=1, qk_nope_head_dim=4, qk_rope_head_dim=0, v_head_dim=4, intermediate_size=8,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert type(model) is modeling_kda.KdaHybridForCausalLM
    return list(model(torch.tensor([[3, 4]])).logits.shape)

importlib.reload(modeling_kda)
found["reloaded"] = logits()
forget("modeling_kda")
import modeling_kda
found["imported again"] = logits()
found["native"] = type(transformers.AutoConfig.for_model("kimi_linear")).__module__.split(".")[0]
forget("modeling_kda", "peft", *optional)
for name in ["peft", *optional]:
    sys.modules[name] = None
import modeling_kda
found["blocked"] = logits()
print(json.dumps(found))
"""

# Runs in a Python of its own, away from the checkout: a model with its code, and nothing else of ours.
REMOTE = """
import sys
import torch, transformers

assert "modeling_kda" not in sys.modules
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
ids = torch.tensor([[int(x) for x in sys.argv[2].split(",")]])
model(ids, labels=ids).loss.backward()
print(model.eval().generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist())
"""


def fresh_python(code: str, *arguments: str, folder: Path = ROOT, **environment: str) -> str:
    """What `code` prints in a new Python; a failure shows its error."""
    result = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", code, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def imports() -> dict:
    return json.loads(fresh_python(IMPORTS))


def test_import_loads_no_optional_library(imports):
    assert imports["loaded"] == []


@pytest.mark.parametrize("how", ["reloaded", "imported again", "blocked"])
def test_import_works(imports, how):
    assert imports[how] == [1, 2, 11]


def test_import_leaves_the_native_model_alone(imports):
    assert imports["native"] == "transformers"


def test_module_prints_versions_and_backends(capsys):
    runpy.run_module("modeling_kda", run_name="__main__")
    first, *rest = capsys.readouterr().out.splitlines()
    for text in (modeling_kda.__version__, torch.__version__, transformers.__version__):
        assert text in first
    assert "\n".join(rest) == backend_report()
    for name in ("torch", "reference"):
        assert any(line.split()[:2] == [name, "ready"] for line in rest)


@pytest.fixture
def version(request, monkeypatch):
    """Another version of transformers; afterwards the module is as before."""
    # transformers may have put another module in its own place since it was imported here.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", request.param)
    yield request.param
    monkeypatch.undo()
    importlib.reload(compat_transformers)


@pytest.mark.parametrize("version", ["4.57.3", "5.16.9", "6.0.0", "6.0.0.dev0", "7.1"], indirect=True)
def test_import_refuses_other_versions_of_transformers(version):
    with pytest.raises(ImportError, match=rf'{version} is installed. Run: pip install "transformers>=5.17,<6"'):
        importlib.reload(compat_transformers)


@pytest.mark.parametrize("version", ["5.17.0", "5.17.0.dev0", "5.24.0", "5.99.1"], indirect=True)
def test_import_takes_supported_versions_of_transformers(version):
    importlib.reload(compat_transformers)


def test_public_names_are_there_and_documented():
    assert len(modeling_kda.__all__) == len(set(modeling_kda.__all__))
    for name in modeling_kda.__all__:
        value = getattr(modeling_kda, name)
        assert not callable(value) or value.__doc__, name


def test_saved_code_runs_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(KdaHybridConfig, "_auto_class", "AutoConfig")
    monkeypatch.setattr(KdaHybridForCausalLM, "_auto_class", "AutoModelForCausalLM")
    model, ids = tiny_model(), token_ids(40)
    model.save_pretrained(tmp_path / "model")
    numbers = ",".join(str(x) for x in ids[0].tolist())
    printed = fresh_python(
        REMOTE, str(tmp_path / "model"), numbers, folder=tmp_path, HF_MODULES_CACHE=str(tmp_path / "modules")
    )
    want = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert json.loads(printed) == want.tolist()
