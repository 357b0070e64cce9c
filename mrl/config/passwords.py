# SPDX-License-Identifier: Apache-2.0
"""Passwords and codes that a text says behind their name: `PASSWORD x`, `my pin is x`, `passphrase "a b c d"`; or at
their place in a command or a line: `mysql -px`, `host:5432:db:user:x`. Tokens of services, by gitleaks' rules, which
secret_rules.json holds as data, or by a name before them.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mrl.env import SECRET_NAME

RULES = Path(__file__).with_name("secret_rules.json")
"""Made by scripts/secret_rules.py, which names the source."""

_TOKEN_WORDS = (
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
        text = rules.named.sub(lambda found: _hidden(found, _may_be_token(found), instead), text)
    return text


def _hidden(found: re.Match[str], is_token: bool, instead: str) -> str:
    start, end = (place - found.start() for place in found.span(_group(found)))
    return found[0][:start] + instead + found[0][end:] if is_token else found[0]


def _group(found: re.Match[str]) -> int:
    return found.re.groupindex.get("token") or (1 if found.re.groups and found[1] else 0)


def _bits(text: str) -> float:
    """Shannon entropy of a sign of the text, in bits."""
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares)


def _may_be_token(found: re.Match[str]) -> bool:
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
    words, services = ("|".join(map(re.escape, names)) for names in (_TOKEN_WORDS, found["names"]))
    # A blank alone stands between a name and its token only where nothing else does.
    between = (
        r"(?:s?['\"]?\s(?:is\s|-{1,2}[\w-]{1,20}\s)?|[ \t\w.-]{0,20}[\s'\"]{0,3}(?:=>|:{0,3}=|\|\||\?=|[>:,]))"
        r"[\x60'\"\s=]{0,5}"
    )
    named = re.compile(
        rf"(?:{words}|(?P<service>{services})){between}(?!\w+://)(?P<token>[\w.+/=~%:-]{{14,}})", re.IGNORECASE
    )
    return _Rules(tokens, (*_TOKEN_WORDS, *found["names"]), named)


_CODE = (
    r"(?:one[-_ ]time|verification|recovery|backup|auth(?:entication|enticator)?|security|access|door|login|unlock|"
    r"activation|[2m]fa|otp|sms|pin)"
)
_PASSWORD = r"pass(?:word|wd|phrase|code|wort)s?|kennwort|contrase(?:ñ|n)a|mot\sde\spasse|senha|identified\sby"
_PHRASE = r"(?:seed|recovery|secret)[-_ ]?phrase|mnemonic"
_SHORT = rf"{_CODE}[-_ ]?(?:code|pin|password)s?|{_PHRASE}|pwd?|pass|t?otp|pins?|[2m]fa"
_WEAK = r"secret|token|key|auth|bearer|creds?|credentials?|login|cookie|session[-_ ]?id"
_NAME = (
    rf"(?P<name>(?P<strong>[\w-]{{0,40}}?(?:{_PASSWORD})|(?:[\w-]{{0,40}}[_-])?(?:{_SHORT})|"
    rf"(?-i:(?:[A-Z\d]{{1,20}}_){{1,6}}(?:TOKEN|KEY|SECRET|AUTH)))|(?:[\w-]{{0,40}}[_-])?(?:{_WEAK}))"
)
# Between a name and its value: quotes with a blank or a sign; or up to four words, and a verb.
_SAID = (
    r"(?:(?P<said>['\"\x60]?\s{0,3}(?:[:=]>?|->|\|)\s{0,3}|\s(?:[\w-]{1,20}\s){0,4}?(?:is|was|are|to|=|:)\s{1,3})|"
    r"['\"\x60)]?\s{0,3}[\s,(-]\s{0,3})"
)
_SPOKEN = re.compile(
    rf"(?<![\w.-]){_NAME}{_SAID}(?P<quote>['\"\x60])?"
    rf"(?P<value>\d{{2,4}}(?:[ -]\d{{2,4}}){{1,3}}\b|(?!-)[^\s'\"\x60|<]{{4,200}})",
    re.IGNORECASE,
)
_WORDS = re.compile(
    rf"(?<![\w.-])(?:(?:[\w-]{{0,40}}[_-])?pass[-_ ]?phrase|{_PHRASE}){_SAID}['\"\x60]?"
    r"(?P<value>(?!(?:must|should|may|can|which|that|has|have|with|from|for|of|and|or|not?)\b)"
    r"[a-z]{2,12}(?:[ ,]{1,2}[a-z]{2,12}){3,24})",
    re.IGNORECASE,
)
"""A phrase of words."""
_ALONE = re.compile(r"[ \t]*(?:[\w-]+[ \t]+){0,2}")
"""Beginning of a line whose rest is a name and its value."""
MAX_BEFORE = 80
_MIXED = re.compile(r"\d[A-Za-z]|[A-Za-z]\d|[A-Za-z][!@#$%^&+~]|[!@#$%^&+~][A-Za-z]|[a-z][A-Z]")
_END = re.compile(r"['\"\x60.!]*[ \t\r]*(?:\n|\Z)")
_ORDINARY = re.compile(
    r"missing|wrong|required|needed|none|null|true|false|empty|hidden|given|known|unknown|invalid|incorrect|absent|optional|here|there|"
    r"file|files|manager|prompt|only|anywhere|again|first|below|above|\w+ed|\$\{\S*",
    re.IGNORECASE,
)
_SETTING = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]{1,60})(?:['\"]?\s?=\s?|['\"]?:[ \t]+)['\"]?(?P<value>(?<=[= ])\([^()\n]{1,400}\)|"
    r"(?<==)[^\s,;&)}\]|'\"]{1,400}|"
    r"(?<=\")[^\n\"]{1,400}|(?<=')[^\n']{1,400}|(?<![='\"])[^\n,;)}\]|'\"]{1,400})"
)
"""A setting as in YAML, JSON, a shell or a call; behind a colon or in quotes its value may have words."""
_TOKENS = re.compile(
    r"(?:.*_)?(?:bos|eos|pad|unk|sep|cls|mask|stop|end|start|special|image|think|next|last|prev|first|new|per|each|is|answer|tool)_token",
    re.IGNORECASE,
)
"""Names of a model's tokens."""
_NOTHING = re.compile(
    r"(?:-?[\d.]+(?:\s?(?:[mun]?s|min|h|%|[kKMGT]i?B))?|[A-Za-z_][\w.]*[(\[].*|(?:str|int|float|bool|bytes|dict|list|tuple|object)\b.*|<[^>]*>|\[\w+\]?|\$\{.*|\*+|~|(?:null|none|true|false|missing|required|not)\b.*|(?:\S+\s+){3,}.*)\s*",
    re.IGNORECASE,
)
"""A value that is no secret: a number with its unit, a call, an index or a type of code; more than three words are a
sentence.
"""
_WORDS_OF_COMMAND = r"\s(?:[^\s|;&]{1,80}\s){0,9}?"
_PLACED = re.compile(
    # A program, and the option that takes a password.
    rf"\b(?:(?:7z[ar]?|(?:un)?rar){_WORDS_OF_COMMAND}-p|"
    rf"mongo[a-z]{{0,9}}{_WORDS_OF_COMMAND}-p\s|ldap[a-z]{{3,9}}{_WORDS_OF_COMMAND}-[wy]\s?|"
    rf"(?:un)?zip{_WORDS_OF_COMMAND}-P\s?|smb[a-z]{{3,9}}{_WORDS_OF_COMMAND}-U\s?[^\s%]{{1,60}}%|"
    rf"htpasswd{_WORDS_OF_COMMAND}-[A-Za-z]{{0,4}}b[A-Za-z]{{0,4}}\s\S{{1,80}}\s\S{{1,80}}\s)"
    r"['\"]?(?P<option>[^\s'\"]{3,})|"
    r"\becho\s['\"]?(?P<piped>[^\s'\"|]{3,})(?=['\"]?\s?\|\s?sudo\s(?:-\w\s)?-S)|"
    # A line of .pgpass. Neither `file.py:1234:a:b:c`, `step:1000:train:loss:0.5` nor an IPv6 address.
    r"(?<![\w./:*-])(?!\S{0,100}\.(?:py|log|txt|ya?ml|jsonl?|md|sh|cpp|cu|h):)(?![\dA-Fa-f:]{1,100}(?:[^\w.*-]|$))"
    r"[\w.*-]{1,100}:(?:5[4-9]\d\d|6\d{3}|\*):[^\s:]{1,64}:[A-Za-z_*][\w.@*-]{0,63}:(?!-?[\d.]+(?:e-?\d+)?(?:[\s,;)\]}]|$))(?P<line>\S{4,})|"
    r"\b(?:PIN|Pin|pin|T?OTP|PUK|CVV|[2M]FA)(?P<digits>\d{4,8})\b|\bPrivate-MAC:\s?(?P<mac>[\da-f]{40,64})"
)
"""A password or code that is the end of the match."""
_KEYWORDS = re.compile(rf"{_PASSWORD}|{_PHRASE}|pw|pass|otp|pin|[2m]fa|code|{_WEAK}", re.IGNORECASE)


def without_passwords(text: str, instead: str) -> str:
    """`text` with `instead` in place of each value that it says behind the name of a password, a code or a phrase."""
    text = _PLACED.sub(lambda found: found[0][: found.start(found.lastindex or 0) - found.start()] + instead, text)
    text = _without_settings(text, instead)
    if _KEYWORDS.search(text) is None:
        return text
    text = _WORDS.sub(lambda found: found[0][: found.start("value") - found.start()] + instead, text)
    parts, place = list[str](), 0
    while (found := _SPOKEN.search(text, place)) is not None:
        start, value = found.start("value"), found["value"].rstrip(".,;:?)]}*")
        is_hidden = not _ORDINARY.fullmatch(value) and (_is_password if found["strong"] else _is_token)(found, value)
        end = start + len(value) if is_hidden else found.end("name")
        parts.append(text[place:start] + instead if is_hidden else text[place:end])
        place = end
    return "".join(parts) + text[place:]


def _without_settings(text: str, instead: str) -> str:
    parts, place = list[str](), 0
    while (found := _SETTING.search(text, place)) is not None:
        name, value = found["name"].rpartition(".")[2], found["value"]
        is_word = name.lower().endswith("pass") and value.isalpha()  # `backward_pass=overlap`
        is_secret = SECRET_NAME.search(name) and not (is_word or _TOKENS.fullmatch(name) or _NOTHING.fullmatch(value))
        end = found.end() if is_secret else found.end("name")
        parts.append(text[place : found.start("value")] + instead if is_secret else text[place:end])
        place = end
    return "".join(parts) + text[place:]


def _is_password(found: re.Match[str], value: str) -> bool:
    """True for what is no word: digits and letters, signs within, capitals within; also for a word that ends a line."""
    name = found["strong"].lower()  # `pass` is a verb, too, and `"pass": "logprobs"` a table
    if re.fullmatch(r"[\d., -]+", value):
        is_code = not name.endswith("pass") and (found["said"] is not None or not found["strong"].endswith("pin"))
        return not re.search(r"[.,]", value) and is_code
    if _MIXED.search(value) or (re.search(r"\d", value) and (found["quote"] or found["said"])):
        return len(value) >= 4 and re.search(r"[A-Za-z]", value) is not None
    if found["quote"] and not name.endswith("pass") and "," not in found[0][: found.start("value") - found.start()]:
        return True
    if name.endswith("pass") or _END.match(found.string, found.end()) is None:
        return False
    before = found.string[max(0, found.start() - MAX_BEFORE) : found.start()]
    return found["said"] is not None or _ALONE.fullmatch(before.rpartition("\n")[2]) is not None


def _is_token(found: re.Match[str], value: str) -> bool:
    """True for a run of letters with digits, also behind a user's name and a colon or a slash."""
    if found["said"] is None and not found["quote"] and re.search(r"[=.]", value):
        return False
    runs = re.findall(r"[A-Za-z\d]+", value)
    longest = max(runs, key=len, default="")
    digits = sum(sign.isdigit() for sign in longest)
    is_secret = re.search(r"secret|cred|login|auth", found["name"], re.IGNORECASE)
    least = (6, 1) if is_secret else (6, 2) if found["said"] else (8, 3)
    return len(longest) >= least[0] and least[1] <= digits < len(longest)
