# SPDX-License-Identifier: Apache-2.0
"""Finds which product modules read which config key, by a small type inference over the sources of `mrl`.

The type of an expression is the set of classes that it may be. Types come from annotations and assignments. A read
through a value without a type is not found, so the key counts as unread: annotate the value.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from mrl.config.schema.keys import KEYS

ROOT = Path(__file__).resolve().parents[1]
# Product code calls these to read a section; a read in them counts as a read of the caller.
ACCESSORS = ("mrl.config.schema", "mrl.config.rules.data", "mrl.config.fp8")
# They check and print keys, which changes nothing in a run.
NOT_PRODUCT = ("mrl.config", "mrl.check", "mrl.plan")
LIMITS = "mrl.plan.deadlines"
"""Limits that a run keeps, though the plan shows them, too."""

Types = frozenset[str]
Place = tuple[str, str]
"""A class and its attribute; ("", name) for a function."""
NOTHING: Types = frozenset()
SECTIONS: Types = frozenset(section for section, _ in KEYS.values())


def key_readers(sources: Mapping[str, str] | None = None) -> dict[str, list[str]]:
    """The modules that read each config key, sorted; a key that nothing reads is absent.

    `sources` are texts by module name, by default all of `mrl`. Whoever reads a key whose default follows another key
    reads that one too.
    """
    modules = {name: ast.parse(text) for name, text in (sources or product_sources()).items()}
    known = _Definitions(modules)
    reads: dict[str, dict[Place, set[Place]]] = {}
    for _ in range(3):  # a pass uses what the passes before it found out about attributes
        reads = {name: _Walker(known, tree).reads for name, tree in modules.items()}
    inner: dict[Place, set[Place]] = defaultdict(set)
    for name, found in reads.items():
        if name.startswith(ACCESSORS):
            for owner, places in found.items():
                inner[owner] |= places
    readers: dict[Place, set[str]] = defaultdict(set)
    for name, found in reads.items():
        if not name.startswith(NOT_PRODUCT) or name.startswith(LIMITS):
            for place in _closure(set().union(*found.values()), inner):
                readers[place].add(name)
    # What is read of a base class is read of all that inherit from it.
    by_key = {
        key: set().union(*(readers[kind, name] for kind in known.lineage(section)))
        for key, (section, name) in KEYS.items()
    }
    for key, (section, name) in KEYS.items():
        for followed in (
            followed for kind in known.lineage(section) for followed in known.follows.get((kind, name), ())
        ):
            by_key[followed] = by_key[followed] | by_key[key]
    return {key: sorted(modules) for key, modules in by_key.items() if modules}


def product_sources() -> dict[str, str]:
    """The text of every module of `mrl`, by its name."""
    paths = sorted((ROOT / "mrl").rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8") for path in paths}


def _closure(places: Iterable[Place], inner: Mapping[Place, set[Place]]) -> set[Place]:
    found, new = set(), list(places)
    while new:
        place = new.pop()
        if place not in found:
            found.add(place)
            new += inner.get(place, ())
    return found


class _Definitions:
    """Classes with their attributes' types, functions with those of their results, of all modules, by bare names."""

    def __init__(self, modules: Mapping[str, ast.Module]) -> None:
        self.classes = {
            node.name for tree in modules.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
        }
        self.attributes: dict[Place, Types] = defaultdict(lambda: NOTHING)
        self.aliases: dict[str, ast.expr] = {}
        self.bases: dict[str, list[str]] = {}
        self.follows: dict[Place, list[str]] = {}
        for tree in modules.values():
            for node in tree.body:
                if (
                    isinstance(node, ast.Assign)
                    and isinstance(node.targets[0], ast.Name)
                    and not node.targets[0].id.isupper()
                ):
                    self.aliases[node.targets[0].id] = node.value
        for tree in modules.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._note_class(node)
                elif isinstance(node, ast.FunctionDef):
                    self.attributes["", node.name] |= self.annotated(node.returns)

    def _note_class(self, node: ast.ClassDef) -> None:
        self.bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                place = node.name, item.target.id
                self.attributes[place] |= self.annotated(item.annotation)
                if (
                    isinstance(item.value, ast.Call)
                    and isinstance(item.value.func, ast.Name)
                    and item.value.func.id == "follows"
                ):
                    source = str(ast.literal_eval(item.value.args[0]))
                    self.follows[place] = re.findall(r"\$\{([\w.]+)", source) or [source]
            elif isinstance(item, ast.FunctionDef):
                self.attributes[node.name, item.name] |= self.annotated(item.returns)

    def annotated(self, annotation: ast.expr | None, depth: int = 0) -> Types:
        """The known classes that an annotation names; a container counts as what it holds."""
        if annotation is None:
            return NOTHING
        names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
        found = frozenset(names & self.classes)
        if depth < 2:
            for name in names & self.aliases.keys() - self.classes:
                found |= self.annotated(self.aliases[name], depth + 1)
        return found

    def lineage(self, kind: str) -> list[str]:
        """The class and what it inherits from."""
        return [kind, *(ancestor for base in self.bases.get(kind, ()) for ancestor in self.lineage(base))]


class _Walker(ast.NodeVisitor):
    """Notes the attributes of classes that a module reads, by the function that reads them."""

    def __init__(self, known: _Definitions, tree: ast.Module) -> None:
        self.known = known
        self.reads: dict[Place, set[Place]] = defaultdict(set)
        self._scope: dict[str, Types] = {}
        self._class = ""
        self._owner: Place = ("", "")
        self.visit(tree)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        scope, owner = dict(self._scope), self._owner
        if self._owner == ("", ""):
            self._owner = (self._class, node.name)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for index, argument in enumerate(arguments):
            is_self = index == 0 and self._class and argument.annotation is None
            self._scope[argument.arg] = (
                frozenset({self._class}) if is_self else self.known.annotated(argument.annotation)
            )
        self.generic_visit(node)
        self._scope, self._owner = scope, owner

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # the two have the same parts

    def visit_Assign(self, node: ast.Assign) -> None:
        kinds = self.type_of(node.value)
        for target in node.targets:
            self._bind(target, kinds, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        kinds = self.known.annotated(node.annotation)
        if node.value is not None:
            kinds |= self.type_of(node.value)
        self._bind(node.target, kinds, None)

    def visit_For(self, node: ast.For | ast.comprehension) -> None:
        self._bind(node.target, self.type_of(node.iter), None)
        self.generic_visit(node)

    visit_comprehension = visit_For

    def visit_withitem(self, node: ast.withitem) -> None:
        if node.optional_vars is not None:
            self._bind(node.optional_vars, self.type_of(node.context_expr), None)
        self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self.type_of(child) if isinstance(child, ast.expr) else self.visit(child)

    def type_of(self, node: ast.expr) -> Types:
        """The classes that an expression may have; notes its reads."""
        match node:
            case ast.Name():
                return self._scope.get(node.id, NOTHING)
            case ast.Attribute():
                return self._attribute(self.type_of(node.value), node.attr)
            case ast.Call():
                return self._call(node)
            case ast.NamedExpr():
                kinds = self.type_of(node.value)
                self._bind(node.target, kinds, None)
                return kinds
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                for generator in node.generators:
                    self.visit(generator)
            case _:
                self.generic_visit(node)
        return NOTHING.union(*(self.type_of(part) for part in _values(node)))

    def _attribute(self, kinds: Types, name: str) -> Types:
        found = NOTHING
        for kind in kinds:
            self.reads[self._owner].add((kind, name))
            found = found.union(
                *(self.known.attributes.get((owner, name), NOTHING) for owner in self.known.lineage(kind))
            )
        return found

    def _call(self, node: ast.Call) -> Types:
        given = [self.type_of(argument) for argument in [*node.args, *(keyword.value for keyword in node.keywords)]]
        function = node.func
        name = (
            function.attr
            if isinstance(function, ast.Attribute)
            else function.id
            if isinstance(function, ast.Name)
            else ""
        )
        if name in self.known.classes:
            return frozenset({name})
        # Of the standard library: these give back what they are given.
        if name in (
            "replace",
            "cast",
            "list",
            "sorted",
            "reversed",
            "enumerate",
            "zip",
            "next",
            "iter",
            "values",
            "items",
            "copy",
        ):
            of = self.type_of(function.value) if isinstance(function, ast.Attribute) else NOTHING
            return of.union(*given, *(self.known.annotated(argument) for argument in node.args if name == "cast"))
        kinds = self.type_of(function)
        if kinds or isinstance(function, ast.Attribute) and self.type_of(function.value):
            return kinds
        self.reads[self._owner].add(("", name))
        return self.known.attributes.get(("", name), NOTHING)

    def _bind(self, target: ast.expr, kinds: Types, value: ast.expr | None) -> None:
        match target:
            case ast.Name():
                self._scope[target.id] = kinds
            case ast.Tuple() | ast.List():
                parts = (
                    value.elts
                    if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
                    else [None] * len(target.elts)
                )
                for inner, part in zip(target.elts, parts, strict=True):
                    self._bind(inner, kinds if part is None else self.type_of(part), part)
            case ast.Attribute():
                for kind in self.type_of(target.value) - SECTIONS:
                    self.known.attributes[kind, target.attr] |= kinds


def _values(node: ast.expr) -> list[ast.expr]:
    """The parts that an expression's value is one of."""
    match node:
        case ast.IfExp():
            return [node.body, node.orelse]
        case ast.BoolOp() | ast.Dict():
            return node.values
        case ast.Tuple() | ast.List():
            return node.elts
        case ast.DictComp():
            return [node.key, node.value]
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
            return [node.elt]
        case ast.Await() | ast.Starred() | ast.Subscript():
            return [node.value]
    return []
