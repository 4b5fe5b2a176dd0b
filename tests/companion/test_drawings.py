import pytest

from companion import drawings
from gpulab.models import Autoencoder

DRAWINGS = {
    "autoencoder": drawings.draw_autoencoder,
    "prednet": drawings.draw_prednet,
    "published_loop": drawings.draw_published_loop,
    "saddle": drawings.draw_saddle,
}


def text_boxes(figure):
    figure.canvas.draw()
    texts = [text for axes in figure.axes for text in axes.texts if text.get_text()]
    return {text.get_text(): text.get_window_extent() for text in texts}


@pytest.mark.parametrize("name", DRAWINGS)
def test_draw_texts_are_inside_the_figure_and_apart(name):
    picture = DRAWINGS[name]()
    assert len(picture.alt) > 100
    boxes = text_boxes(picture.figure)
    frame = picture.figure.bbox
    for text, box in boxes.items():
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1, text
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1, text
    for text, box in boxes.items():
        assert not [other for other in boxes if other != text and box.overlaps(boxes[other])], text


def test_draw_autoencoder_has_the_widths_of_the_network():
    texts = text_boxes(drawings.draw_autoencoder().figure)
    widths = [weight.shape[1] for weight in Autoencoder().parameters() if weight.ndim == 2]
    assert {str(width) for width in widths} <= texts.keys()
