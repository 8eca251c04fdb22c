"""Which of torch's own optimizers the library knows well enough to take their steps apart.

Of others, and of a program's classes, nothing is known: they may make state in another way, or couple the parameters of a group.
"""

from __future__ import annotations

from torch.optim import Optimizer

__all__ = ["makes_all_state_first", "steps_each_alone"]

# Modules of the optimizers that update each parameter by its own tensors alone. True: ``_init_group`` makes all the state that
# the step uses, and makes it of the parameter alone, not of the gradient (SGD) or the learning rate (ASGD, Rprop).
# Adagrad is not one of them: with one sparse gradient it updates all parameters of a group in another way.
_ALONE = {
    "torch.optim.adadelta": True,
    "torch.optim.adam": True,  # AdamW's, too
    "torch.optim.adamax": True,
    "torch.optim.asgd": False,
    "torch.optim.nadam": True,
    "torch.optim.radam": True,
    "torch.optim.rmsprop": True,
    "torch.optim.rprop": False,
    "torch.optim.sgd": False,
}


def _module_of(optimizer: Optimizer, method: str) -> str:
    """Names the module that defines the method of the optimizer's class; a callable object in its place may have none."""
    return getattr(getattr(type(optimizer), method, None), "__module__", None) or ""


def steps_each_alone(optimizer: Optimizer) -> bool:
    """Whether its ``step`` is torch's and reads for no parameter what belongs to another."""
    return _module_of(optimizer, "step") in _ALONE


def makes_all_state_first(optimizer: Optimizer) -> bool:
    """Whether torch's ``_init_group`` makes all the state of a parameter, whatever the gradient and the group's options."""
    if "_init_group" in vars(optimizer):
        return False
    module = _module_of(optimizer, "step")
    return _ALONE.get(module, False) and _module_of(optimizer, "_init_group") == module
