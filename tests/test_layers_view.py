"""The view of a comparison: the same in text, without a script, and as a panel to walk in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import faulty
import numpy as np
import pytest
from test_compare import compare, pair_of, trace_of

import ddlab
from ddlab.comparing.comparison import Comparison
from ddlab.comparing.rows import FLATTENED, tree_rows
from ddlab.views import layers_figure, layers_view
from ddlab.views.layers import spans
from ddlab.views.layers_data import EDGE, ROWS, panel_data

HOSTILE = '</script><img src=x onerror="alert(1)">‮&'


@cache
def verify() -> Comparison:
    with faulty.registered("as_chain"):
        return compare("hybrid", ["eager", "sdpa", "as_chain", "flattened", "chunk"], "verify", repeats=1)


@cache
def prefill() -> Comparison:
    with faulty.registered("no_window"):
        return ddlab.compare(pair_of("swa"), [5, 9, 33, 2] * 40, ["eager", "no_window"], repeats=0)


def test_the_text_says_what_it_counts_and_who_is_wrong_where() -> None:
    text = layers_view(verify()).text
    assert text.startswith("verify: 3 rounds, ")
    assert re.search(r"^ +3  F full attention +rounding \S+ +rounding \S+ +WRONG \S+ +=$", text, re.MULTILINE)
    assert re.search(r"^ +0  L linear attention +rounding \S+ +=  +=  +WRONG \S+$", text, re.MULTILINE)
    assert "WRONG  as_chain, layer 3: the rows are read as a chain, each sees all before it" in text
    assert f"WRONG  flattened, layers 0-2: {FLATTENED}" in text
    assert "refused chunk: the chunk form reads its rows as one chain" in text
    assert "τ: on 3 rounds, each from the recorded text, fewer than 30: too few to rest on." in text
    assert "WRONG: " in text and "median of 1 run in turn" in text


@pytest.mark.parametrize(
    ("layers", "said"), [([3], "layer 3"), ([0, 1, 2, 5], "layers 0-2, 5"), ([1, 3], "layers 1, 3")]
)
def test_layers_are_named_in_spans(layers: list[int], said: str) -> None:
    assert spans(layers) == said


def test_without_a_script_there_is_a_picture_whose_marks_are_no_colours() -> None:
    html = layers_view(verify()).html
    assert html.count("✕") == 4 + 1  # three linear layers, one full one, the legend
    assert html.count("<svg") == 1 and 'role="img"' in html and "<script" not in html and "style=" not in html
    assert "In the end" in html and "path replay" in html


def test_token_text_cannot_leave_its_place() -> None:
    labels = dict.fromkeys(verify().labels, HOSTILE)
    page = layers_view(replace(verify(), labels=labels, pair=HOSTILE)).document()
    assert "<img" not in page and page.count("</script>") == 2  # the data's and the panel's own


def test_the_panel_gets_the_rows_and_masks_of_the_worst_call() -> None:
    found = verify()
    data = panel_data(found)
    chain = next(b for b in data["backends"] if b["name"] == "as_chain")["layers"]["3"]
    assert (chain["verdict"], chain["of"]) == ("wrong", len(found.calls[chain["call"]]["parents"]))
    assert max(chain["nodes"]["error"]) == pytest.approx(found["as_chain"].layers[3].error, rel=1e-2)
    mask, faulty_mask = data["masks"][chain["mask"]], data["masks"][chain["faulty"]]
    step = trace_of("hybrid").steps[found.calls[chain["call"]]["round"]]
    seen = tree_rows(step.tree, step.start).seen("full_attention", None)[:, step.start :]
    assert [np.flatnonzero(row).tolist() for row in seen] == mask["seen"]
    assert all(faulty_mask["seen"][row] == list(range(row + 1)) for row in range(mask["rows"]))
    assert mask["spans"] == [[0, step.start]] * mask["rows"] and mask["before"] == step.start
    assert all(b["layers"] == {} for b in data["backends"] if b["status"] != "ok")


def test_a_long_prompt_is_cut_to_what_can_be_read_and_says_so() -> None:
    data = panel_data(prefill())
    layer = next(b for b in data["backends"] if b["name"] == "no_window")["layers"]["0"]
    assert len(layer["rows"]) == ROWS and layer["of"] == 160 and layer["rows"] == sorted(layer["rows"])
    mask = data["masks"][layer["mask"]]
    assert (mask["rows"], mask["left"], mask["before"]) == (EDGE, 160 - EDGE, 160 - EDGE)
    assert mask["spans"][0] == [160 - EDGE - 7, 160 - EDGE] and mask["spans"][-1] == [0, 0]  # a window of 8
    assert data["masks"][layer["faulty"]]["spans"][-1] == [0, 160 - EDGE]


def test_plotly_draws_layers_by_metrics() -> None:
    pytest.importorskip("plotly")
    drawn = layers_figure(verify())
    maps = [trace for trace in drawn.data if trace.type == "heatmap"]
    assert len(maps) == 4 and len(maps[0].x) == 4 and list(maps[0].y)[-1] == "error"
    assert maps[2].z[-1][3] == pytest.approx(np.log10(verify()["as_chain"].layers[3].error))


def test_a_report_carries_comparisons_and_the_doctors_table(tmp_path: Path) -> None:
    findings = ddlab.doctor(pair_of("swa"), ["eager"], repeats=0)
    path = ddlab.report(trace_of("hybrid"), tmp_path / "r.html", views=[verify().view(), findings.view()])
    page = path.read_text("utf-8")
    assert "verify, layer by layer" in page and page.count('data-layers="view0"') == 1
    assert "can decode exactly on this machine" in page


@pytest.fixture
def open_page(tmp_path: Path, look: object) -> Iterator[object]:
    path = tmp_path / "layers.html"
    path.write_text(layers_view(verify()).document(), "utf-8")
    yield lambda **context: look(path, **context).page  # type: ignore[operator]


def test_the_panel_opens_at_what_is_wrong_and_is_walked_with_keys(open_page: object) -> None:
    page = open_page()  # type: ignore[operator]
    assert page.locator("td.wrong").count() == 4 and page.locator("td.none").count() == 7
    assert page.locator(".chosen h4").inner_text() == "as_chain, layer 3: full attention"
    assert "each sees all before it" in page.locator(".chosen .bad").first.inner_text()
    assert page.locator(".chosen canvas").count() == 2
    page.locator("td.here").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Home")
    assert page.locator(".chosen h4").inner_text() == "flattened, layer 0: linear attention"
    page.keyboard.press("ArrowUp")
    assert "Not computed by this backend" in page.locator(".chosen").inner_text()
    assert page.locator("td[tabindex='0']").count() == 1


def test_the_panel_shows_any_figure_and_its_cells_say_it_in_words(open_page: object) -> None:
    page = open_page(color_scheme="dark")  # type: ignore[operator]
    page.select_option("select", "free_rms")
    texts = page.locator("tbody tr").first.locator("td").all_inner_texts()
    assert texts == ["0", "0", "0", "0"]  # the first backend against itself
    page.select_option("select", "seconds")
    assert page.locator("table.heat tbody tr").first.locator("td").first.inner_text() == "1.0"
    label = page.locator("table.heat td").last.get_attribute("aria-label")
    assert label is not None and label.startswith("flattened, layer 3, full attention: same")


def test_pointing_at_a_row_lights_it_in_the_masks(open_page: object) -> None:
    page = open_page()  # type: ignore[operator]
    before = page.evaluate("document.querySelector('.chosen canvas').toDataURL()")
    page.locator(".nodes tbody tr").nth(2).hover()
    assert page.evaluate("document.querySelector('.chosen canvas').toDataURL()") != before
