# SPDX-License-Identifier: Apache-2.0
"""Confines the caller with Landlock (files) and seccomp (system calls): programs tightly, reward workers loosely.

Both may use the system calls of a list, and no others.

Standard library only: PyPI's landlock is one author's alpha, and pyseccomp (last release 2021) needs a libseccomp on
every host. It imports nothing of mrl: `mrl.envs.sandbox` loads this file by its path in a fresh interpreter, once per
test.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Literal

Allowance = Literal["network", "processes", "files"]
"""A right of a reward worker beyond computing and reading: open sockets, start processes, write outside its scratch
folder.
"""

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Numbers of linux/audit.h by machine, in the order of the columns of the tables below."""
MACHINE = os.uname().machine

PROGRAM_CALLS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, lseek 8 62, close 3 57,
close_range 436 436, stat 4 -, lstat 6 -, fstat 5 80, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48,
faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49,
fchdir 81 50, umask 95 166, dup 32 23, dup2 33 -, dup3 292 24, ftruncate 77 46, fadvise64 221 223, sendfile 40 71,
copy_file_range 326 285, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72,
epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19, brk 12 214, mmap 9 222,
munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, exit 60 93, exit_group 231 94, futex 202 98,
set_robust_list 273 99, get_robust_list 274 100, set_tid_address 218 96, rseq 334 293, gettid 186 178,
sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, getcpu 309 168, arch_prctl 158 -,
restart_syscall 219 128, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sigaltstack 131 132, pause 34 -, alarm 37 -, setitimer 38 103,
getitimer 36 102, time 201 -, gettimeofday 96 169, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
nanosleep 35 101, times 100 153, getpid 39 172, getppid 110 173, getpgrp 111 -, getpgid 121 155, getsid 124 156,
getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150,
getgroups 115 158, getpriority 140 141, unlink 87 -, unlinkat 263 35, rmdir 84 -, mkdir 83 -, mkdirat 258 34,
rename 82 -, renameat 264 38, renameat2 316 276, fsync 74 82, fdatasync 75 83, msync 26 227, flock 73 32, sendto 44 206,
recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, shutdown 48 210, getsockopt 55 209, getsockname 51 204,
getpeername 52 205, getrlimit 97 163, setrlimit 160 164, getrusage 98 165, uname 63 160, sysinfo 99 179,
getrandom 318 278, wait4 61 260, waitid 247 95
"""
"""System calls that a program may use besides `CHECKED_CALLS`: `name x86_64 aarch64`, `-` if an architecture
lacks it.
"""

CHECKED_CALLS = """
open 2 -, openat 257 56, fcntl 72 25, ioctl 16 29, prctl 157 167, prlimit64 302 261, clone 56 220, kill 62 129,
tgkill 234 131, socketpair 53 199, setpriority 141 140
"""
"""Calls that are allowed by their arguments; see `_checks`."""

WORKER_CALLS = """
mincore 27 232, mlock 149 228, munlock 150 229, mlock2 325 284, mlockall 151 230, munlockall 152 231, mbind 237 235,
get_mempolicy 239 236, set_mempolicy 238 237, pkey_alloc 330 289, pkey_free 331 290, pkey_mprotect 329 288,
memfd_create 319 279, membarrier 324 283, preadv 295 69, pwritev 296 70, preadv2 327 286, pwritev2 328 287,
statfs 137 43, fstatfs 138 44, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, flistxattr 196 13, listxattr 194 11,
llistxattr 195 12, readahead 187 213, fallocate 285 47, sync_file_range 277 84, splice 275 76, tee 276 77,
vmsplice 278 75, creat 85 -, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, mknod 133 -, mknodat 259 33,
signalfd 282 -, signalfd4 289 74, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87,
timer_create 222 107, timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111,
epoll_create 213 -, epoll_pwait2 441 441, eventfd 284 -, futex_waitv 449 449, sched_getattr 315 275,
sched_rr_get_interval 148 127, ioprio_get 252 31, accept 43 202, accept4 288 242, setsockopt 54 208, sendmmsg 307 269,
recvmmsg 299 243, io_setup 206 0, io_submit 209 2, io_getevents 208 4, io_pgetevents 333 292, io_cancel 210 3,
io_destroy 207 1, capget 125 90
"""
"""Calls that every reward worker may use besides those of programs: memory, time and files of its own, as far as
Landlock lets it.
"""

MODE_CALLS = """
chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -,
utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14,
lremovexattr 198 15, fremovexattr 199 16, flock 73 32
"""
"""Changes of files that Landlock does not see: of a worker with `files`, or with `processes`, as compilers make
programs of files.
"""

FILE_CALLS = """
inotify_init 253 -, inotify_init1 294 26, inotify_add_watch 254 27, inotify_rm_watch 255 28, name_to_handle_at 303 264,
sync 162 81, syncfs 306 267
"""
"""Calls that a worker with `files` may use besides."""

PATH_CALLS = """
open 2 -, openat 257 56, openat2 437 437, truncate 76 45
"""
"""Calls by which a file may be truncated, which Landlock sees from its third version on."""

PROCESS_CALLS = """
fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, tkill 200 130, rt_sigqueueinfo 129 138,
rt_tgsigqueueinfo 297 240, pidfd_send_signal 424 424, pidfd_open 434 434, setpgid 109 154, setsid 112 157,
sched_setattr 314 274, sched_setparam 142 118, sched_setscheduler 144 119, ioprio_set 251 30, personality 135 92,
setuid 105 146, setgid 106 144, setreuid 113 145, setregid 114 143, setresuid 117 147, setresgid 119 149,
setgroups 116 159, setfsuid 122 151, setfsgid 123 152, kill 62 129, tgkill 234 131, prlimit64 302 261,
setpriority 141 140, prctl 157 167, sched_setaffinity 203 122, seccomp 317 277, capset 126 91,
landlock_create_ruleset 444 444, landlock_add_rule 445 445, landlock_restrict_self 446 446
"""
"""Calls that a worker with `processes` may use besides; the last ones only take rights away."""

NETWORK_CALLS = """
socket 41 198, socketpair 53 199, connect 42 203, bind 49 200, listen 50 201
"""
"""Calls that a worker with `network` may use besides."""

OTHER_CALLS = """
clone3 435 435
"""

TABLES = (
    PROGRAM_CALLS,
    CHECKED_CALLS,
    WORKER_CALLS,
    MODE_CALLS,
    FILE_CALLS,
    PATH_CALLS,
    PROCESS_CALLS,
    NETWORK_CALLS,
    OTHER_CALLS,
)
"""All calls that some process of ours may use, or is answered otherwise than by EPERM."""

LAST_CALL = 450
"""The filter answers later calls, which libc may try first, as an old kernel does, so that libc falls back."""
X32_BIT = 0x40000000

# linux/seccomp.h and linux/bpf_common.h
KILL, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
EPERM, ENOTTY, ENOSYS, ENOTSUP = ERRNO | 1, ERRNO | 25, ERRNO | 38, ERRNO | 95
SET_MODE_FILTER, ALL_THREADS = 1, 1
PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION = 0x20080522
# CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: files of other users.
FILE_PRIVILEGES = 1 << 1 | 1 << 2

CLONE_THREAD, CLONE_NEW = 0x10000, 0x7E020080
O_ACCMODE, O_TRUNC, O_TMPFILE_BIT = 3, 0o1000, 0o20000000
# Of fcntl: duplicates, flags, locks and pipe sizes; neither owners of signals, leases nor seals.
FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: what Python asks of files that it opens.
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# Of fcntl for workers: record locks, by which SQLite reads, seals of their own memory, and hints.
WORKER_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1031, 1032, 1033, 1034, 1035, 1036, 1037, 1038)
FILE_FCNTL = (*WORKER_FCNTL, 36, 37, 38, 1024, 1025, 1026)
# NVIDIA's driver by the type of its calls, 0x46, and its unified memory by numbers below 256; FIGETBSZ is among these.
GPU_IOCTL = ((0xFF00, (0x4600,)), (0xFFFFFF00, (0,)), (0xFFFFFFFF, (0x30000001, 0x30000002)))
# Of sockets (interfaces, 0x89); of files (flags, 0x66; copies, 0x94; attributes, 0x58).
NETWORK_IOCTL, FILE_IOCTL = (0xFF00, (0x8900,)), (0xFF00, (0x6600, 0x9400, 0x5800))
# PR_SET_NAME and PR_GET_NAME of threads, PR_SET_VMA of allocators.
PRCTL = (15, 16, 0x53564D41)
# PR_GET_DUMPABLE, _GET_SECCOMP, _CAPBSET_READ, timer slack, _NO_NEW_PRIVS, huge pages.
WORKER_PRCTL = (*PRCTL, 3, 21, 23, 29, 30, 38, 39, 41, 42)
ALL = 0xFFFFFFFF
AF_UNIX, SOCK_STREAM, SOCK_TYPE = 1, 1, 0xF
PRIO_PROCESS = 0

# linux/landlock.h
WRITE_FILE, READ_FILE, READ_DIR, MAKE_REG, TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 8, 1 << 14
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, REFER = 1 << 4, 1 << 5, 1 << 7, 1 << 13
FILE_RIGHTS = 1 | WRITE_FILE | READ_FILE | TRUNCATE | 1 << 15
RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: 1 << 13, 3: TRUNCATE, 5: 1 << 15}
CREATE = "landlock_create_ruleset"
ADD = "landlock_add_rule"
RESTRICT = "landlock_restrict_self"
RULE_PATH = 1
VERSION = 1
TCP_BIND_CONNECT, SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 3, 1, 2

Choice = tuple[int, tuple[int, ...]]
"""A mask, and the values that pass behind it."""
Check = tuple[int, tuple[Choice, ...], int]
"""Index of an argument, choices of which one must fit, and the answer to all other values."""
Action = int | tuple[Check, ...]
"""The answer to a system call, or the checks that its arguments must all pass."""


class Unconfined(Exception):
    """The host cannot confine a process; the message names the missing feature."""


def confine_program(readable: Iterable[str], folder: str) -> None:
    """Restricts this process for good to its memory, threads, `readable` files, regular files and folders in `folder`.

    Raises:
        Unconfined: the kernel lacks Landlock or seccomp, or the machine is neither x86-64 nor aarch64. The rest applies
            all the same.
    """
    read_only = READ_FILE | READ_DIR
    own = read_only | WRITE_FILE | TRUNCATE | MAKE_REG | MAKE_DIR | REMOVE_FILE | REMOVE_DIR | REFER
    grants = {path: read_only for path in readable} | {folder: own, "/dev/null": read_only | WRITE_FILE | TRUNCATE}
    _apply(_all_rights(), grants, program_actions(), default=EPERM, privileges=0)


def program_actions() -> dict[str, Action]:
    """The answers to the system calls of a program that has this process's id; all other calls get EPERM."""
    actions: dict[str, Action] = dict.fromkeys(call_numbers(PROGRAM_CALLS), ALLOW)
    # libc tries clone where clone3 is not there. Landlock's older versions do not see who truncates by path.
    others: dict[str, Action] = {"clone3": ENOSYS, "listxattr": ENOTSUP, "llistxattr": ENOTSUP}
    return actions | _checks() | others | ({"truncate": ALLOW} if landlock_abi() >= 3 else {})


def confine_worker(folder: str, allowances: Iterable[Allowance]) -> None:
    """Forbids all threads of this process for good what neither graders need nor `allowances` names.

    Without allowances it computes, reads, keeps time, and writes in `folder`. Threads that run already keep their file
    rights: Landlock cannot take them.
    """
    allowed = set(allowances)
    rights = 0 if "files" in allowed else _all_rights() & ~(1 | READ_FILE | READ_DIR | 1 << 15)
    # multiprocessing keeps its locks in /dev/shm.
    writable = [folder, "/dev/null", *(["/dev/shm"] if "processes" in allowed else [])]
    grants, has_network = dict.fromkeys(writable, rights), "network" in allowed
    _apply(rights, grants, worker_actions(allowed), default=EPERM, privileges=FILE_PRIVILEGES, has_network=has_network)


def worker_actions(allowed: set[Allowance]) -> dict[str, Action]:
    """The answers to the system calls of a worker with these allowances; all other calls get EPERM.

    No worker shares memory, semaphores or queues by number (System V) or name (POSIX), which outlive it.
    """
    checks, tables = _checks(), [PROGRAM_CALLS, WORKER_CALLS]
    has_files, has_processes, has_network = (name in allowed for name in ("files", "processes", "network"))
    fcntl, ioctl = FILE_FCNTL if has_files or has_processes else WORKER_FCNTL, [(ALL, IOCTL), *GPU_IOCTL]
    ioctl += [NETWORK_IOCTL] * has_network + [FILE_IOCTL] * has_files
    checks |= {
        "clone3": ENOSYS,
        "fcntl": (_one_of(1, *fcntl),),
        "ioctl": ((1, tuple(ioctl), ENOTTY),),
        "prctl": (_one_of(0, *WORKER_PRCTL),),
        "sched_setaffinity": (_one_of(0, 0, os.getpid()),),
        "flock": EPERM,
    }
    if has_processes:
        # In no namespace of its own.
        checks["clone"] = (_one_of(0, 0, mask=CLONE_NEW),)
    tables += [MODE_CALLS] * (has_files or has_processes) + [FILE_CALLS] * has_files
    tables += [PROCESS_CALLS] * has_processes + [NETWORK_CALLS] * has_network
    tables += [PATH_CALLS] * (has_files or landlock_abi() >= 3)
    given = dict.fromkeys(call_numbers(*tables), ALLOW)
    return given | {name: check for name, check in checks.items() if name not in call_numbers(*tables[2:])}


def landlock_abi() -> int:
    """Version of Landlock that the kernel offers; 0: none."""
    return max(0, _call(CREATE, None, 0, VERSION)) if MACHINE in AUDIT_ARCH else 0


def filter_program(actions: Mapping[str, Action], default: int) -> bytes:
    """A seccomp filter (struct sock_filter[]) that answers system calls by name, and others with `default`.

    Numbers of later kernels get ENOSYS, x32's EPERM; the 32-bit entry ends the process.
    """
    numbers = call_numbers(*TABLES)
    code = [_op(LOAD, 4), _op(EQUAL, AUDIT_ARCH[MACHINE], 1, 0), _op(RETURN, KILL), _op(LOAD, 0)]
    code += [_op(AT_LEAST, X32_BIT, 0, 1), _op(RETURN, EPERM), _op(AT_LEAST, LAST_CALL + 1, 0, 1), _op(RETURN, ENOSYS)]
    for name, action in actions.items():
        if (number := numbers.get(name)) is None:
            continue
        if isinstance(action, int):
            body = [_op(RETURN, action)]
        else:
            body = []
            for index, choices, refusal in action:
                length = sum(2 + len(values) for _, values in choices)
                for mask, values in choices:
                    # The low half of the argument: all of these are of type int. An allowed value jumps over the
                    # refusal.
                    body += [_op(LOAD, 16 + 8 * index), _op(AND, mask)]
                    length -= 2
                    for value in values:
                        body.append(_op(EQUAL, value, length, 0))
                        length -= 1
                body.append(_op(RETURN, refusal))
            body.append(_op(RETURN, ALLOW))
        code += [_op(EQUAL, number, 0, len(body)), *body]
    return b"".join([*code, _op(RETURN, default)])


def install(code: bytes) -> None:
    """Puts all threads of this process under a seccomp filter. Needs no privilege."""
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    if _libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or _call("seccomp", SET_MODE_FILTER, ALL_THREADS, program):
        raise Unconfined(f"seccomp: {os.strerror(ctypes.get_errno())}; the kernel needs CONFIG_SECCOMP_FILTER")


def _apply(
    rights: int,
    grants: Mapping[str, int],
    actions: Mapping[str, Action],
    *,
    default: int,
    privileges: int,
    has_network: bool = False,
) -> None:
    code, lacks = filter_program(actions, default), []
    restrict_files = partial(_restrict_files, rights, grants, has_network=has_network)
    for step in (partial(_drop_privileges, privileges), restrict_files, partial(install, code)):
        try:
            step()
        except Unconfined as error:
            lacks.append(str(error))
    if lacks:
        raise Unconfined("; ".join(lacks))


def _restrict_files(rights: int, grants: Mapping[str, int], *, has_network: bool) -> None:
    _libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    abi = landlock_abi()
    network = 0 if has_network or abi < 4 else TCP_BIND_CONNECT
    scopes = 0 if abi < 6 else SCOPE_SIGNALS | (0 if has_network else SCOPE_ABSTRACT_SOCKETS)
    if abi and not (rights or network or scopes):
        return
    attributes = struct.pack("=QQQ", rights, network, scopes)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _call(CREATE, attributes, len(attributes), 0) if abi else -1
    done = ruleset >= 0
    for path, access in grants.items():
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # not on this host, or closed to this user: there is nothing to grant
        access &= rights if os.path.isdir(path) else rights & FILE_RIGHTS
        done = done and (not access or _call(ADD, ruleset, RULE_PATH, struct.pack("=Qi", access, fd), 0) == 0)
        os.close(fd)
    if not done or _call(RESTRICT, ruleset, 0) != 0:
        raise Unconfined(
            f"Landlock: {os.strerror(ctypes.get_errno())}; needs Linux 5.13 with CONFIG_SECURITY_LANDLOCK, "
            "landlock among lsm=, and a container that does not filter its system calls"
        )
    os.close(ruleset)


def _drop_privileges(kept: int) -> None:
    """Leaves root only these privileges (capabilities, a bit each); other users have none."""
    header, held = struct.pack("=Ii", CAPABILITY_VERSION, 0), ctypes.create_string_buffer(24)
    if _call("capget", header, held) == 0:
        kept &= struct.unpack("=6I", held)[1]
        if _call("capset", header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)) == 0:
            return
    raise Unconfined(f"capset: {os.strerror(ctypes.get_errno())}")


def _all_rights() -> int:
    abi = landlock_abi()
    return sum(rights for since, rights in RIGHTS_BY_ABI.items() if abi >= since)


def _checks() -> dict[str, Action]:
    """Allows threads but no processes, signals to itself alone, no unnamed files, no limits of others, few controls of
    files, and pairs of streams.
    """
    # Truncating what is opened for reading needs no right of Landlock's older versions.
    flags = O_TMPFILE_BIT | O_TRUNC | O_ACCMODE
    modes = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | O_TRUNC, os.O_RDWR | O_TRUNC)
    return {
        "open": (_one_of(1, *modes, mask=flags),),
        "openat": (_one_of(2, *modes, mask=flags),),
        "fcntl": (_one_of(1, *FCNTL),),
        "ioctl": (_one_of(1, *IOCTL, refusal=ENOTTY),),
        "prctl": (_one_of(0, *PRCTL),),
        "prlimit64": (_one_of(0, 0),),
        "clone": (_one_of(0, CLONE_THREAD, mask=CLONE_THREAD | CLONE_NEW),),
        "kill": (_one_of(0, os.getpid()),),
        "tgkill": (_one_of(0, os.getpid()),),
        # asyncio wakes itself through a pair of streams, which reaches nobody else.
        "socketpair": (_one_of(0, AF_UNIX), _one_of(1, SOCK_STREAM, mask=SOCK_TYPE)),
        "setpriority": (_one_of(0, PRIO_PROCESS), _one_of(1, 0)),
    }


def _one_of(index: int, *values: int, mask: int = ALL, refusal: int = EPERM) -> Check:
    return index, ((mask, values),), refusal


def _op(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def call_numbers(*tables: str) -> dict[str, int]:
    """Numbers of system calls by name, of tables as above, on this machine."""
    if MACHINE not in AUDIT_ARCH:
        raise Unconfined(f"the machine is {MACHINE}; system calls are known for {' and '.join(AUDIT_ARCH)}")
    column = 1 + list(AUDIT_ARCH).index(MACHINE)
    rows = [row.split() for table in tables for row in table.split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _call(name: str, *arguments: bytes | ctypes.Array[ctypes.c_char] | int | None) -> int:
    return int(_libc().syscall(call_numbers(*TABLES)[name], *arguments))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
