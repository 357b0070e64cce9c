# SPDX-License-Identifier: Apache-2.0
"""Trials in a child of chat templates, programs of a model's folder, and of rows: they may never end or fill memory."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mrl.data.fields import EndlessRow

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
# Python drops an exception that a signal raises in a destructor.
AGAIN_S = 0.5

_USER = {"role": "user", "content": "What is 12+30?"}
_ANSWER = {"role": "assistant", "content": "42"}
CONVERSATIONS = (
    [_USER],
    [{"role": "system", "content": "Be brief."}, _USER],
    [_USER, _ANSWER, _USER],
    [_USER, _ANSWER],
)


class Overrun(Exception):
    """A trial exceeded its limit of processor time or memory."""


def try_template(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, object] | None) -> None:
    """Renders a few short conversations in a child. ValueError: that does not end, or takes too much memory."""
    try:
        within_limits(lambda: _render(tokenizer, dict(template_kwargs or {})), cpu_s=CPU_S)
    except Overrun as error:
        raise ValueError(
            f"policy.tokenizer.name={tokenizer.name_or_path}: its chat template takes more than {CPU_S} s or "
            f"{MEMORY_BYTES >> 30} GiB to write a conversation of a few words; correct it, or name another one by "
            "policy.tokenizer.chat_template"
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


@contextmanager
def row_limit() -> Iterator[None]:
    """Ends the rendering of one row that takes the main thread more than `CPU_S` seconds of a processor, by EndlessRow.

    Elsewhere it does nothing, as only the main thread gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    end = time.thread_time() + CPU_S

    def stop(*_: object) -> None:
        if time.thread_time() < end:  # the process's other threads have run down its timer
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S, AGAIN_S)
            return
        raise EndlessRow(
            f"the chat template takes more than {CPU_S} s to write this row; correct it, remove the row, or name "
            f"another one by policy.tokenizer.chat_template"
        )

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


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
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, size + MEMORY_BYTES),
    ):
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
