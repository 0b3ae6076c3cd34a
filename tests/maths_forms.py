r"""Forms of an answer, right and wrong, that a policy writes: templates times answers.

`gsm8k_cases` and `boxed_cases` give (reply, answer, is_right). The templates in cases/ were written
before the checkers that they judge, from what models write and from what an optimizer would try.
"""

from collections.abc import Iterator

from common import read_cases

Case = tuple[str, str, bool]
# Characters that a template names, since an editor would hide them.
HIDDEN = {
    "z": "\u200b",
    "zero_width": "\u200b",
    "mark": "\ufeff",
    "no_break": "\u00a0",
    "thin": "\u2009",
}


def filled(forms: dict, kind: str, answer: str, values: dict[str, str]) -> Iterator[Case]:
    """The templates of a kind, right and wrong, as cases."""
    for template in forms[f"right_{kind}"]:
        yield template.format(**values), answer, True
    for template in forms[f"wrong_{kind}"]:
        yield template.format(**values), answer, False


def in_form(form: str, entries: list[dict]) -> Iterator[Case]:
    """The right and the wrong fields of some answers, in the form in which a reply has them."""
    for entry in entries:
        for field in entry["right"]:
            yield form.replace("FIELD", field), entry["answer"], True
        for field in entry["wrong"]:
            yield form.replace("FIELD", field), entry["answer"], False


def gsm8k_cases() -> Iterator[Case]:
    forms = read_cases("gsm8k_forms")
    for answer in forms["numbers"]:
        other = str(int(answer) + 1)
        wide = "".join(chr(ord(digit) + 0xFEE0) for digit in answer)
        values = {"n": answer, "m": other, "double": str(2 * int(answer)), "wide": wide}
        for field, _, is_right in filled(forms, "fields", answer, HIDDEN | values):
            yield f"#### {field}", answer, is_right
        yield from filled(forms, "replies", answer, {"f": answer, "other": other})
    yield from in_form("#### FIELD", forms["fields"])


def boxed_cases() -> Iterator[Case]:
    forms = read_cases("boxed_forms")
    for entry in forms["answers"]:
        yield from filled(forms, "boxes", entry["answer"], {**HIDDEN, "a": entry["answer"]})
    yield from in_form(r"\boxed{FIELD}", forms["answers"] + forms["written_after"])
