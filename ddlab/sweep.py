"""Prompts x methods x budgets x temperatures x seeds, each decoded once, in a folder that later calls go on with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ddlab.audit import band
from ddlab.decode import METHODS, Decoder
from ddlab.names import one_of
from ddlab.oracle import plain_logits
from ddlab.record import describe_pair
from ddlab.sampling import Sampling, gumbel_noise
from ddlab.sweeps.promptfile import Entry, as_entries, read_prompts
from ddlab.sweeps.results import Sweep
from ddlab.sweeps.sweepfile import Spec, SweepFolder
from ddlab.trace import TraceWriter, new_header

if TYPE_CHECKING:
    from ddlab.pair import Pair


@dataclass(frozen=True)
class Process:
    """Which of the processes of one launch this is (``accelerate launch``, ``torchrun``); they need no connection."""

    index: int = 0
    count: int = 1
    local: int = 0  # on this machine

    @classmethod
    def here(cls) -> Process:
        """By the variables that the launchers set, also with MPI, as accelerate reads them."""
        from accelerate.utils import get_int_from_env

        index = get_int_from_env(["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"], 0)
        count = get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"], 1)
        local = get_int_from_env(["LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK"], 0)
        return cls(index, count, local)

    @property
    def device(self) -> str:
        """Where this process's pair belongs: a GPU of its own, as far as there are some."""
        if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") or not torch.cuda.is_available():
            return "cpu"
        return f"cuda:{self.local % torch.cuda.device_count()}"


def sweep(
    pair: Pair,
    folder: str | os.PathLike[str],
    prompts: str | os.PathLike[str] | Iterable[Any] | None = None,
    *,
    methods: Sequence[str] = METHODS,
    budgets: Sequence[int] = (16, 64),
    temperatures: Sequence[float] = (0.0,),
    seeds: Sequence[int] = (0,),
    max_new_tokens: int = 128,
    progress: bool = True,
) -> Sweep:
    """Decode every prompt in every way that is asked for; what the folder has already is not decoded again.

    A run that is interrupted or killed is lost, the finished ones are not: the same call goes on. Under
    ``accelerate launch`` each process takes its share of the prompts, then what nobody has begun; the one that finishes
    last writes the table and the report. A run that fails is kept with its error, and tried again by a later call.

    Args:
        folder: new, or a sweep of the same settings, prompts and pair.
        prompts: a file of JSON lines (see `ddlab.sweeps.promptfile`), strings, ``{"id", "kind", "prompt"}`` dicts, or
            None: the 72 that come with ddlab.
        budgets: of ddtree; the other methods have none.
        seeds: at temperature 0 only the first is run, because none changes anything there.
        progress: show runs done and time left on stderr.

    Raises:
        ValueError: a setting or a prompt file that cannot be, or a folder with a sweep of something else; nothing has
            run then, and nothing was written.
        FileExistsError: the folder holds other files.
    """
    files = prepare(
        pair,
        folder,
        prompts,
        methods=methods,
        budgets=budgets,
        temperatures=temperatures,
        seeds=seeds,
        max_new_tokens=max_new_tokens,
    )
    return carry_out(pair, files, progress=progress)


def prepare(
    pair: Pair,
    folder: str | os.PathLike[str],
    prompts: str | os.PathLike[str] | Iterable[Any] | None = None,
    *,
    methods: Sequence[str],
    budgets: Sequence[int],
    temperatures: Sequence[float],
    seeds: Sequence[int],
    max_new_tokens: int,
) -> SweepFolder:
    """The first half of `sweep`: everything that can be refused is, and the folder is there."""
    wanted = {
        "methods": _distinct("method", methods),
        "budgets": _distinct("budget", budgets),
        "temperatures": _distinct("temperature", [float(t) for t in temperatures]),
        "seeds": _distinct("seed", seeds),
        "max_new_tokens": max_new_tokens,
    }
    if prompts is None or isinstance(prompts, str | os.PathLike):
        entries = read_prompts(prompts)
    else:
        entries = as_entries(prompts)
    _check(pair, wanted)
    header = new_header(pair=describe_pair(pair), settings=wanted, prompt={})
    manifest = {name: header[name] for name in ("created", "versions", "pair", "settings")}
    return SweepFolder.create(folder, manifest | {"prompts": [entry._asdict() for entry in entries]})


def carry_out(pair: Pair, files: SweepFolder, *, progress: bool) -> Sweep:
    """The second half: this process's runs, and the results if nothing is left to run then."""
    _work(pair, files, Process.here(), progress)
    return _close(pair, files)


def _distinct(what: str, values: Sequence[Any]) -> list[Any]:
    if isinstance(values, str) or not len(values):
        raise ValueError(f"give a list of at least one {what}, not {values!r}")
    return list(dict.fromkeys(values))


def _check(pair: Pair, wanted: dict[str, Any]) -> None:
    """Raises ValueError for settings that a decoder would refuse."""
    for method in wanted["methods"]:
        one_of("method", method, METHODS)
        if method != "ar" and pair.drafter is None:
            raise ValueError(f"{method} needs a drafter, this pair has none: sweep over methods=['ar']")
    for name in ("budgets", "seeds"):
        wrong = [value for value in wanted[name] if isinstance(value, bool) or not isinstance(value, int | np.integer)]
        if wrong:
            raise ValueError(f"{name} are integers, not {wrong[0]!r}")
        wanted[name] = [int(value) for value in wanted[name]]
    if wanted["max_new_tokens"] < 2:
        raise ValueError(f"max_new_tokens must be 2 or more for a round to run, not {wanted['max_new_tokens']}")
    for temperature in wanted["temperatures"]:
        for budget in wanted["budgets"]:
            Decoder(pair, budget=budget, temperature=temperature, max_new_tokens=wanted["max_new_tokens"])


# ---- the runs --------------------------------------------------------------------------------------------------------


def _work(pair: Pair, files: SweepFolder, process: Process, progress: bool) -> None:
    from tqdm.auto import tqdm

    earlier, warm = files.failed(), False  # failed in an earlier call: tried again
    by_id = {entry.id: entry for entry in files.entries}
    with tqdm(
        total=len(files.specs),
        initial=len(files.done()),
        desc="sweep",
        unit="run",
        disable=not progress or process.index > 0,
    ) as bar:
        for spec in _share(files.specs, process):
            if spec.name in files.done() or spec.name in files.failed() - earlier:
                continue
            with files.claim(spec.name) as mine:
                if not mine or spec.name in files.done():
                    continue
                earlier.discard(spec.name)
                if not warm:
                    _warm_up(pair, files)
                    warm = True
                _run(pair, files, spec, by_id[spec.prompt], process, bar)
            bar.update(len(files.done() | files.failed()) - bar.n)


def _share(specs: Sequence[Spec], process: Process) -> Iterator[Spec]:
    """This process's share of the texts, then everybody else's from the end, in case their process is lost.

    All methods of a text stay together, so that what they are compared by ran on one device at about one time; which
    of them comes first changes from text to text.
    """
    groups = [list(group) for _, group in groupby(specs, key=lambda spec: spec.group)]
    own = range(process.index, len(groups), process.count)
    others = [i for i in reversed(range(len(groups))) if i not in own]
    for i in [*own, *others]:
        first = i // process.count % len(groups[i])
        yield from groups[i][first:] + groups[i][:first]


def _decoder(pair: Pair, files: SweepFolder, spec: Spec) -> Decoder:
    settings = files.manifest["settings"]
    return Decoder(
        pair,
        method=spec.method,
        budget=spec.budget,
        temperature=spec.temperature,
        seed=spec.seed,
        max_new_tokens=settings["max_new_tokens"],
    )


def _warm_up(pair: Pair, files: SweepFolder) -> None:
    """Two rounds of each method and budget, kept nowhere: the first ones pay for buffers and compiled kernels."""
    specs = {(spec.method, spec.budget): spec for spec in files.specs}
    longest_first = sorted(files.entries, key=lambda entry: -len(str(entry.prompt)))  # its buffers hold the others too
    for spec in specs.values():
        for entry in longest_first:
            with suppress(Exception):  # what cannot be run will say so in its own run
                decoder = _decoder(pair, files, spec)
                decoder.start(entry.prompt)
                for _ in range(2):
                    if not decoder.finished:
                        decoder.step()
                break


def _run(pair: Pair, files: SweepFolder, spec: Spec, entry: Entry, process: Process, bar: Any) -> None:
    """One run into its trace; an error becomes the run's, and the sweep goes on."""
    try:
        decoder = _decoder(pair, files, spec)
        decoder.start(entry.prompt)
        decoder.trace.header["sweep"] = {"run": spec.name, **asdict(spec), "process": astuple(process)}
        with TraceWriter(files.begin(spec.name), decoder.trace) as writer:
            for step in decoder.run():
                writer.append(step)
                bar.set_postfix_str(f"{spec.name}: round {writer.rounds}", refresh=False)
                bar.update(0)
        files.finish(spec.name)
    except Exception as error:
        files.fail(spec, error)
        if pair.device.type == "cuda":
            torch.cuda.empty_cache()  # it may have been the memory


# ---- when they are done ----------------------------------------------------------------------------------------------


def _close(pair: Pair, files: SweepFolder) -> Sweep:
    """The results so far; written by whoever finds that nothing is left to run."""
    results = Sweep(files.path)
    if not results.complete:
        return results
    with files.claim("results") as mine:
        if mine:
            if _judge_differences(pair, results):
                results = Sweep(files.path)
            try:
                results.write_table()
            except ImportError as error:
                results.notes.append(str(error))
            results.report()
            with suppress(OSError):
                (files.path / "partial").rmdir()
    return results


def _judge_differences(pair: Pair, results: Sweep) -> bool:
    """Asks the target itself where a text left plain decoding's; True if there was something to ask."""
    open_ones = [d for same in results.texts() for d in same.differences if d["tie"] is None]
    for difference in open_ones:
        results.files.judge(difference["run"], judge(pair, results, difference))
    return bool(open_ones)


def judge(pair: Pair, results: Sweep, difference: dict[str, Any]) -> dict[str, Any]:
    """Is a difference from plain decoding a tie? The target runs once on the text before it, without a cache.

    Args:
        difference: of `Sweep.texts`.

    Returns:
        ``index``; ``margin``: by how many logits the two tokens' scores differ; ``band``: how far two correct
        evaluations may lie apart (see `ddlab.audit.band`); ``tie``: the margin is within it. Where one text has ended,
        the other went on after a stop token, and that is no tie.
    """
    trace = results.trace(difference["run"])
    index, tokens = difference["index"], (difference["token"], difference["ar_token"])
    if None in tokens:
        return {"index": index, "margin": None, "band": None, "tie": False}
    ids = [*trace.prompt_ids, *trace.output_ids[:index]]
    logits = plain_logits(pair, [ids], keep=1)[0, 0].double().cpu().numpy()  # [vocab]
    sampling = Sampling(trace.settings["temperature"], trace.settings["seed"])
    scores = logits
    if sampling.temperature:
        scores = logits + sampling.temperature * gumbel_noise(sampling.seed, len(ids), len(logits))
    margin = abs(float(scores[tokens[0]] - scores[tokens[1]]))
    allowed = 2 * band(pair.dtype, hybrid="linear_attention" in pair.layer_types) * float(np.abs(logits).max())
    return {"index": index, "margin": margin, "band": allowed, "tie": margin <= allowed}
