"""The application: routes, error shape and limits around one Context."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from api import errors
from api.limits import BodyLimit
from api.routes import batches, files, health, speculation
from api.schemas import ERRORS
from specbatch.context import Context


def create_app(ctx: Context) -> FastAPI:
    """The API over an open context, which the caller closes. Its routes find it as `request.app.state.ctx`."""
    app = FastAPI(
        title="specbatch",
        description="OpenAI's Batch and Files API, answered by vLLM with speculative decoding.",
        version=version("specbatch"),
        responses=ERRORS,
        redirect_slashes=False,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.state.ctx = ctx
    errors.register(app)
    app.add_middleware(BodyLimit, settings=ctx.settings)
    for routes in (files.router, batches.router, speculation.router, health.router):
        app.include_router(routes)
    return app
