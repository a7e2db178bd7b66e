"""Makes a folder that loads with `trust_remote_code=True` where this package is not installed: the weights, and the
model's code beside them. It is loaded once in a clean process, with the package hidden, before it is called done."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers.dynamic_module_utils import custom_object_save

from modeling_kda import KdaHybridConfig, KdaHybridForCausalLM, KdaHybridForSequenceClassification, KdaHybridModel

from . import plans
from .checkpoint import Checkpoint
from .stream import check_target


CLASSES = {
    "AutoModel": KdaHybridModel,
    "AutoModelForCausalLM": KdaHybridForCausalLM,
    "AutoModelForSequenceClassification": KdaHybridForSequenceClassification,
}
# Run where the package cannot be imported: prints the class that was loaded and a sum of its logits.
_PROBE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "modeling_kda":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype="auto").eval()
assert "modeling_kda" not in sys.modules
ids = torch.arange(3, 19)[None] % model.config.vocab_size
with torch.no_grad():
    logits = model(ids).logits
assert logits.isfinite().all(), "the logits are not finite"
print(type(model).__name__, sum(p.numel() for p in model.parameters()), flush=True)
"""


def export(source: str | Path, target: str | Path, force: bool = False) -> str:
    """Writes the folder; returns what the clean process loaded.

    Args:
        source: a `kda_hybrid` checkpoint.
        target: the folder to make.
        force: whether a folder of that name is replaced.

    Raises:
        ValueError: `source` is of another layout or not whole, `target` exists or holds the source, or the clean
            process cannot load it.
    """
    source, target = Checkpoint(source), Path(target).resolve()
    check_target(target, source)
    if not plans.is_ours(source):
        raise ValueError(f"{source.folder} is no `kda_hybrid` checkpoint; run `to-kda-hybrid` on it first.")
    if target.exists() and not force:
        raise ValueError(f"{target} exists; nothing is overwritten without `--force`.")
    config = KdaHybridConfig.from_pretrained(source.folder)
    plans.check_complete(source, config, source.specs.values())
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as folder:
        partial = Path(folder) / target.name
        partial.mkdir()
        files = {source.folder / file for file in source.files.values()} | set(source.folder.glob("*.index.json"))
        for path in (*source.other_files(), *files):
            if path.suffix != ".py":  # the code of this package alone is exported
                shutil.copyfile(path, partial / path.name)
        _write_code(config, partial)
        loaded = _load(partial)
        if target.exists():
            os.replace(target, Path(folder) / "old")
        os.replace(partial, target)
    return loaded


def _write_code(config: KdaHybridConfig, folder: Path) -> None:
    """Copies the modules that the model is made of, and says in `config.json` where the classes are."""
    places = {}
    for auto, kind in {"AutoConfig": KdaHybridConfig, **CLASSES}.items():
        with torch.device("meta"):
            module = kind if kind is KdaHybridConfig else kind(config)
        custom_object_save(config if kind is KdaHybridConfig else module, folder)
        places[auto] = f"{kind.__module__.rsplit('.', 1)[1]}.{kind.__name__}"
    fields = json.loads(config.to_json_string())
    fields |= {"architectures": [KdaHybridForCausalLM.__name__], "auto_map": places}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def _load(folder: Path) -> str:
    with tempfile.TemporaryDirectory() as elsewhere:  # Python looks for modules where it runs
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, str(folder.resolve())],
            capture_output=True,
            text=True,
            env={**os.environ, "HF_MODULES_CACHE": elsewhere, "PYTHONPATH": ""},
            cwd=elsewhere,
        )
    if done.returncode:
        raise ValueError(f"what was exported does not load in a clean process:\n{done.stderr.strip()[-2000:]}")
    return done.stdout.strip().splitlines()[-1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="folder of a kda_hybrid checkpoint")
    parser.add_argument("target", type=Path, help="folder to make")
    parser.add_argument("--force", action="store_true", help="replace the target if it exists")


def run(given: argparse.Namespace) -> None:
    loaded = export(given.source, given.target, given.force)
    print(f"{given.target}: loads without the package ({loaded} parameters).")
