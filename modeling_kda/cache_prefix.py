"""`PrefixCache`: prompts that begin alike are read once.

A recurrent state cannot be cut back to an earlier token, as keys and values can. So what is kept of a prompt are
snapshots at chosen borders, and a later prompt goes on from the longest of them that it begins with.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

from .cache_kda_hybrid import CacheSnapshot, KdaHybridCache


class PrefixCache:
    """Snapshots of a model's memory at borders of the prompts that it has read.

    Call `clear` when the weights or an adapter change. It belongs to one thread, as caches do. Prompts that go on from
    one prefix copy its latents each; the snapshots of one prompt share them.

    Args:
        model: a `KdaHybridForCausalLM`.
        max_bytes: of memory to hold; what was not used for longest goes first. A tensor that several snapshots share
            counts once.
        every: tokens between two borders. None: only the ends of prompts, and the borders given to `prefill`.

    Attributes:
        lookups, hits: prompts looked up, and how many of them went on from a snapshot.
        tokens_asked, tokens_found: their tokens, and how many of these were not read again.
    """

    def __init__(self, model: torch.nn.Module, max_bytes: int, every: int | None = 256):
        if max_bytes < 0 or (every is not None and every < 1):
            raise ValueError(
                f"`max_bytes` must not be below 0, and `every` at least 1 or None; got {max_bytes!r}, {every!r}."
            )
        self.model, self.max_bytes, self.every = model, max_bytes, every
        self.lookups = self.hits = self.tokens_asked = self.tokens_found = 0
        self._snapshots: OrderedDict[bytes, CacheSnapshot] = OrderedDict()  # by digest of their tokens, oldest first
        self._users: Counter[int] = Counter()  # of each storage: snapshots
        self._bytes = 0

    @property
    def hit_rate(self) -> float:
        """The share of tokens asked for that were not read again."""
        return self.tokens_found / self.tokens_asked if self.tokens_asked else 0.0

    def __len__(self) -> int:
        """Snapshots held."""
        return len(self._snapshots)

    def nbytes(self) -> int:
        """Bytes held."""
        return self._bytes

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, borders: Iterable[int] = ()) -> KdaHybridCache:
        """Reads a prompt, but for its last token, and keeps snapshots at its borders.

        What comes back goes to `model.generate(input_ids, cache=...)`, together with the whole prompt.

        Args:
            input_ids: `[1, T]`, without pads.
            borders: numbers of tokens after which to keep a snapshot, beside every `every`: for example the length of
                a text that other prompts will begin with.

        Raises:
            ValueError: several rows, no token, a border outside of the prompt, or a model in training mode.
        """
        ids = _row(input_ids)
        if not len(ids):
            raise ValueError("the prompt has no tokens.")
        last, borders = len(ids) - 1, set(borders)
        if not all(0 < border <= last for border in borders):
            raise ValueError(
                f"`borders` must lie between the first and the last of {len(ids)} tokens, got {sorted(borders)}."
            )
        if self.model.training:
            raise ValueError("the model is in training mode, where dropout differs from call to call: `model.eval()`.")
        cache = KdaHybridCache(self.model.config)
        tokens, snapshot = self.find(ids[:last])
        self.lookups, self.hits = self.lookups + 1, self.hits + (tokens > 0)
        self.tokens_asked, self.tokens_found = self.tokens_asked + last, self.tokens_found + tokens
        if snapshot is not None:
            cache.restore(snapshot)
        cache.reserve(len(ids))  # so that all snapshots of this prompt share one buffer of latents
        borders |= set(range(self.every, last, self.every)) if self.every else set()
        for start, end in pairwise([tokens, *sorted(x for x in borders | {last} if x > tokens)]):
            self.model(ids[None, start:end].to(self.model.device), cache=cache, logits_to_keep=1)
            self.add(ids[:end], cache)
        return cache

    def find(self, input_ids: Tensor) -> tuple[int, CacheSnapshot | None]:
        """The snapshot of the longest prefix of `input_ids` (`[T]` or `[1, T]`) that one is held of.

        Returns: the prefix's length and the snapshot; 0 and None if there is none.
        """
        ids = _row(input_ids)
        lengths = sorted({snapshot.tokens for snapshot in self._snapshots.values() if snapshot.tokens <= len(ids)})
        for tokens, digest in reversed(_digests(ids, lengths)):
            if digest in self._snapshots:
                self._snapshots.move_to_end(digest)
                return tokens, self._snapshots[digest]
        return 0, None

    def add(self, input_ids: Tensor, cache: KdaHybridCache) -> None:
        """Keeps what `cache` remembers, which has seen `input_ids` (`[T]` or `[1, T]`) and nothing else.

        Raises:
            ValueError: the cache has seen another number of tokens, or several rows.
        """
        ids = _row(input_ids)
        if cache.get_seq_length() != len(ids) or cache.batch_size not in (-1, 1):
            raise ValueError(
                f"`cache` has seen {cache.get_seq_length()} tokens in {cache.batch_size} rows; `input_ids` are "
                f"{len(ids)} tokens in one."
            )
        snapshot = cache.snapshot()
        if not len(ids) or sum(snapshot.storages().values()) > self.max_bytes:
            return
        [(_, digest)] = _digests(ids, [len(ids)])
        self._drop(digest)
        self._snapshots[digest] = snapshot
        for address, size in snapshot.storages().items():
            self._bytes += 0 if self._users[address] else size
            self._users[address] += 1
        while self._bytes > self.max_bytes:
            self._drop(next(iter(self._snapshots)))

    def _drop(self, digest: bytes) -> None:
        snapshot = self._snapshots.pop(digest, None)
        for address, size in snapshot.storages().items() if snapshot else ():
            self._users[address] -= 1
            self._bytes -= 0 if self._users[address] else size

    def clear(self) -> None:
        """Drops all snapshots; the counts of prompts stay."""
        for digest in list(self._snapshots):
            self._drop(digest)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} snapshots, {self.nbytes():,} of {self.max_bytes:,} bytes, "
            f"{self.hits} of {self.lookups} prompts found, {self.hit_rate:.0%} of their tokens)"
        )


def _row(input_ids: Tensor) -> Tensor:
    """`[T]` on the CPU."""
    ids = input_ids[0] if input_ids.ndim == 2 and input_ids.shape[0] == 1 else input_ids
    if ids.ndim != 1 or ids.is_floating_point():
        raise ValueError(
            f"`input_ids` must be one row of token ids without pads, [1, tokens]; got {input_ids.dtype} of shape "
            f"{tuple(input_ids.shape)}."
        )
    return ids.detach().cpu().long()


def _digests(ids: Tensor, lengths: list[int]) -> list[tuple[int, bytes]]:
    """Of the first tokens, for each of the ascending `lengths`: `(length, digest)`."""
    digests, state = [], hashlib.blake2b(digest_size=16)
    for start, end in pairwise([0, *lengths]):
        state.update(ids[start:end].numpy().tobytes())
        digests.append((end, state.copy().digest()))
    return digests


__all__ = ["PrefixCache"]
