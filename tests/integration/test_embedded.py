"""The embedded Valkey: started by who comes first, stopped by who leaves last, and none the worse for any kill -9 in between."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import kombu
import psutil
import pytest
import redis

from specbatch import embedded
from specbatch.embedded import prepare, valkey
from specbatch.errors import ServiceUnavailable
from specbatch.settings import Settings

DEADLINE = 30.0
COMMAND = """
import sys
from specbatch.embedded import valkey
from specbatch.settings import Settings
with valkey(Settings(data_dir=sys.argv[1])) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    directory = tmp_path / "valkey"
    pid = embedded._pid(directory)
    assert pid is None or not runs(pid), "the test left its server running"


@pytest.fixture
def own(home: Path) -> Settings:
    return Settings(data_dir=home)


@pytest.fixture
def command(home: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[str], str]]]:
    """Another command on the same data directory, which holds the server until its input ends."""
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen([sys.executable, "-c", COMMAND, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    with ExitStack() as open_files:
        yield start
        for process in started:
            process.kill()
            open_files.enter_context(process)


def connect(url: str) -> redis.Redis:
    return redis.Redis(unix_socket_path=unquote(url.removeprefix("redis+socket://")))


def pid_of(url: str) -> int:
    with connect(url) as client:
        return int(client.info("server")["process_id"])


def runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert embedded._ended(psutil.Process(pid))


def test_a_server_of_ones_own(own: Settings) -> None:
    with valkey(own) as url, connect(url) as client:
        pid = pid_of(url)
        config: dict[str, Any] = client.config_get("*")
        assert (config["appendonly"], config["maxmemory-policy"], config["port"]) == ("yes", "noeviction", "0")
        assert os.getsid(pid) != os.getsid(0), "Ctrl+C in the terminal would reach it"
        for path in (own.home / "valkey", own.home / "valkey" / "valkey.sock"):
            assert path.stat().st_mode & 0o077 == 0
    assert not runs(pid)


def test_nothing_starts_when_redis_is_given(tmp_path: Path) -> None:
    with valkey(Settings(data_dir=tmp_path / "unused", redis_url="redis://elsewhere:6379/0")) as url:
        assert url == "redis://elsewhere:6379/0"
    assert not (tmp_path / "unused").exists()


def test_queued_messages_outlive_the_command(own: Settings) -> None:
    with valkey(own) as url, connect(url) as client:
        client.rpush("queue", "message")
    with valkey(own) as url, connect(url) as client:
        assert client.lpop("queue") == b"message"


def test_celery_reads_the_url(tmp_path: Path) -> None:
    with valkey(Settings(data_dir=tmp_path / "a folder, with % and spaces")) as url, kombu.Connection(url) as connection:
        queue = connection.SimpleQueue("here")
        queue.put({"shard": 7})
        message = queue.get(timeout=DEADLINE)
        message.ack()
        assert message.payload == {"shard": 7}
        queue.close()


def test_the_last_to_leave_stops_it(own: Settings) -> None:
    with ExitStack() as first, ExitStack() as second:
        url = first.enter_context(valkey(own))
        pid = pid_of(url)
        assert second.enter_context(valkey(own)) == url
        assert pid_of(url) == pid
        first.close()
        assert pid_of(url) == pid
        second.close()
        assert not runs(pid)


def test_another_command_keeps_it(own: Settings, command: Callable[[], tuple[subprocess.Popen[str], str]]) -> None:
    with valkey(own) as url:
        other, shared = command()
        pid = pid_of(url)
        assert shared == url
    assert pid_of(url) == pid
    assert other.stdin is not None
    other.stdin.close()
    assert other.wait(DEADLINE) == 0
    assert not runs(pid)


def test_killed_command(own: Settings, command: Callable[[], tuple[subprocess.Popen[str], str]]) -> None:
    starter, url = command()
    pid = pid_of(url)
    with connect(url) as client:
        client.rpush("queue", "message")
    starter.kill()
    starter.wait(DEADLINE)
    with valkey(own) as again, connect(again) as client:
        assert pid_of(again) == pid
        assert client.lpop("queue") == b"message"
    assert not runs(pid)


def test_killed_server(own: Settings, command: Callable[[], tuple[subprocess.Popen[str], str]]) -> None:
    starter, url = command()
    with connect(url) as client:
        client.rpush("queue", "message")
        client.waitaof(1, 0, 0)
    starter.kill()
    starter.wait(DEADLINE)
    pid = pid_of(url)
    kill(pid)
    assert (own.home / "valkey" / "valkey.sock").exists()
    assert (own.home / "valkey" / "valkey.pid").exists()
    with valkey(own) as again, connect(again) as client:
        assert pid_of(again) != pid
        assert client.lpop("queue") == b"message"


def test_a_server_that_died_meanwhile_does_not_break_leaving(own: Settings) -> None:
    with valkey(own) as url:
        kill(pid_of(url))


def test_a_frozen_server_is_named(own: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "ANSWER_SECONDS", 0.2)
    with valkey(own) as url:
        pid = pid_of(url)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(ServiceUnavailable, match=rf"process {pid}\) runs and does not answer: kill it"), valkey(own):
                pytest.fail("a frozen server was handed out")
        finally:
            os.kill(pid, signal.SIGCONT)


def test_a_frozen_server_is_stopped_all_the_same(own: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(embedded, "STOP_SECONDS", 0.5)
    with valkey(own) as url:
        pid = pid_of(url)
        os.kill(pid, signal.SIGSTOP)
    assert not runs(pid)


def _visit(home: str) -> int:
    with valkey(Settings(data_dir=Path(home))) as url:
        return pid_of(url)


def test_commands_come_and_go_at_once(home: Path) -> None:
    """Each gets a server that answers for as long as it stays, whoever else starts or stops it."""
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pids = pool.map(_visit, [str(home)] * 24, chunksize=1)
        pool.close()
        pool.join()
    assert len(pids) == 24
    assert not any(runs(pid) for pid in pids)


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    deep = Settings(data_dir=tmp_path / ("d" * 100))
    with valkey(deep) as url, connect(url) as client:
        assert client.ping()
        socket = Path(url.removeprefix("redis+socket://"))
        assert len(str(socket)) < embedded.SOCKET_PATH_LIMIT
        assert socket.parent.stat().st_mode & 0o077 == 0
    assert not socket.exists()


def test_a_socket_directory_that_others_could_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all = Path(tempfile.gettempdir()) / f"specbatch-{os.geteuid()}"
    monkeypatch.setattr(Path, "lstat", lambda _: SimpleNamespace(st_uid=os.geteuid(), st_mode=0o40777))
    with pytest.raises(ServiceUnavailable, match=rf"{open_to_all} is open to other users: remove it"):
        embedded._socket(tmp_path / ("d" * 100))


def test_a_start_that_fails_names_the_log(own: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "START_SECONDS", 0.5)
    (own.home / "valkey" / "appendonlydir").mkdir(parents=True)
    (own.home / "valkey" / "appendonlydir" / "appendonly.aof.manifest").write_text("no manifest")
    with pytest.raises(ServiceUnavailable, match=r"did not start: read .*valkey\.log"), valkey(own):
        pytest.fail("a broken server was handed out")


def test_prepare_makes_a_private_directory(tmp_path: Path) -> None:
    prepare(Settings(data_dir=tmp_path / "new" / "data"))
    assert (tmp_path / "new" / "data").stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "new" / "data").iterdir()) == []


def test_prepare_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServiceUnavailable, match=r"cannot write under .*file: .*Point SPECBATCH_DATA_DIR"):
        prepare(Settings(data_dir=tmp_path / "file"))


def test_prepare_refuses_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 1024**2))
    with pytest.raises(ServiceUnavailable, match="only 3 MiB are free under"):
        prepare(Settings(data_dir=tmp_path))
