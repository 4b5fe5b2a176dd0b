"""Seeds and other block names, which tables of different origins write as different types."""

from __future__ import annotations

import datetime
import numbers
import re
from collections.abc import Hashable

import numpy as np
import pandas as pd

from gpulab.errors import UsageError
from gpulab.wording import level_text

NUMBER_PATTERN = re.compile(r"\s*[+-]?\d{1,300}(\.\d*)?([eE][+-]?\d{1,2})?\s*", re.ASCII)
MAX_EXAMPLES = 3  # types and examples in one sentence


def unify_types(frame: pd.DataFrame, factor: str, block: str) -> pd.DataFrame:
    """Unify the types of blocks and levels, so that `"3"` and `3` are the same seed.

    In both columns, a text such as `"3"` becomes a number if the column also has the number 3.

    In the column of blocks, two texts may be different spellings of one number, such as `"3"` and
    `"3.0"`. If there are such texts, all texts of numbers become numbers. This is not done if a
    level has both spellings, because they are then different blocks.

    Raises:
        UsageError: If the blocks of the levels still have no type in common, such as text under one
            level and numbers under another.

    Examples:
        >>> table = pd.DataFrame({"setting": list("aabb"), "seed": [0, 1, "0", "1"]})
        >>> unify_types(table, "setting", "seed").seed.tolist()
        [0, 1, 0, 1]
        >>> unify_types(table.replace({"seed": {"0": "x", "1": "y"}}), "setting", "seed")
        Traceback (most recent call last):
        gpulab.errors.UsageError: seed has numbers under a (0, 1) and text under b ('x', 'y'); ...
    """
    frame = frame.assign(**{factor: _unify_numbers(frame[factor])})
    frame = frame.assign(**{block: _unify_numbers(frame[block], frame[factor])})
    types_by_level = {
        level: _type_names(values) for level, values in frame.groupby(factor, sort=False)[block]
    }
    type_sets = [set(types) for types in types_by_level.values()]
    has_several_types = len(set().union(*type_sets)) > 1
    has_common_type = bool(set.intersection(*type_sets)) if type_sets else False
    if has_several_types and not has_common_type:
        shown_levels = list(types_by_level)[:MAX_EXAMPLES]
        descriptions = [
            _describe_types(frame, factor, block, level, types_by_level[level])
            for level in shown_levels
        ]
        raise UsageError(f"{block} has {' and '.join(descriptions)}; write them in the same way")
    return frame


def _describe_types(
    frame: pd.DataFrame, factor: str, block: str, level: Hashable, type_names: set[str]
) -> str:
    """Describe which types the blocks of a level have, with examples, for an error message."""
    values = list(dict.fromkeys(frame[block][frame[factor] == level]))[:MAX_EXAMPLES]
    preposition = "under" if factor == "setting" else "with"
    examples = ", ".join(repr(value) if isinstance(value, str) else str(value) for value in values)
    return (
        f"{' and '.join(sorted(type_names))} {preposition} {level_text(level, factor)} ({examples})"
    )


def _type_names(values: pd.Series) -> set[str]:
    return {_type_name(value) for value in values.unique()}


def _type_name(value: object) -> str:
    """Name the type of a block in words."""
    if isinstance(value, (bool, np.bool_)):
        return "booleans"
    if isinstance(value, (numbers.Number, np.number)):
        return "numbers"
    if isinstance(value, str):
        return "text"
    return "dates" if isinstance(value, datetime.date) else f"values of type {type(value).__name__}"


def _unify_numbers(column: pd.Series, levels: pd.Series | None = None) -> pd.Series:
    """Convert texts to numbers if that makes differently written values equal.

    Without `levels`, a text is converted if the column also has its number. With `levels`, the
    level of each row, all texts of numbers are converted if two values are the same number, unless
    one level has two spellings of a number. Otherwise the column is returned unchanged.
    """
    parsed = {value: _parse_number(value) for value in dict.fromkeys(column)}
    # The values that are numbers, or texts of numbers.
    numbers_by_value = {value: number for value, number in parsed.items() if number is not None}
    plain_numbers = {value for value in numbers_by_value if not isinstance(value, str)}
    texts = [value for value in numbers_by_value if isinstance(value, str)]
    if levels is None:
        texts = [text for text in texts if numbers_by_value[text] in plain_numbers]
    else:
        distinct_numbers = {numbers_by_value[text] for text in texts} | plain_numbers
        if len(distinct_numbers) == len(numbers_by_value):
            return column  # no two values are the same number
        if _has_duplicate_spellings(column, levels, numbers_by_value):
            return column
    if not texts:
        return column
    return column.map(
        lambda value: numbers_by_value[value] if value in texts else value
    ).infer_objects()


def _has_duplicate_spellings(
    column: pd.Series, levels: pd.Series, numbers_by_value: dict[Hashable, int | float]
) -> bool:
    """Return whether a level has two spellings of a number, such as "01" and "1".

    Under one level they are names of two different blocks.
    """
    for _, values in column.groupby(levels, sort=False):
        texts = {
            value
            for value in values.unique()
            if isinstance(value, str) and value in numbers_by_value
        }
        if len({numbers_by_value[text] for text in texts}) < len(texts):
            return True
    return False


def _parse_number(value: object) -> int | float | None:
    """Return a number, or the number that a text spells; None for anything else.

    A text such as "3.0" is an integer. Texts that begin with a sign or are surrounded by spaces are
    numbers, too.
    """
    if isinstance(value, str):
        if not NUMBER_PATTERN.fullmatch(value):
            return None
        # Integers are not converted by `float`, which would round large ones.
        if value.strip().lstrip("+-").isdigit():
            return int(value)
        number = float(value)
        return int(number) if number.is_integer() else number
    return value if _type_name(value) == "numbers" else None  # type: ignore[return-value]
