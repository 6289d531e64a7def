"""What the routes take and answer, beside the objects of specbatch.wire."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

from fastapi import Path, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from specbatch.errors import InvalidRequest, NotFound
from specbatch.lines import ENDPOINTS
from specbatch.service.batches import NewBatch
from specbatch.wire import WINDOW_SECONDS, BatchObject, FileObject, ResultObject


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is not 2xx."""

    error: Error


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is at fault; `param` and `code` say where and how."},
    "5XX": {"model": ErrorBody, "description": "The server is at fault, or a service behind it does not answer: try again."},
}


def _plain(value: str) -> bool:
    """Ids never hold anything else, and a database may refuse to be asked for it (PostgreSQL: NUL)."""
    return len(value) <= 64 and value.isascii() and value.replace("-", "").replace("_", "").isalnum()


def _input_file_id(value: str) -> str:
    if not _plain(value):
        raise InvalidRequest(f"No such File object: {value!r}", code="invalid_value", param="input_file_id")
    return value


class CreateBatch(NewBatch):
    """OpenAI's parameters, of which it requires three, and ours."""

    model_config = ConfigDict(extra="forbid")
    input_file_id: Annotated[str, AfterValidator(_input_file_id)]
    endpoint: str = Field(json_schema_extra={"enum": list(ENDPOINTS)})
    completion_window: str = Field(json_schema_extra={"enum": list(WINDOW_SECONDS)})


class Identified(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", FileObject, BatchObject)


class Listing(BaseModel, Generic[Item]):
    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, found: list[Item], limit: int) -> Listing[Item]:
        """A page of at most `limit` objects out of `found`, which holds one more where there are more."""
        data = found[:limit]
        return cls(data=data, first_id=data[0].id if data else None, last_id=data[-1].id if data else None, has_more=len(found) > limit)


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class ResultPage(BaseModel):
    """Outcomes in the order they were settled. `status` is the batch's: when it has ended and nothing more comes, all was read."""

    object: Literal["list"] = "list"
    data: list[ResultObject]
    last_sequence: int
    has_more: bool
    status: str


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """`redis` is null where this process knows none; without it batches are accepted and wait."""

    status: Literal["ready", "degraded"]
    database: str
    disk: str
    redis: str | None


def _file_id(value: str) -> str:
    if not _plain(value):
        raise NotFound(f"No such File object: {value!r}", param="id")
    return value


def _batch_id(value: str) -> str:
    if not _plain(value):
        raise NotFound(f"No batch found with id {value!r}.", param="id")
    return value


FileId = Annotated[str, Path(), AfterValidator(_file_id)]
BatchId = Annotated[str, Path(), AfterValidator(_batch_id)]
_AFTER = Query(description="The id of the last object of the page before.")
AfterFile = Annotated[str | None, _AFTER, AfterValidator(lambda id_: id_ and _file_id(id_))]
AfterBatch = Annotated[str | None, _AFTER, AfterValidator(lambda id_: id_ and _batch_id(id_))]
