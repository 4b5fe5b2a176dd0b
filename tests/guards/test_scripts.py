"""`gpulab guard` runs scripts and modules as Python does."""

import subprocess
import sys

import pytest

from gpulab.cli import app, main

FILES = {
    "shop/__init__.py": "",
    "shop/sums.py": "import torch\n\ndef add(x):\n    return x + torch.ones(3)\n",
    "shop/train.py": (
        "import sys, warnings\n"
        "import torch\n"
        "from .sums import add\n"
        "print(__name__, __package__, sys.argv[1:], sys.argv[0] == __file__)\n"
        "warnings.warn('of the script')\n"
        "add(torch.ones(int(sys.argv[1])))\n"
    ),
    "chained.py": (
        "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('b') from error\n"
    ),
    "mistyped.py": "x = (\n",
    "message.py": "import sys\nsys.exit('not today')\n",
    "hook.py": (
        "import sys\n"
        "sys.excepthook = lambda *error: print('caught', error[1])\n"
        "raise ValueError('c')\n"
    ),
}


@pytest.mark.parametrize(
    "command",
    ["-m shop.train 3", "-m shop.train 2", "chained.py", "mistyped.py", "message.py", "hook.py"],
)
def test_guard_command_runs_a_script_with_the_output_and_status_of_python(command, tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    if command.endswith(".py"):
        command = str(tmp_path / command)

    def run(*before):
        words = [sys.executable, *before, *command.split()]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)

    def errors(done):
        lines = done.stderr.splitlines()
        return [
            line
            for line in lines
            if "<frozen runpy>" not in line and not line.startswith("nothing was overw")
        ]

    plain, guarded = run(), run("-m", "gpulab", "guard")
    assert (guarded.returncode, guarded.stdout) == (plain.returncode, plain.stdout)
    assert errors(guarded) == errors(plain)
    assert "nothing was overwritten" in guarded.stderr


def ended(*arguments):
    """Return the exit status of `gpulab guard`."""
    with pytest.raises(SystemExit) as end:
        main(lambda: app(["guard", *arguments]))
    return end.value.code


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("-m no_such_module", 1, "No module named no_such_module"),
        ("nowhere.py", 2, "nowhere.py: no such script"),
    ],
)
def test_guard_command_refuses_a_script_or_module_that_is_not_there(command, status, words, capsys):
    assert ended(*command.split()) == status
    assert words in capsys.readouterr().err
