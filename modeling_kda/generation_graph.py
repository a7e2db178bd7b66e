"""The decoding step of `generate` as a CUDA graph, one launch for all kernels of a token, and the loop around it."""

import contextlib
import math
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import BaseStreamer, MaxLengthCriteria
from transformers.utils import logging

from .compat_transformers import CACHE_NAME
from .ops_linear import hooked


logger = logging.get_logger(__name__)

# While a graph is captured, its device gives random numbers to nobody else, whatever the thread.
_random_numbers = threading.Lock()

# Graphs of a model that are over, by the stream they ran on, each with the stream it was captured on: the next one
# there takes their memory, which torch would keep for nobody until there is no other.
_Graphs = dict[torch.cuda.Stream, list[tuple[torch.cuda.CUDAGraph, torch.cuda.Stream]]]
_over: weakref.WeakKeyDictionary[nn.Module, _Graphs] = weakref.WeakKeyDictionary()

# Why a model could not be captured, by rows: after a try that failed, torch may keep its memory for good.
_failed: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()

# What `forward` may be asked to return that a graph would overwrite with the next token.
EXTRAS = ("output_attentions", "output_hidden_states", "output_router_logits")


class StepGraph:
    """Calls a model on a static cache, one token a row: the first time as it is, then captured, then replayed.

    A call that is not such a step, or not like the one that was captured, runs as it is. What a replay returns is
    overwritten by the next one.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.cache, self.length = None, 0  # what a call goes on from, and how many tokens it has seen
        self.warm = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.problem = problem_of(model)
        if self.problem:
            self._give_up(self.problem)

    def __call__(self, **inputs: Any) -> Any:
        if self.problem or not self._is_step(inputs):
            return self.model(**inputs)
        inputs.pop("position_ids", None)  # of one token they say nothing
        cache = inputs[CACHE_NAME]
        if cache is not self.cache:
            self.cache, self.length = cache, cache.get_seq_length()  # which waits for the device: once
        cache.check_room(self.length, 1)
        self.length += 1
        if not self.warm:
            self.warm = True  # what is made at a first call is made now: kernels compiled, workspaces allocated
            return self.model(**inputs)
        if self.graph is None:
            self._capture(inputs)
        elif not self._like_captured(inputs):
            return self.model(**inputs)
        if self.problem:
            return self.model(**inputs)
        for name, x in self.tensors.items():
            x.copy_(inputs[name])
        self.graph.replay()
        return self.outputs

    @staticmethod
    def _is_step(inputs: dict[str, Any]) -> bool:
        ids, cache = inputs.get("input_ids"), inputs.get(CACHE_NAME)
        step = ids is not None and ids.is_cuda and ids.shape[1] == 1 and cache is not None and cache.is_compileable
        return step and not any(inputs.get(name) for name in EXTRAS)

    def _capture(self, inputs: dict[str, Any]) -> None:
        """Records the kernels of a call; none of them runs."""
        failed, rows = _failed.setdefault(self.model, {}), len(inputs["input_ids"])
        if rows in failed:
            self._give_up(failed[rows])
            return
        self.tensors = {name: x.clone() for name, x in inputs.items() if isinstance(x, Tensor)}
        self.rest = {name: x for name, x in inputs.items() if name not in self.tensors}
        device = inputs["input_ids"].device
        here = torch.cuda.current_stream(device)
        over = _over.setdefault(self.model, {}).setdefault(here, [])
        with _random_numbers:  # which holds other threads
            before, stream = over.pop() if over else (None, torch.cuda.Stream(device))
        graph, memory = torch.cuda.CUDAGraph(), None if before is None else before.pool()
        stream.wait_stream(here)
        try:
            with _random_numbers, torch.cuda.stream(stream), _recorded(graph, memory):  # and the stream's device
                self.outputs = self.model(**{**self.rest, **self.tensors})
        except BaseException as error:  # of any kind: if the call is wrong, it raises once more as it is
            self.cache.unfinished = False  # nothing ran
            _restore_random_numbers(device)
            if not isinstance(error, Exception):
                raise
            problem = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].rstrip(": ")
            if not isinstance(error, torch.OutOfMemoryError):  # another time there may be room
                failed[rows] = problem
            self._give_up(problem)
            return
        here.wait_stream(stream)
        self.graph = graph
        weakref.finalize(self, over.append, (graph, stream)).atexit = False

    def _like_captured(self, inputs: dict[str, Any]) -> bool:
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        same = tensors.keys() == self.tensors.keys() and inputs.keys() == {**self.rest, **self.tensors}.keys()
        return (
            same
            and all(x.shape == self.tensors[name].shape for name, x in tensors.items())
            and all(inputs[name] is x or inputs[name] == x for name, x in self.rest.items())
        )

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        logger.warning_once(f"`generate` decodes without a CUDA graph: {problem}.")


def _restore_random_numbers(device: torch.device) -> None:
    """After a capture that failed, torch's generator waits for its end, and gives no numbers: until one has ended."""
    x = torch.empty(1, device=device)
    with _random_numbers, torch.cuda.stream(torch.cuda.Stream(device)), _recorded(torch.cuda.CUDAGraph()):
        x.zero_()


@contextlib.contextmanager
def _recorded(graph: torch.cuda.CUDAGraph, memory: tuple[int, int] | None = None) -> Iterator[None]:
    """`torch.cuda.graph`, which collects garbage and gives all unused memory back first, without that.

    cuBLAS has a workspace for each stream. That of a graph belongs to nobody else, before or after.
    """
    torch._C._cuda_clearCublasWorkspaces()
    graph.capture_begin(memory, capture_error_mode="thread_local")
    try:
        yield
    finally:
        try:
            graph.capture_end()
        finally:
            torch._C._cuda_clearCublasWorkspaces()


def problem_of(model: nn.Module) -> str:
    """Why a step cannot be a graph, which leaves Python code out and is for one device. Empty if it can."""
    for name, module in model.named_modules():
        if hooked(module):
            return f"module {name!r} has hooks"
    devices = sorted({str(x.device) for x in model.parameters()})
    return f"its weights lie on {', '.join(devices)}" if len(devices) > 1 else ""


def sample(
    model: GenerationMixin,
    step: StepGraph,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> Tensor:
    """What `GenerationMixin._sample` does, but the device need not wait for the host.

    The next step is on its way before the host looks whether the token before was the last, unless somebody would see
    the cache with that step in it.
    """
    cache, mask = model_kwargs[CACHE_NAME], model_kwargs.get("attention_mask")
    ahead = not getattr(cache, "_is_user_defined", False)
    most = min((x.max_length for x in stopping_criteria if type(x) is MaxLengthCriteria), default=math.inf)
    criteria = StoppingCriteriaList([x for x in stopping_criteria if type(x) is not MaxLengthCriteria])
    pads = any(hasattr(x, "eos_token_id") for x in criteria)
    going = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
    looked = _Glance(len(input_ids) + 1, input_ids.device)

    def step_on(ids: Tensor) -> Any:
        inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **model_kwargs)
        return step(**inputs, return_dict=True)

    outputs = model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)
    model_kwargs.pop("position_ids", None)  # of one token they say nothing
    if mask is not None:  # of one shape for all steps; no step sees what is behind its own token
        model_kwargs["attention_mask"] = F.pad(mask, (0, cache.max_cache_len - mask.shape[1]), value=1)
    with model._optimize_model_for_decode():  # which is not for prompts: it copies experts for every token
        while True:
            logits = outputs.logits[:, -1]
            if logits_processor or generation_config.do_sample:
                # A copy, for a graph writes there again.
                logits = logits_processor(input_ids, logits.to(torch.float32, copy=True))
            del outputs  # those of a long prompt are large
            if generation_config.do_sample:
                with _random_numbers:
                    tokens = torch.multinomial(logits.softmax(-1), 1).squeeze(1)
            else:
                tokens = logits.argmax(-1)
            if pads:
                tokens = torch.where(going, tokens, generation_config._pad_token_tensor)
            input_ids = torch.cat([input_ids, tokens.unsqueeze(1)], 1)
            last = input_ids.shape[1] >= most
            if criteria:
                going = going & ~criteria(input_ids, None)
            if criteria or streamer is not None:
                looked.at(torch.cat([tokens, going.any().unsqueeze(0)]))

            if ahead and not last:
                outputs = step_on(input_ids)
            if streamer is not None:
                streamer.put(looked.values()[:-1])
            if last or (criteria and not looked.values()[-1]):
                break
            if not ahead:
                outputs = step_on(input_ids)
    if streamer is not None:
        streamer.end()
    return input_ids


class _Glance:
    """Numbers on the device that the host sees without waiting for what is queued behind them."""

    def __init__(self, size: int, device: torch.device):
        self.host = torch.empty(size, dtype=torch.long, device="cpu", pin_memory=device.type == "cuda")
        self.ready = torch.cuda.Event() if device.type == "cuda" else None

    def at(self, x: Tensor) -> None:
        self.host.copy_(x, non_blocking=self.ready is not None)
        if self.ready is not None:
            self.ready.record(torch.cuda.current_stream(x.device))

    def values(self) -> Tensor:
        if self.ready is not None:
            self.ready.synchronize()
        return self.host.clone()
