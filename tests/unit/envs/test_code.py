# SPDX-License-Identifier: Apache-2.0
import json
import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.envs import code
from mrl.envs.code import last_code_block, run_test, same_output, same_value, score
from mrl.envs.task import Outcome, RowFault, Task
from tests.hostile.benign import BENIGN, program
from tests.waiting import HANG_S, SOON_S, growth

ADD = {"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34"]}
CALL = {"inputs": ["[1, 2]\n3", "[]\n4"], "outputs": ["[4, 5]", "[]"], "fn_name": "shift"}


def judge(
    program: str, tests: Mapping[str, object] = ADD, *, test_timeout_s: float = HANG_S, timeout_s: float = HANG_S
) -> Outcome:
    row = json.dumps({"verifier_metadata": {"unit_tests": tests}})
    return score(
        Task((f"Here:\n```python\n{program}\n```\n",), row=row), test_timeout_s=test_timeout_s, timeout_s=timeout_s
    )


@pytest.mark.parametrize(
    "program",
    [
        "print(sum(map(int, input().split())))",
        (
            "import sys\nif __name__ == '__main__':\n    print(sum(int(x) for x in sys.stdin.buffer.read().split()))\n "
            "   sys.exit(0)"
        ),
        "a, b = map(int, open(0).read().split())\nprint(f'{a + b}.0 ')",
        "print(reduce(lambda a, b: a + b, [int(x) for x in input().split()], pow(5, 0, 3) - 1))",
        "open('notes', 'w').write('x')\nprint(sum(map(int, input().split())))",
    ],
)
def test_programs_that_pass(program: str):
    assert judge(program) == Outcome(1.0, extracted="passed 2 tests")


@pytest.mark.parametrize(
    "program",
    [
        "def shift(values, by):\n    return [value + by for value in values]",
        (
            "class Solution:\n    def shift(self, values: List[int], by: int):\n        print(0)\n        return "
            "tuple(v + by for v in values)"
        ),
    ],
)
def test_functions_that_pass(program: str):
    assert judge(program, CALL).reward == 1.0


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print(3)", "test 2 of 2: wrong output"),
        ("print(", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("x = bytearray(1 << 32)", "MemoryError"),
        ("while True: print('x' * 65536)", "test 1 of 2"),
        ("import os; os._exit(3)", "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "exit code -11"),
        ("import socket; socket.create_connection(('127.0.0.1', 22))", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError"),
        ("import os; os.fork()", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("class Secret(Exception): pass\nraise Secret('no')", "exit code 1"),
        ("open('/tmp/escaped', 'w')", "PermissionError"),
        ("input(); input()", "EOFError"),
    ],
)
def test_programs_that_fail_say_why(program: str, reason: str):
    outcome = judge(program)
    assert outcome.reward == 0.0 and reason in outcome.extracted


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(6000)"])
def test_programs_that_hang_have_failed(program: str):
    assert judge(program, test_timeout_s=SOON_S).extracted == f"test 1 of 2: no answer within {SOON_S:.3g} s"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def shift(values, by): return values", "wrong result"),
        ("def shift(values): return values", "TypeError"),
        ("def other(): pass", "KeyError"),
        ("def shift(values, by): return {1}", "exit code 1, TypeError"),
        ("def shift(values, by): raise SystemExit(0)", "no result"),
    ],
)
def test_functions_that_fail_say_why(program: str, reason: str):
    outcome = judge(program, CALL)
    assert outcome.reward == 0.0 and reason in outcome.extracted


@pytest.mark.parametrize(
    ("program", "reward"),
    [("print(sum(map(int, input().split())))\nexit(3)", 1.0), ("print(sum(map(int, input().split())))\n1 / 0", 0.0)],
)
def test_the_exit_code_that_a_program_chooses_does_not_count(program: str, reward: float):
    assert judge(program).reward == reward


@pytest.mark.parametrize(
    ("returned", "right", "is_same"),
    [
        *((3, 3, True), ("3", 3, True), (3.00001, 3, True), (3.001, 3, False), ("x", 3, False), (None, 3, False)),
        # Whole numbers are counted, modulo 1,000,000,007 too; in a float as well, and in the text of a long number.
        *(
            (1_000_000_006, 1_000_000_007, False),
            (1_000_000_006.0, 1_000_000_007, False),
            (1_000_000_006, 1_000_000_007.0, False),
        ),
        *(("1000000006", "1000000007", False), ([100_001], [100_000], False), ({"a": 100_001}, {"a": 100_000}, False)),
        *(
            (5 * 10**16 + 1, 5 * 10**16, False),
            (5e16, 5 * 10**16, True),
            (10**400, 10**400 + 1, False),
            (2.0, 2, True),
            (2, 2.0, True),
        ),
        # Decimals are rounded, wherever they stand.
        *(
            ([3.00001], [3], True),
            ([[0.1 + 0.2]], [[0.3]], True),
            ({"a": [1 / 3, "x"]}, {"a": [0.33333333, "x"]}, True),
        ),
        *((1.000001e20, 1e20, True), ([0.5, 1], [0.5], False), ([0.5], [0.6], False), ({"a": 0.5}, {"b": 0.5}, False)),
        *(
            (math.inf, math.inf, True),
            (math.inf, 1e308, False),
            (math.nan, math.nan, False),
            ("1e999999999999999999", 1, False),
        ),
        *((True, 1, True), (False, True, False), ([], [], True), ([], {}, False), ("ab", "ab", True)),
    ],
)
def test_numbers_that_functions_return(returned: object, right: object, *, is_same: bool):
    assert same_value(returned, right) == is_same


@pytest.mark.parametrize(
    "helper",
    ["def twice(x):\n    return -1\n\n", "from math import gcd as twice\n", "def twice(x, y):\n    return x * y\n\n"],
)
def test_the_method_of_the_solution_wins_over_a_helper_of_its_name(helper: str):
    program = f"{helper}class Solution:\n    def twice(self, x):\n        return 2 * x\n"
    assert judge(program, {"inputs": ["4"], "outputs": ["8"], "fn_name": "twice"}).reward == 1.0
    function = "class Solution:\n    pass\n\ndef twice(x):\n    return 2 * x\n"
    assert judge(function, {"inputs": ["4"], "outputs": ["8"], "fn_name": "twice"}).reward == 1.0


def test_all_tests_of_a_program_share_a_limit(monkeypatch: pytest.MonkeyPatch):
    now, limits_s = [100.0], list[float]()

    def pass_in_400_s(
        program: str, given: str, expected: str, function: str, seconds: float, *, may_escape: bool
    ) -> None:
        limits_s.append(seconds)
        now[0] += 400.0

    monkeypatch.setattr(code, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(code, "run_test", pass_in_400_s)
    outcome = judge("pass", {"inputs": [""] * 50, "outputs": ["x"] * 50}, test_timeout_s=500.0, timeout_s=1200.0)
    assert limits_s == [500.0, 500.0, 400.0] and outcome == Outcome(0.0, extracted="test 4 of 50: no time left")


def test_nothing_of_the_parent_reaches_a_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert judge("import os; print(os.environ.get('HF_TOKEN'))", {"inputs": [""], "outputs": ["None"]}).reward == 1.0
    before = {path for path in Path("/tmp").glob("mrl-code-*")}
    judge("print(1)")
    assert {path for path in Path("/tmp").glob("mrl-code-*")} <= before


def test_the_last_block_counts():
    text = "```py\na\n```\nthen\n```\nb\n```\nand ```c``` inline"
    assert last_code_block(text) == ""
    assert last_code_block(text.replace(" inline", "\n```")) == ""
    assert last_code_block(text.partition("\nand")[0]) == "b\n"
    assert last_code_block("print(1)") is None
    assert (
        score(Task(("none",), row=json.dumps({"unit_tests": ADD})), test_timeout_s=HANG_S, timeout_s=HANG_S).extracted
        == "no code block"
    )


def test_blocks_are_found_in_time_that_grows_with_the_text():
    assert growth(lambda num: last_code_block("```py\n" * num + "`" * 3 * num), 75_000) < 8


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("1\n2\n", "1\n2", True),
        (" a b \n", "a b", True),
        ("1.50 2", "1.5 2.0", True),
        ("1 2", "1  2", True),
        ("a  b", "a b", False),
        ("1\n\n2", "1\n2", False),
        ("12", "1 2", False),
        ("", "", True),
        ("nan", "0", False),
        ("0.3333333 2", "0.33333333333 2", True),
        ("0.34", "0.33333333333", False),
        ("1000000006", "1000000007", False),
        ("1000000006 0.5", "1000000007 0.5", False),
    ],
)
def test_outputs(printed: str, expected: str, is_same: bool):
    assert same_output(printed, expected) == is_same


@pytest.mark.parametrize(
    "tests",
    [None, {}, {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, {"inputs": [1], "outputs": ["1"]}],
)
def test_a_row_without_tests_is_an_error(tests: object):
    with pytest.raises(ValueError):
        score(Task(("```\n1\n```",), row=json.dumps({"unit_tests": tests})), test_timeout_s=HANG_S, timeout_s=HANG_S)


def test_usual_programs_are_not_hindered():
    assert len(BENIGN) >= 61
    assert (
        judge(program(), {"inputs": [""], "outputs": ["[]"]}, test_timeout_s=HANG_S, timeout_s=HANG_S).extracted
        == "passed 1 tests"
    )


@pytest.mark.parametrize("name", ["gcd", "comb", "bisect_left", "Counter", "prod", "reduce"])
def test_a_name_of_the_prelude_is_no_solution(name: str):
    tests = {"inputs": ["[4, 6]"], "outputs": ["2"], "fn_name": name}
    assert judge("pass", tests).extracted == "test 1 of 1: exit code 1, KeyError"


def test_a_solution_may_have_a_name_of_the_prelude():
    tests = {"inputs": ["4\n6"], "outputs": ["2"], "fn_name": "gcd"}
    assert judge("def gcd(a, b):\n    return b if a == 0 else gcd(b % a, a)", tests).reward == 1.0
    assert judge("from math import gcd", tests).reward == 1.0


@pytest.mark.parametrize(
    ("program", "given", "expected", "function"),
    [
        ("def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(5000))", "", "5000", ""),
        ("print(math.factorial(2000) % 10**9 == 0, len(str(math.factorial(2000))))", "", "True 5736", ""),
        ("print(int(input()) % 7)", "1" * 5000, "4", ""),  # 111111 is 0, 11 is 4
        (
            "print(deepcopy([itemgetter(1)((2, 3))]), xor(5, 1), ascii_lowercase[:2], mean([1, 3]), timedelta(1).days)",
            "",
            "[3] 4 ab 2 1",
            "",
        ),
        ("import numpy as np\ndef f(a): return np.sum(a), np.array(a)", "[1, 2]", "[3, [1, 2]]", "f"),
    ],
)
def test_what_contests_take_for_granted(program: str, given: str, expected: str, function: str):
    assert run_test(program, given, expected, function, HANG_S) is None


@pytest.mark.parametrize(("given", "ends"), [("9" * 5000, nullcontext()), ("{", pytest.raises(RowFault))])
def test_long_numbers_of_programs_are_read_by_nothing_else(given: str, ends: AbstractContextManager[object]):
    before = sys.get_int_max_str_digits()
    with ends:
        assert run_test("def f(n): return n", given, given, "f", HANG_S) is None
    assert sys.get_int_max_str_digits() == before < len("9" * 5000)
