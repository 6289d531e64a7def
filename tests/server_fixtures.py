"""The API in this process, with a desk that does the other processes' work one step at a time; and the whole product as processes."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import sqlalchemy as sa
from starlette.testclient import TestClient
from tenacity import Retrying, retry_if_exception_type, retry_if_result, stop_after_delay, wait_fixed

from api.app import create_app
from specbatch import models as tables
from specbatch.context import Context, opened
from specbatch.domain import Measurement, Mode, Outcome, Row, RowResult
from specbatch.lines import compact
from specbatch.processes import Crew
from specbatch.service import finalize, ingest, shards, upkeep
from specbatch.settings import Settings
from tests.webhook_receiver import SECRET, Receiver, receiving

DEADLINE_SECONDS = 60.0
MOST_ROWS = 500  # of a batch on the server of the tests
MOST_BYTES = 8 * 1024**2  # of a file there
CHAT: Final = "/v1/chat/completions"
Answer = Callable[[Row], RowResult]


def line(custom_id: str, *, content: str = "hi", url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"model": "default", "messages": [{"role": "user", "content": content}], **body},
    }


def jsonl(*lines: Mapping[str, Any] | str) -> bytes:
    return "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines).encode()


def succeed(row: Row) -> RowResult:
    cost = Measurement(prompt_tokens=3, generated_tokens=2, finish_reason="stop", drafted_tokens=4, accepted_tokens=1)
    return RowResult(row.row_index, Outcome.SUCCEEDED, 200, compact({"object": "chat.completion", "choices": []}), measurement=cost)


def refused(response: Any, status: int, code: str | None, param: str | None) -> str:
    """Assert OpenAI's error shape and these parts of it; answers the message."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error" if status < 500 else "server_error")
    return str(error["message"])


def file_lines(api: TestClient, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in api.get(f"/v1/files/{file_id}/content").content.split(b"\n") if each]


class Desk:
    """Validates, works and finalizes when told to: a test sees every state between."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def validate(self) -> None:
        while ingest.ingest_next(self._ctx, "desk"):
            pass

    def validate_without_end(self, batch_id: str) -> None:
        """As a reconciler that dies between its last line and its conclusion."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ingest, "_conclude", lambda *_: None)
            ingest.ingest_next(self._ctx, "dead")
        with self._ctx.database.write() as tx:
            tx.execute(sa.update(tables.jobs).where(tables.jobs.c.id == batch_id).values(lease_until=0.0))

    def work(self, batch_id: str, answer: Answer = succeed, shard_no: int = 0) -> None:
        with self._ctx.database.read() as tx:
            wanted = sa.select(tables.shards).where(tables.shards.c.job_id == batch_id, tables.shards.c.shard_no == shard_no)
            shard = tx.execute(wanted).one()
        taken = shards.claim(self._ctx, batch_id, shard_no, model=shard.model, mode=Mode(shard.mode), owner="desk")
        assert taken is not None
        rows = shards.read_rows(self._ctx, taken.claim, taken.owed)
        shards.settle(self._ctx, taken.claim, [answer(row) for row in rows])

    def close(self) -> None:
        """Settle the rows of stopped batches, as the sweep does."""
        tally = upkeep.Tally()
        upkeep.expire_jobs(self._ctx, tally)
        upkeep.close_stopped(self._ctx, tally)

    def pass_window(self, batch_id: str) -> None:
        """As if the completion window had passed."""
        with self._ctx.database.write() as tx:
            tx.execute(sa.update(tables.jobs).where(tables.jobs.c.id == batch_id).values(expires_at=0.0))

    def finalize(self) -> None:
        while finalize.finalize_next(self._ctx, "desk"):
            pass


@pytest.fixture
def ctx(settings: Settings) -> Iterator[Context]:
    with opened(settings) as ctx:
        yield ctx


@pytest.fixture
def desk(ctx: Context) -> Desk:
    return Desk(ctx)


@pytest.fixture
def api(ctx: Context) -> Iterator[TestClient]:
    with TestClient(create_app(ctx)) as client:
        yield client


@pytest.fixture
def upload(api: TestClient) -> Callable[..., str]:
    """Upload lines; the id of the file."""

    def _upload(*lines: Mapping[str, Any] | str) -> str:
        response = api.post("/v1/files", files={"file": ("in.jsonl", jsonl(*lines))}, data={"purpose": "batch"})
        assert response.status_code == 200, response.text
        return str(response.json()["id"])

    return _upload


@pytest.fixture
def create(api: TestClient) -> Callable[..., dict[str, Any]]:
    """Create a batch of an uploaded file; the Batch object."""

    def _create(file_id: str, **parameters: Any) -> dict[str, Any]:
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **parameters}
        response = api.post("/v1/batches", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    return _create


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


class Server:
    """API, reconciler and scripted worker as `specbatch up` starts them."""

    def __init__(self, settings: Settings, crew: Crew) -> None:
        self.settings, self.crew = settings, crew
        self.url = f"http://{settings.host}:{settings.port}"

    def pid(self, name: str) -> int:
        pid = self.crew.pid(name)
        assert pid is not None
        return pid


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], seconds: float = DEADLINE_SECONDS) -> None:
    Retrying(stop=stop_after_delay(seconds), wait=wait_fixed(0.1), retry=retry_if_result(lambda met: not met))(condition)


def wait_ready(url: str) -> None:
    patience = Retrying(
        stop=stop_after_delay(DEADLINE_SECONDS), wait=wait_fixed(0.1), retry=retry_if_exception_type(httpx.HTTPError), reraise=True
    )
    patience(lambda: httpx.get(f"{url}/readyz").raise_for_status())


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, valkey_server: str) -> Iterator[Server]:
    """One server for the tests of a module, on each database."""
    home: Path = tmp_path_factory.mktemp("server")
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("sqlite_template"), home / "specbatch.db")
        url, drop = f"sqlite:///{home / 'specbatch.db'}", None
    else:
        postgres = request.getfixturevalue("postgres_server")
        url = postgres.create(request.getfixturevalue("postgres_template"))
        drop = postgres.drop
    settings = Settings(
        data_dir=home,
        database_url=url,
        port=free_port(),
        engine="scripted",
        modes=(Mode.PLAIN,),
        sweep_seconds=0.2,
        max_batch_rows=MOST_ROWS,
        max_file_bytes=MOST_BYTES,
        webhook_secret=SECRET,
        webhook_private_addresses=True,
        stop_seconds=1.0,
        lease_seconds=3.0,
    )
    with Crew(settings, valkey_server, print) as crew:
        for name, module in (("api", "api"), ("reconciler", "worker.reconciler"), ("worker", "worker")):
            crew.start(name, module)
        server = Server(settings, crew)
        wait_ready(server.url)
        yield server
    if drop is not None:
        drop(url)
