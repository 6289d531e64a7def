"""Requests made from our own OpenAPI document, right ones and wrong ones, against the running product."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import one_of
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from tests.server_fixtures import CHAT, Server, jsonl, line

SHORT, LONG = 20, 400  # examples of each of the operations: LONG makes more than 5,000
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def known(server: Server) -> dict[str, str]:
    """Ids that exist: random ones alone would only ever be refused."""
    url = f"{server.url}/v1"
    uploaded = httpx.post(f"{url}/files", files={"file": ("in.jsonl", jsonl(line("a")))}, data={"purpose": "batch"})
    file_id = uploaded.raise_for_status().json()["id"]
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    return {"file_id": file_id, "batch_id": httpx.post(f"{url}/batches", json=body).raise_for_status().json()["id"]}


def fuzz(case: Case[Any], known: dict[str, str]) -> None:
    for name, value in case.path_parameters.items():
        if name in known and case.method != "DELETE" and len(str(value)) % 2:
            case.path_parameters[name] = known[name]
    if isinstance(case.body, dict) and len(str(case.body.get("input_file_id", ""))) % 2:
        case.body["input_file_id"] = known["file_id"]
    response = case.call(timeout=60)
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    case.validate_response(response, checks=CHECKS)


def fuzz_all(server: Server, known: dict[str, str], subtests: pytest.Subtests, examples: int) -> None:
    for found in schemathesis.openapi.from_url(f"{server.url}/openapi.json").get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        kinds = [operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)]

        @given(case=one_of(kinds))
        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def run(case: Case[Any]) -> None:
            fuzz(case, known)

        with subtests.test(operation.label):
            run()


def test_no_request_breaks_the_server(server: Server, known: dict[str, str], subtests: pytest.Subtests) -> None:
    fuzz_all(server, known, subtests, SHORT)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_no_request_of_thousands_breaks_the_server(server: Server, known: dict[str, str], subtests: pytest.Subtests) -> None:
    fuzz_all(server, known, subtests, LONG)
