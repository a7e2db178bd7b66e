"""A mixture of experts at a few tokens on a GPU: our own Triton kernels, which read the chosen experts where they lie.

What torch has copies the chosen weights first, or waits for the CPU to see which they are. Runs under Triton's
interpreter too (`TRITON_INTERPRET=1`), on the CPU and slowly, for the tests.

Legend: X tokens, E experts, A experts a token uses, L width in which they work, I width of an expert.
"""

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from .ops_launch import DTYPES, NAME, ceil, device_of, early, power, unfit, why_not
from .ops_operator import operator
from .weights_mxfp4 import BLOCK


MOST_TOKENS = 16  # Beyond, tokens share experts, and a product that reads each expert once is faster.
PROGRAMS = 264  # Two for each of an H200's multiprocessors: fewer cannot ask for bytes fast enough.


class Tile(NamedTuple):
    """How a launch is cut: the most rows of the weight a program has, columns it takes at once (half as many of
    float32), warps, stages."""

    rows: int
    columns: int
    warps: int
    stages: int


GATE_UP, DOWN = Tile(16, 256, 4, 3), Tile(8, 1024, 4, 3)
# More numbers for each load of x, which costs as much as decoding some; fewer words than threads in a row of the tile,
# or x goes through shared memory.
PACKED_GATE_UP, PACKED_DOWN = Tile(32, 512, 4, 2), Tile(16, 512, 4, 2)


def refuses(
    hidden_states: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> str | None:
    """Why `run` cannot run these, or None."""
    experts = [x for x in (gate_up, down, gate_up_scale, down_scale) if x is not None]
    tensors, device = [hidden_states, index, weights, *experts], hidden_states.device
    if (reason := unfit(hidden_states)) is not None:
        return reason
    if any(x.device != device for x in tensors):
        return "tensors on several devices"
    wanted = hidden_states.dtype if gate_up_scale is None else torch.uint8
    if hidden_states.dtype not in DTYPES or any(x.dtype != wanted for x in experts):
        return f"dtype {hidden_states.dtype}, experts of {gate_up.dtype}"
    if not 0 < len(hidden_states) <= MOST_TOKENS:
        return f"no token, or more than {MOST_TOKENS}"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "gradients"
    if not all(x.is_contiguous() for x in experts):
        return "experts that do not lie in one piece"
    if not _fit(hidden_states.shape, index.shape, weights.shape, [x.shape for x in experts]):
        return "shapes that do not fit together"
    return None


def _fit(x: torch.Size, index: torch.Size, weights: torch.Size, experts: list[torch.Size]) -> bool:
    """Whether no kernel reads past an end."""
    (E, L), I = experts[1][:2], experts[0][1] // 2  # noqa: E741
    shapes = [(E, 2 * I, L), (E, L, I)]
    if len(experts) == 4:
        shapes = [(*rows, width // of) for of in (2, BLOCK) for *rows, width in shapes]
    return x == (*index[:1], L) and index == weights and [tuple(shape) for shape in experts] == shapes


def run(
    hidden_states: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    betas: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """Each token's experts, weighted and summed: `[X, L]`, rounded once after the sum.

    Args:
        hidden_states: `[X, L]`.
        index: `[X, A]`, the experts' numbers; from E on they are another device's and add nothing.
        weights: `[X, A]`.
        gate_up: `[E, 2 * I, L]`, gate before up; in the dtype of `hidden_states`, or codes of MXFP4.
        down: `[E, L, I]`, likewise.
        gate_up_scale, down_scale: scale bytes of MXFP4, see `weights_mxfp4.decode`.
        betas: SiTU's two, see `layers_mlp.situ`; without the first (0) the activation is `silu(gate) * up`.
    """
    return _experts(hidden_states, index, weights, gate_up, down, gate_up_scale, down_scale, *betas)


@operator("experts")
def _experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    beta: float,
    linear_beta: float,
) -> Tensor:
    x, index = x.contiguous(), index.contiguous()
    h = _gate_up(x, index, gate_up, gate_up_scale, beta, linear_beta)
    return _down(h, index, weights.float().contiguous(), down, down_scale, x.dtype)


@_experts.register_fake
def _(x, index, weights, gate_up, down, gate_up_scale, down_scale, beta, linear_beta):
    return x.new_empty(x.shape)


def _gate_up(
    x: Tensor, index: Tensor, weight: Tensor, scale: Tensor | None, beta: float, linear_beta: float
) -> Tensor:
    """`[X, A, I]`, as `_down` wants it: in the dtype of x, as after any product, or TURNED (see `kernels_moe`)."""
    from .kernels_moe import gate_up

    (X, L), A, (E, rows) = x.shape, index.shape[1], weight.shape[:2]
    tile = _cut(GATE_UP if scale is None else PACKED_GATE_UP, rows // 2, X * A, L, _numbers(weight))
    h = x.new_empty(X, A, rows // 2, dtype=x.dtype if scale is None else torch.float32)
    with device_of(x):
        gate_up[(ceil(rows // 2, tile.rows), X * A)](
            x,
            index,
            _loaded(weight),
            scale,
            h,
            E,
            A=A,
            L=L,
            I=rows // 2,
            R=tile.rows,
            C=tile.columns,
            N=_numbers(weight),
            STAGES=tile.stages,
            BETA=beta,
            LINEAR_BETA=linear_beta,
            num_warps=tile.warps,
            **early(x),
        )
    return h


def _down(
    h: Tensor, index: Tensor, weights: Tensor, weight: Tensor, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    from .kernels_moe import down

    (X, A, I), (E, L) = h.shape, weight.shape[:2]  # noqa: E741
    tile = _cut(DOWN if scale is None else PACKED_DOWN, L, X, I, _numbers(weight))
    out = h.new_empty(X, L, dtype=dtype)
    with device_of(h):
        down[(ceil(L, tile.rows), X)](
            h,
            index,
            weights,
            _loaded(weight),
            scale,
            out,
            E,
            A=A,
            L=L,
            I=I,
            R=tile.rows,
            C=tile.columns,
            N=_numbers(weight),
            STAGES=tile.stages,
            num_warps=tile.warps,
            **early(h),
        )
    return out


def _cut(tile: Tile, rows: int, times: int, width: int, numbers: int) -> Tile:
    """`tile` with so few rows that `times` products of `rows` rows are `PROGRAMS` programs, and no useless columns."""
    most, columns = tile.rows, power(max(width, BLOCK))
    while most > 4 and times * ceil(rows, most) < PROGRAMS:
        most //= 2
    return tile._replace(rows=most, columns=min(tile.columns * min(numbers, 8) // 8, columns))


def _loaded(weight: Tensor) -> Tensor:
    """As a kernel loads it."""
    return weight.view(torch.int32) if weight.dtype == torch.uint8 else weight


def _numbers(weight: Tensor) -> int:
    """N of `kernels_moe`."""
    return BLOCK if weight.dtype == torch.uint8 else 16 // weight.element_size()


BACKEND = sys.modules[__name__]

__all__ = ["BACKEND", "NAME", "refuses", "run", "why_not"]
