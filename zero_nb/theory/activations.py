"""Bytes of activations kept for the backward pass.

Two ways, which meet where they should (a test says so):

* `korthikanti_layer_bytes` is the published formula for a GPT layer in 16 bits with dropout:
  Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*,
  arXiv:2205.05198, Equations 1–6 and Table 2.
* `saved_per_token` counts tensor by tensor what a layer keeps, for any element size, grouped-query
  attention, SwiGLU, and three ways of running: fused kernels, one operator at a time, compiled.

Letters: s sequence, b micro-batch, h hidden, a heads, L layers, t tensor-parallel degree.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_nb.config import UsageError
from zero_nb.theory.checks import check_count
from zero_nb.theory.specs import ModelSpec

__all__ = [
    "EXECUTIONS",
    "LOSSES",
    "RECOMPUTES",
    "SavedPerToken",
    "interleave_factor",
    "korthikanti_layer_bytes",
    "saved_per_token",
]

RECOMPUTES: dict[str, str] = {
    "none": "keep everything",
    "selective": "recompute attention scores (Korthikanti et al., arXiv:2205.05198, Sec. 5)",
    "per-op": "keep every second matrix product, attention outputs and the layer's input "
    "(pytorch/torchtitan, selective activation checkpointing, per-op policy)",
    "full": "keep the layer's input only (Chen et al., arXiv:1604.06174)",
}
"""What is recomputed in the backward pass."""

EXECUTIONS: dict[str, str] = {
    "fused": "norm and loss kernels keep their inputs only (Megatron-LM, Transformer Engine)",
    "eager": "one operator at a time: an RMSNorm keeps a float32 copy and the normalised values, "
    "keys and values are repeated for grouped queries, SwiGLU keeps four tensors",
    "compiled": "torch.compile keeps what matrix products of the backward pass read, and "
    "recomputes what is element-wise",
    "llm.c": "12h elements a token and layer as llm.c's train_gpt2.cu allocates them, "
    "GELU recomputed",
}
"""How a layer is run, hence what it keeps."""

LOSSES: dict[str, tuple[int, str]] = {
    "eager": (12, "log-softmax, its gradient and the logits' gradient, float32 each"),
    "hf": (
        16,
        "Hugging Face causal LM: as eager, and the output object keeps float32 logits alive "
        "through backward (described in meta-llama/llama-cookbook pull request 41)",
    ),
    "loss-parallel": (
        16,
        "torch.distributed.tensor.parallel.loss: log-softmax, a zero gradient, its exponential "
        "and the product, float32 each",
    ),
    "megatron": (6, "16-bit logits and one float32 copy, updated in place (cross_entropy.py)"),
    "megatron-cloned": (
        10,
        "16-bit logits, a float32 copy and its clone (bigscience-workshop/Megatron-DeepSpeed, "
        "mpu/cross_entropy.py)",
    ),
    "compiled": (4, "16-bit logits and their 16-bit gradient"),
    "chunked": (4, "16-bit logits and gradient; float32 for one chunk at a time"),
    "in-place": (2, "one 16-bit buffer that becomes the gradient (llm.c)"),
    "none": (0, "no language-model head, or masked positions only"),
}
"""Bytes for each logit while the loss is computed, by how it is computed."""


def korthikanti_layer_bytes(
    s: int,
    b: int,
    h: int,
    a: int,
    *,
    t: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> int:
    """Activation bytes of one GPT layer on one device, 16-bit with 1-byte dropout masks.

    Parameters
    ----------
    s, b, h, a : int
        Sequence, micro-batch, hidden size, heads.
    t : int
        Tensor-parallel degree.
    sequence_parallel : bool
        Cut the part outside the tensor-parallel regions too.
    recompute : {"none", "selective", "full"}

    Returns
    -------
    int
        Whole bytes, rounded down.

    Notes
    -----
    arXiv:2205.05198: Eq. 1 sbh(34 + 5as/h); Eq. 2 sbh(10 + 24/t + 5as/(ht)); Eq. 4
    sbh/t·(34 + 5as/h); selective recomputation drops the term in s²; full keeps 2sbh.

    Examples
    --------
    >>> korthikanti_layer_bytes(2048, 1, 12288, 96)
    2868903936
    """
    for name, value in {"s": s, "b": b, "h": h, "a": a, "t": t}.items():
        check_count(name, value, least=1)
    sbh, scores = s * b * h, 5 * a * b * s * s
    if recompute == "full":
        return 2 * sbh
    if recompute == "selective":
        scores = 0
    elif recompute != "none":
        raise UsageError(f"recompute must be none, selective or full, got {recompute!r}")
    if sequence_parallel:
        return (34 * sbh + scores) // t
    return (10 * sbh * t + 24 * sbh + scores) // t


def interleave_factor(p: int, m: int) -> float:
    """Growth of activations with `m` interleaved stages on `p` devices: 1 + (p − 1)/(pm).

    Parameters
    ----------
    p : int
        Pipeline-parallel degree.
    m : int
        Model chunks a device; 1 is the plain schedule, whose factor is 1.

    Returns
    -------
    float

    Notes
    -----
    arXiv:2205.05198 Section 4.2.3.
    """
    p, m = check_count("p", p, least=1), check_count("m", m, least=1)
    return 1.0 if m == 1 else 1 + (p - 1) / (p * m)


@dataclass(frozen=True)
class SavedPerToken:
    """Bytes that one layer keeps for one token, by what they grow with.

    Attributes
    ----------
    whole : int
        On every tensor-parallel device, unless sequences are cut too.
    split : int
        Cut by the tensor-parallel degree.
    per_position : int
        Split bytes for each position of the sequence: the scores, a·s a token.
    """

    whole: int
    split: int
    per_position: int = 0

    def bytes(self, seq: int, tp: int = 1, sequence_parallel: bool = False) -> int:
        """Bytes a token on one device.

        Parameters
        ----------
        seq : int
            Positions a query attends to.
        tp : int
            Tensor-parallel degree.
        sequence_parallel : bool
            Cut `whole` by `tp` too.
        """
        split = (self.split + self.per_position * seq) // tp
        return split + (self.whole // tp if sequence_parallel else self.whole)


def saved_per_token(
    spec: ModelSpec,
    *,
    itemsize: int = 2,
    recompute: str = "none",
    execution: str = "fused",
    flash: bool = True,
    dropout: bool = False,
) -> SavedPerToken:
    """What one layer keeps for one token, tensor by tensor.

    Parameters
    ----------
    spec : ModelSpec
        Widths, gating, norms.
    itemsize : int
        Bytes of an activation: 2, or 4 in float32.
    recompute : str
        One of `RECOMPUTES`.
    execution : str
        One of `EXECUTIONS`.
    flash : bool
        Scores are never stored; one float32 a head and token is.
    dropout : bool
        1-byte masks after attention and feed-forward, and on the scores unless `flash`.

    Returns
    -------
    SavedPerToken

    Notes
    -----
    With ``fused``, dropout and without `flash` this is Korthikanti's Eq. 2 for a 16-bit GPT.
    """
    if recompute not in RECOMPUTES:
        raise UsageError(f"recompute must be one of {', '.join(RECOMPUTES)}, got {recompute!r}")
    if execution not in EXECUTIONS:
        raise UsageError(f"execution must be one of {', '.join(EXECUTIONS)}, got {execution!r}")
    e = check_count("itemsize", itemsize, least=1)
    h, q, kv, ff = spec.hidden, spec.attention_width, spec.kv_width, spec.ffn
    if recompute == "full":
        return SavedPerToken(e * h, 0)
    if recompute == "per-op":
        return _per_op(spec, e, flash)
    if execution == "llm.c":
        return SavedPerToken(12 * e * h, 4 * spec.heads)
    # Inputs of both norms, and what the norms hand to matrix products.
    whole = 4 * e * h
    if execution == "eager" and spec.rms_norm:
        whole = 2 * (4 + 2 * e) * h if e < 4 else 6 * e * h
    if dropout and execution != "compiled":
        whole += 2 * h
    # Query, attended values; keys and values, repeated where an operator does that.
    split = 2 * e * q + 2 * e * (kv if execution == "fused" else q)
    tensors = {"fused": 3, "eager": 4, "compiled": 3}[execution] if spec.gated else 2
    split += tensors * e * ff
    if flash:
        return SavedPerToken(whole, split + 4 * spec.heads)
    if recompute == "selective":
        return SavedPerToken(whole, split)
    return SavedPerToken(whole, split, spec.heads * (2 * e + 1 if dropout else e))


def _per_op(spec: ModelSpec, e: int, flash: bool) -> SavedPerToken:
    """The layer's input, the attended values, and every second matrix product.

    In a gated layer products come as q, k, v, o, w1, w3, w2: q, v, w1 and w2 are kept.  With
    packed queries, keys and values they come as qkv, o, fc1, fc2: qkv and fc1 are kept.
    """
    h, q, kv, ff = spec.hidden, spec.attention_width, spec.kv_width, spec.ffn
    scores = 4 * spec.heads if flash else 0
    if spec.gated:
        return SavedPerToken(2 * e * h, e * (2 * q + kv + ff) + scores)
    return SavedPerToken(e * h, e * (2 * q + 2 * kv + ff) + scores)
