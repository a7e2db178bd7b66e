"""What one layer remembers: a recurrent state, or one latent a token.

A recurrent state forgets, so it cannot be computed backwards. While it records its past, a memory keeps the state from
before the recorded tokens, its *checkpoint*, and of each token what moved the state on; to take tokens back is to move
the checkpoint on by those that stay.

Tensors are shared rather than copied, between a cache and its snapshots and forks, and copied by whoever writes first.

Legend: B batch, T tokens, H heads, K key width, V value width, D channels, W taps of the convolution, S tokens seen,
R = kv_lora_rank + qk_rope_head_dim.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops_reference import replay, wide, writable


RECORD = 256  # Tokens that can be taken back, unless another number is asked for.


@dataclass(frozen=True)
class Record:
    """What moves a memory on by T tokens. Pads are zeros: they neither decay nor write.

    k: `[B, T, H, K]` as it entered the recurrence. g: `[B, T, H, K]` natural-log decay. writes: `[B, T, H, V]`.
    inputs: `[B, T, D]` of the convolutions. real: `[B, T]`, False at pads; None: no pads.
    """

    k: Tensor
    g: Tensor
    writes: Tensor
    inputs: Tensor
    real: Tensor | None = None

    def __len__(self) -> int:
        return self.k.shape[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Record":
        """Every tensor changed."""
        return Record(*(None if x is None else change(x) for x in vars(self).values()))

    @staticmethod
    def join(records: list["Record"]) -> "Record":
        """One after the other."""
        if len(records) == 1:
            return records[0]
        if any(record.real is not None for record in records):
            ones = (x.k.new_ones(x.k.shape[:2], dtype=torch.bool) if x.real is None else x.real for x in records)
            real = torch.cat(list(ones), 1)
        else:
            real = None
        names = [field.name for field in fields(Record) if field.name != "real"]
        return Record(*(torch.cat([getattr(x, name) for x in records], 1) for name in names), real)

    def after(self, state: Tensor | None, window: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
        """The state and the window (of `width` inputs) after these tokens, from those before (None: zeros)."""
        if window is None:
            window = self.inputs.new_zeros(self.inputs.shape[0], width, self.inputs.shape[2])
        inputs = torch.cat([window, self.inputs], 1)
        if self.real is None:
            window = inputs[:, inputs.shape[1] - width :].clone()
        else:
            real = F.pad(self.real, (width, 0), value=True)
            latest = torch.where(real, torch.arange(real.shape[1], device=real.device), -1).topk(width, 1).values
            latest = latest.sort(1).values.unsqueeze(2).expand(-1, -1, inputs.shape[2])
            window = inputs.gather(1, latest)
        return replay(self.k, self.g, self.writes, state), window


class RecurrentMemory:
    """A linear-attention layer's memory, constant in size.

    `state` `[B, H, V, K]`; `window` `[B, W - 1, D]`, the latest inputs of the convolutions of q, k and v.

    Args:
        static: keep both at the addresses that they get first.
        dtype: of the state between two forwards; None: as it is computed, float32 or float64.
    """

    kind = "recurrent"
    is_sliding = False
    supports_early_init = False

    def __init__(self, static: bool = False, dtype: torch.dtype | None = None):
        self.static, self.dtype, self.record_past, self.limit = static, dtype, False, RECORD
        self.state: Tensor | None = None
        self.window: Tensor | None = None
        self._owned = False  # whether nobody else holds `state`, so that it may be overwritten
        self.forget_past()

    def fresh(self, max_length: int | None) -> "RecurrentMemory":
        """An empty one, static if there is a `max_length`."""
        new = RecurrentMemory(max_length is not None, self.dtype)
        new.record_past, new.limit = self.record_past, self.limit
        return new

    def forget_past(self) -> None:
        """What was recorded can no longer be taken back."""
        self.records: list[Record] = []
        self.checkpoint: tuple[Tensor | None, Tensor | None] = (None, None)

    @property
    def recorded(self) -> int:
        """Tokens that can be taken back."""
        return sum(map(len, self.records))

    def begin(self, device: torch.device) -> bool:
        """To be called before a layer reads: brings the tensors to `device`, sets a checkpoint where one is due.

        Returns: whether `state` may be overwritten.
        """
        if self.state is not None and self.state.device != device:
            self.replace(lambda x: x.to(device), 0)
        if not self.record_past:
            self.forget_past()
        elif not self.records:
            self.checkpoint = (self.state, self.window)
            if self.static and self.state is not None:
                self.checkpoint = (self.state.clone(), self.window.clone())
            else:
                self._owned = False
        return self._owned and not (self.state is not None and self.state.requires_grad)

    def update(self, state: Tensor, window: Tensor, record: Record | None = None) -> None:
        """Takes the state and the window after more tokens, and what replays these, if the past is recorded."""
        self._put(state, window)
        self._owned = True
        if record is None:
            self.forget_past()
            return
        self.records.append(record)
        if self.recorded > 2 * self.limit:
            self._move_checkpoint(self.recorded - self.limit)

    def _put(self, state: Tensor | None, window: Tensor | None) -> None:
        if state is not None:
            state = wide(state) if self.dtype is None else state.to(self.dtype)
        for name, new in (("state", state), ("window", window)):
            old = getattr(self, name)
            if not self.static:
                setattr(self, name, new)
            elif new is None:
                setattr(self, name, None if old is None else _static(torch.zeros_like(old), old))
            elif new is not old:
                setattr(self, name, _static(new.detach(), old))

    @torch.no_grad()
    def _move_checkpoint(self, tokens: int) -> None:
        """On by the first `tokens` that are recorded; these cannot be taken back any more."""
        record = Record.join(self.records)
        self.checkpoint = record.map(lambda x: x[:, :tokens]).after(*self.checkpoint, self.window.shape[1])
        self.records = [record.map(lambda x: x[:, tokens:].clone())] if tokens < len(record) else []

    def crop(self, tokens: int, length: int) -> None:
        """Takes the last `tokens` of `length` back, which are recorded; the others cannot be taken back any more."""
        if tokens:
            keep = self.recorded - tokens
            if keep:
                self._move_checkpoint(keep)
            self._put(*self.checkpoint)
            self._owned = self.static
        self.forget_past()

    def reset(self) -> None:
        """Forgets everything."""
        self._put(None, None)
        self.forget_past()

    def replace(self, change: Callable[[Tensor], Tensor], length: int) -> None:
        """Replaces every tensor by `change(tensor)`, a new one."""
        if self.state is not None:
            self._put(change(self.state), change(self.window))
            self._owned = True
        self.records = [record.map(change) for record in self.records]
        self.checkpoint = tuple(None if x is None else change(x) for x in self.checkpoint)

    def contents(self, length: int) -> dict[str, Tensor]:
        """What is remembered of `length` tokens."""
        return {"state": self.state, "window": self.window} if length else {}

    def fill(self, contents: dict[str, Tensor]) -> None:
        """Takes what another memory has as `contents`, without copying unless this one is static."""
        self._put(contents.get("state"), contents.get("window"))
        self._owned = self.static
        self.forget_past()

    def adopt(self, other: "RecurrentMemory", length: int, before: int) -> None:
        """Becomes what `other` is, with which it may share tensors from now on."""
        self.fill(other.contents(length))
        if other.static and not self.static:
            self.replace(torch.clone, length)
        other._owned = other.static

    def nbytes(self, length: int) -> dict[str, int]:
        """Bytes in use, by kind."""
        past = [x for record in self.records for x in vars(record).values()]
        past += self.checkpoint if past else ()
        return {self.kind: _nbytes(self.contents(length).values()), "recorded": _nbytes(past)}


class _Rows:
    """`[B, capacity, R]`, which several memories may share. `written` rows are in use, the first `pinned` of them by
    others than the one that wrote last."""

    def __init__(self, data: Tensor, written: int):
        self.data, self.written, self.pinned = data, written, 0


class LatentMemory:
    """A full-attention layer's memory: `[B, S, R]`, each token's normalised latent and shared key.

    Args:
        max_length: tokens that there is room for, at fixed addresses; None: it grows.
        offloading: keep the latents in the CPU's memory and lend them to the layer's device.
    """

    kind = "latent"
    is_sliding = False
    supports_early_init = False

    def __init__(self, max_length: int | None = None, offloading: bool = False):
        self.max_length, self.offloading = max_length, offloading
        self.rows: _Rows | None = None
        self.reserved = 0  # tokens to make room for at the next chance

    def fresh(self, max_length: int | None) -> "LatentMemory":
        """An empty one with this `max_length`."""
        return LatentMemory(max_length, self.offloading)

    def update(self, new: Tensor, at: int | Tensor) -> Tensor:
        """Appends `new` `[B, T, R]`, and returns the latents `[B, S, R]` up to it.

        Without gradients, into memory that grows by a quarter when it is full, so that a token costs its own bytes and
        not a copy of the past.

        Args:
            at: tokens seen before. Or, if static, the places `[T]` to write to; all places are returned then.
        """
        if isinstance(at, Tensor):
            return self.places(new).index_copy_(1, at, new.detach())
        self._bring(new.device)
        end = at + new.shape[1]
        if self.max_length is not None:
            new = new.detach()
        elif torch.is_grad_enabled():  # a later step must not write into what a backward reads
            whole = new if not at else torch.cat([self.rows.data[:, :at].to(new), new], 1)
            self.rows = _Rows(whole, end)
            self.rows.pinned = end
            return whole
        self._make_room(new, at)
        self.rows.data[:, at:end] = new
        self.rows.written = end
        return self.rows.data[:, :end].to(new.device, non_blocking=True)

    def places(self, new: Tensor) -> Tensor:
        """If static, all places `[B, S, R]`, to write rows of the shape of `new` to."""
        self._bring(new.device)
        self._make_room(new, 0)
        return self.rows.data

    def _bring(self, device: torch.device) -> None:
        if self.rows is not None and not self.offloading and self.rows.data.device != device:
            self.rows = _Rows(self.rows.data.to(device), self.rows.written)

    def _make_room(self, new: Tensor, at: int) -> None:
        """Moves to other rows, the first `at` with it, if `new` cannot be written behind them in place."""
        end, old = at + new.shape[1], self.rows
        fits = old is not None and old.data.shape[0] == new.shape[0] and old.data.dtype == new.dtype
        fits = fits and writable(old.data) and not old.data.requires_grad
        if self.max_length is not None:
            if not fits:
                data = new.new_zeros(new.shape[0], self.max_length, new.shape[2])
                if old is not None and old.data.shape == data.shape:
                    data.copy_(old.data)
                self.rows = _Rows(_static(data), at)
        elif not fits or old.data.shape[1] < end or old.written != at:  # or another has written behind the first `at`
            capacity = max(self.reserved, end if not at else max(end + 64, end * 5 // 4))
            home = {"device": "cpu", "pin_memory": new.device.type == "cuda"} if self.offloading else {}
            data = new.new_empty(new.shape[0], capacity, new.shape[2], **home)
            if at:
                data[:, :at] = old.data[:, :at]
            self.rows, self.reserved = _Rows(data, at), 0

    def crop(self, tokens: int, length: int) -> None:
        """Takes the last `tokens` of `length` back."""
        if self.max_length is not None and self.rows is not None:
            self.rows.data[:, length - tokens : length] = 0  # attention multiplies all rows, some of them with 0
        elif self.rows is not None and self.rows.written == length:  # else another has written behind ours
            self.rows.written = max(length - tokens, self.rows.pinned)

    def reset(self) -> None:
        """Forgets everything, and keeps the memory for what comes next if nobody else reads it."""
        if self.rows is not None and (self.rows.pinned or not writable(self.rows.data)):
            self.rows = None
        elif self.rows is not None:
            self.rows.written = 0
            if self.max_length is not None:
                self.rows.data.zero_()

    def replace(self, change: Callable[[Tensor], Tensor], length: int) -> None:
        """Replaces the latents of `length` tokens by `change(latents)`, a new tensor."""
        if self.rows is None:
            return
        if self.max_length is not None:
            self.rows = _Rows(_static(change(self.rows.data), self.rows.data), length)
        else:
            self.rows = _Rows(change(self.rows.data[:, :length]), length)

    def contents(self, length: int) -> dict[str, Tensor]:
        """What is remembered of `length` tokens."""
        return {"latents": self.rows.data[:, :length]} if length else {}

    def fill(self, contents: dict[str, Tensor]) -> None:
        """Takes what another memory has as `contents`, without copying unless this one is static."""
        if not contents:
            self.reset()
            return
        latents = contents["latents"]
        if self.max_length is None:
            self.rows = _Rows(latents, latents.shape[1])
        else:
            self._make_room(latents, 0)
            self.rows.data[:, : latents.shape[1]] = latents
            self.rows.data[:, latents.shape[1] :] = 0

    def adopt(self, other: "LatentMemory", length: int, before: int) -> None:
        """Becomes what `other` is of its first `length` tokens, with which it may share rows from now on.

        Args:
            before: tokens that this memory holds.
        """
        if not length or self.max_length is not None:
            self.fill(other.contents(length))
        elif other.max_length is not None:
            self.fill({"latents": other.contents(length)["latents"].clone()})
        else:
            if self.rows is other.rows:
                self.crop(before - length, before)
            self.rows = other.rows
            self.rows.pinned = max(self.rows.pinned, length)

    def nbytes(self, length: int) -> dict[str, int]:
        """Bytes in use, by kind."""
        return {self.kind: _nbytes(self.contents(length).values())}


def _static(new: Tensor, old: Tensor | None = None) -> Tensor:
    """`new` at the address of `old`, if it fits there, or at one that stays."""
    if old is not None and writable(old) and (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device):
        return old.copy_(new)
    new = new.clone()
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(new)
    return new


def _nbytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)
