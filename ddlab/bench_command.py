"""`ddlab bench`: rounds by stage, against the bandwidth floor, on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

EXAMPLE = """example:
  ddlab bench --budget 16 64 --prefix 64 256 --out bench.json

times rounds of plain decoding, chains and trees by stage, and prints tables in markdown. On a GPU with 60 GB or more:
  ddlab bench --shape qwen3.6-27b --engine graph eager --scripted-tau 2 4 6 8
does so at that model's shape with random weights, with a simulated acceptance of 2 to 8 tokens per round.
"""
SHAPES = ("qwen3.6-27b",)


def add(commands: Any, models: Callable[[argparse.ArgumentParser], None], methods: Sequence[str]) -> None:
    """The subcommand; ``models`` adds the arguments that say which pair."""
    summary = "time rounds by stage, against the memory's bandwidth"
    parser = commands.add_parser(
        "bench",
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    models(parser)
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape, made on the GPU, in bfloat16")
    what = parser.add_argument_group("what to time")
    what.add_argument("--method", choices=methods, nargs="+", default=methods, help="(default: all three)")
    what.add_argument("--budget", metavar="N", type=int, nargs="+", default=[16, 64], help="of ddtree (default: 16 64)")
    what.add_argument("--prefix", metavar="N", type=int, nargs="+", help="tokens before the round (default: 512)")
    what.add_argument(
        "--engine",
        choices=("graph", "eager"),
        nargs="+",
        help="in one run, as a ratio (default: graph where it runs, and eager)",
    )
    what.add_argument(
        "--repeats", metavar="N", type=int, default=20, help="of each round; eager beside graph a quarter (default: 20)"
    )
    what.add_argument("--seed", metavar="N", type=int, default=0, help="of random tokens and scripts (default: 0)")
    script = parser.add_argument_group("simulated acceptance")
    script.add_argument(
        "--scripted-tau", metavar="T", type=float, nargs="+", default=[], help="tokens per round, on average"
    )
    script.add_argument(
        "--scripted-accept", metavar="P", type=float, nargs="+", help="or how likely a draft is accepted, by depth"
    )
    script.add_argument("--rounds", metavar="N", type=int, default=24, help="of each simulated run (default: 24)")
    parser.add_argument("--trace-cost", action="store_true", help="also what recording costs")
    parser.add_argument("--out", metavar="FILE", help="write everything as JSON too")


def run(arguments: argparse.Namespace) -> int:
    from ddlab import cli
    from ddlab.bench import bench
    from ddlab.scripted import Script
    from ddlab.trace_cost import trace_cost

    out = None if arguments.out is None else Path(arguments.out)
    if out is not None and not out.parent.is_dir():
        raise cli.BadInput(f"no folder {out.parent} to write {out.name} into: create it first")
    if out is not None and out.is_dir():
        raise cli.BadInput(f"{out} is a folder: give --out the name of a file, such as {out / 'bench.json'}")
    budgets, methods = sorted(set(arguments.budget)), list(dict.fromkeys(arguments.method))
    with cli._input_errors():
        scripts = [Script(tau, seed=arguments.seed) for tau in arguments.scripted_tau]
        if arguments.scripted_accept is not None:
            scripts.append(Script(probabilities=arguments.scripted_accept, seed=arguments.seed))
        pair = _pair(arguments, methods)
        found = bench(
            pair,
            prefixes=arguments.prefix or [512],
            budgets=budgets,
            methods=methods,
            engines=arguments.engine,
            repeats=arguments.repeats,
            scripts=scripts,
            rounds=arguments.rounds,
            seed=arguments.seed,
            say=_say,
        )
    if arguments.trace_cost:
        found.data["trace_cost"] = trace_cost(pair, budgets, methods, say=_say)
    _say("")
    print(found.to_text())
    if out is not None:
        print(f"\nJSON: {found.save(out)}")
    return cli.FINE


def _pair(arguments: argparse.Namespace, methods: Sequence[str]) -> Any:
    from ddlab import cli

    if arguments.shape is None:
        return cli._load(arguments, methods)
    given = [name for name in ("target", "drafter", "dtype", "device_map", "attention") if getattr(arguments, name)]
    if given:
        raise ValueError(f"--shape makes its own pair: leave --{given[0].replace('_', '-')} out")
    import transformers

    from ddlab.shape import random_pair

    transformers.utils.logging.set_verbosity_error()
    _say(f"random weights of {arguments.shape}")
    return random_pair(arguments.shape)


def _say(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()
