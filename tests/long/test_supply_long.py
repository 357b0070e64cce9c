# SPDX-License-Identifier: Apache-2.0
"""Part "supply": known vulnerabilities of the pinned packages, and a bill of materials of the installed ones.

`uvx` fetches both tools. pip-audit asks the package index about each pin; a package about which it gets no answer
counts as unaudited, which a summary of "no known vulnerabilities" does not say.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.sources import ROOT

pytestmark = [pytest.mark.long("supply"), pytest.mark.timeout(1200)]

UVX = Path(sys.executable).with_name("uvx")
TIMEOUT_S = 600


def run_tool(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a tool that `uvx` fetches; skips the test where no package index has it."""
    environment = os.environ | {"VIRTUAL_ENV": ""}
    found = subprocess.run(
        [UVX, *command], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=TIMEOUT_S, check=False
    )
    if not found.stdout.startswith("{"):
        pytest.skip(f"no network: uvx {command[0]} gave no answer: {found.stderr.strip()[-300:]}")
    return found


@pytest.mark.parametrize("pins", ["cpu", "gpu", "dev"])
def test_no_pin_has_a_known_vulnerability(pins: str):
    path = f"constraints-{pins}.hashes.txt"
    found = json.loads(run_tool("pip-audit", "-r", path, "--disable-pip", "--require-hashes", "-f", "json").stdout)
    audited = {one["name"]: one["vulns"] for one in found["dependencies"] if "vulns" in one}
    assert {name: [vuln["id"] for vuln in vulns] for name, vulns in audited.items() if vulns} == {}
    if unaudited := [one["name"] for one in found["dependencies"] if "vulns" not in one]:
        reason = f"no network: the package index answers nothing about {len(unaudited)} pins of {path}"
        pytest.skip(f"{reason}, of which {', '.join(unaudited[:5])}; run the part where pypi.org is reached")
    assert audited


def test_the_bill_of_materials_lists_every_installed_pin(tmp_path: Path):
    command = ("--from", "cyclonedx-bom", "cyclonedx-py", "environment", "--of", "JSON", sys.executable)
    bill = json.loads(run_tool(*command).stdout)
    (tmp_path / "sbom.json").write_text(json.dumps(bill))
    assert bill["bomFormat"] == "CycloneDX"
    # Builds for CPUs are of another local version.
    listed = {(_name(one["name"]), one["version"].partition("+")[0]) for one in bill["components"]}
    lines = (ROOT / "constraints-cpu.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {(_name(pin.name), *(one.version for one in pin.specifier)) for pin in pins if _is_for_here(pin)}
    assert len(pinned) > 100 and sorted(pinned - listed) == []


def _is_for_here(pin: Requirement) -> bool:
    return pin.marker is None or pin.marker.evaluate()


def _name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
