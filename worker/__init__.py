"""Celery workers that feed shards of rows to an engine."""
