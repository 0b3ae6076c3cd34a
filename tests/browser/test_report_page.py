"""The report in a real headless Chromium: it opens, shows, filters, searches, fetches nothing."""

import json
import os

import pytest
from playwright.sync_api import sync_playwright
from runs import EVIL, save_tokens, write_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl2.report.page import write_page


def make_tokenizer():
    """A token a character."""
    vocab = {character: i for i, character in enumerate(["\n", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The addresses of a report of one run, of two, and of a run without rollouts."""
    folder = tmp_path_factory.mktemp("pages")
    first = write_run(folder / "first", num_steps=30, num_groups=4)
    path = first / "rollouts/train/step_30.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[0]["messages"][-1]["content"] = f"{EVIL} needle"
    records[1]["messages"][-1]["content"] = "long " * 1000 + "haystack"
    middle = sorted(records[8:16], key=lambda record: record["reward"])[4]
    middle["messages"][-1]["content"] = "words that no other answer of its group has"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    save_tokens(first, 29, make_tokenizer())
    second = write_run(folder / "second", num_steps=20, num_groups=2, lr=3e-6, seed=1)
    sft = folder / "sft"
    sft.mkdir()
    (sft / "metrics.jsonl").write_text('{"step": 1, "actor/loss": 0.5}\n{"step": 2, "act')
    runs = {"one": [first], "two": [first, second], "sft": [sft]}
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


def test_the_curves_of_one_run_are_drawn(open_page):
    page = open_page("one")
    assert page.title() == "first"
    reward = page.locator("figure", has_text="reward/mean").first
    assert reward.locator("path:not(.grid)").count() == 1
    tested = page.locator("figure", has_text="test/avg@4")
    # A line, and an error bar and a dot of each of seven evaluations.
    assert tested.locator("path:not(.grid)").count() == 15
    assert page.locator("figure", has_text="rollout/teaching").count() == 1
    memory = page.locator("figure", has_text="memory/peak_gib")
    assert memory.locator("path.dashed").count() == 1 and "predicted" in memory.inner_text()
    phases = page.locator("figure", has_text="seconds of each phase")
    assert phases.locator("path.area").count() == 5
    lefts = page.locator("svg text").evaluate_all("texts => texts.map(t => t.getBBox().x)")
    assert len(lefts) > 100 and min(lefts) >= 0  # no sign is cut off
    assert "first" in page.locator("#summary").inner_text()
    assert page.locator("#step-tables tr").count() == 31
    page.locator("summary", has_text="Others").click()
    assert page.locator("figure", has_text="actor/lr").is_visible()


def test_the_values_of_a_step_are_at_the_pointer_and_curves_can_be_smooth(open_page):
    page = open_page("one")
    reward = page.locator("figure", has_text="reward/mean").first
    assert "last" in reward.inner_text()
    box = reward.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 50)
    assert "step 27:" in reward.inner_text()
    page.mouse.move(0, 0)
    assert "last" in reward.inner_text()
    page.select_option("#smoothing", "5")
    assert page.locator("figure", has_text="reward/mean").first.locator("path.faint").count() == 1


def test_two_runs_are_laid_over_each_other_and_their_configs_compared(open_page):
    page = open_page("two")
    assert page.title() == "first, second"
    reward = page.locator("figure", has_text="reward/mean").first
    assert reward.locator("path:not(.grid):not(.dot)").count() == 2
    assert page.locator("figure", has_text="seconds of each phase").count() == 2
    differences = page.locator("#differences").inner_text()
    assert "actor.lr\t1e-06\t3e-06" in differences
    assert "save_dir" not in differences and "versions" not in differences
    page.select_option("#run", label="second")
    title = page.locator("#groups h3").first.inner_text()
    assert title.startswith("step 20, group") and title.endswith(": 8 of 8 answers")


def test_answers_stand_in_groups_with_reward_and_the_row_s_answer(open_page):
    page = open_page("one")
    assert page.locator("#groups h3").count() == 4 and page.locator(".card").count() == 32
    card = page.locator(".card").first
    assert "row's answer" in card.inner_text() and "right 1" in card.inner_text()
    tool = card.locator("details", has_text="tool")
    assert not tool.locator("pre").is_visible()
    tool.locator("summary").click()
    assert tool.locator("pre").is_visible()
    folded = page.locator("details", has_text="haystack")
    assert folded.count() == 1 and not folded.locator("pre").is_visible()
    page.select_option("#step", "2")
    assert page.locator("#groups h3").first.inner_text().startswith("step 2,")


def rewards(page):
    return [float(text) for text in page.locator(".card header b").all_inner_texts()]


def test_the_best_the_worst_and_the_most_different_come_first(open_page):
    page = open_page("one")
    page.select_option("#step", "all")
    page.select_option("#order", "best")
    best = rewards(page)
    assert best == sorted(best, reverse=True) and len(best) == 48
    page.locator("#more").click()
    assert len(rewards(page)) == 96
    page.select_option("#order", "worst")
    worst = rewards(page)
    assert worst == sorted(worst) and worst[0] < best[0]
    page.select_option("#order", "different")
    cards = page.locator(".card").all()
    texts = [set(" ".join(card.locator("pre").all_text_contents()).split()) for card in cards]
    distances = [1 - len(a & b) / len(a | b) for a, b in zip(texts[::2], texts[1::2], strict=True)]
    assert distances == sorted(distances, reverse=True) and distances[0] > distances[-1]
    page.select_option("#step", "30")
    group = page.locator("#groups > div", has_text="step 30, group 1:")
    assert "no other answer of its group" in group.locator(".card").nth(1).inner_text()


def test_answers_are_filtered_and_searched(open_page):
    page = open_page("one")
    page.select_option("#part", "right")
    page.fill("#least", "1")
    right = page.locator(".card").count()
    assert 0 < right < 32 and page.locator(".card", has_text="right 0").count() == 0
    page.fill("#least", "")
    page.fill("#most", "0.5")
    assert page.locator(".card").count() == 32 - right
    page.fill("#most", "")
    page.select_option("#finish", "length")
    cut = page.locator(".card").count()
    assert 0 < cut < 32 and page.locator(".card .tag.bad", has_text="length").count() == cut
    page.select_option("#finish", "")
    page.fill("#text-search", "NEEDLE")
    assert page.locator(".card").count() == 1
    assert page.locator("mark").inner_text() == "needle"
    assert EVIL in page.locator(".card").inner_text()
    page.fill("#text-search", "haystack")  # a folded turn opens
    assert page.locator("mark").is_visible()
    page.fill("#text-search", "nowhere to be seen")
    assert page.locator(".card").count() == 0
    assert "0 answers selected" in page.locator("#answer-note").inner_text()


def test_tokens_are_shaded_by_what_was_saved(open_page):
    page = open_page("one")
    assert page.locator("#shade option").all_inner_texts() == [
        *("nothing", "advantage", "|engine − trainer|")
    ]
    page.select_option("#step", "29")
    text = page.locator(".card pre").nth(2).inner_text()
    for kind, words in (("advantages", "Green"), ("gap", "log-probability")):
        page.select_option("#shade", kind)
        spans = page.locator(".card pre").nth(2).locator("span")
        assert page.locator(".card pre").nth(2).inner_text() == text and spans.count() > 100
        colors = spans.evaluate_all("spans => new Set(spans.map(s => s.style.background)).size")
        assert colors > 20 and words in page.locator("#shade-note").inner_text()


@pytest.mark.parametrize("name", ["one", "two", "sft"])
def test_a_phone_does_not_scroll_sideways(open_page, name):
    page = open_page(name, viewport={"width": 390, "height": 844}, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_run_without_rollouts_has_curves_alone(open_page):
    page = open_page("sft")
    assert not page.locator("#answers").is_visible()
    assert page.locator("figure", has_text="actor/loss").is_visible()
    assert "1 line could not be read" in page.locator("#notes").inner_text()


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_dark_and_print(open_page):
    page = open_page("one", color_scheme="dark")
    assert background(page) == "rgb(20, 23, 26)"
    page.emulate_media(media="print")
    assert background(page) == "rgb(255, 255, 255)"
    assert not page.locator(".controls").first.is_visible()
    assert not page.locator("#steps").is_visible()  # a wide table would shrink all pages
    adjust = "getComputedStyle(document.querySelector('.chip')).printColorAdjust"
    assert page.evaluate(adjust) == "exact"  # or the runs lose their colours
    assert page.locator("figure").first.is_visible() and page.locator(".card").first.is_visible()
    assert background(open_page("one", color_scheme="light")) == "rgb(255, 255, 255)"
