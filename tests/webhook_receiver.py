"""A server on this machine that receives webhooks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Receiver:
    """Answers with the statuses it was given, then with 204; keeps what came."""

    def __init__(self) -> None:
        self.came: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["content-length"]))
                receiver.came.append(({name.lower(): value for name, value in self.headers.items()}, content))
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 204)
                self.send_header("location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"

    def events(self) -> list[Any]:
        return [json.loads(content) for _, content in self.came]


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        thread.join()
        receiver.server.server_close()
