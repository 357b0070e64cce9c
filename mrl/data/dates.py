# SPDX-License-Identifier: Apache-2.0
"""Chat templates that write the date (Llama 3.2, gpt-oss, Granite): a run has one date, whenever it resumes."""

from __future__ import annotations

import re
from datetime import date, datetime, time
from pathlib import Path
from typing import TYPE_CHECKING

from conversion.files.reading import read_file

if TYPE_CHECKING:
    from mrl.config.schema.policy import TokenizerConfig

CLOCK = "strftime_now"
"""Function that transformers and vLLM give to templates, of a format of `strftime`; it reads the clock."""
KEY = "policy.tokenizer.template_date"
_CALL = re.compile(CLOCK + r"""\(\s*(?P<quote>['"])(?P<format>[^'"\\]*)(?P=quote)\s*\)""")
_TEMPLATES = ("chat_template*", "tokenizer_config.json", "additional_chat_templates/*.jinja")


def writes_date(tokenizer: TokenizerConfig, template: str | None) -> bool:
    """Tells whether a run's template reads the clock: `template`, or, if None, one in the tokenizer's folder."""
    if template is not None:
        return CLOCK in template
    files = [path for pattern in _TEMPLATES for path in Path(tokenizer.name).glob(pattern) if path.is_file()]
    return any(CLOCK.encode() in read_file(path) for path in files)


def dated(template: str, day: str | None) -> str:
    """The template with a date, as 2026-01-31, in place of each call of the clock, at midnight; today's if None.

    Raises:
        ValueError: the date is none, or the template chooses the format as it renders.
    """
    if CLOCK not in template:
        return template
    try:
        moment = datetime.combine(date.fromisoformat(day) if day is not None else date.today(), time())
    except ValueError as error:
        raise ValueError(f"{KEY}={day} is no date ({error}); write it as 2026-01-31") from error
    fixed = _CALL.sub(lambda call: repr(moment.strftime(call["format"])), template)
    # `strftime_now is defined` and the like stay.
    if re.search(CLOCK + r"\s*\(", fixed):
        raise ValueError(
            f"policy.tokenizer.chat_template: it calls {CLOCK} with a format that it chooses as it renders, so "
            f"that the date of a run cannot be fixed; write the format there as a text in quotes"
        )
    return fixed
