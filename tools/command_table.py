"""Writes the arguments of the training commands as data, from the dataclasses of TRL and transformers that are installed.

python -m tools.command_table
"""

from __future__ import annotations

from isotype.train.command.spec import TABLE, table_text


def main() -> None:
    TABLE.write_text(table_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
