"""MXFP4, the format of Kimi K3's routed experts: two 4-bit floats a byte, and one power of two for every 32 of them.

As in the OCP Microscaling specification 1.0 (E2M1 values, E8M0 scales) and in compressed-tensors'
`mxfp4-pack-quantized`. A row's even elements are the low nibbles, its odd ones the high nibbles.

Legend: R rows of all leading axes, C columns, a multiple of 32.
"""

from functools import cache

import torch
from torch import Tensor


BLOCK = 32  # neighbours in a row that share a scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three low bits; the fourth is the sign
BIAS = 127  # a scale byte s stands for 2^(s - 127)
NOT_A_NUMBER = 255  # the one byte that stands for no power
# Bytes of codes that are decoded at once on a CPU, so that what is between stays in its caches.
SLICE = 2**19
# Magnitudes are rounded to the nearest value above or below these borders, a tie to the even code.
_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _check(packed: Tensor, scale: Tensor) -> None:
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"MXFP4 codes and scales are uint8, got {packed.dtype} and {scale.dtype}.")
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * BLOCK:
        raise ValueError(
            f"codes {tuple(packed.shape)} and scales {tuple(scale.shape)} do not belong together: each byte of codes "
            f"holds 2 numbers, each scale is for {BLOCK}."
        )


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The four numbers of every two bytes, side by side in one integer, and the power of two of every scale byte."""
    numbers = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], dtype=torch.bfloat16)
    two_bytes = torch.arange(2**16)
    fours = torch.stack([numbers[two_bytes >> shift & 15] for shift in (0, 4, 8, 12)], -1).view(torch.int64)
    powers = torch.tensor([2.0 ** (s - BIAS) for s in range(NOT_A_NUMBER)] + [float("nan")], dtype=torch.bfloat16)
    return fours.squeeze(-1).to(device), powers.to(device)


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
    """uint8 codes `[..., C / 2]` and uint8 scales `[..., C / 32]` to numbers `[..., C]`, exact in bfloat16 and wider.

    Args:
        out: where the numbers go; its type counts, not `dtype`.

    Raises:
        ValueError: other types, or shapes that do not belong together.
    """
    _check(packed, scale)
    if out is None:
        out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype, device=packed.device)
    fours, powers = _tables(packed.device)
    pairs, scales = packed.reshape(-1, packed.shape[-1]), scale.reshape(-1, scale.shape[-1])
    rows = out.view(*pairs.shape[:1], 2 * pairs.shape[1])
    step = max(1, SLICE // max(1, pairs.shape[1])) if packed.device.type == "cpu" else max(1, len(pairs))
    for i in range(0, len(pairs), step):
        index = pairs[i : i + step].contiguous().view(torch.int16).int().bitwise_and_(2**16 - 1).flatten()
        numbers = fours.index_select(0, index).view(torch.bfloat16).view(-1, scales.shape[1], BLOCK)
        power = powers.index_select(0, scales[i : i + step].int().flatten()).view(-1, scales.shape[1], 1)
        rows[i : i + step] = numbers.mul_(power).flatten(1)
    return out


def check_scales(scale: Tensor, name: str) -> None:
    """Raises ValueError if a scale byte stands for no number."""
    bad = int((scale == NOT_A_NUMBER).sum())
    if bad:
        raise ValueError(f"`{name}` holds {bad} scale bytes of {NOT_A_NUMBER}, which stand for no number (NaN).")


def fits_float16(scale: Tensor) -> bool:
    """Whether float16 holds every number that codes can make with these scale bytes: from 2^-24 to 6 * 2^13."""
    return bool(((scale >= BIAS - 23) & (scale <= BIAS + 13)).all())


def encode(weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Numbers `[..., C]` to uint8 codes `[..., C / 2]` and uint8 scales `[..., C / 32]`.

    Args:
        weight: finite numbers of any floating-point type.
        scale: the scale bytes that the numbers came with. If every number is one that they can hold, they are kept,
            and what `decode` gave returns byte for byte. If not, new scales are chosen by the rule of
            compressed-tensors: the largest magnitude of a block, its mantissa rounded to 2 bits, gets exponent 2,
            and -0 becomes 0.

    Raises:
        ValueError: a number that is not finite, or a width that is no multiple of 32.
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"the width {weight.shape[-1]} is no multiple of {BLOCK}, as MXFP4 needs.")
    if not weight.isfinite().all():
        raise ValueError("the weight holds numbers that are not finite; MXFP4 cannot.")
    blocks = weight.float().unflatten(-1, (-1, BLOCK))  # [..., C / 32, 32]
    if scale is not None:
        codes, exact = _codes(blocks, scale, blocks.signbit())
        if exact:
            return _pack(codes), scale
    scale = _scales(blocks)
    return _pack(_codes(blocks, scale, blocks < 0)[0]), scale


def _scales(blocks: Tensor) -> Tensor:
    """Scale bytes `[..., C / 32]`: 2 below the exponent of the largest magnitude, 1.75 * 2^e counted as 2^(e + 1)."""
    mantissa, exponent = blocks.abs().amax(-1).frexp()  # mantissa in [0.5, 1), so 1.75 is 0.875 here
    byte = exponent - 1 + (mantissa >= 0.875).int() - 2 + BIAS
    return torch.where(mantissa == 0, 0, byte.clamp(0, NOT_A_NUMBER - 1)).to(torch.uint8)


def _codes(blocks: Tensor, scale: Tensor, negative: Tensor) -> tuple[Tensor, bool]:
    """4-bit codes of the blocks under these scales, and whether they stand for exactly the same numbers."""
    powers = _tables(blocks.device)[1].double()[scale.int()].unsqueeze(-1)
    scaled = (blocks.double() / powers).float()
    borders = torch.tensor(_BORDERS, device=blocks.device)
    size = scaled.abs()
    low, high = torch.bucketize(size, borders, right=False), torch.bucketize(size, borders, right=True)
    code = torch.where(low % 2 == 0, low, high)  # they differ at a tie only
    exact = bool((torch.tensor(MAGNITUDES, device=blocks.device)[code] == size).all())
    return (code | (negative.long() << 3)).to(torch.uint8), exact


def _pack(codes: Tensor) -> Tensor:
    low, high = codes.flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)
