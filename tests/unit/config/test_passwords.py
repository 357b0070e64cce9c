# SPDX-License-Identifier: Apache-2.0
"""Passwords in the words of users, and the messages around them that stay."""

import pytest

from mrl.config.secrets import redact_text


@pytest.mark.parametrize(
    "text",
    [
        "PASSWORD canary2",
        "OTP 135797 for the cluster",
        "run as bob, password canary2",
        "my password is canarybird",
        "the password for the db is canary2",
        "wifi password canarybird",
        "DB_PASSWORD canarybird",
        "export MY_TOKEN canary",
        "root pw: canary",
        "Passwort: Canary26",
        'the passphrase "canary horse battery staple"',
        "passphrase canary-horse-staple9",
        "seed phrase canary collapse practice feed shame open",
        "PIN 1357",
        "MFA code 135 797",
        "one-time code: 135797",
        "recovery code canary-1357-efgh",
        "totp secret CANARYSWY3DPEH2K",
        "token canary123f456",
        "login bob/canary7",
        "| password | canary2 |",
        "IDENTIFIED BY 'canary'",
        "password\tcanary2",
        "note: PASSWORD\ncanary2",
        # Settings, whatever their value looks like.
        "creds: admin canary",
        "notes: creds: admin canary",
        "token=canary",
        "pw=canary",
        "secret: canary",
        "login=bob pw=canary",
        "auth = admin:canary",
        '{"creds": "admin canary", "n": 3}',
        "connect(token='canary', n=3)",
        "db_pin: 1357",
    ],
)
def test_what_is_said_behind_a_name_is_hidden(text: str):
    hidden = redact_text(text)
    assert "<redacted>" in hidden and not any(part in hidden.lower() for part in ("canary", "1357", "135 797")), hidden


@pytest.mark.parametrize(
    "text",
    [
        "the password is missing; DB_PASSWORD is not set; wrong password given",
        "password required",
        "tokens 512, token 151645 of 1,024, key 7: train/reward=0.5",
        "pass 2048 tokens; pass@16: 0.5312; a second pass over the batch",
        "`HF_TOKEN`, `HF_HOME` and `WANDB_API_KEY`, which the libraries use",
        "pin ranks 0 to 3 to cores 8-15; pin 4096 pages",
        "unknown key policy.megatron_cfg.fp8_cfg; nearest: fp8",
        "exit code 137, status code 40960, code environment",
        "a secret of the run; the token budget is 32768",
        "token: 15; eos_token=</s>, pad_token='[PAD]', n_token=None; token=${oc.env:X}",
        "policy ranks' token: each rank has one of its own",
    ],
)
def test_messages_stay(text: str):
    assert redact_text(text) == text
