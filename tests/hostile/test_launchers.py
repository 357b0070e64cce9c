# SPDX-License-Identifier: Apache-2.0
"""Launcher arguments that smuggle text into a manifest, a script or a form, and into what scripts install and start."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.ops.launch import main
from tests.sources import ROOT
from tests.waiting import HANG_S

pytestmark = pytest.mark.attack("a launcher is given more than it shows")

TINY = ["grpo_tiny.yaml", "cluster.num_nodes=2", "cluster.gpus_per_node=8"]
NEEDED = {"slurm": [], "k8s": ["--image=mrl", "--claim=fsx"], "lepton": ["--image=mrl"]}
FIELDS = {
    "slurm": ["--name", "--account", "--partition", "--time", "--container", "--mounts", "--log-dir"],
    "k8s": ["--name", "--namespace", "--image", "--claim", "--mount", "--instance-type", "--memory", "--shm"],
    "lepton": ["--name", "--image"],
}
CASES = [(launcher, field) for launcher, fields in FIELDS.items() for field in fields]
CHARACTERS = {"line": "\n", "return": "\r", "escape": "\x1b", "nul": "\0", "separator": "\u2028", "next line": "\x85"}


@pytest.mark.parametrize(("launcher", "field"), CASES, ids="".join)
def test_a_line_break_in_a_field_is_refused_with_its_name(
    launcher: str, field: str, capsys: pytest.CaptureFixture[str]
):
    assert main([launcher, *TINY, *NEEDED[launcher], f"{field}=a\n# rm -rf ~ #"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"[ERROR] {field} ") and "\\n" in line


@pytest.mark.parametrize("character", CHARACTERS.values(), ids=CHARACTERS)
@pytest.mark.parametrize("launcher", FIELDS)
def test_what_cannot_be_seen_is_not_handed_on(launcher: str, character: str, capsys: pytest.CaptureFixture[str]):
    assert main([launcher, *TINY, f"logger.wandb.name=a{character}RAY_AUTH_TOKEN=guessed", *NEEDED[launcher]]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("[ERROR] overrides ") and character not in printed.rstrip("\n")


def node(tmp_path: Path, **variables: str) -> str:
    """Output of scripts/ray_node.sh as the head of a node without GPUs; `ray` says what it is started with."""
    for name, text in {
        "ray": 'echo "ray $* mode=$RAY_AUTH_MODE"; exit 1',
        "python": "echo 10.0.0.1",
        "getent": "echo 10.0.0.1",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    given = {"NODE_RANK": "0", "NUM_NODES": "1", "GPUS_PER_NODE": "0", "HEAD_HOST": "run-0.run", "COMMAND": "true"}
    environment = {"PATH": f"{tmp_path}:{os.defpath}"} | given | variables
    done = subprocess.run(
        ["bash", ROOT / "scripts/ray_node.sh"], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 1
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "variables", [{}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": ""}, {"MRL_RAY_WITHOUT_TOKEN": "0"}], ids=str
)
def test_a_cluster_without_a_token_is_not_started(tmp_path: Path, variables: dict[str, str]):
    said = node(tmp_path, **variables)
    assert "ERROR: neither RAY_TOKEN_FILE nor RAY_AUTH_TOKEN is set" in said and "ray start" not in said


@pytest.mark.parametrize(
    ("variables", "mode"),
    [({"RAY_AUTH_TOKEN": "x", "RAY_AUTH_MODE": "disabled"}, "token"), ({"MRL_RAY_WITHOUT_TOKEN": "1"}, "disabled")],
    ids=["with a token", "asked for"],
)
def test_a_cluster_is_open_only_if_that_is_asked_for(tmp_path: Path, variables: dict[str, str], mode: str):
    assert re.search(rf"^ray start .* mode={mode}$", node(tmp_path, **variables), re.MULTILINE)


def wheel(folder: Path, text: str) -> Path:
    """A wheel of the same name and version, whatever is in it."""
    path = folder / "parcel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("parcel.py", text)
        archive.writestr("parcel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: parcel\nVersion: 1.0\n")
        archive.writestr(
            "parcel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("parcel-1.0.dist-info/RECORD", "")
    return path


def test_a_wheel_that_was_exchanged_is_not_installed(tmp_path: Path):
    """scripts/install_gpu.sh with its own list of one package, and the pip of this environment without an index."""
    digest = hashlib.sha256(wheel(tmp_path, "honest = True").read_bytes()).hexdigest()
    wheel(tmp_path, "import os")
    (tmp_path / "scripts").mkdir()
    script = (
        (ROOT / "scripts/install_gpu.sh")
        .read_text()
        .replace("        check_toolkit\n", "")
        .replace("BUILD=(torch ", "BUILD=(parcel ")
    )
    (tmp_path / "scripts/install_gpu.sh").write_text(script)
    (tmp_path / "constraints-gpu.txt").write_text("parcel==1.0\n")
    (tmp_path / "constraints-gpu.hashes.txt").write_text(f"parcel==1.0 --hash=sha256:{digest}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} -m pip install --target {tmp_path}/site "$@"\n')
    python.chmod(0o755)
    offline = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PYTHON": str(python),
    }
    command = ["bash", tmp_path / "scripts/install_gpu.sh", "base"]
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=HANG_S)
    assert "DO NOT MATCH THE HASHES" in done.stderr and not (tmp_path / "site/parcel.py").exists(), done.stderr


ARCHIVE = "aws-efa-installer-1.43.2.tar.gz"


@pytest.fixture(scope="module")
def efa(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder with what AWS publishes, signed by our key, and the key's fingerprint. The installer leaves a mark."""
    folder = tmp_path_factory.mktemp("efa")
    (folder / "gpg").mkdir(mode=0o700)
    environment = os.environ | {"GNUPGHOME": str(folder / "gpg")}

    def gpg(*words: str) -> str:
        command = ["gpg", "--batch", "--quiet", "--passphrase", "", *words]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=HANG_S
        ).stdout

    installer = folder / "aws-efa-installer/efa_installer.sh"
    installer.parent.mkdir()
    installer.write_text('#!/bin/sh\ntouch "$MARK"\n')
    installer.chmod(0o755)
    subprocess.run(["tar", "-czf", folder / ARCHIVE, "-C", folder, "aws-efa-installer"], check=True, timeout=HANG_S)
    gpg("--quick-generate-key", "Publisher <publisher@example.com>", "ed25519", "sign", "never")
    gpg("--armor", "--output", str(folder / "aws-efa-installer.key"), "--export")
    gpg("--detach-sign", str(folder / ARCHIVE))
    (fingerprint,) = re.findall(r"^fpr:+(\w+):", gpg("--with-colons", "--list-keys"), re.MULTILINE)
    yield folder, fingerprint
    subprocess.run(["gpgconf", "--kill", "all"], env=environment, check=True, timeout=HANG_S)


@pytest.mark.skipif(shutil.which("gpg") is None, reason="needs gpg")
@pytest.mark.parametrize(
    ("attack", "is_run"),
    [
        ("none", True),
        ("another archive", False),
        ("another key", False),
        ("no signature", False),
        ("a signature of something else", False),
    ],
)
def test_an_efa_installer_that_aws_did_not_sign_is_not_run(
    efa: tuple[Path, str], tmp_path: Path, attack: str, is_run: bool
):
    """The step of the Dockerfile, with a server that gives what it likes."""
    published, fingerprint = efa
    served = Path(shutil.copytree(published, tmp_path / "served", ignore=shutil.ignore_patterns("gpg")))
    if attack == "another archive":
        (served / ARCHIVE).write_bytes((served / ARCHIVE).read_bytes() + b"\0")
    elif attack == "no signature":
        (served / f"{ARCHIVE}.sig").unlink()
    elif attack == "a signature of something else":
        (served / f"{ARCHIVE}.sig").write_text("-----BEGIN PGP SIGNATURE-----\n")
    dockerfile = (ROOT / "scripts/docker/Dockerfile").read_text()
    version, key = (
        re.findall(rf"^ARG {name}=(\S+)$", dockerfile, re.MULTILINE)[0] for name in ("EFA_INSTALLER", "EFA_KEY")
    )
    (step,) = re.findall(
        r"^RUN (apt-get update && apt-get install .* gpg && .*(?:\n    .*)+)", dockerfile, re.MULTILINE
    )
    script = step.replace("\\\n", "\n").replace("/tmp/efa", f"{tmp_path}/efa").replace(" /var/lib/apt/lists/*", "")
    assert "/var/lib" not in script and version in ARCHIVE
    tools = {"apt-get": "exit 0", "curl": f'for url in "$@"; do :; done; cp {served}/"${{url##*/}}" .'}
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    mark = tmp_path / "mark"
    variables = {
        "EFA_INSTALLER": version,
        "EFA_KEY": key if attack == "another key" else fingerprint,
        "MARK": str(mark),
    }
    environment = os.environ | variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    if (tmp_path / "efa").exists():
        # A build that fails leaves its agent behind.
        subprocess.run(["gpgconf", "--homedir", str(tmp_path / "efa"), "--kill", "all"], check=True, timeout=HANG_S)
    assert (mark.exists(), done.returncode == 0) == (is_run, is_run), done.stderr
