# SPDX-License-Identifier: Apache-2.0
"""MLflow: a server, a database, or a folder."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

# Seconds and repetitions of one request, unless the user has set them: its own defaults try for ten minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
# It refuses folders by default, since it prefers databases; whoever names a folder wants one.
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")

import mlflow  # noqa: E402  # it reads the variables above
from mlflow.entities import Metric, Param, RunStatus  # noqa: E402

from mrl.config.schema.logger import LoggerConfig  # noqa: E402
from mrl.store.loggers.sink import SAMPLES, LoggedRun, Sample, flat  # noqa: E402

MAX_METRICS, MAX_PARAMS, MAX_PARAM_LENGTH = 1000, 100, 6000
# They narrate how tables are made and requests repeated; the run's log says once that MLflow fails.
TALKATIVE = ("mlflow", "alembic", "urllib3.connectionpool")


class MlflowSink:
    """One MLflow run over all attempts."""

    def __init__(self, config: LoggerConfig, run: LoggedRun) -> None:
        for name in TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)
        settings = config.mlflow
        uri = settings.tracking_uri
        if uri is None:
            uri = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else f"sqlite:///{run.run_folder}/mlflow.db"
        self._client = mlflow.MlflowClient(uri)
        if known_id := settings.run_id or run.known_id:
            self.run_id = known_id
            self._client.update_run(self.run_id, status=RunStatus.to_string(RunStatus.RUNNING))
        else:
            if found := self._client.get_experiment_by_name(settings.experiment_name):
                experiment = found.experiment_id
            else:
                here = None if uri.startswith(("http:", "https:")) else (Path(run.folder) / "mlflow").as_uri()
                place = settings.artifact_location or here
                experiment = self._client.create_experiment(settings.experiment_name, artifact_location=place)
            self.run_id = self._client.create_run(experiment, run_name=settings.run_name or run.name).info.run_id
            # Parameters never change in MLflow, so those of the first attempt stay.
            params = [Param(name, str(value)[:MAX_PARAM_LENGTH]) for name, value in flat(run.config).items()]
            for first in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self.run_id, params=params[first : first + MAX_PARAMS])
        self.place = f"run {self.run_id} at {uri}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        values = [Metric(name, value, now_ms, step) for name, value in metrics.items()]
        for first in range(0, len(values), MAX_METRICS):
            self._client.log_batch(self.run_id, metrics=values[first : first + MAX_METRICS])

    def log_host(self, metrics: Mapping[str, float], seconds: int) -> None:
        self.log(metrics, seconds)

    def log_samples(self, samples: list[Sample], step: int) -> None:
        self._client.log_text(
            self.run_id, "\n\n".join(sample.block() for sample in samples), f"{SAMPLES}/step_{step}.txt"
        )

    def close(self) -> None:
        self._client.set_terminated(self.run_id)
