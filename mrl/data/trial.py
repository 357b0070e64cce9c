# SPDX-License-Identifier: Apache-2.0
"""A trial of a chat template, which comes with a model's folder and is a program: it may never end, or fill the memory."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.config.errors import Unchecked
from mrl.data.chat import load_tokenizer, use_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mrl.config.schema.run import RunConfig

# Of the processor, so that a busy host changes nothing; templates take milliseconds.
CPU_S = 5
MEMORY_BYTES = 2**31
"""On top of what this process has."""

# A child that neither computes nor ends, which a template cannot bring about.
STUCK_S = 300.0
POLL_S = 0.005

_USER = {"role": "user", "content": "What is 12+30?"}
_ANSWER = {"role": "assistant", "content": "42"}
CONVERSATIONS = ([_USER], [{"role": "system", "content": "Be brief."}, _USER], [_USER, _ANSWER, _USER], [_USER, _ANSWER])


def find_bad_template(config: RunConfig) -> list[str]:
    """Says that the chat template of a run, if its tokenizer is on this host, cannot be used, or could not be tried."""
    folder = Path(config.policy.tokenizer.name)
    if not (folder / "tokenizer.json").is_file():
        return []
    try:
        tokenizer = load_tokenizer(str(folder))
    except Exception as error:  # the tokenizers library raises what it likes
        return [
            Unchecked(f"policy.tokenizer.name={folder}: its chat template; the tokenizer cannot be read: {type(error).__name__}: {error}")
        ]
    try:
        use_chat_template(tokenizer, config.policy.tokenizer)
        try_template(tokenizer, config.policy.tokenizer.chat_template_kwargs)
    except ValueError as error:
        return [str(error)]
    return []


def try_template(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, object] | None) -> None:
    """Renders a few short conversations in a child. ValueError: that does not end, or takes more memory than any template needs.

    What the template refuses is told with the rows that it refuses.
    """
    if (child := os.fork()) == 0:
        code = 1
        try:
            _render_within_limits(tokenizer, dict(template_kwargs or {}))
            code = 0
        finally:
            os._exit(code)
    if _status(child) != 0:
        raise ValueError(
            f"policy.tokenizer.name={tokenizer.name_or_path}: its chat template takes more than {CPU_S} s or {MEMORY_BYTES >> 30} GiB to "
            f"write a conversation of a few words; correct it, or name another one by policy.tokenizer.chat_template"
        )


def _status(child: int) -> int:
    end = time.monotonic() + STUCK_S
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(POLL_S)


def _render_within_limits(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, size + MEMORY_BYTES)):
        _, most = resource.getrlimit(limit)
        bound = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (bound, bound))
    for conversation in CONVERSATIONS:
        try:
            tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **template_kwargs)
        except MemoryError:
            raise
        except Exception:  # the template's own error, of any kind
            continue
