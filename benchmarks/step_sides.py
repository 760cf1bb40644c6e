"""The sides of the training-step benchmark: ours, PyTorch's and JAX's, on the same work.

Each side is a process (torch: one a rank) that answers requests: run some steps of one way, say
how long each took and what the losses were. ``python step_sides.py SIDE SETTINGS`` is started by
`step.py`; only the torch and the JAX side import torch and JAX, from an environment of their own.

The models are those of `zero_nb.train.model`: an MLP (tanh, mean squared error) and a small GPT-2
(pre-norm, learned positions, tanh GELU, mean cross entropy), AdamW in float32.
"""

import json
import math
import os
import sys
import time

import numpy as np

BATCH = 32
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
DATA_SETS = 4  # batches are used again, so that nobody has to hold many


def batches_of(model):
    """Return the batches of a model: (inputs, targets) with BATCH samples."""
    rng = np.random.default_rng(7)
    made = []
    for _ in range(DATA_SETS):
        if model["kind"] == "mlp":
            made.append(tuple(rng.normal(size=(2, BATCH, model["width"])).astype(np.float32)))
        else:
            tokens = rng.integers(0, model["vocab_size"], (BATCH, model["seq_len"] + 1))
            made.append((tokens[:, :-1].copy(), tokens[:, 1:].copy()))
    return made


def run_steps(step_of, start, steps):
    """Take ``steps`` steps after ``start`` others; return seconds and losses."""
    seconds, losses = [], []
    for number in range(start, start + steps):
        begin = time.perf_counter()
        losses.append(float(step_of(number)))
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds, "losses": losses}


class Ways:
    """The ways of one side, each made when first asked for, and how many steps each has taken."""

    def __init__(self, make):
        self.make, self.step_of, self.taken = make, {}, {}

    def answer(self, way, steps):
        """Take steps of a way."""
        if way not in self.step_of:
            self.step_of[way], self.taken[way] = self.make(way), 0
        told = run_steps(self.step_of[way], self.taken[way], steps)
        self.taken[way] += steps
        return told


# ------------------------------------------------------------------------------------------- ours


def our_model(model):
    """Return the model of a description."""
    from zero_nb.train.model import GPT, MLP, GPTConfig, MLPConfig

    if model["kind"] == "mlp":
        return MLP(MLPConfig((model["width"],) * (model["layers"] + 1)))
    sizes = {key: value for key, value in model.items() if key != "kind"}
    return GPT(GPTConfig(**sizes))


def ours(settings):
    """Return the ways of our side: the stages, on simulated ranks in this process."""
    from zero_nb.core.blas import blas_threads
    from zero_nb.train.engine import Engine
    from zero_nb.train.optim import AdamW

    model, batches = our_model(settings["model"]), batches_of(settings["model"])

    def make(way):
        engine = Engine(
            model,
            stage=int(way.removeprefix("stage ")),
            world_size=settings["world_size"],
            rule=AdamW(LR, BETAS, EPS, WEIGHT_DECAY),
        )

        def step(number):
            with blas_threads(settings["blas_threads"]):
                return engine.train_step(*batches[number % DATA_SETS]).loss

        return step

    return Ways(make)


# ------------------------------------------------------------------------------------------ torch


def torch_side(settings):
    """Return the ways of PyTorch: data parallel, its stage 1, and FSDP2, over gloo."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(settings["blas_threads"])
    size = settings["world_size"]
    rank = int(os.environ.get("RANK", "0"))
    if size > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (size,))
    part = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    batches = [
        tuple(torch.from_numpy(array[part].copy()) for array in pair)
        for pair in batches_of(settings["model"])
    ]
    hyper = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, "fused": True}

    def make(way):
        model, loss_of = torch_model(torch, settings["model"], np.load(settings["weights"]))
        if way.startswith("FSDP2"):
            options = {"mesh": mesh, "reshard_after_forward": way == "FSDP2, reshard"}
            for unit in model.units():
                fully_shard(unit, **options)
            fully_shard(model, **options)
        elif size > 1:
            model = DistributedDataParallel(model)
        if way == "ZeroRedundancyOptimizer":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **hyper)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), **hyper)

        def step(number):
            inputs, targets = batches[number % DATA_SETS]
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach() / size  # we report the global loss, so they do
            if size > 1:
                dist.all_reduce(mean)
            return mean

        return step

    return Ways(make)


def torch_model(torch, model, weights):
    """Return our model as a torch module with `units`, and its loss."""
    nn, functional = torch.nn, torch.nn.functional

    class Perceptron(nn.Module):
        def __init__(self):
            super().__init__()
            width = model["width"]
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(model["layers"]))

        def units(self):
            return self.layers

        def forward(self, x):
            for layer in self.layers[:-1]:
                x = torch.tanh(layer(x))
            return self.layers[-1](x)

    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, steps, width = x.shape
            q, k, v = (
                part.view(batch, steps, self.heads, -1).transpose(1, 2)
                for part in self.qkv(self.ln1(x)).split(width, 2)
            )
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(seen.transpose(1, 2).reshape(batch, steps, width))
            return x + self.fc2(functional.gelu(self.fc1(self.ln2(x)), approximate="tanh"))

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            width = model["width"]
            self.tok = nn.Embedding(model["vocab_size"], width)
            self.pos = nn.Embedding(model["seq_len"], width)
            self.layers = nn.ModuleList(
                Block(width, model["heads"]) for _ in range(model["blocks"])
            )
            self.lnf = nn.LayerNorm(width)
            self.head = nn.Linear(width, model["vocab_size"], bias=False)

        def units(self):
            return self.layers

        def forward(self, x):
            x = self.tok(x) + self.pos.weight[: x.shape[1]]
            for layer in self.layers:
                x = layer(x)
            return self.head(self.lnf(x))

    made = Perceptron() if model["kind"] == "mlp" else Transformer()
    made.load_state_dict({name: torch.from_numpy(weights[name]) for name in weights.files})
    if model["kind"] == "mlp":
        return made, functional.mse_loss
    return made, lambda y, t: functional.cross_entropy(y.flatten(0, 1), t.flatten())


# -------------------------------------------------------------------------------------------- JAX


def jax_side(settings):
    """Return the ways of JAX: one device a rank, everything replicated, or states sharded."""
    import jax
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    size = settings["world_size"]
    assert len(jax.devices()) == size, jax.devices()
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    over_batch = NamedSharding(mesh, PartitionSpec("ranks"))
    batches = [
        tuple(jax.device_put(array, over_batch) for array in pair)
        for pair in batches_of(settings["model"])
    ]
    loss_of = jax_loss(settings["model"])
    optimizer = optax.adamw(LR, *BETAS, EPS, weight_decay=WEIGHT_DECAY)
    weights = dict(np.load(settings["weights"]))

    def make(way):
        def placed(array):
            """Shard the first axis that divides among the ranks."""
            cut = [None] * array.ndim
            if way == "sharded":
                for axis in range(array.ndim):
                    if array.shape[axis] % size == 0:
                        cut[axis] = "ranks"
                        break
            return NamedSharding(mesh, PartitionSpec(*cut))

        params = {name: jax.device_put(array, placed(array)) for name, array in weights.items()}
        state_places = jax.tree.map(placed, jax.eval_shape(optimizer.init, params))
        held = {
            "params": params,
            "state": jax.jit(optimizer.init, out_shardings=state_places)(params),
        }
        places = (jax.tree.map(placed, params), state_places, NamedSharding(mesh, PartitionSpec()))

        def update(params, state, inputs, targets):
            loss, grads = jax.value_and_grad(loss_of)(params, inputs, targets)
            changes, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, changes), state, loss

        compiled = jax.jit(update, out_shardings=places, donate_argnums=(0, 1))

        def step(number):
            held["params"], held["state"], loss = compiled(
                held["params"], held["state"], *batches[number % DATA_SETS]
            )
            jax.block_until_ready(held)
            return loss

        return step

    return Ways(make)


def jax_loss(model):
    """Return our model and its loss as a function of parameters, inputs and targets."""
    import jax
    import jax.numpy as jnp

    def linear(p, name, x):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def norm(p, name, x):
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return x * p[f"{name}.weight"] + p[f"{name}.bias"]

    def perceptron(p, inputs, targets):
        x = inputs
        for i in range(model["layers"]):
            x = linear(p, f"layers.{i}", x)
            x = jnp.tanh(x) if i < model["layers"] - 1 else x
        return jnp.mean((x - targets) ** 2)

    def block(p, name, x):
        batch, steps, width = x.shape
        heads = model["heads"]
        q, k, v = (
            part.reshape(batch, steps, heads, -1)
            for part in jnp.split(linear(p, f"{name}.qkv", norm(p, f"{name}.ln1", x)), 3, -1)
        )
        scores = jnp.einsum("bthe,bshe->bhts", q, k) / math.sqrt(width // heads)
        seen = jnp.where(np.tril(np.ones((steps, steps), bool)), scores, -jnp.inf)
        seen = jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(seen), v)
        x = x + linear(p, f"{name}.proj", seen.reshape(batch, steps, width))
        inner = jax.nn.gelu(linear(p, f"{name}.fc1", norm(p, f"{name}.ln2", x)))
        return x + linear(p, f"{name}.fc2", inner)

    def transformer(p, inputs, targets):
        x = p["tok.weight"][inputs] + p["pos.weight"][: inputs.shape[1]]
        for i in range(model["blocks"]):
            x = block(p, f"layers.{i}", x)
        logits = jax.nn.log_softmax(norm(p, "lnf", x) @ p["head.weight"].T)
        return -jnp.take_along_axis(logits, targets[..., None], -1).mean()

    return perceptron if model["kind"] == "mlp" else transformer


SIDES = {"ours": ours, "torch": torch_side, "jax": jax_side}


def main():
    """Be one process of a side: answer requests until there are no more."""
    side, settings = sys.argv[1], json.loads(sys.argv[2])
    ways = SIDES[side](settings)
    for line in sys.stdin:
        print(json.dumps(ways.answer(**json.loads(line))), flush=True)
    os._exit(0)  # taking a group of torch's down was seen to hang for minutes in one rank


if __name__ == "__main__":
    main()
