"""Runs to save and resume: a model that hits most of what checkpoints got wrong, and its state.

0-d, empty, tied, frozen, never used, two groups that interleave, and ranks that own padding only.
"""

import numpy as np

from own_model import given_gradients
from zero_nb.train.optim import AdamW, ParameterGroup, warmup_cosine
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.scaling import DynamicLossScale

SHAPES = {
    "emb": (7, 3),
    "scalar": (),
    "frozen": (5,),
    "none": (0, 4),
    "mat": (3, 4),
    "bias": (3,),
    "never": (2,),
}
TIED = {"head": "emb"}
FROZEN = ("frozen",)
UNITS = {"embed": ("emb", "none", "head"), "block": ("frozen", "mat", "scalar", "never", "bias")}
GROUPS = ((("emb", "never", "mat"), {}), (("bias", "scalar", "none"), {"weight_decay": 0.0}))
OPTIONS = {"lr": 3e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}

# The same parameters in another arrangement: other units, groups and parameters in another
# order, and of the tied names the other one first.
OTHER = {
    "units": {"rest": ("never", "frozen", "none"), "most": ("scalar", "bias", "mat", "head")},
    "groups": ((("none", "bias"), {}), (("mat", "never", "head"), {}), (("scalar",), {})),
    "order": ("head", "emb", *reversed([name for name in SHAPES if name != "emb"])),
}


def params(seed=0, order=(*SHAPES, "head")):
    rng = np.random.default_rng(seed)
    drawn = {name: np.asarray(rng.normal(size=s), np.float32) for name, s in SHAPES.items()}
    return {name: drawn[TIED.get(name, name)] for name in order}


def make(stage, world_size, *, seed=0, order=(*SHAPES, "head"), groups=GROUPS, **settings):
    """An optimizer that clips and follows a schedule."""
    settings = {"units": UNITS, "rule": AdamW(**OPTIONS), "frozen": FROZEN} | settings
    if settings.get("precision") == "fp16":
        settings.setdefault("loss_scale", DynamicLossScale(scale=256.0, growth_interval=3))
    where = {} if "world" in settings else {"world_size": world_size}
    return ZeROOptimizer(
        params(seed, order),
        stage=stage,
        groups=[ParameterGroup(names, dict(options)) for names, options in groups],
        max_grad_norm=2.0,
        schedule=lambda step: warmup_cosine(step, warmup=3, total=12),
        **where,
        **settings,
    )


def train(opt, steps, *, overflow=()):
    """Train some more steps; what a step is given is a function of its number only."""
    for _ in range(steps):
        number = opt.steps_done + opt.skipped_steps
        rng = np.random.default_rng([3, number])
        for _ in range(opt.micro_batches):
            grads = given_gradients(rng, SHAPES, TIED, FROZEN, opt.world.size, scale=opt.loss_scale)
            ranks = list(opt.world.ranks)
            grads = {name: np.ascontiguousarray(grad[ranks]) for name, grad in grads.items()}
            grads["never"] = None
            if number in overflow:
                grads["mat"][0, 1, 1] = np.inf
            opt.backward(grads)
        opt.step()
    return opt


def everything(opt):
    """All that a resumed run needs, by name; arrays as bytes, so that -0 is not 0.

    Read without the code under test. Tied parameters go by one name, whichever comes first.
    """

    def canonical(by_name):
        return {TIED.get(name, name): value for name, value in sorted(by_name.items())}

    with opt.gathered_parameters() as used:
        used = {name: one_ranks(array) for name, array in sorted(used.items())}
    return {
        "weights": {name: array.tobytes() for name, array in sorted(opt.weights().items())},
        "used": used,
        "moments": canonical(moments(opt)),
        "updates": canonical(opt.rule.steps),
        "options": canonical(
            {name: opt.rule.options(group) for group in opt.groups for name in group.names}
        ),
        "lr": opt.lr,
        "counts": (opt.steps_done, opt.skipped_steps),
        "loss_scale": opt.scaler and opt.scaler.state_dict(),
    }


def moments(opt):
    """The bytes of each parameter's moments, joined from the ranks that own them."""
    joined = {}
    for unit in opt.trainable_units:
        for array in unit.optim.moments.values():
            own = np.ascontiguousarray(unit.own(array))
            flat = opt.world.all_gather(own, purpose="other")[0]
            for name in unit.layout.names:
                joined.setdefault(name, []).append(unit.layout.view(flat, name).tobytes())
    return joined


def one_ranks(array):
    """The bytes of one rank, which are those of all (H6)."""
    rows = [row.tobytes() for row in np.ascontiguousarray(array)]
    assert rows == rows[:1] * len(rows), "ranks disagree"
    return rows[0]


def arrays(opt):
    """The bytes of everything the ranks hold, padding included: to see that nothing changed."""
    return [
        array.tobytes()
        for unit in opt.units
        for array in (unit.param, *unit.optim.arrays().values())
    ]
