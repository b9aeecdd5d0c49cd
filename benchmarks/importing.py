"""The time that `import shoal` takes, beside NumPy, net of the interpreter's own start."""

from __future__ import annotations

import subprocess
import sys
import time

from rows import print_row

ROUNDS = 15
STATEMENTS = {"interpreter": "pass", "numpy": "import numpy", "shoal": "import shoal"}


def start_ms(statement: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    for statement in STATEMENTS.values():
        start_ms(statement)
    samples: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(ROUNDS):
        for name, statement in STATEMENTS.items():
            samples[name].append(start_ms(statement))
    bare = sorted(samples.pop("interpreter"))[ROUNDS // 2]
    net = {name: [value - bare for value in values] for name, values in samples.items()}
    print_row("import, net of the interpreter", {"interpreter_ms": round(bare, 1)}, net, "ms")


if __name__ == "__main__":
    main()
