# SPDX-License-Identifier: Apache-2.0
import hashlib

import pytest

from mrl import env
from mrl.config.secrets import redact_text, split_secrets

HEX = hashlib.sha256(b"canary").hexdigest()
MIXED = "Ab3dEfGh1jKlMn0pQrS7uVwXyZ" * 4


@pytest.mark.parametrize(
    ("text", "token"),
    [
        # Forms that gitleaks' rules have, as the services document them.
        ("pushed with shpat_{}", HEX[:32]),
        ("pushed with rubygems_{}", HEX[:48]),
        ("pul-{} is not valid", HEX[:40]),
        ("glsa_{}, and", f"{MIXED[:32]}_{HEX[:8]}"),
        ("dp.pt.{}.", MIXED[:43]),
        ("sntryu_{}", HEX),
        ("{} (1Password)", "A3-AB12CD-EF34GH-IJ56K-LM78N-OP90Q-RS12T"),
        # Tokens without a mark, behind the name of a service or a word.
        ("wandb: key {}", HEX[:40]),
        ("wandb login {}", HEX[:40]),
        ("swanlab login -k {}", MIXED[:22]),
        ("the key is {}, says the server", HEX[:40]),
        ("DATADOG={}", HEX[:40]),
        ("heroku: {}", "01234567-89ab-cdef-0123-456789abcdef"),
        ("'contentful' => '{}'", MIXED[:43]),
        ("tokens: {} and more", MIXED[:30]),
        ("SENTRY_CI : {}", HEX),
        # Forms of which gitleaks has no rule.
        ("pushed with ghr_{}", MIXED[:76]),
        ("oauth GOCSPX-{}", MIXED[:28]),
        ("pushed with 1//0{}", MIXED[:60]),
        ("pushed with amzn.mws.{}", "01234567-89ab-cdef-0123-456789abcdef"),
        ("pushed with csk-{}", MIXED[:48].lower()),
        ("pushed with {}", (MIXED[:26].lower() * 2).translate(str.maketrans("0189", "2345"))),
        ("pushed with napi_{}", HEX),
        ("pushed with tk_{}", MIXED[:29].lower()),
        ("pushed with NRAK-{}", MIXED[:27].upper()),
        ("pushed with sbp_{}", HEX[:40]),
        ("pushed with bce-v3/ALTAK-{}", f"{MIXED[:21]}/{HEX[:40]}"),
        ("pushed with lsv2_pt_{}", f"{HEX[:32]}_{HEX[:10]}"),
        ("pushed with pat{}", f"{MIXED[:14]}.{HEX}"),
        ("pushed with {}", f"{HEX[:32]}.{MIXED[:16]}"),
        ("pushed with {}", f"{MIXED[:86]}=="),
        ("pushed with {}", f"{MIXED[:43]}+ACR{MIXED[:6]}"),
        ("pushed with {}", f"{MIXED[:44]}AzFu{MIXED[:6]}=="),
        ("secret_lambda-cloud_{}", HEX[:32]),
        ("htpasswd admin:{}", f"$apr1$canary12${MIXED[:22]}"),
        ("shadow root:{}:19000:0", f"$6$canary${MIXED[:86]}"),
        ("hash {}", f"$2b$12${MIXED[:53]}"),
        ("-----BEGIN PGP PRIVATE KEY BLOCK-----\n{}\n-----END PGP PRIVATE KEY BLOCK-----", MIXED[:64]),
        ("PuTTY: Private-Lines: 1\n{}\nPrivate-MAC: 0", MIXED[:64]),
        ("Private-Lines: 1\\n{}\\nPrivate-MAC: 0", MIXED[:64]),
        ("Private-Lines: 1\r\n{}", MIXED[:64]),
        ("Private-MAC: {}", HEX[:40]),
        ("post https://open.feishu.cn/open-apis/bot/v2/hook/{}", "01234567-89ab-cdef-0123-456789abcdef"),
        ("channel https://conda.anaconda.org/t/{}/x", MIXED[:20]),
        ("wandb: Appending key for api.wandb.ai to your netrc file: {}", HEX[:40]),
        ("ldap bindpw {}", "canary-7"),
    ],
)
def test_tokens_of_services(text: str, token: str):
    before, after = text.split("{}")
    shown = redact_text(text.format(token))
    # The mark before a token may stay or go.
    assert token not in shown and "<redacted>" in shown and shown.endswith(after) and shown[:5] in (before[:5], "<reda")


@pytest.mark.parametrize(
    "text",
    [
        "keys: policy.megatron_cfg.tensor_model_parallel_size, grpo.max_num_steps=100000000000",
        "linear_fc1 key model.layers.11.mlp.experts.3.linear_fc1.weight of 128x2048",
        "1234567 tokens, 151645 is the token of its end; token_mult_prob_error: 1.0000000000000002",
        f"model.safetensors has sha256 {HEX}",
        "wandb: View run at https://wandb.ai/team/project1/runs/ab12cd34ef56ab78",
        "the password policy-of-2026-11-28; keyboard 20261128",
        f"blobs/{HEX}; {HEX[:32]}.safetensors; snapshots/{HEX[:40]}/config.json",
        "cio_threads_of_the_reader_that_is_slow=3; echo $1$2 for $5; pattern: 32 of 64 tk_tokens",
    ],
)
def test_messages_stay(text: str):
    assert redact_text(text) == text


@pytest.mark.parametrize("library", ["UCX", "GLOO", "MRL", "NCCL", "VLLM", "RAY", "SLURM", "HF_HUB", "LC", "CUDA"])
@pytest.mark.parametrize(
    "word", ["CERT", "PIN", "SALT", "NONCE", "OTP", "PHRASE", "HMAC", "SESSION", "SECRET_ID", "WEBHOOK_PATH", "BLOB"]
)
def test_no_beginning_makes_a_name_public(library: str, word: str):
    assert split_secrets({f"{library}_{word}": "canary"}) == ({}, {f"{library}_{word}": "canary"})


@pytest.mark.parametrize(
    "setting",
    [
        # What the docs of NCCL, CUDA, OpenMP, UCX, vLLM and Transformer Engine tell users to set.
        *("NCCL_IB_HCA=mlx5_0", "NCCL_SOCKET_IFNAME=eth0", "NCCL_IB_GID_INDEX=30", "CUDA_DEVICE_MAX_CONNECTIONS=1"),
        *("OMP_PROC_BIND=close", "UCX_TLS=rc,cuda_copy", "UCX_NET_DEVICES=mlx5_0:1", "VLLM_ATTENTION_BACKEND=FLASH"),
        *("CUBLAS_WORKSPACE_CONFIG=:4096:8", "TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "NVTE_FUSED_ATTN=0", "DATA_DIR=/x"),
        *("RAY_gcs_server_request_timeout_seconds=60", "PYTHONHASHSEED=123456", "SLURM_JOB_ID=1234567"),
    ],
)
def test_settings_stay_readable(setting: str):
    name, _, value = setting.partition("=")
    assert split_secrets({name: value}) == ({name: value}, {})
    assert env.is_hidden(f"policy.generation.vllm_cfg.env_vars.{name}", value) is False
