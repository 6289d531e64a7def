"""The command line. Each command reads its settings, calls the service, and shows the outcome: as a table, or as JSON with --json."""

from specbatch.cli.app import app

__all__ = ["app"]
