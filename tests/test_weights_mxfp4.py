"""weights_mxfp4.py against a table written out by hand, and against the library that made the release."""

import math

import pytest
import torch
from helpers import golden_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modeling_kda.weights_mxfp4 import check_scales, decode, encode


# The numbers of the 16 codes.
CODES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def uint8(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint8)


def byte(low: int, high: int = 0) -> int:
    return 16 * high + low


def random_bytes(rows: int, blocks: int, seed: int = 0, low: int = 0, high: int = 255) -> tuple[Tensor, Tensor]:
    """Codes `[rows, 16 * blocks]` and scales `[rows, blocks]`, from `low` to below `high`."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, 16 * blocks), generator=generator, dtype=torch.uint8)
    return codes, torch.randint(low, high, (rows, blocks), generator=generator, dtype=torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal, zeros' signs included."""
    return one.dtype == other.dtype and torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


def by_hand(codes: Tensor, scales: Tensor) -> Tensor:
    """Number by number in float64: `[R, C / 2]` and `[R, C / 32]` to `[R, C]`."""
    rows = []
    for row, powers in zip(codes.tolist(), scales.tolist()):
        numbers = [CODES[code] for x in row for code in (x % 16, x // 16)]
        rows.append([x * 2.0 ** (powers[i // 32] - 127) for i, x in enumerate(numbers)])
    return torch.tensor(rows, dtype=torch.float64)


# Decoding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_decode_reads_every_byte_as_written_out(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    got = decode(codes, torch.full((16, 1), 127, dtype=torch.uint8), dtype)
    want = [[x for high in [CODES[row]] for low in CODES for x in (low, high)] for row in range(16)]
    assert same_bits(got, torch.tensor(want, dtype=dtype))


def test_decode_reads_the_low_half_of_a_byte_first():
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, 0], codes[0, 15] = 0x72, 0xF1
    got = decode(codes, uint8([127]), torch.float32)[0]
    assert got[:2].tolist() == [1.0, 6.0]
    assert got[-2:].tolist() == [0.5, -6.0]


@pytest.mark.parametrize("scale", [1, 2, 64, 126, 127, 128, 200, 251])
def test_decode_multiplies_by_a_power_of_two(scale):
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.full((16, 1), scale, dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(decode(codes, scales, dtype).double(), by_hand(codes, scales))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decode_reads_the_smallest_and_the_largest_scale(dtype):
    """2^-127 is below the smallest normal number; 6 * 2^127 is above the largest one."""
    codes = torch.full((2, 16), byte(7, 2), dtype=torch.uint8)
    got = decode(codes, uint8([0], [254]), dtype).double()
    assert got[0, :2].tolist() == [6 * 2.0**-127, 2.0**-127]
    assert got[1, :2].tolist() == [math.inf, 2.0**127]
    half = torch.full((1, 16), byte(1, 9), dtype=torch.uint8)
    assert decode(half, uint8([0]), dtype)[0, :2].double().tolist() == [2.0**-128, -(2.0**-128)]


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (5,)], ids=str)
def test_decode_gives_each_32_numbers_their_own_scale(shape):
    rows = math.prod(shape[:-1])
    codes, scales = random_bytes(rows, 5, low=100, high=150)
    got = decode(codes.view(*shape[:-1], 80), scales.view(*shape), torch.float64)
    assert got.shape == (*shape[:-1], 160)
    assert torch.equal(got.view(rows, 160), by_hand(codes, scales))


@settings(deadline=None, derandomize=True, max_examples=30, database=None)
@given(seed=st.integers(0, 10**6))
def test_decode_is_as_exact_in_bfloat16_as_in_float32(seed):
    codes, scales = random_bytes(3, 2, seed)
    assert same_bits(decode(codes, scales).float(), decode(codes, scales, torch.float32))


def test_decode_in_float16_rounds_once():
    codes, scales = random_bytes(8, 4, low=95, high=143)  # from below the smallest float16 to above the largest
    got, want = decode(codes, scales, torch.float16), by_hand(codes, scales)
    assert same_bits(got, want.half())
    assert got.isinf().any()
    assert ((got == 0) & (want != 0)).any()


def test_decode_of_nothing_is_nothing():
    empty = torch.zeros(0, 16, dtype=torch.uint8), torch.zeros(0, 1, dtype=torch.uint8)
    assert decode(*empty).shape == (0, 32)


def test_decode_takes_bytes_that_are_not_contiguous():
    codes, scales = random_bytes(4, 6)
    got = decode(codes.T.contiguous().T, scales[:, ::1].T.contiguous().T, torch.float32)
    assert same_bits(got, decode(codes, scales, torch.float32))


def test_decode_reads_the_golden_experts_as_by_hand():
    tensors = golden_tensors("kimi_k3_tiny_mxfp4", "model.safetensors")
    names = [name for name in tensors if name.endswith("weight_packed")][::17]
    assert len(names) > 5
    for name in names:
        codes, scales = tensors[name], tensors[name.replace("packed", "scale")]
        assert torch.equal(decode(codes, scales).double(), by_hand(codes, scales)), name


# What does not fit

CODES_OF_64, SCALES_OF_64 = torch.zeros(3, 32, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("codes", "scales", "message"),
    [
        (CODES_OF_64.float(), SCALES_OF_64, r"uint8, got torch\.float32 and torch\.uint8"),
        (CODES_OF_64, SCALES_OF_64.to(torch.int8), r"uint8, got torch\.uint8 and torch\.int8"),
        (CODES_OF_64[:, 1:], SCALES_OF_64, r"\(3, 31\) and scales \(3, 2\)"),
        (CODES_OF_64, SCALES_OF_64[:, 1:], r"\(3, 32\) and scales \(3, 1\)"),
        (CODES_OF_64[1:], SCALES_OF_64, r"\(2, 32\) and scales \(3, 2\)"),
        (CODES_OF_64[None], SCALES_OF_64, r"\(1, 3, 32\) and scales \(3, 2\)"),
    ],
    ids=["codes of floats", "signed scales", "a byte short", "a scale short", "a row short", "an axis more"],
)
def test_decode_names_what_does_not_belong_together(codes, scales, message):
    with pytest.raises(ValueError, match=message):
        decode(codes, scales)


@pytest.mark.parametrize("count", [1, 3])
def test_check_scales_names_the_tensor_and_counts_its_bytes_without_a_number(count):
    scales = torch.arange(255, dtype=torch.uint8).view(5, 51)
    check_scales(scales, "model.some_expert")
    scales[0, :count] = 255
    with pytest.raises(ValueError, match=rf"`model\.some_expert` holds {count} .*255.*NaN"):
        check_scales(scales, "model.some_expert")


@pytest.mark.parametrize("width", [1, 31, 33, 48])
def test_encode_refuses_a_width_that_is_no_multiple_of_32(width):
    with pytest.raises(ValueError, match=f"width {width} is no multiple of 32"):
        encode(torch.ones(2, width))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_encode_refuses_numbers_that_are_not_finite(value):
    weight = torch.ones(2, 32)
    weight[1, 7] = value
    with pytest.raises(ValueError, match="not finite"):
        encode(weight)


# Encoding


@settings(deadline=None, derandomize=True, max_examples=40, database=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 4), blocks=st.integers(1, 3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_encode_of_decoded_bytes_returns_those_bytes(dtype, seed, rows, blocks):
    """Of every scale but those that overflow; blocks that could do with a smaller scale, and negative zeros, too."""
    codes, scales = random_bytes(rows, blocks, seed, high=253)
    got = encode(decode(codes, scales, dtype), scales)
    assert torch.equal(got[0], codes)
    assert torch.equal(got[1], scales)


@pytest.mark.parametrize("code", [0, 8, byte(0, 8), byte(8, 8), 1, 9], ids=lambda x: f"{x:02x}")
@pytest.mark.parametrize("scale", [0, 1, 127, 252])
def test_encode_keeps_scales_of_blocks_that_say_little(code, scale):
    """Zeros of either sign have no magnitude from which a scale could be found."""
    codes, scales = torch.full((1, 16), code, dtype=torch.uint8), uint8([scale])
    got = encode(decode(codes, scales), scales)
    assert torch.equal(got[0], codes)
    assert torch.equal(got[1], scales)


def test_encode_of_one_changed_number_finds_new_scales():
    codes, scales = random_bytes(2, 2, low=120, high=130)
    weight = decode(codes, scales, torch.float32)
    weight[0, 0] = 0.3
    got = encode(weight, scales)
    assert torch.equal(torch.stack([x.sum() for x in got]), torch.stack([x.sum() for x in encode(weight)]))
    assert torch.equal(got[1], encode(weight)[1])


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (1.0, 125),
        (1.7499, 125),
        (1.75, 126),
        (1.9999, 126),
        (2.0, 126),
        (3.0, 126),
        (3.4999, 126),
        (3.5, 127),
        (4.0, 127),
        (6.0, 127),
        (6.9999, 127),
        (7.0, 128),
        (8.0, 128),
        (-7.0, 128),
        (0.01, 118),
        (2.0**-120, 5),
        (2.0**-125, 0),
        (2.0**-130, 0),
        (1.5 * 2.0**127, 252),
        (0.0, 0),
    ],
)
def test_encode_chooses_the_power_two_below_the_largest_magnitude(largest, scale):
    """A mantissa of 1.75 or more counts as the next power."""
    weight = torch.zeros(1, 32)
    weight[0, 5] = largest
    assert encode(weight)[1].item() == scale


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        # A tie goes to the even code.
        (0.25, 0.0),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
        # Anything else to the nearest number.
        (0.2501, 0.5),
        (0.7499, 0.5),
        (1.2501, 1.5),
        (1.7499, 1.5),
        (2.5001, 3.0),
        (3.4999, 3.0),
        (5.0001, 6.0),
        (6.9, 6.0),
        *((x, x) for x in CODES[:8]),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("power", [0, -9, 20])
def test_encode_rounds_to_the_nearest_number_and_ties_to_the_even_code(value, rounded, sign, power):
    weight = torch.zeros(1, 32, dtype=torch.float64)
    weight[0, 3], weight[0, 8] = 6.0, sign * value
    codes, scales = encode((weight * 2.0**power).float())
    assert scales.item() == 127 + power
    got = decode(codes, scales, torch.float64)[0] / 2.0**power
    assert got[3] == 6
    assert got[8] == sign * rounded
    assert got[8].signbit() == (sign * value < 0)


def test_encode_of_changed_weights_keeps_the_sign_of_what_rounds_to_zero_but_not_that_of_zero():
    """As the library does; a zero that was decoded with its scale keeps its sign."""
    weight = torch.zeros(1, 32)
    weight[0, :4] = torch.tensor([6.0, -0.1, -0.0, 0.1])
    assert encode(weight)[0][0, :2].tolist() == [byte(7, 8), byte(0, 0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 96), (32,)], ids=str)
def test_encode_is_within_half_a_step_of_any_weight(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, scales = encode(weight)
    assert codes.shape == (*shape[:-1], shape[-1] // 2)
    assert scales.shape == (*shape[:-1], shape[-1] // 32)
    error = (decode(codes, scales, torch.float64) - weight.double()).abs().unflatten(-1, (-1, 32))
    step = 2.0 ** (scales.double() - 127)
    assert (error <= step.unsqueeze(-1)).all()  # half of the widest gap, from 4 to 6, and of what is cut off at 7
    assert torch.equal(encode(decode(codes, scales), scales)[0], codes)


# Against the library


def scheme():
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(
        num_bits=4, type="float", symmetric=True, strategy="group", group_size=32, scale_dtype=torch.uint8
    )
    return QuantizationScheme(targets=["Linear"], weights=weights, format="mxfp4-pack-quantized")


def weights_of_all_sizes() -> Tensor:
    """Random blocks of many sizes, ties, and largest magnitudes on the borders between two scales."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=generator) * 2.0 ** torch.randint(-30, 30, (64, 1), generator=generator)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    weight[:8] = torch.cat([ties, -ties]).repeat(8, 8) * 2.0 ** torch.arange(-4, 4)[:, None]
    for row, largest in enumerate([1.75, 1.7499999, 3.5, 7.0, 6.9999995, 1.0, 1.9999999, 3.9999998]):
        weight[8 + row] = largest * torch.linspace(-1, 1, 128)
    weight[16] = 0
    weight[17, ::3], weight[18, 1::3] = 0.0, -0.0
    return weight


def test_decode_and_encode_agree_with_compressed_tensors():
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    weight = weights_of_all_sizes()
    codes, scales = encode(weight)
    largest = weight.unflatten(-1, (-1, 32)).abs().amax(-1)
    assert torch.equal(scales.float(), torch.where(largest == 0, 0, generate_mx_scales(largest)))
    theirs = MXFP4PackedCompressor.compress(
        {"weight": weight, "weight_scale": 2.0 ** (scales.float() - 127)}, scheme()
    )
    assert torch.equal(theirs["weight_scale"], scales)
    assert torch.equal(theirs["weight_packed"], codes)
    bytes_ = random_bytes(16, 4, low=20, high=230)
    back = MXFP4PackedCompressor.decompress({"weight_packed": bytes_[0], "weight_scale": bytes_[1]}, scheme())
    assert same_bits(decode(*bytes_, back["weight"].dtype), back["weight"])
