"""`tiktoken.model` of a Kimi release in, `tokenizer.json` with a chat template out: the same ids, no remote code.

    python -m conversion tokenizer SOURCE [TARGET] [--family kimi_linear|kimi_k3] [--force]

The ids are those of `tiktoken` with the release's ranks and pattern. The release's own Python tokenizer also cuts runs
of more than 25,000 characters with no white space (or nothing else) in them, which tiktoken once could not take: ids
can differ at such a cut, and only there. Its chat renderer for Kimi K3 encodes what users write with the markers
switched off: pass `sanitize_control_tokens=True` to `apply_chat_template` for that (transformers 5.24; 5.17 ignores
it).
"""

import argparse
import base64
import binascii
import json
import logging
import os
import tempfile
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from modeling_kda import KdaHybridConfig
from modeling_kda.weights_kda import family_of


logger = logging.getLogger(__name__)

RANKS_FILE, TEMPLATE_FILE = "tiktoken.model", "chat_template.jinja"
# The releases keep 256 ids above the ranks for names (`num_reserved_special_tokens` of their tokenizer).
RESERVED = 256

# --- What the releases define ---

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_PREFIX, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# `pat_str` of the releases' tokenizer. Oniguruma (`tokenizers`) and fancy-regex (`tiktoken`) read it alike.
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_PREFIX}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_PREFIX}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# Offset from the number of ranks (163,584 in the releases) -> name; `added_tokens_decoder` of the releases.
_SHARED = {0: "[BOS]", 1: "[EOS]", 9: "[EOT]", 254: "[UNK]", 255: "[PAD]"}
_SHARED |= {18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>"}
_NAMES = {
    "kimi_linear": _SHARED
    | {2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 10: "<|im_system|>", 17: "<|im_middle|>"}
    | {6: "<|start_header_id|>", 7: "<|end_header_id|>"}
    | {11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>"}
    | {13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>"},
    "kimi_k3": _SHARED
    | {2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>"}
    | {6: "[start_header_id]", 7: "[end_header_id]", 65: "<osagent_mode>"},
}
FAMILIES = tuple(_NAMES)
# Markers that a reader of the answer needs: `decode(skip_special_tokens=True)` keeps them, as in the releases.
_KEPT = {
    "kimi_linear": frozenset(name for name in _NAMES["kimi_linear"].values() if name.startswith("<|tool_call")),
    "kimi_k3": frozenset({"<|open|>", "<|close|>", "<|sep|>"}),
}
_END = {"kimi_linear": "<|im_end|>", "kimi_k3": "<|end_of_msg|>"}


def special_names(family: str) -> dict[int, str]:
    """The named reserved ids of a family, for a folder that does not list its own.

    Args:
        family: "kimi_linear" (the markers of Kimi K2) or "kimi_k3".

    Returns:
        Offset from the number of ranks, 0 to 255 -> name.

    Raises:
        ValueError: `family` is neither.
    """
    _check_family(family)
    return dict(sorted(_NAMES[family].items()))


def _check_family(family: str) -> None:
    if family not in FAMILIES:
        raise ValueError(f"`family` is {family!r}; it can be {' or '.join(map(repr, FAMILIES))}")


# --- Chat templates ---
# Both know text only. `generation` blocks are what the model writes itself: `return_assistant_tokens_mask` reads them.

_TEXT = r"""
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content or [] -%}
            {%- if part.type != 'text' -%}
                {{- raise_exception('This chat template takes text only, not a content part of type ' ~ part.type) -}}
            {%- endif -%}
            {{- part.text -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
"""

_KIMI_LINEAR = r"""
{%- set markers = {'system': '<|im_system|>', 'user': '<|im_user|>', 'assistant': '<|im_assistant|>'} -%}
{%- set state = namespace(count=0, ids=[], answered=0) -%}
{%- if tools -%}
    {{- '<|im_system|>tool_declare<|im_middle|>' -}}
    {{- tools | tojson(separators=(',', ':'), sort_keys=true) -}}
    {{- '<|im_end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set marker = markers['system' if message.role == 'tool' else message.role] -%}
    {%- if not marker -%}
        {{- raise_exception('Unknown role ' ~ message.role ~ ': use system, user, assistant or tool') -}}
    {%- endif -%}
    {{- marker ~ (message.name or message.role) ~ '<|im_middle|>' -}}
    {%- if message.role == 'assistant' -%}
        {%- set state.ids = [] -%}
        {%- set state.answered = 0 -%}
        {%- generation -%}
        {{- text(message.content) -}}
        {%- if message.tool_calls -%}
            {{- '<|tool_calls_section_begin|>' -}}
            {%- for call in message.tool_calls -%}
                {%- set function = call.function or call -%}
                {%- set id = call.id or 'functions.' ~ function.name ~ ':' ~ state.count -%}
                {%- set state.count = state.count + 1 -%}
                {%- set state.ids = state.ids + [id] -%}
                {{- '<|tool_call_begin|>' ~ id ~ '<|tool_call_argument_begin|>' -}}
                {%- if function.arguments is string -%}
                    {{- function.arguments -}}
                {%- else -%}
                    {{- function.arguments | default({}, true) | tojson -}}
                {%- endif -%}
                {{- '<|tool_call_end|>' -}}
            {%- endfor -%}
            {{- '<|tool_calls_section_end|>' -}}
        {%- endif -%}
        {{- '<|im_end|>' -}}
        {%- endgeneration -%}
    {%- else -%}
        {%- if message.role == 'tool' -%}
            {%- set id = message.tool_call_id or state.ids[state.answered] -%}
            {%- if not id -%}
                {{- raise_exception('A tool message needs a tool_call_id, or a call before it to answer') -}}
            {%- endif -%}
            {%- set state.answered = state.answered + 1 -%}
            {{- '## Return of ' ~ id ~ '\n' -}}
        {%- endif -%}
        {{- text(message.content) ~ '<|im_end|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_assistant|>assistant<|im_middle|>' -}}
{%- endif -%}
"""

# XTML. Attributes are encoded together with their tag here, piece by piece in the release: the pattern cuts at the
# same places unless a value begins or ends with punctuation. Left out is what the release says in sentences of its
# own: effort of thinking, introduction of tools, tool choice, response format. Its own encoder writes those.
_KIMI_K3 = r"""
{%- macro open(tag, attributes=[]) -%}
    {{- '<|open|>' ~ tag -}}
    {%- for key, value in attributes -%}
        {{- ' ' ~ key ~ '="' ~ value | string | replace('&', '&amp;') | replace('"', '&quot;') ~ '"' -}}
    {%- endfor -%}
    {{- '<|sep|>' -}}
{%- endmacro -%}
{%- macro close(tag) -%}
    {{- '<|close|>' ~ tag ~ '<|sep|>' -}}
{%- endmacro -%}
{%- macro message_of(role, attributes, body) -%}
    {{- open('message', [('role', role)] + attributes) ~ body ~ close('message') ~ '<|end_of_msg|>' -}}
{%- endmacro -%}
{%- macro type_of(value) -%}
    {{- 'boolean' if value is boolean else 'null' if value is none else 'number' if value is number
        else 'string' if value is string else 'object' if value is mapping else 'array' -}}
{%- endmacro -%}
{%- macro call_of(function, index) -%}
    {%- set arguments = function.arguments -%}
    {{- open('call', [('tool', function.name), ('index', index)]) -}}
    {%- if arguments is string -%}
        {#- Jinja cannot read JSON, so a string goes in as the format's own block for undivided arguments. -#}
        {%- if arguments | trim -%}
            {{- open('json', [('type', 'object')]) ~ arguments ~ close('json') -}}
        {%- endif -%}
    {%- else -%}
        {%- for key, value in (arguments or {}).items() -%}
            {{- open('argument', [('key', key), ('type', type_of(value))]) -}}
            {{- (value if value is string else value | tojson) ~ close('argument') -}}
        {%- endfor -%}
    {%- endif -%}
    {{- close('call') -}}
{%- endmacro -%}
{%- set thinking = thinking | default(true) -%}
{%- set state = namespace(calls=[], answered=0) -%}
{%- if tools -%}
    {{- message_of('system', [('type', 'tool-declare')], tools | tojson(separators=(',', ':'), sort_keys=true)) -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set named = [('name', message.name)] if message.name else [] -%}
    {%- if message.role in ['system', 'user'] -%}
        {{- message_of(message.role, named, text(message.content)) -}}
    {%- elif message.role == 'assistant' -%}
        {%- set state.calls = message.tool_calls or [] -%}
        {%- set state.answered = 0 -%}
        {{- open('message', [('role', 'assistant')] + named) ~ open('think' if thinking else 'response') -}}
        {%- generation -%}
        {%- if thinking -%}
            {%- set reasoning = message.reasoning_content or message.reasoning or '' -%}
            {{- (reasoning if reasoning | trim else '') ~ close('think') ~ open('response') -}}
        {%- endif -%}
        {{- text(message.content) ~ close('response') -}}
        {%- if message.tool_calls -%}
            {{- open('tools') -}}
            {%- for call in message.tool_calls -%}
                {{- call_of(call.function or call, loop.index) -}}
            {%- endfor -%}
            {{- close('tools') -}}
        {%- endif -%}
        {{- close('message') ~ '<|end_of_msg|>' -}}
        {%- endgeneration -%}
    {%- elif message.role == 'tool' -%}
        {#- A run of results is written in the order of the calls when every result names its call. -#}
        {%- if loop.first or loop.previtem.role != 'tool' -%}
            {%- set run = namespace(results=[], sorted=[]) -%}
            {%- for result in messages[loop.index0:] -%}
                {%- if result.role != 'tool' -%}
                    {%- break -%}
                {%- endif -%}
                {%- set run.results = run.results + [result] -%}
            {%- endfor -%}
            {%- for id in state.calls | selectattr('id') | map(attribute='id') | unique(case_sensitive=true) -%}
                {%- set call = (state.calls | selectattr('id', 'equalto', id) | list)[0] -%}
                {%- for result in run.results | selectattr('tool_call_id', 'equalto', id) -%}
                    {%- set run.sorted = run.sorted + [((call.function or call).name, result)] -%}
                {%- endfor -%}
            {%- endfor -%}
            {%- if run.sorted | length != run.results | length -%}
                {%- set run.sorted = [] -%}
                {%- for result in run.results -%}
                    {%- set call = state.calls[loop.index0] | default({}) -%}
                    {%- set name = result.tool or result.name or (call.function or call).name -%}
                    {%- set run.sorted = run.sorted + [(name, result)] -%}
                {%- endfor -%}
            {%- endif -%}
            {%- for name, result in run.sorted -%}
                {%- if not name -%}
                    {{- raise_exception('A tool message needs a name, or a call before it to answer') -}}
                {%- endif -%}
                {%- set state.answered = state.answered + 1 -%}
                {{- message_of('tool', [('tool', name), ('index', state.answered)], text(result.content)) -}}
            {%- endfor -%}
        {%- endif -%}
    {%- else -%}
        {{- raise_exception('Unknown role ' ~ message.role ~ ': use system, user, assistant or tool') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- open('message', [('role', 'assistant')]) ~ open('think' if thinking else 'response') -}}
{%- endif -%}
"""

# A variable beside `messages`, `tools` and `add_generation_prompt`, of "kimi_k3" only: `thinking` (default true).
CHAT_TEMPLATES = {"kimi_linear": _TEXT.lstrip() + _KIMI_LINEAR.strip(), "kimi_k3": _TEXT.lstrip() + _KIMI_K3.strip()}


# --- Ranks and merges ---


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a `tiktoken.model`: one token a line, `base64(bytes) rank`. Blank lines are skipped.

    Args:
        path: The file.

    Returns:
        Token -> rank, in the order of the ranks 0 .. n - 1.

    Raises:
        ValueError: A malformed line, a token or a rank given twice, a gap in the ranks, or a single byte (any of the
            256) that is no token. The line is named where there is one.
    """
    ranks: dict[bytes, int] = {}
    line_of_rank: dict[int, int] = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        where = f"{path}, line {number}"
        fields = line.split()
        if not fields:
            continue
        try:
            encoded, digits = fields
            token, rank = base64.b64decode(encoded, validate=True), int(digits)
        except (ValueError, binascii.Error):
            raise ValueError(f"{where}: {line[:80]!r} is not `base64(token) rank`") from None
        if not token or not digits.isdigit():
            raise ValueError(f"{where}: {line[:80]!r} has an empty token or a rank that is no plain number")
        if token in ranks:
            raise ValueError(f"{where}: the token {token!r} is already on line {line_of_rank[ranks[token]]}")
        if rank in line_of_rank:
            raise ValueError(f"{where}: the rank {rank} is already on line {line_of_rank[rank]}")
        ranks[token], line_of_rank[rank] = rank, number
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(
            f"{path}: {len(missing)} of the 256 single bytes are no token, the first is {missing[0]:#04x}"
        )
    if (highest := max(line_of_rank)) >= len(ranks):
        raise ValueError(
            f"{path}, line {line_of_rank[highest]}: rank {highest} with {len(ranks)} tokens; "
            f"ranks must be 0 to {len(ranks) - 1} without a gap"
        )
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts that byte pair encoding joins into `token`, or None if it never gets there.

    There is no other pair: as long as no merge crosses the borders of a stretch of text, what happens inside of it
    does not depend on what is outside, so every occurrence of `token` is built as it is when encoded alone.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    joined = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
    while len(parts) > 2:
        # The lowest rank first, the leftmost of equals.
        at = joined.index(min(joined))
        if joined[at] == len(ranks):
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del joined[at]
        for i in range(max(at - 1, 0), min(at + 1, len(joined))):
            joined[i] = ranks.get(parts[i] + parts[i + 1], len(ranks))
    return parts[0], parts[1]


def _byte_characters() -> dict[int, str]:
    """Byte -> its character in a byte-level vocabulary: itself if printable, else one from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def build_tokenizer(
    ranks: dict[bytes, int], special: dict[int, str], vocab_size: int, kept: Collection[str] = ()
) -> Tokenizer:
    """The tokenizer with the ids of `tiktoken.Encoding(pat_str=PATTERN, mergeable_ranks=ranks, ...)`.

    Args:
        ranks: Token -> rank 0 .. n - 1, every single byte among them (`read_ranks`).
        special: Id -> name, ids from n to vocab_size - 1. The other ids there are called `<|reserved_token_{id}|>`.
        vocab_size: Rows of the embedding: n and the reserved ids.
        kept: Those names that `decode(skip_special_tokens=True)` does not skip.

    Returns:
        A byte-level BPE that adds no token by itself and gives every text back.

    Raises:
        ValueError: `vocab_size` is below n, an id lies outside of n .. vocab_size - 1, or a name is used twice or is
            an ordinary token too.
    """
    count = len(ranks)
    if vocab_size < count:
        raise ValueError(f"`vocab_size` is {vocab_size}, but there are {count} ranks")
    for id, name in special.items():
        if not count <= id < vocab_size:
            raise ValueError(f"{name!r} has id {id}, but the reserved ids are {count} to {vocab_size - 1}")

    table = _byte_characters()
    spelled = {token: token.decode("latin-1").translate(table) for token in ranks}
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}

    names = [special.get(id, f"<|reserved_token_{id}|>") for id in range(count, vocab_size)]
    taken = dict(vocabulary)
    for id, name in enumerate(names, start=count):
        if name in taken:
            raise ValueError(f"the reserved id {id} is to be called {name!r}, but so is {taken[name]}")
        taken[name] = id

    pairs = [_last_merge(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    merges = [(spelled[pair[0]], spelled[pair[1]]) for pair in pairs if pair]
    # `ignore_merges`: tiktoken takes a whole piece that is a token as it is, also one that no merge reaches.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(name, special=name not in kept, normalized=False) for name in names])
    assert tokenizer.get_vocab_size() == vocab_size, "the reserved ids do not follow the ranks"
    return tokenizer


# --- Folders ---


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def detect_family(config: dict[str, Any]) -> str:
    """The family of a model by its `config.json`.

    Raises:
        ValueError: Its `model_type` is none of ours.
    """
    model_type = config.get("model_type")
    if model_type in FAMILIES:
        return model_type
    if model_type == "kda_hybrid":
        return family_of(KdaHybridConfig.from_dict(config))
    raise ValueError(
        f"`model_type` is {model_type!r} in config.json, which tells no family; give it: {' or '.join(FAMILIES)}"
    )


def find_template(folder: Path) -> tuple[Any, str | None]:
    """The chat template that `folder` has and the name of its file, or (None, None).

    The template is a string, or what `tokenizer_config.json` may hold in its place: a list of named templates.
    """
    if (folder / TEMPLATE_FILE).exists():
        return (folder / TEMPLATE_FILE).read_text(encoding="utf-8"), TEMPLATE_FILE
    template = _read_json(folder / "tokenizer_config.json").get("chat_template")
    return (template, "tokenizer_config.json") if template else (None, None)


_SAMPLES = (
    "I don't think THEY'RE here: it'll cost 12345.67 (или нет)...\r\n\r\n\tdef f(x):\n        return x  # 中文abc\n",
    "日本語のテキスト、한국어 문장, हिन्दी में किताबें, العربية, ภาษาไทย, Ελληνικά",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301\u0323 \u200b\u00a0\u3000 \x00\x7f\ufffd 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠮷野家 \u0378",
)


def _verify(folder: Path, expected: Tokenizer, names: list[str]) -> None:
    """Raise ValueError unless `folder` loads as users load it, with the ids of `expected`, and decodes to the text."""
    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for text in (*_SAMPLES, "".join(names)):
        ids = loaded.encode(text, add_special_tokens=False)
        if ids != expected.encode(text, add_special_tokens=False).ids or loaded.decode(ids) != text:
            raise ValueError(
                f"{folder}: the tokenizer written there does not give {text[:40]!r}... back: do not use it"
            )


def convert(source: Path, target: Path, family: str | None = None, force: bool = False) -> Path:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` for `source/tiktoken.model`.

    Names come from `added_tokens_decoder` in `source/tokenizer_config.json`, else from `special_names`; the size from
    `source/config.json`, else it is the ranks and 256 more. A chat template that `source` has is kept, with a warning
    in the log. Padding is on the left, as generating in batches needs it.

    Args:
        source: A folder with `tiktoken.model`, as released.
        target: The folder to write, made if needed; may be `source`.
        family: "kimi_linear" or "kimi_k3"; None reads it off `source/config.json` (`detect_family`).
        force: Overwrite files in `target`.

    Returns:
        `target`.

    Raises:
        ValueError: `source` has no `tiktoken.model`, the family is unknown, the files contradict each other
            (`read_ranks`, `build_tokenizer`), or a file is there already and `force` is not given: nothing has been
            written then. Also if what was written does not load and decode as it should.
    """
    source, target = Path(source), Path(target)
    if not (source / RANKS_FILE).is_file():
        raise ValueError(f"{source} has no {RANKS_FILE}, the vocabulary of a Kimi release")
    config, settings = _read_json(source / "config.json"), _read_json(source / "tokenizer_config.json")
    if family is None:
        family = detect_family(config)
    _check_family(family)

    ranks = read_ranks(source / RANKS_FILE)
    size = config.get("text_config", config).get("vocab_size", len(ranks) + RESERVED)
    released = settings.get("added_tokens_decoder")
    if released:
        special = {int(id): token["content"] for id, token in released.items()}
        kept = {token["content"] for token in released.values() if not token.get("special", True)}
    else:
        special = {len(ranks) + offset: name for offset, name in special_names(family).items()}
        kept = _KEPT[family]
    roles = {"bos_token": "[BOS]", "eos_token": _END[family], "pad_token": "[PAD]", "unk_token": "[UNK]"}
    absent = sorted(set(roles.values()) - set(special.values()))
    if absent:
        raise ValueError(
            f"{source}/tokenizer_config.json names no {absent}, which {family!r} needs; is it that family?"
        )
    template, origin = find_template(source)
    options = {"model_max_length": settings["model_max_length"]} if "model_max_length" in settings else {}

    tokenizer = build_tokenizer(ranks, special, size, kept)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template or CHAT_TEMPLATES[family],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **roles,
        **options,
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tokenizer-") as folder:
        fast.save_pretrained(folder)
        _complete_settings(Path(folder) / "tokenizer_config.json", fast)
        written = [path.relative_to(folder) for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        if origin == TEMPLATE_FILE and target.exists() and target.samefile(source):
            written.remove(Path(TEMPLATE_FILE))  # it is there
        present = [str(name) for name in written if (target / name).exists()]
        if present and not force:
            raise ValueError(f"{target} has {', '.join(present)}; nothing is overwritten without `force` (--force)")
        for name in written:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(folder) / name, target / name)
    if template:
        logger.warning("%s: kept the chat template of %s", target, source / origin)
    _verify(target, tokenizer, [name for _, name in sorted(special.items())])
    return target


def _complete_settings(path: Path, fast: PreTrainedTokenizerFast) -> None:
    """Name the class as every version of transformers knows it, and list the names as the releases do.

    Without the list, converting a folder in place a second time would lose the names that its release gave.
    """
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    names = sorted(fast.added_tokens_decoder.items())
    settings["added_tokens_decoder"] = {str(id): token.__getstate__() for id, token in names}
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- Command line ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the sub-command `tokenizer` to its parser."""
    parser.add_argument("source", metavar="SOURCE", type=Path, help=f"folder with {RANKS_FILE} (and config.json)")
    parser.add_argument("target", metavar="TARGET", type=Path, nargs="?", help="folder to write (default: SOURCE)")
    parser.add_argument("--family", choices=FAMILIES, help="names and chat format (default: read from config.json)")
    parser.add_argument("--force", action="store_true", help="overwrite files that are there")


def run(args: argparse.Namespace) -> None:
    """Convert as `add_arguments` asked, and print one line on what was written."""
    _, origin = find_template(args.source)
    target = convert(args.source, args.target or args.source, args.family, args.force)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()
    reserved = sum(token.content == f"<|reserved_token_{id}|>" for id, token in added.items())
    template = f"chat template kept from {origin}" if origin else TEMPLATE_FILE
    print(
        f"{target}: tokenizer.json, tokenizer_config.json, {template}; "
        f"{tokenizer.get_vocab_size():,} tokens, {len(added) - reserved} named and {reserved} reserved ids"
    )
