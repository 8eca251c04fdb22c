"""What ranks do in the tests of torch.compile. Each function runs on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import Case, build, loss_of, shard, train_alone
from raised import text_of


class _Graphs:
    """A backend that counts graphs and what goes into them, and hands on to another."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.parameters: list[int] = []
        self.constants: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        self.parameters.append(sum(isinstance(value, nn.Parameter) for value in inputs))
        self.constants.append(len(dict(graph.named_parameters())) + sum(n.op == "get_attr" for n in graph.graph.nodes))
        return lookup_backend(self.backend)(graph, inputs)


def compiled(case: Case, whole: bool, backend: str) -> dict[str, Any]:
    """Trains compiled; what dynamo made of it: graphs, breaks, compilations after the first step."""
    import torch._inductor.config
    from torch._dynamo.utils import counters as dynamo_counters

    from shardd.torch import counters, fully_shard
    from shardd.torch.optim import AdamW

    if (
        backend == "inductor" and dist.get_rank() > 0
    ):  # its pool of compilers imports torch in each: that of rank 0 will do
        torch._inductor.config.compile_threads = 1
    torch._dynamo.reset()
    dynamo_counters.clear()
    model = build(case)
    shard(model, case, fully_shard)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    graphs = _Graphs(backend)
    run: Any = model
    if whole:
        run = torch.compile(model, backend=graphs)
    else:
        for layer in model.layers:
            layer.compile(backend=graphs)
    losses, compilations = [], []
    for step in range(case.steps):
        loss = loss_of(run, step, 0, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        compilations.append(len(graphs.parameters))
    return {
        "losses": losses,
        "compilations": compilations,
        "parameters": graphs.parameters,
        "constants": graphs.constants,
        "breaks": dict(dynamo_counters["graph_break"]),
        "counters": counters(model),
        "alone": train_alone(case, dist.get_world_size())["losses"][dist.get_rank()],
    }


def refusals() -> dict[str, Any]:
    import torch._inductor.config as inductor

    from shardd.torch import counters, fully_shard
    from shardd.torch.optim import SGD

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4)
    texts: dict[str, Any] = {}

    def attempt(name: str, call: Any) -> None:
        texts[name] = text_of(call)

    def compiled_autograd() -> None:
        from torch._dynamo import compiled_autograd

        with compiled_autograd._enable(torch.compile(backend="eager")):
            model(x).sum().backward()

    def frozen(module: nn.Module) -> None:
        torch._dynamo.reset()
        with torch.no_grad(), inductor.patch(freezing=True):
            torch.compile(module)(x)

    attempt("autograd", compiled_autograd)
    attempt("freezing", lambda: frozen(model))
    attempt("unsharded", lambda: frozen(nn.Linear(4, 4)))
    torch._dynamo.reset()
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    texts["after"] = counters(model)["commits"]
    return texts
