"""TreeInspector: the views of a run in one layout, on a live decoder or on a saved trace.

The widget adds control. What it shows is the same front end that reports use, and a page without a kernel, such as an
exported notebook, gets its static form.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ddlab.step import Step
from ddlab.trace import Trace
from ddlab.tree import DraftTree
from ddlab.views import front, rounds_view
from ddlab.views.data import run_data

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise ImportError("TreeInspector needs anywidget: pip install 'ddlab[lab]'") from error

if TYPE_CHECKING:
    from ddlab.decode import Decoder

OWN = -1  # the place of the target's own token in a selection: it is no node


class Selected(NamedTuple):
    """What was clicked: a node of a round's tree, or with `node` -1 the target's own token after the path."""

    round: int
    node: int
    token: int
    label: str
    path: tuple[int, ...]  # token ids from the first draft to this one


class TreeInspector(anywidget.AnyWidget):
    """Tree, mask, text and details of a run, with the means to go on, back, and another way.

    On a decoder: `step` and `back` decode and undo; `prune` and `force` make a round again without a branch, or with
    that branch as the only one. The text stays the target's own, whatever is cut: an edit changes what is drafted.
    Those rounds are marked as edited. On a trace everything can be looked at, nothing decoded.

    Attributes:
        selected: what was clicked, a `Selected` or None. To follow it: `inspector.observe(function, "selected")`.
        round: the round that is shown.
        budget: the budget whose tree is shown, None for all nodes. May be set.

    A decoder has one live inspector: making another one closes the first.

    Raises:
        TypeError: neither a Decoder nor a Trace.
        RuntimeError: a decoder without a text.
    """

    _esm = front.WIDGET
    _css = front.STYLE

    data = traitlets.Dict().tag(sync=True)
    live = traitlets.Bool(False).tag(sync=True)
    round = traitlets.Int(0).tag(sync=True)
    budget = traitlets.Int(None, allow_none=True).tag(sync=True)
    selection = traitlets.Dict().tag(sync=True)  # what the front end sends: round and node
    busy = traitlets.Bool(False).tag(sync=True)
    finished = traitlets.Unicode("").tag(sync=True)
    message = traitlets.Unicode("").tag(sync=True)
    selected = traitlets.Any(None)
    decoder: Any = None

    def __init__(self, decoder_or_trace: Decoder | Trace, **kwargs: Any) -> None:
        decoder, trace = _source(decoder_or_trace)
        super().__init__(live=decoder is not None, data=run_data(trace), round=max(trace.rounds - 1, 0), **kwargs)
        self.decoder, self._trace = decoder, trace
        if decoder is not None:
            older = _LIVE.get(id(decoder))
            if older is not None:
                older.close()
            _LIVE[id(decoder)] = self
            self.finished = decoder.finished or ""
        self.observe(self._select, "selection")
        self.on_msg(self._hear)

    @property
    def trace(self) -> Trace:
        """The decoder's trace as it is now, or the one given."""
        return self._trace if self.decoder is None else self.decoder.trace

    # ---- what can be done ------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """Decodes the next round and shows it."""
        decoder = self._live()
        with self._working():
            step = decoder.step()
        return step  # noqa: RET504 - a context manager might swallow, mypy says, so not from inside

    def back(self) -> None:
        """Undoes the last round, bit for bit."""
        decoder = self._live()
        with self._working():
            decoder.back()

    def prune(self, node: int | None = None, round: int | None = None) -> Step:
        """Makes a round again without the branch that begins at `node`; both default to what is selected."""
        return self._again(_without, node, round)

    def force(self, node: int | None = None, round: int | None = None) -> Step:
        """Makes a round again with the way to `node`, and what hangs below it, as all that is drafted."""
        return self._again(_only, node, round)

    def select(self, node: int, round: int | None = None) -> None:
        """Selects a node from Python, as a click does."""
        self.selection = {"round": self.round if round is None else round, "node": node}

    def _again(self, cut: Callable[[DraftTree, int], DraftTree], node: int | None, round: int | None) -> Step:
        decoder = self._live()
        if node is None or round is None:
            if self.selected is None:
                raise ValueError("nothing is selected: click a node, or give node= and round=")
            node = self.selected.node if node is None else node
            round = self.selected.round if round is None else round
        steps = decoder.trace.steps
        if not 0 <= round < len(steps):
            raise ValueError(f"no round {round}: the trace has {len(steps)}")
        draft = steps[round].tree
        if not 0 < node < len(draft):
            raise ValueError(f"node {node} is no draft of round {round}: its drafts are 1 to {len(draft) - 1}")
        branch = [int(draft.tokens[i]) for i in draft.path(node)[1:]]

        def hook(_: Decoder, tree: DraftTree) -> DraftTree | None:
            place = find(tree, branch)
            return None if place is None else cut(tree, place)

        with self._working():
            while decoder.trace.rounds > round:
                decoder.back()
            with decoder.register_hook("tree", hook):
                made = decoder.step()
        return made

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Shows what came of it, also after an error or an interrupt: the decoder then stands at a whole round."""
        self.busy, self.message = True, ""
        try:
            yield
        finally:
            self.refresh()

    def refresh(self) -> None:
        """Shows what was decoded elsewhere, its last round first."""
        with self.hold_sync():
            trace = self.trace
            self.data, self.round, self.budget = run_data(trace), max(trace.rounds - 1, 0), None
            self.finished = (self.decoder.finished if self.decoder is not None else "") or ""
            self.busy = False

    def _live(self) -> Decoder:
        if self.decoder is None:
            raise RuntimeError("this inspector shows a saved trace: give TreeInspector a decoder to go on decoding")
        if _LIVE.get(id(self.decoder)) is not self:
            raise RuntimeError("this inspector was closed: a newer one has its decoder")
        return self.decoder

    # ---- what the front end says -----------------------------------------------------------------------------------

    def _hear(self, _: Any, content: dict[str, Any], buffers: Any) -> None:
        actions: dict[str, Callable[[], Any]] = {
            "step": self.step,
            "back": self.back,
            "prune": lambda: self.prune(content["node"], content["round"]),
            "force": lambda: self.force(content["node"], content["round"]),
        }
        action = actions.get(str(content.get("do")))
        if action is None:
            return
        try:
            action()
        except KeyboardInterrupt:
            self.message = "Interrupted; the text stands at its last whole round."
        except Exception as error:  # shown where the button is: nobody reads a widget's log
            self.message = f"{type(error).__name__}: {error}"

    def _select(self, change: Any) -> None:
        self.selected = selected(self.trace, change["new"].get("round"), change["new"].get("node"))

    def close(self) -> None:
        """Ends this inspector; the decoder stays as it is."""
        if self.decoder is not None and _LIVE.get(id(self.decoder)) is self:
            del _LIVE[id(self.decoder)]
        self.unobserve_all()
        self.on_msg(self._hear, remove=True)
        super().close()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:  # closed
            return None
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        static = rounds_view(self.trace, self.round)
        return data | static._repr_mimebundle_(), metadata

    def __repr__(self) -> str:
        what = "a trace" if self.decoder is None else "a decoder"
        return f"TreeInspector on {what} of {self.trace.rounds} rounds"


# by the id of the decoder, which lives at least as long as its inspector
_LIVE: weakref.WeakValueDictionary[int, TreeInspector] = weakref.WeakValueDictionary()


def _source(given: Any) -> tuple[Any, Trace]:
    if isinstance(given, Trace):
        return None, given
    if hasattr(given, "register_hook") and hasattr(given, "step"):
        return given, given.trace
    raise TypeError(f"TreeInspector takes a Decoder or a Trace, not {type(given).__name__}")


def selected(trace: Trace, round: Any, node: Any) -> Selected | None:
    """The node of a round, None where there is no such node (the round was undone meanwhile)."""
    if not isinstance(round, int) or not isinstance(node, int) or not 0 <= round < trace.rounds:
        return None
    step = trace.steps[round]
    if node == OWN and step.bonus is not None:
        last, token = step.path[-1], int(step.bonus)
    elif 0 <= node < len(step.tree):
        last, token = node, int(step.tree.tokens[node])
    else:
        return None
    path = [int(step.tree.tokens[i]) for i in step.tree.path(last)[1:]]
    label = trace.token_text[token].label if token in trace.token_text else f"[id {token}]"
    return Selected(round, node, token, label, tuple([*path, token] if node == OWN else path))


# ---- cutting trees -------------------------------------------------------------------------------------------------


def find(tree: DraftTree, branch: list[int]) -> int | None:
    """The node at the end of these tokens from the root, if they were drafted."""
    node = 0
    for token in branch:
        following = [child for child in tree.children(node).tolist() if int(tree.tokens[child]) == token]
        if not following:
            return None
        node = following[0]
    return node


def _without(tree: DraftTree, node: int) -> DraftTree:
    return _kept(tree, [not below[node] for below in tree.ancestors()])


def _only(tree: DraftTree, node: int) -> DraftTree:
    way = set(tree.path(node))
    return _kept(tree, [i in way or bool(below[node]) for i, below in enumerate(tree.ancestors())])


def _kept(tree: DraftTree, keep: list[bool]) -> DraftTree:
    """The nodes to keep, in their order; a node comes with its parent."""
    nodes = [i for i, kept in enumerate(keep) if kept]
    place = {node: at for at, node in enumerate(nodes)} | {-1: -1}
    parents = [place[int(tree.parents[node])] for node in nodes]
    return DraftTree.from_parents(tree.tokens[nodes], parents, log_prob=tree.log_prob[nodes], rank=tree.rank[nodes])
