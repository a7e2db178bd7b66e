"""Checkpoint tools for the command line, on top of `modeling_kda`; run from a checkout."""
