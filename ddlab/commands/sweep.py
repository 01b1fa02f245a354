"""`ddlab sweep`: prompts x methods x budgets x temperatures x seeds into a folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is loaded when the command runs, so that --help is there at once
    from ddlab.pair import Pair
    from ddlab.sweeps.results import Sweep

CHECKED_PROMPTS = 6
EXAMPLE = """example:
  ddlab sweep runs/first --budget 16 64 --max-new-tokens 64 --advise

decodes the prompts that come with ddlab with every method, a trace a run, into runs/first, prints figures with
intervals and comparisons by prompt, and says which budget to take. If it is killed, the same command goes on.
With a GPU for each of two processes: accelerate launch --multi_gpu --num_processes 2 -m ddlab sweep runs/first
exit status: 0 fine, 1 a run failed, a text is not the target's own or --check fails, 2 the input does not fit.
"""


def add(new: Callable[..., argparse.ArgumentParser], methods: Sequence[str]) -> None:
    """The subcommand, by ``new``: name, what runs it, examples, summary."""
    parser = new("sweep", run, EXAMPLE, "decode many prompts in many ways, and compare")
    parser.add_argument("folder", metavar="FOLDER", help="new, or a sweep of the same settings, which then goes on")
    what = parser.add_argument_group("what to run")
    what.add_argument("--prompts", metavar="FILE", help='{"id", "kind", "prompt"} a line (default: those of ddlab)')
    what.add_argument("--method", choices=methods, nargs="+", default=methods, help="(default: all three)")
    what.add_argument("--budget", metavar="N", type=int, nargs="+", default=[16, 64], help="of ddtree (default: 16 64)")
    what.add_argument("--temperature", metavar="T", type=float, nargs="+", default=[0.0], help="(default: 0)")
    what.add_argument("--seed", metavar="N", type=int, nargs="+", default=[0], help="of the noise (default: 0)")
    what.add_argument("--max-new-tokens", metavar="N", type=int, default=128, help="(default: 128)")
    then = parser.add_argument_group("then")
    then.add_argument("--advise", action="store_true", help="time rounds on this machine and say which budget is best")
    then.add_argument("--check", action="store_true", help="hold predicted to measured tokens/s at these budgets")
    parser.add_argument("--progress", action="store_true", help="show progress also where stderr is no terminal")


def run(arguments: argparse.Namespace) -> int:
    import torch

    from ddlab import cli
    from ddlab.sweep import Process, carry_out, prepare
    from ddlab.views.sweep import sweep_view

    process = Process.here()
    with cli._input_errors():
        if process.count > 1:
            if arguments.device_map is not None:
                raise ValueError("each of several processes takes a device of its own: leave --device-map out")
            arguments.device_map = {"": process.device}
            if process.device != "cpu":
                torch.cuda.set_device(process.device)
        pair = cli._load(arguments, arguments.method)
        files = prepare(
            pair,
            arguments.folder,
            arguments.prompts,
            methods=arguments.method,
            budgets=arguments.budget,
            temperatures=arguments.temperature,
            seeds=arguments.seed,
            max_new_tokens=arguments.max_new_tokens,
        )
    results = carry_out(pair, files, progress=arguments.progress or sys.stderr.isatty())
    if not results.complete:
        if process.index == 0:
            print(f"{results!r}: another process has them, or was lost; then the same command goes on")
        return cli.FINE
    print(sweep_view(results, by_kind=False).text)
    differ = [d for same in results.texts() for d in same.differences if not d["tie"]]
    wrong = bool(results.failed or differ)
    if arguments.advise:
        with cli._input_errors():  # texts that are all too short, say
            advice = _advise(pair, results, arguments.budget)
        print(f"\n{advice}")
    if arguments.check:
        with cli._input_errors():
            checked = _check(pair, results, arguments.budget)
        print(f"\n{checked.to_text()}")
        wrong |= not checked.ok
    print(f"\nreport: {results.path / 'report.html'}")
    return cli.DIVERGED if wrong else cli.FINE


def _advise(pair: Pair, results: Sweep, budgets: Sequence[int]) -> str:
    """Advice on the sweep's prompts, kept in advice.json and in the report."""
    from ddlab.advice import advise
    from ddlab.costs.calibration import calibrate
    from ddlab.sweeps.sweepfile import write_json

    largest = max(budgets)
    temperature = min(results.settings["temperatures"])
    longest = max((run.prompt_tokens + run.new_tokens for run in results.runs), default=256)
    cost = calibrate(pair, largest, prefixes=(32, max(64, longest)), temperature=temperature)
    advice = advise(results.replays(pair, [largest]), cost)
    write_json(results.path / "advice.json", advice.to_dict())
    results.report(advice=advice)
    return advice.to_text()


def _check(pair: Pair, results: Sweep, budgets: Sequence[int]) -> Any:
    """The cost model against real decodes, on some of the prompts that could be decoded."""
    from ddlab.costs.check import check

    decoded = {run.prompt for run in results.runs if not run.short}
    prompts = [entry.prompt for entry in results.files.entries if entry.id in decoded]
    some = prompts[:: max(1, len(prompts) // CHECKED_PROMPTS)][:CHECKED_PROMPTS]
    return check(
        pair,
        some,
        [budget for budget in budgets if budget],
        max_new_tokens=results.settings["max_new_tokens"],
        temperature=min(results.settings["temperatures"]),
    )
