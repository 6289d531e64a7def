"""How a route reaches the process's context."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from specbatch.context import Context


def _context(request: Request) -> Context:
    ctx: Context = request.app.state.ctx
    return ctx


Ctx = Annotated[Context, Depends(_context)]
