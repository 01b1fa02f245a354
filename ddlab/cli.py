"""`ddlab decode | report | compare | doctor | sweep | bench`: the main jobs without a notebook."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlab.commands import bench, compare, doctor, sweep

if TYPE_CHECKING:  # torch is loaded when a command runs, so that --help is there at once
    from ddlab.pair import Pair
    from ddlab.trace import Trace

METHODS = ("ar", "dflash", "ddtree")
PROMPT = "Explain the theory of general relativity in detail. Include the mathematical framework."
FINE, DIVERGED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

DECODE_EXAMPLE = """example:
  ddlab decode --method ddtree --budget 64 --prompt "What is a draft tree?" --trace runs/first

prints a line a round (what was drafted, accepted, and why the path ended), then the text, and keeps
every round in runs/first, to be opened with ddlab.Trace.load("runs/first").
"""
REPORT_EXAMPLE = """example:
  ddlab report --max-new-tokens 64 --out report.html

decodes one prompt with plain decoding (ar), DFlash chains (dflash) and DDTree trees (ddtree), checks every
number of every round against the target itself, and writes one HTML file that needs nothing else.
exit status: 0 all runs are what the target says, 1 one of them is not, 2 the input does not fit.
"""


class BadInput(Exception):
    """What the user has to change, in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that is not UTF-8 gets escapes, not an error
            stream.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except BadInput as error:
        print(f"ddlab: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("\nddlab: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE


# ---- commands ----------------------------------------------------------------------------------


def _decode(arguments: argparse.Namespace) -> int:
    from ddlab.views import rounds

    with _input_errors():
        prompt = _prompt(arguments)
        if arguments.trace is not None:
            from ddlab import tracefile

            tracefile.refuse_foreign(Path(arguments.trace))
        pair = _load(arguments, [arguments.method])
        decoder = _decoder(pair, arguments, arguments.method, trace_path=arguments.trace)
        decoder.start(prompt)
    trace: Trace = decoder.trace
    print("\n".join(rounds.head_lines(trace)), flush=True)
    progress = _Progress(arguments, quiet=sys.stdout.isatty())  # the rounds themselves show that it moves
    for step in decoder.run():
        progress.clear()
        print(rounds.round_text(trace, step.index), flush=True)
        progress.round(trace, arguments.max_new_tokens)
    progress.clear()
    print("\n".join(rounds.tail_lines(trace)))
    if arguments.trace is not None:
        print(f"\ntrace: {arguments.trace}")
    return FINE


def _report(arguments: argparse.Namespace) -> int:
    out, methods = _out(arguments, "report.html"), list(dict.fromkeys(arguments.method))
    with _input_errors():
        prompt = _prompt(arguments)
        pair = _load(arguments, methods)
        decoders = {method: _decoder(pair, arguments, method) for method in methods}

    from ddlab.audit import audit as audit_trace
    from ddlab.report import report
    from ddlab.views import summary_view

    progress = _Progress(arguments)
    traces, audits = [], []
    for method, decoder in decoders.items():
        with _input_errors():
            decoder.start(prompt)
        progress.begin()
        for _ in decoder.run():
            progress.round(decoder.trace, arguments.max_new_tokens)
        progress.say(f"{method}: comparing {decoder.trace.rounds} rounds with the target itself")
        traces.append(decoder.trace)
        audits.append(audit_trace(pair, decoder.trace))
    progress.clear()
    path = report(traces, out, audits=audits)
    print(summary_view(traces, audits).text)
    wrong = [audit for audit in audits if not audit.ok]
    for audit in wrong:
        print(f"\n{audit.to_text()}")
    print(f"\nreport: {path}")
    return DIVERGED if wrong else FINE


def _load(arguments: argparse.Namespace, methods: Sequence[str]) -> Pair:
    import transformers

    import ddlab
    from ddlab.pair import SMOLLM2

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    drafting = [method for method in methods if method != "ar"]
    if drafting and arguments.target not in (None, SMOLLM2) and arguments.drafter is None:
        raise BadInput(f"{' and '.join(drafting)} need a drafter: give --drafter, or --method ar")
    return ddlab.load_pair(
        arguments.target,
        arguments.drafter,
        device_map=arguments.device_map,
        dtype=arguments.dtype,
        attention=arguments.attention,
    )


def _decoder(pair: Pair, arguments: argparse.Namespace, method: str, **more: Any) -> Any:
    import ddlab

    return ddlab.Decoder(
        pair,
        method=method,
        budget=arguments.budget,
        temperature=arguments.temperature,
        seed=arguments.seed,
        max_new_tokens=arguments.max_new_tokens,
        **more,
    )


def _out(arguments: argparse.Namespace, example: str) -> Path:
    """Where --out says, if a file can be written there."""
    out = Path(arguments.out)
    if not out.parent.is_dir():
        raise BadInput(f"no folder {out.parent} to write {out.name} into: create it first")
    if out.is_dir():
        raise BadInput(f"{out} is a folder: give --out the name of a file, such as {out / example}")
    return out


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt_file is None:
        return os.fsencode(arguments.prompt).decode("utf-8")  # under another locale it holds UTF-8 undecoded
    return Path(arguments.prompt_file).read_text("utf-8").removesuffix("\n")


@contextmanager
def _input_errors() -> Iterator[None]:
    """A refused pair, setting or prompt becomes one line; a later error is a bug and keeps its traceback."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise BadInput(" ".join(str(error).split()) or type(error).__name__) from error


# ---- progress ----------------------------------------------------------------------------------


class _Progress:
    """A line on stderr that is written over: rounds, tokens, rate. For a person only, or when asked for."""

    def __init__(self, arguments: argparse.Namespace, quiet: bool = False):
        self._on = arguments.progress or (sys.stderr.isatty() and not quiet)
        self._shown = False
        self.begin()

    def begin(self) -> None:
        self._started = time.perf_counter()

    def round(self, trace: Trace, wanted: int) -> None:
        seconds, tokens = time.perf_counter() - self._started, len(trace.output_ids)
        rate = f"{tokens / seconds:.1f} tokens/s" if seconds > 0 else ""
        self.say(f"{trace.method}: round {trace.rounds}, {tokens} of {wanted} tokens, {rate}")

    def say(self, line: str) -> None:
        if self._on:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False


# ---- arguments ---------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    from ddlab import __version__

    parser = argparse.ArgumentParser(
        prog="ddlab",
        description="Look inside DFlash / DDTree speculative decoding: what was drafted, taken, and why.",
        epilog="Start with: ddlab report. It needs no other argument, no network and no GPU.",
    )
    parser.add_argument("--version", action="version", version=f"ddlab {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    decode = _decoding(commands, "decode", _decode, DECODE_EXAMPLE, "decode a prompt and print it round by round")
    decode.add_argument(
        "--method",
        choices=METHODS,
        default="ddtree",
        help="plain decoding, chains, or trees (default: ddtree)",
    )
    decode.add_argument("--trace", metavar="FOLDER", help="keep every round in this folder as it is decoded")
    report = _decoding(
        commands,
        "report",
        _report,
        REPORT_EXAMPLE,
        "decode with every method, check, and write one HTML file",
    )
    report.add_argument(
        "--method", choices=METHODS, nargs="+", default=METHODS, help="one or several (default: all three)"
    )
    report.add_argument("--out", metavar="FILE", default="report.html", help="where to write it (default: report.html)")
    new = functools.partial(_command, commands)
    compare.add(new, PROMPT)
    doctor.add(new)
    sweep.add(new, METHODS)
    bench.add(new, METHODS)
    return parser


def _decoding(commands: Any, name: str, run: Any, example: str, summary: str) -> argparse.ArgumentParser:
    """A command that decodes one prompt."""
    parser = _command(commands, name, run, example, summary)
    text = parser.add_argument_group("text")
    prompt = text.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", default=PROMPT, help=f'one user turn (default: "{PROMPT}")')
    prompt.add_argument(
        "--prompt-file", metavar="FILE", help="read it from a UTF-8 file; a line break at its end is left out"
    )
    text.add_argument("--max-new-tokens", metavar="N", type=int, default=128, help="(default: 128)")
    text.add_argument("--budget", metavar="N", type=int, default=64, help="most nodes of a tree (default: 64)")
    text.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0 is greedy (default: 0)")
    text.add_argument("--seed", metavar="N", type=int, default=0, help="of the sampling noise (default: 0)")
    parser.add_argument("--progress", action="store_true", help="show progress also where stderr is no terminal")
    return parser


def _command(commands: Any, name: str, run: Any, example: str, summary: str) -> argparse.ArgumentParser:
    """A command, with the arguments that say which pair."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target",
        metavar="NAME",
        help="hub name, folder, or smollm2 with its drafter (default: the small hybrid pair that comes with ddlab)",
    )
    models.add_argument("--drafter", metavar="NAME", help="hub name or folder of its DFlash drafter")
    models.add_argument("--dtype", help="float32, bfloat16, float16 or auto (default: as saved; float32 for ours)")
    models.add_argument("--device-map", metavar="MAP", help="where the target goes: auto, cpu, cuda:0 (accelerate)")
    models.add_argument(
        "--attention",
        metavar="NAME",
        help="attention backend: auto, sdpa, eager, flash_tree, flex or sdpa:KERNEL (default: sdpa)",
    )
    return parser
