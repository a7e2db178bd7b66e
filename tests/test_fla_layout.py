"""flash-linear-attention's `kda` checkpoints: the logits of another implementation, and what cannot be read.

The forward pass below is written from the facts of that layout, one token at a time, in float64, without our modules.
"""

import json

import pytest
import torch
from checkpoint_bytes import config_of, convert
from helpers import assert_close
from safetensors.torch import save_file

from conversion.__main__ import main
from modeling_kda import KdaHybridConfig, KdaHybridForCausalLM


BASE = dict(
    architectures=["KDAForCausalLM"], model_type="kda", attn_mode="chunk", hidden_size=64, expand_v=1.0,
    use_short_conv=True, allow_neg_eigval=False, safe_gate=False, lower_bound=None, conv_size=4, head_dim=16,
    num_heads=3, num_v_heads=None, max_position_embeddings=2048, hidden_ratio=4, intermediate_size=None,
    hidden_act="swish", num_hidden_layers=3, norm_eps=1e-6, attn=None, use_cache=True, pad_token_id=None,
    bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, initializer_range=0.02, fuse_norm=True,
    fuse_swiglu=True, fuse_cross_entropy=True, use_l2warp=False, vocab_size=97, attnres_block_size=None,
    dtype="float32",
)  # fmt: skip
BOUNDED = dict(
    safe_gate=True, lower_bound=-5.0, norm_eps=2e-4, intermediate_size=96, tie_word_embeddings=True, num_v_heads=3
)
VARIANTS = {
    "plain": {},
    "bounded and tied": BOUNDED,
    "attention residuals": dict(attnres_block_size=4, num_hidden_layers=5, intermediate_size=96),
}


def shapes(c: dict) -> dict[str, tuple[int, ...]]:
    """Every stored tensor."""
    d, rows, k = c["hidden_size"], c["num_heads"] * c["head_dim"], c["head_dim"]
    width = c["intermediate_size"] or -(-int(d * c["hidden_ratio"] * 2 / 3) // 256) * 256
    out = {"model.embeddings.weight": (c["vocab_size"], d), "model.norm.weight": (d,)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (c["vocab_size"], d)
    if c["attnres_block_size"]:
        out |= {"model.res_proj.weight": (1, d), "model.res_norm.weight": (d,)}
    for i in range(c["num_hidden_layers"]):
        p, a = f"model.layers.{i}.", f"model.layers.{i}.attn."
        out |= {p + "attn_norm.weight": (d,), p + "mlp_norm.weight": (d,), p + "mlp.down_proj.weight": (d, width)}
        out |= {p + f"mlp.{n}_proj.weight": (width, d) for n in ("gate", "up")}
        for n in "qkv":
            out |= {a + f"{n}_proj.weight": (rows, d), a + f"{n}_conv1d.weight": (rows, 1, c["conv_size"])}
        out |= {a + "f_proj.0.weight": (k, d), a + "f_proj.1.weight": (rows, k), a + "dt_bias": (rows,)}
        out |= {a + "b_proj.weight": (c["num_heads"], d), a + "A_log": (c["num_heads"],)}
        out |= {a + "g_proj.0.weight": (k, d), a + "g_proj.1.weight": (rows, k), a + "g_proj.1.bias": (rows,)}
        out |= {a + "o_norm.weight": (k,), a + "o_proj.weight": (d, rows)}
        if c["attnres_block_size"]:
            for n in ("attn", "mlp"):
                out |= {p + f"{n}_res_proj.weight": (1, d), p + f"{n}_res_norm.weight": (d,)}
    return out


def weights(c: dict, seed: int) -> dict[str, torch.Tensor]:
    """Random numbers, none of them what a fresh model has."""
    r, out = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes(c).items():
        n = torch.randn(shape, generator=r, dtype=torch.float64)
        if name.endswith("norm.weight"):
            w = 1 + 0.3 * n
        elif name.endswith("A_log"):
            w = torch.rand(shape, generator=r, dtype=torch.float64) * (1.5 if c["lower_bound"] else 2.77)
        elif name.endswith("dt_bias"):
            w = 1.5 * n - (0.5 if c["lower_bound"] else 3.0)
        elif name.endswith("g_proj.1.bias"):
            w = 0.7 * n
        elif "conv1d" in name:
            w = 0.5 * n
        elif "embeddings" in name:
            w = (0.15 if c["tie_word_embeddings"] or c["attnres_block_size"] else 0.02) * n  # small: norm_eps shows
        elif "res_proj" in name:
            w = 0.1 * n
        elif "layers.1.attn.q_proj" in name or "layers.1.attn.k_proj" in name:
            w = 0.0005 * n  # the eps of the normalisation of queries and keys shows
        else:
            w = 1.2 * n / shape[-1] ** 0.5
        out[name] = w.float().contiguous()
    return out


# The model


def rms(x, w, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def conv_silu(x, w):  # [B, T, C] and [C, 1, taps]; the last tap meets the current token
    padded = torch.nn.functional.pad(x, (0, 0, w.shape[-1] - 1, 0))
    y = sum(padded[:, i : i + x.shape[1]] * w[:, 0, i] for i in range(w.shape[-1]))
    return y * torch.sigmoid(y)


def log_decay(u, rate, bias, bound):  # [B, T, H, K]
    u, rate = u + bias.view(u.shape[-2:]), rate.exp()[:, None]
    return bound * torch.sigmoid(rate * u) if bound is not None else -rate * torch.nn.functional.softplus(u)


def recurrence(q, k, v, g, beta):
    batch, tokens, heads, width = q.shape
    state, out = q.new_zeros(batch, heads, width, v.shape[-1]), []
    for i in range(tokens):
        state = state * g[:, i].exp()[..., None]
        rest = v[:, i] - (state * k[:, i][..., None]).sum(-2)
        state = state + k[:, i][..., None] * (beta[:, i][..., None] * rest)[..., None, :]
        out.append((state * q[:, i][..., None]).sum(-2) * width**-0.5)
    return torch.stack(out, 1)


def attention(c, w, p, x):
    heads = (*x.shape[:2], c["num_heads"], c["head_dim"])
    q, k, v = (conv_silu(x @ w[f"{p}{n}_proj.weight"].T, w[f"{p}{n}_conv1d.weight"]).view(heads) for n in "qkv")
    q, k = (y / torch.sqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    u = (x @ w[p + "f_proj.0.weight"].T @ w[p + "f_proj.1.weight"].T).view(heads)
    g = log_decay(u, w[p + "A_log"], w[p + "dt_bias"], c["lower_bound"])
    o = recurrence(q, k, v, g, torch.sigmoid(x @ w[p + "b_proj.weight"].T))
    z = x @ w[p + "g_proj.0.weight"].T @ w[p + "g_proj.1.weight"].T + w[p + "g_proj.1.bias"]
    o = rms(o, w[p + "o_norm.weight"], c["norm_eps"]) * torch.sigmoid(z.view(heads))
    return o.flatten(2) @ w[p + "o_proj.weight"].T


def mlp(w, p, x):
    y = x @ w[p + "gate_proj.weight"].T
    return (y * torch.sigmoid(y) * (x @ w[p + "up_proj.weight"].T)) @ w[p + "down_proj.weight"].T


def mix(sources, w, name, eps):
    stack = torch.stack(sources)
    score = rms(stack, w[name + "_norm.weight"], eps) @ w[name + "_proj.weight"][0]
    return (score.softmax(0)[..., None] * stack).sum(0)


def forward(c: dict, w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    w = {name: tensor.double() for name, tensor in w.items()}
    eps, block = c["norm_eps"], c["attnres_block_size"]
    x, bank = w["model.embeddings.weight"][ids], []
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        inner = mix([*bank, x], w, p + "attn_res", eps) if bank else x
        if block and 2 * i % block == 0:  # counted in sublayers
            bank, x = [*bank, x], 0
        x = x + attention(c, w, p + "attn.", rms(inner, w[p + "attn_norm.weight"], eps))
        inner = mix([*bank, x], w, p + "mlp_res", eps) if bank else x
        x = x + mlp(w, p + "mlp.", rms(inner, w[p + "mlp_norm.weight"], eps))
    x = mix([*bank, x], w, "model.res", eps) if bank else x
    return rms(x, w["model.norm.weight"], eps) @ w.get("lm_head.weight", w["model.embeddings.weight"]).T


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, tmp_path_factory):
    """A folder, ids and their logits."""
    config = BASE | VARIANTS[request.param]
    tensors = weights(config, seed=71)
    folder = tmp_path_factory.mktemp("fla") / "fla"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = torch.randint(0, 97, (2, 70), generator=torch.Generator().manual_seed(171))
    return folder, ids, forward(config, tensors, ids)


def test_load_gives_the_logits_of_another_implementation(checkpoint):
    folder, ids, want = checkpoint
    model, info = KdaHybridForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.model_type == "kda_hybrid"
    with torch.no_grad():
        assert_close(model.eval()(ids).logits, want, 2e-4)


def test_converted_folder_gives_the_same_logits(checkpoint, tmp_path):
    folder, ids, want = checkpoint
    convert("to-kda-hybrid", folder, tmp_path / "ours")
    assert config_of(tmp_path / "ours")["model_type"] == "kda_hybrid"
    assert not (tmp_path / "ours" / "released").exists()
    model = KdaHybridForCausalLM.from_pretrained(tmp_path / "ours")
    loaded = KdaHybridForCausalLM.from_pretrained(folder)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    with torch.no_grad():
        assert_close(model.eval()(ids).logits, want, 2e-4)


def test_saved_again_it_is_ours(checkpoint, tmp_path):
    folder, ids, want = checkpoint
    KdaHybridForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "ours")
    assert config_of(tmp_path / "ours")["model_type"] == "kda_hybrid"
    with torch.no_grad():
        assert_close(KdaHybridForCausalLM.from_pretrained(tmp_path / "ours")(ids).logits, want, 2e-4)


def test_generation_goes_on_where_the_prompt_ends(checkpoint):
    folder, ids, want = checkpoint
    model = KdaHybridForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        first = model(ids[:, :66], use_cache=True)
        rest = [model(ids[:, i : i + 1], past_key_values=first.past_key_values).logits for i in range(66, 70)]
    assert_close(torch.cat([first.logits, *rest], 1), want, 2e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn", {"layers": [1], "num_heads": 4}),
        ("allow_neg_eigval", True),
        ("num_v_heads", 6),
        ("expand_v", 2.0),
        ("use_short_conv", False),
        ("hidden_act", "gelu"),
        ("attnres_block_size", 3),
    ],
)
def test_what_cannot_be_read_is_named(field, value, tmp_path, capsys):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "config.json").write_text(json.dumps(BASE | {field: value}))
    save_file(weights(BASE, 3), tmp_path / "fla" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"`{field}`"):
        KdaHybridConfig.from_pretrained(tmp_path / "fla")
    with pytest.raises(ValueError, match=f"`{field}`"):
        KdaHybridForCausalLM.from_pretrained(tmp_path / "fla")
    assert main(["to-kda-hybrid", str(tmp_path / "fla"), str(tmp_path / "out")]) == 1
    assert f"`{field}`" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["fla"]


@pytest.mark.parametrize("tool", ["to-kimi-linear", "to-kimi-k3"])
def test_to_a_release_names_the_bias_that_it_has_no_place_for(checkpoint, tmp_path, capsys, tool):
    folder, _, _ = checkpoint
    convert("to-kda-hybrid", folder, tmp_path / "ours")
    assert main([tool, str(tmp_path / "ours"), str(tmp_path / "out")]) == 1
    assert "linear_output_gate_bias" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
