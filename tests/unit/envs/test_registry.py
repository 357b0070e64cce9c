from dataclasses import fields

from mrl.config.schema_data import EnvConfig, MathEnvConfig
from mrl.envs.registry import build_environments


def test_every_environment_of_the_config_is_built():
    environments = build_environments(EnvConfig(math=MathEnvConfig(num_workers=1, timeout_s=3.0)))
    try:
        assert list(environments) == [field.name for field in fields(EnvConfig)]
        assert environments["math"].timeout_s == 3.0
        assert environments["math"].score([("046", "46")])[0].reward == 1.0
    finally:
        for environment in environments.values():
            environment.close()
