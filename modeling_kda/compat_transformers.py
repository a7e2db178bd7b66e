"""What differs between the supported versions of transformers (5.17 up to, not including, 6), and nothing else."""

import dataclasses
from typing import Any

import transformers
from packaging.version import Version
from transformers.modeling_outputs import MoeModelOutputWithPast


MINIMUM, LIMIT = "5.17", "6"

if not Version(MINIMUM) <= Version(Version(transformers.__version__).base_version) < Version(LIMIT):
    raise ImportError(
        f"modeling_kda needs transformers >={MINIMUM},<{LIMIT}; version {transformers.__version__} is installed. "
        f'Run: pip install "transformers>={MINIMUM},<{LIMIT}"'
    )

# 5.24 renamed the cache from `past_key_values` to `cache`, in `generate`, in `forward` and in the outputs alike. A
# model that knows only the old name runs on and silently forgets its past.
CACHE_NAME = "cache" if "cache" in {f.name for f in dataclasses.fields(MoeModelOutputWithPast)} else "past_key_values"


def one_cache(cache: Any, past_key_values: Any) -> Any:
    """The cache, whichever of its two names it came under.

    Raises:
        ValueError: both names were given.
    """
    if cache is not None and past_key_values is not None:
        raise ValueError("`cache` and `past_key_values` are two names of one argument; give one of them.")
    return past_key_values if cache is None else cache
