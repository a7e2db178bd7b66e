"""Kimi Delta Attention hybrids for Hugging Face Transformers. Importing it registers them with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.conversion_mapping import register_checkpoint_conversion_mapping

from .cache_kda_hybrid import KdaHybridCache
from .compat_transformers import CACHE_NAME  # first: it refuses versions of transformers that are not supported
from .configuration_kda_hybrid import KdaHybridConfig
from .modeling_kda_hybrid import (
    KdaHybridForCausalLM,
    KdaHybridForSequenceClassification,
    KdaHybridModel,
    KdaHybridPreTrainedModel,
)
from .ops_kda import KdaCall, backend_report, kda, use_backend
from .weights_kda import kimi_linear_conversions


__version__ = "0.1.0"

# Where LoRA goes if nobody says: what both kinds of attention read and write. Gates, convolutions and decays stay.
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]


def _register() -> None:
    kind = KdaHybridConfig.model_type
    AutoConfig.register(kind, KdaHybridConfig, exist_ok=True)
    AutoModel.register(KdaHybridConfig, KdaHybridModel, exist_ok=True)
    AutoModelForCausalLM.register(KdaHybridConfig, KdaHybridForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(KdaHybridConfig, KdaHybridForSequenceClassification, exist_ok=True)
    register_checkpoint_conversion_mapping(kind, kimi_linear_conversions(), overwrite=True)


_register()

__all__ = [
    "CACHE_NAME",
    "LORA_TARGETS",
    "KdaCall",
    "KdaHybridCache",
    "KdaHybridConfig",
    "KdaHybridForCausalLM",
    "KdaHybridForSequenceClassification",
    "KdaHybridModel",
    "KdaHybridPreTrainedModel",
    "backend_report",
    "kda",
    "use_backend",
]
