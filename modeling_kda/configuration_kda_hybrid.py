"""`KdaHybridConfig`: the shape of a Kimi Delta Attention hybrid, checked once, when it is built."""

import difflib
from typing import Any

from transformers import PreTrainedConfig


LAYER_TYPES = ("linear_attention", "full_attention")
MLP_TYPES = ("dense", "sparse")

# Names in the released Kimi-Linear and Kimi-K3 `config.json` files, and what they are called here.
RELEASED_NAMES = {
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
    "mla_use_output_gate": "attention_output_gate",
    "activation_situ_beta": "situ_beta",
    "activation_situ_linear_beta": "situ_linear_beta",
}
# The same for the nested `linear_attn_config`.
RELEASED_LINEAR_NAMES = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_gate_lower_bound",
}
# Released fields with one value this architecture can honour.
RELEASED_CONSTANTS = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc",
}
# Released fields that change nothing: RoPE is never applied, and the rest repeats or is not read by the release.
RELEASED_IGNORED = (
    "auto_map",
    "head_dim",
    "qk_head_dim",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "use_grouped_topk",
    "pretraining_tp",
    "output_router_logits",
)
# Released fields that say which layer is of which kind, and MLA's heads.
RELEASED_STRUCTURE = ("linear_attn_config", "first_k_dense_replace", "moe_layer_freq", "num_key_value_heads")
# The same for the `config.json` of flash-linear-attention's `KDAForCausalLM`.
FLA_NAMES = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "conv_size": "linear_conv_kernel_dim",
    "lower_bound": "linear_gate_lower_bound",
    "norm_eps": "rms_norm_eps",
}
# What a KDA layer of fla may be that ours is not: its fields, and the only values that are read.
FLA_CONSTANTS = {
    "attn": (None,),
    "allow_neg_eigval": (False,),
    "use_short_conv": (True,),
    "expand_v": (1, None),
    "num_v_heads": (None,),
    "hidden_act": ("swish", "silu"),
}
# fla's defaults, where they are not ours.
FLA_DEFAULTS = {"num_heads": 16, "head_dim": 128, "conv_size": 4, "norm_eps": 1e-6}
FLA_IGNORED = (
    "attn_mode", "safe_gate", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy",
    "use_l2warp", "hidden_ratio", "attnres_block_size",
)  # fmt: skip


class KdaHybridConfig(PreTrainedConfig):
    r"""Configuration of a hybrid of Kimi Delta Attention (KDA) and position-free multi-head latent attention (MLA).

    Also reads, as they are, the `config.json` of the released Kimi-Linear and Kimi K3 checkpoints (of K3 the text
    model), of transformers' own `kimi_linear`, and of flash-linear-attention's `kda`. Sizes are counts of numbers per
    token unless said otherwise.

    Args:
        vocab_size, hidden_size, num_hidden_layers (`int`): The usual sizes.
        layer_types (`list[str]`, *optional*): `"linear_attention"` (KDA) or `"full_attention"` (MLA) for each layer.
            Default: three linear layers, then one full layer.
        hidden_act (`str`): Activation of the gated MLPs.
        rms_norm_eps (`float`): Added to the mean of squares in every RMSNorm but the two of MLA's low-rank paths.
        initializer_range (`float`): Standard deviation of freshly made matrices.
        max_position_embeddings (`int`): Informative: there are no positions, so nothing limits the length.
        linear_num_heads, linear_head_dim (`int`): KDA heads and the width `K` of their queries and keys.
        linear_value_head_dim (`int`, *optional*): Width `V` of KDA values. Default: `linear_head_dim`.
        linear_conv_kernel_dim (`int`): Taps of the causal short convolution, the current token's included.
        linear_gate_lower_bound (`float`, *optional*): None: log decay `-exp(A_log) * softplus(x + dt_bias)`
            (Kimi-Linear). A bound below zero: `bound * sigmoid(exp(A_log) * (x + dt_bias))` (Kimi K3). Natural log.
        linear_output_gate_rank (`int`, *optional*): Rank of the output gate's projection; None: full rank.
        linear_output_gate_bias (`bool`): Whether the second matrix of a low-rank output gate has a bias, as fla's.
        num_attention_heads (`int`): MLA heads.
        q_lora_rank (`int`, *optional*): Rank of MLA's query projection; None: one full matrix.
        kv_lora_rank (`int`): Width of the latent that is cached in place of keys and values.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim (`int`): Widths of the per-head key, of the key that all heads
            share (never rotated here, cached beside the latent) and of the value.
        attention_output_gate (`bool`): Whether MLA's output is multiplied by a sigmoid gate (Kimi K3).
        lora_norm_eps (`float`): Added to the mean of squares in the RMSNorms of MLA's low-rank paths.
        attention_dropout (`float`): Dropout of MLA's attention weights, in training.
        intermediate_size (`int`): Width of a dense MLP.
        mlp_layer_types (`list[str]`, *optional*): `"dense"` or `"sparse"` for each layer. Default: all dense without
            experts; with experts, the first layer dense and the others sparse.
        moe_intermediate_size, num_experts, num_experts_per_tok, n_shared_experts (`int`): Mixture of experts.
        n_group, topk_group (`int`): Expert groups, and how many of them a token may use.
        norm_topk_prob (`bool`): Whether the chosen experts' weights are divided by their sum.
        routed_scaling_factor (`float`): Multiplies the routed experts' weights.
        router_weights_use_bias (`bool`): Whether the weights come from the scores with the correction bias added, as
            the released Kimi-Linear code computes them (its in-place addition), or without it, as Kimi K3 and the
            serving engines do. The choice of experts uses the bias either way.
        situ_beta, situ_linear_beta (`float`, *optional*): With `hidden_act="situ"` (Kimi K3), the bounds of the gate
            and of what it gates: `beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)`.
            None: 1 for the gate, no bound for the other.
        routed_expert_hidden_size (`int`, *optional*): Width of the latent in which the routed experts work (Kimi K3);
            None: the hidden size, no latent.
        latent_moe_use_norm (`bool`): Whether the experts' sum is normalised before it leaves that latent.
        packed_experts (`bool`): Whether the routed experts stay in memory as they are in a Kimi K3 checkpoint, in
            MXFP4 (4.25 bits a number, not trainable), and are decoded where they are used.
        attn_res_block_size (`int`, *optional*): Decoder layers in a block of attention residuals (Kimi K3; arXiv
            2603.15031 counts attention and MLP apart, so twice as many). None: ordinary residuals.

    Raises:
        ValueError: fields that contradict each other, unknown names close to a field's name, another model's config.
    """

    model_type = "kda_hybrid"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    vocab_size: int = 8192
    hidden_size: int = 512
    num_hidden_layers: int = 8
    layer_types: list[str] | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1048576
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    linear_num_heads: int = 8
    linear_head_dim: int = 64
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int = 4
    linear_gate_lower_bound: float | None = None
    linear_output_gate_rank: int | None = None
    linear_output_gate_bias: bool = False

    num_attention_heads: int = 8
    q_lora_rank: int | None = None
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    attention_output_gate: bool = False
    lora_norm_eps: float = 1e-6
    attention_dropout: float = 0.0

    intermediate_size: int = 1536
    mlp_layer_types: list[str] | None = None
    moe_intermediate_size: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    router_weights_use_bias: bool = False

    situ_beta: float | None = None
    situ_linear_beta: float | None = None
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    packed_experts: bool = False
    attn_res_block_size: int | None = None

    def __post_init__(self, **kwargs):
        model_type = kwargs.pop("model_type", self.model_type)
        if model_type == "kimi_k3":
            model_type, kwargs = self._open_composite(kwargs)
        if model_type == "kimi_linear":
            kwargs = self._read_released(kwargs)
        elif model_type == "kda":
            kwargs = self._read_fla(kwargs)
        elif model_type != self.model_type:
            raise ValueError(
                f"`model_type` is {model_type!r}, but KdaHybridConfig reads 'kda_hybrid', 'kimi_linear', 'kimi_k3' "
                "and 'kda' only. Load other models through `transformers.AutoConfig`."
            )
        fields = self.__dataclass_fields__
        for name in kwargs:
            near = [] if name.startswith("_") else difflib.get_close_matches(name, fields, n=1, cutoff=0.85)
            if near and not hasattr(type(self), name):
                raise ValueError(f"unknown field `{name}`; did you mean `{near[0]}`?")
        self.n_shared_experts = self.n_shared_experts or 0
        if self.linear_value_head_dim is None:
            self.linear_value_head_dim = self.linear_head_dim
        if self.layer_types is None:
            self.layer_types = [LAYER_TYPES[(i + 1) % 4 == 0] for i in range(self.num_hidden_layers)]
        if self.mlp_layer_types is None:
            self.mlp_layer_types = [MLP_TYPES[bool(self.num_experts and i)] for i in range(self.num_hidden_layers)]
        super().__post_init__(**kwargs)
        self.check()

    def _open_composite(self, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Takes the text model out of a Kimi K3 `config.json`; what belongs to its images stays behind."""
        text = given.get("text_config")
        if not isinstance(text, dict):
            raise ValueError("a `config.json` of `model_type` 'kimi_k3' needs a `text_config`; this one has none.")
        # A release writes every default of the library that saved it; those are no fields of a model.
        for name in (*KdaHybridConfig.__annotations__, "dtype"):
            if name in text:
                setattr(self, name, text[name])
        known = (*RELEASED_NAMES, *RELEASED_CONSTANTS, *RELEASED_IGNORED, *RELEASED_STRUCTURE)
        fields = {name: text[name] for name in known if name in text}
        if quantization := text.get("quantization_config") or given.get("quantization_config"):
            fields["quantization_config"] = quantization
        return text.get("model_type", "kimi_linear"), fields

    def _read_released(self, given: dict[str, Any]) -> dict[str, Any]:
        """Takes the fields of a released `config.json` that have other names here; returns what is left of `given`."""
        given = dict(given)
        for name in RELEASED_IGNORED:
            given.pop(name, None)
        for name, value in RELEASED_CONSTANTS.items():
            if given.pop(name, value) != value:
                raise ValueError(f"`{name}` must be {value!r}: no other value is built.")
        for name in RELEASED_NAMES.keys() & given.keys():
            setattr(self, RELEASED_NAMES[name], given.pop(name))
        if (heads := given.pop("num_key_value_heads", None)) not in (None, self.num_attention_heads):
            raise ValueError(
                f"`num_key_value_heads` ({heads}) must equal `num_attention_heads` ({self.num_attention_heads}): "
                "MLA has no grouped heads."
            )
        dense, every = given.pop("first_k_dense_replace", 1), given.pop("moe_layer_freq", 1)
        if self.mlp_layer_types is None:
            self.mlp_layer_types = [
                MLP_TYPES[bool(self.num_experts) and i >= dense and i % every == 0]
                for i in range(self.num_hidden_layers)
            ]
        linear = dict(given.pop("linear_attn_config", None) or {})
        kda, full = linear.pop("kda_layers", None), linear.pop("full_attn_layers", None)
        if kda is not None and self.layer_types is None:
            self.layer_types = _released_layer_types(kda, full or [], self.num_hidden_layers)
        for name in RELEASED_LINEAR_NAMES.keys() & linear.keys():
            setattr(self, RELEASED_LINEAR_NAMES[name], linear.pop(name))
        full_rank = linear.pop("use_full_rank_gate", False)
        # The release has no field for the gate's rank: it is the head's width.
        self.linear_output_gate_rank = None if full_rank else self.linear_head_dim
        if linear:
            raise ValueError(f"`linear_attn_config` has unknown keys {sorted(linear)}; nothing reads them.")
        return given

    def _read_fla(self, given: dict[str, Any]) -> dict[str, Any]:
        """Takes the fields of the `config.json` of a flash-linear-attention `KDAForCausalLM`: KDA layers only."""
        given = {**FLA_DEFAULTS, **given, "hidden_act": self.hidden_act}
        for name, allowed in FLA_CONSTANTS.items():
            heads = (given["num_heads"],) if name == "num_v_heads" else ()
            if (value := given.pop(name, allowed[0])) not in (*allowed, *heads):
                raise ValueError(f"`{name}` is {value!r}; of fla's KDA, {allowed[0]!r} alone can be read.")
        sublayers = given.get("attnres_block_size")
        if sublayers is not None and sublayers % 2:
            raise ValueError(
                f"`attnres_block_size` is {sublayers}; blocks of whole layers, of an even number, are read."
            )
        self.attn_res_block_size = None if sublayers is None else sublayers // 2
        if self.intermediate_size is None:
            width = int(self.hidden_size * (given.get("hidden_ratio") or 4) * 2 / 3)
            self.intermediate_size = -(-width // 256) * 256
        for name, ours in FLA_NAMES.items():
            setattr(self, ours, given.pop(name, None))
        self.hidden_act, self.num_experts = "silu", None
        self.layer_types = [LAYER_TYPES[0]] * self.num_hidden_layers
        self.linear_output_gate_rank, self.linear_output_gate_bias = self.linear_head_dim, True
        return {name: value for name, value in given.items() if name not in FLA_IGNORED}

    def check(self) -> None:
        """Raises if the fields contradict each other. Runs when the config, and a model from it, are built."""
        for name in ("layer_types", "mlp_layer_types"):
            types, allowed = getattr(self, name), LAYER_TYPES if name == "layer_types" else MLP_TYPES
            if len(types) != self.num_hidden_layers:
                raise ValueError(
                    f"`{name}` has {len(types)} entries, but `num_hidden_layers` is {self.num_hidden_layers}."
                )
            for i, kind in enumerate(types):
                if kind not in allowed:
                    near = difflib.get_close_matches(str(kind), allowed, n=1, cutoff=0)
                    raise ValueError(f"`{name}[{i}]` is {kind!r}; allowed: {allowed}. Did you mean {near[0]!r}?")
        positive = [
            "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size",
            "linear_num_heads", "linear_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
            "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim",
        ]  # fmt: skip
        optional = ("q_lora_rank", "linear_output_gate_rank", "routed_expert_hidden_size", "attn_res_block_size")
        positive += [name for name in optional if getattr(self, name) is not None]
        if "sparse" in self.mlp_layer_types:
            positive += ["num_experts", "moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group"]
        for name in positive:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{name}` must be a whole number of at least 1, got {value!r}.")
        for name in ("qk_rope_head_dim", "n_shared_experts"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be at least 0, got {getattr(self, name)!r}.")
        for name in ("rms_norm_eps", "lora_norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be above 0, got {getattr(self, name)!r}.")
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"`attention_dropout` must lie in [0, 1), got {self.attention_dropout!r}.")
        if self.linear_gate_lower_bound is not None and not self.linear_gate_lower_bound < 0:
            raise ValueError(
                f"`linear_gate_lower_bound` bounds a log decay, so it must be below 0 (Kimi K3: -5.0) or None, "
                f"got {self.linear_gate_lower_bound!r}."
            )
        for name in ("situ_beta", "situ_linear_beta"):
            value = getattr(self, name)
            if value is not None and (self.hidden_act != "situ" or value < 0):
                raise ValueError(
                    f"`{name}` ({value!r}) bounds the activation 'situ' and must be positive or None; `hidden_act` is "
                    f"{self.hidden_act!r}."
                )
        if self.linear_output_gate_bias and self.linear_output_gate_rank is None:
            raise ValueError("`linear_output_gate_bias` needs a low-rank gate: set `linear_output_gate_rank`.")
        if self.latent_moe_use_norm and self.routed_expert_hidden_size is None:
            raise ValueError("`latent_moe_use_norm` needs a latent: set `routed_expert_hidden_size`.")
        if "sparse" in self.mlp_layer_types:
            self._check_experts()
        for name in ("pad_token_id", "bos_token_id"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < self.vocab_size:
                raise ValueError(f"`{name}` ({token}) must be None or below `vocab_size` ({self.vocab_size}).")

    def _check_experts(self) -> None:
        if self.num_experts % self.n_group:
            raise ValueError(f"`n_group` ({self.n_group}) must divide `num_experts` ({self.num_experts}).")
        if self.topk_group > self.n_group:
            raise ValueError(f"`topk_group` ({self.topk_group}) must not exceed `n_group` ({self.n_group}).")
        reachable = self.num_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > reachable:
            raise ValueError(
                f"`num_experts_per_tok` ({self.num_experts_per_tok}) exceeds the {reachable} experts of `num_experts` "
                f"({self.num_experts}), `n_group` ({self.n_group}) and `topk_group` ({self.topk_group})."
            )
        if self.topk_group < self.n_group and self.num_experts // self.n_group < 2:
            raise ValueError(
                f"a group is scored by its two best experts, but `num_experts` / `n_group` leaves "
                f"{self.num_experts // self.n_group} in each; use fewer groups."
            )

        odd = [width for width in (self.moe_intermediate_size, self.routed_width) if width % 32]
        if self.packed_experts and odd:
            raise ValueError(f"`packed_experts` needs experts of widths that are multiples of 32, not {odd}.")

    @property
    def routed_width(self) -> int:
        """Width of what the routed experts read and write."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def qk_head_dim(self) -> int:
        """Width of one MLA query or key: the per-head part and the shared part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def _released_layer_types(kda: list[int], full: list[int], num_layers: int) -> list[str]:
    """The release's two lists of layer numbers, counted from 1. A layer in neither is full attention, as released."""
    for name, numbers in (("kda_layers", kda), ("full_attn_layers", full)):
        outside = [i for i in numbers if not 1 <= i <= num_layers]
        if outside:
            raise ValueError(
                f"`{name}` holds {outside}; layers are counted from 1 to `num_hidden_layers` ({num_layers})."
            )
    if both := sorted(set(kda) & set(full)):
        raise ValueError(f"layers {both} are in both `kda_layers` and `full_attn_layers`; each layer has one kind.")
    return [LAYER_TYPES[i + 1 not in kda] for i in range(num_layers)]


__all__ = ["KdaHybridConfig"]
