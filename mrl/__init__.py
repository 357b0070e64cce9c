"""GRPO post-training of mixture-of-experts language models on Megatron-Core, vLLM and Ray."""
