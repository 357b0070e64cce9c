# SPDX-License-Identifier: Apache-2.0
"""Trials in a child of chat templates, programs of a model's folder, and of rows: they may never end or fill memory."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

# Processor seconds, so that a busy host changes nothing; templates take milliseconds.
CPU_S = 5
MEMORY_BYTES = 2**31
"""Memory on top of this process's own."""

# A child that neither computes nor ends, which a template cannot bring about.
STUCK_S = 300.0
POLL_S = 0.005

_USER = {"role": "user", "content": "What is 12+30?"}
_ANSWER = {"role": "assistant", "content": "42"}
CONVERSATIONS = ([_USER], [{"role": "system", "content": "Be brief."}, _USER], [_USER, _ANSWER, _USER], [_USER, _ANSWER])


class Overrun(Exception):
    """A trial exceeded its limit of processor time or memory."""


def try_template(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, object] | None) -> None:
    """Renders a few short conversations in a child. ValueError: that does not end, or takes too much memory."""
    try:
        within_limits(lambda: _render(tokenizer, dict(template_kwargs or {})), cpu_s=CPU_S)
    except Overrun as error:
        raise ValueError(
            f"policy.tokenizer.name={tokenizer.name_or_path}: its chat template takes more than {CPU_S} s or {MEMORY_BYTES >> 30} GiB to "
            f"write a conversation of a few words; correct it, or name another one by policy.tokenizer.chat_template"
        ) from error


def within_limits(function: Callable[[], T], *, cpu_s: int) -> T:
    """Runs a function in a child that may take so many seconds of a processor. Overrun: it takes more, or too much
    memory."""
    with tempfile.TemporaryFile() as file:
        if (child := os.fork()) == 0:
            code = 1
            # A collection would look at all that the parent has, and so copy its memory.
            gc.freeze()
            try:
                _limit(cpu_s)
                try:
                    answer: tuple[T | None, Exception | None] = function(), None
                except MemoryError:
                    raise
                except Exception as error:
                    answer = None, error
                pickle.dump(answer, file)
                file.flush()
                code = 0
            finally:
                os._exit(code)
        if _status(child) != 0:
            raise Overrun
        file.seek(0)
        value, error = pickle.load(file)
    if error is not None:
        raise error
    return value


def _status(child: int) -> int:
    end = time.monotonic() + STUCK_S
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(POLL_S)


def _limit(cpu_s: int) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, size + MEMORY_BYTES)):
        _, most = resource.getrlimit(limit)
        bound = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (bound, bound))


def _render(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> None:
    for conversation in CONVERSATIONS:
        try:
            tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **template_kwargs)
        except MemoryError:
            raise
        except Exception:  # the template's own error, of any kind
            continue
