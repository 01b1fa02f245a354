"""Replayed rounds against real decodes, on every prompt: ``python tests/check_replay.py [--pair smollm2] [FOLDER]``.

A sweep decodes every prompt with chains and trees at some budgets; it goes on where an earlier call was stopped, if
FOLDER is given. Then one recording of each text, by plain decoding, is replayed at all of them, and each round is
held to the decoder's: its root, its accepted drafts, its new tokens, its nodes and why it ended. A round may part only
at a tie: two prefixes at the budget's cut whose scores agree to the last bits of the drafter's arithmetic; where trees
differ, their scores are compared. Exit status 1 if anything else differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter

import numpy as np

import ddlab
from ddlab.replay import Replay, replay
from ddlab.sweeps.promptfile import read_prompts
from ddlab.trace import Trace

TIE = 1e-4  # nats between two scores that float32 does not tell apart


def verdict(replayed: Replay, real: Trace) -> str:
    """``equal``, ``tie``, or what differs first."""
    chain = real.method == "dflash"
    budget, builder = (None, "chain") if chain else (real.settings["budget"], "best_first")
    mine = replayed.run(budget, builder)
    theirs = [(s.start, s.accepted, s.emitted, s.stop_reason, s.tree.drafted) for s in real.steps]
    if mine == theirs:
        return "equal"
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    if at is None:
        return f"{len(mine)} rounds, not {len(theirs)}"
    ours, tree = replayed.drafts.tree(theirs[at][0], budget, builder), real.steps[at].tree
    swapped = len(ours) == len(tree) and ours != tree
    if swapped and np.allclose(np.sort(ours.log_prob), np.sort(tree.log_prob), rtol=0, atol=TIE):
        return "tie"
    return f"round {at}: {mine[at]}, not {theirs[at]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="keep the sweep here")
    parser.add_argument("--pair", help="smollm2 (default: the embedded pair)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--every", type=int, default=1, help="only every so many prompts")
    arguments = parser.parse_args()
    pair = ddlab.load_pair(arguments.pair)
    with tempfile.TemporaryDirectory() as spare:
        sweep = ddlab.sweep(
            pair,
            arguments.folder or spare,
            read_prompts()[:: arguments.every],
            budgets=arguments.budgets,
            temperatures=arguments.temperature,
            max_new_tokens=arguments.max_new_tokens,
            progress=sys.stderr.isatty(),
        )
        found: dict[str, Counter[str]] = {}
        texts = dict.fromkeys((run.prompt, run.temperature) for run in sweep.runs)
        for text in texts:
            runs = {r.run: sweep.trace(r.run) for r in sweep.runs if (r.prompt, r.temperature) == text}
            plain = next(trace for trace in runs.values() if trace.method == "ar")
            replayed = replay(pair, plain, arguments.budgets)
            for run, real in runs.items():
                if real.method != "ar":
                    said = verdict(replayed, real)
                    counts = found.setdefault(f"{real.method} {real.settings['budget'] or ''}", Counter())
                    counts["rounds"] += real.rounds
                    counts[said if said in ("equal", "tie") else "DIFFERENT"] += 1
                    if said != "equal":
                        print(f"{run}: {said}")
        same_texts = sweep.texts()
    for name, counts in found.items():
        print(f"{name:12} {counts['equal']} runs equal, {counts['tie']} parted at a tie, {counts['DIFFERENT']} "
              f"different; {counts['rounds']} rounds")  # fmt: skip
    for same in same_texts:
        print(f"{same.name}, T = {same.temperature:g}: {same.equal} of {same.compared} texts are plain decoding's")
    raise SystemExit(any(counts["DIFFERENT"] for counts in found.values()))


if __name__ == "__main__":
    main()
