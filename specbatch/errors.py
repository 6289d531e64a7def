"""One tree of errors. Each carries the HTTP status, OpenAI's error code and parameter, and a message that says what to do."""

from __future__ import annotations


class SpecbatchError(Exception):
    """Base of every error that a user may see. `exit_code` follows the CLI's table: 2 bad usage or input, 3 a service is unreachable."""

    status_code = 500
    type = "server_error"
    code: str | None = None
    exit_code = 2

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.code
        self.param = param


class InvalidRequest(SpecbatchError):
    status_code = 400
    type = "invalid_request_error"


class NotFound(SpecbatchError):
    status_code = 404
    type = "invalid_request_error"


class Conflict(SpecbatchError):
    status_code = 409
    type = "invalid_request_error"


class TooLarge(SpecbatchError):
    status_code = 413
    type = "invalid_request_error"


class UsageError(SpecbatchError):
    """Wrong words on the command line or in a setting."""

    status_code = 400


class EngineStartError(SpecbatchError):
    """The engine cannot be started with these settings."""


class ServiceUnavailable(SpecbatchError):
    """Redis, the database or the disk does not answer; nothing was lost, and it can be tried again."""

    status_code = 503
    exit_code = 3
