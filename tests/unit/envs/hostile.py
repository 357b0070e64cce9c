"""A reward function that misbehaves on command. Runs in a child process."""

import os
import signal
import sys
import time


def score(text, expected):
    match text:
        case "hang":
            while True:
                time.sleep(60)
        case "spin":
            while True:
                pass
        case "exit":
            os._exit(7)
        case "sys.exit":
            sys.exit(7)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "bomb":
            return float(len(bytearray(64 << 30))), ""
        case "grow":
            blocks = []
            while True:
                blocks.append(bytearray(1 << 26))
        case "raise":
            raise KeyError("no")
        case "recursion":
            return score(text, expected)
        case "print":
            print("noise on stdout " * 10_000)
        case "garbage":
            for fd in range(3, 32):
                try:
                    os.write(fd, b"\x00\x00\x00\x04junk")
                except OSError:
                    continue
        case "huge":
            for fd in range(3, 32):
                try:
                    os.write(fd, b"\xff" * 64)
                except OSError:
                    continue
            time.sleep(60)
        case "nan":
            return float("nan"), ""
        case "inf":
            return float("inf"), ""
        case "none":
            return None, ""
        case "str":
            return "1.0", ""
        case "bool":
            return True, ""
        case "no tuple":
            return 1.0
        case "bad extracted":
            return 1.0, 7
        case "object":
            return object(), ""
        case "fork":
            if os.fork() == 0:
                time.sleep(300)
            while True:
                time.sleep(60)
    return 1.0 if text == expected else 0.0, text
