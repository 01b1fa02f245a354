"""`ddlab doctor`: what runs on this machine for a pair, as text for an issue."""

from __future__ import annotations

import argparse
from collections.abc import Callable

EXAMPLE = """example:
  ddlab doctor --target Qwen/Qwen3.5-4B --drafter z-lab/Qwen3.5-4B-DFlash --dtype bfloat16 --device-map auto

tries every attention backend on every kind of layer of the pair, in every call that decoding makes, and holds what
comes out to float64. Prints a table without folders or names of people, to be pasted into an issue. Backends that are
compiled first, or may end the process, run in a child and take a while: --backends sdpa eager leaves them out.
exit status: 0 the pair can decode exactly with something, 1 it cannot, 2 the input does not fit.
"""


def add(new: Callable[..., argparse.ArgumentParser]) -> None:
    """The subcommand, by ``new``: name, what runs it, examples, summary."""
    parser = new("doctor", run, EXAMPLE, "say what runs on this machine, what does not, and why")
    parser.add_argument("--backends", metavar="NAME", nargs="+", help="try these only (default: all)")


def run(arguments: argparse.Namespace) -> int:
    from ddlab import cli
    from ddlab.doctor import doctor, unloadable

    with cli._input_errors():
        try:
            pair = cli._load(arguments, ["ar"])
        except (ValueError, ImportError) as error:  # what a doctor is asked about
            findings = unloadable(str(arguments.target or "the embedded pair"), error)
        else:
            findings = doctor(pair, arguments.backends)
    print(findings.to_text())
    return cli.FINE if findings.ok else cli.DIVERGED
