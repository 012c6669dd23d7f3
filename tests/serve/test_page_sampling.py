"""The page in a real browser: strands, exact rounds, room for what is to come, a race of three, and how it works."""

import re

import pytest
from test_page import fill, slide, until, words

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
expect = playwright.expect


def test_each_strand_has_a_band_and_all_are_written_in_step(visit, chained, shots):
    page = visit(chained.url)
    expect(page.get_by_label("Order").first).to_have_value("strands")  # what the model was trained on
    slide(page, "#strands", 2)
    fill(page, "anna has [12] and [8] .", steps=5)
    bands = page.locator("#text-view .strand")
    expect(bands).to_have_count(5)  # at most five tokens each: three of the first gap, two of the second
    colours = bands.evaluate_all("(all) => all.map((x) => getComputedStyle(x).borderBottomColor)")
    assert len(set(colours)) == 5
    slide(page, "#scrub", 1)
    assert [band.locator(".tok.made").count() for band in bands.all()] == [1] * 5
    page.screenshot(path=shots / "strands.png")
    page.get_by_label("Order").first.select_option("random")
    fill(page, "anna has [12] and [8] .", steps=5)
    expect(bands).to_have_count(0)


def test_exact_rounds_show_what_was_rejected(visit, chained, shots):
    page = visit(chained.url)
    page.get_by_label("Order").first.select_option("random")
    page.get_by_label("Exact").check()
    expect(page.locator("#steps-field")).to_be_hidden()
    expect(page.get_by_label("Revision rounds")).to_be_disabled()
    for name, value in {"#draft": 8, "#temperature": 0.9, "#top-p": 0.95}.items():
        slide(page, name, value)
    page.locator("#prompt").fill("anna [20] .")
    with page.expect_request("**/v1/fill") as sent:
        page.locator("#go").click()
    expect(page.locator("#resample")).to_be_enabled()
    _, *steps, _ = chained.post("/v1/fill", sent.value.post_data_json | {"stream": True}).events
    rounds = len(steps)
    text = sum(one["text"] != "" for _, step in steps for one in step["sampled"])  # an end mark is none
    assert text < 20
    said = f"{text} tokens in {rounds} rounds, {20 / rounds:.1f} tokens per round"
    expect(page.locator("#facts")).to_contain_text(said)
    rejected = 0
    for number, (_, step) in enumerate(steps, 1):
        slide(page, "#scrub", number)
        expect(page.locator("#scrub-at")).to_have_text(f"round {number} of {rounds}")
        marks = page.locator("#text-view [data-rejected]")
        shown = marks.evaluate_all("(all) => all.map((x) => [Number(x.dataset.i), x.dataset.rejected])")
        assert sorted(shown) == sorted([one["position"], one["text"].strip() or "¶"] for one in step["rejected"])
        rejected += len(shown)
    assert rejected > 0
    slide(page, "#scrub", 1)
    page.screenshot(path=shots / "exact.png")
    page.get_by_label("Order").first.select_option("confidence")
    expect(page.get_by_label("Exact")).to_be_disabled()


ROOM = """async () => {
    const { TextView } = await import("/page/text_view.js");
    const view = new TextView(document.getElementById("text-view"));
    const tokens = [...Array(160).keys()].map((i) => i % 40 < 10 ? i : null);
    const pieces = tokens.map((token) => token === null ? null : [" the", " girl", " played", "."][token % 4]);
    view.open({ tokens, pieces, spaced: [], lead: 0, steps: 120, unknown: 120 });
    const places = () => view.spans.map((span) => Math.round(span.getBoundingClientRect().bottom / 20));
    const first = places(), words = [" a", " loved", " it", " girls", ".", " happy", "\\n", " saw"];
    let moved = 0, looked = 0;
    const shuffled = [...tokens.keys()].map((i) => (i * 77) % 160).filter((i) => tokens[i] === null);
    shuffled.forEach((i, step) => {
        view.land(i, 1, words[step % 8], 0.5, step);
        view.hold();
        const there = places().flatMap((place, j) => view.tokens[j] === null ? [] : [place - first[j]]);
        looked += there.length;
        moved += there.filter((by) => Math.abs(by) > 1).length;
    });
    const lines = new Set(places()).size;
    view.release();
    const boxes = () => JSON.stringify(view.spans.map((span) => [span.offsetLeft, span.offsetWidth]));
    const end = boxes();
    const replayed = [0, 60, 120].filter((step) => { view.draw(step); return boxes() !== end; });
    return { landed: view.tokens.filter((token) => token !== null).length, lines, moved: moved / looked, replayed };
}"""


def test_lines_stay_while_a_text_fills_and_in_its_replay(visit):
    found = visit().evaluate(ROOM)
    assert found["landed"] == 160
    assert found["lines"] > 8
    assert found["moved"] < 0.1  # a line that is full of long words overflows
    assert found["replayed"] == []


def test_one_token_anew_leaves_the_colours_of_the_others(visit):
    page = visit()
    fill(page, "anna gives [9] to ___ .", steps=9)
    hues = "(all) => all.map((x) => x.style.getPropertyValue('--hue'))"
    made = page.locator("#text-view .tok.made")
    before = made.evaluate_all(hues)
    assert len(set(before)) == 9
    made.nth(2).focus()
    page.keyboard.press("r")
    expect(page.locator("#facts")).to_contain_text("1 token in 1 step,")
    expect(page.locator("#resample")).to_be_enabled()
    after = made.evaluate_all(hues)
    assert [hue for i, hue in enumerate(after) if i != 2] == [hue for i, hue in enumerate(before) if i != 2]


def test_three_models_race_at_their_best_with_figures_of_quality(visit, chained, shots):
    page = visit(chained.url)
    bodies = {}
    page.on("request", lambda one: bodies.update({one.post_data_json["model"]: one}) if one.post_data else None)
    page.get_by_role("tab", name="Race").click()
    page.locator("#prompt").fill("anna gives [12] to ___ .")
    expect(page.locator("#race-note")).to_contain_text("cannot fill gaps")
    page.locator("#many").select_option("1")
    page.locator("#go").click()
    expect(page.locator("#verdict")).to_have_text(re.compile(r"^\w+ was .*as fast as \w+ and .*as fast as \w+\.$"))
    sent = {name: one.post_data_json for name, one in bodies.items()}
    assert {one["prompt"] for one in sent.values()} == {"anna gives"}
    for name in ("chain", "mdlm"):  # what is not said is the model's own
        assert not {"steps", "strands", "revise", "temperature", "top_p"} & sent[name].keys()
    assert not {"steps", "strands", "revise"} & sent["causal"].keys()
    expect(page.locator(".lane").nth(0)).to_contain_text("4 strands")
    shown = [lane.locator(".quality:visible").all_text_contents() for lane in page.locator(".lane").all()]
    assert shown == [["Gen-PPL 4.6"], ["Gen-PPL 9.8"], []]
    expect(page.locator(".lane").nth(1)).to_contain_text("6 steps + ")
    page.screenshot(path=shots / "race-three.png")
    page.get_by_label("Best settings").uncheck()
    expect(page.locator(".quality:visible")).to_have_count(0)  # the figures hold for those settings alone
    page.get_by_label("Order").first.select_option("random")
    slide(page, "#steps", 9)
    bodies.clear()
    page.locator("#go").click()
    until(page, lambda: len(bodies) == 3)
    sent = {name: one.post_data_json for name, one in bodies.items()}
    assert [sent[name].get("steps") for name in ("chain", "mdlm", "causal")] == [9, 9, None]


def described(page, **how):
    """Let the page be told other things of the first model than the server would say."""

    def tell(route):
        models = route.fetch().json()
        models["data"][0] |= how
        route.fulfill(json=models)

    page.route("**/v1/models", tell)
    page.reload()
    expect(page.locator("body[data-ready]")).to_have_count(1)


def test_a_chain_races_in_strands_beside_its_own_settings(visit, chained, shots):
    page = visit(chained.url)
    described(page, defaults={"top_p": 0.9}, quality="Gen-PPL 1.9 (8 strands: 3.8)")
    bodies = []
    page.on("request", lambda one: bodies.append(one.post_data_json) if one.post_data else None)
    page.get_by_role("tab", name="Race").click()
    names = page.locator(".lane:visible h2").evaluate_all("(all) => all.map((x) => x.firstChild.data)")
    assert names == ["PGM", "PGM, 8 strands", "MDLM", "AR"]
    shown = [lane.locator(".quality:visible").all_text_contents() for lane in page.locator(".lane").all()]
    assert shown == [["Gen-PPL 1.9"], ["Gen-PPL 3.8"], ["Gen-PPL 9.8"], []]
    page.locator("#prompt").fill("anna")
    page.locator("#go").click()
    expect(page.locator("#verdict")).to_contain_text("PGM with 8 strands")
    expect(page.locator(".lane.won")).to_have_count(1)
    sent = [(one["model"], one.get("strands")) for one in bodies]
    assert sorted(sent, key=str) == [("causal", None), ("chain", 8), ("chain", None), ("mdlm", None)]
    assert page.locator(".lane").nth(1).locator(".strand").count() == 8
    assert page.locator(".lane [role=button]").count() == 0  # nothing happens at a click
    page.screenshot(path=shots / "race-strands.png", full_page=True)
    page.get_by_label("Best settings").uncheck()
    expect(page.locator(".lane:visible")).to_have_count(3)  # all have the same settings then
    expect(page.locator(".lane .tok, .lane.won")).to_have_count(0)  # and what was made with others is gone


def controls(page, names):
    return page.evaluate("(all) => all.map((name) => document.getElementById(name).value)", names)


def test_the_controls_begin_with_the_model_s_own_settings(visit, chained):
    page = visit(chained.url)
    names = ["order", "strands", "steps", "temperature", "top-p", "revise"]
    assert controls(page, names)[:2] == ["strands", "2"]  # 2 ** 2 of them
    page.get_by_label("Model", exact=True).select_option("mdlm")
    assert controls(page, names) == ["random", "0", "6", "1", "0.9", "2"]
    described(page, defaults={"top_p": 0.8, "temperature": 0.7}, order="strands")
    assert controls(page, names)[3:] == ["0.7", "0.8", "0"]


def test_what_stands_behind_the_end_of_a_text_is_not_shown(visit):
    found = visit().evaluate(ENDED)
    assert found == {"shown": [" the", " end", "."] * 3 + [""], "lines": 1, "next": False}


ENDED = """async () => {
    const { TextView } = await import("/page/text_view.js");
    const view = new TextView(document.getElementById("text-view")), open = Array(60).fill(null);
    view.open({ tokens: open, pieces: open, spaced: [], lead: 0, steps: 60, unknown: 60 });
    open.forEach((_, i) => view.land(i, 1, i < 9 ? [" the", " end", "."][i % 3] : "", 0.5, i));
    view.release();
    const shown = view.spans.flatMap((span, i) => span.offsetParent ? [view.pieces[i]] : []);
    view.lay();
    return { shown, lines: view.element.children.length, next: view.has(10) };
}"""


CELLS = {"Two groups": 72, "Chain": 66, "Strands": 54}  # of 12 tokens: 2 * 6 * 6, 12 * 11 / 2, 3 * (3 + 6 + 9)


def test_how_it_works_by_the_keyboard_alone(visit, shots):
    page = visit()
    page.get_by_role("tab", name="Strands").or_(page.get_by_role("tab", name="Write")).first.focus()
    page.keyboard.press("End")
    expect(page.get_by_role("tab", name="How it works")).to_be_focused()
    page.get_by_label("Two groups").focus()
    says = []
    for number, (name, cells) in enumerate(CELLS.items()):
        if number:
            page.keyboard.press("ArrowRight")
        expect(page.get_by_label(name, exact=True)).to_be_checked()
        says.append(page.locator("#e-says").text_content())
        page.locator("#e-scrub").focus()
        page.keyboard.press("End")
        assert page.locator("#e-matrix rect.now, #e-matrix rect.done").count() == cells
        assert page.locator("#e-matrix rect.never").count() == 144 - cells
        page.keyboard.press("Home")
        assert page.locator("#e-matrix rect.now, #e-matrix rect.done").count() == 0
        page.get_by_label(name, exact=True).focus()
    assert len(set(says)) == 3
    page.get_by_role("button", name="Next step").press("Enter")
    page.get_by_role("button", name="Next step").press("Enter")
    expect(page.locator("#e-caption")).to_have_text("Step 2: “upon”, “was”, “loved” are predicted from 3 tokens.")
    page.locator("#e-tokens g").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#e-caption")).to_have_text("“upon” sees “Once”, “there”, “who”.")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#e-caption")).to_have_text("“Once” sees nothing: it is the first.")
    page.screenshot(path=shots / "how-it-works.png")


def test_a_text_that_only_continues_says_so(visit):
    page = visit()
    page.locator("#prompt").fill("anna [2] .")
    expect(page.locator("#go-label")).to_have_text("Fill")
    page.locator("#prompt").fill("anna")
    expect(page.locator("#go-label")).to_have_text("Continue")
    page.locator("#go").click()
    expect(page.locator("#resample")).to_be_enabled()
    assert words(page)[0] == "anna"
    assert len(words(page)) == 48
