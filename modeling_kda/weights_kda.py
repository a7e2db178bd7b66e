"""Checkpoint key tables: how released tensors are named and shaped, and which of ours they become."""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import (
    ConversionOps,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

from .configuration_kda_hybrid import (
    LAYER_TYPES,
    MLP_TYPES,
    RELEASED_CONSTANTS,
    RELEASED_LINEAR_NAMES,
    RELEASED_NAMES,
    KdaHybridConfig,
)
from .weights_mxfp4 import BLOCK, check_scales, decode, fits_float16


# Kimi K3 is a model of texts and images; its text model has this prefix, the rest these.
TEXT_PREFIX = "language_model"
VISION_PREFIXES = ("vision_tower.", "mm_projector.")

# What the model keeps in float32, by the ends of names: a rounded decay rate or router score changes what is
# remembered, or which experts run.
FLOAT32 = (
    "A_log",
    "dt_bias",
    "q_conv1d.weight",
    "k_conv1d.weight",
    "v_conv1d.weight",
    "o_norm.weight",
    "mlp.gate.weight",
    "e_score_correction_bias",
)

# A release's matrices of one expert, and which of our stacked tensors hold them, one below the other.
EXPERT_STACKS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}

# Names in flash-linear-attention's `KDAForCausalLM`, and what they are called here.
FLA_RENAMINGS = {
    r"embeddings\.": r"embed_tokens\.",
    r"\.attn_norm\.": r"\.input_layernorm\.",
    r"\.mlp_norm\.": r"\.post_attention_layernorm\.",
    r"\.attn\.f_proj\.0\.": r"\.self_attn\.f_a_proj\.",
    r"\.attn\.f_proj\.1\.": r"\.self_attn\.f_b_proj\.",
    r"\.attn\.g_proj\.0\.": r"\.self_attn\.g_a_proj\.",
    r"\.attn\.g_proj\.1\.": r"\.self_attn\.g_b_proj\.",
    r"\.attn\.": r"\.self_attn\.",
    r"\.attn_res_": r"\.self_attention_res_",
    r"model\.res_": r"model\.output_attn_res_",
}


# The `quantization_config` of such experts. Its patterns name what is not quantised; a tensor is if it is packed.
MXFP4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "strategy": "group",
                "group_size": BLOCK,
                "dynamic": False,
                "observer": "minmax",
                "scale_dtype": "torch.uint8",
            },
        }
    },
    "ignore": [
        r"re:.*self_attn.*",
        r"re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        r"re:.*routed_expert_(down|up)_proj.*",
        r"re:.*_res_proj.*",
        r"re:.*lm_head.*",
    ],
}


def float32_end(name: str) -> str | None:
    """Which of `FLOAT32` a tensor is; None: it has the model's type."""
    return next((end for end in FLOAT32 if name.endswith(f".{end}")), None)


def misfit(missing: Iterable[str], extra: Iterable[str], shapes: Iterable[str]) -> str | None:
    """What to say of a checkpoint whose tensors and the model's parameters differ; None: they do not."""
    lists = {
        "Parameters without a tensor": sorted(missing),
        "Tensors without a parameter": sorted(extra),
        "Tensors of another shape": sorted(shapes),
    }
    if not any(lists.values()):
        return None
    return " ".join(f"{what} ({len(names)}): {listed(names)}." for what, names in lists.items())


def listed(names: list[str], most: int = 20) -> str:
    """The first of many names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"


def is_mxfp4(quantization: Any) -> bool:
    """Whether a `quantization_config` is the one of Kimi K3's experts."""
    return isinstance(quantization, dict) and quantization.get("format") == "mxfp4-pack-quantized"


def head_rates(tensor: Tensor, heads: int) -> Tensor:
    """`A_log` as released, to ours, `[H]`: `[1, 1, H, 1]` in Kimi-Linear; in Kimi K3 with zeros behind it.

    Raises:
        ValueError: fewer numbers than heads, or something else than zeros behind them.
    """
    if tensor.numel() != max(tensor.shape, default=0) or tensor.numel() < heads:
        raise ValueError(f"`A_log` has shape {tuple(tensor.shape)}; one number for each of {heads} heads is expected.")
    flat = tensor[...].flatten()
    if flat[heads:].any():
        raise ValueError(f"`A_log` has {flat.numel()} numbers for {heads} heads, and those behind are not zero.")
    return flat[:heads].clone()


class Misfit(BaseException):
    """A tensor that cannot be converted. transformers turns every Exception of a conversion into a report that leaves
    out what it says, so this is none; `from_pretrained` makes it a ValueError."""


class _Strict(ConversionOps):
    """A conversion whose ValueErrors reach whoever loads the checkpoint."""

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        try:
            return self.converted(input_dict, *args, **kwargs)
        except ValueError as error:
            raise Misfit(f"`{kwargs.get('full_layer_name')}`: {error}") from error


class HeadRates(_Strict):
    """`head_rates` as transformers calls it."""

    def converted(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        (tensor,) = (x[0] if isinstance(x, list) else x for x in input_dict.values())
        return {target_patterns[0]: head_rates(tensor, kwargs["config"].linear_num_heads)}

    @property
    def reverse_op(self) -> ConversionOps:
        return ReleasedHeadRates()


class ReleasedHeadRates(_Strict):
    """The way back."""

    def converted(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        (tensor,) = (x[0] if isinstance(x, list) else x for x in input_dict.values())
        config = kwargs["config"]
        length = head_rates_length(config)
        return {target_patterns[0]: released_head_rates(tensor, family_of(config), length)}

    @property
    def reverse_op(self) -> ConversionOps:
        return HeadRates()


class StackExperts(_Strict):
    """A release's experts, one or two matrices each, to one of our stacks, which is filled expert by expert.

    Matrices in MXFP4 are decoded, or stay as they are if the model's experts are packed.
    """

    def converted(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        dtype, target = model.get_parameter(full_layer_name).dtype, target_patterns[0]
        plain = [input_dict.pop(name) for name in source_patterns if name.endswith(PLAIN) and name in input_dict]
        codes = [input_dict.pop(name) for name in source_patterns if name.endswith(CODES) and name in input_dict]
        scales = [input_dict.pop(name) for name in source_patterns if name.endswith(SCALES) and name in input_dict]
        if plain and codes:
            raise ValueError("some of its experts are in MXFP4 and some are not.")
        if len({len(part) for part in (*plain, *codes, *scales)}) != 1 or len(codes) != len(scales):
            raise ValueError("some of its experts lack a tensor.")
        if plain and dtype == torch.uint8:
            raise ValueError("`packed_experts` is for experts in MXFP4, and these are not; leave it out.")
        if plain:
            return {target: _stacked(plain)}
        if dtype == torch.uint8:
            both = {
                target: _stacked(codes, dtype=torch.uint8),
                f"{target}_scale": _stacked(scales, dtype=torch.uint8),
            }
            check_scales(both[f"{target}_scale"], "weight_scale")
            return both
        return {target: _stacked(codes, scales, dtype)}

    @property
    def reverse_op(self) -> ConversionOps:
        return SplitExperts()


def _stacked(
    parts: list[list[Tensor]], scales: list[list[Tensor]] | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """`[experts, rows of all parts, width]` from the experts' matrices, part by part; each is freed once it is copied.

    With `scales`, the matrices are codes, and they are decoded to `dtype`. (What loads a checkpoint may have cast the
    bytes to the model's type, which holds each of them exactly.)
    """
    for part in (*parts, *(scales or [])):
        if len(shapes := {tuple(x.shape) for x in part}) > 1:
            raise ValueError(f"its experts differ in shape: {sorted(shapes)}.")
    experts, first = len(parts[0]), parts[0][0]
    width = first.shape[1] * (1 if scales is None else 2)
    stack = first.new_empty(experts, sum(part[0].shape[0] for part in parts), width, dtype=dtype or first.dtype)
    for i in reversed(range(experts)):
        row = 0
        for number, part in enumerate(parts):
            matrix = part.pop()
            to = stack[i, row : row + matrix.shape[0]]
            row += matrix.shape[0]
            if scales is None:
                to.copy_(matrix)
            else:
                scale = scales[number].pop().to(torch.uint8)
                check_scales(scale, "weight_scale")
                if dtype == torch.float16 and not fits_float16(scale):
                    raise ValueError("float16 cannot hold all of its experts' numbers; use bfloat16 or float32.")
                decode(matrix.to(torch.uint8), scale, out=to)
    return stack


class SplitExperts(_Strict):
    """The way back, for experts that are not packed."""

    def converted(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        (stack,) = (x[0] if isinstance(x, list) else x for x in input_dict.values())
        names = [name for name in target_patterns if name.endswith(".weight")]
        return {
            name.replace("*", str(i)): part.contiguous()
            for i, expert in enumerate(stack)
            for name, part in zip(names, expert.chunk(len(names)))
        }

    @property
    def reverse_op(self) -> ConversionOps:
        return StackExperts()


# Ends of patterns. The first must not match the beginning of the others.
PLAIN, CODES, SCALES = r".weight(?!_)", ".weight_packed", ".weight_scale"


def conversions() -> list[WeightTransform]:
    """From every layout that `from_pretrained` reads to ours: released Kimi-Linear and Kimi K3, transformers' own
    `kimi_linear`, and flash-linear-attention's `kda`. Tensors with our names pass through.

    Both sides are patterns: their dots are escaped, or `mlp.gate` would match `mlp.gate_proj`.
    """
    moe, mlp = r"\.block_sparse_moe\.", r"\.mlp\."
    # transformers writes the dense layer under the experts' name, the release does not.
    dense = (r"gate_proj\.", r"up_proj\.", r"down_proj\.")
    sparse = (
        r"gate\.",
        r"shared_experts\.",
        r"routed_expert_down_proj\.",
        r"routed_expert_up_proj\.",
        r"routed_expert_norm\.",
    )
    return [
        PrefixChange(prefix_to_remove=TEXT_PREFIX),
        *(WeightRenaming(moe + name, mlp + name) for name in (*sparse, *dense)),
        *(WeightRenaming(*names) for names in FLA_RENAMINGS.items()),
        *(
            WeightConverter(
                source_patterns=[f"{moe}experts.*.{part}{end}" for end in (PLAIN, CODES, SCALES) for part in parts],
                target_patterns=f"{mlp}experts.{stack}",
                operations=[StackExperts()],
            )
            for stack, parts in EXPERT_STACKS.items()
        ),
        WeightConverter(
            source_patterns=r"self_attn\.A_log", target_patterns=r"self_attn\.A_log", operations=[HeadRates()]
        ),
    ]


@cache
def our_name(name: str) -> str:
    """What a tensor of any layout that `conversions` reads is called here. Experts keep a release's names."""
    for conversion in _RENAMINGS:
        name, _ = conversion.rename_source_key(name)
    return name


_RENAMINGS = [x for x in conversions() if isinstance(x, WeightRenaming)]
_EXPERT = re.compile(r"(.+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.(weight|weight_packed|weight_scale)")


def expert_of(name: str) -> tuple[str, int, str, str] | None:
    """`(our stack, expert, matrix, kind)` of an expert's tensor in a release; None for every other tensor.

    For example `("model.layers.1.mlp.experts.down_proj", 7, "w2", "weight_scale")`.
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    prefix, number, matrix, kind = match.groups()
    [stack] = [stack for stack, parts in EXPERT_STACKS.items() if matrix in parts]
    return our_name(f"{prefix}.mlp.experts.{stack}"), int(number), matrix, kind


# The way back.

KIMI_LINEAR, KIMI_K3 = "kimi_linear", "kimi_k3"
_SPARSE_ONLY = re.compile(r"\.mlp\.(gate|shared_experts|routed_expert_\w+|experts)\.")
# Of `FLOAT32`: what is released in the type of the rest. Kimi K3 has the others in float32; of Kimi-Linear's that is
# known of the decays alone, so they stay as they are stored.
_ROUNDED = {
    KIMI_K3: ("mlp.gate.weight",),
    KIMI_LINEAR: ("mlp.gate.weight", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"),
}


def released_name(name: str, family: str) -> str:
    """What one of our tensors is called in a release; a stack of experts: what is before `.{expert}.w1.weight`."""
    name = _SPARSE_ONLY.sub(r".block_sparse_moe.\1.", name)
    name = re.sub(r"\.(gate_up_proj|down_proj)(_scale)?$", "", name) if ".experts." in name else name
    return f"{TEXT_PREFIX}.{name}" if family == KIMI_K3 else name


def released_dtype(name: str, stored: torch.dtype, family: str, rest: torch.dtype | None) -> torch.dtype:
    """The type in which a release holds one of our tensors, stored in `stored`; `rest` is that of most others."""
    if float32_end(name) is None:
        return stored
    if name.endswith(_ROUNDED[family]):
        return rest or stored
    return torch.float32 if family == KIMI_K3 else stored


def released_head_rates(tensor: Tensor, family: str, length: int) -> Tensor:
    """`A_log`, `[H]`, as released: `[1, 1, H, 1]` in Kimi-Linear; in Kimi K3 `[length]`, zeros behind the heads."""
    if family == KIMI_LINEAR:
        return tensor.view(1, 1, -1, 1)
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor))])


def head_rates_length(config: KdaHybridConfig) -> int:
    """How many numbers `A_log` has in Kimi K3 (128 for 96 heads of 128), if nothing says how many a release had."""
    return max(config.linear_num_heads, config.linear_head_dim)


def family_of(config: KdaHybridConfig) -> str:
    """The release that has all of a config's parts."""
    return KIMI_K3 if _beyond_kimi_linear(config) else KIMI_LINEAR


def _beyond_kimi_linear(config: KdaHybridConfig) -> list[str]:
    """Fields of parts that Kimi K3 has and Kimi-Linear does not."""
    plain = dict(
        linear_gate_lower_bound=None,
        linear_output_gate_rank=config.linear_head_dim,
        q_lora_rank=None,
        attention_output_gate=False,
        routed_expert_hidden_size=None,
        attn_res_block_size=None,
    )
    fields = [f"`{name}` = {getattr(config, name)!r}" for name in plain if getattr(config, name) != plain[name]]
    return fields + (["`hidden_act` = 'situ'"] if config.hidden_act == "situ" else [])


def released_config(
    config: KdaHybridConfig, family: str, original: dict[str, Any] | None = None, mxfp4: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The `config.json` of a release, with what its readers look for.

    Args:
        config: what was trained.
        family: `"kimi_linear"` or `"kimi_k3"`.
        original: a release's `config.json` to start from; its other fields, of images among them, are kept.
        mxfp4: the `quantization_config` of experts that are written in MXFP4; None: they are not.

    Raises:
        ValueError: the release has no way to say what the config says.
    """
    beyond = _beyond_kimi_linear(config) if family == KIMI_LINEAR else []
    ranks = (None, config.linear_head_dim)
    for name, allowed in (
        ("linear_value_head_dim", (config.linear_head_dim,)),
        ("linear_output_gate_rank", ranks),
        ("linear_output_gate_bias", (False,)),
        ("lora_norm_eps", (1e-6,)),
        ("router_weights_use_bias", (False, True) if family == KIMI_LINEAR else (False,)),
    ):
        if getattr(config, name) not in allowed:
            beyond.append(f"`{name}` = {getattr(config, name)!r} (there: {allowed[-1]!r})")
    if beyond:
        raise ValueError(f"a released {family} checkpoint cannot be what this model is: {'; '.join(beyond)}.")

    composite = family == KIMI_K3
    original = original or {}
    text = dict(original.get("text_config", {}) if composite else original)
    text |= {name: getattr(config, ours) for name, ours in RELEASED_NAMES.items() if name != "model_max_length"}
    text |= {name: getattr(config, name) for name in _SAME}
    if not original:
        text |= {name: value for name, value in RELEASED_CONSTANTS.items() if name != "attention_bias"}
    text.pop("quantization_config", None)
    text |= {"quantization_config": mxfp4} if mxfp4 else {}
    dense, every = _dense_and_every(config.mlp_layer_types)
    numbers = {kind: [i + 1 for i, x in enumerate(config.layer_types) if x == kind] for kind in LAYER_TYPES}
    linear = {name: getattr(config, ours) for name, ours in RELEASED_LINEAR_NAMES.items()}
    if config.linear_gate_lower_bound is None:
        del linear["gate_lower_bound"]
    linear |= {"kda_layers": numbers[LAYER_TYPES[0]], "full_attn_layers": numbers[LAYER_TYPES[1]]}
    if composite:
        linear["use_full_rank_gate"] = config.linear_output_gate_rank is None
    text |= {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": KIMI_LINEAR,
        "dtype": str(config.dtype or torch.float32).removeprefix("torch."),
        "first_k_dense_replace": dense,
        "moe_layer_freq": every,
        "num_key_value_heads": config.num_attention_heads,
        "use_grouped_topk": True,
        "linear_attn_config": linear,
    }
    if not composite:
        for name in _K3_ONLY:
            text.pop(name, None)
        return text | {
            "head_dim": text.get("head_dim") or config.hidden_size // config.num_attention_heads,
            "model_max_length": config.max_position_embeddings,
            **({"router_weights_use_bias": True} if config.router_weights_use_bias else {}),
            "rope_theta": text.get("rope_theta") or 10000.0,
            "rope_scaling": None,
        }
    text |= {name: getattr(config, name) for name in _K3_FIELDS}
    text["max_position_embeddings"] = config.max_position_embeddings
    top = {
        name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "tie_word_embeddings")
    }
    rest = {name: value for name, value in original.items() if name != "quantization_config"}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        **rest,
        **top,
        "model_type": KIMI_K3,
        "text_config": text,
    }


_SAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "hidden_act", "rms_norm_eps", "initializer_range",
    "tie_word_embeddings", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id",
    "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "intermediate_size", "moe_intermediate_size", "num_experts", "topk_group", "routed_scaling_factor",
)  # fmt: skip
_K3_FIELDS = ("routed_expert_hidden_size", "latent_moe_use_norm", "attn_res_block_size")
_K3_ONLY = ("mla_use_output_gate", "activation_situ_beta", "activation_situ_linear_beta", "topk_method")


def _dense_and_every(kinds: list[str]) -> tuple[int, int]:
    """`first_k_dense_replace` and `moe_layer_freq` that say which layers are sparse."""
    layers = range(len(kinds))
    for every in range(1, len(kinds) + 1):
        for dense in range(len(kinds) + 1):
            if kinds == [MLP_TYPES[i >= dense and i % every == 0] for i in layers]:
                return dense, every
    raise ValueError(
        f"a release says which layers are sparse by `first_k_dense_replace` and `moe_layer_freq`, and no two numbers "
        f"say {kinds}."
    )
