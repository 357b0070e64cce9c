# SPDX-License-Identifier: Apache-2.0
"""The latest metrics at `http://127.0.0.1:PORT/metrics` of the driver's host, for Prometheus."""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from mrl.config.schema.logger import LoggerConfig
from mrl.store.loggers.sink import LoggedRun, Sample


class PrometheusSink:
    """A gauge for each metric, `mrl_train_loss` for `train/loss`, and `mrl_step`."""

    def __init__(self, config: LoggerConfig, run: LoggedRun) -> None:
        assert config.prometheus_port is not None
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._server, _ = start_http_server(config.prometheus_port, addr="127.0.0.1", registry=self._registry)
        self.run_id, self.place = run.known_id or run.new_id, f"http://127.0.0.1:{config.prometheus_port}/metrics"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._set({**metrics, "step": step})

    def log_host(self, metrics: Mapping[str, float], seconds: int) -> None:
        self._set(metrics)

    def log_samples(self, samples: list[Sample], step: int) -> None: ...

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _set(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            key = "mrl_" + re.sub(r"\W", "_", name, flags=re.ASCII)
            if key not in self._gauges:
                self._gauges[key] = Gauge(key, name, registry=self._registry)
            self._gauges[key].set(value)
