"""engine="graph" against engine="eager": the same tokens, node logits and states, whatever is done in between.

Without a GPU nothing is captured and the kernels are interpreted, so what is tested here is the arithmetic and the
bookkeeping of buffers: in float32, on models of a few layers.
"""

import models
import pytest
import torch

import ddlab

pytest.importorskip("triton", reason="the fast path is written in Triton")

from ddlab import graph
from ddlab.fast import layers as fast_layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = list(range(5, 16))
BLOCK = 4


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    monkeypatch.setattr(fast_layers, "PROGRAMS", 4)  # an interpreted program takes milliseconds


def pair_of(kind: str, **drafter: object) -> ddlab.Pair:
    target = models.fresh_target(kind).to(DEVICE)
    settings = {"block": BLOCK, "window": 6, "layer_types": ("sliding_attention", "full_attention"), **drafter}
    return ddlab.Pair(target, models.random_drafter(target, **settings).to(DEVICE))


def decoder(pair: ddlab.Pair, engine: str, **settings: object) -> ddlab.Decoder:
    common = {"method": "ddtree", "budget": BLOCK - 1, "max_new_tokens": 4, "stop_token_ids": ()}
    return ddlab.Decoder(pair, engine=engine, **{**common, **settings})


def close(found: torch.Tensor, right: torch.Tensor) -> bool:
    return found.shape == right.shape and bool((found - right).abs().max() < 1e-5 * right.abs().max())


CHAIN: dict[str, object] = {"method": "dflash", "temperature": 0.7}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("hybrid", {}), ("hybrid", CHAIN), ("hybrid", {"method": "ar"}), ("swa", {}), ("llama", CHAIN), ("vlm", {})],
    ids=str,
)
def test_both_engines_see_and_say_the_same(kind, settings):
    pair = pair_of(kind)
    seen: dict[str, list[torch.Tensor]] = {"eager": [], "graph": []}
    traces = {}
    for engine, logits in seen.items():
        made = decoder(pair, engine, **settings)
        made.register_hook("verify", lambda _, value, logits=logits: logits.append(value.clone()))
        if made.method != "ar":
            made.register_hook("draft", lambda _, value, logits=logits: logits.append(value.clone()))
        assert [step.engine for step in made.run(PROMPT)] == [engine] * made.trace.rounds
        traces[engine] = made.trace
    assert traces["graph"].output_ids == traces["eager"].output_ids
    assert traces["graph"].settings["engine"] == "graph"
    assert len(seen["graph"]) == len(seen["eager"])
    assert all(close(found, right) for found, right in zip(seen["graph"], seen["eager"], strict=True))
    for found, right in zip(traces["graph"].steps, traces["eager"].steps, strict=True):
        assert found.tree.tokens.tolist() == right.tree.tokens.tolist()
        assert (found.path, found.stop_reason) == (right.path, right.stop_reason)


def committed(made: ddlab.Decoder) -> list[torch.Tensor]:
    """Everything that the caches hold of the text."""
    target, drafts = made._text.target, made._text.drafts
    found = [x for state in target.cache.committed.linear if state is not None for x in state]
    for layer, kind in zip(target.cache.layers, target.pair.layer_types, strict=True):
        if kind != "linear_attention":
            found += [layer.keys[:, :, : target.length], layer.values[:, :, : target.length]]
    return [x.clone() for x in found + [x[:, :, : drafts.length] for x in (*drafts.keys, *drafts.values)]]


@pytest.mark.parametrize("kind", ["hybrid", "swa"])
def test_the_caches_hold_the_same_and_going_back_is_bit_for_bit(kind):
    pair = pair_of(kind)
    eager, graph = (decoder(pair, engine, max_new_tokens=8) for engine in ("eager", "graph"))
    for made in (eager, graph):
        made.start(PROMPT)
        made.step()
    before, ids = committed(graph), graph.ids
    assert all(close(found, right) for found, right in zip(before, committed(eager), strict=True))
    again = [graph.step(), graph.step()]
    graph.back()
    graph.back()
    assert graph.ids == ids
    assert all(torch.equal(found, right) for found, right in zip(committed(graph), before, strict=True))
    assert [graph.step().emitted, graph.step().emitted] == [step.emitted for step in again]


def test_texts_take_turns_with_the_buffers_also_inside_a_round():
    pair = pair_of("hybrid")
    right = {}
    for first, prompt in enumerate((PROMPT, PROMPT[::-1])):
        made = decoder(pair, "eager")
        right[first] = [list(step.emitted) for step in made.run(prompt)]
    texts = [decoder(pair, "graph") for _ in range(2)]
    for made, prompt in zip(texts, (PROMPT, PROMPT[::-1]), strict=True):
        made.start(prompt)
    found: dict[int, list[list[int]]] = {0: [], 1: []}
    phases = ("draft", "build", "verify", "accept", "commit")
    while any(made.finished is None for made in texts):
        for phase in phases:  # every phase of one meets the other's in the buffers
            for i, made in enumerate(texts):
                if made.finished is None or (phase != "draft" and made._round is not None):
                    step = getattr(made, phase)()
                    if phase == "commit":
                        found[i].append(list(step.emitted))
    assert found == right


def test_a_fork_is_independent():
    pair = pair_of("hybrid")
    made = decoder(pair, "graph", max_new_tokens=5)
    made.start(PROMPT)
    made.step()
    other = made.fork()
    mine = [step.emitted for step in made.run()]
    assert [step.emitted for step in other.run()] == mine
    assert other.output_ids == made.output_ids


def test_watched_modules_run_eager_for_those_rounds_and_the_trace_says_so():
    pair = pair_of("hybrid")
    right = [step.emitted for step in decoder(pair, "eager", max_new_tokens=5).run(PROMPT)]
    made = decoder(pair, "graph", max_new_tokens=5)
    made.start(PROMPT)
    made.step()
    with made.capture("layers.0.linear_attn") as seen:
        made.step()
    assert len(seen["layers.0.linear_attn"]) == 1
    for _ in made.run():
        pass
    assert [step.emitted for step in made.trace.steps] == right
    assert [step.engine for step in made.trace.steps][:3] == ["graph", "eager", "graph"]
    assert any("ran eager" in said for said in made.trace.warnings)


def test_a_text_that_outgrows_its_buffers_goes_on(monkeypatch):
    monkeypatch.setattr(graph, "_ROUND_UP", 8)
    monkeypatch.setattr(graph, "_WIDEST", 8)
    pair = pair_of("hybrid")
    ids = {}
    for engine in ("eager", "graph"):
        made = decoder(pair, engine, max_new_tokens=3)
        for _ in made.run(PROMPT):
            pass
        made.extend(max_new_tokens=8)
        for _ in made.run():
            pass
        ids[engine] = made.ids
    assert ids["graph"] == ids["eager"]


@pytest.mark.parametrize("limit", [1, 65])
def test_rows_of_a_tree_are_padded_and_many_rows_take_the_plain_rule(limit, monkeypatch):
    monkeypatch.setattr(fast_layers, "DELTA_ROWS", limit)
    pair = pair_of("hybrid")
    tree = ddlab.DraftTree.from_parents([7, 3, 4, 5, 6, 3], [-1, 0, 0, 1, 3, 4])
    logits = []
    for engine in ("eager", "graph"):
        made = decoder(pair, engine)
        made.register_hook("tree", lambda d, value: tree.with_root(d.ids[-1]))
        made.start(PROMPT)
        for phase in (made.draft, made.build):
            phase()
        logits.append(made.verify())
        made.step()
        for phase in (made.draft, made.build):
            phase()
        logits[-1] = torch.cat([logits[-1], made.verify()])
    assert close(logits[1], logits[0])


def test_changed_weights_are_seen():
    pair = pair_of("hybrid")
    decoder(pair, "graph").start(PROMPT)
    with torch.no_grad():
        pair.layers[0].linear_attn.in_proj_a.weight.mul_(2.0)
    texts = [[step.emitted for step in decoder(pair, engine).run(PROMPT)] for engine in ("eager", "graph")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("kind", "said"),
    [("gpt_oss", "not GptOssDecoderLayer"), ("qwen3_moe", "not Qwen3MoeDecoderLayer"), ("gemma3", "Gemma3")],
)
def test_what_it_cannot_run_is_refused_with_the_cure(kind, said):
    pair = ddlab.Pair(models.target(kind).to(DEVICE))
    with pytest.raises(ValueError, match=f"{said}.*Use engine='eager'"):
        ddlab.Decoder(pair, method="ar", engine="graph")
    assert ddlab.Decoder(pair, method="ar").engine == "eager"


def test_it_computes_the_exact_state_only():
    with pytest.raises(ValueError, match=r"flattened.*engine='eager'"):
        ddlab.Decoder(pair_of("hybrid"), engine="graph", linear_state="flattened")


def test_on_a_cpu_the_default_is_eager_and_graph_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pair = ddlab.Pair(models.target("hybrid"))
    assert ddlab.Decoder(pair, method="ar").engine == "eager"
    with pytest.raises(ValueError, match="CUDA graphs, and the target is on cpu"):
        ddlab.Decoder(pair, method="ar", engine="graph")


def test_an_unknown_engine_is_refused():
    with pytest.raises(ValueError, match=r"unknown engine 'grahp'.*graph"):
        ddlab.Decoder(ddlab.Pair(models.target("hybrid")), method="ar", engine="grahp")
