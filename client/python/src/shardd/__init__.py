"""Fully sharded data parallel training as a service: the trainer's side.

``shardd.torch`` shards PyTorch modules. Errors of the daemon and of the library are subclasses of ``shardd.Error``.
"""

from shardd.errors import Error, StepAborted, Unavailable

__all__ = ["Error", "StepAborted", "Unavailable", "__version__"]
__version__ = "0.1.0"
