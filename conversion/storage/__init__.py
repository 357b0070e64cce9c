"""Files of weights: their formats, read and written by parts, and folders that survive crashes and races."""
