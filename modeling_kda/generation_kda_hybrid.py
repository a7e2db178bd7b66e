"""How `generate` of transformers meets a memory with recurrent states: which cache it makes, what it feeds to one."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from transformers import CompileConfig, GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import BaseStreamer, GenerationMode

from .cache_kda_hybrid import KdaHybridCache
from .cache_memory import RECORD
from .compat_transformers import CACHE_NAME, one_cache
from .generation_graph import StepGraph, problem_of, sample


FEW = 16  # Tokens. For fewer, capturing a graph takes longer than it saves.
MOST_BYTES = 2**30  # of room for tokens that may never come


class KdaGenerationMixin(GenerationMixin):
    """`generate` for a model whose `forward` takes a `KdaHybridCache`."""

    _static_length = 0  # of the largest static cache made so far for a compiled step

    def generate(
        self,
        *args: Any,
        cache: KdaHybridCache | None = None,
        past_key_values: KdaHybridCache | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in transformers. `cache` and `past_key_values` are two names of one argument, in every version.

        Raises:
            ValueError: both names were given, or a prompt with no token that the cache has not seen.
        """
        cache = one_cache(cache, past_key_values)
        if cache is not None:
            kwargs[CACHE_NAME] = cache
        if isinstance(cache, KdaHybridCache):
            ids, mask = (
                args[0] if args else kwargs.get("input_ids", kwargs.get("inputs")),
                kwargs.get("attention_mask"),
            )
            whole = ids is not None and (mask is None or mask.shape[1] == ids.shape[1])
            if whole and 0 < ids.shape[1] <= cache.get_seq_length():
                raise ValueError(
                    f"the prompt has {ids.shape[1]} tokens, and `cache` holds {cache.get_seq_length()}: pass all "
                    "tokens so far and at least one new one, or only new ones with an `attention_mask` for all."
                )
        return super().generate(*args, **kwargs)

    def _assisted_decoding(
        self, input_ids: Tensor, *args: Any, generation_config: GenerationConfig, **model_kwargs: Any
    ) -> Any:
        """As in transformers, which would feed a prompt to a cache that has seen its beginning from the start, and
        leave it recording."""
        cache, mask = model_kwargs.get(CACHE_NAME), model_kwargs.get("attention_mask")
        if not isinstance(cache, KdaHybridCache):
            return super()._assisted_decoding(input_ids, *args, generation_config=generation_config, **model_kwargs)
        past, recording = cache.get_seq_length(), cache.recording
        if past and (past >= input_ids.shape[1] or (mask is not None and mask.shape[1] != input_ids.shape[1])):
            raise ValueError(
                f"with drafts, `generate` needs the whole prompt: `cache` holds {past} tokens, {input_ids.shape[1]} "
                "were given. Pass all tokens so far and at least one new one."
            )
        cache.activate_past_recording(max(recording, RECORD, generation_config.prompt_lookup_num_tokens or 0))
        cache.verifying = past > 0
        try:
            return super()._assisted_decoding(input_ids, *args, generation_config=generation_config, **model_kwargs)
        finally:
            cache.verifying = False
            if not recording:
                cache.deactivate_past_recording()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: Tensor | None = None,  # named, because transformers looks for it
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in transformers; of a prompt that is verified together with drafts, what its cache has not seen."""
        cache, begins = kwargs.get(CACHE_NAME), kwargs.get("is_first_iteration")
        if isinstance(cache, KdaHybridCache):
            if cache.verifying and begins:
                next_sequence_length = input_ids.shape[1] - cache.get_seq_length()
            if cache.unpadded and not begins:
                kwargs["attention_mask"] = None
        return super().prepare_inputs_for_generation(
            input_ids, next_sequence_length, inputs_embeds=inputs_embeds, **kwargs
        )

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Puts a `KdaHybridCache` where `generate` would put its own, and looks for pads, once for all steps."""
        given = model_kwargs.get(CACHE_NAME)
        if given is not None and generation_config.is_assistant:
            return  # its own, from the round before
        if isinstance(given, KdaHybridCache):
            given.check_room(0, max_cache_length)
        if given is None and generation_config.use_cache is not False:
            default = "static" if self._graph_pays(generation_config, generation_mode, batch_size) else "dynamic"
            model_kwargs[CACHE_NAME] = self._new_cache(generation_config, max_cache_length, default)
        else:
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        cache, mask = model_kwargs.get(CACHE_NAME), model_kwargs.get("attention_mask")
        if isinstance(cache, KdaHybridCache):
            cache.unpadded = mask is not None and mask.ndim == 2 and bool(mask.all())

    def _graph_pays(self, generation_config: GenerationConfig, mode: GenerationMode, rows: int) -> bool:
        """Whether a static cache, and so a CUDA graph, is faster, and nobody can tell but by that."""
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            return False
        asked = generation_config.cache_implementation or generation_config.disable_compile
        seen = generation_config.return_dict_in_generate or generation_config.is_assistant
        if self.device.type != "cuda" or asked or seen or self._compiles(generation_config.compile_config):
            return False
        tokens, config = generation_config.max_new_tokens or 0, self.config
        rows *= generation_config.num_return_sequences or 1
        row = (config.kv_lora_rank + config.qk_rope_head_dim) * config.layer_types.count("full_attention")
        if tokens < FEW or rows * tokens * row * self.dtype.itemsize > MOST_BYTES:
            return False
        if problem_of(self) or getattr(self, "hf_quantizer", None) is not None:
            return False
        return all(type(x) is Parameter for x in self.parameters())

    def _new_cache(self, generation_config: GenerationConfig, max_length: int, default: str) -> KdaHybridCache:
        """A cache of the kind that is asked for, or of the `default` kind."""
        kind = generation_config.cache_implementation or default
        if kind in ("dynamic", "offloaded"):
            cache = KdaHybridCache(self.config, offloading=kind == "offloaded")
        elif kind == "static":
            length = max_length + (generation_config.prompt_lookup_num_tokens or 0)  # drafts may go beyond the last
            length = max(length, generation_config.max_cache_len or 0)
            if self._compiles(generation_config.compile_config):
                # As large as any before, so that what was compiled for one still fits.
                length = self._static_length = max(length, self._static_length)
            cache = KdaHybridCache(self.config, length)
        else:
            raise NotImplementedError(
                f"`cache_implementation` {kind!r} is not built for recurrent states. There are 'dynamic' (the "
                "default), 'static' and 'offloaded'."
            )
        if generation_config.is_assistant:
            cache.activate_past_recording()  # its drafts may be taken back
        return cache

    def _compiles(self, compile_config: CompileConfig | None) -> bool:
        """Whether torch is to compile a step, by this or by the model's own `generation_config`."""
        return bool(compile_config or getattr(self.generation_config, "compile_config", None))

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """As in transformers; with a CUDA graph in a loop that the device need not wait for, if tokens are all that is
        wanted."""
        args = (input_ids, logits_processor, stopping_criteria, generation_config)
        other = synced_gpus or generation_config.return_dict_in_generate or generation_config.is_assistant
        plain = not other and input_ids.device == self.device
        if plain and self._valid_auto_compile_criteria(model_kwargs, generation_config):
            step = self.get_compiled_call(generation_config.compile_config)
            if isinstance(step, StepGraph) and not step.problem:
                return sample(self, step, *args, streamer, model_kwargs)
        return super()._sample(*args, synced_gpus, streamer, **model_kwargs)

    def get_compiled_call(self, compile_config: CompileConfig | None) -> Callable:
        """What runs a decoding step on a static cache: a CUDA graph, or with a `compile_config`, or one in the model's
        `generation_config`, what torch compiles."""
        return super().get_compiled_call(compile_config) if self._compiles(compile_config) else StepGraph(self)

    @staticmethod
    def create_masks_for_generate(*, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        """The mask of a step on a static cache: for one token, of one length for all steps."""
        if attention_mask is None or inputs_embeds.shape[1] != 1:
            return attention_mask
        attention_mask = attention_mask != 0  # of any number type
        return F.pad(attention_mask, (0, kwargs[CACHE_NAME].max_cache_len - attention_mask.shape[1]))

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Not possible with transformers' paged cache.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "continuous batching (`generate_batch`) is not possible for models with recurrent states: the paged cache "
            "of transformers holds blocks of keys and values a token, and has no place for a state a request. Use "
            "`generate` on a left-padded batch, or `KdaHybridCache.fork` and `PrefixCache` to share a prompt."
        )

    generate_batch = continuous_batching_context_manager = init_continuous_batching
