"""The process behind :func:`kda_lib.compile.compile_isolated`: one pickled job on standard input, one result out."""

from __future__ import annotations

import os
import pickle
import sys

from kda_lib.compile import Artifact, compile_kernel
from kda_lib.errors import KdaError


def main() -> None:
    config, arch, cache = pickle.load(sys.stdin.buffer)
    # The compiler may print; what it prints must not mix with the result.
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    outcome: Artifact | Exception
    try:
        outcome = compile_kernel(config, arch, cache=cache)
    except (KdaError, TypeError, ValueError) as error:
        outcome = error
    with result:
        pickle.dump(outcome, result)


if __name__ == "__main__":
    main()
