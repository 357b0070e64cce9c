# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.evaluate CONFIG|DIR [a.b=c ...]`: scores a model on held-out prompts by pass@k and majority.

DIR is a run folder (its newest checkpoint), one of its step_N folders, or a Hugging Face folder (`--config` then gives
data and sampling).
"""

from __future__ import annotations

import sys

from mrl.signals import take_over

if __name__ == "__main__" and "--check" not in sys.argv:
    take_over()

from mrl import check
from mrl.config.secrets import run_entry

if __name__ == "__main__" and check.OPTION in sys.argv:
    # Before the imports below, which take longer than a check and need libraries that a login node may lack.
    sys.exit(run_entry(lambda: check.check_evaluation(check.parse_evaluation(None))))

import asyncio
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from conversion.convert import convert_mcore_to_hf
from mrl.check import Target, find_target
from mrl.cluster.errors import ActorLost, DeadlineExceeded, NoCluster
from mrl.cluster.session import start_engines
from mrl.config.files import find_config
from mrl.config.load import load_run
from mrl.config.schema.run import RunConfig
from mrl.data.prompts import PromptData, load_prompts, validation_sampling
from mrl.loop.preflight import check_start
from mrl.store.console import rollout_progress
from mrl.store.evaluations import ALL, note_on_rewards, scores_by_environment, table_lines, write_results
from mrl.store.identity import with_template_date
from mrl.store.loggers.thread import exit_with
from mrl.types import RolloutGroup

logger = logging.getLogger(__name__)

EVALUATION_EPOCH = -1
WEIGHT_VERSION = 1


async def evaluate(config: RunConfig, data: PromptData, *, log_folder: Path) -> list[RolloutGroup]:
    """Samples answers to every held-out prompt as in validation, from the model as vLLM loads it, and judges them."""
    asked = [(EVALUATION_EPOCH, prompt) for prompt in data.validation]
    num_answers = config.eval.num_tests_per_prompt
    sampling = validation_sampling(data.sampling, config.policy.generation)
    async with start_engines(config, weight_version=WEIGHT_VERSION, log_folder=log_folder) as collector:
        with rollout_progress(len(asked) * num_answers) as progress:
            groups = collector.ask(asked, sampling, num_generations=num_answers, weight_version=WEIGHT_VERSION)

            def show() -> None:
                progress.update(sum(len(group.rollouts) for group in groups) - progress.n)

            await collector.wait(lambda: all(group.num_missing == 0 for group in groups), show)
        judged, _ = await collector.judge(groups)
    return judged


@contextmanager
def model_overrides(target: Target) -> Iterator[list[str]]:
    """The overrides that point a config at the target's model. A checkpoint is exported for the `with` block."""
    if target.checkpoint is None:
        yield target.model_overrides()
        return
    with tempfile.TemporaryDirectory(dir=target.checkpoint.parent, prefix=".evaluated-") as folder:
        exported = Path(folder) / "model"
        logger.info("Exporting %s", target.checkpoint)
        convert_mcore_to_hf(target.checkpoint, exported)
        yield replace(target, model=exported.absolute()).model_overrides()


def report(config: RunConfig, path: Path, groups: Sequence[RolloutGroup], *, model: str) -> None:
    """Logs the scores and writes them to a file, with the name by which the user knows the `model`."""
    k, metric = config.eval.k_value, config.eval.metric.replace("k", str(config.eval.k_value))
    scores = scores_by_environment(groups, k=k)
    if metric not in scores[ALL]:
        logger.warning("eval.metric=%s: no environment here extracts answers that could be counted", config.eval.metric)
    for line in table_lines(scores, first=metric):
        logger.info("%s", line)
    if note := note_on_rewards(groups):
        logger.info("%s", note)
    described: dict[str, object] = {
        "model": model,
        "metric": metric,
        "k": k,
        "seed": config.eval.seed,
    }
    write_results(path, described=described, scores=scores, groups=groups)
    logger.info("Results: %s", path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0; 2 with one clear message if the input is at fault; 1 if the attempt failed."""
    options = check.parse_evaluation(arguments)
    if options.check:
        return check.check_evaluation(options)
    name, *overrides = options.words
    try:
        target = find_target(name, options.config)
        with model_overrides(target) as model:
            config, migration = load_run(
                find_config(target.config), [*model, *overrides], to_evaluate=True, secrets=options.secrets
            )
            migration.log()
            config = with_template_date(check_start(config, trains=False))
            data = load_prompts(config)
            folder = Path(config.evaluation_folder).absolute()
            log_folder = folder / "logs"
            log_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            asked = str(target.checkpoint.resolve()) if target.checkpoint is not None else config.policy.model_name
            groups = asyncio.run(evaluate(config, data, log_folder=log_folder))
            report(config, folder / f"{target.name}.json", groups, model=asked)
    except ValueError as error:
        logger.error("%s", error)
        return 2
    except (ActorLost, DeadlineExceeded, NoCluster) as error:
        logger.error("The attempt ended: %s. Logs of the actors: %s", error, log_folder)
        return 1
    return 0


if __name__ == "__main__":
    exit_with(main)
