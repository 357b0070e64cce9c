# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml

from mrl import check
from mrl.config.load import load_config, resolved_yaml
from mrl.config.model import with_value
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import STORY, SecretsFormatter, redact, redact_text, run_entry, split_secrets, start_logging
from mrl.store.about import about_this_attempt
from mrl.store.run_folder import RunFolder
from mrl.types import RunState
from tests.sources import ROOT
from tests.waiting import HANG_S


def test_the_saved_config_loads_and_is_the_same(tmp_path: Path):
    config = load_config(
        "grpo_tiny.yaml", ["+policy.generation.vllm_kwargs.a=[1, {b: null}]", "data.max_input_seq_length=3"]
    )
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(config))
    assert load_config(path) == config


def test_no_secret_is_saved(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-one")
    monkeypatch.setenv("SOME_SERVICE_PASSWORD", "canary-two")
    overrides = [
        "policy.model_name=/models/${oc.env:SOME_SERVICE_PASSWORD}",
        "+policy.generation.vllm_kwargs.hf_token=canary-three",
    ]
    overrides += [
        "data.train.data_path=https://me:canary-four@host/train.jsonl",
        "checkpointing.checkpoint_dir=a-canary-one-b",
    ]
    text = resolved_yaml(load_config("grpo_tiny.yaml", overrides))
    assert "canary" not in text
    assert "https://<redacted>@host/train.jsonl" in text and "a-<redacted>-b" in text


@pytest.mark.parametrize(
    "key",
    [
        "token",
        "hf_token",
        "API_KEY",
        "apikey",
        "db-password",
        "client_secret",
        "aws_access_key_id",
        "credentials",
        "db_creds",
        "WIFI_PSK",
    ],
)
def test_keys_of_secrets(key: str):
    assert redact({key: "abc", "list": [{key: "abc"}]}) == {key: "<redacted>", "list": [{key: "<redacted>"}]}


@pytest.mark.parametrize(
    "key", ["stop_token_ids", "max_new_tokens", "tokenizer", "metric_name", "token_level_loss", "secretary"]
)
def test_keys_that_are_no_secrets(key: str):
    assert redact({key: "abc"}) == {key: "abc"}


def test_what_comes_from_the_environment_is_a_secret_unless_it_is_a_place(monkeypatch: pytest.MonkeyPatch):
    values = {
        "COMPANY_PLACE": "canary-five",
        "PROXY": "canary-six",
        "SCRATCH": "/scratch/me",
        "RUN_NAME": "first-run",
        "SHORT": "abc",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    overrides = [
        "policy.model_name=/models/${oc.env:COMPANY_PLACE}",
        "policy.tokenizer.name='${oc.env:ABSENT,${oc.env:PROXY}}'",
        "checkpointing.checkpoint_dir=${oc.env:SCRATCH}/${oc.env:RUN_NAME}-${oc.env:SHORT}",
    ]
    config = load_config("grpo_tiny.yaml", overrides)
    assert config.policy.tokenizer.name == "canary-six"
    text = resolved_yaml(config)
    assert "canary" not in text and "/models/<redacted>" in text and "checkpoint_dir: /scratch/me/first-run-abc" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://me:pass@word@host/x", "http://<redacted>@host/x"),
        ("redis://:password@host", "redis://<redacted>@host"),
        ("https://host/x?a=1&api_key=abc&b=2", "https://host/x?a=1&api_key=<redacted>&b=2"),
        ("http://localhost:5000/x?page=2", "http://localhost:5000/x?page=2"),
        ("https://AbCdEf@host/x", "https://<redacted>@host/x"),
        ("https://AbCdEf:x-oauth-basic@host/x", "https://<redacted>@host/x"),
        ("https://me:pa/ss@host/x", "https://<redacted>@host/x"),
        ("me:hidden@host/db", "<redacted>@host/db"),
        ("https://host/x?pwd=abc", "https://host/x?pwd=<redacted>"),
        ("https://host/x#state=abcdef", "https://host/x#state=<redacted>"),
    ],
)
def test_urls(text: str, expected: str):
    assert redact_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "http://localhost:8000/models@v1",
        "http://x/?n=5&page=2 NCCL_DEBUG=INFO TP_SIZE=4 CUDA_LAUNCH_BLOCKING=1 HF_HOME=/x MY_FLAG=true ABC=DEF",
        "http://[::1]:8000/a@b",
        "git+ssh://git@host/org/x",
        "hf://datasets/org/set@main/x.parquet?revision=refs/convert",
        "nvcr.io/nvidia/nemo:25.04@sha256:abcdef",
        "grpo.max_num_steps=6 policy.tokenizer.name=/models/x pad_token_id=0",
        "a basic understanding; the bearer of tokens",
        "eos_token: </s>, signature=None, 12:30@host",
        "hf_tokenizer_of_the_model sk-learn-contrib",
        "test_Qwen3MoeForCausalLM layer_0123456789abcdef0123456789abcdef mrl_NemotronHForCausalLMWithExperts",
        "the password is missing; docker login needs -p, redis-cli -a; a password: none secret_of_layer_0123456789012",
        "next_token = argmax(x); per_token=a / b; api_key: str = tokens[0]",
        "forward pass: 12 ms, pass=prefill, backward_pass=overlap LEARNING_RATE=1e-6",
        "WANDB_PROJECT=grpo WANDB_ENTITY=me WANDB_MODE=offline WANDB_TAGS=a HF_ENDPOINT=https://hf-mirror.com",
        "MLFLOW_TRACKING_URI=http://mlflow:5000 HTTP_PROXY=http://proxy:3128 AWS_REGION=us-east-1 MASTER_ADDR=node01",
        "--max-token 1024 --token -x the api key is missing; https://x.org/docs/webhooks",
    ],
)
def test_texts_without_secrets_stay(text: str):
    assert redact_text(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "Server=db;User Id=me;Password=canary;Encrypt=true",
        "host=db dbname=x user=me password='canary' sslmode=require",
        "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=canary==;EndpointSuffix=core.windows.net",
        "Endpoint=sb://x/;SharedAccessKeyName=n;SharedAccessKey=canary=",
        '{"password": "canary"}',
        "X-Api-Key: canary",
        "Authorization: Bearer canary",
        "curl --header 'Proxy-Authorization=Basic canary'",
        "bearer canary123456",
        "https://hooks.slack.com/services/T0/B0/canary",
        "-----BEGIN RSA PRIVATE KEY-----\ncanary\n-----END RSA PRIVATE KEY-----",
        "token ghp_canary0123456789",
        # Commands, addresses that are secrets, and tokens of services of which no rule knows the name.
        "job --db-password canary5 --steps 100",
        "curl -s -u me:canary https://x",
        "sshpass -p canary ssh host",
        "docker login nvcr.io -u me -p canary5",
        "redis-cli -h db -a canary5 ping",
        "mysql -uroot -pcanary5 db",
        "the password is canary5",
        "passphrase: canary5",
        "secret_mycloud_Ab3dEfGhIjKlMcanary4rStUv.1234567",
        "machine github.com login me password canary",
        "PGPASSWORD=canary psql",
        "requests.get(url, auth=('bob', 'canary'))",
        "HTTPS_PROXY=http://me:canary@proxy:3128",
        # Variables and parameters whose names are on no list of harmless ones.
        "MY_THING=canary NCCL_DEBUG=INFO",
        "export FOO_BAR='canary b'",
        "SSHPASS=canary ssh host; export TAVILY=canary",
        "docker run -e Thing=canary image",
        "http://x/?k=canary",
        "http://x/?page=2&k=canary#x=canary",
        "https://api.telegram.org/bot123456789:AAcanary/getMe",
        "https://outlook.office.com/webhook/canary-1/IncomingWebhook/2",
        "WANDB_API_KEY 0123456789abcdefcanary0123456789abcdef0123",
        "gsk_Ab3dEfGhIjKlMcanary4rStUv",
        "xai-Ab3dEfGhIjKlMcanary4rStUv",
        "r8_Ab3dEfGhIjKlMcanary4rStUv",
        "sk_live_canary5678901234",
        "SG.AbCdEfGhIjKlMnOp3q.canary78901234567890",
        "hvs.CAESIcanary78901234567890",
    ],
)
def test_forms_of_secrets(text: str):
    assert "canary" not in redact_text(text) and "<redacted>" in redact_text(text)


@pytest.mark.parametrize(
    "spell",
    [shlex.quote, json.dumps, repr, lambda text: quote(text, safe=""), lambda text: yaml.safe_dump({"a": text})],
)
def test_a_secret_is_hidden_however_it_is_quoted(monkeypatch: pytest.MonkeyPatch, spell: Callable[[str], str]):
    monkeypatch.setenv("GITHUB_PAT", secret := "ab'cd\"ef\\gh&canary")
    assert "canary" not in redact_text(f"said {spell(secret)}")


@pytest.mark.parametrize(
    "name",
    [
        "DB_PASS",
        "GITHUB_PAT",
        "SENTRY_DSN",
        "A_CONNECTION_STRING",
        "A_WEBHOOK_URL",
        "A_KEY",
        "FOO",
        "vllm_x",
        "UCX_CERT",
    ],
)
@pytest.mark.parametrize("value", ["canary-7", "pin", "policy"])
def test_a_variable_is_shown_only_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    """Words under names that no rule knows stay where they are other texts."""
    key = "policy.megatron_cfg.env_vars"
    words = [f"++{key}.{name}={value}", f"++{key}.NCCL_DEBUG=INFO"]
    config = load_config("grpo_tiny.yaml", words)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "mrl.train", *words, f"{key}={{{name}: {value}}}"])
    command = str(about_this_attempt(config)["command"])
    assert config.policy.megatron_cfg.env_vars == {name: value, "NCCL_DEBUG": "INFO"}
    assert yaml.safe_load(resolved_yaml(config))["policy"]["megatron_cfg"]["env_vars"] == {
        name: "<redacted>",
        "NCCL_DEBUG": "INFO",
    }
    assert f"={value}" not in command and f" {value}" not in command and "NCCL_DEBUG=INFO" in command
    assert split_secrets({name: value, "NCCL_DEBUG": "INFO"}) == ({"NCCL_DEBUG": "INFO"}, {name: value})
    assert name not in ("FOO", "vllm_x") or value != "policy" or redact_text("policy", config.facts.secrets) == "policy"


def test_variables_that_may_be_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "canary-1")
    hidden = {"A_TOKEN": "x", "PROXY": "http://me:pw@proxy", "COPY": "canary-1"}
    assert split_secrets({"NCCL_DEBUG": "INFO", **hidden}) == ({"NCCL_DEBUG": "INFO"}, hidden)


CANARIES = {
    "HF_TOKEN": "canary-1",
    "WANDB_API_KEY": "canary-2",
    "SWANLAB_API_KEY": "canary-3",
    "MLFLOW_TRACKING_PASSWORD": "canary-4",
}
SECRETIVE = [
    "policy.tokenizer.name=${oc.env:PROXY}",
    "+policy.generation.vllm_kwargs.hf_token=canary-6",
    "+policy.megatron_cfg.env_vars={MY_SECRET: canary-7, HUB: 'https://me:canary-8@hub'}",
    "+policy.generation.vllm_cfg.env_vars.AWS_ACCESS_KEY_ID=canary-9",
    "+policy.generation.vllm_cfg.env_vars.UCX_CERT=canary-11",
    "+policy.megatron_cfg.env_vars.GLOO_PIN=canary-12",
]


@pytest.fixture
def canaries(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which everything is written, with secrets planted in the environment."""
    for name, value in (CANARIES | {"PROXY": "canary-5"}).items():
        monkeypatch.setenv(name, value)
    # A folder whose name is a secret.
    (workplace / "canary-5").symlink_to("prepared/tiny/model")
    return workplace


def test_nothing_that_a_run_folder_writes_has_a_secret(canaries: Path, capsys: pytest.CaptureFixture[str]):
    config = load_config("grpo_tiny.yaml", [*SECRETIVE, "policy.model_name=canary-5"], secrets=start_logging())
    with RunFolder(config) as folder:
        folder.open()
        folder.note_attempt()
        folder.newest_checkpoint()
        folder.log_metrics(1, {"train/reward": 1.0})
        pending = folder.checkpoints.begin(RunState(step=1))
        folder.copy_tokenizer(pending)
        folder.checkpoints.commit(pending, {})
    written = [path for path in (canaries / "results").rglob("*") if path.is_file()]
    assert {"config.yaml", "report.html", "metrics.jsonl", "training_info.json"} <= {path.name for path in written}
    assert [path for path in written if b"canary" in path.read_bytes()] == []
    assert "canary" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "override",
    [
        "policy.model_name=/models/canary-5",  # no such folder
        "+policy.generation.vllm_kwargs.api_key=canary-10",  # no such argument
        "+wandb.api_key=canary-10",  # no such section
        "policy.tokenizer.api_key={canary-10: [",  # cannot be read
        "policy.generation.vllm_cfg.precision=canary-5",
        "data.train.data_path=https://me:canary-10@host/train.jsonl",
    ],
)
def test_no_message_has_a_secret(canaries: Path, capsys: pytest.CaptureFixture[str], override: str):
    status = check.main(["grpo_tiny.yaml", *SECRETIVE, override])
    printed = capsys.readouterr().out
    assert "canary" not in printed and "Refused" in printed and status in (0, 2)


def test_tracebacks_have_no_secret(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("HF_TOKEN", "canary-1")
    monkeypatch.setenv("PROXY", "canary-5")
    load_config("grpo_tiny.yaml", ["policy.tokenizer.name=${oc.env:PROXY}"], secrets=start_logging())

    def fail() -> int:
        try:
            raise RuntimeError("401 for canary-1")
        except RuntimeError:
            logging.getLogger("some.library").exception("asked with %s", "canary-1 by canary-5")
            raise

    assert run_entry(fail) == 1
    printed = capsys.readouterr()
    # On stderr it is the first line, the end of the traceback, and the last line.
    assert [text.count("RuntimeError: 401 for <redacted>") for text in printed] == [1, 3]
    assert "asked with <redacted>" in printed.out and "canary" not in printed.out + printed.err


def records() -> list[logging.LogRecord]:
    made = [(logging.INFO, STORY, "\n== Step 1/2 ==\n[Reward]   mean=0.5"), (logging.WARNING, "mrl.a", "low")]
    return [logging.LogRecord(name, level, "", 0, text, None, None) for level, name, text in made]


def test_every_line_of_a_log_has_its_time_and_level():
    made, created = records(), datetime(2024, 2, 29, 23, 59, 58)
    made[0].created = created.timestamp()
    text = "\n".join(map(SecretsFormatter("text").format, made))
    found = re.findall(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ([A-Z]+) (.+)$", text, re.MULTILINE)
    assert [line[1:] for line in found] == [
        ("INFO", "== Step 1/2 =="),
        ("INFO", "[Reward]   mean=0.5"),
        ("WARNING", "low"),
    ]
    assert text.count("\n") == 2 and datetime.fromisoformat(found[0][0]) == created


def test_a_terminal_has_the_block_of_the_tutorials_as_it_is():
    block, warning = map(SecretsFormatter("terminal").format, records())
    assert block == "\n== Step 1/2 ==\n[Reward]   mean=0.5" and re.fullmatch(r"\d\d:\d\d:\d\d low", warning)


def test_a_log_in_json_has_an_object_a_line():
    rows = [json.loads(SecretsFormatter("json").format(record)) for record in records()]
    assert [(row["level"], row["logger"], row["message"]) for row in rows] == [
        ("INFO", STORY, "== Step 1/2 ==\n[Reward]   mean=0.5"),
        ("WARNING", "mrl.a", "low"),
    ]
    assert abs(datetime.now().astimezone() - datetime.fromisoformat(rows[0]["time"])) < timedelta(seconds=60)


DYING = """
import logging, sys, warnings
from mrl.config.secrets import run_entry, start_logging

start_logging(sys.argv[1])

def main():
    logging.info("first")
    warnings.warn("old")
    try:
        raise OSError("the disk is gone")
    except OSError as error:
        raise RuntimeError("step 3 failed:\\n  for good") from error

sys.exit(run_entry(main))
"""


@pytest.mark.parametrize("style", ["text", "json"])
def test_the_reason_of_death_is_the_last_line_of_the_log(style: str):
    command = [sys.executable, "-c", DYING, style]
    ended = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=HANG_S
    )
    lines = ended.stdout.splitlines()
    if style == "json":
        rows = [json.loads(line) for line in lines]
        lines = [f"{row['level']} {row['message']}" for row in rows]
    else:
        assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z]+ ", line) for line in lines), ended.stdout
    assert (
        ended.returncode == 1 and lines[0].endswith("INFO first") and any("UserWarning: old" in line for line in lines)
    )
    assert "OSError: the disk is gone" in ended.stdout
    assert lines[-1].endswith("ERROR The attempt ended: RuntimeError: step 3 failed: for good")


def test_a_changed_config_keeps_its_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PROXY", "canary-5")
    config = load_config("grpo_tiny.yaml", ["policy.tokenizer.name=${oc.env:PROXY}"])
    changed = with_value(config, "grpo.max_num_steps", 3)
    assert changed.facts.secrets == config.facts.secrets == {"canary-5"}
    replaced = dataclasses.replace(config, grpo=dataclasses.replace(config.grpo, max_num_steps=3))
    assert replaced == changed and replaced.facts is config.facts
    shown = RunConfig(facts=config.facts)
    assert "canary-5" not in f"{shown} {dataclasses.asdict(shown)}"
    assert (changed.grpo.max_num_steps, changed.policy) == (3, config.policy) and config.grpo.max_num_steps != 3


def test_short_values_of_the_environment_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "true")
    assert redact_text("true") == "true"


def test_the_colors_of_rays_errors_are_left_out():
    record = logging.LogRecord(
        "mrl", logging.ERROR, "", 0, "\x1b[36mray::EngineActor.build()\x1b[39m (pid=7)\x1b[2J", None, None
    )
    assert SecretsFormatter().format(record) == "ray::EngineActor.build() (pid=7)\ufffd[2J"


LIBRARY = r"""
import logging, warnings
from mrl.config.secrets import start_logging

start_logging()
own = logging.getLogger("a.library")
own.addHandler(logging.StreamHandler())
own.propagate = False
own.warning("model %s", "\x1b[2Jevil ghp_canary0123456789")
warnings.warn("\x1b[2Jevil ghp_canary0123456789")
own.warning("%d", "no number")
"""


def test_what_libraries_print_is_made_safe():
    ended = subprocess.run(
        [sys.executable, "-c", LIBRARY], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert (
        ended.stderr.count("\ufffd[2Jevil <redacted>") == 2
        and "\x1b" not in ended.stderr
        and "no number" in ended.stderr
    )


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("data.default.system_prompt", "Answer with one token: the letter. TOTAL_SUM=x"),
        ("policy.tokenizer.chat_template", "{% set tool_token = msg.role %}{{ tool_token }}"),
    ],
)
def test_texts_for_the_model_are_saved_as_they_are(key: str, text: str):
    """Replays and evaluations read the saved config: a changed prompt would be another run."""
    assert redact(text, key=key) == text
    assert redact([f"{text} canary-4821"], frozenset({"canary-4821"}), key) == [f"{text} <redacted>"]


def test_a_log_spells_what_nobody_sees_and_keeps_what_scripts_need():
    needed = "می\u200cخواهم 👩\u200d💻 അവന്\u200d ភាសា\u200bខ្មែរ"
    text = f"grpo.seed\u200b \ufeffgrpo a\u200dtrain \U000e0041 \u2028 {needed}"
    record = logging.LogRecord("mrl", logging.INFO, __file__, 0, text, None, None)
    assert SecretsFormatter().format(record) == (
        f"grpo.seed\\u200b \\ufeffgrpo a\\u200dtrain \\U000e0041 \\u2028 {needed}"
    )
