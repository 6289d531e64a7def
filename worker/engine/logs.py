"""Where vLLM writes: a file under the data directory, and the terminal only at log level debug."""

from __future__ import annotations

import contextlib
import json
import logging.config
import multiprocessing
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specbatch.settings import Settings

LOG_BYTES = 10 * 1024**2  # an older log is set aside at the next start


def prepare(settings: Settings, log: Path) -> int:
    """Write the logging configuration beside the log; return the characters that the log holds already."""
    log.parent.mkdir(parents=True, exist_ok=True)
    config = logging_config(settings, log)
    log.with_suffix(".json").write_text(json.dumps(config), encoding="utf-8")
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    logging.config.dictConfig(config)  # vLLM does it too, but speaks before
    return len(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else 0


@contextlib.contextmanager
def quiet_processes(settings: Settings, log: Path) -> Iterator[None]:
    """Processes started within write their standard error into the log: a failing one prints a traceback there, whatever logging says."""
    program = log.with_suffix(".sh")
    text = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@" 2>>{shlex.quote(str(log))}\n'
    if not program.exists() or program.read_text(encoding="utf-8") != text:  # another worker may be running it
        program.write_text(text, encoding="utf-8")
    program.chmod(0o700)
    if settings.log_level == "debug" or not os.access(program, os.X_OK):
        yield
        return
    multiprocessing.set_executable(str(program))
    try:
        yield
    finally:
        multiprocessing.set_executable(sys.executable)


def logging_config(settings: Settings, file: Path) -> dict[str, Any]:
    """vLLM's log goes to a file, and to the terminal only at log level debug: a failed start is told in one line, not in tracebacks."""
    handlers: dict[str, Any] = {"file": {"class": "logging.FileHandler", "filename": str(file), "formatter": "vllm", "encoding": "utf-8"}}
    if settings.log_level == "debug":
        handlers["terminal"] = {"class": "logging.StreamHandler", "formatter": "vllm", "stream": "ext://sys.stderr"}
    form = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"vllm": {"format": form}},
        "handlers": handlers,
        "loggers": {
            "vllm": {"handlers": list(handlers), "level": "DEBUG" if settings.log_level == "debug" else "INFO", "propagate": False}
        },
    }
