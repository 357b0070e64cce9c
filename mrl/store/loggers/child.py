"""The process of one logger: `python -m mrl.store.loggers.child NAME SOCKET_FD`.

A service that is slow, away or broken costs records of this one logger, never time or the run: the kernel ends this process if a call
takes too long, and the parent drops what the socket cannot hold.
"""

from __future__ import annotations

import importlib
import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from mrl.store.loggers.sink import Opening, Sample, Sink

SINKS = {
    "tensorboard": "mrl.store.loggers.tensorboard:TensorBoardSink",
    "wandb": "mrl.store.loggers.wandb:WandbSink",
    "swanlab": "mrl.store.loggers.swanlab:SwanLabSink",
    "mlflow": "mrl.store.loggers.mlflow:MlflowSink",
}

MAX_MESSAGE_BYTES = 1 << 20
MAX_ERROR_LENGTH = 500
# Two attempts of W&B at its server, then its files; or the tables of a new database on a busy host.
OPEN_TIMEOUT_S = 180
CALL_TIMEOUT_S = 120
CLOSE_TIMEOUT_S = 30
# A service that was away is asked again this often.
REOPEN_INTERVAL_S = 60.0


# JSON objects as the parent writes them; a wrong one is our own mistake.
Message = dict[str, Any]


@dataclass
class Service:
    """A sink, as far as it could be opened."""

    name: str
    opening: Opening
    sink: Sink | None = None
    next_try: float = 0.0
    """Monotonic time from which a service that could not be opened is asked again."""

    def record(self, message: Message) -> dict[str, object]:
        """Hands one message to the sink, and returns what the parent should know."""
        reply: dict[str, object] = {}
        if self.sink is None and time.monotonic() >= self.next_try:
            self.next_try = time.monotonic() + REOPEN_INTERVAL_S
            with time_limit(OPEN_TIMEOUT_S):
                reply = attempt(self._open)
        sink = self.sink
        if "open" in message:
            return reply
        if sink is None:
            return {"is_lost": True} | reply
        with time_limit(CALL_TIMEOUT_S):
            failure = attempt(lambda: deliver(sink, message))
        return reply | failure | ({"is_lost": True} if failure else {})

    def _open(self) -> dict[str, object]:
        module_name, _, class_name = SINKS[self.name].partition(":")
        self.sink = sink = getattr(importlib.import_module(module_name), class_name)(self.opening)
        return {"run_id": sink.run_id, "place": sink.place}


def main() -> None:
    """Records messages until the parent hangs up."""
    name, socket_fd = sys.argv[1:]
    with socket.socket(fileno=int(socket_fd)) as connection:
        service = serve(connection, name)
        # Whoever waits for this process waits a little longer.
        signal.alarm(CLOSE_TIMEOUT_S)
        if service is not None and service.sink is not None:
            sink = service.sink
            send(connection, {"is_last": True} | attempt(lambda: sink.close() or {}))


def serve(connection: socket.socket, name: str) -> Service | None:
    """Records one message after another; returns when the other side closes or is gone."""
    service = None
    for message in messages(connection):
        if service is None:
            service = Service(name, Opening(**message["open"]))
        send(connection, service.record(message))
    return service


def messages(connection: socket.socket) -> Iterator[Message]:
    """What the parent sends. Without a deadline: a logger waits for work as long as the run lives."""
    while True:
        try:
            data = connection.recv(MAX_MESSAGE_BYTES)
        except ConnectionResetError:
            return
        if not data:
            return
        yield json.loads(data)


def send(connection: socket.socket, reply: dict[str, object]) -> None:
    """Answers the parent, if it still lives."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.send(json.dumps(reply).encode())


def deliver(sink: Sink, message: Message) -> dict[str, object]:
    """Calls what the message asks for."""
    if "samples" in message:
        sink.log_samples([Sample(**sample) for sample in message["samples"]], message["step"])
    elif "seconds" in message:
        sink.log_host(message["metrics"], message["seconds"])
    else:
        sink.log(message["metrics"], message["step"])
    return {}


def attempt(call: Callable[[], dict[str, object]]) -> dict[str, object]:
    """What `call` gives back, or what it failed with.

    Catches everything: each library raises what it likes, and nothing that a logger does may matter to the run.
    """
    try:
        return call()
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_LENGTH]}


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """The kernel ends this process if the block takes longer: a call that hangs inside a library cannot be ended otherwise."""
    signal.alarm(seconds)
    yield
    signal.alarm(0)


if __name__ == "__main__":
    main()
