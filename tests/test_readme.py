"""The README: its programs run, their outputs are real, its tree is on disk, its claims are tests."""

import json
import re
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import assert_close
from transformers import AutoModelForSequenceClassification, KimiLinearForCausalLM, Trainer, TrainingArguments
from update_readme import PRESETS, README, RELEASED_SHAPE, ROOT, benchmark_tables, run_programs, write_released

import modeling_kda
from conversion.__main__ import TOOLS, parser
from modeling_kda import KdaHybridForCausalLM
from modeling_kda.compat_transformers import CACHE_NAME


TEXT = README.read_text()
VISIBLE = [
    path for path in ROOT.iterdir() if path.name[0] != "." and path.name not in ("__pycache__", "build", "dist")
]


# Programs


@pytest.mark.parametrize("page", [README, PRESETS], ids=["README.md", "configuration"])
def test_readme_programs_print_what_the_page_shows(page):
    shown = 0
    for program, wanted, printed in run_programs(page.read_text()):
        assert wanted is None or printed == wanted, program
        shown += wanted is not None
    assert shown == (5 if page == README else 0)


def test_readme_begins_with_the_commands_and_a_program():
    """One screen: 40 lines."""
    screen = "\n".join(TEXT.splitlines()[:40])
    wanted = ["make demo", "make test", "pip install .", "```python", "```text", "o  = S q"]
    assert "--quick" not in TEXT, "the benchmark numbers are those of a trial run"
    places = [screen.index(word) for word in wanted]
    assert places == sorted(places)


def test_embedded_card_program_runs(capsys):
    card = Path(modeling_kda.EMBEDDED_MODEL, "README.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```\n", card, re.M | re.S)
    for written, ours in (
        ("path/to/this/folder", modeling_kda.EMBEDDED_MODEL),
        ('whale")', 'whale", max_new_tokens=9)'),
    ):
        assert written in program
        program = program.replace(written, ours)
    exec(program, {})
    assert "The whale" in capsys.readouterr().out


# What it says about files


def tree(lines: list[str], indent: str) -> set[str]:
    return {line.split()[0].rstrip("/") for line in lines if re.match(rf"{indent}\S", line)}


def test_readme_tree_is_the_one_on_disk():
    lines = re.search(r"^```tree\n(.*?)^```\n", TEXT, re.M | re.S).group(1).splitlines()
    assert tree(lines, "") == {path.name for path in VISIBLE if path.suffix != ".egg-info"}
    package = {path.name for path in (ROOT / "modeling_kda").iterdir()} - {"__pycache__"}
    assert tree(lines, "  ") == package


def test_readme_names_only_files_and_tests_that_exist():
    for link in re.findall(r"\]\((?!https)([^)#]+)\)", TEXT):
        assert (ROOT / link).exists(), link
    for path, name in re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", TEXT):
        assert (ROOT / path).exists(), path
        assert f"def {name}(" in (ROOT / path).read_text() or not name, f"{path}::{name}"
    comparisons = set(re.findall(r"`(test_comparison_\w+)`", TEXT))
    assert comparisons == {name for name in globals() if name.startswith("test_comparison_")}


def test_readme_names_tools_and_options_that_exist():
    lines = re.findall(r"^python -m conversion (.+?)(?:  +(?=[a-z])[^A-Z\n]*.*)?$", TEXT, re.M)
    named = set()
    for line in lines:
        words = [word for word in line.split() if word.isupper() or word[:2] == "--" or word == line.split()[0]]
        parser().parse_args(words)  # exits for what it does not know
        named.add(words[0])
    assert named == TOOLS.keys()


def test_readme_names_versions_and_extras_of_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    for package in ("Python", "torch", "transformers"):
        [said] = re.findall(rf"{package} (\d+\.\d+) or later|{package} (\d+\.\d+) to", TEXT.split("## Install")[1])[:1]
        field = "requires-python = " if package == "Python" else ""
        assert f'{field}"{"" if field else package}>={"".join(said)}' in project, package
    extras = re.search(r"^\[project.optional-dependencies\]\n(.*?)\n\n", project, re.M | re.S).group(1)
    for extra in re.findall(r"^\| `(\w+)` \| [a-zA-Z, ]+ \|$", TEXT, re.M):
        assert f"\n{extra} = [" in "\n" + extras


# Its comparison with transformers' own class: each row runs both with the same weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint that transformers' own class wrote."""
    folder = tmp_path_factory.mktemp("kimi_linear")
    write_released(folder)
    return folder


@pytest.fixture(scope="module")
def both(folder):
    """Ours and theirs, shared, so never changed."""
    return [
        kind.from_pretrained(folder, dtype=torch.float32).eval()
        for kind in (KdaHybridForCausalLM, KimiLinearForCausalLM)
    ]


def some_ids(tokens: int, seed: int = 0) -> torch.Tensor:
    """`[1, tokens]`."""
    return torch.randint(3, RELEASED_SHAPE["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_comparison_second_turn_with_left_pads(both):
    ids, pads = some_ids(20), torch.zeros(1, 6, dtype=torch.long)
    mask = torch.cat([torch.ones(1, 8), torch.zeros(1, 6), torch.ones(1, 12)], 1).long()
    errors = []
    for model in both:
        whole = model(ids, use_cache=False).logits[:, 8:]
        cache = model(ids[:, :8], use_cache=True)[CACHE_NAME]
        turn = model(torch.cat([pads, ids[:, 8:]], 1), attention_mask=mask, use_cache=True, **{CACHE_NAME: cache})
        errors.append((turn.logits[:, 6:] - whole).abs().max().item())
    assert errors[0] < 1e-4
    assert errors[1] > 2


@torch.no_grad()
@pytest.mark.parametrize("borders", ["position_ids", "cu_seq_lens_q"])
def test_comparison_packed_documents(both, borders):
    first, second = some_ids(9), some_ids(11, seed=1)
    given = {"position_ids": torch.cat([torch.arange(9), torch.arange(11)]).unsqueeze(0)}
    if borders == "cu_seq_lens_q":  # as `DataCollatorWithFlattening` makes them
        cu = torch.tensor([0, 9, 20], dtype=torch.int32)
        given |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 11, "max_length_k": 11}
    errors = []
    for model in both:
        packed = model(torch.cat([first, second], 1), use_cache=False, **given).logits[:, 9:]
        errors.append((packed - model(second, use_cache=False).logits).abs().max().item())
    assert errors[0] < 1e-4
    assert errors[1] > 2


def test_comparison_dtype_of_decay_rates(folder):
    dtypes = []
    for kind in (KdaHybridForCausalLM, KimiLinearForCausalLM):
        model = kind.from_pretrained(folder, dtype=torch.bfloat16)
        dtypes.append({x.dtype for name, x in model.named_parameters() if name.endswith("A_log")})
    assert dtypes == [{torch.float32}, {torch.bfloat16}]


def test_comparison_trainer_resume(folder, tmp_path):
    data = [{"input_ids": some_ids(12, seed)[0], "labels": some_ids(12, seed)[0]} for seed in range(8)]

    def weights(kind: type, out: Path, **how) -> dict[str, torch.Tensor]:
        arguments = TrainingArguments(
            out,
            max_steps=3,
            save_steps=1,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            report_to=[],
            use_cpu=True,
        )
        trainer = Trainer(kind.from_pretrained(folder, dtype=torch.float32), arguments, train_dataset=data)
        trainer.train(**how)
        return trainer.model.state_dict()

    for kind, lost in ((KdaHybridForCausalLM, False), (KimiLinearForCausalLM, True)):
        out = tmp_path / kind.__name__
        whole = weights(kind, out)
        resumed = weights(kind, out, resume_from_checkpoint=str(out / "checkpoint-1"))
        different = [name for name in whole if not torch.equal(whole[name], resumed[name])]
        assert bool(different) == lost, f"{kind.__name__}: {different}"


@torch.no_grad()
def test_comparison_rows_of_a_cache(both):
    ours, theirs = (model(some_ids(5), use_cache=True)[CACHE_NAME] for model in both)
    ours.batch_repeat_interleave(2)
    step = both[0](some_ids(1, seed=2).expand(2, 1), **{CACHE_NAME: ours}).logits
    whole = both[0](torch.cat([some_ids(5), some_ids(1, seed=2)], 1)).logits[:, -1:]
    assert_close(step, whole.expand_as(step))
    with pytest.raises(AttributeError, match="batch_repeat_interleave"):
        theirs.batch_repeat_interleave(2)


def test_comparison_drafts(both):
    ids, how = some_ids(4).repeat(1, 4), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ours, theirs = both
    assert torch.equal(ours.generate(ids, prompt_lookup_num_tokens=3, **how), ours.generate(ids, **how))
    with pytest.raises(ValueError, match="stateful"):
        theirs.generate(ids, prompt_lookup_num_tokens=3, **how)


def test_comparison_sequence_classification(both):
    ours, theirs = (model.config for model in both)
    assert AutoModelForSequenceClassification.from_config(ours).num_labels == 2
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForSequenceClassification.from_config(theirs)


# The command that writes it


def test_benchmark_tables_are_the_numbers_of_the_last_lines():
    machine = {
        "cpu": "A CPU", "cores": 2, "load": 0.1, "python": "3.11.7", "modeling_kda": "0.1.0", "torch": "2.13.0",
        "transformers": "5.24.0", "command": "python -m tests.benchmarks.bench_ops",
    }  # fmt: skip
    operation = {
        "name": "forward T=512", "kind": "forward", "batch": 1, "tokens": 512, "dtype": "float32",
        "ours": {"ms": 12.345, "runs": 5, "mib": 8.0}, "peer": {"ms": 1234.5, "runs": 3, "mib": 80.04},
        "speed": 100.0, "memory": 10.005,
    }  # fmt: skip
    decode = {
        "name": "decode after 512", "kind": "decode", "tokens": 512, "dtype": "bfloat16",
        "ours": {"tok_s": {"1": 50.0, "8": 300.0}, "peak_mib": 700.0}, "speed": {"1": 2.0, "8": 1.5}, "memory": 2.0,
        "peer": {"tok_s": {"1": 25.0, "8": 200.0}, "peak_mib": 1400.0},
    }  # fmt: skip
    load = {
        "name": "load", "bytes": 1_970_000_000, "ours": {"seconds": 4.321, "peak_mib": 3500.0, "before_mib": 300.0},
    }  # fmt: skip
    loads = [load, load | {"peer": {"seconds": 5.0, "peak_mib": 99.9}, "speed": 1.16, "memory": 0.03}]
    lines = [json.dumps({"machine": machine, "cases": cases}) for cases in ([operation], [decode], loads)]
    got = benchmark_tables("\n".join(["a table", lines[0], "another", *lines[1:]]))
    note = (
        "`python -m tests.benchmarks.bench_ops`: A CPU, threads: 2, Python 3.11.7, torch 2.13.0, transformers 5.24.0, "
        "modeling_kda 0.1.0."
    )
    assert got.pop("loading") == textwrap.dedent(f"""\
        | checkpoint on disk | GB | ours, s | transformers, s | ours, peak MiB | transformers, peak MiB |
        | --- | ---: | ---: | ---: | ---: | ---: |
        | load | 1.97 | 4.32 | - | 3,500 | - |
        | load | 1.97 | 4.32 | 5 | 3,500 | 99.9 |

        {note}
        """)
    assert got.pop("benchmarks") == textwrap.dedent(f"""\
        | operation | dtype | ours, ms | transformers, ms | times as fast | ours, MiB | transformers, MiB |
        | --- | --- | ---: | ---: | ---: | ---: | ---: |
        | forward T=512 | float32 | 12.3 | 1,234 | 100.0x | 8 | 80 |

        {note}

        | model | dtype | ours, tokens/s | transformers, tokens/s | times as fast | ours, MiB | transformers, MiB |
        | --- | --- | ---: | ---: | ---: | ---: | ---: |
        | decode after 512, batch 1 | bfloat16 | 50 | 25 | 2.0x | 700 | 1,400 |
        | decode after 512, batch 8 | bfloat16 | 300 | 200 | 1.5x | 700 | 1,400 |

        {note}
        """)
    assert not got


def test_tables_of_a_gpu_are_the_numbers_of_the_last_lines():
    machine = {
        "gpu": "A GPU", "cpu": "A CPU", "cores": 2, "python": "3.12.3", "modeling_kda": "0.1.0", "torch": "2.11.0",
        "transformers": "5.24.0",
    }  # fmt: skip
    point = {"context": 512, "cache": "static", "tok_s": 1490.6, "floor": 2627.0, "first_call": 3.26}
    ours = {"model": "hybrid", "decode": [point], "prefill": [{"tokens": 8192, "tok_s": 289594.2, "cache_mib": 39.21}]}
    ours |= {"training": {"tok_s": 74048.1, "peak_gib": 14.06, "first": 11.72}}
    peer = {"model": "fla KDA", "decode": [], "prefill": [{"tokens": 8192, "tok_s": 2e5, "cache_mib": 16.8}]}
    peer |= {"training": {"tok_s": 40295.3, "peak_gib": 13.01, "first": 200.0}}
    layers = {
        "operations": [
            {"tokens": 8192, "bound": None, "floor": 0.04, "ms": {"triton": 0.412, "fla": 0.5}},
            {"tokens": 8192, "bound": -5.0, "floor": 0.04, "ms": {"triton": 0.4, "flash_kda": 0.25}},
        ],
        "errors": [{"inputs": "slow", "bound": None, "errors": {"triton": [3e-3, 2e-3], "fla": [4e-3, 2e-3]}}],
        "learning": [
            {"inputs": "slow", "bound": None, "rows": 2, "tokens": 4096, "ms": {"triton": 1.61, "fla": 2.0},
             "errors": {"triton": [5e-3, 4e-3], "fla": [6e-3, 4e-3]}},
        ],
        "layers": [
            {"layer": "hybrid", "forward": [{"tokens": 8192, "ms": 1.23}], "launches": 9, "training": 5.5,
             "training_launches": 80},
        ],
    }  # fmt: skip
    reports = [
        {"machine": machine | {"command": "first"}, "models": [ours]},
        {"machine": machine | {"command": "layer"}, **layers},
        {"machine": machine | {"command": "second"}, "models": [peer]},
    ]
    got = benchmark_tables("\n".join(json.dumps(report) for report in reports))
    note = "A GPU, threads: 2, Python 3.12.3, torch 2.11.0, transformers 5.24.0, modeling_kda 0.1.0."
    assert got.pop("gpu") == textwrap.dedent(f"""\
        | | hybrid | fla KDA |
        | --- | ---: | ---: |
        | decode after 512, static cache, tokens/s | 1,491 (floor 2,627) |  |
        | first token of the first call, s | 3.26 |  |
        | prefill of 8,192, tokens/s | 289,594 | 200,000 |
        | cache after 8,192, MiB | 39.2 | 16.8 |
        | training on 2 x 4,096, tokens/s | 74,048 | 40,295 |
        | training on 2 x 4,096, peak GiB | 14.1 | 13 |
        | training on 2 x 4,096, first step, s | 11.7 |  |

        `python -m tests.benchmarks.gpu_model`: {note}
        """)
    assert got.pop("layer") == textwrap.dedent(f"""\
        | operation, ms | floor | triton | fla | flash_kda |
        | --- | --- | --- | --- | --- |
        | 8,192, softplus gate | 0.04 | 0.412 | 0.5 | - |
        | 8,192, bounded gate | 0.04 | 0.4 | - | 0.25 |

        | error: largest, of the norm | triton | fla | flash_kda |
        | --- | --- | --- | --- |
        | slow, softplus gate | 3e-03, 2e-03 | 4e-03, 2e-03 | - |

        | with gradients: ms (error: largest, of the norm) | triton | fla | flash_kda |
        | --- | --- | --- | --- |
        | slow, softplus gate | 1.61 (5e-03, 4e-03) | 2 (6e-03, 4e-03) | - |

        | a KDA layer | 8,192 tokens, ms | kernels | with gradients, ms | kernels |
        | --- | --- | --- | --- | --- |
        | hybrid | 1.23 | 9 | 5.5 | 80 |

        `layer`: {note}
        """)
    assert not got


def test_models_of_two_machines_make_no_table():
    machine = dict.fromkeys(("gpu", "cpu", "cores", "python", "torch", "transformers", "modeling_kda", "command"), "a")
    reports = [{"machine": machine, "models": []}, {"machine": machine | {"torch": "b"}, "models": []}]
    with pytest.raises(ValueError, match="two machines"):
        benchmark_tables("\n".join(json.dumps(report) for report in reports))
