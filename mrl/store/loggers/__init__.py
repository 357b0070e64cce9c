# SPDX-License-Identifier: Apache-2.0
"""Services that metrics go to besides the run folder, each in a thread of its own, which the run never waits for."""
