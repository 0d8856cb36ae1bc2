"""The figures of the README's table: `redraft decide`, by default on the built-in model with n-gram lookup.

    python benchmarks/decide.py [options of redraft decide]

Every arm's text is compared with that of the arm without speculation; figures are printed only if all
are equal.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "decide.json"
        command = [sys.executable, "-m", "redraft", "decide"]
        done = subprocess.run([*command, "--json", str(out), *sys.argv[1:]], check=False)
        if done.returncode:
            sys.exit(done.returncode)
        report = json.loads(out.read_text())
    for run in report["runs"]:
        assert run["num_completed"] == run["num_tasks"], run["failures"]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
