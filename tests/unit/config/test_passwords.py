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
        # Told by their place.
        "the door opens with PIN1357.",
        "OTP135797",
        "mysql -u root -pcanary2 db",
        "+ mysqldump --all -p'canary'",
        "mariadb-dump -ubob -pcanary > x.sql",
        "7z x -pcanary a.7z",
        "unzip -P canary a.zip",
        "mongosh -u bob -p canary --authenticationDatabase admin",
        "ldapsearch -x -D cn=bob -w canary -b dc=x",
        "smbclient //h/s -U bob%canary",
        "htpasswd -bc f bob canary",
        "echo canary | sudo -S ls",
        "localhost:5432:mydb:admin:canary",
        "*:*:*:bob:canary",
        "~/.pgpass: db.x.org:6432:*:bob:canary-2",
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
        "mysql -P 3306 -h db.x.org | cat; unzip -p a.zip; 7z x a.7z; zip -r -q x.zip results; rar a -r x.rar y",
        "docker run -p 8080:80 -P image; ssh -p 2222 host; mkdir -p results/run; ray start --port=6379 -P",
        "step:1000:train:loss:0.5312, fe80:1234:abcd:ef01:2345:6789, train.py:1234:step:loss:mean, 10.0.0.1:29500",
        "2026-11-28T10:15:30, 0000:3b:00.0, mlx5_0:1, node-1:29500: refused; ids 0:1:2:3:4; http://a:8000/v1:x:y",
        "PINNED1234, pin 4096 pages, SPIN1234, GPIO4, pin_memory=1, Private-MAC is absent; echo 3 | tee f",
    ],
)
def test_messages_stay(text: str):
    assert redact_text(text) == text
