"""ops_mixer.py: the parts of a layer between its projections against each other, document by document."""

from dataclasses import replace

import pytest
import torch
from helpers import assert_close
from torch import Tensor

from modeling_kda import ops_reference
from modeling_kda.ops_mixer import MixerCall, Packing, compose, convolve
from modeling_kda.ops_reference import short_convolution


def make_mixer_call(
    B: int = 2,
    T: int = 1,
    H: int = 3,
    K: int = 12,
    V: int = 20,
    W: int = 4,
    bound: float | None = None,
    with_past: bool = True,
    cu_seqlens: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **fields,
) -> MixerCall:
    """A random call. The rates spread the decays of a token from e^-0.01 to about e^-10 (or to the bound)."""
    noise = torch.Generator().manual_seed(seed)
    packing = None if cu_seqlens is None else Packing(torch.tensor(cu_seqlens), T, W)
    N = B if packing is None else len(packing)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise)

    return MixerCall(
        q=random(B, T, H * K).to(dtype),
        k=random(B, T, H * K).to(dtype),
        v=random(B, T, H * V).to(dtype),
        taps=(random(H * K, W), random(H * K, W), random(H * V, W)),
        window=random(N, W - 1, H * (2 * K + V)).to(dtype) if with_past else None,
        gate=random(B, T, H, K).mul(2).to(dtype),
        beta=random(B, T, H).mul(2).to(dtype),
        A_log=random(H),
        dt_bias=random(H * K).sub(1),
        lower_bound=bound,
        state=random(N, H, V, K) if with_past else None,
        out_gate=random(B, T, H, V).to(dtype),
        norm=random(V).add(1),
        eps=1e-5,
        packing=packing,
        **fields,
    )


def in_double(call: MixerCall) -> MixerCall:
    """`call` with every float tensor in float64."""
    wider = {name: x.double() for name, x in vars(call).items() if isinstance(x, Tensor) and x.is_floating_point()}
    return replace(call, **wider, taps=tuple(x.double() for x in call.taps))


def truth(call: MixerCall) -> dict[str, Tensor]:
    """The parts in float64, the recurrence token by token."""
    return named(compose(in_double(replace(call, overwrite=False)), ops_reference.run))


def named(outcome: tuple) -> dict[str, Tensor]:
    o, state, window, moved = outcome
    found = {"o": o, "state": state, "window": window}
    return found if moved is None else {**found, **dict(zip(("k", "g", "writes"), moved))}


CUTS = {"rows": None, "documents": [0, 3, 3, 4, 11], "one document": [0, 11], "nothing": [0, 0]}


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("with_past", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_convolve_takes_each_document_after_its_own_window(cut, with_past, W):
    borders = CUTS[cut]
    T = 11 if borders is None else borders[-1]
    call = make_mixer_call(3 if borders is None else 1, T, W=W, with_past=with_past, cu_seqlens=borders)
    *got, after = convolve(call)
    inputs, taps = torch.cat([call.q, call.k, call.v], -1), torch.cat(call.taps)
    documents = inputs if borders is None else inputs[0].split(torch.tensor(borders).diff().tolist())
    outputs = []
    for n, document in enumerate(documents):
        start = torch.zeros(W - 1, inputs.shape[2]) if call.window is None else call.window[n]
        whole = torch.cat([start, document])
        outputs.append(short_convolution(whole.unsqueeze(0), taps)[0])
        assert torch.equal(after[n], whole[len(whole) - W + 1 :]), f"window {n}"
    want = torch.stack(outputs) if borders is None else torch.cat(outputs).unsqueeze(0)
    assert_close(torch.cat(got, -1), want, absolute=1e-6)


def test_compose_changes_nothing_where_there_is_no_token():
    call = make_mixer_call(3, 1, real=torch.tensor([[True], [False], [True]]), records=True)
    whole, got = named(compose(replace(call, real=None), ops_reference.run)), named(compose(call, ops_reference.run))
    for name in whole:
        assert torch.equal(got[name][::2], whole[name][::2]), name
    assert torch.equal(got["state"][1], call.state[1])
    assert torch.equal(got["window"][1], call.window[1])
    assert not got["g"][1].any()
    assert not got["writes"][1].any()
