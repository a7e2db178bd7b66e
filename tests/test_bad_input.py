"""What does not fit is refused with the name of the argument, what was given and what is allowed; never guessed at."""

import copy

import pytest
import torch
from helpers import tiny_config, tiny_model, token_ids
from transformers import DynamicCache

from modeling_kda import KdaHybridCache, KdaHybridConfig, KdaHybridForCausalLM


IDS = token_ids(6, rows=2)
EMBEDS = torch.randn(2, 6, 60, generator=torch.Generator().manual_seed(0))
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)


@pytest.fixture(scope="module")
def model() -> KdaHybridForCausalLM:
    """Shared, so never changed."""
    return tiny_model()


@pytest.fixture
def cache(model) -> KdaHybridCache:
    """After 6 tokens of 2 rows."""
    made = KdaHybridCache(model.config)
    with torch.no_grad():
        model(IDS, cache=made)
    return made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of them"),
        ({"input_ids": IDS, "inputs_embeds": EMBEDS}, "exactly one of them"),
        ({"input_ids": IDS[0]}, r"`input_ids`.*\(6,\)"),
        ({"input_ids": IDS[None]}, r"`input_ids`.*\(1, 2, 6\)"),
        ({"input_ids": IDS.float()}, r"`input_ids`.*float32"),
        ({"input_ids": IDS.clone().fill_(97)}, r"97.*`vocab_size` 97"),
        ({"input_ids": IDS - 97}, r"-\d+.*\[0, 96\]"),
        ({"inputs_embeds": EMBEDS[0]}, r"`inputs_embeds`.*\(6, 60\)"),
        ({"inputs_embeds": EMBEDS[..., :-1]}, r"`inputs_embeds`.*59.*60"),
        ({"inputs_embeds": EMBEDS.long()}, r"`inputs_embeds`.*int64"),
    ],
)
def test_forward_refuses_wrong_inputs(model, given, message):
    with pytest.raises(ValueError, match=message):
        model(**given)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 5), r"\(2, 5\).*\(2, 6\)"),
        (torch.ones(3, 6), r"\(3, 6\).*\(2, 6\)"),
        (torch.ones(6), "1 dimensions"),
        (torch.ones(2, 6, 6), "3 dimensions"),
        (torch.ones(2, 4, 6, 6), r"\(2, 4, 6, 6\).*\(2, 1, 6, 6\)"),
        (torch.ones(2, 1, 6, 6, dtype=torch.bool), "more than causality and padding"),
        ([[1] * 6] * 2, "list"),
        (torch.tensor([[-1e9, -1e9, 0, 0, 0, 0]] * 2), "attention_mask"),
        (torch.full((2, 6), float("nan")), "attention_mask"),
    ],
    ids=["short", "rows", "1-D", "3-D", "heads", "not causal", "list", "additive", "nan"],
)
def test_forward_refuses_wrong_masks(model, mask, message):
    with pytest.raises(ValueError, match=message):
        model(IDS, attention_mask=mask)


@pytest.mark.parametrize("width", [1, 6, 8])
def test_forward_refuses_a_mask_that_leaves_the_past_out(model, cache, width):
    with pytest.raises(ValueError, match=r"6 cached and 1 new tokens need \(2, 7\)"):
        model(IDS[:, :1], attention_mask=torch.ones(2, width), cache=cache)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"position_ids": torch.arange(6)}, r"`position_ids`.*\(6,\).*\(2, 6\)"),
        ({"position_ids": torch.arange(5)[None]}, r"`position_ids`.*\(1, 5\)"),
        ({"seq_idx": torch.zeros(3, 6)}, r"`seq_idx`.*\(3, 6\)"),
        ({"cu_seq_lens_q": torch.tensor([0, 6])}, r"`cu_seq_lens_q`.*12.*\[0, 6\]"),
        ({"cu_seq_lens_q": torch.tensor([3, 12])}, r"`cu_seq_lens_q`.*\[3, 12\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 8, 4, 12])}, r"`cu_seq_lens_q`.*\[0, 8, 4, 12\]"),
        ({"cu_seq_lens_q": torch.tensor([], dtype=torch.long)}, r"`cu_seq_lens_q`.*\[\]"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 4, 12]), "attention_mask": torch.tensor([[0] + [1] * 5] * 2)},
            "contradict each other",
        ),
    ],
)
def test_forward_refuses_wrong_borders_of_documents(model, given, message):
    with pytest.raises(ValueError, match=message):
        model(IDS, **given)


def test_forward_refuses_documents_on_a_cache(model, cache):
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="several documents in one row"):
        model(IDS, position_ids=PACKED, cache=cache)
    assert cache.get_seq_length() == before.get_seq_length()
    assert torch.equal(cache.layers[0].state, before.layers[0].state)


@pytest.mark.parametrize("other", [(), [], {}, DynamicCache(), ((IDS, IDS),)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_forward_refuses_another_kind_of_cache(model, other, name):
    with pytest.raises(ValueError, match=f"KdaHybridCache.*{type(other).__name__}"):
        model(IDS, **{name: other})


def test_forward_refuses_both_names_of_the_cache(model, cache):
    with pytest.raises(ValueError, match="two names of one argument"):
        model(IDS, cache=cache, past_key_values=cache)


@pytest.mark.parametrize("rows", [1, 3])
def test_forward_refuses_a_cache_of_other_rows(model, cache, rows):
    with pytest.raises(ValueError, match=f"cache.*2.*{rows}"):
        model(token_ids(3, rows), cache=cache)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2},
        {"layer_types": ["full_attention"] * 4},
        {"linear_num_heads": 5},
    ],
    ids=["fewer layers", "other kinds", "other sizes"],
)
def test_forward_refuses_the_cache_of_another_model(model, changes):
    other = tiny_model(**changes)
    cache = KdaHybridCache(other.config)
    with torch.no_grad():
        other(IDS, cache=cache)
    with pytest.raises(ValueError, match="cache"):
        model(IDS, cache=cache)


def test_forward_refuses_a_negative_number_of_logits(model):
    with pytest.raises(ValueError, match=r"`logits_to_keep`.*-2"):
        model(IDS, logits_to_keep=-2)


@pytest.mark.parametrize("labels", [IDS[:, :4], IDS[:1], IDS.float()], ids=["short", "rows", "float"])
def test_forward_refuses_wrong_labels(model, labels):
    with pytest.raises((ValueError, RuntimeError)):
        model(IDS, labels=labels)


def test_crop_of_a_cache_says_why_not(cache):
    with pytest.raises(ValueError, match=r"2 tokens .* 0 of 6 are recorded.*activate_past_recording.*snapshot"):
        cache.crop(-2)
    cache.crop(0)
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 5}, "`num_hidden_layers` is 5"),
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, r"`layer_types\[3\]`"),
        ({"num_experts_per_tok": 9}, "`num_experts_per_tok` \\(9\\)"),
        ({"pad_token_id": 97}, "`pad_token_id` \\(97\\)"),
        ({"linear_gate_lower_bound": 5.0}, "`linear_gate_lower_bound`"),
    ],
)
def test_model_checks_its_config_again(changes, message):
    config = tiny_config()
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        KdaHybridForCausalLM(config)
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


def test_config_refuses_grouped_heads_of_a_released_one():
    fields = {"model_type": "kimi_linear", "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(ValueError, match=r"`num_key_value_heads` \(2\)"):
        KdaHybridConfig(**fields)


def test_config_refuses_another_models_file(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="'gpt2'"):
        KdaHybridConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'gpt2'"):
        KdaHybridForCausalLM.from_pretrained(tmp_path)
