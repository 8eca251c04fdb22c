"""A middlebox between two programs of this host, which forwards TCP connections, and can hold what one side says or cut it off."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

_NO_LINGER = struct.pack("ii", 1, 0)


class TcpProxy:
    """Connects whoever calls its ``port`` with ``target_port``. The side that is not cut off hears nothing any more."""

    def __init__(self, target_port: int) -> None:
        self.refuses = False  # whoever calls from now on is reset
        self._target_port = target_port
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._cut: set[socket.socket] = set()
        self.callers_pass = threading.Event()  # what callers say; while it is clear, that stays here
        self.targets_pass = threading.Event()  # likewise
        self.callers_pass.set()
        self.targets_pass.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def reset_callers(self) -> None:
        for caller, _ in self._pairs:
            self._reset(caller)

    def reset_targets(self) -> None:
        for _, target in self._pairs:
            self._reset(target)

    def close(self) -> None:
        self._listener.close()
        self.callers_pass.set()
        self.targets_pass.set()
        self.reset_callers()
        self.reset_targets()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                if self.refuses:
                    self._reset(caller)
                    continue
                try:
                    target = socket.create_connection(("127.0.0.1", self._target_port))
                except OSError:
                    self._reset(caller)
                    continue
                self._pairs.append((caller, target))
                for way in ((caller, target, self.callers_pass), (target, caller, self.targets_pass)):
                    threading.Thread(target=self._forward, args=way, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, may_pass: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                may_pass.wait()
                sink.sendall(piece)
            if source not in self._cut:
                sink.shutdown(socket.SHUT_WR)

    def _reset(self, side: socket.socket) -> None:
        self._cut.add(side)
        with contextlib.suppress(OSError):
            side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            side.shutdown(socket.SHUT_RD)  # wakes its thread, which holds the descriptor
        side.close()
