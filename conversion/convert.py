"""The command line of the conversions between layouts."""

import argparse
import re
from pathlib import Path

import torch

from modeling_kda.weights_kda import KIMI_K3, KIMI_LINEAR

from . import plans, stream
from .checkpoint import Checkpoint


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="folder of the checkpoint")
    parser.add_argument("target", type=Path, help="folder to make")
    parser.add_argument("--force", action="store_true", help="replace the target if it exists")
    parser.add_argument("--workers", type=_count, default=2, help="threads; each has one piece of a tensor in memory")
    parser.add_argument("--max-shard-size", type=_size, default="5GB", help="as in save_pretrained")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _size(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?[KMGT]i?B", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 5GB or 500MB")
    return text


def _carry_out(plan: stream.Plan, given: argparse.Namespace) -> None:
    for note in plan.notes:
        print(note)
    stream.write(plan, given.target, given.force, given.workers, given.max_shard_size)
    size = sum(spec.nbytes for job in plan.jobs for spec in job.targets)
    count = sum(len(job.targets) for job in plan.jobs)
    print(f"{given.target}: {count:,} tensors, {size:,} bytes, read back and found right.")


class ToKdaHybrid:
    """Writes a released Kimi-Linear or Kimi K3 checkpoint, transformers' own `kimi_linear` or flash-linear-attention's
    `kda` under the names of this package. Types stay as they are, and experts in MXFP4 stay packed. What belongs to
    K3's images is kept in the folder `released`, for the way back."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        _add_common(parser)
        parser.add_argument("--unpack", action="store_true", help="decode experts in MXFP4")
        parser.add_argument(
            "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of decoded experts; both are exact"
        )

    @staticmethod
    def run(given: argparse.Namespace) -> None:
        plan = plans.to_kda_hybrid(Checkpoint(given.source), given.unpack, getattr(torch, given.dtype))
        _carry_out(plan, given)


class ToKimiLinear:
    """Writes a `kda_hybrid` checkpoint as Kimi-Linear is released: for vLLM, SGLang, mlx-lm, llama.cpp and
    transformers' own `kimi_linear`."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        _add_common(parser)
        parser.add_argument(
            "--original", type=Path, help="the release it was made from, for its config's other fields"
        )

    @staticmethod
    def run(given: argparse.Namespace) -> None:
        original = given.original and Checkpoint(given.original)
        _carry_out(plans.to_released(Checkpoint(given.source), KIMI_LINEAR, original), given)


class ToKimiK3:
    """Writes a `kda_hybrid` checkpoint as Kimi K3 is released: for vLLM, SGLang, mlx-lm and llama.cpp. Packed experts
    return as they are. Decoded ones are encoded if `--original` has them in MXFP4: byte for byte those that nothing
    has changed, the others by the rule of compressed-tensors."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        _add_common(parser)
        parser.add_argument(
            "--original", type=Path, help="the release it was made from: its scales, images and other fields"
        )
        parser.add_argument("--mxfp4", action="store_true", help="encode the experts even without an original")

    @staticmethod
    def run(given: argparse.Namespace) -> None:
        original = given.original and Checkpoint(given.original)
        _carry_out(plans.to_released(Checkpoint(given.source), KIMI_K3, original, given.mxfp4), given)
