"""Groups whose members share partitions: the state machine, its records, and the coordinator."""
