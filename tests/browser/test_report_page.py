"""The report in a real headless Chromium: it opens, shows, filters, searches, fetches nothing."""

import json
import os

import pytest
from playwright.sync_api import expect, sync_playwright
from written_runs import EVIL, write_run

from rl2.report.page import write_page

EXAMPLES = [
    {"role": "system", "content": "Calculate."},
    {"role": "user", "content": "What is 1 x 1?"},
    {"role": "assistant", "content": "An example: 1"},
]


def write_evaluations(folder):
    """Two evaluations of 20 questions, with examples before each and two equal answers."""
    for step in (0, 30):
        records = []
        for number in range(20):
            right = float(number >= 3 if step == 0 else number not in (3, 4))
            question = {"role": "user", "content": f"What is {number} x 2?"}
            answer = {"role": "assistant", "content": f"step {step} says {right}"}
            record = {"group": number, "row": {"answer": 2 * number}, "reward": right}
            messages = [*EXAMPLES, question, answer]
            records += [record | {"num_turns": 1, "messages": messages}] * 2
        path = folder / f"rollouts/test/step_{step}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


def add_warnings(folder):
    """Steps 7 and 9 taught nothing, and all from 10 on had most answers cut."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    for i, line in enumerate(lines):
        warnings = {"taught nothing": f"the reason {EVIL}"} if i in (6, 8) else {}
        warnings |= {"had most answers cut": "too long"} if i >= 9 else {}
        lines[i] = json.dumps(json.loads(line) | {"warnings": warnings})
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The addresses of a report of one run, of two, of a run without rollouts, and of an evaluated
    one with warnings.
    """
    folder = tmp_path_factory.mktemp("pages")
    first = write_run(folder / "first", num_steps=30, num_groups=4)
    path = first / "rollouts/train/step_30.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[0]["messages"][-1]["content"] = f"{EVIL} needle"
    records[1]["messages"][-1]["content"] = "long " * 1000 + "haystack"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    second = write_run(folder / "second", num_steps=20, num_groups=2, lr=3e-6)
    sft = folder / "sft"
    sft.mkdir()
    (sft / "metrics.jsonl").write_text('{"step": 1, "actor/loss": 0.5}\n{"step": 2, "act')
    tested = write_run(folder / "tested", num_steps=30, num_groups=1)
    write_evaluations(tested)
    add_warnings(tested)
    runs = {"one": [first], "two": [first, second], "sft": [sft], "tested": [tested]}
    for name, folders in runs.items():
        write_page(folders, folder / f"{name}.html")
    return {name: (folder / f"{name}.html").as_uri() for name in runs}


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        # Root has no sandbox, and the page is ours.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, pages):
    """Opens a report. At the end there was no error, and no request but for the file."""
    opened, problems = [], []

    def open_it(name, **options):
        page = browser.new_page(**options)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url))
        page.goto(pages[name])
        opened.append((page, pages[name]))
        return page

    yield open_it
    assert problems == [address for _, address in opened]
    for page, _ in opened:
        assert page.evaluate("window.isEvil") is None
        page.close()


def unfold(page, selector):
    """Opens folds and waits for what they make when they open."""
    page.locator(selector).evaluate_all("""folds => Promise.all(
        folds.filter(fold => !fold.open).map(fold => new Promise(done => {
            fold.addEventListener("toggle", done, { once: true });
            fold.open = true;
        }))
    )""")


def test_the_curves_of_one_run_are_drawn(open_page):
    page = open_page("one")
    assert not page.locator("figure", has_text="memory/peak_gib").is_visible()
    unfold(page, "#details details")
    assert page.title() == "first" and not page.locator("#warnings").is_visible()
    reward = page.locator("figure", has_text="reward/mean").first
    assert reward.locator("path:not(.grid)").count() == 1
    tested = page.locator("figure", has_text="test/avg@4")
    # A line, and an error bar and a dot of each of seven evaluations.
    assert tested.locator("path:not(.grid)").count() == 15
    assert tested.is_visible() and page.locator("#headlines figure").count() == 2
    assert page.locator("figure", has_text="rollout/teaching").count() == 1
    lefts = page.locator("svg text").evaluate_all("texts => texts.map(t => t.getBBox().x)")
    assert len(lefts) > 100 and min(lefts) >= 0  # no sign is cut off
    assert "30 lines of metrics" in page.locator("#notes").inner_text()
    assert page.locator("figure", has_text="actor/lr").is_visible()
    assert page.locator("svg:not([aria-label])").count() == 0


def axis_of(figure):
    """The numbers at the left of a chart."""
    texts = figure.locator("svg text[text-anchor=end]").all_text_contents()
    return [float(text) for text in texts]


def test_axes_have_0_and_those_of_shares_reach_1(open_page):
    page = open_page("one")
    unfold(page, "#details details")
    memory = page.locator("figure", has_text="memory/peak_gib")
    assert min(axis_of(memory)) == 0
    share = page.locator("figure", has_text="test/avg@4")
    assert (min(axis_of(share)), max(axis_of(share))) == (0, 1)
    page.select_option("#axes", "fitted")
    assert min(axis_of(memory)) > 3 and "without 0" in memory.inner_text()


def test_warnings_have_their_steps_and_messages_before_a_question_are_folded(open_page):
    page = open_page("tested")
    [nothing, cut] = page.locator("#warnings li").all_inner_texts()
    assert nothing.startswith(f"step 7 taught nothing: the reason {EVIL}")
    assert nothing.endswith("2 of 30 steps, 7 to 9")
    assert cut.startswith("step 10 had most answers cut: too long")
    assert cut.endswith("21 of 30 steps, 10 to 30")
    page.select_option("#split", "test")
    group = page.locator("#groups > article").first
    example = group.get_by_text("An example: 1")
    assert not example.is_visible() and "What is" in group.inner_text()
    group.locator("summary", has_text="3 messages before").click()
    expect(example).to_be_visible()


def test_values_are_at_the_pointer_and_curves_can_be_smooth(open_page):
    page = open_page("one")
    reward = page.locator("figure", has_text="reward/mean").first
    box = reward.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 50)
    assert "step 27:" in reward.inner_text()
    page.mouse.move(0, 0)
    assert "step 27:" not in reward.inner_text()
    page.locator("summary", has_text="Others").focus()
    page.keyboard.press("Enter")
    page.locator("figure", has_text="actor/lr").wait_for(timeout=5000)
    page.select_option("#smoothing", "5")  # draws the curves again
    assert page.locator("figure", has_text="actor/lr").is_visible(), "the fold is closed again"
    assert page.locator("figure", has_text="reward/mean").first.locator("path.faint").count() == 1


def test_two_runs_are_laid_over_each_other_and_their_configs_compared(open_page):
    page = open_page("two")
    assert page.title() == "first, second"
    reward = page.locator("figure", has_text="reward/mean").first
    assert reward.locator("path:not(.grid):not(.dot)").count() == 2
    unfold(page, "#details details")
    differences = page.locator("#config details", has_text="runs differ").inner_text()
    assert "actor.lr\t1e-06\t3e-06" in differences
    assert "save_dir" not in differences and "versions" not in differences
    page.select_option("#run", label="second")
    title = page.locator("#groups h3").first.inner_text()
    assert title.startswith("step 20, group") and title.endswith(": 8 answers")


def test_answers_stand_in_groups_with_reward_and_the_row_s_answer(open_page):
    page = open_page("one")
    assert page.locator("#groups h3").count() == 4 and page.locator(".card").count() == 32
    card = page.locator(".card").first
    assert "right 1" in card.inner_text()
    group = page.locator("#groups > article").first.inner_text()
    assert group.count("row's answer") == group.count("What is 7 x") == 1
    tool = card.locator("details", has_text="tool")
    assert not tool.locator("pre").is_visible()
    tool.locator("summary").click()
    expect(tool.locator("pre")).to_be_visible()
    folded = page.locator("details", has_text="haystack")
    assert folded.count() == 1 and not folded.locator("pre").is_visible()
    page.select_option("#step", "2")
    assert page.locator("#groups h3").first.inner_text().startswith("step 2,")


def rewards(page):
    return [float(text) for text in page.locator(".card header b").all_inner_texts()]


def test_the_best_and_the_worst_come_first(open_page):
    page = open_page("one")
    page.select_option("#step", "all")
    page.select_option("#order", "best")
    best = rewards(page)
    firsts = best[::8]  # the best answer of each group
    assert firsts == sorted(firsts, reverse=True) and len(best) == 48
    groups = page.locator("#groups h3").all_inner_texts()
    assert len(groups) == len({group.partition(":")[0] for group in groups})
    page.locator("#more").click()
    assert len(rewards(page)) == 96
    page.select_option("#order", "worst")
    lasts = rewards(page)[7::8]
    assert lasts == sorted(lasts) and lasts[0] < firsts[0]


def test_answers_are_searched(open_page):
    page = open_page("one")
    cut = page.locator(".card .tag.bad", has_text="length").count()
    assert 0 < cut < page.locator(".card").count() == 32
    page.fill("#text-search", "NEEDLE")
    assert page.locator(".card").count() == 1
    assert page.locator("mark").inner_text() == "needle"
    assert EVIL in page.locator(".card").inner_text()
    page.fill("#text-search", "haystack")  # a folded turn opens
    expect(page.locator("mark")).to_be_visible()
    page.fill("#text-search", "nowhere to be seen")
    assert page.locator(".card").count() == 0
    assert "0 answers selected" in page.locator("#answer-note").inner_text()


@pytest.mark.parametrize("name", ["one", "two", "tested"])
def test_a_phone_does_not_scroll_sideways(open_page, name):
    page = open_page(name, viewport={"width": 390, "height": 844}, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    unfold(page, "details")
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_run_without_rollouts_has_curves_alone(open_page):
    page = open_page("sft")
    assert not page.locator("#answers").is_visible()
    assert page.locator("figure", has_text="actor/loss").is_visible()
    assert "1 line could not be read" in page.locator("#notes").inner_text()


def test_dark_and_print(open_page):
    page = open_page("one", color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(20, 23, 26)"
    page.emulate_media(media="print")
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    assert not page.locator(".controls").first.is_visible()
    adjust = "getComputedStyle(document.querySelector('.card')).printColorAdjust"
    assert page.evaluate(adjust) == "exact"  # or the runs lose their colours
