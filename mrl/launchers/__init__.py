"""What launchers of clusters are given, as text. Pure."""
