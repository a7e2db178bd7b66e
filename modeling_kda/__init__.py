"""Kimi Delta Attention hybrids for Hugging Face Transformers. Importing it registers them with the Auto classes."""

import importlib.util
from pathlib import Path

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.conversion_mapping import register_checkpoint_conversion_mapping

from . import compat_transformers  # noqa: F401, first: it refuses versions of transformers that are not supported
from .cache_kda_hybrid import CacheSnapshot, KdaHybridCache
from .cache_prefix import PrefixCache
from .configuration_kda_hybrid import KdaHybridConfig
from .modeling_kda_hybrid import (
    KdaHybridForCausalLM,
    KdaHybridForSequenceClassification,
    KdaHybridModel,
    KdaHybridPreTrainedModel,
    optimizer_groups,
)
from .ops_kda import KdaCall, backend_report, kda, use_backend
from .weights_kda import conversions


__version__ = "0.1.0"

# The folder of a small trained model that comes with the package.
EMBEDDED_MODEL = str(Path(__file__).parent / "embedded")

# Where LoRA goes if nobody says: what both kinds of attention read and write. Gates, convolutions and decays stay.
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]


def _register_auto_classes() -> None:
    kind = KdaHybridConfig.model_type
    AutoConfig.register(kind, KdaHybridConfig, exist_ok=True)
    AutoModel.register(KdaHybridConfig, KdaHybridModel, exist_ok=True)
    AutoModelForCausalLM.register(KdaHybridConfig, KdaHybridForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(KdaHybridConfig, KdaHybridForSequenceClassification, exist_ok=True)
    # For the classes too: a config made from ours may have a `model_type` of its own.
    classes = (KdaHybridModel, KdaHybridForCausalLM, KdaHybridForSequenceClassification)
    for name in (kind, *(model.__name__ for model in classes)):
        register_checkpoint_conversion_mapping(name, conversions(), overwrite=True)


def _register_lora_targets() -> None:
    """So that `LoraConfig()` alone works. A PEFT that cannot be imported is the business of whoever uses it."""
    if importlib.util.find_spec("peft") is None:
        return
    try:
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as targets
    except (ImportError, OSError, RuntimeError):
        return
    targets[KdaHybridConfig.model_type] = LORA_TARGETS


_register_auto_classes()
_register_lora_targets()

__all__ = [
    "EMBEDDED_MODEL",
    "LORA_TARGETS",
    "CacheSnapshot",
    "KdaCall",
    "KdaHybridCache",
    "KdaHybridConfig",
    "KdaHybridForCausalLM",
    "KdaHybridForSequenceClassification",
    "KdaHybridModel",
    "KdaHybridPreTrainedModel",
    "PrefixCache",
    "backend_report",
    "kda",
    "optimizer_groups",
    "use_backend",
]
