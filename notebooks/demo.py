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
# # A small Kimi Delta Attention model, from first words to fine-tuning
#
# A script (`make demo`) and a notebook (open it with Jupytext). It takes one or two minutes on two cores and needs no
# network: the model comes with the package.

# %%
import os
import tempfile
import time
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)
from transformers.utils import logging

import modeling_kda


STEPS = int(os.environ.get("DEMO_STEPS", "40"))  # of fine-tuning
logging.disable_progress_bar()
warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft asks by the old name
set_seed(0)

# %% [markdown]
# ## 1. Load and write
#
# The weights are in bfloat16. Most CPUs compute faster in float32.

# %%
model = AutoModelForCausalLM.from_pretrained(modeling_kda.EMBEDDED_MODEL, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(modeling_kda.EMBEDDED_MODEL)
kinds = model.config.layer_types
print(f"1. A model of {model.num_parameters():,} parameters: ", end="")
print(f"{kinds.count('linear_attention')} KDA layers, {kinds.count('full_attention')} full-attention layers\n")


def write(model, prompt: str, tokens: int) -> str:
    """Greedy, so the same on every run."""
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    return writer(prompt, max_new_tokens=tokens, do_sample=False)[0]["generated_text"]


write(model, "The", 8)  # the first call sets things up
start = time.perf_counter()
text = write(model, "The whale", 80)
seconds = time.perf_counter() - start
print(text)
print(f"\n{80 / seconds:.0f} tokens a second")

# %% [markdown]
# ## 2. What it remembers
#
# A KDA layer keeps one matrix a head, whatever the length of the text. Only the full-attention layers grow, and they
# keep one latent a token in place of keys and values of every head. The first column is measured; the other two are
# computed for the same model if all its layers were full attention.

# %%
config = model.config
latent = config.kv_lora_rank + config.qk_rope_head_dim  # numbers a token and layer
keys_and_values = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
size = model.dtype.itemsize  # bytes a number

print(f"\n2. Bytes remembered, at {size} bytes a number\n")
print(f"{'tokens':>6}{'this model':>14}{'all latents':>14}{'all keys and values':>22}")
for tokens in (256, 1024, 4096):
    cache = modeling_kda.KdaHybridCache(config)
    with torch.no_grad():
        model(torch.randint(3, config.vocab_size, (1, tokens)), cache=cache, logits_to_keep=1)
    grown = [config.num_hidden_layers * numbers * size * tokens for numbers in (latent, keys_and_values)]
    print(f"{tokens:>6,}{sum(cache.nbytes().values()):>14,}{grown[0]:>14,}{grown[1]:>22,}")
print(f"of which the KDA layers, at every length: {cache.nbytes()['recurrent']:,}")

# %% [markdown]
# ## 3. Fine-tune it
#
# A ship's log, made up for this page. The last six days are held out.

# %%
LOG = """\
Day 1. Wind west, fresh. Ninety miles. Left the harbour at noon. The cook forgot the salt. Morale good.
Day 2. Wind west, fresh. Eighty miles. Nobody sick but the doctor. Soup without salt. Morale good.
Day 3. Wind south, light. Forty miles. Mended the small sail. The cat has chosen my chair. Morale fair.
Day 4. No wind. Two miles, backwards. The mate whistled. Asked him to stop. Soup without salt. Morale fair.
Day 5. No wind. No miles. Painted the boat green. The cat is green also. Morale poor.
Day 6. Wind north, strong. One hundred miles. Lost a bucket. The mate says it was the good bucket. Morale fair.
Day 7. Wind north, strong. Ninety miles. Sunday. Read aloud to the men. They slept well. Morale good.
Day 8. Wind west, light. Fifty miles. Saw a whale. The whale saw us. Both went on. Morale good.
Day 9. Wind west, light. Forty miles. Met a brig. She had salt. She would not sell. Morale poor.
Day 10. Rain. Sixty miles. Caught water in all buckets but one. Spoke of the good bucket. Morale fair.
Day 11. Rain. Fifty miles. The doctor is well. The cook is sick. Soup much better. Morale good.
Day 12. Fog. Ten miles, I think. Rang the bell. Something answered. Rang no more. Morale poor.
Day 13. Fog. Ten miles, I hope. It was a bell buoy. The mate laughed. Morale fair.
Day 14. Wind east, fresh. Seventy miles. Sunday. Read aloud. Two men stayed awake. Morale good.
Day 15. Wind east, fresh. Eighty miles. The cat caught a fish. We caught none. Morale fair.
Day 16. Wind east, strong. Ninety miles. Broke the small sail. Mended the small sail. Morale fair.
Day 17. Wind south, light. Forty miles. The cook is well. Soup as before. Morale poor.
Day 18. Wind south, light. Thirty miles. Saw an island. It had a goat. No harbour. Morale fair.
Day 19. No wind. No miles. Played cards. The doctor has won my boots. Morale poor.
Day 20. No wind. One mile, sideways. Played cards. Won back one boot. Morale fair.
Day 21. Wind west, fresh. Seventy miles. Sunday. Read aloud, in one boot. Morale good.
Day 22. Wind west, strong. One hundred miles. The mate fell overboard. The mate climbed back. Morale good.
Day 23. Wind west, strong. Ninety miles. The mate has a cold and a fish. Soup with fish. Morale good.
Day 24. Rain. Fifty miles. The roof of my cabin leaks. The cat has moved to the doctor. Morale poor.
Day 25. Rain. Sixty miles. Put the second best bucket under the leak. Morale fair.
Day 26. Fog. Five miles. Rang the bell. Nothing answered. The men were sad about it. Morale fair.
Day 27. Wind north, fresh. Eighty miles. Saw birds. The mate says land. The mate always says land. Morale good.
Day 28. Wind north, fresh. Seventy miles. Sunday. Read aloud. The cat came to listen. Morale good.
Day 29. Wind north, light. Forty miles. Met a schooner. She had salt. Traded the card table. Morale good.
Day 30. Wind north, light. Fifty miles. Soup with salt. Too much salt. Morale poor.
Day 31. No wind. No miles. Everyone thirsty. Spoke of the good bucket. Morale poor.
Day 32. Rain. Thirty miles. Nobody thirsty. The men danced. The doctor fell. Morale good.
Day 33. Wind south, fresh. Eighty miles. The doctor walks with a stick. It is my stick. Morale fair.
Day 34. Wind south, strong. Ninety miles. Broke the small sail. Out of thread. Morale fair.
Day 35. Wind south, strong. Ninety miles. Sunday. Read aloud. The wind was louder. Morale fair.
Day 36. Wind west, light. Forty miles. Made a sail of my tablecloth. It has a soup stain. Morale good.
Day 37. Wind west, light. Forty miles. A shark follows us. The cook threw it soup. It left. Morale good.
Day 38. Fog. Ten miles. The mate says land. Rang the bell. A goat answered. Morale fair.
Day 39. No wind. No miles. It is the same island. It is the same goat. Morale poor.
Day 40. Wind east, fresh. Seventy miles. Left the island. The goat is aboard. Nobody knows how. Morale good.
Day 41. Wind east, fresh. Eighty miles. The goat ate the map. The mate steers by memory. Morale poor.
Day 42. Wind east, light. Fifty miles. Sunday. Read aloud. The goat ate the book. Morale good.
Day 43. Rain. Forty miles. The cat and the goat share my chair. I stand. Morale fair.
Day 44. Wind north, fresh. Ninety miles. Found the good bucket. It was under the goat. Morale good.
Day 45. Wind north, fresh. Eighty miles. Smoke on the shore. Houses. The mate was right. Morale good.
Day 46. Wind north, light. Ten miles. In harbour at noon. Bought salt. Morale good."""
days = LOG.splitlines()
known, held_out = days[:-6], days[-6:]


def examples(days: list[str]) -> list[dict]:
    """Every four days in a row."""
    return [tokenizer("\n".join(days[i : i + 4]) + "\n") for i in range(len(days) - 3)]


PROMPT = "Day 47. Wind"
print("\n3. Fine-tuning on a ship's log\n")
print("   before:", write(model, PROMPT, 60), sep="\n")

# %% [markdown]
# Without a word about where, LoRA goes to what both kinds of attention read and write (`modeling_kda.LORA_TARGETS`).

# %%
tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32))
trainer = Trainer(
    tuned,
    TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=4e-3,
        warmup_steps=5,
        lr_scheduler_type="cosine",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=0,
    ),
    train_dataset=examples(known),
    eval_dataset=examples(held_out),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
loss_before = trainer.evaluate()["eval_loss"]
trainer.train()
loss_after = trainer.evaluate()["eval_loss"]
text_after = write(tuned, PROMPT, 60)

parameters = tuned.num_parameters(only_trainable=True)
print(f"\n{parameters:,} parameters trained for {STEPS} steps of 8 texts")
print(f"loss on the days held out: {loss_before:.2f} before, {loss_after:.2f} after (nats a token)\n")
print("   after:", text_after, sep="\n")

# %% [markdown]
# ## 4. Save and load
#
# The adapter alone, on top of the model as it came; or merged into the weights, as a model of its own.

# %%
with tempfile.TemporaryDirectory() as folder:
    tuned.save_pretrained(f"{folder}/adapter")
    fresh = AutoModelForCausalLM.from_pretrained(modeling_kda.EMBEDDED_MODEL, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(fresh, f"{folder}/adapter")
    text_adapter = write(adapted, PROMPT, 60)
    adapted.merge_and_unload().save_pretrained(f"{folder}/merged")
    text_merged = write(AutoModelForCausalLM.from_pretrained(f"{folder}/merged"), PROMPT, 60)

print("\n4. Saved and loaded again\n")
print("adapter on the original model writes the same:", text_adapter == text_after)
print("merged model writes the same:", text_merged == text_after)
