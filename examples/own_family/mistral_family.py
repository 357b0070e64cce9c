# SPDX-License-Identifier: Apache-2.0
"""Mistral (v0.2 and later, without a sliding window): what it shares with other decoders, and nothing else."""

from conversion.families.decoder import COMMON_SUPPORTED, Decoder, decoder_family
from conversion.families.settings import HfConfig, check_settings


def mistral(hf_config: HfConfig) -> Decoder:
    check_settings(hf_config, COMMON_SUPPORTED)
    return Decoder.of(hf_config)


FAMILY = decoder_family(mistral)
