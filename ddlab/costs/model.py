"""Seconds of a round as a function of its rows and its prefix, and the tokens per second that they predict.

A replay says exactly how many tokens a budget's rounds bring (`ddlab.replay`), a `CostModel` what they cost: measured
by `ddlab.costs.calibration`, or given. Whether the prediction holds on this machine: `ddlab.costs.check`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddlab.tracefile import plain

if TYPE_CHECKING:
    from ddlab.replay import Replay

PHASES = ("draft", "tree", "verify", "accept", "commit", "record")


@dataclass(frozen=True, eq=False, repr=False)
class CostModel:
    """Mean seconds of a round's phases on a grid (see `ddlab.costs.calibration.typical`), linear in between.

    rows count the root, so a budget b has b + 1. prefixes: tokens before the root. ``record`` is the time that a step
    takes beyond its phases to keep the round; traces do not have it, and `seconds_of` leaves it out unless asked.
    """

    rows: tuple[int, ...]  # ascending
    prefixes: tuple[int, ...]  # ascending
    seconds: Mapping[str, np.ndarray]  # phase -> float [prefixes, rows]
    plain: np.ndarray | None = None  # float [prefixes]: a round of plain decoding ("ar"), its recording left out
    noise_seconds: float = 0.0  # above temperature 0: for the sampling noise of each new token
    samples: int = 0  # rounds behind each figure
    rounds_up: bool = False  # a verify runs as many rows as the next size that was measured (captured launches)
    source: Mapping[str, Any] = field(default_factory=dict)  # where the figures come from

    def __repr__(self) -> str:
        return f"<CostModel: rows {list(self.rows)}, prefixes {list(self.prefixes)}, {self.samples} rounds each>"

    def phases(self, rows: Any, prefix: Any, emitted: Any = 1) -> dict[str, np.ndarray]:
        """Seconds by phase of rounds with so many rows, tokens before the root, and new tokens (arrays or numbers).

        Below the shortest measured prefix its figures are taken; beyond the longest they go on as between the last
        two. Raises ValueError for more rows than were measured.
        """
        rows, prefix, emitted = np.broadcast_arrays(*(np.asarray(x, float) for x in (rows, prefix, emitted)))
        if rows.size and not (self.rows[0] <= rows.min() and rows.max() <= self.rows[-1]):
            raise ValueError(
                f"rounds of {rows.min():.0f} to {rows.max():.0f} rows, but {self.rows[0]} to {self.rows[-1]} were "
                f"measured: calibrate(pair, max_budget={rows.max() - 1:.0f})"
            )
        out = {}
        launched = np.array(self.rows)[np.searchsorted(self.rows, rows)] if self.rounds_up else rows
        for phase, table in self.seconds.items():
            size = launched if phase == "verify" else rows
            out[phase] = self._along(prefix, np.stack([np.interp(size, self.rows, line) for line in table]))
        out["accept"] = out.get("accept", 0.0) + self.noise_seconds * emitted
        return out

    def seconds_of(self, rows: Any, prefix: Any, emitted: Any = 1, *, record: bool = False) -> Any:
        """Seconds of rounds, as their traces would have them; arguments as in `phases`."""
        parts = self.phases(rows, prefix, emitted)
        return sum(seconds for phase, seconds in parts.items() if record or phase != "record")

    def plain_seconds(self, prefix: Any) -> np.ndarray:
        """Seconds of rounds of plain decoding, one token each. Raises ValueError where they were not measured."""
        if self.plain is None:
            raise ValueError(
                "plain decoding was not measured: calibrate(pair) does, from_mapping(..., plain=...) takes it"
            )
        prefix = np.asarray(prefix, float)
        return self._along(prefix, self.plain.reshape(-1, *[1] * prefix.ndim)) + self.noise_seconds

    def _along(self, prefix: np.ndarray, levels: np.ndarray) -> np.ndarray:
        """levels [prefixes, ...] at each prefix [...]."""
        if len(self.prefixes) == 1:
            return levels[0] + 0 * prefix
        grid = np.array(self.prefixes, float)
        levels = np.broadcast_to(levels, (len(grid), *prefix.shape))
        at = np.clip(np.searchsorted(grid, prefix) - 1, 0, len(grid) - 2)
        low, high = (np.take_along_axis(levels, index[None], 0)[0] for index in (at, at + 1))
        share = np.maximum((prefix - grid[at]) / (grid[at + 1] - grid[at]), 0.0)
        beyond = high + (share - 1) * np.maximum(high - low, 0.0)  # two medians' noise must not make long prefixes free
        return np.where(share <= 1, low + share * (high - low), beyond)

    # ---- as data ---------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        tables = {phase: np.asarray(table).tolist() for phase, table in self.seconds.items()}
        own = None if self.plain is None else self.plain.tolist()
        return plain({**vars(self), "seconds": tables, "plain": own})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostModel:
        tables = {phase: np.array(table, float) for phase, table in data["seconds"].items()}
        own = None if data.get("plain") is None else np.array(data["plain"], float)
        known: dict[str, Any] = {
            "rows": tuple(data["rows"]),
            "prefixes": tuple(data["prefixes"]),
            "seconds": tables,
            "plain": own,
        }
        return cls(
            **known,
            **{name: data[name] for name in ("noise_seconds", "samples", "rounds_up", "source") if name in data},
        )

    @classmethod
    def from_mapping(
        cls, verify: Mapping[Any, float], rest: float = 0.0, *, plain: float | None = None, source: str = "given"
    ) -> CostModel:
        """A model from figures in hand.

        Args:
            verify: seconds of a verify by rows, or by (rows, prefix), every row count at every prefix.
            rest: seconds of the rest of a round, of any size.
            plain: seconds of a round of plain decoding; None: a verify of one row, where it was given.

        Raises:
            ValueError: no figures, holes in the grid, or seconds that are not above 0.
        """
        cells = {(key if isinstance(key, tuple) else (key, 0)): float(value) for key, value in verify.items()}
        rows, prefixes = (tuple(sorted({int(cell[i]) for cell in cells})) for i in (0, 1))
        missing = [(r, p) for r in rows for p in prefixes if (r, p) not in cells]
        if not cells or missing or not all(0 < value < math.inf for value in cells.values()):
            raise ValueError(
                f"give seconds above 0 for every row count at every prefix; missing: {missing[:4] or cells}"
            )
        table = np.array([[cells[r, p] for r in rows] for p in prefixes])
        own = np.full(len(prefixes), plain) if plain is not None else table[:, 0] if rows[0] == 1 else None
        other = {phase: np.zeros_like(table) for phase in PHASES} | {"draft": np.full_like(table, rest)}
        return cls(rows, prefixes, other | {"verify": table}, own, source={"from": source})


# ---- predicting ------------------------------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """What a replay's rounds would cost."""

    tokens: int  # that the rounds bring: the first new token is the prompt's
    rounds: int
    seconds: float
    nodes: int  # drafted in all

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def tokens_per_round(self) -> float | None:
        return self.tokens / self.rounds if self.rounds else None


def predict(
    replay: Replay, cost: CostModel, budget: int | None, builder: str = "best_first", *, record: bool = False
) -> Prediction:
    """Replayed rounds times measured seconds; ``record``: with the time that keeping them takes."""
    rounds = replay.run(budget, builder)
    rows, prefix = np.array([r.nodes + 1 for r in rounds]), np.array([r.start for r in rounds])
    emitted = np.array([len(r.emitted) for r in rounds])
    seconds = cost.seconds_of(rows, prefix, emitted, record=record) if rounds else np.zeros(0)
    return Prediction(int(emitted.sum()), len(rounds), math.fsum(seconds), int(rows.sum()) - len(rounds))


def predict_plain(replay: Replay, cost: CostModel) -> Prediction:
    """The same text by plain decoding, a token a round."""
    first, last = replay.drafts.prompt_length, len(replay.drafts.text) - 1
    seconds = cost.plain_seconds(np.arange(first, last))
    return Prediction(max(0, last - first), max(0, last - first), math.fsum(seconds), 0)
