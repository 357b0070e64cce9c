# SPDX-License-Identifier: Apache-2.0
"""No wait without a deadline.

Reads product source only: tests are bounded by pytest's timeout.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.sources import PRODUCT_FOLDERS, ROOT, python_files, tree_of

# Calls that wait for ever unless `timeout` is given, by the end of their dotted name.
NEED_TIMEOUT = {"ray.get", "ray.wait", "init_process_group", "new_group", "TCPStore", "urlopen", "create_connection"}
NEED_TIMEOUT |= {"subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
# Methods that wait for ever when called with nothing at all: queues, threads, processes, futures, events, locks.
NEED_ARGUMENT = {"get", "join", "result", "wait", "acquire", "communicate", "exception", "select"}
# Methods without a timeout of their own: the same function must `poll` with one first.
NEED_POLL = {"recv", "recv_bytes"}

# Calls that know no timeout: `within` makes them, which gets them uncalled (conversion/files/limits.py).
NEED_WITHIN = {"ray.init", "ray.put", "ray.shutdown", "os.fsync"}
# In the driver also these: a file system that hangs must not hang the run without a word.
READS = {"open", "read_bytes", "read_text"}
WRITES = {
    "write",
    "write_text",
    "write_bytes",
    "flush",
    "truncate",
    "mkdir",
    "rename",
    "unlink",
    "rmtree",
    "touch",
    "link",
}
WRITES |= {"copy2", "copyfile"}
DRIVER = ("mrl/loop/", "mrl/store/", "mrl/cluster/", "mrl/train.py")
UNLIMITED = {
    "in a rank, whose answer the driver waits for within train_s": [
        ("mrl/cluster/payload.py", "ray.put(pack(flat))"),
    ],
    "in a rank, whose answer the driver waits for within checkpoint_s": [
        ("mrl/policy/checkpoint.py", "os.fsync(probe.fileno())"),
    ],
    "in a launcher's look at the cluster, which the launcher ends": [
        ("mrl/cluster/nodes.py", "ray.init(address='auto'"),
    ],
    "of a process that has only joined, and has no daemons to end": [
        ("mrl/cluster/nodes.py", "ray.shutdown()"),
    ],
    "in the folder of temporary files: Ray's own, on a disk of the host": [
        ("mrl/cluster/runtime.py", "(folder / OWNER_FILE).read_text()"),
        ("mrl/cluster/runtime.py", "owner_file.write_text("),
        ("mrl/cluster/runtime.py", "token_file."),
        ("mrl/cluster/runtime.py", "shutil.rmtree("),
    ],
    "of Ray's logs, in the folder of temporary files: on a disk of the host": [
        ("mrl/cluster/daemons.py", "path.open('rb')"),
    ],
    "of the kernel, which has it in memory": [
        ("mrl/cluster/daemons.py", "path.read_text("),
        ("mrl/cluster/daemons.py", "Path(f'/proc/{pid}/stat')"),
        ("mrl/cluster/daemons.py", "Path('/proc/self/environ')"),
        ("mrl/cluster/lifetime.py", "Path('/proc/meminfo').read_text("),
        ("mrl/cluster/lifetime.py", "(cgroup / 'memory.max').read_text()"),
        ("mrl/cluster/lifetime.py", "(cgroup / 'memory.current').read_text()"),
    ],
    "of /proc, in the reaper, which the driver waits for within a limit": [
        ("mrl/cluster/lifetime.py", "(entry / 'environ').read_bytes()"),
        ("mrl/cluster/lifetime.py", "(entry / 'stat').read_bytes()"),
    ],
    "of /proc, in a call of `within`": [
        ("mrl/cluster/lifetime.py", "Path(f'/proc/{pid}/"),
    ],
    "in a process that nobody waits for longer than CARRY_TIMEOUT_S": [
        ("mrl/cluster/lifetime.py", "local.open("),
        ("mrl/cluster/lifetime.py", "target.open("),
        ("mrl/cluster/lifetime.py", "target.parent.mkdir("),
        ("mrl/cluster/lifetime.py", "sink.write("),
        ("mrl/cluster/lifetime.py", "shutil.rmtree("),
    ],
    "of /proc, in a thread that nobody waits for; what is read takes no lock of memory": [
        ("mrl/cluster/watchdog.py", "Path(f'/proc/{pid}/"),
    ],
    "on a disk of the host, in a thread that nobody waits for": [
        ("mrl/cluster/watchdog.py", "local_file(self._folder"),
        ("mrl/cluster/watchdog.py", "path.open('rb')"),
        ("mrl/cluster/watchdog.py", "file.write("),
    ],
    "in an actor, whose start the driver waits for within start_s": [
        ("mrl/cluster/environment.py", "os.open(log_file"),
        ("mrl/cluster/environment.py", "root.mkdir("),
        ("mrl/cluster/environment.py", "log_file.parent.mkdir("),
    ],
    "in `remove_marked`, which `CheckpointStore` calls within a limit": [
        ("mrl/store/marks.py", "path.unlink()"),
        ("mrl/store/marks.py", "shutil.rmtree(entry"),
        ("mrl/store/marks.py", "entry.unlink()"),
    ],
    "in `append_report_samples`, which `RunFolder` calls within a limit": [
        ("mrl/store/samples.py", "path.open('ab+')"),
        ("mrl/store/samples.py", "file.write(lines"),
    ],
    "on a disk of the host": [
        ("mrl/cluster/lifetime.py", "outbox.mkdir("),
    ],
    "in the folder of temporary files, on a disk of the host": [
        ("mrl/cluster/environment.py", "folder.mkdir("),
    ],
    "no file: see `Ledger.flush`, which has a limit": [
        ("mrl/store/ledger.py", "self.flush()"),
        ("mrl/loop/saving.py", "self._folder.ledger.flush()"),
    ],
    "in a logger's thread, which the driver waits for within a limit": [
        ("mrl/store/loggers/swanlab.py", "folder.mkdir("),
    ],
    "in its logger's thread, which the run does not wait for": [
        ("mrl/store/loggers/tensorboard.py", "folder.mkdir("),
    ],
    "in the same thread": [
        ("mrl/store/loggers/tensorboard.py", "(folder / name).open("),
        ("mrl/store/loggers/tensorboard.py", "self._file."),
    ],
    "into memory": [
        ("mrl/store/loggers/tensorboard.py", "RecordWriter(record).write("),
    ],
    "in the thread that writes texts, which the driver waits for within WRITE_TIMEOUT_S": [
        ("mrl/store/samples.py", "file.write((json"),
        ("mrl/store/samples.py", "aside."),
        ("mrl/store/samples.py", "path.unlink("),
    ],
    "no file: see `RunFolder.open`": [
        ("mrl/loop/main.py", "folder.open()"),
    ],
    "no file: starts the processes of the run": [
        ("mrl/loop/main.py", "training.open("),
    ],
}
"""Reasons why a call may have no limit -> files and beginnings of such calls."""


def unbounded_waits(source: str) -> list[str]:
    """Line and text of every call in `source` that can wait for ever, and of every polling loop that reads no clock."""
    tree = tree_of(source)
    found = [_text(call) for call in _calls(tree) if _waits_for_ever(call)]
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        calls = _calls(function)
        polls = any(_ends_with(call, {"poll"}) and (call.args or call.keywords) for call in calls)
        found += [
            _text(call)
            for call in calls
            if not polls and _is_method(call, NEED_POLL) and not (call.args or call.keywords)
        ]
        if not any(_ends_with(call, {"monotonic"}) for call in calls):
            loops = [node for node in ast.walk(function) if isinstance(node, ast.While)]
            found += [_text(loop.test) for loop in loops if any(_ends_with(call, {"sleep"}) for call in _calls(loop))]
    return found


def without_limit(source: str, *, in_driver: bool) -> list[str]:
    """Text of every call in `source` without a timeout, not made by `within` or a function only `within` calls."""
    tree = tree_of(source)
    calls = _calls(tree)
    made = {id(call) for part in _made_within(tree, calls) for call in _calls(part)}
    unlimited = NEED_WITHIN | (READS | WRITES if in_driver else set())
    return [ast.unparse(call) for call in calls if _ends_with(call, unlimited) and id(call) not in made]


def _made_within(tree: ast.Module, calls: list[ast.Call]) -> list[ast.AST]:
    """The functions and lambdas of a module that `within` gets uncalled, and that nobody else calls."""
    given = [call.args[2] for call in calls if _ends_with(call, {"within"}) and len(call.args) > 2]
    called = {ast.unparse(call.func) for call in calls}
    names = {text.removeprefix("self.") for part in given if (text := ast.unparse(part)) not in called}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    return [*functions, *(part for part in given if isinstance(part, ast.Lambda))]


def _waits_for_ever(call: ast.Call) -> bool:
    arguments = {keyword.arg for keyword in call.keywords}
    no_limit = any(keyword.arg in ("timeout", "timeout_s") and _is_none(keyword.value) for keyword in call.keywords)
    if no_limit:
        return True
    if _ends_with(call, NEED_TIMEOUT):
        return "timeout" not in arguments and None not in arguments
    if _is_method(call, NEED_ARGUMENT):
        blocks = (
            call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value is True and len(call.args) == 1
        )
        return (
            (not call.args or bool(blocks))
            and arguments <= {"block", "blocking"}
            and _literal(call, "block") is not False
        )
    if _ends_with(call, {"flock", "waitpid"}):
        return not any(
            "LOCK_NB" in ast.unparse(arg) or "LOCK_UN" in ast.unparse(arg) or "WNOHANG" in ast.unparse(arg)
            for arg in call.args
        )
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


def _text(node: ast.expr) -> str:
    return f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}"


def test_every_wait_has_a_deadline():
    found = {str(path.relative_to(ROOT)): unbounded_waits(path.read_text()) for path in python_files(PRODUCT_FOLDERS)}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_what_knows_no_timeout_is_made_within_a_limit_or_the_list_says_why_not():
    used, unexplained = set[tuple[str, str]](), dict[str, list[str]]()
    explained = {call for calls in UNLIMITED.values() for call in calls}
    for path in python_files(PRODUCT_FOLDERS):
        name = str(path.relative_to(ROOT))
        for text in without_limit(path.read_text(), in_driver=name.startswith(DRIVER)):
            reasons = {call for call in explained if call[0] == name and text.startswith(call[1])}
            used |= reasons
            if not reasons:
                unexplained.setdefault(name, []).append(text)
    assert unexplained == {}
    assert explained - used == set(), "exceptions that nothing needs"


def test_no_error_of_every_kind_is_suppressed():
    """Ruff refuses handlers that hide an error (S110)."""
    hides = re.compile(r"suppress\((Base)?Exception\b")
    assert [path for path in python_files(PRODUCT_FOLDERS) if hides.search(path.read_text())] == []


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
    ("line", "found"),
    [
        ("ray.put(value)", 1),
        ("within(5, 'ray.put', ray.put, value)", 0),
        ("os.fsync(file.fileno())", 1),
        ("thread.within(5, 'fsync', os.fsync, descriptor)", 0),
        ("path.read_text(encoding='utf-8')", 1),
        ("open(path)", 1),
        ("within(5, 'read', path.read_bytes)", 0),
        ("within(5, 'read', lambda: path.open('a'))", 0),
        ("path.write_text('text')", 1),
        ("file.flush()", 1),
        ("def put():\n    file.write(text)\nwithin(5, 'write', put)", 0),
        ("def put():\n    file.write(text)\nwithin(5, 'write', put)\nput()", 1),
    ],
)
def test_a_call_without_a_limit_is_found(line: str, found: int):
    assert len(without_limit(line, in_driver=True)) == found
