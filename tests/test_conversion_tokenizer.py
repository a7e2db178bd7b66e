"""conversion/tokenizer.py: the ids of tiktoken, the names and chat formats of the releases, and what it refuses."""

import argparse
import base64
import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from conversion import tokenizer as conversion


ROOT = Path(__file__).parents[1]

TEXTS = {
    "empty": "",
    "english": "I don't think it's what THEY'RE doing; we'll see, I'd say. He'S here, rock'n'roll don'ſ 'S 'T 'x",
    "chinese": "中文分词测试，混合abc和123。「引号」〇二三 𠮷野家𪚥",
    "japanese": "日本語のテキストです。カタカナ・ひらがな、漢字まじり々ー！ｱｲｳ",
    "korean": "한국어 문장을 나누어 봅시다. 조합형 \u1112\u1161\u11ab",
    "hindi": "हिन्दी में किताबें पढ़ना अच्छा लगता है। क्षत्रिय",
    "arabic": "اللُّغَةُ العَرَبِيَّةُ ١٢٣٤ والنص الطويل؟",
    "thai": "ภาษาไทยไม่มีช่องว่างระหว่างคำ ๑๒๓",
    "marks": "e\u0301\u0323 \u0301 a\u0301B\u0301c \u0301\u0301\u0301 1\u0301 中\u0301\u20dd",
    "python": "def f(x: int) -> str:\n    if x > 10:\n        return f'{x!r}'  # no\n\n\n@cache\ndef g(): ...\n",
    "c": '#include <stdio.h>\nint main(void)\n{\n\tprintf("%d\\n", a[0]->b + 0x1F);\n\treturn 0;\n}\n',
    "json": '{\n  "a": [1, 22, 333.4444e-5, null],\n  "b": {"c": "\\u00e9", "d": true}\n}',
    "numbers": "1 12 123 1234 12345678901234567890 3.14159 ½ ⅷ ²³ 1,234,567.89",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽👍 🇩🇪🇫🇷 ❤️ 😀😀😀",
    "mixed": "helloWorld HTTPServer iPhone ǅungla straßeSTRASSE v2.5がdon'tを한국어 кириллица ΕλάabcДЕF_a-b",
    "spaces": "a  b   c    d\t\te \t f   g\u00a0b\u3000c\u2028d\x85e\u200bf\x0bg\x0ch \u00a0 i     ",
    "newlines": "a\nb\r\nc\r\n\r\n  d\n   \n  e\r\r\n.\n\n!\r\n  ",
    "control": "\x00\x01\x02 a\x00b \x1b[31mred\x1b[0m \x7f\x80\x9f",
    "odd": "\ufffd \ufeff \uffff \ue000 \U0010ffff \U000e0041 \u202eabc\u202c \u0378 ﬁﬀ İıK",
    "punctuation": "... --- !!! ?!?! (a)[b]{c} a...b \"x\" 'y' “z” <|not|> #tag @me $5 50% _ __init__",
}
TEXTS |= {
    "long letters": "abcde" * 20_000,
    "long upper case": "ABC" * 33_333 + "d",
    "long same letter": "a" * 100_000,
    "long emoji": "👩‍👩‍👧‍👦😀" * 3_500,
    "long han": "中文" * 17_000,
    "long spaces": " " * 100_000 + "x",
    "long lines": "\r\n" * 50_000,
}

SINGLE = {bytes([byte]): byte for byte in range(256)}

# Written out here once more, as the releases have it.
PATTERN = (
    r"[\p{Han}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def lines(ranks: dict[bytes, int]) -> list[bytes]:
    return [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]


def folder_with(path: Path, ranks: dict[bytes, int], config: dict | None = None, settings: dict | None = None) -> Path:
    path.mkdir()
    (path / "tiktoken.model").write_bytes(b"\n".join(lines(ranks)))
    for name, content in (("config.json", config), ("tokenizer_config.json", settings)):
        if content is not None:
            (path / name).write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """A stand-in for the released ranks: 3,000 tokens trained with the released pattern."""
    trained = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    files = [(ROOT / name).read_text() for name in ("README.md", "conversion/tokenizer.py")]
    corpus = [*files, *(text for text in TEXTS.values() if len(text) < 999)]
    trained.train_from_iterator(corpus * 2, trainer)
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    found = {bytes(byte_of[c] for c in token): rank for token, rank in trained.get_vocab().items()}
    assert len(found) == 3000
    return dict(sorted(found.items(), key=lambda item: item[1]))


@pytest.fixture(scope="module")
def built(ranks) -> Tokenizer:
    """Ours, without named ids."""
    return conversion.build_tokenizer(ranks, {}, len(ranks) + 256)


def tiktoken_with(ranks: dict[bytes, int], special: dict[str, int] | None = None, pattern: str = PATTERN):
    tiktoken = pytest.importorskip("tiktoken")
    return tiktoken.Encoding("reference", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special or {})


@pytest.fixture(scope="module")
def reference(ranks):
    return tiktoken_with(ranks)


@pytest.fixture(scope="module")
def converted(ranks, tmp_path_factory) -> dict[str, PreTrainedTokenizerFast]:
    """Family -> the tokenizer as a user loads it."""
    folder = tmp_path_factory.mktemp("converted")
    source = folder_with(folder / "source", ranks)
    folders = {name: conversion.convert(source, folder / name, name) for name in conversion.FAMILIES}
    return {name: AutoTokenizer.from_pretrained(path) for name, path in folders.items()}


@pytest.mark.parametrize("name", TEXTS)
def test_build_tokenizer_gives_the_ids_of_tiktoken(built, reference, name):
    for text in (TEXTS[name], f" {TEXTS[name]}\n{TEXTS[name]}", TEXTS[name].upper(), TEXTS[name][::-1]):
        assert built.encode(text).ids == reference.encode_ordinary(text)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(max_size=200) | st.text(alphabet="aA1é中ー\u0301'sSłl \t\r\n.-_\u00a0\u3000😀\u200d", max_size=60))
def test_build_tokenizer_gives_the_ids_of_tiktoken_on_any_text(built, reference, text):
    ids = built.encode(text).ids
    assert ids == reference.encode_ordinary(text)
    assert built.decode(ids) == text


@pytest.mark.parametrize("seed", range(8))
def test_build_tokenizer_gives_the_ids_of_tiktoken_for_ranks_in_any_order(seed):
    """Parts that rank after their whole, tokens that no merge reaches, many ways to split the same token."""
    generator = random.Random(seed)
    words = {"".join(generator.choices("ab", k=generator.randint(2, 7))).encode() for _ in range(60)}
    tokens = [*SINGLE, *sorted(words)]
    generator.shuffle(tokens)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    built = conversion.build_tokenizer(ranks, {}, len(ranks))
    reference = tiktoken_with(ranks)
    for _ in range(300):
        text = "".join(generator.choices("ab", k=generator.randint(1, 40)))
        assert built.encode(text).ids == reference.encode_ordinary(text), text


@pytest.mark.parametrize("family", conversion.FAMILIES)
def test_convert_gives_the_ids_of_tiktoken_with_special_names(converted, ranks, family):
    size = len(ranks)
    names = {size + offset: name for offset, name in conversion.special_names(family).items()}
    special = {names.get(id, f"<|reserved_token_{id}|>"): id for id in range(size, size + 256)}
    text = "a " + "".join(name + [" ", "", "\n", "  x", "[", "|>"][id % 6] for name, id in special.items())
    ids = converted[family].encode(text)
    assert ids == tiktoken_with(ranks, special).encode(text, allowed_special="all")
    assert set(special.values()) <= set(ids)
    assert converted[family].decode(ids) == text


CLASSES = [r"\p{Han}", r"\p{L}", r"\p{N}", r"\s", r"[^\r\n\p{L}\p{N}]", r"[^\s\p{L}\p{N}]"]


@pytest.mark.parametrize("pattern", CLASSES + re.findall(r"\[[^\[]*&&[^]]*\]\]", PATTERN)[:2])
def test_both_engines_read_the_classes_of_the_pattern_alike(pattern):
    """The two libraries bring their own tables of Unicode. Planes 4 to 13 are empty, 15 and 16 private."""
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000)]))
    encoding = tiktoken_with(SINGLE, pattern=pattern)
    matched = bytes(encoding.encode_ordinary(text)).decode()  # what the pattern does not match is left out
    split = pre_tokenizers.Split(Regex(f"(?:{pattern})+"), behavior="removed")
    rest = {char for piece, _ in split.pre_tokenize_str(text) for char in piece}
    assert 10 < len(matched) < len(text) - 10
    assert set(text) - set(matched) == rest


def test_build_tokenizer_cuts_where_the_pattern_says(built):
    def pieces(text: str) -> list[str]:
        return [text[start:end] for _, (start, end) in built.pre_tokenizer.pre_tokenize_str(text)]

    text = "I don't helloWorld 中文abc 12345  x\n\n  y.\n"
    assert "|".join(pieces(text)) == "I| don't| hello|World| |中文|abc| |123|45| | x|\n\n| | y|.\n"
    assert conversion.PATTERN == PATTERN
    assert pieces("हिन्दी में THEY'RE") == ["हिन्दी", " में", " THEY'RE"]


@pytest.mark.parametrize("family", conversion.FAMILIES)
@pytest.mark.parametrize("name", TEXTS)
def test_decode_gives_the_text_back(converted, family, name):
    tokenizer = converted[family]
    assert tokenizer.decode(tokenizer.encode(TEXTS[name])) == TEXTS[name]


def test_a_whole_piece_is_one_token_even_if_no_merge_reaches_it():
    built = conversion.build_tokenizer(SINGLE | {b"xyz": 256}, {}, 257)
    assert built.encode("xyz").ids == [256]
    assert built.encode("xyzz").ids == list(b"xyzz")


def test_reserved_ids_have_names_and_encode_to_themselves(converted, ranks):
    size = len(ranks)
    for family, tokenizer in converted.items():
        assert len(tokenizer) == size + 256
        for offset in range(256):
            name = conversion.special_names(family).get(offset, f"<|reserved_token_{size + offset}|>")
            assert tokenizer.convert_ids_to_tokens(size + offset) == name
            assert tokenizer.encode(name) == [size + offset]


RELEASED = {
    "kimi_k3": "163584 [BOS] 163585 [EOS] 163586 <|end_of_msg|> 163587 <|open|> 163588 <|close|> 163589 <|sep|> "
    "163590 [start_header_id] 163591 [end_header_id] 163593 [EOT] 163602 <|media_begin|> 163603 <|media_content|> "
    "163604 <|media_end|> 163605 <|media_pad|> 163649 <osagent_mode> 163838 [UNK] 163839 [PAD]",
    "kimi_linear": "163584 [BOS] 163585 [EOS] 163586 <|im_end|> 163587 <|im_user|> 163588 <|im_assistant|> "
    "163590 <|start_header_id|> 163591 <|end_header_id|> 163593 [EOT] 163594 <|im_system|> "
    "163595 <|tool_calls_section_begin|> 163596 <|tool_calls_section_end|> 163597 <|tool_call_begin|> "
    "163598 <|tool_call_argument_begin|> 163599 <|tool_call_end|> 163601 <|im_middle|> 163602 <|media_begin|> "
    "163603 <|media_content|> 163604 <|media_end|> 163605 <|media_pad|> 163838 [UNK] 163839 [PAD]",
}


@pytest.mark.parametrize("family", conversion.FAMILIES)
def test_special_names_lie_where_the_releases_have_them(family):
    names = {str(163584 + offset): name for offset, name in conversion.special_names(family).items()}
    assert " ".join(f"{id} {name}" for id, name in names.items()) == RELEASED[family]


@pytest.mark.parametrize(("family", "end"), [("kimi_linear", "<|im_end|>"), ("kimi_k3", "<|end_of_msg|>")])
def test_convert_sets_the_roles_and_adds_no_token(converted, ranks, family, end):
    tokenizer = converted[family]
    roles = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert roles == ("[BOS]", end, "[PAD]", "[UNK]")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (len(ranks), len(ranks) + 2)
    assert tokenizer("a").input_ids == tokenizer.encode("a", add_special_tokens=False) == [ranks[b"a"]]
    assert tokenizer(["a", "a b"], padding=True).input_ids[0][0] == tokenizer.pad_token_id


def test_markers_of_the_answer_survive_skip_special_tokens(converted):
    answers = {"kimi_k3": "<|open|>response<|sep|>Hi<|close|>response<|sep|>"}
    answers["kimi_linear"] = "Hi<|tool_calls_section_begin|><|tool_call_end|>"
    for family, answer in answers.items():
        ids = converted[family].encode(f"{answer}{conversion._END[family]}[PAD][BOS]<|reserved_token_3008|>")
        assert converted[family].decode(ids, skip_special_tokens=True) == answer


@pytest.mark.parametrize(
    ("special", "extra", "message"),
    [
        ({}, -1, "there are 258 ranks"),
        ({258: "x", 300: "late"}, 42, "'late' has id 300, but the reserved ids are 258 to 299"),
        ({257: "early"}, 42, "'early' has id 257"),
        ({258: "twice", 260: "twice"}, 42, "260 is to be called 'twice', but so is 258"),
        ({259: "ab"}, 42, "259 is to be called 'ab', but so is 256"),
        ({258: "<|reserved_token_259|>"}, 42, "259 is to be called"),
    ],
)
def test_build_tokenizer_refuses_ids_and_names_that_clash(special, extra, message):
    with pytest.raises(ValueError, match=message):
        conversion.build_tokenizer(SINGLE | {b"ab": 256, b"cd": 257}, special, 258 + extra)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n"])
def test_read_ranks_reads_what_was_written_in_any_order(tmp_path, ranks, end):
    shuffled = lines(ranks)
    random.Random(0).shuffle(shuffled)
    (tmp_path / "ranks").write_bytes(end.join(shuffled) + end)
    read = conversion.read_ranks(tmp_path / "ranks")
    assert read == ranks
    assert list(read.values()) == list(range(3000))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"YWI=", "line 257: b'YWI=' is not"),
        (b"YWI= 256 1", "line 257: .* is not"),
        (b"YW*= 256", "line 257: .* is not"),
        (b"YWI 256", "line 257: .* is not"),
        (b"YWI= many", "line 257: .* is not"),
        (b"YWI= 2_56", "line 257: .* plain number"),
        (b"YWI= -1", "line 257: .* plain number"),
        (b"YQ== 256", "line 257: the token b'a' is already on line 98"),
        (b"YWI= 97", "line 257: the rank 97 is already on line 98"),
        (b"YWI= 257", "line 257: rank 257 with 257 tokens; ranks must be 0 to 256"),
    ],
)
def test_read_ranks_names_the_bad_line(tmp_path, line, message):
    (tmp_path / "ranks").write_bytes(b"\n".join([*lines(SINGLE), line]))
    with pytest.raises(ValueError, match=message):
        conversion.read_ranks(tmp_path / "ranks")


@pytest.mark.parametrize(
    ("kept", "message"), [(range(1, 256), "1 of .* 0x00"), (range(9), "247 of .* 0x09"), ("", "256")]
)
def test_read_ranks_needs_every_single_byte(tmp_path, kept, message):
    found = {bytes([byte]): rank for rank, byte in enumerate(kept)}
    (tmp_path / "ranks").write_bytes(b"\n".join(lines(found)))
    with pytest.raises(ValueError, match=f": {message}"):
        conversion.read_ranks(tmp_path / "ranks")


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear", "vocab_size": 3300}}, "kimi_k3"),
        ({"model_type": "kimi_linear", "vocab_size": 3300}, "kimi_linear"),
        ({"model_type": "kda_hybrid", "vocab_size": 3300, "attn_res_block_size": 12}, "kimi_k3"),
        ({"model_type": "kda_hybrid", "vocab_size": 3300, "linear_gate_lower_bound": -5.0}, "kimi_k3"),
        ({"model_type": "kda_hybrid", "vocab_size": 3300, "linear_output_gate_rank": 64}, "kimi_linear"),
    ],
)
def test_convert_reads_family_and_size_off_the_config(tmp_path, ranks, config, family):
    source = folder_with(tmp_path / "source", ranks, config)
    assert conversion.convert(source, tmp_path / "new" / "target") == tmp_path / "new" / "target"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new" / "target")
    assert len(tokenizer) == 3300
    assert tokenizer.chat_template == conversion.CHAT_TEMPLATES[family]
    assert tokenizer.convert_ids_to_tokens(3299) == "<|reserved_token_3299|>"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["target"]


def test_convert_asks_for_the_family_when_nothing_tells_it(tmp_path, ranks):
    for number, config in enumerate([None, {}, {"model_type": "llama", "vocab_size": 3256}]):
        source = folder_with(tmp_path / str(number), ranks, config)
        with pytest.raises(ValueError, match="give it: kimi_linear or kimi_k3"):
            conversion.convert(source, tmp_path / "target")
    conversion.convert(tmp_path / "0", tmp_path / "target", "kimi_k3")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "target")) == 3256


def test_convert_refuses_what_does_not_fit(tmp_path, ranks):
    with pytest.raises(ValueError, match=r"has no tiktoken\.model"):
        conversion.convert(tmp_path, tmp_path / "target")
    source = folder_with(tmp_path / "source", ranks, {"model_type": "kimi_linear", "vocab_size": 3200})
    with pytest.raises(ValueError, match=r"has id 3254, but the reserved ids are 3000 to 3199"):
        conversion.convert(source, tmp_path / "target")
    with pytest.raises(ValueError, match=r"`family` is 'kimi_k2'; it can be 'kimi_linear' or 'kimi_k3'"):
        conversion.convert(source, tmp_path / "target", "kimi_k2")
    assert not (tmp_path / "target").exists()


def released_settings(names: dict[int, str], kept: tuple[str, ...] = ()) -> dict:
    listed = {str(id): {"content": name, "special": name not in kept} for id, name in names.items()}
    classes = {"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_kimi.X", None]}}
    return {"added_tokens_decoder": listed, "eos_token": "[EOS]", "model_max_length": 4096, **classes}


NAMES = {3000: "[BOS]", 3001: "[EOS]", 3002: "<|im_end|>", 3007: "<think>", 3100: "[UNK]", 3101: "[PAD]"}


def test_names_of_the_folder_win_and_survive_a_second_conversion_in_place(tmp_path, ranks):
    config = {"model_type": "kimi_linear", "vocab_size": 3256, "auto_map": {"AutoConfig": "configuration_kimi.X"}}
    folder = folder_with(tmp_path / "model", ranks, config, released_settings(NAMES, kept=("<think>",)))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=r"model has tokenizer_config\.json; nothing is overwritten without"):
        conversion.convert(folder, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    for _ in range(2):
        conversion.convert(folder, folder, force=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        named = {id: name for name, id in tokenizer.get_vocab().items() if id >= 3000 and "reserved" not in name}
        assert named == NAMES
        assert tokenizer.convert_ids_to_tokens(3003) == "<|reserved_token_3003|>"
        assert tokenizer.decode([3007, 3001, 3002], skip_special_tokens=True) == "<think>"
        assert (tokenizer.eos_token, tokenizer.pad_token_id, tokenizer.model_max_length) == ("<|im_end|>", 3101, 4096)
    assert all((folder / name).read_bytes() == before[name] for name in ("tiktoken.model", "config.json"))
    written = json.loads((folder / "tokenizer_config.json").read_text())
    assert (written["tokenizer_class"], written.get("auto_map")) == ("PreTrainedTokenizerFast", None)


def test_names_of_the_folder_must_fit_the_family_and_the_size(tmp_path, ranks):
    config = {"model_type": "kimi_k3", "text_config": {"vocab_size": 3256}}
    source = folder_with(tmp_path / "source", ranks, config, released_settings(NAMES))
    with pytest.raises(ValueError, match=r"names no \['<\|end_of_msg\|>'\], which 'kimi_k3' needs"):
        conversion.convert(source, tmp_path / "target")
    (source / "config.json").write_text('{"model_type": "kimi_linear", "vocab_size": 3101}')
    with pytest.raises(ValueError, match=r"'\[PAD\]' has id 3101"):
        conversion.convert(source, tmp_path / "target")
    (source / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        conversion.convert(source, tmp_path / "target")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_convert_overwrites_only_with_force(tmp_path, ranks, name):
    source, target = folder_with(tmp_path / "source", ranks), tmp_path / "target"
    target.mkdir()
    (target / name).write_text("mine")
    with pytest.raises(ValueError, match=re.escape(f"target has {name}; nothing is overwritten without `force`")):
        conversion.convert(source, target, "kimi_k3")
    assert [(path.name, path.read_text()) for path in target.iterdir()] == [(name, "mine")]
    conversion.convert(source, target, "kimi_k3", force=True)
    assert {path.name for path in target.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert "mine" not in (target / name).read_text()[:9]


TEMPLATE = "{{ messages[0].content }}\n!"


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("in_place", [True, False])
def test_convert_keeps_a_chat_template_and_says_so(tmp_path, ranks, caplog, place, in_place):
    settings = {"chat_template": TEMPLATE} if place == "tokenizer_config.json" else None
    source = folder_with(tmp_path / "source", ranks, settings=settings)
    if not settings:
        (source / place).write_text(TEMPLATE)
    target = source if in_place else tmp_path / "target"
    conversion.convert(source, target, "kimi_k3", force=in_place and settings is not None)
    assert f"kept the chat template of {source / place}" in caplog.text
    assert (target / "chat_template.jinja").read_text() == TEMPLATE
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi\n!"


def test_convert_raises_when_the_result_loads_otherwise(tmp_path, ranks, monkeypatch):
    def broken(folder, **kwargs):
        tokenizer = load(folder, **kwargs)
        setattr(tokenizer.backend_tokenizer, *fault)
        return tokenizer

    source, load = folder_with(tmp_path / "source", ranks), AutoTokenizer.from_pretrained
    monkeypatch.setattr(conversion.AutoTokenizer, "from_pretrained", broken)
    for fault in (("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False)), ("decoder", decoders.Fuse())):
        with pytest.raises(ValueError, match=r"does not give .* back: do not use it"):
            conversion.convert(source, tmp_path / fault[0], "kimi_k3")


def test_run_prints_one_line(tmp_path, ranks, capsys):
    parser = argparse.ArgumentParser()
    conversion.add_arguments(parser)
    source = folder_with(tmp_path / "source", ranks)
    conversion.run(parser.parse_args([str(source), str(tmp_path / "target"), "--family", "kimi_k3"]))
    files = "tokenizer.json, tokenizer_config.json, chat_template.jinja; 3,256 tokens, 16 named and 240 reserved ids"
    assert capsys.readouterr().out == f"{tmp_path / 'target'}: {files}\n"
    conversion.run(parser.parse_args([str(source), "--family", "kimi_linear"]))
    assert capsys.readouterr().out.endswith("; 3,256 tokens, 21 named and 235 reserved ids\n")
    with pytest.raises(ValueError, match="--force"):
        conversion.run(parser.parse_args([str(source), "--family", "kimi_linear"]))
    conversion.run(parser.parse_args([str(source), "--family", "kimi_linear", "--force"]))
    assert "chat template kept from chat_template.jinja; 3,256 tokens, 21 named" in capsys.readouterr().out


CALLS = [
    {"id": "functions.add:0", "function": {"name": "add", "arguments": {"b": [1, {"x": None}], "a": 'say "hé"\n'}}},
    {"id": "functions.now:1", "function": {"name": "now", "arguments": ""}},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "b": 1, "a": "é"}}}
TOOLS = '[{"function":{"name":"add","parameters":{"a":"é","b":1,"type":"object"}},"type":"function"}]'
USER = {"role": "user", "content": "Hi"}
CHAT = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": None, "tool_calls": CALLS, "reasoning_content": "Add."},
    {"role": "tool", "tool_call_id": "functions.now:1", "content": "noon"},
    {"role": "tool", "tool_call_id": "functions.add:0", "content": [{"type": "text", "text": "3"}]},
    {"role": "assistant", "content": 'It is 3 & "noon".'},
    {"role": "user", "name": 'a&"b', "content": ""},
]
K3_USER = '<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>'
K3_ASSISTANT = '<|open|>message role="assistant"<|sep|>'


def render(tokenizer: PreTrainedTokenizerFast, chat: list[dict], **variables) -> str:
    return tokenizer.apply_chat_template(chat, tokenize=False, **variables)


def test_kimi_linear_template_writes_every_kind_of_message(converted):
    expected = (
        f"<|im_system|>tool_declare<|im_middle|>{TOOLS}<|im_end|><|im_system|>system<|im_middle|>Be brief.<|im_end|>"
        "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"b": [1, {"x": null}], "a": "say \\"hé\\"\\n"}'
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_"
        "section_end|><|im_end|><|im_system|>tool<|im_middle|>## Return of functions.now:1\nnoon<|im_end|><|im_"
        "system|>tool<|im_middle|>## Return of functions.add:0\n3<|im_end|>"
        '<|im_assistant|>assistant<|im_middle|>It is 3 & "noon".<|im_end|><|im_user|>a&"b<|im_middle|><|im_end|>'
    )
    assert render(converted["kimi_linear"], CHAT, tools=[TOOL]) == expected
    prompt = "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert render(converted["kimi_linear"], [USER], add_generation_prompt=True) == prompt


def test_kimi_linear_template_numbers_calls_without_ids(converted):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}, {"name": "g"}]}
    answers = [{"role": "tool", "content": "1"}, {"role": "tool", "name": "g", "content": "2"}]
    text = render(converted["kimi_linear"], [USER, call, *answers, call, *answers])
    for number, name in enumerate("fgfg"):
        assert f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" in text
        answer = f"## Return of functions.{name}:{number}\n{1 + number % 2}<|im_end|>"
        assert f"<|im_system|>{'g' if name == 'g' else 'tool'}<|im_middle|>{answer}" in text


@pytest.mark.parametrize("thinking", [True, False])
def test_kimi_k3_template_writes_every_kind_of_message(converted, thinking):
    end = "<|close|>message<|sep|><|end_of_msg|>"
    think = ["<|open|>think<|sep|>Add.<|close|>think<|sep|>", "<|open|>think<|sep|><|close|>think<|sep|>"]
    expected = (
        f'<|open|>message role="system" type="tool-declare"<|sep|>{TOOLS}{end}'
        f'<|open|>message role="system"<|sep|>Be brief.{end}{K3_USER}{K3_ASSISTANT}{think[0] if thinking else ""}'
        '<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|>'
        '<|open|>argument key="b" type="array"<|sep|>[1, {"x": null}]<|close|>argument<|sep|>'
        '<|open|>argument key="a" type="string"<|sep|>say "hé"\n<|close|>argument<|sep|><|close|>call<|sep|>'
        f'<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>{end}'
        f'<|open|>message role="tool" tool="add" index="1"<|sep|>3{end}'
        f'<|open|>message role="tool" tool="now" index="2"<|sep|>noon{end}'
        f"{K3_ASSISTANT}{think[1] if thinking else ''}"
        f'<|open|>response<|sep|>It is 3 & "noon".<|close|>response<|sep|>{end}'
        f'<|open|>message role="user" name="a&amp;&quot;b"<|sep|>{end}'
    )
    assert render(converted["kimi_k3"], CHAT, tools=[TOOL], **({} if thinking else {"thinking": False})) == expected


def test_kimi_k3_template_prompts_for_thoughts_or_for_an_answer(converted):
    def prompt(**variables) -> str:
        return render(converted["kimi_k3"], [USER], add_generation_prompt=True, **variables)

    thoughts = f"{K3_USER}{K3_ASSISTANT}<|open|>think<|sep|>"
    assert prompt() == thoughts
    assert prompt(thinking=False) == f"{K3_USER}{K3_ASSISTANT}<|open|>response<|sep|>"


def test_kimi_k3_template_takes_types_and_strings(converted):
    values = {"n": 1.5, "t": True, "z": None, "o": {"k": "é"}}
    calls = [{"id": "c", "name": "f", "arguments": values}, {"id": "C", "name": "g", "arguments": '{"a": 1}'}]
    chat = [{"role": "assistant", "content": "", "tool_calls": calls}]
    answers = [{"role": "tool", "content": "A"}, {"role": "tool", "content": "B"}]
    named = [answers[1] | {"tool_call_id": "C"}, answers[0] | {"tool_call_id": "c"}]
    text = render(converted["kimi_k3"], [*chat, *answers])
    assert text == render(converted["kimi_k3"], [*chat, *named])
    for key, kind, value in (("n", "number", "1.5"), ("t", "boolean", "true"), ("z", "null", "null")):
        assert f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>' in text
    assert 'key="o" type="object"<|sep|>{"k": "é"}<|close|>' in text
    assert 'index="2"<|sep|><|open|>json type="object"<|sep|>{"a": 1}<|close|>json<|sep|><|close|>call<|sep|>' in text
    assert re.findall(r'role="tool" tool="(.)" index="(.)"<\|sep\|>(.)<', text) == [("f", "1", "A"), ("g", "2", "B")]


@pytest.mark.parametrize("family", conversion.FAMILIES)
def test_templates_refuse_what_they_cannot_write(converted, family):
    with pytest.raises(TemplateError, match="Unknown role developer"):
        render(converted[family], [{"role": "developer", "content": "x"}])
    with pytest.raises(TemplateError, match="text only, not a content part of type image"):
        render(converted[family], [{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(TemplateError, match="or a call before it to answer"):
        render(converted[family], [{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("family", conversion.FAMILIES)
def test_users_cannot_write_markers_when_they_are_sanitized(converted, family):
    tokenizer = converted[family]
    marker, id = {"kimi_linear": ("<|im_end|>", 3002), "kimi_k3": ("<|open|>", 3003)}[family]
    chats = [[{"role": "user", "content": text}] for text in ("a  b", f"a {marker} b")]
    plain, marked = (tokenizer.apply_chat_template(chat, sanitize_control_tokens=True).input_ids for chat in chats)
    assert marked.count(id) == plain.count(id) > 0
    assert tokenizer.apply_chat_template(chats[1]).input_ids.count(id) == plain.count(id) + 1
    assert tokenizer.decode(marked) == render(tokenizer, chats[1])


def test_kimi_k3_attributes_are_encoded_as_the_release_encodes_them(converted):
    """Piece by piece."""
    pieces = re.split("#", '<|open|>#message# role#="#tool#"# tool#="#get_x2#"# index#="#1#"#<|sep|>')
    encode = converted["kimi_k3"].encode
    assert encode("".join(pieces)) == [id for piece in pieces for id in encode(piece)]


@pytest.mark.parametrize("family", conversion.FAMILIES)
def test_the_assistant_mask_covers_what_the_model_writes(converted, family):
    tokenizer = converted[family]
    out = tokenizer.apply_chat_template(CHAT[:6], return_assistant_tokens_mask=True)
    mask = "".join(map(str, out["assistant_masks"]))
    assert [len(part) > 0 for part in re.split("0+", mask)] == [False, True, True]
    text = tokenizer.decode(out["input_ids"][mask.rindex("0") + 1 :])
    opening = {"kimi_linear": "", "kimi_k3": "<|close|>think<|sep|><|open|>response<|sep|>"}[family]
    assert text.startswith(f"{opening}It is 3 &")
    assert render(tokenizer, CHAT[:6]).endswith(text)
    assert out["input_ids"][mask.index("10")] == tokenizer.eos_token_id
