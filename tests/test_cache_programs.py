"""Random programs on caches: whatever is done to one, it remembers exactly the tokens that survived.

A program is a list of numbers, so that hypothesis can shrink it. A ledger beside each cache holds its tokens, the
logits that they gave, and what was recorded; at the end, one forward over the tokens without a cache must give them.
In float64, so that nothing hides in rounding. KDA_PROGRAMS sets how many programs run for each of the cases.
"""

import copy
import os
import tempfile
from dataclasses import dataclass, replace
from functools import cache as once
from pathlib import Path

import pytest
import torch
from helpers import CACHE_KINDS, K3, assert_close, tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from modeling_kda import CacheSnapshot, KdaHybridCache, KdaHybridForCausalLM


PROGRAMS = int(os.environ.get("KDA_PROGRAMS", "150"))
ERROR = 1e-9
LONGEST, MOST_ROWS = 72, 4  # tokens of a row, fewer than a static cache has room for; rows
SMALL = dict(
    vocab_size=31,
    hidden_size=20,
    linear_num_heads=2,
    linear_head_dim=6,
    linear_value_head_dim=10,
    linear_output_gate_rank=4,
    num_attention_heads=2,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=10,
    intermediate_size=24,
    moe_intermediate_size=12,
    num_experts=4,
)
LAYERS = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
MODELS = {
    "KDA and MLA": {**LAYERS, "mlp_layer_types": ["dense", "dense"]},
    "with Kimi K3's parts": {
        **K3,
        **LAYERS,
        "q_lora_rank": 6,
        "routed_expert_hidden_size": 12,
        "attn_res_block_size": 1,
    },
}


@once
def model_of(name: str) -> KdaHybridForCausalLM:
    return tiny_model(**{**SMALL, **MODELS[name]}).double()


@dataclass
class Ledger:
    """What a cache should remember: `ids` and `mask` `[B, S]`, and how many tokens it can give back at least."""

    ids: Tensor
    mask: Tensor
    logits: Tensor  # [B, S, vocabulary]
    recorded: int = 0
    limit: int = 0  # 0: it does not record

    def seen(self, tokens: int) -> None:
        self.recorded = min(self.limit, self.recorded + tokens)

    def rows(self, index: list[int]) -> None:
        self.ids, self.mask, self.logits = self.ids[index], self.mask[index], self.logits[index]


class Machine:
    """Runs a program."""

    def __init__(self, model: KdaHybridForCausalLM, kind: str, rows: int):
        self.model, self.kind, self.rows = model, kind, rows
        empty = torch.zeros(rows, 0, dtype=torch.long)
        ledger = Ledger(empty, empty, torch.zeros(rows, 0, 31, dtype=torch.float64))
        self.caches = [(KdaHybridCache(model.config, **CACHE_KINDS[kind]), ledger)]
        self.snapshots: list[tuple[CacheSnapshot, Ledger]] = []

    def run(self, step: tuple[int, int, int]) -> None:
        operation, a, b = step
        cache, ledger = self.caches[max(0, b - 4) % len(self.caches)]  # the first one most of the time
        OPERATIONS[operation % len(OPERATIONS)](self, cache, ledger, a)

    def forward(self, cache: KdaHybridCache, ledger: Ledger, new: Tensor, mask: Tensor) -> None:
        if not ledger.ids.numel():  # an empty cache takes any number of rows
            new, mask = new[: self.rows], mask[: self.rows]
        rows = len(new)
        ids, whole = torch.cat([ledger.ids[:rows], new], 1), torch.cat([ledger.mask[:rows], mask], 1)
        if ids.shape[1] > LONGEST:
            return
        with torch.no_grad():
            logits = self.model(new, attention_mask=None if whole.all() else whole, cache=cache).logits
        ledger.ids, ledger.mask = ids, whole
        ledger.logits = torch.cat([ledger.logits[:rows], logits], 1)
        ledger.seen(new.shape[1])
        assert cache.get_seq_length() == ids.shape[1]

    def check(self) -> None:
        for cache, ledger in self.caches:
            self.do_decode(cache, ledger, 0)
            real = ledger.mask.bool()
            with torch.no_grad():
                want = self.model(ledger.ids, attention_mask=ledger.mask, use_cache=False).logits
            assert_close(ledger.logits[real], want[real], absolute=ERROR)

    def tokens(self, rows: int, tokens: int, seed: int) -> Tensor:
        return torch.randint(3, 31, (rows, tokens), generator=torch.Generator().manual_seed(seed))

    # Operations

    def do_decode(self, cache, ledger, a):
        rows = len(ledger.ids)
        self.forward(cache, ledger, self.tokens(rows, 1, a), torch.ones(rows, 1).long())

    def do_decode_some(self, cache, ledger, a):
        for i in range(1 + a % 5):
            self.do_decode(cache, ledger, a + i)

    def do_read(self, cache, ledger, a):
        rows, tokens = len(ledger.ids), 2 + a % 40
        self.forward(cache, ledger, self.tokens(rows, tokens, a), torch.ones(rows, tokens).long())

    def do_read_with_pads(self, cache, ledger, a):
        """On the left, on the right, or anywhere; a row may be all pads, or a decoded token a pad."""
        rows, tokens = len(ledger.ids), (1, 2, 3, 7, 20, 35)[a % 6]
        mask = torch.ones(rows, tokens).long()
        random = torch.Generator().manual_seed(a)
        for row in range(rows):
            pads = int(torch.randint(0, tokens + 1, (), generator=random))
            kind = int(torch.randint(0, 3, (), generator=random))
            if kind == 0:
                mask[row, :pads] = 0
            elif kind == 1:
                mask[row, tokens - pads :] = 0
            else:
                mask[row] = torch.randint(0, 2, (tokens,), generator=random)
        self.forward(cache, ledger, self.tokens(rows, tokens, a), mask)

    def do_record(self, cache, ledger, a):
        limit = (3, 10, 64)[a % 3]
        if not ledger.limit:
            cache.activate_past_recording(limit)
            ledger.limit, ledger.recorded = limit, 0

    def do_crop(self, cache, ledger, a):
        tokens = a % (ledger.recorded + 1)
        cache.crop(torch.tensor(-tokens) if a % 2 else -tokens)
        length = ledger.ids.shape[1] - tokens
        ledger.ids, ledger.mask, ledger.logits = (x[:, :length] for x in (ledger.ids, ledger.mask, ledger.logits))
        ledger.recorded = 0
        assert cache.get_seq_length() == length

    def do_crop_too_much(self, cache, ledger, a):
        most = 2 * ledger.limit + 32 if ledger.limit else 0  # as many as may be recorded
        with pytest.raises(ValueError, match="recorded"):
            cache.crop(-(most + 1 + a % 3))

    def do_snapshot(self, cache, ledger, a):
        self.snapshots.append((cache.snapshot(), copy.copy(ledger)))
        assert self.snapshots[-1][0].tokens == ledger.ids.shape[1]

    def do_restore(self, cache, ledger, a):
        if not self.snapshots:
            return
        snapshot, then = self.snapshots[a % len(self.snapshots)]
        cache.restore(snapshot)
        ledger.ids, ledger.mask, ledger.logits, ledger.recorded = then.ids, then.mask, then.logits, 0

    def do_fork(self, cache, ledger, a):
        if len(self.caches) < 5:
            self.caches += [(fork, replace(ledger, recorded=0)) for fork in cache.fork(1 + a % 2)]

    def do_copy(self, cache, ledger, a):
        if len(self.caches) < 5:
            self.caches.append((copy.deepcopy(cache), copy.copy(ledger)))

    def do_reorder(self, cache, ledger, a):
        random = torch.Generator().manual_seed(a)
        index = torch.randint(0, len(ledger.ids), (len(ledger.ids),), generator=random)
        cache.reorder_cache(index)
        ledger.rows(index.tolist())

    def do_select(self, cache, ledger, a):
        random = torch.Generator().manual_seed(a)
        index = torch.randint(0, len(ledger.ids), (1 + a % MOST_ROWS,), generator=random)
        if ledger.ids.numel():
            cache.batch_select_indices(index)
            ledger.rows(index.tolist())

    def do_repeat(self, cache, ledger, a):
        if ledger.ids.numel() and 2 * len(ledger.ids) <= MOST_ROWS:
            cache.batch_repeat_interleave(2)
            ledger.rows([row for row in range(len(ledger.ids)) for _ in range(2)])

    def do_save_and_load(self, cache, ledger, a):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "session"
            cache.save(path)
            room = CACHE_KINDS[self.kind].get("max_cache_len")
            loaded = KdaHybridCache.load(path, self.model.config, max_cache_len=room)
        if len(self.caches) < 5:
            self.caches.append((loaded, replace(ledger, recorded=0, limit=0)))


OFTEN = ("do_decode", "do_read_with_pads", "do_crop", "do_snapshot", "do_restore")
OPERATIONS = [
    operation
    for name, operation in vars(Machine).items()
    if name.startswith("do_")
    for _ in range(2 if name in OFTEN else 1)
]
STEP = st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 2**16), st.integers(0, 7))


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_any_program_leaves_a_cache_that_remembers_the_surviving_tokens(name, kind):
    @settings(
        max_examples=PROGRAMS, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    @given(rows=st.integers(1, 3), records=st.integers(0, 5), program=st.lists(STEP, min_size=6, max_size=16))
    def check(rows, records, program):
        machine = Machine(model_of(name), kind, rows)
        if records:
            machine.do_record(*machine.caches[0], records)
        for step in program:
            machine.run(step)
        machine.check()

    check()
