"""ZeRO (Zero Redundancy Optimizer) for real, on a laptop."""

__version__ = "0.1.0"
