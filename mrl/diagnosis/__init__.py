"""What `mrl.doctor` looks at: hosts, the nodes of a cluster, the inputs of a run, and the refit between trainer and engines."""
