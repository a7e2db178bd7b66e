"""Kimi K3 at its full size, without its weights: every released tensor has its place here, and the way back."""

import gzip
import json
import math
import re
from pathlib import Path

import pytest
import torch
from helpers import golden, golden_json

from conversion import plans
from conversion.checkpoint import CODES, Checkpoint
from modeling_kda.weights_kda import KIMI_K3


PRESET = Path(__file__).parents[1] / "configuration" / "kimi_k3_text"
TOTAL = 1_560_860_324_864  # bytes, of the release's own index
PARAMETERS = 2_779_484_478_208  # of the text model, by the names and shapes of the release

HEADS = 96 * 128
KDA = {
    **{f"{x}_proj.weight": ((HEADS, 7168), "BF16") for x in "qkvg"},
    **{f"{x}_conv1d.weight": ((HEADS, 1, 4), "F32") for x in "qkv"},
    "o_proj.weight": ((7168, HEADS), "BF16"),
    "f_a_proj.weight": ((128, 7168), "BF16"),
    "f_b_proj.weight": ((HEADS, 128), "BF16"),
    "b_proj.weight": ((96, 7168), "BF16"),
    "A_log": ((128,), "F32"),
    "dt_bias": ((HEADS,), "F32"),
    "o_norm.weight": ((128,), "F32"),
}
MLA = {
    "q_a_proj.weight": ((1536, 7168), "BF16"),
    "q_a_layernorm.weight": ((1536,), "BF16"),
    "q_b_proj.weight": ((96 * 192, 1536), "BF16"),
    "kv_a_proj_with_mqa.weight": ((576, 7168), "BF16"),
    "kv_a_layernorm.weight": ((512,), "BF16"),
    "kv_b_proj.weight": ((96 * 256, 512), "BF16"),
    "g_proj.weight": ((HEADS, 7168), "BF16"),
    "o_proj.weight": ((7168, HEADS), "BF16"),
}
MOE = {
    "gate.weight": ((896, 7168), "BF16"),
    "gate.e_score_correction_bias": ((896,), "F32"),
    "routed_expert_down_proj.weight": ((3584, 7168), "BF16"),
    "routed_expert_up_proj.weight": ((7168, 3584), "BF16"),
    "routed_expert_norm.weight": ((3584,), "BF16"),
    "shared_experts.gate_proj.weight": ((6144, 7168), "BF16"),
    "shared_experts.up_proj.weight": ((6144, 7168), "BF16"),
    "shared_experts.down_proj.weight": ((7168, 6144), "BF16"),
}
EXPERT = {
    **{f"{x}.weight_packed": ((3072, 1792), "U8") for x in ("w1", "w3")},
    **{f"{x}.weight_scale": ((3072, 112), "U8") for x in ("w1", "w3")},
    "w2.weight_packed": ((3584, 1536), "U8"),
    "w2.weight_scale": ((3584, 96), "U8"),
}
VISION = {
    "norm0.weight": (1024,),
    "norm1.weight": (1024,),
    "wqkv.weight": (3 * 1536, 1024),
    "wo.weight": (1024, 1536),
    "mlp.fc0.weight": (4096, 1024),
    "mlp.fc1.weight": (1024, 4096),
    "vision_tower.encoder.final_layernorm.weight": (1024,),
    "vision_tower.patch_embed.proj.weight": (1024, 3, 14, 14),
    "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1024),
    "mm_projector.proj.0.weight": (4096, 4096),
    "mm_projector.proj.2.weight": (7168, 4096),
    "mm_projector.post_norm.weight": (7168,),
}
BYTES = {"BF16": 2, "F32": 4, "U8": 1}


def released_tensor(name: str) -> tuple[tuple[int, ...], str]:
    """Shape and type of a tensor of the release, from the sizes in its config."""
    if not name.startswith("language_model."):
        return VISION[re.sub(r"vision_tower\.encoder\.blocks\.\d+\.", "", name)], "BF16"
    layer = re.fullmatch(r"language_model\.model\.layers\.(\d+)\.(.+)", name)
    if layer is None:
        rows = {"lm_head.weight": (163840, 7168), "embed_tokens.weight": (163840, 7168)}
        last = name.rsplit("model.", 1)[1] if "lm_head" not in name else "lm_head.weight"
        return rows.get(last, (1, 7168) if last.endswith("res_proj.weight") else (7168,)), "BF16"
    number, rest = int(layer[1]) + 1, layer[2]
    if rest.startswith("self_attn."):
        return (MLA if number % 4 == 0 or number == 93 else KDA)[rest.removeprefix("self_attn.")]
    if rest.startswith("mlp."):
        assert number == 1
        return ((7168, 33792) if "down" in rest else (33792, 7168)), "BF16"
    if expert := re.fullmatch(r"block_sparse_moe\.experts\.\d+\.(.+)", rest):
        return EXPERT[expert[1]]
    if rest.startswith("block_sparse_moe."):
        return MOE[rest.removeprefix("block_sparse_moe.")]
    return ((1, 7168) if rest.endswith("res_proj.weight") else (7168,)), "BF16"


@pytest.fixture(scope="module")
def tensors() -> dict[str, tuple[tuple[int, ...], str]]:
    with gzip.open(golden("k3_index", "model.safetensors.index.json.gz")) as file:
        index = json.load(file)
    assert index["metadata"]["total_size"] == TOTAL
    return {name: released_tensor(name) for name in index["weight_map"]}


@pytest.fixture(scope="module")
def release(tensors, tmp_path_factory) -> Checkpoint:
    """The release's heads and index with holes for weights: files of 1.56 TB that take no room."""
    folder = tmp_path_factory.mktemp("k3")
    (folder / "config.json").write_text(json.dumps(golden_json("released_configs", "kimi_k3.json")))
    with gzip.open(golden("k3_index", "model.safetensors.index.json.gz")) as file:
        (folder / "model.safetensors.index.json").write_bytes(file.read())
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards: dict[str, list[str]] = {}
    for name, file in places.items():
        shards.setdefault(file, []).append(name)
    for file, names in shards.items():
        head, place = {}, 0
        for name in names:
            shape, kind = tensors[name]
            size = math.prod(shape) * BYTES[kind]
            head[name] = {"dtype": kind, "shape": shape, "data_offsets": [place, place + size]}
            place += size
        text = json.dumps(head).encode()
        with open(folder / file, "wb") as shard:
            shard.write(len(text).to_bytes(8, "little") + text)
            shard.truncate(8 + len(text) + place)
    return Checkpoint(folder)


def test_shapes_of_the_release_sum_to_its_size(tensors):
    assert len(tensors) == 497_220
    assert sum(math.prod(shape) * BYTES[kind] for shape, kind in tensors.values()) == TOTAL
    text = {name: x for name, x in tensors.items() if name.startswith("language_model.")}
    numbers = sum(
        math.prod(shape) * (2 if name.endswith("weight_packed") else 1)
        for name, (shape, _) in text.items()
        if not name.endswith("weight_scale")
    )
    assert numbers == PARAMETERS


def test_every_released_tensor_has_its_place_and_the_way_back(release, tensors):
    plan = plans.to_kda_hybrid(release)  # raises for a parameter or a tensor that is left over
    shards = [job for job in plan.jobs if job.file is None]
    kept = [job for job in plan.jobs if job.file is not None]
    config = plans.read_config(release)
    config.packed_experts = True
    model = plans.expected(config)
    assert {spec.name: spec.shape for job in shards for spec in job.targets} == model
    read = [part.name for job in plan.jobs for piece in job.pieces for part in piece.parts]
    assert set(read) == tensors.keys()
    assert len(kept) == 168
    # What is written is what is read, but for the zeros behind the heads of A_log.
    written = sum(spec.nbytes for job in plan.jobs for spec in job.targets)
    assert written == TOTAL - 69 * (128 - 96) * 4

    ours = Checkpoint.__new__(Checkpoint)
    ours.folder, ours.missing, ours.metadata = release.folder, [], {}
    ours.config = json.loads(plan.files["config.json"])
    ours.specs = {spec.name: spec for job in shards for spec in job.targets}
    back = plans.to_released(ours, KIMI_K3, None)
    got = {spec.name: (spec.shape, CODES[spec.dtype]) for job in back.jobs for spec in job.targets}
    assert got == {name: x for name, x in tensors.items() if name.startswith("language_model.")}
    fields, want = json.loads(back.files["config.json"]), release.config
    assert fields["text_config"]["quantization_config"] == want["text_config"]["quantization_config"]
    assert fields["text_config"]["linear_attn_config"] == want["text_config"]["linear_attn_config"]


def test_parameters_of_the_preset_are_those_of_the_release():
    with torch.device("meta"):
        model = plans.KdaHybridForCausalLM(plans.KdaHybridConfig.from_pretrained(PRESET))
    numbers = sum(x.numel() for x in model.state_dict().values())
    assert numbers + 69 * (128 - 96) == PARAMETERS  # the release holds zeros behind the 96 heads of A_log
    assert model.num_parameters() == numbers - 92 * 896  # the routers' correction biases are buffers
