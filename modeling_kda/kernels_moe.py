"""Triton kernels of a mixture of experts at a few tokens, any NVIDIA GPU from Ampere on. `ops_moe` launches them.

They are bound by reading the chosen experts' weights, each once and where it lies, 16 bytes a load. Products and sums
are float32. EARLY as in `kernels_linear`; which weights to read is not known before the wait.

Legend: E experts, A experts a token uses, L width in which they work, I width of an expert; R rows and C columns of a
weight that a program takes at once; N numbers in 16 bytes of it: 4 in float32, 8 in 16 bits, 32 in MXFP4.
"""

try:  # in a `try`, so that a reader of exported model code does not need triton; who imports this file does
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    raise

from .kernels_linear import activated


@triton.jit
def _power_of_two(scale):
    """2^(scale - 127): the byte is a float32's exponent, but for its ends, 2^-127 and NaN."""
    at_an_end = (scale == 0) | (scale == 255)
    return ((scale.to(tl.int32) << 23) | tl.where(at_an_end, 1 << 22, 0)).to(tl.float32, bitcast=True)


@triton.jit
def _products(
    weight,
    scale,
    x,
    row,
    in_row,
    start,
    there,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Rows of a weight times x, columns `start` to `start + C`, each N neighbours summed: `[R, C / N]`.

    Those are one thread's; the sum over threads waits until the end of the row. Nothing is read unless `there`.
    MXFP4 comes as int32, eight numbers each, and x may come TURNED: as `[8, WIDTH / 8]`, float32, times 2^80.
    """
    R: tl.constexpr = row.shape[0]
    if N == 32:
        word, block = start // 8 + tl.arange(0, C // 8), start // 32 + tl.arange(0, C // 32)
        in_word, in_block = (word < WIDTH // 8) & there, (block < WIDTH // 32) & there
        codes = weight + row[:, None] * (WIDTH // 8) + word[None, :]
        codes = tl.load(codes, in_row[:, None] & in_word[None, :], other=0)
        power = scale + row[:, None] * (WIDTH // 32) + block[None, :]
        power = _power_of_two(tl.load(power, in_row[:, None] & in_block[None, :], other=0))
        total = tl.zeros((R, C // 8), tl.float32)
        for i in tl.static_range(8):
            # The sign goes to bit 31, and its copies below are cut off; two bits of exponent and one of mantissa go to
            # bits 24, 23 and 22. That is the number times 2^-126, for 0 and 0.5 too. x has a part of the way back, or
            # products would be too small.
            number = ((codes << (28 - 4 * i)) >> 6) & -0x7E400000
            if TURNED:
                factor = tl.load(x + i * (WIDTH // 8) + word, in_word, other=0.0)
            else:
                factor = tl.load(x + word * 8 + i, in_word, other=0.0).to(tl.float32) * 2.0**80
            total += number.to(tl.float32, bitcast=True) * factor[None, :]
        return tl.sum(tl.reshape(total, (R, C // 32, 4)), 2) * 2.0**46 * power
    else:
        column = start + tl.arange(0, C)
        in_column = (column < WIDTH) & there
        numbers = weight + row[:, None] * WIDTH + column[None, :]
        numbers = tl.load(numbers, in_row[:, None] & in_column[None, :], other=0.0).to(tl.float32)
        factor = tl.load(x + column, in_column, other=0.0).to(tl.float32)
        return tl.sum(tl.reshape(numbers * factor[None, :], (R, C // N, N)), 2)


@triton.jit
def gate_up(
    x,
    index,
    weight,
    scale,
    h,
    E,
    A: tl.constexpr,
    L: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    EARLY: tl.constexpr,
):
    """R numbers of `h[slot] = act(gate @ x, up @ x)`, one slot of one token; for MXFP4, h is TURNED.

    Where the slot's expert is not here, h stays as it is.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.program_id(1)
    expert = tl.load(index + slot).to(tl.int64)
    if expert >= E:
        return
    row = tl.program_id(0) * R + tl.arange(0, R)
    in_row = row < I
    x += slot // A * L
    if N == 32:
        weight += expert * (2 * I * L // 8)
        scale += expert * (2 * I * L // 32)
    else:
        weight += expert * (2 * I * L)
    gate, up = tl.zeros((R, C // N), tl.float32), tl.zeros((R, C // N), tl.float32)
    for start in tl.range(0, L, C, num_stages=STAGES):
        gate += _products(weight, scale, x, row, in_row, start, True, L, C, N, False)
        up += _products(weight, scale, x, row + I, in_row, start, True, L, C, N, False)
    out = activated(tl.sum(gate, 1), tl.sum(up, 1), BETA, LINEAR_BETA)
    if N == 32:
        tl.store(h + slot * I + row % 8 * (I // 8) + row // 8, out * 2.0**80, in_row)
    else:
        tl.store(h + slot * I + row, out.to(h.dtype.element_ty), in_row)


@triton.jit
def down(
    h,
    index,
    share,
    weight,
    scale,
    out,
    E,
    A: tl.constexpr,
    L: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """R numbers of `out[token]`: the sum of `share * (down @ h[slot])` over its slots whose experts are here."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1)
    row = tl.program_id(0) * R + tl.arange(0, R)
    in_row = row < L
    total = tl.zeros((R, C // N), tl.float32)
    STEPS: tl.constexpr = (I + C - 1) // C
    for step in tl.range(A * STEPS, num_stages=STAGES):  # slots and columns in one loop, to look ahead in both
        slot = token * A + step // STEPS
        expert = tl.load(index + slot).to(tl.int64)
        here = expert < E
        if N == 32:
            codes, powers = weight + expert * (L * I // 8), scale + expert * (L * I // 32)
        else:
            codes, powers = weight + expert * (L * I), scale
        part = _products(codes, powers, h + slot * I, row, in_row, step % STEPS * C, here, I, C, N, N == 32)
        total += tl.load(share + slot, here, other=0.0) * part
    tl.store(out + token * L + row, tl.sum(total, 1).to(out.dtype.element_ty), in_row)
