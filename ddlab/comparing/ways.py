"""What can be held side by side, by name: attention backends, functions of Transformers' registry, delta-rule forms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ddlab import attention
from ddlab.comparing.delta_forms import FORMS
from ddlab.names import hint

if TYPE_CHECKING:
    from ddlab.comparing.layerwise import Site
    from ddlab.pair import Pair

# Transformers' own functions that are not run under its name: ours has the rules that keep a process alive
OURS = {"flex_attention": "flex"}
# what may end the process: compiled by another compiler, or a package with kernels of its own
RISKY = ("flex", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa:cudnn")
LONGEST = 400  # characters of an error that are shown


@dataclass(frozen=True)
class Way:
    """One way to compute a kind of layer: the attention layers, or (``linear``) the gated-delta-net layers."""

    name: str
    linear: bool = False

    @property
    def ruled(self) -> bool:
        """ddlab knows which calls are legal on it; a function that somebody registered is taken as it is."""
        return self.linear or self.name in attention.BACKENDS

    def touches(self, site: Site) -> bool:
        """Whether it computes this layer; the others stay as they are."""
        return site.linear == self.linear

    def missing(self, device: str) -> str | None:
        """Why it is not on this machine; None: it is."""
        if self.linear:
            return FORMS[self.name].missing(device)
        return attention.available(self.name) if self.ruled else None

    def refusal(self, pair: Pair, part: str, what: str, rows: int, branches: bool) -> str | None:
        """Why such a call is illegal, naming what to use instead; None: legal. Runs nothing."""
        if self.linear:
            return FORMS[self.name].refusal(rows, branches)
        if not self.ruled:
            return _foreign_refusal(self.name) if what == "verify" else None
        return attention.refusal(self.name, attention.calls_of(pair, part), (what,))

    def use(self, pair: Pair, part: str, what: str) -> AbstractContextManager[Any]:
        """The layers that it touches compute so inside the block, and as before behind it."""
        if self.linear:
            return FORMS[self.name].use()
        return attention.use(pair, self.name, part, (what,)) if self.ruled else self.unruled(pair, part)

    @contextmanager
    def unruled(self, pair: Pair, part: str) -> Iterator[None]:
        """An attention function whatever its rules say, for calls that ddlab itself does not make."""
        model: Any = pair.text_model if part == "target" else pair.drafter.model  # type: ignore[union-attr]
        before = attention._settings(model)
        try:
            model.set_attn_implementation(attention.BACKENDS[self.name].implementation if self.ruled else self.name)
            yield
        finally:
            attention._restore(before)


def _foreign_refusal(name: str) -> str | None:
    """A target that is set to such a name verifies no tree, whoever set it."""
    try:
        attention.check_name(name)
    except ValueError as error:
        return str(error)
    return None


def find(name: str) -> Way:
    """The way of that name. Raises ValueError for an unknown one, with near matches."""
    if name in FORMS:
        return Way(name, linear=True)
    if name in attention.BACKENDS:
        return Way(name)
    if name in OURS:
        raise ValueError(f"{name!r} as Transformers calls it can end the process: use {OURS[name]!r}")
    if name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return Way(name)
    known = [*attention.BACKENDS, *FORMS, *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    otherwise = (
        f"it is one of {', '.join([*attention.BACKENDS, *FORMS])}, or a function registered in AttentionInterface"
    )
    raise ValueError(f"unknown backend {name!r}: {hint(name, known, otherwise)}")


def every(pair: Pair, what: str) -> list[Way]:
    """What is set now first, then every other backend that is here and safe, and the delta-rule forms of a hybrid."""
    part = "drafter" if what == "draft" else "target"
    now = find(attention.attention_backend(pair, part))
    others = [find(name) for name in attention.BACKENDS if name != now.name and name not in RISKY]
    ways = [now, *(way for way in others if not way.missing(""))]
    if part == "target" and "linear_attention" in pair.layer_types:
        device = pair.device.type
        ways += [find(f.name) for f in FORMS.values() if not f.wrong_on_trees and not f.missing(device)]
    return ways


def verbatim(error: BaseException) -> str:
    """An error in one line, word for word; of a long one the beginning, and where a compiler says what is wrong."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if len(said) <= LONGEST:
        return said
    half = LONGEST // 2
    at = said.find(" error: ", half)
    return f"{said[:half]} … {said[at + 1 : at + half]} …" if at > 0 else f"{said[:LONGEST]} …"
