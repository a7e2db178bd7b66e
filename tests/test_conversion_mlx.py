"""mlx-lm reads the exported folders, on the CPU, and agrees with us on the logits and on the best token."""

import numpy as np
import pytest
import torch
from checkpoint_bytes import convert
from helpers import assert_close, golden, golden_tensors, k3_model, tiny_model, token_ids

from modeling_kda import KdaHybridForCausalLM


mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

LINEAR, K3, PACKED, RELEASED = "kimi_linear_original_tiny", "kimi_k3_tiny", "kimi_k3_tiny_mxfp4", "k3_released_tiny"


def mlx_logits(folder, ids: torch.Tensor) -> torch.Tensor:
    """In float32. The releases leave the norms of MLA's low-rank paths at 1e-6, mlx-lm gives them `rms_norm_eps`."""
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    for layer in model.layers:
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if name in layer.self_attn:
                layer.self_attn[name].eps = 1e-6
    return torch.from_numpy(np.array(model(mx.array(ids.numpy()))))


def assert_agree(ours, exported, ids: torch.Tensor, tolerance: float = 2e-4) -> None:
    """The model of the first folder, here, and the second folder, there."""
    model = KdaHybridForCausalLM.from_pretrained(ours, dtype=torch.float32).eval()
    with torch.no_grad():
        want = model(ids).logits
    got = mlx_logits(exported, ids)
    assert_close(got, want, tolerance)
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize(
    ("name", "there", "back"),
    [
        (LINEAR, [], []),
        ("hf_kimi_linear_tiny", [], ["--max-shard-size", "200KB"]),
        (K3, [], []),
        (K3, [], ["--mxfp4", "--max-shard-size", "200KB"]),
        (PACKED, [], []),
        (PACKED, ["--unpack"], []),
        (PACKED, ["--unpack"], ["--mxfp4"]),
        (RELEASED, [], []),
        (RELEASED, ["--unpack"], ["--max-shard-size", "200KB"]),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x) or "plain",
)
def test_mlx_reads_what_a_release_became_and_was_again(tmp_path, name, there, back):
    convert("to-kda-hybrid", golden(name), tmp_path / "ours", *there)
    convert("to-kimi-linear" if "linear" in name else "to-kimi-k3", tmp_path / "ours", tmp_path / "back", *back)
    # With `--mxfp4` the experts are rounded: what was written is the model to agree with.
    ours = tmp_path / ("back" if "--mxfp4" in back else "ours")
    ids = golden_tensors(name, "expected.safetensors")["input_ids"]
    # `k3_released_tiny` is sensitive: in float32 the two are 2e-4 and 3e-4 from its float64 logits.
    assert_agree(ours, tmp_path / "back", ids, 1e-3 if name == RELEASED else 2e-4)


@pytest.mark.parametrize("family", ["kimi-linear", "kimi-k3", "kimi-k3 --mxfp4"])
def test_mlx_reads_a_model_that_was_never_released(tmp_path, family):
    tool, *options = f"to-{family}".split()
    if family == "kimi-linear":
        model = tiny_model(linear_value_head_dim=12, linear_output_gate_rank=12)
    else:
        model = k3_model(linear_value_head_dim=12)
    model.save_pretrained(tmp_path / "ours")
    convert(tool, tmp_path / "ours", tmp_path / "out", *options)
    assert_agree(tmp_path / ("out" if options else "ours"), tmp_path / "out", token_ids(70, 2))
