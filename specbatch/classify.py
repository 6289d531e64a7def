"""A request's task type, read from the request itself: will the answer repeat its input, and in what form?

`code`: the answer is source. `json`: it is machine-readable. `extraction`: it repeats parts of the given text (pulling out, quoting,
correcting, answering from a passage). `summary`: it condenses a long text. `creative`: it is invented. `chat`: all else, also a question
about code, whose answer is prose. tests/data/labelled_requests.jsonl measures it; lexicon.py holds the words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbatch import lexicon
from specbatch.domain import TaskType
from specbatch.errors import UsageError

HEAD, TAIL = 320, 220  # characters read at each end of a text: demands stand there, and the middle is data
SUMMARY_SOURCE = 400  # characters: a summary of less leaves little to copy from, so it counts as chat
EXTRACTION_SOURCE = 80  # characters, instruction included: "extract a tooth" has nothing to extract from
GROUNDED_SOURCE = 200  # characters, before words of many uses ("list", "context") are taken to mean a given text
OBJECT_REACH = 12  # words after a verb in which its object is looked for
TURNS = 8  # messages that are read, the latest ones
_GUIDED = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_LEGAL = {task.value: task for task in TaskType}


@dataclass(frozen=True, slots=True)
class Classification:
    """A task type and what showed it, in words."""

    task: TaskType
    evidence: str


def parse_task(value: object) -> TaskType:
    """The task type that a user named for a batch. Raises UsageError listing the legal names."""
    task = _LEGAL.get(value.strip().lower()) if isinstance(value, str) else None
    if task is None:
        raise UsageError(f"unknown task type {value!r}: choose one of {', '.join(_LEGAL)}", param="task")
    return task


def classify(body: Mapping[str, Any], named: TaskType | None = None) -> Classification:
    """The task type of one OpenAI body (chat, completion, embedding, score; malformed ones too). Never raises.

    A line's own `metadata: {"x-task": ...}` wins over `named`, the batch's; both win over the text. An unknown x-task is ignored.
    """
    readable = isinstance(body, Mapping)
    metadata = body.get("metadata") if readable else None
    own = metadata.get("x-task") if isinstance(metadata, Mapping) else None
    if isinstance(own, str) and (task := _LEGAL.get(own.strip().lower())):
        return Classification(task, "named by the line's x-task")
    if named is not None:
        return Classification(named, "named for the batch")
    if not readable:
        return Classification(TaskType.CHAT, "the body is not an object")
    if constraint := _constraint(body):
        return Classification(TaskType.JSON, constraint)
    return _read(*_texts(body)) or Classification(TaskType.CHAT, "nothing points to another type")


def _constraint(body: Mapping[str, Any]) -> str | None:
    shape = body.get("response_format")
    if isinstance(shape, Mapping) and shape.get("type") in ("json_object", "json_schema", "structural_tag"):
        return f"response_format is {shape['type']}"
    for name in _GUIDED:
        if body.get(name):
            return f"{name} constrains the answer"
    for name, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        if body.get(name) and body.get(choice) != "none":
            return f"{name} are offered"
    return None


def _texts(body: Mapping[str, Any]) -> tuple[str, list[str], int]:
    """The system text, the user's two latest texts (latest first), and how many characters there are to copy from."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            prompt = next((part for part in prompt if isinstance(part, str)), None)
        return ("", [prompt], len(prompt)) if isinstance(prompt, str) else ("", [], 0)
    system, users, chars = "", list[str](), 0
    for message in reversed(messages[:1] + messages[1:][-TURNS:]):
        if not isinstance(message, Mapping):
            continue
        text, role = _content(message.get("content")), message.get("role")
        chars += len(text)
        if role in ("system", "developer"):
            system = text
        elif role == "user" and text and len(users) < 2:
            users.append(text)
    return system, users, chars


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(text for part in content if isinstance(part, Mapping) and isinstance(text := part.get("text"), str))


def _read(system: str, users: list[str], chars: int) -> Classification | None:
    """The user's latest words decide, unless the system prompt fixes the form; after them the system prompt, then the turn before."""
    rules = _Reading(system, chars) if system else None
    if rules and (rules.wants_machine_form() or rules.has_template()):
        return Classification(TaskType.JSON, "the system prompt asks for a machine-readable answer")
    if not users:
        return rules.intent() if rules else None
    latest = _Reading(users[0], chars)
    found = latest.intent()
    if found or latest.settled:
        return found
    if rules and (found := rules.intent(nouns=not latest.asks) or rules.persona(latest.asks)):
        return Classification(found.task, f"system prompt: {found.evidence}")
    if latest.asks or len(users) < 2 or len(users[0]) > HEAD:
        return None
    found = _Reading(users[1], chars).intent()
    return Classification(found.task, f"the turn before: {found.evidence}") if found else None


class _Reading:
    """One text's demand. `asks`: it is a question. `settled`: a verb showed that the answer is prose."""

    __slots__ = ("_code", "asks", "chars", "hits", "sample", "settled", "words")

    def __init__(self, text: str, chars: int) -> None:
        self.sample = text if len(text) <= HEAD + TAIL else f"{text[:HEAD]}\n{text[-TAIL:]}"
        self.chars = chars
        self.words: list[str] = lexicon.TOKEN.findall(self.sample.lower())
        role_of = lexicon.ROLES.get
        self.hits = [(place, role) for place, word in enumerate(self.words) if (role := role_of(word))]
        self.asks = (self.hits[:1] == [(0, "ask")]) or self.sample.rstrip().endswith("?")
        self.settled = False
        self._code: bool | None = None

    def intent(self, nouns: bool = True) -> Classification | None:
        """The first verb that demands something decides; without one, the nouns and the look of the text."""
        for place, role in self.hits:
            if role in lexicon.VERBS and self._demands(place) and (found := self._demand(place, role)):
                return found
        return self._by_nouns() if nouns and not self.settled else None

    def persona(self, asked: bool) -> Classification | None:
        """What a system prompt's nouns promise of the answers. An assistant for code still answers a question in prose."""
        if noun := self._first("invented", "imagine"):
            return Classification(TaskType.CREATIVE, f"“{noun}”")
        if not asked and (noun := self._first("code", "language")):
            return Classification(TaskType.CODE, f"“{noun}”")
        return None

    def wants_machine_form(self) -> bool:
        """ "as JSON", "into a YAML file", "return a JSON object": not merely a mention of a format."""
        for place, role in self.hits:
            if role == "machine":
                before = self.words[max(0, place - 4) : place]
                if not lexicon.INTO.isdisjoint(before) or any(lexicon.ROLES.get(word) == "make" for word in before):
                    return True
        return False

    def has_template(self) -> bool:
        return '"' in self.sample and lexicon.TEMPLATE.search(self.sample) is not None

    def _demands(self, place: int) -> bool:
        words = self.words
        if place == 0 or words[place - 1] in lexicon.BEFORE_DEMAND:
            return True
        if words[place] in lexicon.WISHES:
            return place < 4
        return place > 1 and (words[place - 2], words[place - 1]) in lexicon.PAIRS_BEFORE_DEMAND

    def _demand(self, place: int, role: str) -> Classification | None:
        verb = self.words[place]
        if role == "make":
            return self._made(place, verb)
        if role in ("edit", "convert", "translate"):
            return self._changed(place, verb, role)
        if role == "imagine":
            return Classification(TaskType.CREATIVE, f"“{verb}”")
        if role == "explain":
            self.settled = True
            return None
        task, least = (TaskType.SUMMARY, SUMMARY_SOURCE) if role == "summarise" else (TaskType.EXTRACTION, EXTRACTION_SOURCE)
        if role == "list":
            least = GROUNDED_SOURCE if self._first("given", "grounded") else self.chars + 1
        if self.wants_machine_form() or (role != "summarise" and self.has_template()):
            return Classification(TaskType.JSON, f"“{verb}” into a machine-readable form")
        if self.chars >= least:
            return Classification(task, f"“{verb}” with {self.chars:,} characters of text")
        self.settled = self.settled or role == "summarise"
        return None

    def _made(self, place: int, verb: str) -> Classification | None:
        for noun, role in self._objects(place):
            if role in ("code", "language") or (role == "unit" and self._is_source(verb, noun)):
                return Classification(TaskType.CODE, f"“{verb} … {noun}”")
            if role == "machine":
                return Classification(TaskType.JSON, f"“{verb} … {noun}”")
            if role == "invented":
                return Classification(TaskType.CREATIVE, f"“{verb} … {noun}”")
            if role == "gist" and self.chars >= SUMMARY_SOURCE:
                return Classification(TaskType.SUMMARY, f"“{verb} … {noun}” with {self.chars:,} characters of text")
            if role in ("gist", "message"):
                self.settled = True
                return None
        if self.looks_like_code() and not (self.asks or self.settled) and verb not in ("answer", "tell", "respond", "reply"):
            return Classification(TaskType.CODE, f"“{verb}” and code in the text")
        return None

    def _changed(self, place: int, verb: str, role: str) -> Classification | None:
        objects = self._objects(place)
        forms = [(noun, kind) for noun, kind in objects if kind in ("code", "language", "machine")]
        if forms:  # what is converted stands before what it becomes; what is edited stays what it is
            noun, kind = forms[-1 if role == "convert" else 0]
            return Classification(TaskType.JSON if kind == "machine" else TaskType.CODE, f"“{verb} … {noun}”")
        if any(kind == "language_use" for _, kind in objects):
            return Classification(TaskType.EXTRACTION, f"“{verb}” of the wording: most of the text returns unchanged")
        if self.looks_like_code():
            return Classification(TaskType.CODE, f"“{verb}” and code in the text")
        if role != "translate" and self.wants_machine_form():
            return Classification(TaskType.JSON, f"“{verb}” into a machine-readable form")
        least = EXTRACTION_SOURCE if self._first("given") else GROUNDED_SOURCE
        if role == "edit" and verb not in lexicon.REWORDS and self.chars >= least:
            return Classification(TaskType.EXTRACTION, f"“{verb}” in {self.chars:,} characters of text")
        self.settled = self.settled or role == "translate"
        return None

    def _by_nouns(self) -> Classification | None:
        if self.chars >= SUMMARY_SOURCE and (self._first("gist") or lexicon.GIST.search(self.sample)):
            return Classification(TaskType.SUMMARY, f"a summary of {self.chars:,} characters")
        if self.chars >= GROUNDED_SOURCE and (self._first("grounded") or lexicon.GROUNDED.search(self.sample)) and "?" in self.words:
            return Classification(TaskType.EXTRACTION, f"a question about the {self.chars:,} characters given")
        if self.asks:
            return None
        if self.wants_machine_form() or (self._first("fields") and self.has_template()):
            return Classification(TaskType.JSON, "a machine-readable form")
        if self.looks_like_code():
            return Classification(TaskType.CODE, "the text looks like code")
        if sum(role in ("code", "language") for _, role in self.hits) > 1:
            return Classification(TaskType.CODE, "names of programming languages")
        if lexicon.OPENING.match(self.sample):
            return Classification(TaskType.CREATIVE, "a story's opening")
        return None

    def _is_source(self, verb: str, noun: str) -> bool:
        """A class, a test or a program is code beside code, or where one is written: people also teach classes and sit tests."""
        return (noun.startswith("program") and verb in lexicon.WRITES) or bool(self._first("language")) or self.looks_like_code()

    def looks_like_code(self) -> bool:
        if self._code is None:
            lines = lexicon.CODE_LINE.findall(self.sample)
            self._code = "```" in self.sample or any(lines) or len(lines) > 1
        return self._code

    def _first(self, *roles: str) -> str | None:
        return next((self.words[place] for place, role in self.hits if role in roles), None)

    def _objects(self, place: int) -> list[tuple[str, str]]:
        """The nouns after a verb, in its clause."""
        words, found = self.words, list[tuple[str, str]]()
        for word in words[place + 1 : place + 1 + OBJECT_REACH]:
            if word in lexicon.CLAUSE_END:
                break
            if role := lexicon.ROLES.get(word):
                found.append((word, role))
        return found
