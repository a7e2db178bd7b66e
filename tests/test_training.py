"""Training: losses, gradients, the Trainer, gradient checkpointing and PEFT."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import GRADIENTS, assert_close, golden, tiny_config, tiny_model, token_ids
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from modeling_kda import LORA_TARGETS, KdaHybridCache, KdaHybridForCausalLM, optimizer_groups
from modeling_kda.compat_transformers import CACHE_NAME
from modeling_kda.layers_mlp import SparseMLP


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.requires_grad}


def assert_same_gradients(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert got[name] is not None, name
        assert_close(got[name], gradient, 0, GRADIENTS, name)


def arguments(folder, **changes) -> TrainingArguments:
    fields = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**fields, **changes})


def rows(count: int, length: int = 9) -> list[dict[str, torch.Tensor]]:
    made = [token_ids(length, seed=100 + i)[0] for i in range(count)]
    return [{"input_ids": x, "labels": x.clone()} for x in made]


# Losses


def test_loss_is_the_mean_over_next_tokens_that_count():
    model, ids = tiny_model(), token_ids(9, rows=2)
    labels = ids.clone()
    labels[0, :5] = labels[1, 7:] = -100
    with torch.no_grad():
        output = model(ids, labels=labels)
    want = F.cross_entropy(output.logits[:, :-1].flatten(0, 1).double(), labels[:, 1:].flatten(), ignore_index=-100)
    assert_close(output.loss, want, 1e-5)


def test_loss_of_micro_batches_adds_up_to_that_of_the_batch():
    model, batches = tiny_model(), []
    for seed, count in ((1, 3), (2, 17)):
        ids = token_ids(20, seed=seed)
        labels = torch.full_like(ids, -100)
        labels[:, 1 : 1 + count] = ids[:, 1 : 1 + count]
        batches.append((ids, labels))
    ids, labels = (torch.cat(x) for x in zip(*batches))
    whole = model(ids, labels=labels).loss
    parts = [model(x, labels=y, num_items_in_batch=torch.tensor(20)).loss for x, y in batches]
    assert_close(sum(parts), whole, 1e-5)
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    assert_close(model(ids, labels=labels, shift_labels=shifted).loss, whole, 0)
    nothing = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=torch.tensor(20)).loss
    assert nothing == 0
    nothing.backward()
    assert all(x.grad.abs().max() == 0 for x in model.parameters())


@pytest.mark.parametrize("extra", ["position_ids", "flash arguments", "seq_idx"])
def test_loss_of_a_flattened_batch_equals_that_of_separate_documents(extra):
    model, other = tiny_model(), tiny_model()
    documents = [token_ids(n, seed=n)[0].tolist() for n in (5, 1, 12, 3)]
    collate = DataCollatorWithFlattening(
        return_tensors="pt",
        return_position_ids=extra != "seq_idx",
        return_flash_attn_kwargs=extra == "flash arguments",
        return_seq_idx=extra == "seq_idx",
    )
    batch = collate([{"input_ids": x} for x in documents])
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    count = sum(len(x) - 1 for x in documents)
    want = sum(other(torch.tensor([x]), labels=torch.tensor([x]), num_items_in_batch=count).loss for x in documents)
    want.backward()
    assert_close(loss, want, 1e-5)
    assert_same_gradients(gradients(model), gradients(other))


# Gradients of the experts


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_backward_through_experts_equals_a_dense_sum_over_all(implementation):
    torch.manual_seed(0)
    config = tiny_config(routed_scaling_factor=1.7)
    config._experts_implementation = implementation
    layer = SparseMLP(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.gate.e_score_correction_bias.normal_(std=0.2)
    x, dense = torch.randn(2, 7, 60), copy.deepcopy(layer).double()
    weights = torch.randn(2, 7, 60)

    def dense_sum(x):
        scores = (x @ dense.gate.weight.T).sigmoid()
        chosen = (scores + dense.gate.e_score_correction_bias).topk(2).indices
        share = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        share = 1.7 * share / share.sum(-1, keepdim=True)
        gate, up = torch.einsum("btd,eid->btei", x, dense.experts.gate_up_proj).chunk(2, -1)
        each = torch.einsum("btei,edi->bted", F.silu(gate) * up, dense.experts.down_proj)
        return (share.unsqueeze(-1) * each).sum(-2) + dense.shared_experts(x)

    inputs = x.clone().requires_grad_(), x.double().requires_grad_()
    got, want = layer(inputs[0])[0], dense_sum(inputs[1])
    assert_close(got, want, 0, 1e-5, "output")
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    assert_close(inputs[0].grad, inputs[1].grad, 0, 1e-5, "input")
    assert_same_gradients(gradients(layer), gradients(dense))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_backward_of_one_token_gives_every_parameter_a_gradient(implementation):
    model = tiny_model().train()
    model.set_experts_implementation(implementation)
    model(token_ids(1)).logits.square().sum().backward()
    for name, gradient in gradients(model).items():
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
    for layer in model.model.layers[1:]:
        used = layer.mlp.experts.down_proj.grad.flatten(1).abs().amax(1) > 0
        assert used.sum() == 2


def test_training_learns_one_batch_by_heart():
    torch.manual_seed(0)
    model, ids = KdaHybridForCausalLM(tiny_config(initializer_range=0.05)).train(), token_ids(24, rows=2)
    optimizer, losses = torch.optim.AdamW(optimizer_groups(model, 0.01), lr=1e-2), []
    for _ in range(30):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


# Weight decay


def test_optimizer_groups_decay_matrices_and_experts_only():
    model = tiny_model()
    decayed, free = optimizer_groups(model, 0.3)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    names = {id(x): name for name, x in model.named_parameters()}
    groups = [[names.pop(id(x)) for x in group["params"]] for group in (decayed, free)]
    assert not names
    for name in groups[1]:
        assert name.endswith(("A_log", "dt_bias", "conv1d.weight", "norm.weight")), name
    for name in groups[0]:
        assert name.endswith(
            ("proj.weight", "proj_with_mqa.weight", "proj", "mlp.gate.weight", "embed_tokens.weight", "lm_head.weight")
        ), name
    model.lm_head.weight.requires_grad_(False)
    assert len(optimizer_groups(model, 0.3)[0]["params"]) == len(decayed["params"]) - 1


# The Trainer


def test_trainer_accumulates_as_one_batch(tmp_path):
    data = rows(4, length=20)
    for row, count in zip(data, (3, 17, 9, 11)):
        row["labels"][1 + count :] = -100
    logs = []
    for size, accumulation in ((1, 4), (2, 2), (4, 1)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation, "max_steps": 1}
        trainer = Trainer(tiny_model(), arguments(tmp_path, **options), train_dataset=data)
        trainer.train()
        logs.append(trainer.state.log_history[0])
    for log in logs[:2]:
        assert log["loss"] == pytest.approx(logs[2]["loss"], rel=1e-5)
        assert log["grad_norm"] == pytest.approx(logs[2]["grad_norm"], rel=1e-4)


def test_trainer_evaluates_and_predicts(tmp_path):
    model, data = tiny_model(), rows(4)
    trainer = Trainer(model, arguments(tmp_path, per_device_eval_batch_size=4), eval_dataset=data)
    ids = torch.stack([row["input_ids"] for row in data])
    with torch.no_grad():
        want = model(ids, labels=ids)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(want.loss.item(), rel=1e-5)
    assert_close(torch.tensor(trainer.predict(data).predictions), want.logits)


@pytest.mark.parametrize("source", ["fresh", "kimi_linear_original_tiny"])
def test_trainer_resumes_bit_for_bit(source, tmp_path):
    def model():
        if source == "fresh":
            return tiny_model(attention_dropout=0.1)  # so that random numbers must resume too
        return KdaHybridForCausalLM.from_pretrained(golden(source))

    options, data = {"save_strategy": "steps", "save_steps": 2, "seed": 3}, rows(8)
    whole = Trainer(model(), arguments(tmp_path, **options), train_dataset=data)
    whole.train()
    start = model().state_dict()
    resumed = Trainer(model(), arguments(tmp_path, **options), train_dataset=data)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    got, want = resumed.model.state_dict(), whole.model.state_dict()
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
        if "correction_bias" not in name:  # which moves by load, not by gradients
            assert not torch.equal(tensor, start[name]), name
    saved = KdaHybridForCausalLM.from_pretrained(tmp_path / "checkpoint-4").state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in want.items())


# Gradient checkpointing


def checkpointed(model, reentrant: bool):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", ["pads", "packed"])
def test_gradient_checkpointing_changes_no_gradient(reentrant, kind):
    ids = token_ids(40, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    packed = torch.tensor([[*range(15), *range(25)]] * 2)
    more = {"attention_mask": mask} if kind == "pads" else {"position_ids": packed}
    plain, other = tiny_model().train(), checkpointed(tiny_model().train(), reentrant)
    for _ in range(2):  # a module that kept a graph would fail the second time
        for model in (plain, other):
            model.zero_grad()
            model(ids, labels=ids, **more).loss.backward()
        assert_same_gradients(gradients(other), gradients(plain))


def test_gradient_checkpointing_makes_no_cache_and_says_so(messages):
    model = checkpointed(tiny_model().train(), False)
    assert getattr(model(token_ids(5), use_cache=True), CACHE_NAME) is None
    assert [text for text in messages() if "cache" in text]


def test_gradient_checkpointing_refuses_to_forget_a_past():
    model = tiny_model().train()
    cache = KdaHybridCache(model.config)
    model(token_ids(5), cache=cache)
    checkpointed(model, False)
    with pytest.raises(ValueError, match="cache"):
        model(token_ids(3), cache=cache)
    assert cache.get_seq_length() == 5


# PEFT

GATES = ["f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj"]
MLPS = ["gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "default": None,
    "all-linear": "all-linear",
    "q and v": ["q_proj", "v_proj"],
    "output": ["o_proj"],
    "gates": GATES,
    "latents": ["kv_a_proj_with_mqa", "kv_b_proj"],
    "mlps": MLPS,
}


def adapted(targets, seed: int = 0, **changes) -> PeftModel:
    """A model with adapters that already change it."""
    model = tiny_model()
    torch.manual_seed(seed)
    options = {"r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM", **changes}
    return get_peft_model(model, LoraConfig(target_modules=targets, **options))


def adapter_modules(model: PeftModel) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(module, "lora_B") and len(module.lora_B)]


def test_lora_without_targets_reaches_every_attention_layer():
    model = get_peft_model(tiny_model(), LoraConfig(task_type="CAUSAL_LM"))
    found = {name.split("layers.")[1] for name in adapter_modules(model)}
    linear = {f"{i}.self_attn.{x}_proj" for i in (0, 1, 3) for x in "qkvo"}
    full = {f"2.self_attn.{x}" for x in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
    assert found == linear | full
    assert {name.rpartition(".")[2] for name in found} <= set(LORA_TARGETS)


def test_lora_on_all_linear_layers_misses_none():
    model = tiny_model()
    linear = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear} - {"lm_head"}
    found = {name.removeprefix("base_model.model.") for name in adapter_modules(adapted("all-linear"))}
    assert found == linear


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_lora_adapters_have_effect_and_gradient_and_merge(targets):
    model, ids = adapted(targets), token_ids(9, rows=2)
    with torch.no_grad():
        want, off = model(ids).logits, tiny_model()(ids).logits
    model.train()
    model(ids, labels=ids).loss.backward()
    assert all(x.grad.abs().max() > 0 for x in model.parameters() if x.requires_grad)
    model.eval()
    modules = {name: model.get_submodule(name).lora_B["default"].weight for name in adapter_modules(model)}
    values = {name: weight.detach().clone() for name, weight in modules.items()}
    with torch.no_grad():
        for name in modules:
            for other, weight in modules.items():
                weight.copy_(values[other]) if other == name else weight.zero_()
            assert (model(ids).logits - off).abs().max() > 1e-4, name
        for name, weight in modules.items():
            weight.copy_(values[name])
        assert_close(model.merge_and_unload()(ids).logits, want)


def test_lora_on_convolutions_is_refused():
    with pytest.raises(ValueError, match="ShortConvolution with groups"):
        adapted(["q_conv1d", "k_conv1d", "v_conv1d"])


@pytest.mark.parametrize("targets", ["all-linear", ["kv_b_proj"]], ids=str)
def test_lora_steps_on_a_cache_equal_one_pass(targets):
    model, ids = adapted(targets).eval(), token_ids(12, rows=2)
    cache = KdaHybridCache(model.config)
    with torch.no_grad():
        want = model(ids).logits
        got = [model(ids[:, t : t + 1], cache=cache).logits for t in range(12)]
    assert_close(torch.cat(got, 1), want)


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def test_lora_on_experts_has_effect_and_gradient_and_merges(tmp_path):
    model, ids = adapted([], target_parameters=EXPERTS), token_ids(9, rows=2)
    with torch.no_grad():
        want = model(ids).logits
        assert (want - tiny_model()(ids).logits).abs().max() > 1e-3
    model.train()
    model(ids, labels=ids).loss.backward()
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    assert len(trained) == 3 * 2 * 2
    assert all(x.grad.abs().max() > 0 for x in trained.values())
    model.eval()
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter").eval()
    loaded = dict(again.named_parameters())
    assert all(torch.equal(loaded[name], x) for name, x in trained.items())
    merged = model.merge_and_unload()
    with torch.no_grad():
        assert_close(again(ids).logits, want, name="reloaded adapter")
        assert_close(merged(ids).logits, want, name="merged")
        merged.save_pretrained(tmp_path / "merged")
        whole = KdaHybridForCausalLM.from_pretrained(tmp_path / "merged")
        assert_close(whole(ids).logits, want, name="merged and reloaded")


@pytest.mark.parametrize("targets", [None, "all-linear"], ids=str)
def test_lora_training_lowers_the_loss(targets):
    torch.manual_seed(0)
    base = KdaHybridForCausalLM(tiny_config(initializer_range=0.05))
    model, ids = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=targets)), token_ids(24, rows=2)
    model.train()
    optimizer, losses = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-2), []
    for _ in range(30):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("inputs", [True, False], ids=["input gradients", "no input gradients"])
def test_lora_under_gradient_checkpointing_equals_without(reentrant, inputs):
    plain, other, ids = adapted("all-linear").train(), adapted("all-linear").train(), token_ids(40, rows=2)
    checkpointed(other, reentrant)
    if inputs:
        other.enable_input_require_grads()
    for model in (plain, other):
        loss = model(ids, labels=ids).loss
        loss.backward()
    assert_same_gradients(gradients(other), gradients(plain))
    assert all(x is not None for x in gradients(other).values())


def test_lora_with_a_trained_head_saves_both(tmp_path):
    model, ids = adapted(["q_proj"], modules_to_save=["lm_head"]), token_ids(9)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
        want = model(ids).logits
        model.save_pretrained(tmp_path)
        assert_close(PeftModel.from_pretrained(tiny_model(), tmp_path).eval()(ids).logits, want)
