# SPDX-License-Identifier: Apache-2.0
"""Families of models, by Hugging Face model_type: names, sizes, layouts, Megatron arguments."""
