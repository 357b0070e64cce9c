# SPDX-License-Identifier: Apache-2.0
"""One dataclass per YAML section; loading, checks."""
