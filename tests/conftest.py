import logging

import pytest
import torch
from transformers.utils.logging import warning_once


# Several workers share the cores: with a thread pool each, every small operation would wait for the other's turn.
torch.set_num_threads(1)


@pytest.fixture
def messages(caplog):
    """The texts that are logged."""
    warning_once.cache_clear()
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records]
    logger.removeHandler(caplog.handler)
