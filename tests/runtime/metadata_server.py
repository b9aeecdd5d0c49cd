"""The metadata server of a cloud, as a test plays it."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Metadata:
    """Answers as it is told; refuses who does not show the header, as the clouds do."""

    def __init__(self):
        self.answers = {}  # path -> text, or a status
        self.required = {}
        self.asked = []
        self.on_put = lambda path: None
        metadata = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                metadata.asked.append((self.command, self.path))
                if self.command == "PUT":
                    metadata.on_put(self.path)
                told = metadata.answers.get(f"{self.command} {self.path}", 404)
                shown = {name: self.headers.get(name) for name in metadata.required}
                if self.command == "GET" and shown != metadata.required:
                    told = 401
                self.send_response(told if isinstance(told, int) else 200)
                self.end_headers()
                if isinstance(told, str):
                    self.wfile.write(told.encode())

            do_GET = do_PUT = answer

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
