"""`ddlab bench`: rounds by stage, against the bandwidth floor, on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

EXAMPLE = """example:
  ddlab bench --budget 16 64 --prefix 64 256 --out bench.json

times rounds of plain decoding, chains and trees by stage, and prints tables in markdown. On a GPU with 60 GB or more:
  ddlab bench --shape qwen3.6-27b --engine graph eager --scripted-tau 2 4 6 8
does so at that model's shape with random weights, with a simulated acceptance of 2 to 8 tokens per round.
"""
SHAPES = ("qwen3.6-27b",)


def add(new: Callable[..., argparse.ArgumentParser], methods: Sequence[str]) -> None:
    """The subcommand, by ``new``: name, what runs it, examples, summary."""
    parser = new("bench", run, EXAMPLE, "time rounds by stage, against the memory's bandwidth")
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
    parser.add_argument("--progress", action="store_true", help="show progress also where stderr is no terminal")


def run(arguments: argparse.Namespace) -> int:
    from ddlab import cli
    from ddlab.bench import bench
    from ddlab.benching.scripted import Script
    from ddlab.benching.trace_cost import trace_cost

    out = None if arguments.out is None else cli._out(arguments, "bench.json")
    budgets, methods = sorted(set(arguments.budget)), list(dict.fromkeys(arguments.method))
    with cli._input_errors():
        scripts = [Script(tau, seed=arguments.seed) for tau in arguments.scripted_tau]
        if arguments.scripted_accept is not None:
            scripts.append(Script(probabilities=arguments.scripted_accept, seed=arguments.seed))
        progress = cli._Progress(arguments)
        pair = _pair(arguments, methods, progress.say)
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
            say=progress.say,
        )
    if arguments.trace_cost:
        tokens = 33 if arguments.shape else 128  # random weights bring one token a round
        found.data["trace_cost"] = trace_cost(pair, budgets, methods, tokens=tokens, say=progress.say)
    progress.clear()
    print(found.to_text())
    if out is not None:
        print(f"\nJSON: {found.save(out)}")
    return cli.FINE


def _pair(arguments: argparse.Namespace, methods: Sequence[str], say: Callable[[str], None]) -> Any:
    from ddlab import cli

    if arguments.shape is None:
        return cli._load(arguments, methods)
    given = [name for name in ("target", "drafter", "dtype", "device_map", "attention") if getattr(arguments, name)]
    if given:
        raise ValueError(f"--shape makes its own pair: leave --{given[0].replace('_', '-')} out")
    import transformers

    from ddlab.benching.shape import random_pair

    transformers.utils.logging.set_verbosity_error()
    say(f"random weights of {arguments.shape}")
    return random_pair(arguments.shape)
