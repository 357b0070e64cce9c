# SPDX-License-Identifier: Apache-2.0
"""Programs that take more than their share, or want their own grading to fail: see `attacks.py`."""

ON_SHARE = {
    "memory": "x = bytearray(1 << 32)\nwon()",
    "memory in files": """
        fds = [libc.memfd_create(b"x", 0) for _ in range(40)]
        won(max(fds) >= 0)
    """,
    "processor": "while True: pass",
    "sleep": "time.sleep(6000)\nwon()",
    "stopping itself": "os.kill(os.getpid(), signal.SIGSTOP)\nwon()",
    "output": "while True: os.write(1, b'x' * (1 << 20))",
    "many large files": """
        for number in range(400):
            with open(f"file{number}", "wb") as file:
                file.write(bytes(30 << 20))
        won()
    """,
    "many empty files": """
        for number in range(10**7):
            open(f"file{number}", "w").close()
        won()
    """,
    "deleted files that are open": """
        for number in range(40):
            file = os.open(f"file{number}", os.O_RDWR | os.O_CREAT)
            os.unlink(f"file{number}")
        won()
    """,
    "unnamed files": "os.open('.', os.O_RDWR | os.O_TMPFILE)\nwon()",
    "reserved blocks": "won(libc.fallocate(os.open('file', os.O_RDWR | os.O_CREAT), 1, 0, 1 << 30) == 0)",
    "extended attributes": "os.setxattr('program.py', 'user.x', bytes(4000))\nwon()",
    "threads": """
        import threading
        threading.stack_size(32768)
        for _ in range(5000):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        won()
    """,
    "segments of shared memory": "won(libc.shmget(0, 1 << 26, 0o1600) >= 0)",
    "message queues": "won(libc.msgget(0, 0o1600) >= 0)",
    "folders ten thousand deep": """
        for _ in range(10**4):
            os.mkdir("d")
            os.chdir("d")
        won()
    """,
    "many empty files in folders": """
        for number in range(100):
            os.makedirs(f"d{number % 7}/e", exist_ok=True)
            open(f"d{number % 7}/e/file{number}", "w").close()
        won()
    """,
    "paths too long to read": """
        for _ in range(40):
            os.mkdir("d" * 250)
            os.chdir("d" * 250)
        won()
    """,
    "large deleted files": """
        keep = []
        for number in range(20):
            keep.append(open("file", "wb"))
            os.unlink("file")
            keep[-1].write(bytes(30 << 20))
            keep[-1].flush()
            time.sleep(0.2)
        won()
    """,
    "unreadable folder": "os.mkdir('d', 0)\nwon()",
    "immutable file": """
        import fcntl
        fcntl.ioctl(os.open("program.py", os.O_RDONLY), 0x40086602, struct.pack("=I", 0x10))
        won()
    """,
    "unreadable own folder": "os.chmod('.', 0)\nwon()",
}
"""Programs that must end with reward 0, and leave nothing behind."""

ON_GRADING = {
    "FIFO in place of the result": (
        "os.path.exists('result.json') and os.unlink('result.json')\nos.mkfifo('result.json')\nos._exit(0)"
    ),
    "folder in place of the result": (
        "os.path.exists('result.json') and os.unlink('result.json')\nos.mkdir('result.json')\nos._exit(0)"
    ),
    "device in place of the result": """
        os.path.exists("result.json") and os.unlink("result.json")
        os.symlink("/dev/zero", "result.json")
        os._exit(0)
    """,
    "deep result": "open('result.json', 'w').write('[' * 10**5)\nos._exit(0)",
    "torn result": "open('result.json', 'w').write('[1, ')\nos._exit(0)",
    "huge number": "open('result.json', 'w').write('9' * 10**5)\nos._exit(0)",
    "result that is no text": "open('result.json', 'wb').write(bytes(range(256)))\nos._exit(0)",
    "endless result": """
        with open("result.json", "wb") as file:
            for _ in range(31):
                file.write(b"[0," * (1 << 18))
        os._exit(0)
    """,
    "result through descriptors": """
        for fd, found in open_descriptors():
            os.write(fd, b"[" * 10**5)
        os._exit(0)
    """,
    "descriptors that refuse to be read": """
        import fcntl
        for fd in [1, 2, *(fd for fd, _ in open_descriptors())]:
            os.write(fd, b"1")
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        os._exit(0)
    """,
    "closed descriptors": "os.closerange(0, 64)\nos._exit(0)",
    "stopped grader": "os.kill(os.getppid(), signal.SIGSTOP)\nwon()",
    "killed grader": "os.kill(os.getppid(), signal.SIGKILL)\nwon()",
    "killed group": "os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)\nwon()",
    "claim not to be confined": """
        sys.stderr.write("the program cannot be confined: Landlock")
        os._exit(1)
    """,
    "error that tells a secret": """
        Canary = type("canary_7f3a", (Exception,), {})
        raise Canary("canary_7f3a " + E["begins"])
    """,
    "exception named like one of Python's": """
        type("x", (), {"__repr__": 1})
        sys.stderr.write("\\nValueError\\x1b]0;canary_7f3a: ")
        os._exit(1)
    """,
    "signalling NaN": "print('sNaN')",
    "numbers beyond all bounds": "print('1e999999999999999999999', 'Infinity')",
    "surrogates": "os.write(1, b'\\xed\\xa0\\x80' * 99)",
    "own module in place of json": """
        import types
        sys.modules["json"] = types.SimpleNamespace(dump=lambda *a: os._exit(0))
        os._exit(0)
    """,
    "sitecustomize": "open('sitecustomize.py', 'w').write('print(42)')\nos._exit(0)",
    "patched interpreter": """
        import builtins
        builtins.__import__ = None
        sys.stdout = sys.stderr = None
    """,
}
"""Programs that must get a reward of 0 and not a mask, whatever the program does to its files and its grader."""
