"""The Python side's end of the benchmarks: answers the requests of package pair."""
import json
import os
import resource
import sys
import time
import traceback


def measure(n, work):
    """What one of n things took, which work() does: seconds, processor seconds, and how often a thread went to sleep."""
    sleeps, cpu, begin = _usage().ru_nvcsw, time.process_time(), time.perf_counter()
    work()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {"seconds": [seconds / n], "cpu": [cpu / n], "switches": [(_usage().ru_nvcsw - sleeps) / n]}


def peak_memory():
    return _usage().ru_maxrss * 1024


def memory():
    """What of this process is in memory, in bytes; proportional: pages shared with others count in part."""
    fields = {}
    with open("/proc/self/smaps_rollup") as f:
        for line in f:
            words = line.split()
            if words[0] in ("Rss:", "Pss:", "Private_Clean:", "Private_Dirty:"):
                fields[words[0]] = int(words[1]) * 1024
    return {"resident": [fields["Rss:"]], "proportional": [fields["Pss:"]],
            "private": [fields["Private_Clean:"] + fields["Private_Dirty:"]]}


def _usage():
    return resource.getrusage(resource.RUSAGE_SELF)


def serve(handle, ready=None):
    """Answers requests until there are no more. handle(request) gives a dict of lists of numbers."""
    # What libraries print must not come between the lines.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(reply):
        out.write(json.dumps(reply) + "\n")
        out.flush()

    say({"values": ready or {}})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            say({"values": handle(request)})
        except Exception:
            say({"error": request["do"] + ": " + traceback.format_exc()})
