"""The daemon's optimizers and torch's."""
