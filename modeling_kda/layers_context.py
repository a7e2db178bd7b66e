"""What all layers of one forward share: which tokens are real, where documents begin, what attention may see.

Padding and packing are one thing to a linear-attention layer: the real tokens are laid out one after another, and a
*document* is a stretch of them with a state of its own. It is a row of the batch without its pads, or one of several
texts that were packed into a row.

Legend: B batch, T tokens, D channels, N documents, P real tokens, S past and new tokens.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import create_causal_mask

from .cache_kda_hybrid import KdaHybridCache
from .configuration_kda_hybrid import KdaHybridConfig
from .ops_mixer import Packing


ABSORB_UP_TO = 32  # Tokens. Absorbed attention makes all [heads * tokens, S] scores at once: not for long inputs.


class ForwardContext:
    """Built once per forward; no layer derives any of it again.

    Args:
        config: the model's.
        embeds: `[B, T, D]`.
        attention_mask: `[B, past + T]`, 0 at pads, of any number type; or `[B, 1, T, past + T]` with the same meaning.
        position_ids: `[1 or B, T]`. A document begins where they do not go up by one; else they mean nothing here.
        seq_idx: `[1 or B, T]`, the number of each token's document. Goes before `position_ids`.
        cu_seqlens: `[N + 1]`, document borders among the B * T tokens. Goes before both.
        cache: what came before.
        output_attentions: whether attention weights are wanted.

    Attributes:
        packed: whether a row holds several documents; there is then no state of a row to remember.
        packing: documents among the real tokens. None: every row is one document.
        attention_mask: as the attention implementation in use wants it.
        absorbed: whether full attention works on the latents themselves: a few tokens after a past.
        at: where a cache's latents of these tokens go, as `LatentMemory.update` takes it.
        real: `[B, T]`, False at pads; None: no pads. Without `packing`, pads are still among the tokens.
        records: whether what these tokens do to a recurrent state is recorded, so that it can be taken back.
        parts: contexts of a first and a second stretch of these tokens, of which only the second is recorded; or none.
        pads: with `absorbed`, `[B, S]`, False at pads; None: no pads.
        attention_kwargs: for the attention implementation.

    Raises:
        ValueError: a mask or borders of the wrong shape, or that contradict each other; documents and a cache.
    """

    def __init__(
        self,
        config: KdaHybridConfig,
        embeds: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KdaHybridCache | None = None,
        output_attentions: bool = False,
        **attention_kwargs: Any,
    ):
        self.shape = B, T = embeds.shape[:2]
        self.taps = config.linear_conv_kernel_dim
        self.output_attentions, self.attention_kwargs = output_attentions, attention_kwargs
        self._device, self._elsewhere = embeds.device, {}
        self.records, self.parts = cache is not None and cache.recording > 0, ()
        self.packing = self._real = self.attention_mask = self.pads = self._allowed = None
        few = T <= ABSORB_UP_TO
        documents = T > 1 and not (cu_seqlens is None and seq_idx is None and position_ids is None)
        static = cache is not None and cache.max_cache_len is not None
        if static and few and not documents and _fixable(attention_mask, T):
            self._fix(cache, attention_mask, embeds.device)
            return
        self.at = past = 0 if cache is None else cache.get_seq_length()
        if cache is not None:
            cache.check_room(past, T)
        mask = _two_dimensional(attention_mask, B, T, past)
        self.real = real = None if mask is None or mask[:, past:].all() else mask[:, past:]
        begins = _document_begins(cu_seqlens, seq_idx, position_ids, real, B, T)
        self.packed = begins is not None
        if self.packed and cache is not None:
            raise ValueError(
                "several documents in one row were given together with a cache, which remembers rows. Pass the "
                "documents as rows, or `use_cache=False` and no cache."
            )
        self._lay_out(begins, real)
        if self.records and 2 * cache.recording < T:  # fewer are not worth a second call
            border = T - cache.recording
            self.parts = (self._part(0, border, False), self._part(border, T, True))

        self.absorbed = past > 0 and few
        if self.absorbed:
            self.pads = mask
        elif "full_attention" not in config.layer_types:
            return
        elif self.packed:
            self._pack_attention(config, embeds, begins, real)
        else:
            self.attention_mask = create_causal_mask(config, embeds, mask, cache if past else None)

    def _fix(self, cache: KdaHybridCache, mask: Tensor | None, device: torch.device) -> None:
        """A few tokens on a cache of fixed addresses: fixed shapes, and no look at any value on the device.

        The mask, for one token, may be as long as the cache has room.
        """
        (B, T), room = self.shape, cache.max_cache_len
        self._room = room
        self.packed, self.absorbed, self.real = False, True, None
        self.at = cache.positions(T)
        visible = device.type == "cpu" and not torch.compiler.is_compiling()  # a look at the length costs nothing
        past = cache.get_seq_length() if visible else 0
        cache.check_room(past, T)
        if mask is None:
            return
        if visible and tuple(mask.shape) not in ((B, past + T), (B, room)):
            raise ValueError(
                f"`attention_mask` has shape {tuple(mask.shape)}; {B} rows of {past} cached and {T} new tokens need "
                f"{(B, past + T)}, or {(B, room)} as the cache has room."
            )
        self.pads = F.pad(mask != 0, (0, room - mask.shape[1]))
        self.real = self.pads.index_select(1, self.at)

    def _part(self, start: int, end: int, records: bool) -> "ForwardContext":
        """For linear-attention layers, the context of some of these tokens."""
        part = copy.copy(self)
        part.shape, part.records, part.parts, part._elsewhere = (self.shape[0], end - start), records, (), {}
        real = None if self.real is None else self.real[:, start:end]
        part.real = None if real is None or real.all() else real
        part._lay_out(None, part.real)
        return part

    def _pack_attention(self, config: KdaHybridConfig, embeds: Tensor, begins: Tensor, real: Tensor | None) -> None:
        """Lets tokens see no other document, and no pad."""
        flash = "flash" in config._attn_implementation
        if real is None:
            index = torch.arange(begins.shape[1], device=begins.device).expand_as(begins)
            positions = index - torch.where(begins, index, 0).cummax(1).values  # they start again with each document
            self.attention_kwargs["position_ids"] = positions  # flash reads the borders from them
            self.attention_mask = create_causal_mask(config, embeds, None, None, positions)
            assert flash or self.attention_mask is not None, "the attention mask lost the documents' borders"
        elif flash:
            raise ValueError(
                f"`attn_implementation` {config._attn_implementation!r} cannot honour pads among packed documents. "
                "Leave the pads out, or load the model with `attn_implementation='sdpa'`."
            )
        else:
            number = begins.cumsum(1).masked_fill(~real, -1)

            def same_document(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return number[row, query] == number[row, key]

            self.attention_mask = create_causal_mask(config, embeds, None, None, and_mask_function=same_document)

    def _lay_out(self, begins: Tensor | None, real: Tensor | None) -> None:
        """Where the real tokens are, and the documents among them."""
        self.packing = self._real = None
        if begins is None and real is None:
            return
        B, T = self.shape
        if real is not None:
            self._real = real.flatten().nonzero().squeeze(1)  # [P]
        tokens = B * T if real is None else len(self._real)
        if begins is None:
            cu_seqlens = F.pad(real.sum(1).cumsum(0), (1, 0))
        else:
            starts = (begins if real is None else begins[real]).flatten().nonzero().squeeze(1)
            cu_seqlens = F.pad(starts, (0, 1), value=tokens)
        self.packing = Packing(cu_seqlens, tokens, self.taps)

    def to(self, device: torch.device) -> "ForwardContext":
        """The same on another device; layers of one model may lie on several."""
        if device == self._device:
            return self
        if device not in self._elsewhere:
            moved = copy.copy(self)
            moved._device = device
            for name, value in vars(self).items():
                if isinstance(value, (Tensor, BlockMask, Packing)):
                    setattr(moved, name, value.to(device))
            moved.attention_kwargs = {
                name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.attention_kwargs.items()
            }
            moved.parts = tuple(part.to(device) for part in self.parts)
            self._elsewhere[device] = moved
        return self._elsewhere[device]

    @property
    def allowed(self) -> Tensor | None:
        """With `absorbed`, `[B or 1, T, S]`, True where a token may look; None: everywhere. Made when it is needed."""
        T = self.shape[1]
        fixed = isinstance(self.at, Tensor)
        if self._allowed is None and self.absorbed and (fixed or T > 1 or self.pads is not None):
            if fixed:
                causal = self.at.unsqueeze(1) >= torch.arange(self._room, device=self._device)  # [T, S]
            else:
                causal = _causal(T, self.at, self._device)
            self._allowed = causal.unsqueeze(0) if self.pads is None else causal & self.pads.unsqueeze(1)
        return self._allowed

    @property
    def plain(self) -> bool:
        """Whether there is nothing to pack or unpack."""
        return self.packing is None and self.real is None

    def pack(self, x: Tensor) -> Tensor:
        """`[B, T, D]` to its real tokens `[1, P, D]`; `x` as it is if every row is a document without pads."""
        if self.packing is None:
            return x
        x = x.flatten(0, 1)
        return (x if self._real is None else x.index_select(0, self._real)).unsqueeze(0)

    def unpack(self, x: Tensor) -> Tensor:
        """The way back, with zeros at pads; `x` may have more dimensions."""
        if self.packing is None:
            return x if self.real is None else torch.where(self.real.view(*self.shape, *[1] * (x.ndim - 2)), x, 0)
        x = x.squeeze(0)
        if self._real is not None:
            x = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:]).index_copy(0, self._real, x)
        return x.unflatten(0, self.shape)


def _fixable(mask: Tensor | None, T: int) -> bool:
    """Whether a step on a static cache can take this mask without a look at its values."""
    return mask is None or (T == 1 and isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_floating_point())


def _two_dimensional(mask: Tensor | None, B: int, T: int, past: int) -> Tensor | None:
    """The padding mask `[B, past + T]` as bool; None if there are no pads."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        raise ValueError(
            f"`attention_mask` must be a tensor of 2 or 4 dimensions, got "
            f"{f'{mask.ndim} dimensions' if isinstance(mask, Tensor) else type(mask).__name__}."
        )
    wanted = (B, past + T) if mask.ndim == 2 else (B, 1, T, past + T)
    if tuple(mask.shape) != wanted:
        seen = f"{past} cached and {T} new tokens" if past else f"{T} tokens"
        raise ValueError(f"`attention_mask` has shape {tuple(mask.shape)}; {B} rows of {seen} need {wanted}.")
    if mask.ndim == 4:
        allowed = (mask >= 0 if mask.is_floating_point() else mask.bool())[:, 0]  # of floats: 0 or very negative
        mask = allowed[:, -1]
        if not torch.equal(allowed, _causal(T, past, mask.device) & mask.unsqueeze(1)):
            raise ValueError(
                "this 4-dimensional `attention_mask` is more than causality and padding, which is all that "
                "linear-attention layers can honour. For packed documents pass `cu_seq_lens_q` or `position_ids`."
            )
    if mask.is_floating_point() and not ((mask == 0) | (mask == 1)).all():
        raise ValueError("a 2-dimensional `attention_mask` holds 1 for real tokens and 0 for pads, nothing else.")
    mask = mask.bool()
    return None if mask.all() else mask


def _causal(T: int, past: int, device: torch.device) -> Tensor:
    """`[T, past + T]`, True where a new token may look."""
    return torch.ones(T, past + T, dtype=torch.bool, device=device).tril(past)


def _document_begins(
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    position_ids: Tensor | None,
    real: Tensor | None,
    B: int,
    T: int,
) -> Tensor | None:
    """`[B, T]`, True at each document's first real token; None if no row holds more than one document."""
    if cu_seqlens is not None:
        borders = cu_seqlens.tolist()
        if not borders or borders[0] != 0 or borders[-1] != B * T or borders != sorted(borders):
            raise ValueError(f"`cu_seq_lens_q` must go up from 0 to {B * T} (rows x tokens), got {borders}.")
        if real is not None:
            raise ValueError(
                "`cu_seq_lens_q` and an `attention_mask` with pads contradict each other: the borders count every "
                "token. Leave the mask out, or leave the pads out of the batch."
            )
        inner = torch.zeros(B * T + 1, dtype=torch.bool, device=cu_seqlens.device)
        inner[cu_seqlens.long()] = True
        inner = inner[:-1].view(B, T)
    else:
        numbers, step = (seq_idx, 0) if seq_idx is not None else (position_ids, 1)
        if numbers is None or T < 2:
            return None
        if numbers.ndim != 2 or numbers.shape[1] != T or numbers.shape[0] not in (1, B):
            name = "seq_idx" if seq_idx is not None else "position_ids"
            raise ValueError(f"`{name}` has shape {tuple(numbers.shape)}; {B} rows of {T} tokens need {(B, T)}.")
        numbers = numbers.expand(B, T)
        if real is None:
            inner = F.pad(numbers.diff(dim=1) != step, (1, 0))
        else:  # Compare with the real token before; positions need not go on by one across pads, but they go on.
            index = torch.arange(T, device=real.device)
            before = F.pad(torch.where(real, index, -1).cummax(1).values[:, :-1], (1, 0), value=-1)
            change = numbers - numbers.gather(1, before.clamp(min=0))
            goes_on = (change == step) | ((before < index - 1) & (step > 0) & (change > 0))
            inner = real & (before >= 0) & ~goes_on
    if not inner[:, 1:].any():
        return None
    first = torch.zeros_like(inner)
    if T:
        first.scatter_(
            1, (torch.zeros_like(inner[:, :1]).long() if real is None else real.long().argmax(1, True)), True
        )
    return inner | (first if real is None else first & real)
