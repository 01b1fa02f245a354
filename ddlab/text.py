"""A text while it is decoded: its tokens, caches and trace, and the places it can go back to."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddlab.trace import Step, Trace, TraceWriter
from ddlab.verify import Committed, TargetState

if TYPE_CHECKING:
    from ddlab.drafter import DraftCache

ROUNDS_KEPT = 32  # rounds that `back` can undo: a hybrid target's states are kept for each


@dataclass(frozen=True)
class Place:
    """Where decoding stands. Replaced whole, in one assignment: an interrupt finds the old place or the new one."""

    target: Committed
    tokens: int  # of the text, prompt included
    rounds: int
    finished: str | None


class Text:
    """What a decoder has of one text, or of one turn of it.

    The last token is always the root of the next tree: it is text already, but the caches do not hold it yet. Whatever
    lies beyond ``place`` in tokens, caches and trace belongs to no round, and :meth:`settle` drops it.

    Args:
        prompt: tokens of the prompt, all of them in the caches.
        first: the target's choice after the prompt; it becomes text when ``max_new_tokens`` is not 0.
    """

    def __init__(
        self,
        target: TargetState,
        drafts: DraftCache | None,
        prompt: Sequence[int],
        first: int,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        trace: Trace,
        writer: TraceWriter | None,
    ):
        self.target, self.drafts, self.first = target, drafts, first
        self.trace, self.writer = trace, writer
        self.prompt_length = len(prompt)
        self.end = len(prompt) + max_new_tokens  # how long the text may become
        self.tokens = [*prompt, first][: self.end]
        finished = "length" if max_new_tokens <= 1 else None
        if max_new_tokens and first in stop_token_ids:
            finished = "stop_token"
        self.place = Place(target.snapshot(), len(self.tokens), 0, finished)
        self.history: deque[Place] = deque(maxlen=ROUNDS_KEPT)

    @property
    def ids(self) -> list[int]:
        """Prompt and new tokens."""
        return self.tokens[: self.place.tokens]

    @property
    def root(self) -> int:
        return self.tokens[self.place.tokens - 1]

    @property
    def eager(self) -> bool:
        """Did the models' modules run the last forwards?"""
        return self.target.eager or (self.drafts is not None and self.drafts.eager)

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return self.end - self.place.tokens

    def append(self, step: Step, tokenizer: Any) -> None:
        """Make a round part of the text; its rows are committed in the caches already."""
        place = self.place
        tokens = place.tokens + len(step.emitted)
        finished = step.stop_reason if step.stop_reason in ("stop_token", "length") else None
        if finished is None and tokens == self.end:
            finished = "length"
        self.tokens[place.tokens :] = step.emitted
        self.trace.append(step, tokenizer)
        if self.writer is not None:
            self.writer.append(step)
        self.history.append(place)
        self.place = Place(self.target.snapshot(), tokens, place.rounds + 1, finished)

    def back(self) -> None:
        """Undo the last round, bit for bit."""
        if not self.history:
            kept = f"only the last {ROUNDS_KEPT} rounds are kept" if self.place.rounds else "no round was committed"
            raise ValueError(f"nothing to undo: {kept}; start() begins again")
        self.place = self.history.pop()
        self.settle()

    def settle(self) -> None:
        """Drop everything beyond the place."""
        place = self.place
        while self.history and self.history[-1].rounds >= place.rounds:
            self.history.pop()
        self.target.restore(place.target)
        if self.drafts is not None:
            self.drafts.truncate(place.target.length)
        del self.tokens[place.tokens :]
        self.trace.truncate(place.rounds)
        if self.writer is not None and self.writer.rounds > place.rounds:
            self.writer.truncate(place.rounds)

    @contextmanager
    def settled_on_error(self) -> Iterator[None]:
        """Whatever goes wrong, also an interrupt: the text stands at its last committed round."""
        try:
            yield
        except BaseException:
            self.settle()
            raise

    def fork(self) -> Text:
        """An independent copy of what is committed, without a writer."""
        other = copy.copy(self)
        other.target = self.target.fork()
        other.drafts = None if self.drafts is None else self.drafts.clone()
        other.tokens, other.history, other.writer = self.ids, self.history.copy(), None
        other.trace = Trace(copy.deepcopy(self.trace.header), self.trace.steps[:], dict(self.trace.token_text))
        return other
