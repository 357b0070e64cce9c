# SPDX-License-Identifier: Apache-2.0
import pytest
from math_verify import parse

from mrl.envs.math import make, score_dapo
from mrl.envs.math_size import size_of
from mrl.envs.math_value import ANSWER_TARGETS, TOO_COSTLY, find_answer, score
from mrl.envs.task import Outcome, Task

RIGHT = [
    ("46", "46", "46"),
    ("46", "046", "46"),  # a model of fixed width pads with zeros
    ("046", "46", "46"),
    ("046", "046\n", "46"),
    ("46", "0046", "46"),
    ("1200", "1,200", "1200"),
    ("1000000", "so 1,000,000", "1000000"),
    ("72", "She sold 48 + 24 = 72 clips.\n#### 72", "72"),
    ("72", "the answer is 72.", "72"),
    ("66", "He scored 48 + 16 = <<48+16=64>>64 points, and 2 more.\n#### 66", "66"),
    ("18", "$18", "18"),
    ("18", "She makes 18 dollars a day.", "18"),
    ("46", "\\boxed{46}", "46"),
    ("46", "I think 12, then \\boxed{46}.", "46"),
    ("-3", "-3", "-3"),
    ("-3", "\\boxed{-3}", "-3"),
    ("0.5", "1/2", "1/2"),
    ("1/2", "0.5", "0.5"),
    ("1/2", "\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("\\frac{3}{4}", "0.75", "0.75"),
    ("100", "100.0", "100.0"),
    ("50\\%", "50%", "50"),
    ("3\\sqrt{2}", "\\boxed{3\\sqrt2}", "3\\sqrt{2}"),
    ("x+1", "\\boxed{1+x}", "1+x"),
    ("2x", "\\boxed{x+x}", "x+x"),
    ("(1,2)", "\\boxed{(1,2)}", "(1,2)"),
    ("0", "0", "0"),
    ("46", "12+34=46", "46"),
    ("46", "<think>12</think><answer>46</answer>", "46"),
    ("1e-05", "\\boxed{0.00001}", "0.00001"),
    ("1e+16", "\\boxed{10^{16}}", "10^{16}"),
    ("2.5E3", "2500", "2500"),
    ("90°", "\\boxed{90^\\circ}", "90^\\circ"),
    ("£3.50", "\\boxed{3.5}", "3.5"),
    ("2√3", "\\boxed{2\\sqrt{3}}", "2\\sqrt{3}"),
    ("x²", "\\boxed{x^2}", "x^2"),
    ("½", "0.5", "0.5"),
    ("１२", "12", "12"),
    ("١٢", "12", "12"),
    ("42.", "42", "42"),
    ("\\frac{1}{2^{98}}", "\\boxed{2^{-98}}", "2^{-98}"),
    ("10^{-100000}", "\\boxed{10^{-100000}}", "10^{-100000}"),
    ("\\sqrt{2} \\cdot 10^{-30}", "\\boxed{1.41421 \\cdot 10^{-30}}", "1.41421 \\cdot 10^{-30}"),
]
WRONG = [
    *(
        ("46", text)
        for text in (
            "46 <answer>45</answer>",
            "47",
            "46.5",
            "-46",
            "0",
            "",
            "no number here",
            "04 6",
            "460",
            "\\boxed{}",
        )
    ),
    *(("46", text) for text in ("\\boxed{47} not 46", "\x00\x01\ufffd", "\\frac{", "46\n#### 47", "46 ####")),
    *(
        ("1e-05", "\\boxed{0.0001}"),
        ("2024-01-05", "\\boxed{2018}"),
        ("3", "-3"),
        ("-3", "3"),
        ("1200", "1.2"),
        ("1/2", "1/3"),
    ),
    *(
        ("\\frac{1}{2^{99}}", "\\boxed{2^{-98}}"),
        ("\\frac{1}{2004!}", "\\boxed{\\frac{1}{2006!}}"),
        ("e^{-50}", "\\boxed{e^{-51}}"),
    ),
    *(("10^{-500}", f"\\boxed{{10^{{-{power}}}}}") for power in (499, 501, 100_000)),
    *(("\\{2, 10^{-30}x\\}", "\\boxed{\\{2, 10^{-31}x\\}}"), ("9.11\\times 10^{-31}", "\\boxed{9.11\\times 10^{-28}}")),
    *(("1/2", "2"), ("x+1", "\\boxed{x-1}"), ("(1,2)", "\\boxed{(2,1)}")),
]


@pytest.mark.parametrize(("expected", "text", "extracted"), RIGHT)
def test_right_answers(expected: str, text: str, extracted: str):
    assert score(text, expected) == (1.0, extracted)


@pytest.mark.parametrize(("expected", "text"), WRONG)
def test_wrong_answers(expected: str, text: str):
    reward, extracted = score(text, expected)
    assert reward == 0.0
    assert isinstance(extracted, str)


@pytest.mark.parametrize(
    "text", [*(text for _, text, _ in RIGHT), *(text for _, text in WRONG), "$1$ and $2$", "Answer: 3, then 4"]
)
def test_what_is_found_is_what_math_verify_finds(text: str):
    assert find_answer(text, size_of("1"))[0] == parse(text, extraction_config=ANSWER_TARGETS, parsing_timeout=0)


def test_words_compare_as_text():
    assert score("\\boxed{north}", "north") == (1.0, "north")
    assert score("\\boxed{south}", "north") == (0.0, "south")


def test_an_expected_answer_that_says_nothing_is_an_error():
    with pytest.raises(ValueError, match="cannot be parsed"):
        score("46", "")


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("34", "so\nAnswer: 34"),
        ("34", "answer : $34.$ indeed"),
        ("34", "Answer: 12, no.\nAnswer: \\boxed{34}"),
        ("1,200", "Answer: 1200"),
        ("34", "Answer: x = 34 degrees"),
        ("\\frac{1}{2}", "Answer: $\\frac12$"),
        ("\\sqrt{2}", "Answer: \\sqrt2"),
        ("12", "Answer: \\text{12}"),
        ("(1,2)", "Answer: (1, 2)"),
        ("5", "Answer: \\$5"),
        ("5", "Answer: $\\$5$"),
        ("18.90", "Answer: $\\$18.90$"),
        ("\\$18.90", "Answer: 18.90"),
        ("1,00,000.5", "Answer: 100000.5"),
        ("6 \\text{ and } 8", "Answer: 6,8"),
        ("1, 2,\\text{ and }3", "Answer: $1, 2, 3$"),
        ("6,8", "Answer: $6 \\text{ and } 8$"),
    ],
)
def test_dapo_takes_what_follows_the_last_answer(expected: str, text: str):
    assert score_dapo(text, expected)[0] == 1.0


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("34", "34"),
        ("34", "Answer: 34\nAnswer: 12"),
        ("34", "**Answer:** 34"),
        ("3.0", "Answer: 3"),
        ("34", "Answer: 34" + "." * 300),
        ("34", "Answer: "),
        ("6 \\text{ and } 8", "Answer: 68"),
        ("68", "Answer: 6,8"),
    ],
)
def test_dapo_compares_text_and_only_the_end(expected: str, text: str):
    assert score_dapo(text, expected)[0] == 0.0


def test_the_config_chooses_the_rule():
    task = Task(("the sum is 34",), "34")
    assert make("hf_math_verify", is_strict=False)(task) == Outcome(1.0, "34")
    assert make("dapo_math_verify", is_strict=False)(task) == Outcome(0.0, "")


def test_integrals_count_where_they_are_no_question():
    assert score("\\boxed{\\int_0^2 x dx = 2}", "2") == (1.0, "\\int_0^2 x dx = 2")
    assert score("\\boxed{\\int_0^2 x dx}", "2") == (0.0, TOO_COSTLY)
    assert score("\\boxed{\\int_0^2 x dx}", "\\int_0^2 x dx")[0] == 1.0
