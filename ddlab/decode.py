"""The decoder: one round after another, each in five phases that can be watched, edited and undone."""

from __future__ import annotations

import copy
import difflib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import LogitsProcessorList

from ddlab import edits
from ddlab.capture import Capture
from ddlab.record import describe_pair, round_record
from ddlab.sampling import Choice, Sampling, Walk, walk
from ddlab.trace import Step, Trace, TraceWriter, new_header
from ddlab.tree import DraftTree
from ddlab.verify import LINEAR_STATES, Committed, TargetState

if TYPE_CHECKING:
    from ddlab.drafter import DraftCache
    from ddlab.pair import Pair, Prompt

METHODS = ("ar", "dflash", "ddtree")
PHASES = ("draft", "tree", "verify", "accept", "commit")
ROUNDS_KEPT = 32  # rounds that `back` can undo; a hybrid target's states are kept for each

Hook = Callable[["Decoder", Any], Any]


@dataclass(frozen=True)
class _Place:
    """Where decoding stands. Replaced whole, in one assignment: an interrupt finds the old one or the new one."""

    target: Committed
    tokens: int  # of the text, prompt included
    rounds: int
    finished: str | None


@dataclass
class _Round:
    """The round under way, phase by phase."""

    done: list[str] = field(default_factory=list)
    edited: list[str] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    hook_seconds: float = 0.0
    drafted: Tensor | None = None  # [depth, vocab]
    tree: DraftTree | None = None
    logits: Tensor | None = None  # [n, vocab]
    choice: Choice | None = None
    walk: Walk | None = None


class Decoder:
    """Decode with a target and a drafter, round by round.

    Args:
        pair: target, drafter and tokenizer.
        method: ``"ar"`` (plain decoding: a tree of its root alone), ``"dflash"`` (the drafter's first choices as a chain)
            or ``"ddtree"`` (the ``budget`` most probable prefixes as a tree).
        budget: most drafted nodes of a ddtree round; None: as many as the block is deep.
        temperature: 0 is greedy. Above, tokens are keyed by (seed, position), the same under every method.
        max_new_tokens: exactly so many, unless a stop token comes first.
        stop_token_ids: None: the model's and the tokenizer's own; ``()``: never stop.
        logits_processor: Transformers processors, applied to the target's logits before the temperature, each node with its
            own path as history.
        linear_state: ``"exact"``. ``"flattened"`` is a labelled wrong way for hybrids: it shows what a decoder does
            whose linear layers ignore the tree.
        trace_path: folder to write the trace to, a round at a time; None: in memory only.

    Raises:
        ValueError: a setting that cannot be; nothing has run then.
    """

    def __init__(
        self,
        pair: Pair,
        method: str = "ddtree",
        budget: int | None = 64,
        temperature: float = 0.0,
        seed: int = 0,
        max_new_tokens: int = 128,
        stop_token_ids: Sequence[int] | None = None,
        logits_processor: LogitsProcessorList | None = None,
        linear_state: str = "exact",
        trace_path: str | Path | None = None,
    ):
        _one_of("method", method, METHODS)
        _one_of("linear_state", linear_state, LINEAR_STATES)
        if budget is not None and budget < 0:
            raise ValueError(f"budget must be >= 0 drafted nodes, or None for the block's depth, not {budget}")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be >= 0, not {max_new_tokens}")
        stops = pair.stop_token_ids if stop_token_ids is None else tuple(int(t) for t in stop_token_ids)
        beyond = [t for t in stops if not 0 <= t < pair.rows]
        if beyond:
            raise ValueError(f"stop_token_ids {beyond} are outside the target's ids (0..{pair.rows - 1})")
        self.pair, self.method, self.budget = pair, method, budget
        self.sampling = Sampling(float(temperature), int(seed), logits_processor)
        self.max_new_tokens, self.stop_token_ids, self.linear_state = max_new_tokens, stops, linear_state
        self._trace_path = None if trace_path is None else Path(trace_path)
        self._hooks: dict[str, OrderedDict[int, Hook]] = {phase: OrderedDict() for phase in PHASES}
        self._turn = 0
        self._place: _Place | None = None

    # ---- a text -------------------------------------------------------------------------------------------------

    def start(self, prompt: Any, **template_args: Any) -> None:
        """Forget any earlier text, run the prompt and choose the first new token, the root of the first tree.

        Args:
            prompt: str (one user turn where the tokenizer has a chat template), chat messages, or token ids.
            template_args: passed to the chat template and recorded.

        Raises:
            ValueError: an empty prompt, or one that does not fit the model's context; an earlier text is kept then.
        """
        encoded = self.pair.encode(prompt, **template_args)
        self._check_room(len(encoded.ids), self.max_new_tokens)
        drafter = self.pair.drafter if self.method != "ar" else None
        target = TargetState(self.pair, self.linear_state, tapped=drafter is not None)
        drafts = drafter.new_cache() if drafter else None
        self._turn = 0
        self._begin(target, drafts, encoded, list(encoded.ids), self.max_new_tokens)

    def extend(self, prompt: Any = (), *, max_new_tokens: int | None = None) -> None:
        """Go on after the text so far, on the same caches: with more tokens (a next turn) or just further.

        A new turn begins: ``output_ids`` and ``trace`` start again, the prompt is all that was visible.

        Args:
            prompt: token ids, or a str that is tokenized as it is; empty: continue the text itself, also past a stop token.
            max_new_tokens: of this turn; None: as before.
        """
        place = self._started()
        self._settle()
        limit = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        more = list(self.pair.encode(prompt, chat=False).ids) if len(prompt) else []
        ids = self._ids[: place.tokens] + more
        self._check_room(len(ids), limit)
        encoded = self.pair.encode(ids)
        self._turn += 1
        self._begin(self._target, self._drafts, encoded, ids, limit)

    def _begin(
        self, target: TargetState, drafts: DraftCache | None, prompt: Prompt, ids: list[int], max_new_tokens: int
    ) -> None:
        before = target.snapshot()
        try:
            if target.length < len(ids):
                first = self._prefill(target, drafts, ids)
            else:  # everything ran already, and nothing was emitted: the choice still stands
                first = self._first
        except BaseException:
            target.restore(before)
            if drafts is not None:
                drafts.truncate(before.length)
            raise
        room = max_new_tokens > 0
        trace = Trace(self._header(prompt, max_new_tokens, first if room else None))
        trace.describe({*ids, first}, self.pair.tokenizer)
        writer = TraceWriter(self._turn_path(), trace) if self._trace_path is not None else None
        finished = "stop_token" if room and first in self.stop_token_ids else "length" if max_new_tokens <= 1 else None
        self._target, self._drafts, self._first = target, drafts, first
        self._ids = ids + [first] * room
        self._prompt_length, self.max_new_tokens = len(ids), max_new_tokens
        self._trace, self._writer = trace, writer
        self._history: deque[_Place] = deque(maxlen=ROUNDS_KEPT)
        self._round: _Round | None = None
        self._place = _Place(target.snapshot(), len(self._ids), 0, finished)

    def _prefill(self, target: TargetState, drafts: DraftCache | None, ids: list[int]) -> int:
        logits = target.prefill(ids[target.length :])
        if drafts is not None:
            assert self.pair.drafter is not None and target.features is not None
            self.pair.drafter.ingest(drafts, target.features)
        choice = self.sampling.choose(logits[None], np.array([len(ids)]), lambda node: ids)
        return int(choice.tokens[0])

    def _check_room(self, prompt: int, new: int) -> None:
        limit = self.pair.max_positions
        if limit is not None and prompt + new > limit:
            raise ValueError(
                f"a prompt of {prompt} tokens and {new} new ones need {prompt + new} positions; the target has {limit}. "
                "Shorten the prompt or lower max_new_tokens"
            )

    # ---- a round ------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """One round, or the rest of the round under way."""
        phases = (self.draft, self.build, self.verify, self.accept)
        for phase in phases[0 if self._round is None else len(self._round.done) :]:
            phase()
        return self.commit()

    def run(self, prompt: Any = None, **template_args: Any) -> Iterator[Step]:
        """Rounds until the text is finished; with a prompt, from its start."""
        if prompt is not None:
            self.start(prompt, **template_args)
        while not self.finished:
            yield self.step()

    def draft(self) -> Tensor | None:
        """Phase 1: the drafter's logits, float [depth, vocab]; None under ``method="ar"``."""
        with self._phase("draft") as now:
            drafter, logits = self.pair.drafter, None
            if self.method != "ar" and drafter is not None:
                logits = self.pair.propose(self._drafts, self._ids[self._place.tokens - 1])
            logits = self._edit("draft", now, logits, lambda value: edits.draft_logits(value, self.pair.rows))
            if self.method != "ar" and logits is None:
                raise ValueError("this pair has no drafter: register a 'draft' hook that returns logits, or use method='ar'")
            now.drafted = logits
        return now.drafted

    def build(self) -> DraftTree:
        """Phase 2: the tree of what will be verified."""
        with self._phase("tree") as now:
            root, limit = self._ids[self._place.tokens - 1], self.pair.max_positions
            left = None if limit is None else limit - self._place.tokens  # positions behind the root
            logits = now.drafted if now.drafted is None else now.drafted[:left]
            if logits is None:
                tree = DraftTree.from_parents([root], [-1])
            elif self.method == "dflash":
                tree = DraftTree.chain(logits, root_token=root)
            else:
                tree = DraftTree.best_first(logits, self.budget, root_token=root)
            now.tree = self._edit("tree", now, tree, lambda value: edits.tree(value, root, self.pair.rows, left))
        return now.tree

    def verify(self) -> Tensor:
        """Phase 3: one target forward over the tree; its logits at every node, float [n, vocab]."""
        with self._phase("verify") as now:
            assert now.tree is not None
            shape = len(now.tree), self.pair.rows
            now.logits = self._edit(
                "verify", now, self._target.verify(now.tree), lambda value: edits.logits(value, *shape)
            )
        return now.logits

    def accept(self) -> Walk:
        """Phase 4: the target's choice at each node, and the path that follows it."""
        with self._phase("accept") as now:
            assert now.tree is not None and now.logits is not None
            tree, place = now.tree, self._place
            positions = place.tokens + tree.depth  # the root is the last token: its choice comes at `tokens`
            text = self._ids[: place.tokens - 1]
            now.choice = self.sampling.choose(
                now.logits, positions, lambda node: text + [int(tree.tokens[i]) for i in tree.path(node)]
            )
            room = self._prompt_length + self.max_new_tokens - place.tokens
            chosen = now.choice.tokens.cpu().numpy()
            own = walk(tree, chosen, self.stop_token_ids, room)
            now.walk = self._edit("accept", now, own, lambda value: edits.walk(value, own, tree, chosen.tolist()))
        return now.walk

    def commit(self) -> Step:
        """Phase 5: keep the path. From here on the round is part of the text."""
        with self._phase("commit") as now:
            assert now.tree is not None and now.choice is not None and now.walk is not None
            place, taken = self._place, now.walk
            emitted = taken.emitted(now.tree)
            kept = taken.path if taken.bonus is not None else taken.path[:-1]  # the last token of a text has no K/V yet
            self._target.commit(kept)
            if self._drafts is not None:
                assert self._target.features is not None
                rows = torch.tensor(kept, device=self._target.features.device)
                self.pair.drafter.ingest(self._drafts, self._target.features[rows])
            finished = taken.stop_reason if taken.stop_reason in ("stop_token", "length") else None
            tokens = place.tokens + len(emitted)
            if finished is None and tokens == self._prompt_length + self.max_new_tokens:
                finished = "length"
        with self._undone_on_error():
            step = round_record(
                place.rounds, place.tokens - 1, now.tree, now.choice, taken, now.drafted, now.edited, now.times
            )
            self._ids[place.tokens :] = emitted
            self._trace.truncate(place.rounds)
            self._trace.append(step, self.pair.tokenizer)
            if self._writer is not None:
                self._writer.append(step)
            after = _Place(self._target.snapshot(), tokens, place.rounds + 1, finished)
            self._history.append(place)
            self._place, self._round = after, None
        for hook in list(self._hooks["commit"].values()):
            hook(self, step)
        return step

    def back(self) -> None:
        """Undo the last round, bit for bit; up to 32 rounds, also across a stop. A round under way is dropped first."""
        self._started()
        if self._round is not None:
            self._settle()
            return
        if not self._history:
            kept = f"only the last {ROUNDS_KEPT} rounds are kept" if self._place.rounds else "no round was committed"
            raise ValueError(f"nothing to undo: {kept}; start() begins again")
        self._place = self._history.pop()
        self._settle()

    def fork(self) -> Decoder:
        """An independent copy that stands at the last committed round, with the same hooks. It writes no trace to disk."""
        self._started()
        other = copy.copy(self)
        other._target = self._target.fork()
        other._drafts = None if self._drafts is None else self._drafts.clone()
        other._ids, other._history = self._ids[: self._place.tokens], copy.copy(self._history)
        other._trace = Trace(copy.deepcopy(self._trace.header), self._trace.steps[:], dict(self._trace.token_text))
        other._writer, other._trace_path, other._round = None, None, None
        other._hooks = {phase: OrderedDict(hooks) for phase, hooks in self._hooks.items()}
        return other

    # ---- what it says -------------------------------------------------------------------------------------------

    @property
    def finished(self) -> str | None:
        """Why there is nothing more to decode (``stop_token`` or ``length``), or None."""
        return self._started().finished

    @property
    def output_ids(self) -> list[int]:
        """New tokens only. After ``start`` it holds the first one, the root of the first tree."""
        return self._ids[self._prompt_length : self._started().tokens]

    @property
    def ids(self) -> list[int]:
        """The whole text: prompt and new tokens."""
        return self._ids[: self._started().tokens]

    @property
    def text(self) -> str:
        return self.pair.decode(self.output_ids)

    @property
    def trace(self) -> Trace:
        self._started()
        return self._trace

    # ---- looking and editing ------------------------------------------------------------------------------------

    def register_hook(self, phase: str, hook: Hook) -> RemovableHandle:
        """Call ``hook(decoder, value)`` after a phase; what it returns replaces the value, None leaves it.

        Values: draft: float logits [depth, vocab] (None without a drafter); tree: DraftTree; verify: float logits
        [n, vocab]; accept: Walk; commit: Step, read only. Changed rounds are marked in the trace. Edits change the draft,
        never the text; only a ``verify`` edit can. The handle's ``remove()``, or ``with handle:``, takes it away.
        """
        _one_of("phase", phase, PHASES)
        if phase in ("draft", "tree") and self.method == "ar":
            raise ValueError(f"method='ar' drafts nothing for a {phase!r} hook to change; use method='ddtree'")
        handle = RemovableHandle(self._hooks[phase])
        self._hooks[phase][handle.id] = hook
        return handle

    def capture(self, *patterns: str) -> Capture:
        """``with decoder.capture("layers.*.self_attn") as seen``: outputs of modules while the block runs.

        Names are those of the target's decoder (``layers.3.linear_attn``, ``norm``) and, behind ``drafter.``, of the drafter.

        Raises:
            ValueError: a pattern matches nothing; near matches are listed.
        """
        modules = dict(self.pair.text_model.named_modules())
        if self.pair.drafter is not None:
            modules |= {f"drafter.{name}": m for name, m in self.pair.drafter.model.named_modules() if name}
        return Capture(modules, patterns)

    def _edit(self, phase: str, now: _Round, value: Any, check: Callable[[Any], Any]) -> Any:
        started = time.perf_counter()
        for hook in list(self._hooks[phase].values()):
            changed = hook(self, value)
            if changed is not None:
                value = check(changed)
                if phase not in now.edited:
                    now.edited.append(phase)
        now.hook_seconds += time.perf_counter() - started
        return value

    # ---- inside -------------------------------------------------------------------------------------------------

    def _started(self) -> _Place:
        if self._place is None:
            raise RuntimeError("the decoder has no text yet: call start(prompt) first")
        return self._place

    @contextmanager
    def _phase(self, phase: str) -> Iterator[_Round]:
        place = self._started()
        if place.finished and self._round is None:
            raise RuntimeError(f"the text is finished ({place.finished}): extend() goes on, back() undoes, start() begins again")
        expected = PHASES[0 if self._round is None else len(self._round.done)]
        if phase != expected:
            name = "build" if expected == "tree" else expected
            raise RuntimeError(f"the next phase of this round is {name}(); step() runs a whole round")
        if self._round is None:
            self._round = _Round()
        now = self._round
        with self._undone_on_error():
            before, started = now.hook_seconds, time.perf_counter()
            yield now
            if self.pair.device.type == "cuda":
                torch.cuda.synchronize(self.pair.device)  # kernels run late: their time belongs to this phase
            now.times[phase] = time.perf_counter() - started - (now.hook_seconds - before)
            now.done.append(phase)

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Whatever goes wrong, also an interrupt: back to the last committed round."""
        try:
            yield
        except BaseException:
            self._settle()
            raise

    def _settle(self) -> None:
        """Drop everything beyond the committed place."""
        place = self._place
        assert place is not None
        self._round = None
        self._target.restore(place.target)
        if self._drafts is not None:
            self._drafts.truncate(place.target.length)
        del self._ids[place.tokens :]
        self._trace.truncate(min(place.rounds, self._trace.rounds))
        if self._writer is not None and self._writer.rounds > place.rounds:
            self._writer.truncate(place.rounds)

    def _header(self, prompt: Prompt, max_new_tokens: int, first_token: int | None) -> dict[str, Any]:
        processors = [type(p).__name__ for p in self.sampling.processors or ()]
        settings = {
            "method": self.method,
            "budget": self.budget if self.method == "ddtree" else None,
            "temperature": self.sampling.temperature,
            "tree_temperature": 1.0,  # the tree is built from the drafter's own probabilities
            "seed": self.sampling.seed,
            "noise": "Gumbel, Philox keyed by (seed, position)" if self.sampling.temperature else None,
            "logits_processor": processors,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": list(self.stop_token_ids),
            "linear_state": self.linear_state,
            "turn": self._turn,
        }
        return new_header(
            pair=describe_pair(self.pair), settings=settings, prompt=prompt.to_dict(), first_token=first_token
        )

    def _turn_path(self) -> Path:
        assert self._trace_path is not None
        return self._trace_path if not self._turn else self._trace_path.with_name(f"{self._trace_path.name}.turn{self._turn}")


def generate(pair: Pair, prompt: Any, *, template_args: dict[str, Any] | None = None, **settings: Any) -> Trace:
    """Decode ``prompt`` to its end. ``settings`` are those of :class:`Decoder`; returns the trace."""
    decoder = Decoder(pair, **settings)
    for _ in decoder.run(prompt, **(template_args or {})):
        pass
    return decoder.trace


def _one_of(what: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {what} {value!r}: one of {', '.join(allowed)}{hint}")
