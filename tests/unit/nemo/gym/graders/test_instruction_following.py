# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from mrl.envs.task import RowFault, Task
from mrl.nemo.gym.graders.instruction_following import CHECKS, SCRIPTS, WORDS, detect, score

# (instruction, arguments, a text that follows it, a text that does not)
CASES = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "The Dog met a cat.", "The dog met nobody."),
    ("keywords:frequency", {"keyword": "ha", "frequency": 3, "relation": "at least"}, "Ha ha ha!", "ha ha"),
    ("keywords:frequency", {"keyword": "ha", "frequency": 3, "relation": "less than"}, "ha ha", "ha ha ha"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "The category is fine.", "A CAT."),
    ("keywords:letter_frequency", {"letter": "z", "let_frequency": 2, "let_relation": "at least"}, "Zigzag", "z"),
    (
        "language:response_language",
        {"language": "de"},
        "Das ist nicht der Hund von dem Mann.",
        "This is not the dog of the man.",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        "Dr. No. Is 3.5 it? Yes. So!",
        "One. Two.",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n***\n***\ntwo"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "two words", "now three words"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        "one\n\nWeekend, at last",
        "one\n\nA weekend",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [address]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye\nP.S. I know", "Bye, PS"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye\nP.P.S. I know", "Bye\nP.S. I know"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Maybe."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and **two**", "*one* and * *"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<On Cats>>\nCats.", "<< >>\nCats."),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. It.", "It. Say it."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'so. "The END."', "The end. No."),
    ("startend:quotation", {}, '"all of it"', '"some" of it'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at most"},
        "A BIG cat",
        "A BIG FAT cat",
    ),
    ("change_case:english_capital", {}, "ALL OF THIS IS LOUD.", "All of this"),
    ("change_case:english_lowercase", {}, "all of this is quiet.", "All of this"),
    ("punctuation:no_comma", {}, "one and two", "one, two"),
    ("punctuation:punctuation_dot", {}, "one and two!", "one. two"),
    ("punctuation:punctuation_exclamation", {}, "one and two.", "one! two"),
    ("keywords:no_adjacent_consecutive", {}, "apple cherry banana", "apple banana"),
    ("keywords:word_once", {"keyword": "cat"}, "A Cat ran.", "Cat and cat"),
    (
        "keywords:word_count_different_numbers",
        {"keyword": "cat", "frequency": 2, "relation": "at least"},
        "cat, cats",
        "cat",
    ),
    ("keywords:exclude_word_harder", {"keyword": "cat"}, "a category, a cat.", "a cat ran"),
    ("keywords:palindrome", {}, "the level is fine", "the floor is fine"),
    (
        "keywords:keyword_specific_position",
        {"keyword": "cat", "n": 2, "m": 2},
        "So. The cat ran.",
        "The cat ran. The big cat.",
    ),
    ("keywords:start_end", {}, "well, all is well", "well, all is well."),
    ("detectable_format:sentence_hyphens", {}, "It is so.-It is not.", "It is so. - It is not."),
    ("detectable_format:square_brackets", {}, "[all] [of] [it]", "[all] of [it]"),
    ("detectable_format:bigram_wrapping", {}, "<<I am>> <<at home>>", "<<I am at home>>"),
    ("copy:repeat_phrase", {"phrase": "time flies by", "small_n": 2}, "time runs by, time walks by", "time runs by"),
    ("copy:copy", {"prompt_to_repeat": "Say it."}, "say it.", "Say it. It."),
    ("copy:copying_simple", {"prompt_to_repeat": "Say it."}, "SAY IT.", "it"),
    ("copy:copying_multiple", {"prompt_to_repeat": "Say it.", "N": 2}, "Say it.\n******\nsay it.", "Say it."),
    (
        "new:copy_span_idx",
        {"prompt_to_repeat": "Please say it now.", "n_start": 7, "n_end": 13},
        "Say it",
        "say it now",
    ),
    ("paragraphs:paragraphs", {}, "one\n***\ntwo", "one\n\ntwo"),
    ("paragraphs:paragraphs2", {}, "one\n\ntwo", "one\n\n\n\ntwo"),
    ("first_word:first_word_sent", {"first_word": "so"}, "So it is. So be it.", "So it is. Be it."),
    ("first_word:first_word_answer", {"first_word": "so"}, "So be it.", "Be it so."),
    ("last_word:last_word_sent", {"last_word": "so"}, "It is so. Be it so!", "It is so. Be it."),
    ("last_word:last_word_answer", {"last_word": "so"}, "Be it so.", "So be it."),
    ("count:lowercase_counting", {"N": 2}, "ONE two Three four", "one two three"),
    (
        "count:counting_composition",
        {"n_sent": 1, "n_words": 3},
        "One two.***Three four.***Five six.",
        "One two.***Three four.",
    ),
    ("count:count_unique", {}, "one two three.", "one two one"),
    ("count:count_increment_word", {"keyword1": "cat", "keyword2": "dog"}, "dog cat dog", "cat dog"),
    ("letters:letter_counting", {"N": 4, "relation": "less than"}, "a b 1 c", "abcd"),
    ("letters:letter_counting2", {"letter": "z", "let_frequency": 2, "let_relation": "at least"}, "Zigzag", "z"),
]


def judge(text: str, *instructions: tuple[str, dict[str, object] | None]) -> tuple[float, tuple[str, ...]]:
    row = {
        "instruction_id_list": [name for name, _ in instructions],
        "kwargs": [arguments for _, arguments in instructions],
    }
    outcome = score(Task((text,), row=json.dumps(row)))
    return outcome.reward, outcome.flags


def test_every_check_has_a_case():
    assert {name for name, _, _, _ in CASES} == set(CHECKS)
    assert len(CHECKS) == 54


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_checks(name: str, arguments: dict[str, object], good: str, bad: str):
    padded = {**arguments, "some_other_argument": None}
    assert judge(f"<think>,,, {bad}</think>{good}", (name, padded)) == (1.0, ())
    assert judge(bad, (name, padded)) == (0.0, ())


def test_all_instructions_must_be_followed():
    both = ("punctuation:no_comma", None), ("startend:quotation", {})
    assert judge('"quiet"', *both)[0] == 1.0
    assert judge('"a, b"', *both)[0] == judge("quiet", *both)[0] == 0.0


def test_an_unknown_instruction_is_the_row_s_fault():
    with pytest.raises(RowFault, match="no instruction detectable_format:haiku is known"):
        judge("fine", ("punctuation:no_comma", {}), ("detectable_format:haiku", {}))


def test_rows_of_either_form_and_shares_of_instructions():
    row = {
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
        "kwargs": [None, {}],
        "grading_mode": "fraction",
    }
    for fields in (row, {"verifier_metadata": row}, {"grading_mode": "binary", "verifier_metadata": row}):
        assert score(Task(("quiet",), row=json.dumps(fields))).reward == 0.5
    assert score(Task(("a, b",), row=json.dumps(row))).reward == 0.0
    assert score(Task(('"a"',), row=json.dumps(row))).reward == 1.0
    with pytest.raises(RowFault, match="grading_mode"):
        score(Task(("quiet",), row=json.dumps({**row, "grading_mode": "half"})))


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"instruction_id_list": []},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []},
        {"instruction_id_list": ["keywords:existence"], "kwargs": [{}]},
        {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": 7}]},
        {
            "instruction_id_list": ["keywords:frequency"],
            "kwargs": [{"keyword": "a", "frequency": 1, "relation": "nearly"}],
        },
        {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["C++("]}]},
    ],
)
def test_a_row_that_asks_for_nothing_that_can_be_checked_is_an_error(row: dict[str, object]):
    with pytest.raises(ValueError):
        score(Task(("text",), row=json.dumps(row)))


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", "The cat sat on the mat and it was happy with this."),
        ("es", "El gato se sentó en la alfombra porque no había una silla para él."),
        ("fr", "Le chat est dans la maison avec les enfants, et il ne dort pas."),
        ("it", "Il gatto è nella casa con i bambini, ma non dorme per niente."),
        ("pt", "O gato não está em casa, mas ele foi para o jardim com uma amiga."),
        ("nl", "De kat is niet in het huis, maar ze zit op een stoel bij het raam."),
        ("fi", "Kissa on talossa, mutta se ei nuku, että hän voi olla iloinen."),
        ("pl", "Kot nie jest w domu, ale to się może zmienić, że będzie na dachu."),
        ("vi", "Con mèo không có trong nhà và những người này đã đến với một con chó."),
        ("sw", "Paka ni mnyama wa nyumbani na watu wake wanampenda sana kwa sababu hiyo."),
        ("ru", "Кошка была дома, и мы это видели."),
        ("uk", "Кішка була вдома, і її бачили."),
        ("bg", "Котката беше вкъщи и децата я гледаха."),
        ("ru", "В городе Київ живут миллионы людей, и они говорят на разных языках."),
        ("uk", "Російське слово «рыба» означає рибу, і ми його чули."),
        ("bg", "Руската дума рыба означава риба и се използва в текста от много автори, които пишат за храната."),
        ("ar", "حرف گ لا يوجد في اللغة العربية الفصحى ولكنه موجود في اللغات الأخرى"),
        ("fa", "حرف ٹ در زبان اردو وجود دارد ولی در فارسی نیست"),
        ("fa", "كتاب من در خانه است و پدر مي آيد"),
        ("ar", "القطة في البيت مع الاطفال"),
        ("fa", "گربه در خانه با بچه ها است"),
        ("ur", "بلی گھر میں بچوں کے ساتھ ہے"),
        ("hi", "बिल्ली घर में है और यह एक कुत्ते के लिए नहीं है"),
        ("mr", "मांजर घरात आहे आणि ते कुत्र्या साठी नाही"),
        ("ne", "बिरालो घरमा छ र यो पनि राम्रो हो"),
        ("ja", "猫は家にいます。"),
        ("zh", "猫在家里。"),
        ("ko", "고양이는 집에 있습니다."),
        ("th", "แมวอยู่ในบ้าน"),
        ("he", "החתול בבית"),
        ("", "123 ..."),
    ],
)
def test_languages(language: str, text: str):
    assert detect(text) == language


def test_languages_are_told_by_words_that_are_not_those_of_another():
    assert not set(WORDS) & set(SCRIPTS.values())
    for code, words in WORDS.items():
        assert detect(" ".join(words.split())) == code
