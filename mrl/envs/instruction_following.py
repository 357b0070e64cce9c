# SPDX-License-Identifier: Apache-2.0
"""Verifiable instructions of IFEval (arXiv:2311.07911), by checks of our own: a text must follow all of its row.

`detect` finds the language among those that instructions ask for: by its script, its letters, and the words that every text has.
Runs in `mrl.envs.child`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from mrl.envs.task import Environment, Outcome, RowFault, Score, Task, built_in, field_of, text_after_thinking

if TYPE_CHECKING:
    from mrl.config.schema.env import EnvConfig

UNKNOWN = "unknown_instruction"
"""Flag of a rollout whose row has an instruction without a check; it counts as not followed."""

READ_CHARACTERS = 100_000

# Scripts of one language, by the first word of Unicode's character names.
SCRIPTS: Mapping[str, str] = {
    **{"HANGUL": "ko", "THAI": "th", "BENGALI": "bn", "TAMIL": "ta", "TELUGU": "te", "KANNADA": "kn", "MALAYALAM": "ml"},
    **{"GUJARATI": "gu", "GURMUKHI": "pa", "HEBREW": "he", "GREEK": "el", "CJK": "zh"},
}
# Scripts that several languages share: letters that only one of them has, in order; the last language has none of these.
LETTERS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "ARABIC": (("ur", "ٹڈڑںےھ"), ("fa", "پچژگی"), ("ar", "")),
    "CYRILLIC": (("uk", "їєіґ"), ("ru", "ыэё"), ("bg", "")),
}
WORDS: Mapping[str, str] = {
    "en": "the of and to in is that it was for on are with as this be have from not you which by an at",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus er hat dass sie",
    "es": "de la que el en y los se del las un por con no una su para es al lo como más pero sus le este sí porque",
    "fr": "de la le et les des en un du une que est pour qui dans a par plus pas au sur ne se ce il sont avec son nous",
    "it": "di e il la che in un è per una sono con non del della le si da come anche più dei nel alla ma questo gli",
    "pt": "de a o que e do da em um para é com não uma os no se na por mais as dos como mas foi ao ele das à seu ou são",
    "nl": "de het een van en in is dat op te zijn met voor niet aan er ook als maar om bij nog naar door wordt ze deze",
    "fi": "ja on ei se että oli hän joka kun niin mutta myös tai kuin ovat sen mitä voi olla jos tämä ole sekä",
    "pl": "i w na z się do nie to że jest o jak po za od przez przy są dla tym jego oraz lub może ale które być",
    "sv": "och att det i en som är av för den till inte på med har de ett om var från men så kan vi ska",
    "vi": "và của là các có được cho trong không một những này để với người khi đã về từ như cũng đến",
    "sw": "na ya wa kwa ni katika za la kuwa cha hii kama yake lakini pia au hiyo watu wake si kutoka sana",
    "tr": "ve bir bu için ile da de olarak daha çok en gibi olan ama kadar sonra değil ne var her",
    "id": "yang dan di ini itu dengan untuk tidak dari dalam akan pada juga saya adalah ke karena bisa ada mereka",
    "hi": "है के में की और को का से हैं यह पर एक नहीं कि लिए भी था जो कर तो",
    "mr": "आहे आणि च्या मध्ये या ते हे की तो आहेत नाही एक होते साठी करून मी तर असे",
    "ne": "छ र को मा लाई हो यो पनि गर्न भने छन् एक हुन् तथा गर्ने का थियो बाट",
}
SHARED: Mapping[str, tuple[str, ...]] = {
    "LATIN": tuple(code for code in WORDS if code not in ("hi", "mr", "ne")),
    "DEVANAGARI": ("hi", "mr", "ne"),
}

Arguments = Mapping[str, object]
Check = Callable[[str, Arguments], bool]
T = TypeVar("T")


def environment(config: EnvConfig) -> Environment:
    """Declares `instruction_following`."""
    return built_in("instruction_following", config.instruction_following, "instruction_id_list", "kwargs")


def make() -> Score:
    """The reward function."""
    return score


def score(task: Task) -> Outcome:
    """1 if the text follows every instruction of `instruction_id_list`, with the arguments of `kwargs` at the same place, else 0.

    An unknown instruction counts as not followed, and gets the flag `unknown_instruction`.
    """
    names: list[object] = field_of(task.fields, "instruction_id_list", list)
    given: list[object] = field_of({"kwargs": [None] * len(names), **task.fields}, "kwargs", list)
    if not names or len(given) != len(names):
        raise RowFault(f"the row has {len(names)} instructions and {len(given)} kwargs; they must be as many, and at least one")
    text = text_after_thinking(task.text)
    broken, flags = [], set()
    for name, arguments in zip(map(str, names), given, strict=True):
        # Rows are padded with nulls for the arguments of other instructions.
        known = {key: value for key, value in arguments.items() if value is not None} if isinstance(arguments, dict) else {}
        try:
            is_followed = name in CHECKS and bool(text) and CHECKS[name](text, known)
        except (KeyError, TypeError) as error:
            raise RowFault(f"{name}: argument missing or of the wrong type, {error!r}, in {known!r:.200}") from error
        if name not in CHECKS:
            flags.add(UNKNOWN)
        if not is_followed:
            broken.append(name)
    return Outcome(float(not broken), extracted=f"not followed: {', '.join(broken)}" if broken else "followed", flags=tuple(flags))


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


def _argument(arguments: Arguments, name: str, kind: type[T]) -> T:
    value = arguments[name]
    if not isinstance(value, kind):
        raise TypeError(f"{name}={value!r}")
    return value


def _int(arguments: Arguments, name: str) -> int:
    value = arguments[name]
    # Parquet makes floats of integers beside nulls.
    return int(value) if isinstance(value, float) else _argument(arguments, name, int)


def _str(arguments: Arguments, name: str) -> str:
    return _argument(arguments, name, str)


def _texts(arguments: Arguments, name: str) -> list[str]:
    return [str(text) for text in _argument(arguments, name, list)]


def sentences(text: str) -> list[str]:
    """Stretches that end in . ! ? or their CJK forms before white space, or with a line; marks within numbers and initials end none."""
    text = re.sub(r"\b(Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|[A-Z])\.", r"\1", text)
    return [part for part in re.split(r"(?<=[.!?])[\"')\]]*\s+|(?<=[。！？])|\n{2,}", text) if re.search(r"\w", part)]


def _number_paragraphs(text: str, arguments: Arguments) -> bool:
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and len([part for part in parts if part]) == _int(arguments, "num_paragraphs")


def _nth_paragraph(text: str, arguments: Arguments) -> bool:
    parts = [part.strip() for part in re.split(r"\n\n", text) if part.strip()]
    nth = _int(arguments, "nth_paragraph")
    if len(parts) != _int(arguments, "num_paragraphs") or not 1 <= nth <= len(parts):
        return False
    first = re.match(r"[\"'(\[]*([\w'-]+)", parts[nth - 1])
    return first is not None and first[1].lower() == _str(arguments, "first_word").lower()


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


def _two_responses(text: str, arguments: Arguments) -> bool:
    parts = [part.strip() for part in text.split("******")]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def detect(text: str) -> str:
    """ISO 639-1 code of a text's language, judged by its beginning; empty if it cannot be told."""
    text = text[:READ_CHARACTERS]
    scripts = Counter(unicodedata.name(character, "").split(" ")[0].split("-")[0] for character in text if character.isalpha())
    if not scripts:
        return ""
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.1 * scripts.total():
        return "ja"
    script = scripts.most_common(1)[0][0]
    if script in SCRIPTS:
        return SCRIPTS[script]
    if script in LETTERS:
        return next(code for code, letters in LETTERS[script] if not letters or any(letter in text for letter in letters))
    # Not by \w, which leaves out the vowel signs of Indian scripts.
    words = Counter(re.split(r"[\s!-/:-@\[-`{-~।…«»“”]+", text.lower()))
    scores = {code: sum(words[word] for word in WORDS[code].split()) for code in SHARED.get(script, ())}
    best = max(scores, key=scores.__getitem__, default="")
    return best if best and scores[best] > 0 else ""


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
    "length_constraints:number_words": lambda text, a: _compare(len(re.findall(r"\w+", text)), a, "num_words", "relation"),
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
    "detectable_format:title": lambda text, a: any(line.partition("<<")[2].rpartition(">>")[0].strip() for line in text.split("\n")),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, a: text.lower().startswith(_str(a, "prompt_to_repeat").strip().lower()),
    "startend:end_checker": lambda text, a: text.strip('" \n').lower().endswith(_str(a, "end_phrase").strip('" \n').lower()),
    "startend:quotation": lambda text, a: len(text) > 1 and text.startswith('"') and text.endswith('"'),
    "change_case:capital_word_frequency": lambda text, a: _compare(
        sum(word.isupper() for word in re.findall(r"\w+", text)), a, "capital_frequency", "capital_relation"
    ),
    "change_case:english_capital": lambda text, a: text.isupper() and _is_english(text),
    "change_case:english_lowercase": lambda text, a: text.islower() and _is_english(text),
    "punctuation:no_comma": lambda text, a: "," not in text,
}
"""The checks, by IFEval's id of the instruction."""
