"""TreeInspector without a browser: what its buttons do, what a selection is, and what is left when it fails."""

import gc
import html
import re
import weakref

import nbformat
import pytest
from test_report import small_step, trace_of
from test_trace import make_trace

import ddlab
from ddlab import tokens, views
from ddlab.widget import Selected, TreeInspector, find

PROMPT = "Explain the theory of general relativity in detail."


@pytest.fixture(scope="module")
def pair():
    return ddlab.load_pair()


@pytest.fixture
def decoder(pair):
    decoder = ddlab.Decoder(pair, budget=12, max_new_tokens=40)
    decoder.start(PROMPT)
    return decoder


def click(inspector, what, **more):
    """What the front end sends."""
    inspector._handle_custom_msg({"do": what, **more}, [])


# ---- going on and back -------------------------------------------------------------------------


def test_a_click_on_step_decodes_one_round_and_shows_it(decoder):
    inspector = TreeInspector(decoder)
    assert inspector.data["rounds"] == [] and inspector.live
    for rounds in (1, 2):
        click(inspector, "step")
        assert decoder.trace.rounds == rounds
        assert len(inspector.data["rounds"]) == rounds and inspector.round == rounds - 1
        assert not inspector.busy and inspector.message == ""


def test_back_undoes_the_round_that_was_stepped(decoder):
    inspector = TreeInspector(decoder)
    first = inspector.step()
    inspector.step()
    click(inspector, "back")
    assert decoder.trace.steps == [first] and len(inspector.data["rounds"]) == 1


def test_a_finished_text_is_said_and_a_further_step_is_an_error_that_is_shown(decoder):
    inspector = TreeInspector(decoder)
    for _ in decoder.run():
        pass
    inspector.refresh()
    assert inspector.finished == "length"
    click(inspector, "step")
    assert "finished" in inspector.message and not inspector.busy
    click(inspector, "back")
    assert inspector.message == "" and inspector.finished == ""


def test_a_saved_trace_is_looked_at_but_not_decoded(pair):
    inspector = TreeInspector(make_trace(3))
    assert not inspector.live and inspector.round == 2
    with pytest.raises(RuntimeError, match="saved trace"):
        inspector.step()


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match="a Decoder or a Trace, not str"):
        TreeInspector("a trace")


def test_a_decoder_without_a_text_says_what_to_do(pair):
    with pytest.raises(RuntimeError, match="start"):
        TreeInspector(ddlab.Decoder(pair))


# ---- selecting ---------------------------------------------------------------------------------


def test_a_click_selects_a_node_for_python():
    trace = trace_of(small_step())
    inspector = TreeInspector(trace)
    inspector.set_state({"selection": {"round": 0, "node": 3}})  # as a message of the front end does
    label = tokens.show(13, trace.token_text)
    assert inspector.selected == Selected(round=0, node=3, token=13, label=label, path=(11, 13))


def test_the_targets_own_token_can_be_selected_too():
    inspector = TreeInspector(trace_of(small_step()))
    inspector.select(-1)
    assert (inspector.selected.token, inspector.selected.path) == (20, (11, 20))


def test_selections_can_be_followed():
    inspector, seen = TreeInspector(make_trace(2)), []
    inspector.observe(lambda change: seen.append(change["new"].node), "selected")
    inspector.select(2)
    inspector.select(3)
    assert seen == [2, 3]


@pytest.mark.parametrize("where", [{"round": 9, "node": 1}, {"round": 0, "node": 99}, {"round": 0}, {}])
def test_a_selection_of_nothing_is_none(where):
    inspector = TreeInspector(make_trace(2))
    inspector.select(1, 0)
    inspector.selection = where
    assert inspector.selected is None


# ---- another way -------------------------------------------------------------------------------


def branches(tree):
    """Every node as its tokens from the root."""
    return {tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(len(tree))}


def test_a_pruned_round_is_drafted_without_the_branch_and_marked(decoder):
    inspector = TreeInspector(decoder)
    inspector.step()
    old = inspector.step()
    node = old.path[1]
    gone = branches(old.tree)
    cut = tuple(old.tree.tokens[i] for i in old.tree.path(node)[1:])
    new = inspector.prune(node, 1)
    assert branches(new.tree) == {b for b in gone if b[: len(cut)] != cut}
    assert new.edited == ("tree",) and decoder.trace.rounds == 2 and inspector.round == 1
    assert new.path == (0,)  # the target still wants it, but it was not drafted


def test_a_forced_branch_is_all_that_is_drafted(decoder):
    inspector = TreeInspector(decoder)
    old = inspector.step()
    fork = next(i for i in range(len(old.tree)) if len(old.tree.children(i)) > 1)
    node = int(old.tree.children(fork)[1])
    way = tuple(old.tree.tokens[i] for i in old.tree.path(node)[1:])
    new = inspector.force(node, 0)
    kept = {b for b in branches(old.tree) if b[: len(way)] == way[: len(b)] or way[: len(b)] == b}
    assert branches(new.tree) == kept and new.edited == ("tree",)


def test_edits_change_the_draft_but_not_the_text(pair, decoder):
    plain = ddlab.generate(pair, PROMPT, method="ar", max_new_tokens=40)
    inspector = TreeInspector(decoder)
    while not decoder.finished:
        step = inspector.step()
        if len(step.path) > 1 and not decoder.finished:
            inspector.prune(step.path[1], step.index)
    assert decoder.output_ids == plain.output_ids


def test_an_edit_is_for_one_round(decoder):
    inspector = TreeInspector(decoder)
    step = inspector.step()
    inspector.prune(step.path[1], 0)
    assert inspector.step().edited == ()


def test_a_round_before_the_last_can_be_made_again(decoder):
    inspector = TreeInspector(decoder)
    steps = [inspector.step() for _ in range(3)]
    inspector.prune(1, 1)
    assert decoder.trace.steps[0] == steps[0] and decoder.trace.rounds == 2


def test_an_edit_defaults_to_what_is_selected(decoder):
    inspector = TreeInspector(decoder)
    step = inspector.step()
    with pytest.raises(ValueError, match="nothing is selected"):
        inspector.prune()
    inspector.select(len(step.tree) - 1, 0)
    assert len(inspector.prune().tree) == len(step.tree) - 1


@pytest.mark.parametrize(("node", "round", "said"), [(0, 0, "no draft"), (99, 0, "no draft"), (1, 5, "no round 5")])
def test_an_edit_of_nothing_is_refused_before_anything_is_undone(decoder, node, round, said):
    inspector = TreeInspector(decoder)
    inspector.step()
    with pytest.raises(ValueError, match=said):
        inspector.prune(node, round)
    assert decoder.trace.rounds == 1


def test_a_branch_is_found_by_its_tokens():
    tree = small_step().tree
    assert [find(tree, branch) for branch in ([], [11], [12], [11, 13], [12, 13], [9])] == [0, 1, 2, 3, None, None]


# ---- cells that are run again, interrupts, pages without a kernel --------------------------------


def test_a_cell_run_again_makes_one_round_a_click(decoder):
    for _ in range(3):
        inspector = TreeInspector(decoder)
    click(inspector, "step")
    assert decoder.trace.rounds == 1


def test_an_older_inspector_is_closed_and_says_so(decoder):
    older, newer = TreeInspector(decoder), TreeInspector(decoder)
    assert older.comm is None and newer.comm is not None
    click(older, "step")
    assert decoder.trace.rounds == 0
    with pytest.raises(RuntimeError, match="a newer one has its decoder"):
        older.step()


def test_closed_inspectors_are_not_kept(decoder):
    made = [weakref.ref(TreeInspector(decoder)) for _ in range(5)]
    gc.collect()
    assert [ref() is not None for ref in made] == [False] * 4 + [True]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_round_leaves_the_inspector_usable(decoder, error):
    inspector = TreeInspector(decoder)
    first = inspector.step()

    def stop(*_):
        raise error("stopped")

    with decoder.register_hook("verify", stop):
        click(inspector, "step")
    assert inspector.message and not inspector.busy
    assert decoder.trace.steps == [first] and len(inspector.data["rounds"]) == 1
    click(inspector, "step")
    assert inspector.message == "" and decoder.trace.rounds == 2


def test_a_hook_of_the_user_stays(decoder):
    seen = []
    decoder.register_hook("tree", lambda _, tree: seen.append(len(tree)))
    inspector = TreeInspector(decoder)
    inspector.step()
    inspector.prune(1, 0)
    assert len(seen) == 2


def test_an_unknown_message_does_nothing(decoder):
    inspector = TreeInspector(decoder)
    click(inspector, "rm -rf")
    assert decoder.trace.rounds == 0 and inspector.message == ""


def test_the_output_also_has_a_form_for_pages_without_a_kernel(decoder):
    inspector = TreeInspector(decoder)
    inspector.step()
    data, _ = inspector._repr_mimebundle_()
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == inspector.model_id
    assert data["text/html"] == views.rounds_view(decoder.trace, 0)._repr_mimebundle_()["text/html"]
    assert "accepted drafts per round" in data["text/plain"]


def test_an_exported_notebook_shows_the_inspector_without_a_kernel():
    nbconvert = pytest.importorskip("nbconvert")
    data, metadata = TreeInspector(make_trace(2))._repr_mimebundle_()
    output = nbformat.v4.new_output("display_data", data, metadata=metadata)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("inspector", outputs=[output])])
    page, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    (frame,) = re.findall(r'srcdoc="(.*?)"', page, re.DOTALL)
    assert html.unescape(frame) == views.rounds_view(make_trace(2), 1).document()


def test_a_repr_is_short(decoder):
    assert repr(TreeInspector(decoder)) == "TreeInspector on a decoder of 0 rounds"
