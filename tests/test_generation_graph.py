"""generation_graph.py: a step as a CUDA graph; without a GPU, that every call runs as it is."""

import contextlib
import copy

import pytest
import torch
from helpers import k3_model, tiny_model, token_ids
from torch import nn
from transformers import CompileConfig, StoppingCriteria
from transformers.generation import BaseStreamer, LogitsProcessor, MaxLengthCriteria

from modeling_kda import KdaHybridCache, generation_graph, generation_kda_hybrid
from modeling_kda.compat_transformers import CACHE_NAME
from modeling_kda.generation_graph import StepGraph, _Glance


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
MODELS = {"KDA and MLA": lambda: tiny_model(mlp_layer_types=["dense"] * 4), "Kimi K3": k3_model}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def steps_of(model, ids, call, cache) -> torch.Tensor:
    """Logits of a token at a time behind 6 that were read at once."""
    model(ids[:, :6], cache=cache)
    return torch.cat([logits_at(t, ids, call, cache).clone() for t in range(6, ids.shape[1])], 1)


def logits_at(t: int, ids, call, cache) -> torch.Tensor:
    return call(input_ids=ids[:, t : t + 1], use_cache=True, return_dict=True, **{CACHE_NAME: cache}).logits


def test_numbers_are_looked_at_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        looked = _Glance(2, torch.device("cpu"))
    looked.at(torch.tensor([3, 4]))
    assert looked.values().tolist() == [3, 4]


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


class Recorder:
    """Stands for torch's graphs and streams, and says what they are asked for."""

    asked: list[str]

    def __init__(self, device=None):
        pass

    def capture_begin(self, pool=None, capture_error_mode=""):
        self.asked.append("begin")

    def capture_end(self):
        self.asked.append("end")

    def replay(self):
        pass

    def wait_stream(self, other):
        pass


ERRORS = [RuntimeError(), RuntimeError("\nnot now"), ValueError("no"), torch.OutOfMemoryError(), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_step_graph_leaves_everything_as_it_was_if_a_capture_fails(error, monkeypatch):
    model, ids, asked, here = tiny_model(), token_ids(9), [], Recorder()
    monkeypatch.setattr(Recorder, "asked", asked, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder)
    monkeypatch.setattr(torch.cuda, "Stream", Recorder)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: asked.append("workspaces"), raising=False)
    monkeypatch.setattr(StepGraph, "_is_step", staticmethod(lambda inputs: inputs["input_ids"].shape[1] == 1))
    want = steps_of(model, ids, model, KdaHybridCache(model.config, 16))
    forward = type(model.model.norm).forward

    def fails(self, x):
        if asked == ["workspaces", "begin"]:  # inside of the first capture
            raise error
        return forward(self, x)

    monkeypatch.setattr(type(model.model.norm), "forward", fails)
    step, cache = StepGraph(model), KdaHybridCache(model.config, 16)
    interrupted = isinstance(error, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
        assert torch.equal(steps_of(model, ids, step, cache), want)
        assert step.problem.startswith(type(error).__name__)
    one = ["workspaces", "begin", "end", "workspaces"]
    assert asked == 2 * one, "the one that failed, and one after which there are random numbers again"
    assert not generation_graph._random_numbers.locked()
    assert not cache.unfinished
    again, other = StepGraph(model), KdaHybridCache(model.config, 16)
    model(ids[:, :6], cache=other)
    for t in (6, 7):
        logits_at(t, ids, again, other)
    once_more = interrupted or isinstance(error, torch.OutOfMemoryError)
    assert asked == (3 if once_more else 2) * one
    assert again.problem == ("" if once_more else step.problem)


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


def test_step_graph_is_not_for_hooks_of_all_modules():
    with nn.modules.module.register_module_forward_hook(lambda *args: None):
        assert "has hooks" in StepGraph(tiny_model()).problem
    assert not StepGraph(tiny_model()).problem


class Streamed(BaseStreamer):
    """What a streamer was given."""

    def __init__(self):
        self.given, self.ended = [], False

    def put(self, value: torch.Tensor) -> None:
        self.given.append(value.tolist())

    def end(self) -> None:
        self.ended = True


class AfterASixth(StoppingCriteria):
    """A row is over when a multiple of 6 stands behind its prompt of 9."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, 9:] % 6 == 0).any(1)


class OfThisClass(MaxLengthCriteria):
    """A length of its own, which is longer."""

    def __call__(self, input_ids, scores, **kwargs):
        return super().__call__(input_ids[:, 2:], scores, **kwargs)


ASKED = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, temperature=0.7, top_k=20),
    "processed": dict(do_sample=False, repetition_penalty=1.7),
    "ends": dict(do_sample=True, eos_token_id=list(range(40)), pad_token_id=1),
    "own criterion": dict(do_sample=True, stopping_criteria=[AfterASixth()]),
    "one token": dict(do_sample=False, max_new_tokens=1),
    "a length below the prompt": dict(do_sample=False, stopping_criteria=[MaxLengthCriteria(5)]),
    "two lengths": dict(do_sample=False, stopping_criteria=[MaxLengthCriteria(15), MaxLengthCriteria(12)]),
    "a length of another class": dict(do_sample=False, stopping_criteria=[OfThisClass(14)]),
}


@pytest.mark.parametrize("given_cache", [False, True])
@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_loop_of_a_graph_gives_what_the_loop_of_transformers_gives(name, pads, given_cache, monkeypatch):
    """Tokens, what is streamed of one row, the random numbers used, and the length of a cache that somebody sees."""
    model, results, loops = tiny_model(), [], []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids = model.to(device), token_ids(9, rows=1 if name == "greedy" else 4).to(device)
    mask = torch.ones_like(ids)
    mask[0, : 4 * pads] = 0
    loop = generation_kda_hybrid.sample
    monkeypatch.setattr(generation_kda_hybrid, "sample", lambda *args: (loops.append(1), loop(*args))[1])
    for own in (False, True):
        monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *args, own=own: own)
        torch.manual_seed(3)
        streamer = Streamed() if len(ids) == 1 else None
        cache = KdaHybridCache(model.config, 64) if given_cache else None
        kind = {"cache": cache} if given_cache else {"cache_implementation": "static"}
        asked = {"attention_mask": mask, "max_new_tokens": 30, "streamer": streamer, **kind, **ASKED[name]}
        tokens = model.generate(ids, **asked)
        results.append((tokens.tolist(), cache and cache.get_seq_length(), torch.rand(()).item()))
        results[-1] += (streamer and (streamer.given, streamer.ended),)
    assert loops == [1]
    assert results[0] == results[1]
    if name in ("ends", "own criterion"):
        assert 10 < len(results[0][0][0]) < 39, "no early end was tested"


def test_a_prompt_is_not_read_in_the_way_that_is_for_decoding(monkeypatch):
    """For which transformers has experts copied for every token."""
    model, decoding, seen = tiny_model(), [], []

    @contextlib.contextmanager
    def for_decoding(self):
        decoding.append(1)
        yield
        decoding.pop()

    monkeypatch.setattr(type(model), "_optimize_model_for_decode", for_decoding)
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *args: True)
    forward = type(model).forward

    def watched(self, **kwargs):
        seen.append((kwargs["input_ids"].shape[1], len(decoding)))
        return forward(self, **kwargs)

    monkeypatch.setattr(type(model), "forward", watched)
    model.generate(token_ids(9), max_new_tokens=3, do_sample=False, cache_implementation="static")
    assert seen == [(9, 0), (1, 1), (1, 1)]
    assert not decoding


class Kept(LogitsProcessor):
    """Keeps the scores that it gets."""

    def __init__(self):
        self.scores = []

    def __call__(self, input_ids, scores):
        self.scores.append(scores)
        return scores


class Reusing(StepGraph):
    """Returns the same tensors every time, as a graph does."""

    outputs = None

    def __call__(self, **inputs):
        new = super().__call__(**inputs)
        self.outputs = self.outputs or new
        self.outputs.logits.copy_(new.logits)
        return self.outputs


def test_processors_may_keep_scores(monkeypatch):
    model, kept = tiny_model(), [Kept(), Kept()]
    monkeypatch.setattr(generation_kda_hybrid, "StepGraph", Reusing)
    for own, processor in zip((False, True), kept):
        monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *args, own=own: own)
        asked = dict(cache_implementation="static", max_new_tokens=6, do_sample=False)
        model.generate(token_ids(7), logits_processor=[processor], **asked)
    assert len(kept[0].scores) == 6
    for got, want in zip(kept[1].scores, kept[0].scores, strict=True):
        assert torch.equal(got, want)


ALONE = dict(do_sample=False, max_new_tokens=16)
WITHOUT = {
    "few tokens": dict(max_new_tokens=15),
    "much room": dict(max_new_tokens=2**30),
    "room for many": dict(max_new_tokens=2**20, num_return_sequences=64, do_sample=True),
    "beams": dict(num_beams=2),
    "drafts": dict(prompt_lookup_num_tokens=3),
    "a cache that is returned": dict(return_dict_in_generate=True),
    "a dynamic cache": dict(cache_implementation="dynamic"),
    "no graph": dict(disable_compile=True),
    "another way to compile": dict(compile_config=CompileConfig()),
}


@pytest.mark.parametrize("why", ["nothing", "a hook", *WITHOUT])
def test_generate_takes_a_static_cache_where_a_graph_pays(why, monkeypatch):
    class Made(Exception):
        pass

    def made(self, config, length: int, default: str):
        raise Made(config.cache_implementation or default)

    model = tiny_model()
    monkeypatch.setattr(type(model), "_new_cache", made)
    choose = type(model)._graph_pays

    def on_a_gpu(self, *args) -> bool:
        with monkeypatch.context() as patched:
            patched.setattr(type(model), "device", torch.device("cuda"))
            return choose(self, *args)

    monkeypatch.setattr(type(model), "_graph_pays", on_a_gpu)
    if why == "a hook":
        model.model.norm.register_forward_hook(lambda *args: None)
    with pytest.raises(Made, match="static" if why == "nothing" else "dynamic"):
        model.generate(token_ids(5), **{**ALONE, **WITHOUT.get(why, {})})


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
def test_graphs_one_after_another_share_their_memory():
    model, ids = MODELS["KDA and MLA"]().cuda(), token_ids(9).cuda()

    def reserved(calls: int) -> int:
        for _ in range(calls):
            model.generate(ids, max_new_tokens=12, do_sample=False, cache_implementation="static")
        return torch.cuda.memory_reserved()

    assert reserved(3) == reserved(40)


@needs_gpu
def test_graphs_at_once_do_not_disturb_each_other_or_what_is_kept():
    model = MODELS["KDA and MLA"]().cuda()
    ids, caches = token_ids(20, rows=3).cuda().split(1), [KdaHybridCache(model.config, 32) for _ in range(3)]
    want = [steps_of(model, x, model, KdaHybridCache(model.config, 32)) for x in ids]
    over = StepGraph(model)
    steps_of(model, ids[0][:, :19], over, caches[0])
    kept = logits_at(19, ids[0], over, caches[0])
    assert over.graph is not None
    del over  # the next graph has its memory, but for what is kept
    pairs = [(x, StepGraph(model), cache) for x, cache in zip(ids[1:], caches[1:])]
    for x, _, cache in pairs:
        model(x[:, :6], cache=cache)
    for t in range(6, 20):
        for each, exact in zip(pairs, want[1:]):
            assert (logits_at(t, *each)[:, 0] - exact[:, t - 6]).abs().max() < 1e-4
    assert (kept[:, 0] - want[0][:, -1]).abs().max() < 1e-4


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
    assert torch.isfinite(torch.randn(3, device="cuda")).all(), "torch has random numbers as before"


@needs_gpu
def test_generate_with_a_graph_stops_where_the_cache_ends():
    model, ids = MODELS["KDA and MLA"]().cuda(), token_ids(25).cuda()
    cache = KdaHybridCache(model.config, 30)
    model(ids[:, :20], cache=cache)
    given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    with pytest.raises(ValueError, match="30"):
        model.generate(ids[:, 20:], cache=cache, **given)
