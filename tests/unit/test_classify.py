"""The task type of a request: each rule, and how often the rules are right on tests/data/labelled_requests.jsonl.

The labels say what the answer will be like, not what the request is about: a question about code is chat. The held-out part was
written before the classifier and is not tuned on; both parts come from one author, so another author's requests will score lower.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch.classify import Classification, classify, parse_task
from specbatch.domain import TaskType
from specbatch.errors import UsageError

LABELLED = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data" / "labelled_requests.jsonl").read_text("utf-8").split("\n") if line
]
# Least (precision, recall) on the held-out part, a row or two below what is reached.
FLOORS = {
    TaskType.CODE: (0.95, 0.9),
    TaskType.JSON: (0.95, 0.95),
    TaskType.EXTRACTION: (0.87, 0.87),
    TaskType.SUMMARY: (0.93, 0.93),
    TaskType.CHAT: (0.9, 0.96),
    TaskType.CREATIVE: (0.93, 0.87),
}
ARTICLE = "The council voted on Tuesday to convert the old grain terminal into a market. " * 8


def chat(text: object, system: str | None = None, **body: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    return {"model": "m", "messages": [*messages, {"role": "user", "content": text}], **body}


def confusion(split: str) -> Counter[tuple[TaskType, TaskType]]:
    return Counter((TaskType(row["task"]), classify(row["body"]).task) for row in LABELLED if row["split"] == split)


def precision_and_recall(counts: Counter[tuple[TaskType, TaskType]], task: TaskType) -> tuple[float, float]:
    right = counts[task, task]
    return right / max(1, sum(counts[other, task] for other in TaskType)), right / max(1, sum(counts[task, other] for other in TaskType))


@pytest.mark.parametrize("split", ["dev", "held_out"])
def test_precision_and_recall_by_type(split: str) -> None:
    counts = confusion(split)
    print(f"\n{split}: labelled (down), classified (across)\n{'':11}" + "".join(f"{task:>11}" for task in TaskType))
    for task in TaskType:
        print(f"{task:11}" + "".join(f"{counts[task, other]:11}" for other in TaskType))
    for task, (precision, recall) in FLOORS.items():
        reached = precision_and_recall(counts, task)
        assert reached >= (precision, 0), f"{task}: precision {reached[0]:.2f} is under {precision}"
        assert reached[1] >= recall, f"{task}: recall {reached[1]:.2f} is under {recall}"


def test_the_labelled_requests_are_many_and_varied() -> None:
    assert len(LABELLED) >= 200
    assert sum(row["split"] == "held_out" for row in LABELLED) >= 80
    for split in ("dev", "held_out"):
        assert min(Counter(row["task"] for row in LABELLED if row["split"] == split).values()) >= 15
    bodies = [json.dumps(row["body"], sort_keys=True) for row in LABELLED]
    assert len(set(bodies)) == len(bodies)


def test_a_line_names_its_task_over_the_batch_and_the_text() -> None:
    body = chat("Write a poem.", metadata={"x-task": " JSON "})
    assert classify(body, named=TaskType.CODE) == Classification(TaskType.JSON, "named by the line's x-task")
    assert classify(chat("Write a poem."), named=TaskType.CODE) == Classification(TaskType.CODE, "named for the batch")


@pytest.mark.parametrize("value", ["poetry", "", 7, None, ["code"], {"task": "code"}])
def test_an_unknown_x_task_is_ignored(value: object) -> None:
    assert classify(chat("Write a poem.", metadata={"x-task": value})).task is TaskType.CREATIVE


@pytest.mark.parametrize(
    ("constraint", "named"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format is json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format is json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format is structural_tag"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "guided_choice"),
        ({"guided_grammar": "root ::= 'a'"}, "guided_grammar"),
        ({"tools": [{"type": "function"}]}, "tools are offered"),
        ({"functions": [{"name": "f"}], "function_call": "auto"}, "functions are offered"),
    ],
)
def test_a_constraint_on_the_answer_wins_over_the_text(constraint: dict[str, Any], named: str) -> None:
    found = classify(chat("Write a poem about the sea.", **constraint))
    assert found.task is TaskType.JSON
    assert named in found.evidence


@pytest.mark.parametrize(
    "without",
    [{"response_format": {"type": "text"}}, {"tools": []}, {"tools": [{"type": "function"}], "tool_choice": "none"}, {"guided_json": None}],
)
def test_an_empty_constraint_is_none(without: dict[str, Any]) -> None:
    assert classify(chat("Write a poem about the sea.", **without)).task is TaskType.CREATIVE


def test_a_summary_needs_a_long_text() -> None:
    assert classify(chat(f"Summarize:\n\n{ARTICLE}")).task is TaskType.SUMMARY
    assert classify(chat("Summarize the plot of Hamlet.")).task is TaskType.CHAT
    assert f"{len(ARTICLE) + 12:,}" in classify(chat(f"Summarize:\n\n{ARTICLE}")).evidence


def test_a_summary_may_be_of_the_turns_before() -> None:
    body = {
        "messages": [{"role": "user", "content": ARTICLE}, {"role": "assistant", "content": "Read."}, {"role": "user", "content": "tl;dr?"}]
    }
    assert classify(body).task is TaskType.SUMMARY


def test_extraction_needs_a_text() -> None:
    assert classify(chat(f"List all dates mentioned in the text below.\n\n{ARTICLE}")).task is TaskType.EXTRACTION
    assert classify(chat("List five fruits.")).task is TaskType.CHAT


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("Explain this:\n\n```python\ndef f(x):\n    return x\n```", TaskType.CHAT),
        ("Fix this:\n\n```python\ndef f(x):\n    return y\n```", TaskType.CODE),
        ("Write a Python function that turns CSV into JSON", TaskType.CODE),
        ("Convert this JSON to a Python dataclass: {}", TaskType.CODE),
        ("Convert this Python dict to JSON: {}", TaskType.JSON),
        ("What is the difference between JSON and YAML?", TaskType.CHAT),
        ("Write a program in C# that sums two numbers", TaskType.CODE),
        ("Design a training program for a marathon", TaskType.CHAT),
    ],
)
def test_what_the_answer_is_like_decides(text: str, task: TaskType) -> None:
    assert classify(chat(text)).task is task


def test_the_system_prompt_speaks_where_the_user_only_gives_data() -> None:
    assert classify(chat(ARTICLE, system="Summarise the user's text.")).task is TaskType.SUMMARY
    assert classify(chat("I open the door.", system="You are a narrator of fiction.")).task is TaskType.CREATIVE
    assert classify(chat("the parcel was late", system="Answer with a JSON object.")).task is TaskType.JSON
    assert classify(chat("How are you?", system="You are an expert in Python code.")).task is TaskType.CHAT


def test_a_follow_up_takes_the_task_of_the_turn_before() -> None:
    turns = [("user", "Write a SQL query for all users"), ("assistant", "SELECT * FROM users;"), ("user", "the same, ordered by age")]
    found = classify({"messages": [{"role": role, "content": text} for role, text in turns]})
    assert found.task is TaskType.CODE
    assert found.evidence.startswith("the turn before")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "def add(a, b):\n"},
        {"prompt": ["def add(a, b):\n", "def sub(a, b):\n"]},
        chat([{"type": "text", "text": "Write a function in Go"}, {"type": "image_url", "image_url": {"url": "x"}}]),
    ],
)
def test_prompts_lists_and_parts_are_read(body: dict[str, Any]) -> None:
    assert classify(body).task is TaskType.CODE


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2], [3]]},
        {"input": ["a", "b"]},
        {"text_1": "a", "text_2": ["b"]},
        {"query": "a", "documents": ["b"]},
        {"messages": "hello"},
        {"messages": []},
        {"messages": [None, 3, "x", {"role": "user"}, {"role": ["user"], "content": {"a": 1}}, {"content": [None, {"text": 4}]}]},
        {"messages": [{"role": "user", "content": "\ud800 \u0000 \u2028"}]},
        {"response_format": "json_object", "metadata": [1], "tools": 0},
        {},
        None,
        "hello",
        [1, 2, 3],
    ],
)
def test_bodies_without_text_and_malformed_ones_are_chat(body: Any) -> None:
    assert classify(body).task is TaskType.CHAT
    assert classify(body).evidence


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)
FIELDS = st.sampled_from(["messages", "prompt", "metadata", "response_format", "tools", "tool_choice", "guided_json", "input"])
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", 3]), "content": st.text() | JSON})


@given(body=JSON | st.dictionaries(FIELDS, JSON) | st.fixed_dictionaries({"messages": st.lists(MESSAGE | JSON)}))
def test_it_never_raises_and_always_says_why(body: Any) -> None:
    found = classify(body)
    assert found.task in TaskType
    assert found.evidence


def test_the_middle_of_a_long_text_is_not_read() -> None:
    """The bound that keeps a million characters as cheap as a thousand."""
    middle = "Write a poem. " * 70_000
    assert classify(chat(f"{'Data. ' * 60}{middle}{'Data. ' * 60}")).task is TaskType.CHAT


@pytest.mark.parametrize("task", list(TaskType))
def test_parse_task_reads_every_name(task: TaskType) -> None:
    assert parse_task(f" {task.value.upper()} ") is task


@pytest.mark.parametrize("value", ["poetry", "", None, 3])
def test_parse_task_lists_the_names(value: object) -> None:
    with pytest.raises(UsageError, match="code, json, extraction, summary, chat, creative"):
        parse_task(value)
