"""Base classes of test servers: a loopback port, no access log, and visible errors of handlers."""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class LocalServer(ThreadingHTTPServer):
    """Threading HTTP server on a free loopback port."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, handler: type[BaseHTTPRequestHandler]):
        super().__init__(("127.0.0.1", 0), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors of handlers, except closed connections, which killed clients cause."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class QuietHandler(BaseHTTPRequestHandler):
    """HTTP/1.1 handler without an access log."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each response waits 40 ms for the client's delayed ACK of its headers

    def log_message(self, format: str, *arguments: Any) -> None:
        """Discard the line; the servers record requests themselves."""
