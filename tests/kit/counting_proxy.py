"""Counts the bytes that go through it, to see what a network would carry."""

import socket
import threading
from contextlib import suppress


class CountingProxy:
    """Listens on loopback and passes everything on, there and back. Use it as a context."""

    def __init__(self):
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.target, self._open, self._counts = None, [self._listening], {}

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error):
        for one in self._open:
            one.close()

    @property
    def bytes(self):
        return sum(self._counts.values())

    def _accept(self):
        with suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                self._open.append(here)
                self._connect(here)

    def _connect(self, here):
        host, _, port = self.target.rpartition(":")
        try:
            there = socket.create_connection((host, int(port)))
        except OSError:
            here.close()
            return
        self._open.append(there)
        for source, sink in ((here, there), (there, here)):
            threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source, sink):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._counts[source] = self._counts.get(source, 0) + len(data)
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
