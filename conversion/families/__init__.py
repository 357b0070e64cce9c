"""Families of models, by Hugging Face model_type: names, sizes, layouts, Megatron arguments."""
