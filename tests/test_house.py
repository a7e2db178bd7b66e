"""The rules of the house: who may import whom, what an import may load, how long a file may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "modeling_kda"
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))

# Module (or prefix, with a star) -> the modules of ours that it may import at its top level.
ALLOWED = {
    "configuration_kda_hybrid": [],
    "ops_reference": [],
    "ops_torch": ["ops_operator", "ops_reference"],
    "ops_mixer": ["ops_reference"],
    "ops_operator": ["ops_reference"],
    "ops_launch": ["kernels_*", "ops_operator"],
    "ops_chunk": ["kernels_*", "ops_launch", "ops_operator", "ops_reference"],
    "ops_triton": ["kernels_*", "ops_chunk", "ops_launch", "ops_mixer", "ops_operator", "ops_reference"],
    "ops_glue": ["kernels_*", "ops_launch", "ops_mixer", "ops_operator", "ops_reference"],
    "ops_fla": ["ops_operator", "ops_reference"],
    "ops_flash_kda": ["ops_launch", "ops_operator", "ops_reference"],
    "ops_kda": ["ops_*"],
    "ops_attnres": ["kernels_*", "ops_kda", "ops_launch"],
    "ops_linear": ["kernels_*", "ops_kda", "ops_launch"],
    "ops_mla": ["kernels_*", "ops_kda", "ops_launch", "ops_operator", "ops_reference"],
    "ops_moe": ["kernels_*", "ops_launch", "ops_operator", "ops_reference", "weights_mxfp4"],
    "ops_rows": ["kernels_*", "ops_kda", "ops_launch", "ops_operator", "ops_reference"],
    "kernels_*": ["kernels_*"],
    "cache_memory": ["ops_reference"],
    "cache_kda_hybrid": ["configuration_kda_hybrid", "cache_memory", "compat_transformers"],
    "cache_prefix": ["cache_kda_hybrid"],
    "layers_*": [
        "configuration_kda_hybrid",
        "cache_kda_hybrid",
        "cache_memory",
        "ops_attnres",
        "ops_kda",
        "ops_linear",
        "ops_mixer",
        "ops_mla",
        "ops_moe",
        "ops_reference",
        "ops_rows",
        "layers_*",
        "weights_mxfp4",
    ],
    "weights_mxfp4": [],
    "weights_kda": ["configuration_kda_hybrid", "weights_mxfp4"],
    "compat_transformers": [],
    "generation_graph": ["compat_transformers", "ops_linear"],
    "generation_kda_hybrid": ["cache_kda_hybrid", "cache_memory", "compat_transformers", "generation_graph"],
    "modeling_kda_hybrid": [
        "configuration_kda_hybrid",
        "cache_kda_hybrid",
        "compat_transformers",
        "generation_kda_hybrid",
        "layers_*",
        "ops_linear",
        "weights_kda",
    ],
    "__init__": ["*"],
    "__main__": ["__init__"],
}
OPTIONAL = ["fla", "triton", "flash_kda", "einops", "bitsandbytes", "causal_conv1d"]


def matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def imports(module: str) -> list[tuple[str, bool, bool]]:
    """(module, relative, at the top level) of every import of a file."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    found = []
    for node in ast.walk(tree):
        top = node in tree.body
        if isinstance(node, ast.Import):
            found += [(alias.name, False, top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [(name if name in MODULES else "__init__", True, top) for name in names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module, False, top))
    return found


def test_package_is_one_flat_folder():
    """Remote-code export copies siblings only: a subfolder with code would be left behind."""
    assert not [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE]


@pytest.mark.parametrize("module", MODULES)
def test_imports_of_ours_follow_the_rules(module):
    [allowed] = [names for pattern, names in ALLOWED.items() if matches(module, pattern)]
    for name, relative, _ in imports(module):
        assert relative or not name.startswith("modeling_kda"), f"{module} imports {name} by its absolute name"
        if relative:
            assert any(matches(name, pattern) for pattern in allowed), f"{module} may not import {name}"


@pytest.mark.parametrize("module", MODULES)
def test_optional_packages_are_imported_inside_functions(module):
    for name, _, top in imports(module):
        assert not (top and name.split(".")[0] in [*OPTIONAL, "peft"]), f"{module} imports {name} at its top level"


def test_layers_import_no_layer_above_them():
    order = ["layers_context", "layers_attnres", "layers_mlp", "layers_kda", "layers_mla"]
    assert sorted(order) == [name for name in MODULES if name.startswith("layers_")]
    for module in order:
        for name, relative, _ in imports(module):
            if relative and name in order:
                assert order.index(name) < order.index(module), f"{module} imports {name}, which is above it"


def test_configuration_does_not_import_torch():
    assert "torch" not in [name.split(".")[0] for name, _, _ in imports("configuration_kda_hybrid")]


def test_import_loads_no_optional_package():
    code = (
        "import sys, torch, transformers, transformers.generation, transformers.modeling_utils\n"
        "before = set(sys.modules)\n"  # torch itself imports triton where it is
        "import modeling_kda\n"
        f"print([name for name in {OPTIONAL!r} if name in set(sys.modules) - before])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_import_works_without_any_optional_package():
    blocked = [*OPTIONAL, "peft", "accelerate", "datasets"]
    code = (
        "import sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        "import modeling_kda, torch\n"
        "config = modeling_kda.KdaHybridConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, linear_num_heads=1)\n"
        "print(modeling_kda.KdaHybridForCausalLM(config)(torch.tensor([[1, 2]])).logits.shape)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == "torch.Size([1, 2, 9])", run.stderr


@pytest.mark.parametrize("folder", ["modeling_kda", "conversion", "tests", "notebooks"])
def test_no_file_is_too_long(folder):
    limits = {"ops_reference.py": 250}
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert lengths
    assert not {path: n for path, n in lengths.items() if n > limits.get(path.name, 600)}


def test_every_public_function_is_typed():
    bare = []
    for module in MODULES:
        if module.startswith("kernels_"):
            continue  # Triton's language has types of its own
        for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                arguments = [a for a in node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")]
                if node.returns is None or any(a.annotation is None for a in arguments):
                    bare.append(f"{module}.{node.name} is not typed")
    assert not bare, bare
