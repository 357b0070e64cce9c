# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from mrl.envs.task import Task
from mrl.nemo.gym.graders.mcqa import score

PLAIN = '{"expected_answer": "B"}'
"""A row without options, which no server of NeMo Gym could grade."""
OPTIONS = [{"A": "one", "B": None}, {"A": None, "B": "two"}, {"C": "three"}]


def row(**fields: object) -> str:
    return json.dumps({"options": OPTIONS, "expected_answer": "B", **fields})


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("so \\boxed{B}", "B"),
        ("\\boxed{A} no, \\boxed{ b }", "B"),
        ("\\boxed{\\text{B}}", "B"),
        ("\\boxed{(B)}", "B"),
        ("\\boxed{B.}", "B"),
        ("Answer: B", "B"),
        ("the answer is (C)", "C"),
        ("**Answer:** A", "A"),
        ("answer: A. Answer: B", "B"),
        ("<think>\\boxed{B}</think>\\boxed{A}", "A"),
        ("B", ""),
        ("Answer: Both", ""),
        ("", ""),
    ],
)
def test_the_choice(text: str, choice: str):
    outcome = score(Task((text,), row=PLAIN))
    assert (outcome.extracted, outcome.reward) == (choice, float(choice == "B"))


RIGHT = r"""
Answer: B|The answer is B. This answer is a direct consequence.|The answer is B, because we must answer a question about y.
Answer: $B$
Answer: B\n\nIn this answer a key point is y.|**Answer: B**|Answer: **(B)**|The correct answer is option B.
The correct choice is B|answer: b
Option B is correct.|Answer: \text{B}|Answer: B) two|\boxed{B: two}|\boxed{(B) two}|\boxed{\textbf{(B) } two}
\boxed{\text{B) two}}
The answer is B. Note that the answer is a bit subtle.|The answer is (b)|the answer is b.|Answer: b) two|Answer: `B`|Answer: [B]
\boxed{Option B}
The answer is C. Wait, the answer is B, not the answer C.|Option C is wrong. The answer is B. Option C is also wrong.
The answer is \(B\).|Answer: B two
<answer>B</answer>|<answer>\n(B)\n</answer>|{"answer": "B"}|Answer: 'B'.|Answer: [[B]]|Answer: {B}|Answer -> B|Answer → B|\fbox{B}
\boxed{B - two}|The answer choice is B|The correct letter is B|The answer is clearly B.|The answer is therefore (B).
The answer to the question is (B).|Therefore, the correct statement is (B).|Answer： B|Answer：（Ｂ）|\boxed{Ｂ}|因此答案是B。|答案：B
Respuesta: B|Réponse : B|Antwort: B|答え: B|答え：B|答え：Bです。|정답: B|정답: B입니다.|답변: B|답: B|Jawaban: B|Jibu: B|Idahun: B
Ìdáhùn: B|Àdáhùn: B|Àṣàyàn: B|Àmọ̀nà: B|Ànúgọ: B|Risposta: B|Resposta: B|الإجابة: ب|الجواب: ب|الإجابة الصحيحة هي: ب|الإجابة النهائية: B
الجواب النهائي: ب.|إجابة: (ب)|উত্তর: B|উত্তরঃ ব|উত্তর: ব|उत्तर: B|回答: B|解答: B|答复：B|答曰：B|答：B|**Respuesta:** B
**Respuesta: (B)**|La respuesta correcta es: B|La respuesta es B.|Die richtige Antwort ist (B).|La réponse est B|\boxed{ب}
Réponse finale : B|答案是B|A resposta é B.|Jawaban yang benar adalah: B. Jawaban: B|Respuesta: B) dos|Antwort: B, weil es so ist
答案：B选项|La respuesta es b.
"""
WRONG = r"""
The answer is a bit subtle.|The answer is both.|Answer: B or C|\boxed{B, C}|\boxed{B \text{ and } C}|\boxed{b^2}|\boxed{BC}
Answer: bat|Answer: B and C
The answer is a B-side|answer A/B|\boxed{B = 2}|\boxed{B - 2}|\boxed{B - x}|The answer is hardly B or C|The answer is not B.
The answer to B is hard.|Answer: B's friend|<answer></answer> B
Respuesta: bueno|La respuesta es buena|Respuesta: A o B|Réponse : A et B|Antwort: A oder B|الإجابة: بيت|উত্তর: বাংলা|উত্তর: বই
答え: BかC|الإجابة: ب و ج|A resposta é b mais|Respuesta: A|الإجابة: ج|উত্তর: ড|Respuesta B|Respuesta incorrecta: B
الإجابة ليست: ب|答え: A、B|Respuesta: bB|La respuesta no es B|الإجابة: بَيت|정답: B와 C|Resposta: B e C
"""


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (text, reward)
        for table, reward in ((RIGHT, 1.0), (WRONG, 0.0))
        for line in table.strip().splitlines()
        for text in line.split("|")
    ],
)
def test_letters_and_words_around_them(text: str, reward: float):
    assert score(Task((text.replace(r"\n", "\n"),), row=PLAIN)).reward == reward


@pytest.mark.parametrize(
    ("text", "choice"), [("The answer is A. It is a good one: the answer is a bit odd.", "A"), ("Answer: a", "A")]
)
def test_an_article_is_no_choice(text: str, choice: str):
    assert score(Task((text,), row=PLAIN)).extracted == choice


@pytest.mark.parametrize("regex", [r"Option Selected:\s*([A-D])", [r"no (match)", r"Option Selected:\s*([A-D])"]])
def test_the_row_s_own_pattern_comes_first_and_its_last_match_counts(regex: object):
    fields = row(template_metadata={"output_regex": regex})
    assert score(Task(("Option Selected: A. Option Selected: B. \\boxed{A}",), row=fields)).reward == 1.0
    # Without a match the strict form is left, and nothing weaker.
    assert score(Task(("\\boxed{B}",), row=fields)).reward == 1.0
    assert score(Task(("Answer: B",), row=fields)).reward == 0.0


def test_the_answer_of_a_plain_row():
    assert score(Task(("\\boxed{D}",), expected="d")).reward == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expected_answer": "D"}, "none of the options A, B, C"),
        ({"grading_mode": "lenient"}, "none of strict_single_letter_boxed"),
        ({"template_metadata": {"output_regex": "("}}, "regular"),
    ],
)
def test_a_row_that_nobody_can_answer_is_an_error(fields: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        score(Task(("\\boxed{B}",), row=row(**fields)))
