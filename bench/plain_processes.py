"""The plain FedAvg loop on several processes of one thread each, which share the model's memory and nothing else."""

import atexit
import multiprocessing
from multiprocessing.connection import Connection

import torch
from plain import Client, Descent, FedAvgLoop, Values, clients_of
from torch import Tensor, nn

from ppfl import Federation

PROCESSES = 2


class FedAvgProcesses:
    """One round at each call: every process trains its part of the round's clients and adds up their models."""

    def __init__(self, net: nn.Module, federation: Federation, descent: Descent, participation: float = 1.0) -> None:
        # numbers instead of tensors: these would go through shared memory, of which a container may have little
        clients = [(one.weight, one.x.numpy(), one.y.numpy()) for one in clients_of(federation)]
        self.clients, self.asked = len(clients), max(1, round(participation * len(clients)))
        self.values = {name: p.detach().clone().share_memory_() for name, p in net.named_parameters()}
        self.parts: list[Values] = []
        self.pipes: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        for _ in range(PROCESSES):
            ours, theirs = context.Pipe()
            part = {name: torch.zeros_like(value).share_memory_() for name, value in self.values.items()}
            arguments = theirs, net, clients, descent, self.values, part
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            atexit.register(process.terminate)
            self.parts.append(part)
            self.pipes.append(ours)
        for pipe in self.pipes:
            pipe.recv()

    def __call__(self) -> None:
        chosen = torch.randperm(self.clients)[: self.asked]
        for at, pipe in enumerate(self.pipes):
            pipe.send(chosen[at::PROCESSES].tolist())
        weight = sum(pipe.recv() for pipe in self.pipes)
        for name, value in self.values.items():
            value.copy_(sum(part[name] for part in self.parts) / weight)


def _work(pipe: Connection, net: nn.Module, clients: list, descent: Descent, values: Values, total: Values) -> None:
    torch.set_num_threads(1)
    loop = FedAvgLoop(net, [Client(p, torch.from_numpy(x), torch.from_numpy(y)) for p, x, y in clients], descent)
    loop.values = values
    pipe.send("ready")
    while True:
        try:
            mine = [loop.clients[at] for at in pipe.recv()]
        except EOFError:  # the benchmark has ended
            return
        _write(total, loop.weighted_models(mine))
        pipe.send(sum(client.weight for client in mine))


def _write(onto: Values, models: list[Tensor]) -> None:
    for value, model in zip(onto.values(), models, strict=True):
        value.copy_(model)
