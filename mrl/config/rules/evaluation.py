"""Whether there is something to ask, and whether the score can be computed from the answers."""

from __future__ import annotations

from mrl.config.schema.run import RunConfig


def find_evaluation_problems(config: RunConfig) -> list[str]:
    """A problem for every rule of an evaluation that a training run need not follow."""
    problems = []
    if not config.data.has_validation:
        problems.append("data.validation=null: there is nothing to ask; give data.validation.data_path")
    if config.eval.k_value > config.eval.num_tests_per_prompt:
        problems.append(
            f"eval.k_value={config.eval.k_value}: eval.num_tests_per_prompt={config.eval.num_tests_per_prompt} answers cannot show what "
            f"more would; raise eval.num_tests_per_prompt, or lower it"
        )
    return problems
