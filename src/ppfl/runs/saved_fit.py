"""A fitted population as one file: safetensors, with a checksum, and JSON in its header. Nothing is pickled.

The header says what the file is; long lists (client ids, history) are JSON too, in tensors of bytes. Tensors:

network.*    the start values of the trained parameters
constants.*  frozen parameters and buffers
server.*     the state of the server: canonical models, and memberships where clients show them
clients.*    the states of the clients, one row per client
ids, clients_ids, history   JSON
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from ..algorithms import METHODS
from ..algorithms.contract import Method, Problem, Roster, Rows
from ..core.adapters import Lora, adapted_layers, with_adapters
from ..core.affinity import nothing
from ..core.client_names import ClientIds
from ..core.errors import CheckpointError, ModelError, PPFLError, SettingError
from ..core.losses import LOSSES, Loss
from ..core.population import Population
from ..core.trees import named_leaves, tree_map
from ..data.sample_kind import SampleKind
from ..server import ServerState
from ..sites import ENGINES
from ..sites.states import ClientStates
from .network_description import UnknownNetworkError, build_network, describe_network
from .storage import damaged, read_metadata, read_tensors, restore, save_tree

FORMAT, VERSION = "ppfl fitted population", 1
_CONSTANTS = "constants."


class SavedFit(NamedTuple):
    """What is kept of a fit."""

    problem: Problem
    method: Method
    state: ServerState
    clients: Rows
    kind: SampleKind
    engine: str  # its name
    history: list[dict[str, Any]]


def save_fit(path: Path, fit: SavedFit) -> None:
    """Write it whole or not at all."""
    problem, population = fit.problem, fit.problem.population
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; give the name of a file, such as {path / 'fitted.safetensors'}")
    if not path.parent.is_dir():
        raise CheckpointError(f"there is no folder {path.parent}; make it first, or choose another place")
    trained, net = population.initial_network(), population.architecture
    constants = {name: p for name, p in net.named_parameters() if name not in trained} | dict(net.named_buffers())
    about = {
        "format": FORMAT,
        "version": VERSION,
        "population": {
            "k": population.k,
            "mix": population.mix.name,
            "canonical": "all" if population.canonical_modules == ("",) else list(population.canonical_modules),
            "loss": describe_loss(population.loss),
            "network": describe_network(net),
            "adapters": _describe_adapters(net),
            "evaluation_mode": [name for name, module in net.named_modules() if not module.training],
        },
        "data": fit.kind.to_json(),
        "method": _describe_method(fit.method),
        "problem": {"rounds": problem.rounds, "seed": problem.seed, "importance": problem.importance},
        "splits": list(problem.splits),
        "state": {"round": fit.state.round, "exchange": fit.state.exchange},
        "engine": fit.engine,
    }
    tensors = {
        "network": trained,
        "constants": constants,
        "server": fit.state.server,
        "clients": fit.clients.values,
        "ids": _bytes_of(problem.roster.ids),
        "clients_ids": _bytes_of(fit.clients.ids),
        "history": _bytes_of(fit.history),
    }
    save_tree(path, tensors, about)


def load_fit(
    path: Path,
    net: nn.Module | None = None,
    loss: Loss | None = None,
    method: Method | type[Method] | None = None,
    device: torch.device | str = "cpu",
) -> SavedFit:
    """What `save_fit` wrote; `net`, `loss` and `method` where the file cannot say what they are."""
    about = _checked_header(path)
    tensors, _ = read_tensors(path, unchecked=_CONSTANTS)
    try:
        found = about["population"]
        parts = {name: under(tensors, name) for name in ("network", "constants", "server", "clients")}
        built = _network(path, found, net, parts)
        chosen = _loss(path, found["loss"], loss)
        kind = SampleKind.from_json(about["data"])
        k, canonical, mix = found["k"], found["canonical"], found["mix"]
        population = Population(built, k=k, canonical=canonical, mix=mix, loss=chosen, inputs=kind.inputs)
        rule = _method(path, about["method"], method)
        ids, client_ids = _json_of(tensors["ids"]), _json_of(tensors["clients_ids"])
        numbers, place = about["problem"], torch.device(device)
        roster = Roster(tuple(ids))
        problem = Problem(
            population, roster, nothing(roster.ids), numbers["rounds"], numbers["seed"], numbers["importance"],
            tuple(about["splits"]), place,
        )  # fmt: skip
        state, clients = restore_states(path, rule, problem, tuple(client_ids), parts["server"], parts["clients"])
        return SavedFit(
            problem, rule, ServerState(about["state"]["round"], about["state"]["exchange"], state), clients,
            kind, about["engine"] if about["engine"] in ENGINES else "stacked",
            _json_of(tensors["history"]),
        )  # fmt: skip
    except PPFLError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, f"cannot be understood ({' '.join(str(error).split())})") from None


def restore_states(
    path: Path,
    method: Method,
    problem: Problem,
    client_ids: ClientIds,
    server: Mapping[str, Tensor],
    clients: Mapping[str, Tensor],
) -> tuple[Any, Rows]:
    """The states of the server and of the clients from their tensors, checked, on the problem's device."""
    expected = method.init_server(problem)
    found = restore(path, server, expected)
    states = ClientStates.in_memory(method.init_clients(problem.population, problem.seed, client_ids), len(client_ids))
    rows = restore(path, clients, states.named("now"))
    moved = {name: leaf.to(problem.device) for name, leaf in named_leaves(rows).items()}
    return tree_map(lambda leaf: leaf.to(problem.device), found), Rows(client_ids, moved)


def save_weights(path: Path, module: nn.Module) -> None:
    """The state dict of a module as safetensors, which other programs read too."""
    save_tree(path, dict(module.state_dict()), {"format": "state dict", "network": describe_network(module)})


def describe_loss(loss: Loss) -> dict[str, Any]:
    """Its name, and its settings where it is one of ours."""
    ours = LOSSES.get(loss.name)
    if ours is None or type(ours) is not type(loss):
        return {"name": loss.name, "settings": None}
    try:
        again = type(loss)(**vars(loss))
        json.dumps(vars(loss))
    except (TypeError, ValueError):
        return {"name": loss.name, "settings": None}
    return {"name": loss.name, "settings": vars(loss) if vars(again) == vars(loss) else None}


def _checked_header(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"there is no {path}; give a file that fitted.save wrote, or the folder of a run")
    about = read_metadata(path)
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no fitted population; give a file that fitted.save wrote, or a run folder")
    if about.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {about.get('version')!r} of the format, this ppfl reads version {VERSION}; "
            f"read it with the ppfl that wrote it"
        )
    return about


# ---------------------------------------------------------------------- the network, the loss and the method


def _network(path: Path, about: dict[str, Any], net: nn.Module | None, parts: dict[str, Any]) -> nn.Module:
    """The network with the saved values, frozen and in evaluation mode where it was."""
    expected = {**parts["network"], **parts["constants"]}
    if net is None:
        if about["network"] is None:
            raise ModelError(
                f"{path} holds a network with code of its own, which a file cannot keep; build the network again and "
                f"pass it: ppfl.load(path, net=net)"
            )
        try:
            with torch.device("meta"):  # without taking memory for what a damaged file may ask for
                _refuse_other_tensors(build_network(about["network"]), expected, path)
            with torch.random.fork_rng(devices=[]):
                net = build_network(about["network"])
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


def _describe_adapters(net: nn.Module) -> dict[str, Any] | None:
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


def _loss(path: Path, about: dict[str, Any], loss: Loss | None) -> Loss:
    name = about["name"]
    if loss is not None:
        if not isinstance(loss, Loss) or loss.name != name:
            raise ModelError(
                f"{path} was fitted with the loss {name!r}, and loss is {getattr(loss, 'name', loss)!r}; "
                f"pass an object of the loss it was fitted with"
            )
        return loss
    if about["settings"] is None or name not in LOSSES:
        raise ModelError(
            f"{path} was fitted with a loss of your own, {name!r}, which a file cannot keep; "
            f"pass it again: ppfl.load(path, loss=...)"
        )
    return type(LOSSES[name])(**about["settings"]) if about["settings"] else LOSSES[name]


def _describe_method(method: Method) -> dict[str, Any]:
    dump = getattr(method, "model_dump", None)
    settings = None if dump is None else dump(mode="json")
    return {"name": method.name, "settings": settings, "own": METHODS.get(method.name) is not type(method)}


def _method(path: Path, about: dict[str, Any], method: Method | type[Method] | None) -> Method:
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
    except (ValidationError, TypeError) as error:
        raise damaged(path, f"has settings that {name!r} does not take ({' '.join(str(error).split())})") from None


# ---------------------------------------------------------------------- JSON in tensors


def _bytes_of(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _json_of(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.numpy()))


def under(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """The tensors of one part, by their names within it."""
    return {name.removeprefix(f"{part}."): leaf for name, leaf in tensors.items() if name.startswith(f"{part}.")}
