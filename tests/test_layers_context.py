"""layers_context.py: pads and packed documents, given in any of their forms, against layouts made by hand."""

import pytest
import torch
from helpers import tiny_config
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from modeling_kda import KdaHybridCache, KdaHybridConfig
from modeling_kda.layers_context import ABSORB_UP_TO, ForwardContext


def config_of(attention: str = "eager", **changes) -> KdaHybridConfig:
    config = tiny_config(**changes)
    config._attn_implementation = attention
    return config


def context_of(rows: int, tokens: int, config: KdaHybridConfig | None = None, **given) -> ForwardContext:
    config = config_of() if config is None else config
    return ForwardContext(config, torch.zeros(rows, tokens, config.hidden_size), **given)


def cache_of(tokens: int) -> KdaHybridCache:
    """A cache that says it has seen some tokens."""
    cache = KdaHybridCache(tiny_config())
    cache.advance(tokens)
    return cache


def assert_same(a: ForwardContext, b: ForwardContext) -> None:
    """Everything that layers can see of two contexts is equal."""
    assert (a.packed, a.absorbed) == (b.packed, b.absorbed)
    borders = [None if x.packing is None else x.packing.cu_seqlens for x in (a, b)]
    for name in ("borders", "attention_mask", "allowed"):
        x, y = borders if name == "borders" else (getattr(a, name), getattr(b, name))
        assert (x is None) == (y is None), name
        assert x is None or torch.equal(x, y), name
    x = torch.randn(*a.shape, 5)
    assert torch.equal(a.pack(x), b.pack(x))


LEFT = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
RIGHT = LEFT.flip(1)
HOLES = torch.tensor([[0, 1, 0, 0, 1, 1], [1, 1, 0, 1, 1, 0], [1, 0, 1, 0, 1, 0]])
MASKS = {"left": LEFT, "right": RIGHT, "holes": HOLES, "a row of pads": torch.tensor([[1, 1], [0, 0], [0, 1]])}


def four_dimensional(mask: Tensor, tokens: int) -> Tensor:
    """`[B, 1, T, S]`: causality and the padding mask `[B, S]`."""
    past = mask.shape[1] - tokens
    return (torch.ones(tokens, mask.shape[1]).tril(past).bool() & mask[:, None].bool()).unsqueeze(1)


@pytest.mark.parametrize(
    "shape", [(3,), (3, 6, 1), (1, 3, 6, 6, 1), (3, 5), (3, 7), (2, 6), (3, 1, 6, 5), (1, 1, 6, 6)]
)
def test_context_refuses_a_mask_of_the_wrong_shape(shape):
    with pytest.raises(ValueError, match="`attention_mask`"):
        context_of(3, 6, attention_mask=torch.ones(shape))


@pytest.mark.parametrize("mask", [[[1, 1]], {"full_attention": None}, "causal"])
def test_context_refuses_a_mask_that_is_no_tensor(mask):
    with pytest.raises(ValueError, match=f"`attention_mask` must be a tensor.*{type(mask).__name__}"):
        context_of(1, 2, attention_mask=mask)


def test_context_moves_what_the_attention_is_given():
    given = {"position_ids": torch.tensor([[0, 1, 0]]), "window": 3}
    context = context_of(1, 3)
    context.attention_kwargs = given
    moved = context.to(torch.device("meta")).attention_kwargs
    assert moved["position_ids"].device.type == "meta"
    assert moved["window"] == 3
    assert given["position_ids"].device.type == "cpu"


def test_context_wants_a_mask_of_past_and_new_tokens():
    with pytest.raises(ValueError, match=r"`attention_mask`.*\(2, 3\).*5 cached and 3 new tokens.*\(2, 8\)"):
        context_of(2, 3, attention_mask=torch.ones(2, 3), cache=cache_of(5))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_context_takes_a_mask_of_any_number_type(mask, dtype):
    assert_same(context_of(*mask.shape, attention_mask=mask.to(dtype)), context_of(*mask.shape, attention_mask=mask))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_context_without_pads_is_one_without_a_mask(attention):
    config = config_of(attention)
    plain = context_of(3, 6, config)
    assert plain.packing is None
    assert_same(context_of(3, 6, config, attention_mask=torch.ones(3, 6)), plain)
    assert_same(context_of(3, 6, config, attention_mask=torch.ones(3, 1, 6, 6).tril().bool()), plain)
    assert_same(context_of(3, 6, config, position_ids=torch.arange(6).unsqueeze(0)), plain)
    assert_same(context_of(3, 6, config, position_ids=7 + torch.arange(6).expand(3, 6)), plain)
    assert_same(context_of(3, 6, config, seq_idx=torch.full((3, 6), 4)), plain)
    assert_same(context_of(1, 6, config, cu_seqlens=torch.tensor([0, 6])), context_of(1, 6, config))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_context_takes_a_causal_mask_of_4_dimensions(mask, attention):
    config = config_of(attention)
    allowed, want = four_dimensional(mask, mask.shape[1]), context_of(*mask.shape, config, attention_mask=mask)
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
    for given in (allowed, additive, additive.clamp(min=torch.finfo(torch.float32).min), additive.bfloat16()):
        assert_same(context_of(*mask.shape, config, attention_mask=given), want)


def test_context_takes_the_masks_that_transformers_makes():
    config = config_of()
    made = create_causal_mask(config, torch.zeros(*LEFT.shape, config.hidden_size), LEFT, None)
    assert made.ndim == 4
    assert_same(context_of(*LEFT.shape, attention_mask=made), context_of(*LEFT.shape, attention_mask=LEFT))


@pytest.mark.parametrize("tokens", [1, 2])
def test_context_takes_a_causal_mask_of_4_dimensions_after_a_past(tokens):
    given, cache = four_dimensional(LEFT, tokens), cache_of(6 - tokens)
    assert_same(
        context_of(3, tokens, attention_mask=given, cache=cache),
        context_of(3, tokens, attention_mask=LEFT, cache=cache),
    )


def test_context_never_overlooks_the_pads_of_an_integer_mask_of_4_dimensions():
    """Honoured or refused, but not read as an additive mask, where 0 means "look"."""
    given, cache = four_dimensional(LEFT, 1).long(), cache_of(5)
    try:
        context = context_of(3, 1, attention_mask=given, cache=cache)
    except ValueError:
        return
    assert_same(context, context_of(3, 1, attention_mask=LEFT, cache=cache))


BLOCKS = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool()
NOT_CAUSAL = {
    "bidirectional": torch.ones(6, 6).bool(),
    "packed documents": BLOCKS & torch.ones(6, 6).bool().tril(),
    "sliding window": torch.ones(6, 6).bool().tril() & torch.ones(6, 6).bool().triu(-2),
    "bidirectional prefix": torch.ones(6, 6).bool().tril() | (torch.arange(6) < 3),
}


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("kind", NOT_CAUSAL)
def test_context_refuses_what_linear_layers_cannot_honour(kind, additive):
    mask = NOT_CAUSAL[kind].expand(2, 1, 6, 6)
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    with pytest.raises(ValueError, match=r"more than causality and padding.*`cu_seq_lens_q`"):
        context_of(2, 6, attention_mask=mask)


@pytest.mark.parametrize("borders", [[], [0, 5], [0, 13], [1, 12], [0, 7, 4, 12]])
def test_context_refuses_borders_that_do_not_fit(borders):
    with pytest.raises(ValueError, match=r"`cu_seq_lens_q`.*0 to 12"):
        context_of(2, 6, cu_seqlens=torch.tensor(borders, dtype=torch.long))


def test_context_refuses_borders_with_pads():
    with pytest.raises(ValueError, match=r"`cu_seq_lens_q`.*`attention_mask`"):
        context_of(1, 6, cu_seqlens=torch.tensor([0, 4, 6]), attention_mask=LEFT[:1])
    context_of(1, 6, cu_seqlens=torch.tensor([0, 4, 6]), attention_mask=torch.ones(1, 6))


@pytest.mark.parametrize("name", ["position_ids", "seq_idx"])
@pytest.mark.parametrize("shape", [(6,), (2, 5), (3, 6), (3, 2, 6)])
def test_context_refuses_document_numbers_of_the_wrong_shape(name, shape):
    with pytest.raises(ValueError, match=f"`{name}`"):
        context_of(2, 6, **{name: torch.zeros(shape).long()})


@pytest.mark.parametrize("given", ["position_ids", "seq_idx", "cu_seqlens"])
def test_context_refuses_documents_with_a_cache(given):
    documents = {
        "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]]),
        "seq_idx": torch.tensor([[0, 0, 1, 1, 1, 1]]),
        "cu_seqlens": torch.tensor([0, 2, 6]),
    }
    with pytest.raises(ValueError, match=r"documents.*cache"):
        context_of(1, 6, cache=cache_of(0), **{given: documents[given]})


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_context_is_the_same_however_documents_are_given(attention):
    """Rows of 2 + 4, of 6, and of 1 + 1 + 4 tokens."""
    config = config_of(attention)
    want = context_of(3, 6, config, cu_seqlens=torch.tensor([0, 2, 6, 12, 13, 14, 18]))
    assert want.packed
    assert want.packing.cu_seqlens.tolist() == [0, 2, 6, 12, 13, 14, 18]
    positions = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3]])
    numbers = torch.tensor([[0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2], [3, 4, 5, 5, 5, 5]])
    for given in (
        {"cu_seqlens": torch.tensor([0, 2, 6, 12, 13, 14, 18], dtype=torch.int32)},
        {"cu_seqlens": torch.tensor([0, 0, 2, 2, 6, 12, 13, 14, 18, 18])},  # empty documents are nothing to a row
        {"cu_seqlens": torch.tensor([0, 2, 13, 14, 18])},  # rows end documents too
        {"position_ids": positions},
        {"position_ids": positions + torch.tensor([[3], [7], [0]])},
        {"seq_idx": numbers},
        {"seq_idx": numbers.int(), "position_ids": torch.arange(6).expand(3, 6)},
        {"position_ids": positions, "attention_mask": torch.ones(3, 6)},
        {
            "cu_seqlens": want.packing.cu_seqlens,
            "seq_idx": torch.zeros(3, 6).long(),
            "position_ids": torch.zeros(3, 6).long(),
        },
    ):
        assert_same(context_of(3, 6, config, **given), want)


def test_context_takes_one_row_of_positions_for_all():
    one = torch.tensor([[0, 1, 0, 1, 2, 3]])
    assert_same(context_of(3, 6, position_ids=one), context_of(3, 6, position_ids=one.expand(3, 6)))


@pytest.mark.parametrize("mask", [LEFT, RIGHT])
def test_context_sees_no_document_where_pads_begin_or_end(mask):
    """The positions that `generate` makes of a padded batch."""
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    context = context_of(*mask.shape, attention_mask=mask, position_ids=positions)
    assert not context.packed
    assert_same(context, context_of(*mask.shape, attention_mask=mask))


# Numbers of documents, from 1; 0 are pads.
PACKED_AND_PADDED = {
    "no pads": torch.tensor([[1, 1, 2, 3, 4, 4, 4]]),
    "pads around": torch.tensor([[0, 0, 1, 1, 2, 2, 2], [3, 4, 4, 4, 4, 0, 0]]),
    "a row of pads": torch.tensor([[1, 1, 1, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [3, 3, 3, 3, 3, 3, 4]]),
    "pads between documents": torch.tensor([[1, 1, 0, 2, 2, 2, 0], [3, 0, 0, 4, 4, 0, 5]]),
    "pads inside a document": torch.tensor([[1, 0, 0, 1, 1, 2, 2], [3, 3, 3, 3, 3, 3, 3]]),
}


def positions_of(numbers: Tensor) -> Tensor:
    """Positions of the real tokens in their documents, and 0 at pads."""
    positions = torch.zeros_like(numbers)
    for number in range(1, int(numbers.max()) + 1):
        positions[numbers == number] = torch.arange(int((numbers == number).sum()))
    return positions


def packed_and_padded(case: str, form: str, config: KdaHybridConfig | None = None) -> ForwardContext:
    numbers = PACKED_AND_PADDED[case]
    given = {"seq_idx": numbers} if form == "seq_idx" else {"position_ids": positions_of(numbers)}
    return context_of(*numbers.shape, config, attention_mask=(numbers > 0).long(), **given)


@pytest.mark.parametrize("form", ["seq_idx", "position_ids"])
@pytest.mark.parametrize("case", PACKED_AND_PADDED)
def test_context_lays_out_documents_without_their_pads(case, form):
    numbers, context = PACKED_AND_PADDED[case], packed_and_padded(case, form)
    lengths = [int((numbers == number).sum()) for number in range(1, int(numbers.max()) + 1)]
    assert context.packed
    assert context.packing.cu_seqlens.diff().tolist() == lengths
    x = torch.randn(*numbers.shape, 3)
    assert torch.equal(context.pack(x), x[numbers > 0].unsqueeze(0))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("form", ["seq_idx", "position_ids"])
@pytest.mark.parametrize("case", PACKED_AND_PADDED)
def test_context_lets_attention_see_a_token_s_own_document_and_nothing_later(case, form, attention):
    numbers, context = PACKED_AND_PADDED[case], packed_and_padded(case, form, config_of(attention))
    mask = context.attention_mask.squeeze(1)
    sees = mask if mask.dtype == torch.bool else mask == 0
    want = (numbers.unsqueeze(2) == numbers.unsqueeze(1)).tril()  # [B, T, T]
    real = numbers > 0
    assert torch.equal(sees.expand_as(want)[real], want[real])
    assert sees.any(-1).all()  # a row of nothing but -inf is NaN


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_pack_and_unpack_are_a_round_trip_with_zeros_at_pads(mask):
    context = context_of(*mask.shape, attention_mask=mask)
    x = torch.randn(*mask.shape, 5)
    packed = context.pack(x)
    assert packed.shape == (1, int(mask.sum()), 5)
    assert torch.equal(context.unpack(packed), x * mask.unsqueeze(-1))
    assert len(context.packing) == len(mask)
    assert context.packing.cu_seqlens.diff().tolist() == mask.sum(1).tolist()


def test_pack_leaves_rows_without_pads_alone():
    context, x = context_of(2, 3), torch.randn(2, 3, 5)
    assert context.pack(x) is x
    assert context.unpack(x) is x


CONTEXTS = {
    "plain": lambda config: context_of(3, 6, config),
    "one token": lambda config: context_of(3, 1, config),
    "packed": lambda config: context_of(2, 6, config, seq_idx=torch.tensor([[0, 0, 1, 1, 1, 1], [2, 3, 4, 4, 4, 4]])),
    "packed and padded": lambda config: packed_and_padded("pads around", "seq_idx", config),
    **{
        name: lambda config, mask=mask: context_of(*mask.shape, config, attention_mask=mask)
        for name, mask in MASKS.items()
    },
}


@pytest.mark.parametrize("tokens", [1, 3, ABSORB_UP_TO, ABSORB_UP_TO + 1])
@pytest.mark.parametrize("padded", [False, True])
def test_context_after_a_past_lets_attention_see_it(tokens, padded):
    past, rows = 4, 3
    mask = torch.ones(rows, past + tokens).long()
    if padded:
        mask[0, :2] = 0
        mask[2, : past + 1] = 0
    context = context_of(rows, tokens, attention_mask=mask, cache=cache_of(past))
    want = four_dimensional(mask, tokens)[:, 0]
    assert context.absorbed == (tokens <= ABSORB_UP_TO)
    if context.absorbed:
        assert context.attention_mask is None
        got = torch.ones(1, tokens, past + tokens).bool() if context.allowed is None else context.allowed
    else:
        assert context.allowed is None
        got = context.attention_mask[:, 0] == 0
    assert torch.equal(got.expand_as(want), want)


def test_context_makes_no_attention_mask_for_a_model_of_linear_layers():
    config = config_of(layer_types=["linear_attention"] * 4)
    assert context_of(*LEFT.shape, config, attention_mask=LEFT).attention_mask is None


def test_context_hands_on_what_the_attention_implementation_takes():
    assert context_of(1, 3, sliding_window=7).attention_kwargs == {"sliding_window": 7}
