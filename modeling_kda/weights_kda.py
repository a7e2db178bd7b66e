"""Checkpoint key tables: how released tensors are named and shaped, and which of ours they become."""

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)


class HeadRates(ConversionOps):
    """`A_log` as released, `[1, 1, H, 1]`, to ours, `[H]`."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        (tensor,) = (x[0] if isinstance(x, list) else x for x in input_dict.values())
        if tensor.numel() != max(tensor.shape, default=0):
            raise ValueError(f"`A_log` has shape {tuple(tensor.shape)}; one number a head is expected.")
        return {target_patterns[0]: tensor[...].flatten()}

    @property
    def reverse_op(self) -> ConversionOps:
        return ReleasedHeadRates()


class ReleasedHeadRates(ConversionOps):
    """The way back."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        (tensor,) = (x[0] if isinstance(x, list) else x for x in input_dict.values())
        return {target_patterns[0]: tensor.view(1, 1, -1, 1)}

    @property
    def reverse_op(self) -> ConversionOps:
        return HeadRates()


def kimi_linear_conversions() -> list[WeightTransform]:
    """From the released Kimi-Linear layout, or transformers' own `kimi_linear` files, to ours. Tensors with our names
    pass through. Both sides are patterns: their dots are escaped, or `mlp.gate` would match `mlp.gate_proj`."""
    moe, mlp = r"\.block_sparse_moe\.", r"\.mlp\."
    return [
        *(WeightRenaming(moe + name, mlp + name) for name in (r"gate\.", r"shared_experts\.")),
        # transformers writes the dense layer under the experts' name, the release does not.
        *(WeightRenaming(moe + name, mlp + name) for name in (r"gate_proj\.", r"up_proj\.", r"down_proj\.")),
        WeightConverter(
            source_patterns=[moe + r"experts.*.w1.weight", moe + r"experts.*.w3.weight"],
            target_patterns=mlp + r"experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns=moe + r"experts.*.w2.weight",
            target_patterns=mlp + r"experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
        WeightConverter(
            source_patterns=r"self_attn\.A_log", target_patterns=r"self_attn\.A_log", operations=[HeadRates()]
        ),
    ]
