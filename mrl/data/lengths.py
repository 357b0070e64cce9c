"""How long rollouts will probably be, so that the longest begin first. Pure bookkeeping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mrl.types import Prompt


class LengthHints:
    """Expects of a prompt what its rollouts had in an earlier epoch, else what those of its environment have on average.

    Longest first is the classic rule for short tails (Graham, 1969): a long rollout that begins last is alone on its engine at the end.
    """

    def __init__(self) -> None:
        self._of_prompt: dict[str, float] = {}
        self._of_environment: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))

    def note(self, prompt: Prompt, lengths: Sequence[int]) -> None:
        """The rollouts of a prompt had these lengths, in tokens."""
        self._of_prompt[prompt.prompt_id] = sum(lengths) / len(lengths)
        total, count = self._of_environment[prompt.env_name]
        self._of_environment[prompt.env_name] = (total + sum(lengths), count + len(lengths))

    def expected(self, prompt: Prompt) -> float:
        """Expected length of a rollout, in tokens; 0 where nothing is known."""
        if prompt.prompt_id in self._of_prompt:
            return self._of_prompt[prompt.prompt_id]
        total, count = self._of_environment.get(prompt.env_name, (0, 0))
        return total / count if count else 0.0

    def longest_first(self, asked: Sequence[tuple[int, Prompt]]) -> list[tuple[int, Prompt]]:
        """The (epoch, prompt) pairs by expected length of their rollouts, equals by length of the prompt, both falling; else as given."""
        return sorted(asked, key=lambda pair: (-self.expected(pair[1]), -len(pair[1].token_ids)))
