"""The package as it is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ddlab


def in_a_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_ddlab_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, ddlab; print([m for m in ('torch', 'transformers', 'pandas', 'plotly') if m in sys.modules])"
    assert in_a_new_process(code) == "[]"


@pytest.mark.parametrize("name", ddlab.__all__)
def test_every_promised_name_is_there(name: str) -> None:
    assert callable(getattr(ddlab, name)) and name in dir(ddlab)


@pytest.mark.parametrize("name", ["audit", "compare", "doctor", "replay", "report", "sweep"])
def test_a_function_stays_one_when_its_module_is_imported_first(name: str) -> None:
    code = f"import ddlab.{name}; from ddlab.{name} import {name} as own; print(ddlab.{name} is own)"
    assert in_a_new_process(code) == "True"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"it offers .*Decoder"):
        _ = ddlab.Decodr
