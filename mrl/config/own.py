# SPDX-License-Identifier: Apache-2.0
"""The user's own functions and classes, which a config names as `package.module:name` or `package.module.name`."""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import inspect
import os
import pkgutil
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

_NONE = inspect.Parameter.empty
QUESTIONS = ("question", "problem")
ANSWERS = ("answer", "expected_answer", "solution", "gold", "gold_answer", "label", "target", "reference")
"""Names under which libraries and data sets give the answer of a row. Where the row has such a column too, they mean
that.
"""
REPLIES = ("completion", "generation", "prediction", "predict_str")
MISSPELT = 0.75
"""Likeness of two names, as `difflib` counts it, from which one may be meant for the other."""
BATCHED = {"prompts": "prompt", "completions": "response"}
"""TRL's names. A reward function that takes one of them gets lists of one rollout, and returns one."""


@dataclass(frozen=True)
class Kind:
    """A hook's values by name, which its function takes as parameters in any order."""

    parameters: tuple[str, ...]
    returns: str = ""
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Methods that an instance needs, with their parameters, if the object is a class."""
    is_async: bool = False
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Name in another library -> ours. A parameter with a default that is not None or empty keeps it."""
    needs: tuple[str, ...] = ()
    """Values of which a function has to take one."""
    takes_columns: bool = False
    """True when any other parameter names a column of the row."""


REWARD = Kind(
    ("prompt", "response", "reference_answer", "turns", "row")
    + ("data_source", "solution_str", "ground_truth", "extra_info")  # verl's
    + ("log_extra", "log_metric"),  # TRL's
    "float",
    synonyms={
        **BATCHED,
        **dict.fromkeys(QUESTIONS, "prompt"),
        **dict.fromkeys(REPLIES, "response"),
        **dict.fromkeys(ANSWERS, "reference_answer"),
    },
    needs=("response", "turns", "solution_str"),
    takes_columns=True,
)
"""The reward of a rollout (docs/extend/reward.md).

>>> def exact(response, reference_answer, points=1.0):
...     return points * (response.strip() == reference_answer)
>>> hook = bind(exact, REWARD)
>>> hook.names, hook.optional
({'response': 'response', 'reference_answer': 'reference_answer'}, ('points',))
>>> hook(response=" 4", reference_answer="4")
1.0
"""
ESTIMATOR = Kind(("rewards", "groups"), "list[list[float]]")
"""The advantages of the rollouts of a step, group by group (docs/extend/estimator.md).

>>> def above_mean(rewards):
...     return [[reward - sum(group) / len(group) for reward in group] for group in rewards]
>>> bind(above_mean, ESTIMATOR)(rewards=[[1.0, 0.0]], groups=[])
[[0.5, -0.5]]
"""
AGENT = Kind(("client", "row"), "float", is_async=True, needs=("client",))
"""A rollout of an agent, and its reward; `client` is openai.AsyncOpenAI (docs/extend/your_agent.md).

>>> async def agent(client, row):
...     answer = await client.completions.create(model="policy", prompt=row["prompt"])
...     return float(row["expected_answer"] in answer.choices[0].text)
>>> bind(agent, AGENT).names
{'client': 'client', 'row': 'row'}
"""
LOSS = Kind(("tokens", "ratio_T", "clipped_ratio_T", "config"), "tuple[Tensor, Tensor]")
"""The loss of each token of a packed row, and which tokens count as clipped (docs/extend/loss.md).

>>> def unclipped(tokens, ratio_T):
...     return -tokens.advantages_T * ratio_T, ratio_T < 0
>>> sorted(bind(unclipped, LOSS).names)
['ratio_T', 'tokens']
"""
PROCESSOR = Kind(("row",), "dict")
"""A row of a data set in a form that mrl reads (docs/extend/processor.md).

>>> def sums(fields):
...     return {"question": f"{fields['a']} + {fields['b']} =", "answer": str(fields["a"] + fields["b"])}
>>> bind(sums, PROCESSOR)(row={"a": 1, "b": 2})
{'question': '1 + 2 =', 'answer': '3'}
"""
LOGGER = Kind(
    ("config", "run"),
    methods={
        "log": ("metrics", "step"),
        "log_host": ("metrics", "seconds"),
        "log_samples": ("samples", "step"),
        "close": (),
    },
)
"""A service that records a run's metrics; `mrl.api.Sink` does nothing (docs/extend/logger.md).

>>> from mrl.api import Sink
>>> class Printed(Sink):
...     def __init__(self, config, run): ...
...     def log(self, metrics, step):
...         print(step, metrics)
>>> Printed({}, None).log({"train/loss": 0.5}, 1)
1 {'train/loss': 0.5}
"""


@dataclass(frozen=True)
class Hook:
    """A user's function, called with values by the names of its parameters."""

    function: Callable[..., object]
    signature: inspect.Signature
    names: Mapping[str, str]
    """Parameter -> name of its value."""
    columns: tuple[str, ...]
    """Parameters without a default that no value is called after: a row has to have columns of these names."""
    optional: tuple[str, ...]
    """Parameters with a default that a column of the row takes the place of."""
    rest: str | None
    """Name of the `**` parameter."""

    def __call__(self, **values: object) -> object:
        """Calls the function with the values that its parameters name, and all others if it has a `**` parameter."""
        return self.call({parameter: values[name] for parameter, name in self.names.items()}, values)

    def call(self, arguments: Mapping[str, object], others: Mapping[str, object]) -> object:
        """Calls the function with arguments by parameter; its `**` parameter gets `others` without a parameter."""
        bound = self.signature.bind_partial()
        bound.apply_defaults()
        bound.arguments.update(arguments)
        if self.rest is not None:
            bound.arguments[self.rest] = {
                name: value for name, value in others.items() if name not in self.signature.parameters
            }
        return self.function(*bound.args, **bound.kwargs)


def is_path(name: str) -> bool:
    """True if `name` is a path to an object rather than one of mrl's names."""
    return "." in name or ":" in name


@functools.cache
def find(path: str) -> Callable[..., object]:
    """The function or class that `path` names. A ValueError says why there is none."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # which console scripts do not search
    if "://" in path:
        raise ValueError("is an address; write package.module:name, or env.remote.NAME=URL for an agent that listens")
    file, _, name = path.rpartition(":")
    if file.endswith(".py"):
        raise ValueError(f"names a file; write its module, {Path(file).stem}:{name}, in whose folder the run starts")
    refuse_clash(path, os.getcwd())
    try:
        found = pkgutil.resolve_name(path)
    except Exception as error:  # importing a module runs the user's code
        raise ValueError(f"cannot be imported ({type(error).__name__}: {error}); {_way_out(path, error)}") from error
    if not is_path(path) or not callable(found):
        has = names_in(Path(getattr(found, "__file__", None) or ""))
        raise ValueError(f"is a {type(found).__name__}, not a function or class; write package.module:name{has}")
    return found


def refuse_clash(path: str, folder: str) -> None:
    """Refuses a module of `folder` that bears the name of Python's or an installed one, or imports one that does.

    Which of the two an import takes depends on the process. ValueError: such a module.
    """
    name = path.partition(":")[0].partition(".")[0]
    if (file := _file(name, [folder])) is None:
        return
    names = {name}
    with suppress(OSError, SyntaxError, ValueError):  # the import itself says so
        names |= _imported(Path(file).read_text(encoding="utf-8"))
    elsewhere = [place for place in sys.path if os.path.realpath(place) != os.path.realpath(folder)]
    for name in sorted(names):
        own = _file(name, [folder])
        other = "Python" if name in sys.builtin_module_names else _file(name, elsewhere)
        if own is not None and other is not None:
            raise ValueError(f"needs {own}, and there is another module {name!r} ({other}): rename your file")


def names_in(file: Path) -> str:
    """The functions of a file, in brackets; "" without any, or if it cannot be read."""
    with suppress(OSError, SyntaxError, ValueError):
        nodes = ast.parse(file.read_text(encoding="utf-8")).body
        found = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        return f" (it has {', '.join(found)})" if found else ""
    return ""


def wrong_annotations(path: str) -> dict[str, tuple[str, str]]:
    """Parameters of a reward function that are said to be numbers, and get texts: name -> (value, annotation)."""
    hook = find_reward(path)
    kinds = {name: hook.signature.parameters[name].annotation for name in hook.names}
    spelt = {name: kind if isinstance(kind, str) else getattr(kind, "__name__", "") for name, kind in kinds.items()}
    return {
        name: (value, spelt[name])
        for name, value in hook.names.items()
        if value in ("prompt", "response", "reference_answer") and spelt[name] in ("int", "float", "bool")
    }


def returns_lone_value(path: str) -> bool:
    """True if a plain function computes one number or tensor in each of its returns, which are surely no pair."""
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(find(path)))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return False
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return False
    inner = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef | ast.Lambda) and node != function]
    nested = {inside for node in inner for inside in ast.walk(node)}
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node not in nested]
    return bool(values) and all(
        isinstance(value, ast.BinOp | ast.UnaryOp)
        and not any(isinstance(part, ast.Tuple | ast.Starred) for part in ast.walk(value))
        for value in values
    )


def looks_like_agent(path: str) -> bool:
    """Tells a function that may be meant as an agent from a reward: it is async, or takes `client`."""
    found = find(path)
    return inspect.iscoroutinefunction(found) or any(name in _signature(found).parameters for name in AGENT.needs)


def misspelt(path: str, kind: Kind) -> list[str]:
    """Says which parameters keep their defaults, though their names are much like those of the kind's values."""
    try:
        hook = find_fitting(path, kind)
    except ValueError:
        return []  # which a check refuses
    if not isinstance(hook, Hook):
        return []
    names = [p.name for p in hook.signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    near = {
        name: difflib.get_close_matches(name, kind.parameters, n=1, cutoff=MISSPELT)
        for name in names
        if name not in hook.names
    }
    return [
        f"{name} keeps its default, as it is no name of mrl's; the nearest of them is {found[0]}"
        for name, found in near.items()
        if found
    ]


def _file(name: str, places: list[str]) -> str | None:
    spec = PathFinder.find_spec(name, places)
    return None if spec is None else spec.origin


def _imported(source: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    from_ = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in plain | from_ if name}


def _way_out(path: str, error: Exception) -> str:
    name = path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
    if (module := sys.modules.get(name)) is None:
        if not isinstance(error, ImportError):
            return "correct its module"
        return "write package.module:name, and start the run in the module's folder, install it, or set PYTHONPATH"
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == name and callable(value)]
    return f"{getattr(module, '__file__', name)} has {', '.join(own) or 'no function and no class'}"


def find_fitting(path: str, kind: Kind) -> Callable[..., object]:
    """Finds an object that accepts mrl's arguments, to be called by their names. A ValueError names the signature."""
    found = find(path)
    if not kind.methods:
        return bind(found, kind)
    if not isinstance(found, type):
        raise ValueError(f"is a function; write {_wanted(found, kind)}")
    if not _takes(found, kind.parameters):
        raise ValueError(f"takes {_signature(found)}; write {_wanted(found, kind)}")
    for name, parameters in kind.methods.items():
        method = getattr(found, name, None)
        if not callable(method) or not _takes(method, parameters, "self"):
            raise ValueError(
                f"has no {name}({', '.join(parameters)}); write a method of that name, or inherit mrl.api.Sink"
            )
    return found


@functools.cache
def find_reward(path: str) -> Hook:
    """A reward function by its path. ValueError: see `find_fitting`."""
    return bind(find(path), REWARD)


def missing_columns(path: str, columns: Collection[str], *, has_answer: bool) -> list[str]:
    """Parameters of a reward function without a column in a row, which have no default and are no value of mrl's."""
    hook = find_reward(path)
    answers = (
        []
        if has_answer
        else [name for name in hook.names if name in ANSWERS and hook.signature.parameters[name].default is _NONE]
    )
    return [name for name in (*hook.columns, *answers) if name not in columns]


def bind(found: Callable[..., object], kind: Kind) -> Hook:
    """Binds a function's parameters to the values of its kind by name. A ValueError says which names it may take.

    A parameter without a default has to name a value, in whatever place; the only one of a hook of one value is that
    value. `*args` stays empty. What `functools.partial` has set stays as it is.
    """
    if isinstance(found, type):
        raise ValueError(f"is a class; write {_wanted(found, kind)}")
    if inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(getattr(found, "__call__", None)):  # noqa: B004
        if not kind.is_async:
            way_out = ", which may use asyncio.run, or an agent (env.own.agents)" if kind is REWARD else ""
            raise ValueError(f"is an async function; write {_wanted(found, kind)}{way_out}")
    elif kind.is_async:
        blocks = "which awaits asyncio.to_thread(...) for what blocks"
        raise ValueError(f"is no async function; write {_wanted(found, kind)}, {blocks}")
    signature = _signature(found)
    fixed = found.keywords if isinstance(found, functools.partial) else {}
    taken = [
        p
        for p in signature.parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in fixed
    ]
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    names = {name: value for p in taken if (value := _value(name := p.name, p.default, kind)) is not None}
    needed = [p.name for p in taken if p.default is p.empty and p.name not in names]
    if len(kind.parameters) == 1 and len(needed) == 1 and not names:
        names, needed = {needed[0]: kind.parameters[0]}, []
    if needed and not kind.takes_columns:
        raise ValueError(f"takes {signature}, and mrl has no {', '.join(needed)}; write {_wanted(found, kind)}")
    if not taken and any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
        raise ValueError(
            f"takes {signature}, which names nothing; put functools.wraps into its decorator, or write "
            f"{_wanted(found, kind)}"
        )
    if not rest and set(names.values()).isdisjoint(kind.needs or kind.parameters):
        wanted = kind.needs or kind.parameters
        lacks = f"nothing of {', '.join(wanted)}"
        for name in needed:
            lacks += "".join(f"; the nearest to {name} is {one}" for one in difflib.get_close_matches(name, wanted, 1))
        raise ValueError(f"takes {signature}, {lacks}; write {_wanted(found, kind)}")
    optional = (
        tuple(p.name for p in taken if p.name not in names and p.name not in needed) if kind.takes_columns else ()
    )
    return Hook(found, signature, names, tuple(needed), optional, rest)


def _value(name: str, default: object, kind: Kind) -> str | None:
    if name in kind.parameters:
        return name
    is_open = default is _NONE or default is None or default == ""
    return kind.synonyms.get(name) if is_open else None


def code_digest(path: str) -> str:
    """Code digest of a user's object: its module's file, and loaded modules beside it. ValueError: see `find`."""
    find(path)
    name = path.partition(":")[0]
    while name not in sys.modules:
        name = name.rpartition(".")[0]
    files = {
        file for module in list(sys.modules.values()) if isinstance(file := getattr(module, "__file__", None), str)
    }
    own = sys.modules[name].__file__ or ""
    beside = sorted(
        file
        for file in files
        if file == own or (file.endswith(".py") and os.path.dirname(file) == os.path.dirname(own))
    )
    return hashlib.sha256(b"\0".join(Path(file).read_bytes() for file in beside if os.path.isfile(file))).hexdigest()


def _signature(found: Callable[..., object]) -> inspect.Signature:
    """A callable's signature: its own, or, without names, that of what its decorator wraps. ValueError: it has none."""
    try:
        own = inspect.signature(found, follow_wrapped=False)
        is_open = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own.parameters.values())
        return inspect.signature(found) if is_open else own
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"has no signature that Python can read ({error}); call it in a function of your own"
        ) from error


def _takes(function: Callable[..., object], parameters: tuple[str, ...], *first: object) -> bool:
    try:
        _signature(function).bind(*first, **dict.fromkeys(parameters))
    except (TypeError, ValueError):
        return False
    return True


def _wanted(found: object, kind: Kind) -> str:
    name = getattr(found, "__name__", None) or type(found).__name__
    name = name if name.isidentifier() else "name"
    if kind.methods:
        return f"class {name} with __init__(self, {', '.join(kind.parameters)})"
    if not kind.takes_columns:
        return f"{'async ' if kind.is_async else ''}def {name}({', '.join(kind.parameters)}) -> {kind.returns}"
    return (
        f"def {name}({', '.join(kind.parameters[:3])}) -> {kind.returns}, or with any of "
        f"{', '.join(kind.parameters[3:])}, their other names ({', '.join(kind.synonyms)}), and columns of the row"
    )
