import pytest

import gpulab as gl
from gpulab.errors import DataError, UsageError
from gpulab.stats._tables import read_table
from tests.stats._helpers import runs_of

# ruff: noqa: E501
# An export of the table of runs of Weights & Biases, with its column `State` renamed. Every cell is
# in quotes, and configuration and summary have plain names.
WANDB = """"Name","status","Notes","User","Tags","Created","Runtime","Sweep","device","lr","seed","epoch","val/loss"
"calm-sun-6","finished","-","ann","","2026-03-01T10:00:00.000Z","61","","cuda","0.001","2","9","0.32"
"calm-sun-5","finished","-","ann","","2026-03-01T10:00:00.000Z","61","","cuda","0.001","1","9","NaN"
"calm-sun-4","crashed","-","ann","","2026-03-01T10:00:00.000Z","12","","cuda","0.001","0","3","0.91"
"calm-sun-3","finished","a, b","ann","","2026-03-01T10:00:00.000Z","60","","cpu","0.001","2","9","0.30"
"calm-sun-2","finished","-","ann","","2026-03-01T10:00:00.000Z","60","","cpu","0.001","1","9","0.20"
"calm-sun-1","finished","-","ann","","2026-03-01T10:00:00.000Z","60","","cpu","0.001","0","9","0.10"
"""
# From `mlflow.search_runs().to_csv("runs.csv")` of MLflow 3.17, without some columns.
MLFLOW = """,run_id,experiment_id,status,start_time,metrics.loss,params.lr,params.setting,params.seed,tags.note
0,8b9aabf4,1,FAILED,2026-11-21 23:05.283+00:00,,0.001,cuda,1,"a, b"
1,3c497c70,1,FINISHED,2026-11-21 23:05.258+00:00,0.1,0.001,cuda,0,"a, b"
2,48578eab,1,FINISHED,2026-11-21 23:05.231+00:00,0.11,0.001,cpu,1,"a, b"
3,4fc0552a,1,FINISHED,2026-11-21 23:05.181+00:00,0.1,0.001,cpu,0,"a, b"
"""


@pytest.fixture
def table(tmp_path):
    """Read a text, or bytes, as a table."""

    def read(content):
        (tmp_path / "runs.csv").write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
        return read_table(tmp_path / "runs.csv")

    return read


def test_read_table_of_an_export_of_weights_and_biases(table):
    verdict = gl.verdict(table(WANDB), "val/loss", "device")
    (row,) = verdict.table.to_dict("records")
    assert (row["seeds"], row["unpaired"], row["diverged"]) == (1, 1, 1), (
        "a crashed run's last loss is not its result"
    )
    assert row["difference"] == pytest.approx(0.02)
    with pytest.raises(UsageError, match=r"1 finished run\(s\) have no val/loss .*: index \[0\]"):
        gl.verdict(table(WANDB.replace('"0.32"', '""')), "val/loss", "device")


def test_read_table_of_an_export_of_mlflow(table):
    verdict = gl.verdict(table(MLFLOW), "metrics.loss", "params.setting", "params.seed")
    assert verdict.table.seeds.tolist() == [1]
    assert "did not finish: 1 (cuda 1 failed)" in str(verdict)


@pytest.mark.parametrize(
    "text",
    [
        "seed;setting;loss\n0;cpu;0,5\n1;cpu;0,001\n0;cuda;inf\n1;cuda;\n",
        "seed\tsetting\tloss\n0\tcpu\t0.5\n1\tcpu\t0.001\n0\tcuda\tinf\n1\tcuda\t\n",
        "\ufeffseed, setting , loss\n0, cpu, 0.5\n1,cpu, 0.001\n\n0,cuda,-inf\n1,cuda,nan\n",
    ],
    ids=["semicolon", "tab", "byte-order mark and blanks"],
)
def test_read_table_of_text_of_every_kind(table, text):
    frame = table(text)
    assert list(frame.columns) == ["seed", "setting", "loss"]
    assert frame.setting.tolist() == ["cpu", "cpu", "cuda", "cuda"]
    verdict = gl.verdict(frame, "loss")
    assert verdict.runs.loss.tolist()[:2] == [0.5, 0.001]
    missing = text.endswith((";\n", "\t\n"))
    assert verdict.table[["diverged", "seeds"]].values.tolist() == [[1 if missing else 2, 0]]
    assert ("did not finish: 1 (cuda 1 missing)" in str(verdict)) == missing, (
        "an empty cell does not count as divergence"
    )


def test_read_table_of_parquet_and_truth_values(tmp_path):
    frame = runs_of({"cpu": [True] * 8, "cuda": [False] * 8}).rename(
        columns={"final_loss": "learned"}
    )
    frame.to_parquet(tmp_path / "runs.parquet")
    frame.astype({"setting": "category"}).set_index("setting").to_parquet(
        tmp_path / "indexed.parquet"
    )
    frame.to_csv(tmp_path / "runs.csv")
    for name in ("runs.parquet", "indexed.parquet", "runs.csv"):
        read = read_table(tmp_path / name)
        assert gl.verdict(read, "learned").table.equals(gl.verdict(frame, "learned").table)


# By the name of a case: the table, the error, and what its message names.
UNTIDY = {
    "no rows": ("setting,seed,loss\n", DataError, []),
    "a missing column": (
        "los,seed,setting\n1,2,3\n",
        UsageError,
        ["'loss'", "los, seed, setting", "pandas.melt"],
    ),
    "a column State of something else": (
        "State,loss\nOhio,1\nUtah,2\n",
        UsageError,
        ["'State'"],
    ),
    "a text among numbers": (
        "setting,seed,loss\na,0,0.5\na,1,n/a\n",
        UsageError,
        ["'loss'", "index 1", "'n/a'"],
    ),
    "rows of several lengths": (
        "seed,loss\n0,0.5,7,8\n1,2\n3,4,5,6,7,8\n",
        DataError,
        ["ParserError"],
    ),
    "bytes that are not UTF-8": (b"seed,loss\n\xff\xfe,1\n", DataError, ["UnicodeDecodeError"]),
    "two columns of one name": ("seed,loss,loss\n0,1,2\n", DataError, ["called loss"]),
}


@pytest.mark.parametrize(("text", "error", "named"), UNTIDY.values(), ids=UNTIDY)
def test_read_table_of_an_untidy_table_gives_an_error_of_one_line(table, text, error, named):
    with pytest.raises(error) as raised:
        gl.verdict(table(text), "loss")
    message = str(raised.value)
    assert [words for words in named if words not in message] == []
    assert "\n" not in message
