"""Fully sharded data parallel training as a service: the trainer's side.

``shardd.torch`` shards PyTorch modules. Errors of the daemon and of the library are subclasses of ``shardd.Error``.
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from shardd.errors import Error, StepAborted, Unavailable

__all__ = ["Error", "StepAborted", "Unavailable", "__version__"]
__version__ = "0.1.0"


def _check_torch() -> None:
    """The extension fits the torch it was built with: with another its import would end in missing symbols, or worse."""
    try:
        want = (Path(__file__).parent / "_built_for.txt").read_text().strip()
        got = "none" if find_spec("torch") is None else version("torch")
    except (FileNotFoundError, PackageNotFoundError):
        return  # not built yet, or a torch that is not installed: it is the user's to know
    if got.partition("+")[0] != want:
        raise ImportError(
            f"import shardd: wrong torch (got {got}, want {want}); install shardd again, for the torch "
            f"that is here, or `pip install torch=={want}`, which is the CUDA build (that for CPUs: --index-url "
            "https://download.pytorch.org/whl/cpu)"
        )


_check_torch()
