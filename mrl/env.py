# SPDX-License-Identifier: Apache-2.0
"""The environment variables that mrl reads, with their meaning; no other module looks at the environment."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Variable:
    """An environment variable of ours or of a library, as far as mrl reads it."""

    name: str
    manual: str
    is_secret: bool = False

    def read(self) -> str | None:
        """The value, or None if the variable is unset or empty."""
        return os.environ.get(self.name) or None


HF_TOKEN = Variable("HF_TOKEN", "Hugging Face access token, used by the libraries.", is_secret=True)
WANDB_API_KEY = Variable("WANDB_API_KEY", "Weights & Biases key, used by the library.", is_secret=True)
SWANLAB_API_KEY = Variable("SWANLAB_API_KEY", "SwanLab key, used by the library.", is_secret=True)
MLFLOW_TRACKING_PASSWORD = Variable(
    "MLFLOW_TRACKING_PASSWORD", "Password of an MLflow server, used by the library.", is_secret=True
)
MLFLOW_TRACKING_TOKEN = Variable(
    "MLFLOW_TRACKING_TOKEN", "Token of an MLflow server, used by the library.", is_secret=True
)
HF_HOME = Variable("HF_HOME", "Folder of the Hugging Face libraries' own caches; default: ~/.cache/huggingface.")
MRL_CACHE = Variable(
    "MRL_CACHE",
    "Folder of converted models, which all nodes must share; default: mrl in HF_HOME. "
    "With `off` every rank reads the Hugging Face files instead.",
)
MRL_COMPILED = Variable(
    "MRL_COMPILED",
    "Folder of compiled kernels and models, yours alone; default: mrl-compiled-UID beside HF_HOME, "
    "~/.cache/mrl-compiled where that is not set.",
)
MRL_ENDPOINTS = Variable(
    "MRL_ENDPOINTS",
    (
        "File with the addresses and the key of the engines over HTTP, set by mrl for reward functions: see "
        "docs/http.md."
    ),
)
MRL_KILL_AT = Variable(
    "MRL_KILL_AT",
    "For tests of mrl: `NAME:N` ends a process as by kill -9 the N-th time that it passes a point of that name: "
    "`start`, `rollouts`, `refit`, `commit`, `prune`, `fallback`.",
)
SLURM_JOB_START_TIME = Variable(
    "SLURM_JOB_START_TIME",
    (
        "When the Slurm job started, in seconds since 1970, set by Slurm: checkpointing.checkpoint_must_save_by counts "
        "from it."
    ),
)
SLURM_JOB_ID = Variable(
    "SLURM_JOB_ID", "The Slurm job, set by Slurm: its next start takes the run folder over at once."
)
SLURM_RESTART_COUNT = Variable("SLURM_RESTART_COUNT", "How often Slurm has requeued the job, set by Slurm.")
SLURM_JOB_NUM_NODES = Variable(
    "SLURM_JOB_NUM_NODES", "Nodes of the job, set by Slurm: mrl.doctor says how many of them have not joined."
)
RAY_ADDRESS = Variable(
    "RAY_ADDRESS", "Head of the launcher's Ray cluster, which runs on several nodes and mrl.doctor join."
)
TMPDIR = Variable(
    "TMPDIR", "Folder of temporary files and sockets, on a disk of the host and with a short path; default: /tmp."
)
VIRTUAL_ENV = Variable(
    "VIRTUAL_ENV", "Set by an activated virtual environment; without it the end of a run says how to activate its own."
)
VENV = Variable(
    "VENV", "Virtual environment that a Slurm job without a container uses on its nodes; default: that of mrl.launch."
)
NCCL_SOCKET_IFNAME = Variable(
    "NCCL_SOCKET_IFNAME", "Interfaces of NCCL, used by the library; mrl.doctor says whether there is such a one."
)
GLOO_SOCKET_IFNAME = Variable(
    "GLOO_SOCKET_IFNAME", "Interface of Gloo, used by torch; without it the address of the host's name counts."
)
FI_PROVIDER = Variable(
    "FI_PROVIDER", "Fabric of libfabric (`efa`), used by the library; mrl.doctor says whether there are devices for it."
)
LD_LIBRARY_PATH = Variable(
    "LD_LIBRARY_PATH",
    "Folders of shared libraries. Policy ranks and engines on GPUs get the one of torch's cuDNN before them.",
)
PYTORCH_ALLOC_CONF = Variable(
    "PYTORCH_ALLOC_CONF",
    (
        "Options of torch's allocator. Policy ranks and engines on GPUs get those of the driver, with "
        "`expandable_segments` on and off."
    ),
)
PYTORCH_CUDA_ALLOC_CONF = Variable(
    "PYTORCH_CUDA_ALLOC_CONF", "The older name of PYTORCH_ALLOC_CONF, which counts if that is not set."
)

MRL_CPU = Variable(
    "MRL_CPU",
    "1 = use no GPU of this host: scripts/setup.sh installs for CPUs, and `cluster.gpus_per_node: auto` is 0.",
)
MRL_DEVICE = Variable(
    "MRL_DEVICE", "`cuda` or `cpu`, set by mrl for its policy ranks and engines from cluster.gpus_per_node."
)
CUDA_VISIBLE_DEVICES = Variable(
    "CUDA_VISIBLE_DEVICES",
    "GPUs that CUDA shows to a process, used by the libraries: `cluster.gpus_per_node: auto` counts only these.",
)

PASSED: Counter[str] = Counter()

VARIABLES = tuple(value for value in list(globals().values()) if isinstance(value, Variable))

FULL_FLOAT32 = {
    # cuBLAS, cuDNN: Transformer Engine asks cuBLAS for TF32 in every float32 product, and only this overrules a caller.
    "NVIDIA_TF32_OVERRIDE": "0",
    # NVIDIA's containers set it to 1, which makes torch ask for TF32 too.
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",
    # tl.dot of float32 is TF32 unless the kernel or this says otherwise; the kernels of mamba_ssm and of vLLM's experts
    # and scans do not. Three products of TF32 give 21 bits: logprobs of the tests' tiny models move by 2e-6 at most
    # (factors split so on a CPU). `ieee` gives 23, but not on tensor cores: each of the 23 variants of vLLM's scan
    # takes up to four times as long to compile.
    "TRITON_F32_DEFAULT": "tf32x3",
}
"""With these, a process whose precision is float32 multiplies float32 numbers, and not TF32, which keeps 10 of their 23
bits.
"""

KEPT_TIMINGS = {"TRITON_CACHE_AUTOTUNING": "true"}
"""Makes Triton keep the timings by which it chooses among configurations of a kernel, in its cache of compiled code.

It skips kernels with a hook before each try (`Autotuner.check_disk_cache` of 3.7.1). mamba_ssm 2.3.1 compares the
variable with "1", and would then ignore `ONE_CONFIGURATION`.
"""

ONE_CONFIGURATION = {"MAMBA_DETERMINISTIC": "1"}
"""Makes mamba_ssm's kernels take one configuration each, and sum in one order; a start times none of them. Read at its
import.
"""

SECRET_NAME = re.compile(
    r"(^|[_-])(token|secret|pass|pin|otp|pw|passwd|password|passphrase|passcode|pat|cred(ential)?s?|psk|mnemonic|seed_?phrase|bearer|jwt|cookies?|auth|authorization|headers|dsn|"
    # PWD is the working folder.
    r"(?-i:pwd)|(?<=[_-])pwd|conn(ection)?_?str(ing)?|webhook(_?url)?|"
    r"(api|access|private|secret|auth|account|app|deploy|encryption|license|service|signing|ssh)_?keys?(_?(id|pem|b64|base64|json))?)$",
    re.IGNORECASE,
)
"""Pattern of a key that holds a secret. Plural words (`stop_token_ids`, `max_new_tokens`) are not meant."""

_PLACES = (
    r"HOME|USER|LOGNAME|PWD|TMPDIR|HOSTNAME|SCRATCH|WORK|PATH|LANG|TZ|TERM|SHELL|VIRTUAL_ENV|UCX_TLS|GLIBC_TUNABLES|CUBLAS_WORKSPACE_CONFIG|"
    r"PYTHON(?:PATH|HOME|HASHSEED|UNBUFFERED|OPTIMIZE|WARNINGS|DONTWRITEBYTECODE|FAULTHANDLER|MALLOC|UTF8|NOUSERSITE|SAFEPATH)|"
    r"LC_(?:ALL|COLLATE|CTYPE|MESSAGES|MONETARY|NUMERIC|TIME)|"
    r"MASTER_ADDR|(?i:(?:HTTPS?|ALL|FTP|NO)_PROXY)|GIT_(?:COMMIT|SHA|BRANCH)|WANDB_BASE_URL|MLFLOW_TRACKING_URI|"
    r"\w+_(?:HOME|DIR|PATH|ROOT|FOLDER|FILE|REGION|NAME|SIZE|NODES|RANK|NUM_THREADS)|"
    r"(?:\w+_)?(?:ARRAY|CLUSTER|EXPERIMENT|GROUP|JOB|NODE|POD|PROC|RUN|TASK)_ID"
)
_LIBRARY = (
    r"(?:CUBLAS|CUBLASLT|CUDA|CUDNN|DEEPEP|DG|EFA|FI|FLASHINFER|GLOO|GOMP|HF(?:_DATASETS|_HUB)?|KMP|LD|MALLOC|MAMBA|MKL|MLFLOW|NCCL|NVIDIA|"
    r"NVSHMEM|NVTE|OFI|OMP|OMPI|OPENBLAS|PMIX|PYTORCH|RAY|RDMAV|SLURM|SWANLAB|TOKENIZERS|TORCH|TORCHDYNAMO|TORCHINDUCTOR|TRANSFORMERS|TRITON|"
    r"UCX|VLLM|WANDB)_"
)
_SETTING = (
    r"AFFINITY|ALGO|ALIGNMENT|ARCH|ARCH_LIST|ATTN|AUTOTUNE|AUTOTUNING|BACKENDS?|BIND|BLOCKING|BLOCKTIME|BUFFERS?|BUFFSIZE|BYTES|CACHE|"
    r"CACHING|CAPABILITIES|CHANNELS?|CHECK|CHUNKS?|CHUNKSIZE|CNT|COLOR|COMPILE|COMPRESSION|CONNECTIONS|COUNT|CPUS?|CUTOFF|DEBUG|"
    r"DETERMINISTIC|DEVICES?|DISABLED?|DTYPE|DUMP|DYNAMIC|ENABLED?|ENDPOINT|ENTITY|FACTOR|FALLBACK|FILE|FILTER|FORK|FORMAT|FRACTION|FREQUENCY|FUSION|GB|"
    r"GDR|GEMM|GPUS?|GRAPHS?|GROUP|HCA|IFNAME|INDEX|INTERVAL|INVARIANT|IPC|JIT|JOBID|KB|KERNELS?|LAYOUT|LEN|LENGTH|LEVEL|LIMIT|LOCALID|"
    r"LOGGING|LOGLEVEL|LOGS?|MAX|MB|MEM|MEMORY|METHOD|METRICS|MIN|MODE|MOE|MS|NCHANNELS|NET|NNODES|NODEID|NODELIST|NTASKS|NTHREADS|"
    r"NUM|OFFLINE|OPS|ORDER|OVERLAP|OVERRIDE|PARALLELISM|PARTITION|PERCENT|PLACES|PLUGIN|POLICY|PORTS?|PRECISION|PRELOAD|PRIORITY|"
    r"PROCID|PROCS|PROFILE|PROFILING|PROJECT|PROTO|PROVIDER|QPS|RATE|RATIO|RDMA|REQUESTS|RESTART|RETRIES|RETRY|RINGS|S|SCHEDULE|SECONDS|SHM|"
    r"SIZES?|SL|SMS|SOCKETS?|SPACE|STATS|STEPS|STRATEGY|STREAMS?|SUBSYS|TAGS|TASKS|TC|TELEMETRY|TF32|THREADS?|THRESH|THRESHOLD|TIME|TIMEOUT|"
    r"TOPK|TRACE|TYPES?|USE|V1|V2|VERBOSE|VERBOSITY|VERSION|WAIT|WARMUP|WARN|WINDOW|WORKERS|XET"
)
PUBLIC_NAME = re.compile(
    rf"{_PLACES}|{_LIBRARY}(?:\w+_)?(?i:{_SETTING})|" + "|".join(v.name for v in VARIABLES if not v.is_secret)
)
"""Pattern of environment variables that hold no secret: places, names, sizes, those above, and settings of libraries
whose last word says that they are one. `UCX_CERT` and `GLOO_PIN` are none.
"""

_SWITCH = re.compile(rf"{_LIBRARY}\w+=(?i:-?\d|true|false|on|off|yes|no|auto|none)")
"""Pattern of a setting of a library whose value is too short to be a secret, whatever its name."""

VARIABLES_KEY = "env_vars"
"""The key of a section that lists environment variables."""

# Shorter values ("1", "none") would blank out unrelated text.
MIN_SECRET_LENGTH = 6


def cache_root() -> Path | None:
    """The folder of converted models, absolute; None if MRL_CACHE switches it off."""
    chosen = MRL_CACHE.read()
    if chosen == "off":
        return None
    root = Path(chosen) if chosen else Path(HF_HOME.read() or "~/.cache/huggingface") / "mrl"
    return root.expanduser().absolute()


def compiled_folders() -> list[Path]:
    """Folders that may keep compiled code between runs, preferred first: one outliving containers, then the home's."""
    chosen, hub, home = MRL_COMPILED.read(), HF_HOME.read(), Path("~/.cache/mrl-compiled")
    beside = Path(hub).expanduser().absolute().parent / f"mrl-compiled-{os.getuid()}" if hub else home
    return list(dict.fromkeys([Path(chosen) if chosen else beside, home]))


def job_age_s() -> float:
    """Seconds since the start of the Slurm job that this process runs in; 0.0 outside of Slurm."""
    started = SLURM_JOB_START_TIME.read()
    # A clock that is behind that of Slurm's controller must not add to the job's time.
    return max(0.0, time.time() - float(started)) if started and started.isdigit() else 0.0


def kill_point(name: str) -> None:
    """Ends the process as by kill -9 the N-th time it passes a point of that name, if MRL_KILL_AT is `name:N`."""
    PASSED[name] += 1
    if MRL_KILL_AT.read() == f"{name}:{PASSED[name]}":
        logger.warning("killed at %s:%d, as %s says", name, PASSED[name], MRL_KILL_AT.name)
        os.kill(os.getpid(), signal.SIGKILL)


def variable(name: str) -> str:
    """The value of the environment variable that a config names; "" if it is not set."""
    return os.environ.get(name, "")


def is_secret_variable(name: str) -> bool:
    """True if an environment variable is called like one that holds a secret."""
    return bool(SECRET_NAME.search(name)) or name.upper().endswith("_KEY")


def is_public_variable(name: str, value: object = "") -> bool:
    """True if the value of an environment variable may be shown: its name is on the list of harmless ones.

    No beginning of the name is called like a secret either (`SLACK_WEBHOOK_PATH`, `VAULT_SECRET_ID`).
    """
    if PUBLIC_NAME.fullmatch(name):
        words = name.split("_")
        return not any(is_secret_variable("_".join(words[: end + 1])) for end in range(len(words)))
    return bool(_SWITCH.fullmatch(f"{name}={value}")) and not is_secret_variable(name)


def is_hidden(key: str, value: object = "") -> bool:
    """True if `value` of a dotted config key must not be shown: called like a secret, or a non-public variable."""
    above, _, name = key.rpartition(".")
    if above.rpartition(".")[2] == VARIABLES_KEY:
        return not is_public_variable(name, value)
    return name == VARIABLES_KEY or bool(SECRET_NAME.search(name))


def secret_values() -> frozenset[str]:
    """Values of secret environment variables, by the table above or their name; they must appear in no file or log."""
    known = {variable.name for variable in VARIABLES if variable.is_secret}
    values = (value for name, value in os.environ.items() if name in known or is_secret_variable(name))
    return frozenset(value for value in values if len(value) >= MIN_SECRET_LENGTH)


def with_expandable_segments(settings: str, value: bool) -> str:
    """PYTORCH_ALLOC_CONF's text with this value of one option, the others as they are."""
    others = [
        option
        for option in settings.split(",")
        if option.strip() and option.partition(":")[0].strip() != "expandable_segments"
    ]
    return ",".join([*others, f"expandable_segments:{value}"])
