# SPDX-License-Identifier: Apache-2.0
"""A reward function that misbehaves on command. Runs in a child process."""

import ctypes
import json
import os
import signal
import sys
import time

NO_MESSAGES = {
    "no JSON": b"\x00\x00\x00\x04junk",
    "no object": b"\x00\x00\x00\x02[]",
    "no text": b"\x00\x00\x00\x01\xff",
}


def score(prompt, response, reference_answer):
    text, expected = response, reference_answer
    match text:
        case "hang":
            while True:
                time.sleep(6000)
        case "spin":
            while True:
                pass
        case "nap":
            time.sleep(0.05)
        case "exit":
            os._exit(7)
        case "sys.exit":
            sys.exit(7)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "bomb":
            return float(len(bytearray(64 << 30)))
        case "grow":
            blocks = []
            while True:
                blocks.append(bytearray(1 << 26))
        case "raise":
            raise KeyError("no")
        case "recursion":
            return score(prompt, text, expected)
        case "print":
            print("noise on stdout " * 10_000)
        case "garbage":
            write_everywhere(b"\x00\x00\x00\x04junk")
        case "huge":
            write_everywhere(b"\xff" * 64)
            time.sleep(6000)
        case "no JSON" | "no object" | "no text":
            write_everywhere(NO_MESSAGES[text])
            time.sleep(6000)
        case "forged reward" | "forged observation":
            forged = {"reward": 1.0, "components": {}, "extracted": "", "flags": [], "observation": []}
            body = json.dumps(
                forged | ({"reward": 10**400} if text == "forged reward" else {"observation": [7]})
            ).encode()
            write_everywhere(len(body).to_bytes(4) + body)
            time.sleep(6000)
        case "nan":
            return float("nan")
        case "inf":
            return float("inf")
        case "no float32":
            return 1e39
        case "none":
            return None
        case "str":
            return "1.0"
        case "bool":
            return True
        case "tuple":
            return 1.0, "a"
        case "object":
            return object()
        case "no reward":
            return {"extracted": "a"}
        case "bad component":
            return {"right": 1.0, "form": None}
        case "nan component":
            return {"reward": 1.0, "form": float("nan")}
        case "bad observation":
            return {"reward": 1.0, "observation": 7}
        case "fork":
            if os.fork() == 0:
                time.sleep(6000)
            while True:
                time.sleep(6000)
        case "null pointer":
            ctypes.string_at(0)
    return {"reward": 1.0 if text == expected else 0.0, "extracted": text}


def write_everywhere(data):
    for fd in range(3, 1024):
        try:
            os.write(fd, data)
        except OSError:
            continue


def echo(response):
    """Says the text again wherever a reward function may say something."""
    return {"reward": 1.0, response: 1.0, "extracted": response, "observation": [{"role": "user", "content": response}]}
