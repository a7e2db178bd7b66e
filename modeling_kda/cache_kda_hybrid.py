"""`KdaHybridCache`: what a KDA hybrid remembers between calls, one memory a layer.

A linear-attention layer keeps a recurrent state and a short window of inputs, whose sizes never change. A
full-attention layer keeps one latent a token, from which keys and values of all heads are computed. Both can be rolled
back, branched, and saved.
"""

import copy
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache

from .cache_memory import LatentMemory, RecurrentMemory
from .configuration_kda_hybrid import KdaHybridConfig


# What a cache and the model that reads it must agree on.
FINGERPRINT = (
    "layer_types",
    "hidden_size",
    "vocab_size",
    "linear_num_heads",
    "linear_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "linear_gate_lower_bound",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "attn_res_block_size",
)
FORMAT, VERSION = "kda_hybrid_cache", 1  # of a file


def fingerprint_of(config: KdaHybridConfig) -> dict[str, Any]:
    """The fields of FINGERPRINT, of the layers in use (drafting with an early exit uses fewer than there are)."""
    fingerprint = {name: getattr(config, name) for name in FINGERPRINT}
    return {**fingerprint, "layer_types": list(config.layer_types[: config.num_hidden_layers])}


class KdaHybridCache(Cache):
    """The memory of a `KdaHybridForCausalLM`, passed to its `forward` or `generate` as `cache` (or `past_key_values`).

    `generate()` makes one by itself. Pads are not remembered by linear-attention layers, wherever they stand. A cache,
    its forks and its snapshots share memory, so they belong to one thread. (`copy.deepcopy` shares nothing, and is not
    for caches that carry gradients.)

    Args:
        config: the model's configuration.
        max_cache_len: tokens to make room for. All tensors then stay at their addresses, and a decoding step has the
            same shapes and reads nothing back from the device, whatever was seen: for `torch.compile` and CUDA graphs,
            after a first forward without them. It carries no gradients. None: grows as needed.
        offloading: keep latents in the CPU's memory, from where each layer borrows them. Not with `max_cache_len`.
        state_dtype: of recurrent states between two forwards. `torch.bfloat16` halves what decoding large batches
            reads and writes, and rounds every state after every token; None: float32, or float64 as the model is.
    """

    max_cache_len: int | None = None  # transformers 5.17 has a property of this name that cannot be set

    def __init__(
        self,
        config: KdaHybridConfig,
        max_cache_len: int | None = None,
        offloading: bool = False,
        state_dtype: torch.dtype | None = None,
    ):
        if state_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"`state_dtype` may be torch.bfloat16, torch.float32 or None, not {state_dtype!r}.")
        if max_cache_len is not None and (offloading or max_cache_len < 1):
            raise ValueError(
                f"`max_cache_len` must be at least 1, and goes without `offloading`; got {max_cache_len!r} and "
                f"offloading={offloading}."
            )
        self.fingerprint = fingerprint_of(config)
        kinds = {
            "linear_attention": lambda: RecurrentMemory(max_cache_len is not None, state_dtype),
            "full_attention": lambda: LatentMemory(max_cache_len, offloading),
        }
        super().__init__(layers=[kinds[kind]() for kind in self.fingerprint["layer_types"]])
        self.max_cache_len = max_cache_len
        self.unfinished = False  # whether a forward has moved some layers on, and not all
        self.verifying = False  # whether `generate` goes on from these tokens with drafts
        self.unpadded = False  # whether `generate` has seen that its mask has no pads
        # Tokens seen. With `max_cache_len` a tensor on the device, whose value no compiled code depends on.
        self._length: int | Tensor = 0 if max_cache_len is None else _counter(0, "cpu")

    # A forward

    def check(self, config: KdaHybridConfig, embeds: Tensor) -> None:
        """Raises ValueError if `embeds` `[B, T, D]` of a model of `config` cannot follow in this memory."""
        rows = embeds.shape[0]
        if difference := _difference(self.fingerprint, fingerprint_of(config)):
            raise ValueError(
                f"`cache` was made for another model: {difference}. Make one with `KdaHybridCache(model.config)`."
            )
        if self.batch_size not in (-1, rows):
            if self.get_seq_length():
                raise ValueError(
                    f"`cache` remembers {self.batch_size} rows, the input has {rows}. Rows can be repeated by "
                    "`batch_repeat_interleave` and picked by `batch_select_indices`."
                )
            self.layers = [layer.fresh(self.max_cache_len) for layer in self.layers]  # empty; other addresses
        self._check_whole()
        if self.max_cache_len is not None and self._length.device != embeds.device:
            self._length = _counter(self.get_seq_length(), embeds.device)

    def check_room(self, past: int, tokens: int) -> None:
        """Raises ValueError if `tokens` do not fit behind `past`."""
        if self.max_cache_len is not None and past + tokens > self.max_cache_len:
            raise ValueError(
                f"{tokens} tokens behind {past} do not fit into `max_cache_len` {self.max_cache_len}. Make a larger "
                "cache, or leave `max_cache_len` out."
            )

    def _check_whole(self) -> None:
        if self.unfinished:
            raise ValueError(
                "a forward with this `cache` ended before its last layer, and its layers have seen different tokens. "
                "Call `restore` with a snapshot from before, or `reset`."
            )

    def positions(self, tokens: int) -> Tensor:
        """Where the next `tokens` go, `[tokens]`; only with `max_cache_len`."""
        return self._length + torch.arange(tokens, device=self._length.device)

    def advance(self, tokens: int) -> None:
        """To be called when all layers have taken `tokens` more."""
        self._length += tokens
        self.unfinished = False

    def _set_length(self, tokens: int) -> None:
        if self.max_cache_len is None:
            self._length = tokens
        else:
            self._length.fill_(tokens)

    # What transformers asks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, pads included."""
        return int(self._length)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number of keys that `query_length` new tokens meet, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens that there is room for; -1: there is no limit."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    get_max_cache_shape = get_max_length

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether any token was seen."""
        return self.get_seq_length() > 0

    @property
    def is_linear(self) -> list[bool]:
        """False: transformers asks which layers do not know how many tokens they have seen."""
        return [False] * len(self.layers)

    @property
    def is_initialized(self) -> bool:
        """Whether any token was seen."""
        return self.get_seq_length() > 0

    @property
    def is_compileable(self) -> bool:
        """Whether a decoding step can be compiled once for all."""
        return self.max_cache_len is not None and not self.recording

    @property
    def is_croppable(self) -> bool:
        """True; see `crop`."""
        return True

    @property
    def batch_size(self) -> int:
        """Rows remembered; -1 before the first token."""
        if self.max_cache_len is None and not self._length:
            return -1
        for layer in self.layers:
            tensor = layer.state if isinstance(layer, RecurrentMemory) else layer.rows and layer.rows.data
            if tensor is not None:
                return tensor.shape[0]
        return -1

    # Rows

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        length = self.get_seq_length()
        for layer in self.layers if length else ():
            layer.replace(change, length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self._replace(lambda x: x.index_select(0, beam_idx.to(x.device)))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._replace(lambda x: x.repeat_interleave(repeats, 0))

    # Places

    def move_to(self, device: torch.device | str) -> None:
        """Moves everything, for example out of a GPU's way; each layer takes its part back when it runs.

        (Not called `to`, with which accelerate moves whatever is passed to a layer.)

        Raises:
            ValueError: with `max_cache_len`, which promises fixed addresses.
        """
        if self.max_cache_len is not None:
            raise ValueError("a cache with `max_cache_len` keeps its addresses, so it cannot move. `save` it instead.")
        self._replace(lambda x: x.to(device, copy=True))

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` in all, at the next occasion, so that what follows is not copied as it grows."""
        for layer in self.layers:
            if isinstance(layer, LatentMemory):
                layer.reserved = tokens

    # Roll back

    @property
    def _recurrent(self) -> list[RecurrentMemory]:
        return [layer for layer in self.layers if isinstance(layer, RecurrentMemory)]

    @property
    def recording(self) -> int:
        """How many of the latest tokens are recorded at least, to be taken back by `crop`; 0: none."""
        return max([0, *[layer.limit for layer in self._recurrent if layer.record_past]])

    def activate_past_recording(self, tokens: int | None = None) -> None:
        """From now on, `crop` can take back what comes.

        Costs, for each token and head of a linear-attention layer, two keys and a value in float32, and the inputs of
        the convolutions.

        Args:
            tokens: the number of latest tokens that can be taken back, at least. Default: as before, or 256.

        Raises:
            ValueError: fewer than 1.
        """
        if tokens is not None and tokens < 1:
            raise ValueError(f"`tokens` to record must be at least 1, got {tokens!r}.")
        for layer in self._recurrent:
            layer.record_past = True
            layer.limit = layer.limit if tokens is None else tokens

    def deactivate_past_recording(self) -> None:
        """Records no more, and drops what was recorded."""
        for layer in self._recurrent:
            layer.record_past = False
            layer.forget_past()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Takes the latest tokens back: at most those seen since recording began or since the last `crop`.

        What stays cannot be taken back any more, and no gradient goes back beyond it.

        Args:
            tokens_to_remove: as in transformers, a number of 0 or below.

        Raises:
            ValueError: a number above 0, or more tokens than were recorded. The cache is then unchanged.
        """
        self._check_whole()
        tokens, length = -int(tokens_to_remove), self.get_seq_length()
        if tokens < 0:
            raise ValueError(f"`tokens_to_remove` is 0 or below, as in transformers: -{-tokens}, not {-tokens}.")
        recorded = min((layer.recorded for layer in self._recurrent), default=length)
        if tokens > recorded:
            advice = (
                "`activate_past_recording(tokens=...)` sets how many can be."
                if self.recording
                else "Call `activate_past_recording()` before they come, or keep a `snapshot()`."
            )
            raise ValueError(f"{tokens} tokens cannot be taken back: {recorded} of {length} are recorded. {advice}")
        for layer in self.layers:
            layer.crop(tokens, length)
        self._set_length(length - tokens)

    def reset(self) -> None:
        """Forgets everything; the memory is used again."""
        for layer in self.layers:
            layer.reset()
        self._set_length(0)
        self.unfinished = False

    # Branches

    def fork(self, branches: int) -> list["KdaHybridCache"]:
        """Caches that go on from here, each its own way. What all have seen they share until they write to it."""
        return [self._branch(self.max_cache_len) for _ in range(branches)]

    def _branch(self, max_cache_len: int | None) -> "KdaHybridCache":
        self._check_whole()
        branch, length = copy.copy(self), self.get_seq_length()
        branch.max_cache_len = max_cache_len
        branch.layers = [layer.fresh(max_cache_len) for layer in self.layers]
        branch._length = 0 if max_cache_len is None else _counter(0, self._length.device)
        branch._adopt(self, length)
        return branch

    def snapshot(self) -> "CacheSnapshot":
        """What is remembered now; `restore` brings it back, any number of times."""
        return CacheSnapshot(self)

    def restore(self, snapshot: "CacheSnapshot") -> None:
        """Remembers what was remembered when the snapshot was taken. What this cache recorded is gone.

        Raises:
            ValueError: a snapshot of another architecture, or one with more tokens than `max_cache_len`. The cache is
                then unchanged.
        """
        if not isinstance(snapshot, CacheSnapshot):
            raise ValueError(f"`restore` takes what `snapshot()` returns, not a {type(snapshot).__name__}.")
        other = snapshot._cache
        if difference := _difference(other.fingerprint, self.fingerprint):
            raise ValueError(f"the snapshot is of another model: {difference}.")
        length = other.get_seq_length()
        self.check_room(0, length)
        self._adopt(other, length)

    def _adopt(self, other: "KdaHybridCache", length: int) -> None:
        before = self.get_seq_length()
        for layer, from_layer in zip(self.layers, other.layers):
            layer.adopt(from_layer, length, before)
        self._set_length(length)
        self.unfinished = False

    # Files

    def save(self, path: str | os.PathLike) -> None:
        """Writes a session to one file of safetensors, which takes its place only when it is whole.

        The header says the version of the format, the tokens seen and for what architecture it is; nothing tells two
        models of the same architecture apart. What was recorded for `crop` is not saved.
        """
        self._check_whole()
        path, length = Path(path), self.get_seq_length()
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path.parent}: there is no such folder to write {path.name} to.")
        tensors = {}
        for i, layer in enumerate(self.layers):
            tensors |= {f"layers.{i}.{name}": x.detach().contiguous() for name, x in layer.contents(length).items()}
        about = {"version": VERSION, "tokens": length, "fingerprint": self.fingerprint}
        partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
        try:
            save_file(tensors, partial, {FORMAT: json.dumps(about)})
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        config: KdaHybridConfig,
        device: torch.device | str = "cpu",
        max_cache_len: int | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> "KdaHybridCache":
        """A session from a file of `save`, for the model of `config`.

        Args:
            device: where to; a layer that lies elsewhere takes its part over when it runs.
            max_cache_len, state_dtype: as for a new cache.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a damaged one, one of another version, or for another architecture.
        """
        cache = cls(config, max_cache_len, state_dtype=state_dtype)
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: there is no such file.")
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get(FORMAT, "null"))
                # Copied, because they lie in the file.
                tensors = {name: file.get_tensor(name).to(device, copy=True) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}: not a whole file of `KdaHybridCache.save` ({error}).") from error
        if not isinstance(about, dict) or about.get("version") != VERSION:
            version = f"version {about.get('version')!r}" if isinstance(about, dict) else "no header of a cache"
            raise ValueError(f"{path}: {version}; `KdaHybridCache.load` reads files of version {VERSION}.")
        length, belongs = about.get("tokens"), about.get("fingerprint")
        if type(length) is not int or length < 0 or not isinstance(belongs, dict):
            raise ValueError(f"{path} is damaged: its header holds {about!r}.")
        if difference := _difference(belongs, cache.fingerprint):
            raise ValueError(f"{path} belongs to another model: {difference}.")
        rows = max((x.shape[0] for x in tensors.values() if x.ndim), default=0)
        wanted = _shapes(config, rows, length)
        found = {name: tuple(x.shape) if x.is_floating_point() else None for name, x in tensors.items()}
        wrong = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        if wrong or (length and not rows):
            what = ", ".join(wrong[:4]) or "its tensors"
            raise ValueError(f"{path} is damaged: {what} do not fit {length} tokens of {rows} rows.")
        cache.check_room(0, length)
        for i, layer in enumerate(cache.layers):
            start = f"layers.{i}."
            layer.fill({name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)})
        cache._set_length(length)
        return cache

    # Numbers

    def nbytes(self, layer_idx: int | None = None) -> dict[str, int]:
        """Bytes in use, by kind, of all layers or of one: `recurrent` does not grow with the tokens seen, `latent`
        does, `recorded` is what `crop` needs."""
        total = {"recurrent": 0, "latent": 0, "recorded": 0}
        for layer in self.layers if layer_idx is None else [self.layers[layer_idx]]:
            for kind, size in layer.nbytes(self.get_seq_length()).items():
                total[kind] += size
        return total

    def __repr__(self) -> str:
        sizes = "".join(f", {kind} {size:,} bytes" for kind, size in self.nbytes().items() if size)
        return f"{type(self).__name__}({self.get_seq_length()} tokens{sizes})"


class CacheSnapshot:
    """What a `KdaHybridCache` remembered at one moment. Made by `KdaHybridCache.snapshot`; nothing changes it."""

    def __init__(self, cache: KdaHybridCache):
        self._cache = cache._branch(None)

    @property
    def tokens(self) -> int:
        """Tokens seen."""
        return self._cache.get_seq_length()

    def nbytes(self) -> dict[str, int]:
        """Bytes by kind; those of latents are shared with the cache that the snapshot is of."""
        return self._cache.nbytes()

    def storages(self) -> dict[int, int]:
        """The memory that this keeps alive: the bytes of each storage, by its address."""
        length = self.tokens
        tensors = [x for layer in self._cache.layers for x in layer.contents(length).values()]
        return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}

    def __repr__(self) -> str:
        return repr(self._cache).replace(type(self._cache).__name__, type(self).__name__, 1)


def _difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """The first field in which two fingerprints differ; empty if they do not."""
    name = next((name for name in FINGERPRINT if theirs.get(name) != ours[name]), None)
    return f"its `{name}` is {theirs.get(name)!r}, this model's {ours[name]!r}" if name else ""


def _counter(tokens: int, device: torch.device | str) -> Tensor:
    """A tensor of its own address, which may be counted up in and outside of inference mode."""
    with torch.inference_mode(False):
        counter = torch.tensor(tokens, device=device)
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(counter)
    return counter


def _shapes(config: KdaHybridConfig, rows: int, tokens: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a cache that has seen `tokens`, and their shapes."""
    heads, key, value = config.linear_num_heads, config.linear_head_dim, config.linear_value_head_dim
    state, window = (rows, heads, value, key), (rows, config.linear_conv_kernel_dim - 1, heads * (2 * key + value))
    shapes = {}
    for i, kind in enumerate(fingerprint_of(config)["layer_types"] if tokens else ()):
        if kind == "linear_attention":
            shapes |= {f"layers.{i}.state": state, f"layers.{i}.window": window}
        else:
            shapes[f"layers.{i}.latents"] = (rows, tokens, config.kv_lora_rank + config.qk_rope_head_dim)
    return shapes


__all__ = ["CacheSnapshot", "KdaHybridCache"]
