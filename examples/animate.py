"""Animate how a text is written: a GIF in which tokens appear in the order in which they were sampled.

python examples/animate.py stories "The [8] sat on [12]." --out filling.gif
python examples/animate.py stories --steps 32 --out writing.gif

The gaps of a text are filled; without a text, a new one is generated. For images: `maskless generate --gif`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image, ImageColor, ImageDraw, ImageFont

import maskless
from maskless.codec.text import TextCodec
from maskless.drafts import Step
from maskless.files import write_aside

PAPER, INK, NEW, BLANK, GIVEN = "#ffffff", "#1f2933", "#c4501b", "#c9e4e1", "#7b8794"
SIZE, LINE, MARGIN = 18, 30, 16  # pixels
Place = tuple[float, int, float, str]  # left, top, width and text of a piece


def main() -> None:
    parser = argparse.ArgumentParser(description="A GIF of a text model at work.")
    parser.add_argument("model", help="a shipped model such as stories, or the folder of a run or model")
    parser.add_argument("text", nargs="?", help="a text with gaps, such as 'The [8] sat on [12].'")
    parser.add_argument("--out", type=Path, default=Path("filling.gif"), help="the GIF to write (filling.gif)")
    parser.add_argument("--steps", type=int, help="network calls (default: as suits the model)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives another text (0)")
    parser.add_argument("--top-p", type=float, default=0.9, help="draw from the nucleus of this probability (0.9)")
    parser.add_argument("--width", type=int, default=640, help="pixels (640)")
    parser.add_argument("--seconds", type=float, default=0.2, help="how long a step is shown (0.2)")
    given = parser.parse_args()
    landed: list[list[int]] = []  # the positions of each step

    def watch(step: Step) -> None:
        landed.append(step.positions.tolist())

    try:
        model = maskless.load(given.model)
        if not isinstance(model.codec, TextCodec):
            raise ValueError(f"{given.model} has no tokenizer: expected a text model")
        how = {"steps": given.steps, "seed": given.seed, "top_p": given.top_p, "on_step": watch}
        if given.text is None:
            (text,) = maskless.generate(model, n=1, **how)
        else:
            text = maskless.fill(model, given.text, **how)
        made = frames(places(pieces(model.codec, text), given.width), landed, text.steps, given.width)
        save(made, given.out, given.seconds)
        size = given.out.stat().st_size / 1000
        print(f"{given.out}: {len(landed)} steps, {size:.0f} kB\n{text}")
    except (ValueError, OSError) as error:
        parser.error(str(error))


def pieces(codec: TextCodec, text: maskless.Text) -> list[str]:
    """What each token looks like; a special one has no look."""
    special = {codec.bos, codec.eos, codec.pad}
    return ["" if token in special else codec.token_text(token) for token in text.tokens]


def places(shown: list[str], width: int) -> list[list[Place]]:
    """Where each piece stands when all are known, so that nothing moves; one with line breaks has several places."""
    font, x, y, found = ImageFont.load_default(SIZE), float(MARGIN), MARGIN, []
    for piece in shown:
        own: list[Place] = []
        for number, part in enumerate(piece.replace("\t", " ").split("\n")):
            long = font.getlength(part)
            room = width - MARGIN if part[:1] == " " else width  # a comma may stand in the margin
            if number or (x + long > room and x > MARGIN):
                x, y, part = float(MARGIN), y + LINE, part.lstrip()
                long = font.getlength(part)
            if part:
                own.append((x, y, long, part))
            x += long
        found.append(own)
    return found


def frames(at: list[list[Place]], landed: list[list[int]], steps: list[int], width: int) -> list[Image.Image]:
    """A picture before the first step, one after each, and a last one in which nothing is new."""
    font = ImageFont.load_default(SIZE)
    height = max((top for own in at for _, top, _, _ in own), default=MARGIN) + LINE + MARGIN
    known = {position for position, step in enumerate(steps) if step < 0}
    given, made = frozenset(known), []
    seen = [new for new in landed if any(at[position] for position in new)]  # no frame for padding alone
    for new in [[], *seen, []]:
        known.update(new)
        frame = Image.new("RGB", (width, height), PAPER)
        draw = ImageDraw.Draw(frame)
        for position, own in enumerate(at):
            colour = NEW if position in new else GIVEN if position in given else INK
            for left, top, long, part in own:
                if position in known:
                    draw.text((left, top), part, colour, font)
                else:
                    begin = left + long - max(3.0, font.getlength(part.lstrip()))  # the space before a word stays free
                    draw.rounded_rectangle((begin, top + 2, left + long - 1, top + SIZE + 4), 3, BLANK)
        made.append(frame.quantize(palette=palette(), dither=Image.Dither.NONE))
    return made


def palette() -> Image.Image:
    """The colours, and what lies between each of them and the paper at the edges of letters."""
    paper, shades = ImageColor.getrgb(PAPER), [*ImageColor.getrgb(PAPER), *ImageColor.getrgb(BLANK)]
    for colour in map(ImageColor.getrgb, (INK, NEW, GIVEN)):
        for share in (0.25, 0.5, 0.75, 1):
            shades += [round(a + share * (b - a)) for a, b in zip(paper, colour, strict=True)]
    image = Image.new("P", (1, 1))
    image.putpalette(shades)
    return image


def save(made: list[Image.Image], path: Path, seconds: float) -> None:
    """Write the GIF aside, then rename it; the last picture stays for two seconds."""
    if not seconds > 0:
        raise ValueError(f"seconds {seconds} is out of range: expected more than 0")
    times = [round(1000 * seconds)] * (len(made) - 1) + [2000]
    first, *rest = made
    write_aside(path, lambda aside: first.save(aside, "GIF", save_all=True, append_images=rest, duration=times, loop=0))


if __name__ == "__main__":
    main()
