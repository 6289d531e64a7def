"""Jinja2 templates over the columns of a row: sandboxed, and never silent about what is missing."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import StrictUndefined, TemplateSyntaxError, meta
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specbatch.errors import InvalidRequest, UsageError

ROLES = ("system", "developer", "user", "assistant")
Message = dict[str, str]


class _NoText(Exception):
    """A value that must not slip into a prompt as Python prints it."""


def _printed(value: Any) -> Any:
    if value is None:
        raise _NoText("null")
    if isinstance(value, bytes):
        raise _NoText("bytes")
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, (dict, list, tuple)) else value


_environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=_printed, autoescape=False)
_conditions = ImmutableSandboxedEnvironment(undefined=StrictUndefined)


class Template:
    """A text with columns in it. Every column is a name in it, and `row` is the whole row, for columns that are no names."""

    def __init__(self, source: str, what: str) -> None:
        """`what` is what messages call it, for example --prompt. Raises UsageError for a syntax error."""
        self.source, self.what = source, what
        with _syntax_told(what):
            self._compiled = _environment.from_string(source)
            self._names = meta.find_undeclared_variables(_environment.parse(source))

    def render(self, values: Mapping[str, Any], place: str) -> str:
        """The text for one row. Raises InvalidRequest naming the column, and the row as `place` calls it."""
        try:
            return self._compiled.render({"row": values, **values})
        except Exception as failure:
            _explain(failure, self.what, self._names, values, place)


class Condition:
    """A Jinja2 expression that is true for the rows to keep."""

    def __init__(self, source: str, what: str = "--where") -> None:
        self.source, self.what = source, what
        with _syntax_told(what):
            self._compiled: Callable[..., Any] = _conditions.compile_expression(source, undefined_to_none=False)
            self._names = meta.find_undeclared_variables(_conditions.parse("{{" + source + "}}"))

    def holds(self, values: Mapping[str, Any], place: str) -> bool:
        """Raises InvalidRequest naming the column and the row."""
        try:
            return bool(self._compiled({"row": values, **values}))
        except Exception as failure:
            _explain(failure, self.what, self._names, values, place)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation whose messages are templates."""

    messages: Sequence[tuple[str, Template]]

    def render(self, values: Mapping[str, Any], place: str) -> list[Message]:
        return [{"role": role, "content": template.render(values, place)} for role, template in self.messages]

    def source(self) -> list[list[str]]:
        """What it was made from, for a hash."""
        return [[role, template.source] for role, template in self.messages]


def chat(prompt: str, system: str | None = None, what: str = "--prompt") -> Chat:
    """A chat of a template, or of a file of templates where it is written as @FILE: .json and .toml hold messages, others a text.

    Raises UsageError.
    """
    messages = _messages(prompt, what)
    if system is not None:
        if messages[0][0] == "system":
            raise UsageError(f"{what} has a system message of its own: leave --system out")
        messages.insert(0, ("system", Template(text(system, "--system"), "--system")))
    return Chat(tuple(messages))


def text(template: str, what: str) -> str:
    """The template's text: itself, or the content of the file that @FILE names. Raises UsageError."""
    if not template.startswith("@"):
        return template
    path = Path(template[1:])
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{what}: {path} is not text in UTF-8") from None
    except OSError as failure:
        raise UsageError(f"{what}: cannot read {path}: {failure.strerror}") from None


def _messages(prompt: str, what: str) -> list[tuple[str, Template]]:
    suffix = Path(prompt).suffix if prompt.startswith("@") else ""
    content = text(prompt, what)
    if suffix not in (".json", ".toml"):
        return [("user", Template(content, what))]
    try:
        parsed = tomllib.loads(content) if suffix == ".toml" else json.loads(content)
        listed = parsed["messages"] if isinstance(parsed, dict) else parsed
        pairs = [(message["role"], message["content"]) for message in listed]
    except (ValueError, KeyError, TypeError) as wrong:
        raise UsageError(f"{what}: {prompt[1:]} must hold messages, each with role and content: {wrong!r}") from None
    if not pairs or not all(role in ROLES and isinstance(content, str) for role, content in pairs):
        raise UsageError(f"{what}: {prompt[1:]} must hold messages whose role is one of {', '.join(ROLES)} and whose content is text")
    return [(role, Template(content, f"{what}, message {number}")) for number, (role, content) in enumerate(pairs, start=1)]


class _syntax_told:
    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, failure: BaseException | None, trace: object) -> None:
        if isinstance(failure, TemplateSyntaxError):
            raise UsageError(f"{self._what}, line {failure.lineno} of the template: {failure.message}") from None


def _explain(failure: Exception, what: str, names: set[str], values: Mapping[str, Any], place: str) -> NoReturn:
    known = ", ".join(values)
    if isinstance(failure, UndefinedError):
        missing = sorted(name for name in names if name not in values and name != "row")
        like = difflib.get_close_matches(missing[0], values, n=1) if missing else []
        hint = f"; did you mean {like[0]!r}" if like else ""
        named = f"there is no column {missing[0]!r}" if missing else str(failure.message)
        raise InvalidRequest(f"{place}: {what}: {named}{hint} (its columns: {known})", param=missing[0] if missing else None) from None
    if isinstance(failure, _NoText):
        kind = str(failure)
        wanted = type(None) if kind == "null" else bytes
        column = next((name for name in sorted(names) if isinstance(values.get(name, 0), wanted)), None)
        named = f"column {column!r} is {kind}" if column else f"a value is {kind}"
        advice = "write {{ column or '' }}, or leave such rows out with --where" if kind == "null" else "it has no form as text"
        raise InvalidRequest(f"{place}: {what}: {named}: {advice}", param=column) from None
    if isinstance(failure, SecurityError):
        raise UsageError(f"{what}: {str(failure).rstrip('.')}: templates are sandboxed") from None
    raise InvalidRequest(f"{place}: {what}: {type(failure).__name__}: {str(failure).rstrip('.')} (its columns: {known})") from None
