"""Attention backends and delta-rule forms, layer by layer: how far apart are they, and which of them is wrong?

Two runs answer different questions. *Teacher-forced*, every layer gets the inputs that the first backend gave it: the
error of one layer. *Free-running*, the whole forward runs by itself: how errors add up, and what they change.
Each layer is held to its own plain form in float64 on the CPU (`ddlab.comparing.verdict`), so a verdict names the
backend that is wrong, and does not take the first one's word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ddlab import tokens
from ddlab.attention import CALLS
from ddlab.comparing import stopwatch, ways
from ddlab.comparing.comparison import BackendResult, Comparison, End, LayerFigures, LayerInfo
from ddlab.comparing.delta_forms import default_form
from ddlab.comparing.layerwise import Scene, Site, Watched, draft_scene, hidden_states, target_scene, watch
from ddlab.comparing.outcome import Outcome
from ddlab.comparing.verdict import Referee, apart, errors
from ddlab.comparing.ways import Way
from ddlab.names import one_of
from ddlab.trace import Step, Trace
from ddlab.verify import TargetState

if TYPE_CHECKING:
    from ddlab.pair import Pair

# of a run that compare makes by itself, where it is given a prompt and needs rounds
BUDGET, NEW_TOKENS = 16, 24


def compare(
    pair: Pair,
    prompt: Any,
    backends: Sequence[str] | None = None,
    what: str = "prefill",
    *,
    rounds: int | None = None,
    repeats: int = 5,
) -> Comparison:
    """Run one call of a pair on several backends and hold their layers to each other and to float64.

    Args:
        prompt: a str, chat messages or token ids; or a `Trace`, whose prompt or rounds are used. ``"draft"`` and
            ``"verify"`` need rounds: for a prompt a short run is made first.
        backends: names of `ddlab.attention.BACKENDS`, functions registered in Transformers' AttentionInterface, or
            forms of the delta rule (`ddlab.comparing.delta_forms.FORMS`); the others are held to the first. None: what
            is set now, then whatever else is here and cannot end the process (`ddlab.doctor` tries those that can).
        what: ``"prefill"`` (the prompt), ``"step"`` (one token behind a text), ``"draft"`` (the drafter's block) or
            ``"verify"`` (a draft tree). Draft and verify: at the starts of the trace's rounds.
        rounds: compare so many of them, spread over the run; None: all.
        repeats: measured runs behind each time, after one that does not count; 0: no times.

    The text before the call is read on whatever is set; the call alone runs on the backends.

    Raises:
        ValueError: a name, a prompt or a first backend that cannot be; nothing has run then.
    """
    one_of("call", what, CALLS)
    chosen = ways.every(pair, what) if backends is None else [ways.find(name) for name in dict.fromkeys(backends)]
    if not chosen:
        raise ValueError("give at least one backend to compare")
    part = "drafter" if what == "draft" else "target"
    if what in ("draft", "verify") and pair.drafter is None and not (what == "verify" and isinstance(prompt, Trace)):
        raise ValueError(f"this pair has no drafter, so there is nothing to {what}: build Pair(target, drafter)")
    contenders = [_Contender(way) for way in chosen]
    _admit(pair, part, what, contenders, [])
    trace = prompt if isinstance(prompt, Trace) else None
    if trace is None and what in ("draft", "verify"):
        from ddlab.decode import generate

        trace = generate(pair, prompt, budget=BUDGET, max_new_tokens=NEW_TOKENS)
    steps = [] if trace is None or what in ("prefill", "step") else _spread(trace.steps, rounds)
    if what in ("draft", "verify") and not steps:
        raise ValueError("the trace has no rounds, so there is nothing to compare")
    if trace is not None and max([*trace.prompt_ids, *trace.output_ids], default=0) >= pair.rows:
        raise ValueError(
            f"the trace has token ids that {pair.name!r} does not know: compare with the pair that decoded"
        )
    _admit(pair, part, what, contenders, steps)
    outcome, calls, notes = Outcome(pair, trace, what), [], []
    infos: list[LayerInfo] = []
    for step, scene in _scenes(pair, prompt, trace, what, steps):
        infos = infos or [LayerInfo(s.index, s.kind, s.window, s.sinks) for s in scene.sites]
        calls.append(_described(scene, step))
        notes += [said for said in _compare_one(pair, scene, contenders, outcome, step) if said not in notes]
    ran = [c for c in contenders if c.status == "ok"]
    times = stopwatch.measure(pair, scene, [c.way for c in ran], repeats)
    results = [c.result(outcome.end(c.way.name) if c in ran else None, times) for c in contenders]
    return Comparison(
        what=what,
        pair=pair.name,
        dtype=str(pair.dtype).removeprefix("torch."),
        device=pair.device.type,
        layers=tuple(infos),
        backends=tuple(results),
        calls=tuple(calls),
        linear_form=_form(chosen[0], what, calls) if any(i.kind == "linear_attention" for i in infos) else None,
        labels=_labels(pair, calls),
        repeats=repeats,
        timed=times.said,
        notes=(*notes, *outcome.notes),
    )


# ---- what is run -----------------------------------------------------------------------------------------------------


def _admit(pair: Pair, part: str, what: str, contenders: list[_Contender], steps: Sequence[Step]) -> None:
    """Refuse what is not there or not legal, before anything runs. Raises ValueError where that is the first one."""
    trees = [step.tree for step in steps] if what == "verify" else []
    branches = any((tree.parents != np.arange(len(tree)) - 1).any() for tree in trees)
    rows = max((len(tree) for tree in trees), default=1)
    for contender in contenders:
        way = contender.way
        missing = way.missing(pair.device.type)
        why = missing or way.refusal(pair, part, what, rows, branches)
        if why:
            contender.status, contender.reason = "not installed" if missing else "refused", why
    first = contenders[0]
    if first.status != "ok":
        raise ValueError(
            f"the first backend is what the others are held to, and {first.way.name!r} is {first.status}: "
            f"{first.reason}"
        )


def _scenes(
    pair: Pair, prompt: Any, trace: Trace | None, what: str, steps: Sequence[Step]
) -> Iterator[tuple[Step | None, Scene]]:
    if what in ("prefill", "step"):
        ids = list(pair.encode(prompt).ids if trace is None else trace.prompt_ids)
        state = TargetState(pair)
        if what == "step":
            ids += [] if trace is None else trace.output_ids
            if len(ids) < 2:
                raise ValueError("a step needs a text of at least two tokens: one to read, one to run")
            state.prefill(ids[:-1])
            ids = ids[-1:]
        yield None, target_scene(pair, state, what, ids)
        return
    assert trace is not None
    text = [*trace.prompt_ids, *trace.output_ids]
    drafter = pair.drafter if what == "draft" else None
    state = TargetState(pair, tapped=drafter is not None)
    cache = None if drafter is None else drafter.new_cache()
    for step in steps:
        if step.start > state.length:
            state.prefill(text[state.length : step.start])
            if drafter is not None and cache is not None:
                drafter.ingest(cache, state.tapped_features)
        if cache is not None:
            yield step, draft_scene(pair, cache, text[step.start])
        else:
            yield step, target_scene(pair, state, "verify", step.tree.tokens.tolist(), step.tree)


def _spread(steps: list[Step], rounds: int | None) -> list[Step]:
    if rounds is None or rounds >= len(steps):
        return steps
    if rounds < 1:
        raise ValueError(f"rounds is how many rounds to compare, 1 or more, not {rounds}")
    return [steps[i] for i in np.linspace(0, len(steps) - 1, rounds).round().astype(int)]


def _described(scene: Scene, step: Step | None) -> dict[str, Any]:
    rows = scene.rows
    said = {"start": rows.start, "parents": rows.parents.tolist(), "depth": rows.depth.tolist()}
    said |= {"tokens": list(scene.tokens), "round": None if step is None else step.index}
    if rows.block is not None:
        full = {kind: bool(among.all()) for kind, among in rows.block.items()}
        said["among"] = {kind: "bidirectional" if every else "causal" for kind, every in full.items()}
    return said


def _form(first: Way, what: str, calls: Sequence[dict[str, Any]]) -> str:
    """What computes the linear layers of the first backend's runs, and of every attention backend's."""
    return first.name if first.linear else default_form(what, max(len(call["parents"]) for call in calls))


def _labels(pair: Pair, calls: Sequence[dict[str, Any]]) -> dict[int, str]:
    ids = sorted({token for call in calls for token in call["tokens"]})
    table = tokens.describe(pair.tokenizer, ids)
    return {token: tokens.show(token, table) for token in ids}


# ---- one call --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Contender:
    """A backend and what was found of it so far, by layer."""

    way: Way
    status: str = "ok"
    reason: str = ""
    nodes: dict[int, dict[str, list[np.ndarray]]] = field(default_factory=dict)
    bands: dict[int, float] = field(default_factory=dict)
    over: dict[int, float] = field(default_factory=dict)  # the largest error as a multiple of its band
    judged: dict[int, tuple[float, float]] = field(default_factory=dict)  # that error, and the band
    faults: dict[int, list[str]] = field(default_factory=dict)  # that fit every wrong call so far
    untouched: set[int] = field(default_factory=set)

    def add(self, index: int, metrics: dict[str, np.ndarray]) -> None:
        kept = self.nodes.setdefault(index, {})
        for name, values in metrics.items():
            kept.setdefault(name, []).append(values)

    def judge(self, index: int, error: float, band: float) -> None:
        ratio = error / band if np.isfinite(error) else np.inf
        if ratio >= self.over.get(index, -1.0):
            self.over[index], self.judged[index] = ratio, (error, band)

    def result(self, end: End | None, times: stopwatch.Times) -> BackendResult:
        found = BackendResult(self.way.name, self.status, self.reason, self.way.linear)
        if self.status != "ok":
            return found
        name, layers = self.way.name, {}
        for index, kept in self.nodes.items():
            nodes = {metric: np.concatenate(parts) for metric, parts in kept.items()}
            worst = {m: float(x.min() if "cosine" in m else x.max()) for m, x in nodes.items() if m != "error"}
            error, band = self.judged.get(index, (None, None))
            verdict = "same" if index in self.untouched else "not judged"
            if index in self.judged:
                verdict = "wrong" if self.over[index] > 1 else "rounding"
            layers[index] = LayerFigures(
                **worst,
                error=error,
                band=band,
                verdict=verdict,
                fault=next(iter(self.faults.get(index, ())), None),
                seconds=times.layers.get((name, index)),
                peak_bytes=times.peaks.get((name, index)),
                nodes=nodes,
            )
        return replace(found, layers=layers, end=end, seconds=times.whole.get(name))


def _compare_one(
    pair: Pair, scene: Scene, contenders: list[_Contender], outcome: Outcome, step: Step | None
) -> list[str]:
    """One call on every backend that may run it. Returns what is to be noted."""
    first = contenders[0].way
    try:
        with first.use(pair, scene.part, scene.what):
            base = watch(scene, calls=True)
    except (TypeError, ValueError, RuntimeError, ImportError) as error:
        said = f"{first.name!r} fails: {ways.verbatim(error)}"
        raise ValueError(f"the first backend is what the others are held to, and {said}") from error
    given = {index: hidden_states(call) for index, call in base.calls.items()}
    referees, notes = {}, []
    for site in scene.sites:
        try:
            referees[site.index] = Referee(scene, site, base.calls[site.index], base.mixed[site.index].dtype)
        except (ValueError, TypeError, RuntimeError, MemoryError) as error:  # offloaded, quantised, or too large
            notes.append(f"layers without a verdict: {error}")
    logits: dict[str, Tensor] = {}
    disputed = False
    for contender in contenders:
        if contender.status != "ok":
            continue
        way = contender.way
        try:
            with way.use(pair, scene.part, scene.what):
                forced = base if way is first else watch(scene, given)
                free = base if way is first else watch(scene)
        except Exception as error:
            contender.status, contender.reason = "error", ways.verbatim(error)
            continue
        assert free.logits is not None
        logits[way.name] = free.logits
        for site in scene.sites:
            disputed |= _compare_layer(contender, site, base, forced, free, referees.get(site.index), way is first)
    outcome.add(step, logits, disputed)
    return notes


def _compare_layer(
    contender: _Contender,
    site: Site,
    base: Watched,
    forced: Watched,
    free: Watched,
    referee: Referee | None,
    first: bool,
) -> bool:
    """Keep one backend's figures of one layer. Whether it is wrong there."""
    i = site.index
    metrics = apart(base.mixed[i], forced.mixed[i])
    metrics |= {f"free_{name}": values for name, values in apart(base.out[i], free.out[i]).items()}
    if not (first or contender.way.touches(site)):
        contender.untouched.add(i)
        contender.add(i, metrics)
        return False
    if referee is None:
        contender.add(i, metrics)
        return False
    error = errors(forced.mixed[i], referee.out)
    contender.add(i, metrics | {"error": error})
    worst = float(error.max())
    contender.judge(i, worst, referee.band)
    wrong = not worst <= referee.band
    if wrong:
        fitting = referee.faults(forced.mixed[i])
        before = contender.faults.get(i)
        contender.faults[i] = fitting if before is None else [said for said in before if said in fitting]
    return wrong
