# SPDX-License-Identifier: Apache-2.0
"""Passwords and codes that a text says behind their name: `PASSWORD x`, `my pin is x`, `passphrase "a b c d"`; or at
their place in a command or a line: `mysql -px`, `host:5432:db:user:x`.
"""

from __future__ import annotations

import re

from mrl.env import SECRET_NAME

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
    """`text` with `instead` in place of the values of settings that are called like a secret."""
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
