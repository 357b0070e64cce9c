# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.doctor`: checks hosts, cluster nodes, a run's inputs, and the refit between trainer and engines."""
