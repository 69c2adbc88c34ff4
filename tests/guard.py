"""What users see before and after a change of the code: predictions, memberships, scores, coefficients, bytes.

    make guard-before              # numbers of the last commit; REF=<commit> for those of another one
    make guard                     # numbers of the code as it is, compared with them

Every case of guard.toml ends in one of three words: `same bits`, `rounding` (1e-12 in double, 1e-6 in single precision,
relative to the largest number), or `differs`, with the place and by how much. What is meant to change stands in
guard_allowed.toml with its reason. Bits are those of one machine and one build of torch: make both on the same one.

The cases go in by experiment files, `ppfl.fit`, the estimators and the command line, and read public results alone.
"""

import argparse
import fnmatch
import logging
import os
import subprocess
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from torch import nn

import ppfl
from kit.networks import with_seed
from kit.sites import SUMS_ALONE, Sites
from kit.tables import make_choice_table, make_client_table
from ppfl import glm
from ppfl.algorithms import METHODS
from ppfl.data import build
from ppfl.runs import load_experiment, load_run, run
from ppfl.sites import Loop, Stacked

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "experiments"), str(HERE.parent / "bench")]  # readers and lazy data
INPUTS = tomllib.loads((HERE / "guard.toml").read_text())
ALLOWED = HERE / "guard_allowed.toml"
NUMBERS = HERE.parent / ".guard"  # not committed
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
ENGINES = {"loop": Loop(), "stacked": Stacked(), "chunks": Stacked(2), "threads": Stacked(2, threads=2)}
DATA = Path(os.environ.get("PPFL_DATA", HERE.parents[1] / "shared" / "data"))
Numbers = dict[str, Any]  # arrays by what they are


# ---------------------------------------------------------------------- what is run


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], Numbers]]]:
    """Every case by name. Files go into `folder`."""
    write_inputs(folder)
    for name in INPUTS["methods"]:
        for engine in ENGINES:
            yield f"fit/{name}/{engine}", partial(of_fit, name, engine)
        yield f"run/{name}", partial(of_run, folder, f"run-{name}", name, {})
        yield f"sites/{name}", partial(of_sites, folder, name)
    for name in ("ppfl-outputs", "ppfl-weights", "ditto-some", "fedem"):
        yield f"newcomers/{name}", partial(of_newcomers, name)
        yield f"export/{name}", partial(of_export, folder, name)
    for name in ("fedavg-some", "ppfl-weights", "ppfl-private"):  # a start of torchrun takes seconds, so a few
        yield f"ranks/{name}", partial(of_ranks, folder, name)
    for name in ("fedavg", "ppfl-private", "scaffold"):
        yield f"secure/{name}", partial(of_sites, folder, name, secure=True)
    for kind, table in {"engine": "engines", "runs": "runs", "networks": "networks"}.items():
        for name, settings in INPUTS[table].items():
            yield f"{kind}/{name}", partial(of_run, folder, f"{kind}-{name}", "ppfl-weights", settings)
    for name, settings in INPUTS["data"].items():
        yield f"data/{name}", partial(of_data, settings)
    for name, settings in INPUTS["tables"].items():
        yield f"glm/{name}", partial(of_table, settings)
    for name, settings in INPUTS["references"].items():
        yield f"reference/{name}", partial(of_reference, settings)
    yield "command/glm", partial(of_glm_command, folder)


def write_inputs(folder: Path) -> None:
    """The files that experiments of guard.toml name."""
    random = np.random.default_rng(0)
    client = np.repeat(np.arange(5), 12)
    tokens = random.integers(1, 9, (60, 7))
    np.savez(folder / "tokens.npz", x=tokens[:, :-1], y=tokens[:, 1:], client=client)
    pixels = np.arange(20 * 3 * 16 * 16).reshape(20, 3, 16, 16) % 251
    np.savez(folder / "images.npz", x=pixels.astype(np.uint8), y=np.arange(20) % 3, client=np.arange(20) // 5)
    colours, numbers = random.choice(["red", "blue", "green"], 60), random.normal(size=(60, 2)).round(3)
    rows = [f"c{c},{'' if at % 7 == 3 else a},{b},{h},{int(a > b)}" for at, (c, (a, b), h) in
            enumerate(zip(client, numbers, colours, strict=True))]  # fmt: skip
    (folder / "table.csv").write_text("\n".join(["client,x,z,colour,y", *rows]) + "\n")


def experiment(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The experiment file of a method, as a dictionary."""
    method = {"lr": 0.3, "batch_size": 4} | INPUTS["methods"][name]
    if method["name"] == "finetune":
        del method["lr"], method["batch_size"]  # the inner method has them
    population = {"k": method.pop("k", 1), "mix": method.pop("mix", "outputs")}
    shares = method.get("share_memberships", True)
    base = INPUTS["experiment"] | ({} if shares else {"affinity": {"name": "none"}})
    return {"name": name, **base, "population": population, INPUTS["keys"]["method"]: method} | changes


@cache
def fitted(name: str, engine: str = "stacked") -> tuple[ppfl.Fitted, ppfl.Federation]:
    """A fit to all clients but the last two, and those two."""
    asked = experiment(name, {})
    method = dict(asked[INPUTS["keys"]["method"]])
    data = dict(asked["data"])
    federation = build(data.pop("name"), **data)
    known, new = federation.select(federation.ids[:-2]), federation.select(federation.ids[-2:])
    net = with_seed(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), dtype=torch.float32)
    likeness = ppfl.affinity.from_labels(known.label_counts(), known.ids) if method.get("penalty") else None
    found = ppfl.fit(
        ppfl.Population(net, **asked["population"]), known, METHODS[method.pop("name")](**method),
        rounds=asked["rounds"], affinity=likeness, engine=ENGINES[engine],
    )  # fmt: skip
    return found, new


# ---------------------------------------------------------------------- what is read


def of_history(history: list[dict[str, Any]]) -> Numbers:
    """All numbers that are reported of rounds, but no seconds."""
    keys = {key for record in history for key, value in record.items() if isinstance(value, int | float)}
    kept = [key for key in keys if not key.startswith("seconds")]
    return {key: np.array([record.get(key) or 0.0 for record in history]) for key in kept}


def of_clients(fitted: ppfl.Fitted, x: torch.Tensor, ids: Any) -> Numbers:
    """Predictions on fixed rows, and memberships, by client."""
    predictions = {f"prediction of {client}": fitted.predict(client, x).numpy() for client in ids}
    return predictions | {f"membership of {client}": fitted.membership(client).numpy() for client in ids}


def of_fit(name: str, engine: str) -> Numbers:
    found, new = fitted(name, engine)
    return of_clients(found, new.train.x[:5], found.ids) | of_history(found.history)


def of_newcomers(name: str) -> Numbers:
    found, new = fitted(name)
    more, x = found.onboard(new), new.train.x[:5]
    of_first = new.train.x[:9], new.train.y[:9], [found.ids[0]] * 9
    renamed = ppfl.Federation.from_arrays(*of_first, test_fraction=0, classes=new.classes)
    updated = of_clients(found.update(renamed), x, found.ids[:2])
    scores = more.evaluate(new)
    numbers = of_clients(more, x, new.ids) | {"score": scores.score.values.numpy(), "loss": scores.loss.values.numpy()}
    return numbers | {f"updated: {part}": array for part, array in updated.items()}


def of_export(folder: Path, name: str) -> Numbers:
    import onnxruntime

    found, new = fitted(name)
    x, client = new.train.x[:5], found.ids[0]
    session = onnxruntime.InferenceSession(found.export_onnx(client, folder / f"{name}.onnx"))
    again = ppfl.load(found.save(folder / f"{name}.safetensors"))
    with torch.no_grad():
        module = found.model(client)(x).numpy()
    onnx = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    return {"module": module, "onnx": onnx} | of_clients(again, x, again.ids)


def of_folder(folder: Path) -> Numbers:
    """What a run measured, and memberships where there are some."""
    record = load_run(folder)
    numbers = of_history(record.metrics) | {"per client": np.array(record.scores.get("per_client") or [0.0])}
    if record.memberships is not None:
        numbers["memberships"] = record.memberships.numpy()
    return numbers


def of_run(folder: Path, label: str, name: str, changes: dict[str, Any]) -> Numbers:
    file = folder / f"{label}.toml"
    file.write_text(tomli_w.dumps(experiment(name, changes)))
    (record,) = run(load_experiment(file), folder / label, base=folder)
    numbers = of_folder(record.folder)
    found = ppfl.load(record.folder)
    numbers |= {f"start of {name}": leaf.numpy() for name, leaf in found.population.initial_network().items()}
    for client in found.ids[:3]:
        for part, leaf in found.model(client).state_dict().items():
            if not part.startswith("inputs."):  # the steps of a preparation, around the `network`
                numbers[f"{part.removeprefix('network.')} of {client}"] = leaf.numpy().ravel()[:20]
    return numbers


def of_sites(folder: Path, name: str, secure: bool = False) -> Numbers:
    file = folder / f"sites-{name}-{secure}.toml"
    sums_alone = SUMS_ALONE | {"affinity": {"name": "none"}} if secure else {}
    file.write_text(tomli_w.dumps(experiment(name, sums_alone)))
    sites = Sites(load_experiment(file), file.with_suffix(""), secure={"min_sites": 3} if secure else None)
    return of_folder(sites.run().folder)


def of_ranks(folder: Path, name: str) -> Numbers:
    file, out = folder / f"ranks-{name}.toml", folder / f"ranks-{name}"
    file.write_text(tomli_w.dumps(experiment(name, {})))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, *torchrun, "-m", "ppfl", "run", str(file), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | quiet)
    return of_folder(out / "seed-0")


def of_data(settings: dict[str, Any]) -> Numbers:
    """The fingerprint of everything; sizes, labels and some samples of some clients, to see where it differs."""
    settings = dict(settings)
    for key in ("file", "folder"):
        if key in settings:
            settings[key] = str(DATA / settings[key])
            if not Path(settings[key]).exists():
                return {}
    federation = build(settings.pop("name"), **settings)
    numbers: Numbers = {"importance": federation.importance.numpy()}
    numbers["fingerprint"] = np.frombuffer(bytes.fromhex(federation.fingerprint), np.uint8)
    for client in federation.ids[:12]:
        for split, samples in federation.client(client).items():
            x, y = torch.as_tensor(samples.x[:3]), torch.as_tensor(samples.y)
            numbers[f"{split} of {client}"] = np.array([len(y), *y.flatten()[:9].tolist(), *x.flatten()[:40].tolist()])
    return numbers


def of_table(settings: dict[str, Any]) -> Numbers:
    settings = {"k": 2, "random_state": 0} | settings
    target = settings.pop("target")
    if target == "choice":
        table = make_choice_table(clients=16)
        fit = {"situations": table.situations, "clients": table.clients}
        model = glm.PopulationChoice(**settings).fit(table.x, table.y, **fit)
        return of_estimator(model) | {"probabilities": model.predict_proba(table.x, **fit)}
    table = make_client_table(clients=20)
    y = np.digitize(table.y, [-1.0, 1.0]) if target == "classes" else getattr(table, target)
    return of_rows(settings, target in ("labels", "classes"), table.x, y, table.clients)


def of_reference(settings: dict[str, Any]) -> Numbers:
    import pandas as pd

    settings = {"k": 2, "random_state": 0} | settings
    file = DATA / "tabular" / f"{settings.pop('file')}.csv.gz"
    if not file.exists():
        return {}
    frame = pd.read_csv(file)
    y, clients = (frame[settings.pop(key)].to_numpy() for key in ("target", "client"))
    x = frame[settings.pop("columns")].to_numpy(float)
    return of_rows(settings, y.dtype.kind in "OUT", x, y, clients)


def of_rows(settings: dict[str, Any], classes: bool, x: Any, y: Any, clients: Any) -> Numbers:
    clients = np.array([f"client {client}" for client in clients], dtype=object)
    model = (glm.PopulationClassifier if classes else glm.PopulationRegressor)(**settings)
    model.fit(x, y, clients=clients)
    predict = model.predict_proba if classes else model.predict
    numbers = of_estimator(model) | {"predictions": predict(x[:40], clients[:40])}
    numbers["new client"] = predict(x[:5], np.array([glm.NEW] * 5, dtype=object))
    first = clients == clients[0]
    renamed = np.array(["a new client"] * int(first.sum()), dtype=object)
    numbers["onboarded"] = np.array(model.onboard(x[first], y[first], renamed))
    return numbers


def of_estimator(model: Any) -> Numbers:
    numbers = {"memberships": np.array(model.memberships_), "coefficients": np.array(model.canonical_coef_)}
    for name in ("log_likelihood_", "aic_", "bic_", "dispersion_", "intercept_", "shared_coef_"):
        if getattr(model, name, None) is not None:
            numbers[name] = np.array(getattr(model, name), dtype=float)
    try:
        numbers["intervals"] = model.conf_int().to_numpy(dtype=float)
    except ppfl.PPFLError as refused:
        numbers[f"no intervals: {type(refused).__name__}"] = np.zeros(0)
    return numbers


def of_glm_command(folder: Path) -> Numbers:
    import pandas as pd

    table = make_client_table(clients=20)
    frame = pd.DataFrame(table.x, columns=["a", "b"]).assign(shop=table.clients, sold=table.y.round(4))
    frame.to_csv(folder / "sales.csv", index=False)
    command = [sys.executable, "-m", "ppfl", "glm", str(folder / "sales.csv"), "--client", "shop", "--target", "sold"]
    subprocess.run([*command, "-k", "1,2", "--out", str(folder / "glm")], check=True, capture_output=True)
    found = {file.stem: pd.read_csv(file) for file in sorted((folder / "glm").rglob("*.csv"))}
    return {name: frame.select_dtypes("number").to_numpy(dtype=float) for name, frame in found.items()}


# ---------------------------------------------------------------------- before and after


def collect(only: str) -> dict[str, Any]:
    """The numbers of all cases, by case and part. An error is a part without numbers, and never passes."""
    numbers: dict[str, Any] = {}
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # torch.onnx says what it skips
    with tempfile.TemporaryDirectory() as folder:
        for case, make in cases(Path(folder)):
            if not fnmatch.fnmatch(case, only):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    found = make()
                except Exception as error:  # one case must not end the others
                    found = {f"error: {type(error).__name__}: {error}".replace(folder, "")[:120]: np.zeros(0)}
            numbers |= {f"{case} | {part}": np.asarray(array) for part, array in found.items()}
    return numbers


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """For every case a word, with the place where it differs most, and by how much."""
    found: dict[str, tuple[str, float]] = {}
    for key in before.keys() | after.keys():
        case, part = key.split(" | ", 1)
        if part.startswith("error: "):
            word, most = f"differs: {part}", np.inf
        elif key not in before or key not in after:
            word, most = f"differs: {part!r} is {'new' if key in after else 'gone'}", np.inf
        elif before[key].shape != after[key].shape:
            word, most = f"differs: shape of {part!r} {before[key].shape} -> {after[key].shape}", np.inf
        else:
            word, most = compare_arrays(part, before[key], after[key])
        if case not in found or most > found[case][1]:
            found[case] = (word, most)
    return dict(sorted(found.items()))


def compare_arrays(part: str, before: Any, after: Any) -> tuple[str, float]:
    if np.array_equal(before, after, equal_nan=True):
        return "same bits", 0.0
    if not (np.isnan(before) == np.isnan(after)).all():
        return f"differs: {part!r} is nan in other places", np.inf
    scale = 1 + np.abs(np.nan_to_num(before)).max()
    most = float(np.nanmax(np.abs(before - after)) / scale)
    rounding = TOLERANCE.get(str(before.dtype), 0.0)
    return ("rounding" if most <= rounding else f"differs: {part!r} by {most:.1e}"), most


def allowed(case: str, most: float) -> str | None:
    """The reason in guard_allowed.toml for which this case may differ so much."""
    rules = tomllib.loads(ALLOWED.read_text()) if ALLOWED.exists() else {}
    for pattern, rule in rules.items():
        if fnmatch.fnmatch(case, pattern) and most <= rule.get("up_to", np.inf):
            return str(rule["reason"])
    return None


def write_numbers_of_commit(ref: str, only: str, file: Path) -> None:
    """The numbers of another commit, by its own guard where it has one."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(HERE.parent), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), ref], check=True)
        try:
            own = tree / "tests" / "guard.py"
            script = own if own.exists() else HERE / "guard.py"
            paths = os.pathsep.join([str(tree / "src"), str(script.parent)])
            here = {"PYTHONPATH": paths, "PPFL_DATA": str(DATA)}
            command = [sys.executable, str(script), "numbers", "--only", only, "--file", str(file)]
            subprocess.run(command, check=True, env=os.environ | here)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["before", "after", "numbers"])
    parser.add_argument("--ref", default="HEAD", help="the commit to compare with")
    parser.add_argument("--only", default="*", help="cases, such as 'fit/ppfl-*'")
    parser.add_argument("--file", type=Path, default=NUMBERS / "before.npz")
    asked = parser.parse_args()
    asked.file.parent.mkdir(exist_ok=True)
    if asked.what == "before":
        write_numbers_of_commit(asked.ref, asked.only, asked.file)
    elif asked.what == "numbers":
        np.savez(asked.file, **collect(asked.only))
    else:
        report(asked.file, asked.only)


def report(file: Path, only: str) -> None:
    """Print a line for every case that is not the same to the bit; leave with 1 where one differs without a reason."""
    if not file.exists():
        sys.exit(f"there are no numbers to compare with at {file}; run make guard-before")
    before = {key: value for key, value in np.load(file).items() if fnmatch.fnmatch(key.split(" | ")[0], only)}
    found, differ = compare(before, collect(only)), 0
    for case, (word, most) in found.items():
        reason = allowed(case, most) if word.startswith("differs") else None
        differ += word.startswith("differs") and reason is None
        if word != "same bits":
            note = f"; allowed: {reason}" if reason else f" ({most:.1e})" if word == "rounding" else ""
            print(f"{case:32} {word}{note}")
    same = sum(word == "same bits" for word, _ in found.values())
    print(f"{len(found)} cases: {same} same bits, {len(found) - same - differ} rounding or allowed, {differ} differ")
    sys.exit(differ > 0)


if __name__ == "__main__":
    main()
