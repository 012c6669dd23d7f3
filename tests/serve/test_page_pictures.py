"""The page in a real browser: pictures are drawn, painted over, stopped, and brought along."""

import base64

import pytest
from test_page import reached, slide, until

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
expect = playwright.expect


def test_a_picture_is_drawn_painted_over_and_replayed(visit, shots):
    page = visit()
    page.get_by_role("tab", name="Pictures").click()
    page.locator("#label").select_option(label="dog")
    slide(page, "#p-steps", 6)
    page.locator("#draw").click()
    expect(page.locator("#recent button")).to_have_count(1)
    before = pixels(page)
    slide(page, "#p-scrub", 2)
    assert pixels(page) != before
    slide(page, "#p-scrub", 6)
    assert pixels(page) == before
    box = page.locator("#canvas").bounding_box()
    page.mouse.move(box["x"] + 10, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 - 10, box["y"] + 10, steps=6)
    page.mouse.up()
    page.locator("#canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    page.screenshot(path=shots / "paint.png")
    page.locator("#inpaint").click()
    expect(page.locator("#recent button")).to_have_count(2)
    expect(page.locator("#p-at")).to_have_text("step 3 of 3")
    page.locator("#heat").check()
    page.screenshot(path=shots / "inpainted.png")
    page.locator("#draw").click()
    expect(page.locator("#recent button")).to_have_count(3)
    expect(page.locator("#draw-label")).to_have_text("Draw")
    seed = page.locator("#p-seed").input_value()
    page.locator("#draw").click()  # the same again: another picture
    expect(page.locator("#recent button")).to_have_count(4)
    assert page.locator("#p-seed").input_value() != seed


def test_a_drawing_that_is_stopped_leaves_the_picture_before_it(visit):
    page = visit(reduced_motion="no-preference")
    page.get_by_role("tab", name="Pictures").click()
    page.locator("#p-pace").uncheck()
    page.locator("#draw").click()
    expect(page.locator("#recent button")).to_have_count(1)
    expect(page.locator("#p-hint")).to_contain_text("16 steps")
    before = pixels(page)
    page.locator("#p-pace").check()
    page.locator("#draw").click()
    reached(page, "#p-at", "step [2-9] of 16")
    page.keyboard.press("Escape")
    expect(page.locator("#draw-label")).to_have_text("Draw")
    expect(page.locator("#p-at")).to_have_text("step 16 of 16")
    assert pixels(page) == before
    expect(page.get_by_role("alert")).to_be_hidden()


def pixels(page) -> str:
    """What is drawn; a frame may still be on its way, so it is looked at until it stays."""
    seen = []
    until(
        page,
        lambda: seen.append(page.locator("#canvas").evaluate("(x) => x.toDataURL()")) or seen[-1:] * 2 == seen[-2:],
    )
    return seen[-1]


def test_an_own_picture_is_filled_in(visit, tmp_path):
    from PIL import Image

    Image.new("RGB", (40, 30), (200, 100, 50)).save(tmp_path / "mine.png")
    page = visit(reduced_motion="no-preference")
    page.get_by_role("tab", name="Pictures").click()
    page.locator("#file").set_input_files(tmp_path / "mine.png")
    expect(page.locator("#p-hint")).to_have_text("Paint over a part to redraw it.")  # it has been read
    page.locator("#canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    page.locator("#label").focus()
    before = pixels(page)
    page.locator("#draw").click()  # stopped on the way: the own picture is back, and is what is filled in
    reached(page, "#p-at", "step [2-9] of 16")
    page.keyboard.press("Escape")
    expect(page.locator("#draw-label")).to_have_text("Draw")
    assert pixels(page) == before
    with page.expect_request("**/v1/pictures/fill") as asked:
        page.locator("#inpaint").click()
    assert asked.value.post_data_json["image"]
    expect(page.locator("#recent button")).to_have_count(1)
    (tmp_path / "not.png").write_text("no picture")
    page.locator("#file").set_input_files(tmp_path / "not.png")
    expect(page.get_by_role("alert")).to_contain_text("not a picture")


def test_a_fast_stroke_skips_no_cell_and_a_brush_has_a_size(visit, server):
    page = visit()
    page.get_by_role("tab", name="Pictures").click()
    expect(page.locator("#save")).to_be_disabled()
    page.locator("#draw").click()
    expect(page.locator("#recent button")).to_have_count(1)
    box = page.locator("#canvas").bounding_box()

    def at(column: float, row: float) -> tuple[float, float]:
        return box["x"] + box["width"] * column / 4, box["y"] + box["height"] * row / 4

    page.mouse.move(*at(0.5, 0.5))
    page.mouse.down()
    page.mouse.move(*at(3.5, 0.5))  # one event for the whole way
    page.mouse.up()
    page.get_by_label("Brush").select_option("2")
    page.mouse.click(*at(1, 3))
    with page.expect_request("**/v1/pictures/fill") as asked:
        page.locator("#inpaint").click()
    painted = [[token is None for token in row] for row in asked.value.post_data_json["tokens"]]
    assert painted == [[True] * 4, [False] * 4, [True, True, False, False], [True, True, False, False]]
    expect(page.locator("#recent button")).to_have_count(2)


def test_regions_are_drawn_in_parallel(visit):
    page = visit()
    page.get_by_role("tab", name="Pictures").click()
    page.locator("#p-order").select_option("regions")
    expect(page.locator("#p-steps-field")).to_be_hidden()
    assert page.get_by_label("Regions").locator("option").all_text_contents() == ["2 × 2"]
    with page.expect_request("**/v1/pictures") as asked:
        page.locator("#draw").click()
    assert (asked.value.post_data_json["regions"], asked.value.post_data_json.get("steps")) == (2, None)
    expect(page.locator("#p-at")).to_have_text("step 4 of 4")  # a cell of each region per step
    page.locator("#p-order").select_option("halton")
    expect(page.locator("#p-steps-field")).to_be_visible()


def test_a_picture_is_saved(visit, server, tmp_path):
    from PIL import Image

    page = visit()
    page.get_by_role("tab", name="Pictures").click()
    with page.expect_response("**/v1/pictures") as answered:
        page.locator("#draw").click()
    expect(page.locator("#recent button")).to_have_count(1)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save picture").click()
    saved.value.save_as(tmp_path / "saved.png")
    body = answered.value.request.post_data_json | {"stream": False, "frames": False}
    drawn = server.post("/v1/pictures", body).json
    assert (tmp_path / "saved.png").read_bytes() == base64.b64decode(drawn["image"])
    assert Image.open(tmp_path / "saved.png").size == (4, 4)
