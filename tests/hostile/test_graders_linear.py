# SPDX-License-Identifier: Apache-2.0
"""Every pattern that a model's text meets, on the worst text for it, in processor time linear in its length."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator, Mapping

import pytest

from mrl.config.texts import safe_text
from mrl.envs import letters, math, math_notation, math_number, math_size, math_value
from mrl.envs.code import last_code_block
from mrl.envs.tool_calls import tool_calls
from mrl.nemo.gym.graders import instruction_following as instructions
from mrl.nemo.gym.graders import mcqa
from tests.sources import ROOT
from tests.waiting import growth

NUM_CHARACTERS = 5_000
"""The other text is four times as long, on which a quadratic pattern takes 16 times as long. Graders read more than
both.
"""

ARGUMENTS: Mapping[str, object] = {
    "keyword": "ab",
    "keywords": ["ab"],
    "forbidden_words": ["ab"],
    "letter": "a",
    "language": "en",
    "first_word": "a",
    "postscript_marker": "P.P.S",
    "section_spliter": "Section",
    "prompt_to_repeat": "a",
    "end_phrase": "a",
    "nth_paragraph": 1,
    **dict.fromkeys(
        ("frequency", "let_frequency", "capital_frequency", "num_sentences", "num_paragraphs", "num_words"), 1
    ),
    **dict.fromkeys(
        ("num_placeholders", "num_bullets", "num_highlights", "num_sections", "n_sent", "n_words", "n", "m", "N"), 1
    ),
    **dict.fromkeys(("keyword1", "keyword2", "last_word"), "a"),
    "n_start": 0,
    "n_end": 1,
    "phrase": "a b c",
    "small_n": 1,
}


def every(*patterns: re.Pattern[str]) -> Callable[[str], object]:
    return lambda text: [pattern.findall(text) for pattern in patterns]


def follow_all(text: str) -> None:
    for check in instructions.CHECKS.values():
        check(text, ARGUMENTS)


def choose_letter(text: str) -> None:
    letters.choose(text)
    for pattern in (letters.MORE, letters.ENDS, letters.BOX_ENDS):
        pattern.match(text)
    for mode in mcqa.MODES:
        for reply in (text, f"\\boxed{{{text}}}", f"answer: {text}"):
            mcqa.choose_as_gym(reply, {"A": "a", "B": "1."}, [], mode)


def read_answer(text: str) -> None:
    math_number.spelled(text)
    math_number.tidy(text)
    math_number.read_number(text[: math_number.MAX_CHARACTERS])


def even_answer(text: str) -> None:
    math_value.bare(text)
    math_notation.evened(text)


def find_hedges(text: str) -> None:
    length = min(len(text), math_number.MAX_CHARACTERS)
    math_number.is_hedged(text, length, length + 1, is_stated=True)


def search_answer(text: str) -> None:
    every(math_value.DIGITS_OF_BASE, math_value.BOXES, math_size.LIMITS, math_size.FUNCTION_NAMES)(text)
    math_value.joined_boxes(text[-math_value.SEARCHED_CHARACTERS :])
    math_value.right_side(text)


def search_end(text: str) -> None:
    every(math_value.EMPHASIS, math_value.ANSWER_PHRASE)(text[-math_value.SEARCHED_CHARACTERS :])


NUMBERS = (
    "COMPUTING _VULGAR _SUPERSCRIPTS _ROOT _FONT _NOTHING _THOUSANDS _SPELLINGS _WORDS _DECIMAL _REPEATING _MIXED "
    "_RATIO _BODY _UNIT _LIST _HEDGE _UNFINISHED _JOINED _EQUALS computed _one_side _unit"
).split()
HEDGES = "_BEFORE _BEHIND _OR_BEFORE _OR_BEHIND _ALSO _NUMBERS _NAMES _JOINTS".split()

LETTERS = "BOXED ANSWER MORE ENDS BOX_ENDS choose".split()
MCQA = "BOXED_LETTER COLON COLON_MD ALONE BETWEEN _letter_of".split()

MEETS_TEXT: Mapping[str, Callable[[str], object]] = {
    "mrl.config.texts._UNSAFE": safe_text,
    "mrl.envs.math_number._MARKS": find_hedges,
    "mrl.envs.math.ANSWER_LINE": lambda text: math.score_dapo(text, "1"),
    "mrl.envs.math.plain_answer": lambda text: math.score_dapo(f"answer: {text[: math.DAPO_TAIL_CHARACTERS]}", "1"),
    **dict.fromkeys((f"mrl.envs.math_number.{name}" for name in NUMBERS), read_answer),
    **dict.fromkeys((f"mrl.envs.math_number.{name}" for name in HEDGES), find_hedges),
    **dict.fromkeys((f"mrl.envs.math_value.{name}" for name in ("BARE", "FONTS", "bare", "_words")), even_answer),
    "mrl.envs.math_notation._REWRITTEN": even_answer,
    "mrl.envs.math_value.HEADING": math_value.answer_part,
    "mrl.envs.math_value.WORD": lambda text: math_value.answer_part(f"#### {text}\\boxed{{"),
    **dict.fromkeys((f"mrl.envs.math_value.{name}" for name in ("DIGITS_OF_BASE", "BOXES", "JOINT")), search_answer),
    **dict.fromkeys((f"mrl.envs.math_size.{name}" for name in ("LIMITS", "FUNCTION_NAMES")), search_answer),
    **dict.fromkeys((f"mrl.envs.math_value.{name}" for name in ("EMPHASIS", "ANSWER_PHRASE")), search_end),
    "mrl.envs.math_value.PERCENT": math_value.PERCENT.match,
    "mrl.envs.math_size._PARTS": math_size.size_of,
    "mrl.envs.math_size._DIGITS": math_size.size_of,
    "mrl.envs.math_size._EAGER": math_size.size_of,
    "mrl.envs.math_size._EAGER_COST": lambda text: math_size.size_of(f"gcd {text}"),
    "mrl.envs.math_size._NUMBER_RUN": math_size.search_cost,
    "mrl.envs.math_size._ENVIRONMENTS": math_size.search_cost,
    **dict.fromkeys((f"mrl.envs.letters.{name}" for name in LETTERS), choose_letter),
    **dict.fromkeys((f"mrl.nemo.gym.graders.mcqa.{name}" for name in MCQA), choose_letter),
    "mrl.nemo.gym.graders.instruction_following.detect": instructions.detect,
    "mrl.envs.tool_calls.BLOCK": lambda text: tool_calls(f"<tool_call>{text}"),
    "mrl.envs.tool_calls.FUNCTION": lambda text: tool_calls(f"<tool_call><function=f>{text}</function></tool_call>"),
    "mrl.envs.tool_calls.PARAMETER": lambda text: tool_calls(f"<tool_call><function=f>{text}</function></tool_call>"),
    **{
        f"mrl.nemo.gym.graders.sentences.{name}": follow_all
        for name in "BREAK CLOSERS sentences OPENING APOSTROPHE LAST_PERIOD PIECE CLITIC RULES".split()
    },
    **{
        f"mrl.nemo.gym.graders.instruction_following.{name}": follow_all
        for name in "_occurrences _number_paragraphs _nth_paragraph _postscript _bullets _highlights _sections "
        "_repeat_phrase _is_last_word _composition CHECKS".split()
    },
}
"""Callers by the module, and the name that is assigned or the function that holds the pattern: what puts a text through
it.
"""

MEETS_NO_TEXT = {
    "mrl.envs.math_value.SCIENTIFIC",
    "mrl.envs.math_value.AMBIGUOUS",
    "mrl.envs.math_value.DATE",
    "mrl.envs.math_value.LETTER",
    "mrl.envs.math_value._is_contradiction",
    "mrl.data.chat._words",
    "mrl.data.chat._CALL",
    "mrl.data.chat.dated",
    "mrl.data.extras._words",
    "mrl.data.reading.Names",
    "mrl.data.rendering._LAYOUT",
    "mrl.data.rendering._parts",
    "mrl.data.rendering._with_known_thoughts",
    "mrl.data.rows._THOUSANDS",
    "mrl.data.rows.gold_of",
    "mrl.data.supervised._mark_behind",
    "mrl.nemo.gym.graders.mcqa.own_patterns",
    "mrl.nemo.gym.graders.mcqa.score",
    "mrl.store.checkpoints.SHARD",
    "mrl.store.disk._NUMBER",
    "mrl.store.marks.STEP_FOLDER",
    "mrl.store.marks._LEFT",
    "mrl.store.marks._NUMBERED",
    "mrl.store.marks._PENDING",
    "mrl.store.marks._UNFINISHED_MARK",
    "mrl.store.marks._SHARD_OF_MODEL",
    "mrl.store.marks._WEIGHTS",
    "mrl.store.marks._is_saved",
    "mrl.store.marks._mark_by_marker",
    "mrl.store.rollout_files.FILE",
    "mrl.store.rollout_files.write_step",
    "mrl.store.loggers.prometheus.PrometheusSink",
    "mrl.store.samples.drop_old_step_data",
}
"""Patterns over chat templates, rows, paths, ids, names of metrics and expected answers, and the rows' own patterns.

Those are bounded by the deadline.
"""

PIECES = (
    *(
        " ",
        "\n",
        "\n ",
        "a",
        "A. ",
        '."',
        ". ",
        "'",
        "(",
        "[",
        "[a",
        "<",
        "<<",
        "<<a",
        ">>",
        "*",
        "**",
        "**a",
        "* a",
        "***",
        "-",
        "- ",
    ),
    *(
        "`",
        "```",
        "```\n",
        "```a\n",
        "p. ",
        "P.",
        "Section ",
        "answer",
        "answer ",
        "answer: ",
        "answer is ",
        "\\boxed{",
        "\\boxed{ ",
    ),
    *(
        "\\text{",
        "\\text{a",
        "$",
        "\\frac",
        "\\frac{1",
        "\\(",
        "\\[",
        "$$",
        "1",
        "1,",
        "1 111",
        "1.",
        "+",
        "|",
        "<tool_call>",
    ),
    *("<function=", "<function=a>", "<parameter=", "<parameter=a>", "</parameter>", "</function>", "\x1b["),
)

HEADS = (
    "a",
    "A.",
    "answer",
    "answer is",
    "answer:",
    "\\boxed{",
    "\\boxed{\\text{",
    "Section",
    "p.p.",
    "```\na",
    "<<",
    "[",
    "*",
)
"""Texts that a long run of white space may follow."""


def patterns_of_the_product() -> Iterator[str]:
    for folder in ("mrl/envs", "mrl/nemo/gym/graders", "mrl/data", "mrl/store"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if module == "mrl.envs.code":
                continue  # `last_code_block` stands for its patterns
            for statement in ast.parse(path.read_text()).body:
                calls = (ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call))
                if any(call.startswith("re.") for call in calls):
                    yield f"{module}.{name_of(statement)}"
    assert importlib.import_module("mrl.config.texts")
    yield "mrl.config.texts._UNSAFE"


def name_of(statement: ast.stmt) -> str:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
    raise AssertionError(f"a pattern stands in {ast.unparse(statement):.80}")


def test_each_pattern_is_known_here():
    assert set(patterns_of_the_product()) == MEETS_TEXT.keys() | MEETS_NO_TEXT


@pytest.mark.attack("an answer starves the others")
@pytest.mark.parametrize(
    ("head", "piece"), [*(("", piece) for piece in PIECES), *((head, " ") for head in HEADS), ("a", "\n")]
)
def test_no_text_takes_more_than_linear_time(head: str, piece: str):
    for name, run in [
        *{run: (name, run) for name, run in MEETS_TEXT.items()}.values(),
        ("code blocks", last_code_block),
    ]:
        assert growth(lambda length, run=run: run((head + piece * length)[:length] + "1"), NUM_CHARACTERS) < 8, name


@pytest.mark.attack("an answer starves the others")
@pytest.mark.parametrize(
    "piece",
    [
        "$",
        "$$a",
        "\\(\\boxed{a}",
        "\\[",
        " [\\boxed{a}",
        "**1",
        "1 ",
        "1,",
        "\\boxed{a} and ",
        "$a$ and ",
        "answer: $",
        "final answer is ",
    ],
)
def test_math_verifys_patterns_are_bounded(piece: str):
    assert growth(lambda length: math_value.score((piece * length)[:length], "42"), NUM_CHARACTERS) < 8
