"""Known models and devices, each with its source.  Data only: counts are computed from shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from zero_nb.theory.checks import name_error
from zero_nb.theory.specs import ModelSpec

__all__ = ["DEVICES", "MODELS", "Device", "get_device", "get_model"]

_GPT2 = "Radford et al. 2019, Table 2; Hugging Face openai-community/{}, config.json"
_GPT3 = "Brown et al., arXiv:2005.14165, Table 2.1; vocabulary of GPT-2, n_ctx 2048"
_OPT = "Zhang et al., arXiv:2205.01068, Table 1; Hugging Face facebook/{}, config.json"
_BLOOM = "Le Scao et al., arXiv:2211.05100; Hugging Face bigscience/{}, config.json"
_LLAMA = "Touvron et al., arXiv:2302.13971, Table 2; config.json of the released weights"
_LLAMA2 = "Touvron et al., arXiv:2307.09288, Table 1; Hugging Face meta-llama, config.json"
_LLAMA3 = "Grattafiori et al., arXiv:2407.21783, Table 3; Hugging Face meta-llama, config.json"
_T5 = "Raffel et al., arXiv:1910.10683; Hugging Face google-t5/{}, config.json"
_MEGATRON = "Korthikanti et al., arXiv:2205.05198, Table 3; count by arXiv:2104.04473, Eq. 2"

# name, layers, hidden, heads
_GPT2_SHAPES = (
    ("gpt2", 12, 768, 12),
    ("gpt2-medium", 24, 1024, 16),
    ("gpt2-large", 36, 1280, 20),
    ("gpt2-xl", 48, 1600, 25),
)
_GPT3_SHAPES = (
    ("gpt-3-small", 12, 768, 12),
    ("gpt-3-medium", 24, 1024, 16),
    ("gpt-3-large", 24, 1536, 16),
    ("gpt-3-xl", 24, 2048, 24),  # the table's 24 heads of 128 do not make 2048
    ("gpt-3-2.7b", 32, 2560, 32),
    ("gpt-3-6.7b", 32, 4096, 32),
    ("gpt-3-13b", 40, 5140, 40),  # nor 40 heads of 128 its 5140
    ("gpt-3-175b", 96, 12288, 96),
)
_OPT_SHAPES = (
    ("opt-125m", 12, 768, 12),
    ("opt-1.3b", 24, 2048, 32),
    ("opt-2.7b", 32, 2560, 32),
    ("opt-6.7b", 32, 4096, 32),
    ("opt-13b", 40, 5120, 40),
    ("opt-30b", 48, 7168, 56),
    ("opt-66b", 64, 9216, 72),
    ("opt-175b", 96, 12288, 96),
)
_BLOOM_SHAPES = (
    ("bloom-560m", 24, 1024, 16),
    ("bloom-1b1", 24, 1536, 16),
    ("bloom-1b7", 24, 2048, 16),
    ("bloom-3b", 30, 2560, 32),
    ("bloom-7b1", 30, 4096, 32),
    ("bloom-176b", 70, 14336, 112),
)
# name, layers, hidden, heads, kv_heads, ffn, vocab, context, source
_LLAMA_SHAPES = (
    ("llama-7b", 32, 4096, 32, 32, 11008, 32000, 2048, _LLAMA),
    ("llama-13b", 40, 5120, 40, 40, 13824, 32000, 2048, _LLAMA),
    ("llama-33b", 60, 6656, 52, 52, 17920, 32000, 2048, _LLAMA),
    ("llama-65b", 80, 8192, 64, 64, 22016, 32000, 2048, _LLAMA),
    ("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, 4096, _LLAMA2),
    ("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192, _LLAMA3),
    ("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192, _LLAMA3),
    ("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256, 131072, _LLAMA3),
)
# name, layers of both stacks, d_model, heads, d_kv, d_ff, gated, source
_T5_SHAPES = (
    ("t5-small", 12, 512, 8, 64, 2048, False, _T5),
    ("t5-large", 48, 1024, 16, 64, 4096, False, _T5),
    ("t5-3b", 48, 1024, 32, 128, 16384, False, _T5),
    ("t5-11b", 48, 1024, 128, 128, 65536, False, _T5),
    ("t0-3b", 48, 2048, 32, 64, 5120, True, "Sanh et al., arXiv:2110.08207; bigscience/T0_3B"),
)
_MEGATRON_SHAPES = (
    ("megatron-22b", 48, 6144, 64),
    ("megatron-175b", 96, 12288, 96),
    ("megatron-530b", 105, 20480, 128),
    ("megatron-1t", 128, 25600, 160),
)

_ALIASES = {
    "gpt2-small": "gpt2",
    "gpt-2": "gpt2",
    "gpt3": "gpt-3-175b",
    "gpt-3": "gpt-3-175b",
    "bloom": "bloom-176b",
    "llama-2-7b": "llama-7b",
    "llama-2-13b": "llama-13b",
    "llama-30b": "llama-33b",
    "llama-3.1-8b": "llama-3-8b",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3-405b": "llama-3.1-405b",
    "korthikanti-22b": "megatron-22b",
    "korthikanti-175b-gpt-3": "megatron-175b",
    "korthikanti-530b-mt-nlg": "megatron-530b",
    "korthikanti-1t": "megatron-1t",
    "mt-nlg": "megatron-530b",
}


def _models() -> Iterable[ModelSpec]:
    """Build every preset."""
    for name, *shape in _GPT2_SHAPES:
        yield _gpt(name, *shape, vocab=50257, positions=1024, source=_GPT2.format(name))
    for name, *shape in _GPT3_SHAPES:
        yield _gpt(name, *shape, vocab=50257, positions=2048, source=_GPT3)
    for name, *shape in _OPT_SHAPES:
        yield _gpt(
            name, *shape, vocab=50272, positions=2050, context=2048, source=_OPT.format(name)
        )
    yield _gpt(
        "opt-350m", 24, 1024, 16, vocab=50272, positions=2050, context=2048, embed_dim=512,
        final_norm=False, source=_OPT.format("opt-350m"),
    )  # fmt: skip
    for name, *shape in _BLOOM_SHAPES:
        original = "bloom" if name == "bloom-176b" else name
        yield _gpt(
            name, *shape, vocab=250880, context=2048, embed_norm=True,
            source=_BLOOM.format(original),
        )  # fmt: skip
    for name, layers, hidden, heads, kv_heads, ffn, vocab, context, source in _LLAMA_SHAPES:
        yield _gpt(
            name, layers, hidden, heads, vocab=vocab, kv_heads=kv_heads, ffn=ffn, context=context,
            gated=True, rms_norm=True, bias=False, tied=False, source=source,
        )  # fmt: skip
    for name, layers, hidden, heads, d_kv, ffn, gated, source in _T5_SHAPES:
        yield _gpt(
            name, layers, hidden, heads, vocab=32128, head_dim=d_kv, ffn=ffn, context=512,
            gated=gated, rms_norm=True, bias=False, has_head=False, cross_layers=layers // 2,
            relative_buckets=32, source=source.format(name),
        )  # fmt: skip
    for name, *shape in _MEGATRON_SHAPES:
        yield _gpt(name, *shape, vocab=51200, positions=2048, final_norm=False, source=_MEGATRON)


def _gpt(name: str, layers: int, hidden: int, heads: int, **fields: object) -> ModelSpec:
    """A shape from a row of the tables above."""
    return ModelSpec(name=name, layers=layers, hidden=hidden, heads=heads, **fields)


MODELS: dict[str, ModelSpec] = {spec.name: spec for spec in _models()}
"""Model presets by name."""


def get_model(name: str) -> ModelSpec:
    """A model preset, whatever the case and punctuation of its name.

    Parameters
    ----------
    name : str
        Such as ``llama-2-70b`` or ``GPT-3 175B``; of names joined by `` / `` any will do.

    Returns
    -------
    ModelSpec

    Raises
    ------
    UsageError
        For an unknown name, with the nearest ones.
    """
    for part in str(name).split("/"):
        plain = _plain(part)
        found = MODELS.get(_ALIASES.get(plain, plain))
        if found is not None:
            return found
    raise name_error("model", name, [*MODELS, *_ALIASES])


def _plain(name: str) -> str:
    """Small letters and single dashes: ``"GPT-3 175B (x)"`` becomes ``"gpt-3-175b-x"``."""
    return re.sub(r"[^a-z0-9.]+", "-", name.strip().casefold()).strip("-")


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes
    ----------
    name : str
        What it is called on the command line.
    memory_bytes : int
        All of it, as the driver reports it where that is known.
    memory_bytes_per_s : float
        Of its own memory.
    flops_per_s : float
        Peak of dense 16-bit matrix products.
    link_bytes_per_s : float
        Sent by one device to others in its node, one direction.
    network_bytes_per_s : float
        Sent by one device to other nodes, one direction, as such nodes are usually built.
    per_node : int
        Devices in such a node.
    source : str
        Where these figures are published.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    per_node: int
    source: str


_MIB, _GIB = 2**20, 2**30
_SMI = "total memory of nvidia-smi as listed in modal-labs/modal-client pull request 2797"

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            "v100-32gb", int(31.74 * _GIB), 900e9, 125e12, 150e9, 6.25e9, 16,
            "NVIDIA V100 datasheet (SXM2); DGX-2: 16 devices, 800 Gb/s a node (arXiv:1910.02054, "
            "Sec. 10.1); 31.74 GiB total capacity in NVIDIA/Megatron-LM issue 525",
        ),
        Device(
            "t4-16gb", 15360 * _MIB, 320e9, 65e12, 15.75e9, 3.125e9, 4,
            f"NVIDIA T4 datasheet (PCIe 3.0 x16); {_SMI}; 25 Gb/s a device assumed",
        ),
        Device(
            "l4-24gb", 23034 * _MIB, 300e9, 121e12, 31.5e9, 3.125e9, 8,
            f"NVIDIA L4 datasheet (PCIe 4.0 x16, dense); {_SMI}; 25 Gb/s a device assumed",
        ),
        Device(
            "a10-24gb", 23028 * _MIB, 600e9, 125e12, 31.5e9, 3.125e9, 8,
            f"NVIDIA A10 datasheet (PCIe 4.0 x16, dense); {_SMI}; 25 Gb/s a device assumed",
        ),
        Device(
            "l40s-48gb", 46068 * _MIB, 864e9, 362e12, 31.5e9, 12.5e9, 8,
            f"NVIDIA L40S datasheet (PCIe 4.0 x16, dense); {_SMI}; 100 Gb/s a device assumed",
        ),
        Device(
            "a100-40gb", 40960 * _MIB, 1555e9, 312e12, 300e9, 25e9, 8,
            f"NVIDIA A100 datasheet (SXM4); {_SMI}; DGX A100: 200 Gb/s a device",
        ),
        Device(
            "a100-80gb", 81920 * _MIB, 2039e9, 312e12, 300e9, 25e9, 8,
            f"NVIDIA A100 datasheet (SXM4); {_SMI}; DGX A100: 200 Gb/s a device",
        ),
        Device(
            "h100-80gb", 81559 * _MIB, 3350e9, 989e12, 450e9, 50e9, 8,
            f"NVIDIA H100 datasheet (SXM5, dense); {_SMI}; DGX H100: 400 Gb/s a device",
        ),
        Device(
            "h200-141gb", 141 * 10**9, 4800e9, 989e12, 450e9, 50e9, 8,
            "NVIDIA H200 datasheet (141 GB, dense), also allenai/open-instruct pull request 1441; "
            "400 Gb/s a device",
        ),
        Device(
            "b200-180gb", int(178.35 * _GIB), 7672e9, 2250e12, 900e9, 50e9, 8,
            "NVIDIA Blackwell datasheet (HGX B200, dense); memory as measured in pytorch/ao pull "
            "request 4002; 400 Gb/s a device",
        ),
        Device(
            "mi300x-192gb", 201310208 * 1024, 5300e9, 1307e12, 448e9, 50e9, 8,
            "AMD Instinct MI300X datasheet (dense, 7 links of 64 GB/s); memory pool of rocminfo in "
            "ROCm issue 4414; 400 Gb/s a device",
        ),
    )
}  # fmt: skip
"""Hardware presets by name."""

DEVICES["v100-paper"] = Device(
    "v100-paper", 32 * 10**9, 900e9, 125e12, 150e9, 6.25e9, 16,
    "arXiv:1910.02054, Table 1 and 2: a V100 counted as 32 GB = 32e9 bytes; Sec. 10.1: DGX-2",
)  # fmt: skip


def get_device(name: str) -> Device:
    """A hardware preset by name, in any case.

    Parameters
    ----------
    name : str
        Such as ``a100-80gb``; ``a100`` is the largest of that name.

    Returns
    -------
    Device

    Raises
    ------
    UsageError
        For an unknown name, with the nearest ones.
    """
    plain = _plain(name)
    found = [device for key, device in DEVICES.items() if key == plain]
    found = found or [
        device
        for key, device in DEVICES.items()
        if key.split("-")[0] == plain and "paper" not in key
    ]
    if not found:
        raise name_error("device", name, DEVICES)
    return max(found, key=lambda device: device.memory_bytes)
