"""The notebooks run from top to bottom, as scripts and as notebooks, and show what they say they show."""

import contextlib
import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from update_readme import README, marked

from modeling_kda.ops_reference import log_decay


NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def run(name: str) -> tuple[dict[str, Any], str]:
    """Runs a notebook cell by cell; returns its variables and what it printed."""
    cells = pytest.importorskip("jupytext").read(NOTEBOOKS / name).cells
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for cell in cells:
            if cell.cell_type == "code":
                exec(compile(cell.source, name, "exec"), namespace)
    return namespace, printed.getvalue()


@pytest.mark.parametrize("name", sorted(path.name for path in NOTEBOOKS.glob("*.py")))
def test_notebooks_are_valid_and_begin_with_a_title(name):
    notebook = pytest.importorskip("jupytext").read(NOTEBOOKS / name)
    pytest.importorskip("nbformat").validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# ")
    assert notebook.metadata["kernelspec"]["name"] == "python3"


@pytest.fixture(scope="module")
def demo() -> tuple[dict[str, Any], str]:
    """The demo with few steps of training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEMO_STEPS", "6")
        return run("demo.py")


def test_demo_learns_and_changes_what_it_writes(demo):
    names, printed = demo
    assert names["loss_after"] < names["loss_before"] - 0.5
    assert names["text_after"].startswith(names["PROMPT"])
    assert names["text_after"] not in printed.split("before:")[1].split("after:")[0]
    assert "tokens a second" in printed


def test_demo_prints_what_the_readme_shows(demo):
    """Before the training, which is longer there, and but for the speed."""
    shown, printed = (
        [line.rstrip() for line in text.split("3. Fine-tuning")[0].splitlines() if "tokens a second" not in line]
        for text in (marked(README.read_text(), "demo"), demo[1][demo[1].index("1. A model") :])
    )
    assert shown[1:] == printed, "run: make demo | .venv/bin/python -m tests.update_readme /dev/stdin"


def test_demo_reloads_what_it_saved(demo):
    names, printed = demo
    assert names["text_adapter"] == names["text_merged"] == names["text_after"]
    assert printed.count("writes the same: True") == 2


def test_demo_counts_the_bytes_of_every_tensor(demo):
    """Six layers of four heads: keys of 96 and values of 64; or latents of 96; or, in four, states of 64 x 64."""
    _, printed = demo
    rows = [line.split() for line in printed.splitlines() if line.strip()[:5] in ("256  ", "1,024", "4,096")]
    got = [[int(word.replace(",", "")) for word in row] for row in rows]
    constant = 4 * (4 * 64 * 64 + 3 * (3 * 4 * 64)) * 4
    want = [[n, constant + 2 * 96 * 4 * n, 6 * 96 * 4 * n, 6 * 4 * (96 + 64) * 4 * n] for n in (256, 1024, 4096)]
    assert got == want


@pytest.fixture(scope="module")
def states() -> tuple[dict[str, Any], str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLBACKEND", "agg")  # no window
        return run("what_the_state_remembers.py")


def test_states_notebook_recurrence_is_the_operation(states):
    names, _ = states
    assert names["difference_o"] < 1e-6
    assert names["difference_state"] < 1e-6


def test_states_notebook_half_lives_are_those_of_the_layer_s_own_decay(states):
    """A half-life is what halves: the mean decay to the power of it is one half."""
    names, printed = states
    assert list(names["half_lives"]) == [0, 1, 3, 4]
    for i, layer in names["layers"].items():
        gate = names["gates"][i].unsqueeze(0).unflatten(-1, (4, 64))
        g = log_decay(gate, layer.A_log, layer.dt_bias)[0].mean(0)
        halves = torch.exp(g * names["half_lives"][i])
        assert torch.allclose(halves, torch.full_like(halves, 0.5), atol=1e-5)
    assert "half-lives" in printed.lower()


def test_states_notebook_trace_shrinks(states):
    names, _ = states
    traces = names["traces"][names["carried"] :]
    assert all(later <= earlier * (1 + 1e-5) for earlier, later in pairwise(traces))
    assert traces[-1] < 0.1 * traces[0]
