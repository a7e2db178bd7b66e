"""Writes a checkpoint piece by piece: a few tensors are in memory at a time, however large the checkpoint is.

Everything goes to `TARGET.partial` and is renamed to `TARGET` once it has been read back. A run that was killed goes
on with the shard it was at.
"""

import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from tqdm import tqdm

from .checkpoint import CODES, INDEX, SINGLE, Checkpoint, Spec


JOURNAL = ".conversion.json"
COPY = 32 * 2**20  # bytes of a tensor that is only copied which are in memory at once


class Part(NamedTuple):
    """Where a piece comes from: a tensor of a checkpoint, or its entry `at`, or `rows` of that."""

    checkpoint: Checkpoint
    name: str
    rows: slice | None = None
    at: int | None = None

    def read(self) -> Tensor:
        return self.checkpoint.read(self.name, self.rows, self.at)


class Piece(NamedTuple):
    """Numbers that are made at once: `make` turns what the parts hold into one tensor for each target of the job."""

    parts: tuple[Part, ...]
    make: Callable[..., tuple[Tensor, ...]]
    offset: int = 0  # numbers of the target before it


class Job(NamedTuple):
    """Tensors that stay in one file, and the pieces they are made of, in order."""

    targets: tuple[Spec, ...]
    pieces: tuple[Piece, ...]
    file: str | None = None  # a file beside the shards
    about: str = ""  # what else the result depends on


class Plan(NamedTuple):
    """What to write: tensors, and files by their names (text, or a file to copy)."""

    jobs: list[Job]
    files: dict[str, str | Path]
    metadata: dict[str, dict[str, str]] = {}  # of the files beside the shards
    notes: list[str] = []


def same(*tensors: Tensor) -> tuple[Tensor, ...]:
    """For pieces that are copied."""
    return tensors


def copied(source: Checkpoint, spec: Spec, name: str, dtype: torch.dtype | None = None) -> Job:
    """A job that copies a tensor, or casts it to another type, a few rows at a time."""
    target = Spec(spec.name, dtype or spec.dtype, spec.shape)
    width = max(1, spec.nbytes // max(1, spec.shape[0])) if spec.shape else spec.nbytes
    step = max(1, COPY // width)
    make = same if dtype in (None, spec.dtype) else (lambda x: (x.to(dtype),))
    if not spec.shape or not spec.numel:
        return Job((target,), (Piece((Part(source, name),), make),))
    per_row = spec.numel // spec.shape[0]
    starts = range(0, spec.shape[0], step)
    pieces = [Piece((Part(source, name, slice(i, i + step)),), make, i * per_row) for i in starts]
    return Job((target,), tuple(pieces))


class _Shard(NamedTuple):
    file: str
    jobs: list[Job]
    metadata: dict[str, str]

    def header(self) -> tuple[bytes, dict[str, int]]:
        """The file's head and each tensor's place in the file (the safetensors format)."""
        head: dict[str, Any] = {"__metadata__": {"format": "pt", **self.metadata}}
        place, places = 0, {}
        for spec in self.specs():
            head[spec.name] = {
                "dtype": CODES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [place, place + spec.nbytes],
            }
            places[spec.name] = place
            place += spec.nbytes
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        return len(text).to_bytes(8, "little") + text, {name: start + place for name, place in places.items()}

    def specs(self) -> list[Spec]:
        # Wide types first keeps every tensor aligned to its type, as the format asks for.
        specs = [spec for job in self.jobs for spec in job.targets]
        return sorted(specs, key=lambda spec: -spec.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for job in self.jobs for spec in job.targets)


def write(
    plan: Plan, target: str | Path, force: bool = False, workers: int = 2, max_shard_size: int | str = "5GB"
) -> Path:
    """Carries out a plan.

    Args:
        target: the folder to make.
        force: whether a folder of that name is replaced, and what another conversion left of it.
        workers: threads; each has one piece in memory.
        max_shard_size: as in `save_pretrained`. A tensor that is larger has a shard of its own.

    Raises:
        ValueError: `target` exists, or is being written from something else, and `force` is not given; too little
            space; what was written reads back otherwise.
    """
    target = Path(target).resolve()
    check_target(target, *_sources(plan))
    partial = target.with_name(target.name + ".partial")
    if target.exists() and not force:
        raise ValueError(f"{target} exists; nothing is overwritten without `--force`.")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give a folder to make.")
    target.parent.mkdir(parents=True, exist_ok=True)
    shards = _shards(plan, max_shard_size)
    print_of = _fingerprint(plan, shards)
    done = _resume(partial, print_of, force)
    todo = [shard for shard in shards if shard.file not in done]
    for begun in partial.rglob("*.safetensors.begun"):  # of a run that was killed; it takes room that is needed
        begun.unlink()
    _check_space(target.parent, sum(shard.nbytes for shard in todo))
    if not done:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _replace(partial / JOURNAL, json.dumps({"fingerprint": print_of, "shards": {}}))
    try:
        with tqdm(total=sum(shard.nbytes for shard in todo), unit="B", unit_scale=True, desc="writing") as bar:
            for shard in todo:
                done[shard.file] = _write_shard(shard, partial, workers, bar)
                _replace(partial / JOURNAL, json.dumps({"fingerprint": print_of, "shards": done}))
        _verify(shards, partial, done)
        for name, content in plan.files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, partial / name)
            else:
                (partial / name).write_text(content)
        _write_index(shards, partial)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(
                f"the disk is full. {target} was not made; {partial} holds what is done. Make room and run it again "
                "to go on, or remove it."
            ) from error
        raise
    _move(partial, target)
    (target / JOURNAL).unlink()
    return target


def _shards(plan: Plan, max_shard_size: int | str) -> list[_Shard]:
    inside = {job.targets[0].name: job for job in plan.jobs if job.file is None}
    split = split_state_dict_into_shards_factory(
        inside,
        get_storage_size=lambda job: sum(spec.nbytes for spec in job.targets),
        max_shard_size=max_shard_size,
        filename_pattern="model{suffix}.safetensors",
    )
    shards = [_Shard(file, [inside[name] for name in names], {}) for file, names in split.filename_to_tensors.items()]
    for file in sorted({job.file for job in plan.jobs if job.file} | plan.metadata.keys()):
        jobs = [job for job in plan.jobs if job.file == file]
        shards.append(_Shard(file, jobs, plan.metadata.get(file, {})))
    return shards


def _fingerprint(plan: Plan, shards: list[_Shard]) -> str:
    """Of what is written, and of the files it is read from."""
    what = hashlib.sha256()
    for checkpoint in sorted(_sources(plan), key=lambda x: str(x.folder)):
        for file in sorted(set(checkpoint.files.values())):
            state = (checkpoint.folder / file).stat()
            what.update(f"{checkpoint.folder.resolve()}/{file} {state.st_size} {state.st_mtime_ns}\n".encode())
    for shard in shards:
        what.update(f"{shard.file} {sorted(shard.metadata.items())}\n".encode())
        for job in shard.jobs:
            parts = [[(part.name, part.rows, part.at) for part in piece.parts] for piece in job.pieces]
            what.update(f"{job.targets} {job.about} {parts}\n".encode())
    return what.hexdigest()


def _resume(partial: Path, print_of: str, force: bool) -> dict[str, list[int]]:
    """The shards that an earlier run of the same conversion has finished, with their pieces' checksums."""
    try:
        journal = json.loads((partial / JOURNAL).read_text())
        if journal["fingerprint"] == print_of:
            return {file: sums for file, sums in journal["shards"].items() if (partial / file).exists()}
    except FileNotFoundError:
        pass
    begun = partial / f"{JOURNAL}.begun"  # all that a run leaves that was killed before it wrote its journal
    if partial.exists() and not force and {*partial.iterdir()} - {begun}:
        raise ValueError(
            f"{partial} is left of another conversion, or its source has changed since. Remove it, or give `--force`."
        )
    return {}


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{needed:,} bytes are to be written, and {free:,} are free in {folder}. Nothing was written."
        )


def _write_shard(shard: _Shard, partial: Path, workers: int, bar: tqdm) -> list[int]:
    """Writes a file under another name, then renames it. Returns the checksum of every piece's bytes."""
    path = partial / shard.file
    path.parent.mkdir(exist_ok=True)
    begun = path.with_name(path.name + ".begun")
    head, places = shard.header()
    with open(begun, "wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, len(head) + shard.nbytes)  # a full disk shows here
        os.pwrite(file.fileno(), head, 0)

        def put(job: Job, piece: Piece) -> list[int]:
            sums = []
            try:
                several = piece.make(*(part.read() for part in piece.parts))
            except ValueError as error:
                read = ", ".join(f"`{part.name}`" for part in piece.parts)
                raise ValueError(f"{job.targets[0].name}, from {read}: {error}") from None
            for spec, made in zip(job.targets, several, strict=True):
                if made.dtype != spec.dtype:
                    raise AssertionError(f"{spec.name}: made {made.dtype} in place of {spec.dtype}")
                data = memoryview(made.contiguous().view(-1).view(torch.uint8).numpy())
                start = places[spec.name] + piece.offset * spec.dtype.itemsize
                if start + len(data) > places[spec.name] + spec.nbytes:
                    raise AssertionError(f"{spec.name}: made {len(data)} bytes, more than there is room for")
                sums.append(zlib.crc32(data))
                while data:
                    written = os.pwrite(file.fileno(), data, start)
                    data, start = data[written:], start + written
                    bar.update(written)
            return sums

        work = [(job, piece) for job in shard.jobs for piece in job.pieces]
        with ThreadPoolExecutor(max(1, workers)) as pool:
            try:
                # Work is handed out as it is done: what waits holds no memory.
                sums = list(pool.map(put, *zip(*work))) if work else []
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        file.flush()
        os.fsync(file.fileno())
    for checkpoint in {part.checkpoint for _, piece in work for part in piece.parts}:
        checkpoint.close()
    os.replace(begun, path)
    return [one for several in sums for one in several]


def _verify(shards: list[_Shard], partial: Path, done: dict[str, list[int]]) -> None:
    """Reads everything again: names, types, shapes, and the checksum of every piece."""
    with tqdm(total=sum(shard.nbytes for shard in shards), unit="B", unit_scale=True, desc="verifying") as bar:
        for shard in shards:
            head, places = shard.header()
            sums = iter(done[shard.file])
            with open(partial / shard.file, "rb") as file:
                right = file.read(len(head)) == head
                right &= os.fstat(file.fileno()).st_size == len(head) + shard.nbytes
                for job in shard.jobs:
                    for piece, after in zip(job.pieces, [*job.pieces[1:], None]):
                        for spec in job.targets:
                            end = spec.numel if after is None else after.offset
                            size = (end - piece.offset) * spec.dtype.itemsize
                            data = os.pread(
                                file.fileno(), size, places[spec.name] + piece.offset * spec.dtype.itemsize
                            )
                            right &= len(data) == size and zlib.crc32(data) == next(sums)
                            bar.update(size)
            if not right:
                (partial / shard.file).unlink()
                raise ValueError(
                    f"{shard.file} reads back other bytes than were written; it was removed. Run it again to write it "
                    "anew; if that happens twice, doubt the disk."
                )


def _write_index(shards: list[_Shard], partial: Path) -> None:
    inside = [shard for shard in shards if "/" not in shard.file]
    if [shard.file for shard in inside] == [SINGLE]:
        return
    places = {spec.name: shard.file for shard in inside for spec in shard.specs()}
    index = {
        "metadata": {"total_size": sum(shard.nbytes for shard in inside)},
        "weight_map": dict(sorted(places.items())),
    }
    (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".begun")
    temporary.write_text(text)
    os.replace(temporary, path)


def _move(partial: Path, target: Path) -> None:
    """Renames the finished folder; one in its place is removed only when the new one stands there."""
    old = target.with_name(f".{target.name}.replaced")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)


def check_target(target: Path, *sources: Checkpoint) -> None:
    """Raises ValueError if writing `target` would remove what is read."""
    for source in sources:
        if source.folder.resolve().is_relative_to(target):
            raise ValueError(f"{target} is or holds {source.folder}, which is read; choose another target.")


def _sources(plan: Plan) -> set[Checkpoint]:
    return {part.checkpoint for job in plan.jobs for piece in job.pieces for part in piece.parts}
