"""The official client against the whole product: API, reconciler and a worker with the scripted engine, each a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from tests.server_fixtures import CHAT, MOST_BYTES, Server, jsonl, line, wait_until
from tests.webhook_receiver import SECRET, Receiver

ENDED = {"completed", "failed", "expired", "cancelled"}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def submit(client: openai.OpenAI, content: bytes, endpoint: Any = CHAT, **more: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def lines(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(each) for each in client.files.content(file_id).content.split(b"\n") if each]


def test_upload_create_poll_download(client: openai.OpenAI, tmp_path: Path) -> None:
    names = [f"row-{number}" for number in range(40)]
    path = tmp_path / "requests.jsonl"
    path.write_bytes(jsonl(*(line(name, content=name, max_tokens=8) for name in names)))
    with path.open("rb") as opened:
        file = client.files.create(file=opened, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert (file.filename, file.purpose, file.bytes) == ("requests.jsonl", "batch", path.stat().st_size)
    assert client.files.retrieve(file.id) == file
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"description": "nightly"})
    assert (batch.status, batch.object) == ("validating", "batch")
    batch = ended(client, batch)
    assert (batch.status, batch.error_file_id, batch.errors) == ("completed", None, None)
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (40, 40, 0)
    assert batch.metadata == {"description": "nightly"}
    assert batch.usage is not None
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    output = lines(client, batch.output_file_id)
    assert [each["custom_id"] for each in output] == names
    for each in output:
        assert each["error"] is None
        assert each["response"]["status_code"] == 200
        assert openai.types.chat.ChatCompletion.model_validate(each["response"]["body"]).choices[0].message.content


def test_refused_requests_end_in_the_error_file(client: openai.OpenAI) -> None:
    batch = ended(client, submit(client, jsonl(line("good"), line("bad", max_tokens=0), line("worse", temperature=9))))
    assert batch.status == "completed"
    assert [each["custom_id"] for each in lines(client, batch.output_file_id)] == ["good"]
    errors = lines(client, batch.error_file_id)
    assert [each["custom_id"] for each in errors] == ["bad", "worse"]
    for each in errors:
        assert (each["error"], each["response"]["status_code"]) == (None, 400)
        assert set(each["response"]["body"]["error"]) >= {"message", "type", "param", "code"}


def test_cancel_while_it_runs(client: openai.OpenAI) -> None:
    slow = [line(f"slow-{number}", metadata={"x-delay-ms": "600000"}) for number in range(3)]
    batch = submit(client, jsonl(line("quick"), *slow))
    wait_until(lambda: (client.batches.retrieve(batch.id).request_counts or batch).completed == 1)  # type: ignore[union-attr]
    cancelling = client.batches.cancel(batch.id)
    assert cancelling.status in {"cancelling", "cancelled"}
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    assert [each["custom_id"] for each in lines(client, batch.output_file_id)] == ["quick"]
    assert [each["error"]["code"] for each in lines(client, batch.error_file_id)] == ["batch_cancelled"] * 3
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_cancel_too_late(client: openai.OpenAI) -> None:
    batch = ended(client, submit(client, jsonl(line("a"))))
    with pytest.raises(openai.ConflictError) as conflict:
        client.batches.cancel(batch.id)
    assert "Cannot cancel a batch with status 'completed'." in str(conflict.value)


def test_what_does_not_exist(client: openai.OpenAI) -> None:
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError) as missing:
            call("batch_missing")
        assert "No batch found with id 'batch_missing'" in str(missing.value)
    for ask in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError):
            ask("file-missing")


def test_refusals_carry_code_and_param(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.files.create(file=("in.txt", b"x"), purpose="batch")
    assert (refusal.value.code, refusal.value.param, refusal.value.type) == ("invalid_file_format", "file", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as refusal:
        client.batches.create(input_file_id="file-missing", endpoint=CHAT, completion_window="24h")
    assert (refusal.value.code, refusal.value.param) == ("invalid_value", "input_file_id")
    file = client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
    with pytest.raises(openai.BadRequestError) as refusal:
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"n": 1})  # type: ignore[dict-item]
    assert (refusal.value.code, refusal.value.param) == ("invalid_type", "metadata.n")


@pytest.mark.parametrize("size", [MOST_BYTES + 1, 5 * MOST_BYTES, 20 * MOST_BYTES])
def test_a_file_that_is_too_large(client: openai.OpenAI, size: int) -> None:
    with pytest.raises(openai.APIStatusError) as refusal:
        client.files.create(file=("in.jsonl", b"x" * size), purpose="user_data")
    assert (refusal.value.status_code, refusal.value.code) == (413, "file_too_large")


def test_pages_through_ninety_nine_batches(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
    made = [client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id for _ in range(99)]
    seen = [batch.id for batch in client.batches.list(limit=10)]  # the client follows `after` and `has_more` itself
    assert seen[:99] == made[::-1]
    assert len(seen) == len(set(seen))


def test_pages_through_files(client: openai.OpenAI) -> None:
    made = [client.files.create(file=(f"{number}.bin", b"x"), purpose="user_data").id for number in range(5)]
    assert [file.id for file in client.files.list(purpose="user_data", limit=2)] == made[::-1]
    assert [file.id for file in client.files.list(purpose="user_data", limit=2, order="asc")] == made
    assert client.files.delete(made[0]).deleted
    assert [file.id for file in client.files.list(purpose="user_data")] == made[:0:-1]


def test_models(client: openai.OpenAI) -> None:
    assert "default" in [model.id for model in client.models.list()]


def test_results_follow_a_running_batch(client: openai.OpenAI, server: Server) -> None:
    batch = submit(client, jsonl(line("first"), line("held", metadata={"x-delay-ms": "600000"})))
    url = f"{server.url}/v1/batches/{batch.id}/results"
    with httpx.stream("GET", url, headers={"accept": "application/x-ndjson"}, timeout=60) as response:
        results = (json.loads(each) for each in response.iter_lines())
        assert next(results)["custom_id"] == "first"
        assert client.batches.retrieve(batch.id).status == "in_progress"
        client.batches.cancel(batch.id)
        last = next(results)
        assert (last["custom_id"], last["outcome"], last["sequence"]) == ("held", "cancelled", 2)
        assert list(results) == []
    page = httpx.get(url, params={"after": 1}).json()
    assert [each["custom_id"] for each in page["data"]] == ["held"]


def test_a_webhook_announces_the_end(client: openai.OpenAI, receiver: Receiver) -> None:
    batch = submit(client, jsonl(line("a")), extra_body={"webhook_url": receiver.url})
    wait_until(lambda: len(receiver.came) > 0)
    headers, content = receiver.came[0]
    event = client.webhooks.unwrap(content, headers, secret=SECRET)
    assert event.type == "batch.completed"
    assert event.data.id == batch.id
    assert client.batches.retrieve(batch.id).status == "completed"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl(line("a")))

    def curl(*arguments: str) -> Any:
        done = subprocess.run(["curl", "--silent", "--show-error", "--fail-with-body", *arguments], capture_output=True, check=True)
        return json.loads(done.stdout)

    file = curl(f"{server.url}/v1/files", "-F", "purpose=batch", "-F", f"file=@{path}")
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = curl(f"{server.url}/v1/batches", "-H", "Content-Type: application/json", "-d", json.dumps(body))
    wait_until(lambda: curl(f"{server.url}/v1/batches/{batch['id']}")["status"] == "completed")
    output = curl(f"{server.url}/v1/batches/{batch['id']}")["output_file_id"]
    assert curl(f"{server.url}/v1/files/{output}/content")["custom_id"] == "a"
    assert curl("-X", "DELETE", f"{server.url}/v1/files/{output}")["deleted"] is True
