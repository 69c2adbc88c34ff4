"""Every method again, written plainly from its paper's pseudocode: what the package must agree with."""

from kit.twins import clusters, one_model, own_models, ppfl

TWINS = {  # by the names of methods in experiment files: Given -> Outcome
    "local": one_model.local,
    "fedavg": one_model.fedavg,
    "fedprox": one_model.fedprox,
    "scaffold": one_model.scaffold,
    **dict.fromkeys(("fedavgm", "fedadagrad", "fedadam", "fedyogi"), one_model.fedopt),
    "ditto": own_models.ditto,
    "pfedme": own_models.pfedme,
    "finetune": lambda given: own_models.finetune(given, TWINS[given.method.method.name]),
    **dict.fromkeys(("fedsim", "fedper", "lg-fedavg"), own_models.fedsim),
    **dict.fromkeys(("fedalt", "fedrep"), own_models.fedalt),
    "ifca": clusters.ifca,
    "fedem": clusters.fedem,
    "cfl": clusters.cfl,
    "ppfl": ppfl.ppfl,
}
