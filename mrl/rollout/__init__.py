# SPDX-License-Identifier: Apache-2.0
"""vLLM engines. The only folder that imports vllm."""
