"""The daemon's optimizers: the step, and state that is shown, saved and loaded."""
