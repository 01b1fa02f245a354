"""Other budgets, builders and depths from one recorded text, without decoding again.

The text is fixed whatever is drafted: at temperature 0, and above under noise keyed by position. So the drafter is run
once from every position at which a round may start (`dense_drafts`, the only part that needs the model). From then on a
round is a tree built from the kept candidates and a walk along the text itself (`Replay`), in numpy.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ddlab.audit import band
from ddlab.builders import BUILDERS, Candidates
from ddlab.names import hint, one_of
from ddlab.oracle import plain_logits
from ddlab.record import describe_pair
from ddlab.sampling import Sampling, walk
from ddlab.tokens import Token, describe
from ddlab.top import top_tokens
from ddlab.trace import Mean, Trace
from ddlab.tracefile import plain
from ddlab.tree import DraftTree

if TYPE_CHECKING:
    import pandas

    from ddlab.pair import Pair


# ---- the dense pass --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class DenseDrafts:
    """The drafter's candidates from every position of a text at which a round may start. Plain data.

    Row i is the block of the round whose root is the token at position ``prompt_length + i``; its depth d stands for
    the token at ``prompt_length + i + 1 + d``.
    """

    text: np.ndarray  # int64 [tokens]: prompt and new tokens
    prompt_length: int
    ids: np.ndarray  # int32 [positions, depth, k]: best first
    log_probs: np.ndarray  # float64 [positions, depth, k]: as top_tokens gives them, so that trees are the decoder's
    depths: np.ndarray  # int64 [positions]: rows before the first that is -inf throughout
    complete: bool  # k is the whole vocabulary
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int
    max_positions: int | None  # of the target: no draft beyond
    token_text: Mapping[int, Token] = field(default_factory=dict)  # of the text and of every candidate, for views

    def __len__(self) -> int:
        return len(self.depths)

    def __repr__(self) -> str:
        positions, depth, k = self.ids.shape
        return f"<DenseDrafts: {positions} positions, {depth} deep, the {k} best tokens, {self.nbytes / 1e6:.1f} MB>"

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.log_probs.nbytes

    def tree(
        self, start: int, budget: int | None, builder: str = "best_first", depth: int | None = None, **options: Any
    ) -> DraftTree:
        """The tree of a round whose root is at position ``start``; arguments as in `Replay.run`."""
        row = start - self.prompt_length
        if not 0 <= row < len(self):
            last = self.prompt_length + len(self) - 1
            raise IndexError(f"no round starts at position {start}: rounds start at {self.prompt_length} to {last}")
        rows = self.ids.shape[1] if depth is None else min(depth, self.ids.shape[1])
        if self.max_positions is not None:
            rows = min(rows, self.max_positions - start - 1)  # positions behind the root
        budget = rows if budget is None else budget
        kept = min(rows, int(self.depths[row]))
        drafted = Candidates(self.ids[row, :kept], self.log_probs[row, :kept], self.complete)
        return BUILDERS[builder](drafted, budget, int(self.text[start]), **options)


def dense_drafts(pair: Pair, trace: Trace, k: int = 64) -> DenseDrafts:
    """Run the drafter from every position of a recorded text: one target forward, then one block a position.

    Args:
        trace: recorded by any method; only its text and settings are used.
        k: candidates kept of each depth: the largest budget to be replayed.

    Raises:
        ValueError: the pair has no drafter or is not the trace's, or the trace's text is not the target's own.
    """
    _check_pair(pair, trace)
    drafter = pair.drafter
    assert drafter is not None
    text, first = [*trace.prompt_ids, *trace.output_ids], len(trace.prompt_ids)
    k = min(max(k, 1), pair.rows)
    positions = max(0, len(text) - 1 - first)  # no round starts at the last token
    ids = np.zeros((positions, drafter.depth, k), np.int32)
    log_probs = np.full(ids.shape, -np.inf)
    depths = np.zeros(positions, np.int64)
    if positions:
        with pair.tap() as tapped:
            logits = plain_logits(pair, [text[:-1]], keep=positions + 1)[0]  # [new tokens, vocab]
        _check_text(pair, trace, text, logits)
        cache = drafter.new_cache()
        drafter.ingest(cache, tapped.features()[: len(text) - 2])  # the last root sees what is before it
    for row in reversed(range(positions)):  # a block is written behind its context, where later positions had theirs
        cache.truncate(first + row)
        best, scores = top_tokens(pair.propose(cache, text[first + row]), k)
        depths[row] = len(best)
        ids[row, : len(best)], log_probs[row, : len(best)] = best, scores
    settings = trace.settings
    return DenseDrafts(
        text=np.array(text, np.int64),
        prompt_length=first,
        ids=ids,
        log_probs=log_probs,
        depths=depths,
        complete=k == pair.rows,
        stop_token_ids=tuple(settings["stop_token_ids"]),
        max_new_tokens=settings["max_new_tokens"],
        max_positions=pair.max_positions,
        token_text=describe(pair.tokenizer, [*text, *np.unique(ids).tolist()]),
    )


def _check_pair(pair: Pair, trace: Trace) -> None:
    """Raises ValueError where header and rounds say that the text is not this target's own; runs nothing.

    Warns where the drafter is another one than the trace's: the text is the target's alone, so that is a fair
    question, but its rounds will not be those of the trace.
    """
    if pair.drafter is None:
        raise ValueError("this pair has no drafter to replay: build Pair(target, drafter)")
    edited = [step.index for step in trace.steps if "verify" in step.edited]
    if edited:
        raise ValueError(
            f"a hook replaced the target's logits in round {edited[0]}: the text is not the target's own, so other "
            "drafts would have led to another one. Decode without the verify hook"
        )
    if trace.settings.get("linear_state") == "flattened":
        raise ValueError(
            'this trace was made with linear_state="flattened": its text depends on what was drafted. Decode with '
            'linear_state="exact"'
        )
    ours, theirs = plain(describe_pair(pair)), plain(trace.header.get("pair", {}))
    facts = ["target", "layer_types", "windows", "dtype", "vocabulary"]
    if trace.settings.get("logits_processor"):
        facts.append("name")  # without the processors the text itself cannot be checked, see _check_text
    for fact in facts:
        if ours[fact] != theirs.get(fact):
            raise ValueError(
                f"the trace is of {theirs.get('name')!r} with {fact} {theirs.get(fact)}, the pair {pair.name!r} has "
                f"{ours[fact]}: replay with the pair that decoded"
            )
    if theirs.get("drafter") is not None:
        their_source, our_source = ((described.get("source") or {}).get("drafter") for described in (theirs, ours))
        if (theirs["drafter"], their_source) != (ours["drafter"], our_source):
            warnings.warn(
                f"the trace was made with another drafter ({their_source}) than this pair's ({our_source}): the "
                "replay is of this pair's",
                stacklevel=4,
            )


def _check_text(pair: Pair, trace: Trace, text: list[int], logits: torch.Tensor) -> None:
    """Raises ValueError where the target alone chooses another token than the text has, beyond the dtype's band.

    logits: [new tokens, vocab], of one plain forward.
    """
    settings, first = trace.settings, len(trace.prompt_ids)
    if settings.get("logits_processor"):
        return  # the text is fixed all the same, but the rule that chose it is not here
    sampling = Sampling(settings["temperature"], settings["seed"])
    relative = band(pair.dtype, hybrid="linear_attention" in pair.layer_types)
    for at in range(0, len(logits), 32):  # a few rows of the vocabulary's noise at a time
        rows = logits[at : at + 32]
        positions = first + np.arange(at, at + len(rows))
        choice = sampling.choose(rows, positions, lambda row: text)
        allowed = 2 * relative * rows.abs().amax(-1).cpu()
        right = torch.tensor(text[first + at : first + at + len(rows)])
        wrong = torch.nonzero((choice.tokens != right) & (choice.margin > allowed)).flatten().tolist()
        if wrong:
            row = wrong[0]
            raise ValueError(
                f"the text is not this target's own: at position {positions[row]} it has token {right[row]}, the "
                f"target chooses {choice.tokens[row]} by {choice.margin[row]:.3g} logits. Replay with the pair that "
                "decoded; ddlab.audit(pair, trace) says more"
            )


# ---- the replay ------------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """A replayed round; the fields mean what they mean in a `Step`."""

    start: int  # position of the root
    accepted: int  # accepted drafts
    emitted: tuple[int, ...]
    stop_reason: str
    nodes: int  # drafted, the root not counted


class Replay:
    """A text cut into the rounds of any budget, builder and depth limit.

    A text that was not finished is replayed up to the last round that it decides.
    """

    def __init__(
        self,
        drafts: DenseDrafts,
        budgets: Sequence[int | None] = (64,),
        builders: Sequence[str] = ("best_first",),
        depth: int | None = None,
    ) -> None:
        self.drafts, self.budgets, self.builders, self.depth = drafts, tuple(budgets), tuple(builders), depth
        for builder in self.builders:
            _checked_options(builder, {})

    def __repr__(self) -> str:
        return f"<Replay: budgets {list(self.budgets)}, builders {list(self.builders)}, {self.drafts!r}>"

    def run(
        self, budget: int | None, builder: str = "best_first", depth: int | None = None, **options: Any
    ) -> list[Round]:
        """The rounds that a decoder with these trees would have made.

        Args:
            budget: most drafted nodes of a round; None: as many as the drafts are deep.
            builder: a name in `BUILDERS`: ``best_first`` is ``method="ddtree"``; ``chain`` with budget None is
                ``method="dflash"``.
            depth: use only so many depths of each block; None: the replay's own limit, else all.
            options: of the builder: ``width`` of fixed_width, ``cost`` of cost_aware.

        Raises:
            ValueError: a name, an option or a budget that cannot be, or more candidates than were kept.
        """
        _checked_options(builder, options)
        depth = self.depth if depth is None else depth
        for name, value in {"budget": budget, "depth": depth}.items():
            if value is not None and operator.index(value) < 0:
                raise ValueError(f"{name} must be 0 or more, or None, not {value}")
        drafts = self.drafts
        end = drafts.prompt_length + drafts.max_new_tokens  # how long the text may become
        unknown = np.full(drafts.ids.shape[1] + 1, -1)  # an unfinished text: nothing is known behind it
        text = np.concatenate([drafts.text, unknown])
        rounds: list[Round] = []
        start = drafts.prompt_length
        while start < len(drafts.text) - 1:
            tree = drafts.tree(start, budget, builder, depth, **options)
            right = text[start + 1 + tree.depth]  # [n]: true of the nodes on the text's path, and no other is met
            taken = walk(tree, right, drafts.stop_token_ids, end - start - 1)
            if taken.bonus == -1:
                break
            emitted = taken.emitted(tree)
            rounds.append(Round(start, len(taken.path) - 1, emitted, taken.stop_reason, tree.drafted))
            start += len(emitted)
        return rounds

    def tokens_per_round(
        self, budget: int | None, builder: str = "best_first", depth: int | None = None, **options: Any
    ) -> Mean:
        """τ with its number of rounds; arguments as in `run`."""
        counts = [len(r.emitted) for r in self.run(budget, builder, depth, **options)]
        return Mean("tokens per round", sum(counts) / len(counts) if counts else None, len(counts))

    def rows(self) -> list[dict[str, Any]]:
        """One row for each builder and budget that the replay was made for: τ, rounds, nodes, stop reasons."""
        rows = []
        for builder in self.builders:
            for budget in self.budgets:
                rounds = self.run(budget, builder)
                tokens, count = sum(len(r.emitted) for r in rounds), len(rounds)
                reasons = Counter(r.stop_reason for r in rounds)
                rows.append(
                    {
                        "builder": builder,
                        "budget": budget,
                        "depth_limit": self.depth,
                        "tokens_per_round": tokens / count if count else None,
                        "rounds": count,
                        "new_tokens": tokens,
                        "accepted_drafts": sum(r.accepted for r in rounds),
                        "nodes_per_round": sum(r.nodes for r in rounds) / count if count else None,
                        **{reason: reasons[reason] for reason in ("mismatch", "exhausted", "stop_token", "length")},
                    }
                )
        return rows

    def to_frame(self) -> pandas.DataFrame:
        """`rows` as a table. Raises ImportError, naming the cure, without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("Replay.to_frame needs pandas: pip install pandas") from error
        return pandas.DataFrame(self.rows())


def replay(
    pair: Pair,
    trace: Trace,
    budgets: Sequence[int | None] = (64,),
    builders: Sequence[str] = ("best_first",),
    depth: int | None = None,
) -> Replay:
    """Draft densely over a recorded text, then answer budgets and builders in milliseconds each.

    Args:
        trace: of any method and budget; its text must be the target's own.
        budgets: to be answered; any budget up to the largest of them can be (None: the block's depth).
        builders: names in `BUILDERS`, for the table; `Replay.run` takes any.
        depth: use only so many depths of each block; None: all.

    Raises:
        ValueError: see `dense_drafts`; or a budget, builder or depth that cannot be. Nothing has run then.

    In float32 the rounds are those of real decodes. Only a tie can part them: two prefixes at the budget's cut whose
    scores agree to the last bits of the drafter's arithmetic may change places, because its features come from one
    forward here and from verified trees there. In half precision those bits are coarse: trees then differ in a few
    nodes at the cut, in many rounds, and now and then a round does. (Two decodes of different budgets part there too.)
    """
    if not len(budgets):
        raise ValueError("give at least one budget to replay")
    if any(b is not None and operator.index(b) < 0 for b in budgets) or (depth is not None and depth < 0):
        raise ValueError(f"budgets and depth must be 0 or more, or None, not {list(budgets)} and {depth}")
    for builder in builders:
        _checked_options(builder, {})
    deepest = 0 if pair.drafter is None else pair.drafter.depth
    drafts = dense_drafts(pair, trace, max(deepest if b is None else b for b in budgets))
    return Replay(drafts, budgets, builders, depth)


def _checked_options(builder: str, options: Mapping[str, Any]) -> None:
    one_of("builder", builder, BUILDERS)
    parameters = inspect.signature(BUILDERS[builder]).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise ValueError(f"builder {builder!r} has no option {name!r}: {hint(name, known, f'it has {known}')}")
