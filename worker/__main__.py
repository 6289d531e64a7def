"""`python -m worker`: a worker with the settings of the environment."""

from __future__ import annotations

import sys

from specbatch import logs, migration
from specbatch.context import opened
from specbatch.embedded import prepare, valkey
from specbatch.errors import SpecbatchError
from specbatch.processes import exit_with_parent
from specbatch.settings import load
from worker.app import work


def main() -> int:
    try:
        settings = load()
        logs.configure(settings)
        exit_with_parent()
        prepare(settings)
        migration.check_database(settings)
        with valkey(settings) as redis_url, opened(settings, redis_url) as ctx:
            work(ctx, redis_url)
    except SpecbatchError as failure:
        print(f"specbatch: error: {failure.message}", file=sys.stderr)
        return failure.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
