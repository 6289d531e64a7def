"""/v1/files/{id}/content: whole, and in ranges, for downloads that break in the middle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

from specbatch.context import Context
from specbatch.service import files
from tests.server_fixtures import jsonl, line, refused

GOOD = jsonl(line("a"), line("b"))
Upload = Callable[..., str]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("bytes=0-9", GOOD[:10]), ("bytes=10-", GOOD[10:]), ("bytes=-7", GOOD[-7:]), (f"bytes=5-{len(GOOD) + 100}", GOOD[5:])],
)
def test_range(api: TestClient, upload: Upload, asked: str, expected: bytes) -> None:
    file_id = upload(line("a"), line("b"))
    response = api.get(f"/v1/files/{file_id}/content", headers={"Range": asked})
    assert (response.status_code, response.content) == (206, expected)
    assert response.headers["content-range"].endswith(f"/{len(GOOD)}")


def test_range_beyond_the_end(api: TestClient, upload: Upload) -> None:
    file_id = upload(line("a"), line("b"))
    response = api.get(f"/v1/files/{file_id}/content", headers={"Range": f"bytes={len(GOOD)}-"})
    refused(response, 416, "range_not_satisfiable", None)
    assert response.headers["content-range"] == f"bytes */{len(GOOD)}"


def test_malformed_range(api: TestClient, upload: Upload) -> None:
    file_id = upload(line("a"), line("b"))
    refused(api.get(f"/v1/files/{file_id}/content", headers={"Range": "lines=1-2"}), 400, "invalid_range", None)


def test_content_that_is_no_longer_on_disk(api: TestClient, upload: Upload, ctx: Context) -> None:
    file_id = upload(line("a"), line("b"))
    files.path(ctx, file_id).unlink()
    assert "upload it again" in refused(api.get(f"/v1/files/{file_id}/content"), 404, None, "file_id")
