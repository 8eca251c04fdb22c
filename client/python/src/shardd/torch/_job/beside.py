"""Jobs beside one another: of a model that is tensor parallel, one for each index along the other mesh.

Each has the local tensors of its ranks and commits by itself. Ranks of one step compute together, so the jobs' committed steps
differ by at most one; a job cannot go back, so where they differ after a restart the model cannot be resumed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardd.torch._job.job import TorchJob
from shardd.torch._ranks.gather import sendable

__all__ = ["differing_steps"]


def differing_steps(job: TorchJob) -> str:
    """Returns why the model cannot be resumed: the jobs beside this one have committed another step; else nothing.

    Collective over the ranks of the other mesh; without a message where there is none.
    """
    mesh: Any = job.mesh_beside
    if mesh is None or job.engine is None:
        return ""
    info = job.engine.info()
    step = info["committed_step"] if info["version"] > 0 else -1
    found = torch.tensor([step, -step])
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        sent = sendable(found, group)
        dist.all_reduce(sent, dist.ReduceOp.MIN, group=group)
        found = sent.cpu()
    least, most = int(found[0]), -int(found[1])
    if least == most:
        return ""
    return (
        f'register model: job "{job.name}" and those of the other tensor parallel ranks have committed different steps (got '
        f"{least} to {most}, this one {step}), and none can go back. A program that loads a checkpoint of its own then says "
        "so with shardd.torch.resume(model, start_over=True)"
    )
