"""`KdaHybridCache`: what a KDA hybrid remembers between calls, one entry a layer.

A linear-attention layer keeps a recurrent state and a short window of inputs, whose sizes never change. A
full-attention layer keeps one latent a token, from which keys and values of all heads are computed.

Legend: B batch, H heads, K key width, V value width, D channels, W taps of the convolution, S tokens seen,
R = kv_lora_rank + qk_rope_head_dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .configuration_kda_hybrid import KdaHybridConfig
from .ops_reference import writable


# What a cache and the model that reads it must agree on.
FINGERPRINT = (
    "layer_types",
    "linear_num_heads",
    "linear_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
)


class _LayerMemory:
    """What one layer keeps: some tensors with the batch first, and how many tokens went into them (pads included)."""

    TENSORS: tuple[str, ...] = ()
    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.length = 0
        for name in self.TENSORS:
            setattr(self, name, None)

    @property
    def is_initialized(self) -> bool:
        return self.length > 0

    @property
    def batch_size(self) -> int | None:
        tensor = getattr(self, self.TENSORS[0])
        return None if tensor is None else tensor.shape[0]

    def nbytes(self) -> int:
        """Bytes in use."""
        tensors = [getattr(self, name) for name in self.TENSORS]
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)

    def replace(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor by `change(tensor)`."""
        for name in self.TENSORS:
            if getattr(self, name) is not None:
                setattr(self, name, change(getattr(self, name)))


class RecurrentMemory(_LayerMemory):
    """A linear-attention layer's memory: constant in size.

    `state` `[B, H, V, K]` float32; `window` `[B, W - 1, D]`, the latest inputs of the convolutions of q, k and v.
    """

    TENSORS = ("state", "window")

    def update(self, state: Tensor, window: Tensor, tokens: int) -> None:
        """Takes the state and window after `tokens` more tokens."""
        self.state, self.window, self.length = state, window, self.length + tokens


class LatentMemory(_LayerMemory):
    """A full-attention layer's memory: `latents` `[B, S, R]`, each token's normalised latent and shared key."""

    TENSORS = ("latents",)

    def reset(self) -> None:
        super().reset()
        self.buffer: Tensor | None = None  # [B, capacity, R]; `latents` is its start

    def update(self, new: Tensor) -> Tensor:
        """Appends `new` `[B, T, R]` and returns all latents.

        Without gradients, into a buffer that grows by a quarter when it is full, so that a token costs its own bytes
        and not a copy of the past.
        """
        start, self.length = self.length, self.length + new.shape[1]
        if torch.is_grad_enabled() and (new.requires_grad or (start and self.latents.requires_grad)):
            self.buffer = None
            self.latents = new if not start else torch.cat([self.latents, new], 1)
            return self.latents
        if self.buffer is None or self.buffer.shape[1] < self.length or not writable(self.buffer):
            capacity = self.length if not start else max(self.length + 64, self.length * 5 // 4)
            self.buffer = new.new_empty(new.shape[0], capacity, new.shape[2])
            if start:
                self.buffer[:, :start] = self.latents
        self.buffer[:, start : self.length] = new
        self.latents = self.buffer[:, : self.length]
        return self.latents

    def replace(self, change: Callable[[Tensor], Tensor]) -> None:
        super().replace(change)
        self.buffer = None


class KdaHybridCache(Cache):
    """The memory of a `KdaHybridForCausalLM`, passed to its `forward` or `generate` as `cache` (or `past_key_values`).

    `generate()` makes one by itself. Pads are not remembered by linear-attention layers, wherever they stand.

    Args:
        config: the model's configuration.
    """

    def __init__(self, config: KdaHybridConfig):
        kinds = {"linear_attention": RecurrentMemory, "full_attention": LatentMemory}
        super().__init__(layers=[kinds[kind]() for kind in config.layer_types])
        self.fingerprint = {name: getattr(config, name) for name in FINGERPRINT}

    def check(self, config: KdaHybridConfig, rows: int) -> None:
        """Raises ValueError if this is the memory of another kind of model, or of another number of rows."""
        for name, value in self.fingerprint.items():
            if getattr(config, name) != value:
                raise ValueError(
                    f"`cache` was made for another model: its `{name}` is {value!r}, the model's "
                    f"{getattr(config, name)!r}. Make one with `KdaHybridCache(model.config)`."
                )
        if self.batch_size not in (-1, rows):
            raise ValueError(
                f"`cache` remembers {self.batch_size} rows, the input has {rows}. Rows can be repeated by "
                "`batch_repeat_interleave` and picked by `batch_select_indices`."
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, pads included."""
        return self.layers[layer_idx].length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number of keys that `query_length` new tokens meet, and the position of the first."""
        return self.get_seq_length(layer_idx) + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether any token was seen."""
        return self.get_seq_length() > 0

    @property
    def is_linear(self) -> list[bool]:
        """False: transformers asks which layers do not know how many tokens they have seen."""
        return [False] * len(self.layers)

    @property
    def batch_size(self) -> int:
        """Rows remembered; -1 before the first token."""
        sizes = [layer.batch_size for layer in self.layers if layer.batch_size is not None]
        return sizes[0] if sizes else -1

    def nbytes(self) -> dict[str, int]:
        """Bytes in use by kind: `recurrent` does not grow with the tokens seen, `latent` does."""
        kinds = {"recurrent": RecurrentMemory, "latent": LatentMemory}
        return {name: sum(x.nbytes() for x in self.layers if isinstance(x, kind)) for name, kind in kinds.items()}

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer in self.layers:
            layer.replace(change)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self._replace(lambda x: x.index_select(0, beam_idx.to(x.device)))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._replace(lambda x: x.repeat_interleave(repeats, 0))

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible: a recurrent state holds a sum of all tokens.

        Raises:
            NotImplementedError: always, but for 0 tokens.
        """
        if tokens_to_remove != 0:
            raise NotImplementedError(
                f"crop({tokens_to_remove}): a recurrent state cannot give tokens back. Keep a copy of the cache "
                "(copy.deepcopy) from before them."
            )

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {size:,} bytes" for name, size in self.nbytes().items())
        return f"{type(self).__name__}({self.get_seq_length()} tokens, {sizes})"


__all__ = ["KdaHybridCache"]
