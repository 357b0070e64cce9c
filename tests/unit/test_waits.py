# SPDX-License-Identifier: Apache-2.0
"""No wait without a deadline, and no call that runs code from disk or hides errors.

Reads product source only: tests are bounded by pytest's timeout.
"""

from __future__ import annotations

import ast

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
    ("mrl/cluster/payload.py", "ray.put(pack(flat))"): "in a rank, whose answer the driver waits for within train_s",
    (
        "mrl/policy/checkpoint.py",
        "os.fsync(probe.fileno())",
    ): "in a rank, whose answer the driver waits for within checkpoint_s",
    (
        "mrl/cluster/nodes.py",
        "ray.init(address='auto'",
    ): "in a launcher's look at the cluster, which the launcher ends",
    (
        "mrl/cluster/nodes.py",
        "ray.shutdown()",
    ): "of a process that has only joined, and has no daemons to end",
    (
        "mrl/cluster/runtime.py",
        "(folder / OWNER_FILE).read_text()",
    ): "in the folder of temporary files: Ray's own, on a disk of the host",
    (
        "mrl/cluster/daemons.py",
        "path.open('rb')",
    ): "of Ray's logs, in the folder of temporary files: on a disk of the host",
    ("mrl/cluster/daemons.py", "path.read_text("): "of the kernel, which has it in memory",
    ("mrl/cluster/daemons.py", "Path(f'/proc/{pid}/stat')"): "of the kernel, which has it in memory",
    ("mrl/cluster/daemons.py", "Path('/proc/self/environ')"): "of the kernel, which has it in memory",
    (
        "mrl/cluster/lifetime.py",
        "(entry / 'environ').read_bytes()",
    ): "of /proc, in the reaper, which the driver waits for within a limit",
    (
        "mrl/cluster/lifetime.py",
        "(entry / 'stat').read_bytes()",
    ): "of /proc, in the reaper, which the driver waits for within a limit",
    ("mrl/cluster/lifetime.py", "Path('/proc/meminfo').read_text("): "of the kernel, which has it in memory",
    ("mrl/cluster/lifetime.py", "(cgroup / 'memory.max').read_text()"): "of the kernel, which has it in memory",
    ("mrl/cluster/lifetime.py", "(cgroup / 'memory.current').read_text()"): "of the kernel, which has it in memory",
    ("mrl/cluster/lifetime.py", "Path(f'/proc/{pid}/"): "of /proc, in a call of `within`",
    ("mrl/cluster/carrier.py", "local.open("): "in a process that nobody waits for longer than CARRY_TIMEOUT_S",
    ("mrl/cluster/carrier.py", "target.open("): "in a process that nobody waits for longer than CARRY_TIMEOUT_S",
    (
        "mrl/cluster/watchdog.py",
        "Path(f'/proc/{pid}/",
    ): "of /proc, in a thread that nobody waits for; what is read takes no lock of memory",
    ("mrl/cluster/watchdog.py", "local_file(self._folder"): "on a disk of the host, in a thread that nobody waits for",
    ("mrl/cluster/watchdog.py", "path.open('rb')"): "on a disk of the host, in a thread that nobody waits for",
    ("mrl/cluster/environment.py", "os.open(log_file"): "in an actor, whose start the driver waits for within start_s",
    ("mrl/store/marks.py", "path.unlink()"): "in `remove_marked`, which `CheckpointStore` calls within a limit",
    ("mrl/store/marks.py", "shutil.rmtree(entry"): "in `remove_marked`, which `CheckpointStore` calls within a limit",
    ("mrl/store/marks.py", "entry.unlink()"): "in `remove_marked`, which `CheckpointStore` calls within a limit",
    ("mrl/store/samples.py", "path.open('ab+')"): "in `append_report_samples`, which `RunFolder` calls within a limit",
    ("mrl/cluster/carrier.py", "outbox.mkdir("): "on a disk of the host",
    (
        "mrl/cluster/carrier.py",
        "target.parent.mkdir(",
    ): "in a process that nobody waits for longer than CARRY_TIMEOUT_S",
    ("mrl/cluster/carrier.py", "sink.write("): "in a process that nobody waits for longer than CARRY_TIMEOUT_S",
    ("mrl/cluster/carrier.py", "shutil.rmtree("): "in a process that nobody waits for longer than CARRY_TIMEOUT_S",
    ("mrl/cluster/watchdog.py", "file.write("): "on a disk of the host, in a thread that nobody waits for",
    ("mrl/cluster/environment.py", "root.mkdir("): "in an actor, whose start the driver waits for within start_s",
    (
        "mrl/cluster/environment.py",
        "log_file.parent.mkdir(",
    ): "in an actor, whose start the driver waits for within start_s",
    ("mrl/cluster/environment.py", "folder.mkdir("): "in the folder of temporary files, on a disk of the host",
    (
        "mrl/cluster/runtime.py",
        "owner_file.write_text(",
    ): "in the folder of temporary files: Ray's own, on a disk of the host",
    ("mrl/cluster/runtime.py", "token_file."): "in the folder of temporary files: Ray's own, on a disk of the host",
    ("mrl/cluster/runtime.py", "shutil.rmtree("): "in the folder of temporary files: Ray's own, on a disk of the host",
    ("mrl/store/ledger.py", "self.flush()"): "no file: see `Ledger.flush`, which has a limit",
    ("mrl/loop/saving.py", "self._folder.ledger.flush()"): "no file: see `Ledger.flush`, which has a limit",
    (
        "mrl/store/loggers/swanlab.py",
        "folder.mkdir(",
    ): "in a logger's thread, which the driver waits for within a limit",
    ("mrl/store/loggers/tensorboard.py", "folder.mkdir("): "in its logger's thread, which the run does not wait for",
    ("mrl/store/loggers/tensorboard.py", "(folder / name).open("): "in the same thread",
    ("mrl/store/loggers/tensorboard.py", "self._file."): "in the same thread",
    ("mrl/store/loggers/tensorboard.py", "RecordWriter(record).write("): "into memory",
    ("mrl/store/samples.py", "file.write(lines"): "in `append_report_samples`, which `RunFolder` calls within a limit",
    (
        "mrl/store/samples.py",
        "file.write((json",
    ): "in the thread that writes texts, which the driver waits for within WRITE_TIMEOUT_S",
    (
        "mrl/store/samples.py",
        "aside.",
    ): "in the thread that writes texts, which the driver waits for within WRITE_TIMEOUT_S",
    (
        "mrl/store/samples.py",
        "path.unlink(",
    ): "in the thread that writes texts, which the driver waits for within WRITE_TIMEOUT_S",
    ("mrl/loop/main.py", "folder.open()"): "no file: see `RunFolder.open`",
    ("mrl/loop/main.py", "training.open("): "no file: starts the processes of the run",
}
"""Beginnings of the calls that may have no limit, by file, and why."""

# What makes code of bytes and names is listed in test_code_loaders.py.
FORBIDDEN = {"os.system", "os.popen"}
FORBIDDEN_BUILTINS = {"eval", "exec"}


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


def forbidden(source: str) -> list[str]:
    """Line and text of every unsafe load, shell, eval, and handler that hides an error."""
    tree = tree_of(source)
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


def _text(node: ast.expr | ast.excepthandler) -> str:
    return f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}"


def test_every_wait_has_a_deadline():
    found = {str(path.relative_to(ROOT)): unbounded_waits(path.read_text()) for path in python_files(PRODUCT_FOLDERS)}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_what_knows_no_timeout_is_made_within_a_limit_or_the_list_says_why_not():
    used, unexplained = set[tuple[str, str]](), dict[str, list[str]]()
    for path in python_files(PRODUCT_FOLDERS):
        name = str(path.relative_to(ROOT))
        for text in without_limit(path.read_text(), in_driver=name.startswith(DRIVER)):
            reasons = {key for key in UNLIMITED if key[0] == name and text.startswith(key[1])}
            used |= reasons
            if not reasons:
                unexplained.setdefault(name, []).append(text)
    assert unexplained == {}
    assert UNLIMITED.keys() - used == set(), "exceptions that nothing needs"


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
    "line",
    [
        "model.eval()",
        "torch.load(path, weights_only=True)",
        "yaml.safe_load(text)",
        "with suppress(ProcessLookupError):\n    f()",
    ],
)
def test_an_allowed_call_passes(line: str):
    assert forbidden(line) == []
