"""The prompts that the drafters of the benchmarks were trained on: prompt sets in, two prompt files out.

    python benchmarks/rollout_prompts.py --output prompts gsm8k_train.jsonl mbpp.jsonl self_instruct.jsonl ...

`chat.jsonl` holds all rows with `messages`, shuffled with a fixed seed; `code.jsonl` holds raw completion prompts made
from the rows that have a reference program: half a file as an editor would send it. Continue both with
`draftloop generate` and give both to `draftloop train --rollouts`.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
from pathlib import Path
from typing import Any

from references import write_text

SEED = 0
CUT_SHARE = 0.25  # of the programs also give a prompt without a docstring, cut after a third of their lines


def read_rows(files: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def signature(program: str) -> str | None:
    """The head of the last top-level function, such as `def f(a, b):`; None if the program has none or is no Python."""
    try:
        functions = [node for node in ast.parse(program).body if isinstance(node, ast.FunctionDef)]
    except SyntaxError:
        return None
    return f"def {functions[-1].name}({ast.unparse(functions[-1].args)}):" if functions else None


def example(test: str) -> list[str]:
    """`assert f(1) == 2` as the two lines of a doctest; nothing if the test has another form."""
    try:
        statement = ast.parse(test).body[0]
    except (SyntaxError, IndexError):
        return []
    if not (isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare)):
        return []
    return [f">>> {ast.unparse(statement.test.left)}", ast.unparse(statement.test.comparators[0])]


def docstring_prompt(row: dict[str, Any]) -> str | None:
    """Imports, signature and docstring of a function that is still to be written."""
    head = signature(row["reference"])
    if head is None:
        return None
    task = row["messages"][0]["content"].split("\nThe code must pass")[0]
    task = task.removeprefix("Write a function to ").removeprefix("Write a python function to ").strip()
    lines = [task[:1].upper() + task[1:], *(line for test in row["test_list"][:2] for line in example(test))]
    imports = [line for line in row["reference"].splitlines() if line.startswith(("import ", "from "))]
    body = "\n".join("    " + line for line in lines)
    return "\n".join([*imports, "", "", head, '    """' + body.strip(), '    """', ""]).lstrip("\n")


def cut_prompt(row: dict[str, Any]) -> str | None:
    """The first third of the program, at least two lines of it."""
    lines = row["reference"].replace("\r", "").splitlines()
    return "\n".join(lines[: max(2, len(lines) // 3)]) + "\n" if len(lines) >= 5 else None


def code_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    programs = [row for row in rows if row.get("test_list")]
    made = [(row, "docstring", docstring_prompt(row)) for row in programs]
    made += [(row, "cut", cut_prompt(row)) for row in programs[: round(CUT_SHARE * len(programs))]]
    return [
        {"id": f"{row['id']}-{form}", "category": "code-raw", "source": row["source"], "prompt": prompt}
        for row, form, prompt in made
        if prompt
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", type=Path, help="JSONL files")
    parser.add_argument("--output", type=Path, default=Path("prompts"), help="folder of the two files")
    args = parser.parse_args()
    rows = read_rows(args.prompts)
    args.output.mkdir(parents=True, exist_ok=True)
    chat = [row for row in rows if row.get("messages")]
    for name, kept in (("chat", chat), ("code", code_rows(rows))):
        random.Random(SEED).shuffle(kept)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
        write_text(args.output / f"{name}.jsonl", text)
        print(f"{args.output / name}.jsonl: {len(kept)} rows")


if __name__ == "__main__":
    main()
