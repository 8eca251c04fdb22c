"""A registered model: described, opened, bound to the daemon's memory, written, given up; what it commits for torch's optimizers."""
