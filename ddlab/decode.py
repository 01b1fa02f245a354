"""The decoder: one round after another, each in five phases that can be watched, edited and undone."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import LogitsProcessorList

from ddlab import edits
from ddlab.capture import Capture
from ddlab.engine import find_engine
from ddlab.hooks import PHASES, Hook, Hooks
from ddlab.names import one_of
from ddlab.record import DRAFT_BEST, round_record, trace_header
from ddlab.sampling import Choice, Sampling, Walk, walk
from ddlab.text import Text
from ddlab.trace import Step, Trace, TraceWriter
from ddlab.tree import DraftTree, best_first, grow
from ddlab.verify import LINEAR_STATES, TargetState

if TYPE_CHECKING:
    from ddlab.drafter import DraftCache
    from ddlab.pair import Pair, Prompt

METHODS = ("ar", "dflash", "ddtree")
T = TypeVar("T")
_FIXED = {
    "method",
    "budget",
    "sampling",
    "max_new_tokens",
    "stop_token_ids",
    "linear_state",
}  # what a trace's header says


@dataclass
class _Round:
    """The round under way, phase by phase."""

    edited: list[str] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)  # seconds by finished phase, without the hooks'
    drafted: Tensor | None = None  # [depth, vocab]
    best: tuple[np.ndarray, np.ndarray] | None = None  # ids, log-probabilities [depth, k]: the drafter's best
    tree: DraftTree | None = None
    logits: Tensor | None = None  # [n, vocab]
    choice: Choice | None = None
    walk: Walk | None = None


class Decoder:
    """Decode with a target and a drafter, round by round.

    Args:
        pair: target, drafter and tokenizer.
        method: ``"ar"`` (plain decoding: a tree of its root alone), ``"dflash"`` (the drafter's first choices as a
            chain) or ``"ddtree"`` (the ``budget`` most probable prefixes as a tree).
        budget: most drafted nodes of a ddtree round; None: as many as the block is deep.
        temperature: 0 is greedy. Above, tokens are keyed by (seed, position), the same under every method.
        max_new_tokens: exactly so many, unless a stop token comes first.
        stop_token_ids: None: the model's and the tokenizer's own; ``()``: never stop.
        logits_processor: Transformers processors, applied to the target's logits before the temperature, each node
            with its own path as history.
        linear_state: ``"exact"``. ``"flattened"`` is a labelled wrong way for hybrids: it shows what a decoder does
            whose linear layers ignore the tree.
        engine: ``"eager"`` calls the models' modules, ``"graph"`` launches captured CUDA graphs that compute the same.
            None: graph on CUDA where it is legal, else eager. Eager on a CPU in float32 computes some products from
            packed copies of the weights, up to 2 GiB and the head once more in memory, see `ddlab.packed`.
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
        engine: str | None = None,
        trace_path: str | Path | None = None,
    ):
        one_of("method", method, METHODS)
        one_of("linear_state", linear_state, LINEAR_STATES)
        stops = pair.stop_token_ids if stop_token_ids is None else tuple(int(t) for t in stop_token_ids)
        beyond = [t for t in stops if not 0 <= t < pair.rows]
        if beyond:
            raise ValueError(f"stop_token_ids {beyond} are outside the target's ids (0..{pair.rows - 1})")
        self.pair, self.method, self.budget = pair, method, _checked_budget(budget)
        self.sampling = Sampling(float(temperature), int(seed), logits_processor)
        self.max_new_tokens, self.stop_token_ids = _checked_length(max_new_tokens), stops
        self.linear_state = linear_state
        self._engine = find_engine(pair, engine, linear_state)
        self._trace_path = None if trace_path is None else Path(trace_path)
        self._hooks = Hooks()
        self._turn = 0
        self._text: Text | None = None
        self._round: _Round | None = None

    # ---- a text ----------------------------------------------------------------------------------------------------

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
        tokens = len(encoded.ids) + self.max_new_tokens
        engine = self._engine = find_engine(self.pair, self.engine, self.linear_state)  # weights may have changed
        self._gpus = [device for device in self.pair.devices if device.type == "cuda"]
        target = engine.target(self.linear_state, drafter is not None, tokens)
        drafts = engine.drafts(tokens) if drafter else None
        first = self._read(target, drafts, encoded.ids)
        self._begin(target, drafts, encoded, first, self.max_new_tokens, turn=0)

    def extend(self, prompt: Any = (), *, max_new_tokens: int | None = None) -> None:
        """Go on after the text so far, on the same caches: with more tokens (a next turn), or just further.

        A new turn begins: ``output_ids`` and ``trace`` start again, and its prompt is all that was visible.

        Args:
            prompt: token ids, or a str that is tokenized as it is; empty: continue the text itself, also past a stop.
            max_new_tokens: of this turn; None: the decoder's own.
        """
        text = self._started()
        self._drop_round()
        limit = self.max_new_tokens if max_new_tokens is None else _checked_length(max_new_tokens)
        ids = text.ids + (list(self.pair.encode(prompt, chat=False).ids) if len(prompt) else [])
        self._check_room(len(ids), limit)
        encoded, first = self.pair.encode(ids), text.first  # with nothing new to read, the last choice still stands
        text.target.expect(len(ids) + limit)
        with text.settled_on_error():
            if text.target.length < len(ids):
                first = self._read(text.target, text.drafts, ids)
            self._begin(text.target, text.drafts, encoded, first, limit, self._turn + 1)

    def _read(self, target: TargetState, drafts: DraftCache | None, ids: Sequence[int]) -> int:
        """Run what the caches do not hold of ``ids``; the target's choice after it."""
        logits = target.prefill(ids[target.length :])
        if drafts is not None:
            self._engine.ingest(drafts, target.tapped_features)
        history = list(ids)
        return int(self.sampling.choose(logits[None], np.array([len(ids)]), lambda node: history).tokens[0])

    def _begin(
        self,
        target: TargetState,
        drafts: DraftCache | None,
        prompt: Prompt,
        first: int,
        max_new_tokens: int,
        turn: int,
    ) -> None:
        budget = self.budget if self.method == "ddtree" else None
        trace = Trace(
            trace_header(
                self.pair,
                self.sampling,
                prompt,
                first if max_new_tokens else None,
                method=self.method,
                budget=budget,
                max_new_tokens=max_new_tokens,
                stop_token_ids=list(self.stop_token_ids),
                linear_state=self.linear_state,
                engine=self.engine,
                turn=turn,
            )
        )
        trace.describe({*prompt.ids, first}, self.pair.tokenizer)
        path = self._trace_path
        if path is not None and turn:
            path = path.with_name(f"{path.name}.turn{turn}")
        writer = None if path is None else TraceWriter(path, trace)
        text = Text(target, drafts, prompt.ids, first, max_new_tokens, self.stop_token_ids, trace, writer)
        self._text, self._round, self._turn = text, None, turn

    def _check_room(self, prompt: int, new: int) -> None:
        limit = self.pair.max_positions
        if limit is not None and prompt + new > limit:
            raise ValueError(
                f"a prompt of {prompt} tokens and {new} new ones need {prompt + new} positions; the target has "
                f"{limit}. Shorten the prompt or lower max_new_tokens"
            )

    # ---- a round ---------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """One round, or the rest of the round under way."""
        phases = (self.draft, self.build, self.verify, self.accept)
        for phase in phases[0 if self._round is None else len(self._round.times) :]:
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
        with self._phase("draft") as (now, text):
            logits = None if text.drafts is None else self._engine.propose(text.drafts, text.root)
            logits = self._edit("draft", now, logits, lambda value: edits.draft_logits(value, self.pair.rows))
            if self.method != "ar" and logits is None:
                raise ValueError("this pair has no drafter: register a 'draft' hook that returns logits, or use 'ar'")
            now.drafted = logits
        return now.drafted

    def build(self) -> DraftTree:
        """Phase 2: the tree of what will be verified."""
        with self._phase("tree") as (now, text):
            root, limit = text.root, self.pair.max_positions
            left = None if limit is None else limit - text.place.tokens  # positions behind the root
            if now.drafted is None:
                tree = DraftTree.from_parents([root], [-1])
            else:
                tree = self._drafted_tree(now, now.drafted, root, left)
            tree = self._edit("tree", now, tree, lambda value: edits.tree(value, root, self.pair.rows, left))
            now.tree = tree
        return tree

    def _drafted_tree(self, now: _Round, logits: Tensor, root: int, left: int | None) -> DraftTree:
        """`DraftTree.chain` or `.best_first` of the first ``left`` depths, from the top-k that the trace keeps too."""

        def top(k: int) -> tuple[np.ndarray, np.ndarray]:
            now.best = ids, log_probs = self._engine.top_tokens(logits, max(k, DRAFT_BEST))
            return ids[:left, :k], log_probs[:left, :k]

        depth = len(logits[:left])
        if self.method == "dflash":
            return grow(*top(1), depth, root_token=root)
        return best_first(top, depth if self.budget is None else self.budget, root_token=root)

    def verify(self) -> Tensor:
        """Phase 3: one target forward over the tree; its logits at every node, float [n, vocab]."""
        with self._phase("verify") as (now, text):
            tree = _made(now.tree)
            logits = text.target.verify(tree)
            logits = self._edit("verify", now, logits, lambda v: edits.logits(v, len(tree), self.pair.rows))
            now.logits = logits
        return logits

    def accept(self) -> Walk:
        """Phase 4: the target's choice at each node, and the path that follows it."""
        with self._phase("accept") as (now, text):
            tree = _made(now.tree)
            positions = text.place.tokens + tree.depth  # of the chosen tokens: the root is the last token of the text
            choice = self.sampling.choose(
                _made(now.logits),
                positions,
                lambda node: text.ids[:-1] + tree.tokens[tree.path(node)].tolist(),
                asked=(tree.parents[1:], tree.tokens[1:]),
                read=self._engine.read_scores,
            )
            chosen = choice.tokens.numpy()
            own = walk(tree, chosen, self.stop_token_ids, text.room)
            now.choice = choice
            now.walk = self._edit(
                "accept", now, own, lambda value: edits.walk(value, own, chosen.tolist(), self.stop_token_ids)
            )
        return _made(now.walk)

    def commit(self) -> Step:
        """Phase 5: keep the path. From here on the round is part of the text."""
        with self._phase("commit") as (now, text):
            taken = _made(now.walk)
            kept = taken.path if taken.bonus is not None else taken.path[:-1]  # the last token of a text stays out
            text.target.commit(kept)
            if text.drafts is not None:
                self._engine.ingest(text.drafts, text.target.features_of(kept))
        try:
            step = round_record(
                text.place.rounds,
                text.place.tokens - 1,
                _made(now.tree),
                _made(now.choice),
                taken,
                now.best,
                now.edited,
                "eager" if text.eager else "graph",
                now.times,
            )
            text.append(step, self.pair.tokenizer)
            self._round = None
        except BaseException:
            self._undo(text)
            raise
        self._hooks.run("commit", self, step, lambda changed: step)  # read only: what it returns is dropped
        return step

    def back(self) -> None:
        """Undo the last round, bit for bit; up to 32, also across a stop. A round under way is dropped first."""
        text = self._started()
        if self._round is not None:
            self._drop_round()
        else:
            text.back()

    def fork(self, *, budget: int | EllipsisType | None = ...) -> Decoder:
        """An independent copy at the last committed round, with the same hooks. It writes no trace to disk.

        Args:
            budget: of the copy's rounds from here on, where it is to differ; its trace says from which round.
        """
        text = self._started()
        other = copy.copy(self)
        other._text, other._round, other._trace_path = text.fork(), None, None
        other._hooks = self._hooks.copy()
        if budget is not ...:
            other.__dict__["budget"] = _checked_budget(budget)
            settings = other.trace.settings
            settings["budget_before_fork"] = {"budget": settings["budget"], "rounds": text.place.rounds}
            settings["budget"] = budget
        return other

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and name in self.__dict__:
            raise AttributeError(
                f"{name} is fixed once a decoder is made, because its trace says it: make another Decoder"
                + (", or fork(budget=...)" if name == "budget" else "")
            )
        super().__setattr__(name, value)

    # ---- what it says ----------------------------------------------------------------------------------------------

    @property
    def finished(self) -> str | None:
        """Why there is nothing more to decode (``stop_token`` or ``length``), or None."""
        return self._started().place.finished

    @property
    def output_ids(self) -> list[int]:
        """New tokens only. After ``start`` it holds the first one, the root of the first tree."""
        text = self._started()
        return text.ids[text.prompt_length :]

    @property
    def ids(self) -> list[int]:
        """The whole text: prompt and new tokens."""
        return self._started().ids

    @property
    def text(self) -> str:
        return self.pair.decode(self.output_ids)

    @property
    def trace(self) -> Trace:
        return self._started().trace

    @property
    def engine(self) -> str:
        """What runs the forwards: ``eager`` or ``graph``."""
        return self._engine.name

    # ---- looking and editing ---------------------------------------------------------------------------------------

    def register_hook(self, phase: str, hook: Hook) -> RemovableHandle:
        """Call ``hook(decoder, value)`` after a phase; what it returns replaces the value, None leaves it.

        Values: draft: float logits [depth, vocab] (None without a drafter); tree: DraftTree; verify: float logits
        [n, vocab]; accept: Walk; commit: Step, read only. Changed rounds are marked in the trace. Edits change the
        draft, never the text; only a ``verify`` edit can. The handle's ``remove()``, or ``with handle:``, ends it.
        """
        if phase in ("draft", "tree") and self.method == "ar":
            raise ValueError(f"method='ar' drafts nothing for a {phase!r} hook to change; use method='ddtree'")
        return self._hooks.register(phase, hook)

    def capture(self, *patterns: str) -> Capture:
        """``with decoder.capture("layers.*.self_attn") as seen``: outputs of modules while the block runs.

        Names are those of the target's decoder (``layers.3.linear_attn``, ``norm``) and, behind ``drafter.``, of the
        drafter.

        Raises:
            ValueError: a pattern matches nothing; near matches are listed.
        """
        modules = dict(self.pair.text_model.named_modules())
        if self.pair.drafter is not None:
            modules |= {f"drafter.{name}": m for name, m in self.pair.drafter.model.named_modules() if name}
        return Capture(modules, patterns)

    def _edit(self, phase: str, now: _Round, value: Any, check: Callable[[Any], Any]) -> Any:
        if self._hooks.on(phase):
            self._wait()  # else a hook would run beside the phase's kernels, and its time hide theirs
        value, edited = self._hooks.run(phase, self, value, check)
        if edited:
            now.edited.append(phase)
        return value

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _started(self) -> Text:
        if self._text is None:
            raise RuntimeError("the decoder has no text yet: call start(prompt) first")
        return self._text

    def _drop_round(self) -> None:
        self._round = None
        self._started().settle()

    def _undo(self, text: Text) -> None:
        """Whatever goes wrong, also an interrupt: the text stands at its last committed round."""
        self._round = None
        text.settle()

    def _wait(self) -> None:
        for device in self._gpus:
            torch.cuda.synchronize(device)

    @contextmanager
    def _phase(self, phase: str) -> Iterator[tuple[_Round, Text]]:
        """One phase: in its turn, timed without its hooks, and the whole round undone if it fails."""
        text = self._started()
        if text.place.finished and self._round is None:
            raise RuntimeError(
                f"the text is finished ({text.place.finished}): extend() goes on, back() undoes, start() begins again"
            )
        now = self._round or _Round()
        expected = PHASES[len(now.times)]
        if phase != expected:
            name = "build" if expected == "tree" else expected
            raise RuntimeError(f"the next phase of this round is {name}(); step() runs a whole round")
        self._round = now
        try:
            hooks, started = self._hooks.seconds, time.perf_counter()
            yield now, text
            self._wait()  # kernels run late: their time belongs to this phase
            now.times[phase] = time.perf_counter() - started - (self._hooks.seconds - hooks)
        except BaseException:
            self._undo(text)
            raise


def generate(pair: Pair, prompt: Any, *, template_args: dict[str, Any] | None = None, **settings: Any) -> Trace:
    """Decode ``prompt`` to its end. ``settings`` are those of :class:`Decoder`; returns the trace."""
    decoder = Decoder(pair, **settings)
    for _ in decoder.run(prompt, **(template_args or {})):
        pass
    return decoder.trace


def _made(value: T | None) -> T:
    """A value that an earlier phase has made."""
    assert value is not None
    return value


def _checked_budget(budget: int | None) -> int | None:
    if budget is not None and budget < 0:
        raise ValueError(f"budget must be >= 0 drafted nodes, or None for the block's depth, not {budget}")
    return budget


def _checked_length(max_new_tokens: int) -> int:
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be >= 0, not {max_new_tokens}")
    return max_new_tokens
