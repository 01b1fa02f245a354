"""The result of a comparison by layers, as plain data: it needs no model and no torch to be read, saved or shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlab.trace import Mean

if TYPE_CHECKING:
    import pandas

    from ddlab.views.page import View

LETTERS = {"linear_attention": "L", "full_attention": "F", "sliding_attention": "S"}
METRICS = ("max_abs", "rms", "cosine", "free_max_abs", "free_rms", "free_cosine", "error")


@dataclass(frozen=True)
class LayerInfo:
    """One layer of the model that was compared."""

    index: int
    kind: str
    window: int | None
    sinks: bool

    @property
    def letter(self) -> str:
        return LETTERS.get(self.kind, "?")

    def __str__(self) -> str:
        window = "" if self.window is None else f" of {self.window}"
        return f"{self.kind.replace('_', ' ')}{window}{' with sinks' if self.sinks else ''}"


@dataclass(frozen=True, eq=False)
class LayerFigures:
    """One backend on one layer, against the first backend and against float64.

    Teacher-forced, the layer given the first backend's input: ``max_abs``, ``rms`` (of the difference, relative to the
    RMS of the activation) and ``cosine``. Free-running, the layer's output in a whole forward: the same with ``free_``.
    Each is the worst of all rows. ``error``: relative RMS distance from float64, teacher-forced, at the worst row of
    the call in which it is most times its ``band``, what rounding may cost there. ``verdict``: "rounding", "wrong",
    "same" (the backend does not compute this layer) or "not judged". ``fault``: the known fault that gives just these
    numbers. ``nodes``: the metrics by row, float64 [rows] each. ``seconds``, ``peak_bytes``: of the mixer, a median and
    a maximum; None: not measured.
    """

    max_abs: float
    rms: float
    cosine: float
    free_max_abs: float
    free_rms: float
    free_cosine: float
    error: float | None = None
    band: float | None = None
    verdict: str = "not judged"
    fault: str | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    nodes: dict[str, np.ndarray] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        values = {k: v for k, v in asdict(self).items() if k != "nodes"}
        return values | {"nodes": {name: array.tolist() for name, array in self.nodes.items()}}


@dataclass(frozen=True)
class Replayed:
    """Path replay on the rounds in which backends chose differently: plain forwards, no tree, eager attention.

    agree of nodes: where the backend's choice is the replay's. worst: the largest difference of a logit, as a share of
    the logits' scale, and what the dtype permits.
    """

    rounds: int
    nodes: int
    agree: int
    worst: float
    allowed: float

    @property
    def right(self) -> bool:
        return self.worst <= self.allowed


@dataclass(frozen=True)
class End:
    """The end of the free-running forwards: what the backend's logits change, against the first backend's.

    flips: rows of another arg-max. kl: nats, from the first backend's distribution. paths: of ``rounds`` rounds, those
    with another accepted path or another token behind it; None where nothing is walked. tau: on these trees, each round
    starting from the recorded text.
    """

    rows: int
    flips: int
    kl_mean: float
    kl_max: float
    rounds: int = 0
    paths: int | None = None
    tau: Mean | None = None
    first_tau: Mean | None = None
    replayed: Replayed | None = None


@dataclass(frozen=True, eq=False)
class BackendResult:
    """One backend. ``status``: "ok"; or "refused", "not installed", "error": then a ``reason`` and no figures."""

    name: str
    status: str
    reason: str = ""
    linear: bool = False
    layers: dict[int, LayerFigures] = field(default_factory=dict)
    end: End | None = None
    seconds: float | None = None  # of the whole forward, median

    @property
    def wrong(self) -> list[int]:
        """The layers that it gets wrong."""
        return [i for i, figures in self.layers.items() if figures.verdict == "wrong"]

    @property
    def faults(self) -> dict[str, list[int]]:
        """Known faults with the layers that show them; "" for a wrong layer that fits none."""
        found: dict[str, list[int]] = {}
        for i in self.wrong:
            found.setdefault(self.layers[i].fault or "", []).append(i)
        return found


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Backends side by side on one call, layer by layer; the first is what the others are held to.

    calls: of each, ``start``, ``parents``, ``depth``, ``tokens``, ``round`` and, for a drafted block, ``among``: layer
    kind -> "causal" or "bidirectional". linear_form: the form of the delta rule that attention backends ran beside.
    repeats: measured runs behind each time, after one that does not count.
    """

    what: str
    pair: str
    dtype: str
    device: str
    layers: tuple[LayerInfo, ...]
    backends: tuple[BackendResult, ...]
    calls: tuple[dict[str, Any], ...]
    linear_form: str | None = None
    labels: dict[int, str] = field(default_factory=dict)  # token id -> how it is shown
    repeats: int = 0
    timed: str = ""
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> BackendResult:
        for backend in self.backends:
            if backend.name == name:
                return backend
        raise KeyError(f"no backend {name!r} was compared; there are {', '.join(b.name for b in self.backends)}")

    @property
    def first(self) -> BackendResult:
        return self.backends[0]

    @property
    def ok(self) -> bool:
        """No backend that ran is wrong in any layer, or in what path replay says."""
        ran = [b for b in self.backends if b.status == "ok"]
        settled = [b.end.replayed for b in ran if b.end is not None and b.end.replayed is not None]
        return not any(b.wrong for b in ran) and all(replayed.right for replayed in settled)

    @property
    def rows(self) -> int:
        return sum(len(call["parents"]) for call in self.calls)

    def to_frame(self) -> pandas.DataFrame:
        """One row for each backend that ran and each layer. Raises ImportError, naming the cure, without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("Comparison.to_frame needs pandas: pip install pandas") from error
        rows = []
        for backend in self.backends:
            for info in self.layers:
                figures = backend.layers.get(info.index)
                if figures is not None:
                    values = {k: v for k, v in figures.to_dict().items() if k != "nodes"}
                    rows.append({"backend": backend.name, "layer": info.index, "kind": info.kind, **values})
        return pandas.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with the figures of every row."""
        plain = {k: getattr(self, k) for k in ("what", "pair", "dtype", "device", "linear_form", "repeats", "timed")}
        return plain | {
            "ok": self.ok,
            "layers": [asdict(info) for info in self.layers],
            "calls": list(self.calls),
            "notes": list(self.notes),
            "backends": [
                {
                    "name": b.name,
                    "status": b.status,
                    "reason": b.reason,
                    "linear": b.linear,
                    "seconds": b.seconds,
                    "end": None if b.end is None else asdict(b.end),
                    "layers": {str(i): figures.to_dict() for i, figures in b.layers.items()},
                }
                for b in self.backends
            ],
        }

    def view(self) -> View:
        """As a picture and as text, see `ddlab.views.layers_view`."""
        from ddlab.views.layers import layers_view

        return layers_view(self)

    def to_text(self) -> str:
        return self.view().text

    def __repr__(self) -> str:
        said = "no backend is wrong" if self.ok else "wrong: " + ", ".join(b.name for b in self.backends if b.wrong)
        return f"<Comparison: {self.what}, {len(self.layers)} layers, {len(self.backends)} backends, {said}>"

    def _repr_mimebundle_(self, **keywords: object) -> dict[str, str]:
        return self.view()._repr_mimebundle_(**keywords)
