"""The manufacturers' figures for the machines of the article and for newer GPUs."""

import pytest

from companion.article_machines import (
    GRAPHICS_CARDS,
    consumer_gpus,
    gpu_generations,
    published_machines,
)


def test_published_machines_are_the_twelve_of_the_article():
    table = published_machines()
    assert len(table) == len(set(table.machine)) == 12
    assert table["threads used"].tolist()[:4] == [4, 1, 4, 6]


def test_published_machines_arithmetic_is_cores_times_clock():
    rates = published_machines().set_index("machine")["Gflop/s"]
    assert rates["Intel i5-4590"] == round(4 * 3.3 * 2 * 8 * 2)
    # NVIDIA's data sheets state 8.9, 11.3, 13.4 and 16.3 Tflop/s.
    stated = {"GTX 1080": 8_900, "GTX 1080 Ti": 11_300, "RTX 2080 Ti": 13_400, "Titan RTX": 16_300}
    for card, gflops in stated.items():
        (machine,) = [name for name in rates.index if name.endswith(f"+ {card}")]
        assert rates[machine] == pytest.approx(gflops, rel=0.01)


def test_graphics_cards_have_the_cores_of_their_data_sheets():
    cores = {name: sms * per_sm for name, _, sms, per_sm, *_ in GRAPHICS_CARDS}
    assert cores == {
        "GTX 750 Ti": 640,
        "GTX 970": 1664,
        "GTX 1080": 2560,
        "GTX 1080 Ti": 3584,
        "RTX 2080 Ti": 4352,
        "Titan RTX": 4608,
        "RTX 2060 Super": 2176,
        "RTX 2070 Super": 2560,
    }


def test_gpu_generations_are_in_order_and_have_a_ridge():
    table = gpu_generations()
    assert table.year.is_monotonic_increasing
    assert table["GB/s"].is_monotonic_increasing
    assert table.ridge.iloc[0] == pytest.approx(125_000 / 900)
    assert (table["Gflop/s"] > table["Gflop/s, float32"]).all()


def test_consumer_gpus_have_a_ridge_and_a_device_of_torch():
    table = consumer_gpus()
    assert table.ridge.iloc[1] == pytest.approx(82_600 / 1008)
    assert set(table.device) <= {"cuda", "xpu"}
