# SPDX-License-Identifier: Apache-2.0
"""Parts of the training loop."""
