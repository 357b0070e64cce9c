# SPDX-License-Identifier: Apache-2.0
"""Tests of the policy on real ranks. Modules of this folder import Megatron at their top."""

from mrl.policy.megatron_import import import_megatron

import_megatron()
