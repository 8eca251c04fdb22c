"""What jobs of some shapes do not do: each is refused by name, with what serves instead."""

from __future__ import annotations

from typing import Any

from shardd.torch._ranks.nodes import JobRanks

__all__ = ["Refusals"]


class Refusals:
    """The part of a job that says so. Immutable once the job is registered."""

    name: str
    ranks: JobRanks
    mesh_beside: Any
    several_meshes: bool
    _inner: str | None  # the name of a parameter that gathers itself

    def refuse_on_nodes(self, what: str, instead: str) -> None:
        """Raises NotImplementedError where the job spans several nodes."""
        if self.ranks.several:
            raise NotImplementedError(
                f'{what}: job "{self.name}" spans {len(self.ranks.addresses)} nodes, where it is not served; {instead}'
            )

    def refuse_tensor_parallel(self, what: str, instead: str) -> None:
        """Raises NotImplementedError where other jobs have the rest of the parameters."""
        if self.mesh_beside is not None:
            raise NotImplementedError(
                f'{what}: job "{self.name}" has the local tensors of one tensor parallel rank, and other jobs have those of '
                f"the others; {instead}"
            )

    def refuse_subclasses(self, what: str, instead: str) -> None:
        """Raises NotImplementedError where some parameter is a tensor subclass that says itself how it is gathered."""
        if self._inner is not None:
            raise NotImplementedError(
                f'{what}: parameter "{self._inner}" is a tensor subclass with fsdp_pre_all_gather, with which it is not '
                f"served; {instead}"
            )

    def refuse_several_meshes(self, what: str, instead: str) -> None:
        """Raises NotImplementedError where some parameters are other ones on other ranks."""
        if self.several_meshes:
            raise NotImplementedError(
                f'{what}: some parameters of job "{self.name}" are on a smaller mesh than the model, and other ranks have other '
                f"ones under their names; {instead}"
            )

    def refuse_where_cut(self, what: str, instead: str) -> None:
        """Raises NotImplementedError where no node has whole parameters."""
        if self.ranks.cut:
            raise NotImplementedError(
                f'{what}: the parameters of job "{self.name}" are cut over {len(self.ranks.addresses)} nodes, where it is not '
                f"served; {instead}"
            )
