"""Pictures in SVG: what they say is escaped, and lies where the axes have it."""

import xml.etree.ElementTree as ET

import pytest

from kvloom.graphics.svg import Axis, Svg

HOSTILE = "</text><script>a & b</script>\"'"


def test_texts_titles_and_attributes_are_escaped() -> None:
    picture = Svg(10, 10, aria_label=HOSTILE)
    picture.text(1, 2, HOSTILE, "end", class_=HOSTILE)
    picture.rect(1, 2, 3, 4, HOSTILE, fill=HOSTILE)
    picture.dot(1, 2, 3, HOSTILE, HOSTILE)
    picture.legend(1, 2, HOSTILE, HOSTILE)
    root = ET.fromstring(str(picture))
    tags = [x.tag.split("}")[1] for x in root.iter()]
    assert tags == ["svg", "style", "text", "rect", "title", "circle", "title", "rect", "text"]
    texts = [x.text for x in root.iter() if x.tag.split("}")[1] in ("text", "title")]
    assert texts == [HOSTILE] * 4
    assert [x.get("fill") for x in root if x.get("fill")] == [HOSTILE] * 3
    assert root[1].get("class") == root.get("aria-label") == HOSTILE
    assert root[1].get("text-anchor") == "end"


def test_numbers_are_rounded_and_no_longer_than_needed() -> None:
    picture = Svg(100.0, 50, style="")
    picture.path([(1 / 3, 2.0), (1000.5, 2e-9)], stroke_width=1.5)
    assert str(picture).splitlines() == [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 50" width="100" height="50">',
        "<style></style>",
        '<path d="M0.33 2L1000.5 0" stroke-width="1.5"/>',
        "</svg>",
    ]


@pytest.mark.parametrize(
    ("axis", "pixels"),
    [
        (Axis(0, 10, 100, 300), {0: 100, 5: 200, 10: 300}),
        (Axis(2, 4, 300, 100), {2: 300, 3: 200, 4: 100}),
        (Axis(1, 100, 0, 200, is_logarithmic=True), {1: 0, 10: 100, 100: 200}),
    ],
)
def test_a_number_lies_at_its_pixel(axis: Axis, pixels: dict[float, float]) -> None:
    assert {x: axis.at(x) for x in pixels} == pytest.approx(pixels)


def test_decades_are_those_within_the_axis() -> None:
    axis = Axis(0.02, 50, 0, 1, is_logarithmic=True)
    assert axis.decades() == pytest.approx([0.1, 1, 10])
    assert axis.decades((1, 5)) == pytest.approx([0.05, 0.1, 0.5, 1, 5, 10, 50])
