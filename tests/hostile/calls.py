# SPDX-License-Identifier: Apache-2.0
"""System calls that attacks try, by name and number."""

NEVER_CALLS = """
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, pidfd_getfd 438 438,
kcmp 312 272, io_uring_setup 425 425, userfaultfd 323 282, bpf 321 280, perf_event_open 298 241, add_key 248 217,
request_key 249 218, keyctl 250 219, unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, move_mount 429 429,
open_tree 428 428, fsopen 430 430, pivot_root 155 41, chroot 161 51, init_module 175 105, finit_module 313 273,
kexec_load 246 104, kexec_file_load 320 294, open_by_handle_at 304 265, shmget 29 194, msgget 68 186, semget 64 190,
mq_open 240 180
"""
"""Calls that attacks try, and no process of ours may use: memory of others, namespaces, and what outlives a process."""
ANSWER_BEGINS = "answer-"
MARK = "untouched"
SLOW = ("processor", "sleep", "stopping itself")
"""Attacks that end with their deadline, which is a short one."""
