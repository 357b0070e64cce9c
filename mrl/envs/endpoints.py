# SPDX-License-Identifier: Apache-2.0
"""The engines' OpenAI-compatible endpoints, for reward functions and other programs."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mrl import env

FILE_NAME = "endpoints.json"


@dataclass(frozen=True)
class Endpoints:
    """Addresses of a run's engines and judges (`http://HOST:PORT/...v1` each), and the key to all of them.

    A request may name the model, or leave it out.
    """

    base_urls: list[str]
    api_key: str
    model: str
    gateway_url: str = ""
    gateway_key: str = ""
    judge_urls: dict[str, list[str]] = field(default_factory=dict)
    """Addresses of each judge of section `judges` by its name, one at each gateway."""

    @property
    def judges(self) -> dict[str, str]:
        """Address of each judge, by its name: that at any of the gateways, which share the requests."""
        return {name: random.choice(urls) for name, urls in self.judge_urls.items()}

    def base_url(self, session_id: str) -> str:
        """The engine of a session: the same one for all its requests, sessions spread evenly."""
        return self.base_urls[zlib.crc32(session_id.encode()) % len(self.base_urls)]


def read_endpoints(file: str | Path | None = None) -> Endpoints:
    """The endpoints of a run, from its `endpoints.json`; a reward function of the run need not name the file."""
    found = file or env.MRL_ENDPOINTS.read()
    if found is None:
        raise ValueError(
            "no endpoints: set policy.generation.vllm_cfg.expose_http_server=true, or name the run's endpoints.json"
        )
    try:
        return Endpoints(**json.loads(Path(found).read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"{found} cannot be read: {error}; it is there while the engines of the run are up") from error


def write_endpoints(folder: Path, endpoints: Endpoints) -> None:
    """Writes `endpoints.json` in one step, readable by its owner alone."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".{FILE_NAME}.new"
    new.unlink(missing_ok=True)
    new.touch(mode=0o600)
    new.write_text(json.dumps(asdict(endpoints), indent=1), encoding="utf-8")
    new.replace(folder / FILE_NAME)
