"""Requests to measure with: as many as are wanted, the same on every machine that runs the same Python, without downloads.

Code comes from Python's own standard library, records and letters are made up, chat prompts are templates in data/chat_prompts.txt.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from specbatch.domain import TaskType
from specbatch.errors import UsageError

Body = dict[str, Any]
MAX_TOKENS = 128
FUNCTION_CHARACTERS = (200, 900)
DOCUMENT_CHARACTERS = (900, 2_400)
ALTERNATIVES = re.compile(r"\[([^\[\]]+)\]")

FIRST_NAMES = (
    "Ana",
    "Bruno",
    "Chidi",
    "Dalia",
    "Emeka",
    "Freya",
    "Goran",
    "Hana",
    "Ivo",
    "Jun",
    "Kofi",
    "Leila",
    "Marek",
    "Nadia",
    "Omar",
    "Priya",
)
LAST_NAMES = (
    "Almeida",
    "Berg",
    "Castillo",
    "Dogan",
    "Eriksen",
    "Farouk",
    "Garcia",
    "Horvat",
    "Ito",
    "Jansen",
    "Kowalski",
    "Lindgren",
    "Mensah",
)
CITIES = ("Lisbon", "Oslo", "Accra", "Osaka", "Quito", "Zagreb", "Cairo", "Leeds", "Hanoi", "Lima", "Turin", "Dakar")
TRADES = ("nurse", "welder", "teacher", "pilot", "baker", "surveyor", "cellist", "farmer", "printer", "chemist")
CODE_WISHES = (
    "Add type hints to this Python function. Return the whole function.",
    "Add a docstring to this Python function. Return the whole function.",
    "Rename the first parameter of this Python function to `value`. Return the whole function.",
)
STORIES = (
    "Write [a short story|a poem|the opening of a novel|a fable|a dialogue] about [a lighthouse keeper|a lost letter|two rival bakers"
    "|a tired robot|the last train|a garden on Mars|a talking river|an honest thief] set in [a small port|a desert town|the far future"
    "|a snowed-in hotel|an old library|a floating market]. Make it [funny|gentle|dark|surprising|hopeful]."
)


def requests(task: TaskType, start: int = 0, *, max_tokens: int = MAX_TOKENS) -> Iterator[Body]:
    """Bodies for /v1/chat/completions, greedy, without end; `start` skips so many. Code, JSON and chat repeat nothing for
    two thousand or more, summaries after a hundred or two.

    Raises UsageError where Python's standard library has no source.
    """
    write = _WRITERS[task]
    number = start
    while True:
        yield {
            "model": "default",
            "messages": [{"role": "user", "content": write(number)}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        number += 1


def _code(number: int) -> str:
    functions = _functions()
    wish = CODE_WISHES[(number + number // len(functions)) % len(CODE_WISHES)]
    return f"{wish}\n\n```python\n{functions[number % len(functions)]}\n```"


def _json(number: int) -> str:
    draw = random.Random(f"json {number}")
    listed = "\n".join(f"- {_person(draw)}" for _ in range(draw.randint(4, 6)))
    return f"Convert this list to a JSON array of objects with the keys name, age, job and city. Answer with JSON only.\n\n{listed}"


def _extraction(number: int) -> str:
    draw = random.Random(f"extraction {number}")
    letters = " ".join(_letter(draw) for _ in range(draw.randint(4, 6)))
    return f"Extract every sentence that names a price above 300 euros from the text below. Quote the sentences in full.\n\n{letters}"


def _summary(number: int) -> str:
    documents = _documents()
    return f"Summarize the following documentation in four sentences, using its own terms.\n\n{documents[number % len(documents)]}"


def _chat(number: int) -> str:
    templates = _templates()
    draw = random.Random(f"chat {number}")
    return (
        f"{_fill(templates[number % len(templates)], draw)} I am {draw.randint(18, 80)}, a {draw.choice(TRADES)} in {draw.choice(CITIES)}."
    )


def _creative(number: int) -> str:
    return _fill(STORIES, random.Random(f"creative {number}"))


_WRITERS: dict[TaskType, Callable[[int], str]] = {
    TaskType.CODE: _code,
    TaskType.JSON: _json,
    TaskType.EXTRACTION: _extraction,
    TaskType.SUMMARY: _summary,
    TaskType.CHAT: _chat,
    TaskType.CREATIVE: _creative,
}


def _name(draw: random.Random) -> str:
    return f"{draw.choice(FIRST_NAMES)} {draw.choice(LAST_NAMES)}"


def _person(draw: random.Random) -> str:
    return f"{_name(draw)}, {draw.randint(18, 80)} years old, {draw.choice(TRADES)}, lives in {draw.choice(CITIES)}"


def _letter(draw: random.Random) -> str:
    day = f"{draw.randint(1, 28)} {draw.choice(('March', 'June', 'October'))}"
    thing = draw.choice(("repair", "order", "journey", "course"))
    writer = f"{_name(draw)}, a {draw.choice(TRADES)} from {draw.choice(CITIES)}"
    return f"{writer}, wrote on {day} that the {thing} would cost {draw.randint(20, 900)} euros."


def _fill(template: str, draw: random.Random) -> str:
    return ALTERNATIVES.sub(lambda found: draw.choice(found[1].split("|")), template)


@cache
def _templates() -> list[str]:
    text = resources.files("specbatch").joinpath("data", "chat_prompts.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line]


@cache
def _functions() -> list[str]:
    """Shuffled, so that neighbours do not come from one module."""
    shortest, longest = FUNCTION_CHARACTERS
    found = []
    for source, tree in _library():
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                if shortest <= len(text) <= longest:
                    found.append(text)
    return _shuffled(found)


@cache
def _documents() -> list[str]:
    shortest, longest = DOCUMENT_CHARACTERS
    found = []
    for _, tree in _library():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= shortest:
                    found.append(text[:longest])
    return _shuffled(found)


def _library() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="replace")
        yield source, ast.parse(source)


def _shuffled(texts: list[str]) -> list[str]:
    if not texts:
        raise UsageError(f"no source of Python's standard library in {sysconfig.get_path('stdlib')}: leave out the tasks code and summary")
    texts = sorted(set(texts))
    random.Random(0).shuffle(texts)
    return texts
