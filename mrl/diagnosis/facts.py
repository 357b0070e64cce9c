"""What can be known about a host. Plain data: `gather.py` reads it from this host, the judges turn it into findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 2**30
UNLIMITED = -1
"""As `resource.RLIM_INFINITY`."""
TEMPORARY = "temporary files"
"""Use of the disk on which Ray writes."""


@dataclass(frozen=True)
class Apex:
    """A package that `import apex` would find."""

    folder: str
    has_normalization: bool
    """NVIDIA's has a subpackage `normalization`; its namesake on PyPI, or a folder that happens to be called so, has not."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver sees."""

    name: str
    total_bytes: int
    used_bytes: int
    """By all processes of the host."""


@dataclass(frozen=True)
class Driver:
    """What NVIDIA's driver says."""

    version: str
    cuda: tuple[int, int]
    """Newest CUDA version that it runs."""
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True)
class CudaProbe:
    """What torch can do with the GPUs of the host."""

    error: str = ""
    """Why it can do nothing; "" if a product on every GPU is right."""
    num_gpus: int = 0
    nccl: str = ""
    unsupported: tuple[str, ...] = ()
    """Compute capabilities (`sm_70`) of GPUs that this build of torch has no code for."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a host that has any."""

    driver: Driver | None
    driver_error: str
    """Why the driver does not answer."""
    probe: CudaProbe


@dataclass(frozen=True)
class Disk:
    """The file system below a folder, or below the nearest folder above it that exists."""

    folder: str
    total_bytes: int
    free_bytes: int
    is_writable: bool


@dataclass(frozen=True)
class Limit:
    """A limit of the operating system for this process; `UNLIMITED` where there is none."""

    soft: int
    hard: int


@dataclass(frozen=True)
class Network:
    """What multi-node communication depends on."""

    address: str
    """What the host's own name resolves to; "" if to nothing."""
    interfaces: tuple[str, ...]
    socket_ifname: str
    """NCCL_SOCKET_IFNAME."""
    gloo_ifname: str
    """GLOO_SOCKET_IFNAME."""
    fabric: str
    """FI_PROVIDER."""
    num_rdma_devices: int


@dataclass(frozen=True)
class Ports:
    """Ports of Ray's launchers on this host, by the variable that sets them."""

    numbers: Mapping[str, int]
    taken: tuple[str, ...]
    """Those at which somebody listens."""
    ephemeral: tuple[int, int]
    """First and last port that any outgoing connection may take."""


@dataclass(frozen=True)
class Confinement:
    """How the kernel confines programs under reward."""

    machine: str
    """As `uname -m` says it."""
    landlock_abi: int
    """0: none."""
    lack: str
    """What a program was tried with could do, or why it was not confined; "" if all was refused."""


@dataclass(frozen=True)
class HostFacts:
    """All of it."""

    host: str
    python: str
    packages: Mapping[str, str]
    """Version of every installed distribution, by its normalised name."""
    missing_modules: tuple[str, ...]
    """Modules of installed libraries that are not there."""
    torch_cuda: str | None
    """CUDA version that torch is built for; None: for CPUs, or no torch."""
    build_tags: Mapping[str, str]
    """`cpu`, `cu130`, ... of the libraries that must be built for the same device as torch; "" if the version has none."""
    apex: Apex | None
    commit: str
    """Git commit of mrl, "" outside of a checkout."""
    source_digest: str
    """Checksum of all of mrl's source files."""
    gpus: Gpus | None
    shared_memory: Disk
    disks: Mapping[str, Disk]
    """By what the folder is for."""
    limits: Mapping[str, Limit]
    """Of `nofile`, `memlock` (bytes) and `nproc`."""
    network: Network
    confinement: Confinement
    ports: Ports | None
    """None on nodes of a cluster: its own Ray has them."""
    import_errors: Mapping[str, str] = field(default_factory=dict)
    """By module, where imports were tried; "" where all is well."""
