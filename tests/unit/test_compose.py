"""docker-compose.yml, read as data: it is checked against the schema by hand (CONTRIBUTING.md), and these are the properties to keep."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from specbatch.cli import app
from specbatch.settings import Settings

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = ("migrate", "api", "reconciler", "worker")
LONG_RUNNING = sorted(SERVICES.keys() - {"migrate"})


def conditions(service: str) -> dict[str, str]:
    return {name: rule["condition"] for name, rule in SERVICES[service]["depends_on"].items()}


def test_the_services() -> None:
    assert set(SERVICES) == {"valkey", "postgres", *OURS}


@pytest.mark.parametrize("service", LONG_RUNNING)
def test_each_is_watched_and_restarted(service: str) -> None:
    assert SERVICES[service]["healthcheck"]["test"]
    assert SERVICES[service]["restart"] == "unless-stopped"


@pytest.mark.parametrize("service", ["api", "reconciler", "worker"])
def test_each_waits_for_the_tables_and_the_queue(service: str) -> None:
    assert conditions(service) == {
        "migrate": "service_completed_successfully",
        "postgres": "service_healthy",
        "valkey": "service_healthy",
    }


def test_the_migration_runs_once_when_the_database_answers() -> None:
    assert conditions("migrate") == {"postgres": "service_healthy"}
    assert SERVICES["migrate"]["restart"] == "no"


def test_the_queue_is_kept_and_evicts_nothing() -> None:
    command = " ".join(SERVICES["valkey"]["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command


def test_api_and_reconciler_share_the_files() -> None:
    assert SERVICES["api"]["volumes"] == SERVICES["reconciler"]["volumes"] == ["files:/var/lib/specbatch"]


def test_what_must_outlive_a_container_is_in_a_named_volume() -> None:
    used = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert used == set(COMPOSE["volumes"])


def test_the_worker_reserves_a_gpu() -> None:
    (device,) = SERVICES["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_a_stopping_worker_has_time_to_finish() -> None:
    grace = int(SERVICES["worker"]["stop_grace_period"].removesuffix("s"))
    assert grace >= 2 * Settings().stop_seconds


def test_no_secret_is_written_down() -> None:
    secrets = set(re.findall(r"\$\{(\w+):\?", TEXT))
    assert secrets == {"POSTGRES_PASSWORD", "REDIS_PASSWORD"}
    assert not re.search(r"\$\{(POSTGRES_PASSWORD|REDIS_PASSWORD)(?!:\?)", TEXT), "a password with a default"
    example = (REPOSITORY / ".env.example").read_text()
    assert {line for line in example.splitlines() if line and not line.startswith("#")} == {f"{name}=" for name in secrets}


def test_the_api_is_not_open_to_the_network() -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES["api"]["ports"])
    for service in SERVICES.keys() - {"api"}:
        assert all(port.startswith("${SERVICES_ADDRESS:-127.0.0.1}:") for port in SERVICES[service].get("ports", []))


def test_other_machines_reach_the_database_and_the_queue() -> None:
    assert {service for service in SERVICES if "ports" in SERVICES[service]} == {"api", "postgres", "valkey"}
    assert "${POSTGRES_HOST:-postgres}:5432" in COMPOSE["x-environment"]["SPECBATCH_DATABASE_URL"]
    assert "${REDIS_HOST:-valkey}:6379" in COMPOSE["x-environment"]["SPECBATCH_REDIS_URL"]


@pytest.mark.parametrize("service", OURS)
def test_each_command_exists(service: str) -> None:
    command: Any = get_command(app)
    for word in SERVICES[service]["command"]:
        command = command.commands[word]


@pytest.mark.parametrize("service", OURS)
def test_each_setting_exists(service: str) -> None:
    ours = {name.removeprefix("SPECBATCH_").lower() for name in SERVICES[service]["environment"] if name.startswith("SPECBATCH_")}
    assert ours
    assert ours <= set(Settings.model_fields)


def test_each_image_has_its_stage() -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    assert {SERVICES[service]["build"]["target"] for service in OURS} <= set(stages)
