"""Offline dataset generation: columns in, columns out."""

from specbatch.generation.generated import Generated, generate

__all__ = ["Generated", "generate"]
