"""The command line as its users meet it: a process, its streams and its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from specbatch.settings import Settings

EXAMPLES = Path(__file__).parent.parent / "examples" / "requests.jsonl"
PATIENCE_SECONDS = 60.0
T = TypeVar("T")


class Commands:
    def __init__(self, settings: Settings, **environment: str) -> None:
        self.environment = {**os.environ, **settings.environment(), "NO_COLOR": "1", **environment}

    def run(self, *arguments: object, stdin: bytes | None = None, seconds: float = 110.0) -> subprocess.CompletedProcess[str]:
        """A command's end. No command may leave a traceback."""
        ended = subprocess.run(self._line(arguments), env=self.environment, capture_output=True, input=stdin, timeout=seconds, check=False)
        told = subprocess.CompletedProcess(ended.args, ended.returncode, ended.stdout.decode(), ended.stderr.decode())
        assert "Traceback" not in told.stderr, told.stderr
        return told

    def json(self, *arguments: object, code: int = 0, seconds: float = 110.0) -> Any:
        """The one document on stdout."""
        ended = self.run(*arguments, "--json", seconds=seconds)
        assert ended.returncode == code, ended.stderr
        return json.loads(ended.stdout)

    @contextmanager
    def started(self, *arguments: object) -> Iterator[subprocess.Popen[str]]:
        """A command that runs on; killed, with all that it left, if the test has not ended it."""
        process = subprocess.Popen(
            self._line(arguments), env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        with process:
            try:
                yield process
            finally:
                for each in family(process.pid):
                    each.kill()

    @staticmethod
    def _line(arguments: tuple[object, ...]) -> list[str]:
        return [sys.executable, "-m", "specbatch", *map(str, arguments)]


def interrupt(process: subprocess.Popen[str]) -> str:
    """Ctrl-C, and what the command wrote to stderr until its end."""
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=PATIENCE_SECONDS)[1]


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all of them ended, within the deadline. A zombie has ended: who reaps it here is not ours to choose."""
    return wait_for(lambda: all(not each.is_running() or each.status() == psutil.STATUS_ZOMBIE for each in processes))


def wait_for(condition: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """What `condition` answers once that is true. Fails when it is not in time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)
    return found


def chat(custom_id: str, content: str = "Say a word.", metadata: Mapping[str, str] | None = None, **body: Any) -> dict[str, Any]:
    """A line of /v1/chat/completions. `metadata` may ask the scripted engine for a fault."""
    body = {"model": "default", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **body}
    if metadata is not None:
        body["metadata"] = dict(metadata)
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def answers(path: Path) -> dict[str, str]:
    """custom_id -> the text that came back, in the file's order. Ids and times differ between runs, texts do not."""
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in read_lines(path)}
