"""From the lines of a file to a mode for each row: what validation writes, what the guards change, and what a running batch learns."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from specbatch import models as tables
from specbatch.context import Context, opened
from specbatch.database import now
from specbatch.domain import Mode, TaskType
from specbatch.lines import POOLED
from specbatch.service import batches, files, ingest, plan, reconsider, reports, shards, speculation
from specbatch.settings import Settings
from tests.commands import EXAMPLES, Commands, read_lines
from tests.model_fixtures import CONTEXT, HEADS, HIDDEN, KV_HEADS, LAYERS

CHAT = "/v1/chat/completions"
CODE = "Add type hints to this function and return the whole code.\n```python\ndef add(a, b):\n    return a + b\n```"
TALK = "What is your favourite city, and why?"


def lines(contents: Iterable[str], **body: Any) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"row-{number}",
            "method": "POST",
            "url": CHAT,
            "body": {"model": "default", "messages": [{"role": "user", "content": content}], **body},
        }
        for number, content in enumerate(contents)
    ]


def submit(ctx: Context, requests: list[dict[str, Any]], **new: Any) -> str:
    content = b"".join(json.dumps(each).encode() + b"\n" for each in requests)
    file = files.upload(ctx, "in.jsonl", "batch", [content])
    job_id = batches.submit(ctx, batches.NewBatch(**{"input_file_id": file.id, "endpoint": CHAT, **new})).id
    assert ingest.ingest_next(ctx, "test")
    assert batches.get(ctx, job_id).status == "in_progress", batches.get(ctx, job_id).errors
    return job_id


def modes(ctx: Context, job_id: str) -> dict[tuple[str, str], int]:
    found: Counter[tuple[str, str]] = Counter()
    for group in reports.decisions(ctx, job_id):
        found[group.task, group.mode] += group.rows
    return dict(found)


def reasons(ctx: Context, job_id: str) -> str:
    return " | ".join(group.reason for group in reports.decisions(ctx, job_id))


def worker(ctx: Context, *offered: Mode, withheld: Mapping[Mode, str] | None = None, worker_id: str = "w") -> None:
    shards.alive(ctx, worker_id, model="builtin:smollm2-135m", names=["default"], modes=offered, withheld=withheld or {}, mode=offered[0])


def measured(ctx: Context, mode: Mode, task: TaskType, *, accepted: int, rows: int = 64, tpot: float = 0.01, load: int = 4) -> None:
    """Rows of an earlier batch: each drafted 100 tokens, of which `accepted` were accepted."""
    row = {
        "job_id": f"batch_earlier_{mode}_{task}_{tpot}",
        "model": "builtin:smollm2-135m",
        "mode": mode,
        "task": task,
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "generated_tokens": 50,
        "drafted_tokens": 0 if mode is Mode.PLAIN else 100,
        "accepted_tokens": accepted,
        "tpot_seconds": tpot,
        "load": load,
        "steps_by_accepted": [100 - accepted, accepted],
    }
    with ctx.database.write() as tx:
        tx.execute(sa.insert(tables.measurements).values(measured_at=now()), [{**row, "row_index": index} for index in range(rows)])


@pytest.fixture
def drafting(settings: Settings) -> Settings:
    return settings.model_copy(update={"draft": "some-draft"})


@pytest.fixture
def ctx(drafting: Settings) -> Iterable[Context]:
    with opened(drafting) as ctx:
        yield ctx


def test_copying_tasks_go_to_ngram_and_talk_to_the_draft(ctx: Context) -> None:
    job_id = submit(ctx, lines([CODE, TALK, CODE, TALK]))
    assert modes(ctx, job_id) == {("code", "ngram"): 2, ("chat", "draft_model"): 2}
    assert all(row["task"] for row in kinds(ctx, job_id))


def kinds(ctx: Context, job_id: str) -> list[dict[str, Any]]:
    with ctx.database.read() as tx:
        query = sa.select(tables.shards.c.shard_no, tables.shards.c.mode, tables.shards.c.task, tables.shards.c.rows)
        return [row._asdict() for row in tx.execute(query.where(tables.shards.c.job_id == job_id))]


def test_a_shard_holds_rows_of_one_mode_and_one_task(ctx: Context) -> None:
    job_id = submit(ctx, lines([CODE, TALK, CODE, TALK, TALK]))
    assert sorted((shard["mode"], shard["task"], shard["rows"]) for shard in kinds(ctx, job_id)) == [
        ("draft_model", "chat", 3),
        ("ngram", "code", 2),
    ]


@pytest.mark.parametrize("sampling", [{"min_p": 0.1}, {"logit_bias": {"5": 1}}])
def test_sampling_that_speculation_refuses_runs_plain(ctx: Context, sampling: dict[str, Any]) -> None:
    job_id = submit(ctx, lines([CODE, TALK], **sampling))
    assert {mode for _, mode in modes(ctx, job_id)} == {"plain"}
    assert next(iter(sampling)) in reasons(ctx, job_id)


def test_a_named_task_and_a_lines_own_task_are_obeyed(ctx: Context) -> None:
    requests = lines([TALK, TALK])
    requests[1]["body"]["metadata"] = {"x-task": "code"}
    job_id = submit(ctx, requests, metadata={"task": "creative"})
    assert modes(ctx, job_id) == {("creative", "draft_model"): 1, ("code", "ngram"): 1}


def test_a_named_mode_is_obeyed(ctx: Context) -> None:
    assert modes(ctx, submit(ctx, lines([CODE, TALK]), mode="plain")) == {("code", "plain"): 1, ("chat", "plain"): 1}


@pytest.mark.parametrize("endpoint", sorted(POOLED))
def test_what_generates_nothing_is_never_drafted(ctx: Context, tmp_path: Path, endpoint: str) -> None:
    worker(ctx, Mode.PLAIN, Mode.NGRAM)
    body = {"model": "default", "input": CODE, "query": CODE, "documents": [CODE], "text_1": CODE, "text_2": CODE}
    requests = [{"custom_id": "a", "method": "POST", "url": endpoint, "body": body}]
    job_id = submit(ctx, requests, endpoint=endpoint, mode=Mode.NGRAM)
    assert modes(ctx, job_id) == {("chat", "plain"): 1}
    assert "not generated" in reasons(ctx, job_id)
    (tmp_path / "in.jsonl").write_text(json.dumps(requests[0]) + "\n")
    assert [group.mode for group in plan.plan(ctx, tmp_path / "in.jsonl", endpoint).groups] == [Mode.PLAIN]


def test_a_withheld_draft_sends_its_rows_to_ngram_and_says_why(ctx: Context) -> None:
    worker(ctx, Mode.NGRAM, Mode.PLAIN, withheld={Mode.DRAFT_MODEL: "token 17 is 'a' in the target and 'b' in the draft"})
    job_id = submit(ctx, lines([TALK]))
    assert modes(ctx, job_id) == {("chat", "ngram"): 1}
    assert "token 17 is 'a'" in reasons(ctx, job_id)


def test_load_beyond_the_crossover_runs_plain(ctx: Context) -> None:
    job_id = submit(ctx, lines([CODE] * 300))
    assert modes(ctx, job_id) == {("code", "plain"): 300}
    assert "256 expected" in reasons(ctx, job_id)


def test_the_load_of_a_row_is_all_that_share_its_engine_whatever_their_task(ctx: Context) -> None:
    """60 rows of code run well in ngram's engine, up to 64 at once. 10 chat rows would too, up to 16, but not beside those."""
    worker(ctx, Mode.NGRAM, Mode.PLAIN)
    assert modes(ctx, submit(ctx, lines([TALK] * 10), completion_window="24h")) == {("chat", "ngram"): 10}
    with ctx.database.write() as tx:
        tx.execute(sa.update(tables.jobs).values(status="cancelled"))
    job_id = submit(ctx, lines([CODE] * 60 + [TALK] * 10))
    assert modes(ctx, job_id) == {("code", "ngram"): 60, ("chat", "plain"): 10}
    assert "ngram pays only up to 16 requests at once (70 expected)" in reasons(ctx, job_id)


def test_speeds_are_those_of_each_tasks_own_load(ctx: Context) -> None:
    """Chat was slow beside 250 others. Four rows, alone in the head's engine, do not hear of that."""
    heads = ctx.settings.model_copy(update={"draft": None, "eagle": "some-head"})
    with opened(heads) as few:
        worker(few, Mode.NGRAM, Mode.EAGLE3, Mode.PLAIN)
        for mode, fast, slow in ((Mode.EAGLE3, 0.004, 0.05), (Mode.PLAIN, 0.006, 0.02)):
            measured(few, mode, TaskType.CHAT, accepted=30, tpot=fast, load=4)
            measured(few, mode, TaskType.CHAT, accepted=30, tpot=slow, load=60)
        job_id = submit(few, lines([CODE] * 60 + [TALK] * 4))
        assert modes(few, job_id) == {("code", "ngram"): 60, ("chat", "eagle3"): 4}


def test_a_queued_row_is_reconsidered_at_the_load_of_all_that_share_its_engine(ctx: Context) -> None:
    small = ctx.settings.model_copy(update={"shard_rows": 4, "draft": None})
    with opened(small) as few:
        worker(few, Mode.NGRAM, Mode.PLAIN)
        job_id = submit(few, lines([CODE] * 8 + [TALK] * 8))
        assert modes(few, job_id) == {("code", "ngram"): 8, ("chat", "ngram"): 8}
        for mode, tpot in ((Mode.NGRAM, 0.02), (Mode.PLAIN, 0.01)):
            measured(few, mode, TaskType.CHAT, accepted=90, tpot=tpot, load=20)  # more than twice 8, less than twice 16
        assert reconsider.reconsider(few) == 1
        assert modes(few, job_id) == {("code", "ngram"): 8, ("chat", "ngram"): 4, ("chat", "plain"): 4}


def test_low_acceptance_demotes_a_draft_and_tries_it_again_on_a_few_rows(ctx: Context) -> None:
    measured(ctx, Mode.DRAFT_MODEL, TaskType.CHAT, accepted=39)
    ngram = ctx.settings.model_copy(update={"max_num_seqs": 8})  # so that the load of 128 rows is no reason
    with opened(ngram) as few:
        job_id = submit(few, lines([TALK] * 128))
    found = modes(ctx, job_id)
    assert found == {("chat", "ngram"): 126, ("chat", "draft_model"): 2}
    assert "39% of" in reasons(ctx, job_id)


def test_good_acceptance_keeps_the_draft(ctx: Context) -> None:
    measured(ctx, Mode.DRAFT_MODEL, TaskType.CHAT, accepted=41)
    assert modes(ctx, submit(ctx, lines([TALK]))) == {("chat", "draft_model"): 1}


def test_a_measured_slowdown_demotes_whatever_was_accepted(ctx: Context) -> None:
    measured(ctx, Mode.NGRAM, TaskType.CODE, accepted=90, tpot=0.02, load=1)
    measured(ctx, Mode.PLAIN, TaskType.CODE, accepted=0, tpot=0.01, load=1)
    job_id = submit(ctx, lines([CODE]))
    assert modes(ctx, job_id) != {("code", "ngram"): 1}
    assert "ngram generated 50 tokens/s against plain's 100" in reasons(ctx, job_id)


def test_a_mode_that_is_fast_on_half_of_the_rows_and_slow_on_the_rest_is_no_faster(ctx: Context) -> None:
    """2.2 and 0.55 times plain's speed: on average 1.4 times, and 0.88 of the tokens in the same time."""
    measured(ctx, Mode.PLAIN, TaskType.CODE, accepted=0, tpot=0.01, load=1)
    for tpot in (0.01 / 2.2, 0.01 / 0.55):
        measured(ctx, Mode.NGRAM, TaskType.CODE, accepted=90, tpot=tpot, load=1)
    job_id = submit(ctx, lines([CODE]))
    assert modes(ctx, job_id) != {("code", "ngram"): 1}
    assert "ngram generated 88 tokens/s against plain's 100" in reasons(ctx, job_id)


def test_speeds_at_another_load_say_nothing(ctx: Context) -> None:
    measured(ctx, Mode.NGRAM, TaskType.CODE, accepted=90, tpot=0.02, load=64)
    measured(ctx, Mode.PLAIN, TaskType.CODE, accepted=0, tpot=0.01, load=64)
    assert modes(ctx, submit(ctx, lines([CODE]))) == {("code", "ngram"): 1}


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_a_running_batch_leaves_a_mode_that_proves_bad_but_for_one_shard(
    ctx: Context, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconsider, "AT_ONCE", at_once)
    small = ctx.settings.model_copy(update={"shard_rows": 2, "max_num_seqs": 8})
    with opened(small) as few:
        job_id = submit(few, lines([TALK] * 8))
        assert modes(few, job_id) == {("chat", "draft_model"): 8}
        worker(few, Mode.NGRAM, Mode.DRAFT_MODEL, Mode.PLAIN)
        measured(few, Mode.DRAFT_MODEL, TaskType.CHAT, accepted=10)
        assert reconsider.reconsider(few) == 3
        assert modes(few, job_id) == {("chat", "draft_model"): 2, ("chat", "ngram"): 6}
        assert reconsider.reconsider(few) == 0


def test_a_running_batch_stays_in_the_mode_its_user_named(ctx: Context) -> None:
    worker(ctx, Mode.NGRAM, Mode.DRAFT_MODEL, Mode.PLAIN)
    job_id = submit(ctx, lines([TALK] * 4), mode="draft_model")
    measured(ctx, Mode.DRAFT_MODEL, TaskType.CHAT, accepted=10)
    assert reconsider.reconsider(ctx) == 0
    assert modes(ctx, job_id) == {("chat", "draft_model"): 4}


@pytest.mark.parametrize("named", [None, "draft_model"])
def test_rows_of_a_mode_that_no_worker_offers_any_more_are_served_in_another(ctx: Context, named: str | None) -> None:
    job_id = submit(ctx, lines([TALK] * 3), mode=named)
    assert reconsider.reconsider(ctx) == 0, "no worker has come yet: the rows wait for one"
    worker(ctx, Mode.NGRAM, Mode.PLAIN, withheld={Mode.DRAFT_MODEL: "its engine does not start"})
    assert reconsider.reconsider(ctx) == 1
    assert modes(ctx, job_id) == {("chat", "ngram"): 3}
    assert "draft_model is not served: its engine does not start" in reasons(ctx, job_id)


def test_rows_wait_while_another_worker_offers_their_mode(ctx: Context) -> None:
    job_id = submit(ctx, lines([TALK]))
    worker(ctx, Mode.NGRAM, withheld={Mode.DRAFT_MODEL: "too little memory"})
    worker(ctx, Mode.DRAFT_MODEL, worker_id="other")
    assert reconsider.reconsider(ctx) == 0
    assert modes(ctx, job_id) == {("chat", "draft_model"): 1}


def test_the_plan_is_what_validation_decides_and_writes_nothing(ctx: Context, tmp_path: Path) -> None:
    requests = lines([CODE, TALK, CODE, TALK, TALK])
    path = tmp_path / "plan.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in requests) + "not json\n")
    planned = plan.plan(ctx, path, CHAT)
    assert (planned.rows, planned.problem_count, planned.problems[0].line) == (6, 1, 6)
    assert {(group.task, group.mode): group.rows for group in planned.groups} == {("code", "ngram"): 2, ("chat", "draft_model"): 3}
    assert batches.page(ctx) == []
    assert modes(ctx, submit(ctx, requests)) == {("code", "ngram"): 2, ("chat", "draft_model"): 3}


def test_a_draft_that_does_not_fit_is_told_before_any_worker_is_there(
    settings: Settings, tiny_llama: Path, short_draft: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plan.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines([CODE, TALK])))
    short = settings.model_copy(update={"engine": "vllm", "model": str(tiny_llama), "draft": str(short_draft)})
    for changes, mode in (({}, Mode.NGRAM), ({"max_model_len": CONTEXT // 4}, Mode.DRAFT_MODEL)):
        with opened(short.model_copy(update=changes)) as ctx:
            [chat] = [group for group in plan.plan(ctx, path, CHAT).groups if group.task is TaskType.CHAT]
        assert chat.mode is mode
        assert (f"but the target is served with {CONTEXT} tokens" in chat.reason) == (mode is Mode.NGRAM)


def test_the_plan_estimates_the_memory_of_each_mode(drafting: Settings, tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines([CODE, TALK])))
    weights = (tiny_llama / "model.safetensors").stat().st_size
    halved = drafting.model_copy(update={"model": str(tiny_llama), "draft": str(tiny_llama), "dtype": "bfloat16", "max_model_len": 128})
    with opened(halved) as ctx:
        memory = plan.plan(ctx, path, CHAT).memory
    cache = 128 * 2 * LAYERS * KV_HEADS * (HIDDEN // HEADS) * 2
    assert memory[Mode.NGRAM].weights_bytes == pytest.approx(weights / 2, rel=0.05)
    assert memory[Mode.DRAFT_MODEL].weights_bytes == pytest.approx(weights, rel=0.05)
    assert [memory[mode].kv_bytes_per_request for mode in (Mode.NGRAM, Mode.DRAFT_MODEL)] == [cache, 2 * cache]
    with opened(halved.model_copy(update={"model": "nobody/has-this"})) as ctx:
        assert plan.plan(ctx, path, CHAT).memory == {}


def test_a_run_says_row_by_row_which_mode_it_took_and_why(tmp_path: Path) -> None:
    """One worker, both modes: code and JSON through n-grams, chat through the draft."""
    cli = Commands(Settings(data_dir=tmp_path, engine="scripted", draft="some-draft", sweep_seconds=0.2))
    expected = {"code": "ngram", "json": "ngram", "chat": "draft_model"}
    told = cli.json("run", EXAMPLES, "-o", tmp_path / "out.jsonl")
    assert {group["task"]: (group["mode"], group["rows"]) for group in told["decisions"]} == {
        task: (mode, 8) for task, mode in expected.items()
    }
    assert {mode["mode"]: mode["rows"] for mode in told["modes"]} == {"ngram": 16, "draft_model": 8}

    batch_id = told["batch"]["id"]
    *events, document = map(json.loads, cli.run("status", batch_id, "--rows", "--json").stdout.splitlines())
    assert sorted(event["custom_id"] for event in events) == sorted(line["custom_id"] for line in read_lines(EXAMPLES))
    assert all(event["mode"] == expected[event["task"]] and event["reason"] and event["drafted_tokens"] for event in events)
    assert document["decisions"] == told["decisions"]

    shown = cli.run("status", batch_id, "--rows").stdout
    assert re.search(r"^question-1\tsucceeded\tchat\tdraft_model\t\d+ of \d+ drafted\tchat answers are new text", shown, re.MULTILINE)
    assert re.search(r"^ +8 +code +ngram +code answers repeat their input: ngram", shown, re.MULTILINE)


def test_speculation_reports_acceptance_by_kind_and_by_position(ctx: Context) -> None:
    measured(ctx, Mode.NGRAM, TaskType.CODE, accepted=40)
    measured(ctx, Mode.DRAFT_MODEL, TaskType.CHAT, accepted=60)
    found = speculation.speculation(ctx)
    assert {(point.mode, point.task): point.acceptance_rate for point in found.points} == {
        (Mode.NGRAM, TaskType.CODE): 0.4,
        (Mode.DRAFT_MODEL, TaskType.CHAT): 0.6,
    }
    assert found.acceptance_by_position == [0.5]
    only = speculation.speculation(ctx, mode=Mode.NGRAM)
    assert (len(only.points), only.acceptance_by_position) == (1, [0.4])


def test_positions_of_drafts_of_different_lengths() -> None:
    assert speculation.by_position([[1, 1], [0, 0, 2]]) == [0.75, 0.5]
    assert speculation.by_position([]) == []
