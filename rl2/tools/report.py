"""`rl2 report RUN [RUN ...]`: one HTML file with the curves and answers of runs."""

import argparse
from pathlib import Path

from rl2.report.page import write_page


def main() -> None:
    """Writes the report and prints where it is. Exits with status 2 if that is impossible."""
    parser = argparse.ArgumentParser(
        prog="rl2 report",
        description="Writes the curves and answers of runs into one HTML file, which a browser "
        "opens without a server or a network.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument(
        "--out",
        type=Path,
        help="the file to write; RUN/report.html of one run, report.html here of several",
    )
    arguments = parser.parse_args()
    folder = arguments.runs[0] if len(arguments.runs) == 1 else Path()
    path = arguments.out or folder / "report.html"
    try:
        write_page(arguments.runs, path)
    except (OSError, ValueError) as error:
        parser.exit(2, f"rl2 report: {error}\n")
    size = path.stat().st_size
    print(f"{path} ({size / 1e6:.1f} MB)" if size >= 1e6 else f"{path} ({size / 1e3:.0f} kB)")
