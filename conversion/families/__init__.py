"""One file per Hugging Face model_type: names, sizes, layouts, Megatron arguments."""
