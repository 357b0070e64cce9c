# SPDX-License-Identifier: Apache-2.0
"""What a config must satisfy before anything starts: ranges, and rules between keys."""
