# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.view RUN [RUN2 ...]`: serves the page of runs on this host, follows live ones. `--port`: the port."""

from __future__ import annotations

import argparse
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

from mrl.config.command_line import number
from mrl.config.secrets import start_logging
from mrl.ops.view.dumps import list_dumps, read_dump, read_evaluations
from mrl.ops.view.page import compressed, data_of, page
from mrl.ops.view.run_data import newest_change, owner_state, run_data
from mrl.ops.view.timeline import list_windows, read_timelines
from mrl.store.run_files import METRICS, Json

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
TOKEN_BYTES = 16
# A silent run is read again, because silence may be the news.
LOOK_AGAIN_S = 60


class Runs:
    """Run folders that the server shows."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders

    def version(self) -> str:
        """Changes whenever the page has something new."""
        marks: list[object] = []
        for folder in self.folders:
            is_running = owner_state(folder) == "running"
            marks += [newest_change(folder), is_running, int(time.time() / LOOK_AGAIN_S) if is_running else 0]
        return "-".join(str(mark) for mark in marks)

    def page(self) -> bytes:
        runs = [run_data(folder, has_rollouts=False) for folder in self.folders]
        return page([run | {"version": self.version()} for run in runs], is_live=True).encode()

    def data(self, seen: str) -> bytes | None:
        """Returns the page's data, compressed; None if the caller has this version."""
        version = self.version()
        if seen == version:
            return None
        runs: list[Json] = [run_data(folder, has_rollouts=False) | {"version": version} for folder in self.folders]
        return data_of(runs, is_live=True)

    def timeline(self, index: str, step: str) -> bytes | None:
        """The lanes of a step, compressed; None if it was not recorded."""
        found = list_windows(folder) if (folder := self._folder(index)) else {}
        windows = {str(number): window for number, window in found.items()}
        return compressed({**read_timelines([windows[step]])}) if step in windows else None

    def rollouts(self, index: str, name: str) -> bytes | None:
        """All rollouts of a dump, compressed; None if there is none of this name."""
        dumps = {dump.name: dump for dump in list_dumps(folder)} if (folder := self._folder(index)) else {}
        return compressed(read_dump(dumps[name].path)) if name in dumps else None

    def _folder(self, index: str) -> Path | None:
        # What a caller says is compared with what there is, and never read as a number, of which Python bounds the
        # digits.
        return {str(number): folder for number, folder in enumerate(self.folders)}.get(index)


def server_of(runs: Runs, port: int, token: str) -> ThreadingHTTPServer:
    """A server on localhost that answers below `/TOKEN/` alone. OSError: the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(ConnectionError):  # who asked has gone
                self._serve()

        def _serve(self) -> None:
            # Nothing is parsed of what a caller may send as a host.
            path, _, query = self.path.partition("?")
            _, given, *rest = [*path.split("/"), "", ""]
            if not secrets.compare_digest(given.encode(), token.encode()):
                self.send_error(403, "the address needs the token that mrl.view printed")
                return
            match list(filter(None, rest)):
                case []:
                    self._answer(runs.page(), "text/html; charset=utf-8")
                case ["data"]:
                    self._answer(runs.data(parse_qs(query).get("seen", [""])[0]), "application/octet-stream", none=204)
                case ["rollouts", index, name]:
                    self._answer(runs.rollouts(index, name), "application/octet-stream", none=404)
                case ["timeline", index, step]:
                    self._answer(runs.timeline(index, step), "application/octet-stream", none=404)
                case _:
                    self.send_error(404)

        def _answer(self, content: bytes | None, kind: str, *, none: int = 404) -> None:
            self.send_response(200 if content is not None else none)
            for name, value in (
                ("Content-Type", kind),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
            ):
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, format: str, *arguments: object) -> None:
            logger.debug("%s", self.command)

    return ThreadingHTTPServer((HOST, port), Handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0 after Ctrl-C, or 2 with one message if the input is at fault."""
    parser = argparse.ArgumentParser(prog="python -m mrl.view", description="Serve the page of runs on this host.")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders; several are laid over each other"
    )
    parser.add_argument(
        "--port",
        type=number(int, least=0, most=65535),
        default=8777,
        help="of 127.0.0.1; 0 takes a free one (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    start_logging()
    for folder in options.runs:
        if not (folder / METRICS).is_file() and not (folder / "config.yaml").is_file() and not read_evaluations(folder):
            logger.error(
                "%s is no run folder: it has neither %s nor config.yaml; give the folder checkpointing.checkpoint_dir",
                folder,
                METRICS,
            )
            return 2
    token, runs = secrets.token_urlsafe(TOKEN_BYTES), Runs([folder.resolve() for folder in options.runs])
    try:
        runs.page()
    except (ValueError, RecursionError) as error:
        logger.error("%s", error)
        return 2
    try:
        server = server_of(runs, options.port, token)
    except OSError as error:
        logger.error("--port %d: %s; choose another, or 0", options.port, error)
        return 2
    here = f"{HOST}:{server.server_port}"
    logger.info(
        "http://%s/%s/  (Ctrl-C ends; from another host: ssh -L %d:%s HOST)", here, token, server.server_port, here
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
    return 0
