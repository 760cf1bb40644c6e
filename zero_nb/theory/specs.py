"""Shapes of models, and how many parameters a shape has, by closed form.

Every preset in `zero_nb.theory.presets` is one of these shapes with a source.  Counts are exact:
they are those of the published implementation, to the last bias.

Letters: L layers, h hidden size, a attention heads, V vocabulary, s sequence length.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from zero_nb.config import UsageError
from zero_nb.theory.checks import check_count, check_divides, name_error

__all__ = ["ModelSpec", "gpt_like", "llama_like", "load_config", "model_from_config", "shape_for"]


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a transformer.

    Attributes
    ----------
    name : str
        What it is called in tables.
    layers, hidden, heads, vocab : int
        L, h, a, V.  Of an encoder–decoder, `layers` counts both stacks.
    kv_heads : int
        Heads of keys and values; fewer than `heads` is grouped-query attention.
    ffn : int
        Width of the feed-forward layer.
    head_dim : int
        Width of one head where ``heads * head_dim`` is not `hidden`; 0 otherwise.
    positions : int
        Rows of a learned position table; 0 for rotary, relative or ALiBi positions.
    context : int
        Longest sequence it is used with; the default sequence length of a plan.
    gated : bool
        A third feed-forward matrix (SwiGLU, GeGLU).
    rms_norm : bool
        Norms with a scale only; otherwise scale and shift.
    bias, qkv_bias : bool
        Biases of the linear layers; of query, key and value alone.
    qk_norm : bool
        A norm over each head of queries and keys (Qwen3).
    tied : bool
        The output head shares the embedding's memory.
    has_head : bool
        False where there is no language-model head at all (T5 encoder–decoder as counted by
        `AutoModel`, a classifier).
    embed_dim : int
        Width of the embedding where it differs from `hidden` (OPT-350M), with two projections.
    embed_norm, final_norm : bool
        A norm after the embedding (BLOOM); before the head.
    cross_layers : int
        Layers with a second, cross attention: the decoder half of T5.
    relative_buckets : int
        Rows of T5's table of relative positions, one table in each stack.
    extra_numel : int
        Parameters of parts that no field describes (BERT's token types and pooler).
    source : str
        Where the shape is published.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    ffn: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    positions: int = 0
    context: int = 0
    gated: bool = False
    rms_norm: bool = False
    bias: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = True
    has_head: bool = True
    embed_dim: int = 0
    embed_norm: bool = False
    final_norm: bool = True
    cross_layers: int = 0
    relative_buckets: int = 0
    extra_numel: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        """Fill in what follows from the rest, and refuse a shape that cannot be."""
        for field in ("layers", "hidden", "heads", "vocab"):
            check_count(field, getattr(self, field), least=1)
        kv_heads = check_count("kv_heads", self.kv_heads or self.heads, least=1)
        if self.heads % kv_heads:
            raise UsageError(f"kv_heads {kv_heads} does not divide heads {self.heads}")
        filled = {
            "kv_heads": kv_heads,
            "head_dim": check_count("head_dim", self.head_dim, least=0),
            "ffn": check_count("ffn", self.ffn or 4 * self.hidden, least=1),
            "embed_dim": check_count("embed_dim", self.embed_dim or self.hidden, least=1),
            "context": check_count("context", self.context or self.positions or 2048, least=1),
        }
        for field, value in filled.items():
            object.__setattr__(self, field, value)

    # --- parameters ------------------------------------------------------------------------

    @property
    def attention_width(self) -> int:
        """Columns of all query heads together; not always `hidden`."""
        return self.heads * self.head_dim or self.hidden

    @property
    def kv_width(self) -> int:
        """Columns of all key heads together."""
        return self.attention_width * self.kv_heads // self.heads

    @property
    def norm_numel(self) -> int:
        """Parameters of one norm over `hidden`."""
        return self.hidden * (1 if self.rms_norm else 2)

    @property
    def attention_numel(self) -> int:
        """Query, key, value and output matrices with their biases, and head norms."""
        h, q, kv = self.hidden, self.attention_width, self.kv_width
        biases = (q + 2 * kv if self.bias or self.qkv_bias else 0) + (h if self.bias else 0)
        return h * (q + 2 * kv) + q * h + biases + self._head_norms

    @property
    def _head_norms(self) -> int:
        """The two norms over one head, shared by all heads."""
        return 2 * self.attention_width // self.heads if self.qk_norm else 0

    @property
    def mlp_numel(self) -> int:
        """Feed-forward matrices with their biases."""
        matrices = (3 if self.gated else 2) * self.hidden * self.ffn
        biases = (2 if self.gated else 1) * self.ffn + self.hidden
        return matrices + (biases if self.bias else 0)

    @property
    def block_numel(self) -> int:
        """One layer: attention, feed-forward and two norms.

        For a GPT with h ≫ 1 this is 12h² + 13h; cross attention is not in it.
        """
        return self.attention_numel + self.mlp_numel + 2 * self.norm_numel

    @property
    def cross_numel(self) -> int:
        """What a decoder layer of an encoder–decoder has on top."""
        return self.attention_numel + self.norm_numel if self.cross_layers else 0

    @property
    def embedding_numel(self) -> int:
        """Token table, V times its width."""
        return self.vocab * self.embed_dim

    @property
    def head_numel(self) -> int:
        """An output head of its own; 0 where it is tied or there is none."""
        return self.embedding_numel if self.has_head and not self.tied else 0

    @property
    def entry_numel(self) -> int:
        """Everything before the first layer except the token table."""
        projections = 2 * self.embed_dim * self.hidden if self.embed_dim != self.hidden else 0
        return (
            self.positions * self.hidden
            + (self.norm_numel if self.embed_norm else 0)
            + projections
            + self.relative_buckets * self.heads * (2 if self.cross_layers else 1)
            + self.extra_numel
        )

    @property
    def exit_numel(self) -> int:
        """Norms after the last layer; an encoder–decoder has one in each stack."""
        norms = (2 if self.cross_layers else 1) if self.final_norm else 0
        return norms * self.norm_numel

    @property
    def numel(self) -> int:
        """Ψ: all parameters, a shared one counted once."""
        return (
            self.embedding_numel
            + self.entry_numel
            + self.layers * self.block_numel
            + self.cross_layers * self.cross_numel
            + self.exit_numel
            + self.head_numel
        )

    @property
    def largest_layer_numel(self) -> int:
        """Largest number of parameters that one module owns itself, without its children's.

        This is what DeepSpeed's ZeRO-3 estimator asks for.
        """
        bias = int(self.bias)
        return max(
            self.embedding_numel,
            self.positions * self.hidden,
            self.hidden * self.ffn + bias * self.ffn,
            self.hidden * self.attention_width + bias * self.attention_width,
        )

    def unit_numels(self) -> list[int]:
        """Parameters of each unit that is gathered together: embedding, each layer, head.

        Returns
        -------
        list of int
            Sums to `numel`.
        """
        blocks = [self.block_numel] * (self.layers - self.cross_layers)
        blocks += [self.block_numel + self.cross_numel] * self.cross_layers
        ends = self.exit_numel + self.head_numel
        return [self.embedding_numel + self.entry_numel, *blocks, *([ends] if ends else [])]

    # --- model parallelism -----------------------------------------------------------------

    def stage_layers(self, pp: int) -> list[int]:
        """Layers on each of `pp` pipeline stages: as even as can be, longer ones first."""
        check_count("pp", pp, least=1)
        if pp > self.layers:
            raise UsageError(f"pp {pp} is more than the {self.layers} layers of {self.name}")
        each, rest = divmod(self.layers, pp)
        return [each + (stage < rest) for stage in range(pp)]

    def shard_numel(self, tp: int = 1, pp: int = 1, stage: int = 0) -> int:
        """Parameters on one device of a tensor- and pipeline-parallel model.

        Column- and row-parallel matrices are cut by `tp`; norms, biases of row-parallel layers and
        the position table are on every device (Shoeybi et al., arXiv:1909.08053, Section 3).  With
        more than one pipeline stage the last one has a head of its own, tied or not.

        Parameters
        ----------
        tp, pp : int
            Tensor- and pipeline-parallel degrees.
        stage : int
            Pipeline stage, 0 to pp − 1; negative counts from the end.

        Returns
        -------
        int
        """
        check_count("tp", tp, least=1)
        layers = self.stage_layers(pp)[stage]
        first, last = stage in (0, -pp), stage in (-1, pp - 1)
        vocab = -(-self.vocab // tp) * self.embed_dim
        total = layers * self.block_shard_numel(tp)
        if self.cross_layers:
            total += -(-self.cross_layers * self.cross_numel // (tp * pp))
        if first:
            total += vocab + self.entry_numel
        if last:
            total += self.exit_numel
            total += vocab if self.has_head and (not self.tied or pp > 1) else 0
        return total

    def block_shard_numel(self, tp: int) -> int:
        """One layer's parameters on one of `tp` tensor-parallel devices."""
        if tp == 1:
            return self.block_numel
        h, q = self.hidden, self.attention_width
        kv = max(self.kv_width, q * tp // self.heads)  # a key head is never cut
        whole = 2 * self.norm_numel + (2 * h if self.bias else 0)
        whole += self._head_norms
        matrices = h * (q + 2 * kv) + q * h + (3 if self.gated else 2) * h * self.ffn
        biases = q + 2 * kv if self.bias or self.qkv_bias else 0
        biases += (2 if self.gated else 1) * self.ffn if self.bias else 0
        return whole + -(-(matrices + biases) // tp)


def gpt_like(
    layers: int, hidden: int, heads: int, vocab: int = 50257, seq: int = 1024, **fields: object
) -> ModelSpec:
    """A GPT-2-like shape by its numbers: Vh + sh + L(12h² + 13h) + 2h parameters.

    Parameters
    ----------
    layers, hidden, heads, vocab : int
        L, h, a, V.
    seq : int
        Rows of the learned position table.
    **fields
        Any other field of `ModelSpec`.

    Returns
    -------
    ModelSpec

    Examples
    --------
    >>> gpt_like(12, 768, 12).numel
    124439808
    """
    check_divides("heads", heads, "hidden", hidden)
    given = {"name": f"GPT {layers}x{hidden}", "positions": seq, "source": "given by its numbers"}
    return ModelSpec(
        **(given | {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab} | fields)
    )


def llama_like(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocab: int = 32000,
    kv_heads: int = 0,
    tied: bool = False,
    **fields: object,
) -> ModelSpec:
    """A LLaMA-like shape by its numbers: RMSNorm, SwiGLU, rotary positions, no biases.

    Parameters
    ----------
    layers, hidden, heads, ffn, vocab, kv_heads, tied
        See `ModelSpec`.
    **fields
        Any other field of `ModelSpec`.

    Returns
    -------
    ModelSpec

    Examples
    --------
    >>> llama_like(32, 4096, 32, 11008).numel
    6738415616
    """
    if not fields.get("head_dim"):
        check_divides("heads", heads, "hidden", hidden)
    given = {"name": f"LLaMA-like {layers}x{hidden}", "source": "given by its numbers"}
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "ffn": ffn}
    style = {"gated": True, "rms_norm": True, "bias": False, "kv_heads": kv_heads, "tied": tied}
    return ModelSpec(**(given | shape | style | fields))


def shape_for(numel: int, vocab: int = 50257, seq: int = 2048) -> ModelSpec:
    """A GPT-3-like shape for a bare number of parameters.

    GPT-3's larger models are 128 times as wide as they are deep and have heads of 128 (Brown et
    al., arXiv:2005.14165, Table 2.1).  The count is near `numel`, not equal to it: a plan takes
    its model states from `numel` and only activations from this shape.

    Parameters
    ----------
    numel : int
        Ψ.
    vocab, seq : int
        V and s.

    Returns
    -------
    ModelSpec
    """
    numel = check_count("numel", numel, least=1)
    layers = max(1, round((numel / (12 * 128**2)) ** (1 / 3)))
    hidden = (numel / (12 * layers)) ** 0.5
    hidden = max(64, round(hidden / 64) * 64)
    heads = max(1, hidden // 128) if hidden % 128 == 0 else hidden // 64
    return gpt_like(
        layers,
        hidden,
        heads,
        vocab,
        seq,
        name="GPT-3's proportions",
        source="GPT-3's proportions, arXiv:2005.14165 Table 2.1",
    )


# --- Hugging Face config.json ----------------------------------------------------------------

_GPT2_KEYS = {
    "layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "vocab": "vocab_size",
}  # fmt: skip
_HF_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
}


def load_config(path: str | Path) -> ModelSpec:
    """Read a Hugging Face ``config.json``.

    Parameters
    ----------
    path : str or Path
        The file; nothing is downloaded.

    Returns
    -------
    ModelSpec

    Raises
    ------
    UsageError
        If the file is missing, is no JSON object, names an architecture that is not known here,
        or lacks a key.
    """
    path = Path(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} must hold one JSON object, got {type(config).__name__}")
    name = str(config.get("_name_or_path") or path.parent.name or path.stem)
    return replace(model_from_config(config), name=name, source=str(path))


def model_from_config(config: dict) -> ModelSpec:
    """The shape that a Hugging Face configuration describes.

    Parameters
    ----------
    config : dict
        With ``model_type``, or one architecture's own keys.

    Returns
    -------
    ModelSpec

    Raises
    ------
    UsageError
        For an unknown ``model_type`` or a missing key.
    """
    kind = config.get("model_type")
    if kind is None:
        kind = "gpt2" if "n_embd" in config else "llama"
    if kind not in _READERS:
        raise name_error("model_type", kind, _READERS)
    return _READERS[kind](config)


def _take(config: dict, keys: dict[str, str]) -> dict[str, int]:
    """The fields named by `keys`, or one error that lists all missing keys."""
    missing = [key for key in keys.values() if config.get(key) is None]
    if missing:
        raise UsageError(
            f"the configuration of a {config.get('model_type', 'model')} lacks "
            f"{', '.join(missing)}; give a complete config.json, or the numbers themselves"
        )
    return {field: check_count(key, config[key], least=1) for field, key in keys.items()}


def _gpt2(config: dict) -> ModelSpec:
    """GPT-2: learned positions, tied head."""
    shape = _take(config, _GPT2_KEYS | {"positions": "n_positions"})
    return ModelSpec(
        name="gpt2",
        ffn=config.get("n_inner") or 0,
        tied=config.get("tie_word_embeddings", True),
        source="Hugging Face GPT2Config",
        **shape,
    )


def _opt(config: dict) -> ModelSpec:
    """OPT: two extra position rows; a narrower embedding and no final norm in the 350M model."""
    shape = _take(config, _HF_KEYS | {"positions": "max_position_embeddings", "ffn": "ffn_dim"})
    narrow = config.get("word_embed_proj_dim") or shape["hidden"]
    pre_norm = config.get("do_layer_norm_before", True)
    return ModelSpec(
        name="opt",
        embed_dim=narrow,
        final_norm=pre_norm and not config.get("_remove_final_layer_norm", False),
        context=shape["positions"],
        tied=config.get("tie_word_embeddings", True),
        source="Hugging Face OPTConfig",
        **(shape | {"positions": shape["positions"] + 2}),
    )


def _bloom(config: dict) -> ModelSpec:
    """BLOOM: ALiBi, a norm after the embedding, tied head."""
    layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
    heads = "n_head" if "n_head" in config else "num_attention_heads"
    keys = {"layers": layers, "hidden": "hidden_size", "heads": heads, "vocab": "vocab_size"}
    return ModelSpec(
        name="bloom",
        embed_norm=True,
        context=config.get("seq_length") or 2048,
        source="Hugging Face BloomConfig",
        **_take(config, keys),
    )


def _gpt_neox(config: dict) -> ModelSpec:
    """GPT-NeoX and Pythia: rotary positions, a head of its own."""
    return ModelSpec(
        name="gpt_neox",
        context=config.get("max_position_embeddings") or 2048,
        tied=config.get("tie_word_embeddings", False),
        source="Hugging Face GPTNeoXConfig",
        **_take(config, _HF_KEYS | {"ffn": "intermediate_size"}),
    )


def _llama(config: dict) -> ModelSpec:
    """LLaMA, Mistral, Qwen2, Qwen3: RMSNorm, SwiGLU, rotary positions."""
    kind = config.get("model_type", "llama")
    biased = bool(config.get("attention_bias", False)) and kind == "llama"
    shape = _take(config, _HF_KEYS | {"ffn": "intermediate_size"})
    spec = ModelSpec(
        name=kind,
        kv_heads=config.get("num_key_value_heads") or 0,
        head_dim=config.get("head_dim") or 0,
        context=config.get("max_position_embeddings") or 2048,
        gated=True,
        rms_norm=True,
        bias=False,
        qkv_bias=kind == "qwen2" or biased,
        qk_norm=kind == "qwen3",
        tied=config.get("tie_word_embeddings", False),
        source=f"Hugging Face {kind} configuration",
        **shape,
    )
    if biased:  # an output bias too, which no other field describes
        return replace(spec, extra_numel=spec.layers * spec.hidden)
    return spec


def _t5(config: dict) -> ModelSpec:
    """T5 as an encoder and a decoder, without a language-model head (`AutoModel`)."""
    keys = {
        "layers": "num_layers", "hidden": "d_model", "heads": "num_heads", "vocab": "vocab_size",
        "ffn": "d_ff", "head_dim": "d_kv",
    }  # fmt: skip
    shape = _take(config, keys)
    decoder = config.get("num_decoder_layers") or shape["layers"]
    return ModelSpec(
        name="t5",
        gated=str(config.get("feed_forward_proj", "relu")).startswith("gated"),
        rms_norm=True,
        bias=False,
        has_head=False,
        cross_layers=decoder,
        relative_buckets=config.get("relative_attention_num_buckets", 32),
        context=config.get("n_positions") or 512,
        source="Hugging Face T5Config, AutoModel",
        **(shape | {"layers": shape["layers"] + decoder}),
    )


_READERS = {
    "gpt2": _gpt2,
    "opt": _opt,
    "bloom": _bloom,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "t5": _t5,
    "mt5": _t5,
}
