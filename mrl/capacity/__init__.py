"""What is resident where, in every phase. Pure."""
