"""ZeRO (Zero Redundancy Optimizer) for real, on a laptop.

The public names, loaded when first used (PEP 562), so that ``import zero_nb`` costs little.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "zero_nb.config": (
        "UsageError",
        "ZeROConfig",
        "ZeROImplementationStage",
        "ZeROStage",
        "ZeroConfig",
    ),
    "zero_nb.core.partition": (
        "PartitionInfo",
        "gather_parameters_flat",
        "partition_gradients_flat",
        "partition_optimizer_state",
        "partition_parameters_flat",
    ),
    "zero_nb.cluster.world": ("Transfer", "World"),
    "zero_nb.cluster.simulated": ("SimulatedWorld",),
    "zero_nb.train.buckets": ("GradientBuffer",),
    "zero_nb.train.ledger": ("Ledger",),
    "zero_nb.train.named": (
        "all_gather_gradients",
        "gather_parameters",
        "partition_gradients",
        "partition_parameters",
        "reduce_scatter_gradients",
    ),
    "zero_nb.train.optim": ("SGD", "Adam", "AdamW", "ParameterGroup", "Rule"),
    "zero_nb.train.stages": ("ZeROStage0", "ZeROStage1", "ZeROStage2", "ZeROStage3"),
    "zero_nb.train.stats": ("ZeROMemoryStats",),
    "zero_nb.train.units": ("ParameterPartition", "Unit", "ZeROState"),
    "zero_nb.train.optimizer": ("StepResult", "ZeROOptimizer"),
    "zero_nb.train.engine": ("Engine", "StepReport"),
    "zero_nb.train.prefetch": ("Prefetcher",),
    "zero_nb.train.data": ("Digits", "TextBytes"),
    "zero_nb.train.model": ("GPT", "GPTConfig", "MLP", "MLPConfig"),
    "zero_nb.theory.memory": ("zero_stage_memory_reduction",),
    "zero_nb.compare": ("compare_stages", "measure_memory", "train_stage"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)  # computed: it cannot disagree with _HOME


def __getattr__(name):
    """Import the module a public name lives in, the first time it is asked for."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'zero_nb' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__():
    """List the public names."""
    return [*__all__, "__version__"]
