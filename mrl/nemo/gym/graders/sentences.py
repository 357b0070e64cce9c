# SPDX-License-Identifier: Apache-2.0
"""Sentences and words of a text, cut as the verifiers of NeMo Gym cut them. Every pattern takes linear time.

`sentences` follows NLTK's Punkt without its learned contexts, `tokens` its Treebank tokenizer; `ruled_sentences` is the
other splitter of IFEval, by rules alone. NLTK itself is not used: its wheel has no model of Punkt, which it downloads
at run time, and nodes of a cluster reach no network.
"""

from __future__ import annotations

import re

ABBREVIATIONS = frozenset(
    "a.c a.d a.m adm ala ariz aug ave bros c c.v calif cie co col colo conn corp cos ct d d.c dec dr e f feb fla "
    "fri ft g ga gen h ill inc jan jr k kan ky l l.a lt ltd m m.b.a maj messrs mg mich minn mr mrs ms n n.c n.d "
    "n.h n.j n.m n.y nev nov oct ok okla ore p p.m pa ph.d prof r rep reps s s.a s.c s.p.a sen sep sept sr st sw t "
    "tenn tues u.k u.n u.s u.s.a v va vs vt w wash wed wis yr".split()
)
STARTERS = frozenset(
    "according although among both but despite even he however i if in indeed instead it many meanwhile moreover "
    "most nevertheless nonetheless nor sales separately similarly since so some the there these they this though "
    "thus under when while yet".split()
)
LETTERS = frozenset("cdefghklmnprstuvw")
BREAK = re.compile(r".*([.?!])(?=[)\";}\]*:@'({\[!?»”’]|$)")
CLOSERS = re.compile(r"[\"')\]}»”’]+$")


def sentences(text: str) -> list[str]:
    """Stretches ending in . ? or ! before white space, not behind abbreviations, initials or dots before lower case."""
    found, start, words = [], 0, list(re.finditer(r"\S+", text))
    for match, after in zip(words, [*words[1:], None], strict=False):
        if not (mark := BREAK.match(match[0])):
            continue
        word, rest = match[0][: mark.end()], match[0][mark.end() :]
        if CLOSERS.match(rest):
            word, rest = match[0], ""
        if not rest and after is None:
            continue
        body = word.rstrip("\"')]}»”’").rstrip(".?!")
        following = (rest or (after[0] if after is not None else "")).strip("\"'([{«“‘*.,;:?!")
        last = body.lower().lstrip("\"'([{«“‘*").rpartition("-")[2]
        is_open = word.endswith("..") or (
            mark[1] == "." and (last in ABBREVIATIONS or (len(last) == 1 and last.isalpha()))
        )
        if is_open and not (following[:1].isupper() and following.lower() in STARTERS and last not in LETTERS):
            continue
        end = match.end() - len(rest)
        found.append(text[start:end].strip())
        start = end
    return [sentence for sentence in (*found, text[start:].strip()) if sentence]


OPENING = re.compile(r'(?:^|(?<=[ (\[{<]))"')
APOSTROPHE = re.compile(r"(?i)(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)")
LAST_PERIOD = re.compile(r"(?<=[^.])\.(?=[\])}>\"'»”’ ]*+$)")
MARKS = r";@#$%&?!*\[\](){}<>\"«»“”‘’„`\u2012-\u2015"
PIECE = re.compile(rf"\.{{2,}}|--|``|''|[{MARKS}]|[:,](?!\d)|(?:[^\s{MARKS}:,.-]|[:,](?=\d)|\.(?!\.)|-(?!-))+")
CLITIC = re.compile(r"(?i)(?<=[^'])(?:n't|'(?:s|m|d|ll|re|ve))$|(?<=[^'])'$")
JOINED = {"cannot": 3, "gimme": 3, "gonna": 3, "gotta": 3, "lemme": 3, "wanna": 3}


def tokens(text: str) -> list[str]:
    """Words, marks and clitics (`do`, `n't`); the period of a sentence stands alone, and double quotes are `` or ''."""
    return [token for sentence in sentences(text) for token in _tokens(sentence)]


def _tokens(sentence: str) -> list[str]:
    found: list[str] = []
    sentence = LAST_PERIOD.sub(" . ", APOSTROPHE.sub("' ", OPENING.sub("``", sentence)))
    for match in PIECE.finditer(sentence):
        piece = match[0]
        if piece == '"':
            found.append("''")
        elif clitic := CLITIC.search(piece):
            found += [piece[: clitic.start()], clitic[0]]
        elif (cut := JOINED.get(piece.lower())) is not None:
            found += [piece[:cut], piece[cut:]]
        else:
            found.append(piece)
    return found


_DOT, _STOP = "\ue000", "\ue001"
_BEGINNING = (
    r"(Mr|Mrs|Ms|Dr|Prof|Capt|Cpt|Lt|He\s|She\s|It\s|They\s|Their\s|Our\s|We\s|But\s|However\s|That\s|This\s|Wherever)"
)
_FIRM = "(Inc|Ltd|Jr|Sr|Co)"
# Dots that end no sentence, and sentences that end without one; in this order, each on what the rules before it left.
RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(Mr|St|Mrs|Ms|Dr)\.", rf"\1{_DOT}"),
        (r"\.(com|net|org|io|gov|edu|me)", rf"{_DOT}\1"),
        (r"([0-9])\.([0-9])", rf"\1{_DOT}\2"),
        (r"\.{2,}", lambda match: _DOT * len(match[0]) + _STOP),
        (r"Ph\.D\.", f"Ph{_DOT}D{_DOT}"),
        (r"\s([A-Za-z])\. ", rf" \1{_DOT} "),
        (rf"([A-Z]\.[A-Z]\.(?:[A-Z]\.)?) {_BEGINNING}", rf"\1{_STOP} \2"),
        (r"([A-Za-z])\.([A-Za-z])\.([A-Za-z])\.", rf"\1{_DOT}\2{_DOT}\3{_DOT}"),
        (r"([A-Za-z])\.([A-Za-z])\.", rf"\1{_DOT}\2{_DOT}"),
        (rf" {_FIRM}\. {_BEGINNING}", rf" \1{_STOP} \2"),
        (rf" {_FIRM}\.", rf" \1{_DOT}"),
        (r" ([A-Za-z])\.", rf" \1{_DOT}"),
        (r"\.”", "”."),
        *((rf"\{mark}\"", f'"{mark}') for mark in ".!?"),
        (r"([.?!])", rf"\1{_STOP}"),
    )
)


def ruled_sentences(text: str) -> list[str]:
    """Sentences by `RULES`: each . ? or ! ends one, but for titles, firms, initials, sites and numbers; "" has none."""
    text = f" {text}  ".replace("\n", " ")
    for pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    found = [part.strip() for part in text.replace(_DOT, ".").split(_STOP)]
    return found if found[-1] else found[:-1]
