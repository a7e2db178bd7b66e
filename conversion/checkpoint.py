"""A folder with a checkpoint: its config, its tensors' names, types and shapes, slices of them by memory maps."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Spec(NamedTuple):
    """A tensor that is or will be in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Checkpoint:
    """A folder with `config.json` and one `model.safetensors`, or shards and their index.

    Args:
        folder: the folder.
        complete: whether a shard or a tensor that the index names and the folder lacks is an error, or listed in
            `missing`.

    Raises:
        ValueError: no checkpoint, files in another format, an index that names a file elsewhere, a file that is cut
            off, a name in two shards, a shard without a tensor that the index says it has or with one that it does not
            say.
    """

    def __init__(self, folder: str | Path, complete: bool = True):
        self.folder, self.missing = Path(folder), []
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is no folder.")
        self.config: dict[str, Any] = self._json("config.json")
        self.specs: dict[str, Spec] = {}
        self.files: dict[str, str] = {}
        self.metadata: dict[str, str] = {}
        self._open: dict[tuple[int, str], Any] = {}
        for file, promised in self._shards().items():
            self._read_header(file, promised, complete)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            value = json.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"{self.folder} has no `{name}`, as a checkpoint's folder has.") from None
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}.") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path} holds a {type(value).__name__}, not fields by their names.")
        return value

    def _shards(self) -> dict[str, set[str] | None]:
        """File -> the names that the index promises in it; None without an index."""
        if (self.folder / SINGLE).exists():  # first, as transformers does
            return {SINGLE: None}
        if not (self.folder / INDEX).exists():
            there = sorted(x.name for x in self.folder.glob("*") if x.suffix in (".safetensors", ".bin", ".pth"))
            raise ValueError(
                f"{self.folder} has neither `{SINGLE}` nor `{INDEX}`; weights are read from safetensors only. "
                f"Weights there: {', '.join(there) or 'none'}."
            )
        places = self._json(INDEX).get("weight_map")
        if not isinstance(places, dict):
            raise ValueError(f"{self.folder / INDEX} has no `weight_map`.")
        if odd := [name for name, file in places.items() if not isinstance(file, str)]:
            raise ValueError(f"{INDEX} puts `{odd[0]}` into {places[odd[0]]!r}, which is no file's name.")
        for file in set(places.values()):
            if not file or Path(file).name != file or file == "..":
                raise ValueError(f"{INDEX} names the file {file!r}; only files of its own folder are read.")
        shards: dict[str, set[str]] = {}
        for name, file in places.items():
            shards.setdefault(file, set()).add(name)
        return shards

    def _read_header(self, file: str, promised: set[str] | None, complete: bool) -> None:
        path = self.folder / file
        if not path.is_file():
            if complete:
                raise ValueError(f"{path} is missing; {INDEX} says it has {len(promised)} tensors.")
            self.missing += sorted(promised)
            return
        try:
            with safe_open(path, framework="pt") as opened:
                self.metadata |= opened.metadata() or {}
                found = {}
                for name in opened.keys():  # noqa: SIM118, not a dict
                    part = opened.get_slice(name)
                    found[name] = Spec(name, DTYPES[part.get_dtype()], tuple(part.get_shape()))
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}.") from None
        except KeyError as error:
            raise ValueError(f"{path} holds a tensor of type {error}, which is not known.") from None
        if twice := sorted(found.keys() & self.files.keys()):
            raise ValueError(f"`{twice[0]}` is in {self.files[twice[0]]} and in {file}; it must be in one file.")
        if promised is not None:
            if extra := sorted(found.keys() - promised):
                raise ValueError(
                    f"{file} has {len(extra)} tensors that {INDEX} does not put there, such as `{extra[0]}`."
                )
            if absent := sorted(promised - found.keys()):
                if complete:
                    raise ValueError(
                        f"{file} lacks {len(absent)} tensors that {INDEX} puts there, such as `{absent[0]}`."
                    )
                self.missing += absent
        self.specs |= found
        self.files |= dict.fromkeys(found, file)

    def read(self, name: str, rows: slice | None = None, at: int | None = None) -> Tensor:
        """A tensor, or its entry `at`, or `rows` of what that leaves. Threads read beside each other."""
        key = threading.get_ident(), self.files[name]
        if key not in self._open:
            self._open[key] = safe_open(self.folder / self.files[name], framework="pt")
        part = self._open[key].get_slice(name)
        if at is not None:
            return part[at, rows] if rows is not None else part[at]
        return part[rows] if rows is not None else part[...]

    def close(self) -> None:
        """Lets go of the memory maps, and of the memory that their pages take."""
        self._open.clear()

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    def other_files(self) -> Iterator[Path]:
        """Files that are neither weights nor the config: the tokenizer's, the generation config, code, a licence."""
        for path in sorted(self.folder.iterdir()):
            weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
            weights |= path.name.endswith(".index.json")
            if path.is_file() and path.name != "config.json" and not weights and not path.name.startswith("."):
                yield path
