"""Runs the sweep: `python -m tests.spelled --cases 200 --only attention`."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from tests.spelled import sweep


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.spelled")
    parser.add_argument("--cases", type=int, default=200, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--seeds", type=int, default=4, help="draws of data for a case")
    parser.add_argument("--only", default="", help="part of a spelling's name")
    parser.add_argument("--data", default="", help="part of a situation's name")
    parser.add_argument("--precision", choices=["bf16", "fp16"], default="")
    parser.add_argument("--issue", action="store_true", help="only the issue's cases")
    parser.add_argument("--no-fuse", action="store_true", help="replace nothing")
    parser.add_argument("--list", action="store_true", help="the names of spellings")
    parser.add_argument("--table", action="store_true", help="all, not failures alone")
    parser.add_argument("--seconds", type=float, default=1e9, help="when to stop")
    return parser.parse_args()


def main() -> int:
    args = asked()
    if args.list:
        print("\n".join(name for name in sweep.SPELLINGS if args.only in name))
        return 0
    torch.set_num_threads(1)
    precisions = [args.precision] if args.precision else ["bf16", "fp16"]
    cases = [c for c in sweep.issue_cases(precisions) if args.only in c.name]
    if not args.issue:
        cases += sweep.sampled(args.cases, args.seed, args.only, args.precision)
    cases = [case for case in cases if args.data in str(case.situation)]
    start, results = time.monotonic(), []
    for result in sweep.timed(
        sweep.swept(cases, args.seeds, not args.no_fuse), args.seconds
    ):
        results.append(result)
        if result.verdict.fails:
            print(sweep.line(result), file=sys.stderr, flush=True)
    failures = [r for r in results if r.verdict.fails]
    shown = results if args.table else failures
    print("\nWorst first: ours / autocast's error\n")
    print(sweep.table(shown))
    gone = sum(bool(r.vanishes) for r in failures)
    print(
        f"\n{len(results)} cases in {time.monotonic() - start:.0f} s, "
        f"{len(failures)} fail, {gone} of them not with fuse=False"
    )
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
