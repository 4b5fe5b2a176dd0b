"""The losses that need no network, of each film of recorded runs, which `companion.repeat_losses` and its like read.

python benchmarks/record_films.py data/measured/films-NAME.json

Rendered and measured here, they are the same: this only saves the minutes that the films of 50,000 frames take.
"""

import sys
from pathlib import Path

import pandas as pd

import companion
import gpulab as gl
from companion.learning import FILM, LOSSES_OF_A_FILM, RENDERED
from gpulab.progress import Progress
from gpulab.store import records


def main(file: str) -> None:
    runs = [gl.recorded_runs(), companion.longer_runs(), companion.title_runs(), companion.recorded_films()]
    runs += [companion.published_runs(), companion.atlas()]
    rendered = [frame[frame.data.isin(RENDERED)] for frame in runs]
    films = pd.concat(rendered)[[*FILM]].drop_duplicates().sort_values([*FILM])
    rows = [
        dict(zip(FILM, film, strict=True)) | {name: loss(*film) for name, loss in LOSSES_OF_A_FILM.items()}
        for film in Progress([*films.itertuples(index=False, name=None)], unit="film")
    ]
    records.write_json(Path(file), records.measured("cpu", rows=rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
