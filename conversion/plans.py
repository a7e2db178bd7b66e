"""What each conversion writes: the plans for `stream.write`, from and to released layouts."""

import functools
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers.core_model_loading import dot_natural_key

import modeling_kda
from modeling_kda import KdaHybridConfig, KdaHybridForCausalLM
from modeling_kda.weights_kda import (
    EXPERT_STACKS,
    KIMI_K3,
    KIMI_LINEAR,
    MXFP4_CONFIG,
    VISION_PREFIXES,
    expert_of,
    float32_end,
    head_rates,
    head_rates_length,
    is_mxfp4,
    misfit,
    our_name,
    released_config,
    released_dtype,
    released_head_rates,
    released_name,
)
from modeling_kda.weights_mxfp4 import BLOCK, check_scales, decode, encode

from .checkpoint import CODES, DTYPES, SINGLE, Checkpoint, Spec
from .stream import Job, Part, Piece, Plan, copied, same


# What of a release our model has no place for is kept here, for the way back.
KEPT = "released"
# Names of the files of code that an exported folder has.
OUR_MODULES = {path.name for path in Path(modeling_kda.__file__).parent.glob("*.py")}


def read_config(source: Checkpoint) -> KdaHybridConfig:
    """The config of a folder of any layout that can be read."""
    return KdaHybridConfig.from_dict(source.config)


def expected(config: KdaHybridConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the model, which is not allocated."""
    with torch.device("meta"):
        model = KdaHybridForCausalLM(config)
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else {}
    return {name: tuple(x.shape) for name, x in model.state_dict().items() if name not in tied}


def is_ours(source: Checkpoint) -> bool:
    return source.config.get("model_type") == KdaHybridConfig.model_type


# To our layout


def to_kda_hybrid(source: Checkpoint, unpack: bool = False, dtype: torch.dtype = torch.bfloat16) -> Plan:
    """From a released Kimi-Linear or Kimi K3, transformers' `kimi_linear`, or flash-linear-attention's `kda`.

    Args:
        source: the checkpoint.
        unpack: whether experts in MXFP4 are decoded, to `dtype`. Otherwise they stay packed.

    Raises:
        ValueError: a tensor that our model has no place for, or that it lacks, or of another shape; both are listed.
    """
    if is_ours(source):
        raise ValueError(f"{source.folder} is a `kda_hybrid` checkpoint already.")
    config = read_config(source)
    stacks: dict[str, dict[tuple[str, str], dict[int, str]]] = {}
    jobs, vision, lengths = [], [], set()
    for name, spec in source.specs.items():
        expert = expert_of(name)
        if name.startswith(VISION_PREFIXES):
            vision.append(name)
        elif expert is not None:
            stack, number, matrix, kind = expert
            stacks.setdefault(stack, {}).setdefault((matrix, kind), {})[number] = name
        elif name.endswith(".A_log"):
            lengths.add(spec.numel)
            target = Spec(our_name(name), spec.dtype, (config.linear_num_heads,))
            jobs.append(Job((target,), (Piece((Part(source, name),), _head_rates(config.linear_num_heads)),)))
        else:
            jobs.append(copied(source, spec._replace(name=our_name(name)), name))
    packed = any(kind != "weight" for kinds in stacks.values() for _, kind in kinds)
    config.packed_experts = packed and not unpack
    if not config.packed_experts:
        config.__dict__.pop("quantization_config", None)
    for stack, kinds in stacks.items():
        jobs += _stack(source, config, stack, kinds, unpack, dtype)
    check_complete(source, config, (spec for job in jobs for spec in job.targets))

    files = {"config.json": _json_of(config), **{path.name: path for path in source.other_files()}}
    notes, metadata = [], {}
    if "linear_attn_config" in _text(source):
        files[f"{KEPT}/config.json"] = json.dumps(source.config, indent=2) + "\n"
        types = {name: CODES[dtype] for name, dtype in _types(source).items()}
        metadata[f"{KEPT}/{SINGLE}"] = {"A_log": str(max(lengths, default=0)), "types": json.dumps(types)}
        kept = f"{KEPT}/{SINGLE}"
        jobs += [copied(source, source.specs[name], name)._replace(file=kept) for name in vision]
    if vision:
        notes.append(
            f"{len(vision)} tensors of images are no part of the text model; they are kept in `{KEPT}/`: "
            f"{', '.join(sorted(vision)[:3])}, ..."
        )
    return Plan(_by_layer(jobs), files, metadata, notes)


def _types(released: Checkpoint) -> dict[str, torch.dtype]:
    """The types of those tensors of a release that are kept in float32 here, by the ends of their names."""
    said = json.loads(released.metadata.get("types", "{}"))
    ends = ((float32_end(our_name(name)), spec.dtype) for name, spec in released.specs.items())
    return {end: DTYPES[code] for end, code in said.items()} | {end: dtype for end, dtype in ends if end}


def _head_rates(heads: int):
    return lambda x: (head_rates(x, heads),)


def _stack(source: Checkpoint, config: KdaHybridConfig, stack: str, kinds: dict, unpack: bool, dtype: torch.dtype):
    """The jobs of one stack of experts: one, or one of codes and one of scales."""
    matrices = EXPERT_STACKS[stack.rsplit(".", 1)[1]]
    stored = {kind for _, kind in kinds}
    if stored not in ({"weight"}, {"weight_packed", "weight_scale"}):
        raise ValueError(f"`{stack}` would be made of {sorted(stored)}: all experts are in MXFP4, or none is.")
    for matrix in matrices:
        for kind in stored:
            found = kinds.get((matrix, kind), {})
            if sorted(found) != list(range(config.num_experts)):
                absent = sorted(set(range(config.num_experts)) - set(found))
                raise ValueError(
                    f"`{stack}` needs `{matrix}.{kind}` of experts 0 to {config.num_experts - 1}; there are "
                    f"{len(found)}, and {absent[:5] or sorted(found)[-5:]} are {'missing' if absent else 'too many'}."
                )

    if "weight_packed" in stored:
        for matrix in matrices:
            for expert in range(config.num_experts):
                codes, scale = (
                    source.specs[kinds[matrix, kind][expert]].shape for kind in ("weight_packed", "weight_scale")
                )
                if scale != (*codes[:-1], codes[-1] * 2 // BLOCK):
                    raise ValueError(
                        f"`{stack}`: expert {expert}'s `{matrix}` has codes {codes} and scales {scale}, which do not "
                        "belong together."
                    )

    def pieces(made_of: tuple[str, ...], make, numbers: int) -> tuple[tuple[Piece, ...], list[Spec]]:
        """From the tensors of these kinds; `numbers` of the target a number of the first."""
        made, offset, specs = [], 0, []
        for expert in range(config.num_experts):
            for matrix in matrices:
                parts = tuple(Part(source, kinds[matrix, kind][expert]) for kind in made_of)
                specs.append(source.specs[parts[0].name])
                made.append(Piece(parts, make, offset))
                offset += specs[-1].numel * numbers
        return tuple(made), specs

    def target(name: str, specs: list[Spec], numbers: int, to: torch.dtype | None = None) -> Spec:
        shapes = {spec.shape[1:] for spec in specs}
        heights = {spec.shape[0] for spec in specs}
        if len(shapes) != 1 or len(heights) != 1:
            raise ValueError(f"the experts of `{name}` differ in shape: {sorted({spec.shape for spec in specs})}.")
        [width] = shapes.pop()
        shape = (config.num_experts, len(matrices) * heights.pop(), width * numbers)
        return Spec(name, to or specs[0].dtype, shape)

    if stored == {"weight"}:
        made, specs = pieces(("weight",), same, 1)
        return [Job((target(stack, specs, 1),), made)]
    if unpack:
        made, specs = pieces(("weight_packed", "weight_scale"), functools.partial(_decoded, dtype=dtype), 2)
        return [Job((target(stack, specs, 2, dtype),), made, about=f"decoded to {dtype}")]
    codes, code_specs = pieces(("weight_packed",), same, 1)
    scales, scale_specs = pieces(("weight_scale",), _checked, 1)
    return [
        Job((target(stack, code_specs, 1),), codes),
        Job((target(f"{stack}_scale", scale_specs, 1),), scales),
    ]


def _decoded(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (decode(packed, *_checked(scale), dtype),)


def _checked(scale: Tensor) -> tuple[Tensor, ...]:
    check_scales(scale, "weight_scale")
    return (scale,)


def check_complete(source: Checkpoint, config: KdaHybridConfig, specs: Iterable[Spec]) -> None:
    """Raises ValueError unless every parameter is filled, every tensor has a place, and the shapes are the model's."""
    want = expected(config)
    got = {spec.name: spec.shape for spec in specs}
    shapes = (f"{name} {got[name]} for {want[name]}" for name in want.keys() & got.keys() if got[name] != want[name])
    if problem := misfit(want.keys() - got.keys(), got.keys() - want.keys(), shapes):
        raise ValueError(f"{source.folder} does not fit its config. {problem}")


# To a release


def to_released(source: Checkpoint, family: str, original: Checkpoint | None = None, mxfp4: bool = False) -> Plan:
    """From our layout to that of Kimi-Linear or Kimi K3.

    Args:
        source: a `kda_hybrid` checkpoint.
        family: `"kimi_linear"` or `"kimi_k3"`.
        original: the release that it was made from. Experts that are still what its codes say return with its scale
            bytes; its tensors of images and its config's other fields come along.
        mxfp4: whether experts are written in MXFP4 where no original says so.
    """
    if not is_ours(source):
        raise ValueError(
            f"{source.folder} is of `model_type` {source.config.get('model_type')!r}; run `to-kda-hybrid` on it first."
        )
    config = read_config(source)
    if family == KIMI_LINEAR and (config.packed_experts or mxfp4):
        raise ValueError("a released kimi_linear checkpoint has no experts in MXFP4; convert with `--unpack` first.")
    if original is not None and original.config.get("model_type") != family:
        raise ValueError(
            f"`--original` {original.folder} is of `model_type` {original.config.get('model_type')!r}, not {family!r}."
        )
    kept = original
    if kept is None and (source.folder / KEPT / "config.json").exists():
        kept = Checkpoint(source.folder / KEPT)
    if kept is not None and kept.config.get("model_type") != family:
        kept = None  # of the other family
    length = head_rates_length(config)
    if kept is not None:
        a_logs = [spec.numel for name, spec in kept.specs.items() if name.endswith(".A_log")]
        length = max(a_logs, default=int(kept.metadata.get("A_log", length)))
    check_complete(source, config, source.specs.values())
    if original is not None:
        _check_original(source, config, original)

    # A model that was trained in another type than the release has no types of it to return to.
    types = _types(kept) if kept is not None and config.dtype == read_config(kept).dtype else {}
    packs = mxfp4 or (original is not None and is_mxfp4(_quantization(original)))
    jobs: list[Job] = []
    for name, spec in source.specs.items():
        there = released_name(name, family)
        to = types.get(float32_end(name)) or released_dtype(name, spec.dtype, family, config.dtype)
        if ".mlp.experts." in name:
            jobs += _experts(source, spec, there, original, packs and not config.packed_experts)
        elif name.endswith(".A_log"):
            shape = (1, 1, *spec.shape, 1) if family == KIMI_LINEAR else (max(length, *spec.shape),)
            make = functools.partial(_released_head_rates, family=family, length=max(length, *spec.shape), dtype=to)
            jobs.append(Job((Spec(there, to, shape),), (Piece((Part(source, name),), make),)))
        else:
            jobs.append(copied(source, spec._replace(name=there), name, to))
    vision = [] if kept is None or family != KIMI_K3 else [n for n in kept.specs if n.startswith(VISION_PREFIXES)]
    jobs += [copied(kept, kept.specs[name], name) for name in vision]

    quantization = None
    if config.packed_experts or packs:
        quantization = getattr(config, "quantization_config", None) if config.packed_experts else None
        quantization = quantization or (_quantization(kept) if kept is not None else None) or MXFP4_CONFIG
    if config.tie_word_embeddings and not (kept is not None and _text(kept).get("tie_word_embeddings")):
        # Readers of a release do not look for tied embeddings; transformers' own `kimi_linear` would make up a head.
        name = "model.embed_tokens.weight"
        head = source.specs[name]._replace(name=released_name("lm_head.weight", family))
        jobs.append(copied(source, head, name))
        config.tie_word_embeddings = False
    fields = released_config(config, family, None if kept is None else kept.config, quantization)
    if family == KIMI_K3 and kept is not None and not vision:
        fields.pop("vision_config", None)
    files: dict[str, str | Path] = {} if original is None else {path.name: path for path in original.other_files()}
    files |= {path.name: path for path in source.other_files() if path.name not in OUR_MODULES}
    files["config.json"] = json.dumps(fields, indent=2) + "\n"
    notes = []
    if config.router_weights_use_bias:
        notes.append(
            "this model's routers weigh experts by their biased scores. The released Kimi-Linear code does so too; "
            "serving engines do not, and will compute something else."
        )
    return Plan(_by_layer(jobs), files, notes=notes)


def _check_original(source: Checkpoint, config: KdaHybridConfig, original: Checkpoint) -> None:
    """Raises ValueError if the two are different models; the vocabulary may have been resized, experts packed."""
    shapes = []
    for one in (config, read_config(original)):
        found = {name: shape for name, shape in expected(one).items() if ".experts." not in name}
        shapes.append(
            {name: x[1:] if name in _VOCABULARY else x for name, x in found.items() if name != "lm_head.weight"}
        )
    differ = sorted(name for name in shapes[0].keys() | shapes[1].keys() if shapes[0].get(name) != shapes[1].get(name))
    if differ:
        raise ValueError(
            f"{source.folder} was not made from {original.folder}: {len(differ)} tensors differ in shape, such as "
            f"`{differ[0]}`."
        )


_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def _released_head_rates(x: Tensor, family: str, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (released_head_rates(x, family, length).to(dtype),)


def _text(released: Checkpoint) -> dict:
    """The fields of the text model in a release's config."""
    return released.config.get("text_config", released.config)


def _quantization(checkpoint: Checkpoint) -> dict | None:
    return getattr(read_config(checkpoint), "quantization_config", None)


def _experts(source: Checkpoint, spec: Spec, there: str, original: Checkpoint | None, packs: bool) -> list[Job]:
    """The jobs of one stack: a tensor for each expert and matrix, or its codes and its scales."""
    stack = spec.name.rsplit(".", 1)[1]
    matrices = EXPERT_STACKS[stack.removesuffix("_scale")]
    kind = {torch.uint8: "weight_packed"}.get(spec.dtype, "weight") if not stack.endswith("_scale") else "weight_scale"
    count, height, width = spec.shape
    height //= len(matrices)
    if packs and width % BLOCK:
        raise ValueError(f"`{spec.name}`: the width {width} is no multiple of {BLOCK}, as MXFP4 needs.")
    jobs = []
    for expert in range(count):
        for i, matrix in enumerate(matrices):
            name = f"{there}.{expert}.{matrix}"
            part = Part(source, spec.name, slice(i * height, (i + 1) * height), expert)
            if not packs:
                jobs.append(Job((Spec(f"{name}.{kind}", spec.dtype, (height, width)),), (Piece((part,), same),)))
                continue
            targets = (
                Spec(f"{name}.weight_packed", torch.uint8, (height, width // 2)),
                Spec(f"{name}.weight_scale", torch.uint8, (height, width // BLOCK)),
            )
            parts = [part]
            if original is not None:
                scale = original.specs.get(targets[1].name)
                if scale is None or scale.shape != targets[1].shape:
                    raise ValueError(
                        f"{original.folder} has no `{targets[1].name}` of shape {targets[1].shape}; is it what "
                        f"{source.folder} was made from?"
                    )
                parts.append(Part(original, scale.name))
            jobs.append(Job(targets, (Piece(tuple(parts), encode),), about="encoded"))
    return jobs


def _by_layer(jobs: list[Job]) -> list[Job]:
    """In the order of the layers, so that a layer's tensors lie together."""
    return sorted(jobs, key=lambda job: dot_natural_key(job.targets[0].name))


def _json_of(config: KdaHybridConfig) -> str:
    config.architectures = [KdaHybridForCausalLM.__name__]
    return config.to_json_string()
