"""Fully sharded data parallel training as a service: the trainer's side.

``shardd.torch`` shards PyTorch modules. Errors of the daemon and of the library are subclasses of ``shardd.Error``.
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from shardd.errors import Error, StepAborted, Unavailable

__all__ = ["Error", "StepAborted", "Unavailable", "__version__"]
__version__ = "0.1.0"


def _check_torch() -> None:
    """The extension fits one torch only: with another its import would end in missing symbols, or worse."""
    want = "2.13.0"
    try:
        got = "none" if find_spec("torch") is None else version("torch")
    except PackageNotFoundError:
        return  # built from source, not installed: it is the user's to know
    if got.partition("+")[0] != want:
        raise ImportError(
            f"import shardd: wrong torch (got {got}, want {want}); pip install torch=={want}, which is the CUDA build, or that "
            "for CPUs with --index-url https://download.pytorch.org/whl/cpu"
        )


_check_torch()
