"""Offline dataset generation: columns in, columns out."""

from specbatch.generation.generate import Generated, generate

__all__ = ["Generated", "generate"]
