"""The contract of the KDA operation, and which backend runs a call.

A backend is a module with four names: `NAME`; `why_not()`, why it cannot run here; `refuses(call)`, why it cannot run
this call; and `run(call)`. See `KdaCall` for what goes in and comes out. The first backend of `BACKENDS` that does not
object runs the call; an error while it runs is an error, never a reason to try the next.
"""

import contextlib
import difflib
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.utils import logging

# As names of the modules: exported model code cannot say `from . import ops_torch`.
from .ops_fla import BACKEND as ops_fla
from .ops_flash_kda import BACKEND as ops_flash_kda
from .ops_glue import convolve, normalise, refuses_glue
from .ops_mixer import MixerCall, Moved, compose
from .ops_reference import BACKEND as ops_reference
from .ops_reference import KdaCall, without_autocast
from .ops_torch import BACKEND as ops_torch
from .ops_triton import BACKEND as ops_triton


logger = logging.get_logger(__name__)

# In order of preference. The last is for who asks for it by name: see there what it costs.
BACKENDS = (ops_triton, ops_fla, ops_torch, ops_reference, ops_flash_kda)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_choice = "auto"  # a plain global, which torch.compile can read: the last of those asked for
_choices: list[str] = []


def kda(call: KdaCall) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention.

    Returns: `o` `[B, T, H, V]` in the dtype of `v`, and the final state `[N, H, V, K]` float32.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        RuntimeError: the backend chosen by `use_backend` cannot run the call.
    """
    _check(call)
    with without_autocast(call.q):  # the backend chooses its own precision
        return _backend_for(call).run(call)


def mixer(call: MixerCall) -> tuple[Tensor, Tensor, Tensor, Moved | None]:
    """A KDA layer between its projections; see `MixerCall` for what goes in and comes out."""
    if leaves_out_kernels() or ops_triton.why_not():
        return compose(call, kda)
    if allowed(ops_triton.NAME) and not ops_triton.refuses_mixer(call):
        with without_autocast(call.q):
            return ops_triton.run_mixer(call)
    return compose(call, kda) if refuses_glue(call) else compose(call, kda, convolve, normalise)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the `with` block, KDA runs on the backend of this name and no other, in every thread; "auto" is the
    default.

    Raises:
        ValueError: there is no such backend.
    """
    names = ["auto", *(backend.NAME for backend in BACKENDS)]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0)[0]
        raise ValueError(f"unknown KDA backend {name!r}; there are {names}. Did you mean {near!r}?")
    global _choice
    _choices.append(name)
    _choice = name
    try:
        yield
    finally:
        del _choices[len(_choices) - 1 - _choices[::-1].index(name)]  # another thread's may have come behind it
        _choice = _choices[-1] if _choices else "auto"


def allowed(name: str) -> bool:
    """Whether the user leaves the choice to run kernels of this backend."""
    return _choice in ("auto", name)


def leaves_out_kernels() -> bool:
    """Whether the user wants plain torch around the operation, too."""
    return _choice in (ops_torch.NAME, ops_reference.NAME)


def backend_report() -> str:
    """One line for each backend: whether it runs here, or why not. Calls may still be refused one by one."""
    lines = [f"KDA backends, in order of preference (chosen: {_choice})"]
    for backend in BACKENDS:
        reason = backend.why_not()
        lines.append(f"  {backend.NAME:<10} {'ready' if reason is None else 'not available: ' + reason}")
    return "\n".join(lines)


def _backend_for(call: KdaCall):
    reasons = []
    for backend in BACKENDS:
        if _choice not in ("auto", backend.NAME):
            continue
        reason = backend.why_not() or backend.refuses(call)
        if reason is None:
            if reasons and not torch.compiler.is_compiling():
                # Where something faster could run, this is worth a word; elsewhere it is for who looks for it.
                slow = backend is ops_torch and call.q.device.type == "cuda"
                tell = logger.warning_once if slow else logger.info_once
                tell(f"KDA runs on backend {backend.NAME!r}, because others cannot: {'; '.join(reasons)}.")
            return backend
        reasons.append(f"{backend.NAME}: {reason}")
    raise RuntimeError("no KDA backend can run this call. " + "; ".join(reasons))


def _check(call: KdaCall) -> None:
    """Raises ValueError if the tensors do not fit together: a kernel would read past their ends."""
    for name in ("q", "v"):
        if getattr(call, name).ndim != 4:
            raise ValueError(
                f"`{name}` has shape {tuple(getattr(call, name).shape)}; it must be [batch, tokens, heads, width]."
            )
    B, T, H, K = call.q.shape
    V, N, device = call.v.shape[-1], call.num_documents, call.q.device
    wanted = {
        "q": (B, T, H, K),
        "k": (B, T, H, K),
        "v": (B, T, H, V),
        "gate": (B, T, H, K),
        "beta": (B, T, H),
        "A_log": (H,),
        "dt_bias": (H * K,),
        "state": (N, H, V, K),
        "writes": (B, T, H, V),
    }
    for name, shape in wanted.items():
        tensor = getattr(call, name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"`{name}` has shape {tuple(tensor.shape)}; with `q` {(B, T, H, K)} it must be {shape}.")
        if tensor.device != device:
            raise ValueError(f"`{name}` is on {tensor.device}, `q` on {device}; they must be on one device.")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"`{name}` is {tensor.dtype}; supported: {', '.join(map(str, DTYPES))}.")
    if call.lower_bound is not None and not call.lower_bound < 0:
        raise ValueError(f"`lower_bound` bounds a log decay, so it must be below 0 or None, got {call.lower_bound!r}.")
    if call.cu_seqlens is not None:
        if B != 1:
            raise ValueError(f"with `cu_seqlens` the batch has one row of packed tokens, got {B}.")
        if call.cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            borders = call.cu_seqlens.tolist()
            if not borders or borders[0] != 0 or borders[-1] != T or borders != sorted(borders):
                raise ValueError(f"`cu_seqlens` must go up from 0 to {T} (tokens), got {borders}.")


__all__ = ["KdaCall", "backend_report", "kda", "use_backend"]
