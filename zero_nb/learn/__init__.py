"""What helps a learner: a guess before the truth, answers that are checked, a score of one's own.

A notebook needs no more than ``from zero_nb.learn import check, hint, score_card, quiz``. The
exercises of notebook NN are in ``exercises_NN.py``.
"""

from zero_nb.learn.checking import check, hint, reset_score, score_card
from zero_nb.learn.diff import show_diff
from zero_nb.learn.exercise import FunctionExercise, RankExercise, ValueExercise, Wrong
from zero_nb.learn.limits import NotYet, traced_peak
from zero_nb.learn.predict import Mistake, Prediction, compare_guess, reveal
from zero_nb.learn.questions import posttest, pretest, quiz
from zero_nb.learn.ranks import Receive, Send, run_ranks
from zero_nb.learn.words import glossary, glossary_terms, term

__all__ = [
    "FunctionExercise",
    "Mistake",
    "NotYet",
    "Prediction",
    "RankExercise",
    "Receive",
    "Send",
    "ValueExercise",
    "Wrong",
    "check",
    "compare_guess",
    "glossary",
    "glossary_terms",
    "hint",
    "posttest",
    "pretest",
    "quiz",
    "reset_score",
    "reveal",
    "run_ranks",
    "score_card",
    "show_diff",
    "term",
    "traced_peak",
]
