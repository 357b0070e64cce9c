"""Verifiable instructions of IFEval (arXiv:2311.07911), by checks of our own: all of a row's count. Runs in `mrl.envs.child`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import cast

from mrl.envs.languages import detect
from mrl.envs.task import Outcome, RowFault, Score, Task, field_of, text_after_thinking

UNKNOWN = "unknown_instruction"
"""Flag of a rollout whose row has an instruction that there is no check for: it counts as not followed."""

Arguments = Mapping[str, object]
Check = Callable[[str, Arguments], bool]


def make() -> Score:
    """The reward function."""
    return score


def score(task: Task) -> Outcome:
    """1 if the text follows every instruction of `instruction_id_list`, with the arguments of `kwargs` at the same place, else 0.

    An instruction that is not known is not followed, and flagged as `unknown_instruction`.

    Raises:
        RowFault: the row has no instructions, or an instruction lacks an argument.
    """
    fields = task.fields
    names = cast(list[object], field_of(fields, "instruction_id_list", list))
    given = cast(list[object], fields.get("kwargs", [None] * len(names)))
    if not names or len(given) != len(names):
        raise RowFault(f"the row has {len(names)} instructions and {len(given)} kwargs; they must be as many, and at least one")
    text = text_after_thinking(task.text)
    broken, flags = [], set()
    for name, arguments in zip(names, given, strict=True):
        check = CHECKS.get(str(name))
        if check is None:
            flags.add(UNKNOWN)
            broken.append(str(name))
        elif not _holds(check, text, str(name), arguments):
            broken.append(str(name))
    return Outcome(float(not broken), extracted=f"not followed: {', '.join(broken)}" if broken else "followed", flags=tuple(flags))


def _holds(check: Check, text: str, name: str, arguments: object) -> bool:
    # Rows are padded with nulls for the arguments of other instructions.
    known = {key: value for key, value in arguments.items() if value is not None} if isinstance(arguments, dict) else {}
    try:
        return bool(text) and check(text, known)
    except (KeyError, TypeError) as error:
        raise RowFault(f"{name}: argument missing or of the wrong type, {error!r}, in {known!r:.200}") from error


def _compare(count: int, arguments: Arguments, number: str, relation: str) -> bool:
    limit = _int(arguments, number)
    match arguments.get(relation, "at least"):
        case "at least":
            return count >= limit
        case "less than":
            return count < limit
        case "at most":
            return count <= limit
        case other:
            raise TypeError(f"{relation}={other!r}")


def _int(arguments: Arguments, name: str) -> int:
    value = arguments[name]
    if not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}")
    return int(value)


def _texts(arguments: Arguments, name: str) -> list[str]:
    value = arguments[name]
    if not isinstance(value, list):
        raise TypeError(f"{name}={value!r}")
    return [str(text) for text in value]


def _str(arguments: Arguments, name: str) -> str:
    value = arguments[name]
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}")
    return value


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores."""
    return re.findall(r"\w+", text)


def sentences(text: str) -> list[str]:
    """Stretches that end in . ! ? or their CJK forms before white space, or with a line; marks within numbers and initials end none."""
    text = re.sub(r"\b(Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|[A-Z])\.", r"\1", text)
    return [part for part in re.split(r"(?<=[.!?])[\"')\]]*\s+|(?<=[。！？])|\n{2,}", text) if re.search(r"\w", part)]


def paragraphs(text: str) -> list[str] | None:
    """Stretches between `***` lines; None if one in the middle is empty."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    if any(not part.strip() for part in parts[1:-1]):
        return None
    return [part for part in parts if part.strip()]


def _nth_paragraph(text: str, arguments: Arguments) -> bool:
    parts = [part.strip() for part in re.split(r"\n\n", text) if part.strip()]
    nth = _int(arguments, "nth_paragraph")
    if len(parts) != _int(arguments, "num_paragraphs") or not 1 <= nth <= len(parts):
        return False
    first = re.match(r"[\"'(\[]*([\w'-]+)", parts[nth - 1])
    return first is not None and first[1].lower() == _str(arguments, "first_word").lower()


def _number_paragraphs(text: str, arguments: Arguments) -> bool:
    parts = paragraphs(text)
    return parts is not None and len(parts) == _int(arguments, "num_paragraphs")


def _postscript(text: str, arguments: Arguments) -> bool:
    marker = _str(arguments, "postscript_marker")
    letters = re.findall(r"[a-z]", marker.lower())
    loose = r"\.\s?".join(letters) if marker.startswith("P.") else re.escape(marker.lower())
    return re.search(rf"(?m)(^|\s){loose}", text.lower()) is not None


def _highlights(text: str, arguments: Arguments) -> bool:
    marked = re.findall(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*", text)
    return sum(bool(part.strip("* ")) for part in marked) >= _int(arguments, "num_highlights")


def _sections(text: str, arguments: Arguments) -> bool:
    splitter = re.escape(_str(arguments, "section_spliter").strip())
    return len(re.findall(rf"{splitter}\s?\d+", text)) >= _int(arguments, "num_sections")


def _is_json(text: str, arguments: Arguments) -> bool:
    body = text.strip().removesuffix("```")
    fence = next((fence for fence in ("```json", "```JSON", "```Json", "```") if body.startswith(fence)), "")
    try:
        json.loads(body.removeprefix(fence))
    except (ValueError, RecursionError):
        return False
    return True


def _title(line: str) -> str:
    """What stands between the first << and the last >>."""
    return line.partition("<<")[2].rpartition(">>")[0].strip()


def _two_responses(text: str, arguments: Arguments) -> bool:
    parts = [part.strip() for part in text.split("******")]
    if any(not part for part in parts[1:-1]):
        return False
    answers = [part for part in parts if part]
    return len(answers) == 2 and answers[0] != answers[1]


def _count(text: str, part: str) -> int:
    return len(re.findall(re.escape(part), text, flags=re.IGNORECASE))


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, flags=re.IGNORECASE) is not None


def _is_english(text: str) -> bool:
    # Too short to tell is no reason against.
    return detect(text) in ("en", "") and text.isascii() or detect(text) == "en"


CHECKS: Mapping[str, Check] = {
    "keywords:existence": lambda text, a: all(_count(text, word) > 0 for word in _texts(a, "keywords")),
    "keywords:frequency": lambda text, a: _compare(_count(text, _str(a, "keyword")), a, "frequency", "relation"),
    "keywords:forbidden_words": lambda text, a: not any(_has_word(text, word) for word in _texts(a, "forbidden_words")),
    "keywords:letter_frequency": lambda text, a: _compare(
        text.lower().count(_str(a, "letter").lower()), a, "let_frequency", "let_relation"
    ),
    "language:response_language": lambda text, a: detect(text) == _str(a, "language"),
    "length_constraints:number_sentences": lambda text, a: _compare(len(sentences(text)), a, "num_sentences", "relation"),
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:number_words": lambda text, a: _compare(len(words(text)), a, "num_words", "relation"),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": lambda text, a: len(re.findall(r"\[[^\[\]\n]+\]", text)) >= _int(a, "num_placeholders"),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, a: (
        len(re.findall(r"(?m)^[^\S\n]*+(?:\*[^*\n]|-)", text)) == _int(a, "num_bullets")
    ),
    "detectable_format:constrained_response": lambda text, a: any(f"My answer is {word}." in text for word in ("yes", "no", "maybe")),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": lambda text, a: any(map(_title, text.split("\n"))),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, a: text.lower().startswith(_str(a, "prompt_to_repeat").strip().lower()),
    "startend:end_checker": lambda text, a: text.strip('" \n').lower().endswith(_str(a, "end_phrase").strip('" \n').lower()),
    "startend:quotation": lambda text, a: len(text) > 1 and text.startswith('"') and text.endswith('"'),
    "change_case:capital_word_frequency": lambda text, a: _compare(
        sum(word.isupper() for word in words(text)), a, "capital_frequency", "capital_relation"
    ),
    "change_case:english_capital": lambda text, a: text.isupper() and _is_english(text),
    "change_case:english_lowercase": lambda text, a: text.islower() and _is_english(text),
    "punctuation:no_comma": lambda text, a: "," not in text,
}
"""Check of every instruction that is known, by IFEval's id."""
