# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.doctor`: checks hosts, the nodes of a cluster, the inputs of a run, and the refit between trainer and engines."""
