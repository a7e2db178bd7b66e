import logging
import os
import sys

import pytest
import torch
from transformers.utils.logging import warning_once


# Several workers share the cores: with a thread pool each, every small operation would wait for the other's turn.
torch.set_num_threads(1)


# Triton's kernels run on a GPU, or under its interpreter, which must be chosen before anything imports triton.
collect_ignore = [] if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") else ["kernels"]


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Every test draws the same ones, alone or after others."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_compiled():
    """By other tests: torch compiles a function only so often anew."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def messages(caplog):
    """The texts that are logged."""
    warning_once.cache_clear()
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records]
    logger.removeHandler(caplog.handler)
