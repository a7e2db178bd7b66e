"""`python -m modeling_kda`: versions, and which backends can run here."""

import platform

import torch
import transformers

from . import __version__, backend_report


def main() -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(f"modeling_kda {__version__}, torch {torch.__version__}, transformers {transformers.__version__}", end=", ")
    print(f"Python {platform.python_version()}, {device}")
    print(backend_report())


if __name__ == "__main__":
    main()
