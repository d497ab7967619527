"""`.ci/run` ends with the counts of all tests, whatever became of the suites."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MAKE = """#!{python}
import json, os, sys
from pathlib import Path
Path("until").write_text(os.environ["COMFY_SAGE2_FETCH_UNTIL"])
if sys.argv[1] == "new-records":
    sys.exit()
if sys.argv[1] == "--keep-going":
    sys.exit(2)
Path("build/test-suites").mkdir(parents=True, exist_ok=True)
for suite, counts in {records}.items():
    record = {{"counts": dict(error=0, **counts), "skipped": {{}}, "skipped_as_a_whole": {{}}}}
    Path("build/test-suites", suite + ".json").write_text(json.dumps(record))
print("make: something went wrong" if {status} else "", file=sys.stderr)
sys.exit({status})
"""
GOOD = {"gpu": dict(passed=0, failed=0, skipped=9), "unit": dict(passed=5, failed=0, skipped=1)}
BAD = {**GOOD, "windows": dict(passed=1, failed=2, skipped=0)}


@pytest.mark.skipif(os.name == "nt", reason=".ci/run is a script for sh")
@pytest.mark.parametrize(
    "records, status, last",
    [
        (GOOD, 0, "tests: 5 passed, 0 failed, 10 skipped"),
        (GOOD, 2, "tests: 5 passed, 0 failed, 10 skipped"),
        (BAD, 2, "tests: 6 passed, 2 failed, 10 skipped"),
        ({}, 2, "tests: 0 passed, 0 failed, 0 skipped"),
    ],
    ids=["good", "no test failed, but something else did", "bad", "nothing ran"],
)
def test_the_last_line_counts_all_tests(
    tmp_path: Path, records: dict[str, dict[str, int]], status: int, last: str
) -> None:
    for path in (".ci/run", "tools/__init__.py", "tools/test_summary.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(MAKE.format(python=sys.executable, records=json.dumps(records), status=status))
    make.chmod(0o755)
    before = time.time()
    environment = os.environ | {"PATH": f"{make.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [tmp_path / ".ci" / "run"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.stdout.endswith(f"{last}\n"), done.stdout
    assert (done.returncode == 0) == (status == 0 and records == GOOD)
    assert ("FAILED, see above" in done.stdout) == (status != 0)
    assert "not every environment could be made" in done.stdout
    until = json.loads((tmp_path / "until").read_text())
    assert 0 < until - before <= 60 * 60, "an hour at most for what is fetched, half an hour at least for the tests"


def test_every_suite_is_asked_for_and_the_skipped_one_first() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    found = re.findall(r"^make -k (.*) </dev/null", script, re.MULTILINE)
    goals = [word for line in found for word in line.split() if word.isalpha() or word.endswith("-tests")]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    suites = set(re.findall(r"\b([a-z]+-tests)\b(?= .*:|:)", makefile)) - {"quick-tests"}
    assert set(goals) == {"lint", *suites}
    assert goals[:2] == ["lint", "gpu-tests"]
    known = re.search(r"^TORCH_VERSIONS \?= (.*)$", makefile, re.MULTILINE)
    taken = re.search(r'^TORCH_VERSIONS="(.*)"\nexport TORCH_VERSIONS$', script, re.MULTILINE)
    assert known is not None and taken is not None
    assert taken[1].split() == [known[1].split()[0], known[1].split()[-1]], "the oldest and the newest"
    fetching = [goals.index(f"{name}-tests") for name in ("windows", "arm", "torch")]
    assert max(fetching) < min(goals.index(f"{name}-tests") for name in ("unit", "comfyui"))
