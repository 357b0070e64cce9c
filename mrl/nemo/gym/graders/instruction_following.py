# SPDX-License-Identifier: Apache-2.0
"""Verifiable instructions of IFEval (arXiv:2311.07911) and of NeMo Gym's additions to it, by checks of our own.

Verdicts are those of Gym's resource server, whose package is `verifiable_instructions`; keywords are regular
expressions, as there. Runs in `mrl.envs.child`.

Gym detects languages by langdetect 1.0.9, which draws at random: its answer for "I AM VERY HAPPY TODAY" depends on the
seed. It calls "HELLO WORLD" Somali and "Yes." French, so that right answers in capitals would get 0. Hence own code.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from mrl.envs.task import Environment, Outcome, RowFault, Score, Task, built_in, field_of
from mrl.nemo.gym.graders.sentences import ruled_sentences, sentences, tokens

if TYPE_CHECKING:
    from mrl.config.schema.env import EnvConfig

READ_CHARACTERS = 100_000

SCRIPTS: Mapping[str, str] = {
    **{
        "HANGUL": "ko",
        "THAI": "th",
        "BENGALI": "bn",
        "TAMIL": "ta",
        "TELUGU": "te",
        "KANNADA": "kn",
        "MALAYALAM": "ml",
    },
    **{"GUJARATI": "gu", "GURMUKHI": "pa", "HEBREW": "he", "GREEK": "el", "CJK": "zh"},
}
# Scripts that several languages share: letters that tell one of them, in order, and letters and words that only those
# after it have.
LETTERS: Mapping[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "ARABIC": (("ur", "ٹڈڑںےھہ", (*"هةأإى", " در ", " از ")), ("fa", "پچژگیک", (*"ةأإى",)), ("ar", "", ())),
    "CYRILLIC": (("uk", "їєіґ", (*"ыэёъ",)), ("ru", "ыэёь", ("ъ", " е ", " се ", " са ")), ("bg", "", ())),
}
# A text of a language has several times as many of its letters; a quoted word brings fewer.
MIN_SHARE = 0.01
WORDS: Mapping[str, str] = {
    "en": "the of and to in is that it was for on are with as this be have from not you which by an at",
    "de": (
        "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus "
        "er hat dass sie"
    ),
    "es": "de la que el en y los se del las un por con no una su para es al lo como más pero sus le este sí porque",
    "fr": "de la le et les des en un du une que est pour qui dans a par plus pas au sur ne se ce il sont avec son nous",
    "it": "di e il la che in un è per una sono con non del della le si da come anche più dei nel alla ma questo gli",
    "pt": (
        "de a o que e do da em um para é com não uma os no se na por mais as dos como mas foi ao ele das à seu ou são"
    ),
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


def detect(text: str) -> str:
    """ISO 639-1 code of a text's language, judged by its beginning; "" if unclear."""
    text = text[:READ_CHARACTERS]
    scripts = Counter(
        unicodedata.name(character, "").split(" ")[0].split("-")[0] for character in text if character.isalpha()
    )
    if not scripts:
        return ""
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.1 * scripts.total():
        return "ja"
    script = scripts.most_common(1)[0][0]
    if script in SCRIPTS:
        return SCRIPTS[script]
    if script in LETTERS:
        text, least = text.lower(), MIN_SHARE * scripts[script]
        return next(
            code
            for code, own, foreign in LETTERS[script]
            if not own or sum(map(text.count, own)) > max(least, sum(map(text.count, foreign)))
        )
    # Not by \w, which leaves out the vowel signs of Indian scripts.
    words = Counter(re.split(r"[\s!-/:-@\[-`{-~।…«»“”]+", text.lower()))
    scores = {code: sum(words[word] for word in WORDS[code].split()) for code in SHARED.get(script, ())}
    best = max(scores, key=scores.__getitem__, default="")
    return best if best and scores[best] > 0 else ""


Arguments = Mapping[str, object]
Check = Callable[[str, Arguments], bool]
T = TypeVar("T")


def environment(config: EnvConfig) -> Environment:
    """Declares `instruction_following`."""
    fields = ("instruction_id_list", "kwargs", "grading_mode", "verifier_metadata")
    return built_in(__name__, config.instruction_following, *fields)


def make() -> Score:
    """The reward function."""
    return score


def score(task: Task) -> Outcome:
    """1 if the text follows every instruction of `instruction_id_list`, with  `kwargs` at the same place, else 0.

    With `grading_mode` fraction, the share of the instructions that it follows. Each field may stand in
    `verifier_metadata`, too, which wins. A RowFault names instructions that nobody knows: no text can be judged by such
    a row.
    """
    fields, metadata = task.fields, task.fields.get("verifier_metadata")
    fields |= metadata if isinstance(metadata, dict) else {}
    names: list[object] = field_of(fields, "instruction_id_list", list)
    given: list[object] = field_of({"kwargs": [None] * len(names), **fields}, "kwargs", list)
    mode = fields.get("grading_mode") or "binary"
    if not names or len(given) != len(names):
        raise RowFault(
            f"the row has {len(names)} instructions and {len(given)} kwargs; they must be as many, and at least one"
        )
    if unknown := [name for name in names if name not in CHECKS]:
        raise RowFault(
            f"no instruction {', '.join(map(str, unknown))} is known (mrl/nemo/gym/graders/instruction_following.py)"
        )
    if mode not in ("binary", "fraction"):
        raise RowFault(f"grading_mode {mode!r} is neither binary nor fraction")
    broken = []
    for name, arguments in zip(map(str, names), given, strict=True):
        # Rows are padded with nulls for the arguments of other instructions.
        known = (
            {key: value for key, value in arguments.items() if value is not None} if isinstance(arguments, dict) else {}
        )
        try:
            is_followed = CHECKS[name](task.reply, known)
        except (KeyError, TypeError, re.error) as error:
            raise RowFault(f"{name}: argument missing or of the wrong type, {error!r}, in {known!r:.200}") from error
        if not is_followed:
            broken.append(name)
    reward = (len(names) - len(broken)) / len(names) if mode == "fraction" else float(not broken)
    return Outcome(reward, extracted=f"not followed: {', '.join(broken)}" if broken else "followed")


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
    # Parquet makes floats of integers in columns with nulls.
    return int(value) if isinstance(value, float) else _argument(arguments, name, int)


def _str(arguments: Arguments, name: str) -> str:
    return _argument(arguments, name, str).strip()


def _texts(arguments: Arguments, name: str) -> list[str]:
    return [str(text) for text in _argument(arguments, name, list)]


def _word(arguments: Arguments, name: str) -> str:
    """A word, which some rows give as a list of one."""
    value = arguments[name]
    return _str({name: value[0]} if isinstance(value, list) and value else arguments, name).lower()


def _occurrences(text: str, keyword: str) -> int:
    return len(re.findall(keyword, text, flags=re.IGNORECASE))


def _keyword(text: str, arguments: Arguments, name: str = "keyword") -> int:
    return _occurrences(text, _str(arguments, name))


def _number_paragraphs(text: str, count: int, divider: str = r"\s?\*\*\*\s?") -> bool:
    parts = [part.strip() for part in re.split(divider, text)]
    return all(parts[1:-1]) and len([part for part in parts if part]) == count


def _nth_paragraph(text: str, arguments: Arguments) -> bool:
    parts, nth = [part.strip() for part in text.split("\n\n")], _int(arguments, "nth_paragraph")
    count = len([part for part in parts if part])
    if count != _int(arguments, "num_paragraphs") or not 1 <= nth <= count or not parts[nth - 1]:
        return False
    word = parts[nth - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == _str(arguments, "first_word").lower()


def _placeholders(text: str, arguments: Arguments) -> bool:
    found = sum("[" in part for line in text.split("\n") for part in line.split("]")[:-1])
    return found >= _int(arguments, "num_placeholders")


def _postscript(text: str, arguments: Arguments) -> bool:
    marker = _str(arguments, "postscript_marker")
    loose = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(loose.get(marker, marker.lower()), text.lower()) is not None


def _bullets(text: str, arguments: Arguments) -> bool:
    found = re.findall(r"(?m)^[^\S\n]*+\*(?:\n.*|[^*\n])", text) + re.findall(r"(?m)^[^\S\n]*+-", text)
    return len(found) == _int(arguments, "num_bullets")


def _highlights(text: str, arguments: Arguments) -> bool:
    found = re.findall(r"\*([^\n*]*)\*", text) + re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(part.strip()) for part in found) >= _int(arguments, "num_highlights")


def _sections(text: str, arguments: Arguments) -> bool:
    return len(re.findall(rf"\s?{_str(arguments, 'section_spliter')}\s?\d+\s?", text)) >= _int(
        arguments, "num_sections"
    )


def _is_json(text: str, arguments: Arguments) -> bool:
    body = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        body = body.removeprefix(fence)
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str, arguments: Arguments) -> bool:
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def _two_responses(text: str, arguments: Arguments) -> bool:
    parts = [part.strip() for part in text.split("******")]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def _is_english(text: str) -> bool:
    return detect(text) in ("en", "") and text.isascii() or detect(text) == "en"


def _is_copy(text: str, arguments: Arguments) -> bool:
    return text.strip().lower() == _str(arguments, "prompt_to_repeat").lower()


def _copies(text: str, arguments: Arguments) -> bool:
    parts = text.split("******")
    return len(parts) == _int(arguments, "N") and all(_is_copy(part, arguments) for part in parts)


def _span(text: str, arguments: Arguments) -> bool:
    span = _argument(arguments, "prompt_to_repeat", str)[_int(arguments, "n_start") : _int(arguments, "n_end")]
    return text.strip().lower() == span.strip().lower()


def _repeat_phrase(text: str, arguments: Arguments) -> bool:
    """The phrase as often as asked, each time with at most one other word, the last time with one."""
    words = _str(arguments, "phrase").split()
    first, last = re.compile(f"{words[0]} "), re.compile(f" {words[-1]}")
    found = []
    for line in text.split("\n"):
        position = 0
        while (begun := first.search(line, position)) and (ended := last.search(line, begun.end())):
            found.append(line[begun.start() : ended.end()].split())
            position = ended.end()
    if not found or len(found) != _int(arguments, "small_n") or any(len(one) != len(words) for one in found):
        return False
    differ = [sum(map(str.__ne__, one, words)) for one in found]
    return max(differ) == differ[-1] == 1


def _hyphens(text: str, arguments: Arguments) -> bool:
    return all(
        part == sentence
        for part, sentence in zip(text.split("-"), ruled_sentences(text.replace("-", " ")), strict=False)
    )


def _no_neighbours(text: str, arguments: Arguments) -> bool:
    letters = [word[0].lower() for word in text.split()]
    pairs = zip(letters, letters[1:], strict=False)
    return all(len(one) == len(other) == 1 and ord(other) - ord(one) != 1 for one, other in pairs)


def _first_words(text: str, arguments: Arguments) -> bool:
    found = [sentence.split()[:1] for sentence in ruled_sentences(text)]
    return all(words and words[0].lower() == _word(arguments, "first_word") for words in found)


def _is_last_word(words: list[str], arguments: Arguments) -> bool:
    return bool(words) and re.sub(r"[^\w\s]", "", words[-1]).lower() == _word(arguments, "last_word")


def _bigrams(text: str, arguments: Arguments) -> bool:
    words = text.split()
    return all(
        one.startswith("<<") and other.endswith(">>") for one, other in zip(words[::2], words[1::2], strict=False)
    )


def _composition(text: str, arguments: Arguments) -> bool:
    parts, count = re.split(r"\s?\*\*\*\s?", text), _int(arguments, "n_words")
    return len(parts) == 3 and all(
        len(found := ruled_sentences(part)) == _int(arguments, "n_sent")
        and all(len(tokens(sentence)) == count for sentence in found)
        for part in parts
    )


def _all_unique(text: str, arguments: Arguments) -> bool:
    words = tokens(text)
    return len(words) == len(set(words))


def _at_place(text: str, arguments: Arguments) -> bool:
    n, m = _int(arguments, "n"), _int(arguments, "m")
    words = [tokens(sentence) for sentence in ruled_sentences(text)[n - 1 : n]]
    value = arguments["keyword"]
    return words[0][m - 1 : m] == [str(value[0] if isinstance(value, list) else value).strip()] if words else False


def _same_ends(text: str, arguments: Arguments) -> bool:
    words = tokens(text)
    return len(words) > 1 and words[0].lower() == words[-1].lower()


def _first_word(text: str, arguments: Arguments) -> bool:
    return [word.lower() for word in text.split()[:1]] == [_word(arguments, "first_word")]


def _letters(text: str, arguments: Arguments) -> bool:
    return _compare(text.lower().count(_str(arguments, "letter").lower()), arguments, "let_frequency", "let_relation")


def _frequency(text: str, arguments: Arguments) -> bool:
    return _compare(_keyword(text, arguments), arguments, "frequency", "relation")


CHECKS: Mapping[str, Check] = {
    "keywords:existence": lambda text, a: all(_occurrences(text, word) for word in _texts(a, "keywords")),
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": lambda text, a: (
        not any(_occurrences(text, rf"\b{word}\b") for word in _texts(a, "forbidden_words"))
    ),
    "keywords:letter_frequency": _letters,
    "keywords:no_adjacent_consecutive": _no_neighbours,
    "keywords:word_once": lambda text, a: _keyword(text, a) == 1,
    "keywords:word_count_different_numbers": _frequency,
    "keywords:exclude_word_harder": lambda text, a: f" {_str(a, 'keyword')} " not in text,
    "keywords:palindrome": lambda text, a: any(word == word[::-1] for word in text.split()),
    "keywords:keyword_specific_position": _at_place,
    "keywords:start_end": _same_ends,
    "language:response_language": lambda text, a: (
        detect(text) == _str(a, "language") or not any(map(str.isalpha, text))
    ),
    "length_constraints:number_sentences": lambda text, a: _compare(
        len(sentences(text)), a, "num_sentences", "relation"
    ),
    "length_constraints:number_paragraphs": lambda text, a: _number_paragraphs(text, _int(a, "num_paragraphs")),
    "length_constraints:number_words": lambda text, a: _compare(
        len(re.findall(r"\w+", text)), a, "num_words", "relation"
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda text, a: any(
        f"My answer is {word}." in text for word in ("yes", "no", "maybe")
    ),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _title,
    "detectable_format:sentence_hyphens": _hyphens,
    "detectable_format:square_brackets": lambda text, a: all(
        word[0] == "[" and word[-1] == "]" for word in text.split()
    ),
    "detectable_format:bigram_wrapping": _bigrams,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, a: text.strip().lower().startswith(_str(a, "prompt_to_repeat").lower()),
    "startend:end_checker": lambda text, a: text.strip().strip('"').lower().endswith(_str(a, "end_phrase").lower()),
    "startend:quotation": lambda text, a: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    "change_case:capital_word_frequency": lambda text, a: _compare(
        sum(map(str.isupper, tokens(text))), a, "capital_frequency", "capital_relation"
    ),
    "change_case:english_capital": lambda text, a: text.isupper() and _is_english(text),
    "change_case:english_lowercase": lambda text, a: text.islower() and _is_english(text),
    "punctuation:no_comma": lambda text, a: "," not in text,
    "punctuation:punctuation_dot": lambda text, a: "." not in text,
    "punctuation:punctuation_exclamation": lambda text, a: "!" not in text,
    "copy:repeat_phrase": _repeat_phrase,
    "copy:copy": _is_copy,
    "copy:copying_simple": _is_copy,
    "copy:copying_multiple": _copies,
    "new:copy_span_idx": _span,
    "paragraphs:paragraphs": lambda text, a: _number_paragraphs(text, 2),
    "paragraphs:paragraphs2": lambda text, a: _number_paragraphs(text, 2, r"\n\n"),
    "first_word:first_word_sent": _first_words,
    "first_word:first_word_answer": _first_word,
    "last_word:last_word_sent": lambda text, a: all(
        _is_last_word(sentence.split(), a) for sentence in ruled_sentences(text)
    ),
    "last_word:last_word_answer": lambda text, a: _is_last_word(text.split(), a),
    "count:lowercase_counting": lambda text, a: len(re.findall(r"\b[a-z]+\b", text)) <= _int(a, "N"),
    "count:counting_composition": _composition,
    "count:count_unique": _all_unique,
    "count:count_increment_word": lambda text, a: (
        (_keyword(text, a, "keyword1"), _keyword(text, a, "keyword2")) == (1, 2)
    ),
    "letters:letter_counting": lambda text, a: _compare(len(re.findall("[a-zA-Z]", text)), a, "N", "relation"),
    "letters:letter_counting2": _letters,
}
