"""The notebooks: committed as source, each runs by itself in time, and its page needs no network."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = 120  # for a whole notebook, on two cores that others use too

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


class Page(HTMLParser):
    """What a page shows in frames, and what a browser would fetch for it."""

    def __init__(self, source: str):
        super().__init__()
        self.frames: list[str] = []
        self.fetched = re.findall(r"""url\(\s*["']?(?:https?:)?//|@import|\bimport\(|\bfetch\(""", source)
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "srcdoc":
                self.frames.append(value or "")
            followed = tag == "a"  # by a reader, not by the browser
            if name in ("src", "href", "data", "poster") and not followed and not (value or "").startswith("data:"):
                self.fetched.append(f"<{tag} {name}={value}>")


def test_there_is_a_notebook_for_each_question() -> None:
    questions = {
        1: "first_rounds",
        2: "walking_one_tree",
        3: "was_it_the_drafter",
        4: "acceptance",
        5: "a_round_edited_by_hand",
        6: "your_own_pair",
        7: "which_budget",
        8: "sdpa_or_flash",
        9: "qwen36_27b_from_start_to_finish",
    }
    assert [path.stem for path in NOTEBOOKS] == [f"{number:02}_{name}" for number, name in sorted(questions.items())]


@each_notebook
def test_a_notebook_is_committed_as_source(path: Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)  # cells have ids, each its own
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    for cell in notebook.cells:
        assert not cell.metadata
        assert cell.source == cell.source.strip() != ""
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
    assert not re.search(r"(?<![\w.])/(?:home|root|work|tmp|Users|content)/", path.read_text(encoding="utf-8"))


@each_notebook
def test_a_notebook_reads_like_a_lab_note(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].cell_type == cells[-1].cell_type == "markdown"
    assert re.match(r"# .+\n\n\*\*Question\.\*\* ", cells[0].source)
    assert "**Answer.**" in cells[-1].source
    assert not any("$" in cell.source for cell in cells if cell.cell_type == "markdown")  # mathematics is a script's


@each_notebook
def test_a_notebook_runs_in_time_and_its_page_shows_every_output_offline(
    path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    for name, value in ({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | quiet).items():
        monkeypatch.setenv(name, value)  # as `make notebooks` does
    notebook = nbformat.read(path, as_version=4)
    started = time.monotonic()
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": FOLDER}})
    client.execute()  # raises what a cell raises
    assert time.monotonic() - started < SECONDS

    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    rich = [output.data for output in outputs if "data" in output]
    assert all({"text/plain", "text/html"} & set(data) for data in rich)
    assert not any("widget" in kind for data in rich for kind in data)  # blank in a page
    views = [frame for data in rich for frame in Page(data.get("text/html", "")).frames]
    assert views

    exporter = HTMLExporter(template_name="offline_html", extra_template_basedirs=[str(FOLDER)])
    source = exporter.from_notebook_node(notebook)[0]
    page = Page(source)
    assert page.frames == views
    assert not page.fetched
    assert not [fetched for view in views for fetched in Page(view).fetched]
    assert not request.getfixturevalue("cut_off")(source, 1180)


def test_make_notebooks_exports_with_the_template_that_needs_no_network() -> None:
    makefile = (FOLDER.parent / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.split("\nnotebooks:")[1].split("\n\n")[0]
    assert "--execute" in recipe and "--template offline_html" in recipe
    assert "--TemplateExporter.extra_template_basedirs=notebooks" in recipe
