"""The project's own files: one list of dependencies, one of versions, and what README and wheel promise."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import ddlab

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
GROUPS: dict[str, list[str | dict[str, str]]] = PYPROJECT["dependency-groups"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
CONSTRAINTS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
EMBEDDED = ROOT / "data" / "tiny-hybrid"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def declared() -> list[Requirement]:
    """Every requirement of pyproject.toml: runtime, extras, groups, and the build backend."""
    lines = [*PROJECT["dependencies"], *PYPROJECT["build-system"]["requires"]]
    for extra in EXTRAS.values():
        lines += extra
    for group in GROUPS.values():
        lines += [line for line in group if isinstance(line, str)]
    return [Requirement(line) for line in lines if not line.startswith("ddlab[")]


def conda_requirements() -> dict[str, SpecifierSet]:
    plain = [Requirement(line) for line in ENVIRONMENT["dependencies"] if isinstance(line, str)]
    return {canonicalize_name(r.name): r.specifier for r in plain}


def conda_pip_lines() -> list[str]:
    (pip,) = [entry["pip"] for entry in ENVIRONMENT["dependencies"] if isinstance(entry, dict)]
    return pip


# -- versions ------------------------------------------------------------------------------------------------


def test_the_installed_version_is_the_one_in_pyproject() -> None:
    assert ddlab.__version__ == version("ddlab") == PROJECT["version"]


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_constraints_pin_every_declared_dependency_to_a_version_it_allows(requirement: Requirement) -> None:
    pins = [c for c in CONSTRAINTS if canonicalize_name(c.name) == canonicalize_name(requirement.name)]
    assert len(pins) == 1, f"constraints.txt must name {requirement.name} exactly once"
    (pin,) = pins[0].specifier
    assert pin.version in requirement.specifier


def test_constraints_are_exact_public_versions_in_order_and_once_each() -> None:
    names = [c.name for c in CONSTRAINTS]
    assert names == sorted(names, key=str.lower)
    assert len({canonicalize_name(n) for n in names}) == len(names)
    for constraint in CONSTRAINTS:
        (pin,) = constraint.specifier
        assert pin.operator == "=="
        assert "+" not in pin.version, f"{constraint}: a local version such as +cpu exists on one index only"
        assert constraint.url is None


def test_what_the_package_imports_is_declared() -> None:
    runtime = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    optional = {canonicalize_name(Requirement(x).name) for lines in EXTRAS.values() for x in lines}
    known = set(map(canonicalize_name, sys.stdlib_module_names)) | runtime | optional | {"ddlab"}
    for path in (ROOT / "ddlab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            for module in modules:
                assert canonicalize_name(module.split(".")[0]) in known, f"{path.name}: {module}"


# -- conda ---------------------------------------------------------------------------------------------------


def test_environment_is_named_after_the_project_and_takes_only_conda_forge() -> None:
    assert ENVIRONMENT["name"] == PROJECT["name"]
    assert ENVIRONMENT["channels"] == ["conda-forge", "nodefaults"]


def test_environment_has_the_python_range_of_pyproject() -> None:
    assert conda_requirements()["python"] == SpecifierSet(PROJECT["requires-python"])


def test_environment_has_pip_and_the_graphviz_programs_from_conda() -> None:
    assert {"python", "pip", "graphviz"} <= set(conda_requirements())


def test_environment_takes_the_python_packages_from_pyproject_and_lists_none_again() -> None:
    editable = [line for line in conda_pip_lines() if line.startswith("-e ")]
    assert len(editable) == 1
    path, _, extras = editable[0].removeprefix("-e ").partition("[")
    assert path == "."
    assert set(filter(None, extras.rstrip("]").split(","))) <= set(EXTRAS)
    assert set(conda_pip_lines()) == {"-c constraints.txt", *editable}
    # `graphviz` is the program on conda-forge and the binding on PyPI; nothing else may stand in both lists
    both = set(conda_requirements()) & {canonicalize_name(r.name) for r in declared()}
    assert both <= {"graphviz"}


# -- data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_the_embedded_pair_has_weights_and_a_configuration(part: str) -> None:
    assert json.loads((EMBEDDED / part / "config.json").read_text(encoding="utf-8"))["architectures"]
    weights = EMBEDDED / part / "model.safetensors"
    assert 1_000_000 < weights.stat().st_size < 50_000_000  # weights, not a pointer to them, and small enough for git


def test_data_stays_small_enough_to_clone() -> None:
    assert sum(p.stat().st_size for p in (ROOT / "data").rglob("*") if p.is_file()) <= 85_000_000


def test_the_figures_in_the_readmes_are_those_of_the_embedded_weights() -> None:
    figures = json.loads((EMBEDDED / "eval.json").read_text(encoding="utf-8"))["summary"]
    data = (ROOT / "data" / "README.md").read_text(encoding="utf-8")

    def row(kind: str) -> str:
        values = [figures[kind][method] for method in ("chain", "tree 16", "tree 64")]
        tau = "{tau:.2f} [{interval[0]:.2f}, {interval[1]:.2f}] ({rounds})"
        return " | ".join(tau.format(**v) for v in values)

    assert row("all") in README
    for kind in figures:
        assert f"| {kind} | {figures[kind]['prompts']} | {row(kind)} |" in data


# -- notebooks and README ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebooks_are_committed_without_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert "widgets" not in notebook["metadata"]
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), "clear the outputs before committing"
        assert cell.get("execution_count") is None


def test_every_make_command_in_the_readme_is_a_target() -> None:
    commands = set(re.findall(r"(?:^|`)make ([a-z]+)", README, flags=re.MULTILINE))
    assert {"report", "test", "lab"} <= commands
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    assert commands <= targets


def test_every_file_the_readme_links_to_exists() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_the_first_python_example_of_the_readme_runs(tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    run = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


# -- what gets installed -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the checkout; nothing is fetched."""
    work = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(work)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (path,) = work.glob("*.whl")
    return path


def test_an_sdist_holds_all_that_the_wheel_is_made_of() -> None:
    sources, parts = (
        {Path(f.path).relative_to(ROOT) for f in builder(str(ROOT)).recurse_included_files()}
        for builder in (SdistBuilder, WheelBuilder)
    )
    assert parts <= sources


def test_the_wheel_carries_the_package_its_types_and_the_embedded_pair(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    package = [p.relative_to(ROOT) for p in (ROOT / "ddlab").rglob("*") if p.is_file()]
    assert {p.as_posix() for p in package if "__pycache__" not in p.parts} <= set(sizes)
    assert "ddlab/py.typed" in sizes
    for path in EMBEDDED.rglob("*"):
        if path.is_file():
            assert sizes[f"ddlab/_data/tiny-hybrid/{path.relative_to(EMBEDDED).as_posix()}"] == path.stat().st_size


def test_the_wheel_carries_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops == {"ddlab", f"ddlab-{PROJECT['version']}.dist-info"}


def test_the_installed_wheel_loads_its_own_pair_in_another_folder(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")  # what pip does with a pure wheel, without a new environment
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import ddlab, ddlab.pair\n"
        "print(ddlab.__file__); print(ddlab.pair.embedded_folder('tiny-hybrid')); print(ddlab.load_pair())"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    package, folder, _ = run.stdout.splitlines()
    assert Path(package).is_relative_to(tmp_path / "site")
    assert Path(folder).is_relative_to(tmp_path / "site")
