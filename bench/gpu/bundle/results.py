"""Sums up what Go's test programs printed.  usage: results.py tests.txt tests.json run|skip

run: a test that did not pass is a failure, and so is a package without tests. skip: a test that was not skipped is.
"""
import collections
import json
import re
import sys

text, out, mode = sys.argv[1:]
package, exits, results, details = "", {}, collections.OrderedDict(), collections.defaultdict(list)
with open(text) as f:
    for line in f:
        if m := re.match(r"== package (\S+)", line):
            package = m[1]
        elif m := re.match(r"== exit (\d+)", line):
            exits[package] = int(m[1])
        elif m := re.match(r"\s*--- (PASS|FAIL|SKIP): (\S+) \(([\d.]+)s\)", line):
            # A rank prints its test's result before the test itself does: the last word counts.
            results[package, m[2]] = {"package": package, "test": m[2], "result": m[1], "seconds": float(m[3])}
        elif m := re.match(r"=== RUN +(\S+)", line):
            results.setdefault((package, m[1]), {"package": package, "test": m[1], "result": "NO END", "seconds": 0})
want = "SKIP" if mode == "skip" else "PASS"
count = collections.Counter(r["result"] for r in results.values())
bad = [r for r in results.values() if r["result"] != want]
empty = [p for p in exits if not any(r["package"] == p for r in results.values())]
ended = {p: e for p, e in exits.items() if e != 0}
with open(out, "w") as f:
    json.dump({"count": count, "exits": exits, "tests": list(results.values())}, f, indent=1)
print(", ".join(f"{n} {k}" for k, n in sorted(count.items())) or "no tests")
for r in bad:
    print("  {result} {package} {test}".format(**r))
for p in empty:
    print("  no tests in", p)
for p, e in ended.items():
    print(f"  {p} ended with {e}")
sys.exit(1 if bad or empty or ended or not exits else 0)
