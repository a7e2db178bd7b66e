"""generation_graph.py: a step as a CUDA graph; without a GPU, that every call runs as it is."""

import copy

import pytest
import torch
from helpers import k3_model, tiny_model, token_ids
from transformers import CompileConfig

from modeling_kda import KdaHybridCache
from modeling_kda.compat_transformers import CACHE_NAME
from modeling_kda.generation_graph import StepGraph


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
MODELS = {"KDA and MLA": lambda: tiny_model(mlp_layer_types=["dense"] * 4), "Kimi K3": k3_model}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def steps_of(model, ids, call, cache) -> torch.Tensor:
    """Logits of a token at a time behind 6 that were read at once."""
    model(ids[:, :6], cache=cache)
    inputs = {CACHE_NAME: cache, "use_cache": True, "return_dict": True}
    return torch.cat([call(input_ids=ids[:, t : t + 1], **inputs).logits.clone() for t in range(6, ids.shape[1])], 1)


def test_generate_uses_a_graph_unless_a_way_to_compile_is_asked_for():
    model = tiny_model()
    assert isinstance(model.get_compiled_call(None), StepGraph)
    assert not isinstance(model.get_compiled_call(CompileConfig()), StepGraph)
    model.generation_config.compile_config = CompileConfig()
    assert not isinstance(model.get_compiled_call(None), StepGraph)


def test_step_graph_runs_a_call_as_it_is_without_a_gpu():
    model, ids = tiny_model(), token_ids(9, rows=2)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    step = StepGraph(model)
    got, want = (steps_of(model, ids, call, KdaHybridCache(model.config, 16)) for call in (step, model))
    assert torch.equal(got, want)
    assert step.graph is None


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "forward"])
def test_step_graph_is_not_for_models_with_hooks(kind, messages):
    model = tiny_model()
    layer = model.model.layers[1].mlp
    if kind == "forward":
        layer.forward = layer.forward  # as accelerate does
    else:
        register = layer.register_forward_hook if kind == "hook" else layer.register_forward_pre_hook
        register(lambda *args: None)
    step = StepGraph(model)
    assert step.problem == "module 'model.layers.1.mlp' has hooks"
    assert [m for m in messages() if "without a CUDA graph" in m]


@needs_gpu
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_step_graph_gives_the_logits_of_the_model(name, rows):
    model, ids = MODELS[name]().cuda(), token_ids(20, rows=rows).cuda()
    step = StepGraph(model)
    got, want = (steps_of(model, ids, call, KdaHybridCache(model.config, 32)) for call in (step, model))
    assert step.graph is not None, step.problem
    assert (got - want).abs().max() < 1e-4


@needs_gpu
@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_generate_with_a_graph_gives_the_tokens_without(name, pads, monkeypatch):
    model, ids, graphs = MODELS[name]().cuda(), token_ids(9, rows=2).cuda(), []
    capture = StepGraph._capture
    monkeypatch.setattr(StepGraph, "_capture", lambda self, inputs: (graphs.append(self), capture(self, inputs)))
    mask = torch.ones_like(ids)
    if pads:
        mask[0, :4] = 0
    given = dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
    want = copy.deepcopy(model).generate(ids, **given)
    assert torch.equal(model.generate(ids, cache_implementation="static", **given), want)
    assert torch.equal(model.generate(ids, cache_implementation="static", **given), want)
    assert len(graphs) == 2
    assert all(step.graph is not None for step in graphs)


@needs_gpu
def test_step_graph_leaves_a_call_that_is_another_step_alone():
    model, ids = MODELS["KDA and MLA"]().cuda(), token_ids(12, rows=2).cuda()
    step, other = StepGraph(model), KdaHybridCache(model.config, 32)
    steps_of(model, ids, step, KdaHybridCache(model.config, 32))
    assert step.graph is not None
    got, want = steps_of(model, ids, step, other), steps_of(model, ids, model, KdaHybridCache(model.config, 32))
    assert (got - want).abs().max() < 1e-4
    assert other.get_seq_length() == 12


@needs_gpu
def test_step_graph_says_what_it_cannot_capture_and_goes_on(monkeypatch, messages):
    model, ids = MODELS["KDA and MLA"]().cuda(), token_ids(12).cuda()
    norm, forward = model.model.norm, type(model.model.norm).forward
    monkeypatch.setattr(type(norm), "forward", lambda self, x: forward(self, x + 0 * x.sum().item()))
    step = StepGraph(model)
    got, want = (steps_of(model, ids, call, KdaHybridCache(model.config, 32)) for call in (step, model))
    assert step.graph is None
    assert step.problem
    assert (got - want).abs().max() < 1e-4
    assert [m for m in messages() if "without a CUDA graph" in m]
