# SPDX-License-Identifier: Apache-2.0
"""Tokens of services in a text: by gitleaks' rules, which secret_rules.json holds as data, or by a name before them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

RULES = Path(__file__).with_name("secret_rules.json")
"""Made by scripts/secret_rules.py, which names the source."""

_WORDS = (
    "key",
    "token",
    "secret",
    "password",
    "credential",
    "auth",
    "login",
    "wandb",
    "swanlab",
    "mlflow",
    "comet",
    "neptune",
)
"""Words before a token, besides gitleaks' names of services: `wandb: key 0123...`."""

_FURTHER = re.compile(
    r"\b(?:(?:gh[ur]_|AKLT|AKID|ATBB)\w{30,}|cio[A-Za-z\d]{32}\b|(?=(?:[a-z]*[2-7]){4})[a-z2-7]{52}\b|csk-\w{40,}|"
    r"GOCSPX-[\w-]{20,}|1//0[\w-]{30,}|amzn\.mws\.[\da-f-]{36}|napi_\w{40,}|tk_[a-z\d]{29}\b|NRAK-[A-Z\d]{20,}|"
    r"sntry[su]_\S{40,}|sbp_[\da-f]{40}|bce-v3/\S{40,}|lsv2_[ps][tk]_\w{30,}|pat\w{14}\.[\da-f]{64}|"
    r"eyJhcGlf[\w-]{30,}=*|secret_[\w-]{1,40}_[\da-f]{32}|[\da-f]{32}\.[A-Za-z\d]{16}\b|"
    r"[A-Za-z\d]{44}Az(?:Fu|Se|Ca)[\w+/]{6,}=*|[A-Za-z\d+/]{86}==|"
    r"[A-Za-z\d+/]{38,44}\+(?:ACR|ASt|AEh|AIoT|ARm|AMC)[\w+/=]{6,})|"
    # Salted hashes of passwords, which can be tried at home.
    r"\$(?:2[aby]\$\d\d\$[./\w]{53}|(?:apr1|[156y]|argon2\w{1,2})\$[^\s:]{20,})|"
    r"(?<=-----BEGIN PGP PRIVATE KEY BLOCK-----)[^-]{1,99999}(?<!\n)|"
    r"(?<=Private-Lines:)\s?\d+(?:(?:\s|\\[rn]){1,4}[A-Za-z\d+/=]{1,99}(?=[\s'\"\\]|\Z)){1,99}|"
    r"(?<=/bot/v2/hook/)[\w-]{8,}|(?<=\.anaconda\.org/t/)[^/\s]{8,}|(?<=netrc file: )[\da-f]{40}|(?<=\bbindpw )\S+"
)
"""Tokens of which gitleaks has no rule, or one that asks for the service's name beside them."""

_UUID = re.compile(r"[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}", re.IGNORECASE)
_MIN_SIGNS, _MIN_DIGITS, _MIN_BITS = 14, 3, 3.0
"""Least letters and digits of a token behind a name (behind a word, in a row), digits among them, bits of a sign."""


class _Rules(NamedTuple):
    """Lower-case words, one of them in every text that a rule can match, with their patterns and least bits a sign."""

    tokens: dict[str, list[tuple[str, float]]]
    names: tuple[str, ...]
    named: re.Pattern[str]


def without_tokens(text: str, instead: str) -> str:
    """`text` with `instead` in place of each token of a service."""
    text = _FURTHER.sub(instead, text)
    rules, lowered = _rules(), text.lower()
    for keyword, patterns in rules.tokens.items():
        if keyword in lowered:
            for pattern, min_bits in patterns:
                text = re.sub(
                    pattern,
                    lambda found, bits=min_bits: _hidden(found, _bits(found[_group(found)]) >= bits, instead),
                    text,
                )
    if any(name in lowered for name in rules.names):
        text = rules.named.sub(lambda found: _hidden(found, _is_token(found), instead), text)
    return text


def _hidden(found: re.Match[str], is_token: bool, instead: str) -> str:
    """A match with its token hidden."""
    start, end = (place - found.start() for place in found.span(_group(found)))
    return found[0][:start] + instead + found[0][end:] if is_token else found[0]


def _group(found: re.Match[str]) -> int:
    """The group of a match that is the token: `token`, the first, or all of it."""
    return found.re.groupindex.get("token") or (1 if found.re.groups and found[1] else 0)


def _bits(text: str) -> float:
    """Shannon entropy of a sign of the text, in bits."""
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares)


def _is_token(found: re.Match[str]) -> bool:
    """True if no word, path or number looks like the text behind a name; behind a service's it may be parted."""
    text, service = found["token"], found["service"]
    runs = re.findall(r"[A-Za-z\d]+", text)
    signs = "".join(runs) if service else max(runs, key=len, default="")
    num_digits = sum(sign.isdigit() for sign in signs)
    is_mixed = num_digits >= _MIN_DIGITS and (service or num_digits < len(signs))
    return bool(_UUID.fullmatch(text)) or (len(signs) >= _MIN_SIGNS and bool(is_mixed) and _bits(signs) >= _MIN_BITS)


@cache
def _rules() -> _Rules:
    found = json.loads(RULES.read_text(encoding="utf-8"))
    tokens: dict[str, list[tuple[str, float]]] = {}
    for keywords, min_bits, pattern in found["tokens"]:
        for keyword in keywords:
            tokens.setdefault(keyword, []).append((pattern, min_bits))
    words, services = ("|".join(map(re.escape, names)) for names in (_WORDS, found["names"]))
    # A blank alone stands between a name and its token only where nothing else does.
    between = (
        r"(?:s?['\"]?\s(?:is\s|-{1,2}[\w-]{1,20}\s)?|[ \t\w.-]{0,20}[\s'\"]{0,3}(?:=>|:{0,3}=|\|\||\?=|[>:,]))"
        r"[\x60'\"\s=]{0,5}"
    )
    named = re.compile(
        rf"(?:{words}|(?P<service>{services})){between}(?!\w+://)(?P<token>[\w.+/=~%:-]{{14,}})", re.IGNORECASE
    )
    return _Rules(tokens, (*_WORDS, *found["names"]), named)
