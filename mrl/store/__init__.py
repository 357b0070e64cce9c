"""The run folder: checkpoints, ledger, metrics, loggers, report."""
