"""The decoding step of `generate` as a CUDA graph: one launch for all kernels of a token."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .compat_transformers import CACHE_NAME


logger = logging.get_logger(__name__)

# What `forward` may be asked to return that a graph would overwrite with the next token.
EXTRAS = ("output_attentions", "output_hidden_states", "output_router_logits")


class StepGraph:
    """Calls a model on a static cache, one token a row: the first time as it is, then captured, then replayed.

    A call that is not such a step, or not like the one that was captured, runs as it is. What a replay returns is
    overwritten by the next one.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.warm = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.problem = hooks_of(model)
        if self.problem:
            self._give_up(self.problem)

    def __call__(self, **inputs: Any) -> Any:
        if self.problem or not self._is_step(inputs):
            return self.model(**inputs)
        inputs.pop("position_ids", None)  # of one token they say nothing
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
        self.tensors = {name: x.clone() for name, x in inputs.items() if isinstance(x, Tensor)}
        self.rest = {name: x for name, x in inputs.items() if name not in self.tensors}
        cache, graph, stream = inputs[CACHE_NAME], torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            # Not `torch.cuda.graph`, which collects garbage and gives all unused memory back first.
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self.outputs = self.model(**{**self.rest, **self.tensors})
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            cache.unfinished = False  # nothing ran
            self._give_up(str(error).splitlines()[0])
            return
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph

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


def hooks_of(model: nn.Module) -> str:
    """Why Python code must run at every step: a graph would leave it out. Empty if it need not."""
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"module {name!r} has hooks"
    return ""
