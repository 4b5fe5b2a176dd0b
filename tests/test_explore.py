"""The pages without code are served, one can be opened, and no other machine can reach them."""

import urllib.request

import pytest

from companion.explore import PAGES


@pytest.mark.slow("starts a server")
def test_explore_command_serves_a_page_on_this_machine_alone(explorer_server):
    with urllib.request.urlopen(f"http://127.0.0.1:{explorer_server.port}/", timeout=60) as answer:
        landing = answer.read().decode()
    for name, page in PAGES.items():
        assert f'<a href="/voila/render/{name}.ipynb">{page.title}</a>' in landing
        assert page.see in landing
    with urllib.request.urlopen(explorer_server.address("bits"), timeout=120) as answer:
        text = answer.read().decode()
    assert "The bits of a number" in text
    assert "bit_explorer" not in text, "no source is shown"
    assert "application/vnd.jupyter.widget-view+json" in text
    assert explorer_server.listening_addresses() == {"127.0.0.1"}
