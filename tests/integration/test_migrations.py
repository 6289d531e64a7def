"""Both databases, from nothing to this release's tables and back."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from specbatch.errors import ServiceUnavailable
from specbatch.migration import check_database, transaction, upgrade_database
from specbatch.models import metadata
from specbatch.settings import Settings

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def empty(empty_database_url: str) -> Settings:
    return Settings(database_url=empty_database_url)


@pytest.fixture
def migrated(empty: Settings) -> Settings:
    upgrade_database(empty)
    return empty


@pytest.fixture
def alembic() -> Config:
    """As alembic.ini says, without its logging."""
    config = Config()
    config.set_main_option("script_location", str(REPOSITORY / "migrations"))
    config.set_main_option("path_separator", "os")
    return config


def tables(settings: Settings) -> set[str]:
    with transaction(settings) as connection:
        return set(sa.inspect(connection).get_table_names())


def test_upgrade_makes_every_table(migrated: Settings) -> None:
    assert tables(migrated) == {*metadata.tables, "alembic_version"}


def test_models_and_migrations_agree(migrated: Settings, alembic: Config) -> None:
    """`alembic check`: a model that changed without a revision fails here, types and server defaults included."""
    with transaction(migrated) as connection:
        alembic.attributes["connection"] = connection
        command.check(alembic)


def test_a_column_without_a_revision_is_noticed(migrated: Settings, alembic: Config) -> None:
    with transaction(migrated) as connection:
        connection.exec_driver_sql("ALTER TABLE jobs DROP COLUMN model")
        alembic.attributes["connection"] = connection
        with pytest.raises(Exception, match="New upgrade operations detected"):
            command.check(alembic)


def test_downgrade_leaves_nothing(migrated: Settings, alembic: Config) -> None:
    with transaction(migrated) as connection:
        alembic.attributes["connection"] = connection
        command.downgrade(alembic, "base")
    assert tables(migrated) == {"alembic_version"}


def test_upgrade_keeps_what_is_there(migrated: Settings) -> None:
    files = metadata.tables["files"]
    with transaction(migrated) as connection:
        connection.execute(files.insert().values(id="file-1", purpose="batch", filename="a.jsonl", bytes=1, created_at=1.0))
    upgrade_database(migrated)
    with transaction(migrated) as connection:
        assert connection.scalar(sa.select(files.c.filename)) == "a.jsonl"


def test_a_failed_upgrade_leaves_nothing_half_made(empty: Settings) -> None:
    with transaction(empty) as connection:
        connection.exec_driver_sql("CREATE TABLE shards (id INTEGER)")  # one of the last tables is in the way
    with pytest.raises(ServiceUnavailable, match="already exists"):
        upgrade_database(empty)
    assert tables(empty) == {"shards"}


def test_many_processes_upgrade_at_once(empty: Settings) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(4) as pool:
        pool.map(upgrade_database, [empty] * 8, chunksize=1)
        pool.close()
        pool.join()
    check_database(empty)


def test_check_passes_after_upgrade(migrated: Settings) -> None:
    check_database(migrated)


def test_check_says_what_to_run(empty: Settings) -> None:
    with pytest.raises(ServiceUnavailable, match="specbatch db upgrade") as refused:
        check_database(empty)
    assert refused.value.code == "database_not_migrated"


def test_check_creates_no_file(tmp_path: Path) -> None:
    with pytest.raises(ServiceUnavailable):
        check_database(Settings(data_dir=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_an_older_database_is_named(migrated: Settings) -> None:
    with transaction(migrated) as connection:
        connection.exec_driver_sql("DELETE FROM alembic_version")
    with pytest.raises(ServiceUnavailable, match="without specbatch's tables, and this release needs 0002"):
        check_database(migrated)


def test_a_newer_database_is_left_alone(migrated: Settings) -> None:
    with transaction(migrated) as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    for use in (check_database, upgrade_database):
        with pytest.raises(ServiceUnavailable, match="revision 9999, which this release does not know: upgrade specbatch"):
            use(migrated)


@pytest.mark.parametrize("use", [check_database, upgrade_database])
def test_an_unreachable_database_is_named_without_its_password(use: Callable[[Settings], None]) -> None:
    settings = Settings(database_url="postgresql://someone:secret@127.0.0.1:1/specbatch")
    with pytest.raises(ServiceUnavailable, match=r"127\.0\.0\.1:1/specbatch does not answer") as refused:
        use(settings)
    assert "secret" not in refused.value.message
    assert refused.value.exit_code == 3
