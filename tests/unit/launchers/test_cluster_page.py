# SPDX-License-Identifier: Apache-2.0
"""The table of docs/cluster.md says which variables scripts/ray.sub reads, and their defaults."""

from __future__ import annotations

import re

from tests.sources import ROOT

SCRIPT = (ROOT / "scripts" / "ray.sub").read_text()
PAGE = (ROOT / "docs" / "cluster.md").read_text()


def documented() -> dict[str, str | None]:
    """Variable -> default, where a row has one for each of its variables."""
    rows = PAGE.split("| variable | default | effect |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    found = {}
    for row in rows:
        names, default = (cell.strip() for cell in row.split("|")[1:3])
        variables, defaults = re.findall(r"`(\w+)`", names), default.split(", ")
        found |= dict(zip(variables, defaults if len(defaults) == len(variables) else [None] * len(variables), strict=True))
    return found


def test_the_table_has_every_variable_that_the_script_reads_and_no_other():
    # What Slurm sets itself is no setting.
    read = {name for name in re.findall(r"\$\{([A-Z]\w*):-", SCRIPT) if not name.startswith("SLURM_")}
    assert set(documented()) == read


def test_the_table_has_the_defaults_of_the_script():
    defaults = dict(re.findall(r"\b([A-Z]\w*)=\$\{\1:-([^${}]*)\}", SCRIPT))
    assert len(defaults) > 20
    named = {"": {"none", "off", "that of the host's name"}}
    wrong = {
        name: (default, documented()[name])
        for name, default in defaults.items()
        if (documented()[name] or "").strip("`") not in named.get(default, {default})
    }
    assert wrong == {}
