"""Methods in which clients have models of their own, or a part of one, from their papers' pseudocode."""

import copy

from kit.twins.one_model import descend_near, federated
from kit.twins.plain import Given, Outcome, average, train_network, vector, with_values


def ditto(given):
    """Who never took part predicts with the shared model."""
    own = {}

    def train_client(mine, w, i, t):
        v = own.get(i, copy.deepcopy(w))
        own[i] = descend_near(v, w, given.batches(i, t), given.lr(t), given.method)
        return given.train(mine, i, t)

    shared = federated(given, train_client).networks
    return Outcome([own.get(i, shared[i]) for i in given.clients])


def pfedme(given):
    """The same. The schedule of lr is that of both kinds of steps."""
    own, settings = {}, given.method

    def train_client(mine, w, i, t):
        theta, outer_lr = own.setdefault(i, copy.deepcopy(w)), settings.outer_lr * given.lr(t) / settings.lr
        for batch in given.batches(i, t):
            descend_near(theta, mine, [batch] * settings.inner_steps, given.lr(t), settings)
            with_values(mine, vector(mine) - outer_lr * settings.mu * (vector(mine) - vector(theta)))
        return mine

    def server_step(w, mean):
        return with_values(mean, (1 - settings.beta) * vector(w) + settings.beta * vector(mean))

    shared = federated(given, train_client, server_step).networks
    return Outcome([own.get(i, shared[i]) for i in given.clients])


def finetune(given, twin_of_inner):
    """The inner method but for the last round, then SGD of every client on its own network, or on a part of it."""
    settings, last = given.method, len(given.rounds) - 1
    inner = Given(given.federation, given.problem._replace(rounds=last), settings.method)
    lr = inner.lr(0) if settings.lr == "auto" else settings.lr
    epochs = settings.epochs or (1 if settings.steps is None else None)
    training = settings.method.model_copy(update={"local_steps": settings.steps, "local_epochs": epochs})
    networks, memberships = twin_of_inner(inner)
    if memberships is not None:
        networks = [average(networks, c) for c in memberships]
    networks = [copy.deepcopy(network) for network in networks]  # some may be the same object
    for i, mine in enumerate(networks):
        part = [p for name, p in mine.named_parameters() if settings.part in (None, name)]
        train_network(mine, given.federation, i, training, given.seed, last, lr, part)
    return Outcome(networks)


def partly_shared(given, train_client):
    """Pillutla et al. (2022): the server sends u, gets u_i, takes the weighted mean; v[i] stays with client i."""
    start = {name: p.detach() for name, p in given.net.named_parameters()}
    personal = given.method.personal_parameters(given.net)
    u = {name: value for name, value in start.items() if name not in personal}
    v = [{name: start[name] for name in personal} for _ in given.clients]

    def network(i):
        model = given.net
        model.load_state_dict({**u, **v[i]})
        return model

    for t in given.rounds:
        who, ends = given.taking_part(t), {}
        for i in who:
            model = network(i)
            parameters = dict(model.named_parameters())
            train_client(model, i, t, [parameters[name] for name in v[i]], [parameters[name] for name in u])
            ends[i] = {name: p.detach() for name, p in parameters.items()}
            v[i] = {name: ends[i][name] for name in personal}
        u = {name: sum(given.p[i] * ends[i][name] for i in who) / given.p[who].sum() for name in u}
    return Outcome([network(i) for i in given.clients])


def fedsim(given):
    """Both parts at once. FedPer and LG-FedAvg are this with a given part."""
    return partly_shared(given, lambda model, i, t, own, shared: given.train(model, i, t))


def fedalt(given):
    """The personal part first, with batches of its own, then the shared part. FedRep is this with a given part."""
    method = given.method
    epochs = getattr(method, "head_epochs", None) or getattr(method, "personal_epochs", None)
    steps = getattr(method, "personal_steps", None)
    if epochs is None and steps is None:
        epochs, steps = method.local_epochs, method.local_steps
    first = method.model_copy(update={"local_epochs": epochs, "local_steps": steps})

    def train_client(model, i, t, own, shared):
        for settings, part, purpose in ((first, own, "personal"), (method, shared, "theta")):
            if part:
                train_network(model, given.federation, i, settings, given.seed, t, given.lr(t), part, purpose)

    return partly_shared(given, train_client)
