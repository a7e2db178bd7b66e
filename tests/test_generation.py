"""`generate()`: with a cache as without one, in a batch as alone, from ids as from embeddings."""

import copy

import pytest
import torch
from helpers import assert_close, golden, golden_tensors, tiny_model, token_ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    TextStreamer,
    pipeline,
)

from modeling_kda import KdaHybridCache, KdaHybridForCausalLM
from modeling_kda.compat_transformers import CACHE_NAME


GREEDY = {"do_sample": False, "pad_token_id": 0}
GOLDEN_MODELS = ["kimi_linear_original_tiny", "hf_kimi_linear_tiny", "kimi_k3_tiny", "kimi_k3_tiny_mxfp4"]


@pytest.fixture(scope="module")
def model() -> KdaHybridForCausalLM:
    """Shared, so never changed."""
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, after three special ones, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    bytes_ = Tokenizer(models.BPE(vocabulary, merges=[]))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    made.padding_side = "left"
    made.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    return made


def greedy_by_hand(model, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    """Arg-max tokens of whole forwards without a cache: the new tokens `[1, tokens]`."""
    ids = prompt
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[:, prompt.shape[1] :]


def left_padded(*prompts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows of unequal length as one batch: `input_ids` and `attention_mask`."""
    width = max(x.shape[1] for x in prompts)
    pads = [torch.zeros(1, width - x.shape[1], dtype=torch.long) for x in prompts]
    return {
        "input_ids": torch.cat([torch.cat([pad, x], 1) for pad, x in zip(pads, prompts)]),
        "attention_mask": torch.cat([torch.cat([pad, torch.ones_like(x)], 1) for pad, x in zip(pads, prompts)]),
    }


# Against others


@pytest.mark.parametrize("name", GOLDEN_MODELS)
@pytest.mark.parametrize("prefix", ["", "padded_"])
def test_generate_equals_golden_greedy_tokens(name, prefix):
    model, want = (
        KdaHybridForCausalLM.from_pretrained(golden(name)),
        golden_tensors(name, "expected.safetensors"),
    )
    ids = want[f"{prefix}input_ids"]
    mask = want["padded_attention_mask"] if prefix else torch.ones_like(ids)
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=20, eos_token_id=None, **GREEDY)
    assert tokens[:, ids.shape[1] :].tolist() == want[f"{prefix}greedy"].tolist()


def test_generate_equals_transformers_own_kimi_linear():
    folder = golden("hf_kimi_linear_tiny")
    ours, native = KdaHybridForCausalLM.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert type(native) is not type(ours)
    batch = left_padded(token_ids(4), token_ids(11, seed=2), token_ids(1, seed=3))
    runs = [m.generate(**batch, max_new_tokens=40, eos_token_id=None, **GREEDY) for m in (ours, native)]
    assert runs[0].tolist() == runs[1].tolist()


# Greedy


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 33])
@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_equals_whole_forwards(model, length, use_cache):
    prompt = token_ids(length)
    tokens = model.generate(prompt, max_new_tokens=8, use_cache=use_cache, **GREEDY)
    assert tokens[:, length:].tolist() == greedy_by_hand(model, prompt, 8).tolist()


@pytest.mark.parametrize("lengths", [(7, 12), (1, 12), (3, 1, 5)], ids=str)
@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_of_a_left_padded_batch_equals_rows_alone(model, lengths, use_cache):
    prompts = [token_ids(n, seed=n) for n in lengths]
    tokens = model.generate(**left_padded(*prompts), max_new_tokens=8, use_cache=use_cache, **GREEDY)
    for prompt, row in zip(prompts, tokens):
        assert row[max(lengths) :].tolist() == greedy_by_hand(model, prompt, 8)[0].tolist()


@pytest.mark.parametrize("chunk", [1, 3, 5, 64])
def test_generate_with_a_chunked_prefill_changes_nothing(model, chunk):
    batch = left_padded(token_ids(70), token_ids(12, seed=2))
    want = model.generate(**batch, max_new_tokens=6, **GREEDY)
    assert model.generate(**batch, max_new_tokens=6, prefill_chunk_size=chunk, **GREEDY).tolist() == want.tolist()


def test_generate_from_embeddings_equals_token_ids(model):
    batch = left_padded(token_ids(7), token_ids(12, seed=2))
    want = model.generate(**batch, max_new_tokens=10, **GREEDY)[:, 12:]
    embeds = model.get_input_embeddings()(batch["input_ids"])
    got = model.generate(inputs_embeds=embeds, attention_mask=batch["attention_mask"], max_new_tokens=10, **GREEDY)
    assert got.tolist() == want.tolist()


def test_generate_without_a_prompt_starts_from_the_first_token(model):
    tokens = model.generate(max_new_tokens=5, **GREEDY)
    assert tokens.tolist() == [[1, *greedy_by_hand(model, torch.tensor([[1]]), 5)[0].tolist()]]


def test_generate_stops_at_the_end_of_text_and_fills_up_with_pads(model):
    prompts = token_ids(6), token_ids(9, seed=2)
    free = [greedy_by_hand(model, prompt, 8)[0].tolist() for prompt in prompts]
    end = free[0][2]
    want = [x[: x.index(end) + 1] if end in x else x for x in free]
    tokens = model.generate(**left_padded(*prompts), max_new_tokens=8, eos_token_id=end, **GREEDY)[:, 9:]
    assert tokens.tolist() == [x + [0] * (tokens.shape[1] - len(x)) for x in want]
    assert len(want[0]) <= 3


def test_generate_scores_equal_one_forward_over_the_result(model):
    batch = left_padded(token_ids(5), token_ids(9, seed=2))
    out = model.generate(**batch, max_new_tokens=8, return_dict_in_generate=True, output_logits=True, **GREEDY)
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 8, dtype=torch.long)], 1)
    with torch.no_grad():
        logits = model(out.sequences, attention_mask=mask).logits[:, 8:-1]
    assert_close(torch.stack(out.logits, 1), logits)


# Sampling and beams


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "temperature": 1.5},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
        {"do_sample": False, "num_beams": 4},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
        {"do_sample": True, "num_beams": 2},
    ],
    ids=["sample", "sample 3", "beam 4", "beam 3 return 2", "beam sample"],
)
def test_generate_with_a_cache_equals_without(model, how):
    batch, runs = left_padded(token_ids(7), token_ids(12, seed=2)), []
    for use_cache in (True, False):
        torch.manual_seed(5)
        out = model.generate(
            **batch,
            max_new_tokens=12,
            use_cache=use_cache,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
            **how,
        )
        runs.append(out)
    assert runs[0].sequences.tolist() == runs[1].sequences.tolist()
    assert runs[0].sequences.shape[0] == 2 * how.get("num_return_sequences", 1)
    if "num_beams" in how:
        assert_close(runs[0].sequences_scores, runs[1].sequences_scores, 1e-5)


def test_generate_with_beams_in_a_batch_equals_rows_alone(model):
    prompts = token_ids(1), token_ids(12, seed=2)
    beams = {"num_beams": 4, "max_new_tokens": 10, **GREEDY}
    tokens = model.generate(**left_padded(*prompts), **beams)
    for prompt, row in zip(prompts, tokens):
        assert row[12:].tolist() == model.generate(prompt, **beams)[0, prompt.shape[1] :].tolist()


# Caches


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_takes_and_returns_a_cache_under_both_names(model, name):
    cache, prompt = KdaHybridCache(model.config), token_ids(6)
    out = model.generate(prompt, max_new_tokens=5, return_dict_in_generate=True, **{name: cache}, **GREEDY)
    assert out.sequences[:, 6:].tolist() == greedy_by_hand(model, prompt, 5).tolist()
    assert getattr(out, CACHE_NAME) is cache
    assert cache.get_seq_length() == 10


def test_generate_refuses_both_names_of_the_cache(model):
    caches = {name: KdaHybridCache(model.config) for name in ("cache", "past_key_values")}
    with pytest.raises(ValueError, match="two names"):
        model.generate(token_ids(6), max_new_tokens=5, **caches, **GREEDY)


def test_generate_returns_its_cache(model):
    out = model.generate(token_ids(6), max_new_tokens=5, return_dict_in_generate=True, **GREEDY)
    cache = getattr(out, CACHE_NAME)
    assert isinstance(cache, KdaHybridCache)
    assert cache.get_seq_length() == 10
    without = model.generate(token_ids(6), max_new_tokens=5, return_dict_in_generate=True, use_cache=False, **GREEDY)
    assert getattr(without, CACHE_NAME, None) is None


@pytest.mark.parametrize("more", [0, 1, 3, 40], ids="{} more tokens".format)
@pytest.mark.parametrize("kinds", ["hybrid", "linear_attention", "full_attention"])
def test_generate_continues_from_a_returned_cache(model, more, kinds):
    model = model if kinds == "hybrid" else tiny_model(layer_types=[kinds] * 4)
    prompt, cache = token_ids(6), KdaHybridCache(model.config)
    first = model.generate(prompt, max_new_tokens=5, **{CACHE_NAME: cache}, **GREEDY)
    assert first[:, 6:].tolist() == greedy_by_hand(model, prompt, 5).tolist()
    grown = torch.cat([first, token_ids(more, seed=8)], 1)
    second = model.generate(grown, max_new_tokens=5, **{CACHE_NAME: cache}, **GREEDY)
    assert second[:, grown.shape[1] :].tolist() == greedy_by_hand(model, grown, 5).tolist()


def test_generate_refuses_a_prompt_that_the_cache_has_seen_to_its_end(model):
    prompt, cache = token_ids(6), KdaHybridCache(model.config)
    with torch.no_grad():
        model(prompt, cache=cache)
    with pytest.raises(ValueError, match="cache"):
        model.generate(prompt, max_new_tokens=5, **{CACHE_NAME: cache}, **GREEDY)


def test_generate_continues_a_padded_batch_from_a_returned_cache(model):
    prompts, cache = (token_ids(3), token_ids(8, seed=2)), KdaHybridCache(model.config)
    batch = left_padded(*prompts)
    first = model.generate(**batch, max_new_tokens=5, **{CACHE_NAME: cache}, **GREEDY)
    grown = torch.cat([first, token_ids(2, rows=2, seed=8)], 1)
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 7, dtype=torch.long)], 1)
    second = model.generate(grown, attention_mask=mask, max_new_tokens=5, **{CACHE_NAME: cache}, **GREEDY)
    for row, real in enumerate(mask.bool()):
        want = greedy_by_hand(model, grown[row : row + 1, real], 5)
        assert second[row, grown.shape[1] :].tolist() == want[0].tolist()


@pytest.mark.parametrize("given", ["new tokens and the whole mask", "all embeddings"])
def test_generate_continues_a_filled_cache_from(model, given):
    ids, cache = token_ids(12), KdaHybridCache(model.config)
    with torch.no_grad():
        model(ids[:, :8], cache=cache)
    inputs = {"inputs_embeds": model.get_input_embeddings()(ids)}
    if given == "new tokens and the whole mask":
        inputs = {"input_ids": ids[:, 8:], "attention_mask": torch.ones_like(ids)}
    tokens = model.generate(**inputs, max_new_tokens=5, **{CACHE_NAME: cache}, **GREEDY)
    assert tokens[:, -5:].tolist() == greedy_by_hand(model, ids, 5).tolist()


@pytest.mark.parametrize("length", [8, 70])
def test_forward_continues_outside_of_inference_mode(model, length):
    ids, cache = token_ids(length + 3), KdaHybridCache(model.config)
    with torch.inference_mode():
        model(ids[:, : length - 1], cache=cache)
        model(ids[:, length - 1 : length], cache=cache)
    with torch.no_grad():
        got = [model(ids[:, t : t + 1], cache=cache).logits for t in range(length, length + 3)]
        assert_close(torch.cat(got, 1), model(ids).logits[:, length:])


def test_generate_after_a_reset_remembers_nothing(model):
    cache = KdaHybridCache(model.config)
    model.generate(token_ids(9), max_new_tokens=5, **{CACHE_NAME: cache}, **GREEDY)
    cache.reset()
    assert cache.get_seq_length() == 0
    prompt = token_ids(4, seed=2)
    tokens = model.generate(prompt, max_new_tokens=5, **{CACHE_NAME: cache}, **GREEDY)
    assert tokens[:, 4:].tolist() == greedy_by_hand(model, prompt, 5).tolist()


def test_generate_from_copies_of_a_cache_takes_both_ways(model):
    start, cache = token_ids(9), KdaHybridCache(model.config)
    with torch.no_grad():
        model(start[:, :-1], **{CACHE_NAME: cache})
    for seed in (3, 4, 3):
        prompt = torch.cat([start, token_ids(3, seed=seed)], 1)
        tokens = model.generate(prompt, max_new_tokens=5, **{CACHE_NAME: copy.deepcopy(cache)}, **GREEDY)
        assert tokens[:, 12:].tolist() == greedy_by_hand(model, prompt, 5).tolist()
    assert cache.get_seq_length() == 8


@pytest.mark.parametrize("change", ["reorder", "repeat", "select"])
def test_forward_after_a_change_of_rows_equals_those_rows(model, change):
    ids = token_ids(9, rows=3)
    rows = {"reorder": [2, 2, 0], "repeat": [0, 0, 1, 1, 2, 2], "select": [2, 0]}[change]
    cache, index = KdaHybridCache(model.config), torch.tensor(rows)
    with torch.no_grad():
        model(ids[:, :7], cache=cache)
        if change == "reorder":
            cache.reorder_cache(index)
        elif change == "repeat":
            cache.batch_repeat_interleave(2)
        else:
            cache.batch_select_indices(index)
        for t in (7, 8):
            got = model(ids[index, t : t + 1], cache=cache).logits
        assert_close(got, model(ids[index]).logits[:, 8:])
    assert cache.batch_size == len(rows)


def test_generate_refuses_a_kind_of_cache_that_there_is_not(model):
    with pytest.raises(NotImplementedError, match=r"'quantized'.*recurrent states.*'dynamic'.*'static'.*'offloaded'"):
        model.generate(token_ids(6), max_new_tokens=5, cache_implementation="quantized", **GREEDY)


@pytest.mark.parametrize(
    "entry", ["generate_batch", "init_continuous_batching", "continuous_batching_context_manager"]
)
def test_generate_refuses_continuous_batching(model, entry):
    with pytest.raises(NotImplementedError, match=r"generate_batch.*recurrent states.*PrefixCache"):
        getattr(model, entry)([[5, 6, 7]])


# Around it


def test_generate_calls_a_logits_processor_with_all_tokens(model):
    lengths = []

    class Look(LogitsProcessor):
        def __call__(self, input_ids, scores):
            lengths.append(input_ids.shape[1])
            return scores

    model.generate(token_ids(4), max_new_tokens=3, logits_processor=[Look()], **GREEDY)
    assert lengths == [4, 5, 6]


def test_generate_streams_what_it_returns(tokenizer, capsys):
    model = tiny_model(vocab_size=len(tokenizer))
    prompt = tokenizer("To be", return_tensors="pt")
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    tokens = model.generate(**prompt, max_new_tokens=10, streamer=streamer, **GREEDY)
    assert capsys.readouterr().out == tokenizer.decode(tokens[0, 5:]) + "\n"


def test_pipeline_generates_text_single_batched_and_in_a_chat(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer))
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}

    def text(prompt: str) -> str:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        return tokenizer.decode(greedy_by_hand(model, ids, 6)[0], skip_special_tokens=True)

    prompts = ["a", "To be, or not", "Wörld 你"]
    assert generate(prompts[0], **options) == [{"generated_text": text(prompts[0])}]
    batched = generate(prompts, batch_size=3, **options)
    assert [x[0]["generated_text"] for x in batched] == [text(x) for x in prompts]
    chat = generate([{"role": "user", "content": "hi"}], **options)
    assert chat[0]["generated_text"] == text("user: hi\nassistant: ")
