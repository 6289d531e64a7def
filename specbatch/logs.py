"""One line an event, on standard error; other people's chatter from warning up."""

from __future__ import annotations

import logging

from specbatch.settings import Settings

OURS = ("specbatch", "api", "worker")


def configure(settings: Settings) -> None:
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(settings.log_level.upper())
