"""The services behind a URL, through the API that OpenAI's clients use too."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import Any

import httpx

from specbatch.errors import Conflict, InvalidRequest, NotFound, ServiceUnavailable, SpecbatchError, TooLarge
from specbatch.service.batches import NewBatch
from specbatch.settings import DEFAULT_ALIAS
from specbatch.wire import BatchObject, FileObject, ResultObject

TIMEOUT_SECONDS = 60.0
CONNECT_TRIES = 3
RUN_KEY = "specbatch.run"  # in a batch's metadata
PAGE = 100
MOST_PAGES = 10  # of batches that are looked through for one of an interrupted run
ERRORS: dict[int, type[SpecbatchError]] = {400: InvalidRequest, 404: NotFound, 409: Conflict, 413: TooLarge, 422: InvalidRequest}


class Remote:
    model = DEFAULT_ALIAS

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url` with or without /v1. The key is for a gateway in front: the API itself asks for none."""
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        transport = httpx.HTTPTransport(retries=CONNECT_TRIES)
        self.url = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(base_url=f"{self.url}/v1/", headers=headers, timeout=TIMEOUT_SECONDS, transport=transport)

    def upload(self, name: str, chunks: Iterable[bytes]) -> FileObject:
        with tempfile.TemporaryFile() as aside:
            aside.writelines(chunks)
            aside.seek(0)
            return FileObject.model_validate(self._ask("POST", "files", files={"file": (name, aside)}, data={"purpose": "batch"}))

    def delete(self, file_id: str) -> None:
        self._ask("DELETE", f"files/{file_id}")

    def create(self, new: NewBatch, run_key: str | None) -> BatchObject:
        body = new.model_dump(mode="json", exclude_none=True)
        if run_key is not None:
            body["metadata"] = {**(new.metadata or {}), RUN_KEY: run_key}
        return BatchObject.model_validate(self._ask("POST", "batches", json=body))

    def find(self, run_key: str) -> BatchObject | None:
        after: dict[str, Any] = {}
        for _ in range(MOST_PAGES):
            page = self._ask("GET", "batches", params={"limit": PAGE, **after})
            for batch in page["data"]:
                if (batch["metadata"] or {}).get(RUN_KEY) == run_key:
                    return BatchObject.model_validate(batch)
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        return None

    def let_go(self, batch_id: str) -> None:
        """A server's batches keep their metadata: who starts anew asks for none by key."""

    def get(self, batch_id: str) -> BatchObject:
        return BatchObject.model_validate(self._ask("GET", f"batches/{batch_id}"))

    def cancel(self, batch_id: str) -> BatchObject:
        return BatchObject.model_validate(self._ask("POST", f"batches/{batch_id}/cancel"))

    def outcomes(self, batch_id: str, after: int, limit: int) -> list[ResultObject]:
        page = self._ask("GET", f"batches/{batch_id}/results", params={"after": after, "limit": limit})
        return [ResultObject.model_validate(row) for row in page["data"]]

    def attend(self, batch: BatchObject) -> str:
        return ""

    def close(self) -> None:
        self._http.close()

    def _ask(self, method: str, path: str, **request: Any) -> Any:
        try:
            response = self._http.request(method, path, **request)
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            raise ServiceUnavailable(f"{self.url} does not answer: {failure}. Is `specbatch up` running there?") from failure
        try:
            document = response.json()
        except ValueError:
            raise ServiceUnavailable(
                f"{self.url}/v1/{path} answers {response.status_code}, and not in JSON: is it this product's API?"
            ) from None
        if response.is_success:
            return document
        error = document.get("error") or {}
        message = error.get("message") or f"{self.url}/v1/{path} answers {response.status_code}"
        raise ERRORS.get(response.status_code, ServiceUnavailable)(message, code=error.get("code"), param=error.get("param"))
