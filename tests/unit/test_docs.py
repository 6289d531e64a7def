"""What the words for people say about the code is still there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specbatch.cli import app
from specbatch.settings import Settings

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_readme_lists_every_setting_and_its_default() -> None:
    """When this fails, change the table under "Settings" in README.md."""
    table = dict(re.findall(r"^\| `SPECBATCH_(\w+)` \| (.*?) \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert table == {name.upper(): shown(field.get_default()) for name, field in Settings.model_fields.items()}


def shown(default: object) -> str:
    if default in (None, (), ""):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:api|benchmarks|docs|examples|migrations|specbatch|tests|worker)/[\w./-]+)`", page.read_text())
    linked = re.findall(r"\]\(((?!http)[^)#]+)\)", page.read_text())
    assert not [name for name in named if not (ROOT / name).exists() and name != "specbatch/_migrations"]  # that one is in the wheel
    assert not [link for link in linked if not (page.parent / link).exists()]


def test_commands_that_are_named_exist() -> None:
    known = {command.name or (command.callback and command.callback.__name__) for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    for page in PAGES:
        named = set(re.findall(r"^\s+specbatch (\w+)|`specbatch (\w+)", page.read_text(), flags=re.MULTILINE))
        assert {first or second for first, second in named} <= known, page


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "adr").glob("*.md")), ids=lambda page: page.stem)
def test_a_record_is_one_page(page: Path) -> None:
    text = page.read_text()
    number = int(page.name.partition("-")[0])
    assert text.startswith(f"# {number}. ")
    assert all(f"**{part}.**" in text for part in ("Context", "Decision", "Consequences"))
    assert len(text.split()) < 600
