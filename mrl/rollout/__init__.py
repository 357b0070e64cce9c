"""vLLM engines. The only folder that imports vllm."""
