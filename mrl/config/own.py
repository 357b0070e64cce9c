# SPDX-License-Identifier: Apache-2.0
"""The user's own functions and classes, which a config names as `package.module:name` or `package.module.name`."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

REWARD_VALUES = ("prompt", "response", "reference_answer", "turns", "row", "data_source", "solution_str", "ground_truth", "extra_info")
"""Parameter names of a reward function; each gets the value that its name says. The last four are verl's."""
POSITIONAL = REWARD_VALUES[:3]


@dataclass(frozen=True)
class Kind:
    """Call signature of a user's object."""

    parameters: tuple[str, ...]
    returns: str = ""
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Methods that an instance needs, with their parameters, if the object is a class."""
    is_async: bool = False


ESTIMATOR = Kind(("rewards", "groups"), "list[list[float]]")
AGENT = Kind(("client", "row"), "float", is_async=True)
LOSS = Kind(("tokens", "ratio_T", "clipped_ratio_T", "config"), "tuple[Tensor, Tensor]")
PROCESSOR = Kind(("row",), "dict")
LOGGER = Kind(
    ("config", "run"),
    methods={"log": ("metrics", "step"), "log_host": ("metrics", "seconds"), "log_samples": ("samples", "step"), "close": ()},
)


def is_path(name: str) -> bool:
    """Tells whether `name` is a path to an object rather than one of mrl's names."""
    return "." in name or ":" in name


@functools.cache
def find(path: str) -> Callable[..., object]:
    """The function or class that `path` names. A ValueError says why there is none."""
    if os.getcwd() not in sys.path:
        # `python -m` and Ray's processes search the working directory, console scripts do not.
        sys.path.append(os.getcwd())
    try:
        found = pkgutil.resolve_name(path)
    except Exception as error:  # importing a module runs the user's code
        raise ValueError(
            f"cannot be imported ({type(error).__name__}: {error}); write package.module:name, and start the run in the module's folder, "
            "install it, or set PYTHONPATH"
        ) from error
    if not is_path(path) or not callable(found):
        raise ValueError(f"is a {type(found).__name__}, not a function or class; write package.module:name")
    return found


def find_fitting(path: str, kind: Kind) -> Callable[..., object]:
    """Finds an object that accepts mrl's arguments. A ValueError names the signature."""
    found = find(path)
    if bool(kind.methods) != isinstance(found, type):
        raise ValueError(f"is a {'class' if isinstance(found, type) else 'function'}; write {_signature(path, kind)}")
    if kind.is_async and not inspect.iscoroutinefunction(found):
        raise ValueError(f"is no async function; write {_signature(path, kind)}")
    if not _takes(found, kind.parameters):
        raise ValueError(f"takes {inspect.signature(found)}; write {_signature(path, kind)}")
    for name, parameters in kind.methods.items():
        method = getattr(found, name, None)
        if not callable(method) or not _takes(method, ("self", *parameters)):
            raise ValueError(f"has no {name}({', '.join(parameters)}); write a method of that name, or inherit mrl.api.Sink")
    return found


def code_digest(path: str) -> str:
    """The digest of the code of a user's object: its module's file, and those of loaded modules beside it. ValueError: see `find`."""
    find(path)
    name = path.partition(":")[0]
    while name not in sys.modules:
        name = name.rpartition(".")[0]
    files = {file for module in list(sys.modules.values()) if isinstance(file := getattr(module, "__file__", None), str)}
    own = sys.modules[name].__file__ or ""
    beside = sorted(file for file in files if file == own or (file.endswith(".py") and os.path.dirname(file) == os.path.dirname(own)))
    return hashlib.sha256(b"\0".join(Path(file).read_bytes() for file in beside if os.path.isfile(file))).hexdigest()


def reward_parameters(function: Callable[..., object]) -> dict[str, str]:
    """Parameter -> name in `REWARD_VALUES`; three parameters without defaults of other names get `POSITIONAL`.

    A ValueError names the signature.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        raise ValueError("is an async function; write a plain one, which may use asyncio.run, or an agent (env.own.agents)")
    parameters = list(inspect.signature(function).parameters.values())
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [parameter for parameter in needed if parameter not in REWARD_VALUES]
    known = [p.name for p in parameters if p.name in REWARD_VALUES and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not unknown and known:
        return dict(zip(known, known, strict=True))
    if len(needed) == len(POSITIONAL) == len([p for p in plain if p.default is p.empty]):
        return dict(zip(needed, POSITIONAL, strict=True))
    raise ValueError(
        f"takes {inspect.signature(function)}, of which mrl does not know {', '.join(unknown or needed)}; "
        f"take three parameters, {', '.join(POSITIONAL)}, or any of {', '.join(REWARD_VALUES)}"
    )


def _takes(function: Callable[..., object], parameters: tuple[str, ...]) -> bool:
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError:
        return False
    return True


def _signature(path: str, kind: Kind) -> str:
    name = path.replace(":", ".").rpartition(".")[2]
    if kind.methods:
        return f"class {name} with __init__(self, {', '.join(kind.parameters)})"
    return f"{'async ' if kind.is_async else ''}def {name}({', '.join(kind.parameters)}) -> {kind.returns}"
