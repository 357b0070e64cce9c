"""Services that metrics go to besides the run folder. Each runs in a process of its own, which the run never waits for."""
