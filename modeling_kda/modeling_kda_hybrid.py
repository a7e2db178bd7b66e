"""`KdaHybridModel` and its heads: token embeddings, decoder layers of KDA or MLA with an MLP each, a final norm.

Legend: B batch, T tokens, D hidden size.
"""

import copy
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.utils import logging

from .cache_kda_hybrid import KdaHybridCache
from .compat_transformers import CACHE_NAME, one_cache
from .configuration_kda_hybrid import KdaHybridConfig
from .generation_kda_hybrid import KdaGenerationMixin
from .layers_attnres import MixWeight, mix
from .layers_context import ForwardContext
from .layers_kda import GatedRMSNorm, KimiDeltaAttention
from .layers_mla import MultiHeadLatentAttention
from .layers_mlp import Experts, GatedMLP, RMSNorm, Router, SparseMLP
from .ops_linear import Before
from .weights_kda import FLOAT32, VISION_PREFIXES, Misfit, is_mxfp4, listed, misfit


logger = logging.get_logger(__name__)


class KdaHybridDecoderLayer(GradientCheckpointingLayer):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`. With attention residuals, both read a mixture, not x."""

    def __init__(self, config: KdaHybridConfig, layer_idx: int):
        super().__init__()
        hidden, self.eps = config.hidden_size, config.rms_norm_eps
        self.linear = config.layer_types[layer_idx] == "linear_attention"
        self.self_attn = (KimiDeltaAttention if self.linear else MultiHeadLatentAttention)(config, layer_idx)
        self.sparse = config.mlp_layer_types[layer_idx] == "sparse"
        self.mlp = SparseMLP(config) if self.sparse else GatedMLP(config, config.intermediate_size)
        self.input_layernorm = RMSNorm(hidden, self.eps)
        self.post_attention_layernorm = RMSNorm(hidden, self.eps)
        self.mixes = config.attn_res_block_size is not None
        self.starts_block = self.mixes and layer_idx % config.attn_res_block_size == 0
        if self.mixes:
            self.self_attention_res_norm, self.self_attention_res_proj = MixWeight(hidden), MixWeight(1, hidden)
            self.mlp_res_norm, self.mlp_res_proj = MixWeight(hidden), MixWeight(1, hidden)

    def forward(
        self, hidden_states: Tensor, context: ForwardContext, cache: KdaHybridCache | None = None, *blocks: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`[B, T, D]` to the same, the attention weights (None for KDA) and the router logits (None if dense).

        Args:
            blocks: with attention residuals, the embeddings and the sums of the finished blocks; `hidden_states` is
                then the sum of the present block, or of the last one if this layer starts one.
        """
        context = context.to(hidden_states.device)
        total, weights, logits = hidden_states, None, None
        x = self._mixed(blocks, total, "self_attention")
        if self.starts_block:
            blocks, total = (*blocks, total), None
        norm = Before(self.input_layernorm, RMSNorm)
        if self.linear:
            total = self.self_attn(x, context, cache, norm, total)
        else:
            total, weights = self.self_attn(x, context, cache, norm, total)
        x, norm = self._mixed(blocks, total, "mlp"), Before(self.post_attention_layernorm, RMSNorm)
        if self.sparse:
            total, logits = self.mlp(x, norm, total)
        else:
            total = self.mlp(x, norm, total)
        return total, weights, logits

    def _mixed(self, blocks: tuple[Tensor, ...], total: Tensor, reader: str) -> Tensor:
        if not self.mixes:
            return total
        norm, query = getattr(self, f"{reader}_res_norm"), getattr(self, f"{reader}_res_proj")
        return mix((*blocks, total), norm, query, self.eps)


class KdaHybridPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation."""

    config_class = KdaHybridConfig
    config: KdaHybridConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KdaHybridDecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _is_stateful = False  # for transformers that means: a cache that cannot be cropped
    _can_compile_fullgraph = False
    _keep_in_fp32_modules_strict = list(FLOAT32)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Yes; transformers looks for the experts in this file, where they are not."""
        return True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, KimiDeltaAttention):
            if self.config.linear_gate_lower_bound is None:
                # As released and as fla: a head's rate is uniform in [1, 16].
                initialization.copy_(module.A_log, torch.empty_like(module.A_log).uniform_(1, 16).log_())
            else:
                # As fla for the bounded gate: sigmoid(16 * x) has no gradient at the biases drawn below.
                initialization.zeros_(module.A_log)
            # As fla: softplus(dt_bias) is log-uniform in [0.001, 0.1], so most channels remember for long.
            low, high = math.log(1e-3), math.log(1e-1)
            step = torch.empty_like(module.dt_bias).uniform_(low, high).exp_().clamp_(min=1e-4)
            initialization.copy_(module.dt_bias, step + torch.log(-torch.expm1(-step)))  # inverse of softplus
        elif isinstance(module, Experts):
            initialization.normal_(module.gate_up_proj, mean=0.0, std=std)
            initialization.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, Router):
            initialization.normal_(module.weight, mean=0.0, std=std)
            initialization.zeros_(module.e_score_correction_bias)
        elif isinstance(module, (RMSNorm, GatedRMSNorm)):
            initialization.ones_(module.weight)
        elif isinstance(module, MixWeight):
            # A query of zeros weighs all candidates alike (Attention Residuals, arXiv 2603.15031).
            initialization.constant_(module.weight, 1.0 if module.weight.ndim == 1 else 0.0)

    @classmethod
    def from_pretrained(
        cls, name_or_path: Any, *args: Any, config: Any = None, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """As in transformers, for our checkpoints and, as they are, for released Kimi-Linear and Kimi K3 ones (of K3
        the text model), for transformers' `kimi_linear` and flash-linear-attention's `kda`.

        A field of the config may be given as an argument. `packed_experts=True` keeps experts that the checkpoint has
        in MXFP4 as they are; otherwise they are decoded, exactly (float16 is refused where it cannot hold them).

        Raises:
            ValueError: a parameter that no tensor of the checkpoint fills, a tensor that nothing takes or that has
                another shape, a file that is cut off. A head that the checkpoint does not have (`score`), or that this
                class does not have (`lm_head`), is no error, nor are the tensors of K3's images: they are named.
        """
        mismatch = kwargs.pop("ignore_mismatched_sizes", False)
        if not isinstance(config, PreTrainedConfig):
            config = _read_config(config or name_or_path, kwargs) or config
        packing = getattr(config, "quantization_config", None)
        if is_mxfp4(packing):
            # Hidden from transformers, which would hand the whole model to a quantizer.
            config = copy.deepcopy(config)
            del config.quantization_config
        try:
            model, info = super().from_pretrained(
                name_or_path,
                *args,
                config=config,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **kwargs,
            )
        except Misfit as error:
            raise ValueError(str(error)) from error
        except SafetensorError as error:
            path = _damaged(name_or_path) or name_or_path
            raise ValueError(f"{path}: not a whole safetensors file ({error}).") from error
        if is_mxfp4(packing) and model.config.packed_experts:
            model.config.quantization_config = packing
        missing = (key for key in info["missing_keys"] if not key.startswith("score."))
        extra = (key for key in info["unexpected_keys"] if not key.startswith(("lm_head.", "score.")))
        shapes = [] if mismatch else [f"{key} {tuple(a)} for {tuple(b)}" for key, a, b in info["mismatched_keys"]]
        if problem := misfit(missing, extra, shapes):
            raise ValueError(f"the checkpoint does not fit {cls.__name__}. {problem}")
        return (model, info) if output_loading_info else model

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        """Says once what is left out of a model of texts and images, in place of a report with every name."""
        vision = sorted(key for key in loading_info.unexpected_keys if key.startswith(VISION_PREFIXES))
        if vision:
            logger.warning(f"this is a model of text: left out {len(vision)} tensors of images: {listed(vision, 4)}.")
            loading_info.unexpected_keys.difference_update(vision)
        super()._adjust_missing_and_unexpected_keys(loading_info)

    def save_pretrained(self, *args: Any, save_original_format: bool = False, **kwargs: Any) -> None:
        """As in transformers, under the names of this model's parameters, whatever it was loaded from.

        So `Trainer` finds every tensor again when it resumes. `save_original_format=True` writes the names that the
        weights were loaded from. A whole released checkpoint is what the tools in `conversion/` write.
        """
        if save_original_format and self.config.packed_experts:
            raise NotImplementedError(
                "`save_original_format` is not built for packed experts; save without it, then run "
                "`python -m conversion to-kimi-k3` on the folder."
            )
        super().save_pretrained(*args, save_original_format=save_original_format, **kwargs)


# Arguments of `from_pretrained` with the name of an attribute that every config has.
_NO_FIELDS = ("dtype", "torch_dtype", "quantization_config", "attn_implementation", "experts_implementation")


def _read_config(source: Any, kwargs: dict[str, Any]) -> KdaHybridConfig | None:
    """The config of a checkpoint, with those of `kwargs` that are fields of it taken out. None for a folder that has
    none, such as an adapter's: transformers finds the one of its base model."""
    hub = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")
    try:
        config = KdaHybridConfig.from_pretrained(source, **{name: kwargs[name] for name in hub if name in kwargs})
    except OSError:
        return None
    packed = kwargs.get("packed_experts", config.packed_experts)
    if packed and not config.packed_experts and not is_mxfp4(getattr(config, "quantization_config", None)):
        raise ValueError("`packed_experts` is for checkpoints with experts in MXFP4, and this one has none.")
    if config.packed_experts and not packed:
        raise ValueError(
            "this checkpoint's experts are packed. To have them decoded, load the release that it was made from, or "
            "run `python -m conversion to-kimi-k3`, then `to-kda-hybrid --unpack`."
        )
    for name in [name for name in kwargs if name not in _NO_FIELDS and hasattr(config, name)]:
        setattr(config, name, kwargs.pop(name))
    return config


def _damaged(folder: Any) -> str:
    """The safetensors files of a folder that cannot be opened."""
    damaged = []
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            safe_open(path, framework="pt").keys()
        except SafetensorError:
            damaged.append(str(path))
    return ", ".join(damaged)


class KdaHybridModel(KdaHybridPreTrainedModel):
    """The decoder, without a head."""

    def __init__(self, config: KdaHybridConfig):
        super().__init__(config)
        config.check()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(KdaHybridDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = MixWeight(config.hidden_size)
            self.output_attn_res_proj = MixWeight(1, config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KdaHybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: KdaHybridCache | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_router_logits: bool | None = None,
        return_dict: bool | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast | tuple:
        """
        Args:
            input_ids: `[B, T]`. Or `inputs_embeds`: `[B, T, D]`.
            attention_mask: `[B, past + T]`, 0 at pads, which change nothing wherever they stand.
            position_ids: `[B, T]`. There are no positions; where they start again, a packed document begins.
            cache, past_key_values: two names of the memory of what came before; it moves on in place.
            use_cache: whether to make a cache and return it. Default: the config's, but not in training.
            output_hidden_states: whether to return the embeddings and each layer's output (the last one normalised).
                With attention residuals that output is the present block's sum, and the last one the final mixture.
            output_attentions: whether to return attention weights; None for linear layers and for kernels without any.
            output_router_logits: whether to return router logits `[B * T, experts]` of the sparse layers.
            return_dict: False: a tuple of what is not None.
            seq_idx: `[B, T]`, the number of each token's packed document.
            cu_seq_lens_q: `[documents + 1]`, their borders among all B * T tokens.
            kwargs: for the attention implementation.

        Raises:
            ValueError: neither or both of `input_ids` and `inputs_embeds`; token ids outside the vocabulary (on the
                CPU); a mask, borders or a cache that do not fit.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give `input_ids` or `inputs_embeds`: exactly one of them.")
        cache = self._own_cache(one_cache(cache, past_key_values))
        if inputs_embeds is None:
            _check_ids(input_ids, self.config.vocab_size)
            inputs_embeds = self.embed_tokens(input_ids)
        elif inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"`inputs_embeds` has shape {tuple(inputs_embeds.shape)}; it must be [rows, tokens, `hidden_size` = "
                f"{self.config.hidden_size}]."
            )
        elif not inputs_embeds.is_floating_point():
            raise ValueError(f"`inputs_embeds` is {inputs_embeds.dtype}; it must be of a floating-point type.")
        if cache is not None:
            cache.check(self.config, inputs_embeds)
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if checkpointing and cache is not None and cache.get_seq_length():
            raise ValueError(
                "gradient checkpointing recomputes layers, which no cache can follow, and this `cache` holds tokens. "
                "Leave it out, or call `gradient_checkpointing_disable()`."
            )
        if checkpointing and (cache is not None or use_cache):
            logger.warning_once("gradient checkpointing recomputes layers, which no cache can follow: none is used.")
            cache, use_cache = None, False
        given = getattr(self._gradient_checkpointing_func, "keywords", {}) if checkpointing else {}
        if given.get("use_reentrant") and inputs_embeds.is_cuda:
            logger.warning_once(
                "reentrant checkpointing runs layers without gradients first, by kernels that round otherwise than "
                "those of the second time: tokens may then go to other experts. Better: "
                "`gradient_checkpointing_enable({'use_reentrant': False})`."
            )
        wants = {
            name: given if given is not None else getattr(self.config, name, False)
            for name, given in (
                ("output_hidden_states", output_hidden_states),
                ("output_attentions", output_attentions),
                ("output_router_logits", output_router_logits),
            )
        }
        context = ForwardContext(
            self.config,
            inputs_embeds,
            attention_mask,
            position_ids,
            seq_idx,
            cu_seq_lens_q,
            cache,
            bool(wants["output_attentions"]),
            **kwargs,
        )
        if cache is None and not context.packed and self._wants_cache(use_cache):
            cache = KdaHybridCache(self.config)
        if cache is not None:
            cache.unfinished = True

        hidden_states, blocks, states, attentions, routers = inputs_embeds, (), [], [], []
        for layer in self.layers[: self.config.num_hidden_layers]:  # fewer when drafting with an early exit
            states.append(hidden_states)
            before = hidden_states
            hidden_states, weights, logits = layer(hidden_states, context, cache, *blocks)
            blocks = (*blocks, before) if layer.starts_block else blocks
            attentions.append(weights)
            routers += [] if logits is None else [logits]
        if blocks:
            hidden_states = mix(
                (*blocks, hidden_states), self.output_attn_res_norm, self.output_attn_res_proj, self.norm.eps
            )
        hidden_states = self.norm(hidden_states)
        if cache is not None:
            cache.advance(inputs_embeds.shape[1])
        output = MoeModelOutputWithPast(
            last_hidden_state=hidden_states,
            hidden_states=(*states, hidden_states) if wants["output_hidden_states"] else None,
            attentions=tuple(attentions) if wants["output_attentions"] else None,
            router_logits=tuple(routers) if wants["output_router_logits"] else None,
            **{CACHE_NAME: cache},
        )
        return output if self._wants_dict(return_dict) else output.to_tuple()

    def _apply(self, fn, *args: Any, **kwargs: Any):
        before = self._rounded()
        result = super()._apply(fn, *args, **kwargs)
        if self._rounded() - before:
            logger.warning(
                f"tensors that {self.config.model_type} keeps in float32 were cast ({', '.join(FLOAT32)}): decays and "
                "routing lose precision, and a saved checkpoint keeps the loss. To load in another dtype, use "
                "`from_pretrained(..., dtype=...)`, which leaves them alone."
            )
        return result

    def _rounded(self) -> set[str]:
        """Names of those tensors that are in 16 bits."""
        tensors = [*self.named_parameters(), *self.named_buffers()]
        return {name for name, x in tensors if name.endswith(FLOAT32) and x.element_size() < 4}

    def _own_cache(self, cache: Any) -> KdaHybridCache | None:
        if cache is None or isinstance(cache, KdaHybridCache):
            return cache
        raise ValueError(
            f"`cache` must be a KdaHybridCache, which remembers recurrent states, not a {type(cache).__name__}. Leave "
            "it out, or pass `KdaHybridCache(model.config)`."
        )

    def _wants_cache(self, use_cache: bool | None) -> bool:
        return use_cache if use_cache is not None else self.config.use_cache and not self.training

    def _wants_dict(self, return_dict: bool | None) -> bool:
        return return_dict if return_dict is not None else self.config.return_dict is not False


def _check_ids(ids: Tensor, size: int) -> None:
    """Values on the CPU only, where a look costs nothing; on a GPU the embedding itself stops the program."""
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"`input_ids` must be int64 or int32 of shape [rows, tokens], got {ids.dtype} of shape {tuple(ids.shape)}."
        )
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or not ids.numel():
        return
    low, high = ids.aminmax()
    if low < 0 or high >= size:
        raise ValueError(
            f"`input_ids` holds numbers from {int(low)} to {int(high)}; with `vocab_size` {size} they must lie in "
            f"[0, {size - 1}]. Is the tokenizer the model's own?"
        )


class KdaHybridForCausalLM(KdaGenerationMixin, KdaHybridPreTrainedModel):
    """The decoder with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: KdaHybridConfig):
        super().__init__(config)
        self.model = KdaHybridModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KdaHybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: KdaHybridCache | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast | tuple:
        """As `KdaHybridModel.forward`, with logits and a loss.

        Args:
            labels: `[B, T]`, -100 where there is no target; shifted here.
            logits_to_keep: how many of the last tokens get logits (0: all), or which, as an index.
            kwargs: `num_items_in_batch` and what else the loss takes, and the arguments of `KdaHybridModel.forward`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            past_key_values=past_key_values,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if isinstance(logits_to_keep, int):
            if logits_to_keep < 0:
                raise ValueError(
                    f"`logits_to_keep` must be 0 (all tokens), a number or an index, got {logits_to_keep}."
                )
            hidden_states = hidden_states[:, -logits_to_keep:]  # -0: all
        else:
            hidden_states = hidden_states[:, logits_to_keep]
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
            **{CACHE_NAME: outputs.get(CACHE_NAME)},
        )
        return output if self.model._wants_dict(return_dict) else output.to_tuple()


class KdaHybridForSequenceClassification(GenericForSequenceClassification, KdaHybridPreTrainedModel):
    """The decoder with a classifier on each row's last token."""


def optimizer_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, with weight decay on matrices and expert tensors only.

    `Trainer` decays whatever is not a norm or a bias by name, so also A_log and the convolutions, whose decay changes
    how fast the model forgets. Pass it an optimizer made from these: `Trainer(optimizers=(AdamW(groups), None))`.
    """
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decayed if parameter.ndim > 1 and "conv1d" not in name else free).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


__all__ = [
    "KdaHybridForCausalLM",
    "KdaHybridForSequenceClassification",
    "KdaHybridModel",
    "KdaHybridPreTrainedModel",
    "optimizer_groups",
]
