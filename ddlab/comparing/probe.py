"""Does a backend compute a kind of layer right, in this call, on this machine? Tried out on a pair in miniature.

Each probe runs one layer and holds it to float64 (`ddlab.comparing.verdict`), and matches what is
wrong with known faults.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ddlab.comparing import miniature, stopwatch, ways
from ddlab.comparing.comparison import LayerInfo
from ddlab.comparing.delta_forms import default_form
from ddlab.comparing.layerwise import Scene, Site, draft_scene, hidden_states, target_scene, watch
from ddlab.comparing.rows import NO_MASK
from ddlab.comparing.verdict import Referee, errors
from ddlab.comparing.ways import Way
from ddlab.draft_cache import BlockCache
from ddlab.tree import DraftTree
from ddlab.verify import TargetState

if TYPE_CHECKING:
    from ddlab.pair import Pair

UNMASKED = "draft, no mask"  # the drafter's layers called without a mask, as code outside of ddlab may do
TEXT = miniature.WINDOW + 16  # tokens before a step, a tree or a block: more than a window
PARENTS = (-1, 0, 0, 1, 1, 2, 3, 3, 6, 8, 9)  # a tree that branches, seven deep
REPEATS = 15


@dataclass(frozen=True)
class Probe:
    """One try. layers: those of the pair that are of this kind.

    verdict: "ok", "wrong", "refused" (illegal, nothing ran), "error", "crashed", "not installed" or "not tried". said:
    the error or the refusal, word for word; diagnosis: what it comes from. error: relative RMS distance from float64 at
    the worst row, and the band that is rounding. ratio: time of the layer, of eager's (of a linear layer: of the form
    that ddlab uses), a median of ``repeats``.
    """

    part: str
    layers: tuple[int, ...]
    kind: str
    what: str
    backend: str
    verdict: str
    said: str = ""
    diagnosis: str = ""
    error: float | None = None
    band: float | None = None
    ratio: float | None = None
    repeats: int = 0

    @property
    def works(self) -> bool:
        return self.verdict == "ok"


@dataclass(frozen=True, eq=False)
class Subject:
    """A kind of layer to be probed, at layer ``site`` of a pair: in miniature, where it is the only one, or a whole."""

    part: str
    layers: tuple[int, ...]
    kind: str
    linear: bool
    pair: Pair
    site: int = 0

    @property
    def calls(self) -> tuple[str, ...]:
        return ("prefill", "step", "verify") if self.part == "target" else ("draft", UNMASKED)


def subjects(pair: Pair, *, small: bool = True) -> list[Subject]:
    """One for each kind of layer. Raises what `ddlab.comparing.miniature` raises where a model cannot be made small."""
    found, mini = [], pair
    for first, layers in miniature.kinds_of(pair, "target").items():
        mini = miniature.small_target(pair, first) if small else pair
        kind = pair.layer_types[first]
        info = LayerInfo(first, kind, pair.windows[first], _sinks(pair.layers[first]))
        linear = kind == "linear_attention"
        found.append(Subject("target", tuple(layers), str(info), linear, mini, 0 if small else first))
    if pair.drafter is not None:
        settings, beside = pair.drafter.settings, mini
        for first, layers in miniature.kinds_of(pair, "drafter").items():
            kind = settings.layer_types[first]
            window = settings.sliding_window if kind == "sliding_attention" else None
            info = LayerInfo(first, kind, window, False)
            mini = miniature.small_drafter(pair, first, beside) if small else pair
            found.append(Subject("drafter", tuple(layers), str(info), False, mini, 0 if small else first))
    return found


def _sinks(layer: Any) -> bool:
    return getattr(getattr(layer, "self_attn", None), "sinks", None) is not None


# ---- probing ---------------------------------------------------------------------------------------------------------


class Case:
    """One call of a subject, run once on eager: what every backend is given, and what it should give."""

    def __init__(self, subject: Subject, what: str):
        self.subject, self.what = subject, what
        with Way("eager").unruled(subject.pair, subject.part):
            self.scene = _scene(subject.pair, what)
            base = watch(self.scene, calls=True)
        self.site: Site = self.scene.sites[subject.site]
        self.given = {index: hidden_states(call) for index, call in base.calls.items()}
        index = self.site.index
        self.referee = Referee(self.scene, self.site, base.calls[index], base.mixed[index].dtype)

    def probe(self, way: Way, repeats: int = REPEATS) -> Probe:
        """Runs nothing where the call is illegal. No error gets out, but a crash does."""
        subject, scene, pair = self.subject, self.scene, self.subject.pair
        if (missing := way.missing(pair.device.type)) is not None:
            return self._probe(way, "not installed", missing)
        masked = self.what != UNMASKED
        illegal = way.refusal(pair, scene.part, scene.what, len(scene.rows), scene.rows.branches) if masked else None
        if illegal is not None:
            return self._probe(way, "refused", re.sub(r"^layer \d+: ", "", illegal))  # of a miniature
        use = way.use(pair, scene.part, scene.what) if masked else way.unruled(pair, scene.part)
        try:
            with use:
                seen = watch(scene, self.given, calls=True)
        except ImportError as error:
            return self._probe(way, "not installed", ways.verbatim(error))
        except Exception as error:
            said = ways.verbatim(error)
            refused = isinstance(error, ValueError) and way.ruled
            return self._probe(way, "refused" if refused else "error", said, diagnosis=diagnose(said))
        out, band = seen.mixed[self.site.index], self.referee.band
        off = float(errors(out, self.referee.out).max())
        if off <= band:
            return self._probe(way, "ok", error=off, band=band, **(self._time(way, repeats) if masked else {}))
        faults = self.referee.faults(out)
        masks = seen.calls[self.site.index][1].get("attention_mask")
        said = faults[0] if faults else "no known fault gives these numbers"
        if faults and masks is None and not subject.linear:
            seen_all = said == NO_MASK and self.site.window is not None
            said = "the window and the order in the block are ignored" if seen_all else said
            said += ", because the mask is None"
        return self._probe(way, "wrong", diagnosis=said, error=off, band=band)

    def _time(self, way: Way, repeats: int) -> dict[str, Any]:
        usual = Way(default_form(self.what, len(self.scene.rows)), True) if self.subject.linear else Way("eager")
        if repeats < 1:
            return {}
        times = stopwatch.measure(self.subject.pair, self.scene, [usual, way], repeats)
        index = self.site.index
        ratio = times.layers[way.name, index] / times.layers[usual.name, index]
        return {"ratio": ratio, "repeats": repeats}

    def _probe(self, way: Way, verdict: str, said: str = "", **more: Any) -> Probe:
        subject = self.subject
        return Probe(subject.part, subject.layers, subject.kind, self.what, way.name, verdict, said, **more)


def _scene(pair: Pair, what: str) -> Scene:
    state = TargetState(pair)
    if what == "prefill":
        ids = torch.randint(2, miniature.VOCAB, (TEXT,), generator=torch.Generator().manual_seed(1)).tolist()
        return target_scene(pair, state, what, ids)
    if what in ("step", "verify"):
        miniature.read(state, TEXT)
        if what == "step":
            return target_scene(pair, state, what, [5])
        tree = DraftTree.from_parents([2 + i for i in range(len(PARENTS))], PARENTS)
        return target_scene(pair, state, what, tree.tokens.tolist(), tree)
    drafter = pair.drafter
    assert drafter is not None
    cache = drafter.new_cache()
    draw = torch.Generator().manual_seed(2)
    drafter.ingest(cache, torch.randn(TEXT, drafter.model.encoder.fc.in_features, generator=draw))
    scene = draft_scene(pair, cache, 5)
    return scene if what == "draft" else _without_mask(pair, cache, scene)


def _without_mask(pair: Pair, cache: Any, scene: Scene) -> Scene:
    """The drafter's layers under no mask and with the whole context, which is how they mean it to be told a window."""
    drafter: Any = pair.drafter
    settings = drafter.settings
    ids = torch.tensor(drafter.block_ids(5), device=pair.device)
    noise = (torch.nn.functional.embedding(ids, pair.embed) * settings.input_embedding_scale)[None]
    noise = noise.to(drafter.device, drafter.dtype)
    positions = torch.arange(TEXT, TEXT + settings.block_size, device=drafter.device)[None]

    def run() -> torch.Tensor:
        cache.truncate(TEXT)
        cache.reserve(TEXT + settings.block_size)
        out = drafter.model(
            noise_embeds=noise,
            context_hidden_states=noise.new_zeros(1, 0, drafter.model.encoder.fc.in_features),
            attention_mask=dict.fromkeys(settings.layer_types),
            position_ids=positions,
            cache=BlockCache(cache, [0] * len(settings.layer_types)),
        )
        return out.last_hidden_state[0]

    sites = tuple(Site(s.index, s.kind, s.window, s.layer, s.mixer) for s in scene.sites)
    return Scene(scene.what, scene.part, scene.rows, sites, run, scene.past, scene.tokens)


# what an error says -> what it comes from
_CAUSES = (
    (r"unexpected keyword argument '(s_aux|sinks?)'", "this kernel does not take attention sinks (s_aux)"),
    (r"unexpected keyword argument '(sliding_window|window_size)'", "this kernel does not take a sliding window"),
    (r"(only supports? |expected .*)(fp16|bf16|float16|half)", "this kernel does not know the dtype"),
    (r"No available kernel", "PyTorch has no such kernel for this call's shape, dtype, mask or device"),
    (r"IndexError|index .* out of (bounds|range)|CUDA error: device-side assert", "a 4-D mask was read as padding"),
    (r"out of memory", "not enough memory for the probe"),
    (r"[Cc]ompil|Inductor|BackendCompilerFailed", "the kernel could not be compiled"),
)


def diagnose(said: str) -> str:
    """What an error comes from, as far as its words tell."""
    return next((cause for pattern, cause in _CAUSES if re.search(pattern, said)), "")


def known(name: str) -> Way:
    """Like `ways.find`, and Transformers' own functions that may end a process: here they run in a child."""
    return Way(name) if name in ways.OURS and name in ALL_ATTENTION_FUNCTIONS.valid_keys() else ways.find(name)
