# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What the state of a Kimi Delta Attention layer remembers
#
# A KDA head keeps one matrix. Every token first fades it, each key channel at its own rate, then overwrites what it
# holds under the token's key. So each channel has a half-life, which depends on the text. This page computes the
# recurrence by hand, then measures the half-lives of the small trained model.

# %%
import math

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import modeling_kda
from modeling_kda import KdaCall, KdaHybridCache, kda


logging.disable_progress_bar()

# %% [markdown]
# ## 1. The recurrence, and `kda()`
#
# For one row, one head, keys of width 24 and values of width 40. `kda()` takes raw tensors: it normalises the queries
# and keys, and turns the gate into a decay and `beta` into a write strength.

# %%
torch.manual_seed(0)
tokens, key, value = 100, 24, 40
q, k, gate = torch.randn(3, tokens, key)
v, beta = torch.randn(tokens, value), torch.randn(tokens)
A_log, dt_bias = torch.tensor([0.5]), torch.randn(key) - 3

S, outputs = torch.zeros(value, key), []
unit_q, unit_k = F.normalize(q, dim=-1) / math.sqrt(key), F.normalize(k, dim=-1)
g = -A_log.exp() * F.softplus(gate + dt_bias)  # log decay, natural
for t in range(tokens):
    S = S * g[t].exp()  # forget
    S = S + beta[t].sigmoid() * torch.outer(v[t] - S @ unit_k[t], unit_k[t])  # overwrite
    outputs.append(S @ unit_q[t])  # read

row = {name: x[None, :, None] for name, x in {"q": q, "k": k, "v": v, "gate": gate, "beta": beta}.items()}
o, state = kda(KdaCall(**row, A_log=A_log, dt_bias=dt_bias))
difference_o = (o[0, :, 0] - torch.stack(outputs)).abs().max().item()
difference_state = (state[0, 0] - S).abs().max().item()
print("1. The recurrence by hand against kda(), largest differences")
print(f"   outputs {difference_o:.0e}, final state {difference_state:.0e}")

# %% [markdown]
# ## 2. Half-lives
#
# The gate of a layer is what its `f_b_proj` returns. A channel with log decay $g$ halves in $\ln 2 / -g$ tokens, where
# $g$ is the mean over a text: the beginning of *Moby-Dick*.

# %%
TEXT = """\
Call me Ishmael. Some years ago--never mind how long precisely--having little or no money in my purse, and nothing \
particular to interest me on shore, I thought I would sail about a little and see the watery part of the world. It is \
a way I have of driving off the spleen and regulating the circulation. Whenever I find myself growing grim about the \
mouth; whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before coffin \
warehouses, and bringing up the rear of every funeral I meet; and especially whenever my hypos get such an upper hand \
of me, that it requires a strong moral principle to prevent me from deliberately stepping into the street, and \
methodically knocking people's hats off--then, I account it high time to get to sea as soon as I can."""

model = AutoModelForCausalLM.from_pretrained(modeling_kda.EMBEDDED_MODEL, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(modeling_kda.EMBEDDED_MODEL)
ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]

kinds = model.config.layer_types
layers = {i: model.model.layers[i].self_attn for i, kind in enumerate(kinds) if kind == "linear_attention"}
gates, hooks = {}, []
for i, layer in layers.items():
    hooks.append(layer.f_b_proj.register_forward_hook(lambda module, args, out, i=i: gates.update({i: out[0]})))
with torch.no_grad():
    model(ids)
for hook in hooks:
    hook.remove()

half_lives = {}  # tokens, [heads, key] for each layer
with torch.no_grad():
    for i, layer in layers.items():
        rate = layer.A_log.exp().unsqueeze(-1)  # [heads, 1]
        channels = (gates[i] + layer.dt_bias).unflatten(-1, (len(rate), -1))  # [tokens, heads, key]
        half_lives[i] = math.log(2) / (rate * F.softplus(channels)).mean(0)

print(f"\n2. Half-lives of the key channels over {ids.shape[1]} tokens of Moby-Dick, in tokens\n")
print("layer  head  shortest    median   longest")
for i, table in half_lives.items():
    for head, lives in enumerate(table):
        print(f"{i:>5}{head:>6}{lives.min():>10.2f}{lives.median():>10.1f}{lives.max():>10.0f}")

# %%
try:
    import matplotlib.pyplot as plt
except ImportError:
    print("\nmatplotlib is not installed, so there is no plot")
else:
    figure, axes = plt.subplots(figsize=(7, 4))
    for i, table in half_lives.items():
        axes.semilogy(table.flatten().sort().values, label=f"layer {i}")
    axes.set(xlabel="key channels of all heads, sorted", ylabel="half-life (tokens)")
    axes.legend()
    plt.show()

# %% [markdown]
# ## 3. The trace of one word
#
# The same text with another first word: how much of the difference is left in the first layer's state afterwards? The
# short convolution carries a word into the three tokens after it, so the count starts there. From then on the same
# words are written to both states: the difference shrinks as channels fade, and where a similar key is overwritten.

# %%
other = ids.clone()
other[0, 0] = tokenizer(" Whale")["input_ids"][0]


def states(ids: torch.Tensor) -> list[torch.Tensor]:
    """The first layer's state `[1, heads, value, key]` after each token."""
    cache, seen = KdaHybridCache(model.config), []
    for token in ids.split(1, dim=1):
        model(token, cache=cache)
        seen.append(cache.layers[0].state.clone())
    return seen


carried = model.config.linear_conv_kernel_dim - 1
last = carried + 128
with torch.no_grad():
    traces = [(a - b).norm().item() for a, b in zip(states(ids[:, : last + 1]), states(other[:, : last + 1]))]
print("\n3. What is left of the first word in the first layer's state\n")
print("tokens later   share")
for later in (0, 1, 2, 4, 8, 16, 32, 64, 128):
    print(f"{later:>12}{traces[carried + later] / traces[carried]:>8.2f}")
