"""Tools for checkpoints: `python -m conversion TOOL --help`."""

import argparse
import sys

from . import compare, convert, export_hub, inspection, tokenizer


TOOLS = {
    "inspect": (inspection, "what a folder is: family, layers, parameters, bytes, types, what is missing"),
    "to-kda-hybrid": (convert.ToKdaHybrid, "from a released layout to ours"),
    "to-kimi-linear": (convert.ToKimiLinear, "from ours to the released Kimi-Linear layout"),
    "to-kimi-k3": (convert.ToKimiK3, "from ours to the released Kimi K3 layout"),
    "tokenizer": (tokenizer, "tiktoken.model to tokenizer.json with a chat template"),
    "compare": (compare, "logits and chosen experts of two folders on the same tokens"),
    "export-hub": (export_hub, "a folder with the model's code, for trust_remote_code"),
}


def parser() -> argparse.ArgumentParser:
    """For all tools."""
    whole = argparse.ArgumentParser(prog="python -m conversion", description=__doc__)
    tools = whole.add_subparsers(dest="tool", required=True, metavar="TOOL")
    for name, (tool, about) in TOOLS.items():
        tool.add_arguments(tools.add_parser(name, help=about, description=tool.__doc__))
    return whole


def main(arguments: list[str] | None = None) -> int:
    """Runs one; returns the exit status."""
    given = parser().parse_args(arguments)
    try:
        TOOLS[given.tool][0].run(given)
    except (ValueError, OSError) as error:
        print(f"{given.tool}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
