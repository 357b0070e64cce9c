# SPDX-License-Identifier: Apache-2.0
"""The sections of a config: every key, its type, default and meaning."""
