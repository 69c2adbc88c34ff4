"""A fitted population as one file (`io.codec`), and the one that a finished run returned. Nothing is pickled.

A file holds:

about      what describes the population, its network, the method and the samples
network    the start values of the trained parameters
constants  frozen parameters and buffers, which may be infinite
state      of the server: canonical models, and memberships where clients show them
clients    the states of those that took part
ids, known_ids, history

What is not one of ours, such as a network with code of its own, cannot be kept in a file: the user passes it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from ..algorithms import METHODS
from ..algorithms.contract import Method, Problem, Roster, Rows
from ..core.adapters import Lora, adapted_layers, with_adapters
from ..core.affinity import nothing
from ..core.ids import ClientIds
from ..core.losses import LOSSES, Loss
from ..core.population import Population
from ..core.registry import Imports
from ..core.trees import tree_map
from ..data.sample_spec import SampleSpec
from ..errors import CheckpointError, ModelError, PPFLError, SettingError
from ..io.codec import dump, load
from ..io.files import atomic_write, damaged
from ..networks.description import UnknownNetworkError, describe_network, network_from
from ..server import ServerState, Trained
from ..sites import ENGINES, SavedStates, Stacked, engine_by_name
from .experiment import Experiment
from .folder import RunFolder
from .record import find_runs
from .states import check_values, pack_clients, pack_server, unpack_clients, unpack_server

KIND = "fitted population"


def save_fit(path: Path, fit: Trained) -> None:
    """Write a fit to a file; if writing fails, there is no half-written file."""
    problem, population = fit.problem, fit.problem.population
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; give the name of a file, such as {path / 'fitted.safetensors'}")
    if not path.parent.is_dir():
        raise CheckpointError(f"there is no folder {path.parent}; make it first, or choose another place")
    trained, net = population.initial_network(), population.architecture
    constants = {name: p for name, p in net.named_parameters() if name not in trained} | dict(net.named_buffers())
    about = {
        "population": {
            "k": population.k,
            "mix": population.mix.name,
            "canonical": "all" if population.canonical_modules == ("",) else list(population.canonical_modules),
            "loss": population.loss.name,
            "own_loss": type(LOSSES.get(population.loss.name)) is not type(population.loss),
            "network": describe_network(net),
            "adapters": describe_adapters(net),
            "evaluation_mode": [name for name, module in net.named_modules() if not module.training],
        },
        "data": fit.spec.model_dump(mode="json"),
        "method": {
            "name": fit.method.name,
            "settings": fit.method.model_dump(mode="json"),
            "own": METHODS.get(fit.method.name) is not type(fit.method),
        },
        "problem": {"rounds": problem.rounds, "seed": problem.seed, "importance": problem.importance},
        "splits": list(problem.splits),
        "engine": getattr(fit.engine, "name", Stacked.name),
    }
    content = {
        "about": about,
        "network": trained,
        "constants": constants,
        "state": pack_server(fit.state),
        "clients": pack_clients(fit.clients, len(fit.ids)) if fit.clients.rows.ids == fit.ids else fit.clients,
        "ids": problem.roster.ids,
        "known_ids": fit.ids,
        "history": fit.history,
    }
    with atomic_write(path) as file:
        dump(content, file, KIND)


def load_fit(
    path: Path,
    net: nn.Module | None = None,
    loss: Loss | None = None,
    method: Method | type[Method] | None = None,
    device: torch.device | str = "cpu",
) -> Trained:
    """What `save_fit` wrote. `net`, `loss` and `method` are needed where they are the user's own code."""
    if not path.is_file():
        raise CheckpointError(f"there is no {path}; give a file that fitted.save wrote, or the folder of a run")
    _refuse_weights(path)
    parts = load(path, KIND)
    try:
        about, found = parts["about"], parts["about"]["population"]
        check_values(path, parts["network"])
        built = restore_network(path, found, net, parts)
        chosen = restore_loss(path, found["loss"], loss, is_own=found["own_loss"])
        spec = SampleSpec.model_validate(about["data"])
        k, canonical, mix = found["k"], found["canonical"], found["mix"]
        population = Population(built, k=k, canonical=canonical, mix=mix, loss=chosen)
        rule = restore_method(path, about["method"], method)
        numbers, place = about["problem"], torch.device(device)
        roster = Roster(parts["ids"])
        problem = Problem(
            population, roster, nothing(roster.ids), numbers["rounds"], numbers["seed"], numbers["importance"],
            tuple(about["splits"]), place,
        )  # fmt: skip
        state, clients = restore_states(path, rule, problem, parts["known_ids"], parts["state"], parts["clients"])
        return Trained(
            problem, rule, state, parts["known_ids"], clients, spec,
            engine_by_name(about["engine"] if about["engine"] in ENGINES else Stacked.name), parts["history"],
        )  # fmt: skip
    except PPFLError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, f"cannot be understood ({' '.join(str(error).split())})") from None


def _refuse_weights(path: Path) -> None:
    """Refuse files of torch.save by what they are, which is no damage."""
    with path.open("rb") as file:
        start = file.read(9)
    if start.startswith((b"PK", b"\x80")) and not start.endswith(b"{"):  # zip, pickle; ours has JSON after 8 bytes
        raise CheckpointError(
            f"{path} is of torch.save or a pickle, and ppfl.load reads what fitted.save wrote; weights go into a "
            f"network with net.load_state_dict(torch.load(...)), and then Population(net, ...) begins with them"
        )
    if start[8:] != b"{":
        raise CheckpointError(f"{path} is not in the format safetensors; give a file that fitted.save wrote")


def restore_states(
    path: Path, method: Method, problem: Problem, ids: ClientIds, state: ServerState, clients: SavedStates
) -> tuple[ServerState, SavedStates]:
    """The states of the server and of clients among `ids` as a file has them, checked, on the problem's device."""
    state = unpack_server(path, state, method.init_server(problem))
    clients = unpack_clients(path, clients, method.init_client(problem.population), ids)
    server, values = tree_map(lambda leaf: leaf.to(problem.device), (state.server, clients.rows.values))
    return state._replace(server=server), clients._replace(rows=Rows(clients.rows.ids, values))


def load_finished_run(path: Path, device: torch.device, base: Path | None = None) -> Trained:
    """The run in this folder, or the only one in a folder of runs. Own modules are looked for in `base` first."""
    runs = find_runs(path)
    if len(runs) > 1:
        raise CheckpointError(f"{path} has {len(runs)} runs; give the folder of one of them, such as {runs[0]}")
    folder = RunFolder(runs[0])
    if not folder.finished:
        raise CheckpointError(f"the run in {folder.path} is not finished; finish it with ppfl run ... --resume")
    saved = folder.read()
    clients, result = saved.clients, saved.result
    assert result is not None, "the run is finished"
    try:
        experiment = Experiment.model_validate(saved.experiment, context=Imports(base))
        ids = tuple(clients["ids"])
        spec = SampleSpec.model_validate(clients["spec"])
        (seed,), samples = experiment.seeds, clients["samples"]
        population = experiment.build_population(spec, seed, base)
        if (start := folder.read_start()) is not None:
            population.start_from(start.values)
        problem = Problem(
            population, Roster(ids), nothing(ids), experiment.rounds, seed, float(sum(samples["train"])),
            tuple(sorted(samples)), device,
        )  # fmt: skip
        method = experiment.method
        state, states = restore_states(folder.result_file, method, problem, ids, result.state, result.clients)
    except (KeyError, TypeError, ValidationError) as error:
        raise damaged(folder.path, f"cannot be understood ({' '.join(str(error).split())})") from None
    state = state._replace(exchange=0)
    return Trained(problem, method, state, ids, states, spec, experiment.build_engine(), saved.metrics)


# ---------------------------------------------------------------------- network, loss and method


def restore_network(path: Path, about: dict[str, Any], net: nn.Module | None, parts: dict[str, Any]) -> nn.Module:
    """The network with the saved values. Layers are frozen, and in evaluation mode, as they were when it was saved."""
    expected = {**parts["network"], **parts["constants"]}
    if net is None:
        if about["network"] is None:
            raise ModelError(
                f"{path} holds a network with code of its own, which a file cannot keep; build the network again and "
                f"pass it: ppfl.load(path, net=net)"
            )
        try:
            # a damaged file may describe a huge network: "meta" checks its shapes without memory for its values
            with torch.device("meta"):
                _refuse_other_tensors(network_from(about["network"]), expected, path)
            with torch.random.fork_rng(devices=[]):
                net = network_from(about["network"])
        except UnknownNetworkError as error:
            raise damaged(path, f"describes a network that cannot be built: {error}") from None
    else:
        if about.get("adapters") and not adapted_layers(net):
            net = with_adapters(net, Lora(**about["adapters"]))
        _refuse_other_tensors(net, expected, path)
    with torch.no_grad():
        for name, tensor in (*net.named_parameters(), *net.named_buffers()):
            tensor.data = expected[name].to(tensor.device)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in parts["network"])
    in_evaluation = set(about["evaluation_mode"])
    for name, module in net.named_modules():
        module.training = name not in in_evaluation
    return net


def describe_adapters(net: nn.Module) -> dict[str, Any] | None:
    """The settings that give a network of the user's own the same adapters."""
    layers = adapted_layers(net)
    sizes = [{"rank": layer.rank, "alpha": layer.alpha} for layer in layers.values()]
    return {**sizes[0], "on": list(layers)} if layers else None


def _refuse_other_tensors(net: nn.Module, expected: Mapping[str, Tensor], path: Path) -> None:
    found = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    if odd := sorted(found.keys() ^ expected.keys()):
        who, other = ("the network", "the file") if odd[0] in found else ("the file", "the network")
        raise ModelError(
            f"the network does not fit {path}: {who} has {odd[0]!r}, {other} has not; build the network as it was"
        )
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise ModelError(
                f"the network does not fit {path}: {name!r} has shape {tuple(tensor.shape)}, in the file "
                f"{tuple(expected[name].shape)}; build the network as it was"
            )


def restore_loss(path: Path, name: str, loss: Loss | None, *, is_own: bool) -> Loss:
    """The loss of that name; one that is passed must have it."""
    if loss is not None:
        if not isinstance(loss, Loss) or loss.name != name:
            raise ModelError(
                f"{path} was fitted with the loss {name!r}, and loss is {getattr(loss, 'name', loss)!r}; "
                f"pass an object of the loss it was fitted with"
            )
        return loss
    if is_own or name not in LOSSES:
        raise ModelError(
            f"{path} was fitted with a loss of your own, {name!r}, which a file cannot keep; "
            f"pass it again: ppfl.load(path, loss=...)"
        )
    return LOSSES[name]


def restore_method(path: Path, about: dict[str, Any], method: Method | type[Method] | None) -> Method:
    """The method that was described; one that is passed, or its class, must have the same name."""
    name = about["name"]
    if method is None:
        if about["own"] or name not in METHODS:
            raise SettingError(
                f"{path} was fitted by a method of your own, {name!r}, which a file cannot keep; "
                f"pass its class: ppfl.load(path, method=...)"
            )
        method = METHODS[name]
    elif method.name != name:
        raise SettingError(f"{path} was fitted by {name!r}, and method is {method.name!r}; pass the class it was")
    if not isinstance(method, type):
        return method
    try:
        return method(**about["settings"])
    except (SettingError, TypeError) as error:
        raise damaged(path, f"has settings that {name!r} does not take ({' '.join(str(error).split())})") from None
