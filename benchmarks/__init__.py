"""Ours beside a named peer, interleaved in one run: `python -m benchmarks [NN] [--json FILE]`."""
