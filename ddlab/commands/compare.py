"""`ddlab compare`: attention backends and delta-rule forms, layer by layer."""

from __future__ import annotations

import argparse
from collections.abc import Callable

WHATS = ("prefill", "step", "draft", "verify")
EXAMPLE = """example:
  ddlab compare --what verify --backends sdpa eager flash_tree --out layers.html

runs the draft trees of a short text on each backend, holds every layer to float64, and says which backend is wrong in
which layer, and what that changes in the end. The first backend is what the others are held to.
exit status: 0 no backend is wrong, 1 one is, 2 the input does not fit.
"""


def add(new: Callable[..., argparse.ArgumentParser], prompt: str) -> None:
    """The subcommand, by ``new``: name, what runs it, examples, summary."""
    parser = new("compare", run, EXAMPLE, "hold attention backends to each other and to float64, layer by layer")
    parser.add_argument("--prompt", metavar="TEXT", default=prompt, help="one user turn (default: on relativity)")
    parser.add_argument("--trace", metavar="FOLDER", help="take the prompt and the rounds of this trace instead")
    parser.add_argument("--what", choices=WHATS, default="prefill", help="which call (default: prefill)")
    parser.add_argument(
        "--backends", metavar="NAME", nargs="+", help="by name (default: what is set, then all that are here)"
    )
    parser.add_argument(
        "--rounds", metavar="N", type=int, help="of draft and verify, spread over the run (default: all)"
    )
    parser.add_argument("--out", metavar="FILE", help="write it as a page too")


def run(arguments: argparse.Namespace) -> int:
    from ddlab import cli
    from ddlab.compare import compare
    from ddlab.trace import Trace
    from ddlab.views import page

    out = None if arguments.out is None else cli._out(arguments, "layers.html")
    with cli._input_errors():
        given = arguments.prompt if arguments.trace is None else Trace.load(arguments.trace)
        pair = cli._load(arguments, ["ar"])
        comparison = compare(pair, given, arguments.backends, arguments.what, rounds=arguments.rounds)
    print(comparison.to_text())
    if out is not None:
        print(f"\npage: {page.write(out, comparison.view().document())}")
    return cli.FINE if comparison.ok else cli.DIVERGED
