# SPDX-License-Identifier: Apache-2.0
"""Keys of NeMo Gym's own config below `env.nemo_gym`, which its servers take, and the run that starts them hands on."""

from __future__ import annotations

from dataclasses import fields

from mrl.config.files import Key
from mrl.config.schema.env import NemoGymConfig

SECTION: Key = ("env", "nemo_gym")
SERVERS: Key = (*SECTION, "servers")
"""The section for what is handed on."""
JUDGES = "should_use_judge"
"""Name of the option that sends rows of a server to that server."""

GLOBAL = frozenset(
    "default_host disallowed_ports global_aiohttp_client_request_debug global_aiohttp_connector_limit "
    "global_aiohttp_connector_limit_per_host head_server_deps hf_token model_call_capture_dir model_endpoint_readiness_timeout_seconds "
    "nemo_gym_log_dir observability_enabled pip_install_verbose policy_max_input_tokens port_range_high port_range_low profiling_enabled "
    "profiling_results_dirpath python_version ray_head_node_address skip_venv_if_present use_absolute_ip uv_cache_dir uv_pip_set_python "
    "uv_venv_dir uvicorn_logging_show_200_ok verbose".split()
)
"""Keys of NeMo Gym (nemo_gym/global_config.py, server_utils.py) that are no servers."""
ENDPOINT = ("_base_url", "_api_key", "_model_name")
"""Endings of names by which NeMo Gym's config files ask for the address of a judge."""
KINDS = ("resources_servers", "responses_api_agents", "responses_api_models")
COPIES = ("_copy", "_delete_key", "_inherit_from")
"""Keys with which a server takes over another one's options."""

_OWN = {field.name for field in fields(NemoGymConfig)}


def is_gyms(key: Key, value: object) -> bool:
    """Tells whether NeMo Gym's servers take this key: one of their global names, or of a server's section."""
    if key[:2] != SECTION or len(key) == 2 or key[2] in _OWN:
        return False
    name, *rest = key[2:]
    if name in GLOBAL or value in (None, {}):
        return True
    return rest[0] in (*KINDS, *COPIES) if rest else name.endswith(ENDPOINT)
