"""The note on Qwen3.6-27B, from the first cell to the last, on folders as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import nbformat
import pytest
from nbclient import NotebookClient
from safetensors.torch import save_file

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


@pytest.fixture(scope="module")
def published(tmp_path_factory: Any) -> tuple[Path, Path]:
    """Target: nested config, sharded, with a tokenizer that has a thinking part. Drafter: z-lab's names and fields."""
    folder = tmp_path_factory.mktemp("published")
    target, drafter = folder / "Qwen3.6-tiny", folder / "Qwen3.6-tiny-DFlash"
    models.target("vlm").save_pretrained(target, max_shard_size="200KB")
    models.tokenizer().save_pretrained(target)
    kinds = ("sliding_attention",) * 4 + ("full_attention",)
    config = models.drafter_config(models.target("vlm"), block=6, layer_types=kinds, window=16)
    config["auto_map"] = {"AutoModel": "dflash.DFlashDraftModel"}  # code that the folder does not hold
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(models.drafter_state(config), drafter / "model.safetensors")
    return target, drafter


def test_the_folders_are_of_the_published_formats(published: tuple[Path, Path]) -> None:
    target, drafter = published
    config = json.loads((target / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"] and config["text_config"]["layer_types"]
    assert len(list(target.glob("model-*-of-*.safetensors"))) > 1 and (target / "model.safetensors.index.json").exists()
    assert not list(drafter.glob("*.py"))


def test_the_note_runs_on_folders_as_they_are_published(
    published: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    for name, value in ({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | quiet).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOKS / "09_qwen36_27b_from_start_to_finish.ipynb", as_version=4)
    (parameters,) = (cell for cell in notebook.cells if cell.id == "parameters")
    assert parameters.source.startswith("TARGET = None") and "\nDRAFTER = None" in parameters.source
    target, drafter = map(str, published)
    parameters.source = (
        f"TARGET, DRAFTER = {target!r}, {drafter!r}\n"
        "REVISIONS = dict(revision=None, drafter_revision=None)\n"
        'DTYPE = "float32"'
    )
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOKS)}}
    )
    client.execute()  # raises what a cell raises
    said = {cell.id: "".join(map(_text, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"}
    assert "3 linear_attention, 1 full_attention" in said["load"]
    assert "{'linear_attention': 3, 'full_attention': 1}" in said["placed"]
    assert "exact" in said["audit"] and "NOT EXACT" not in said["audit"]
    assert "can decode exactly" in said["doctor"]
    assert "window 16" in said["masks"]


def _text(output: Any) -> str:
    return output.text if output.output_type == "stream" else output.data["text/plain"]
