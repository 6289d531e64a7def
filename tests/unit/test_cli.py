"""The command line in process: flags, exit codes, and one clear line for every bad input. Whole runs are in tests/integration."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from specbatch import embedded
from specbatch.cli import app, source, target
from specbatch.cli.source import Source
from specbatch.cli.target import Target
from specbatch.cli.watch import Meter
from specbatch.domain import Mode
from specbatch.errors import UsageError
from specbatch.models import jobs
from specbatch.settings import Settings, load
from specbatch.wire import BatchObject
from tests.commands import EXAMPLES, read_lines
from tests.webhook_receiver import SECRET

Invoke = Callable[..., Result]
COMMANDS = ["run", "up", "submit", "status", "results", "cancel", "retry", "jobs", "worker", "reconciler", "api", "doctor"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def invoke(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: object) -> Result:
        result = CliRunner().invoke(app, ["--data-dir", str(home), *map(str, arguments)], env={"SPECBATCH_ENGINE": "scripted"})
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return invoke


def error_of(result: Result) -> str:
    """The one line that says what is wrong."""
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("specbatch: error: ")
    return lines[0]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# Bad input: what is given as IN, the exit code, and words of the line that says what to do.
BAD_FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda tmp: tmp / "nowhere.jsonl", "there is no file"),
    "directory": (lambda tmp: tmp, "is a directory: give a file"),
    "empty": (lambda tmp: write(tmp / "in.jsonl", b""), "is empty: write one JSON request a line"),
    "blank lines": (lambda tmp: write(tmp / "in.jsonl", b"\n\r\n\n"), "holds no requests"),
    "not JSONL": (lambda tmp: write(tmp / "in.csv", b"id,prompt\n1,hello\n"), "is not JSONL: line 1 is not a JSON object"),
    "a JSON array": (lambda tmp: write(tmp / "in.json", b"[\n1,\n2]\n"), "is not JSONL"),
    "binary": (lambda tmp: write(tmp / "in.png", b"\x89PNG\r\n\x1a\n\x00\xff"), "is not JSONL"),
    "unknown endpoint": (lambda tmp: write(tmp / "in.jsonl", b'{"url": "/v1/videos"}\n'), "asks for '/v1/videos'; use one of"),
    "not UTF-8": (lambda tmp: write(tmp / "in.jsonl", b'{"url": "/v1/chat/completions"}\n{"a": "\xff"}\n'), "not UTF-8"),
}


@pytest.mark.parametrize("command", ["run", "submit"])
@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(case: str, command: str, invoke: Invoke, tmp_path: Path, redis_url: str) -> None:
    make, words = BAD_FILES[case]
    out = tmp_path / "out.jsonl"
    invoke("db", "upgrade")
    result = invoke(command, make(tmp_path), *(["-o", out, "--redis-url", redis_url] if command == "run" else []))
    assert result.exit_code == 2
    assert words in error_of(result)
    assert not out.exists()
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("absent/out.jsonl", "there is no directory"),
        (".", "is a directory: name the output file"),
        ("in.jsonl", "is the input file"),
        ("/dev/null", "is not a regular file"),
    ],
)
def test_bad_outputs(out: str, words: str, invoke: Invoke, tmp_path: Path, home: Path) -> None:
    write(tmp_path / "in.jsonl", EXAMPLES.read_bytes())
    result = invoke("run", "in.jsonl", "-o", out)
    assert result.exit_code == 2
    assert words in error_of(result)
    assert not home.exists(), "nothing was started"


def test_json_and_answers_do_not_share_stdout(invoke: Invoke) -> None:
    result = invoke("run", EXAMPLES, "-o", "-", "--json")
    assert result.exit_code == 2
    assert "both write to stdout" in json.loads(result.stdout)["error"]["message"]


def test_redis_that_does_not_answer(invoke: Invoke, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://127.0.0.1:{server.getsockname()[1]}"
    for command in (["run", EXAMPLES, "-o", tmp_path / "out.jsonl"], ["up"]):
        result = invoke(*command, "--redis-url", url)
        assert result.exit_code == 3
        assert "Redis does not answer" in error_of(result)
        assert "--redis-url" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()
    assert not json.loads(invoke("jobs", "--json").stdout)["data"]


def test_port_taken(invoke: Invoke, redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = invoke("up", "--port", server.getsockname()[1], "--redis-url", redis_url)
    assert result.exit_code == 3
    assert "cannot listen on 127.0.0.1:" in error_of(result)
    assert "--port" in result.stderr


@pytest.mark.parametrize("command", [["jobs"], ["submit", EXAMPLES], ["status", "batch_x"], ["cancel", "batch_x"]])
def test_database_not_migrated(command: list[object], invoke: Invoke, home: Path) -> None:
    assert "run `specbatch db upgrade`" in error_of(invoke(*command))
    home.mkdir(exist_ok=True)
    sqlite3.connect(home / "specbatch.db").close()
    result = invoke(*command)
    assert result.exit_code == 3
    assert "run `specbatch db upgrade`" in error_of(result)


def test_a_database_of_the_users_is_not_migrated_by_run(empty_database_url: str, invoke: Invoke, tmp_path: Path, redis_url: str) -> None:
    arguments = ("--database-url", empty_database_url, "--redis-url", redis_url)
    result = invoke("run", EXAMPLES, "-o", tmp_path / "out.jsonl", *arguments)
    assert result.exit_code == 3
    assert "run `specbatch db upgrade`" in error_of(result)
    assert not (tmp_path / "out.jsonl").exists()
    assert invoke("db", "upgrade", *arguments).exit_code == 0
    assert json.loads(invoke("jobs", "--json", *arguments).stdout)["data"] == []


def test_database_that_does_not_answer(invoke: Invoke) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"postgresql://nobody@127.0.0.1:{server.getsockname()[1]}/nothing"
    result = invoke("jobs", "--database-url", url)
    assert result.exit_code == 3
    assert "does not answer" in error_of(result)


def test_a_full_disk_at_the_start(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "FREE_BYTES", 2**62)
    result = invoke("run", EXAMPLES, "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 3
    assert "MiB are free under" in error_of(result)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_disk_that_fills_up_under_an_upload(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    invoke("db", "upgrade")
    monkeypatch.setattr(os, "fsync", full)
    result = invoke("submit", EXAMPLES)
    assert result.exit_code == 3
    assert "No room left on the disk" in error_of(result)
    assert not list((home / "files").iterdir())
    assert json.loads(invoke("jobs", "--json").stdout)["data"] == []


def full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], "setting port (SPECBATCH_PORT)"),
        (["--modes", "warp"], "setting modes (SPECBATCH_MODES)"),
        (["--redis-url", "localhost:6379"], "write it as redis://"),
        (["--database-url", "mydb"], "write it as postgresql://"),
        (["--tokens-by-batch-size", "1-8"], "write it as first-last:K"),
        (["--modes", "draft_model"], "needs a draft model"),
    ],
)
def test_bad_settings(flags: list[str], words: str, invoke: Invoke) -> None:
    result = invoke("up", *flags)
    assert result.exit_code == 2
    assert words in error_of(result)


def test_a_mode_that_is_not_offered(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("run", EXAMPLES, "-o", tmp_path / "out.jsonl", "--mode", "ngram", "--modes", "plain")
    assert result.exit_code == 2
    assert "is not among --modes plain" in error_of(result)


def test_unknown_ids(invoke: Invoke) -> None:
    invoke("db", "upgrade")
    for command in (["status", "batch_x"], ["results", "batch_x", "-o", "out.jsonl"], ["cancel", "batch_x"], ["retry", "batch_x"]):
        result = invoke(*command, "--json")
        assert result.exit_code == 2
        assert json.loads(result.stdout)["error"]["message"] == "No batch found with id 'batch_x'."


def test_a_retry_of_a_batch_that_runs(invoke: Invoke) -> None:
    invoke("db", "upgrade")
    batch_id = invoke("submit", EXAMPLES).stdout.strip()
    result = invoke("retry", batch_id)
    assert result.exit_code == 2
    assert "Cannot retry a batch with status 'validating': wait until it has ended" in error_of(result)


def test_on_invalid_has_two_answers(invoke: Invoke) -> None:
    result = invoke("submit", EXAMPLES, "--on-invalid", "ignore")
    assert result.exit_code == 2
    assert "'fail', 'skip'" in result.stderr


@pytest.mark.parametrize(
    ("secret", "url", "words"),
    [
        ("", "https://example.com/hook", "SPECBATCH_WEBHOOK_SECRET"),
        (SECRET, "ftp://example.com", "http"),
        (SECRET, "http://127.0.0.1/", "private"),
    ],
    ids=["no secret", "no web address", "private address"],
)
def test_a_webhook_that_cannot_be_sent(
    secret: str, url: str, words: str, invoke: Invoke, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke("db", "upgrade")
    if secret:
        monkeypatch.setenv("SPECBATCH_WEBHOOK_SECRET", secret)
    result = invoke("submit", EXAMPLES, "--webhook-url", url)
    assert result.exit_code == 2
    assert words in error_of(result)
    assert not list(home.glob("files/*")), "nothing was stored for it"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_offers_json_and_settings(command: str, invoke: Invoke) -> None:
    shown = invoke(command, "--help").stdout
    assert "--json" in shown
    assert "--data-dir" in shown


def test_flags_win_over_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Settings.model_config, "toml_file", str(tmp_path / "specbatch.toml"))
    (tmp_path / "specbatch.toml").write_text('port = 1001\nhost = "filed"\nshard_rows = 7\n')
    monkeypatch.setenv("SPECBATCH_PORT", "1002")
    monkeypatch.setenv("SPECBATCH_HOST", "environed")
    settings = load(port="1003")
    assert (settings.port, settings.host, settings.shard_rows) == (1003, "environed", 7)


def schedule(steps: list[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Ranges without gaps, from (how many batch sizes, K)."""
    ends = list(itertools.accumulate(length for length, _ in steps))
    return tuple((end - length + 1, end, k) for end, (length, k) in zip(ends, steps, strict=True))


SCHEDULES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 16)), max_size=3).map(schedule)
SOME_SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.text("abc/-:.", min_size=1),
        "modes": st.lists(st.sampled_from(list(Mode)), max_size=3).map(tuple),
        "served_names": st.lists(st.text("abc", min_size=1), max_size=3).map(tuple),
        "tokens_by_batch_size": SCHEDULES,
        "enforce_eager": st.booleans(),
        "lease_seconds": st.floats(0.001, 1e6),
        "max_num_seqs": st.none() | st.integers(1, 999),
        "redis_url": st.just("redis://:p%40ss,word@host:1/0"),
    },
)


@given(SOME_SETTINGS)
def test_the_environment_of_children_holds_the_same_settings(values: dict[str, Any]) -> None:
    settings = Settings(data_dir=Path("/data"), **values)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.environment().items():
            patch.setenv(name, value)
        assert load() == settings


def test_a_relative_data_directory_stays_the_same_place_for_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings().environment()["SPECBATCH_DATA_DIR"] == str(tmp_path / ".specbatch")


def test_doctor_says_what_to_do(invoke: Invoke) -> None:
    found = json.loads(invoke("doctor", "--json").stdout)
    assert {check["name"] for check in found["checks"]} >= {"python", "engine", "model", "disk", "database", "redis", "port"}
    assert all(check["remedy"] or check["found"] for check in found["checks"] if not check["ok"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://127.0.0.1:{server.getsockname()[1]}"
        taken = invoke("doctor", "--port", server.getsockname()[1], "--model", "/nowhere")
        assert taken.exit_code == 2
        assert "stop what uses it" in taken.stdout
    result = invoke("doctor", "--redis-url", url, "--port", "0" if os.name == "nt" else free_port())
    assert result.exit_code == 3, result.stdout
    assert "Redis does not answer" in result.stdout


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_link_as_output_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    real.write_text("old")
    link.symlink_to(real)
    target._put(link, write(tmp_path / "new", b"new"))
    assert (link.is_symlink(), real.read_text()) == (True, "new")


def test_a_disk_that_fills_up_under_the_output_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write(tmp_path / "out.jsonl", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        target._put(out, write(tmp_path / "new", b"new"))
    assert out.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out.jsonl"]


def test_error_lines_have_a_file_of_their_own() -> None:
    assert Target(Path("out.jsonl")).errors == Path("out.errors.jsonl")
    assert Target(Path("out")).errors == Path("out.errors.jsonl")
    apart = {Target(Path(name)).errors for name in ("m.qwen", "m.llama", "m.jsonl", "m")}
    assert apart == {Path(f"{name}.errors.jsonl") for name in ("m.qwen", "m.llama", "m")}


def test_the_file_of_error_lines_is_not_the_input(tmp_path: Path, invoke: Invoke) -> None:
    given = write(tmp_path / "todo.errors.jsonl", EXAMPLES.read_bytes())
    failed = invoke("run", given, "-o", tmp_path / "todo.jsonl")
    assert (failed.exit_code, "is the input file" in error_of(failed)) == (2, True)
    assert given.read_bytes() == EXAMPLES.read_bytes()


def test_a_name_that_is_too_long_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shorter"):
        Target(tmp_path / f"{'x' * 240}.jsonl")


def test_a_pipe_is_no_input_by_name(tmp_path: Path, invoke: Invoke) -> None:
    os.mkfifo(tmp_path / "pipe")
    failed = invoke("run", tmp_path / "pipe", "-o", tmp_path / "out.jsonl")
    assert (failed.exit_code, "give - for its name" in error_of(failed)) == (2, True)


def test_a_first_line_too_long_to_look_at_is_left_to_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "FIRST_LINE_BYTES", 1000)
    long, short = b'{"custom_id": "' + b"x" * 2000 + b'"}\n', b'{"url": "/v1/completions"}\n'
    assert Source(write(tmp_path / "a", long), "a").endpoint() == source.DEFAULT_ENDPOINT
    assert Source(write(tmp_path / "b", long + short), "b").endpoint() == "/v1/completions"


def test_a_plan_with_problems_is_one_document(tmp_path: Path, invoke: Invoke) -> None:
    planned = invoke("plan", write(tmp_path / "in.jsonl", b'{"custom_id": "a"}\n'), "--json")
    assert planned.exit_code == 2
    assert json.loads(planned.stdout)["problem_count"] > 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("port = = 1\n", "is not TOML"),
        ('databse_url = "x"\n', "did you mean 'database_url'"),
        ("xyzzy = 1\n", "is no setting: the README lists all"),
    ],
)
def test_a_settings_file_that_is_wrong(content: str, words: str, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "specbatch.toml", content.encode())
    monkeypatch.setitem(Settings.model_config, "toml_file", str(path))
    failed = invoke("jobs")
    assert (failed.exit_code, words in error_of(failed)) == (2, True), failed.stderr


@pytest.mark.parametrize(
    ("name", "url"),
    [("database_url", "postgresql://u:p@h:port/db"), ("redis_url", "redis://h:port"), ("database_url", "postgresql://u:p@[::1]:x/db")],
)
def test_a_port_that_is_no_number(name: str, url: str) -> None:
    with pytest.raises(UsageError, match="is no number"):
        load(**{name: url})


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("database_url", "postgresql://u:p%40x@[::1]:5432/db"),
        ("database_url", "postgresql:///db?host=/run"),
        ("redis_url", "redis+socket:///a:b/c.sock"),
        ("redis_url", "redis://:secret@[::1]/0"),
        ("redis_url", "redis://h"),
    ],
)
def test_addresses_of_services(name: str, url: str) -> None:
    assert getattr(load(**{name: url}), name) == url


def test_an_output_directory_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="cannot be written to"):
        Target(tmp_path / "out.jsonl")


def test_examples_are_three_kinds_of_short_greedy_requests() -> None:
    lines = read_lines(EXAMPLES)
    kinds = [line["custom_id"].rpartition("-")[0] for line in lines]
    assert {kind: kinds.count(kind) for kind in kinds} == {"question": 8, "code": 8, "json": 8}
    assert all(line["body"]["max_tokens"] <= 64 and line["body"]["temperature"] == 0 for line in lines)
    assert all(line["body"]["model"] == "default" and line["url"] == "/v1/chat/completions" for line in lines)


def test_the_meter_forgets_what_is_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed and time left are of the last seconds: a continued batch was once at rest."""
    meter, moments = Meter(), iter((0.0, 1000.0, 1010.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(moments))
    for completed, tokens in ((10, 100), (20, 200), (30, 700)):
        meter.read(reading(completed, tokens))
    assert meter.tokens_per_second() == 50
    assert meter.seconds_left(reading(30, 700)) == 70


def test_the_meter_claims_nothing_before_something_happened() -> None:
    meter = Meter()
    meter.read(reading(0, 0))
    assert meter.tokens_per_second() is None
    assert meter.seconds_left(reading(0, 0)) is None


def reading(completed: int, tokens: int) -> BatchObject:
    job: dict[str, Any] = dict.fromkeys(column.name for column in jobs.columns)
    numbers = {column.name: 0 for column in jobs.columns if column.server_default is not None}
    known = {"id": "batch_x", "endpoint": "/v1/chat/completions", "status": "in_progress", "completion_window": "24h", "input_file_id": "f"}
    moments = {"created_at": 0.0, "expires_at": 86_400.0}
    counts = {"rows": 100, "settled": completed, "succeeded": completed, "generated_tokens": tokens}
    return BatchObject.of(job | numbers | known | moments | counts)
