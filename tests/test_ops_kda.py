"""ops_kda.py: what a call may look like, and which backend runs it."""

import logging
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import TOLERANCE, assert_close, tiny_model, token_ids
from test_ops_torch import TENSORS, check, make_call, outcome, without_gradients

from modeling_kda import KdaCall, backend_report, kda, ops_kda, ops_launch, ops_reference, ops_torch, use_backend


class Spy:
    """Counts the calls that reach a backend."""

    def __init__(self, monkeypatch, *backends):
        self.ran = []
        for backend in backends:
            monkeypatch.setattr(backend, "run", self._watched(backend))

    def _watched(self, backend):
        run = backend.run

        def watched(call):
            self.ran.append(backend.NAME)
            return run(call)

        return watched


@pytest.fixture
def spy(monkeypatch) -> Spy:
    return Spy(monkeypatch, ops_torch, ops_reference)


def made_up(name: str, why_not: str | None = None, refuses: str | None = None, error: Exception | None = None):
    """A backend that gives zeros."""

    def run(call: KdaCall):
        if error is not None:
            raise error
        return torch.zeros_like(call.v), call.initial_state(torch.float32)

    return SimpleNamespace(NAME=name, why_not=lambda: why_not, refuses=lambda call: refuses, run=run)


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("T", [0, 1, 70])
def test_kda_is_the_recurrence(backend, T):
    call = make_call(2, T)

    def run(call):
        with use_backend(backend):
            return kda(call)

    check(call, TOLERANCE[torch.float32], outcome(run, call))
    check(call, TOLERANCE[torch.float32], without_gradients(call, run))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("T", [5, 70])
def test_kda_ignores_autocast(backend, T):
    """Decays and states stay in float32."""
    call = make_call(T=T)

    def run(call):
        with use_backend(backend), torch.autocast("cpu", torch.bfloat16):
            return kda(call)

    check(call, TOLERANCE[torch.float32], outcome(run, call))
    check(call, TOLERANCE[torch.float32], without_gradients(call, run))


def test_kda_ignores_autocast_around_the_backward():
    call = make_call()
    with torch.autocast("cpu", torch.bfloat16):
        got = outcome(kda, call)
    check(call, TOLERANCE[torch.float32], got)


WRONG = {
    "k": lambda c: {"k": c.k[..., :-1]},
    "v": lambda c: {"v": c.v[:, :-1]},
    "gate": lambda c: {"gate": c.gate[:, :, :1]},
    "beta": lambda c: {"beta": c.beta.unsqueeze(-1)},
    "A_log": lambda c: {"A_log": c.A_log.view(1, 1, -1, 1)},
    "dt_bias": lambda c: {"dt_bias": c.dt_bias.view(c.q.shape[2:])},
    "state": lambda c: {"state": c.state.mT},  # keys and values exchanged
}
MUST_BE = {
    "k": (2, 5, 3, 7),
    "v": (2, 5, 3, 10),
    "gate": (2, 5, 3, 7),
    "beta": (2, 5, 3),
    "A_log": (3,),
    "dt_bias": (21,),
    "state": (2, 3, 10, 7),
}


@pytest.mark.parametrize("field", WRONG)
def test_kda_names_the_field_of_a_wrong_shape(field):
    call = make_call(2, 5, 3)
    wrong = WRONG[field](call)
    with pytest.raises(ValueError, match=f"`{field}`") as error:
        kda(replace(call, **wrong))
    assert str(tuple(wrong[field].shape)) in str(error.value)
    assert str(MUST_BE[field]) in str(error.value)


@pytest.mark.parametrize("field", TENSORS)
def test_kda_names_the_field_of_a_wrong_dtype(field):
    call = make_call(2, 5, 3)
    with pytest.raises(ValueError, match=f"`{field}`.*torch.int64.*torch.bfloat16"):
        kda(replace(call, **{field: getattr(call, field).long()}))


@pytest.mark.parametrize("ndim", [2, 3, 5])
def test_kda_names_q_if_its_dimensions_are_wrong(ndim):
    call = make_call(2, 5, 3)
    with pytest.raises(ValueError, match="`q`"):
        kda(replace(call, q=torch.zeros((2, 5, 3, 7, 1)[:ndim])))


def test_kda_names_v_if_its_dimensions_are_wrong():
    call = make_call(2, 5, 3)
    with pytest.raises(ValueError, match="`v`"):
        kda(replace(call, v=torch.tensor(1.0)))


def test_kda_wants_all_on_one_device():
    call = make_call(2, 5, 3)
    with pytest.raises(ValueError, match="`A_log` is on meta, `q` on cpu"):
        kda(replace(call, A_log=call.A_log.to("meta")))


@pytest.mark.parametrize("T", [8, 40])
def test_kda_is_right_in_forward_mode(T):
    call = make_call(T=T)

    _, (along, along_state) = torch.func.jvp(lambda v: kda(replace(call, v=v)), (call.v,), (call.v.sin(),))
    # It is linear in the values: without a state to begin with, that of the change is the change.
    want, state = ops_reference.run(replace(call, v=call.v.sin(), state=None))
    assert_close(along, want, 1e-6)
    assert_close(along_state, state, 1e-6)


@pytest.mark.parametrize("bound", [0.0, 5.0, float("nan")])
def test_kda_wants_a_bound_below_zero(bound):
    with pytest.raises(ValueError, match=r"`lower_bound`.*below 0.*None"):
        kda(make_call(bound=bound))


@pytest.mark.parametrize("borders", [[0, 40], [1, 70], [0, 50, 40, 70], [0, 71], []])
def test_kda_wants_borders_from_0_to_the_last_token(borders):
    call = replace(make_call(T=70, with_state=False), cu_seqlens=torch.tensor(borders, dtype=torch.long))
    with pytest.raises(ValueError, match=r"`cu_seqlens`.*70"):
        kda(call)


def test_kda_wants_one_row_of_packed_documents():
    with pytest.raises(ValueError, match=r"`cu_seqlens`.*one row.*2"):
        kda(replace(make_call(2, 70, with_state=False), cu_seqlens=torch.tensor([0, 70])))


def test_kda_wants_one_state_for_each_document():
    call = replace(make_call(1, 70), cu_seqlens=torch.tensor([0, 30, 70]))
    with pytest.raises(ValueError, match=r"`state` has shape \(1, 2, 10, 7\).*\(2, 2, 10, 7\)"):
        kda(call)


def test_use_backend_runs_that_backend_and_no_other(spy):
    call = make_call(T=3)
    kda(call)
    with use_backend("reference"):
        kda(call)
        with use_backend("torch"):
            kda(call)
            with use_backend("auto"):
                kda(call)
        kda(call)
    kda(call)
    assert spy.ran == ["torch", "reference", "torch", "torch", "reference", "torch"]


def test_use_backend_is_restored_after_an_exception(spy):
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError("made up")
    kda(make_call(T=3))
    assert spy.ran == ["torch"]


def test_use_backend_is_undone_whoever_leaves_first(spy):
    """As threads do."""
    first, second = use_backend("torch"), use_backend("reference")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    kda(make_call(T=3))
    second.__exit__(None, None, None)
    kda(make_call(T=3))
    assert spy.ran == ["reference", "torch"]
    assert ops_kda._choice == "auto"


def test_kernels_are_for_gpus_of_nvidia_from_ampere_on(monkeypatch):
    x = SimpleNamespace(device=torch.device("cuda", 1), is_cuda=True)
    monkeypatch.setattr(ops_launch, "_capability", lambda device: {1: (7, 5)}.get(device.index, (8, 0)))
    assert ops_launch.unfit(x) == "a GPU from before Ampere"
    x.device = torch.device("cuda", 0)
    assert ops_launch.unfit(x) is None
    with torch.autograd.forward_ad.dual_level():  # which a kernel would lose
        assert "forward-mode" in ops_launch.unfit(x)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert ops_launch.unfit(x) == "a GPU that is not NVIDIA's"


@pytest.mark.parametrize(("name", "near"), [("tourch", "torch"), ("refrence", "reference"), ("Auto", "auto")])
def test_use_backend_suggests_the_nearest_name(name, near):
    with (
        pytest.raises(ValueError, match=f"{name!r}.*'auto', .*'torch', 'reference'.*Did you mean {near!r}"),
        use_backend(name),
    ):
        pass


@pytest.mark.parametrize("objection", ["why_not", "refuses"])
def test_use_backend_raises_the_reason_if_it_cannot_run(monkeypatch, objection, spy):
    monkeypatch.setattr(ops_kda, "BACKENDS", (made_up("new", **{objection: "made up"}), *ops_kda.BACKENDS))
    with use_backend("new"), pytest.raises(RuntimeError, match="new: made up"):
        kda(make_call(T=3))
    assert spy.ran == []


@pytest.mark.parametrize("objection", ["why_not", "refuses"])
def test_kda_passes_over_a_backend_that_objects_and_says_so_once(monkeypatch, caplog, objection, spy):
    reason = f"made up for the test of {objection}"
    monkeypatch.setattr(ops_kda, "BACKENDS", (made_up("new", **{objection: reason}), *ops_kda.BACKENDS))
    with caplog.at_level(logging.INFO, logger=ops_kda.logger.name):
        for _ in range(3):
            kda(make_call(T=3))
    assert spy.ran == ["torch"] * 3
    [told] = [record.getMessage() for record in caplog.records if reason in record.getMessage()]
    assert told.startswith(f"KDA runs on backend 'torch', because others cannot: new: {reason}; ")


def test_kda_takes_the_first_backend_that_does_not_object(monkeypatch, spy):
    monkeypatch.setattr(ops_kda, "BACKENDS", (made_up("new"), *ops_kda.BACKENDS))
    o, _ = kda(make_call(T=3))
    assert (o == 0).all()
    assert spy.ran == []


def test_kda_raises_what_a_backend_raises(monkeypatch, spy):
    """An error is no reason to try the next backend."""
    error = NotImplementedError("made up")
    monkeypatch.setattr(ops_kda, "BACKENDS", (made_up("new", error=error), *ops_kda.BACKENDS))
    with pytest.raises(NotImplementedError, match="made up"):
        kda(make_call(T=3))
    assert spy.ran == []


def test_kda_lists_all_reasons_if_nothing_can_run(monkeypatch):
    monkeypatch.setattr(ops_kda, "BACKENDS", (made_up("one", why_not="first"), made_up("two", refuses="second")))
    with pytest.raises(RuntimeError, match="one: first; two: second"):
        kda(make_call(T=3))


class Broken:
    """Finds a package that raises when it is imported."""

    def __init__(self, package: str, error: Exception):
        self.package, self.error = package, error

    def find_spec(self, name: str, *_):
        if name.split(".")[0] == self.package:
            raise self.error


@pytest.mark.parametrize("error", [ImportError, RuntimeError, OSError, AttributeError], ids=lambda x: x.__name__)
@pytest.mark.parametrize(
    ("package", "backend"), [("triton", "triton"), ("fla", "fla"), ("flash_kda", "flash_kda")], ids=lambda x: x
)
def test_model_runs_and_the_report_says_why_with_a_broken_package(monkeypatch, package, backend, error):
    model, ids = tiny_model(), token_ids(5)
    want = model(ids).logits
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in list(sys.modules):
        if name.split(".")[0] == package or name == "modeling_kda.kernels_kda":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(package, error("made up")), *sys.meta_path])
    [line] = [line for line in backend_report().splitlines() if line.split()[0] == backend]
    assert "not available" in line
    assert package in line
    assert (backend == "triton" and error is ImportError) or "made up" in line
    assert torch.equal(model(ids).logits, want)


@pytest.mark.parametrize("version", ["0.5.2", "0.7.0", None])
def test_report_says_that_fla_is_too_old_or_too_new(monkeypatch, version):
    parts = {name: ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.kda")}
    parts["fla"].ops, parts["fla.ops"].kda = parts["fla.ops"], parts["fla.ops.kda"]
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, name, module)
    if version is not None:
        parts["fla"].__version__ = version
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert f"not available: fla-core is {version or 0}; at least 0.6.0, below 0.7.0 is needed" in backend_report()
    parts["fla"].__version__ = "0.6.1"
    assert "fla        ready" in backend_report()


def test_backend_report_lists_all(monkeypatch):
    monkeypatch.setattr(ops_kda, "BACKENDS", (made_up("new", why_not="made up"), ops_torch, ops_reference))
    with use_backend("torch"):
        title, *lines = backend_report().splitlines()
    assert "torch" in title
    assert [line.split(maxsplit=1) for line in lines] == [
        ["new", "not available: made up"],
        ["torch", "ready"],
        ["reference", "ready"],
    ]


@pytest.mark.parametrize("backend", ops_kda.BACKENDS)
def test_every_backend_has_the_names_of_one(backend):
    assert isinstance(backend.NAME, str)
    assert backend.why_not() is None or isinstance(backend.why_not(), str)
    assert callable(backend.refuses)
    assert callable(backend.run)
