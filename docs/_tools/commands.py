"""Write the tables of commands and options into `command_line.md`: `python
docs/_tools/commands.py`.
"""

import re
from pathlib import Path

from typer.main import get_command

from companion.__main__ import app as notebooks
from gpulab.cli import app
from gpulab.run_options import RUN_OPTIONS

PAGE = Path(__file__).parents[1] / "command_line.md"
MARKS = re.compile(r"(?<=<!-- commands -->\n).*?(?=<!-- /commands -->)", re.DOTALL)


def _row(*cells):
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _options(command):
    return {p.opts[0]: (p.help, _usual(p)) for p in command.params if p.param_type_name == "option"}


def _usual(parameter):
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    return {"True": "yes", "False": "no", "None": "", "[]": ""}.get(
        text := str(parameter.default), text
    )


def tables():
    """Return two tables in Markdown: every command with its options, then the meaning of the
    options that `train` and `experiment` share.
    """
    commands = get_command(app).commands
    of_experiment = _options(commands["experiment"]).items()
    of_a_run = dict(item for item in _options(commands["train"]).items() if item in of_experiment)
    beside = get_command(notebooks)
    every = {f"gpulab {name}": command for name, command in commands.items()} | {
        "python -m companion": beside
    }
    every |= {f"python -m companion {name}": command for name, command in beside.commands.items()}
    lines = ["| command | what it does | options |", "|---|---|---|"]
    for name, command in every.items():
        words = "".join(
            f" {p.name.upper()}" for p in command.params if p.param_type_name == "argument"
        )
        takes_these = name in ("gpulab train", "gpulab experiment")
        own = [f"`{flag}`" for flag in _options(command) if not takes_these or flag not in of_a_run]
        more = ", and the options of a run" if takes_these else ""
        what = " ".join(command.help.partition("\n\n")[0].split())
        lines.append(_row(f"`{name}{words}`", what, " ".join(own) + more))
    lines += ["", "| option of a run | meaning | default |", "|---|---|---|"]
    lines += [_row(f"`{flag}`", *told) for flag, told in of_a_run.items()]
    usual = {
        name: str(each.default or "").lower() if each.argument_group == "run" else ""
        for name, each in RUN_OPTIONS.items()
    }
    of_networks = {
        name: (each.help, usual[name]) for name, each in RUN_OPTIONS.items() if each.help
    }
    lines += [_row(f"`--option {name}=…`", *told) for name, told in of_networks.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(MARKS.sub(lambda _: tables(), page), encoding="utf-8")
