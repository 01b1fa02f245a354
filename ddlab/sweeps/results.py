"""What a sweep found, from the traces in its folder: runs, figures with intervals, comparisons by prompt and text."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlab.intervals import Estimate, Paired
from ddlab.names import one_of
from ddlab.sweeps.runs import METRICS, Run, figure, pair_up, run_of
from ddlab.sweeps.sweepfile import Spec, SweepFolder, write_bytes
from ddlab.trace import Trace

if TYPE_CHECKING:
    import pandas

    from ddlab.advice import Replayed
    from ddlab.pair import Pair

TABLE = "results.parquet"
Key = tuple[str, int | None, float]  # method, budget, temperature


@dataclass(frozen=True)
class Group:
    """Runs of one method, budget and temperature. Figures are means over prompts, without the short runs.

    A prompt's value is a ratio of sums over its seeds. stopped_runs: of ``runs``, ended by a stop token, but long
    enough to count. short: tokens per round of the short runs alone.
    """

    method: str
    budget: int | None
    temperature: float
    kind: str | None  # None: all
    runs: int
    stopped_runs: int
    short_runs: int
    failed_runs: int
    tokens_per_round: Estimate
    tokens_per_second: Estimate
    short: Estimate

    @property
    def name(self) -> str:
        return name_of(self.method, self.budget)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"name": self.name}


@dataclass(frozen=True)
class SameText:
    """Texts of one method, budget and temperature against plain decoding's (``ar``), token by token.

    differences: dicts with ``run``, ``prompt``, ``seed``, ``index`` (of the first new token that differs, from 0),
    ``token`` and ``ar_token`` (None: that text has ended), ``margin`` (by how many logits plain decoding preferred its
    own; None for the first token) and ``tie`` (within the dtype's band; None: not judged, see `ddlab.sweep.judge`).
    """

    method: str
    budget: int | None
    temperature: float
    compared: int
    equal: int
    differences: tuple[dict[str, Any], ...]

    @property
    def name(self) -> str:
        return name_of(self.method, self.budget)


def name_of(method: str, budget: int | None) -> str:
    return method if budget is None else f"{method}, budget {budget}"


class Sweep:
    """A sweep's folder as it is now. Reading it needs no model; a run that is under way is pending."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.files = SweepFolder(path)
        self.path, self.manifest = self.files.path, self.files.manifest
        self.settings: dict[str, Any] = self.manifest["settings"]
        done, failed = self.files.done(), self.files.failed()
        self.runs: list[Run] = []
        self.pending: list[str] = []
        self.failed: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._texts: dict[str, tuple[list[int], list[float]]] = {}  # by run: new tokens; of ar the margins too
        for spec in self.files.specs:
            if spec.name in done:
                self._read(spec)
            elif spec.name in failed:
                self.failed.append(self.files.failure(spec.name))
            else:
                self.pending.append(spec.name)
        self._note_mixtures()

    def __repr__(self) -> str:
        return (
            f"<Sweep {str(self.path)!r}: {len(self.runs)} of {self.planned} runs, {len(self.failed)} failed, "
            f"{len(self.pending)} pending>"
        )

    @property
    def planned(self) -> int:
        return len(self.files.specs)

    @property
    def complete(self) -> bool:
        """Every run was made, or failed."""
        return not self.pending

    def _read(self, spec: Spec) -> None:
        try:
            trace = self.trace(spec.name)
            run = run_of(spec, trace)
        except (ValueError, KeyError, OSError) as error:
            self.pending.append(spec.name)
            self.notes.append(
                f"{spec.name} cannot be read ({error}): delete {self.files.run_path(spec.name)}, sweep again"
            )
            return
        self.runs.append(run)
        margins = [float(step.margin[step.path[-1]]) for step in trace.steps] if spec.method == "ar" else []
        self._texts[spec.name] = trace.output_ids, margins

    def _note_mixtures(self) -> None:
        for what in ("device", "torch"):
            found = Counter(getattr(run, what).split(":")[0] for run in self.runs)
            if len(found) > 1:
                counted = ", ".join(f"{name} ({n} runs)" for name, n in sorted(found.items()))
                self.notes.append(f"made on more than one {what}: {counted}. Do not compare their seconds")

    def trace(self, run: str) -> Trace:
        """The trace of a finished run, by name."""
        return Trace.load(self.files.run_path(run))

    # ---- the table -------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """One row a finished run, short ones included; columns as in `Run`."""
        return [asdict(run) for run in self.runs]

    def to_frame(self) -> pandas.DataFrame:
        """`rows` as a table. Raises ImportError, naming the cure, without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("Sweep.to_frame needs pandas: pip install pandas") from error
        frame = pandas.DataFrame(self.rows())
        return frame.astype({"budget": "Int64"}) if self.runs else frame

    def write_table(self) -> Path:
        """Writes `rows` to results.parquet. Raises ImportError, naming the cure, without pyarrow."""
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ImportError(
                "a Parquet table needs pyarrow: pip install pyarrow (the runs are kept all the same)"
            ) from error
        kinds = {"str": pyarrow.string(), "int": pyarrow.int64(), "float": pyarrow.float64(), "bool": pyarrow.bool_()}
        fields = [(name, kinds[str(kind).split(" ")[0]]) for name, kind in Run.__annotations__.items()]
        out = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.Table.from_pylist(self.rows(), pyarrow.schema(fields)), out)
        write_bytes(self.path / TABLE, out.getvalue().to_pybytes())
        return self.path / TABLE

    # ---- figures ---------------------------------------------------------------------------------

    @property
    def keys(self) -> list[Key]:
        """(method, budget, temperature) of everything planned, in order."""
        return list(dict.fromkeys((s.method, s.budget, s.temperature) for s in self.files.specs))

    def _of(self, key: Key, kind: str | None = None) -> list[Run]:
        return [r for r in self.runs if (r.method, r.budget, r.temperature) == key and kind in (None, r.kind)]

    def summary(self, by_kind: bool = False) -> list[Group]:
        """Figures of every method, budget and temperature; with ``by_kind`` for each kind of prompt apart."""
        kinds: Sequence[str | None] = list(dict.fromkeys(s.kind for s in self.files.specs)) if by_kind else [None]
        return [self._group(key, kind) for kind in kinds for key in self.keys]

    def _group(self, key: Key, kind: str | None) -> Group:
        runs = self._of(key, kind)
        full, short = [r for r in runs if not r.short], [r for r in runs if r.short]
        failed = [f for f in self.failed if (f["method"], f["budget"], f["temperature"]) == key]
        speed, long, early = (
            figure(metric, some)
            for metric, some in (("tokens_per_second", full), ("tokens_per_round", full), ("tokens_per_round", short))
        )
        return Group(
            *key,
            kind=kind,
            runs=len(full),
            stopped_runs=sum(r.finished == "stop_token" for r in full),
            short_runs=len(short),
            failed_runs=sum(kind in (None, f["kind"]) for f in failed),
            tokens_per_round=long,
            tokens_per_second=speed,
            short=early,
        )

    def compare(
        self, metric: str = "tokens_per_second", baseline: tuple[str, int | None] | None = None
    ) -> list[Paired]:
        """Every method and budget against one of them, prompt by prompt at the same temperature and seeds.

        Args:
            metric: ``tokens_per_second`` or ``tokens_per_round``.
            baseline: (method, budget), such as ``("ddtree", 64)``; None: the first that was planned.

        Raises:
            ValueError: a metric or a baseline that is not there.
        """
        one_of("metric", metric, METRICS)
        known = list(dict.fromkeys(key[:2] for key in self.keys))
        base = known[0] if baseline is None else baseline
        if base not in known:
            raise ValueError(f"no runs of {base!r} to compare with: the sweep has {known}")
        out = []
        for method, budget, temperature in self.keys:
            if (method, budget) != base:
                ours, theirs = self._of((method, budget, temperature)), self._of((*base, temperature))
                names = f"{name_of(method, budget)}, T = {temperature:g}", name_of(*base)
                out.append(pair_up(metric, ours, theirs, names))
        return out

    def texts(self) -> list[SameText]:
        """Every method's texts against plain decoding of the same prompt, temperature and seed, where both were run."""
        plain = {(s.prompt, s.temperature, s.seed): s.name for s in self.files.specs if s.method == "ar"}
        out = []
        for key in self.keys:
            pairs = [(run, plain.get((run.prompt, run.temperature, run.seed), "")) for run in self._of(key)]
            pairs = [(run, ar) for run, ar in pairs if ar in self._texts]
            if key[0] != "ar" and pairs:
                found = [self._difference(run, ar) for run, ar in pairs]
                differ = tuple(d for d in found if d is not None)
                out.append(SameText(*key, len(pairs), len(pairs) - len(differ), differ))
        return out

    def _difference(self, run: Run, ar: str) -> dict[str, Any] | None:
        (ours, _), (theirs, margins) = self._texts[run.run], self._texts[ar]
        if ours == theirs:
            return None
        index = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        judged = self.files.judgement(run.run)
        judged = judged if judged.get("index") == index else {}
        said = {"run": run.run, "prompt": run.prompt, "seed": run.seed, "index": index}
        tokens = {
            name: ids[index] if index < len(ids) else None for name, ids in (("token", ours), ("ar_token", theirs))
        }
        margin = margins[index - 1] if 0 < index <= len(margins) else None
        return {**said, **tokens, "margin": margin, "tie": judged.get("tie")}

    # ---- what comes of it ------------------------------------------------------------------------

    def replays(self, pair: Pair, budgets: Iterable[int]) -> list[Replayed]:
        """One recording of each prompt, at the lowest temperature and first seed, to be replayed up to these budgets.

        For `ddlab.advise`. Any method's text will do; the drafter is run from every position of it.
        """
        from ddlab.advice import Replayed
        from ddlab.replay import replay

        largest, out = list(budgets), []
        for entry in self.files.entries:
            mine = [run for run in self.runs if run.prompt == entry.id]
            if mine:
                chosen = min(mine, key=lambda run: (run.temperature, self.settings["seeds"].index(run.seed)))
                out.append(Replayed(entry.id, entry.kind, replay(pair, self.trace(chosen.run), largest)))
        return out

    def report(self, path: str | os.PathLike[str] | None = None, advice: Any = None) -> Path:
        """Writes one HTML file with all figures; None: report.html in the sweep's folder."""
        from ddlab.views.sweep import sweep_report  # views read results, so they come second

        return sweep_report(self, self.path / "report.html" if path is None else path, advice)

    def to_text(self) -> str:
        from ddlab.views.sweep import sweep_view

        return sweep_view(self).text
