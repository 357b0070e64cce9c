# SPDX-License-Identifier: Apache-2.0
"""No wait without a deadline, and no call that runs code from disk or hides errors.

Reads product source only: tests are bounded by pytest's timeout.
"""

from __future__ import annotations

import ast

import pytest

from tests.sources import PRODUCT_FOLDERS, ROOT, python_files

# Calls that wait for ever unless `timeout` is given, by the end of their dotted name.
NEED_TIMEOUT = {
    "ray.get",
    "ray.wait",
    "subprocess.run",
    "subprocess.call",
    "subprocess.check_call",
    "subprocess.check_output",
    "init_process_group",
    "new_group",
    "TCPStore",
    "urlopen",
    "create_connection",
}
# Methods that wait for ever when called with nothing at all: queues, threads, processes, futures, events, locks.
NEED_ARGUMENT = {"get", "join", "result", "wait", "acquire", "communicate", "exception", "select"}
# Methods without a timeout of their own: the same function must `poll` with one first.
NEED_POLL = {"recv", "recv_bytes"}

# What makes code of bytes and names is listed in test_code_loaders.py.
FORBIDDEN = {"os.system", "os.popen"}
FORBIDDEN_BUILTINS = {"eval", "exec"}


def unbounded_waits(source: str) -> list[str]:
    """Line and text of every call in `source` that can wait for ever, and of every polling loop that reads no clock."""
    tree = ast.parse(source)
    found = [_text(call) for call in _calls(tree) if _waits_for_ever(call)]
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        calls = _calls(function)
        polls = any(_ends_with(call, {"poll"}) and (call.args or call.keywords) for call in calls)
        found += [_text(call) for call in calls if not polls and _is_method(call, NEED_POLL) and not (call.args or call.keywords)]
        if not any(_ends_with(call, {"monotonic"}) for call in calls):
            loops = [node for node in ast.walk(function) if isinstance(node, ast.While)]
            found += [_text(loop.test) for loop in loops if any(_ends_with(call, {"sleep"}) for call in _calls(loop))]
    return found


def forbidden(source: str) -> list[str]:
    """Line and text of every unsafe load, shell, eval, and handler that hides an error."""
    tree = ast.parse(source)
    found = []
    for call in _calls(tree):
        name = ast.unparse(call.func)
        is_builtin = isinstance(call.func, ast.Name) and name in FORBIDDEN_BUILTINS
        is_unsafe_torch = name == "torch.load" and _literal(call, "weights_only") is not True
        if is_builtin or is_unsafe_torch or _ends_with(call, FORBIDDEN) or _literal(call, "shell") is True:
            found.append(_text(call))
        if _ends_with(call, {"suppress"}) and {ast.unparse(arg) for arg in call.args} & {"Exception", "BaseException"}:
            found.append(_text(call))
    for handler in (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)):
        if handler.type is None or all(isinstance(statement, ast.Pass) for statement in handler.body):
            found.append(_text(handler))
    return found


def _waits_for_ever(call: ast.Call) -> bool:
    arguments = {keyword.arg for keyword in call.keywords}
    no_limit = any(keyword.arg in ("timeout", "timeout_s") and _is_none(keyword.value) for keyword in call.keywords)
    if no_limit:
        return True
    if _ends_with(call, NEED_TIMEOUT):
        return "timeout" not in arguments and None not in arguments
    if _is_method(call, NEED_ARGUMENT):
        blocks = call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value is True and len(call.args) == 1
        return (not call.args or bool(blocks)) and arguments <= {"block", "blocking"} and _literal(call, "block") is not False
    if _ends_with(call, {"flock", "waitpid"}):
        return not any("LOCK_NB" in ast.unparse(arg) or "LOCK_UN" in ast.unparse(arg) or "WNOHANG" in ast.unparse(arg) for arg in call.args)
    return False


def _calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _ends_with(call: ast.Call, names: set[str]) -> bool:
    text = ast.unparse(call.func)
    return any(text == name or text.endswith("." + name) for name in names)


def _is_method(call: ast.Call, names: set[str]) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in names


def _literal(call: ast.Call, argument: str) -> object:
    values = [keyword.value for keyword in call.keywords if keyword.arg == argument]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _text(node: ast.expr | ast.excepthandler) -> str:
    return f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}"


def test_every_wait_has_a_deadline():
    found = {str(path.relative_to(ROOT)): unbounded_waits(path.read_text()) for path in python_files(PRODUCT_FOLDERS)}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_nothing_forbidden():
    found = {str(path.relative_to(ROOT)): forbidden(path.read_text()) for path in python_files(PRODUCT_FOLDERS)}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "ray.get(reference)",
        "ray.get(reference, timeout=None)",
        "ray.wait(references, num_returns=1)",
        "queue.get()",
        "queue.get(block=True)",
        "queue.get(True)",
        "thread.join()",
        "process.join(timeout=None)",
        "future.result()",
        "event.wait()",
        "lock.acquire()",
        "process.communicate()",
        "subprocess.run(['ls'])",
        "subprocess.check_output(['ls'])",
        "torch.distributed.init_process_group('gloo')",
        "dist.new_group(ranks)",
        "urllib.request.urlopen(url)",
        "selector.select()",
        "fcntl.flock(file, fcntl.LOCK_EX)",
        "os.waitpid(pid, 0)",
        "def f(connection):\n    return connection.recv()",
        "def f(path):\n    while not path.exists():\n        time.sleep(1)",
    ],
)
def test_an_unbounded_wait_is_found(line: str):
    assert unbounded_waits(line)


@pytest.mark.parametrize(
    "line",
    [
        "ray.get(reference, timeout=limit)",
        "ray.wait(references, timeout=0)",
        "queue.get(timeout=1.0)",
        "queue.get(block=False)",
        "table.get('key')",
        "', '.join(names)",
        "thread.join(5)",
        "process.communicate(timeout=5)",
        "subprocess.run(['ls'], timeout=5)",
        "dist.new_group(ranks, timeout=limit)",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "def f(connection):\n    if connection.poll(limit):\n        return connection.recv()",
        "def f(path):\n    while time.monotonic() < end:\n        time.sleep(1)",
    ],
)
def test_a_bounded_wait_passes(line: str):
    assert unbounded_waits(line) == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "eval(text)",
        "exec(text)",
        "os.system('ls')",
        "subprocess.run('ls', shell=True, timeout=5)",
        "try:\n    f()\nexcept:\n    raise",
        "try:\n    f()\nexcept OSError:\n    pass",
        "with contextlib.suppress(Exception):\n    f()",
    ],
)
def test_a_forbidden_call_is_found(line: str):
    assert forbidden(line)


@pytest.mark.parametrize(
    "line", ["model.eval()", "torch.load(path, weights_only=True)", "yaml.safe_load(text)", "with suppress(ProcessLookupError):\n    f()"]
)
def test_an_allowed_call_passes(line: str):
    assert forbidden(line) == []
