"""What every launch of our Triton kernels asks: whether they can run here and on a tensor, and how tensors lie.

They run under Triton's interpreter too (`TRITON_INTERPRET=1`, set before anything imports triton), on the CPU and
slowly: that is how they are tested where there is no GPU.
"""

import contextlib
import functools
import os

import torch
from torch import Tensor

from .ops_operator import transformed


NAME = "triton"  # of the backend that they are

# Where kernels run. Triton asks for its interpreter once, too: when it is imported.
DEVICES = ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.compiler.assume_constant_result
def why_not() -> str | None:
    """Why no kernel can run here, or None."""
    if "cpu" not in DEVICES and not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        from .kernels_kda import step  # noqa: F401
    except ImportError:
        return "triton is not installed (`pip install triton`)"
    except Exception as error:  # whatever a broken installation raises, the model runs without it
        return f"triton cannot be imported ({type(error).__name__}: {error})"
    return None


def unfit(x: Tensor) -> str | None:
    """Why no kernel can run on `x`, whatever the kernel, or None."""
    if x.device.type not in DEVICES:  # what is asked most, first
        return f"tensors on {x.device.type!r}"
    if where := transformed():
        return where
    return _unfit_device(x.device) if x.is_cuda else None


@torch.compiler.assume_constant_result
def _unfit_device(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "a GPU that is not NVIDIA's"
    return "a GPU from before Ampere" if _capability(device) < (8, 0) else None


_capability = functools.cache(torch.cuda.get_device_capability)


def early(x: Tensor) -> dict[str, bool]:
    """Arguments of a launch on the device of `x`: in a CUDA graph, from Hopper on, it may begin early."""
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    begins = captured and _capability(x.device)[0] >= 9
    return {"EARLY": True, "launch_pdl": True} if begins else {"EARLY": False}


def device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """A context in which kernels run on the device of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def rows_of(x: Tensor) -> Tensor:
    """`[..., width]` to `[rows, width]`, each row in one piece."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def power(x: int) -> int:
    """The next power of 2."""
    return 1 << (x - 1).bit_length()


def ceil(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)
