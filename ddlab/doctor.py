"""What runs on this machine for a pair, what does not and why, and what is used instead.

Every backend is tried on every kind of layer in every call (`ddlab.comparing.probe`), and held to float64: a backend
that runs is not yet one that works. The result is plain text, made to be pasted into an issue.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from ddlab import attention
from ddlab.comparing import children, probe, ways
from ddlab.comparing.delta_forms import FORMS, default_form
from ddlab.comparing.probe import UNMASKED, Probe
from ddlab.comparing.ways import Way

if TYPE_CHECKING:
    import pandas

    from ddlab.pair import Pair
    from ddlab.views.page import View

_PACKAGES = (
    "ddlab",
    "torch",
    "transformers",
    "accelerate",
    "triton",
    "flash-attn",
    "flash-linear-attention",
    "kernels",
)


@dataclass(frozen=True)
class Choice:
    """What a part of a pair decodes with. now: what is set; auto: what ``load_pair(attention="auto")`` takes.

    works: of what is set now, whether every call was right. usable: the backends of which every call was right.
    fastest: of those, by the probes' times; slower: time of what auto takes, of the fastest's, the mean over kinds of
    layers and calls, each a median of ``repeats``.
    """

    part: str
    now: str
    auto: str
    works: bool
    usable: tuple[str, ...]
    fastest: str | None = None
    slower: float | None = None
    repeats: int = 0


@dataclass(frozen=True, repr=False)
class Findings:
    """What the doctor found. faults: of the pair's configuration, whatever the backend."""

    pair: str
    machine: dict[str, str]
    probes: tuple[Probe, ...]
    choices: tuple[Choice, ...]
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """The pair can decode exactly on this machine, with something."""
        return not self.faults and all(choice.usable for choice in self.choices)

    def to_frame(self) -> pandas.DataFrame:
        """One row a probe. Raises ImportError, naming the cure, without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("Findings.to_frame needs pandas: pip install pandas") from error
        return pandas.DataFrame([asdict(p) for p in self.probes])

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self) | {"ok": self.ok}

    def view(self) -> View:
        """As a table and as text, see `ddlab.views.findings_view`."""
        from ddlab.views.findings import findings_view

        return findings_view(self)

    def to_text(self) -> str:
        return self.view().text

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        wrong = sum(p.verdict == "wrong" for p in self.probes)
        said = "can decode exactly" if self.ok else "CANNOT decode exactly"
        return f"<Findings: {self.pair} {said}; {len(self.probes)} probes, {wrong} wrong>"

    def _repr_mimebundle_(self, **keywords: object) -> dict[str, str]:
        return self.view()._repr_mimebundle_(**keywords)


def doctor(
    pair: Pair | None = None, backends: Sequence[str] | None = None, *, repeats: int = probe.REPEATS
) -> Findings:
    """Try what a pair's layers need on this machine, and say what works, what does not, and why.

    Args:
        pair: None: the embedded pair. Its layers are tried in miniature: own classes, head shapes, dtype and device.
        backends: names of `ddlab.attention.BACKENDS`, functions registered in Transformers' AttentionInterface, forms
            of the delta rule; None: all of ddlab's, and whatever else the pair is set to.
        repeats: measured runs behind each time; 0: no times.

    Backends that are compiled first, or come with kernels of their own, run in a child process; that takes a while.

    Raises:
        ValueError: an unknown name.
    """
    if pair is None:
        from ddlab.pair import load_pair

        pair = load_pair()
    chosen = _everything(pair) if backends is None else [probe.known(name) for name in dict.fromkeys(backends)]
    faults, notes = tuple(faults_of(pair)), [f"Windows longer than {probe.miniature.WINDOW} are tried at that length."]
    small = True
    try:
        subjects = probe.subjects(pair)
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        small, subjects = False, probe.subjects(pair, small=False)
        notes = [
            f"Tried on the pair itself, with {probe.TEXT} tokens before a call: no miniature ({ways.verbatim(error)})."
        ]
    found = children.probes(subjects, chosen, repeats, small=small)
    said = [replace(p, said=public(p.said)) for p in found]
    return Findings(
        pair=public(pair.name),
        machine=machine(pair),
        probes=tuple(said),
        choices=tuple(_choice(pair, part, found) for part in ("target", "drafter")[: 2 if pair.drafter else 1]),
        faults=faults,
        notes=tuple(map(public, notes)),
    )


def _everything(pair: Pair) -> list[Way]:
    names = list(attention.BACKENDS)
    now = [attention.attention_backend(pair, part) for part in ("target", "drafter")[: 2 if pair.drafter else 1]]
    names += [name for name in dict.fromkeys(now) if name not in names]
    if "linear_attention" in pair.layer_types:
        names += [form.name for form in FORMS.values() if not form.wrong_on_trees]
    return [probe.known(name) for name in names]


def unloadable(name: str, error: Exception) -> Findings:
    """Of a pair that does not load: why, and on which machine."""
    return Findings(public(name), machine(), (), (), (public(f"it does not load: {ways.verbatim(error)}"),))


# ---- the configuration -----------------------------------------------------------------------------------------------


def faults_of(pair: Pair) -> list[str]:
    """What is wrong before any kernel runs: sliding layers that would silently run as full attention."""
    kinds = zip(pair.layer_types, pair.windows, strict=True)
    found = _unbounded(
        "target", [i for i, (kind, window) in enumerate(kinds) if kind == "sliding_attention" and not window]
    )
    if pair.drafter is None:
        return found
    settings, config = pair.drafter.settings, pair.drafter.model.config
    sliding = [i for i, kind in enumerate(settings.layer_types) if kind == "sliding_attention"]
    if not settings.sliding_window:
        return found + _unbounded("drafter", sliding)
    own = list(config.layer_types)
    apart = [i for i, kind in enumerate(settings.layer_types) if own[i : i + 1] != [kind]]
    if apart:
        found.append(
            f"drafter: layers {apart} are {[own[i] for i in apart]} in the model, and "
            f"{[settings.layer_types[i] for i in apart]} in its settings"
        )
    if sliding and config.sliding_window != settings.sliding_window:
        found.append(
            f"drafter: its model has a window of {config.sliding_window}, its settings one of {settings.sliding_window}"
        )
    return found


def _unbounded(part: str, layers: list[int]) -> list[str]:
    if not layers:
        return []
    return [
        f"{part}: layers {layers} are sliding_attention, but sliding_window is None (use_sliding_window false?): they "
        "run as full attention"
    ]


# ---- the choice ------------------------------------------------------------------------------------------------------


def _choice(pair: Pair, part: str, found: Sequence[Probe]) -> Choice:
    mine = [p for p in found if p.part == part and p.what != UNMASKED and p.backend not in FORMS]
    names = list(dict.fromkeys(p.backend for p in mine))
    usable = [name for name in names if all(p.works for p in mine if p.backend == name)]
    own = [p for p in found if p.part == part and p.backend == default_form(p.what, 1 if p.what == "step" else 2)]
    if not all(p.works for p in own):  # the linear layers, whatever the attention
        usable = []
    now, auto = attention.attention_backend(pair, part), attention.best(pair, part)
    costs = {name: _cost([p for p in mine if p.backend == name]) for name in usable}
    timed = {name: cost for name, cost in costs.items() if cost is not None}
    fastest = min(timed, key=timed.__getitem__, default=None)
    return Choice(
        part=part,
        now=now,
        auto=auto,
        works=now in usable,
        usable=tuple(usable),
        fastest=fastest,
        slower=timed[auto] / timed[fastest] if fastest is not None and auto in timed else None,
        repeats=max((p.repeats for p in mine), default=0),
    )


def _cost(probes: Sequence[Probe]) -> float | None:
    """Mean over the probes of the time against eager's."""
    ratios = [p.ratio for p in probes if p.ratio is not None]
    return sum(ratios) / len(ratios) if ratios and len(ratios) == len(probes) else None


# ---- the machine -----------------------------------------------------------------------------------------------------


def machine(pair: Pair | None = None) -> dict[str, str]:
    """Versions and devices; no name of a person, a host or a folder."""
    said = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{torch.get_num_threads()} threads",
    }
    for name in _PACKAGES:
        try:
            said[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            said[name] = "not installed"
    said["cuda"] = "none"
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        said["cuda"] = f"{torch.version.cuda}, " + ", ".join(devices)
    if pair is not None:
        said["pair"] = f"{str(pair.dtype).removeprefix('torch.')} on {pair.device.type}"
    return said


def public(text: str) -> str:
    """The text without folders: of an absolute path the last name is left."""
    return re.sub(r"(?<![\w./\\])(?:~|[A-Za-z]:)?[/\\](?:[\w.+@-]+[/\\])+", "…/", text)
