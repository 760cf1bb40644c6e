"""The bank of questions: complete, right by computation, and readable in every form."""

import re
from html.parser import HTMLParser

import pytest

from zero_nb.config import UsageError
from zero_nb.learn import questions
from zero_nb.learn.questions import (
    FORMS,
    PRETEST,
    bank,
    entries,
    gift,
    misconceptions,
    posttest,
    pretest,
    quiz,
    select,
    sheet,
    teachers_edition,
)
from zero_nb.learn.words import glossary_terms

ENTRIES = entries()
IDS = [entry["id"] for entry in ENTRIES]
NOTEBOOKS = sorted({question.notebook for question in bank()})
CODES = {f"M{number}" for number in range(1, 28)}


def test_ids_are_unique_and_begin_with_their_notebook():
    assert len(set(IDS)) == len(IDS)
    for entry in ENTRIES:
        assert entry["id"].startswith(f"{entry['notebook']}-q")
        assert entry["code"] in CODES


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_quiz_is_short(notebook):
    count = len(quiz(notebook).questions)
    assert count == 6 if notebook == PRETEST else 2 <= count <= 5


@pytest.mark.parametrize("entry", ENTRIES, ids=IDS)
def test_a_question_has_one_right_option_and_feedback_for_each(entry):
    assert sum(option.get("right") is True for option in entry["options"]) == 1
    assert 3 <= len(entry["options"]) <= 5
    for option in entry["options"]:
        assert set(option) <= {"text", "right", "feedback"}
    assert set(entry["forms"]) == set(FORMS)
    assert ("source" in entry) == (entry["notebook"] == PRETEST)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entry", ENTRIES, ids=IDS)
def test_the_numbers_of_a_form_are_right(entry, form):
    numbers = dict(entry["forms"][form])
    allowed = {"abs": abs, "round": round, "min": min, "max": max, "sum": sum, "range": range}
    allowed["len"] = len
    assert eval(entry["truth"], {"__builtins__": {}, **allowed}, numbers) is True


@pytest.mark.parametrize("entry", ENTRIES, ids=IDS)
def test_the_forms_are_parallel_and_differ(entry):
    forms = [entry["forms"][form] for form in FORMS]
    assert set(forms[0]) == set(forms[1]) == set(forms[2])
    shown = [q for q in bank() if q.name == entry["id"]]
    assert len({q.stem + "".join(sorted(o.text for o in q.options)) for q in shown}) == 3


@pytest.mark.parametrize("question", bank(), ids=lambda q: f"{q.name}{q.form}")
def test_options_can_be_told_apart_and_nothing_is_left_to_fill_in(question):
    texts = [option.text for option in question.options]
    assert len(set(texts)) == len(texts)
    for option in question.options:
        assert len(option.feedback) > 20
        assert option.feedback.endswith((".", "?", "!"))
    for text in (question.stem, *texts, *(option.feedback for option in question.options)):
        assert not re.search(r"[{}]", text)
        assert "  " not in text
    assert question.options["abcdefgh".index(question.letter)].right


def test_the_right_option_is_not_always_at_one_place():
    letters = {question.letter for question in bank()}
    assert letters >= {"a", "b", "c"}


# --------------------------------------------------------------------------------- how it is shown


class Page(HTMLParser):
    """Counts tags and sees that they are closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page(html):
    reader = Page()
    reader.feed(html)
    assert reader.open == []
    return reader.seen


@pytest.mark.parametrize("notebook", [name for name in NOTEBOOKS if name != PRETEST])
def test_in_a_notebook_each_option_opens_to_its_feedback(notebook):
    shown = quiz(notebook)
    options = sum(len(question.options) for question in shown.questions)
    tags = page(shown._repr_html_())
    assert tags.count("details") == tags.count("summary") == options
    assert shown._repr_html_().count("<strong>Right.</strong>") == len(shown.questions)
    assert "Right" not in repr(shown)
    for question in shown.questions:
        assert question.stem in repr(shown)


def test_words_of_the_glossary_say_what_they_mean():
    html = quiz("00")._repr_html_()
    assert f'title="{glossary_terms()["rank"].text}"' in html


def test_the_test_is_folded_and_gives_nothing_away():
    shown = pretest("A")
    tags = page(shown._repr_html_())
    assert tags.count("details") == 1
    assert "Right" not in shown._repr_html_()
    assert repr(shown).startswith("Test, form A: 6 questions.\n1. ")


def letters(form="A"):
    return "".join(q.letter for q in bank() if q.notebook == PRETEST and q.form == form)


def test_the_test_says_how_many_and_where_to_read_on():
    assert repr(pretest("A", letters())) == "6 of 6 right."
    assert repr(pretest("A", f" {letters().upper()} ")) == "6 of 6 right."
    wrong_first = "abc".replace(letters()[0], "")[0] + letters()[1:]
    said = repr(pretest("A", wrong_first))
    assert said == "5 of 6 right. The notebooks that answer the others: 00."
    assert letters("B") != letters("A")


@pytest.mark.parametrize(
    "answers", ["", "abc", "abcabcabc", "zzzzzz", "123456", 3, ["a"] * 6, b"a"]
)
def test_what_is_no_answer_is_explained_and_never_raises(answers):
    assert repr(pretest("A", answers)) == "Write 6 letters, one for each question, such as abcdab."


def test_an_unknown_notebook_or_form_is_refused():
    with pytest.raises(UsageError, match="no questions for '99'; there are some for 00"):
        quiz("99")
    with pytest.raises(UsageError, match="there is no form 'D'; choose one of A, B, C"):
        quiz("00", "D")


def test_an_incomplete_entry_is_named():
    entry = dict(ENTRIES[0])
    with pytest.raises(ValueError, match=f"{entry['id']} needs the forms A, B, C"):
        list(questions._questions(entry | {"forms": {"A": {}}}))
    with pytest.raises(ValueError, match=f"{entry['id']}: not every form has a number 'gap'"):
        list(questions._questions(entry | {"stem": "{gap}"}))


# -------------------------------------------------------------------------------- Moodle and paper


def read_gift(text):
    """A reader of the part of GIFT that we write: by name, stem and (sign, text, feedback)."""
    found = {}
    pattern = r"::((?:\\.|[^:\\])*)::((?:\\.|[^{\\])*)\{((?:\\.|[^}\\])*)\}"
    for name, stem, body in re.findall(pattern, text, re.S):
        options = re.findall(r"([=~])((?:\\.|[^=~#\\])*)#((?:\\.|[^=~#\\])*)", body, re.S)
        plain = [tuple(re.sub(r"\\(.)", r"\1", part).strip() for part in o) for o in options]
        found[name.strip()] = (re.sub(r"\\(.)", r"\1", stem).strip(), plain)
    return found


def test_gift_says_what_the_bank_says():
    found = read_gift(gift())
    assert len(found) == len(bank()) == 3 * len(ENTRIES)
    for question in bank():
        stem, options = found[f"{question.name} {question.form}"]
        assert stem == question.stem
        assert options == [
            ("=" if option.right else "~", option.text, option.feedback)
            for option in question.options
        ]
    for notebook in NOTEBOOKS:
        assert f"$CATEGORY: zero-nb/{notebook}\n" in gift()


def test_on_paper_there_are_boxes_and_no_key():
    chosen = questions.select("00", "B")
    text = sheet(chosen)
    assert text.startswith("Notebook 00, form B\n\n1. ")
    assert text.count("[ ]") == sum(len(q.options) for q in chosen)
    assert "right" not in text.lower().replace(" right ", "")


def read_edition(text):
    """A reader of the teacher's edition: by part, the key and (stem, code, options)."""
    found = {}
    for part in re.split(r"^## ", text, flags=re.M)[1:-1]:
        title, key, *_ = part.split("\n\n")
        items = re.findall(r"^\*\*(\d+)\.\*\* (.*)\n\*\((M\d+).*\)\*\n\n((?:- .*\n)+)", part, re.M)
        letters = dict(pair.split() for pair in key.removeprefix("Key: ").split(" · "))
        found[title] = (letters, {number: rest for number, *rest in items})
    return found


def test_the_teachers_edition_has_every_key_and_the_line_for_each_option():
    text = teachers_edition(bank())
    found = read_edition(text)
    assert len(found) == len(FORMS) * len(NOTEBOOKS)
    assert text.startswith("# Questions with their keys\n")
    for notebook in NOTEBOOKS:
        for form in FORMS:
            title = f"{'Test' if notebook == PRETEST else f'Notebook {notebook}'}, form {form}"
            title += {"A": ", for before the course", "B": ", for after the course"}.get(
                form if notebook == PRETEST else "", ""
            )
            letters, items = found[title]
            asked = sorted(select(notebook, form), key=lambda q: q.name)
            assert len(items) == len(letters) == len(asked)
            for number, question in enumerate(asked, 1):
                stem, code, options = items[str(number)]
                assert (stem, code) == (question.stem, question.code)
                assert letters[str(number)] == question.letter
                assert options.splitlines() == [
                    f"- {letter}) "
                    + (f"**{option.text}** (right)" if option.right else option.text)
                    + f": *{option.feedback}*"
                    for letter, option in zip("abcdefgh", question.options, strict=False)
                ]


def test_the_teachers_edition_has_the_letters_of_the_sheet():
    chosen = select("05", "C")
    letters = re.search("^Key: (.*)$", teachers_edition(chosen), re.M)[1]
    printed = sheet(chosen)
    for pair, question in zip(letters.split(" · "), chosen, strict=True):
        number, letter = pair.split()
        after = printed.split(f"{number}. {question.stem}")[1]
        right = next(option.text for option in question.options if option.right)
        assert re.search(rf"^   \[ \] {letter}\) (.*)$", after, re.M)[1] == right


def test_each_code_has_a_sentence_and_the_edition_lists_those_asked():
    assert set(misconceptions()) == CODES
    text = teachers_edition(select("05"))
    listed = set(re.findall(r"^- (M\d+): ", text, re.M))
    assert listed == {question.code for question in select("05")}
    assert f"- M17: {misconceptions()['M17']}\n" in text


# ------------------------------------------------------------------------ before and after a course


def test_the_tests_before_and_after_are_parallel_and_have_other_answers():
    forms = [select(PRETEST, form) for form in FORMS]
    for items in zip(*forms, strict=True):
        assert len({(q.name, q.code, q.source, len(q.options)) for q in items}) == 1
        # The same words, with other numbers in them.
        assert len({re.sub(r"[\d.,]+", "#", q.stem) for q in items}) == 1
        texts = [{re.sub(r"[\d.,]+", "#", o.text): o for o in q.options} for q in items]
        right = [next(o.text for o in q.options if o.right) for q in items]
        assert len(set(right)) == len(FORMS), items[0].name
        assert set(texts[0]) == set(texts[1]) == set(texts[2])
    assert len({letters(form) for form in FORMS}) == len(FORMS)


def test_the_test_after_the_course_is_form_b():
    assert repr(posttest()) == repr(pretest("B"))
    assert repr(posttest(answers=letters("B"))) == "6 of 6 right."
    assert repr(posttest("C", letters("C"))) == "6 of 6 right."
    # Who only remembers the letters of form A does not pass.
    assert not repr(posttest(answers=letters("A"))).startswith("6 of 6")
    assert repr(posttest(answers=17)).startswith("Write 6 letters")
