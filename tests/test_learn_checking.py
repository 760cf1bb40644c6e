"""Verdicts, hints, score cards and the learner's own record."""

import json

import numpy as np
import pytest

from zero_nb.config import UsageError
from zero_nb.learn import checking, session
from zero_nb.learn.checking import Verdict, check, hint, judge, reset_score, score_card
from zero_nb.learn.exercise import FunctionExercise, RankExercise, ValueExercise, Wrong, is_stub
from zero_nb.learn.limits import NotYet
from zero_nb.learn.predict import compare_guess
from zero_nb.learn.ranks import Receive, Send
from zero_nb.learn.session import SESSION, read_record

HINTS = ("Where to look.", "How to begin.", "Nearly the answer.")


def double(values, factor):
    return values * factor


def half(values, factor):
    return values / factor


def cases(rng):
    drawn = rng.integers(1, 9, 5).astype(np.float32)
    return [(np.arange(3, dtype=np.float32), 2), (drawn, 3)]


DOUBLE = FunctionExercise(
    title="Multiply",
    core=True,
    solution=double,
    cases=cases,
    wrong={"half": Wrong(half, "you divided")},
    hints=HINTS,
)


def verdict(answer, exercise=DOUBLE, **options):
    return judge("99-a", exercise, answer, **options)


def text(answer, exercise=DOUBLE):
    said = verdict(answer, exercise)
    assert said.status == "not yet"
    return said.text


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """A session and a record of their own, with one exercise more."""
    monkeypatch.setenv("ZERO_NB_SCORE", str(tmp_path / "score.json"))
    fresh = session.Session()
    for module in (checking, session):
        monkeypatch.setattr(module, "SESSION", fresh)
    monkeypatch.setattr("zero_nb.learn.predict.SESSION", fresh)
    monkeypatch.setattr("zero_nb.learn.diff.SESSION", fresh)
    real = checking.find_exercise
    monkeypatch.setattr(
        checking, "find_exercise", lambda key: DOUBLE if key == "99-a" else real(key)
    )
    monkeypatch.setattr(checking, "keys_of", lambda notebook: ["00-a", "99-a"])
    return tmp_path / "score.json"


# --------------------------------------------------------------------------------- what is said


def test_the_three_outcomes_in_words():
    assert repr(verdict(double)) == "99-a passed: Multiply."
    assert repr(verdict(...)) == (
        "99-a not attempted: put your answer in the place of the three dots, then run this again."
    )
    assert repr(verdict(half)) == "99-a not yet: You divided. Stuck? Run hint('99-a')."
    assert verdict(double).passed
    assert not verdict(half).passed


def test_the_sign_is_not_all_that_tells_them_apart():
    page = verdict(lambda values, factor: "<b>")._repr_html_()
    assert "99-a not yet</strong>" in page
    assert 'aria-hidden="true"' in page
    assert "<b>" not in page


def test_the_first_case_that_differs_is_told_with_what_was_given():
    def off_by_one(values, factor):
        return values * factor + (factor == 3)

    assert text(off_by_one).startswith("off_by_one(values=[")
    assert "factor=3): the result is [" in text(off_by_one)
    assert "factor=2" not in text(off_by_one)


def test_an_error_is_told_with_its_line():
    def broken(values, factor):
        total = values.sum()
        return total / (factor - factor)

    with np.errstate(all="raise"):
        said = text(broken)
    assert "raised" in said or "result is" in said

    def named(values, factor):
        return values * faktor  # noqa: F821

    said = text(named)
    assert "raised NameError: name 'faktor' is not defined" in said
    assert "in the line: return values * faktor" in said


def test_a_forgotten_return_is_told_apart_from_a_body_that_is_missing():
    def forgot(values, factor):
        values * factor

    assert "returned None; is a return missing?" in text(forgot)

    def left_alone(values, factor): ...

    assert verdict(left_alone).status == "not attempted"


def test_a_value_in_the_place_of_a_function():
    assert "not a function; give the function itself" in text(np.ones(3))


def test_an_argument_that_was_changed_is_told_by_name():
    def in_place(values, factor):
        values *= factor
        return values

    assert "in_place changed its argument values; work on a copy" in text(in_place)


def test_what_may_be_changed_may_be_changed():
    exercise = FunctionExercise(
        title="Multiply",
        solution=double,
        cases=cases,
        wrong={},
        hints=HINTS,
        may_change=(0,),
    )

    def in_place(values, factor):
        values *= factor
        return values

    assert verdict(in_place, exercise).passed


def test_right_with_the_dots_still_there_is_right():
    def dotted(values, factor):
        ...  # noqa: PIE790
        return values * factor

    assert verdict(dotted).passed


def test_a_trial_may_say_what_it_saw():
    def trial(function, values, factor):
        if function(values, factor).sum() == 0:
            raise NotYet("all of it is zero")
        return function(values, factor)

    exercise = FunctionExercise(
        title="Multiply", solution=double, cases=cases, wrong={}, hints=HINTS, trial=trial
    )
    assert text(lambda values, factor: values * 0, exercise).startswith("All of it is zero.")


def test_other_seeds_draw_other_cases():
    seen = []

    def watching(values, factor):
        seen.append(values.tolist())
        return values * factor

    for seed in (0, 0, 1):
        assert verdict(watching, seed=seed).passed
    assert seen[1] == seen[3] != seen[5]


@pytest.mark.parametrize(
    ("source", "stub"),
    [
        ("def f(x): ...", True),
        ("def f(x): pass", True),
        ("def f(x):\n    'what'\n    ...", True),
        ("def f(x):\n    return", True),
        ("def f(x):\n    return 1", False),
        ("def f(x):\n    x = 1", False),
        ("def f(x):\n    return x[..., 0]", False),
    ],
)
def test_a_stub_is_known_without_its_source(source, stub):
    space = {}
    exec(source, space)
    assert is_stub(space["f"]) is stub


# --------------------------------------------------------------------------------------- values


def value(solution, **more):
    return ValueExercise(title="Find", solution=solution, wrong={}, hints=HINTS, **more)


@pytest.mark.parametrize(
    ("solution", "right", "wrong", "said"),
    [
        (16, 16.0, 15, "15 is too low"),
        (16, np.int64(16), 17.5, "17.5 is too high"),
        (16, 16, True, "Expected a number, this is of type bool"),
        (16, 16, "16", "Expected a number, this is of type str"),
        ("bucket", "bucket", "optim", "'optim' does not fit"),
        (("a", "b", "c"), ["a", "b", "c"], ("b", "a", "c"), "1 of 3 are in their place"),
        (("a", "b"), ["a", "b"], "ab", "Expected 2 entries in a list"),
        (("a", "b"), ["a", "b"], ["a"], "Expected 2 entries, there are 1"),
        ((1, 2), np.array([1, 2]), (1, 3), "1 of 2 are right; entry 1: 3 is too high"),
        ({"x": 1}, {"x": 1}, {}, "The key 'x' is missing"),
        ({"x": 1}, {"x": 1}, [1], "Expected a dict with the keys x"),
        ({"x": 1, "y": "b"}, {"x": 1, "y": "b"}, {"x": 1, "y": "c"}, "1 of 2 are right; y: 'c'"),
        ({"x": 1}, {"x": 1}, {"x": 1, "z": 2}, "There are keys that were not asked for"),
    ],
)  # fmt: skip
def test_a_value_is_judged_without_telling_the_truth(solution, right, wrong, said):
    exercise = value(solution)
    assert verdict(right, exercise).passed
    assert text(wrong, exercise).startswith(said)


def test_a_number_may_be_near_and_a_word_is_chosen_from_a_list():
    near = value(111.76, within=0.05, unit=" GiB")
    assert verdict(111.8, near).passed
    assert text(112, near).startswith("112 GiB is too high")
    words = value("bucket", options=("bucket", "optim"))
    assert text("buckets", words).startswith("Choose one of: bucket, optim.")


@pytest.mark.parametrize("answer", [..., None, (1, ...), {"x": ...}, [...]])
def test_a_value_with_dots_in_it_is_not_attempted(answer):
    for solution in (1, (1, 2), {"x": 1}):
        assert verdict(answer, value(solution)).status == "not attempted"


# --------------------------------------------------------------------------- programs for a rank


def shift(rank, world_size, mine):
    received = yield Send((rank + 1) % world_size, mine)
    return received


def shift_back(rank, world_size, mine):
    received = yield Send((rank - 1) % world_size, mine)
    return received


def shift_twice(rank, world_size, mine):
    """Right, and sends more than it has to."""
    received = yield Send((rank + 1) % world_size, mine)
    yield Send(rank, mine)
    return received


SHIFT = RankExercise(
    title="Pass on",
    solution=shift,
    cases=lambda rng: [[np.full(3, rank, np.float32) for rank in range(W)] for W in (1, 3, 4)],
    budget=lambda world_size, numel: (numel, 1),
    wrong={"back": Wrong(shift_back, "you sent to the left")},
    hints=HINTS,
)


def test_a_program_is_judged_by_results_and_budget():
    assert verdict(shift, SHIFT).passed
    assert text(shift_back, SHIFT).startswith("You sent to the left.")
    assert text(shift_twice, SHIFT).startswith(
        "With 1 rank and 3 elements: the results are right, but rank 0 sends 6 elements, and the "
        "budget is 3."
    )


def test_a_program_that_waits_for_ever_is_told_by_rank():
    def waits(rank, world_size, mine):
        if rank == world_size - 1:
            return mine
        received = yield Receive()
        return received

    assert "deadlock" in text(waits, SHIFT)
    assert "rank 0 waits, 0 sent; rank 1 waits, 0 sent; rank 2 has finished" in text(waits, SHIFT)


# ---------------------------------------------------------------------- hints, score, the record


def test_hints_come_one_after_another_and_the_last_stays(clean):
    said = [repr(hint("99-a")) for _ in range(4)]
    assert [line.split(":")[0] for line in said] == [
        "Hint 1 of 3 for 99-a", "Hint 2 of 3 for 99-a", "Hint 3 of 3 for 99-a",
        "Hint 3 of 3 for 99-a",
    ]  # fmt: skip
    assert HINTS[1] in said[1]


def test_the_card_of_a_notebook_shows_this_run_only(clean):
    clean.write_text(json.dumps({"exercises": {"99-a": {"status": "passed", "tries": 1}}}))
    assert repr(score_card("99")).splitlines() == [
        "Notebook 99, in this run: 0 of 2 done.",
        "  00-a  not attempted  Predict the bar of stage 1 (core)",
        "  99-a  not attempted  Multiply (core)",
    ]
    compare_guess("00-a", 30, 40)
    check("99-a", half)
    assert "1 of 2 done" in repr(score_card("99"))
    check("99-a", double)
    card = score_card("99")
    assert repr(card).splitlines()[1:] == [
        "  00-a  guessed        Predict the bar of stage 1 (core)",
        "  99-a  passed         Multiply (core)",
    ]
    assert card.passed == 1
    assert ">Notebook 99, in this run: 2 of 2 done.</caption>" in card._repr_html_()
    assert card._repr_html_().count('scope="row"') == 2


def test_the_record_keeps_the_best_and_counts_tries(clean):
    for answer in (..., half, double, half):
        check("99-a", answer)
    assert read_record() == {"99-a": {"status": "passed", "tries": 3}}
    assert "passed         Multiply" in repr(score_card())
    assert "kept in score.json" in repr(score_card())


def test_the_record_also_knows_of_the_test_and_of_what_is_no_longer_there(clean):
    entry = {"status": "guessed", "tries": 1}
    clean.write_text(json.dumps({"exercises": {"test-A": entry, "98-z": entry}}))
    assert repr(score_card()).splitlines()[1:] == [
        "  98-z  guessed        ",
        "  test-A  guessed        Answer the test",
    ]


def test_the_record_holds_no_answer_no_name_and_no_date(clean):
    check("99-a", double)
    assert json.loads(clean.read_text()) == {
        "version": 1,
        "exercises": {"99-a": {"status": "passed", "tries": 1}},
    }


def test_an_empty_notebook_leaves_no_file(clean):
    check("99-a", ...)
    compare_guess("00-a", ..., 1.0)
    assert not clean.exists()


def test_the_record_can_be_reset(clean):
    check("99-a", double)
    reset_score()
    assert read_record() == {}
    assert "not attempted" in repr(score_card("99"))


@pytest.mark.parametrize(
    "content", ["", "[]", "no json", '{"exercises": 3}', '{"exercises": {"99-a": {}}}', "\x00"]
)
def test_a_damaged_record_is_an_empty_one(clean, content):
    clean.write_text(content)
    assert read_record() == {}
    assert check("99-a", double).passed
    assert list(read_record()) == ["99-a"]


def test_a_place_that_cannot_be_written_to_is_no_reason_to_stop(clean, monkeypatch):
    monkeypatch.setenv("ZERO_NB_SCORE", str(clean.parent / "missing" / "score.json"))
    assert check("99-a", double).passed
    assert "passed" in repr(score_card("99"))
    assert not (clean.parent / "missing").exists()


def test_nothing_is_kept_when_it_is_switched_off(clean, monkeypatch):
    monkeypatch.setenv("ZERO_NB_SCORE", "off")
    assert check("99-a", double).passed
    assert session.record_path() is None
    assert "nothing is kept" in repr(score_card())
    reset_score()


def test_by_default_the_record_lies_beside_the_notebook(clean, monkeypatch, tmp_path):
    monkeypatch.delenv("ZERO_NB_SCORE")
    monkeypatch.chdir(tmp_path)
    check("99-a", double)
    assert [path.name for path in tmp_path.iterdir()] == ["my_score.json"]


def test_tests_do_not_touch_a_learners_record():
    assert session.record_path() is None
    assert isinstance(SESSION, session.Session)


def test_an_unknown_exercise_is_the_notebooks_slip():
    for key in ("99-z", "", "zz", 3):
        with pytest.raises(UsageError, match="there is no exercise"):
            check(key, 1)
    assert isinstance(verdict(double), Verdict)
