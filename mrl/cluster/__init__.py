# SPDX-License-Identifier: Apache-2.0
"""Ray: placement, actor groups, supervision. The only folder that imports ray."""
