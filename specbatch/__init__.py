"""What a batch job is and may become. Imports neither Celery's worker, nor vLLM, nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbatch.client import Batch, Client
    from specbatch.generation import generate

__all__ = ["Batch", "Client", "generate"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: a worker imports this package and needs neither the client nor pyarrow."""
    if name in ("Batch", "Client"):
        from specbatch import client

        return getattr(client, name)
    if name == "generate":
        from specbatch import generation

        return generation.generate
    raise AttributeError(f"module 'specbatch' has no attribute {name!r}")
