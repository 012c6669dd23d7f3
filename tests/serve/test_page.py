"""The page in a real browser: fill, lock, resample, race, replay, errors, dark mode, a narrow screen."""

import re

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
expect = playwright.expect


def fill(page, text="anna gives [4] to ___ .", steps=5, revise=0):
    page.locator("#prompt").fill(text)
    slide(page, "#steps", steps)
    page.get_by_label("Revision rounds").fill(str(revise))
    page.keyboard.press("Control+Enter")
    expect(page.locator("#facts")).to_contain_text("steps")
    expect(page.locator("#resample")).to_be_enabled()


def slide(page, name, value):
    page.locator(name).evaluate("(x, v) => { x.value = v; x.dispatchEvent(new Event('input')); }", value)


def reached(page, name, pattern):
    """Wait for a text that soon goes on: `expect` looks once a second in the end, this in every frame."""
    page.wait_for_function(
        "([name, x]) => new RegExp(x).test(document.querySelector(name).textContent)", arg=[name, pattern]
    )


def until(page, happened):
    for _ in range(3000):
        if happened():
            return
        page.wait_for_timeout(25)
    raise AssertionError("not within a minute")


def words(page) -> list[str]:
    return page.locator("#text-view .tok").all_text_contents()


def test_gaps_are_filled_and_the_scrubber_replays(visit, shots):
    page = visit()
    fill(page)
    assert page.locator("#text-view .tok.made").count() == 7
    assert page.locator("#text-view .tok.gap").count() == 0
    expect(page.locator("#hint")).to_contain_text("2 gaps, 7 tokens")
    done = words(page)
    page.screenshot(path=shots / "fill.png")
    slide(page, "#scrub", 0)
    assert page.locator("#text-view .tok.gap").count() == 7
    expect(page.locator("#scrub-at")).to_have_text("step 0 of 5")
    slide(page, "#scrub", 2)
    assert 0 < page.locator("#text-view .tok.made").count() < 7
    page.screenshot(path=shots / "replay.png")
    page.locator("#play").click()
    expect(page.locator("#scrub-at")).to_have_text("step 5 of 5")
    assert words(page) == done
    fill(page)
    assert words(page) == done  # the same seed


def test_revised_tokens_land_again_and_the_scrubber_shows_the_first(visit, server, shots):
    page = visit()
    expect(page.get_by_label("Revision rounds")).to_have_value("4")
    fill(page, "anna [30] .", steps=10, revise=4)
    expect(page.locator("#facts")).to_contain_text("30 tokens in 10 steps + 6 revision steps")
    assert page.locator("#text-view .tok.gap").count() == 0
    how = {"temperature": 1, "top_p": 0.9, "seed": 0}
    done = words(page)
    page.screenshot(path=shots / "revise.png")
    for revise, step, said in ((0, 10, "step 10 of 10"), (4, 16, "revision step 6 of 6")):
        body = {"text": "anna [30] .", "steps": 10, "revise": revise} | how
        (text,) = server.post("/v1/fill", body).json["texts"]
        slide(page, "#scrub", step)
        expect(page.locator("#scrub-at")).to_have_text(said)
        assert words(page) == [piece.strip() or ("␣" if piece else "¶") for piece in text["pieces"]]
        if not revise:
            assert words(page) != done
    slide(page, "#scrub", 5)
    assert 0 < page.locator("#text-view .tok.gap").count() < 30
    made = page.locator("#text-view .tok.made").first
    made.click()  # a token is taken in hand as it is at the end
    expect(page.locator("#scrub-at")).to_have_text("revision step 6 of 6")
    assert words(page) == done


def test_revision_is_for_an_order_that_is_known_beforehand(visit):
    page = visit()
    page.get_by_label("Order").first.select_option("confidence")
    expect(page.get_by_label("Revision rounds")).to_be_disabled()
    page.locator("#prompt").fill("anna [6] .")
    page.locator("#go").click()
    expect(page.locator("#facts")).to_contain_text("6 tokens in 6 steps")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_tokens_land_one_step_after_the_other(visit):
    page = visit(reduced_motion="no-preference")
    page.get_by_label("Revision rounds").fill("0")
    page.locator("#prompt").fill("anna gives [9] .")
    slide(page, "#steps", 9)
    page.locator("#go").click()
    expect(page.locator("#go-label")).to_have_text("Stop")
    reached(page, "#scrub-at", "step [2-5] of 9")
    assert 0 < page.locator("#text-view .tok.gap").count() < 9
    expect(page.locator("#scrub-at")).to_have_text("step 9 of 9")
    expect(page.locator("#go-label")).to_have_text("Fill")


def test_locked_tokens_stay_when_the_others_are_resampled(visit, shots):
    page = visit()
    fill(page)
    made = page.locator("#text-view .tok.made")
    kept = [made.nth(1).text_content(), made.nth(4).text_content()]
    made.nth(1).click()
    expect(page.locator("#menu")).to_be_visible()
    expect(page.locator("#alternatives button")).to_have_count(8)
    page.screenshot(path=shots / "menu.png")
    page.locator("#do-lock").click()
    made.nth(4).focus()
    page.keyboard.press("l")
    expect(page.locator("#text-view .tok.locked")).to_have_count(2)
    given = words(page)
    page.locator("#resample").click()
    expect(page.locator("#resample")).to_be_enabled()
    expect(page.locator("#facts")).to_contain_text("5 tokens in 5 steps")
    assert [made.nth(1).text_content(), made.nth(4).text_content()] == kept
    assert words(page) != given
    assert words(page)[:2] == given[:2]


def test_one_token_is_erased_resampled_or_chosen(visit):
    page = visit()
    fill(page)
    made = page.locator("#text-view .tok.made")
    before = words(page)
    made.nth(2).click()
    page.locator("#do-erase").click()
    expect(page.locator("#text-view .tok.gap")).to_have_count(1)
    page.locator("#regap").click()
    expect(page.locator("#text-view .tok.gap")).to_have_count(0)
    expect(page.locator("#facts")).to_contain_text("1 token in 1 step,")
    after = words(page)
    assert sum(a != b for a, b in zip(before, after, strict=True)) <= 1
    made.nth(3).focus()
    page.keyboard.press("r")
    expect(page.locator("#resample")).to_be_enabled()
    assert len(words(page)) == len(before)
    made.nth(3).click()
    third = page.locator("#alternatives button").nth(2)
    wanted = third.locator(".word").text_content().strip()
    third.click()
    expect(page.locator("#menu")).to_be_hidden()
    expect(made.nth(3)).to_have_text(wanted if wanted else re.compile(".*"))
    expect(made.nth(3)).to_have_class(re.compile("locked"))


def test_the_keyboard_and_a_screen_reader_have_all_of_it(visit):
    page = visit()
    fill(page)
    first = page.locator("#text-view .tok").first
    first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    focused = page.evaluate("() => document.activeElement.getAttribute('aria-label')")
    assert re.search(r", step \d+, probability .+%$", focused), focused
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert page.evaluate("() => document.activeElement.getAttribute('aria-label')") == focused
    expect(page.locator("#status")).to_contain_text("Done: anna gives")
    named = {"Steps": "slider", "Temperature": "slider", "Top-p": "slider", "Order": "combobox"}
    for name, role in (named | {"Revision rounds": "spinbutton"}).items():
        assert page.get_by_role(role, name=name).count() == 1
    unnamed = """() => [...document.querySelectorAll('button, input, select, textarea, canvas')].filter(x =>
        !(x.labels && x.labels.length) && !x.getAttribute('aria-label') && !x.textContent.trim()).map(x => x.id)"""
    assert page.evaluate(unnamed) == []
    page.get_by_role("tab", name="Write").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Race")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#race")).to_be_visible()


def test_two_models_race(visit, shots):
    page = visit()
    page.get_by_role("tab", name="Race").click()
    page.locator("#prompt").fill("anna gives [12] to ___ .")
    page.locator("#many").select_option("4")
    page.locator("#go").click()
    expect(page.locator(".lane.won")).to_have_count(1)
    verdict = re.compile(r"^(PGM|MDLM) was (\d+\.\d times )?as fast as (PGM|MDLM)\.$")
    expect(page.locator("#verdict")).to_have_text(verdict)
    for lane in page.locator(".lane").all():
        assert re.search(r"60 tokens( \(5\d of text\))? in 15 steps, ", lane.text_content())
        assert float(lane.locator(".speed span").text_content().replace(",", "")) > 0
        expect(lane.locator(".quality")).to_be_hidden()  # no card says anything of these
    page.screenshot(path=shots / "race.png")


def test_errors_are_shown_in_words(visit, shots):
    page = visit()
    page.locator("#prompt").fill("a [900] b")
    page.locator("#go").click()
    expect(page.get_by_role("alert")).to_contain_text("at most 48")
    page.screenshot(path=shots / "error.png")
    page.locator("#seed").fill("-3")
    page.locator("#prompt").fill("a [3] b")
    page.locator("#go").click()
    expect(page.get_by_role("alert")).to_contain_text("Seed -3: expected")
    page.locator("#seed").fill("3")
    page.locator("#go").click()
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#facts")).to_contain_text("3 tokens in")  # all is done: a click on the way would stop it
    page.route("**/v1/fill", lambda route: route.abort())
    page.locator("#go").click()
    expect(page.get_by_role("alert")).to_contain_text("does not answer")


def test_a_running_fill_is_stopped_from_the_page(visit, slow):
    server = slow(0.1)
    page = visit(server.url)
    page.locator("#prompt").fill("a [40]")
    slide(page, "#steps", 40)
    page.locator("#go").click()
    expect(page.locator("#go-label")).to_have_text("Stop")
    expect(page.locator("#text-view .tok.made").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#go-label")).to_have_text("Fill")
    expect(page.locator("#status")).to_have_text("Stopped")
    until(page, lambda: server.hosts["pgm"].batcher.active == 0)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_key_is_asked_for_and_used(visit, slow):
    page = visit(slow(0, key="correct-horse").url, ready=False)
    page.get_by_label("This server asks for a key").fill("wrong-horse")
    page.get_by_role("button", name="Use it").click()
    expect(page.get_by_role("alert")).to_have_text("The key is missing or wrong.")
    page.get_by_label("This server asks for a key").fill("correct-horse")
    page.get_by_role("button", name="Use it").click()
    expect(page.locator("body[data-ready]")).to_have_count(1)
    fill(page)
    expect(page.get_by_role("tab", name="Race")).to_be_hidden()


def test_dark_and_light_follow_the_system_and_the_button(visit, shots):
    page = visit(color_scheme="dark")
    fill(page)
    dark = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.screenshot(path=shots / "dark.png")
    page.locator("#theme").click()
    light = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", dark)[:3])) < 150 < 600 < sum(map(int, re.findall(r"\d+", light)[:3]))
    page.reload()
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == light


@pytest.mark.parametrize("tab", ["Write", "Race", "Pictures", "How it works"])
def test_a_narrow_screen_shows_everything(visit, shots, tab):
    page = visit(viewport={"width": 360, "height": 740}, has_touch=True)
    page.get_by_role("tab", name=tab).click()
    if tab == "Write":
        fill(page)
        taken = page.locator("#text-view .tok.made").nth(2)
        page.evaluate("() => scrollTo(0, 0)")
        taken.dispatch_event("click")  # where it is, at the foot of the screen
        expect(page.locator("#alternatives button")).to_have_count(8)
        menu, token = page.locator("#menu").bounding_box(), taken.bounding_box()
        assert token["y"] + token["height"] < menu["y"]  # what it is about stays in sight
        page.screenshot(path=shots / "narrow-menu.png")
        page.locator("#menu-close").tap()
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    small = """() => [...document.querySelectorAll('button, select, input')].filter(x => x.offsetParent &&
        x.type !== 'checkbox' && x.getBoundingClientRect().height < 22).map(x => x.id)"""
    assert page.evaluate(small) == []
    page.screenshot(path=shots / f"narrow-{tab.lower()}.png", full_page=True)


def test_the_reference_is_drawn_without_help_from_elsewhere(visit, server, shots):
    page = visit(f"{server.url}/docs", viewport={"width": 360, "height": 740})
    assert page.locator(".reference section").count() >= 8
    expect(page.locator(".reference")).to_contain_text("/v1/fill")
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    page.screenshot(path=shots / "reference.png")
