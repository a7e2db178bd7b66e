"""Compares two checkpoints on the same tokens: logits, and which experts were chosen. They may be of any layout that
can be loaded; one is in memory at a time.

A small difference can send a token to other experts, and then everything after it differs. So where there are experts,
the second checkpoint also runs with the first one's choices: what is left then is arithmetic."""

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from modeling_kda import KdaHybridConfig, KdaHybridForCausalLM


def _run(
    folder: Path, ids: Tensor, dtype: str, device_map: str | None, choices: list[list[Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Logits `[rows, tokens, vocabulary]` in float32 on the CPU: of the model as it is, then with each of the given
    choices. And the experts it chose itself, `[tokens, A]` for each sparse layer."""
    model = KdaHybridForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device_map).eval()
    if ids.max() >= model.config.vocab_size:
        raise ValueError(f"the ids go up to {int(ids.max())}, and {folder} has {model.config.vocab_size} of them.")
    routers = [layer.mlp.gate for layer in model.model.layers if layer.sparse]
    chosen: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda _, __, out: chosen.append(out[2].cpu())) for router in routers]
    results = []
    with torch.no_grad():
        ids = ids.to(model.device)
        results.append(model(ids, use_cache=False).logits.float().cpu())
        for hook in hooks:
            hook.remove()
        for choice in choices:
            if [tuple(x.shape) for x in choice] != [tuple(x.shape) for x in chosen]:
                raise ValueError(f"{folder} chooses other numbers of experts; its routing cannot be replayed.")
            for router, experts in zip(routers, choice):
                router.choose = lambda biased, experts=experts: experts.to(biased.device)
            results.append(model(ids, use_cache=False).logits.float().cpu())
    del model, routers
    gc.collect()
    return results, chosen


def difference(first: Tensor, second: Tensor) -> dict[str, float]:
    """How far logits are from the first ones: largest and mean absolute difference, mean Kullback-Leibler divergence
    (nats a token), and the share of tokens with the same best one."""
    gap = (second - first).abs()
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    return {
        "max": gap.max().item(),
        "mean": gap.mean().item(),
        "kl": (p.exp() * (p - q)).sum(-1).mean().item(),
        "top1": (first.argmax(-1) == second.argmax(-1)).float().mean().item(),
    }


def compare(
    first: str | Path, second: str | Path, ids: Tensor, dtype: str = "float32", device_map: str | None = None
) -> dict[str, Any]:
    """The findings by name: `difference`, and where there are experts `replayed`, the same with the first checkpoint's
    choices, and `equal_experts`, the share of choices that are the same.

    Args:
        first, second: folders; differences are from the first.
        ids: `[rows, tokens]`.
        dtype: in which both run.
        device_map: as in `from_pretrained`.
    """
    [want], experts = _run(Path(first), ids, dtype, device_map, [])
    got, others = _run(Path(second), ids, dtype, device_map, [experts] if experts else [])
    if got[0].shape != want.shape:
        raise ValueError(f"{first} gives logits {tuple(want.shape)}, {second} gives {tuple(got[0].shape)}.")
    found: dict[str, Any] = {"difference": difference(want, got[0])}
    if experts:
        found["replayed"] = difference(want, got[1])
        same = [(a.unsqueeze(-1) == b.unsqueeze(-2)).any(-1).float().mean() for a, b in zip(experts, others)]
        found["equal_experts"] = torch.stack(same).mean().item()
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, help="the folder that is right")
    parser.add_argument("second", type=Path, help="the folder that is compared with it")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", type=Path, help="file with text; the first folder's tokenizer makes the ids")
    source.add_argument("--ids", type=Path, help="JSON file with a list of ids, or a list of such lists of one length")
    parser.add_argument("--tokens", type=int, default=256, help="at most so many; without a file, so many at random")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--device-map", help="as in from_pretrained, such as auto")


def _ids(given: argparse.Namespace) -> Tensor:
    if given.ids:
        try:
            ids = torch.tensor(json.loads(given.ids.read_text()))
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"{given.ids} is no list of ids, or of lists of one length: {error}.") from None
        if ids.ndim not in (1, 2) or not ids.numel() or ids.dtype != torch.int64:
            raise ValueError(f"{given.ids} is no list of ids, or of lists of one length.")
        ids = ids if ids.ndim == 2 else ids[None]
    elif given.text:
        try:
            text = given.text.read_text()
        except OSError as error:
            raise ValueError(f"{given.text} cannot be read: {error}.") from None
        try:
            tokenizer = AutoTokenizer.from_pretrained(given.first)
        except (OSError, ValueError):
            raise ValueError(f"{given.first} has no tokenizer that can be loaded; give `--ids`.") from None
        ids = tokenizer(text, return_tensors="pt").input_ids
    else:
        size = KdaHybridConfig.from_pretrained(given.first).vocab_size
        ids = torch.randint(0, size, (1, given.tokens), generator=torch.Generator().manual_seed(0))
    return ids[:, : given.tokens]


def run(given: argparse.Namespace) -> None:
    for folder in (given.first, given.second):
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder.")
    ids = _ids(given)
    found = compare(given.first, given.second, ids, given.dtype, given.device_map)
    print(f"{ids.numel()} tokens in {given.dtype}; {given.second} against {given.first}")
    for name, title in (("difference", "as they are"), ("replayed", "with the first one's experts")):
        if name in found:
            x = found[name]
            print(
                f"{title:>28}: max {x['max']:.3g}, mean {x['mean']:.3g}, KL {x['kl']:.3g} nats, "
                f"same best token {x['top1']:.2%}"
            )
    if "equal_experts" in found:
        print(f"{'same experts':>28}: {found['equal_experts']:.2%}")
