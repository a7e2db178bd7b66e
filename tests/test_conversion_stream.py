"""conversion/stream.py: killed runs go on, damaged checkpoints and full disks are named, and little is in memory."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from checkpoint_bytes import (
    INDEX,
    SINGLE,
    Raw,
    assert_same_tensors,
    convert,
    everything,
    fails,
    head_of,
    k3_release,
    random_bytes,
    read_file,
    read_folder,
    write_file,
    write_folder,
    write_sparse,
)

from conversion import stream
from conversion.__main__ import main


ROOT = Path(__file__).parents[1]
SMALL = ["--max-shard-size", "100KB"]
MOE = "language_model.model.layers.1.block_sparse_moe."

# A process that reads orders, one a line, and runs the tool for each in a process of its own, which may be killed at
# its n-th call of what writes: importing everything takes longer than a conversion.
CLERK = """
import json, os, signal, sys, threading
import torch
from conversion.__main__ import main

def memory(field):
    [line] = [x for x in open("/proc/self/status") if x.startswith(field)]
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
answers, quiet = os.dup(1), os.open(os.devnull, os.O_WRONLY)
os.dup2(quiet, 1)
os.dup2(quiet, 2)
for order in map(json.loads, sys.stdin):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        calls, lock = [], threading.Lock()

        def counted(name):
            real = getattr(os, name)

            def call(*arguments, **named):
                with lock:
                    calls.append(name)
                    last = len(calls) == order.get("kill")
                if last and name == "pwrite":  # in the middle of it
                    file, data, start = arguments
                    real(file, memoryview(data)[: len(data) // 2], start)
                if last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **named)

            setattr(os, name, call)

        for name in ("pwrite", "replace", "fsync", "unlink"):
            counted(name)
        before = memory("VmRSS")
        code = main(order["arguments"])
        found = {"code": code, "calls": calls, "grown": memory("VmHWM") - before}
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    os.write(answers, (json.dumps({"signal": killed, **json.loads(said or "{}")}) + "\\n").encode())
"""


@pytest.fixture(scope="module")
def clerk():
    """`clerk(*arguments, kill=n)` runs the tool in another process; returns what became of it."""
    if not sys.platform.startswith("linux"):
        pytest.skip("processes are forked and their memory is read as on Linux")
    process = subprocess.Popen(
        [sys.executable, "-c", CLERK], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def run(*arguments, **order):
        process.stdin.write(json.dumps({"arguments": [*map(str, arguments)], **order}) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield run
    process.stdin.close()
    assert process.wait(60) == 0


@pytest.fixture(scope="module")
def big(tmp_path_factory, clerk):
    """About 6 MB in seven files; what they become without interruption; and the calls that this takes."""
    config, shapes = k3_release(layers=6, hidden=128, experts=10, latent=192, width=256)
    folder = tmp_path_factory.mktemp("big")
    source = write_folder(folder / "source", config, random_bytes(shapes), 7)
    done = clerk("to-kda-hybrid", source, folder / "whole", "--max-shard-size", "300KB")
    assert done["code"] == 0
    assert len(list((folder / "whole").glob("*.safetensors"))) > 12
    return source, folder / "whole", done["calls"]


@pytest.fixture
def source(tmp_path):
    """A small release in three files."""
    config, shapes = k3_release()
    return write_folder(tmp_path / "source", config, random_bytes(shapes), 3)


def fill_disk_at(monkeypatch, call: str, at: int) -> None:
    """From its `at`-th call on, `os.<call>` finds no room."""
    real, count = getattr(os, call), [0]

    def full(*arguments):
        count[0] += 1
        if count[0] >= at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(os, call, full)


def interrupt(monkeypatch, *arguments) -> None:
    """Leaves a `.partial` folder with three finished shards."""
    with monkeypatch.context() as patch:
        fill_disk_at(patch, "posix_fallocate", 4)
        assert main([*map(str, arguments)]) == 1


def states(folder: Path) -> dict[str, tuple[int, int]]:
    """Which file each shard is, and when it was written last."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.safetensors")}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Killed


def test_write_makes_the_release_that_went_in(big, tmp_path):
    source, whole, _ = big
    convert("to-kimi-k3", whole, tmp_path / "back")
    assert_same_tensors(read_folder(tmp_path / "back"), read_folder(source))


def test_killed_run_goes_on_and_ends_the_same(big, clerk, tmp_path):
    """Killed at ten seeded calls, and at the last but one, when all is written and the folder gets its name."""
    source, whole, calls = big
    want, target, partial = everything(whole), tmp_path / "target", tmp_path / "target.partial"
    points = sorted(random.Random(5).sample(range(1, len(calls) - 2), 10))
    arguments = ("to-kda-hybrid", source, target, "--max-shard-size", "300KB")
    for point in (*points, len(calls) - 1):
        assert clerk(*arguments, kill=point)["signal"] == signal.SIGKILL
        assert names(tmp_path) == ["target.partial"], point
        finished = states(partial)
        assert all((partial / name).read_bytes() == want[name] for name in finished), "a file has its name too early"
        if finished:  # the last of them may not be in the journal yet
            del finished[max(finished, key=lambda name: finished[name][1])]
        assert clerk(*arguments)["code"] == 0
        assert everything(target) == want, point
        assert names(tmp_path) == ["target"], point
        assert finished.items() <= states(target).items(), f"{point}: a finished shard was written again"
        shutil.rmtree(target)


def test_run_that_is_killed_again_and_again_ends_the_same(big, clerk, tmp_path):
    source, whole, calls = big
    steps = 0
    while not (tmp_path / "target").exists():
        steps += 1
        arguments = ("to-kda-hybrid", source, tmp_path / "target", "--max-shard-size", "300KB", "--workers", 4)
        done = clerk(*arguments, kill=len(calls) // 6)
        assert done["signal"] == signal.SIGKILL or done["code"] == 0
    assert 5 < steps < 20
    assert everything(tmp_path / "target") == everything(whole)
    assert names(tmp_path) == ["target"]


def test_killed_replacement_leaves_one_whole_folder(big, clerk, tmp_path):
    """With `--force`, at the calls that change names, there is the old folder or the new one."""
    source, whole, calls = big
    want, target = everything(whole), tmp_path / "target"
    arguments = ("to-kda-hybrid", source, target, "--max-shard-size", "300KB", "--force")
    for point in range(len(calls) - 1, len(calls) + 2):
        target.mkdir()
        (target / "old").write_text("old")
        assert clerk(*arguments, kill=point)["signal"] == signal.SIGKILL
        assert any(everything(path) in (want, {"old": b"old"}) for path in tmp_path.iterdir()), point
        assert clerk(*arguments)["code"] == 0
        assert everything(target) == want, point
        assert names(tmp_path) == ["target"], point
        shutil.rmtree(target)


@pytest.mark.parametrize("workers", [1, 4])
def test_number_of_workers_changes_nothing(big, tmp_path, workers):
    source, whole, _ = big
    convert("to-kda-hybrid", source, tmp_path / "again", "--max-shard-size", "300KB", "--workers", workers)
    assert everything(tmp_path / "again") == everything(whole)


def test_memory_grows_by_less_than_three_shards(clerk, tmp_path):
    config, shapes = k3_release(layers=11, hidden=256, experts=64, latent=1024, width=512)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    places, total, largest = {}, 0, 0
    for layer in range(12):  # sparse files: zeros that take no room, and as much memory as others when they are read
        part = f".layers.{layer}." if layer < 11 else ".layers."
        chosen = {name: shape for name, shape in shapes.items() if (part in name) == (layer < 11)}
        path = tmp_path / "source" / f"model-{layer}.safetensors"
        size = write_sparse(path, chosen)
        places |= dict.fromkeys(chosen, path.name)
        total, largest = total + size, max(largest, size)
    (tmp_path / "source" / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert total > 500e6
    done = clerk("to-kda-hybrid", tmp_path / "source", tmp_path / "target", "--max-shard-size", "60MB")
    assert done["code"] == 0
    written = [path.stat().st_size for path in (tmp_path / "target").glob("*.safetensors")]
    shutil.rmtree(tmp_path)
    assert abs(sum(written) - total) < 1e6
    assert done["grown"] <= 3 * max(largest, *written), f"{done['grown']:,} bytes"


# What is in the way


def test_existing_target_is_replaced_only_with_force(source, tmp_path, capsys):
    target = tmp_path / "target"
    (target / "below").mkdir(parents=True)
    for name in ("config.json", "old.safetensors", "below/old"):
        (target / name).write_text(name)
    before = everything(target)
    assert "--force" in fails(capsys, "to-kda-hybrid", source, target, *SMALL)
    assert everything(target) == before
    assert names(tmp_path) == ["source", "target"]
    convert("to-kda-hybrid", source, target, "--force", *SMALL)
    convert("to-kda-hybrid", source, tmp_path / "fresh", *SMALL)
    assert everything(target) == everything(tmp_path / "fresh")
    assert names(tmp_path) == ["fresh", "source", "target"]


def test_source_is_never_the_target(source, capsys):
    before = everything(source)
    assert "which is read" in fails(capsys, "to-kda-hybrid", source, source.parent / "source", "--force")
    assert everything(source) == before


@pytest.mark.parametrize("change", ["time", "bytes", "--unpack", "--max-shard-size"])
def test_what_another_conversion_left_is_in_the_way(source, tmp_path, monkeypatch, capsys, change):
    target, options = tmp_path / "target", [*SMALL]
    interrupt(monkeypatch, "to-kda-hybrid", source, target, *options)
    shard = sorted(source.glob("*.safetensors"))[1]
    if change == "time":
        os.utime(shard, ns=(1, shard.stat().st_mtime_ns + 1))
    elif change == "bytes":
        data = shard.read_bytes()
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(shard, ns=(1, shard.stat().st_mtime_ns + 1))
    elif change == "--unpack":
        options += ["--unpack"]
    else:
        options = ["--max-shard-size", "50KB"]
    left = everything(tmp_path / "target.partial")
    said = fails(capsys, "to-kda-hybrid", source, target, *options)
    assert "target.partial" in said
    assert "--force" in said
    assert everything(tmp_path / "target.partial") == left
    convert("to-kda-hybrid", source, target, *options, "--force")
    convert("to-kda-hybrid", source, tmp_path / "fresh", *options)
    assert everything(target) == everything(tmp_path / "fresh")
    assert names(tmp_path) == ["fresh", "source", "target"]


def test_folder_that_no_conversion_left_is_not_removed(source, tmp_path, capsys):
    """A folder may be named so by chance."""
    (tmp_path / "target.partial").mkdir()
    (tmp_path / "target.partial" / "thesis.txt").write_text("mine")
    assert "target.partial" in fails(capsys, "to-kda-hybrid", source, tmp_path / "target")
    assert everything(tmp_path / "target.partial") == {"thesis.txt": b"mine"}


# The disk


@pytest.mark.parametrize(
    ("call", "at"), [("posix_fallocate", 1), ("posix_fallocate", 4), ("pwrite", 1), ("pwrite", 60)]
)
def test_full_disk_is_said_and_the_next_run_goes_on(source, tmp_path, monkeypatch, capsys, call, at):
    if not hasattr(os, call):
        pytest.skip(f"no {call} here")
    target = tmp_path / "target"
    with monkeypatch.context() as patch:
        fill_disk_at(patch, call, at)
        said = fails(capsys, "to-kda-hybrid", source, target, *SMALL)
    assert "disk is full" in said
    assert "target.partial" in said
    assert names(tmp_path) == ["source", "target.partial"]
    finished = states(tmp_path / "target.partial")
    assert bool(finished) == (at > 1)
    convert("to-kda-hybrid", source, target, *SMALL)
    assert finished.items() <= states(target).items()
    convert("to-kda-hybrid", source, tmp_path / "fresh", *SMALL)
    assert everything(target) == everything(tmp_path / "fresh")


def test_too_little_space_is_refused_before_anything_is_written(source, tmp_path, monkeypatch, capsys):
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
        said = fails(capsys, "to-kda-hybrid", source, tmp_path / "target", *SMALL)
    assert "1,000 are free" in said
    assert not list(tmp_path.glob("target*/*.safetensors*"))
    assert not (tmp_path / "target").exists()
    # Nothing was written, so nothing is in the way of other options.
    convert("to-kda-hybrid", source, tmp_path / "target", "--unpack")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path, -1),
        lambda path: flip(path, head_of(path)[1]),
        lambda path: flip(path, 30),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"0"),
    ],
    ids=["last byte", "first byte", "head", "cut off", "longer"],
)
def test_bytes_that_change_on_the_disk_are_found(source, tmp_path, monkeypatch, capsys, damage):
    verify, target = stream._verify, tmp_path / "target"

    def after_damage(shards, partial, done):
        damage(partial / "model-00003-of-00006.safetensors")
        return verify(shards, partial, done)

    with monkeypatch.context() as patch:
        patch.setattr(stream, "_verify", after_damage)
        assert "model-00003-of-00006.safetensors" in fails(capsys, "to-kda-hybrid", source, target, *SMALL)
    assert not target.exists()
    finished = states(tmp_path / "target.partial")
    assert len(finished) == 5
    convert("to-kda-hybrid", source, target, *SMALL)
    assert finished.items() <= states(target).items()
    convert("to-kda-hybrid", source, tmp_path / "fresh", *SMALL)
    assert everything(target) == everything(tmp_path / "fresh")


def test_finished_shard_that_was_damaged_before_the_next_run_is_found(source, tmp_path, monkeypatch, capsys):
    target = tmp_path / "target"
    interrupt(monkeypatch, "to-kda-hybrid", source, target, *SMALL)
    shard = sorted((tmp_path / "target.partial").glob("*.safetensors"))[0]
    flip(shard, -5)
    assert shard.name in fails(capsys, "to-kda-hybrid", source, target, *SMALL)
    assert not target.exists()
    convert("to-kda-hybrid", source, target, *SMALL)
    convert("to-kda-hybrid", source, tmp_path / "fresh", *SMALL)
    assert everything(target) == everything(tmp_path / "fresh")


# Damaged checkpoints


def change_tensors(folder: Path, change, index: bool = True) -> None:
    """Applies `change` to the tensors of the shard that holds the experts of layer 1, and to the index."""
    places = json.loads((folder / INDEX).read_text())
    path = folder / places["weight_map"][f"{MOE}experts.2.w1.weight_packed"]
    before = read_file(path)
    after = dict(before)
    change(after)
    write_file(path, after)
    if index:
        for name in before.keys() - after.keys():
            del places["weight_map"][name]
        places["weight_map"] |= dict.fromkeys(after, path.name)
        (folder / INDEX).write_text(json.dumps(places))


def change_index(folder: Path, change) -> None:
    places = json.loads((folder / INDEX).read_text())
    change(places)
    (folder / INDEX).write_text(json.dumps(places))


def cut(folder: Path, size: int) -> None:
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:size])


def narrower(name: str):
    def change(tensors):
        dtype, [*shape, width], data = tensors[name]
        tensors[name] = Raw(dtype, [*shape, width // 2], data[: len(data) // 2])

    return change


def put(name: str, at: int, byte: int):
    def change(tensors):
        dtype, shape, data = tensors[name]
        tensors[name] = Raw(dtype, shape, data[:at] + bytes([byte]) + data[at + 1 :])

    return change


def without(*dropped: str):
    return lambda tensors: [tensors.pop(name) for name in dropped]


def with_more(name: str, shape: tuple[int, ...] = (3, 2)):
    return lambda tensors: tensors.update({name: Raw("BF16", [*shape], bytes(2 * shape[0] * shape[1]))})


def twice(folder: Path) -> None:
    """The first tensor of the first shard is also in the last one."""
    first, _, last = sorted(folder.glob("*.safetensors"))
    tensors = read_file(first)
    name = "language_model.model.norm.weight"
    write_file(last, {**read_file(last), name: tensors[name]})


EXPERT, SCALE = f"{MOE}experts.2.w1.weight_packed", f"{MOE}experts.2.w1.weight_scale"
STACK, SHARD = "model.layers.1.mlp.experts.gate_up_proj", "model-00002-of-00003.safetensors"
ROUTER = f"{MOE}gate.weight"
DAMAGES = {
    "shard cut off": (lambda x: cut(x, -10), SHARD),
    "shard of nothing": (lambda x: cut(x, 0), SHARD),
    "head cut off": (lambda x: cut(x, 50), SHARD),
    "shard missing": (lambda x: (x / SHARD).unlink(), SHARD),
    "tensor of another shape": (
        lambda x: change_tensors(x, narrower(ROUTER)),
        "model.layers.1.mlp.gate.weight",
    ),
    "expert of another shape": (lambda x: change_tensors(x, narrower(EXPERT)), STACK),
    "scale of another shape": (lambda x: change_tensors(x, narrower(SCALE)), STACK),
    "tensor missing": (lambda x: change_tensors(x, without(ROUTER)), "model.layers.1.mlp.gate.weight"),
    "expert missing": (lambda x: change_tensors(x, without(EXPERT, SCALE)), STACK),
    "scale missing": (lambda x: change_tensors(x, without(SCALE)), STACK),
    "expert too many": (
        lambda x: change_tensors(x, lambda y: y.update({EXPERT.replace(".2.", ".6."): y[EXPERT]})),
        STACK,
    ),
    "expert that is not packed": (
        lambda x: change_tensors(x, with_more(EXPERT.removesuffix("_packed"), (96, 64))),
        STACK,
    ),
    "tensor unknown": (
        lambda x: change_tensors(x, with_more("language_model.model.layers.1.odd.weight")),
        "layers.1.odd.weight",
    ),
    "layer unknown": (
        lambda x: change_tensors(x, with_more("language_model.model.layers.4.input_layernorm.weight")),
        "layers.4.input_layernorm.weight",
    ),
    "tensor in two shards": (twice, "language_model.model.norm.weight"),
    "tensor that the index does not name": (
        lambda x: change_tensors(x, with_more("odd.weight"), index=False),
        "odd.weight",
    ),
    "tensor that the index alone names": (lambda x: change_tensors(x, without(ROUTER), index=False), ROUTER),
    "index to a parent folder": (
        lambda x: change_index(x, lambda y: y["weight_map"].update({ROUTER: "../evil.safetensors"})),
        "../evil.safetensors",
    ),
    "index to an absolute path": (
        lambda x: change_index(x, lambda y: y["weight_map"].update({ROUTER: "/evil.safetensors"})),
        "/evil.safetensors",
    ),
    "index to a number": (lambda x: change_index(x, lambda y: y["weight_map"].update({ROUTER: 3})), ROUTER),
    "index without a map": (lambda x: change_index(x, lambda y: y.pop("weight_map")), INDEX),
    "index that is no JSON": (lambda x: (x / INDEX).write_text('{"weight_map": {'), INDEX),
    "no config": (lambda x: (x / "config.json").unlink(), "config.json"),
    "config that is no JSON": (lambda x: (x / "config.json").write_text("{'a': 1}"), "config.json"),
    "config that is a list": (lambda x: (x / "config.json").write_text("[1]"), "config.json"),
    "no folder": (shutil.rmtree, "source"),
    "scale that is no number": (lambda x: change_tensors(x, put(SCALE, 7, 255)), "layers.1.*experts"),
    "decays behind the heads": (
        lambda x: change_tensors(x, put("language_model.model.layers.1.self_attn.A_log", 19, 1)),
        "layers.1.self_attn.A_log",
    ),
}
WHILE_WRITING = ("scale that is no number", "decays behind the heads")


@pytest.mark.parametrize(
    ("damage", "options"),
    [(damage, []) for damage in DAMAGES]
    + [(damage, ["--unpack"]) for damage in DAMAGES if damage.startswith(("expert", "scale"))],
    ids=lambda x: " ".join(x) if isinstance(x, list) else x,
)
def test_damaged_checkpoint_is_named_and_nothing_is_made(source, tmp_path, capsys, damage, options):
    (tmp_path / "evil.safetensors").write_bytes((source / SHARD).read_bytes())
    do, name = DAMAGES[damage]
    do(source)
    said = fails(capsys, "to-kda-hybrid", source, tmp_path / "target", *options)
    assert len(said) < 2000
    if "*" in name:
        assert all(part in said for part in name.split("*")), said
    else:
        assert name in said
    assert not (tmp_path / "target").exists()
    if damage not in WHILE_WRITING:
        assert not (tmp_path / "target.partial").exists()


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth"])
def test_weights_that_are_not_safetensors_are_named(source, tmp_path, capsys, file):
    for path in source.glob("*.safetensors*"):
        path.unlink()
    (source / file).write_bytes(b"\x80\x02")
    said = fails(capsys, "to-kda-hybrid", source, tmp_path / "target")
    assert file in said
    assert "safetensors" in said
    assert names(tmp_path) == ["source"]


def test_checkpoint_in_one_file_needs_no_index(source, tmp_path):
    tensors = read_folder(source)
    (tmp_path / "one").mkdir()
    shutil.copyfile(source / "config.json", tmp_path / "one" / "config.json")
    write_file(tmp_path / "one" / SINGLE, tensors)
    for name in ("one", "source"):
        convert("to-kda-hybrid", tmp_path / name, tmp_path / f"from {name}")
    assert_same_tensors(read_folder(tmp_path / "from one"), read_folder(tmp_path / "from source"))


def test_files_are_aligned_whatever_the_sizes(source, tmp_path):
    """Readers map files into memory: a number of four bytes must not start at an odd place."""
    tensors = read_folder(source)
    odd = {
        "vision_tower.a": Raw("U8", [3], bytes(3)),
        "vision_tower.b": Raw("BF16", [5], bytes(10)),
        "mm_projector.c": Raw("F32", [], bytes(4)),
        "mm_projector.d": Raw("F32", [0, 7], b""),
        "mm_projector.e": Raw("BF16", [1, 3], bytes(6)),
    }
    (tmp_path / "odd").mkdir()
    shutil.copyfile(source / "config.json", tmp_path / "odd" / "config.json")
    write_file(tmp_path / "odd" / SINGLE, tensors | odd)
    convert("to-kda-hybrid", tmp_path / "odd", tmp_path / "ours")
    assert_same_tensors(read_file(tmp_path / "ours" / "released" / SINGLE), odd)
    convert("to-kimi-k3", tmp_path / "ours", tmp_path / "back")
    assert_same_tensors(read_folder(tmp_path / "back"), tensors | odd)


def test_every_other_file_comes_along(source, tmp_path):
    others = {
        "tokenizer.json": b"{}",
        "tiktoken.model": b"YQ== 0\n",
        "LICENSE": b"licence",
        "modeling_kimi.py": b"pass\n",
        "conversion.json": b"notes of somebody",
        "generation_config.json": b"{}",
    }
    for name, data in others.items():
        (source / name).write_bytes(data)
    (source / ".git").mkdir()
    (source / "pytorch_model.bin").write_bytes(b"old")
    convert("to-kda-hybrid", source, tmp_path / "target")
    found = everything(tmp_path / "target")
    assert {name: found.get(name) for name in others} == others
    assert found.keys() - others.keys() == {"config.json", SINGLE, "released/config.json", "released/" + SINGLE}
