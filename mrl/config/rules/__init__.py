# SPDX-License-Identifier: Apache-2.0
"""Rules that a config must satisfy before anything starts: ranges, and rules between keys."""
