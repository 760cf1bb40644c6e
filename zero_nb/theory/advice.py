"""A plan in plain words: what decides, and what to try next, each suggestion tried before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from zero_nb.config import UsageError
from zero_nb.theory.activations import LOSSES
from zero_nb.theory.peak import Peak, Run
from zero_nb.theory.setting import Question
from zero_nb.theory.sizes import format_gb_gib

if TYPE_CHECKING:
    from zero_nb.theory.plan import Plan

__all__ = ["advise"]


def advise(answer: Plan, question: Question, run: Run, peak: Peak) -> Iterable[str]:
    """What decides, and what to try next."""
    if question.states_only:
        yield (
            "Model states only, as the paper counts them: activations, logits, buffers, context "
            "and fragmentation come on top"
        )
    else:
        yield _what_decides(answer, peak)
    if answer.device_bytes is None:
        yield "Give the device's memory to learn whether this fits"
        return
    left = answer.left_bytes
    if left >= 0:
        yield f"Fits, with {format_gb_gib(left)} left"
        yield from _if_it_fits(answer, question, run, peak)
    else:
        yield f"Does not fit: {format_gb_gib(-left)} too much"
        yield from _if_it_does_not(answer, question, run)
    yield from _warnings(answer, question, run, peak)


def _what_decides(answer: Plan, peak: Peak) -> str:
    """The largest moment and its largest line."""
    line, size = max(peak.lines.items(), key=lambda pair: pair[1])
    share = size / peak.allocated
    return f"The largest moment is {_article(answer.moment)}; {line} are {share:.0%} of it"


def _article(moment: str) -> str:
    """A moment with its article."""
    return f"the {moment}"


def _if_it_fits(answer: Plan, question: Question, run: Run, peak: Peak) -> Iterable[str]:
    """What the room could be used for."""
    if answer.smallest_stage is not None and answer.smallest_stage < run.stage:
        yield (
            f"Stage {answer.smallest_stage} fits too and is simpler; a higher stage than needed "
            "only saves memory"
        )
    batch = answer.largest_micro_batch
    if batch and batch > run.micro_batch:
        yield f"The micro-batch could grow from {run.micro_batch} to {batch}"
    if not question.states_only and peak.device()[2] > answer.device_bytes:
        yield (
            f"Tight: at the upper end of the range it needs {format_gb_gib(peak.device()[2])}; "
            "expandable segments reduce fragmentation"
        )


def _if_it_does_not(answer: Plan, question: Question, run: Run) -> Iterable[str]:
    """Changes tried one at a time, the ones that fit first."""
    tried = []
    for words, changed in _changes(question, run):
        try:
            total = question.total(changed)
        except UsageError:
            continue
        if total < 0.97 * answer.total_bytes:
            tried.append((not question.fits(total), total, words))
    tried.sort(key=lambda item: item[:2] if not item[0] else (True, item[1]))
    for misses, total, words in tried[:6]:
        verdict = "still too much" if misses else "fits"
        yield f"Try {words}: {format_gb_gib(total)}, {verdict}"
    if answer.smallest_world_size and answer.smallest_world_size > answer.world_size:
        yield f"Stage {run.stage} fits on {answer.smallest_world_size} devices or more"
    elif answer.smallest_world_size is None:
        yield (
            f"No number of devices makes stage {run.stage} fit as it is: what does not fit is not "
            "cut by data parallelism"
        )


def _changes(question: Question, run: Run) -> Iterable[tuple[str, Run]]:
    """One change at a time that could save memory, in words and as a run."""
    for stage in range(run.stage + 1, 4):
        yield f"stage {stage}", replace(run, stage=stage)
    if question.states_only:
        yield "the optimizer on the host", replace(run, offload=run.offload | {"optimizer"})
        return
    if run.recompute != "full":
        yield "full recomputation of activations", replace(run, recompute="full")
    if not run.flash:
        yield "flash attention", replace(run, flash=True)
    if LOSSES[run.loss][0] > LOSSES["chunked"][0]:
        yield "a chunked or fused loss", replace(run, loss="chunked")
    if run.micro_batch > 1:
        yield (
            "micro-batch 1 with accumulation",
            replace(run, micro_batch=1, micro_batches=run.micro_batches * run.micro_batch),
        )
    elif run.seq > 512 and run.sp == 1:
        yield "half the sequence length", replace(run, seq=run.seq // 2)
    if "optimizer" not in run.offload:
        yield "the optimizer on the host", replace(run, offload=run.offload | {"optimizer"})
    together = {"recompute": "full", "loss": "chunked", "stage": 3, "micro_batch": 1}
    yield (
        "stage 3, full recomputation, a chunked loss and micro-batch 1 together",
        replace(run, **together),
    )
    if run.tp == 1 and run.world_size % 8 == 0 and question.spec.heads % 8 == 0:
        yield "tensor parallelism over 8 devices", replace(run, tp=8, sequence_parallel=True)


def _warnings(answer: Plan, question: Question, run: Run, peak: Peak) -> Iterable[str]:
    """What a reader should doubt."""
    if question.states_only:
        return
    if run.framework.gathers == "live" and run.stage == 3:
        gathered = peak.lines.get("gathered units", 0)
        if gathered > 0.15 * peak.allocated:
            yield (
                "Doubt the gathered units: they are the limit of live parameters, which the "
                "framework reaches only if it prefetches that far"
            )
    if question.numel != question.spec.numel:
        shape = question.spec
        yield (
            f"Activations assume GPT-3's proportions ({shape.layers} layers of {shape.hidden}, "
            f"vocabulary {shape.vocab}); give a model or a config for its own"
        )
    if question.spec.cross_layers:
        yield "Activations of an encoder-decoder are counted as a decoder's of as many layers"
    low, high = answer.device_bytes, answer.device_bytes
    if answer.device_bytes % 10**9 == 0:
        high = answer.device_bytes // 10**9 * 2**30
    if low < answer.total_bytes <= high:
        yield (
            f"It would fit if the device has {answer.device_bytes // 10**9} GiB, as devices sold "
            f"as {answer.device_bytes // 10**9} GB do: write GiB then"
        )
