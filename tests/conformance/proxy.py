"""A TCP proxy whose connections can be cut, as a network does it."""

from __future__ import annotations

import selectors
import socket
import threading

__all__ = ["Proxy"]


class Proxy:
    """Forwards to an address. `cut` breaks all connections; `open` says whether new ones are accepted."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.open = True
        self.connections = 0
        """How many connections there have been."""
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._waker, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="test-proxy", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # its peer was faster

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._waker.close()
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        self._close_all(selector)
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    else:
                        self._forward(selector, key)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        near, _ = self._listener.accept()
        if not self.open:
            near.close()
            return
        far = socket.create_connection(self._target)
        self.connections += 1
        with self._lock:
            self._pairs.append((near, far))
        selector.register(near, selectors.EVENT_READ, far)
        selector.register(far, selectors.EVENT_READ, near)

    def _forward(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        source, sink = key.fileobj, key.data
        assert isinstance(source, socket.socket)
        try:
            data = source.recv(1 << 16)
            sink.sendall(data)
        except OSError:
            data = b""
        if not data:
            for end in (source, sink):
                try:
                    selector.unregister(end)
                except (KeyError, ValueError):
                    pass  # the other direction was faster
                end.close()

    def _close_all(self, selector: selectors.BaseSelector) -> None:
        for key in list(selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
