# SPDX-License-Identifier: Apache-2.0
"""Writes gitleaks' rules into mrl/config/secret_rules.json: `python -m scripts.secret_rules TOML COMMIT`.

TOML is config/gitleaks.toml of https://github.com/gitleaks/gitleaks at that commit.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

from mrl.config.passwords import RULES

NAMED = re.compile(r"(?:\[\\w\.-\]\{0,50\}\?)?\(\?i[:)]\[\\w\.-\]\{0,50\}\?\(\?:(.+?)\)\(\?:\[ \\t\\w\.-\]\{0,20\}\).*")
"""Pattern of the rules of services whose tokens have no mark of their own, and are known by the name before them."""

END = r"(?:[\x60'\"\s;]|\\[nr]|$)"
"""End of most rules, in source code. Messages end tokens by other signs, too."""

LEFT_OUT = re.compile(
    r"generic-api-key|curl-.*|kubernetes-.*|pkcs12-file|private-key|nuget.*|hashicorp-tf-password|freemius.*|jwt.*|sidekiq.*"
)
"""Rules of source code and of whole files, and those that mrl/config/secrets.py has more generally."""

WORDS = {"_pub", "linear", "live_", "live_pub", "lob", "looker", "sonar", "test_", "test_pub", "travis"}
"""Names of services, and beginnings of tokens, that are also words of messages here."""


def in_python(pattern: str) -> str:
    """A pattern of Go's regexp for Python's re: flags only around groups, other names of classes."""
    pattern = (
        pattern.replace("[[:alnum:]]", "[a-zA-Z0-9]")
        .replace(r"\z", r"\Z")
        .replace(END.replace('\\"', '"'), "(?![A-Za-z0-9])")
    )
    while (at := pattern.find("(?i)", 1)) > 0:
        depth, end = 0, at + 4
        while end < len(pattern) and depth >= 0:
            is_escaped = pattern[end] == "\\"
            depth += 0 if is_escaped else {"(": 1, ")": -1}.get(pattern[end], 0)
            end += 2 if is_escaped else 1
        end -= depth < 0
        pattern = f"{pattern[:at]}(?i:{pattern[at + 4 : end]}){pattern[end:]}"
    re.compile(pattern)
    return pattern


def main() -> None:
    """Reads the rules and writes the names of services, and words, least entropy and pattern of each form of token."""
    toml, commit = sys.argv[1:]
    names, tokens = set[str](), list[tuple[list[str], float, str]]()
    for rule in tomllib.loads(Path(toml).read_text(encoding="utf-8"))["rules"]:
        if LEFT_OUT.fullmatch(rule["id"]):
            continue
        pattern = in_python(rule["regex"])
        if NAMED.match(pattern):
            names |= set(rule["keywords"])
        else:
            tokens.append((rule["keywords"], rule.get("entropy", 0), pattern))
    source = (
        f"https://github.com/gitleaks/gitleaks config/gitleaks.toml, {commit}. MIT License, in {RULES.stem}.LICENSE"
    )
    written = {"source": source, "names": sorted(names - WORDS), "tokens": tokens}
    RULES.write_text(json.dumps(written, separators=(",", ":")).replace("],[[", "],\n[[") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
