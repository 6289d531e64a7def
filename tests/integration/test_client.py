"""The Python client, on a server and on this machine alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import specbatch
from specbatch.client.remote import Remote
from specbatch.domain import JobStatus, Outcome
from specbatch.errors import Conflict, InvalidRequest, NotFound, ServiceUnavailable, UsageError
from specbatch.service.batches import NewBatch
from specbatch.wire import BatchObject
from tests.commands import gone
from tests.server_fixtures import CHAT, Server, free_port, line


def body(content: str, **changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **changes}


@pytest.fixture
def client(server: Server) -> Iterator[specbatch.Client]:
    with specbatch.Client(server.url) as client:
        yield client


def test_results_come_once_each_and_can_be_read_from_any_place(client: specbatch.Client) -> None:
    batch = client.submit(body(f"row {number}") for number in range(300))
    assert batch.status in JobStatus
    results = list(batch.results())
    assert sorted(int(result.custom_id or "") for result in results) == list(range(300))
    assert [result.sequence for result in results] == list(range(1, 301))
    assert all(result.outcome is Outcome.SUCCEEDED and result.response is not None for result in results)
    assert [result.custom_id for result in batch.results(after=290)] == [result.custom_id for result in results[290:]]
    assert batch.status is JobStatus.COMPLETED
    assert repr(batch) == f"<Batch {batch.id}: completed, 300 of 300 rows>"


def test_a_file_of_lines_with_progress(client: specbatch.Client, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line(f"row-{number}")) + "\n" for number in range(3)))
    seen: list[BatchObject] = []
    state = client.submit(path, metadata={"owner": "me"}, task="chat", mode="plain").wait(lambda state, note: seen.append(state))
    assert state.request_counts.completed == 3
    assert state.metadata == {"owner": "me", "task": "chat"}
    assert seen[-1] == state
    assert client.batch(state.id).state == state


def test_rows_that_fail_are_results_too(client: specbatch.Client) -> None:
    batch = client.submit([body("fine"), body("not fine", metadata={"x-fault": "refuse"})])
    found = {result.custom_id: result for result in batch.results()}
    assert {custom_id: result.outcome for custom_id, result in found.items()} == {"0": Outcome.SUCCEEDED, "1": Outcome.REFUSED}
    response = found["1"].response
    assert response is not None
    assert response["status_code"] == 400


def test_cancel(client: specbatch.Client) -> None:
    batch = client.submit(body(f"row {number}", metadata={"x-delay-ms": "60000"}) for number in range(5))
    batch.cancel()
    assert batch.wait(progress=False).status is JobStatus.CANCELLED
    assert {result.outcome for result in batch.results()} == {Outcome.CANCELLED}
    done = client.submit([body("x")])
    done.wait(progress=False)
    with pytest.raises(Conflict, match="Cannot cancel a batch with status 'completed'"):
        done.cancel()


def test_what_is_wrong_is_told(client: specbatch.Client, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="No batch found"):
        client.batch("batch_absent")
    with pytest.raises(InvalidRequest, match="request 1 cannot be written as JSON"):
        client.submit([body("x"), {"messages": {1, 2}}])
    with pytest.raises(InvalidRequest, match="empty"):
        client.submit([])
    with pytest.raises(UsageError, match="cannot read"):
        client.submit(tmp_path / "absent.jsonl")
    state = client.submit([body("x", model="nobody")]).wait(progress=False)
    assert state.status is JobStatus.FAILED
    assert "nobody" in str(state.errors)
    with pytest.raises(UsageError, match="a server has settings of its own: leave model out"):
        specbatch.Client("http://localhost:1", model="x")


def test_a_batch_is_found_again_by_its_key(server: Server) -> None:
    remote = Remote(server.url)
    try:
        file = remote.upload("in.jsonl", [json.dumps(line("a")).encode() + b"\n"])
        made = remote.create(NewBatch(input_file_id=file.id, endpoint=CHAT), "key-of-this-test")
        for _ in range(3):
            remote.create(NewBatch(input_file_id=file.id, endpoint=CHAT), None)
        found = remote.find("key-of-this-test")
        assert found is not None
        assert found.id == made.id
        assert remote.find("another key") is None
        remote.delete(file.id)
        with pytest.raises(NotFound):
            remote.delete(file.id)
    finally:
        remote.close()


def test_a_server_that_is_not_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with specbatch.Client(url) as client, pytest.raises(ServiceUnavailable, match=rf"{url} does not answer: .*`specbatch up`"):
        client.submit([body("x")])


def test_generate_on_a_server(server: Server, tmp_path: Path) -> None:
    rows = [{"id": number} for number in range(20)]
    made = specbatch.generate(
        rows, tmp_path / "out.jsonl", prompt="{{ id }}", seed=1, url=f"{server.url}/v1", progress=False, data_dir=tmp_path / "home"
    )
    assert [row["id"] for row in made] == list(range(20))
    assert {(row["mode"], row["model"]) for row in made} == {("plain", "builtin:smollm2-135m")}


def test_on_this_machine_everything_is_started_and_ended(tmp_path: Path) -> None:
    """In a process of its own, as a notebook's: nothing is left when it ends without closing anything."""
    program = (
        "import json, psutil, specbatch\n"
        "client = specbatch.Client(data_dir='home', engine='scripted', sweep_seconds=0.2, stop_seconds=1)\n"
        "batch = client.submit([{'messages': [{'role': 'user', 'content': 'x'}]}] * 3)\n"
        "ids = sorted(result.custom_id for result in batch.results())\n"
        "print(json.dumps([ids, [child.pid for child in psutil.Process().children(recursive=True)]]))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=110)
    ids, children = json.loads(ended.stdout)
    assert ids == ["0", "1", "2"]
    assert len(children) >= 2
    assert gone([psutil.Process(pid) for pid in children if psutil.pid_exists(pid)])


def test_importing_the_package_loads_neither_pyarrow_nor_httpx() -> None:
    program = "import sys, specbatch; print(*{'pyarrow', 'httpx'}.intersection(sys.modules)); print(specbatch.generate.__name__)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\ngenerate\n"
