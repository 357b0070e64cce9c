# SPDX-License-Identifier: Apache-2.0
"""Answers that say the question again, and non-answers; with them, right answers of data sets that must stay right."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.envs.math_value import TOO_COSTLY, score
from mrl.envs.task import RowFault, Task
from mrl.nemo.gym.graders.mcqa import score as score_choice
from mrl.nemo.gym.graders.structured_outputs import score as score_json
from tests.waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]

EXPRESSIONS = [
    *("\\frac{\\pi}{4}", "\\sqrt{2}", "3\\sqrt{13}", "x^2+1", "p - q", "\\left( 3, \\frac{\\pi}{2} \\right)"),
    *("\\left[-\\frac{1}{2},\\infty\\right)", "\\left(-\\infty,2\\right)\\cup(3,\\infty)"),
    *("\\begin{pmatrix} -1/3 \\\\ 2/3 \\\\ 5/3 \\end{pmatrix}", "\\{1,2,3\\}", "1,-2", "1 \\pm \\sqrt{19}"),
    *(
        "\\frac{1 \\pm \\sqrt{5}}{2}",
        "y = 2x + 3",
        "3 \\le x \\le 5",
        "6 - 5i",
        "2516_8",
        "\\text{(C)}",
        "\\text{Evelyn}",
        "\\log_2 5",
    ),
    *(
        "\\binom{10}{3}",
        "\\frac{9!}{2}",
        "\\cot x",
        "e^{x^2}",
        "5(3x+1)^{2}",
        "(x+1)^{2024}",
        "2^{2005}",
        "2^{2^{10}}",
        "10^{100}",
    ),
    *("9.6\\times10^{2}",),
]
NUMBERS = [
    *(
        "42",
        "-3",
        "2220",
        "1,200",
        "1{,}200",
        "\\$18",
        "$18$",
        "\\$32,\\!348",
        "12.5\\%",
        "1.36",
        "\\frac{14}{3}",
        "-\\frac{35}{9}",
    ),
    *("\\frac{243}{625}", "90^\\circ", "15\\mbox{ cm}^2", "6.5 \\text{ feet}"),
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.attack("an answer flatters its grader")
@pytest.mark.parametrize(
    ("expected", "answers"),
    [
        (
            "42",
            (
                r"\boxed{12+30}  12+30  $12+30$  \boxed{6\cdot 7}  \boxed{84/2}  \boxed{\frac{84}{2}}  "
                r"\boxed{\sqrt{1764}}  \boxed{42^1}"
            ),
        ),
        (
            "42",
            (
                r"\boxed{\sum_{k=1}^{6} 2k}  \boxed{\int_0^{42} 1 dx}  \boxed{\lim_{x \to 0} 42}  \boxed{\gcd(84,126)} "
                r" \boxed{\max(42,1)}"
            ),
        ),
        (
            "42",
            (
                r"\boxed{|{-42}|}  \boxed{\lfloor 42.5\rfloor}  \boxed{\binom{42}{1}}  \boxed{41=42}  41=42  41 = 42  "
                r"$41=42$"
            ),
        ),
        (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}  \boxed{1-\frac12}  \boxed{2^{-1}}  \boxed{0.5 \cdot 1}"),
        (
            r"2\sqrt{2}",
            r"\boxed{\sqrt{8}}  \boxed{\frac{4}{\sqrt{2}}}  \boxed{\sqrt{2}+\sqrt{2}}  \boxed{\frac{4\sqrt{2}}{2}}",
        ),
        ("0.5", r"\boxed{1-\frac{1}{2}}"),
    ],
)
def test_the_question_is_no_answer(expected: str, answers: str):
    assert [answer for answer in answers.split("  ") if score(answer, expected, is_strict=True)[0] != 0.0] == []


def test_off_the_rule_is_math_verifys():
    assert [score(answer, "42")[0] for answer in ("\\boxed{12+30}", "\\boxed{41=42}")] == [1.0, 1.0]


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("expected", [*NUMBERS, *EXPRESSIONS])
def test_no_expected_answer_is_refused(expected: str, is_strict: bool):
    reward, extracted = score(f"So we get \\boxed{{{expected}}}.", expected, is_strict=is_strict)
    assert (reward, extracted == TOO_COSTLY) == (1.0, False)


def test_final_answers_stay_right():
    answers = (
        r"42  042  42.0  12+30=42  $12+30=42$  x = 42  \boxed{x=42}  so it is 42.  \boxed{42 \text{ apples}} "
        r" $42  #### 42"
    )
    assert [answer for answer in answers.split("  ") if score(answer, "42", is_strict=True)[0] != 1.0] == []


def test_fractions_and_decimals_are_the_same_number():
    assert [score(text, "0.75", is_strict=True)[0] for text in ("3/4", "\\boxed{\\frac{3}{4}}", ".75")] == [1.0] * 3


def test_an_expected_answer_that_nobody_can_compute_is_the_rows_fault():
    for expected in ("9^{9^{9}}", "99999999!", "(" * 50 + "1" + ")" * 50, ""):
        with pytest.raises(RowFault):
            score("42", expected)


def test_the_demo_is_strict():
    assert load_config(str(ROOT / "configs" / "grpo_tiny.yaml"), []).env.math.strict


HEDGED = (
    r"<answer>41 or 42</answer>  <answer>42 or 41</answer>  #### 41 or 42  <answer>not 42</answer>  #### not 42  "
    r"#### at least 42  "
    r"#### > 42  <answer>between 41 and 42</answer>  <answer>x = 41 or x = 42</answer>  <answer>$41$ or "
    r"$42$</answer>  #### 41, 42  "
    r"#### x \ne 42  <answer>41, 42, or 43</answer>  <answer>maybe 42</answer>  <answer>42?</answer>  <answer>42 "
    r"\pm 1</answer>  "
    r"#### isn't 42  The answer is not 42.  The answer is 41 or 42.  Answer: 42 or 43  <answer>more than 42</answer>  "
    r"#### cannot be 42  #### 42 or more"
)


@pytest.mark.attack("an answer flatters its grader")
@pytest.mark.parametrize("is_strict", [False, True])
def test_hedges_and_denials_are_no_answers(is_strict: bool):
    assert [text for text in HEDGED.split("  ") if score(text, "42", is_strict=is_strict)[0] != 0.0] == []
    claims = "<answer>1/2 or 0.5</answer>  #### 0.5  Not 0.3 but 0.5  The answer is 0.5.  x is 3 or 4; so it is 0.5"
    assert [text for text in claims.split("  ") if score(text, "0.5", is_strict=is_strict)[0] != 1.0] == []


@pytest.mark.attack("an answer flatters its grader")
@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    ("expected", "said"),
    [
        (r"1-\frac{1}{2^{2023}}", "1"),
        ("1", r"1-\frac{1}{2^{2023}}"),
        (r"\frac{1}{2}+\frac{1}{2^{2021}}", r"\frac{1}{2}"),
        ("2^{1012}-2", "2^{1012}+2"),
        (r"\frac{2^{100}+1}{3\cdot 2^{101}}", r"\frac{7}{2^{300}}"),
        (r"(1, 1-2^{-2000})", "(1, 1)"),
        (r"x^2+2^{-200}", "x^2"),
        ("10^{30}", "10^{30}+1"),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
        ("12345678901234567891", "12345678901234567890"),
        ("2516_8", "2516"),
        ("2516", "2516_8"),
    ],
)
def test_numbers_compare_exactly(expected: str, said: str, is_strict: bool):
    assert score(f"\\boxed{{{said}}}", expected, is_strict=is_strict)[0] == 0.0
    assert score(f"\\boxed{{{expected}}}", expected, is_strict=is_strict)[0] == 1.0


def test_an_equation_before_a_box_does_not_count():
    lefts = (
        r"f(3)  a_3  20% of 90  9 x 2  9 \times 2  1,018 - 1,000  \$1,018 - \$1,000  \frac{3}{4} \times 24  "
        r"half of 36  n + 1  |x|"
    )
    assert [
        left for left in lefts.split("  ") if score(f"{left} = \\boxed{{18}}", "18", is_strict=True)[0] != 1.0
    ] == []


@pytest.mark.attack("an answer starves the others")
@pytest.mark.parametrize(
    "said",
    [
        *(
            "10^{999999999}",
            r"\frac{10^{999999999}}{3}",
            "2^{3^{4^{5^{6}}}}",
            r"\sqrt{99999999999999999999999999999999999961}",
            "9" * 290,
        )
    ]
    + [
        "(" * 140 + "1" + ")" * 140,
        "1e999999999",
        r"0.\overline{" + "1" * 280 + "}",
        "1/" * 140 + "1",
        r"\sqrt" * 50 + "{2}",
    ],
)
def test_no_plain_number_takes_long(said: str):
    for expected in ("42", "0.5", r"3\sqrt{2}", "10^{5000}"):
        assert score(f"\\boxed{{{said}}}", expected, is_strict=True)[0] == 0.0


@pytest.mark.attack("an answer flatters its grader")
@pytest.mark.parametrize(
    "text",
    ["\\boxed{A}\\boxed{B}\\boxed{C}", "\\boxed{ABCD}", "\\boxed{A or B}", "\\boxed{\\text{A,B}}", "A B C D"],
)
def test_several_letters_are_not_the_right_one(text: str):
    assert score_choice(Task((text,), row='{"expected_answer": "A"}')).reward == 0.0


@pytest.mark.attack("a schema reaches the network")
@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef", "$schema"])
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_schemas_never_fetch(tmp_path: Path, keyword: str, scheme: str):
    (tmp_path / "schema.json").write_text("true")
    callers, is_over = list[object](), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            while not is_over.is_set():
                connection, address = server.accept()
                callers.append(address)
                connection.close()

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        port = server.getsockname()[1]
        place = f"http://127.0.0.1:{port}/schema.json" if scheme == "http" else (tmp_path / "schema.json").as_uri()
        row = f'{{"schema_str": "{{\\"{keyword}\\": \\"{place}\\"}}"}}'
        if keyword == "$schema":
            assert score_json(Task(("1",), row=row)).reward == 1.0
        else:
            with pytest.raises(RowFault, match="Unresolvable"):
                score_json(Task(("1",), row=row))
        is_over.set()
        # Whoever has called before comes first.
        with socket.create_connection(("127.0.0.1", port)) as own:
            listener.join(HANG_S)
            assert callers == [own.getsockname()]


@pytest.mark.parametrize(
    "text",
    [
        "<think>so 30</think>\\boxed{32}", "<think>\\boxed{32}</think>", "<b>Answer</b> \\boxed{32}",
        "<|im_start|>\\boxed{32}",
        "12 + 20 -> \\boxed{32}", "answer >> \\boxed{32}", "hence => 32", "<answer>32</answer>",
    ],
)  # fmt: skip
def test_a_mark_before_an_answer_compares_nothing(text: str):
    assert [score(text, "32", is_strict=is_strict)[0] for is_strict in (False, True)] == [1.0, 1.0]


def test_a_comparison_before_an_answer_is_a_bound():
    assert [
        score(text, "32", is_strict=False)[0] for text in ("x > \\boxed{32}", "<b>x</b> > \\boxed{32}", "x \\geq 32")
    ] == [0.0] * 3
